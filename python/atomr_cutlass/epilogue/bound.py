"""Epilogue trees on top of a GEMM: their operands as a kernel takes them, and the problem that they make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import _core
from ..arrays.views import BYTE
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.common import form_of
from ..generator.epilogue.lower import SOURCE, epilogue_id, operand_kinds, split, with_source
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ..pipeline.problem import GemmProblem, MatrixSpec

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]
"""Extents and strides of an array, in elements."""

_TMA_ALIGNMENT = 16


@dataclass(frozen=True)
class TreeArray:
    """The caller's array for an operand of a tree.

    Attributes:
        name: the operand's.
        kind: how it lies over D.
        shape, strides: in elements.
        dtype: its element type; I8 of a mask, whose elements are bytes.
        reduction: of an output that is reduced; else empty.
        alignment: bytes that its address is a multiple of.
        slot: extents and strides of the caller's array, where those are not `shape` and `strides`.
    """

    name: str
    kind: str
    shape: Shape
    strides: Shape
    dtype: CutlassDtype
    reduction: str = ""
    alignment: int = 16
    slot: Layout | None = None

    @property
    def element(self) -> tuple[int, int]:
        """DLPack's (type code, bits)."""
        return BYTE if self.kind == MASK else self.dtype.dlpack

    @property
    def spec(self) -> MatrixSpec:
        """The array as matrices over D, with stride 0 where it does not vary."""
        shape, strides = self.shape, self.strides
        if self.kind == SCALAR:
            return MatrixSpec((1, 1), (0, 0), self.dtype, self.alignment)
        if self.reduction or (self.kind == ROW and len(shape) == 1):
            # Of the batches and one more dimension.
            along = (1, shape[-1]) if self.kind == ROW else (shape[-1], 1)
            steps = (0, strides[-1]) if self.kind == ROW else (strides[-1], 0)
            return MatrixSpec((*shape[:-1], *along), (*strides[:-1], *steps), self.dtype, self.alignment)
        row_stride = 0 if self.kind == ROW else strides[-2]
        steps = (row_stride, 0 if self.kind == COLUMN else strides[-1])
        return MatrixSpec(shape, (*strides[:-2], *steps), self.dtype, self.alignment)


@dataclass(frozen=True)
class Fusion:
    """A tree and the arrays of its operands, in its order.

    Attributes:
        tree: the computation.
        inputs: the arrays that are read.
        outputs: the arrays that are written beside D.
    """

    tree: EpilogueVisitorTree
    inputs: tuple[TreeArray, ...]
    outputs: tuple[TreeArray, ...]

    @property
    def arrays(self) -> tuple[TreeArray, ...]:
        """The operands in the order in which kernels take them."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class GroupOperand:
    """An operand that an epilogue tree reads: a row or a scalar.

    Attributes:
        name: the operand's.
        kind: `row` or `scalar`.
        arrays: how they lie: one array, of a row (N,), of a scalar one element, for all groups or with a dimension of
            groups in front, beside which a row may have one of 1; of a list one for each, or one for all.
    """

    name: str
    kind: str
    arrays: tuple[MatrixSpec, ...]

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one group's to the next one's, 0 where all share one, and from one column to the next."""
        (spec,) = self.arrays
        least = 2 if self.kind == ROW else 3
        each = len(spec.shape) >= least and spec.shape[0] > 1
        return spec.strides[0] if each else 0, spec.strides[-1] if self.kind == ROW else 0


@dataclass(frozen=True)
class GroupedFusion:
    """An epilogue tree and the arrays of its operands, in its order; it writes D alone."""

    tree: EpilogueVisitorTree
    inputs: tuple[GroupOperand, ...] = ()


def fusion_of(
    tree: EpilogueVisitorTree,
    arrays: Mapping[str, _core.Operand | MatrixSpec],
    placed: Callable[[str, Shape, Shape, str], tuple[Shape, Shape, Layout | None]] | None = None,
) -> Fusion:
    """A tree with arrays.

    Args:
        tree: the tree.
        arrays: of all its inputs and outputs, by name.
        placed: of an array's name, extents, strides and reduction: extents and strides as the tree sees them, and
            TreeArray's `slot`. None where the tree sees all arrays as they are.
    """

    def array(operand: Input | Output, reduction: str = "") -> TreeArray:
        given = arrays[operand.name]
        shape, strides, slot = given.shape, given.strides, None
        if placed is not None:
            shape, strides, slot = placed(operand.name, shape, strides, reduction)
        dtype = operand.dtype or CutlassDtype.I8
        return TreeArray(operand.name, operand.kind, shape, strides, dtype, reduction, given.alignment, slot)

    outputs = tuple(array(output, output.reduction) for output in tree.outputs)
    return Fusion(tree, tuple(map(array, tree.inputs)), outputs)


def array_shape(operand: Input | Output, shape: Shape) -> Shape:
    """The extents of the array for an operand of a tree over a result of this shape (..., M, N)."""
    *batches, m, n = shape
    if operand.kind == MASK:
        return (*batches, m, -(-n // 8))
    reduced: dict[str, Shape] = {SCALAR: (1,), ROW: (*batches, n), COLUMN: (*batches, m)}
    read: dict[str, Shape] = {SCALAR: (1,), ROW: (n,), COLUMN: (m, 1)}
    return (reduced if isinstance(operand, Output) else read).get(operand.kind, shape)


def problem_of(problem: GemmProblem, fusion: Fusion, base: str) -> list[GemmProblem]:
    """The problem with its tree, in the ways in which a kernel may be asked for it, better ones first.

    Args:
        problem: the product.
        fusion: what follows it.
        base: `lc`, or `scaled` where scales are arrays.
    """
    plain = problem_for(problem, fusion, epilogue_id(base, fusion.tree.program))
    number = None if problem.c is not None else source_of(
        fusion, lambda operand: operand.dtype is problem.d.dtype and _like_d(operand.spec, problem.d)
    )  # fmt: skip
    if number is None:
        return [plain]
    return [problem_for(problem, fusion, epilogue_id(base, with_source(fusion.tree.program, number))), plain]


def source_of(fusion: Fusion, like_d: Callable[[TreeArray], bool]) -> int | None:
    """The number of the first matrix of a tree that can be loaded as the C operand; None if none can.

    Args:
        fusion: the tree.
        like_d: whether an array has D's element type and layout.
    """
    fits = (number for number, operand in enumerate(fusion.inputs) if operand.kind == MATRIX and like_d(operand))
    return next(fits, None)


def problem_for(problem: GemmProblem, fusion: Fusion, epilogue: str) -> GemmProblem:
    """The problem with its tree as the epilogue of a kernel's key has it."""
    specs = tuple(operand.spec for operand in fusion.arrays)
    number = source_number(epilogue)
    c = problem.c if number is None else fusion.inputs[number].spec
    return dataclasses.replace(problem, epilogue=epilogue, operands=specs, c=c)


def has_scales(problem: GemmProblem) -> bool:
    """Whether a kernel of several trees may load the factors of a tree as scales, which do not multiply C.

    They are contiguous then, and the same for all batches.
    """
    form = form_of(problem.epilogue)
    if form is not None and problem.c is not None and form.source is None and not form.adds_c:
        return False
    for number, along in () if form is None else ((form.scale_a, -2), (form.scale_b, -1)):
        if number is not None:
            spec = problem.operands[number]
            steps = zip(spec.shape[:-2], spec.strides[:-2], strict=True)
            if any(extent > 1 and stride for extent, stride in steps):
                return False
            if spec.shape[along] > 1 and spec.strides[along] != 1:
                return False
    return True


def _like_d(spec: MatrixSpec, d: MatrixSpec) -> bool:
    """Whether a matrix can be loaded as the C operand: it has the layout of D, aligned as TMA wants it."""
    contiguous = (spec.strides[-1] == 1, spec.strides[-2] == 1)
    leading = max(spec.strides[-2:])
    aligned = spec.alignment % _TMA_ALIGNMENT == 0 and leading * spec.dtype.bits % (8 * _TMA_ALIGNMENT) == 0
    return contiguous == (d.strides[-1] == 1, d.strides[-2] == 1) and True in contiguous and aligned


def reads_source(epilogue: str) -> bool:
    """Whether an operand of the tree is loaded as the C operand."""
    return source_number(epilogue) is not None


def source_number(epilogue: str) -> int | None:
    """The number of the input that is loaded as the C operand."""
    kinds = [kind for kind, _ in operand_kinds(split(epilogue)[1])[0]]
    return kinds.index(SOURCE) if SOURCE in kinds else None
