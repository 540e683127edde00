"""How kernels that share out K (GemmSplitSm90) divide a problem: tiles, pairs of them, and slices of K.

The functions follow `shape` of gemm_split_sm90.h, which decides when a kernel is launched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..generator.families import gemm_split_sm90
from ..generator.key import COLUMN, ROW, KernelKey
from .rounding import round_up

if TYPE_CHECKING:
    from .problem import Variant

BOX = 64
"""Elements of a step along K."""
LEAST_STEPS = 4
"""That a thread block has at least of a tile that is divided."""

EFFICIENCY = 0.9
"""Share of WGMMA's peak rate that a step sustains."""
STEP_CLOCKS = 172.0
"""The shortest step."""
SHARED_BYTES_PER_CLOCK = 125.0
"""Of shared memory, which instructions read and TMA writes."""
EVEN_BYTES_PER_CLOCK, UNEVEN_BYTES_PER_CLOCK = 55.0, 45.0
"""That one multiprocessor draws from L2: where those with rows or columns in common read them at the same time, and
where they do not."""
TILE_CLOCKS = 1000.0
STORED_PER_CLOCK = 32.0
"""Elements of a tile."""
SHARED_CLOCKS = 3500.0
"""Leaving a part of a tile and finding out whether it is the last."""
PARTS_BYTES_PER_CLOCK = 40.0
"""At which parts are written, and read by the last."""


@dataclass(frozen=True)
class Division:
    """One way to divide a problem among the clusters of a launch, and what its slowest thread block does.

    Attributes:
        wide: columns that a thread block's instructions compute.
        pair: thread blocks of a pair along M and along N.
        height, width: of a tile of D.
        whole, cut: pairs that one cluster computes, and those that clusters share.
        sharing: clusters that share the latter.
        steps: steps along K of a thread block.
        step_clocks: of one of them, at least.
        tiles: whole tiles of a thread block.
        segments: parts of other tiles.
        part_bytes: that are written for each of them, and read of each cluster that shares its tile.
    """

    wide: int
    pair: tuple[int, int]
    height: int
    width: int
    whole: int
    cut: int
    sharing: int
    steps: float
    step_clocks: float
    tiles: int
    segments: int
    part_bytes: float

    @property
    def peers(self) -> float:
        """Clusters that share a tile."""
        return self.sharing / self.cut if self.cut else 0.0

    @property
    def clocks(self) -> float:
        """By which the kernel decides."""
        tile = TILE_CLOCKS + gemm_split_sm90.ROWS * self.wide / STORED_PER_CLOCK
        parts = self.part_bytes * (self.segments + self.peers) / PARTS_BYTES_PER_CLOCK
        return self.steps * self.step_clocks + self.tiles * tile + self.segments * (SHARED_CLOCKS + tile) + parts


def division(key: KernelKey, variant: Variant, clusters: int) -> Division:
    """The division that a kernel takes with so many clusters at once."""
    return min(_divisions(key, variant, clusters), key=lambda candidate: candidate.clocks)


def _divisions(key: KernelKey, variant: Variant, clusters: int) -> Iterator[Division]:
    pairs = key.cluster[0]
    for wide in range(64, key.tile[1] + 1, 64):
        for pair_m in (1, 2, 4):
            if pairs % pair_m == 0:
                for even in (False, True):
                    yield _division(key, variant, clusters, wide, (pair_m, pairs // pair_m), even=even)


def _division(
    key: KernelKey, variant: Variant, clusters: int, wide: int, pair: tuple[int, int], *, even: bool
) -> Division:
    ranks = key.cluster[2]
    rows, columns = (
        round_up(math.ceil(extent / tile), among)
        for extent, tile, among in ((variant.m, gemm_split_sm90.ROWS, pair[0]), (variant.n, wide, pair[1]))
    )
    height = round_up(math.ceil(variant.m / rows), 8 * pair[1] if key.layout_a == ROW else 64)
    width = round_up(math.ceil(variant.n / columns), 8 * pair[0] if key.layout_b == COLUMN else 64)
    tiles = math.ceil(variant.m / (height * pair[0])) * math.ceil(variant.n / (width * pair[1])) * variant.batch
    steps = math.ceil(variant.k / BOX)
    whole = tiles // clusters * clusters
    cut = tiles - whole
    if 16 * cut >= 15 * clusters:
        whole, cut = tiles, 0
    if whole >= clusters and 0 < 2 * cut < clusters:
        whole, cut = whole - clusters, cut + clusters
    sharing = min(cut * steps // (LEAST_STEPS * ranks), clusters)
    if sharing <= cut and sharing < clusters:
        whole, cut, sharing = tiles, 0, 0
    even = even and whole == 0 and sharing > cut
    if even:
        sharing = sharing // cut * cut
    read = 128 * (height / pair[1] + width / pair[0])
    rate = EVEN_BYTES_PER_CLOCK if cut == 0 or even else UNEVEN_BYTES_PER_CLOCK
    shared = 128 * ((2 if height > 64 else 1) * (64 + wide) + height + width)
    clocks = max(4 * wide / EFFICIENCY, shared / SHARED_BYTES_PER_CLOCK, read / rate, STEP_CLOCKS)
    waves = math.ceil(whole / clusters)
    return Division(
        wide=wide,
        pair=pair,
        height=height,
        width=width,
        whole=whole,
        cut=cut,
        sharing=sharing,
        steps=steps * (waves + (cut / sharing if cut else 0)) / ranks,
        step_clocks=clocks,
        tiles=waves,
        # Uneven slices end in one tile and begin in another.
        segments=0 if cut == 0 else 1 if sharing % cut == 0 else 2,
        part_bytes=4 * height * wide / ranks,
    )
