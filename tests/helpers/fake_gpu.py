"""A GPU for actors and messages: its memory is the host's, its kernels are NumPy's, its streams are numbers."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from atomr_cutlass import GemmRequest, PlanKey, _core
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.pipeline.operation import operation_of, poison

Array = np.ndarray[Any, Any]


def place(array: Array, *, columns: bool = False, device: int = 0, read_only: bool = False) -> _core.Operand:
    """A copy of an array in the fake GPU's memory, its matrices row-major or, if `columns`, column-major."""
    dense = np.ascontiguousarray(array.swapaxes(-1, -2) if columns else array)
    # NumPy's own memory would be given away with the array: this lives as long as the operand.
    memory = np.empty(max(1, dense.nbytes), np.uint8)
    memory[: dense.nbytes] = dense.reshape(-1).view(np.uint8)
    strides = [stride // array.itemsize for stride in dense.strides]
    if columns:
        strides[-2:] = reversed(strides[-2:])
    dtype = numerics.from_numpy_dtype(array.dtype)
    assert dtype is not None
    return _core.Operand(
        memory.ctypes.data, array.shape, strides, dtype.dlpack, operands.CUDA, device, read_only, memory
    )


def fetch(operand: _core.Operand) -> Array:
    """The present elements of an operand in the fake GPU's memory."""
    if 0 in operand.shape:
        return operands.to_numpy(operand)
    return operands.to_numpy(
        _core.Operand(operand.pointer, operand.shape, operand.strides, operand.dtype, operands.CPU, 0, True, operand)
    ).copy()


def product(request: GemmRequest, a: Array, b: Array, c: Array | None = None) -> Array:
    """The result of a request, for operands of small whole numbers."""
    wide = a.astype(np.float64) @ b.astype(np.float64) * request.epilogue.alpha
    if c is not None:
        wide = wide + request.epilogue.beta * c.astype(np.float64)
    return wide.astype(numerics.numpy_dtype(request.result_dtype))


def store(operand: _core.Operand, values: Array) -> None:
    """Writes an operand in the fake GPU's memory, however it lies."""
    if 0 not in operand.shape:
        alias = _core.Operand(
            operand.pointer, operand.shape, operand.strides, operand.dtype, operands.CPU, 0, False, operand
        )
        operands.to_numpy(alias)[...] = values


def operands_of(request: Any, seed: int = 0) -> dict[str, Any]:
    """Operands of any request by name, small whole numbers (scales: powers of 2), lists for those of groups."""
    random = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    for slot in operation_of(request).operands(request)[:-1]:
        views = []
        for spec in slot.specs:
            values = random.integers(-2, 3, spec.shape)
            if slot.name.startswith(("scale", "amax")):
                values = 2.0**values
            if slot.element == operands.BYTE:
                values = random.integers(0, 256, spec.shape)
            dtype = np.dtype(np.uint8) if slot.element == operands.BYTE else numerics.numpy_dtype(spec.dtype)
            memory = np.zeros(max(1, int(np.prod(spec.shape))), dtype)
            element = slot.element or spec.dtype.dlpack
            view = _core.Operand(memory.ctypes.data, spec.shape, spec.strides, element, operands.CUDA, 0, False, memory)
            store(view, values.astype(np.float32).astype(dtype))
            views.append(view)
        made[slot.name] = views if slot.listed else views[0]
    return made


def labelled(request: Any, given: dict[str, Any]) -> dict[str, _core.Operand]:
    """Operands by the labels of the operand table, of operands by name."""
    return {
        label: view
        for slot in operation_of(request).operands(request)[:-1]
        for label, view in zip(slot.labels, given[slot.name] if slot.listed else [given[slot.name]], strict=True)
    }


@dataclass
class FakePlan:
    """A plan that computes by the reference when it is called with its arrays, on the fake GPU."""

    request: Any
    device: int
    gpu: FakeGpu
    source: str = "// source"
    kernel_name: str = "fake_kernel"
    kernel_handle: int = 1

    @property
    def key(self) -> PlanKey:
        return self.request.plan_key()

    def __call__(self, *arrays: _core.Operand, out: _core.Operand, alpha: float, beta: float, stream: int) -> None:
        self.gpu.enter(self, stream)
        operation, host, views = operation_of(self.request), {}, {}
        left = [*arrays, out]
        for slot in operation.operands(self.request):
            for label, spec in zip(slot.labels, slot.specs, strict=True):
                view = views[label] = left.pop(0)
                assert (view.shape, view.dtype) == (spec.shape, slot.element or spec.dtype.dlpack)
                host[label] = poison(slot, spec) if slot.written else fetch(view)
        assert left == []
        scaled = dataclasses.replace(self.request.epilogue, alpha=alpha, beta=beta)
        probe = operation.probe(dataclasses.replace(self.request, epilogue=scaled), dict(host))
        for part in probe.parts():
            probe.compute(part)
        for slot in operation.operands(self.request):
            for label in slot.labels if slot.written else ():
                store(views[label], host[label])


class FakeEvent:
    """A point in a fake stream's work."""

    def __init__(self, gpu: FakeGpu, device: int, stream: int) -> None:
        gpu.fail_recording()
        self._gpu, self._where = gpu, (device, stream)
        self._busy = gpu.busy.get(stream)

    @property
    def done(self) -> bool:
        return self._busy is None or self._busy.is_set()

    def wait(self) -> None:
        assert self._busy is None or self._busy.wait(30)
        self._gpu.fail_waiting()
        self._gpu.synchronized.append(self._where)

    def hold(self, stream: int) -> None:
        self._gpu.orders.append((self._where[1], stream))


@dataclass
class FakeGpu:
    """The record of the calls to the fake GPU.

    Attributes:
        plans: plans made, in order.
        launches: (plan, stream) of each launch.
        synchronized: (device, stream) of each wait.
        orders: (stream before, stream after) of each wait of a stream for another.
        busy: by stream, what is set when the work launched on it from now on is done; without one it is done at once.
        copies: (to, source, size, device, stream) of copies within the GPU.
        capturing: streams that are being captured.
        fail: called at each launch; raises the exception of the launch.
        fail_recording: called where an event is recorded; likewise.
        fail_waiting: called when an event has been reached; likewise.
        current: the stream that is current in this thread.
    """

    plans: list[FakePlan] = field(default_factory=list)
    launches: list[tuple[FakePlan, int]] = field(default_factory=list)
    synchronized: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    orders: list[tuple[int, int]] = field(default_factory=list)
    busy: dict[int, threading.Event] = field(default_factory=dict)
    capturing: set[int] = field(default_factory=set)
    fail: Callable[[], None] = lambda: None
    fail_recording: Callable[[], None] = lambda: None
    fail_waiting: Callable[[], None] = lambda: None
    current: threading.local = field(default_factory=threading.local)

    def plan(self, request: Any, device: int) -> Any:
        """A planner for actors."""
        made = FakePlan(request, device, self)
        self.plans.append(made)
        return made

    def enter(self, plan: FakePlan, stream: int) -> None:
        self.fail()
        self.launches.append((plan, stream))

    def empty(
        self, shape: tuple[int, ...], element: tuple[int, int], device: int, _like: Any
    ) -> tuple[_core.Operand, _core.Operand]:
        dtype = CutlassDtype.from_dlpack(*element)
        assert dtype is not None
        made = place(np.zeros(shape, numerics.numpy_dtype(dtype)), device=device)
        return made, made

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the fake GPU in place of the driver."""

        def copy_async(to: int, source: int, size: int, device: int, stream: int) -> None:
            self.copies.append((to, source, size, device, stream))
            ctypes.memmove(to, source, size)

        def order(_device: int, before: int, after: int, **_options: Any) -> None:
            self.orders.append((before, after))

        def upload(pointer: int, _device: int, source: Array) -> None:
            ctypes.memmove(pointer, source.ctypes.data, source.nbytes)

        def upload_async(pointer: int, _device: int, source: Array, _stream: int) -> None:
            ctypes.memmove(pointer, source.ctypes.data, source.nbytes)

        def download(pointer: int, _device: int, target: Array) -> None:
            ctypes.memmove(target.ctypes.data, pointer, target.nbytes)

        monkeypatch.setattr(operands, "empty", self.empty)
        monkeypatch.setattr(operands, "current_stream", lambda _array, _view=None: getattr(self.current, "stream", 0))
        monkeypatch.setattr(_core, "upload", upload)
        monkeypatch.setattr(_core, "upload_async", upload_async)
        monkeypatch.setattr(_core, "download", download)
        monkeypatch.setattr(_core, "Event", lambda device, stream: FakeEvent(self, device, stream), raising=False)
        monkeypatch.setattr(_core, "order_streams", order)
        monkeypatch.setattr(_core, "synchronize", lambda *where: self.synchronized.append(where))
        monkeypatch.setattr(_core, "copy_async", copy_async, raising=False)
        monkeypatch.setattr(_core, "capturing", lambda _device, stream: stream in self.capturing, raising=False)
