"""The reference of gated GEMM, applied to a product in float64, and its probe."""

from __future__ import annotations

import numpy as np

from ... import reference
from ...arrays.numerics import AnyArray, saturating_cast
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import bias_and_activation
from ...generator.epilogue.tree import RESULT
from ...pipeline.operation import Array, Arrays
from ...reference.parts import ACTIVATIONS
from ..gemm.reference import GemmProbe, absolute_product


def gate(product: AnyArray, activation: str, scale_d: float, dtype: CutlassDtype) -> AnyArray:
    """D[..., j] = saturating_cast(scale_d * f(P[..., 2 j]) * P[..., 2 j + 1]), of a product P in float64."""
    with np.errstate(all="ignore"):
        return saturating_cast(ACTIVATIONS[activation](product[..., 0::2]) * product[..., 1::2] * scale_d, dtype)


class GatedGemmProbe(GemmProbe):
    """The probe of a gated GEMM: D's tolerance follows from that of the product's two columns."""

    tree = None  # the request's tree applies to one of these columns

    def expected(self, part: Arrays) -> Array:
        acc, function = self.product(part, CutlassDtype.F64), str(self.request.epilogue.activation)
        return gate(acc, function, self.scale_d(part), self.request.result_dtype)

    def magnitudes(self, part: Arrays) -> Array:
        acc, factor = self.product(part, CutlassDtype.F64), self.limits(self.request.math).atol_factor
        error = factor * absolute_product(*self._operands(part), **self._scaled(part))
        (columns, other), (of_columns, of_other) = ((array[..., 0::2], array[..., 1::2]) for array in (acc, error))
        tree = bias_and_activation(None, self.request.epilogue.activation)
        value = reference.evaluate(tree, columns, {}, out_dtype=CutlassDtype.F64)[RESULT]
        # Kernels approximate f for 16-bit types where D has at most 16 bits; of these, bf16 has float32's range.
        form = CutlassDtype.BF16 if self.request.result_dtype.bits <= 16 else CutlassDtype.F32
        of_value = reference.tolerances(tree, columns, of_columns, {}, out_dtype=form)[RESULT]
        bound = of_value * (np.abs(other) + of_other) + np.abs(value) * of_other
        return bound * abs(self.scale_d(part)) / factor
