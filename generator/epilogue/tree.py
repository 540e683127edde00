"""EpilogueVisitorTree: a directed acyclic graph over an accumulator, in a canonical form.

A tree computes, for every element of a result, D and its further outputs and reductions from `acc`, which is
alpha * A B + beta * C with the scales of A and B. Its values are floats (doubles for f64); only `cast`, stores and the
result round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..dtypes import CutlassDtype
from ..errors import InvalidOperandError, expect, shown
from .ops import OPS

SCALAR, ROW, COLUMN, MATRIX, MASK = "scalar", "row", "column", "matrix", "mask"
KINDS = (SCALAR, ROW, COLUMN, MATRIX, MASK)
"""How an operand is broadcast to the result, in CUTLASS's words: one value; one row (N,), the same for all rows; one
column (M,); a matrix (M, N); or a matrix of bits, eight to a byte along N, the first in the lowest bit."""

REDUCED_KINDS = (SCALAR, ROW, COLUMN)
REDUCTIONS = ("sum", "max", "amax")

MAX_NODES = 128
MAX_OPERANDS = 16
RESULT = "out"
ACCUMULATOR = "acc"
PREFIX = "evt:"

INPUT_DTYPES = (
    CutlassDtype.F64,
    CutlassDtype.F32,
    CutlassDtype.F16,
    CutlassDtype.BF16,
    CutlassDtype.I8,
    CutlassDtype.I32,
    CutlassDtype.F8E4M3,
    CutlassDtype.F8E5M2,
)
"""Element types that a tree reads, stores and casts to."""


@dataclass(frozen=True, eq=False)
class Node:
    """A value. Nodes are compared by identity while a graph is built; trees compare them by the computation.

    Attributes:
        op: `acc`, `input`, `constant`, `cast` or a name of OPS.
        inputs: the values that it is computed from.
        attributes: numbers of an op or of a constant; dtype of a cast; name, kind and dtype of an input.
        label: its name in messages and drawings; it does not affect the computation.
    """

    op: str
    inputs: tuple[Node, ...] = ()
    attributes: tuple[str | float, ...] = ()
    label: str = ""

    def __str__(self) -> str:
        if self.op == "input" and self.attributes:
            return f"input {self.attributes[0]!r}"
        return f"{self.op} {self.label!r}" if self.label else self.op


@dataclass(frozen=True)
class Input:
    """An operand that a tree reads.

    Attributes:
        name: its name among the operands of a call.
        kind: one of KINDS.
        dtype: its element type; None for a mask.
    """

    name: str
    kind: str
    dtype: CutlassDtype | None


@dataclass(frozen=True)
class Output:
    """An operand that a tree writes beside the result.

    Attributes:
        name: its name among the operands of a call.
        kind: `matrix` or `mask`; of a reduction `row` (N,), `column` (M,) or `scalar`.
        dtype: its element type; None for a mask; f32 for reductions (f64 where the accumulator is f64).
        reduction: one of REDUCTIONS, or empty.
    """

    name: str
    kind: str
    dtype: CutlassDtype | None
    reduction: str = ""


class EpilogueVisitorTree:
    """A graph of values over the accumulator, with the result and the other outputs.

    Two trees are equal if they compute the same from operands of the same names, in whatever order they were built;
    their ids are then equal too.

    Attributes:
        result: the node of D.
        result_dtype: the element type that D must have, if the tree decides it.
        stores: (output, node) of everything else that is written, by name.
        inputs: the operands read, in the order in which kernels take them.
        outputs: the outputs of `stores`, in the same order.
    """

    def __init__(
        self,
        result: Node,
        stores: Iterable[tuple[Output, Node]] = (),
        *,
        result_dtype: CutlassDtype | None = None,
        canonical: bool = False,
    ) -> None:
        """A tree.

        Args:
            result: the node of D.
            stores: the other outputs, with their nodes.
            result_dtype: the element type that D must have; None leaves it to the call.
            canonical: the graph is that of a program, whose order is kept whatever the names of its operands.

        Raises:
            InvalidOperandError: names the node that is wrong, and the cure.
        """
        self.result = result
        self.result_dtype = result_dtype
        expect(result_dtype, (CutlassDtype, type(None)), "result_dtype", "a CutlassDtype, or None")
        pairs = _checked_stores(stores)
        _check_graph([result, *(node for _, node in pairs)])
        written = pairs if canonical is True else sorted(pairs, key=lambda store: store[0].name)
        self.stores: tuple[tuple[Output, Node], ...] = tuple(written)
        self._order = _topological([result, *(node for _, node in self.stores)])
        for node in self._order:
            _check_node(node)
        self._check_names()
        self._lines, self._index, self.inputs = self._canonical(in_order=canonical is True)
        self.outputs = tuple(output for output, _ in self.stores)
        if len(self._values) > MAX_NODES:
            raise InvalidOperandError(
                f"the tree has {len(self._values)} values; a kernel takes at most {MAX_NODES}: split it"
            )
        if len(self.inputs) + len(self.outputs) > MAX_OPERANDS:
            raise InvalidOperandError(
                f"the tree has {len(self.inputs)} inputs and {len(self.outputs)} outputs beside D; a kernel takes at "
                f"most {MAX_OPERANDS} together"
            )
        if self.kind(result) not in (MATRIX, MASK):
            raise InvalidOperandError(
                f"the result, {result}, is one value for a whole {self.kind(result)}: it does not depend on the "
                "accumulator or on a matrix"
            )
        if all(node.op != ACCUMULATOR for node in self._order):
            raise InvalidOperandError("nothing in the tree reads the accumulator: there is nothing to fuse with")

    @classmethod
    def parse(cls, program: str, names: Iterable[str] | None = None) -> EpilogueVisitorTree:
        """The tree of a program.

        Args:
            program: the text of `program`.
            names: of the inputs and then of the outputs, in its order; without them, `i0`, `i1`, ..., `o0`, ....

        Raises:
            InvalidOperandError: not the text of a tree.
        """
        expect(program, str, "program", "the text of a tree")
        if not program.startswith(PREFIX):
            raise InvalidOperandError(f"{program!r} is no epilogue program: it does not begin with {PREFIX}")
        given = None
        if names is not None:
            given = _listed(names, "names", "of the inputs and outputs")
            for label in given:
                expect(label, str, "names", "a name for each of the inputs and outputs")
        nodes: list[Node] = []
        stores: list[tuple[Output, Node]] = []
        result: Node | None = None
        inputs = outputs = 0

        def name(prefix: str, number: int) -> str:
            return f"{prefix}{number}" if given is None else given.pop(0)

        try:
            for line in program[len(PREFIX) :].split(";"):
                op, *words = line.split(":")
                if op == "out":
                    result = nodes[int(words[0])]
                elif op == "store":
                    dtype = None if words[1] == MASK else CutlassDtype(words[1])
                    output = Output(name("o", outputs), MASK if dtype is None else MATRIX, dtype)
                    stores.append((output, nodes[int(words[0])]))
                    outputs += 1
                elif op == "reduce":
                    kind, reduction, dtype = words[1], words[2], CutlassDtype(words[3])
                    stores.append((Output(name("o", outputs), kind, dtype, reduction), nodes[int(words[0])]))
                    outputs += 1
                elif op == "input":
                    nodes.append(Node(op, (), (name("i", inputs), *words)))
                    inputs += 1
                elif op == "constant":
                    nodes.append(Node(op, (), (float.fromhex(words[0]),)))
                elif op == "cast":
                    nodes.append(Node(op, (nodes[int(words[0])],), (words[1],)))
                elif op == ACCUMULATOR:
                    nodes.append(Node(op))
                else:
                    arity = OPS[op].arity
                    values = tuple(nodes[int(word)] for word in words[:arity])
                    nodes.append(Node(op, values, tuple(float.fromhex(word) for word in words[arity:])))
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InvalidOperandError(f"{program!r} is no epilogue program: {error}") from None
        if result is None:
            raise InvalidOperandError(f"{program!r} is no epilogue program: it has no result")
        if given:
            raise InvalidOperandError(f"{program!r} has no operands for the names {', '.join(given)}")
        made = cls(result, stores, canonical=True)
        if made.program != program:
            raise InvalidOperandError(f"{program!r} is no epilogue program: as one it would be {made.program!r}")
        return made

    @property
    def program(self) -> str:
        """The program a kernel is compiled from: the tree without the names of its operands. `parse` reads it back."""
        return PREFIX + ";".join(self._lines)

    @cached_property
    def id(self) -> str:
        """`evt_` and 16 hexadecimal digits of a hash over the canonical form with its names."""
        return f"evt_{_digest([self._identity])[:16]}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """One node for each distinct value, in the order of the program."""
        return tuple(self._values)

    def index(self, node: Node) -> int:
        """The number of a node's value in the program.

        Raises:
            InvalidOperandError: it is no node of this tree.
        """
        self._expect_own(node)
        return self._index[node]

    def kind(self, node: Node) -> str:
        """The kind of a node's value over the result: `scalar`, `row`, `column` or `matrix`.

        Raises:
            InvalidOperandError: it is no node of this tree.
        """
        self._expect_own(node)
        return self._kinds[node]

    def _expect_own(self, node: Node) -> None:
        expect(node, Node, "node")
        if node not in self._index:
            raise InvalidOperandError(f"{node} is no node of this tree")

    def to_dot(self) -> str:
        """The tree in Graphviz's language."""
        lines = ["digraph epilogue {", "  rankdir=BT;", '  node [fontname="sans-serif", shape=box, style=rounded];']
        for number, node in enumerate(self._values):
            text = [_title(node)]
            if node.label and node.op != "input":
                text.append(node.label)
            shape = ", shape=ellipse" if not node.inputs else ""
            lines.append(f"  v{number} [label={_quoted(text)}{shape}];")
            lines += [f"  v{self._index[value]} -> v{number};" for value in node.inputs]
        for number, (output, node) in enumerate([(self._result, self.result), *self.stores]):
            description = " ".join(
                filter(None, [output.reduction, output.kind, output.dtype.value if output.dtype else ""])
            )
            lines.append(f"  o{number} [label={_quoted([output.name, description])}, shape=box, style=filled];")
            lines.append(f"  v{self._index[node]} -> o{number};")
        return "\n".join([*lines, "}", ""])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpilogueVisitorTree) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        names = ", ".join(f"{operand.name}: {operand.kind}" for operand in self.inputs)
        written = ", ".join([RESULT, *(output.name for output in self.outputs)])
        return f"<EpilogueVisitorTree {self.id}: {', '.join(filter(None, [ACCUMULATOR, names]))} -> {written}>"

    @property
    def _result(self) -> Output:
        return Output(RESULT, MATRIX, self.result_dtype)

    @property
    def _identity(self) -> str:
        dtype = "" if self.result_dtype is None else self.result_dtype.value
        names = [operand.name for operand in self.inputs] + [output.name for output in self.outputs]
        return " ".join([self.program, f"->{dtype}", *names])

    def _check_names(self) -> None:
        seen: dict[str, str] = {ACCUMULATOR: "the accumulator", RESULT: "the result"}
        declared: dict[str, tuple[str | float, ...]] = {}
        for node in self._order:
            if node.op != "input":
                continue
            name = str(node.attributes[0])
            if declared.setdefault(name, node.attributes) != node.attributes:
                raise InvalidOperandError(
                    f"input {name!r} is declared twice, as {declared[name][1:]} and {node.attributes[1:]}"
                )
            if name in seen:
                raise InvalidOperandError(f"input {name!r} has the name of {seen[name]}: choose another name")
        seen |= dict.fromkeys(declared, "an input")
        for output, node in self.stores:
            if output.name in seen:
                raise InvalidOperandError(
                    f"{node} is stored to {output.name!r}, the name of {seen[output.name]}: choose another"
                )
            seen[output.name] = "another output"
            _check_output(output, node)

    def _canonical(self, *, in_order: bool) -> tuple[list[str], dict[Node, int], tuple[Input, ...]]:
        """Lines of the program, the number of each node's value, and the inputs in order.

        Equal values get one number. Operands of commutative operations are sorted by their computations, and by
        names of inputs only where these are equal, so that names do not affect the choice of kernel.
        """
        anonymous: dict[Node, str] = {}
        named: dict[Node, str] = {}
        ordered: dict[Node, tuple[Node, ...]] = {}
        for node in self._order:
            inputs = node.inputs
            if node.op in OPS and OPS[node.op].commutative and not in_order:
                inputs = tuple(sorted(inputs, key=lambda leaf: (anonymous[leaf], named[leaf])))
            ordered[node] = inputs
            own = [node.op, *map(_text, _attributes(node))]
            shown = [*own[:1], *own[2:]] if node.op == "input" else own
            anonymous[node] = _digest([*shown, *(anonymous[operand] for operand in inputs)])
            named[node] = _digest([*own, *(named[operand] for operand in inputs)])

        # Depth first from the result and then the stores: an order that is independent of that of the nodes' creation.
        lines: list[str] = []
        number: dict[str, int] = {}
        inputs_found: list[Input] = []
        self._values: list[Node] = []
        for node in _topological([self.result, *(node for _, node in self.stores)], ordered):
            if named[node] in number:
                continue
            number[named[node]] = len(self._values)
            self._values.append(node)
            if node.op == "input":
                name, kind, dtype = map(str, _attributes(node))
                inputs_found.append(Input(name, kind, None if kind == MASK else CutlassDtype(dtype)))
                lines.append(f"input:{kind}:{dtype}")
            else:
                places = [str(number[named[operand]]) for operand in ordered[node]]
                lines.append(":".join([node.op, *places, *map(_text, node.attributes)]))
        index = {node: number[named[node]] for node in self._order}
        lines.append(f"out:{index[self.result]}")
        for output, node in self.stores:
            dtype = MASK if output.dtype is None else output.dtype.value
            if output.reduction:
                lines.append(f"reduce:{index[node]}:{output.kind}:{output.reduction}:{dtype}")
            else:
                lines.append(f"store:{index[node]}:{dtype}")
        return lines, index, tuple(inputs_found)

    @cached_property
    def _kinds(self) -> Mapping[Node, str]:
        kinds: dict[Node, str] = {}
        for node in self._order:
            if node.op == ACCUMULATOR:
                kinds[node] = MATRIX
            elif node.op == "input":
                kinds[node] = MATRIX if node.attributes[1] == MASK else str(node.attributes[1])
            else:
                below = {kinds[value] for value in node.inputs} - {SCALAR}
                kinds[node] = SCALAR if not below else (below.pop() if len(below) == 1 else MATRIX)
        return kinds


def _listed(given: Any, name: str, of: str) -> list[Any]:
    """The elements of an iterable, as a list."""
    expect(given, Iterable, name, f"a sequence {of}")
    try:
        return list(given)
    except TypeError:  # a 0-dimensional array, which claims to be iterable
        raise InvalidOperandError(f"{name} is {shown(given)}; expected a sequence {of}") from None


def _checked_stores(stores: Any) -> list[tuple[Output, Node]]:
    """Pairs of outputs and nodes, with the types of all fields checked: later code compares them."""
    pairs = _listed(stores, "stores", "of (Output, Node)")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or [type(item) for item in pair] != [Output, Node]:
            raise InvalidOperandError(f"stores has {shown(pair)}; expected pairs of an Output and a Node")
        output = pair[0]
        for field in ("name", "kind", "reduction"):
            expect(getattr(output, field), str, f"{field} of an output", "a name")
        expect(output.dtype, (CutlassDtype, type(None)), f"dtype of output {output.name!r}", "a CutlassDtype, or None")
    return pairs


def _check_graph(roots: Iterable[Any]) -> None:
    """Refuses anything but a graph of nodes: later code hashes nodes and compares their fields."""
    left, seen = list(roots), set()
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        expect(node, Node, "a value of the tree", "a Node")
        expect(node.op, str, "op of a node", "a name")
        for field in ("inputs", "attributes"):
            expect(getattr(node, field), tuple, f"{field} of a node {node.op!r}")
        for attribute in node.attributes:
            expect(attribute, (str, int, float), f"an attribute of a node {node.op!r}", "a name or a number")
        left += node.inputs


def _topological(roots: Iterable[Node], inputs: Mapping[Node, tuple[Node, ...]] | None = None) -> list[Node]:
    """Every node once, after its inputs; depth first, without recursion."""
    order: list[Node] = []
    done: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, Iterator[Node]]] = []
        if root not in done:
            done.add(root)
            stack.append((root, iter(inputs[root] if inputs else root.inputs)))
        while stack:
            node, left = stack[-1]
            following = next((value for value in left if value not in done), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                done.add(following)
                stack.append((following, iter(inputs[following] if inputs else following.inputs)))
    return order


_ATTRIBUTES = {ACCUMULATOR: 0, "constant": 1, "cast": 1, "input": 3}
"""The number of attributes of nodes that are no operations."""


def _check_node(node: Node) -> None:
    count = _ATTRIBUTES.get(node.op)
    if count is not None and len(node.attributes) != count:
        raise InvalidOperandError(f"a node {node.op!r} has {count} attributes, not {node.attributes}")
    if node.op in ("input", "constant") and node.inputs:
        raise InvalidOperandError(f"{node} is computed from nothing, not from {len(node.inputs)} values")
    if node.op == "input":
        name, kind, dtype = node.attributes
        if not str(name).isidentifier():
            raise InvalidOperandError(f"input {name!r}: a name is a Python identifier")
        if kind not in KINDS:
            raise InvalidOperandError(f"input {name!r} is a {kind!r}; valid: {', '.join(KINDS)}")
        if kind != MASK and dtype not in [element.value for element in INPUT_DTYPES]:
            valid = ", ".join(element.value for element in INPUT_DTYPES)
            raise InvalidOperandError(f"input {name!r} has element type {dtype!r}; valid: {valid}")
        return
    if node.op == "constant":
        if not isinstance(node.attributes[0], float) or math.isnan(node.attributes[0]):
            raise InvalidOperandError(f"a constant is {node.attributes[0]!r}; expected a number")
        return
    if node.op == "cast":
        if node.attributes[0] not in [element.value for element in INPUT_DTYPES]:
            valid = ", ".join(element.value for element in INPUT_DTYPES)
            raise InvalidOperandError(f"{node}: cast to {node.attributes[0]!r}; valid: {valid}")
        arity = 1
    elif node.op == ACCUMULATOR:
        arity = 0
    else:
        op = OPS.get(node.op)
        if op is None:
            raise InvalidOperandError(f"unknown operation {node.op!r}; valid: {', '.join(OPS)}")
        arity = op.arity
        if len(node.attributes) != len(op.attributes):
            raise InvalidOperandError(f"{node} takes {', '.join(op.attributes) or 'no numbers'}, not {node.attributes}")
        for name, value in zip(op.attributes, node.attributes, strict=True):
            if not isinstance(value, float) or math.isnan(value):
                raise InvalidOperandError(f"{node}: {name} is {value!r}; expected a number")
        if node.op == "clamp" and float(node.attributes[0]) > float(node.attributes[1]):
            raise InvalidOperandError(f"{node}: low is {node.attributes[0]}, above high, {node.attributes[1]}")
    if len(node.inputs) != arity:
        raise InvalidOperandError(f"{node} takes {arity} values, not {len(node.inputs)}")


def _attributes(node: Node) -> tuple[str | float, ...]:
    """The attributes of a node that affect its value: a mask has no element type."""
    if node.op == "input" and node.attributes[1] == MASK:
        return (*node.attributes[:2], MASK)
    return node.attributes


def _check_output(output: Output, node: Node) -> None:
    if not output.name.isidentifier():
        raise InvalidOperandError(f"output {output.name!r} of {node}: a name is a Python identifier")
    if not output.reduction:
        if output.kind not in (MATRIX, MASK):
            raise InvalidOperandError(f"output {output.name!r} is a {output.kind!r}; stored are {MATRIX} and {MASK}")
        if output.kind == MATRIX and output.dtype not in INPUT_DTYPES:
            valid = ", ".join(dtype.value for dtype in INPUT_DTYPES)
            given = output.dtype.value if output.dtype else None
            raise InvalidOperandError(f"output {output.name!r} has element type {given!r}; valid: {valid}")
        return
    if output.reduction not in REDUCTIONS:
        raise InvalidOperandError(
            f"output {output.name!r}: reduction {output.reduction!r}; valid: {', '.join(REDUCTIONS)}"
        )
    if output.kind not in REDUCED_KINDS:
        raise InvalidOperandError(
            f"output {output.name!r} is reduced to a {output.kind!r}; valid: {', '.join(REDUCED_KINDS)}"
        )
    if output.dtype not in (CutlassDtype.F32, CutlassDtype.F64):
        raise InvalidOperandError(
            f"output {output.name!r} is a reduction: its element type is f32, or f64 of f64 products"
        )


def _title(node: Node) -> str:
    words = [node.op, *map(str, node.attributes)]
    return " ".join(words[1:] if node.op in ("input", "constant") else words)


def _quoted(lines: list[str]) -> str:
    text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines if line)
    return f'"{text}"'


def _text(attribute: str | float) -> str:
    return attribute if isinstance(attribute, str) else float(attribute).hex()


def _digest(words: Iterable[str]) -> str:
    import hashlib  # loads OpenSSL, which importing the package need not

    return hashlib.sha256("\0".join(words).encode()).hexdigest()
