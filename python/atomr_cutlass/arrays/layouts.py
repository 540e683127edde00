"""Shapes and strides of arrays: matrices and their batches, and images by the order of their dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.key import COLUMN, ROW
from .numerics import dtype_of
from .symbols import gcd, plain, plain_view, with_numbers

Shape = tuple[int, ...]
LAYOUTS = ("nhwc", "nchw")
TO_NHWC = (0, 2, 3, 1)
TO_NCHW = (0, 3, 1, 2)


@dataclass(frozen=True)
class MatrixSpec:
    """An array of matrices: shape and strides in elements, and the bytes that its address is a multiple of."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: CutlassDtype
    alignment: int = 16

    @classmethod
    def of(cls, view: _core.Operand, name: str) -> MatrixSpec:
        """The layout of an array; errors give its name."""
        return cls(view.shape, view.strides, dtype_of(view, name), view.alignment)

    @property
    def dense(self) -> bool:
        """Whether it is row-major without gaps."""
        return is_dense(self.shape, self.strides)


def round_up(extent: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not smaller."""
    return -(-extent // multiple) * multiple


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major array without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an array is row-major without gaps."""
    return same_layout(shape, strides, row_major(shape))


def same_layout(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two arrays of one shape have the same layout: strides of dimensions of one element do not count."""
    triples = zip(shape, strides, others, strict=True)
    return all(extent == 1 or stride == other for extent, stride, other in triples)


@dataclass(frozen=True)
class View:
    """A way to read a matrix: row- or column-major, with a leading dimension in elements."""

    layout: str
    leading: int


def broadcast_batches(a: Sequence[int], b: Sequence[int], name: str = "b") -> tuple[int, ...]:
    """The batch dimensions of the result, broadcast as in NumPy; `name` is the other array's in errors."""
    if not a and not b:
        return ()
    result = []
    for x, y in itertools.zip_longest(reversed(a), reversed(b), fillvalue=1):
        if x != y and 1 not in (x, y):
            raise InvalidOperandError(f"batch dimensions {tuple(a)} of a and {tuple(b)} of {name} do not broadcast")
        result.append(y if x == 1 else x)
    return tuple(reversed(result))


def broadcasts_to(batches: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether batch dimensions broadcast to `wanted` as in NumPy."""
    missing = len(wanted) - len(batches)
    return missing >= 0 and all(x in (1, y) for x, y in zip(batches, wanted[missing:], strict=True))


def broadcast_to(spec: MatrixSpec, batches: tuple[int, ...], name: str) -> MatrixSpec:
    """The spec with these batch dimensions; those that are broadcast get stride 0."""
    own = spec.shape[:-2]
    if not broadcasts_to(own, batches):
        raise InvalidOperandError(f"batch dimensions {own} of {name} do not broadcast to {batches}")
    pairs = zip(own, spec.strides[:-2], strict=True)
    strides = (0,) * (len(batches) - len(own)) + tuple(0 if extent == 1 else stride for extent, stride in pairs)
    return MatrixSpec(batches + spec.shape[-2:], strides + spec.strides[-2:], spec.dtype, spec.alignment)


def views(spec: MatrixSpec, name: str) -> list[View]:
    """The ways to read the matrices of a spec: one, or two if an extent of 1 makes a stride irrelevant."""
    (rows, columns), (row_stride, column_stride) = spec.shape[-2:], spec.strides[-2:]
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        if stride < 0 and extent > 1:
            raise InvalidOperandError(f"{name} has a negative stride ({spec.strides}): copy it")
    wide = 16 * 8 // spec.dtype.bits
    found = []
    if columns <= 1 or column_stride == 1:
        leading = row_stride if rows > 1 else round_up(max(columns, 1), wide)
        if leading >= columns:
            found.append(View(ROW, leading))
    if rows <= 1 or row_stride == 1:
        leading = column_stride if columns > 1 else round_up(max(rows, 1), wide)
        if leading >= rows:
            found.append(View(COLUMN, leading))
    if not found:
        raise UnsupportedError(
            f"{name} of shape {spec.shape} has strides {spec.strides}: its rows or its columns must be contiguous and "
            "must not overlap; make it contiguous"
        )
    return found


def vector_elements(spec: MatrixSpec, elements: Sequence[int]) -> int:
    """Elements that a vector access may span, given the address and distances between accesses in elements."""
    value: int = gcd(spec.alignment * 8, 128, *(e * spec.dtype.bits for e in elements))
    return max(1, (value & -value) // spec.dtype.bits)


def axes_of(layout: str, axes: Shape = TO_NCHW) -> Shape:
    """The axes by which to permute images; empty where `layout` is NHWC."""
    return () if layout == "nhwc" else axes


def permuted(array: Any, axes: Shape) -> Any:
    """An array or view of the same memory with its dimensions permuted; one of another rank is returned as it is."""
    if not axes or len(array.shape) != len(axes):
        return array
    if isinstance(array, _core.Operand):
        return relaid(array, [array.shape[i] for i in axes], [array.strides[i] for i in axes])
    permute = getattr(array, "permute", None) or array.transpose
    return permute(axes)


def in_layout(values: Shape, layout: str) -> Shape:
    """Extents or strides in NHWC order, converted to the order of `layout`."""
    return tuple(values[i] for i in TO_NCHW) if layout == "nchw" and len(values) == len(TO_NCHW) else tuple(values)


def relaid(view: _core.Operand, shape: Sequence[int], strides: Sequence[int]) -> _core.Operand:
    """A view of the same memory with these extents and strides."""
    own, extents, steps = plain_view(view), list(map(plain, shape)), list(map(plain, strides))
    made = _core.Operand(own.pointer, extents, steps, own.dtype, own.device_type, own.device, own.read_only, own)
    return with_numbers(made, shape, strides)


def pixel_strides(spec: MatrixSpec) -> tuple[int, int, int]:
    """(column, row, outer) strides; dimensions of one element get the stride with which the array collapses."""
    outer, rows, columns, channels = spec.shape
    stride_outer, stride_row, stride_column, _ = spec.strides
    if columns == 1:
        stride_column = stride_row if rows > 1 else (stride_outer if outer > 1 else channels)
    if rows == 1:
        stride_row = columns * stride_column
    if outer == 1:
        stride_outer = rows * stride_row
    return stride_column, stride_row, stride_outer


def rows_collapse(spec: MatrixSpec) -> bool:
    """Whether the pixels of one outer index are evenly spaced."""
    column, row, _ = pixel_strides(spec)
    return row == spec.shape[2] * column


def collapses(spec: MatrixSpec) -> bool:
    """Whether all pixels are evenly spaced, as a matrix's rows are."""
    _, row, outer = pixel_strides(spec)
    return rows_collapse(spec) and outer == spec.shape[1] * row
