"""Requests of every operation on the GPU: tried against the reference, explained, and sent to an actor.

A request whose kernel is not built in is skipped, but for ATOMR_CUTLASS_TEST_JIT.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.pipeline import verify
from atomr_cutlass.pipeline.operation import operation_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

COLUMN = ac.GemmLayout.COL_MAJOR
SHAPE = ac.ConvShape.nhwc(3, 15, 14, 32, 64, 3, 3, padding=1)
GROUPS = ac.GroupedGemmShape([ac.GemmShape(m, 128, 256) for m in (40, 0, 136, 1)])
FP8 = ac.GemmRequest(ac.GemmShape(136, 256, 384), dtype=D.F8E4M3, layout_b=COLUMN)
FPROP = ac.ConvFwdRequest(SHAPE, dtype=D.BF16)
GROUPED = ac.GroupedGemmRequest(GROUPS, dtype=D.BF16)
BIASED = ac.GemmRequest(
    ac.GemmShape(136, 264, 384), dtype=D.BF16, layout_b=COLUMN, epilogue=ac.GemmEpilogue(bias=True, activation="gelu")
)
TREE = (
    ac.EvtBuilder()
    .add_bias("bias", dtype=D.BF16)
    .aux_load("kept", kind="mask")
    .binary("multiply", "kept")
    .mask_store("positive")
    .aux_store("before", dtype=D.F32)
    .activation("relu")
    .add_matrix("residual", dtype=D.BF16)
    .reduce("tops", "column", "amax")
    .build()
)
REQUESTS: dict[str, Any] = {
    "fprop": FPROP,
    "fprop, nchw": replace(FPROP, layout=ac.ConvLayout.NCHW, epilogue=ac.GemmEpilogue(2.0, -1.0)),
    "fprop, bias": replace(FPROP, epilogue=ac.GemmEpilogue(bias=True, activation="relu")),
    "fprop, groups": replace(FPROP, shape=ac.ConvShape.nhwc(3, 15, 14, 32, 64, 3, 3, stride=2, groups=4)),
    "fprop, fp8": replace(FPROP, dtype=D.F8E4M3),
    "dgrad": ac.ConvDgradRequest(SHAPE, dtype=D.BF16),
    "dgrad, strided": ac.ConvDgradRequest(ac.ConvShape.nhwc(3, 15, 14, 32, 64, 3, 3, stride=2), dtype=D.F16),
    "dgrad, fp8": ac.ConvDgradRequest(SHAPE, dtype=D.F8E5M2),
    "wgrad": ac.ConvWgradRequest(SHAPE, dtype=D.BF16),
    "wgrad, slices": ac.ConvWgradRequest(ac.ConvShape.nhwc(8, 56, 56, 32, 32, 3, 3, padding=1), dtype=D.F16),
    "wgrad, tf32": ac.ConvWgradRequest(SHAPE, dtype=D.TF32),
    "grouped": GROUPED,
    "grouped, c": replace(GROUPED, epilogue=ac.GemmEpilogue(2.0, 3.0)),
    "grouped, fp8": replace(GROUPED, dtype=D.F8E4M3, layout_b=COLUMN),
    "fp8": FP8,
    "fp8, tensors": replace(FP8, scaling="tensor", quantized=True, out_dtype=D.F8E4M3),
    "fp8, vectors": replace(FP8, scaling="vector"),
    "fp8, blocks": replace(FP8, scaling="block"),
    "bias": BIASED,
    "bias, c, batches": replace(
        BIASED, shape=ac.GemmShape(136, 264, 128, 3), epilogue=ac.GemmEpilogue(2, -1, bias=True)
    ),
    "bias, i8": replace(BIASED, dtype=D.I8),
    "bias, fp8, vectors": replace(FP8, scaling="vector", epilogue=BIASED.epilogue),
    "tree": replace(BIASED, epilogue=ac.GemmEpilogue(tree=TREE)),
    "tree, c, batches": replace(
        BIASED, shape=ac.GemmShape(72, 136, 128, 2), epilogue=ac.GemmEpilogue(beta=1.0, tree=TREE)
    ),
}


@pytest.fixture(params=REQUESTS)
def request_(request: pytest.FixtureRequest) -> Any:
    """A request that a kernel at hand serves."""
    found = REQUESTS[request.param]
    try:
        ac.plan(found)
    except (ac.KernelNotFoundError, ac.UnsupportedError) as error:
        pytest.skip(str(error))
    return found


def test_a_request_is_tried(request_: Any) -> None:
    tried = verify.run(request_)
    assert tried.ok, tried
    assert tried.launches > 0
    made = ac.plan(request_)
    assert tried.rewrite == getattr(made, "rewrite", "")


def test_what_is_explained_is_what_is_planned(request_: Any) -> None:
    made, told = ac.plan(request_), ac.explain(request_)
    assert (told.kernel, told.source) == (made.kernel_name, made.origin)
    rewrite = getattr(made, "rewrite", "")
    assert (f"a rewrite: {rewrite}" in told.notes) == bool(rewrite)


def arrays_of(request: Any, seed: int = 5) -> tuple[dict[str, list[Any]], list[Any]]:
    """(random operands by name, arrays for the results) of a request."""
    import torch

    kinds = {
        D.F32: torch.float32, D.F16: torch.float16, D.BF16: torch.bfloat16, D.F8E4M3: torch.float8_e4m3fn,
        D.F8E5M2: torch.float8_e5m2, D.I8: torch.int8,
    }  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(seed)

    def array(spec: Any, element: Any = None) -> Any:
        if element is not None:
            made = torch.empty_strided(spec.shape, spec.strides, device="cuda", dtype=torch.uint8)
            return made.copy_(torch.randint(0, 256, spec.shape, device="cuda", generator=generator, dtype=torch.uint8))
        made = torch.empty_strided(spec.shape, spec.strides, device="cuda", dtype=torch.float32)
        made.copy_(torch.rand(spec.shape, device="cuda", generator=generator) + 0.5)
        return made.to(kinds[spec.dtype])

    *slots, result = operation_of(request).operands(request)
    given = {slot.name: [array(spec, slot.element) for spec in slot.specs] for slot in slots}
    return given, [array(spec) for spec in result.specs]


def launch(made: Any, given: dict[str, list[Any]], out: list[Any]) -> None:
    """Launches a plan, or a bound one with the rest of its operands."""
    operands = [array for arrays in given.values() for array in arrays]
    if len(out) == 1:  # C comes before the result where there is one
        made(*operands, out=out[0])
    else:
        made(*operands, *out)


def test_a_bound_plan_computes_what_a_plan_does(request_: Any) -> None:
    """Bit by bit, after a refit with other values than those that it was bound with."""
    import torch

    operation = operation_of(request_)
    given, out = arrays_of(request_)
    launch(ac.plan(request_), given, out)
    want = [array.clone() for array in out]
    other = arrays_of(request_, seed=6)[0][operation.bound]
    listed = operation.bound_slot(request_).listed
    bound = ac.plan(request_, b=other if listed else other[0])
    bound.refit(given[operation.bound] if listed else given[operation.bound][0])
    for array in out:
        array.fill_(0)
    launch(bound, {name: arrays for name, arrays in given.items() if name != operation.bound}, out)
    for got, right in zip(out, want, strict=True):
        assert torch.equal(got.float(), right.float())


def test_an_actor_computes_what_a_plan_does(request_: Any) -> None:
    """Bit by bit, into memory of the sender's and into new arrays; amax too."""
    import torch

    *slots, result = operation_of(request_).operands(request_)
    given, out = arrays_of(request_)
    written = [given[slot.name][0] for slot in slots if slot.written]
    made = ac.plan(request_)
    launch(made, given, out)
    kept = [array.clone() for array in written]
    message = getattr(ac.CutlassMsg, str(operation_of(request_).message))
    sent = {slot.name: given[slot.name] if slot.listed else given[slot.name][0] for slot in slots}
    actor = ac.CutlassActor(4)
    for target in (None, [torch.full_like(array.float(), torch.nan).to(array.dtype) for array in out]):
        where = target if target is None or result.listed else target[0]
        for array in written:
            array.fill_(0x5A if array.dtype is torch.uint8 else torch.nan)
        answer = actor.handle(message(request_, sent, out=where))
        answers = answer if result.listed else [answer]
        for got, want in zip(answers, out, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert torch.equal(got.float(), want.float())
        for array, then in zip(written, kept, strict=True):
            assert torch.equal(array, then)
    assert len(actor.plan_cache) == 1
