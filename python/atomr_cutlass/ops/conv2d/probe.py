"""Random convolutions, checked with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...epilogue.results import ImageResult
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...pipeline.operand_table import Array, Arrays
from ...pipeline.probe import Check, Probe, compare_tree, slices
from ...pipeline.problem import row_major
from . import reference as conv_reference
from .geometry import DGRAD, FPROP, OPERANDS
from .request import ConvLayout, ConvRequest

_CONVOLUTIONS = (conv_reference.conv2d, conv_reference.conv2d_dgrad, conv_reference.conv2d_wgrad)
_MAGNITUDES = (
    conv_reference.absolute_conv2d,
    conv_reference.absolute_conv2d_dgrad,
    conv_reference.absolute_conv2d_wgrad,
)


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
        return reference.tolerance(request.dtype.storage, request.result_dtype, depth, math)

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
        return self._called(_CONVOLUTIONS, part, out_dtype=self.request.result_dtype, math=self.request.math)

    def magnitudes(self, part: Arrays) -> Array:
        return self._called(_MAGNITUDES, part)

    def _called(self, functions: tuple[Any, Any, Any], part: Arrays, **how: Any) -> Array:
        """One of three functions that take the same: for fprop, dgrad and wgrad."""
        of_fprop, of_dgrad, of_wgrad = functions
        how |= self.how
        if self.request.op == FPROP:
            done = of_fprop(part["x"], part["w"], part.get("c"), **how)
        elif self.request.op == DGRAD:
            done = of_dgrad(part["dy"], part["w"], part["out"].shape, part.get("c"), **how)
        else:
            done = of_wgrad(part["dy"], part["x"], part["out"].shape, part.get("c"), **how)
        made: Array = done
        return made


class FusedConvProbe(ConvProbe):
    """With a tree over the pixels and channels of the result."""

    @property
    def tree(self) -> EpilogueVisitorTree:
        """The epilogue tree."""
        tree = self.request.tree
        assert tree is not None  # noqa: S101 - a request without one has the other probe
        return tree

    def parts(self) -> Iterator[Arrays]:
        yield self.arrays

    def compute(self, part: Arrays) -> None:
        acc, matrices = self._accumulated(part, _CONVOLUTIONS), self._matrices(part)
        read = {operand.name: matrices[operand.name] for operand in self.tree.inputs}
        for name, values in reference.evaluate(self.tree, acc, read, out_dtype=self.request.result_dtype).items():
            part[name][...] = values.reshape(part[name].shape)

    def compare(self, part: Arrays, check: Check) -> None:
        acc, absolute = (self._accumulated(part, functions) for functions in (_CONVOLUTIONS, _MAGNITUDES))
        error = check.limits.atol_factor * absolute + check.limits.rtol * np.abs(acc)
        compare_tree(check, self.tree, self._matrices(part), acc, error, out_dtype=self.request.result_dtype)

    def _accumulated(self, part: Arrays, functions: Any) -> Array:
        """A convolution without its epilogue, as a matrix."""
        how = {"out_dtype": CutlassDtype.F64, "math": self.request.math} if functions is _CONVOLUTIONS else {}
        names = (*OPERANDS[self.request.op], "out", *(["c"] if self.request.epilogue.beta != 0 else []))
        own = {name: part[name] for name in names}
        made = self._called(functions, own, **how)
        return made.reshape(ImageResult(made.shape).matrix)

    def _matrices(self, part: Arrays) -> Arrays:
        image = ImageResult(part["out"].shape)
        found = {}
        for name in (*(leaf.name for leaf in self.tree.inputs), *(leaf.name for leaf in self.tree.outputs), "out"):
            array = part[name]
            found[name] = array.reshape(image.as_matrix(name, array.shape, row_major(array.shape))[0])
        return found
