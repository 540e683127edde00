"""Random GEMMs, checked with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ... import reference
from ...arrays import fp4, numerics
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import COLUMN, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ...generator.rules import accumulator, epilogue_compute
from ...pipeline.operand_table import Array, Arrays
from ...pipeline.probe import Check, Probe, compare_tree, slices
from ..quantize import reference as quantization
from ..quantize.reference import BLOCK, VECTOR
from . import reference as gemm_reference
from .request import GemmRequest
from .scaled import NO_SCALES


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
    """Without bias, activation and tree."""

    def __init__(self, request: GemmRequest, arrays: Arrays) -> None:
        super().__init__(request, arrays)
        self.amax = self.amax_error = 0.0
        epilogue = request.epilogue
        self.how: dict[str, Any] = {"alpha": epilogue.alpha, "beta": epilogue.beta}

    def limits(self, math: str) -> reference.Tolerance:
        request = self.request
        blocks = BLOCK if request.scaling == "block" else 0
        if request.scaling in fp4.SCALINGS:
            blocks = VECTOR[fp4.SCALINGS[request.scaling]]
        return reference.tolerance(request.operand_dtype, self.rounded, request.shape.k, math, scale_block=blocks)

    @property
    def rounded(self) -> CutlassDtype:
        """The element type that tolerances expect the product to be rounded to."""
        return self.request.result_dtype

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
        return found

    def parts(self) -> Iterator[Arrays]:
        follows = self.follows()
        for part in slices(self.request.shape.batch if self.batched else self.request.shape.m):
            yield {name: array[part] if name in follows else array for name, array in self.arrays.items()}

    def compute(self, part: Arrays) -> None:
        super().compute(part)
        if "amax" in self.arrays:
            self.arrays["amax"][0] = self.amax

    def expected(self, part: Arrays) -> Array:
        scale_d = float(part["scale_d"][0]) if "scale_d" in part else None
        how = self._scaled(part) | {
            "scale_d": scale_d, "out_dtype": self.request.result_dtype, "math": self.request.math
        }  # fmt: skip
        if self.request.scales() == NO_SCALES:
            return gemm_reference.gemm(*self._operands(part), **how)
        expected, amax = gemm_reference.gemm_with_amax(*self._operands(part), **how)
        self.amax = max(self.amax, float(amax.reshape(())))
        return expected

    def magnitudes(self, part: Arrays) -> Array:
        magnitudes = gemm_reference.absolute_product(*self._operands(part), **self._scaled(part))
        factor = self.limits(self.request.math).atol_factor
        self.amax_error = max(self.amax_error, factor * float(np.max(magnitudes, initial=0.0)))
        return magnitudes * float(part["scale_d"][0]) if "scale_d" in part else magnitudes

    def finish(self, check: Check) -> None:
        if "amax" in self.arrays:
            error = abs(float(self.arrays["amax"][0]) - self.amax)
            # Written as float32; NaN is no agreement either.
            allowed = self.amax_error + 2.0**-23 * self.amax
            check.mismatches += int(not error <= allowed)

    def _operands(self, part: Arrays) -> tuple[Array, Array, Array | None]:
        return part["a"], part["b"], part["c"] if self.request.epilogue.beta != 0 else None

    def _scaled(self, part: Arrays) -> dict[str, Any]:
        return self.how | {name: part[name] for name in ("scale_a", "scale_b") if name in part}

    def _accumulator(self, part: Arrays) -> Array:
        """The accumulator, from which an epilogue starts."""
        how = self._scaled(part) | {"out_dtype": CutlassDtype.F64, "math": self.request.math}
        made: Array = gemm_reference.gemm(*self._operands(part), **how)
        return made


class FusedGemmProbe(GemmProbe):
    """With a bias, an activation or a tree, whose evaluation by the reference says how far a kernel may be off."""

    @property
    def of_d(self) -> EpilogueVisitorTree:
        """The tree of D alone, which says nothing of its element type."""
        return EpilogueVisitorTree(self.tree.result)

    @property
    def rounded(self) -> CutlassDtype:
        return epilogue_compute(accumulator(self.request.operand_dtype), tree=True)

    def follows(self) -> set[str]:
        kinds = {MATRIX, MASK} if self.batched else {MATRIX, MASK, COLUMN}
        return super().follows() | {
            *(operand.name for operand in self.tree.inputs if operand.kind in kinds),
            *(output.name for output in self.tree.outputs),
        }

    def parts(self) -> Iterator[Arrays]:
        across = {SCALAR} if self.batched else {SCALAR, ROW}
        reduced = any(output.reduction and output.kind in across for output in self.tree.outputs)
        shape = self.request.shape
        whole = reduced or shape.batch * shape.m * shape.n * shape.k <= _SMALL
        yield from (self.arrays,) if whole else super().parts()

    def compute(self, part: Arrays) -> None:
        acc = self._accumulator(part)
        computed = reference.evaluate(self.tree, acc, self._read(part, self.tree), **self._rounding(part))
        for name, values in computed.items():
            part[name][...] = values
        if "amax" in part:
            values = reference.evaluate(self.of_d, acc, self._read(part, self.of_d), out_dtype=self.rounded)[RESULT]
            np.fmax(self.arrays["amax"], np.max(np.abs(values), initial=0.0), out=self.arrays["amax"])

    def compare(self, part: Arrays, check: Check) -> None:
        tree, limits, acc = self.tree, check.limits, self._accumulator(part)
        error = limits.atol_factor * gemm_reference.absolute_product(*self._operands(part), **self._scaled(part))
        error += limits.rtol * np.abs(acc)
        compare_tree(check, tree, part, acc, error, **self._rounding(part))
        if "amax" in part:
            read = self._read(part, self.of_d)
            values = reference.evaluate(self.of_d, acc, read, out_dtype=self.rounded)[RESULT]
            bound = reference.tolerances(self.of_d, acc, error, read, out_dtype=self.rounded)[RESULT]
            self.amax = max(self.amax, float(np.max(np.abs(values), initial=0.0)))
            self.amax_error = max(self.amax_error, float(np.max(bound, initial=0.0)))

    def _read(self, part: Arrays, tree: EpilogueVisitorTree) -> Arrays:
        return {operand.name: part[operand.name] for operand in tree.inputs}

    def _rounding(self, part: Arrays) -> dict[str, Any]:
        scale_d = float(part["scale_d"][0]) if self.request.quantized else None
        return {"out_dtype": self.request.result_dtype, "scale_d": scale_d}
