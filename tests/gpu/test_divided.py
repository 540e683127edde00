"""Every kernel that divides K into slices side by side, with the one that adds them up, against the reference.

A kernel that the table lacks is compiled where ATOMR_CUTLASS_TEST_JIT is set.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED
from atomr_cutlass.generator.families import gemm_sm80, gemm_sm90
from atomr_cutlass.generator.key import COLUMN, flipped
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.planning import PlanOptions
from atomr_cutlass.pipeline.search import ALONG_N, Candidate
from fp8_matrices import Scaling, assert_scaled, guarded, scales, scales_of
from fp8_matrices import placed as fp8_placed
from gpu_matrices import Guarded, assert_launches, assert_product, captured, kernel_info, placed, problem_of

if TYPE_CHECKING:
    from atomr_cutlass.generator.key import KernelKey
    from atomr_cutlass.ops.gemm.problem import GemmFormulation, GemmProblem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

DIVIDING = [key for _, key in cells([SmArch.SM90A]) if gemm_sm90.divides(key)]
CELLS = [key for key in DIVIDING if key.epilogue == LINEAR]
SCALED_CELLS = [key for key in DIVIDING if key.epilogue == SCALED]
SIMT_CELLS = [key for _, key in cells([SmArch.SM90A]) if gemm_sm80.divides(key)]
"""Of IEEE f32 and f64."""

Extents = tuple[int, int, int]
PROBLEMS: tuple[Extents, ...] = (
    (1, 8, 1024),
    (128, 128, 32768),
    (36, 200, 19264),
    (129, 264, 8200),
    (267, 656, 16352),
    (343, 672, 7520),
    (512, 512, 4096),
    (1085, 608, 1032),
)


def drawn(key: KernelKey) -> list[Extents]:
    """Problems of its own for each kernel."""
    rng = random.Random(key.name)
    return [(8 * rng.randint(1, 80), 8 * rng.randint(1, 90), 8 * rng.randint(128, 2000)) for _ in range(6)]


def divided_of(problem: GemmProblem, key: KernelKey) -> GemmFormulation:
    search = GemmSearch(problem, devices.get(0))
    return next(f for group in search.formulations for f in group if f.divided and search.matches(key, f))


def made_for(key: KernelKey, extents: Extents, *, beta: float = 0.0, d: D | None = None) -> tuple[Any, ...]:
    """A function that computes a problem with the kernel, by the number of slices; its operands and its result."""
    m, n, k = extents
    # Kernels of a column-major D compute D^T = B^T A^T of a row-major one.
    turned = key.layout_d == COLUMN
    layout_a, layout_b = (flipped(key.layout_b), flipped(key.layout_a)) if turned else (key.layout_a, key.layout_b)
    m += -m % 8 if layout_a == COLUMN else 0
    a = placed((m, k), key.a, 1, layout=layout_a)
    b = placed((k, n), key.a, 2, layout=layout_b)
    c = placed((m, n), d or key.a, 3) if beta else None
    out = Guarded((m, n), d or key.a)
    problem = problem_of(a, b, out.view, c, math_mode=key.math)
    formulation, info = divided_of(problem, key), kernel_info(key)

    def made(slices: int) -> Any:
        candidate = Candidate(key, info, 0.0, formulation, slices, 1, ALONG_N)
        plan = from_candidate(problem, candidate, PlanOptions(like=a))
        assert plan.kernel_name == key.name
        assert len(plan.kernel_names) == 2
        return plan

    return made, (a, b, c), out


def check(key: KernelKey, extents: Extents, *, alpha: float = 1.0, beta: float = 0.0, d: D | None = None) -> None:
    made, operands, out = made_for(key, extents, beta=beta, d=d)
    steps = -(-extents[2] // key.tile[2])
    counts = {1, 2, min(7, steps), min(40, steps)}
    if key.generation == "sm80":  # without empty slices
        counts = {-(-steps // -(-steps // count)) for count in counts}
    for slices in sorted(counts):
        assert_launches(made(slices), operands, out, math_mode=key.math, alpha=alpha, beta=beta)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_products(key: KernelKey) -> None:
    for extents in (*PROBLEMS, *drawn(key)):
        check(key, extents)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_scalars_c_and_a_wide_result(key: KernelKey) -> None:
    for extents in ((264, 520, 4104), (128, 128, 32768)):
        check(key, extents, alpha=0.5, beta=-2.0)
        check(key, extents, alpha=0.0, beta=1.0)
        check(key, extents, alpha=0.0)
        check(key, extents, alpha=2.0, beta=1.0, d=D.F32)


@pytest.mark.parametrize("key", SIMT_CELLS, ids=lambda key: key.name)
def test_f32_and_f64(key: KernelKey) -> None:
    for extents in (*PROBLEMS, *drawn(key)):
        check(key, extents)
    # Results whose number is odd: slices begin at whole vectors nevertheless.
    odd = ((1, 1, 8192), (33, 7, 4099), (1023, 1025, 1031)) if key.align_a == key.align_b == 1 else ()
    for extents in odd:
        check(key, extents)
    for extents in ((264, 520, 4104), (128, 128, 32768), *odd):
        check(key, extents, alpha=0.5, beta=-2.0)
        check(key, extents, alpha=0.0, beta=1.0)


@pytest.mark.parametrize("key", SCALED_CELLS, ids=lambda key: key.name)
def test_scales_of_rows_and_columns(key: KernelKey) -> None:
    """Of fp8: each slice is multiplied by them, and C is added to the sum."""
    for m, n, k in ((16, 528, 4112), (128, 128, 32768), (267, 656, 16352)):
        a, b = fp8_placed((m, k), key.a, 1), fp8_placed((k, n), key.b, 2, layout="c")
        c, out = placed((m, n), D.BF16, 3), guarded((m, n), D.BF16)
        how = Scaling(alpha=0.5, beta=-2.0, scale_a=scales((m, 1), 3), scale_b=scales((1, n), 4))
        problem = dataclasses.replace(problem_of(a, b, out.view, c, math_mode=key.math), epilogue=SCALED)
        formulation = divided_of(problem, key)
        for slices in (1, 2, 7):
            candidate = Candidate(key, kernel_info(key), 0.0, formulation, slices, 1, ALONG_N)
            options = PlanOptions(alpha=0.5, beta=-2.0, like=a)
            plan = from_candidate(problem, candidate, options, scales_of(problem, how))
            plan(a, b, c, how.scale_a, how.scale_b, out.view)
            out.assert_guards()
            assert_scaled(out.view, a, b, c, how, fast=key.math == "fast")


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_chains_and_graphs_overlap_in_order(key: KernelKey, torch: Any) -> None:
    """Products follow one another through one workspace, on the stream and in a graph."""
    size = 1032
    plan_of, (a, b, _), out = made_for(key, (size, size, size))
    made, other = plan_of(3), torch.empty_like(out.view)
    made(a, b, out=other)
    torch.cuda.synchronize()
    want = other.clone()

    def launch() -> None:
        for _ in range(20):
            made(a, b, out=out.view)
            made(a, b, out=other)

    graph = captured(launch)
    for _ in range(20):
        out.view.zero_()
        other.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view, want)
        assert torch.equal(other, want)
    # Operands that are written right before a launch, and right after it.
    chained, first = [], a.clone()
    for number in range(20):
        a.copy_(first * (number + 1))
        made(a, b, out=out.view)
        a.fill_(float("nan"))
        chained.append(out.view.clone())
    torch.cuda.synchronize()
    for number, found in enumerate(chained):
        assert_product(found, first * (number + 1), b, None, math_mode=key.math)
    out.assert_guards()
