"""`gated_gemm` on the reference backend, and what it refuses."""

import functools

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import epilogue_id
from atomr_cutlass.generator.matrix import cells, supports, with_epilogue
from atomr_cutlass.ops.gated_gemm import function as gated
from atomr_cutlass.ops.gated_gemm.function import GATES
from atomr_cutlass.ops.gemm import scaled
from atomr_cutlass.ops.gemm.scaled import Scales
from atomr_cutlass.pipeline.invocation import Call, CallOptions
from atomr_cutlass.pipeline.problem import GemmProblem, MatrixSpec
from atomr_cutlass.reference import ACTIVATIONS

RANDOM = np.random.default_rng(3)


def _random(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("activation", GATES)
def test_is_two_products(activation: str) -> None:
    x, gate, up = _random(5, 16), _random(7, 16), _random(7, 16)
    got = ac.gated_gemm(x, ac.interleave(gate, up).T, activation=activation, alpha=0.5, backend="reference")
    wide = x.astype(np.float64)
    first, second = 0.5 * wide @ gate.T.astype(np.float64), 0.5 * wide @ up.T.astype(np.float64)
    want = ACTIVATIONS[activation](first) * second
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-3, atol=1e-4)


def test_scales_and_out() -> None:
    x = RANDOM.standard_normal((3, 32)).astype(ml_dtypes.float8_e4m3fn)
    w = RANDOM.standard_normal((10, 32)).astype(ml_dtypes.float8_e4m3fn)
    scale_a = np.exp2(RANDOM.integers(-2, 3, (3, 1))).astype(np.float32)
    scale_b = np.exp2(RANDOM.integers(-2, 3, (1, 10))).astype(np.float32)
    out = np.zeros((3, 5), np.float32)
    scales = {"scale_a": scale_a, "scale_b": scale_b, "scale_d": np.array([0.25], np.float32)}
    assert ac.gated_gemm(x, w.T, out=out, activation="relu", backend="reference", **scales) is out
    product = (x.astype(np.float64) * scale_a) @ (w.T.astype(np.float64) * scale_b)
    np.testing.assert_allclose(out, 0.25 * np.maximum(product[:, 0::2], 0) * product[:, 1::2], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"activation": "swish"}, InvalidOperandError, "activation is 'swish'; valid: silu"),
        ({"b": _random(16, 7)}, InvalidOperandError, r"expected \(..., M, K\) and \(..., K, 2 F\)"),
        ({"b": _random(15, 8)}, InvalidOperandError, r"expected \(..., M, K\)"),
        ({"scale_d": 2.0}, UnsupportedError, "scale_d is a number"),
        (
            {"out": np.zeros((5, 8), np.float16)},
            InvalidOperandError,
            r"out has shape \(5, 8\); the result has \(5, 4\)",
        ),
        ({"a": _random(5, 16).astype(np.float32), "b": np.zeros((16, 8), np.float32)}, UnsupportedError, "not f32"),
        ({"scale_d": np.ones(2, np.float32)}, InvalidOperandError, r"scale_d has shape \(2,\); expected one element"),
        ({"backend": "cpu"}, InvalidOperandError, "unknown backend"),
        ({"alpha": "1"}, InvalidOperandError, "alpha is a str"),
    ],
)
def test_refusals(arguments: dict, error: type[Exception], says: str) -> None:
    given = {"a": _random(5, 16), "b": _random(16, 8), "backend": "reference"} | arguments
    with pytest.raises(error, match=says):
        ac.gated_gemm(given.pop("a"), given.pop("b"), **given)


def _asked(monkeypatch: pytest.MonkeyPatch, **scales: np.ndarray) -> tuple[GemmProblem, Scales, MatrixSpec]:
    """What a kernel would be asked for; of fp8 (3, 256) by (256, 10)."""
    x, w = (np.ones((rows, 256), np.float32).astype(ml_dtypes.float8_e4m3fn) for rows in (3, 10))
    out = np.zeros((3, 8), np.float16)[:, :5]
    monkeypatch.setattr(scaled, "make", lambda what, scales, *, result, **_: (what, scales, result))
    given = Call(gated._parse, {"a": x, "b": w.T, **scales}, out, CallOptions(activation="silu"))
    views = {name: operands.as_operand(array) for name, array in {**given.arrays, "out": out}.items()}
    return gated._parse(given).plan(views, like=None, stream=0)  # type: ignore[return-value]


def _forms(scales: Scales) -> list[tuple[tuple[int, ...], str] | None]:
    return [None if one is None else (one.shape, one.form) for one in (scales.a, scales.b, scales.d, scales.amax)]


def test_kernels_are_asked_for_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    what, scales, result = _asked(monkeypatch)
    assert (what.m, what.n, what.k, what.c) == (3, 10, 256, None)
    assert (what.d.shape, what.d.strides, what.d.dtype) == ((3, 10), (16, 1), D.F16)
    assert (result.shape, result.strides) == ((3, 5), (8, 1))
    assert what.epilogue.startswith("gated+")
    assert scales == Scales()


def test_kernels_are_asked_for_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = functools.partial(np.ones, dtype=np.float32)
    what, scales, _ = _asked(monkeypatch, scale_a=ones((3, 1)), scale_d=ones(1))
    assert what.epilogue.startswith("gated_scaled+")
    assert _forms(scales) == [((3, 1), "vector"), None, ((1,), "tensor"), None]
    _, scales, _ = _asked(monkeypatch, scale_a=ones(1), scale_b=ones((1, 10)))
    assert _forms(scales) == [((1,), "tensor"), ((1, 10), "vector"), None, None]
    with pytest.raises(UnsupportedError, match="block scales are not taken"):
        _asked(monkeypatch, scale_a=ones((3, 2)), scale_b=ones((2, 1)))
    with pytest.raises(InvalidOperandError, match=r"scale_b has shape \(1, 5\)"):
        _asked(monkeypatch, scale_b=ones((1, 5)))
    with pytest.raises(InvalidOperandError, match="scale_a is f64; expected float32"):
        _asked(monkeypatch, scale_a=np.ones((3, 1)))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices_are_interleaved_as_arrays() -> None:
    gate, up = np.arange(6.0).reshape(2, 3), -np.arange(6.0).reshape(2, 3)
    made = ac.interleave(np.asmatrix(gate), np.asmatrix(up))
    assert type(made) is np.ndarray
    assert np.array_equal(made, ac.interleave(gate, up))


def test_weights_that_are_not_alike_are_not_interleaved() -> None:
    with pytest.raises(InvalidOperandError, match="expected two weights"):
        ac.interleave(_random(4, 8), _random(4, 9))


def test_keys() -> None:
    """Kernels of f32 accumulators that keep their operands in place have gated epilogues, and no others do."""
    epilogue = epilogue_id("gated", "evt:acc;silu:0;out:1")
    made = [
        with_epilogue(key, epilogue, D.BF16) for _, key in cells([SmArch.SM90A]) if key.a is D.BF16 and key.op == "gemm"
    ]
    served = {(key.generation, key.layout_a + key.layout_b) for key in made if supports(key)}
    assert served == {("sm90", layouts) for layouts in ("rr", "rc", "cr", "cc")}
    with_operand = epilogue_id("gated", "evt:acc;input:row:f32;add:0:1;out:2")
    key = with_epilogue(next(key for key in made if supports(key)), with_operand, D.BF16)
    assert "has no operands" in supports(key).reason
