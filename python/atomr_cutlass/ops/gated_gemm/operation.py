"""Gated GEMM as an operation, and its requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ...checks import expect
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.epilogue.common import bias_and_activation
from ...generator.epilogue.lower import GATED_SCALED, LINEAR, SCALED, is_gated, split
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...pipeline.call_options import documented
from ...pipeline.operation import NO_CHECK, Arrays
from ...pipeline.request import GemmEpilogue, Option
from ..gemm.operation import GemmLayout, GemmOperation, GemmRequest
from ..gemm.plans import PER_PAIR, Scales
from ..gemm.problem import GemmProblem
from .function import GATES, OP, check, gated

if TYPE_CHECKING:
    from ...pipeline.probe import Probe

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


@documented
@dataclass(frozen=True)
class GatedGemmRequest(GemmRequest):
    """One gated GEMM: D[..., j] = scale_d * f(P[..., 2 j]) * P[..., 2 j + 1], P = alpha * scale_a * scale_b * A B.

    Attributes:
        shape: extents of the product P: n counts the columns of B, two for each column of D.
        dtype: element type of A and B: F16, BF16, F8E4M3 or F8E5M2.
        layout_c: layout of D: row-major.
        epilogue: alpha, and as its activation the gate's function f, a name that `gated_gemm` takes; None is silu.
        scaling: fp8's scales that a plan is called with, as float32 arrays: `tensor` (one element for A, one for B) or
            `vector` (one for each row of A, (m, 1), and column of B, (1, n)); None for none.
        quantized: whether a plan is called with scale_d too, one float32.

    Raises:
        UnsupportedError: no kernel exists for these element types, scales or layouts, or there is a bias, a beta or a
            tree.
        InvalidOperandError: a value is not of its kind, the activation is none of a gate, or n is odd.
    """

    op: ClassVar[str] = OP

    def __post_init__(self) -> None:
        expect(self.epilogue, GemmEpilogue, "epilogue")
        epilogue = self.epilogue
        given = {"beta": epilogue.beta != 0, "bias": epilogue.bias, "epilogue": epilogue.tree is not None}
        for name, is_given in given.items():
            if is_given:
                raise UnsupportedError(f"the request has {name}: {REFUSES[name]}")
        if epilogue.activation is None:
            object.__setattr__(self, "epilogue", dataclasses.replace(epilogue, activation="silu"))
        super().__post_init__()
        check(self.dtype, self.epilogue.activation)
        if self.shape.n % PER_PAIR:
            raise InvalidOperandError(
                f"shape.n is {self.shape.n}; expected an even number: D has a column for each two"
            )
        if self.layout_c is not GemmLayout.ROW_MAJOR:
            raise UnsupportedError("layout_c is COL_MAJOR: gated kernels write rows that are contiguous")
        self.problem(0)  # refuses block scales

    def problem(self, device: int) -> GemmProblem:
        """The product on the GPU of this index, its gate as the epilogue; D is as wide as B."""
        return gated(super().problem(device), self.scales(), self.epilogue.activation)

    def scales(self) -> Scales:
        """The scales that a plan is called with, dense, without amax."""
        return super().scales()._replace(amax=None)

    def fusion(self) -> None:
        """None: the epilogue of `problem` has the gate, which has no arrays."""


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
    optional = ()
    profiled = False
    kernels = GemmOperation.name
    refuses = MappingProxyType(NO_CHECK | REFUSES)
    options = (
        *_OWN,
        *(option for option in GemmOperation.options if option.name not in ("precision", *(own.name for own in _OWN))),
    )

    def recorded_fields(self, problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> Iterator[dict[str, Any]]:
        base, program = split(problem["epilogue"])
        if not is_gated(base):
            return
        gates = [name for name in GATES if bias_and_activation(None, name).program == program]
        for fields in super().recorded_fields(
            {**problem, "epilogue": SCALED if base == GATED_SCALED else LINEAR}, tree
        ):
            for gate in gates:
                yield fields | {"epilogue": GemmEpilogue(activation=gate)}

    def probe(self, request: GemmRequest, arrays: Arrays) -> Probe[GemmRequest]:
        from .reference import GatedGemmProbe

        return GatedGemmProbe(request, arrays)


OPERATIONS = (GatedGemmOperation(),)
