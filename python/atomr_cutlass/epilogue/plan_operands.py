"""The operands of a fused epilogue tree in a plan, and its reductions of a result without elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import operands
from ..arrays.layouts import is_dense
from ..arrays.numerics import numpy_dtype
from ..errors import UnsupportedError
from ..generator.epilogue.common import form_of, wider
from ..generator.epilogue.lower import is_common
from ..generator.epilogue.tree import MASK, MATRIX, EpilogueVisitorTree
from ..generator.key import KernelKey
from ..pipeline.plan import Address, Steps, moved
from .fusion import Fusion, Shape, source_number


def reduce_nothing(tree: EpilogueVisitorTree, views: Mapping[str, Any], stream: int) -> None:
    """Writes the reductions of a result without elements on a stream: 0 for sums, -infinity for maxima."""
    for output in tree.outputs:
        if output.reduction and output.dtype is not None:
            view, value = views[output.name], -math.inf if output.reduction == "max" else 0.0
            operands.write_async(np.full(view.shape, value, numpy_dtype(output.dtype)), view, stream)


class FusedOperands:
    """The operands of a problem's tree in a plan, and as fields of the kernel's arguments.

    Attributes:
        source: the operand that is loaded as the C operand, if there is one.
    """

    def __init__(
        self, steps: Steps, fusion: Fusion | None, epilogue: str, key: KernelKey, *, clear_masks: bool
    ) -> None:
        """Adds the operands, and clears outputs that accumulate (masks with `clear_masks`), which must be dense."""
        outputs = fusion.outputs if fusion else ()
        self._arrays = fusion.arrays if fusion else ()
        self._places: list[Address] = []
        source = source_number(epilogue)
        self._common = form_of(epilogue) if is_common(key.epilogue) else None
        # A kernel of a wider epilogue writes a reduction that is not read.
        self._unread = steps.temporary(4) if fusion is not None and wider(epilogue) == key.epilogue else None
        for number, operand in enumerate(self._arrays):
            written = operand in outputs
            size = operand.dtype.bits // 8
            shape, strides = operand.slot or (operand.shape, operand.strides)
            alignment = size * key.align_d if number == source else size
            # D may overwrite a matrix, since that is read before D is written.
            role = "output" if written else "source" if operand.kind == MATRIX else "input"
            place = steps.slot(operand.name, shape, strides, operand.element, alignment=alignment, role=role)
            self._places.append(place)
            if written and (operand.reduction or (operand.kind == MASK and clear_masks)):
                if not is_dense(operand.shape, operand.strides):
                    raise UnsupportedError(
                        f"{operand.name} has strides {operand.strides}: it is cleared first and must be dense"
                    )
                steps.clear(place, math.prod(operand.shape) * size, 0xFF if operand.reduction == "max" else 0)
        self.source = None if source is None else self._places[source]

    def args(self, strides: Shape, offsets: Shape, *, swapped: bool) -> dict[str, Any]:
        """Fields of a kernel's arguments, from each operand's batch stride and offset in elements."""
        found: dict[str, Any] = {}
        if self._unread is not None:
            found[f"operand{len(self._arrays)}"] = self._unread
        if self._common is not None:
            found["operand0_stride_m"] = self._common.told
            if self.source is not None:
                found["beta"] = 1.0
        for number, (operand, place, batch_stride, offset) in enumerate(
            zip(self._arrays, self._places, strides, offsets, strict=True)
        ):
            stride_m, stride_n = operand.spec.strides[-2:]
            at = moved(place, offset, operand.dtype)
            if self._common is not None:
                if number == self._common.row:
                    found |= {"operand0": at, "operand0_stride_n": stride_n, "operand0_batch_stride": batch_stride}
                name = next((name for name, index in self._common.scales.items() if index == number), None)
                if name is not None:
                    found |= {name: at, **({f"scale_form_{name[-1]}": 1} if name in ("scale_a", "scale_b") else {})}
                continue
            if swapped:
                stride_m, stride_n = stride_n, stride_m
            found |= {
                f"operand{number}": at,
                f"operand{number}_stride_m": stride_m,
                f"operand{number}_stride_n": stride_n,
                f"operand{number}_batch_stride": batch_stride,
            }
        return found
