"""Extents as symbols: how the numbers of a plan follow from the extents and strides of a call's arrays.

Calls that differ in extents and strides alone have plans of the same form. While one of them is planned, these are
`Number`s: integers that record in a `Trace` the computations with them and, as guards, the decisions that depend on
them. Code that knows no symbols (an index, a key of a dictionary, a message, a function in C++) takes a number as an
integer, which records a guard for its value. For other extents the program gives the plan that planning would, or none
(cpp/src/shape_program.h).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .. import _core

_EXACT = 2**53
"""The bound of integers that a guard can tell apart."""
_LONGEST = 4096
"""Most instructions of a program: longer ones, of lists of many arrays, save no time over planning."""
_WIDEST = 2**63
_OF_RANKING = 7
"""Number of results of a ranking: kernel, formulation, seconds and launch options."""

_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


class Untraceable(Exception):  # noqa: N818 - no error of a call, which is then planned without symbols
    """A plan depends on more than extents and strides."""


class Trace:
    """The call that is being planned, whose `program` is instructions as `_core.PendingCall.keep` takes them."""

    def __init__(self, inputs: Sequence[tuple[Any, int]]) -> None:
        """A program on arrays' extents and strides, and on shapes, each with the index of its first input."""
        self.program: list[tuple[Any, ...]] = []
        self._firsts: dict[int, list[int]] = {}
        for given, first in inputs:
            self._firsts.setdefault(id(given), []).append(first)
        self._places: dict[tuple[Any, ...], int] = {}
        self._count = 0
        self.is_open = True  # until its end; afterwards its numbers act as plain integers

    def place(self, value: Any) -> int:
        """The result index of a number, or of a constant."""
        if type(value) is Number and value.trace is self:
            return value.place
        value = plain(value)
        return self._put(("constant", value), (type(value), value))

    def _put(self, instruction: tuple[Any, ...], known: tuple[Any, ...] | None = None, leaves: int = 1) -> int:
        """Appends an instruction unless an equal one exists (by `known`, if given); returns its result's index."""
        known = known or instruction
        if known not in self._places and self.is_open:
            if len(self.program) == _LONGEST:
                raise Untraceable
            self.program.append(instruction)
            self._places[known] = self._count
            self._count += leaves
        return self._places.get(known, 0)

    def _result(self, name: str, a: Any, b: Any) -> tuple[int, Any]:
        """The index of the result of an operation on numbers, and its value."""
        return self._put((name, self.place(a), self.place(b))), _OPERATIONS[name](plain(a), plain(b))

    def compute(self, name: str, a: Any, b: Any) -> Number:
        """The result of an operation on numbers."""
        place, value = self._result(name, a, b)
        if not -_WIDEST <= value < _WIDEST:
            raise Untraceable
        return Number(self, place, value)

    def decide(self, name: str, a: Any, b: Any) -> bool:
        """The result of a comparison, with a guard for it."""
        place, found = self._result(name, a, b)
        self.guard(place, int(found))
        return bool(found)

    def guard(self, place: int, value: Any) -> None:
        """Limits the program to calls in which the result of this index has the same value."""
        if self.is_open and not abs(value) < _EXACT:
            raise Untraceable
        self._put(("guard", place, value), leaves=0)

    def view(self, array: Any, view: _core.Operand) -> _core.Operand:
        """A view of a call's array, with numbers for extents and strides; `Untraceable` for other arrays."""
        if isinstance(array, TracedView):
            return array
        numbers, rank = self.numbers(array, (*view.shape, *view.strides)), len(view.shape)
        return TracedView(view, numbers[:rank], numbers[rank:])

    def numbers(self, given: Any, values: Sequence[int]) -> tuple[Any, ...]:
        """The inputs of a call's array or shape, with these values; `Untraceable` for other ones."""
        of_each = [
            [Number(self, self._put(("input", first + i)), value) for i, value in enumerate(values)]
            for first in self._firsts.get(id(given), ())
        ]
        if not of_each:
            raise Untraceable
        # An array given twice, as C and as the result, may be two arrays in other calls.
        for other in of_each[1:]:
            for mine, its in zip(of_each[0], other, strict=True):
                self.decide("==", mine, its)
        return tuple(of_each[0])

    def first(self, ranking: _core.Ranking, extents: Sequence[Sequence[Any]], *, whole: bool) -> _core.Found | None:
        """`ranking.first`, with a guard for its choice."""
        found = ranking.first([[plain(extent) for extent in each] for each in extents], whole)
        places = tuple(tuple(map(self.place, each)) for each in extents)
        entry = self._put(("rank", ranking, places, whole), leaves=_OF_RANKING)
        self.guard(entry, -1 if found is None else found[0])
        if found is None:
            return None
        self.guard(entry + 1, found[1])
        return found[0], found[1], tuple(Number(self, entry + 2 + i, each) for i, each in enumerate(found[2]))  # type: ignore[return-value]

    def least(self, model: _core.TimeModel, kernel: _core.ModelKernel, extents: Sequence[Any], device: Any) -> Any:
        """`model.least`."""
        value = model.least(kernel, [plain(extent) for extent in extents], device)
        places = tuple(map(self.place, extents))
        return Number(self, self._put(("least", model, kernel, places, device)), value)


def _operation(
    name: str, result: Callable[[Trace, str, Any, Any], Any] = Trace.compute
) -> tuple[Callable[[Number, Any], Any], Callable[[Number, Any], Any]]:
    """An operation and its reflected form, both recorded in the trace."""

    def direct(self: Number, other: Any) -> Any:
        return result(self.trace, name, self, other) if isinstance(other, (int, float)) else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        return result(self.trace, name, other, self) if isinstance(other, (int, float)) else NotImplemented

    return direct, reflected


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion that reads the value itself, and records a guard for it."""

    def made(self: Number, *others: Any) -> Any:
        return function(self.exact(), *others)

    return made


class Number:
    """An integer or an estimated time of a plan that depends on the call's extents."""

    __slots__ = ("place", "trace", "value")

    def __init__(self, trace: Trace, place: int, value: Any) -> None:
        self.trace, self.place, self.value = trace, place, value

    # That of the value, which `isinstance` then takes it for.
    __class__: Any = property(lambda self: type(self.value))

    def exact(self) -> Any:
        """The value; the plan is limited to calls with the same one."""
        self.trace.guard(self.place, self.value)
        return self.value

    __add__, __radd__ = _operation("+")
    __sub__, __rsub__ = _operation("-")
    __mul__, __rmul__ = _operation("*")
    __truediv__, __rtruediv__ = _operation("/")
    __floordiv__, __rfloordiv__ = _operation("//")
    __mod__, __rmod__ = _operation("%")
    __and__, __rand__ = _operation("&")
    __lt__, __gt__ = _operation("<", Trace.decide)
    __le__, __ge__ = _operation("<=", Trace.decide)

    def __neg__(self) -> Any:
        return self.trace.compute("-", 0, self)

    def __eq__(self, other: object) -> bool:
        return self.trace.decide("==", self, other) if isinstance(other, (int, float)) else NotImplemented

    def __bool__(self) -> bool:
        return not self.trace.decide("==", self, 0)

    __hash__ = _exactly(hash)
    __repr__, __index__ = _exactly(repr), _exactly(operator.index)
    __int__, __float__ = _exactly(int), _exactly(float)
    __round__, __format__ = _exactly(round), _exactly(format)


class TracedView(_core.Operand):
    """A view whose extents and strides are numbers; its `view` has them as integers."""

    shape: tuple[Any, ...] = ()
    strides: tuple[Any, ...] = ()

    def __init__(self, view: _core.Operand, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> None:
        super().__init__(
            view.pointer, view.shape, view.strides, view.dtype, view.device_type, view.device, view.read_only, view,
            view.settled,
        )  # fmt: skip
        self.view, self.shape, self.strides = view, shape, strides


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "&": operator.and_, "gcd": math.gcd, "<": operator.lt, "<=": operator.le, "==": operator.eq,
}  # fmt: skip


@contextmanager
def tracing(inputs: Sequence[tuple[Any, int]]) -> Iterator[Trace]:
    """Records the computations with a call's inputs in this thread; see `Trace`."""
    trace = Trace(inputs)
    token = _current.set(trace)
    try:
        yield trace
    finally:
        trace.is_open = False
        _current.reset(token)


def current() -> Trace | None:
    """The trace of this thread, if there is one."""
    return _current.get()


def refuse() -> None:
    """Ends a trace, with `Untraceable`, where a plan depends on more than extents and strides."""
    if _current.get() is not None:
        raise Untraceable


def plain(value: Any) -> Any:
    """The value of a number; other objects unchanged."""
    return value.value if type(value) is Number else value


def symbolic(values: Any) -> Any:
    """Numbers, also in lists, tuples and dictionaries, in the form of blueprints; other objects unchanged."""
    kind = type(values)
    if kind is Number:
        return _core.Symbol(values.place, values.value)
    if kind is tuple or kind is list:
        return kind(map(symbolic, values))
    return {name: symbolic(value) for name, value in values.items()} if kind is dict else values


def symbols_in(values: Any) -> Iterator[_core.Symbol]:
    """The symbols in values that `symbolic` has returned, in order."""
    if isinstance(values, _core.Symbol):
        yield values
    elif isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from symbols_in(value)


def filled(values: Any, numbers: Iterator[int]) -> Any:
    """Values that `symbolic` has returned, with the next of `numbers` in the place of each symbol."""
    if isinstance(values, _core.Symbol):
        return next(numbers)
    if isinstance(values, dict):
        return {name: filled(value, numbers) for name, value in values.items()}
    return type(values)(filled(value, numbers) for value in values) if isinstance(values, (tuple, list)) else values


def plain_view(view: _core.Operand) -> _core.Operand:
    """A view with integers for extents and strides."""
    return view.view if isinstance(view, TracedView) else view


def with_numbers(view: _core.Operand, shape: Sequence[Any], strides: Sequence[Any] | None = None) -> _core.Operand:
    """The view with these extents and strides, if any are numbers; row-major without strides."""
    if _current.get() is None or not any(type(value) is Number for value in (*shape, *(strides or ()))):
        return view
    if strides is None:
        strides = [0 if shape[axis] == 1 else math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return TracedView(plain_view(view), tuple(shape), tuple(strides))


def shape_of(given: tuple[int, ...]) -> tuple[int, ...]:
    """Extents that are an option of the call."""
    trace = _current.get()
    return given if trace is None else trace.numbers(given, given)


def gcd(*values: Any) -> Any:
    """The greatest common divisor."""
    trace = _current.get()
    if trace is None:
        return math.gcd(*values)
    return functools.reduce(functools.partial(trace.compute, "gcd"), values)
