"""`quantize` and `dequantize` without a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D

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
        (lambda: ac.quantize(X[0]), "x has shape .*; expected 2 dimensions"),
        (lambda: ac.quantize(X[:, :40], scaling="mxfp4"), "x has 40 columns; mxfp4 shares a scale among 32"),
        (lambda: ac.dequantize(X, X), "values is f32; expected e4m3, e5m2"),
        (lambda: ac.dequantize(X, X, scaling="nvfp4"), "expected packed fp4, uint8"),
    ],
)
def test_what_is_wrong_is_refused(call, said: str) -> None:
    with pytest.raises(ac.InvalidOperandError, match=said):
        call()
