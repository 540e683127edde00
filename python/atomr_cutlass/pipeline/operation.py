"""Operations: the class that each implements once, and the registry through which everything else reaches them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import InvalidOperandError
from .operand_table import Arrays, OperandSlot, random_arrays
from .request_options import Option, RequestOptions

if TYPE_CHECKING:  # signatures name types that only operations construct
    import numpy as np

    from ..generator.key import KernelKey
    from .call import ParsedCall
    from .candidate import Candidate
    from .devices import Device
    from .plan import Plan
    from .probe import Probe
    from .request import Request
    from .search import KernelSearch

FOLDERS = ("gemm", "gated_gemm", "gemv", "grouped_gemm", "conv2d", "matmul", "quantize")
"""Folders of `ops`: the module `operation` of each has OPERATIONS, those that it implements."""


CALL_OPTIONS = (
    "c", "out", "alpha", "beta", "bias", "activation", "epilogue", "scale_a", "scale_b", "scale_d", "amax", "out_dtype",
    "precision", "fast_accum", "stream", "backend", "jit", "workspace_size", "batch_invariant", "check",
)  # fmt: skip
"""Options of a call. Each operation's function takes them, or the operation says why not."""

NO_CHECK = MappingProxyType({"check": "extents are those of the arrays' shapes, which every call checks"})
"""Of operations that read no extents on the device."""


T = TypeVar("T")
RequestT = TypeVar("RequestT", bound="Request")


class Operation:
    """One operation.

    Attributes:
        name: as kernels and the command line have it.
        function: the public name that takes its options; empty where that is the operation's.
        request_type: the class that describes one call, if there is one.
        message: the name under which actors get such requests, as in `CutlassMsg.Gemm`.
        refuses: of CALL_OPTIONS, those that its function does not take, each with the reason.
        spelled: of CALL_OPTIONS, those that its function takes under another name.
        unplanned: why no plans are made of requests; empty where they are.
    """

    name: str
    function: str = ""
    refuses: Mapping[str, str] = NO_CHECK
    spelled: Mapping[str, str] = {}
    unplanned: str = ""
    request_type: type | None = None
    message: str | None = None


class CallOperation(Operation, abc.ABC):
    """An operation whose requests have their arrays, and may have a `reply`."""

    unplanned = "a request has its arrays: there is none without"

    @abc.abstractmethod
    def call(self, request: Any) -> ParsedCall:
        """Checks the arrays of a request."""


def settled(reply: Any, work: Callable[[], T]) -> T:
    """Does work and tells a reply, if there is one, how it ended. One that was cancelled is not told."""
    if reply is None:
        return work()
    from concurrent.futures import InvalidStateError  # which a process with a reply has loaded

    try:
        result = work()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            reply.set_exception(error)
        raise
    with contextlib.suppress(InvalidStateError):
        reply.set_result(result)
    return result


class PlannedOperation(Operation, abc.ABC, Generic[RequestT]):
    """An operation whose requests have no arrays: plans are made from them, explained, run on random operands and sent.

    Attributes:
        bound: the operand that a plan can keep.
        options: of the command line, beside those of every operation.
    """

    request_type: type[RequestT]
    bound: str
    options: tuple[Option, ...] = ()

    @abc.abstractmethod
    def operands(self, request: RequestT) -> tuple[OperandSlot, ...]:
        """The operands that a plan of this request is called with, in order; the result is the last."""

    @abc.abstractmethod
    def optional_names(self, request: RequestT) -> tuple[str, ...]:
        """The operands that requests of this kind may have, without those of an epilogue's tree and the result."""

    def names(self, request: RequestT) -> tuple[str, ...]:
        """The operands that requests of this kind may have, those of this one first; without the result."""
        own = tuple(slot.name for slot in self.operands(request)[:-1])
        return own + tuple(name for name in self.optional_names(request) if name not in own)

    def extents(self, request: RequestT) -> dict[str, Any]:
        """The request's extents, as JSON-ready values: those of its shape where an operation says nothing else."""
        return dataclasses.asdict(request.shape)

    def products(self, request: RequestT) -> int:
        """The number of pairs of elements that the request multiplies and adds."""
        return math.prod(self.extents(request).values())

    def describe(self, request: RequestT) -> str:
        """The request's extents in words; `batch` is how many times."""
        extents = self.extents(request)
        batch = extents.pop("batch")
        return "x".join(map(str, extents.values())) + (f", {batch} times," if batch > 1 else "")

    @abc.abstractmethod
    def request(self, options: RequestOptions) -> RequestT:
        """The request that options of the command line describe.

        Raises:
            InvalidOperandError: an option that is no such thing; names it and what is valid.
            UnsupportedError: no kernel could ever serve it.
        """

    @abc.abstractmethod
    def plan(self, request: RequestT, device: int, **options: Any) -> Plan:
        """A plan on the GPU of an index. `options` are those that every operation's plans take."""

    def bound_slot(self, request: RequestT) -> OperandSlot:
        """The operand that a plan of this request can keep."""
        return next(slot for slot in self.operands(request) if slot.name == self.bound)

    def launch(self, plan: Any, request: RequestT, arrays: Mapping[str, Any], **options: Any) -> None:
        """Launches a plan with its operands, in the order of the operand table. `options`: alpha, beta and stream."""
        *given, out = arrays.values()
        plan(*given, out=out, **options)

    def write_empty(self, request: RequestT, arrays: Mapping[str, Any], stream: int) -> None:
        """Writes the outputs beside a result without elements: where an operation has such, reductions of nothing."""

    def result_layout(self, request: RequestT) -> str:
        """How callers name the dimensions of a result that is allocated for them, `nhwc` or `nchw`.

        Raises:
            InvalidOperandError: such a result cannot be allocated.
        """
        return "nhwc"

    def search(self, request: RequestT, device: Device) -> KernelSearch[Any] | None:
        """The kernels of a request; None where the result has no elements, so that nothing is launched.

        Raises:
            CutlassError: no kernel ever serves it; says why.
        """
        return request.search(device)

    def random_arrays(self, request: RequestT, generator: np.random.Generator) -> Arrays:
        """Random operands on the host, in the forms that the reference takes; results hold what no kernel computes."""
        return random_arrays(generator, self.operands(request))

    def gpu_forms(self, request: RequestT, arrays: Arrays) -> Arrays:
        """The operands of `random_arrays` in the forms that plans take."""
        return arrays

    @abc.abstractmethod
    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[RequestT, Candidate[Any]]:
        """A small request whose tree is that of a kernel's epilogue, and the kernel as a candidate for it.

        Args:
            key: the kernel, which has a tree.
            epilogue: the one with that tree, of those that the kernel computes.
            device: where it is launched.
        """

    @abc.abstractmethod
    def probe(self, request: RequestT, arrays: Arrays) -> Probe[RequestT]:
        """The request on arrays of the host: computed by the reference, or checked with it."""


@functools.cache
def operations() -> Mapping[str, Operation]:
    """Every operation by its name. The first call imports them."""
    modules = (importlib.import_module(f"..ops.{folder}.operation", __package__) for folder in FOLDERS)
    return {operation.name: operation for module in modules for operation in module.OPERATIONS}


@functools.cache
def planned_operations() -> Mapping[str, PlannedOperation[Any]]:
    """The operations that plans are made of, by name."""
    return {name: found for name, found in operations().items() if isinstance(found, PlannedOperation)}


@functools.cache
def _by_request_type() -> dict[type, PlannedOperation[Any]]:
    return {operation.request_type: operation for operation in planned_operations().values()}


def refusal_of(function: str, option: str) -> str | None:
    """Why a public function does not take an option; None where no operation says so."""
    found = (operation for operation in operations().values() if function == (operation.function or operation.name))
    return next((operation.refuses.get(option) for operation in found), None)


def operation_of(request: Any) -> PlannedOperation[Any]:
    """The operation of a request that plans are made from.

    Raises:
        InvalidOperandError: it is no such request.
    """
    known = _by_request_type()
    for kind in type(request).__mro__:
        if kind in known:
            return known[kind]
    *names, last = (kind.__name__ for kind in known)
    raise InvalidOperandError(f"request is a {type(request).__name__}; expected a {', '.join(names)} or {last}")


def described(request: Request) -> dict[str, Any]:
    """Which operation a request is of, and its extents and element type, as JSON-ready values."""
    shape = operation_of(request).extents(request)
    return {"op": request.plan_key().op, "shape": shape, "dtype": request.dtype.value}


@functools.lru_cache(maxsize=1024)
def operands_of(request: Request) -> tuple[OperandSlot, ...]:
    """The operand table of a request; whoever serves equal requests makes it once.

    Raises:
        InvalidOperandError: it is no such request.
    """
    return operation_of(request).operands(request)


def request_from(name: str, options: RequestOptions) -> Request:
    """The request that options of the command line describe.

    Args:
        name: of the operation.
        options: what was given.

    Raises:
        InvalidOperandError: no such operation, or an option that is no such thing, or not for this operation; names it
            and what is valid.
        UnsupportedError: no kernel could ever serve it.
    """
    known = planned_operations()
    if name not in known:
        raise InvalidOperandError(f"--op is {name!r}; valid: {', '.join(known)}")
    named = {other: {option.name: option for option in operation.options} for other, operation in known.items()}
    for option in sorted({option for options in named.values() for option in options} - set(named[name])):
        if options.given(option) is not None:
            fits = ", ".join(other for other, others in named.items() if option in others)
            raise InvalidOperandError(f"--{option.replace('_', '-')} is not for {name}; it is for {fits}")
    request: Request = known[name].request(options)
    return request
