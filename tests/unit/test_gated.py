"""`gated_gemm` on the reference backend, and what it refuses."""

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.gated import GATES
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import epilogue_id
from atomr_cutlass.generator.matrix import cells, supports, with_epilogue
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
        ({"backend": "cpu"}, InvalidOperandError, "unknown backend"),
        ({"alpha": "1"}, InvalidOperandError, "alpha is a str"),
    ],
)
def test_refusals(arguments: dict, error: type[Exception], says: str) -> None:
    given = {"a": _random(5, 16), "b": _random(16, 8), "backend": "reference"} | arguments
    with pytest.raises(error, match=says):
        ac.gated_gemm(given.pop("a"), given.pop("b"), **given)


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
