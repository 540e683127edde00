"""`gemv` against float64: every cell, odd extents, strides, alignments, batches, and what follows the product.

A kernel that the table lacks is compiled where ATOMR_CUTLASS_TEST_JIT is set.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.generator.families.gemv import TYPES
from atomr_cutlass.generator.key import COLUMN, ROW
from atomr_cutlass.ops.gemv.function import GemvSearch, from_candidate, product
from atomr_cutlass.pipeline import devices, estimate, select
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import (
    Guarded,
    assert_product,
    assert_same_bits,
    broadcast,
    element_type,
    fill,
    placed,
    spec,
    torch_dtype,
)

if TYPE_CHECKING:
    from atomr_cutlass.generator.key import KernelKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

Batch = tuple[int, ...]
Problem = tuple[Batch, Batch, int, int]
"""Batches of A and of x; M and K."""

NONE: Batch = ()


def name(key: KernelKey) -> str:
    return f"{key.arch.value}-{key.name}"


CELLS = every_cell.keys("gemv", want=every_cell.is_plain)
TREES = every_cell.keys("gemv", want=lambda key: not every_cell.is_plain(key))


class Vector:
    """A vector, or a batch of them, inside poison, with poison between its elements where its stride is not 1."""

    def __init__(self, shape: tuple[int, ...], dtype: D, *, stride: int = 1, offset: int = 0) -> None:
        self.guarded = Guarded((*shape, 1), dtype, pad=stride - 1, offset=offset)
        self.view = self.guarded.view[..., 0]


def vector(shape: tuple[int, ...], dtype: D, seed: int, **spacing: int) -> Any:
    made = Vector(shape, dtype, **spacing)
    if made.view.numel():
        made.view.copy_(fill(shape, dtype, seed))
    return made.view


def assert_right(out: Any, a: Any, x: Any, c: Any = None, *, alpha: float = 1.0, beta: float = 0.0) -> None:
    math_mode = "ieee" if element_type(a) is D.F32 else "default"
    source = None if c is None else c[..., None, :]
    rows = (out[..., None, :], x[..., None, :], a.mT, source)
    assert_product(*rows, alpha=alpha, beta=beta, math_mode=math_mode)


def drawn(key: KernelKey) -> list[Problem]:
    """Problems that a cell serves: the smallest, parts of tiles, slices of K, batches, and random ones."""
    rng, unit = random.Random(key.name), key.align_b
    along, across = (unit, 1) if key.layout_b == COLUMN else (1, unit)
    found: list[Problem] = [
        (NONE, NONE, across, along), (NONE, NONE, 9 * across, 300 * along), (NONE, NONE, 2 * across, 4099 * along),
        (NONE, NONE, 1024, 4096), ((3,), (3,), 40 * across, 33 * along), (NONE, (5,), 24 * across, 72 * along),
        ((2, 1), (3,), 16 * across, 40 * along), ((70000,), NONE, across, along),
    ]  # fmt: skip
    return found + [
        (NONE, NONE, across * rng.randint(1, 3000 // across), along * rng.randint(1, 3000 // along)) for _ in range(6)
    ]


def check(key: KernelKey, problem: Problem, *, stride: int = 1, alpha: float = 1.0, beta: float = 0.0) -> None:
    batch_a, batch_x, m, k = problem
    a = placed((*batch_a, m, k), key.b, 1, layout="r" if key.layout_b == COLUMN else "c")
    x = vector((*batch_x, k), key.a, 2, stride=stride)
    batch = broadcast(batch_a, batch_x)
    c = vector((*batch, m), key.d, 3, stride=stride) if beta else None
    given = {"a": a, "x": x, **({} if c is None else {"c": c})}
    out = Vector((*batch, m), key.d, stride=stride)
    gemv_problem = product({label: spec(array) for label, array in {**given, "out": out.view}.items()}, key.math, 0)
    search = GemvSearch(gemv_problem, devices.get(0))
    info = every_cell.row_of(key)
    candidate = dataclasses.replace(select.candidate_of(search, key), info=info)
    slices = estimate.slices(key, candidate.formulation.extents, devices.get(0))
    for count in {1, slices[len(slices) // 2], slices[-1]}:
        plan = from_candidate(gemv_problem, dataclasses.replace(candidate, split_k=count), how=PlanOptions(like=a))
        assert plan.kernel_name == key.name
        made = []
        for _ in range(2):
            out = Vector((*batch, m), key.d, stride=stride)
            plan(*given.values(), out=out.view, alpha=alpha, beta=beta)
            out.guarded.assert_guards()
            made.append(out.view)
        assert_right(made[0], a, x, c, alpha=alpha, beta=beta)
        assert_same_bits(*made)


@pytest.mark.parametrize("key", CELLS, ids=name)
def test_cell(key: KernelKey) -> None:
    for problem in drawn(key):
        check(key, problem)
    for problem in (drawn(key)[1], drawn(key)[4]):
        check(key, problem, stride=3, alpha=0.5, beta=-2.0)
        check(key, problem, alpha=0.0, beta=1.0)
    every_cell.right(key, every_cell.row_of(key), "random shapes, strides, slices of K, batches")


@pytest.mark.parametrize("key", TREES, ids=name)
def test_trees_of_a_cell(key: KernelKey) -> None:
    every_cell.trees_right(key, "a product and its trees")


# ----------------------------------------------------------------------------------------------------------------------
# The function
# ----------------------------------------------------------------------------------------------------------------------


def compared(torch: Any, call: Any, want: Any) -> None:
    """Compares a call's result with one in float64."""
    try:
        got = call()
    except ac.KernelNotFoundError as error:
        pytest.skip(str(error))
    limit = 2e-2 if got.dtype == torch.bfloat16 else 4e-3 if got.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit * max(1.0, want.abs().max().item() / 8))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("layout", [ROW, COLUMN])
@pytest.mark.parametrize("offset", [0, 1])
def test_matrices_of_any_address_and_stride(dtype: D, layout: str, offset: int) -> None:
    rng = random.Random(f"{dtype}{layout}{offset}")
    for seed in range(12):
        m, k = rng.randint(1, 2500), rng.randint(1, 2500)
        a = placed((m, k), dtype, seed, layout=layout, pad=rng.choice((0, 1, 8)), offset=offset)
        x = vector((k,), dtype, seed + 50, stride=rng.choice((1, 2, 5)), offset=rng.choice((0, 1)))
        out = Vector((m,), dtype, stride=rng.choice((1, 4)))
        try:
            assert ac.gemv(a, x, out=out.view) is out.view
        except ac.KernelNotFoundError as error:
            pytest.skip(str(error))
        out.guarded.assert_guards()
        assert_right(out.view, a, x)


def test_what_follows_the_product(torch: Any) -> None:
    a, x = placed((3, 640, 512), D.BF16, 1), vector((3, 512), D.BF16, 2)
    bias, other = vector((640,), D.F32, 3), vector((3, 640), D.BF16, 4)
    wide = (a.double() @ x.double()[..., None])[..., 0]
    relu, silu = torch.relu, torch.nn.functional.silu
    compared(torch, lambda: ac.gemv(a, x, bias=bias, activation="relu"), relu(wide + bias.double()))
    compared(torch, lambda: ac.gemv(a, x, activation="silu", out_dtype=D.F32), silu(wide))
    compared(torch, lambda: ac.gemv(a, x, other, beta=2.0, bias=bias), wide + 2 * other.double() + bias.double())
    if every_cell.COMPILED:
        tree = ac.EvtBuilder().add_matrix("other", dtype=D.BF16).aux_store("kept").mask_store("bits")
        made = ac.gemv(a, x, epilogue=tree.reduce("total", "scalar").build(), other=other)
        want = wide + other.double()
        torch.testing.assert_close(made["kept"].double(), want, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(made["total"].double(), want.sum()[None], rtol=1e-3, atol=1.0)
        bits = ((made["kept"].reshape(3, 80, 8) != 0).long() << torch.arange(8, device="cuda")).sum(-1)
        assert torch.equal(made["bits"].long(), bits)


def test_a_bound_matrix_and_captured_graphs(torch: Any) -> None:
    """Slices of K leave the workspace as they found it, replay after replay, on streams of their own."""
    w = placed((64, 65536), D.BF16, 1, layout="c")
    try:
        bound = ac.plan(ac.GemvRequest(ac.GemvShape(64, 65536), dtype=D.BF16, layout_a=ac.GemmLayout.COL_MAJOR), b=w)
    except ac.KernelNotFoundError as error:
        pytest.skip(str(error))
    assert bound.plan.main.split_k > 1
    x = vector((65536,), D.BF16, 2)
    first = bound(x)
    assert first.dtype == torch_dtype(D.BF16)
    assert_right(first, w, x)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        bound(x, out=out)
    for seed in (3, 4):
        x.copy_(fill((65536,), D.BF16, seed))
        graph.replay()
        assert_right(out, w, x)
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(bound(x))
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits(result, results[0])


def test_host_arrays_are_copied(torch: Any) -> None:
    a, x = fill((33, 77), D.F32, 1).cpu().numpy(), fill((77,), D.F32, 2).cpu().numpy()
    compared(torch, lambda: torch.from_numpy(ac.gemv(a, x)), torch.from_numpy(a.astype("f8") @ x.astype("f8")))
