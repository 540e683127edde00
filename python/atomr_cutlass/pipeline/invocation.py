"""The call of a function: its arguments, its options, and the parsed form for `call.run`."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from .. import _core
from ..arrays import operands
from ..arrays.arguments import check_backend, check_followers, check_scalars, refuse_jax_out
from ..arrays.layouts import permuted
from ..arrays.numerics import AnyArray
from ..arrays.operands import CUDA
from ..checks import NUMBERS, check_number, check_options
from ..generator.epilogue.tree import RESULT
from ..jit import kernels
from .call_options import CallOptions
from .plan import BACKENDS as GPU_BACKENDS
from .reduction import is_batch_invariant

BACKENDS = (*GPU_BACKENDS, "reference")

SCALES = ("scale_a", "scale_b", "scale_d")


class Result(NamedTuple):
    """An array that a call writes.

    Attributes:
        shape: its extents, as kernels have them.
        element: DLPack's (type code, bits).
        array: the caller's; None where a new one is made.
        view: of that array.
        made: whether the array is a new one, which JAX imports only when it is finished.
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
        arrays: of the operation by name, None for those that are not given; scales may be numbers. Where the first is a
            list, others may be too. The first says of which kind results are.
        out: where the result is to be written, or None; then a list.
        options: those that functions share.
        epilogue: a tree or a function, or None.
        others: the arguments for the epilogue by name, which then may be lists too.
        own: the options of the function alone.
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
        """The first array, whose kind results are of."""
        first = next(iter(self.arrays.values()))
        return first[0] if isinstance(first, (list, tuple)) and first else first

    @property
    def c(self) -> Any:
        """C, unless it is an operand of the epilogue: then there is no beta."""
        return None if self.epilogue is not None and self.options.beta == 0 else self.arrays.get("c")

    @property
    def follows(self) -> bool:
        """Whether an epilogue, a bias or an activation follows the product."""
        return not (self.epilogue is self.arrays.get("bias") is self.options.activation is None)

    @property
    def binds(self) -> bool:
        """Whether what follows is bound as an epilogue: the reference has bias and activation itself."""
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
        """Alpha and beta, with the scale factors that are numbers."""
        alpha, beta, numbers = self.options.alpha, self.options.beta, numbers_of(self.arrays)
        if not numbers:
            return alpha, beta
        of_d = float(numbers.get("scale_d", 1))
        return math.prod(map(float, numbers.values()), start=float(alpha)), float(beta) * of_d

    def check(self, function: str, **more: Any) -> None:
        """Checks everything that needs no array.

        Args:
            function: its name.
            more: options of the function's own by name; see `check_options`.

        Raises:
            InvalidOperandError: names the argument.
        """
        options = self.options
        check_options(**{name: value for name, value in options._asdict().items() if name != "stream"}, **more)
        numbers = numbers_of(self.arrays)
        for name, scale in numbers.items():
            check_number(scale, name)
        check_backend(options.backend, BACKENDS)
        if options.jit is not None:
            kernels.policy(options.jit)
        check_followers(function, self.epilogue, options.activation, self.others)
        check_scalars(options.alpha, options.beta, self.c, numbers.get("scale_d"))
        refuse_jax_out(self.out)


@dataclass(frozen=True, kw_only=True)
class Invocation(abc.ABC):
    """A parsed call: the arrays that it reads and writes, how to plan it, and its reference.

    Attributes:
        call: the arguments.
        inputs: views of the arrays that are read, by name; the operands that decide about the device come first.
        results: the arrays that are written, by name, the caller's and those to be made.
        arrange: makes of results by name what the caller gets; None: that is D. It outlives the call.
        axes: the kernels' dimensions in the caller's order; empty where that is the same.
        memory: whether arrays stand for memory: views have other extents and strides than the caller's arrays.
        numpy_on_host: whether NumPy serves host arrays, with or without a GPU.
    """

    call: Call
    inputs: dict[str, _core.Operand]
    results: dict[str, Result]
    arrange: Callable[[Mapping[str, Any]], Any] | None = None
    axes: tuple[int, ...] = ()
    memory: bool = False
    numpy_on_host: ClassVar[bool] = False

    @property
    def first(self) -> _core.Operand:
        """The operand that decides about the device."""
        return next(iter(self.inputs.values()))

    @property
    def on_gpu(self) -> bool:
        """Whether the operands are on a GPU."""
        return self.first.device_type == CUDA

    @property
    def views(self) -> dict[str, _core.Operand]:
        """All operands on a GPU, results among them, by name."""
        results = ((name, result.view) for name, result in self.results.items())
        return self.inputs | {name: view for name, view in results if view is not None}

    def present(self, array: Any) -> Any:
        """An array or a view with its dimensions in the caller's order."""
        return permuted(array, self.axes)

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

    def returned(self, arrays: Mapping[str, Any]) -> Any:
        """The function's result, of results by name."""
        return arrays[RESULT] if self.arrange is None else self.arrange(arrays)

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
        """The names of a plan's operands, in its order; the last is its result."""
        return tuple(name for name in made.slots if name in self.inputs or name in self.results)

    def uploaded(self) -> dict[str, _core.Operand]:
        """Copies on GPU 0 of the arrays that are read, and of results whose elements need not all be written."""
        return {name: operands.upload(operands.to_numpy(view), 0) for name, view in self.inputs.items()}

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:  # noqa: B027 - likewise
        """Writes the results that have elements where there is nothing to launch, in the order of a stream."""

    def fetch(self, view: _core.Operand) -> AnyArray:
        """A host array of a view."""
        return operands.download(view) if self.on_gpu else operands.to_numpy(view)


def labelled(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by label: the members of a list each by its own, such as `a[0]`, others by their names."""
    found: dict[str, Any] = {}
    for name, given in arrays.items():
        if isinstance(given, (list, tuple)):
            found |= zip(_labels(name, len(given)), given, strict=True)
        else:
            found[name] = given
    return found


@functools.lru_cache(256)
def _labels(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}[{index}]" for index in range(count))


def numbers_of(arrays: Mapping[str, Any]) -> dict[str, float]:
    """The scales that are numbers."""
    return {name: arrays[name] for name in SCALES if isinstance(arrays.get(name), NUMBERS)}
