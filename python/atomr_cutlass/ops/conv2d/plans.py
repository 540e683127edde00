"""Plans of convolutions: the launches that one takes, casts and sums of slices among them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from ...arrays.layouts import in_layout, pixel_strides
from ...epilogue.bound import FusedOperands, source_number
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import told
from ...generator.epilogue.lower import is_common
from ...pipeline import devices, select
from ...pipeline.devices import Device
from ...pipeline.plan import Address, Plan, Steps, bytes_of
from ...pipeline.planning import PlanOptions, planned
from ...pipeline.problem import MatrixSpec
from ...pipeline.search import Candidate
from ..gemm.helpers import sums
from ..gemm.kernels import product_args
from ..gemm.plans import clears_masks
from .kernels import ConvFormulation, ConvSearch
from .problem import CAST_ALIGNMENT, ConvProblem, key_bytes

ConvCandidate: TypeAlias = "Candidate[ConvFormulation]"


def make(problem: ConvProblem, *, layout: str = "nhwc", **options: Any) -> Plan:
    """The plan for a convolution.

    Its slots are a, b and, where there are such, c, bias, the inputs and the outputs of an epilogue tree, then out. A
    convolution that no kernel computes as it stands is rewritten, and the plan's `rewrite` says how; see `ConvSearch`.

    Args:
        problem: the convolution, dimensions in the order of NHWC.
        layout: the order in which calls name the dimensions of their arrays.
        options: those of `PlanOptions`.

    Raises:
        UnsupportedError, KernelNotFoundError: as `gemm.plans.make`.
    """
    how = PlanOptions(**options)
    device = devices.get(problem.device)
    search = ConvSearch(problem, device, how.arch, batch_invariant=how.batch_invariant)

    def build(candidate: ConvCandidate, how: PlanOptions) -> Plan:
        return _plan(problem, candidate, device, how, layout=layout)

    return planned(search, build, how)


def _plan(problem: ConvProblem, candidate: ConvCandidate, device: Device, how: PlanOptions, *, layout: str) -> Plan:
    formulation, key = candidate.formulation, candidate.key
    rewritten, casts, product = formulation.problem, formulation.casts, formulation.product
    steps = Steps(problem.device, how.stream)

    def slot(name: str, spec: MatrixSpec, alignment: int, role: str = "input") -> Address:
        shape, strides = (in_layout(values, layout) for values in (spec.shape, spec.strides))
        return steps.slot(name, shape, strides, spec.dtype.dlpack, alignment=alignment, role=role)

    def casting(dtype: CutlassDtype, wanted: CutlassDtype) -> Candidate[None]:
        return select.choose(sums(dtype, wanted, device, how.arch), backend=how.backend, jit=how.jit)

    def cast(source: Address, spec: MatrixSpec, wide: MatrixSpec) -> Address:
        target = steps.temporary(bytes_of(wide.shape, wide.dtype))
        args = {"count": math.prod(spec.shape), "slices": 1, "a": source, "d": target, "alpha": 1.0}
        steps.launch(casting(spec.dtype, wide.dtype), args)
        return target

    align_a, align_b = (key.align_a, key.align_b)
    if product is not None and product.swapped:
        align_a, align_b = align_b, align_a
    reduced = formulation.wide or formulation.apart
    a = slot("a", problem.a, CAST_ALIGNMENT if casts else key_bytes(align_a, problem.a))
    b = slot("b", problem.b, CAST_ALIGNMENT if casts else key_bytes(align_b, problem.b))
    of_d = CAST_ALIGNMENT if reduced else key_bytes(key.align_d, problem.d)
    fusion, epilogue, bias = rewritten.fusion, rewritten.epilogue, None
    if product is not None:
        fusion, epilogue = problem.fusion, product.problem.epilogue
    loads_source = source_number(epilogue) is not None
    c = None if problem.c is None or loads_source else slot("c", problem.c, of_d, "source")
    if rewritten.bias is not None and product is None:
        # That of a tree has the tree's name for it.
        of_tree = problem.fusion.inputs[0] if problem.fusion is not None else None
        name, alignment = "bias" if of_tree is None else of_tree.name, key_bytes(key.align_d, rewritten.bias)
        shape, strides = (of_tree and of_tree.slot) or (rewritten.bias.shape, rewritten.bias.strides)
        bias = steps.slot(name, shape, strides, rewritten.bias.dtype.dlpack, alignment=alignment)
    clear_masks = product is not None and clears_masks(key)
    others = FusedOperands(steps, fusion, epilogue, key, clear_masks=clear_masks)
    c = others.source or c
    out = slot("out", problem.d, of_d, "output")
    if casts:
        a, b = cast(a, problem.a, rewritten.a), cast(b, problem.b, rewritten.b)
    zeros = (0,) * (0 if fusion is None else len(fusion.arrays))
    if product is not None:
        first, second = (b, a) if product.swapped else (a, b)
        args = {"batch": 1, "a": first, "b": second, "c": c, "d": out, "alpha": "alpha", "beta": "beta"}
        args |= others.args(zeros, zeros, swapped=product.swapped)
        steps.launch(candidate, product_args(product, candidate) | args, main=True)
    elif not reduced:
        own = others.args(zeros, zeros, swapped=False)
        if is_common(key.epilogue) and fusion is None:
            row = None if rewritten.bias is None else rewritten.bias.dtype
            own = {
                "operand0": bias,
                "operand0_stride_m": told(row, rewritten.epilogue.removeprefix("lc").removeprefix("_")),
                "operand0_stride_n": 1,
            }
            bias = None
        args = _args(rewritten, a, b, c, bias, out, formulation.split_k) | own
        steps.launch(candidate, args, main=True)
    else:
        # alpha, beta and C are for whoever adds up.
        slices = formulation.split_k if formulation.apart else 1
        count = math.prod(problem.d.shape)
        target = steps.temporary(slices * bytes_of(problem.d.shape, CutlassDtype.F32))
        args = _args(rewritten, a, b, None, bias, target, formulation.split_k)
        steps.launch(candidate, args | {"alpha": 1.0, "beta": 0.0, "split_parallel": int(formulation.apart)}, main=True)
        steps.launch(
            casting(CutlassDtype.F32, problem.d.dtype),
            {
                "count": count, "slices": slices, "slice_stride": count, "a": target, "c": c, "d": out,
                "alpha": "alpha", "beta": "beta" if c is not None else 0.0,
            },
        )  # fmt: skip
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta, rewrite=formulation.rewrite)


def _args(
    problem: ConvProblem, a: Address, b: Address, c: Address | None, bias: Address | None, d: Address, split_k: int
) -> dict[str, Any]:
    g = problem.geometry
    x, w, y = (pixel_strides(spec) for spec in problem.images)
    (top, bottom), (left, right) = g.padding
    return {
        "n": g.n, "h": g.h, "w": g.w, "c": g.c, "k": g.k, "r": g.r, "s": g.s, "p": g.p, "q": g.q,
        "pad_h": top, "pad_w": left, "pad_h_end": bottom, "pad_w_end": right,
        "stride_h": g.stride[0], "stride_w": g.stride[1], "dilation_h": g.dilation[0], "dilation_w": g.dilation[1],
        "groups": g.groups, "split_k": split_k, "swizzle": 1,
        "a": a, "b": b, "c_source": c, "d": d, "bias": bias,
        "x_stride_w": x[0], "x_stride_h": x[1], "x_stride_n": x[2],
        "w_stride_s": w[0], "w_stride_r": w[1], "w_stride_k": w[2],
        "y_stride_q": y[0], "y_stride_p": y[1], "y_stride_n": y[2],
        "alpha": "alpha", "beta": "beta",
    }  # fmt: skip
