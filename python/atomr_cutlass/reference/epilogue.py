"""Bias, C and activation in NumPy, common to all operations."""

from __future__ import annotations

import numpy as np

from ..arrays.numerics import AnyArray, FloatArray, to_float64
from ..errors import InvalidOperandError
from .activations import ACTIVATIONS
from .checks import element_type


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


def add_terms(product: FloatArray, c: AnyArray | None, beta: float, bias: AnyArray | None) -> FloatArray:
    """Adds beta * C and bias in place; C is not read when beta is 0."""
    if c is not None and beta != 0.0:
        product += beta * to_float64(c)
    if bias is not None:
        product += to_float64(bias)
    return product


def add_magnitudes(product: FloatArray, c: AnyArray | None, beta: float, bias: AnyArray | None) -> FloatArray:
    """Adds |beta| |C| and |bias| in place; C is not read when beta is 0."""
    if c is not None and beta != 0.0:
        product += abs(beta) * np.abs(to_float64(c))
    if bias is not None:
        product += np.abs(to_float64(bias))
    return product


def activated(values: FloatArray, activation: str | None) -> FloatArray:
    """act(values), which must have been checked."""
    return values if activation is None else ACTIVATIONS[activation](values)
