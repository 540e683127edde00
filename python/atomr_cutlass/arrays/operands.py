"""Arrays of any framework as `_core.Operand`, and results of the caller's own kind."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from ..checks import shown
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from . import numerics, symbols
from .cuda_array_interface import ADDRESSES
from .frameworks import DLPACK, JAX, OWN, LaunchStream, element_of, framework_of, launch_stream
from .views import BYTE, CPU, CUDA, MANAGED, PINNED, dtype_of

__all__ = [
    "BYTE", "CPU", "CUDA", "MANAGED", "PINNED", "as_operand", "clear_async", "copy_in", "current_stream", "download",
    "dtype_of", "empty", "empty_of", "finished", "host_result", "is_jax", "launch_stream", "launching", "stream_handle",
    "to_numpy", "upload", "write_async",
]  # fmt: skip


def as_operand(array: Any, name: str = "an array") -> _core.Operand:
    """A view of an array, which stays alive with it, ordered before what the call in progress launches.

    Args:
        array: of any framework.
        name: what errors call it.

    Raises:
        InvalidOperandError: the object is no array, or one whose elements no kernel knows; or it requires a gradient
            while gradients are recorded.
        UnsupportedError: its framework is too old.
    """
    view, trace = launch_stream().import_array(array, name), symbols.current()
    return view if trace is None else trace.view(array, view)


def launching(stream: Any, array: Any, *, awaited: bool = False) -> LaunchStream:
    """The launch stream of a call, to be entered before anything is imported or allocated for it.

    Args:
        stream: the caller's: a handle or a stream object; None is the current one of the framework of `array`.
        array: the call's first operand, or a list of such.
        awaited: whether the caller waits for what is launched before anybody gets the result.

    Raises:
        InvalidOperandError: `stream` is no stream.
    """
    if stream is not None:
        return LaunchStream(stream_handle(stream), named=True, awaited=awaited)
    first = array[0] if isinstance(array, (list, tuple)) and array else array
    return LaunchStream(current_stream(first), named=False, awaited=awaited)


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
        data = (start, owner.read_only)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": data}


def stream_handle(stream: Any) -> int:
    """The CUstream behind a stream argument: an integer, or an object of cuda.core, PyTorch or CuPy.

    Raises:
        InvalidOperandError: it is none of these, or its handle is none.
    """
    handle = stream if isinstance(stream, (int, np.integer)) else _handle_of(stream)
    if type(handle) is int and 0 <= handle < ADDRESSES:
        return handle  # which warm calls give
    try:
        handle = int(operator.index(handle))
    except TypeError:  # cuda.bindings' handles know __int__ only
        handle = int(handle) if type(handle).__module__.partition(".")[0] == "cuda" else None
    if handle is None or isinstance(stream, (bool, np.bool_)):
        raise InvalidOperandError(
            f"stream is a {type(stream).__name__}; expected an integer handle or a stream of PyTorch, CuPy or cuda.core"
        )
    if not 0 <= handle < ADDRESSES:
        raise InvalidOperandError(f"stream is {shown(handle)}; a handle is an address, or 0 for the default stream")
    return int(handle)


def _handle_of(stream: Any) -> Any:
    """The handle that a stream object names; None where it names none."""
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


def current_stream(array: Any) -> int:
    """The stream that the array's framework works on in this thread, on the array's device.

    0, the legacy default stream, where it has no such notion, and for what is no array.
    """
    framework = framework_of(array)
    return 0 if framework is None else framework.current_stream(array, None) or 0


def is_jax(array: Any) -> bool:
    """Whether the array is JAX's: immutable, and on no stream that a caller can name."""
    return JAX.recognizes(array)


def empty(shape: tuple[int, ...], dtype: CutlassDtype, device: int, like: Any) -> tuple[Any, _core.Operand]:
    """Uninitialised row-major memory for a result on the GPU, from the allocator of the framework of `like`.

    Returns:
        (array of the kind of `like`, its operand). For JAX, which imports finished results only, the array is None:
        `finished` makes it.
    """
    return empty_of(shape, dtype.dlpack, device, like)


def empty_of(shape: tuple[int, ...], element: tuple[int, int], device: int, like: Any) -> tuple[Any, _core.Operand]:
    """`empty` for elements of DLPack's (type code, bits)."""
    array, view = launch_stream().allocate(tuple(map(symbols.plain, shape)), element, device, like)
    return array, symbols.with_numbers(view, shape)


def finished(array: Any, operand: _core.Operand, stream: int) -> Any:
    """The result as the caller gets it: `array`, or a JAX array once the stream has done its work."""
    framework = JAX if array is None else framework_of(array) or OWN
    return framework.export(array, operand, stream)


def upload(array: np.ndarray[Any, Any], device: int, *, columns: bool = False) -> _core.Operand:
    """A copy of a host array on the GPU, its matrices row-major or, if `columns`, column-major."""
    element = element_of(array.dtype)
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
    """Writes a host array into a GPU operand of distinct elements; what lies between them is read and written back."""
    if 0 in operand.shape:
        return
    start, size, view = _host_range(operand)
    memory = np.empty(size, np.uint8)
    if size > math.prod(operand.shape) * array.itemsize:
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
    return (framework_of(like) or DLPACK).from_host(result, like)
