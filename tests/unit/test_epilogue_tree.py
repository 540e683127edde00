"""Epilogue trees: which graphs are the same tree, the program and its way back, refusals, and drawings."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomr_cutlass import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue import tree as trees
from atomr_cutlass.generator.epilogue.ops import ACTIVATION_OPS, GRADIENT_OPS, OPS
from atomr_cutlass.generator.epilogue.tree import EpilogueVisitorTree, Node, Output

quick = settings(max_examples=50, deadline=None)

ACC = Node("acc")


def _input(name: str, kind: str = "row", dtype: str = "f32") -> Node:
    return Node("input", (), (name, kind, dtype))


def _constant(value: float) -> Node:
    return Node("constant", (), (value,))


def _op(name: str, *inputs: Node, numbers: tuple[float | str, ...] = (), label: str = "") -> Node:
    return Node(name, inputs, numbers, label)


def _matrix(name: str = "copy", dtype: D | None = D.F16) -> Output:
    return Output(name, "matrix", dtype)


def test_operations_are_named_once_and_have_arities() -> None:
    assert set(ACTIVATION_OPS) | set(GRADIENT_OPS) < set(OPS)
    for name, op in OPS.items():
        assert op.name == name
        assert not op.commutative or op.arity == 2
        assert op.arity in (1, 2, 3)
    assert not {"acc", "input", "constant", "cast", "out", "store", "reduce"} & set(OPS)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs as nested tuples, which know nothing of nodes: what two graphs compute is the same where these are
# ----------------------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    op: str
    numbers: tuple[float | str, ...] = ()
    inputs: tuple[Any, ...] = ()


class Graph(NamedTuple):
    result: Form
    stores: tuple[tuple[Output, Form], ...]


_KINDS = ("scalar", "row", "column", "matrix", "mask")
_LEAVES = (
    *(Form("input", (f"{kind}_{number}", kind, "f16")) for kind in _KINDS for number in (0, 1)),
    *(Form("constant", (value,)) for value in (0.0, 1.0, 0.1, float("inf"))),
)
_OUTPUTS = (
    Output("a", "matrix", D.BF16),
    Output("b", "matrix", D.F32),
    Output("c", "mask", None),
    Output("d", "row", D.F32, "sum"),
    Output("e", "scalar", D.F32, "amax"),
)


def _walk(form: Form) -> Iterator[Form]:
    yield form
    for node in form.inputs:
        yield from _walk(node)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    # By number: to draw a form itself would print it, with every path to what it shares.
    def drawn() -> Form:
        return pool[draw(st.integers(0, len(pool) - 1))]

    pool = [Form("acc"), *draw(st.lists(st.sampled_from(_LEAVES), min_size=1, max_size=3, unique=True))]
    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from([*OPS, "cast"]))
        if name == "cast":
            numbers, arity = (draw(st.sampled_from(["f16", "e4m3", "i8"])),), 1
        else:
            numbers, arity = {"clamp": (-1.0, 1.0), "leaky_relu": (0.1,)}.get(name, ()), OPS[name].arity
        pool.append(Form(name, numbers, tuple(drawn() for _ in range(arity))))
    result = pool[-1]
    if all(form.op != "acc" for form in _walk(result)):
        result = Form("fma", (), (result, result, pool[0]))
    outputs = draw(st.lists(st.sampled_from(_OUTPUTS), unique=True, max_size=3))
    return Graph(result, tuple((output, drawn()) for output in outputs))


def _normal(form: Form) -> Form:
    inputs = [_normal(node) for node in form.inputs]
    if form.op in OPS and OPS[form.op].commutative:
        inputs.sort(key=repr)
    return Form(form.op, form.numbers, tuple(inputs))


def _same(first: Graph, other: Graph) -> bool:
    def normal(graph: Graph) -> tuple[Form, dict[Output, Form]]:
        return _normal(graph.result), {output: _normal(form) for output, form in graph.stores}

    return normal(first) == normal(other)


def _tree(graph: Graph, chance: random.Random | None = None) -> EpilogueVisitorTree:
    """The tree of a graph: with nodes shared wherever they can be, or put together as chance has it."""
    made: dict[Form, Node] = {}

    def node(form: Form) -> Node:
        if form in made and not (chance and chance.random() < 0.5):
            return made[form]
        inputs = form.inputs
        if chance and form.op in OPS and OPS[form.op].commutative and chance.random() < 0.5:
            inputs = inputs[::-1]
        label = chance.choice(["", "some name"]) if chance else ""
        made[form] = Node(form.op, tuple(node(operand) for operand in inputs), form.numbers, label)
        return made[form]

    stores = list(graph.stores)
    if chance:
        chance.shuffle(stores)
        for _, form in stores:
            node(form)
    return EpilogueVisitorTree(node(graph.result), [(output, node(form)) for output, form in stores])


@quick
@given(graph=graphs(), chance=st.randoms(use_true_random=False))
def test_one_graph_put_together_in_two_ways_is_one_tree(graph: Graph, chance: random.Random) -> None:
    tree, other = _tree(graph), _tree(graph, chance)
    assert (tree.program, tree.id, tree.inputs, tree.outputs) == (other.program, other.id, other.inputs, other.outputs)
    assert tree == other
    assert hash(tree) == hash(other)
    assert len(tree.nodes) == len(other.nodes) <= tree.program.count(";")


@quick
@given(graph=graphs())
def test_values_are_numbered_once_and_after_those_below_them(graph: Graph) -> None:
    tree = _tree(graph, random.Random(0))
    assert [tree.index(node) for node in tree.nodes] == list(range(len(tree.nodes)))
    for number, node in enumerate(tree.nodes):
        assert all(tree.index(operand) < number for operand in node.inputs)
        assert tree.kind(node) in ("scalar", "row", "column", "matrix")
    assert tree.kind(tree.result) == "matrix"
    assert [output.name for output in tree.outputs] == sorted(output.name for output, _ in graph.stores)
    read = {form.numbers for root in (graph.result, *(form for _, form in graph.stores)) for form in _walk(root)}
    expected = {(operand.name, operand.kind) for operand in tree.inputs}
    assert expected == {numbers[:2] for numbers in read if len(numbers) == 3}


def _altered(form: Form, at: int, change: Callable[[Form], Form]) -> tuple[Form, int]:
    """The form with its subform of this number, depth first, changed; and the numbers that are left."""
    if at == 0:
        return change(form), -1
    left = at - 1
    inputs = []
    for node in form.inputs:
        if left >= 0:
            node, left = _altered(node, left, change)  # noqa: PLW2901
        inputs.append(node)
    return form._replace(inputs=tuple(inputs)), left


def _changes(form: Form) -> list[Form]:
    """What may become of a form: sometimes the same by another name."""
    found = [Form("acc"), Form("negate", (), (form,))]
    if form.op == "cast":
        found.append(form._replace(numbers=("e5m2",)))
    elif form.op in OPS:
        alike = [op.name for op in OPS.values() if op.arity == OPS[form.op].arity and not op.attributes]
        found += [Form(name, (), form.inputs) for name in alike]
        found += [form._replace(inputs=form.inputs[::-1])]
        found += [form._replace(numbers=tuple(number / 2 for number in form.numbers))]
    elif form.op == "constant":
        found += [form._replace(numbers=(value,)) for value in (0.0, 0.1, float("-inf"))]
    elif form.op == "input":
        found.append(form._replace(numbers=("another", *form.numbers[1:])))
    return found


@settings(max_examples=120, deadline=None)
@given(graph=graphs(), place=st.integers(0, 9999), choice=st.integers(0, 99))
def test_ids_are_equal_where_graphs_compute_the_same_and_only_there(graph: Graph, place: int, choice: int) -> None:
    at = place % sum(1 for _ in _walk(graph.result))
    changed, _ = _altered(graph.result, at, lambda form: _changes(form)[choice % len(_changes(form))])
    other = graph._replace(result=changed)
    if all(form.op != "acc" for form in _walk(changed)):
        return
    first, two = _tree(graph), _tree(other)
    assert (first.id == two.id) == (first == two) == _same(graph, other)


A, B, PRE = _input("a"), _input("b"), _input("pre", "matrix", "bf16")
BASE = EpilogueVisitorTree(
    _op("clamp", _op("subtract", _op("multiply", ACC, A), PRE), numbers=(-1.0, 2.0)),
    [(_matrix("copy"), A), (Output("rows", "row", D.F32, "sum"), ACC)],
)


def _base(
    *,
    a: Node = A,
    pre: Node = PRE,
    op: str = "subtract",
    swapped: bool = False,
    numbers: tuple[float, float] = (-1.0, 2.0),
    copy: Output | None = None,
    copied: Node | None = None,
    rows: Output | None = None,
    result_dtype: D | None = None,
) -> EpilogueVisitorTree:
    pair = (_op("multiply", ACC, a), pre)
    result = _op("clamp", _op(op, *(pair[::-1] if swapped else pair)), numbers=numbers)
    stores = [(copy or _matrix("copy"), copied or a), (rows or Output("rows", "row", D.F32, "sum"), ACC)]
    return EpilogueVisitorTree(result, stores, result_dtype=result_dtype)


def test_the_base_of_the_differences() -> None:
    assert _base() == BASE
    assert _base().id == BASE.id
    assert BASE.program != BASE
    assert re.fullmatch("evt_[0-9a-f]{16}", BASE.id)


# Every row differs in this and nothing else. The program (the kernel) stays the same where only names differ, or the
# element type of D, which the kernel's key has.
@pytest.mark.parametrize(
    ("different", "one_kernel"),
    [
        ({"a": _input("other")}, True),
        ({"a": _input("a", "column")}, False),
        ({"a": _input("a", "scalar")}, False),
        ({"a": _input("a", "row", "f16")}, False),
        ({"pre": _input("pre", "matrix", "f16")}, False),
        ({"op": "divide"}, False),
        ({"swapped": True}, False),
        ({"numbers": (-1.0, 2.5)}, False),
        ({"copy": _matrix("copied")}, True),
        ({"copy": _matrix("copy", D.F32)}, False),
        ({"copy": Output("copy", "mask", None)}, False),
        ({"copy": Output("copy", "scalar", D.F32, "max")}, False),
        ({"copied": ACC}, False),
        ({"rows": Output("rows", "column", D.F32, "sum")}, False),
        ({"rows": Output("rows", "row", D.F32, "amax")}, False),
        ({"rows": Output("rows", "row", D.F64, "sum")}, False),
        ({"rows": Output("sums", "row", D.F32, "sum")}, True),
        ({"result_dtype": D.F16}, True),
    ],
    ids=str,
)
def test_trees_that_differ_have_other_ids(different: dict[str, Any], one_kernel: bool) -> None:
    other = _base(**different)
    assert other != BASE
    assert other.id != BASE.id
    assert (other.program == BASE.program) is one_kernel


def test_a_constant_is_told_from_its_negative_zero() -> None:
    programs = {EpilogueVisitorTree(_op("add", ACC, _constant(zero))).program for zero in (0.0, -0.0)}
    assert len(programs) == 2


@pytest.mark.parametrize("first", ["add", "multiply", "maximum", "minimum", "equal", "not_equal"])
def test_names_do_not_decide_the_program_where_kinds_do(first: str) -> None:
    kinds = ("scalar", "row", "column", "matrix", "mask")
    programs = set()
    for names in (tuple("abcde"), tuple("edcba"), tuple("cadbe")):
        value = ACC
        for name, kind in zip(names, kinds, strict=True):
            value = _op(first, value, _op("exp", _input(name, kind)))
        programs.add(EpilogueVisitorTree(_op("subtract", value, _input(names[0], "scalar"))).program)
    assert len(programs) == 1


def test_the_program_of_a_small_tree() -> None:
    relu = _op("relu", _op("add", A, ACC))
    tree = EpilogueVisitorTree(
        _op("cast", _op("leaky_relu", relu, numbers=(0.5,)), numbers=("e4m3",)),
        [(Output("z", "mask", None), relu), (Output("m", "scalar", D.F32, "max"), relu), (_matrix(), ACC)],
    )
    lines = tree.program.removeprefix("evt:").split(";")
    assert sorted(lines[:2]) == ["acc", "input:row:f32"]
    assert lines[2:] == [
        "add:0:1",
        "relu:2",
        "leaky_relu:3:0x1.0000000000000p-1",
        "cast:4:e4m3",
        "out:5",
        f"store:{lines.index('acc')}:f16",
        "reduce:3:scalar:max:f32",
        "store:3:mask",
    ]
    assert [output.name for output in tree.outputs] == ["copy", "m", "z"]
    assert repr(tree) == f"<EpilogueVisitorTree {tree.id}: acc, a: row -> out, copy, m, z>"


# ----------------------------------------------------------------------------------------------------------------------
# Programs read back
# ----------------------------------------------------------------------------------------------------------------------


@quick
@given(graph=graphs())
def test_a_program_is_read_back_with_its_names(graph: Graph) -> None:
    tree = _tree(graph)
    names = [operand.name for operand in (*tree.inputs, *tree.outputs)]
    again = EpilogueVisitorTree.parse(tree.program, names)
    assert again == tree
    assert (again.program, again.inputs, again.outputs) == (tree.program, tree.inputs, tree.outputs)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_program_is_read_back_without_names(kind: str, dtype: str) -> None:
    # Nothing but their names tells the operands of the sum from each other, and one of them is used again.
    a, b = _input("a", kind, dtype), _input("b", kind, dtype)
    tree = EpilogueVisitorTree(_op("fma", _op("add", a, b), ACC, a))
    again = EpilogueVisitorTree.parse(tree.program)
    assert again.program == tree.program
    assert [operand.name for operand in again.inputs] == ["i0", "i1"]


def test_a_program_with_many_outputs_is_read_back_without_names() -> None:
    stores = [(_matrix(f"o{number:02}"), _op("add", ACC, _constant(float(number)))) for number in range(12)]
    tree = EpilogueVisitorTree(ACC, stores)
    again = EpilogueVisitorTree.parse(tree.program)
    assert again.program == tree.program


_WORDS = ("acc", "input", "constant", "cast", "out", "store", "reduce", "add", "relu", "clamp", "row", "mask", "matrix")
_MORE = ("f32", "e4m3", "sum", "0", "1", "-1", "9" * 400, "", "nan", "inf", "0x1p+99999", "0x1p+0", "evt", "\0")


@quick
@given(text=st.one_of(st.text(), st.text().map("evt:".__add__)))
def test_text_is_no_program(text: str) -> None:
    with pytest.raises(ValueError, match="is no epilogue program"):
        EpilogueVisitorTree.parse(text)


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(st.lists(st.sampled_from((*_WORDS, *_MORE)), min_size=1, max_size=4).map(":".join), max_size=5))
def test_what_looks_like_a_program_is_one_or_refused(lines: list[str]) -> None:
    program = "evt:" + ";".join(["acc", *lines, "out:0"])
    try:
        tree = EpilogueVisitorTree.parse(program)
    except ValueError:
        return
    assert EpilogueVisitorTree.parse(tree.program).program == tree.program


@pytest.mark.parametrize(
    "program",
    [
        "",
        "evt:",
        "acc;out:0",
        "evt:acc",
        "evt:out:0",
        "evt:acc;out:1",
        "evt:acc;out",
        "evt:acc;relu:1;out:1",
        "evt:acc;add:0;out:1",
        "evt:acc;sine:0;out:1",
        "evt:acc;cast:0;out:1",
        "evt:acc;cast:0:e2m1;out:1",
        "evt:acc;constant:nan;add:0:1;out:2",
        "evt:acc;constant:one;add:0:1;out:2",
        "evt:acc;constant:0x1p+99999;add:0:1;out:2",
        "evt:acc;input:row;add:0:1;out:2",
        "evt:acc;input:diagonal:f32;add:0:1;out:2",
        "evt:acc;leaky_relu:0;out:1",
        "evt:acc;clamp:0:0x1p+1:0x1p+0;out:1",
        "evt:acc;out:0;store:0:f4",
        "evt:acc;out:0;reduce:0:row:sum",
        "evt:acc;out:0;reduce:0:matrix:sum:f32",
        "evt:acc;out:0;reduce:0:row:mean:f32",
        "evt:constant:0x1p+0;out:0",
    ],
)
def test_programs_with_an_error(program: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        EpilogueVisitorTree.parse(program)


@pytest.mark.parametrize(
    "program",
    [
        "evt:acc;out:-1",
        "evt:acc:junk;out:0",
        "evt:acc;out:0:junk",
        "evt:acc;relu:0:junk;out:1",
        "evt:acc;constant:0x1p+0:junk;add:0:1;out:2",
        "evt:acc;out:0;out:0",
        "evt:acc;out:0;relu:0",
        "evt:acc;relu:0;out:0",
        "evt:acc;input:mask:junk;add:0:1;out:2",
        "evt:acc;relu:\N{ARABIC-INDIC DIGIT ZERO};out:1",
    ],
)
def test_text_that_no_tree_has_is_no_program(program: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        EpilogueVisitorTree.parse(program)


@pytest.mark.parametrize("names", [[], ["a"], ["a", "copy", "rows"], ["a", "pre", "copy", "rows", "more"]])
def test_a_program_needs_as_many_names_as_operands(names: list[str]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        EpilogueVisitorTree.parse(BASE.program, names)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def _chain(length: int, first: Node = ACC) -> Node:
    value = first
    for _ in range(length):
        value = _op("relu", value)
    return value


def _sum_of_inputs(count: int) -> Node:
    value = ACC
    for number in range(count):
        value = _op("add", value, _input(f"x{number}"))
    return value


def _refused(result: Node, *stores: tuple[Output, Node]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        EpilogueVisitorTree(result, stores)
    assert type(caught.value) is InvalidOperandError
    return str(caught.value)


VALID_DTYPES = "valid: f64, f32, f16, bf16, i8, i32, e4m3, e5m2"
REDUCED_DTYPES = "its element type is f32, or f64 of f64 products"
NOTHING_TO_STORE = "it does not depend on the accumulator or on a matrix"
NOTHING_TO_FUSE = "nothing in the tree reads the accumulator: there is nothing to fuse with"


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (_op("sine", ACC), f"unknown operation 'sine'; valid: {', '.join(OPS)}"),
        (_op("add", ACC), "add takes 2 values, not 1"),
        (_op("add", ACC, ACC, ACC, label="sum"), "add 'sum' takes 2 values, not 3"),
        (_op("relu"), "relu takes 1 values, not 0"),
        (_op("select", ACC, ACC), "select takes 3 values, not 2"),
        (_op("acc", ACC), "acc takes 0 values, not 1"),
        (_op("cast", ACC, ACC, numbers=("f16",)), "cast takes 1 values, not 2"),
        (_op("cast", ACC, numbers=("e2m1",)), f"cast: cast to 'e2m1'; {VALID_DTYPES}"),
        (_op("relu", ACC, numbers=(1.0,)), "relu takes no numbers, not (1.0,)"),
        (_op("clamp", ACC, numbers=(1.0,)), "clamp takes low, high, not (1.0,)"),
        (_op("leaky_relu", ACC, label="l"), "leaky_relu 'l' takes slope, not ()"),
        (_op("leaky_relu", ACC, numbers=(float("nan"),)), "leaky_relu: slope is nan; expected a number"),
        (_op("leaky_relu", ACC, numbers=("0.1",)), "leaky_relu: slope is '0.1'; expected a number"),
        (_op("clamp", ACC, numbers=(2.0, 1.0)), "clamp: low is 2.0, above high, 1.0"),
        (_constant(float("nan")), "a constant is nan; expected a number"),
        (_input("x y"), "input 'x y': a name is a Python identifier"),
        (_input(""), "input '': a name is a Python identifier"),
        (_input("x", "diagonal"), "input 'x' is a 'diagonal'; valid: scalar, row, column, matrix, mask"),
        (_input("x", "row", "tf32"), f"input 'x' has element type 'tf32'; {VALID_DTYPES}"),
        (_input("acc"), "input 'acc' has the name of the accumulator: choose another name"),
        (_input("out"), "input 'out' has the name of the result: choose another name"),
        (
            _op("add", _input("x"), _input("x", "column")),
            "input 'x' is declared twice, as ('row', 'f32') and ('column', 'f32')",
        ),
    ],
    ids=lambda value: value.replace("; ", ";")[:40] if isinstance(value, str) else "",
)
def test_nodes_that_are_wrong(node: Node, message: str) -> None:
    assert _refused(_op("fma", ACC, ACC, node)) == message
    assert _refused(ACC, (_matrix(), node)) == message


@pytest.mark.parametrize(
    "node",
    [
        Node("constant"),
        Node("constant", (), (1.0, 2.0)),
        Node("constant", (ACC,), (1.0,)),
        Node("cast", (ACC,)),
        Node("cast", (ACC,), ("f32", "f16")),
        Node("input", (), ("x", "row")),
        Node("input", (ACC,), ("x", "row", "f32")),
        Node("input", (), (3.0, "row", "f32")),
        Node("acc", (), ("x",)),
    ],
    ids=lambda node: f"{node.op} {len(node.inputs)} {node.attributes}",
)
def test_nodes_with_other_parts_than_their_own(node: Node) -> None:
    assert node.op in _refused(_op("fma", ACC, ACC, node))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (_matrix("x y"), "output 'x y' of relu: a name is a Python identifier"),
        (_matrix("out"), "relu is stored to 'out', the name of the result: choose another"),
        (_matrix("acc"), "relu is stored to 'acc', the name of the accumulator: choose another"),
        (_matrix("bias"), "relu is stored to 'bias', the name of an input: choose another"),
        (_matrix("x", D.F4E2M1), f"output 'x' has element type 'e2m1'; {VALID_DTYPES}"),
        (_matrix("x", D.TF32), f"output 'x' has element type 'tf32'; {VALID_DTYPES}"),
        (_matrix("x", None), f"output 'x' has element type None; {VALID_DTYPES}"),
        (Output("x", "row", D.F32), "output 'x' is a 'row'; stored are matrix and mask"),
        (Output("x", "row", D.F32, "mean"), "output 'x': reduction 'mean'; valid: sum, max, amax"),
        (Output("x", "matrix", D.F32, "sum"), "output 'x' is reduced to a 'matrix'; valid: scalar, row, column"),
        (
            Output("x", "row", D.F16, "sum"),
            "output 'x' is a reduction: its element type is f32, or f64 of f64 products",
        ),
        (Output("x", "row", None, "sum"), "output 'x' is a reduction: its element type is f32, or f64 of f64 products"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_outputs_that_are_wrong(output: Output, message: str) -> None:
    assert _refused(_op("add", ACC, _input("bias")), (output, _op("relu", ACC))) == message


def test_two_outputs_of_one_name() -> None:
    message = _refused(ACC, (_matrix("x"), _op("relu", ACC)), (_matrix("y"), ACC), (_matrix("x"), ACC))
    assert message.endswith("is stored to 'x', the name of another output: choose another")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (_constant(1.0), f"the result, constant, is one value for a whole scalar: {NOTHING_TO_STORE}"),
        (
            _op("exp", _input("x", "row"), label="e"),
            f"the result, exp 'e', is one value for a whole row: {NOTHING_TO_STORE}",
        ),
        (_input("x", "column"), f"the result, input 'x', is one value for a whole column: {NOTHING_TO_STORE}"),
        (_input("x", "matrix"), NOTHING_TO_FUSE),
        (_op("add", _input("x", "row"), _input("y", "column")), NOTHING_TO_FUSE),
    ],
    ids=["constant", "row", "column", "matrix", "row and column"],
)
def test_results_that_have_nothing_to_do_with_the_product(result: Node, message: str) -> None:
    assert _refused(result) == message


def test_a_result_without_the_accumulator_is_one_if_something_else_reads_it() -> None:
    tree = EpilogueVisitorTree(_input("x", "mask"), [(_matrix(), ACC)])
    assert tree.kind(tree.result) == "matrix"


def test_there_is_room_for_so_many_values() -> None:
    assert len(EpilogueVisitorTree(_chain(trees.MAX_NODES - 1)).nodes) == trees.MAX_NODES
    assert _refused(_chain(199)) == "the tree has 200 values; a kernel takes at most 128: split it"
    # Values that are equal are one.
    same = EpilogueVisitorTree(_op("maximum", _chain(100), _chain(100)))
    assert len(same.nodes) == 102


def test_there_is_room_for_so_many_operands() -> None:
    stores = [(_matrix(f"o{number}"), ACC) for number in range(6)]
    assert len(EpilogueVisitorTree(_sum_of_inputs(10), stores).inputs) == 10
    message = _refused(_sum_of_inputs(11), *stores)
    assert message == "the tree has 11 inputs and 6 outputs beside D; a kernel takes at most 16 together"


def test_a_very_long_chain_is_refused_without_recursion() -> None:
    assert "the tree has 100001 values" in _refused(_chain(100_000))
    # Of very many paths, which are few values.
    value = ACC
    for _ in range(100):
        value = _op("multiply", value, value)
    assert len(EpilogueVisitorTree(value).nodes) == 101


def test_messages_about_a_deep_node_are_short() -> None:
    assert _refused(_op("add", _chain(5000))) == "add takes 2 values, not 1"


# ----------------------------------------------------------------------------------------------------------------------
# Drawings
# ----------------------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\]|\\.)*"'
_LINES = {
    "node": re.compile(rf"  ([vo]\d+) \[label=({_STRING})(?:, \w+=\w+)*\];"),
    "edge": re.compile(r"  ([vo]\d+) -> ([vo]\d+);"),
    "setting": re.compile(rf"  (?:rankdir=BT|node \[fontname={_STRING}(?:, \w+=\w+)*\]);"),
}


def _drawn(tree: EpilogueVisitorTree) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Labels of the nodes, and the edges; every line must be one of Graphviz's."""
    first, *lines, last, rest = tree.to_dot().split("\n")
    assert (first, last, rest) == ("digraph epilogue {", "}", "")
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for line in lines:
        found = {name: pattern.fullmatch(line) for name, pattern in _LINES.items()}
        assert any(found.values()), line
        if found["node"]:
            assert found["node"][1] not in labels
            labels[found["node"][1]] = found["node"][2][1:-1]
        elif found["edge"]:
            edges.append((found["edge"][1], found["edge"][2]))
    return labels, edges


@quick
@given(graph=graphs())
def test_a_drawing_has_every_value_and_output(graph: Graph) -> None:
    tree = _tree(graph)
    labels, edges = _drawn(tree)
    values = [f"v{number}" for number in range(len(tree.nodes))]
    outputs = [f"o{number}" for number in range(1 + len(tree.outputs))]
    assert set(labels) == {*values, *outputs}
    for number, node in enumerate(tree.nodes):
        into = sorted(source for source, target in edges if target == f"v{number}")
        assert into == sorted(f"v{tree.index(operand)}" for operand in node.inputs)
        assert str(node.attributes[0] if node.op in ("input", "constant") else node.op) in labels[f"v{number}"]
    assert [source for source, target in edges if target == "o0"] == [f"v{tree.index(tree.result)}"]
    for number, (output, node) in enumerate(tree.stores, 1):
        assert [source for source, target in edges if target == f"o{number}"] == [f"v{tree.index(node)}"]
        assert output.name in labels[f"o{number}"]


def test_labels_are_quoted() -> None:
    labels, _ = _drawn(EpilogueVisitorTree(_op("relu", ACC, label='a "b" \\ c\\')))
    assert labels["v1"] == 'relu\\na \\"b\\" \\\\ c\\\\'
    tree = EpilogueVisitorTree(
        _op("add", ACC, _input("bias", "row", "bf16")), [(_matrix("aux"), ACC)], result_dtype=D.F16
    )
    labels, _ = _drawn(tree)
    assert labels["o0"] == "out\\nmatrix f16"
    assert labels["o1"] == "aux\\nmatrix f16"
    assert "bias row bf16" in labels.values()
