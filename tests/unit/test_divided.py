"""GEMMs whose K is divided into slices that another kernel adds up: when, in how many, and by which launches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import KernelNotFoundError, SmArch
from atomr_cutlass.arrays.layouts import MatrixSpec, row_major
from atomr_cutlass.generator.families import gemm_sm80, gemm_sm90
from atomr_cutlass.generator.families.cast import cast
from atomr_cutlass.generator.key import KernelKey, shared_memory, turned_layouts
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.conv2d.problem import FPROP, ConvProblem, conv_geometry
from atomr_cutlass.ops.gemm import helpers, plans
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.ops.gemm.problem import GemmFormulation, GemmProblem
from atomr_cutlass.pipeline import devices, estimate, planning, select
from atomr_cutlass.pipeline.plan import NO_PRODUCT, PRODUCT, Steps
from atomr_cutlass.pipeline.planning import PlanOptions
from atomr_cutlass.pipeline.search import Candidate
from fake_table import A100, H200
from gemm_problems import dense

CELLS = [key for _, key in cells([SmArch.SM90A]) if gemm_sm90.divides(key)]
SIMT_CELLS = [key for _, key in cells([SmArch.SM90A]) if gemm_sm80.divides(key) and key.layout_a == "r"]
"""Of IEEE f32 and f64."""


def served(key: KernelKey, problem: GemmProblem) -> list[GemmFormulation]:
    search = GemmSearch(problem, H200)
    return [formulation for formulation in helpers.divided(problem) if search.supports(key, formulation)]


def first_divided(problem: GemmProblem) -> Candidate[GemmFormulation]:
    ranked = select.rank(GemmSearch(problem, H200))
    return next(candidate for candidate in ranked if candidate.formulation.divided)


def chosen(problem: GemmProblem, device: Any = H200, **how: Any) -> Candidate[GemmFormulation]:
    return select.choose(GemmSearch(problem, device, **how), backend="prebuilt")


def test_the_matrix_has_kernels_for_the_common_layouts() -> None:
    assert CELLS
    for layouts in ("rcr", "rrr"):
        for dtype in (D.BF16, D.F16):
            assert any(served(key, dense(267, 656, 16352, layouts, dtype)) for key in CELLS)


@pytest.mark.parametrize(
    "problem",
    [
        dense(267, 656, 512),
        dense(4096, 4096, 4096),
        dense(267, 656, 16352, dtype=D.F32),
        dense(267, 656, 16352, alignment=2),
        dense(267, 656, 16352, strides=(664, 1)),
        dataclasses.replace(dense(267, 656, 16352), epilogue="scaled", quantized=True),
        dataclasses.replace(dense(267, 656, 16352), c=MatrixSpec((267, 656), (664, 1), D.BF16)),
        GemmProblem(
            a=MatrixSpec((2, 64, 4096), (64 * 4096, 4096, 1), D.BF16),
            b=MatrixSpec((2, 4096, 64), (64 * 4096, 1, 4096), D.BF16),
            c=None,
            d=MatrixSpec((2, 64, 64), (4096, 64, 1), D.BF16),
            math="default",
            device=0,
        ),
    ],
    ids=["short", "many results", "f32", "unaligned", "gaps", "scale_d", "another c", "batches"],
)
def test_what_is_not_divided(problem: GemmProblem) -> None:
    assert helpers.divided(problem) == []


def test_tf32_and_fp8_with_scales_are_divided() -> None:
    for layouts in ("rcr", "rrr"):
        problem = dense(141, 848, 1664, layouts, D.F32, math="tf32")
        assert any(served(key, problem) for key in CELLS)
        first = GemmSearch(problem, H200).formulations[0]
        assert any(formulation.divided for formulation in first if formulation.copies) is (layouts == "rrr")
    scaled = dataclasses.replace(dense(31, 128, 8192, dtype=D.F8E4M3), epilogue="scaled")
    scaled = dataclasses.replace(scaled, d=dataclasses.replace(scaled.d, dtype=D.BF16))
    assert any(served(key, scaled) for key in CELLS)
    assert helpers.divided(dataclasses.replace(scaled, quantized=True)) == []


@pytest.mark.parametrize("layout", ["r", "c"])
def test_sums_lie_as_the_result_does(layout: str) -> None:
    found = helpers.divided(dense(264, 656, 16352, f"rc{layout}", c=True))
    assert found
    for formulation in found:
        assert formulation.divided
        assert formulation.dtype_d is D.F32
        assert formulation.problem.d.dtype is D.BF16
        assert formulation.ldd == (656 if layout == "r" else 264)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 131072), (267, 656, 16352), (343, 672, 7520), (512, 512, 1032)])
def test_slices_cover_every_step_and_fill_waves(key: KernelKey, m: int, n: int, k: int) -> None:
    layouts = key.layout_a + key.layout_b + key.layout_d
    covers(key, dense(m + -m % 8, n, k, turned_layouts(layouts) if key.layout_d == "c" else layouts))


@pytest.mark.parametrize("key", SIMT_CELLS, ids=lambda key: key.name)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 1024, 8192), (128, 128, 131072), (267, 656, 16352), (343, 672, 7520)])
def test_so_do_those_of_f32_and_f64(key: KernelKey, m: int, n: int, k: int) -> None:
    covers(key, dense(m, n, k, f"{key.layout_a}{key.layout_b}r", key.a, math=key.math))


def covers(key: KernelKey, problem: GemmProblem) -> None:
    k = problem.k
    for formulation in served(key, problem):
        steps = math.ceil(k / key.tile[2])
        found = estimate.slices(key, formulation.extents, H200)
        assert found
        assert len(found) <= 1 + estimate.model.constants["DIVIDED_WAVES"]
        bound = estimate.model.bound(estimate.kernel_of(key), formulation.extents, H200)
        for count in found:
            per = math.ceil(steps / count)
            assert count > 1
            assert per * (count - 1) < steps <= per * count
            assert per >= estimate.model.constants["DIVIDED_STEPS"]
            assert 4 * count * formulation.m * formulation.n <= estimate.DIVIDED_MOST_BYTES
            made = estimate.launch(key, formulation.extents, H200, shared_memory(key), count)
            assert made.split_k == count
            assert bound <= made.seconds


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (1024, 1024, 1024), (8, 4096, 4096)])
def test_results_that_fill_the_gpu_and_few_rows_are_not_divided(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int
) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    assert not chosen(dense(m, n, k)).formulation.divided


@pytest.mark.parametrize("layouts", ["rcr", "rrr"])
def test_few_tiles_of_long_k_are(monkeypatch: pytest.MonkeyPatch, layouts: str) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    found = chosen(dense(267, 656, 16352, layouts))
    assert found.formulation.divided
    assert found.split_k > 1
    search = GemmSearch(dense(267, 656, 16352, layouts), H200)
    assert search.note(found.formulation) == "K is divided into slices, which another kernel adds up"
    # Not without the kernel that adds up, and not where rows must have the same bits whatever their number.
    rows = [row for row in fake_table.rows_of(archs=[SmArch.SM90A]) if row.key.op != "cast"]
    fake_table.install(monkeypatch, rows)
    assert not chosen(dense(267, 656, 16352, layouts)).formulation.divided
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    # Slices that depend on the number of rows are not for batch-invariant calls.
    invariant = GemmSearch(dense(267, 656, 16352, layouts), H200, batch_invariant=True)
    assert all(of.slices for group in invariant.formulations for of in group if of.divided)


def test_older_gpus_and_convolutions_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM80]))
    assert not chosen(dense(267, 656, 16352), A100).formulation.divided
    geometry = conv_geometry((1, 8, 8, 4096), (64, 1, 1, 4096))
    x, w, y = (
        MatrixSpec(shape, row_major(shape), D.BF16, 256)
        for shape in (geometry.x_shape, geometry.w_shape, geometry.y_shape)
    )
    problem = ConvProblem(
        op=FPROP, geometry=geometry, a=x, b=w, c=None, d=y, bias=None, activation=None, math="default", device=0
    )
    search = ConvSearch(problem, H200)
    every = itertools.chain(*search.formulations)
    products = [formulation.product for formulation in every if formulation.product is not None]
    assert products
    assert not any(product.divided for product in products)


@pytest.mark.parametrize("layouts", ["rcr", "rrr"])
@pytest.mark.parametrize(("dtype", "math"), [(D.F32, "ieee"), (D.F64, "default")])
def test_few_tiles_of_f32_and_f64_are(monkeypatch: pytest.MonkeyPatch, layouts: str, dtype: D, math: str) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    found = chosen(dense(24, 1240, 16352, layouts, dtype, math=math))
    assert found.formulation.divided
    assert found.formulation.dtype_d is dtype
    assert found.split_k > 1
    assert gemm_sm80.divides(found.key)
    assert helpers.sums(dtype, dtype, H200).make(SmArch.SM90A) == cast(SmArch.SM90A, dtype, dtype)
    assert not chosen(dense(4096, 4096, 4096, layouts, dtype, math=math)).formulation.divided


def test_on_other_archs_slices_of_f32_take_turns() -> None:
    assert not any(gemm_sm80.divides(key) for _, key in cells([SmArch.SM80, SmArch.SM100, SmArch.SM120]))


@pytest.mark.parametrize(("dtype", "size"), [(D.F32, 4), (D.F64, 8)])
def test_their_slices_take_as_many_bytes(monkeypatch: pytest.MonkeyPatch, dtype: D, size: int) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    monkeypatch.setattr(plans, "Steps", Noted)
    monkeypatch.setattr(devices, "get", lambda _: H200)
    problem = dense(24, 1240, 16352, "rcr", dtype, math="ieee" if dtype is D.F32 else "default")
    candidate = first_divided(problem)
    _, temporaries, zeros, _ = from_candidate(problem, candidate)  # type: ignore[misc]
    assert temporaries == [size * 24 * 1240 * candidate.split_k]
    assert zeros == size * 24 * 1240


@pytest.mark.parametrize(("dtype", "vector"), [(D.F32, 4), (D.F64, 2)])
def test_slices_of_an_odd_number_of_results_begin_at_whole_vectors(
    monkeypatch: pytest.MonkeyPatch, dtype: D, vector: int
) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    monkeypatch.setattr(plans, "Steps", Noted)
    monkeypatch.setattr(devices, "get", lambda _: H200)
    for m, n, stride in ((1, 1, vector), (33, 7, 232), (129, 33, 4260 if dtype is D.F32 else 4258)):
        problem = dense(m, n, 16353, "rcr", dtype, math="ieee" if dtype is D.F32 else "default")
        candidate = first_divided(problem)
        steps, temporaries, zeros, _ = from_candidate(problem, candidate)  # type: ignore[misc]
        product, adding, _ = [step for step in steps if step[0] in ("gemm", "cast")]
        assert product[1]["batch_stride_d"] == adding[1]["slice_stride"] == stride
        assert adding[1]["count"] == m * n
        assert dtype.bits // 8 * stride * candidate.split_k in temporaries
        assert zeros == dtype.bits // 8 * m * n


def test_a_limit_of_workspace_takes_a_kernel_that_needs_no_adder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slice and an adder would be slower than any other kernel of the table."""
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    search = GemmSearch(dense(512, 512, 16384), H200)
    best = select.first(search)
    assert best is not None
    assert best.formulation.divided
    others = list(planning._others(search, best, "auto"))
    assert not others[0].formulation.divided
    assert others[0].seconds == min(candidate.seconds for candidate in others if not candidate.formulation.divided)
    assert [candidate.formulation.divided for candidate in others].index(True) == len(others) - 1
    assert others[-1].split_k == 1


def test_the_adder_is_had_as_the_plan_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jit=` of a call counts before the environment for helpers too."""
    monkeypatch.setattr(plans, "Steps", Noted)
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "off")
    fake_table.install(monkeypatch, [])
    problem = dense(264, 656, 16352)
    found = select.choose(GemmSearch(problem, H200), jit="auto")
    assert found.formulation.divided
    monkeypatch.setattr(devices, "get", lambda _device: H200)
    with pytest.raises(KernelNotFoundError, match="must not be compiled"):
        from_candidate(problem, found)
    assert from_candidate(problem, found, PlanOptions(jit="auto"))


class Noted(Steps):
    """Steps that are kept, and no plan."""

    made: list[tuple[str, dict[str, Any], str]]

    def launch(self, candidate: Any, args: Any, *, main: bool = False, when: str = "always") -> None:
        del main
        self.noted.append((candidate.key.op, dict(args), when))

    def plan(self, **options: Any) -> Any:
        return self.noted, self._temporaries, self._zeros, options

    def __init__(self, device: int, stream: int | None = None) -> None:
        super().__init__(device, stream)
        self.noted: list[tuple[str, dict[str, Any], str]] = []


@pytest.mark.parametrize("layouts", ["rcr", "rrr", "rcc"])
def test_launches(monkeypatch: pytest.MonkeyPatch, layouts: str) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of(archs=[SmArch.SM90A]))
    monkeypatch.setattr(plans, "Steps", Noted)
    monkeypatch.setattr(devices, "get", lambda _: H200)
    problem = dense(264, 656, 16352, layouts, c=True)
    candidate = first_divided(problem)
    made = from_candidate(problem, candidate, PlanOptions(alpha=2.0))
    (product, adding, nothing), temporaries, zeros, _ = made  # type: ignore[misc]
    count = 264 * 656
    assert temporaries == [4 * count * candidate.split_k]
    assert zeros == 4 * count
    assert [step[0] for step in (product, adding, nothing)] == ["gemm", "cast", "cast"]
    assert [step[2] for step in (product, adding, nothing)] == [PRODUCT, PRODUCT, NO_PRODUCT]
    assert product[1] | {"alpha": 1.0, "beta": 0.0, "batch": 1, "batch_stride_d": count} == product[1]
    assert product[1]["split_k"] == candidate.split_k > 1
    assert product[1]["d"] == adding[1]["a"]
    assert adding[1]["slices"] == candidate.split_k
    assert adding[1]["slice_stride"] == count
    assert (adding[1]["alpha"], adding[1]["beta"]) == ("alpha", "beta")
    assert nothing[1]["a"][0] == "zeros"
    assert helpers.sums(D.F32, D.BF16, H200).make(SmArch.SM90A) == cast(SmArch.SM90A, D.F32, D.BF16)
