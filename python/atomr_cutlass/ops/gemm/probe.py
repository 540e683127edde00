"""Random GEMMs, checked with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import fp4, numerics
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import COLUMN, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ...pipeline.operation import Array, Arrays
from ...pipeline.probe import Check, Probe, slices
from ..quantize import reference as quantization
from ..quantize.reference import BLOCK, VECTOR
from . import reference as gemm_reference
from .operation import GemmRequest


def random_fp4(generator: np.random.Generator, request: GemmRequest) -> Arrays:
    """A, B and their scales in plain forms, as the reference takes them: normally distributed values, quantized."""
    shape = request.shape
    batch = () if shape.batch == 1 else (shape.batch,)
    arrays: Arrays = {}
    for name, extents in (("a", (shape.m, shape.k)), ("b", (shape.k, shape.n))):
        wide = generator.standard_normal((*batch, *extents))
        if request.scaling is None:
            arrays[name] = numerics.saturating_cast(wide, fp4.FP4)
            continue
        quantize = quantization.quantize_nvfp4 if request.scaling == "nvfp4" else quantization.quantize_mxfp4
        made = quantize(wide, axis=fp4.ALONG[name])
        arrays |= {name: made.values, f"scale_{name}": made.scale}
    return arrays


_SMALL = 2**25
"""Products of a GEMM with a tree that is compared as a whole, so that differences are told by their places in it."""


class GemmProbe(Probe[GemmRequest]):
    """A product, and what follows it."""

    def __init__(self, request: GemmRequest, arrays: Arrays) -> None:
        super().__init__(request, arrays)
        self.amax = self.amax_error = 0.0

    @property
    def depth(self) -> int:
        return self.request.shape.k

    @property
    def scale_block(self) -> int:
        kind = fp4.SCALINGS.get(self.request.scaling or "")
        return VECTOR[kind] if kind is not None else BLOCK if self.request.scaling == "block" else 0

    @property
    def has_amax(self) -> bool:
        """Whether `amax` is the request's; a tree may have an output of that name."""
        return self.request.quantized and "amax" in self.arrays

    @property
    def batched(self) -> bool:
        """Whether parts are batches; else they are rows of D."""
        return self.arrays["a"].ndim == 3

    def follows(self) -> set[str]:
        """The arrays that parts are parts of; the others they share."""
        found = {"a", "out"} | ({"b"} if self.batched else set())
        found |= {"c"} if self.request.epilogue.beta != 0 else set()
        if self.request.scaling in (fp4.SCALINGS if self.batched else ("vector", "block", *fp4.SCALINGS)):
            found |= {"scale_a", "scale_b"} if self.batched else {"scale_a"}
        if self.tree is not None:
            kinds = {MATRIX, MASK} if self.batched else {MATRIX, MASK, COLUMN}
            found |= {operand.name for operand in self.tree.inputs if operand.kind in kinds}
            found |= {output.name for output in self.tree.outputs}
        return found

    def parts(self) -> Iterator[Arrays]:
        shape = self.request.shape
        if self.tree is not None:
            across = {SCALAR} if self.batched else {SCALAR, ROW}
            reduced = any(output.reduction and output.kind in across for output in self.tree.outputs)
            if reduced or shape.batch * shape.m * shape.n * shape.k <= _SMALL:
                yield self.arrays
                return
        follows = self.follows()
        for part in slices(shape.batch if self.batched else shape.m):
            yield {name: array[part] if name in follows else array for name, array in self.arrays.items()}

    def compute(self, part: Arrays) -> None:
        super().compute(part)
        if self.has_amax:
            if self.tree is not None:
                self._see_amax(self.tree, part, self.product(part, CutlassDtype.F64))
            self.arrays["amax"][0] = self.amax

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        how = self._scaled(part) | {"out_dtype": dtype, "math": self.request.math}
        return gemm_reference.gemm(*self._operands(part), **how)

    def expected(self, part: Arrays) -> Array:
        if not self.request.quantized:
            return super().expected(part)
        how = self._scaled(part) | self.rounding(part) | {"math": self.request.math}
        amax = np.zeros(1, np.float32)
        expected = gemm_reference.gemm(*self._operands(part), **how, amax=amax)
        self.amax = max(self.amax, float(amax[0]))
        return expected

    def magnitudes(self, part: Arrays) -> Array:
        magnitudes = gemm_reference.absolute_product(*self._operands(part), **self._scaled(part))
        if self.tree is not None:
            return magnitudes
        factor = self.limits(self.request.math).atol_factor
        self.amax_error = max(self.amax_error, factor * float(np.max(magnitudes, initial=0.0)))
        return magnitudes * self.scale_d(part)

    def compare(self, part: Arrays, check: Check) -> None:
        super().compare(part, check)
        if self.tree is not None and self.has_amax:
            self._see_amax(self.tree, part, *self.accumulator(part, check.limits))

    def finish(self, check: Check) -> None:
        if self.has_amax:
            error = abs(float(self.arrays["amax"][0]) - self.amax)
            # Written as float32; NaN is no agreement either.
            allowed = self.amax_error + 2.0**-23 * self.amax
            check.mismatches += int(not error <= allowed)

    def scale_d(self, part: Arrays) -> float:
        """The factor of D; 1 where there is none."""
        return float(part["scale_d"][0]) if "scale_d" in part else 1.0

    def rounding(self, part: Arrays) -> dict[str, Any]:
        scale_d = self.scale_d(part) if self.request.quantized else None
        return super().rounding(part) | {"scale_d": scale_d}

    def _operands(self, part: Arrays) -> tuple[Array, Array, Array | None]:
        return part["a"], part["b"], part["c"] if self.request.epilogue.beta != 0 else None

    def _scaled(self, part: Arrays) -> dict[str, Any]:
        return self.how | {name: part[name] for name in ("scale_a", "scale_b") if self.request.scaling is not None}

    def _see_amax(self, tree: EpilogueVisitorTree, part: Arrays, acc: Array, error: Array | None = None) -> None:
        """Takes note of the largest magnitude of D before it is stored and, of the accumulator's error, its own."""
        of_d = EpilogueVisitorTree(tree.result)
        read = {operand.name: part[operand.name] for operand in of_d.inputs}
        values = reference.evaluate(of_d, acc, read, out_dtype=self.computed)[RESULT]
        self.amax = max(self.amax, float(np.max(np.abs(values), initial=0.0)))
        if error is not None:
            bound = reference.tolerances(of_d, acc, error, read, out_dtype=self.computed)[RESULT]
            self.amax_error = max(self.amax_error, float(np.max(bound, initial=0.0)))
