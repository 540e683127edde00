"""Kernels that share out K: their keys, how they divide a problem, and when they are chosen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.generator.families import gemm_split_sm90
from atomr_cutlass.generator.families.gemm_split_sm90 import CLUSTERS, WIDEST, cell
from atomr_cutlass.generator.key import KernelKey, shared_memory
from atomr_cutlass.generator.matrix import cells, family, preset_of, supports
from atomr_cutlass.generator.render import render
from atomr_cutlass.generator.rules import SPLIT
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.problem import GemmFormulation, GemmProblem, formulations
from atomr_cutlass.pipeline import estimate, select
from fake_table import H200
from gemm_problems import dense

CELLS = [key for _, key in gemm_split_sm90.cells(SmArch.SM90A)]
EVERY = [cell(D.BF16, "rc", pair, ranks) for pair, ranks in WIDEST]


def problem(m: int, n: int, k: int, layouts: str = "rc", dtype: D = D.BF16) -> GemmProblem:
    return dense(m, n, k, f"{layouts}r", dtype)


def variant(m: int, n: int, k: int) -> GemmFormulation:
    return formulations(problem(m, n, k))[0]


def division(key: KernelKey, extents: tuple[int, ...], clusters: int) -> _core.Division:
    return _core.divide(estimate.kernel_of(key), extents, clusters)


def chosen(m: int, n: int, k: int, layouts: str = "rc", dtype: D = D.BF16) -> KernelKey:
    search = GemmSearch(problem(m, n, k, layouts, dtype), H200)
    return select.choose(search, backend="prebuilt").key


def test_cells_are_of_their_own_family_and_compile() -> None:
    for key in (*CELLS, *EVERY):
        assert supports(key)
        assert family(key) is gemm_split_sm90.FAMILY
        assert f"_{SPLIT}_" in key.name
        source, name = render(key)
        assert name in source
        assert f"GemmSplitSm90<{key.a.cpp}, " in source
        assert f", {key.tile[1]}, {key.cluster[0]}, {key.cluster[2]}>" in source
    assert set(CELLS) == {key for _, key in cells([SmArch.SM90A]) if key.mainloop == SPLIT}
    in_full = {(key.a, key.layout_a + key.layout_b) for key in CELLS if preset_of(key) == "full"}
    assert in_full == {(D.BF16, "rc")}
    assert set(CLUSTERS) <= set(WIDEST)
    assert not list(gemm_split_sm90.cells(SmArch.SM80))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"a": D.F32, "b": D.F32, "d": D.F32, "math": "tf32"}, "multiply f16 and bf16"),
        ({"align_a": 4}, "aligned to 8 elements"),
        ({"align_d": 8}, "nothing of D"),
        ({"tile": (128, 256, 64)}, "tiles of 128x128x64 in clusters 1x1x4"),
        ({"cluster": (1, 2, 2)}, "tiles of 128x128x64 in clusters 1x1x4"),
        ({"epilogue_schedule": "tma"}, "the epilogue dsmem"),
        ({"scheduler": "streamk"}, "the scheduler persistent"),
        ({"stages": 3}, "0 stages"),
        ({"swizzle": 2}, "neither warps nor a swizzle"),
        ({"epilogue": "scaled"}, "unknown epilogue"),
        ({"epilogue": "lc+evt:acc;relu:0;out:1"}, "no epilogue trees"),
    ],
)
def test_keys_without_a_kernel_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    status = supports(dataclasses.replace(cell(D.BF16, "rc", 1, 4), **changes))
    assert not status
    assert reason in status.reason


@pytest.mark.parametrize("key", EVERY, ids=lambda key: str(key.cluster))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 8), (128, 128, 131072), (287, 448, 79416), (512, 512, 16384), (3000, 3000, 3000)]
)
def test_a_division_covers_the_result_and_every_step_once(key: KernelKey, m: int, n: int, k: int) -> None:
    clusters = 132 // (key.cluster[0] * key.cluster[2])
    found = division(key, variant(m, n, k).extents, clusters)
    assert found.height <= gemm_split_sm90.ROWS
    assert found.width <= found.wide <= key.tile[1]
    rows, columns = found.height * found.pair[0], found.width * found.pair[1]
    assert found.pair[0] * found.pair[1] == key.cluster[0]
    assert found.whole + found.cut == math.ceil(m / rows) * math.ceil(n / columns)
    assert found.sharing <= clusters
    assert (found.cut == 0) == (found.sharing == 0) == (found.segments == 0)
    if found.cut:
        # Each cluster has a part, of so many steps that adding it up is worth while, and of two tiles at most.
        assert found.sharing > found.cut or found.sharing == clusters
        assert found.cut * math.ceil(k / _core.SPLIT_BOX) >= _core.SPLIT_LEAST_STEPS * key.cluster[2] * found.sharing
        assert found.cut <= 2 * found.sharing


def test_long_products_of_few_tiles_go_to_all_multiprocessors() -> None:
    for k in (16384, 131072):
        found = division(cell(D.BF16, "rc", 1, 4), variant(128, 128, k).extents, 29)
        assert (found.whole, found.cut, found.segments) in {(0, 1, 1), (0, 2, 1)}
        assert found.sharing >= 28


@pytest.mark.parametrize(("m", "n"), [(128, 128), (256, 256), (36, 200), (400, 304)])
@pytest.mark.parametrize("layouts", ["rc", "rr"])
def test_small_results_of_long_products_are_served_by_them(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, layouts: str
) -> None:
    """Where the table has no kernel that adds up what others divide (test_divided.py)."""
    rows = fake_table.rows_of(ptx=[SmArch.SM80, SmArch.SM89])
    rows = [*(row for row in rows if row.key.op != "cast"), *map(fake_table.row, CELLS)]
    fake_table.install(monkeypatch, rows)
    for dtype in (D.BF16, D.F16):
        assert chosen(m, n, 65536, layouts, dtype).mainloop == SPLIT


@pytest.mark.parametrize(
    ("m", "n", "k", "shared"), [(18, 15, 96312, True), (37, 320, 56608, False), (190, 448, 62016, False)]
)
def test_slices_side_by_side_serve_the_larger_of_them(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, *, shared: bool
) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(ptx=[SmArch.SM80, SmArch.SM89]))
    for layouts in ("rc", "rr"):
        assert (chosen(m, n, k, layouts).mainloop == SPLIT) == shared


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (1024, 1024, 1024), (412, 1792, 3184)])
def test_results_that_fill_the_gpu_are_not(monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(ptx=[SmArch.SM80, SmArch.SM89]))
    assert chosen(m, n, k).mainloop != SPLIT


def test_estimates_grow_with_the_problem() -> None:
    for key in EVERY:
        problems = [variant(128, 128, k).extents for k in (4096, 65536, 524288)]
        times = [estimate.launch(key, extents, H200, shared_memory(key)).seconds for extents in problems]
        assert times == sorted(times)
