"""Operations: the class that each implements once, their operands, and the registry."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..arrays import numerics
from ..arrays.layouts import MatrixSpec
from ..arrays.numerics import BYTE
from ..errors import InvalidOperandError
from ..generator.epilogue.tree import MASK, EpilogueVisitorTree

if TYPE_CHECKING:  # signatures name types that only operations construct
    from ..epilogue.fusion import Fusion
    from ..generator.key import KernelKey
    from .call import Invocation
    from .devices import Device
    from .plan import Plan
    from .probe import Probe
    from .request import Option, Request, RequestOptions
    from .search import Candidate, KernelSearch

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
"""By name, as `OperandSlot.labels` has them."""

FOLDERS = ("gemm", "gated_gemm", "gemv", "grouped_gemm", "conv2d", "matmul", "quantize")
"""Folders of `ops`: the module `operation` of each has OPERATIONS, those that it implements."""

CALL_OPTIONS = (
    "c", "out", "alpha", "beta", "bias", "activation", "epilogue", "scale_a", "scale_b", "scale_d", "amax", "out_dtype",
    "precision", "fast_accum", "stream", "backend", "jit", "workspace_size", "batch_invariant", "check",
)  # fmt: skip
"""Options of a call. Each operation's function takes them, or the operation says why not."""

NO_CHECK = MappingProxyType({"check": "extents are those of the arrays' shapes, which every call checks"})
"""Of operations that read no extents on the device."""
IN_BACKGROUND = 'jit="background"'
"""The value of an option that not every operation that takes it has a use for."""

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound="Request")


@dataclass(frozen=True)
class OperandSlot:
    """An operand of a request.

    Attributes:
        name: the argument's name, `a`, `x`, `scale_a`, ..., or that of an epilogue tree's operand; `out` is the result.
        specs: the layout of its array, dimensions in the order of a call; of a list, of each of its arrays.
        element: DLPack's (type code, bits) where it is not that of the specs: fp4, e8m0 and masks are passed as bytes,
            and shapes and strides count bytes then.
    """

    name: str
    specs: tuple[MatrixSpec, ...]
    listed: bool = False
    written: bool = False
    element: tuple[int, int] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each array."""
        return tuple(f"{self.name}[{i}]" for i in range(len(self.specs))) if self.listed else (self.name,)


def epilogue_slots(fusion: Fusion | None) -> Iterator[OperandSlot]:
    """The operands of an epilogue: those that it reads, and those that it writes beside the result."""
    for array in () if fusion is None else fusion.arrays:
        shape, strides = array.slot or (array.shape, array.strides)
        spec = MatrixSpec(shape, strides, array.dtype, array.alignment)
        element = BYTE if array.kind == MASK else None
        yield OperandSlot(array.name, (spec,), written=fusion is not None and array in fusion.outputs, element=element)


def memory_order(spec: MatrixSpec) -> list[int]:
    """Dimensions by stride, the largest first."""
    return sorted(range(len(spec.shape)), key=lambda i: -spec.strides[i])


def _laid_out(spec: MatrixSpec, make: Callable[[tuple[int, ...]], Array]) -> Array:
    """A dense array with the dimension order of a spec. `make` gets its extents by stride, the largest first."""
    order = memory_order(spec)
    made: Array = make(tuple(spec.shape[i] for i in order)).transpose(np.argsort(order))
    return made


def _random_values(generator: np.random.Generator, slot: OperandSlot, spec: MatrixSpec) -> Array:
    """An operand: normally distributed; int8 and bytes uniform; scales around 1."""
    if slot.element == BYTE:
        return _laid_out(spec, lambda shape: generator.integers(0, 256, shape, np.uint8))
    kind = numerics.numpy_dtype(spec.dtype)
    if spec.dtype in numerics.INTEGER_DTYPES:
        return _laid_out(spec, lambda shape: generator.integers(-127, 128, shape, kind))
    if slot.name.startswith("scale"):
        return _laid_out(spec, lambda shape: np.exp2(generator.uniform(-1, 1, shape)).astype(kind))
    return _laid_out(spec, lambda shape: numerics.saturating_cast(generator.standard_normal(shape), spec.dtype))


def poison(slot: OperandSlot, spec: MatrixSpec) -> Array:
    """A result before it is computed: values that make an element that no kernel writes a mismatch."""
    if slot.element == BYTE:
        return _laid_out(spec, lambda shape: np.full(shape, 0xFF, np.uint8))
    kind = np.dtype(numerics.numpy_dtype(spec.dtype))
    value = np.iinfo(kind).min if spec.dtype in numerics.INTEGER_DTYPES else np.nan
    return _laid_out(spec, lambda shape: np.full(shape, value, kind))


class Operation:
    """One operation.

    Attributes:
        name: its name in kernel keys and on the command line.
        function: name of the public function; empty where it is `name`.
        request_type: the class that describes one call, if there is one.
        message: the name of an actor's message with such a request, as in `CutlassMsg.Gemm`.
        refuses: of CALL_OPTIONS, those that its function does not take, each with the reason.
        spelled: of CALL_OPTIONS and IN_BACKGROUND, those that its function takes under another name or as another.
        unplanned: why no plans are made from requests; empty where they are.
    """

    name: str
    function: str = ""
    refuses: Mapping[str, str] = NO_CHECK
    spelled: Mapping[str, str] = {}
    unplanned: str = ""
    request_type: type | None = None
    message: str | None = None


class CallOperation(Operation, abc.ABC):
    """An operation whose requests hold their arrays, and may have a `reply`."""

    unplanned = "a request has its arrays: there is none without"

    @abc.abstractmethod
    def call(self, request: Any) -> Invocation:
        """Checks the arrays of a request."""


def settled(reply: Any, work: Callable[[], T]) -> T:
    """Runs work and sets its result or exception on a reply, if there is one that was not cancelled."""
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
    """An operation whose requests hold no arrays: they can be planned, explained, run on random operands, and sent.

    Attributes:
        bound: name of the operand that a plan can keep.
        optional: names of operands that not every request has, apart from scales and those of a tree.
        options: of the command line, beside those of every operation.
        profiled: whether cutlass_profiler's CSV files have rows of its kernels.
        kernels: name of the operation whose kernels it has; empty where it has its own.
    """

    request_type: type[RequestT]
    bound: str
    optional: tuple[str, ...] = ("c",)
    options: tuple[Option, ...] = ()
    profiled: bool = False
    kernels: str = ""

    @abc.abstractmethod
    def operands(self, request: RequestT) -> tuple[OperandSlot, ...]:
        """The operands that a plan of this request is called with, in order; the result is the last."""

    def names(self, request: RequestT) -> tuple[str, ...]:
        """Names of the operands that requests may have, those of this request first; without the result."""
        own = tuple(slot.name for slot in operands_of(request)[:-1])
        return own + tuple(name for name in self.optional if name not in own)

    def extents(self, request: RequestT) -> dict[str, Any]:
        """The request's extents as JSON-ready values; by default those of its shape."""
        return dataclasses.asdict(request.shape)

    def products(self, request: RequestT) -> int:
        """The number of multiply-adds of the request."""
        return math.prod(self.extents(request).values())

    def describe(self, request: RequestT) -> str:
        """The request's extents in words."""
        extents = self.extents(request)
        batch = extents.pop("batch")
        return "x".join(map(str, extents.values())) + (f", {batch} times," if batch > 1 else "")

    @abc.abstractmethod
    def request(self, options: RequestOptions) -> RequestT:
        """The request that options of the command line describe; an error names the option and the valid values."""

    def recorded_fields(self, problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> Iterator[dict[str, Any]]:
        """Fields of the requests that may have a recorded problem, such as one for each layout; none if none can.

        Args:
            problem: the fields of a problem of the operation's kernels, as values of JSON (`tuning.fields_of`).
            tree: the tree of which the problem has the id.
        """
        return iter(())

    @abc.abstractmethod
    def plan(self, request: RequestT, device: int, **options: Any) -> Plan:
        """A plan on the GPU of an index. `options` are those that every operation's plans take."""

    def bound_slot(self, request: RequestT) -> OperandSlot:
        """The operand that a plan of this request can keep."""
        return next(slot for slot in operands_of(request) if slot.name == self.bound)

    def launch(self, plan: Any, request: RequestT, arrays: Mapping[str, Any], **options: Any) -> None:
        """Launches a plan with its operands, in the order of the operand table. `options`: alpha, beta and stream."""
        *given, out = arrays.values()
        plan(*given, out=out, **options)

    def write_empty(self, request: RequestT, arrays: Mapping[str, Any], stream: int) -> None:
        """Writes the outputs beside a result without elements: reductions over no elements."""
        if request.tree is not None:
            from ..epilogue.plan_operands import reduce_nothing  # imports plans, which requests do not need

            reduce_nothing(request.tree, arrays, stream)

    def search(self, request: RequestT, device: Device) -> KernelSearch[Any] | None:
        """The kernels of a request; None where the result has no elements, so that nothing is launched."""
        result = self.operands(request)[-1]
        return None if all(0 in spec.shape for spec in result.specs) else request.search(device)

    def random_arrays(self, request: RequestT, generator: np.random.Generator) -> Arrays:
        """Random operands on the host, in the forms that the reference takes, and poisoned results."""
        return {
            label: poison(slot, spec) if slot.written else _random_values(generator, slot, spec)
            for slot in self.operands(request)
            for label, spec in zip(slot.labels, slot.specs, strict=True)
        }

    def gpu_forms(self, request: RequestT, arrays: Arrays) -> Arrays:
        """The operands of `random_arrays` in the forms that plans take."""
        return arrays

    @abc.abstractmethod
    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[RequestT, Candidate[Any]]:
        """A small request whose tree is that of one of the kernel's epilogues, and the kernel as a candidate for it."""

    @abc.abstractmethod
    def probe(self, request: RequestT, arrays: Arrays) -> Probe[RequestT]:
        """The request on host arrays, to be computed by the reference or compared with it."""


@functools.cache
def operations() -> Mapping[str, Operation]:
    """Every operation by its name. The first call imports them."""
    modules = (importlib.import_module(f"..ops.{folder}.operation", __package__) for folder in FOLDERS)
    return {operation.name: operation for module in modules for operation in module.OPERATIONS}


@functools.cache
def planned_operations() -> Mapping[str, PlannedOperation[Any]]:
    """The operations whose requests can be planned, by name."""
    return {name: found for name, found in operations().items() if isinstance(found, PlannedOperation)}


def refusal_of(function: str, option: str) -> str | None:
    """Why a public function does not take an option; None where no reason is recorded."""
    found = (operation for operation in operations().values() if function == (operation.function or operation.name))
    return next((operation.refuses.get(option) for operation in found), None)


def operation_of(request: Any) -> PlannedOperation[Any]:
    """The operation of a request; refuses anything else."""
    known = planned_operations().values()
    for kind in type(request).__mro__:
        for operation in known:
            if operation.request_type is kind:
                return operation
    *names, last = (operation.request_type.__name__ for operation in known)
    raise InvalidOperandError(f"request is a {type(request).__name__}; expected a {', '.join(names)} or {last}")


def described(request: Request) -> dict[str, Any]:
    """A request's operation, extents and element type, as JSON-ready values."""
    shape = operation_of(request).extents(request)
    return {"op": request.plan_key().op, "shape": shape, "dtype": request.dtype.value}


@functools.lru_cache(maxsize=1024)
def operands_of(request: Request) -> tuple[OperandSlot, ...]:
    """The operand table of a request, made once for equal requests."""
    return operation_of(request).operands(request)


def request_from(name: str, options: RequestOptions) -> Request:
    """The request of the operation of this name that options of the command line describe."""
    known = planned_operations()
    if name not in known:
        raise InvalidOperandError(f"--op is {name!r}; valid: {', '.join(known)}")
    fits: dict[str, list[str]] = {}
    for other, operation in known.items():
        for option in operation.options:
            fits.setdefault(option.name, []).append(other)
    for given, names in sorted(fits.items()):
        if name not in names and options.given(given) is not None:
            raise InvalidOperandError(f"--{given.replace('_', '-')} is not for {name}; it is for {', '.join(names)}")
    request: Request = known[name].request(options)
    return request
