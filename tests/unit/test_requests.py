"""Requests: what they take, what they default to, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import EpilogueVisitorTree, EvtBuilder, GemmEpilogue, GemmLayout, GemmRequest, GemmShape, SmArch
from atomr_cutlass.arrays.numerics import default_out_dtype, math_mode
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.matrix import ARCHS, cells, is_fp8_supported, is_supported_for
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.ops.conv2d.operation import ConvDgradRequest, ConvFwdRequest, ConvLayout, ConvShape, ConvWgradRequest
from atomr_cutlass.ops.gemm.plans import is_plain
from atomr_cutlass.ops.grouped_gemm.operation import GroupedGemmRequest, GroupedGemmShape
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.operation import operation_of

SHAPE = GemmShape(8, 16, 32)
BIASED = GemmEpilogue(bias=True, activation="gelu")


def tree_of_all_kinds(d: D = D.F16) -> EpilogueVisitorTree:
    """Operands and outputs of every kind."""
    return (
        EvtBuilder()
        .scale("factor")
        .add_bias("bias", dtype=D.BF16)
        .add_bias("rows", "column")
        .aux_load("kept", kind="mask")
        .add_matrix("residual", dtype=d)
        .binary("multiply", "kept")
        .mask_store("positive")
        .aux_store("before", dtype=D.F32)
        .reduce("of_columns", "row")
        .reduce("of_rows", "column", "max")
        .reduce("top", "scalar", "amax")
        .build()
    )


TREE = tree_of_all_kinds()


def test_a_request_states_its_defaults() -> None:
    request = GemmRequest(SHAPE, dtype=D.BF16)
    assert (request.shape.batch, request.arch, request.precision, request.out_dtype) == (1, None, None, None)
    assert request.layout_a is request.layout_b is request.layout_c is GemmLayout.ROW_MAJOR
    assert request.epilogue == GemmEpilogue(alpha=1.0, beta=0.0, bias=False, activation=None)
    assert request.result_dtype is D.BF16
    assert request.math == "default"


def test_requests_are_values() -> None:
    first, second = (GemmRequest(GemmShape(8, 16, 32), dtype=D.F16, arch=SmArch.SM80) for _ in range(2))
    assert first == second
    assert len({first, second}) == 1
    with pytest.raises(AttributeError):
        first.dtype = D.BF16  # type: ignore[misc]


@pytest.mark.parametrize("name", ["m", "n", "k", "batch"])
@pytest.mark.parametrize("value", [-1, 2**31, 1.0, "8", True, None])
def test_extents_are_small_non_negative_integers(name: str, value: Any) -> None:
    extents = {"m": 1, "n": 1, "k": 1, "batch": 1} | {name: value}
    with pytest.raises(InvalidOperandError, match=rf"GemmShape\.{name} is .*; expected an integer from 0"):
        GemmShape(**extents)


def test_extents_of_zero_and_the_largest_are_taken() -> None:
    assert GemmShape(0, 0, 0, 0) == GemmShape(m=0, n=0, k=0, batch=0)
    assert GemmShape(2**31 - 1, 1, 1).m == 2**31 - 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"shape": (8, 16, 32)}, "shape is .* expected a GemmShape"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; expected a CutlassDtype"),
        ({"arch": "sm_80"}, "arch is 'sm_80'; expected an SmArch"),
        ({"layout_a": "row"}, "layout_a is 'row'; expected a GemmLayout"),
        ({"layout_b": None}, "layout_b is None; expected a GemmLayout"),
        ({"layout_c": 0}, "layout_c is 0; expected a GemmLayout"),
        ({"epilogue": "relu"}, "epilogue is 'relu'; expected a GemmEpilogue"),
        ({"out_dtype": "f32"}, "out_dtype is 'f32'; expected a CutlassDtype"),
        ({"binding": ""}, "binding is ''; expected a name, or None"),
        ({"binding": 7}, "binding is 7; expected a name, or None"),
        ({"precision": "tf32"}, "precision='tf32' is for float32 operands; these are f16"),
        ({"precision": "fast"}, "unknown precision 'fast'; valid: ieee, tf32, 3xtf32"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(values: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"shape": SHAPE, "dtype": D.F16} | values
    with pytest.raises(InvalidOperandError, match=says):
        GemmRequest(arguments.pop("shape"), **arguments)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dtype": D.I32}, "no GEMM kernel takes i32"),
        ({"dtype": D.F8E4M3, "out_dtype": D.I32}, "e4m3 operands give bf16, f16, f32, e4m3, e5m2, not i32"),
        ({"dtype": D.F16, "out_dtype": D.F64}, "f16 operands give f16, f32, bf16, not f64"),
        ({"dtype": D.I8, "out_dtype": D.F32}, "i8 operands give i32, not f32"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        GemmRequest(SHAPE, **values)


def test_tf32_is_float32_multiplied_in_tf32() -> None:
    request = GemmRequest(SHAPE, dtype=D.TF32)
    assert (request.operand_dtype, request.result_dtype, request.math) == (D.F32, D.F32, "tf32")
    assert GemmRequest(SHAPE, dtype=D.F32, precision="tf32").math == "tf32"
    assert GemmRequest(SHAPE, dtype=D.F32).math == "ieee"


def test_tf32_with_another_precision_contradicts_itself() -> None:
    with pytest.raises(InvalidOperandError, match="TF32"):
        GemmRequest(SHAPE, dtype=D.TF32, precision="ieee")


def test_integer_and_narrow_operands_have_wider_results() -> None:
    assert default_out_dtype(D.I8) is D.I32
    assert default_out_dtype(D.I8, fused=True) is D.F32
    assert default_out_dtype(D.F8E4M3, fused=True) is D.BF16
    assert default_out_dtype(D.F8E4M3) is default_out_dtype(D.F8E5M2) is default_out_dtype(D.F4E2M1) is D.BF16
    assert default_out_dtype(D.F64) is D.F64
    assert GemmRequest(SHAPE, dtype=D.I8).result_dtype is D.I32


def test_math_modes() -> None:
    assert math_mode(D.F32, None) == "ieee"
    assert math_mode(D.F32, "3xtf32") == "3xtf32"
    assert math_mode(D.BF16, None) == "default"


@pytest.mark.parametrize("arch", list(SmArch))
@pytest.mark.parametrize("dtype", list(D))
def test_a_request_is_taken_exactly_where_the_dtype_is_supported(dtype: D, arch: SmArch) -> None:
    if is_supported_for(dtype, arch):
        assert arch in ARCHS["gemm"]
        assert GemmRequest(SHAPE, dtype=dtype, arch=arch).arch is arch
    else:
        with pytest.raises(UnsupportedError):
            GemmRequest(SHAPE, dtype=dtype, arch=arch)


# ----------------------------------------------------------------------------------------------------------------------
# Plan keys
# ----------------------------------------------------------------------------------------------------------------------

REQUEST = GemmRequest(SHAPE, dtype=D.F16, arch=SmArch.SM80)
CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"shape": GemmShape(8, 16, 64)},
    "batch": {"shape": GemmShape(8, 16, 32, 2)},
    "dtype": {"dtype": D.BF16},
    "arch": {"arch": SmArch.SM90A},
    "the GPU's own arch": {"arch": None},
    "layout_a": {"layout_a": GemmLayout.COL_MAJOR},
    "layout_b": {"layout_b": GemmLayout.COL_MAJOR},
    "layout_c": {"layout_c": GemmLayout.COL_MAJOR},
    "out_dtype": {"out_dtype": D.F32},
    "binding": {"binding": "layer 3"},
    "c is read": {"epilogue": GemmEpilogue(beta=2.0)},
    "bias": {"epilogue": GemmEpilogue(bias=True)},
    "activation": {"epilogue": GemmEpilogue(activation="relu")},
    "tree": {"epilogue": GemmEpilogue(tree=TREE)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_launched_is_in_the_key(change: str) -> None:
    assert dataclasses.replace(REQUEST, **CHANGES[change]).plan_key() != REQUEST.plan_key()


def test_the_math_mode_is_in_the_key() -> None:
    ieee, tf32 = (GemmRequest(SHAPE, dtype=D.F32, precision=precision) for precision in ("ieee", "tf32"))
    assert ieee.plan_key() != tf32.plan_key()
    assert tf32.plan_key() == GemmRequest(SHAPE, dtype=D.TF32).plan_key()


def test_values_of_scalars_and_spelled_out_defaults_are_not_in_the_key() -> None:
    for other in (
        dataclasses.replace(REQUEST, epilogue=GemmEpilogue(alpha=3.0)),
        dataclasses.replace(REQUEST, out_dtype=D.F16),
    ):
        assert other.plan_key() == REQUEST.plan_key()
    with_c = (dataclasses.replace(REQUEST, epilogue=GemmEpilogue(beta=beta)) for beta in (1.0, 2.0))
    assert len({request.plan_key() for request in with_c}) == 1


def test_kinds_of_epilogue_are_readable() -> None:
    assert GemmEpilogue().kind == "linear"
    assert GemmEpilogue(beta=1.0, bias=True, activation="gelu").kind == "linear+c+bias+gelu"
    assert GemmEpilogue(beta=1.0, tree=TREE).kind == f"linear+c+{TREE.id}"


# ----------------------------------------------------------------------------------------------------------------------
# Sources
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS["gemm"])
@pytest.mark.parametrize("dtype", [D.F64, D.F32, D.TF32, D.F16, D.BF16, D.I8])
def test_sources_hold_the_kernel_that_they_name(dtype: D, arch: SmArch) -> None:
    column = {"layout_b": GemmLayout.COL_MAJOR}
    source, name = GemmRequest(GemmShape(256, 256, 256), dtype=dtype, arch=arch, **column).render_cu()  # type: ignore[arg-type]
    assert name in source
    if arch is SmArch.SM90A and dtype in (D.F16, D.BF16):
        assert name.startswith("cutlass3x_sm90_tensorop_gemm_")


@pytest.mark.parametrize("shape", [GemmShape(1, 1, 1), GemmShape(8, 16, 0), GemmShape(8, 16, 32, 3)])
def test_any_shape_with_a_result_has_a_source(shape: GemmShape) -> None:
    assert GemmRequest(shape, dtype=D.BF16, arch=SmArch.SM90A).render_cu()[0]


def test_a_source_needs_no_gpu_but_then_an_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "libcuda.so.1 is not there")
    assert REQUEST.render_cu() == REQUEST.render_cu()
    with pytest.raises(InvalidOperandError, match=r"without a GPU \(libcuda.so.1 .*\) the request must name its arch"):
        GemmRequest(SHAPE, dtype=D.F16).render_cu()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": GemmShape(0, 16, 32)}, "empty: there is nothing to plan"),
        ({"shape": GemmShape(0, 16, 32), "epilogue": BIASED}, "empty"),
        ({"shape": GemmShape(8, 16, 0), "epilogue": BIASED}, "K is 0: there is nothing for .* an epilogue to follow"),
        (
            {"layout_c": GemmLayout.COL_MAJOR, "epilogue": GemmEpilogue(tree=TREE)},
            "masks lie along the rows of D: D must be row-major",
        ),
        ({"dtype": D.I8}, "8-bit"),
        ({"dtype": D.F8E4M3, "arch": SmArch.SM90A, "scaling": "tensor", "shape": GemmShape(8, 16, 0)}, "K is 0"),
    ],
)
def test_nothing_is_rendered_that_would_not_compute_the_request(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        dataclasses.replace(REQUEST, **changes).render_cu()


@pytest.mark.parametrize("arch", [arch for arch in ARCHS["gemm"] if is_fp8_supported(arch)])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("scaling", [None, "tensor", "vector", "block"])
def test_scaled_sources(scaling: str | None, quantized: bool, arch: SmArch) -> None:
    request = GemmRequest(
        GemmShape(256, 256, 256), dtype=D.F8E4M3, arch=arch, layout_b=GemmLayout.COL_MAJOR, scaling=scaling,
        quantized=quantized,
    )  # fmt: skip
    key = request.plan_key()
    assert (f"{scaling} scales" in key.epilogue, "quantized" in key.epilogue) == (scaling is not None, quantized)
    blocks = [cell for _, cell in cells([arch]) if cell.op == "gemm" and cell.scale_type == "f32" and cell.d is D.BF16]
    blocks = [cell for cell in blocks if cell.mainloop != FEW]
    if scaling == "block" and not any(cell.epilogue == "scaled" or not quantized for cell in blocks):
        with pytest.raises(UnsupportedError, match="no kernel of the matrix"):
            request.render_cu()
        return
    source, name = request.render_cu()
    assert name in source
    assert ("block_scaled" in name) == (scaling == "block")
    if quantized or scaling in ("tensor", "vector"):  # a request without scales may have either epilogue
        assert name.rpartition("_")[0].endswith("_scaled")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": D.BF16, "scaling": "tensor"}, "bf16 operands take no scales on the device: fold them into alpha"),
        ({"dtype": D.F16, "quantized": True}, "f16 operands take no scales"),
    ],
)
def test_scales_that_no_kernel_reads_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        GemmRequest(SHAPE, **changes)
    with pytest.raises(InvalidOperandError, match="scaling is 'rows'; expected None, 'tensor', 'vector', 'block'"):
        GemmRequest(SHAPE, dtype=D.F8E4M3, scaling="rows")


# ----------------------------------------------------------------------------------------------------------------------
# Epilogues
# ----------------------------------------------------------------------------------------------------------------------


def test_without_an_epilogue_there_is_no_fusion() -> None:
    for epilogue in (GemmEpilogue(), GemmEpilogue(alpha=2.0, beta=1.0)):
        request = dataclasses.replace(REQUEST, epilogue=epilogue)
        assert request.fusion() is request.tree is None
        assert is_plain(request.problem(0), request.scales(), request.fusion())


@pytest.mark.parametrize(
    ("epilogue", "program"),
    [
        (GemmEpilogue(bias=True), "evt:acc;input:row:f16;add:0:1;out:2"),
        (GemmEpilogue(activation="relu"), "evt:acc;relu:0;out:1"),
        (GemmEpilogue(beta=1.0, bias=True, activation="silu"), "evt:acc;input:row:f16;add:0:1;silu:2;out:3"),
    ],
)
def test_bias_and_activation_are_a_tree(epilogue: GemmEpilogue, program: str) -> None:
    request = dataclasses.replace(REQUEST, epilogue=epilogue)
    assert request.tree is not None
    assert request.tree.program == program
    assert not is_plain(request.problem(0), request.scales(), request.fusion())
    names = ["a", "b", *(["c"] if epilogue.beta else []), *(["bias"] if epilogue.bias else []), "out"]
    assert [slot.name for slot in operation_of(request).operands(request)] == names


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "bias"),
    [
        (D.F16, None, D.F16),
        (D.BF16, D.F32, D.F32),
        (D.F64, None, D.F64),
        (D.TF32, D.BF16, D.BF16),
        (D.F8E4M3, None, D.BF16),
        (D.F8E4M3, D.F8E5M2, D.F32),
        (D.BF16, D.I8, D.F32),
        (D.I8, None, D.F32),
        (D.I8, D.F16, D.F16),
        (D.I8, D.I8, D.F32),
    ],
)
def test_a_bias_is_of_the_results_type_or_of_float32(dtype: D, out_dtype: D | None, bias: D) -> None:
    request = GemmRequest(SHAPE, dtype=dtype, out_dtype=out_dtype, epilogue=BIASED)
    fusion = request.fusion()
    assert fusion is not None
    (array,) = fusion.inputs
    assert (array.name, array.shape, array.strides, array.dtype) == ("bias", (16,), (1,), bias)


def test_what_is_made_of_integers_is_float32_unless_it_is_their_product() -> None:
    for epilogue, result in (
        (GemmEpilogue(), D.I32),
        (GemmEpilogue(activation="relu"), D.F32),
        (GemmEpilogue(tree=tree_of_all_kinds(D.F32)), D.F32),
    ):
        assert GemmRequest(SHAPE, dtype=D.I8, epilogue=epilogue).result_dtype is result
    for more in ({"activation": "relu"}, {"tree": tree_of_all_kinds()}):
        with pytest.raises(UnsupportedError, match="compute in f32, which does not hold every i32: ask for f32"):
            GemmRequest(SHAPE, dtype=D.I8, out_dtype=D.I32, epilogue=GemmEpilogue(**more))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", list(GemmLayout))
@pytest.mark.parametrize("batch", [1, 3])
def test_operands_of_trees_are_dense(batch: int, layout: GemmLayout) -> None:
    request = GemmRequest(GemmShape(8, 20, 32, batch), dtype=D.F16, layout_c=layout, epilogue=GemmEpilogue(tree=TREE))
    fusion = request.fusion()
    assert fusion is not None
    assert [operand.name for operand in fusion.inputs] == [operand.name for operand in TREE.inputs]
    assert [output.name for output in fusion.outputs] == ["before", "of_columns", "of_rows", "positive", "top"]
    inner = (20, 1) if layout is GemmLayout.ROW_MAJOR else (1, 8)
    lead, step = ((3,), (160,)) if batch > 1 else ((), ())
    matrix = (*lead, 8, 20), (*step, *inner)
    mask = (*lead, 8, 3), (*((24,) if batch > 1 else ()), 3, 1)
    assert {array.name: (array.shape, array.strides, array.dtype) for array in fusion.arrays} == {
        "factor": ((1,), (1,), D.F32),
        "bias": ((20,), (1,), D.BF16),
        "rows": ((8, 1), (1, 1), D.F32),
        "residual": (*matrix, D.F16),
        "kept": (*mask, D.I8),
        "before": (*matrix, D.F32),
        "positive": (*mask, D.I8),
        "of_columns": ((*lead, 20), (*((20,) if batch > 1 else ()), 1), D.F32),
        "of_rows": ((*lead, 8), (*((8,) if batch > 1 else ()), 1), D.F32),
        "top": ((1,), (1,), D.F32),
    }
    slots = {slot.name: slot for slot in operation_of(request).operands(request)}
    assert list(slots) == ["a", "b", *(array.name for array in fusion.arrays), "out"]
    assert {name for name, slot in slots.items() if slot.written} == {"out", *(each.name for each in fusion.outputs)}
    assert {name for name, slot in slots.items() if slot.element == (1, 8)} == {"kept", "positive"}
    assert operation_of(request).names(request) == (*list(slots)[:-1], "c")


def test_operands_of_trees_come_after_scales() -> None:
    request = GemmRequest(
        SHAPE, dtype=D.F8E4M3, arch=SmArch.SM90A, layout_b=GemmLayout.COL_MAJOR, scaling="vector", quantized=True,
        epilogue=GemmEpilogue(beta=1.0, bias=True),
    )  # fmt: skip
    names = ["a", "b", "c", "scale_a", "scale_b", "scale_d", "amax", "bias", "out"]
    assert [slot.name for slot in operation_of(request).operands(request)] == names
    assert "TreeEpilogue<atomr_cutlass::Tree, true" in request.render_cu()[0]


def test_a_tree_may_decide_the_results_type() -> None:
    tree = EvtBuilder().quantize("e4m3", scale="scale").build()
    for out_dtype in (None, D.F8E4M3):
        request = GemmRequest(SHAPE, dtype=D.F16, out_dtype=out_dtype, epilogue=GemmEpilogue(beta=1.0, tree=tree))
        problem = request.problem(0)
        assert request.result_dtype is problem.d.dtype is D.F8E4M3
        assert problem.c == problem.d
    with pytest.raises(InvalidOperandError, match="the epilogue casts D to e4m3; out_dtype says f16"):
        GemmRequest(SHAPE, dtype=D.F16, out_dtype=D.F16, epilogue=GemmEpilogue(tree=tree))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GemmEpilogue(bias=True, tree=TREE), "tree and bias are given"),
        (lambda: GemmEpilogue(activation="relu", tree=TREE), "tree and activation are given"),
        (lambda: GemmEpilogue(tree="relu"), "tree is a str; expected an EpilogueVisitorTree"),  # type: ignore[arg-type]
        (
            lambda: GemmRequest(SHAPE, dtype=D.F16, epilogue=GemmEpilogue(activation="swish")),
            "activation 'swish'; valid",
        ),
    ],
)
def test_epilogues_that_say_nothing_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        make()


@pytest.mark.parametrize(
    ("name", "changes", "clashes"),
    [
        ("a", {}, True),
        ("c", {}, False),
        ("c", {"beta": 1.0}, True),
        ("scale_a", {}, False),
        ("scale_a", {"scaling": "tensor"}, True),
        ("amax", {"quantized": True}, True),
    ],
)
def test_names_of_a_trees_operands_are_their_own(name: str, changes: dict[str, Any], clashes: bool) -> None:
    tree = EvtBuilder().add_bias(name).build()
    epilogue = GemmEpilogue(beta=changes.pop("beta", 0.0), tree=tree)

    def make() -> GemmRequest:
        return GemmRequest(SHAPE, dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, epilogue=epilogue, **changes)

    if clashes:
        with pytest.raises(InvalidOperandError, match=f"has an operand '{name}', which is the name of one of the prod"):
            make()
    else:
        assert name in [slot.name for slot in operation_of(make()).operands(make())]


def test_trees_that_no_kernel_computes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a tree over f64 accumulators reduces in f64, not f32"):
        GemmRequest(SHAPE, dtype=D.F64, epilogue=GemmEpilogue(tree=tree_of_all_kinds(D.F64)))
    with pytest.raises(UnsupportedError, match="f16 operands give f16, f32, bf16, e4m3, e5m2, i8, not f64"):
        GemmRequest(SHAPE, dtype=D.F16, out_dtype=D.F64, epilogue=BIASED)
    with pytest.raises(UnsupportedError, match="the gradient of a filter has no epilogue"):
        dataclasses.replace(OTHERS["conv2d_wgrad"], epilogue=GemmEpilogue(tree=TREE))


def test_keys_tell_trees_and_their_names_apart() -> None:
    trees = [EvtBuilder().add_bias(name, dtype=dtype).build() for name in ("b1", "b2") for dtype in (D.F16, D.F32)]
    again = EvtBuilder().input("b1", "row", D.F16).node("sum", "add", "acc", "b1").output("out", "sum").build()
    keys = [dataclasses.replace(REQUEST, epilogue=GemmEpilogue(tree=tree)).plan_key() for tree in trees]
    assert len(set(keys)) == 4
    assert dataclasses.replace(REQUEST, epilogue=GemmEpilogue(alpha=3.0, tree=again)).plan_key() == keys[0]
    assert trees[0].id in repr(keys[0])


@pytest.mark.parametrize("arch", ARCHS["gemm"])
@pytest.mark.parametrize("epilogue", [BIASED, GemmEpilogue(tree=TREE)], ids=["bias", "tree"])
def test_sources_with_trees(epilogue: GemmEpilogue, arch: SmArch) -> None:
    for dtype in (D.F16, D.F8E4M3):
        if not is_supported_for(dtype, arch):
            continue
        request = GemmRequest(
            GemmShape(256, 256, 256), dtype=dtype, arch=arch, layout_b=GemmLayout.COL_MAJOR, epilogue=epilogue
        )
        source, name = request.render_cu()
        assert name in source
        assert "_evt_" in name
        assert "struct Tree {" in source
    # The matrix like D is loaded as the C operand, unless there is a C.
    half = GemmRequest(GemmShape(256, 256, 256), dtype=D.F16, arch=arch, epilogue=GemmEpilogue(tree=TREE))
    assert "OperandLayout::kSource" in half.render_cu()[0]
    with_c = dataclasses.replace(half, epilogue=GemmEpilogue(beta=1.0, tree=TREE))
    assert "OperandLayout::kSource" not in with_c.render_cu()[0]


# ----------------------------------------------------------------------------------------------------------------------
# Grouped GEMM and convolutions
# ----------------------------------------------------------------------------------------------------------------------

GROUPS = GroupedGemmShape([GemmShape(64, 32, 16), GemmShape(0, 32, 16)])
CONV = ConvShape.nhwc(2, 8, 9, 16, 32, 3, 3)
OTHERS: dict[str, GroupedGemmRequest | ConvFwdRequest | ConvDgradRequest | ConvWgradRequest] = {
    "grouped_gemm": GroupedGemmRequest(GROUPS, dtype=D.BF16, arch=SmArch.SM90A),
    "conv2d_fprop": ConvFwdRequest(CONV, dtype=D.F16, arch=SmArch.SM80),
    "conv2d_dgrad": ConvDgradRequest(CONV, dtype=D.F16, arch=SmArch.SM80),
    "conv2d_wgrad": ConvWgradRequest(CONV, dtype=D.F16, arch=SmArch.SM80),
}


@pytest.mark.parametrize("op", OTHERS)
def test_every_request_has_a_key(op: str) -> None:
    request = OTHERS[op]
    key = request.plan_key()
    assert key.op == op
    assert request.plan_key() == key
    for changes in ({"dtype": D.F8E4M3}, {"arch": None}, {"out_dtype": D.F32}, {"binding": "w"}):
        assert dataclasses.replace(request, **changes).plan_key() != key  # type: ignore[arg-type]
    assert dataclasses.replace(request, epilogue=GemmEpilogue(alpha=2.0)).plan_key() == key
    assert dataclasses.replace(request, epilogue=GemmEpilogue(beta=2.0)).plan_key() != key


def test_keys_of_different_operations_differ() -> None:
    assert len({request.plan_key() for request in OTHERS.values()}) == len(OTHERS)


@pytest.mark.parametrize(("op", "arch"), [(op, arch) for op in OTHERS for arch in ARCHS[op]])
def test_every_request_has_a_source(op: str, arch: SmArch) -> None:
    for dtype in (D.F16, D.BF16, D.F8E4M3, D.F8E5M2, D.F32, D.TF32):
        request: Any = OTHERS[op]
        if op == "grouped_gemm":
            if not any(key.op == op and key.a is key.b is dtype for _, key in cells([arch])):
                continue
            request = dataclasses.replace(request, layout_b=GemmLayout.COL_MAJOR)
        source, name = dataclasses.replace(request, dtype=dtype, arch=arch).render_cu()
        assert name in source
        assert ("grouped" if op == "grouped_gemm" else op.removeprefix("conv2d_")) in name


@pytest.mark.parametrize(
    ("op", "changes", "says"),
    [
        ("grouped_gemm", {"shape": GroupedGemmShape([GemmShape(0, 8, 8)])}, "empty"),
        ("grouped_gemm", {"dtype": D.F8E4M3}, "contiguous along K"),
        ("grouped_gemm", {"layout_c": GemmLayout.COL_MAJOR}, "rows of the result are contiguous"),
        ("conv2d_dgrad", {"shape": ConvShape.nhwc(2, 9, 9, 16, 32, 3, 3, stride=2, dilation=2)}, "dilation"),
    ],
)
def test_what_no_kernel_computes_is_not_rendered(op: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        dataclasses.replace(OTHERS[op], **changes).render_cu()


@pytest.mark.parametrize("op", OTHERS)
def test_sources_need_no_gpu_but_then_an_arch(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "libcuda.so.1 is not there")
    assert OTHERS[op].render_cu() == OTHERS[op].render_cu()
    with pytest.raises(InvalidOperandError, match="the request must name its arch"):
        dataclasses.replace(OTHERS[op], arch=None).render_cu()


@pytest.mark.parametrize("epilogue", [GemmEpilogue(bias=True), GemmEpilogue(activation="relu")])
def test_gradients_of_filters_are_linear(epilogue: GemmEpilogue) -> None:
    with pytest.raises(UnsupportedError, match="the gradient of a filter has no epilogue: its columns are"):
        dataclasses.replace(OTHERS["conv2d_wgrad"], epilogue=epilogue)


def test_epilogues_that_convolutions_have_not_are_refused() -> None:
    with pytest.raises(InvalidOperandError, match="unknown activation 'swish'; valid: identity"):
        dataclasses.replace(OTHERS["conv2d_fprop"], epilogue=GemmEpilogue(activation="swish"))


@pytest.mark.parametrize(
    ("padding", "pads"),
    [(1, ((1, 1), (1, 1))), ((1, 2), ((1, 1), (2, 2))), (((1, 0), (2, 1)), ((1, 0), (2, 1)))],
)
def test_padding_may_be_uneven(padding: Any, pads: Any) -> None:
    shape = ConvShape.nhwc(2, 8, 9, 16, 32, 3, 3, padding=padding)
    assert shape.pads == pads
    assert (shape.p, shape.q) == (6 + sum(pads[0]), 7 + sum(pads[1]))
    assert shape.geometry.padding == pads


def test_results_of_narrow_operands_are_wider() -> None:
    for request in OTHERS.values():
        assert request.result_dtype is request.dtype
        assert dataclasses.replace(request, dtype=D.F8E5M2, arch=None).result_dtype is D.BF16


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([], "groups is .*; expected a sequence of at least one GemmShape"),
        (None, "groups is None"),
        ([(8, 8, 8)], r"groups\[0\] is \(8, 8, 8\); expected a GemmShape"),
        ([GemmShape(8, 8, 8), GemmShape(8, 8, 8, 2)], r"groups\[1\] has batch 2; expected 1"),
    ],
)
def test_groups_are_shapes_of_one_product(groups: Any, says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        GroupedGemmShape(groups)


@pytest.mark.parametrize(
    ("op", "changes", "says"),
    [
        ("grouped_gemm", {"dtype": D.F32}, "grouped GEMM has no kernels for F32; valid: F16, BF16, F8E4M3, F8E5M2"),
        ("grouped_gemm", {"arch": SmArch.SM120}, "grouped GEMM has no kernels for SM120; valid: SM80, .*SM100"),
        ("conv2d_fprop", {"dtype": D.F64}, "convolution has no kernels for F64"),
        ("conv2d_fprop", {"arch": SmArch.SM120}, "convolution has no kernels for SM120; valid: SM80"),
    ],
)
def test_dtypes_and_archs_without_kernels_are_refused(op: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        dataclasses.replace(OTHERS[op], **changes)


@pytest.mark.parametrize("op", OTHERS)
@pytest.mark.parametrize(
    "changes",
    [{"shape": SHAPE}, {"dtype": "f16"}, {"arch": "sm_90a"}, {"epilogue": None}, {"out_dtype": 1}, {"binding": 1}],
)
def test_fields_of_the_wrong_kind_are_refused(op: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidOperandError, match=next(iter(changes))):
        dataclasses.replace(OTHERS[op], **changes)


def test_convolutions_know_their_result() -> None:
    assert (CONV.p, CONV.q) == (6, 7)
    strided = ConvShape.nhwc(1, 224, 224, 3, 64, 7, 7, stride=2, padding=3)
    assert (strided.p, strided.q, strided.stride, strided.padding) == (112, 112, (2, 2), (3, 3))
    uneven = ConvShape.nhwc(1, 16, 16, 8, 8, 3, 5, stride=(1, 2), padding=(0, 2), dilation=(2, 1), groups=4)
    assert (uneven.p, uneven.q) == (12, 8)


def test_precision_of_convolutions_is_float32s() -> None:
    tf32 = ConvFwdRequest(CONV, dtype=D.TF32)
    assert tf32.plan_key() == ConvFwdRequest(CONV, dtype=D.F32, precision="tf32").plan_key()
    with pytest.raises(InvalidOperandError, match="for float32 operands"):
        ConvFwdRequest(CONV, dtype=D.F16, precision="tf32")


def test_plans_name_dimensions_as_their_request_does() -> None:
    other = dataclasses.replace(OTHERS["conv2d_fprop"], layout=ConvLayout.NCHW)
    assert other.plan_key() != OTHERS["conv2d_fprop"].plan_key()
    assert other.problem(0) == OTHERS["conv2d_fprop"].problem(0)  # in memory channels are contiguous in either


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 0}, r"ConvShape\.n is 0; expected an integer from 1"),
        ({"c": 16.0}, r"ConvShape\.c is 16\.0"),
        ({"stride": 0}, r"stride is \(0, 0\); expected an integer from 1 to 2\^31 - 1, or one each"),
        ({"padding": -1}, r"padding is \(-1, -1\); expected an integer from 0"),
        (
            {"dilation": (1, 2, 3)},
            r"dilation is \(1, 2, 3\); expected an integer from 1 to 2\^31 - 1, or one each for rows and columns",
        ),
        ({"groups": 3}, "x has C = 16, no multiple of the 3 groups"),
        ({"r": 11}, "the result has no rows: 11 taps of w with dilation 1 are longer than 8 with padding 0 and 0"),
        ({"s": 5, "dilation": 3}, "the result has no columns: 5 taps of w with dilation 3 are longer than 9"),
    ],
)
def test_convolutions_without_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    extents: dict[str, Any] = {"n": 2, "h": 8, "w": 9, "c": 16, "k": 32, "r": 3, "s": 3} | changes
    with pytest.raises(InvalidOperandError, match=says):
        ConvShape.nhwc(**extents)


@pytest.mark.parametrize(
    "given", [{"stride": 2}, {"stride": None}, {"stride": [1, 2]}, {"padding": ([1, 1], [1, 1])}, {"dilation": [1, 1]}]
)
def test_pairs_of_convolutions_are_tuples(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOperandError, match="expected tuples of two integers, for rows and columns"):
        ConvShape(2, 8, 9, 16, 32, 3, 3, **given)
