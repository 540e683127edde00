"""Epilogues of a matmul: cuBLASLt's list, and the tree of each."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

from ...epilogue.builder import EvtBuilder
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import ACCUMULATOR, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ...generator.members import Members

BIAS, AUX, AMAX = "bias", "gelu_aux", "amax_d"
"""Operands of the trees, as a request calls them."""

ADDED, GRADIENT = "added", "gradient"
WRITTEN, READ = "written", "read"


class MatmulEpilogue(enum.Enum, metaclass=Members):
    """The function of x = alpha * op(A) op(B) + beta * C, with cuBLASLt's names. Gelu is the tanh form.

    * DEFAULT: D = x. BIAS: D = x + bias, of length m, the same for all columns.
    * RELU, GELU: D = act(x). RELU_BIAS, GELU_BIAS: D = act(x + bias).
    * RELU_AUX, RELU_AUX_BIAS: the same, and the auxiliary matrix receives a bit for each element: relu's input is above
      0. (NaN is not: relu keeps a NaN, and its gradient is 0.)
    * GELU_AUX, GELU_AUX_BIAS: the same, and the auxiliary matrix receives the input of gelu.
    * DRELU, DGELU: D = x times the slope of the activation, which the auxiliary matrix of the forward pass tells.
    * DRELU_BGRAD, DGELU_BGRAD: the same, and bias receives the sum of each row of D, before D is rounded.
    * BGRADA: D = x, and bias, of length m, receives the sum of each row of op(A). BGRADB: of length n, of each column
      of op(B).
    """

    DEFAULT = "default"
    RELU = "relu"
    GELU = "gelu"
    BIAS = "bias"
    RELU_BIAS = "relu_bias"
    GELU_BIAS = "gelu_bias"
    RELU_AUX = "relu_aux"
    GELU_AUX = "gelu_aux"
    RELU_AUX_BIAS = "relu_aux_bias"
    GELU_AUX_BIAS = "gelu_aux_bias"
    DRELU = "drelu"
    DGELU = "dgelu"
    DRELU_BGRAD = "drelu_bgrad"
    DGELU_BGRAD = "dgelu_bgrad"
    BGRADA = "bgrada"
    BGRADB = "bgradb"


@dataclass(frozen=True)
class Form:
    """An epilogue, taken apart.

    Attributes:
        activation: `relu`, `gelu_tanh` or nothing.
        bias: `added`, `gradient` where bias receives the sums of D, or nothing.
        aux: whether the auxiliary matrix is `written`, `read` or neither (empty).
        summed: `a` or `b` where bias receives the sums of that operand, or nothing.
    """

    activation: str = ""
    bias: str = ""
    aux: str = ""
    summed: str = ""

    @property
    def takes_bias(self) -> bool:
        """Whether the request has a bias, to be read or written."""
        return bool(self.bias or self.summed)

    @property
    def writes_bias(self) -> bool:
        """Whether it is written."""
        return self.takes_bias and self.bias != ADDED

    @property
    def masked(self) -> bool:
        """Whether the auxiliary matrix is one of bits."""
        return bool(self.aux) and self.activation == "relu"

    @property
    def linear(self) -> bool:
        """Whether D is the product alone."""
        return not (self.activation or self.bias)


_E = MatmulEpilogue
_GELU = "gelu_tanh"

FORMS = {
    _E.DEFAULT: Form(),
    _E.RELU: Form("relu"),
    _E.GELU: Form(_GELU),
    _E.BIAS: Form("", ADDED),
    _E.RELU_BIAS: Form("relu", ADDED),
    _E.GELU_BIAS: Form(_GELU, ADDED),
    _E.RELU_AUX: Form("relu", "", WRITTEN),
    _E.GELU_AUX: Form(_GELU, "", WRITTEN),
    _E.RELU_AUX_BIAS: Form("relu", ADDED, WRITTEN),
    _E.GELU_AUX_BIAS: Form(_GELU, ADDED, WRITTEN),
    _E.DRELU: Form("relu", "", READ),
    _E.DGELU: Form(_GELU, "", READ),
    _E.DRELU_BGRAD: Form("relu", GRADIENT, READ),
    _E.DGELU_BGRAD: Form(_GELU, GRADIENT, READ),
    _E.BGRADA: Form(summed="a"),
    _E.BGRADB: Form(summed="b"),
}


@functools.cache
def tree_of(
    form: Form, bias: CutlassDtype | None, aux: CutlassDtype | None, compute: CutlassDtype, *, amax: bool
) -> EpilogueVisitorTree:
    """The tree over D^T, whose rows are the columns of D.

    Args:
        form: the epilogue.
        bias: element type of a bias that is added.
        aux: element type of the auxiliary matrix; None for bits.
        compute: F64 for f64 products, else F32.
        amax: whether the largest magnitude of D is wanted.

    Raises:
        InvalidOperandError: an element type that trees do not read or store.
    """
    builder = EvtBuilder(compute_dtype=compute)
    x = ACCUMULATOR
    if form.bias == ADDED:
        builder.input(BIAS, ROW, bias).node("biased", "add", x, BIAS)
        x = "biased"
    if form.aux == WRITTEN and form.masked:
        builder.constant("zero", 0.0).node("positive", "greater", x, "zero").output(AUX, "positive", kind=MASK)
    elif form.aux == WRITTEN:
        builder.output(AUX, x, dtype=aux)
    result = x
    if form.aux == READ:
        builder.input(AUX, MASK if form.masked else MATRIX, aux).node("result", f"d_{form.activation}", x, AUX)
        result = "result"
    elif form.activation:
        builder.node("result", form.activation, x)
        result = "result"
    builder.output(RESULT, result)
    if form.bias == GRADIENT:
        builder.reduce_node(BIAS, result, ROW)
    if amax:
        builder.reduce_node(AMAX, result, SCALAR, "amax")
    return builder.build()
