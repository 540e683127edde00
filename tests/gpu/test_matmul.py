"""`matmul` on the GPU: every epilogue against its formula and PyTorch, element types, transposes, leading dimensions.

Kernels with epilogues are compiled at run time; `matmul_gpu.keys` lists them, to be compiled side by side before.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import HeuristicKey, MatmulRequest
from atomr_cutlass import MatmulEpilogue as E
from atomr_cutlass.arrays.numerics import saturating_cast
from atomr_cutlass.epilogue import validate
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.matmul.operation import FORMS
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.heuristic import heuristics
from gpu_matrices import pairs
from matmul_formulas import Case, bits_of, formula, read, wide
from matmul_gpu import ALIGNED, KINDS, LARGE, OF_OTHERS, OTHERS, PAD, SCALED, SOME, Kind, OnGpu, Placed, scales_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

SLEEP_CYCLES = 40_000_000


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table has kernels of trees; and what is wrong with one shall be seen here, not at its first use."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    monkeypatch.setenv(validate.VARIABLE, "off")


def multiplies_fp8(torch: Any) -> bool:
    """Whether this GPU does."""
    return bool(torch.cuda.get_device_capability() >= (8, 9))


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("epilogue", E, ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_epilogue(kind: Kind, epilogue: E, torch: Any) -> None:
    """Dense and with gaps between columns, with C and without; and twice, since sums are not left over."""
    if kind is KINDS[1] and not multiplies_fp8(torch):
        pytest.skip("this GPU does not multiply fp8")
    for pad, beta in ((kind.pad, 0.0), (kind.pad, -2.0), (0, 1.0)):
        case = kind.case(epilogue, pad=pad, beta=beta)
        on_gpu = OnGpu(case, precision=kind.precision)
        on_gpu.run()
        on_gpu.run()


@pytest.mark.parametrize(("kind", "epilogue"), pairs(ALIGNED, SOME) + pairs(OTHERS, OF_OTHERS), ids=str)
def test_transposes_and_alignments(kind: Kind, epilogue: E) -> None:
    OnGpu(kind.case(epilogue), precision=kind.precision).run()
    if kind.extents != LARGE:
        OnGpu(kind.case(epilogue, beta=0.5), offset=8, precision=kind.precision).run()


@pytest.mark.parametrize("extents", [(1, 1, 1), (1, 65, 32), (65, 1, 32), (8, 3, 16), (129, 257, 40)], ids=str)
@pytest.mark.parametrize("epilogue", [E.RELU_AUX_BIAS, E.DGELU_BGRAD, E.BGRADA, E.BGRADB], ids=lambda e: e.name)
def test_extents(epilogue: E, extents: tuple[int, int, int]) -> None:
    OnGpu(Case(epilogue, np.float64, np.float64, True, False, 1, 1.0, extents)).run()


@pytest.mark.parametrize("trans", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3], KINDS[4]], ids=str)
def test_sums_of_operands(kind: Kind, trans: str) -> None:
    for epilogue in (E.BGRADA, E.BGRADB):
        transa, transb = (letter == "t" for letter in trans)
        case = Case(epilogue, kind.dtype, kind.out, transa, transb, kind.pad, 0.0, kind.extents)
        OnGpu(case, precision=kind.precision).run()


@pytest.mark.parametrize("epilogue", SCALED, ids=lambda epilogue: epilogue.name)
def test_scales_on_the_device(epilogue: E, torch: Any) -> None:
    """Those of rows and columns, of D, and the largest magnitude of D."""
    if not multiplies_fp8(torch):
        pytest.skip("this GPU does not multiply fp8")
    case = KINDS[1].case(epilogue, beta=1.0)
    placed: list[Placed] = []
    scales, host = scales_of(case, lambda array: placed.append(Placed(array)) or placed[-1].view)
    on_gpu = OnGpu(case, scales=scales)
    ac.matmul(on_gpu.request)
    for array in (*on_gpu.held, *placed):
        array.fetch()
    a, b = wide(case.a) * host["a"][:, None], wide(case.b) * host["b"]
    form = FORMS[epilogue]
    bias = wide(case.bias) if form.bias == "added" else None
    want = formula(epilogue, case.alpha * (a @ b) + wide(case.c), a, b, bias, wide(case.positive))
    m, n, _ = case.extents
    got = wide(read(case.arrays["d"], m, n, m + case.pad))
    np.testing.assert_allclose(got, wide(saturating_cast(want.d * 0.25, D.BF16)), rtol=2**-7, atol=2**-8)
    np.testing.assert_allclose(host["amax_d"], np.abs(want.d).max(), rtol=1e-5)
    if form.writes_bias:
        np.testing.assert_allclose(case.arrays["bias"], want.bias, rtol=1e-4, atol=1e-2)


def test_numeric_scales_count_at_every_launch(torch: Any) -> None:
    """The numbers of an earlier request with the same layouts say nothing about those of a later one."""
    if not multiplies_fp8(torch):
        pytest.skip("this GPU does not multiply fp8")
    case, scale = KINDS[1].case(E.DEFAULT), torch.full((1,), 4.0, device="cuda")
    m, n, _ = case.extents
    on_gpu = OnGpu(case)
    for number in (0.0, 1.0, 0.5, 0.0, 2):
        ac.matmul(MatmulRequest(**{**vars_of(on_gpu.request), "scales": ac.ScaleSet(number, scale)}))
        on_gpu.fetch()
        got = wide(read(case.arrays["d"], m, n, m + case.pad))
        np.testing.assert_allclose(got, case.want.d * 4 * number, rtol=1.01 * 2**-8)
    fused = KINDS[0].case(E.RELU_BIAS)
    on_gpu = OnGpu(fused)
    for _ in range(2):
        ac.matmul(on_gpu.request)
    again = MatmulRequest(**{**vars_of(on_gpu.request), "scales": ac.ScaleSet(d=0.5)})
    with pytest.raises(ac.UnsupportedError, match=r"scales\.d is a number, and what follows the product"):
        ac.matmul(again)
    on_gpu.fetch()
    fused.check()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]], ids=str)
def test_results_may_replace_what_is_read(kind: Kind) -> None:
    """C, and what DGELU reads."""
    case = kind.case(E.RELU_AUX_BIAS, beta=1.0)
    on_gpu = OnGpu(case)
    held = next(array for array in on_gpu.held if array.view is on_gpu.request.c)
    request = case.request(
        lambda array: next(operand.view for operand in on_gpu.held if operand.host is array), d=held.view, c=held.view
    )
    want = case.want.d
    ac.matmul(request)
    on_gpu.fetch()
    m, n, _ = case.extents
    np.testing.assert_allclose(wide(read(case.arrays["c"], m, n, m + case.pad)), want, rtol=2**-7, atol=2**-7)
    gradient = kind.case(E.DGELU_BGRAD)
    on_gpu = OnGpu(gradient)
    aux = on_gpu.request.gelu_aux
    want = gradient.want.d
    arrays = {array.host.ctypes.data: array.view for array in on_gpu.held}
    assert ac.matmul(gradient.request(lambda array: arrays[array.ctypes.data], d=aux)) is aux
    on_gpu.fetch()
    got = wide(read(gradient.arrays["gelu_aux"], m, n, m + gradient.pad))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-7)


def test_a_new_result_and_its_kind(torch: Any) -> None:
    case = KINDS[0].case(E.GELU_BIAS, pad=0)
    request = OnGpu(case, d=None, ldd=None, ldc=None).request
    for _ in range(2):  # looked at in full, and launched again
        made = ac.matmul(request)
        assert isinstance(made, torch.Tensor)
        assert made.is_cuda
        m, n, _ = case.extents
        assert made.shape == (n, m)
        torch.testing.assert_close(made.double().cpu().t(), torch.from_numpy(case.want.d), rtol=2**-7, atol=2**-7)


def test_host_arrays_go_to_the_gpu_and_back() -> None:
    for kind, epilogue in pairs((KINDS[0], KINDS[4]), (E.RELU_AUX_BIAS, E.DGELU_BGRAD, E.BGRADB)):
        case = kind.case(epilogue, beta=1.0)
        ac.matmul(case.request())
        case.check()


# ----------------------------------------------------------------------------------------------------------------------
# A layer forward and backward, as PyTorch has it

TOKENS, WIDE, NARROW = 520, 264, 96


def _rows(matrix: Any) -> Any:
    """A row-major matrix is its transpose, column-major: as memory it is passed as it is."""
    assert matrix.is_contiguous()
    return matrix


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_and_its_gradients_are_those_of_autograd(activation: str, torch: Any) -> None:
    """y = act(x W1^T + b1) W2^T: row-major tensors throughout, which are the transposes of column-major ones."""
    torch.manual_seed(0)
    functional = torch.nn.functional
    act = functional.relu if activation == "relu" else lambda x: functional.gelu(x, approximate="tanh")
    forward, backward = (E.RELU_AUX_BIAS, E.DRELU_BGRAD) if activation == "relu" else (E.GELU_AUX_BIAS, E.DGELU_BGRAD)
    x, w1, w2 = (torch.randn(*shape, device="cuda") for shape in ((TOKENS, NARROW), (WIDE, NARROW), (NARROW, WIDE)))
    x, w1, w2 = (t.mul_(NARROW**-0.25).bfloat16() for t in (x, w1, w2))
    b1, dy = torch.randn(WIDE, device="cuda").bfloat16(), torch.randn(TOKENS, NARROW, device="cuda").bfloat16()

    exact = {name: t.double().requires_grad_() for name, t in {"x": x, "w1": w1, "b1": b1, "w2": w2}.items()}
    hidden = act(exact["x"] @ exact["w1"].T + exact["b1"])
    (hidden @ exact["w2"].T).backward(dy.double())

    # h^T (WIDE x TOKENS, column-major) = act(W1 x^T + b1): W1 is op(A) with transa.
    bits = torch.zeros(TOKENS, WIDE // 8, dtype=torch.uint8, device="cuda")
    aux = bits if activation == "relu" else torch.empty(TOKENS, WIDE, dtype=torch.bfloat16, device="cuda")
    h = ac.matmul(
        MatmulRequest(
            _rows(w1), _rows(x), m=WIDE, n=TOKENS, k=NARROW, transa=True, epilogue=forward, bias=b1, gelu_aux=aux
        )
    )
    torch.testing.assert_close(h.double(), hidden.detach(), rtol=2**-6, atol=2**-6)
    # The gradient at the sum: W2^T dy^T, times the slope; its rows' sums are db1.
    db1 = torch.empty(WIDE, device="cuda")
    pre = ac.matmul(
        MatmulRequest(
            w2.t().contiguous(), _rows(dy), m=WIDE, n=TOKENS, k=NARROW, transa=True, epilogue=backward, bias=db1,
            gelu_aux=aux,
        )
    )  # fmt: skip
    # dW1^T (NARROW x WIDE) = x^T pre, which sums over tokens; so does BGRADB.
    again = torch.empty(WIDE, device="cuda")
    dw1 = ac.matmul(
        MatmulRequest(_rows(x), _rows(pre), m=NARROW, n=WIDE, k=TOKENS, transb=True, epilogue=E.BGRADB, bias=again)
    )
    for got, name, loss in ((db1, "b1", 2**-5), (again, "b1", 2**-5), (dw1, "w1", 2**-5)):
        want = exact[name].grad
        assert float((got.double() - want).norm() / want.norm()) < loss, name


# ----------------------------------------------------------------------------------------------------------------------
# Streams, graphs, replies, plans


def test_the_streams_order_holds(torch: Any) -> None:
    """On the current stream, and on one that is named: what is written just before is read."""
    case = KINDS[0].case(E.GELU_AUX_BIAS)
    on_gpu = OnGpu(case)
    ac.matmul(on_gpu.request)
    for name in (True, False):
        a = on_gpu.request.a
        right = a.clone()
        a.zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            a.copy_(right)
            request = MatmulRequest(**{**vars_of(on_gpu.request), **({"stream": side} if name else {})})
            ac.matmul(request)
        side.synchronize()
        on_gpu.fetch()
        case.check(cleared=True)


def vars_of(request: MatmulRequest) -> dict[str, Any]:
    """The arguments of a request."""
    return {name: getattr(request, name) for name in MatmulRequest.__dataclass_fields__}


@pytest.mark.parametrize("epilogue", [E.DEFAULT, E.RELU_AUX_BIAS, E.DGELU_BGRAD, E.BGRADA], ids=lambda e: e.name)
def test_graphs_replay(epilogue: E, torch: Any) -> None:
    """With what the arrays hold then: sums and bits are cleared by the graph itself."""
    case = KINDS[0].case(epilogue)
    on_gpu = OnGpu(case)
    ac.matmul(on_gpu.request)  # plans and ones are made before
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ac.matmul(on_gpu.request)
    for _ in range(2):
        on_gpu.request.d.view(torch.uint8).fill_(0)
        graph.replay()
    torch.cuda.synchronize()
    on_gpu.fetch()
    m, n, _ = case.extents
    got = wide(read(case.arrays["d"], m, n, m + case.pad))
    np.testing.assert_allclose(got, case.want.d, rtol=2**-7, atol=2**-7)
    if FORMS[epilogue].writes_bias:
        np.testing.assert_allclose(case.arrays["bias"], case.want.bias, rtol=1e-5, atol=1e-3)
    if FORMS[epilogue].masked:
        whole = case.arrays["gelu_aux"].reshape(n, -1)[:, : -(-m // 8)]
        np.testing.assert_array_equal(whole, bits_of(case.want.aux))


def test_replies_and_the_actor(torch: Any) -> None:
    actor = ac.CutlassActor(2)
    mailbox = actor.start()
    try:
        for epilogue in (E.DEFAULT, E.GELU_AUX_BIAS):
            case = KINDS[0].case(epilogue)
            reply: Future[Any] = Future()
            on_gpu = OnGpu(case, reply=reply)
            torch.cuda._sleep(SLEEP_CYCLES)
            mailbox.tell(ac.CutlassMsg.Matmul(on_gpu.request))
            assert reply.result(120) is on_gpu.request.d
            on_gpu.fetch()
            case.check(cleared=True)
    finally:
        mailbox.stop()
    wrong: Future[Any] = Future()
    with pytest.raises(ac.InvalidOperandError, match="d has 1 elements"):
        ac.matmul(OnGpu(KINDS[0].case(E.DEFAULT), d=torch.zeros(1, device="cuda"), reply=wrong).request)
    assert isinstance(wrong.exception(0), ac.InvalidOperandError)


def test_kernels_are_remembered() -> None:
    heuristics.clear()
    kind = KINDS[0]
    OnGpu(kind.case(E.RELU_AUX_BIAS)).run()
    m, n, k = kind.extents
    key = HeuristicKey(m, n, k, D.BF16, True, False, E.RELU_AUX_BIAS, devices.get(0).arch)
    kernel = heuristics.get(key)
    assert kernel is not None
    assert "evt" in kernel.name
    OnGpu(kind.case(E.RELU_AUX_BIAS, pad=2 * PAD)).run()
    assert heuristics.get(key) is kernel


def test_workspace_of_none() -> None:
    for kind, epilogue in pairs((KINDS[0], KINDS[4]), (E.DEFAULT, E.RELU_AUX_BIAS, E.BGRADA)):
        OnGpu(kind.case(epilogue), workspace_size=0).run()


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


def test_what_no_kernel_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "off")
    heuristics.clear()
    case = OnGpu(KINDS[0].case(E.GELU_AUX_BIAS, pad=3 * PAD))
    with pytest.raises(ac.KernelNotFoundError, match=r"op\(B\)\^T"):
        ac.matmul(case.request)
    assert_untouched(case)


def assert_untouched(on_gpu: OnGpu) -> None:
    """Nothing was written."""
    before = on_gpu.case.arrays["d"].copy()
    on_gpu.fetch()
    np.testing.assert_array_equal(on_gpu.case.arrays["d"], before)


def test_overlaps_are_refused(torch: Any) -> None:
    held = torch.zeros(4096, device="cuda")
    common: dict[str, Any] = {"m": 16, "n": 16, "k": 16, "epilogue": E.DGELU_BGRAD}
    places = {"a": 0, "b": 256, "d": 512, "gelu_aux": 768, "bias": 1024}
    for name, at, says in (
        ("a", 600, "d overlaps a"),
        ("bias", 300, "bias overlaps b"),
        ("gelu_aux", 520, "d overlaps"),
    ):
        moved = places | {name: at}
        request = MatmulRequest(**{name: held[start : start + 256] for name, start in moved.items()}, **common)
        with pytest.raises(ac.InvalidOperandError, match=says):
            ac.matmul(request)
    assert not bool(held.any())
