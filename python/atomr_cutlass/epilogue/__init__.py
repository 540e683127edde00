"""Epilogues of your own: Python functions traced into trees, and trees put together step by step.

    def epilogue(acc, bias, residual):
        return relu(acc + bias) + residual

Such a function computes every element of D from the accumulator, alpha * A B + beta * C, and from operands: a single
element, a row (N,), a column (M,), a matrix (M, N), or a mask of bits.
"""

from ..generator.epilogue.tree import EpilogueVisitorTree
from . import functions
from .builder import EvtBuilder
from .functions import *  # noqa: F403 - all that it has in __all__
from .trace import Operand, Traced, operand_of, readings, trace
from .values import Value

__all__ = [
    "EpilogueVisitorTree", "EvtBuilder", "Operand", "Traced", "Value", "functions", "operand_of", "readings", "trace",
]  # fmt: skip
__all__ += functions.__all__
