"""Random convolutions, checked with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ... import reference
from ...epilogue.results import ImageResult
from ...generator.dtypes import CutlassDtype
from ...pipeline.operand_table import Array, Arrays
from ...pipeline.probe import Check, Probe, compare_tree, slices
from ...pipeline.problem import row_major
from .geometry import DGRAD, FPROP, OPERANDS
from .reference import absolute_convolution, convolution
from .request import ConvLayout, ConvRequest


class ConvProbe(Probe[ConvRequest]):
    """With nothing after the convolution but the sum with C."""

    def __init__(self, request: ConvRequest, arrays: Arrays) -> None:
        super().__init__(request, arrays)
        g, epilogue = request.shape.geometry, request.epilogue
        self.how: dict[str, Any] = {
            "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups,
            "alpha": epilogue.alpha, "beta": epilogue.beta,
        }  # fmt: skip
        if self.request.layout is ConvLayout.NCHW:
            nhwc = (0, 2, 3, 1)
            self.arrays = {name: a.transpose(nhwc) if a.ndim == 4 else a for name, a in self.arrays.items()}

    def limits(self, math: str) -> reference.Tolerance:
        g, request = self.request.shape.geometry, self.request
        taps = g.r * g.s
        depth = {FPROP: taps * g.c // g.groups, DGRAD: taps * g.k // g.groups}.get(request.op, g.n * g.p * g.q)
        return reference.tolerance(request.dtype.storage, self.rounded, depth, math)

    @property
    def rounded(self) -> CutlassDtype:
        """The element type that tolerances expect the convolution to be rounded to."""
        return self.request.result_dtype

    def parts(self) -> Iterator[Arrays]:
        g = self.request.shape.geometry
        if self.request.op in (FPROP, DGRAD):
            first = "x" if self.request.op == FPROP else "dy"
            for part in slices(g.n):
                yield {name: a[part] if name in (first, "c", "out") else a for name, a in self.arrays.items()}
            return
        for part in slices(g.k) if g.groups == 1 else (slice(None),):
            sliced = {name: a[part] if name in ("c", "out") else a for name, a in self.arrays.items()}
            yield sliced | {"dy": self.arrays["dy"][..., part]}

    def expected(self, part: Arrays) -> Array:
        return self._called(convolution, part, out_dtype=self.request.result_dtype, math=self.request.math)

    def magnitudes(self, part: Arrays) -> Array:
        return self._called(absolute_convolution, part)

    def _called(self, function: Callable[..., Array], part: Arrays, **how: Any) -> Array:
        """Calls a function of the reference for the request's operation."""
        a, b = (part[name] for name in OPERANDS[self.request.op])
        return function(self.request.op, a, b, part["out"].shape, part.get("c"), **how, **self.how)


class FusedConvProbe(ConvProbe):
    """With a tree over the pixels and channels of the result, whose evaluation by the reference rounds it."""

    @property
    def rounded(self) -> CutlassDtype:
        return CutlassDtype.F32

    def parts(self) -> Iterator[Arrays]:
        yield self.arrays

    def compute(self, part: Arrays) -> None:
        acc, matrices = self._accumulated(part, convolution), self._matrices(part)
        read = {operand.name: matrices[operand.name] for operand in self.tree.inputs}
        for name, values in reference.evaluate(self.tree, acc, read, out_dtype=self.request.result_dtype).items():
            part[name][...] = values.reshape(part[name].shape)

    def compare(self, part: Arrays, check: Check) -> None:
        acc, absolute = (self._accumulated(part, function) for function in (convolution, absolute_convolution))
        error = check.limits.atol_factor * absolute + check.limits.rtol * np.abs(acc)
        compare_tree(check, self.tree, self._matrices(part), acc, error, out_dtype=self.request.result_dtype)

    def _accumulated(self, part: Arrays, function: Callable[..., Array]) -> Array:
        """A convolution without its epilogue, as a matrix."""
        how = {"out_dtype": CutlassDtype.F64, "math": self.request.math} if function is convolution else {}
        names = (*OPERANDS[self.request.op], "out", *(["c"] if self.request.epilogue.beta != 0 else []))
        own = {name: part[name] for name in names}
        made = self._called(function, own, **how)
        return made.reshape(ImageResult(made.shape).matrix)

    def _matrices(self, part: Arrays) -> Arrays:
        image = ImageResult(part["out"].shape)
        found = {}
        for name in (*(leaf.name for leaf in self.tree.inputs), *(leaf.name for leaf in self.tree.outputs), "out"):
            array = part[name]
            found[name] = array.reshape(image.as_matrix(name, array.shape, row_major(array.shape))[0])
        return found
