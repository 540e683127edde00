"""The NumPy reference backend: what every kernel is tested against, and what runs where there is no GPU.

Values are float64 inside and rounded once at the end, so a result differs from a kernel's by the kernel's own
rounding; `tolerance` says by how much that may be.
"""

from __future__ import annotations

from ..ops.conv2d.reference import (
    ConvGeometry,
    absolute_conv2d,
    absolute_conv2d_dgrad,
    absolute_conv2d_wgrad,
    conv2d,
    conv2d_dgrad,
    conv2d_wgrad,
    conv_geometry,
)
from ..ops.gemm.reference import GemmResult, absolute_product, gemm, gemm_with_amax
from ..ops.grouped_gemm.reference import absolute_grouped_product, group_bounds, grouped_gemm
from .activations import ACTIVATIONS, erf, erfc
from .scales import Scale
from .tolerance import Tolerance, tolerance, within_tolerance
from .tree import evaluate
from .tree_error import mismatches, tolerances

__all__ = [
    "ACTIVATIONS",
    "ConvGeometry",
    "GemmResult",
    "Scale",
    "Tolerance",
    "absolute_conv2d",
    "absolute_conv2d_dgrad",
    "absolute_conv2d_wgrad",
    "absolute_grouped_product",
    "absolute_product",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_wgrad",
    "conv_geometry",
    "erf",
    "erfc",
    "evaluate",
    "gemm",
    "gemm_with_amax",
    "group_bounds",
    "grouped_gemm",
    "mismatches",
    "tolerance",
    "tolerances",
    "within_tolerance",
]
