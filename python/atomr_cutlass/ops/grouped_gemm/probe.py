"""Random groups, checked with the reference of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ... import reference
from ...generator.dtypes import CutlassDtype
from ...pipeline.operand_table import Array, Arrays, OperandSlot
from ...pipeline.probe import Check, Probe, compare_tree
from ..gemm import reference as gemm_reference
from .function import grouped_gemm
from .request import GroupedGemmRequest


class GroupedGemmProbe(Probe[GroupedGemmRequest]):
    """A part is a group."""

    def __init__(self, request: GroupedGemmRequest, arrays: Arrays, slots: Sequence[OperandSlot]) -> None:
        """A request on arrays, with its operand table."""
        super().__init__(request, arrays)
        self._slots = slots
        epilogue = request.epilogue
        self.how: dict[str, Any] = {"alpha": epilogue.alpha, "beta": epilogue.beta}

    def limits(self, math: str) -> reference.Tolerance:
        request = self.request
        depth = max(group.k for group in request.shape.groups)
        rounded = request.result_dtype if request.tree is None else CutlassDtype.F32
        return reference.tolerance(request.dtype, rounded, depth, math)

    def parts(self) -> Iterator[Arrays]:
        for g in range(len(self.request.shape.groups)):
            yield {slot.name: self.arrays[slot.labels[g if slot.listed else 0]] for slot in self._slots}

    def compute(self, part: Arrays) -> None:
        lists: dict[str, Any] = {name: [array] for name, array in part.items() if name != "out"}
        how = self.how | {"epilogue": self.request.tree, "out_dtype": self.request.result_dtype}
        (part["out"][...],) = grouped_gemm(**lists, **how, backend="reference")

    def expected(self, part: Arrays) -> tuple[Array, Array]:
        return self._product(part, self.request.result_dtype), self._magnitude(part)

    def compare(self, part: Arrays, check: Check) -> None:
        tree = self.request.tree
        if tree is None:
            super().compare(part, check)
            return
        acc = self._product(part, CutlassDtype.F64)
        error = check.limits.atol_factor * self._magnitude(part) + check.limits.rtol * np.abs(acc)
        compare_tree(check, tree, part, acc, error, out_dtype=self.request.result_dtype)

    def _product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        c = part["c"] if self.request.epilogue.beta != 0 else None
        made: Array = gemm_reference.gemm(part["a"], part["b"], c, **self.how, out_dtype=dtype, math=self.request.math)
        return made

    def _magnitude(self, part: Arrays) -> Array:
        c = part["c"] if self.request.epilogue.beta != 0 else None
        made: Array = gemm_reference.absolute_product(part["a"], part["b"], c, **self.how)
        return made
