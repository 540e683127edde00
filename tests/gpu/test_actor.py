"""CutlassActor on a GPU: streams, overlap, bindings, threads, captured graphs, and a context that is lost."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pykka
import pytest

import atomr_cutlass as ac
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.store import KernelStore
from gpu_matrices import KINDS, Kind, assert_product, assert_same_bits, fill, host

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

SLEEP_CYCLES = 40_000_000
"""Clock cycles, some 20 ms, for which a stream is kept busy: work that did not wait would be done long before."""

M, N, K = 136, 80, 200


def request_of(kind: Kind = Kind(D.BF16), *, n: int = N, **more: Any) -> ac.GemmRequest:  # noqa: B008 - a value
    # B is column-major, which every build of the default preset has a cell for.
    column = ac.GemmLayout.COL_MAJOR
    return ac.GemmRequest(ac.GemmShape(M, n, K), dtype=kind.dtype, precision=kind.precision, layout_b=column, **more)


def weights(n: int = N, seed: int = 2, dtype: D = D.BF16) -> Any:
    return fill((n, K), dtype, seed).T


def rows(seed: int = 1, dtype: D = D.BF16) -> Any:
    return fill((M, K), dtype, seed)


@pytest.fixture
def actor() -> ac.CutlassActor:
    return ac.CutlassActor(16)


@pytest.fixture
def mailbox(actor: ac.CutlassActor) -> Iterator[Any]:
    started = actor.start()
    yield started
    started.stop(timeout=60)


def send(actor: ac.CutlassActor, request: ac.GemmRequest, *operands: Any, **options: Any) -> Any:
    return actor.handle(ac.CutlassMsg.Gemm(request, operands, **options))


def refit(actor: ac.CutlassActor, request: ac.GemmRequest, values: Any, stream: Any = None) -> None:
    actor.handle(ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), values, stream)))


# ----------------------------------------------------------------------------------------------------------------------
# Operands
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operands(torch: Any, actor: ac.CutlassActor, kind: Kind) -> None:
    """The answer is a tensor that has been computed; the plan is the one that `ac.plan` makes."""
    request = request_of(kind, epilogue=ac.GemmEpilogue(alpha=2.0, beta=3.0))
    a, b = rows(dtype=kind.dtype), weights(dtype=kind.dtype)
    c = fill((M, N), request.result_dtype, 3)
    for _ in range(2):
        d = send(actor, request, a, b, c)
        assert isinstance(d, torch.Tensor)
        assert torch.cuda.current_stream().query()
        assert_product(d, a, b, c, alpha=2.0, beta=3.0, math_mode=kind.math)
    made = actor.plan_cache.get(request.plan_key())
    assert made.key == request.plan_key()
    assert made.kernel_name == ac.plan(request).kernel_name
    assert made.kernel_handle
    assert made.kernel_name in made.source
    assert (actor.dispatched, actor.plan_cache.hits, actor.plan_cache.misses) == (2, 2, 1)


def test_in_place(actor: ac.CutlassActor) -> None:
    """`out` may be `c`, and an alpha of one message is not another's."""
    a, b = rows(), weights()
    for alpha in (1.0, -2.0):
        request = request_of(epilogue=ac.GemmEpilogue(alpha=alpha, beta=1.0))
        out = fill((M, N), D.BF16, 3)
        before = out.clone()
        assert send(actor, request, a, b, out, out=out) is out
        assert_product(out, a, b, before, alpha=alpha, beta=1.0)
    assert len(actor.plan_cache) == 1


def test_batches_and_empty_results(actor: ac.CutlassActor) -> None:
    a, b = fill((3, M, K), D.BF16, 1), fill((3, N, K), D.BF16, 2).transpose(1, 2)
    shape = ac.GemmShape(M, N, K, batch=3)
    request = ac.GemmRequest(shape, dtype=D.BF16, layout_b=ac.GemmLayout.COL_MAJOR)
    assert_product(send(actor, request, a, b), a, b)
    empty = ac.GemmRequest(ac.GemmShape(0, N, K), dtype=D.BF16, layout_b=ac.GemmLayout.COL_MAJOR)
    assert send(actor, empty, a[0, :0], b[0]).shape == (0, N)


def test_what_is_refused(torch: Any, actor: ac.CutlassActor) -> None:
    """Nothing is launched, and nothing planned, for operands that are not the request's."""
    request, a, b = request_of(), rows(), weights()
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    for wrong, says in (
        ((a.float(), b), "a is f32"),
        ((a, b.contiguous()), "b has strides"),
        ((a[:-1], b), "a has shape"),
        ((a.cpu(), b.cpu()), "a is in host memory"),
        ((a, b, out), "beta is 0"),
    ):
        with pytest.raises(ac.InvalidOperandError, match=says):
            send(actor, request, *wrong)
    assert len(actor.plan_cache) == 0
    square = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    before = square.clone()
    with pytest.raises(ac.InvalidOperandError, match="overlaps"):
        send(actor, ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=D.BF16), square, square, out=square)
    assert_same_bits(square, before)


# ----------------------------------------------------------------------------------------------------------------------
# Streams
# ----------------------------------------------------------------------------------------------------------------------


def late(torch: Any, stream: Any, source: Any) -> Any:
    """A tensor that holds NaN until the stream, after a while, copies the source into it."""
    made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cuda").fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        made.copy_(source)
    return made


@pytest.mark.parametrize("how", ["object", "handle", "current"])
@pytest.mark.parametrize("through", ["handle", "mailbox"])
def test_the_senders_stream(torch: Any, actor: ac.CutlassActor, mailbox: Any, how: str, through: str) -> None:
    """The launch waits for what the sender's stream does first, though another thread makes it."""
    request, a, b = request_of(), rows(), weights()
    for _ in range(2):
        stream = torch.cuda.Stream()
        late_a = late(torch, stream, a)
        if how == "current":
            with torch.cuda.stream(stream):
                message = ac.CutlassMsg.Gemm(request, (late_a, b))
        else:
            named = stream if how == "object" else stream.cuda_stream
            message = ac.CutlassMsg.Gemm(request, (late_a, b), stream=named)
        d = actor.handle(message) if through == "handle" else mailbox.ask(message)
        assert stream.query()
        assert_product(d, a, b)


def test_results_come_from_the_senders_stream(torch: Any, mailbox: Any) -> None:
    """Memory that another stream has let go of, but still writes to, is not the result's."""
    request, a, b = request_of(), rows(), weights()
    mailbox.ask(ac.CutlassMsg.Gemm(request, (a, b)))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(4):
        torch.cuda._sleep(SLEEP_CYCLES)
        doomed = [torch.full((M, N), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        del doomed  # to the allocator, for work on this stream
        with torch.cuda.stream(stream):
            message = ac.CutlassMsg.Gemm(request, (a, b))
        d = mailbox.ask(message)
        torch.cuda.synchronize()
        assert_product(d, a, b)


def test_a_captured_stream_is_refused(torch: Any, actor: ac.CutlassActor) -> None:
    """Waiting would break the capture; the capture goes on, and a bound plan can be part of it."""
    request, a, b = request_of(), rows(), weights()
    bound = ac.BoundPlan(ac.plan(request), b)
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    bound(a, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ac.InvalidOperandError, match="being captured into a CUDA graph"):
            send(actor, request, a, b, out=out)
        bound(a, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_product(out, a, b)
    other = weights(seed=7)
    bound.refit(other)  # nothing is captured anew
    graph.replay()
    torch.cuda.synchronize()
    assert_product(out, a, other)


# ----------------------------------------------------------------------------------------------------------------------
# Work in flight
# ----------------------------------------------------------------------------------------------------------------------


def pending(future: Any) -> bool:
    try:
        future.get(timeout=0)
    except pykka.Timeout:
        return True
    return False


def test_a_mailbox_overlaps(torch: Any, actor: ac.CutlassActor, mailbox: Any) -> None:
    """Work is launched behind work in flight; another stream's answer does not wait for it."""
    request, a, b = request_of(), rows(), weights()
    send(actor, request, a, b)
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(40 * SLEEP_CYCLES)
    behind = [mailbox.ask(ac.CutlassMsg.Gemm(request, (a, b), stream=slow), block=False) for _ in range(8)]
    d = mailbox.ask(ac.CutlassMsg.Gemm(request, (a, b), stream=fast), timeout=60)
    assert not slow.query()
    assert all(map(pending, behind))
    assert_product(d, a, b)
    last = behind[-1].get(timeout=60)
    assert not any(map(pending, behind))
    assert_product(last, a, b)


def test_operands_that_nobody_else_keeps(torch: Any, actor: ac.CutlassActor, mailbox: Any) -> None:
    """The allocator does not give their memory away while the work that reads them is in flight."""
    request, b = request_of(), weights()
    wanted = send(actor, request, rows(), b)
    stream = torch.cuda.Stream()
    futures = []
    for _ in range(8):
        a = rows()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        futures.append(mailbox.ask(ac.CutlassMsg.Gemm(request, (a, b), stream=stream), block=False))
        del a
        torch.full((M, K), float("nan"), dtype=torch.bfloat16, device="cuda")
    for future in futures:
        assert_same_bits(future.get(timeout=60), wanted)


def test_an_event_loop_goes_on(torch: Any, actor: ac.CutlassActor, mailbox: Any) -> None:
    """A ticker ticks while answers are awaited."""
    request, a, b = request_of(), rows(), weights()
    wanted = send(actor, request, a, b)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    async def answer() -> Any:
        return await mailbox.ask(ac.CutlassMsg.Gemm(request, (a, b)), block=False)

    async def serve() -> list[Any]:
        ticker = asyncio.ensure_future(tick())
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        answers = await asyncio.gather(*(answer() for _ in range(16)))
        ticker.cancel()
        return answers

    for d in asyncio.run(serve()):
        assert_same_bits(d, wanted)
    assert ticks > 50  # of some 400


def test_a_mailbox_stopped_with_work_in_flight(torch: Any, actor: ac.CutlassActor, mailbox: Any) -> None:
    request, a, b = request_of(), rows(), weights()
    wanted = send(actor, request, a, b)
    torch.cuda._sleep(10 * SLEEP_CYCLES)
    futures = [mailbox.ask(ac.CutlassMsg.Gemm(request, (a, b)), block=False) for _ in range(4)]
    assert mailbox.stop(timeout=60)
    assert torch.cuda.current_stream().query()
    for future in futures:
        assert_same_bits(future.get(timeout=0), wanted)


def test_senders_wait_for_room(torch: Any) -> None:
    actor = ac.CutlassActor(4, in_flight=2)
    request, a, b = request_of(), rows(), weights()
    wanted = send(actor, request, a, b)
    mailbox = actor.start()
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(40 * SLEEP_CYCLES)
    futures: list[Any] = []
    messages = [ac.CutlassMsg.Gemm(request, (a, b), stream=stream) for _ in range(12)]
    sender = threading.Thread(target=lambda: futures.extend(mailbox.ask(message, block=False) for message in messages))
    sender.start()
    time.sleep(0.2)
    assert sender.is_alive()
    assert not stream.query()
    sender.join(60)
    for future in futures:
        assert_same_bits(future.get(timeout=60), wanted)
    mailbox.stop(timeout=60)


def test_the_actors_own_stream(torch: Any) -> None:
    """Work waits there for what the sender's stream has; a stream that a message names is that message's."""
    request, a, b = request_of(), rows(), weights()
    own, sending = torch.cuda.Stream(), torch.cuda.Stream()
    actor = ac.props(4, stream=own).create()
    assert_product(send(actor, request, a, b), a, b)
    for kind in ("gemm", "matmul"):
        late_a = late(torch, sending, a)
        with torch.cuda.stream(sending):
            if kind == "gemm":
                message = ac.CutlassMsg.Gemm(request, (late_a, b))
            else:
                message = ac.CutlassMsg.Matmul(ac.MatmulRequest(b.T, late_a, m=N, n=M, k=K, transa=True))
        with torch.cuda.stream(own):
            torch.cuda._sleep(SLEEP_CYCLES)
        d = actor.handle(message)
        assert own.query()
        assert_product(d, a, b)
    with torch.cuda.stream(own):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
    assert_product(send(actor, request, a, b, stream=sending), a, b)
    assert not own.query()


# ----------------------------------------------------------------------------------------------------------------------
# Bindings
# ----------------------------------------------------------------------------------------------------------------------


def in_form(form: str, values: Any) -> Any:
    """Weights as a RefitMsg takes them; `values` has its columns together, as the bound operand has."""
    if form == "bytes":
        return bytes(host(values.T.contiguous()).tobytes())
    return {"gpu": values, "numpy": None if form == "gpu" else host(values), "cpu": values.cpu()}[form]


@pytest.mark.parametrize("form", ["gpu", "bytes", "numpy", "cpu"])
@pytest.mark.parametrize("kind", [Kind(D.BF16), Kind(D.F32, "ieee"), Kind(D.I8)], ids=str)
def test_two_layers_of_one_shape(actor: ac.CutlassActor, kind: Kind, form: str) -> None:
    """Each keeps its own operand; a refit writes into that one, and makes no plan."""
    layers = [request_of(kind, binding=f"layer {i}") for i in range(2)]
    a = rows(dtype=kind.dtype)
    bound = [weights(seed=seed, dtype=kind.dtype) for seed in (2, 3)]
    before = [w.clone() for w in bound]
    for layer, w in zip(layers, bound, strict=True):
        assert_product(send(actor, layer, a, w), a, w, math_mode=kind.math)
    made = [actor.plan_cache.peek(layer.plan_key()) for layer in layers]
    new = weights(seed=4, dtype=kind.dtype)
    refit(actor, layers[1], in_form(form, new))
    assert_same_bits(bound[1], new)
    assert_same_bits(bound[0], before[0])
    assert_product(send(actor, layers[0], a), a, before[0], math_mode=kind.math)
    assert_product(send(actor, layers[1], a), a, new, math_mode=kind.math)
    assert [actor.plan_cache.peek(layer.plan_key()) for layer in layers] == made


@pytest.mark.parametrize("through", ["handle", "mailbox"])
def test_a_refit_waits_for_the_weights(torch: Any, actor: ac.CutlassActor, mailbox: Any, through: str) -> None:
    """Weights that the sender's stream has yet to write are awaited; the next launch is on another stream."""
    request, a = request_of(binding="w"), rows()
    send(actor, request, a, weights())
    new = weights(seed=5)
    stream = torch.cuda.Stream()
    late_new = late(torch, stream, new)
    with torch.cuda.stream(stream):
        message = ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), late_new))
    _ = actor.handle(message) if through == "handle" else mailbox.ask(message)
    assert_product(send(actor, request, a), a, new)


def test_refits_and_launches_in_flight(torch: Any, actor: ac.CutlassActor, mailbox: Any) -> None:
    """A refit waits on the GPU for the launches before it, and those after it for the refit, whatever the streams."""
    request, a, w = request_of(binding="w"), rows(), weights()
    old, new = send(actor, request, a, w), weights(seed=5)
    reading, writing, last = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(reading):
        torch.cuda._sleep(5 * SLEEP_CYCLES)
    before = mailbox.ask(ac.CutlassMsg.Gemm(request, {"a": a}, stream=reading), block=False)
    refitted = mailbox.ask(ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), new, writing)), block=False)
    after = mailbox.ask(ac.CutlassMsg.Gemm(request, {"a": a}, stream=last), block=False)
    assert_product(after.get(timeout=60), a, new)
    assert refitted.get(timeout=60) is None
    assert_same_bits(before.get(timeout=60), old)


def test_refits_that_are_refused(torch: Any, actor: ac.CutlassActor) -> None:
    """Size, dtype, layout and key are checked before a byte is written."""
    request, a, w = request_of(binding="w"), rows(), weights()
    before = w.clone()
    with pytest.raises(ac.InvalidOperandError, match="no operand yet"):
        send(actor, request, a)
    with pytest.raises(ac.InvalidOperandError, match="no plan of"):
        refit(actor, request, w)
    send(actor, request, a, w)
    wrong = (b"123", w.float(), w[:, :-1], w.contiguous(), host(w).view("int16"), torch.ones(3, device="cuda"))
    for values in wrong:
        with pytest.raises(ac.InvalidOperandError, match=r"weights|no kernel knows"):
            refit(actor, request, values)
    assert_same_bits(w, before)
    send(actor, request_of(), a, w)
    with pytest.raises(ac.InvalidOperandError, match="keeps no operand"):
        refit(actor, request_of(), w)


# ----------------------------------------------------------------------------------------------------------------------
# Threads
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["handle", "mailbox", "both"])
def test_32_threads(torch: Any, actor: ac.CutlassActor, mailbox: Any, through: str) -> None:
    """Each on a stream of its own; every answer is right, every message counted, one plan made for each key."""
    widths = (64, 80, 96, 112)
    operands = {n: (rows(seed=n), weights(n, seed=n + 1)) for n in widths}
    wanted = {n: send(actor, request_of(n=n), *operands[n]) for n in widths}
    for n in widths:
        assert_product(wanted[n], *operands[n])
    plans = [actor.plan_cache.peek(request_of(n=n).plan_key()) for n in widths]
    torch.cuda.synchronize()
    start = threading.Barrier(32)

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        start.wait(60)
        with torch.cuda.stream(stream):
            for turn in range(20):
                n = widths[(index + turn) % len(widths)]
                message = ac.CutlassMsg.Gemm(request_of(n=n), operands[n])
                direct = through == "handle" or (through == "both" and turn % 2)
                d = actor.handle(message) if direct else mailbox.ask(message)
                assert_same_bits(d, wanted[n])

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(32)))
    assert actor.dispatched == len(widths) + 32 * 20
    assert [actor.plan_cache.peek(request_of(n=n).plan_key()) for n in widths] == plans
    assert len(actor.plan_cache) == len(widths)


def test_eviction_under_load(torch: Any) -> None:
    """Plans that others push out of the cache go on serving whoever holds them."""
    actor = ac.CutlassActor(1)
    widths = (64, 80, 96)
    operands = {n: (rows(seed=n), weights(n, seed=n + 1)) for n in widths}
    wanted = {n: send(actor, request_of(n=n), *operands[n]) for n in widths}
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(10):
                n = widths[(index + turn) % len(widths)]
                assert_same_bits(send(actor, request_of(n=n), *operands[n]), wanted[n])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(actor.plan_cache) == 1
    assert actor.plan_cache.evictions > 0


def test_launches_and_refits_of_one_binding_take_turns(torch: Any, actor: ac.CutlassActor) -> None:
    """A launch sees all of one refit, never parts of two, whatever streams they are on."""
    request = request_of(binding="w")
    a = torch.ones(M, K, dtype=torch.bfloat16, device="cuda")
    w = torch.ones(N, K, dtype=torch.bfloat16, device="cuda").T
    send(actor, request, a, w)
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(20):
                if index % 4:
                    d = send(actor, request, a)
                    assert bool((d == d[0, 0]).all())
                else:
                    refit(actor, request, torch.full_like(w, (index + turn) % 9))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))


def test_policies_of_the_callers_own(actor: ac.CutlassActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that compiles: the same key gives the same kernel, and the same bits."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    request, a, b = request_of(), rows(), weights()
    compiled = ac.CutlassActor(4, planner=lambda wanted, device: ac.plan(wanted, device, backend="jit"))
    try:
        d = send(compiled, request, a, b)
    except ac.DeviceUnavailableError as error:
        pytest.skip(str(error))
    assert_product(d, a, b)
    assert_product(send(actor, request, a, b), a, b)


def test_the_compile_sink_sees_compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a kernel that neither the table nor the disk has."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    store = KernelStore(tmp_path)
    monkeypatch.setattr(kernels, "store", lambda: store)
    monkeypatch.setattr(kernels, "_kernels", {})
    seen: list[tuple[str, str]] = []
    compiled = ac.CutlassActor(
        4,
        planner=lambda wanted, device: ac.plan(wanted, device, backend="jit"),
        compile_sink=lambda source, name: seen.append((source, name)),
    )
    request = request_of()
    try:
        send(compiled, request, rows(), weights())
    except ac.DeviceUnavailableError as error:
        pytest.skip(str(error))
    made = compiled.plan_cache.peek(request.plan_key())
    assert made.kernel_name in [name for _, name in seen]
    assert all(name in source for source, name in seen)


# ----------------------------------------------------------------------------------------------------------------------
# Frameworks
# ----------------------------------------------------------------------------------------------------------------------


def test_cupy(cupy: Any, torch: Any, mailbox: Any) -> None:
    """CuPy's arrays come back as CuPy's, from the stream that is current where the message is made."""
    request = ac.GemmRequest(ac.GemmShape(64, 32, 128), dtype=D.F32)
    a, b = (cupy.asarray(fill(shape, D.F32, 1).cpu().numpy()) for shape in ((64, 128), (128, 32)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        message = ac.CutlassMsg.Gemm(request, {"a": a * 1, "b": b * 1})
    d = mailbox.ask(message)
    assert isinstance(d, cupy.ndarray)
    assert_product(torch.from_dlpack(d), torch.from_dlpack(a), torch.from_dlpack(b), math_mode="ieee")


def test_jax(jax: Any, torch: Any, mailbox: Any) -> None:
    """JAX's arrays come back as JAX's; they cannot be refitted, being read-only."""
    request = ac.GemmRequest(ac.GemmShape(64, 32, 128), dtype=D.F32, binding="w")
    a, b = (jax.numpy.asarray(fill(shape, D.F32, 1).cpu().numpy()) for shape in ((64, 128), (128, 32)))
    d = mailbox.ask(ac.CutlassMsg.Gemm(request, {"a": a, "b": b}))
    assert isinstance(d, jax.Array)
    assert_product(torch.from_dlpack(d), torch.from_dlpack(a), torch.from_dlpack(b), math_mode="ieee")
    with pytest.raises(ac.InvalidOperandError, match="read-only"):
        mailbox.ask(ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), bytes(128 * 32 * 4))))


# ----------------------------------------------------------------------------------------------------------------------
# A lost context
# ----------------------------------------------------------------------------------------------------------------------

_LOST = '''
"""Loses its context by a result at an address of no memory; in another process if it is supervised."""
import os
import sys
from pathlib import Path

import torch

import atomr_cutlass as ac
from atomr_cutlass import _core

REQUEST = ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.F32)


def operands():
    return torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")


def faulty():
    out = _core.Operand(0x700000000000, (64, 64), (64, 1), (2, 32), 2, 0)
    return ac.CutlassMsg.Gemm(REQUEST, operands(), out=out)


def alone():
    told = []
    actor = ac.CutlassActor(4, on_poisoned=told.append)
    mailbox = actor.start()
    good = ac.CutlassMsg.Gemm(REQUEST, operands())
    assert float(mailbox.ask(good)[0, 0]) == 64.0
    later = ac.CutlassMsg.Gemm(REQUEST, operands())
    answers = [mailbox.ask(message, block=False) for message in (faulty(), later)]
    reasons = []
    for answer in answers:
        try:
            answer.get(timeout=60)
        except ac.ContextPoisonedError as error:
            reasons.append(str(error))
    first = str(actor.poisoned)
    assert sorted(reasons, key=len)[0] == first, reasons  # of one of them: both are in flight when it is noticed
    assert len(reasons) == 2 and any(reason.startswith("refused") and first in reason for reason in reasons), reasons
    assert told == [actor.poisoned]
    assert mailbox.stop(timeout=60)
    print("refused with the reason")
    sys.stdout.flush()
    os._exit(0)  # what is left of the context is nobody's business


def serve(log):
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\\n")
    actor = ac.CutlassActor(4, on_poisoned=ac.exit_for_restart)
    first = len(Path(log).read_text().split()) == 1
    result = actor.handle(faulty() if first else ac.CutlassMsg.Gemm(REQUEST, operands()))
    assert float(result[0, 0]) == 64.0
    print("served")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        alone()
    else:
        ac.supervise(serve, sys.argv[1], restarts=2, pause=0.1)
'''


def run_lost(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "lost.py"
    script.write_text(_LOST, encoding="utf-8")
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.timeout(200)
def test_a_lost_context(tmp_path: Path) -> None:
    """The message that met it gets the error, what waits behind it the refusal, with the reason."""
    ran = run_lost(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "refused with the reason"


@pytest.mark.timeout(200)
def test_a_supervised_worker_goes_on_in_a_fresh_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = run_lost(tmp_path, str(log))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "served"
    assert len(set(log.read_text().split())) == 2
