"""Transposed copies of operands: which products have them, and what is launched."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

import fake_cases
import fake_table
import golden_gpu
import transposed_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, UnsupportedError, _core
from atomr_cutlass.generator.families.transpose import padded, transpose
from atomr_cutlass.generator.matrix import cells, supports
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate, make
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.planning import PlanOptions
from atomr_cutlass.pipeline.reduction import reduction_of
from fake_table import A100, H200
from gemm_problems import dense

CASES_FILE = "transposed_cases.py"


def product(m: int, n: int, k: int, layouts: str = "rr", dtype: D = D.F32, math: str = "tf32") -> GemmProblem:
    made = dense(m, n, k, f"{layouts}r", dtype, math=math)
    return replace(made, d=replace(made.d, dtype=D.I32 if dtype is D.I8 else D.F32))


def copies_of(search: GemmSearch) -> set[str]:
    """The operands that formulations copy, `padded` where not transposed."""
    copies = (copy for group in search.formulations for formulation in group for copy in formulation.copies)
    return {copy.operand if copy.transposed else f"{copy.operand} padded" for copy in copies}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome(CASES_FILE, tmp_path_factory.mktemp("gpu"), transposed_cases.ARCH, 120)


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


def test_kernels_are_of_three_widths() -> None:
    keys = {key for _, key in cells([SmArch.SM90A]) if key.op == "transpose"}
    assert keys == {*(transpose(SmArch.SM90A, dtype) for dtype in (D.I8, D.BF16, D.F32)), padded(SmArch.SM90A, D.F16)}
    assert transpose(SmArch.SM90A, D.F8E4M3) in keys
    assert not supports(padded(SmArch.SM90A, D.F32))
    assert all(supports(key) for key in keys)
    assert not [key for _, key in cells([SmArch.SM80, SmArch.SM100]) if key.op == "transpose"]


@pytest.mark.parametrize("math", ["ieee", "tf32"])
@pytest.mark.parametrize(("k", "alignment"), [(1028, 4), (1030, 2), (1029, 1)])
def test_a_copy_is_as_aligned_as_k_is(math: str, k: int, alignment: int) -> None:
    """Kernels ask K itself to be a multiple of what they load at once along it, whatever follows a row."""
    every = itertools.chain.from_iterable(GemmSearch(product(512, 516, k, "cr", math=math), H200).formulations)
    found = [formulation for formulation in every if formulation.copies]
    assert found
    for formulation in found:
        assert (formulation.align_a if formulation.layout_a == "r" else formulation.align_b) == alignment


@pytest.mark.parametrize(
    ("dtype", "math", "layouts", "copied"),
    [
        (D.F32, "tf32", "rr", {"b"}),
        (D.F32, "tf32", "cc", {"a"}),
        (D.F32, "tf32", "rc", set()),
        (D.F32, "tf32", "cr", {"a", "b"}),
        (D.F32, "ieee", "rr", set()),
        (D.F32, "ieee", "cr", {"a"}),
        (D.F32, "ieee", "rc", set()),
        (D.F32, "ieee", "cc", {"a"}),
        (D.I8, "default", "rr", {"b"}),
        (D.I8, "default", "cr", set()),
        (D.F8E5M2, "fast", "rr", {"b"}),
        (D.BF16, "default", "rr", set()),
    ],
)
def test_what_lies_in_a_layout_that_serves_less_may_be_copied(
    dtype: D, math: str, layouts: str, copied: set[str]
) -> None:
    problem = product(256, 512, 128, layouts, dtype, math)
    assert copies_of(GemmSearch(problem, H200)) == copied
    assert not copies_of(GemmSearch(problem, A100))


def test_copies_for_kernels_without_vectors_are_of_any_width() -> None:
    """Those of K that is no multiple of four; N is none either, and vectors of the copy would not end with its rows."""
    search = GemmSearch(product(256, 513, 130, "rc", D.F32, "ieee"), H200)
    found = [formulation for group in search.formulations for formulation in group if formulation.copies]
    assert [([copy.operand for copy in each.copies], each.align_b) for each in found] == [(["b"], 1)]


def test_small_products_of_ieee_f32_are_not_worth_a_copy() -> None:
    assert not copies_of(GemmSearch(product(64, 96, 128, "rc", D.F32, "ieee"), H200))


@pytest.mark.parametrize(
    ("extents", "layouts", "copied"),
    [
        ((128, 512, 512), "cr", {"a"}),
        ((64, 512, 512), "cc", {"a"}),
        ((512, 64, 512), "rr", {"b"}),
        ((64, 512, 512), "rr", set()),
        ((512, 64, 512), "cr", set()),
        ((136, 512, 512), "cr", set()),
        ((512, 136, 512), "rr", set()),
        ((64, 512, 517), "cr", set()),
    ],
)
def test_few_rows_that_are_not_contiguous_along_k_are_copied(
    extents: tuple[int, int, int], layouts: str, copied: set[str]
) -> None:
    """Kernels for few rows or columns of D read the few along K; both operands are aligned for TMA."""
    for dtype in (D.BF16, D.F16):
        search = GemmSearch(product(*extents, layouts, dtype, "default"), H200)
        assert copies_of(search) == copied
        chosen = select.rank_cells(search)[0]
        assert bool(chosen.formulation.copies) == (chosen.key.mainloop == FEW and bool(copied))


@pytest.mark.parametrize(
    ("extents", "layouts", "copied"),
    [
        ((64, 97, 128), "rr", {"b"}),
        ((64, 97, 128), "rc", set()),
        ((64, 97, 129), "rr", {"a padded", "b"}),
        ((64, 97, 129), "rc", {"a padded", "b padded"}),
        ((64, 96, 129), "rr", {"a padded", "b"}),
        ((65, 96, 128), "cr", {"a"}),
        ((65, 96, 128), "cc", {"a"}),
        ((65, 97, 128), "cr", {"a", "b"}),
        ((64, 96, 129), "cr", set()),
    ],
)
def test_rows_of_odd_length_are_copied(extents: tuple[int, int, int], layouts: str, copied: set[str]) -> None:
    """Transposed where the copy is contiguous along K then, else with padded rows."""
    for dtype in (D.BF16, D.F16):
        search = GemmSearch(product(*extents, layouts, dtype, "default"), H200)
        assert copies_of(search) == copied
        found = [each for group in search.formulations for each in group if each.copies]
        assert {(formulation.align_a, formulation.align_b) for formulation in found} <= {(8, 8)}


@pytest.mark.parametrize(
    ("m", "n", "k", "layouts", "copied"),
    [
        (1290, 15812, 7571, "rcr", {"a": False, "b": False}),
        (4397, 1815, 13507, "rrr", {"a": False, "b": True}),
        (1091, 2136, 1241, "rrr", {"a": False, "b": True}),
        (1511, 2021, 58797, "rcr", {"a": False, "b": False}),
        (1561, 8204, 1929, "rrr", {"a": False, "b": True}),
        (1140, 1858, 30835, "rcr", {"a": False, "b": False}),
    ],
)
def test_operands_of_odd_k_are_copied(
    m: int, n: int, k: int, layouts: str, copied: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`copied`: which of them, and whether transposed. K of kernels is that of the copies, whole vectors."""
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    found = select.choose(GemmSearch(dense(m, n, k, layouts, D.BF16), H200), backend="prebuilt")
    assert found.formulation.k == math.ceil(k / 8) * 8
    assert {copy.operand: copy.transposed for copy in found.formulation.copies} == copied
    assert found.key.generation == "sm90"


@pytest.mark.parametrize(
    ("m", "n", "k", "copied"), [(4096, 2049, 2048, True), (1308, 1049, 8016, True), (7, 22113, 1632, False)]
)
def test_products_of_odd_rows_have_copies_where_that_is_faster(
    m: int, n: int, k: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    found = select.choose(GemmSearch(dense(m, n, k, "rrr", D.BF16), H200))
    assert bool(found.formulation.copies) is copied
    assert (found.key.generation == "sm90") is copied


@pytest.mark.parametrize(("k", "copied"), [(65535 * 64, True), (65535 * 64 + 4, False)])
def test_k_that_no_grid_covers_is_not_copied(k: int, copied: bool) -> None:
    assert bool(copies_of(GemmSearch(product(64, 64, k), H200))) is copied


def test_batch_invariant_kernels_need_no_helper_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """`default` has kernels for operands along K, and none that copies others: rows of such have another reduction."""
    fake_table.install(monkeypatch, fake_table.rows_of("default", [SmArch.SM80, SmArch.SM90A]))
    found = select.choose(GemmSearch(product(4096, 4096, 4096), H200, batch_invariant=True), backend="prebuilt")
    assert not found.formulation.copies
    assert found.info is not None
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    found = select.choose(GemmSearch(product(8192, 256, 2048), H200, batch_invariant=True), backend="prebuilt")
    assert found.formulation.copies


def test_a_copy_that_has_to_be_compiled_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in fake_table.rows_of("full", [SmArch.SM90A]) if row.key.op != "transpose"]
    fake_table.install(monkeypatch, rows)
    monkeypatch.setattr(_core, "capturing", lambda _device, stream: stream == 7, raising=False)
    problem = product(512, 512, 512, "cc", D.I8, "default")

    monkeypatch.setattr(devices, "get", lambda _: H200)
    refused = pytest.raises(
        UnsupportedError, match=r"cutlass_transpose_.* is compiled at run time, and such plans cannot"
    )
    with refused:
        make(problem, stream=7)
    with refused:
        from_candidate(problem, select.choose(GemmSearch(problem, H200)), PlanOptions(stream=7))


@pytest.mark.parametrize("layouts", ["ccr", "crr"])
@pytest.mark.parametrize("dtype", [D.BF16, D.F16])
def test_batch_invariant_calls_copy_nothing_for_few_rows(
    layouts: str, dtype: D, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reduction is the same for all numbers of rows."""
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    found = set()
    for m in (8, 64, 128, 136, 200, 4096):
        search = GemmSearch(dense(m, 80, 1024, layouts, dtype), H200, batch_invariant=True)
        chosen = select.choose(search)
        assert not chosen.formulation.copies
        found.add(reduction_of(chosen.key))
    assert len(found) == 1


def test_padded_copies_beyond_the_limit_of_their_kernel_are_not_made() -> None:
    assert copies_of(GemmSearch(product(2097152, 256, 4089, "rr", D.BF16, "default"), H200)) == {"a padded", "b"}
    assert not copies_of(GemmSearch(product(2097152, 256, 8185, "rr", D.BF16, "default"), H200))
