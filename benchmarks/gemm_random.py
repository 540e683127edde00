"""GEMM over shapes drawn at random, and over the layers of named models, against cuBLAS, in alternation.

    python benchmarks/gemm_random.py --seed 7 --count 100 --out random.json            # classes of shapes.py
    python benchmarks/gemm_random.py --seed 7 --classes "few rows,mid" --layouts rr --aligned --out some.json
    python benchmarks/gemm_random.py --suites llama-3-8b,deepseek-v3 --lt --out suites.json
    python benchmarks/gemm_random.py --seed 4 --count 20 --regret --out fit.json       # every eligible kernel too
    python benchmarks/gemm_random.py --seed 7 --count 20 --batch-invariant --out b.json  # what it costs

Ours is the kernel that the selection takes. PyTorch's side is `torch.matmul`; `--lt` adds the best of all candidates of
cuBLASLt's heuristic, `--triton N` what `torch.compile` makes with max-autotune of the first N shapes of each group. A
timing replays a CUDA graph of calls that rotate through at least three sets of operands and four times L2. Timings of
the sides alternate, with pauses. The bandwidth of reading alone is measured in the same run, clock and power beside
every row.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cublaslt import CublasLt
from gemm import Case, Operands, our_problem, schedules, splits
from harness import Results, compared, gpu, timed
from harness import difference as apart
from shapes import CLASSES, MODELS, Shape, draw, suite

import atomr_cutlass as ac
from atomr_cutlass.ops.gemm.kernels import GemmSearch, from_candidate, make
from atomr_cutlass.pipeline import devices, select

ALIGNMENT = 256
"""Bytes at which every operand begins, as allocations do."""
SETS_AT_LEAST = 3
L2_TIMES = 4
BANDWIDTH_BYTES = 4 << 30
OTHERS = ("torch", "lt", "triton", "invariant")
"""Sides that ours is compared with; the last is ours with `batch_invariant`."""
TENSOR_PEAK = {(9, 0): 989e12}
"""Dense bf16 and f16 rates, by the vendor's data sheets."""
MEMORY_PEAK = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
"""Bytes a second, likewise."""


class Pool:
    """Random numbers on the GPU, of which operands are views: as many sets as exceed L2, without drawing each."""

    def __init__(self, dtype: torch.dtype, elements: int) -> None:
        self._values = torch.empty(elements, dtype=dtype, device="cuda")
        piece = 1 << 26
        for start in range(0, elements, piece):
            part = self._values[start : start + piece]
            part.copy_(torch.randn(part.shape, device="cuda"))
        self._results = torch.empty(elements, dtype=dtype, device="cuda")

    def sets(self, shape: Shape, layouts: str, l2_bytes: int) -> list[Operands]:
        """Sets of operands that lie one behind the other."""
        size = self._values.element_size()
        step = ALIGNMENT // size
        first, second, result = (
            math.ceil(extent / step) * step for extent in (shape.m * shape.k, shape.k * shape.n, shape.m * shape.n)
        )
        cold = math.ceil(L2_TIMES * l2_bytes / ((first + second) * size))
        count = max(SETS_AT_LEAST, cold)
        count = min(count, self._values.numel() // (first + second), self._results.numel() // result)
        made = []
        for index in range(count):
            start = index * (first + second)
            a = self._values[start : start + shape.m * shape.k].view(shape.m, shape.k)
            flat = self._values[start + first : start + first + shape.k * shape.n]
            b = flat.view(shape.k, shape.n) if layouts[1] == "r" else flat.view(shape.n, shape.k).T
            out = self._results[index * result : index * result + shape.m * shape.n].view(shape.m, shape.n)
            made.append(Operands(a, b, out))
        return made


def read_bandwidth() -> float:
    """Bytes a second of summing a large array: the median of ten."""
    values = torch.ones(BANDWIDTH_BYTES // 4, dtype=torch.float32, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(11):
        start.record()
        values.sum()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return BANDWIDTH_BYTES / statistics.median(seconds[1:])


def bound_seconds(shape: Shape, device: devices.Device) -> float | None:
    """The least time by the vendor's rates: of the tensor cores, or of reading and writing everything once."""
    tensor, memory = TENSOR_PEAK.get(device.capability), MEMORY_PEAK.get(device.name)
    if tensor is None or memory is None:
        return None
    return max(shape.flops / tensor, shape.bytes(2) / memory)


@dataclasses.dataclass
class Sides:
    """The compared sides.

    Attributes:
        backend: where ours takes its kernels from, as in `gemm`.
        lt: cuBLASLt, or None.
        triton: shapes of each group that Triton compiles.
        invariant: whether ours is timed with `batch_invariant` too.
    """

    backend: str
    lt: CublasLt | None
    triton: int
    invariant: bool


def compare(
    shape: Shape, case: Case, sets: Sequence[Operands], sides: Sides, rounds: int, *, triton: bool
) -> dict[str, Any]:
    """Times all sides of one shape, one after the other in every round."""
    device = devices.get(0)
    plan = make(our_problem(case, sets[0]), like=sets[0].a, backend=sides.backend)
    calls: dict[str, Any] = {
        "ours": lambda one: plan(one.a, one.b, out=one.out),
        "torch": lambda one: torch.matmul(one.a, one.b, out=one.out),
    }
    if sides.invariant:
        fixed = make(our_problem(case, sets[0]), like=sets[0].a, backend=sides.backend, batch_invariant=True)
        calls["invariant"] = lambda one: fixed(one.a, one.b, out=one.out)
    product = None
    if sides.lt is not None:
        product = sides.lt.product(sets[0].a, sets[0].b, sets[0].out)
        product.tune([(operands.a, operands.b, operands.out) for operands in sets])
        calls["lt"] = lambda one: product(one.a, one.b, one.out)
    if triton:
        compiled = torch.compile(torch.matmul, mode="max-autotune-no-cudagraphs", dynamic=False)
        calls["triton"] = lambda one: compiled(one.a, one.b)
    difference = relative_difference(calls, sets[0])
    row = compared(calls, sets, rounds, shape.flops)
    if product is not None:
        product.close()
    bound = bound_seconds(shape, device)
    return {
        "group": shape.group,
        "shape": [shape.m, shape.n, shape.k],
        "aligned": shape.aligned,
        "dtype": case.kind,
        "layout": case.layouts.upper() + "R",
        "kernel": plan.kernel_name,
        "split_k": plan.main.split_k,
        "swizzle": plan.main.swizzle,
        "raster": plan.main.raster,
        "of_bound": round(bound / row["us"] * 1e6, 4) if bound else None,
        "model_us": round(plan.main.seconds * 1e6, 2),
        "difference": difference,
        **row,
        **state(),
    }


def state() -> dict[str, float]:
    """Clock and power of the GPU now; nothing without NVML."""
    try:
        return {"clock_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1e3}
    except (ImportError, RuntimeError):
        return {}


def relative_difference(calls: dict[str, Any], operands: Operands) -> float:
    """That of our result from PyTorch's, in norm: a check that both compute the same."""
    calls["torch"](operands)
    theirs = operands.out.clone()
    operands.out.fill_(math.nan)
    calls["ours"](operands)
    return apart(operands.out, theirs)


def regret(case: Case, sets: Sequence[Operands], device: devices.Device, seconds: float) -> dict[str, Any]:
    """Every eligible kernel of the table with each of its options, beside the one that is chosen."""
    problem = our_problem(case, sets[0])
    tried = []
    for rank, ranked in enumerate(
        c for c in select.rank(GemmSearch(problem, device)) if c.info.key.arch is device.arch
    ):
        options = [ranked]
        options += [dataclasses.replace(ranked, split_k=s) for s in splits(ranked) if s != ranked.split_k]
        options += [
            dataclasses.replace(ranked, swizzle=swizzle, raster=raster)
            for swizzle, raster in schedules(ranked)
            if (swizzle, raster) != (ranked.swizzle, ranked.raster)
        ]
        for choice in options:
            with contextlib.suppress(ac.UnsupportedError):
                plan = from_candidate(problem, choice, like=sets[0].a)
                elapsed = timed(lambda one, plan=plan: plan(one.a, one.b, out=one.out), sets, seconds)  # type: ignore[misc]
                tried.append((elapsed, rank, choice))
    if not tried:
        return {}
    chosen = tried[0][0]
    elapsed, rank, best = min(tried, key=lambda one: one[0])
    return {
        "chosen_us": round(chosen * 1e6, 2),
        "best_us": round(elapsed * 1e6, 2),
        "regret": round(chosen / elapsed - 1, 4),
        "best": [best.key.name, best.split_k, best.swizzle, best.raster, rank],
        "kernels_us": [[c.key.name, c.split_k, c.swizzle, c.raster, round(s * 1e6, 2)] for s, _, c in tried],
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per group, layout and alignment: geometric mean and 5th percentile of each ratio, and the mean of the regret."""
    found = []
    for group, layout, aligned in sorted({(row["group"], row["layout"], row["aligned"]) for row in rows}):
        of = [r for r in rows if (r["group"], r["layout"], r["aligned"]) == (group, layout, aligned)]
        entry: dict[str, Any] = {"group": group, "layout": layout, "aligned": aligned, "count": len(of)}
        for side in OTHERS:
            ratios = sorted(row[f"{side}_ratio"] for row in of if f"{side}_ratio" in row)
            if ratios:
                entry[side] = round(statistics.geometric_mean(ratios), 3)
                entry[f"{side}_p5"] = round(ratios[int(0.05 * len(ratios))], 3)
        regrets = sorted(row["regret"] for row in of if "regret" in row)
        if regrets:
            entry["regret"] = round(statistics.mean(regrets), 4)
            entry["regret_p95"] = round(regrets[min(len(regrets) - 1, int(0.95 * len(regrets)))], 4)
        found.append(entry)
    return found


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--seed", type=int, default=1, help="of the draw: even for fitting, odd for acceptance")
    parser.add_argument("--count", type=int, default=100, help="shapes of each class")
    parser.add_argument("--classes", default="", help=f"of {', '.join(CLASSES)}; default: all")
    parser.add_argument("--suites", default="", help=f"models instead: {', '.join(MODELS)}")
    parser.add_argument("--rows", default="", help="M of the suites, such as 1,16,4096")
    parser.add_argument("--layouts", default="rc", help="of A and B: rc, rr or rc,rr")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--aligned", action="store_true", help="aligned shapes only")
    parser.add_argument("--lt", action="store_true", help="the best candidate of cuBLASLt too")
    parser.add_argument(
        "--triton", type=int, default=0, metavar="N", help="the first N shapes of each group by Triton too"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="ours with batch_invariant too")
    parser.add_argument("--regret", action="store_true", help="time every eligible kernel of the table too")
    parser.add_argument("--backend", default="auto", choices=("auto", "prebuilt", "jit"), help="of our kernels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no shape after this time")
    arguments = parser.parse_args()
    device = gpu(arguments.seed)
    if device is None:
        return 1
    if arguments.suites:
        rows_of_m = [int(text) for text in arguments.rows.split(",")] if arguments.rows else None
        shapes = [
            shape
            for model in arguments.suites.split(",")
            for shape in (suite(model, rows_of_m) if rows_of_m else suite(model))
        ]
    else:
        names = arguments.classes.split(",") if arguments.classes else list(CLASSES)
        shapes = draw(names, arguments.count, arguments.seed, aligned=True if arguments.aligned else None)
    purpose = "acceptance" if arguments.seed % 2 else "fitting"
    results = Results(
        arguments.out, seed=arguments.seed, purpose=purpose, read_bytes_per_second=round(read_bandwidth())
    )  # fmt: skip
    sides = Sides(arguments.backend, CublasLt() if arguments.lt else None, arguments.triton, arguments.batch_invariant)
    # Large enough for three sets of the largest problem, and for four times L2.
    elements = max(
        [SETS_AT_LEAST * (shape.m * shape.k + shape.k * shape.n + 2 * ALIGNMENT) for shape in shapes]
        + [SETS_AT_LEAST * (shape.m * shape.n + ALIGNMENT) for shape in shapes]
        + [L2_TIMES * device.l2_bytes // 2 + (1 << 20)]
    )
    pool = Pool(getattr(torch, {"bf16": "bfloat16", "f16": "float16"}[arguments.dtype]), elements)
    seen = dict.fromkeys((shape.group for shape in shapes), 0)
    layouts = arguments.layouts.split(",")

    def measured(case: Case) -> None:
        shape = of[case]
        sets = pool.sets(shape, case.layouts, device.l2_bytes)
        triton = seen[shape.group] < sides.triton * len(layouts)
        seen[shape.group] += 1
        row = compare(shape, case, sets, sides, arguments.rounds, triton=triton)
        if arguments.regret:
            row.update(regret(case, sets, device, 0.7e-3))
        results.rows.append(row)
        others = "  ".join(f"{side} {row[f'{side}_ratio']:.3f}" for side in OTHERS if f"{side}_ratio" in row)
        print(f"{case!s:<30}{row['us']:>9} us  {others}  {row['kernel'][-90:]}", flush=True)
        results.values["summary"] = summary(results.rows)

    of = {Case(arguments.dtype, each, shape.m, shape.n, shape.k): shape for shape in shapes for each in layouts}
    results.run(of, measured, arguments.seconds)
    for entry in results.values.get("summary", []):
        print(entry)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
