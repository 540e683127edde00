"""Dense GEMM whose operands begin anywhere: kernels of our own that shift rows in shared memory, before WGMMA."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import LINEAR
from ..key import COLUMN, REALIGNED, ROW, KernelKey
from ..rules import HALF_TYPES, OK, Status, no, supports_gemm
from .base import FULL, ON_DEMAND, Cell, Family, tma_key

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


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR,))
    if not common:
        return common
    if key.a not in HALF_TYPES or key.epilogue != LINEAR:
        return no("kernels that shift operands multiply f16 and bf16, without a tree")
    if key.layout_a != ROW:
        return no("kernels that shift operands need A row-major")
    if key != cell(key.arch, key.a, key.layout_a + key.layout_b, d=key.d):
        return no("kernels that shift operands differ in types and layouts alone")
    return OK


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM90A:
        return
    for a in HALF_TYPES:
        for layouts in (ROW + COLUMN, ROW + ROW):
            yield FULL, cell(arch, a, layouts)
            yield ON_DEMAND, cell(arch, a, layouts, d=D.F32)


FAMILY = Family(
    op="gemm",
    generation="sm90",
    archs=(SmArch.SM90A,),
    template="gemm_realigned_sm90",
    supports=supports,
    cells=cells,
    values=lambda _: {},  # but those that all templates share
    compile_seconds=6.0,
    compile_mb=1100,
    mainloops=(REALIGNED,),
    waits=True,
)
