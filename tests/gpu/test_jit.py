"""Kernels compiled at run time: bits of the prebuilt ones, no more than a launch once compiled, and the policies."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.ops.gemm.kernels import GemmCandidate, GemmSearch
from atomr_cutlass.pipeline import devices, select, table
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import D, Guarded, assert_product, fill, placed, problem_of, rows_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

gemm_plans: Any = sys.modules["atomr_cutlass.ops.gemm.plans"]
from_candidate = getattr(gemm_plans, "prebuilt_from_candidate", gemm_plans.from_candidate)

TABLE = ac.kernels(op="gemm")
SMALL = ac.GemmRequest(ac.GemmShape(256, 320, 512), dtype=D.F32, precision="ieee")
"""A request that a cell of the sm80 generation serves, which compiles in seconds."""


def chosen(a: Any, b: Any, out: Any, info: ac.KernelInfo, **changes: Any) -> tuple[Plan, Plan]:
    """Plans of one candidate: its kernel from the table, and compiled."""
    problem = problem_of(a, b, out, math_mode=info.key.math)
    ranked = select.rank(every_cell.search(info.key, problem))
    own = next(candidate for candidate in ranked if candidate.key == info.key and not candidate.formulation.swapped)
    own = dataclasses.replace(own, **changes)
    how = PlanOptions(like=a)
    return from_candidate(problem, own, how), from_candidate(problem, dataclasses.replace(own, info=None), how)


def same_bits(torch: Any, x: Any, y: Any) -> bool:
    return bool(torch.equal(x.view(torch.uint8), y.view(torch.uint8)))


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
def test_a_compiled_kernel_gives_the_bits_of_the_prebuilt_one(info: ac.KernelInfo, torch: Any) -> None:
    device = devices.get(0)
    if devices.rank_arch(info.key.arch, device, ptx=info.ptx) is None:
        pytest.skip(f"code for {info.key.arch.value} without PTX does not run on {device.name}")
    key = info.key
    unit = max(key.align_a, key.align_b, key.align_d)
    tile_m, tile_n, tile_k = key.tile
    splits = {1, 4} if key.scheduler == "streamk" or (key.generation == "sm80" and key.d.bits >= key.acc.bits) else {1}
    for m, n, k in ((rows_for(key, 2 * tile_m + unit), 3 * tile_n + unit, 24 * tile_k + unit), (unit, tile_n, unit)):
        k += every_cell.least_k(key)  # noqa: PLW2901
        for split_k in splits:
            a, b = placed((m, k), key.a, 1, layout=key.layout_a), placed((k, n), key.b, 2, layout=key.layout_b)
            c = placed((m, n), key.d, 3)
            outs = [Guarded((m, n), key.d) for _ in range(2)]
            plans = chosen(a, b, outs[0].view, info, split_k=split_k)
            assert [made.origin for made in plans][1] == "jit"
            assert plans[0].kernel_name == plans[1].kernel_name == info.name
            assert plans[0].workspace_bytes == plans[1].workspace_bytes
            # Other pointers and other scalars at every turn.
            for turn, (alpha, beta) in enumerate(((1.0, 0.0), (2.0, -3.0), (-1.0, 0.0), (0.0, 2.0), (0.0, 0.0))):
                left = placed((m, k), key.a, 10 + turn, layout=key.layout_a)
                for made, out in zip(plans, outs, strict=True):
                    made(left, b, c if beta else None, out=out.view, alpha=alpha, beta=beta)
                torch.cuda.synchronize()
                for out in outs:
                    out.assert_guards()
                assert same_bits(torch, outs[0].view, outs[1].view), (m, n, k, split_k, alpha, beta)


@pytest.fixture
def empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built in."""
    monkeypatch.setattr(table, "kernels", lambda *_given, **_named: [])
    kept_plans.clear()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilation is allowed."""
    monkeypatch.setenv(kernels.POLICY_VARIABLE, "auto")
    yield
    kept_plans.clear()


@pytest.mark.usefixtures("empty_table", "compiling")
def test_gemm_compiles_what_the_table_lacks() -> None:
    a, b = placed((129, 65), D.F32, 1), placed((65, 33), D.F32, 2)
    for _ in range(2):
        assert_product(ac.gemm(a, b, precision="ieee"), a, b, math_mode="ieee")
    with pytest.raises(ac.KernelNotFoundError):
        ac.gemm(a, b, precision="ieee", jit="off")


@pytest.mark.usefixtures("compiling")
def test_backend_jit_passes_the_table_over() -> None:
    made = ac.plan(SMALL, backend="jit")
    assert (made.origin, made.kernel) == ("jit", None)
    assert made.kernel_name in made.source
    # The kernel of the matrix for this very GPU, which `render_cu` of a request without an arch names.
    assert made.kernel_name == SMALL.render_cu()[1]
    a, b = placed((256, 512), D.F32, 1), placed((512, 320), D.F32, 2)
    assert_product(made(a, b), a, b, math_mode="ieee")


@pytest.mark.usefixtures("empty_table", "compiling")
def test_nothing_is_compiled_under_capture_and_the_capture_goes_on(torch: Any) -> None:
    a, b = placed((128, 64), D.F32, 1), placed((64, 96), D.F32, 2)
    out = torch.empty((128, 96), device="cuda")
    ones = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ones += 1
        with pytest.raises(ac.UnsupportedError, match="cannot be made while a CUDA graph is captured"):
            ac.gemm(a, b, out=out, precision="ieee")
    graph.replay()
    torch.cuda.synchronize()
    assert ones.tolist() == [1.0] * 4


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("generation", ["sm80", "sm90"])
def test_launches_are_captured_with_any_pointers_and_scalars(generation: str, torch: Any) -> None:
    """Whatever waited for the GPU, or launched more than the kernel, would end the capture."""
    infos = [info for info in TABLE if info.key.generation == generation and info.key.a is D.BF16]
    native = [info for info in infos if info.key.arch is devices.get(0).arch]
    if not native:
        pytest.skip(f"the table has no bf16 cell of the {generation} generation for this GPU")
    info = native[0]
    layouts = {"a": info.key.layout_a, "b": info.key.layout_b}
    a, b = placed((256, 512), D.BF16, 1, layout=layouts["a"]), placed((512, 128), D.BF16, 2, layout=layouts["b"])
    c = placed((256, 128), info.key.d, 3)
    outs = [Guarded((256, 128), info.key.d) for _ in range(3)]
    _, made = chosen(a, b, outs[0].view, info)
    others = [placed((256, 512), D.BF16, 5 + i, layout=layouts["a"]) for i in range(3)]
    calls = [(None, 1.0, 0.0), (c, 2.0, -1.0), (c, 0.0, 3.0)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for left, out, (third, alpha, beta) in zip(others, outs, calls, strict=True):
            made(left, b, third, out=out.view, alpha=alpha, beta=beta)
    del made
    for left in others:
        left.copy_(fill((256, 512), D.BF16, 77))
    graph.replay()
    torch.cuda.synchronize()
    for left, out, (third, alpha, beta) in zip(others, outs, calls, strict=True):
        out.assert_guards()
        assert_product(out.view, left, b, third, alpha=alpha, beta=beta)


@pytest.mark.usefixtures("compiling")
def test_a_better_kernel_takes_over_in_the_background(
    torch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a, b = placed((256, 512), D.F32, 1), placed((512, 320), D.F32, 2)
    built = ac.plan(SMALL, backend="prebuilt", jit="off") if TABLE else None
    if built is None:
        pytest.skip("the table is empty")
    best = ac.plan(SMALL, backend="jit")
    if best.main.key == built.main.key:
        few = [info for info in TABLE if info.key != built.main.key]
        monkeypatch.setattr(table, "kernels", lambda *_given, **_named: few)
    # Nowhere to be found, it has to be compiled.
    kernels._kernels.clear()
    empty = KernelStore(tmp_path / "cache")
    monkeypatch.setattr(kernels, "store", lambda: empty)
    monkeypatch.setattr(select, "WORTHWHILE", 1e9)
    try:
        made = ac.plan(SMALL, jit="background")
    except ac.KernelNotFoundError as error:
        pytest.skip(str(error))
    if made.origin == "jit":
        pytest.skip("the table has no other kernel for the request")
    before = made.kernel_name
    graph = torch.cuda.CUDAGraph()
    out = torch.empty((256, 320), device="cuda")
    with torch.cuda.graph(graph):
        made(a, b, out=out)
    deadline = time.monotonic() + 60
    while made.kernel_name == before and time.monotonic() < deadline:
        assert_product(made(a, b), a, b, math_mode="ieee")
    assert made.kernel_name == best.kernel_name != before
    # From now on it is taken at once.
    assert ac.plan(SMALL, jit="background").kernel_name == best.kernel_name
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_product(out, a, b, math_mode="ieee")


@pytest.mark.usefixtures("empty_table", "compiling")
def test_threads_that_miss_together_all_get_the_kernel(torch: Any) -> None:
    a, b = placed((64, 48), D.F32, 1), placed((48, 80), D.F32, 2)
    kernels._kernels.clear()
    results: list[Any] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(ac.gemm(a, b, precision="ieee"))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 32
    assert all(same_bits(torch, results[0], other) for other in results)
    assert_product(results[0], a, b, math_mode="ieee")


def test_another_process_finds_the_kernel_on_disk(tmp_path: Path) -> None:
    code = (
        "import sys, torch, atomr_cutlass as ac; from atomr_cutlass.jit import kernels\n"
        "request = ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.F32)\n"
        "told = ac.explain(request, jit='auto')\n"
        "made = ac.plan(request, backend='jit')\n"
        "a = torch.ones((64, 64), device='cuda'); out = made(a, a)\n"
        "print(kernels.store().entries()[0].info['name'] == made.kernel_name, float(out.sum()),"
        " len(kernels.store().entries()))"
    )
    environment = os.environ | {"ATOMR_CUTLASS_CACHE_DIR": str(tmp_path / "cache"), "ATOMR_CUTLASS_JIT": "auto"}
    entries = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert ran.stdout.split() == ["True", str(64.0**3), "1"], ran.stderr
        entries.append(KernelStore(tmp_path / "cache").entries()[0].made)
    assert entries[0] == entries[1]


@pytest.mark.usefixtures("compiling")
def test_plans_may_be_dropped_while_they_run(torch: Any) -> None:
    """Evictions under load, of plans with workspaces, from several threads."""
    splitting = [info for info in TABLE if info.key.generation == "sm80" and info.key.d.bits >= info.key.acc.bits]
    native = [info for info in splitting if info.key.arch is devices.get(0).arch and info.key.a is D.F32]
    if not native:
        pytest.skip("the table has no float32 cell that splits K for this GPU")
    cache: ac.PlanCache[Plan] = ac.PlanCache(2)
    info = native[0]
    wrong: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(12):
                m = 64 + 16 * ((seed + turn) % 5)
                a = fill((m, 4096), D.F32, seed, whole=True)
                a = a if info.key.layout_a == "r" else a.t().contiguous().t()
                b = fill((4096, 64), D.F32, seed + 1, whole=True)
                b = b if info.key.layout_b == "r" else b.t().contiguous().t()
                out = torch.empty((m, 64), device="cuda", dtype=torch.float32)
                made = cache.get((m, seed % 2))
                if made is None:
                    made = chosen(a, b, out, info, split_k=4)[seed % 2]
                    cache.insert(made, (m, seed % 2))
                made(a, b, out=out)
                del made
                if not torch.equal(out.double(), a.double() @ b.double()):
                    wrong.append(f"thread {seed}, turn {turn}")

    if info.key.d is not D.F32:
        pytest.skip("the first such cell does not give float32")
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.evictions > 0


def test_choices_of_keys_outside_the_matrix(torch: Any) -> None:
    """Any key that the generator can express runs, whether or not a preset has it."""
    native = [info for info in TABLE if info.key.arch is devices.get(0).arch and info.key.generation == "sm80"]
    simt = [info for info in native if info.key.math == "ieee"]
    if not simt:
        pytest.skip("the table has no SIMT cell for this GPU")
    key = dataclasses.replace(simt[0].key, tile=(64, 64, 8), warps=(2, 2, 1), stages=3)
    assert key.name not in {info.name for info in TABLE}
    a = placed((100, 70), D.F32, 1, layout=key.layout_a)
    b = placed((70, 50), D.F32, 2, layout=key.layout_b)
    out = Guarded((100, 50), key.d)
    problem = problem_of(a, b, out.view, math_mode="ieee")
    candidate: GemmCandidate = select.candidate_of(GemmSearch(problem, devices.get(0)), key)
    made = from_candidate(problem, candidate, PlanOptions(like=a))
    made(a, b, out=out.view)
    torch.cuda.synchronize()
    out.assert_guards()
    assert_product(out.view, a, b, math_mode="ieee")
