"""Functions for use in traced functions: operations on values, casts, and results that are returned beside values.

Each takes values and finite numbers, one of them a value, and gives a value. Arithmetic is in float32, in float64 where
the product is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

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


class _Unary(Protocol):
    def __call__(self, x: Operable) -> Value: ...


class _Binary(Protocol):
    def __call__(self, x: Operable, y: Operable) -> Value: ...


class _Gradient(Protocol):
    def __call__(self, dy: Operable, x: Operable) -> Value: ...


class _Stored(Protocol):
    def __call__(self, x: Value) -> Stored: ...


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., object])


def _named(function: _FunctionT, name: str, doc: str) -> _FunctionT:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _unary(op: str, doc: str) -> _Unary:
    def call(x: Operable) -> Value:
        return apply(op, x)

    return _named(call, op, doc)


def _binary(op: str, doc: str) -> _Binary:
    def call(x: Operable, y: Operable) -> Value:
        return apply(op, x, y)

    return _named(call, op, doc)


def _gradient(activation: str, doc: str = "its derivative at x, times dy") -> _Gradient:
    op = f"d_{activation}"

    def call(dy: Operable, x: Operable) -> Value:
        return apply(op, dy, x)

    return _named(call, op, f"The gradient of {activation}: {doc}.")


def _stored(name: str, kind: str, reduction: str, doc: str) -> _Stored:
    def call(x: Value) -> Stored:
        if not isinstance(x, Value):
            raise refusal(f"{name} of a {type(x).__name__}", "give it a traced value")
        return Stored(x, kind, reduction)

    return _named(call, name, doc)


# ----------------------------------------------------------------------------------------------------------------------
# Operations on values
# ----------------------------------------------------------------------------------------------------------------------

relu = _unary("relu", "0 where x < 0, else x.")
gelu = _unary("gelu", "Gelu with erf: x times the normal distribution's function at x.")
gelu_tanh = _unary("gelu_tanh", "Gelu approximated with tanh and 0.044715.")
silu = _unary("silu", "The product x * sigmoid(x).")
sigmoid = _unary("sigmoid", "1 / (1 + exp(-x)).")
tanh = _unary("tanh", "The hyperbolic tangent.")
hardswish = _unary("hardswish", "The product x * clamp(x + 3, 0, 6) / 6.")
exp = _unary("exp", "The exponential function.")
log = _unary("log", "The natural logarithm; NaN below 0.")
sqrt = _unary("sqrt", "The square root; NaN below 0.")
rsqrt = _unary("rsqrt", "1 / sqrt(x).")
reciprocal = _unary("reciprocal", "1 / x.")
square = _unary("square", "The product x * x.")
absolute = _unary("absolute", "|x|.")
maximum = _binary("maximum", "The larger one; NaN where either is.")
minimum = _binary("minimum", "The smaller one; NaN where either is.")
d_relu = _gradient("relu", "dy where x > 0, else 0")
d_gelu = _gradient("gelu")
d_gelu_tanh = _gradient("gelu_tanh")
d_silu = _gradient("silu")
d_sigmoid = _gradient("sigmoid")
d_tanh = _gradient("tanh")


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


def where(condition: Operable, x: Operable, y: Operable) -> Value:
    """Where the condition, such as a comparison or a mask, is not 0 x, else y."""
    return apply("select", condition, x, y)


def fma(x: Operable, y: Operable, z: Operable) -> Value:
    """The sum x * y + z, rounded once."""
    return apply("fma", x, y, z)


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

mask = _stored("mask", MASK, "", "Stores x != 0 as bits, eight to a byte along N: (..., M, ceil(N / 8)) of uint8.")
row_sum = _stored("row_sum", ROW, "sum", "The sum over M: (..., N).")
row_max = _stored("row_max", ROW, "max", "The maximum over M: (..., N).")
row_amax = _stored("row_amax", ROW, "amax", "The largest magnitude over M: (..., N).")
column_sum = _stored("column_sum", COLUMN, "sum", "The sum over N: (..., M).")
column_max = _stored("column_max", COLUMN, "max", "The maximum over N: (..., M).")
column_amax = _stored("column_amax", COLUMN, "amax", "The largest magnitude over N: (..., M).")
total_sum = _stored("total_sum", SCALAR, "sum", "The sum of everything, batches included: (1,).")
total_max = _stored("total_max", SCALAR, "max", "The maximum of everything, batches included: (1,).")
total_amax = _stored("total_amax", SCALAR, "amax", "The largest magnitude of everything, batches included: (1,).")
