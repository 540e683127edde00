"""Gated GEMM as an operation."""

from __future__ import annotations

from types import MappingProxyType

from ...pipeline.operation import Operation

_READS = "the kernels read A, B and their scales alone"


class GatedGemmOperation(Operation):
    """D = activation(A B_gate) * (A B_value)."""

    name = "gated_gemm"
    refuses = MappingProxyType(
        {
            "c": _READS,
            "beta": _READS,
            "bias": _READS,
            "epilogue": "the gate is the epilogue: two columns become one",
            "amax": "the kernels write D alone",
            "precision": "the operands have 16 or 8 bits: there is no choice of precision",
        }
    )


OPERATIONS = (GatedGemmOperation(),)
