"""Quantization in NumPy: scales and narrow values from wide ones, and the forms in which the GPU reads them.

Everywhere x is about values * scale. A scale comes from the largest magnitude that shares it and is rounded once, from
float64; so are the values, x / scale. Infinity takes no part in a scale and saturates; NaN is converted as in
`numerics.saturating_cast`. Elements that are all zero have scale 1.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...arrays.numerics import (
    E8M0_EXPONENTS,
    SATURATING_FLOATS,
    AnyArray,
    FloatArray,
    cast_scale,
    finite_max,
    saturating_cast,
    scale_type_of,
    to_float64,
)
from ...arrays.scales import VECTOR, pack_fp4, swizzle_scales, swizzled_size, unpack_fp4, unswizzle_scales
from ...checks import shown
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype, ScaleType

__all__ = [
    "BlockScaled", "Quantized", "dequantize", "dequantize_blockwise", "dequantize_fp4", "nvfp4_global_scale",
    "pack_fp4", "quantize", "quantize_blockwise", "quantize_mxfp4", "quantize_nvfp4", "second_level",
    "swizzle_scales", "swizzled_size", "unpack_fp4", "unswizzle_scales",
]  # fmt: skip

Float32Array: TypeAlias = npt.NDArray[np.float32]

_FLOAT32: Final = np.finfo(np.float32)
_E2M1_LARGEST_EXPONENT: Final = 2  # of 4 and 6


class Quantized(NamedTuple):
    """Values in a narrow format, and the scale that they are to be multiplied by."""

    values: AnyArray
    scale: Float32Array


def quantize(x: AnyArray, dtype: CutlassDtype, *, axis: int | tuple[int, ...] | None = None) -> Quantized:
    """Scales an array so that its largest magnitude meets the largest value of `dtype`, and rounds it.

    Args:
        x: any shape, any dtype of `CutlassDtype`.
        dtype: fp8, fp4 or int8.
        axis: axes that share one scale: None for one scale in all, -1 for a scale a row, -2 for one a column.

    Returns:
        `values` of x's shape in `dtype`; `scale` in float32, of shape () for axis None, else with the axes kept at
        length 1.

    Raises:
        InvalidOperandError: dtype needs no scale.
    """
    wide = to_float64(x)
    scale = _float32_scale(_finite_magnitude(wide).max(axis=axis, keepdims=axis is not None, initial=0.0), dtype)
    return Quantized(saturating_cast(wide / scale.astype(np.float64), dtype), scale)


def quantize_blockwise(x: AnyArray, dtype: CutlassDtype, *, block: tuple[int, int] = (1, 128)) -> Quantized:
    """`quantize` with a scale for each block of rows and columns: (1, 128) for A, (128, 128) for B.

    Args:
        x: (..., rows, columns), any dtype of `CutlassDtype`. Blocks at the far ends may be ragged.
        dtype: fp8, fp4 or int8.
        block: rows and columns that share a scale.

    Returns:
        `values` of x's shape; `scale` in float32, (..., ceil(rows / block[0]), ceil(columns / block[1])), as
        `scale_a` and `scale_b` of `reference.gemm`.

    Raises:
        InvalidOperandError: x is no matrix, the block is none, or dtype needs no scale.
    """
    _check_block(x, block)
    wide = to_float64(x)
    scale = _float32_scale(_block_amax(wide, block), dtype)
    return Quantized(saturating_cast(wide / _spread(scale, x.shape, block), dtype), scale)


def dequantize(values: AnyArray, scale: npt.ArrayLike) -> Float32Array:
    """The product of values and scale in float32, rounded once.

    Args:
        values: any shape, any dtype of `CutlassDtype`.
        scale: broadcasts against `values`.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (to_float64(values) * np.asarray(scale, dtype=np.float64)).astype(np.float32)


def dequantize_blockwise(values: AnyArray, scale: AnyArray, *, block: tuple[int, int] = (1, 128)) -> Float32Array:
    """Undoes `quantize_blockwise` as far as rounding allows.

    Args:
        values: (..., rows, columns).
        scale: (..., ceil(rows / block[0]), ceil(columns / block[1])).
        block: as it was quantized.

    Raises:
        InvalidOperandError: the shapes do not belong together.
    """
    _check_block(values, block)
    *batch, rows, columns = values.shape
    expected = (*batch, -(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != expected:
        raise InvalidOperandError(f"scale has shape {scale.shape}; expected {expected}")
    return dequantize(values, _spread(scale, values.shape, block))


class BlockScaled(NamedTuple):
    """fp4 values and their block scales: x is about values * scale * global_scale.

    Attributes:
        values: float4_e2m1fn, of x's shape.
        scale: float8_e4m3fn or float8_e8m0fnu, of x's shape but for the scaled axis, which is 16 or 32 times shorter:
            the plain form that `reference.gemm` takes; see `swizzle_scales` for the GPU's.
        global_scale: belongs into a product's alpha. 1 for mxfp4.
    """

    values: AnyArray
    scale: AnyArray
    global_scale: float = 1.0


def nvfp4_global_scale(x: AnyArray) -> float:
    """The second-level scale that lets nvfp4 use all of its range: max |x| / (6 * 448), a float32 number.

    Without one, block scales of small tensors fall below e4m3's smallest, 2**-9.

    Args:
        x: any shape, any dtype of `CutlassDtype`.

    Returns:
        A positive number; 1 where x is zero throughout.
    """
    amax = float(np.max(_finite_magnitude(to_float64(x)), initial=0.0))
    largest = finite_max(CutlassDtype.F4E2M1) * finite_max(CutlassDtype.F8E4M3)
    if amax == 0.0:
        return 1.0
    return float(np.float32(np.clip(amax / largest, _FLOAT32.tiny, _FLOAT32.max)))


def quantize_nvfp4(x: AnyArray, *, axis: int = -1, global_scale: float = 1.0) -> BlockScaled:
    """Rounds to e2m1 with an e4m3 scale for each 16 elements.

    A block's scale is its largest magnitude / 6 / global_scale, rounded to nearest even; one that is too large is 448
    (its values saturate), and one that would round to zero is the smallest there is, 2**-9. With a `global_scale` of 1,
    float32 divisions give the same bits: no quotient of a float32 and so short a number lies within float32's rounding
    of a tie without being one.

    Args:
        x: (..., K, ...), any dtype of `CutlassDtype`.
        axis: the dimension that K is: -1 for A (M, K), -2 for B (K, N). A multiple of 16 long.
        global_scale: a second-level scale for everything, such as `nvfp4_global_scale(x)`; rounded to float32.

    Returns:
        Values, e4m3 scales (none of them negative) and the second-level scale.

    Raises:
        InvalidOperandError: K is no multiple of 16, or the scale is no positive float32 number.
    """
    second = second_level(global_scale)
    block = (VECTOR[ScaleType.UE4M3],)
    last = _in_vectors(x, axis, *block)
    amax = _block_amax(last, block)
    with np.errstate(over="ignore", under="ignore"):
        wanted = amax / finite_max(CutlassDtype.F4E2M1) / second
    smallest = 2.0**-9
    scale = cast_scale(np.where(amax > 0.0, np.maximum(wanted, smallest), 1.0), ScaleType.UE4M3)
    return _block_scaled(last, block, scale, axis, second)


def quantize_mxfp4(x: AnyArray, *, axis: int = -1) -> BlockScaled:
    """Rounds to e2m1 with an e8m0 scale for each 32 elements.

    The scale is that of the OCP Microscaling Formats specification 1.0, section 6.3: the largest power of two that is
    not above the block's largest magnitude, divided by the largest power of two in e2m1, which is 4. So values of up
    to 8 meet a format that ends at 6, and those above it saturate. Exponents are clamped to those of e8m0.

    Args:
        x: (..., K, ...), any dtype of `CutlassDtype`.
        axis: the dimension that K is: -1 for A (M, K), -2 for B (K, N). A multiple of 32 long.

    Returns:
        Values and e8m0 scales.

    Raises:
        InvalidOperandError: K is no multiple of 32.
    """
    block = (VECTOR[ScaleType.UE8M0],)
    last = _in_vectors(x, axis, *block)
    amax = _block_amax(last, block)
    # frexp's fraction is in [0.5, 1), so its exponent is one above that of the leading bit.
    exponent = np.frexp(amax)[1] - 1 - _E2M1_LARGEST_EXPONENT
    exponent = np.where(amax > 0.0, np.clip(exponent, *E8M0_EXPONENTS), 0)
    return _block_scaled(last, block, cast_scale(np.ldexp(1.0, exponent), ScaleType.UE8M0), axis, 1.0)


def dequantize_fp4(x: BlockScaled, *, axis: int = -1) -> Float32Array:
    """The product of values, scale and global_scale in float32, rounded once.

    Args:
        x: the result of `quantize_nvfp4` or `quantize_mxfp4`.
        axis: as it was quantized.

    Raises:
        InvalidOperandError: a wrong dtype, or shapes that do not belong together.
    """
    vector = VECTOR.get(scale_type_of(x.scale.dtype) or ScaleType.F32)
    if vector is None:
        raise InvalidOperandError(f"scale is {x.scale.dtype}; expected float8_e4m3fn or float8_e8m0fnu")
    last, scale = _in_vectors(x.values, axis, vector), np.moveaxis(x.scale, axis, -1)
    if scale.shape != (*last.shape[:-1], last.shape[-1] // vector):
        raise InvalidOperandError(
            f"scale has shape {x.scale.shape} for values of {x.values.shape}; expected one for each {vector} elements"
        )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = last * (_spread(scale, last.shape, (vector,)) * x.global_scale)
        return np.ascontiguousarray(np.moveaxis(product, -1, axis), np.float32)


def second_level(global_scale: float) -> float:
    """A second-level scale, rounded to float32; refuses a value that is not positive and finite then."""
    with np.errstate(over="ignore", under="ignore"):
        try:
            second = float(np.float32(global_scale))
        except OverflowError:  # of a Python integer
            second = np.inf
    if not 0.0 < second < np.inf:
        raise InvalidOperandError(
            f"global_scale is {shown(global_scale)}; expected a positive number in float32's range"
        )
    return second


def _check_block(x: AnyArray, block: tuple[int, int]) -> None:
    if x.ndim < 2:
        raise InvalidOperandError(f"shape is {x.shape}; blocks need (..., rows, columns)")
    if len(block) != 2 or min(block) < 1:
        raise InvalidOperandError(f"block is {block}; expected two positive extents")


def _finite_magnitude(wide: FloatArray) -> FloatArray:
    return np.abs(np.where(np.isfinite(wide), wide, 0.0))


def _float32_scale(amax: FloatArray, dtype: CutlassDtype) -> Float32Array:
    """Scales that make `amax` the largest value of `dtype`."""
    if dtype not in SATURATING_FLOATS and dtype is not CutlassDtype.I8:
        raise InvalidOperandError(f"quantize takes e4m3, e5m2, e2m1 or i8, not {dtype.value}")
    with np.errstate(over="ignore", under="ignore"):
        scale = np.where(amax > 0.0, amax / finite_max(dtype), 1.0).astype(np.float32)
    # Kernels hold the scale in float32; one that left its range would make every value zero or not a number.
    return np.asarray(np.clip(scale, _FLOAT32.tiny, _FLOAT32.max))


def _block_amax(wide: FloatArray, block: tuple[int, ...]) -> FloatArray:
    """The largest finite magnitude of each block of the last dimensions."""
    amax = _finite_magnitude(wide)
    for axis, size in enumerate(block, start=-len(block)):
        amax = np.maximum.reduceat(amax, np.arange(0, amax.shape[axis], size), axis=axis)
    return amax


def _spread(scale: AnyArray, shape: tuple[int, ...], block: tuple[int, ...]) -> FloatArray:
    """Each scale repeated over its block of the last dimensions, which end with those of `shape`."""
    wide = to_float64(scale)
    for axis, size in enumerate(block, start=-len(block)):
        wide = np.repeat(wide, np.diff([*range(0, shape[axis], size), shape[axis]]), axis)
    return wide


def _in_vectors(x: AnyArray, axis: int, vector: int) -> FloatArray:
    """The array with `axis` last; refuses an extent that is no multiple of `vector`."""
    if not -x.ndim <= axis < x.ndim:
        raise InvalidOperandError(f"axis is {axis}, but the shape is {x.shape}")
    if x.shape[axis] % vector:
        raise InvalidOperandError(
            f"axis {axis} of {x.shape} is no multiple of {vector}: one scale is for {vector} elements"
        )
    return np.moveaxis(to_float64(x), axis, -1)


def _block_scaled(last: FloatArray, block: tuple[int], scale: AnyArray, axis: int, second: float) -> BlockScaled:
    """Vectors divided by their scales, rounded to e2m1; the scaled axis is last in both arguments."""
    with np.errstate(over="ignore", under="ignore"):
        values = saturating_cast(last / (_spread(scale, last.shape, block) * second), CutlassDtype.F4E2M1)
    values, scale = (np.ascontiguousarray(np.moveaxis(each, -1, axis)) for each in (values, scale))
    return BlockScaled(values, scale, second)
