"""Trees that kernels compute without a tree too: bias and activation."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import RESULT, EpilogueVisitorTree
from ..reference import ACTIVATIONS
from . import EvtBuilder, Traced

SINGLE = "single"


def of_tree(tree: EpilogueVisitorTree) -> Traced:
    """A tree as if a function had returned D, or a dict of D and the tree's outputs."""
    names = (RESULT, *(output.name for output in tree.outputs))
    return Traced(tree, "dict" if tree.outputs else SINGLE, names)


@functools.cache
def common(bias: CutlassDtype | None, activation: str | None) -> Traced:
    """The tree of act(acc + bias).

    Args:
        bias: element type of the row that is added; None for none.
        activation: a name of `reference.ACTIVATIONS`, or None.

    Raises:
        InvalidOperandError: an unknown activation.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidOperandError(f"unknown activation {activation!r}; valid: {', '.join(ACTIVATIONS)}")
    builder = EvtBuilder()
    if bias is not None:
        builder.add_bias("bias", dtype=bias)
    if activation not in (None, "identity"):
        builder.activation(activation)
    return of_tree(builder.build())


class BiasAndActivation(NamedTuple):
    """A tree that is act(acc + bias), which kernels compute without a tree too.

    Attributes:
        bias: element type of the row that is added; None for none.
        activation: a name of `reference.ACTIVATIONS`, or None.
    """

    bias: CutlassDtype | None
    activation: str | None


@functools.lru_cache(256)
def as_bias_and_activation(program: str) -> BiasAndActivation | None:
    """The bias and activation of a tree's program, if it has nothing else; None for any other tree."""
    inputs = EpilogueVisitorTree.parse(program).inputs
    dtype = inputs[0].dtype if inputs else None
    for activation in (None, *ACTIVATIONS):
        if common(dtype, activation).tree.program == program:
            return BiasAndActivation(dtype, None if activation == "identity" else activation)
    return None
