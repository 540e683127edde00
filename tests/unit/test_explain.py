"""`explain` of every operation, over tables of our own making: which cell, which rewrite, and what would add it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

import fake_table
from atomr_cutlass import (
    ConvDgradRequest,
    ConvFwdRequest,
    ConvShape,
    ConvWgradRequest,
    EvtBuilder,
    GemmEpilogue,
    GemmLayout,
    GemmRequest,
    GemmShape,
    GroupedGemmRequest,
    GroupedGemmShape,
    SmArch,
    explain,
    heuristics,
)
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.epilogue.lower import epilogue_id, is_common
from atomr_cutlass.generator.matrix import ARCHS, expand, with_epilogue
from atomr_cutlass.jit import kernels
from atomr_cutlass.ops.gemm.kernels import GemmSearch, nonempty
from atomr_cutlass.pipeline import devices, select, table
from atomr_cutlass.pipeline.explanation import Explanation, Refused
from atomr_cutlass.pipeline.verification import verification
from fake_table import H200

SHAPE = ConvShape.nhwc(8, 28, 28, 64, 128, 3, 3, padding=1)
GROUPS = GroupedGemmShape([GemmShape(256, 512, 256), GemmShape(0, 512, 256)])
FPROP, DGRAD, WGRAD = (
    kind(SHAPE, dtype=D.BF16, arch=SmArch.SM90A) for kind in (ConvFwdRequest, ConvDgradRequest, ConvWgradRequest)
)
GROUPED = GroupedGemmRequest(GROUPS, dtype=D.BF16, arch=SmArch.SM90A)
FP8 = GemmRequest(
    GemmShape(512, 512, 512), dtype=D.F8E4M3, arch=SmArch.SM90A, layout_b=GemmLayout.COL_MAJOR, scaling="vector"
)
BIASED = GemmRequest(
    GemmShape(512, 512, 512), dtype=D.BF16, arch=SmArch.SM90A, layout_b=GemmLayout.COL_MAJOR,
    epilogue=GemmEpilogue(bias=True, activation="tanh"),
)  # fmt: skip
BLOCK = EvtBuilder().add_bias("bias").activation("relu").mask_store("bits").add_matrix("residual", D.BF16).build()
TREES: dict[str, GemmRequest] = {
    "bias": BIASED,
    "tree": replace(BIASED, epilogue=GemmEpilogue(tree=BLOCK)),
    "scales": replace(BIASED, dtype=D.F8E4M3, scaling="vector"),
}
REQUESTS: dict[str, Any] = {
    "fprop": FPROP,
    "dgrad": DGRAD,
    "wgrad": WGRAD,
    "grouped": GROUPED,
    "vectors": FP8,
    "blocks": replace(FP8, scaling="block"),
    "tensors": replace(FP8, scaling="tensor", quantized=True),
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "no NVIDIA driver")
    monkeypatch.setattr(kernels, "where", lambda _key, _target: None)


@pytest.fixture
def full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    archs = sorted({arch for archs in ARCHS.values() for arch in archs}, key=lambda arch: arch.value)
    fake_table.install(monkeypatch, fake_table.rows_of("full", archs))


@pytest.fixture
def empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, [])


def archs_of(request: Any) -> list[SmArch]:
    return [SmArch.SM90A, SmArch.SM100] if isinstance(request, GemmRequest) else list(ARCHS[request.plan_key().op])


CASES = [(name, arch) for name, request in REQUESTS.items() for arch in archs_of(request)]


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_a_built_kernel_is_explained(name: str, arch: SmArch) -> None:
    request = replace(REQUESTS[name], arch=arch)
    told = explain(request)
    op = request.plan_key().op
    assert told.kernel in {key.name for key in expand("full", [arch]) if key.op == op}
    assert (told.source, told.arch) == ("prebuilt", arch)
    assert told.candidates[0][0] == told.kernel
    assert told.estimate_us == pytest.approx(told.candidates[0][1])
    assert told.verified == str(verification(next(key for key in expand("full", [arch]) if key.name == told.kernel)))
    assert re.fullmatch(r"the best estimate of \d+ cells that match types, layouts and alignment", told.reason)
    assert (told.nearest, told.knob, told.pack, told.compile_seconds) == (None, None, None, None)


@pytest.mark.usefixtures("empty_table")
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_a_kernel_that_would_be_compiled_is_explained(name: str, arch: SmArch) -> None:
    request = replace(REQUESTS[name], arch=arch)
    told = explain(request)
    assert told.source == "jit"
    assert told.kernel is not None
    if request.plan_key().op != "conv2d_wgrad":  # where slices of K may be faster than the cell that needs none
        assert told.kernel == request.render_cu()[1]
    assert told.compile_seconds is not None
    assert told.compile_seconds > 0
    assert "it would be compiled first" in str(told)
    assert told.nearest
    assert f"-DATOMR_CUTLASS_ARCHS={arch.target}" in (told.knob or "")
    assert f"`atomr-cutlass build keys.jsonl --arch {arch.target} -o model.pack`" in (told.pack or "")
    assert f"to add it: {told.knob}\nor: {told.pack}" in str(told)


@pytest.mark.parametrize("asked", [GemmRequest(GemmShape(512, 512, 512), dtype=D.BF16), FPROP], ids=["gemm", "fprop"])
@pytest.mark.parametrize("policy", ["auto", "off"])
def test_ptx_that_the_driver_is_too_old_for_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, asked: Any, policy: str
) -> None:
    rows = [fake_table.row(key, ptx=True, cuda_version=13010) for key in expand("full", [SmArch.SM80])]
    fake_table.install(monkeypatch, rows)
    monkeypatch.setattr(devices, "problem", lambda: "")
    gpu = replace(H200, cuda_version=13010)
    monkeypatch.setattr(devices, "get", lambda _=0: gpu)
    request = replace(asked, arch=None)
    assert explain(request, jit=policy).source == "prebuilt"
    gpu = replace(H200, cuda_version=13000)
    told = explain(request, jit=policy)
    assert told.source == ("jit" if policy == "auto" else "")
    reason = "is there as PTX of CUDA 13.1, which this driver (CUDA 13.0) does not translate: update the driver"
    assert reason in (" ".join(told.notes) if policy == "auto" else told.reason)


@pytest.mark.usefixtures("empty_table")
@pytest.mark.parametrize("name", REQUESTS)
def test_a_kernel_that_must_not_be_compiled_is_named(name: str) -> None:
    told = explain(REQUESTS[name], jit="off")
    assert (told.kernel, told.source, told.cached, told.candidates) == (None, "", None, ())
    assert told.nearest
    assert told.nearest in told.reason
    assert told.knob is not None
    assert "pip install" in told.knob


@pytest.mark.usefixtures("empty_table")
def test_explaining_is_no_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    missed: list[object] = []
    monkeypatch.setattr(kernels, "record_miss", missed.append)
    for request in REQUESTS.values():
        for policy in ("auto", "off"):
            explain(request, jit=policy)
    assert missed == []


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (
            "fprop",
            {
                "n": 8, "h": 28, "w": 28, "c": 64, "k": 128, "r": 3, "s": 3, "p": 28, "q": 28, "stride": [1, 1],
                "padding": [[1, 1], [1, 1]], "dilation": [1, 1], "groups": 1,
            },
        ),
        ("grouped", {"groups": [[256, 512, 256], [0, 512, 256]]}),
        ("vectors", {"m": 512, "n": 512, "k": 512, "batch": 1}),
    ],
)  # fmt: skip
def test_an_explanation_is_json(name: str, shape: dict[str, Any]) -> None:
    request = REQUESTS[name]
    values = json.loads(json.dumps(explain(request).to_dict()))
    assert values["shape"] == shape
    assert (values["op"], values["dtype"], values["arch"]) == (request.plan_key().op, request.dtype.value, "sm_90a")


# ----------------------------------------------------------------------------------------------------------------------
# Notes
# ----------------------------------------------------------------------------------------------------------------------


def notes(request: Any) -> str:
    return "\n".join(explain(request).notes)


CASTS = "a rewrite: fp8 operands cast to bf16, which holds them exactly"


@pytest.mark.parametrize("fixture", ["full_table", "empty_table"])
def test_rewrites_are_noted(request: pytest.FixtureRequest, fixture: str) -> None:
    request.getfixturevalue(fixture)
    for described in (DGRAD, WGRAD):
        assert CASTS in notes(replace(described, dtype=D.F8E4M3))
    assert CASTS in notes(replace(FPROP, dtype=D.F8E4M3, arch=SmArch.SM80))
    assert "a rewrite: fp8 operands cast to f16" in notes(replace(DGRAD, dtype=D.F8E5M2, out_dtype=D.F16))
    assert "a rewrite" not in notes(FPROP)
    many = ConvShape.nhwc(64, 56, 56, 64, 64, 3, 3, padding=1)
    assert "slices of K added up in float32, then cast" in notes(replace(WGRAD, shape=many))
    said = notes(replace(WGRAD, shape=many, dtype=D.F8E4M3))
    assert CASTS in said
    assert "; " in said  # one after the other


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize("layout_a", GemmLayout)
def test_products_of_nothing_have_the_kernel_that_plans_take(layout_a: GemmLayout) -> None:
    request = GemmRequest(GemmShape(256, 320, 0), dtype=D.BF16, arch=SmArch.SM90A, layout_a=layout_a)
    search = GemmSearch(nonempty(request.problem(0)), devices.imagined(SmArch.SM90A))
    assert explain(request).kernel == select.choose(search).key.name


@pytest.mark.usefixtures("full_table")
def test_a_kernel_of_a_rewrite_is_the_one_that_multiplies() -> None:
    told = explain(replace(DGRAD, dtype=D.F8E4M3))
    assert "dgrad" in (told.kernel or "")
    assert "bf16" in (told.kernel or "")
    assert told.to_dict()["dtype"] == "e4m3"


def test_a_rewrite_needs_its_casts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fake_table.rows_of("full", [SmArch.SM90A])
    fake_table.install(monkeypatch, [row for row in rows if row.key.op != "cast"])
    request = replace(DGRAD, dtype=D.F8E4M3)
    told = explain(request)
    assert told.source == "prebuilt"
    assert "cutlass_cast_e4m3_to_bf16" in (told.nearest or "")
    assert told.cached is None
    assert told.compile_seconds
    assert "a kernel beside it would be compiled first" in str(told)
    monkeypatch.setattr(kernels, "where", lambda _key, _target: "disk")
    told = explain(request)
    assert (told.cached, told.compile_seconds) == ("disk", 0)
    told = explain(request, jit="off")
    assert told.kernel is None
    assert "cutlass_cast_e4m3_to_bf16" in told.reason
    assert told.nearest
    assert told.nearest.startswith("cutlass_cast_e4m3_to_bf16")


def test_a_copy_that_the_table_lacks_is_what_is_to_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """`default` has the product of int8 with a row-major B, and `full` the copy that comes before."""
    fake_table.install(monkeypatch, fake_table.rows_of("default", [SmArch.SM90A]))
    request = GemmRequest(GemmShape(4096, 4096, 4096), dtype=D.I8, arch=SmArch.SM90A)
    told = explain(request, jit="off")
    assert told.kernel is None
    assert told.nearest
    assert told.nearest.startswith("cutlass_transpose_s8_to_s8")
    assert (
        f"the table lacks {told.nearest}, and it must not be compiled: it is in preset full; build with" in told.reason
    )
    assert "-DATOMR_CUTLASS_PRESET=full -DATOMR_CUTLASS_ARCHS=90a" in (told.knob or "")
    assert "asked for by" not in told.reason  # nobody asks for more than an explanation
    built = explain(request)
    assert (built.source, built.nearest, built.knob, built.pack) == ("prebuilt", told.nearest, told.knob, told.pack)
    assert re.fullmatch(r"the best estimate of [1-9]\d* cells that match types, layouts and alignment", built.reason)
    assert built.candidates[0] == (built.kernel, built.estimate_us)


@pytest.mark.parametrize(("fixture", "where"), [("full_table", "the table"), ("empty_table", "the matrix")])
def test_older_cells_on_newer_gpus_are_noted(request: pytest.FixtureRequest, fixture: str, where: str) -> None:
    request.getfixturevalue(fixture)
    said = f"an sm80-generation cell: {where} has none with TMA that serves this request"
    strided = ConvShape.nhwc(8, 28, 28, 64, 128, 3, 3, padding=1, stride=2)
    divided = ConvShape.nhwc(8, 28, 28, 64, 128, 3, 3, padding=1, groups=4)
    odd = GemmRequest(GemmShape(63, 65, 67), dtype=D.I8, arch=SmArch.SM90A, layout_b=GemmLayout.COL_MAJOR)
    for described in (replace(DGRAD, shape=strided), replace(FPROP, shape=divided), odd):
        assert said in notes(described)
        assert "sm80-generation" not in notes(replace(described, arch=SmArch.SM80))  # there is nothing newer there
    for described in (FPROP, DGRAD, GROUPED, FP8):
        assert "sm80-generation" not in notes(described)


@pytest.mark.usefixtures("empty_table")
def test_a_kernel_of_no_preset_has_no_knob() -> None:
    told = explain(replace(FPROP, arch=SmArch.SM80, epilogue=GemmEpilogue(activation="leaky_relu")))
    assert told.source == "jit"
    assert (told.knob is None) == (told.kernel not in {key.name for key in expand("full", [SmArch.SM80])})


# ----------------------------------------------------------------------------------------------------------------------
# Epilogue trees
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize("arch", [SmArch.SM80, SmArch.SM90A, SmArch.SM100])
@pytest.mark.parametrize("name", TREES)
def test_kernels_of_trees_are_compiled(name: str, arch: SmArch) -> None:
    if name == "scales" and arch is SmArch.SM80:
        return
    request = replace(TREES[name], arch=arch)
    told = explain(request)
    assert (told.source, told.kernel) == ("jit", request.render_cu()[1])
    assert told.nearest == told.kernel
    assert "epilogue" in told.axes
    assert (told.knob, told.cached) == (None, None)
    assert f"`atomr-cutlass build keys.jsonl --arch {arch.target} -o model.pack`" in (told.pack or "")
    assert told.compile_seconds is not None
    said = str(told)
    assert f"to add it: {told.pack}" in said
    assert f"the epilogue is a tree ({request.tree.id}) whose kernel is in no preset: it is compiled" in said  # type: ignore[union-attr]
    assert "sm80-generation" not in said
    refused = explain(request, jit="off")
    assert refused.kernel is None
    assert "_evt_" in (refused.nearest or "")
    assert f"{refused.nearest} would: it is in no preset: {refused.pack}" in refused.reason


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize("arch", [SmArch.SM80, SmArch.SM90A])
def test_bias_and_activation_of_groups_are_explained(arch: SmArch) -> None:
    request = replace(GROUPED, arch=arch, epilogue=GemmEpilogue(bias=True, activation="tanh"))
    told = explain(request)
    assert (told.source, told.kernel) == ("jit", request.render_cu()[1])
    assert "sm80-generation" not in str(told)
    assert explain(request, jit="off").kernel is None


@pytest.mark.usefixtures("full_table")
def test_trees_of_groups_are_explained() -> None:
    with pytest.raises(UnsupportedError, match="grouped kernels store D alone"):
        replace(GROUPED, epilogue=GemmEpilogue(tree=BLOCK))
    tree = EvtBuilder().add_bias("bias", dtype="bf16").activation("silu").quantize("e4m3", scale="scale").build()
    request = replace(GROUPED, epilogue=GemmEpilogue(tree=tree))
    told = explain(request)
    assert (told.source, told.kernel) == ("jit", request.render_cu()[1])
    assert "e4m3" in told.kernel
    assert explain(request, jit="off").kernel is None
    older = explain(replace(request, arch=SmArch.SM80))
    assert older.kernel is None
    assert "no group's number" in older.reason


def test_kernels_of_common_epilogues_are_in_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fake_table.rows_of("full", [SmArch.SM90A])
    served = {row.key.name for row in rows if row.key.op == "gemm" and is_common(row.key.epilogue)}
    request = GemmRequest(
        GemmShape(4096, 4096, 4096), dtype=D.BF16, arch=SmArch.SM90A, layout_b=GemmLayout.COL_MAJOR,
        epilogue=GemmEpilogue(bias=True, activation="gelu"),
    )  # fmt: skip
    fake_table.install(monkeypatch, rows)
    told = explain(request)
    assert (told.source, told.kernel in served, "tree" in str(told)) == ("prebuilt", True, False)
    fake_table.install(monkeypatch, [])
    assert explain(request, jit="off").knob


def test_a_tables_kernels_of_trees_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fake_table.rows_of("full", [SmArch.SM90A])
    request = TREES["tree"]
    epilogue = epilogue_id("lc", BLOCK.program)
    cells = [row.key for row in rows if row.key.op == "gemm" and row.key.a is row.key.d is D.BF16]
    fused = [fake_table.row(with_epilogue(key, epilogue, D.BF16), pack="mine") for key in cells]
    fake_table.install(monkeypatch, [*rows, *fused])
    # The residual would be the C operand of a kernel that may not be compiled.
    told = explain(request, jit="off")
    assert (told.source, told.kernel in {row.name for row in fused}) == ("pack mine", True)
    assert "a tree" not in str(told)
    assert explain(replace(request, epilogue=GemmEpilogue(beta=1.0, tree=BLOCK))).kernel == told.kernel


@pytest.mark.usefixtures("empty_table")
def test_older_cells_with_trees_are_noted_where_there_is_nothing_newer() -> None:
    odd = replace(TREES["bias"], shape=GemmShape(63, 65, 67), dtype=D.I8, layout_b=GemmLayout.COL_MAJOR)
    assert "an sm80-generation cell: the matrix has none with TMA that serves this request" in notes(odd)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (replace(GROUPED, shape=GroupedGemmShape([GemmShape(0, 8, 8)])), "the result is empty: nothing is launched"),
        (replace(FP8, shape=GemmShape(0, 8, 8)), "the result is empty"),
        (replace(FP8, shape=GemmShape(8, 8, 0)), "K is 0: there is nothing for scales to multiply"),
        (replace(TREES["bias"], shape=GemmShape(8, 8, 0)), "K is 0: there is nothing for"),
        (replace(TREES["tree"], shape=GemmShape(8, 0, 8)), "the result is empty"),
        (replace(TREES["tree"], layout_c=GemmLayout.COL_MAJOR), "masks lie along the rows of D"),
        (replace(GROUPED, dtype=D.F8E4M3), "contiguous along K"),
        (
            replace(DGRAD, shape=ConvShape.nhwc(8, 28, 28, 64, 128, 3, 3, stride=2, dilation=2)),
            "kernels of strided dgrad have no dilation",
        ),
    ],
)
def test_refusals_are_explained(request_: Any, says: str) -> None:
    told = explain(request_)
    assert (told.kernel, told.nearest, told.knob, told.pack) == (None, None, None, None)
    assert says in told.reason
    assert says in str(told)


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(InvalidOperandError, match=r"expected a GemmRequest, Gated.* or ConvWgradRequest"):
        explain(SHAPE)  # type: ignore[arg-type]
    for request in REQUESTS.values():
        with pytest.raises(InvalidOperandError, match="the request must name its arch"):
            explain(replace(request, arch=None))


@pytest.mark.parametrize(
    "request_",
    [
        GemmRequest(GemmShape(2147483632, 2147483632, 2147483632), dtype=D.TF32, arch=SmArch.SM90A),
        ConvFwdRequest(ConvShape(n=2**20, h=2**20, w=2**20, c=1024, k=1024, r=3, s=3), dtype=D.F16, arch=SmArch.SM90A),
    ],
    ids=["gemm", "conv"],
)
def test_extents_beyond_64_bits_are_no_type_error(request_: Any) -> None:
    """The model counts with 64 bits; what no memory holds is as long as it can say."""
    try:
        told = explain(request_)
    except UnsupportedError:
        return
    assert told.reason


def test_a_dict_of_an_explanation_has_lists() -> None:
    values = explain(GemmRequest(GemmShape(64, 64, 64), dtype=D.BF16, arch=SmArch.SM90A), jit="off").to_dict()
    assert {type(values[name]) for name in ("axes", "notes", "candidates", "refused")} == {list}


# ----------------------------------------------------------------------------------------------------------------------
# Kernels that do not serve a request
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize("name", REQUESTS)
def test_kernels_that_do_not_serve_a_request_are_counted_by_reason(name: str) -> None:
    request = REQUESTS[name]
    told = explain(request)
    counts = [refusal.kernels for refusal in told.refused]
    op, rows = request.plan_key().op, table.rows()
    assert counts == sorted(counts, reverse=True)
    assert len({refusal.reason for refusal in told.refused}) == len(counts) > 1
    assert sum(counts) < sum(row.key.op == op for row in rows)
    names = {row.name for row in rows if row.key.op == op}
    assert {refusal.first for refusal in told.refused} <= names - {name for name, _ in told.candidates}
    elsewhere = sum(row.key.op == op and row.key.arch is not SmArch.SM90A for row in rows)
    assert ("it is not for sm_90a", elsewhere) in {refusal[:2] for refusal in told.refused}
    first = told.refused[0]
    assert f"\nof {sum(counts)} kernels that do not serve it, {first.kernels}: {first.reason}; " in str(told)
    assert told.to_dict()["refused"][0] == {"reason": first.reason, "kernels": first.kernels, "first": first.first}


def test_a_kernel_has_the_reason_of_the_form_that_it_comes_closest_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands a product of 63 rows wants other layouts of D^T's kernels, swapped it wants a smaller alignment."""
    request = GemmRequest(GemmShape(63, 65, 67), dtype=D.BF16, arch=SmArch.SM90A)
    cells = [key for key in expand("full", [SmArch.SM90A]) if (key.op, key.a, key.d) == ("gemm", D.BF16, D.BF16)]
    alike = [
        key
        for key in cells
        if (key.epilogue, key.layout_a, key.layout_b, key.layout_d) == ("lc", "r", "r", "r") and key.align_a == 8
    ]
    fake_table.install(monkeypatch, [fake_table.row(key) for key in alike])
    told = explain(request, jit="off")
    assert told.refused == (("its alignment is wider than that of the operands", len(alike), alike[0].name),)
    assert str(told).endswith(f"of {len(alike)} kernels that do not serve it, {len(alike)}: {told.refused[0].reason}")


def test_where_the_matrix_serves_nothing_its_kernels_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    request = GemmRequest(GemmShape(64, 64, 64), dtype=D.I8, arch=SmArch.SM80)
    counted = []
    for rows in ([], fake_table.rows_of("full", [SmArch.SM80]), fake_table.rows_of("full", [SmArch.SM90A])):
        fake_table.install(monkeypatch, rows)
        told = explain(request)
        assert told.kernel is None
        counted.append({refusal.reason: refusal.kernels for refusal in told.refused})
    cells, same, more = counted
    assert cells["its layouts differ"] == sum(
        key.op == "gemm" and key.d is D.I32 for key in expand("full", [SmArch.SM80])
    )
    assert same == cells
    assert more.pop("it is not for sm_80") > 0
    assert more == cells


@pytest.mark.usefixtures("empty_table")
def test_of_an_empty_table_there_is_nothing_to_count() -> None:
    for request in REQUESTS.values():
        assert explain(request).refused == explain(request, jit="off").refused == ()
    assert "do not serve it" not in str(explain(FPROP))


def test_a_helper_that_is_lacking_has_its_own_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fake_table.rows_of("full", [SmArch.SM90A])
    casts = [row for row in rows if row.key.op == "cast" and row.key.a is not D.F8E4M3]
    fake_table.install(monkeypatch, [row for row in rows if row.key.op != "cast"] + casts)
    request = replace(DGRAD, dtype=D.F8E4M3)
    told = explain(request, jit="off")
    assert told.refused == (("its element types or form differ", len(casts), casts[0].name),)
    assert "its element types or math mode differ" in {refusal.reason for refusal in explain(request).refused}


def test_what_the_gpu_cannot_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [key for key in expand("full", [SmArch.SM90A]) if key.op == "gemm"]
    fake_table.install(monkeypatch, [fake_table.row(key, shared_bytes=1 << 20) for key in cells])
    request = replace(BIASED, epilogue=GemmEpilogue())
    assert "it needs more shared memory than the GPU has" in {refusal.reason for refusal in explain(request).refused}
    fake_table.install(monkeypatch, [fake_table.row(key) for key in cells])
    reasons = {refusal.reason for refusal in explain(replace(request, batch_invariant=True)).refused}
    assert "its reduction is not that of batch-invariant calls" in reasons


@pytest.mark.usefixtures("full_table")
def test_a_named_kernel_that_is_passed_over_has_its_reason() -> None:
    cells = [key for key in expand("full", [SmArch.SM90A]) if key.op == "gemm"]
    other = next(key for key in cells if key.a is D.F64)
    request = replace(BIASED, epilogue=GemmEpilogue())
    heuristics.put(request, other)
    try:
        told = explain(request)
        assert told.kernel != other.name
        said = f"{other.name}, which heuristics name for the request, is passed over: its element types differ"
        assert said in told.notes
        heuristics.put(request, named := next(key for key in cells if key.name == told.candidates[-1][0]))
        assert explain(request).kernel == named.name
    finally:
        heuristics.clear()


def test_a_handful_of_reasons_is_shown() -> None:
    refused = tuple(Refused(f"reason {number}", 10 - number, "name") for number in range(8))
    told = Explanation(FPROP, SmArch.SM90A, reason="none", refused=refused)
    assert str(told).splitlines()[1] == (
        "of 52 kernels that do not serve it, 10: reason 0; 9: reason 1; 8: reason 2; 7: reason 3; 6: reason 4; "
        "12: other reasons"
    )
    assert len(told.to_dict()["refused"]) == 8
