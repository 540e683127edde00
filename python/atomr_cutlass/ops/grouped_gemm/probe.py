"""Random groups, checked with the reference of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ... import reference
from ...generator.dtypes import CutlassDtype
from ...pipeline.operand_table import Array, Arrays, OperandSlot
from ...pipeline.probe import Probe
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
        rounded = request.result_dtype if self.tree is None else CutlassDtype.F32
        blocks = BLOCK if request.scaling == BLOCKS else 0
        return reference.tolerance(request.dtype, rounded, depth, math, scale_block=blocks)

    def parts(self) -> Iterator[Arrays]:
        for g in range(len(self.request.shape.groups)):
            yield {slot.name: self.arrays[slot.labels[g if slot.listed else 0]] for slot in self._slots}

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        made: Array = gemm_reference.gemm(**self._operands(part), out_dtype=dtype, math=self.request.math)
        return made

    def magnitudes(self, part: Arrays) -> Array:
        made: Array = gemm_reference.absolute_product(**self._operands(part))
        return made

    def _operands(self, part: Arrays) -> dict[str, Any]:
        """The operands of a group's product, and its scalars."""
        return self.how | {name: part[name] for name in ("a", "b", "c", "scale_a", "scale_b") if name in part}
