"""The extents of a 2-D convolution and of its two gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypeVar

from ...checks import MOST, shown
from ...errors import InvalidOperandError

FPROP, DGRAD, WGRAD = "conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"

OPERANDS = {FPROP: ("x", "w"), DGRAD: ("dy", "w"), WGRAD: ("dy", "x")}
"""A and B as callers call them."""

Pair: TypeAlias = "int | tuple[int, int]"
Padding: TypeAlias = "int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]"
"""One number, (rows, columns) on both sides, or ((top, bottom), (left, right))."""

Shape4: TypeAlias = tuple[int, int, int, int]

T = TypeVar("T")


def as_operands(op: str, x: T, w: T, y: T) -> tuple[T, T, T]:
    """A, B and D of an operation, of those that belong to images, filter and result, or to their gradients."""
    return {FPROP: (x, w, y), DGRAD: (y, w, x), WGRAD: (y, x, w)}[op]


def as_images(op: str, a: T, b: T, d: T) -> tuple[T, T, T]:
    """x, w and y, or the gradients in their places: undoes `as_operands`."""
    return {FPROP: (a, b, d), DGRAD: (d, b, a), WGRAD: (b, d, a)}[op]


class ConvGeometry(NamedTuple):
    """Extents of x (n, h, w, c), filter (k, r, s, c / groups) and y (n, p, q, k)."""

    n: int
    h: int
    w: int
    c: int
    k: int
    r: int
    s: int
    p: int
    q: int
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    groups: int

    @property
    def x_shape(self) -> Shape4:
        """The shape of x and of its gradient."""
        return (self.n, self.h, self.w, self.c)

    @property
    def w_shape(self) -> Shape4:
        """The shape of the filter and of its gradient."""
        return (self.k, self.r, self.s, self.c // self.groups)

    @property
    def y_shape(self) -> Shape4:
        """The shape of y."""
        return (self.n, self.p, self.q, self.k)


def conv_geometry(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> ConvGeometry:
    """All extents of a convolution.

    Args:
        x_shape: (n, h, w, c).
        w_shape: (k, r, s, c / groups).
        stride: one number, or for rows and for columns.
        padding: see `Padding`; not negative.
        dilation: distance of the filter's taps, as stride.
        groups: parts that channels are divided into, each convolved by itself.

    Raises:
        InvalidOperandError: something is no extent, channels do not divide or agree, or y would be empty.
    """
    n, h, width, c = _extents("x", x_shape, "(N, H, W, C)", least=(0, 1, 1, 1))
    k, r, s, depth = _extents("w", w_shape, "(K, R, S, C / groups)", least=(1, 1, 1, 1))
    strides, dilations = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    pads = _padding(padding)
    if isinstance(groups, bool) or not isinstance(groups, int) or not 1 <= groups <= MOST:
        raise InvalidOperandError(f"groups is {shown(groups)}; expected a positive integer")
    for name, operand, channels in (("C", "x", c), ("K", "w", k)):
        if channels % groups:
            raise InvalidOperandError(f"{operand} has {name} = {channels}, no multiple of the {groups} groups")
    if depth != c // groups:
        raise InvalidOperandError(
            f"w has shape {tuple(w_shape)}; its last extent must be {c // groups}: {c} channels in {groups} groups"
        )
    out = []
    for axis, extent, taps, step, reach, (before, after) in zip(
        ("rows", "columns"), (h, width), (r, s), strides, dilations, pads, strict=True
    ):
        room = extent + before + after - reach * (taps - 1) - 1
        if room < 0:
            raise InvalidOperandError(
                f"the result has no {axis}: {taps} taps of w with dilation {reach} are longer than {extent} with "
                f"padding {before} and {after}"
            )
        out.append(room // step + 1)
        if out[-1] > MOST:
            raise InvalidOperandError(f"the result has {out[-1]} {axis}: kernels count to 2^31 - 1")
    return ConvGeometry(n, h, width, c, k, r, s, out[0], out[1], strides, pads, dilations, groups)


def result_shape(op: str, geometry: ConvGeometry) -> Shape4:
    """The extents of D."""
    return as_operands(op, geometry.x_shape, geometry.w_shape, geometry.y_shape)[2]


def _extents(name: str, shape: tuple[int, ...], expected: str, least: Shape4) -> Shape4:
    if len(shape) != 4 or any(
        isinstance(extent, bool) or not isinstance(extent, int) or extent < low
        for extent, low in zip(shape, least, strict=True)
    ):
        raise InvalidOperandError(f"{name} has shape {tuple(shape)}; expected {expected}, of which only N may be 0")
    return (shape[0], shape[1], shape[2], shape[3])


def _pair(name: str, given: Any, least: int) -> tuple[int, int]:
    pair = (given, given) if isinstance(given, int) else given
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(_is_extent(value, least) for value in pair):
        raise InvalidOperandError(
            f"{name} is {shown(given)}; expected an integer from {least}, or one each for rows and columns"
        )
    return (pair[0], pair[1])


def _padding(given: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    pair = (given, given) if isinstance(given, int) else given
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        sides = tuple((side, side) if isinstance(side, int) else side for side in pair)
        if all(
            isinstance(side, (tuple, list)) and len(side) == 2 and all(_is_extent(value, 0) for value in side)
            for side in sides
        ):
            (top, bottom), (left, right) = sides
            return ((top, bottom), (left, right))
    raise InvalidOperandError(
        f"padding is {shown(given)}; expected an integer from 0, (rows, columns) or ((top, bottom), (left, right))"
    )


def _is_extent(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST
