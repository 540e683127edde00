"""Random gated GEMMs, checked with the reference."""

from __future__ import annotations

import numpy as np

from ... import reference
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import bias_and_activation
from ...generator.epilogue.tree import RESULT
from ...pipeline.operation import Array, Arrays
from ..gemm import reference as gemm_reference
from ..gemm.probe import GemmProbe
from .reference import gate


class GatedGemmProbe(GemmProbe):
    """The tolerance of D follows from that of the product's two columns."""

    tree = None  # that of the request is of one of these columns

    def expected(self, part: Arrays) -> Array:
        acc, function = self.product(part, CutlassDtype.F64), str(self.request.epilogue.activation)
        made: Array = gate(acc, function, self.scale_d(part), self.request.result_dtype)
        return made

    def magnitudes(self, part: Arrays) -> Array:
        acc, factor = self.product(part, CutlassDtype.F64), self.limits(self.request.math).atol_factor
        error = factor * gemm_reference.absolute_product(*self._operands(part), **self._scaled(part))
        (columns, other), (of_columns, of_other) = ((array[..., 0::2], array[..., 1::2]) for array in (acc, error))
        tree = bias_and_activation(None, self.request.epilogue.activation)
        value = reference.evaluate(tree, columns, {}, out_dtype=CutlassDtype.F64)[RESULT]
        # Kernels compute f in its narrow form where D has at most 16 bits. Of those types bf16 has float32's range.
        form = CutlassDtype.BF16 if self.request.result_dtype.bits <= 16 else CutlassDtype.F32
        of_value = reference.tolerances(tree, columns, of_columns, {}, out_dtype=form)[RESULT]
        bound = of_value * (np.abs(other) + of_other) + np.abs(value) * of_other
        return bound * abs(self.scale_d(part)) / factor
