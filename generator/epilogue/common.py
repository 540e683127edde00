"""The trees that prebuilt kernels have: what most layers put behind a product."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..dtypes import CutlassDtype
from .lower import LINEAR, epilogue_id, with_source
from .tree import ACCUMULATOR, MATRIX, ROW, SCALAR, EpilogueVisitorTree, Node, Output

BIAS_ACTIVATIONS = ("", "relu", "gelu", "silu")


@functools.cache
def bias(dtype: CutlassDtype, activation: str = "") -> str:
    """Epilogue of act(acc + bias), the bias a row of this element type."""
    summed = Node("add", (Node(ACCUMULATOR), Node("input", (), ("bias", ROW, dtype.value))))
    return epilogue_id(LINEAR, EpilogueVisitorTree(Node(activation, (summed,)) if activation else summed).program)


@functools.cache
def residual(dtype: CutlassDtype) -> str:
    """Epilogue of acc + residual, a matrix like D, which comes by the way of C."""
    summed = Node("add", (Node(ACCUMULATOR), Node("input", (), ("residual", MATRIX, dtype.value))))
    return epilogue_id(LINEAR, with_source(EpilogueVisitorTree(summed).program, 0))


@functools.cache
def quantize() -> str:
    """Epilogue of acc * scale, for a narrow D, with the largest magnitude of acc."""
    acc = Node(ACCUMULATOR)
    scaled = Node("multiply", (acc, Node("input", (), ("scale", SCALAR, CutlassDtype.F32.value))))
    largest = (Output("amax", SCALAR, CutlassDtype.F32, "amax"), acc)
    return epilogue_id(LINEAR, EpilogueVisitorTree(scaled, [largest]).program)


def cells(a: CutlassDtype) -> Iterator[tuple[str, CutlassDtype]]:
    """(epilogue, element type of D) of the prebuilt kernels whose operands are of type `a`."""
    for activation in BIAS_ACTIVATIONS:
        yield bias(a, activation), a
    yield residual(a), a
    yield quantize(), CutlassDtype.F8E4M3
