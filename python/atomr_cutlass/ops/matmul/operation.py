"""Matmul, in the shape of cuBLASLt's, as an operation."""

from __future__ import annotations

from ...arrays import operands
from ...pipeline.operation import Call, CallOperation
from .function import call_of
from .request import MatmulRequest


class MatmulOperation(CallOperation):
    """D = epilogue(op(A) op(B)), column-major."""

    name = "matmul"
    request_type = MatmulRequest
    message = "Matmul"

    def call(self, request: MatmulRequest) -> Call:
        with operands.launching(request.stream, request.a, awaited=True):
            return call_of(request)


OPERATIONS = (MatmulOperation(),)
