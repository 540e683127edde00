"""`quantize` and `dequantize` without a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import fake_kernels
import fake_pack
import quantize_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.scales import swizzled_size
from atomr_cutlass.ops.quantize import function as quantized

CASES_FILE = "quantize_cases.py"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    pack = fake_kernels.make_pack(folder / "pack.so", quantize_cases.KEYS)
    return fake_cases.outcome(CASES_FILE, fake_pack.make_driver(folder / "driver", major=9), [pack])


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == "", outcome[case]


X = np.random.default_rng(7).standard_normal((130, 416)).astype(np.float32)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block", "tile", "nvfp4", "mxfp4"])
def test_a_matrix_survives_as_far_as_rounding_allows(scaling: str) -> None:
    made = ac.quantize(X, D.F8E4M3, scaling=scaling)
    back = ac.dequantize(made.values, made.scales, scaling=scaling)
    step = 2.0**-4 if scaling not in ("nvfp4", "mxfp4") else 0.3
    assert back.dtype == np.float32
    assert np.abs(back - X).max() <= step * np.abs(X).max()
    half = ac.dequantize(made.values, made.scales, scaling=scaling, out_dtype=D.BF16)
    assert half.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("scaling", "shape"),
    [
        ("tensor", (1,)),
        ("row", (130, 1)),
        ("block", (130, 4)),
        ("tile", (2, 4)),
        ("nvfp4", (7168,)),
        ("mxfp4", (4096,)),
    ],
)
def test_scales_have_their_shape(scaling: str, shape: tuple[int, ...]) -> None:
    made = ac.quantize(X, scaling=scaling)
    assert made.scales.shape == shape
    assert made.values.shape == ((130, 208) if scaling in ("nvfp4", "mxfp4") else (130, 416))


def test_quantized_operands_multiply_in_the_reference() -> None:
    a, b = X[:, :256], X[:64, :256].T
    qa, qb = ac.quantize(a, scaling="block"), ac.quantize(b.T, scaling="tile")
    got = ac.gemm(qa.values, qb.values.T, scale_a=qa.scales, scale_b=qb.scales.T, out_dtype=D.F32, backend="reference")
    assert np.abs(got - a @ b).max() < 0.1 * np.abs(a @ b).max()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ac.quantize(X, scaling="rows"),
            "unknown scaling 'rows'; valid: tensor, row, block, tile, nvfp4, mxfp4",
        ),
        (lambda: ac.quantize(X, D.I8), "dtype is .*; expected F8E4M3 or F8E5M2"),
        (lambda: ac.quantize(X, D.F4E2M1, scaling="row"), "dtype is .*; expected F8E4M3 or F8E5M2"),
        (lambda: ac.quantize(X[0]), "x has shape .*; expected 2 dimensions"),
        (lambda: ac.quantize(X[:, :40], scaling="mxfp4"), "x has 40 columns; mxfp4 shares a scale among 32"),
        (lambda: ac.dequantize(X, X), "values is f32; expected e4m3, e5m2"),
        (lambda: ac.dequantize(X, X, scaling="nvfp4"), "expected packed fp4, uint8"),
        (
            lambda: ac.dequantize(on_gpu(np.zeros((4, 36), np.uint8)), on_gpu(np.zeros(1024, E4M3)), scaling="nvfp4"),
            r"values \(unpacked\) has 72 columns; nvfp4 shares a scale among 16",
        ),
    ],
)
def test_what_is_wrong_is_refused(call, said: str) -> None:
    with pytest.raises(ac.InvalidOperandError, match=said):
        call()


@pytest.mark.parametrize("scaling", quantized.SCALINGS)
def test_results_are_written_in_place(scaling: str) -> None:
    want = ac.quantize(X, scaling=scaling)
    out = np.zeros_like(want.values), np.zeros_like(want.scales)
    got = ac.quantize(X, scaling=scaling, out=out)
    assert got.values is out[0]
    assert got.scales is out[1]
    assert out[0].tobytes() == want.values.tobytes()
    assert out[1].tobytes() == want.scales.tobytes()
    for dtype in (np.float32, np.float16):
        wide = np.zeros(X.shape, dtype)
        assert ac.dequantize(*out, scaling=scaling, out=wide) is wide
        known = D.F32 if dtype is np.float32 else D.F16
        np.testing.assert_array_equal(wide, ac.dequantize(*out, scaling=scaling, out_dtype=known))


E4M3 = ml_dtypes.float8_e4m3fn
VALUES, SCALES, WIDE = np.zeros(X.shape, E4M3), np.ones((130, 1), np.float32), np.zeros(X.shape, np.float32)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (VALUES, "out is a ndarray; expected two arrays"),
        ((VALUES, SCALES, 1.0), r"out is \(a ndarray, a ndarray, 1.0\); expected two arrays"),
        ((VALUES, None), r"out\[1\] is None; expected an array"),
        ((VALUES[:9], SCALES), r"out\[0\] has shape \(9, 416\); expected \(130, 416\)"),
        ((VALUES, SCALES[:, 0]), r"out\[1\] has shape \(130,\); expected \(130, 1\)"),
        ((VALUES.view(ml_dtypes.float8_e5m2), SCALES), r"out\[0\] has elements of e5m2; expected e4m3"),
        ((VALUES, SCALES.astype(np.float64)), r"out\[1\] has elements of f64; expected f32"),
        ((np.broadcast_to(VALUES[:1], X.shape), SCALES), r"out\[0\] is read-only"),
        ((X.view(E4M3)[:, :416], SCALES), r"out\[0\] overlaps x"),
        ((WIDE.view(E4M3)[:, :416], WIDE[:, :1]), r"out\[0\] overlaps out\[1\]"),
    ],
)
def test_wrong_arrays_for_values_and_scales_are_refused(out: Any, said: str) -> None:
    with pytest.raises(ac.InvalidOperandError, match=said):
        ac.quantize(X, scaling="row", out=out)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"out": WIDE[:9]}, r"out has shape \(9, 416\); expected \(130, 416\)"),
        ({"out": WIDE.astype(np.float64)}, "out is f64; expected f32, f16 or bf16"),
        ({"out": WIDE, "out_dtype": D.BF16}, "out is f32, but out_dtype asks for bf16"),
        ({"out": np.broadcast_to(WIDE[:1], X.shape)}, "out is read-only"),
        ({"out_dtype": D.I8}, "out_dtype is i8; expected f32, f16 or bf16"),
        ({"out": WIDE, "values": WIDE.view(E4M3)[:, :416]}, "out overlaps values"),
    ],
)
def test_wrong_arrays_for_what_is_dequantized_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ac.InvalidOperandError, match=said):
        ac.dequantize(**{"values": VALUES, "scales": SCALES, "scaling": "row", **given})


def on_gpu(array: np.ndarray[Any, Any]) -> _core.Operand:
    """An array on an imagined GPU, which is refused before it is touched."""
    dtype = operands.as_operand(array).dtype
    return _core.Operand(1 << 30, array.shape, None, dtype, operands.CUDA, 0, False, array)


def on_host(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself."""
    return array


def quantized_by(scaling: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and scales."""
    made = ac.quantize(X, scaling=scaling)
    return made.values, made.scales


PLACES = pytest.mark.parametrize("place", [on_host, on_gpu])


@PLACES
@pytest.mark.parametrize("scaling", quantized.SCALINGS)
@pytest.mark.parametrize(
    ("second", "said"),
    [
        (0.0, "positive number in float32's range"),
        (-2.0, "positive number in float32's range"),
        (float("nan"), "positive number in float32's range"),
        (float("inf"), "positive number in float32's range"),
        (1e-60, "positive number in float32's range"),
        (10**400, "positive number in float32's range"),
        (10**5000, "positive number in float32's range"),
        (True, "is a bool; expected a number"),
        ("1", "is a str; expected a number"),
        (np.ones(1, np.float32), "is a ndarray; expected a number"),
    ],
    ids=lambda given: f"{given.bit_length()} bits" if isinstance(given, int) else str(given),
)
def test_a_second_level_scale_is_a_positive_number(place: Any, scaling: str, second: Any, said: str) -> None:
    values, scales = quantized_by(scaling)
    with pytest.raises(ac.InvalidOperandError, match=f"global_scale .*{said}"):
        ac.quantize(place(X), scaling=scaling, global_scale=second)
    with pytest.raises(ac.InvalidOperandError, match=f"global_scale .*{said}"):
        ac.dequantize(place(values), place(scales), scaling=scaling, global_scale=second)


@PLACES
@pytest.mark.parametrize("scaling", [each for each in quantized.SCALINGS if each != "nvfp4"])
def test_only_nvfp4_has_a_second_level_scale(place: Any, scaling: str) -> None:
    values, scales = quantized_by(scaling)
    with pytest.raises(ac.InvalidOperandError, match=r"global_scale is 0\.5; only nvfp4 has one"):
        ac.quantize(place(X), scaling=scaling, global_scale=0.5)
    with pytest.raises(ac.InvalidOperandError, match=r"global_scale is 0\.5; only nvfp4 has one"):
        ac.dequantize(place(values), place(scales), scaling=scaling, global_scale=0.5)


def test_the_second_level_scale_is_the_float32_that_was_used() -> None:
    made = ac.quantize(X, scaling="nvfp4", global_scale=0.1)
    assert made.global_scale == float(np.float32(0.1))
    plain = ac.dequantize(made.values, made.scales, scaling="nvfp4")
    scaled = ac.dequantize(made.values, made.scales, scaling="nvfp4", global_scale=0.1)
    np.testing.assert_array_equal(scaled, (plain.astype(np.float64) * made.global_scale).astype(np.float32))


@PLACES
@pytest.mark.parametrize("scaling", quantized.SCALINGS)
def test_scales_of_another_dtype_are_refused(place: Any, scaling: str) -> None:
    values, scales = quantized_by(scaling)
    kinds = {"nvfp4": "e4m3", "mxfp4": "e8m0"}
    for dtype in (np.float16, np.float64, np.int32, ml_dtypes.float8_e5m2, np.float32, np.uint8):
        if dtype == scales.dtype:
            continue
        with pytest.raises(ac.InvalidOperandError, match=f"scales .*expected {kinds.get(scaling, 'f32')}"):
            ac.dequantize(place(values), place(np.ones(scales.shape, dtype)), scaling=scaling)


def test_scales_of_mxfp4_may_be_called_bytes_or_e8m0() -> None:
    values, scales = quantized_by("mxfp4")
    np.testing.assert_array_equal(
        ac.dequantize(values, scales, scaling="mxfp4"),
        ac.dequantize(values, scales.view(ml_dtypes.float8_e8m0fnu), scaling="mxfp4"),
    )


def test_values_and_scales_are_in_one_place() -> None:
    values, scales = quantized_by("row")
    with pytest.raises(ac.InvalidOperandError, match="values is on cuda:0 and scales on the CPU"):
        ac.dequantize(on_gpu(values), scales, scaling="row")


@PLACES
@pytest.mark.parametrize("of", [X, X[:0]], ids=["elements", "nothing"])
def test_the_backend_and_the_policy_are_looked_at(place: Any, of: np.ndarray[Any, Any]) -> None:
    values = np.zeros(of.shape, ml_dtypes.float8_e4m3fn)
    for said, given in (
        ("unknown backend 'nonsense'; valid: auto, prebuilt, jit, reference", {"backend": "nonsense"}),
        ("jit is 'nonsense'; valid: auto", {"jit": "nonsense"}),
    ):
        with pytest.raises(ac.InvalidOperandError, match=said):
            ac.quantize(place(of), **given)
        with pytest.raises(ac.InvalidOperandError, match=said):
            ac.dequantize(place(values), place(np.ones(1, np.float32)), **given)


@pytest.mark.parametrize("backend", ["prebuilt", "jit"])
def test_no_kernel_quantizes_host_arrays(backend: str) -> None:
    with pytest.raises(ac.UnsupportedError, match=f"NumPy quantizes host arrays.*backend='{backend}'"):
        ac.quantize(X, backend=backend)
    with pytest.raises(ac.UnsupportedError, match=f"NumPy quantizes host arrays.*backend='{backend}'"):
        ac.dequantize(*quantized_by("row"), scaling="row", backend=backend)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("scaling", quantized.SCALINGS)
def test_what_has_no_elements_has_scales_of_1(scaling: str, shape: tuple[int, int]) -> None:
    made = ac.quantize(np.zeros(shape, np.float32), scaling=scaling)
    assert (made.scales == 1).all()
    rows, columns = shape
    blocks = -(-columns // 128)
    expected = {
        "tensor": (1,), "row": (rows, 1), "block": (rows, blocks), "tile": (-(-rows // 128), blocks),
        "nvfp4": (swizzled_size(rows, columns // 16),), "mxfp4": (swizzled_size(rows, columns // 32),),
    }  # fmt: skip
    assert made.scales.shape == expected[scaling]
    assert ac.dequantize(made.values, made.scales, scaling=scaling).shape == shape
