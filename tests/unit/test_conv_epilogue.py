"""Epilogue trees of convolutions: what they compute on the reference, what kernels are asked for, what is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_table
import numpy_gpu
from atomr_cutlass import (
    ConvDgradRequest,
    ConvFwdRequest,
    ConvLayout,
    ConvShape,
    ConvWgradRequest,
    EvtBuilder,
    GemmEpilogue,
    SmArch,
)
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.epilogue import Operand, cast, column_sum, relu, row_sum, total_amax, trace, validate, where
from atomr_cutlass.errors import InvalidOperandError, KernelNotFoundError, UnsupportedError
from atomr_cutlass.generator.epilogue import common
from atomr_cutlass.generator.epilogue.lower import LINEAR, epilogue_id, split
from atomr_cutlass.generator.families.conv_sm90 import conv_sm90
from atomr_cutlass.generator.matrix import supports
from atomr_cutlass.generator.render import render
from atomr_cutlass.ops.conv2d import reference as conv_reference
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP, formulations
from atomr_cutlass.pipeline import devices, select, verify
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.search import Candidate

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((2, 6, 5, 8)).astype(np.float32)
W = RANDOM.standard_normal((16, 3, 3, 8)).astype(np.float32) / 8
DY = RANDOM.standard_normal((2, 6, 5, 16)).astype(np.float32)
BIAS = RANDOM.standard_normal(16).astype(np.float32)
OTHER = RANDOM.standard_normal((2, 6, 5, 16)).astype(np.float32)
PIXELS = RANDOM.standard_normal((2, 6, 5, 1)).astype(np.float32)
PLAIN = conv_reference.convolution(FPROP, X, W, padding=1, out_dtype=D.F64)

H100 = devices.imagined(SmArch.SM90A)
SHAPE = ConvShape.nhwc(2, 14, 14, 64, 96, 3, 3, padding=1)
BLOCK = EvtBuilder().add_bias("bias", dtype=D.F32).add_matrix("residual", dtype=D.BF16).activation("relu").build()


def _nchw(array: Any) -> Any:
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 else array


def _block(acc: Any, bias: Any, pixels: Any, other: Any) -> Any:
    return relu(acc * pixels + bias + other)


def _call(layout: str = "nhwc", x: Any = X, w: Any = W, **arguments: Any) -> Any:
    turned = _nchw if layout == "nchw" else np.asarray
    given = {name: turned(array) if isinstance(array, np.ndarray) else array for name, array in arguments.items()}
    return ac.conv2d(turned(x), turned(w), padding=1, layout=layout, backend="reference", **given)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_operands_of_all_kinds(layout: str) -> None:
    made = _call(layout, epilogue=_block, bias=BIAS, pixels=PIXELS, other=OTHER)
    made = made.transpose(0, 2, 3, 1) if layout == "nchw" else made
    np.testing.assert_allclose(made, np.maximum(PLAIN * PIXELS + BIAS + OTHER, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_results_by_name(layout: str) -> None:
    def several(acc: Any, scale: Any) -> Any:
        y = relu(acc)
        return {"out": cast(y * scale, D.I8), "before": cast(acc, D.F32), "positive": ac.epilogue.mask(acc > 0),
                "sums": row_sum(y), "pixels": column_sum(y), "amax": total_amax(y)}  # fmt: skip

    made = _call(layout, epilogue=several, scale=np.full(1, 8.0, np.float32), out_dtype=D.I8)
    rectified = np.maximum(PLAIN, 0.0)
    back = (lambda array: array.transpose(0, 2, 3, 1)) if layout == "nchw" else np.asarray
    assert made["out"].dtype == np.int8
    np.testing.assert_array_equal(back(made["out"]), np.clip(np.rint(rectified * 8.0), -128, 127))
    np.testing.assert_allclose(back(made["before"]), PLAIN, rtol=1e-6)
    assert back(made["positive"]).shape == (2, 6, 5, 2)
    bits = np.unpackbits(back(made["positive"]), -1, bitorder="little")
    np.testing.assert_array_equal(bits.astype(bool), PLAIN > 0)
    np.testing.assert_allclose(made["sums"], rectified.sum((0, 1, 2)), rtol=1e-5)
    assert made["pixels"].shape == (2, 6, 5)
    np.testing.assert_allclose(made["pixels"], rectified.sum(-1), rtol=1e-5)
    np.testing.assert_allclose(made["amax"], [rectified.max()], rtol=1e-6)


def test_gradients_and_arrays_for_results() -> None:
    def through(acc: Any, mask: Any) -> Any:
        dx = where(mask, acc, 0.0)
        return {"out": dx, "sums": row_sum(dx)}

    bits = RANDOM.integers(0, 256, (2, 6, 5, 1), np.uint8)
    plain = conv_reference.convolution(DGRAD, DY, W, X.shape, padding=1, out_dtype=D.F64)
    out, sums = np.full_like(X, np.nan), np.full(8, np.nan, np.float32)
    made = ac.conv2d_dgrad(
        DY, W, X.shape, padding=1, epilogue=through, mask=bits, sums=sums, out=out, backend="reference"
    )
    assert made["out"] is out
    assert made["sums"] is sums
    kept = np.where(np.unpackbits(bits, -1, bitorder="little").astype(bool), plain, 0.0)
    np.testing.assert_allclose(out, kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, kept.sum((0, 1, 2)), rtol=1e-5, atol=1e-4)


def test_an_operand_may_be_called_c_where_there_is_no_c() -> None:
    made = _call(epilogue=lambda acc, c: acc * c, c=OTHER)
    np.testing.assert_array_equal(made, _call(epilogue=lambda acc, other: acc * other, other=OTHER))
    with pytest.raises(InvalidOperandError, match="calls an operand 'c', as the product does"):
        _call(epilogue=EvtBuilder().add_matrix("c", dtype=D.F32).build(), c=OTHER, beta=1.0)


def test_c_and_scalars_come_before_the_tree() -> None:
    made = _call(epilogue=lambda acc, factor: relu(acc) * factor, factor=0.5, alpha=2.0, beta=-1.0, c=OTHER)
    np.testing.assert_allclose(made, np.maximum(2.0 * PLAIN - OTHER, 0.0) * 0.5, rtol=1e-5, atol=1e-5)


def test_no_images() -> None:
    made = _call(x=X[:0], epilogue=lambda acc: {"out": acc, "sums": row_sum(acc)})
    assert made["out"].shape == (0, 6, 5, 16)
    np.testing.assert_array_equal(made["sums"], np.zeros(16, np.float32))


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"epilogue": _block, "bias": BIAS}, UnsupportedError, "no operand|missing|pixels"),
        ({"bias": BIAS, "epilogue": lambda acc: acc, "activation": "relu"}, InvalidOperandError, "activation"),
        ({"residual": OTHER}, InvalidOperandError, "residual"),
        ({"epilogue": BLOCK, "bias": BIAS, "residual": OTHER[:1]}, InvalidOperandError, "residual has shape"),
        ({"epilogue": lambda acc, bias: acc + bias, "bias": BIAS[:8]}, InvalidOperandError, "bias has shape"),
        ({"epilogue": lambda acc, c: acc + c, "c": BIAS, "beta": 1.0}, InvalidOperandError, "c has shape|reads c|'c'"),
        ({"epilogue": lambda acc, s: acc * s, "s": np.ones((2, 1, 1, 16), np.float32)}, InvalidOperandError, "pixels"),
        ({"epilogue": lambda acc: acc, "scale_d": 2.0}, UnsupportedError, "scale_d is a number"),
        ({"epilogue": lambda acc: cast(acc, D.F16), "out_dtype": D.F32}, InvalidOperandError, "casts D to f16"),
        ({"epilogue": lambda acc: acc if acc > 0 else -acc}, UnsupportedError, "test_conv_epilogue.py:"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises((error, InvalidOperandError), match=says):
        _call(**arguments)


def test_pixels_with_gaps_are_refused() -> None:
    wide = np.zeros((2, 6, 7, 16), np.float32)[:, :, 1:6]
    with pytest.raises(UnsupportedError, match="its pixels are not evenly spaced"):
        _call(epilogue=lambda acc, other: acc + other, other=wide)


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("stored", np.zeros((60, 16), np.float32), r"stored has shape \(60, 16\); the epilogue writes \(2, 6, 5, 16\)"),
        ("pixels", np.zeros(60, np.float32), r"pixels has shape \(60,\); the epilogue writes \(2, 6, 5\)"),
        ("pixels", np.broadcast_to(np.zeros(1, np.float32), (2, 6, 5)), "pixels is read-only|pixels has strides"),
        ("stored", X, "stored has shape"),
    ],
)
def test_arrays_for_results_that_do_not_fit(name: str, array: Any, says: str) -> None:
    out = np.full((2, 6, 5, 16), 7.0, np.float32)
    with pytest.raises(InvalidOperandError, match=says):
        _call(epilogue=_several, out=out, **{name: array})
    assert (out == 7.0).all()


def _several(acc: Any) -> Any:
    return {"out": acc, "stored": cast(acc, D.F32), "pixels": column_sum(acc)}


def test_results_that_share_memory() -> None:
    out = np.full((2, 6, 5, 16), 7.0, np.float32)
    with pytest.raises(InvalidOperandError, match="stored overlaps out"):
        _call(epilogue=_several, out=out, stored=out)
    with pytest.raises(InvalidOperandError, match="sums overlaps bias"):
        _call(epilogue=lambda acc, bias: {"out": acc + bias, "sums": row_sum(acc)}, bias=BIAS, sums=BIAS)
    same = OTHER.copy()
    assert _call(epilogue=lambda acc, other: acc + other, other=same, out=same) is same
    np.testing.assert_allclose(same, PLAIN + OTHER, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2, 4), (8, 8)])
def test_operands_of_other_ranks(shape: tuple[int, ...]) -> None:
    """What has an element for each pixel is no row, even if there are as many channels."""
    x, w = np.ones((1, 2, 4, 8), np.float32), np.ones((8, 1, 1, 8), np.float32)
    given = np.zeros(shape, np.float32)
    with pytest.raises(InvalidOperandError, match="given has shape"):
        ac.conv2d(x, w, epilogue=lambda acc, given: acc + given, given=given, backend="reference")


def test_activations_that_are_no_names() -> None:
    for function, arguments in ((ac.conv2d, (X, W)), (ac.gemm, (BIAS[None], BIAS[:, None]))):
        for activation in (["relu"], 3):
            with pytest.raises(InvalidOperandError, match="activation is"):
                function(*arguments, activation=activation)


def test_kernels_that_the_table_lacks_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    missed: list[Any] = []
    monkeypatch.setattr(select.kernels, "record_miss", missed.append)
    problem = ConvFwdRequest(SHAPE, dtype=D.BF16, arch=SmArch.SM90A, epilogue=GemmEpilogue(tree=BLOCK)).problem(0)
    with pytest.raises(KernelNotFoundError, match=r"_common_.* does too; it is in preset full"):
        select.choose(ConvSearch(problem, H100, SmArch.SM90A), jit="off")
    assert [key.epilogue for key in missed] == [formulations(problem)[0].epilogue]


@pytest.mark.parametrize(("known", "checked"), [(None, False), ("", True)])
def test_under_capture_only_what_is_known_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, known: str | None, checked: bool
) -> None:
    monkeypatch.setattr(validate, "_known", {})
    monkeypatch.setattr(validate.files, "recall_validation", lambda _identity: known)
    monkeypatch.setattr(validate._core, "capturing", lambda _device, _stream: True)
    monkeypatch.setattr(devices, "driver", lambda: "580.1")
    key = conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 128), epilogue=common.bias(D.BF16, "gelu"))
    candidate = Candidate(key, fake_table.row(key), 0.0, None)
    assert validate.require(candidate, candidate.key.epilogue, H100, stream=5, in_background=False) is checked
    monkeypatch.setattr(validate.files, "recall_validation", lambda _identity: "out[0, 0] is 1, expected 2")
    monkeypatch.setattr(validate, "_known", {})
    with pytest.raises(UnsupportedError, match="computes its epilogue wrongly"):
        validate.require(candidate, candidate.key.epilogue, H100, stream=5, in_background=False)


def test_a_validation_is_of_one_code_and_one_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another compiler, header or driver may compute something else: it is validated again."""
    known: dict[str, str] = {}
    installed = {"driver": "580.1", "image": "ab"}
    monkeypatch.setattr(validate, "_known", {})
    monkeypatch.setattr(validate.files, "recall_validation", known.get)
    monkeypatch.setattr(validate.files, "remember_validation", known.__setitem__)
    monkeypatch.setattr(validate, "_differences", lambda *_: [])
    monkeypatch.setattr(devices, "driver", lambda: installed["driver"])
    monkeypatch.setattr(validate.kernels, "image_digest", lambda _key, _device: installed["image"])
    key = conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 128), epilogue=common.bias(D.BF16, "gelu"))
    rows = [replace(fake_table.row(key), content=f"01 4.2-23 nvcc {version}") for version in ("13.0.88", "13.1.5")]
    compiled, built, rebuilt = (Candidate(key, info, 0.0, None) for info in (None, *rows))

    def validations(candidate: Candidate[None]) -> int:
        assert validate.require(candidate, candidate.key.epilogue, H100, stream=None, in_background=False)
        return len(known)

    assert [validations(candidate) for candidate in (compiled, built, rebuilt, compiled, built)] == [1, 2, 3, 3, 3]
    installed["image"] = "cd"
    assert [validations(candidate) for candidate in (compiled, built)] == [4, 4]
    installed["driver"] = "590.1"
    assert [validations(candidate) for candidate in (compiled, built, rebuilt)] == [5, 6, 7]


def test_trees_of_other_kernels_are_refused() -> None:
    request = ConvFwdRequest(SHAPE, dtype=D.BF16, arch=SmArch.SM80, epilogue=GemmEpilogue(tree=BLOCK))
    with pytest.raises(UnsupportedError, match="those of sm_90a's TMA kernels"):
        request.render_cu()
    grouped = dataclasses.replace(request, arch=SmArch.SM90A, shape=dataclasses.replace(SHAPE, groups=2))
    with pytest.raises(UnsupportedError, match="convolve one group"):
        grouped.render_cu()
    with pytest.raises(UnsupportedError, match="dgrad without a stride"):
        ConvDgradRequest(STRIDED, dtype=D.BF16, arch=SmArch.SM90A, epilogue=GemmEpilogue(tree=BLOCK)).render_cu()


STRIDED = ConvShape.nhwc(2, 15, 15, 64, 96, 3, 3, stride=2, padding=1)
GROUPED = ConvShape.nhwc(2, 14, 14, 64, 96, 3, 3, padding=1, groups=2)
PLAIN_TREES = {
    "nothing": (EvtBuilder().build(), GemmEpilogue()),
    "activation": (EvtBuilder().activation("silu").build(), GemmEpilogue(activation="silu")),
    "bias": (EvtBuilder().add_bias("row", dtype=D.BF16).build(), GemmEpilogue(bias=True)),
    "both": (
        EvtBuilder().add_bias("row", dtype=D.BF16).activation("gelu").build(),
        GemmEpilogue(bias=True, activation="gelu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_TREES)
@pytest.mark.parametrize(
    ("kind", "shape", "arch"),
    [
        (ConvFwdRequest, SHAPE, SmArch.SM80),
        (ConvFwdRequest, SHAPE, SmArch.SM90A),
        (ConvFwdRequest, GROUPED, SmArch.SM90A),
        (ConvDgradRequest, STRIDED, SmArch.SM90A),
    ],
    ids=["sm_80", "sm_90a", "groups", "strided dgrad"],
)
def test_trees_of_bias_and_activation_run_on_kernels_without_trees(
    kind: Any, shape: ConvShape, arch: SmArch, name: str
) -> None:
    tree, plain = PLAIN_TREES[name]
    with_tree, without = (
        kind(shape, dtype=D.BF16, arch=arch, epilogue=how) for how in (GemmEpilogue(tree=tree), plain)
    )
    assert with_tree.render_cu() == without.render_cu()
    best = select.choose(ConvSearch(with_tree.problem(0), devices.imagined(arch), arch), backend="jit")
    assert split(best.key.epilogue)[1] == ""
    assert (best.formulation.problem.bias is not None) is plain.bias


@pytest.mark.parametrize("arch", [SmArch.SM80, SmArch.SM90A])
@pytest.mark.parametrize("kind", [ConvFwdRequest, ConvDgradRequest])
def test_filters_of_one_tap_have_the_trees_of_gemm(kind: Any, arch: SmArch) -> None:
    tree = EvtBuilder().add_bias("row", dtype=D.F32).activation("silu").reduce("sums", "row").build()
    device, shape = devices.imagined(arch), ConvShape.nhwc(8, 28, 28, 64, 256, 1, 1)
    problem = kind(shape, dtype=D.BF16, arch=arch, epilogue=GemmEpilogue(tree=tree)).problem(0)
    found = select.rank_cells(ConvSearch(problem, device, arch))
    convolutions = [candidate for candidate in found if candidate.formulation.product is None]
    assert len(found) > len(convolutions)
    assert bool(convolutions) is (arch is SmArch.SM90A)  # which has convolutions with trees too
    # What does nothing is a plain GEMM.
    problem = kind(shape, dtype=D.BF16, arch=arch, epilogue=GemmEpilogue(tree=EvtBuilder().build())).problem(0)
    products = [each for each in select.rank_cells(ConvSearch(problem, device, arch)) if each.formulation.product]
    assert {split(candidate.key.epilogue)[1] for candidate in products} == {""}
    taps = dataclasses.replace(shape, r=3, s=3, padding=(1, 1))
    problem = kind(taps, dtype=D.BF16, arch=SmArch.SM90A, epilogue=GemmEpilogue(tree=tree)).problem(0)
    search = ConvSearch(problem, devices.imagined(SmArch.SM90A), SmArch.SM90A)
    assert not any(candidate.formulation.product for candidate in select.rank_cells(search))


def test_a_bias_that_kernels_without_trees_do_not_load_remains_a_tree() -> None:
    tree = EvtBuilder().add_bias("row", dtype=D.F32).activation("relu").build()
    other = ConvFwdRequest(SHAPE, dtype=D.BF16, arch=SmArch.SM90A, epilogue=GemmEpilogue(tree=tree)).problem(0)
    assert formulations(other) == [other]
    tree, _ = PLAIN_TREES["both"]
    how = GemmEpilogue(tree=tree, beta=1.0)
    with_c = ConvFwdRequest(SHAPE, dtype=D.BF16, arch=SmArch.SM90A, epilogue=how).problem(0)
    assert formulations(with_c) == [with_c]
    scattered = ConvFwdRequest(SHAPE, dtype=D.BF16, arch=SmArch.SM90A, epilogue=GemmEpilogue(tree=tree)).problem(0)
    (row,) = scattered.fusion.inputs
    row = dataclasses.replace(row, strides=(2,))
    scattered = dataclasses.replace(scattered, fusion=dataclasses.replace(scattered.fusion, inputs=(row,)))
    assert formulations(scattered) == [scattered]


def test_rules_of_trees() -> None:
    key = conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 128), epilogue=common.bias(D.BF16, "gelu"))
    assert supports(key)
    assert "struct Tree" in render(key)[0]
    wgrad = conv_sm90("conv2d_wgrad", D.BF16, D.BF16, (128, 128), epilogue=common.bias(D.BF16))
    assert "no epilogue" in supports(wgrad).reason
    narrow = dataclasses.replace(key, d=D.I8, align_d=16)
    assert supports(narrow)
    assert "give" in supports(dataclasses.replace(narrow, epilogue="lc")).reason
    assert (
        "no epilogue program" in supports(dataclasses.replace(key, epilogue=epilogue_id(LINEAR, "evt:nonsense"))).reason
    )
    assert "unknown epilogue" in supports(dataclasses.replace(key, epilogue=f"scaled+{key.epilogue}")).reason


# ----------------------------------------------------------------------------------------------------------------------
# Requests


@pytest.mark.parametrize("layout", list(ConvLayout))
def test_a_matrix_like_the_result_comes_by_the_way_of_c(layout: ConvLayout) -> None:
    request = ConvFwdRequest(SHAPE, dtype=D.BF16, arch=SmArch.SM90A, layout=layout, epilogue=GemmEpilogue(tree=BLOCK))
    problem = request.problem(0)
    best, plain = formulations(problem)
    assert [operand.name for operand in problem.fusion.inputs][best.source] == "residual"
    assert plain.source is None
    assert select.choose(ConvSearch(problem, H100), record=False).key.epilogue == best.epilogue
    assert "input:source:bf16" in best.epilogue
    with_c = dataclasses.replace(request, epilogue=GemmEpilogue(tree=BLOCK, beta=1.0)).problem(0)
    assert formulations(with_c) == [with_c]


@pytest.mark.parametrize("layout", list(ConvLayout))
def test_slots_of_requests(layout: ConvLayout) -> None:
    def function(acc: Any, bias: Any, gate: Any, per_pixel: Any) -> Any:
        y = where(gate, acc * per_pixel + bias, 0.0)
        return {"out": y, "pixels": column_sum(y), "sums": row_sum(y), "before": cast(acc, D.F16)}

    kinds = {
        "bias": Operand("row", D.F32), "gate": Operand("mask", None), "per_pixel": Operand("column", D.F32)
    }  # fmt: skip
    tree = trace(function, kinds, out_dtype=D.BF16).tree
    request = ConvFwdRequest(SHAPE, dtype=D.BF16, layout=layout, epilogue=GemmEpilogue(tree=tree, beta=1.0))
    nchw = layout is ConvLayout.NCHW
    found = {slot.name: (slot.specs[0].shape, slot.written) for slot in operation_of(request).operands(request)}
    image = (2, 96, 14, 14) if nchw else (2, 14, 14, 96)
    assert found.pop("x") == ((2, 64, 14, 14) if nchw else (2, 14, 14, 64), False)
    assert found.pop("w") == ((96, 64, 3, 3) if nchw else (96, 3, 3, 64), False)
    assert found.pop("c") == (image, False)
    assert found.pop("out") == (image, True)
    wanted = {
        "bias": ((96,), False), "pixels": ((2, 14, 14), True), "sums": ((96,), True), "before": (image, True),
        "gate": ((2, 12, 14, 14) if nchw else (2, 14, 14, 12), False),
        "per_pixel": ((2, 1, 14, 14) if nchw else (2, 14, 14, 1), False),
    }  # fmt: skip
    assert found == wanted


def test_bias_and_c_together_are_a_tree() -> None:
    request = ConvFwdRequest(
        SHAPE, dtype=D.F16, arch=SmArch.SM90A, epilogue=GemmEpilogue(bias=True, beta=1.0, activation="gelu")
    )
    assert select.choose(ConvSearch(request.problem(0), H100), record=False).key.epilogue == common.bias(D.F16, "gelu")
    assert [slot.name for slot in operation_of(request).operands(request)] == ["x", "w", "c", "bias", "out"]
    alone = dataclasses.replace(request, epilogue=GemmEpilogue(bias=True, activation="gelu"))
    assert formulations(alone.problem(0))[0].bias is not None
    assert formulations(request.problem(0))[0].bias is None
    assert request.plan_key() != alone.plan_key()


def test_requests_that_are_refused() -> None:
    with pytest.raises(InvalidOperandError, match="an operand 'x', which is the name of one of the"):
        ConvFwdRequest(SHAPE, dtype=D.F16, epilogue=GemmEpilogue(tree=EvtBuilder().add_bias("x", dtype=D.F16).build()))
    with pytest.raises(InvalidOperandError, match="casts D to f16; out_dtype says f32"):
        ConvFwdRequest(
            SHAPE, dtype=D.F16, out_dtype=D.F32, epilogue=GemmEpilogue(tree=EvtBuilder().cast(D.F16).build())
        )
    with pytest.raises(UnsupportedError, match="the gradient of a filter has no epilogue"):
        ConvWgradRequest(SHAPE, dtype=D.F16, epilogue=GemmEpilogue(tree=PLAIN_TREES["both"][0]))


@pytest.mark.parametrize("layout", list(ConvLayout))
@pytest.mark.parametrize("kind", [ConvFwdRequest, ConvDgradRequest])
def test_a_request_is_tried_and_compared(kind: Any, layout: ConvLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = (
        EvtBuilder()
        .add_bias("bias", dtype=D.F32)
        .activation("silu")
        .reduce("sums", "row")
        .aux_store("y", D.F32)
        .build()
    )
    shape = ConvShape.nhwc(2, 6, 5, 8, 16, 3, 3, padding=1)
    request = kind(shape, dtype=D.BF16, layout=layout, epilogue=GemmEpilogue(tree=tree, alpha=0.25))
    numpy_gpu.install(monkeypatch)
    assert verify.run(request).ok
    named = kind(shape, dtype=D.BF16, epilogue=GemmEpilogue(tree=EvtBuilder().add_bias("c", dtype=D.F32).build()))
    assert verify.run(named).ok
    both = kind(shape, dtype=D.BF16, layout=layout, epilogue=GemmEpilogue(bias=True, beta=0.5, activation="relu"))
    assert verify.run(both).ok
