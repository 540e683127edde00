"""What `test_pipeline.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import contextlib
import gc
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import atomr_cutlass as ac
import fake_pack
from atomr_cutlass import _core, devices, operands, table
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.compiler import Images, Unit
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.jit.toolchain import Toolchain
from dlpack_arrays import CudaArray

gemm_module = sys.modules["atomr_cutlass.gemm"]
plan_module = sys.modules["atomr_cutlass.plan"]
random = np.random.default_rng(7)


class Tensor(CudaArray):
    """A GPU array over NumPy's memory."""

    def __init__(self, array: np.ndarray[Any, Any], *, read_only: bool = False) -> None:
        super().__init__(array.ctypes.data, array.shape, array.dtype.str, array.strides, read_only=read_only)
        self.array = array


def operand(array: np.ndarray[Any, Any], device: int = 0) -> _core.Operand:
    """The same as an operand, which `gemm` reads without Python."""
    strides = [s // array.itemsize for s in array.strides]
    return _core.Operand(array.ctypes.data, array.shape, strides, (2, 32), operands.CUDA, device, False, array)


def matrix(*shape: int) -> np.ndarray[Any, Any]:
    """Small whole numbers, 16-byte aligned: their sums are exact."""
    padded = np.empty(int(np.prod(shape)) + 4, np.float32)
    start = -padded.ctypes.data % 16 // 4
    made = padded[start : start + int(np.prod(shape))].reshape(shape)
    made[...] = random.integers(-8, 9, shape)
    return made


def refused(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
    """Asserts that a call raises, and says why."""
    with pytest.raises(error, match=re.escape(says)):
        call()


# ----------------------------------------------------------------------------------------------------------------------


def case_the_gpu_is_described() -> None:
    gpu = devices.get()
    assert devices.available()
    assert (gpu.name, gpu.capability, gpu.multiprocessors, gpu.arch) == ("a fake GPU", (8, 0), 108, ac.SmArch.SM80)
    refused(ac.DeviceUnavailableError, "there is no GPU 1: 1 visible", lambda: devices.get(1))


def case_numpy_goes_to_the_gpu_and_back() -> None:
    a, b, c = matrix(5, 7), matrix(7, 3), matrix(5, 3)
    got = ac.gemm(a, b, c, alpha=2, beta=-1)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, 2 * (a @ b) - c)
    out = matrix(9, 8)
    before = out.copy()
    view = out[2:7, 1:4]
    assert ac.gemm(a, b, out=view) is view
    np.testing.assert_array_equal(view, a @ b)
    before[2:7, 1:4] = a @ b
    np.testing.assert_array_equal(out, before)


def case_gpu_arrays_stay_where_they_are() -> None:
    a, b, out = matrix(5, 7), matrix(7, 3), matrix(5, 3)
    given = Tensor(out)
    assert ac.gemm(Tensor(a), Tensor(b), out=given) is given
    np.testing.assert_array_equal(out, a @ b)
    got = ac.gemm(Tensor(a), Tensor(b))
    np.testing.assert_array_equal(operands.download(got), a @ b)


def padded(batch: tuple[int, ...], rows: int, columns: int) -> np.ndarray[Any, Any]:
    """A matrix a batch, by rows or by columns, in a larger buffer."""
    row_pad, column_pad = (int(random.choice([0, 0, 1, 4])) for _ in range(2))
    if random.integers(0, 2):
        return matrix(*batch, rows + row_pad, columns + column_pad)[..., :rows, :columns]
    return matrix(*batch, columns + column_pad, rows + row_pad)[..., :columns, :rows].swapaxes(-1, -2)


def case_every_layout_batch_and_scalar() -> None:
    for _ in range(250):
        m, n, k = (int(random.choice([1, 2, 3, 8])) for _ in range(3))
        full = [int(random.choice([1, 2, 3])) for _ in range(random.integers(0, 3))]
        broadcast = (
            tuple(int(random.choice([1, extent])) for extent in full[random.integers(0, len(full) + 1) :]) for _ in "ab"
        )
        a, b = padded(next(broadcast), m, k), padded(next(broadcast), k, n)
        alpha, beta = (float(random.choice([0, 1, -2])) for _ in range(2))
        want = alpha * (a @ b)
        out = padded(want.shape[:-2], m, n)
        c = None
        if beta:
            c = np.empty_like(out)  # of the layout of `out`, but dense
            c[...] = matrix(*want.shape)
            want += beta * c
        ac.gemm(Tensor(a), Tensor(b), None if c is None else Tensor(c), alpha=alpha, beta=beta, out=Tensor(out))
        np.testing.assert_array_equal(out, want)


def case_c_is_one_matrix_for_all_batches() -> None:
    a, b, c = matrix(3, 4, 5), matrix(5, 6), matrix(4, 6)
    np.testing.assert_array_equal(ac.gemm(a, b, c, beta=2), a @ b + 2 * c)


def case_batches_that_no_single_stride_reaches() -> None:
    a, b = matrix(2, 3, 4, 5), matrix(3, 2, 5, 6).swapaxes(0, 1)
    np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
    out = matrix(3, 2, 4, 6).swapaxes(0, 1)
    ac.gemm(Tensor(a), Tensor(b), out=Tensor(out))
    np.testing.assert_array_equal(out, a @ b)


def case_products_with_nothing_to_multiply() -> None:
    a, b, c = np.full((4, 5), np.nan, np.float32), np.full((5, 6), np.inf, np.float32), matrix(4, 6)
    np.testing.assert_array_equal(ac.gemm(a, b, alpha=0), np.zeros((4, 6)))
    np.testing.assert_array_equal(ac.gemm(a, b, c, alpha=0, beta=3), 3 * c)
    empty = np.empty((4, 0), np.float32), np.empty((0, 6), np.float32)
    np.testing.assert_array_equal(ac.gemm(*empty), np.zeros((4, 6)))
    np.testing.assert_array_equal(ac.gemm(*empty, c, beta=3), 3 * c)
    out = matrix(4, 6)
    ac.gemm(Tensor(a), Tensor(b), Tensor(c), alpha=0.0, beta=2.0, out=Tensor(out))
    np.testing.assert_array_equal(out, 2 * c)


def case_results_without_elements() -> None:
    for shape_a, shape_b in (((0, 5), (5, 6)), ((4, 5), (5, 0)), ((0, 4, 5), (5, 6))):
        a, b = np.empty(shape_a, np.float32), np.empty(shape_b, np.float32)
        assert ac.gemm(a, b).shape == (a @ b).shape
        assert ac.gemm(Tensor(a), Tensor(b)).shape == (a @ b).shape


def case_plans_are_kept_and_used_again() -> None:
    gemm_module._plans.clear()
    a, b, out = matrix(5, 7), matrix(7, 3), matrix(5, 3)
    for alpha in (1, 2, 3):
        ac.gemm(operand(a), operand(b), out=operand(out), alpha=alpha)
        np.testing.assert_array_equal(out, alpha * (a @ b))
    assert len(gemm_module._plans) == 1
    x, y, z = matrix(5, 7), matrix(7, 3), matrix(5, 3)
    ac.gemm(operand(x), operand(y), out=operand(z))
    np.testing.assert_array_equal(z, x @ y)
    assert len(gemm_module._plans) == 1
    ac.gemm(operand(x), operand(y), operand(out), beta=1, out=operand(z))
    np.testing.assert_array_equal(z, x @ y + out)
    assert len(gemm_module._plans) == 2


def case_few_plans_are_kept() -> None:
    gemm_module._plans.clear()
    for n in range(1, gemm_module.PLANS_KEPT + 20):
        ac.gemm(operand(matrix(1, 2)), operand(matrix(2, n)), out=operand(matrix(1, n)))
    assert len(gemm_module._plans) == gemm_module.PLANS_KEPT


def case_a_kept_plan_refuses_what_the_first_call_would_have() -> None:
    gemm_module._plans.clear()
    buffer = matrix(3, 4, 4)
    a, b, c = matrix(3, 4, 4), matrix(4, 4), matrix(4, 4)
    ac.gemm(operand(a), operand(b), out=operand(buffer))
    before = buffer.copy()
    refused(
        ac.InvalidOperandError, "out overlaps b", lambda: ac.gemm(operand(a), operand(buffer[1]), out=operand(buffer))
    )
    refused(ac.InvalidOperandError, "out overlaps a", lambda: ac.gemm(operand(buffer), operand(b), out=operand(buffer)))
    np.testing.assert_array_equal(buffer, before)
    # C is one matrix for all batches: it may not be the first of the batches that are written.
    ac.gemm(operand(a), operand(b), operand(c), beta=1, out=operand(buffer))
    before = buffer.copy()
    refused(
        ac.InvalidOperandError,
        "out overlaps c",
        lambda: ac.gemm(operand(a), operand(b), operand(buffer[0]), beta=1, out=operand(buffer)),
    )
    np.testing.assert_array_equal(buffer, before)
    for wrong in ("2", True, None, 1j):
        refused(
            ac.InvalidOperandError,
            "expected a number",
            lambda wrong=wrong: ac.gemm(  # type: ignore[misc]
                operand(a), operand(b), alpha=wrong, out=operand(buffer)
            ),
        )
    refused(ac.InvalidOperandError, "c is", lambda: ac.gemm(operand(a), operand(b), beta=1, out=operand(buffer)))
    np.testing.assert_array_equal(buffer, before)


def case_out_may_be_c() -> None:
    a, b, c = matrix(4, 5), matrix(5, 6), matrix(4, 6)
    for _ in range(2):
        want = a @ b + 2 * c
        ac.gemm(operand(a), operand(b), operand(c), beta=2, out=operand(c))
        np.testing.assert_array_equal(c, want)


def case_a_wrong_out_is_left_alone() -> None:
    a, b = matrix(4, 5), matrix(5, 6)
    for out in (matrix(4, 5), matrix(1, 4, 6), np.full((4, 6), 9, np.float16)):
        before = out.copy()
        refused(
            ac.CutlassError,
            "out",
            lambda out=out: ac.gemm(  # type: ignore[misc]
                Tensor(a), Tensor(b), out=Tensor(out), out_dtype=ac.CutlassDtype.F32
            ),
        )
        np.testing.assert_array_equal(out, before)
    refused(
        ac.InvalidOperandError, "out is read-only",
        lambda: ac.gemm(Tensor(a), Tensor(b), out=Tensor(matrix(4, 6), read_only=True)),
    )  # fmt: skip
    shared = as_strided(matrix(4, 6), (4, 6), (0, 4))
    refused(ac.InvalidOperandError, "share memory", lambda: ac.gemm(Tensor(a), Tensor(b), out=Tensor(shared)))


def case_mixed_devices_are_refused() -> None:
    a, b = matrix(4, 5), matrix(5, 6)
    refused(ac.InvalidOperandError, "a is on cuda:0 and b on the CPU", lambda: ac.gemm(Tensor(a), b))
    refused(ac.InvalidOperandError, "a is on cuda:0 and b on cuda:1", lambda: ac.gemm(operand(a), operand(b, 1)))
    refused(ac.DeviceUnavailableError, "there is no GPU 1", lambda: ac.gemm(operand(a, 1), operand(b, 1)))


def case_negative_strides_are_refused() -> None:
    a, b = matrix(4, 5), matrix(5, 6)
    refused(ac.InvalidOperandError, "negative stride", lambda: ac.gemm(Tensor(a[::-1]), Tensor(b)))


def case_strides_that_no_kernel_reads_are_refused() -> None:
    a, b = matrix(4, 10), matrix(5, 6)
    refused(ac.UnsupportedError, "must be contiguous", lambda: ac.gemm(Tensor(a[:, ::2]), Tensor(b)))


def case_c_in_another_layout_is_refused() -> None:
    a, b, c = matrix(4, 5), matrix(5, 4), matrix(4, 4)
    out = matrix(4, 4)
    before = out.copy()
    call = lambda: ac.gemm(Tensor(a), Tensor(b), Tensor(c.T), beta=1, out=Tensor(out))  # noqa: E731
    refused(ac.UnsupportedError, "c and out have different layouts", call)
    np.testing.assert_array_equal(out, before)


def case_a_plan_checks_and_launches() -> None:
    shape = ac.GemmShape(4, 6, 5)
    epilogue = ac.GemmEpilogue(alpha=2.0)
    made = ac.plan(ac.GemmRequest(shape, dtype=ac.CutlassDtype.F32, epilogue=epilogue))
    assert made.request is not None
    assert made.request.shape == shape
    assert made.kernel_name == made.kernel.name
    assert (made.device, made.grid) == (0, (1, 1, 1))
    a, b, out = matrix(4, 5), matrix(5, 6), matrix(4, 6)
    assert made(operand(a), operand(b), out=(given := operand(out))) is given
    np.testing.assert_array_equal(out, 2 * (a @ b))
    made(Tensor(a), Tensor(b), out=Tensor(out), alpha=-1.0)
    np.testing.assert_array_equal(out, -(a @ b))
    before = out.copy()
    wrong = (
        ("a is float32 of shape (5, 4)", lambda: made(operand(matrix(5, 4)), operand(b), out=operand(out))),
        (
            "b is float32 of shape (5, 6), strides (1, 5)",
            lambda: made(operand(a), operand(matrix(6, 5).T), out=operand(out)),
        ),
        ("out is float32 of shape (4, 5)", lambda: made(operand(a), operand(b), out=operand(matrix(4, 5)))),
        ("a is float32 of shape (4, 5), strides (5, 1) on cpu", lambda: made(a, operand(b), out=operand(out))),
        ("beta is not 0, so c is needed", lambda: made(operand(a), operand(b), out=operand(out), beta=1.0)),
        ("c is given but beta is 0", lambda: made(operand(a), operand(b), operand(matrix(4, 6)), out=operand(out))),
        ("out is needed", lambda: made(operand(a), operand(b))),
        ("is not an array", lambda: made("a", operand(b), out=operand(out))),
        ("expected an integer handle", lambda: made(operand(a), operand(b), out=operand(out), stream="main")),
    )
    for says, call in wrong:
        refused(ac.InvalidOperandError, says, call)
    np.testing.assert_array_equal(out, before)


def case_a_plan_refuses_what_it_cannot_be() -> None:
    anything: Any = "gemm"
    f32 = ac.CutlassDtype.F32
    refused(ac.InvalidOperandError, "expected a GemmRequest", lambda: ac.plan(anything))
    refused(ac.UnsupportedError, "is empty", lambda: ac.plan(ac.GemmRequest(ac.GemmShape(0, 6, 5), dtype=f32)))
    refused(
        ac.UnsupportedError, "no fused epilogues yet",
        lambda: ac.plan(ac.GemmRequest(ac.GemmShape(4, 6, 5), dtype=f32, epilogue=ac.GemmEpilogue(activation="relu"))),
    )  # fmt: skip
    refused(
        ac.UnsupportedError, "cannot implement this problem",
        lambda: ac.plan(ac.GemmRequest(ac.GemmShape(5001, 6, 5), dtype=f32)),
    )  # fmt: skip
    refused(
        ac.KernelNotFoundError, "ATOMR_CUTLASS_PRESET=",
        lambda: ac.plan(ac.GemmRequest(ac.GemmShape(4, 6, 5), dtype=ac.CutlassDtype.F64)),
    )  # fmt: skip
    refused(
        ac.DeviceUnavailableError, "there is no GPU 3",
        lambda: ac.plan(ac.GemmRequest(ac.GemmShape(4, 6, 5), dtype=f32), device=3),
    )  # fmt: skip


def case_errors_of_the_driver_are_typed() -> None:
    a, b, out = operand(matrix(4, 5)), operand(matrix(5, 6)), operand(matrix(4, 6))
    # The fake kernel fails with an illegal address on this stream.
    refused(
        ac.ContextPoisonedError, "ILLEGAL_ADDRESS (what the driver says)", lambda: ac.gemm(a, b, out=out, stream=666)
    )


def case_plans_are_safe_in_threads() -> None:
    a, b = matrix(8, 9), matrix(9, 10)
    made = ac.plan(ac.GemmRequest(ac.GemmShape(8, 10, 9), dtype=ac.CutlassDtype.F32))
    wrong: list[int] = []

    def work(stream: int) -> None:
        for scale in range(1, 60):
            out = matrix_of_nan(8, 10)
            made(operand(a), operand(b), out=operand(out), alpha=float(scale * stream), stream=stream)
            if not np.array_equal(out, scale * stream * (a @ b)):
                wrong.append(stream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def matrix_of_nan(*shape: int) -> np.ndarray[Any, Any]:
    """An output that nothing has been written to."""
    return np.full(shape, np.nan, np.float32)


def actor_request(**more: Any) -> ac.GemmRequest:
    return ac.GemmRequest(ac.GemmShape(8, 10, 9), dtype=ac.CutlassDtype.F32, **more)


def case_an_actor_launches_and_waits() -> None:
    actor = ac.CutlassActor(4)
    a, b, c, out = matrix(8, 9), matrix(9, 10), matrix(8, 10), matrix_of_nan(8, 10)
    request = actor_request(epilogue=ac.GemmEpilogue(alpha=2.0, beta=3.0))
    given = {"a": operand(a), "b": operand(b), "c": operand(c)}
    assert isinstance(actor.handle(ac.CutlassMsg.Gemm(request)), ac.CachedPlan)
    fresh = actor.handle(ac.CutlassMsg.Gemm(request, given))
    np.testing.assert_array_equal(operands.download(fresh), 2 * (a @ b) + 3 * c)
    view = operand(out)
    assert actor.handle(ac.CutlassMsg.Gemm(request, given, out=view, stream=5)) is view
    np.testing.assert_array_equal(out, 2 * (a @ b) + 3 * c)
    plan = actor.plan_cache.get(request.plan_key())
    assert isinstance(plan, ac.Plan)
    assert (plan.key, plan.kernel_name in plan.source, bool(plan.kernel_handle)) == (request.plan_key(), True, True)
    square = operand(matrix(8, 8))
    shape = ac.GemmShape(8, 8, 8)
    aliased = ac.CutlassMsg.Gemm(ac.GemmRequest(shape, dtype=ac.CutlassDtype.F32), (square, square), out=square)
    refused(ac.InvalidOperandError, "overlaps", lambda: actor.handle(aliased))


def case_an_actor_refits_what_it_binds() -> None:
    actor = ac.CutlassActor(4)
    a = matrix(8, 9)
    layers = [actor_request(binding=f"layer {i}") for i in range(2)]
    weights = [matrix(9, 10) for _ in layers]

    def product(layer: ac.GemmRequest, b: Any = None) -> Any:
        return operands.download(actor.handle(ac.CutlassMsg.Gemm(layer, {"a": operand(a), "b": b})))

    for layer, b in zip(layers, weights, strict=True):
        np.testing.assert_array_equal(product(layer, operand(b)), a @ b)
    new = [matrix(9, 10) for _ in range(3)]
    for form, values in zip((operand, lambda array: array, lambda array: array.tobytes()), new, strict=True):
        actor.handle(ac.CutlassMsg.Refit(ac.RefitMsg(layers[1].plan_key(), form(values))))
        np.testing.assert_array_equal(weights[1], values)  # the caller's own memory
        np.testing.assert_array_equal(product(layers[1]), a @ values)
        np.testing.assert_array_equal(product(layers[0]), a @ weights[0])


def case_a_bound_plan_launches() -> None:
    a, b, out = matrix(8, 9), matrix(9, 10), matrix_of_nan(8, 10)
    bound = ac.BoundPlan(ac.plan(actor_request()), operand(b))
    bound(operand(a), out=operand(out))
    np.testing.assert_array_equal(out, a @ b)
    new = matrix(9, 10)
    bound.refit(operand(new), stream=3)
    bound(operand(a), out=operand(out), alpha=2.0, stream=3)
    np.testing.assert_array_equal(out, 2 * (a @ new))
    refused(ac.InvalidOperandError, "b has shape (8, 9)", lambda: ac.BoundPlan(bound.plan, operand(a)))


def case_an_actor_is_safe_in_threads() -> None:
    actor = ac.CutlassActor(2)
    mailbox = actor.start()
    wrong: list[int] = []

    def work(index: int) -> None:
        for turn in range(10):
            n = 8 + (index + turn) % 4
            a, b, out = matrix(8, 9), matrix(9, n), matrix_of_nan(8, n)
            request = ac.GemmRequest(ac.GemmShape(8, n, 9), dtype=ac.CutlassDtype.F32)
            message = ac.CutlassMsg.Gemm(request, (operand(a), operand(b)), out=operand(out), stream=index + 1)
            _ = actor.handle(message) if turn % 2 else mailbox.ask(message)
            if not np.array_equal(out, a @ b):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mailbox.stop()
    assert wrong == []
    assert (actor.dispatched, len(actor.plan_cache)) == (320, 2)


def case_a_lost_context_puts_an_actor_out_of_service() -> None:
    told: list[Exception] = []
    actor = ac.CutlassActor(4, on_poisoned=told.append)
    given = operand(matrix(8, 9)), operand(matrix(9, 10))
    out = operand(matrix(8, 10))
    # The fake kernel fails with an illegal address on this stream.
    faulty = ac.CutlassMsg.Gemm(actor_request(), given, out=out, stream=666)
    refused(ac.ContextPoisonedError, "ILLEGAL_ADDRESS", lambda: actor.handle(faulty))
    good = ac.CutlassMsg.Gemm(actor_request(), given, out=out)
    refused(ac.ContextPoisonedError, "refused, since this process has lost", lambda: actor.handle(good))
    assert told == [actor.poisoned]


def case_the_reference_takes_gpu_arrays() -> None:
    a, b, out = matrix(4, 5), matrix(5, 6), matrix(4, 6)
    bias = matrix(6)
    ac.gemm(Tensor(a), Tensor(b), bias=Tensor(bias), activation="relu", out=Tensor(out), backend="reference")
    np.testing.assert_array_equal(out, np.maximum(a @ b + bias, 0))
    wide = matrix(4, 12)
    before = wide.copy()
    ac.gemm(Tensor(a), Tensor(b), out=Tensor(wide[:, ::2]), backend="reference")
    before[:, ::2] = a @ b
    np.testing.assert_array_equal(wide, before)
    np.testing.assert_array_equal(operands.download(ac.gemm(Tensor(a), Tensor(b), backend="reference")), a @ b)


def case_scales_are_folded() -> None:
    a, b, c = matrix(4, 5), matrix(5, 6), matrix(4, 6)
    got = ac.gemm(a, b, c, beta=1, scale_a=2.0, scale_b=0.5, scale_d=4.0)
    np.testing.assert_array_equal(got, 4 * (a @ b + c))
    rows = np.ones((4, 1), np.float32)
    refused(
        ac.UnsupportedError, "scale_a: only fp8 kernels take arrays; give numbers", lambda: ac.gemm(a, b, scale_a=rows)
    )


def case_device_memory_is_let_go_of() -> None:
    buffer = _core.Buffer(0, 64)
    view = _core.Operand(buffer.pointer, (4, 4), None, (2, 32), operands.CUDA, 0, False, buffer)
    copy = operands.upload(matrix(4, 4), 0)
    operands.copy_in(operands.download(copy), view)
    np.testing.assert_array_equal(operands.download(view), operands.download(copy))
    del buffer, view, copy
    gc.collect()


def case_a_request_is_explained_on_the_gpu() -> None:
    told = ac.explain(ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.F32))
    assert told.source == "pack fake"
    assert told.arch is ac.SmArch.SM80
    assert told.kernel == ac.plan(told.request).kernel_name


# ----------------------------------------------------------------------------------------------------------------------
# Kernels that the table lacks


@contextlib.contextmanager
def compiler(
    *, built: bool = False, gate: threading.Event | None = None, error: Exception | None = None
) -> Iterator[list[str]]:
    """NVRTC's stand-in is the system's C compiler; gives the names that it compiled. `built`: the pack stays."""
    compiled: list[str] = []

    def compile_unit(unit: Unit) -> Images:
        if gate is not None:
            assert gate.wait(60)
        compiled.append(unit.name)
        if error is not None:
            raise error
        key = next(key for key in expand("full", [ac.SmArch.SM80]) if key.name == unit.name)
        image = fake_pack.compile_at_run_time(folder, key)
        return Images(image, image)

    kernels._kernels.clear()
    gemm_module._plans.clear()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        store = KernelStore(folder / "cache")
        patch.setattr(kernels, "store", lambda: store)
        patch.setattr(Unit, "compile", compile_unit)
        # CUDA's own Python packages do not bear this driver.
        patch.setattr(kernels, "toolchain", lambda: Toolchain(folder, (13, 0), "fake", (), {}))
        patch.setattr(Unit, "digest", lambda unit, _tools: hashlib.sha256(unit.source.encode()).digest())
        patch.setenv(kernels.POLICY_VARIABLE, "auto")
        if not built:
            patch.setattr(table, "kernels", lambda *_given, **_named: [])
        yield compiled
    kernels._kernels.clear()
    gemm_module._plans.clear()


def case_a_missing_kernel_is_compiled_once() -> None:
    with compiler() as compiled:
        for _ in range(3):
            a, b, c = matrix(5, 7), matrix(7, 3), matrix(5, 3)
            np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
            np.testing.assert_array_equal(ac.gemm(a, b, c, alpha=-2, beta=3), 3 * c - 2 * (a @ b))
            np.testing.assert_array_equal(ac.gemm(a, b, c, alpha=0, beta=3), 3 * c)
            np.testing.assert_array_equal(ac.gemm(a, b, backend="jit"), a @ b)
        assert len(compiled) == len(set(compiled)) == 1
        made = ac.plan(ac.GemmRequest(ac.GemmShape(5, 3, 7), dtype=ac.CutlassDtype.F32))
        assert (made.origin, made.kernel) == ("jit", None)
        assert made.kernel_name in made.source
        assert made.kernel_handle
        assert made.key == made.request.plan_key()
        # Another process finds it on disk.
        kernels._kernels.clear()
        ac.plan(made.request, backend="jit")
        assert len(compiled) == 1 + (made.kernel_name not in compiled[:1])


def case_backend_jit_passes_the_table_over() -> None:
    with compiler(built=True) as compiled:
        a, b = matrix(5, 7), matrix(7, 3)
        np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
        assert compiled == []
        np.testing.assert_array_equal(ac.gemm(a, b, backend="jit"), a @ b)
        assert len(compiled) == 1


def case_a_kernel_that_must_not_be_compiled_is_named() -> None:
    with compiler() as compiled, pytest.MonkeyPatch.context() as patch:
        a, b = matrix(5, 7), matrix(7, 3)
        for given in ({"jit": "off"}, {"backend": "prebuilt"}):
            refused(ac.KernelNotFoundError, "CMAKE_ARGS=", lambda given=given: ac.gemm(a, b, **given))
        patch.setenv(kernels.POLICY_VARIABLE, "off")
        refused(ac.KernelNotFoundError, "cutlass_simt", lambda: ac.gemm(a, b))
        refused(ac.KernelNotFoundError, "cutlass_simt", lambda: ac.gemm(a, b, backend="jit"))
        patch.setenv(kernels.POLICY_VARIABLE, "sometimes")
        refused(ac.InvalidOperandError, "auto, background, off", lambda: ac.gemm(a, b))
        refused(ac.InvalidOperandError, "jit is 'no'", lambda: ac.gemm(a, b, jit="no"))
        assert compiled == []
        np.testing.assert_array_equal(ac.gemm(a, b, jit="auto"), a @ b)


def case_misses_are_logged_as_a_filter_of_the_generator() -> None:
    with compiler() as compiled, pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        log = Path(name) / "misses.txt"
        patch.setenv(kernels.MISS_LOG_VARIABLE, str(log))
        kernels._missed.clear()
        for _ in range(2):
            ac.gemm(matrix(5, 7), matrix(7, 3))
            ac.gemm(matrix(5, 7), matrix(3, 7).T)
            ac.gemm(matrix(5, 7), matrix(7, 3), backend="jit")
        assert log.read_text().split() == compiled
        chosen = Selection(preset="full", archs="80", filter_file=str(log)).keys()
        assert sorted(key.name for key in chosen) == sorted(compiled)
        # A log that cannot be written is no reason to fail.
        patch.setenv(kernels.MISS_LOG_VARIABLE, str(Path(name) / "nowhere" / "misses.txt"))
        kernels._missed.clear()
        ac.gemm(matrix(4, 7), matrix(7, 3))
        pipe = Path(name) / "pipe"
        os.mkfifo(pipe)
        patch.setenv(kernels.MISS_LOG_VARIABLE, str(pipe))
        ac.gemm(matrix(3, 7), matrix(7, 3))


def case_threads_that_miss_together_compile_once() -> None:
    gate = threading.Event()
    with compiler(gate=gate) as compiled:
        a, b = matrix(5, 7), matrix(7, 3)
        wrong: list[object] = []

        def work() -> None:
            if not np.array_equal(ac.gemm(a, b), a @ b):
                wrong.append("wrong")

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        gate.set()
        for thread in threads:
            thread.join()
        assert (wrong, len(compiled)) == ([], 1)


def case_what_does_not_compile_is_said_and_tried_again() -> None:
    failure = ac.CompileError("it does not compile", log="line 7: error: expected a ;", source="int", options=("-w",))
    a, b = matrix(5, 7), matrix(7, 3)
    with compiler(error=failure) as compiled:
        with pytest.raises(ac.CompileError) as caught:
            ac.gemm(a, b)
        assert caught.value.log == failure.log
        # Remembered: a broken source is not compiled at every call.
        refused(ac.CompileError, "it does not compile", lambda: ac.gemm(a, b))
        assert len(compiled) == 1
    with compiler(error=ac.LibraryError("nvrtc", "killed")):
        refused(ac.LibraryError, "killed", lambda: ac.gemm(a, b))
    with compiler():
        np.testing.assert_array_equal(ac.gemm(a, b), a @ b)


def case_a_better_kernel_is_compiled_in_the_background() -> None:
    gate = threading.Event()
    with compiler(built=True, gate=gate) as compiled, pytest.MonkeyPatch.context() as patch:
        every = table.kernels()
        for seconds in (0.5, 2.0):  # the model's word on the best cell, against the one that is built
            few = [k for k in every if k.key.tile == (256, 128, 8)]
            patch.setattr(table, "kernels", lambda *_g, few=few, **_n: few)
            worth = seconds < 1
            patch.setattr(plan_module, "WORTHWHILE", 1e9 if worth else 0.0)
            gate.clear()
            gemm_module._plans.clear()
            a, b = Tensor(matrix(64, 64)), Tensor(matrix(64, 64))
            out = Tensor(matrix(64, 64))
            made = ac.plan(ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.F32), jit="background")
            before = made.kernel_name
            made(a, b, out=out)
            np.testing.assert_array_equal(out.array, a.array @ b.array)
            assert (made.kernel_name, made.origin) == (before, "pack fake")
            gate.set()
            deadline = time.monotonic() + 30
            while worth and made.kernel_name == before and time.monotonic() < deadline:
                made(a, b, out=out, stream=777)  # a stream that is being captured keeps the kernel that it began with
                if compiled and not kernels._background:
                    assert made.kernel_name == before
                    made(a, b, out=out, stream=0)
                time.sleep(0.01)
            assert (made.kernel_name != before) == worth
            made(a, b, out=out, alpha=2)
            np.testing.assert_array_equal(out.array, 2 * (a.array @ b.array))
            assert len(compiled) == 1


def case_nothing_is_compiled_while_a_graph_is_captured() -> None:
    with compiler() as compiled:
        arrays = matrix(5, 7), matrix(7, 3), matrix(5, 3)
        a, b, out = map(operand, arrays)
        refused(
            ac.UnsupportedError,
            "cannot be made while a CUDA graph is captured",
            lambda: ac.gemm(a, b, out=out, stream=777),
        )
        assert compiled == []
        ac.gemm(a, b, out=out, stream=0)
        arrays[2][...] = 0
        ac.gemm(a, b, out=out, stream=777)
        np.testing.assert_array_equal(arrays[2], arrays[0] @ arrays[1])


def case_a_request_tells_of_the_compiler() -> None:
    request = ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.F32)
    with compiler() as compiled:
        told = ac.explain(request)
        assert told.kernel is not None
        assert told.source == "jit"
        assert told.compile_seconds is not None
        assert "compile" in str(told)
        made = ac.plan(request)
        assert [made.kernel_name] == [told.kernel] == compiled
        told = ac.explain(request)
        assert (told.kernel, told.compile_seconds, told.cached) == (made.kernel_name, 0.0, "memory")
        kernels._kernels.clear()
        assert ac.explain(request).cached == "disk"
        assert ac.explain(request, jit="off").kernel is None


def case_a_forked_child_is_told_that_it_has_no_gpu() -> None:
    with compiler():
        a, b = matrix(5, 7), matrix(7, 3)
        ac.gemm(a, b)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks while there are threads
            child = os.fork()
        if child == 0:
            outcome = 1
            with contextlib.suppress(BaseException):
                refused(ac.DeviceUnavailableError, "spawn", lambda: ac.gemm(a, b, backend="jit"))
                with pytest.warns(RuntimeWarning, match="forked"):
                    np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
                outcome = 0
            os._exit(outcome)
        deadline = time.monotonic() + 30
        ended = (0, 0)
        while ended == (0, 0) and time.monotonic() < deadline:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        assert ended == (child, 0)
        np.testing.assert_array_equal(ac.gemm(a, b), a @ b)


def main() -> None:
    """Runs the cases over the kernels of packs alone: those of the installation need a GPU."""
    every = table.kernels
    table.kernels = lambda *given, **named: [k for k in every(*given, **named) if k.pack]
    outcome = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                case()
                outcome[name] = ""
            except Exception:  # noqa: BLE001 - whatever it is, it is the outcome
                outcome[name] = traceback.format_exc()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
