"""GEMM, and the magnitudes that its rounding errors are measured against."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..numerics import (
    INTEGER_DTYPES,
    AnyArray,
    FloatArray,
    from_numpy_dtype,
    round_to_tf32,
    saturating_cast,
    to_float64,
)
from .activations import ACTIVATIONS
from .checks import broadcasts_to, check_math, element_type

Scale: TypeAlias = float | AnyArray
"""A scale factor: one number, or an array that scales rows (..., M, 1) of A or columns (..., 1, N) of B."""


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
    check_math(math, problem.dtype_a, problem.dtype_b)
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
        dtype = element_type(name, operand)
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
        element_type("c", c)
        if c.shape[-2:] != (m, n) or not broadcasts_to(c.shape, shape):
            raise InvalidOperandError(f"c has shape {c.shape}; expected {shape} or fewer batch dimensions")
    if bias is not None:
        element_type("bias", bias)
        if bias.shape != (n,):
            raise InvalidOperandError(f"bias has shape {bias.shape}; expected {(n,)}, one value a column")
    for name, scale, last in (("scale_a", scale_a, (m, 1)), ("scale_b", scale_b, (1, n))):
        dims: tuple[int, ...] = () if scale is None else np.shape(scale)
        if dims and (dims[-2:] not in (last, (1, 1)) or not broadcasts_to(dims, shape)):
            raise InvalidOperandError(f"{name} has shape {dims}; expected a number or (..., {last[0]}, {last[1]})")
    return _Problem(dtypes[0], dtypes[1], shape)


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
