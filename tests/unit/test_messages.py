"""Messages: what they take, what they import where they are made, and what they leave to the answer."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import fake_gpu
from atomr_cutlass import (
    ConvFwdRequest,
    ConvLayout,
    ConvShape,
    ConvWgradRequest,
    CutlassMsg,
    EvtBuilder,
    GatedGemmRequest,
    GemmEpilogue,
    GemmLayout,
    GemmRequest,
    GemmShape,
    GroupedGemmRequest,
    GroupedGemmShape,
    RefitMsg,
)
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.arrays import operands
from atomr_cutlass.errors import CutlassError, InvalidOperandError
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.serving.messages import Compute
from dlpack_arrays import Array
from fake_gpu import FakeGpu, fetch, operands_of, place

REQUEST = GemmRequest(GemmShape(8, 16, 32), dtype=D.F16)
GROUPED = GroupedGemmRequest(GroupedGemmShape([GemmShape(8, 8, 8), GemmShape(4, 8, 8)]), dtype=D.BF16)
CONV = ConvFwdRequest(ConvShape.nhwc(1, 8, 8, 16, 32, 3, 3), dtype=D.F16)
SCALED = GemmRequest(
    GemmShape(16, 32, 256), dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, scaling="block", quantized=True
)
GATED = GatedGemmRequest(
    GemmShape(16, 32, 256), dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, scaling="vector", quantized=True
)
BLOCK = (
    EvtBuilder().add_bias("bias", dtype=D.F16).aux_load("kept", kind="mask").binary("multiply", "kept")
    .mask_store("positive").reduce("sums", "row").build()
)  # fmt: skip
FUSED = GemmRequest(GemmShape(8, 20, 32), dtype=D.F16, epilogue=GemmEpilogue(tree=BLOCK))


pytestmark = pytest.mark.usefixtures("gpu")


def complaint(given: Any, request: GemmRequest = REQUEST, **options: Any) -> str:
    """Why a message's operands are refused, which is said by the answer only."""
    message = CutlassMsg.Gemm(request, given, **options)
    with pytest.raises(InvalidOperandError) as caught:
        _ = message.imported
    return str(caught.value)


def filled(dtype: Any, *shape: int, **options: Any) -> Any:
    return place(np.ones(shape, dtype), **options)


# ----------------------------------------------------------------------------------------------------------------------
# Kinds
# ----------------------------------------------------------------------------------------------------------------------


def test_messages_are_messages() -> None:
    refit = CutlassMsg.Refit(RefitMsg(REQUEST.plan_key(), b""))
    for message in (CutlassMsg.Gemm(REQUEST), CutlassMsg.GroupedGemm(GROUPED), CutlassMsg.Conv(CONV), refit):
        assert isinstance(message, CutlassMsg)
        assert repr(message).startswith(f"CutlassMsg.{type(message).__name__}(")
        assert copy.copy(message) is not message
    assert issubclass(CutlassMsg.Gemm, Compute)
    assert {"Gemm", "GroupedGemm", "Conv", "Matmul", "Refit"} <= set(dir(CutlassMsg))
    with pytest.raises(AttributeError, match="no attribute 'Sort'"):
        _ = CutlassMsg.Sort


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CutlassMsg.Gemm(CONV), "request is a ConvFwdRequest; expected a GemmRequest"),  # type: ignore[arg-type]
        (lambda: CutlassMsg.GroupedGemm(REQUEST), "expected a GroupedGemmRequest"),  # type: ignore[arg-type]
        (lambda: CutlassMsg.Conv(None), "request is None; expected a ConvFwdRequest or ConvDgradRequest"),  # type: ignore[arg-type]
        (lambda: CutlassMsg.Refit(b""), "msg is b''; expected a RefitMsg"),  # type: ignore[arg-type]
        (lambda: RefitMsg("key", b""), "plan_key is 'key'; expected a PlanKey"),  # type: ignore[arg-type]
    ],
)
def test_messages_of_the_wrong_kind_are_not_made(make: Any, says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        make()


# ----------------------------------------------------------------------------------------------------------------------
# Operands
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize("form", [dict, lambda given: tuple(given.values()), lambda given: list(given.values())])
def test_operands_are_a_mapping_or_a_tuple(beta: float, form: Any) -> None:
    request = GemmRequest(REQUEST.shape, dtype=D.F16, epilogue=GemmEpilogue(beta=beta))
    given = operands_of(request)
    launch = CutlassMsg.Gemm(request, form(given)).imported
    for name in ("a", "b", "c"):
        assert launch.arrays.get(name) is given.get(name)
    assert (launch.arrays["out"].shape, launch.device, launch.stream) == ((8, 16), 0, 0)
    assert launch.finished() is launch.arrays["out"]


def test_entries_of_none_are_none() -> None:
    given = operands_of(REQUEST)
    assert "c" not in CutlassMsg.Gemm(REQUEST, {**given, "c": None}).imported.arrays
    assert "c" not in CutlassMsg.Gemm(REQUEST, (given["a"], given["b"], None)).imported.arrays


def test_the_sender_chooses_out_and_stream(gpu: FakeGpu) -> None:
    out = filled(np.float16, 8, 16)
    launch = CutlassMsg.Gemm(REQUEST, operands_of(REQUEST), out=out, stream=77).imported
    assert (launch.arrays["out"], launch.finished(), launch.stream) == (out, out, 77)
    gpu.current.stream = 5
    message = CutlassMsg.Gemm(REQUEST, operands_of(REQUEST))
    gpu.current.stream = 6
    assert message.imported.stream == 5  # the one that was current where the message was made


def test_a_bound_operand_may_be_left_out() -> None:
    request = GemmRequest(REQUEST.shape, dtype=D.F16, binding="layer 0")
    a = operands_of(request)["a"]
    assert list(CutlassMsg.Gemm(request, {"a": a}).imported.arrays) == ["a", "out"]
    assert list(CutlassMsg.Gemm(request, (a,)).imported.arrays) == ["a", "out"]
    assert "operands has no b" in complaint({"a": a})


def test_operands_live_as_long_as_the_message() -> None:
    class Memory:
        pass

    owner = Memory()
    gone = weakref.ref(owner)
    view = place(np.ones((8, 32), np.float16))
    owned = type(view)(view.pointer, view.shape, view.strides, view.dtype, operands.CUDA, 0, False, [owner, view])
    message = CutlassMsg.Gemm(REQUEST, (owned, operands_of(REQUEST)["b"]))
    del owner, owned
    gc.collect()
    assert gone() is not None
    del message
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (object(), "operands is a object; expected a mapping of a, b and c, or a tuple"),
        ("ab", "operands is a str"),
        ((), "operands is a tuple"),
        ((1, 2, 3, 4), "operands is a tuple"),
        ({"x": 1}, "operands has 'x'; expected a, b and c"),
        ({"b": filled(np.float16, 32, 16)}, "operands has no a"),
        ((object(), object()), "a object is not an array"),
        ((np.ones((8, 32), np.float16), np.ones((32, 16), np.float16)), "a is in host memory"),
        ((filled(np.float32, 8, 32), filled(np.float16, 32, 16)), "a is f32; the request says f16"),
        ((filled(np.float16, 8, 32), filled(np.float16, 16, 32)), r"b has shape (16, 32); the request says (32, 16)"),
        ((filled(np.float16, 8, 32), filled(np.float16, 32, 16, columns=True)), "b has strides (1, 32); the request's"),
        ((filled(np.float16, 8, 32), filled(np.float16, 32, 16, device=1)), "a is on cuda:0 and b on cuda:1"),
        (
            (filled(np.float16, 8, 32), filled(np.float16, 32, 16), filled(np.float16, 8, 16)),
            "the request's beta is 0, so that it would not be read",
        ),
    ],
)
def test_what_is_wrong_with_operands_is_said_in_the_answer(given: Any, says: str) -> None:
    assert says in complaint(given)


def test_a_needed_c_is_missed() -> None:
    request = GemmRequest(REQUEST.shape, dtype=D.F16, epilogue=GemmEpilogue(beta=0.5))
    given = operands_of(request)
    del given["c"]
    assert "beta is 0.5, so operands needs c" in complaint(given, request)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (filled(np.float16, 16, 8), "out has shape (16, 8); the request says (8, 16)"),
        (filled(np.float32, 8, 16), "out is f32; the request says f16"),
        (filled(np.float16, 8, 16, columns=True), "out has strides"),
        (filled(np.float16, 8, 16, read_only=True), "out is read-only"),
        (filled(np.float16, 8, 16, device=1), "a is on cuda:0 and out on cuda:1"),
    ],
)
def test_out_is_what_the_request_says(out: Any, says: str) -> None:
    assert says in complaint(operands_of(REQUEST), out=out)


@pytest.mark.parametrize(("n", "strides"), [(16, (1, 8)), (8, (1, 8)), (1, (1, 0))])
def test_column_major_results_are_allocated_as_the_request_says(n: int, strides: tuple[int, int]) -> None:
    request = GemmRequest(GemmShape(8, n, 32), dtype=D.F16, layout_c=GemmLayout.COL_MAJOR)
    given = operands_of(request)
    launch = CutlassMsg.Gemm(request, given).imported
    assert (launch.arrays["out"].shape, launch.arrays["out"].strides) == ((8, n), strides)
    assert launch.finished().shape == (8, n)
    assert launch.finished().pointer == launch.arrays["out"].pointer
    out = filled(np.float16, 8, n, columns=True)
    assert CutlassMsg.Gemm(request, given, out=out).imported.arrays["out"] is out


def test_a_stream_is_a_stream() -> None:
    assert "stream is a str" in complaint(operands_of(REQUEST), stream="0")


def test_batches_are_outermost() -> None:
    request = GemmRequest(GemmShape(8, 16, 32, 3), dtype=D.F16, layout_b=GemmLayout.COL_MAJOR)
    given = operands_of(request)
    assert given["b"].strides == (512, 1, 32)
    assert CutlassMsg.Gemm(request, given).imported.arrays["out"].shape == (3, 8, 16)
    assert "b has strides" in complaint({**given, "b": place(fetch(given["b"]))}, request)


def test_strides_of_single_elements_say_nothing() -> None:
    request = GemmRequest(GemmShape(1, 16, 32), dtype=D.F16, layout_a=GemmLayout.COL_MAJOR)
    assert CutlassMsg.Gemm(request, operands_of(REQUEST) | {"a": filled(np.float16, 1, 32)}).imported.arrays[
        "a"
    ].shape == (1, 32)


def test_arrays_of_jax_are_read_only() -> None:
    given = operands_of(REQUEST)
    assert not CutlassMsg.Gemm(REQUEST, given).imported.arrays["a"].read_only
    kind = type("ArrayImpl", (Array,), {"__module__": "jaxlib._jax"})
    array = kind(fetch(given["a"]), device=(operands.CUDA, 0))
    launch = CutlassMsg.Gemm(REQUEST, given | {"a": array}).imported
    a = launch.arrays["a"]
    assert (a.read_only, a.pointer, a.shape) == (True, array.pointer, (8, 32))


def test_an_answer_may_be_had_twice() -> None:
    message = CutlassMsg.Gemm(REQUEST, object())
    for _ in range(2):
        with pytest.raises(CutlassError):
            _ = message.imported


# ----------------------------------------------------------------------------------------------------------------------
# Operands of other operations
# ----------------------------------------------------------------------------------------------------------------------


def refusal(message: Any) -> str:
    with pytest.raises(CutlassError) as caught:
        _ = message.imported
    return str(caught.value)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (CutlassMsg.Conv(CONV), ["x", "w", "out"]),
        (
            CutlassMsg.Conv(ConvWgradRequest(CONV.shape, dtype=D.F16, epilogue=GemmEpilogue(beta=1))),
            ["dy", "x", "c", "out"],
        ),
        (CutlassMsg.GroupedGemm(GROUPED), ["a[0]", "a[1]", "b[0]", "b[1]", "out[0]", "out[1]"]),
        (CutlassMsg.Gemm(SCALED), ["a", "b", "scale_a", "scale_b", "scale_d", "amax", "out"]),
        (CutlassMsg.GatedGemm(GATED), ["a", "b", "scale_a", "scale_b", "scale_d", "out"]),
        (CutlassMsg.Gemm(FUSED), ["a", "b", *(operand.name for operand in BLOCK.inputs), "positive", "sums", "out"]),
        (
            CutlassMsg.Gemm(GemmRequest(FUSED.shape, dtype=D.F16, epilogue=GemmEpilogue(beta=1.0, bias=True))),
            ["a", "b", "c", "bias", "out"],
        ),
    ],
)
def test_arrays_come_in_the_order_of_a_plans_call(message: Any, names: list[str]) -> None:
    given = operands_of(message.request)
    turned = dict(reversed(given.items()))
    for form in (turned, tuple(given.values())):
        launch = type(message)(message.request, form).imported
        assert list(launch.arrays) == names
        assert (launch.device, launch.stream) == (0, 0)


def test_results_of_convolutions_are_named_as_the_request_says() -> None:
    request = ConvFwdRequest(CONV.shape, dtype=D.F16, layout=ConvLayout.NCHW)
    given = operands_of(request)
    assert given["x"].shape == (1, 16, 8, 8)
    launch = CutlassMsg.Conv(request, given).imported
    assert launch.arrays["out"].shape == launch.finished().shape == (1, 32, 6, 6)
    assert launch.finished().strides[1:] == (1, 192, 32)  # channels last in memory
    out = type(given["x"])(
        launch.finished().pointer, (1, 32, 6, 6), (1152, 1, 192, 32), D.F16.dlpack, operands.CUDA, 0, False, launch
    )
    assert CutlassMsg.Conv(request, given, out=out).imported.finished() is out
    assert "x has shape (1, 8, 8, 16); the request says (1, 16, 8, 8)" in refusal(
        CutlassMsg.Conv(request, operands_of(CONV))
    )


def test_lists_are_lists_of_the_requests_groups() -> None:
    given = operands_of(GROUPED)
    launch = CutlassMsg.GroupedGemm(GROUPED, given).imported
    assert [array.shape for array in launch.finished()] == [(8, 8), (4, 8)]
    for wrong, says in (
        ({**given, "a": given["a"][0]}, "a is a Operand; expected a list, an array for each group"),
        ({**given, "a": given["a"][:1]}, "a has 1 arrays; the request has 2 groups"),
        ({**given, "a": given["a"][::-1]}, "a[0] has shape (4, 8); the request says (8, 8)"),
        ({**given, "c": given["a"]}, "the request's beta is 0, so that it would not be read"),
        ({"a": given["a"]}, "operands has no b"),
    ):
        assert says in refusal(CutlassMsg.GroupedGemm(GROUPED, wrong))
    assert "out has 1 arrays" in refusal(CutlassMsg.GroupedGemm(GROUPED, given, out=[given["a"][0]]))


def test_strides_of_arrays_without_elements_are_the_requests() -> None:
    request = GroupedGemmRequest(GroupedGemmShape([GemmShape(0, 8, 16), GemmShape(4, 8, 16)]), dtype=D.BF16)
    given = operands_of(request)
    a = given["a"][0]
    given["a"][0] = type(a)(a.pointer, a.shape, (0, 0), a.dtype, operands.CUDA, 0, False, a)  # as frameworks have them
    launch = CutlassMsg.GroupedGemm(request, given).imported
    assert launch.arrays["a[0]"].strides == (16, 1)  # what plans compare


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale_a": None}, "operands has no scale_a"),
        ({"amax": None}, "operands has no amax"),
        ({"scale_a": filled(np.float32, 16, 1)}, "scale_a has shape (16, 1); the request says (16, 2)"),
        ({"scale_b": filled(np.float16, 2, 1)}, "scale_b is f16; the request says f32"),
        ({"amax": filled(np.float32, 1, read_only=True)}, "amax is read-only: give an array that may be written"),
        ({"bias": filled(np.float32, 1)}, "operands has 'bias'; expected a, b, scale_a, scale_b, scale_d, amax and c"),
    ],
)
def test_what_is_wrong_with_scales_is_said_in_the_answer(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(CutlassMsg.Gemm(SCALED, {**operands_of(SCALED), **changes}))


def test_scales_that_the_request_has_not_are_refused() -> None:
    request = GemmRequest(SCALED.shape, dtype=D.F8E4M3, layout_b=GemmLayout.COL_MAJOR, quantized=True)
    given = {**operands_of(request), "scale_a": filled(np.float32, 1)}
    assert "operands has 'scale_a'; expected a, b, scale_d, amax and c" in refusal(CutlassMsg.Gemm(request, given))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias": None}, "operands has no bias"),
        ({"sums": None}, "operands has no sums"),
        ({"bias": filled(np.float32, 20)}, "bias is f32; the request says f16"),
        ({"bias": filled(np.float16, 1, 20)}, "bias has shape (1, 20); the request says (20,)"),
        ({"kept": filled(np.int8, 8, 3)}, "kept is no array of bytes (uint8), as which fp4, its e8m0 scales and masks"),
        ({"sums": filled(np.float32, 20, read_only=True)}, "sums is read-only: give an array that may be written"),
        ({"sums": filled(np.float32, 20, device=1)}, "a is on cuda:0 and sums on cuda:1"),
        ({"amax": filled(np.float32, 1)}, "operands has 'amax'; expected a, b, "),
        ({"c": filled(np.float16, 8, 20)}, "the request's beta is 0, so that it would not be read"),
    ],
)
def test_what_is_wrong_with_operands_of_trees_is_said_in_the_answer(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(CutlassMsg.Gemm(FUSED, {**operands_of(FUSED), **changes}))


def test_a_tree_may_call_an_operand_c() -> None:
    tree = EvtBuilder().add_matrix("c", D.F16).build()
    request = GemmRequest(REQUEST.shape, dtype=D.F16, epilogue=GemmEpilogue(tree=tree))
    given = operands_of(request)
    assert list(CutlassMsg.Gemm(request, given).imported.arrays) == ["a", "b", "c", "out"]
    assert refusal(CutlassMsg.Gemm(request, {**given, "c": None})) == "operands has no c"


@pytest.mark.parametrize(
    "request_", [REQUEST, FUSED, GATED, GROUPED, CONV], ids=["gemm", "fused", "gated", "grouped", "conv"]
)
def test_the_operand_that_a_binding_has_may_be_left_out(request_: Any) -> None:
    operation = operation_of(request_)
    kind = getattr(CutlassMsg, str(operation.message))
    given = operands_of(request_)
    labels = operation.bound_slot(request_).labels
    rest = {name: array for name, array in given.items() if name != operation.bound}
    named = dataclasses.replace(request_, binding="layer 1")
    sent = list(kind(named, given).imported.arrays)
    assert list(kind(named, rest).imported.arrays) == [label for label in sent if label not in labels]
    says = f"operands has no {operation.bound}: it may be left out once a request's binding has it"
    assert refusal(kind(request_, rest)) == says


# ----------------------------------------------------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------------------------------------------------

WEIGHTS = np.arange(32 * 16).reshape(32, 16).astype(np.float16)


def write(message: RefitMsg, target: Any) -> None:
    (values,) = message.imported
    values.check(target, "b")
    values.copy_to(target)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda raw: np.frombuffer(raw, np.uint8)])
def test_bytes_in_the_operands_own_order(kind: Any) -> None:
    target = filled(np.float16, 32, 16, columns=True)
    message = RefitMsg(REQUEST.plan_key(), kind(np.ascontiguousarray(WEIGHTS.T).tobytes()))
    (staged,) = message.imported
    assert staged.stream == 0
    write(message, target)
    np.testing.assert_array_equal(fetch(target), WEIGHTS)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("host", [WEIGHTS, np.asfortranarray(WEIGHTS), np.repeat(WEIGHTS, 2, 1)[:, ::2]])
def test_host_arrays_of_any_strides(host: Any, columns: bool) -> None:
    target = filled(np.float16, 32, 16, columns=columns)
    write(RefitMsg(REQUEST.plan_key(), host), target)
    np.testing.assert_array_equal(fetch(target), WEIGHTS)


def test_arrays_of_the_gpu_are_copied_on_their_stream(gpu: FakeGpu) -> None:
    target, source = filled(np.float16, 32, 16), place(WEIGHTS)
    gpu.current.stream = 9
    write(RefitMsg(REQUEST.plan_key(), source), target)
    write(RefitMsg(REQUEST.plan_key(), source, stream=4), target)
    np.testing.assert_array_equal(fetch(target), WEIGHTS)
    assert [(copy[2], copy[4]) for copy in gpu.copies] == [(1024, 9), (1024, 4)]


def test_the_operand_itself_needs_no_copy(gpu: FakeGpu) -> None:
    target = place(WEIGHTS)
    write(RefitMsg(REQUEST.plan_key(), target), target)
    assert gpu.copies == []


def _overlapping(target: Any) -> Any:
    return type(target)(target.pointer + 64, target.shape, target.strides, target.dtype, operands.CUDA, 0)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (b"123", "weights has 3 bytes; the bound operand b has 1024: (32, 16) of f16"),
        (b"", "weights has 0 bytes"),
        (WEIGHTS.astype(np.float32), "weights is f32; the bound operand is f16"),
        (WEIGHTS.T, "weights has shape (16, 32); the bound operand has (32, 16)"),
        (WEIGHTS.view(np.int16), "no kernel knows elements of type int16"),
        (memoryview(bytes(2048))[::2], "weights are bytes that do not lie together"),
        (place(WEIGHTS.astype(np.float32)), "weights is f32"),
        (place(WEIGHTS, columns=True), "on the GPU bytes are copied as they lie"),
        (place(WEIGHTS, device=1), "weights is on device 1"),
        (_overlapping, "weights overlaps the bound operand"),
        (None, "a NoneType is not an array"),
    ],
)
def test_weights_that_are_not_the_operands_are_refused(gpu: FakeGpu, weights: Any, says: str) -> None:
    target = fake_gpu.place(WEIGHTS)
    message = RefitMsg(REQUEST.plan_key(), weights(target) if weights is _overlapping else weights)
    with pytest.raises(InvalidOperandError) as caught:
        write(message, target)
    assert says in str(caught.value)
    assert gpu.copies == []
    np.testing.assert_array_equal(fetch(target), WEIGHTS)
