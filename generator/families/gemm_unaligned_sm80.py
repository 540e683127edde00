"""Dense GEMM whose operands begin anywhere: kernels of our own over mma.sync, for products too small to be copied."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import LINEAR
from ..key import COLUMN, ROW, UNALIGNED, KernelKey
from ..rules import HALF_TYPES, OK, Status, no, supports_gemm
from .base import FULL, ON_DEMAND, Cell, Family
from .sm80 import read_anywhere

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
    return read_anywhere(arch, a, layouts, d, mainloop=UNALIGNED, tile=TILE, warps=(2, 2, 2), stages=4, align_b=align_b)


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR,))
    if not common:
        return common
    if key.a not in HALF_TYPES or key.epilogue != LINEAR:
        return no("kernels that read operands from any address multiply f16 and bf16, without a tree")
    if key.layout_a != ROW:
        return no("kernels that read operands from any address need A row-major")
    if key != cell(key.arch, key.a, key.layout_a + key.layout_b, d=key.d):
        return no("kernels that read operands from any address differ in types and layouts alone")
    return OK


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    for a in HALF_TYPES:
        for layouts in (ROW + COLUMN, ROW + ROW):
            yield FULL, cell(arch, a, layouts)
            yield ON_DEMAND, cell(arch, a, layouts, d=D.F32)


FAMILY = Family(
    op="gemm",
    generation="sm80",
    archs=(SmArch.SM90A,),
    template="gemm_unaligned_sm80",
    supports=supports,
    cells=cells,
    values=lambda _: {},  # but those that all templates share
    compile_seconds=4.0,
    compile_mb=1000,
    mainloops=(UNALIGNED,),
    waits=True,
)
