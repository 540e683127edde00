"""`conv2d` and its gradients on the reference backend: the numbers, and what is refused before anything is written."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import reference
from atomr_cutlass.arrays import operands
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.ops.conv2d import reference as conv_reference
from atomr_cutlass.ops.conv2d.problem import ConvGeometry, conv_geometry, result_shape
from atomr_cutlass.pipeline import devices
from dlpack_arrays import Array, CudaArray

Values = np.ndarray[Any, Any]
OPS = ("fprop", "dgrad", "wgrad")
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def _random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Values:
    values = np.random.default_rng((seed, *shape)).integers(-3, 4, shape)
    return values.astype(np.float32).astype(dtype)


def _shapes(op: str, g: ConvGeometry) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two operands and of the result."""
    x, w, y = g.x_shape, g.w_shape, g.y_shape
    return {"fprop": (x, w, y), "dgrad": (y, w, x), "wgrad": (y, x, w)}[op]


def _nchw(array: Any) -> Any:
    return array.transpose(0, 3, 1, 2)


def _nhwc(array: Any) -> Any:
    return array.transpose(0, 2, 3, 1)


def _call(op: str, a: Any, b: Any, g: ConvGeometry, c: Any = None, **arguments: Any) -> Any:
    """One of the three functions, with the geometry's own arguments."""
    given = {
        "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups, "backend": "reference",
    } | arguments  # fmt: skip
    if op == "fprop":
        return ac.conv2d(a, b, c, **given)
    shape = g.x_shape if op == "dgrad" else g.w_shape
    if given.get("layout") == "nchw":
        shape = (shape[0], shape[3], shape[1], shape[2])
    return (ac.conv2d_dgrad if op == "dgrad" else ac.conv2d_wgrad)(a, b, shape, c, **given)


def _reference(op: str, a: Values, b: Values, g: ConvGeometry, c: Values | None = None, **arguments: Any) -> Values:
    given = {
        "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups, "out_dtype": D.F64,
    } | arguments  # fmt: skip
    return conv_reference.convolution(f"conv2d_{op}", a, b, result_shape(f"conv2d_{op}", g), c, **given)


def _operands(op: str, g: ConvGeometry, dtype: Any = np.float32) -> tuple[Values, Values]:
    first, second, _ = _shapes(op, g)
    return _random(*first, dtype=dtype, seed=1), _random(*second, dtype=dtype, seed=2)


def _geometry(x: tuple[int, int, int, int], w: tuple[int, int, int, int], **how: Any) -> ConvGeometry:
    return conv_geometry(x, w, **how)


GEOMETRIES = {
    "plain": _geometry((2, 5, 6, 4), (8, 3, 3, 4)),
    "same": _geometry((2, 5, 6, 4), (8, 3, 3, 4), padding=1),
    "strided": _geometry((1, 7, 8, 4), (6, 3, 2, 4), stride=(2, 3), padding=(1, 0)),
    "asymmetric": _geometry((2, 5, 4, 3), (5, 3, 3, 3), padding=((0, 2), (1, 0))),
    "dilated": _geometry((1, 9, 8, 2), (3, 3, 3, 2), dilation=(2, 3), padding=2),
    "grouped": _geometry((2, 4, 5, 6), (9, 3, 3, 2), groups=3, padding=1),
    "depthwise": _geometry((2, 6, 6, 5), (5, 3, 3, 1), groups=5, padding=1, stride=2),
    "multiplier": _geometry((1, 4, 4, 3), (6, 3, 3, 1), groups=3),
    "pointwise": _geometry((2, 3, 3, 7), (5, 1, 1, 7)),
    "few": _geometry((2, 9, 9, 3), (7, 7, 7, 3), stride=2, padding=3),
    "single pixel": _geometry((3, 1, 1, 5), (4, 1, 1, 5)),
}


# ----------------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(op: str, name: str) -> None:
    g = GEOMETRIES[name]
    a, b = _operands(op, g)
    want = _reference(op, a, b, g)
    got = _call(op, a, b, g)
    assert (got.dtype, got.shape) == (np.float32, _shapes(op, g)[2])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_nchw_names_the_same_arrays_otherwise(op: str, name: str) -> None:
    """Whether the arrays lie channels first or last: the reference reads either."""
    g = GEOMETRIES[name]
    a, b = _operands(op, g)
    want = _reference(op, a, b, g)
    for arrange in (np.ascontiguousarray, np.array):  # NCHW in memory, and a view of NHWC
        got = _call(op, arrange(_nchw(a)), arrange(_nchw(b)), g, layout="nchw")
        np.testing.assert_array_equal(_nhwc(got), want)
        assert _nhwc(got).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_dtypes(op: str, dtype: Any) -> None:
    g = GEOMETRIES["same"]
    a, b = _operands(op, g, dtype)
    got = _call(op, a, b, g)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float64), _reference(op, a, b, g).astype(dtype).astype(np.float64))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("op", OPS)
def test_fp8_gives_bf16(op: str, dtype: Any) -> None:
    g = GEOMETRIES["same"]
    a, b = _operands(op, g, dtype)
    assert _call(op, a, b, g).dtype == ml_dtypes.bfloat16
    got = _call(op, a, b, g, out_dtype=D.F32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, _reference(op, a, b, g))


@pytest.mark.parametrize("channels", [1, 3, 5, 7])
@pytest.mark.parametrize("op", OPS)
def test_odd_channels(op: str, channels: int) -> None:
    g = _geometry((2, 5, 5, channels), (channels, 3, 3, channels), padding=1)
    a, b = _operands(op, g)
    np.testing.assert_array_equal(_call(op, a, b, g), _reference(op, a, b, g))


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", OPS)
def test_alpha_beta_and_c(op: str, layout: str) -> None:
    g = GEOMETRIES["grouped"]
    a, b = _operands(op, g)
    c = _random(*_shapes(op, g)[2], seed=3)
    turn = _nchw if layout == "nchw" else np.asarray
    got = _call(op, turn(a), turn(b), g, turn(c), layout=layout, alpha=0.5, beta=-2)
    np.testing.assert_array_equal(got, turn(0.5 * _reference(op, a, b, g) - 2.0 * c))


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_bias_and_activation(op: str, layout: str) -> None:
    g = GEOMETRIES["strided"]
    a, b = _operands(op, g)
    bias = _random(_shapes(op, g)[2][-1], seed=3)
    turn = _nchw if layout == "nchw" else np.asarray
    for activation in (None, "relu", "gelu"):
        got = _call(op, turn(a), turn(b), g, layout=layout, bias=bias, activation=activation)
        want = _reference(op, a, b, g, bias=bias, activation=activation, out_dtype=D.F32)
        np.testing.assert_array_equal(got, turn(want))


def test_every_activation() -> None:
    g = GEOMETRIES["plain"]
    x, w = _operands("fprop", g)
    for activation in reference.ACTIVATIONS:
        got = _call("fprop", x, w, g, activation=activation, alpha=0.125)
        want = _reference("fprop", x, w, g, activation=activation, alpha=0.125, out_dtype=D.F32)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", OPS)
def test_scales_are_numbers(op: str) -> None:
    g = GEOMETRIES["plain"]
    a, b = _operands(op, g)
    got = _call(op, a, b, g, scale_a=2.0, scale_b=np.float32(0.5), scale_d=4)
    np.testing.assert_array_equal(got, 4 * _reference(op, a, b, g))
    for name, scale in itertools.product(("scale_a", "scale_b", "scale_d"), (np.ones(1), np.ones((2, 2)), "2")):
        with pytest.raises(UnsupportedError, match=f"{name} is a .*: convolution kernels read no scales: give"):
            _call(op, a, b, g, **{name: scale})


def test_precision_rounds_to_tf32() -> None:
    x, w = np.full((1, 1, 1, 1), 1 + 2**-12, np.float32), np.ones((1, 1, 1, 1), np.float32)
    how: dict[str, Any] = {"backend": "reference"}
    assert ac.conv2d(x, w, **how) == x
    assert ac.conv2d(x, w, precision="tf32", **how) == 1
    assert ac.conv2d(x, w, precision="3xtf32", **how) == x


@pytest.mark.parametrize("op", OPS)
def test_views_are_read_where_they_lie(op: str) -> None:
    g = GEOMETRIES["same"]
    a, b = _operands(op, g)

    def inside(array: Values) -> Values:
        wide = np.full([extent + 4 for extent in array.shape], np.nan, array.dtype)
        view = wide[tuple(slice(2, 2 + extent) for extent in array.shape)]
        view[...] = array
        return view

    np.testing.assert_array_equal(_call(op, inside(a), inside(b), g), _reference(op, a, b, g))


# ----------------------------------------------------------------------------------------------------------------------
# Where the result goes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", OPS)
def test_out_is_written_and_returned(op: str, layout: str) -> None:
    g = GEOMETRIES["asymmetric"]
    a, b = _operands(op, g)
    shape = _shapes(op, g)[2]
    turn = _nchw if layout == "nchw" else np.asarray
    whole = np.full((*shape[:-1], shape[-1] + 3), 77, np.float32)  # pixels with gaps between them
    out = turn(whole[..., 1:-2])
    assert _call(op, turn(a), turn(b), g, layout=layout, out=out) is out
    np.testing.assert_array_equal(whole[..., 1:-2], _reference(op, a, b, g))
    assert (whole[..., :1] == 77).all()
    assert (whole[..., -2:] == 77).all()


def test_out_decides_the_dtype() -> None:
    g = GEOMETRIES["plain"]
    x, w = _operands("fprop", g, np.float16)
    out = np.empty(g.y_shape, np.float32)
    assert _call("fprop", x, w, g, out=out) is out
    with pytest.raises(InvalidOperandError, match="out is f32, but out_dtype asks for f16"):
        _call("fprop", x, w, g, out=out, out_dtype=D.F16)


@pytest.mark.parametrize("op", OPS)
def test_out_may_be_c(op: str) -> None:
    g = GEOMETRIES["plain"]
    a, b = _operands(op, g)
    c = _random(*_shapes(op, g)[2], seed=3)
    want = _reference(op, a, b, g) + 3 * c
    assert _call(op, a, b, g, c, beta=3, out=c) is c
    np.testing.assert_array_equal(c, want)


@pytest.mark.parametrize("versioned", [True, False])
def test_host_arrays_of_any_framework_are_operands(versioned: bool) -> None:
    g = GEOMETRIES["same"]
    x, w = _operands("fprop", g)
    out = np.full(g.y_shape, np.nan, np.float32)
    given = Array(out, versioned=versioned)
    assert _call("fprop", Array(x, versioned=versioned), Array(w), g, out=given) is given
    np.testing.assert_array_equal(out, _reference("fprop", x, w, g))


@pytest.mark.parametrize("backend", ["reference", "prebuilt", "jit"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_an_empty_batch_gives_an_empty_result(backend: str, layout: str) -> None:
    """Nothing is launched, so no GPU is needed."""
    w = _random(6, 3, 3, 4)
    turn = _nchw if layout == "nchw" else np.asarray
    how: dict[str, Any] = {"padding": 1, "layout": layout, "backend": backend}
    y = ac.conv2d(turn(np.empty((0, 5, 5, 4), np.float32)), turn(w), **how)
    assert (y.dtype, y.shape) == (np.float32, turn(np.empty((0, 5, 5, 6))).shape)
    shape = (0, 4, 5, 5) if layout == "nchw" else (0, 5, 5, 4)
    assert ac.conv2d_dgrad(y, turn(w), shape, **how).shape == shape
    out = turn(np.empty((0, 5, 5, 6), np.float32))
    assert ac.conv2d(turn(np.empty((0, 5, 5, 4), np.float32)), turn(w), out=out, **how) is out


@pytest.mark.parametrize("backend", ["reference", "prebuilt", "jit"])
def test_the_gradient_of_an_empty_batch_is_zero(backend: str) -> None:
    """The sum over no pixels; a kernel would have nothing to do."""
    dy, x = np.empty((0, 5, 5, 6), np.float32), np.empty((0, 5, 5, 4), np.float32)
    how: dict[str, Any] = {"padding": 1, "backend": backend}
    got = ac.conv2d_wgrad(dy, x, (6, 3, 3, 4), **how)
    np.testing.assert_array_equal(got, np.zeros((6, 3, 3, 4), np.float32))
    c = _random(6, 3, 3, 4)
    np.testing.assert_array_equal(ac.conv2d_wgrad(dy, x, (6, 3, 3, 4), c, beta=2.0, **how), 2 * c)


def test_without_a_gpu_auto_computes_on_the_cpu_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "no NVIDIA driver")
    operands._warned.clear()
    with pytest.warns(RuntimeWarning, match="computing with NumPy on the CPU: no NVIDIA driver") as caught:
        ac.conv2d(X, W)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(ac.conv2d(X, W), ac.conv2d(X, W, backend="reference"))


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------

X, W, Y = _random(2, 5, 6, 4), _random(8, 3, 3, 4), _random(2, 3, 4, 8)
GPU_W = CudaArray(0x7F00_0000_0000, (8, 3, 3, 4), "<f4")


@pytest.mark.parametrize(
    ("given", "arguments", "says"),
    [
        ((X[0], W), {}, r"x has shape \(5, 6, 4\); expected \(N, H, W, C\)"),
        ((X, W[0]), {}, r"w has shape \(3, 3, 4\); expected \(K, R, S, C / groups\)"),
        ((X[None], W), {}, r"expected \(N, H, W, C\)"),
        ((np.float32(1), W), {}, "is not an array"),
        ((X, W[..., :3]), {}, r"w has shape \(8, 3, 3, 3\); its last extent must be 4: 4 channels in 1 groups"),
        ((X, W), {"groups": 3}, "x has C = 4, no multiple of the 3 groups"),
        ((_random(2, 5, 6, 6), _random(8, 3, 3, 2)), {"groups": 3}, "w has K = 8, no multiple of the 3 groups"),
        ((X, W), {"groups": 2}, "its last extent must be 2: 4 channels in 2 groups"),
        ((X, W), {"groups": 0}, "groups is 0; expected a positive integer"),
        ((X, W), {"groups": True}, "groups is True; expected a positive integer"),
        ((X, W), {"groups": 1.0}, r"groups is 1\.0; expected a positive integer"),
        ((X, W), {"stride": 0}, "stride is 0; expected an integer from 1"),
        ((X, W), {"stride": (1, 2, 3)}, r"stride is \(1, 2, 3\); expected an integer from 1 to 2\^31 - 1, or one each"),
        ((X, W), {"stride": "2"}, "stride is '2'"),
        ((X, W), {"dilation": (1, 0)}, r"dilation is \(1, 0\)"),
        ((X, W), {"padding": -1}, "padding is -1; expected an integer from 0"),
        ((X, W), {"padding": ((0, 1), (2,))}, "padding is"),
        ((X, W), {"padding": "same"}, "padding is 'same'"),
        ((X, W), {"dilation": 3}, "the result has no rows: 3 taps of w with dilation 3 are longer than 5"),
        ((X, _random(8, 3, 7, 4)), {}, "the result has no columns: 7 taps"),
        ((X[:, :0], W), {}, "x has shape .* of which only N may be 0"),
        ((X, W[:0]), {}, r"w has shape .* expected \(K, R, S, C / groups\) from 1"),
        ((X, W.astype(np.float16)), {}, "x is f32 and w is f16: both must have one dtype"),
        ((X.astype(np.complex64), W), {}, "no kernel knows elements of type complex64"),
        ((X, W, Y), {}, "c is given but beta is 0, so it would not be read"),
        ((X, W), {"beta": 1.0}, r"beta is 1\.0, so c is needed"),
        ((X, W, Y[:1]), {"beta": 1.0}, r"c has shape \(1, 3, 4, 8\); expected \(2, 3, 4, 8\) \(NHWC order\)"),
        ((X, W, Y[0]), {"beta": 1.0}, "c has shape"),
        ((X, W, Y.astype(np.float64)), {"beta": 1.0}, "c is f64; it must have the result's dtype, f32"),
        ((X, W), {"alpha": "2"}, "alpha is a str; expected a number"),
        ((X, W), {"alpha": True}, "alpha is a bool; expected a number"),
        ((X, W, Y), {"beta": [1.0]}, "beta is a list; expected a number"),
        ((X, W), {"bias": W[:4, 0, 0, 0]}, r"bias has shape \(4,\); expected \(8,\)"),
        ((X, W), {"bias": Y}, r"bias has shape \(2, 3, 4, 8\); expected \(8,\)"),
        ((X, W), {"activation": "swoosh"}, "'swoosh'; (expected None or one of|valid:) identity, relu"),
        ((X, W), {"layout": "nwhc"}, "unknown layout 'nwhc'; valid: nhwc, nchw"),
        ((X, W), {"backend": "cpu"}, "unknown backend 'cpu'; valid: auto, prebuilt, jit, reference"),
        ((X, W), {"precision": "fast"}, "unknown precision 'fast'; valid: ieee, tf32, 3xtf32"),
        ((X.astype(np.float16), W.astype(np.float16)), {"precision": "tf32"}, "is for float32 operands; these are f16"),
        ((X, W), {"out_dtype": "f16"}, "out_dtype is 'f16'; expected a CutlassDtype"),
        ((X, GPU_W), {}, "a is on the CPU and b on cuda:0: all operands must be on one device"),
        ((X, W), {"out": CudaArray(0x7F00_0000_0000, (2, 3, 4, 8), "<f4")}, "a is on the CPU and out on cuda:0"),
        ((Array(X, device=(10, 0)), W), {}, "a is on a device of DLPack type 10; expected CUDA or CPU"),
        ((_nchw(X), W), {"layout": "nchw"}, "w has shape"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto", "prebuilt"])
def test_bad_input_is_refused(given: tuple[Any, ...], arguments: dict[str, Any], says: str, backend: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        ac.conv2d(*given, **({"backend": backend} | arguments))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda **how: ac.conv2d_dgrad(Y, W, (2, 6, 6, 4), **how),
         r"dy has shape \(2, 3, 4, 8\) \(NHWC order\); the convolution's result has \(2, 4, 4, 8\)"),
        (lambda **how: ac.conv2d_dgrad(Y[..., :7], W, (2, 5, 6, 4), **how), "dy has shape"),
        (lambda **how: ac.conv2d_dgrad(Y, W, (2, 5, 6), **how), r"x_shape is \(2, 5, 6\); expected 4 extents"),
        (lambda **how: ac.conv2d_dgrad(Y, W, 5, **how), "x_shape is 5; expected 4 extents"),
        (lambda **how: ac.conv2d_dgrad(Y, W, (2, 5, 6, 3), **how), "w has shape .* its last extent must be 3"),
        (lambda **how: ac.conv2d_dgrad(Y, W, (2, 5, 6, 4.0), **how), "x has shape"),
        (lambda **how: ac.conv2d_dgrad(Y[0], W, (2, 5, 6, 4), **how), r"dy has shape \(3, 4, 8\) \(NHWC order\)"),
        (lambda **how: ac.conv2d_dgrad(Y, W, (2, 5, 6, 4), stride=2, **how), "the convolution's result has"),
        (lambda **how: ac.conv2d_dgrad(Y, W.astype(np.float16), (2, 5, 6, 4), **how), "dy is f32 and w is f16"),
        (lambda **how: ac.conv2d_wgrad(Y, X, (8, 3, 3, 3), **how), "w has shape .* its last extent must be 4"),
        (lambda **how: ac.conv2d_wgrad(Y, X, (8, 2, 3, 4), **how), "dy has shape"),
        (lambda **how: ac.conv2d_wgrad(Y, X, "8334", **how), "w has shape"),
        (lambda **how: ac.conv2d_wgrad(Y, X[0], (8, 3, 3, 4), **how), r"x has shape .* expected \(N, H, W, C\)"),
        (lambda **how: ac.conv2d_wgrad(Y[:1], X, (8, 3, 3, 4), **how), "dy has shape"),
        (lambda **how: ac.conv2d_wgrad(Y, X.astype(np.float64), (8, 3, 3, 4), **how), "dy is f32 and x is f64"),
        (lambda **how: ac.conv2d_wgrad(Y, X, (8, 3, 3, 4), W, **how), "c is given but beta is 0"),
        (lambda **how: ac.conv2d_wgrad(Y, X, (8, 3, 3, 4), beta=1, **how), "so c is needed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "auto", "prebuilt"])
def test_bad_input_of_gradients_is_refused(call: Any, says: str, backend: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        call(backend=backend)


def test_integers_are_refused() -> None:
    x, w = X.astype(np.int8), W.astype(np.int8)
    with pytest.raises(InvalidOperandError, match="x is int8; convolutions take floating-point operands"):
        ac.conv2d(x, w, backend="reference")


def _read_only(array: Values) -> Values:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make_out", "says"),
    [
        (lambda: np.full((2, 5, 6, 4), 99.0, np.float32), r"out has shape \(2, 5, 6, 4\); expected"),
        (lambda: np.full((2, 8, 3, 4), 99.0, np.float32), "out has shape"),
        (lambda: np.full(192, 99.0, np.float32), "out has shape"),
        (lambda: _read_only(np.full((2, 3, 4, 8), 99.0, np.float32)), "out is read-only"),
        (lambda: np.lib.stride_tricks.as_strided(np.full(32, 99.0, np.float32), (2, 3, 4, 8), (0, 0, 32, 4)),
         "its elements share memory"),
        (lambda: [[[[0.0] * 8] * 4] * 3] * 2, "is not an array"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "auto", "prebuilt"])
def test_a_wrong_out_is_refused_and_left_alone(make_out: Any, says: str, backend: str) -> None:
    out = make_out()
    before = np.array(out, copy=True)
    with pytest.raises(InvalidOperandError, match=says):
        ac.conv2d(X, W, out=out, backend=backend)
    np.testing.assert_array_equal(out, before)


def test_an_overlapping_out_is_refused() -> None:
    square = _random(2, 5, 5, 4)
    with pytest.raises(InvalidOperandError, match="out overlaps a: give separate memory"):
        ac.conv2d(square, _random(4, 3, 3, 4), padding=1, out=square, backend="reference")
    whole = np.zeros((3, 3, 4, 8), np.float32)
    with pytest.raises(InvalidOperandError, match="out overlaps c"):
        ac.conv2d(X, W, whole[:2], beta=1.0, out=whole[1:], backend="reference")
    with pytest.raises(InvalidOperandError, match="out overlaps bias"):
        ac.conv2d(X, W, bias=whole[0, 0, 0], out=whole[:2], backend="reference")
    assert (whole == 0).all()


@pytest.mark.parametrize("module", ["jax", "jaxlib._jax"])
def test_a_jax_array_cannot_be_out(module: str) -> None:
    out = type("ArrayImpl", (), {"__module__": module})()
    for call in (
        lambda: ac.conv2d(X, W, out=out),
        lambda: ac.conv2d_dgrad(Y, W, (2, 5, 6, 4), out=out),
        lambda: ac.conv2d_wgrad(Y, X, (8, 3, 3, 4), out=out),
    ):
        with pytest.raises(InvalidOperandError, match="out is a JAX array, which cannot be written"):
            call()


def test_the_gradient_of_the_filter_has_neither_bias_nor_activation() -> None:
    for name in ("bias", "activation"):
        with pytest.raises(UnsupportedError, match=f"conv2d_wgrad takes no {name}: the gradient of a filter has no"):
            ac.conv2d_wgrad(Y, X, (8, 3, 3, 4), **{name: None})


# ----------------------------------------------------------------------------------------------------------------------
# What the reference computes and no kernel does
# ----------------------------------------------------------------------------------------------------------------------

BIAS = _random(8, seed=5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scale_d": 2.0, "activation": "relu"}, "scale_d after an activation"),
        ({"scale_d": 2.0, "bias": BIAS}, "scale_d together with bias: scale the bias"),
    ],
)
@pytest.mark.parametrize("backend", ["prebuilt", "jit"])
def test_kernels_refuse_by_name_what_the_reference_computes(arguments: dict[str, Any], says: str, backend: str) -> None:
    assert ac.conv2d(X, W, backend="reference", **arguments).shape == Y.shape
    with pytest.raises(UnsupportedError, match=says):
        ac.conv2d(X, W, backend=backend, **arguments)
