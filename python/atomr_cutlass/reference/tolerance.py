"""How far a kernel's result may be from the reference's."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.numerics import (
    FAST,
    FP8_DTYPES,
    INTEGER_DTYPES,
    AnyArray,
    FloatArray,
    smallest_step,
    to_float64,
    unit_roundoff,
)
from ..generator.dtypes import CutlassDtype
from .parts import check_math


class Tolerance(NamedTuple):
    """A result d is right if |d - ref| <= rtol * |ref| + atol_factor * absolute_product(...).

    Attributes:
        rtol: for rounding to the output type, once in the kernel and once in the reference: twice its unit
            roundoff. Below the type's normal range `numerics.smallest_step` comes on top.
        atol_factor: for everything before that, relative to the magnitudes that were summed.
    """

    rtol: float
    atol_factor: float


_FP8_PROMOTION_K: Final = 128


def tolerance(
    dtype_in: CutlassDtype,
    out_dtype: CutlassDtype,
    k: int,
    math: str = "default",
    *,
    exact_operands: bool = False,
    fast_accum: bool = False,
    scale_block: int = 0,
) -> Tolerance:
    """How far a kernel's result may be from the reference.

    | operands | error before the output is rounded, relative to `absolute_product` |
    |---|---|
    | int8 -> int32 | none |
    | int8 -> other | 8 * 2**-24: the epilogue's float32 |
    | fp16, bf16, fp32, fp4 | (k/2 + 16) * 2**-24: float32 sums of exact products, and the epilogue |
    | fp32 as tf32 | the same + 2**-10 + 2**-22: both operands rounded to 11 bits (none where they fit already) |
    | fp32 as 3xtf32 | (3k/2 + 16) * 2**-24 + 2**-19: three products; the part of each operand past 22 bits |
    | fp8 | min(k, 128) * 2**-15 + (k/2 + 16) * 2**-24: Hopper's fp8 adder keeps about 14 bits |
    | fp8, fast accumulation | k * 2**-14 + (k/2 + 16) * 2**-24: and is emptied only at the end |
    | fp8, scales in blocks | as fp8 + (k/block + 4) * 2**-24: each block's sum is scaled and added in float32 |
    | fp4, scales in blocks | as fp4 + (k/block + 4) * 2**-24: products of scales are exact, scaled sums are not |
    | fp64 | (k + 32) * 2**-53: as fp32, twice, since the reference has the same precision |

    k/2 is half the rigorous bound of a sequential sum: that of addends of one size and sign. Tensor cores truncate
    rather than round, but sum several products at a time with extra bits: on an H200 the largest error over uniform,
    normal, constant and wide-range operands was (0.17 k + 5) * 2**-24 from k = 32 to 32768 for fp16, bf16, tf32 and
    fp32. Adversarial data (one huge addend that cancels later) can exceed k/2. For fp8 the largest was 2**-9.6, and
    k * 2**-15.1 with fast accumulation (k = 4096, constant operands). fp4 was not measured: no such GPU was at hand.

    The bound grows with k while a typical error does not, so a test that must tell one math mode from another,
    or catch a narrow accumulator, should use k of 512 or less; small whole numbers as operands allow exact equality.

    Grouped GEMM and convolution have the same bounds. A convolution's k is its number of products in a sum: fprop
    r * s * c / groups, dgrad r * s * k / groups, wgrad n * p * q. A wgrad in several parts along k adds them in
    float32, which the bound covers.

    Args:
        dtype_in: the operands' element type (`TF32` is float32 with math tf32); with mixed fp8, either.
        out_dtype: the result's element type.
        k: the number of products in a sum.
        math: as in `gemm`; `fast` is fp8's fast accumulation.
        exact_operands: float32 operands that TF32 represents (`round_to_tf32` was applied): for tf32 and 3xtf32 no
            operand error is allowed then.
        fast_accum: fp8's fast accumulation. Scales in blocks exclude it: each block is a sum of its own.
        scale_block: elements of K that share a scale: 128 for fp8, 16 or 32 for fp4; 0 where no scale varies along K.
            The scales themselves are in `absolute_product`.

    Returns:
        Two plain numbers, usable with any array library.

    Raises:
        InvalidOperandError: an unknown math, or tf32 or 3xtf32 for operands other than float32.
    """
    if dtype_in is CutlassDtype.TF32:
        dtype_in, math = CutlassDtype.F32, "tf32"
    check_math(math, dtype_in)
    if dtype_in in INTEGER_DTYPES and out_dtype is CutlassDtype.I32:
        return Tolerance(0.0, 0.0)
    out_unit = unit_roundoff(out_dtype.storage)
    rtol = out_unit * (2.0 + out_unit)
    if dtype_in in INTEGER_DTYPES:
        return Tolerance(rtol, 8.0 * 2.0**-24)
    if dtype_in is CutlassDtype.F64:
        return Tolerance(rtol, (k + 32.0) * 2.0**-53)
    products = 3 * k if math == "3xtf32" else k
    error = (products / 2.0 + 16.0) * 2.0**-24
    if scale_block:
        error += (k / scale_block + 4.0) * 2.0**-24
    if math == "tf32" and not exact_operands:
        error += 2.0**-10 + 2.0**-22
    elif math == "3xtf32" and not exact_operands:
        error += 2.0**-19
    elif dtype_in in FP8_DTYPES:
        # One instruction aligns 32 products, so fewer of them are no more exact.
        terms = max(k, 32)
        fast = (fast_accum or math == FAST) and not scale_block
        error += terms * 2.0**-14 if fast else min(terms, _FP8_PROMOTION_K) * 2.0**-15
    return Tolerance(rtol, error)


def within_tolerance(
    d: AnyArray,
    ref: AnyArray,
    scale: FloatArray,
    limits: Tolerance,
    out_dtype: CutlassDtype,
) -> npt.NDArray[np.bool_]:
    """Where a kernel's result agrees with the reference.

    NaN agrees with NaN, and infinity with the same infinity only.

    Args:
        d: the kernel's result, any shape and dtype of CutlassDtype.
        ref: the reference's, of the same shape; of the same dtype or float64.
        scale: `absolute_product(...)`, of the same shape.
        limits: `tolerance(...)`.
        out_dtype: the kernel's output type: results below its normal range, or on its integer grid, may be one step
            off unless `limits` is exact.

    Returns:
        bool, of d's shape.
    """
    step = 0.0 if limits == (0.0, 0.0) else smallest_step(out_dtype.storage)
    got, want = to_float64(d), to_float64(ref)
    with np.errstate(all="ignore"):
        close = np.abs(got - want) <= limits.rtol * np.abs(want) + limits.atol_factor * scale + step
    both_finite = np.isfinite(got) & np.isfinite(want)
    both_nan = np.isnan(got) & np.isnan(want)
    matching: npt.NDArray[np.bool_] = np.where(both_finite, close, (got == want) | both_nan)
    return matching
