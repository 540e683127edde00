"""CutlassActor, which serves requests sent as messages with cached plans; and props, from which actors are made."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import _core
from ..arrays import operands
from ..checks import check_index, check_integer, check_options, shown
from ..errors import ContextPoisonedError, InvalidOperandError, LibraryError
from ..jit import kernels
from ..jit.locks import KeyedLocks, renewed
from ..pipeline.bindings import Binding, Weights
from ..pipeline.call import Invocation
from ..pipeline.operation import operands_of, operation_of, planned_operations, settled
from ..pipeline.plan_cache import CachedPlan, PlanCache, PlanKey
from ..pipeline.planning import plan
from ..pipeline.request import Request
from .messages import BoundOperand, Compute, CutlassMsg, Launch, Refit, RefitMsg, Run, Work, launched

if TYPE_CHECKING:  # Pykka is imported at the start of a mailbox
    import pykka


class CutlassActor:
    """Serves messages on one GPU: synchronously by `handle`, or through the mailbox that `start` returns.

    The mailbox launches the work of successive messages without waiting for the GPU. Each message is answered when its
    own work is done, in the order of its stream. `handle` waits for the work of its message alone.

    * Messages such as `Gemm` without operands render the kernel's source, pass it to the compile sink, and cache it as
      a plan that cannot be launched. No GPU is needed.
    * With operands they take the plan from the cache, or make one (prebuilt kernels first, then compilation), launch it
      on the message's stream, and answer with the result once that work has completed. The operands stay alive until
      then.
    * `Matmul`, whose requests contain the arrays, computes as `matmul` does, with that function's plans, and answers
      with D. The request's reply, if any, receives the result or the error too. Host arrays are accepted.
    * `Refit` writes new values into the operand that a plan binds, without planning or compiling. It does nothing for a
      plan that was only rendered and has no operand yet.

    A request with a `binding` binds an operand (`b` of a GEMM) of the first message that has one: the array itself, or
    the list, which later messages may omit. Bindings are independent of the plan cache: an evicted plan is made again,
    and the operand stays bound until `unbind`.

    An error that destroys the process's CUDA context (ContextPoisonedError) is the answer to the message in which it
    occurred; all later messages are refused with that reason. Only a new process recovers: see `supervise`.

    Any number of threads may call `handle`, also beside the mailbox; launches and refits of one binding are ordered on
    the GPU.

    Attributes:
        plan_cache: the plans, by `request.plan_key()`.
        mock: whether this is the actor without a GPU.
        device: index of the GPU.
        dispatched: how many messages were received, including failed ones.
        poisoned: why every message is refused, or None.
        rendered: in mock mode, (source, kernel name) of each rendered kernel, in order.
    """

    def __init__(
        self,
        plan_cache_capacity: int,
        *,
        mock: bool = False,
        compile_sink: Callable[[str, str], object] | None = None,
        on_poisoned: Callable[[ContextPoisonedError], object] | None = None,
        device: int = 0,
        planner: Callable[[Any, int], Any] = plan,
        stream: Any = None,
        in_flight: int = 64,
    ) -> None:
        """Makes an actor; CUDA is not used before the first message with operands.

        Args:
            plan_cache_capacity: how many plans are kept.
            mock: only renders, and refuses operands (LibraryError); for tests without a GPU.
            compile_sink: called with (source, kernel name) of each kernel that a message without operands renders, and
                of each kernel that is compiled at run time, before its compilation. Its exceptions become warnings.
            on_poisoned: called once, with the error, when the CUDA context is lost. Its exceptions become warnings.
            device: index of the GPU that operands have to be on.
            planner: makes the plan of a request on the GPU of an index, instead of `atomr_cutlass.plan`: for custom
                policies.
            stream: the stream, a handle or a stream object, for messages that name none; their work waits for the work
                pending on the sender's stream. None: the sender's stream itself.
            in_flight: the limit of messages whose work is in flight, and of messages that wait in the mailbox; beyond
                it, sending blocks, except in a thread that runs an event loop.

        Raises:
            InvalidOperandError: the capacity or `in_flight` is no integer above 0, or another argument of the wrong
                kind.
        """
        check_options(mock=mock)
        check_index(device, "device")
        check_integer(in_flight, "in_flight", "an integer from 1, the works in flight at most", least=1)
        for name, hook in (("compile_sink", compile_sink), ("on_poisoned", on_poisoned), ("planner", planner)):
            if not (callable(hook) or (hook is None and name != "planner")):
                raise InvalidOperandError(f"{name} is {shown(hook)}; expected a function")
        self.plan_cache: PlanCache[Any] = PlanCache(plan_cache_capacity)
        self.mock = mock
        self.device = device
        self.rendered: list[tuple[str, str]] = []
        self._compile_sink = compile_sink
        self._on_poisoned = on_poisoned
        self._planner = planner
        self._stream = None if stream is None else operands.stream_handle(stream)
        self._in_flight = in_flight
        self._bindings: dict[PlanKey, BoundOperand] = {}
        self.poisoned: ContextPoisonedError | None = None
        self.dispatched = 0
        self._mailbox: pykka.ActorRef[Any] | None = None
        self._lock = renewed(self, "_lock", threading.Lock)
        self._keys = KeyedLocks()

    @staticmethod
    def prebuilt_active() -> bool:
        """Whether kernels were compiled into this installation; packs do not count."""
        return any(not row["pack"] for row in _core.rows())

    def handle(self, msg: CutlassMsg) -> Any:
        """Serves a message and waits until its work is done.

        Returns:
            The result, in `out` or an array of the kind of the first operand (a list for `GroupedGemm`); without
            operands the cached plan. For `Refit` None.

        Raises:
            InvalidOperandError: no message, operands or weights that do not match the request or the binding, an
                unknown plan key, or a stream that is being captured.
            UnsupportedError: no kernel serves the request.
            LibraryError: operands in mock mode, or CUDA reported an error.
            ContextPoisonedError: the CUDA context is lost, by this message or an earlier one.
            KernelNotFoundError, CompileError, DeviceUnavailableError: see `atomr_cutlass.plan`.
        """
        return self._begin(msg).result()

    def _begin(self, msg: Any) -> Work:
        """Launches the work of a message. Its errors and its reply are the work's result."""
        with self._lock:
            self.dispatched += 1
        reply = msg.request.reply if isinstance(msg, Run) else None
        try:
            work = Work(lambda: None) if self.poisoned else copy_context().run(self._serve, msg)
        except BaseException as error:  # noqa: BLE001 - the answer
            work = _failed(error)
        return Work(lambda: settled(reply, lambda: self._answer(work)), work.stream)

    def _answer(self, work: Work) -> Any:
        if self.poisoned is None:
            try:
                return work.result()
            except ContextPoisonedError as error:
                with self._lock:
                    first, self.poisoned = self.poisoned is None, self.poisoned or error
                if first:
                    _call_hook(self._on_poisoned, error, failure="on_poisoned failed")
                    raise
        raise ContextPoisonedError(
            f"refused, since this process has lost its CUDA context: {self.poisoned}; work goes on in a fresh process "
            "only (ac.supervise)"
        )

    def start(self) -> pykka.ActorRef[Any]:
        """Starts the mailbox, a thread that launches the work of successive messages; a running one is returned.

        Returns:
            Its reference: `ask(msg, block=False)` returns a future, whose `get()` returns the answer or raises the
            error; `await` does so without blocking the event loop. `tell(msg)` sends without an answer. `stop()`, or
            the interpreter's exit, ends the mailbox once all earlier messages are answered.
        """
        from .mailbox import Mailbox

        with self._lock:
            if self._mailbox is None or not self._mailbox.is_alive():
                self._mailbox = Mailbox.start(self._begin, self._in_flight)
            return self._mailbox

    def unbind(self, key: PlanKey) -> None:
        """Releases the operand that is bound under this key, if any; the next message has to bring a new one."""
        with self._keys.hold(key):
            self._bindings.pop(key, None)

    def _serve(self, msg: Any) -> Work:
        """Launches the work of a message, in its own context, whose variables compilations and their errors read."""
        kernels.called_from.set(getattr(msg, "made_at", ""))
        if self._compile_sink is not None:
            kernels.compile_sink.set(self._show)
        if isinstance(msg, Refit):
            return self._refit(msg.msg)
        if isinstance(msg, Compute) and msg.operands is None:
            made = self._render(msg.request)
            return Work(lambda: made)
        if isinstance(msg, (Compute, Run)) and self.mock:
            raise LibraryError("mock", "operands need a GPU, which this actor does without: leave them out")
        if isinstance(msg, Compute):
            return self._compute(msg.request, msg.imported)
        if isinstance(msg, Run):
            return self._call(msg)
        raise InvalidOperandError(f"msg is a {type(msg).__name__}; expected a CutlassMsg, such as CutlassMsg.Gemm")

    def _show(self, source: str, name: str) -> None:
        _call_hook(self._compile_sink, source, name, failure=f"the compile sink failed on {name}")

    # Without operands

    def _render(self, request: Request) -> Any:
        key = request.plan_key()

        def render() -> CachedPlan:
            source, name = request.render_cu()
            if self.mock:
                self.rendered.append((source, name))
            self._show(source, name)
            return CachedPlan(key, source, name)

        return self._plan(key, render, rendered=True)

    def _plan(self, key: PlanKey, make: Callable[[], Any], *, rendered: bool = False) -> Any:
        """The plan of a key, made once for all threads; with `rendered`, a plan that cannot be launched suffices."""
        unwanted = (type(None),) if rendered else (type(None), CachedPlan)
        found = self.plan_cache.get(key)
        if isinstance(found, unwanted):
            with self._keys.hold(key):
                found = self.plan_cache.peek(key)
                if isinstance(found, unwanted):
                    found = make()
                    self.plan_cache.insert(found, key)
        return found

    # With operands

    def _compute(self, request: Request, launch: Launch) -> Work:
        operation, key = operation_of(request), request.plan_key()
        empty = all(0 in view.shape for _, view, _ in launch.results)
        if empty and not any(slot.written for slot in operands_of(request)[:-1]):
            self._expect_here(launch)
            return Work(launch.finished)
        instead = f"ac.{operation.name}" if empty else "a plan (ac.plan)"
        launch = replace(launch, stream=self._placed(launch, instead, named=launch.named))
        if empty:
            write = partial(operation.write_empty, request, launch.arrays, launch.stream)
            return Work(launch.finished, launch.stream, launched(write, launch.device, launch.stream))
        if request.binding is not None and key not in self._bindings:
            _bound_operand(request, launch, needed=True)  # before planning, which may compile a kernel
        made = self._plan(key, lambda: self._planner(request, self.device))
        return Work(launch.finished, launch.stream, self._launch(made, request, key, launch))

    def _placed(self, work: Launch | Invocation, instead: str, *, named: bool) -> int:
        """The stream for the work: the message's or, if the sender named none, the actor's, after the message's."""
        self._expect_here(work)
        stream = work.stream if named or self._stream is None else self._stream
        if any(_core.capturing(self.device, each) for each in {work.stream, stream}):
            raise InvalidOperandError(
                "the message's stream is being captured into a CUDA graph, and an actor waits for its work: capture "
                f"{instead} instead"
            )
        if stream != work.stream:
            _core.order_streams(self.device, work.stream, stream)
        return stream

    def _expect_here(self, work: Launch | Invocation) -> None:
        if work.device != self.device:
            raise InvalidOperandError(f"the operands are on cuda:{work.device}; this actor works on cuda:{self.device}")

    def _call(self, msg: Run) -> Work:
        call: Invocation = msg.imported
        if not call.on_gpu:
            result = call.run()
            return Work(lambda: result)
        stream = self._placed(call, f"ac.{msg.operation.name}", named=msg.request.stream is not None)
        call = replace(call, stream=stream)
        answer: list[Any] = []
        reached = launched(lambda: answer.append(call.run()), call.device, stream)
        return Work(answer.pop, stream, reached, kept=call)

    def _launch(self, made: Any, request: Request, key: PlanKey, launch: Launch) -> tuple[_core.Event, ...]:
        operation, epilogue = operation_of(request), request.epilogue

        def run(views: dict[str, _core.Operand]) -> None:
            arrays = {label: views[label] for slot in operands_of(request) for label in slot.labels}
            # A plan serves every request of its key, whose scalars may differ.
            operation.launch(made, request, arrays, alpha=epilogue.alpha, beta=epilogue.beta, stream=launch.stream)

        def run_bound(bound: BoundOperand) -> tuple[_core.Event, ...]:
            return bound.launch(launch.stream, lambda: run({**launch.arrays, **bound.operands}))

        if request.binding is None:
            return launched(lambda: run(launch.arrays), launch.device, launch.stream)
        bound = self._bindings.get(key)
        if bound is None:
            with self._keys.hold(key):
                bound = self._bindings.get(key)
                if bound is None:
                    bound = _binding_of(request, launch)
                    reached = run_bound(bound)
                    # After the plan has accepted the operand: a refused one must not be bound.
                    self._bindings[key] = bound
                    return reached
        given = _bound_operand(request, launch, needed=False)
        if any(view.pointer != bound.operands[label].pointer for label, view in given.items()):
            name = operation_of(request).bound
            raise InvalidOperandError(
                f"binding {request.binding!r} has another {name}: leave {name} out, send a Refit with its values, "
                "unbind it, or give the request a binding of its own"
            )
        return run_bound(bound)

    # Refit

    def _refit(self, msg: RefitMsg) -> Work:
        key = msg.plan_key
        bound = self._bindings.get(key)
        if bound is None:
            known = self.plan_cache.peek(key)
            if known is None:
                raise InvalidOperandError(f"no plan of {key} is known: send its {_message_of(key)} first")
            if isinstance(known, CachedPlan):
                return Work(lambda: None)
            raise InvalidOperandError(
                f"the plan of {key} keeps no operand: "
                + ("give the request binding='a name', and send" if key.binding is None else "send")
                + f" a {_message_of(key)} message with {planned_operations()[key.op].bound} first"
            )
        weights: tuple[Weights, ...] = msg.imported
        reached = bound.refit(weights)
        return Work(lambda: None, weights[0].stream, reached, kept=weights)


@dataclass(frozen=True)
class CutlassProps:
    """Arguments for making actors.

    Attributes:
        plan_cache_capacity: how many plans each actor keeps.
        stream: the stream for messages that name none, or None; see `CutlassActor`.
        mock: whether the actors work without a GPU.
    """

    plan_cache_capacity: int
    stream: Any = None
    mock: bool = False

    def create(self, *, mock: bool | None = None, **options: Any) -> CutlassActor:
        """A new actor; `mock` overrides that of the props, and `options` are further arguments of CutlassActor."""
        chosen = {"mock": self.mock if mock is None else mock, "stream": self.stream}
        return CutlassActor(self.plan_cache_capacity, **{**chosen, **options})


def props(plan_cache_capacity: int, *, stream: Any = None) -> CutlassProps:
    """Props of actors that keep this many plans each, and launch on this stream; see `CutlassActor`."""
    return CutlassProps(plan_cache_capacity, stream)


def mock_props(plan_cache_capacity: int = 64) -> CutlassProps:
    """Props of actors for tests without a GPU: they only render, and refuse operands (LibraryError)."""
    return CutlassProps(plan_cache_capacity, mock=True)


def _failed(error: BaseException) -> Work:
    def fail() -> None:
        raise error

    return Work(fail)


def _binding_of(request: Request, launch: Launch) -> BoundOperand:
    views = _bound_operand(request, launch, needed=True)
    listed = operation_of(request).bound_slot(request).listed
    array = list(views.values()) if listed else next(iter(views.values()))
    return BoundOperand(Binding(request, array, launch.device), launch.device)


def _bound_operand(request: Request, launch: Launch, *, needed: bool) -> dict[str, _core.Operand]:
    """The message's operand for the binding, by label; refuses a message without it if it is `needed`."""
    slot = operation_of(request).bound_slot(request)
    given = {label: launch.arrays[label] for label in slot.labels if label in launch.arrays}
    if needed and not given:
        raise InvalidOperandError(
            f"binding {request.binding!r} has no operand yet: the first message has to bring {slot.name}"
        )
    return given


def _message_of(key: PlanKey) -> str:
    """The name of the messages that make plans for this key."""
    operation = planned_operations().get(key.op)
    return "request" if operation is None else str(operation.message)


def _call_hook(hook: Callable[..., object] | None, *arguments: Any, failure: str) -> None:
    """Calls a function of the caller's, if there is one; its exceptions become warnings."""
    try:
        if hook is not None:
            hook(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it does
        warnings.warn(f"{failure}: {error!r}", RuntimeWarning, stacklevel=3)
