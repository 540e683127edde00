"""Bad input is refused with a typed error before anything is launched, and `out` stays as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.pipeline import devices
from gpu_matrices import Guarded, assert_product, assert_same_bits, placed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

Arguments = dict[str, Any]


@pytest.fixture
def good() -> Arguments:
    return {"a": placed((40, 48), D.BF16, 1), "b": placed((48, 24), D.BF16, 2)}


def refused(
    error: type[Exception], arguments: Arguments, *, out: Guarded | None = None, match: str | None = None
) -> None:
    """The call raises, writes nothing, and leaves a GPU that still works."""
    import torch

    if out is None and "out" not in arguments:
        out = Guarded((40, 24), D.BF16)
        arguments = {**arguments, "out": out.view}
    with pytest.raises(error, match=match) as caught:
        ac.gemm(**arguments)
    assert type(caught.value) is error
    assert str(caught.value)
    torch.cuda.synchronize()
    if out is not None:
        out.assert_untouched()
    a, b = placed((40, 48), D.BF16, 1), placed((48, 24), D.BF16, 2)
    assert_product(ac.gemm(a, b), a, b)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_too_low(good: Arguments, name: str, rank: int) -> None:
    tensor = good[name]
    refused(ac.InvalidOperandError, {**good, name: tensor[0] if rank else tensor[0, 0]}, match=name)


def test_rank_too_high(good: Arguments) -> None:
    refused(ac.InvalidOperandError, {**good, "a": good["a"][(None,) * 7]}, match="dimensions")


def test_k_mismatch(good: Arguments) -> None:
    refused(ac.InvalidOperandError, {**good, "b": good["b"][:-8]}, match="K")


def test_batch_mismatch() -> None:
    arguments = {"a": placed((2, 40, 48), D.BF16, 1), "b": placed((3, 48, 24), D.BF16, 2)}
    refused(ac.InvalidOperandError, arguments, match="broadcast")


@pytest.mark.parametrize("c", [(39, 24), (40, 23), (24,), (24, 40), (2, 40, 24), (1, 1)], ids=str)
def test_c_of_the_wrong_shape(good: Arguments, c: tuple[int, ...]) -> None:
    import torch

    wrong = torch.zeros(c, dtype=torch.bfloat16, device="cuda")
    refused(ac.InvalidOperandError, {**good, "c": wrong, "beta": 1.0}, match="c ")


@pytest.mark.parametrize("shape", [(39, 24), (40, 23), (24, 40), (1, 40, 24), (960,)], ids=str)
def test_out_of_the_wrong_shape(good: Arguments, shape: tuple[int, ...]) -> None:
    import torch

    out = torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda")
    refused(ac.InvalidOperandError, {**good, "out": out}, match="out")
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", ["float64", "int32", "int8"])
def test_out_of_a_dtype_that_no_kernel_writes(good: Arguments, dtype: str) -> None:
    import torch

    out = torch.full((40, 24), 7, dtype=getattr(torch, dtype), device="cuda")
    refused(ac.UnsupportedError, {**good, "out": out}, match="bf16")
    assert (out == 7).all()


def test_out_of_another_dtype_than_asked_for(good: Arguments) -> None:
    out = Guarded((40, 24), D.F32)
    refused(ac.InvalidOperandError, {**good, "out": out.view, "out_dtype": D.BF16}, out=out, match="out_dtype")


def test_c_of_another_dtype(good: Arguments) -> None:
    refused(ac.InvalidOperandError, {**good, "c": placed((40, 24), D.F32, 3), "beta": 1.0}, match="dtype")


@pytest.mark.parametrize(
    ("a", "b"), [(D.BF16, D.F16), (D.F32, D.BF16), (D.F64, D.F32), (D.I8, D.F16)], ids=lambda d: d.value
)
def test_pairs_of_dtypes(a: D, b: D) -> None:
    refused(ac.InvalidOperandError, {"a": placed((40, 48), a, 1), "b": placed((48, 24), b, 2)}, match="one dtype")


@pytest.mark.parametrize("dtype", ["bool", "int16", "int64", "complex64"])
def test_dtypes_that_no_kernel_knows(dtype: str) -> None:
    import torch

    a = torch.ones(40, 48, dtype=getattr(torch, dtype), device="cuda")
    b = torch.ones(48, 24, dtype=getattr(torch, dtype), device="cuda")
    refused(ac.InvalidOperandError, {"a": a, "b": b})


def test_int32_operands() -> None:
    arguments = {"a": placed((40, 48), D.I32, 1), "b": placed((48, 24), D.I32, 2)}
    out = Guarded((40, 24), D.I32)
    refused(ac.UnsupportedError, {**arguments, "out": out.view}, out=out, match="i32")


def test_bytes_are_fp4() -> None:
    """Two elements each, in their packed form: few GPUs multiply those."""
    import torch

    arch = devices.get(0).arch
    if arch is not None and ac.is_fp4_supported(arch):
        pytest.skip(f"{arch.value} has kernels of fp4")
    a = torch.ones(40, 48, dtype=torch.uint8, device="cuda")
    b = torch.ones(24, 48, dtype=torch.uint8, device="cuda").T
    refused(ac.UnsupportedError, {"a": a, "b": b}, match="no kernel multiplies fp4 on")


@pytest.mark.parametrize("name", ["scale_a", "scale_b", "scale_d", "amax"])
def test_arrays_of_scales_are_for_fp8(good: Arguments, name: str) -> None:
    import torch

    scale = torch.full((1,), 7.0, device="cuda")
    refused(ac.UnsupportedError, {**good, name: scale})
    assert float(scale) == 7


@pytest.mark.parametrize("layouts", ["rr", "cr", "cc"])
@pytest.mark.parametrize("shape", [(144, 80, 96), (67, 45, 33)], ids=str)
def test_int8_layouts_name_the_cure(layouts: str, shape: tuple[int, int, int]) -> None:
    """Where no kernel takes a layout, the message says which operand to transpose, or which cell to build."""
    m, n, k = shape
    a, b = placed((m, k), D.I8, 1, layout=layouts[0]), placed((k, n), D.I8, 2, layout=layouts[1])
    out = Guarded((m, n), D.I32)
    try:
        ac.gemm(a, b, out=out.view)
    except ac.UnsupportedError as error:
        assert "contiguous along K" in str(error)  # noqa: PT017
        out.assert_untouched()
    except ac.KernelNotFoundError as error:
        assert "ATOMR_CUTLASS" in str(error)  # noqa: PT017
        out.assert_untouched()
    else:
        out.assert_guards()
        assert_product(out.view, a, b)


def operand(tensor: Any, strides: tuple[int, ...], *, read_only: bool = False, shift: int = 0) -> _core.Operand:
    """A view of the tensor's memory with strides of the test's choice."""
    view = operands.as_operand(tensor)
    pointer = view.pointer + shift * tensor.element_size()
    return _core.Operand(pointer, view.shape, strides, view.dtype, operands.CUDA, 0, read_only, tensor)


def test_negative_strides(good: Arguments) -> None:
    a = operand(good["a"], (-48, 1), shift=39 * 48)
    refused(ac.InvalidOperandError, {**good, "a": a}, match="negative")
    b = operand(good["b"], (24, -1), shift=23)
    refused(ac.InvalidOperandError, {**good, "b": b}, match="negative")


def test_no_contiguous_dimension(good: Arguments) -> None:
    wide = placed((40, 96), D.BF16, 1)
    refused(ac.UnsupportedError, {**good, "a": wide[:, ::2]}, match="contiguous")
    out = Guarded((40, 48), D.BF16)
    refused(ac.UnsupportedError, {**good, "out": out.view[:, ::2]}, out=out, match="contiguous")


def test_rows_that_overlap(good: Arguments) -> None:
    """Sliding windows: rows closer together than they are long."""
    a = operand(good["a"], (1, 1))
    refused(ac.UnsupportedError, {**good, "a": a}, match="overlap")
    out = Guarded((40, 24), D.BF16)
    refused(ac.UnsupportedError, {**good, "out": operand(out.view, (8, 1))}, out=out, match="overlap")


def test_out_that_repeats_itself(good: Arguments) -> None:
    out = Guarded((1, 24), D.BF16)
    refused(ac.InvalidOperandError, {**good, "out": out.view.expand(40, 24)}, out=out, match="share")


def test_read_only_out(good: Arguments) -> None:
    out = Guarded((40, 24), D.BF16)
    refused(
        ac.InvalidOperandError, {**good, "out": operand(out.view, (24, 1), read_only=True)}, out=out, match="read-only"
    )


@pytest.mark.parametrize("name", ["a", "b"])
def test_out_overlaps_an_operand(name: str) -> None:
    import torch

    a, b = placed((48, 48), D.BF16, 1).clone(), placed((48, 48), D.BF16, 2).clone()
    before = {"a": a.clone(), "b": b.clone()}
    arguments = {"a": a, "b": b}
    refused(ac.InvalidOperandError, {**arguments, "out": arguments[name]}, match="overlaps")
    refused(ac.InvalidOperandError, {**arguments, "out": arguments[name].T}, match="overlaps")
    assert torch.equal(a, before["a"])
    assert torch.equal(b, before["b"])


def test_out_overlaps_c_without_being_it(good: Arguments) -> None:
    import torch

    buffer = torch.ones(41, 24, dtype=torch.bfloat16, device="cuda")
    refused(ac.InvalidOperandError, {**good, "c": buffer[1:], "beta": 1.0, "out": buffer[:-1]}, match="overlaps")
    assert (buffer == 1).all()


def test_neighbours_in_one_buffer_are_no_overlap() -> None:
    """Column ranges of the same rows alternate in memory without meeting."""
    import torch

    buffer = torch.zeros(48, 144, dtype=torch.bfloat16, device="cuda")
    a, b, out = buffer[:, :48], buffer[:, 48:96], buffer[:, 96:]
    a.copy_(placed((48, 48), D.BF16, 1))
    b.copy_(placed((48, 48), D.BF16, 2))
    ac.gemm(a, b, out=out)
    assert_product(out, a, b)


@pytest.mark.parametrize("name", ["a", "b", "c", "out"])
def test_devices_mixed(good: Arguments, name: str) -> None:
    arguments = {**good, "c": placed((40, 24), D.BF16, 3), "beta": 1.0}
    if name == "out":
        out = Guarded((40, 24), D.BF16).view.cpu()
        before = out.clone()
        refused(ac.InvalidOperandError, {**arguments, "out": out}, match="device")
        assert_same_bits(out, before)
        return
    refused(ac.InvalidOperandError, {**arguments, name: arguments[name].cpu()}, match="device")
    if name != "a":
        array = np.zeros(tuple(arguments[name].shape), np.float32)
        refused(ac.InvalidOperandError, {**arguments, name: array}, match="device")


@pytest.mark.parametrize("name", ["a", "b", "c", "out"])
@pytest.mark.parametrize("value", ["text", 3, 2.5, [[1.0]], object()], ids=lambda value: type(value).__name__)
def test_no_arrays(good: Arguments, name: str, value: object) -> None:
    arguments = {**good, "beta": 1.0 if name == "c" else 0.0, name: value}
    refused(ac.InvalidOperandError, arguments, match="array")


def test_scalars(good: Arguments) -> None:
    c = placed((40, 24), D.BF16, 3)
    refused(ac.InvalidOperandError, {**good, "c": c}, match="beta is 0")
    refused(ac.InvalidOperandError, {**good, "beta": 1.0}, match="c is needed")
    for value in ("2", None, 1j, [1.0], True):
        refused(ac.InvalidOperandError, {**good, "alpha": value}, match="alpha")
        refused(ac.InvalidOperandError, {**good, "c": c, "beta": value}, match="beta")


@pytest.mark.parametrize("scalar", [0.5, 2.5, float("nan"), float("inf"), 2.0**40], ids=str)
def test_integer_results_take_whole_scalars(scalar: float) -> None:
    """No int32 holds them."""
    arguments = {"a": placed((40, 48), D.I8, 1), "b": placed((48, 32), D.I8, 2, layout="c")}
    out = Guarded((40, 32), D.I32)
    c = placed((40, 32), D.I32, 3)
    if scalar == 2.0**40:
        # Representable modulo 2**32 only: what the reference computes, or a refusal, but nothing else.
        try:
            ac.gemm(**arguments, out=out.view, alpha=scalar)
        except ac.InvalidOperandError:
            out.assert_untouched()
        else:
            assert_product(out.view, arguments["a"], arguments["b"], alpha=scalar)
        return
    refused(ac.InvalidOperandError, {**arguments, "out": out.view, "alpha": scalar}, out=out, match="whole")
    refused(ac.InvalidOperandError, {**arguments, "c": c, "out": out.view, "beta": scalar}, out=out, match="whole")


def test_the_same_refusals_after_a_good_call(good: Arguments) -> None:
    """The fast path of a kept plan checks scalars and C too."""
    out = Guarded((40, 24), D.BF16)
    ac.gemm(**good, out=out.view)
    c = placed((40, 24), D.BF16, 3)
    ac.gemm(**good, c=c, out=out.view, beta=1.0)
    for wrong in ({"c": c}, {"beta": 1.0}, {"alpha": "2"}, {"alpha": None}, {"beta": "x", "c": c}, {"stream": "s"}):
        fresh = Guarded((40, 24), D.BF16)
        refused(ac.InvalidOperandError, {**good, **wrong, "out": fresh.view}, out=fresh)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"precision": "tf32"}, ac.InvalidOperandError),
        ({"precision": "fast"}, ac.InvalidOperandError),
        ({"backend": "cublas"}, ac.InvalidOperandError),
        ({"backend": "jit", "jit": "off"}, ac.KernelNotFoundError),
        ({"jit": "sometimes"}, ac.InvalidOperandError),
        ({"epilogue": object()}, ac.InvalidOperandError),
        ({"activation": "swoosh"}, ac.InvalidOperandError),
        ({"out_dtype": "bf16"}, ac.InvalidOperandError),
        ({"out_dtype": D.F64}, ac.InvalidOperandError),
        ({"stream": "side"}, ac.InvalidOperandError),
        ({"scale_a": np.ones((40, 1), np.float32)}, ac.InvalidOperandError),  # on the CPU
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_options(good: Arguments, option: Arguments, error: type[Exception]) -> None:
    refused(error, {**good, **option})


def test_a_bias_of_another_length_is_refused(good: Arguments) -> None:
    refused(ac.InvalidOperandError, {**good, "bias": placed((1, 23), D.BF16, 3)[0]}, match="bias")


def test_batches_that_would_take_too_many_launches() -> None:
    import torch

    a = torch.empty(100, 100, 3, 8, 8, dtype=torch.bfloat16, device="cuda").transpose(0, 1)[:, :, :2]
    with pytest.raises(ac.UnsupportedError, match="launches"):
        ac.gemm(a, a)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ac.plan("request"),
        lambda: ac.plan(ac.GemmRequest(ac.GemmShape(8, 8, 8), dtype=D.BF16), device=99),
        lambda: ac.plan(ac.GemmRequest(ac.GemmShape(8, 0, 8), dtype=D.BF16)),
        lambda: ac.plan(
            ac.GemmRequest(ac.GemmShape(8, 8, 8), dtype=D.I8, epilogue=ac.GemmEpilogue(bias=True)), jit="off"
        ),
    ],
    ids=["no request", "no such device", "empty", "a bias that no built kernel adds to integers"],
)
def test_requests(make: Callable[[], object]) -> None:
    with pytest.raises(ac.CutlassError):
        make()
