"""CutlassActor: rendering, launching, bindings, the mailbox, many threads, lost contexts; on a fake GPU."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pykka
import pytest

import atomr_cutlass as ac
import request_calls
from atomr_cutlass import (
    CachedPlan,
    ConvDgradRequest,
    ConvFwdRequest,
    ConvLayout,
    ConvShape,
    ConvWgradRequest,
    CutlassActor,
    CutlassMsg,
    EvtBuilder,
    GemmEpilogue,
    GemmLayout,
    GemmRequest,
    GemmShape,
    GroupedGemmRequest,
    GroupedGemmShape,
    RefitMsg,
    SmArch,
    _core,
)
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.errors import (
    ContextPoisonedError,
    InvalidOperandError,
    KernelNotFoundError,
    LibraryError,
    UnsupportedError,
)
from atomr_cutlass.pipeline.operation import operation_of
from fake_gpu import FakeGpu, fetch, labelled, operands_of, place, product

REQUEST = GemmRequest(GemmShape(8, 16, 32), dtype=D.F16, arch=SmArch.SM80)
GEMM = CutlassMsg.Gemm(REQUEST)
BAD = CutlassMsg.Gemm(GemmRequest(GemmShape(0, 16, 32), dtype=D.F16, arch=SmArch.SM80))
"""Refused: there is nothing to plan."""
TREE = (
    EvtBuilder()
    .add_bias("bias", dtype=D.BF16)
    .aux_load("kept", kind="mask")
    .binary("multiply", "kept")
    .mask_store("positive")
    .aux_store("before", dtype=D.F16)
    .reduce("sums", "row")
    .reduce("tops", "column", "max")
    .build()
)
GROUPED = GroupedGemmRequest(
    GroupedGemmShape([GemmShape(8, 16, 32), GemmShape(0, 16, 32), GemmShape(24, 16, 32)]),
    dtype=D.BF16, arch=SmArch.SM90A,
)  # fmt: skip
CONV = ConvFwdRequest(ConvShape.nhwc(2, 7, 8, 16, 24, 3, 2, padding=1), dtype=D.F16, arch=SmArch.SM80)
SCALED = GemmRequest(
    GemmShape(16, 32, 64), dtype=D.F8E4M3, arch=SmArch.SM90A, layout_b=GemmLayout.COL_MAJOR, scaling="vector"
)
OTHERS: dict[str, Any] = {
    "grouped": CutlassMsg.GroupedGemm(GROUPED),
    "grouped with c": CutlassMsg.GroupedGemm(dataclasses.replace(GROUPED, epilogue=GemmEpilogue(2.0, 3.0))),
    "grouped with bias": CutlassMsg.GroupedGemm(
        dataclasses.replace(GROUPED, epilogue=GemmEpilogue(bias=True, activation="relu"))
    ),
    **{
        f"grouped with {scaling} scales": CutlassMsg.GroupedGemm(
            dataclasses.replace(
                GROUPED, dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, scaling=scaling, epilogue=epilogue
            )
        )
        for scaling, epilogue in (
            ("tensor", GemmEpilogue(2.0, 3.0)),
            ("vector", GemmEpilogue(bias=True)),
            ("block", GemmEpilogue()),
        )
    },
    "fprop": CutlassMsg.Conv(CONV),
    "fprop with bias": CutlassMsg.Conv(
        dataclasses.replace(CONV, epilogue=GemmEpilogue(bias=True, activation="relu"), layout=ConvLayout.NCHW)
    ),
    "dgrad": CutlassMsg.Conv(ConvDgradRequest(CONV.shape, dtype=D.F16, arch=SmArch.SM80)),
    "wgrad": CutlassMsg.Conv(
        ConvWgradRequest(CONV.shape, dtype=D.F32, arch=SmArch.SM80, layout=ConvLayout.NCHW, epilogue=GemmEpilogue(1, 2))
    ),
    "vectors": CutlassMsg.Gemm(SCALED),
    "tensors": CutlassMsg.Gemm(dataclasses.replace(SCALED, scaling="tensor", quantized=True, out_dtype=D.F8E4M3)),
    "blocks": CutlassMsg.Gemm(dataclasses.replace(SCALED, scaling="block", epilogue=GemmEpilogue(beta=1.0))),
    "bias": CutlassMsg.Gemm(dataclasses.replace(REQUEST, epilogue=GemmEpilogue(bias=True, activation="gelu"))),
    "tree": CutlassMsg.Gemm(
        dataclasses.replace(REQUEST, shape=GemmShape(8, 20, 32, 3), epilogue=GemmEpilogue(2.0, 3.0, tree=TREE))
    ),
    "tree with vectors": CutlassMsg.Gemm(
        dataclasses.replace(SCALED, epilogue=GemmEpilogue(tree=TREE), out_dtype=D.F8E5M2)
    ),
}
"""A message of every other kind, without operands."""


def wide(n: int) -> GemmRequest:
    return dataclasses.replace(REQUEST, shape=GemmShape(8, n, 32))


def bound(name: str, **changes: Any) -> GemmRequest:
    return dataclasses.replace(REQUEST, binding=name, **changes)


@pytest.fixture
def mailboxes() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for mailbox in started:
        mailbox.stop(timeout=10)


def compute(actor: CutlassActor, request: GemmRequest = REQUEST, seed: int = 0) -> None:
    """Sends a request with operands and checks the answer."""
    given = operands_of(request, seed)
    result = actor.handle(CutlassMsg.Gemm(request, given))
    np.testing.assert_array_equal(fetch(result), product(request, *(fetch(view) for view in given.values())))


# ----------------------------------------------------------------------------------------------------------------------
# Without operands
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mock", [True, False])
def test_a_request_alone_is_rendered_and_cached(mock: bool) -> None:
    actor = CutlassActor(8, mock=mock)
    plan = actor.handle(GEMM)
    assert isinstance(plan, CachedPlan)
    assert (plan.source, plan.kernel_name) == REQUEST.render_cu()
    assert (plan.key, plan.kernel_handle) == (REQUEST.plan_key(), None)
    assert actor.plan_cache.get(REQUEST.plan_key()) is plan
    assert actor.handle(CutlassMsg.Gemm(dataclasses.replace(REQUEST))) is plan
    assert (actor.dispatched, len(actor.plan_cache)) == (2, 1)
    assert actor.rendered == ([REQUEST.render_cu()] if mock else [])


def test_the_compile_sink_gets_each_source_once() -> None:
    seen: list[tuple[str, str]] = []
    actor = CutlassActor(8, compile_sink=lambda *rendered: seen.append(rendered))
    for message in (GEMM, GEMM, CutlassMsg.Gemm(wide(64))):
        actor.handle(message)
    assert seen == [REQUEST.render_cu(), wide(64).render_cu()]


def test_a_sink_that_fails_only_warns() -> None:
    def sink(_source: str, _name: str) -> None:
        raise RuntimeError("no compiler")

    actor = CutlassActor(8, compile_sink=sink, mock=True)
    with pytest.warns(RuntimeWarning, match=r"the compile sink failed on cutlass_.*no compiler"):
        plan = actor.handle(GEMM)
    assert actor.plan_cache.get(REQUEST.plan_key()) is plan
    assert actor.rendered


def test_the_plan_used_least_recently_is_rendered_again() -> None:
    actor = CutlassActor(2, mock=True)
    for n in (16, 32, 16, 64, 16, 32):
        actor.handle(CutlassMsg.Gemm(wide(n)))
    assert len(actor.rendered) == 4
    cache = actor.plan_cache
    assert (len(cache), cache.hits, cache.misses, cache.evictions) == (2, 2, 4, 2)


def test_what_cannot_be_rendered_is_not_cached() -> None:
    actor = CutlassActor(8, mock=True)
    with pytest.raises(UnsupportedError, match="empty: there is nothing to plan"):
        actor.handle(BAD)
    assert (len(actor.plan_cache), actor.dispatched, actor.rendered) == (0, 1, [])


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("mock", [True, False])
def test_every_kind_of_request_is_rendered_and_cached(kind: str, mock: bool) -> None:
    message = OTHERS[kind]
    actor = CutlassActor(8, mock=mock)
    plan = actor.handle(message)
    assert (plan.source, plan.kernel_name) == message.request.render_cu()
    assert plan.key == message.request.plan_key()
    assert actor.handle(message) is plan
    assert actor.rendered == ([message.request.render_cu()] if mock else [])


@pytest.mark.parametrize("kind", OTHERS)
def test_a_mock_serves_no_operands_of_any_kind(kind: str) -> None:
    message = OTHERS[kind]
    with pytest.raises(LibraryError, match="mock: operands need a GPU"):
        CutlassActor(8, mock=True).handle(type(message)(message.request, (object(), object())))


@pytest.mark.parametrize("message", [None, REQUEST, CutlassMsg(), RefitMsg(REQUEST.plan_key(), b"")])
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(InvalidOperandError, match="msg is a"):
        CutlassActor(8, mock=True).handle(message)


@pytest.mark.parametrize("operands", [object(), (object(), object()), {"a": np.ones((8, 32), np.float16)}])
def test_a_mock_serves_no_operands(operands: Any) -> None:
    actor = CutlassActor(8, mock=True)
    with pytest.raises(LibraryError, match="mock: operands need a GPU") as caught:
        actor.handle(CutlassMsg.Gemm(REQUEST, operands))
    assert caught.value.lib == "mock"
    assert actor.rendered == []


def test_a_mock_knows_the_keys_of_its_plans() -> None:
    actor = CutlassActor(8, mock=True)
    refit = CutlassMsg.Refit(RefitMsg(REQUEST.plan_key(), bytes(16)))
    with pytest.raises(InvalidOperandError, match=r"no plan of PlanKey\(gemm .*\) is known"):
        actor.handle(refit)
    actor.handle(GEMM)
    assert actor.handle(refit) is None
    assert actor.dispatched == 3


def test_props_make_actors() -> None:
    props = ac.props(3)
    assert props == ac.CutlassProps(3)
    first, second = props.create(mock=True), props.create()
    assert (first.plan_cache.capacity, first.mock, second.mock) == (3, True, False)
    assert first.plan_cache is not second.plan_cache
    with pytest.raises(InvalidOperandError, match="capacity is 0"):
        ac.props(0).create()
    mock = ac.mock_props().create()
    assert mock.mock
    assert not ac.mock_props().create(mock=False).mock
    mock.handle(GEMM)
    with pytest.raises(LibraryError, match="mock: operands need a GPU"):
        mock.handle(CutlassMsg.Gemm(REQUEST, (object(), object())))


def test_prebuilt_kernels_are_the_installations_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, active in (([], False), ([{"pack": "mine"}], False), ([{"pack": "mine"}, {"pack": ""}], True)):
        monkeypatch.setattr(_core, "rows", lambda rows=rows: rows)
        assert CutlassActor.prebuilt_active() is active


# ----------------------------------------------------------------------------------------------------------------------
# With operands
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epilogue": GemmEpilogue(alpha=2.0, beta=3.0)},
        {"shape": GemmShape(8, 16, 32, 3)},
        {"layout_a": GemmLayout.COL_MAJOR, "layout_b": GemmLayout.COL_MAJOR},
        {"out_dtype": D.F32},
        {"dtype": D.F32, "precision": "tf32"},
    ],
)
def test_operands_are_multiplied_and_awaited(actor: CutlassActor, gpu: FakeGpu, changes: dict[str, Any]) -> None:
    request = dataclasses.replace(REQUEST, **changes)
    compute(actor, request)
    compute(actor, request, seed=1)
    assert (len(gpu.plans), len(gpu.launches)) == (1, 2)
    assert gpu.synchronized == [(0, 0)] * 2
    assert (actor.plan_cache.hits, actor.plan_cache.misses) == (1, 1)


@pytest.mark.parametrize("form", [dict, lambda given: tuple(given.values())])
@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_is_computed_and_awaited(actor: CutlassActor, gpu: FakeGpu, kind: str, form: Any) -> None:
    message = OTHERS[kind]
    for seed in range(2):
        given = operands_of(message.request, seed)
        views = labelled(message.request, given)
        want = request_calls.results_of(message.request, {label: fetch(view) for label, view in views.items()})
        result = actor.handle(type(message)(message.request, form(given)))
        *_, out = operation_of(message.request).operands(message.request)
        assert isinstance(result, list) == out.listed
        views |= zip(out.labels, result if out.listed else [result], strict=True)
        for label, values in want.items():
            np.testing.assert_array_equal(fetch(views[label]), values)
    assert (len(gpu.plans), len(gpu.launches), gpu.synchronized) == (1, 2, [(0, 0)] * 2)


def test_trees_of_one_program_have_plans_of_their_own(actor: CutlassActor, gpu: FakeGpu) -> None:
    for name in ("bias", "shift", "bias"):
        epilogue = GemmEpilogue(tree=EvtBuilder().add_bias(name).build())
        request = dataclasses.replace(REQUEST, epilogue=epilogue)
        actor.handle(CutlassMsg.Gemm(request, operands_of(request)))
    assert len({plan.key for plan in gpu.plans}) == len(gpu.plans) == len(actor.plan_cache) == 2


@pytest.mark.parametrize("shape", [GemmShape(0, 16, 32), GemmShape(8, 0, 32), GemmShape(8, 16, 32, 0)])
def test_reductions_of_nothing_are_written(actor: CutlassActor, gpu: FakeGpu, shape: GemmShape) -> None:
    request = dataclasses.replace(REQUEST, shape=shape, epilogue=GemmEpilogue(tree=TREE))
    given = operands_of(request)
    result = actor.handle(CutlassMsg.Gemm(request, given))
    assert result.shape == request.problem(0).d.shape
    assert (fetch(given["sums"]) == 0).all()
    assert (fetch(given["tops"]) == -np.inf).all()
    assert (gpu.plans, gpu.launches) == ([], [])


def test_results_of_groups_are_written_where_the_message_says(actor: CutlassActor, gpu: FakeGpu) -> None:
    given = operands_of(GROUPED)
    out = [place(np.zeros((group.m, group.n), ml_dtypes.bfloat16)) for group in GROUPED.shape.groups]
    answer = actor.handle(CutlassMsg.GroupedGemm(GROUPED, given, out=out, stream=7))
    assert all(got is array for got, array in zip(answer, out, strict=True))
    assert gpu.launches[0][1] == 7


def test_groups_without_elements_launch_nothing(actor: CutlassActor, gpu: FakeGpu) -> None:
    request = dataclasses.replace(GROUPED, shape=GroupedGemmShape([GemmShape(0, 16, 32), GemmShape(8, 0, 32)]))
    answer = actor.handle(CutlassMsg.GroupedGemm(request, operands_of(request)))
    assert [array.shape for array in answer] == [(0, 16), (8, 0)]
    assert (gpu.plans, gpu.launches) == ([], [])


def test_a_refit_of_what_binds_nothing_is_refused(actor: CutlassActor) -> None:
    actor.handle(CutlassMsg.Conv(CONV, operands_of(CONV)))
    with pytest.raises(InvalidOperandError, match="give the request binding='a name', and send a Conv message with w"):
        actor.handle(CutlassMsg.Refit(RefitMsg(CONV.plan_key(), b"")))


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_binds_its_second_operand(actor: CutlassActor, gpu: FakeGpu, kind: str) -> None:
    send, plain = type(OTHERS[kind]), OTHERS[kind].request
    request = dataclasses.replace(plain, binding="w")
    given, other = operands_of(request), operands_of(request, seed=1)
    kept = operation_of(request).bound
    rest = {name: array for name, array in given.items() if name != kept}

    def values(answer: Any) -> Any:
        return [fetch(array) for array in answer] if isinstance(answer, list) else [fetch(answer)]

    with pytest.raises(InvalidOperandError, match=f"has no operand yet: the first message has to bring {kept}"):
        actor.handle(send(request, rest))
    first = values(actor.handle(send(request, given)))
    np.testing.assert_equal(values(actor.handle(send(request, rest))), first)
    with pytest.raises(InvalidOperandError, match=f"another {kept}: leave {kept} out"):
        actor.handle(send(request, {**given, kept: other[kept]}))
    assert actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), other[kept]))) is None
    assert len(gpu.plans) == 1
    changed = values(actor.handle(send(request, rest)))
    np.testing.assert_equal(changed, values(actor.handle(send(plain, {**given, kept: other[kept]}))))


def test_one_plan_serves_every_scalar(actor: CutlassActor, gpu: FakeGpu) -> None:
    for alpha in (1.0, 2.0, -3.0):
        compute(actor, dataclasses.replace(REQUEST, epilogue=GemmEpilogue(alpha=alpha)))
    assert len(gpu.plans) == 1


def test_the_result_is_written_where_the_message_says(actor: CutlassActor, gpu: FakeGpu) -> None:
    given, out = operands_of(REQUEST), place(np.zeros((8, 16), np.float16))
    assert actor.handle(CutlassMsg.Gemm(REQUEST, given, out=out, stream=7)) is out
    np.testing.assert_array_equal(fetch(out), product(REQUEST, fetch(given["a"]), fetch(given["b"])))
    assert gpu.launches[0][1] == 7
    assert gpu.synchronized == [(0, 7)]


def test_a_rendered_plan_makes_way_for_one_that_launches(actor: CutlassActor, gpu: FakeGpu) -> None:
    assert isinstance(actor.handle(GEMM), CachedPlan)
    compute(actor)
    assert actor.handle(GEMM) is gpu.plans[0]
    assert (len(actor.plan_cache), actor.plan_cache.evictions) == (1, 0)


def test_a_dropped_plan_is_made_again(gpu: FakeGpu) -> None:
    actor = CutlassActor(1, planner=gpu.plan)
    for n in (16, 32, 16):
        compute(actor, wide(n))
    assert len(gpu.plans) == 3
    assert actor.plan_cache.evictions == 2


def test_operands_of_the_wrong_kind_are_refused_before_planning(actor: CutlassActor, gpu: FakeGpu) -> None:
    given = operands_of(wide(32))
    with pytest.raises(InvalidOperandError, match="b has shape"):
        actor.handle(CutlassMsg.Gemm(REQUEST, given))
    assert gpu.plans == []


def test_operands_of_another_gpu_are_refused(gpu: FakeGpu) -> None:
    actor = CutlassActor(8, device=1, planner=gpu.plan)
    with pytest.raises(InvalidOperandError, match="the operands are on cuda:0"):
        actor.handle(CutlassMsg.Gemm(REQUEST, operands_of(REQUEST)))
    assert gpu.plans == []


def test_a_stream_being_captured_is_refused(actor: CutlassActor, gpu: FakeGpu) -> None:
    gpu.capturing.add(3)
    with pytest.raises(InvalidOperandError, match="being captured into a CUDA graph"):
        actor.handle(CutlassMsg.Gemm(REQUEST, operands_of(REQUEST), stream=3))
    assert gpu.launches == []
    compute(actor)


def test_an_empty_result_launches_nothing(actor: CutlassActor, gpu: FakeGpu) -> None:
    request = dataclasses.replace(REQUEST, shape=GemmShape(0, 16, 32))
    result = actor.handle(CutlassMsg.Gemm(request, operands_of(request)))
    assert result.shape == (0, 16)
    assert (gpu.plans, gpu.launches) == ([], [])


def test_an_empty_result_waits_for_nothing(actor: CutlassActor, gpu: FakeGpu) -> None:
    gpu.capturing.add(0)
    request = dataclasses.replace(REQUEST, shape=GemmShape(0, 16, 32))
    assert actor.handle(CutlassMsg.Gemm(request, operands_of(request))).shape == (0, 16)


def test_the_largest_magnitude_of_an_empty_result_is_0(actor: CutlassActor, gpu: FakeGpu) -> None:
    request = GemmRequest(
        GemmShape(0, 16, 32), dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, scaling="tensor", quantized=True
    )
    given = operands_of(request)
    result = actor.handle(CutlassMsg.Gemm(request, given))
    assert result.shape == (0, 16)
    assert fetch(given["amax"]) == 0
    assert gpu.launches == []


def test_a_failed_plan_is_not_cached(gpu: FakeGpu) -> None:
    failures = [KernelNotFoundError("not built")]

    def planner(request: GemmRequest, device: int) -> Any:
        if failures:
            raise failures.pop()
        return gpu.plan(request, device)

    actor = CutlassActor(8, planner=planner)
    with pytest.raises(KernelNotFoundError, match="not built"):
        compute(actor)
    assert len(actor.plan_cache) == 0
    compute(actor)


def test_the_packages_own_plan_is_the_default() -> None:
    assert CutlassActor(1)._planner is ac.plan


def test_operands_are_let_go_with_the_message(actor: CutlassActor, gpu: FakeGpu) -> None:
    class Memory:
        pass

    owner = Memory()
    gone = weakref.ref(owner)
    given = operands_of(REQUEST)
    a = given["a"]
    given["a"] = _core.Operand(a.pointer, a.shape, a.strides, a.dtype, 2, 0, False, [owner, a])
    del owner, a
    alive_at_launch: list[bool] = []
    gpu.fail = lambda: alive_at_launch.append(gone() is not None)
    actor.handle(CutlassMsg.Gemm(REQUEST, given))
    del given
    gc.collect()
    assert alive_at_launch == [True]
    assert gone() is None


# ----------------------------------------------------------------------------------------------------------------------
# Bindings
# ----------------------------------------------------------------------------------------------------------------------


def send(actor: CutlassActor, request: GemmRequest, a: Any, b: Any = None) -> Any:
    return fetch(actor.handle(CutlassMsg.Gemm(request, {"a": a, "b": b})))


def test_the_first_b_is_bound_and_refitted_in_place(actor: CutlassActor, gpu: FakeGpu) -> None:
    request = bound("layer 0")
    a, w = operands_of(request).values()
    first = send(actor, request, a, w)
    np.testing.assert_array_equal(send(actor, request, a), first)
    np.testing.assert_array_equal(send(actor, request, a, w), first)  # the same one may be sent again
    new = operands_of(request, seed=5)["b"]
    assert actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), new, stream=4))) is None
    np.testing.assert_array_equal(fetch(w), fetch(new))  # the caller's own array
    np.testing.assert_array_equal(send(actor, request, a), product(request, fetch(a), fetch(new)))
    assert [copy[2:] for copy in gpu.copies] == [(1024, 0, 4)]
    assert gpu.synchronized[-2:] == [(0, 4), (0, 0)]
    assert len(gpu.plans) == 1  # nothing is planned anew
    assert actor.dispatched == 5


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "array"])
def test_a_refit_from_the_host(actor: CutlassActor, kind: str, columns: bool) -> None:
    request = bound("w", layout_b=GemmLayout.COL_MAJOR if columns else GemmLayout.ROW_MAJOR)
    a, w = operands_of(request).values()
    send(actor, request, a, w)
    values = np.arange(512).reshape(32, 16).astype(np.float16) % 7
    raw = (values.T if columns else values).tobytes()
    actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), raw if kind == "bytes" else values)))
    np.testing.assert_array_equal(send(actor, request, a), product(request, fetch(a), values))


def test_two_layers_of_one_shape_keep_their_own(actor: CutlassActor, gpu: FakeGpu) -> None:
    layers = [bound(f"layer {i}") for i in range(2)]
    a = operands_of(REQUEST)["a"]
    weights = [operands_of(REQUEST, seed)["b"] for seed in (1, 2)]
    for layer, w in zip(layers, weights, strict=True):
        send(actor, layer, a, w)
    actor.handle(CutlassMsg.Refit(RefitMsg(layers[1].plan_key(), bytes(1024))))
    assert send(actor, layers[0], a).any()
    assert not send(actor, layers[1], a).any()
    assert len(gpu.plans) == 2


def test_a_binding_outlives_its_plan(gpu: FakeGpu) -> None:
    actor = CutlassActor(1, planner=gpu.plan)
    request = bound("w")
    a, w = operands_of(request).values()
    first = send(actor, request, a, w)
    compute(actor)
    assert request.plan_key() not in actor.plan_cache
    actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), fetch(w) * 2)))
    np.testing.assert_array_equal(send(actor, request, a), first * 2)


def test_another_b_is_not_taken_for_the_bound_one(actor: CutlassActor) -> None:
    request = bound("w")
    a, w = operands_of(request).values()
    send(actor, request, a, w)
    other = operands_of(request, seed=3)["b"]
    with pytest.raises(InvalidOperandError, match="binding 'w' has another b: leave b out, send a Refit"):
        send(actor, request, a, other)
    actor.unbind(request.plan_key())
    np.testing.assert_array_equal(send(actor, request, a, other), product(request, fetch(a), fetch(other)))
    actor.unbind(bound("unknown").plan_key())


def test_a_binding_without_an_operand_asks_for_one(actor: CutlassActor, gpu: FakeGpu) -> None:
    request = bound("w")
    with pytest.raises(InvalidOperandError, match="binding 'w' has no operand yet: the first message has to bring b"):
        send(actor, request, operands_of(request)["a"])
    assert gpu.plans == []  # nothing was compiled for it
    send(actor, request, *operands_of(request).values())
    actor.unbind(request.plan_key())
    with pytest.raises(InvalidOperandError, match="keeps no operand: send a Gemm message with b first"):
        actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), b"")))


@pytest.mark.parametrize("mock", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_refit_of_what_was_only_rendered_succeeds(kind: str, mock: bool) -> None:
    """There is no operand yet: the message that brings it brings its values."""
    actor = CutlassActor(8, mock=mock)
    for binding in (None, "w"):
        request = dataclasses.replace(OTHERS[kind].request, binding=binding)
        actor.handle(type(OTHERS[kind])(request))
        assert actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), bytes(16)))) is None
    other = dataclasses.replace(request, binding="other")
    with pytest.raises(InvalidOperandError, match="no plan of PlanKey"):
        actor.handle(CutlassMsg.Refit(RefitMsg(other.plan_key(), b"")))
    assert actor.dispatched == 5


def test_a_refit_of_a_plan_that_binds_nothing_says_how_to(actor: CutlassActor) -> None:
    compute(actor)
    with pytest.raises(InvalidOperandError, match="keeps no operand: give the request binding='a name'"):
        actor.handle(CutlassMsg.Refit(RefitMsg(REQUEST.plan_key(), bytes(1024))))


def test_a_refit_of_an_unknown_key_is_refused(actor: CutlassActor) -> None:
    with pytest.raises(InvalidOperandError, match=r"no plan of PlanKey\(.*\) is known: send its Gemm first"):
        actor.handle(CutlassMsg.Refit(RefitMsg(wide(64).plan_key(), bytes(1024))))


@pytest.mark.parametrize("weights", [bytes(1023), np.zeros((32, 16), np.float32), np.zeros((16, 32), np.float16)])
def test_a_refit_of_the_wrong_size_or_dtype_changes_nothing(actor: CutlassActor, weights: Any) -> None:
    request = bound("w")
    a, w = operands_of(request).values()
    first = send(actor, request, a, w)
    with pytest.raises(InvalidOperandError, match="weights"):
        actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), weights)))
    np.testing.assert_array_equal(send(actor, request, a), first)


def test_a_read_only_operand_is_not_refitted(actor: CutlassActor) -> None:
    request = bound("w")
    a, w = operands_of(request).values()
    send(actor, request, a, place(fetch(w), read_only=True))
    with pytest.raises(InvalidOperandError, match="the bound operand is read-only"):
        actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), bytes(1024))))


def test_what_the_plan_refuses_is_not_bound(actor: CutlassActor, gpu: FakeGpu) -> None:
    def refuse() -> None:
        raise InvalidOperandError("b is misaligned")

    request = bound("w")
    a, w = operands_of(request).values()
    gpu.fail = refuse
    with pytest.raises(InvalidOperandError, match="misaligned"):
        send(actor, request, a, w)
    gpu.fail = lambda: None
    with pytest.raises(InvalidOperandError, match="no operand yet"):
        send(actor, request, a)


def test_a_bound_operand_stays_alive(actor: CutlassActor) -> None:
    class Memory:
        pass

    request = bound("w")
    a, w = operands_of(request).values()
    owner = Memory()
    gone = weakref.ref(owner)
    send(actor, request, a, _core.Operand(w.pointer, w.shape, w.strides, w.dtype, 2, 0, False, [owner, w]))
    del owner
    gc.collect()
    assert gone() is not None
    actor.unbind(request.plan_key())
    gc.collect()
    assert gone() is None


def test_a_bound_plan_launches_and_is_refitted(gpu: FakeGpu) -> None:
    a, w = operands_of(REQUEST).values()
    plan = ac.BoundPlan(gpu.plan(REQUEST, 0), w)
    out = place(np.zeros((8, 16), np.float16))
    plan(a, out=out, alpha=1.0, beta=0.0, stream=2)
    np.testing.assert_array_equal(fetch(out), product(REQUEST, fetch(a), fetch(w)))
    plan.refit(bytes(1024))
    plan(a, out=out, alpha=1.0, beta=0.0, stream=2)
    assert not fetch(out).any()
    assert (plan.key, plan.kernel_name, plan.kernel_handle) == (REQUEST.plan_key(), "fake_kernel", 1)
    assert plan.source == "// source"
    with pytest.raises(InvalidOperandError, match="b has shape"):
        ac.BoundPlan(gpu.plan(REQUEST, 0), a)
    with pytest.raises(InvalidOperandError, match="b is on cuda:0; the plan is for cuda:1"):
        ac.BoundPlan(gpu.plan(REQUEST, 1), w)
    for nothing in (None, "plan", REQUEST):
        with pytest.raises(InvalidOperandError, match=f"plan is a {type(nothing).__name__}; expected a Plan"):
            ac.BoundPlan(nothing, w)


def test_bound_weights_are_settled_but_for_the_launch_after_they_were_written(gpu: FakeGpu) -> None:
    """A settled operand may be read before what precedes the launch on the stream has ended."""
    a, w = operands_of(REQUEST).values()
    plan = ac.BoundPlan(gpu.plan(REQUEST, 0), w)
    launch, settled = plan.plan, []

    def noted(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        settled.append(b.settled)
        return launch(a, b, *rest, **options)

    plan.plan = noted
    out = place(np.zeros((8, 16), np.float16))
    for values in (None, None, bytes(1024), None, w):
        if values is not None:
            plan.refit(values)
        plan(a, out=out, alpha=1.0, beta=0.0, stream=2)
    with pytest.raises(TypeError):
        plan(a, unknown=1)
    plan(a, out=out, alpha=1.0, beta=0.0, stream=2)
    assert settled == [False, True, False, True, False, True, False]
    assert not any(view.settled for view in plan.binding.operands.values())


def test_a_column_major_result_is_computed_where_it_was_allocated(actor: CutlassActor) -> None:
    request = dataclasses.replace(REQUEST, layout_c=GemmLayout.COL_MAJOR)
    given = operands_of(request)
    got = actor.handle(CutlassMsg.Gemm(request, given))
    assert got.strides == (1, request.shape.m)
    np.testing.assert_array_equal(fetch(got), product(request, *map(fetch, given.values())))


# ----------------------------------------------------------------------------------------------------------------------
# The mailbox
# ----------------------------------------------------------------------------------------------------------------------


def test_the_mailbox_answers_in_futures(actor: CutlassActor, mailboxes: list[Any]) -> None:
    mailbox = actor.start()
    mailboxes.append(mailbox)
    assert isinstance(mailbox, pykka.ActorRef)
    assert actor.start() is mailbox
    given = operands_of(REQUEST)
    future = mailbox.ask(CutlassMsg.Gemm(REQUEST, given), block=False)
    np.testing.assert_array_equal(fetch(future.get(timeout=30)), product(REQUEST, fetch(given["a"]), fetch(given["b"])))
    failing = mailbox.ask(BAD, block=False)
    with pytest.raises(UnsupportedError, match="there is nothing to plan"):
        failing.get(timeout=30)
    assert mailbox.is_alive()
    assert actor.dispatched == 2


def test_work_goes_where_the_senders_stream_is(actor: CutlassActor, gpu: FakeGpu, mailboxes: list[Any]) -> None:
    mailbox = actor.start()
    mailboxes.append(mailbox)
    gpu.current.stream = 42  # of this thread; the mailbox's is another
    mailbox.ask(CutlassMsg.Gemm(REQUEST, operands_of(REQUEST)), timeout=30)
    assert gpu.launches[0][1] == 42
    assert gpu.synchronized == [(0, 42)]


def test_errors_that_nobody_awaits_are_logged(
    actor: CutlassActor, mailboxes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    mailbox = actor.start()
    mailboxes.append(mailbox)
    with caplog.at_level(logging.ERROR, "atomr_cutlass"):
        mailbox.tell(BAD)
        mailbox.tell(GEMM)
        assert mailbox.ask(GEMM, timeout=30).key == REQUEST.plan_key()  # it lives on
    assert "there is nothing to plan" in caplog.text
    assert actor.dispatched == 3


def test_a_stopped_mailbox_can_be_started_again(actor: CutlassActor, mailboxes: list[Any]) -> None:
    first = actor.start()
    answered = first.ask(GEMM, block=False)
    first.stop(timeout=30)
    assert answered.get(timeout=30).key == REQUEST.plan_key()
    with pytest.raises(pykka.ActorDeadError):
        first.ask(GEMM, timeout=30)
    second = actor.start()
    mailboxes.append(second)
    assert second is not first
    assert second.ask(GEMM, timeout=30) is answered.get()


_FORGOTTEN = """
import atomr_cutlass as ac
import time

def sink(source, name):
    time.sleep(0.5)
    print("compiled", flush=True)

request = ac.GemmRequest(ac.GemmShape(8, 16, 32), dtype=ac.CutlassDtype.F16, arch=ac.SmArch.SM80)
actor = ac.CutlassActor(8, compile_sink=sink)
actor.start().tell(ac.CutlassMsg.Gemm(request))
print("leaving", flush=True)
"""


def test_a_mailbox_that_nobody_stops_finishes_its_work_and_ends() -> None:
    ran = subprocess.run([sys.executable, "-c", _FORGOTTEN], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["leaving", "compiled"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_nothing_hangs_in_a_forked_child(mailboxes: list[Any]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def sink(_source: str, _name: str) -> None:
        entered.set()
        leave.wait(30)

    actor = CutlassActor(8, compile_sink=sink)
    mailbox = actor.start()
    mailboxes.append(mailbox)
    waiting = mailbox.ask(GEMM, block=False)
    assert entered.wait(30)  # the thread holds the key's lock now
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mailbox.ask(GEMM, timeout=10)
        except pykka.ActorDeadError:
            leave.set()
            status = 0 if actor.handle(GEMM).key == REQUEST.plan_key() else 2
        os._exit(status)
    leave.set()
    assert waiting.get(timeout=30).key == REQUEST.plan_key()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ----------------------------------------------------------------------------------------------------------------------
# Threads
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["handle", "mailbox", "both"])
def test_32_threads_on_one_actor(actor: CutlassActor, gpu: FakeGpu, mailboxes: list[Any], through: str) -> None:
    mailbox = actor.start()
    mailboxes.append(mailbox)
    requests = [wide(n) for n in (8, 16, 24, 32)]
    start = threading.Barrier(32)

    def work(index: int) -> None:
        start.wait(30)
        for turn in range(12):
            request = requests[(index + turn) % len(requests)]
            gpu.current.stream = index
            given = operands_of(request, seed=index * 100 + turn)
            message = CutlassMsg.Gemm(request, given)
            direct = through == "handle" or (through == "both" and turn % 2)
            result = actor.handle(message) if direct else mailbox.ask(message, timeout=60)
            np.testing.assert_array_equal(fetch(result), product(request, *(fetch(view) for view in given.values())))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(32)))
    assert actor.dispatched == 32 * 12
    assert len(gpu.launches) == len(gpu.synchronized) == 32 * 12
    assert sorted(plan.request.shape.n for plan in gpu.plans) == [8, 16, 24, 32]  # one plan a key
    assert actor.plan_cache.hits + actor.plan_cache.misses == 32 * 12


def test_plans_are_made_at_once_for_different_keys_and_once_for_one(gpu: FakeGpu) -> None:
    together = threading.Barrier(2)

    def planner(request: GemmRequest, device: int) -> Any:
        together.wait(30)  # breaks unless both plans are being made at the same time
        return gpu.plan(request, device)

    actor = CutlassActor(8, planner=planner)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: compute(actor, wide(16 if index % 2 else 32), seed=index), range(8)))
    assert len(gpu.plans) == 2


def test_eviction_under_load(gpu: FakeGpu) -> None:
    actor = CutlassActor(2, planner=gpu.plan)

    def work(index: int) -> None:
        for turn in range(10):
            compute(actor, wide(8 + 8 * ((index * 7 + turn) % 6)), seed=turn)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert len(actor.plan_cache) == 2
    assert actor.plan_cache.evictions > 0
    assert dict(actor._keys._locks) == {}


def test_refits_and_launches_of_one_binding_take_turns(actor: CutlassActor) -> None:
    request = bound("w")
    ones = np.ones((8, 32), np.float16)
    a, w = place(ones), place(np.ones((32, 16), np.float16))
    send(actor, request, a, w)

    def work(index: int) -> None:
        for turn in range(10):
            if index % 4:
                result = send(actor, request, a)
                assert (result == result[0, 0]).all()  # all of one refit, never parts of two
            else:
                raw = np.full((32, 16), (index + turn) % 9, np.float16)
                actor.handle(CutlassMsg.Refit(RefitMsg(request.plan_key(), raw)))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))


# ----------------------------------------------------------------------------------------------------------------------
# A lost context
# ----------------------------------------------------------------------------------------------------------------------


def poison(gpu: FakeGpu) -> None:
    def fail() -> None:
        raise ContextPoisonedError("an illegal memory access was encountered")

    gpu.fail = fail


def test_a_lost_context_is_the_answer_and_then_every_answer(gpu: FakeGpu) -> None:
    told: list[ContextPoisonedError] = []
    actor = CutlassActor(8, planner=gpu.plan, on_poisoned=told.append)
    compute(actor)
    assert actor.poisoned is None
    poison(gpu)
    with pytest.raises(ContextPoisonedError, match=r"^an illegal memory access was encountered$") as caught:
        compute(actor)
    assert actor.poisoned is caught.value
    gpu.fail = lambda: None
    refit = CutlassMsg.Refit(RefitMsg(REQUEST.plan_key(), b""))
    for message in (CutlassMsg.Gemm(REQUEST, operands_of(REQUEST)), GEMM, refit, CutlassMsg.Conv(CONV)):
        with pytest.raises(ContextPoisonedError, match=r"refused.*illegal memory access.*fresh process"):
            actor.handle(message)
    assert told == [caught.value]
    assert (actor.dispatched, len(gpu.launches)) == (6, 1)


def test_a_wait_that_fails_poisons_too(actor: CutlassActor, gpu: FakeGpu) -> None:
    def fail() -> None:
        raise ContextPoisonedError("unspecified launch failure")

    gpu.fail_waiting = fail
    with pytest.raises(ContextPoisonedError, match="unspecified launch failure"):
        compute(actor)
    assert actor.poisoned is not None


def test_other_errors_poison_nothing(actor: CutlassActor, gpu: FakeGpu) -> None:
    def fail() -> None:
        raise LibraryError("cuda", "out of memory")

    gpu.fail = fail
    with pytest.raises(LibraryError, match="out of memory"):
        compute(actor)
    gpu.fail = lambda: None
    compute(actor)


def test_a_hook_that_fails_only_warns(gpu: FakeGpu) -> None:
    def hook(_error: ContextPoisonedError) -> None:
        raise RuntimeError("nobody to tell")

    actor = CutlassActor(8, planner=gpu.plan, on_poisoned=hook)
    poison(gpu)
    with (
        pytest.warns(RuntimeWarning, match=r"on_poisoned failed: RuntimeError\('nobody to tell'\)"),
        pytest.raises(ContextPoisonedError, match="illegal"),
    ):
        compute(actor)


def test_what_is_in_flight_gets_the_error_and_the_hook_is_called_once(gpu: FakeGpu, mailboxes: list[Any]) -> None:
    told: list[ContextPoisonedError] = []
    actor = CutlassActor(8, planner=gpu.plan, on_poisoned=told.append)
    mailbox = actor.start()
    mailboxes.append(mailbox)
    compute(actor)
    poison(gpu)

    def work(index: int) -> bool:
        message = CutlassMsg.Gemm(REQUEST, operands_of(REQUEST))
        try:
            actor.handle(message) if index % 2 else mailbox.ask(message, timeout=30)
        except ContextPoisonedError:
            return True
        return False

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(64)))
    assert len(told) == 1
    assert actor.poisoned is told[0]
    assert mailbox.is_alive()  # to say why


# ----------------------------------------------------------------------------------------------------------------------
# The supervisor
# ----------------------------------------------------------------------------------------------------------------------

_WORKERS = """
import contextlib, os, sys
import atomr_cutlass as ac
from pathlib import Path


def lets_it_through(log, good_from):
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if len(Path(log).read_text().split()) < good_from:
        raise ac.ContextPoisonedError("an illegal memory access was encountered")


def by_the_hook(log, good_from):
    def hook(error):
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\\n")
        if len(Path(log).read_text().split()) < good_from:
            ac.exit_for_restart(error)

    class Losing(ac.GemmRequest):
        def render_cu(self):
            raise ac.ContextPoisonedError("an illegal memory access was encountered")

    actor = ac.CutlassActor(8, on_poisoned=hook)
    with contextlib.suppress(ac.ContextPoisonedError):
        actor.handle(ac.CutlassMsg.Gemm(Losing(ac.GemmShape(8, 8, 8), dtype=ac.CutlassDtype.F16)))


def fails():
    raise SystemExit(3)


if __name__ == "__main__":
    target, restarts, *arguments = sys.argv[1:]
    arguments = [int(a) if a.isdigit() else a for a in arguments]
    try:
        ac.supervise(globals()[target], *arguments, restarts=int(restarts), pause=0.01)
    except ac.CutlassError as error:
        print(type(error).__name__, error)
        sys.exit(1)
"""


def supervised(tmp_path: Any, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "workers.py"
    script.write_text(_WORKERS)
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("target", ["lets_it_through", "by_the_hook"])
def test_a_worker_that_lost_its_context_is_started_afresh(tmp_path: Any, target: str) -> None:
    log = tmp_path / "log"
    ran = supervised(tmp_path, target, 3, log, 3)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert len(set(log.read_text().split())) == 3  # processes
    assert ran.stderr.count("atomr_cutlass: an illegal memory access was encountered") == 2
    assert ran.stderr.count("it is started again in a fresh process") == 2


def test_a_worker_is_not_started_for_ever(tmp_path: Any) -> None:
    log = tmp_path / "log"
    ran = supervised(tmp_path, "lets_it_through", 1, log, 9)
    assert ran.returncode == 1
    assert "ContextPoisonedError lets_it_through lost its CUDA context 2 times: it is not" in ran.stdout
    assert len(log.read_text().split()) == 2


def test_a_worker_that_fails_otherwise_is_not_started_again(tmp_path: Any) -> None:
    ran = supervised(tmp_path, "fails", 3)
    assert ran.returncode == 1
    assert "LibraryError worker: fails ended with status 3" in ran.stdout


@pytest.mark.parametrize("arguments", [(lambda: None,), (print, threading.Lock())])
def test_what_cannot_go_to_a_worker_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ac.InvalidOperandError, match="go to another process, and cannot be pickled"):
        ac.supervise(*arguments)


# ----------------------------------------------------------------------------------------------------------------------
# The guide
# ----------------------------------------------------------------------------------------------------------------------


def test_examples_of_the_guide_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "actor.md").read_text(encoding="utf-8")
    parts = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    for part in parts:
        compile(part, "actor.md", "exec")
        if not any(word in part for word in ("mailbox", "layers", "supervise", "{")):  # those need operands
            exec(part, names)
    name, length = capsys.readouterr().out.split()
    assert name.startswith("cutlass3x_sm90_tensorop_gemm_bf16")
    assert int(length) > 1000
