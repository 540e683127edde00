"""Quantization, packing and the layouts of scales."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atomr_cutlass.arrays import numerics
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.dtypes import ScaleType
from atomr_cutlass.ops.quantize import reference as quantization

NARROW = [D.F8E4M3, D.F8E5M2, D.F4E2M1]
quick = settings(max_examples=150, deadline=None)


@pytest.mark.parametrize("dtype", [*NARROW, D.I8])
@pytest.mark.parametrize("axis", [None, -1, (0, 1)])
def test_quantize_error_is_within_half_a_step(dtype: D, axis: int | tuple[int, ...] | None) -> None:
    x = np.random.default_rng(3).normal(size=(7, 33)).astype(np.float32) * 1e-4
    q = quantization.quantize(x, dtype, axis=axis)
    assert q.values.dtype == numerics.numpy_dtype(dtype)
    assert q.scale.dtype == np.float32
    assert q.scale.shape == {None: (), -1: (7, 1), (0, 1): (1, 1)}[axis]
    back = quantization.dequantize(q.values, q.scale)
    amax = np.abs(x).max(axis=axis, keepdims=axis is not None)
    np.testing.assert_allclose(np.abs(back).max(axis=axis, keepdims=axis is not None), amax, rtol=1e-6)
    step = numerics.smallest_step(dtype) * q.scale
    assert (np.abs(back - x) <= 1.0001 * (numerics.unit_roundoff(dtype) * np.abs(x) + step / 2)).all()


def test_quantize_edges() -> None:
    zero = quantization.quantize(np.zeros((2, 3)), D.F8E4M3, axis=-1)
    np.testing.assert_array_equal(zero.scale, 1.0)
    assert quantization.quantize(np.zeros((0, 3)), D.F8E4M3).values.shape == (0, 3)
    mixed = quantization.quantize(np.array([np.inf, np.nan, 448.0, -224.0]), D.F8E4M3)
    assert float(mixed.scale) == 1.0
    np.testing.assert_array_equal(mixed.values.astype(np.float64), [448.0, np.nan, 448.0, -224.0])
    tiny = quantization.quantize(np.array([1e-44], dtype=np.float32), D.F8E5M2)
    assert float(tiny.scale) > 0.0
    assert np.isfinite(tiny.values.astype(np.float64)).all()
    huge = quantization.quantize(np.array([1e300]), D.F4E2M1)
    assert np.isfinite(huge.scale)
    with pytest.raises(InvalidOperandError, match="f16"):
        quantization.quantize(np.zeros(3), D.F16)


@quick
@given(st.lists(st.integers(0, 15), min_size=2, max_size=12).filter(lambda v: len(v) % 2 == 0))
def test_pack_fp4_puts_the_even_element_low(nibbles: list[int]) -> None:
    values = np.array(nibbles, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    packed = quantization.pack_fp4(values)
    assert packed.tolist() == [low | (high << 4) for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)]
    np.testing.assert_array_equal(quantization.unpack_fp4(packed).view(np.uint8), nibbles)


def test_pack_fp4_shapes_and_errors() -> None:
    values = numerics.saturating_cast(np.arange(24.0).reshape(2, 3, 4), D.F4E2M1)
    packed = quantization.pack_fp4(values)
    assert packed.shape == (2, 3, 2)
    np.testing.assert_array_equal(quantization.unpack_fp4(packed).astype(np.float32), values.astype(np.float32))
    transposed = values.T[:, :2]
    assert quantization.pack_fp4(transposed[..., :]).shape == (4, 2, 1)
    with pytest.raises(InvalidOperandError, match="even"):
        quantization.pack_fp4(values[..., :3])
    with pytest.raises(InvalidOperandError, match="uint8"):
        quantization.pack_fp4(np.zeros(4, dtype=np.uint8))
    with pytest.raises(InvalidOperandError, match="int8"):
        quantization.unpack_fp4(np.zeros(4, dtype=np.int8))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# Bit for bit against ml_dtypes
# ----------------------------------------------------------------------------------------------------------------------

FINITE32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("dtype", NARROW)
@quick
@given(x=st.lists(FINITE32, min_size=1, max_size=20), power=st.integers(-20, 20))
def test_quantize_is_ml_dtypes_after_clamping(dtype: D, x: list[float], power: int) -> None:
    # With a power of two as largest magnitude over the format's, the scale is one too and division is exact.
    largest = np.float32(np.ldexp(numerics.finite_max(dtype), power))
    values = np.array([*np.clip(x, -largest, largest), largest], dtype=np.float32)
    q = quantization.quantize(values, dtype)
    assert float(q.scale) == 2.0**power
    want = (values / q.scale).astype(numerics.numpy_dtype(dtype))
    np.testing.assert_array_equal(q.values.view(np.uint8), want.view(np.uint8))


@quick
@given(st.lists(st.floats(0.0, width=32, allow_infinity=False) | st.just(math.nan), min_size=1, max_size=20))
@example([1.5, 3.0, 0.75, 2.0**-127, 2.0**-126 * 0.75, 1.4999999])
@example([float(np.finfo(np.float32).max), 464.0, 2.0**-9, 2.0**-10, 2.0**-11, 0.0])
@example([8.674578395377847e-39])
def test_cast_scale_is_ml_dtypes_after_clamping(x: list[float]) -> None:
    values = np.array(x, dtype=np.float32)
    for kind, low, high in ((ScaleType.UE4M3, 0.0, 448.0), (ScaleType.UE8M0, 2.0**-127, 2.0**127)):
        got = numerics.cast_scale(values, kind)
        clamped = np.clip(values, np.float32(low), np.float32(high))
        want = clamped.astype(numerics.numpy_dtype(kind)).view(np.uint8)
        if kind is ScaleType.UE8M0:
            # ml_dtypes rounds all float32 between 2^-127 and 2^-126 up, also those nearer to the former.
            below = clamped < 2.0**-126
            want[below] = np.ldexp(clamped[below], 1).astype(numerics.numpy_dtype(kind)).view(np.uint8) - 1
        np.testing.assert_array_equal(got.view(np.uint8), want)
    np.testing.assert_array_equal(numerics.cast_scale(values, ScaleType.F32), values)


def test_cast_scale_special_values() -> None:
    x = [math.inf, -1.0, -0.0, math.nan, 1e300, 5e-324]
    assert numerics.cast_scale(x, ScaleType.UE4M3).view(np.uint8).tolist() == [0x7E, 0, 0, 0x7F, 0x7E, 0]
    assert numerics.cast_scale(x, ScaleType.UE8M0).view(np.uint8).tolist() == [254, 0, 0, 255, 254, 0]
    largest = float(np.finfo(np.float32).max)
    np.testing.assert_array_equal(
        numerics.cast_scale(x, ScaleType.F32), np.array([largest, -1.0, 0.0, np.nan, largest, 0.0], np.float32)
    )
    # float32 cannot hold the last term: rounding there first would make a tie, and then go up.
    assert numerics.cast_scale(1.5 - 2.0**-40, ScaleType.UE8M0).view(np.uint8) == 127


# ----------------------------------------------------------------------------------------------------------------------
# Blocks
# ----------------------------------------------------------------------------------------------------------------------


@quick
@given(
    shape=st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 11)),
    block=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    dtype=st.sampled_from([*NARROW, D.I8]),
)
def test_blocks_are_quantized_one_by_one(shape: tuple[int, int, int], block: tuple[int, int], dtype: D) -> None:
    x = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
    q = quantization.quantize_blockwise(x, dtype, block=block)
    rows, columns = range(0, shape[1], block[0]), range(0, shape[2], block[1])
    assert q.scale.shape == (shape[0], len(rows), len(columns))
    assert q.scale.dtype == np.float32
    back = quantization.dequantize_blockwise(q.values, q.scale, block=block)
    for n, (i, r), (j, c) in itertools.product(range(shape[0]), enumerate(rows), enumerate(columns)):
        part = (n, slice(r, r + block[0]), slice(c, c + block[1]))
        alone = quantization.quantize(x[part], dtype)
        assert q.scale[n, i, j] == alone.scale
        np.testing.assert_array_equal(q.values[part].astype(np.float32), alone.values.astype(np.float32))
        np.testing.assert_array_equal(back[part], quantization.dequantize(alone.values, alone.scale))


def test_blocks_as_fp8_gemm_wants_them() -> None:
    x = np.ones((300, 200))
    assert quantization.quantize_blockwise(x, D.F8E4M3).scale.shape == (300, 2)
    assert quantization.quantize_blockwise(x, D.F8E4M3, block=(128, 128)).scale.shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantization.quantize_blockwise(np.ones((2, 2)), D.BF16), "bf16"),
        (lambda: quantization.quantize_blockwise(np.ones(3), D.F8E4M3), r"\(3,\)"),
        (lambda: quantization.quantize_blockwise(np.ones((3, 3)), D.F8E4M3, block=(0, 128)), r"block is \(0, 128\)"),
        (lambda: quantization.dequantize_blockwise(np.ones((3, 3)), np.ones((3, 2))), r"expected \(3, 1\)"),
        (lambda: quantization.quantize_nvfp4(np.ones((3, 17))), "no multiple of 16"),
        (lambda: quantization.quantize_mxfp4(np.ones((3, 16))), "no multiple of 32"),
        (lambda: quantization.quantize_mxfp4(np.ones(()), axis=0), "axis is 0"),
        (lambda: quantization.quantize_nvfp4(np.ones((3, 16)), global_scale=0.0), "global_scale is 0.0"),
        (lambda: quantization.quantize_nvfp4(np.ones((3, 16)), global_scale=1e300), "global_scale is 1e"),
        (lambda: quantization.swizzle_scales(np.ones(4)), "expected"),
        (lambda: quantization.unswizzle_scales(np.ones(511), 128, 4), "512"),
    ],
)
def test_bad_quantization_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidOperandError, match=message):
        call()


# ----------------------------------------------------------------------------------------------------------------------
# fp4
# ----------------------------------------------------------------------------------------------------------------------

MODERATE = st.floats(-(2.0**40), 2.0**40, width=32) | st.sampled_from([0.0, 0.25, 0.75, 1.25, 2.5, 5.0, 6.0, 448.0])


@quick
@given(x=st.lists(MODERATE, min_size=16, max_size=16), power=st.integers(-60, 20))
def test_nvfp4_is_what_float32_arithmetic_and_ml_dtypes_give(x: list[float], power: int) -> None:
    values = np.ldexp(np.array(x, dtype=np.float32), power)
    q = quantization.quantize_nvfp4(values)
    amax = np.abs(values).max()
    scale = np.float32(1.0) if amax == 0 else np.clip(amax / np.float32(6), np.float32(2.0**-9), np.float32(448))
    narrow = scale.astype(ml_dtypes.float8_e4m3fn)
    assert q.scale.shape == (1,)
    assert q.scale.view(np.uint8)[0] == narrow.view(np.uint8)
    quotient = np.clip(values / narrow.astype(np.float32), np.float32(-6), np.float32(6))
    want = quotient.astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(q.values.view(np.uint8), want.view(np.uint8))


def test_nvfp4_in_float32_at_every_tie() -> None:
    # Where float32 division could round twice: next to the ties of e2m1 for every scale, and those of e4m3 times 6.
    scales = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    points = (scales[:, None] * ties).ravel()
    for x in (points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))):
        wide = x.astype(np.float64).reshape(scales.size, -1) / scales[:, None].astype(np.float64)
        want = numerics.saturating_cast(wide, D.F4E2M1).view(np.uint8)
        got = (x.reshape(wide.shape) / scales[:, None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        np.testing.assert_array_equal(got, want)
    midpoints = 3 * (scales[1:] + scales[:-1])
    for x in (midpoints, np.nextafter(midpoints, np.float32(np.inf)), np.nextafter(midpoints, np.float32(0))):
        want = numerics.cast_scale(x.astype(np.float64) / 6, ScaleType.UE4M3).view(np.uint8)
        got = (x / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(got, want)


def test_nvfp4_edges() -> None:
    zero = quantization.quantize_nvfp4(np.zeros((2, 32)))
    np.testing.assert_array_equal(zero.scale.astype(np.float32), 1.0)
    assert zero.global_scale == 1.0
    x = np.full((1, 16), 1e-6)
    # Too small for e4m3 without a second level, and as good as ever with one.
    assert quantization.quantize_nvfp4(x).scale.astype(np.float32) == 2.0**-9
    second = quantization.nvfp4_global_scale(x)
    q = quantization.quantize_nvfp4(x, global_scale=second)
    assert q.global_scale == second == np.float32(second)
    np.testing.assert_allclose(quantization.dequantize_fp4(q), x, rtol=1e-6)
    assert quantization.nvfp4_global_scale(np.zeros(3)) == 1.0
    special = quantization.quantize_nvfp4(np.array([np.inf, -np.inf, np.nan, *[3.0] * 13]))
    assert special.scale.astype(np.float32) == 0.5
    assert special.values.astype(np.float32)[:4].tolist() == [6.0, -6.0, 6.0, 6.0]
    huge = quantization.quantize_nvfp4(np.full(16, 1e300), global_scale=1e-38)
    assert (huge.scale.astype(np.float32), huge.values.astype(np.float32)[0]) == (448.0, 6.0)


@quick
@given(x=st.lists(MODERATE, min_size=32, max_size=32), power=st.integers(-150, 80))
@example(x=[1.0] * 32, power=0)
@example(x=[7.9] * 32, power=0)
def test_mxfp4_scale_is_the_largest_power_of_two_that_fits(x: list[float], power: int) -> None:
    values = np.ldexp(np.array(x, dtype=np.float32).astype(np.float64), power)
    q = quantization.quantize_mxfp4(values)
    amax = np.abs(values).max()
    scale = float(q.scale.astype(np.float64)[0])
    if amax == 0.0:
        assert scale == 1.0
    elif 2.0**-127 < scale < 2.0**127:
        assert 4.0 * scale <= amax < 8.0 * scale
    want = np.clip(values / scale, -6.0, 6.0).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(q.values.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    ("quantized", "vector"), [(quantization.quantize_nvfp4, 16), (quantization.quantize_mxfp4, 32)]
)
def test_fp4_along_another_axis(quantized: Any, vector: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, 64, 5)).astype(np.float32)
    q = quantized(x, axis=-2)
    assert q.scale.shape == (3, 64 // vector, 5)
    last = quantized(x.swapaxes(1, 2))
    np.testing.assert_array_equal(q.values.astype(np.float32), last.values.astype(np.float32).swapaxes(1, 2))
    np.testing.assert_array_equal(q.scale.astype(np.float32), last.scale.astype(np.float32).swapaxes(1, 2))
    back = quantization.dequantize_fp4(q, axis=-2)
    np.testing.assert_array_equal(back, quantization.dequantize_fp4(last).swapaxes(1, 2))
    # e2m1 is off by a sixth at most near its largest value, which mxfp4's scale may exceed by a third.
    assert np.abs(back - x).max() <= np.abs(x).max() * (1 / 6 if vector == 16 else 1 / 4)
    with pytest.raises(InvalidOperandError, match="scale has shape"):
        quantization.dequantize_fp4(q._replace(scale=q.scale[:, :-1]), axis=-2)
    with pytest.raises(InvalidOperandError, match="scale is float32"):
        quantization.dequantize_fp4(q._replace(scale=q.scale.astype(np.float32)), axis=-2)


# ----------------------------------------------------------------------------------------------------------------------
# The swizzled layout
# ----------------------------------------------------------------------------------------------------------------------


def _index(coordinate: int, shape: Any, stride: Any) -> int:
    """A CuTe layout's offset: a coordinate is split over a mode's shape, the leftmost part varying fastest."""
    if isinstance(shape, int):
        return coordinate * stride
    total = 0
    for extent, step in zip(shape, stride, strict=True):
        total += _index(coordinate % math.prod(_flat(extent)), extent, step)
        coordinate //= math.prod(_flat(extent))
    return total


def _flat(shape: Any) -> list[int]:
    return [shape] if isinstance(shape, int) else [extent for part in shape for extent in _flat(part)]


def _cutlass_offset(row: int, k: int, columns: int, vector: int) -> int:
    """The scale of element (row, k) as CUTLASS's layout has it: an atom, repeated with the tiles of K side by side."""
    m_shape, m_stride = (32, 4), (16, 4)
    k_shape, k_stride = (vector, 4), (0, 1)
    tile_row, tile_k = row // 128, k // (4 * vector)
    tiles_k = -(-columns // 4)
    atom = _index(row % 128, m_shape, m_stride) + _index(k % (4 * vector), k_shape, k_stride)
    return atom + 512 * (tile_k + tiles_k * tile_row)


@pytest.mark.parametrize("vector", [16, 32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 9), (300, 3), (64, 16)])
def test_swizzled_scales_lie_where_cutlass_looks_for_them(rows: int, columns: int, vector: int) -> None:
    plain = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns) + 1
    flat = quantization.swizzle_scales(plain)
    assert flat.shape == (quantization.swizzled_size(rows, columns),)
    assert flat.size == -(-rows // 128) * -(-columns // 4) * 512
    seen = np.zeros(flat.size, bool)
    for row, column in itertools.product(range(rows), range(columns)):
        for k in (column * vector, column * vector + vector - 1):
            offset = _cutlass_offset(row, k, columns, vector)
            assert flat[offset] == plain[row, column]
            assert offset == (
                (row // 128 * -(-columns // 4) + column // 4) * 512
                + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
            )  # fmt: skip
            seen[offset] = True
    assert (flat[~seen] == 0).all()


@quick
@given(batch=st.sampled_from([(), (1,), (2, 3), (0,)]), rows=st.integers(0, 300), columns=st.integers(0, 11))
def test_swizzling_can_be_undone(batch: tuple[int, ...], rows: int, columns: int) -> None:
    bits = np.random.default_rng(rows).integers(0, 255, (*batch, rows, columns), dtype=np.uint8)
    plain = bits.view(ml_dtypes.float8_e8m0fnu)
    flat = quantization.swizzle_scales(plain)
    assert flat.dtype == plain.dtype
    assert flat.shape == (*batch, quantization.swizzled_size(rows, columns))
    back = quantization.unswizzle_scales(flat, rows, columns)
    np.testing.assert_array_equal(back.view(np.uint8), bits)
    for index in np.ndindex(*batch):
        alone = quantization.swizzle_scales(plain[index])
        np.testing.assert_array_equal(flat[index].view(np.uint8), alone.view(np.uint8))
