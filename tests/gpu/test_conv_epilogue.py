"""Epilogue trees of convolutions on the GPU, against the reference and against PyTorch.

Their kernels are compiled at run time: `tools/compile_table.py --trees` compiles them side by side before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import conv_tree_cases
from atomr_cutlass import ConvDgradRequest, ConvFwdRequest, ConvLayout, ConvShape, GemmEpilogue, reference
from atomr_cutlass.arrays.numerics import to_float64
from atomr_cutlass.epilogue import validate
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.tree import MASK, RESULT
from atomr_cutlass.ops.conv2d.problem import FPROP
from atomr_cutlass.pipeline import verify
from conv_tree_cases import ConvCase
from gpu_matrices import assert_same_bits
from gpu_trees import Held, host
from random_trees import evaluate_torch, is_special, to_torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

COMMON = conv_tree_cases.common()
UNFUSED_EVERY = 2


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table has kernels of trees; and what is wrong with one shall be seen here, not at its first use."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    monkeypatch.setenv(validate.VARIABLE, "off")


class Arrays:
    """The arrays of a case on the GPU, in poison, and what those that are read hold."""

    def __init__(self, case: ConvCase) -> None:
        self.case = case
        self.values = case.values()
        self.held = {name: Held(layout) for name, layout in case.array_layouts.items()}
        for name, values in self.values.items():
            self.held[name].fill(values)

    def __getitem__(self, name: str) -> Any:
        """The array as calls have it."""
        view = self.held[name].view
        return view.permute(0, 3, 1, 2) if self.case.layout == "nchw" and view.ndim == 4 else view

    @property
    def written(self) -> list[str]:
        return [*self.case.outputs, RESULT]

    def call(self, **changes: Any) -> Any:
        """The convolution, into the case's own arrays; arguments that change to None are left out."""
        case = self.case
        given = {"alpha": case.alpha, "beta": case.beta, "padding": case.padding, "stride": case.stride}
        given |= {"layout": case.layout, "precision": case.precision}
        if case.options:
            given |= {name: self[name] for name in case.operands} | dict(case.options)
        else:
            given |= {"epilogue": case.tree, **{name: self[name] for name in (*case.operands, *case.outputs)}}
        given |= {RESULT: self[RESULT], **changes}
        arguments = {name: array for name, array in given.items() if array is not None}
        c = self["c"] if case.beta else None
        if case.op == FPROP:
            return ac.conv2d(self["a"], self["b"], c, **arguments)
        return ac.conv2d_dgrad(self["a"], self["b"], tuple(self[RESULT].shape), c, **arguments)

    def assert_right(self, results: Mapping[str, Any] | None = None) -> None:
        """All results are right, and nothing else was written."""
        case = self.case
        inner = {name: self.held[name].view for name in self.written} if results is None else results
        got = case.matrices({name: host(view) for name, view in inner.items()})
        acc, error = case.accumulators(self.values)
        read = case.matrices({name: self.values[name] for name in case.operands})
        wrong = reference.mismatches(case.tree, got, acc, error, read, out_dtype=case.d)
        assert not wrong, "\n".join([*wrong, case.tree.program])
        for name in self.written if results is None else ():
            self.held[name].assert_guards()


def in_nhwc(case: ConvCase, array: Any) -> Any:
    """A result as NHWC has it."""
    if case.layout == "nhwc" or array.ndim != 4:
        return array
    return array.transpose(0, 2, 3, 1) if isinstance(array, np.ndarray) else array.permute(0, 2, 3, 1)


@pytest.mark.parametrize("case", conv_tree_cases.cases(), ids=str)
def test_random_tree(case: ConvCase) -> None:
    arrays = Arrays(case)
    arrays.call()
    arrays.assert_right()
    if case.seed % UNFUSED_EVERY == 0 and not is_special(case.seed):
        assert_as_unfused(arrays)


def assert_as_unfused(arrays: Arrays) -> None:
    """Results are as far from what PyTorch computes in float64 as two kernels may be from each other."""
    case = arrays.case
    acc, error = case.accumulators(arrays.values)
    read = case.matrices({name: arrays.values[name] for name in case.operands})
    on_gpu = {name: to_torch(values, "cuda") for name, values in read.items()}
    unfused = evaluate_torch(case.tree, to_torch(acc, "cuda"), on_gpu, out_dtype=case.d)
    bounds = reference.tolerances(case.tree, acc, error, read, out_dtype=case.d)
    got = case.matrices({name: host(arrays.held[name].view) for name in arrays.written})
    masks = {output.name for output in case.tree.outputs if output.kind == MASK}
    for name, bound in bounds.items():
        mine, want = got[name], host(unfused[name])
        if name in masks:
            mine, want = (np.unpackbits(bits, -1, count=acc.shape[1], bitorder="little") for bits in (mine, want))
        off = np.abs(to_float64(mine) - to_float64(want))
        assert not (~(off <= 2.0 * bound)).any(), name


@pytest.mark.parametrize("case", conv_tree_cases.with_options(), ids=str)
def test_bias_and_c_together(case: ConvCase) -> None:
    arrays = Arrays(case)
    arrays.call()
    arrays.assert_right()
    made = arrays.call(out=None)
    arrays.assert_right({RESULT: made})


@pytest.mark.parametrize("name", list(COMMON))
@pytest.mark.parametrize("how", ["function", "tree"])
def test_new_results(name: str, how: str) -> None:
    """Without arrays for them, results are made: twice, since the second call finds the plan of a tree."""
    case = COMMON[name]
    arrays = Arrays(case)
    outputs = dict.fromkeys(case.outputs)
    for _ in range(2):
        made = arrays.call(out=None, **outputs, epilogue=case.function if how == "function" else case.tree)
        results = {RESULT: made} if not isinstance(made, dict) else made
        assert set(results) == {RESULT, *case.outputs}
        arrays.assert_right({key: in_nhwc(case, result) for key, result in results.items()})


@pytest.mark.parametrize("name", list(COMMON))
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_host_arrays(name: str, backend: str) -> None:
    case = COMMON[name]
    values = case.values()
    order = (0, 3, 1, 2)
    given = {key: v.transpose(order) if case.layout == "nchw" and v.ndim == 4 else v for key, v in values.items()}
    how: dict[str, Any] = {"padding": case.padding, "alpha": case.alpha, "layout": case.layout, "backend": backend}
    how |= {"epilogue": case.function, **{key: given[key] for key in case.operands}}
    if case.op == FPROP:
        made = ac.conv2d(given["a"], given["b"], **how)
    else:
        made = ac.conv2d_dgrad(given["a"], given["b"], case.image, **how)
    results = {RESULT: made} if not isinstance(made, dict) else made
    arrays = Arrays(case)
    arrays.assert_right({key: np.ascontiguousarray(in_nhwc(case, result)) for key, result in results.items()})


@pytest.mark.parametrize("name", ["block-nhwc", "block-nchw", "gradient"])
def test_requests(name: str) -> None:
    case = COMMON[name]
    g = case.geometry
    shape = ConvShape.nhwc(g.n, g.h, g.w, g.c, g.k, g.r, g.s, padding=case.padding)
    kind = ConvFwdRequest if case.op == FPROP else ConvDgradRequest
    epilogue = GemmEpilogue(alpha=case.alpha, tree=case.tree)
    request = kind(shape, dtype=case.a, layout=ConvLayout(case.layout), epilogue=epilogue)
    plan = ac.plan(request)
    arrays = Arrays(case)
    names = ["a", "b", *case.operands, *case.outputs]
    plan(*(arrays[key] for key in names), out=arrays[RESULT])
    arrays.assert_right()
    assert verify.run(request).ok


def test_graph(torch: Any) -> None:
    """A captured call computes again with what the arrays hold then."""
    case = COMMON["block-nhwc"]
    arrays = Arrays(case)
    arrays.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrays.call()
    arrays.held["residual"].fill(np.zeros_like(arrays.values["residual"]))
    arrays.values["residual"] = np.zeros_like(arrays.values["residual"])
    arrays.held[RESULT].view.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    arrays.assert_right()


def test_epilogues_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of the common cases passes the check, and one that gives wrong results is refused."""
    monkeypatch.setenv(validate.VARIABLE, "on")
    monkeypatch.setattr(validate, "_known", {})
    monkeypatch.setattr(validate.files, "recall_validation", lambda _: None)
    seen: dict[str, str] = {}
    monkeypatch.setattr(validate.files, "remember_validation", seen.__setitem__)
    for name, case in COMMON.items():
        arrays = Arrays(case)
        # A scalar of another value makes the plan anew: it is not among the kept ones.
        arrays.call(epilogue=case.function, **dict.fromkeys(case.outputs), out=None)
        assert set(seen.values()) == {""}, name
    assert len(seen) == len({case.tree.id for case in COMMON.values()})


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_bias_and_activation_as_a_tree_of_other_kernels(torch: Any, layout: str, groups: int) -> None:
    """With groups, and for strided dgrad, which have no trees: as with `bias=` and `activation=`, to the bit."""
    random = np.random.default_rng(7)

    def array(*shape: int) -> Any:
        made = torch.from_numpy(random.standard_normal(shape).astype(np.float32)).to("cuda", torch.float16)
        return made.permute(0, 3, 1, 2) if layout == "nchw" and made.ndim == 4 else made

    x, w, bias = array(2, 15, 15, 64), array(96, 3, 3, 64 // groups), array(96)
    tree = ac.EvtBuilder().add_bias("row", dtype=D.F16).activation("gelu").build()
    how: dict[str, Any] = {"padding": 1, "stride": 2, "groups": groups, "layout": layout, "alpha": 0.125}
    y = ac.conv2d(x, w, epilogue=tree, row=bias, **how)
    assert_same_bits(y, ac.conv2d(x, w, bias=bias, activation="gelu", **how))
    back = {**how, "groups": 1}
    wide, bias = array(96, 3, 3, 64), array(64)
    x_shape = tuple(x.shape)
    dx = ac.conv2d_dgrad(y, wide, x_shape, epilogue=tree, row=bias, **back)
    assert_same_bits(dx, ac.conv2d_dgrad(y, wide, x_shape, bias=bias, activation="gelu", **back))


def test_operands_whose_pixels_have_gaps(torch: Any) -> None:
    case = COMMON["block-nhwc"]
    arrays = Arrays(case)
    gaps = torch.zeros(2, 14, 16, 64, dtype=torch.bfloat16, device="cuda")[:, :, 1:15]
    with pytest.raises(ac.UnsupportedError, match="not evenly spaced"):
        arrays.call(residual=gaps)
    arrays.held[RESULT].assert_untouched()


def test_results_whose_pixels_have_gaps_come_from_c_alone(torch: Any) -> None:
    """D may have a layout that TMA stores; a matrix is then an input of the tree."""
    case = COMMON["block-nhwc"]
    arrays = Arrays(case)
    out = torch.full((2, 14, 16, 64), math.nan, dtype=torch.bfloat16, device="cuda")
    arrays.call(out=out[:, :, 1:15])
    arrays.assert_right({RESULT: out[:, :, 1:15].contiguous()})
    assert bool(out[:, :, 0].isnan().all() and out[:, :, 15].isnan().all())


def test_the_same_as_bias_and_activation(torch: Any) -> None:
    """A tree of bias and rectification computes what CUTLASS's epilogue of both does, on the same tile."""
    x = torch.randn(16, 28, 28, 64, device="cuda").bfloat16()
    w = (torch.randn(128, 3, 3, 64, device="cuda") / 24).bfloat16()
    bias = torch.randn(128, device="cuda").bfloat16()
    how: dict[str, Any] = {"bias": bias, "padding": 1, "backend": "jit"}
    plain = ac.conv2d(x, w, activation="relu", **how)
    tree = ac.conv2d(x, w, epilogue=lambda acc, bias: ac.epilogue.relu(acc + bias), **how)
    assert_same_bits(plain, tree)


def test_what_no_kernel_computes(torch: Any) -> None:
    x = torch.randn(2, 9, 9, 64, device="cuda").bfloat16()
    w = torch.randn(64, 3, 3, 32, device="cuda").bfloat16()
    bias = torch.randn(64, device="cuda").bfloat16()
    for how in ({"groups": 2}, {"groups": 2, "stride": 2}):
        with pytest.raises(ac.UnsupportedError, match="sm_90a's TMA kernels"):
            ac.conv2d(x, w, epilogue=lambda acc, bias: acc * bias, bias=bias, **how)
    tree = ac.epilogue.EvtBuilder().add_bias("bias", dtype=D.BF16).scale(2.0).build()
    with pytest.raises(ac.UnsupportedError, match="sm_90a's TMA kernels"):
        ac.plan(
            ConvFwdRequest(
                ConvShape.nhwc(1, 9, 9, 64, 64, 3, 3),
                dtype=D.BF16,
                arch=ac.SmArch.SM80,
                epilogue=GemmEpilogue(tree=tree),
            )
        )
