"""Matmul, in the shape of cuBLASLt's, as an operation."""

from __future__ import annotations

from types import MappingProxyType

from ...arrays import operands
from ...pipeline.call import Invocation
from ...pipeline.operation import CallOperation
from .function import parsed
from .request import MatmulRequest


class MatmulOperation(CallOperation):
    """D = epilogue(op(A) op(B)), column-major."""

    name = "matmul"
    request_type = MatmulRequest
    function = "MatmulRequest"
    message = "Matmul"
    spelled = MappingProxyType(
        {"out": "d", "activation": "epilogue"} | dict.fromkeys(("scale_a", "scale_b", "scale_d", "amax"), "scales")
    )

    def call(self, request: MatmulRequest) -> Invocation:
        with operands.launching(request.stream, request.a, awaited=True):
            return parsed(request)


OPERATIONS = (MatmulOperation(),)
