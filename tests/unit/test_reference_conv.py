"""The reference's convolutions against loops over every index, and against each other."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from atomr_cutlass import reference
from atomr_cutlass.arrays import numerics
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP, WGRAD, conv_geometry
from atomr_cutlass.ops.conv2d.reference import absolute_convolution, convolution
from atomr_cutlass.ops.gemm import reference as gemm_reference

quick = settings(max_examples=100, deadline=None)

Array = np.ndarray[Any, Any]


def _loops(
    x: Array, w: Array, dy: Array, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Array, Array, Array]:
    """y, dx and dw, one scalar product after the other; dy's extents say how large y is."""
    n, h, width, c = x.shape
    k, taps_r, taps_s, depth = w.shape
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for image, p, q, out in product(*map(range, dy.shape)):
        group = out // (k // groups)
        for r, s, inner in product(range(taps_r), range(taps_s), range(depth)):
            row = p * stride[0] - padding[0][0] + r * dilation[0]
            column = q * stride[1] - padding[1][0] + s * dilation[1]
            if not (0 <= row < h and 0 <= column < width):
                continue
            where = (image, row, column, group * depth + inner)
            y[image, p, q, out] += x[where] * w[out, r, s, inner]
            dx[where] += dy[image, p, q, out] * w[out, r, s, inner]
            dw[out, r, s, inner] += dy[image, p, q, out] * x[where]
    assert n == dy.shape[0]
    assert c == depth * groups
    return y, dx, dw


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    # Whole numbers, so that every sum is exact in whichever order it is formed.
    return rng.integers(-4, 5, shape).astype(np.float32)


SMALL = st.integers(0, 2)


@quick
@given(
    n=st.integers(0, 2),
    extents=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    filters=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 1000),
)
@example(1, (5, 5), (3, 3), (2, 2), ((1, 0), (0, 1)), (1, 1), (4, 1, 1), 0)  # depthwise
@example(1, (5, 4), (2, 3), (1, 2), ((1, 1), (1, 1)), (2, 1), (4, 1, 2), 0)  # depthwise with a multiplier
@example(2, (6, 5), (3, 2), (2, 1), ((0, 2), (1, 0)), (1, 2), (2, 3, 2), 0)  # grouped
@example(1, (1, 1), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 2, 3), 0)  # more padding than image
def test_convolutions_are_what_loops_give(
    n: int,
    extents: tuple[int, int],
    filters: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    dilation: tuple[int, int],
    channels: tuple[int, int, int],
    seed: int,
) -> None:
    groups, depth, width = channels
    padded = [extent + sum(pad) for extent, pad in zip(extents, padding, strict=True)]
    assume(all(dil * (taps - 1) < room for dil, taps, room in zip(dilation, filters, padded, strict=True)))
    rng = np.random.default_rng(seed)
    x, w = _values(rng, (n, *extents, groups * depth)), _values(rng, (groups * width, *filters, depth))
    how: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    geometry = conv_geometry(x.shape, w.shape, **how)
    dy = _values(rng, geometry.y_shape)
    y, dx, dw = _loops(x, w, dy, **how)
    np.testing.assert_array_equal(convolution(FPROP, x, w, out_dtype=D.F64, **how), y)
    np.testing.assert_array_equal(convolution(DGRAD, dy, w, x.shape, out_dtype=D.F64, **how), dx)
    np.testing.assert_array_equal(convolution(WGRAD, dy, x, w.shape, out_dtype=D.F64, **how), dw)
    y, dx, dw = _loops(abs(x), abs(w), abs(dy), **how)
    np.testing.assert_array_equal(absolute_convolution(FPROP, x, w, **how), y)
    np.testing.assert_array_equal(absolute_convolution(DGRAD, dy, w, x.shape, **how), dx)
    np.testing.assert_array_equal(absolute_convolution(WGRAD, dy, x, w.shape, **how), dw)


@quick
@given(
    h=st.integers(1, 9),
    filters=st.integers(1, 4),
    stride=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 6]),
    seed=st.integers(0, 1000),
)
def test_the_gradients_are_those_of_the_convolution(h: int, filters: int, stride: int, groups: int, seed: int) -> None:
    # <dy, conv(x, w)> is linear in x and in w, and these are its gradients.
    rng = np.random.default_rng(seed)
    x, w = _values(rng, (2, h, h + 1, 12)), _values(rng, (6, filters, filters, 12 // groups))
    how: dict[str, Any] = {"stride": stride, "padding": (filters, filters - 1), "groups": groups, "out_dtype": D.F64}
    y = convolution(FPROP, x, w, **how)
    dy = _values(rng, y.shape)
    whole = (dy * y).sum()
    assert (convolution(DGRAD, dy, w, x.shape, **how) * x).sum() == whole
    assert (convolution(WGRAD, dy, x, w.shape, **how) * w).sum() == whole


def test_one_by_one_filters_are_a_gemm() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 5, 16)).astype(np.float32), rng.normal(size=(8, 1, 1, 16)).astype(np.float32)
    c, bias = rng.normal(size=(2, 3, 5, 8)), rng.normal(size=8)
    terms: dict[str, Any] = {"alpha": 0.5, "beta": -2.0, "bias": bias, "scale_a": 3.0, "scale_b": 0.25, "scale_d": 7.0}
    got = convolution(FPROP, x, w, None, c, activation="gelu", out_dtype=D.F16, **terms)
    flat = (x.reshape(30, 16), w.reshape(8, 16).T, c.reshape(30, 8))
    want = gemm_reference.gemm(*flat, activation="gelu", out_dtype=D.F16, **terms)
    np.testing.assert_array_equal(got, want.reshape(got.shape))
    np.testing.assert_allclose(
        absolute_convolution(FPROP, x, w, None, c, **terms),
        gemm_reference.absolute_product(*flat, **terms).reshape(got.shape),
        rtol=1e-13,
    )


def test_gradients_have_an_epilogue_too() -> None:
    rng = np.random.default_rng(1)
    x, w, dy = _values(rng, (2, 6, 5, 4)), _values(rng, (3, 3, 3, 4)), _values(rng, (2, 4, 3, 3))
    terms: dict[str, Any] = {"alpha": -2.0, "beta": 3.0, "scale_a": 2.0, "scale_b": 0.5}
    for operands, like in (((DGRAD, dy, w, x.shape), x), ((WGRAD, dy, x, w.shape), w)):
        plain = convolution(*operands, out_dtype=D.F64)
        bias = _values(rng, like.shape[-1:])
        how = {"bias": bias, "activation": "relu", "out_dtype": D.F8E4M3}
        got = convolution(*operands, like, **how, **terms)
        want = np.maximum(-2.0 * plain + 3.0 * like + bias, 0.0)
        np.testing.assert_array_equal(got.astype(np.float64), numerics.saturating_cast(want, D.F8E4M3).astype(float))
        plain = absolute_convolution(*operands)
        got = absolute_convolution(*operands, like, bias=bias, scale_d=-2.0, **terms)
        np.testing.assert_allclose(got, 2.0 * (2.0 * plain + 3.0 * abs(like) + abs(bias)), rtol=1e-13)


@pytest.mark.parametrize("dtype", [D.F16, D.BF16, D.F32, D.F8E4M3, D.F8E5M2])
def test_dtypes_of_operands_and_results(dtype: D) -> None:
    rng = np.random.default_rng(2)
    x = numerics.saturating_cast(rng.normal(size=(1, 4, 4, 8)), dtype)
    w = numerics.saturating_cast(rng.normal(size=(8, 3, 3, 8)), dtype)
    wide = convolution(FPROP, x.astype(np.float64), w.astype(np.float64), padding=1, out_dtype=D.F64)
    for out_dtype in (dtype, D.BF16, D.F32):
        got = convolution(FPROP, x, w, padding=1, out_dtype=out_dtype)
        assert got.dtype == numerics.numpy_dtype(out_dtype)
        np.testing.assert_array_equal(
            numerics.to_float64(got), numerics.to_float64(numerics.saturating_cast(wide, out_dtype))
        )


def test_tf32_rounds_operands() -> None:
    x = np.full((1, 1, 1, 2), 1.0 + 2.0**-12, np.float32)
    w = np.ones((1, 1, 1, 2), np.float32)
    assert convolution(FPROP, x, w, out_dtype=D.F32).item() == 2.0 + 2.0**-11
    assert convolution(FPROP, x, w, math="tf32", out_dtype=D.F32).item() == 2.0
    assert convolution(DGRAD, x[..., :1], w, (1, 1, 1, 2), math="tf32", out_dtype=D.F32).max() == 1.0
    assert convolution(WGRAD, w, x, (2, 1, 1, 2), math="tf32", out_dtype=D.F32).max() == 1.0


def test_what_is_not_read() -> None:
    x, w = np.full((1, 3, 3, 2), np.nan, np.float32), np.full((2, 3, 3, 2), np.inf, np.float32)
    c = np.full((1, 1, 1, 2), np.nan, np.float32)
    assert (convolution(FPROP, x, w, None, c, alpha=0.0, scale_a=np.nan, out_dtype=D.F32) == 0.0).all()
    assert (absolute_convolution(FPROP, x, w, None, c, alpha=0.0) == 0.0).all()
    assert np.isnan(convolution(FPROP, x, w, out_dtype=D.F32)).all()
    zeros = np.zeros_like(x)
    zeros[0, 0, 0, 0] = 1.0
    got = convolution(FPROP, zeros[:, :1, :1], w, padding=1, out_dtype=D.F32)
    assert np.isnan(got).all()  # padding is zeros, which an infinite filter multiplies
    assert np.isinf(convolution(DGRAD, np.ones((1, 1, 1, 2), np.float32), w, x.shape, out_dtype=D.F32)).all()


def test_operands_may_be_views_and_are_left_alone() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(size=(2, 4, 9, 9)).astype(np.float32)  # NCHW in memory
    x, w = base.transpose(0, 2, 3, 1), rng.normal(size=(5, 3, 4, 3)).astype(np.float32).swapaxes(2, 3)
    keep = base.copy()
    got = convolution(FPROP, x, w, out_dtype=D.F64)
    np.testing.assert_array_equal(got, convolution(FPROP, x.copy(), w.copy(), out_dtype=D.F64))
    np.testing.assert_array_equal(base, keep)
    result = convolution(DGRAD, x, np.ones((4, 1, 1, 4), np.float32), x.shape, out_dtype=D.F32)
    assert not np.shares_memory(result, base)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (1, ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (2, 2))),
        (((0, 1), (2, 3)), ((0, 1), (2, 3))),
        ([1, (0, 2)], ((1, 1), (0, 2))),
    ],
)
def test_forms_of_padding(given: Any, meant: Any) -> None:
    geometry = conv_geometry((1, 8, 8, 3), (4, 3, 3, 3), padding=given)
    assert geometry.padding == meant
    assert geometry.y_shape == (1, 6 + sum(meant[0]), 6 + sum(meant[1]), 4)
    assert (geometry.x_shape, geometry.w_shape) == ((1, 8, 8, 3), (4, 3, 3, 3))


X, W = np.ones((2, 5, 6, 4), np.float32), np.ones((6, 3, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X[0]}, r"x has shape \(5, 6, 4\)"),
        ({"w": W[0, 0]}, r"w has shape \(3, 4\)"),
        ({"x": X.astype(np.int8)}, "x is int8; convolutions take floating-point"),
        ({"w": W.astype(complex)}, "w is complex128"),
        ({"x": X[:, :, :, :3]}, r"its last extent must be 3: 3 channels in 1 groups"),
        ({"groups": 2}, "its last extent must be 2: 4 channels in 2 groups"),
        ({"groups": 3}, "x has C = 4, no multiple of the 3 groups"),
        ({"groups": 4}, "w has K = 6, no multiple of the 4 groups"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": True}, "groups is True"),
        ({"x": X[:, :0]}, "x has shape .* of which only N may be 0"),
        ({"w": W[:0]}, "w has shape"),
        ({"x": X[:, :2]}, "the result has no rows: 3 taps of w with dilation 1 are longer than 2 with padding 0 and 0"),
        ({"dilation": (1, 3)}, "the result has no columns: 3 taps of w with dilation 3"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": (1, 1, 1)}, r"stride is \(1, 1, 1\)"),
        ({"dilation": 1.5}, "dilation is 1.5"),
        ({"padding": -1}, "padding is -1"),
        ({"padding": ((1, 1), (1,))}, "padding is"),
        ({"padding": "same"}, "padding is 'same'"),
        ({"bias": np.ones(4)}, r"bias has shape \(4,\); expected \(6,\), one value a channel of the result"),
        ({"activation": "swish"}, "activation is 'swish'"),
    ],
)
def test_conv2d_refuses(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"x": X, "w": W, "out_dtype": D.F32, **arguments}
    with pytest.raises(InvalidOperandError, match=message):
        convolution(FPROP, call.pop("x"), call.pop("w"), **call)


def test_gradients_are_told_the_extents_of_their_result() -> None:
    dy = np.ones((2, 3, 4, 6), np.float32)
    with pytest.raises(InvalidOperandError, match="x has shape"):
        convolution(DGRAD, dy, W, (2, 6, 6), out_dtype=D.F32)  # type: ignore[arg-type]
    # Two images give the same y where the stride leaves a rest: both are right.
    for h in (7, 8):
        assert convolution(DGRAD, dy[:, :3], W, (2, h, 6, 4), stride=(2, 1), out_dtype=D.F32).shape[1] == h


def test_layers_of_networks_take_little_time() -> None:
    rng = np.random.default_rng(5)
    start = time.perf_counter(), time.process_time()
    for h, c, k, taps, stride, groups in (
        (112, 3, 64, 7, 2, 1), (56, 64, 64, 3, 1, 1), (14, 1024, 256, 1, 1, 1), (7, 512, 512, 3, 1, 1),
        (28, 96, 96, 7, 1, 96), (56, 64, 64, 3, 2, 64), (28, 256, 256, 3, 1, 32),
    ):  # fmt: skip
        x = rng.normal(size=(1, h, h, c)).astype(np.float16)
        w = rng.normal(size=(k, taps, taps, c // groups)).astype(np.float16)
        how: dict[str, Any] = {"stride": stride, "padding": taps // 2, "groups": groups, "out_dtype": D.F32}
        y = convolution(FPROP, x, w, **how)
        convolution(DGRAD, y, w, x.shape, **how)
        convolution(WGRAD, y, x, w.shape, **how)
    # A fraction of a second; loops, or products without BLAS, take minutes. The processor's time counts the threads of
    # BLAS, the clock what other processes take.
    assert min(time.perf_counter() - start[0], time.process_time() - start[1]) < 20


@pytest.mark.parametrize("dtype", [D.F16, D.BF16, D.F8E4M3])
def test_sums_in_float32_are_within_tolerance_and_a_missing_tap_is_not(dtype: D) -> None:
    rng = np.random.default_rng(6)
    x = numerics.saturating_cast(rng.normal(size=(2, 9, 9, 16)), dtype)
    w = numerics.saturating_cast(rng.normal(size=(8, 3, 3, 16)), dtype)
    geometry = conv_geometry(x.shape, w.shape, padding=1)
    padded = np.pad(x.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    sums = np.zeros((10, *geometry.y_shape), np.float32)
    for tap, (r, s) in enumerate(product(range(3), range(3))):
        sums[tap + 1] = sums[tap]
        for c in range(16):
            sums[tap + 1] += padded[:, r : r + 9, s : s + 9, c, None] * w[:, r, s, c].astype(np.float32)
    want = convolution(FPROP, x, w, padding=1, out_dtype=D.BF16)
    magnitude = absolute_convolution(FPROP, x, w, padding=1)
    limits = reference.tolerance(dtype, D.BF16, 3 * 3 * 16)
    whole, short = (numerics.saturating_cast(sums[tap], D.BF16) for tap in (9, 8))
    assert reference.within_tolerance(whole, want, magnitude, limits, D.BF16).all()
    assert reference.within_tolerance(short, want, magnitude, limits, D.BF16).mean() < 0.4
