"""Kernels for few rows whose operands begin anywhere, against the reference: any extents, addresses and divisions.

A kernel that the table lacks is compiled where ATOMR_CUTLASS_TEST_JIT is set.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass import SmArch
from atomr_cutlass.arrays import operands
from atomr_cutlass.generator.families import gemm_ragged_sm80
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline.bindings import settled_operand
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import Guarded, assert_launches, assert_same_bits, candidate_of, captured, placed, problem_of

if TYPE_CHECKING:
    from atomr_cutlass.generator.key import KernelKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

CELLS = [key for _, key in gemm_ragged_sm80.FAMILY.cells(SmArch.SM90A)]


def made(
    key: KernelKey, m: int, n: int, k: int, rng: random.Random, *, batch: int = 1, beta: float = 0.0, **options: int
) -> tuple[Any, tuple[Any, ...], Guarded]:
    """A plan, operands inside NaN at any address and with any distance between rows, and where the result goes."""
    lead = (batch,) if batch > 1 else ()

    def anywhere() -> dict[str, int]:
        return {"offset": rng.randrange(9), "pad": rng.choice((0, 0, 1, 2, 3, 8))}

    a = placed((*lead, m, k), key.a, 1, **anywhere())
    b = placed((*lead, k, n), key.b, 2, layout=key.layout_b, **anywhere())
    c = placed((*lead, m, n), key.d, 3, **anywhere()) if beta else None
    out = Guarded((*lead, m, n), key.d, **anywhere())
    problem = problem_of(a, b, out.view, c)
    if not any(option % 8 for view in (a, b) for option in (view.storage_offset(), *view.stride()) if option != 1):
        pytest.skip("drawn aligned, which other kernels serve")
    found = replace(candidate_of(key, problem), **options)
    return from_candidate(problem, found, PlanOptions(like=a)), (a, b, c), out


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_any_problem(key: KernelKey) -> None:
    """Drawn anew for each kernel: few rows or columns, batches, C."""
    rng = random.Random(key.name)
    for trial in range(60):
        few = rng.choice((1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 64, 65, 130, 300))
        many, k = int(2 ** rng.uniform(4, 12)), int(2 ** rng.uniform(3.2, 13))
        turned = key.layout_b == "c" and rng.random() < 0.25
        m, n = (max(many, few + 1), few) if turned else (few, many)
        beta = rng.choice((0.0, 0.0, -1.5))
        k += 1 - k % 2 if trial % 2 else 0
        plan, arrays, out = made(key, m, n, k | 1, rng, batch=rng.choice((1, 1, 1, 3)), beta=beta)
        assert_launches(plan, arrays, out, math_mode=key.math, alpha=0.5 if beta else 1.0, beta=beta)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_every_division(key: KernelKey) -> None:
    """How K and the weights are divided decides in which order sums are added up, and no more."""
    for m, n, k in ((1, 9, 9), (5, 1031, 1601), (16, 333, 4099), (40, 777, 2047), (64, 200, 911), (100, 129, 1025)):
        for few, width in gemm_ragged_sm80.tiles(key, min(m, n)):
            for split in (1, 2, 3, 5, 8, 64):
                rng = random.Random(m * width + split)
                plan, arrays, out = made(key, m, n, k, rng, swizzle=few, width=width, split_k=split)
                assert_launches(plan, arrays, out, math_mode=key.math)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_divisions_that_no_kernel_has_are_refused(key: KernelKey) -> None:
    for width in (8, 48, 256) if key.layout_b == "c" else (16, 64):
        with pytest.raises(ac.UnsupportedError):
            made(key, 4, 333, 1001, random.Random(1), width=width)
    if key.layout_b == "c":
        with pytest.raises(ac.UnsupportedError):
            made(key, 40, 333, 1001, random.Random(1), swizzle=16)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_chains_of_launches(key: KernelKey, torch: Any) -> None:
    """Settled weights are read before the launch before has ended, whose sums and counters a next one uses again."""
    for split in (1, 4):
        plan, (a, b, _), out = made(key, 3, 1031, 2001, random.Random(split), split_k=split)
        plan(a, b, None, out=out.view)
        wanted = out.view.clone()
        for operand in (b, settled_operand(operands.as_operand(b))):
            for _ in range(100):
                plan(a, operand, None, out=out.view)
            torch.cuda.synchronize()
            assert_same_bits(out.view, wanted)
        graph = captured(lambda plan=plan, a=a, b=b, out=out: plan(a, b, None, out=out.view))
        for _ in range(10):
            out.view.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(out.view, wanted)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
@pytest.mark.parametrize("n", [1024, 1026, 1028, 1031])
def test_one_plan_reads_weights_at_other_addresses(key: KernelKey, n: int) -> None:
    """What depends on an address must not be kept from the call before."""
    m, k = 4, 1001 if key.layout_b == "r" else n - 1
    extent = n * k
    a = placed((m, k), key.a, 1)
    values = placed((1, extent + 16), key.b, 2)[0]
    out = Guarded((m, n), key.d)
    plan = None
    for offset in (1, 0, 8, 2, 3, 4, 5, 6, 7, 1):
        b = values[offset : offset + extent]
        b = b.view(k, n) if key.layout_b == "r" else b.view(n, k).mT
        if plan is None:
            problem = problem_of(a, b, out.view)
            plan = from_candidate(problem, candidate_of(key, problem), PlanOptions(like=a))
        assert_launches(plan, (a, b, None), out, math_mode=key.math)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
@pytest.mark.parametrize("offset", range(1, 9))
def test_infinities_stay_what_they_are(key: KernelKey, offset: int, torch: Any) -> None:
    """The weights' first and last elements, of vectors that are not theirs alone, meet the few rows' as others do."""
    m, n, k = 3, 77, 101
    a, b = placed((m, k), key.a, 1), placed((k, n), key.b, 2, layout=key.layout_b, offset=offset)
    b.fill_(1.0)
    a[0, 0] = a[1, k - 1] = float("inf")
    out = Guarded((m, n), key.d)
    problem = problem_of(a, b, out.view)
    plan = from_candidate(problem, candidate_of(key, problem), PlanOptions(like=a))
    plan(a, b, None, out=out.view)
    assert bool(torch.isposinf(out.view[:2]).all())
    assert bool(torch.isfinite(out.view[2]).all())
