"""Kernels that wait themselves for the launch before: they read what it stored last, and overwrite nothing early.

The launch before is a kernel that lets its successor start at once and stores only then (`late`): without the wait the
successor would read, or overwrite, what is not yet there. No sanitizer sees this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmLayout, GemmRequest, GemmShape, _core
from gpu_matrices import bits_dtype, placed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

CLOCKS = 200_000
"""Of a multiprocessor, that `late` takes before it stores: some 100 us."""

LATE = """
extern "C" __global__ void late(unsigned short* to, unsigned short const* from, long long count, long long clocks) {
  asm volatile("griddepcontrol.launch_dependents;");
  long long const start = clock64();
  while (clock64() - start < clocks) {}
  long long const step = (long long)(gridDim.x) * blockDim.x;
  for (long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
}
"""

Late = Callable[[Any, Any], None]

PROBLEMS = (
    *((8, 4096, 4096, "c"), (5, 1032, 8200, "c"), (64, 2048, 2048, "r"), (120, 1024, 4096, "c")),
    *((268, 2864, 6256, "c"), (227, 1264, 616, "c"), (491, 1024, 4096, "r"), (2304, 2304, 2304, "c")),
)
"""M, N and K, and the layout of B: for kernels for few rows, and for those of CUTLASS."""


@pytest.fixture(autouse=True)
def _dependent() -> Iterator[None]:
    before = _core.dependent_launch()
    _core.set_dependent_launch(True)
    yield
    _core.set_dependent_launch(before)


@pytest.fixture(scope="module")
def late() -> Late:
    cupy = pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("GPUs before sm_90 know no dependent launch")
    kernel = cupy.RawKernel(LATE, "late")

    def copy(to: Any, source: Any) -> None:
        """Copies a tensor, on the current stream."""
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((16,), (256,), (to.data_ptr(), source.data_ptr(), to.numel(), CLOCKS))

    return copy


def request_of(m: int, n: int, k: int, layout: str) -> GemmRequest:
    columns = GemmLayout.COL_MAJOR if layout == "c" else GemmLayout.ROW_MAJOR
    return GemmRequest(GemmShape(m, n, k), dtype=D.BF16, layout_b=columns)


def plan_of(m: int, n: int, k: int, layout: str) -> ac.Plan:
    made: ac.Plan = ac.plan(request_of(m, n, k, layout))
    return made


def same(result: Any, other: Any) -> bool:
    return bool((result.view(bits_dtype(D.BF16)) == other.view(bits_dtype(D.BF16))).all())


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_operands_stored_late_are_waited_for(
    problem: tuple[int, int, int, str], late: Late, torch: Any, *, captured: bool
) -> None:
    m, n, k, layout = problem
    plan = plan_of(*problem)
    a, new_a = placed((m, k), D.BF16, 1), placed((m, k), D.BF16, 2)
    b, new_b = placed((k, n), D.BF16, 3, layout=layout), placed((k, n), D.BF16, 4, layout=layout)
    c, new_c = placed((m, n), D.BF16, 5), placed((m, n), D.BF16, 6)
    out = torch.empty_like(c)
    old = [operand.clone() for operand in (a, b, c)]
    wanted = plan(new_a, new_b, new_c, alpha=0.5, beta=2.0)
    # Columns follow one another: the memory is copied as it is.
    flat_b, flat_new_b = (matrix.T if layout == "c" else matrix for matrix in (b, new_b))

    stores = ((a, new_a), (flat_b, flat_new_b), (c, new_c))
    for last in range(3):

        def work(last: int = last) -> None:
            for index in (last + 1, last + 2, last):
                late(*stores[index % 3])
            plan(a, b, c, out=out, alpha=0.5, beta=2.0)

        run = replayed(work, torch) if captured else work
        for _ in range(3):
            for operand, values in zip((a, b, c), old, strict=True):
                operand.copy_(values)
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            run()
            torch.cuda.synchronize()
            assert same(out, wanted), f"operand {last} was stored last"


def test_what_is_read_late_is_not_overwritten_early(late: Late, torch: Any) -> None:
    m, n, k, layout = PROBLEMS[0]
    plan = plan_of(*PROBLEMS[0])
    a, b = placed((m, k), D.BF16, 1), placed((k, n), D.BF16, 2, layout=layout)
    old = placed((m, n), D.BF16, 3)
    out, kept = torch.empty_like(old), torch.empty_like(old)
    for _ in range(5):
        out.copy_(old)
        torch.cuda.synchronize()
        late(kept, out)
        plan(a, b, out=out)
        torch.cuda.synchronize()
        assert same(kept, old)


def replayed(work: Callable[[], None], torch: Any) -> Callable[[], None]:
    """The same as a graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph.capture_begin()
        work()
        graph.capture_end()
    run: Callable[[], None] = graph.replay
    return run


def test_a_bias_stored_late_is_waited_for(late: Late, torch: Any) -> None:
    m, n, k = 512, 4096, 1024
    a, b = placed((m, k), D.BF16, 1), placed((k, n), D.BF16, 2, layout="c")
    old, new = placed((1, n), D.BF16, 3)[0], placed((1, n), D.BF16, 4)[0]
    wanted = ac.gemm(a, b, bias=new)
    bias, out = torch.empty_like(old), torch.empty_like(wanted)
    for _ in range(5):
        bias.copy_(old)
        torch.cuda.synchronize()
        late(bias, new)
        ac.gemm(a, b, bias=bias, out=out)
        torch.cuda.synchronize()
        assert same(out, wanted)


def test_scales_stored_late_are_waited_for(late: Late, torch: Any) -> None:
    m, n, k = 512, 1024, 2048
    a, columns = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    b = columns.T
    old, new = (torch.full((2,), value, dtype=torch.float32, device="cuda") for value in (1.0, 0.5))
    wanted = ac.gemm(a, b, scale_a=new[:1], out_dtype=D.BF16)
    scale, out = torch.empty_like(old), torch.empty_like(wanted)
    for _ in range(5):
        scale.copy_(old)
        torch.cuda.synchronize()
        late(scale.view(torch.int16), new.view(torch.int16))
        ac.gemm(a, b, scale_a=scale[:1], out=out)
        torch.cuda.synchronize()
        assert same(out, wanted)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_an_input_stored_late_is_waited_for_beside_bound_weights(
    problem: tuple[int, int, int, str], late: Late, torch: Any
) -> None:
    m, n, k, layout = problem
    plan = plan_of(*problem)
    old, new = placed((m, k), D.BF16, 1), placed((m, k), D.BF16, 2)
    b = placed((k, n), D.BF16, 3, layout=layout)
    wanted = plan(new, b)
    bound = ac.BoundPlan(plan, b)
    a, out = torch.empty_like(old), torch.empty_like(wanted)
    for _ in range(5):
        a.copy_(old)
        bound(a, out=out)  # from the second one on the weights are settled
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        late(a, new)
        bound(a, out=out)
        torch.cuda.synchronize()
        assert same(out, wanted)


@pytest.mark.parametrize("m", [8, 200, 520])
def test_a_bias_stored_late_is_waited_for_beside_bound_weights(m: int, late: Late, torch: Any) -> None:
    n, k = 2048, 1024
    request = GemmRequest(
        GemmShape(m, n, k), dtype=D.BF16, layout_b=GemmLayout.COL_MAJOR,
        epilogue=ac.GemmEpilogue(bias=True, activation="gelu"),
    )  # fmt: skip
    a, b = placed((m, k), D.BF16, 1), placed((k, n), D.BF16, 2, layout="c")
    old, new = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bound = ac.plan(request, b=b)
    wanted = bound(a, new)
    bias, out = torch.empty_like(old), torch.empty_like(wanted)
    for _ in range(5):
        bias.copy_(old)
        bound(a, bias, out=out)  # from the second one on the weights are settled
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        late(bias, new)
        bound(a, bias, out=out)
        torch.cuda.synchronize()
        assert same(out, wanted)


@pytest.mark.parametrize("m", [6, 200, 520])
@pytest.mark.parametrize("captured", [False, True])
def test_chains_have_the_bits_of_serialized_launches(torch: Any, m: int, *, captured: bool) -> None:
    """Layers that read one another's results, two buffers in turn, and weights that all are bound."""
    layers, width = 12, 2048
    plans, weights = [], []
    for layer in range(layers):
        plans.append(plan_of(m, width, width, "c" if layer % 3 else "r"))
        weights.append(placed((width, width), D.BF16, 10 + layer, layout="c" if layer % 3 else "r") / width**0.5)
    bound = [ac.BoundPlan(plan, weight) for plan, weight in zip(plans, weights, strict=True)]
    start = placed((m, width), D.BF16, 1)
    buffers = [torch.empty_like(start) for _ in range(2)]

    def chain(calls: list[Any]) -> None:
        buffers[0].copy_(start)
        for index, call in enumerate(calls):
            call(buffers[index % 2], out=buffers[(index + 1) % 2])

    def serialized() -> Any:
        _core.set_dependent_launch(False)
        calls = [lambda x, out, p=p, w=w: p(x, w, out=out) for p, w in zip(plans, weights, strict=True)]
        chain(calls)
        torch.cuda.synchronize()
        _core.set_dependent_launch(True)
        return buffers[layers % 2].clone()

    wanted = serialized()
    chain(list(bound))  # from now on the weights are settled
    run = replayed(lambda: chain(list(bound)), torch) if captured else lambda: chain(list(bound))
    for turn in range(30):
        if turn % 5 == 4:
            # New weights in between, in the order of the stream: the next launch of them reads those.
            layer = turn % layers
            values = placed((width, width), D.BF16, 100 + turn, layout="c" if layer % 3 else "r")
            bound[layer].refit(values / width**0.5)
            wanted = serialized()
        run()
        torch.cuda.synchronize()
        assert same(buffers[layers % 2], wanted), turn


def test_new_weights_are_read_by_the_next_launch(late: Late, torch: Any) -> None:
    """A refit right before it, and memory that was written otherwise and is then refitted with itself."""
    m, n, k, layout = PROBLEMS[0]
    plan = plan_of(*PROBLEMS[0])
    a = placed((m, k), D.BF16, 1)
    old, new = (placed((k, n), D.BF16, seed, layout=layout) for seed in (2, 3))
    b = old.T.clone().T
    bound = ac.BoundPlan(plan, b)
    wanted_old, wanted_new = plan(a, old), plan(a, new)
    out = torch.empty_like(wanted_old)
    for _ in range(5):
        bound(a, out=out)
        bound(a, out=out)
        assert same(out, wanted_old)
        bound.refit(new)
        bound(a, out=out)
        assert same(out, wanted_new)
        late(b.T, old.T)
        bound.refit(b)
        bound(a, out=out)
        torch.cuda.synchronize()
        assert same(out, wanted_old)


def test_streams_are_apart(late: Late, torch: Any) -> None:
    plan = plan_of(*PROBLEMS[0])
    m, n, k, layout = PROBLEMS[0]
    b = placed((k, n), D.BF16, 2, layout=layout)
    inputs = [placed((m, k), D.BF16, 10 + i) for i in range(4)]
    wanted = [plan(a, b) for a in inputs]
    places = [torch.zeros_like(a) for a in inputs]
    outs = [torch.empty_like(d) for d in wanted]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        for place in places:
            place.zero_()
        torch.cuda.synchronize()
        for stream, place, a, out in zip(streams, places, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                late(place, a)
                plan(place, b, out=out)
        torch.cuda.synchronize()
        assert all(same(out, want) for out, want in zip(outs, wanted, strict=True))
