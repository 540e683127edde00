"""The parts of all operations' references: activations, C and bias, scales, checks of arguments, and tolerances."""

from __future__ import annotations

import math as _math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..arrays.layouts import broadcasts_to
from ..arrays.numerics import (
    FAST,
    INTEGER_DTYPES,
    PRECISIONS,
    AnyArray,
    FloatArray,
    from_numpy_dtype,
    scale_type_of,
    smallest_step,
    to_float64,
    unit_roundoff,
)
from ..arrays.scales import BLOCK, VECTOR
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from ..generator.epilogue.ops import LEAKY_SLOPE
from ..generator.rules import FP8_TYPES

erf: Final[Callable[[FloatArray], FloatArray]] = np.vectorize(_math.erf, otypes=[np.float64])
"""The error function as the C library has it; float64 of any shape."""

erfc: Final[Callable[[FloatArray], FloatArray]] = np.vectorize(_math.erfc, otypes=[np.float64])
"""1 - erf(x) without cancellation, as the C library has it; float64 of any shape."""


def _sigmoid(x: FloatArray) -> FloatArray:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu_tanh(x: FloatArray) -> FloatArray:
    inner = _math.sqrt(2.0 / _math.pi) * x * (1.0 + 0.044715 * x * x)
    # (1 + tanh(t)) / 2 is sigmoid(2 t), which does not cancel for negative t.
    return x * _sigmoid(2.0 * inner)


ACTIVATIONS: Final[Mapping[str, Callable[[FloatArray], FloatArray]]] = MappingProxyType(
    {
        "identity": lambda x: x,
        "relu": lambda x: np.maximum(x, 0.0),
        "gelu": lambda x: 0.5 * x * erfc(x * -_math.sqrt(0.5)),
        "gelu_tanh": _gelu_tanh,
        "silu": lambda x: x * _sigmoid(x),
        "sigmoid": _sigmoid,
        "tanh": np.tanh,
        "hardswish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
        "leaky_relu": lambda x: np.where(x > 0.0, x, LEAKY_SLOPE * x),
    }
)
"""Activation functions by name, each from float64 to float64 of the same shape.

All propagate NaN. As in CUTLASS, a function that is a product with x (gelu, silu, hardswish) makes NaN of minus
infinity, where its limit would be zero. Call them under `np.errstate(all="ignore")`: they overflow on purpose.
"""


def add_terms(
    product: FloatArray, c: AnyArray | None, beta: float, bias: AnyArray | None, activation: str | None = None
) -> FloatArray:
    """act(product + beta * C + bias), of which the sum is in place; C is not read when beta is 0."""
    if c is not None and beta != 0.0:
        product += beta * to_float64(c)
    if bias is not None:
        product += to_float64(bias)
    return product if activation is None else ACTIVATIONS[activation](product)


def element_type(name: str, operand: AnyArray) -> CutlassDtype:
    """The element type of an operand."""
    dtype = from_numpy_dtype(operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is d.storage)
        order = "" if operand.dtype.isnative else " in foreign byte order"
        raise InvalidOperandError(f"{name} is {operand.dtype}{order}; expected one of {valid}")
    return dtype


def check_math(math: str, *operands: CutlassDtype) -> None:
    """Refuses a math mode that does not exist, or that the operands' element types do not have."""
    if math == FAST and all(dtype in FP8_TYPES for dtype in operands):
        return
    if math not in ("default", *PRECISIONS):
        valid = ", ".join(PRECISIONS)
        raise InvalidOperandError(f"math is {math!r}; expected one of default, {valid}, or for fp8 also {FAST}")
    if math in ("tf32", "3xtf32"):
        for dtype in operands:
            if dtype.storage is not CutlassDtype.F32:
                raise InvalidOperandError(f"math is {math!r}, but an operand is {dtype.value}: it needs float32")


def check_activation(activation: str | None) -> None:
    """Refuses an activation that does not exist."""
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        raise InvalidOperandError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")


def check_bias(bias: AnyArray | None, extent: int, axis: str = "column") -> None:
    """Refuses a bias that is not one value for each column (or channel) of the result."""
    if bias is not None:
        element_type("bias", bias)
        if bias.shape != (extent,):
            raise InvalidOperandError(f"bias has shape {bias.shape}; expected {(extent,)}, one value a {axis}")


Scale: TypeAlias = float | AnyArray
"""A scale factor: one number, or an array with one for each row of A (column of B) or for each block of it."""

_OUTER_TYPES: Final = frozenset({CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F32, CutlassDtype.F64})


class OperandScale(NamedTuple):
    """One operand's scale, in float64.

    Attributes:
        outer: the factor of the product: a number, (..., M, 1) or (..., 1, N).
        blocks: (..., M, blocks of K) for A, (..., blocks of K, N) for B; None where nothing varies along K.
        kind: the type of an fp4 scale; None for any other.
    """

    outer: float | FloatArray = 1.0
    blocks: FloatArray | None = None
    kind: ScaleType | None = None

    def absolute(self) -> OperandScale:
        """The scale with absolute values."""
        return self._replace(outer=np.abs(self.outer), blocks=None if self.blocks is None else np.abs(self.blocks))


def read_scales(
    a: AnyArray, b: AnyArray, scale_a: Scale | None, scale_b: Scale | None
) -> tuple[OperandScale, OperandScale]:
    """The scales of A (..., M, K) and B (..., K, N), checked."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    first = _read("scale_a", scale_a, a, batch, along=-1)
    second = _read("scale_b", scale_b, b, batch, along=-2)
    if first.kind is not second.kind:
        kinds = [scale.kind.value if scale.kind else "none" for scale in (first, second)]
        raise InvalidOperandError(
            f"fp4 block scales are {kinds[0]} in scale_a and {kinds[1]} in scale_b; expected one type in both"
        )
    return first, second


def _read(name: str, scale: Scale | None, operand: AnyArray, batch: tuple[int, ...], along: int) -> OperandScale:
    if scale is None:
        return OperandScale()
    if not isinstance(scale, np.ndarray):
        try:
            scale = np.asarray(scale, dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidOperandError(f"{name} is {scale!r}; expected a number or an array") from None
    kind = scale_type_of(scale.dtype)
    if kind in VECTOR:
        return _read_vector(name, scale, kind, operand, batch, along)
    if from_numpy_dtype(scale.dtype) not in _OUTER_TYPES:
        raise InvalidOperandError(f"{name} is {scale.dtype}; expected float32")
    wide = to_float64(scale)
    dims = scale.shape
    if scale.size == 1:
        return OperandScale(outer=float(wide.reshape(())))
    rows, columns = operand.shape[-2:]
    outer, blockwise = (rows, 1), (rows, -(-columns // BLOCK))
    if along == -2:
        outer, blockwise = (1, columns), (-(-rows // BLOCK), -(-columns // BLOCK))
    fits = len(dims) >= 2 and broadcasts_to(dims[:-2], batch)
    if fits and dims[-2:] in (outer, (1, 1)):
        return OperandScale(outer=wide)
    if fits and dims[-2:] == blockwise:
        if along == -2:
            wide = np.repeat(wide, BLOCK, axis=-1)[..., :columns]
        return OperandScale(blocks=wide)
    expected = f"a number, (..., {outer[0]}, {outer[1]})"
    if blockwise != outer:
        expected += f", or (..., {blockwise[0]}, {blockwise[1]}) in blocks of {BLOCK}"
    raise InvalidOperandError(f"{name} has shape {dims}; expected {expected}")


def _read_vector(
    name: str, scale: AnyArray, kind: ScaleType, operand: AnyArray, batch: tuple[int, ...], along: int
) -> OperandScale:
    """nvfp4's or mxfp4's scales, in their plain form."""
    if from_numpy_dtype(operand.dtype) is not CutlassDtype.F4E2M1:
        raise InvalidOperandError(f"{name} is {scale.dtype}, which scales fp4; the operand is {operand.dtype}")
    step = VECTOR[kind]
    blocks = -(-operand.shape[along] // step)
    expected = (operand.shape[-2], blocks) if along == -1 else (blocks, operand.shape[-1])
    if scale.ndim < 2 or scale.shape[-2:] != expected or not broadcasts_to(scale.shape[:-2], batch):
        raise InvalidOperandError(
            f"{name} has shape {scale.shape}; expected (..., {expected[0]}, {expected[1]}): one {kind.value} scale "
            f"for each {step} elements of K"
        )
    wide = to_float64(scale)
    if kind is ScaleType.UE4M3 and np.signbit(wide).any():
        raise InvalidOperandError(f"{name} holds negative values; ue4m3 has no sign")
    return OperandScale(blocks=wide, kind=kind)


def scaled_product(a: FloatArray, b: FloatArray, scale_a: OperandScale, scale_b: OperandScale) -> FloatArray:
    """The product with the scales that vary along K, without the outer scales.

    In blocks of 128, each block's product is scaled as a whole, as in kernels, so that an infinite scale multiplies a
    sum and not its terms.
    """
    total: FloatArray
    if scale_a.kind is not None or scale_a.blocks is scale_b.blocks is None:
        total = np.matmul(_spread(a, scale_a, -1), _spread(b, scale_b, -2))
        return total
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    for block, start in enumerate(range(0, a.shape[-1], BLOCK)):
        part = np.matmul(a[..., start : start + BLOCK], b[..., start : start + BLOCK, :])
        if scale_a.blocks is not None:
            part *= scale_a.blocks[..., block, None]
        if scale_b.blocks is not None:
            part *= scale_b.blocks[..., block, None, :]
        total += part
    return total


def _spread(operand: FloatArray, scale: OperandScale, along: int) -> FloatArray:
    """The operand with its fp4 scales applied. None of them is infinite, so terms may be scaled instead of sums."""
    if scale.kind is None or scale.blocks is None:
        return operand
    rows, columns = operand.shape[-2:]
    return operand * np.repeat(scale.blocks, VECTOR[scale.kind], axis=along)[..., :rows, :columns]


_FP8_PROMOTION_K: Final = 128


class Tolerance(NamedTuple):
    """A result d is correct if |d - ref| <= rtol * |ref| + atol_factor * absolute_product(...).

    Attributes:
        rtol: for rounding to the output type, once in the kernel and once in the reference: twice its unit
            roundoff. Below the type's normal range `numerics.smallest_step` comes on top.
        atol_factor: for everything before that, relative to the magnitudes that were summed.
    """

    rtol: float
    atol_factor: float


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
    elif dtype_in in FP8_TYPES:
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
