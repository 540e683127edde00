"""The kernel families: one module for each template, with its cells."""

from __future__ import annotations

from . import (
    cast,
    conv_sm80,
    conv_sm90,
    gemm_few_sm90,
    gemm_ragged_sm80,
    gemm_realigned_sm90,
    gemm_sm80,
    gemm_sm90,
    gemm_sm100,
    gemm_sm120,
    gemm_split_sm90,
    gemm_unaligned_sm80,
    gemv,
    grouped_sm80,
    grouped_sm90,
    grouped_sm100,
    quantize,
    transpose,
)
from .base import Family

_ALL = (
    *(
        module.FAMILY
        for module in (
            gemm_sm80,
            gemm_sm90,
            gemm_few_sm90,
            gemm_ragged_sm80,
            gemm_unaligned_sm80,
            gemm_realigned_sm90,
            gemm_split_sm90,
            gemm_sm100,
            gemm_sm120,
            gemv,
            cast,
            transpose,
            grouped_sm80,
            grouped_sm90,
            grouped_sm100,
        )
    ),
    *(family for module in (conv_sm80, conv_sm90, quantize) for family in module.FAMILIES),
)

FAMILIES: dict[tuple[str, str], tuple[Family, ...]] = {
    place: tuple(family for family in _ALL if (family.op, family.generation) == place)
    for place in dict.fromkeys((family.op, family.generation) for family in _ALL)
}
"""Families by (op, generation); those that own mainloops come after the one that has all others."""
