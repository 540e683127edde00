"""Compilation at run time: cold, from the disk, from memory; and what a plan and a launch cost beside prebuilt kernels.

    python benchmarks/jit.py --out results.json             # --quick: fewer cells and rounds

Without a GPU the first part only. The kernels are kept in a temporary folder, whatever the cache holds. Compiling takes
two cores: of a busy machine, nothing measured here is worth keeping.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from facts import machine, now
from fresh import candidate_of, operands_of, problem_of

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype, SmArch, _core
from atomr_cutlass.generator.epilogue.lower import COMMON, LINEAR, is_gated
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import cells, expand
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.toolchain import toolchain
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices, table

HERE = Path(__file__).resolve().parent
PAUSE_SECONDS = 0.02
LAUNCHES = 200
"""In a row: fewer than a stream queues before it makes the host wait."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell to compile, bf16 with every operand row-major, and how long that may take and should, on two cores."""

    name: str
    generation: str
    arch: SmArch
    tile: tuple[int, int, int]
    mainloop: str
    limit: float
    aim: float

    def matches(self, key: KernelKey) -> bool:
        """Whether a key is of this kind."""
        return (
            (key.generation, key.tile, key.mainloop) == (self.generation, self.tile, self.mainloop)
            and key.a is key.d is CutlassDtype.BF16
            and (key.layout_a, key.layout_b, key.layout_d, key.align_a, key.align_d) == ("r", "r", "r", 8, 8)
            and key.epilogue_schedule in ("", "tma")
            and key.scheduler in ("identity", "persistent")
        )

    def key(self) -> KernelKey:
        """The matrix's first such key, by preset."""
        return min((tier, key.name, key) for tier, key in cells([self.arch]) if self.matches(key))[2]


SM80 = Cell("sm80 128x128x32", "sm80", SmArch.SM80, (128, 128, 32), "multistage", 4.0, 2.0)
COOPERATIVE = Cell("sm90 128x256x64 cooperative", "sm90", SmArch.SM90A, (128, 256, 64), "cooperative", 6.0, 1.4)
PINGPONG = Cell("sm90 128x128x64 pingpong", "sm90", SmArch.SM90A, (128, 128, 64), "pingpong", 6.0, 1.4)


def other_cells() -> dict[str, KernelKey]:
    """Further kernels of sm_90a whose compilation is timed, by name: the matrix's first of each kind."""
    kinds: dict[str, Callable[[KernelKey], bool]] = {
        "common": lambda key: key.op == "gemm" and key.epilogue == COMMON,
        "gated": lambda key: key.op == "gemm" and is_gated(key.epilogue),
        "few rows": lambda key: key.op == "gemm" and key.mainloop == FEW,
        "fp8, full accumulation": lambda key: key.op == "gemm" and key.a is CutlassDtype.F8E4M3 and key.math != "fast",
        "grouped": lambda key: key.op == "grouped_gemm" and key.epilogue == LINEAR,
        "grouped, common": lambda key: key.op == "grouped_gemm" and key.epilogue == COMMON,
        "convolution": lambda key: key.op == "conv2d_fprop" and key.epilogue == LINEAR,
        "convolution, common": lambda key: key.op == "conv2d_fprop" and key.epilogue == COMMON,
    }
    keys = [key for key in expand("full", [SmArch.SM90A]) if key.generation == "sm90"]
    return {name: next(filter(wanted, keys)) for name, wanted in kinds.items()}


BACKENDS = ("prebuilt", "jit")
OTHERS_LIMIT = 6.0
DISK_LIMIT = 0.050
LAUNCH_LIMIT = 1e-6


def median(seconds: Sequence[float]) -> float:
    """The median, to four significant digits."""
    return float(f"{statistics.median(seconds):.4g}")


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_seconds() -> float:
    """Processor time of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ----------------------------------------------------------------------------------------------------------------------
# Without a GPU


def compiled(name: str, key: KernelKey, rounds: int, *, alone: bool) -> dict[str, Any]:
    """Compiles a kernel that is not in the cache, and leaves it there."""
    target = key.arch.value
    both, processor = [], []
    for _ in range(rounds):
        for entry in kernels.store().entries():
            if entry.info["name"] == key.name:
                entry.path.unlink()
        start, used = time.perf_counter(), processor_seconds()
        images, origin = kernels.load(key, target)
        both.append(time.perf_counter() - start)
        processor.append(processor_seconds() - used)
        if origin != "compiled":
            raise RuntimeError(f"{key.name} came from {origin}")
    result = {
        "cell": name,
        "kernel": key.name,
        "target": target,
        "seconds": median(both),
        "rounds": [round(seconds, 3) for seconds in both],
        "processor": median(processor),
        "bytes": {"kernel": len(images.kernel), "companion": len(images.companion)},
    }
    if alone:
        result["alone"] = {half: round(fresh(half, key)["compile"], 3) for half in ("kernel", "companion")}
    return result


def lookups(key: KernelKey, rounds: int) -> dict[str, Any]:
    """Of a kernel that is in the cache: seconds to find it on the disk and in memory."""
    target = key.arch.value
    kernels.load(key, target)
    disk = [timed(lambda: kernels.load(key, target)) for _ in range(rounds)]
    ran = [fresh("lookup", key) for _ in range(max(3, rounds // 10))]
    device = devices.imagined(key.arch)
    # A stand-in for what the driver makes of the code: memory is looked up before it.
    with mock.patch.object(_core, "JitKernel"), mock.patch.dict(kernels._kernels, clear=True):  # noqa: SLF001
        kernels.kernel(key, device)
        count = 1000
        memory = timed(lambda: [kernels.kernel(key, device) for _ in range(count)]) / count
    return {
        "kernel": key.name,
        "disk": median(disk),
        "disk_slowest": round(max(disk), 5),
        "fresh": {step: median([run[step] for run in ran]) for step in ran[0]},
        "memory": float(f"{memory:.4g}"),
    }


def fresh(mode: str, key: KernelKey) -> dict[str, float]:
    """Seconds of the steps of a fresh process (fresh.py), and of the process as a whole."""
    start = time.perf_counter()
    words = [sys.executable, str(HERE / "fresh.py"), mode, key.to_json()]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"fresh.py {mode} ended with {ran.returncode}: {ran.stderr.strip()[-2000:]}")
    steps: dict[str, float] = json.loads(ran.stdout)
    return {**steps, "the process": time.perf_counter() - start}


# ----------------------------------------------------------------------------------------------------------------------
# With a GPU


def table_keys(device: devices.Device) -> list[KernelKey]:
    """For each generation a kernel of the table that runs natively, as near to the cells above as there is one."""
    found = []
    for cell in (SM80, COOPERATIVE):
        rows = [
            info.key
            for info in table.kernels(op="gemm", dtype=CutlassDtype.BF16)
            if info.key.generation == cell.generation and info.key.arch is device.arch and info.key.d is info.key.a
            and info.key.scheduler != "streamk"
        ]  # fmt: skip
        if rows:
            found.append(
                min(rows, key=lambda key: (key != cell.key(), not cell.matches(key), key.tile != cell.tile, key.name))
            )
    return found


def plans(key: KernelKey, rounds: int) -> dict[str, float]:
    """Seconds to make a plan whose kernel has been used before."""
    problem, candidates = problem_of(key), {backend: candidate_of(key, backend) for backend in BACKENDS}
    for candidate in candidates.values():
        from_candidate(problem, candidate)
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for number in range(10 * rounds):
        for backend in alternating(number):
            times[backend].append(timed(lambda candidate=candidates[backend]: from_candidate(problem, candidate)))
    return {backend: median(values) for backend, values in times.items()}


def alternating(number: int) -> tuple[str, ...]:
    """The two sides, in turns the one and the other first."""
    return BACKENDS if number % 2 else BACKENDS[::-1]


def launches(key: KernelKey, rounds: int) -> dict[str, dict[str, float]]:
    """Host seconds of a launch through a kept plan, with what changes from one launch to the next."""
    sides = {backend: from_candidate(problem_of(key), candidate_of(key, backend)) for backend in BACKENDS}
    sets = [operands_of(key) for _ in range(2)]
    results = {}
    for changing in ("nothing", "pointers", "scalars", "pointers and scalars"):
        others = "pointers" in changing
        calls = [
            (*sets[number % 2 if others else 0], 1.0 + (number % 2 if "scalars" in changing else 0))
            for number in range(LAUNCHES)
        ]
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for number in range(-1, 3 * rounds):
            for backend in alternating(number):
                plan = sides[backend]
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                for a, b, out, alpha in calls:
                    plan(a, b, out=out, alpha=alpha, stream=0)
                seconds = (time.perf_counter() - start) / LAUNCHES
                _core.synchronize(0, 0)
                if number >= 0:  # the one before warms up
                    times[backend].append(seconds)
        prebuilt, jit = (median(times[backend]) for backend in BACKENDS)
        results[changing] = {
            "prebuilt": prebuilt,
            "jit": jit,
            "difference": float(f"{jit - prebuilt:.3g}"),
            "spread": float(f"{max(max(v) - min(v) for v in times.values()):.3g}"),
        }
    return results


def on_gpu(rounds: int) -> list[dict[str, Any]]:
    """The measurements that need a GPU, of a kernel of each generation that is in the table too."""
    measured = []
    for key in table_keys(devices.get(0)):
        print(f"on the GPU: {key.name}", flush=True)
        kernels.load(key, key.arch.value)
        count = max(3, rounds // 3)
        first = {backend: [fresh(backend, key) for _ in range(count)] for backend in BACKENDS}
        measured.append(
            {
                "kernel": key.name,
                "plan": plans(key, rounds),
                "launch": launches(key, rounds),
                "fresh": {
                    backend: {step: median([run[step] for run in ran]) for step in ran[0]}
                    for backend, ran in first.items()
                },
            }
        )
    return measured


# ----------------------------------------------------------------------------------------------------------------------
# Report


@dataclasses.dataclass(frozen=True)
class Line:
    """A measurement beside what it may be and should be, all in seconds; without one, a heading."""

    figure: str
    measured: float | None = None
    limit: float | None = None
    aim: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the limit is kept; None where there is none."""
        return None if self.limit is None or self.measured is None else self.measured <= self.limit

    def __str__(self) -> str:
        columns = [self.figure, amount(self.measured), amount(self.limit), amount(self.aim)]
        state = {None: "", True: "kept", False: "EXCEEDED"}[self.ok]
        return "{:<50}{:>10}{:>10}{:>10}  {}".format(*columns, state).rstrip()


def amount(seconds: float | None) -> str:
    """Seconds, in a unit that suits them."""
    if seconds is None:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    return ""


def report(results: dict[str, Any]) -> list[Line]:
    """Everything measured, a line each."""
    lines = []
    cells = {cell.name: cell for cell in (SM80, COOPERATIVE, PINGPONG)}
    for row, found in zip(results["compiled"], results["lookups"], strict=False):
        cell = cells[row["cell"]]
        lines += [Line(cell.name), Line("  cold compile", row["seconds"], cell.limit, cell.aim)]
        lines.append(Line("    processor time, both halves", row["processor"]))
        lines += [Line(f"    {half} alone", seconds) for half, seconds in row.get("alone", {}).items()]
        lines += [
            Line("  disk hit", found["disk"], DISK_LIMIT),
            Line("  disk hit in a fresh process", found["fresh"]["lookup"], DISK_LIMIT),
            *(Line(f"    {step}", t) for step, t in found["fresh"].items() if step != "lookup"),
            Line("  memory hit", found["memory"]),
        ]
    for row in results["others"]:
        lines.append(Line(f"{row['cell']}: cold compile", row["seconds"], OTHERS_LIMIT))
        lines.append(Line("    processor time, both halves", row["processor"]))
    for row in results["gpu"] or []:
        lines.append(Line(f"on the GPU: {row['kernel']}"))
        lines += [Line(f"  plan, {backend}", t) for backend, t in row["plan"].items()]
        for changing, times in row["launch"].items():
            lines += [Line(f"  launch, {backend}, changing {changing}", times[backend]) for backend in BACKENDS]
            lines.append(Line("    jit over prebuilt", times["difference"], LAUNCH_LIMIT))
        for backend, steps in row["fresh"].items():
            lines.append(Line(f"  fresh process, {backend}"))
            lines += [Line(f"    {step}", t) for step, t in steps.items()]
    return lines


def measure(results: dict[str, Any], *, quick: bool, write: Callable[[], None]) -> None:
    """Fills the results, and writes them after every part."""
    rounds = 1 if quick else 3
    chosen = (SM80, PINGPONG) if quick else (SM80, COOPERATIVE, PINGPONG)
    for cell in chosen:
        print(f"compiling {cell.name}", flush=True)
        results["compiled"].append(compiled(cell.name, cell.key(), rounds, alone=not quick))
        results["lookups"].append({"cell": cell.name, **lookups(cell.key(), 30 if quick else 100)})
        write()
    for name, key in other_cells().items():
        print(f"compiling {name}", flush=True)
        results["others"].append(compiled(name, key, 1, alone=False))
        write()
    if devices.available():
        results["gpu"] = on_gpu(5 if quick else 15)
        write()


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="two cells, fewer rounds")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "date": now(),
        "machine": {
            **machine(),
            "cpus": os.cpu_count(),
            "affinity": len(os.sched_getaffinity(0)),
            "load_before": os.getloadavg(),
        },
        "quick": arguments.quick,
        "compiled": [],
        "lookups": [],
        "others": [],
        "gpu": None,
    }

    def write() -> None:
        results["machine"]["load_after"] = os.getloadavg()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        # Of this process and of those that it starts.
        os.environ["ATOMR_CUTLASS_CACHE_DIR"] = str(Path(folder) / "kernels")
        kernels.store.cache_clear()
        try:
            tools = toolchain()
            results["toolchain"] = {"nvrtc": tools.build, "headers": tools.headers}
            cores = f"{results['machine']['affinity']} of {os.cpu_count()} cores"
            print(f"{cores}, load {os.getloadavg()[0]:.1f}; NVRTC: {tools.build}")
            measure(results, quick=arguments.quick, write=write)
        except (ac.CutlassError, RuntimeError) as error:
            results["failure"] = f"{type(error).__name__}: {error}"
            print(results["failure"], file=sys.stderr)
    lines = report(results)
    results["report"] = [{**dataclasses.asdict(line), "ok": line.ok} for line in lines]
    write()
    print("{:<50}{:>10}{:>10}{:>10}".format("", "measured", "limit", "aim"))
    print("\n".join(map(str, lines)))
    return 1 if "failure" in results else 0


if __name__ == "__main__":
    sys.exit(main())
