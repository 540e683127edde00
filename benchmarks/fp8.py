"""fp8 GEMM against PyTorch's scaled product, in alternation; and every cell that could serve, for the model.

    python benchmarks/fp8.py --out fp8.json              # the comparison
    python benchmarks/fp8.py --seed 7 --count 20 --scalings tensor,rows --out random.json  # of shapes drawn at random
    python benchmarks/fp8.py --all --out fp8_cells.json  # every eligible cell of the matrix, compiled where needed

Operands are e4m3 quantized from normal numbers with the scales that both sides are given; results are bf16. Timings are
those of benchmarks/gemm.py: CUDA graphs of many calls that rotate through more operands than L2 holds, the two sides
alternating with pauses. Cases that PyTorch refuses are kept with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

import harness
from harness import (
    AGREEMENT,
    BLOCK,
    LARGEST,
    Call,
    Results,
    Row,
    against_best,
    compared,
    compile_ahead,
    difference,
    first_that_works,
    gpu,
    means,
    set_count,
    timed,
)  # fmt: skip
from shapes import draw, seed_facts

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator import matrix
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.gemm.kernels import GemmCandidate, GemmSearch
from atomr_cutlass.ops.gemm.plans import NO_SCALES, Scale, Scales, from_candidate, scale_forms, with_scales
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.planning import PlanOptions

D = CutlassDtype
E4M3 = D.F8E4M3

SCALINGS = ("none", "tensor", "rows", "block")
"""No scales (and then no comparison: PyTorch has none without), one number, rows and columns, 1x128 and 128x128."""

SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (4096, 4096, 14336),
    (4096, 4096, 7168),
    (2048, 2048, 2048),
    (2304, 2304, 2304),
    (3056, 3056, 3056),
    (3984, 4112, 2064),
    (512, 4096, 4096),
    (128, 4096, 4096),
    (128, 7168, 2048),
    (16, 4096, 4096),
)
QUICK = ((4096, 4096, 4096), (128, 4096, 4096))


@dataclass(frozen=True)
class Case:
    """A product to time: A row-major, B column-major, D row-major. One drawn at random has its class as `group`."""

    scaling: str
    fast: bool
    m: int
    n: int
    k: int
    group: str = ""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.scaling:<7}{'fast' if self.fast else 'full'} {self.m}x{self.n}x{self.k}"


def comparison(shapes: Sequence[tuple[Any, ...]], scalings: Sequence[str]) -> list[Case]:
    """The cases: block scales exclude fast accumulation, and other K and N than multiples of a block."""
    return [
        Case(scaling, fast, *shape)
        for shape in shapes
        for scaling in scalings
        for fast in ((False, True) if scaling != "block" else (False,))
        if scaling != "block" or shape[1] % BLOCK == shape[2] % BLOCK == 0
    ]


def drawn(classes: Sequence[str], count: int, seed: int) -> list[tuple[Any, ...]]:
    """(M, N, K, class) of shapes drawn at random, whose rows are aligned to 16 bytes; the classes by turns."""
    groups = [draw([name], count, seed, multiple=16) for name in classes]
    return [(of.m, of.n, of.k, of.group) for turn in zip(*groups, strict=True) for of in turn]


# ----------------------------------------------------------------------------------------------------------------------
# Operands


@dataclass(frozen=True)
class Operands:
    """The operands of one call. Scales are as both sides take them: that of A (M, K / 128) has M contiguous, that
    of B (K / 128, N / 128) has K contiguous.
    """  # noqa: D205

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    out: torch.Tensor


def quantized(rows: int, k: int, scaling: str, block_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random e4m3 (rows, k), contiguous along k, with scales (rows or blocks of them, 1 or blocks of k)."""
    wide = torch.randn(rows, k, dtype=torch.float32, device="cuda")
    if scaling in ("none", "tensor"):
        scale = wide.abs().amax() / LARGEST
        return (wide / scale).to(torch.float8_e4m3fn), None if scaling == "none" else scale
    if scaling == "block" and (rows % block_rows or k % BLOCK):
        raise ValueError(f"{rows} x {k} is no whole number of blocks of {block_rows} x {BLOCK}")
    return harness.quantized(wide, block_rows if scaling == "block" else 0)


def operand_sets(case: Case, device: devices.Device) -> list[Operands]:
    """As many sets of random operands as exceed L2 four times over."""
    moved = case.m * case.k + case.k * case.n
    sets = []
    for _ in range(set_count(moved, device)):
        a, scale_a = quantized(case.m, case.k, case.scaling, 1)
        b, scale_b = quantized(case.n, case.k, case.scaling, BLOCK)
        if scale_a is not None and scale_b is not None and case.scaling != "tensor":
            if case.scaling == "block":
                scale_a = scale_a.t().contiguous().t()
            scale_b = scale_b.contiguous().t()
        out = torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda")
        sets.append(Operands(a, b.t(), scale_a, scale_b, out))
    return sets


# ----------------------------------------------------------------------------------------------------------------------
# Our side


def spec(tensor: torch.Tensor) -> MatrixSpec:
    """A tensor as kernels are chosen for it."""
    view = operands.as_operand(tensor)
    return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "a tensor"), view.alignment)


def problem_of(case: Case, arrays: Operands) -> tuple[GemmProblem, Scales | None]:
    """The problem as kernels are chosen for it, and its scales."""
    math_mode = "fast" if case.fast else "default"
    problem = GemmProblem(a=spec(arrays.a), b=spec(arrays.b), c=None, d=spec(arrays.out), math=math_mode, device=0)
    if arrays.scale_a is None or arrays.scale_b is None:
        return problem, None
    specs = spec(arrays.scale_a), spec(arrays.scale_b)
    forms = scale_forms(problem, *specs)
    scales = Scales(*(Scale(s.shape, s.strides, form) for s, form in zip(specs, forms, strict=True)))
    return with_scales(problem, scales), scales


def our_call(problem: GemmProblem, scales: Scales | None, candidate: GemmCandidate, like: torch.Tensor) -> Call:
    """A function that launches a kernel on a set of operands.

    Raises:
        UnsupportedError: the kernel cannot implement the problem.
    """
    plan = from_candidate(problem, candidate, PlanOptions(like=like), scales or NO_SCALES)
    if scales is None:
        return lambda arrays: plan(arrays.a, arrays.b, out=arrays.out)
    return lambda arrays: plan(arrays.a, arrays.b, arrays.scale_a, arrays.scale_b, arrays.out)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's side


def torch_calls(case: Case) -> Iterator[tuple[str, Call]]:
    """The functions of PyTorch that may compute this product, by name."""
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": case.fast}

    def first(arrays: Operands) -> object:
        return torch._scaled_mm(arrays.a, arrays.b, arrays.scale_a, arrays.scale_b, **options, out=arrays.out)  # noqa: SLF001

    yield "torch._scaled_mm", first
    newer = getattr(torch.nn.functional, "scaled_mm", None)
    if newer is None or case.scaling == "none":
        return
    kinds = torch.nn.functional.ScalingType
    kinds_of = {
        "tensor": (kinds.TensorWise, kinds.TensorWise),
        "rows": (kinds.RowWise, kinds.RowWise),
        "block": (kinds.BlockWise1x128, kinds.BlockWise128x128),
    }[case.scaling]

    def second(arrays: Operands) -> object:
        return newer(
            arrays.a, arrays.b, arrays.scale_a, kinds_of[0], arrays.scale_b, kinds_of[1],
            output_dtype=torch.bfloat16, use_fast_accum=case.fast,
        )  # fmt: skip

    yield "torch.nn.functional.scaled_mm", second


# ----------------------------------------------------------------------------------------------------------------------
# Comparison


def compare(case: Case, device: devices.Device, rounds: int, backend: str) -> dict[str, Any]:
    """Times both sides, one after the other in every round."""
    sets = operand_sets(case, device)
    problem, scales = problem_of(case, sets[0])
    candidate = select.choose(GemmSearch(problem, device), backend=backend)
    calls = {"ours": our_call(problem, scales, candidate, sets[0].a)}
    row: dict[str, Any] = {
        "shape": [case.m, case.n, case.k],
        "group": case.group,
        "scaling": case.scaling,
        "fast": case.fast,
        "kernel": candidate.key.name,
        "origin": candidate.origin,
        "options": candidate.options,
        "model_us": round(candidate.seconds * 1e6, 2),
    }
    if case.scaling == "none":
        name, call, refused = "", None, ["PyTorch has no fp8 product without scales"]
    else:
        name, call, refused = first_that_works(torch_calls(case), sets[0])
    row["torch_call"], row["torch_refused"] = name, refused
    if call is not None:
        returned = call(sets[0])
        theirs = returned.clone() if isinstance(returned, torch.Tensor) else sets[0].out.clone()
        calls["ours"](sets[0])
        row["difference"] = difference(sets[0].out, theirs)
        # With another product than ours there is nothing to compare.
        if row["difference"] > AGREEMENT:
            refused.append(f"{name}: its result differs from ours by {row['difference']} of its norm")
        else:
            calls["torch"] = call
    return row | compared(calls, sets, rounds, case.flops)


def report(row: dict[str, Any], case: Case) -> None:
    """One line."""
    other = f"torch {row['torch_us']:>9} us: {row['torch_ratio']:.3f}" if "torch_ratio" in row else "torch has none"
    print(f"{case!s:<32}{row['us']:>10} us {row['tflops']:>7} TFLOP/s, {other}  {row['kernel']}", flush=True)
    for reason in [] if "torch_ratio" in row or case.scaling == "none" else row["torch_refused"]:
        print(f"    {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# Every cell


def eligible(problem: GemmProblem, device: devices.Device) -> list[GemmCandidate]:
    """Every cell of the matrix that serves a problem natively, with its row of the table where it has one."""
    arch = devices.require_arch(device)
    built = {info.key: info for info in ac.kernels(op="gemm")}
    found = []
    for key in matrix.expand("full", [arch]):
        if key.op == "gemm" and key.a is E4M3:
            try:
                candidate = select.candidate_of(GemmSearch(problem, device), key)
            except ac.UnsupportedError:
                continue
            found.append(dataclasses.replace(candidate, info=built.get(key)))
    return sorted(found, key=lambda candidate: candidate.seconds)


def lacking(cases: Sequence[Case], device: devices.Device) -> Iterator[KernelKey]:
    """The kernels that the cases need and the table lacks."""
    for case in cases:
        tiny = dataclasses.replace(case, m=2 * BLOCK, n=2 * BLOCK, k=2 * BLOCK)
        arrays = operand_sets(tiny, dataclasses.replace(device, l2_bytes=0))[0]
        yield from (found.key for found in eligible(problem_of(tiny, arrays)[0], device) if found.info is None)


def measure_all(case: Case, device: devices.Device, near: float, seconds: float) -> list[dict[str, Any]]:
    """Times every eligible cell, the one that would be chosen first; and options of the scheduler for the best."""
    sets = operand_sets(case, device)
    problem, scales = problem_of(case, sets[0])
    rows: list[dict[str, Any]] = []

    def measure(candidate: GemmCandidate, rank: int) -> float:
        key = candidate.key
        row: dict[str, Any] = {
            "shape": [case.m, case.n, case.k],
            "scaling": case.scaling,
            "fast": case.fast,
            "kernel": key.name,
            "generation": key.generation,
            "math": key.math,
            "tile": key.tile,
            "cluster": key.cluster,
            "mainloop": key.mainloop,
            "scheduler": key.scheduler,
            "epilogue": key.epilogue,
            "epilogue_schedule": key.epilogue_schedule,
            "align": [key.align_a, key.align_b, key.align_d],
            "split_k": candidate.split_k,
            "swizzle": candidate.swizzle,
            "raster": candidate.raster,
            "rank": rank,
            "model_us": round(candidate.seconds * 1e6, 2),
            "us": None,
        }
        rows.append(row)
        try:
            elapsed = timed(our_call(problem, scales, candidate, sets[0].a), sets, seconds)
        except ac.CutlassError as error:
            row["problem"] = f"{type(error).__name__}: {error}"[:400]
            return math.inf
        row["us"], row["tflops"] = round(elapsed * 1e6, 2), round(case.flops / elapsed / 1e12, 1)
        return elapsed

    ranked = eligible(problem, device)
    times = [measure(candidate, rank) for rank, candidate in enumerate(ranked)]
    best = min(times, default=math.inf)
    for rank, (candidate, elapsed) in enumerate(zip(ranked, times, strict=True)):
        tiles = math.ceil(case.m / candidate.key.tile[0]) * math.ceil(case.n / candidate.key.tile[1])
        if elapsed > near * best or tiles <= device.multiprocessors or candidate.key.generation != "sm90":
            continue
        for swizzle in (1, 2, 4, 8):
            for raster in (0, 1, 2):
                if (swizzle, raster) != (candidate.swizzle, candidate.raster):
                    measure(dataclasses.replace(candidate, swizzle=swizzle, raster=raster), rank)
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_shapes(text: str) -> list[tuple[int, int, int]]:
    """`4096x4096x4096,16x4096x4096`."""
    shapes = []
    for word in text.split(","):
        m, n, k = (int(part) for part in word.split("x"))
        shapes.append((m, n, k))
    return shapes


def parse_scalings(text: str) -> list[str]:
    """`rows,block`."""
    found = text.split(",")
    if not set(found) <= set(SCALINGS):
        raise argparse.ArgumentTypeError(f"valid: {', '.join(SCALINGS)}")
    return found


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="two shapes, fewer rounds")
    parser.add_argument("--all", action="store_true", help="time every eligible cell of the matrix instead")
    parser.add_argument("--shapes", type=parse_shapes, help="such as 4096x4096x4096,16x4096x4096")
    parser.add_argument("--seed", type=int, help="shapes drawn at random: even for fitting, odd for acceptance")
    parser.add_argument("--count", type=int, default=20, help="--seed: shapes of each class")
    parser.add_argument("--classes", default="few rows,mid,large", help="--seed: the classes")
    parser.add_argument("--scalings", type=parse_scalings, help=f"of {', '.join(SCALINGS)}; --all: none by default")
    parser.add_argument("--backend", default="auto", help="auto, prebuilt or jit")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the comparison")
    parser.add_argument("--near", type=float, default=1.1, help="--all: scheduler options within this factor of best")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after this time")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4), help="compilations at once")
    arguments = parser.parse_args()
    device = gpu(arguments.seed or 0)
    if device is None:
        return 1
    results, rounds = Results(arguments.out, **seed_facts(arguments.seed)), 7 if arguments.quick else arguments.rounds
    scalings = arguments.scalings or (["none"] if arguments.all else ["tensor", "rows", "block"])
    shapes = arguments.shapes or (QUICK if arguments.quick else SHAPES)
    if arguments.seed is not None:
        shapes = drawn(arguments.classes.split(","), arguments.count, arguments.seed)
    cases = comparison(shapes, scalings)

    def every_cell(case: Case) -> None:
        rows = measure_all(case, device, arguments.near, 0.7e-3)
        results.rows.extend(rows)
        results.values.setdefault("cases", []).append(against_best(case, rows, ("swizzle", "raster")))

    def measured(case: Case) -> None:
        row = compare(case, device, rounds, arguments.backend)
        results.rows.append(row)
        report(row, case)
        results.values["means"] = means(results.rows, _group)  # of torch

    if arguments.all:
        kinds = {(case.scaling, case.fast): case for case in cases}
        compile_ahead(lacking(list(kinds.values()), device), device, arguments.jobs)
    results.run(cases, every_cell if arguments.all else measured, arguments.seconds)
    return results.finish()


def _group(row: Row) -> str:
    """The scales, how products are added up, and the class of a shape that was drawn at random."""
    return f"{row['scaling']} {'fast' if row['fast'] else 'full'} {row['group']}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
