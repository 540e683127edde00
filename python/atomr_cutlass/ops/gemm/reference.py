"""GEMM, and the magnitudes that its rounding errors are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.numerics import INTEGER_DTYPES, AnyArray, FloatArray, from_numpy_dtype, round_to_tf32, stored, to_float64
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...pipeline.problem import broadcasts_to
from ...reference import parts
from ...reference.parts import OperandScale, Scale, read_scales, scaled_product


class GemmResult(NamedTuple):
    """A result as `gemm` returns it, and the largest magnitude in it, of shape (1,)."""

    d: AnyArray
    amax: npt.NDArray[np.float32]


@dataclass(frozen=True)
class GemmTerms:
    """Parameters of a GEMM beside operands and the type of the result.

    Attributes:
        bias: (N,), added to every row.
        scale_a: multiplies. A number, or an array of any floating dtype: one element for everything, (..., M, 1) for
            each row, or (..., M, ceil(K / 128)) for each 128 elements of a row. For fp4 also, with scale_b of the same
            dtype, (..., M, K / 16) of e4m3 without signs (nvfp4; its second-level scale goes into alpha), or
            (..., M, K / 32) of e8m0 (mxfp4).
        scale_b: one for everything, (..., 1, N) for each column, (..., ceil(K / 128), ceil(N / 128)) for
            each block of 128 x 128, and for fp4 (..., K / 16, N) or (..., K / 32, N). Batch dimensions of scales
            broadcast to the result's.
        scale_d: a number, applied after the activation.
        math: `tf32` rounds float32 operands to TF32 first. `default`, `ieee` and `3xtf32` keep them as they are.
    """

    alpha: float = 1.0
    beta: float = 0.0
    bias: AnyArray | None = None
    activation: str | None = None
    scale_a: Scale | None = None
    scale_b: Scale | None = None
    scale_d: float | None = None
    math: str = "default"


def gemm(a: AnyArray, b: AnyArray, c: AnyArray | None = None, *, out_dtype: CutlassDtype, **terms: Any) -> AnyArray:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)).

    NaN and infinity propagate as in BLAS: through A, B, C, alpha and beta alike, except that C is not read when
    beta is 0, and A and B are not read when alpha is 0 (reference BLAS documents both; cuBLAS does the same). Without
    products (K is 0) there is nothing for alpha to multiply either: D is then act(beta * C + bias).

    Scales propagate like alpha. Where there is one for each block, it multiplies that block's sum of products: an
    infinite scale makes infinity of a block whose sum is not zero, and NaN of one whose sum is. The narrow scales of
    fp4 hold no infinity; their NaN makes NaN of every result that the block takes part in, zeros included. fp4 itself
    holds neither. An infinite or NaN result is stored as `saturating_cast` says: fp8 saturates and keeps NaN.

    int8 operands with an int32 result stay integers from end to end. alpha and beta are whole numbers there, and
    every step wraps modulo 2**32 like the int32 arithmetic of CUTLASS's epilogue: nothing saturates. (Kernels of the
    sm80 generation saturate the sum of products, CUTLASS having no other instruction; it takes K above 131,071 to
    see that.) int8 operands with any other result go through float64 as everything else does.

    A and B may have any dtype but int32, C any; TF32 is stored as float32. `terms` are those of `GemmTerms`.
    """
    given = GemmTerms(**terms)
    if out_dtype is CutlassDtype.I32 and from_numpy_dtype(a.dtype) is CutlassDtype.I8:
        if not (given.scale_a is None and given.scale_b is None and given.scale_d is None):
            raise InvalidOperandError("scales are given; int8 to int32 takes none: ask for a floating out_dtype")
        return _integer_gemm(a, b, c, given)
    values = _values(a, b, c, given)
    with np.errstate(all="ignore"):
        return stored(values, given.scale_d, out_dtype)


def gemm_with_amax(
    a: AnyArray, b: AnyArray, c: AnyArray | None = None, *, out_dtype: CutlassDtype, **terms: Any
) -> GemmResult:
    """`gemm`, and amax = max |act(...)| over all batches before scale_d, from which the next scale is chosen.

    A function of its own, so that the result of `gemm` does not depend on a flag. The largest magnitude of an empty
    result is 0; NaN anywhere makes NaN of it, as in CUTLASS's reduction. int32 results have none.
    """
    if out_dtype is CutlassDtype.I32:
        raise InvalidOperandError("amax is of floating results; out_dtype is int32")
    given = GemmTerms(**terms)
    values = _values(a, b, c, given)
    with np.errstate(all="ignore"):
        amax = np.abs(values).max(initial=0.0).astype(np.float32).reshape(1)
        return GemmResult(stored(values, given.scale_d, out_dtype), amax)


def absolute_product(a: AnyArray, b: AnyArray, c: AnyArray | None = None, **terms: Any) -> FloatArray:
    """|scale_d| * (|alpha| |scale_a| |scale_b| |A| |B| + |beta| |C| + |bias|), elementwise absolute values.

    The scale against which rounding errors of a product are measured: they are small next to the terms that were
    summed, not next to a sum that may have cancelled. An activation multiplies it by its largest slope (1.5 covers
    all of ACTIVATIONS), since errors before it come out that much larger. Arguments are those of `gemm`; the result is
    float64.
    """
    given = GemmTerms(**terms)
    shape = _check_problem(a, b, c, given)
    first, second = (scale.absolute() for scale in read_scales(a, b, given.scale_a, given.scale_b))
    with np.errstate(all="ignore"):
        d = _product(np.abs(to_float64(a)), np.abs(to_float64(b)), shape, abs(float(given.alpha)), first, second)
        c, bias = (None if term is None else np.abs(to_float64(term)) for term in (c, given.bias))
        d = parts.add_terms(d, c, abs(float(given.beta)), bias)
        return d if given.scale_d is None else d * abs(float(given.scale_d))


def _values(a: AnyArray, b: AnyArray, c: AnyArray | None, terms: GemmTerms) -> FloatArray:
    """act(...) before scale_d and rounding, of arguments that are checked here."""
    shape = _check_problem(a, b, c, terms)
    first, second = read_scales(a, b, terms.scale_a, terms.scale_b)
    if terms.math == "tf32":
        a, b = round_to_tf32(a), round_to_tf32(b)
    with np.errstate(all="ignore"):
        product = _product(to_float64(a), to_float64(b), shape, float(terms.alpha), first, second)
        return parts.add_terms(product, c, float(terms.beta), terms.bias, terms.activation)


def _product(
    a: FloatArray, b: FloatArray, shape: tuple[int, ...], alpha: float, scale_a: OperandScale, scale_b: OperandScale
) -> FloatArray:
    """The scaled product in an array of its own. Where alpha or K is 0, operands and scales are not read."""
    if alpha == 0.0 or a.shape[-1] == 0:
        return np.zeros(shape)
    d = scaled_product(a, b, scale_a, scale_b)
    for factor in (alpha, scale_a.outer, scale_b.outer):
        if not (isinstance(factor, float) and factor == 1.0):
            d *= factor
    return d


def _integer_gemm(a: AnyArray, b: AnyArray, c: AnyArray | None, terms: GemmTerms) -> AnyArray:
    """int8 x int8 -> int32 modulo 2**32."""
    _check_problem(a, b, c, terms)
    alpha, beta, bias, activation = terms.alpha, terms.beta, terms.bias, terms.activation
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
    d *= np.int64(int(alpha) % 2**32)
    if c is not None and beta != 0:
        d += np.int64(int(beta) % 2**32) * c.astype(np.int64)
    if bias is not None:
        d += bias.astype(np.int64)
    wrapped: AnyArray = d.astype(np.int32)
    return np.maximum(wrapped, np.int32(0)) if activation == "relu" else wrapped


def _check_problem(a: AnyArray, b: AnyArray, c: AnyArray | None, terms: GemmTerms) -> tuple[int, ...]:
    """Checks everything but the scales; returns the result's shape."""
    dtypes: list[CutlassDtype] = []
    for name, operand, expected in (("a", a, "(..., M, K)"), ("b", b, "(..., K, N)")):
        if operand.ndim < 2:
            raise InvalidOperandError(f"{name} has shape {operand.shape}; expected {expected}")
        dtype = parts.element_type(name, operand)
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
        if terms.beta != 0.0:
            raise InvalidOperandError(f"beta is {terms.beta}, but c is not given")
    else:
        parts.element_type("c", c)
        if c.shape[-2:] != (m, n) or not broadcasts_to(c.shape, shape):
            raise InvalidOperandError(f"c has shape {c.shape}; expected {shape} or fewer batch dimensions")
    parts.check_bias(terms.bias, n)
    parts.check_activation(terms.activation)
    parts.check_math(terms.math, *dtypes)
    return shape
