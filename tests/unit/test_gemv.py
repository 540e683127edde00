"""`gemv`: the reference, requests and what they are refused, kernels over a fake GPU, and the actor."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import gemv_cases
import golden_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmEpilogue, GemmLayout, GemvRequest, GemvShape, SmArch
from atomr_cutlass.generator.families import gemv as family
from atomr_cutlass.generator.key import COLUMN
from atomr_cutlass.generator.matrix import cells, preset_of, supports
from atomr_cutlass.pipeline import estimate
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.reference import ACTIVATIONS
from fake_gpu import FakeGpu, fetch, operands_of, place

CASES_FILE = "gemv_cases.py"
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome(CASES_FILE, tmp_path_factory.mktemp("gpu"), gemv_cases.ARCH, 120)


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


def test_the_model_knows_the_threads_of_a_block() -> None:
    assert estimate.model.constants["GEMV_THREADS"] == family.THREADS


# ----------------------------------------------------------------------------------------------------------------------
# The function, on the reference backend
# ----------------------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(7)


def numbers(*shape: int) -> Array:
    """Float32, of which products and sums are exact in float64."""
    return RANDOM.standard_normal(shape).astype(np.float32)


def product(a: Array, x: Array) -> Array:
    """In float64, without this package."""
    result: Array = np.einsum("...mk,...k->...m", a.astype(np.float64), x.astype(np.float64))
    return result


@pytest.mark.parametrize(
    ("batch_a", "batch_x"), [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (3,)), ((2, 3), (2, 3))]
)
def test_batches_broadcast(batch_a: tuple[int, ...], batch_x: tuple[int, ...]) -> None:
    a, x = numbers(*batch_a, 5, 7), numbers(*batch_x, 7)
    got = ac.gemv(a, x, backend="reference")
    assert got.shape == (*np.broadcast_shapes(batch_a, batch_x), 5)
    np.testing.assert_allclose(got, product(a, x), rtol=1e-6, atol=1e-6)


def test_everything_that_follows_the_product() -> None:
    a, x, c, bias = numbers(2, 5, 7), numbers(2, 7), numbers(5), numbers(5)
    out = np.empty((2, 5), np.float32)
    got = ac.gemv(a, x, c, out=out, alpha=0.5, beta=2.0, bias=bias, activation="silu", backend="reference")
    assert got is out
    np.testing.assert_allclose(out, ACTIVATIONS["silu"](0.5 * product(a, x) + 2.0 * c + bias), rtol=1e-6, atol=1e-6)


def test_scales_are_numbers() -> None:
    a, x, c, bias = numbers(5, 7), numbers(7), numbers(5), numbers(5)
    got = ac.gemv(a, x, c, alpha=0.5, beta=2.0, scale_a=3, scale_b=np.float32(0.25), scale_d=4.0, backend="reference")
    np.testing.assert_allclose(got, 4 * (0.375 * product(a, x) + 2.0 * c), rtol=1e-6, atol=1e-6)
    # The reference scales what follows the product too.
    got = ac.gemv(a, x, bias=bias, activation="silu", scale_b=0.5, scale_d=4.0, backend="reference")
    np.testing.assert_allclose(got, 4 * ACTIVATIONS["silu"](0.5 * product(a, x) + bias), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_element_types(dtype: Any) -> None:
    a, x = numbers(4, 64).astype(dtype), numbers(64).astype(dtype)
    got = ac.gemv(a, x, backend="reference")
    assert got.dtype == dtype
    wide = ac.gemv(a, x, out_dtype=D.F32, backend="reference")
    np.testing.assert_allclose(wide, product(a, x), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got, wide.astype(dtype))


def test_nothing_is_read_where_alpha_is_0() -> None:
    a, x, c = np.full((3, 4), np.nan, np.float32), numbers(4), numbers(3)
    np.testing.assert_array_equal(ac.gemv(a, x, c, alpha=0.0, beta=1.0, backend="reference"), c)
    assert ac.gemv(numbers(3, 0), numbers(0), backend="reference").tolist() == [0, 0, 0]


def test_an_epilogue_sees_a_row() -> None:
    a, x, scale, factor, other = numbers(3, 5, 7), numbers(3, 7), numbers(5), numbers(3, 1), numbers(3, 5)

    def computed(acc: Any, scale: Any, factor: Any, other: Any) -> Any:
        return acc * scale * factor + other

    got = ac.gemv(a, x, epilogue=computed, scale=scale, factor=factor, other=other, backend="reference")
    np.testing.assert_allclose(got, product(a, x) * scale * factor + other, rtol=1e-5, atol=1e-5)
    tree = ac.EvtBuilder().mask_store("bits").aux_store("kept").reduce("total", "scalar").build()
    made = ac.gemv(a, x, epilogue=tree, backend="reference")
    assert {name: values.shape for name, values in made.items()} == {
        "out": (3, 5), "bits": (3, 1), "kept": (3, 5), "total": (1,)
    }  # fmt: skip
    np.testing.assert_array_equal(made["out"], made["kept"])
    np.testing.assert_allclose(made["total"], [product(a, x).sum()], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"a": numbers(7)}, ac.InvalidOperandError, r"a has shape \(7,\) and x \(7,\); expected \(..., M, K\)"),
        ({"x": numbers(8)}, ac.InvalidOperandError, r"K disagrees: a \(5, 7\) has 7 columns, x \(8,\) has 8 elements"),
        ({"a": numbers(2, 5, 7), "x": numbers(3, 7)}, ac.InvalidOperandError, r"\(2,\) of a and \(3,\) of x do not"),
        ({"x": numbers(7).astype(np.float16)}, ac.InvalidOperandError, "a is f32 and x is f16: both must have one"),
        ({"c": numbers(4), "beta": 1.0}, ac.InvalidOperandError, r"c has shape \(4,\); expected \(5,\)"),
        ({"c": numbers(5)}, ac.InvalidOperandError, "c is given but beta is 0"),
        ({"bias": numbers(2, 5)}, ac.InvalidOperandError, r"bias has shape \(2, 5\); expected \(5,\)"),
        ({"out": np.empty((1, 5), np.float32)}, ac.InvalidOperandError, r"out has shape \(1, 5\); expected \(5,\)"),
        ({"out": np.empty(5, np.float16), "out_dtype": D.F32}, ac.InvalidOperandError, "out is f16, but out_dtype"),
        ({"scale": numbers(5)}, ac.InvalidOperandError, "gemv has no such argument"),
        ({"scale_a": numbers(1)}, ac.UnsupportedError, "scale_a is a ndarray: gemv kernels .* read no scales"),
        ({"scale_d": True}, ac.InvalidOperandError, "scale_d is a bool"),
        ({"scale_d": 2.0, "epilogue": lambda acc: acc}, ac.UnsupportedError, "scale_d is a number, and what follows"),
        (
            {"epilogue": ac.EvtBuilder().add_bias("scale_b").build()},
            ac.InvalidOperandError,
            "an operand 'scale_b', as the product does",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    given = {"a": numbers(5, 7), "x": numbers(7), "backend": "reference", **arguments}
    with pytest.raises(error, match=says):
        ac.gemv(**given)


def test_out_may_be_c_and_nothing_else() -> None:
    a, x = numbers(7, 7), numbers(7)
    c = numbers(7)
    want = product(a, x) + c
    np.testing.assert_allclose(ac.gemv(a, x, c, out=c, beta=1.0, backend="reference"), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ac.InvalidOperandError, match="out overlaps x"):
        ac.gemv(a, x, out=x, backend="reference")


# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------

REQUEST = GemvRequest(GemvShape(16, 32), dtype=D.BF16, arch=SmArch.SM90A)


def test_requests_with_other_values_have_other_keys() -> None:
    others = (
        {"shape": GemvShape(16, 32, 2)}, {"dtype": D.F16}, {"arch": SmArch.SM80}, {"binding": "w"},
        {"layout_a": GemmLayout.COL_MAJOR}, {"out_dtype": D.F32}, {"epilogue": GemmEpilogue(bias=True)},
    )  # fmt: skip
    keys = {dataclasses.replace(REQUEST, **other).plan_key() for other in others}
    assert len(keys | {REQUEST.plan_key()}) == len(others) + 1
    assert REQUEST.plan_key().shape == (16, 32, 1)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"dtype": D.F64}, ac.UnsupportedError, "no gemv kernel multiplies f64; valid: f16, bf16, f32"),
        ({"dtype": D.TF32}, ac.UnsupportedError, "no gemv kernel multiplies tf32"),
        ({"out_dtype": D.I32}, ac.UnsupportedError, "bf16 operands give"),
        ({"shape": (16, 32)}, ac.InvalidOperandError, "expected a GemvShape"),
        ({"layout_a": "row"}, ac.InvalidOperandError, "layout_a is 'row'"),
        (
            {"epilogue": GemmEpilogue(tree=ac.EvtBuilder().add_bias("x").build())},
            ac.InvalidOperandError, "operand 'x', which is the name of one of the product's",
        ),
    ],
)  # fmt: skip
def test_requests_that_nothing_serves_are_refused(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        dataclasses.replace(REQUEST, **changes)


@pytest.mark.parametrize("value", [-1, 2**31, 1.0, True, None])
def test_extents_are_integers(value: Any) -> None:
    for name in ("m", "k", "batch"):
        with pytest.raises(ac.InvalidOperandError, match=rf"GemvShape\.{name} is"):
            GemvShape(**({"m": 1, "k": 1} | {name: value}))


@pytest.mark.parametrize("arch", SmArch)
@pytest.mark.parametrize("layout", GemmLayout)
def test_every_arch_has_a_kernel(arch: SmArch, layout: GemmLayout) -> None:
    for dtype in family.TYPES:
        for shape in (GemvShape(4096, 4096), GemvShape(33, 7, 5)):
            request = GemvRequest(shape, dtype=dtype, arch=arch, layout_a=layout)
            explained = ac.explain(request, jit="off")
            wanted = f"sgemv_{dtype.cutlass_name}_"
            assert explained.kernel is None or wanted in explained.kernel
            source, name = request.render_cu()
            assert wanted in name
            assert "atomr_cutlass::Gemv<" in source


def test_a_kernel_for_each_epilogue() -> None:
    tree = ac.EvtBuilder().aux_store("kept").reduce("total", "scalar").build()
    for epilogue in (GemmEpilogue(bias=True, activation="gelu"), GemmEpilogue(tree=tree, beta=1.0)):
        source, _ = dataclasses.replace(REQUEST, epilogue=epilogue).render_cu()
        assert "struct Tree" in source
        assert "TreeEpilogue<atomr_cutlass::Tree, false, atomr_cutlass::AnyLanes>" in source


def test_cells_differ_in_what_the_family_says() -> None:
    for arch in SmArch:
        found = [(tier, key) for tier, key in cells([arch]) if key.op == "gemv"]
        assert all(supports(key) for _, key in found)
        assert {(key.a, key.layout_b, key.align_b) for _, key in found if preset_of(key) == "full"} == {
            (dtype, layout, align) for dtype in family.TYPES for layout in "rc" for align in (1, 128 // dtype.bits)
        }
    key = family.cell(SmArch.SM80, D.F16, COLUMN, 8)
    for changes, says in (
        ({"align_b": 2}, "aligned to 8 elements, or its single"), ({"tile": (1, 16, 256)}, "differ in types"),
        ({"b": D.BF16}, "of one type, not f16 by bf16"), ({"layout_d": "r"}, "row-major in cells"),
        ({"a": D.F64, "b": D.F64}, "multiplies f16, bf16 and f32"),
    ):  # fmt: skip
        status = supports(dataclasses.replace(key, **changes))
        assert not status
        assert re.search(says, status.reason) or says == "row-major in cells", status.reason


# ----------------------------------------------------------------------------------------------------------------------
# The actor
# ----------------------------------------------------------------------------------------------------------------------

TREE = ac.EvtBuilder().add_matrix("other", dtype=D.BF16).mask_store("bits").reduce("sums", "column").build()


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"layout_a": GemmLayout.COL_MAJOR}, {"shape": GemvShape(16, 32, 3)},
        {"epilogue": GemmEpilogue(2.0, 3.0)}, {"epilogue": GemmEpilogue(bias=True, activation="relu")},
        {"epilogue": GemmEpilogue(tree=TREE), "shape": GemvShape(24, 32, 3)}, {"shape": GemvShape(0, 32)},
    ],
)  # fmt: skip
def test_actors_serve_requests(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    request = dataclasses.replace(REQUEST, **changes)
    given = operands_of(request)
    host = {name: fetch(array) for name, array in given.items()}
    answer = ac.CutlassActor(8, planner=gpu.plan).handle(ac.CutlassMsg.Gemv(request, given))
    acc = request.epilogue.alpha * product(host["a"], host["x"])
    if request.epilogue.beta != 0:
        acc = acc + request.epilogue.beta * host["c"].astype(np.float64)
    if "bias" in host:
        acc = np.maximum(acc + host["bias"].astype(np.float64), 0)
    if "other" in host:
        acc = acc + host["other"].astype(np.float64)
    results = answer if isinstance(answer, dict) else {"out": answer}
    np.testing.assert_array_equal(fetch(results["out"]).astype(np.float64), acc.astype(ml_dtypes.bfloat16))
    if "sums" in results:
        np.testing.assert_array_equal(fetch(results["sums"]), acc.sum(-1, keepdims=True))


def test_a_bound_matrix_is_refitted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    request = dataclasses.replace(REQUEST, binding="w")
    first, second, x = (RANDOM.integers(-2, 3, shape).astype(ml_dtypes.bfloat16) for shape in ((16, 32), (16, 32), 32))
    actor = ac.CutlassActor(8, planner=gpu.plan)
    given = {"a": place(first), "x": place(x)}
    answers = [actor.handle(ac.CutlassMsg.Gemv(request, given))]
    actor.handle(ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), second)))
    answers.append(actor.handle(ac.CutlassMsg.Gemv(request, {"x": place(x)})))
    for answer, a in zip(answers, (first, second), strict=True):
        np.testing.assert_array_equal(fetch(answer).astype(np.float64), product(a, x))


def test_random_operands_are_checked() -> None:
    """A right result passes, and one wrong element does not."""
    for changes in ({}, {"epilogue": GemmEpilogue(0.5, 2.0, bias=True, activation="gelu")}):
        request = dataclasses.replace(REQUEST, shape=GemvShape(40, 64, 2), **changes)
        operation = operation_of(request)
        arrays = operation.random_arrays(request, np.random.default_rng(1))
        probe = operation.probe(request, arrays)
        for part in probe.parts():
            probe.compute(part)
        for wrong in (0, 1):
            arrays["out"][1, 7] += wrong * 100
            check = fake_gpu_check(probe, request)
            assert check.mismatches == wrong


def fake_gpu_check(probe: Any, request: GemvRequest) -> Any:
    """What the probe finds wrong."""
    from atomr_cutlass.pipeline.probe import Check

    check = Check(probe.limits(request.math))
    for part in probe.parts():
        probe.compare(part, check)
    probe.finish(check)
    return check
