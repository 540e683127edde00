"""The epilogue trees of prebuilt kernels: bias and activation, as most layers apply them to a product.

Kernels whose epilogue is COMMON compute several of them; `form_of` returns the arguments that select a tree.
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
"""The activations of COMMON kernels, in the order of epilogue_common.h."""

COMMON_ROWS = {None: 0, CutlassDtype.F32: 1, CutlassDtype.F16: 2, CutlassDtype.BF16: 3}
"""Element types of the row that COMMON kernels add, with their numbers in epilogue_tree.h."""

_ROW_BITS = 2


class CommonForm(NamedTuple):
    """A tree as a COMMON kernel computes it: scale_d * activation(acc * scale_a * scale_b + row), the source being C.

    Operands are given by their numbers, inputs first; None if there is none.

    Attributes:
        row: the row that is added.
        source: the matrix that is loaded as the C operand.
        told: the tree's encoding in the kernel arguments: the row's element type and the activation.
        scale_a: the column of factors that is loaded as scales of A's rows.
        scale_b: the row of factors that is loaded as scales of B's columns.
        scale_d: the further factor of D.
        amax: the output that is the largest magnitude before scale_d.
    """

    row: int | None
    source: int | None
    told: int
    scale_a: int | None = None
    scale_b: int | None = None
    scale_d: int | None = None
    amax: int | None = None

    @property
    def scales(self) -> dict[str, int]:
        """The operands that are loaded as scales, or written as amax, by the names of the arguments."""
        numbers = {"scale_a": self.scale_a, "scale_b": self.scale_b, "scale_d": self.scale_d, "amax": self.amax}
        return {name: number for name, number in numbers.items() if number is not None}

    @property
    def adds_c(self) -> bool:
        """Whether it can add C: not with a factor of the product alone, since C is part of the accumulator."""
        return self.scale_a is None and self.scale_b is None

    @property
    def turns(self) -> bool:
        """Whether a kernel also computes it for D^T, where rows are columns."""
        return self.row is None and self.adds_c


class _Value(NamedTuple):
    """A value of a tree: activation(the sum of terms), the accumulator with factors.

    Attributes:
        terms: numbers of inputs, and ACCUMULATOR, each once, in any order.
        factors: numbers of inputs by the names of their scales.
        activation: one of COMMON_ACTIVATIONS.
    """

    terms: tuple[int | str, ...]
    factors: tuple[tuple[str, int], ...] = ()
    activation: str = ""

    @property
    def is_sum(self) -> bool:
        return not self.activation and "scale_d" not in dict(self.factors)


_FACTORS = {COLUMN: "scale_a", ROW: "scale_b", SCALAR: "scale_d"}


def told(row: CutlassDtype | None, activation: str) -> int:
    """The encoding of a tree in the arguments of a COMMON kernel.

    Args:
        row: element type of the row that is added, one of COMMON_ROWS.
        activation: one of COMMON_ACTIVATIONS.
    """
    return COMMON_ROWS[row] | COMMON_ACTIVATIONS.index(activation) << _ROW_BITS


@functools.lru_cache(256)
def form_of(epilogue: str) -> CommonForm | None:
    """The form in which a COMMON kernel computes an epilogue's tree; None if it does not."""
    base, program = split(epilogue)
    if base not in (LINEAR, SCALED) or not program:
        return None
    inputs: list[tuple[str, str]] = []
    values: list[_Value] = []
    result, largest = -1, []
    for line in program.removeprefix(PREFIX).split(";"):
        op, *rest = line.split(":")
        if op == "out":
            result = int(rest[0])
            continue
        if op == "reduce" and rest[1:] == [SCALAR, "amax", CutlassDtype.F32.value]:
            largest.append(values[int(rest[0])])
            continue
        if op == "input":
            value: _Value | None = _Value((len(inputs),))
            inputs.append((rest[0], rest[1]))
        else:
            value = _computed(op, [values[int(number)] for number in rest if op in _OPS], inputs)
        if value is None:
            return None
        values.append(value)
    found = values[result]
    factors = dict(found.factors)
    before = found._replace(factors=tuple(pair for pair in found.factors if pair[0] != "scale_d"))
    added = [number for number in found.terms if isinstance(number, int)]
    kinds = {inputs[number][0]: number for number in added}
    # A kernel whose operands have scales takes no others.
    scaled = bool(factors or largest)
    once = sorted([*added, *factors.values()]) == list(range(len(inputs))) and found.terms.count(ACCUMULATOR) == 1
    if not once or len(kinds) < len(added) or not kinds.keys() <= {ROW, SOURCE} or (scaled and base == SCALED):
        return None
    if largest not in ([], [before]) or result != len(values) - 1:
        return None
    row = kinds.get(ROW)
    dtype = None if row is None else CutlassDtype(inputs[row][1])
    if dtype not in COMMON_ROWS:
        return None
    amax = {"amax": len(inputs)} if largest else {}
    return CommonForm(row, kinds.get(SOURCE), told(dtype, found.activation), **factors, **amax)


_OPS = {"add", "multiply", *filter(None, COMMON_ACTIVATIONS)}


def _computed(op: str, operands: list[_Value], inputs: list[tuple[str, str]]) -> _Value | None:
    """The value of an operation; None if COMMON kernels cannot compute it."""
    if op == ACCUMULATOR:
        return _Value((op,))
    if op not in _OPS:
        return None
    first = next((operand for operand in operands if ACCUMULATOR in operand.terms), operands[0])
    if op == "multiply":
        other = operands[operands[0] is first]
        number = other.terms[0]
        if other is first or other.factors or len(other.terms) > 1 or isinstance(number, str) or other.activation:
            return None
        kind, dtype = inputs[number]
        name = _FACTORS.get(kind, "")
        # Factors of rows and columns precede any addition.
        fits = name == "scale_d" or (name and first.terms == (ACCUMULATOR,) and first.is_sum)
        if dtype != CutlassDtype.F32.value or not fits or name in dict(first.factors):
            return None
        return first._replace(factors=(*first.factors, (name, number)))
    if not all(operand.is_sum for operand in operands):
        return None
    terms = tuple(term for operand in operands for term in operand.terms)
    factors = tuple(pair for operand in operands for pair in operand.factors)
    return _Value(terms, factors, "" if op == "add" else op)


def common_of(epilogue: str) -> str | None:
    """The epilogue of the COMMON kernels that serve this epilogue; None if none do."""
    base, form = split(epilogue)[0], form_of(epilogue)
    if epilogue not in (LINEAR, SCALED) and form is None:
        return None
    return SCALED_COMMON if base == SCALED or (form is not None and form.scales) else COMMON


class BiasAndActivation(NamedTuple):
    """A tree of the form act(acc + bias), which kernels also compute without trees.

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
    """The bias and activation of a tree's program; None if the tree computes anything else."""
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


def wider(epilogue: str) -> str:
    """The epilogue of kernels that compute a tree and further outputs; empty if there are none."""
    base, program = split(epilogue)
    return on(base, quantize()) if program and program == split(narrowed())[1] else ""


def on(base: str, epilogue: str) -> str:
    """An epilogue's tree on another base, `lc` or `scaled`."""
    return epilogue_id(base, split(epilogue)[1])
