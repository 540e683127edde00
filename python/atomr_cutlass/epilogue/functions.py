"""Functions for use in traced functions: operations on values, casts, and results that are returned beside values.

Each takes values and finite numbers, at least one of them a value, and returns a value. Arithmetic is in float32, or
in float64 if the product is. The equivalent functions and methods of PyTorch and NumPy are found by name, without
importing either package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.ops import LEAKY_SLOPE, OPS
from ..generator.epilogue.tree import COLUMN, MASK, ROW, SCALAR
from .values import Stored, Value, apply, element_type, location, number, refusal

__all__ = [
    "absolute", "cast", "clamp", "column_amax", "column_max", "column_sum", "d_gelu", "d_gelu_tanh", "d_relu",
    "d_sigmoid", "d_silu", "d_tanh", "exp", "fma", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "log", "mask",
    "maximum", "minimum", "reciprocal", "relu", "row_amax", "row_max", "row_sum", "rsqrt", "sigmoid", "silu",
    "sqrt", "square", "tanh", "total_amax", "total_max", "total_sum", "where",
]  # fmt: skip

Operable: TypeAlias = Value | float


_P = ParamSpec("_P")
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., object])


def _named(function: _FunctionT, name: str, doc: str) -> _FunctionT:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _like(function: Callable[_P, Value], op: str, doc: str) -> Callable[_P, Value]:
    """An operation with the signature of another one."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Value:
        return apply(op, *signature.bind(*args, **kwargs).args)

    return _named(call, op, doc)


def _stored(name: str, kind: str, reduction: str, doc: str) -> Callable[[Value], Stored]:
    def call(x: Value) -> Stored:
        if not isinstance(x, Value):
            raise refusal(f"{name} of a {type(x).__name__}", "give it a traced value")
        return Stored(x, kind, reduction)

    return _named(call, name, doc)


def relu(x: Operable) -> Value:
    """0 where x < 0, else x."""
    return apply("relu", x)


def maximum(x: Operable, y: Operable) -> Value:
    """The larger value; NaN if either is NaN."""
    return apply("maximum", x, y)


def d_relu(dy: Operable, x: Operable) -> Value:
    """The gradient of relu: dy where x > 0, else 0."""
    return apply("d_relu", dy, x)


gelu = _like(relu, "gelu", "Gelu with erf: x times the normal distribution's function at x.")
gelu_tanh = _like(relu, "gelu_tanh", "Gelu approximated with tanh and 0.044715.")
silu = _like(relu, "silu", "The product x * sigmoid(x).")
sigmoid = _like(relu, "sigmoid", "1 / (1 + exp(-x)).")
tanh = _like(relu, "tanh", "The hyperbolic tangent.")
hardswish = _like(relu, "hardswish", "The product x * clamp(x + 3, 0, 6) / 6.")
exp = _like(relu, "exp", "The exponential function.")
log = _like(relu, "log", "The natural logarithm; NaN below 0.")
sqrt = _like(relu, "sqrt", "The square root; NaN below 0.")
rsqrt = _like(relu, "rsqrt", "1 / sqrt(x).")
reciprocal = _like(relu, "reciprocal", "1 / x.")
square = _like(relu, "square", "The product x * x.")
absolute = _like(relu, "absolute", "|x|.")
minimum = _like(maximum, "minimum", "The smaller one; NaN where either is.")
d_gelu = _like(d_relu, "d_gelu", "The gradient of gelu: its derivative at x, times dy.")
d_gelu_tanh = _like(d_relu, "d_gelu_tanh", "The gradient of gelu_tanh: its derivative at x, times dy.")
d_silu = _like(d_relu, "d_silu", "The gradient of silu: its derivative at x, times dy.")
d_sigmoid = _like(d_relu, "d_sigmoid", "The gradient of sigmoid: its derivative at x, times dy.")
d_tanh = _like(d_relu, "d_tanh", "The gradient of tanh: its derivative at x, times dy.")


def leaky_relu(x: Operable, slope: Operable = LEAKY_SLOPE) -> Value:
    """Leaky ReLU: x where x > 0, else slope * x; the slope is a number."""
    return apply("leaky_relu", x, attributes=(number(slope, "the slope of leaky_relu"),))


def clamp(x: Operable, low: Operable | None = None, high: Operable | None = None) -> Value:
    """Limits x to [low, high]; None is no bound. NaN remains NaN.

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
    """Selects x where the condition, such as a comparison or a mask, is not 0, else y."""
    return apply("select", condition, x, y)


def fma(x: Operable, y: Operable, z: Operable) -> Value:
    """The sum x * y + z, rounded once."""
    return apply("fma", x, y, z)


def cast(x: Operable, dtype: Any) -> Value:
    """Rounds x to an element type as stores round: fp8 and integers saturate.

    A function's result is stored in the type of its outermost cast.

    Args:
        x: a value.
        dtype: a CutlassDtype, a name, or a dtype of NumPy or PyTorch.

    Raises:
        InvalidOperandError: `dtype` is none of these.
    """
    return apply("cast", x, attributes=(element_type(dtype, f"{location()}: cast").value,))


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


_REDUCTIONS: Final = frozenset(
    {"sum", "max", "min", "amax", "amin", "mean", "norm", "reduce", "softmax", "log_softmax"}
)
_FACTS: Final = frozenset(
    {"shape", "size", "ndim", "dim", "dtype", "device", "strides", "stride", "numel", "T", "item"}
)


def _operations(*names: str, **others: str) -> dict[str, Callable[..., Value]]:
    """Functions by foreign name: operations of the same name, and those that are named otherwise here."""

    def function(op: str) -> Callable[..., Value]:
        if OPS[op].arity == 1:
            return lambda x, /: apply(op, x)
        return lambda x, other, /: apply(op, x, other)

    return {name: function(op) for name, op in [*zip(names, names, strict=True), *others.items()]}


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


def _clip(x: Any, /, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Value:  # noqa: A002
    return clamp(x, a_min if min is None else min, a_max if max is None else max)


_SAME: Final = {
    **_operations(
        "absolute", "exp", "log", "reciprocal", "sqrt", "square", "tanh", "multiply", "maximum", "minimum",
        "not_equal", "less", "less_equal", "greater", "greater_equal", abs="absolute", negative="negate",
    ),
    "where": where,
}  # fmt: skip
"""The functions that have the same name in PyTorch and NumPy."""

TORCH: Final[Mapping[str, Callable[..., Value]]] = _SAME | {
    **_operations(
        "relu", "rsqrt", "sigmoid", "silu", "hardswish", neg="negate", mul="multiply", max="maximum", min="minimum",
        eq="equal", ne="not_equal", lt="less", le="less_equal", gt="greater", ge="greater_equal",
    ),
    "add": _scaled("add"),
    **dict.fromkeys(("sub", "subtract"), _scaled("subtract")),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    "pow": _power,
    "gelu": _gelu,
    "leaky_relu": lambda x, /, negative_slope=LEAKY_SLOPE: leaky_relu(x, negative_slope),
    **dict.fromkeys(("clamp", "clip"), lambda x, /, min=None, max=None: clamp(x, min, max)),  # noqa: A006
    "clamp_min": lambda x, /, min: maximum(x, min),  # noqa: A006
    "clamp_max": lambda x, /, max: minimum(x, max),  # noqa: A006
    "hardtanh": lambda x, /, min_val=-1.0, max_val=1.0: clamp(x, min_val, max_val),
    "relu6": lambda x, /: clamp(x, 0.0, 6.0),
}  # fmt: skip
"""PyTorch's functions by name, without `equal`, which compares whole tensors there."""

NUMPY: Final[Mapping[str, Callable[..., Value]]] = _SAME | {
    **_operations("add", "subtract", "divide", "equal", fabs="absolute", true_divide="divide"),
    **dict.fromkeys(("power", "float_power"), _power),
    "clip": _clip,
}
"""NumPy's functions by name."""

METHODS: Final[Mapping[str, Callable[..., Value]]] = {
    **TORCH,
    **dict.fromkeys(("to", "type", "astype"), lambda x, /, dtype: cast(x, dtype)),
    "float": lambda x, /: cast(x, CutlassDtype.F32),
    "double": lambda x, /: cast(x, CutlassDtype.F64),
    "half": lambda x, /: cast(x, CutlassDtype.F16),
    "bfloat16": lambda x, /: cast(x, CutlassDtype.BF16),
    "where": lambda x, condition, other, /: where(condition, x, other),
}
"""Methods of tensors and arrays by name."""


_OWNERS: Final = {".": METHODS, "torch's ": TORCH, "numpy.": NUMPY}


def foreign(owner: str, name: str) -> Callable[..., Value]:
    """The equivalent of a function or method of one of _OWNERS; refused if there is none."""
    function, shown = _OWNERS[owner].get(name), owner + name
    if function is None:
        raise refusal(f"{shown} of a traced value", _cure(name))

    def call(*args: Any, **kwargs: Any) -> Value:
        if kwargs.pop("inplace", False) or kwargs.pop("out", None) is not None:
            raise refusal(f"{shown} in place", "leave inplace and out away, and use what it returns")
        try:
            _signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise refusal(f"{shown} of a traced value, {error}", _cure(name)) from None
        return function(*args, **kwargs)

    return call


_signature: Final = functools.cache(inspect.signature)


def _cure(name: str) -> str:
    name = name.rpartition(".")[2]  # of NumPy's `add.reduce`, the method
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
