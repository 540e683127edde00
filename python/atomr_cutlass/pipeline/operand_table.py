"""Operand tables: the arrays that a plan of a request is called with, in the order of the call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arrays.operands import BYTE
from ..generator.epilogue.tree import MASK
from .problem import MatrixSpec

if TYPE_CHECKING:
    from ..epilogue.bound import Fusion


@dataclass(frozen=True)
class OperandSlot:
    """An operand of a request.

    Attributes:
        name: as callers say it: `a`, `x`, `scale_a`, ..., or as an epilogue tree has it; of the result `out`.
        specs: the layout of its array, dimensions in the order of a call; of a list, of each of its arrays.
        listed: whether it is a list.
        written: whether a call writes it.
        element: DLPack's (type code, bits) where it is not that of the specs: fp4, e8m0 and masks are bytes, which have
            no name among element types; shapes and strides count bytes then.
    """

    name: str
    specs: tuple[MatrixSpec, ...]
    listed: bool = False
    written: bool = False
    element: tuple[int, int] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each array."""
        return tuple(f"{self.name}[{i}]" for i in range(len(self.specs))) if self.listed else (self.name,)


def epilogue_slots(fusion: Fusion | None) -> Iterator[OperandSlot]:
    """The operands of an epilogue: those that it reads, and those that it writes beside the result."""
    for array in () if fusion is None else fusion.arrays:
        shape, strides = array.slot or (array.shape, array.strides)
        spec = MatrixSpec(shape, strides, array.dtype, array.alignment)
        element = BYTE if array.kind == MASK else None
        yield OperandSlot(array.name, (spec,), written=fusion is not None and array in fusion.outputs, element=element)
