"""The dimension orders of images, and how their pixels are spaced in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .. import _core

Shape = tuple[int, ...]

LAYOUTS = ("nhwc", "nchw")
TO_NHWC = (0, 2, 3, 1)
TO_NCHW = (0, 3, 1, 2)


class Strided(Protocol):
    """An array of four dimensions in the order of NHWC, or a description of one."""

    @property
    def shape(self) -> Shape:
        """Extents."""

    @property
    def strides(self) -> Shape:
        """Elements from one index to the next."""


def in_nhwc(view: _core.Operand, layout: str) -> _core.Operand:
    """The view with its dimensions in the order of NHWC."""
    return view if layout == "nhwc" else _permuted(view, TO_NHWC)


def from_nhwc(result: Any, layout: str) -> Any:
    """An array in the order of NHWC with its dimensions in that of `layout`; the memory stays as it is."""
    if layout == "nhwc" or len(result.shape) != len(TO_NCHW):
        return result
    if isinstance(result, _core.Operand):
        return _permuted(result, TO_NCHW)
    permute = getattr(result, "permute", None) or result.transpose
    return permute(TO_NCHW)


def in_layout(values: Shape, layout: str) -> Shape:
    """Extents or strides in the order of NHWC, in that of `layout`."""
    return tuple(values[i] for i in TO_NCHW) if layout == "nchw" and len(values) == len(TO_NCHW) else tuple(values)


def relaid(view: _core.Operand, shape: Sequence[int], strides: Sequence[int]) -> _core.Operand:
    """A view of the same memory with these extents and strides."""
    return _core.Operand(
        view.pointer, list(shape), list(strides), view.dtype, view.device_type, view.device, view.read_only, view
    )


def pixel_strides(spec: Strided) -> tuple[int, int, int]:
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


def rows_collapse(spec: Strided) -> bool:
    """Whether the pixels of one outer index are evenly spaced."""
    column, row, _ = pixel_strides(spec)
    return row == spec.shape[2] * column


def collapses(spec: Strided) -> bool:
    """Whether all pixels are evenly spaced, as a matrix's rows are."""
    _, row, outer = pixel_strides(spec)
    return rows_collapse(spec) and outer == spec.shape[1] * row


def _permuted(view: _core.Operand, order: Shape) -> _core.Operand:
    if len(view.shape) != len(order):
        return view
    return relaid(view, [view.shape[i] for i in order], [view.strides[i] for i in order])
