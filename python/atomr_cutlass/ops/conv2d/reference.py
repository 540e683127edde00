"""2-D convolution (cross-correlation) and its two gradients: channels last, one product for each tap of the filter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.numerics import INTEGER_DTYPES, AnyArray, FloatArray, round_to_tf32, stored, to_float64
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...reference import parts
from ...reference.scales import Scale, read_number
from .geometry import DGRAD, FPROP, OPERANDS, WGRAD, ConvGeometry, Padding, Pair, Shape4, conv_geometry, result_shape


@dataclass(frozen=True)
class ConvTerms:
    """Parameters of a convolution beside operands and types.

    Attributes:
        stride: step of the filter: one number, or for rows and for columns.
        padding: see `Padding`.
        dilation: distance between the filter's taps, as stride.
        groups: parts that channels are divided into, each convolved by itself; C of them for a depthwise convolution.
        alpha: factor of the sum; with 0 the operands are not read.
        beta: factor of c; with 0 it is not read.
        bias: one value for each channel of the result, its last extent.
        scale_a: multiplies: a number, or an array of one element.
        scale_b: as scale_a.
        scale_d: a number, applied after the activation.
    """

    stride: Pair = 1
    padding: Padding = 0
    dilation: Pair = 1
    groups: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    bias: AnyArray | None = None
    scale_a: Scale | None = None
    scale_b: Scale | None = None
    scale_d: float | None = None


def convolution(
    op: str,
    a: AnyArray,
    b: AnyArray,
    shape: Shape4 | None = None,
    c: AnyArray | None = None,
    *,
    out_dtype: CutlassDtype,
    activation: str | None = None,
    math: str = "default",
    **terms: Any,
) -> AnyArray:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * conv(a, b) + beta * C + bias)).

    Forward, conv(x, w)[n, p, q, k] is the sum over r, s and c of x[n, p * stride - top + r * dilation, ..., c] *
    w[k, r, s, c], where c runs over the channels of k's group. The others are its gradients by x and by w, of dy.

    NaN and infinity propagate as in `gemm`. Padding is made of zeros that are multiplied like anything else, as in
    implicit GEMM: an infinite filter makes NaN where it meets padding. The gradient by x is a scatter instead: it has
    only the products that exist. (Kernels may multiply zeros there too.)

    Args:
        op: FPROP, DGRAD or WGRAD.
        a: x, (N, H, W, C), or dy, (N, P, Q, K), of any floating dtype; N may be 0.
        b: w, (K, R, S, C / groups), of a gradient by w x.
        shape: of the result; a gradient needs it: several x have the same y where the stride does not divide.
        c: of the result's shape; needed exactly when beta is not 0.
        out_dtype: the element type of the result.
        activation: a name in ACTIVATIONS.
        math: as in `gemm`: `tf32` rounds float32 operands first.
        terms: see `ConvTerms`.

    Returns:
        A new array.

    Raises:
        InvalidOperandError: a wrong rank, shape, dtype, name or combination; the message names the argument.
    """
    given = ConvTerms(**terms)
    geometry, factor = _parsed(op, (a, b), shape, c, given)
    parts.check_activation(activation)
    parts.check_math(math, parts.element_type("operand", a), parts.element_type("operand", b))
    if math == "tf32":
        a, b = round_to_tf32(a), round_to_tf32(b)
    with np.errstate(all="ignore"):
        values = _sum(op, to_float64(a), to_float64(b), geometry, factor)
        values = parts.add_terms(values, c, float(given.beta), given.bias)
        return stored(parts.activated(values, activation), given.scale_d, out_dtype)


def absolute_convolution(
    op: str, a: AnyArray, b: AnyArray, shape: Shape4 | None = None, c: AnyArray | None = None, **terms: Any
) -> FloatArray:
    """`convolution` of magnitudes in float64, against which `within_tolerance` measures errors, as `absolute_product`.

    Arguments and errors are those of `convolution`.
    """
    given = ConvTerms(**terms)
    geometry, factor = _parsed(op, (a, b), shape, c, given)
    first, second, scale_d = np.abs(to_float64(a)), np.abs(to_float64(b)), given.scale_d
    with np.errstate(all="ignore"):
        values = _sum(op, first, second, geometry, None if factor is None else abs(factor))
        values = parts.add_magnitudes(values, c, float(given.beta), given.bias)
        return values if scale_d is None else values * abs(float(scale_d))


# ----------------------------------------------------------------------------------------------------------------------
# The three sums
# ----------------------------------------------------------------------------------------------------------------------


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
    # (k, r, s, c / groups) -> for each tap (k / groups, c), the factor of a group's part of dy.
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
# Common parts
# ----------------------------------------------------------------------------------------------------------------------


_SUMS: dict[str, Callable[[FloatArray, FloatArray, ConvGeometry], FloatArray]] = {
    FPROP: _fprop, DGRAD: _dgrad, WGRAD: _wgrad
}  # fmt: skip


def _sum(op: str, a: FloatArray, b: FloatArray, geometry: ConvGeometry, factor: float | None) -> FloatArray:
    """The sums of products in an array of its own; zeros where the operands are not to be read."""
    values = np.zeros(result_shape(op, geometry))
    if factor is not None:
        values += factor * _SUMS[op](a, b, geometry)
    return values


def _parsed(
    op: str, operands: tuple[AnyArray, AnyArray], shape: Shape4 | None, c: AnyArray | None, terms: ConvTerms
) -> tuple[ConvGeometry, float | None]:
    """Checks all arguments; returns the extents, and alpha * scale_a * scale_b, None where alpha is 0."""
    shapes = {name: operand.shape for name, operand in zip(OPERANDS[op], operands, strict=True)}
    for name, operand in zip(OPERANDS[op], operands, strict=True):
        if operand.ndim != 4:
            raise InvalidOperandError(f"{name} has shape {operand.shape}; expected four dimensions, channels last")
        if parts.element_type(name, operand) in INTEGER_DTYPES:
            raise InvalidOperandError(f"{name} is {operand.dtype}; convolutions take floating-point operands")
    geometry = conv_geometry(
        shapes.get("x", shape or ()),
        shapes.get("w", shape or ()),
        stride=terms.stride,
        padding=terms.padding,
        dilation=terms.dilation,
        groups=terms.groups,
    )
    if "dy" in shapes and shapes["dy"] != geometry.y_shape:
        given = "x_shape and w" if "w" in shapes else "x and w_shape"
        raise InvalidOperandError(f"dy has shape {shapes['dy']}; {given} give {geometry.y_shape}")
    result, alpha, beta = result_shape(op, geometry), terms.alpha, terms.beta
    if c is None:
        if beta != 0.0:
            raise InvalidOperandError(f"beta is {beta}, but c is not given")
    else:
        parts.element_type("c", c)
        if c.shape != result:
            raise InvalidOperandError(f"c has shape {c.shape}; expected {result}")
    parts.check_bias(terms.bias, result[-1], "channel of the result")
    factor = float(alpha)
    for name, scale in (("scale_a", terms.scale_a), ("scale_b", terms.scale_b)):
        number = read_number(name, scale)
        with np.errstate(all="ignore"):
            factor *= number
    return geometry, None if alpha == 0.0 else factor
