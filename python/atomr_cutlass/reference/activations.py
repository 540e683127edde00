"""Activation functions in float64, and the error functions that gelu needs."""

from __future__ import annotations

import math as _math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from ..arrays.numerics import FloatArray

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
