"""Functions of PyTorch and NumPy, and methods of arrays, applied to values; found by name, importing neither."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.ops import LEAKY_SLOPE, OPS
from .functions import cast, clamp, leaky_relu, maximum, minimum, where
from .values import Value, apply, number, refusal

_REDUCTIONS: Final = frozenset(
    {"sum", "max", "min", "amax", "amin", "mean", "norm", "reduce", "softmax", "log_softmax"}
)
_FACTS: Final = frozenset(
    {"shape", "size", "ndim", "dim", "dtype", "device", "strides", "stride", "numel", "T", "item"}
)


def _operation(op: str) -> Callable[..., Value]:
    def of_one(x: Any, /) -> Value:
        return apply(op, x)

    def of_two(x: Any, other: Any, /) -> Value:
        return apply(op, x, other)

    return of_one if OPS[op].arity == 1 else of_two


def _scaled(op: str) -> Callable[..., Value]:
    """PyTorch's add and sub: the second one times alpha."""

    def call(x: Any, other: Any, /, *, alpha: Any = 1) -> Value:
        factor = number(alpha, "alpha")
        if factor == 1.0:
            return apply(op, x, other)
        scaled = other * factor if isinstance(other, Value) else number(other, "what alpha multiplies") * factor
        return apply(op, x, scaled)

    return call


def _divide(x: Any, other: Any, /, *, rounding_mode: Any = None) -> Value:
    if rounding_mode is not None:
        raise refusal(f"a quotient with rounding_mode={rounding_mode!r}", "leave rounding_mode out")
    return apply("divide", x, other)


def _power(x: Any, exponent: Any, /) -> Value:
    if not isinstance(x, Value):
        raise refusal("a traced value as an exponent", "write exp(x * log(base)) for base ** x")
    made: Value = x**exponent
    return made


def _gelu(x: Any, /, approximate: Any = "none") -> Value:
    if approximate not in ("none", "tanh"):
        raise refusal(f"gelu with approximate={approximate!r}", "it is 'none' or 'tanh'")
    return apply("gelu" if approximate == "none" else "gelu_tanh", x)


def _leaky_relu(x: Any, /, negative_slope: Any = LEAKY_SLOPE) -> Value:
    return leaky_relu(x, negative_slope)


def _clamp(x: Any, /, min: Any = None, max: Any = None) -> Value:  # noqa: A002 - PyTorch's names
    return clamp(x, min, max)


def _clip(x: Any, /, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Value:  # noqa: A002
    return clamp(x, a_min if min is None else min, a_max if max is None else max)


def _clamp_min(x: Any, /, min: Any) -> Value:  # noqa: A002
    return maximum(x, min)


def _clamp_max(x: Any, /, max: Any) -> Value:  # noqa: A002
    return minimum(x, max)


def _hardtanh(x: Any, /, min_val: Any = -1.0, max_val: Any = 1.0) -> Value:
    return clamp(x, min_val, max_val)


def _relu6(x: Any, /) -> Value:
    return clamp(x, 0.0, 6.0)


_SAME: Final = {
    **{
        name: _operation(name)
        for name in (
            "absolute", "exp", "log", "reciprocal", "sqrt", "square", "tanh", "multiply", "maximum", "minimum",
            "not_equal", "less", "less_equal", "greater", "greater_equal",
        )
    },
    "abs": _operation("absolute"),
    "negative": _operation("negate"),
    "where": where,
}  # fmt: skip
"""The functions that have the same name in PyTorch and NumPy."""

TORCH: Final[Mapping[str, Callable[..., Value]]] = _SAME | {
    **{name: _operation(name) for name in ("relu", "rsqrt", "sigmoid", "silu", "hardswish")},
    **{
        name: _operation(op)
        for name, op in (
            ("neg", "negate"), ("mul", "multiply"), ("max", "maximum"), ("min", "minimum"), ("eq", "equal"),
            ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal"),
        )
    },
    "add": _scaled("add"),
    **dict.fromkeys(("sub", "subtract"), _scaled("subtract")),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    "pow": _power,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
}  # fmt: skip
"""PyTorch's functions by name. `equal`, which compares whole tensors there, is not among them."""

NUMPY: Final[Mapping[str, Callable[..., Value]]] = _SAME | {
    **{name: _operation(name) for name in ("add", "subtract", "divide", "equal")},
    "fabs": _operation("absolute"),
    "true_divide": _operation("divide"),
    **dict.fromkeys(("power", "float_power"), _power),
    "clip": _clip,
}
"""NumPy's functions by name."""


def _to(dtype: CutlassDtype) -> Callable[..., Value]:
    def call(x: Any, /) -> Value:
        return cast(x, dtype)

    return call


def _cast(x: Any, /, dtype: Any) -> Value:
    return cast(x, dtype)


def _where_method(x: Any, condition: Any, other: Any, /) -> Value:
    return where(condition, x, other)


METHODS: Final[Mapping[str, Callable[..., Value]]] = {
    **TORCH,
    **dict.fromkeys(("to", "type", "astype"), _cast),
    "float": _to(CutlassDtype.F32),
    "double": _to(CutlassDtype.F64),
    "half": _to(CutlassDtype.F16),
    "bfloat16": _to(CutlassDtype.BF16),
    "where": _where_method,
}
"""Methods of tensors and arrays by name."""


def torch_function(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Applies a function of PyTorch to these arguments."""
    name = str(getattr(function, "__name__", function))
    return _call(TORCH, name, f"torch's {name}", args, kwargs)


def numpy_function(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Applies a function of NumPy to these arguments."""
    return _call(NUMPY, function.__name__, f"numpy.{function.__name__}", args, kwargs)


def numpy_ufunc(ufunc: Any, how: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Applies a method of a universal function of NumPy, mostly `__call__`, to these arguments."""
    if how != "__call__":
        raise refusal(f"numpy.{ufunc.__name__}.{how} of a traced value", _cure(how))
    return numpy_function(ufunc, args, kwargs)


def method(value: Value, name: str) -> Callable[..., Value]:
    """A value's method.

    Raises:
        UnsupportedError: it has none of this name.
    """
    if name not in METHODS:
        raise refusal(f".{name} of a traced value", _cure(name))

    def call(*args: Any, **kwargs: Any) -> Value:
        return _call(METHODS, name, f".{name}()", (value, *args), kwargs)

    return call


def _call(
    table: Mapping[str, Callable[..., Value]], name: str, shown: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Value:
    function = table.get(name)
    if function is None:
        raise refusal(f"{shown} of a traced value", _cure(name))
    given = dict(kwargs)
    if given.pop("inplace", False) or given.pop("out", None) is not None:
        raise refusal(f"{shown} in place", "leave inplace and out away, and use what it returns")
    try:
        _signature(function).bind(*args, **given)
    except TypeError as error:
        raise refusal(f"{shown} of a traced value, {error}", _cure(name)) from None
    return function(*args, **given)


@functools.cache
def _signature(function: Callable[..., Value]) -> inspect.Signature:
    return inspect.signature(function)


def _cure(name: str) -> str:
    if name in _REDUCTIONS:
        return (
            "return a reduction beside the result: row_sum, column_sum, total_sum, or those of max and amax, of "
            "atomr_cutlass.epilogue"
        )
    if name in _FACTS:
        return "shapes, types and elements are not there while the function is traced: leave what needs them outside"
    if name.endswith("_"):
        return f"values are not written in place: use what {name.rstrip('_')} returns"
    return "the operations are those of atomr_cutlass.epilogue"
