"""Epilogue trees fused into a product, with the arrays that they read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..arrays.layouts import MatrixSpec
from ..arrays.numerics import BYTE
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.lower import SOURCE, operand_kinds, split
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, ROW, SCALAR, EpilogueVisitorTree

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]
"""Extents and strides of an array, in elements."""


@dataclass(frozen=True)
class TreeArray:
    """The caller's array for an operand of a tree.

    Attributes:
        kind: which dimensions of D it has: SCALAR, ROW, COLUMN, MATRIX or MASK.
        dtype: its element type; I8 for a mask, whose elements are bytes.
        reduction: the reduction of an output that is reduced; else empty.
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
            # The dimensions are those of the batches and one more.
            at = len(shape) - (self.kind == ROW)
            shape, strides = (*shape[:at], 1, *shape[at:]), (*strides[:at], 0, *strides[at:])
        steps = (0 if self.kind == ROW else strides[-2], 0 if self.kind == COLUMN else strides[-1])
        return MatrixSpec(shape, (*strides[:-2], *steps), self.dtype, self.alignment)


@dataclass(frozen=True)
class Fusion:
    """A tree and the arrays that it reads and that it writes beside D, in its order."""

    tree: EpilogueVisitorTree
    inputs: tuple[TreeArray, ...]
    outputs: tuple[TreeArray, ...]

    @property
    def arrays(self) -> tuple[TreeArray, ...]:
        """The operands in the order in which kernels take them."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class GroupOperand:
    """A row or a scalar that a tree reads for each group.

    Attributes:
        arrays: their layouts: of one array, a row (N,) or a scalar (1,) for all groups, or (G, N), (G, 1, N) or
            (G, 1, 1); of a list one for each group, or one for all.
    """

    name: str
    kind: str
    arrays: tuple[MatrixSpec, ...]

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from group to group, 0 where all share one, and from column to column."""
        (spec,) = self.arrays
        least = 2 if self.kind == ROW else 3
        each = len(spec.shape) >= least and spec.shape[0] > 1
        return spec.strides[0] if each else 0, spec.strides[-1] if self.kind == ROW else 0


@dataclass(frozen=True)
class GroupedFusion:
    """An epilogue tree and the arrays of its operands, in its order; it writes D alone."""

    tree: EpilogueVisitorTree
    inputs: tuple[GroupOperand, ...] = ()


def source_of(fusion: Fusion, like_d: Callable[[TreeArray], bool]) -> int | None:
    """The number of a tree's first matrix that is like D and so can be loaded as the C operand; None without one."""
    fits = (number for number, operand in enumerate(fusion.inputs) if operand.kind == MATRIX and like_d(operand))
    return next(fits, None)


def source_number(epilogue: str) -> int | None:
    """The number of the input that is loaded as the C operand; None where there is none."""
    kinds = [kind for kind, _ in operand_kinds(split(epilogue)[1])[0]]
    return kinds.index(SOURCE) if SOURCE in kinds else None
