"""Gated GEMM as an operation."""

from __future__ import annotations

from types import MappingProxyType

from ...pipeline.operation import NO_CHECK, Arrays, OperandSlot
from ...pipeline.probe import Probe
from ...pipeline.request import Option
from ..gemm.operation import GemmOperation
from ..gemm.request import GemmRequest
from ..gemm.scaled import result_of
from .request import OP, REFUSES, GatedGemmRequest

_OWN = (
    Option("n", "Columns of B, two for each of D.", None),
    Option("scaling", "fp8 scales: tensor, vector."),
    Option("quantized", "scale_d as an array.", default=False),
)


class GatedGemmOperation(GemmOperation):
    """D = activation(A B_gate) * (A B_value)."""

    name = OP
    request_type = GatedGemmRequest
    message = "GatedGemm"
    refuses = MappingProxyType(NO_CHECK | REFUSES)
    options = (
        *_OWN,
        *(option for option in GemmOperation.options if option.name not in ("precision", *(own.name for own in _OWN))),
    )

    def operands(self, request: GemmRequest) -> tuple[OperandSlot, ...]:
        *table, _ = super().operands(request)
        return (*table, OperandSlot("out", (result_of(request.problem(0)),), written=True))

    def optional_names(self, request: GemmRequest) -> tuple[str, ...]:
        return tuple(name for name in super().optional_names(request) if name not in self.refuses)

    def probe(self, request: GemmRequest, arrays: Arrays) -> Probe[GemmRequest]:
        from .probe import GatedGemmProbe

        return GatedGemmProbe(request, arrays)


OPERATIONS = (GatedGemmOperation(),)
