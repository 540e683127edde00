"""Array frameworks: the stream of each, and how its arrays are imported, allocated and exported.

Each framework is supported by one class in `FRAMEWORKS`. A call determines its `LaunchStream` first; imports,
allocations and exports are ordered with respect to it.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .. import _core
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.errors import expect, shown
from .numerics import Element, element_of

CPU = 1  # DLDeviceType
CUDA = 2
PINNED = 3
MANAGED = 13

LEGACY_STREAM = 1  # how the array protocols spell the legacy default stream
UNORDERED = -1  # and how they spell that no order is needed
ADDRESSES = 2**64
_EXTENTS = 2**63

Shape = tuple[int, ...]
Allocated: TypeAlias = "tuple[Any, _core.Operand]"
"""An array and its operand; the array is None if its framework can import finished results only."""


@dataclass(slots=True, eq=False)
class LaunchStream:
    """The stream that a call launches on, and the frameworks' own streams that are ordered with it.

    `acquire` makes later launches wait for a framework's stream; `release` makes the acquired streams wait for the
    launches. As a context manager it is the launch stream of the block, and releases the streams at its end.

    Attributes:
        handle: the CUstream; 0 is the legacy default stream.
        named: whether the caller named it. Ordering arrays is then the caller's task, except arrays whose protocol
            orders them, and memory that a framework allocates.
        awaited: whether the launches are waited for before the result is returned: no stream is released then.
        synchronized: a GPU to synchronize at the end of the call, for a framework whose streams cannot be ordered.
    """

    handle: int
    named: bool
    awaited: bool = False
    synchronized: int | None = field(default=None, init=False)
    _imported: dict[int, tuple[Any, _core.Operand]] = field(default_factory=dict, init=False)
    _others: dict[int, int] = field(default_factory=dict, init=False)
    _streams: dict[tuple[Framework, int], int | None] = field(default_factory=dict, init=False)
    _token: Token[LaunchStream | None] | None = field(default=None, init=False)

    def __enter__(self) -> LaunchStream:  # noqa: PYI034 - it has no subclass
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._token is not None  # noqa: S101 - of `__enter__`
        _current.reset(self._token)
        if kind is None and not self.awaited:
            self.release()

    def import_array(self, array: Any, name: str) -> _core.Operand:
        """A view of an array, imported once per call, whose pending work precedes the launches; see `as_operand`."""
        if known := self._imported.get(id(array)):
            return known[1]
        framework = framework_of(array)
        if framework is None:
            raise InvalidOperandError(
                f"a {type(array).__name__} is not an array: expected NumPy, or anything with __dlpack__ or "
                "__cuda_array_interface__ (PyTorch, CuPy, JAX)"
            )
        imported = framework.import_array(array, name, self)
        self._imported[id(array)] = array, imported  # the reference keeps the id unique
        return imported

    def allocate(self, shape: Shape, element: Element, device: int, like: Any) -> Allocated:
        """A result (array of the kind of `like`, its operand); launches wait for earlier uses of its memory."""
        framework = framework_of(like) or OWN
        allocated = framework.allocate(shape, element, device, like)
        self.acquire(device, self.stream_of(framework, like, device), allocated=True)
        return allocated

    def stream_of(self, framework: Framework, array: Any, device: int) -> int | None:
        """The framework's current stream, queried once per call."""
        if (framework, device) not in self._streams:
            self._streams[framework, device] = framework.current_stream(array, device)
        return self._streams[framework, device]

    def acquire(self, device: int, stream: int | None, *, allocated: bool = False, ordered: bool = False) -> None:
        """Makes launches wait for a framework's stream, if it has one and has not done so itself (`ordered`).

        If the stream of `allocated` memory is being captured, the launch joins the capture.
        """
        if stream is None or stream == self.handle:
            return
        if not ordered:
            _core.order_streams(device, stream, self.handle, fork=allocated)
        if allocated or not self.named:
            self._others[stream] = device

    def release(self) -> None:
        """Makes every acquired stream wait for the launches."""
        for stream, device in self._others.items():
            _core.order_streams(device, self.handle, stream)
        self._others.clear()
        if self.synchronized is not None and not _core.capturing(self.synchronized, self.handle):
            _core.synchronize(self.synchronized, self.handle)
        self.synchronized = None


_current: ContextVar[LaunchStream | None] = ContextVar("launch stream", default=None)


def launch_stream() -> LaunchStream:
    """The launch stream of the call in progress; outside calls, the legacy default stream."""
    return _current.get() or LaunchStream(0, named=True)


def packages(array: Any) -> Iterator[str]:
    """The packages of an array's class and its base classes: a subclass may be in another package."""
    for kind in type(array).__mro__:
        yield kind.__module__.partition(".")[0].replace("jaxlib", "jax")


def namespaces(array: Any) -> Iterator[Any]:
    """The modules of these packages, where they are loaded."""
    return map(sys.modules.get, packages(array))


class Framework(abc.ABC):
    """An array framework; the default methods serve memory that the package allocates."""

    @abc.abstractmethod
    def recognizes(self, array: Any) -> bool:
        """Whether the array is the framework's."""

    def current_stream(self, array: Any, device: int | None) -> int | None:
        """This thread's stream, on the device if that is known; None if the framework exposes no stream."""
        return None

    @abc.abstractmethod
    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        """A view that keeps the array alive; launches wait for its pending work."""

    def allocate(self, shape: Shape, element: Element, device: int, like: Any) -> Allocated:
        """An uninitialised row-major result of DLPack's (type code, bits), and its operand."""
        buffer = _core.Buffer(device, _size(shape, element))
        operand = _core.Operand(buffer.pointer, shape, None, element, CUDA, device, False, buffer)
        return operand, operand

    def export(self, array: Any, operand: _core.Operand, stream: int) -> Any:
        """The result in the form that the caller gets, ordered after the launch on the stream."""
        return array

    def from_host(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        """A host result as an array of the kind of `like`: through its namespace's `from_dlpack`, if there is one."""
        for namespace in namespaces(like):
            modules: tuple[Any, ...] = (namespace, getattr(namespace, "dlpack", None))  # JAX has it there
            for module in modules:
                if hasattr(module, "from_dlpack"):
                    return module.from_dlpack(NUMPY.import_array(result, "the result", launch_stream()))
        return result


class Own(Framework):
    """The package's own operands, each of which records the launch that wrote it last."""

    def recognizes(self, array: Any) -> bool:
        return isinstance(array, _core.Operand)

    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        operand: _core.Operand = array
        _core.await_written(operand, launch.handle)
        return operand

    def export(self, array: Any, operand: _core.Operand, stream: int) -> Any:
        _core.note_written(array, stream)
        return array


class NumPy(Framework):
    """NumPy's arrays, in host memory."""

    def recognizes(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        element, strides = element_of(array.dtype), _in_elements(array.strides, array.itemsize)
        return _core.Operand(array.ctypes.data, array.shape, strides, element, CPU, 0, not array.flags.writeable, array)

    def from_host(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        return result


class ExchangeApi(Framework):
    """PyTorch from 2.10 on, and other frameworks with DLPack's exchange API: arrays are read in C++."""

    def recognizes(self, array: Any) -> bool:
        return _core.has_exchange_api(array)

    def current_stream(self, array: Any, device: int | None) -> int:
        return _core.framework_stream(array, device)

    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        operand = _core.Operand.of(array, name)
        if operand.device_type == CUDA and not launch.named:
            launch.acquire(operand.device, launch.stream_of(self, array, operand.device))
        return operand

    def allocate(self, shape: Shape, element: Element, device: int, like: Any) -> Allocated:
        array = _core.framework_empty(like, shape, element, device)
        return array, _core.Operand.of(array)


class DlpackProducer(Framework):
    """Arrays with `__dlpack__`: the producer makes the launch stream wait for its work."""

    def recognizes(self, array: Any) -> bool:
        return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")

    def order(self, array: Any, device: int, launch: LaunchStream) -> int:
        """The `stream` argument of `__dlpack__` for an array on this GPU."""
        return launch.handle or LEGACY_STREAM

    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        refuse_gradient(array, name)
        if "torch" in packages(array):  # neither its stream nor its allocator is accessible
            version = getattr(sys.modules["torch"], "__version__", "of an unknown version")
            raise UnsupportedError(
                f"{name} is a tensor of PyTorch {version}, which lacks DLPack's exchange API: PyTorch 2.10 is the "
                "oldest that is supported; pip install 'torch>=2.10'"
            )
        try:
            given, device = array.__dlpack_device__()
        except (TypeError, ValueError) as error:
            raise InvalidOperandError(f"{type(array).__name__} does not say which device it is on: {error}") from error
        kind = int(given) if isinstance(given, (int, np.integer)) else -1  # no device has such a number
        arguments = {"stream": self.order(array, device, launch)} if kind in (CUDA, MANAGED) else {}
        try:
            try:
                capsule = array.__dlpack__(max_version=(1, 0), copy=False, **arguments)
            except TypeError:  # producers from before DLPack 1.0 know neither
                capsule = array.__dlpack__(**arguments)
        except (BufferError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidOperandError(f"{type(array).__name__} does not export itself: {error}") from error
        if type(capsule).__name__ != "PyCapsule":
            raise InvalidOperandError(
                f"{type(array).__name__}.__dlpack__ returns a {type(capsule).__name__}; expected a DLPack capsule"
            )
        operand = _core.Operand.from_capsule(capsule)
        if operand.dtype == CutlassDtype.F4E2M1.dlpack:
            # Producers do not agree on whether such an element has a byte of its own.
            raise InvalidOperandError(
                f"{type(array).__name__} exports single elements of 4 bits: give fp4 as bytes of two (uint8, or "
                "PyTorch's float4_e2m1fn_x2), or in NumPy as ml_dtypes.float4_e2m1fn"
            )
        usual = {MANAGED: CUDA, PINNED: CPU}.get(operand.device_type)
        return operand if usual is None else _changed(operand, usual, operand.read_only)


class CuPy(DlpackProducer):
    """CuPy, whose current stream and memory pool can be had from Python."""

    def recognizes(self, array: Any) -> bool:
        return "cupy" in packages(array)

    def current_stream(self, array: Any, device: int | None) -> int:
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(array.device.id if device is None else device):
            return int(cuda.get_current_stream().ptr)

    def order(self, array: Any, device: int, launch: LaunchStream) -> int:
        own = launch.stream_of(self, array, device)
        if own == launch.handle:  # the stream may be captured: record no event on it
            return UNORDERED
        launch.acquire(device, own, ordered=True)
        return super().order(array, device, launch)

    def allocate(self, shape: Shape, element: Element, device: int, like: Any) -> Allocated:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            memory = cupy.cuda.alloc(_size(shape, element))
        operand = _core.Operand(memory.ptr, shape, None, element, CUDA, device, False, memory)
        return cupy.from_dlpack(operand), operand


class Jax(DlpackProducer):
    """JAX: arrays are immutable, and their streams are not accessible, so a call waits for its launch."""

    def recognizes(self, array: Any) -> bool:
        return "jax" in packages(array)

    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        operand = super().import_array(array, name, launch)
        if operand.device_type == CUDA:
            launch.synchronized = operand.device  # JAX may reuse the memory as soon as the array is freed
        return operand if operand.read_only else _changed(operand, operand.device_type, read_only=True)

    def allocate(self, shape: Shape, element: Element, device: int, like: Any) -> Allocated:
        return None, super().allocate(shape, element, device, like)[1]  # JAX imports finished results only

    def export(self, array: Any, operand: _core.Operand, stream: int) -> Any:
        _core.synchronize(operand.device, stream)
        return sys.modules["jax"].dlpack.from_dlpack(operand)


class CudaArray(Framework):
    """Numba, and other arrays with `__cuda_array_interface__`, which names the stream to wait for."""

    def recognizes(self, array: Any) -> bool:
        return getattr(array, "__cuda_array_interface__", None) is not None

    def import_array(self, array: Any, name: str, launch: LaunchStream) -> _core.Operand:
        refuse_gradient(array, name)
        interface = array.__cuda_array_interface__
        label = f"the __cuda_array_interface__ of a {type(array).__name__}"
        expect(interface, Mapping, label, "a dict")
        if interface.get("mask") is not None:
            raise InvalidOperandError("the array has a mask, which no kernel reads: fill what is masked")
        field = functools.partial(_field, interface, label)
        element = field("typestr", _dtype, "one such as '<f4'")
        dtype = element_of(element)
        shape = field("shape", lambda extents: _integers(extents, 0, _EXTENTS), "a tuple of integers")
        pointer, read_only = field("data", _memory, "(address, whether it is read-only)")
        strides = field("strides", lambda steps: _integers(steps, -_EXTENTS, _EXTENTS), "a tuple of integers")
        stream = field("stream", lambda handle: _integers([handle], 0, ADDRESSES)[0], "a handle")
        if pointer == 0 and 0 not in shape:
            raise InvalidOperandError(f"{label} has no memory for the elements of {shown(shape)}: its address is 0")
        if strides is not None:
            if len(strides) != len(shape):
                raise InvalidOperandError(f"shape {shape} has strides {strides}: one is needed per dimension")
            strides = _in_elements(strides, element.itemsize)
        device = getattr(getattr(array, "device", None), "id", None)
        if device is None:
            known = 0 not in shape and not _core.driver_problem()
            device = _core.pointer_device(pointer) if known else 0
        launch.acquire(int(device), 0 if stream == LEGACY_STREAM else stream)
        return _core.Operand(pointer, shape, strides, dtype, CUDA, int(device), read_only, array)


OWN, NUMPY, JAX, DLPACK = Own(), NumPy(), Jax(), DlpackProducer()

FRAMEWORKS: tuple[Framework, ...] = (
    OWN, NUMPY, ExchangeApi(), CuPy(), JAX, DLPACK, CudaArray()
)  # fmt: skip
"""Every framework, in the order in which they are tried on an array."""


def framework_of(array: Any) -> Framework | None:
    """The framework of an array; None for any other object."""
    return next((framework for framework in FRAMEWORKS if framework.recognizes(array)), None)


def refuse_gradient(array: Any, name: str) -> None:
    """Refuses a tensor that requires a gradient while PyTorch records gradients in this thread."""
    torch = sys.modules.get("torch")  # a tensor has loaded it
    if getattr(array, "requires_grad", False) is True and torch is not None and torch.is_grad_enabled():
        raise InvalidOperandError(
            f"{name} requires a gradient, which would be lost, since no backward pass is recorded here: call under "
            "`with torch.no_grad():`, or give the tensor's .detach()"
        )


def _field(interface: Mapping[str, Any], label: str, name: str, read: Callable[[Any], Any], expected: str) -> Any:
    """A field of a `__cuda_array_interface__`, parsed by `read`; None if an optional field is missing."""
    value = interface.get(name)
    if value is None and name in ("strides", "stream"):
        return None
    try:
        return read(value)
    except (TypeError, ValueError, SyntaxError):  # commas and parentheses in a dtype's name are Python's to NumPy
        raise InvalidOperandError(f"{label} has {name} {shown(value)}; expected {expected}") from None


def _dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str):  # NumPy interprets other values
        raise TypeError(name)
    return np.dtype(name)


def _integers(values: Any, least: int, end: int) -> Shape:
    """Integers from `least` to below `end`; TypeError or ValueError for others."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(values)
    found = tuple(map(operator.index, values))
    if not all(least <= value < end for value in found):
        raise ValueError(values)
    return found


def _memory(data: Any) -> tuple[int, bool]:
    if not isinstance(data, (tuple, list)):
        raise TypeError(data)
    address, read_only = data
    return _integers([address], 0, ADDRESSES)[0], bool(read_only)


def _in_elements(strides: Sequence[int], size: int) -> list[int]:
    """Strides in bytes as numbers of elements of this size."""
    if any(stride % size for stride in strides):
        raise InvalidOperandError(f"strides {strides} are no multiples of the element size: copy the array")
    return [stride // size for stride in strides]


def _size(shape: Shape, element: Element) -> int:
    return max(1, math.prod(shape) * element[1] // 8)


def _changed(view: _core.Operand, kind: int, read_only: bool) -> _core.Operand:
    return _core.Operand(view.pointer, view.shape, view.strides, view.dtype, kind, view.device, read_only, view)
