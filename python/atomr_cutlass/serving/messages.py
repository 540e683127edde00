"""The messages to a CutlassActor, and the work that they become: launched, and not known to be done."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .. import _core
from ..arrays import operands
from ..arrays.layouts import MatrixSpec, Shape, permuted, relaid
from ..checks import expect
from ..errors import CutlassError, InvalidOperandError
from ..jit import kernels
from ..jit.locks import renewed
from ..pipeline.bindings import Binding, Weights, arrays_of, check_operand, import_weights
from ..pipeline.operation import (
    CallOperation,
    OperandSlot,
    PlannedOperation,
    memory_order,
    operands_of,
    operation_of,
    operations,
)
from ..pipeline.plan_cache import PlanKey
from ..pipeline.request import Request

_READS_KEPT = 64


class _ByName(type):
    """Has the messages of operations as attributes, by the names under which they are sent."""

    def __getattr__(cls, name: str) -> Any:
        message = _messages().get(name) if name[:1].isupper() else None
        if message is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return message

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *_messages()})


@dataclass(frozen=True, eq=False)
class CutlassMsg(metaclass=_ByName):
    """A message to a CutlassActor; what there is are its attributes (`dir` lists them).

    They are called as `CutlassMsg.Gemm(request, operands=None, *, out=None, stream=None)`, of requests that have their
    arrays as `CutlassMsg.Matmul(request)`, of new values for a bound operand as `CutlassMsg.Refit(msg)`.

    Operands are imported where the message is made: in that thread their framework says what its current stream is, and
    allocates the result for it. They have to stay as they are until the answer comes. What is wrong with them is said
    in the answer.
    """

    made_at: str = field(init=False, repr=False, default_factory=kernels.call_site)
    """File and line of the code that made the message: it is served where that cannot be seen."""


@dataclass(frozen=True, eq=False)
class _Importing:
    """A message that imports arrays where it is made."""

    _kept: Any = field(init=False, repr=False, default=None)

    def _import(self, make: Callable[[], Any]) -> None:
        """Keeps what is made of the arrays, or the error for the answer."""
        try:
            kept = make()
        except CutlassError as error:
            # Without the frames that led here, which hold the operands.
            kept = error.with_traceback(None)
        object.__setattr__(self, "_kept", kept)

    @property
    def imported(self) -> Any:
        """The result of `_import`; raises the error that it met."""
        if isinstance(self._kept, CutlassError):
            raise self._kept
        return self._kept


@dataclass(frozen=True)
class Launch:
    """A request's operands, checked against it: views that keep the arrays alive, in the order of a plan's call.

    Of each of the `results` there is the array, or None for JAX (`operands.finished`), its memory, and the axes that it
    is permuted by for the sender, if it is. `named` says whether the sender named the stream.
    """

    device: int
    stream: int
    named: bool
    arrays: dict[str, _core.Operand]
    results: list[tuple[Any, _core.Operand, Shape]]
    listed: bool

    def finished(self) -> Any:
        """The reply to the sender, once the stream has been awaited."""
        done = [permuted(operands.finished(array, view, self.stream), axes) for array, view, axes in self.results]
        return done if self.listed else done[0]


@dataclass(frozen=True, eq=False)
class Compute(_Importing, CutlassMsg):
    """A message that computes a request; without operands it renders and caches the kernel.

    Operands, `out` and `stream` are imported where the message is made; what is wrong with them is kept for the answer.

    Attributes:
        request: what to compute.
        operands: None; or a mapping of arrays by name; or a tuple of what the request has, in the order of the
            operation's table: its arrays, `c` exactly where beta is not 0, and `bias`, or the operands of the
            epilogue's tree by their names: those that it reads, and those that it writes beside the result. GPU arrays,
            dense as the request says, which stay alive until the work has completed. The operand that the request's
            binding has may be left out.
        out: where to write the result (a list of arrays for a grouped GEMM); None has it allocated by the framework of
            the first operand, here and now.
        stream: where to launch: a handle or a stream object; None is the current stream, here and now, of the framework
            of the first operand.

    Raises:
        InvalidOperandError: `request` is of another kind.
    """

    kinds: ClassVar[tuple[type, ...]]

    request: Any
    operands: Any = field(default=None, repr=False)
    out: Any = field(default=None, kw_only=True, repr=False)
    stream: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        expect(self.request, self.kinds, "request")
        if self.operands is not None:
            self._import(lambda: _launch(self.request, self.operands, self.out, self.stream))


@dataclass(frozen=True, eq=False)
class Run(_Importing, CutlassMsg):
    """A message that computes a request which has its arrays, and may have a reply, which gets the answer too.

    Attributes:
        operation: of such requests.
        request: what to compute. Its stream, where it names none, is the current one here and now.

    Raises:
        InvalidOperandError: `request` is of another kind.
    """

    operation: ClassVar[CallOperation]

    request: Any

    def __post_init__(self) -> None:
        expect(self.request, self.operation.request_type or object, "request")
        self._import(lambda: self.operation.call(self.request))


@dataclass(frozen=True, eq=False)
class RefitMsg(_Importing):
    """New values for the operand that a plan binds.

    Attributes:
        plan_key: the plan's key: `request.plan_key()` of the request with the binding.
        weights: an array of the operand's dtype and shape, or its bytes; see `bindings.Weights`. Of a list, a list.
        stream: where weights in GPU memory are ready: a handle or a stream object; None is the current stream, here and
            now, of their framework.

    Raises:
        InvalidOperandError: `plan_key` is no PlanKey.
    """

    plan_key: PlanKey
    weights: Any = field(repr=False)
    stream: Any = None

    def __post_init__(self) -> None:
        expect(self.plan_key, PlanKey, "plan_key", "a PlanKey, from request.plan_key()")
        self._import(lambda: import_weights(self.weights, self.stream))


@dataclass(frozen=True, eq=False)
class Refit(CutlassMsg):
    """Writes new values into the operand that a plan binds.

    Attributes:
        msg: which plan, and the values.

    Raises:
        InvalidOperandError: `msg` is no RefitMsg.
    """

    __qualname__ = "CutlassMsg.Refit"

    msg: RefitMsg

    def __post_init__(self) -> None:
        expect(self.msg, RefitMsg, "msg")


@functools.cache
def _messages() -> dict[str, type[CutlassMsg]]:
    """The messages by name: those of every operation, under its own, and Refit."""
    found: dict[str, type[CutlassMsg]] = {"Refit": Refit}
    kinds: dict[str, tuple[type, ...]] = {}
    for operation in operations().values():
        name = operation.message
        if name is not None and isinstance(operation, PlannedOperation):
            kinds[name] = (*kinds.get(name, ()), operation.request_type)
        elif name is not None and isinstance(operation, CallOperation):
            found[name] = _message(name, Run, operation=operation)
    return found | {name: _message(name, Compute, kinds=types) for name, types in kinds.items()}


def _message(name: str, base: type[CutlassMsg], **members: Any) -> type[CutlassMsg]:
    """A kind of messages, known by the name under which it is sent, in pickles and tracebacks too."""
    known_as = {"__module__": __name__, "__qualname__": f"CutlassMsg.{name}", "__doc__": base.__doc__}
    return type(name, (base,), known_as | members)


def _launch(request: Request, given: Any, out: Any, stream: Any) -> Launch:
    arrays = _arrays(request, given)
    if out is not None:
        arrays["out"] = out
    *_, result = table = operands_of(request)
    members = [(slot, *member) for slot in table if slot.name in arrays for member in _members(slot, arrays[slot.name])]
    first = members[0][2]
    with operands.launching(stream, first, awaited=True) as launch:
        views = {label: _imported(slot, label, array, spec) for slot, label, array, spec in members}
        operands.check_devices(views)
        device = next(iter(views.values())).device
        if out is None:
            results = [_empty(spec, device, first) for spec in result.specs]
            for label, (_, view, axes) in zip(result.labels, results, strict=True):
                views[label] = permuted(view, axes)
        else:
            results = [(array, views[label], ()) for slot, label, array, _ in members if slot is result]
    return Launch(device, launch.handle, stream is not None, views, results, result.listed)


def _arrays(request: Request, given: Any) -> dict[str, Any]:
    """The arrays of a message by name, exactly those of the request; what its binding has may be left out."""
    operation, own = operation_of(request), [slot.name for slot in operands_of(request)[:-1]]
    names = operation.names(request)
    listing = f"{', '.join(names[:-1])} and {names[-1]}"
    if isinstance(given, Mapping):
        unknown = [repr(name) for name in given if name not in names]
        if unknown:
            raise InvalidOperandError(f"operands has {', '.join(unknown)}; expected {listing}")
    elif not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not 1 <= len(given) <= len(names):
        raise InvalidOperandError(
            f"operands is a {type(given).__name__}; expected a mapping of {listing}, or a tuple in this order"
        )
    else:
        given = dict(zip(names, given, strict=False))
    arrays = {name: array for name, array in given.items() if array is not None}
    for name in own:
        if name in arrays or (name == operation.bound and request.binding is not None):
            continue
        if name == "c" and request.epilogue.beta != 0:
            raise InvalidOperandError(f"the request's beta is {request.epilogue.beta}, so operands needs c")
        hint = ": it may be left out once a request's binding has it" if name == operation.bound else ""
        raise InvalidOperandError(f"operands has no {name}{hint}")
    for name in arrays:
        if name not in own:
            why = "the request's beta is 0, so that it would not be read" if name == "c" else "the request has none"
            raise InvalidOperandError(f"operands has {name}, but {why}")
    return arrays


def _members(slot: OperandSlot, given: Any) -> list[tuple[str, Any, MatrixSpec]]:
    """(label, array, its layout) of every array of an operand."""
    return [(label, array, spec) for (label, array), spec in zip(arrays_of(slot, given), slot.specs, strict=True)]


def _imported(slot: OperandSlot, label: str, array: Any, spec: MatrixSpec) -> _core.Operand:
    """The view of an array, which is as the request says."""
    view = operands.as_operand(array, label)
    if slot.written:
        operands.refuse_jax_out(array, label, needed=slot.name != "out")
        operands.check_writable(view, label)
    check_operand(view, spec, label, slot.element)
    # With strides that say something where there are no elements: plans compare them.
    return relaid(view, spec.shape, spec.strides) if 0 in view.shape else view


def _empty(spec: MatrixSpec, device: int, like: Any) -> tuple[Any, _core.Operand, Shape]:
    """A result for the sender (see `Launch`), which lies as the spec says."""
    order = memory_order(spec)
    shape = tuple(spec.shape[i] for i in order)
    axes = () if order == sorted(order) else tuple(map(order.index, range(len(order))))
    return *operands.empty(shape, spec.dtype.dlpack, device, like), axes


@dataclass(eq=False)
class Work:
    """The launched work of a message, done when its events are reached; `finish` makes the answer, or raises it.

    What is kept, and what `finish` has, such as the arrays that the work uses, stays alive until `result`. `stream` is
    where it was launched; None where nothing is in flight.
    """

    finish: Callable[[], Any]
    stream: int | None = None
    events: tuple[_core.Event, ...] = ()
    kept: object = None

    def result(self) -> Any:
        """Waits for the work, lets go of its operands, and returns the answer, once."""
        finish = self.finish
        del self.finish
        for event in self.events:
            event.wait()
        self.kept = None
        return finish()


def launched(launch: Callable[[], object], device: int, *streams: int) -> tuple[_core.Event, ...]:
    """Launches work on streams; the events, one of each stream, are reached when it is done.

    When launching fails, what had been launched by then is waited for: the operands may be let go with the error.
    """
    try:
        launch()
        return tuple(_core.Event(device, stream) for stream in streams)
    except InvalidOperandError:  # raised before anything is launched
        raise
    except BaseException:
        for stream in streams:
            with contextlib.suppress(CutlassError):
                _core.synchronize(device, stream)
        raise


class BoundOperand:
    """A binding whose launches and refits take turns on the GPU, whatever their streams and threads.

    A refit waits there for the launches before it, and the launches after it for the refit; launches overlap. Nobody on
    the host waits, but for values that come from host memory: they are copied when all work of the GPU is done.
    """

    def __init__(self, binding: Binding, device: int) -> None:
        self.operands = binding.operands
        self._binding = binding
        self._device = device
        self._reads: list[_core.Event] = []
        self._writes: list[_core.Event] = []
        self._lock = renewed(self, "_lock", threading.Lock)

    def launch(self, stream: int, launch: Callable[[], object]) -> tuple[_core.Event, ...]:
        """Launches work that reads the operand; see `launched`."""
        with self._lock:
            self._writes = [event for event in self._writes if not event.done]
            for event in self._writes:
                event.hold(stream)
            reached = launched(launch, self._device, stream)
            if len(self._reads) >= _READS_KEPT:
                self._reads = [event for event in self._reads if not event.done]
            self._reads += reached
            return reached

    def refit(self, weights: tuple[Weights, ...]) -> tuple[_core.Event, ...]:
        """Writes new values, each in the order of its own stream; the events are reached when they are there."""
        streams = {values.stream for values in weights}
        with self._lock:
            for stream in streams:
                for event in (*self._reads, *self._writes):
                    event.hold(stream)
            reached = launched(lambda: self._binding.refit(weights), self._device, *streams)
            self._reads, self._writes = [], list(reached)
            return reached
