"""Cases that `test_fused.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.epilogue import EpilogueVisitorTree, EvtBuilder, validate
from atomr_cutlass.epilogue.results import MatrixResult
from atomr_cutlass.generator.epilogue.common import bias_and_activation, quantize
from atomr_cutlass.generator.epilogue.lower import COMMON, LINEAR, SCALED_COMMON, epilogue_id, swapped, with_source
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import with_epilogue
from atomr_cutlass.ops.gemm import function as gemm_function
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import probe, verify
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.operation import operation_of

TF32 = ac.CutlassDtype.TF32
ROWS, COLUMNS = ac.GemmLayout
SHAPE = ac.GemmShape(12, 20, 8)
BIASED = ac.GemmEpilogue(bias=True, activation="relu")
BLOCK = (
    EvtBuilder()
    .add_bias("bias", dtype=D.F32)
    .activation("relu")
    .mask_store("bits")
    .reduce("sums", "row")
    .add_matrix("residual", dtype=D.F32)
    .build()
)
"""relu(acc + bias) + residual, with where the former is not 0, and its sums."""


def keys_of(cells: Sequence[KernelKey]) -> list[KernelKey]:
    """The cells with the trees of bias and relu and of `BLOCK`, and told which of several."""
    biased = bias_and_activation(D.F32, "relu").program
    residual = [operand.name for operand in BLOCK.inputs].index("residual")
    programs = (biased, swapped(biased), BLOCK.program, with_source(BLOCK.program, residual))
    epilogues = [*(epilogue_id(LINEAR, program) for program in programs), COMMON, SCALED_COMMON, quantize()]
    return [with_epilogue(cell, epilogue, D.F32) for cell in cells for epilogue in epilogues]


def tree_named(**names: str) -> EpilogueVisitorTree:
    """The block with other names for its operands: the same kernels serve it."""
    own = [operand.name for operand in (*BLOCK.inputs, *BLOCK.outputs)]
    return EpilogueVisitorTree.parse(BLOCK.program, [names.get(name, name) for name in own])


random = np.random.default_rng(11)

Array = np.ndarray[Any, Any]


def refused(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
    """Asserts that a call raises, and says why."""
    with pytest.raises(error, match=re.escape(says)):
        call()


def laid_out(shape: tuple[int, ...], strides: tuple[int, ...], kind: Any, *, offset: int = 0) -> Array:
    """Memory of its own, 16-byte aligned but for `offset` elements, that lies as the strides say."""
    item = np.dtype(kind).itemsize
    size = (
        sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    )
    memory = np.zeros(size * item + 64, np.uint8)
    start = -memory.ctypes.data % 16 + offset * item
    return np.ndarray(shape, kind, memory, start, [stride * item for stride in strides])


def operand(array: Array) -> _core.Operand:
    """The array in the fake GPU's memory."""
    element = operands.BYTE if array.dtype == np.uint8 else (2, 32)
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.Operand(array.ctypes.data, array.shape, strides, element, operands.CUDA, 0, False, array)


def arrays_of(request: ac.GemmRequest) -> dict[str, Array]:
    """Small whole numbers for what a plan reads, and garbage for what it writes."""
    made = {}
    for slot in operation_of(request).operands(request):
        (spec,) = slot.specs
        array = laid_out(spec.shape, spec.strides, np.uint8 if slot.element else np.float32)
        array[...] = 0x5A if slot.written else random.integers(-4, 5, spec.shape)
        made[slot.name] = array
    return made


def block(given: dict[str, Array], alpha: float = 1.0, beta: float = 0.0) -> dict[str, Array]:
    """The results of `BLOCK`."""
    acc = alpha * (given["a"].astype(np.float64) @ given["b"]) + (beta * given["c"] if beta else 0)
    x = np.maximum(acc + given["bias"], 0)
    return {
        "out": x + given["residual"],
        "bits": np.packbits(x != 0, axis=-1, bitorder="little"),
        "sums": x.sum(axis=-2),
    }


def assert_written(given: dict[str, Array], wanted: dict[str, Array]) -> None:
    for name, values in wanted.items():
        np.testing.assert_array_equal(given[name], values, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# Plans
# ----------------------------------------------------------------------------------------------------------------------


def case_plans_add_the_bias_and_apply_the_activation() -> None:
    for layouts in itertools.product((ROWS, COLUMNS), repeat=3):
        for batch, beta in itertools.product((1, 3), (0.0, 2.0)):
            request = ac.GemmRequest(
                dataclasses.replace(SHAPE, batch=batch), dtype=TF32, layout_a=layouts[0], layout_b=layouts[1],
                layout_c=layouts[2], epilogue=dataclasses.replace(BIASED, alpha=0.5, beta=beta),
            )  # fmt: skip
            made, given = ac.plan(request), arrays_of(request)
            assert isinstance(made, ac.Plan)
            assert (made.key, made.origin, made.request) == (request.plan_key(), "pack fake", request)
            assert ac.explain(request).kernel == made.kernel_name
            for _ in range(2):
                made(*map(operand, given.values()))
            acc = 0.5 * (given["a"] @ given["b"]) + (beta * given["c"] if beta else 0)
            assert_written(given, {"out": np.maximum(acc + given["bias"], 0)})


def case_plans_of_trees_take_their_operands_in_order() -> None:
    for batch, beta in itertools.product((1, 2), (0.0, -1.0)):
        request = ac.GemmRequest(
            dataclasses.replace(SHAPE, batch=batch), dtype=TF32, epilogue=ac.GemmEpilogue(beta=beta, tree=BLOCK)
        )
        made, given = ac.plan(request), arrays_of(request)
        # Without C, the matrix like D comes by its way.
        assert ("source" in made.main.key.epilogue) == (beta == 0)
        for alpha in (1.0, 3.0):
            made(*map(operand, given.values()), alpha=alpha, beta=beta)
            assert_written(given, block(given, alpha, beta))


def case_common_kernels_are_told_their_tree() -> None:
    f32 = ac.CutlassDtype.F32
    relu = ac.EvtBuilder().activation("relu").build()
    biased = ac.EvtBuilder().add_bias("row", dtype=f32).build()
    whole = ac.EvtBuilder().add_bias("row", dtype=f32).add_matrix("rest", dtype=f32).activation("relu").build()
    for tree, batch, beta in itertools.product((relu, biased, whole), (1, 3), (0.0, -1.0)):
        if tree is whole and beta:
            continue  # C cannot come beside the matrix
        request = ac.GemmRequest(
            dataclasses.replace(SHAPE, batch=batch), dtype=TF32, epilogue=ac.GemmEpilogue(beta=beta, tree=tree)
        )
        made, given = ac.plan(request), arrays_of(request)
        assert made.main.key.epilogue == "common"
        made(*map(operand, given.values()), alpha=2.0, beta=beta)
        acc = 2.0 * (given["a"] @ given["b"]) + (beta * given["c"] if beta else 0)
        acc = acc + given.get("row", 0) + given.get("rest", 0)
        assert_written(given, {"out": acc if tree is biased else np.maximum(acc, 0)})
    # A row is a column of D^T.
    columns = ac.GemmRequest(SHAPE, dtype=TF32, layout_c=COLUMNS, epilogue=ac.GemmEpilogue(tree=relu))
    assert ac.plan(columns).main.key.epilogue == "common"
    turned = dataclasses.replace(columns, epilogue=ac.GemmEpilogue(tree=biased))
    refused(ac.KernelNotFoundError, "in no preset", lambda: ac.plan(turned))


def case_factors_are_loaded_as_scales() -> None:
    def made_of(*, biased: bool = True) -> EvtBuilder:
        made = EvtBuilder().binary("multiply", "rows", "column").binary("multiply", "columns", "row")
        return made.add_bias("bias", dtype=D.F32).activation("relu") if biased else made

    quantized = made_of().reduce("largest", "scalar", "amax").binary("multiply", "factor", "scalar").build()
    for tree, batch, beta in itertools.product((made_of(biased=False).build(), quantized), (1, 3), (0.0, -1.0)):
        request = ac.GemmRequest(
            dataclasses.replace(SHAPE, batch=batch), dtype=TF32, epilogue=ac.GemmEpilogue(beta=beta, tree=tree)
        )
        if beta:  # which comes before the factors, and in a kernel behind the scales
            refused(ac.KernelNotFoundError, "in no preset", lambda request=request: ac.plan(request))
            continue
        made, given = ac.plan(request), arrays_of(request)
        assert made.main.key.epilogue == "scaled_common"
        for alpha in (1.0, 2.0):
            made(*map(operand, given.values()), alpha=alpha)
            x = alpha * (given["a"] @ given["b"]) * given["rows"] * given["columns"]
            if tree is quantized:
                x = np.maximum(x + given["bias"], 0)
                assert_written(given, {"out": x * given["factor"], "largest": np.abs(x).max().reshape(1)})
            else:
                assert_written(given, {"out": x})
    # A matrix is added behind the factors, as C.
    tree = made_of().add_matrix("rest", dtype=D.F32).build()
    request = ac.GemmRequest(SHAPE, dtype=TF32, epilogue=ac.GemmEpilogue(tree=tree))
    refused(ac.KernelNotFoundError, "in no preset", lambda: ac.plan(request))  # behind relu
    tree = made_of(biased=False).add_matrix("rest", dtype=D.F32).build()
    request = ac.GemmRequest(SHAPE, dtype=TF32, epilogue=ac.GemmEpilogue(tree=tree))
    made, given = ac.plan(request), arrays_of(request)
    made(*map(operand, given.values()))
    product = (given["a"] @ given["b"]) * given["rows"] * given["columns"]
    assert_written(given, {"out": product + given["rest"]})
    # Scales have no strides.
    columns = laid_out((20,), (2,), np.float32)
    tree = EvtBuilder().binary("multiply", "columns", "row").build()
    a, b, d = (MatrixSpec(shape, (shape[1], 1), D.F32) for shape in ((12, 8), (8, 20), (12, 20)))
    problem = GemmProblem(a, b, None, d, "tf32", 0)
    fusion = MatrixResult(d.shape).fusion(tree, {"columns": operand(columns)})
    refused(ac.KernelNotFoundError, "in no preset", lambda: plans.make(problem, fusion=fusion, backend="prebuilt"))


def case_what_nobody_reads_is_reduced_beside_a_result() -> None:
    tree = EvtBuilder().binary("multiply", "factor", "scalar").build()
    request = ac.GemmRequest(
        dataclasses.replace(SHAPE, batch=2), dtype=TF32, epilogue=ac.GemmEpilogue(beta=1.0, tree=tree)
    )
    made, given = ac.plan(request), arrays_of(request)
    assert made.main.key.epilogue == quantize()
    for _ in range(2):
        made(*map(operand, given.values()), beta=1.0)
        assert_written(given, {"out": (given["a"] @ given["b"] + given["c"]) * given["factor"]})


def case_a_matrix_by_the_way_of_c_must_be_aligned_as_c() -> None:
    request = ac.GemmRequest(SHAPE, dtype=TF32, epilogue=ac.GemmEpilogue(tree=BLOCK))
    made, given = ac.plan(request), arrays_of(request)
    assert made.main.key.align_d == 4
    off = laid_out((12, 20), (20, 1), np.float32, offset=1)
    with pytest.raises(ac.InvalidOperandError, match="residual"):
        made(*(operand(off if name == "residual" else array) for name, array in given.items()))
    # Without a source, operands of trees are read one by one.
    other = ac.plan(dataclasses.replace(request, epilogue=ac.GemmEpilogue(beta=1.0, tree=BLOCK)))
    off[...] = given["residual"]
    given = {**given, "residual": off}
    c = laid_out((12, 20), (20, 1), np.float32)
    given = {"a": given["a"], "b": given["b"], "c": c, **{k: v for k, v in given.items() if k not in "ab"}}
    other(*map(operand, given.values()))
    assert_written(given, block(given))


def case_names_are_the_trees_own() -> None:
    tree = tree_named(bias="c", residual="shortcut", bits="positive")
    request = ac.GemmRequest(SHAPE, dtype=TF32, epilogue=ac.GemmEpilogue(tree=tree))
    names = [slot.name for slot in operation_of(request).operands(request)]
    assert names == [
        "a",
        "b",
        *(operand.name for operand in tree.inputs),
        *(output.name for output in tree.outputs),
        "out",
    ]
    same = ac.plan(dataclasses.replace(request, epilogue=ac.GemmEpilogue(tree=BLOCK)))
    assert ac.plan(request).kernel_name == same.kernel_name
    assert request.plan_key() != same.key


def case_a_plan_refuses_what_no_kernel_does() -> None:
    f32, tree = ac.CutlassDtype.F32, ac.EvtBuilder().activation("hardswish").build()
    for request, error, says in (
        (ac.GemmRequest(ac.GemmShape(0, 6, 5), dtype=f32, epilogue=BIASED), ac.UnsupportedError, "is empty"),
        (ac.GemmRequest(ac.GemmShape(4, 6, 0), dtype=f32, epilogue=BIASED), ac.UnsupportedError, "K is 0"),
        (ac.GemmRequest(SHAPE, dtype=TF32, epilogue=ac.GemmEpilogue(tree=tree)), ac.KernelNotFoundError, "no preset"),
        (
            ac.GemmRequest(SHAPE, dtype=TF32, layout_c=COLUMNS, epilogue=ac.GemmEpilogue(tree=BLOCK)),
            ac.UnsupportedError, "masks lie along the rows of D: D must be row-major",
        ),
    ):  # fmt: skip
        refused(error, says, lambda request=request: ac.plan(request))
        assert says in ac.explain(request, jit="off").reason or "is empty" in says
    bound = ac.GemmRequest(SHAPE, dtype=TF32, epilogue=BIASED)
    refused(ac.InvalidOperandError, "a object is not an array", lambda: ac.plan(bound, b=object()))


def case_a_bound_plan_launches() -> None:
    for request in REQUESTS:
        given = arrays_of(request)
        wanted = {name: array.copy(order="K") for name, array in given.items()}
        ac.plan(request)(*map(operand, wanted.values()))
        bound = ac.plan(request, b=operand(np.zeros_like(given["b"])))
        bound.refit(operand(given["b"]))
        bound(*(operand(array) for name, array in given.items() if name != "b"))
        assert_written(given, wanted)


def case_epilogues_are_validated() -> None:
    known = validate._known
    known.clear()
    ac.plan(ac.GemmRequest(SHAPE, dtype=TF32, epilogue=BIASED))
    assert list(known.values()) == [""]


# ----------------------------------------------------------------------------------------------------------------------
# Trials, actors and gemm
# ----------------------------------------------------------------------------------------------------------------------

REQUESTS = (
    ac.GemmRequest(SHAPE, dtype=TF32, epilogue=dataclasses.replace(BIASED, alpha=-0.5, beta=2.0)),
    ac.GemmRequest(dataclasses.replace(SHAPE, batch=5), dtype=TF32, layout_c=COLUMNS, epilogue=BIASED),
    ac.GemmRequest(SHAPE, dtype=TF32, epilogue=ac.GemmEpilogue(tree=BLOCK)),
    ac.GemmRequest(dataclasses.replace(SHAPE, batch=3), dtype=TF32, epilogue=ac.GemmEpilogue(beta=1.0, tree=BLOCK)),
)


def case_runs_are_verified() -> None:
    for request in REQUESTS:
        result = verify.run(request)
        assert (result.backend, result.ok, result.launches > 0) == ("prebuilt", True, True), result
        assert result.kernel == ac.plan(request).kernel_name


def case_runs_count_mismatches() -> None:
    def run(request: ac.GemmRequest, spoil: Callable[[dict[str, Any]], None]) -> int:
        written = probe._written

        def spoilt(*arguments: Any) -> Any:
            got = written(*arguments)
            spoil(got)
            return got

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "_written", spoilt)
            return verify.run(request).mismatches

    def add(name: str) -> Callable[[dict[str, Any]], None]:
        return lambda got: got[name].__setitem__((0, 0), got[name][0, 0] + 100)

    for request in REQUESTS[:1] + REQUESTS[2:3]:
        assert run(request, add("out")) == 1
        assert run(request, lambda got: got["out"].fill(np.nan)) == 12 * 20
    assert run(REQUESTS[2], lambda got: got["sums"].__setitem__(3, 1e6)) == 1
    assert run(REQUESTS[2], lambda got: got["bits"].__ixor__(0xFF)) >= 12 * 20 // 2  # beside bits that may be either
    assert run(REQUESTS[3], add("sums")) == 1


def case_actors_serve_them() -> None:
    actor = ac.CutlassActor(4)
    for request in REQUESTS:
        given = arrays_of(request)
        out = given.pop("out")
        sent = {name: operand(array) for name, array in given.items()}
        result = operand(out)
        assert actor.handle(ac.CutlassMsg.Gemm(request, sent, out=result)) is result
        made = ac.plan(request)
        wanted = arrays_of(request) | {name: array.copy(order="K") for name, array in given.items()}
        made(*map(operand, wanted.values()))
        assert_written({**given, "out": out}, {name: wanted[name] for name in (*given, "out")})
    assert len(actor.plan_cache) == len(REQUESTS)


def case_gemm_takes_kept_plans() -> None:
    made = []
    make = plans.make
    how: dict[str, Any] = {"precision": "tf32", "stream": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_function, "make", lambda *given, **options: made.append(0) or make(*given, **options))
        kept_plans.clear()
        for alpha in (1.0, 2.0, 2):
            given = arrays_of(REQUESTS[2])
            views = {name: operand(array) for name, array in given.items()}
            a, b = views.pop("a"), views.pop("b")
            results = ac.gemm(a, b, epilogue=BLOCK, alpha=alpha, **views, **how)
            assert results == {name: views[name] for name in ("out", "bits", "sums")}
            assert_written(given, block(given, alpha))
            given = arrays_of(REQUESTS[0])
            views = {name: operand(array) for name, array in given.items()}
            product, more = [views.pop(name) for name in "abc"], {"beta": 1.0, "activation": "relu"}
            assert ac.gemm(*product, alpha=alpha, **more, **views, **how) is views["out"]
            acc = alpha * (given["a"] @ given["b"]) + given["c"]
            assert_written(given, {"out": np.maximum(acc + given["bias"], 0)})
        refused(ac.InvalidOperandError, "no operand", lambda: ac.gemm(a, b, epilogue=BLOCK, other=a, **how))
    assert (len(made), len(kept_plans)) == (2, 2)


def case_gemm_serves_host_arrays() -> None:
    given = arrays_of(REQUESTS[2])
    wanted = block(given)
    read = {name: given[name] for name in ("bias", "residual")}
    results = ac.gemm(given["a"], given["b"], epilogue=BLOCK, precision="tf32", **read)
    assert_written(results, wanted)
    results = ac.gemm(given["a"], given["b"], epilogue=BLOCK, precision="tf32", **read, sums=given["sums"])
    assert results["sums"] is given["sums"]
    assert_written(results, wanted)


def case_sums_of_nothing_are_written() -> None:
    for shape in ((0, 20), (12, 0), (0, 0)):
        empty = {"a": np.zeros((shape[0], 8), np.float32), "b": np.zeros((8, shape[1]), np.float32)}
        sums = np.full(shape[1], 7, np.float32)
        read = {"bias": np.zeros(shape[1], np.float32), "residual": np.zeros(shape, np.float32)}
        views = {name: operand(array) for name, array in {**empty, **read, "sums": sums}.items()}
        a, b = views.pop("a"), views.pop("b")
        for stream in (0, 777):  # which is captured
            sums[...] = 7
            with fake_cases.no_waiting():
                results = ac.gemm(a, b, epilogue=BLOCK, precision="tf32", **views, stream=stream)
            np.testing.assert_array_equal(sums, 0)
        assert (results["out"].shape, results["bits"].shape) == (shape, (shape[0], -(-shape[1] // 8)))
        hosted = ac.gemm(*empty.values(), epilogue=BLOCK, precision="tf32", **read)
        np.testing.assert_array_equal(hosted["sums"], np.zeros(shape[1]))


if __name__ == "__main__":
    fake_cases.run(globals())
