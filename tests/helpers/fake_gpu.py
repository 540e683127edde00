"""A GPU for actors and messages: its memory is the host's, its kernels are NumPy's, its streams are numbers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from atomr_cutlass import GemmLayout, GemmRequest, GroupedGemmRequest, PlanKey, _core, reference
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.ops.conv2d import reference as conv_reference
from atomr_cutlass.ops.conv2d.geometry import DGRAD, FPROP
from atomr_cutlass.ops.conv2d.request import ConvLayout
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.operation import plain
from atomr_cutlass.ops.grouped_gemm import reference as grouped_reference
from atomr_cutlass.pipeline.operand_table import poison
from atomr_cutlass.pipeline.operation import operation_of

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


def operands_of(request: GemmRequest, seed: int = 0) -> dict[str, _core.Operand]:
    """Small whole numbers for a request: every dtype multiplies and adds them exactly."""
    random = np.random.default_rng(seed)
    problem = request.problem(0)
    made = {}
    specs = (("a", problem.a, request.layout_a), ("b", problem.b, request.layout_b), ("c", problem.c, request.layout_c))
    for name, spec, layout in specs:
        if spec is not None:
            values = random.integers(-2, 3, spec.shape).astype(numerics.numpy_dtype(spec.dtype))
            made[name] = place(values, columns=layout is GemmLayout.COL_MAJOR)
    return made


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


def arrays_of(request: Any, seed: int = 0) -> dict[str, Any]:
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


def expected(request: Any, given: dict[str, Any]) -> Any:
    """The reference's result of a request for arrays on the host; lists for groups."""
    how = {"alpha": request.epilogue.alpha, "beta": request.epilogue.beta, "out_dtype": request.result_dtype}
    how["math"] = request.math
    a, b, *_ = given.values()
    if isinstance(request, GroupedGemmRequest):
        how |= {"bias": given.get("bias"), "activation": request.epilogue.activation}
        return grouped_reference.grouped_gemm(given["a"], given["b"], given.get("c"), **how)
    if isinstance(request, GemmRequest):
        scale_d = float(given["scale_d"][0]) if "scale_d" in given else None
        scales = {name: given[name] for name in ("scale_a", "scale_b") if name in given}
        return gemm_reference.gemm_with_amax(a, b, given.get("c"), **how, **scales, scale_d=scale_d)
    g = request.shape.geometry
    how |= {"stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups}
    nchw = request.layout is ConvLayout.NCHW
    a, b, c = (x if x is None or not nchw else x.transpose(0, 2, 3, 1) for x in (a, b, given.get("c")))
    if request.op == FPROP:
        d = conv_reference.conv2d(a, b, c, bias=given.get("bias"), activation=request.epilogue.activation, **how)
    elif request.op == DGRAD:
        d = conv_reference.conv2d_dgrad(a, b, g.x_shape, c, bias=given.get("bias"), **how)
    else:
        d = conv_reference.conv2d_wgrad(a, b, g.w_shape, c, **how)
    return d.transpose(0, 3, 1, 2) if nchw else d


def fused(request: GemmRequest, given: dict[str, Any]) -> dict[str, Array]:
    """The outputs of a request with an epilogue, D as `out`, for arrays on the host."""
    assert request.tree is not None
    scales = {name: given[name] for name in ("scale_a", "scale_b") if request.scaling}
    c = given["c"] if request.epilogue.beta != 0 else None
    acc = gemm_reference.gemm(
        given["a"], given["b"], c, alpha=request.epilogue.alpha, beta=request.epilogue.beta, **scales,
        out_dtype=CutlassDtype.F64, math=request.math,
    )  # fmt: skip
    read = {operand.name: given[operand.name] for operand in request.tree.inputs}
    return reference.evaluate(request.tree, acc, read, out_dtype=request.result_dtype)


@dataclass
class FakeOpPlan:
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
        assert (alpha, beta) == (self.request.epilogue.alpha, self.request.epilogue.beta)
        operation, host, views = operation_of(self.request), {}, {}
        left = [*arrays, out]
        for slot in operation.operands(self.request):
            for label, spec in zip(slot.labels, slot.specs, strict=True):
                view = views[label] = left.pop(0)
                assert (view.shape, view.dtype) == (spec.shape, slot.element or spec.dtype.dlpack)
                host[label] = poison(slot, spec) if slot.written else fetch(view)
        assert left == []
        probe = operation.probe(self.request, dict(host))
        for part in probe.parts():
            probe.compute(part)
        for slot in operation.operands(self.request):
            for label in slot.labels if slot.written else ():
                store(views[label], host[label])


@dataclass
class FakePlan:
    """A plan that multiplies when it is called, on the fake GPU."""

    request: GemmRequest
    device: int
    gpu: FakeGpu
    source: str = "// source"
    kernel_name: str = "fake_kernel"
    kernel_handle: int = 1

    @property
    def key(self) -> PlanKey:
        return self.request.plan_key()

    def __call__(
        self,
        a: _core.Operand,
        b: _core.Operand,
        c: _core.Operand | None = None,
        *,
        out: _core.Operand,
        alpha: float,
        beta: float,
        stream: int,
    ) -> None:
        self.gpu.enter(self, stream)
        wide = alpha * (fetch(a).astype(np.float64) @ fetch(b).astype(np.float64))
        if c is not None:
            wide = wide + beta * fetch(c).astype(np.float64)
        result = np.ascontiguousarray(wide.astype(numerics.numpy_dtype(self.request.result_dtype)))
        ctypes.memmove(out.pointer, result.ctypes.data, result.nbytes)


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

    plans: list[FakePlan | FakeOpPlan] = field(default_factory=list)
    launches: list[tuple[FakePlan | FakeOpPlan, int]] = field(default_factory=list)
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
        made = (FakePlan if isinstance(request, GemmRequest) and plain(request) else FakeOpPlan)(request, device, self)
        self.plans.append(made)
        return made

    def enter(self, plan: FakePlan | FakeOpPlan, stream: int) -> None:
        self.fail()
        self.launches.append((plan, stream))

    def empty(
        self, shape: tuple[int, ...], dtype: CutlassDtype, device: int, _like: Any
    ) -> tuple[_core.Operand, _core.Operand]:
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
