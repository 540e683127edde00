"""Quantization in NumPy: scales and narrow values from wide ones, and the forms in which the GPU reads them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import InvalidOperandError
from .generator.dtypes import CutlassDtype
from .numerics import (
    SATURATING_FLOATS,
    AnyArray,
    finite_max,
    from_numpy_dtype,
    numpy_dtype,
    saturating_cast,
    to_float64,
)


class Quantized(NamedTuple):
    """Values in a narrow format, and the scale that they are to be multiplied by."""

    values: AnyArray
    scale: npt.NDArray[np.float32]


def quantize(x: AnyArray, dtype: CutlassDtype, *, axis: int | tuple[int, ...] | None = None) -> Quantized:
    """Scales an array so that its largest magnitude meets the largest value of `dtype`, and rounds it.

    Args:
        x: any shape, any dtype of `CutlassDtype`.
        dtype: fp8, fp4 or int8.
        axis: axes that share one scale: None for one scale in all, -1 for a scale a row, -2 for one a column.

    Returns:
        `values` of x's shape in `dtype`; `scale` in float32, of shape () for axis None, else with the axes kept at
        length 1, such that x is about values * scale. An all-zero slice has scale 1. Infinity takes no part in the
        scale and saturates; NaN is converted as in `saturating_cast`.

    Raises:
        InvalidOperandError: dtype needs no scale.
    """
    if dtype not in SATURATING_FLOATS and dtype is not CutlassDtype.I8:
        raise InvalidOperandError(f"quantize takes e4m3, e5m2, e2m1 or i8, not {dtype.value}")
    wide = to_float64(x)
    magnitude = np.abs(np.where(np.isfinite(wide), wide, 0.0))
    axes = tuple(range(magnitude.ndim)) if axis is None else axis
    amax = magnitude.max(axis=axes, keepdims=True, initial=0.0)
    if axis is None:
        amax = amax.reshape(())
    with np.errstate(over="ignore", under="ignore"):
        scale = np.where(amax > 0.0, amax / finite_max(dtype), 1.0).astype(np.float32)
    # Kernels hold the scale in float32; one that left its range would make every value zero or not a number.
    limits = np.finfo(np.float32)
    scale = np.asarray(np.clip(scale, limits.tiny, limits.max))
    return Quantized(saturating_cast(wide / scale.astype(np.float64), dtype), scale)


def dequantize(values: AnyArray, scale: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The product of values and scale in float32, rounded once.

    Args:
        values: any shape, any dtype of `CutlassDtype`.
        scale: broadcasts against `values`.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (to_float64(values) * np.asarray(scale, dtype=np.float64)).astype(np.float32)


def pack_fp4(values: AnyArray) -> npt.NDArray[np.uint8]:
    """Packs fp4 two to a byte along the last dimension, the even element in the low four bits.

    Args:
        values: (..., N) of ml_dtypes.float4_e2m1fn, N even.

    Returns:
        uint8 of shape (..., N / 2): what the GPU reads.

    Raises:
        InvalidOperandError: another dtype, a scalar or an odd N.
    """
    if from_numpy_dtype(values.dtype) is not CutlassDtype.F4E2M1:
        raise InvalidOperandError(f"values is {values.dtype}; expected float4_e2m1fn")
    if values.ndim == 0 or values.shape[-1] % 2:
        raise InvalidOperandError(f"values has shape {values.shape}; two elements share a byte, so N must be even")
    nibbles = np.ascontiguousarray(values).view(np.uint8) & np.uint8(0xF)
    packed: npt.NDArray[np.uint8] = nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
    return packed


def unpack_fp4(packed: npt.NDArray[np.uint8]) -> AnyArray:
    """Undoes `pack_fp4`.

    Args:
        packed: uint8 of shape (..., N / 2).

    Returns:
        ml_dtypes.float4_e2m1fn of shape (..., N).

    Raises:
        InvalidOperandError: another dtype or a scalar.
    """
    if packed.dtype != np.uint8 or packed.ndim == 0:
        raise InvalidOperandError(f"packed is {packed.dtype} of shape {packed.shape}; expected uint8 (..., N / 2)")
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.uint8)
    out[..., 0::2] = packed & np.uint8(0xF)
    out[..., 1::2] = packed >> np.uint8(4)
    return out.view(numpy_dtype(CutlassDtype.F4E2M1))
