"""Dense GEMM of the sm90 generation that adds up K in slices, one after the other.

They give the bits of kernels that compute slices side by side (`gemm_sm90.divides`), without a workspace: for the many
rows of batch-invariant calls.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import LINEAR
from ..key import KernelKey
from ..rules import COMMON_LAYOUTS, HALF_TYPES, LAYOUTS, SLICED, Status, no
from . import gemm_sm90
from .base import FULL, ON_DEMAND, Cell, tma_key

_WIDEST = 192
"""Columns of the widest tile: a thread has half as many sums, twice."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    whole = gemm_sm90.supports(_whole(key))
    if not whole:
        return whole
    if key.a not in HALF_TYPES or key.epilogue != LINEAR or key.d.bits != 16:
        return no("kernels that add up K in slices are for f16 and bf16, with the linear epilogue and such results")
    if (key.epilogue_schedule, key.scheduler, key.stages) != ("tma", "persistent", 0):
        return no("kernels that add up K in slices have the epilogue tma, the scheduler persistent and 0 stages")
    m, n, _ = key.tile
    if m not in (64, 128):
        return no("kernels that add up K in slices have tiles of 64 or 128 rows")
    if n > _WIDEST:
        return no(f"kernels that add up K in slices have each sum twice, and tiles of at most {_WIDEST} columns")
    return whole


def _whole(key: KernelKey) -> KernelKey:
    """The kernel that adds up K as a whole. Of 64 rows each tile has a warp group, of 128 two share one."""
    return dataclasses.replace(key, mainloop="pingpong" if key.tile[0] == 64 else "cooperative")


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    wrapped = {"fitted": "atomr_cutlass::SlicedCell<", "widths": ">"}
    return gemm_sm90.values(_whole(key)) | {"include": '#include "atomr_cutlass/gemm_sliced_sm90.h"\n'} | wrapped


def cell(a: CutlassDtype, layouts: str, tile: tuple[int, int], cluster: tuple[int, int]) -> KernelKey:
    """A key of the family."""
    return tma_key("gemm", SmArch.SM90A, a, a, layouts, tile, cluster, SLICED)


_TILES = (((128, 128), (1, 2)), ((64, 128), (1, 2)))
"""Tiles and clusters; beside slices side by side others gain 2 to 3% (docs/performance-log.md, 2026-11-27)."""


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM90A:
        return
    for a, layouts, tiling in itertools.product(HALF_TYPES, LAYOUTS, _TILES):
        first = FULL if a is CutlassDtype.BF16 and layouts in COMMON_LAYOUTS else ON_DEMAND
        yield first, cell(a, layouts, *tiling)


FAMILY = dataclasses.replace(
    gemm_sm90.FAMILY, supports=supports, cells=cells, values=values, mainloops=(SLICED,), trees=False
)
