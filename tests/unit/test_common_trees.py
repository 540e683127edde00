"""Trees that presets have: what kernels compute several of them, and that `default` serves what README begins with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import atomr_cutlass as ac
import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import epilogue as evt
from atomr_cutlass.generator import trees
from atomr_cutlass.generator.epilogue.common import COMMON_ACTIVATIONS, COMMON_ROWS, common_of, form_of
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED, SCALED_COMMON, epilogue_id, is_common, with_source
from atomr_cutlass.generator.matrix import expand, supports, with_epilogue
from atomr_cutlass.generator.render import render

HEADERS = Path(__file__).parents[2] / "cpp" / "include" / "atomr_cutlass"


def _epilogue(tree: evt.EpilogueVisitorTree, source: str = "") -> str:
    program = tree.program
    if source:
        program = with_source(program, [operand.name for operand in tree.inputs].index(source))
    return epilogue_id(LINEAR, program)


@pytest.mark.parametrize("activation", COMMON_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [row_type for row_type in COMMON_ROWS if row_type])
def test_activations_of_sums_have_a_form_whatever_their_order(dtype: D, activation: str) -> None:
    applied = getattr(evt, activation) if activation else lambda x: x
    operands = {"bias": evt.Operand("row", dtype), "rest": evt.Operand("matrix", D.BF16)}
    for function in (
        lambda acc, bias, rest: applied(acc + bias + rest),
        lambda acc, bias, rest: applied(rest + acc + bias),
        lambda acc, bias, rest: applied((bias + rest) + acc),
    ):
        tree = evt.trace(function, operands).tree
        form = form_of(_epilogue(tree, "rest"))
        assert form is not None
        assert [tree.inputs[form.row or 0].name, tree.inputs[form.source or 0].name] == ["bias", "rest"]
        assert form.told == COMMON_ROWS[dtype] + 4 * COMMON_ACTIVATIONS.index(activation)
        # A matrix that is not loaded as the C operand has no place.
        assert form_of(_epilogue(tree)) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda acc, bias: evt.relu(acc) + bias,
        lambda acc, bias: evt.relu(acc + bias + bias),
        lambda acc, bias: evt.gelu(evt.relu(acc + bias)),
        lambda acc, bias: acc * bias + bias,
        lambda acc, bias: (acc + bias) * bias,
        lambda acc, bias: evt.relu(acc) * bias,
        lambda acc, bias: acc + bias * bias,
        lambda acc, bias: acc * acc + bias,
        lambda acc, bias: evt.hardswish(acc + bias),
        lambda acc, bias: {"out": evt.relu(acc + bias), "kept": evt.mask(acc + bias)},
        lambda acc, bias: {"out": evt.relu(acc + bias), "largest": evt.total_amax(acc + bias)},
        lambda acc, bias: {"out": acc + bias, "largest": evt.total_max(acc + bias)},
    ],
)
def test_other_trees_have_none(function: object) -> None:
    tree = evt.trace(function, {"bias": evt.Operand("row", D.F32)}).tree
    assert form_of(_epilogue(tree)) is None


def test_a_column_or_an_odd_type_has_none() -> None:
    for operand in (evt.Operand("column", D.F32), evt.Operand("row", D.I8), evt.Operand("scalar", D.F32)):
        tree = evt.trace(lambda acc, bias: evt.relu(acc + bias), {"bias": operand}).tree
        assert form_of(_epilogue(tree)) is None


_FACTORS = {
    "bias": evt.Operand("row", D.BF16),
    "rows": evt.Operand("column", D.F32),
    "columns": evt.Operand("row", D.F32),
    "scale": evt.Operand("scalar", D.F32),
}


def _quantized(acc: evt.Value, bias: evt.Value, rows: evt.Value, columns: evt.Value, scale: evt.Value) -> object:
    made = evt.silu(columns * (acc * rows) + bias)
    return {"out": evt.cast(scale * made, D.F8E4M3), "largest": evt.total_amax(made)}


@pytest.mark.parametrize(
    ("function", "scales"),
    [
        (lambda acc, columns: acc * columns, {"scale_b": "columns"}),
        (lambda acc, columns, rows: acc * rows * columns, {"scale_a": "rows", "scale_b": "columns"}),
        (lambda acc, scale: evt.cast(acc * scale, D.F8E4M3), {"scale_d": "scale"}),
        (lambda acc: {"out": acc, "largest": evt.total_amax(acc)}, {"amax": "largest"}),
        (_quantized, {"scale_a": "rows", "scale_b": "columns", "scale_d": "scale", "amax": "largest"}),
    ],
)
def test_factors_are_loaded_as_scales_where_the_operands_have_none(
    function: Callable[..., object], scales: dict[str, str]
) -> None:
    tree = evt.trace(function, {name: _FACTORS[name] for name in list(inspect.signature(function).parameters)[1:]}).tree
    form = form_of(_epilogue(tree))
    assert form is not None
    names = [operand.name for operand in (*tree.inputs, *tree.outputs)]
    assert {name: names[number] for name, number in form.scales.items()} == scales
    assert common_of(_epilogue(tree)) == SCALED_COMMON
    assert form_of(epilogue_id(SCALED, tree.program)) is None


def test_the_header_has_the_same_numbers() -> None:
    """What the arguments say means the same to both."""
    cases = re.findall(r"case (\d): return f\((\w+)\{\}\)", (HEADERS / "epilogue_common.h").read_text())
    named = {int(number): re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for number, name in cases}
    assert named == dict(enumerate(COMMON_ACTIVATIONS[1:], 1))
    kinds = re.search(r"enum \{ (kToldNothing.*?) \}", (HEADERS / "epilogue_tree.h").read_text())
    assert kinds is not None
    numbers = dict(part.split(" = ") for part in kinds[1].split(", "))
    told = {None: "kToldNothing", D.F32: "kToldFloat", D.F16: "kToldHalf", D.BF16: "kToldBfloat"}
    assert {told[dtype]: str(number) for dtype, number in COMMON_ROWS.items()} | {"kToldBits": "2"} == numbers


def test_their_sources_have_the_header_and_the_form_of_activations() -> None:
    for key in expand("full", ac.SmArch):
        if is_common(key.epilogue):
            source, _ = render(key)
            assert '#include "atomr_cutlass/epilogue_common.h"' in source
            assert f"CommonTree<{'false' if key.d is D.F32 else 'true'}>" in source
            assert (f">, {'true' if key.epilogue == SCALED_COMMON else 'false'}, atomr_cutlass::") in source


def test_named_trees_compile_on_some_kernel() -> None:
    """None of the names stands for nothing."""
    plain = [(1, key) for key in expand("full", [ac.SmArch.SM90A]) if key.epilogue in ("lc", "scaled")]
    for name, tree in trees.NAMED.items():
        made = [with_epilogue(base, *tree(base)) for base in trees.bases(plain)]
        assert any(map(supports, made)), name


def _explained(monkeypatch: pytest.MonkeyPatch, request: object, preset: str = "default") -> ac.Explanation:
    fake_table.install(monkeypatch, fake_table.rows_of(preset, [ac.SmArch.SM90A]))
    return ac.explain(request, jit="off")  # type: ignore[arg-type]


def _readme() -> dict[str, object]:
    arch = ac.SmArch.SM90A
    f32, bf16, shape = D.F32, D.BF16, ac.GemmShape(512, 384, 256)
    rest = evt.EvtBuilder().add_bias("bias", dtype=f32).add_matrix("residual", dtype=bf16).build()
    gelu = evt.EvtBuilder().add_bias("bias", dtype=f32).activation("gelu").build()

    def gemm(**options: object) -> ac.GemmRequest:
        return ac.GemmRequest(shape, dtype=bf16, arch=arch, **options)  # type: ignore[arg-type]

    return {
        "gemm": gemm(),
        "c": gemm(epilogue=ac.GemmEpilogue(alpha=0.5, beta=1.0)),
        "f32": gemm(out_dtype=f32),
        "bias and gelu": gemm(epilogue=ac.GemmEpilogue(tree=gelu)),
        "bias and residual": gemm(epilogue=ac.GemmEpilogue(tree=rest)),
        "groups": ac.GroupedGemmRequest(
            ac.GroupedGemmShape([ac.GemmShape(200, 384, 256), ac.GemmShape(312, 384, 256)]), dtype=bf16, arch=arch
        ),
        "convolution": ac.ConvFwdRequest(
            ac.ConvShape.nhwc(1, 28, 28, 64, 32, 3, 3, padding=1),
            dtype=D.F16,
            arch=arch,
            epilogue=ac.GemmEpilogue(activation="relu"),
        ),
        "fp8": ac.GemmRequest(shape, dtype=D.F8E4M3, layout_b=ac.GemmLayout.COL_MAJOR, arch=arch, scaling="vector"),
    }


@pytest.mark.parametrize("name", _readme())
def test_default_serves_the_products_of_readme_s_first_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = _explained(monkeypatch, _readme()[name])
    assert explanation.source == "prebuilt", explanation.reason


def test_what_default_lacks_is_named_with_the_preset_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = evt.EvtBuilder().add_bias("bias", dtype=D.F32).activation("silu").build()
    request = ac.GemmRequest(
        ac.GemmShape(512, 384, 256), dtype=D.F16, arch=ac.SmArch.SM90A, epilogue=ac.GemmEpilogue(tree=tree)
    )
    said = _explained(monkeypatch, request, "smoke").reason
    assert re.search("_common_[0-9a-f]{10} does too; it is in preset default: build with CMAKE_ARGS", said)


def test_a_kernel_of_one_tree_serves_before_a_common_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = evt.EvtBuilder().add_matrix("residual", dtype=D.BF16).build()
    request = ac.GemmRequest(
        ac.GemmShape(4096, 4096, 4096), dtype=D.BF16, layout_b=ac.GemmLayout.COL_MAJOR, arch=ac.SmArch.SM90A,
        epilogue=ac.GemmEpilogue(tree=tree),
    )  # fmt: skip
    explanation = _explained(monkeypatch, request, "full")
    assert explanation.kernel is not None
    assert "_evt_" in explanation.kernel
    assert any("_common_" in name for name, _ in explanation.candidates)


@pytest.mark.parametrize(("preset", "dtype"), [("default", D.F16), ("full", D.F16), ("full", D.BF16)])
def test_a_convolution_of_64_filters_wastes_none_of_a_tile(
    preset: str, dtype: D, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prebuilt kernel of 128 columns took twice as long as the one that was compiled for the problem before."""
    tree = evt.EvtBuilder().add_bias("bias", dtype=dtype).add_matrix("residual", dtype=dtype).activation("relu")
    shape = ac.ConvShape(64, 56, 56, 64, 64, 3, 3, padding=(1, 1))
    request = ac.ConvFwdRequest(shape, dtype=dtype, arch=ac.SmArch.SM90A, epilogue=ac.GemmEpilogue(tree=tree.build()))
    explanation = _explained(monkeypatch, request, preset)
    assert explanation.source == "prebuilt", explanation.reason
    assert explanation.kernel is not None
    assert "128x64x64" in explanation.kernel
