"""Arrays as memory, and column-major matrices in it.

Everything below the requests is row-major, so a matrix is viewed as its transpose: (columns, rows), rows contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ... import _core
from ...arrays.layouts import relaid
from ...errors import InvalidOperandError
from ...pipeline.problem import is_dense

Views = dict[str, _core.Operand]
"""Arrays by a request's names, D as `d` or, once it is there in any case, `out`.

Matrices are their transposes: `a` (k, m), `b` (n, k), `c` and D (n, m), `gelu_aux` (n, m), or (n, ceil(m / 8)) of bits;
scales are `scale_a` (1, m) or (1,), `scale_b` (n, 1) or (1,), `scale_d` and `amax_d` (1,).
"""


def viewed(
    array: _core.Operand, name: str, columns: int, rows: int, leading: int, *, label: str, swap: bool = False
) -> _core.Operand:
    """A matrix in an array's memory.

    Args:
        array: the array.
        name: its name in messages.
        columns: of the matrix.
        rows: of the matrix.
        leading: its leading dimension.
        label: the name of the leading dimension in messages.
        swap: view it as (rows, columns) instead of (columns, rows).

    Raises:
        InvalidOperandError: the array's elements are not contiguous, or are too few.
    """
    if not _holds_pitched(array, columns, rows, leading):
        reach = (columns - 1) * leading + rows if columns and rows else 0
        cure = f"copy it, or give the {label} that it has"
        _expect(array, name, reach, lambda: f"{rows} x {columns}, column-major with {label} {leading}", cure)
    shape, strides = (columns, rows), (leading, 1)
    return relaid(array, shape[::-1] if swap else shape, strides[::-1] if swap else strides)


def vector(array: _core.Operand, name: str, length: int) -> _core.Operand:
    """The first elements of an array, (length,).

    Raises:
        InvalidOperandError: the array's elements are not contiguous, or are too few.
    """
    _expect(array, name, length, lambda: f"{length} elements, one after the other", "copy it")
    return relaid(array, (length,), (1,))


def _expect(array: _core.Operand, name: str, needed: int, wanted: Callable[[], str], cure: str) -> None:
    """Refuses an array without so many contiguous elements, whatever the order of its dimensions."""
    dims = _dims(array)[::-1]
    if 0 not in array.shape and not is_dense([extent for _, extent in dims], [stride for stride, _ in dims]):
        raise InvalidOperandError(
            f"{name} of shape {array.shape} has strides {array.strides}: its elements do not lie together; expected "
            f"{wanted()}; {cure}"
        )
    size = math.prod(array.shape)
    if size < needed:
        raise InvalidOperandError(f"{name} has {size} elements; it reaches over {needed}: {wanted()}")


def _holds_pitched(array: _core.Operand, columns: int, rows: int, leading: int) -> bool:
    """Whether the matrix lies in a two-dimensional array that has the leading dimension as its pitch."""
    dims = _dims(array)
    if len(array.shape) != 2 or not 1 <= len(dims) <= 2 or dims[-1][0] != leading:
        return False
    inner = dims[0][1] if len(dims) == 2 else 1
    return (len(dims) == 1 or dims[0][0] == 1) and rows <= inner and columns <= dims[-1][1]


def _dims(array: _core.Operand) -> list[tuple[int, int]]:
    """(stride, extent) of the dimensions that are more than one element, inner ones first."""
    return sorted((stride, extent) for extent, stride in zip(array.shape, array.strides, strict=True) if extent != 1)
