"""Cases that `test_fp4.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import ctypes
import os
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
from atomr_cutlass import _core
from atomr_cutlass.arrays import fp4, operands
from atomr_cutlass.ops.quantize import reference as quantization
from atomr_cutlass.pipeline import verify
from atomr_cutlass.pipeline.call import kept_plans

Values = np.ndarray[Any, Any]
F32 = ac.CutlassDtype.F32
FP4 = ac.CutlassDtype.F4E2M1
COLUMNS = ac.GemmLayout.COL_MAJOR
SCALINGS = ("nvfp4", "mxfp4")

random = np.random.default_rng(5)

_DTYPES = {
    "uint8": (1, 8),
    "float32": (2, 32),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e8m0fnu": (14, 8),
}


class _Args(ctypes.Structure):
    """The beginning of atomr_cutlass_gemm_args, and its scales."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "batch")),
        *((name, ctypes.c_uint64) for name in ("a", "b", "c", "d")),
        *((name, ctypes.c_int64) for name in ("lda", "ldb", "ldc", "ldd")),
        ("batch_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_double) for name in ("alpha", "beta")),
        ("options", ctypes.c_int32 * 10),
        *((name, ctypes.c_uint64) for name in ("workspace", "scale_a", "scale_b", "scale_d", "amax")),
    )


def library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["ATOMR_CUTLASS_PACKS"])


def last_args() -> _Args:
    return _Args.in_dll(library(), "last_args")


def launches() -> int:
    return ctypes.c_int.in_dll(library(), "launches").value


def aligned(array: Values) -> Values:
    """A copy that starts at a multiple of 256 bytes."""
    memory = np.zeros(array.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def operand(array: Values) -> _core.Operand:
    """GPU memory that is the array's."""
    strides = [s // array.itemsize for s in array.strides]
    dtype = _DTYPES[array.dtype.name]
    return _core.Operand(array.ctypes.data, array.shape, strides, dtype, operands.CUDA, 0, False, array)


def quantized(rows: int, k: int, scaling: str, batch: tuple[int, ...] = ()) -> tuple[Values, Values, Values]:
    """Values, plain scales, and what they stand for."""
    wide = random.integers(-6, 7, (*batch, rows, k)) * 2.0 ** random.integers(-1, 2, (*batch, rows, 1))
    made = quantization.quantize_nvfp4(wide) if scaling == "nvfp4" else quantization.quantize_mxfp4(wide)
    return made.values, made.scale, quantization.dequantize_fp4(made).astype(np.float64)


def on_gpu(values: Values, scale: Values, pad: int = 0) -> tuple[_core.Operand, _core.Operand]:
    """(..., rows, K / 2) bytes, `pad` of which lie after each row, and swizzled scales."""
    packed = quantization.pack_fp4(values)
    room = aligned(np.full((*packed.shape[:-1], packed.shape[-1] + pad), 0x77, np.uint8))
    room[..., : packed.shape[-1]] = packed
    return operand(room[..., : packed.shape[-1]]), operand(aligned(quantization.swizzle_scales(scale)))


def transposed(view: _core.Operand) -> _core.Operand:
    shape, strides = list(view.shape), list(view.strides)
    shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    return _core.Operand(view.pointer, shape, strides, view.dtype, operands.CUDA, 0, False, view)


def recast(view: _core.Operand, dtype: tuple[int, int]) -> _core.Operand:
    return _core.Operand(view.pointer, view.shape, view.strides, dtype, operands.CUDA, 0, False, view)


def refused(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
    before = launches()
    with pytest.raises(error, match=re.escape(says)):
        call()
    assert launches() == before


def assert_equal(got: Any, want: Values) -> None:
    found = operands.download(got) if isinstance(got, _core.Operand) else got
    np.testing.assert_array_equal(
        found.astype(np.float32), want.astype(np.float32).astype(found.dtype).astype(np.float32)
    )


# ----------------------------------------------------------------------------------------------------------------------


def case_a_plan_of_a_request_launches() -> None:
    for scaling in SCALINGS:
        m, n, k = 150, 72, 160
        (x, xs, wide_x), (w, ws, wide_w) = quantized(m, k, scaling), quantized(n, k, scaling)
        (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
        if scaling == "mxfp4":
            sa, sb = recast(sa, (1, 8)), recast(sb, (1, 8))
        request = ac.GemmRequest(
            ac.GemmShape(m, n, k), dtype=FP4, scaling=scaling, layout_b=COLUMNS,
            epilogue=ac.GemmEpilogue(alpha=0.5),
        )  # fmt: skip
        made = ac.plan(request)
        assert made.kernel_name == ac.explain(request).kernel
        assert made.key == request.plan_key()
        out = aligned(np.zeros((m, n), ml_dtypes.bfloat16))
        made(a, transposed(b), sa, sb, operand(out))
        assert_equal(out, 0.5 * wide_x @ wide_w.T)
        args = last_args()
        assert (args.m, args.n, args.k, args.batch) == (m, n, k, 1)
        assert (args.lda, args.ldb, args.ldd) == (k, k, n)
        assert (args.a, args.b, args.d) == (a.pointer, b.pointer, out.ctypes.data)
        assert (args.scale_a, args.scale_b, args.scale_d, args.amax) == (sa.pointer, sb.pointer, 0, 0)
        refused(ac.InvalidOperandError, "this plan was made for", lambda: made(a, transposed(b), sb, sa, operand(out)))  # noqa: B023


def case_gpu_arrays() -> None:
    for scaling in SCALINGS:
        for bytes_of_scales in (False, True):
            (x, xs, wide_x), (w, ws, wide_w) = quantized(130, 96, scaling), quantized(40, 96, scaling)
            (a, sa), (b, sb) = on_gpu(x, xs, pad=32), on_gpu(w, ws, pad=16)
            if bytes_of_scales and scaling == "mxfp4":
                sa, sb = recast(sa, (1, 8)), recast(sb, (1, 8))
            c = aligned(random.integers(-9, 9, (130, 40)).astype(np.float32))
            out = aligned(np.zeros((130, 48), np.float32))[:, :40]
            for alpha in (1.0, -2.0, 0.0):
                got = ac.gemm(
                    a, transposed(b), operand(c), scale_a=sa, scale_b=sb, alpha=alpha, beta=3.0, out=operand(out)
                )
                assert operands.as_operand(got).pointer == out.ctypes.data
                assert_equal(out, alpha * (wide_x @ wide_w.T) + 3 * c)
                args = last_args()
                assert (args.lda, args.ldb, args.ldc, args.ldd) == (96 + 64, 96 + 32, 40, 48)
                assert (args.scale_a, args.scale_b) == (sa.pointer, sb.pointer)
            got = ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb)
            assert got.dtype == (4, 16)
            assert_equal(got, wide_x @ wide_w.T)


def case_a_column_major_result_is_computed_as_its_transpose() -> None:
    (x, xs, wide_x), (w, ws, wide_w) = quantized(48, 64, "nvfp4"), quantized(130, 64, "nvfp4")
    (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
    out = aligned(np.zeros((130, 48), np.float32)).T
    ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb, out=operand(out))
    assert_equal(out, wide_x @ wide_w.T)
    args = last_args()
    assert (args.m, args.n, args.a, args.scale_a) == (130, 48, b.pointer, sb.pointer)


def case_one_row() -> None:
    (x, xs, wide_x), (w, ws, wide_w) = quantized(1, 64, "nvfp4"), quantized(16, 64, "nvfp4")
    (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
    assert_equal(ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb), wide_x @ wide_w.T)
    column = operand(aligned(np.zeros((1, 16), np.float32)).T)
    assert_equal(ac.gemm(b, transposed(a), scale_a=sb, scale_b=sa, out=column), wide_w @ wide_x.T)


def case_plans_are_kept() -> None:
    kept_plans.clear()
    out = operand(aligned(np.zeros((32, 16), np.float32)))
    for _ in range(3):
        (x, xs, wide_x), (w, ws, wide_w) = quantized(32, 64, "nvfp4"), quantized(16, 64, "nvfp4")
        (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
        assert_equal(ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb, out=out), wide_x @ wide_w.T)
    assert len(kept_plans) == 1


def case_host_arrays() -> None:
    for scaling in SCALINGS:
        x = random.integers(-6, 7, (70, 96)).astype(np.float32)
        w = random.integers(-6, 7, (96, 24)).astype(np.float32)
        function = quantization.quantize_nvfp4 if scaling == "nvfp4" else quantization.quantize_mxfp4
        a, b = function(x), function(w, axis=-2)
        want = ac.gemm(
            a.values, b.values, scale_a=a.scale, scale_b=b.scale, alpha=2.0, out_dtype=F32, backend="reference"
        )
        before = launches()
        got = ac.gemm(a.values, b.values, scale_a=a.scale, scale_b=b.scale, alpha=2.0, out_dtype=F32)
        assert_equal(got, want)
        q, p = (
            ac.quantize(x, scaling=scaling, backend="reference"),
            ac.quantize(w.T, scaling=scaling, backend="reference"),
        )
        got = ac.gemm(q.values, p.values.T, scale_a=q.scales, scale_b=p.scales, alpha=2.0, out_dtype=F32)
        assert_equal(got, want)
        assert launches() == before + 2


def case_batches() -> None:
    for scaling in SCALINGS:
        x, xs, wide_x = quantized(32, 64, scaling, (2, 3))
        for batch in ((2, 3), (3,), ()):
            w, ws, wide_w = quantized(16, 64, scaling, batch)
            (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
            before = launches()
            got = ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb)
            assert_equal(got, wide_x @ wide_w.swapaxes(-1, -2))
            assert launches() == before + 6
        values, plain, _ = quantized(32, 64, scaling)
        shared = np.broadcast_to(values, (4, 32, 64))
        (a, sa), (b, sb) = on_gpu(shared, plain), on_gpu(w, ws)  # scales of all batches
        wide = quantization.dequantize_fp4(quantization.BlockScaled(values, plain)).astype(np.float64)
        assert_equal(ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb), np.broadcast_to(wide @ wide_w.T, (4, 32, 16)))
        request = ac.GemmRequest(ac.GemmShape(32, 16, 64, 3), dtype=FP4, scaling=scaling, layout_b=COLUMNS)
        assert verify.run(request).ok


def case_the_reference_takes_gpu_arrays() -> None:
    for scaling in SCALINGS:
        (x, xs, wide_x), (w, ws, wide_w) = quantized(33, 96, scaling), quantized(7, 96, scaling)
        (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
        before = launches()
        got = ac.gemm(a, transposed(b), scale_a=sa, scale_b=sb, out_dtype=F32, backend="reference")
        assert_equal(got, wide_x @ wide_w.T)
        assert launches() == before


def case_requests_are_tried() -> None:
    for scaling in SCALINGS:
        for out_dtype in (None, F32):
            request = ac.GemmRequest(
                ac.GemmShape(130, 48, 96), dtype=FP4, scaling=scaling, layout_b=COLUMNS, out_dtype=out_dtype,
                epilogue=ac.GemmEpilogue(0.5, 2.0),
            )  # fmt: skip
            tried = verify.run(request)
            assert tried.ok, tried
            assert tried.backend == "prebuilt"
            assert tried.launches > 0
            assert verify.run(request, backend="reference").ok is None


def case_an_actor_multiplies() -> None:
    for scaling in SCALINGS:
        (x, xs, wide_x), (w, ws, wide_w) = quantized(32, 64, scaling), quantized(16, 64, scaling)
        (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
        if scaling == "mxfp4":
            sa, sb = recast(sa, (1, 8)), recast(sb, (1, 8))
        request = ac.GemmRequest(ac.GemmShape(32, 16, 64), dtype=FP4, scaling=scaling, layout_b=COLUMNS)
        actor = ac.CutlassActor(2)
        assert_equal(actor.handle(ac.CutlassMsg.Gemm(request, (a, transposed(b), sa, sb))), wide_x @ wide_w.T)
        refused(
            ac.InvalidOperandError,
            "scale_a is",
            lambda: actor.handle(ac.CutlassMsg.Gemm(request, (a, transposed(b), recast(sa, (0, 8)), sb))),  # noqa: B023
        )
        refused(
            ac.InvalidOperandError,
            "a is no array of bytes",
            lambda: actor.handle(ac.CutlassMsg.Gemm(request, (recast(a, (0, 8)), transposed(b), sa, sb))),  # noqa: B023
        )


def case_what_kernels_cannot_read_is_refused() -> None:
    (x, xs, _), (w, ws, _) = quantized(32, 64, "nvfp4"), quantized(16, 64, "nvfp4")
    (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
    bt = transposed(b)
    out = aligned(np.full((32, 16), 7, np.float32))

    def call(**changed: Any) -> Callable[[], Any]:
        given = {"a": a, "b": bt, "scale_a": sa, "scale_b": sb, "out": operand(out)} | changed
        return lambda: ac.gemm(given.pop("a"), given.pop("b"), **given)

    invalid, unsupported = ac.InvalidOperandError, ac.UnsupportedError
    size = quantization.swizzled_size(32, 4)
    refused(unsupported, "scale_a is missing", call(scale_a=None, scale_b=None))
    refused(unsupported, "scale_b is missing", call(scale_b=None))
    refused(unsupported, "scale_a is missing: fp4 kernels multiply with a scale array", call(scale_a=2.0))
    refused(
        invalid, "scale_a is f32; scales of fp4 are e4m3", call(scale_a=operand(aligned(np.ones(size, np.float32))))
    )
    refused(invalid, "both are of one kind", call(scale_b=recast(sb, (1, 8))))
    plain = operand(aligned(xs))
    refused(invalid, "these are plain, and GPUs read scales in a swizzled order", call(scale_a=plain))
    refused(invalid, "swizzle_scales of their transpose", call(scale_b=operand(aligned(ws.T))))
    refused(invalid, f"scale_a has shape (1024,); expected (..., {size})", call(scale_a=on_gpu(x, np.tile(xs, 2))[1]))
    shifted = aligned(np.zeros(size + 8, xs.dtype))[8:]
    refused(invalid, "scale_a starts at an address that is no multiple of 16 bytes", call(scale_a=operand(shifted)))
    spread = aligned(np.zeros(2 * size, xs.dtype))[::2]
    refused(invalid, "scale_a has strides", call(scale_a=operand(spread)))
    refused(unsupported, "scale_d: fp4 kernels have no", call(scale_d=operand(aligned(np.ones(1, np.float32)))))
    refused(unsupported, "amax: fp4 kernels have no", call(amax=operand(aligned(np.ones(1, np.float32)))))
    rows = aligned(np.zeros((32, 16), np.uint8))
    refused(
        unsupported, "b of shape (32, 16) has strides (16, 1): fp4 is packed and read along K", call(b=operand(rows))
    )
    columns = operand(aligned(np.zeros((32, 32), np.uint8)).T)
    refused(unsupported, "a of shape (32, 32) has strides (1, 32): fp4 is packed", call(a=columns))
    refused(invalid, "a has one fp4 element a byte", call(a=recast(a, (17, 4))))
    refused(invalid, "a is e4m3 and b is e2m1: fp4 is multiplied by fp4 only", call(a=recast(a, (10, 8))))
    refused(invalid, "a is e2m1 and b is i8", call(b=recast(bt, (0, 8))))
    refused(invalid, "K disagrees", call(b=transposed(on_gpu(*quantized(16, 96, "nvfp4")[:2])[0])))
    np.testing.assert_array_equal(out, 7)

    for k, n, says in ((48, 16, "K (here 48)"), (64, 10, "pad N (here 10)")):
        (x, xs, _), (w, ws, _) = quantized(32, k, "nvfp4"), quantized(n, k, "nvfp4")
        (a, sa), (b, sb) = on_gpu(x, xs), on_gpu(w, ws)
        given = {"scale_a": sa, "scale_b": sb}
        refused(unsupported, says, lambda: ac.gemm(a, transposed(b), **given))  # noqa: B023
        refused(unsupported, says, lambda: ac.gemm(x, w.T, scale_a=xs, scale_b=ws.T))  # noqa: B023
    odd = np.zeros((3, 33), ml_dtypes.float4_e2m1fn)
    ones = np.ones((3, 3), ml_dtypes.float8_e4m3fn)
    refused(unsupported, "K is 33", lambda: ac.gemm(odd, odd.T, scale_a=ones, scale_b=ones.T))
    refused(unsupported, "scale_a is missing", lambda: ac.gemm(odd, odd.T))
    empty = np.zeros((3, 0), ml_dtypes.float4_e2m1fn)
    none = np.ones((3, 0), ml_dtypes.float8_e4m3fn)
    refused(unsupported, "K is 0: fp4", lambda: ac.gemm(empty, empty.T, scale_a=none, scale_b=none.T))


def case_element_types_of_scales() -> None:
    assert fp4.scale_type((10, 8), "scale_a") is not fp4.scale_type((14, 8), "scale_a")
    assert fp4.scale_type((1, 8), "scale_a") is fp4.scale_type((14, 8), "scale_a")


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
