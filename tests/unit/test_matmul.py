"""`matmul` on the reference backend against formulas of its own, what it refuses, replies, messages and heuristics."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import fake_kernels
import fake_pack
import fake_table
import matmul_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import HeuristicCache, HeuristicKey, MatmulRequest, ScaleSet, _core
from atomr_cutlass import MatmulEpilogue as E
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import numpy_dtype, saturating_cast
from atomr_cutlass.errors import InvalidOperandError, KernelNotFoundError, LibraryError, UnsupportedError
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.ops.matmul import function as of_matmul
from atomr_cutlass.ops.matmul.operation import FORMS
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.heuristic import heuristics
from atomr_cutlass.pipeline.search import Candidate
from dlpack_arrays import Array as DlpackArray
from dlpack_arrays import CudaArray
from matmul_formulas import GUARD, Array, Case, formula, gelu, memory, numbers, read, wide

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, E4M3]
M, N, K = 11, 6, 5

# ----------------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("epilogue", E, ids=lambda epilogue: epilogue.name)
def test_epilogues(epilogue: E, dtype: Any) -> None:
    out = ml_dtypes.bfloat16 if dtype is E4M3 else dtype
    for transa, transb, pad, beta in itertools.product((False, True), (False, True), (0, 3), (0.0, -2.0)):
        case = Case(epilogue, dtype, out, transa, transb, pad, beta)
        assert ac.matmul(case.request(backend="reference")) is case.arrays["d"]
        case.check()


def test_every_epilogue_of_cublaslt_is_there() -> None:
    assert set(FORMS) == set(E)
    assert {member.name for member in E} == {
        "DEFAULT", "RELU", "BIAS", "RELU_BIAS", "GELU", "GELU_BIAS", "RELU_AUX", "RELU_AUX_BIAS", "GELU_AUX",
        "GELU_AUX_BIAS", "DRELU", "DRELU_BGRAD", "DGELU", "DGELU_BGRAD", "BGRADA", "BGRADB",
    }  # fmt: skip


def test_int8() -> None:
    case = Case(E.DEFAULT, np.int8, np.int32, transa=True, beta=-2.0)
    ac.matmul(case.request(alpha=3.0, backend="reference"))
    product = wide(case.a) @ wide(case.b)
    np.testing.assert_array_equal(read(case.arrays["d"], M, N), 3 * product - 2 * wide(case.c))
    sums, bias = Case(E.BGRADA, np.int8, np.int32), np.zeros(M, np.int32)
    ac.matmul(sums.request(bias=bias, alpha=1.0, backend="reference"))
    np.testing.assert_array_equal(bias, wide(sums.a).sum(1))
    relu = Case(E.RELU, np.int8, np.float32)
    made = ac.matmul(relu.request(d=None, ldc=None, ldd=None, backend="reference"))
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made.T, relu.want.d)


def test_mixed_fp8() -> None:
    a, b = numbers(M, K, E4M3, 1), numbers(K, N, E5M2, 2)
    d = ac.matmul(MatmulRequest(memory(a), memory(b), m=M, n=N, k=K, backend="reference"))
    assert d.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(wide(d).T, wide(a) @ wide(b))


def test_the_gradients_are_those_of_the_forward_forms() -> None:
    """DRELU and DGELU read what RELU_AUX and GELU_AUX wrote; with x = dY the whole gradient is theirs."""
    a, b = numbers(M, K, np.float64, 1) / 4, numbers(K, N, np.float64, 2)
    for forward, backward in ((E.RELU_AUX, E.DRELU_BGRAD), (E.GELU_AUX, E.DGELU_BGRAD)):
        masked = FORMS[forward].masked
        aux = np.zeros((N, -(-M // 8)), np.uint8) if masked else np.zeros((N, M))
        common = {"n": N, "backend": "reference", "gelu_aux": aux}
        ac.matmul(MatmulRequest(memory(a), memory(b), m=M, k=K, epilogue=forward, **common))
        dy = np.random.default_rng(1).standard_normal((M, N))
        bias = np.zeros(M)
        product = MatmulRequest(memory(np.eye(M)), memory(dy), m=M, k=M, epilogue=backward, bias=bias, **common)
        got = ac.matmul(product).T
        step = 1e-6
        act = (lambda x: np.maximum(x, 0)) if masked else gelu
        want = dy * (act(a @ b + step) - act(a @ b - step)) / (2 * step)
        where = np.abs(a @ b) > step  # at 0 relu has a slope on either side
        np.testing.assert_allclose(got[where], want[where], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(bias, got.sum(1), rtol=1e-12)


def test_relu_keeps_nan_and_its_bit_is_0() -> None:
    a = np.array([[np.nan], [1.0], [-1.0], [0.0]])
    aux = np.zeros(1, np.uint8)
    unit = np.ones(1)
    d = ac.matmul(MatmulRequest(a, unit, m=4, n=1, k=1, epilogue=E.RELU_AUX, gelu_aux=aux, backend="reference"))
    np.testing.assert_array_equal(d[0], [np.nan, 1, 0, 0])
    assert aux[0] == 0b0010
    d = ac.matmul(MatmulRequest(a, unit, m=4, n=1, k=1, epilogue=E.DRELU, gelu_aux=aux, backend="reference"))
    np.testing.assert_array_equal(d[0], [0, 1, 0, 0])


def test_sums_of_columns_are_taken_before_d_is_rounded() -> None:
    x = np.full((2, 64), 1.0, np.float16)
    x[:, 0] = 2048  # 2048 + 1 rounds in float16
    ones, bias = np.full((64, 1), 0xFF, np.uint8), np.zeros(2, np.float32)
    ac.matmul(
        MatmulRequest(
            memory(np.eye(2, dtype=np.float16)), memory(x), m=2, n=64, k=2, alpha=1 + 2**-10, epilogue=E.DRELU_BGRAD,
            gelu_aux=ones, bias=bias, backend="reference",
        )
    )  # fmt: skip
    np.testing.assert_allclose(bias, np.full(2, (2048 + 63) * (1 + 2**-10)), rtol=1e-7)


def test_the_auxiliary_matrix_may_have_another_element_type() -> None:
    a, b = numbers(M, K, np.float16, 1), numbers(K, N, np.float16, 2)
    aux = np.zeros((N, M), np.float32)
    request = MatmulRequest(
        memory(a), memory(b), m=M, n=N, k=K, alpha=1 / 3, epilogue=E.GELU_AUX, gelu_aux=aux, backend="reference"
    )
    ac.matmul(request)
    np.testing.assert_array_equal(aux.T, ((wide(a) @ wide(b)) / 3).astype(np.float32))


def test_precision_rounds_the_sums_too() -> None:
    a = np.full(4, 1 + 2**-12, np.float32)
    for precision, want in (("tf32", 1.0), (None, 1 + 2**-12)):
        bias = np.zeros(4, np.float32)
        request = MatmulRequest(
            a, np.ones(1, np.float32), m=4, n=1, k=1, epilogue=E.BGRADA, bias=bias, precision=precision,
            backend="reference",
        )  # fmt: skip
        np.testing.assert_array_equal(ac.matmul(request)[0], bias)
        np.testing.assert_array_equal(bias, np.full(4, want, np.float32))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (0, 0, 0), (3, 4, 0)])
@pytest.mark.parametrize("epilogue", [E.DEFAULT, E.BIAS, E.RELU_AUX, E.DGELU_BGRAD, E.BGRADA, E.BGRADB])
def test_extents_of_zero(epilogue: E, m: int, n: int, k: int) -> None:
    form = FORMS[epilogue]
    a, b = np.ones(m * k, np.float32), np.ones(k * n, np.float32)
    length = n if epilogue is E.BGRADB else m
    bias = np.full(length, 9, np.float32) if form.takes_bias else None
    aux = np.full(n * -(-m // 8), 9, np.uint8) if form.masked else np.ones(n * m, np.float32) if form.aux else None
    d = ac.matmul(MatmulRequest(a, b, m=m, n=n, k=k, epilogue=epilogue, bias=bias, gelu_aux=aux, backend="reference"))
    assert d.shape == (n, m)
    assert (d == (9 if epilogue is E.BIAS else 0)).all()
    if form.writes_bias:
        assert bias is not None
        assert (bias == (k if form.summed else 0)).all()


# ----------------------------------------------------------------------------------------------------------------------
# Scales
# ----------------------------------------------------------------------------------------------------------------------


def test_scales_that_are_numbers_serve_any_element_type() -> None:
    a, b = numbers(M, K, np.float32, 1), numbers(K, N, np.float32, 2)
    c = numbers(M, N, np.float32, 3)
    request = MatmulRequest(
        memory(a), memory(b), memory(c), np.zeros(M * N, np.float32), m=M, n=N, k=K, beta=3.0,
        scales=ScaleSet(2.0, np.float32(0.25), 8), backend="reference",
    )  # fmt: skip
    np.testing.assert_array_equal(read(ac.matmul(request), M, N), 8 * (0.5 * (a @ b) + 3 * c))
    fused = dataclasses.replace(request, scales=ScaleSet(2.0, 0.25), epilogue=E.RELU)
    np.testing.assert_array_equal(read(ac.matmul(fused), M, N), np.maximum(0.5 * (a @ b) + 3 * c, 0))


@pytest.mark.parametrize("epilogue", [E.DEFAULT, E.RELU_BIAS, E.BGRADA, E.BGRADB, E.DRELU_BGRAD])
@pytest.mark.parametrize(("rows_a", "rows_b"), [(True, True), (True, False), (False, True), (False, False)])
def test_scales_on_the_device(epilogue: E, rows_a: bool, rows_b: bool) -> None:
    """Of tensors and of rows, with the scale and the largest magnitude of D."""
    case = Case(epilogue, E4M3, ml_dtypes.bfloat16, transa=True, beta=1.0)
    random = np.random.default_rng(3)
    scale_a = 2.0 ** random.integers(-2, 3, M if rows_a else 1).astype(np.float32)
    scale_b = 2.0 ** random.integers(-2, 3, N if rows_b else 1).astype(np.float32)
    scale_d, amax = np.array([0.5], np.float32), np.zeros(1, np.float32)
    scales = ScaleSet(scale_a, scale_b, scale_d, amax)
    ac.matmul(case.request(scales=scales, backend="reference"))
    a, b = wide(case.a) * scale_a[:, None], wide(case.b) * scale_b
    x = case.alpha * (a @ b) + wide(case.c)
    form = FORMS[epilogue]
    bias = wide(case.bias) if form.bias == "added" else None
    want = formula(epilogue, x, a, b, bias, wide(case.positive))
    np.testing.assert_array_equal(wide(read(case.arrays["d"], M, N)), wide(saturating_cast(want.d * 0.5, D.BF16)))
    np.testing.assert_array_equal(amax, np.abs(want.d).max())
    if form.writes_bias:
        np.testing.assert_array_equal(case.arrays["bias"], want.bias)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_the_largest_magnitude_is_to_be_had_for_any_element_type(dtype: Any) -> None:
    a, b = numbers(M, K, dtype, 1), numbers(K, N, dtype, 2)
    amax = np.zeros((1, 1), np.float64 if dtype is np.float64 else np.float32)
    for epilogue, want in ((E.DEFAULT, wide(a) @ wide(b)), (E.RELU, np.maximum(wide(a) @ wide(b), 0))):
        request = MatmulRequest(
            memory(a), memory(b), m=M, n=N, k=K, epilogue=epilogue, scales=ScaleSet(amax_d=amax), backend="reference"
        )
        ac.matmul(request)
        assert amax == np.abs(want).max()


def test_fp8_results_saturate() -> None:
    a = np.full(2, 448).astype(E4M3)
    d = np.zeros(1, E4M3)
    request = MatmulRequest(a, a, d=d, m=1, n=1, k=2, transa=True, backend="reference")
    assert float(ac.matmul(request)[0]) == 448
    scaled = dataclasses.replace(request, scales=ScaleSet(1 / 448, d=np.full(1, 0.25, np.float32)))
    assert float(ac.matmul(scaled)[0]) == 224


# ----------------------------------------------------------------------------------------------------------------------
# Arrays as memory
# ----------------------------------------------------------------------------------------------------------------------


def _product(a: Any, b: Any, c: Any = None, d: Any = None, **arguments: Any) -> Any:
    given = {"m": M, "n": N, "k": K, "backend": "reference"} | arguments
    return ac.matmul(MatmulRequest(a, b, c, d, **given))


A, B = numbers(M, K, np.float32, 1), numbers(K, N, np.float32, 2)
AB = A @ B


@pytest.mark.parametrize(
    "shape",
    [
        memory,
        np.asfortranarray,  # the memory is the same whichever way the array calls it
        lambda x: np.ascontiguousarray(x.T),
        lambda x: memory(x)[None],
        lambda x: np.append(memory(x), GUARD).astype(np.float32),
        lambda x: DlpackArray(np.ascontiguousarray(x.T)),
    ],
    ids=["flat", "column-major", "transposed", "3-D", "longer", "DLPack"],
)
def test_arrays_stand_for_memory(shape: Any) -> None:
    np.testing.assert_array_equal(_product(shape(A), shape(B)).T, AB)


def test_columns_of_a_larger_matrix() -> None:
    base = np.full((K, M + 5), GUARD, np.float32)
    base[:, 2 : M + 2] = A.T
    np.testing.assert_array_equal(_product(base[:, 2 : M + 2], memory(B), lda=M + 5).T, AB)
    fortran = np.full((M + 5, K), GUARD, np.float32, order="F")
    fortran[2 : M + 2] = A
    np.testing.assert_array_equal(_product(fortran[2 : M + 2], memory(B), lda=M + 5).T, AB)


def test_where_the_result_goes() -> None:
    c, d = np.ones((N, M), np.float32), np.full(M * N, GUARD, np.float32)
    made = _product(memory(A), memory(B))
    assert (type(made), made.shape, made.dtype) == (np.ndarray, (N, M), np.float32)
    assert _product(memory(A), memory(B), c, d, beta=2.0) is d
    np.testing.assert_array_equal(read(d, M, N), AB + 2)
    assert (c == 1).all()
    assert _product(memory(A), memory(B), c, beta=2.0) is c
    np.testing.assert_array_equal(c.T, AB + 2)
    assert _product(memory(A), memory(B), c, c, beta=1.0) is c
    np.testing.assert_array_equal(c.T, 2 * AB + 2)
    c[...] = np.nan
    assert _product(memory(A), memory(B), c) is c  # with beta = 0 it is not read
    np.testing.assert_array_equal(c.T, AB)
    wrong_c = np.zeros(1, np.float16)
    assert _product(memory(A), memory(B), wrong_c, d) is d


def test_a_new_result_has_the_element_type_that_is_asked_for() -> None:
    half = memory(A).astype(np.float16), memory(B).astype(np.float16)
    assert _product(*half).dtype == np.float16
    for dtype, known in ((np.float32, D.F32), (ml_dtypes.bfloat16, D.BF16)):
        made = _product(*half, out_dtype=known)
        assert made.dtype == dtype
        np.testing.assert_array_equal(made.T, AB.astype(dtype))
    d = np.zeros((N, M), np.float32)
    assert _product(*half, None, d, out_dtype=D.F32) is d
    for arrays, name in (((None, d), "d"), ((d, None), "c")):
        with pytest.raises(InvalidOperandError, match=f"{name} is f32, but out_dtype asks for bf16"):
            _product(*half, *arrays, out_dtype=D.BF16)
    with pytest.raises(InvalidOperandError, match="out_dtype is 'f32'; expected"):
        _product(*half, out_dtype="f32")


def test_a_gradient_may_replace_what_it_is_taken_at() -> None:
    case, other = (Case(E.DGELU_BGRAD, np.float32, np.float32, beta=1.0) for _ in range(2))
    ac.matmul(case.request(backend="reference"))
    aux = other.arrays["gelu_aux"]
    assert ac.matmul(other.request(d=aux, backend="reference")) is aux
    np.testing.assert_array_equal(aux, case.arrays["d"])
    np.testing.assert_array_equal(other.arrays["bias"], case.arrays["bias"])
    held = np.zeros(M * N + 1, np.float32)
    with pytest.raises(InvalidOperandError, match=r"d overlaps gelu_aux: .* \(d may be exactly c or gelu_aux\)"):
        ac.matmul(other.request(d=held[1:], gelu_aux=held[:-1], backend="reference"))


def test_alpha_0_reads_neither_a_nor_b() -> None:
    nan = np.full(M * K, np.nan, np.float32)
    np.testing.assert_array_equal(_product(nan, nan, alpha=0.0), np.zeros((N, M)))


def test_host_arrays_of_other_frameworks() -> None:
    out = np.zeros((N, M), np.float32)
    given = DlpackArray(out)
    assert _product(DlpackArray(memory(A)), memory(B), d=given) is given
    np.testing.assert_array_equal(out.T, AB)


def test_operands_are_never_changed() -> None:
    for epilogue in E:
        case = Case(epilogue, np.float32, np.float32, beta=2.0)
        request = case.request(backend="reference")
        names = ["a", "b", "c", *(["bias"] if FORMS[epilogue].bias == "added" else [])]
        names += ["gelu_aux"] if FORMS[epilogue].aux == "read" else []
        before = {name: getattr(request, name).copy() for name in names}
        ac.matmul(request)
        for name, then in before.items():
            np.testing.assert_array_equal(getattr(request, name), then)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


F32 = np.float32
OUT = np.full(M * N, GUARD, F32)
BIAS = np.zeros(M, F32)
BITS = np.zeros((N, 2), np.uint8)
ONE = np.ones(1, F32)
FA, FB = memory(A), memory(B)
HALF = FA.astype(np.float16)
NARROW = FA.astype(E4M3), FB.astype(E4M3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"m": -1}, "m is -1; expected an integer from 0"),
        ({"k": 2.0}, r"k is 2\.0; expected an integer"),
        ({"n": True}, "n is True; expected an integer"),
        ({"transa": 1}, "transa is 1; expected a bool"),
        ({"lda": M - 1}, "lda is 10; A is stored column-major with 11 rows: it is at least that"),
        ({"transa": True, "lda": K - 1}, "lda is 4; A is stored column-major with 5 rows"),
        ({"ldb": 0}, "ldb is 0; expected an integer from 1"),
        ({"ldd": M - 1}, "ldd is 10; D is stored"),
        ({"ldd": M + 1}, "ldd is given, but neither c nor d is: a new D has m"),
        ({"c": OUT, "ldd": M + 1}, "ldd is 12, but without d the result goes to c, whose ldc is 11"),
        ({"epilogue": "relu"}, "epilogue is 'relu'; expected a MatmulEpilogue"),
        ({"epilogue": E.BIAS}, "epilogue BIAS needs bias"),
        ({"epilogue": E.DRELU_BGRAD, "gelu_aux": BITS}, "epilogue DRELU_BGRAD needs bias"),
        ({"epilogue": E.GELU_AUX}, "epilogue GELU_AUX needs gelu_aux"),
        ({"bias": BIAS}, "bias is given, but epilogue DEFAULT has none: leave it out"),
        ({"epilogue": E.RELU, "gelu_aux": BITS}, "gelu_aux is given, but epilogue RELU has none"),
        ({"ldaux": 16}, "ldaux is given, but epilogue DEFAULT has no auxiliary matrix"),
        ({"epilogue": E.RELU_AUX, "gelu_aux": BITS, "ldaux": 20}, "ldaux is 20; bits of relu have a multiple of 8"),
        ({"epilogue": E.RELU_AUX, "gelu_aux": BITS, "ldaux": 8}, "ldaux is 8; the auxiliary matrix is stored"),
        ({"alpha": "1"}, "alpha is a str; expected a number"),
        ({"beta": True}, "beta is a bool; expected a number"),
        ({"beta": 1.0}, r"beta is 1\.0, so c is needed"),
        ({"scales": None}, "scales is None; expected a ScaleSet"),
        ({"workspace_size": -1}, "workspace_size is -1; expected bytes, or None"),
        ({"workspace_size": 1.5}, r"workspace_size is 1\.5; expected bytes"),
        ({"backend": "cpu"}, "unknown backend 'cpu'; valid: auto, prebuilt, jit, reference"),
        ({"reply": print}, "reply is a builtin_function_or_method; expected a concurrent.futures.Future"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        MatmulRequest(FA, FB, **({"m": M, "n": N, "k": K} | changes))


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ({"a": True}, "scales.a is a bool; expected a number or an array"),
        ({"amax_d": 1.0}, "scales.amax_d is a number; expected an array"),
    ],
)
def test_bad_scales_are_refused(scales: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        ScaleSet(**scales)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"a": 1.0}, "is not an array"),
        ({"a": FA[:-1]}, "a has 54 elements; it reaches over 55: 11 x 5, column-major with lda 11"),
        ({"a": FA, "lda": M + 1}, "a has 55 elements; it reaches over 59"),
        (
            {"a": np.zeros((K, 2 * M), F32)[:, :M]},
            r"a of shape \(5, 11\) has strides \(22, 1\): its elements do not lie",
        ),
        ({"a": np.zeros((K, 2 * M), F32)[:, :M], "lda": M + 4}, "or give the lda that it has"),
        ({"a": np.zeros((K, 2 * M), F32)[:, : M - 1], "lda": 2 * M}, "do not lie together"),
        ({"a": np.zeros((K - 1, 2 * M), F32)[:, :M], "lda": 2 * M}, "do not lie together"),
        ({"a": FA[::-1]}, "do not lie together"),
        ({"a": np.broadcast_to(F32(1), (M, K))}, "do not lie together"),
        ({"b": HALF}, "a is f32 and b is f16: both must have one element type"),
        ({"a": FA.astype(np.complex64)}, "no kernel knows elements of type complex64"),
        ({"a": FA.astype(np.uint8)}, "a has elements of DLPack type 1 with 8 bits"),
        ({"a": CudaArray(0x7F00_0000_0000, (M * K,), "<f4")}, "a is on cuda:0 and b on the CPU"),
        ({"c": OUT.astype(np.float16), "beta": 1.0, "d": OUT}, "c is f16; it must have D's element type, f32"),
        ({"c": OUT[1:], "beta": 1.0, "d": OUT.copy()}, "c has 65 elements; it reaches over 66"),
        ({"d": OUT[1:]}, "d has 65 elements"),
        ({"c": OUT[1:]}, "c has 65 elements"),
        ({"d": _read_only(OUT.copy())}, "d is read-only"),
        ({"d": CudaArray(0x7F00_0000_0000, (M * N,), "<f4")}, "a is on the CPU and d on cuda:0"),
        ({"precision": "fast"}, "unknown precision 'fast'"),
        ({"a": HALF, "b": FB.astype(np.float16), "precision": "tf32"}, "is for float32 operands"),
        ({"epilogue": E.BIAS, "bias": BIAS[1:]}, "bias has 10 elements; it reaches over 11"),
        ({"epilogue": E.BIAS, "bias": np.zeros((M, 2), F32)[:, 0]}, r"bias of shape \(11,\) has strides \(2,\)"),
        ({"epilogue": E.BIAS, "bias": BIAS.astype(np.int32)}, "bias is i32; expected a floating element type"),
        ({"epilogue": E.BGRADA, "bias": BIAS.astype(np.float16)}, "bias is f16; expected f32"),
        ({"epilogue": E.BGRADB, "bias": _read_only(np.zeros(N, F32))}, "bias is read-only"),
        ({"epilogue": E.BGRADB, "bias": np.zeros(N - 1, F32)}, "bias has 5 elements; it reaches over 6"),
        ({"epilogue": E.RELU_AUX, "gelu_aux": BIAS}, "gelu_aux is no array of bytes; the bits of relu are uint8"),
        ({"epilogue": E.DRELU, "gelu_aux": BITS[1:]}, "gelu_aux has 10 elements; it reaches over 12"),
        ({"epilogue": E.DRELU, "gelu_aux": BITS, "ldaux": 24}, "gelu_aux has 12 elements; it reaches over 18"),
        ({"epilogue": E.GELU_AUX, "gelu_aux": OUT[1:]}, "gelu_aux has 65 elements"),
        ({"epilogue": E.DGELU, "gelu_aux": OUT.astype(np.int8)}, "gelu_aux is i8; expected a floating element type"),
        ({"epilogue": E.GELU_AUX, "gelu_aux": OUT, "d": OUT}, "d overlaps gelu_aux: give separate memory"),
        ({"epilogue": E.DGELU, "gelu_aux": np.zeros(80, F32), "d": np.zeros(0, F32)}, "d has 0 elements"),
        ({"d": FA, "m": 1, "n": 1}, "d overlaps a"),
        ({"c": OUT[:-1], "ldc": 1, "beta": 1.0, "d": OUT[1:], "m": 1}, "d overlaps c"),
        ({"epilogue": E.BIAS, "bias": OUT[:M], "d": OUT}, "d overlaps bias"),
        ({"scales": ScaleSet(amax_d=np.ones(2, F32))}, r"amax_d has shape \(2,\); expected one element"),
        ({"scales": ScaleSet(amax_d=np.ones(1))}, "amax_d is f64; expected f32"),
        ({"scales": ScaleSet(amax_d=_read_only(np.ones(1, F32)))}, "amax_d is read-only"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto", "prebuilt"])
def test_bad_arrays_are_refused(changes: dict[str, Any], says: str, backend: str) -> None:
    before = OUT.copy()
    given = {"a": FA, "b": FB, "m": M, "n": N, "k": K, "backend": backend} | changes
    request = MatmulRequest(given.pop("a"), given.pop("b"), **given)
    with pytest.raises(InvalidOperandError, match=says):
        ac.matmul(request)
    np.testing.assert_array_equal(OUT, before)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scales": ScaleSet(ONE)}, "scale_a: only fp8 kernels take arrays; give numbers"),
        ({"scales": ScaleSet(d=2.0), "epilogue": E.RELU}, "scales.d is a number, and what follows the product"),
        ({"scales": ScaleSet(d=2.0, amax_d=ONE)}, "scales.d is a number"),
        ({"scales": ScaleSet(amax_d=ONE), "a": FA.astype(np.int8), "b": FB.astype(np.int8)}, "D is int32"),
        (
            {"a": FA.astype(ml_dtypes.float4_e2m1fn), "b": FB.astype(ml_dtypes.float4_e2m1fn)},
            "matmul multiplies no fp4: use gemm",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_the_cure(changes: dict[str, Any], says: str) -> None:
    given = {"a": FA, "b": FB, "m": M, "n": N, "k": K, "backend": "reference"} | changes
    with pytest.raises(UnsupportedError, match=says):
        ac.matmul(MatmulRequest(given.pop("a"), given.pop("b"), **given))


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        (ScaleSet(np.ones(3, F32)), "scale_a has 3 elements; expected one, or 11"),
        (ScaleSet(np.ones(M)), "scale_a is f64; expected f32"),
        (ScaleSet(None, np.ones(M, F32)), "scale_b has 11 elements; expected one, or 6"),
        (ScaleSet(None, np.ones((N, 2), F32)[:, 0]), r"scale_b of shape \(6,\) has strides \(2,\)"),
        (ScaleSet(d=np.ones(N, F32)), r"scale_d has shape \(6,\); expected one element"),
    ],
)
def test_wrong_scales_are_refused(scales: ScaleSet, says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        _product(*NARROW, scales=scales)
    with pytest.raises(UnsupportedError, match=r"amax_d is taken before scales\.d"):
        _product(*NARROW, scales=ScaleSet(d=2.0, amax_d=np.zeros(1, F32)))


def test_what_is_no_request_is_refused() -> None:
    request: Any = {"a": FA}
    with pytest.raises(InvalidOperandError, match="request is a dict; expected a MatmulRequest"):
        ac.matmul(request)


def test_without_a_gpu_auto_computes_on_the_cpu_and_names_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "no NVIDIA driver")
    operands._warned.clear()
    with pytest.warns(RuntimeWarning, match="computing with NumPy on the CPU") as caught:
        np.testing.assert_array_equal(_product(FA, FB, backend="auto").T, AB)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _product(FA, FB, backend="auto")


# ----------------------------------------------------------------------------------------------------------------------
# Replies and messages
# ----------------------------------------------------------------------------------------------------------------------


def _request(**changes: Any) -> MatmulRequest:
    return MatmulRequest(FA, FB, **({"m": M, "n": N, "k": K, "backend": "reference"} | changes))


def test_a_reply_is_told() -> None:
    reply: Future[Array] = Future()
    d = ac.matmul(_request(reply=reply))
    assert reply.result(0) is d
    wrong: Future[Array] = Future()
    with pytest.raises(InvalidOperandError, match="d has 65 elements"):
        ac.matmul(_request(reply=wrong, d=OUT[1:]))
    assert isinstance(wrong.exception(0), InvalidOperandError)
    cancelled: Future[Array] = Future()
    cancelled.cancel()
    ac.matmul(_request(reply=cancelled))
    assert cancelled.cancelled()


def test_an_actor_serves_it() -> None:
    actor = ac.CutlassActor(2)
    reply: Future[Array] = Future()
    d = actor.handle(ac.CutlassMsg.Matmul(_request(reply=reply)))
    np.testing.assert_array_equal(d.T, AB)
    assert reply.result(0) is d
    assert actor.dispatched == 1


def test_an_actor_tells_the_reply_of_errors() -> None:
    reply: Future[Array] = Future()
    message = ac.CutlassMsg.Matmul(_request(reply=reply, d=OUT[1:]))  # said in the answer
    assert not reply.done()
    with pytest.raises(InvalidOperandError, match="d has 65 elements"):
        ac.CutlassActor(2).handle(message)
    assert isinstance(reply.exception(0), InvalidOperandError)
    refused: Future[Array] = Future()
    with pytest.raises(LibraryError, match="operands need a GPU"):
        ac.CutlassActor(2, mock=True).handle(ac.CutlassMsg.Matmul(_request(reply=refused)))
    assert isinstance(refused.exception(0), LibraryError)


def test_a_mailbox_serves_it() -> None:
    mailbox = ac.CutlassActor(2).start()
    try:
        replies: list[Future[Array]] = [Future() for _ in range(8)]
        for number, reply in enumerate(replies):
            mailbox.tell(ac.CutlassMsg.Matmul(_request(reply=reply, alpha=float(number))))
        for number, reply in enumerate(replies):
            np.testing.assert_array_equal(reply.result(30).T, number * AB)
        future = mailbox.ask(ac.CutlassMsg.Matmul(_request()), block=False)
        np.testing.assert_array_equal(future.get(timeout=30).T, AB)
    finally:
        mailbox.stop()


def test_a_message_of_something_else_is_refused() -> None:
    request: Any = ac.GemmRequest(ac.GemmShape(1, 1, 1), dtype=D.F32)
    with pytest.raises(InvalidOperandError, match="request is a GemmRequest; expected a MatmulRequest"):
        ac.CutlassMsg.Matmul(request)


# ----------------------------------------------------------------------------------------------------------------------
# Heuristics
# ----------------------------------------------------------------------------------------------------------------------


def _key(m: int = 512) -> HeuristicKey:
    return HeuristicKey(m, 512, 512, D.BF16, True, False, E.DEFAULT, ac.SmArch.SM90A)


def _problem(alignment: int = 16) -> GemmProblem:
    def spec(rows: int, columns: int, *, by_columns: bool = False) -> MatrixSpec:
        return MatrixSpec((rows, columns), (1, rows) if by_columns else (columns, 1), D.BF16, alignment)

    return GemmProblem(spec(512, 512), spec(512, 512, by_columns=True), None, spec(512, 512), "default", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU with all cells of the matrix in its table."""
    fake_table.install(monkeypatch, fake_table.rows_of("full", [ac.SmArch.SM90A]))
    monkeypatch.setattr(devices, "get", lambda _index=0: fake_table.H200)
    return fake_table.H200


def test_a_cache_keeps_what_was_used_last() -> None:
    cache = HeuristicCache(2)
    kernel, other = (info.key for info in fake_table.rows_of("full", [ac.SmArch.SM90A])[:2])
    assert (cache.get(_key()), len(cache), cache.capacity) == (None, 0, 2)
    cache.put(_key(1), kernel)
    cache.put(_key(2), other)
    assert (cache.get(_key(1)), cache.get(_key(2))) == (kernel, other)
    cache.get(_key(1))
    cache.put(_key(3), kernel)
    assert [m for m in (1, 2, 3) if _key(m) in cache] == [1, 3]
    cache.put(_key(3), other)
    assert (cache.get(_key(3)), len(cache)) == (other, 2)
    assert repr(cache) == "<HeuristicCache: 2 of 2 kernels>"
    cache.clear()
    assert (len(cache), cache.get(_key(1))) == (0, None)


def test_what_no_cache_holds_is_refused() -> None:
    cache, anything = HeuristicCache(), fake_table.rows_of("smoke", [ac.SmArch.SM80])[0]
    wrong: Any = ("a key", "a kernel")
    with pytest.raises(
        InvalidOperandError, match="key is 'a key'; expected a request without arrays, or a HeuristicKey"
    ):
        cache.put(wrong[0], anything.key)
    with pytest.raises(InvalidOperandError, match="kernel is 'a kernel'; expected a KernelKey"):
        cache.put(_key(), wrong[1])
    with pytest.raises(InvalidOperandError, match="capacity is 0"):
        HeuristicCache(0)


def test_what_a_user_stores_is_told_from_what_was_chosen() -> None:
    cache = HeuristicCache()
    kernel, other = (info.key for info in fake_table.rows_of("full", [ac.SmArch.SM90A])[:2])
    cache.note(_key(), kernel)
    assert (cache.get(_key()), cache.wanted(_key())) == (kernel, None)
    cache.put(_key(), other)
    assert (cache.get(_key()), cache.wanted(_key())) == (other, other)
    cache.note(_key(), kernel)  # the other one cannot serve
    assert (cache.get(_key()), cache.wanted(_key())) == (kernel, None)
    cache.put(_key(), other)
    cache.clear()
    assert cache.wanted(_key()) is None


def test_threads_share_a_cache() -> None:
    cache = HeuristicCache(16)
    kernels = [info.key for info in fake_table.rows_of("full", [ac.SmArch.SM90A])[:8]]
    wrong: list[KernelKey] = []

    def work() -> None:
        for turn in range(300):
            number = turn % len(kernels)
            cache.put(_key(number), kernels[number])
            found = cache.get(_key(number))
            if found not in (None, kernels[number]):
                wrong.append(found)
            if turn % 50 == 0:
                cache.clear()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache) <= len(kernels)


def _named(kernel: KernelKey, search: GemmSearch, backend: str, jit: str) -> Candidate[Any] | None:
    """The candidate of a kernel that a user names; None where it is passed over."""
    search.named = kernel
    try:
        found = select.choose(search, backend=backend, jit=jit)
    except (KernelNotFoundError, UnsupportedError):
        return None
    finally:
        search.named = None
    return found if found.named else None


def test_a_kernel_that_is_named_is_put_as_the_one_that_was_chosen(hopper: Any) -> None:
    search = GemmSearch(_problem(), hopper)
    chosen = select.choose(search, backend="prebuilt", jit="off")
    named = _named(chosen.key, search, "prebuilt", "off")
    assert named == dataclasses.replace(chosen, named=True)


def test_a_kernel_that_cannot_serve_is_passed_over(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    search = GemmSearch(_problem(), hopper)
    chosen = select.choose(search, backend="prebuilt", jit="off")
    assert _named(chosen.key, GemmSearch(_problem(2), hopper), "prebuilt", "off") is None
    assert _named(chosen.key, GemmSearch(_problem(), hopper, ac.SmArch.SM80), "prebuilt", "off") is None
    other_type = next(info.key for info in select.table.kernels() if info.key.a is D.F64)
    assert _named(other_type, search, "auto", "auto") is None
    older = dataclasses.replace(chosen.key, arch=ac.SmArch.SM100)
    assert _named(older, search, "auto", "auto") is None
    fake_table.install(monkeypatch, [])
    assert _named(chosen.key, search, "prebuilt", "auto") is None
    assert _named(chosen.key, search, "auto", "off") is None
    compiled = _named(chosen.key, search, "auto", "auto")
    assert compiled is not None
    assert compiled.info is None


def test_the_kernels_of_the_gpu_tests_are_known_without_a_gpu() -> None:
    """Those of the sm90 generation take long to compile, so that there are to be few."""
    keys = matmul_gpu.keys(devices.imagined(ac.SmArch.SM90A))
    fused = [key for key in keys if "evt:" in key.epilogue]
    assert {key.a for key in fused} >= {D.BF16, D.F16, D.F32, D.F64, D.F8E4M3}
    assert 0 < sum(key.generation == "sm90" for key in fused) <= 45


def test_the_cache_of_the_package_is_there() -> None:
    assert isinstance(heuristics, HeuristicCache)
    assert numpy_dtype(D.BF16).itemsize == 2


# ----------------------------------------------------------------------------------------------------------------------
# The page
# ----------------------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "matmul.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:computing with NumPy:RuntimeWarning")
def test_the_examples_run() -> None:
    known: dict[str, Any] = {}
    for part in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(part, "matmul.md", "exec"), known)
    np.testing.assert_allclose(known["y"], known["x"] @ known["weight"].T, rtol=1e-4, atol=1e-4)


def test_every_epilogue_is_in_the_table() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert {form.name for form in E} == {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])}


# ----------------------------------------------------------------------------------------------------------------------
# On a fake GPU
# ----------------------------------------------------------------------------------------------------------------------

CASES_FILE = "matmul_cases.py"
CASES = fake_cases.names(CASES_FILE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    cells = [key for key in expand("full", [ac.SmArch.SM80]) if key.math == "ieee" and key.d is D.F32]
    small = [key for key in cells if key.tile[0] * key.tile[1] == 64 * 128]  # the best for what the cases compute
    greedy = fake_kernels.make_pack(folder / "greedy.so", small, name="greedy", workspace=64, error=700)
    others = [key for key in cells if key not in small]
    modest = fake_kernels.make_pack(folder / "modest.so", others, name="modest", error=700)
    driver = fake_pack.make_driver(folder / "driver")
    return fake_cases.outcome(CASES_FILE, driver, [greedy, modest], timeout=300, ATOMR_CUTLASS_CHECK_EPILOGUES="off")


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


def test_ones_that_are_long_enough_serve_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def upload(values: Any, _device: int) -> _core.Operand:
        made.append(len(values))
        return _core.Operand(4096, values.shape, None, (2, 16), 2, 0)

    monkeypatch.setattr(of_matmul.operands, "upload", upload)
    monkeypatch.setattr(of_matmul, "_made_ones", {})
    monkeypatch.setattr(_core, "capturing", lambda _device, _stream: bool(made))
    assert of_matmul._ones(D.F16, 10000, 0, 0).shape == (16384,)
    assert of_matmul._ones(D.F16, 100, 0, 0).shape == (16384,)
    with pytest.raises(UnsupportedError, match="call matmul once before the capture"):
        of_matmul._ones(D.F16, 20000, 0, 0)
    assert made == [16384]
