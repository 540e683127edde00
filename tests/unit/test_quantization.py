"""Quantization, packing and the layouts of scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomr_cutlass import numerics, quantization
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D

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
