"""Assembly of trees, shared by traced functions and builders."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import (
    COLUMN,
    INPUT_DTYPES,
    MASK,
    ROW,
    SCALAR,
    EpilogueVisitorTree,
    Node,
    Output,
)

_SAME_ALONG = {ROW: (ROW, SCALAR), COLUMN: (COLUMN, SCALAR), SCALAR: (SCALAR,)}
"""The kinds of values that do not vary along the dimensions that a reduction to a kind covers."""


def input_node(name: str, kind: str, dtype: CutlassDtype | None) -> Node:
    """The node of an operand; a mask has no dtype."""
    return Node("input", (), (name, kind, MASK if kind == MASK or dtype is None else dtype.value))


def stored(node: Node, dtype: CutlassDtype | None = None) -> tuple[Node, CutlassDtype | None]:
    """The node to store and its type: the store performs an outermost cast, unless it asks for another type."""
    if node.op == "cast" and (dtype is None or dtype.value == node.attributes[0]):
        return node.inputs[0], CutlassDtype(node.attributes[0])
    return node, dtype


def tree(result: Node, stores: Iterable[tuple[Output, Node]], result_dtype: CutlassDtype | None) -> EpilogueVisitorTree:
    """The tree.

    Raises:
        InvalidOperandError: names the node that is wrong, and the cure.
    """
    if result_dtype is not None and result_dtype not in INPUT_DTYPES:
        valid = ", ".join(dtype.value for dtype in INPUT_DTYPES)
        raise InvalidOperandError(f"the result, {result}, is cast to {result_dtype.value!r}; valid: {valid}")
    try:
        made = EpilogueVisitorTree(result, stores, result_dtype=result_dtype)
    except ValueError as error:
        raise InvalidOperandError(str(error)) from None
    for output, node in made.stores:
        if output.reduction and made.kind(node) in _SAME_ALONG[output.kind]:
            raise InvalidOperandError(
                f"output {output.name!r} reduces {node}, which is one value for a whole {made.kind(node)}, to a "
                f"{output.kind}: there is nothing to reduce; reduce what depends on the accumulator or on a matrix"
            )
    return made
