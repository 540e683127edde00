"""Batch invariance: one reduction serves a problem for every number of rows, and is refused where none can."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import fake_table
import golden_gpu
from atomr_cutlass import (
    ConvDgradRequest,
    ConvFwdRequest,
    ConvShape,
    ConvWgradRequest,
    GemmLayout,
    GemmRequest,
    GemmShape,
    SmArch,
)
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator.key import ANYWHERE
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.generator.rules import FEW, SLICED, SPLIT
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.gemm.kernels import IN_ORDER, GemmSearch
from atomr_cutlass.ops.gemm.operation import GemmOperation
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import planning, reduction, select, tuning
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.reduction import VARIABLE, reduction_of
from fake_table import A100, H200

ROWS = (1, 2, 17, 128, 129, 4096)
COLUMN, ROW = GemmLayout.COL_MAJOR, GemmLayout.ROW_MAJOR


@pytest.fixture(autouse=True)
def _full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of())


def search_of(device: Device = H200, **given: Any) -> GemmSearch:
    request = GemmRequest(batch_invariant=True, **given)
    search = GemmOperation().search(request, device)
    assert search is not None
    return search


def reductions(device: Device = H200, **given: Any) -> set[Any]:
    """Those of the kernels chosen for every number of rows."""
    found = set()
    for rows in ROWS:
        m, n, k = given["shape"]
        search = search_of(device, **{**given, "shape": GemmShape(rows if m is None else m, n, k)})
        ranked = select.rank(search)
        assert ranked
        assert all(candidate.split_k == 1 for candidate in ranked)
        found |= {reduction_of(candidate.key) for candidate in ranked}
    return found


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("layout_b", [ROW, COLUMN])
@pytest.mark.parametrize("dtype", [D.BF16, D.F16, D.F32, D.TF32, D.F64, D.I8])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (77, 99), (1, 64)])
def test_one_reduction_serves_every_number_of_rows(
    device: Device, layout_b: GemmLayout, dtype: D, n: int, k: int
) -> None:
    if dtype is D.I8 and layout_b is ROW:
        return
    (found,) = reductions(device, shape=(None, n, k), dtype=dtype, layout_b=layout_b)
    assert found is not None
    aligned = n % 8 == k % 8 == 0 and device is H200 and dtype in (D.BF16, D.F16)
    assert found.generation == "sm90" if aligned else True


@pytest.mark.parametrize("layout_b", [ROW, COLUMN])
@pytest.mark.parametrize("dtype", [D.BF16, D.F32, D.TF32, D.I8])
@pytest.mark.parametrize(("n", "k"), [(512, 512), (516, 516), (4096, 4096)])
def test_copies_are_made_for_every_number_of_rows_or_none(dtype: D, layout_b: GemmLayout, n: int, k: int) -> None:
    """Of a column-major A, of which many rows are worth a copy and few are not."""
    found = set()
    for rows in (16, 64, 128, 512, 4096):
        search = search_of(shape=GemmShape(rows, n, k), dtype=dtype, layout_a=COLUMN, layout_b=layout_b)
        found |= {select.reduction(search), *(reduction_of(candidate.key) for candidate in select.rank(search))}
    assert len(found) == 1


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("scaling", [None, "tensor", "vector", "block"])
def test_fp8(scaling: str | None, fast_accum: bool) -> None:
    (found,) = reductions(
        shape=(None, 2048, 1024), dtype=D.F8E4M3, layout_b=COLUMN, scaling=scaling, fast_accum=fast_accum
    )
    assert found.math == ("fast" if fast_accum and scaling != "block" else "default")


LONG = {"dtype": D.BF16, "layout_b": COLUMN}


@pytest.mark.parametrize("layout_b", [ROW, COLUMN])
@pytest.mark.parametrize("dtype", [D.BF16, D.F16])
@pytest.mark.parametrize(("n", "k"), [(256, 7168), (512, 16384), (64, 65536), (8, 3072)])
def test_long_k_has_the_same_slices_for_every_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: D, layout_b: GemmLayout, n: int, k: int
) -> None:
    rank = select.rank
    if dtype is D.F16:  # which are compiled
        fake_table.install(monkeypatch, [])
        rank = select.rank_cells
    found, one_by_one, side_by_side = set(), set(), set()
    for rows in (*ROWS, 10**6):
        search = search_of(shape=GemmShape(rows, n, k), dtype=dtype, layout_b=layout_b)
        for each in rank(search):
            launches = (each, *search.launches(each))
            found |= {(select.reduction(search), launch.split_k, reduction_of(launch.key)) for launch in launches}
            (one_by_one if each.key.scheduler == SLICED else side_by_side).add(rows)
    ((wanted, slices, own),) = found
    assert wanted == own._replace(slices=wanted.slices)
    # Slices are whole steps, so that fewer may come to K.
    assert 4 <= slices <= wanted.slices
    assert one_by_one == {*ROWS, 10**6}
    assert {1, 2, 17, 128} <= side_by_side <= {*ROWS}


@pytest.mark.parametrize(
    "given",
    [
        {"shape": GemmShape(64, 520, 65536)},
        {"shape": GemmShape(64, 256, 3064)},
        {"shape": GemmShape(64, 512, 16384), "epilogue": ac.GemmEpilogue(bias=True)},
        {"shape": GemmShape(64, 256, 16384), "out_dtype": D.F32},
        {"shape": GemmShape(64, 260, 16384)},
        {"shape": GemmShape(64, 256, 16384), "dtype": D.TF32},
        {"shape": GemmShape(64, 256, 16384), "dtype": D.F8E4M3},
    ],
    ids=["wide", "short", "bias", "results in f32", "unaligned", "tf32", "e4m3"],
)
def test_what_is_added_up_whole(given: dict[str, Any]) -> None:
    wanted = select.reduction(search_of(**{**LONG, **given}))
    assert wanted is not None
    assert wanted.slices == 1


def test_slices_are_those_of_a_single_row_of_batches_and_of_any_result() -> None:
    def of(shape: GemmShape, **given: Any) -> Any:
        return select.reduction(search_of(shape=shape, **{**LONG, **given}))

    def padded(rows: int, gap_c: int, gap_d: int) -> Any:
        a, b = MatrixSpec((rows, 8192), (8192, 1), D.BF16, 256), MatrixSpec((8192, 256), (1, 8192), D.BF16, 256)
        # An array of one row has a stride of 0 between rows.
        c, d = (MatrixSpec((rows, 256), ((256 + gap) * (rows > 1), 1), D.BF16, 256) for gap in (gap_c, gap_d))
        search = GemmSearch(GemmProblem(a, b, c, d, "default", 0), H200, batch_invariant=True)
        assert select.rank(search)
        return select.reduction(search)

    found = {of(GemmShape(m, 256, 8192, batch)) for m in ROWS for batch in (1, 3)}
    for layout_b in (ROW, COLUMN):
        found |= {of(GemmShape(m, 256, 8192), layout_b=layout_b, layout_c=COLUMN) for m in (1, 8, 64, 4096)}
    found |= {padded(rows, *gaps) for rows in (1, 2, 300) for gaps in ((0, 0), (8, 0), (0, 8))}
    found |= {of(GemmShape(m, 256, 8192), layout_a=COLUMN) for m in (1, 2, 7, 8, 64, 4096)}
    (wanted,) = found
    assert wanted.slices > 1


def test_a_row_that_no_kernel_of_slices_takes_is_added_up_whole() -> None:
    """Of a column-major D, whose rows are not aligned where there is but one."""
    a, b = MatrixSpec((1, 8192), (8192, 1), D.BF16, 256), MatrixSpec((8192, 256), (1, 8192), D.BF16, 256)
    d = MatrixSpec((1, 256), (0, 1024), D.BF16, 256)
    search = GemmSearch(GemmProblem(a, b, None, d, "default", 0), H200, batch_invariant=True)
    assert select.choose(search).split_k == 1
    assert select.reduction(search).slices == 1


def test_a_limit_of_workspace_is_met_by_slices_one_after_the_other() -> None:
    """Beside a copied operand, too."""
    for lda in (8192, 8193):
        a, b = MatrixSpec((64, 8192), (lda, 1), D.BF16, 256), MatrixSpec((8192, 256), (1, 8192), D.BF16, 256)
        d = MatrixSpec((64, 256), (256, 1), D.BF16, 256)
        search = GemmSearch(GemmProblem(a, b, None, d, "default", 0), H200, batch_invariant=True)
        best = select.choose(search)
        assert best.formulation.divided
        others = list(planning._others(search, best, "auto"))
        assert {other.split_k for other in others} == {best.split_k}
        assert not others[0].formulation.divided


def test_many_rows_are_not_computed_side_by_side() -> None:
    """Whose sums would take more time than the product."""
    for m in (1, 64, 8192):
        best = select.rank(search_of(shape=GemmShape(m, 512, 7168), **LONG))[0]
        assert best.formulation.divided == (m < 8192)


def test_without_kernels_that_add_up_slices_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, [row for row in fake_table.rows_of() if row.key.scheduler != SLICED])
    searches = [search_of(shape=GemmShape(m, 256, 16384), **LONG) for m in ROWS]
    found = {select.reduction(search) for search in searches}
    assert [wanted.slices for wanted in found if wanted is not None] == [1]
    assert {each.split_k for search in searches for each in select.rank(search)} == {1}


def test_a_named_kernel_and_a_tuned_record_keep_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that would compute K whole is passed over."""
    whole = select.rank(search_of(shape=GemmShape(64, 512, 1024), **LONG))[0].key
    search = search_of(shape=GemmShape(64, 512, 16384), **LONG)
    search.named = whole
    assert select.choose(search).split_k > 1
    first = next(place for place, of in enumerate(search.formulations[1]) if search.supports(whole, of))
    place, name = len(search.formulations[0]) + first, search.device.name
    record = tuning.TuneRecord(name, "", whole, place, 1, 1, 0, 5.0, whole.name, 5.0, 1)
    monkeypatch.setattr(tuning, "find", lambda *_: record)
    search.named = None
    assert select.choose(search).split_k > 1


def test_epilogues() -> None:
    biased = ac.GemmEpilogue(bias=True, activation="relu")
    for epilogue in (biased, ac.GemmEpilogue(beta=0.5), ac.GemmEpilogue(0.5, activation="silu")):
        assert len(reductions(shape=(None, 2048, 1024), dtype=D.BF16, layout_b=COLUMN, epilogue=epilogue)) == 1


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_kernels_for_few_rows_serve_rows_of_d_that_are_not_aligned(beta: float) -> None:
    """Beside those for many, which store from registers then."""
    given: dict[str, Any] = {"dtype": D.BF16, "layout_b": COLUMN, "epilogue": ac.GemmEpilogue(beta=beta)}
    for rows in (1, 16, 128):
        ranked = select.rank(search_of(shape=GemmShape(rows, 50257, 4096), **given))
        assert {FEW, "pingpong"} <= {candidate.key.mainloop for candidate in ranked}
        assert {candidate.key.epilogue_schedule for candidate in ranked if candidate.key.mainloop != FEW} == {"nosmem"}
    assert len({select.reduction(search_of(shape=GemmShape(rows, 50257, 4096), **given)) for rows in ROWS}) == 1


def test_a_row_of_a_padded_matrix_has_the_reduction_of_several() -> None:
    def chosen(rows: int) -> Any:
        a = MatrixSpec((rows, 1024), (1028, 1), D.BF16, 8)  # a row alone could be read 16 bytes at a time
        b, d = MatrixSpec((1024, 512), (512, 1), D.BF16), MatrixSpec((rows, 512), (512, 1), D.BF16)
        return select.reduction(GemmSearch(GemmProblem(a, b, None, d, "default", 0), H200, batch_invariant=True))

    assert chosen(1) == chosen(2) == chosen(1000)
    strided = MatrixSpec((1, 1024), (1, 512), D.BF16)
    search = GemmSearch(
        GemmProblem(strided, MatrixSpec((1024, 512), (512, 1), D.BF16), None,
                    MatrixSpec((1, 512), (512, 1), D.BF16), "default", 0), H200, batch_invariant=True
    )  # fmt: skip
    assert select.reduction(search) == chosen(2)._replace(generation="sm90", instruction_k=16, tile_k=64, warps_k=1)


IMAGES = (1, 2, 3, 8, 33, 256, 20000)
CONVOLUTIONS: tuple[dict[str, Any], ...] = (
    {"c": 64, "k": 128},
    {"c": 64, "k": 64, "taps": 1},
    {"c": 256, "k": 512, "taps": 1, "side": 7},
    {"c": 3, "k": 64, "taps": 7, "stride": 2},
    {"c": 65, "k": 33},
    {"c": 64, "k": 64, "groups": 4},
    {"c": 32, "k": 32, "groups": 32},
    {"c": 128, "k": 64, "stride": 2},
    {"c": 64, "k": 64, "dtype": D.F8E4M3},
    {"c": 8, "k": 8, "taps": 1, "side": 1},
    {"c": 64, "k": 64, "gap": 64, "on": H200},
    {"c": 64, "k": 64, "taps": 1, "gap": 64, "on": H200},
    {"c": 64, "k": 64, "epilogue": ac.GemmEpilogue(bias=True, activation="relu")},
    {"c": 64, "k": 64, "taps": 1, "epilogue": ac.GemmEpilogue(bias=True, activation="tanh", beta=0.5)},
    {"c": 64, "k": 64, "taps": 1, "epilogue": ac.GemmEpilogue(tree=ac.EvtBuilder().add_matrix("other").build())},
    {"c": 64, "k": 64, "epilogue": ac.GemmEpilogue(tree=ac.EvtBuilder().add_matrix("other").build()), "on": H200},
)


def convolution(device: Device, n: int, kind: Any, given: dict[str, Any]) -> ConvSearch:
    """The kernels for n images, with `gap` elements after each."""
    how = {"taps": 3, "side": 28, "stride": 1, "groups": 1, "dtype": D.BF16, "gap": 0, **given}
    taps, side = how["taps"], how["side"]
    shape = ConvShape.nhwc(
        n, side, side, how["c"], how["k"], taps, taps, stride=how["stride"], padding=taps // 2, groups=how["groups"]
    )
    epilogue = how.get("epilogue", ac.GemmEpilogue())
    request = kind(shape, dtype=how["dtype"], epilogue=epilogue, batch_invariant=True)
    problem = request.problem(0)
    apart = {
        name: dataclasses.replace(spec, strides=(spec.strides[0] + how["gap"], *spec.strides[1:]))
        for name, spec in (("a", problem.a), ("d", problem.d))
    }
    return ConvSearch(dataclasses.replace(problem, **apart), device, batch_invariant=True)


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("kind", [ConvFwdRequest, ConvDgradRequest])
@pytest.mark.parametrize("given", CONVOLUTIONS, ids=str)
def test_one_reduction_serves_every_number_of_images(device: Device, kind: Any, given: dict[str, Any]) -> None:
    if given.get("on", device) is not device:
        return
    settled, found = set(), set()
    for n in IMAGES:
        search = convolution(device, n, kind, given)
        settled.add(select.reduction(search))
        ranked = select.rank(search) or select.rank_cells(search)
        # Offsets of many images are beyond what some kernels count: none of another reduction takes their place.
        assert ranked or n == IMAGES[-1], (n, search.reason())
        found |= {reduction_of(candidate.key) for candidate in ranked}
    assert settled == found
    assert len(found) == 1
    assert None not in found


def test_an_image_is_refused_where_several_like_it_would_be() -> None:
    search = convolution(A100, 1, ConvFwdRequest, {"c": 64, "k": 64, "gap": 64})
    assert not select.rank(search)
    assert "with batch_invariant it has those that serve any number of such images alike" in search.reason()


def test_gradients_of_filters_sum_over_images(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ConvShape.nhwc(2, 8, 8, 64, 64, 3, 3, padding=1)
    with pytest.raises(ac.UnsupportedError, match="batch_invariant: the gradient of a filter is a sum over the pixels"):
        ConvWgradRequest(shape, dtype=D.BF16, batch_invariant=True)
    assert ConvFwdRequest(shape, dtype=D.BF16, batch_invariant=True).plan_key().batch_invariant
    monkeypatch.setenv(VARIABLE, "1")
    assert ConvDgradRequest(shape, dtype=D.BF16).plan_key().batch_invariant
    assert not ConvWgradRequest(shape, dtype=D.BF16).plan_key().batch_invariant


def test_orders_that_depend_on_the_rows_are_none() -> None:
    keys = [key for _, key in cells([SmArch.SM90A]) if key.op == "gemm"]
    unordered = [key for key in keys if reduction_of(key) is None]
    without = {(key.mainloop in (SPLIT, *ANYWHERE), key.scheduler == "streamk") for key in unordered}
    assert without == {(True, False), (False, True)}
    ordered = [key for key in keys if key.generation == "sm80" and key.mainloop not in ANYWHERE]
    assert all(reduction_of(key) is not None for key in ordered)


@pytest.mark.parametrize("layout", [COLUMN, ROW])
def test_kernels_for_few_rows_add_up_in_the_order_of_k(layout: GemmLayout) -> None:
    search = search_of(shape=GemmShape(16, 4096, 4096), dtype=D.BF16, layout_b=layout)
    best = select.rank(search)[0]
    assert best.key.mainloop == FEW
    launches = {(launch.split_k, launch.swizzle) for launch in (best, *search.launches(best))}
    assert launches == {(1, IN_ORDER)}
    usual = GemmRequest(GemmShape(16, 4096, 4096), dtype=D.BF16, layout_b=layout)
    divided = GemmOperation().search(usual, H200)
    assert divided is not None
    assert select.rank(divided)[0].swizzle != IN_ORDER


def test_kernels_for_few_rows_settle_no_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others of the sm80 generation, which serve many rows as well."""
    rows = [row for row in fake_table.rows_of() if row.key.mainloop == FEW or row.key.generation == "sm80"]
    fake_table.install(monkeypatch, rows)
    shapes = [GemmShape(m, 4096, 4096) for m in (16, 512)]
    found = {select.reduction(search_of(shape=shape, dtype=D.BF16, layout_b=COLUMN)) for shape in shapes}
    assert [reduction.generation for reduction in found if reduction is not None] == ["sm80"]


def test_the_matrix_settles_it_where_the_table_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {rows: select.reduction(search_of(shape=GemmShape(rows, 4096, 4096), dtype=D.BF16)) for rows in (1, 4096)}
    fake_table.install(monkeypatch, [])
    for rows, found in built.items():
        search = search_of(shape=GemmShape(rows, 4096, 4096), dtype=D.BF16)
        assert select.reduction(search) == found
        assert {reduction_of(candidate.key) for candidate in select.rank_cells(search)} == {found}


def test_plans_and_tuned_choices_are_not_those_of_other_requests() -> None:
    request = GemmRequest(GemmShape(8, 16, 32), dtype=D.BF16)
    invariant = dataclasses.replace(request, batch_invariant=True)
    assert request.plan_key() != invariant.plan_key()
    assert "batch-invariant" in repr(invariant.plan_key())
    plain, alike = GemmOperation().search(request, H200), GemmOperation().search(invariant, H200)
    assert plain is not None
    assert alike is not None
    assert plain.tuned_problem != alike.tuned_problem
    assert plain.problem == alike.problem


def test_the_environment_decides_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    request = functools.partial(GemmRequest, GemmShape(8, 16, 32), dtype=D.BF16)
    assert request().plan_key().batch_invariant
    assert not request(batch_invariant=False).plan_key().batch_invariant
    monkeypatch.setenv(VARIABLE, "0")
    assert not request().plan_key().batch_invariant
    grouped = ac.GroupedGemmRequest(ac.GroupedGemmShape([GemmShape(8, 16, 32)]), dtype=D.BF16, batch_invariant=True)
    assert grouped.plan_key().batch_invariant


def test_what_is_reduced_is_refused() -> None:
    quantized = GemmRequest(
        GemmShape(64, 64, 64), dtype=D.F8E4M3, layout_b=COLUMN, quantized=True, batch_invariant=True
    )
    with pytest.raises(ac.UnsupportedError, match="amax cannot be batch-invariant"):
        GemmOperation().search(quantized, H200)
    with pytest.raises(ac.InvalidOperandError, match="batch_invariant is 1; expected True or False"):
        GemmRequest(GemmShape(64, 64, 64), dtype=D.BF16, batch_invariant=1)  # type: ignore[arg-type]
    with pytest.raises(ac.UnsupportedError, match="bias, total cannot be batch-invariant"):
        reduction.refuse_sums(["bias", "total"])
    reduction.refuse_sums([])


def test_explain_says_the_reduction() -> None:
    request = GemmRequest(GemmShape(8, 4096, 4096), dtype=D.BF16, arch=SmArch.SM90A, batch_invariant=True)
    notes = " ".join(ac.explain(request, jit="off").notes)
    assert "batch-invariant: 16 elements of K at a time in steps of 64, one after the other" in notes
    other = GemmRequest(GemmShape(8, 4096, 4096), dtype=D.BF16, arch=SmArch.SM90A)
    assert "batch-invariant" not in " ".join(ac.explain(other, jit="off").notes)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome("batch_cases.py", tmp_path_factory.mktemp("gpu"), SmArch.SM90A, 300)


@pytest.mark.parametrize("case", fake_cases.names("batch_cases.py"))
def test_on_a_gpu_that_takes_notes(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
