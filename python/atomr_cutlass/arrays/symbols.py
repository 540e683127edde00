"""Extents as symbols: how the numbers of a plan follow from the extents and strides of a call's arrays.

Calls that differ in these alone are a family, whose plans are alike. While one of them is planned, they are `Number`s:
integers that note in a `Trace` what is computed of them and, as a guard, every decision that depends on them. Where a
number is taken as an integer by code that knows no symbols (an index, a key of a dictionary, a message, a function in
C++), it guards its own value. So for other extents the program gives the plan that planning would make, or none
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
"""Below which a guard tells integers apart."""
_LONGEST = 4096
"""Instructions of a program, at most: longer ones are of lists of many arrays, which take as long to evaluate."""
_WIDEST = 2**63
_OF_RANKING = 7
"""Numbers that a ranking leaves: kernel, formulation, seconds and launch options."""

_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


class Untraceable(Exception):  # noqa: N818 - no error of a call, which is then planned without symbols
    """A plan depends on more than extents and strides."""


class Trace:
    """The call that is being planned, whose `program` is instructions as `_core.PendingCall.keep` takes them."""

    def __init__(self, inputs: Sequence[tuple[Any, int]]) -> None:
        """A program of the extents and strides of arrays, and of shapes, each with the place of its first."""
        self.program: list[tuple[Any, ...]] = []
        self._firsts: dict[int, list[int]] = {}
        for given, first in inputs:
            self._firsts.setdefault(id(given), []).append(first)
        self._places: dict[tuple[Any, ...], int] = {}
        self._count = 0
        self.is_open = True  # until its end; its numbers are no more than integers then

    def place(self, value: Any) -> int:
        """The place of a number, or of a constant."""
        if type(value) is Number and value.trace is self:
            return value.place
        value = plain(value)
        return self._put(("constant", value), (type(value), value))

    def _put(self, instruction: tuple[Any, ...], known: tuple[Any, ...] | None = None, leaves: int = 1) -> int:
        """The place of what an instruction leaves, which is told apart by `known` where that is given."""
        known = known or instruction
        if known not in self._places and self.is_open:
            if len(self.program) == _LONGEST:
                raise Untraceable
            self.program.append(instruction)
            self._places[known] = self._count
            self._count += leaves
        return self._places.get(known, 0)

    def _result(self, name: str, a: Any, b: Any) -> tuple[int, Any]:
        """The place of what an operation on numbers leaves, and its value."""
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
        """The program serves only calls for which the number of this place is the same."""
        if self.is_open and not abs(value) < _EXACT:
            raise Untraceable
        self._put(("guard", place, value), leaves=0)

    def view(self, array: Any, view: _core.Operand) -> _core.Operand:
        """The view of an array of the call, its extents and strides as numbers; of another, `Untraceable`."""
        if isinstance(array, TracedView):
            return array
        numbers, rank = self.numbers(array, (*view.shape, *view.strides)), len(view.shape)
        return TracedView(view, numbers[:rank], numbers[rank:])

    def numbers(self, given: Any, values: Sequence[int]) -> tuple[Any, ...]:
        """The inputs of an array, or of a shape, which have these values; of another, `Untraceable`."""
        of_each = [
            [Number(self, self._put(("input", first + i)), value) for i, value in enumerate(values)]
            for first in self._firsts.get(id(given), ())
        ]
        if not of_each:
            raise Untraceable
        # An array that is given twice, as C and the result, may be two in other calls.
        for other in of_each[1:]:
            for mine, its in zip(of_each[0], other, strict=True):
                self.decide("==", mine, its)
        return tuple(of_each[0])

    def first(self, ranking: _core.Ranking, extents: Sequence[Sequence[Any]], *, whole: bool) -> _core.Found | None:
        """`ranking.first`, whose choice is a guard."""
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
    """Both orders of an operation, whose result the trace has."""

    def direct(self: Number, other: Any) -> Any:
        return result(self.trace, name, self, other) if isinstance(other, (int, float)) else NotImplemented

    def reflected(self: Number, other: Any) -> Any:
        return result(self.trace, name, other, self) if isinstance(other, (int, float)) else NotImplemented

    return direct, reflected


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion that reads the value itself, which the plan then depends on."""

    def made(self: Number, *others: Any) -> Any:
        return function(self.exact(), *others)

    return made


class Number:
    """An integer of a plan, or an estimated time, that other extents make another."""

    __slots__ = ("place", "trace", "value")

    def __init__(self, trace: Trace, place: int, value: Any) -> None:
        self.trace, self.place, self.value = trace, place, value

    # That of the value, which `isinstance` then takes it for.
    __class__: Any = property(lambda self: type(self.value))

    def exact(self) -> Any:
        """The value, which the plan depends on."""
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
    """Notes what is computed of the inputs of a call in this thread; see `Trace`."""
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
    """The value of a number; anything else as it is."""
    return value.value if type(value) is Number else value


def symbolic(values: Any) -> Any:
    """Numbers, also those in lists, tuples and dictionaries, as a blueprint takes them; anything else as it is."""
    kind = type(values)
    if kind is Number:
        return _core.Symbol(values.place, values.value)
    if kind is tuple or kind is list:
        return kind(map(symbolic, values))
    return {name: symbolic(value) for name, value in values.items()} if kind is dict else values


def plain_view(view: _core.Operand) -> _core.Operand:
    """A view with integers for extents and strides."""
    return view.view if isinstance(view, TracedView) else view


def with_numbers(view: _core.Operand, shape: Sequence[Any], strides: Sequence[Any] | None = None) -> _core.Operand:
    """A view with extents and strides that are those of it, as far as they are numbers; row-major without strides."""
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
