"""Arrays of any framework as `_core.Operand`, and results of the caller's own kind."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import _core
from ..checks import shown
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from . import numerics

CPU = 1  # DLDeviceType
CUDA = 2
PINNED = 3
MANAGED = 13

BYTE = (1, 8)
"""DLPack's (type code, bits) of plain bytes: packed fp4, and e8m0 scales where a framework does not know them."""

_BEYOND = 2**63
_ADDRESSES = 2**64

LEGACY_STREAM = 1  # how the array protocols spell the legacy default stream


def as_operand(array: Any, name: str = "an array") -> _core.Operand:
    """A view of an array, which stays alive with it. The array's pending work is ordered before the legacy stream.

    Args:
        array: of any framework.
        name: what errors call it.

    Raises:
        InvalidOperandError: the object is no array, or one whose elements no kernel knows; or it requires a gradient
            while gradients are recorded.
    """
    if isinstance(array, _core.Operand):
        return array
    if isinstance(array, np.ndarray):
        return _from_numpy(array)
    if _core.has_exchange_api(array):
        return _core.Operand.of(array, name)
    refuse_gradient(array, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_cuda_array_interface(array, interface)
    raise InvalidOperandError(
        f"a {type(array).__name__} is not an array: expected NumPy, or anything with __dlpack__ or "
        "__cuda_array_interface__ (PyTorch, CuPy, JAX)"
    )


def refuse_gradient(array: Any, name: str) -> None:
    """Refuses a tensor that requires a gradient, if PyTorch records gradients in this thread and now.

    Raises:
        InvalidOperandError: says how to compute without one.
    """
    torch = sys.modules.get("torch")  # a tensor has loaded it
    if getattr(array, "requires_grad", False) is True and torch is not None and torch.is_grad_enabled():
        raise InvalidOperandError(
            f"{name} requires a gradient, which would be lost, since no backward pass is recorded here: call under "
            "`with torch.no_grad():`, or give the tensor's .detach()"
        )


def _element(dtype: np.dtype[Any]) -> tuple[int, int]:
    """DLPack's (type code, bits) of a NumPy dtype.

    Raises:
        InvalidOperandError: no kernel knows such elements.
    """
    if dtype == np.uint8:
        return BYTE
    known = numerics.from_numpy_dtype(dtype) or numerics.scale_type_of(dtype)
    if known is None:
        raise InvalidOperandError(f"no kernel knows elements of type {dtype}")
    return known.dlpack


def _from_numpy(array: np.ndarray[Any, Any]) -> _core.Operand:
    element = _element(array.dtype)
    if any(stride % array.itemsize for stride in array.strides):
        raise InvalidOperandError(f"strides {array.strides} are no multiples of the element size: copy the array")
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.Operand(array.ctypes.data, array.shape, strides, element, CPU, 0, not array.flags.writeable, array)


def _from_dlpack(array: Any) -> _core.Operand:
    kind = _dlpack_device(array)
    arguments = {"stream": LEGACY_STREAM} if kind in (CUDA, MANAGED) else {}
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
            f"{type(array).__name__} exports single elements of 4 bits: give fp4 as bytes of two (uint8, or PyTorch's "
            "float4_e2m1fn_x2), or in NumPy as ml_dtypes.float4_e2m1fn"
        )
    if operand.device_type in (MANAGED, PINNED):
        kind = CUDA if operand.device_type == MANAGED else CPU
        return _core.Operand(
            operand.pointer,
            operand.shape,
            operand.strides,
            operand.dtype,
            kind,
            operand.device,
            operand.read_only,
            operand,
        )
    return operand


def _dlpack_device(array: Any) -> int:
    """The kind of device that a producer names."""
    try:
        kind, _ = array.__dlpack_device__()
    except (TypeError, ValueError) as error:
        raise InvalidOperandError(f"{type(array).__name__} does not say which device it is on: {error}") from error
    return int(kind) if isinstance(kind, (int, np.integer)) else -1  # what is no number, no device has


def _from_cuda_array_interface(array: Any, interface: Any) -> _core.Operand:
    _check_interface(array, interface)
    element = np.dtype(interface["typestr"])
    dtype = _element(element)
    pointer, read_only = interface["data"]
    if interface.get("mask") is not None:
        raise InvalidOperandError("the array has a mask, which no kernel reads: fill what is masked")
    strides = interface.get("strides")
    if strides is not None:
        if len(strides) != len(interface["shape"]):
            raise InvalidOperandError(f"shape {interface['shape']} has strides {strides}: one is needed per dimension")
        if any(stride % element.itemsize for stride in strides):
            raise InvalidOperandError(f"strides {strides} are no multiples of the element size: copy the array")
        strides = [stride // element.itemsize for stride in strides]
    device = int(getattr(getattr(array, "device", None), "id", 0))
    stream = interface.get("stream")
    if stream not in (None, LEGACY_STREAM):
        # The protocol leaves it to the consumer to wait for what the producer has under way.
        _core.synchronize(device, stream)
    return _core.Operand(pointer, interface["shape"], strides, dtype, CUDA, device, bool(read_only), array)


def _check_interface(array: Any, interface: Any) -> None:
    """Refuses a `__cuda_array_interface__` whose fields are not what the protocol says."""

    def refuse(what: str) -> InvalidOperandError:
        return InvalidOperandError(f"the __cuda_array_interface__ of a {type(array).__name__} has {what}")

    def sizes(name: str, least: int) -> None:
        given = interface[name]
        good = isinstance(given, (tuple, list)) and all(isinstance(one, (int, np.integer)) for one in given)
        if not good or not all(least <= one < _BEYOND for one in given):
            raise refuse(f"{name} {shown(given)}; expected a tuple of integers")

    if not isinstance(interface, Mapping):
        raise InvalidOperandError(
            f"the __cuda_array_interface__ of a {type(array).__name__} is {shown(interface)}; expected a dict"
        )
    missing = [name for name in ("shape", "typestr", "data") if name not in interface]
    if missing:
        raise refuse(f"no {missing[0]}")
    sizes("shape", 0)
    if interface.get("strides") is not None:
        sizes("strides", -_BEYOND)
    try:
        np.dtype(interface["typestr"] if isinstance(interface["typestr"], str) else "")
    except (TypeError, ValueError, SyntaxError):  # commas and parentheses are Python's to NumPy
        raise refuse(f"typestr {shown(interface['typestr'])}; expected one such as '<f4'") from None
    data = interface["data"]
    pointer = data[0] if isinstance(data, (tuple, list)) and len(data) == 2 else None
    if not isinstance(pointer, (int, np.integer)) or not 0 <= pointer < _ADDRESSES:
        raise refuse(f"data {shown(data)}; expected (address, whether it is read-only)")
    if pointer == 0 and 0 not in interface["shape"]:
        raise refuse(f"no memory for the elements of {shown(interface['shape'])}: its address is 0")
    stream = interface.get("stream")
    if stream is not None and (not isinstance(stream, (int, np.integer)) or not 0 <= stream < _ADDRESSES):
        raise refuse(f"stream {shown(stream)}; expected a handle")


def dtype_of(operand: _core.Operand, name: str) -> CutlassDtype:
    """The operand's element type.

    Raises:
        InvalidOperandError: no kernel knows it.
    """
    dtype = CutlassDtype.from_dlpack(*operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is not CutlassDtype.TF32)
        code, bits = operand.dtype
        raise InvalidOperandError(f"{name} has elements of DLPack type {code} with {bits} bits; kernels know {valid}")
    return dtype


def _numpy_dtype(operand: _core.Operand) -> np.dtype[Any]:
    if operand.dtype == BYTE:
        return np.dtype(np.uint8)
    return numerics.numpy_dtype(ScaleType.from_dlpack(*operand.dtype) or dtype_of(operand, "an operand"))


def to_numpy(operand: _core.Operand) -> np.ndarray[Any, Any]:
    """A NumPy view of an operand in host memory."""
    if 0 in operand.shape:
        return np.empty(operand.shape, _numpy_dtype(operand))
    start, size, view = _host_range(operand)
    return view(np.asarray(_HostMemory(operand, start, size)))


class _HostMemory:
    """Host bytes as NumPy's array interface describes them; keeps their owner alive."""

    def __init__(self, owner: _core.Operand, start: int, size: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (start, owner.read_only),
        }


def stream_handle(stream: Any) -> int:
    """The CUstream behind a stream argument: an integer, or an object of cuda.core, PyTorch or CuPy.

    Raises:
        InvalidOperandError: it is none of these, or its handle is none.
    """
    handle = stream if isinstance(stream, (int, np.integer)) else _handle_of(stream)
    if type(handle) is int and 0 <= handle < _ADDRESSES:
        return handle  # which warm calls give
    try:
        handle = int(operator.index(handle))
    except TypeError:  # cuda.bindings' handles know __int__ only
        handle = int(handle) if type(handle).__module__.partition(".")[0] == "cuda" else None
    if handle is None or isinstance(stream, (bool, np.bool_)):
        raise InvalidOperandError(
            f"stream is a {type(stream).__name__}; expected an integer handle or a stream of PyTorch, CuPy or cuda.core"
        )
    if not 0 <= handle < _ADDRESSES:
        raise InvalidOperandError(f"stream is {shown(handle)}; a handle is an address, or 0 for the default stream")
    return int(handle)


def _handle_of(stream: Any) -> Any:
    """What a stream object says its handle is; None where it says nothing."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        pair = isinstance(version_and_handle, (tuple, list)) and len(version_and_handle) == 2
        return version_and_handle[1] if pair else None
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch.cuda.Stream, cupy.cuda.Stream, cuda.core.Stream
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return handle
    return None


def current_stream(array: Any, view: _core.Operand | None = None) -> int:
    """The stream that the array's framework works on in this thread, on the array's device.

    0, the legacy default stream, where it has no such notion. Plans, which read arrays themselves, leave `view` out for
    arrays whose framework does not tell them.
    """
    if view is not None and view.device_type == CUDA and _core.has_exchange_api(array):
        return _core.framework_stream(array, view.device)
    if type(array).__module__.partition(".")[0] == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def is_jax(array: Any) -> bool:
    """Whether the array is JAX's: immutable, and on no stream that a caller can name."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def empty(shape: tuple[int, ...], dtype: CutlassDtype, device: int, like: Any) -> tuple[Any, _core.Operand]:
    """Uninitialised row-major memory for a result on the GPU, from the allocator of the framework of `like`.

    Returns:
        (array of the kind of `like`, its operand). For JAX, which imports finished results only, the array is None:
        `finished` makes it.
    """
    return empty_of(shape, dtype.dlpack, device, like)


def empty_of(shape: tuple[int, ...], element: tuple[int, int], device: int, like: Any) -> tuple[Any, _core.Operand]:
    """`empty` for elements of DLPack's (type code, bits)."""
    if like is not None and _core.has_exchange_api(like):
        array = _core.framework_empty(like, shape, element, device)
        return array, _core.Operand.of(array)
    size = max(1, math.prod(shape) * element[1] // 8)
    if type(like).__module__.partition(".")[0] == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            memory = cupy.cuda.alloc(size)
        operand = _core.Operand(memory.ptr, shape, None, element, CUDA, device, False, memory)
        return cupy.from_dlpack(operand), operand
    buffer = _core.Buffer(device, size)
    operand = _core.Operand(buffer.pointer, shape, None, element, CUDA, device, False, buffer)
    return (None if is_jax(like) else operand), operand


def finished(array: Any, operand: _core.Operand, stream: int) -> Any:
    """The result as the caller gets it: `array`, or a JAX array once the stream has done its work."""
    if array is not None:
        return array
    # JAX reads on streams of its own, so the result must be there.
    _core.synchronize(operand.device, stream)
    return sys.modules["jax"].dlpack.from_dlpack(operand)


def upload(array: np.ndarray[Any, Any], device: int, *, columns: bool = False) -> _core.Operand:
    """A copy of a host array on the GPU, its matrices row-major or, if `columns`, column-major."""
    element = _element(array.dtype)
    dense = np.ascontiguousarray(array.swapaxes(-1, -2) if columns else array)
    buffer = _core.Buffer(device, max(1, dense.nbytes))
    _core.upload(buffer.pointer, device, dense.view(np.uint8))
    strides = [stride // array.itemsize for stride in dense.strides]
    if columns:
        strides[-2:] = reversed(strides[-2:])
    return _core.Operand(buffer.pointer, array.shape, strides, element, CUDA, device, False, buffer)


def download(operand: _core.Operand) -> np.ndarray[Any, Any]:
    """A host copy of a GPU operand, with the same strides, after all work of the GPU."""
    if 0 in operand.shape:
        return np.empty(operand.shape, _numpy_dtype(operand))
    start, size, view = _host_range(operand)
    memory = np.empty(size, np.uint8)
    _core.download(start, operand.device, memory)
    return view(memory)


def copy_in(array: np.ndarray[Any, Any], operand: _core.Operand) -> None:
    """Writes a host array into a GPU operand; what lies between its rows is read and written back."""
    if 0 in operand.shape:
        return
    start, size, view = _host_range(operand)
    memory = np.empty(size, np.uint8)
    _core.download(start, operand.device, memory)
    np.copyto(view(memory), array, casting="no")
    _core.upload(start, operand.device, memory)


def write_async(array: np.ndarray[Any, Any], operand: _core.Operand, stream: int) -> None:
    """Writes a host array into a GPU operand in the order of a stream, also of one that is captured.

    An operand with gaps between its elements is written at once, after all work of the GPU.
    """
    dense = _core.Operand(operand.pointer, operand.shape, None, operand.dtype, CUDA, operand.device)
    pairs = zip(operand.shape, operand.strides, dense.strides, strict=True)
    if any(extent > 1 and own != wanted for extent, own, wanted in pairs):
        copy_in(array, operand)
    elif 0 not in operand.shape:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _core.upload_async(operand.pointer, operand.device, flat, stream)


def clear_async(operand: _core.Operand, stream: int) -> None:
    """Writes zeros as `write_async` writes."""
    write_async(np.zeros(operand.shape, _numpy_dtype(operand)), operand, stream)


def _host_range(
    operand: _core.Operand,
) -> tuple[int, int, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]:
    """(first byte, size in bytes, how to view such bytes as the operand) of a non-empty operand."""
    dtype = _numpy_dtype(operand)
    reaches = [(n - 1) * s for n, s in zip(operand.shape, operand.strides, strict=True)]
    low, high = sum(min(0, r) for r in reaches), sum(max(0, r) for r in reaches)
    strides = [s * dtype.itemsize for s in operand.strides]

    def view(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # as_strided knows no 8-bit floats.
        made: np.ndarray[Any, Any] = np.ndarray(operand.shape, dtype, memory, -low * dtype.itemsize, strides)
        return made

    return operand.pointer + low * dtype.itemsize, (high - low + 1) * dtype.itemsize, view


def host_result(result: np.ndarray[Any, Any], like: Any) -> Any:
    """A host result as an array of the kind of `like`."""
    if isinstance(like, (np.ndarray, _core.Operand)):
        return result
    for kind in type(like).__mro__:  # a subclass may live in a module of its own
        namespace = sys.modules.get(kind.__module__.partition(".")[0].replace("jaxlib", "jax"))
        importer = getattr(namespace, "from_dlpack", None) or getattr(
            getattr(namespace, "dlpack", None), "from_dlpack", None
        )
        if importer is not None:
            return importer(_from_numpy(result))
    return result
