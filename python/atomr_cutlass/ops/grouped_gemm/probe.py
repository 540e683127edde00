"""Random groups, checked with the reference of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...generator.dtypes import CutlassDtype
from ...pipeline.operation import Array, Arrays, operands_of
from ...pipeline.probe import Probe
from ..gemm import reference as gemm_reference
from ..quantize.reference import BLOCK
from .problem import BLOCKS
from .request import GroupedGemmRequest


class GroupedGemmProbe(Probe[GroupedGemmRequest]):
    """A part is a group."""

    @property
    def depth(self) -> int:
        return max(group.k for group in self.request.shape.groups)

    @property
    def scale_block(self) -> int:
        return BLOCK if self.request.scaling == BLOCKS else 0

    def parts(self) -> Iterator[Arrays]:
        slots = operands_of(self.request)
        for g in range(len(self.request.shape.groups)):
            yield {slot.name: self.arrays[slot.labels[g if slot.listed else 0]] for slot in slots}

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        made: Array = gemm_reference.gemm(**self._operands(part), out_dtype=dtype, math=self.request.math)
        return made

    def magnitudes(self, part: Arrays) -> Array:
        made: Array = gemm_reference.absolute_product(**self._operands(part))
        return made

    def _operands(self, part: Arrays) -> dict[str, Any]:
        """The operands of a group's product, and its scalars."""
        names = ["a", "b", *(["c"] if self.request.epilogue.beta != 0 else [])]
        names += ["scale_a", "scale_b"] if self.request.scaling is not None else []
        return self.how | {name: part[name] for name in names}
