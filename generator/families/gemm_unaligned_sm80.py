"""Dense GEMM whose operands begin anywhere: kernels of our own over mma.sync, for products too small to be copied."""

from __future__ import annotations

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import COLUMN, UNALIGNED, KernelKey
from . import anywhere
from .base import Family

D = CutlassDtype

TILE = (64, 64, 64)
"""Rows and columns of D, and elements of K that are loaded at once."""

WIDTHS = (64, 32)
"""Rows and columns of a tile that a launch may choose (`width` of its arguments)."""

WORD = 2
"""Elements to which the rows of a row-major B are aligned."""


def cell(arch: SmArch, a: D, layouts: str, *, d: D | None = None) -> KernelKey:
    """A key of the family.

    Args:
        arch: the compile target.
        a: element type of A and B.
        layouts: of A and B; A is row-major.
        d: element type of D; None is `a`.
    """
    align_b = 1 if layouts[1] == COLUMN else WORD
    return anywhere.sm80_key(
        arch, a, layouts, d, mainloop=UNALIGNED, tile=TILE, warps=(2, 2, 2), stages=4, align_b=align_b
    )


FAMILY = Family(
    op="gemm",
    generation="sm80",
    archs=(SmArch.SM90A,),
    template="gemm_unaligned_sm80",
    supports=lambda key: anywhere.supports(key, cell, "kernels that read operands from any address"),
    cells=lambda arch: anywhere.cells(arch, cell),
    values=lambda _: {},  # but those that all templates share
    compile_seconds=4.0,
    compile_mb=1000,
    mainloops=(UNALIGNED,),
    waits=True,
)
