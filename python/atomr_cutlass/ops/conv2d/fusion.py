"""Epilogue trees on top of a convolution: to them its result is a matrix of pixels by channels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ... import _core
from ...epilogue.bound import Fusion, TreeArray, fusion_of, source_of
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import COLUMN, MASK, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ...pipeline.problem import MatrixSpec
from .problem import ConvProblem, collapses, pixel_strides

Shape = tuple[int, ...]

TO_NHWC = (0, 2, 3, 1)
TO_NCHW = (0, 3, 1, 2)


def matrix_shape(image: Shape) -> tuple[int, int]:
    """(pixels, channels) of a result of shape (N, P, Q, K)."""
    return math.prod(image[:-1]), image[-1]


def as_matrix(name: str, shape: Shape, strides: Shape, image: Shape) -> tuple[Shape, Shape]:
    """Extents and strides of an operand over a result, as the tree sees it.

    Args:
        name: for messages.
        shape: of the array. Those with 4 dimensions, in the order of NHWC, have all of the result's pixels or one for
            all; those with 3, (N, P, Q), are sums and maxima of channels. Others, such as (K,), remain as they are.
        strides: of the array.
        image: (N, P, Q, K) of the result.

    Raises:
        InvalidOperandError: other pixels.
        UnsupportedError: the pixels are not evenly spaced in memory.
    """
    if shape == image[:-1]:
        shape, strides, last = (*shape, 1), (*strides, 1), False
    elif len(shape) == len(image):
        last = True
    else:
        return shape, strides
    pixels = math.prod(shape[:-1])
    if pixels != 1 and shape[:-1] != image[:-1]:
        raise InvalidOperandError(
            f"{name} has shape {shape} and the result {image} (NHWC order): an operand has the result's pixels, or is "
            f"the same for all of them, ({image[-1]},)"
        )
    spec = MatrixSpec(shape, strides, CutlassDtype.I8)
    if not collapses(spec):
        raise UnsupportedError(
            f"{name} has strides {strides} (NHWC order): its pixels are not evenly spaced, as kernels read them; copy "
            f"it, in PyTorch {name} = {name}.contiguous(memory_format=torch.channels_last)"
        )
    step = pixel_strides(spec)[0]
    return ((pixels, shape[-1]), (step, strides[-1])) if last else ((pixels,), (step,))


def image_shape(one: Input | Output, image: Shape) -> Shape:
    """The extents of an array for an operand of a tree over a result of shape (N, P, Q, K), in the order of NHWC."""
    *pixels, channels = image
    if one.kind == SCALAR:
        return (1,)
    if one.kind == ROW:
        return (channels,)
    if one.kind == COLUMN:
        return tuple(pixels) if isinstance(one, Output) else (*pixels, 1)
    return (*pixels, -(-channels // 8)) if one.kind == MASK else image


def fusion(tree: EpilogueVisitorTree, views: Mapping[str, _core.Operand], image: Shape, layout: str) -> Fusion:
    """A tree with the arrays of a launch.

    Args:
        tree: the tree.
        views: of all its inputs and outputs, by name, in the order of NHWC.
        image: (N, P, Q, K) of the result.
        layout: the order in which calls of the plan name dimensions.
    """
    found = fusion_of(tree, {name: flat(name, view, image) for name, view in views.items()})
    return with_slots(found, {name: (view.shape, view.strides) for name, view in views.items()}, layout)


def with_slots(found: Fusion, lies: Mapping[str, tuple[Shape, Shape]], layout: str) -> Fusion:
    """A fusion whose arrays lie so in calls of a plan: (extents, strides) by name, in the order of NHWC."""

    def own(one: TreeArray) -> TreeArray:
        shape, strides = lies[one.name]
        return dataclasses.replace(one, slot=(in_layout(shape, layout), in_layout(strides, layout)))

    return Fusion(found.tree, tuple(map(own, found.inputs)), tuple(map(own, found.outputs)))


def ways(what: ConvProblem) -> list[ConvProblem]:
    """The problem with its tree, in the ways in which a kernel may be asked for it, better ones first."""
    if what.fusion is None or what.c is not None or not collapses(what.d):
        return [what]
    # Kernels have one set of strides for C and D.
    strides = (pixel_strides(what.d)[0], 1)
    number = source_of(what.fusion, lambda one: one.spec.strides == strides and one.dtype is what.d.dtype)
    if number is None:
        return [what]
    c = dataclasses.replace(what.d, alignment=what.fusion.inputs[number].alignment)
    return [dataclasses.replace(what, source=number, c=c), what]


def flat(name: str, view: _core.Operand, image: Shape) -> _core.Operand:
    """The view of an operand as the tree sees it; see `as_matrix`."""
    shape, strides = as_matrix(name, view.shape, view.strides, image)
    return view if shape == view.shape else _relaid(view, shape, strides)


def in_nhwc(view: _core.Operand, layout: str) -> _core.Operand:
    """The view with its dimensions in the order of NHWC."""
    return view if layout == "nhwc" else _permuted(view, TO_NHWC)


def named(result: Any, layout: str) -> Any:
    """A result in NHWC order as the layout names its dimensions; the memory stays as it is."""
    if layout == "nhwc" or len(result.shape) != len(TO_NCHW):
        return result
    if isinstance(result, _core.Operand):
        return _permuted(result, TO_NCHW)
    permute = getattr(result, "permute", None) or result.transpose
    return permute(TO_NCHW)


def _permuted(view: _core.Operand, order: Shape) -> _core.Operand:
    if len(view.shape) != len(order):
        return view
    return _relaid(view, [view.shape[i] for i in order], [view.strides[i] for i in order])


def _relaid(view: _core.Operand, shape: Any, strides: Any) -> _core.Operand:
    return _core.Operand(
        view.pointer, list(shape), list(strides), view.dtype, view.device_type, view.device, view.read_only, view
    )


def in_layout(values: Shape, layout: str) -> Shape:
    """Extents or strides in the order of NHWC, in that of `layout`."""
    return tuple(values[i] for i in TO_NCHW) if layout == "nchw" and len(values) == len(TO_NCHW) else tuple(values)
