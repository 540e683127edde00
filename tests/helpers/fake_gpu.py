"""A GPU for actors and messages: its memory is the host's, its kernels are NumPy's, its streams are numbers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from atomr_cutlass import GemmLayout, GemmRequest, PlanKey, _core, numerics, operands
from atomr_cutlass.generator.dtypes import CutlassDtype

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
    """What an operand in the fake GPU's memory holds now."""
    if 0 in operand.shape:
        return operands.to_numpy(operand)
    return operands.to_numpy(
        _core.Operand(operand.pointer, operand.shape, operand.strides, operand.dtype, operands.CPU, 0, True, operand)
    ).copy()


def operands_of(request: GemmRequest, seed: int = 0) -> dict[str, _core.Operand]:
    """Small whole numbers for a request: every dtype multiplies and adds them exactly."""
    random = np.random.default_rng(seed)
    what = request.problem(0)
    made = {}
    specs = (("a", what.a, request.layout_a), ("b", what.b, request.layout_b), ("c", what.c, request.layout_c))
    for name, spec, layout in specs:
        if spec is not None:
            values = random.integers(-2, 3, spec.shape).astype(numerics.numpy_dtype(spec.dtype))
            made[name] = place(values, columns=layout is GemmLayout.COL_MAJOR)
    return made


def product(request: GemmRequest, a: Array, b: Array, c: Array | None = None) -> Array:
    """What a request computes, for operands of small whole numbers."""
    wide = a.astype(np.float64) @ b.astype(np.float64) * request.epilogue.alpha
    if c is not None:
        wide = wide + request.epilogue.beta * c.astype(np.float64)
    return wide.astype(numerics.numpy_dtype(request.result_dtype))


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


@dataclass
class FakeGpu:
    """What was asked of the fake GPU.

    Attributes:
        plans: plans made, in order.
        launches: (plan, stream) of each launch.
        synchronized: (device, stream) of each wait.
        copies: (to, source, size, device, stream) of copies within the GPU.
        capturing: streams that are being captured.
        fail: called at each launch; raises what the launch is to raise.
        current: the stream that is current in this thread.
    """

    plans: list[FakePlan] = field(default_factory=list)
    launches: list[tuple[FakePlan, int]] = field(default_factory=list)
    synchronized: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    fail: Callable[[], None] = lambda: None
    current: threading.local = field(default_factory=threading.local)

    def plan(self, request: GemmRequest, device: int) -> FakePlan:
        """A planner for actors."""
        made = FakePlan(request, device, self)
        self.plans.append(made)
        return made

    def enter(self, plan: FakePlan, stream: int) -> None:
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

        def upload(pointer: int, _device: int, source: Array) -> None:
            ctypes.memmove(pointer, source.ctypes.data, source.nbytes)

        monkeypatch.setattr(operands, "empty", self.empty)
        monkeypatch.setattr(operands, "current_stream", lambda _array, _view=None: getattr(self.current, "stream", 0))
        monkeypatch.setattr(_core, "upload", upload)
        monkeypatch.setattr(_core, "synchronize", lambda *where: self.synchronized.append(where))
        monkeypatch.setattr(_core, "copy_async", copy_async, raising=False)
        monkeypatch.setattr(_core, "capturing", lambda _device, stream: stream in self.capturing, raising=False)
