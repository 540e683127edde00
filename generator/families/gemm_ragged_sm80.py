"""Dense GEMM for few rows or columns of D whose operands begin anywhere: kernels of our own over mma.sync."""

from __future__ import annotations

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import COLUMN, RAGGED, ROW, KernelKey
from . import anywhere
from .base import Family

D = CutlassDtype

TILES = {COLUMN: (128, 64, 64), ROW: (64, 16, 128)}
"""By the layout of B: rows of weights that a thread block reads at once, its most few rows, and elements of K."""

WIDTHS = (128, 64, 32, 16)
"""Rows of weights in a tile that a launch may choose (`width` of its arguments) where B is contiguous along K."""

FEW_TILES = (32, 8)
"""Few rows of a tile that a launch may choose there besides the most (`swizzle` of its arguments)."""


def cell(arch: SmArch, a: D, layouts: str, *, d: D | None = None) -> KernelKey:
    """A key of the family.

    Args:
        arch: the compile target.
        a: element type of A and B.
        layouts: of A and B; A is row-major.
        d: element type of D; None is `a`.
    """
    warps = (1, 8, 1) if layouts[1] == COLUMN else (1, 1, 8)
    return anywhere.sm80_key(arch, a, layouts, d, mainloop=RAGGED, tile=TILES[layouts[1]], warps=warps, stages=3)


def tiles(key: KernelKey, few: int) -> tuple[tuple[int, int], ...]:
    """The tiles that a launch may choose for so many few rows, each as `swizzle` and `width` of its arguments.

    The swizzle is the few rows of a tile, or 1 for the most; the width its rows of weights, at least twice as many, or
    0 where there is one.
    """
    if key.layout_b == ROW:
        return ((1, 0),)
    most = min(few, key.tile[1])
    sizes = {1: most, **{size: size for size in FEW_TILES if size < few}}
    return tuple((told, width) for told, rows in sizes.items() for width in WIDTHS if width >= min(2 * rows, WIDTHS[0]))


FAMILY = Family(
    op="gemm",
    generation="sm80",
    archs=(SmArch.SM90A,),
    template="gemm_ragged_sm80",
    supports=lambda key: anywhere.supports(
        key, cell, "kernels that read few rows from any address", differ="types and the layout of B"
    ),
    cells=lambda arch: anywhere.cells(arch, cell),
    values=lambda _: {},  # but those that all templates share
    compile_seconds=2.5,
    compile_mb=1000,
    mainloops=(RAGGED,),
    waits=True,
)
