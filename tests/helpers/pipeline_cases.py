"""Cases that `test_pipeline.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import contextlib
import functools
import gc
import hashlib
import os
import re
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import atomr_cutlass as ac
import dlpack_arrays
import fake_cases
import fake_kernels
import fake_table
import request_calls
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.compiler import Images, Unit
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.jit.toolchain import Toolchain
from atomr_cutlass.ops.quantize import reference as quantization
from atomr_cutlass.pipeline import devices, table, verify
from atomr_cutlass.pipeline.operation import PlannedOperation, operation_of, planned_operations
from atomr_cutlass.pipeline.plan_cache import PLANS_KEPT, kept_plans
from dlpack_arrays import CudaArray

D = ac.CutlassDtype
E4M3 = ml_dtypes.float8_e4m3fn
select_module = sys.modules["atomr_cutlass.pipeline.select"]
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


def case_scales_of_nothing_are_1() -> None:
    """Written in the order of the stream, also of one that is captured: no kernel is there to do it."""
    for scaling, shape in (
        ("tensor", (0, 64)),
        ("row", (5, 0)),
        ("row", (0, 8)),
        ("block", (5, 0)),
        ("nvfp4", (0, 32)),
    ):
        for stream in (0, 777):
            with fake_cases.no_waiting():
                made = ac.quantize(Tensor(np.zeros(shape, np.float32)), scaling=scaling, stream=stream)
            scales = operands.download(operands.as_operand(made.scales))
            assert (scales == 1).all()
            assert scales.size == {("tensor", 0): 1, ("row", 5): 5}.get((scaling, shape[0]), 0)
    wide = ac.dequantize(made.values, made.scales, scaling="nvfp4")
    assert wide.shape == (0, 32)


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


def case_the_largest_magnitude_of_an_empty_result_is_0() -> None:
    """On the GPU without a kernel, in the order of the stream, also of one that is captured; and on the host."""
    for m, n in ((0, 16), (16, 0)):
        a, b, bias = np.zeros((m, 32), E4M3), np.zeros((32, n), E4M3), np.zeros(n, np.float32)
        for followed in ({}, {"bias": bias, "activation": "relu"}):
            for stream in (0, 777):
                amax = np.full(1, 9e9, np.float32)
                on_gpu = {name: operand(array) if name == "bias" else array for name, array in followed.items()}
                given = (_core.Operand(1 << 30, x.shape, None, D.F8E4M3.dlpack, operands.CUDA, 0) for x in (a, b))
                with fake_cases.no_waiting():
                    assert ac.gemm(*given, amax=operand(amax), stream=stream, **on_gpu).shape == (m, n)
                assert amax == 0
            for backend in ("auto", "reference"):
                amax = np.full(1, 9e9, np.float32)
                assert ac.gemm(a, b, amax=amax, backend=backend, **followed).shape == (m, n)
                assert amax == 0


def case_plans_are_kept_and_used_again() -> None:
    kept_plans.clear()
    a, b, out = matrix(5, 7), matrix(7, 3), matrix(5, 3)
    for alpha in (1, 2, 3):
        ac.gemm(operand(a), operand(b), out=operand(out), alpha=alpha)
        np.testing.assert_array_equal(out, alpha * (a @ b))
    assert len(kept_plans) == 1
    x, y, z = matrix(5, 7), matrix(7, 3), matrix(5, 3)
    ac.gemm(operand(x), operand(y), out=operand(z))
    np.testing.assert_array_equal(z, x @ y)
    assert len(kept_plans) == 1
    ac.gemm(operand(x), operand(y), operand(out), beta=1, out=operand(z))
    np.testing.assert_array_equal(z, x @ y + out)
    assert len(kept_plans) == 2


def case_gradients_are_refused_by_kept_plans_too() -> None:
    """PyTorch's tensors come without Python, and so nobody else asks them."""
    recorded = True
    module = types.ModuleType("torch")
    vars(module)["is_grad_enabled"] = lambda: recorded
    arrays = {"a": matrix(5, 7), "b": matrix(7, 3), "c": matrix(5, 3), "out": matrix(5, 3)}
    gemm_request = ac.GemmRequest(ac.GemmShape(5, 3, 7), dtype=D.F32, epilogue=ac.GemmEpilogue(1.0, 1.0))
    made = ac.plan(gemm_request)

    def tensors(name: str = "") -> dict[str, Any]:
        device = (operands.CUDA, 0)
        return {
            key: dlpack_arrays.Tensor(array, device=device, requires_grad=key == name) for key, array in arrays.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", module)
        for call in (lambda **given: ac.gemm(**given, beta=1.0), made):
            call(**tensors())
            want = arrays["a"] @ arrays["b"] + arrays["c"]
            np.testing.assert_array_equal(arrays["out"], want)
            for name in arrays:
                arrays["out"][...] = 7
                recorded = True
                refused(ac.InvalidOperandError, f"{name} requires a gradient", functools.partial(call, **tensors(name)))
                assert (arrays["out"] == 7).all()
                recorded = False
                call(**tensors(name))
                np.testing.assert_array_equal(arrays["out"], want)


def case_few_plans_are_kept() -> None:
    kept_plans.clear()
    for n in range(1, PLANS_KEPT + 20):
        ac.gemm(operand(matrix(1, 2)), operand(matrix(2, n)), out=operand(matrix(1, n)))
    assert len(kept_plans) == PLANS_KEPT


def case_a_kept_plan_refuses_what_the_first_call_would_have() -> None:
    kept_plans.clear()
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
        ac.KernelNotFoundError, "it is in no preset: record a run that compiles it",
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
    ac.gemm(operand(a), operand(b))
    made, says = kept_plans.plans[0], "made from no request: there is nothing to check b against"
    refused(ac.InvalidOperandError, says, lambda: ac.BoundPlan(made, operand(b)))


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


def case_fp4_is_of_later_gpus() -> None:
    values = quantization.quantize_nvfp4(matrix(16, 32))
    for backend in ("auto", "prebuilt", "jit"):
        refused(
            ac.UnsupportedError,
            "no kernel multiplies fp4 on sm_80: block-scaled tensor cores came with sm_100a and sm_120a; dequantize",
            lambda: ac.gemm(
                values.values, values.values.T, scale_a=values.scale, scale_b=values.scale.T, backend=backend  # noqa: B023
            ),
        )  # fmt: skip
    request = ac.GemmRequest(
        ac.GemmShape(16, 16, 32), dtype=ac.CutlassDtype.F4E2M1, scaling="nvfp4", layout_b=ac.GemmLayout.COL_MAJOR
    )
    refused(ac.UnsupportedError, "no kernel multiplies fp4 on sm_80", lambda: ac.plan(request))
    assert "no kernel multiplies fp4 on sm_80" in ac.explain(request).reason


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
        image = fake_kernels.compile_at_run_time(folder / f"{key.name}.so", key)
        return Images(image, image)

    kernels._kernels.clear()
    kept_plans.clear()
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
            fake_table.install(patch, ())
        yield compiled
    kernels._kernels.clear()
    kept_plans.clear()


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


def case_misses_are_logged_as_keys_for_a_build() -> None:
    with compiler() as compiled, pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        log = Path(name) / "misses.txt"
        patch.setenv(kernels.MISS_LOG_VARIABLE, str(log))
        kernels._missed.clear()
        for _ in range(2):
            ac.gemm(matrix(5, 7), matrix(7, 3))
            ac.gemm(matrix(5, 7), matrix(3, 7).T)
            ac.gemm(matrix(5, 7), matrix(7, 3), backend="jit")
        assert [key.name for key in key_file.read(log)] == compiled
        assert [key.name for key in Selection(preset="none", archs="", keys_file=str(log)).keys()] == compiled  # noqa: SIM118
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
            fake_table.install(patch, few)
            worth = seconds < 1
            patch.setattr(select_module, "WORTHWHILE", 1e9 if worth else 0.0)
            gate.clear()
            kept_plans.clear()
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


@contextlib.contextmanager
def slow_table() -> Iterator[tuple[pytest.MonkeyPatch, tuple[Tensor, Tensor, Tensor]]]:
    """A table whose tiles are far too large for a product of few rows and columns with a long K."""
    with pytest.MonkeyPatch.context() as patch:
        few = [k for k in table.kernels() if k.key.tile == (256, 128, 8)]
        fake_table.install(patch, few)
        patch.setattr(select_module, "_warned", set())
        kept_plans.clear()
        yield patch, (Tensor(matrix(8, 4096)), Tensor(matrix(4096, 8)), Tensor(matrix(8, 8)))
        kept_plans.clear()


def case_a_kernel_that_serves_slowly_gives_way_unasked() -> None:
    gate = threading.Event()
    with compiler(built=True, gate=gate) as compiled, slow_table() as (_, (a, b, out)):
        made = ac.plan(ac.GemmRequest(ac.GemmShape(8, 8, 4096), dtype=ac.CutlassDtype.F32))
        before = made.kernel_name
        made(a, b, out=out)
        np.testing.assert_array_equal(out.array, a.array @ b.array)
        assert (made.kernel_name, made.origin) == (before, "pack fake")
        gate.set()
        deadline = time.monotonic() + 30
        while made.kernel_name == before and time.monotonic() < deadline:
            made(a, b, out=out)
            time.sleep(0.01)
        assert [made.kernel_name] == compiled != [before]
        made(a, b, out=out)
        np.testing.assert_array_equal(out.array, a.array @ b.array)
        # Now that it is there, it is taken at once; while a graph is captured, the table's is.
        assert ac.plan(made.request).kernel_name == made.kernel_name
        stream = ac.gemm(a, b, out=out, stream=777)
        assert stream is out


def case_a_kernel_that_serves_well_enough_is_kept() -> None:
    with compiler(built=True) as compiled:
        kept_plans.clear()
        a, b = matrix(64, 64), matrix(64, 64)
        np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
        assert (compiled, kernels._background) == ([], {})


def case_a_kernel_that_serves_slowly_and_must_stay_is_said_once() -> None:
    with compiler(built=True) as compiled, slow_table() as (patch, (a, b, out)):
        for given, reason in (({"jit": "off"}, "off forbids"), ({}, "there is no NVRTC")):
            patch.setattr(select_module, "_warned", set())
            patch.setattr(kernels, "problem", lambda: "there is no NVRTC")
            kept_plans.clear()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                ac.gemm(a, b, out=out, **given)
                kept_plans.clear()
                ac.gemm(a, b, out=out, **given)
            np.testing.assert_array_equal(out.array, a.array @ b.array)
            (warning,) = [str(w.message) for w in said if issubclass(w.category, RuntimeWarning)]
            assert reason in warning
            assert "times as long" in warning
            assert "256x128_8" in warning
            assert "ATOMR_CUTLASS_PRESET=" in warning
        assert compiled == []


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


# Convolutions: there is no table of them here, so that each is "compiled at run time"


def case_matrix_times_vector() -> None:
    a, x, c = matrix(2, 5, 7), matrix(2, 14)[:, ::2], matrix(2, 5)
    for layout in (a, a.swapaxes(-1, -2).copy().swapaxes(-1, -2), a[:1]):
        wanted = (layout @ x[..., None])[..., 0]
        np.testing.assert_array_equal(ac.gemv(layout, x), wanted)
        out = c.copy()
        assert ac.gemv(layout, x, out, alpha=2, beta=-3, out=out) is out
        np.testing.assert_array_equal(out, 2 * wanted - 3 * c)
        np.testing.assert_array_equal(ac.gemv(layout, x, c, alpha=0, beta=-3), -3 * c)
    np.testing.assert_array_equal(ac.gemv(a[0], x[1]), a[0] @ x[1])


CONVOLUTIONS = [operation for operation in planned_operations().values() if operation.message == "Conv"]


def conv_request(operation: PlannedOperation[Any], **changes: Any) -> Any:
    # Every pixel of x meets a tap of the filter: what none does is cleared by kernels, and not by this one.
    shape = ac.ConvShape.nhwc(2, 6, 5, 8, 16, 3, 2, padding=((1, 1), (1, 0)), stride=(1, 1))
    return operation.request_type(changes.pop("shape", shape), dtype=ac.CutlassDtype.F32, **changes)


def conv_arrays(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Operands and a result of a request, as it names their dimensions; channels last in memory."""
    made = {}
    for slot in operation_of(request).operands(request):
        (spec,) = slot.specs
        order = sorted(range(len(spec.shape)), key=lambda i, spec=spec: -spec.strides[i])  # type: ignore[misc]
        made[slot.name] = matrix(*(spec.shape[i] for i in order)).transpose(np.argsort(order))
    return made


def convolved(request: Any, given: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The reference's result for a request."""
    return request_calls.results_of(request, given)["out"]


CONV_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"layout": ac.ConvLayout.NCHW, "epilogue": ac.GemmEpilogue(2.0, -3.0)},
    {"shape": ac.ConvShape.nhwc(3, 5, 5, 8, 16, 3, 3, padding=1, groups=2)},
)


def case_plans_of_convolutions_launch() -> None:
    with compiler():
        for operation in CONVOLUTIONS:
            for changes in CONV_CHANGES:
                request = conv_request(operation, **changes)
                made = ac.plan(request)
                given = conv_arrays(request)
                assert made.slots == ["a", "b", *(["c"] if "c" in given else []), "out"]
                assert (made.key, made.origin, made.kernel) == (request.plan_key(), "jit", None)
                made(*map(operand, given.values()))
                np.testing.assert_array_equal(given["out"], convolved(request, given))
        with_bias = conv_request(CONVOLUTIONS[0], epilogue=ac.GemmEpilogue(bias=True))
        given = conv_arrays(with_bias)
        ac.plan(with_bias)(*map(operand, given.values()))
        np.testing.assert_array_equal(given["out"], convolved(with_bias, given))
        refused(ac.InvalidOperandError, "b is needed", lambda: made(operand(given["x"])))


def case_bound_plans_of_convolutions_launch() -> None:
    with compiler():
        for operation in CONVOLUTIONS:
            for changes in CONV_CHANGES:
                request = conv_request(operation, **changes)
                given = conv_arrays(request)
                kept = operation_of(request).bound
                weights = np.zeros_like(given[kept])
                bound = ac.plan(request, b=operand(weights))
                bound.refit(given[kept])
                np.testing.assert_array_equal(weights, given[kept])
                bound(*(operand(array) for name, array in given.items() if name != kept))
                np.testing.assert_array_equal(given["out"], convolved(request, given))
                refused(
                    ac.InvalidOperandError,
                    f"{kept} has shape",
                    lambda request=request: ac.plan(request, b=operand(matrix(3, 5))),
                )


def case_an_actor_computes_convolutions() -> None:
    with compiler() as compiled:
        actor = ac.CutlassActor(4)
        for turn in range(2):
            for operation in CONVOLUTIONS:
                request = conv_request(operation, layout=ac.ConvLayout.NCHW, epilogue=ac.GemmEpilogue(1.0 + turn))
                given = conv_arrays(request)
                sent = {name: operand(array) for name, array in given.items() if name != "out"}
                actor.handle(ac.CutlassMsg.Conv(request, sent, out=operand(given["out"])))
                np.testing.assert_array_equal(given["out"], convolved(request, given))
                answer = operands.download(actor.handle(ac.CutlassMsg.Conv(request, tuple(sent.values()))))
                np.testing.assert_array_equal(answer, given["out"])
        assert (len(actor.plan_cache), len(compiled)) == (3, 3)  # one plan whatever alpha is
        wrong = {**sent, "dy": operand(given["x"])}
        refused(ac.InvalidOperandError, "dy has shape", lambda: actor.handle(ac.CutlassMsg.Conv(request, wrong)))


def case_requests_are_tried_on_the_gpu() -> None:
    with compiler(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_BATCH_SECONDS", 0.001)  # the times are not looked at
        f32 = ac.CutlassDtype.F32
        gemms = [
            ac.GemmRequest(ac.GemmShape(13, 9, 7, 2), dtype=f32, epilogue=ac.GemmEpilogue(2.0, 3.0)),
            ac.GemmRequest(ac.GemmShape(13, 9, 7), dtype=f32, layout_c=ac.GemmLayout.COL_MAJOR),
        ]
        convs = [conv_request(operation, **changes) for operation in CONVOLUTIONS for changes in CONV_CHANGES]
        for request in (*gemms, *convs):
            tried = verify.run(request)
            assert tried.ok, tried
            assert (tried.backend, tried.device, tried.rewrite) == ("jit", "a fake GPU", "")
            assert tried.launches > 0
            assert tried.tflops is not None
            assert tried.kernel == ac.explain(request).kernel
            assert ac.explain(request).cached == "memory"


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


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
