"""The operands of an epilogue tree in a plan: its slots, and the fields of the kernel's arguments."""

from __future__ import annotations

import math
from typing import Any

from ..errors import UnsupportedError
from ..generator.epilogue.common import form_of, wider
from ..generator.epilogue.lower import is_common
from ..generator.epilogue.tree import MASK, MATRIX
from ..generator.key import KernelKey
from ..pipeline.plan import Address, Steps, moved
from ..pipeline.problem import is_dense
from .bound import Fusion, Shape, source_number


class FusedOperands:
    """The operands of a tree as slots of a plan."""

    def __init__(
        self, steps: Steps, fusion: Fusion | None, epilogue: str, key: KernelKey, *, clear_masks: bool
    ) -> None:
        """Adds the slots, and clears the outputs that accumulate.

        Args:
            steps: the plan in the making.
            fusion: the tree's arrays; None without a tree.
            epilogue: of the problem; it says which operand is loaded as the C operand.
            key: the kernel's.
            clear_masks: whether the kernel adds bits to the present ones.

        Raises:
            UnsupportedError: an output that must be cleared is not dense.
        """
        outputs = fusion.outputs if fusion else ()
        self._arrays = fusion.arrays if fusion else ()
        self._places: list[Address] = []
        self._source = source_number(epilogue)
        self._common = form_of(epilogue) if is_common(key.epilogue) else None
        # A kernel may reduce what nobody reads.
        self._unread = steps.temporary(4) if fusion is not None and wider(epilogue) == key.epilogue else None
        for number, operand in enumerate(self._arrays):
            written = operand in outputs
            size = operand.dtype.bits // 8
            shape, strides = operand.slot or (operand.shape, operand.strides)
            place = steps.slot(
                operand.name,
                shape,
                strides,
                operand.element,
                alignment=size * key.align_d if number == self._source else size,
                # D may overwrite a matrix, since that is read before D is written.
                role="output" if written else "source" if operand.kind == MATRIX else "input",
            )
            self._places.append(place)
            if written and (operand.reduction or (operand.kind == MASK and clear_masks)):
                if not is_dense(operand.shape, operand.strides):
                    raise UnsupportedError(
                        f"{operand.name} has strides {operand.strides}: it is cleared first and must be dense"
                    )
                steps.clear(place, math.prod(operand.shape) * size, 0xFF if operand.reduction == "max" else 0)

    @property
    def source(self) -> Address:
        """The operand that is loaded as the C operand; there is one where the epilogue `reads_source`."""
        if self._source is None:
            raise ValueError("no operand is loaded as the C operand")
        return self._places[self._source]

    def args(self, strides: Shape, offsets: Shape, *, swapped: bool) -> dict[str, Any]:
        """Fields of a kernel's arguments.

        Args:
            strides: from one batch to the next, in elements, for each operand.
            offsets: of each operand.
            swapped: whether the kernel computes D^T.
        """
        found: dict[str, Any] = {}
        if self._unread is not None:
            found[f"operand{len(self._arrays)}"] = self._unread
        if self._common is not None:
            found["operand0_stride_m"] = self._common.told
            if self._source is not None:
                found["beta"] = 1.0
        for number, (operand, place, batch_stride, offset) in enumerate(
            zip(self._arrays, self._places, strides, offsets, strict=True)
        ):
            stride_m, stride_n = operand.spec.strides[-2:]
            if self._common is not None:
                at = moved(place, offset, operand.dtype)
                if number == self._common.row:
                    found |= {"operand0": at, "operand0_stride_n": stride_n, "operand0_batch_stride": batch_stride}
                name = next((name for name, which in self._common.scales.items() if which == number), None)
                if name is not None:
                    found |= {name: at, **({f"scale_form_{name[-1]}": 1} if name in ("scale_a", "scale_b") else {})}
                continue
            if swapped:
                stride_m, stride_n = stride_n, stride_m
            found |= {
                f"operand{number}": moved(place, offset, operand.dtype),
                f"operand{number}_stride_m": stride_m,
                f"operand{number}_stride_n": stride_n,
                f"operand{number}_batch_stride": batch_stride,
            }
        return found
