"""2-D convolution (cross-correlation) and its two gradients: channels last, one product for each tap of the filter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...arrays.numerics import INTEGER_DTYPES, AnyArray, FloatArray, round_to_tf32, to_float64
from ...checks import MOST, shown
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...reference.checks import check_math, element_type
from ...reference.epilogue import activated, add_magnitudes, add_terms, check_activation, check_bias, stored
from ...reference.scales import Scale, read_number

Pair: TypeAlias = "int | tuple[int, int]"
Padding: TypeAlias = "int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]"
"""One number, (rows, columns) on both sides, or ((top, bottom), (left, right))."""

Shape4: TypeAlias = tuple[int, int, int, int]


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
    for what, extent, taps, step, reach, (before, after) in zip(
        ("rows", "columns"), (h, width), (r, s), strides, dilations, pads, strict=True
    ):
        room = extent + before + after - reach * (taps - 1) - 1
        if room < 0:
            raise InvalidOperandError(
                f"the result has no {what}: {taps} taps of w with dilation {reach} are longer than {extent} with "
                f"padding {before} and {after}"
            )
        out.append(room // step + 1)
        if out[-1] > MOST:
            raise InvalidOperandError(f"the result has {out[-1]} {what}: kernels count to 2^31 - 1")
    return ConvGeometry(n, h, width, c, k, r, s, out[0], out[1], strides, pads, dilations, groups)


def conv2d(
    x: AnyArray,
    w: AnyArray,
    c: AnyArray | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    activation: str | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype,
    math: str = "default",
) -> AnyArray:
    """Y = saturating_cast(scale_d * act(alpha * scale_a * scale_b * conv(x, w) + beta * C + bias)).

    conv(x, w)[n, p, q, k] is the sum over r, s and c of x[n, p * stride - top + r * dilation, ..., c] * w[k, r, s, c],
    where c runs over the channels of k's group.

    NaN and infinity propagate as in `gemm`. Padding is made of zeros that are multiplied like anything else, as in
    implicit GEMM: an infinite filter makes NaN where it meets padding. The gradient by x is a scatter instead: it has
    only the products that exist. (Kernels may multiply zeros there too.)

    Args:
        x: (N, H, W, C) of any floating dtype; N may be 0.
        w: (K, R, S, C / groups).
        c: (N, P, Q, K); not read when beta is 0.
        stride: one number, or for rows and for columns.
        padding: one number, (rows, columns), or ((top, bottom), (left, right)).
        dilation: distance of the filter's taps.
        groups: parts that channels are divided into; C of them for a depthwise convolution.
        alpha: factor of the convolution; with 0, x and w are not read.
        beta: factor of c.
        bias: one value for each channel of the result, its last extent.
        activation: a name in ACTIVATIONS.
        scale_a: a number, or an array of one element; multiplies.
        scale_b: likewise.
        scale_d: a number, applied after the activation.
        out_dtype: the element type of the result.
        math: as in `gemm`: `tf32` rounds float32 operands first.

    Returns:
        A new array (N, P, Q, K).

    Raises:
        InvalidOperandError: a wrong rank, shape, dtype, name or combination; the message names the argument.
    """
    _check_operands(x=x, w=w)
    geometry = conv_geometry(x.shape, w.shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    terms = _Terms(geometry.y_shape, c, alpha, beta, bias, scale_a, scale_b, scale_d)
    return _run(_fprop, (x, w), geometry, terms, activation, out_dtype, math)


def conv2d_dgrad(
    dy: AnyArray,
    w: AnyArray,
    x_shape: Shape4,
    c: AnyArray | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    activation: str | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype,
    math: str = "default",
) -> AnyArray:
    """The gradient of `conv2d` by x, with the epilogue of `conv2d`.

    Args:
        dy: (N, P, Q, K), the gradient by y.
        w: (K, R, S, C / groups).
        x_shape: (N, H, W, C). Several x give the same y where the stride does not divide, so it has to be said.
        c: (N, H, W, C).
        stride: as in `conv2d`, like the rest.
        padding: see there.
        dilation: see there.
        groups: see there.
        alpha: factor of the gradient.
        beta: factor of c.
        bias: (C,).
        activation: a name in ACTIVATIONS.
        scale_a: of dy.
        scale_b: of w.
        scale_d: a number.
        out_dtype: the element type of the result.
        math: as in `gemm`.

    Returns:
        A new array (N, H, W, C).

    Raises:
        InvalidOperandError: as `conv2d`; also when dy's extents are not those of a y of `x_shape` and w.
    """
    _check_operands(dy=dy, w=w)
    geometry = conv_geometry(x_shape, w.shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    _check_gradient(dy, geometry, "x_shape and w")
    terms = _Terms(geometry.x_shape, c, alpha, beta, bias, scale_a, scale_b, scale_d)
    return _run(_dgrad, (dy, w), geometry, terms, activation, out_dtype, math)


def conv2d_wgrad(
    dy: AnyArray,
    x: AnyArray,
    w_shape: Shape4,
    c: AnyArray | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    activation: str | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype,
    math: str = "default",
) -> AnyArray:
    """The gradient of `conv2d` by w, with the epilogue of `conv2d`.

    Args:
        dy: (N, P, Q, K), the gradient by y.
        x: (N, H, W, C).
        w_shape: (K, R, S, C / groups).
        c: (K, R, S, C / groups).
        stride: as in `conv2d`, like the rest.
        padding: see there.
        dilation: see there.
        groups: see there.
        alpha: factor of the gradient.
        beta: factor of c.
        bias: (C / groups,).
        activation: a name in ACTIVATIONS.
        scale_a: of dy.
        scale_b: of x.
        scale_d: a number.
        out_dtype: the element type of the result.
        math: as in `gemm`.

    Returns:
        A new array (K, R, S, C / groups).

    Raises:
        InvalidOperandError: as `conv2d`; also when dy's extents are not those of a y of x and `w_shape`.
    """
    _check_operands(dy=dy, x=x)
    geometry = conv_geometry(x.shape, w_shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    _check_gradient(dy, geometry, "x and w_shape")
    terms = _Terms(geometry.w_shape, c, alpha, beta, bias, scale_a, scale_b, scale_d)
    return _run(_wgrad, (dy, x), geometry, terms, activation, out_dtype, math)


def absolute_conv2d(
    x: AnyArray,
    w: AnyArray,
    c: AnyArray | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
) -> FloatArray:
    """`conv2d` of magnitudes, as `absolute_product` is of a product: what `within_tolerance` measures against.

    Args:
        x: as in `conv2d`, like the rest.
        w: (K, R, S, C / groups).
        c: (N, P, Q, K).
        stride: see there.
        padding: see there.
        dilation: see there.
        groups: see there.
        alpha: factor of the convolution.
        beta: factor of c.
        bias: (K,).
        scale_a: of x.
        scale_b: of w.
        scale_d: a number.

    Returns:
        float64 (N, P, Q, K).

    Raises:
        InvalidOperandError: as `conv2d` does.
    """
    _check_operands(x=x, w=w)
    geometry = conv_geometry(x.shape, w.shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    terms = _Terms(geometry.y_shape, c, alpha, beta, bias, scale_a, scale_b, scale_d)
    return _run_absolute(_fprop, (x, w), geometry, terms)


def absolute_conv2d_dgrad(
    dy: AnyArray,
    w: AnyArray,
    x_shape: Shape4,
    c: AnyArray | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
) -> FloatArray:
    """`conv2d_dgrad` of magnitudes; see `absolute_conv2d`.

    Args:
        dy: as in `conv2d_dgrad`, like the rest.
        w: (K, R, S, C / groups).
        x_shape: (N, H, W, C).
        c: (N, H, W, C).
        stride: see there.
        padding: see there.
        dilation: see there.
        groups: see there.
        alpha: factor of the gradient.
        beta: factor of c.
        bias: (C,).
        scale_a: of dy.
        scale_b: of w.
        scale_d: a number.

    Returns:
        float64 (N, H, W, C).

    Raises:
        InvalidOperandError: as `conv2d_dgrad` does.
    """
    _check_operands(dy=dy, w=w)
    geometry = conv_geometry(x_shape, w.shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    _check_gradient(dy, geometry, "x_shape and w")
    terms = _Terms(geometry.x_shape, c, alpha, beta, bias, scale_a, scale_b, scale_d)
    return _run_absolute(_dgrad, (dy, w), geometry, terms)


def absolute_conv2d_wgrad(
    dy: AnyArray,
    x: AnyArray,
    w_shape: Shape4,
    c: AnyArray | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
) -> FloatArray:
    """`conv2d_wgrad` of magnitudes; see `absolute_conv2d`.

    Args:
        dy: as in `conv2d_wgrad`, like the rest.
        x: (N, H, W, C).
        w_shape: (K, R, S, C / groups).
        c: (K, R, S, C / groups).
        stride: see there.
        padding: see there.
        dilation: see there.
        groups: see there.
        alpha: factor of the gradient.
        beta: factor of c.
        bias: (C / groups,).
        scale_a: of dy.
        scale_b: of x.
        scale_d: a number.

    Returns:
        float64 (K, R, S, C / groups).

    Raises:
        InvalidOperandError: as `conv2d_wgrad` does.
    """
    _check_operands(dy=dy, x=x)
    geometry = conv_geometry(x.shape, w_shape, stride=stride, padding=padding, dilation=dilation, groups=groups)
    _check_gradient(dy, geometry, "x and w_shape")
    terms = _Terms(geometry.w_shape, c, alpha, beta, bias, scale_a, scale_b, scale_d)
    return _run_absolute(_wgrad, (dy, x), geometry, terms)


# ----------------------------------------------------------------------------------------------------------------------
# The three sums
# ----------------------------------------------------------------------------------------------------------------------

_Sum: TypeAlias = Callable[[FloatArray, FloatArray, ConvGeometry], FloatArray]


def _fprop(x: FloatArray, w: FloatArray, g: ConvGeometry) -> FloatArray:
    padded = _padded(x, g)
    y = np.zeros((g.n * g.p * g.q, g.k))
    for r, s, rows, columns in _taps(g):
        # (pixels, c) x (k, c / groups) -> (pixels, k)
        y += _grouped(padded[:, rows, columns].reshape(-1, g.c), w[:, r, s].swapaxes(0, 1), g.groups)
    return y.reshape(g.y_shape)


def _dgrad(dy: FloatArray, w: FloatArray, g: ConvGeometry) -> FloatArray:
    pixels = dy.reshape(-1, g.k)
    padded = np.zeros((g.n, g.h + sum(g.padding[0]), g.w + sum(g.padding[1]), g.c))
    # (k, r, s, c / groups) -> for each tap (k / groups, c): what a group's part of dy is multiplied by.
    depth, width = g.c // g.groups, g.k // g.groups
    taps = w.reshape(g.groups, width, g.r, g.s, depth).transpose(2, 3, 1, 0, 4).reshape(g.r, g.s, width, g.c)
    for r, s, rows, columns in _taps(g):
        padded[:, rows, columns] += _grouped(pixels, taps[r, s], g.groups).reshape(g.n, g.p, g.q, g.c)
    (top, _), (left, _) = g.padding
    return padded[:, top : top + g.h, left : left + g.w]


def _wgrad(dy: FloatArray, x: FloatArray, g: ConvGeometry) -> FloatArray:
    padded = _padded(x, g)
    dw = np.empty(g.w_shape)
    depth, width = g.c // g.groups, g.k // g.groups
    pixels = dy.reshape(-1, g.groups, width)
    for r, s, rows, columns in _taps(g):
        seen = padded[:, rows, columns].reshape(-1, g.groups, depth)
        if g.groups == 1:
            tap = pixels[:, 0].T @ seen[:, 0]
        elif depth == 1:
            tap = np.einsum("tgk,tg->gk", pixels, seen[..., 0])
        else:
            # (groups, k / groups, pixels) x (groups, pixels, c / groups)
            tap = np.matmul(pixels.transpose(1, 2, 0), seen.transpose(1, 0, 2))
        dw[:, r, s] = tap.reshape(g.k, depth)
    return dw


def _grouped(pixels: FloatArray, tap: FloatArray, groups: int) -> FloatArray:
    """(pixels, groups * i) x (i, groups * j) -> (pixels, groups * j), group by group."""
    if groups == 1:
        product: FloatArray = pixels @ tap
        return product
    inner, outer = tap.shape
    parts = pixels.reshape(-1, groups, inner)
    taps = tap.reshape(inner, groups, outer // groups)
    if inner == 1:
        product = parts * taps[0]
    else:
        product = np.matmul(parts.transpose(1, 0, 2), taps.transpose(1, 0, 2)).transpose(1, 0, 2)
    return product.reshape(-1, outer)


def _padded(x: FloatArray, g: ConvGeometry) -> FloatArray:
    return np.pad(x, ((0, 0), *g.padding, (0, 0))) if g.padding != ((0, 0), (0, 0)) else x


def _taps(g: ConvGeometry) -> Iterator[tuple[int, int, slice, slice]]:
    """For each tap of the filter, the rows and columns of padded x that it meets: as many as y has."""
    for r in range(g.r):
        top = r * g.dilation[0]
        rows = slice(top, top + (g.p - 1) * g.stride[0] + 1, g.stride[0])
        for s in range(g.s):
            left = s * g.dilation[1]
            yield r, s, rows, slice(left, left + (g.q - 1) * g.stride[1] + 1, g.stride[1])


# ----------------------------------------------------------------------------------------------------------------------
# What is around them
# ----------------------------------------------------------------------------------------------------------------------


class _Terms(NamedTuple):
    """Everything but the operands: the result's shape, and what is multiplied and added."""

    shape: Shape4
    c: AnyArray | None
    alpha: float
    beta: float
    bias: AnyArray | None
    scale_a: Scale | None
    scale_b: Scale | None
    scale_d: float | None


def _run(
    summed: _Sum,
    operands: tuple[AnyArray, AnyArray],
    geometry: ConvGeometry,
    terms: _Terms,
    activation: str | None,
    out_dtype: CutlassDtype,
    math: str,
) -> AnyArray:
    check_activation(activation)
    check_math(math, *(element_type("operand", operand) for operand in operands))
    factor = _checked_factor(terms)
    if math == "tf32":
        operands = (round_to_tf32(operands[0]), round_to_tf32(operands[1]))
    with np.errstate(all="ignore"):
        values = np.zeros(terms.shape)
        if factor is not None:
            values += factor * summed(to_float64(operands[0]), to_float64(operands[1]), geometry)
        values = activated(add_terms(values, terms.c, float(terms.beta), terms.bias), activation)
        return stored(values, terms.scale_d, out_dtype)


def _run_absolute(
    summed: _Sum, operands: tuple[AnyArray, AnyArray], geometry: ConvGeometry, terms: _Terms
) -> FloatArray:
    factor = _checked_factor(terms)
    with np.errstate(all="ignore"):
        values = np.zeros(terms.shape)
        if factor is not None:
            first, second = (np.abs(to_float64(operand)) for operand in operands)
            values += abs(factor) * summed(first, second, geometry)
        values = add_magnitudes(values, terms.c, float(terms.beta), terms.bias)
        return values if terms.scale_d is None else values * abs(float(terms.scale_d))


def _checked_factor(terms: _Terms) -> float | None:
    """Checks the terms; returns alpha * scale_a * scale_b, or None where alpha is 0 and nothing is read."""
    if terms.c is None:
        if terms.beta != 0.0:
            raise InvalidOperandError(f"beta is {terms.beta}, but c is not given")
    else:
        element_type("c", terms.c)
        if terms.c.shape != terms.shape:
            raise InvalidOperandError(f"c has shape {terms.c.shape}; expected {terms.shape}")
    check_bias(terms.bias, terms.shape[-1], "channel of the result")
    factor = float(terms.alpha)
    for name, scale in (("scale_a", terms.scale_a), ("scale_b", terms.scale_b)):
        number = read_number(name, scale)
        with np.errstate(all="ignore"):
            factor *= number
    return None if terms.alpha == 0.0 else factor


def _check_operands(**operands: AnyArray) -> None:
    for name, operand in operands.items():
        if operand.ndim != 4:
            raise InvalidOperandError(f"{name} has shape {operand.shape}; expected four dimensions, channels last")
        if element_type(name, operand) in INTEGER_DTYPES:
            raise InvalidOperandError(f"{name} is {operand.dtype}; convolutions take floating-point operands")


def _check_gradient(dy: AnyArray, geometry: ConvGeometry, given: str) -> None:
    if dy.shape != geometry.y_shape:
        raise InvalidOperandError(f"dy has shape {dy.shape}; {given} give {geometry.y_shape}")


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
        sides = tuple((one, one) if isinstance(one, int) else one for one in pair)
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
