"""The product of a gated GEMM, with its gate as the kernel's epilogue."""

from __future__ import annotations

import dataclasses

from ...checks import shown
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import bias_and_activation
from ...generator.epilogue.lower import GATED, GATED_SCALED, epilogue_id
from ...generator.rules import FP8_TYPES, HALF_TYPES
from ...pipeline.problem import GemmProblem
from ..gemm.scaled import NO_SCALES, Scales

OP = "gated_gemm"

GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh")
"""Activations of the gate."""

_READS = "the kernels read A, B and their scales alone"
REFUSES = {
    "c": _READS,
    "beta": _READS,
    "bias": _READS,
    "epilogue": "the gate is the epilogue: two columns become one",
    "amax": "the kernels write D alone",
    "precision": "the operands have 16 or 8 bits: there is no choice of precision",
}
"""Options of GEMM that gated GEMM does not take, each with the reason."""


def check(dtype: CutlassDtype, activation: object) -> None:
    """Refuses operands and activations of the gate that no kernel has.

    Raises:
        UnsupportedError, InvalidOperandError: names the valid ones.
    """
    if activation not in GATES:
        raise InvalidOperandError(f"activation is {shown(activation)}; valid: {', '.join(GATES)}")
    if dtype not in (*HALF_TYPES, *FP8_TYPES):
        raise UnsupportedError(f"gated kernels multiply f16, bf16 and fp8, not {dtype.value}")


def gated(product: GemmProblem, scales: Scales, activation: str | None) -> GemmProblem:
    """A product with its gate as the epilogue.

    Args:
        product: the product; D is as wide as B, with twice the strides of the result in memory.
        scales: the scales that are arrays.
        activation: one of GATES.

    Raises:
        UnsupportedError: block scales.
    """
    if scales.block:
        raise UnsupportedError("block scales are not taken by gated kernels: give one for all, or one for each row")
    base = GATED if scales == NO_SCALES else GATED_SCALED
    return dataclasses.replace(product, epilogue=epilogue_id(base, bias_and_activation(None, activation).program))
