"""Kernels for operands that begin anywhere: their keys, which problems they serve, and their launches."""

from __future__ import annotations

import dataclasses
import random

import pytest

import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator.families import gemm_realigned_sm90, gemm_unaligned_sm80
from atomr_cutlass.generator.key import REALIGNED, UNALIGNED
from atomr_cutlass.generator.matrix import cells, family, preset_of, supports
from atomr_cutlass.generator.render import render
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.problem import formulations
from atomr_cutlass.pipeline import estimate, select
from atomr_cutlass.pipeline.reduction import reduction_of
from fake_table import H200
from gemm_problems import dense


@pytest.fixture(autouse=True)
def full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))


FAMILIES = {UNALIGNED: gemm_unaligned_sm80, REALIGNED: gemm_realigned_sm90}
STRUCTS = {UNALIGNED: "GemmUnalignedSm80", REALIGNED: "GemmRealignedSm90"}
OTHER_TILES = {UNALIGNED: (128, 128, 64), REALIGNED: (64, 64, 64)}
both = pytest.mark.parametrize("mainloop", FAMILIES)


@both
def test_cells_are_of_their_own_family_and_compile(mainloop: str) -> None:
    found = [key for _, key in FAMILIES[mainloop].FAMILY.cells(SmArch.SM90A)]
    assert {key for _, key in cells([SmArch.SM90A]) if key.mainloop == mainloop} == set(found)
    for key in found:
        assert supports(key)
        assert family(key) is FAMILIES[mainloop].FAMILY
        assert f"_{mainloop}_" in key.name  # by which launches know that they may choose a width
        source, name = render(key)
        assert name in source
        assert STRUCTS[mainloop] in source
        assert preset_of(key) == ("full" if key.d is key.a else None)
        assert reduction_of(key) is None  # K is divided by the number of tiles


@both
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": SmArch.SM80}, "do not compile for sm_80"),
        ({"a": D.F32, "b": D.F32, "d": D.F32, "math": "tf32"}, "multiply f16 and bf16"),
        ({"layout_a": "c"}, "A row-major"),
        ({"align_a": 8}, "differ in types"),
        ({"tile": OTHER_TILES}, "differ in types"),
    ],
)
def test_other_keys_are_refused(changes: dict[str, object], reason: str, mainloop: str) -> None:
    key = FAMILIES[mainloop].cell(SmArch.SM90A, D.BF16, "rc")
    changes = {name: OTHER_TILES[mainloop] if value is OTHER_TILES else value for name, value in changes.items()}
    assert reason in supports(dataclasses.replace(key, **changes)).reason  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [D.BF16, D.F16])
@pytest.mark.parametrize(
    ("m", "n", "k", "layouts", "width"),
    [
        (71, 71, 71, "rcr", 32),
        (180, 180, 180, "rrr", 32),
        (497, 497, 497, "rcr", 32),
        (519, 519, 519, "rcr", 64),
        (210, 617, 212, "rcr", 32),  # K of B is even, N odd
        (110, 1123, 545, "rcr", 32),
    ],
)
def test_small_products_are_read_as_they_lie(m: int, n: int, k: int, layouts: str, width: int, dtype: D) -> None:
    chosen = select.choose(GemmSearch(dense(m, n, k, layouts, dtype), H200), backend="prebuilt")
    assert (chosen.key.mainloop, chosen.width) == (UNALIGNED, width)
    assert not chosen.formulation.copies


@pytest.mark.parametrize(
    ("m", "n", "k", "layouts"),
    [
        (128, 128, 128, "rcr"),  # TMA reads them
        (71, 71, 72, "rrr"),  # rows of B begin between words
        (71, 71, 71, "ccr"),
        (3, 5, (1 << 30) + 1, "rcr"),  # offsets in a row have 32 bits
    ],
)
def test_others_are_not(m: int, n: int, k: int, layouts: str) -> None:
    ranked = select.rank(GemmSearch(dense(m, n, k, layouts), H200))
    assert ranked
    found = [each for each in ranked if each.key.mainloop == UNALIGNED and not each.formulation.copies]
    assert not found


@pytest.mark.parametrize(
    ("m", "n", "k", "layouts"),
    [
        (210, 4125, 212, "rcr"),
        (764, 764, 764, "rrr"),
        (700, 701, 701, "rrr"),  # rows of B begin between words
        (356, 55_133, 130, "rrr"),
        (20_001, 91, 97, "rcr"),
        (481, 110, 73_156, "rcr"),
        (40, 3001, 5001, "rrr"),
    ],
)
def test_larger_products_are_shifted_in_shared_memory(m: int, n: int, k: int, layouts: str) -> None:
    chosen = select.choose(GemmSearch(dense(m, n, k, layouts), H200), backend="prebuilt")
    assert chosen.key.mainloop == REALIGNED
    assert not chosen.formulation.copies


@pytest.mark.parametrize("layouts", ["rcr", "rrr"])
def test_the_choice_is_the_first_of_all(layouts: str) -> None:
    """A kernel whose lower bound were above its estimate would be passed over."""
    source = random.Random(layouts)
    for _ in range(200):
        m, n, k = (int(2 ** source.uniform(0, 13)) for _ in range(3))
        search = GemmSearch(dense(m, n, k, layouts), H200)
        ranked = select.rank(search)
        assert select.first(search) == ranked[0], (m, n, k)


def test_estimates_know_addresses_and_batches_that_begin_between_vectors() -> None:
    """Aligned rows that follow an address, or batches, which are not aligned, are shifted as odd rows are."""
    whole = dense(512, 512, 512, "rcr")
    moved = dataclasses.replace(whole, b=dataclasses.replace(whole.b, alignment=2))
    assert {each.extents[8:] for each in formulations(whole)} == {()}
    assert {(each.swapped, each.extents[8:]) for each in formulations(moved)} == {
        (False, (0, 0, 8, 1)),
        (True, (0, 0, 1, 8)),
    }
    batch = MatrixSpec((3, 512, 512), (512 * 512, 512, 1), D.BF16, 16)
    apart = MatrixSpec((3, 512, 512), (512 * 512 + 2, 512, 1), D.BF16, 16)
    batches = dataclasses.replace(whole, a=apart, b=batch, d=batch)
    assert {each.extents[8:] for each in formulations(batches) if not each.swapped} == {(0, 0, 2, 8)}
    kernel = estimate.kernel_of(gemm_realigned_sm90.cell(SmArch.SM90A, D.BF16, "rc"))
    large = (2048, 2048, 2048, 1, 2048, 2048, 0, 0)
    plain, between = (
        estimate.model.launch(kernel, extents, H200, 0, 1).seconds for extents in (large, (*large, 0, 0, 8, 1))
    )
    assert between > plain


def test_more_batches_than_a_grid_has_are_several_launches() -> None:
    batch = MatrixSpec((70_000, 17, 17), (289, 17, 1), D.F16, 2)
    problem = dataclasses.replace(dense(17, 17, 17, "rrr", D.F16), a=batch, b=batch, d=batch)
    ranked = select.rank(GemmSearch(problem, H200))
    found = next(each for each in ranked if each.key.mainloop == REALIGNED)
    assert 0 < found.seconds < 1
    assert plans.most_batches(found.key) == 65_535


def test_large_products_are_copied() -> None:
    chosen = select.choose(GemmSearch(dense(2001, 3001, 1001), H200), backend="prebuilt")
    assert chosen.formulation.copies


def test_a_long_k_is_divided() -> None:
    chosen = select.choose(GemmSearch(dense(60, 61, 20_001), H200), backend="prebuilt")
    assert chosen.key.mainloop == UNALIGNED
    assert chosen.split_k > 8


@both
def test_launches_are_every_width_and_division(mainloop: str) -> None:
    search = GemmSearch(dense(200, 201, 2001), H200)
    found = next(each for each in select.rank(search) if each.key.mainloop == mainloop)
    launches = {(each.split_k, each.width) for each in search.launches(found)}
    assert {width for _, width in launches} == set(FAMILIES[mainloop].WIDTHS)
    assert {split for split, _ in launches} >= {1, 2, 4, 8, 16}


def test_batch_invariant_calls_are_served_by_others() -> None:
    ranked = select.rank(GemmSearch(dense(97, 97, 97), H200, batch_invariant=True))
    assert ranked
    assert not {each.key.mainloop for each in ranked} & set(FAMILIES)
