"""The one runner of a function's call: kept plan, else parse, then reference, host copies or GPU, deliver.

A function of the package gives its arguments to `run` together with a parser, which makes an `Invocation` of them: the
views of what is read and written, and how that is planned and what its reference is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import _core
from ..arrays import operands
from ..arrays.arguments import on_reference
from ..arrays.layouts import relaid
from ..arrays.numerics import AnyArray
from ..arrays.operands import CPU
from ..errors import InvalidOperandError
from ..generator.epilogue.tree import RESULT, EpilogueVisitorTree
from .invocation import Call, CallOptions, Invocation, Options, Result, as_it_is, folded, labelled, numbers_of
from .plan_cache import PlanCache

PLANS_KEPT = 2048

_NUMBER_TYPES = frozenset({int, float, np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64})


class _Kept:
    """A plan that calls whose operands have the same layouts use again.

    Attributes:
        plan: the plan to launch.
        taken: the names of its operands but the last, which is its result.
        simple: whether that is all that the call writes, and is given or made by the plan.
        used: `kept_plans.evictions` at its last use.
    """

    __slots__ = ("_arrange", "_last", "_layouts", "_present", "_results", "plan", "simple", "taken", "used")

    def __init__(
        self, made: Any, invocation: Invocation, taken: Mapping[str, _core.Operand], *, allocates: bool
    ) -> None:
        """Keeps a plan.

        Args:
            made: the plan.
            invocation: that it was made for; nothing of its arrays is kept.
            taken: views of its operands by name, in its order.
            allocates: whether the plan may make the result.
        """
        order = tuple(taken)
        self.plan = made
        self.taken = order[:-1]
        self._last = order[-1]
        self._results = {name: (result.shape, result.element) for name, result in invocation.results.items()}
        self._arrange, self._present = invocation.arrange, invocation.present
        self._layouts = (
            {name: (view.shape, view.strides) for name, view in taken.items()} if invocation.memory else None
        )
        self.simple = allocates and tuple(self._results) == (RESULT,) and self._layouts is None
        self.used = -1

    def launch(
        self, arrays: dict[str, Any], views: dict[str, Any], alpha: float, beta: float, stream: Any, like: Any
    ) -> Any:
        """Launches the plan.

        Args:
            arrays: of the call, by name, `out` among them.
            views: the same, or views of them.
            alpha: scalar.
            beta: scalar.
            stream: of the call.
            like: the call's first array.
        """
        with operands.launching(stream, like) as launch:
            return self._launch(arrays, dict(views), alpha, beta, launch.handle, like)

    def _launch(
        self, arrays: dict[str, Any], given: dict[str, Any], alpha: float, beta: float, stream: int, like: Any
    ) -> Any:
        made = {}
        for name, (shape, element) in self._results.items():
            if given.get(name) is None:
                made[name] = operands.empty_of(shape, element, self.plan.device, like)
                given[name] = self._present(made[name][1])
        if self._layouts is not None:
            given = {
                name: relaid(_core.Operand.of(given[name], name), *layout) for name, layout in self._layouts.items()
            }
        taken = [given[name] for name in self.taken]
        self.plan(*taken, out=given[self._last], alpha=alpha, beta=beta, stream=stream)
        new = {name: self._present(operands.finished(array, view, stream)) for name, (array, view) in made.items()}
        return self._arrange({**arrays, **new})


kept_plans: PlanCache[_Kept] = PlanCache(PLANS_KEPT)
"""Plans of all functions, by everything that they depend on: the layouts of all operands, and every option."""


def run(
    parse: Callable[[Call], Invocation],
    arrays: dict[str, Any],
    out: Any,
    options: Options,
    alpha: float = 1.0,
    beta: float = 0.0,
    stream: Any = None,
    epilogue: Any = None,
    others: dict[str, Any] | None = None,
    own: tuple[Any, ...] = (),
    parsed: bool = False,
) -> Any:
    """Serves a call of a function: with a kept plan, else by parsing it.

    Args:
        parse: checks the call in full before anything is allocated or launched.
        arrays: see `Call`, as for what follows; the first says of which kind results are.
        out: see there.
        options: see `Options`.
        alpha: see `CallOptions`, as for beta and stream.
        beta: see there.
        stream: see there.
        epilogue: see `Call`.
        others: see there.
        own: see there.
        parsed: whether the call is parsed although a plan is kept for it.
    """
    key: Hashable = None
    layouts = None
    like = next(iter(arrays.values()))
    given = arrays if not others else {**arrays, **others}
    target = out
    names = tuple(others) if others else None
    if isinstance(like, (list, tuple)):
        given, target = labelled({**given, RESULT: out}), None
        like, names = next(iter(given.values())), tuple(given)
    keyed = (
        (epilogue is None or type(epilogue) is EpilogueVisitorTree)  # a function may compute something else next time
        and (options[3] is False or options[3] is True)  # 1 == True
        and (options[7] is None or options[7] is False or options[7] is True)
        and type(alpha) in _NUMBER_TYPES and type(beta) in _NUMBER_TYPES
    )  # fmt: skip
    if keyed:
        layouts = _core.signature(*given.values(), target)
        if layouts is not None:
            key = (parse, layouts, options, epilogue, _is_zero(alpha), _is_zero(beta), own, names, None)
            kept = None if parsed else _kept(key)
            if kept is not None:
                if kept.simple:
                    taken = [given[name] for name in kept.taken]
                    return kept.plan(*taken, out=target, alpha=alpha, beta=beta, stream=stream)
                written = {**given, RESULT: out}
                # A plan refuses operands before it launches; parsing reports them in the caller's words.
                with contextlib.suppress(InvalidOperandError):
                    return kept.launch(written, {**given, RESULT: target}, alpha, beta, stream, like)
    with operands.launching(stream, like):
        if keyed and layouts is None and (adapted := _adapted(given, target, alpha, beta)) is not None:
            views, target, first, second, numbers = adapted
            layouts = _core.signature(*views.values(), target)
            if layouts is not None:
                key = (parse, layouts, options, epilogue, first == 0, second == 0, own, names, numbers)
                kept = None if parsed else _kept(key)
                if kept is not None:
                    written = {**given, RESULT: out}
                    with contextlib.suppress(InvalidOperandError):
                        return kept.launch(written, {**views, RESULT: target}, first, second, stream, like)
        call = Call(arrays, others or {}, out, epilogue, CallOptions(*options, alpha, beta, stream), own)
        return _served(parse(call), key)


def _is_zero(scalar: float) -> bool:
    """Whether it is 0. NumPy takes microseconds to compare its own scalars."""
    return scalar == 0 if type(scalar) is float or type(scalar) is int else float(scalar) == 0


def _kept(key: Hashable) -> _Kept | None:
    """The plan that is kept by a key, if any is."""
    try:
        found = kept_plans.peek(key)
    except InvalidOperandError:  # no hash: an option that is no option
        return None
    if found is not None and found.plan.superseded:
        return None
    if found is not None and found.used != kept_plans.evictions:  # plans were dropped since its last use
        found.used = kept_plans.evictions
        kept_plans.get(key)
    return found


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
        results = {
            name: Result(result.shape, result.element, *operands.empty_of(
                result.shape, result.element, next(iter(invocation.inputs.values())).device, invocation.call.like
            )) if invocation.on_gpu and result.view is None else result
            for name, result in invocation.results.items()
        }  # fmt: skip
        return cls(replace(invocation, results=results), operands.launch_stream().handle)

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are on a GPU."""
        return self.invocation.on_gpu

    @property
    def device(self) -> int:
        """Index of the GPU, of that which serves host arrays for these."""
        return next(iter(self.invocation.inputs.values())).device if self.on_gpu else 0

    def on(self, stream: int) -> ParsedCall:
        """The same on another stream."""
        return replace(self, stream=stream)

    def run(self) -> Any:
        """Computes; what the function returns, which on a GPU is in flight on the stream."""
        with operands.launching(self.stream, None, awaited=True):
            return _served(self.invocation, None)


def _served(invocation: Invocation, key: Hashable) -> Any:
    """Runs a call that no kept plan serves, and keeps its plan by the key, if there is one."""
    first = next(iter(invocation.inputs.values()))
    by_numpy = invocation.numpy_on_host and first.device_type == CPU
    if by_numpy or on_reference(invocation.call.options.backend, first, stacklevel=5):
        return _on_reference(invocation)
    invocation.check_kernels()
    if invocation.by_reference:
        return _on_reference(invocation)
    return _on_host(invocation) if first.device_type == CPU else _on_gpu(invocation, key)


def _on_gpu(invocation: Invocation, key: Hashable) -> Any:
    call, views = invocation.call, dict(invocation.inputs)
    first, like = next(iter(views.values())), call.like
    stream = operands.launch_stream().handle
    arrays, made = {RESULT: call.out}, {}
    for name, result in invocation.results.items():
        arrays[name] = result.array
        if result.view is None:
            made[name], views[name] = operands.empty_of(result.shape, result.element, first.device, like)
        else:
            views[name] = result.view
            if result.array is None:  # of JAX, which imports finished results only
                made[name] = None
    if invocation.empty:
        invocation.write_nothing(views, stream)
    else:
        _launch(invocation, views, like, stream, key)
    for name, array in made.items():
        arrays[name] = invocation.present(operands.finished(array, views[name], stream))
    return invocation.arrange(arrays)


def _on_host(invocation: Invocation) -> Any:
    """Copies host operands to GPU 0, computes there, and copies the results back."""
    views = invocation.uploaded()
    for name, result in invocation.results.items():
        if name not in views:
            _, views[name] = operands.empty_of(result.shape, result.element, 0, None)
    _launch(invocation, views, None, 0, None)
    return _delivered(invocation, {name: operands.download(views[name]) for name in invocation.results})


def _launch(invocation: Invocation, views: dict[str, _core.Operand], like: Any, stream: int, key: Hashable) -> None:
    kept = _kept(key)
    made = invocation.plan(views, like=like, stream=stream) if kept is None else kept.plan
    taken = {name: views[name] for name in invocation.order(made)}
    *given, result = map(invocation.present, taken.values())
    alpha, beta = invocation.call.scalars
    made(*given, out=result, alpha=alpha, beta=beta, stream=stream)
    if key is not None and kept is None and getattr(made, "checked", True):
        in_order = invocation.present is as_it_is
        allocates = invocation.results[next(reversed(taken))].array is not None or (
            in_order and _core.has_exchange_api(like)
        )
        with contextlib.suppress(InvalidOperandError):  # an option without a hash, such as a list of strides
            kept_plans.insert(_Kept(made, invocation, taken, allocates=allocates), key)


def _on_reference(invocation: Invocation) -> Any:
    return _delivered(
        invocation, invocation.reference({name: invocation.fetch(view) for name, view in invocation.inputs.items()})
    )


def _delivered(invocation: Invocation, computed: Mapping[str, AnyArray]) -> Any:
    """Host results, in the caller's arrays or in new ones of the kind of the first operand."""
    call = invocation.call
    device = next(iter(invocation.inputs.values())).device
    arrays = {RESULT: call.out}
    for name, values in computed.items():
        shape, element, array, view = invocation.results[name]
        if view is not None:
            if invocation.on_gpu:
                operands.copy_in(values.reshape(shape), view)
            else:
                np.copyto(operands.to_numpy(view), values.reshape(shape), casting="no")
        elif invocation.on_gpu:
            array, view = operands.empty_of(shape, element, device, call.like)
            operands.copy_in(values, view)
            array = invocation.present(operands.finished(array, view, 0))
        else:
            array = invocation.present(operands.host_result(values, call.like))
        arrays[name] = array
    return invocation.arrange(arrays)


def _adapted(
    given: dict[str, Any], out: Any, alpha: float, beta: float
) -> tuple[dict[str, Any], Any, float, float, tuple[str, ...]] | None:
    """The arguments of calls whose scales are numbers, or with arrays that C++ does not read, as it reads them.

    Returns:
        (arrays by name without those scales, and `out`, both as views for arrays that C++ does not read; the scalars
        multiplied by those scales; the names of those scales). None for arguments that only parsing can refuse.
    """
    like = next(iter(given.values()))
    if _in_host_memory(like) or operands.is_jax(out):
        return None
    numbers = numbers_of(given)
    if bool in map(type, numbers.values()):
        return None
    arrays = {name: None if name in numbers else array for name, array in given.items()}
    try:
        factors = folded(alpha, beta, numbers)
        if not _core.has_exchange_api(like) and not isinstance(like, _core.Operand):
            arrays = {
                name: None if value is None else operands.as_operand(value, name) for name, value in arrays.items()
            }
            out = None if out is None else operands.as_operand(out, RESULT)
    except (InvalidOperandError, OverflowError):
        return None
    return arrays, out, *factors, tuple(numbers)


def _in_host_memory(array: Any) -> bool:
    """Whether an array says that it is in host memory, or does not say where."""
    try:
        return isinstance(array, np.ndarray) or array.__dlpack_device__()[0] == CPU
    except AttributeError:
        return False
    except (TypeError, ValueError):
        return True
