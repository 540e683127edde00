"""`gated_gemm` on the reference backend, and what it refuses; its requests, and the actor."""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import GatedGemmRequest, GemmEpilogue, GemmLayout, GemmRequest, GemmShape
from atomr_cutlass.arrays import operands
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import epilogue_id
from atomr_cutlass.generator.matrix import cells, supports, with_epilogue
from atomr_cutlass.ops.gated_gemm import function as gated
from atomr_cutlass.ops.gated_gemm.function import GATES
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm.plans import Scales
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline.call import Call
from atomr_cutlass.pipeline.call_options import CallOptions
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.probe import Check
from atomr_cutlass.reference import ACTIVATIONS
from fake_gpu import FakeGpu, fetch, operands_of, place

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


def _asked(monkeypatch: pytest.MonkeyPatch, **scales: np.ndarray) -> tuple[GemmProblem, Scales]:
    """What a kernel would be asked for; of fp8 (3, 256) by (256, 10)."""
    x, w = (np.ones((rows, 256), np.float32).astype(ml_dtypes.float8_e4m3fn) for rows in (3, 10))
    out = np.zeros((3, 8), np.float16)[:, :5]
    monkeypatch.setattr(gated, "make", lambda problem, scales, **_: (problem, scales))
    given = Call(gated._parse, {"a": x, "b": w.T, **scales}, out, CallOptions(activation="silu"))
    views = {name: operands.as_operand(array) for name, array in {**given.arrays, "out": out}.items()}
    return gated._parse(given).plan(views, like=None, stream=0)  # type: ignore[return-value]


def _forms(scales: Scales) -> list[tuple[tuple[int, ...], str] | None]:
    return [None if each is None else (each.shape, each.form) for each in (scales.a, scales.b, scales.d, scales.amax)]


def test_kernels_are_asked_for_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, scales = _asked(monkeypatch)
    result = plans.result_of(problem)
    assert (problem.m, problem.n, problem.k, problem.c) == (3, 10, 256, None)
    assert (problem.d.shape, problem.d.strides, problem.d.dtype) == ((3, 10), (16, 1), D.F16)
    assert (result.shape, result.strides) == ((3, 5), (8, 1))
    assert problem.epilogue.startswith("gated+")
    assert scales == Scales()


def test_kernels_are_asked_for_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = functools.partial(np.ones, dtype=np.float32)
    problem, scales = _asked(monkeypatch, scale_a=ones((3, 1)), scale_d=ones(1))
    assert problem.epilogue.startswith("gated_scaled+")
    assert _forms(scales) == [((3, 1), "vector"), None, ((1,), "tensor"), None]
    _, scales = _asked(monkeypatch, scale_a=ones(1), scale_b=ones((1, 10)))
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


SILU = epilogue_id("gated", "evt:acc;silu:0;out:1")


def test_keys() -> None:
    """Kernels of f32 accumulators that keep their operands in place have gated epilogues, and no others do."""
    made = [
        with_epilogue(key, SILU, D.BF16) for _, key in cells([SmArch.SM90A]) if key.a is D.BF16 and key.op == "gemm"
    ]
    served = {(key.generation, key.layout_a + key.layout_b) for key in made if supports(key)}
    assert served == {("sm90", layouts) for layouts in ("rr", "rc", "cr", "cc")}
    with_operand = epilogue_id("gated", "evt:acc;input:row:f32;add:0:1;out:2")
    key = with_epilogue(next(key for key in made if supports(key)), with_operand, D.BF16)
    assert "has no operands" in supports(key).reason


def test_tiles_are_whole_groups_of_blocks() -> None:
    """epilogue_gated.h exchanges four blocks of eight columns at once."""
    plain = [key for _, key in cells([SmArch.SM90A]) if key.generation == "sm90" and key.op == "gemm"]
    gated = [with_epilogue(key, SILU, D.BF16) for key in plain if key.a is D.BF16]
    widths = {key.tile[:2] for key in gated if supports(key)}
    assert {(64, 64), (128, 128), (128, 256)} <= widths
    assert not [tile for tile in widths if tile[1] % 32]
    key = next(key for key in gated if key.tile[:2] == (128, 128) and key.mainloop == "pingpong")
    assert "multiples of 32 along N" in supports(dataclasses.replace(key, tile=(128, 80, 64))).reason


# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------

REQUEST = GatedGemmRequest(GemmShape(16, 64, 32), dtype=D.BF16, arch=SmArch.SM90A)
FP8 = dataclasses.replace(REQUEST, dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, scaling="vector", quantized=True)


def test_requests_with_other_values_have_other_keys() -> None:
    others = (
        {"shape": GemmShape(16, 64, 32, 2)}, {"dtype": D.F16}, {"arch": SmArch.SM80}, {"binding": "w"},
        {"layout_b": GemmLayout.COL_MAJOR}, {"out_dtype": D.F32}, {"epilogue": GemmEpilogue(activation="gelu")},
    )  # fmt: skip
    keys = {dataclasses.replace(REQUEST, **other).plan_key() for other in others}
    gemm = GemmRequest(REQUEST.shape, dtype=D.BF16, arch=SmArch.SM90A, epilogue=REQUEST.epilogue)
    assert len(keys | {REQUEST.plan_key(), gemm.plan_key()}) == len(others) + 2
    assert dataclasses.replace(REQUEST, epilogue=GemmEpilogue(activation="silu")) == REQUEST
    assert gemm != REQUEST


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"shape": GemmShape(16, 63, 32)}, InvalidOperandError, "shape.n is 63; expected an even number"),
        ({"dtype": D.F32}, UnsupportedError, "gated kernels multiply f16, bf16 and fp8, not f32"),
        ({"dtype": D.F4E2M1, "scaling": "nvfp4", "arch": None}, UnsupportedError, "not e2m1"),
        ({"layout_c": GemmLayout.COL_MAJOR}, UnsupportedError, "layout_c is COL_MAJOR"),
        ({"epilogue": GemmEpilogue(activation="leaky_relu")}, InvalidOperandError, "'leaky_relu'; valid: silu"),
        ({"epilogue": GemmEpilogue(beta=1.0)}, UnsupportedError, "has beta: the kernels read A, B and their scales"),
        ({"epilogue": GemmEpilogue(bias=True)}, UnsupportedError, "has bias: the kernels read A, B and their scales"),
        (
            {"epilogue": GemmEpilogue(tree=ac.EvtBuilder().activation("relu").build())}, UnsupportedError,
            "has epilogue: the gate is the epilogue",
        ),
        ({"epilogue": "silu"}, InvalidOperandError, "epilogue is 'silu'"),
        ({"precision": "tf32"}, InvalidOperandError, "precision"),
        ({"quantized": True}, UnsupportedError, "bf16 operands take no scales"),
    ],
)  # fmt: skip
def test_requests_that_nothing_serves_are_refused(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        dataclasses.replace(REQUEST, **changes)


def test_block_scales_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="block scales are not taken by gated kernels"):
        dataclasses.replace(FP8, scaling="block")


@pytest.mark.parametrize("request_", [REQUEST, FP8], ids=["bf16", "fp8"])
def test_requests_have_kernels(request_: GatedGemmRequest) -> None:
    source, name = request_.render_cu()
    assert "_gated" in name
    assert "GatedEpilogue<atomr_cutlass::Tree" in source
    explained = ac.explain(request_, jit="off")
    assert explained.kernel is None or "_gated" in explained.kernel
    empty = dataclasses.replace(request_, shape=GemmShape(16, 0, 32))
    assert "the result is empty" in ac.explain(empty).reason
    without_products = dataclasses.replace(request_, shape=GemmShape(16, 64, 0))
    assert "K is 0" in ac.explain(without_products).reason


@pytest.mark.parametrize("arch", [arch for arch in SmArch if arch is not SmArch.SM90A])
def test_other_archs_are_refused_with_the_reason(arch: SmArch) -> None:
    says = "gated results are those of sm_90a's dense kernels: gate the product afterwards"
    assert says in ac.explain(dataclasses.replace(REQUEST, arch=arch)).reason


def test_other_alignments_are_refused_with_the_reason() -> None:
    odd = dataclasses.replace(REQUEST, shape=GemmShape(16, 64, 33), dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR)
    assert "cells is refused: its alignment is wider than that of the operands" in ac.explain(odd).reason
    assert ac.explain(dataclasses.replace(REQUEST, shape=GemmShape(16, 64, 33))).kernel is not None  # copied first


def _gated_product(request: GatedGemmRequest, host: dict[str, np.ndarray], kind: Any = np.float64) -> np.ndarray:
    """In `kind`, without this package's GEMM."""
    a, b = host["a"].astype(kind) * host.get("scale_a", kind(1)), host["b"].astype(kind) * host.get("scale_b", kind(1))
    product = kind(request.epilogue.alpha) * (a @ b)
    gate = ACTIVATIONS[str(request.epilogue.activation)](product[..., 0::2])
    return gate * product[..., 1::2] * host.get("scale_d", kind(1))


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST, FP8, dataclasses.replace(REQUEST, shape=GemmShape(16, 64, 32, 3)),
        dataclasses.replace(REQUEST, epilogue=GemmEpilogue(0.5, activation="relu")),
        dataclasses.replace(REQUEST, shape=GemmShape(16, 0, 32)), dataclasses.replace(FP8, shape=GemmShape(0, 64, 32)),
    ],
)  # fmt: skip
def test_actors_serve_requests(request_: GatedGemmRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    given = operands_of(request_)
    host = {name: fetch(array) for name, array in given.items()}
    answer = fetch(ac.CutlassActor(8, planner=gpu.plan).handle(ac.CutlassMsg.GatedGemm(request_, given)))
    assert answer.shape[-1] == request_.shape.n // 2
    np.testing.assert_allclose(answer.astype(np.float64), _gated_product(request_, host), rtol=2.0**-8, atol=1e-30)


def test_a_bound_weight_is_refitted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    request = dataclasses.replace(REQUEST, binding="w")
    a, first, second = (RANDOM.integers(-2, 3, mn).astype(ml_dtypes.bfloat16) for mn in ((16, 32), *2 * ((32, 64),)))
    actor = ac.CutlassActor(8, planner=gpu.plan)
    answers = [actor.handle(ac.CutlassMsg.GatedGemm(request, {"a": place(a), "b": place(first)}))]
    actor.handle(ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), second)))
    answers.append(actor.handle(ac.CutlassMsg.GatedGemm(request, {"a": place(a)})))
    for answer, b in zip(answers, (first, second), strict=True):
        wanted = _gated_product(request, {"a": a, "b": b})
        np.testing.assert_allclose(fetch(answer).astype(np.float64), wanted, rtol=2.0**-8)


@pytest.mark.parametrize("request_", [REQUEST, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("batch", [1, 3])
def test_random_operands_are_checked(request_: GatedGemmRequest, activation: str, batch: int) -> None:
    """What float32 computes passes; an element that is off by more than its rounding does not."""
    request = dataclasses.replace(
        request_, shape=GemmShape(40, 66, 64, batch), epilogue=GemmEpilogue(0.5, activation=activation)
    )
    operation = operation_of(request)
    arrays = operation.random_arrays(request, np.random.default_rng(1))
    out = arrays["out"]
    with np.errstate(over="ignore"):
        out[...] = _gated_product(request, arrays, np.float32)
    probe = operation.probe(request, arrays)
    largest = np.unravel_index(np.argmax(np.abs(out.astype(np.float32))), out.shape)
    for wrong in (0, 1):
        out[largest] *= 1 + wrong / 32
        check = Check(probe.limits(request.math))
        for part in probe.parts():
            probe.compare(part, check)
        probe.finish(check)
        assert check.mismatches == wrong
