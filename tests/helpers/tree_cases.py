"""GEMMs with epilogue trees: the cases that tests compute on a GPU, and their kernels.

Everything here is decided without a GPU, so that tools/compile_table.py compiles the kernels before the tests run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atomr_cutlass import epilogue as evt
from atomr_cutlass import reference
from atomr_cutlass.arrays import numerics
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import FloatArray
from atomr_cutlass.arrays.operands import BYTE
from atomr_cutlass.epilogue.fusion import Fusion, TreeArray
from atomr_cutlass.epilogue.results import MatrixResult
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.common import bias_and_activation
from atomr_cutlass.generator.epilogue.tree import MASK, MATRIX, ROW, EpilogueVisitorTree, Output
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.rules import FEW, accumulator
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.kernels import GemmCandidate, GemmSearch
from atomr_cutlass.ops.gemm.problem import GemmProblem, fused_problems
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.devices import Device
from random_trees import Dice, operand_shapes, operands_like, random_tree, random_values

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

OLDER = {D.F8E4M3: SmArch.SM89}
"""Where PTX of an older arch comes from, if not from sm_80."""

_SPREAD = {D.I8: 74.0}
"""The standard deviation of operands, where it is not 1."""
_WHOLE = 4
"""C as integers goes up to this, so that what it is added to counts."""


@dataclass(frozen=True)
class Layout:
    """The layout of an array in memory that begins with an address aligned to 16 bytes.

    Attributes:
        shape: extents.
        dtype: element type; None for bytes of bits.
        order: of its matrices, `r` or `c`.
        pad: elements between rows (columns, where it is column-major), or after each element of a vector.
        offset: elements before the first.
    """

    shape: Shape
    dtype: D | None
    order: str = "r"
    pad: int = 0
    offset: int = 0

    @property
    def element(self) -> D:
        return self.dtype or D.I8

    @property
    def strides(self) -> Shape:
        """In elements; 0 for an extent of 1, as views have it."""
        strides = [1 + self.pad] * len(self.shape)
        if len(self.shape) > 1:
            *batch, rows, columns = self.shape
            across, along = (rows, columns) if self.order == "r" else (columns, rows)
            leading = along + self.pad
            strides = [leading, 1] if self.order == "r" else [1, leading]
            step = leading * across
            for extent in reversed(batch):
                strides.insert(0, step)
                step *= extent
        return tuple(0 if extent == 1 else stride for extent, stride in zip(self.shape, strides, strict=True))

    @property
    def alignment(self) -> int:
        return math.gcd(16, self.offset * self.element.bits // 8)

    @property
    def spec(self) -> MatrixSpec:
        return MatrixSpec(self.shape, self.strides, self.element, self.alignment)


@dataclass(frozen=True, eq=False)
class Case:
    """A product with a tree on top.

    Attributes:
        name: of the case.
        tree: what follows the product.
        a, d: element types of A and B, and of C and D.
        m, n, k: extents.
        operands, outputs: the layouts of the tree's arrays, by name.
        function: what is traced for the tree, if it is.
        names: of the function's results in its own order.
        activation: what `gemm` is told, with a bias among the operands, instead of a tree.
        plain: whether it is told so.
        precision: of float32 operands.
        layouts: of A, B and D; C has D's.
        batch_a, batch_b, batch_c: batch dimensions; there is no C where the last are None.
        in_place: whether D overwrites C.
        pads, offsets: of A, B, C and D.
        alpha, beta: scalars.
        arch: of the kernel; None is the GPU's own.
        cell: fields of the kernel's key, if it is not the best kernel that is wanted; `tile` without K.
        seed: of the values.
    """

    name: str
    tree: EpilogueVisitorTree
    a: D
    d: D
    m: int
    n: int
    k: int
    operands: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    names: tuple[str, ...] = ()
    activation: str | None = None
    plain: bool = False
    precision: str | None = None
    layouts: str = "rrr"
    batch_a: Shape = ()
    batch_b: Shape = ()
    batch_c: Shape | None = None
    in_place: bool = False
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
    alpha: float = 1.0
    beta: float = 0.0
    arch: SmArch | None = None
    cell: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the results in the order in which `gemm` returns them."""
        return self.names or ("out", *(output.name for output in self.tree.outputs))

    @property
    def shape(self) -> Shape:
        """Extents of the result."""
        return (*np.broadcast_shapes(self.batch_a, self.batch_b), self.m, self.n)

    @property
    def math(self) -> str:
        return numerics.math_mode(self.a, self.precision)

    @property
    def array_layouts(self) -> dict[str, Layout]:
        """The layout of every array, in the order of a plan's operands."""
        rows = (
            ("a", (*self.batch_a, self.m, self.k), self.a, self.layouts[0]),
            ("b", (*self.batch_b, self.k, self.n), self.a, self.layouts[1]),
            ("c", None if self.batch_c is None else (*self.batch_c, self.m, self.n), self.d, self.layouts[2]),
            ("out", self.shape, self.d, self.layouts[2]),
        )
        found = {
            name: Layout(shape, dtype, layout, pad, offset)
            for (name, shape, dtype, layout), pad, offset in zip(rows, self.pads, self.offsets, strict=True)
            if shape is not None
        }
        out = found.pop("out")
        if self.in_place:
            found["c"] = out
        inputs = {operand.name: self.operands[operand.name] for operand in self.tree.inputs}
        return found | inputs | {output.name: self.outputs[output.name] for output in self.tree.outputs} | {"out": out}

    @property
    def problem(self) -> GemmProblem:
        specs = {name: layout.spec for name, layout in self.array_layouts.items() if name in ("a", "b", "c", "out")}
        return GemmProblem(specs["a"], specs["b"], specs.get("c"), specs["out"], self.math, 0)

    @property
    def fusion(self) -> Fusion:
        def array(name: str, kind: str, layout: Layout, reduction: str = "") -> TreeArray:
            return TreeArray(name, kind, layout.shape, layout.strides, layout.element, reduction, layout.alignment)

        return Fusion(
            self.tree,
            tuple(array(operand.name, operand.kind, self.operands[operand.name]) for operand in self.tree.inputs),
            tuple(
                array(output.name, output.kind, self.outputs[output.name], output.reduction)
                for output in self.tree.outputs
            ),
        )

    def candidate(self, device: Device) -> GemmCandidate:
        """The kernel."""
        problem = self.problem
        problems = fused_problems(problem, self.fusion, problem.epilogue)
        if not self.cell:
            return select.choose(GemmSearch(problems, device, self.arch))
        for search in (GemmSearch(problem, device) for problem in problems):
            for key in filter(search.serves, search.every_cell(self.arch or devices.require_arch(device))):
                if self._is_wanted(key):
                    return select.candidate_of(search, key)
        raise LookupError(f"no cell of the matrix is that of {self.name}")

    def _is_wanted(self, key: KernelKey) -> bool:
        found = {name: getattr(key, name) for name in self.cell}
        return self.cell == found | ({"tile": key.tile[:2]} if "tile" in found else {})

    def arguments(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `gemm` for the epilogue."""
        if self.plain:
            return {"activation": self.activation, **operands}
        return {"epilogue": self.function or self.tree, **operands}

    def values(self) -> dict[str, Array]:
        """A, B, C and the tree's operands, on the host."""
        generator = np.random.default_rng(self.seed)
        made = {}
        for name, layout in self.array_layouts.items():
            if name in ("a", "b"):
                made[name] = random_values(layout.shape, layout.dtype, generator)
            elif name == "c":
                made[name] = random_values(layout.shape, layout.dtype, generator, whole=_WHOLE)
        if self.math == "tf32":  # exact ones leave the tightest tolerance
            made |= {name: numerics.round_to_tf32(made[name]) for name in ("a", "b")}
        shapes = {operand.name: self.operands[operand.name].shape for operand in self.tree.inputs}
        return made | operands_like(self.tree, shapes, self.seed)

    def accumulators(self, values: Mapping[str, Array]) -> tuple[FloatArray, FloatArray]:
        """The accumulator that the tree starts from, and the tolerance of a kernel's."""
        arrays = values["a"], values["b"], values.get("c")
        scalars = {"alpha": self.alpha, "beta": self.beta}
        acc = gemm_reference.gemm(*arrays, **scalars, out_dtype=D.F64, math=self.math)
        wide = D.F64 if self.a is D.F64 else D.F32
        limits = reference.tolerance(self.a, wide, self.k, self.math, exact_operands=self.math == "tf32")
        return acc, limits.atol_factor * gemm_reference.absolute_product(*arrays, **scalars)


# ----------------------------------------------------------------------------------------------------------------------
# Random trees


@dataclass(frozen=True)
class _Setup:
    """How a product is put; C where `c` says its batch dimensions."""

    m: int
    n: int
    k: int
    layouts: str = "rcr"
    batch_a: Shape = ()
    batch_b: Shape = ()
    c: Shape | None = None
    in_place: bool = False
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)

    def along_k(self) -> _Setup:
        """The same with A and B contiguous along K, as 8-bit kernels want them."""
        return _Setup(**{**vars(self), "layouts": "rc" + self.layouts[2]})


_SETUPS = (
    _Setup(256, 384, 128, "rrr"),
    _Setup(77, 93, 64),
    _Setup(70, 40, 64, batch_a=(3,), batch_b=(3,)),
    _Setup(128, 96, 64, "rcc"),
    _Setup(520, 24, 64, "rrr", c=()),
    _Setup(77, 93, 61, "rrr"),
    _Setup(200, 136, 72, "rrr", pads=(8, 8, 8, 8)),
    _Setup(1, 77, 64),
    _Setup(256, 384, 128, c=()),
    _Setup(24, 520, 64, "crr"),
    _Setup(33, 40, 32, batch_a=(2, 1), batch_b=(3,), c=(3,)),
    _Setup(93, 1, 64, "rrr"),
    _Setup(136, 80, 96, "crc"),
    _Setup(70, 40, 64, batch_b=(4,)),
    _Setup(128, 128, 32, c=(), in_place=True),
    _Setup(65, 72, 40, "rrr", offsets=(1, 0, 0, 1)),
    _Setup(5, 3, 7, "rrr", c=()),
    _Setup(64, 264, 64, "crr", batch_a=(2,), c=(), pads=(0, 0, 8, 16)),
    _Setup(131, 66, 64, "rcc", pads=(0, 0, 3, 5), c=()),
)

_ROWS: tuple[tuple[D, str | None, D, int, int], ...] = (
    (D.BF16, None, D.BF16, 24, 13),
    (D.F16, None, D.F16, 18, 10),
    (D.BF16, None, D.F32, 13, 6),
    (D.F16, None, D.F8E4M3, 11, 6),
    (D.BF16, None, D.I8, 9, 5),
    (D.F32, "tf32", D.F32, 13, 6),
    (D.F32, "ieee", D.F32, 14, 6),
    (D.F64, None, D.F64, 12, 5),
    (D.I8, None, D.F32, 5, 3),
    (D.I8, None, D.BF16, 4, 2),
    (D.I8, None, D.I8, 4, 2),
    (D.F8E4M3, None, D.BF16, 7, 2),
)
"""Element type and precision of A and B, element type of D; how many trees on cells of the GPU's own arch, and how many
on older ones."""


@functools.cache
def cases() -> tuple[Case, ...]:
    """200 random trees, the seed of each being its place."""
    made: list[Case] = []
    for start, (a, precision, d, own, older) in enumerate(_ROWS):
        for number in range(own + older):
            # Older ones in between, so that both see all ways.
            is_older = (number + 1) * older // (own + older) > number * older // (own + older)
            setup = _SETUPS[(7 * start + number) % len(_SETUPS)]
            arch = OLDER.get(a, SmArch.SM80) if is_older else None
            made.append(_random_case(len(made), a, precision, d, setup if a.bits > 8 else setup.along_k(), arch))
    return tuple(made)


def _random_case(seed: int, a: D, precision: str | None, d: D, setup: _Setup, arch: SmArch | None) -> Case:
    dice = Dice(1_000_000 + seed)
    tree = random_tree(seed, d=d, acc=accumulator(a), masks=setup.layouts[2] == "r")
    shape = (*np.broadcast_shapes(setup.batch_a, setup.batch_b), setup.m, setup.n)
    shapes = operand_shapes(tree, shape, seed)
    operands = {
        operand.name: _input_layout(operand.kind, shapes[operand.name], operand.dtype, setup, d, dice)
        for operand in tree.inputs
    }
    result = MatrixResult(shape)
    outputs = {output.name: _output_layout(output, result.array_shape(output), dice) for output in tree.outputs}
    kind = f"{a.value}{f'-{precision}' if precision else ''}-{d.value}"
    extents = "x".join(map(str, (*shape, setup.k)))
    return Case(
        f"{seed}-{kind}-{extents}-{setup.layouts}-{'own' if arch is None else arch.value}",
        tree,
        a,
        d,
        setup.m,
        setup.n,
        setup.k,
        operands,
        outputs,
        precision=precision,
        layouts=setup.layouts,
        batch_a=setup.batch_a,
        batch_b=setup.batch_b,
        batch_c=setup.c,
        in_place=setup.in_place,
        pads=setup.pads,
        offsets=setup.offsets,
        # Accumulators are about as large as 1.
        alpha=dice.choose((1.0, -1.0, 1.5, 0.5)) / (_SPREAD.get(a, 1.0) ** 2 * math.sqrt(setup.k)),
        beta=0.0 if setup.c is None else dice.choose((0.5, -1.0, 0.75)),
        arch=arch,
        seed=seed,
    )


def _input_layout(kind: str, shape: Shape, dtype: D | None, setup: _Setup, d: D, dice: Dice) -> Layout:
    if kind == MATRIX:
        if dtype is d and dice.often(0.7):  # like D
            return Layout(shape, dtype, setup.layouts[2], setup.pads[3])
        return Layout(shape, dtype, dice.choose("rrc"), dice.choose((0, 0, 8, 3)), dice.choose((0, 0, 1)))
    if kind == MASK:
        return Layout(shape, None, "r", dice.choose((0, 1, 3)), dice.choose((0, 1)))
    # Column-major, their stride from element to element is that between rows.
    return Layout(shape, dtype, "c" if kind == ROW else "r", dice.choose((0, 0, 1)), dice.choose((0, 1)))


def _output_layout(output: Output, shape: Shape, dice: Dice) -> Layout:
    if output.kind == MATRIX:
        return Layout(shape, output.dtype, dice.choose("rrrc"), dice.choose((0, 0, 8, 1)), dice.choose((0, 0, 1)))
    # Outputs that are cleared first are dense.
    return Layout(shape, output.dtype, "r", 0, dice.choose((0, 1, 2, 3)))


# ----------------------------------------------------------------------------------------------------------------------
# Common ones


def residual(acc: Any, bias: Any, residual: Any) -> Any:
    """A block's last layer."""
    return evt.relu(acc + bias) + residual


def quantized(acc: Any, bias: Any, scale: Any) -> Any:
    """For the next product in fp8, with what the next scale is chosen from."""
    x = evt.silu(acc + bias)
    return {"out": evt.cast(x * scale, D.F8E4M3), "amax": evt.total_amax(x)}


def dequantized(acc: Any, rows: Any, columns: Any, bias: Any) -> Any:
    """Integers with a scale for each row of A and each column of B."""
    return acc * rows * columns + bias


def gated(acc: Any, gate: Any) -> Any:
    """Half of a gated layer."""
    return acc * evt.silu(gate)


def forward(acc: Any, bias: Any) -> Any:
    """The result, with the operands of the backward pass beside it."""
    x = acc + bias
    return {"out": evt.gelu(x), "before": x, "positive": evt.mask(x > 0)}


def backward(acc: Any, before: Any) -> Any:
    """The gradient of the layer below, and of its bias."""
    dx = evt.d_gelu(acc, before)
    return dx, evt.row_sum(dx)


def observed(acc: Any, kept: Any) -> Any:
    """Dropout by bits, and statistics of all directions."""
    x = evt.where(kept, acc * 1.25, 0.0)
    return x, evt.row_amax(x), evt.column_sum(x), evt.total_max(x), evt.column_max(acc)


def everything(acc: Any, scale: Any, bias: Any, rows: Any, other: Any, kept: Any) -> Any:
    """Operands and outputs of all kinds."""
    x = evt.fma(acc, scale, bias)
    y = evt.where(kept, x + other, x * rows)
    return {
        "out": evt.gelu(y),
        "before": evt.cast(y, D.F16),
        "positive": evt.mask(y > 0),
        "row_sums": evt.row_sum(y),
        "row_tops": evt.row_max(x),
        "column_sums": evt.column_sum(x),
        "column_tops": evt.column_amax(y),
        "total": evt.total_sum(x),
        "top": evt.total_amax(y),
    }


USUAL = (192, 144, 96)
LARGE = (2304, 2048, 256)
"""More tiles than multiprocessors: each thread block has several."""
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hardswish")


@functools.cache
def common() -> Mapping[str, Case]:
    """Trees that everyone uses, as `bias`, `activation` and functions, by name. All arrays are dense."""
    made = [_plain(f"bias-{name}", D.BF16, D.BF16, name, D.BF16) for name in ACTIVATIONS]
    made += [
        _plain("silu", D.BF16, D.BF16, "silu", None),
        _plain("f16-bias-relu", D.F16, D.F16, "relu", D.F16),
        _plain("f32-result-bias-gelu", D.BF16, D.F32, "gelu", D.F32),
        _plain("tf32-bias-tanh", D.F32, D.F32, "tanh", D.F32, precision="tf32", layouts="rcr"),
        _plain("ieee-bias-relu", D.F32, D.F32, "relu", D.F16),
        _plain("f64-bias-gelu", D.F64, D.F64, "gelu", D.F64),
        _plain("i8-bias-silu", D.I8, D.F32, "silu", D.F32, layouts="rcr"),
        _plain("e4m3-bias-gelu", D.F8E4M3, D.BF16, "gelu", D.F32, layouts="rcr"),
        _traced(residual, D.BF16, D.BF16, bias=D.BF16, residual=D.BF16),
        _traced(quantized, D.F16, D.F8E4M3, bias=D.F16, scale=D.F32),
        _traced(dequantized, D.I8, D.BF16, layouts="rcr", rows=D.F32, columns=D.F32, bias=D.BF16),
        _traced(gated, D.BF16, D.BF16, gate=D.BF16),
        _traced(forward, D.BF16, D.BF16, bias=D.F32),
        _traced(backward, D.BF16, D.BF16, before=D.BF16),
        _traced(observed, D.F16, D.F32, kept=None),
        _traced(forward, D.BF16, D.BF16, LARGE, name="forward-large", bias=D.F32),
    ]
    return {case.name: case for case in made}


def _plain(name: str, a: D, d: D, activation: str | None, bias: D | None, **how: Any) -> Case:
    m, n, k = USUAL
    tree = bias_and_activation(bias, activation)
    operands = {} if bias is None else {"bias": Layout((n,), bias)}
    return Case(name, tree, a, d, m, n, k, operands, {}, activation=activation, plain=True, alpha=_alpha(a, k), **how)


def _traced(
    function: Callable[..., Any],
    a: D,
    d: D,
    shape: tuple[int, int, int] = USUAL,
    *,
    name: str = "",
    layouts: str = "rrr",
    cell: Mapping[str, Any] | None = None,
    precision: str | None = None,
    arch: SmArch | None = None,
    **given: D | None,
) -> Case:
    m, n, k = shape
    inner = {"scale": (1,), "rows": (m, 1), "bias": (n,), "columns": (n,), "kept": (m, -(-n // 8))}
    operands = {name: Layout(inner.get(name, (m, n)), dtype) for name, dtype in given.items()}
    kinds = {name: evt.operand_of(layout.shape, m, n, layout.dtype or BYTE, name) for name, layout in operands.items()}
    traced = evt.trace(function, kinds, out_dtype=d, compute_dtype=D.F64 if a is D.F64 else D.F32)
    return Case(
        name or function.__name__,
        traced.tree,
        a,
        d,
        m,
        n,
        k,
        operands,
        {output.name: Layout(MatrixResult((m, n)).array_shape(output), output.dtype) for output in traced.tree.outputs},
        function=function,
        names=traced.names,
        precision=precision,
        layouts=layouts,
        alpha=_alpha(a, k),
        arch=arch,
        cell=cell or {},
    )


def _alpha(a: D, k: int) -> float:
    return 1.0 / (_SPREAD.get(a, 1.0) ** 2 * math.sqrt(k))


# ----------------------------------------------------------------------------------------------------------------------
# Cells that selection does not take for small problems

_CELLS: tuple[tuple[D, str | None, D, SmArch | None, dict[str, Any]], ...] = (
    (D.BF16, None, D.BF16, None, {"tile": (128, 256), "mainloop": "cooperative"}),
    (D.BF16, None, D.BF16, None, {"tile": (128, 192), "mainloop": "cooperative"}),
    (D.F16, None, D.BF16, None, {"tile": (128, 128), "mainloop": "pingpong", "epilogue_schedule": "tma"}),
    (D.F16, None, D.F16, None, {"tile": (64, 64), "mainloop": "pingpong"}),
    (D.BF16, None, D.F32, None, {"tile": (64, 64), "mainloop": "pingpong"}),
    (D.BF16, None, D.BF16, None, {"tile": (128, 128), "scheduler": "streamk"}),
    (D.BF16, None, D.BF16, None, {"tile": (128, 128), "epilogue_schedule": "nosmem"}),
    (D.F32, "tf32", D.F32, None, {"tile": (128, 256), "mainloop": "cooperative"}),
    (D.I8, None, D.BF16, None, {"tile": (128, 256), "mainloop": "cooperative"}),
    (D.F8E4M3, None, D.BF16, None, {"tile": (128, 128), "mainloop": "cooperative", "generation": "sm90"}),
    (D.F32, "3xtf32", D.F32, None, {"generation": "sm80", "tile": (128, 128)}),
    (D.F32, "ieee", D.F32, None, {"generation": "sm80", "tile": (128, 128)}),
    (D.F64, None, D.F64, None, {"generation": "sm80", "tile": (64, 64)}),
    (D.BF16, None, D.BF16, SmArch.SM80, {"tile": (128, 256)}),
    (D.F16, None, D.F32, SmArch.SM80, {"tile": (256, 128)}),
    (D.F32, "ieee", D.F32, SmArch.SM80, {"tile": (256, 128)}),
    (D.F64, None, D.F64, SmArch.SM80, {"tile": (128, 128)}),
    (D.I8, None, D.BF16, SmArch.SM80, {"tile": (128, 128)}),
)
"""Types of operands, how they are multiplied, and of the result; arch; and what is wanted of the kernel."""


@functools.cache
def cells() -> Mapping[str, Case]:
    """`everything` on kernels whose tiles, schedules and threads differ, by name."""
    made = {}
    for a, precision, d, arch, cell in _CELLS:
        # Outputs stored from registers need not be aligned.
        shape = (333, 517 if cell.get("epilogue_schedule") == "nosmem" else 520, 96)
        words = [a.value, precision or "", d.value, arch.value if arch else "", *map(_word, cell.values())]
        name = "-".join(filter(None, words))
        made[name] = _traced(
            everything, a, d, shape, name=name, layouts="rcr", cell=cell, precision=precision, arch=arch,
            scale=D.F32, bias=D.BF16, rows=D.F32, other=d, kept=None,
        )  # fmt: skip
    return made


_FEW: tuple[tuple[D, D, str, tuple[int, int, int], int], ...] = (
    (D.BF16, D.BF16, "rcr", (37, 1032, 264), 4),
    (D.BF16, D.F32, "rcr", (1000, 21, 1032), 4),  # A's rows lie along the tiles
    (D.F16, D.F16, "rrr", (90, 2056, 72), 4),
    (D.BF16, D.BF16, "rrr", (9, 4104, 520), 8),  # tiles of up to 256 columns
    (D.BF16, D.F8E4M3, "rcr", (128, 640, 1160), 1),
    (D.F8E4M3, D.BF16, "rcr", (17, 1040, 784), 4),
)
"""Types of operands and of the result, layouts, extents, and thread blocks in a cluster."""


@functools.cache
def few() -> Mapping[str, Case]:
    """`everything` on kernels for few rows, by name."""
    made = {}
    for a, d, layouts, shape, ranks in _FEW:
        name = f"few-{a.value}-{d.value}-{layouts}-{_word(shape)}-{ranks}"
        made[name] = _traced(
            everything, a, d, shape, name=name, layouts=layouts, cell={"mainloop": FEW, "cluster": (1, 1, ranks)},
            scale=D.F32, bias=D.BF16, rows=D.F32, other=d, kept=None,
        )  # fmt: skip
    return made


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def needed() -> Iterator[Case]:
    """Every case whose kernel the tests launch."""
    return itertools.chain(cases(), common().values(), cells().values(), few().values())


def keys(device: Device) -> list[KernelKey]:
    """The kernels of all cases on a GPU, once each."""
    return list(dict.fromkeys(case.candidate(device).key for case in needed()))
