"""The one runner of a function's call: kept plan, else parse, then reference, host copies or GPU, deliver.

A function of the package gives its arguments to `run` together with a parser, which makes an `Invocation` of them: the
views of what is read and written, and how that is planned and what its reference is. Everything else is done here.
"""

from __future__ import annotations

import abc
import contextlib
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from .. import _core
from ..arrays import operands
from ..arrays.arguments import check_backend, check_followers, check_scalars, on_reference, refuse_jax_out
from ..arrays.numerics import AnyArray
from ..arrays.operands import CPU, CUDA
from ..checks import NUMBERS, check_number, check_options
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import RESULT, EpilogueVisitorTree
from ..jit import kernels
from .plan import BACKENDS as GPU_BACKENDS
from .plan_cache import PlanCache

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 2048

_NUMBER_TYPES = frozenset({int, float, np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64})
_SCALES = ("scale_a", "scale_b", "scale_d")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class CallOptions(NamedTuple):
    """The options that functions share. Each function has those that mean something to it.

    Attributes:
        activation: a name of `reference.ACTIVATIONS`.
        out_dtype: element type of the result; defaults to that of the first operand, bf16 for fp8 and fp4.
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.
        fast_accum: lets fp8 products be added up in the tensor cores alone, which is faster and keeps about 14 bits;
            ignored for other dtypes.
        backend: `auto` (a GPU kernel, prebuilt or compiled; without a GPU the reference, warning once), `prebuilt`,
            `jit` or `reference`.
        jit: what to do where the table lacks the kernel: `auto` compiles it, `off` raises, `background` starts with the
            best kernel of the table and turns to the compiled one when it is ready; None leaves it to
            ATOMR_CUTLASS_JIT.
        alpha: scalar.
        beta: scalar. With 0, there is no C.
        stream: where to launch: an integer handle or a stream object; defaults to the current stream of the framework
            of the first operand.
    """

    activation: str | None = None
    out_dtype: CutlassDtype | None = None
    precision: str | None = None
    fast_accum: bool = False
    backend: str = "auto"
    jit: str | None = None
    alpha: float = 1.0
    beta: float = 0.0
    stream: Any = None


Options = tuple["str | None", "CutlassDtype | None", "str | None", bool, str, "str | None"]
"""The fields of `CallOptions` up to `jit`: those that decide about a plan."""


def documented(function: FunctionT) -> FunctionT:
    """Puts the texts of `CallOptions` into a function's docstring, in the place of `{name}`."""
    if function.__doc__ and CallOptions.__doc__:
        texts = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", CallOptions.__doc__, re.MULTILINE))
        function.__doc__ = re.sub(r"\{(\w+)\}", lambda found: texts[found[1]], function.__doc__)
    return function


class Result(NamedTuple):
    """An array that a call writes.

    Attributes:
        shape: its extents, as kernels have them.
        element: DLPack's (type code, bits).
        array: the caller's; None where a new one is made.
        view: of the caller's.
    """

    shape: tuple[int, ...]
    element: tuple[int, int]
    array: Any = None
    view: _core.Operand | None = None


@dataclass(frozen=True)
class Call:
    """The arguments of a function.

    Attributes:
        arrays: of the operation by name, None for those that are not given; scales may be numbers.
        others: the arguments for the epilogue by name.
        out: where the result is to be written, or None.
        epilogue: a tree or a function, or None.
        options: those that functions share.
        own: those of the function alone.
    """

    arrays: dict[str, Any]
    others: dict[str, Any]
    out: Any
    epilogue: Any
    options: CallOptions
    own: tuple[Any, ...]

    @property
    def c(self) -> Any:
        """C, unless it is an operand of the epilogue: then there is no beta."""
        return None if self.epilogue is not None and self.options.beta == 0 else self.arrays.get("c")

    @property
    def scalars(self) -> tuple[float, float]:
        """Alpha and beta, with the scale factors that are numbers."""
        return _folded(self.options.alpha, self.options.beta, _numbers(self.arrays))

    def check(self, function: str, **more: Any) -> None:
        """Checks what no array is needed for.

        Args:
            function: its name.
            more: options of the function's own by name; see `check_options`.

        Raises:
            InvalidOperandError: names the argument.
        """
        options = self.options
        check_options(
            backend=options.backend, jit=options.jit, precision=options.precision, fast_accum=options.fast_accum,
            activation=options.activation, out_dtype=options.out_dtype, alpha=options.alpha, beta=options.beta, **more,
        )  # fmt: skip
        numbers = _numbers(self.arrays)
        for name, scale in numbers.items():
            check_number(scale, name)
        check_backend(options.backend, BACKENDS)
        if options.jit is not None:
            kernels.policy(options.jit)
        check_followers(function, self.epilogue, options.activation, self.others)
        check_scalars(options.alpha, options.beta, self.c, numbers.get("scale_d"))
        refuse_jax_out(self.out)


def _the_result(results: Mapping[str, Any]) -> Any:
    return results[RESULT]


def _as_it_is(array: Any) -> Any:
    return array


@dataclass(frozen=True, kw_only=True)
class Invocation(abc.ABC):
    """A call that has been parsed: what it reads and writes, how that is planned, and what its reference is.

    Attributes:
        call: the arguments.
        inputs: views of what is read, by name; the operands that decide about the device come first.
        results: what is written, by name, the caller's arrays and those to be made.
        arrange: makes of results by name what the caller gets. It outlives the call, as `present` does.
        present: makes of an array or a view one with its dimensions in the caller's order.
        numpy_on_host: whether NumPy serves host arrays, with or without a GPU.
    """

    call: Call
    inputs: dict[str, _core.Operand]
    results: dict[str, Result]
    arrange: Callable[[Mapping[str, Any]], Any] = _the_result
    present: Callable[[Any], Any] = _as_it_is
    numpy_on_host: ClassVar[bool] = False

    @property
    def on_gpu(self) -> bool:
        """Whether the operands are on a GPU."""
        return next(iter(self.inputs.values())).device_type == CUDA

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return 0 in self.results[RESULT].shape

    @property
    def by_reference(self) -> bool:
        """Whether the reference serves the call although kernels are asked for: host arrays without elements."""
        return self.empty and not self.on_gpu

    def check_kernels(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuses what the reference computes and no kernel does.

        Raises:
            UnsupportedError: says why.
        """

    @abc.abstractmethod
    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Any:
        """The plan of views on a GPU.

        Args:
            views: inputs and results by name.
            like: an array whose framework allocates the workspace, where it can.
            stream: where the first launch will be.
        """

    @abc.abstractmethod
    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        """The results by name, of host arrays by name."""

    def order(self, made: Any) -> tuple[str, ...]:
        """The names of what a plan takes, in its order; the last is its result."""
        return tuple(made.slots)

    def uploaded(self) -> dict[str, _core.Operand]:
        """Copies on GPU 0 of what is read."""
        return {name: operands.upload(operands.to_numpy(view), 0) for name, view in self.inputs.items()}

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:  # noqa: B027 - likewise
        """Writes the results that have elements where there is nothing to launch, in the order of a stream."""

    def fetch(self, view: _core.Operand) -> AnyArray:
        """A host array of a view."""
        return operands.download(view) if self.on_gpu else operands.to_numpy(view)


class _Kept:
    """A plan that calls whose operands have the same layouts use again.

    Attributes:
        plan: what is launched.
        taken: the names of its operands but the last, which is its result.
        simple: whether that is all that the call writes, and is given or made by the plan.
        used: `kept_plans.evictions` at its last use.
    """

    __slots__ = ("_arrange", "_last", "_present", "_results", "plan", "simple", "taken", "used")

    def __init__(self, made: Any, invocation: Invocation, order: tuple[str, ...], *, allocates: bool) -> None:
        """Keeps a plan.

        Args:
            made: the plan.
            invocation: that it was made for; nothing of its arrays is kept.
            order: the names of its operands.
            allocates: whether the plan may make the result.
        """
        self.plan = made
        self.taken = order[:-1]
        self._last = order[-1]
        self._results = {name: (result.shape, result.element) for name, result in invocation.results.items()}
        self._arrange, self._present = invocation.arrange, invocation.present
        self.simple = allocates and len(self._results) == 1
        self.used = -1

    def launch(self, arrays: dict[str, Any], out: Any, alpha: float, beta: float, stream: Any, like: Any) -> Any:
        """Launches the plan.

        Args:
            arrays: of the call, by name, or views of them.
            out: of the call, or a view of it.
            alpha: scalar.
            beta: scalar.
            stream: of the call.
            like: the call's first array.
        """
        with operands.launching(stream, like) as launch:
            return self._launch(arrays, out, alpha, beta, launch.handle, like)

    def _launch(self, arrays: dict[str, Any], out: Any, alpha: float, beta: float, stream: int, like: Any) -> Any:
        given = {**arrays, RESULT: out}
        made = {}
        for name, (shape, element) in self._results.items():
            if given.get(name) is None:
                made[name] = operands.empty_of(shape, element, self.plan.device, like)
                given[name] = self._present(made[name][1])
        taken = [given[name] for name in self.taken]
        self.plan(*taken, out=given[self._last], alpha=alpha, beta=beta, stream=stream)
        for name, (array, view) in made.items():
            given[name] = self._present(operands.finished(array, view, stream))
        return self._arrange(given)


kept_plans: PlanCache[_Kept] = PlanCache(PLANS_KEPT)
"""Plans of all functions, by what decides about them: the layouts of all operands, and every option."""


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
    """
    key: Hashable = None
    layouts = None
    given = arrays if not others else {**arrays, **others}
    keyed = (
        (epilogue is None or type(epilogue) is EpilogueVisitorTree)  # a function may compute something else next time
        and (options[3] is False or options[3] is True)  # 1 == True
        and type(alpha) in _NUMBER_TYPES and type(beta) in _NUMBER_TYPES
    )  # fmt: skip
    names = tuple(others) if others else None
    if keyed:
        layouts = _core.signature(*given.values(), out)
        if layouts is not None:
            key = (parse, layouts, options, epilogue, alpha == 0, beta == 0, own, names, None)
            kept = _kept(key)
            if kept is not None:
                if kept.simple:
                    taken = [given[name] for name in kept.taken]
                    return kept.plan(*taken, out=out, alpha=alpha, beta=beta, stream=stream)
                return kept.launch(given, out, alpha, beta, stream, next(iter(arrays.values())))
    like = next(iter(arrays.values()))
    with operands.launching(stream, like):
        if keyed and layouts is None and (adapted := _adapted(given, out, alpha, beta)) is not None:
            views, target, first, second, numbers = adapted
            layouts = _core.signature(*views.values(), target)
            if layouts is not None:
                key = (parse, layouts, options, epilogue, first == 0, second == 0, own, names, numbers)
                kept = _kept(key)
                if kept is not None:
                    return kept.launch(views, target, first, second, stream, like)
        call = Call(arrays, others or {}, out, epilogue, CallOptions(*options, alpha, beta, stream), own)
        return _served(parse(call), key)


def _kept(key: Hashable) -> _Kept | None:
    """The plan that is kept by a key."""
    try:
        found = kept_plans.peek(key)
    except InvalidOperandError:  # no hash: an option that is no option
        return None
    if found is not None and found.used != kept_plans.evictions:  # plans were dropped since its last use
        found.used = kept_plans.evictions
        kept_plans.get(key)
    return found


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
    first, like = next(iter(views.values())), next(iter(call.arrays.values()))
    stream = operands.launch_stream().handle
    arrays, made = {}, {}
    for name, result in invocation.results.items():
        arrays[name] = result.array
        if result.view is None:
            made[name], views[name] = operands.empty_of(result.shape, result.element, first.device, like)
        else:
            views[name] = result.view
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
        _, views[name] = operands.empty_of(result.shape, result.element, 0, None)
    _launch(invocation, views, None, 0, None)
    return _delivered(invocation, {name: operands.download(views[name]) for name in invocation.results})


def _launch(invocation: Invocation, views: dict[str, _core.Operand], like: Any, stream: int, key: Hashable) -> None:
    made = invocation.plan(views, like=like, stream=stream)
    order = invocation.order(made)
    taken = [invocation.present(views[name]) for name in order]
    alpha, beta = invocation.call.scalars
    made(*taken[:-1], out=taken[-1], alpha=alpha, beta=beta, stream=stream)
    if key is not None and getattr(made, "checked", True):
        in_order = invocation.present is _as_it_is
        allocates = invocation.results[order[-1]].array is not None or (in_order and _core.has_exchange_api(like))
        with contextlib.suppress(InvalidOperandError):  # an option without a hash, such as a list of strides
            kept_plans.insert(_Kept(made, invocation, order, allocates=allocates), key)


def _on_reference(invocation: Invocation) -> Any:
    return _delivered(
        invocation, invocation.reference({name: invocation.fetch(view) for name, view in invocation.inputs.items()})
    )


def _delivered(invocation: Invocation, computed: Mapping[str, AnyArray]) -> Any:
    """Host results, in the caller's arrays or in new ones of the kind of the first operand."""
    like = next(iter(invocation.call.arrays.values()))
    device = next(iter(invocation.inputs.values())).device
    arrays = {}
    for name, values in computed.items():
        shape, element, array, view = invocation.results[name]
        if view is not None:
            if invocation.on_gpu:
                operands.copy_in(values.reshape(shape), view)
            else:
                np.copyto(operands.to_numpy(view), values.reshape(shape), casting="no")
        elif invocation.on_gpu:
            array, view = operands.empty_of(shape, element, device, like)
            operands.copy_in(values, view)
            array = invocation.present(operands.finished(array, view, 0))
        else:
            array = invocation.present(operands.host_result(values, like))
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
    numbers = _numbers(given)
    if bool in map(type, numbers.values()):
        return None
    arrays = {name: None if name in numbers else array for name, array in given.items()}
    try:
        factors = _folded(alpha, beta, numbers)
        if not _core.has_exchange_api(like) and not isinstance(like, _core.Operand):
            arrays = {name: None if one is None else operands.as_operand(one, name) for name, one in arrays.items()}
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


def _numbers(arrays: Mapping[str, Any]) -> dict[str, float]:
    """The scales that are numbers."""
    return {name: arrays[name] for name in _SCALES if isinstance(arrays.get(name), NUMBERS)}


def _folded(alpha: float, beta: float, numbers: Mapping[str, float]) -> tuple[float, float]:
    """The scalars, multiplied by the scales that are numbers."""
    for scale in numbers.values():
        alpha = alpha * float(scale)
    return alpha, beta * float(numbers["scale_d"]) if "scale_d" in numbers else beta
