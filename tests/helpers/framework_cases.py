"""Cases of `test_frameworks.py`, over a fake driver that notes which stream waits for which; memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
from atomr_cutlass import _core
from atomr_cutlass.arrays import frameworks, operands
from dlpack_arrays import CURRENT_STREAM, Array, CudaArray, Tensor

D = ac.CutlassDtype
CUDA = (operands.CUDA, 0)
CAPTURED = 777  # the stream that the fake driver says is being captured
driver = ctypes.CDLL("libcuda.so.1")
random = np.random.default_rng(3)


def orders() -> list[tuple[int, int]]:
    """(before, after) of the streams that were ordered since the last time."""
    count = ctypes.c_int.in_dll(driver, "fake_order_count")
    noted = (ctypes.c_uint64 * 2 * 256).in_dll(driver, "fake_orders")
    made = [(noted[i][0], noted[i][1]) for i in range(count.value)]
    count.value = 0
    return made


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    """Small whole numbers."""
    return random.integers(-8, 9, shape).astype(np.float32)


def tensor(*shape: int) -> Tensor:
    """Of a framework with the exchange API, on the GPU."""
    return Tensor(numbers(*shape), device=CUDA)


class CupyArray(Array):
    """Of CuPy, whose module `cupy_on` stands in for."""

    device = types.SimpleNamespace(id=0)


class JaxArray(Array):
    """Of JAX."""


CupyArray.__module__, JaxArray.__module__ = "cupy", "jaxlib._jax"


@contextmanager
def cupy_on(stream: int) -> Iterator[None]:
    """CuPy, with this stream current."""

    class Device:
        def __init__(self, _index: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def alloc(size: int) -> Any:
        buffer = _core.Buffer(0, size)
        return types.SimpleNamespace(ptr=buffer.pointer, buffer=buffer)

    def from_dlpack(operand: _core.Operand) -> CupyArray:
        operand.__dlpack__(stream=stream or 1)
        return CupyArray(host(operand), device=CUDA)

    module = types.ModuleType("cupy")
    current = types.SimpleNamespace(ptr=stream)
    vars(module)["cuda"] = types.SimpleNamespace(Device=Device, get_current_stream=lambda: current, alloc=alloc)
    vars(module)["from_dlpack"] = from_dlpack
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", module)
        yield


@contextmanager
def torch_on(stream: int) -> Iterator[None]:
    """The exchange API's framework, with this stream current."""
    CURRENT_STREAM[0] = stream
    yield
    CURRENT_STREAM[0] = 0


def host(operand: _core.Operand) -> np.ndarray[Any, Any]:
    """The elements of an operand on the fake GPU, without a copy."""
    return operands.to_numpy(
        _core.Operand(operand.pointer, operand.shape, operand.strides, operand.dtype, operands.CPU, 0, False, operand)
    )


def refused(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
    """Asserts that a call raises, and says why."""
    with pytest.raises(error, match=says):
        call()


def both_ways(call: Callable[[], Any]) -> None:
    """Asserts that a call waits for the stream 5 and then has it wait for 42, where it launches."""
    orders()
    call()
    assert orders() == [(5, 42), (42, 5)]


def plan_of(m: int, n: int, k: int) -> Any:
    return ac.plan(ac.GemmRequest(ac.GemmShape(m, n, k), dtype=D.F32, precision="ieee"))


# ----------------------------------------------------------------------------------------------------------------------
# Results


def case_a_call_belongs_to_the_first_array_that_is_no_view_of_ours() -> None:
    """As a bound operand is one."""
    made, a, b = plan_of(8, 8, 16), tensor(8, 16), tensor(16, 8)
    with torch_on(5):
        result = made(operands.as_operand(a, "a"), b)
    assert isinstance(result, Tensor)
    assert np.array_equal(result.memory, a.memory @ b.memory)
    refused(ac.InvalidOperandError, "out is needed", lambda: made(*(operands.as_operand(x, "x") for x in (a, b))))


def case_an_array_is_asked_once_in_a_call() -> None:
    a, b = (Array(numbers(*shape), device=CUDA) for shape in ((8, 16), (16, 8)))
    for _ in range(2):  # the call that is parsed, and one with its plan
        for array in (a, b):
            array.asked.clear()
        ac.gemm(a, b)
        assert (len(a.asked), len(b.asked)) == (1, 1)


def case_events() -> None:
    """An event that another stream waits for; one that was reached is done."""
    orders()
    event = _core.Event(0, 5)
    event.hold(6)
    assert orders() == [(5, 6)]
    assert event.done
    event.wait()


def case_new_results_on_another_stream_are_ordered_both_ways() -> None:
    a, b = tensor(4, 5), tensor(5, 6)
    made = plan_of(4, 6, 5)
    with torch_on(5):
        for call in (ac.gemm, ac.gemm, made):  # the second finds the first one's plan
            both_ways(
                lambda call=call: np.testing.assert_array_equal(call(a, b, stream=42).memory, a.memory @ b.memory)
            )


def case_new_results_on_their_own_stream_need_no_order() -> None:
    a, b, out = tensor(4, 5), tensor(5, 6), tensor(4, 6)
    made = plan_of(4, 6, 5)
    with torch_on(42):
        orders()
        for call in (ac.gemm, ac.gemm, made):
            call(a, b)
            call(a, b, stream=42)
            call(a, b, out=out)
    assert orders() == []


def case_results_of_the_caller_are_the_callers_to_order_on_a_stream_that_it_names() -> None:
    a, b, out = tensor(4, 5), tensor(5, 6), tensor(4, 6)
    with torch_on(5):
        orders()
        for call in (ac.gemm, ac.gemm, plan_of(4, 6, 5)):
            call(a, b, out=out, stream=42)
    assert orders() == []


def case_results_of_cupy_are_ordered_both_ways() -> None:
    a, b = (CupyArray(numbers(*shape), device=CUDA) for shape in ((4, 5), (5, 6)))
    with cupy_on(5):
        for _ in range(2):
            both_ways(lambda: ac.gemm(a, b, stream=42))
        orders()
        got = ac.gemm(a, b)
        assert orders() == []
    np.testing.assert_array_equal(got.memory, a.memory @ b.memory)


def case_a_capture_takes_the_launch_in_where_its_memory_is_used() -> None:
    a, b = tensor(4, 5), tensor(5, 6)
    made = plan_of(4, 6, 5)
    with torch_on(CAPTURED):
        orders()
        made(a, b, stream=42)
        # The fake stream 42 has not joined the capture, as a real one had: the way back is not ordered.
        assert orders() == [(CAPTURED, 42)]
    with torch_on(5):
        made(a, b, stream=CAPTURED)
        assert orders() == []


def case_operands_know_the_launch_that_wrote_them() -> None:
    a, b = (CudaArray(array.ctypes.data, array.shape, array.dtype.str, array.strides) for array in (A, B))
    d = ac.gemm(a, b, stream=42)
    orders()
    d.__dlpack__(stream=9)
    assert orders() == [(42, 9)]
    d.__dlpack__(stream=-1)
    assert orders() == []
    d.__dlpack__()
    assert orders() == [(42, 0)]
    ac.gemm(d, b, stream=8)
    assert orders()[0] == (42, 8)
    out = _core.Operand(d.pointer, d.shape, None, d.dtype, operands.CUDA, 0, False, d)
    plan_of(4, 5, 5)(operands.as_operand(a), operands.as_operand(b), out=out, stream=11)
    orders()
    out.__dlpack__(stream=9)
    assert orders() == [(11, 9)]


A, B = numbers(4, 5), numbers(5, 5)


# ----------------------------------------------------------------------------------------------------------------------
# Imports


def case_dlpack_gets_the_launch_stream() -> None:
    for stream, given in ((None, 1), (0, 1), (2, 2), (42, 42)):
        a, b, out = (Array(numbers(*shape), device=CUDA) for shape in ((4, 5), (5, 6), (4, 6)))
        ac.gemm(a, b, out=out, stream=stream)
        plan_of(4, 6, 5)(a, b, out=out, stream=stream)
        for array in (a, b, out):
            assert {asked["stream"] for asked in array.asked} == {given}


def case_cupy_records_nothing_where_it_is_launched() -> None:
    """Its stream may be captured."""
    for how in ({}, {"stream": CAPTURED}):
        a, b, out = (CupyArray(numbers(*shape), device=CUDA) for shape in ((4, 5), (5, 6), (4, 6)))
        with cupy_on(CAPTURED):
            orders()
            ac.gemm(a, b, out=out, **how)
            plan_of(4, 6, 5)(a, b, out=out, **how)
            assert orders() == []
        for array in (a, b, out):
            assert {asked["stream"] for asked in array.asked} == {frameworks.UNORDERED}


def case_frameworks_that_are_mixed_are_ordered() -> None:
    a, b, out = tensor(4, 5), CupyArray(numbers(5, 6), device=CUDA), CupyArray(numbers(4, 6), device=CUDA)
    with torch_on(42), cupy_on(5):
        for call in (ac.gemm, plan_of(4, 6, 5)):
            orders()
            call(a, b, out=out)
            assert b.asked[-1]["stream"] == out.asked[-1]["stream"] == 42  # CuPy has 42 wait for 5
            assert orders() == [(42, 5)]
    np.testing.assert_array_equal(out.memory, a.memory @ b.memory)
    a, b = CupyArray(numbers(4, 5), device=CUDA), tensor(5, 6)
    with torch_on(5), cupy_on(42):
        for call in (ac.gemm, plan_of(4, 6, 5)):
            both_ways(lambda call=call: call(a, b, out=CupyArray(numbers(4, 6), device=CUDA)))


def case_jax_is_awaited_when_its_arrays_have_been_read() -> None:
    a, b, out = JaxArray(numbers(4, 5), device=CUDA), JaxArray(numbers(5, 6), device=CUDA), tensor(4, 6)
    waited: list[tuple[int, int]] = []
    jax = types.ModuleType("jax")
    vars(jax)["dlpack"] = types.SimpleNamespace(from_dlpack=lambda operand: host(operand).copy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jax", jax)
        patch.setattr(_core, "synchronize", lambda *where: waited.append(where))
        for stream in (None, 42):
            np.testing.assert_array_equal(ac.gemm(a, b, stream=stream), a.memory @ b.memory)
            assert set(waited) == {(0, stream or 0)}
            assert a.asked[-1]["stream"] == b.asked[-1]["stream"] == (stream or 1)
            waited.clear()
        plan_of(4, 6, 5)(a, b, out=out, stream=42)
        assert waited == [(0, 42)]
        waited.clear()
        ac.gemm(tensor(4, 5), b, out=out)
        assert waited == [(0, 0)]
    refused(ac.InvalidOperandError, "JAX|read-only", lambda: ac.gemm(a, b, out=JaxArray(numbers(4, 6), device=CUDA)))


def case_the_stream_of_a_cuda_array_is_waited_for() -> None:
    def array(memory: np.ndarray[Any, Any], stream: int | None) -> CudaArray:
        return CudaArray(memory.ctypes.data, memory.shape, memory.dtype.str, memory.strides, stream=stream)

    out = numbers(4, 5)
    for call in (ac.gemm, plan_of(4, 5, 5)):
        orders()
        call(array(A, 5), array(B, 42), out=array(out, 1), stream=42)
        # A function's first call imports such arrays twice, for its key and for its views.
        assert list(dict.fromkeys(orders())) == [(5, 42), (0, 42)]
        call(array(A, None), array(B, 5), out=array(out, 1))
        assert list(dict.fromkeys(orders())) == [(5, 0), (0, 5)]
    np.testing.assert_array_equal(out, A @ B)


def case_a_cuda_array_without_a_device_is_where_the_driver_says() -> None:
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "pointer_device", lambda pointer: asked.append(pointer) or 3)
        assert operands.as_operand(CudaArray(4096, (2, 3))).device == 3
        assert operands.as_operand(CudaArray(0, (0, 3))).device == 0
        array = CudaArray(4096, (2, 3))
        vars(array)["device"] = types.SimpleNamespace(id=1)
        assert operands.as_operand(array).device == 1
    assert asked == [4096]
    assert _core.pointer_device(4096) == 0
    refused(ac.InvalidOperandError, "no GPU memory at address 0: give an array that", lambda: _core.pointer_device(0))


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
