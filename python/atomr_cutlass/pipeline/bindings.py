"""Operands that plans keep: bound once, given new values in place, never copied."""

from __future__ import annotations

import math
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from ..arrays import numerics, operands
from ..arrays.operands import CPU, CUDA
from ..errors import InvalidOperandError
from ..ops.gemm.request import GemmRequest
from .plan_cache import PlanKey
from .problem import MatrixSpec

_Bytes: TypeAlias = npt.NDArray[np.uint8]


def check_operand(view: _core.Operand, spec: MatrixSpec, name: str, element: tuple[int, int] | None = None) -> None:
    """Refuses an array that is not the operand a request speaks of. `element` is that of its slot.

    Raises:
        InvalidOperandError: it is not on a GPU, or of another dtype, shape or strides.
    """
    if view.device_type != CUDA:
        raise InvalidOperandError(f"{name} is in host memory; expected an array on a GPU (ac.gemm copies host arrays)")
    if element is not None and view.dtype != element:
        raise InvalidOperandError(
            f"{name} is no array of bytes (uint8), as which fp4, its e8m0 scales and masks of bits are given"
        )
    if element is None and operands.dtype_of(view, name) is not spec.dtype:
        found = operands.dtype_of(view, name)
        raise InvalidOperandError(f"{name} is {found.value}; the request says {spec.dtype.value}")
    if view.shape != spec.shape:
        raise InvalidOperandError(f"{name} has shape {view.shape}; the request says {spec.shape}")
    if not _alike(view, spec.strides):
        raise InvalidOperandError(
            f"{name} has strides {view.strides}; the request's layout means {spec.strides}: copy it into that layout, "
            "or ask for the one that it has"
        )


def take_up(array: Any, name: str) -> _core.Operand:
    """A view of an array, read-only where the framework's rules say so and DLPack does not: JAX's are immutable.

    Arguments and errors are those of `operands.as_operand`.
    """
    view = operands.as_operand(array, name)
    if view.read_only or not operands.is_jax(array):
        return view
    return _core.Operand(
        view.pointer, view.shape, view.strides, view.dtype, view.device_type, view.device, read_only=True, owner=view
    )


class Weights:
    """New values for a bound operand, taken up in the thread of whoever has them.

    Attributes:
        size: in bytes.
        stream: where a device array's values are ready, and where they are copied; 0 for host memory.
    """

    def __init__(self, weights: Any, stream: Any = None) -> None:
        """Takes values up without reading them.

        Args:
            weights: an array of any framework, on the GPU or the host; or bytes in the operand's own memory order
                (row-major or column-major, as the request has it): `bytes`, `bytearray`, `memoryview`, or a NumPy
                array of uint8. They must not change before they have been copied.
            stream: handle or stream object; None is the current stream of the weights' framework.

        Raises:
            InvalidOperandError: it is none of these, or its elements are no kernel's.
        """
        raw = _bytes_of(weights)
        self._source: _Bytes | _core.Operand
        if raw is not None:
            self._source, self.size, current = raw, raw.nbytes, 0
        else:
            self._source = view = operands.as_operand(weights, "weights")
            self.size, current = _size(view), operands.current_stream(weights, view)
        self.stream = current if stream is None else operands.stream_handle(stream)

    def copy_to(self, target: _core.Operand) -> None:
        """Writes the values into an operand of dense memory; see `Binding.refit`."""
        if isinstance(self._source, _core.Operand):
            self._copy_array(self._source, target)
            return
        if self.size != _size(target):
            dtype = operands.dtype_of(target, "the bound operand").value
            raise InvalidOperandError(
                f"weights has {self.size} bytes; the bound operand has {_size(target)}: {target.shape} of {dtype}"
            )
        _upload(self._source, target)

    def _copy_array(self, view: _core.Operand, target: _core.Operand) -> None:
        self._check_array(view, target)
        if view.device_type == CPU:
            _upload(_in_memory_order(operands.to_numpy(view), target), target)
        elif view.pointer != target.pointer and self.size:
            _core.copy_async(target.pointer, view.pointer, self.size, target.device, self.stream)

    @staticmethod
    def _check_array(view: _core.Operand, target: _core.Operand) -> None:
        dtype, wanted = operands.dtype_of(view, "weights"), operands.dtype_of(target, "the bound operand")
        if dtype is not wanted:
            raise InvalidOperandError(f"weights is {dtype.value}; the bound operand is {wanted.value}")
        if view.shape != target.shape:
            raise InvalidOperandError(f"weights has shape {view.shape}; the bound operand has {target.shape}")
        if view.device_type == CPU:
            return
        if view.device_type != CUDA or view.device != target.device:
            raise InvalidOperandError(
                f"weights is on device {view.device}, of DLPack type {view.device_type}; the bound operand is on "
                f"cuda:{target.device}: copy it there first"
            )
        if not _alike(view, target.strides):
            raise InvalidOperandError(
                f"weights has strides {view.strides}; the bound operand has {target.strides}: on the GPU bytes are "
                "copied as they lie, so copy the weights into that layout first"
            )
        if view.pointer != target.pointer and _core.overlap(view, target):
            raise InvalidOperandError("weights overlaps the bound operand: give separate memory, or the operand itself")


class Binding:
    """An operand B that a plan keeps: the caller's own array, which stays alive with the binding.

    What the caller writes into the array is what the next launch reads, and so is what `refit` writes.

    Attributes:
        name: of the binding; empty where a plan was bound without one.
        operand: the view of the array that launches get; it keeps the array alive.
        lock: held by the actor while work that uses the operand is in flight.
    """

    def __init__(self, request: GemmRequest, array: Any, device: int) -> None:
        """Binds an array.

        Args:
            request: what the plan is of.
            array: B, (K, N) or (batch, K, N), of the request's dtype, and dense in its layout, on the GPU.
            device: index of the plan's GPU.

        Raises:
            InvalidOperandError: the array is not the request's B.
        """
        self.name = request.binding or ""
        self.operand = take_up(array, "b")
        self.lock = threading.Lock()
        check_operand(self.operand, request.problem(device).b, "b")
        if self.operand.device != device:
            raise InvalidOperandError(f"b is on cuda:{self.operand.device}; the plan is for cuda:{device}")

    def refit(self, weights: Weights) -> None:
        """Writes new values into the operand; plans of it stay as they are, captured graphs included.

        Values in GPU memory are copied in the order of `weights.stream`, without waiting: launches on other streams
        have to be ordered by the caller. Values in host memory are copied at once, after all work of the GPU.

        Raises:
            InvalidOperandError: a size, dtype, shape, device or stride that is not the operand's, or the operand is
                read-only, as JAX arrays are.
        """
        if self.operand.read_only:
            raise InvalidOperandError("the bound operand is read-only: bind an array that may be written")
        weights.copy_to(self.operand)


class BoundPlan:
    """A plan with its operand B bound: `bound(a, c=None, *, out=None, alpha=None, beta=None, stream=None)` launches.

    Attributes:
        plan: the plan, with which `key`, `source`, `kernel_name` and `kernel_handle` are shared.
        binding: the operand.
    """

    def __init__(self, plan: Any, b: Any) -> None:
        """Binds an operand to a plan.

        Args:
            plan: a Plan made from a request.
            b: B as the request has it; see `Binding`.

        Raises:
            InvalidOperandError: `b` is not the request's B, or the plan was made from no request.
        """
        if getattr(plan, "request", None) is None:
            raise InvalidOperandError("the plan was made from no request: there is nothing to check b against")
        self.plan = plan
        self.binding = Binding(plan.request, b, plan.device)

    def __call__(
        self,
        a: Any,
        c: Any = None,
        *,
        out: Any = None,
        alpha: float | None = None,
        beta: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Launches the plan with the bound operand; see `Plan`."""
        return self.plan(a, self.binding.operand, c, out=out, alpha=alpha, beta=beta, stream=stream)

    def refit(self, weights: Any, stream: Any = None) -> None:
        """Writes new values into the bound operand; see `Weights` and `Binding.refit`."""
        self.binding.refit(Weights(weights, stream))

    @property
    def key(self) -> PlanKey:
        """The plan's key."""
        key: PlanKey = self.plan.key
        return key

    @property
    def source(self) -> str:
        """The kernel's source."""
        return str(self.plan.source)

    @property
    def kernel_name(self) -> str:
        """The kernel's name."""
        return str(self.plan.kernel_name)

    @property
    def kernel_handle(self) -> object:
        """The loaded kernel."""
        return self.plan.kernel_handle


def _alike(view: _core.Operand, strides: tuple[int, ...]) -> bool:
    """Whether elements lie so: the stride of a dimension of one element, or of no elements at all, says nothing."""
    if 0 in view.shape:
        return True
    pairs = zip(view.shape, view.strides, strides, strict=True)
    return all(extent == 1 or own == wanted for extent, own, wanted in pairs)


def _size(view: _core.Operand) -> int:
    return math.prod(view.shape) * operands.dtype_of(view, "weights").bits // 8


def _bytes_of(weights: Any) -> _Bytes | None:
    raw = isinstance(weights, np.ndarray) and weights.dtype == np.uint8
    if not raw and not isinstance(weights, (bytes, bytearray, memoryview)):
        return None
    try:
        return np.frombuffer(memoryview(weights).cast("B"), np.uint8)
    except (TypeError, ValueError) as error:
        raise InvalidOperandError(f"weights are bytes that do not lie together: {error}") from error


def _in_memory_order(host: np.ndarray[Any, Any], target: _core.Operand) -> _Bytes:
    """The bytes of a host array, in the order in which a dense operand has its elements."""
    dtype = numerics.numpy_dtype(operands.dtype_of(target, "the bound operand"))
    memory = np.empty(_size(target), np.uint8)
    if memory.size:
        strides = [
            0 if extent == 1 else stride * dtype.itemsize
            for extent, stride in zip(target.shape, target.strides, strict=True)
        ]
        laid: np.ndarray[Any, Any] = np.ndarray(target.shape, dtype, memory, 0, strides)
        np.copyto(laid, host, casting="no")
    return memory


def _upload(source: _Bytes, target: _core.Operand) -> None:
    if source.size:
        _core.upload(target.pointer, target.device, source)
