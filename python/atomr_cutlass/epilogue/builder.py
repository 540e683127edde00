"""EvtBuilder: epilogue trees without tracing, as a chain of steps or a graph of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from ..checks import NUMBERS, expect, shown
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.ops import LEAKY_SLOPE, OPS
from ..generator.epilogue.tree import (
    ACCUMULATOR,
    COLUMN,
    MASK,
    MATRIX,
    RESULT,
    ROW,
    SCALAR,
    EpilogueVisitorTree,
    Node,
    Output,
)
from .trace import input_node, tree_of
from .values import element_type, finite


class _Declared(NamedTuple):
    """A node without its inputs, and the names of the inputs."""

    node: Node
    inputs: tuple[str, ...] = ()


class _Read(NamedTuple):
    """An operand that a step of the chain reads by name, with its kind and element type if the step gives them."""

    reader: str
    name: str
    kind: str | None
    dtype: CutlassDtype | None
    default: str | None


class EvtBuilder:
    """Assembles an epilogue tree; every method but `build` returns the builder.

    A chain has a current value, at first the accumulator, which each step replaces. A graph has named nodes, which may
    refer to nodes that are declared later. A builder may mix both. D is the value stored to `out`, else the chain's
    last value. A method raises InvalidOperandError for an argument that is wrong by itself, such as an unknown
    operation; `build` checks the tree as a whole.
    """

    def __init__(self, *, compute_dtype: Any = CutlassDtype.F32) -> None:
        """A builder of an empty tree, whose D is the accumulator.

        Args:
            compute_dtype: f64 where the product is, else f32: the type of reductions, and of operands and stored
                values where none is given.
        """
        self._compute_dtype = element_type(compute_dtype, "compute_dtype")
        self._declared = {ACCUMULATOR: _Declared(Node(ACCUMULATOR))}
        self._reads: list[_Read] = []
        self._written: dict[str, tuple[Output, str | None]] = {}
        self._current = ACCUMULATOR
        self._chained = False

    def input(self, name: str, kind: str, dtype: Any = None) -> EvtBuilder:
        """An operand: `scalar`, `row` (N,), `column` (M,), `matrix` (M, N) or `mask`, which has no dtype."""
        expect(kind, str, f"kind of operand {shown(name)}", "a name")
        return self._declare(name, self._operand(name, kind, dtype))

    def constant(self, name: str, x: float) -> EvtBuilder:
        """A number."""
        return self._declare(name, Node("constant", (), (_number(f"constant {shown(name)}: value", x),), name))

    def node(self, name: str, op: str, *inputs: str, **attributes: Any) -> EvtBuilder:
        """The operation `op` of `generator.epilogue.ops.OPS` on named values; `acc` is the accumulator.

        Args:
            name: of the node.
            op: the operation; `cast` takes `dtype=`.
            inputs: names of nodes.
            attributes: the operation's numbers by name.
        """
        label = f"node {shown(name)}"
        expect(op, str, f"operation of {label}", "a name")
        for value in inputs:
            expect(value, str, f"an input of {label}", "a name: nodes are given by name, numbers by .constant")
        if op not in OPS and op != "cast":
            raise InvalidOperandError(f"{label} has unknown operation {op!r}; valid: {', '.join(OPS)}, cast")
        if op == "leaky_relu":
            attributes = {"slope": LEAKY_SLOPE, **attributes}
        expected = OPS[op].attributes if op in OPS else ("dtype",)
        if set(attributes) != set(expected):
            takes = ", ".join(expected) or "no numbers"
            raise InvalidOperandError(f"{label}: {op} takes {takes}; given are {', '.join(attributes) or 'none'}")
        values: tuple[str | float, ...]
        if op == "cast":
            values = (element_type(attributes["dtype"], label).value,)
        else:
            values = tuple(_number(f"{label}: {number}", attributes[number]) for number in expected)
        return self._declare(name, Node(op, (), values, name), inputs)

    def output(self, name: str, node: str | None = None, *, dtype: Any = None, kind: str = MATRIX) -> EvtBuilder:
        """A matrix or mask in which the node is stored; `out` is D.

        Args:
            name: of the output.
            node: the node; None declares an output that something else stores to.
            dtype: its element type; if None that of the node's cast, else, for D, the call's, and for others
                `compute_dtype`.
            kind: `matrix`, or `mask` for node != 0 as bits.
        """
        return self._write(name, node, kind, dtype)

    def reduce_node(self, name: str, node: str, kind: str, reduction: str = "sum") -> EvtBuilder:
        """A reduction of the node.

        Args:
            name: of the output.
            node: the node.
            kind: `row` reduces over M to (..., N), `column` over N to (..., M), `scalar` over everything.
            reduction: `sum`, `max` or `amax`.
        """
        expect(node, str, f"node of output {shown(name)}", "a name")
        return self._write(name, node, kind, None, reduction)

    def scale(self, by: str | float) -> EvtBuilder:
        """Times a number, a node, or an operand of one element."""
        return self._then("multiply", self._current, self._read("scale", by, None, None, default=SCALAR))

    def add_bias(self, name: str = "bias", axis: str = ROW, dtype: Any = None) -> EvtBuilder:
        """Plus a vector: (N,) for `row`, added to every row, or (M,) for `column`."""
        expect(name, str, "name of a bias", "a name")
        if not isinstance(axis, str) or axis not in (ROW, COLUMN):
            raise InvalidOperandError(f"bias {name!r} has axis {shown(axis)}; valid: {ROW}, {COLUMN}")
        return self._then("add", self._current, self._read("add_bias", name, axis, dtype))

    def add_matrix(self, name: str, dtype: Any = None, scale: str | float = 1.0) -> EvtBuilder:
        """Plus `scale` times a matrix."""
        expect(name, str, "name of a matrix", "a name")
        term = self._read("add_matrix", name, MATRIX, dtype)
        if not isinstance(scale, NUMBERS) or scale != 1.0:
            term = self._step("multiply", term, self._read("add_matrix", scale, None, None, default=SCALAR))
        return self._then("add", self._current, term)

    def activation(self, name: str, **attributes: Any) -> EvtBuilder:
        """An operation on the current value alone: relu, gelu, ..., with its numbers, such as `slope` of leaky_relu."""
        return self._then(name, self._current, **attributes)

    def binary(self, op: str, other: str | float, kind: str | None = None, dtype: Any = None) -> EvtBuilder:
        """An operation on the current value and a second one: a number, a node, or an operand of this kind."""
        if kind is not None:
            expect(kind, str, f"kind of what {shown(op)} reads", "a name")
        return self._then(op, self._current, self._read(op, other, kind, dtype))

    def aux_load(self, name: str, dtype: Any = None, kind: str = MATRIX) -> EvtBuilder:
        """Declares an operand that later steps read by name; the current value is unchanged."""
        self._chained = True
        return self.input(name, kind, dtype)

    def aux_store(self, name: str, dtype: Any = None) -> EvtBuilder:
        """Stores the current value to a matrix."""
        self._chained = True
        return self.output(name, self._current, dtype=dtype)

    def mask_store(self, name: str) -> EvtBuilder:
        """Stores a mask of bits: 1 where the current value is not 0."""
        self._chained = True
        return self.output(name, self._current, kind=MASK)

    def reduce(self, name: str, kind: str, reduction: str = "sum") -> EvtBuilder:
        """Reduces the current value, as `reduce_node` does a node."""
        self._chained = True
        return self.reduce_node(name, self._current, kind, reduction)

    def quantize(self, dtype: Any, scale: str | float | None = None, amax: str | None = None) -> EvtBuilder:
        """Reduces the largest magnitude to `amax`, multiplies by `scale`, and casts."""
        if amax is not None:
            self.reduce(amax, SCALAR, "amax")
        if scale is not None:
            self.scale(scale)
        return self.cast(dtype)

    def cast(self, dtype: Any) -> EvtBuilder:
        """Rounds to an element type; as the last step, it is D's."""
        return self._then("cast", self._current, dtype=dtype)

    def build(self) -> EpilogueVisitorTree:
        """The tree.

        Raises:
            InvalidOperandError: a cycle, a missing name, an unused node, an output without a stored value, or another
                error of a tree; names the node and the cure.
        """
        declared, stored = self._operands(), self._outputs()
        order = _ordered(declared)
        for output, name in stored.values():
            if name not in declared:
                raise InvalidOperandError(f"{name!r} is stored to {output.name!r}, but not declared: add the node")
        read = (name for _, inputs in declared.values() for name in inputs)
        used = {ACCUMULATOR, *read, *(name for _, name in stored.values())}
        for name in declared:
            if name not in used:
                unread = declared[name].node
                raise InvalidOperandError(f"no output uses {unread}: .output({RESULT!r}, ...) stores D; or remove it")
        nodes: dict[str, Node] = {}
        for name in order:
            nodes[name] = replace(declared[name].node, inputs=tuple(nodes[value] for value in declared[name].inputs))
        written = {name: (output, nodes[node]) for name, (output, node) in stored.items()}
        return tree_of(written, stored=self._compute_dtype, computed=self._compute_dtype)

    def _operand(self, name: str, kind: str, dtype: Any) -> Node:
        element = self._compute_dtype if dtype is None or kind == MASK else element_type(dtype, f"input {shown(name)}")
        return input_node(name, kind, element)

    def _write(self, name: str, node: str | None, kind: str, dtype: Any, reduction: str = "") -> EvtBuilder:
        expect(name, str, "name of an output", "a name")
        for label, word in (("kind", kind), ("reduction", reduction)):
            expect(word, str, f"{label} of output {name!r}", "a name")
        expect(node, (str, type(None)), f"node of output {name!r}", "a name")
        element = None if dtype is None else element_type(dtype, f"output {name!r}")
        if kind == MASK and dtype is not None:
            raise InvalidOperandError(f"output {name!r} is a mask of bits: leave its dtype out")
        if name == RESULT and kind != MATRIX:
            raise InvalidOperandError(f"{node!r} is stored to {RESULT!r} as a {kind}; D is a matrix")
        output = Output(name, kind, element, reduction)
        known, source = self._written.get(name, (output, None))
        if node is not None and source is not None:
            raise InvalidOperandError(f"{source!r} and {node!r} are both stored to {name!r}: choose another name")
        self._written[name] = _merged(known, output, node) if source is None else _merged(output, known, source)
        return self

    def _declare(self, name: str, node: Node, inputs: tuple[str, ...] = ()) -> EvtBuilder:
        expect(name, str, "name of a node", "a name")
        if name == ACCUMULATOR:
            raise InvalidOperandError(f"{node} has the name of the accumulator: choose another name")
        if name in self._declared:
            raise InvalidOperandError(f"{node} is declared twice: choose another name for one of them")
        self._declared[name] = _Declared(node, inputs)
        return self

    def _name(self) -> str:
        """An unused name for the chain's next declaration."""
        return f"step {len(self._declared)}"

    def _step(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = self._name()
        self.node(name, op, *inputs, **attributes)
        return name

    def _then(self, op: str, *inputs: str, **attributes: Any) -> EvtBuilder:
        self._current = self._step(op, *inputs, **attributes)
        self._chained = True
        return self

    def _read(self, reader: str, source: str | float, kind: str | None, dtype: Any, default: str | None = None) -> str:
        """The name of a step's operand; declares a constant if it is a number."""
        if not isinstance(source, str):
            name = self._name()
            self.constant(name, source)
            return name
        element = None if dtype is None else element_type(dtype, f"input {source!r}")
        self._reads.append(_Read(reader, source, kind, element, default))
        return source

    def _operands(self) -> dict[str, _Declared]:
        """All declarations by name, including operands that only steps of the chain name."""
        declared = dict(self._declared)
        for read in self._reads:
            kind = read.kind or read.default
            if read.name not in declared and kind is not None:
                declared[read.name] = _Declared(self._operand(read.name, kind, read.dtype))
            elif read.name in declared and declared[read.name].node.op == "input":
                _check_read(read, declared[read.name].node)
        return declared

    def _outputs(self) -> dict[str, tuple[Output, str]]:
        """The outputs by name, D included, each as declared and with the name of its node."""
        stored: dict[str, tuple[Output, str]] = {}
        for name, (output, node) in ({RESULT: (Output(RESULT, MATRIX, None), None)} | self._written).items():
            if node is not None:
                stored[name] = output, node
            elif name != RESULT:
                raise InvalidOperandError(
                    f"output {name!r} is declared, but nothing is stored to it: .output({name!r}, node), or remove it"
                )
            elif len(self._declared) > 1 and not self._chained:
                raise InvalidOperandError(f"nothing is stored to {RESULT!r}, which is D: .output({RESULT!r}, node)")
            else:
                stored[RESULT] = output, self._current
        return stored


def _check_read(read: _Read, known: Node) -> None:
    _, kind, dtype = known.attributes
    if read.kind not in (None, kind):
        raise InvalidOperandError(
            f"{known} is a {kind}, but {read.reader} reads it as a {read.kind}: choose another name for one of them"
        )
    if read.dtype is not None and read.dtype.value != dtype:
        raise InvalidOperandError(f"{known} is {dtype}, but {read.reader} reads it as {read.dtype.value}: give one")


def _merged(declared: Output, stored: Output, node: str | None) -> tuple[Output, str | None]:
    """A store with the element type that its output was declared with."""
    differ = declared.dtype is not None and stored.dtype not in (None, declared.dtype)
    if declared.kind != stored.kind or differ:
        forms = [
            " ".join(filter(None, [output.reduction, output.kind, output.dtype and output.dtype.value]))
            for output in (declared, stored)
        ]
        other = "declared again" if node is None else f"{node!r} is stored to it"
        raise InvalidOperandError(
            f"output {stored.name!r} is declared as {forms[0]}, but {other} as {forms[1]}: give one, or leave the "
            "declaration out"
        )
    return replace(stored, dtype=stored.dtype or declared.dtype), node


def _number(label: str, x: object) -> float:
    return finite(x, lambda given: InvalidOperandError(f"{label} is {given}; expected a finite number"))


def _ordered(declared: Mapping[str, _Declared]) -> list[str]:
    """The declared names, each after those of its inputs."""
    for node, inputs in declared.values():
        for name in inputs:
            if name not in declared:
                raise InvalidOperandError(
                    f"{node} reads {name!r}, which is not declared: declare it with .input, .constant "
                    "or .node, or give the step its kind"
                )
    try:
        return list(TopologicalSorter({name: node.inputs for name, node in declared.items()}).static_order())
    except CycleError as error:
        circle = " -> ".join(map(repr, reversed(error.args[1])))
        raise InvalidOperandError(f"the nodes {circle} are a cycle: have one of them read something else") from None
