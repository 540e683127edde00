"""Activation functions in float64, and the error functions that gelu needs."""

from __future__ import annotations

import math as _math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from ..generator.epilogue.ops import LEAKY_SLOPE

if TYPE_CHECKING:
    from ..arrays.numerics import FloatArray

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
