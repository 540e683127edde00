"""Functions for use in traced functions: operations on values, casts, and results that are returned beside values.

Each takes values and finite numbers, one of them a value, and gives a value. Arithmetic is in float32, in float64 where
the product is.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from ..generator.epilogue.ops import LEAKY_SLOPE
from ..generator.epilogue.tree import COLUMN, MASK, ROW, SCALAR
from .element_types import element_type
from .values import Stored, Value, apply, location, number, refusal

__all__ = [
    "absolute", "cast", "clamp", "column_amax", "column_max", "column_sum", "d_gelu", "d_gelu_tanh", "d_relu",
    "d_sigmoid", "d_silu", "d_tanh", "exp", "fma", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "log", "mask",
    "maximum", "minimum", "reciprocal", "relu", "row_amax", "row_max", "row_sum", "rsqrt", "sigmoid", "silu",
    "sqrt", "square", "tanh", "total_amax", "total_max", "total_sum", "where",
]  # fmt: skip

Operable: TypeAlias = Value | float


def relu(x: Operable) -> Value:
    """0 where x < 0, else x."""
    return apply("relu", x)


def gelu(x: Operable) -> Value:
    """Gelu with erf: x times the normal distribution's function at x."""
    return apply("gelu", x)


def gelu_tanh(x: Operable) -> Value:
    """Gelu approximated with tanh and 0.044715."""
    return apply("gelu_tanh", x)


def silu(x: Operable) -> Value:
    """The product x * sigmoid(x)."""
    return apply("silu", x)


def sigmoid(x: Operable) -> Value:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def tanh(x: Operable) -> Value:
    """The hyperbolic tangent."""
    return apply("tanh", x)


def hardswish(x: Operable) -> Value:
    """The product x * clamp(x + 3, 0, 6) / 6."""
    return apply("hardswish", x)


def leaky_relu(x: Operable, slope: Operable = LEAKY_SLOPE) -> Value:
    """Where x > 0 x, else slope * x; the slope is a number."""
    return apply("leaky_relu", x, attributes=(number(slope, "the slope of leaky_relu"),))


def clamp(x: Operable, low: Operable | None = None, high: Operable | None = None) -> Value:
    """Limits x to [low, high]; None is no bound. NaN stays NaN.

    Raises:
        UnsupportedError: no bound is given.
    """
    if low is None:
        if high is None:
            raise refusal("clamp without a bound", "give low, high or both")
        return minimum(x, high)
    if high is None:
        return maximum(x, low)
    if any(isinstance(bound, Value) and bound.node.op != "constant" for bound in (low, high)):
        return minimum(maximum(x, low), high)
    bounds = number(low, "the lower bound of clamp"), number(high, "the upper bound of clamp")
    return apply("clamp", x, attributes=bounds)


def exp(x: Operable) -> Value:
    """The exponential function."""
    return apply("exp", x)


def log(x: Operable) -> Value:
    """The natural logarithm; NaN below 0."""
    return apply("log", x)


def sqrt(x: Operable) -> Value:
    """The square root; NaN below 0."""
    return apply("sqrt", x)


def rsqrt(x: Operable) -> Value:
    """1 / sqrt(x)."""
    return apply("rsqrt", x)


def reciprocal(x: Operable) -> Value:
    """1 / x."""
    return apply("reciprocal", x)


def square(x: Operable) -> Value:
    """The product x * x."""
    return apply("square", x)


def absolute(x: Operable) -> Value:
    """|x|."""
    return apply("absolute", x)


def maximum(x: Operable, y: Operable) -> Value:
    """The larger one; NaN where either is."""
    return apply("maximum", x, y)


def minimum(x: Operable, y: Operable) -> Value:
    """The smaller one; NaN where either is."""
    return apply("minimum", x, y)


def where(condition: Operable, x: Operable, y: Operable) -> Value:
    """Where the condition, such as a comparison or a mask, is not 0 x, else y."""
    return apply("select", condition, x, y)


def fma(x: Operable, y: Operable, z: Operable) -> Value:
    """The sum x * y + z, rounded once."""
    return apply("fma", x, y, z)


def d_relu(dy: Operable, x: Operable) -> Value:
    """The gradient of relu: dy where x > 0, else 0."""
    return apply("d_relu", dy, x)


def d_gelu(dy: Operable, x: Operable) -> Value:
    """The gradient of gelu: its derivative at x, times dy."""
    return apply("d_gelu", dy, x)


def d_gelu_tanh(dy: Operable, x: Operable) -> Value:
    """The gradient of gelu_tanh: its derivative at x, times dy."""
    return apply("d_gelu_tanh", dy, x)


def d_silu(dy: Operable, x: Operable) -> Value:
    """The gradient of silu: its derivative at x, times dy."""
    return apply("d_silu", dy, x)


def d_sigmoid(dy: Operable, x: Operable) -> Value:
    """The gradient of sigmoid: its derivative at x, times dy."""
    return apply("d_sigmoid", dy, x)


def d_tanh(dy: Operable, x: Operable) -> Value:
    """The gradient of tanh: its derivative at x, times dy."""
    return apply("d_tanh", dy, x)


def cast(x: Operable, dtype: Any) -> Value:
    """Rounds x to an element type as stores round: fp8 and integers saturate.

    The result of a function is stored in the type of its outermost cast.

    Args:
        x: a value.
        dtype: a CutlassDtype, a name, or a dtype of NumPy or PyTorch.

    Raises:
        InvalidOperandError: `dtype` is none of these.
    """
    return apply("cast", x, attributes=(element_type(dtype, f"{location()}: cast").value,))


# ----------------------------------------------------------------------------------------------------------------------
# Results that are returned beside values
# ----------------------------------------------------------------------------------------------------------------------


def mask(x: Value) -> Stored:
    """Stores x != 0 as bits, eight to a byte along N: (..., M, ceil(N / 8)) of uint8."""
    return _stored(x, MASK)


def row_sum(x: Value) -> Stored:
    """The sum over M: (..., N)."""
    return _stored(x, ROW, "sum")


def row_max(x: Value) -> Stored:
    """The maximum over M: (..., N)."""
    return _stored(x, ROW, "max")


def row_amax(x: Value) -> Stored:
    """The largest magnitude over M: (..., N)."""
    return _stored(x, ROW, "amax")


def column_sum(x: Value) -> Stored:
    """The sum over N: (..., M)."""
    return _stored(x, COLUMN, "sum")


def column_max(x: Value) -> Stored:
    """The maximum over N: (..., M)."""
    return _stored(x, COLUMN, "max")


def column_amax(x: Value) -> Stored:
    """The largest magnitude over N: (..., M)."""
    return _stored(x, COLUMN, "amax")


def total_sum(x: Value) -> Stored:
    """The sum of everything, batches included: (1,)."""
    return _stored(x, SCALAR, "sum")


def total_max(x: Value) -> Stored:
    """The maximum of everything, batches included: (1,)."""
    return _stored(x, SCALAR, "max")


def total_amax(x: Value) -> Stored:
    """The largest magnitude of everything, batches included: (1,)."""
    return _stored(x, SCALAR, "amax")


def _stored(x: object, kind: str, reduction: str = "") -> Stored:
    if not isinstance(x, Value):
        name = "mask" if kind == MASK else f"{'total' if kind == SCALAR else kind}_{reduction}"
        raise refusal(f"{name} of a {type(x).__name__}", "give it a traced value")
    return Stored(x, kind, reduction)
