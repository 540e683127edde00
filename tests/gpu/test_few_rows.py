"""Every kernel for few rows or columns of D against the reference: odd extents, K that ends inside a tile, C, batches.

A kernel that the table lacks is compiled where ATOMR_CUTLASS_TEST_JIT is set.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.generator.families import gemm_few_sm90
from fp8_matrices import Scaling, assert_scaled, cell_plan, guarded, scales
from fp8_matrices import placed as fp8_placed
from gpu_matrices import NONE, Extents, assert_launches, kernel_info, made_for

if TYPE_CHECKING:
    from atomr_cutlass.generator.key import KernelKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

ALL = [key for _, key in gemm_few_sm90.cells(SmArch.SM90A)]
CELLS = [key for key in ALL if key.epilogue == "lc"]
SCALED = [key for key in ALL if key.epilogue == "scaled" and not any(key.scale_granularity)]

PROBLEMS: tuple[Extents, ...] = (
    (NONE, NONE, 1, 8, 8),
    (NONE, NONE, 1, 4096, 4096),
    (NONE, NONE, 3, 1000, 72),
    (NONE, NONE, 8, 12288, 512),
    (NONE, NONE, 9, 136, 8200),
    (NONE, NONE, 31, 40008, 264),
    (NONE, NONE, 33, 2568, 1032),
    (NONE, NONE, 64, 7168, 2048),
    (NONE, NONE, 65, 1032, 4104),
    (NONE, NONE, 127, 5192, 3496),
    (NONE, NONE, 128, 128, 16384),
    ((3,), (3,), 5, 520, 200),
    ((4,), NONE, 17, 1048, 136),
    (NONE, (2,), 128, 200, 328),
    ((140,), (140,), 2, 64, 64),
)


def drawn(key: KernelKey) -> list[Extents]:
    """Problems of its own for each kernel."""
    rng = random.Random(key.name)
    return [
        (NONE, NONE, rng.randint(1, gemm_few_sm90.MOST), 8 * rng.randint(1, 2500), 8 * rng.randint(1, 500))
        for _ in range(12)
    ]


def check(key: KernelKey, extents: Extents, *, alpha: float = 1.0, beta: float = 0.0, pad: int = 0) -> None:
    plan, operands, out = made_for(key, extents, beta=beta, pad=pad)
    assert_launches(plan, operands, out, math_mode=key.math, alpha=alpha, beta=beta)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_few_rows(key: KernelKey) -> None:
    for problem in (*PROBLEMS, *drawn(key)):
        check(key, problem)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_scalars_and_c(key: KernelKey) -> None:
    for problem in (PROBLEMS[2], PROBLEMS[9], PROBLEMS[12]):
        check(key, problem, alpha=0.5, beta=-2.0)
        check(key, problem, alpha=0.0, beta=1.0, pad=5)


@pytest.mark.parametrize("key", [key for key in CELLS if key.layout_b == "c"], ids=lambda key: key.name)
def test_few_columns(key: KernelKey) -> None:
    """Either operand may be the weights where both are contiguous along K; rows of D need no alignment."""
    for batch_a, batch_b, m, n, k in (*PROBLEMS, *drawn(key)):
        check(key, (batch_a, batch_b, n, m, k))
    check(key, (NONE, NONE, 999, 7, 1000), alpha=0.5, beta=-2.0)
    check(key, (NONE, NONE, 127, 1001, 1000), beta=1.0, pad=3)


@pytest.mark.parametrize("key", SCALED, ids=lambda key: key.name)
def test_scales_of_rows_and_columns(key: KernelKey, torch: Any) -> None:
    """fp8 with scales on the device, in full and in fast accumulation, for few rows and few columns."""
    for m, n, k in ((1, 16, 16), (7, 4096, 4112), (40, 1040, 272), (128, 520, 16), (100, 3000, 8208), (1000, 21, 1040)):
        a, b = fp8_placed((m, k), key.a, 1), fp8_placed((k, n), key.b, 2, layout="c")
        out = guarded((m, n), key.d)
        how = Scaling(alpha=0.5, scale_a=scales((m, 1), 3), scale_b=scales((1, n), 4), scale_d=scales((1,), 5))
        amax = torch.full((1,), float("nan"), device="cuda")
        made, arrays = cell_plan(key, kernel_info(key), out.view, a, b, how, amax)
        made(*arrays)
        torch.cuda.synchronize()
        out.assert_guards()
        assert_scaled(out.view, a, b, None, how, fast=key.math == "fast", amax=amax)
