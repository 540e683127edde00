"""Grouped GEMM against what PyTorch has, in alternation; and every cell that could serve, for the model.

    python benchmarks/grouped.py --out grouped.json              # the comparison and the cost of a call
    python benchmarks/grouped.py --all --out grouped_cells.json  # every eligible cell of the matrix, compiled if needed

bf16 against `torch._grouped_mm`, fp8 with scales of rows and columns against `torch._scaled_grouped_mm`, fp8 with block
scales against PyTorch's grouped product if it takes them, else against a loop of `scaled_mm` over the groups, whose
sizes the host knows then. Weights are contiguous along K, activations row-major; along K (weight gradients) both are
row-major. Timings are those of benchmarks/gemm.py: CUDA graphs of many calls, the two sides alternating with pauses.
Problems that PyTorch refuses are kept with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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

import numpy as np
from harness import (
    AGREEMENT,
    BLOCK,
    BURST_SECONDS,
    Call,
    Results,
    against_best,
    compared,
    compile_ahead,
    difference,
    first_that_works,
    gpu,
    means,
    quantized,
    set_count,
    timed,
)  # fmt: skip

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.grouped_gemm import kernels as grouped_plan
from atomr_cutlass.ops.grouped_gemm.problem import ALONG_K, CONTIGUOUS, GroupedProblem, GroupScale, scale_forms
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.search import Candidate

KINDS = ("bf16", "bf16 along k", "fp8 rows", "fp8 rows fast", "fp8 blocks")


@dataclass(frozen=True)
class Case:
    """Groups to time: rows of each (along K: elements of K), columns, and K (along K: rows of the result)."""

    kind: str
    name: str
    sizes: tuple[int, ...]
    n: int
    k: int

    @property
    def form(self) -> str:
        """Form of the operands."""
        return ALONG_K if self.kind == "bf16 along k" else CONTIGUOUS

    @property
    def fp8(self) -> bool:
        """Whether the operands are e4m3."""
        return self.kind.startswith("fp8")

    @property
    def fast(self) -> bool:
        """Whether fast accumulation is allowed."""
        return self.kind.endswith("fast")

    @property
    def blocks(self) -> bool:
        """Whether the scales are those of blocks."""
        return self.kind == "fp8 blocks"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * sum(self.sizes) * self.n * self.k

    def __str__(self) -> str:
        return f"{self.kind:<14}{self.name}"


def skewed(groups: int, total: int) -> tuple[int, ...]:
    """Sizes as routing makes them: a few large, many small, some empty."""
    rng = np.random.default_rng(groups)
    shares = rng.permutation(1.0 / np.arange(1, groups + 1))
    counts = np.floor(shares / shares.sum() * total).astype(int)
    counts[rng.random(groups) < 0.1] = 0
    return tuple(counts.tolist())


def small(groups: int, most: int) -> tuple[int, ...]:
    """From 1 to `most` rows each."""
    return tuple(np.random.default_rng(groups).integers(1, most + 1, groups).tolist())


SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "8x512x4096x7168": ((512,) * 8, 4096, 7168),
    "8x4096x7168x2048": ((4096,) * 8, 7168, 2048),
    "64 skewed x4096x2048": (skewed(64, 4096), 4096, 2048),
    "128 skewed x2048x2048": (skewed(128, 2048), 2048, 2048),
    "256 of 1-32 x2048x2048": (small(256, 32), 2048, 2048),
    "24 skewed x1880x2600": (skewed(24, 3000), 1880, 2600),
}
ALONG: dict[str, tuple[tuple[int, ...], int, int]] = {
    "8x4096 to 2048x7168": ((4096,) * 8, 7168, 2048),
    "64 skewed to 2048x4096": (skewed(64, 32768), 4096, 2048),
    "24 skewed to 2600x1880": (skewed(24, 20000), 1880, 2600),
}
QUICK = ("8x512x4096x7168", "128 skewed x2048x2048", "8x4096 to 2048x7168")


def comparison(kinds: Sequence[str], *, quick: bool) -> list[Case]:
    """The cases."""
    found = []
    for kind in kinds:
        shapes = ALONG if kind == "bf16 along k" else SHAPES
        found += [Case(kind, name, *shape) for name, shape in shapes.items() if not quick or name in QUICK]
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Operands


@dataclass(frozen=True)
class Operands:
    """The operands of one call. Of block scales, that of A (rows, K / 128) has the rows contiguous, and that of B
    (groups, K / 128, N / 128) K.
    """  # noqa: D205

    a: torch.Tensor
    b: torch.Tensor
    offsets: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    out: torch.Tensor

    @property
    def given(self) -> list[torch.Tensor]:
        """In the order of a plan's operands."""
        return [
            array for array in (self.a, self.b, self.offsets, self.scale_a, self.scale_b, self.out) if array is not None
        ]


def operand_set(case: Case) -> Operands:
    """Random operands."""
    groups, total = len(case.sizes), sum(case.sizes)
    offsets = torch.tensor(list(itertools.accumulate(case.sizes)), dtype=torch.int32, device="cuda")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    if case.form == ALONG_K:
        out = torch.empty(groups, case.k, case.n, dtype=torch.bfloat16, device="cuda")
        return Operands(normal(total, case.k).t(), normal(total, case.n), offsets, None, None, out)
    out = torch.empty(total, case.n, dtype=torch.bfloat16, device="cuda")
    if not case.fp8:
        return Operands(normal(total, case.k), normal(groups, case.n, case.k).mT, offsets, None, None, out)
    a, scale_a = quantized(normal(total, case.k).float(), int(case.blocks))
    b = torch.empty(groups, case.n, case.k, dtype=torch.float8_e4m3fn, device="cuda")
    scales = []
    for g in range(groups):  # one by one: in float32 they would take four times the memory
        b[g], scale = quantized(normal(case.n, case.k).float(), BLOCK if case.blocks else 0)
        scales.append(scale)
    if case.blocks:
        scale_a = scale_a.t().contiguous().t()
    return Operands(a, b.mT, offsets, scale_a, torch.stack(scales).mT, out)


def operand_sets(case: Case, device: devices.Device) -> list[Operands]:
    """As many sets as exceed L2 four times over."""
    size = 1 if case.fp8 else 2
    weights = 0 if case.form == ALONG_K else len(case.sizes) * case.n * case.k
    moved = (sum(case.sizes) * (case.k + (case.n if case.form == ALONG_K else 0)) + weights) * size
    return [operand_set(case) for _ in range(set_count(moved, device))]


# ----------------------------------------------------------------------------------------------------------------------
# Our side


def spec(tensor: torch.Tensor) -> MatrixSpec:
    """A tensor as kernels are chosen for it."""
    view = operands.as_operand(tensor)
    return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "a tensor"), view.alignment)


def problem_of(case: Case, arrays: Operands) -> GroupedProblem:
    """The problem as kernels are chosen for it."""
    problem = GroupedProblem(
        form=case.form, groups=len(case.sizes), a=(spec(arrays.a),), b=(spec(arrays.b),), c=(), d=(spec(arrays.out),),
        counted=False, math="fast" if case.fast else "default", device=0,
    )  # fmt: skip
    if arrays.scale_a is None or arrays.scale_b is None:
        return problem
    specs = spec(arrays.scale_a), spec(arrays.scale_b)
    forms = scale_forms(case.form, problem.groups, [problem.extents], *([tuple(s.shape)] for s in specs))
    scales = [GroupScale((s,), form) for s, form in zip(specs, forms, strict=True)]
    return dataclasses.replace(problem, scale_a=scales[0], scale_b=scales[1])


def our_call(plan: Plan) -> Call:
    """A function that launches a plan on a set of operands."""
    return lambda arrays: plan(*arrays.given)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's side


def torch_calls(case: Case) -> Iterator[tuple[str, Call]]:
    """The functions of PyTorch that may compute this product, by name; the first that works is taken."""
    if not case.fp8:
        yield "torch._grouped_mm", lambda arrays: torch._grouped_mm(arrays.a, arrays.b, offs=arrays.offsets)  # noqa: SLF001
        return
    options = {"use_fast_accum": case.fast}
    if not case.blocks:
        # Scales of rows and of columns are given without their dimension of one.
        yield (
            "torch._scaled_grouped_mm",
            lambda arrays: torch._scaled_grouped_mm(  # noqa: SLF001
                arrays.a, arrays.b, arrays.scale_a.squeeze(-1), arrays.scale_b.squeeze(-2), offs=arrays.offsets,
                out_dtype=torch.bfloat16, **options,
            ),
        )  # fmt: skip
        return
    functional: Any = torch.nn.functional
    yield (
        "torch.nn.functional.scaled_grouped_mm",
        lambda arrays: functional.scaled_grouped_mm(
            arrays.a, arrays.b, arrays.scale_a, functional.ScalingType.BlockWise1x128, arrays.scale_b,
            functional.ScalingType.BlockWise128x128, offs=arrays.offsets, output_dtype=torch.bfloat16, **options,
        ),
    )  # fmt: skip
    yield "a loop of torch.nn.functional.scaled_mm", _loop(case)


def _loop(case: Case) -> Call:
    """One product after the other, with scales of their own that are made beforehand."""
    functional: Any = torch.nn.functional
    kept: dict[int, list[torch.Tensor]] = {}
    stops = list(itertools.accumulate(case.sizes))
    bounds = [(g, start, stop) for g, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))]

    def call(arrays: Operands) -> object:
        if arrays.scale_a is None or arrays.scale_b is None:
            raise ValueError("block scales are arrays")
        if id(arrays) not in kept:
            kept[id(arrays)] = [arrays.scale_a[start:stop].t().contiguous().t() for _, start, stop in bounds]
        for g, start, stop in bounds:
            if start == stop:
                continue
            arrays.out[start:stop] = functional.scaled_mm(
                arrays.a[start:stop], arrays.b[g], kept[id(arrays)][g], functional.ScalingType.BlockWise1x128,
                arrays.scale_b[g], functional.ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
            )  # fmt: skip
        return arrays.out

    return call


# ----------------------------------------------------------------------------------------------------------------------
# Comparison


def compare(case: Case, device: devices.Device, rounds: int, backend: str) -> dict[str, Any]:
    """Times both sides, one after the other in every round."""
    sets = operand_sets(case, device)
    plan = grouped_plan.make(problem_of(case, sets[0]), like=sets[0].a, backend=backend)
    calls = {"ours": our_call(plan)}
    row: dict[str, Any] = {
        "kind": case.kind,
        "case": case.name,
        "groups": len(case.sizes),
        "rows": sum(case.sizes),
        "n": case.n,
        "k": case.k,
        "kernel": plan.kernel_name,
        "origin": plan.origin,
        "model_us": round(plan.main.seconds * 1e6, 2),
    }
    name, call, refused = first_that_works(torch_calls(case), sets[0])
    row["torch_call"], row["torch_refused"] = name, refused
    if call is not None:
        returned: Any = call(sets[0])
        theirs = returned.clone()
        calls["ours"](sets[0])
        row["difference"] = difference(sets[0].out, theirs)
        del theirs, returned
        # With another product than ours there is nothing to compare. (NaN is no agreement either.)
        if row["difference"] <= AGREEMENT:
            calls["torch"] = call
            for arrays in sets[1:]:  # the preparations of a first call must not be captured
                call(arrays)
        else:
            refused.append(f"{name}: its result differs from ours by {row['difference']} of its norm")
    return row | compared(calls, sets, rounds, case.flops)


def report(row: dict[str, Any], case: Case) -> None:
    """One line, and what PyTorch refused."""
    other = "torch has none"
    if "torch_ratio" in row:
        other = f"{row['torch_call']} {row['torch_us']:>9} us: {row['torch_ratio']:.3f}"
    print(f"{case!s:<40}{row['us']:>10} us {row['tflops']:>7} TFLOP/s, {other}  {row['kernel']}", flush=True)
    for reason in row["torch_refused"]:
        print(f"    {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# Every cell


def eligible(problem: GroupedProblem, device: devices.Device) -> list[Candidate[GroupedProblem]]:
    """Every cell of the matrix that serves a problem natively, by the model's estimate."""
    built = {info.key: info for info in ac.kernels(op="grouped_gemm")}
    ranked = select.rank_cells(grouped_plan.GroupedSearch(problem, device, devices.require_arch(device)))
    return [dataclasses.replace(candidate, info=built.get(candidate.key)) for candidate in ranked]


def lacking(cases: Sequence[Case], device: devices.Device, backend: str, *, every: bool) -> Iterator[KernelKey]:
    """The kernels that the cases need and the table lacks: the best cell of each, or every one."""
    for case in cases:
        # Kernels are chosen by extents, so these are the case's own, without its memory.
        served = eligible(_without_memory(case), device)
        built = backend == "auto" and any(candidate.info is not None for candidate in served)
        wanted = served if every else ([] if built else served[:1])
        yield from (candidate.key for candidate in wanted if candidate.info is None)


def _without_memory(case: Case) -> GroupedProblem:
    """The problem of a case, without operands."""
    groups, total = len(case.sizes), sum(case.sizes)
    dtype = CutlassDtype.F8E4M3 if case.fp8 else CutlassDtype.BF16
    if case.form == ALONG_K:
        a = MatrixSpec((case.k, total), (1, case.k), dtype)
        b = MatrixSpec((total, case.n), (case.n, 1), dtype)
        d = MatrixSpec((groups, case.k, case.n), (case.k * case.n, case.n, 1), CutlassDtype.BF16)
    else:
        a = MatrixSpec((total, case.k), (case.k, 1), dtype)
        b = MatrixSpec((groups, case.k, case.n), (case.n * case.k, 1, case.k), dtype)
        d = MatrixSpec((total, case.n), (case.n, 1), CutlassDtype.BF16)
    scales = None
    if case.fp8:
        form = "block" if case.blocks else "vector"
        scales = GroupScale((MatrixSpec((1, 1), (1, 1), CutlassDtype.F32),), form)
    return GroupedProblem(
        form=case.form, groups=groups, a=(a,), b=(b,), c=(), d=(d,), counted=False,
        math="fast" if case.fast else "default", device=0, scale_a=scales, scale_b=scales,
    )  # fmt: skip


def measure_all(case: Case, device: devices.Device, seconds: float) -> list[dict[str, Any]]:
    """Times every eligible cell, the one that would be chosen first."""
    sets = operand_sets(case, device)
    problem = problem_of(case, sets[0])
    rows: list[dict[str, Any]] = []
    for rank, candidate in enumerate(eligible(problem, device)):
        key = candidate.key
        row: dict[str, Any] = {
            "kind": case.kind,
            "case": case.name,
            "kernel": key.name,
            "generation": key.generation,
            "math": key.math,
            "tile": key.tile,
            "cluster": key.cluster,
            "mainloop": key.mainloop,
            "align": [key.align_a, key.align_b, key.align_d],
            "rank": rank,
            "model_us": round(candidate.seconds * 1e6, 2),
            "us": None,
        }
        rows.append(row)
        try:
            plan = grouped_plan.make(problem, like=sets[0].a, candidate=candidate)
            elapsed = timed(our_call(plan), sets, seconds)
        except ac.CutlassError as error:
            row["problem"] = f"{type(error).__name__}: {error}"[:400]
            continue
        row["us"], row["tflops"] = round(elapsed * 1e6, 2), round(case.flops / elapsed / 1e12, 1)
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="a few shapes, fewer rounds")
    parser.add_argument("--all", action="store_true", help="time every eligible cell instead")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the comparison")
    parser.add_argument("--backend", default="auto", help="auto, prebuilt or jit")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="kernels compiled at once")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no case after this time")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"kinds are {', '.join(KINDS)}")
    device = gpu()
    if device is None:
        return 1
    results, rounds = Results(arguments.out), 7 if arguments.quick else arguments.rounds
    cases = comparison(kinds, quick=arguments.quick)

    def every_cell(case: Case) -> None:
        rows = measure_all(case, device, BURST_SECONDS)
        results.rows.extend(rows)
        results.values.setdefault("cases", []).append(against_best(case, rows))

    def measured(case: Case) -> None:
        row = compare(case, device, rounds, arguments.backend)
        results.rows.append(row)
        report(row, case)

    if arguments.backend != "prebuilt":
        compile_ahead(lacking(cases, device, arguments.backend, every=arguments.all), device, arguments.jobs)
    results.run(cases, every_cell if arguments.all else measured, arguments.seconds)
    results.values["means"] = means(results.rows, lambda row: str(row["kind"]))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
