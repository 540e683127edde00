"""Operand tables: the arrays that a plan of a request is called with, in the order of the call; and random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..arrays import numerics
from ..arrays.views import BYTE, dtype_of
from ..generator.epilogue.tree import MASK
from .problem import MatrixSpec

if TYPE_CHECKING:
    from ..epilogue.bound import Fusion

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
"""By name, as `OperandSlot.labels` has them."""


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


def spec_of(view: _core.Operand, name: str) -> MatrixSpec:
    """The layout of an array, whose name errors give.

    Raises:
        InvalidOperandError: elements that no kernel knows.
    """
    return MatrixSpec(view.shape, view.strides, dtype_of(view, name), view.alignment)


def epilogue_slots(fusion: Fusion | None) -> Iterator[OperandSlot]:
    """The operands of an epilogue: those that it reads, and those that it writes beside the result."""
    for array in () if fusion is None else fusion.arrays:
        shape, strides = array.slot or (array.shape, array.strides)
        spec = MatrixSpec(shape, strides, array.dtype, array.alignment)
        element = BYTE if array.kind == MASK else None
        yield OperandSlot(array.name, (spec,), written=fusion is not None and array in fusion.outputs, element=element)


def random_arrays(generator: np.random.Generator, table: Sequence[OperandSlot]) -> Arrays:
    """Random operands; results are filled with a value that no kernel computes."""
    return {
        label: poison(slot, spec) if slot.written else random_values(generator, slot, spec)
        for slot in table
        for label, spec in zip(slot.labels, slot.specs, strict=True)
    }


def laid_out(spec: MatrixSpec, make: Callable[[tuple[int, ...]], Array]) -> Array:
    """A dense array that lies as the spec says. `make` gets its extents in the order of memory."""
    order = memory_order(spec)
    made: Array = make(tuple(spec.shape[i] for i in order)).transpose(np.argsort(order))
    return made


def memory_order(spec: MatrixSpec) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(spec.shape)), key=lambda i: -spec.strides[i])


def random_values(generator: np.random.Generator, slot: OperandSlot, spec: MatrixSpec) -> Array:
    """An operand: normally distributed; int8 and bytes uniform; scales around 1."""
    if slot.element == BYTE:
        return laid_out(spec, lambda shape: generator.integers(0, 256, shape, np.uint8))
    kind = numerics.numpy_dtype(spec.dtype)
    if spec.dtype in numerics.INTEGER_DTYPES:
        return laid_out(spec, lambda shape: generator.integers(-127, 128, shape, kind))
    if slot.name.startswith("scale"):
        return laid_out(spec, lambda shape: np.exp2(generator.uniform(-1, 1, shape)).astype(kind))
    return laid_out(spec, lambda shape: numerics.saturating_cast(generator.standard_normal(shape), spec.dtype))


def poison(slot: OperandSlot, spec: MatrixSpec) -> Array:
    """A result before it is computed, so that an element that nobody writes cannot be right by chance."""
    if slot.element == BYTE:
        return laid_out(spec, lambda shape: np.full(shape, 0xFF, np.uint8))
    made = laid_out(spec, lambda shape: np.empty(shape, numerics.numpy_dtype(spec.dtype)))
    made[...] = np.iinfo(made.dtype).min if spec.dtype in numerics.INTEGER_DTYPES else np.nan
    return made
