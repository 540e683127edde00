"""The benchmarks' harness: operand sets beyond L2, sides timed in alternation, cases one after the other, results.

Each timing replays a CUDA graph of many calls, which rotate through enough operands to exceed L2, so that neither the
host nor the cache stands in for device memory, between events of that graph. Sides alternate with pauses: a GPU that
has just been loaded is slower.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

from facts import machine, now

import atomr_cutlass as ac
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.jit import kernels
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.devices import Device

PAUSE_SECONDS = 0.025
BURST_SECONDS = 1.5e-3
"""Device time of one timing: long beside the events' resolution, short enough not to heat the GPU."""
QUICK_SECONDS = 0.3e-3
"""Of one of many candidates, of which the fastest are timed again."""
FINALISTS = 4
SETS_AT_LEAST = 3
L2_TIMES = 4
"""The bytes of all sets of operands over those of L2, at least."""
SETS_AT_MOST = 96
CALLS_AT_MOST = 400
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError)
"""Exceptions by which PyTorch says that it does not compute something."""

LARGEST = 448.0
"""Of e4m3."""
BLOCK = 128
"""Elements along K that share a scale, and along N."""
AGREEMENT = 1e-2
"""How far two results may be apart, in norm: bf16 and 14 bits of fast accumulation explain less."""

Call = Callable[[Any], object]
"""Computes with one set of operands."""
Row = dict[str, Any]
T = TypeVar("T")


def set_count(moved: int, device: Device, *, most: int = SETS_AT_MOST) -> int:
    """The number of operand sets, of so many bytes each: three, or as many as exceed L2 four times over."""
    return min(most, max(SETS_AT_LEAST, math.ceil(L2_TIMES * device.l2_bytes / moved)))


def torch_dtype(dtype: CutlassDtype | None) -> torch.dtype:
    """PyTorch's name of an element type; None is bytes of bits."""
    found = torch.uint8 if dtype is None else getattr(torch, dtype.numpy_name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"PyTorch has no {dtype}")
    return found


def quantized(wide: torch.Tensor, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., rows, k) as e4m3, and its scales: of rows (block_rows 0), or of blocks of so many rows and 128 of k."""
    *batch, rows, k = wide.shape
    if not block_rows:
        scale = wide.abs().amax(-1, keepdim=True) / LARGEST
        return (wide / scale).to(torch.float8_e4m3fn), scale
    blocks = wide.reshape(*batch, rows // block_rows, block_rows, k // BLOCK, BLOCK)
    scale = blocks.abs().amax((-3, -1), keepdim=True) / LARGEST
    return (blocks / scale).reshape(wide.shape).to(torch.float8_e4m3fn), scale[..., 0, :, 0]


# ----------------------------------------------------------------------------------------------------------------------
# Timing


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _eager(call: Call, sets: Sequence[Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for index in range(count):
        call(sets[index % len(sets)])
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


class Burst:
    """A CUDA graph of many calls, and the time of one of them.

    From an event before a replay to the first kernel it takes some 30 us, more after a pause. So the events are nodes
    of the graph, and a call that is not counted comes before the first.
    """

    def __init__(self, call: Call, sets: Sequence[Any], seconds: float = BURST_SECONDS) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        # torch.cuda.graph would collect garbage and empty caches each time, which takes longer than the timing.
        with torch.cuda.stream(stream):
            # Libraries allocate what they need for a stream at its first use, which a capture must not see.
            _eager(call, sets, 2)
            estimate = _eager(call, sets, 3)
            self.calls = max(2, min(CALLS_AT_MOST, math.ceil(seconds / max(estimate, 1e-6))))
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()
            call(sets[-1])
            self._start.record()
            for index in range(self.calls):
                call(sets[index % len(sets)])
            self._end.record()
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph.replay()
        torch.cuda.synchronize()

    def __call__(self) -> float:
        """Seconds of one call, over one burst."""
        self._graph.replay()
        # An event that a graph records counts as reached until then.
        torch.cuda.current_stream().synchronize()
        return self._start.elapsed_time(self._end) / 1e3 / self.calls

    def state(self) -> dict[str, float]:
        """Clock and power of the GPU while it computes; nothing without NVML."""
        self._graph.replay()
        try:
            return {"clock_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1e3}
        except (ImportError, RuntimeError):
            return {}
        finally:
            torch.cuda.synchronize()


def alternated(
    sides: Mapping[T, Callable[[], float]], rounds: int, pause: float = PAUSE_SECONDS
) -> dict[T, list[float]]:
    """The timings of each side, of every round: one side after the other, with pauses, now the last one first."""
    times: dict[T, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sorted(sides, reverse=number % 2 == 0):  # type: ignore[type-var]
            time.sleep(pause)
            times[side].append(sides[side]())
    return times


def fastest_first(bursts: Mapping[T, Burst], first: T | None = None) -> list[T]:
    """Candidates by time: all by one burst, the fastest few, and `first`, again in alternation."""
    once = {candidate: burst() for candidate, burst in bursts.items()}
    order = sorted(once, key=once.__getitem__)
    finalists = order[:FINALISTS] + [candidate for candidate in order[FINALISTS:] if candidate == first]
    times = alternated({candidate: bursts[candidate] for candidate in finalists}, 3, pause=QUICK_SECONDS)
    finalists.sort(key=lambda candidate: statistics.median(times[candidate]))
    return finalists + [candidate for candidate in order if candidate not in finalists]


def compared(
    calls: Mapping[str, Call], sets: Sequence[Any], rounds: int, flops: float, pause: float = PAUSE_SECONDS
) -> Row:
    """The part of a row that says how fast `ours` is, and the other sides.

    `us` and `tflops` are ours; `torch_us`, `torch_tflops` and `torch_ratio`, its time over ours (above 1 we are
    faster), those of a side `torch`, and so on. `clock_mhz` and `watts` are the GPU's while it computes ours.
    """
    bursts = {side: Burst(call, sets) for side, call in calls.items()}
    times = alternated(bursts, rounds, pause)
    seconds = {side: statistics.median(found) for side, found in times.items()}
    ours = seconds.pop("ours")
    row: Row = {"us": round(ours * 1e6, 2), "tflops": round(flops / ours / 1e12, 2)}
    for side, other in seconds.items():
        row |= {
            f"{side}_us": round(other * 1e6, 2),
            f"{side}_tflops": round(flops / other / 1e12, 2),
            f"{side}_ratio": round(other / ours, 4),
        }
    spread = round((max(times["ours"]) - min(times["ours"])) / ours, 3)
    return row | {"spread": spread, "sets": len(sets), "calls": bursts["ours"].calls, **bursts["ours"].state()}


def timed(call: Call, sets: Sequence[Any], seconds: float) -> float:
    """Seconds of one call: the median of a few bursts, with pauses as long as they are."""
    burst = Burst(call, sets, seconds)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        times.append(burst())
        time.sleep(min(0.01, time.perf_counter() - start))
    return statistics.median(times)


# ----------------------------------------------------------------------------------------------------------------------
# Other sides


def first_that_works(calls: Iterable[tuple[str, Call]], operands: Any) -> tuple[str, Call | None, list[str]]:
    """The first call that computes, by name, and why those before it did not; without one an empty name and None."""
    refused = []
    for name, call in calls:
        try:
            call(operands)
            torch.cuda.synchronize()
        except REFUSALS as error:
            lines = str(error).strip().splitlines() or [""]
            refused.append(f"{name}: {type(error).__name__}: {lines[0]}"[:400])
            continue
        return name, call, refused
    return "", None, refused


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of two results, in norm, relative to the second."""
    pairs = list(zip(ours.flatten().split(1 << 26), theirs.flatten().split(1 << 26), strict=True))
    apart = sum(float((x.double() - y.double()).norm()) ** 2 for x, y in pairs)
    whole = sum(float(y.double().norm()) ** 2 for _, y in pairs)
    return round(math.sqrt(apart / whole), 6) if whole else math.sqrt(apart)


# ----------------------------------------------------------------------------------------------------------------------
# Every cell


def compile_ahead(keys: Iterable[KernelKey], device: Device, jobs: int) -> None:
    """Compiles kernels, several at once; what fails says so again when its case comes."""
    wanted, start = list(dict.fromkeys(keys)), time.perf_counter()

    def compiled(key: KernelKey) -> str:
        try:
            kernels.load(key, kernels.target_for(key, device))
        except ac.CutlassError as error:
            return f"{key.name}: {type(error).__name__}: {error}"[:600]
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        for failure in filter(None, pool.map(compiled, wanted)):
            print(failure)
    print(f"{len(wanted)} kernels are there after {time.perf_counter() - start:.0f} s", flush=True)


def against_best(case: object, rows: Sequence[Row], options: Sequence[str] = ()) -> Row:
    """The model's choice, which the first row is, the fastest kernel, and how much slower the former is.

    Args:
        case: for the printed line.
        rows: of the case's kernels; `us` is None of those that could not be timed.
        options: fields of the fastest one's row to print.
    """
    measured = [row for row in rows if row["us"]]
    if not measured:
        return {"case": str(case), "problem": "no kernel"}
    chosen, best = rows[0], min(measured, key=lambda row: float(row["us"]))
    loss = chosen["us"] / best["us"] if chosen["us"] else math.inf
    shown = "".join(f" {name}={best[name]}" for name in options)
    print(
        f"{case!s:<46}chosen {chosen['us']!s:>9} us, "
        f"best {best['us']:>9} us ({loss:.2f}x of it) {best['kernel']}{shown}",
        flush=True,
    )
    return {"case": str(case), "chosen": chosen["kernel"], "best": best["kernel"], "loss": round(loss, 3)}


# ----------------------------------------------------------------------------------------------------------------------
# Results


def means(rows: Iterable[Row], group: Callable[[Row], str], ratio: str = "torch_ratio") -> dict[str, float]:
    """The geometric mean of the ratios of each group of rows."""
    found = defaultdict(list)
    for row in rows:
        if ratio in row:
            found[group(row)].append(float(row[ratio]))
    return {name: round(statistics.geometric_mean(ratios), 4) for name, ratios in sorted(found.items())}


class Results:
    """The results of a benchmark: a file that is written after each case.

    Attributes:
        values: what is written; `rows` and `failures` are lists.
    """

    def __init__(self, path: Path, **more: Any) -> None:
        """Begins a file with the facts that numbers depend on, and further ones."""
        device = devices.get(0)
        self.values: dict[str, Any] = {"date": now(), "machine": machine(), "device": dataclasses.asdict(device)}
        self.values |= {**more, "rows": [], "failures": []}
        self._path = path
        print(f"{device.name}; {len(ac.kernels())} kernels; torch {torch.__version__}")

    @property
    def rows(self) -> list[Row]:
        """The rows so far."""
        rows: list[Row] = self.values["rows"]
        return rows

    def run(self, cases: Iterable[Any], measure: Callable[[Any], None], seconds: float = math.inf) -> None:
        """Measures cases, none after so many seconds; `measure` adds rows, and what it raises becomes a failure."""
        start = time.monotonic()
        for case in cases:
            if time.monotonic() - start > seconds:
                self._fail(case, "out of time")
                continue
            try:
                measure(case)
            except (ac.CutlassError, RuntimeError, ValueError) as error:
                self._fail(case, f"{type(error).__name__}: {error}"[:800])
                print(f"{case!s:<46}{type(error).__name__}: {error}", flush=True)
            self.write()
            torch.cuda.empty_cache()

    def write(self) -> None:
        """Writes the results so far, a row a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({**self.values, "rows": []}, indent=1)
        body = ",\n".join("  " + json.dumps(row) for row in self.rows)
        rows = f'"rows": [\n{body}\n ]' if body else '"rows": []'
        self._path.write_text(head.replace('"rows": []', rows) + "\n", encoding="utf-8")

    def finish(self) -> int:
        """Writes the results, with the means printed if there are any; returns the exit status."""
        for name, mean in self.values.get("means", {}).items():
            print(f"{name:<24}{mean:>8.3f}")
        self.write()
        return 1 if self.values["failures"] else 0

    def _fail(self, case: object, error: str) -> None:
        self.values["failures"].append({"case": str(case), "error": error})


def gpu(seed: int = 0) -> Device | None:
    """The GPU, with PyTorch's random numbers seeded; without one says why and returns None."""
    reason = devices.problem()
    if reason:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return None
    torch.manual_seed(seed)
    return devices.get(0)
