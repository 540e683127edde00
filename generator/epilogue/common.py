"""The epilogue trees that prebuilt kernels have: bias and activation, as most layers apply them to a product.

Kernels whose epilogue is COMMON compute several of them, each of which `form_of` tells how to ask for.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..dtypes import CutlassDtype
from ..errors import InvalidOperandError
from .lower import COMMON, LINEAR, SCALED, SCALED_COMMON, SOURCE, epilogue_id, split, with_source
from .ops import ACTIVATIONS, LEAKY_SLOPE
from .tree import ACCUMULATOR, COLUMN, MATRIX, PREFIX, ROW, SCALAR, EpilogueVisitorTree, Node, Output

COMMON_ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu")
"""Those of COMMON kernels, in the order of epilogue_common.h."""

COMMON_ROWS = {None: 0, CutlassDtype.F32: 1, CutlassDtype.F16: 2, CutlassDtype.BF16: 3}
"""Element types of the row that they add, with the numbers by which epilogue_tree.h knows them."""

_ROW_BITS = 2


class CommonForm(NamedTuple):
    """A tree as a COMMON kernel computes it: activation(acc + row), the source being C.

    Attributes:
        row: the number of the input that is the row; None where there is none.
        source: of the one that is loaded as the C operand, likewise.
        told: the tree's encoding in the kernel arguments: the row's element type and the activation.
    """

    row: int | None
    source: int | None
    told: int


def told(row: CutlassDtype | None, activation: str) -> int:
    """The encoding of a tree in the arguments of a COMMON kernel.

    Args:
        row: element type of the row that is added, one of COMMON_ROWS.
        activation: one of COMMON_ACTIVATIONS.
    """
    return COMMON_ROWS[row] | COMMON_ACTIVATIONS.index(activation) << _ROW_BITS


@functools.lru_cache(256)
def form_of(epilogue: str) -> CommonForm | None:
    """How a COMMON kernel computes the tree of an epilogue; None where it does not."""
    base, program = split(epilogue)
    if base not in (LINEAR, SCALED) or not program:
        return None
    inputs: list[tuple[str, str]] = []
    values: list[tuple[str, ...]] = []  # of each value the terms of its sum, once each and in any order
    activation = ""
    for line in program.removeprefix(PREFIX).split(";"):
        op, *rest = line.split(":")
        if op == "out" and int(rest[0]) == len(values) - 1:
            continue
        if activation:
            return None
        if op == ACCUMULATOR:
            values.append((op,))
        elif op == "input":
            values.append((f"input{len(inputs)}",))
            inputs.append((rest[0], rest[1]))
        elif op == "add":
            values.append((*values[int(rest[0])], *values[int(rest[1])]))
        elif op in COMMON_ACTIVATIONS:
            activation = op
            values.append(values[int(rest[0])])
        else:
            return None
    terms = values[-1]
    kinds = [kind for kind, _ in inputs]
    once = sorted(terms) == sorted([ACCUMULATOR, *(f"input{number}" for number in range(len(inputs)))])
    if not once or sorted(kinds) not in ([], [ROW], [SOURCE], [ROW, SOURCE]):
        return None
    row = kinds.index(ROW) if ROW in kinds else None
    dtype = None if row is None else CutlassDtype(inputs[row][1])
    if dtype not in COMMON_ROWS:
        return None
    return CommonForm(row, kinds.index(SOURCE) if SOURCE in kinds else None, told(dtype, activation))


def common_of(epilogue: str) -> str | None:
    """The epilogue of the COMMON kernels that serve one; None where none do."""
    if epilogue in (LINEAR, SCALED) or form_of(epilogue) is not None:
        return SCALED_COMMON if split(epilogue)[0] == SCALED else COMMON
    return None


class BiasAndActivation(NamedTuple):
    """A tree that is act(acc + bias), which kernels compute without a tree too.

    Attributes:
        bias: element type of the row that is added; None for none.
        activation: one of ACTIVATIONS, or None.
    """

    bias: CutlassDtype | None
    activation: str | None


@functools.cache
def bias_and_activation(dtype: CutlassDtype | None, activation: str | None) -> EpilogueVisitorTree:
    """The tree of act(acc + bias).

    Args:
        dtype: element type of the row that is added, `bias`; None for none.
        activation: one of ACTIVATIONS, or None.

    Raises:
        InvalidOperandError: an unknown activation.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidOperandError(f"unknown activation {activation!r}; valid: {', '.join(ACTIVATIONS)}")
    node = Node(ACCUMULATOR)
    if dtype is not None:
        node = Node("add", (node, Node("input", (), ("bias", ROW, dtype.value))))
    if activation not in (None, "identity"):
        node = Node(activation, (node,), (LEAKY_SLOPE,) if activation == "leaky_relu" else ())
    return EpilogueVisitorTree(node)


@functools.lru_cache(256)
def as_bias_and_activation(program: str) -> BiasAndActivation | None:
    """The bias and activation of a tree's program, if it has nothing else; None for any other tree."""
    inputs = EpilogueVisitorTree.parse(program).inputs
    dtype = inputs[0].dtype if inputs else None
    for activation in (None, *ACTIVATIONS):
        if bias_and_activation(dtype, activation).program == program:
            return BiasAndActivation(dtype, None if activation == "identity" else activation)
    return None


@functools.cache
def bias(dtype: CutlassDtype | None, activation: str | None = None) -> str:
    """Epilogue of act(acc + bias); see `bias_and_activation`."""
    return epilogue_id(LINEAR, bias_and_activation(dtype, activation).program)


@functools.cache
def residual(dtype: CutlassDtype) -> str:
    """Epilogue of acc + residual, a matrix like D, which is loaded as the C operand."""
    summed = Node("add", (Node(ACCUMULATOR), Node("input", (), ("residual", MATRIX, dtype.value))))
    return epilogue_id(LINEAR, with_source(EpilogueVisitorTree(summed).program, 0))


@functools.cache
def quantize() -> str:
    """Epilogue of acc * scale, for a narrow D, with the largest magnitude of acc."""
    acc = Node(ACCUMULATOR)
    scaled = Node("multiply", (acc, Node("input", (), ("scale", SCALAR, CutlassDtype.F32.value))))
    largest = (Output("amax", SCALAR, CutlassDtype.F32, "amax"), acc)
    return epilogue_id(LINEAR, EpilogueVisitorTree(scaled, [largest]).program)


@functools.cache
def scaled(*, column: bool) -> str:
    """Epilogue of acc * row, or of acc * column * row, in float32: scales of columns of B, and of rows of A."""
    made = Node(ACCUMULATOR)
    for kind in (COLUMN, ROW) if column else (ROW,):
        made = Node("multiply", (made, Node("input", (), (f"{kind}_scale", kind, CutlassDtype.F32.value))))
    return epilogue_id(LINEAR, EpilogueVisitorTree(made).program)


@functools.cache
def narrowed() -> str:
    """Epilogue of acc * scale, for a narrow D."""
    scale = Node("input", (), ("scale", SCALAR, CutlassDtype.F32.value))
    return epilogue_id(LINEAR, EpilogueVisitorTree(Node("multiply", (Node(ACCUMULATOR), scale))).program)


def on(base: str, epilogue: str) -> str:
    """An epilogue's tree on another base, `lc` or `scaled`."""
    return epilogue_id(base, split(epilogue)[1])
