"""Assembly of trees, shared by traced functions and builders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import (
    COLUMN,
    INPUT_DTYPES,
    MASK,
    RESULT,
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


def tree(
    written: Mapping[str, tuple[Output, Node]], *, stored: CutlassDtype, computed: CutlassDtype
) -> EpilogueVisitorTree:
    """The tree.

    Args:
        written: the outputs by name, D as `out`, and what is written to them. An element type is None where none is
            given: it is that of an outermost cast then, which the store performs.
        stored: the element type of matrices beside D that have none.
        computed: that of reductions.

    Raises:
        InvalidOperandError: names the node that is wrong, and the cure.
    """
    stores: dict[str, tuple[Output, Node]] = {}
    for name, (output, node) in written.items():
        dtype = output.dtype
        if output.reduction:
            dtype = computed
        elif output.kind != MASK:
            if node.op == "cast" and (dtype is None or dtype.value == node.attributes[0]):
                node, dtype = node.inputs[0], CutlassDtype(node.attributes[0])  # noqa: PLW2901
            dtype = dtype or (None if name == RESULT else stored)
        stores[name] = replace(output, dtype=dtype), node
    d, result = stores.pop(RESULT)
    if d.dtype is not None and d.dtype not in INPUT_DTYPES:
        valid = ", ".join(dtype.value for dtype in INPUT_DTYPES)
        raise InvalidOperandError(f"the result, {result}, is cast to {d.dtype.value!r}; valid: {valid}")
    made = EpilogueVisitorTree(result, stores.values(), result_dtype=d.dtype)
    for output, node in made.stores:
        if output.reduction and made.kind(node) in _SAME_ALONG[output.kind]:
            raise InvalidOperandError(
                f"output {output.name!r} reduces {node}, which is one value for a whole {made.kind(node)}, to a "
                f"{output.kind}: there is nothing to reduce; reduce what depends on the accumulator or on a matrix"
            )
    return made
