"""Element types of arrays by NumPy and by DLPack, and conversions that round as the GPU does, with their error bounds.

ml_dtypes holds the narrow formats, but its casts overflow to NaN or infinity where the hardware saturates, and
round twice on the way from float64. So values are clipped and made float32 by rounding to odd (`_rounded_to_odd`)
first: the cast of ml_dtypes is then the only rounding to nearest.
ml_dtypes is imported inside the functions that need it, so that importing the package stays cheap.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from ..generator.errors import shown
from ..generator.rules import FP8_TYPES

FloatArray: TypeAlias = npt.NDArray[np.float64]
AnyArray: TypeAlias = npt.NDArray[Any]

INTEGER_DTYPES: Final = frozenset({CutlassDtype.I8, CutlassDtype.I32})
"""The integer element types: their products and sums are exact."""

PRECISIONS: Final = ("ieee", "tf32", "3xtf32")
"""The precisions of float32 operands, and their math modes; other operands have the math mode `default`."""

FAST: Final = "fast"
"""fp8's further math mode, fast accumulation: the same sums, with fewer bits kept (see `reference.tolerance`)."""

SATURATING_FLOATS: Final = frozenset({*FP8_TYPES, CutlassDtype.F4E2M1})
"""The formats whose conversions saturate, infinity included."""

E8M0_EXPONENTS: Final = (-127, 127)
"""The exponents of e8m0 scales, which are powers of two."""
_E8M0_NAN: Final = 0xFF

# The hardware's cvt writes this one NaN in both fp8 formats, whatever the sign or payload of the source.
_FP8_NAN_BITS: Final = 0x7F

Element: TypeAlias = tuple[int, int]
"""DLPack's (type code, bits)."""

BYTE: Final[Element] = (1, 8)
"""Plain bytes: packed fp4, and e8m0 scales where a framework does not know them."""

_BY_NUMPY_NAME: Final = {d.numpy_name: d for d in CutlassDtype if d is d.storage}
_SCALES_BY_NUMPY_NAME: Final = {s.numpy_name: s for s in ScaleType}


@functools.cache
def numpy_dtype(dtype: CutlassDtype | ScaleType) -> np.dtype[Any]:
    """The NumPy dtype that stores an element or scale type: one of ml_dtypes for bf16, fp8, fp4 and narrow scales.

    `TF32` is stored as float32; `F4E2M1` takes one byte an element (see `quantization.pack_fp4`).
    """
    module = np if hasattr(np, dtype.numpy_name) else importlib.import_module("ml_dtypes")
    scalar: type[Any] = getattr(module, dtype.numpy_name)
    return np.dtype(scalar)


def from_numpy_dtype(dtype: np.dtype[Any]) -> CutlassDtype | None:
    """The element type that a dtype of native byte order stores, if there is one; float32 is `F32`, never `TF32`."""
    return _BY_NUMPY_NAME.get(dtype.name) if dtype.isnative else None


def scale_type_of(dtype: np.dtype[Any]) -> ScaleType | None:
    """The scale type that a dtype of native byte order stores, if there is one."""
    return _SCALES_BY_NUMPY_NAME.get(dtype.name) if dtype.isnative else None


def element_of(dtype: np.dtype[Any]) -> Element:
    """DLPack's (type code, bits) of a NumPy dtype; refuses dtypes that no kernel has."""
    if dtype == np.uint8:
        return BYTE
    known = from_numpy_dtype(dtype) or scale_type_of(dtype)
    if known is None:
        raise InvalidOperandError(f"no kernel knows elements of type {dtype}")
    return known.dlpack


def dtype_of(operand: _core.Operand, name: str) -> CutlassDtype:
    """The operand's element type; refuses types that no kernel has. Errors call the operand `name`."""
    dtype = CutlassDtype.from_dlpack(*operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is not CutlassDtype.TF32)
        code, bits = operand.dtype
        raise InvalidOperandError(f"{name} has elements of DLPack type {code} with {bits} bits; kernels know {valid}")
    return dtype


def default_out_dtype(dtype: CutlassDtype, *, fused: bool = False) -> CutlassDtype:
    """The result's default element type for operands of a type.

    Results of integers differ if a tree, bias or activation follows (`fused`): that computes in float32, which cannot
    represent every int32.
    """
    if dtype is CutlassDtype.I8:
        return CutlassDtype.F32 if fused else CutlassDtype.I32
    return CutlassDtype.BF16 if dtype in SATURATING_FLOATS else dtype


def math_mode(dtype: CutlassDtype, precision: str | None, *, fast_accum: bool = False) -> str:
    """The math mode of a kernel's key: by `precision` for float32 operands, by `fast_accum` for fp8 operands."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise InvalidOperandError(f"unknown precision {shown(precision)}; valid: {', '.join(PRECISIONS)}")
    if dtype is CutlassDtype.F32:
        return precision or "ieee"
    if precision is not None:
        raise InvalidOperandError(f"precision={precision!r} is for float32 operands; these are {dtype.value}")
    return FAST if fast_accum and dtype in FP8_TYPES else "default"


@functools.cache
def _info(dtype: CutlassDtype) -> Any:
    """The limits of a floating-point type as NumPy or ml_dtypes tells them."""
    kind = numpy_dtype(dtype)
    if kind.isbuiltin == 1:
        return np.finfo(kind)
    import ml_dtypes

    return ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]


def finite_max(dtype: CutlassDtype) -> float:
    """The largest finite value of `dtype`, as a float; of `TF32`, that of its storage."""
    return float(np.iinfo(numpy_dtype(dtype)).max if dtype in INTEGER_DTYPES else _info(dtype).max)


def unit_roundoff(dtype: CutlassDtype) -> float:
    """The largest relative error of one rounding to nearest in `dtype`'s normal range; 0 for integers.

    For `TF32` this is that of the 11-bit significand, 2**-11, though its storage could hold more.
    """
    if dtype in INTEGER_DTYPES:
        return 0.0
    return 2.0**-11 if dtype is CutlassDtype.TF32 else float(_info(dtype).eps) / 2


def smallest_step(dtype: CutlassDtype) -> float:
    """The distance between neighbours near zero: the smallest subnormal, or 1 for integers.

    Below the normal range errors are absolute, so a comparison may always be off by this much (`within_tolerance`).
    """
    return 1.0 if dtype in INTEGER_DTYPES else float(_info(dtype).smallest_subnormal)


def to_float64(array: AnyArray) -> FloatArray:
    """The values of an array of any `CutlassDtype` as float64, exactly (int64 up to 2**53); `array` itself if it is."""
    # The conversion of a signalling NaN must not warn.
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64, copy=False)


def saturating_cast(x: npt.ArrayLike, dtype: CutlassDtype) -> AnyArray:
    """Rounds float64 values to `dtype` as the GPU's epilogue does: to nearest even, once.

    * fp8 saturates to its finite maximum, infinity included; NaN becomes the NaN 0x7f (PTX `cvt.rn.satfinite`).
    * fp4 saturates, infinity included; it has no NaN, and PTX turns NaN into the positive maximum, 6.
    * fp16, bf16 and fp32 overflow to infinity; NaN stays NaN. (TF32 is stored, and so rounded, as fp32.)
    * int8 and int32 round half to even and saturate; NaN becomes 0 (PTX `cvt.rni.sat`).

    The result has x's shape. For F64 it may be `x` itself.
    """
    values = np.asarray(x, dtype=np.float64)
    target = numpy_dtype(dtype)
    if dtype in INTEGER_DTYPES:
        info = np.iinfo(target)
        clipped: AnyArray = np.clip(np.rint(values), info.min, info.max)
        return np.where(np.isnan(values), 0.0, clipped).astype(target)
    if dtype in (CutlassDtype.F64, CutlassDtype.F32, CutlassDtype.TF32, CutlassDtype.F16):
        # NumPy converts from float64 to these directly, with one rounding.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype(target, copy=False)
    with np.errstate(all="ignore"):
        if dtype is CutlassDtype.BF16:
            return _rounded_to_odd(values).astype(target)
        largest = finite_max(dtype)
        nan = np.isnan(values)
        if dtype is CutlassDtype.F4E2M1:
            values = np.where(nan, largest, values)
        out: AnyArray = _rounded_to_odd(np.clip(values, -largest, largest)).astype(target)
        if dtype in FP8_TYPES and nan.any():
            out = np.where(nan, np.uint8(_FP8_NAN_BITS), out.view(np.uint8)).view(target)
        return out


def cast_scale(x: npt.ArrayLike, scale_type: ScaleType) -> AnyArray:
    """Rounds scales to the nearest of their type, saturating; NaN stays NaN.

    * f32: ties to even; overflow is the largest finite value.
    * ue4m3: ties to even, from 0 to 448.
    * ue8m0: to a power of two from 2**-127 to 2**127, halfway (1.5 times one) upwards, as ml_dtypes rounds.

    Negative values become the smallest there is (f32: they stay). The result is of the type's NumPy dtype.
    """
    values = np.asarray(x, dtype=np.float64)
    if scale_type is ScaleType.F32:
        limit = float(np.finfo(np.float32).max)
        with np.errstate(under="ignore"):
            return np.clip(values, -limit, limit).astype(np.float32)
    if scale_type is ScaleType.UE4M3:
        # + 0.0 takes the sign off a zero.
        return saturating_cast(np.maximum(values, 0.0) + 0.0, CutlassDtype.F8E4M3)
    fraction, exponent = np.frexp(np.maximum(values, np.ldexp(1.0, E8M0_EXPONENTS[0])))
    rounded = np.where(fraction >= 0.75, exponent, exponent - 1)
    rounded = np.where(np.isposinf(values), E8M0_EXPONENTS[1], np.clip(rounded, *E8M0_EXPONENTS))
    bits = np.where(np.isnan(values), _E8M0_NAN, rounded - E8M0_EXPONENTS[0]).astype(np.uint8)
    return bits.view(numpy_dtype(ScaleType.UE8M0))


def stored(values: FloatArray, scale_d: float | None, out_dtype: CutlassDtype) -> AnyArray:
    """saturating_cast(scale_d * values)."""
    return saturating_cast(values if scale_d is None else values * float(scale_d), out_dtype)


def _rounded_to_odd(x: FloatArray) -> npt.NDArray[np.float32]:
    """The values as float32, inexact ones towards zero and with an odd last bit.

    From there a format of at most 22 bits rounds as from float64: ties stay ties, and nothing else becomes one.
    """
    nearest = x.astype(np.float32)
    inexact = ~np.isnan(x) & (nearest != x)
    bits = np.atleast_1d(nearest).view(np.uint32) - (np.abs(nearest) > np.abs(x))
    odd: npt.NDArray[np.float32] = (bits | inexact).view(np.float32).reshape(x.shape)
    return odd


def round_to_tf32(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounds fp32 to TF32's 11-bit significand: to nearest, ties away from zero, as `cvt.rna.tf32` does.

    CUTLASS converts operands so (`tfloat32_t::round_half_ulp_truncate`). Values past TF32's maximum become infinity;
    infinity and NaN are kept.
    """
    if x.dtype != np.float32:
        raise InvalidOperandError(f"x is {x.dtype}; TF32 rounding takes float32")
    bits = np.atleast_1d(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).reshape(x.shape)
    return np.where(np.isfinite(x), rounded, x)
