"""The results that an epilogue tree is computed over: matrices, images (to the tree, matrices of pixels), or groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import _core
from ..arrays import operands
from ..arrays.layouts import (
    TO_NHWC,
    MatrixSpec,
    axes_of,
    broadcasts_to,
    collapses,
    in_layout,
    permuted,
    pixel_strides,
    row_major,
)
from ..arrays.numerics import INTEGER_DTYPES, AnyArray
from ..arrays.operands import BYTE, check_apart, check_out, check_writable
from ..errors import InvalidOperandError, UnsupportedError, require
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.lower import LINEAR, epilogue_id
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ..generator.rules import supports_grouped_tree, supports_tree
from .fusion import Fusion, GroupedFusion, GroupOperand, Layout, Shape, TreeArray
from .trace import Operand, operand_of, readings

Views = tuple[_core.Operand, ...]
"""One view, or a view of each member of a list."""


@dataclass(frozen=True)
class MatrixResult:
    """A matrix (..., M, N), with batch dimensions for several matrices."""

    shape: Shape
    _order: ClassVar[str] = ""
    """The order of dimensions in messages, if it may differ from the caller's."""

    @property
    def matrix(self) -> Shape:
        """Its extents as the tree sees them."""
        return self.shape

    def labelled(self, views: Mapping[str, _core.Operand]) -> dict[str, _core.Operand]:
        """The views of operands by label, the name of each array."""
        return dict(views)

    def view(self, array: Any, name: str) -> _core.Operand:
        """The view of an operand's array; InvalidOperandError for another object."""
        return operands.as_operand(array, name)

    def as_matrix(self, name: str, shape: Shape, strides: Shape) -> Layout:
        """Extents and strides of an array as the tree sees it; `name` is for messages."""
        return shape, strides

    def array_shape(self, operand: Input | Output) -> Shape:
        """The extents of the array for an operand."""
        *batches, m, n = self.matrix
        if operand.kind == MASK:
            return (*batches, m, -(-n // 8))
        reduced: dict[str, Shape] = {SCALAR: (1,), ROW: (*batches, n), COLUMN: (*batches, m)}
        read: dict[str, Shape] = {SCALAR: (1,), ROW: (n,), COLUMN: (m, 1)}
        return (reduced if isinstance(operand, Output) else read).get(operand.kind, self.matrix)

    def bias_type(self, view: _core.Operand) -> CutlassDtype:
        """The element type of a bias."""
        return operands.dtype_of(view, "bias")

    def operand(self, name: str, view: _core.Operand) -> Operand:
        """The operand for a function's parameter that is this array; rules may refuse its kind later."""
        m, n = self.matrix[-2:]
        return operand_of(self.as_matrix(name, view.shape, view.strides)[0], m, n, _element(view, name) or BYTE, name)

    def check_tree(self, tree: EpilogueVisitorTree, acc: CutlassDtype, d: CutlassDtype) -> None:
        """Refuses trees that no kernel evaluates over groups; for matrices, the search for kernels refuses them."""

    def check_input(self, operand: Input, view: _core.Operand) -> None:
        """Refuses an array that does not fit a tree's operand."""
        name, kind = operand.name, operand.kind
        shape, _ = self.as_matrix(name, view.shape, view.strides)
        _check_type(operand, view, name)
        *batches, m, n = self.matrix
        inner = MatrixResult((m, n)).array_shape(operand)
        if kind == SCALAR:
            fits = math.prod(shape) == 1
        else:
            if not broadcasts_to(shape[:-2], batches):
                raise InvalidOperandError(f"{name} has shape {shape}, whose batches do not broadcast to {self.matrix}")
            fits = shape[-2:] == inner or (kind == ROW and shape[-2:] == (1, n))
        if not fits:  # texts only then: texts tie plans to their extents (`arrays.symbols`)
            wanted = {SCALAR: "one element", ROW: f"({n},) or (..., 1, {n})"}.get(kind, f"(..., {m}, {inner[-1]})")
            raise InvalidOperandError(f"{name} has shape {shape}; the epilogue reads a {kind}: {wanted}")

    def check_output(self, output: Output, view: _core.Operand) -> None:
        """Refuses an array that a tree cannot write."""
        wanted = self.array_shape(output)
        if view.shape != wanted:
            raise InvalidOperandError(
                f"{output.name} has shape {view.shape}; the epilogue writes {wanted}{self._order}"
            )
        _check_type(output, view, output.name, "writes")
        check_writable(view, output.name)

    def check_apart(
        self, tree: EpilogueVisitorTree, product: Mapping[str, _core.Operand], views: Mapping[str, _core.Operand]
    ) -> None:
        """Refuses results that share memory with each other or with an operand; `product` includes `out`."""
        # D may be exactly the memory of a matrix or of C: each element is read before it is written.
        every, outputs = {**product, **views}, [*(output.name for output in tree.outputs), RESULT]
        written = {name: every[name] for name in outputs if name in every}
        read = {name: view for name, view in every.items() if name not in written}
        check_apart(written, read, ("c", *(operand.name for operand in tree.inputs if operand.kind == MATRIX)))

    def fusion(self, tree: EpilogueVisitorTree, arrays: Mapping[str, _core.Operand | MatrixSpec]) -> Fusion:
        """A tree with the arrays of a launch: all its inputs and outputs, by name."""

        def array(operand: Input | Output, reduction: str = "") -> TreeArray:
            given = arrays[operand.name]
            shape, strides, slot = self._placed(operand.name, given.shape, given.strides, reduction)
            dtype = operand.dtype or CutlassDtype.I8
            return TreeArray(operand.name, operand.kind, shape, strides, dtype, reduction, given.alignment, slot)

        outputs = tuple(array(output, output.reduction) for output in tree.outputs)
        return Fusion(tree, tuple(map(array, tree.inputs)), outputs)

    def dense(self, tree: EpilogueVisitorTree, d: MatrixSpec) -> Fusion:
        """A tree with dense arrays: matrices with the strides of the dense result `d`, the others row-major.

        Rows, columns and scalars are the same for all batches.
        """

        def array(operand: Input | Output) -> MatrixSpec:
            shape = self.array_shape(operand)
            return MatrixSpec(shape, d.strides if operand.kind == MATRIX else row_major(shape), d.dtype)

        every: tuple[Input | Output, ...] = (*tree.inputs, *tree.outputs)
        return self.fusion(tree, {operand.name: array(operand) for operand in every})

    def _placed(self, name: str, shape: Shape, strides: Shape, reduction: str) -> tuple[Shape, Shape, Layout | None]:
        """Extents and strides of an array as the tree sees it, and its layout in calls if that differs."""
        return shape, strides, None


@dataclass(frozen=True)
class ImageResult(MatrixResult):
    """Images (N, P, Q, K): to a tree, a matrix of pixels by channels. Views have their dimensions in the order of NHWC.

    Arrays with 4 dimensions have all of the result's pixels, or one pixel for all; those with 3, (N, P, Q), are
    reductions over channels. The tree takes others, such as (K,), unchanged.
    """

    layout: str = "nhwc"
    """The order in which callers name dimensions."""
    _order: ClassVar[str] = " (NHWC order)"

    @property
    def matrix(self) -> Shape:
        """(pixels, channels)."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view(self, array: Any, name: str) -> _core.Operand:
        """The view of an array with dimensions ordered by `layout`, reordered to NHWC."""
        image: _core.Operand = permuted(super().view(array, name), axes_of(self.layout, TO_NHWC))
        return image

    def as_matrix(self, name: str, shape: Shape, strides: Shape) -> Layout:
        """Extents and strides of an array as the tree sees it; its pixels must be evenly spaced."""
        if shape == self.shape[:-1]:
            (pixels, _), (step, _) = self.as_matrix(name, (*shape, 1), (*strides, 1))
            return (pixels,), (step,)
        if len(shape) != len(self.shape):
            return shape, strides
        pixels = math.prod(shape[:-1])
        if pixels != 1 and shape[:-1] != self.shape[:-1]:
            raise InvalidOperandError(
                f"{name} has shape {shape} and the result {self.shape} (NHWC order): an operand has the result's "
                f"pixels, or is the same for all of them, ({self.shape[-1]},)"
            )
        spec = MatrixSpec(shape, strides, CutlassDtype.I8)
        if not collapses(spec):
            raise UnsupportedError(
                f"{name} has strides {strides} (NHWC order): its pixels are not evenly spaced, as kernels read them; "
                f"copy it, in PyTorch {name} = {name}.contiguous(memory_format=torch.channels_last)"
            )
        return (pixels, shape[-1]), (pixel_strides(spec)[0], strides[-1])

    def array_shape(self, operand: Input | Output) -> Shape:
        """The extents of the array for an operand; a column's are (N, P, Q, 1), of a reduction (N, P, Q)."""
        shape = super().array_shape(operand)
        return shape if operand.kind in (SCALAR, ROW) else (*self.shape[:-1], *shape[1:])

    def check_input(self, operand: Input, view: _core.Operand) -> None:
        """Refuses arrays that do not fit a tree's operand, or that only the tree would take for such an operand."""
        super().check_input(operand, view)
        name, shape = operand.name, view.shape
        *pixels, channels = self.shape
        if len(shape) != len(self.shape) and (
            operand.kind not in (ROW, SCALAR) or math.prod(shape) not in (1, channels)
        ):
            wanted = self.array_shape(operand)
            raise InvalidOperandError(
                f"{name} has shape {shape}; the epilogue reads a {operand.kind}: {wanted} (NHWC order)"
            )
        if len(shape) == len(self.shape) - 1:
            raise InvalidOperandError(
                f"{name} has shape {shape}; one element for each pixel is {(*pixels, 1)}, and for each channel "
                f"{(channels,)} (NHWC order)"
            )

    def _placed(self, name: str, shape: Shape, strides: Shape, reduction: str) -> tuple[Shape, Shape, Layout | None]:
        placed = in_layout(shape, self.layout), in_layout(strides, self.layout)
        return (*self.as_matrix(name, shape, strides), placed)


@dataclass(frozen=True)
class GroupedResult:
    """The results of groups, whose epilogues read rows and scalars.

    A row (N,) or a scalar may be the same for all groups, or each group may have its own: (groups, N), (groups, 1, N)
    and (groups, 1, 1), or a list if D is one. Matrices and columns are refused: only the device knows at which row a
    group begins.

    Attributes:
        number: of groups.
        members: extents of D's arrays, (..., M, N): of one array for all groups, or of each in a list.
        lists: the names of the operands that are lists, with a member for each group.
    """

    number: int
    members: Sequence[Shape]
    lists: Collection[str]

    @property
    def listed(self) -> bool:
        """Whether D, and with it other operands, is a list."""
        return RESULT in self.lists

    @property
    def shapes(self) -> dict[str, Shape]:
        """Extents of D's arrays by label."""
        return {self.label(RESULT, index): shape for index, shape in enumerate(self.members)}

    def view(self, array: Any, name: str) -> Views:
        if not isinstance(array, (list, tuple)):
            return (operands.as_operand(array, name),)
        if not self.listed:
            raise InvalidOperandError(f"{name} is a {type(array).__name__}; expected an array")
        if len(array) != self.number:
            raise InvalidOperandError(f"{name} has {len(array)} members; a has {self.number}")
        return tuple(operands.as_operand(member, f"{name}[{index}]") for index, member in enumerate(array))

    def labelled(self, views: Mapping[str, Views]) -> dict[str, _core.Operand]:
        return {self.label(name, index): view for name, some in views.items() for index, view in enumerate(some)}

    def label(self, name: str, index: int) -> str:
        """The name of an operand's array."""
        return f"{name}[{index}]" if name in self.lists else name

    def bias_type(self, views: Views) -> CutlassDtype:
        labelled = self.labelled({"bias": views})
        dtype = common_dtype(labelled)
        if dtype in INTEGER_DTYPES:
            raise InvalidOperandError(f"{next(iter(labelled))} is {dtype.value}; expected a floating dtype")
        return dtype

    def operand(self, name: str, views: Views) -> Operand:
        first = views[0]
        bits = first.dtype == BYTE
        for kind in () if bits else (SCALAR, ROW):
            if all(self._fits(view.shape, kind, index) for index, view in enumerate(views)):
                return Operand(kind, operands.dtype_of(first, name))
        for index, view in enumerate(views):
            m, n = self._matrix(index)
            for kind in readings(view.shape, m, n, bits=bits)[:1]:
                if kind not in (SCALAR, ROW):
                    return Operand(kind, None if kind == MASK else operands.dtype_of(view, name))
        index = next((i for i, view in enumerate(views) if not self._fits(view.shape, ROW, i)), 0)
        operands.dtype_of(views[index], name)  # refuses other element types
        expected = " or ".join(self._expected(kind, index) for kind in (SCALAR, ROW))
        raise InvalidOperandError(f"{self.label(name, index)} has shape {views[index].shape}; expected {expected}")

    def check_tree(self, tree: EpilogueVisitorTree, acc: CutlassDtype, d: CutlassDtype) -> None:
        require(supports_grouped_tree(epilogue_id(LINEAR, tree.program)))
        require(supports_tree(tree.program, acc, d))

    def check_input(self, operand: Input, views: Views) -> None:
        if self.listed and operand.name not in self.lists and operand.kind == ROW:
            raise InvalidOperandError(f"{operand.name} is one array; expected a list, one for each group")
        for index, view in enumerate(views):
            name = self.label(operand.name, index)
            if not self._fits(view.shape, operand.kind, index):
                raise InvalidOperandError(
                    f"{name} has shape {view.shape}; expected {self._expected(operand.kind, index)}"
                )
            _check_type(operand, view, name)

    def check_output(self, output: Output, views: Views) -> None:
        """Does nothing: D is the only output, see `check_tree`."""

    def check_apart(self, tree: EpilogueVisitorTree, product: Mapping[str, Views], views: Mapping[str, Views]) -> None:
        for index, out in enumerate(product.get(RESULT, ())):
            read = {
                name: given[index if len(given) > 1 else 0]
                for name, given in {**product, **views}.items()
                if name != RESULT
            }
            check_out({RESULT: out, **read}, read)

    def fusion(self, tree: EpilogueVisitorTree, views: Mapping[str, _core.Operand]) -> GroupedFusion:
        """A tree with the arrays of a launch: views of its operands, by label."""

        def operand(declared: Input) -> GroupOperand:
            name = declared.name
            labels = [self.label(name, index) for index in range(self.number if name in self.lists else 1)]
            return GroupOperand(name, declared.kind, tuple(MatrixSpec.of(views[label], name) for label in labels))

        return GroupedFusion(tree, tuple(map(operand, tree.inputs)))

    def of_groups(self, tree: EpilogueVisitorTree, host: Mapping[str, AnyArray]) -> dict[str, list[AnyArray]]:
        """The operands of each group, of host arrays by label: (N,), or one element."""
        found = {}
        for operand in tree.inputs:
            if operand.name in self.lists:
                arrays = [host[self.label(operand.name, index)] for index in range(self.number)]
            else:
                array = host[operand.name]
                least = 2 if operand.kind == ROW else 3
                each = array.ndim >= least and array.shape[0] == self.number
                arrays = list(array) if each else [array] * self.number
            found[operand.name] = [array.reshape(-1) for array in arrays]
        return found

    def _fits(self, shape: Shape, kind: str, index: int) -> bool:
        """Whether an array, or the member of this index of a list, is a row or a scalar, for all groups or each."""
        count = 1 if self.listed else self.number
        if kind == SCALAR:
            return math.prod(shape) == 1 or (not self.listed and shape == (count, 1, 1))
        n = self._matrix(index)[1]
        return kind == ROW and (shape in ((n,), (1, n), (1, 1, n), (count, n), (count, 1, n)))

    def _expected(self, kind: str, index: int) -> str:
        n = self._matrix(index)[1]
        if self.listed:
            return "one element" if kind == SCALAR else f"({n},)"
        return f"one element or ({self.number}, 1, 1)" if kind == SCALAR else f"({n},) or ({self.number}, {n})"

    def _matrix(self, index: int) -> Shape:
        return self.members[min(index, len(self.members) - 1)][-2:]


def _element(view: _core.Operand, name: str) -> CutlassDtype | None:
    """An element type, None for bytes."""
    return None if view.dtype == BYTE else operands.dtype_of(view, name)


def common_dtype(views: Mapping[str, _core.Operand]) -> CutlassDtype:
    """The element type that arrays, given by label, have in common."""
    found = {label: operands.dtype_of(view, label) for label, view in views.items()}
    first, dtype = next(iter(found.items()))
    for label, other in found.items():
        if other is not dtype:
            raise InvalidOperandError(f"{label} is {other.value}, and {first} {dtype.value}: give one dtype")
    return dtype


def _check_type(operand: Input | Output, view: _core.Operand, name: str, verb: str = "reads") -> None:
    if _element(view, name) is not operand.dtype:
        given = "uint8" if view.dtype == BYTE else operands.dtype_of(view, name).value
        wanted = "uint8, bits" if operand.dtype is None else operand.dtype.value
        raise InvalidOperandError(f"{name} is {given}; the epilogue {verb} {wanted}")
