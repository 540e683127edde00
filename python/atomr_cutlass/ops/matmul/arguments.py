"""Arrays of a matmul: memory, and the column-major matrices in it as the product reads them.

Everything below the requests is row-major, so a matrix is viewed as its transpose: (columns, rows), rows contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ... import _core
from ...arrays.layouts import is_dense, relaid
from ...arrays.numerics import INTEGER_DTYPES
from ...arrays.operands import BYTE, check_apart, check_writable, refuse_jax_out
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.rules import FP8_TYPES, accumulator
from .operation import AMAX, AUX, BIAS, READ, WRITTEN, Form, Matrices

Views = dict[str, _core.Operand]
"""Arrays by a request's names, D as `d` or, once it is there in any case, `out`.

Matrices are their transposes: `a` (k, m), `b` (n, k), `c` and D (n, m), `gelu_aux` (n, m), or (n, ceil(m / 8)) of bits;
scales are `scale_a` (1, m) or (1,), `scale_b` (n, 1) or (1,), `scale_d` and `amax_d` (1,).
"""


def views_of(matrices: Matrices, views: Views) -> Views:
    """The views of the arrays as the product reads them; see `Views`."""
    found, sizes = {}, matrices.sizes
    for name in "abcd":
        if name not in views:
            continue
        stored = "c" if name == "d" and matrices.into_c else name
        leading, swap = matrices.leading(stored), getattr(matrices, f"trans{name}", False)
        found[name] = _viewed(views[name], stored, sizes[name], leading, label=f"ld{name}", swap=swap)
    if AUX in views:
        found[AUX] = _auxiliary(matrices, views[AUX])
    if BIAS in views:
        found[BIAS] = _vector(views[BIAS], BIAS, matrices.n if matrices.form.summed == "b" else matrices.m)
    for name, length, shape in (("scale_a", matrices.m, (1, matrices.m)), ("scale_b", matrices.n, (matrices.n, 1))):
        if name not in views:
            continue
        size = math.prod(views[name].shape)
        if size not in (1, length):
            raise InvalidOperandError(f"{name} has {size} elements; expected one, or {length}")
        found[name] = _vector(views[name], name, size)
        if size > 1:
            found[name] = relaid(found[name], shape, (shape[1], 1))
    for name in ("scale_d", AMAX):
        if name in views:
            if math.prod(views[name].shape) != 1:
                raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected one element")
            found[name] = relaid(views[name], (1,), (1,))
    return found


def _auxiliary(matrices: Matrices, view: _core.Operand) -> _core.Operand:
    leading = matrices.leading("aux")
    if not matrices.form.masked:
        return _viewed(view, AUX, matrices.sizes["aux"], leading, label="ldaux")
    if view.dtype != BYTE:
        raise InvalidOperandError(f"{AUX} is no array of bytes; the bits of relu are uint8")
    width = leading // 8
    whole = _viewed(view, AUX, (width if matrices.m else 0, matrices.n), width, label="ldaux / 8 =")
    return relaid(whole, (matrices.n, -(-matrices.m // 8)), (width, 1))


def check_vectors(form: Form, types: dict[str, CutlassDtype], found: Views, dtype: CutlassDtype) -> None:
    """Refuses vectors and scales of a wrong element type."""
    acc = accumulator(dtype)
    floating = CutlassDtype.F64 if dtype is CutlassDtype.F64 else CutlassDtype.F32
    wanted = dict.fromkeys(("scale_a", "scale_b", "scale_d"), CutlassDtype.F32) | {AMAX: floating}
    if form.writes_bias:
        wanted[BIAS] = acc if form.summed else floating
    for name, expected in wanted.items():
        if name in found and types[name] is not expected:
            raise InvalidOperandError(f"{name} is {types[name].value}; expected {expected.value}")
    scaling = [name for name in ("scale_a", "scale_b", "scale_d") if name in found]
    if scaling and dtype not in FP8_TYPES:
        raise UnsupportedError(
            f"{', '.join(scaling)}: only fp8 kernels take arrays; give numbers, or fold them into alpha"
        )
    for name in (BIAS, AUX):
        integers = name in types and types[name] in INTEGER_DTYPES
        if integers and not (name == BIAS and form.summed):
            raise InvalidOperandError(f"{name} is {types[name].value}; expected a floating element type")


def written_of(form: Form, arrays: dict[str, Any], found: Views) -> list[str]:
    """The results beside D; refuses those that cannot be written, or that share memory with what D does not replace."""
    written = [BIAS] if form.writes_bias else []
    written += [AUX] if form.aux == WRITTEN else []
    written += [AMAX] if AMAX in found else []
    d = {name: view for name, view in found.items() if name == "d"}
    others = {name: found[name] for name in written}
    for name, view in {**d, **others}.items():
        refuse_jax_out(arrays.get(name), name, needed=name != "d")
        check_writable(view, name)
    inputs = {name: view for name, view in found.items() if name not in (*d, *written)}
    check_apart(d, inputs | others, ("c", AUX) if form.aux == READ and not form.masked else ("c",))
    check_apart(others, inputs)
    return written


def _viewed(
    array: _core.Operand, name: str, size: tuple[int, int], leading: int, *, label: str, swap: bool = False
) -> _core.Operand:
    """A matrix in an array's memory, (columns, rows) or, with `swap`, (rows, columns); `label` names `leading`."""
    rows, columns = size
    if not _holds_pitched(array, columns, rows, leading):
        reach = (columns - 1) * leading + rows if columns and rows else 0
        cure = f"copy it, or give the {label} that it has"
        _expect(array, name, reach, lambda: f"{rows} x {columns}, column-major with {label} {leading}", cure)
    return relaid(array, size, (1, leading)) if swap else relaid(array, (columns, rows), (leading, 1))


def _vector(array: _core.Operand, name: str, length: int) -> _core.Operand:
    """The first elements of an array, (length,)."""
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
