"""The messages to a CutlassActor, and the launched work of a message, which may still be running."""

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
    """Metaclass with the message classes of all operations as attributes."""

    def __getattr__(cls, name: str) -> Any:
        message = _messages().get(name) if name[:1].isupper() else None
        if message is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return message

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *_messages()})


@dataclass(frozen=True, eq=False)
class CutlassMsg(metaclass=_ByName):
    """A message to a CutlassActor; the kinds of messages are attributes of this class (`dir` lists them).

    Their constructors are `CutlassMsg.Gemm(request, operands=None, *, out=None, stream=None)`,
    `CutlassMsg.Matmul(request)` for requests that contain their arrays, and `CutlassMsg.Refit(msg)` for new
    values of a bound operand.

    Operands are imported when the message is made: the current stream of their framework in that thread counts, and the
    framework allocates the result. They must not change until the answer comes. Errors in them are part of the answer.
    """

    made_at: str = field(init=False, repr=False, default_factory=kernels.call_site)
    """File and line of the code that made the message, for errors in the thread that serves it."""


@dataclass(frozen=True, eq=False)
class _Importing:
    """A message that imports arrays in the sender's thread."""

    _kept: Any = field(init=False, repr=False, default=None)

    def _import(self, make: Callable[[], Any]) -> None:
        """Keeps the imported arrays, or the error for the answer."""
        try:
            kept = make()
        except CutlassError as error:
            # Without the traceback, whose frames keep the operands alive.
            kept = error.with_traceback(None)
        object.__setattr__(self, "_kept", kept)

    @property
    def imported(self) -> Any:
        """The result of `_import`; raises its error."""
        if isinstance(self._kept, CutlassError):
            raise self._kept
        return self._kept


@dataclass(frozen=True)
class Launch:
    """A request's checked operands: views that keep the arrays alive, in the order of a plan's call.

    Each of the `results` is an array, or None for JAX (`operands.finished`), its memory, and the axes by which it is
    permuted for the sender, empty for none. `named` says whether the sender named the stream.
    """

    device: int
    stream: int
    named: bool
    arrays: dict[str, _core.Operand]
    results: list[tuple[Any, _core.Operand, Shape]]
    listed: bool

    def finished(self) -> Any:
        """The reply to the sender, for use after the stream's work."""
        done = [permuted(operands.finished(array, view, self.stream), axes) for array, view, axes in self.results]
        return done if self.listed else done[0]


@dataclass(frozen=True, eq=False)
class Compute(_Importing, CutlassMsg):
    """A message that computes a request; without operands it renders and caches the kernel.

    Operands, `out` and `stream` are imported when the message is made; errors in them are kept for the answer.

    Attributes:
        request: the request to compute.
        operands: None; or a mapping of arrays by name; or a tuple of the request's arrays in the order of the
            operation's table: its arrays, `c` exactly if beta is not 0, and `bias`, or the operands of the epilogue's
            tree by their names: its inputs, and its outputs beside the result. GPU arrays, dense in the layouts of the
            request, which stay alive until the work has completed. The operand of the request's binding may be omitted.
        out: the array for the result (a list of arrays for a grouped GEMM); with None, the first operand's framework
            allocates it when the message is made.
        stream: a handle or a stream object to launch on; None is the stream of the first operand's framework that is
            current when the message is made.

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
    """A message that computes a request which contains its arrays; the request's reply, if any, is answered too.

    Attributes:
        operation: of such requests.
        request: the request to compute. If it names no stream, the one that is current when the message is made counts.

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
        weights: an array of the operand's dtype and shape, or its bytes; see `bindings.Weights`. For a list, a list.
        stream: the handle or stream object of the stream on which weights in GPU memory are ready; None is their
            framework's stream that is current when the message is made.

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
        msg: the plan's key and the values.

    Raises:
        InvalidOperandError: `msg` is no RefitMsg.
    """

    __qualname__ = "CutlassMsg.Refit"

    msg: RefitMsg

    def __post_init__(self) -> None:
        expect(self.msg, RefitMsg, "msg")


@functools.cache
def _messages() -> dict[str, type[CutlassMsg]]:
    """The message classes by name: one for each operation, and Refit."""
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
    """A message class with the name under which `CutlassMsg` has it, also for pickles and tracebacks."""
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
    """The arrays of a message by name, exactly those of the request; bound operands may be omitted."""
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
    """The view of an array, checked against the request."""
    view = operands.as_operand(array, label)
    if slot.written:
        operands.refuse_jax_out(array, label, needed=slot.name != "out")
        operands.check_writable(view, label)
    check_operand(view, spec, label, slot.element)
    # With the request's strides even without elements: plans compare them.
    return relaid(view, spec.shape, spec.strides) if 0 in view.shape else view


def _empty(spec: MatrixSpec, device: int, like: Any) -> tuple[Any, _core.Operand, Shape]:
    """A result for the sender (see `Launch`), with the layout of the spec."""
    order = memory_order(spec)
    shape = tuple(spec.shape[i] for i in order)
    axes = () if order == sorted(order) else tuple(map(order.index, range(len(order))))
    return *operands.empty(shape, spec.dtype.dlpack, device, like), axes


@dataclass(eq=False)
class Work:
    """The launched work of a message, done when its events are reached; `finish` returns the answer or raises it.

    `kept` and the references of `finish`, such as arrays that the work uses, stay alive until `result`. `stream` is
    the stream of the work; None if no work is in flight.
    """

    finish: Callable[[], Any]
    stream: int | None = None
    events: tuple[_core.Event, ...] = ()
    kept: object = None

    def result(self) -> Any:
        """Waits for the work, releases its operands, and returns the answer; to be called once."""
        finish = self.finish
        del self.finish
        for event in self.events:
            event.wait()
        self.kept = None
        return finish()


def launched(launch: Callable[[], object], device: int, *streams: int) -> tuple[_core.Event, ...]:
    """Launches work on streams; the events, one for each stream, are reached when it is done.

    If launching fails, waits for the work launched so far: the caller of a failed launch may release the operands.
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
    """A binding whose launches and refits are ordered on the GPU, whatever their streams and threads.

    A refit waits there for the launches before it, and the launches after it for the refit; launches overlap. The host
    waits only for values from host memory: they are copied when all work of the GPU is done.
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
        """Writes new values, each in the order of its own stream; the events are reached when they are written."""
        streams = {values.stream for values in weights}
        with self._lock:
            for stream in streams:
                for event in (*self._reads, *self._writes):
                    event.hold(stream)
            reached = launched(lambda: self._binding.refit(weights), self._device, *streams)
            self._reads, self._writes = [], list(reached)
            return reached
