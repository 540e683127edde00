"""Kernels that compute several epilogue trees against kernels of one tree with the same tile, in alternation.

    python benchmarks/common_trees.py --out common_trees.json --jobs 16
    python benchmarks/common_trees.py --ops grouped_gemm,conv2d_fprop --out some.json

Every such kernel of a preset at three sizes. Timings are those of benchmarks/gemm.py; both sides are compiled first,
side by side. `ratio` is the common kernel's time over that of the kernel of one tree: the median over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomr_cutlass import SmArch
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.epilogue import EpilogueVisitorTree, EvtBuilder
from atomr_cutlass.epilogue.fusion import Fusion, GroupedFusion, GroupOperand, TreeArray
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.lower import (
    LINEAR,
    SCALED,
    SCALED_COMMON,
    base_of,
    epilogue_id,
    is_common,
    with_source,
)
from atomr_cutlass.generator.epilogue.tree import COLUMN, MATRIX, ROW
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import PRESETS, expand, supports, with_epilogue
from atomr_cutlass.generator.rules import FP8_TYPES
from atomr_cutlass.ops.conv2d import kernels as conv_plans
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.conv2d.problem import ConvGeometry, ConvProblem, conv_geometry
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import NO_SCALES, Scale, Scales, from_candidate, with_scales
from atomr_cutlass.ops.gemm.problem import GemmProblem, fused_problem
from atomr_cutlass.ops.grouped_gemm import kernels as grouped_plans
from atomr_cutlass.ops.grouped_gemm.kernels import GroupedSearch
from atomr_cutlass.ops.grouped_gemm.problem import CONTIGUOUS, GroupedProblem, GroupScale
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.search import Candidate

D = CutlassDtype

GEMM, GROUPED, FPROP = "gemm", "grouped_gemm", "conv2d_fprop"
OPS = (GEMM, GROUPED, FPROP)
Built = Callable[[EvtBuilder, str], EvtBuilder]
TREES: dict[str, Built] = {
    "bias": lambda made, d: made.add_bias("bias", dtype=d),
    "relu": lambda made, d: made.add_bias("bias", dtype=d).activation("relu"),
    "gelu": lambda made, d: made.add_bias("bias", dtype=d).activation("gelu"),
    "block": lambda made, d: made.add_bias("bias", dtype=d).add_matrix("residual", dtype=d).activation("relu"),
    "residual": lambda made, d: made.add_matrix("residual", dtype=d),
    "row_scale": lambda made, _: made.binary("multiply", "columns", ROW),
    "row_column_scale": lambda made, _: made.binary("multiply", "rows", COLUMN).binary("multiply", "columns", ROW),
}
"""Builders of the trees, for D of an element type."""
FACTORS = ("row_scale", "row_column_scale")
"""Those that kernels with scales alone compute."""
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    GEMM: ((4096, 8192, 4096), (2048, 5120, 2560), (1024, 4096, 1024)),
    GROUPED: ((8, 4096, 4096, 7168), (8, 16384, 4096, 2048), (64, 8192, 2048, 2048)),
    FPROP: ((32, 28, 256, 256), (64, 56, 64, 64), (32, 14, 512, 512)),
}
"""M, N, K; groups, rows of all, N, K; images, rows and columns, channels of the image and of the result (3x3)."""
PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Array:
    """An array that a call takes.

    Attributes:
        name: of the operand.
        shape: in memory.
        dtype: element type.
        turned: whether the last two dimensions are swapped in the call.
    """

    name: str
    shape: tuple[int, ...]
    dtype: CutlassDtype
    turned: bool = False

    @property
    def spec(self) -> MatrixSpec:
        """As kernels are chosen for it."""
        strides = [math.prod(self.shape[place + 1 :]) for place in range(len(self.shape))]
        order = [*range(len(self.shape))]
        if self.turned:
            order[-2:] = order[:-3:-1]
        return MatrixSpec(tuple(self.shape[i] for i in order), tuple(strides[i] for i in order), self.dtype, 256)

    @property
    def bytes(self) -> int:
        """In memory."""
        return math.prod(self.shape) * self.dtype.bits // 8


@dataclass(frozen=True)
class Case:
    """A kernel of several trees, one of those, and the size of a problem."""

    key: KernelKey
    tree: str
    size: tuple[int, ...]

    @property
    def evt(self) -> EpilogueVisitorTree:
        """The tree."""
        return TREES[self.tree](EvtBuilder(), self.key.d.value).build()

    @property
    def geometry(self) -> ConvGeometry:
        """Of a convolution."""
        n, side, c, k = self.size
        return conv_geometry((n, side, side, c), (k, 3, 3, c), padding=1)

    @property
    def base(self) -> str:
        """The epilogue that the tree is put on: with scales where A and B have some as arrays."""
        return LINEAR if self.tree in FACTORS or self.key.a not in FP8_TYPES else base_of(self.key.epilogue)

    @property
    def scaled(self) -> bool:
        """Whether A and B have scales as arrays."""
        return self.base == SCALED

    @property
    def arrays(self) -> list[Array]:
        """The operands in the order of a plan's operands, without offsets."""
        key, size, columns = self.key, self.size, self.key.layout_b == "c"
        out: tuple[int, ...]
        if key.op == FPROP:
            g, n = self.geometry, self.size[-1]
            found, out = [Array("a", g.x_shape, key.a), Array("b", g.w_shape, key.b)], g.y_shape
        else:
            groups, (m, n, k) = size[:-3], size[-3:]
            found = [Array("a", (m, k), key.a), Array("b", (*groups, *((n, k) if columns else (k, n))), key.b, columns)]
            out = (m, n)
            if self.scaled:
                found += [Array("scale_a", (m, 1), D.F32), Array("scale_b", (*groups, 1, n), D.F32)]
        rows = (*(size[:-3] if key.op == GROUPED else ()), n)
        shapes = {"bias": rows, "columns": rows, "rows": (math.prod(out[:-1]), 1), "residual": out}
        found += [Array(operand.name, shapes[operand.name], operand.dtype or key.d) for operand in self.evt.inputs]
        return [*found, Array("out", out, key.d)]

    @property
    def program(self) -> str:
        """Of the tree, with the residual as C."""
        names = [operand.name for operand in self.evt.inputs]
        program = self.evt.program
        return with_source(program, names.index("residual")) if "residual" in names else program

    @property
    def alone(self) -> KernelKey:
        """The kernel that computes this tree alone."""
        return with_epilogue(self.key, epilogue_id(self.base, self.program), self.key.d)

    @property
    def ends(self) -> list[int]:
        """Of the rows of groups: uneven ones, the same in each process."""
        groups, rows = self.size[:2]
        shares = [2 + (7 * g) % 5 for g in range(groups)]
        return [rows * total // sum(shares) for total in itertools.accumulate(shares)]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        if self.key.op == FPROP:
            g = self.geometry
            return 2 * math.prod(g.y_shape) * g.r * g.s * g.c
        return 2 * math.prod(self.size[-3:])

    def __str__(self) -> str:
        tile = "x".join(map(str, self.key.tile))
        kind = f"{self.key.a.value} {self.key.math} {self.key.layout_a}{self.key.layout_b}"
        return f"{self.key.op} {kind} {tile} {self.tree} {'x'.join(map(str, self.size))}"


def common_keys(preset: str, ops: list[str]) -> list[KernelKey]:
    """The kernels of several trees that a preset has for sm_90a."""
    return [key for key in expand(preset, [SmArch.SM90A]) if key.op in ops and is_common(key.epilogue)]


def cases(keys: list[KernelKey], trees: list[str]) -> Iterator[Case]:
    """The cases to measure: kernel by kernel, size by size."""
    for key in keys:
        for size in SIZES[key.op]:
            for tree in trees:
                case = Case(key, tree, size)
                factors = tree in FACTORS and (key.epilogue != SCALED_COMMON or key.a in FP8_TYPES)
                # A residual of groups is C.
                if supports(case.alone) and not factors and not (key.op == GROUPED and tree in ("block", "residual")):
                    yield case


def plan_of(case: Case, key: KernelKey, device: Device, like: Any = None) -> Plan:
    """A plan of this very kernel."""
    arrays = {array.name: array for array in case.arrays}
    specs = {name: array.spec for name, array in arrays.items()}
    a, b, d = specs["a"], specs["b"], specs["out"]
    if case.key.op == GROUPED:
        return _grouped_plan(case, key, device, specs, like)
    inputs = []
    for operand in case.evt.inputs:
        spec = specs[operand.name]
        shape, strides, storage = spec.shape, spec.strides, None
        if operand.kind == MATRIX:
            # A matrix of pixels and channels, as trees see images.
            shape, strides = (math.prod(spec.shape[:-1]), spec.shape[-1]), (spec.shape[-1], 1)
            storage = (spec.shape, spec.strides)
        inputs.append(TreeArray(operand.name, operand.kind, shape, strides, spec.dtype, "", 256, storage))
    fusion = Fusion(case.evt, tuple(inputs), ())
    if case.key.op == FPROP:
        convolution = ConvProblem(
            case.key.op, case.geometry, a, b, None, d, case.key.math, device.index, fusion=fusion
        )  # fmt: skip
        chosen = select.candidate_of(ConvSearch(convolution, device), key)
        return conv_plans.make(convolution, candidate=chosen, like=like)
    problem = GemmProblem(a=a, b=b, c=None, d=d, math=case.key.math, device=device.index)
    scales = NO_SCALES
    if case.scaled:
        both = (Scale(specs[name].shape, specs[name].strides, "vector") for name in ("scale_a", "scale_b"))
        scales = Scales(*both)
    followed = fused_problem(with_scales(problem, scales), fusion, epilogue_id(case.base, case.program))
    candidate: Candidate[Any] = select.candidate_of(GemmSearch(followed, device), key)
    return from_candidate(problem, candidate, scales=scales, fusion=fusion)


def _grouped_plan(case: Case, key: KernelKey, device: Device, specs: dict[str, MatrixSpec], like: Any) -> Plan:
    problem = GroupedProblem(
        form=CONTIGUOUS, groups=case.size[0], a=(specs["a"],), b=(specs["b"],), c=(), d=(specs["out"],), counted=False,
        math=case.key.math, device=device.index,
        fusion=GroupedFusion(case.evt, (GroupOperand("bias", ROW, (specs["bias"],)),)),
    )  # fmt: skip
    if case.scaled:
        scale_a, scale_b = (GroupScale((specs[name],), "vector") for name in ("scale_a", "scale_b"))
        problem = dataclasses.replace(problem, scale_a=scale_a, scale_b=scale_b)
    return grouped_plans.make(
        problem, candidate=select.candidate_of(GroupedSearch(problem, device), key), like=like
    )  # fmt: skip


def operands_of(case: Case) -> list[Any]:
    """One set of random operands."""
    import torch
    from harness import torch_dtype

    found = []
    for array in case.arrays:
        scale = array.shape[-1] ** -0.5 if array.name == "b" else 1.0
        made = torch.randn(array.shape, device="cuda") * scale
        made = (made.abs() + 0.5 if array.dtype is D.F32 and array.name != "bias" else made).to(
            torch_dtype(array.dtype)
        )
        found.append(made.mT if array.turned else made)
    if case.key.op == GROUPED:
        found.insert(2, torch.tensor(case.ends, dtype=torch.int32, device="cuda"))
    return found


def measure(key: KernelKey, size: tuple[int, ...], trees: list[str], results: Any, device: Device, rounds: int) -> None:
    """Times the kernels of a size in turns and adds a row for each tree."""
    from harness import Burst, alternated, difference, set_count

    bursts, checked = {}, {}
    for case in cases([key], trees):
        if case.size != size:
            continue
        sets = [operands_of(case) for _ in range(set_count(sum(array.bytes for array in case.arrays), device))]
        found = []
        for side, kernel in (("alone", case.alone), ("common", case.key)):
            plan = plan_of(case, kernel, device, sets[0][0])

            def call(arrays: list[Any], plan: Plan = plan) -> object:
                return plan(*arrays)

            sets[0][-1].fill_(float("nan"))
            call(sets[0])
            found.append(sets[0][-1].clone())
            bursts[case.tree, side] = Burst(call, sets)
        checked[case] = difference(*found)
    times = alternated(bursts, rounds, PAUSE_SECONDS)
    for case, apart in checked.items():
        alone, several = times[case.tree, "alone"], times[case.tree, "common"]
        ratios = [common_s / alone_s for common_s, alone_s in zip(several, alone, strict=True)]
        row = {
            "op": key.op,
            "kernel": key.name,
            "tree": case.tree,
            "size": list(size),
            "difference": apart,
            "alone_us": round(statistics.median(alone) * 1e6, 2),
            "common_us": round(statistics.median(several) * 1e6, 2),
            "ratio": round(statistics.median(ratios), 4),
            "spread": round((max(alone) - min(alone)) / statistics.median(alone), 4),
        }
        results.rows.append(row)
        print(f"{case!s:<76}{row['alone_us']:>10}{row['common_us']:>10}{row['ratio']:>8}  {apart}", flush=True)


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--preset", default="full", help=f"whose kernels: {', '.join(PRESETS)}")
    parser.add_argument("--ops", type=lambda text: text.split(","), default=list(OPS), help=f"of {', '.join(OPS)}")
    parser.add_argument(
        "--trees", type=lambda text: text.split(","), default=list(TREES), help=f"of {', '.join(TREES)}"
    )
    parser.add_argument("--scales", action="store_true", help="in the place of each kernel the one with scales as well")
    parser.add_argument("--kernels", default="", help="parts of names, comma-separated; default: all common kernels")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of the comparison")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="kernels compiled at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no kernel after this time")
    arguments = parser.parse_args()
    for name in (*arguments.ops, *arguments.trees):
        if name not in (*OPS, *TREES):
            parser.error(f"unknown operation or tree {name!r}; valid: {', '.join((*OPS, *TREES))}")

    from harness import Results, compile_ahead, gpu

    device = gpu()
    if device is None:
        return 1
    results = Results(arguments.out)
    parts = arguments.kernels.split(",")
    keys = [key for key in common_keys(arguments.preset, arguments.ops) if any(part in key.name for part in parts)]
    if arguments.scales:
        keys = [with_epilogue(key, SCALED_COMMON, key.d) for key in keys]
        keys = [key for key in keys if supports(key)]
    found = list(cases(keys, arguments.trees))
    compile_ahead((key for case in found for key in (case.alone, case.key)), device, arguments.jobs)
    sizes = list(dict.fromkeys((case.key, case.size) for case in found))

    def measured(group: tuple[KernelKey, tuple[int, ...]]) -> None:
        measure(*group, arguments.trees, results, device, arguments.rounds)

    results.run(sizes, measured, arguments.seconds)
    ratios = sorted(row["ratio"] for row in results.rows)
    results.values["over_one_percent"] = sum(ratio > 1.01 for ratio in ratios)
    return int(results.finish())


if __name__ == "__main__":
    sys.exit(main())
