"""Dense GEMM of the sm90 generation whose thread blocks divide K: kernels of our own over CuTe's TMA and WGMMA."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import LINEAR, split
from ..key import KernelKey
from ..rules import COMMON_LAYOUTS, HALF_TYPES, SPLIT, Status, no, supports_gemm
from . import dsmem_sm90
from .base import FULL, ON_DEMAND, Cell, Family

D = CutlassDtype

ROWS = 128
"""Rows of the tallest tile."""

WIDEST = {(2, 1): 256, (4, 1): 256, (1, 4): 128, (2, 2): 128}
"""Columns of the widest tile, by the thread blocks of a cluster along M or N and along K: several along K need
shared memory for their sums."""

CLUSTERS = ((1, 4),)
"""The clusters of the cells; the performance log has the gains of others."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR,))
    if not common:
        return common
    if split(key.epilogue)[1]:
        return no("kernels that share out K have no epilogue trees")
    if key.a not in HALF_TYPES or key.a is not key.b:
        return no(f"kernels that share out K multiply f16 and bf16 of one type, not {key.a.value} by {key.b.value}")
    if (key.align_a, key.align_b, key.align_d) != (8, 8, 1):
        return no("kernels that share out K ask A and B to be aligned to 8 elements, and nothing of D")
    pair, _, ranks = key.cluster
    if key.cluster != (pair, 1, ranks) or key.tile != (ROWS, WIDEST.get((pair, ranks)), 64):
        return no(
            "kernels that share out K have tiles of 128x128x64 in clusters 1x1x4 and 2x1x2, of 128x256x64 in 2x1x1 "
            "and 4x1x1"
        )
    return dsmem_sm90.supports_schedule(key, "kernels that share out K")


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    pair, _, ranks = key.cluster
    return {"widest": str(key.tile[1]), "pair": str(pair), "ranks": str(ranks)}


def cell(a: D, layouts: str, pair: int, ranks: int, *, d: D | None = None) -> KernelKey:
    """A key of the family."""
    return dsmem_sm90.cell(a, layouts, SPLIT, (ROWS, WIDEST[pair, ranks], 64), (pair, 1, ranks), d=d)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM90A:
        return
    for a in HALF_TYPES:
        for layouts in COMMON_LAYOUTS:
            for pair, ranks in CLUSTERS:
                # Slices of K side by side are faster unless D's rows are not aligned, or there are batches.
                yield FULL if a is D.BF16 and layouts == "rc" else ON_DEMAND, cell(a, layouts, pair, ranks)


FAMILY = Family(
    op="gemm",
    generation="sm90",
    archs=(SmArch.SM90A,),
    template="gemm_split_sm90",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=9.0,
    compile_mb=1200,
    mainloops=(SPLIT,),
)
