"""Values: the arguments of a function while it is traced. Operations on them build the nodes of a tree.

A value stands for every element of the result, so only elementwise operations can be traced; others are refused with
the line of the function that performs them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from ..arrays.numerics import BYTE
from ..checks import NUMBERS, shown
from ..errors import CutlassError, InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import Node

_FOREIGN: Final = frozenset({__name__.partition(".")[0], "numpy", "torch"})
"""Packages whose frames are not the traced function's: this one, and libraries that call back into it."""

_DLPACK_NAMES: Final = {BYTE: "uint8"} | {dtype.dlpack: dtype.storage.value for dtype in CutlassDtype}

_POWERS: Final = {2.0: "square", 0.5: "sqrt", -1.0: "reciprocal", -0.5: "rsqrt"}

_CHOOSE: Final = "use where(condition, x, y), maximum or minimum"
_NO_PLACE: Final = "values have no shape and no elements; reductions are row_sum, column_sum, total_sum and their like"
_AS_OPERAND: Final = "make it a parameter of the function, and give the array under its name in the call"


def location() -> str:
    """`file:line` of the innermost frame outside this package and the libraries that call back into it."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _FOREIGN:
        frame = frame.f_back
    return "a traced function" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def refusal(problem: str, cure: str) -> UnsupportedError:
    """The error for an operation that cannot be traced, with its line in the traced function."""
    return UnsupportedError(f"{location()}: {problem}: {cure}")


def finite(x: object, error: Callable[[str], CutlassError]) -> float:
    """A finite number as trees hold it; otherwise raises `error` of a description of the object."""
    if isinstance(x, np.ndarray) and x.ndim == 0:  # NumPy converts its scalars to 0-d arrays before a comparison
        x = x[()]
    if isinstance(x, bool) or not isinstance(x, NUMBERS):
        raise error(f"a {type(x).__name__}")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise error(f"{x!r}" if isinstance(x, float) else "out of a double's range")
    return value


def element_type(dtype: Any, label: str) -> CutlassDtype:
    """The element type that a caller gives: `dtype` of the owner whose name is `label`.

    It is a CutlassDtype, a name such as `bf16`, a dtype of NumPy, ml_dtypes or PyTorch, or DLPack's (type code, bits).
    """
    try:
        return CutlassDtype.parse(element_name(dtype))
    except InvalidOperandError as error:
        raise InvalidOperandError(f"{label}: {error}") from None


def element_name(dtype: Any) -> str:
    """The name of such an element type, `uint8` for the bytes of masks, or a description of another object."""
    if isinstance(dtype, CutlassDtype):
        return dtype.value
    if dtype is None or isinstance(dtype, str) or type(dtype).__module__.partition(".")[0] == "torch":
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, tuple) and all(isinstance(part, int) for part in dtype):
        return _DLPACK_NAMES.get(dtype, shown(dtype))
    if isinstance(dtype, (tuple, list)):  # NumPy would take these for structures
        return shown(dtype)
    try:
        known = np.dtype(dtype)
    except (TypeError, ValueError):
        return shown(dtype)
    return str(known.name if known.isnative else known.str)


@dataclass(eq=False)
class Scope:
    """One run of a traced function, open while it runs: its values can neither be mixed with others nor used later."""

    open: bool = True


Operator = Callable[["Value", object], "Value"]


def _operators(op: str) -> tuple[Operator, Operator]:
    """The operator of a binary operation, and the reflected one, in which the value is the second operand."""
    return lambda value, other: apply(op, value, other), lambda value, other: apply(op, other, value)


def _foreign(owner: str, name: str) -> Callable[..., Value]:
    from .functions import foreign  # which are written with values

    return foreign(owner, name)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Value:
    """A value of a traced function.

    It supports + - * / ** and comparisons with values and numbers, the functions of `atomr_cutlass.epilogue`, and the
    equivalent functions and methods of PyTorch and NumPy. Comparisons give 1 or 0.
    """

    node: Node
    scope: Scope

    def __repr__(self) -> str:
        return f"<Value {self.node}>"

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("subtract")
    __mul__, __rmul__ = _operators("multiply")
    __truediv__, __rtruediv__ = _operators("divide")
    __lt__, __gt__ = _operators("less")[0], _operators("greater")[0]
    __le__, __ge__ = _operators("less_equal")[0], _operators("greater_equal")[0]
    __eq__, __ne__ = _operators("equal")[0], _operators("not_equal")[0]  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return apply("negate", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return apply("absolute", self)

    def __pow__(self, exponent: object) -> Value:
        op = _POWERS.get(number(exponent, "the exponent"))
        if op is None:
            raise refusal(f"** {exponent!r} of a traced value", "the exponent is 2, 0.5, -1 or -0.5: multiply instead")
        return apply(op, self)

    def __hash__(self) -> int:
        raise refusal("a traced value as a key", "keep it in a variable or in a list")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols look up attributes that a class may lack
            raise AttributeError(name)
        return functools.partial(_foreign(".", name), self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Value:
        return _foreign("torch's ", str(getattr(func, "__name__", func)))(*args, **(kwargs or {}))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Value:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return _foreign("numpy.", name)(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        return _foreign("numpy.", func.__name__)(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Stored:
    """A result of a traced function that is no operand of further operations: a reduction, or a mask of bits."""

    value: Value
    kind: str
    reduction: str = ""


def apply(op: str, *operands: object, attributes: tuple[str | float, ...] = ()) -> Value:
    """The value of an operation on values and numbers, at least one a value; all values share one open scope."""
    nodes = tuple(operand.node if isinstance(operand, Value) else _constant(operand, op) for operand in operands)
    scopes = [operand.scope for operand in operands if isinstance(operand, Value)]
    if not scopes:
        raise refusal(f"{op} takes a traced value, and there is none among its operands", "use math for numbers")
    if any(scope is not scopes[0] or not scope.open for scope in scopes):
        raise refusal(f"{op} of a value kept from another trace", "compute it from this function's own parameters")
    return Value(Node(op, nodes, attributes, Path(location()).name), scopes[0])


def number(x: object, label: str) -> float:
    """A number that is part of an operation; parameters that are given as numbers count as such."""
    if isinstance(x, Value) and x.node.op == "constant":
        return float(x.node.attributes[0])
    return finite(x, lambda given: refusal(f"{label} is {given}", "give a finite number"))


def _constant(x: object, op: str) -> Node:
    if isinstance(x, Stored):
        raise refusal(f"{op} of a {x.reduction or x.kind}, which is there once all is computed", "only return it")
    cure = _AS_OPERAND if getattr(x, "shape", ()) else "give a traced value or a finite number"
    return Node("constant", (), (finite(x, lambda given: refusal(f"{op} of {given}", cure)),))


def _refuse(names: str, problem: str, cure: str, kind: type = Value) -> None:
    """Makes values refuse these special methods; `{}` in the problem stands for the name."""
    for name in names.split():

        def method(*_: object, name: str = name) -> NoReturn:
            raise refusal(problem.format(name), cure)

        setattr(kind, f"__{name}__", method)


_refuse("bool", "the truth of a traced value, which is another for each element", _CHOOSE)
_refuse(
    "float int complex round trunc floor ceil index",
    "{}() of a traced value, which is no number yet",
    "compute with it: exp(x) of atomr_cutlass.epilogue for math.exp(x)",
)
_refuse("len iter reversed getitem contains array", "{} of a traced value", _NO_PLACE)
_refuse(
    "setitem delitem setattr delattr",
    "assignment into a traced value",
    "use where(condition, x, y), and a variable of its own",
)
# In PyTorch they write to a tensor in place, for which traced values have no equivalent.
_refuse(
    "iadd isub imul itruediv ipow ifloordiv imod imatmul iand ior ixor ilshift irshift",
    "{} on a traced value, which is not written in place",
    "write x = x + y for x += y",
)
_refuse("and rand", "& of traced values", "multiply the conditions: (x > 0) * (y > 0)")
_refuse("or ror", "| of traced values", "take the larger condition: maximum(x > 0, y > 0)")
_refuse("xor rxor", "^ of traced values", "compare the conditions: (x > 0) != (y > 0)")
_refuse("invert", "~ of a traced value", "compare the condition with 0: condition == 0")
_refuse("matmul rmatmul", "@ of a traced value", "the product is the accumulator; another one is another call")
_refuse("rpow", "a traced value as an exponent", "write exp(x * log(base)) for base ** x")
_refuse(
    "floordiv rfloordiv mod rmod divmod rdivmod lshift rlshift rshift rrshift",
    "{} of a traced value",
    "the operations are those of atomr_cutlass.epilogue",
)
_refuse(
    "add radd sub rsub mul rmul truediv rtruediv pow rpow neg pos abs lt le gt ge bool float int len iter getitem",
    "{} of a reduction or of bits, which are there once all is computed",
    "only return them",
    Stored,
)
