"""CutlassActor's mailbox: overlap, order, asyncio, backpressure, and faults with work in flight; on a fake GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pykka
import pytest

import atomr_cutlass as ac
from atomr_cutlass import CutlassActor, CutlassMsg, GemmRequest, GemmShape, RefitMsg, SmArch, _core
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.errors import CompileError, ContextPoisonedError, InvalidOperandError, LibraryError
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.compiler import Images, Unit
from atomr_cutlass.jit.store import KernelStore
from fake_gpu import FakeGpu, fetch, operands_of, place, product
from jit_unit import KEY, TOOLS, UNIT

REQUEST = GemmRequest(GemmShape(8, 16, 32), dtype=D.F16, arch=SmArch.SM80)
BOUND = dataclasses.replace(REQUEST, binding="w")
SHORT = 0.2
"""Seconds in which nothing happens that is not to happen."""


@pytest.fixture
def mailboxes(gpu: FakeGpu) -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for busy in gpu.busy.values():
        busy.set()
    for mailbox in started:
        mailbox.stop(timeout=10)


@pytest.fixture
def mailbox(actor: CutlassActor, mailboxes: list[Any]) -> Any:
    mailboxes.append(actor.start())
    return mailboxes[0]


def message(stream: int = 0, seed: int = 0) -> CutlassMsg:
    return CutlassMsg.Gemm(REQUEST, operands_of(REQUEST, seed), stream=stream)


def occupy(gpu: FakeGpu, stream: int = 0) -> threading.Event:
    """Makes what is launched on a stream from now on last until the event is set."""
    gpu.busy[stream] = threading.Event()
    return gpu.busy[stream]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def answered(future: Any) -> bool:
    try:
        future.get(timeout=0)
    except pykka.Timeout:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Overlap and order
# ----------------------------------------------------------------------------------------------------------------------


def test_work_is_launched_while_earlier_work_is_in_flight(gpu: FakeGpu, mailbox: Any) -> None:
    busy = occupy(gpu)
    given = [operands_of(REQUEST, seed) for seed in range(5)]
    futures = [mailbox.ask(CutlassMsg.Gemm(REQUEST, arrays), block=False) for arrays in given]
    until(lambda: len(gpu.launches) == 5)
    assert not any(map(answered, futures))
    busy.set()
    for future, arrays in zip(futures, given, strict=True):
        np.testing.assert_array_equal(fetch(future.get(timeout=30)), product(REQUEST, *map(fetch, arrays.values())))


def test_answers_come_in_the_order_of_their_stream(gpu: FakeGpu, mailbox: Any) -> None:
    first_done = occupy(gpu, 7)
    first = mailbox.ask(message(7), block=False)
    mailbox.ask(CutlassMsg.Gemm(REQUEST), timeout=30)  # served when the first is launched, and its event recorded
    occupy(gpu, 7).set()
    second = mailbox.ask(message(7), block=False)
    other = mailbox.ask(message(8), block=False)  # sent last, and on another stream
    other.get(timeout=30)
    time.sleep(SHORT)
    assert not answered(first)
    assert not answered(second)
    first_done.set()
    second.get(timeout=30)
    assert answered(first)


def test_what_needs_no_gpu_is_answered_at_once(gpu: FakeGpu, mailbox: Any) -> None:
    occupy(gpu)
    mailbox.ask(message(), block=False)
    assert mailbox.ask(CutlassMsg.Gemm(REQUEST), timeout=30).key == REQUEST.plan_key()
    with pytest.raises(InvalidOperandError, match="b has shape"):
        mailbox.ask(CutlassMsg.Gemm(REQUEST, (operands_of(REQUEST)["a"],) * 2), timeout=30)


def test_streams_that_are_idle_have_no_thread(gpu: FakeGpu, mailbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("atomr-cutlass-stream")]

    monkeypatch.setattr("atomr_cutlass.serving.mailbox._IDLE_SECONDS", 0.01)
    for _ in range(2):
        for stream in (5, 6):
            mailbox.ask(message(stream), timeout=30)
        until(lambda: not threads())
    assert len(gpu.launches) == 4


def test_operands_live_until_the_work_is_done_and_no_longer(gpu: FakeGpu, mailbox: Any) -> None:
    class Memory:
        pass

    owner = Memory()
    gone = weakref.ref(owner)
    given = operands_of(REQUEST)
    a = given["a"]
    given["a"] = _core.Operand(a.pointer, a.shape, a.strides, a.dtype, 2, 0, False, [owner, a])
    busy = occupy(gpu)
    future = mailbox.ask(CutlassMsg.Gemm(REQUEST, given), block=False)
    del owner, a, given
    until(lambda: len(gpu.launches) == 1)
    gc.collect()
    assert gone() is not None
    busy.set()
    future.get(timeout=30)
    gc.collect()
    assert gone() is None  # though the mailbox has got no other message since


def test_an_idle_mailbox_keeps_no_answer(mailbox: Any) -> None:
    future = mailbox.ask(message(), block=False)
    kept = weakref.ref(future)
    future.get(timeout=30)
    del future
    until(lambda: kept() is None)


# ----------------------------------------------------------------------------------------------------------------------
# asyncio
# ----------------------------------------------------------------------------------------------------------------------


async def ticks_beside(work: Any, ticks: list[float]) -> Any:
    """The result of an awaitable, while a ticker notes the time every millisecond."""

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.001)

    ticker = asyncio.ensure_future(tick())
    try:
        return await work
    finally:
        ticker.cancel()


@pytest.mark.parametrize("kind", ["ask", "map", "stop"])
def test_awaiting_leaves_the_event_loop_free(gpu: FakeGpu, mailbox: Any, kind: str) -> None:
    busy = occupy(gpu)
    given = operands_of(REQUEST)

    async def serve() -> tuple[Any, list[float]]:
        ticks: list[float] = []
        future = mailbox.ask(CutlassMsg.Gemm(REQUEST, given), block=False)
        awaited = {"ask": lambda: future, "map": lambda: future.map(id), "stop": lambda: mailbox.stop(block=False)}
        threading.Timer(0.5, busy.set).start()
        answer = await ticks_beside(awaited[kind](), ticks)
        return (await future if kind == "stop" else answer), ticks

    answer, ticks = asyncio.run(serve())
    if kind != "map":
        np.testing.assert_array_equal(fetch(answer), product(REQUEST, *map(fetch, given.values())))
    assert len(ticks) > 20  # of some 400; a loop that is blocked has one


def test_errors_are_raised_where_the_future_is_awaited(gpu: FakeGpu, mailbox: Any) -> None:
    async def serve() -> None:
        with pytest.raises(InvalidOperandError, match="b has shape"):
            await mailbox.ask(CutlassMsg.Gemm(REQUEST, (operands_of(REQUEST)["a"],) * 2), block=False)

    asyncio.run(serve())
    assert gpu.launches == []


def test_who_stops_awaiting_does_not_stop_the_work(gpu: FakeGpu, mailbox: Any) -> None:
    busy = occupy(gpu)

    async def serve() -> Any:
        future = mailbox.ask(message(), block=False)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.05)
        return future

    future = asyncio.run(serve())
    busy.set()  # nobody's loop runs any more
    assert future.get(timeout=30) is future.get(timeout=0)


async def _awaited(future: Any) -> Any:
    return await future


def test_an_event_loop_never_waits_for_room(gpu: FakeGpu, mailboxes: list[Any]) -> None:
    mailboxes.append(CutlassActor(8, planner=gpu.plan, in_flight=1).start())
    busy = occupy(gpu)

    async def serve() -> list[Any]:
        futures = [mailboxes[0].ask(message(seed=seed), block=False) for seed in range(10)]
        threading.Timer(0.05, busy.set).start()
        return await asyncio.gather(*map(_awaited, futures))

    assert len(asyncio.run(asyncio.wait_for(serve(), 30))) == 10


# ----------------------------------------------------------------------------------------------------------------------
# Backpressure
# ----------------------------------------------------------------------------------------------------------------------


def test_what_is_in_flight_and_what_waits_is_bounded(gpu: FakeGpu, mailboxes: list[Any]) -> None:
    mailboxes.append(CutlassActor(8, planner=gpu.plan, in_flight=2).start())
    busy = occupy(gpu)
    futures: list[Any] = []

    def send() -> None:
        futures.extend(mailboxes[0].ask(message(seed=seed), block=False) for seed in range(7))

    sender = threading.Thread(target=send)
    sender.start()
    # 2 in flight, 1 that the mailbox's thread has taken up, 2 that wait, and 1 that waits for room.
    until(lambda: len(futures) == 5)
    sender.join(SHORT)
    assert sender.is_alive()
    assert (len(futures), len(gpu.launches)) == (5, 2)
    assert mailboxes[0].stop(block=False) is not None  # which is no message
    busy.set()
    sender.join(30)
    assert len(futures) == 7
    until(lambda: all(answered_somehow(future) for future in futures))


def answered_somehow(future: Any) -> bool:
    try:
        return answered(future)
    except pykka.ActorDeadError:
        return True


@pytest.mark.parametrize("bound", [0, True, 1.0, "2"])
def test_bounds_that_are_none(bound: Any) -> None:
    with pytest.raises(InvalidOperandError, match="in_flight is"):
        CutlassActor(8, in_flight=bound)


def test_a_thread_that_serves_never_waits_for_room(gpu: FakeGpu, mailboxes: list[Any]) -> None:
    """A compile sink may send to its own mailbox."""
    sent: list[Any] = []

    def sink(_source: str, _name: str) -> None:
        sent.extend(mailboxes[0].ask(message(seed=seed), block=False) for seed in range(5))

    mailboxes.append(CutlassActor(8, planner=gpu.plan, in_flight=1, compile_sink=sink).start())
    mailboxes[0].ask(CutlassMsg.Gemm(REQUEST), timeout=30)
    for future in sent:
        future.get(timeout=30)
    assert len(gpu.launches) == 5


# ----------------------------------------------------------------------------------------------------------------------
# Faults
# ----------------------------------------------------------------------------------------------------------------------


def test_an_actor_stopped_with_work_in_flight_answers_everything(gpu: FakeGpu, mailbox: Any) -> None:
    busy = occupy(gpu)
    futures = [mailbox.ask(message(seed=seed), block=False) for seed in range(4)]
    stopped = mailbox.stop(block=False)
    until(lambda: not mailbox.is_alive())
    with pytest.raises(pykka.Timeout):
        stopped.get(timeout=SHORT)
    late = mailbox.ask(message(), block=False)
    with pytest.raises(pykka.ActorDeadError):
        late.get(timeout=30)
    assert not any(map(answered, futures))
    busy.set()
    assert stopped.get(timeout=30)
    assert all(map(answered, futures))


def test_senders_that_wait_for_room_when_the_mailbox_stops_get_an_error(gpu: FakeGpu, mailboxes: list[Any]) -> None:
    actor = CutlassActor(8, planner=gpu.plan, in_flight=1)
    mailboxes.append(actor.start())
    busy = occupy(gpu)
    futures = [mailboxes[0].ask(message(), block=False) for _ in range(2)]
    until(lambda: len(gpu.launches) == 1)
    mailboxes[0].tell(message())
    stopped = mailboxes[0].stop(block=False)
    sender = threading.Thread(target=lambda: futures.append(mailboxes[0].ask(message(), block=False)))
    sender.start()
    time.sleep(SHORT)
    busy.set()
    assert stopped.get(timeout=30)
    sender.join(30)
    assert [answered(future) for future in futures[:2]] == [True, True]
    with pytest.raises(pykka.ActorDeadError):
        futures[2].get(timeout=30)


@pytest.mark.parametrize("binding", [None, "w"])
@pytest.mark.parametrize("where", ["fail", "fail_recording"])
def test_what_a_failed_message_has_launched_is_awaited(
    actor: CutlassActor, gpu: FakeGpu, where: str, binding: str | None
) -> None:
    """Its operands are let go with the error."""

    def fail() -> None:
        raise LibraryError("cuda", "out of memory")

    setattr(gpu, where, fail)
    request = dataclasses.replace(REQUEST, binding=binding)
    with pytest.raises(LibraryError, match="out of memory"):
        actor.handle(CutlassMsg.Gemm(request, operands_of(REQUEST), stream=9))
    assert gpu.synchronized == [(0, 9)]
    assert actor.poisoned is None


def test_an_exception_in_the_launch_is_its_own_messages_answer(gpu: FakeGpu, mailbox: Any) -> None:
    failures: list[BaseException] = [SystemExit(3), LibraryError("cuda", "out of memory")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    gpu.fail = fail
    futures = [mailbox.ask(message(seed=seed), block=False) for seed in range(3)]
    with pytest.raises(LibraryError, match="out of memory"):
        futures[0].get(timeout=30)
    with pytest.raises(SystemExit):
        futures[1].get(timeout=30)
    futures[2].get(timeout=30)
    assert mailbox.is_alive()


def test_a_context_lost_with_work_in_flight_is_everybodys_answer(gpu: FakeGpu, mailboxes: list[Any]) -> None:
    told: list[ContextPoisonedError] = []
    actor = CutlassActor(8, planner=gpu.plan, on_poisoned=told.append)
    mailboxes.append(actor.start())
    streams = (1, 2, 3)
    done = [occupy(gpu, stream) for stream in streams]
    futures = [mailboxes[0].ask(message(stream), block=False) for stream in streams for _ in range(3)]
    until(lambda: len(gpu.launches) == 9)

    def fail() -> None:
        raise ContextPoisonedError("an illegal memory access was encountered")

    gpu.fail_waiting = fail
    for event in done:
        event.set()
    reasons = []
    for future in futures:
        with pytest.raises(ContextPoisonedError, match="an illegal memory access") as caught:
            future.get(timeout=30)
        reasons.append(str(caught.value))
    assert len(told) == 1
    assert actor.poisoned is told[0]
    refused = "refused, since this process has lost its CUDA context"
    assert sum(reason.startswith(refused) for reason in reasons) == 8
    with pytest.raises(ContextPoisonedError, match=refused):
        mailboxes[0].ask(message(), timeout=30)
    assert len(gpu.launches) == 9
    mailboxes[0].stop(timeout=30)


# ----------------------------------------------------------------------------------------------------------------------
# Bindings
# ----------------------------------------------------------------------------------------------------------------------


def test_refits_and_launches_are_ordered_on_the_gpu_and_nobody_waits(gpu: FakeGpu, mailbox: Any) -> None:
    a, w = operands_of(BOUND).values()
    for stream in (1, 2, 3):
        occupy(gpu, stream)
    first = mailbox.ask(CutlassMsg.Gemm(BOUND, {"a": a, "b": w}, stream=1), block=False)
    second = mailbox.ask(CutlassMsg.Gemm(BOUND, {"a": a}, stream=2), block=False)
    new = operands_of(BOUND, seed=1)["b"]
    refit = mailbox.ask(CutlassMsg.Refit(RefitMsg(BOUND.plan_key(), new, stream=3)), block=False)
    third = mailbox.ask(CutlassMsg.Gemm(BOUND, {"a": a}, stream=1), block=False)
    again = mailbox.ask(CutlassMsg.Refit(RefitMsg(BOUND.plan_key(), new, stream=4)), block=False)
    until(lambda: len(gpu.copies) == 2)
    assert gpu.orders == [(1, 3), (2, 3), (3, 1), (1, 4), (3, 4)]
    assert not any(map(answered, (first, second, refit, third)))
    for stream in (1, 2, 3):
        gpu.busy[stream].set()
    np.testing.assert_array_equal(fetch(third.get(timeout=30)), product(BOUND, fetch(a), fetch(new)))
    assert refit.get(timeout=30) is again.get(timeout=30) is None


def test_a_refit_that_fails_midway_is_awaited(actor: CutlassActor, gpu: FakeGpu) -> None:
    a, w = operands_of(BOUND).values()
    actor.handle(CutlassMsg.Gemm(BOUND, {"a": a, "b": w}))

    def fail() -> None:
        raise LibraryError("cuda", "out of memory")

    gpu.fail_recording = fail
    with pytest.raises(LibraryError, match="out of memory"):
        actor.handle(CutlassMsg.Refit(RefitMsg(BOUND.plan_key(), operands_of(BOUND, seed=1)["b"], stream=5)))
    assert gpu.synchronized[-1] == (0, 5)


def test_reads_that_are_done_are_forgotten(actor: CutlassActor, gpu: FakeGpu) -> None:
    a, w = operands_of(BOUND).values()
    for _ in range(200):
        actor.handle(CutlassMsg.Gemm(BOUND, {"a": a, "b": w}))
    assert len(actor._bindings[BOUND.plan_key()]._reads) <= 64
    assert len(gpu.launches) == 200


# ----------------------------------------------------------------------------------------------------------------------
# The actor's stream, and its sink
# ----------------------------------------------------------------------------------------------------------------------


def test_work_that_names_no_stream_goes_to_the_actors(gpu: FakeGpu) -> None:
    actor = ac.props(8, stream=42).create(planner=gpu.plan)
    gpu.current.stream = 5
    given = operands_of(REQUEST)
    actor.handle(CutlassMsg.Gemm(REQUEST, given))
    actor.handle(CutlassMsg.Gemm(REQUEST, given, stream=7))
    assert [stream for _, stream in gpu.launches] == [42, 7]
    assert gpu.orders == [(5, 42)]  # behind what the sender's stream has
    assert gpu.synchronized == [(0, 42), (0, 7)]
    gpu.capturing.add(42)
    with pytest.raises(InvalidOperandError, match="being captured"):
        actor.handle(CutlassMsg.Gemm(REQUEST, given))
    with pytest.raises(InvalidOperandError, match="stream is a str"):
        ac.props(8, stream="fast").create()


def test_the_compile_sink_sees_what_is_compiled_at_run_time(
    gpu: FakeGpu, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what the disk cache has is not compiled."""
    store = KernelStore(tmp_path)
    monkeypatch.setattr(kernels, "store", lambda: store)
    monkeypatch.setattr(kernels, "toolchain", lambda: TOOLS)
    monkeypatch.setattr(Unit, "digest", lambda *_: b"digest")
    monkeypatch.setattr(Unit, "compile", lambda _: Images(b"kernel", b"companion"))

    def planner(request: GemmRequest, device: int) -> Any:
        kernels.load(KEY, UNIT.target)
        return gpu.plan(request, device)

    seen: list[tuple[str, str]] = []
    actor = CutlassActor(8, planner=planner, compile_sink=lambda *compiled: seen.append(compiled))
    for n in (16, 32):
        request = dataclasses.replace(REQUEST, shape=GemmShape(8, n, 32))
        actor.handle(CutlassMsg.Gemm(request, operands_of(request)))
    assert seen == [(UNIT.source, KEY.name)]


def test_a_sink_that_fails_on_a_compilation_only_warns(gpu: FakeGpu) -> None:
    def planner(request: GemmRequest, device: int) -> Any:
        sink = kernels.compile_sink.get()
        assert sink is not None
        sink("source", "name")
        return gpu.plan(request, device)

    def fail(_source: str, _name: str) -> None:
        raise CompileError("no", log="", source="", options=())

    actor = CutlassActor(8, planner=planner, compile_sink=fail)
    with pytest.warns(RuntimeWarning, match="the compile sink failed on name"):
        actor.handle(message())
    out = place(np.zeros((8, 16), np.float16))
    assert actor.handle(CutlassMsg.Gemm(REQUEST, operands_of(REQUEST), out=out)) is out
    assert kernels.compile_sink.get() is None
