"""The arrays of an epilogue tree as a request has them."""

from __future__ import annotations

import math
from collections.abc import Collection

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ..ops.conv2d.fusion import image_shape, matrix_shape, with_slots
from ..pipeline.problem import MatrixSpec
from .bound import Fusion, TreeArray, output_shape


def dense(tree: EpilogueVisitorTree, d: MatrixSpec) -> Fusion:
    """A tree with dense arrays over a result.

    Args:
        tree: the tree.
        d: the result, dense too. Matrices lie as it does. Masks lie row by row, batches outermost; rows (N,), columns
            (M, 1) and scalars (1,) are the same for all batches. Reductions are row-major.
    """
    *batches, m, n = d.shape
    inner = {SCALAR: (1,), ROW: (n,), COLUMN: (m, 1), MATRIX: d.shape, MASK: (*batches, m, -(-n // 8))}

    def array(one: Input | Output, shape: tuple[int, ...], reduction: str = "") -> TreeArray:
        strides = d.strides if one.kind == MATRIX else _row_major(shape)
        return TreeArray(one.name, one.kind, shape, strides, one.dtype or CutlassDtype.I8, reduction)

    return Fusion(
        tree,
        tuple(array(one, inner[one.kind]) for one in tree.inputs),
        tuple(array(one, output_shape(one, d.shape), one.reduction) for one in tree.outputs),
    )


def over_pixels(tree: EpilogueVisitorTree, d: MatrixSpec, layout: str) -> Fusion:
    """A tree with dense arrays over the result of a convolution.

    Args:
        tree: the tree.
        d: the result, dense, in the order of NHWC. Matrices and masks lie as it does, rows are (K,), columns (N, P, Q,
            1), and what is reduced for each pixel (N, P, Q).
        layout: the order in which calls name dimensions.
    """
    pixels, channels = matrix_shape(d.shape)
    shapes = {one.name: image_shape(one, d.shape) for one in tree.inputs}
    shapes |= {one.name: image_shape(one, d.shape) for one in tree.outputs}
    slots = {name: (shape, _row_major(shape)) for name, shape in shapes.items()}
    return with_slots(dense(tree, MatrixSpec((pixels, channels), (channels, 1), d.dtype)), slots, layout)


def check_tree(tree: EpilogueVisitorTree, result: CutlassDtype, product: Collection[str]) -> None:
    """Refuses a tree that does not go with a request.

    Args:
        tree: the tree.
        result: element type of D.
        product: the names of the product's operands.

    Raises:
        InvalidOperandError: it decides another element type, or has an operand of such a name.
    """
    if tree.result_dtype not in (None, result):
        raise InvalidOperandError(f"the epilogue casts D to {tree.result_dtype.value}; out_dtype says {result.value}")
    for name in [one.name for one in tree.inputs] + [one.name for one in tree.outputs]:
        if name in product:
            raise InvalidOperandError(
                f"the epilogue has an operand {name!r}, which is the name of one of the product's: rename it"
            )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
