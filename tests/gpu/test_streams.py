"""Streams, CUDA graphs, and plans used again and again."""

import contextlib
import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import atomr_cutlass as ac
import gpu_requests
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate, make
from atomr_cutlass.pipeline import devices, estimate, select
from atomr_cutlass.pipeline.operation import planned_operations
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import Guarded, assert_product, element_type, placed, problem_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

SLEEP_CYCLES = 40_000_000
"""Clock cycles, some 20 ms, for which a stream is kept busy: work that did not wait would be done long before."""


def late(torch: Any, stream: Any, source: Any) -> Any:
    """A tensor that holds NaN until the stream, after a while, copies the source into it."""
    made = torch.full_like(source, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        made.copy_(source)
    return made


@pytest.fixture
def operands() -> tuple[Any, Any]:
    return placed((136, 200), D.BF16, 1), placed((200, 80), D.BF16, 2)


@pytest.mark.parametrize("how", ["object", "handle", "current"])
@pytest.mark.parametrize("planned", [True, False], ids=["plan", "gemm"])
def test_stream(torch: Any, operands: tuple[Any, Any], how: str, planned: bool) -> None:
    """Work is put on the stream that the caller names, or on the framework's current one."""
    a, b = operands
    out = Guarded((136, 80), D.BF16)
    call: Any = make(problem_of(a, b, out.view), like=a) if planned else ac.gemm
    for _ in range(2):  # gemm's first call plans, its second finds the plan
        stream = torch.cuda.Stream()
        late_a = late(torch, stream, a.contiguous())
        if how == "current":
            with torch.cuda.stream(stream):
                call(late_a, b, out=out.view)
        else:
            call(late_a, b, out=out.view, stream=stream if how == "object" else stream.cuda_stream)
        stream.synchronize()
        out.assert_guards()
        assert_product(out.view, a, b)
        out.view.fill_(float("nan"))
        torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["object", "current"])
def test_new_result_on_a_side_stream(torch: Any, operands: tuple[Any, Any], how: str) -> None:
    """Results come from the framework's allocator on its current stream."""
    a, b = operands
    ac.gemm(a, b)
    stream = torch.cuda.Stream()
    late_a = late(torch, stream, a.contiguous())
    with torch.cuda.stream(stream):
        d = ac.gemm(late_a, b, **({"stream": stream} if how == "object" else {}))
    stream.synchronize()
    assert_product(d, a, b)


def busy(torch: Any, stream: Any) -> None:
    """Keeps a stream busy for a while."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)


@pytest.fixture(params=["plan", "gemm", "gemm again", "conv2d", "grouped_gemm"])
def producer(request: pytest.FixtureRequest, torch: Any) -> tuple[Any, Any]:
    """(function of a stream that makes a new result there, the result)."""
    a, b = placed((136, 200), D.BF16, 1), placed((200, 80), D.BF16, 2)
    calls: dict[str, Any] = {
        "plan": lambda **how: made(a, b, **how),
        "gemm": lambda **how: ac.gemm(a, b, **how),
        "conv2d": lambda **how: ac.conv2d(x, w, **how),
        "grouped_gemm": lambda **how: ac.grouped_gemm([a], [b], **how)[0],
    }
    x, w = placed((2, 8, 8, 64), D.BF16, 3), placed((64, 1, 1, 64), D.BF16, 4)
    made = make(problem_of(a, b, torch.empty(136, 80, dtype=torch.bfloat16, device="cuda")), like=a)
    call = calls[request.param.removesuffix(" again")]
    want = call()
    if request.param == "gemm again":
        call(stream=torch.cuda.Stream())
    torch.cuda.synchronize()
    return call, want


def test_new_result_waits_for_the_former_use_of_its_memory(torch: Any, producer: tuple[Any, Any]) -> None:
    """PyTorch's allocator reuses memory on its current stream without waiting; the launch is on another."""
    call, want = producer
    side, former = torch.cuda.Stream(), torch.empty_like(want)
    address = former.data_ptr()
    torch.cuda.synchronize()
    busy(torch, torch.cuda.current_stream())
    former.fill_(7)
    del former
    d = call(stream=side)
    torch.cuda.synchronize()
    assert torch.equal(d, want)
    if d.data_ptr() != address:
        pytest.skip("PyTorch's allocator gave out other memory")


def test_new_result_is_read_and_reused_behind_its_launch(torch: Any, producer: tuple[Any, Any]) -> None:
    call, want = producer
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    busy(torch, side)
    d = call(stream=side)
    seen, address = d.clone(), d.data_ptr()
    del d
    torch.cuda.synchronize()
    assert torch.equal(seen, want)
    busy(torch, side)
    call(stream=side)
    following = torch.empty_like(want)
    following.fill_(7)
    torch.cuda.synchronize()
    assert bool((following == 7).all())
    if following.data_ptr() != address:
        pytest.skip("PyTorch's allocator gave out other memory")


def test_graph_takes_in_a_new_result_on_another_stream(torch: Any) -> None:
    a, b = placed((136, 200), D.BF16, 1), placed((200, 80), D.BF16, 2)
    side = torch.cuda.Stream()
    ac.gemm(a, b, stream=side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = ac.gemm(a, b, stream=side)
        seen = d.clone()
    replayed(graph, torch, a, b, seen)


def test_caller_waits_for_nothing(torch: Any, operands: tuple[Any, Any]) -> None:
    """A launch returns while the stream is still busy with what came before."""
    a, b = operands
    out = torch.empty(136, 80, dtype=torch.bfloat16, device="cuda")
    plan = make(problem_of(a, b, out), like=a)
    plan(a, b, out=out)
    ac.gemm(a, b, out=out)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    plan(a, b, out=out)
    ac.gemm(a, b, out=out)
    done.record()
    assert not done.query()
    done.synchronize()
    assert_product(out, a, b)


def splitting_plan(torch: Any, split_k: int = 4, scheduler: str = "identity") -> tuple[Plan, Any, Any, Any]:
    """(plan with a workspace, a, b, out); skips where the table has no such kernel."""
    streamk = scheduler == "streamk"
    for dtype, math_mode in ((D.BF16, "default"), (D.F16, "default"), (D.F32, "ieee"), (D.F64, "default")):
        a, b = placed((96, 4096), dtype, 1), placed((4096, 80), dtype, 2, layout="c")
        out = torch.empty(96, 80, dtype=a.dtype, device="cuda")
        problem = problem_of(a, b, out, math_mode=math_mode)
        for candidate in select.rank(GemmSearch(problem, devices.get(0))):
            key = candidate.info.key
            slices = estimate.slices(key, candidate.formulation.extents, devices.get(0))
            if key.scheduler == scheduler and (streamk or split_k in slices):
                plan = from_candidate(problem, dataclasses.replace(candidate, split_k=split_k), PlanOptions(like=a))
                assert plan.workspace_bytes > 0
                return plan, a, b, out
    pytest.skip(f"the table has no kernel with the {scheduler} scheduler that splits K here")


SCHEDULERS = pytest.mark.parametrize("scheduler", ["identity", "streamk"])


@SCHEDULERS
def test_one_plan_on_two_streams(torch: Any, scheduler: str) -> None:
    """Each stream has a workspace of its own, so launches that overlap don't disturb each other."""
    plan, a, b, _ = splitting_plan(torch, scheduler=scheduler)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [a, placed((96, 4096), element_type(a), 5)]
    outs = [[torch.empty(96, 80, dtype=a.dtype, device="cuda") for _ in range(20)] for _ in streams]
    torch.cuda.synchronize()
    for number in range(20):
        for stream, a, results in zip(streams, inputs, outs, strict=True):
            plan(a, b, out=results[number], stream=stream)
    torch.cuda.synchronize()
    for a, results in zip(inputs, outs, strict=True):
        for d in results:
            assert_product(d, a, b)
            assert torch.equal(d, results[0])


@contextlib.contextmanager
def new_stream(torch: Any) -> Iterator[Any]:
    """A stream that is created here, and destroyed while its work may still run: PyTorch's own are never destroyed."""
    driver, made = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(made), 1) == 0
    try:
        yield torch.cuda.ExternalStream(made.value)
    finally:
        assert driver.cuStreamDestroy_v2(made) == 0


@SCHEDULERS
@pytest.mark.parametrize("alive", [1, 40])
def test_streams_that_come_and_go(torch: Any, scheduler: str, alive: int) -> None:
    """The workspace of a stream that is gone serves another, which waits for the work that the former left."""
    plan, a, b, _ = splitting_plan(torch, scheduler=scheduler)
    other = placed((96, 4096), element_type(a), 5)
    outs = [torch.empty(96, 80, dtype=a.dtype, device="cuda") for _ in range(240)]
    plan(a, b, out=outs[0])
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for start in range(0, len(outs), alive):
        with contextlib.ExitStack() as streams:
            for number in range(start, start + alive):
                stream = streams.enter_context(new_stream(torch))
                plan(other if number % 2 else a, b, out=outs[number], stream=stream)
    torch.cuda.synchronize()
    if alive == 1:
        assert torch.cuda.memory_allocated() - allocated <= 16 * (plan.workspace_bytes + 512)
    for number, d in enumerate(outs):
        assert torch.equal(d, outs[number % 2])
    assert_product(outs[0], a, b)
    assert_product(outs[1], other, b)


THREADS, LAUNCHES = 32, 20


@pytest.mark.parametrize("name", planned_operations())
def test_threads(torch: Any, name: str) -> None:
    """Many threads launch one plan and call the function at once, each on a stream and with operands of its own."""
    request = gpu_requests.request_of(name)
    made = ac.plan(request)
    threads = [gpu_requests.Placed(request, 0, seed) for seed in range(THREADS)]
    streams = [torch.cuda.Stream() for _ in threads]
    assert len({stream.cuda_stream for stream in streams}) == THREADS
    results: dict[int, list[list[Any]]] = {}
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> None:
        operands, stream = threads[number], streams[number]
        barrier.wait(30)
        for _ in range(LAUNCHES):
            operands.launch(made, stream.cuda_stream)
        with torch.cuda.stream(stream):
            results[number] = [operands.call(torch) for _ in range(LAUNCHES)]
        stream.synchronize()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(THREADS)]:
            done.result(60)
    for number, operands in enumerate(threads):
        operands.assert_right(made)
        first, *others = results[number]
        operands.assert_right(made, first)
        for other in others:
            assert all(torch.equal(d, want) for d, want in zip(other, first, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# CUDA graphs


def captured(torch: Any, call: Any) -> tuple[Any, Any]:
    """(graph, what the call returned), after a warm-up on a side stream as PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replayed(graph: Any, torch: Any, a: Any, b: Any, result: Any) -> None:
    """Replays with other numbers in the operands, and checks."""
    for seed in (11, 12):
        a.copy_(placed(tuple(a.shape), D.F32, seed))
        b.copy_(placed(tuple(b.shape), D.F32, seed + 10))
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_product(result, a, b)


@pytest.mark.parametrize("how", ["plan", "plan, new result", "gemm", "gemm, new result"])
def test_graph(torch: Any, how: str) -> None:
    a, b = placed((136, 200), D.BF16, 1), placed((200, 80), D.BF16, 2)
    out = Guarded((136, 80), D.BF16)
    call: Any = make(problem_of(a, b, out.view), like=a) if how.startswith("plan") else ac.gemm
    arguments = {} if how.endswith("new result") else {"out": out.view}
    graph, result = captured(torch, lambda: call(a, b, **arguments))
    replayed(graph, torch, a, b, result)
    out.assert_guards()


def test_graph_of_a_new_shape(torch: Any) -> None:
    """A plan may be made under capture, once its kernel has been loaded, and take memory for sums of slices of K."""
    ac.gemm(placed((37, 103), D.F16, 1), placed((103, 81), D.F16, 2))
    a, b = placed((137, 203), D.F16, 1), placed((203, 81), D.F16, 2)
    out = torch.empty(137, 81, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.gemm(a, b, out=out)
    replayed(graph, torch, a, b, out)


@SCHEDULERS
def test_graph_with_a_workspace(torch: Any, scheduler: str) -> None:
    """The clearing of the workspace is part of the graph, and two graphs of one plan can replay at once."""
    plan, a, b, out = splitting_plan(torch, scheduler=scheduler)
    graph, result = captured(torch, lambda: plan(a, b, out=out))
    replayed(graph, torch, a, b, result)
    other = torch.empty_like(out)
    second, _ = captured(torch, lambda: plan(a, b, out=other))
    streams = [torch.cuda.Stream() for _ in range(2)]
    eager = torch.empty_like(out)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            second.replay()
        plan(a, b, out=eager)
    torch.cuda.synchronize()
    for d in (out, other, eager):
        assert_product(d, a, b)


def test_graph_of_null_products(torch: Any) -> None:
    """alpha = 0 and K = 0 read zeros of our own, which a graph clears for itself."""
    a, b = placed((64, 48), D.BF16, 1), placed((48, 56), D.BF16, 2)
    c = placed((64, 56), D.BF16, 3)
    out = torch.empty(64, 56, dtype=torch.bfloat16, device="cuda")
    plan = make(problem_of(a, b, out, c), like=a)
    graph, _ = captured(torch, lambda: plan(a, b, c, out=out, alpha=0.0, beta=2.0))
    a.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 2 * c).all()


def test_graph_of_a_chain(torch: Any) -> None:
    """Products that feed each other, captured and replayed."""
    a, b = placed((128, 128), D.F32, 1) / 12, placed((128, 128), D.F32, 2) / 12
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    x, y = torch.empty_like(a), torch.empty_like(a)

    def chain() -> None:
        ac.gemm(a, b, out=x)
        ac.gemm(x, b, out=y)
        ac.gemm(y, b, out=x)

    graph, _ = captured(torch, chain)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_product(y, ac.gemm(a, b), b)
    assert_product(x, y, b)


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def test_a_plan_takes_other_pointers(torch: Any) -> None:
    a, b = placed((96, 64), D.BF16, 1), placed((64, 72), D.BF16, 2, layout="c")
    out = torch.empty(96, 72, dtype=torch.bfloat16, device="cuda")
    plan = make(problem_of(a, b, out), like=a)
    for seed in range(3, 9):
        new_a, new_b = placed((96, 64), D.BF16, seed), placed((64, 72), D.BF16, seed + 20, layout="c")
        result = Guarded((96, 72), D.BF16)
        assert plan(new_a, new_b, out=result.view) is result.view
        result.assert_guards()
        assert_product(result.view, new_a, new_b)


def test_a_plan_outlives_its_operands(torch: Any) -> None:
    """A plan remembers shapes, not arrays."""
    a, b = placed((96, 64), D.BF16, 1), placed((64, 72), D.BF16, 2, layout="c")
    plan = make(problem_of(a, b, torch.empty(96, 72, dtype=torch.bfloat16, device="cuda")), like=a)
    del a, b
    torch.cuda.empty_cache()
    a, b = placed((96, 64), D.BF16, 3), placed((64, 72), D.BF16, 4, layout="c")
    assert_product(plan(a, b), a, b)


def wrong_arguments(torch: Any, a: Any, b: Any, out: Any) -> dict[str, dict[str, Any]]:
    """Arguments to replace, by what is wrong with them."""
    other = {"dtype": torch.bfloat16, "device": "cuda"}
    return {
        "a of another shape": {"a": a[:-1]},
        "a with another K": {"a": a[:, :-8]},
        "a transposed": {"a": torch.empty(64, 96, **other).T},
        "a padded": {"a": torch.empty(96, 72, **other)[:, :64]},
        "a of another dtype": {"a": a.half()},
        "a misaligned": {"a": placed((96, 64), D.BF16, 1, offset=1)},
        "a batched": {"a": a[None]},
        "a on the host": {"a": a.cpu()},
        "a is no array": {"a": "matrix"},
        "a is nothing": {"a": None},
        "b of another shape": {"b": b[:, :-8]},
        "b row-major": {"b": b.contiguous()},
        "b of another dtype": {"b": b.float()},
        "b misaligned": {"b": placed((64, 72), D.BF16, 1, layout="c", offset=1)},
        "out of another shape": {"out": out[:, :-8]},
        "out of another dtype": {"out": out.view(torch.float16)},
        "out on the host": {"out": out.cpu()},
        "c without beta": {"c": torch.empty(96, 72, **other)},
        "beta without c": {"beta": 1.0},
        "c of another shape": {"c": torch.empty(95, 72, **other), "beta": 1.0},
        "stream is no stream": {"stream": "default"},
        "stream is a float": {"stream": 1.5},
    }


WRONG = (
    *("a of another shape", "a with another K", "a transposed", "a padded", "a of another dtype", "a misaligned"),
    *("a batched", "a on the host", "a is no array", "a is nothing", "b of another shape", "b row-major"),
    *("b of another dtype", "b misaligned", "out of another shape", "out of another dtype", "out on the host"),
    *("c without beta", "beta without c", "c of another shape", "stream is no stream", "stream is a float"),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plan_refuses(torch: Any, wrong: str) -> None:
    """A plan launches nothing for operands other than those it was made for."""
    a, b = placed((96, 64), D.BF16, 1), placed((64, 72), D.BF16, 2, layout="c")
    out = Guarded((96, 72), D.BF16)
    plan = make(problem_of(a, b, out.view), like=a)
    arguments = {"a": a, "b": b, "out": out.view, **wrong_arguments(torch, a, b, out.view)[wrong]}
    with pytest.raises(ac.InvalidOperandError):
        plan(**arguments)
    torch.cuda.synchronize()
    out.assert_untouched()
    plan(a, b, out=out.view)
    assert_product(out.view, a, b)


@pytest.mark.parametrize("where", ["a", "b", "inside a", "shifted c"])
def test_a_plan_refuses_overlap(torch: Any, where: str) -> None:
    buffer = torch.zeros(3 * 64 * 64, dtype=torch.bfloat16, device="cuda")
    first, second = buffer[: 64 * 64].view(64, 64), buffer[64 * 64 : 2 * 64 * 64].view(64, 64)
    between = buffer[8 * 64 : 8 * 64 + 64 * 64].view(64, 64)
    before = buffer.clone()
    plan = make(problem_of(first, second, torch.empty_like(first)), like=first)
    others = torch.ones_like(first)
    arguments = {
        "a": {"a": first, "b": others, "out": first},
        "b": {"a": others, "b": first, "out": first},
        "inside a": {"a": first, "b": others, "out": between},
        "shifted c": {"a": others, "b": others, "c": first, "out": between, "beta": 1.0},
    }[where]
    with pytest.raises(ac.InvalidOperandError, match="overlaps"):
        plan(**arguments)
    torch.cuda.synchronize()
    assert torch.equal(buffer, before)


def test_plans_default_to_their_scalars() -> None:
    request = ac.GemmRequest(ac.GemmShape(64, 72, 80), dtype=D.BF16, epilogue=ac.GemmEpilogue(alpha=2.0, beta=-1.0))
    plan = ac.plan(request)
    a, b, c = placed((64, 80), D.BF16, 1), placed((80, 72), D.BF16, 2), placed((64, 72), D.BF16, 3)
    assert_product(plan(a, b, c), a, b, c, alpha=2.0, beta=-1.0)
    assert_product(plan(a, b, c, alpha=0.5), a, b, c, alpha=0.5, beta=-1.0)
    assert_product(plan(a, b, c, beta=4.0), a, b, c, alpha=2.0, beta=4.0)
    assert plan.kernel_name == plan.main.key.name
    assert all(extent > 0 for extent in plan.grid)
