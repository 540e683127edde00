"""Common parts of the operations' NumPy references: activations, scales, epilogue trees and tolerances.

Each operation has a reference, `ops.<operation>.reference`, against which its kernels are tested, and which serves
calls without a GPU. It computes in float64 and rounds once at the end, so a result differs from a kernel's by the
kernel's own rounding; `tolerance` bounds the difference.
"""

from __future__ import annotations

from .parts import ACTIVATIONS, Scale, Tolerance, erf, erfc, tolerance, within_tolerance
from .tree import evaluate
from .tree_error import mismatches, tolerances

__all__ = [
    "ACTIVATIONS",
    "Scale",
    "Tolerance",
    "erf",
    "erfc",
    "evaluate",
    "mismatches",
    "tolerance",
    "tolerances",
    "within_tolerance",
]
