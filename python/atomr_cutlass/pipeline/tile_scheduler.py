"""Models how CUTLASS's persistent tile schedulers of the sm90 generation divide a problem into tiles.

A launch has as many thread blocks as run at once, and each takes one tile after the other off a list. The list rounds
the grid of tiles up to whole clusters and, along both sides, to whole swizzles: what lies outside the result is
multiplied like any other tile, and dropped. The functions follow tile_scheduler_params.h of CUTLASS 4.2, against which
tests/build/test_tile_scheduler.py compares them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .candidate import ALONG_M, ALONG_N, HEURISTIC
from .rounding import round_down, round_up

SWIZZLES = (1, 2, 4, 8)
SHORTEST_SIDE = {1: 1, 2: 2, 4: 3, 8: 6}
"""Thread blocks that the shorter side of the grid has for a swizzle to be taken; a smaller one is taken otherwise."""

CLUSTER_SM_PER_GPC = 18
"""Multiprocessors of a GPC, by which the clusters that run at once are counted where no driver was asked."""

CLUSTERS_AT_ONCE = {(132, 4): 30, (132, 8): 15}
"""The driver's counts, by multiprocessors and thread blocks of a cluster (an H200, one of whose GPCs has only ten)."""

SHORTEST_UNIT = 8
"""Steps along K that a stream-K unit has at least."""


class TileList(NamedTuple):
    """The tiles that a launch visits.

    Attributes:
        rows, columns: thread blocks along M and N, padding included.
        batch: grids of them.
        cluster: of how many of them along M and N clusters are.
        swizzle: clusters side by side that are taken before the next ones along the raster order.
        raster: `ALONG_M` or `ALONG_N`.
        blocks: thread blocks that are launched.
    """

    rows: int
    columns: int
    batch: int
    cluster: tuple[int, int]
    swizzle: int
    raster: int
    blocks: int

    @property
    def tiles(self) -> int:
        """Tiles in all."""
        return self.rows * self.columns * self.batch


@dataclass(frozen=True)
class Decomposition:
    """How a stream-K launch cuts its tiles.

    Attributes:
        whole: tiles that one thread block computes each.
        cut: tiles that several share.
        units: parts that those come to.
        splits: parts of each of them where all are cut alike; 1 otherwise.
    """

    whole: int
    cut: int
    units: int
    splits: int


def tile_list(
    blocks: tuple[int, int, int],
    cluster: tuple[int, int],
    multiprocessors: int,
    swizzle: int,
    raster: int,
    *,
    truncate: bool = True,
) -> TileList:
    """The list for a grid of tiles.

    Args:
        blocks: tiles along M and N, and batches.
        cluster: thread blocks of a cluster along M and N.
        multiprocessors: of the GPU.
        swizzle: the largest that may be taken.
        raster: the order that is asked for.
        truncate: whether no more blocks are launched than there are tiles; not so of stream-K.
    """
    cluster_m, cluster_n = cluster
    rows, columns = round_up(blocks[0], cluster_m), round_up(blocks[1], cluster_n)
    taken = effective_swizzle(rows, columns, swizzle)
    rows, columns = round_up(rows, taken * cluster_m), round_up(columns, taken * cluster_n)
    if raster == HEURISTIC:
        raster = ALONG_M if columns > rows else ALONG_N
    launched = blocks_at_once(multiprocessors, cluster_m * cluster_n)
    if truncate:
        launched = min(launched, rows * columns * blocks[2])
    return TileList(rows, columns, blocks[2], cluster, taken, raster, launched)


def effective_swizzle(rows: int, columns: int, most: int) -> int:
    """The swizzle of a grid of thread blocks, whole clusters of them, of which at most `most` is asked for."""
    shortest, most = min(rows, columns), max(most, 1)
    return next(s for s in reversed(SWIZZLES) if s <= most and shortest >= SHORTEST_SIDE[s])


@functools.cache
def blocks_at_once(multiprocessors: int, cluster: int) -> int:
    """Thread blocks that run at once, in whole clusters of `cluster` of them that each lie in one GPC."""
    if cluster == 1:
        return multiprocessors
    if (multiprocessors, cluster) in CLUSTERS_AT_ONCE:
        return CLUSTERS_AT_ONCE[multiprocessors, cluster] * cluster
    gpcs, rest = divmod(multiprocessors, CLUSTER_SM_PER_GPC)
    found = gpcs * round_down(CLUSTER_SM_PER_GPC, cluster) + round_down(rest, cluster)
    return max(cluster, round_down(min(found, multiprocessors), cluster))


def orders(blocks: tuple[int, int, int], cluster: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The swizzles and raster orders that differ for a grid of tiles: small swizzles and CUTLASS's own order first."""
    rows, columns = round_up(blocks[0], cluster[0]), round_up(blocks[1], cluster[1])
    rasters = (ALONG_M, ALONG_N) if columns > rows else (ALONG_N, ALONG_M)
    for swizzle in SWIZZLES:
        if min(rows, columns) >= SHORTEST_SIDE[swizzle]:
            for raster in rasters:
                yield swizzle, raster


def decompose(tiles: TileList, k_tiles: int) -> Decomposition:
    """How stream-K, left to its own heuristic, cuts a list of tiles with this many steps along K each."""
    cluster = math.prod(tiles.cluster)
    full = tiles.tiles // tiles.blocks
    tail = tiles.tiles - full * tiles.blocks
    if tail == 0 or 2 * tail >= tiles.blocks or k_tiles <= SHORTEST_UNIT:
        return Decomposition(tiles.tiles, 0, 0, 1)
    cut = round_down(tiles.tiles - max(full - 1, 0) * tiles.blocks, cluster)
    units = min(round_down(tiles.blocks, cluster), round_down(k_tiles * cut // SHORTEST_UNIT, cluster))
    if cut == 0 or units == 0:
        return Decomposition(tiles.tiles, 0, 0, 1)
    splits = units // cut if cut < units and units % cut == 0 else 1
    if splits > 1:
        # All tiles are cut, not only those that were to be.
        return Decomposition(0, tiles.tiles, tiles.tiles * splits, splits)
    return Decomposition(tiles.tiles - cut, cut, units, 1)
