"""Grouped GEMM as an operation."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from ...arrays.numerics import FAST
from ...errors import InvalidOperandError
from ...generator.epilogue.tree import ROW
from ...generator.key import KernelKey
from ...pipeline.devices import Device
from ...pipeline.operation import Arrays, OperandSlot, PlannedOperation
from ...pipeline.plan import Plan
from ...pipeline.probe import Probe
from ...pipeline.reduction import is_batch_invariant
from ...pipeline.request import Option, RequestOptions, sampled
from ...pipeline.search import Candidate
from ..gemm.operation import (
    BATCH_INVARIANT,
    FAST_ACCUM,
    FP8_SCALES,
    MATRIX_LAYOUT,
    GemmShape,
    fields_from,
    layouts_from,
    layouts_of,
    refuse_columns,
    sample_shape,
)
from . import plans
from .kernels import GroupedSearch
from .problem import OP, GroupedProblem
from .request import GroupedGemmRequest, GroupedGemmShape


class GroupedGemmOperation(PlannedOperation[GroupedGemmRequest]):
    """A product for each group, of matrices in lists."""

    name = OP
    request_type = GroupedGemmRequest
    message = "GroupedGemm"
    bound = "b"
    refuses = MappingProxyType(
        {
            "amax": "the kernels write D alone",
            "precision": "the operands have 16 or 8 bits: there is no choice of precision",
        }
    )
    options = (
        Option("groups", "MxNxK of each group, such as 128x512x256,0x512x256."),
        MATRIX_LAYOUT,
        FAST_ACCUM,
        FP8_SCALES,
        BATCH_INVARIANT,
    )

    def operands(self, request: GroupedGemmRequest) -> tuple[OperandSlot, ...]:
        grouped = request.problem(0)
        product = [("a", grouped.a), ("b", grouped.b), ("c", grouped.c)]
        product += [(name, scale.arrays) for name, scale in grouped.scales.items()]
        inputs = grouped.fusion.inputs if grouped.fusion else ()
        return (
            *(OperandSlot(name, specs, listed=True) for name, specs in product if specs),
            *(OperandSlot(operand.name, operand.arrays, listed=operand.kind == ROW) for operand in inputs),
            OperandSlot("out", grouped.d, listed=True, written=True),
        )

    def optional_names(self, request: GroupedGemmRequest) -> tuple[str, ...]:
        return ("a", "b", "c", *(() if request.scaling is None else ("scale_a", "scale_b")), "bias")

    def extents(self, request: GroupedGemmRequest) -> dict[str, Any]:
        return {"groups": [[group.m, group.n, group.k] for group in request.shape.groups]}

    def products(self, request: GroupedGemmRequest) -> int:
        return sum(group.m * group.n * group.k for group in request.shape.groups)

    def describe(self, request: GroupedGemmRequest) -> str:
        groups = [f"{group.m}x{group.n}x{group.k}" for group in request.shape.groups]
        shown = ", ".join(groups[:3]) + (", ..." if len(groups) > 3 else "")
        return f"{len(groups)} groups ({shown})"

    def request(self, options: RequestOptions) -> GroupedGemmRequest:
        e = options.extent
        text = options.given("groups") or f"{e}x{e}x{e},0x{e}x{e},{e // 4}x{e}x{e}"
        groups = []
        for group in text.split(","):
            if not re.fullmatch(r"\d+x\d+x\d+", group.strip()):
                raise InvalidOperandError(f"--groups has {group!r}; expected MxNxK of each group, such as 128x512x256")
            groups.append(GemmShape(*map(int, group.split("x"))))
        return GroupedGemmRequest(
            GroupedGemmShape(groups),
            **fields_from(options),
            **layouts_from(options),
            fast_accum=options.flag("fast_accum"),
            scaling=options.given("scaling"),
            batch_invariant=options.flag("batch_invariant") or None,
        )

    def plan(self, request: GroupedGemmRequest, device: int, **options: Any) -> Plan:
        options["batch_invariant"] = is_batch_invariant(request.batch_invariant)
        return plans.make(request.problem(device), **options)

    def result_layout(self, request: GroupedGemmRequest) -> str:
        refuse_columns(request.layout_c)
        return super().result_layout(request)

    def search(self, request: GroupedGemmRequest, device: Device) -> GroupedSearch | None:
        return None if request.problem(device.index).empty else request.search(device)

    def sample(
        self, key: KernelKey, epilogue: str, device: Device
    ) -> tuple[GroupedGemmRequest, Candidate[GroupedProblem]]:
        request = GroupedGemmRequest(
            GroupedGemmShape([sample_shape(key)]), **sampled(key, epilogue), **layouts_of(key),
            fast_accum=key.math == FAST, batch_invariant=False,
        )  # fmt: skip
        return request, Candidate(key, None, 0.0, request.problem(device.index))

    def probe(self, request: GroupedGemmRequest, arrays: Arrays) -> Probe[GroupedGemmRequest]:
        from .probe import GroupedGemmProbe

        return GroupedGemmProbe(request, arrays)


OPERATIONS = (GroupedGemmOperation(),)
