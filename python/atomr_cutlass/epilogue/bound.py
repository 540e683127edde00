"""Epilogue trees on top of a GEMM: their operands as a kernel takes them, and the problem that they make of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..arrays import operands
from ..arrays.operands import BYTE
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.common import form_of
from ..generator.epilogue.lower import SOURCE, epilogue_id, is_common, operand_kinds, split, with_source
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ..generator.key import KernelKey
from ..pipeline.plan import Address, Steps, moved
from ..pipeline.problem import GemmProblem, MatrixSpec

Shape = tuple[int, ...]

_TMA_ALIGNMENT = 16


@dataclass(frozen=True)
class TreeArray:
    """The caller's array for an operand of a tree.

    Attributes:
        name: the operand's.
        kind: how it lies over D.
        shape, strides: in elements.
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
    slot: tuple[Shape, Shape] | None = None

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
            along = (1, shape[-1]) if self.kind == ROW else (shape[-1], 1)
            steps = (0, strides[-1]) if self.kind == ROW else (strides[-1], 0)
            return MatrixSpec((*shape[:-1], *along), (*strides[:-1], *steps), self.dtype, self.alignment)
        row_stride = 0 if self.kind == ROW else strides[-2]
        steps = (row_stride, 0 if self.kind == COLUMN else strides[-1])
        return MatrixSpec(shape, (*strides[:-2], *steps), self.dtype, self.alignment)

    @property
    def dense(self) -> bool:
        """Whether nothing lies between the elements."""
        contiguous = 1
        for extent, stride in reversed(list(zip(self.shape, self.strides, strict=True))):
            if extent != 1 and stride != contiguous:
                return False
            contiguous *= extent
        return True


@dataclass(frozen=True)
class Fusion:
    """A tree and the arrays of its operands, in its order.

    Attributes:
        tree: the computation.
        inputs: the arrays that are read.
        outputs: the arrays that are written beside D.
    """

    tree: EpilogueVisitorTree
    inputs: tuple[TreeArray, ...]
    outputs: tuple[TreeArray, ...]

    @property
    def arrays(self) -> tuple[TreeArray, ...]:
        """The operands in the order in which kernels take them."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class GroupOperand:
    """An operand that an epilogue tree reads: a row or a scalar.

    Attributes:
        name: the operand's.
        kind: `row` or `scalar`.
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


def fusion_of(tree: EpilogueVisitorTree, views: Mapping[str, _core.Operand]) -> Fusion:
    """A tree with the arrays of a launch.

    Args:
        tree: the tree.
        views: of all its inputs and outputs, by name.
    """

    def array(name: str, kind: str, reduction: str = "") -> TreeArray:
        view = views[name]
        dtype = CutlassDtype.I8 if kind == MASK else operands.dtype_of(view, name)
        return TreeArray(name, kind, view.shape, view.strides, dtype, reduction, view.alignment)

    return Fusion(
        tree,
        tuple(array(operand.name, operand.kind) for operand in tree.inputs),
        tuple(array(operand.name, operand.kind, operand.reduction) for operand in tree.outputs),
    )


def output_shape(output: Output, shape: Shape) -> Shape:
    """The extents of an output of a tree over a result of this shape (..., M, N)."""
    *batches, m, n = shape
    if output.kind == MASK:
        return (*batches, m, -(-n // 8))
    if not output.reduction:
        return shape
    return {SCALAR: (1,), ROW: (*batches, n), COLUMN: (*batches, m)}[output.kind]


def check_input(operand: Input, shape: Shape, dtype: CutlassDtype | None, result: Shape) -> None:
    """Refuses an array that does not fit a tree's operand.

    Args:
        operand: the tree's operand.
        shape: of the array.
        dtype: its element type; None for bytes.
        result: extents of D, (..., M, N).

    Raises:
        InvalidOperandError: says what was expected.
    """
    m, n = result[-2:]
    if dtype is not operand.dtype:
        given = "uint8" if dtype is None else dtype.value
        wanted = "uint8, bits" if operand.dtype is None else operand.dtype.value
        raise InvalidOperandError(f"{operand.name} is {given}; the epilogue reads {wanted}")
    if operand.kind != SCALAR:
        batches, own = result[:-2], shape[:-2]
        missing = len(batches) - len(own)
        if missing < 0 or any(x not in (1, y) for x, y in zip(own, batches[missing:], strict=True)):
            raise InvalidOperandError(f"{operand.name} has shape {shape}, whose batches do not broadcast to {result}")
    inner = {SCALAR: (1, 1), ROW: (1, n), COLUMN: (m, 1), MATRIX: (m, n), MASK: (m, -(-n // 8))}[operand.kind]
    fits = shape[-2:] == inner or (operand.kind == ROW and shape == (n,))
    if operand.kind == SCALAR:
        fits = math.prod(shape) == 1
    if not fits:
        wanted = {SCALAR: "one element", ROW: f"({n},) or (..., 1, {n})"}.get(
            operand.kind, f"(..., {inner[0]}, {inner[1]})"
        )
        raise InvalidOperandError(f"{operand.name} has shape {shape}; the epilogue reads a {operand.kind}: {wanted}")


def problem_of(problem: GemmProblem, fusion: Fusion, base: str) -> list[GemmProblem]:
    """The problem with its tree, in the ways in which a kernel may be asked for it, better ones first.

    Args:
        problem: the product.
        fusion: what follows it.
        base: `lc`, or `scaled` where scales are arrays.
    """
    plain = problem_for(problem, fusion, epilogue_id(base, fusion.tree.program))
    number = None if problem.c is not None else source_of(
        fusion, lambda operand: operand.dtype is problem.d.dtype and _like_d(operand.spec, problem.d)
    )  # fmt: skip
    if number is None:
        return [plain]
    return [problem_for(problem, fusion, epilogue_id(base, with_source(fusion.tree.program, number))), plain]


def source_of(fusion: Fusion, like_d: Callable[[TreeArray], bool]) -> int | None:
    """The number of the first matrix of a tree that can be loaded as the C operand; None if none can.

    Args:
        fusion: the tree.
        like_d: whether an array has D's element type and layout.
    """
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


def _role(operand: TreeArray, *, written: bool) -> str:
    """The role of an array in a plan's checks: D may overwrite a matrix, since that is read before D is written."""
    return "output" if written else ("source" if operand.kind == MATRIX else "input")


def reads_source(epilogue: str) -> bool:
    """Whether an operand of the tree is loaded as the C operand."""
    return source_number(epilogue) is not None


def source_number(epilogue: str) -> int | None:
    """The number of the input that is loaded as the C operand."""
    kinds = [kind for kind, _ in operand_kinds(split(epilogue)[1])[0]]
    return kinds.index(SOURCE) if SOURCE in kinds else None


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
        self._arrays = fusion.arrays if fusion else ()
        self._places: list[Address] = []
        self._source = source_number(epilogue)
        self._common = form_of(epilogue) if is_common(key.epilogue) else None
        for number, operand in enumerate(self._arrays):
            written = fusion is not None and operand in fusion.outputs
            size = operand.dtype.bits // 8
            shape, strides = operand.slot or (operand.shape, operand.strides)
            place = steps.slot(
                operand.name,
                shape,
                strides,
                operand.element,
                alignment=size * key.align_d if number == self._source else size,
                role=_role(operand, written=written),
            )
            self._places.append(place)
            if written and (operand.reduction or (operand.kind == MASK and clear_masks)):
                if not operand.dense:
                    raise UnsupportedError(
                        f"{operand.name} has strides {operand.strides}: it is cleared first and must be dense"
                    )
                steps.clear(place, math.prod(operand.shape) * size, 0xFF if operand.reduction == "max" else 0)

    @property
    def source(self) -> Address:
        """The operand that comes by the way of C; there is one where the epilogue `reads_source`."""
        if self._source is None:
            raise ValueError("no operand comes by the way of C")
        return self._places[self._source]

    def args(self, strides: Shape, offsets: Shape, *, exchanged: bool) -> dict[str, Any]:
        """Fields of a kernel's arguments.

        Args:
            strides: from one batch to the next, in elements, for each operand.
            offsets: of each operand, likewise.
            exchanged: whether the kernel computes D^T.
        """
        found: dict[str, Any] = {}
        if self._common is not None:
            found["operand0_stride_m"] = self._common.told
            if self._source is not None:
                found["beta"] = 1.0
        for number, (operand, place, batch_stride, offset) in enumerate(
            zip(self._arrays, self._places, strides, offsets, strict=True)
        ):
            stride_m, stride_n = operand.spec.strides[-2:]
            if self._common is not None:
                if number == self._common.row:
                    found["operand0"] = moved(place, offset, operand.dtype)
                    found |= {"operand0_stride_n": stride_n, "operand0_batch_stride": batch_stride}
                continue
            if exchanged:
                stride_m, stride_n = stride_n, stride_m
            found |= {
                f"operand{number}": moved(place, offset, operand.dtype),
                f"operand{number}_stride_m": stride_m,
                f"operand{number}_stride_n": stride_n,
                f"operand{number}_batch_stride": batch_stride,
            }
        return found
