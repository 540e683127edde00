"""The dimension orders of images, and how their pixels are spaced in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from ..pipeline.problem import MatrixSpec
from .symbols import plain, plain_view, with_numbers

Shape = tuple[int, ...]
LAYOUTS = ("nhwc", "nchw")
TO_NHWC = (0, 2, 3, 1)
TO_NCHW = (0, 3, 1, 2)


def axes_of(layout: str, axes: Shape = TO_NCHW) -> Shape:
    """The axes to permute images by; none where `layout` is the order of NHWC already."""
    return () if layout == "nhwc" else axes


def permuted(array: Any, axes: Shape) -> Any:
    """An array or a view with its dimensions in another order, one of another rank as it is; the memory stays."""
    if not axes or len(array.shape) != len(axes):
        return array
    if isinstance(array, _core.Operand):
        return relaid(array, [array.shape[i] for i in axes], [array.strides[i] for i in axes])
    permute = getattr(array, "permute", None) or array.transpose
    return permute(axes)


def in_layout(values: Shape, layout: str) -> Shape:
    """Extents or strides in the order of NHWC, in that of `layout`."""
    return tuple(values[i] for i in TO_NCHW) if layout == "nchw" and len(values) == len(TO_NCHW) else tuple(values)


def relaid(view: _core.Operand, shape: Sequence[int], strides: Sequence[int]) -> _core.Operand:
    """A view of the same memory with these extents and strides."""
    own, extents, steps = plain_view(view), list(map(plain, shape)), list(map(plain, strides))
    made = _core.Operand(own.pointer, extents, steps, own.dtype, own.device_type, own.device, own.read_only, own)
    return with_numbers(made, shape, strides)


def pixel_strides(spec: MatrixSpec) -> tuple[int, int, int]:
    """(column, row, outer) strides; of dimensions of one element, what makes the array collapse."""
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
