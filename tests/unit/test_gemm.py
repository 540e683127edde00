"""`gemm` on the reference backend: the numbers, and what is refused before anything is written."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.call import kept_plans
from dlpack_arrays import Array, CudaArray


def _random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng((seed, *shape)).integers(-8, 9, shape)
    return values.astype(np.float32).astype(dtype)


def _gemm(*operands: Any, **arguments: Any) -> Any:
    return ac.gemm(*operands, **({"backend": "reference"} | arguments))


# ----------------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------------

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (16, 8, 32), (1, 9, 4), (9, 1, 4), (17, 31, 1)])
def test_products_are_numpys(dtype: Any, m: int, n: int, k: int) -> None:
    a, b = _random(m, k, dtype=dtype), _random(k, n, dtype=dtype)
    got = _gemm(a, b)
    assert got.dtype == dtype
    # Small integers: every product and sum is exact, in any order.
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(dtype).astype(np.float64))


def test_integers_give_int32() -> None:
    a, b = _random(5, 300, dtype=np.int8), _random(300, 7, dtype=np.int8)
    got = _gemm(a, b, alpha=2)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, 2 * (a.astype(np.int32) @ b.astype(np.int32)))


@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [((), ()), ((4,), ()), ((), (4,)), ((3, 1), (1, 4)), ((2, 1, 3), (5, 1)), ((0,), ()), ((1,), (0,))],
)
def test_batches_broadcast_as_in_numpy(batch_a: tuple[int, ...], batch_b: tuple[int, ...]) -> None:
    a, b = _random(*batch_a, 3, 5), _random(*batch_b, 5, 2)
    np.testing.assert_array_equal(_gemm(a, b), a @ b)


def test_views_are_read_where_they_lie() -> None:
    base = _random(20, 20)
    for a, b in itertools.product(
        (base[:8, :6], base.T[2:10, 1:7], base[1:9, ::3][:, :6]), (base[:6, :5], base.T[:6, 9:14])
    ):
        np.testing.assert_array_equal(_gemm(a, b), a @ b)


def test_alpha_beta_and_c() -> None:
    a, b, c = _random(4, 6), _random(6, 5), _random(4, 5, seed=1)
    np.testing.assert_array_equal(_gemm(a, b, c, alpha=0.5, beta=-2), 0.5 * (a @ b) - 2 * c)
    np.testing.assert_array_equal(_gemm(a, b, c, alpha=np.float32(2), beta=np.int64(1)), 2 * (a @ b) + c)


def test_c_broadcasts_over_batches() -> None:
    a, b, c = _random(3, 4, 6), _random(6, 5), _random(4, 5, seed=1)
    np.testing.assert_array_equal(_gemm(a, b, c, beta=1), a @ b + c)


def test_out_is_written_and_returned() -> None:
    a, b = _random(4, 6), _random(6, 5)
    out = np.full((4, 5), np.nan, np.float32)
    assert _gemm(a, b, out=out) is out
    np.testing.assert_array_equal(out, a @ b)


def test_out_may_be_a_view_whose_surroundings_stay() -> None:
    a, b = _random(4, 6), _random(6, 5)
    choices: list[Any] = [lambda x: x[2:6, 3:8], lambda x: x.T[1:5, 2:7], lambda x: x[::2, ::2][:4, :5]]
    for choose in choices:
        base = np.full((12, 12), 77, np.float32)
        untouched = np.ones((12, 12), bool)
        choose(untouched)[...] = False
        out = choose(base)
        assert _gemm(a, b, out=out) is out
        np.testing.assert_array_equal(out, a @ b)
        assert (base[untouched] == 77).all()


def test_out_may_be_c() -> None:
    a, b, c = _random(4, 6), _random(6, 5), _random(4, 5, seed=1)
    want = a @ b + 3 * c
    assert _gemm(a, b, c, beta=3, out=c) is c
    np.testing.assert_array_equal(c, want)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 6), (4, 0, 6), (0, 0, 0), (4, 5, 0)])
def test_extents_of_zero(m: int, n: int, k: int) -> None:
    a, b, c = _random(m, k), _random(k, n), _random(m, n, seed=1)
    got = _gemm(a, b)
    assert (got.shape, got.dtype) == ((m, n), np.float32)
    assert (got == 0).all()
    np.testing.assert_array_equal(_gemm(a, b, c, beta=2), 2 * c)


def test_alpha_of_zero_reads_neither_a_nor_b() -> None:
    a, b, c = np.full((3, 4), np.nan), np.full((4, 2), np.inf), np.ones((3, 2))
    np.testing.assert_array_equal(_gemm(a, b, c, alpha=0, beta=2), 2 * c)
    np.testing.assert_array_equal(_gemm(a, b, alpha=0), np.zeros((3, 2)))


def test_nan_and_infinity_propagate() -> None:
    a, b = np.ones((2, 2)), np.ones((2, 2))
    a[0, 0] = np.nan
    b[0, 1] = np.inf
    np.testing.assert_array_equal(_gemm(a, b), [[np.nan, np.nan], [2, np.inf]])
    assert np.isnan(_gemm(np.ones((2, 2)), np.ones((2, 2)), alpha=np.nan)).all()


def test_out_dtype_and_the_dtype_of_out() -> None:
    a, b = _random(4, 6, dtype=np.float16), _random(6, 5, dtype=np.float16)
    assert _gemm(a, b, out_dtype=D.F32).dtype == np.float32
    out = np.empty((4, 5), np.float32)
    assert _gemm(a, b, out=out) is out
    assert _gemm(a, b, out=out, out_dtype=D.F32) is out
    for narrow in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        assert _gemm(a.astype(narrow), b.astype(narrow)).dtype == ml_dtypes.bfloat16


def test_precision_rounds_to_tf32() -> None:
    a = np.full((1, 1), 1 + 2**-12, np.float32)
    b = np.ones((1, 1), np.float32)
    assert _gemm(a, b)[0, 0] == a[0, 0]
    assert _gemm(a, b, precision="tf32")[0, 0] == 1
    assert _gemm(a, b, precision="3xtf32")[0, 0] == a[0, 0]


def test_bias_activation_and_scales() -> None:
    a, b = _random(4, 6), _random(6, 5)
    bias = _random(5, seed=3)
    np.testing.assert_array_equal(_gemm(a, b, bias=bias, activation="relu"), np.maximum(a @ b + bias, 0))
    np.testing.assert_array_equal(_gemm(a, b, scale_a=2.0, scale_b=0.5, scale_d=4.0), 4 * (a @ b))
    rows = np.arange(4, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(_gemm(a, b, scale_a=rows), rows * (a @ b))


@pytest.mark.parametrize(
    "more", [{"bias": np.arange(5, dtype=np.float32)}, {"activation": "relu"}, {"epilogue": lambda acc: acc * 0.5}]
)
def test_what_follows_a_product_of_integers_gives_float32_unless_told_otherwise(more: dict[str, Any]) -> None:
    a, b = _random(4, 6, dtype=np.int8), _random(6, 5, dtype=np.int8)
    want = (a.astype(np.float64) @ b).astype(np.float32)
    want = np.maximum(want, 0) if "activation" in more else want * 0.5 if "epilogue" in more else want + more["bias"]
    got = _gemm(a, b, **more)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    assert _gemm(a, b, out_dtype=D.F16, **more).dtype == np.float16
    out = _out(4, 5, dtype=np.int8)
    assert _gemm(a, b, out=out, **more) is out
    for dtype in (np.float32, np.float16):
        assert _gemm(a, b, np.zeros((4, 5), dtype), beta=1, **more).dtype == dtype
    with pytest.raises(InvalidOperandError, match="c is f16; it must have the result's dtype, f32"):
        _gemm(a, b, np.zeros((4, 5), np.float16), beta=1, out_dtype=D.F32, **more)


def test_the_reference_keeps_integers_that_are_asked_for() -> None:
    a, b, c = _random(4, 6, dtype=np.int8), _random(6, 5, dtype=np.int8), np.zeros((4, 5), np.int32)
    want = np.maximum(a.astype(np.int32) @ b, 0)
    for how in ({"out_dtype": D.I32}, {"out": np.zeros_like(c)}, {"c": c, "beta": 1}):
        got = _gemm(a, b, activation="relu", **how)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


def test_results_are_rounded_once_and_saturate() -> None:
    a = np.full((1, 2), 300, np.float32)
    b = np.full((2, 1), 300, np.float32)
    assert np.isinf(_gemm(a, b, out_dtype=D.F16)[0, 0])
    assert float(_gemm(a, b, out_dtype=D.F8E4M3)[0, 0]) == 448


# ----------------------------------------------------------------------------------------------------------------------
# Arrays of other kinds
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
def test_host_arrays_of_any_framework_are_operands(versioned: bool) -> None:
    a, b = _random(4, 6), _random(6, 5)
    out = np.full((4, 5), np.nan, np.float32)
    given = Array(out, versioned=versioned)
    assert _gemm(Array(a, versioned=versioned), Array(b), out=given) is given
    np.testing.assert_array_equal(out, a @ b)


def test_operands_are_let_go_of() -> None:
    a, b = Array(_random(4, 6)), Array(_random(6, 5))
    _gemm(a, b)
    assert (a.deleted, b.deleted) == (1, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Backends
# ----------------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_auto_computes_on_the_cpu_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "no NVIDIA driver")
    operands._warned.clear()
    a, b = _random(4, 6), _random(6, 5)
    with pytest.warns(RuntimeWarning, match="computing with NumPy on the CPU: no NVIDIA driver") as caught:
        np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(ac.gemm(a, b), a @ b)


def test_the_reference_backend_does_not_warn() -> None:
    operands._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _gemm(_random(4, 6), _random(6, 5))


def test_a_gpu_backend_without_a_gpu_is_an_error() -> None:
    code = (
        "import numpy as np, atomr_cutlass as ac\n"
        "a = np.ones((4, 4), np.float32)\n"
        "request = ac.GemmRequest(ac.GemmShape(4, 4, 4), dtype=ac.CutlassDtype.F32)\n"
        "for call in (lambda: ac.gemm(a, a, backend='prebuilt'), lambda: ac.plan(request)):\n"
        "    try:\n"
        "        call()\n"
        "    except ac.DeviceUnavailableError as error:\n"
        "        print('refused:', error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert process.stdout.count("refused: ") == 2, process.stderr


def test_what_is_not_there_yet_is_refused_with_the_reason() -> None:
    a = _random(4, 4)
    with pytest.raises(InvalidOperandError, match="epilogue is a object; expected a function or a tree"):
        _gemm(a, a, epilogue=object())
    whole = np.ones((4, 4), np.int8)
    with pytest.raises(UnsupportedError, match="i8 operands give i32"):
        ac.gemm(whole, whole, bias=_random(4), out_dtype=D.F64, backend="prebuilt")
    narrow, half = a.astype(ml_dtypes.float8_e4m3fn), a.astype(np.float16)
    with pytest.raises(UnsupportedError, match="e4m3 operands give bf16"):
        ac.gemm(narrow, narrow, out_dtype=D.F64, backend="prebuilt")
    with pytest.raises(UnsupportedError, match="f16 operands give"):
        ac.gemm(half, half, out_dtype=D.F64, backend="prebuilt")


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------

A, B, C = _random(4, 6), _random(6, 5), _random(4, 5)
GPU_A = CudaArray(0x7F00_0000_0000, (4, 6), "<f4")


def _out(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.full(shape, 99, dtype)


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("operands", "arguments", "says"),
    [
        ((A[0], B), {}, r"a has shape \(6,\); expected at least 2 dimensions"),
        ((A, B[:, 0]), {}, r"b has shape \(6,\); expected at least 2 dimensions"),
        ((np.float32(1), B), {}, "is not an array"),
        ((A, B[:5]), {}, r"K disagrees: a \(4, 6\) has 6 columns, b \(5, 5\) has 5 rows"),
        ((_random(2, 4, 6), _random(3, 6, 5)), {}, r"batch dimensions \(2,\) of a and \(3,\) of b do not broadcast"),
        ((A, B.astype(np.float16)), {}, "a is f32 and b is f16: both must have one dtype"),
        ((A.astype(np.complex64), B), {}, "no kernel knows elements of type complex64"),
        ((A.astype(np.int16), B.astype(np.int16)), {}, "no kernel knows elements of type int16"),
        ((A, B, C), {}, "c is given but beta is 0"),
        ((A, B), {"beta": 1.0}, r"beta is 1\.0, so c is needed"),
        ((A, B, C[:3]), {"beta": 1.0}, r"c has shape \(3, 5\); expected \(\.\.\., 4, 5\)"),
        ((A, B, C[0]), {"beta": 1.0}, r"c has shape \(5,\); expected"),
        ((A, B, _random(2, 4, 5)), {"beta": 1.0}, r"c has shape \(2, 4, 5\), whose batch dimensions do not broadcast"),
        ((A, B, C.astype(np.float64)), {"beta": 1.0}, "c is f64; it must have the result's dtype, f32"),
        ((A, B), {"alpha": "2"}, "alpha is a str; expected a number"),
        ((A, B), {"alpha": True}, "alpha is a bool; expected a number"),
        ((A, B), {"alpha": None}, "alpha is a NoneType; expected a number"),
        ((A, B), {"alpha": 1j}, "alpha is a complex; expected a number"),
        ((A, B, C), {"beta": np.True_}, "beta is a bool.*; expected a number"),
        ((A, B, C), {"beta": [1.0]}, "beta is a list; expected a number"),
        ((A, B), {"backend": "cpu"}, "unknown backend 'cpu'; valid: auto, prebuilt, jit, reference"),
        ((A, B), {"precision": "fast"}, "unknown precision 'fast'; valid: ieee, tf32, 3xtf32"),
        ((A.astype(np.float16), B.astype(np.float16)), {"precision": "tf32"}, "is for float32 operands; these are f16"),
        ((A, B), {"out_dtype": "f16"}, "out_dtype is 'f16'; expected a CutlassDtype"),
        ((A, B), {"bias": C[:, 0]}, r"bias has shape \(4,\); expected \(5,\)"),
        ((A, GPU_A), {}, "a is on the CPU and b on cuda:0: all operands must be on one device"),
        ((GPU_A, B), {}, "a is on cuda:0 and b on the CPU"),
        ((A, B), {"out": CudaArray(0x7F00_0000_0000, (4, 5), "<f4")}, "a is on the CPU and out on cuda:0"),
        ((Array(A, device=(10, 0)), B), {}, "a is on a device of DLPack type 10; expected CUDA or CPU"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto", "prebuilt"])
def test_bad_input_is_refused(operands: tuple[Any, ...], arguments: dict[str, Any], says: str, backend: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        ac.gemm(*operands, **({"backend": backend} | arguments))


def test_what_only_the_reference_looks_at_is_refused_too() -> None:
    for backend in ("reference", "prebuilt"):
        with pytest.raises(InvalidOperandError, match=r"activation.* 'swoosh'"):
            ac.gemm(A, B, activation="swoosh", backend=backend)
    with pytest.raises(InvalidOperandError, match="whole number"):
        _gemm(A.astype(np.int8), B.astype(np.int8), alpha=0.5)
    with pytest.raises(InvalidOperandError, match="scale_a"):
        _gemm(A, B, scale_a=np.ones((3, 1), np.float32))


@pytest.mark.parametrize(
    ("make_out", "says"),
    [
        (lambda: _out(4, 6), r"out has shape \(4, 6\); the result has \(4, 5\)"),
        (lambda: _out(1, 4, 5), r"out has shape \(1, 4, 5\); the result has \(4, 5\)"),
        (lambda: _out(5, 4), r"out has shape \(5, 4\)"),
        (lambda: _out(20), r"out has shape \(20,\)"),
        (lambda: _read_only(_out(4, 5)), "out is read-only"),
        (lambda: np.lib.stride_tricks.as_strided(_out(4, 5), (4, 5), (0, 4)), r"out has strides \(0, 1\)"),
        (lambda: _out(4, 5, dtype=np.complex64), "no kernel knows elements of type complex64"),
        (lambda: [[0.0] * 5] * 4, "is not an array"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto", "prebuilt"])
def test_a_wrong_out_is_refused_and_left_alone(make_out: Any, says: str, backend: str) -> None:
    out = make_out()
    before = np.array(out, copy=True)
    with pytest.raises(InvalidOperandError, match=says):
        ac.gemm(A, B, out=out, backend=backend)
    np.testing.assert_array_equal(out, before)


def test_out_of_another_dtype_than_asked_is_refused() -> None:
    out = _out(4, 5)
    with pytest.raises(InvalidOperandError, match="out is f32, but out_dtype asks for f16"):
        _gemm(A, B, out=out, out_dtype=D.F16)
    assert (out == 99).all()


@pytest.mark.parametrize(
    ("a", "b", "c", "out"),
    [
        # (start, shape) in one buffer of 10 columns
        ((0, 0, 4, 6), None, None, (0, 0, 4, 5)),
        ((0, 0, 4, 6), None, None, (3, 4, 4, 5)),
        (None, (2, 2, 6, 5), None, (0, 0, 4, 5)),
        (None, None, (0, 0, 4, 5), (0, 1, 4, 5)),
        (None, None, (0, 0, 4, 5), (1, 0, 4, 5)),
    ],
)
def test_an_overlapping_out_is_refused_and_left_alone(a: Any, b: Any, c: Any, out: Any) -> None:
    buffer = _random(12, 10)

    def piece(place: tuple[int, int, int, int] | None, otherwise: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return otherwise if place is None else buffer[place[0] : place[0] + place[2], place[1] : place[1] + place[3]]

    before = buffer.copy()
    with pytest.raises(InvalidOperandError, match=r"out overlaps [abc]: give separate memory"):
        _gemm(piece(a, A), piece(b, B), *([piece(c, C)] if c else []), beta=1 if c else 0, out=piece(out, C))
    np.testing.assert_array_equal(buffer, before)


def test_out_overlapping_the_bias_is_refused() -> None:
    out = _out(4, 5)
    with pytest.raises(InvalidOperandError, match="out overlaps bias"):
        _gemm(A, B, bias=out[2], out=out)
    assert (out == 99).all()


def test_out_that_is_c_transposed_is_refused() -> None:
    square = _random(4, 4)
    with pytest.raises(InvalidOperandError, match="out overlaps c"):
        _gemm(_random(4, 6), _random(6, 4), square.T, beta=1, out=square)


def test_neighbouring_columns_of_one_buffer_do_not_overlap() -> None:
    buffer = np.zeros((6, 16), np.float32)
    buffer[:4, :6] = A
    out = buffer[:4, 6:11]
    assert _gemm(buffer[:4, :6], B, out=out) is out
    np.testing.assert_array_equal(out, A @ B)
    np.testing.assert_array_equal(buffer[:4, :6], A)


def test_negative_strides_are_read_on_the_host() -> None:
    # Kernels cannot, and refuse them (test_problem); NumPy can.
    np.testing.assert_array_equal(_gemm(A[::-1, ::-1], B[::-1]), A[::-1, ::-1] @ B[::-1])


def test_a_refused_call_leaves_no_plan_behind() -> None:
    before = len(kept_plans)
    with pytest.raises(InvalidOperandError):
        _gemm(A, A)
    assert len(kept_plans) == before


def test_operands_are_never_changed() -> None:
    a, b, c = A.copy(), B.copy(), C.copy()
    _gemm(a, b, c, beta=2.0, alpha=3.0, precision="tf32")
    for now, then in ((a, A), (b, B), (c, C)):
        np.testing.assert_array_equal(now, then)
    assert numerics.from_numpy_dtype(a.dtype) is D.F32
