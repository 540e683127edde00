"""The messages to a CutlassActor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from .. import _core
from ..arrays import operands
from ..arrays.layouts import TO_NHWC, from_nhwc
from ..checks import expect
from ..errors import CutlassError, InvalidOperandError
from ..jit import kernels
from ..pipeline.bindings import Weights, arrays_of, check_operand, import_weights
from ..pipeline.call import ParsedCall
from ..pipeline.operand_table import OperandSlot
from ..pipeline.operation import CallOperation, PlannedOperation, operands_of, operation_of, operations
from ..pipeline.plan_cache import PlanKey
from ..pipeline.problem import MatrixSpec
from ..pipeline.request import Request

T = TypeVar("T")


class _ByName(type):
    """Has the messages of operations as attributes, by the names under which they are sent."""

    def __getattr__(cls, name: str) -> Any:
        message = _messages().get(name) if name[:1].isupper() else None
        if message is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return message

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *_messages()})


class CutlassMsg(metaclass=_ByName):
    """A message to a CutlassActor; what there is are its attributes (`dir` lists them).

    They are called as `CutlassMsg.Gemm(request, operands=None, *, out=None, stream=None)`, of requests that have their
    arrays as `CutlassMsg.Matmul(request)`, of new values for a bound operand as `CutlassMsg.Refit(msg)`.

    Operands are imported where the message is made: in that thread their framework says what its current stream is, and
    allocates the result for it. They have to stay as they are until the answer comes. What is wrong with them is said
    in the answer.
    """

    Refit: ClassVar[type[RefitMessage]]
    made_at: str
    """File and line of the code that made the message: it is served where that cannot be seen."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Notes where this is."""
        made = super().__new__(cls)
        object.__setattr__(made, "made_at", kernels.call_site())
        return made


@dataclass(frozen=True)
class Result:
    """Where a result goes.

    Attributes:
        array: the array that the sender gets, or None for JAX (see `operands.finished`).
        view: its memory, dimensions as they lie in it.
        layout: the order in which the sender names them, where that is another.
    """

    array: Any
    view: _core.Operand
    layout: str = "nhwc"

    def finished(self, stream: int) -> Any:
        """The reply to the sender, once the stream has been awaited."""
        return from_nhwc(operands.finished(self.array, self.view, stream), self.layout)


@dataclass(frozen=True)
class Launch:
    """A request's operands, checked against it.

    Attributes:
        device: index of their GPU.
        stream: where to launch.
        named: whether the sender named it.
        arrays: views that keep the arrays alive, by name (`a`, `x`, `scale_a`, ... and `out`; of lists `a[0]`, ...), in
            the order of a plan's call; no `b` where the plan has one bound.
        results: behind the last of them.
        listed: whether the sender gets a list.
    """

    device: int
    stream: int
    named: bool
    arrays: dict[str, _core.Operand]
    results: tuple[Result, ...]
    listed: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return all(0 in result.view.shape for result in self.results)

    def finished(self) -> Any:
        """The reply to the sender, once the stream has been awaited."""
        done = [result.finished(self.stream) for result in self.results]
        return done if self.listed else done[0]


def _kept(make: Callable[[], T]) -> T | CutlassError:
    """The value made of a message's arrays, or the error that it raised, kept for the answer."""
    try:
        return make()
    except CutlassError as error:
        # Without the frames that led here, which hold the operands.
        return error.with_traceback(None)


def _made(kept: T | CutlassError) -> T:
    if isinstance(kept, CutlassError):
        raise kept
    return kept


@dataclass(frozen=True, eq=False)
class Compute(CutlassMsg):
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

    _operations: ClassVar[tuple[PlannedOperation[Any], ...]]

    request: Any
    operands: Any = field(default=None, repr=False)
    out: Any = field(default=None, kw_only=True, repr=False)
    stream: Any = field(default=None, kw_only=True)
    _launch: Launch | CutlassError | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = tuple(operation.request_type for operation in self._operations)
        if not isinstance(self.request, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidOperandError(f"request is a {type(self.request).__name__}; expected a {expected}")
        made = None
        if self.operands is not None:
            made = _kept(lambda: _launch(self.request, self.operands, self.out, self.stream))
        object.__setattr__(self, "_launch", made)

    @property
    def launch(self) -> Launch:
        """The operands. There are some where the message has any.

        Raises:
            InvalidOperandError: they are not what the request says.
        """
        return _made(self._launch or InvalidOperandError("the message has no operands"))


@dataclass(frozen=True, eq=False)
class Run(CutlassMsg):
    """A message that computes a request which has its arrays, and may have a reply, which gets the answer too.

    Attributes:
        operation: of such requests.
        request: what to compute. Its stream, where it names none, is the current one here and now.

    Raises:
        InvalidOperandError: `request` is of another kind.
    """

    operation: ClassVar[CallOperation]

    request: Any
    _call: ParsedCall | CutlassError = field(init=False, repr=False)

    def __post_init__(self) -> None:
        expect(self.request, self.operation.request_type or object, "request")
        object.__setattr__(self, "_call", _kept(lambda: self.operation.call(self.request)))

    @property
    def call(self) -> ParsedCall:
        """The request with its arrays checked.

        Raises:
            InvalidOperandError, UnsupportedError: what is wrong with them.
        """
        return _made(self._call)


@functools.cache
def _messages() -> dict[str, type[CutlassMsg]]:
    """The messages of every operation, by name."""
    planned: dict[str, list[PlannedOperation[Any]]] = {}
    kinds: dict[str, type[CutlassMsg]] = {}
    for operation in operations().values():
        name = operation.message
        if name is not None and isinstance(operation, PlannedOperation):
            planned.setdefault(name, []).append(operation)
        elif name is not None and isinstance(operation, CallOperation):
            kinds[name] = _message(name, Run, operation=operation)
    return kinds | {name: _message(name, Compute, _operations=tuple(found)) for name, found in planned.items()}


def _message(name: str, base: type[CutlassMsg], **members: Any) -> type[CutlassMsg]:
    """A kind of messages, known by the name under which it is sent, in pickles and tracebacks too."""
    known_as = {"__module__": __name__, "__qualname__": f"CutlassMsg.{name}", "__doc__": base.__doc__}
    return type(name, (base,), known_as | members)


@dataclass(frozen=True, eq=False)
class RefitMsg:
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
    _staged: tuple[Weights, ...] | CutlassError = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.plan_key, PlanKey):
            raise InvalidOperandError(
                f"plan_key is a {type(self.plan_key).__name__}; expected a PlanKey, from request.plan_key()"
            )
        object.__setattr__(self, "_staged", _kept(lambda: import_weights(self.weights, self.stream)))

    @property
    def staged(self) -> tuple[Weights, ...]:
        """The values, ready to be copied.

        Raises:
            InvalidOperandError: they are neither bytes nor an array.
        """
        return _made(self._staged)


@dataclass(frozen=True, eq=False)
class RefitMessage(CutlassMsg):
    """Writes new values into the operand that a plan binds.

    Attributes:
        msg: which plan, and the values.

    Raises:
        InvalidOperandError: `msg` is no RefitMsg.
    """

    msg: RefitMsg

    def __post_init__(self) -> None:
        if not isinstance(self.msg, RefitMsg):
            raise InvalidOperandError(f"msg is a {type(self.msg).__name__}; expected a RefitMsg")


RefitMessage.__name__, RefitMessage.__qualname__ = "Refit", "CutlassMsg.Refit"
CutlassMsg.Refit = RefitMessage


def _launch(request: Request, given: Any, out: Any, stream: Any) -> Launch:
    operation = operation_of(request)
    *table, result = operands_of(request)
    arrays = _arrays(request, given)
    _check_names(request, operation.bound, table, arrays)
    first = next((arrays[slot.name] for slot in table if slot.name in arrays), None)
    with operands.launching(stream, first, awaited=True):
        return _imported(request, table, result, arrays, out, named=stream is not None)


def _imported(
    request: Request,
    table: Sequence[OperandSlot],
    result: OperandSlot,
    arrays: dict[str, Any],
    out: Any,
    *,
    named: bool,
) -> Launch:
    views: dict[str, _core.Operand] = {}
    first = None
    for slot in table:
        for label, array, spec in _members(slot, arrays):
            view = operands.as_operand(array, label)
            first = (array, view, label) if first is None else first
            _check_view(view, spec, label, first, slot.element)
            if slot.written:
                _check_written(array, view, label)
            views[label] = _laid_out(view, spec)
    assert first is not None  # noqa: S101 - `_check_names` has seen to it
    results = _allocated(operation_of(request).result_layout(request), result, first) if out is None else []
    for label, array, spec in [] if out is None else _members(result, {"out": out}):
        view = operands.as_operand(array, label)
        _check_written(array, view, label)
        _check_view(view, spec, label, first)
        results.append(Result(array, _laid_out(view, spec)))
    for label, output in zip(result.labels, results, strict=True):
        views[label] = from_nhwc(output.view, output.layout)
    return Launch(first[1].device, operands.launch_stream().handle, named, views, tuple(results), result.listed)


First = tuple[Any, _core.Operand, str]
"""The first operand, its view and its name: its framework and its device are those of the message."""


def _arrays(request: Request, given: Any) -> dict[str, Any]:
    own = {slot.name for slot in operands_of(request)[:-1]}
    if isinstance(given, Mapping) and own.issuperset(given):
        return {name: array for name, array in given.items() if array is not None}
    names = operation_of(request).names(request)
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise InvalidOperandError(f"operands has {', '.join(map(repr, unknown))}; expected {_listing(names)}")
        return {name: array for name, array in given.items() if array is not None}
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and 1 <= len(given) <= len(names):
        return {name: array for name, array in zip(names, given, strict=False) if array is not None}
    raise InvalidOperandError(
        f"operands is a {type(given).__name__}; expected a mapping of {_listing(names)}, or a tuple in this order"
    )


def _listing(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _check_names(request: Request, bound: str, table: Sequence[OperandSlot], arrays: dict[str, Any]) -> None:
    beta, own = request.epilogue.beta, [slot.name for slot in table]
    for name in own:
        if name in arrays:
            continue
        if name == "c" and beta != 0:
            raise InvalidOperandError(f"the request's beta is {beta}, so operands needs c")
        if name != bound:
            raise InvalidOperandError(f"operands has no {name}")
        if request.binding is None:
            raise InvalidOperandError(f"operands has no {name}: it may be left out once a request's binding has it")
    for name in arrays:
        if name not in own:
            why = "the request's beta is 0, so that it would not be read" if name == "c" else "the request has none"
            raise InvalidOperandError(f"operands has {name}, but {why}")


def _members(slot: OperandSlot, arrays: dict[str, Any]) -> list[tuple[str, Any, MatrixSpec]]:
    """(name, array, its layout) of every array of an operand; nothing where it has been left out."""
    if slot.name not in arrays:
        return []
    given = arrays_of(slot, arrays[slot.name])
    return [(label, array, spec) for (label, array), spec in zip(given, slot.specs, strict=True)]


def _allocated(layout: str, result: OperandSlot, first: First) -> list[Result]:
    """New arrays for the results, of the framework of the first operand."""
    array, view, _ = first
    made = []
    for spec in result.specs:
        shape = spec.shape
        if layout == "nchw":
            shape = tuple(shape[i] for i in TO_NHWC)
        made.append(Result(*operands.empty(shape, spec.dtype, view.device, array), layout))
    return made


def _laid_out(view: _core.Operand, spec: MatrixSpec) -> _core.Operand:
    """The view, with strides that say something where there are no elements: plans compare them."""
    if 0 not in view.shape:
        return view
    return _core.Operand(
        view.pointer, view.shape, spec.strides, view.dtype, view.device_type, view.device, view.read_only, view
    )


def _check_written(array: Any, view: _core.Operand, name: str) -> None:
    if operands.is_jax(array):
        cure = "leave out away" if name.startswith("out") else "give an array that may be written"
        raise InvalidOperandError(f"{name} is a JAX array, which cannot be written: {cure}")
    if view.read_only:
        raise InvalidOperandError(f"{name} is read-only: give an array that may be written")


def _check_view(
    view: _core.Operand, spec: MatrixSpec, name: str, first: First, element: tuple[int, int] | None = None
) -> None:
    check_operand(view, spec, name, element)
    _, other, label = first
    if view.device != other.device:
        raise InvalidOperandError(
            f"{label} is on cuda:{other.device} and {name} on cuda:{view.device}: both must be on one GPU"
        )
