"""Epilogue trees on the GPU: random ones against the reference and PyTorch, common ones as everyone calls them.

Their kernels are compiled at run time, the sm90 generation's in 10 to 25 seconds each: `tools/compile_table.py --trees`
compiles them side by side before.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import tree_cases
from atomr_cutlass.arrays import numerics
from atomr_cutlass.epilogue import functions as evt
from atomr_cutlass.epilogue import validate
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.tree import RESULT
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import assert_same_bits
from gpu_trees import Arrays, assert_as_unfused, assert_right, call, host, plan_of, results_of
from random_trees import is_special, to_torch
from tree_cases import Case, Layout

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

COMMON, CELLS = tree_cases.common(), tree_cases.cells()
TRACED = {case.name: case for case in COMMON.values() if case.function is not None and case.n == tree_cases.USUAL[1]}
UNFUSED_EVERY = 3
"""Of so many random trees, one is computed by PyTorch too."""
FEW = 6
"""Multiprocessors that persistent kernels are told of: each thread block then has many tiles."""
SLEEP_CYCLES = 40_000_000


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table has kernels of trees; and what is wrong with one shall be seen here, not at its first use."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    monkeypatch.setenv(validate.VARIABLE, "off")


def as_tree(case: Case) -> Case:
    """The case of a function, its tree given as such."""
    return dataclasses.replace(case, function=None, names=())


# ----------------------------------------------------------------------------------------------------------------------
# Random trees


@pytest.mark.parametrize("case", tree_cases.cases(), ids=str)
def test_random_tree(case: Case) -> None:
    arrays = Arrays(case)
    if case.arch is None:
        returned = results_of(case, call(arrays))
        assert all(returned[name] is arrays[name] for name in returned)
    else:
        plan_of(case, arrays["a"])(*arrays.in_order)
    arrays.assert_right()
    if case.seed % UNFUSED_EVERY == 0 and not is_special(case.seed) and not case.in_place:
        assert_as_unfused(arrays)


@pytest.mark.parametrize("few", [False, True], ids=["all", "few"])
@pytest.mark.parametrize("case", CELLS.values(), ids=str)
def test_every_kind_of_kernel(case: Case, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands and outputs of all kinds, with one tile for each thread block and with many."""
    if few:
        device = dataclasses.replace(devices.get(0), multiprocessors=FEW)
        monkeypatch.setattr(devices, "get", lambda _index=0: device)
    arrays = Arrays(case)
    plan = plan_of(case, arrays["a"])
    for seed in (0, 1):
        case = dataclasses.replace(case, seed=seed)
        arrays.fill(case.values())
        plan(*arrays.in_order)
        arrays.assert_right()


@pytest.mark.parametrize("case", tree_cases.few().values(), ids=str)
def test_few_rows(case: Case) -> None:
    """However a kernel for few rows divides the problem among thread blocks, also one tile after the other."""
    arrays = Arrays(case)
    candidate = case.candidate(devices.get(0))
    shares, widths = gemm_few_sm90.shares(candidate.key), gemm_few_sm90.widths(candidate.key, min(case.m, case.n))
    for share, width in itertools.product(shares, widths):
        for name in (RESULT, *arrays.outputs):
            arrays[name].fill_(1)
        divided = dataclasses.replace(candidate, swizzle=share, width=width)
        options = PlanOptions(alpha=case.alpha, beta=case.beta, like=arrays["a"])
        from_candidate(case.problem, divided, options, fusion=case.fusion)(*arrays.in_order)
        arrays.assert_right()


# ----------------------------------------------------------------------------------------------------------------------
# Bias, activations and functions


@pytest.mark.parametrize("case", COMMON.values(), ids=str)
def test_common(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked at its first use, a kernel is not refused."""
    monkeypatch.setenv(validate.VARIABLE, "on")
    arrays = Arrays(case)
    returned = call(arrays, out=None)
    assert type(returned) is type(case_result(case))
    results = results_of(case, returned)
    assert all(array.is_contiguous() and array.device == arrays["a"].device for array in results.values())
    arrays.assert_right(results)
    arrays.assert_untouched()


def case_result(case: Case) -> Any:
    """Something of the type in which `gemm` returns the results."""
    import torch

    if len(case.returned) == 1:
        return torch.empty(0)
    return () if case.function in (tree_cases.backward, tree_cases.observed) else {}


@pytest.mark.parametrize("activation", [name for name in tree_cases.ACTIVATIONS if name is not None])
def test_activations_are_those_of_torch(activation: str, torch: Any) -> None:
    case = COMMON[f"bias-{activation}"]
    arrays = Arrays(case)
    functional = torch.nn.functional
    functions = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "hardswish": functional.hardswish,
    }
    product = arrays["a"].float() @ arrays["b"].float() * case.alpha
    want = functions[activation](product + arrays["bias"].float())
    torch.testing.assert_close(call(arrays).float(), want, rtol=2.0**-7, atol=2.0**-9)


def test_functions_of_torch_are_traced(torch: Any) -> None:
    """They give the trees, and so the kernels and the bits, of this package's own functions."""
    gelu = Arrays(COMMON["bias-gelu"])
    functional = torch.nn.functional
    got = call(gelu, activation=None, epilogue=lambda acc, bias: functional.gelu(acc + bias), out=None)
    assert_same_bits(got, call(gelu))
    block = Arrays(COMMON["residual"])
    want = call(block)
    for function in (
        lambda acc, bias, residual: torch.relu(acc + bias) + residual,
        lambda acc, bias, residual: torch.add(functional.relu(torch.add(acc, bias)), residual),
    ):
        assert_same_bits(call(block, epilogue=function), want)
    gated = Arrays(COMMON["gated"])
    got = call(gated, epilogue=lambda acc, gate: acc * functional.silu(gate))
    assert_same_bits(got, call(gated))


def test_operands_by_other_names() -> None:
    """C without beta is an operand like others, and numbers are constants: the kernels are the same."""
    gated = Arrays(COMMON["gated"])
    want = call(gated)
    got = ac.gemm(
        gated["a"], gated["b"], gated["gate"], epilogue=lambda acc, c: acc * evt.silu(c), alpha=gated.case.alpha
    )
    assert_same_bits(got, want)

    def observed(acc: Any, kept: Any, factor: Any, off: Any = 0.0) -> Any:
        x = evt.where(kept, acc * factor, off)
        return x, evt.row_amax(x), evt.column_sum(x), evt.total_max(x), evt.column_max(acc)

    arrays = Arrays(COMMON["observed"])
    results = call(arrays, epilogue=observed, factor=1.25)
    arrays.assert_right(results_of(arrays.case, results))


@pytest.mark.parametrize("name", sorted(TRACED))
def test_results_by_name(name: str) -> None:
    """D as `out`, and arrays for what a tree writes beside it; those that are not given are made."""
    case = as_tree(TRACED[name])
    arrays = Arrays(case)
    returned = call(arrays)
    assert returned is arrays["out"] if not case.outputs else all(returned[key] is arrays[key] for key in returned)
    arrays.assert_right()
    for left_out in case.outputs:
        arrays = Arrays(case)
        given = {key: array for key, array in arrays.outputs.items() if key != left_out}
        results = ac.gemm(
            arrays["a"], arrays["b"], epilogue=case.tree, out=arrays["out"], alpha=case.alpha,
            **arrays.operands, **given,
        )  # fmt: skip
        assert all((results[key] is arrays[key]) == (key != left_out) for key in results)
        arrays.assert_right(results)
        arrays.held[left_out].assert_untouched()


@pytest.mark.parametrize("beta", [1.0, -0.5])
def test_scalars(beta: float) -> None:
    """alpha and beta * C come before the tree; with alpha = 0 that is all there is. The kernel is told of them."""
    bias = COMMON["bias-gelu"]
    for case in (
        dataclasses.replace(bias, alpha=0.0),
        dataclasses.replace(bias, alpha=-2 * bias.alpha),
        dataclasses.replace(bias, batch_c=(), beta=beta),
        dataclasses.replace(bias, batch_c=(), beta=beta, alpha=0.0),
        dataclasses.replace(bias, batch_c=(), beta=beta, in_place=True),
    ):
        arrays = Arrays(case)
        call(arrays)
        arrays.assert_right()


# ----------------------------------------------------------------------------------------------------------------------
# Host arrays and other frameworks

HOST = ("bias-gelu", "f16-bias-relu", "f64-bias-gelu", "residual", "quantized", "dequantized", "forward", "observed")


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_host_arrays(name: str, kind: str, torch: Any) -> None:
    case = COMMON[name]
    values = case.values()
    given = {key: array if kind == "numpy" else to_torch(array) for key, array in values.items()}
    arguments = case.arguments({operand.name: given[operand.name] for operand in case.tree.inputs})
    results = results_of(case, ac.gemm(given["a"], given["b"], alpha=case.alpha, out_dtype=case.d, **arguments))
    assert all(isinstance(array, np.ndarray if kind == "numpy" else torch.Tensor) for array in results.values())
    assert_right(case, values, {key: host(array) for key, array in results.items()})


def test_host_results_by_name() -> None:
    case = as_tree(COMMON["forward"])
    values = case.values()
    outs = {
        key: np.zeros(layout.shape, numpy_type(layout.dtype))
        for key, layout in case.array_layouts.items()
        if key not in values
    }
    read = {operand.name: values[operand.name] for operand in case.tree.inputs}
    returned = ac.gemm(values["a"], values["b"], epilogue=case.tree, alpha=case.alpha, **read, **outs)
    assert all(returned[key] is outs[key] for key in returned)
    assert_right(case, values, outs)


def numpy_type(element: D | None) -> Any:
    return np.uint8 if element is None else numerics.numpy_dtype(element)


@pytest.mark.parametrize("name", ["f16-bias-relu", "ieee-bias-relu", "f64-bias-gelu", "observed"])
def test_cupy(name: str, cupy: Any) -> None:
    case = COMMON[name]
    values = case.values()
    given = {key: cupy.asarray(array) for key, array in values.items()}
    arguments = case.arguments({operand.name: given[operand.name] for operand in case.tree.inputs})
    returned = ac.gemm(given["a"], given["b"], alpha=case.alpha, out_dtype=case.d, **arguments)
    results = results_of(case, returned)
    assert all(isinstance(array, cupy.ndarray) for array in results.values())
    assert_right(case, values, {key: cupy.asnumpy(array) for key, array in results.items()})


# ----------------------------------------------------------------------------------------------------------------------
# Streams, graphs and plans


def poison(arrays: Arrays) -> None:
    """Takes back what was written."""
    import torch

    for array in (arrays["out"], *arrays.outputs.values()):
        array.view(torch.uint8).fill_(0x5A)


@pytest.mark.parametrize("how", ["object", "handle", "current"])
@pytest.mark.parametrize("name", ["residual", "quantized"])
def test_stream(name: str, how: str, torch: Any) -> None:
    """Clears and kernels are put on the stream that the caller names, behind what makes the operands."""
    arrays = Arrays(as_tree(COMMON[name]))
    call(arrays)
    poison(arrays)
    stream = torch.cuda.Stream()
    late = torch.full_like(arrays["bias"], math.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(arrays["bias"])
        if how == "current":
            call(arrays, bias=late)
    if how != "current":
        call(arrays, bias=late, stream=stream if how == "object" else stream.cuda_stream)
    stream.synchronize()
    arrays.assert_right()


@pytest.mark.parametrize("name", ["residual", "quantized", "observed", "forward", "i8-bias-silu"])
def test_graph(name: str, torch: Any) -> None:
    """A plan that was made before is captured with its clears, and replays with what its arrays hold then."""
    case = COMMON[name]
    arrays = Arrays(case)
    plan = plan_of(case, arrays["a"])
    plan(*arrays.in_order)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(*arrays.in_order)
    del plan
    for seed in (5, 6):
        arrays.fill(dataclasses.replace(case, seed=seed).values())
        poison(arrays)
        graph.replay()
        torch.cuda.synchronize()
        arrays.assert_right()


def test_gemm_under_capture(torch: Any) -> None:
    """A tree's plan is kept by the call before; that of a function is made anew, and not while a graph is captured."""
    case = COMMON["observed"]  # in no preset
    arrays, refused_ones = Arrays(as_tree(case)), Arrays(case)
    call(arrays)
    call(refused_ones)
    poison(arrays)
    out = torch.zeros_like(arrays["out"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(arrays)
        with pytest.raises(ac.UnsupportedError, match="captured"):
            call(refused_ones, out=out)
    arrays.fill(dataclasses.replace(case, seed=5).values())
    graph.replay()
    torch.cuda.synchronize()
    arrays.assert_right()
    assert not out.any()


@pytest.mark.parametrize("how", ["plan", "function", "tree"])
@pytest.mark.parametrize("name", ["residual", "quantized", "observed", "backward"])
def test_other_arrays(name: str, how: str, torch: Any) -> None:
    """Calls that are in flight at once, each with its own arrays and scalars; those of a tree share a plan."""
    case = as_tree(COMMON[name]) if how == "tree" else COMMON[name]
    calls = [Arrays(dataclasses.replace(case, seed=seed, alpha=case.alpha * (1 + seed))) for seed in range(4)]
    results: list[Any] = []
    plan = plan_of(case, calls[0]["a"]) if how == "plan" else None
    for arrays in calls:
        if plan is not None:
            plan(*arrays.in_order, alpha=arrays.case.alpha)
        # Of a tree's call everything but D goes to new arrays.
        given = dict.fromkeys(arrays.outputs) if how == "tree" else {}
        results.append(None if plan else results_of(case, call(arrays, **given)))
    torch.cuda.synchronize()
    for arrays, result in zip(calls, results, strict=True):
        arrays.assert_right(result)


def test_a_plan_refuses_other_arrays(torch: Any) -> None:
    case = COMMON["forward"]
    arrays = Arrays(case)
    plan = plan_of(case, arrays["a"])
    given = dict(zip(case.array_layouts, arrays.in_order, strict=True))
    for wrong in (
        {"bias": given["bias"][:-1]},
        {"bias": given["bias"].double()},
        {"bias": given["bias"].cpu()},
        {"positive": given["positive"][:, :-1]},
        {"positive": given["positive"].view(torch.int8)},
        {"before": given["before"].t().contiguous().t()},
        {"before": given["out"]},
        {"before": given["a"]},
    ):
        with pytest.raises(ac.InvalidOperandError):
            plan(*{**given, **wrong}.values())
    torch.cuda.synchronize()
    arrays.assert_untouched()
    plan(*arrays.in_order)
    arrays.assert_right()


# ----------------------------------------------------------------------------------------------------------------------
# Nothing to compute


def resized(case: Case, m: int, n: int, k: int, batch: tuple[int, ...] = ()) -> Case:
    """A case of the usual extents with others."""
    rows, columns, _ = tree_cases.USUAL
    extents = {rows: m, columns: n, -(-columns // 8): -(-n // 8)}

    def extended(given: Mapping[str, Layout]) -> dict[str, Layout]:
        return {
            name: dataclasses.replace(layout, shape=tuple(extents.get(extent, extent) for extent in layout.shape))
            for name, layout in given.items()
        }

    return dataclasses.replace(
        case, m=m, n=n, k=k, batch_a=batch, operands=extended(case.operands), outputs=extended(case.outputs)
    )


def right_or_refused(case: Case) -> None:
    """A refusal writes nothing."""
    arrays = Arrays(case)
    try:
        returned = call(arrays)
    except ac.UnsupportedError:
        arrays.assert_untouched()
    else:
        arrays.assert_right(results_of(case, returned))


@pytest.mark.parametrize("name", ["bias-gelu", "residual", "observed", "quantized"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_no_products(name: str, beta: float) -> None:
    """K = 0: the tree of beta * C."""
    right_or_refused(dataclasses.replace(resized(COMMON[name], 40, 24, 0), beta=beta, batch_c=() if beta else None))


@pytest.mark.parametrize("name", ["bias-gelu", "observed", "quantized", "backward"])
@pytest.mark.parametrize("extents", [(0, 24, 16), (40, 0, 16), (0, 0, 16), (0, 24, 0)], ids=str)
def test_empty_results(name: str, extents: tuple[int, int, int]) -> None:
    """Sums and largest magnitudes of nothing are 0, maxima minus infinity."""
    right_or_refused(resized(COMMON[name], *extents))


@pytest.mark.parametrize("name", ["bias-gelu", "quantized"])
def test_no_batches(name: str) -> None:
    right_or_refused(resized(COMMON[name], 40, 24, 16, (0,)))


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.fixture
def block() -> Arrays:
    """relu(acc + bias) + residual, as a tree."""
    return Arrays(as_tree(COMMON["residual"]))


@pytest.fixture
def seen() -> Arrays:
    """A tree with a mask and reductions."""
    return Arrays(as_tree(COMMON["observed"]))


def refused(error: type[Exception], arrays: Arrays, match: str, **changes: Any) -> None:
    """The call raises and writes nothing; left out are arguments that change to None."""
    import torch

    case = arrays.case
    given = {**case.arguments(arrays.operands), **arrays.outputs, "out": arrays["out"], "alpha": case.alpha, **changes}
    given = {name: argument for name, argument in given.items() if argument is not None}
    a, b = given.pop("a", arrays["a"]), given.pop("b", arrays["b"])
    with pytest.raises(error, match=match) as caught:
        ac.gemm(a, b, **given)
    assert type(caught.value) is error
    torch.cuda.synchronize()
    arrays.assert_untouched()


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_missing_operands(block: Arrays, name: str) -> None:
    refused(ac.InvalidOperandError, block, name, **{name: None})


def test_unknown_operands(block: Arrays) -> None:
    refused(ac.InvalidOperandError, block, "scale", scale=block["bias"])
    refused(ac.InvalidOperandError, block, "scale", epilogue=tree_cases.residual, scale=block["bias"])
    refused(ac.InvalidOperandError, block, "no such argument", epilogue=None, bias=None)


def test_operands_of_the_wrong_shape(block: Arrays, seen: Arrays) -> None:
    bias, residual, kept = block["bias"], block["residual"], seen["kept"]
    for wrong in (bias[:-1], bias[:, None], bias[None].expand(2, -1), bias[0], residual):
        refused(ac.InvalidOperandError, block, "bias", bias=wrong)
    for wrong in (residual[:-1], residual[:, 1:], residual.t(), residual[0], residual.expand(2, -1, -1)):
        refused(ac.InvalidOperandError, block, "residual|operand", residual=wrong)
    for wrong in (kept[:, :-1], kept[1:], kept.t().contiguous(), kept[0]):
        refused(ac.InvalidOperandError, seen, "kept", kept=wrong)


def test_operands_of_another_dtype(block: Arrays, seen: Arrays) -> None:
    refused(ac.InvalidOperandError, block, "bias", bias=block["bias"].float())
    refused(ac.InvalidOperandError, block, "residual", residual=block["residual"].half())
    refused(ac.InvalidOperandError, seen, "kept", kept=seen["kept"].bool())
    refused(ac.InvalidOperandError, seen, "kept", kept=seen["kept"].char())


def test_operands_elsewhere(block: Arrays) -> None:
    """On the host where A is on the GPU, and the other way round."""
    refused(ac.InvalidOperandError, block, "bias", bias=block["bias"].cpu())
    refused(ac.InvalidOperandError, block, "residual", residual=block["residual"].cpu())
    a, b, out = (block[name].cpu() for name in ("a", "b", "out"))
    refused(ac.InvalidOperandError, block, "bias|residual", a=a, b=b, out=out)


def test_what_is_no_operand(block: Arrays) -> None:
    refused(ac.InvalidOperandError, block, "bias", bias=1.0)
    refused(ac.InvalidOperandError, block, "array", bias="bias")
    refused(ac.InvalidOperandError, block, "epilogue", epilogue="relu")
    refused(ac.InvalidOperandError, block, "activation", activation="relu")
    refused(ac.UnsupportedError, block, "scale_d", scale_d=2.0)


def test_unknown_activations() -> None:
    arrays = Arrays(COMMON["bias-relu"])
    refused(ac.InvalidOperandError, arrays, "activation", activation="softmax")


def test_outputs_that_do_not_fit(seen: Arrays, torch: Any) -> None:
    m, n = seen.case.shape
    rows, columns = seen["out1"], seen["out2"]
    for wrong in (
        {"out1": columns},
        {"out1": rows[None]},
        {"out1": rows.double()},
        {"out2": rows},
        {"out3": torch.empty((), device="cuda")},
        {"out3": torch.empty(2, device="cuda")},
        {"out1": torch.empty(1, device="cuda").expand(n)},
    ):
        refused(ac.InvalidOperandError, seen, "out", **wrong)
    refused(ac.UnsupportedError, seen, "dense", out2=torch.empty(2 * m, device="cuda")[::2])


def test_outputs_that_share_memory(torch: Any) -> None:
    arrays = Arrays(as_tree(COMMON["forward"]))
    refused(ac.InvalidOperandError, arrays, "overlap", before=arrays["out"])
    buffer = torch.zeros(arrays["bias"].numel() * 8, dtype=torch.float32, device="cuda")
    bits = buffer.view(torch.uint8)[: arrays["positive"].numel()].view(arrays["positive"].shape)
    refused(ac.InvalidOperandError, arrays, "overlap", positive=bits, bias=buffer[: arrays["bias"].numel()])
    assert not buffer.any()


@pytest.mark.parametrize("name", ["observed", "forward"])
def test_masks_run_along_rows(name: str) -> None:
    """Bits of a column-major D would run across its vectors."""
    case = dataclasses.replace(as_tree(COMMON[name]), layouts="rrc")
    refused(ac.UnsupportedError, Arrays(case), "mask|row-major|bits")


def test_results_of_another_dtype(torch: Any) -> None:
    """A tree that casts D decides its type."""
    arrays = Arrays(as_tree(COMMON["quantized"]))
    half = torch.empty(arrays["out"].shape, dtype=torch.float16, device="cuda")
    refused(ac.InvalidOperandError, arrays, "e4m3", out=half)
    refused(ac.InvalidOperandError, arrays, "e4m3", out=None, out_dtype=D.F16)
