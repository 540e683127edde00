"""The NumPy reference backend: what every kernel is tested against, and what runs where there is no GPU.

Values are float64 inside and rounded once at the end, so a result differs from a kernel's by the kernel's own
rounding; `tolerance` says by how much that may be.
"""

from __future__ import annotations

from .activations import ACTIVATIONS, erf, erfc
from .gemm import GemmResult, absolute_product, gemm, gemm_with_amax
from .scales import Scale
from .tolerance import Tolerance, tolerance, within_tolerance

__all__ = [
    "ACTIVATIONS",
    "GemmResult",
    "Scale",
    "Tolerance",
    "absolute_product",
    "erf",
    "erfc",
    "gemm",
    "gemm_with_amax",
    "tolerance",
    "within_tolerance",
]
