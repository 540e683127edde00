"""Kernels for few rows whose operands begin anywhere: their keys, which problems they serve, and how they divide K."""

from __future__ import annotations

import dataclasses

import pytest

import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.families import gemm_ragged_sm80
from atomr_cutlass.generator.families.gemm_ragged_sm80 import cell, tiles
from atomr_cutlass.generator.key import RAGGED
from atomr_cutlass.generator.matrix import cells, family, preset_of, supports
from atomr_cutlass.generator.render import render
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.reduction import reduction_of
from fake_table import H200
from gemm_problems import dense


@pytest.fixture
def full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))


def test_cells_are_of_their_own_family_and_compile() -> None:
    found = [key for _, key in gemm_ragged_sm80.FAMILY.cells(SmArch.SM90A)]
    assert {key for _, key in cells([SmArch.SM90A]) if key.mainloop == RAGGED} == set(found)
    for key in found:
        assert supports(key)
        assert family(key) is gemm_ragged_sm80.FAMILY
        assert "_ragged_" in key.name  # by which launches know that they may choose a width
        source, name = render(key)
        assert name in source
        assert "GemmRaggedSm80" in source
        assert preset_of(key) == ("full" if key.d is key.a else None)
        assert reduction_of(key) is None  # K is divided by the number of tiles


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": SmArch.SM80}, "do not compile for sm_80"),
        ({"a": D.F32, "b": D.F32, "d": D.F32, "math": "tf32"}, "multiply f16 and bf16"),
        ({"layout_a": "c"}, "A row-major"),
        ({"align_a": 8}, "differ in types"),
        ({"tile": (128, 128, 64)}, "differ in types"),
    ],
)
def test_other_keys_are_refused(changes: dict[str, object], reason: str) -> None:
    assert reason in supports(dataclasses.replace(cell(SmArch.SM90A, D.BF16, "rc"), **changes)).reason  # type: ignore[arg-type]


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize("dtype", [D.BF16, D.F16])
@pytest.mark.parametrize(
    ("m", "n", "k", "layouts"),
    [
        (1, 4097, 4095, "rcr"),
        (5, 50257, 4095, "rcr"),
        (5, 50257, 4096, "rrr"),
        (8, 1858, 30835, "rcr"),
        (9999, 3, 777, "rcr"),
    ],
)
def test_few_rows_of_any_length_are_read_as_they_lie(m: int, n: int, k: int, layouts: str, dtype: D) -> None:
    chosen = select.choose(GemmSearch(dense(m, n, k, layouts, dtype), H200), backend="prebuilt")
    assert chosen.key.mainloop == RAGGED
    assert not chosen.formulation.copies


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize(
    ("m", "n", "k", "layouts"),
    [
        (8, 4096, 4096, "rcr"),  # TMA reads it
        (8, 4097, 4096, "rcr"),  # both operands lie along K
        (600, 4097, 4095, "rcr"),
        (8, 4097, 7, "rcr"),  # a row is no whole vector
        (8, 7, 4095, "rrr"),
    ],
)
def test_others_are_not(m: int, n: int, k: int, layouts: str) -> None:
    ranked = select.rank(GemmSearch(dense(m, n, k, layouts), H200))
    assert RAGGED not in {each.key.mainloop for each in ranked}


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize("layouts", ["rcr", "rrr"])
def test_k_is_divided_until_the_gpu_is_busy(layouts: str) -> None:
    def best(n: int, k: int) -> int:
        return select.choose(GemmSearch(dense(4, n, k, layouts), H200), backend="prebuilt").split_k

    assert best(1025, 20001) > 1
    assert best(32769, 1025) == 1


@pytest.mark.usefixtures("full_table")
def test_launches_are_every_width_and_division() -> None:
    search = GemmSearch(dense(20, 1025, 2001), H200)
    found = next(each for each in select.rank(search) if each.key.mainloop == RAGGED)
    launches = {(each.split_k, each.swizzle, each.width) for each in search.launches(found)}
    found_tiles = {
        (few, width) for _, few, width in launches
    }  # at least twice as many rows of weights as there are few
    assert found_tiles == {(1, 64), (1, 128), (8, 16), (8, 32), (8, 64), (8, 128)}
    assert {split for split, *_ in launches} >= {1, 2, 4, 8, 16}
    assert {width for _, width in tiles(cell(SmArch.SM90A, D.BF16, "rr"), 20)} == {0}


@pytest.mark.usefixtures("full_table")
@pytest.mark.parametrize(("size", "few"), [(111, 8), (409, 32)])
def test_small_squares_have_small_tiles(size: int, few: int) -> None:
    """All multiprocessors are to be busy: with 64 few rows, 111x111x111 has four thread blocks, or eight."""
    ranked = select.rank(GemmSearch(dense(size, size, size), H200))
    chosen = next(each for each in ranked if each.key.mainloop == RAGGED)
    assert chosen.swizzle == few
    assert chosen.width > few


def test_batch_invariant_calls_are_served_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    ranked = select.rank(GemmSearch(dense(8, 4097, 4095), H200, batch_invariant=True))
    assert ranked
    assert RAGGED not in {each.key.mainloop for each in ranked}
