"""The reference of 2-D convolution (cross-correlation) and its gradients, and its probe.

Channels are last, and each tap of the filter is one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.layouts import TO_NHWC, axes_of, permuted, row_major
from ...arrays.numerics import INTEGER_DTYPES, AnyArray, FloatArray, round_to_tf32, stored, to_float64
from ...epilogue.results import ImageResult
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...pipeline.operation import Array, Arrays
from ...pipeline.probe import Probe, slices
from ...reference import parts
from ..gemm.reference import GemmTerms
from .problem import DGRAD, FPROP, OPERANDS, WGRAD, ConvGeometry, Padding, Pair, as_images, conv_geometry, result_shape

if TYPE_CHECKING:
    from .operation import ConvRequest


def convolution(
    op: str,
    a: AnyArray,
    b: AnyArray,
    shape: tuple[int, ...] | None = None,
    c: AnyArray | None = None,
    *,
    out_dtype: CutlassDtype,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    **terms: Any,
) -> AnyArray:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * conv(a, b) + beta * C + bias)).

    Forward, conv(x, w)[n, p, q, k] is the sum over r, s and c of x[n, p * stride - top + r * dilation, ..., c] *
    w[k, r, s, c], where c runs over the channels of k's group. The others are its gradients by x and by w, of dy.

    NaN and infinity propagate as in `gemm`. Padding is made of zeros that are multiplied like anything else, as in
    implicit GEMM: an infinite filter makes NaN where it meets padding. The gradient by x is a scatter instead: it has
    only the products that exist. (Kernels may multiply zeros there too.)

    `op` is FPROP, DGRAD or WGRAD, a and b its OPERANDS with dimensions in the order of NHWC; `shape` is that of the
    result, which a gradient needs: several x have the same y where the stride does not divide. `terms` are those of
    `GemmTerms`, scales numbers. With alpha 0 the operands are not read, with beta 0 `c` is not. What `conv2d` refuses
    beside integers, an unknown activation, a bias of another length and extents is not looked at.
    """
    given = GemmTerms(**terms)
    for name, operand in zip(OPERANDS[op], (a, b), strict=True):
        if parts.element_type(name, operand) in INTEGER_DTYPES:
            raise InvalidOperandError(f"{name} is {operand.dtype}; convolutions take floating-point operands")
    x, w, _ = as_images(op, a.shape, b.shape, shape or ())
    geometry = conv_geometry(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    result = result_shape(op, geometry)
    parts.check_activation(given.activation)
    parts.check_bias(given.bias, result[-1], "channel of the result")
    if given.math == "tf32":
        a, b = round_to_tf32(a), round_to_tf32(b)
    values = np.zeros(result)
    with np.errstate(all="ignore"):
        if given.alpha != 0.0:
            factors = [float(factor) for factor in (given.alpha, given.scale_a, given.scale_b) if factor is not None]
            values += np.prod(factors) * _sums(op, to_float64(a), to_float64(b), geometry)
        values = parts.add_terms(values, c, float(given.beta), given.bias, given.activation)
        return stored(values, given.scale_d, out_dtype)


def absolute_convolution(
    op: str, a: AnyArray, b: AnyArray, shape: tuple[int, ...] | None = None, c: AnyArray | None = None, **terms: Any
) -> AnyArray:
    """`convolution` of magnitudes in float64, against which `within_tolerance` measures errors."""
    a, b = np.abs(to_float64(a)), np.abs(to_float64(b))
    c = None if c is None else np.abs(to_float64(c))
    signed = {"alpha", "beta", "bias", "scale_a", "scale_b", "scale_d"}
    sizes = {name: abs(term) if name in signed and term is not None else term for name, term in terms.items()}
    return convolution(op, a, b, shape, c, out_dtype=CutlassDtype.F64, **sizes)


class ConvProbe(Probe["ConvRequest"]):
    """The probe of a convolution; a tree is evaluated over the matrix of pixels and channels of the result."""

    def __init__(self, request: ConvRequest, arrays: Arrays) -> None:
        super().__init__(request, arrays)
        g = request.shape.geometry
        self.how |= {"stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups}
        axes = axes_of(request.layout.value, TO_NHWC)
        self.arrays = {name: permuted(array, axes) for name, array in arrays.items()}

    @property
    def depth(self) -> int:
        g = self.request.shape.geometry
        taps = g.r * g.s
        return {FPROP: taps * g.c // g.groups, DGRAD: taps * g.k // g.groups}.get(self.request.op, g.n * g.p * g.q)

    def parts(self) -> Iterator[Arrays]:
        g, op = self.request.shape.geometry, self.request.op
        if self.tree is not None or (op == WGRAD and g.groups > 1):
            yield self.arrays
            return
        for part in slices(g.k if op == WGRAD else g.n):
            places = {"c": part, "out": part, OPERANDS[op][0]: (..., part) if op == WGRAD else part}
            yield {name: array[places.get(name, ...)] for name, array in self.arrays.items()}

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        return self._called(convolution, part, out_dtype=dtype, math=self.request.math)

    def magnitudes(self, part: Arrays) -> Array:
        return self._called(absolute_convolution, part)

    def _called(self, function: Callable[..., Array], part: Arrays, **how: Any) -> Array:
        """The result of a function of the reference on a part; with a tree, as a matrix."""
        a, b = (part[name] for name in OPERANDS[self.request.op])
        c = part["c"] if self.request.epilogue.beta != 0 else None  # with beta 0 it may be an operand of the tree
        made = function(self.request.op, a, b, part["out"].shape, c, **how, **self.how)
        return made if self.tree is None else made.reshape(ImageResult(made.shape).matrix)

    def matrices(self, part: Arrays) -> Arrays:
        image, product = ImageResult(part["out"].shape), OPERANDS[self.request.op]
        return {
            name: array.reshape(image.as_matrix(name, array.shape, row_major(array.shape))[0])
            for name, array in part.items()
            if name not in product
        }


def _sums(op: str, a: FloatArray, b: FloatArray, g: ConvGeometry) -> FloatArray:
    """The convolution: a product for each group of channels and each tap of the filter."""
    x, w, y = as_images(op, a, b, np.zeros(result_shape(op, g)))
    padded = np.pad(_by_group(x, g), ((0, 0), (0, 0), *g.padding, (0, 0)))
    filters = w.reshape(g.groups, g.k // g.groups, g.r, g.s, g.c // g.groups)
    of_y = _by_group(y, g)
    pixels = _pixels(of_y)
    for r, s in np.ndindex(g.r, g.s):
        tap = filters[:, :, r, s]
        # The pixels of x that meet the tap: as many as y has.
        met = padded[:, :, r * g.dilation[0] :: g.stride[0], s * g.dilation[1] :: g.stride[1]][:, :, : g.p, : g.q]
        if op == FPROP:
            pixels += _product(_pixels(met), tap.swapaxes(1, 2))
        elif op == DGRAD:
            met += _product(pixels, tap).reshape(met.shape)
        else:
            tap[...] = pixels.swapaxes(1, 2) @ _pixels(met)
    if op == WGRAD:
        return w
    (top, _), (left, _) = g.padding
    of_x = padded[:, :, top : top + g.h, left : left + g.w]
    return np.moveaxis(pixels.reshape(of_y.shape) if op == FPROP else of_x, 0, -2).reshape(result_shape(op, g))


def _product(pixels: FloatArray, tap: FloatArray) -> FloatArray:
    """The products of all groups; elementwise for single channels, which is faster than many products of a column."""
    product: FloatArray = pixels * tap if pixels.shape[-1] == 1 else pixels @ tap
    return product


def _by_group(images: FloatArray, g: ConvGeometry) -> FloatArray:
    """Images (n, rows, columns, channels) as (groups, n, rows, columns, channels of a group)."""
    *pixels, channels = images.shape
    return np.moveaxis(images.reshape(*pixels, g.groups, channels // g.groups), -2, 0)


def _pixels(images: FloatArray) -> FloatArray:
    """Images by group as matrices: (groups, pixels, channels of a group)."""
    return images.reshape(images.shape[0], -1, images.shape[-1])
