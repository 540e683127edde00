"""Conversions against exact rational arithmetic, and bit for bit against ml_dtypes where it rounds once."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
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

NARROW = [D.F8E4M3, D.F8E5M2, D.F4E2M1]
ENUMERABLE = [*NARROW, D.BF16, D.F16]
quick = settings(max_examples=150, deadline=None)


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize])


def _grid(dtype: D) -> np.ndarray[Any, Any]:
    """Every finite value of dtype from zero upwards, in the order of its bit patterns."""
    np_dtype = numerics.numpy_dtype(dtype)
    patterns = np.arange(2 ** (dtype.bits - 1), dtype=np.uint16 if dtype.bits == 16 else np.uint8)
    values = numerics.to_float64(patterns.view(np_dtype))
    return values[np.isfinite(values)]


GRIDS = {dtype: _grid(dtype) for dtype in ENUMERABLE}


def _nearest_even(x: float, dtype: D) -> float:
    """The oracle: nearest in exact arithmetic; the even pattern on a tie; infinity past the last half step."""
    grid = GRIDS[dtype]
    magnitude = abs(x)
    if magnitude == np.inf:
        result = np.inf
    elif magnitude >= grid[-1]:
        half_step = (Fraction(float(grid[-1])) - Fraction(float(grid[-2]))) / 2
        result = np.inf if Fraction(magnitude) >= Fraction(float(grid[-1])) + half_step else float(grid[-1])
    else:
        low = int(np.searchsorted(grid, magnitude, side="right")) - 1
        down = Fraction(magnitude) - Fraction(float(grid[low]))
        up = Fraction(float(grid[low + 1])) - Fraction(magnitude)
        result = float(grid[low if down < up or (down == up and low % 2 == 0) else low + 1])
    if dtype in NARROW:
        result = min(result, float(grid[-1]))
    return float(np.copysign(result, x))


def _interesting(dtype: D) -> st.SearchStrategy[float]:
    """Floats of every size, and the points where rounding is decided: grid points and midpoints, nudged or not."""
    grid = GRIDS[dtype]

    def near(index: int, midpoint: bool, nudge: int, sign: float) -> float:
        value = float(grid[index])
        if midpoint:
            value = (value + float(grid[min(index + 1, len(grid) - 1)])) / 2
        if nudge:
            value = float(np.nextafter(value, nudge * np.inf))
        return sign * value

    points = st.builds(
        near, st.integers(0, len(grid) - 1), st.booleans(), st.sampled_from([-1, 0, 1]), st.sampled_from([1.0, -1.0])
    )
    return points | st.floats(allow_nan=False)


@pytest.mark.parametrize("dtype", list(D))
def test_numpy_dtype_round_trips(dtype: D) -> None:
    np_dtype = numerics.numpy_dtype(dtype)
    assert np_dtype.name == dtype.numpy_name
    assert numerics.from_numpy_dtype(np_dtype) is dtype.storage


@pytest.mark.parametrize("kind", list(ScaleType))
def test_scale_types_round_trip(kind: ScaleType) -> None:
    np_dtype = numerics.numpy_dtype(kind)
    assert np_dtype.name == kind.numpy_name
    assert np_dtype.itemsize * 8 == kind.bits
    assert numerics.scale_type_of(np_dtype) is kind
    assert ScaleType.from_dlpack(*kind.dlpack) is kind


def test_scale_types_are_what_frameworks_exchange() -> None:
    assert [kind.dlpack for kind in ScaleType] == [(2, 32), (10, 8), (14, 8)]
    assert ScaleType.from_dlpack(12, 8) is None
    assert numerics.scale_type_of(np.dtype(np.float16)) is None
    assert numerics.scale_type_of(np.dtype(">f4")) is None
    # One and the same array may hold fp8 operands or ue4m3 scales.
    assert numerics.from_numpy_dtype(numerics.numpy_dtype(ScaleType.UE4M3)) is D.F8E4M3


@pytest.mark.parametrize(
    "foreign", ["uint8", "int64", "complex64", "bool", ">f4", "U3", ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e8m0fnu]
)
def test_from_numpy_dtype_knows_its_limits(foreign: Any) -> None:
    assert numerics.from_numpy_dtype(np.dtype(foreign)) is None


@pytest.mark.parametrize("dtype", ENUMERABLE)
def test_limits_match_ml_dtypes(dtype: D) -> None:
    info = ml_dtypes.finfo(numerics.numpy_dtype(dtype))
    assert numerics.finite_max(dtype) == float(info.max) == GRIDS[dtype][-1]
    assert numerics.smallest_step(dtype) == float(info.smallest_subnormal) == GRIDS[dtype][1]
    assert numerics.unit_roundoff(dtype) == float(info.eps) / 2


@pytest.mark.parametrize("dtype", [D.F64, D.F32])
def test_limits_match_numpy(dtype: D) -> None:
    info = np.finfo(numerics.numpy_dtype(dtype))
    assert numerics.finite_max(dtype) == float(info.max)
    assert numerics.smallest_step(dtype) == float(info.smallest_subnormal)
    assert numerics.unit_roundoff(dtype) == float(info.eps) / 2


def test_limits_of_integers_and_tf32() -> None:
    assert [numerics.finite_max(d) for d in (D.I8, D.I32)] == [127.0, 2.0**31 - 1]
    assert [numerics.unit_roundoff(d) for d in (D.I8, D.I32, D.TF32)] == [0.0, 0.0, 2.0**-11]
    assert numerics.smallest_step(D.I32) == 1.0


def test_importing_does_not_import_ml_dtypes() -> None:
    code = "import sys, atomr_cutlass.arrays.numerics; sys.exit('ml_dtypes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("dtype", ENUMERABLE)
@quick
@given(data=st.data())
def test_saturating_cast_rounds_once(dtype: D, data: st.DataObject) -> None:
    values = data.draw(st.lists(_interesting(dtype), min_size=1, max_size=20))
    got = numerics.saturating_cast(np.array(values), dtype)
    assert got.dtype == numerics.numpy_dtype(dtype)
    want = np.array([_nearest_even(x, dtype) for x in values])
    np.testing.assert_array_equal(got.astype(np.float64), want)
    np.testing.assert_array_equal(np.signbit(got.astype(np.float64)), np.signbit(want))


@pytest.mark.parametrize("dtype", ENUMERABLE)
def test_every_value_converts_to_itself(dtype: D) -> None:
    grid = GRIDS[dtype]
    both = np.concatenate([grid, -grid])
    np.testing.assert_array_equal(
        _bits(numerics.saturating_cast(both, dtype)), _bits(both.astype(numerics.numpy_dtype(dtype)))
    )


@pytest.mark.parametrize("dtype", [*NARROW, D.BF16])
def test_saturating_cast_is_ml_dtypes_after_clamping(dtype: D) -> None:
    # From float32 ml_dtypes rounds once, so that after clamping the two agree in every bit.
    rng = np.random.default_rng(7)
    patterns = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    scaled = rng.normal(size=100_000).astype(np.float32) * np.exp2(rng.integers(-12, 12, 100_000)).astype(np.float32)
    x = np.concatenate([patterns[np.isfinite(patterns)], scaled])
    limit = np.float32(numerics.finite_max(dtype))
    clamped = x if dtype is D.BF16 else np.clip(x, -limit, limit)
    with np.errstate(over="ignore"):
        want = clamped.astype(numerics.numpy_dtype(dtype))
    np.testing.assert_array_equal(_bits(numerics.saturating_cast(x.astype(np.float64), dtype)), _bits(want))


@pytest.mark.parametrize(("dtype", "tie"), [(D.BF16, 2.0**-8), (D.F8E4M3, 2.0**-4), (D.F16, 2.0**-11)])
def test_no_double_rounding_through_float32(dtype: D, tie: float) -> None:
    # float32 cannot hold the last term: rounding there first would make a tie, and then go down to 1.
    just_above = 1.0 + tie + 2.0**-40
    assert float(numerics.saturating_cast(just_above, dtype)) == 1.0 + 2 * tie
    assert float(numerics.saturating_cast(1.0 + tie, dtype)) == 1.0


def test_fp8_special_values() -> None:
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 464.0, 1e300, -0.0])
    e4m3 = numerics.saturating_cast(x, D.F8E4M3)
    assert _bits(e4m3).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0x80]
    e5m2 = numerics.saturating_cast(x, D.F8E5M2)
    assert _bits(e5m2).tolist() == [0x7F, 0x7F, 0x7B, 0xFB, 0x5F, 0x7B, 0x80]
    assert np.isnan(e5m2[:2].astype(np.float32)).all()


def test_fp4_special_values() -> None:
    got = numerics.saturating_cast(np.array([np.nan, -np.nan, np.inf, -np.inf, 5.0, 2.5, -0.25]), D.F4E2M1)
    np.testing.assert_array_equal(got.astype(np.float64), [6.0, 6.0, 6.0, -6.0, 4.0, 2.0, -0.0])


@pytest.mark.parametrize("dtype", [D.F32, D.TF32, D.F16, D.BF16, D.F64])
def test_wide_floats_keep_nan_and_infinity(dtype: D) -> None:
    got = numerics.saturating_cast(np.array([np.nan, np.inf, -np.inf]), dtype).astype(np.float64)
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf])
    if dtype is not D.F64:
        assert numerics.saturating_cast(1e300, dtype).astype(np.float64) == np.inf


@quick
@given(st.lists(st.floats(), max_size=20))
def test_float32_and_float64_casts(values: list[float]) -> None:
    x = np.array(values, dtype=np.float64)
    np.testing.assert_array_equal(numerics.saturating_cast(x, D.F64), x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(numerics.saturating_cast(x, D.F32), x.astype(np.float32))


@pytest.mark.parametrize("dtype", [D.I8, D.I32])
@quick
@given(x=st.floats(-3e9, 3e9) | st.floats() | st.integers(-600, 600).map(lambda i: i / 4))
@example(x=2147483646.5)
@example(x=-2147483648.5)
def test_integer_casts_round_half_even_and_saturate(dtype: D, x: float) -> None:
    info = np.iinfo(numerics.numpy_dtype(dtype))
    if np.isnan(x):
        want = 0
    elif np.isinf(x):
        want = info.max if x > 0 else info.min
    else:
        want = min(max(round(Fraction(x)), info.min), info.max)
    assert int(numerics.saturating_cast(x, dtype)) == want


@pytest.mark.parametrize("dtype", list(D))
def test_saturating_cast_keeps_any_shape(dtype: D) -> None:
    for shape in [(), (0,), (0, 3), (2, 0, 3), (4, 5)]:
        assert numerics.saturating_cast(np.ones(shape), dtype).shape == shape
    strided = np.arange(24.0).reshape(4, 6)[::2, ::-3].T
    want = numerics.saturating_cast(strided.copy(), dtype)
    np.testing.assert_array_equal(numerics.saturating_cast(strided, dtype).astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("dtype", list(D))
def test_to_float64_is_exact(dtype: D) -> None:
    x = numerics.saturating_cast(np.array([0.0, 1.0, -3.0, 6.0]), dtype)
    wide = numerics.to_float64(x)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, [0.0, 1.0, -3.0, 6.0])


@quick
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(float(np.float32(1.0 + 2.0**-11)))
@example(float(np.finfo(np.float32).max))
@example(float(np.finfo(np.float32).smallest_subnormal))
def test_round_to_tf32_is_nearest_ties_away(x: float) -> None:
    got = numerics.round_to_tf32(np.array(x, dtype=np.float32))
    assert got.shape == ()
    assert got.dtype == np.float32
    exponent = max(int(np.frexp(x)[1]) - 1, -126)
    step = Fraction(2) ** (exponent - 10)
    # Half away from zero on the magnitude, in exact arithmetic.
    units = (abs(Fraction(x)) / step + Fraction(1, 2)).__floor__()
    want = units * step
    if want >= Fraction(2) ** 128:
        assert got == np.copysign(np.inf, x)
    else:
        assert Fraction(float(got)) == (want if x >= 0 else -want)
    assert np.signbit(got) == np.signbit(x)


def test_round_to_tf32_special_values() -> None:
    # A NaN whose payload sits in the low bits must not turn into infinity.
    x = np.array([0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000], dtype=np.uint32).view(np.float32)
    got = numerics.round_to_tf32(x)
    np.testing.assert_array_equal(got, [np.nan, np.nan, np.inf, -np.inf, 0.0])
    assert np.signbit(got[4])
    with pytest.raises(InvalidOperandError, match="float64"):
        numerics.round_to_tf32(np.zeros(3))  # type: ignore[arg-type]
