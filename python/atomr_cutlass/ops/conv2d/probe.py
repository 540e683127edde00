"""Random convolutions, checked with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...epilogue.results import ImageResult
from ...generator.dtypes import CutlassDtype
from ...pipeline.operation import Array, Arrays
from ...pipeline.probe import Probe, slices
from ...pipeline.problem import row_major
from .geometry import DGRAD, FPROP, OPERANDS
from .reference import absolute_convolution, convolution
from .request import ConvLayout, ConvRequest


class ConvProbe(Probe[ConvRequest]):
    """A tree follows over the pixels and channels of the result, as a matrix."""

    def __init__(self, request: ConvRequest, arrays: Arrays) -> None:
        super().__init__(request, arrays)
        g = request.shape.geometry
        self.how |= {"stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups}
        if self.request.layout is ConvLayout.NCHW:
            nhwc = (0, 2, 3, 1)
            self.arrays = {name: a.transpose(nhwc) if a.ndim == 4 else a for name, a in self.arrays.items()}

    @property
    def depth(self) -> int:
        g = self.request.shape.geometry
        taps = g.r * g.s
        return {FPROP: taps * g.c // g.groups, DGRAD: taps * g.k // g.groups}.get(self.request.op, g.n * g.p * g.q)

    def parts(self) -> Iterator[Arrays]:
        g = self.request.shape.geometry
        if self.tree is not None:
            yield self.arrays
        elif self.request.op in (FPROP, DGRAD):
            first = "x" if self.request.op == FPROP else "dy"
            for part in slices(g.n):
                yield {name: a[part] if name in (first, "c", "out") else a for name, a in self.arrays.items()}
        else:
            for part in slices(g.k) if g.groups == 1 else (slice(None),):
                sliced = {name: a[part] if name in ("c", "out") else a for name, a in self.arrays.items()}
                yield sliced | {"dy": self.arrays["dy"][..., part]}

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        return self._called(convolution, part, out_dtype=dtype, math=self.request.math)

    def magnitudes(self, part: Arrays) -> Array:
        return self._called(absolute_convolution, part)

    def _called(self, function: Callable[..., Array], part: Arrays, **how: Any) -> Array:
        """Calls a function of the reference for the request's operation; with a tree, for a matrix."""
        a, b = (part[name] for name in OPERANDS[self.request.op])
        c = part["c"] if self.request.epilogue.beta != 0 else None  # else it may be an operand of the tree
        made = function(self.request.op, a, b, part["out"].shape, c, **how, **self.how)
        return made if self.tree is None else made.reshape(ImageResult(made.shape).matrix)

    def matrices(self, part: Arrays) -> Arrays:
        image, tree = ImageResult(part["out"].shape), self.tree
        names = {"out"}
        if tree is not None:
            names |= {operand.name for operand in tree.inputs} | {output.name for output in tree.outputs}
        arrays = {name: part[name] for name in names}
        shapes = {name: image.as_matrix(name, one.shape, row_major(one.shape))[0] for name, one in arrays.items()}
        return {name: one.reshape(shapes[name]) for name, one in arrays.items()}
