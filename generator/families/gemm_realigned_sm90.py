"""Dense GEMM whose operands begin anywhere: kernels of our own that shift rows in shared memory, before WGMMA."""

from __future__ import annotations

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import REALIGNED, KernelKey
from . import anywhere
from .base import Family, tma_key

D = CutlassDtype

TILE = (128, 128)
"""Rows and columns of D."""

WIDTHS = (128, 64)
"""Columns of a tile that a launch may choose (`width` of its arguments)."""


def cell(arch: SmArch, a: D, layouts: str, *, d: D | None = None) -> KernelKey:
    """A key of the family.

    Args:
        arch: the compile target.
        a: element type of A and B.
        layouts: of A and B; A is row-major.
        d: element type of D; None is `a`.
    """
    return tma_key(
        "gemm", arch, a, d or a, layouts, TILE, (1, 1), REALIGNED, align_a=1, align_b=1, align_d=1, stages=3,
        epilogue_schedule="smem", scheduler="identity",
    )  # fmt: skip


FAMILY = Family(
    op="gemm",
    generation="sm90",
    archs=(SmArch.SM90A,),
    template="gemm_realigned_sm90",
    supports=lambda key: anywhere.supports(key, cell, "kernels that shift operands"),
    cells=lambda arch: anywhere.cells(arch, cell),
    values=lambda _: {},  # but those that all templates share
    compile_seconds=6.0,
    compile_mb=1100,
    mainloops=(REALIGNED,),
    waits=True,
)
