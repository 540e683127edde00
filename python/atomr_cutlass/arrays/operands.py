"""Operands: views of arrays of any framework, their checks, results in the caller's framework, and copies."""

from __future__ import annotations

import itertools
import math
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import _core
from ..checks import NUMBERS, check_extents, check_number, check_options, shown
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from ..pipeline import devices
from . import symbols
from .frameworks import ADDRESSES, CPU, CUDA, DLPACK, JAX, OWN, LaunchStream, framework_of, launch_stream
from .layouts import is_dense
from .numerics import BYTE, AnyArray, Element, default_out_dtype, dtype_of, element_of, numpy_dtype

__all__ = [
    "BYTE", "CPU", "CUDA", "as_operand", "check_apart", "check_backend", "check_devices", "check_out", "check_scalars",
    "check_writable", "clear_async", "copy_in", "current_stream", "download", "dtype_of", "empty", "finished",
    "host_result", "launch_stream", "launching", "on_reference", "refuse_jax_out", "result_dtype", "stream_handle",
    "to_numpy", "upload", "views_of", "write_async",
]  # fmt: skip

_warned = threading.Event()
_PACKAGE = __name__.partition(".")[0]


def as_operand(array: Any, name: str = "an array") -> _core.Operand:
    """A view that keeps an array of any framework alive; the call's launches wait for the array's pending work."""
    view, trace = launch_stream().import_array(array, name), symbols.current()
    return view if trace is None else trace.view(array, view)


def launching(stream: Any, array: Any, *, awaited: bool = False) -> LaunchStream:
    """The launch stream of a call, to be entered before arrays are imported or allocated.

    Without a `stream` it is the current stream of the framework of `array`, the first operand or a list of arrays.
    `awaited` says whether the launches are waited for before the result is returned.
    """
    if stream is not None:
        return LaunchStream(stream_handle(stream), named=True, awaited=awaited)
    first = array[0] if isinstance(array, (list, tuple)) and array else array
    return LaunchStream(current_stream(first), named=False, awaited=awaited)


def stream_handle(stream: Any) -> int:
    """The CUstream behind a stream argument: an integer, or an object of cuda.core, PyTorch or CuPy."""
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
    attributes = ("cuda_stream", "ptr", "handle")  # of torch.cuda.Stream, cupy.cuda.Stream, cuda.core.Stream
    handles = (getattr(stream, attribute, None) for attribute in attributes)
    return next((handle for handle in handles if handle is not None), None)


def current_stream(array: Any) -> int:
    """The current stream of the array's framework in this thread, on the array's device; 0 if it has none."""
    return (framework_of(array) or OWN).current_stream(array, None) or 0


def empty(shape: tuple[int, ...], element: Element, device: int, like: Any) -> tuple[Any, _core.Operand]:
    """An uninitialised row-major result of the kind of `like` (of JAX None, until `finished`), and its operand."""
    array, view = launch_stream().allocate(tuple(map(symbols.plain, shape)), element, device, like)
    return array, symbols.with_numbers(view, shape)


def finished(array: Any, operand: _core.Operand, stream: int) -> Any:
    """The result for the caller: `array`, or a JAX array, after the work of the stream is done."""
    framework = JAX if array is None else framework_of(array) or OWN
    return framework.export(array, operand, stream)


def host_result(result: AnyArray, like: Any) -> Any:
    """A host result as an array of the kind of `like`."""
    return (framework_of(like) or DLPACK).from_host(result, like)


def check_backend(backend: str, backends: Iterable[str]) -> None:
    """Refuses an unknown backend."""
    if not isinstance(backend, str) or backend not in backends:
        raise InvalidOperandError(f"unknown backend {shown(backend)}; valid: {', '.join(backends)}")


def views_of(
    given: Mapping[str, Any], needed: Iterable[str] = (), called: Mapping[str, str] | None = None
) -> dict[str, _core.Operand]:
    """Views of the arrays that are not None; `needed` ones must not be. Errors use the names in `called`."""
    said = {**dict(zip(given, given, strict=True)), **(called or {})}
    for name in needed:
        if given[name] is None:
            raise InvalidOperandError(f"{said[name]} is None; expected an array")
    views = {name: as_operand(array, said[name]) for name, array in given.items() if array is not None}
    for name, view in views.items():
        check_extents(view.shape, said[name])
    return views


def check_scalars(alpha: float, beta: float, c: Any, scale_d: Any = None) -> None:
    """Refuses scalars that are no numbers, a missing C, and a C with beta 0, where `scale_d` multiplies beta."""
    check_number(alpha, "alpha")
    check_number(beta, "beta")
    if c is not None and beta != 0 and isinstance(scale_d, NUMBERS) and float(beta) * float(scale_d) == 0:
        raise InvalidOperandError(
            f"c is given, but scale_d is {scale_d} and beta {beta}: their product is 0, with which c would not be "
            "read; leave c and beta out"
        )
    if c is not None and beta == 0:
        raise InvalidOperandError("c is given but beta is 0, so it would not be read: give beta, or leave c out")
    if c is None and beta != 0:
        raise InvalidOperandError(f"beta is {beta}, so c is needed")


def check_devices(views: Mapping[str, _core.Operand]) -> None:
    """Refuses operands that are not all on one device, or neither on the host nor on a GPU."""
    first_name, first = next(iter(views.items()))
    for name, view in views.items():
        if view.device_type not in (CPU, CUDA):
            raise InvalidOperandError(f"{name} is on a device of DLPack type {view.device_type}; expected CUDA or CPU")
        if (view.device_type, view.device) != (first.device_type, first.device):
            places = ["the CPU" if each.device_type == CPU else f"cuda:{each.device}" for each in (first, view)]
            raise InvalidOperandError(
                f"{first_name} is on {places[0]} and {name} on {places[1]}: all operands must be on one device"
            )


def result_dtype(
    views: Mapping[str, _core.Operand], requested: CutlassDtype | None, operand: CutlassDtype, *, fused: bool = False
) -> CutlassDtype:
    """The result's element type: the requested one, else that of `out`, else the default for the operands.

    For integer operands with a fused epilogue (`fused`) the element type of `c`, if given, precedes the default.
    """
    check_options(out_dtype=requested)
    given = dtype_of(views["out"], "out") if "out" in views else None
    if requested is not None and given is not None and requested is not given:
        raise InvalidOperandError(f"out is {given.value}, but out_dtype asks for {requested.value}")
    c = dtype_of(views["c"], "c") if "c" in views else None
    said = requested or given or (c if fused and operand is CutlassDtype.I8 else None)
    result = said or default_out_dtype(operand, fused=fused)
    if c is not None and c is not result:
        raise InvalidOperandError(f"c is {c.value}; it must have the result's dtype, {result.value}")
    return result


def check_out(views: Mapping[str, _core.Operand], inputs: Iterable[str]) -> None:
    """Refuses an `out` that cannot be written, or that shares memory with itself or with an input but `c`."""
    check_writable(views["out"], "out")
    check_apart({"out": views["out"]}, {name: views[name] for name in inputs if name in views}, ("c",))


def check_writable(view: _core.Operand, name: str) -> None:
    """Refuses arrays that cannot be written, or whose elements share memory."""
    if view.read_only:
        raise InvalidOperandError(f"{name} is read-only: give an array that may be written")
    pairs = zip(view.strides, view.shape, strict=True)
    if 0 not in view.shape and any(stride == 0 and extent > 1 for stride, extent in pairs):
        raise InvalidOperandError(
            f"{name} has strides {view.strides}: its elements share memory; give an array of its own"
        )


def check_apart(
    written: Mapping[str, _core.Operand], read: Mapping[str, _core.Operand], movable: Sequence[str] = ()
) -> None:
    """Refuses results that share memory with each other or with an input.

    A result may be exactly the memory of a `movable` input: each element is read before it is written.
    """
    pairs = [*itertools.product(written.items(), read.items()), *itertools.combinations(written.items(), 2)]
    for (name, result), (other, view) in pairs:
        same = (view.pointer, view.strides, view.dtype[1]) == (result.pointer, result.strides, result.dtype[1])
        if _core.overlap(result, view) and not (same and other in movable):
            hint = f" ({name} may be exactly {' or '.join(movable)})" if name in {"d", "out"} and movable else ""
            raise InvalidOperandError(f"{name} overlaps {other}: give separate memory{hint}")


def refuse_jax_out(out: Any, name: str = "out", *, needed: bool = False) -> None:
    """Refuses a JAX array as a result; `needed`: whether the caller has to give one."""
    if out is not None and JAX.recognizes(out):
        cure = "give an array that may be written" if needed else f"leave {name} away"
        raise InvalidOperandError(f"{name} is a JAX array, which cannot be written: {cure}")


def on_reference(backend: str, view: _core.Operand) -> bool:
    """Whether the reference computes: as requested, or for host arrays without a GPU, with one warning."""
    if backend == "reference":
        return True
    if view.device_type != CPU or backend != "auto" or devices.available():
        return False
    if not _warned.is_set():
        _warned.set()
        level, frame = 1, sys._getframe()  # noqa: SLF001 - for the warning to name the line of the package's caller
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            level, frame = level + 1, frame.f_back
        warnings.warn(f"computing with NumPy on the CPU: {devices.problem()}", RuntimeWarning, stacklevel=level)
    return True


def to_numpy(operand: _core.Operand) -> AnyArray:
    """A NumPy view of an operand in host memory."""
    if 0 in operand.shape:
        return np.empty(operand.shape, _numpy_dtype(operand))
    start, size, view = _host_range(operand)
    interface = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (start, operand.read_only)}
    return view(np.asarray(SimpleNamespace(__array_interface__=interface, owner=operand)))  # kept alive by the view


def upload(array: AnyArray, device: int, *, columns: bool = False) -> _core.Operand:
    """A copy of a host array on the GPU, its matrices row-major or, if `columns`, column-major."""
    element = element_of(array.dtype)
    dense = np.ascontiguousarray(array.swapaxes(-1, -2) if columns else array)
    buffer = _core.Buffer(device, max(1, dense.nbytes))
    _core.upload(buffer.pointer, device, dense.view(np.uint8))
    laid_out = dense.swapaxes(-1, -2) if columns else dense
    strides = [stride // array.itemsize for stride in laid_out.strides]
    return _core.Operand(buffer.pointer, array.shape, strides, element, CUDA, device, False, buffer)


def download(operand: _core.Operand) -> AnyArray:
    """A host copy of a GPU operand, with the same strides, after all work of the GPU."""
    if 0 in operand.shape:
        return np.empty(operand.shape, _numpy_dtype(operand))
    start, size, view = _host_range(operand)
    memory = np.empty(size, np.uint8)
    _core.download(start, operand.device, memory)
    return view(memory)


def copy_in(array: AnyArray, operand: _core.Operand) -> None:
    """Writes a host array into a GPU operand of distinct elements; the bytes between them keep their values."""
    if 0 in operand.shape:
        return
    start, size, view = _host_range(operand)
    memory = np.empty(size, np.uint8)
    if size > math.prod(operand.shape) * array.itemsize:
        _core.download(start, operand.device, memory)
    np.copyto(view(memory), array, casting="no")
    _core.upload(start, operand.device, memory)


def write_async(array: AnyArray, operand: _core.Operand, stream: int) -> None:
    """Writes a host array into a GPU operand in the order of a stream, also of one that is captured.

    An operand with gaps between its elements is written at once, after all work of the GPU.
    """
    if 0 in operand.shape or not is_dense(operand.shape, operand.strides):
        copy_in(array, operand)
    else:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _core.upload_async(operand.pointer, operand.device, flat, stream)


def clear_async(operand: _core.Operand, stream: int) -> None:
    """Writes zeros as `write_async` writes."""
    write_async(np.zeros(operand.shape, _numpy_dtype(operand)), operand, stream)


def _numpy_dtype(operand: _core.Operand) -> np.dtype[Any]:
    if operand.dtype == BYTE:
        return np.dtype(np.uint8)
    return numpy_dtype(ScaleType.from_dlpack(*operand.dtype) or dtype_of(operand, "an operand"))


def _host_range(operand: _core.Operand) -> tuple[int, int, Callable[[AnyArray], AnyArray]]:
    """(first byte, size in bytes, how to view such bytes as the operand) of a non-empty operand."""
    dtype = _numpy_dtype(operand)
    reaches = [(n - 1) * s for n, s in zip(operand.shape, operand.strides, strict=True)]
    low, high = sum(min(0, r) for r in reaches), sum(max(0, r) for r in reaches)
    strides = [s * dtype.itemsize for s in operand.strides]

    def view(memory: AnyArray) -> AnyArray:
        # as_strided knows no 8-bit floats.
        made: AnyArray = np.ndarray(operand.shape, dtype, memory, -low * dtype.itemsize, strides)
        return made

    return operand.pointer + low * dtype.itemsize, (high - low + 1) * dtype.itemsize, view
