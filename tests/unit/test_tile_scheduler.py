"""The list of tiles that a persistent launch visits; tests/build compares it with kernels' own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomr_cutlass._core import decompose, l2_misses, orders, tile_list
from atomr_cutlass.pipeline.search import ALONG_M, ALONG_N, HEURISTIC


@pytest.mark.parametrize(
    ("blocks", "cluster", "swizzle", "rows", "columns"),
    [
        ((18, 18), (1, 1), 1, 18, 18),
        ((18, 18), (1, 1), 8, 24, 24),  # 2304^3 in tiles of 128 x 128
        ((18, 18), (2, 1), 8, 32, 24),
        ((18, 9), (2, 1), 8, 32, 16),
        ((19, 9), (2, 1), 1, 20, 9),
        ((5, 40), (1, 1), 8, 8, 40),  # the shorter side is too short for 8: 4 is taken
        ((2, 40), (1, 1), 8, 2, 40),
        ((1, 40), (1, 1), 8, 1, 40),
        ((1, 40), (2, 1), 8, 4, 40),  # clusters count
    ],
)  # fmt: skip
def test_padding(blocks: tuple[int, int], cluster: tuple[int, int], swizzle: int, rows: int, columns: int) -> None:
    tiles = tile_list((*blocks, 3), cluster, 132, swizzle, HEURISTIC, stream_k=True)
    assert (tiles.rows, tiles.columns, tiles.tiles) == (rows, columns, 3 * rows * columns)
    assert tiles.raster == (ALONG_M if columns > rows else ALONG_N)


def test_no_more_blocks_are_launched_than_run_at_once_or_have_a_tile() -> None:
    assert tile_list((40, 40, 1), (1, 1), 132, 1, HEURISTIC).blocks == 132
    assert tile_list((40, 40, 1), (2, 1), 132, 1, HEURISTIC).blocks == 132
    assert tile_list((40, 40, 1), (2, 2), 132, 1, HEURISTIC).blocks == 120  # as the driver of an H200 says
    assert tile_list((40, 40, 1), (4, 2), 132, 1, HEURISTIC).blocks == 120
    assert tile_list((40, 40, 1), (2, 2), 114, 1, HEURISTIC).blocks == 100  # 4 clusters of 4 in 18 multiprocessors
    assert tile_list((3, 5, 2), (1, 1), 132, 1, HEURISTIC).blocks == 30
    assert tile_list((3, 5, 2), (1, 1), 132, 1, HEURISTIC, stream_k=True).blocks == 132


def test_orders_are_those_that_differ() -> None:
    assert orders((1, 9, 1), (1, 1)) == [(1, ALONG_M), (1, ALONG_N)]
    assert orders((9, 4, 1), (1, 1)) == [
        (1, ALONG_N), (1, ALONG_M), (2, ALONG_N), (2, ALONG_M), (4, ALONG_N), (8, ALONG_N),
    ]  # fmt: skip
    assert orders((9, 4, 1), (4, 2)) == [(1, ALONG_N), (1, ALONG_M), (2, ALONG_N)]
    assert [swizzle for swizzle, _ in orders((9, 4, 1), (1, 1), stream_k=True)] == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("blocks", "k_tiles", "cut", "units", "splits"),
    [
        ((2, 2), 256, 4, 128, 32),  # few tiles: all are cut alike
        ((12, 11), 64, 0, 0, 1),  # one full wave: none
        ((14, 20), 8, 0, 0, 1),  # K is too short
        ((14, 20), 64, 148, 132, 1),  # a short last wave: its tiles and those of the wave before it
        ((10, 20), 64, 0, 0, 1),  # more than half of the last wave is busy
    ],
)  # fmt: skip
def test_what_stream_k_cuts(blocks: tuple[int, int], k_tiles: int, cut: int, units: int, splits: int) -> None:
    tiles = tile_list((*blocks, 1), (1, 1), 132, 1, HEURISTIC, stream_k=True)
    whole, *made = decompose(tiles, k_tiles)
    assert made == [cut, units, splits]
    assert whole + cut == tiles.tiles


_side = st.integers(1, 200)


@given(_side, _side, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.sampled_from([1, 2, 4, 8]))
def test_the_list_holds_the_grid_in_whole_clusters(m: int, n: int, cluster: tuple[int, int], swizzle: int) -> None:
    tiles = tile_list((m, n, 1), cluster, 132, swizzle, HEURISTIC)
    padded = tile_list((m, n, 1), cluster, 132, swizzle, HEURISTIC, stream_k=True)
    for have, rounded, need, unit in (
        (tiles.rows, padded.rows, m, cluster[0]), (tiles.columns, padded.columns, n, cluster[1]),
    ):  # fmt: skip
        assert have % unit == 0
        assert need <= have < need + unit
        assert rounded % (unit * padded.swizzle) == 0
        assert need <= rounded < need + unit * padded.swizzle + unit


def test_swizzles_save_what_l2_does_not_hold() -> None:
    def misses(side: int, swizzle: int) -> float:
        tiles = tile_list((side, side, 1), (1, 1), 132, swizzle, ALONG_N)
        return l2_misses(tiles, (128.0 * 2 * 128 * side,) * 2, held=40e6)

    whole = 2 * 16 * 128.0 * 2 * 128 * 16
    assert misses(16, 1) == misses(16, 8) == whole  # A and B are read once
    assert misses(128, 1) > misses(128, 4) > whole
