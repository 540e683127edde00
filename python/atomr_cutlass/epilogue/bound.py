"""Epilogue trees on top of a product: their arrays, the problem that they make of it, and their operands in a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import operands
from ..arrays.numerics import BYTE, numpy_dtype
from ..errors import UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.common import form_of, wider
from ..generator.epilogue.lower import SOURCE, epilogue_id, is_common, operand_kinds, split, with_source
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, ROW, SCALAR, EpilogueVisitorTree
from ..generator.key import KernelKey
from ..pipeline.plan import Address, Steps, moved
from ..pipeline.problem import GemmProblem, MatrixSpec, is_dense

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]
"""Extents and strides of an array, in elements."""

_TMA_ALIGNMENT = 16


@dataclass(frozen=True)
class TreeArray:
    """The caller's array for an operand of a tree.

    Attributes:
        kind: how it lies over D.
        dtype: its element type; I8 of a mask, whose elements are bytes.
        reduction: of an output that is reduced; else empty.
        alignment: bytes that its address is a multiple of.
        slot: extents and strides of the caller's array, where those are not `shape` and `strides`.
    """

    name: str
    kind: str
    shape: Shape
    strides: Shape
    dtype: CutlassDtype
    reduction: str = ""
    alignment: int = 16
    slot: Layout | None = None

    @property
    def element(self) -> tuple[int, int]:
        """DLPack's (type code, bits)."""
        return BYTE if self.kind == MASK else self.dtype.dlpack

    @property
    def spec(self) -> MatrixSpec:
        """The array as matrices over D, with stride 0 where it does not vary."""
        shape, strides = self.shape, self.strides
        if self.kind == SCALAR:
            return MatrixSpec((1, 1), (0, 0), self.dtype, self.alignment)
        if self.reduction or (self.kind == ROW and len(shape) == 1):
            # Of the batches and one more dimension.
            at = len(shape) - (self.kind == ROW)
            shape, strides = (*shape[:at], 1, *shape[at:]), (*strides[:at], 0, *strides[at:])
        steps = (0 if self.kind == ROW else strides[-2], 0 if self.kind == COLUMN else strides[-1])
        return MatrixSpec(shape, (*strides[:-2], *steps), self.dtype, self.alignment)


@dataclass(frozen=True)
class Fusion:
    """A tree and the arrays that it reads and that it writes beside D, in its order."""

    tree: EpilogueVisitorTree
    inputs: tuple[TreeArray, ...]
    outputs: tuple[TreeArray, ...]

    @property
    def arrays(self) -> tuple[TreeArray, ...]:
        """The operands in the order in which kernels take them."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class GroupOperand:
    """A row or a scalar that a tree reads for each group.

    Attributes:
        arrays: how they lie: one array, of a row (N,), of a scalar one element, for all groups or with a dimension of
            groups in front, beside which a row may have one of 1; of a list one for each, or one for all.
    """

    name: str
    kind: str
    arrays: tuple[MatrixSpec, ...]

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one group's to the next one's, 0 where all share one, and from one column to the next."""
        (spec,) = self.arrays
        least = 2 if self.kind == ROW else 3
        each = len(spec.shape) >= least and spec.shape[0] > 1
        return spec.strides[0] if each else 0, spec.strides[-1] if self.kind == ROW else 0


@dataclass(frozen=True)
class GroupedFusion:
    """An epilogue tree and the arrays of its operands, in its order; it writes D alone."""

    tree: EpilogueVisitorTree
    inputs: tuple[GroupOperand, ...] = ()


def problem_of(problem: GemmProblem, fusion: Fusion, base: str) -> list[GemmProblem]:
    """The problem with its tree, in the forms in which a kernel may compute it, better ones first.

    The base of the epilogue is `lc`, or `scaled` where scales are arrays.
    """
    program, number = fusion.tree.program, None
    if problem.c is None:
        number = source_of(fusion, lambda array: array.dtype is problem.d.dtype and _like_d(array.spec, problem.d))
    programs = [program] if number is None else [with_source(program, number), program]
    return [problem_for(problem, fusion, epilogue_id(base, program)) for program in programs]


def source_of(fusion: Fusion, like_d: Callable[[TreeArray], bool]) -> int | None:
    """The number of the first matrix of a tree that can be loaded as the C operand, being like D; None if none can."""
    fits = (number for number, operand in enumerate(fusion.inputs) if operand.kind == MATRIX and like_d(operand))
    return next(fits, None)


def problem_for(problem: GemmProblem, fusion: Fusion, epilogue: str) -> GemmProblem:
    """The problem with its tree as the epilogue of a kernel's key has it."""
    specs = tuple(operand.spec for operand in fusion.arrays)
    number = source_number(epilogue)
    c = problem.c if number is None else fusion.inputs[number].spec
    return dataclasses.replace(problem, epilogue=epilogue, operands=specs, c=c)


def _like_d(spec: MatrixSpec, d: MatrixSpec) -> bool:
    """Whether a matrix can be loaded as the C operand: it has the layout of D, aligned as TMA wants it."""
    contiguous = (spec.strides[-1] == 1, spec.strides[-2] == 1)
    leading = max(spec.strides[-2:])
    aligned = spec.alignment % _TMA_ALIGNMENT == 0 and leading * spec.dtype.bits % (8 * _TMA_ALIGNMENT) == 0
    return contiguous == (d.strides[-1] == 1, d.strides[-2] == 1) and True in contiguous and aligned


def source_number(epilogue: str) -> int | None:
    """The number of the input that is loaded as the C operand; None where there is none."""
    kinds = [kind for kind, _ in operand_kinds(split(epilogue)[1])[0]]
    return kinds.index(SOURCE) if SOURCE in kinds else None


def reduce_nothing(tree: EpilogueVisitorTree, views: Mapping[str, Any], stream: int) -> None:
    """Writes the reductions of a result without elements in the order of a stream: 0, and of maxima -infinity."""
    for output in tree.outputs:
        if output.reduction and output.dtype is not None:
            view, value = views[output.name], -math.inf if output.reduction == "max" else 0.0
            operands.write_async(np.full(view.shape, value, numpy_dtype(output.dtype)), view, stream)


class FusedOperands:
    """The operands of a problem's tree as slots of a plan, and as fields of the kernel's arguments.

    Attributes:
        source: the operand that is loaded as the C operand, if there is one.
    """

    def __init__(
        self, steps: Steps, fusion: Fusion | None, epilogue: str, key: KernelKey, *, clear_masks: bool
    ) -> None:
        """Adds the slots, and clears the outputs that accumulate, which must be dense: with `clear_masks` bits too."""
        outputs = fusion.outputs if fusion else ()
        self._arrays = fusion.arrays if fusion else ()
        self._places: list[Address] = []
        source = source_number(epilogue)
        self._common = form_of(epilogue) if is_common(key.epilogue) else None
        # A kernel may reduce what nobody reads.
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
        """Fields of a kernel's arguments, of each operand's stride from batch to batch and its offset, in elements."""
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
                name = next((name for name, which in self._common.scales.items() if which == number), None)
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
