"""The parts of all operations' references: activations, C and bias, and the checks of arguments."""

from __future__ import annotations

import math as _math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from ..arrays.numerics import FAST, FP8_DTYPES, MATH_MODES, AnyArray, FloatArray, from_numpy_dtype, to_float64
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.ops import LEAKY_SLOPE

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


def add_terms(product: FloatArray, c: AnyArray | None, beta: float, bias: AnyArray | None) -> FloatArray:
    """Adds beta * C and bias in place; C is not read when beta is 0."""
    if c is not None and beta != 0.0:
        product += beta * to_float64(c)
    if bias is not None:
        product += to_float64(bias)
    return product


def add_magnitudes(product: FloatArray, c: AnyArray | None, beta: float, bias: AnyArray | None) -> FloatArray:
    """Adds |beta| |C| and |bias| in place; C does not count when beta is 0."""
    c, bias = (None if term is None else np.abs(to_float64(term)) for term in (c, bias))
    return add_terms(product, c, abs(beta), bias)


def activated(values: FloatArray, activation: str | None) -> FloatArray:
    """act(values), which must have been checked."""
    return values if activation is None else ACTIVATIONS[activation](values)


# ----------------------------------------------------------------------------------------------------------------------
# Checks
# ----------------------------------------------------------------------------------------------------------------------


def element_type(name: str, operand: AnyArray) -> CutlassDtype:
    """The element type of an operand.

    Raises:
        InvalidOperandError: it has none; names the operand and the valid ones.
    """
    dtype = from_numpy_dtype(operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is d.storage)
        order = "" if operand.dtype.isnative else " in foreign byte order"
        raise InvalidOperandError(f"{name} is {operand.dtype}{order}; expected one of {valid}")
    return dtype


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without extending it."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def check_math(math: str, *operands: CutlassDtype) -> None:
    """Refuses a math mode that does not exist, or that the operands' element types do not have.

    Raises:
        InvalidOperandError: names the mode and the element type.
    """
    if math == FAST and all(dtype in FP8_DTYPES for dtype in operands):
        return
    if math not in MATH_MODES:
        valid = ", ".join(MATH_MODES)
        raise InvalidOperandError(f"math is {math!r}; expected one of {valid}, or for fp8 also {FAST}")
    if math in ("tf32", "3xtf32"):
        for dtype in operands:
            if dtype.storage is not CutlassDtype.F32:
                raise InvalidOperandError(f"math is {math!r}, but an operand is {dtype.value}: it needs float32")


def check_activation(activation: str | None) -> None:
    """Refuses an activation that does not exist.

    Raises:
        InvalidOperandError: names the valid ones.
    """
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        raise InvalidOperandError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")


def check_bias(bias: AnyArray | None, extent: int, axis: str = "column") -> None:
    """Refuses a bias that is not one value for each column (or channel) of the result.

    Raises:
        InvalidOperandError: names the given shape or dtype and the expected one.
    """
    if bias is not None:
        element_type("bias", bias)
        if bias.shape != (extent,):
            raise InvalidOperandError(f"bias has shape {bias.shape}; expected {(extent,)}, one value a {axis}")
