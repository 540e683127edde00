"""The results that an epilogue tree is computed over: a matrix, or an image, which to the tree is a matrix too."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..arrays import operands
from ..arrays.arguments import check_apart, check_writable
from ..arrays.layouts import collapses, in_layout, in_nhwc, pixel_strides, relaid
from ..arrays.operands import BYTE
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ..pipeline.problem import MatrixSpec, row_major
from .bound import Fusion, TreeArray, check_input, fusion_of, output_shape
from .trace import Operand, operand_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MatrixResult:
    """A matrix, or matrices with dimensions of batches.

    Attributes:
        shape: (..., M, N).
    """

    shape: Shape

    @property
    def matrix(self) -> Shape:
        """Its extents as the tree sees them."""
        return self.shape

    def labelled(self, name: str, view: _core.Operand) -> dict[str, _core.Operand]:
        """The views of an operand by label, which is the name of each."""
        return {name: view}

    def view(self, array: Any, name: str) -> _core.Operand:
        """The view of an operand's array; InvalidOperandError for what is none."""
        return operands.as_operand(array, name)

    def flat(self, name: str, view: _core.Operand) -> _core.Operand:
        """A view as the tree sees it; `name` is for messages."""
        return view

    def output_shape(self, output: Output) -> Shape:
        """The extents of the array for an output."""
        return output_shape(output, self.shape)

    def operand(self, name: str, view: _core.Operand) -> Operand:
        """The operand that an array is to a function; of kinds, too, that a rule refuses later.

        Raises:
            InvalidOperandError: nothing of that shape or element type could be read.
        """
        m, n = self.matrix[-2:]
        return operand_of(self.flat(name, view).shape, m, n, _element(view, name) or BYTE, name)

    def check_tree(self, tree: EpilogueVisitorTree, acc: CutlassDtype, d: CutlassDtype) -> None:
        """Refuses a tree that no kernel evaluates over groups; over a matrix, the search for kernels does."""

    def check_input(self, operand: Input, view: _core.Operand) -> None:
        """Refuses an array that does not fit a tree's operand."""
        check_input(operand, self.flat(operand.name, view).shape, _element(view, operand.name), self.matrix)

    def check_output(self, output: Output, view: _core.Operand) -> None:
        """Refuses an array that a tree cannot write."""
        wanted = self.output_shape(output)
        if view.shape != wanted:
            raise InvalidOperandError(
                f"{output.name} has shape {view.shape}; the epilogue writes {wanted}{self._order}"
            )
        if _element(view, output.name) is not output.dtype:
            name = "uint8" if output.dtype is None else output.dtype.value
            raise InvalidOperandError(f"{output.name} has another dtype than the epilogue writes: {name}")
        check_writable(view, output.name)

    def check_apart(
        self, tree: EpilogueVisitorTree, product: Mapping[str, _core.Operand], views: Mapping[str, _core.Operand]
    ) -> None:
        """Refuses results that share memory with each other or with an operand.

        Args:
            tree: the tree.
            product: views of the product's operands and of `out`, if it is given.
            views: of the tree's inputs, and of the arrays that are given for its outputs.

        Raises:
            InvalidOperandError: names the two.
        """
        # D may be in the place of a matrix or of C: each element is read before it is written.
        outputs = [output.name for output in tree.outputs if output.name in views]
        written = {name: views[name] for name in outputs}
        written |= {RESULT: product[RESULT]} if RESULT in product else {}
        read = {name: view for name, view in {**product, **views}.items() if name not in written}
        check_apart(written, read, {"c", *(operand.name for operand in tree.inputs if operand.kind == MATRIX)})

    def fusion(self, tree: EpilogueVisitorTree, views: Mapping[str, _core.Operand]) -> Fusion:
        """A tree with the arrays of a launch: views of all its inputs and outputs, by name."""
        return fusion_of(tree, views)

    def dense(self, tree: EpilogueVisitorTree, d: MatrixSpec) -> Fusion:
        """A tree with dense arrays.

        Args:
            tree: the tree.
            d: the result, dense too. Matrices lie as it does. Masks lie row by row, batches outermost; rows (N,),
                columns (M, 1) and scalars (1,) are the same for all batches. Reductions are row-major.
        """
        *batches, m, n = d.shape
        inner = {SCALAR: (1,), ROW: (n,), COLUMN: (m, 1), MATRIX: d.shape, MASK: (*batches, m, -(-n // 8))}

        def array(operand: Input | Output, shape: Shape, reduction: str = "") -> TreeArray:
            strides = d.strides if operand.kind == MATRIX else row_major(shape)
            return TreeArray(operand.name, operand.kind, shape, strides, operand.dtype or CutlassDtype.I8, reduction)

        return Fusion(
            tree,
            tuple(array(operand, inner[operand.kind]) for operand in tree.inputs),
            tuple(array(operand, output_shape(operand, d.shape), operand.reduction) for operand in tree.outputs),
        )

    @property
    def _order(self) -> str:
        """The order that messages name dimensions in, where it need not be the caller's."""
        return ""


@dataclass(frozen=True)
class ImageResult(MatrixResult):
    """Images: to a tree, a matrix of pixels by channels. Views have their dimensions in the order of NHWC.

    Arrays with 4 dimensions have all of the result's pixels or one for all; those with 3, (N, P, Q), are sums and
    maxima of channels. Others, such as (K,), are to the tree what they are.

    Attributes:
        shape: (N, P, Q, K).
        layout: the order in which callers name dimensions.
    """

    layout: str = "nhwc"

    @property
    def matrix(self) -> Shape:
        """(pixels, channels)."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def view(self, array: Any, name: str) -> _core.Operand:
        """The view of an array that names its dimensions as `layout` does, in the order of NHWC."""
        return in_nhwc(super().view(array, name), self.layout)

    def flat(self, name: str, view: _core.Operand) -> _core.Operand:
        """A view as the tree sees it; see `as_matrix`."""
        shape, strides = self.as_matrix(name, view.shape, view.strides)
        return view if shape == view.shape else relaid(view, shape, strides)

    def as_matrix(self, name: str, shape: Shape, strides: Shape) -> tuple[Shape, Shape]:
        """Extents and strides of an array as the tree sees it; `name` is for messages.

        Raises:
            InvalidOperandError: other pixels than the result's.
            UnsupportedError: the pixels are not evenly spaced in memory.
        """
        if shape == self.shape[:-1]:
            shape, strides, last = (*shape, 1), (*strides, 1), False
        elif len(shape) == len(self.shape):
            last = True
        else:
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
        step = pixel_strides(spec)[0]
        return ((pixels, shape[-1]), (step, strides[-1])) if last else ((pixels,), (step,))

    def output_shape(self, output: Output) -> Shape:
        return self._shape(output)

    def check_input(self, operand: Input, view: _core.Operand) -> None:
        """Refuses an array that does not fit a tree's operand, or that the tree alone would take for another."""
        super().check_input(operand, view)
        name, shape = operand.name, view.shape
        *pixels, channels = self.shape
        if len(shape) != len(self.shape) and (
            operand.kind not in (ROW, SCALAR) or math.prod(shape) not in (1, channels)
        ):
            raise InvalidOperandError(
                f"{name} has shape {shape}; the epilogue reads a {operand.kind}: {self._shape(operand)} (NHWC order)"
            )
        if len(shape) == len(self.shape) - 1:
            raise InvalidOperandError(
                f"{name} has shape {shape}; one element for each pixel is {(*pixels, 1)}, and for each channel "
                f"{(channels,)} (NHWC order)"
            )

    def fusion(self, tree: EpilogueVisitorTree, views: Mapping[str, _core.Operand]) -> Fusion:
        """A tree with the arrays of a launch, which calls of its plan give in the order of `layout`."""
        found = fusion_of(tree, {name: self.flat(name, view) for name, view in views.items()})
        return self._placed(found, {name: (view.shape, view.strides) for name, view in views.items()})

    def dense(self, tree: EpilogueVisitorTree, d: MatrixSpec) -> Fusion:
        """A tree with dense arrays.

        Args:
            tree: the tree.
            d: the result, dense, in the order of NHWC. Matrices and masks lie as it does, rows are (K,), columns (N, P,
                Q, 1), and what is reduced for each pixel (N, P, Q).
        """
        shapes = {operand.name: self._shape(operand) for operand in tree.inputs}
        shapes |= {operand.name: self._shape(operand) for operand in tree.outputs}
        pixels, channels = self.matrix
        found = super().dense(tree, MatrixSpec((pixels, channels), (channels, 1), d.dtype))
        return self._placed(found, {name: (shape, row_major(shape)) for name, shape in shapes.items()})

    def _shape(self, operand: Input | Output) -> Shape:
        """The extents of an array for an operand of a tree."""
        *pixels, channels = self.shape
        if operand.kind == SCALAR:
            return (1,)
        if operand.kind == ROW:
            return (channels,)
        if operand.kind == COLUMN:
            return tuple(pixels) if isinstance(operand, Output) else (*pixels, 1)
        return (*pixels, -(-channels // 8)) if operand.kind == MASK else self.shape

    def _placed(self, fusion: Fusion, layouts: Mapping[str, tuple[Shape, Shape]]) -> Fusion:
        """The fusion with extents and strides of the arrays in calls, given by name in the order of NHWC."""
        return fusion.placed(
            {
                name: (in_layout(shape, self.layout), in_layout(strides, self.layout))
                for name, (shape, strides) in layouts.items()
            }
        )

    @property
    def _order(self) -> str:
        return " (NHWC order)"


@functools.lru_cache(64)
def operand_names(tree: EpilogueVisitorTree) -> tuple[str, ...]:
    """The operands of a tree, inputs first."""
    return (*(operand.name for operand in tree.inputs), *(operand.name for operand in tree.outputs))


def _element(view: _core.Operand, name: str) -> CutlassDtype | None:
    """An element type, None for bytes."""
    return None if view.dtype == BYTE else operands.dtype_of(view, name)
