"""Calls of convolutions with an epilogue: its arrays, which name dimensions as the call's layout does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ... import _core, reference
from ...arrays import operands
from ...arrays.arguments import refuse_jax_out
from ...arrays.numerics import AnyArray, FloatArray
from ...checks import NUMBERS
from ...epilogue import arguments as fused_arguments
from ...epilogue.arguments import Asked
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import ROW, SCALAR, Output
from .fusion import Shape, flat, image_shape, in_nhwc, matrix_shape


@dataclass(frozen=True, kw_only=True)
class OverPixels(Asked):
    """An epilogue over the pixels and channels of a result, and what it is given; to the tree that is a matrix.

    Attributes:
        views: of inputs and of the arrays for outputs, by name, in the order of NHWC.
        image: (N, P, Q, K) of the result.
    """

    views: dict[str, _core.Operand]
    image: Shape

    @property
    def names(self) -> list[str]:
        """The tree's operands, inputs first."""
        return [one.name for one in self.tree.inputs] + [one.name for one in self.tree.outputs]

    @property
    def missing(self) -> list[Output]:
        """The outputs without an array."""
        return [output for output in self.tree.outputs if output.name not in self.views]

    def evaluated(
        self, acc: FloatArray, fetch: Callable[[_core.Operand], AnyArray], *, out_dtype: CutlassDtype
    ) -> dict[str, AnyArray]:
        """What the tree writes, by the reference, in the order of NHWC.

        Args:
            acc: the convolution, (N, P, Q, K).
            fetch: makes a host array of a view.
            out_dtype: of the result.
        """
        inputs = {name: fetch(view) for name, view in self.inputs.items()}
        computed = reference.evaluate(self.tree, acc.reshape(matrix_shape(self.image)), inputs, out_dtype=out_dtype)
        shapes = {output.name: image_shape(output, self.image) for output in self.tree.outputs}
        return {name: result.reshape(shapes.get(name, self.image)) for name, result in computed.items()}


def asked(
    epilogue: Any, given: Mapping[str, Any], image: Shape, layout: str, *, out_dtype: CutlassDtype, acc: CutlassDtype
) -> OverPixels:
    """The tree of an epilogue over arrays.

    Args:
        epilogue: a tree, or a function.
        given: arrays by name, and of a function also numbers.
        image: (N, P, Q, K) of the result.
        layout: in which the arrays name their dimensions.
        out_dtype: of the result, unless the epilogue decides it.
        acc: type of the accumulator.

    Raises:
        InvalidOperandError: an operand is missing, unknown, or of a wrong shape or dtype.
        UnsupportedError: the function cannot be traced, or an array's pixels are not evenly spaced.
    """
    numbers = {name: one for name, one in given.items() if isinstance(one, NUMBERS)}
    arrays = {name: one for name, one in given.items() if name not in numbers}
    views = {name: in_nhwc(operands.as_operand(one, name), layout) for name, one in arrays.items()}
    matrices = {name: flat(name, view, image) for name, view in views.items()}
    made = fused_arguments.asked(epilogue, {**matrices, **numbers}, matrix_shape(image), out_dtype=out_dtype, acc=acc)
    for one in made.tree.inputs:
        shape = views[one.name].shape
        if len(shape) != len(image) and (one.kind not in (ROW, SCALAR) or math.prod(shape) not in (1, image[-1])):
            raise InvalidOperandError(
                f"{one.name} has shape {shape}; the epilogue reads a {one.kind}: {image_shape(one, image)} (NHWC order)"
            )
        if len(shape) == len(image) - 1:
            raise InvalidOperandError(
                f"{one.name} has shape {shape}; one element for each pixel is {(*image[:-1], 1)}, and for each channel "
                f"{image[-1:]} (NHWC order)"
            )
    for output in made.tree.outputs:
        refuse_jax_out(arrays.get(output.name), output.name)
        if output.name in views and views[output.name].shape != image_shape(output, image):
            raise InvalidOperandError(
                f"{output.name} has shape {views[output.name].shape}; the epilogue writes {image_shape(output, image)} "
                "(NHWC order)"
            )
    return OverPixels(
        traced=made.traced,
        inputs=made.inputs,
        outputs=made.outputs,
        given={name: arrays[name] for name in made.given},
        views={name: views[name] for name in (*made.inputs, *made.outputs)},
        image=image,
    )


def empty(output: Output, image: Shape, device: int, like: Any) -> tuple[Any, _core.Operand]:
    """Memory for an output of a tree over a result of shape (N, P, Q, K), in the order of NHWC, as `operands.empty`."""
    element = operands.BYTE if output.dtype is None else output.dtype.dlpack
    return operands.empty_of(image_shape(output, image), element, device, like)
