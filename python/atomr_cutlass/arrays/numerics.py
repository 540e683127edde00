"""Number formats in NumPy: conversions that round as the GPU does, and their error bounds.

ml_dtypes holds the narrow formats, but its casts overflow to NaN or infinity where the hardware saturates, and
round twice on the way from float64. Everything here rounds once, then only asks ml_dtypes for the encoding.
ml_dtypes is imported inside the functions that need it, so that importing the package stays cheap.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from ..generator.errors import shown

FloatArray: TypeAlias = npt.NDArray[np.float64]
AnyArray: TypeAlias = npt.NDArray[Any]

INTEGER_DTYPES: Final = frozenset({CutlassDtype.I8, CutlassDtype.I32})
"""The integer element types: their products and sums are exact."""

PRECISIONS: Final = ("ieee", "tf32", "3xtf32")
"""The precisions that a caller may choose for float32 operands."""

MATH_MODES: Final = ("default", *PRECISIONS)
"""How operands are multiplied: `default` for every dtype but float32, the others for float32 only."""

FAST: Final = "fast"
"""fp8's further math mode, fast accumulation: the same sums, with fewer bits kept (see `reference.tolerance`)."""

FP8_DTYPES: Final = frozenset({CutlassDtype.F8E4M3, CutlassDtype.F8E5M2})
"""The 8-bit floating-point types."""


class _Format(NamedTuple):
    """A binary floating-point format: explicit fraction bits, least normal exponent, largest finite value."""

    fraction_bits: int
    min_exponent: int
    largest: float


_FORMATS: Final[dict[CutlassDtype, _Format]] = {
    CutlassDtype.F64: _Format(52, -1022, float(np.finfo(np.float64).max)),
    CutlassDtype.F32: _Format(23, -126, float(np.finfo(np.float32).max)),
    CutlassDtype.TF32: _Format(10, -126, math.ldexp(2.0 - 2.0**-10, 127)),
    CutlassDtype.F16: _Format(10, -14, 65504.0),
    CutlassDtype.BF16: _Format(7, -126, math.ldexp(2.0 - 2.0**-7, 127)),
    CutlassDtype.F8E4M3: _Format(3, -6, 448.0),
    CutlassDtype.F8E5M2: _Format(2, -14, 57344.0),
    CutlassDtype.F4E2M1: _Format(1, 0, 6.0),
}

SATURATING_FLOATS: Final = frozenset({CutlassDtype.F8E4M3, CutlassDtype.F8E5M2, CutlassDtype.F4E2M1})
"""The formats whose conversions saturate, infinity included."""

E8M0_EXPONENTS: Final = (-127, 127)
"""The exponents of e8m0 scales, which are powers of two."""
_E8M0_NAN: Final = 0xFF

# The hardware's cvt writes this one NaN in both fp8 formats, whatever the sign or payload of the source.
_FP8_NAN_BITS: Final = 0x7F


# ----------------------------------------------------------------------------------------------------------------------
# dtypes
# ----------------------------------------------------------------------------------------------------------------------


@functools.cache
def numpy_dtype(dtype: CutlassDtype | ScaleType) -> np.dtype[Any]:
    """The NumPy dtype that stores `dtype`.

    Args:
        dtype: any element or scale type. `TF32` is stored as float32; `F4E2M1` takes one byte an element (see
            `quantization.pack_fp4`).

    Returns:
        A NumPy dtype, or an ml_dtypes one for bf16, fp8, fp4 and narrow scales.
    """
    if hasattr(np, dtype.numpy_name):
        scalar: type[Any] = getattr(np, dtype.numpy_name)
    else:
        import ml_dtypes

        scalar = getattr(ml_dtypes, dtype.numpy_name)
    return np.dtype(scalar)


_BY_NUMPY_NAME: Final = {d.numpy_name: d for d in CutlassDtype if d is d.storage}


def from_numpy_dtype(dtype: np.dtype[Any]) -> CutlassDtype | None:
    """The element type that a NumPy dtype stores.

    Args:
        dtype: a NumPy or ml_dtypes dtype.

    Returns:
        The element type (float32 is `F32`, never `TF32`), or None where there is none, foreign byte order included.
    """
    return _BY_NUMPY_NAME.get(dtype.name) if dtype.isnative else None


_SCALES_BY_NUMPY_NAME: Final = {s.numpy_name: s for s in ScaleType}


def scale_type_of(dtype: np.dtype[Any]) -> ScaleType | None:
    """The scale type that a NumPy dtype stores.

    Args:
        dtype: a NumPy or ml_dtypes dtype.

    Returns:
        The type, or None where there is none, foreign byte order included.
    """
    return _SCALES_BY_NUMPY_NAME.get(dtype.name) if dtype.isnative else None


def default_out_dtype(dtype: CutlassDtype, *, fused: bool = False) -> CutlassDtype:
    """The result's element type where none is asked for.

    Args:
        dtype: of the operands.
        fused: whether a tree, bias or activation makes the result. That computes in float32, which does not hold every
            int32.
    """
    if dtype is CutlassDtype.I8:
        return CutlassDtype.F32 if fused else CutlassDtype.I32
    if dtype in (CutlassDtype.F8E4M3, CutlassDtype.F8E5M2, CutlassDtype.F4E2M1):
        return CutlassDtype.BF16
    return dtype


def math_mode(dtype: CutlassDtype, precision: str | None, *, fast_accum: bool = False) -> str:
    """The math mode of a kernel's key for `precision` and, of fp8 operands, for `fast_accum`.

    Raises:
        InvalidOperandError: an unknown precision, or one given for another dtype than float32.
    """
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise InvalidOperandError(f"unknown precision {shown(precision)}; valid: {', '.join(PRECISIONS)}")
    if dtype is CutlassDtype.F32:
        return precision or "ieee"
    if precision is not None:
        raise InvalidOperandError(f"precision={precision!r} is for float32 operands; these are {dtype.value}")
    return FAST if fast_accum and dtype in FP8_DTYPES else "default"


def finite_max(dtype: CutlassDtype) -> float:
    """The largest finite value of `dtype`, as a float."""
    if dtype in INTEGER_DTYPES:
        return float(np.iinfo(numpy_dtype(dtype)).max)
    return _FORMATS[dtype].largest


def unit_roundoff(dtype: CutlassDtype) -> float:
    """The largest relative error of one rounding to nearest in `dtype`'s normal range; 0 for integers.

    For `TF32` this is that of the 11-bit significand, 2**-11, though its storage could hold more.
    """
    if dtype in INTEGER_DTYPES:
        return 0.0
    return math.ldexp(1.0, -_FORMATS[dtype].fraction_bits - 1)


def smallest_step(dtype: CutlassDtype) -> float:
    """The distance between neighbours near zero: the smallest subnormal, or 1 for integers.

    Below the normal range errors are absolute, so a comparison may always be off by this much (`within_tolerance`).
    """
    if dtype in INTEGER_DTYPES:
        return 1.0
    fmt = _FORMATS[dtype]
    return math.ldexp(1.0, fmt.min_exponent - fmt.fraction_bits)


# ----------------------------------------------------------------------------------------------------------------------
# Conversions
# ----------------------------------------------------------------------------------------------------------------------


def to_float64(array: AnyArray) -> FloatArray:
    """The array's values as float64, exactly.

    Args:
        array: any shape; any dtype of `CutlassDtype` (int64 is exact up to 2**53).

    Returns:
        float64 of the same shape; `array` itself when it is float64 already.
    """
    # Quieting a signalling NaN is no reason for a warning.
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64, copy=False)


def saturating_cast(x: npt.ArrayLike, dtype: CutlassDtype) -> AnyArray:
    """Rounds float64 values to `dtype` as the GPU's epilogue does: to nearest even, once.

    * fp8 saturates to its finite maximum, infinity included; NaN becomes the NaN 0x7f (PTX `cvt.rn.satfinite`).
    * fp4 saturates likewise; it has no NaN, and PTX turns NaN into the positive maximum, 6.
    * fp16, bf16 and fp32 overflow to infinity; NaN stays NaN. (TF32 is stored, and so rounded, as fp32.)
    * int8 and int32 round half to even and saturate; NaN becomes 0 (PTX `cvt.rni.sat`).

    Args:
        x: any shape; converted to float64 first.
        dtype: the element type of the result.

    Returns:
        An array of `numpy_dtype(dtype)` and x's shape. For F64 it may be `x` itself.
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
    fmt = _FORMATS[dtype]
    rounded = _round_significand(values, fmt)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype not in SATURATING_FLOATS:
            overflowed = np.abs(rounded) > fmt.largest
            if overflowed.any():
                rounded = np.where(overflowed, np.copysign(np.inf, rounded), rounded)
            return rounded.astype(np.float32).astype(target)
        rounded = np.clip(rounded, -fmt.largest, fmt.largest)
        nan = np.isnan(rounded)
        if dtype is CutlassDtype.F4E2M1:
            return np.where(nan, fmt.largest, rounded).astype(np.float32).astype(target)
        out: AnyArray = rounded.astype(np.float32).astype(target)
        if nan.any():
            bits = np.where(nan, np.uint8(_FP8_NAN_BITS), out.view(np.uint8))
            out = bits.view(target)
        return out


def cast_scale(x: npt.ArrayLike, scale_type: ScaleType) -> AnyArray:
    """Rounds scales to the nearest of their type, saturating; NaN stays NaN.

    * f32: ties to even; overflow is the largest finite value.
    * ue4m3: ties to even, from 0 to 448.
    * ue8m0: to a power of two from 2**-127 to 2**127, halfway (1.5 times one) upwards, as ml_dtypes rounds.

    Args:
        x: any shape; converted to float64 first. Negative values become the smallest there is (f32: they stay).
        scale_type: the result's.

    Returns:
        An array of the type's NumPy dtype.
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


def _round_significand(x: FloatArray, fmt: _Format) -> FloatArray:
    """Rounds to nearest even on `fmt`'s grid, as if its exponents went on upwards without end.

    The result is exact in float32 unless it exceeds float32's range, so a later narrowing cannot round again.
    """
    drop = np.uint64(52 - fmt.fraction_bits)
    one = np.uint64(1)
    # Scalars would warn where the carry out of a NaN's bits wraps; arrays do not.
    bits = np.atleast_1d(x).view(np.uint64)
    # Adding just under half a unit, plus the lowest kept bit, carries exactly when nearest-even rounds away from zero.
    bits = bits + ((one << (drop - one)) - one) + ((bits >> drop) & one)
    normal = (bits & ~((one << drop) - one)).view(np.float64).reshape(x.shape)
    # Below the normal range the grid is even. Next to this constant float64's own grid has just that step, so that
    # the adder does the rounding; copysign restores the zero's sign that the subtraction loses.
    shift = math.ldexp(1.5, 52 + fmt.min_exponent - fmt.fraction_bits)
    magnitude = np.abs(x)
    with np.errstate(invalid="ignore"):
        tiny = np.copysign((x + shift) - shift, x)
        result = np.where(magnitude < math.ldexp(1.0, fmt.min_exponent), tiny, normal)
    # The carry above turns some NaNs into other numbers, and must not touch infinity.
    return np.where(np.isfinite(x), result, x)


def round_to_tf32(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounds fp32 to TF32's 11-bit significand: to nearest, ties away from zero, as `cvt.rna.tf32` does.

    CUTLASS converts operands so (`tfloat32_t::round_half_ulp_truncate`). Values past TF32's maximum become infinity.

    Args:
        x: float32, any shape. Infinity and NaN are kept.

    Returns:
        float32 of the same shape whose 13 low fraction bits are zero.

    Raises:
        InvalidOperandError: x is not float32.
    """
    if x.dtype != np.float32:
        raise InvalidOperandError(f"x is {x.dtype}; TF32 rounding takes float32")
    bits = np.atleast_1d(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).reshape(x.shape)
    return np.where(np.isfinite(x), rounded, x)
