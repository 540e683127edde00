"""EvtBuilder: epilogue trees without tracing, step by step or node by node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, NamedTuple

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
from . import assemble
from .element_types import element_type
from .values import finite

_DEFAULTS: Final = {"leaky_relu": {"slope": LEAKY_SLOPE}}


class _Declared(NamedTuple):
    """A node by name, and by the names of its operands; a leaf is an input or a constant."""

    name: str
    op: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    leaf: bool = False

    def __str__(self) -> str:
        return f"{self.op if self.leaf else 'node'} {self.name!r}"


class _Read(NamedTuple):
    """An operand that a step of the chain reads by name, and what it asks of it if it is declared nowhere."""

    name: str
    reader: str
    kind: str | None
    dtype: Any
    default_kind: str | None


class _Written(NamedTuple):
    """An output, and the name of the node that is stored to it; None where it is only declared."""

    name: str
    node: str | None
    kind: str
    dtype: Any
    reduction: str = ""


class EvtBuilder:
    """Puts an epilogue tree together; every method but `build` returns the builder.

    A chain has a current value, at first the accumulator, and each step makes the next one of it. A graph has nodes
    with names, which may refer to nodes that are declared later. A builder may mix both. D is what is stored to `out`,
    else the chain's last value.
    """

    def __init__(self, *, compute_dtype: Any = CutlassDtype.F32) -> None:
        """A builder of an empty tree, whose D is the accumulator.

        Args:
            compute_dtype: f64 where the product is, else f32: the type of reductions, and of operands and stored
                values where none is given.
        """
        self._compute_dtype = element_type(compute_dtype, "compute_dtype")
        self._declared: list[_Declared] = []
        self._reads: list[_Read] = []
        self._written: list[_Written] = []
        self._current = ACCUMULATOR
        self._chained = False

    # ------------------------------------------------------------------------------------------------------------------
    # Graph
    # ------------------------------------------------------------------------------------------------------------------

    def input(self, name: str, kind: str, dtype: Any = None) -> EvtBuilder:
        """An operand: `scalar`, `row` (N,), `column` (M,), `matrix` (M, N) or `mask`, which has no dtype."""
        expect(kind, str, f"kind of operand {shown(name)}", "a name")
        return self._declare(_Declared(name, "input", (), {"kind": kind, "dtype": dtype}, leaf=True))

    def constant(self, name: str, x: float) -> EvtBuilder:
        """A number."""
        return self._declare(_Declared(name, "constant", (), {"value": x}, leaf=True))

    def node(self, name: str, op: str, *inputs: str, **attributes: Any) -> EvtBuilder:
        """The operation `op`, of `generator.epilogue.ops.OPS`, of the named values; `acc` is the accumulator.

        Args:
            name: of the node.
            op: the operation; `cast` takes `dtype=`.
            inputs: names of nodes.
            attributes: the operation's numbers by name.
        """
        return self._declare(_Declared(name, op, inputs, attributes))

    def output(self, name: str, node: str | None = None, *, dtype: Any = None, kind: str = MATRIX) -> EvtBuilder:
        """A matrix or mask that the node is stored to; `out` is D.

        Args:
            name: of the output.
            node: the node; None declares an output that something is stored to later.
            dtype: its element type; if None that of the node's cast, else `compute_dtype`. D's is the call's where
                neither says it.
            kind: `matrix`, or `mask` for node != 0 as bits.
        """
        return self._write(_Written(name, node, kind, dtype))

    def reduce_node(self, name: str, node: str, kind: str, reduction: str = "sum") -> EvtBuilder:
        """A reduction of the node.

        Args:
            name: of the output.
            node: the node.
            kind: `row` reduces over M to (..., N), `column` over N to (..., M), `scalar` over everything.
            reduction: `sum`, `max` or `amax`.
        """
        expect(node, str, f"node of output {shown(name)}", "a name")
        return self._write(_Written(name, node, kind, None, reduction))

    # ------------------------------------------------------------------------------------------------------------------
    # Chain
    # ------------------------------------------------------------------------------------------------------------------

    def scale(self, by: str | float) -> EvtBuilder:
        """Times a number, a node, or an operand of one element."""
        return self._then("multiply", self._current, self._read("scale", by, default_kind=SCALAR))

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
            term = self._step("multiply", term, self._read("add_matrix", scale, default_kind=SCALAR))
        return self._then("add", self._current, term)

    def activation(self, name: str, **attributes: Any) -> EvtBuilder:
        """An operation on the current value alone: relu, gelu, ..., with its numbers, as `slope` of leaky_relu."""
        return self._then(name, self._current, **attributes)

    def binary(self, op: str, other: str | float, kind: str | None = None, dtype: Any = None) -> EvtBuilder:
        """An operation on the current value and then another: a number, a node, or an operand of this kind."""
        if kind is not None:
            expect(kind, str, f"kind of what {shown(op)} reads", "a name")
        return self._then(op, self._current, self._read(op, other, kind, dtype))

    def aux_load(self, name: str, dtype: Any = None, kind: str = MATRIX) -> EvtBuilder:
        """An operand that later steps read by its name; the current value stays."""
        self._chained = True
        return self.input(name, kind, dtype)

    def aux_store(self, name: str, dtype: Any = None) -> EvtBuilder:
        """Stores the current value to a matrix."""
        self._chained = True
        return self.output(name, self._current, dtype=dtype)

    def mask_store(self, name: str) -> EvtBuilder:
        """Stores where the current value is not 0, as bits."""
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

    # ------------------------------------------------------------------------------------------------------------------

    def build(self) -> EpilogueVisitorTree:
        """The tree.

        Raises:
            InvalidOperandError: a cycle, a missing or repeated name, an unknown operation, a node that nothing uses, an
                output that nothing or two nodes are stored to, or what a tree refuses; names the node and the cure.
        """
        declared = self._table()
        written = self._outputs()
        nodes = {ACCUMULATOR: Node(ACCUMULATOR)}
        for name in _ordered(declared):
            nodes[name] = self._node(declared[name], nodes)
        for output in written.values():
            if output.node not in nodes:
                raise InvalidOperandError(
                    f"{output.node!r} is stored to {output.name!r}, but not declared: add the node"
                )
        used = _below(declared, [str(output.node) for output in written.values()])
        for name, unread in declared.items():
            if name not in used:
                raise InvalidOperandError(f"no output uses {unread}: .output({RESULT!r}, ...) stores D; or remove it")
        return self._tree(nodes, written)

    def _write(self, written: _Written) -> EvtBuilder:
        expect(written.name, str, "name of an output", "a name")
        for field in ("kind", "reduction"):
            expect(getattr(written, field), str, f"{field} of output {written.name!r}", "a name")
        if written.node is not None:
            expect(written.node, str, f"node of output {written.name!r}", "a name")
        self._written.append(written)
        return self

    def _declare(self, declared: _Declared) -> EvtBuilder:
        words: tuple[object, ...] = (declared.name, declared.op, *declared.inputs)
        for word in words:
            if not isinstance(word, str):
                named = isinstance(declared.name, str) and isinstance(declared.op, str)
                raise InvalidOperandError(
                    f"{declared if named else 'a node'} has {shown(word)} where a name is expected: nodes are given "
                    "by name, numbers by .constant"
                )
        self._declared.append(declared)
        return self

    def _name(self) -> str:
        """A name for the next declaration of the chain."""
        return f"step {len(self._declared) + 1}"

    def _step(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = self._name()
        self.node(name, op, *inputs, **attributes)
        return name

    def _then(self, op: str, *inputs: str, **attributes: Any) -> EvtBuilder:
        self._current = self._step(op, *inputs, **attributes)
        self._chained = True
        return self

    def _read(
        self,
        reader: str,
        source: str | float,
        kind: str | None = None,
        dtype: Any = None,
        *,
        default_kind: str | None = None,
    ) -> str:
        """The name of a step's operand; declares a constant if it is a number."""
        if not isinstance(source, str):
            name = self._name()
            self.constant(name, source)
            return name
        self._reads.append(_Read(source, reader, kind, dtype, default_kind))
        return source

    def _table(self) -> dict[str, _Declared]:
        """All declarations by name, with those of operands that steps of the chain name first."""
        declared: dict[str, _Declared] = {}
        for node in self._declared:
            if node.name == ACCUMULATOR:
                raise InvalidOperandError(f"{node} has the name of the accumulator: choose another name")
            if node.name in declared:
                raise InvalidOperandError(f"{node} is declared twice: choose another name for one of them")
            declared[node.name] = node
        for read in self._reads:
            if read.name == ACCUMULATOR:
                continue
            known = declared.get(read.name)
            kind = read.kind or read.default_kind
            if known is None and kind is not None:
                declared[read.name] = _Declared(read.name, "input", (), {"kind": kind, "dtype": read.dtype}, leaf=True)
            elif known is not None:
                self._check_read(read, known)
        return declared

    def _check_read(self, read: _Read, known: _Declared) -> None:
        if not known.leaf or known.op != "input":
            return
        kind, dtype = known.attributes["kind"], self._operand_dtype(known)
        if read.kind not in (None, kind):
            raise InvalidOperandError(
                f"{known} is a {kind}, but {read.reader} reads it as a {read.kind}: choose another name for one of them"
            )
        if read.dtype is not None and element_type(read.dtype, f"{read.reader} of {known}") is not dtype:
            raise InvalidOperandError(
                f"{known} is {dtype.value if dtype else MASK}, but {read.reader} reads it as {read.dtype}: give one"
            )

    def _operand_dtype(self, declared: _Declared) -> CutlassDtype | None:
        if declared.attributes["kind"] == MASK:
            return None
        dtype = declared.attributes["dtype"]
        return self._compute_dtype if dtype is None else element_type(dtype, str(declared))

    def _node(self, declared: _Declared, nodes: Mapping[str, Node]) -> Node:
        attributes = dict(declared.attributes)
        if declared.leaf and declared.op == "input":
            return assemble.input_node(declared.name, attributes["kind"], self._operand_dtype(declared))
        if declared.leaf:
            return Node("constant", (), (_number(declared, "value", attributes["value"]),), declared.name)
        inputs = tuple(nodes[operand] for operand in declared.inputs)
        if declared.op == "cast":
            _check_attributes(declared, attributes, ("dtype",))
            return Node("cast", inputs, (element_type(attributes["dtype"], str(declared)).value,), declared.name)
        if declared.op not in OPS:
            raise InvalidOperandError(
                f"node {declared.name!r} has unknown operation {declared.op!r}; valid: {', '.join(OPS)}, cast"
            )
        attributes = {**_DEFAULTS.get(declared.op, {}), **attributes}
        expected = OPS[declared.op].attributes
        _check_attributes(declared, attributes, expected)
        numbers = tuple(_number(declared, name, attributes[name]) for name in expected)
        return Node(declared.op, inputs, numbers, declared.name)

    def _outputs(self) -> dict[str, _Written]:
        """The stored outputs by name, D included, each merged with its declaration."""
        stored: dict[str, _Written] = {}
        for output in self._written:
            if output.node is not None and output.name in stored:
                raise InvalidOperandError(
                    f"{stored[output.name].node!r} and {output.node!r} are both stored to {output.name!r}: "
                    "choose another name"
                )
            if output.node is not None:
                stored[output.name] = output
        if RESULT not in stored:
            if self._declared and not self._chained:
                raise InvalidOperandError(f"nothing is stored to {RESULT!r}, which is D: .output({RESULT!r}, node)")
            stored[RESULT] = _Written(RESULT, self._current, MATRIX, None)
        for output in self._written:
            if output.name not in stored:
                raise InvalidOperandError(
                    f"output {output.name!r} is declared, but nothing is stored to it: "
                    f".output({output.name!r}, node), or remove it"
                )
            if output.node is None:
                stored[output.name] = _merged(output, stored[output.name])
        return stored

    def _tree(self, nodes: Mapping[str, Node], written: Mapping[str, _Written]) -> EpilogueVisitorTree:
        output = written[RESULT]
        if output.reduction or output.kind != MATRIX:
            raise InvalidOperandError(f"{output.node!r} is stored to {RESULT!r} as a {output.kind}; D is a matrix")
        result, result_dtype = assemble.stored(nodes[str(output.node)], _dtype(output))
        stores = [self._store(output, nodes[str(output.node)]) for name, output in written.items() if name != RESULT]
        return assemble.tree(result, stores, result_dtype)

    def _store(self, output: _Written, node: Node) -> tuple[Output, Node]:
        if output.reduction:
            return Output(output.name, output.kind, self._compute_dtype, output.reduction), node
        if output.kind == MASK:
            if output.dtype is not None:
                raise InvalidOperandError(f"output {output.name!r} is a mask of bits: leave its dtype out")
            return Output(output.name, MASK, None), node
        node, dtype = assemble.stored(node, _dtype(output))
        return Output(output.name, output.kind, dtype or self._compute_dtype), node


def _merged(declared: _Written, stored: _Written) -> _Written:
    """A store with the element type that its output was declared with."""
    differ = declared.dtype is not None and stored.dtype is not None and _dtype(declared) is not _dtype(stored)
    if declared.kind != stored.kind or differ:
        forms = [
            " ".join(filter(None, [output.reduction, output.kind, str(output.dtype or "")]))
            for output in (declared, stored)
        ]
        raise InvalidOperandError(
            f"output {stored.name!r} is declared as {forms[0]}, but {stored.node!r} is stored to it as {forms[1]}: "
            "give one, or leave the declaration out"
        )
    return stored._replace(dtype=stored.dtype if declared.dtype is None else declared.dtype)


def _dtype(output: _Written) -> CutlassDtype | None:
    return None if output.dtype is None else element_type(output.dtype, f"output {output.name!r}")


def _number(declared: _Declared, name: str, x: object) -> float:
    try:
        return finite(x)
    except ValueError as error:
        raise InvalidOperandError(f"{declared}: {name} is {error}; expected a finite number") from None


def _check_attributes(declared: _Declared, given: Mapping[str, Any], expected: tuple[str, ...]) -> None:
    if set(given) != set(expected):
        raise InvalidOperandError(
            f"node {declared.name!r}: {declared.op} takes {', '.join(expected) or 'no numbers'}; given are "
            f"{', '.join(given) or 'none'}"
        )


def _ordered(declared: Mapping[str, _Declared]) -> list[str]:
    """Every declared name after those of its inputs.

    Raises:
        InvalidOperandError: names an input that is not declared, or the path of a cycle.
    """
    for node in declared.values():
        for name in node.inputs:
            if name != ACCUMULATOR and name not in declared:
                raise InvalidOperandError(
                    f"{node} reads {name!r}, which is not declared: declare it with .input, .constant or .node, or "
                    "give the step its kind"
                )
    try:
        order = list(TopologicalSorter({name: node.inputs for name, node in declared.items()}).static_order())
    except CycleError as error:
        circle = " -> ".join(map(repr, reversed(error.args[1])))
        raise InvalidOperandError(f"the nodes {circle} are a cycle: have one of them read something else") from None
    return [name for name in order if name != ACCUMULATOR]


def _below(declared: Mapping[str, _Declared], roots: Iterable[str]) -> set[str]:
    """The names of everything that the roots are computed from, and their own."""
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += declared[name].inputs if name in declared else ()
    return found
