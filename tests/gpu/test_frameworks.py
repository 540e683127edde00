"""Arrays of every framework in, results of the same kind out."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import gpu_requests
from atomr_cutlass import _core
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.pipeline.operation import planned_operations
from gpu_matrices import KINDS, Guarded, Kind, assert_product, host, placed, result_of

pytestmark = pytest.mark.gpu

SHAPES = ((136, 80, 64), (33, 45, 55))


def numbers(shape: tuple[int, ...], dtype: D, seed: int) -> np.ndarray:
    """Small whole numbers: their products are exact."""
    values = np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)
    return numerics.saturating_cast(values, dtype)


def expected(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **scalars: float) -> np.ndarray:
    dtype = numerics.from_numpy_dtype(a.dtype)
    assert dtype is not None
    return gemm_reference.gemm(a, b, c, out_dtype=D.I32 if dtype is D.I8 else dtype, **scalars)


# ----------------------------------------------------------------------------------------------------------------------
# NumPy, and host tensors


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy(kind: Kind, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = numbers((m, k), kind.dtype, 1), numbers((n, k), kind.dtype, 2).T
    d = ac.gemm(a, b, precision=kind.precision)
    assert isinstance(d, np.ndarray)
    assert d.dtype == numerics.numpy_dtype(result_of(kind))
    np.testing.assert_array_equal(d, expected(a, b))
    c = numbers((m, n), result_of(kind), 3)
    out = np.full((m, n + 3), 99, numerics.numpy_dtype(result_of(kind)))
    view = out[:, 1:-2]
    assert ac.gemm(a, b, c, out=view, alpha=2, beta=-1, precision=kind.precision, backend="prebuilt") is view
    np.testing.assert_array_equal(view, expected(a, b, c, alpha=2.0, beta=-1.0))
    assert (out[:, [0, -2, -1]] == 99).all()


def test_numpy_views() -> None:
    """Host views are copied before they are multiplied, so any strides will do."""
    whole = numbers((2, 80, 90), D.F32, 1)
    a, b = whole[0, ::-2, ::3], whole[1, 5:35, ::-1]
    np.testing.assert_array_equal(ac.gemm(a, b), expected(a, b))
    np.testing.assert_array_equal(ac.gemm(whole.swapaxes(1, 2), whole), expected(whole.swapaxes(1, 2), whole))


def test_numpy_broadcasts() -> None:
    a, b = numbers((2, 1, 33, 24), D.F16, 1), numbers((3, 24, 16), D.F16, 2)
    np.testing.assert_array_equal(ac.gemm(a, b), expected(a, b))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_host_tensors(torch: Any, kind: Kind) -> None:
    """CPU tensors behave as NumPy does, and a result is a CPU tensor."""
    a, b = placed((40, 48), kind.dtype, 1, whole=True).cpu(), placed((48, 24), kind.dtype, 2, layout="c").cpu()
    d = ac.gemm(a, b, precision=kind.precision)
    assert isinstance(d, torch.Tensor)
    assert d.device.type == "cpu"
    assert_product(d, a, b, math_mode=kind.math)
    out = torch.zeros(40, 24, dtype=d.dtype)
    assert ac.gemm(a, b, out=out, precision=kind.precision) is out
    assert torch.equal(out, d)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "complex64"])
def test_torch_dtypes_without_kernels(torch: Any, dtype: str) -> None:
    a = torch.ones(16, 16, dtype=getattr(torch, dtype), device="cuda")
    with pytest.raises((ac.InvalidOperandError, ac.UnsupportedError)):
        ac.gemm(a, a)


def test_torch_tensors_are_read_through_the_exchange_api(torch: Any) -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert _core.has_exchange_api(tensor) == hasattr(type(tensor), "__dlpack_c_exchange_api__")
    operand = operands.as_operand(tensor.T)
    assert (operand.shape, operand.strides) == ((4, 3), (1, 4))
    assert operand.pointer == tensor.data_ptr()
    np.testing.assert_array_equal(operands.to_numpy(operand), tensor.numpy().T)


def test_torch_tensors_of_narrow_types(torch: Any) -> None:
    for name, dtype in (("bfloat16", D.BF16), ("float16", D.F16), ("int8", D.I8), ("float64", D.F64)):
        operand = operands.as_operand(torch.zeros((2, 3), dtype=getattr(torch, name)))
        assert operands.dtype_of(operand, "a") is dtype


def test_torch_parameters_and_gradients(torch: Any) -> None:
    """Operands that require a gradient are refused while gradients are recorded, by kept plans too, else taken."""
    a, out = placed((40, 48), D.F32, 1), torch.full((40, 24), 7.0, device="cuda")
    weight = torch.nn.Parameter(placed((48, 24), D.F32, 2).clone())
    made = ac.plan(ac.GemmRequest(ac.GemmShape(40, 24, 48), dtype=D.F32, precision="ieee"))
    functions = (made, functools.partial(ac.gemm, precision="ieee"))
    for function in functions:
        for b in (weight, weight * 1.0):
            for _ in range(2):
                with pytest.raises(ac.InvalidOperandError, match=r"b requires a gradient.*torch\.no_grad.*detach"):
                    function(a, b, out=out)
                assert bool((out == 7).all())
                with torch.no_grad():
                    assert_product(function(a, b), a, weight.detach())
                with torch.inference_mode():
                    assert_product(function(a, b), a, weight.detach())
                assert_product(function(a, b.detach()), a, weight.detach())
        with pytest.raises(ac.InvalidOperandError, match="out requires a gradient"):
            function(a, weight.detach(), out=torch.zeros((40, 24), device="cuda", requires_grad=True))
    host = weight.detach().cpu().requires_grad_()
    with pytest.raises(ac.InvalidOperandError, match="b requires a gradient"):
        ac.gemm(a.cpu(), host, backend="reference")


def test_torch_subclasses(torch: Any) -> None:
    """A subclass of Tensor is a tensor."""

    class Marked(torch.Tensor):
        pass

    a, b = placed((40, 48), D.BF16, 1), placed((48, 24), D.BF16, 2)
    d = ac.gemm(a.as_subclass(Marked), b)
    assert_product(d.as_subclass(torch.Tensor) if isinstance(d, torch.Tensor) else torch.from_dlpack(d), a, b)


def test_results_outlive_their_operands(torch: Any) -> None:
    a, b = placed((40, 48), D.F16, 1), placed((48, 24), D.F16, 2)
    want = host(a.double() @ b.double())
    results = [ac.gemm(a.clone(), b.clone()) for _ in range(50)]
    del a, b
    torch.cuda.synchronize()
    for d in results:
        np.testing.assert_allclose(d.double().cpu().numpy(), want, atol=0.1, rtol=1e-2)


def test_the_second_gpu(torch: Any) -> None:
    """Operands of one GPU are multiplied there; those of two are refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    a, b = placed((40, 48), D.BF16, 1), placed((48, 24), D.BF16, 2)
    far_a, far_b = a.to("cuda:1"), b.to("cuda:1")
    out = Guarded((40, 24), D.BF16)
    for arguments in ({"a": far_a, "b": b}, {"a": a, "b": far_b}, {"a": far_a, "b": far_b}):
        with pytest.raises(ac.InvalidOperandError, match="device"):
            ac.gemm(**arguments, out=out.view)
    out.assert_untouched()
    d = ac.gemm(far_a, far_b)
    assert d.device == far_a.device
    assert torch.cuda.current_device() == 0
    assert_product(d.to("cuda:0"), a, b)
    ac.gemm(a, b, out=out.view)
    assert_product(out.view, a, b)


@pytest.mark.parametrize(
    ("name", "fused"), [*itertools.product(planned_operations(), ("plain", "bias")), ("gemm", "tree")]
)
def test_two_gpus(torch: Any, name: str, fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process works on both in turn: plans, plans with an operand bound, and calls are each their own GPU's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    request = gpu_requests.request_of(name)
    if fused != "plain":
        request = gpu_requests.with_bias(request) if fused == "bias" else gpu_requests.with_tree(request)
    if fused == "tree":
        monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    try:
        made = [ac.plan(request, device) for device in (0, 1)]
    except ac.DeviceUnavailableError as error:
        pytest.skip(str(error))
    placed_on = [gpu_requests.Placed(request, device, seed=device) for device in (0, 1)]
    bound = [ac.plan(request, device, b=placed_on[device].bound) for device in (0, 1)]
    for plans in (made, bound):
        for _ in range(2):
            for device in (1, 0):
                placed_on[device].spoil()
                placed_on[device].launch(plans[device])
            for device in (0, 1):
                placed_on[device].assert_right(made[device])
    for _ in range(2):
        for device in (1, 0):
            results = placed_on[device].call(torch)
            assert {d.device for d in results} == {torch.device("cuda", device)}
            torch.cuda.synchronize(device)
            placed_on[device].assert_right(made[device], results)
    with pytest.raises(ac.InvalidOperandError, match=r"cuda:1|GPU|device"):
        placed_on[1].launch(made[0])
    assert torch.cuda.current_device() == 0


# ----------------------------------------------------------------------------------------------------------------------
# CuPy


@pytest.mark.parametrize("dtype", [D.F16, D.F32, D.F64, D.I8], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cupy(cupy: Any, dtype: D, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    host_a, host_b = numbers((m, k), dtype, 1), numbers((n, k), dtype, 2)
    a, b = cupy.asarray(host_a), cupy.asarray(host_b).T
    for _ in range(2):
        d = ac.gemm(a, b)
        assert isinstance(d, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(d), expected(host_a, host_b.T))
    whole = cupy.full((m, n + 8), 99, d.dtype)
    view = whole[:, 4:-4]
    c = cupy.ones((m, n), d.dtype)
    assert ac.gemm(a, b, c, out=view, alpha=3, beta=2) is view
    want = expected(host_a, host_b.T, cupy.asnumpy(c), alpha=3.0, beta=2.0)
    np.testing.assert_array_equal(cupy.asnumpy(view), want)
    assert bool((whole[:, :4] == 99).all())
    assert bool((whole[:, -4:] == 99).all())


def test_cupy_streams(cupy: Any, torch: Any) -> None:
    """CuPy's current stream is where work goes."""
    host_a, host_b = numbers((136, 64), D.F32, 1), numbers((64, 80), D.F32, 2)
    source, b = cupy.asarray(host_a), cupy.asarray(host_b)
    a = cupy.full((136, 64), cupy.nan, cupy.float32)
    out = cupy.zeros((136, 80), cupy.float32)
    ac.gemm(source, b, out=out)
    for how in ("current", "object", "new result"):
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        a.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        with stream:
            # CuPy cannot keep a stream busy for a given time; PyTorch can, on any stream.
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                torch.cuda._sleep(20_000_000)
            a[...] = source
            if how == "current":
                d = ac.gemm(a, b, out=out)
            elif how == "new result":
                d = ac.gemm(a, b)
        if how == "object":
            d = ac.gemm(a, b, out=out, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(d), expected(host_a, host_b))


@pytest.mark.parametrize("how", ["gemm", "gemm, new result", "plan"])
def test_cupy_graph(cupy: Any, how: str) -> None:
    """Calls of CuPy arrays are captured from CuPy's current stream."""
    a, b = cupy.asarray(numbers((136, 64), D.F32, 1)), cupy.asarray(numbers((64, 80), D.F32, 2))
    out = cupy.zeros((136, 80), cupy.float32)
    request = ac.GemmRequest(ac.GemmShape(136, 80, 64), dtype=D.F32, precision="ieee")
    call: Any = ac.plan(request) if how == "plan" else ac.gemm
    arguments = {} if how.endswith("new result") else {"out": out}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call(a, b, **arguments)
        call(a, b, **arguments)
        stream.synchronize()
        stream.begin_capture()
        d = call(a, b, **arguments)
        graph = stream.end_capture()
        for seed in (11, 12):
            host_a = numbers((136, 64), D.F32, seed)
            a.set(host_a, stream)
            d.fill(cupy.nan)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(d), expected(host_a, cupy.asnumpy(b)))


def test_cupy_new_result_on_another_stream(cupy: Any, torch: Any) -> None:
    """CuPy's pool gives the memory out for its current stream, which waits for the launch, and the launch for it."""
    host_a, host_b = numbers((136, 64), D.F32, 1), numbers((64, 80), D.F32, 2)
    a, b = cupy.asarray(host_a), cupy.asarray(host_b)
    side, current = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    ac.gemm(a, b)
    cupy.cuda.Device().synchronize()
    with current:
        torch_current = torch.cuda.ExternalStream(current.ptr)
        for _ in range(3):
            former = cupy.empty((136, 80), cupy.float32)
            with torch.cuda.stream(torch_current):
                torch.cuda._sleep(20_000_000)
            former.fill(7)
            del former
            d = ac.gemm(a, b, stream=side.cuda_stream)
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
            d = ac.gemm(a, b, stream=side.cuda_stream)
            seen = d.copy()
            current.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(seen), expected(host_a, host_b))


def test_cupy_negative_strides(cupy: Any) -> None:
    a = cupy.ones((40, 48), cupy.float32)
    out = cupy.full((40, 48), 7, cupy.float32)
    square = cupy.ones((48, 48), cupy.float32)
    for wrong in ({"a": a[::-1], "b": square}, {"a": a, "b": square[:, ::-1]}, {"a": a, "b": square[::-1]}):
        with pytest.raises((ac.InvalidOperandError, ac.UnsupportedError), match="stride"):
            ac.gemm(**wrong, out=out)
    with pytest.raises((ac.InvalidOperandError, ac.UnsupportedError), match="stride"):
        ac.gemm(a, square, out=out[::-1])
    assert bool((out == 7).all())


# ----------------------------------------------------------------------------------------------------------------------
# JAX


@pytest.mark.parametrize("dtype", [D.F16, D.BF16, D.F32, D.I8], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax(jax: Any, dtype: D, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    host_a, host_b = numbers((m, k), dtype, 1), numbers((k, n), dtype, 2)
    if dtype is D.I8:
        # JAX arrays are row-major, and 8-bit products may need B column-major.
        try:
            ac.gemm(jax.numpy.asarray(host_a), jax.numpy.asarray(host_b))
        except (ac.UnsupportedError, ac.KernelNotFoundError):
            pytest.skip("no kernel for a row-major int8 B")
    a, b = jax.numpy.asarray(host_a), jax.numpy.asarray(host_b)
    d = ac.gemm(a, b)
    assert isinstance(d, jax.Array)
    assert d.devices() == a.devices()
    np.testing.assert_array_equal(np.asarray(d), expected(host_a, host_b))
    again = ac.gemm(d.astype(a.dtype)[:, :1], a[:1, :])  # a result of ours is an array like any other
    assert again.shape == (m, k)


def test_jax_c(jax: Any) -> None:
    host_a, host_b = numbers((40, 48), D.F32, 1), numbers((48, 24), D.F32, 2)
    a, b, c = jax.numpy.asarray(host_a), jax.numpy.asarray(host_b), jax.numpy.ones((40, 24), jax.numpy.float32)
    d = ac.gemm(a, b, c, alpha=2.0, beta=3.0)
    np.testing.assert_array_equal(np.asarray(d), expected(host_a, host_b, np.asarray(c), alpha=2.0, beta=3.0))


def test_jax_producers_are_awaited_on_the_stream_of_the_launch(jax: Any, torch: Any) -> None:
    """JAX computes on streams of its own, and returns before it is done; its memory is reused once let go of."""
    start, b = jax.numpy.ones((512, 512), jax.numpy.float32), jax.numpy.ones((512, 80), jax.numpy.float32)

    @jax.jit
    def late(x: Any, value: Any) -> Any:
        for _ in range(40):
            x = x @ x / 512
        return x * value

    late(start, 1.0).block_until_ready()
    ac.gemm(start, b)
    side = torch.cuda.Stream()
    for how in ({}, {"stream": side}, {"stream": side.cuda_stream}):
        results = [ac.gemm(late(start, float(value)), b, **how) for value in range(1, 9)]
        for value, d in enumerate(results, 1):
            assert isinstance(d, jax.Array)
            np.testing.assert_array_equal(np.asarray(d), np.full((512, 80), 512.0 * value, np.float32))
    ones = torch.ones((80, 512), device="cuda")
    d = ac.gemm(ones, late(start, 2.0))
    np.testing.assert_array_equal(d.cpu().numpy(), np.full((80, 512), 1024.0, np.float32))


def test_jax_arrays_are_no_out(jax: Any) -> None:
    a = jax.numpy.ones((16, 16), jax.numpy.float32)
    out = jax.numpy.zeros((16, 16), jax.numpy.float32)
    with pytest.raises(ac.InvalidOperandError, match=r"JAX|read-only"):
        ac.gemm(a, a, out=out)
    assert not np.asarray(out).any()


# ----------------------------------------------------------------------------------------------------------------------
# Operands of our own, and arrays of other kinds


def test_operands(torch: Any) -> None:
    a, b = placed((40, 48), D.BF16, 1), placed((48, 24), D.BF16, 2)
    views = _core.Operand.of(a), _core.Operand.of(b)
    torch.cuda.synchronize()
    for _ in range(2):
        d = ac.gemm(*views)
        assert isinstance(d, _core.Operand)
        torch.cuda.synchronize()
        assert_product(torch.from_dlpack(d), a, b)
    out = Guarded((40, 24), D.BF16)
    ac.gemm(*views, out=_core.Operand.of(out.view))
    torch.cuda.synchronize()
    out.assert_guards()
    assert_product(out.view, a, b)


def test_cuda_array_interface(torch: Any) -> None:
    """Any object with `__cuda_array_interface__`; its result is one of ours, which DLPack exports."""

    class Wrapped:
        def __init__(self, tensor: Any) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__
            self.owner = tensor

    a, b = placed((40, 48), D.F16, 1), placed((48, 24), D.F16, 2)
    out = Guarded((40, 24), D.F16)
    torch.cuda.synchronize()
    ac.gemm(Wrapped(a), Wrapped(b), out=Wrapped(out.view))
    torch.cuda.synchronize()
    out.assert_guards()
    assert_product(out.view, a, b)
    d = ac.gemm(Wrapped(a), Wrapped(b))
    torch.cuda.synchronize()
    assert_product(torch.from_dlpack(d), a, b)


def test_dlpack_only(torch: Any) -> None:
    """Any object with `__dlpack__`, of the protocol's first form too."""

    class Wrapped:
        def __init__(self, tensor: Any, *, old: bool) -> None:
            self.tensor, self.old = tensor, old

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, **arguments: Any) -> object:
            if self.old and "max_version" in arguments:
                raise TypeError("what is max_version?")
            return self.tensor.__dlpack__(**arguments)

    a, b = placed((40, 48), D.BF16, 1), placed((48, 24), D.BF16, 2)
    for old in (False, True):
        out = Guarded((40, 24), D.BF16)
        torch.cuda.synchronize()
        ac.gemm(Wrapped(a, old=old), Wrapped(b, old=old), out=Wrapped(out.view, old=old))
        torch.cuda.synchronize()
        out.assert_guards()
        assert_product(out.view, a, b)


def test_mixed_frameworks(torch: Any, cupy: Any) -> None:
    """On one device frameworks may be mixed; the result is of A's kind."""
    a, b = placed((40, 48), D.F32, 1), placed((48, 24), D.F32, 2)
    d = ac.gemm(a, cupy.from_dlpack(b))
    assert isinstance(d, torch.Tensor)
    assert_product(d, a, b)
    other = ac.gemm(cupy.from_dlpack(a), b)
    assert isinstance(other, cupy.ndarray)
    cupy.cuda.Device().synchronize()
    assert_product(torch.from_dlpack(other), a, b)


def test_mixed_frameworks_are_ordered(torch: Any, cupy: Any) -> None:
    """Each works on a stream of its own: the launch waits for what the other produces, that for what is launched."""
    a, b = placed((136, 64), D.F32, 1), placed((64, 80), D.F32, 2)
    own, current = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    other = torch.cuda.ExternalStream(current.ptr)
    source = cupy.from_dlpack(b)
    ac.gemm(a, b)
    torch.cuda.synchronize()
    with torch.cuda.stream(own), current:
        late_b = cupy.full((64, 80), cupy.nan, cupy.float32)
        out = cupy.full((136, 80), cupy.nan, cupy.float32)
        current.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
        late_b[...] = source
        assert_product(ac.gemm(a, late_b), a, b)  # CuPy's late operand
        torch.cuda._sleep(20_000_000)
        ac.gemm(a, late_b, out=out)
        seen = out.copy()  # CuPy reads what PyTorch's stream writes late
        current.synchronize()
        assert_product(torch.from_dlpack(seen), a, b)
        late_a = torch.full_like(a, float("nan"))
        own.synchronize()
        torch.cuda._sleep(20_000_000)
        late_a.copy_(a)
        d = ac.gemm(source.T, late_a.T)  # on CuPy's stream
        current.synchronize()
        assert_product(torch.from_dlpack(d), b.T, a.T)


def test_results_of_our_own_are_awaited_by_whoever_imports_them(torch: Any) -> None:
    """An array that only has `__cuda_array_interface__`, without a device, and whose result is an operand."""

    class Wrapped:
        def __init__(self, tensor: Any) -> None:
            self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "stream": None}
            self.owner = tensor

    a, b = placed((40, 48), D.F16, 1), placed((48, 24), D.F16, 2)
    for index in range(torch.cuda.device_count()):
        far_a, far_b = a.to(f"cuda:{index}"), b.to(f"cuda:{index}")
        assert operands.as_operand(Wrapped(far_a)).device == index
        assert _core.pointer_device(far_a.data_ptr()) == index
        with torch.cuda.device(index):
            side = torch.cuda.Stream()
            ac.gemm(Wrapped(far_a), Wrapped(far_b))
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
            d = ac.gemm(Wrapped(far_a), Wrapped(far_b), stream=side)
            seen = torch.from_dlpack(d).clone()
            torch.cuda.synchronize()
            assert_product(seen.to("cuda:0"), a, b)
            copy = torch.from_dlpack(d, copy=True)
            assert copy.data_ptr() != d.pointer
            assert torch.equal(copy, seen)
    host = a.cpu()
    with pytest.raises(ac.InvalidOperandError, match="there is no GPU memory at address"):
        operands.as_operand(Wrapped(Described(host)))


class Described:
    """A tensor in host memory that describes itself as one on a GPU."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f2",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def test_managed_memory(cupy: Any) -> None:
    """CUDA managed memory is memory of the GPU."""
    memory = cupy.cuda.malloc_managed(16 * 16 * 4)
    a = cupy.ndarray((16, 16), cupy.float32, memory)
    a[...] = 2
    b = cupy.ones((16, 16), cupy.float32)
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(ac.gemm(b, a)), 32)
    assert operands.as_operand(a).device_type == operands.CUDA
