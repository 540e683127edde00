"""Calls of functions: their arguments and options, the parsed form, and the one runner.

A call whose plan is kept is served in C++ (`_core.StoredFunction`). For any other call, the function returns a `Call`,
whose parser makes an `Invocation`: the views of the arrays that are read and written, their plan and their reference.
It runs on the reference, with host copies or on the GPU, and its plan is kept.
"""

from __future__ import annotations

import abc
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np

from .. import _core
from ..arrays import operands, symbols
from ..arrays.layouts import permuted
from ..arrays.numerics import AnyArray
from ..arrays.operands import CUDA, check_backend, check_scalars, on_reference, refuse_jax_out
from ..checks import NUMBERS, check_number, check_options
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.epilogue.tree import RESULT
from ..jit import kernels
from .call_options import CallOptions
from .plan import BACKENDS as GPU_BACKENDS
from .plan_cache import kept_plans
from .reduction import is_batch_invariant

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

BACKENDS = (*GPU_BACKENDS, "reference")

SCALES = ("scale_a", "scale_b", "scale_d")

_ROLES = {
    "alpha": "alpha", "beta": "beta", "stream": "stream", "out": "array", "global_scale": "factor",
    "x_shape": "shape", "w_shape": "shape", "extents": "shape", **dict.fromkeys(SCALES, "scale"),
}  # fmt: skip
_LABELS = ("out", *SCALES, "global_scale")


class Result(NamedTuple):
    """An array that a call writes, with the extents of the kernels; `element` is DLPack's (type code, bits).

    `array` is the caller's, or a new one that was `made`; None before that, or if JAX imports it at the end.
    """

    shape: tuple[int, ...]
    element: tuple[int, int]
    array: Any = None
    view: _core.Operand | None = None
    made: bool = False


@dataclass(frozen=True)
class Call:
    """The arguments of a function.

    Attributes:
        parse: checks the call in full before anything is allocated or launched.
        arrays: the operation's arrays by name, None for those that are not given; scales may be numbers. Where the
            first is a list, others may be too. Results are of the kind of the first.
        out: the array for the result, a list of them where the first array is a list, or None.
        others: the arguments for the epilogue by name, which may be lists likewise.
        own: the options that only this function has.
        parsed: whether such calls are parsed although a plan is kept for them.
    """

    parse: Callable[[Call], Invocation]
    arrays: dict[str, Any]
    out: Any
    options: CallOptions
    epilogue: Any = None
    others: dict[str, Any] = field(default_factory=dict)
    own: tuple[Any, ...] = ()
    parsed: bool = False

    @property
    def like(self) -> Any:
        """The first array: results are of its kind."""
        first = next(iter(self.arrays.values()))
        return first[0] if isinstance(first, (list, tuple)) and first else first

    @property
    def c(self) -> Any:
        """C, or None where beta is 0 and `c` is an operand of the epilogue."""
        return None if self.epilogue is not None and self.options.beta == 0 else self.arrays.get("c")

    @property
    def follows(self) -> bool:
        """Whether an epilogue, a bias or an activation follows the product."""
        return not (self.epilogue is self.arrays.get("bias") is self.options.activation is None)

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """The scales that are numbers."""
        return {name: self.arrays[name] for name in SCALES if isinstance(self.arrays.get(name), NUMBERS)}

    @property
    def binds(self) -> bool:
        """Whether an epilogue is bound to the call: the reference computes a bias and an activation without one."""
        return self.epilogue is not None or (self.follows and self.options.backend != "reference")

    @property
    def planning(self) -> dict[str, Any]:
        """The options that plans of every operation take."""
        options = self.options
        return {
            "backend": options.backend, "jit": options.jit, "workspace_size": options.workspace_size,
            "batch_invariant": is_batch_invariant(options.batch_invariant),
        }  # fmt: skip

    @property
    def scalars(self) -> tuple[float, float]:
        """Alpha and beta, multiplied with the scales that are numbers."""
        alpha, beta, numbers = self.options.alpha, self.options.beta, self.numbers
        if not numbers:
            return alpha, beta
        of_d = float(numbers.get("scale_d", 1))
        return math.prod(map(float, numbers.values()), start=float(alpha)), float(beta) * of_d

    def refuse_scale_arrays(self, reason: str, names: Iterable[str] = SCALES) -> None:
        """Refuses scales that are arrays, for kernels that read none."""
        for name in names:
            if self.arrays[name] is not None and name not in self.numbers:
                raise UnsupportedError(f"{name} is a {type(self.arrays[name]).__name__}: {reason}")

    def check(self, function: str, **more: Any) -> None:
        """Checks everything that needs no array; `more` are the function's own options."""
        options = self.options
        check_options(**{name: value for name, value in options._asdict().items() if name != "stream"}, **more)
        for name, scale in self.numbers.items():
            check_number(scale, name)
        check_backend(options.backend, BACKENDS)
        if options.jit is not None:
            kernels.policy(options.jit)
        if self.others and self.epilogue is None:
            others = ", ".join(self.others)
            raise InvalidOperandError(f"{others}: {function} has no such argument, and there is no epilogue to take it")
        if self.epilogue is not None and options.activation is not None:
            raise InvalidOperandError("epilogue and activation are given: apply the activation in the epilogue")
        check_scalars(options.alpha, options.beta, self.c, self.numbers.get("scale_d"))
        refuse_jax_out(self.out)


@dataclass(frozen=True, kw_only=True)
class Invocation(abc.ABC):
    """A parsed call: the arrays that it reads and writes, how to plan it, and its reference.

    Attributes:
        inputs: views of the arrays that are read, by name; the first determines the device.
        results: the arrays that are written, by name, the caller's and new ones.
        arrange: makes the function's return value from results by name; None returns D. It outlives the call.
        axes: the kernels' dimensions in the caller's order; empty where the order is the same.
        memory: whether only the memory of the caller's arrays counts: views have other extents and strides.
        stream: where `run` launches.
        numpy_on_host: whether NumPy serves host arrays, with or without a GPU.
    """

    call: Call
    inputs: dict[str, _core.Operand]
    results: dict[str, Result]
    arrange: Callable[[Mapping[str, Any]], Any] | None = None
    axes: tuple[int, ...] = ()
    memory: bool = False
    stream: int = 0
    numpy_on_host: ClassVar[bool] = False

    @property
    def first(self) -> _core.Operand:
        """The operand that determines the device."""
        return next(iter(self.inputs.values()))

    @property
    def on_gpu(self) -> bool:
        """Whether the operands are on a GPU."""
        return self.first.device_type == CUDA

    @property
    def device(self) -> int:
        """Index of the GPU that the operands are on; 0 for host arrays."""
        return self.first.device if self.on_gpu else 0

    @property
    def views(self) -> dict[str, _core.Operand]:
        """Views of all operands and results by name."""
        results = ((name, result.view) for name, result in self.results.items())
        return self.inputs | {name: view for name, view in results if view is not None}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return 0 in self.results[RESULT].shape

    @property
    def by_reference(self) -> bool:
        """Whether the reference serves the call whatever the backend: results in host memory without elements."""
        return self.empty and not self.on_gpu

    def check_kernels(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuses calls that the reference serves and no kernel does."""

    def returned(self, arrays: Mapping[str, Any]) -> Any:
        """The function's return value, from results by name."""
        return arrays[RESULT] if self.arrange is None else self.arrange(arrays)

    @abc.abstractmethod
    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Any:
        """The plan for views on a GPU; the framework of `like` allocates its workspace, where it can."""

    @abc.abstractmethod
    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        """The results by name, computed from host arrays by name."""

    def order(self, made: Any) -> tuple[str, ...]:
        """The names of a plan's operands, in its order; the last is its result."""
        return tuple(name for name in made.slots if name in self.inputs or name in self.results)

    def uploaded(self) -> dict[str, _core.Operand]:
        """Copies on GPU 0 of the arrays that are read, and of results that the kernel may write only in part."""
        return {name: operands.upload(operands.to_numpy(view), 0) for name, view in self.inputs.items()}

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:  # noqa: B027 - likewise
        """Writes the results that have elements where nothing is launched, in the order of a stream."""

    def fetch(self, view: _core.Operand) -> AnyArray:
        """A host array of a view."""
        return operands.download(view) if self.on_gpu else operands.to_numpy(view)

    def for_another_thread(self) -> Invocation:
        """The invocation with its results allocated in this thread, for another to `run` on the launch stream."""
        allocated = _allocated(self) if self.on_gpu else self
        return replace(allocated, stream=operands.launch_stream().handle)

    def run(self) -> Any:
        """Computes and returns the function's result, which on a GPU is in flight on the stream."""
        with operands.launching(self.stream, None, awaited=True):
            return _served(self, None)


def stored(*environment: str, **arrays: str) -> Callable[[FunctionT], FunctionT]:
    """Decorates a function that returns a `Call` so that it computes that call.

    A call whose arrays and options are like those of an earlier one is served with its plan, without calling the
    function. `environment` names the variables that calls depend on, beside ATOMR_CUTLASS_JIT; `arrays` maps operands'
    names to parameters, in the function's order. Parameters of _ROLES are known, and all others are options.
    """
    roles = _ROLES | dict.fromkeys(arrays.values(), "array")
    labels = {parameter: operand for operand, parameter in arrays.items()} | {name: name for name in _LABELS}

    def store(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function).parameters.values()
        named = [parameter for parameter in signature if parameter.kind is not parameter.VAR_KEYWORD]
        parameters = [
            (
                parameter.name,
                roles.get(parameter.name, "option"),
                labels.get(parameter.name, ""),
                () if parameter.default is parameter.empty else (parameter.default,),
            )
            for parameter in named
        ]
        positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in named)
        known, takes_others = {parameter.name for parameter in named}, len(named) < len(signature)
        variables = [kernels.POLICY_VARIABLE, *environment]

        @functools.wraps(function)
        def described(*arguments: Any, **named: Any) -> Any:
            others = named.keys() - known
            if others and (not takes_others or named.get("epilogue") is None):  # without an epilogue to take them
                from .operation import refusal_of  # loads every operation

                for option in others:
                    if reason := refusal_of(function.__name__, option):
                        raise UnsupportedError(f"{function.__name__} takes no {option}: {reason}")
            return function(*arguments, **named)

        made = _core.StoredFunction(described, kept_plans, _serve, parameters, positional, takes_others, variables)
        return cast("FunctionT", functools.update_wrapper(made, function))

    return store


def _serve(call: Call | Any, pending: _core.PendingCall | None) -> Any:
    """Serves a call that has no kept plan, and keeps its plan in `pending`, unless that is None."""
    if not isinstance(call, Call):  # the function has returned a result: there is nothing to compute
        return call
    launch = None if pending is None else pending.launch
    with launch or operands.launching(call.options.stream, call.like):
        if pending is not None and pending.learns and (launch_traced := _traced(call, pending)):
            return launch_traced()
        return _served(call.parse(call), pending)


def _served(invocation: Invocation, pending: _core.PendingCall | None) -> Any:
    """Runs a call, and keeps its plan for others like it, unless `pending` is None."""
    by_numpy = invocation.numpy_on_host and not invocation.on_gpu
    if by_numpy or on_reference(invocation.call.options.backend, invocation.first):
        return _on_reference(invocation)
    invocation.check_kernels()
    if invocation.by_reference:
        return _on_reference(invocation)
    if not invocation.on_gpu:
        return _on_host(invocation)
    invocation, stream = _allocated(invocation), operands.launch_stream().handle
    views = invocation.views
    if invocation.empty:
        invocation.write_nothing(views, stream)
        return _finished(invocation, views, stream)
    kept = None if pending is None else pending.plan
    plan = invocation.plan(views, like=invocation.call.like, stream=stream) if kept is None else kept
    return _launched(invocation, views, plan, None, pending if kept is None else None)


def _allocated(invocation: Invocation) -> Invocation:
    """A call on a GPU with its new results allocated."""
    device, like = invocation.device, invocation.call.like
    results = {
        name: Result(result.shape, result.element, *operands.empty(result.shape, result.element, device, like), True)
        if result.view is None else result
        for name, result in invocation.results.items()
    }  # fmt: skip
    return replace(invocation, results=results)


def _traced(call: Call, pending: _core.PendingCall) -> Callable[[], Any] | None:
    """A function that launches a call planned with symbols for extents; None where no such plan can be made.

    It keeps the plan with its program and `cached_launch`.
    """
    try:
        with symbols.tracing(pending.inputs()) as trace:
            invocation, stream = call.parse(call), operands.launch_stream().handle
            if call.parsed or not invocation.on_gpu or on_reference(call.options.backend, invocation.first):
                return None
            invocation.check_kernels()
            if invocation.by_reference or invocation.empty or _core.capturing(invocation.device, stream):
                return None
            invocation = _allocated(invocation)
            plan = invocation.plan(invocation.views, like=call.like, stream=stream)
    except Warning:  # where warnings are errors: it would not be given again
        raise
    except Exception:  # noqa: BLE001 - an error of the call is raised again by planning without symbols
        return None
    if plan.cached_launch is None or not plan.checked:
        return None
    views = {name: symbols.plain_view(view) for name, view in invocation.views.items()}
    return functools.partial(_launched, invocation, views, plan, (trace.program, *plan.cached_launch), pending)


def _launched(
    invocation: Invocation, views: dict[str, _core.Operand], plan: Any, learned: tuple[Any, ...] | None,
    pending: _core.PendingCall | None,
) -> Any:  # fmt: skip
    """Launches a plan, and keeps it unless `pending` is None, with its program and `cached_launch` if it has them."""
    stream = operands.launch_stream().handle
    names, taken = _launch(invocation, views, plan, stream)
    if pending is not None and plan.checked:
        new = [
            (name, symbols.symbolic(result.shape), result.element)
            for name, result in invocation.results.items() if result.made
        ]  # fmt: skip
        call, axes = invocation.call, list(invocation.axes)
        pending.keep(
            plan, names, taken, new, invocation.arrange, axes, call.scalars, call.parsed, learned, invocation.memory
        )
    return _finished(invocation, views, stream)


def _finished(invocation: Invocation, views: Mapping[str, _core.Operand], stream: int) -> Any:
    """The function's return value, from results on a GPU."""
    arrays = {RESULT: invocation.call.out}
    for name, result in invocation.results.items():
        arrays[name] = array = result.array
        if result.made or array is None:  # new, or of JAX
            arrays[name] = permuted(operands.finished(array, views[name], stream), invocation.axes)
    return invocation.returned(arrays)


def _on_host(invocation: Invocation) -> Any:
    """Copies host operands to GPU 0, computes there, and copies the results back."""
    views = invocation.uploaded()
    for name, result in invocation.results.items():
        if name not in views:
            _, views[name] = operands.empty(result.shape, result.element, 0, None)
    _launch(invocation, views, invocation.plan(views, like=None, stream=0), 0)
    return _delivered(invocation, {name: operands.download(views[name]) for name in invocation.results})


def _launch(
    invocation: Invocation, views: Mapping[str, _core.Operand], plan: Any, stream: int
) -> tuple[tuple[str, ...], list[_core.Operand]]:
    """Launches a plan; returns the names of its operands and their views."""
    names = invocation.order(plan)
    taken = [permuted(views[name], invocation.axes) for name in names]
    alpha, beta = invocation.call.scalars
    plan(*taken[:-1], out=taken[-1], alpha=alpha, beta=beta, stream=stream)
    return names, taken


def _on_reference(invocation: Invocation) -> Any:
    computed = invocation.reference({name: invocation.fetch(view) for name, view in invocation.inputs.items()})
    if not invocation.on_gpu:
        return _delivered(invocation, computed)
    invocation = _allocated(invocation)
    views = invocation.views
    for name, values in computed.items():
        operands.copy_in(values.reshape(invocation.results[name].shape), views[name])
    return _finished(invocation, views, 0)


def _delivered(invocation: Invocation, computed: Mapping[str, AnyArray]) -> Any:
    """Host results, in the caller's arrays or in new ones of the kind of the first operand."""
    arrays = {RESULT: invocation.call.out}
    for name, values in computed.items():
        result = invocation.results[name]
        if result.view is None:
            arrays[name] = permuted(operands.host_result(values, invocation.call.like), invocation.axes)
        else:
            np.copyto(operands.to_numpy(result.view), values.reshape(result.shape), casting="no")
            arrays[name] = result.array
    return invocation.returned(arrays)
