"""Cases that `test_conv_fused.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import request_calls
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.epilogue import validate
from atomr_cutlass.generator.families.conv_sm90 import conv_sm90
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.conv2d import function as conv_module
from atomr_cutlass.ops.conv2d import kernels as conv_plan
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP
from atomr_cutlass.pipeline import devices, probe, select, verify
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.operation import operation_of
from fused_cases import BLOCK, keys_of

TF32 = ac.CutlassDtype.TF32
SHAPE = ac.ConvShape.nhwc(2, 5, 6, 8, 12, 3, 3, padding=1)
BIASED = ac.GemmEpilogue(beta=2.0, bias=True, activation="relu")
KINDS = (ac.ConvFwdRequest, ac.ConvDgradRequest)

KEYS = [
    *(
        key
        for op in (FPROP, DGRAD)
        for key in keys_of([conv_sm90(op, ac.CutlassDtype.F32, ac.CutlassDtype.F32, (128, 128))])
    ),
    *keys_of(
        list(
            {
                key.layout_a + key.layout_b: key
                for key in expand("full", [ac.SmArch.SM90A])
                if (key.op, key.generation, key.math, key.d, key.align_a, key.align_d)
                == ("gemm", "sm80", "tf32", ac.CutlassDtype.F32, 4, 4)
            }.values()
        )
    ),
]
"""Of convolutions with trees, and for filters of one tap of GEMMs with them."""

random = np.random.default_rng(12)

Array = np.ndarray[Any, Any]


def operand(array: Array) -> _core.Operand:
    """The array in the fake GPU's memory."""
    element = operands.BYTE if array.dtype == np.uint8 else (2, 32)
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.Operand(array.ctypes.data, array.shape, strides, element, operands.CUDA, 0, False, array)


def arrays_of(request: Any) -> dict[str, Array]:
    """Small whole numbers for what a plan reads, garbage for what it writes; channels last in memory."""
    made = {}
    for slot in operation_of(request).operands(request):
        (spec,) = slot.specs
        order = sorted(range(len(spec.shape)), key=lambda i, spec=spec: -spec.strides[i])  # type: ignore[misc]
        kind = np.uint8 if slot.element else np.float32
        memory = np.zeros(16 + np.prod(spec.shape), kind)
        start = -memory.ctypes.data % 16 // memory.itemsize
        array = memory[start : start + int(np.prod(spec.shape))].reshape([spec.shape[i] for i in order])
        array[...] = 0x5A if slot.written else random.integers(-3, 4, array.shape)
        made[slot.name] = array.transpose(np.argsort(order))
    return made


def nhwc(request: Any, array: Array) -> Array:
    """As NHWC names the dimensions."""
    return array.transpose(0, 2, 3, 1) if request.layout is ac.ConvLayout.NCHW and array.ndim == 4 else array


def wanted(request: Any, given: dict[str, Array], alpha: float, beta: float) -> dict[str, Array]:
    """The outputs of the request's tree, in the order of NHWC."""
    product = dataclasses.replace(request, epilogue=ac.GemmEpilogue(alpha))
    read = [slot.name for slot in operation_of(product).operands(product)[:-1]]
    acc = nhwc(request, request_calls.results_of(product, {name: given[name] for name in read})["out"])
    if beta != 0:
        acc = acc + beta * nhwc(request, given["c"])
    x = np.maximum(acc + given["bias"], 0)
    if request.epilogue.tree is None:
        return {"out": x}
    made = {"bits": np.packbits(x != 0, axis=-1, bitorder="little"), "sums": x.sum((0, 1, 2))}
    return made | {"out": x + nhwc(request, given["residual"])}


def assert_written(request: Any, given: dict[str, Array], values: dict[str, Array]) -> None:
    for name, value in values.items():
        np.testing.assert_array_equal(nhwc(request, given[name]), value, err_msg=name)


def requests(shape: ac.ConvShape = SHAPE) -> list[Any]:
    return [
        kind(shape, dtype=TF32, layout=layout, epilogue=epilogue)
        for kind in KINDS
        for layout in ac.ConvLayout
        for epilogue in (ac.GemmEpilogue(tree=BLOCK), ac.GemmEpilogue(tree=BLOCK, beta=-1.0), BIASED)
    ]


def case_plans_take_their_operands_in_order() -> None:
    for request in requests():
        made, given, beta = ac.plan(request), arrays_of(request), request.epilogue.beta
        assert isinstance(made, ac.Plan)
        assert (made.key, made.origin, made.slots) == (request.plan_key(), "pack fake", ["a", "b", *list(given)[2:]])
        # Without C, the matrix like the result comes by its way.
        assert ("source" in made.main.key.epilogue) == (beta == 0)
        assert ac.explain(request).kernel == made.kernel_name
        for alpha in (1.0, 3.0):
            made(*map(operand, given.values()), alpha=alpha, beta=beta)
            assert_written(request, given, wanted(request, given, alpha, beta))


def case_filters_of_one_tap_are_products() -> None:
    for request in requests(ac.ConvShape.nhwc(2, 5, 6, 8, 12, 1, 1)):
        problem, beta, layout = request.problem(0), request.epilogue.beta, request.layout.value
        ranked = select.rank(ConvSearch(problem, devices.get(0)))
        products = [candidate for candidate in ranked if candidate.formulation.product is not None]
        assert {product.key.op for product in products} == {"gemm"}
        assert {product.formulation.product.swapped for product in products} == {False}
        for candidate in (ranked[0], products[0]):
            validate._known.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(validate.files, "recall_validation", lambda _identity: None)
                epilogue = candidate.formulation.product or candidate.formulation
                assert validate.require(
                    candidate, epilogue.problem.epilogue, devices.get(0), stream=None, in_background=False
                )
            assert list(validate._known.values()) == [""]
            made = conv_plan.make(problem, candidate=candidate, layout=layout)
            given = arrays_of(request)
            assert made.slots == ["a", "b", *list(given)[2:]]
            made(*map(operand, given.values()), alpha=3.0, beta=beta)
            assert_written(request, given, wanted(request, given, 3.0, beta))
        assert made.rewrite == "a filter of one tap: a GEMM"


def case_common_kernels_are_told_their_tree() -> None:
    f32 = ac.CutlassDtype.F32
    whole = ac.EvtBuilder().add_bias("bias", dtype=f32).add_matrix("rest", dtype=f32).activation("relu").build()
    for kind, layout, (epilogue, activation) in itertools.product(
        KINDS,
        ac.ConvLayout,
        (
            (ac.GemmEpilogue(), None),
            (ac.GemmEpilogue(beta=-1.0), None),
            (ac.GemmEpilogue(activation="relu"), "relu"),
            (ac.GemmEpilogue(bias=True), None),
            (ac.GemmEpilogue(tree=whole), "relu"),
        ),
    ):
        request = kind(SHAPE, dtype=TF32, layout=layout, epilogue=epilogue)
        made, given = ac.plan(request), arrays_of(request)
        assert made.main.key.epilogue == "common"
        made(*map(operand, given.values()), alpha=2.0, beta=epilogue.beta)
        plain = {**given, "bias": given.get("bias", np.zeros(1)) + nhwc(request, given.get("rest", np.zeros(1)))}
        summed = dataclasses.replace(request, epilogue=dataclasses.replace(BIASED, beta=epilogue.beta))
        if activation is None:
            # Values below 0 too: by the negated operand.
            less = wanted(summed, _negated(plain), 2.0, epilogue.beta)["out"]
            assert_written(request, given, {"out": wanted(summed, plain, 2.0, epilogue.beta)["out"] - less})
        else:
            assert_written(request, given, wanted(summed, plain, 2.0, epilogue.beta))


def _negated(given: dict[str, Array]) -> dict[str, Array]:
    return {name: array if name == next(iter(given)) else -array for name, array in given.items()}


def case_epilogues_are_validated() -> None:
    for request in requests():
        validate._known.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(validate.files, "recall_validation", lambda _identity: None)
            ac.plan(request)
        assert list(validate._known.values()) == [""]


def case_a_wrong_kernel_is_refused() -> None:
    validate._known.clear()
    written = probe._written

    def spoilt(*given: Any) -> dict[str, Array]:
        got = written(*given)
        got["out"][0, 3, 3, 5] += 1.0
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate.files, "recall_validation", lambda _identity: None)
        patch.setattr(validate.files, "remember_validation", lambda *_: None)
        patch.setattr(probe, "_written", spoilt)
        with pytest.warns(RuntimeWarning, match="wrong"), pytest.raises(ac.UnsupportedError, match="wrongly"):
            ac.plan(requests()[0])
    validate._known.clear()


def host(view: _core.Operand) -> _core.Operand:
    return _core.Operand(view.pointer, view.shape, view.strides, view.dtype, operands.CPU, 0, False, view)


def called(request: Any, given: dict[str, Any], **how: Any) -> Any:
    """The call of a request's arrays, whose epilogue is a function where the request has a tree."""
    function = {} if request.epilogue.tree is None else {"epilogue": BLOCK}
    return request_calls.call(request, given, **function, **how)


def case_calls_take_kept_plans() -> None:
    made = []
    make = conv_module.make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_module, "make", lambda *given, **options: made.append(0) or make(*given, **options))
        kept_plans.clear()
        for request in requests():
            for alpha in (1.0, 2.0):
                given = arrays_of(request)
                views = {name: operand(array) for name, array in given.items()}
                results = called(request, views, alpha=alpha, stream=0)
                assert (results["out"] if isinstance(results, dict) else results) is views["out"]
                assert_written(request, given, wanted(request, given, alpha, request.epilogue.beta))
    assert (len(made), len(kept_plans)) == (12, 12)


def case_operands_elsewhere_have_plans_of_their_own() -> None:
    """Pixels further apart are another matrix: it is not what C's way reads."""
    request = requests()[0]
    given = arrays_of(request)
    wide = np.zeros((2, 5, 6, 16), np.float32)
    wide[..., :12] = given["residual"]
    given["residual"] = wide[..., :12]
    results = called(request, {name: operand(array) for name, array in given.items()}, stream=0)
    assert set(results) == {"out", "bits", "sums"}
    assert_written(request, given, wanted(request, given, 1.0, 0.0))


def case_a_bias_with_gaps_is_read_by_a_tree() -> None:
    for request in (made for made in requests() if made.epilogue is BIASED):
        given = arrays_of(request)
        wide = np.zeros((given["bias"].size, 2), np.float32)
        wide[:, 0] = given["bias"]
        given["bias"] = wide[:, 0]
        called(request, {name: operand(array) for name, array in given.items()}, stream=0)
        assert_written(request, given, wanted(request, given, 1.0, 2.0))
    grouped = [operand(np.zeros(shape, np.float32)) for shape in ((1, 3, 3, 8), (8, 3, 3, 4))]
    for bias, says in ((wide[:8, 0], "bias has stride 2"), (wide[:4].reshape(8).view(np.int32), "bias is i32")):
        view = operand(bias) if bias.dtype == np.float32 else _core.Operand(bias.ctypes.data, (8,), None, (0, 32), 2, 0)
        with pytest.raises(ac.UnsupportedError, match=f"{says}, and kernels without trees"):
            ac.conv2d(*grouped, groups=2, bias=view, precision="tf32")


def case_host_arrays() -> None:
    for request in requests():
        given = arrays_of(request)
        values = wanted(request, given, 1.0, request.epilogue.beta)
        read = {name: array for name, array in given.items() if name not in values}
        results = called(request, read)
        results = results if isinstance(results, dict) else {"out": results}
        assert_written(request, results, values)
        assert called(request, read | {"out": given["out"]}) is given["out"] or isinstance(results, dict)
        assert_written(request, given, {"out": values["out"]})


def case_runs_and_actors() -> None:
    actor = ac.CutlassActor(16)
    for request in requests():
        result = verify.run(request)
        assert (result.backend, result.ok, result.launches > 0) == ("prebuilt", True, True), result
        given = arrays_of(request)
        out = operand(given["out"])
        sent = {name: operand(array) for name, array in given.items() if name != "out"}
        message = ac.CutlassMsg.Conv(request, sent, out=out)
        assert actor.handle(message) is out
        assert_written(request, given, wanted(request, given, 1.0, request.epilogue.beta))


def case_what_no_kernel_serves() -> None:
    grouped = dataclasses.replace(requests()[0], shape=dataclasses.replace(SHAPE, groups=2))
    with pytest.raises(ac.UnsupportedError, match=re.escape("sm_90a's TMA kernels")):
        ac.plan(grouped)
    other = dataclasses.replace(
        requests()[0], epilogue=ac.GemmEpilogue(tree=ac.EvtBuilder().activation("hardswish").build())
    )
    with pytest.raises(ac.KernelNotFoundError, match="it is in no preset: record a run that compiles it"):
        ac.plan(other)


if __name__ == "__main__":
    fake_cases.run(globals())
