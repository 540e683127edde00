"""Kernels for any D whose operands begin anywhere, against the reference: extents, addresses, layouts, divisions of K.

A kernel that the table lacks is compiled where ATOMR_CUTLASS_TEST_JIT is set.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.arrays import operands
from atomr_cutlass.generator.families import gemm_realigned_sm90, gemm_unaligned_sm80
from atomr_cutlass.generator.key import COLUMN, REALIGNED, UNALIGNED
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline.bindings import settled_operand
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import Guarded, assert_launches, assert_same_bits, candidate_of, captured, placed, problem_of

if TYPE_CHECKING:
    from atomr_cutlass.generator.key import KernelKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

FAMILIES = {UNALIGNED: gemm_unaligned_sm80, REALIGNED: gemm_realigned_sm90}
CELLS = [key for family in FAMILIES.values() for _, key in family.FAMILY.cells(SmArch.SM90A)]


def made(
    key: KernelKey,
    m: int,
    n: int,
    k: int,
    rng: random.Random,
    *,
    batch: int = 1,
    beta: float = 0.0,
    split: int = 1,
    width: int = 64,
) -> tuple[Any, tuple[Any, ...], Guarded]:
    """A plan, operands inside NaN at any address and with any distance between rows, and where the result goes."""
    lead = (batch,) if batch > 1 else ()

    def anywhere(align: int = 1) -> dict[str, int]:
        offset, pad = rng.choice((0, 0, *range(9))), rng.choice((0, 0, 1, 2, 3, 8))
        return {"offset": offset // align * align, "pad": pad // align * align}

    n = math.ceil(n / key.align_b) * key.align_b
    of_a, of_b, row_b = anywhere(), anywhere(key.align_b), k if key.layout_b == COLUMN else n
    if not any(x % 8 for x in (of_a["offset"], k + of_a["pad"], of_b["offset"], row_b + of_b["pad"])):
        of_a["offset"] = rng.choice((1, 2, 4))  # others serve what TMA reads
    a = placed((*lead, m, k), key.a, 1, layout=key.layout_a, **of_a)
    b = placed((*lead, k, n), key.b, 2, layout=key.layout_b, **of_b)
    c = placed((*lead, m, n), key.d, 3, **anywhere()) if beta else None
    out = Guarded((*lead, m, n), key.d, **anywhere())
    problem = problem_of(a, b, out.view, c)
    found = replace(candidate_of(key, problem), split_k=split, width=width)
    return from_candidate(problem, found, PlanOptions(like=a)), (a, b, c), out


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_any_problem(key: KernelKey) -> None:
    """Drawn anew for each kernel: any extents, batches, C, divisions of K."""
    rng = random.Random(key.name)
    for trial in range(60):
        m, n = (int(2 ** rng.uniform(0, 9)) for _ in range(2))
        k = int(2 ** rng.uniform(0, 12))
        if trial % 3:  # odd rows are shifted; those of multiples of 8 may come by vectors
            k = k // 2 * 2 + 1 if trial % 3 == 1 else math.ceil(k / 8) * 8
            n = n if trial % 3 == 1 else math.ceil(n / 8) * 8
        beta = rng.choice((0.0, 0.0, -1.5))
        split = rng.choice((1, 1, 2, 3, 8, 30))
        batch, width = rng.choice((1, 1, 1, 3)), rng.choice(FAMILIES[key.mainloop].WIDTHS)
        plan, arrays, out = made(key, m, n, k, rng, batch=batch, beta=beta, split=split, width=width)
        assert_launches(plan, arrays, out, math_mode=key.math, alpha=0.5 if beta else 1.0, beta=beta)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_every_offset(key: KernelKey) -> None:
    """Both operands begin at each element of a vector, rows of each length against it."""
    rng = random.Random(key.name)
    for offset, width in itertools.product(range(1, 9), FAMILIES[key.mainloop].WIDTHS):
        for k in range(121, 130):
            a = placed((33, k), key.a, 1, layout=key.layout_a, offset=offset)
            b = placed((k, 130), key.b, 2, layout=key.layout_b, offset=rng.randrange(0, 8, key.align_b), pad=2)
            out = Guarded((33, 130), key.d, offset=offset)
            problem = problem_of(a, b, out.view)
            found = replace(candidate_of(key, problem), width=width)
            plan = from_candidate(problem, found, PlanOptions(like=a))
            assert_launches(plan, (a, b, None), out, math_mode=key.math)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_chains_of_launches(key: KernelKey, torch: Any) -> None:
    """Settled operands are read before the launch before has ended, whose sums and counters a next one uses again."""
    for split, width in itertools.product((1, 4, 13), FAMILIES[key.mainloop].WIDTHS):
        plan, (a, b, _), out = made(key, 70, 131, 801, random.Random(split), split=split, width=width)
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
def test_one_plan_reads_operands_at_other_addresses(key: KernelKey) -> None:
    """What depends on an address must not be kept from the call before."""
    m, n, k = 68, 76, 1001
    a_values = placed((1, m * k + 16), key.a, 1)[0]
    b_values = placed((1, n * k + 16), key.b, 2)[0]
    out = Guarded((m, n), key.d)

    def view(values: Any, offset: int, layout: str, rows: int, columns: int) -> Any:
        values = values[offset : offset + rows * columns]
        return values.view(rows, columns) if layout == "r" else values.view(columns, rows).mT

    plan = None
    for offset in (1, 0, 8, 2, 3, 4, 5, 6, 7, 1):
        a = view(a_values, 9 - offset, key.layout_a, m, k)
        b = view(b_values, offset // key.align_b * key.align_b, key.layout_b, k, n)
        if plan is None:
            problem = problem_of(a, b, out.view)
            plan = from_candidate(problem, candidate_of(key, problem), PlanOptions(like=a))
        assert_launches(plan, (a, b, None), out, math_mode=key.math)
