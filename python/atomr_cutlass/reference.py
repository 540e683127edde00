"""The NumPy reference backend: what every kernel is tested against, and what runs where there is no GPU.

Values are float64 inside and rounded once at the end, so a result differs from a kernel's by the kernel's own
rounding; `tolerance` says by how much that may be.
"""

from __future__ import annotations

import math as _math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidOperandError
from .generator.dtypes import CutlassDtype
from .numerics import (
    INTEGER_DTYPES,
    MATH_MODES,
    AnyArray,
    FloatArray,
    from_numpy_dtype,
    round_to_tf32,
    saturating_cast,
    smallest_step,
    to_float64,
    unit_roundoff,
)

Scale: TypeAlias = float | AnyArray
"""A scale factor: one number, or an array that scales rows (..., M, 1) of A or columns (..., 1, N) of B."""

# ----------------------------------------------------------------------------------------------------------------------
# Activations
# ----------------------------------------------------------------------------------------------------------------------

# Rational minimax approximations of erf and erfc, highest power first, from W. J. Cody, "Rational Chebyshev
# approximations for the error function", Mathematics of Computation 23 (1969), pp. 631-637 (tables II and III).
_ERF_NUM: Final = (
    1.85777706184603153e-1,
    3.16112374387056560e00,
    1.13864154151050156e02,
    3.77485237685302021e02,
    3.20937758913846947e03,
)
_ERF_DEN: Final = (
    1.0,
    2.36012909523441209e01,
    2.44024637934444173e02,
    1.28261652607737228e03,
    2.84423683343917062e03,
)
_MIDDLE_NUM: Final = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e00,
    6.61191906371416295e01,
    2.98635138197400131e02,
    8.81952221241769090e02,
    1.71204761263407058e03,
    2.05107837782607147e03,
    1.23033935479799725e03,
)
_MIDDLE_DEN: Final = (
    1.0,
    1.57449261107098347e01,
    1.17693950891312499e02,
    5.37181101862009858e02,
    1.62138957456669019e03,
    3.29079923573345963e03,
    4.36261909014324716e03,
    3.43936767414372164e03,
    1.23033935480374942e03,
)
_TAIL_NUM: Final = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_TAIL_DEN: Final = (
    1.0,
    2.56852019228982242e00,
    1.87295284992346725e00,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)
_ERF_LIMIT: Final = 0.46875
_MIDDLE_LIMIT: Final = 4.0


def _polynomial(coefficients: tuple[float, ...], x: FloatArray) -> FloatArray:
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += coefficient
    return result


def _erf_near_zero(x: FloatArray) -> FloatArray:
    square = x * x
    return x * (_polynomial(_ERF_NUM, square) / _polynomial(_ERF_DEN, square))


def _erfc_away_from_zero(y: FloatArray) -> FloatArray:
    """erfc(y) for y > 0.46875 (or NaN), with a small relative error also where it is tiny."""
    # erfc underflows to zero before 28, and infinity would make the differences below NaN.
    y = np.minimum(y, 28.0)
    middle = y <= _MIDDLE_LIMIT
    ratio = np.empty_like(y)
    near = y[middle]
    ratio[middle] = _polynomial(_MIDDLE_NUM, near) / _polynomial(_MIDDLE_DEN, near)
    far = y[~middle]
    inverse = 1.0 / (far * far)
    series = inverse * (_polynomial(_TAIL_NUM, inverse) / _polynomial(_TAIL_DEN, inverse))
    ratio[~middle] = (1.0 / _math.sqrt(_math.pi) - series) / far
    # exp(-y * y) with y * y rounded would lose as many digits as y * y is large: split off a part whose square is
    # exact.
    coarse = np.trunc(y * 16.0) / 16.0
    return np.exp(-coarse * coarse) * np.exp(-(y - coarse) * (y + coarse)) * ratio


def erf(x: FloatArray) -> FloatArray:
    """The error function, within a few units in the last place; float64 of any shape."""
    out = np.empty_like(x)
    magnitude = np.abs(x)
    small = magnitude <= _ERF_LIMIT
    with np.errstate(under="ignore", invalid="ignore"):
        out[small] = _erf_near_zero(x[small])
        out[~small] = np.copysign(1.0 - _erfc_away_from_zero(magnitude[~small]), x[~small])
    return out


def erfc(x: FloatArray) -> FloatArray:
    """1 - erf(x) without cancellation, within about 1e-15 of its value; float64 of any shape."""
    out = np.empty_like(x)
    magnitude = np.abs(x)
    small = magnitude <= _ERF_LIMIT
    with np.errstate(under="ignore", invalid="ignore"):
        out[small] = 1.0 - _erf_near_zero(x[small])
        tail = _erfc_away_from_zero(magnitude[~small])
        out[~small] = np.where(x[~small] < 0.0, 2.0 - tail, tail)
    return out


def _identity(x: FloatArray) -> FloatArray:
    return x


def _relu(x: FloatArray) -> FloatArray:
    return np.maximum(x, 0.0)


def _gelu(x: FloatArray) -> FloatArray:
    return 0.5 * x * erfc(x * -_math.sqrt(0.5))


def _gelu_tanh(x: FloatArray) -> FloatArray:
    inner = _math.sqrt(2.0 / _math.pi) * x * (1.0 + 0.044715 * x * x)
    # (1 + tanh(t)) / 2 is sigmoid(2 t), which does not cancel for negative t.
    return x * _sigmoid(2.0 * inner)


def _sigmoid(x: FloatArray) -> FloatArray:
    return 1.0 / (1.0 + np.exp(-x))


def _silu(x: FloatArray) -> FloatArray:
    return x * _sigmoid(x)


def _tanh(x: FloatArray) -> FloatArray:
    return np.tanh(x)


def _hardswish(x: FloatArray) -> FloatArray:
    return x * np.clip(x + 3.0, 0.0, 6.0) / 6.0


def _leaky_relu(x: FloatArray) -> FloatArray:
    return np.where(x > 0.0, x, 0.01 * x)


ACTIVATIONS: Final[Mapping[str, Callable[[FloatArray], FloatArray]]] = MappingProxyType(
    {
        "identity": _identity,
        "relu": _relu,
        "gelu": _gelu,
        "gelu_tanh": _gelu_tanh,
        "silu": _silu,
        "sigmoid": _sigmoid,
        "tanh": _tanh,
        "hardswish": _hardswish,
        "leaky_relu": _leaky_relu,
    }
)
"""Activation functions by name, each from float64 to float64 of the same shape.

All propagate NaN. As in CUTLASS, a function that is a product with x (gelu, silu, hardswish) makes NaN of minus
infinity, where its limit would be zero. Call them under `np.errstate(all="ignore")`: they overflow on purpose.
"""


# ----------------------------------------------------------------------------------------------------------------------
# GEMM
# ----------------------------------------------------------------------------------------------------------------------


def gemm(
    a: AnyArray,
    b: AnyArray,
    c: AnyArray | None = None,
    *,
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
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)).

    NaN and infinity propagate as in BLAS: through A, B, C, alpha and beta alike, except that C is not read when
    beta is 0, and A and B are not read when alpha is 0 (reference BLAS documents both; cuBLAS does the same). Without
    products (K is 0) there is nothing for alpha to multiply either: D is then act(beta * C + bias).

    int8 operands with an int32 result stay integers from end to end. alpha and beta are whole numbers there, and
    every step wraps modulo 2**32 like the int32 arithmetic of CUTLASS's epilogue: nothing saturates. (Kernels of the
    sm80 generation saturate the sum of products, CUTLASS having no other instruction; it takes K above 131,071 to
    see that.) int8 operands with any other result go through float64 as everything else does.

    Args:
        a: (..., M, K), any dtype of CutlassDtype but int32. Batch dimensions broadcast with b's.
        b: (..., K, N), integer if and only if a is.
        c: (M, N), or (..., M, N) whose batch dimensions broadcast to the result's. Any dtype; integer where the
            result is int32 from int8.
        alpha: factor of the product.
        beta: factor of c.
        bias: (N,), added to every row.
        activation: a name in ACTIVATIONS; None is the identity.
        scale_a: a number, or (..., M, 1) of any floating dtype. Multiplies.
        scale_b: a number, or (..., 1, N).
        scale_d: a number, applied after the activation.
        out_dtype: the element type of the result; `TF32` is stored as float32.
        math: `tf32` rounds float32 operands to TF32 first. `default`, `ieee` and `3xtf32` keep them as they are.

    Returns:
        A new array (..., M, N) of `numpy_dtype(out_dtype)`; empty where M, N or a batch dimension is 0.

    Raises:
        InvalidOperandError: a wrong rank, shape, dtype, name or combination; the message names the argument.
    """
    problem = _check_problem(a, b, c, beta=beta, bias=bias, scale_a=scale_a, scale_b=scale_b)
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidOperandError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")
    _check_math(math, problem.dtype_a, problem.dtype_b)
    if out_dtype is CutlassDtype.I32 and problem.dtype_a is CutlassDtype.I8:
        if not (scale_a is None and scale_b is None and scale_d is None):
            raise InvalidOperandError("scales are given; int8 to int32 takes none: ask for a floating out_dtype")
        return _integer_gemm(a, b, c, alpha=alpha, beta=beta, bias=bias, activation=activation)
    if math == "tf32":
        a, b = round_to_tf32(a), round_to_tf32(b)
    with np.errstate(all="ignore"):
        d = _affine(
            to_float64(a),
            to_float64(b),
            c,
            problem.shape,
            alpha=float(alpha),
            beta=float(beta),
            bias=bias,
            scale_a=scale_a,
            scale_b=scale_b,
        )
        if activation is not None:
            d = ACTIVATIONS[activation](d)
        if scale_d is not None:
            d = d * float(scale_d)
        return saturating_cast(d, out_dtype)


def _affine(
    a: FloatArray,
    b: FloatArray,
    c: AnyArray | None,
    shape: tuple[int, ...],
    *,
    alpha: float,
    beta: float,
    bias: AnyArray | None,
    scale_a: Scale | None,
    scale_b: Scale | None,
) -> FloatArray:
    """The argument of the activation, alpha * scale_a * scale_b * A B + beta * C + bias; absent terms are not read."""
    if alpha == 0.0 or a.shape[-1] == 0:
        d = np.zeros(shape)
    else:
        d = np.matmul(a, b)
        for factor in (alpha, scale_a, scale_b):
            if factor is not None and not (isinstance(factor, float) and factor == 1.0):
                d *= np.asarray(factor, dtype=np.float64)
    if c is not None and beta != 0.0:
        d += beta * to_float64(c)
    if bias is not None:
        d += to_float64(bias)
    return d


def _integer_gemm(
    a: AnyArray,
    b: AnyArray,
    c: AnyArray | None,
    *,
    alpha: float,
    beta: float,
    bias: AnyArray | None,
    activation: str | None,
) -> AnyArray:
    """int8 x int8 -> int32 modulo 2**32; the operands have been checked."""
    if activation not in (None, "identity", "relu"):
        raise InvalidOperandError(f"activation is {activation!r}; int8 to int32 takes None, identity or relu")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if not float(factor).is_integer():
            raise InvalidOperandError(f"{name} is {factor}; int8 to int32 takes whole numbers")
    for name, term in (("c", c if beta != 0 else None), ("bias", bias)):
        if term is not None and from_numpy_dtype(term.dtype) not in INTEGER_DTYPES:
            raise InvalidOperandError(f"{name} is {term.dtype}; int8 to int32 takes int8 or int32")
    # A product is at most 2**14, so sums of fewer than 2**39 of them are exact in float64, which has a fast matmul.
    d = np.matmul(to_float64(a), to_float64(b)).astype(np.int64)
    # int64 wraps modulo 2**64, which leaves the low 32 bits right whatever overflows.
    d *= _wrapped(alpha)
    if c is not None and beta != 0:
        d += _wrapped(beta) * c.astype(np.int64)
    if bias is not None:
        d += bias.astype(np.int64)
    wrapped: AnyArray = d.astype(np.int32)
    if activation == "relu":
        wrapped = np.maximum(wrapped, np.int32(0))
    return wrapped


def _wrapped(value: float) -> np.int64:
    """A whole number modulo 2**32, as a signed 32-bit value."""
    wrapped: np.int64 = np.int64((int(value) + 2**31) % 2**32 - 2**31)
    return wrapped


class _Problem(NamedTuple):
    dtype_a: CutlassDtype
    dtype_b: CutlassDtype
    shape: tuple[int, ...]


def _check_problem(
    a: AnyArray,
    b: AnyArray,
    c: AnyArray | None,
    *,
    beta: float,
    bias: AnyArray | None,
    scale_a: Scale | None,
    scale_b: Scale | None,
) -> _Problem:
    """Checks ranks, shapes and dtypes; returns the operands' dtypes and the result's shape."""
    dtypes: list[CutlassDtype] = []
    for name, operand, expected in (("a", a, "(..., M, K)"), ("b", b, "(..., K, N)")):
        if operand.ndim < 2:
            raise InvalidOperandError(f"{name} has shape {operand.shape}; expected {expected}")
        dtype = _element_type(name, operand)
        if dtype is CutlassDtype.I32:
            raise InvalidOperandError(f"{name} is int32; integer operands are int8")
        dtypes.append(dtype)
    if (dtypes[0] in INTEGER_DTYPES) != (dtypes[1] in INTEGER_DTYPES):
        raise InvalidOperandError(f"a is {a.dtype} and b is {b.dtype}; both must be int8, or neither")
    if a.shape[-1] != b.shape[-2]:
        raise InvalidOperandError(f"a has K = {a.shape[-1]} (shape {a.shape}), b has K = {b.shape[-2]} ({b.shape})")
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise InvalidOperandError(f"batch dimensions of a {a.shape} and b {b.shape} do not broadcast") from None
    m, n = a.shape[-2], b.shape[-1]
    shape = (*batch, m, n)
    if c is None:
        if beta != 0.0:
            raise InvalidOperandError(f"beta is {beta}, but c is not given")
    else:
        _element_type("c", c)
        if c.shape[-2:] != (m, n) or not _broadcasts_to(c.shape, shape):
            raise InvalidOperandError(f"c has shape {c.shape}; expected {shape} or fewer batch dimensions")
    if bias is not None:
        _element_type("bias", bias)
        if bias.shape != (n,):
            raise InvalidOperandError(f"bias has shape {bias.shape}; expected {(n,)}, one value a column")
    for name, scale, last in (("scale_a", scale_a, (m, 1)), ("scale_b", scale_b, (1, n))):
        dims: tuple[int, ...] = () if scale is None else np.shape(scale)
        if dims and (dims[-2:] not in (last, (1, 1)) or not _broadcasts_to(dims, shape)):
            raise InvalidOperandError(f"{name} has shape {dims}; expected a number or (..., {last[0]}, {last[1]})")
    return _Problem(dtypes[0], dtypes[1], shape)


def _element_type(name: str, operand: AnyArray) -> CutlassDtype:
    dtype = from_numpy_dtype(operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is d.storage)
        order = "" if operand.dtype.isnative else " in foreign byte order"
        raise InvalidOperandError(f"{name} is {operand.dtype}{order}; expected one of {valid}")
    return dtype


def _broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _check_math(math: str, *operands: CutlassDtype) -> None:
    if math not in MATH_MODES:
        raise InvalidOperandError(f"math is {math!r}; expected one of {', '.join(MATH_MODES)}")
    if math in ("tf32", "3xtf32"):
        for dtype in operands:
            if dtype.storage is not CutlassDtype.F32:
                raise InvalidOperandError(f"math is {math!r}, but an operand is {dtype.value}: it needs float32")


# ----------------------------------------------------------------------------------------------------------------------
# Comparing a kernel's result with the reference
# ----------------------------------------------------------------------------------------------------------------------


def absolute_product(
    a: AnyArray,
    b: AnyArray,
    c: AnyArray | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: AnyArray | None = None,
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    scale_d: float | None = None,
) -> FloatArray:
    """|scale_d| * (|alpha * scale_a * scale_b| |A| |B| + |beta| |C| + |bias|), elementwise absolute values.

    The scale against which rounding errors of a product are measured: they are small next to the terms that were
    summed, not next to a sum that may have cancelled. An activation multiplies it by its largest slope (1.5 covers
    all of ACTIVATIONS), since errors before it come out that much larger.

    Args:
        a: as in `gemm`, like the rest.
        b: (..., K, N).
        c: (..., M, N); not read when beta is 0.
        alpha: factor of the product; when it is 0, A and B are not read.
        beta: factor of c.
        bias: (N,).
        scale_a: a number or (..., M, 1).
        scale_b: a number or (..., 1, N).
        scale_d: a number.

    Returns:
        float64 (..., M, N).

    Raises:
        InvalidOperandError: as `gemm` does.
    """
    problem = _check_problem(a, b, c, beta=beta, bias=bias, scale_a=scale_a, scale_b=scale_b)
    with np.errstate(all="ignore"):
        d = _affine(
            np.abs(to_float64(a)),
            np.abs(to_float64(b)),
            None if c is None or beta == 0.0 else np.abs(to_float64(c)),
            problem.shape,
            alpha=abs(float(alpha)),
            beta=abs(float(beta)),
            bias=None if bias is None else np.abs(to_float64(bias)),
            scale_a=None if scale_a is None else np.abs(np.asarray(scale_a, dtype=np.float64)),
            scale_b=None if scale_b is None else np.abs(np.asarray(scale_b, dtype=np.float64)),
        )
        return d if scale_d is None else d * abs(float(scale_d))


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
    | fp64 | (k + 32) * 2**-53: as fp32, twice, since the reference has the same precision |

    k/2 is half the rigorous bound of a sequential sum: that of addends of one size and sign. Tensor cores truncate
    rather than round, but sum several products at a time with extra bits: on an H200 the largest error over uniform,
    normal, constant and wide-range operands was (0.17 k + 5) * 2**-24 from k = 32 to 32768 for fp16, bf16, tf32 and
    fp32. Adversarial data (one huge addend that cancels later) can exceed k/2. For fp8 the largest was 2**-9.6, and
    k * 2**-15.1 with fast accumulation (k = 4096, constant operands). fp4 was not measured: no such GPU was at hand.

    The bound grows with k while a typical error does not, so a test that must tell one math mode from another,
    or catch a narrow accumulator, should use k of 512 or less; small whole numbers as operands allow exact equality.

    Args:
        dtype_in: the operands' element type (`TF32` is float32 with math tf32); with mixed fp8, either.
        out_dtype: the result's element type.
        k: the number of products in a sum.
        math: as in `gemm`.
        exact_operands: float32 operands that TF32 represents (`round_to_tf32` was applied): for tf32 and 3xtf32 no
            operand error is allowed then.
        fast_accum: fp8's fast accumulation.

    Returns:
        Two plain numbers, usable with any array library.

    Raises:
        InvalidOperandError: an unknown math, or tf32 or 3xtf32 for operands other than float32.
    """
    if dtype_in is CutlassDtype.TF32:
        dtype_in, math = CutlassDtype.F32, "tf32"
    _check_math(math, dtype_in)
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
    if math == "tf32" and not exact_operands:
        error += 2.0**-10 + 2.0**-22
    elif math == "3xtf32" and not exact_operands:
        error += 2.0**-19
    elif dtype_in in (CutlassDtype.F8E4M3, CutlassDtype.F8E5M2):
        # One instruction aligns 32 products, so fewer of them are no more exact.
        terms = max(k, 32)
        error += terms * 2.0**-14 if fast_accum else min(terms, _FP8_PROMOTION_K) * 2.0**-15
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
    agrees: npt.NDArray[np.bool_] = np.where(both_finite, close, (got == want) | both_nan)
    return agrees
