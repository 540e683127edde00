"""Every kernel that shares out K against the reference: odd extents, K that ends inside a step, C, batches, graphs.

A kernel that the table lacks is compiled where ATOMR_CUTLASS_TEST_JIT is set.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.generator.families import gemm_split_sm90
from gpu_matrices import NONE, Extents, assert_launches, assert_product, captured, made_for

if TYPE_CHECKING:
    from atomr_cutlass.generator.key import KernelKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

CELLS = [key for _, key in gemm_split_sm90.cells(SmArch.SM90A)]
# Of no preset: those of other clusters.
CELLS += [
    gemm_split_sm90.cell(key.a, key.layout_a + key.layout_b, *cluster)
    for key in CELLS
    for cluster in gemm_split_sm90.WIDEST
    if cluster not in gemm_split_sm90.CLUSTERS
]

PROBLEMS: tuple[Extents, ...] = (
    (NONE, NONE, 1, 8, 8),
    (NONE, NONE, 36, 32, 19264),
    (NONE, NONE, 128, 128, 32768),
    (NONE, NONE, 129, 264, 8200),
    (NONE, NONE, 512, 512, 4096),
    (NONE, NONE, 287, 448, 12344),
    (NONE, NONE, 777, 1048, 1032),
    (NONE, NONE, 2304, 2304, 264),
    (NONE, NONE, 1500, 3000, 72),
    ((3,), (3,), 65, 520, 2056),
    ((4,), NONE, 130, 72, 4104),
    (NONE, (2,), 200, 136, 328),
)


def drawn(key: KernelKey) -> list[Extents]:
    """Problems of its own for each kernel."""
    rng = random.Random(key.name)
    return [(NONE, NONE, rng.randint(1, 700), 8 * rng.randint(1, 90), 8 * rng.randint(1, 2500)) for _ in range(8)]


def check(key: KernelKey, extents: Extents, *, alpha: float = 1.0, beta: float = 0.0, pad: int = 0) -> None:
    plan, operands, out = made_for(key, extents, beta=beta, pad=pad)
    assert_launches(plan, operands, out, math_mode=key.math, alpha=alpha, beta=beta)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_products(key: KernelKey) -> None:
    for problem in (*PROBLEMS, *drawn(key)):
        check(key, problem)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_scalars_c_and_rows_of_any_alignment(key: KernelKey) -> None:
    for problem in (PROBLEMS[1], PROBLEMS[5], PROBLEMS[9]):
        check(key, problem, alpha=0.5, beta=-2.0)
        check(key, problem, alpha=0.0, beta=1.0, pad=5)
    if key.layout_b == "c":
        check(key, (NONE, NONE, 301, 207, 9000), alpha=0.5, beta=-2.0)
        check(key, (NONE, NONE, 127, 1001, 1000), beta=1.0, pad=3)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_a_graph_is_replayed(key: KernelKey, torch: Any) -> None:
    """Counters of arrivals are as the next launch needs them, on the stream and in a graph."""
    made, (a, b, _), out = made_for(key, (NONE, NONE, 130, 200, 20000))
    made(a, b, out=out.view)
    want = out.view.clone()

    def launch() -> None:
        for _ in range(3):
            made(a, b, out=out.view)

    graph = captured(launch)
    for _ in range(50):
        out.view.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view, want)
    a.copy_(torch.randn_like(a, dtype=torch.float32).to(a.dtype))
    graph.replay()
    torch.cuda.synchronize()
    out.assert_guards()
    assert_product(out.view, a, b, None, alpha=1.0, beta=0.0, math_mode=key.math)
