"""Plan keys and the cache of plans: identity, order, counters, threads, processes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import timeit
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmRequest, GemmShape, SmArch
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.pipeline.plan_cache import CachedPlan, PlanCache, PlanKey


def key_of(m: int, binding: str | None = None) -> PlanKey:
    return GemmRequest(GemmShape(m, 64, 32), dtype=D.BF16, arch=SmArch.SM90A, binding=binding).plan_key()


def plan_of(m: int) -> CachedPlan:
    return CachedPlan(key_of(m), "// source", f"kernel_{m}")


# ----------------------------------------------------------------------------------------------------------------------
# Keys
# ----------------------------------------------------------------------------------------------------------------------


def test_keys_are_values() -> None:
    first, second = key_of(128), key_of(128)
    assert first == second
    assert hash(first) == hash(second)
    assert first is not second
    assert first != key_of(64)
    assert first != "PlanKey"
    with pytest.raises(FrozenInstanceError):
        first.op = "conv2d_fprop"  # type: ignore[misc]


def test_a_request_makes_its_key_once() -> None:
    request = GemmRequest(GemmShape(8, 8, 8), dtype=D.F16)
    assert request.plan_key() is request.plan_key()


def test_a_key_reads_as_what_is_launched() -> None:
    assert repr(key_of(128)) == "PlanKey(gemm (128,64,32,1) row/row/row bf16/bf16/bf16 default linear sm_90a)"
    assert repr(key_of(1, "layer 0")).endswith("sm_90a binding='layer 0')")
    grouped = PlanKey("grouped_gemm", ((1, 2, 3), (4, 5, 6)), (), (), "default", "linear", None)
    assert repr(grouped).startswith("PlanKey(grouped_gemm (1x2x3,4x5x6) ")
    assert repr(grouped).endswith(" any-arch)")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key))])
def test_copies_of_keys_find_the_same_plan(duplicate: Any) -> None:
    key = key_of(128, "layer 0")
    assert duplicate(key) == key
    assert hash(duplicate(key)) == hash(key)


def test_a_key_of_another_process_finds_the_plan() -> None:
    # Strings have other hashes there, so a hash must not travel.
    code = "import pickle, sys; from test_plan_cache import key_of; sys.stdout.buffer.write(pickle.dumps(key_of(8)))"
    environ = os.environ | {"PYTHONHASHSEED": "12345"}
    environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])  # noqa: PTH120
    made = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True, timeout=60)
    key = pickle.loads(made.stdout)
    assert {key_of(8): "found"}[key] == "found"


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -1, 1.0, "8", True, None])
def test_a_cache_holds_at_least_one_plan(capacity: Any) -> None:
    with pytest.raises(InvalidOperandError, match=r"capacity is .*; expected an integer from 1"):
        PlanCache(capacity)


def test_plans_are_found_by_key_and_counted() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(4)
    assert (len(cache), cache.get(key_of(1))) == (0, None)
    plan = plan_of(1)
    cache.insert(plan)
    assert cache.get(key_of(1)) is plan
    assert key_of(1) in cache
    assert key_of(2) not in cache
    assert (len(cache), cache.hits, cache.misses, cache.evictions) == (1, 1, 1, 0)
    assert repr(cache) == "<PlanCache: 1 of 4 plans, 1 hits, 1 misses, 0 evictions>"


def test_the_plan_used_least_recently_goes() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(2)
    cache.insert(plan_of(1))
    cache.insert(plan_of(2))
    cache.get(key_of(1))
    assert cache.peek(key_of(2)) is not None  # no use
    cache.insert(plan_of(3))
    assert [key_of(m) in cache for m in (1, 2, 3)] == [True, False, True]
    assert (len(cache), cache.hits, cache.misses, cache.evictions) == (2, 1, 0, 1)


def test_a_plan_takes_the_place_of_another_of_its_key() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(2)
    cache.insert(plan_of(1))
    cache.insert(plan_of(2))
    newer = plan_of(1)
    cache.insert(newer)
    assert (len(cache), cache.evictions) == (2, 0)
    cache.insert(plan_of(3))  # plan 1 is the newer one now
    assert cache.get(key_of(1)) is newer
    assert key_of(2) not in cache


def test_any_hashable_key_serves() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(2)
    plan = plan_of(1)
    cache.insert(plan, (b"signature", None, True))
    assert cache.get((b"signature", None, True)) is plan
    assert key_of(1) not in cache


def test_a_plan_without_a_key_needs_one() -> None:
    cache: PlanCache[Any] = PlanCache(2)
    with pytest.raises(InvalidOperandError, match="made from no request"):
        cache.insert(CachedPlan(None, "", ""))  # type: ignore[arg-type]


def test_clearing_drops_the_plans_and_keeps_the_counters() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(2)
    cache.insert(plan_of(1))
    cache.get(key_of(1))
    cache.clear()
    assert (len(cache), cache.get(key_of(1)), cache.hits, cache.misses) == (0, None, 1, 1)


class Owner:
    """A plan whose destruction looks at the cache, from another thread, as a waiting one could."""

    key, source, kernel_name, kernel_handle = key_of(1), "", "", None

    def __init__(self, cache: PlanCache[Any]) -> None:
        self.cache, self.seen = cache, threading.Event()

    def __del__(self) -> None:
        thread = threading.Thread(target=self.look)
        thread.start()
        thread.join(10)
        assert self.seen.is_set()

    def look(self) -> None:
        self.cache.get(self.key)
        self.seen.set()


@pytest.mark.parametrize("drop", ["evict", "replace", "clear"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_plan_is_destroyed_outside_the_lock(drop: str) -> None:
    cache: PlanCache[Any] = PlanCache(1)
    owner = Owner(cache)
    gone = weakref.ref(owner)
    seen = owner.seen
    cache.insert(owner)
    del owner
    if drop == "clear":
        cache.clear()
    else:
        cache.insert(plan_of(1 if drop == "replace" else 2))
    gc.collect()
    assert gone() is None
    assert seen.is_set()


def test_32_threads_share_a_cache() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(8)
    plans = [plan_of(m) for m in range(16)]
    lookups = 500
    start = threading.Barrier(32)

    def work(seed: int) -> int:
        chosen = random.Random(seed)
        start.wait()
        wrong = 0
        for _ in range(lookups):
            plan = chosen.choice(plans)
            found = cache.get(plan.key)
            if found is None:
                cache.insert(plan)
            else:
                wrong += found is not plan
        return wrong

    with ThreadPoolExecutor(32) as pool:
        assert sum(pool.map(work, range(32))) == 0
    assert len(cache) == 8
    assert cache.hits + cache.misses == 32 * lookups
    assert cache.evictions <= cache.misses - 8


def test_a_look_up_is_fast() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(256)
    for m in range(256):
        cache.insert(plan_of(m))
    signature = (b"s" * 128, None, True)
    cache.insert(plan_of(0), signature)
    # 0.25 us where it was measured; the margin is for machines that are slower, and busy.
    assert min(timeit.repeat(lambda: cache.get(signature), number=10000, repeat=20)) / 10000 < 2e-6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_lock_held_during_fork_does_not_stop_the_child() -> None:
    cache: PlanCache[CachedPlan] = PlanCache(2)
    cache.insert(plan_of(1))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if cache.get(key_of(1)) is not None else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
