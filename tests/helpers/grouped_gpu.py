"""Calls of `grouped_gemm` that the GPU tests make with a bias, an activation or a tree, and which kernels that takes.

Everything here is decided without a GPU, so that tools/compile_table.py compiles the kernels before the tests run.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atomr_cutlass import SmArch
from atomr_cutlass import epilogue as evt
from atomr_cutlass.arrays import numerics
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import FAST
from atomr_cutlass.epilogue.fusion import GroupedFusion, GroupOperand
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.common import bias_and_activation
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED, epilogue_id
from atomr_cutlass.generator.epilogue.tree import EpilogueVisitorTree
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.generator.rules import FP8_TYPES
from atomr_cutlass.ops.grouped_gemm.kernels import GroupedSearch
from atomr_cutlass.ops.grouped_gemm.problem import (
    LIST,
    GroupedProblem,
    GroupScale,
    following,
)
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.devices import Device
from tree_cases import Layout

CONTIGUOUS, MASKED, ALONG_K = "contiguous", "masked", "along_k"
BF16, F16, F32, I8, E4M3, E5M2 = D.BF16, D.F16, D.F32, D.I8, D.F8E4M3, D.F8E5M2

# ----------------------------------------------------------------------------------------------------------------------
# Trees


def clamped(acc: Any, bias: Any, factor: Any) -> Any:
    """Rows and a scalar."""
    return evt.clamp(acc * factor + bias, -1.5, 1.5)


def quantized(acc: Any, bias: Any, factor: Any) -> Any:
    """For the next product in fp8."""
    return evt.cast(evt.silu(acc + bias) * factor, E4M3)


def whole(acc: Any, factor: Any) -> Any:
    """For the next product in int8."""
    return evt.cast(acc * factor, I8)


def selected(acc: Any, bias: Any, factor: Any) -> Any:
    """An activation of what is large, and another of the rest."""
    return evt.where(acc > bias, evt.gelu(acc), factor * evt.tanh(acc) + bias)


TREES: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (clamped, quantized, whole, selected)
}

# ----------------------------------------------------------------------------------------------------------------------
# Cases


@dataclass(frozen=True)
class Case:
    """A call. `sizes` are the rows, or along K the extents, of the groups.

    Attributes:
        form: contiguous, masked, along_k.
        sizes: of the groups.
        n, k: columns of D; K (not along K).
        m: rows of each group's arrays (masked), rows of D (along K).
        a, b, out: element types; b is a's, out the default.
        layouts: of A and B.
        rest: rows, or elements of K, that no group has.
        counts: whether counts are given; ends are otherwise.
        scale: which scales: numbers, tensor, group, vector, mixed, block.
        fast: fast accumulation.
        bias: which bias: row (one for all groups), groups, padded (room between them), strided.
        bias_type: its element type; that of D.
        activation: a name.
        tree: a name of TREES; it reads the bias if it has one.
        factor: which factor it reads: one (for all groups), groups.
        pads, shifts: elements after each row, and before the array, of A, B, C and D.
    """

    form: str
    sizes: tuple[int, ...]
    n: int = 128
    k: int = 128
    m: int = 0
    a: D = BF16
    b: D | None = None
    out: D | None = None
    layouts: str = "rr"
    rest: int = 0
    counts: bool = False
    scale: str = ""
    fast: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    in_place: bool = False
    bias: str = ""
    bias_type: D | None = None
    activation: str | None = None
    tree: str = ""
    factor: str = ""
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    shifts: tuple[int, int, int, int] = (0, 0, 0, 0)

    def __str__(self) -> str:
        names = [name for name in _OPTIONAL if getattr(self, name) != getattr(_PLAIN, name)]
        changed = [f"{name}{_text(getattr(self, name))}" for name in names]
        sizes = f"{len(self.sizes)}groups{sum(self.sizes)}"
        return "-".join([self.form, sizes, f"{self.n}x{self.k}", self.a.value, self.layouts, *changed])

    @property
    def result(self) -> D:
        """Element type of D."""
        decided = self.epilogue.result_dtype if self.tree else None
        return self.out or decided or numerics.default_out_dtype(self.a)

    @property
    def epilogue(self) -> EpilogueVisitorTree:
        """The tree that follows the products."""
        if not self.tree:
            return bias_and_activation((self.bias_type or self.result) if self.bias else None, self.activation)
        # An epilogue that says nothing of D leaves it as wide as A.
        kinds = {"bias": evt.Operand("row", self.bias_type or F32), "factor": evt.Operand("scalar", F32)}
        read = {name: kind for name, kind in kinds.items() if name in inspect.signature(TREES[self.tree]).parameters}
        return evt.trace(TREES[self.tree], read).tree

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of A, B and D."""
        groups, total = len(self.sizes), sum(self.sizes) + self.rest
        if self.form == CONTIGUOUS:
            return (total, self.k), (groups, self.k, self.n), (total, self.n)
        if self.form == MASKED:
            return (groups, self.m, self.k), (groups, self.k, self.n), (groups, self.m, self.n)
        return (self.m, total), (total, self.n), (groups, self.m, self.n)

    @property
    def problem(self) -> GroupedProblem:
        """The problem that kernels are chosen for."""
        shape_a, shape_b, shape_d = self.shapes
        rows = (
            (shape_a, self.a, self.layouts[0]), (shape_b, self.b or self.a, self.layouts[1]),
            (shape_d, self.result, "r"), (shape_d, self.result, "r"),
        )  # fmt: skip
        a, b, c, d = (
            (Layout(shape, dtype, layout, pad, shift).spec,)
            for (shape, dtype, layout), pad, shift in zip(rows, self.pads, self.shifts, strict=True)
        )
        forms = {"tensor": ("tensor",) * 2, "group": ("group",) * 2, "vector": ("vector",) * 2, "block": ("block",) * 2}
        forms |= {"mixed": ("vector", "group"), "block by columns": ("block",) * 2}
        scales = {
            name: GroupScale((MatrixSpec((1,), (1,), F32),), form)
            for name, form in zip(("scale_a", "scale_b"), forms.get(self.scale, ()), strict=False)
        }
        math = FAST if self.fast and self.a in FP8_TYPES else "default"
        return GroupedProblem(
            self.form, len(self.sizes), a, b, (d if self.in_place else c) if self.beta != 0 else (), d,
            counted=self.counts or self.form == MASKED, math=math, device=0, fusion=self._fusion(), **scales,
        )  # fmt: skip

    def _fusion(self) -> GroupedFusion | None:
        groups, tree = len(self.sizes), self.epilogue
        if following(tree, self.a, self.result) is None:
            return None
        found = []
        for operand in tree.inputs:
            if operand.name == "bias":
                shape = (self.n,) if self.bias == "row" else (groups, self.n)
                pad, layout = {"padded": (8, "r"), "strided": (3, "c")}.get(self.bias, (0, "r"))
                array = Layout(shape, operand.dtype, layout, pad)
            else:
                array = Layout((1,) if self.factor == "one" else (groups, 1, 1), operand.dtype)
            found.append(GroupOperand(operand.name, operand.kind, (array.spec,)))
        return GroupedFusion(tree, tuple(found))


_PLAIN = Case(CONTIGUOUS, ())
_OPTIONAL = (
    "m", "b", "out", "rest", "counts", "scale", "fast", "alpha", "beta", "in_place", "bias", "bias_type", "activation",
    "tree", "factor", "pads", "shifts",
)  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return value.value if isinstance(value, D) else str(value)


def skewed(groups: int, total: int, seed: int = 0) -> tuple[int, ...]:
    """Sizes as routing makes them: a few large, many small, some empty."""
    rng = np.random.default_rng((groups, total, seed))
    shares = rng.permutation(1.0 / np.arange(1, groups + 1) ** 1.2)
    counts = np.floor(shares / shares.sum() * total).astype(int)
    counts[rng.random(groups) < 0.15] = 0
    return tuple(counts.tolist())


def small(groups: int, most: int, seed: int = 0) -> tuple[int, ...]:
    """Between none and `most` rows each."""
    return tuple(np.random.default_rng((groups, most, seed)).integers(0, most + 1, groups).tolist())


FP8_SIZES = ((300, 1, 0, 64, 129), small(64, 32), (40,))
SCALES = ("", "numbers", "tensor", "group", "vector", "mixed")

UNEVEN = (130, 0, 3, 64, 1)

ROWS = Case(CONTIGUOUS, UNEVEN, 136, 72, layouts="rc", rest=9)
MASKS = Case(MASKED, UNEVEN, 136, 72, m=136, layouts="rc")
DEPTHS = Case(ALONG_K, UNEVEN, 136, m=72, layouts="cr", rest=4)
QUANTIZED = Case(CONTIGUOUS, FP8_SIZES[0], 136, 272, a=E4M3, layouts="rc", rest=9)

FUSED = (
    replace(ROWS, bias="row"),
    replace(ROWS, bias="strided", alpha=-0.5, beta=3.0),
    *(replace(ROWS, bias=bias, activation="gelu") for bias in ("row", "groups", "padded", "strided")),
    replace(ROWS, bias="groups", activation="gelu", counts=True, beta=1.0, in_place=True),
    replace(ROWS, sizes=small(256, 2), bias="groups", activation="gelu"),
    replace(ROWS, sizes=(0,) * 12, bias="groups", activation="gelu"),
    replace(ROWS, bias="groups", activation="gelu", pads=(8, 16, 0, 8)),
    replace(ROWS, n=264, bias="groups", activation="gelu"),
    replace(ROWS, activation="silu", alpha=0.5),
    replace(ROWS, activation="identity"),
    replace(ROWS, bias="groups", bias_type=F32, activation="relu"),
    *(replace(MASKS, bias=bias, activation="gelu", beta=beta) for bias, beta in (("row", 0.0), ("groups", 2.0))),
    *(replace(DEPTHS, bias=bias, activation="gelu") for bias in ("row", "groups")),
    replace(DEPTHS, out=F32, bias="groups"),
)

BESIDE_SCALES = (
    *(replace(QUANTIZED, scale=scale, bias="groups", activation="gelu") for scale in SCALES),
    replace(QUANTIZED, scale="vector", bias="row", bias_type=F16, beta=0.5, alpha=2.0),
    replace(QUANTIZED, scale="group", bias="row", activation="silu", fast=True),
    replace(QUANTIZED, scale="block", bias="groups", activation="gelu"),
    replace(QUANTIZED, form=MASKED, m=310, rest=0, scale="vector", bias="groups", activation="gelu"),
)

UNALIGNED = (
    *(
        Case(form, UNEVEN, 133, 71, m=136, rest=rest, bias=bias, activation=activation)
        for (form, rest), (bias, activation) in itertools.product(
            ((CONTIGUOUS, 3), (MASKED, 0)), (("row", None), ("groups", "gelu"), ("padded", "gelu"), ("", "gelu"))
        )
    ),
    Case(ALONG_K, UNEVEN, 133, m=71, bias="groups", activation="gelu"),
    Case(CONTIGUOUS, UNEVEN, 1, 1, rest=3, bias="groups", activation="gelu"),
    *(
        Case(CONTIGUOUS, UNEVEN, 133, 71, a=F16, alpha=0.1, bias="row", activation=activation)
        for activation in ("relu", "leaky_relu", "sigmoid", "silu", "tanh", "hardswish", "gelu_tanh")
    ),
)

TREE_CASES = (
    *(
        replace(ROWS, n=144, tree="clamped", bias=bias, bias_type=BF16, factor=factor)
        for bias, factor in (("row", "one"), ("groups", "groups"), ("padded", "one"), ("strided", "groups"))
    ),
    replace(
        ROWS, n=144, tree="clamped", bias="groups", bias_type=BF16, factor="one", alpha=-0.5, beta=2.0, in_place=True
    ),
    replace(MASKS, n=144, tree="clamped", bias="groups", bias_type=BF16, factor="groups"),
    replace(ROWS, n=144, tree="quantized", bias="groups", bias_type=BF16, factor="one", pads=(8, 16, 0, 16)),
    replace(MASKS, n=144, tree="quantized", bias="row", bias_type=BF16, factor="groups"),
    replace(ROWS, n=144, tree="whole", factor="groups", counts=True),
    replace(DEPTHS, n=144, tree="clamped", bias="groups", bias_type=BF16, factor="groups"),
    replace(ROWS, a=F16, tree="selected", bias="row", factor="one"),
    replace(QUANTIZED, n=144, tree="selected", bias="groups", factor="groups", scale="vector"),
    replace(QUANTIZED, n=144, tree="quantized", bias="groups", bias_type=BF16, factor="one", scale="group"),
    replace(QUANTIZED, n=144, tree="quantized", bias="row", bias_type=BF16, factor="groups", scale="block"),
)
"""Of eight kernels."""

LARGE = (
    Case(CONTIGUOUS, skewed(64, 8192), 512, 1024, layouts="rc", rest=100, bias="groups", activation="relu"),
    Case(MASKED, skewed(32, 4096), 512, 512, m=2048, layouts="rc", bias="row", activation="relu"),
)

ALIGNED = ((64, 128, 256), (8, 8, 8), (300, 40, 64), (0, 16, 16), (1, 256, 512), (128, 136, 72))
LISTS: dict[str, tuple[tuple[tuple[int, int, int], ...], dict[str, Any]]] = {
    "one": (((130, 72, 48),), {}),
    "aligned": (ALIGNED, {}),
    "aligned, columns of B": (ALIGNED, {"layout": "c"}),
    "f16": (ALIGNED, {"dtype": F16}),
    "unaligned": (((7, 5, 3), (130, 33, 71), (1, 1, 1), (0, 3, 3), (64, 128, 64)), {}),
    "unaligned, columns of B": (((7, 5, 3), (130, 33, 71), (64, 128, 64)), {"layout": "c"}),
    "padded": (((7, 5, 8), (130, 33, 71), (64, 128, 64)), {"pad": 64}),
    "with c": (ALIGNED, {"beta": 2.0}),
    "in place": (ALIGNED, {"beta": -1.0, "in_place": True}),
    "many": (tuple((m, 8 * (m % 5 + 1), 16 * (m % 3 + 1)) for m in small(256, 40)), {}),
    "no columns, no K": (((8, 0, 16), (8, 16, 0), (16, 16, 16)), {"beta": 1.0}),
    "bias": (ALIGNED, {"bias": True, "activation": "gelu"}),
    "bias, with c": (ALIGNED, {"bias": True, "activation": "gelu", "beta": 2.0}),
    "bias, many": (
        tuple((m, 8 * (m % 5 + 1), 16 * (m % 3 + 1)) for m in small(256, 40)),
        {"bias": True, "activation": "gelu"},
    ),
    "bias, no columns, no K": (((8, 0, 16), (8, 16, 0), (16, 16, 16)), {"bias": True, "activation": "gelu"}),
    "bias, unaligned": (((7, 5, 3), (130, 33, 71), (1, 1, 1), (0, 3, 3), (64, 128, 64)), {"bias": True}),
    "activation, unaligned": (((7, 5, 3), (130, 33, 71)), {"activation": "gelu"}),
    "fp8": (tuple((m, 16 * (m % 5 + 1), 32 * (m % 3 + 1)) for m in small(24, 80)), {"dtype": E4M3, "layout": "c"}),
}

REPLAYS: dict[str, tuple[Case, tuple[tuple[int, ...], ...]]] = {
    "contiguous": (
        Case(CONTIGUOUS, (100, 0, 50, 6), 136, 72, layouts="rc", rest=100),
        ((0, 0, 0, 0), (256, 0, 0, 0), (1, 2, 3, 4), (0, 128, 0, 128)),
    ),
    "counts": (
        Case(CONTIGUOUS, (100, 0, 50, 6), 136, 72, counts=True, rest=100), ((64, 64, 64, 64), (0, 0, 0, 1)),
    ),
    "masked": (Case(MASKED, (100, 0, 50, 6), 136, 72, m=128, layouts="rc"), ((128, 128, 128, 128), (0, 0, 1, 0))),
    "along K": (Case(ALONG_K, (100, 0, 50, 6), 136, m=72, layouts="cr", rest=100), ((0, 0, 0, 0), (3, 250, 1, 2))),
    "fp8": (
        Case(CONTIGUOUS, (100, 0, 50, 6), 136, 272, a=E4M3, layouts="rc", scale="vector", rest=100),
        ((5, 6, 7, 8), (256, 0, 0, 0)),
    ),
    "fp8 blocks": (
        Case(CONTIGUOUS, (100, 0, 50, 6), 136, 272, a=E4M3, layouts="rc", scale="block", rest=100),
        ((5, 6, 7, 8), (0, 256, 0, 0)),
    ),
    "unaligned": (Case(CONTIGUOUS, (100, 0, 50, 6), 133, 71, rest=100), ((5, 6, 7, 8), (0, 0, 0, 256))),
    "bias": (
        Case(CONTIGUOUS, (100, 0, 50, 6), 136, 72, layouts="rc", rest=100, bias="groups", activation="gelu"),
        ((5, 6, 7, 8), (0, 0, 0, 256)),
    ),
    "tree": (
        replace(
            ROWS, sizes=(100, 0, 50, 6), n=144, rest=100, tree="quantized", bias="groups", bias_type=BF16,
            factor="groups",
        ),
        ((5, 6, 7, 8), (0, 0, 0, 256)),
    ),
    "bias, unaligned": (
        Case(CONTIGUOUS, (100, 0, 50, 6), 133, 71, rest=100, bias="groups", activation="gelu"), ((5, 6, 7, 8),),
    ),
}  # fmt: skip

OLDER = (
    (SmArch.SM80, Case(CONTIGUOUS, UNEVEN, 136, 72, layouts="rc", rest=3)),
    (SmArch.SM80, Case(MASKED, UNEVEN, 136, 72, m=136, layouts="rc", beta=1.0)),
    (SmArch.SM80, Case(ALONG_K, UNEVEN, 136, m=72, layouts="cr", out=F32)),
    (SmArch.SM80, Case(CONTIGUOUS, UNEVEN, 133, 71, a=F16, rest=3)),
    (SmArch.SM89, Case(CONTIGUOUS, UNEVEN, 136, 272, a=E4M3, layouts="rc", scale="numbers")),
    (SmArch.SM89, Case(MASKED, UNEVEN, 136, 272, m=136, a=E4M3, layouts="rc", fast=True)),
    (SmArch.SM80, Case(CONTIGUOUS, UNEVEN, 136, 72, layouts="rc", rest=3, bias="groups", activation="gelu")),
    (SmArch.SM80, Case(MASKED, UNEVEN, 136, 72, m=136, layouts="rc", beta=1.0, activation="gelu")),
    (SmArch.SM80, Case(ALONG_K, UNEVEN, 136, m=72, layouts="cr", out=F32, bias="groups", activation="relu")),
    (SmArch.SM89, Case(CONTIGUOUS, UNEVEN, 136, 272, a=E4M3, layouts="rc", scale="numbers", bias="row")),
)

CELLS = [key for _, key in cells([SmArch.SM90A]) if key.op == "grouped_gemm" and key.epilogue in (LINEAR, SCALED)]


def of_lists(shapes: tuple[tuple[int, int, int], ...], options: Mapping[str, Any]) -> GroupedProblem:
    """The problem that kernels are chosen for, of lists as `_lists` of the tests has them."""
    dtype, layout, pad = options.get("dtype", BF16), options.get("layout", "r"), options.get("pad", 0)
    result = numerics.default_out_dtype(dtype)

    def spec(rows: int, columns: int, element: D, layout: str = "r") -> MatrixSpec:
        along = columns if layout == "r" else rows
        return Layout((rows, columns), element, layout, -along % pad if pad else 0).spec

    rows = tuple(Layout((n,), result).spec for _, n, _ in shapes) if options.get("bias") else ()
    inputs = (GroupOperand("bias", "row", rows),) if rows else ()
    tree = bias_and_activation(result if rows else None, options.get("activation"))
    d = tuple(spec(m, n, result) for m, n, _ in shapes)
    form = options.get("scale")
    scale = GroupScale((MatrixSpec((1,), (1,), F32),), form) if form else None
    return GroupedProblem(
        LIST, len(shapes), tuple(spec(m, k, dtype) for m, _, k in shapes),
        tuple(spec(k, n, dtype, layout) for _, n, k in shapes), d if options.get("beta") else (), d, counted=False,
        math="default", device=0, scale_a=scale, scale_b=scale,
        fusion=None if following(tree, dtype, result) is None else GroupedFusion(tree, inputs),
    )  # fmt: skip


SCALED_SHAPES = tuple((m, 128 * (m % 2 + 1), 256) for m in small(12, 80))
OF_SCALES = tuple(
    of_lists(SCALED_SHAPES, {"dtype": E4M3, "layout": "c", "scale": form, "bias": True, "activation": "gelu"})
    for form in ("vector", "block")
)


LISTED = replace(ROWS, tree="clamped", bias="row", bias_type=BF16, factor="one")
LISTED_SHAPES = tuple((m, 16 * (m % 5 + 1), 16 * (m % 3 + 1)) for m in small(12, 40))


def trees_of_lists() -> Iterator[GroupedProblem]:
    """The problem of lists with trees: A row-major, B column-major, a row for each group and a factor."""
    for case in (LISTED, replace(LISTED, tree="quantized")):
        plain = of_lists(LISTED_SHAPES, {"layout": "c"})
        rows = tuple(Layout((n,), BF16).spec for _, n, _ in LISTED_SHAPES)
        arrays = {"bias": rows, "factor": (Layout((1,), F32).spec,)}
        inputs = tuple(
            GroupOperand(operand.name, operand.kind, arrays[operand.name]) for operand in case.epilogue.inputs
        )
        d = tuple(replace(spec, dtype=case.result) for spec in plain.d)
        yield replace(plain, d=d, fusion=GroupedFusion(case.epilogue, inputs))


def with_gelu(key: KernelKey) -> KernelKey:
    """A cell with a bias, of D's type, and gelu."""
    if key.generation == "sm80":
        return replace(key, epilogue="lc_gelu")
    return replace(key, epilogue=epilogue_id(key.epilogue, bias_and_activation(key.d, "gelu").program))


def needed(device: Device) -> Iterator[KernelKey]:
    """Every kernel that the tests launch with a bias, an activation or a tree."""
    fused = (*FUSED, *BESIDE_SCALES, *UNALIGNED, *TREE_CASES, *LARGE, *(case for case, _ in REPLAYS.values()))
    for problem in (
        *(case.problem for case in fused),
        *(of_lists(*lists) for lists in LISTS.values()),
        *OF_SCALES,
        *trees_of_lists(),
    ):
        if problem.fusion is not None:
            yield select.best_key(GroupedSearch(problem, device))
    for arch, case in OLDER:
        if case.problem.fusion is not None:
            yield select.best_key(GroupedSearch(case.problem, device, arch))
    if device.arch is SmArch.SM90A:
        yield from map(with_gelu, CELLS)


def keys(device: Device) -> list[KernelKey]:
    """These kernels, once each."""
    return list(dict.fromkeys(needed(device)))
