"""Gated GEMM of a product in float64."""

from __future__ import annotations

import numpy as np

from ...arrays.numerics import AnyArray, saturating_cast
from ...generator.dtypes import CutlassDtype
from ...reference.parts import ACTIVATIONS


def gate(product: AnyArray, activation: str, scale_d: float, dtype: CutlassDtype) -> AnyArray:
    """D[..., j] = saturating_cast(scale_d * f(P[..., 2 j]) * P[..., 2 j + 1]).

    Args:
        product: P, (..., M, 2 F), in float64.
        activation: f, a name of ACTIVATIONS.
        scale_d: factor of D.
        dtype: element type of D.

    Returns:
        D, (..., M, F).
    """
    with np.errstate(all="ignore"):
        return saturating_cast(ACTIVATIONS[activation](product[..., 0::2]) * product[..., 1::2] * scale_d, dtype)
