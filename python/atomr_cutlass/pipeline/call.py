"""The one runner of a function's call: kept plan, else parse, then reference, host copies or GPU, deliver.

A call whose plan is kept is served in C++ (`_core.StoredFunction`). For every other the function describes it as a
`Call`, whose parser makes an `Invocation`: the views of what is read and written, and how that is planned and what its
reference is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from .. import _core
from ..arrays import operands, symbols
from ..arrays.arguments import on_reference
from ..arrays.numerics import AnyArray
from ..arrays.operands import CPU
from ..errors import UnsupportedError
from ..generator.epilogue.tree import RESULT
from ..jit import kernels
from .invocation import Call, Invocation, Result
from .plan import Plan
from .plan_cache import kept_plans

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_ROLES = {
    "alpha": "alpha", "beta": "beta", "stream": "stream", "out": "array", "scale_a": "scale", "scale_b": "scale",
    "scale_d": "scale", "global_scale": "factor", "x_shape": "shape", "w_shape": "shape",
    "extents": "shape",
}  # fmt: skip
_LABELS = ("out", "scale_a", "scale_b", "scale_d", "global_scale")


def stored(*environment: str, **arrays: str) -> Callable[[FunctionT], FunctionT]:
    """Makes a function that computes of one that describes its calls, which returns a `Call`.

    A call whose arrays and options are like those of an earlier one is served with its plan, without being described.

    Args:
        environment: the variables that calls depend on, beside that which says whether kernels may be compiled.
        arrays: the parameters of arrays, by the operands' names; that of the function's first is the first. `out`,
            scales (`scale_a`, ..., `global_scale`), `alpha`, `beta` and `stream` are known; other parameters are
            options.
    """
    labels = {parameter: operand for operand, parameter in arrays.items()} | {name: name for name in _LABELS}

    def store(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function).parameters.values()
        named = [parameter for parameter in signature if parameter.kind is not parameter.VAR_KEYWORD]
        parameters = [
            (
                parameter.name,
                "array" if parameter.name in arrays.values() else _ROLES.get(parameter.name, "option"),
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
            if not takes_others or named.get("epilogue") is None:  # which would take it
                for option in named.keys() - known:
                    _refuse(function.__name__, option)
            return function(*arguments, **named)

        made = _core.StoredFunction(described, kept_plans, _serve, parameters, positional, takes_others, variables)
        return cast("FunctionT", functools.update_wrapper(made, function))

    return store


def _refuse(function: str, option: str) -> None:
    """Refuses an option that other functions take and this does not.

    Raises:
        UnsupportedError: it is one; says why.
    """
    from .operation import refusal_of  # which loads every operation

    if reason := refusal_of(function, option):
        raise UnsupportedError(f"{function} takes no {option}: {reason}")


def _serve(call: Call | Any, pending: _core.PendingCall | None) -> Any:
    """Serves a call that no kept plan serves.

    Args:
        call: as the function describes it; or, where there is nothing to compute, what that returns.
        pending: where the plan is kept; None where it is not.
    """
    if not isinstance(call, Call):
        return call
    launch = None if pending is None else pending.launch
    with operands.launching(call.options.stream, call.like) if launch is None else launch:
        if pending is not None and pending.learns and (traced := _traced(call, pending)):
            return _launched(*traced, pending)
        return _served(call.parse(call), pending)


@dataclass(frozen=True)
class ParsedCall:
    """A call that one thread has parsed, for another to run.

    Attributes:
        invocation: what it is.
        stream: where it is launched.
    """

    invocation: Invocation
    stream: int

    @classmethod
    def of(cls, invocation: Invocation) -> ParsedCall:
        """A call with its results allocated, from where the caller works, for the launch stream that is current."""
        allocated = _allocated(invocation) if invocation.on_gpu else invocation
        return cls(allocated, operands.launch_stream().handle)

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are on a GPU."""
        return self.invocation.on_gpu

    @property
    def device(self) -> int:
        """Index of the GPU, of that which serves host arrays for these."""
        return self.invocation.first.device if self.on_gpu else 0

    def on(self, stream: int) -> ParsedCall:
        """The same on another stream."""
        return replace(self, stream=stream)

    def run(self) -> Any:
        """Computes; what the function returns, which on a GPU is in flight on the stream."""
        with operands.launching(self.stream, None, awaited=True):
            return _served(self.invocation, None)


def _served(invocation: Invocation, pending: _core.PendingCall | None) -> Any:
    """Runs a call, and keeps its plan for others like it, unless `pending` is None."""
    first = invocation.first
    by_numpy = invocation.numpy_on_host and first.device_type == CPU
    if by_numpy or on_reference(invocation.call.options.backend, first):
        return _on_reference(invocation)
    invocation.check_kernels()
    if invocation.by_reference:
        return _on_reference(invocation)
    return _on_host(invocation) if first.device_type == CPU else _on_gpu(invocation, pending)


def _allocated(invocation: Invocation) -> Invocation:
    """A call on a GPU with its new results allocated."""
    device, like = invocation.first.device, invocation.call.like
    results = {
        name: Result(result.shape, result.element, *operands.empty_of(result.shape, result.element, device, like), True)
        if result.view is None else result
        for name, result in invocation.results.items()
    }  # fmt: skip
    return replace(invocation, results=results)


_Learned: TypeAlias = "tuple[list[tuple[Any, ...]], _core.Blueprint, Callable[[_core.Blueprint, Any], Plan]]"
"""The program of a traced plan, and what launches it again."""


def _traced(
    call: Call, pending: _core.PendingCall
) -> tuple[Invocation, dict[str, _core.Operand], Plan, _Learned] | None:
    """A call that is planned with symbols for extents; None where its plan depends on more, or there is none."""
    try:
        with symbols.tracing(pending.inputs()) as trace:
            invocation = call.parse(call)
            first = invocation.first
            if call.parsed or not invocation.on_gpu or on_reference(call.options.backend, first):
                return None
            invocation.check_kernels()
            stream = operands.launch_stream().handle
            if invocation.by_reference or invocation.empty or _core.capturing(first.device, stream):
                return None
            invocation = _allocated(invocation)
            plan = invocation.plan(invocation.views, like=call.like, stream=stream)
    except Warning:  # that is an error here: it is not given again
        raise
    except Exception:  # noqa: BLE001 - which planning without symbols meets again, if it is the call's
        return None
    if plan.cached_launch is None or not plan.checked:
        return None
    views = {name: symbols.plain_view(view) for name, view in invocation.views.items()}
    return invocation, views, plan, (trace.program, *plan.cached_launch)


def _on_gpu(invocation: Invocation, pending: _core.PendingCall | None) -> Any:
    invocation, stream = _allocated(invocation), operands.launch_stream().handle
    views = invocation.views
    if invocation.empty:
        invocation.write_nothing(views, stream)
        return _finished(invocation, views, stream)
    kept = None if pending is None else pending.plan
    plan = invocation.plan(views, like=invocation.call.like, stream=stream) if kept is None else kept
    return _launched(invocation, views, plan, None, pending if kept is None else None)


def _launched(
    invocation: Invocation, views: dict[str, _core.Operand], plan: Any, learned: _Learned | None,
    pending: _core.PendingCall | None,
) -> Any:  # fmt: skip
    """Launches a plan, and keeps it unless `pending` is None, with what has been learned of it."""
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
    """The results on a GPU as the caller gets them."""
    arrays = {RESULT: invocation.call.out}
    for name, result in invocation.results.items():
        arrays[name] = array = result.array
        if result.made or array is None:  # new, or of JAX
            arrays[name] = invocation.present(operands.finished(array, views[name], stream))
    return invocation.returned(arrays)


def _on_host(invocation: Invocation) -> Any:
    """Copies host operands to GPU 0, computes there, and copies the results back."""
    views = invocation.uploaded()
    for name, result in invocation.results.items():
        if name not in views:
            _, views[name] = operands.empty_of(result.shape, result.element, 0, None)
    _launch(invocation, views, invocation.plan(views, like=None, stream=0), 0)
    return _delivered(invocation, {name: operands.download(views[name]) for name in invocation.results})


def _launch(
    invocation: Invocation, views: Mapping[str, _core.Operand], plan: Any, stream: int
) -> tuple[tuple[str, ...], list[_core.Operand]]:
    """Launches a plan; the names of its operands, and their views."""
    names = invocation.order(plan)
    taken = [invocation.present(views[name]) for name in names]
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
            arrays[name] = invocation.present(operands.host_result(values, invocation.call.like))
        else:
            np.copyto(operands.to_numpy(result.view), values.reshape(result.shape), casting="no")
            arrays[name] = result.array
    return invocation.returned(arrays)
