"""Operands that plans keep: bound once and refitted in place, without copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from ..arrays import operands
from ..arrays.layouts import MatrixSpec, same_layout
from ..arrays.operands import BYTE, CPU, CUDA
from ..errors import InvalidOperandError
from .operation import OperandSlot, operation_of
from .plan_cache import PlanKey

if TYPE_CHECKING:
    from .request import Request

_Bytes: TypeAlias = npt.NDArray[np.uint8]


def check_operand(view: _core.Operand, spec: MatrixSpec, name: str, element: tuple[int, int] | None = None) -> None:
    """Refuses an array that is not the operand of a request; `element` is that of its `OperandSlot`."""
    if view.device_type != CUDA:
        raise InvalidOperandError(f"{name} is in host memory; expected an array on a GPU (ac.gemm copies host arrays)")
    if element is not None and view.dtype != element:
        raise InvalidOperandError(
            f"{name} is no array of bytes (uint8), as which fp4, its e8m0 scales and masks of bits are given"
        )
    if element is None and (found := operands.dtype_of(view, name)) is not spec.dtype:
        raise InvalidOperandError(f"{name} is {found.value}; the request says {spec.dtype.value}")
    if view.shape != spec.shape:
        raise InvalidOperandError(f"{name} has shape {view.shape}; the request says {spec.shape}")
    if not _has_strides(view, spec.strides):
        raise InvalidOperandError(
            f"{name} has strides {view.strides}; the request's layout means {spec.strides}: copy it into that layout, "
            "or ask for the one that it has"
        )


class Weights:
    """New values for a bound operand, imported in the caller's thread without reading them.

    They are an array of any framework, on the GPU or the host; or bytes in the operand's memory order (row-major or
    column-major, as in the request): `bytes`, `bytearray`, `memoryview`, or a NumPy array of uint8. They must not
    change before they have been copied.

    Attributes:
        stream: the stream on which a device array's values are ready and are copied; 0 for host memory.
    """

    def __init__(self, weights: Any, stream: Any = None) -> None:
        raw = _bytes_of(weights)
        self._source: _Bytes | _core.Operand
        with operands.launching(stream, weights if raw is None else None, awaited=True) as launch:
            self.stream = launch.handle
            self._source = operands.as_operand(weights, "weights") if raw is None else raw

    def check(self, target: _core.Operand, name: str) -> None:
        """Refuses values that do not fit the operand of this name."""
        view = self._source
        if not isinstance(view, _core.Operand):
            if view.nbytes != _size(target):
                raise InvalidOperandError(
                    f"weights has {view.nbytes} bytes; the bound operand {name} has {_size(target)}: {target.shape} of "
                    f"{_dtype_name(target)}"
                )
            return
        if view.dtype != target.dtype:
            raise InvalidOperandError(f"weights is {_dtype_name(view)}; the bound operand is {_dtype_name(target)}")
        if view.shape != target.shape:
            raise InvalidOperandError(f"weights has shape {view.shape}; the bound operand has {target.shape}")
        if view.device_type == CPU:
            return
        if view.device_type != CUDA or view.device != target.device:
            raise InvalidOperandError(
                f"weights is on device {view.device}, of DLPack type {view.device_type}; the bound operand is on "
                f"cuda:{target.device}: copy it there first"
            )
        if not _has_strides(view, target.strides):
            raise InvalidOperandError(
                f"weights has strides {view.strides}; the bound operand has {target.strides}: on the GPU bytes are "
                "copied as they lie, so copy the weights into that layout first"
            )
        if view.pointer != target.pointer and _core.overlap(view, target):
            raise InvalidOperandError("weights overlaps the bound operand: give separate memory, or the operand itself")

    def copy_to(self, target: _core.Operand) -> None:
        """Writes the values into a dense operand, after `check`; see `Binding.refit`."""
        source = self._source
        if 0 in target.shape:
            return
        if not isinstance(source, _core.Operand):
            _core.upload(target.pointer, target.device, source)
        elif source.device_type == CPU:
            operands.copy_in(operands.to_numpy(source), target)
        elif source.pointer != target.pointer:
            _core.copy_async(target.pointer, source.pointer, _size(target), target.device, self.stream)


def import_weights(weights: Any, stream: Any = None) -> tuple[Weights, ...]:
    """New values for a bound operand, or for each array of a list."""
    each = weights if isinstance(weights, (list, tuple)) and weights else (weights,)
    return tuple(Weights(values, stream) for values in each)


class Binding:
    """An operand that a plan keeps: the caller's own array, or list of arrays, which stays alive with the binding.

    The next launch reads the values that `refit` writes. Kernels may read the operand before earlier work on the stream
    has ended: after writing into the array by other means, call `refit` with the array itself, which copies nothing.

    Attributes:
        operands: the views of the arrays that launches get, by the operand's labels; they keep the arrays alive.
        changed: whether the next launch waits for earlier work on its stream before it reads the operand.
    """

    def __init__(self, request: Request, array: Any, device: int) -> None:
        """Binds the operand of a request; refuses an array, or list, of another layout or device."""
        operation = operation_of(request)
        slot = operation.bound_slot(request)
        self.operands = {label: operands.as_operand(given, label) for label, given in arrays_of(slot, array)}
        for (label, view), spec in zip(self.operands.items(), slot.specs, strict=True):
            check_operand(view, spec, label, slot.element)
            if view.device != device:
                raise InvalidOperandError(f"{label} is on cuda:{view.device}; the plan is for cuda:{device}")
        labels = [label for each in operation.operands(request) for label in each.labels]
        self._first = labels.index(slot.labels[0]) if slot.labels else 0
        self._settled = [settled_operand(view) for view in self.operands.values()]
        self.changed = True

    def insert(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of a plan's call: the given ones, with the bound operand in its place.

        The operand is marked as settled except for the first launch after its values were written, which waits for
        earlier work on its stream.
        """
        views = self.operands.values() if self.changed else self._settled
        self.changed = False
        return [*arrays[: self._first], *views, *arrays[self._first :]]

    def refit(self, weights: Sequence[Weights]) -> None:
        """Writes new values into the operand in place, which plans and captured graphs then read.

        Values in GPU memory are copied in the order of `weights.stream`, without waiting: the caller orders launches on
        other streams. Values in host memory are copied at once, after all work of the GPU. All values are checked
        before any is written.
        """
        if len(weights) != len(self.operands):
            raise InvalidOperandError(f"weights has {len(weights)} arrays; the bound operand has {len(self.operands)}")
        if any(view.read_only for view in self.operands.values()):
            raise InvalidOperandError("the bound operand is read-only: bind an array that may be written")
        for (label, view), values in zip(self.operands.items(), weights, strict=True):
            values.check(view, label)
        for view, values in zip(self.operands.values(), weights, strict=True):
            values.copy_to(view)
        self.changed = True


class BoundPlan:
    """A plan with an operand bound: `bound(*arrays, out=None, alpha=None, beta=None, stream=None)` launches.

    Of a plain GEMM that is `bound(a, c=None, ...)`; other plans take the rest of the arrays of their operand table.

    Attributes:
        plan: the plan, with which `source`, `kernel_name` and `kernel_handle` are shared.
        key: the plan's key.
        binding: the operand.
    """

    def __init__(self, plan: Any, b: Any) -> None:
        """Binds an operand to a plan.

        Args:
            plan: a plan made from a request.
            b: the operand as the request has it; see `Binding`.

        Raises:
            InvalidOperandError: `b` is not that operand, or `plan` is none, or was made from no request.
        """
        try:
            request, device = plan.request, plan.device
        except AttributeError:
            raise InvalidOperandError(f"plan is a {type(plan).__name__}; expected a Plan, as ac.plan makes") from None
        if request is None:
            raise InvalidOperandError("the plan was made from no request: there is nothing to check b against")
        self.plan = plan
        self.key: PlanKey = plan.key
        self.binding = Binding(request, b, device)

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        """Launches the plan with the bound operand; see the plan."""
        given = self.binding.insert(arrays)
        try:
            return self.plan(*given, **options)
        except BaseException:
            self.binding.changed = True  # the launch may not have waited
            raise

    def refit(self, weights: Any, stream: Any = None) -> None:
        """Writes new values into the bound operand; see `Weights` and `Binding.refit`. Of a list, a list of values."""
        self.binding.refit(import_weights(weights, stream))

    source = property(operator.attrgetter("plan.source"), doc="The kernel's source.")
    kernel_name = property(operator.attrgetter("plan.kernel_name"), doc="The kernel's name.")
    kernel_handle = property(operator.attrgetter("plan.kernel_handle"), doc="The loaded kernel.")


def _has_strides(view: _core.Operand, strides: tuple[int, ...]) -> bool:
    """Whether an array has these strides, as far as its extents make them matter."""
    return 0 in view.shape or same_layout(view.shape, view.strides, strides)


def settled_operand(view: _core.Operand) -> _core.Operand:
    """An operand marked as not written by launches that may still be running."""
    return _core.Operand(
        view.pointer, view.shape, view.strides, view.dtype, view.device_type, view.device, read_only=view.read_only,
        owner=view, settled=True,
    )  # fmt: skip


def arrays_of(slot: OperandSlot, given: Any) -> list[tuple[str, Any]]:
    """(label, array) of every array of an operand; refuses a list of another length, or no list where one is due."""
    if not slot.listed:
        return [(slot.name, given)]
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise InvalidOperandError(f"{slot.name} is a {type(given).__name__}; expected a list, an array for each group")
    if len(given) != len(slot.specs):
        raise InvalidOperandError(f"{slot.name} has {len(given)} arrays; the request has {len(slot.specs)} groups")
    return list(zip(slot.labels, given, strict=True))


def _size(view: _core.Operand) -> int:
    return math.prod(view.shape) * view.dtype[1] // 8


def _dtype_name(view: _core.Operand) -> str:
    return "uint8" if view.dtype == BYTE else operands.dtype_of(view, "weights").value


def _bytes_of(weights: Any) -> _Bytes | None:
    raw = isinstance(weights, np.ndarray) and weights.dtype == np.uint8
    if not raw and not isinstance(weights, (bytes, bytearray, memoryview)):
        return None
    try:
        return np.frombuffer(memoryview(weights).cast("B"), np.uint8)
    except (TypeError, ValueError) as error:
        raise InvalidOperandError(f"weights are bytes that do not lie together: {error}") from error
