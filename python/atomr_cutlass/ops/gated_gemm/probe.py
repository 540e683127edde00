"""Random gated GEMMs, checked with the reference."""

from __future__ import annotations

import numpy as np

from ... import reference
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...pipeline.operand_table import Array, Arrays
from ..gemm import reference as gemm_reference
from ..gemm.probe import GemmProbe
from .reference import gate


class GatedGemmProbe(GemmProbe):
    """The tolerance of D follows from that of the product's two columns."""

    def expected(self, part: Arrays) -> Array:
        function = str(self.request.epilogue.activation)
        made: Array = gate(self._accumulator(part), function, self._scale_d(part), self.request.result_dtype)
        return made

    def magnitudes(self, part: Arrays) -> Array:
        acc, factor = self._accumulator(part), self.limits(self.request.math).atol_factor
        error = factor * gemm_reference.absolute_product(*self._operands(part), **self._scaled(part))
        (columns, other), (of_columns, of_other) = ((array[..., 0::2], array[..., 1::2]) for array in (acc, error))
        value = reference.evaluate(self.tree, columns, {}, out_dtype=CutlassDtype.F64)[RESULT]
        # Kernels compute f in its narrow form where D has at most 16 bits. Of those types bf16 has float32's range.
        form = CutlassDtype.BF16 if self.request.result_dtype.bits <= 16 else CutlassDtype.F32
        of_value = reference.tolerances(self.tree, columns, of_columns, {}, out_dtype=form)[RESULT]
        bound = of_value * (np.abs(other) + of_other) + np.abs(value) * of_other
        return bound * abs(self._scale_d(part)) / factor

    def _scale_d(self, part: Arrays) -> float:
        return float(part["scale_d"][0]) if "scale_d" in part else 1.0
