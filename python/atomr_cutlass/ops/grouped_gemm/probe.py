"""Random groups, checked with the reference of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ... import reference
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...pipeline.operand_table import Array, Arrays, OperandSlot
from ...pipeline.probe import Check, Probe, compare_tree
from ..gemm import reference as gemm_reference
from ..quantize.reference import BLOCK
from .problem import BLOCKS
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
        blocks = BLOCK if request.scaling == BLOCKS else 0
        return reference.tolerance(request.dtype, rounded, depth, math, scale_block=blocks)

    def parts(self) -> Iterator[Arrays]:
        for g in range(len(self.request.shape.groups)):
            yield {slot.name: self.arrays[slot.labels[g if slot.listed else 0]] for slot in self._slots}

    def expected(self, part: Arrays) -> Array:
        tree, dtype = self.request.tree, self.request.result_dtype
        if tree is None:
            return self._product(part, dtype)
        read = {operand.name: part[operand.name] for operand in tree.inputs}
        return reference.evaluate(tree, self._product(part, CutlassDtype.F64), read, out_dtype=dtype)[RESULT]

    def magnitudes(self, part: Arrays) -> Array:
        made: Array = gemm_reference.absolute_product(**self._operands(part))
        return made

    def compare(self, part: Arrays, check: Check) -> None:
        tree = self.request.tree
        if tree is None:
            super().compare(part, check)
            return
        acc = self._product(part, CutlassDtype.F64)
        error = check.limits.atol_factor * self.magnitudes(part) + check.limits.rtol * np.abs(acc)
        compare_tree(check, tree, part, acc, error, out_dtype=self.request.result_dtype)

    def _product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        made: Array = gemm_reference.gemm(**self._operands(part), out_dtype=dtype, math=self.request.math)
        return made

    def _operands(self, part: Arrays) -> dict[str, Any]:
        """The operands of a group's product, and its scalars."""
        return self.how | {name: part[name] for name in ("a", "b", "c", "scale_a", "scale_b") if name in part}
