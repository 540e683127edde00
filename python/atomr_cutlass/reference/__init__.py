"""Common parts of the operations' NumPy references: activations, scales, epilogue trees and tolerances.

Each operation's own is `ops.<operation>.reference`: every kernel is tested against it, and it runs where there is no
GPU. Values are float64 inside and rounded once at the end, so a result differs from a kernel's by the kernel's own
rounding; `tolerance` says by how much that may be.
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
