"""The reference backend against exact arithmetic, plain loops and the standard library."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import atomr_cutlass as ac
from atomr_cutlass import reference
from atomr_cutlass.arrays import numerics
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.dtypes import ScaleType
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.quantize import reference as quantization

quick = settings(max_examples=150, deadline=None)
FLOATS = [d for d in D if d not in numerics.INTEGER_DTYPES and d is not D.TF32]


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: D) -> np.ndarray[Any, Any]:
    spread = 40.0 if dtype is D.I8 else 1.0
    return numerics.saturating_cast(rng.normal(size=shape) * spread, dtype)


def _same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(numerics.to_float64(got), numerics.to_float64(want))


# ----------------------------------------------------------------------------------------------------------------------
# Activations
# ----------------------------------------------------------------------------------------------------------------------


def test_error_functions_agree_with_published_digits() -> None:
    # NIST Digital Library of Mathematical Functions, tables of chapter 7; erfc(10) from its asymptotic series.
    np.testing.assert_allclose(
        reference.erf(np.array([0.5, 1.0])), [0.5204998778130465, 0.8427007929497149], rtol=1e-15
    )
    np.testing.assert_allclose(
        reference.erfc(np.array([0.5, 2.0, 10.0])), [0.4795001221869535, 4.677734981047266e-3, 2.088487583762545e-45],
        rtol=2e-15,
    )  # fmt: skip


def test_erf_special_values_and_shapes() -> None:
    x = np.array([[np.nan, np.inf], [-np.inf, 0.0]])
    np.testing.assert_array_equal(reference.erf(x), [[np.nan, 1.0], [-1.0, 0.0]])
    np.testing.assert_array_equal(reference.erfc(x), [[np.nan, 0.0], [2.0, 1.0]])
    assert reference.erf(np.zeros((0, 3))).shape == (0, 3)
    assert float(reference.erf(np.array(0.5))) == pytest.approx(math.erf(0.5), rel=1e-15)
    assert np.signbit(reference.erf(np.array(-0.0)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


DEFINITIONS = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
}


def test_every_activation_has_a_definition_here() -> None:
    assert set(DEFINITIONS) == set(reference.ACTIVATIONS)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_activation(name: str) -> None:
    x = np.linspace(-20, 20, 2001).reshape(3, -1)
    want = np.vectorize(DEFINITIONS[name])(x)
    np.testing.assert_allclose(reference.ACTIVATIONS[name](x), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_activation_at_the_ends(name: str) -> None:
    d = gemm_reference.gemm(
        np.array([[np.nan], [np.inf], [-np.inf], [1e300], [-1e300]]),
        np.ones((1, 1)),
        activation=name,
        out_dtype=D.F64,
    )[:, 0]
    assert np.isnan(d[0])
    assert d[1] == (1.0 if name in ("sigmoid", "tanh") else np.inf)
    floor = {"identity": -np.inf, "leaky_relu": -np.inf, "relu": 0.0, "sigmoid": 0.0, "tanh": -1.0}
    np.testing.assert_array_equal(d[2], floor.get(name, np.nan))
    assert not np.isnan(d[3:]).any()


def test_activations_cannot_be_altered() -> None:
    with pytest.raises(TypeError):
        reference.ACTIVATIONS["relu"] = np.abs  # type: ignore[index]


# ----------------------------------------------------------------------------------------------------------------------
# Values of a product
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not D.F64])
def test_result_is_the_exact_sum_rounded_once(dtype: D, out_dtype: D) -> None:
    rng = np.random.default_rng(FLOATS.index(dtype))
    a, b = _random(rng, (3, 5), dtype), _random(rng, (5, 4), dtype)
    c = _random(rng, (3, 4), D.F16)
    got = gemm_reference.gemm(a, b, c, alpha=0.5, beta=-2.0, out_dtype=out_dtype)
    for i in range(3):
        for j in range(4):
            exact = -2 * Fraction(float(c[i, j])) + Fraction(1, 2) * sum(
                Fraction(float(a[i, k])) * Fraction(float(b[k, j])) for k in range(5)
            )
            want = numerics.saturating_cast(float(exact), out_dtype)
            # float64 may be off by its own rounding, which shows only in a float64 result (or next to a tie).
            assert float(got[i, j]) == pytest.approx(float(want), rel=2e-15)
    assert got.dtype == numerics.numpy_dtype(out_dtype)


def test_the_order_of_scales_bias_activation_and_rounding() -> None:
    a, b = np.array([[2.0, -1.0]]), np.array([[3.0, -8.0], [1.0, 4.0]])
    c, bias = np.array([[1.0, 1.0]]), np.array([0.5, -0.25])
    got = gemm_reference.gemm(
        a, b, c, alpha=2.0, beta=3.0, bias=bias, activation="relu", scale_a=0.5, scale_b=4.0, scale_d=100.0,
        out_dtype=D.F8E4M3,
    )  # fmt: skip
    # 2 * 0.5 * 4 * (5, -20) + 3 + bias = (23.5, -77.25); relu; 2350 saturates.
    np.testing.assert_array_equal(got.astype(np.float32), [[448.0, 0.0]])


def test_row_and_column_scales() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 4))
    rows, columns = rng.normal(size=(3, 1)), rng.normal(size=(2, 1, 4))
    got = gemm_reference.gemm(a, b, scale_a=rows, scale_b=columns, out_dtype=D.F64)
    np.testing.assert_allclose(got, (a * rows) @ (b * columns), rtol=1e-13)


@quick
@given(
    batch=st.sampled_from([((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((1,), (4,)), ((0,), (1,))]),
    m=st.integers(0, 4),
    n=st.integers(0, 4),
    k=st.integers(0, 4),
    with_c=st.booleans(),
    with_bias=st.booleans(),
)
def test_shapes_broadcast_and_may_be_empty(
    batch: tuple[tuple[int, ...], tuple[int, ...]], m: int, n: int, k: int, with_c: bool, with_bias: bool
) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(*batch[0], m, k)), rng.normal(size=(*batch[1], k, n))
    shape = (*np.broadcast_shapes(*batch), m, n)
    c = rng.normal(size=(m, n)) if with_c else None
    bias = rng.normal(size=n) if with_bias else None
    got = gemm_reference.gemm(a, b, c, alpha=2.0, beta=0.5 if with_c else 0.0, bias=bias, out_dtype=D.F64)
    assert got.shape == shape
    want = 2.0 * np.einsum("...mk,...kn->...mn", a, b)
    want = want + (0.5 * c if c is not None else 0.0) + (bias if bias is not None else 0.0)
    np.testing.assert_allclose(got, np.broadcast_to(want, shape), rtol=1e-12, atol=1e-14)


def test_operands_may_be_views_and_are_left_alone() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=(8, 12))
    a, b, c = base[::2, 1:7], base.T[:6, ::-1], base[:4, :8]
    keep = base.copy()
    got = gemm_reference.gemm(a, b, c, alpha=1.5, beta=1.0, activation="identity", out_dtype=D.F64)
    np.testing.assert_allclose(got, 1.5 * (a @ b) + c, rtol=1e-13)
    np.testing.assert_array_equal(base, keep)
    assert not np.shares_memory(got, base)


def test_tf32_rounds_operands_and_the_other_modes_do_not() -> None:
    a = np.array([[1.0 + 2.0**-12, 1.0 + 2.0**-11]], dtype=np.float32)
    b = np.ones((2, 1), dtype=np.float32)
    for mode in ("default", "ieee", "3xtf32"):
        assert gemm_reference.gemm(a, b, out_dtype=D.F32, math=mode)[0, 0] == np.float32(2.0 + 2.0**-12 + 2.0**-11)
    assert gemm_reference.gemm(a, b, out_dtype=D.F32, math="tf32")[0, 0] == np.float32(2.0 + 2.0**-10)
    assert gemm_reference.gemm(a, b, out_dtype=D.TF32, math="tf32").dtype == np.float32


# ----------------------------------------------------------------------------------------------------------------------
# Scales
# ----------------------------------------------------------------------------------------------------------------------

ONE = np.full((1,), 3.0, np.float32)


@pytest.mark.parametrize("scale", [3, 3.0, np.float32(3), np.array(3.0, np.float16), ONE, ONE.reshape(1, 1), [3.0]])
def test_one_scale_in_all_its_forms(scale: Any) -> None:
    rng = np.random.default_rng(8)
    a, b = _random(rng, (2, 3, 5), D.F8E4M3), _random(rng, (5, 4), D.F8E5M2)
    want = numerics.saturating_cast(9.0 * np.matmul(a.astype(np.float64), b.astype(np.float64)), D.BF16)
    _same(gemm_reference.gemm(a, b, scale_a=scale, scale_b=scale, out_dtype=D.BF16), want)


@pytest.mark.parametrize("pair", [(D.F8E4M3, D.F8E5M2), (D.F8E5M2, D.F8E4M3)])
@pytest.mark.parametrize("out_dtype", [D.BF16, D.F16, D.F32, D.F8E4M3, D.F8E5M2])
def test_mixed_fp8(pair: tuple[D, D], out_dtype: D) -> None:
    rng = np.random.default_rng(9)
    a, b = _random(rng, (4, 33), pair[0]), _random(rng, (33, 6), pair[1])
    got = gemm_reference.gemm(a, b, scale_a=0.5, scale_d=4.0, out_dtype=out_dtype, math="fast")
    want = 2.0 * (a.astype(np.float64) @ b.astype(np.float64))
    _same(got, numerics.saturating_cast(want, out_dtype))


def _block_loops(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], sa: np.ndarray[Any, Any], sb: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Every term by itself, with the scales of its blocks of 128."""
    d = np.zeros((a.shape[0], b.shape[1]))
    for i, j, k in np.ndindex(a.shape[0], b.shape[1], a.shape[1]):
        d[i, j] += float(sa[i, k // 128]) * float(sb[k // 128, j // 128]) * float(a[i, k]) * float(b[k, j])
    return d


@pytest.mark.parametrize(("m", "n", "k"), [(3, 2, 128), (2, 130, 129), (1, 1, 257), (2, 129, 5)])
def test_scales_in_blocks_of_128(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = _random(rng, (m, k), D.F8E4M3), _random(rng, (k, n), D.F8E4M3)
    blocks = -(-k // 128)
    sa = rng.normal(size=(m, blocks)).astype(np.float32)
    sb = rng.normal(size=(blocks, -(-n // 128))).astype(np.float32)
    want = _block_loops(a, b, sa, sb)
    np.testing.assert_allclose(gemm_reference.gemm(a, b, scale_a=sa, scale_b=sb, out_dtype=D.F64), want, rtol=1e-9)
    limits = gemm_reference.absolute_product(a, b, alpha=-2.0, scale_a=sa, scale_b=sb)
    np.testing.assert_allclose(limits, 2 * _block_loops(abs(a), abs(b), abs(sa), abs(sb)), rtol=1e-9)
    # One of the two may be of another form.
    got = gemm_reference.gemm(a, b, scale_a=sa, scale_b=2.0, out_dtype=D.F64)
    np.testing.assert_allclose(got, _block_loops(a, b, sa, np.full_like(sb, 2.0)), rtol=1e-9)
    column = rng.normal(size=(1, n)).astype(np.float32)
    got = gemm_reference.gemm(a, b, scale_a=np.ones((m, 1), np.float32), scale_b=column, out_dtype=D.F64)
    np.testing.assert_allclose(got, (a.astype(np.float64) @ b.astype(np.float64)) * column, rtol=1e-9)


def test_scales_in_blocks_broadcast_over_batches() -> None:
    rng = np.random.default_rng(3)
    a, b = _random(rng, (2, 1, 3, 200), D.F8E5M2), _random(rng, (4, 200, 5), D.F8E4M3)
    sa = rng.normal(size=(4, 3, 2)).astype(np.float32)
    sb = rng.normal(size=(2, 1, 2, 1)).astype(np.float32)
    got = gemm_reference.gemm(a, b, scale_a=sa, scale_b=sb, out_dtype=D.F64)
    assert got.shape == (2, 4, 3, 5)
    for i, j in np.ndindex(2, 4):
        np.testing.assert_allclose(got[i, j], _block_loops(a[i, 0], b[j], sa[j], sb[i, 0]), rtol=1e-9)


@pytest.mark.parametrize("quantized", [quantization.quantize_nvfp4, quantization.quantize_mxfp4])
def test_fp4_with_its_scales_is_the_product_of_what_was_quantized(quantized: Any) -> None:
    rng = np.random.default_rng(4)
    a, b = quantized(rng.normal(size=(2, 5, 64))), quantized(rng.normal(size=(64, 3)), axis=-2)
    got = gemm_reference.gemm(a.values, b.values, scale_a=a.scale, scale_b=b.scale, alpha=2.0, out_dtype=D.F32)
    wide_a = quantization.dequantize_fp4(a).astype(np.float64)
    wide_b = quantization.dequantize_fp4(b, axis=-2).astype(np.float64)
    np.testing.assert_allclose(got, 2.0 * wide_a @ wide_b, rtol=1e-6)
    scale = gemm_reference.absolute_product(a.values, b.values, scale_a=a.scale, scale_b=b.scale)
    np.testing.assert_allclose(scale, np.abs(wide_a) @ np.abs(wide_b), rtol=1e-12)


def test_infinite_and_nan_scales() -> None:
    a, b = np.ones((2, 256), np.float32), np.ones((256, 2), np.float32)
    a[1, 128] = -127.0  # the second block of this row sums up to zero
    sa, sb = np.array([[1.0, np.inf], [1.0, np.inf]], np.float32), np.ones((2, 1), np.float32)
    got = gemm_reference.gemm(a, b, scale_a=sa, scale_b=sb, out_dtype=D.F32)
    np.testing.assert_array_equal(got[:, 0], [np.inf, np.nan])
    np.testing.assert_array_equal(gemm_reference.gemm(a, b, scale_a=sa, scale_b=sb, alpha=0.0, out_dtype=D.F32), 0.0)
    # Infinity in an operand and zero in the other block: nothing leaks from block to block.
    a[:] = 0.0
    a[0, 0] = np.inf
    got = gemm_reference.gemm(a, b, scale_a=np.ones_like(sa), scale_b=sb, out_dtype=D.F8E4M3)
    np.testing.assert_array_equal(got.astype(np.float32)[:, 0], [448.0, 0.0])
    zeros = numerics.saturating_cast(np.zeros((1, 32)), D.F4E2M1)
    scale = np.array([[np.nan]]).astype(numerics.numpy_dtype(ScaleType.UE8M0))
    good = numerics.cast_scale([[1.0]], ScaleType.UE8M0)
    assert np.isnan(gemm_reference.gemm(zeros, zeros.T, scale_a=scale, scale_b=good, out_dtype=D.F32)).all()


def test_block_scales_of_nothing() -> None:
    a, b = np.zeros((3, 0), np.float32), np.zeros((0, 200), np.float32)
    none, few = np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32)
    np.testing.assert_array_equal(gemm_reference.gemm(a, b, scale_a=none, scale_b=few, out_dtype=D.F32), 0.0)
    empty = gemm_reference.gemm(a[:0], b, scale_a=none[:0], scale_b=few, out_dtype=D.F32)
    assert empty.shape == (0, 200)


def _fp4(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return numerics.saturating_cast(np.ones(shape), D.F4E2M1)


def _narrow(shape: tuple[int, ...], kind: ScaleType = ScaleType.UE4M3, value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.full(shape, value).astype(numerics.numpy_dtype(kind))


FP4 = {"a": _fp4((4, 256)), "b": _fp4((256, 8))}
E8M0 = ScaleType.UE8M0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale_a": np.ones((4, 2), np.float32)}, r"scale_a has shape \(4, 2\); .* \(..., 4, 3\) in blocks of 128"),
        ({"scale_a": np.ones((4, 4), np.float32)}, "scale_a has shape"),
        ({"scale_b": np.ones((3, 3), np.float32)}, r"scale_b .* \(..., 3, 2\) in blocks of 128"),
        ({"scale_b": np.ones((2, 3), np.float32)}, "scale_b has shape"),
        ({"scale_a": np.ones((2, 4, 3), np.float32)}, "scale_a has shape"),
        ({"scale_a": np.ones(3, np.float32)}, "scale_a has shape"),
        ({"scale_a": np.ones((4, 3), np.int32)}, "scale_a is int32; expected float32"),
        ({"scale_a": "large"}, "scale_a is 'large'; expected a number or an array"),
        ({"scale_b": [[1.0], [2.0, 3.0]]}, "scale_b is .*; expected a number or an array"),
        ({"scale_b": np.ones((3, 2), ">f4")}, "scale_b is >f4"),
        ({"scale_a": _narrow((4, 16))}, "scale_a is float8_e4m3fn, which scales fp4; the operand is float32"),
        (FP4 | {"scale_a": _narrow((4, 16))}, "ue4m3 in scale_a and none in scale_b"),
        (
            FP4 | {"scale_a": _narrow((4, 16)), "scale_b": _narrow((8, 8), E8M0)},
            "ue4m3 in scale_a and ue8m0 in scale_b",
        ),
        (FP4 | {"scale_a": _narrow((4, 8)), "scale_b": _narrow((16, 8))}, r"\(..., 4, 16\)"),
        (FP4 | {"scale_a": _narrow((4, 16)), "scale_b": _narrow((8, 16))}, r"\(..., 16, 8\)"),
        (FP4 | {"scale_a": _narrow((4, 16), value=-1.0), "scale_b": _narrow((16, 8))}, "ue4m3 has no sign"),
    ],
)
def test_wrong_scales_are_refused(arguments: dict[str, Any], message: str) -> None:
    call = {"a": np.ones((4, 300), np.float32), "b": np.ones((300, 200), np.float32)} | arguments
    a, b = call.pop("a"), call.pop("b")
    for function in (
        lambda **kw: gemm_reference.gemm(a, b, out_dtype=D.F32, **kw),
        lambda **kw: gemm_reference.absolute_product(a, b, **kw),
    ):
        with pytest.raises(InvalidOperandError, match=message):
            function(**call)


# ----------------------------------------------------------------------------------------------------------------------
# The largest magnitude
# ----------------------------------------------------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(), (2,), (0,)]), scale_d=st.sampled_from([None, 0.25]))
def test_amax_is_taken_after_the_activation_and_before_scale_d(
    seed: int, shape: tuple[int, ...], scale_d: float | None
) -> None:
    rng = np.random.default_rng(seed)
    a, b = _random(rng, (*shape, 3, 8), D.F8E4M3), _random(rng, (8, 4), D.F8E4M3)
    bias = rng.normal(size=4)
    settings_: dict[str, Any] = {"alpha": -3.0, "bias": bias, "activation": "leaky_relu", "scale_b": 2.0}
    amax = np.zeros(1, np.float32)
    d = gemm_reference.gemm(a, b, scale_d=scale_d, amax=amax, out_dtype=D.F8E4M3, **settings_)
    _same(d, gemm_reference.gemm(a, b, scale_d=scale_d, out_dtype=D.F8E4M3, **settings_))
    wide = gemm_reference.gemm(a, b, out_dtype=D.F64, **settings_)
    assert amax[0] == np.float32(np.abs(wide).max(initial=0.0))


def test_amax_of_special_values() -> None:
    a, b = np.array([[1.0], [np.nan], [np.inf]], np.float32), np.ones((1, 2), np.float32)
    amax = np.zeros(1, np.float32)
    gemm_reference.gemm(a, b, amax=amax, out_dtype=D.F16)
    assert np.isnan(amax[0])
    gemm_reference.gemm(a[::2], b, amax=amax, out_dtype=D.F16)
    assert amax[0] == np.inf
    # Saturation happens after it.
    gemm_reference.gemm(a[:1], 1e4 * b, amax=amax, out_dtype=D.F8E4M3)
    assert amax[0] == 1e4
    with pytest.raises(InvalidOperandError, match="int32"):
        gemm_reference.gemm(np.ones((2, 2), np.int8), np.ones((2, 2), np.int8), amax=amax, out_dtype=D.I32)


# ----------------------------------------------------------------------------------------------------------------------
# NaN and infinity in a product
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (5, 3, 1), (1, 3, 5), (4, 4, 4), (65, 33, 70)])
@pytest.mark.parametrize("seed", range(6))
def test_special_values_propagate_through_every_product(shape: tuple[int, int, int], seed: int) -> None:
    # A BLAS that skips zeros would lose 0 * infinity; the oracle forms each product.
    m, k, n = shape
    rng = np.random.default_rng(seed)
    pool = np.array([0.0, 0.0, 1.0, -2.0, 3.0, np.nan, np.inf, -np.inf])
    weights = np.array([4, 4, 40, 40, 40, 1, 1, 1]) / 131
    a, b = rng.choice(pool, (m, k), p=weights), rng.choice(pool, (k, n), p=weights)
    with np.errstate(invalid="ignore"):
        want = (a[:, :, None] * b[None, :, :]).sum(axis=1)
    np.testing.assert_array_equal(gemm_reference.gemm(a, b, out_dtype=D.F64), want)
    got = gemm_reference.gemm(a.astype(np.float16), b.astype(np.float16), out_dtype=D.F16)
    np.testing.assert_array_equal(got, want.astype(np.float16))


def test_c_is_not_read_when_beta_is_zero() -> None:
    a, b, c = np.eye(2), np.ones((2, 2)), np.full((2, 2), np.nan)
    np.testing.assert_array_equal(gemm_reference.gemm(a, b, c, beta=0.0, out_dtype=D.F64), 1.0)
    np.testing.assert_array_equal(gemm_reference.gemm(a, b, c, beta=-0.0, out_dtype=D.F64), 1.0)
    assert np.isnan(gemm_reference.gemm(a, b, c, beta=1e-30, out_dtype=D.F64)).all()


def test_a_and_b_are_not_read_when_alpha_is_zero() -> None:
    bad, c = np.full((2, 2), np.nan), np.ones((2, 2))
    np.testing.assert_array_equal(gemm_reference.gemm(bad, bad, c, alpha=0.0, beta=3.0, out_dtype=D.F64), 3.0)
    np.testing.assert_array_equal(gemm_reference.gemm(bad, bad, alpha=0.0, scale_a=np.nan, out_dtype=D.F64), 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_alpha_and_beta_propagate(bad: float) -> None:
    a, b = np.array([[1.0], [0.0]]), np.array([[2.0]])
    got = gemm_reference.gemm(a, b, alpha=bad, out_dtype=D.F32)
    np.testing.assert_array_equal(got[:, 0], [bad, np.nan])
    got = gemm_reference.gemm(a, b, np.array([[3.0], [0.0]]), beta=bad, out_dtype=D.F32)
    np.testing.assert_array_equal(got[:, 0], [bad, np.nan])


def test_without_products_only_c_and_bias_are_left() -> None:
    a, b, c = np.zeros((2, 0)), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3) - 3
    got = gemm_reference.gemm(a, b, c, alpha=np.nan, beta=2.0, bias=np.ones(3), activation="relu", out_dtype=D.F16)
    np.testing.assert_array_equal(got, np.maximum(2 * c + 1, 0).astype(np.float16))
    np.testing.assert_array_equal(gemm_reference.gemm(a, b, out_dtype=D.BF16).astype(np.float32), 0.0)


def test_overflow_goes_to_infinity_or_saturates() -> None:
    a, b = np.full((1, 1), 3e38, dtype=np.float32), np.full((1, 1), -2.0, dtype=np.float32)
    for out_dtype, want in [(D.F32, -np.inf), (D.BF16, -np.inf), (D.F8E5M2, -57344.0), (D.I32, -(2.0**31))]:
        assert float(gemm_reference.gemm(a, b, out_dtype=out_dtype)[0, 0]) == want


# ----------------------------------------------------------------------------------------------------------------------
# Products of integers
# ----------------------------------------------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    alpha=st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3),
    beta=st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3),
    relu=st.booleans(),
)
def test_int8_to_int32_wraps_like_int32_arithmetic(seed: int, alpha: int, beta: int, relu: bool) -> None:
    rng = np.random.default_rng(seed)
    a = rng.integers(-128, 128, (3, 6), dtype=np.int8)
    b = rng.integers(-128, 128, (6, 2), dtype=np.int8)
    c = rng.integers(-(2**31), 2**31, (3, 2), dtype=np.int32)
    bias = rng.integers(-(2**31), 2**31, 2, dtype=np.int32)
    got = gemm_reference.gemm(
        a, b, c, alpha=alpha, beta=beta, bias=bias, activation="relu" if relu else None, out_dtype=D.I32
    )
    assert got.dtype == np.int32
    for i in range(3):
        for j in range(2):
            exact = alpha * sum(int(x) * int(y) for x, y in zip(a[i], b[:, j], strict=True))
            exact += beta * int(c[i, j]) + int(bias[j])
            wrapped = (exact + 2**31) % 2**32 - 2**31
            assert int(got[i, j]) == (max(wrapped, 0) if relu else wrapped)


def test_int8_sums_are_exact_and_wrap_when_long() -> None:
    k = 2**17 + 3
    a = np.full((1, k), -128, dtype=np.int8)
    got = gemm_reference.gemm(a, a.T, out_dtype=D.I32)
    assert int(got[0, 0]) == (k * 2**14 + 2**31) % 2**32 - 2**31


def test_int8_to_other_types() -> None:
    a = np.array([[100, 27]], dtype=np.int8)
    b = np.array([[100], [-1]], dtype=np.int8)
    for out_dtype, want in [(D.F32, 997.3), (D.I8, 127.0), (D.BF16, 996.0)]:
        got = gemm_reference.gemm(a, b, alpha=0.1, out_dtype=out_dtype)
        assert float(got[0, 0]) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.5}, "alpha is 0.5"),
        ({"alpha": np.nan}, "alpha is nan"),
        ({"beta": 1.5, "c": np.zeros((2, 2), np.int32)}, "beta is 1.5"),
        ({"beta": 1.0, "c": np.zeros((2, 2), np.float32)}, "c is float32"),
        ({"bias": np.zeros(2, np.float32)}, "bias is float32"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"scale_a": 2.0}, "scales"),
        ({"scale_d": 2.0}, "scales"),
    ],
)
def test_int8_to_int32_refuses_what_is_not_whole(arguments: dict[str, Any], message: str) -> None:
    x = np.ones((2, 2), dtype=np.int8)
    with pytest.raises(InvalidOperandError, match=message):
        gemm_reference.gemm(x, x, out_dtype=D.I32, **arguments)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------

A, B = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": np.ones(3, np.float32)}, r"a has shape \(3,\)"),
        ({"b": np.ones((), np.float32)}, r"b has shape \(\)"),
        ({"b": np.ones((5, 4), np.float32)}, "K disagrees: .* has 3 columns, .* has 5 rows"),
        ({"a": np.ones((2, 2, 3), np.float32), "b": np.ones((3, 3, 4), np.float32)}, "do not broadcast"),
        ({"a": np.ones((2, 3), np.complex64)}, "complex64"),
        ({"a": np.ones((2, 3), ">f4")}, ">f4"),
        ({"a": np.ones((2, 3), np.int32), "b": np.ones((3, 4), np.int32)}, "a is int32"),
        ({"a": np.ones((2, 3), np.int8)}, "both must have one dtype"),
        ({"beta": 1.0}, "c is needed"),
        ({"c": np.ones((2, 1), np.float32), "beta": 1.0}, r"c has shape \(2, 1\); expected \(..., 2, 4\)"),
        ({"c": np.ones((5, 2, 4), np.float32), "beta": 1.0}, "c has shape"),
        ({"c": np.ones((2, 4), np.int64), "beta": 1.0}, "int64"),
        ({"bias": np.ones(2, np.float32)}, r"bias has shape \(2,\); expected \(4,\)"),
        ({"bias": np.ones((1, 4), np.float32)}, "bias has shape"),
        ({"bias": np.ones(4, np.uint8)}, "bias is uint8"),
        ({"activation": "swish"}, "expected None or one of identity, relu"),
        ({"scale_a": np.ones((2,))}, r"scale_a has shape \(2,\)"),
        ({"scale_a": np.ones((1, 4))}, "scale_a has shape"),
        ({"scale_b": np.ones((2, 1))}, "scale_b has shape"),
        ({"scale_b": np.ones((3, 1, 4))}, "scale_b has shape"),
        ({"precision": "fast"}, "valid: ieee, tf32, 3xtf32"),
        ({"precision": "tf32", "a": np.ones((2, 3), np.float16), "b": np.ones((3, 4), np.float16)}, "for float32"),
        ({"precision": "3xtf32", "a": np.ones((2, 3)), "b": np.ones((3, 4))}, "for float32"),
    ],
)
def test_gemm_refuses(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"a": A, "b": B, **arguments}
    with pytest.raises(InvalidOperandError, match=message):
        ac.gemm(call.pop("a"), call.pop("b"), backend="reference", **call)


# ----------------------------------------------------------------------------------------------------------------------
# Comparison
# ----------------------------------------------------------------------------------------------------------------------


def test_absolute_product() -> None:
    rng = np.random.default_rng(5)
    a, b, c, bias = (rng.normal(size=s) for s in [(2, 3, 5), (5, 4), (3, 4), (4,)])
    rows = rng.normal(size=(3, 1))
    got = gemm_reference.absolute_product(
        a, b, c, alpha=-2.0, beta=-0.5, bias=bias, scale_a=rows, scale_b=-3.0, scale_d=-7.0
    )
    want = 7 * (6 * np.abs(rows) * (np.abs(a) @ np.abs(b)) + 0.5 * np.abs(c) + np.abs(bias))
    np.testing.assert_allclose(got, want, rtol=1e-13)
    c[:] = np.nan
    assert np.isfinite(gemm_reference.absolute_product(a, b, c)).all()
    np.testing.assert_array_equal(gemm_reference.absolute_product(np.zeros((2, 0)), np.zeros((0, 3))), np.zeros((2, 3)))


def _float32_kernel(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], accumulator: Any) -> np.ndarray[Any, Any]:
    """One product after the other, each sum rounded to the accumulator's type."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype=accumulator)
    for k in range(a.shape[1]):
        product = a[:, k : k + 1].astype(np.float64) * b[k : k + 1].astype(np.float64)
        total = (total.astype(np.float64) + product).astype(accumulator)
    return total


KERNELS = [
    (D.F16, D.F16, "default"), (D.BF16, D.F32, "default"), (D.BF16, D.BF16, "default"), (D.F32, D.F32, "ieee"),
    (D.F8E4M3, D.BF16, "default"), (D.F8E5M2, D.F8E4M3, "default"), (D.F32, D.F32, "tf32"),
]  # fmt: skip


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [1, 17, 512])
@pytest.mark.parametrize(("dtype", "out_dtype", "mode"), KERNELS)
def test_a_right_kernel_is_within_tolerance(dtype: D, out_dtype: D, mode: str, k: int, positive: bool) -> None:
    rng = np.random.default_rng(k)
    a, b = _random(rng, (24, k), dtype), _random(rng, (k, 24), dtype)
    if positive:
        a, b = abs(a), abs(b)
    ka, kb = (numerics.round_to_tf32(a), numerics.round_to_tf32(b)) if mode == "tf32" else (a, b)
    d = numerics.saturating_cast(_float32_kernel(ka, kb, np.float32), out_dtype)
    scale = gemm_reference.absolute_product(a, b)
    limits = reference.tolerance(dtype, out_dtype, k, mode)
    # Right by either oracle: the rounded reference, or float64 on operands as they came (large cases on a GPU).
    rounded = gemm_reference.gemm(a, b, out_dtype=out_dtype, math=mode)
    assert reference.within_tolerance(d, rounded, scale, limits, out_dtype).all()
    if out_dtype is not D.F8E4M3:
        unrounded = numerics.to_float64(a) @ numerics.to_float64(b)
        assert reference.within_tolerance(d, unrounded, scale, limits, out_dtype).all()


def test_wrong_kernels_are_not() -> None:
    rng = np.random.default_rng(0)
    k = 512
    a, b = _random(rng, (64, k), D.F16), _random(rng, (k, 64), D.F16)
    scale, ref = gemm_reference.absolute_product(a, b), gemm_reference.gemm(a, b, out_dtype=D.F32)
    limits = reference.tolerance(D.F16, D.F32, k)
    narrow = _float32_kernel(a, b, np.float16).astype(np.float32)
    assert not reference.within_tolerance(narrow, ref, scale, limits, D.F32).all()
    short = _float32_kernel(a[:, :-1], b[:-1], np.float32)
    assert reference.within_tolerance(short, ref, scale, limits, D.F32).mean() < 0.1

    x, y = _random(rng, (64, k), D.F32), _random(rng, (k, 64), D.F32)
    scale, ref = gemm_reference.absolute_product(x, y), gemm_reference.gemm(x, y, out_dtype=D.F32)
    tf32 = gemm_reference.gemm(x, y, out_dtype=D.F32, math="tf32")
    for mode in ("ieee", "3xtf32"):
        limits = reference.tolerance(D.F32, D.F32, k, mode)
        assert not reference.within_tolerance(tf32, ref, scale, limits, D.F32).all()
    assert reference.within_tolerance(tf32, ref, scale, reference.tolerance(D.F32, D.F32, k, "tf32"), D.F32).all()


def test_3xtf32_split_is_within_its_operand_error() -> None:
    rng = np.random.default_rng(1)
    x, y = _random(rng, (40, 64), D.F32), _random(rng, (64, 40), D.F32)

    def split(v: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        big = (v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return big.astype(np.float64), numerics.round_to_tf32(v - big).astype(np.float64)

    (xb, xs), (yb, ys) = split(x), split(y)
    error = np.abs(xb @ yb + xb @ ys + xs @ yb - x.astype(np.float64) @ y.astype(np.float64))
    assert (error <= 2.0**-19 * gemm_reference.absolute_product(x, y)).all()


def test_tolerance_numbers() -> None:
    assert reference.tolerance(D.I8, D.I32, 4096) == (0.0, 0.0)
    assert reference.tolerance(D.I8, D.F32, 4096).atol_factor == 2.0**-21
    assert reference.tolerance(D.F64, D.F64, 96) == pytest.approx((2.0**-52, 2.0**-46), rel=1e-9)
    assert reference.tolerance(D.F16, D.F32, 96) == pytest.approx((2.0**-23, 2.0**-18), rel=1e-6)
    assert reference.tolerance(D.BF16, D.BF16, 96).rtol == pytest.approx(2.0**-7, rel=0.01)
    tf32 = reference.tolerance(D.F32, D.F32, 96, "tf32")
    assert tf32 == reference.tolerance(D.TF32, D.F32, 96)
    assert tf32.atol_factor > 2.0**-10
    exact = reference.tolerance(D.F32, D.F32, 96, "tf32", exact_operands=True)
    assert exact == reference.tolerance(D.F32, D.F32, 96, "ieee")
    split = reference.tolerance(D.F32, D.F32, 96, "3xtf32")
    assert exact.atol_factor < split.atol_factor < tf32.atol_factor
    slow, fast = (reference.tolerance(D.F8E4M3, D.BF16, 4096, fast_accum=f).atol_factor for f in (False, True))
    assert 2.0**-8 < slow < 2.0**-7 < fast
    for bad in [(D.F16, "tf32"), (D.F64, "3xtf32"), (D.F32, "fast")]:
        with pytest.raises(InvalidOperandError):
            reference.tolerance(bad[0], D.F32, 8, bad[1])


def test_tolerance_with_block_scales() -> None:
    plain = reference.tolerance(D.F8E4M3, D.BF16, 4096)
    blocks = reference.tolerance(D.F8E4M3, D.BF16, 4096, scale_block=128)
    assert blocks.atol_factor - plain.atol_factor == pytest.approx((4096 / 128 + 4) * 2.0**-24)
    # Each block is a sum of its own, so that fast accumulation means nothing.
    assert reference.tolerance(D.F8E4M3, D.BF16, 4096, "fast", scale_block=128) == blocks
    fast = reference.tolerance(D.F8E4M3, D.BF16, 4096, "fast")
    assert fast == reference.tolerance(D.F8E4M3, D.BF16, 4096, fast_accum=True) > blocks
    fp4 = reference.tolerance(D.F4E2M1, D.F32, 256, scale_block=16)
    assert fp4.atol_factor == pytest.approx((128 + 16 + 16 + 4) * 2.0**-24)


@pytest.mark.parametrize("k", [64, 200, 512])
def test_a_right_blockwise_kernel_is_within_tolerance_and_one_with_wrong_scales_is_not(k: int) -> None:
    rng = np.random.default_rng(k)
    qa = quantization.quantize_blockwise(rng.normal(size=(16, k)), D.F8E4M3)
    qb = quantization.quantize_blockwise(
        rng.normal(size=(k, 24)) * np.exp2(rng.integers(-9, 9, (k, 1))), D.F8E4M3, block=(128, 128)
    )
    total = np.zeros((16, 24), np.float32)
    for block in range(qa.scale.shape[1]):
        part = slice(block * 128, block * 128 + 128)
        partial = _float32_kernel(qa.values[:, part], qb.values[part], np.float32)
        total += partial * (qa.scale[:, block, None] * qb.scale[block, 0])
    scales = {"scale_a": qa.scale, "scale_b": qb.scale}
    want = gemm_reference.gemm(qa.values, qb.values, out_dtype=D.F32, **scales)
    magnitude = gemm_reference.absolute_product(qa.values, qb.values, **scales)
    limits = reference.tolerance(D.F8E4M3, D.F32, k, scale_block=128)
    assert reference.within_tolerance(total, want, magnitude, limits, D.F32).all()
    wrong = gemm_reference.gemm(
        qa.values, qb.values, scale_a=np.roll(qa.scale, 1, axis=0), scale_b=qb.scale, out_dtype=D.F32
    )
    assert reference.within_tolerance(wrong, want, magnitude, limits, D.F32).mean() < 0.5


def test_a_right_nvfp4_kernel_is_within_tolerance() -> None:
    rng = np.random.default_rng(11)
    a, b = (
        quantization.quantize_nvfp4(rng.normal(size=(16, 256))),
        quantization.quantize_nvfp4(rng.normal(size=(256, 24)), axis=-2),
    )
    total = np.zeros((16, 24), np.float32)
    for block in range(16):
        part = slice(block * 16, block * 16 + 16)
        partial = _float32_kernel(a.values[:, part], b.values[part], np.float32)
        total += partial * (a.scale[:, block, None].astype(np.float32) * b.scale[block].astype(np.float32))
    scales = {"scale_a": a.scale, "scale_b": b.scale}
    want = gemm_reference.gemm(a.values, b.values, out_dtype=D.BF16, **scales)
    got = numerics.saturating_cast(total, D.BF16)
    limits = reference.tolerance(D.F4E2M1, D.BF16, 256, scale_block=16)
    magnitude = gemm_reference.absolute_product(a.values, b.values, **scales)
    assert reference.within_tolerance(got, want, magnitude, limits, D.BF16).all()


def test_within_tolerance_special_values() -> None:
    limits, scale = reference.tolerance(D.F16, D.F16, 8), np.zeros(7)
    ref = np.array([np.nan, np.inf, np.inf, 1.0, np.nan, 0.0, 0.0])
    d = np.array([np.nan, np.inf, -np.inf, np.inf, 1.0, 2.0**-24, 2.0**-23], dtype=np.float16)
    got = reference.within_tolerance(d, ref, scale, limits, D.F16)
    assert got.tolist() == [True, True, False, False, False, True, False]
    one_off = np.array([3], dtype=np.int32), np.array([2], dtype=np.int32), np.array([9.0])
    assert not reference.within_tolerance(*one_off, reference.tolerance(D.I8, D.I32, 8), D.I32).any()
    assert reference.within_tolerance(*one_off, reference.tolerance(D.I8, D.I8, 8), D.I8).all()
