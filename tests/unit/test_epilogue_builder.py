"""EvtBuilder: chains and graphs, the trees that traced functions give too, and what is refused."""

# ruff: noqa: PLW0108 - lambdas are what is traced

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from atomr_cutlass import epilogue as ep
from atomr_cutlass.epilogue import EpilogueVisitorTree, EvtBuilder, Operand, trace
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.ops import OPS
from atomr_cutlass.generator.epilogue.tree import MAX_NODES, Node, Output

ROW, COLUMN, MATRIX, SCALAR = Operand("row"), Operand("column"), Operand("matrix"), Operand("scalar")
BF16 = Operand("matrix", "bf16")


def _same(builder: EvtBuilder, function: Callable[..., Any], **operands: Any) -> None:
    """The builder and the traced function give one tree, down to its id."""
    built, traced = builder.build(), trace(function, operands).tree
    assert built.program == traced.program
    assert built == traced
    assert built.id == traced.id


# ----------------------------------------------------------------------------------------------------------------------
# Chains
# ----------------------------------------------------------------------------------------------------------------------


def test_without_steps_d_is_the_accumulator() -> None:
    assert EvtBuilder().build() == EpilogueVisitorTree(Node("acc"))


@pytest.mark.parametrize(
    ("builder", "function", "operands"),
    [
        (lambda: EvtBuilder().scale(0.5), lambda acc: acc * 0.5, {}),
        (lambda: EvtBuilder().scale("s"), lambda acc, s: acc * s, {"s": SCALAR}),
        (lambda: EvtBuilder().add_bias(), lambda acc, bias: acc + bias, {"bias": ROW}),
        (
            lambda: EvtBuilder().add_bias("b", axis="column", dtype="f16"),
            lambda acc, b: acc + b,
            {"b": Operand("column", "f16")},
        ),
        (lambda: EvtBuilder().add_matrix("x", "bf16"), lambda acc, x: acc + x, {"x": BF16}),
        (lambda: EvtBuilder().add_matrix("x", scale=2), lambda acc, x: acc + 2 * x, {"x": MATRIX}),
        (lambda: EvtBuilder().add_matrix("x", scale="s"), lambda acc, x, s: acc + s * x, {"x": MATRIX, "s": SCALAR}),
        (lambda: EvtBuilder().activation("leaky_relu"), lambda acc: ep.leaky_relu(acc), {}),
        (lambda: EvtBuilder().activation("leaky_relu", slope=0.2), lambda acc: ep.leaky_relu(acc, 0.2), {}),
        (lambda: EvtBuilder().activation("clamp", low=0, high=6), lambda acc: ep.clamp(acc, 0, 6), {}),
        (lambda: EvtBuilder().binary("maximum", 0), lambda acc: ep.maximum(acc, 0), {}),
        (lambda: EvtBuilder().binary("divide", "x", "column"), lambda acc, x: acc / x, {"x": COLUMN}),
        (
            lambda: EvtBuilder().binary("subtract", "x", kind="matrix", dtype=np.float16),
            lambda acc, x: acc - x,
            {"x": Operand("matrix", "f16")},
        ),
        (lambda: EvtBuilder().activation("sigmoid").binary("multiply", "acc"), lambda acc: ep.sigmoid(acc) * acc, {}),
        (
            lambda: EvtBuilder().aux_load("pre", "bf16").binary("d_gelu", "pre"),
            lambda acc, pre: ep.d_gelu(acc, pre),
            {"pre": BF16},
        ),
        (
            lambda: EvtBuilder().aux_load("keep", kind="mask").binary("multiply", "keep").scale(1.25),
            lambda acc, keep: acc * keep * 1.25,
            {"keep": Operand("mask")},
        ),
        (lambda: EvtBuilder().cast("bf16"), lambda acc: acc.to("bf16"), {}),
        (lambda: EvtBuilder().cast("bf16").scale(2), lambda acc: acc.to("bf16") * 2, {}),
        (lambda: EvtBuilder().quantize("e4m3"), lambda acc: acc.to("e4m3"), {}),
        (
            lambda: EvtBuilder().activation("silu").quantize(ml_dtypes.float8_e4m3fn, scale="s", amax="amax"),
            lambda acc, s: {"out": (ep.silu(acc) * s).to("e4m3"), "amax": ep.total_amax(ep.silu(acc))},
            {"s": SCALAR},
        ),
        (lambda: EvtBuilder().quantize("i8", scale=0.25), lambda acc: (acc * 0.25).to("i8"), {}),
        (
            lambda: EvtBuilder().add_bias().aux_store("pre", "bf16").activation("relu").mask_store("keep"),
            lambda acc, bias: {
                "out": ep.relu(acc + bias),
                "pre": (acc + bias).to("bf16"),
                "keep": ep.mask(ep.relu(acc + bias)),
            },
            {"bias": ROW},
        ),
        (
            lambda: EvtBuilder().cast("f16").aux_store("half").scale(2),
            lambda acc: {"out": acc.to("f16") * 2, "half": acc.to("f16")},
            {},
        ),
        (
            lambda: EvtBuilder().aux_store("plain").reduce("db", "row").reduce("most", "column", "max"),
            lambda acc: {"out": acc, "plain": acc, "db": ep.row_sum(acc), "most": ep.column_max(acc)},
            {},
        ),
        (
            lambda: EvtBuilder().add_bias("b", dtype="f16").activation("relu").add_bias("b"),
            lambda acc, b: ep.relu(acc + b) + b,
            {"b": Operand("row", "f16")},
        ),
    ],
)
def test_chains_are_the_trees_of_functions(
    builder: Callable[[], EvtBuilder], function: Callable[..., Any], operands: dict[str, Operand]
) -> None:
    _same(builder(), function, **operands)


def test_a_cast_is_kept_where_a_store_asks_for_another_type() -> None:
    tree = EvtBuilder().cast("e4m3").aux_store("wide", "f16").aux_store("same", "e4m3").build()
    cast = Node("cast", (Node("acc"),), ("e4m3",))
    stores = [(Output("wide", "matrix", D.F16), cast), (Output("same", "matrix", D.F8E4M3), Node("acc"))]
    assert tree == EpilogueVisitorTree(Node("acc"), stores, result_dtype=D.F8E4M3)


def test_double_is_the_type_of_what_says_none() -> None:
    builder = EvtBuilder(compute_dtype="f64").add_bias().scale("s").aux_store("x").reduce("r", "scalar")
    tree = builder.build()
    assert {operand.dtype for operand in (*tree.inputs, *tree.outputs)} == {D.F64}
    assert EvtBuilder().add_bias().build().inputs[0].dtype is D.F32


def test_building_again_gives_the_same_and_a_builder_goes_on() -> None:
    builder = EvtBuilder().add_bias("b")
    assert builder.build() == builder.build()
    _same(builder.activation("relu"), lambda acc, b: ep.relu(acc + b), b=ROW)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs
# ----------------------------------------------------------------------------------------------------------------------


def test_nodes_may_be_declared_in_any_order() -> None:
    def function(acc: Any, gate: Any, bias: Any) -> Any:
        pre = ep.fma(acc, 2.0, bias)
        y = ep.clamp(ep.silu(pre) * gate, -3, 3)
        return {"out": y.to("bf16"), "pre": pre, "keep": ep.mask(y), "amax": ep.total_amax(y)}

    declarations: list[Callable[[EvtBuilder], EvtBuilder]] = [
        lambda chain: chain.input("gate", "matrix", "bf16"),
        lambda chain: chain.input("bias", "row"),
        lambda chain: chain.constant("two", 2),
        lambda chain: chain.node("before", "fma", "acc", "two", "bias"),
        lambda chain: chain.node("active", "silu", "before"),
        lambda chain: chain.node("gated", "multiply", "gate", "active"),
        lambda chain: chain.node("y", "clamp", "gated", low=-3, high=3.0),
        lambda chain: chain.output("out", "y", dtype="bf16"),
        lambda chain: chain.output("pre", "before"),
        lambda chain: chain.output("keep", "y", kind="mask"),
        lambda chain: chain.reduce_node("amax", "y", "scalar", "amax"),
    ]
    for seed in range(10):
        random.Random(seed).shuffle(declarations)
        builder = EvtBuilder()
        for declare in declarations:
            assert declare(builder) is builder
        _same(builder, function, gate=BF16, bias=ROW)


@pytest.mark.parametrize("op", OPS)
def test_every_operation_can_be_a_node(op: str) -> None:
    numbers = {"clamp": {"high": 2, "low": -1}, "leaky_relu": {"slope": 0.5}}.get(op, {})
    inputs = ["acc", "x", "two"][: OPS[op].arity]
    builder = EvtBuilder().node("y", op, *inputs, **numbers).output("out", "y")
    if "x" in inputs:
        builder.input("x", "matrix")
    if "two" in inputs:
        builder.constant("two", 2)
    leaves = [Node("acc"), Node("input", (), ("x", "matrix", "f32")), Node("constant", (), (2.0,))]
    values = tuple(float(numbers[name]) for name in OPS[op].attributes)
    assert builder.build() == EpilogueVisitorTree(Node(op, tuple(leaves[: len(inputs)]), values))


def test_an_output_may_be_declared_before_it_is_stored() -> None:
    builder = EvtBuilder().output("pre", dtype="f16").output("keep", kind="mask").add_bias()
    builder.aux_store("pre").activation("relu").mask_store("keep").output("out", dtype="bf16")

    def function(acc: Any, bias: Any) -> Any:
        y = ep.relu(acc + bias)
        return {"out": y.to("bf16"), "pre": (acc + bias).to("f16"), "keep": ep.mask(y)}

    _same(builder, function, bias=ROW)


def test_chains_and_graphs_mix() -> None:
    builder = EvtBuilder().add_bias().binary("multiply", "gate").node("gate", "sigmoid", "x").input("x", "matrix")
    _same(builder, lambda acc, bias, x: (acc + bias) * ep.sigmoid(x), bias=ROW, x=MATRIX)


def test_an_operand_may_be_declared_after_the_step_that_reads_it() -> None:
    builder = EvtBuilder().scale("s").input("s", "column", "f16")
    _same(builder, lambda acc, s: acc * s, s=Operand("column", "f16"))


def test_a_row_may_be_stored_as_a_matrix() -> None:
    builder = EvtBuilder().input("r", "row").output("copy", "r").output("out", "acc")
    _same(builder, lambda acc, r: {"out": acc, "copy": r}, r=ROW)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def _long(nodes: int) -> EvtBuilder:
    builder = EvtBuilder()
    for number in range(nodes):
        builder.binary("add", number)
    return builder


REFUSED: list[tuple[Callable[[], EvtBuilder], str]] = [
    (
        lambda: EvtBuilder().node("a", "relu", "c").node("b", "tanh", "a").node("c", "exp", "b").output("out", "c"),
        "the nodes 'a' -> 'c' -> 'b' -> 'a' are a cycle: have one of them read something else",
    ),
    (
        lambda: EvtBuilder().node("a", "add", "acc", "a").output("out", "acc"),
        "the nodes 'a' -> 'a' are a cycle",
    ),
    (
        lambda: EvtBuilder().node("a", "add", "acc", "b").output("out", "a"),
        "add 'a' reads 'b', which is not declared: declare it with .input, .constant or .node",
    ),
    (
        lambda: EvtBuilder().binary("add", "x"),
        "add 'step 1' reads 'x', which is not declared: declare it with .input, .constant or .node, or give the step",
    ),
    (lambda: EvtBuilder().output("out", "x"), "'x' is stored to 'out', but not declared: add the node"),
    (
        lambda: EvtBuilder().node("a", "swish", "acc").output("out", "a"),
        "node 'a' has unknown operation 'swish'; valid: negate, absolute",
    ),
    (lambda: EvtBuilder().activation("identity"), "node 'step 1' has unknown operation 'identity'; valid: negate"),
    (lambda: EvtBuilder().node("a", "input", "acc").output("out", "a"), "node 'a' has unknown operation 'input'"),
    (lambda: EvtBuilder().node("a", "add", "acc").output("out", "a"), "add 'a' takes 2 values, not 1"),
    (lambda: EvtBuilder().activation("add"), "add 'step 1' takes 2 values, not 1"),
    (
        lambda: EvtBuilder().activation("clamp", low=0),
        "node 'step 1': clamp takes low, high; given are low",
    ),
    (
        lambda: EvtBuilder().activation("relu", slope=0.1),
        "node 'step 1': relu takes no numbers; given are slope",
    ),
    (lambda: EvtBuilder().node("a", "cast", "acc").output("out", "a"), "node 'a': cast takes dtype; given are none"),
    (lambda: EvtBuilder().cast("bf17"), "node 'step 1': unknown dtype 'bf17'; valid: f64"),
    (lambda: EvtBuilder().cast("e2m1"), "the result, acc, is cast to 'e2m1'; valid: f64"),
    (lambda: EvtBuilder().activation("clamp", low=1, high=0), "clamp 'step 1': low is 1.0, above high, 0.0"),
    (lambda: EvtBuilder().activation("leaky_relu", slope="s"), "node 'step 1': slope is a str; expected a finite"),
    (lambda: EvtBuilder().scale(float("inf")), "constant 'step 1': value is inf; expected a finite number"),
    (lambda: EvtBuilder().scale(True), "constant 'step 1': value is a bool"),
    (lambda: EvtBuilder().constant("x", np.ones(2)).binary("add", "x"), "constant 'x': value is a ndarray"),
    (
        lambda: EvtBuilder().node("a", "add", "acc", 2.0),
        "an input of node 'a' is 2.0; expected a name: nodes are given by name, numbers by .constant",
    ),
    (lambda: EvtBuilder().output("aux", dtype="f16"), "output 'aux' is declared, but nothing is stored to it"),
    (lambda: EvtBuilder().input("x", "row").node("y", "add", "acc", "x"), "nothing is stored to 'out', which is D"),
    (
        lambda: EvtBuilder().aux_store("x").activation("relu").aux_store("x"),
        "'acc' and 'step 1' are both stored to 'x': choose another name",
    ),
    (
        lambda: EvtBuilder().node("y", "relu", "acc").output("out", "acc").output("out", "y"),
        "'acc' and 'y' are both stored to 'out'",
    ),
    (lambda: EvtBuilder().reduce("x", "row").mask_store("x"), "'acc' and 'acc' are both stored to 'x'"),
    (
        lambda: EvtBuilder().output("x", dtype="f16").aux_store("x", "bf16"),
        "output 'x' is declared as matrix f16, but 'acc' is stored to it as matrix bf16: give one",
    ),
    (lambda: EvtBuilder().output("x", dtype="f16").output("x", dtype="bf16"), "as matrix f16, but declared again as"),
    (lambda: EvtBuilder().output("x").reduce("x", "row"), "declared as matrix, but 'acc' is stored to it as sum row"),
    (lambda: EvtBuilder().output("x", "acc", kind="mask", dtype="i8"), "output 'x' is a mask of bits: leave its dtype"),
    (lambda: EvtBuilder().output("x", "acc", kind="row"), "output 'x' is a 'row'; stored are matrix and mask"),
    (lambda: EvtBuilder().output("x", "acc", dtype="e2m1"), "output 'x' has element type 'e2m1'; valid: f64"),
    (lambda: EvtBuilder().output("x", "acc", dtype="int"), "output 'x': unknown dtype 'int'; valid: f64"),
    (lambda: EvtBuilder().output("out", "acc", kind="mask"), "'acc' is stored to 'out' as a mask; D is a matrix"),
    (lambda: EvtBuilder().reduce("out", "row"), "'acc' is stored to 'out' as a row; D is a matrix"),
    (lambda: EvtBuilder().reduce("x", "diagonal"), "output 'x' is reduced to a 'diagonal'; valid: scalar, row, column"),
    (lambda: EvtBuilder().reduce("x", "row", "mean"), "output 'x': reduction 'mean'; valid: sum, max, amax"),
    (lambda: EvtBuilder().input("x", "row", "f32"), "nothing is stored to 'out'"),
    (lambda: EvtBuilder().aux_load("x").scale(2), "no output uses input 'x': .output('out', ...) stores D; or"),
    (
        lambda: EvtBuilder().node("y", "relu", "acc").node("z", "tanh", "y").output("out", "y"),
        "no output uses tanh 'z'",
    ),
    (lambda: EvtBuilder().activation("relu").output("out", "acc"), "no output uses relu 'step 1'"),
    (
        lambda: EvtBuilder().constant("x", 1).input("x", "row").scale("x"),
        "input 'x' is declared twice: choose another name for one of them",
    ),
    (lambda: EvtBuilder().constant("acc", 1), "constant 'acc' has the name of the accumulator"),
    (lambda: EvtBuilder().add_bias("out"), "input 'out' has the name of the result: choose another name"),
    (lambda: EvtBuilder().add_bias("x y"), "input 'x y': a name is a Python identifier"),
    (lambda: EvtBuilder().aux_store("x y"), "output 'x y' of acc: a name is a Python identifier"),
    (lambda: EvtBuilder().add_bias("x").aux_store("x"), "is stored to 'x', the name of an input: choose another"),
    (lambda: EvtBuilder().add_bias("x", axis="matrix"), "bias 'x' has axis 'matrix'; valid: row, column"),
    (lambda: EvtBuilder().input("x", "vector").scale("x"), "input 'x' is a 'vector'; valid: scalar, row, column"),
    (lambda: EvtBuilder().input("x", "row", "tf32").scale("x"), "input 'x' has element type 'tf32'; valid: f64"),
    (lambda: EvtBuilder().add_bias("x", dtype="f17"), "input 'x': unknown dtype 'f17'"),
    (
        lambda: EvtBuilder().add_bias("x").add_matrix("x"),
        "input 'x' is a row, but add_matrix reads it as a matrix: choose another name for one of them",
    ),
    (
        lambda: EvtBuilder().add_bias("x", dtype="bf16").binary("multiply", "x", dtype="f16"),
        "input 'x' is bf16, but multiply reads it as f16: give one",
    ),
    (
        lambda: EvtBuilder().input("x", "row").output("out", "x").aux_store("y"),
        "the result, input 'x', is one value for a whole row",
    ),
    (lambda: EvtBuilder().input("x", "matrix").output("out", "x"), "nothing in the tree reads the accumulator"),
    *(
        (
            lambda kind=kind, to=to: EvtBuilder().input("x", kind).reduce_node("r", "x", to).aux_store("y"),
            f"output 'r' reduces input 'x', which is one value for a whole {kind}, to a {to}: there is nothing",
        )
        for kind, to in (
            ("row", "row"), ("column", "column"), ("scalar", "scalar"), ("scalar", "row"), ("scalar", "column")
        )
    ),
    (lambda: _long(100), f"the tree has 201 values; a kernel takes at most {MAX_NODES}: split it"),
    (lambda: _long(1500), f"a kernel takes at most {MAX_NODES}: split it"),
]  # fmt: skip


@pytest.mark.parametrize(("builder", "message"), REFUSED)
def test_what_is_refused(builder: Callable[[], EvtBuilder], message: str) -> None:
    with pytest.raises(InvalidOperandError) as raised:
        builder().build()
    assert message in str(raised.value)


def test_only_what_varies_is_reduced() -> None:
    for kind, to in (("row", "column"), ("row", "scalar"), ("column", "row"), ("column", "scalar"), ("matrix", "row")):
        tree = EvtBuilder().input("x", kind).reduce_node("r", "x", to).aux_store("y").build()
        assert tree.outputs[0] == Output("r", to, D.F32, "sum")
