"""The kernel families: one module for each template, with the cells that are made of it."""

from __future__ import annotations

from . import (
    cast,
    conv_sm80,
    conv_sm90,
    gemm_sm80,
    gemm_sm90,
    gemm_sm100,
    gemm_sm120,
    grouped_sm80,
    grouped_sm90,
    grouped_sm100,
    quantize,
)
from .base import Family

FAMILIES: dict[tuple[str, str], Family] = {
    (module.FAMILY.op, module.FAMILY.generation): module.FAMILY
    for module in (gemm_sm80, gemm_sm90, gemm_sm100, gemm_sm120, cast, grouped_sm80, grouped_sm90, grouped_sm100)
} | {
    (family.op, family.generation): family for module in (conv_sm80, conv_sm90, quantize) for family in module.FAMILIES
}
"""Families by (op, generation)."""
