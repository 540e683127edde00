"""Kernels of convolutions: the formulations, their conditions and cost, and the launches of a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays.layouts import MatrixSpec, collapses, in_layout, pixel_strides, row_major
from ...arrays.numerics import FAST
from ...epilogue.fusion import source_number
from ...epilogue.plan_operands import FusedOperands
from ...errors import CutlassError, UnsupportedError, require
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import as_bias_and_activation, told
from ...generator.epilogue.lower import LINEAR, is_common, split
from ...generator.key import KernelKey
from ...generator.matrix import supports, with_epilogue
from ...generator.rules import FP8_TYPES, Status, accumulator, conv_types, supports_tree
from ...pipeline import devices, search, select
from ...pipeline.devices import Device
from ...pipeline.plan import Address, Plan, Steps, bytes_of
from ...pipeline.planning import PlanOptions, planned
from ...pipeline.reduction import refuse_sums
from ...pipeline.search import Candidate, KernelSearch
from ..gemm.helpers import sums
from ..gemm.kernels import GemmSearch, cells_of, product_args
from ..gemm.plans import clears_masks
from ..gemm.problem import MOST, GemmFormulation, GemmProblem, fused_problems
from . import problem as conv_problem
from .problem import CAST_ALIGNMENT, DGRAD, FPROP, WGRAD, ConvProblem, convolves, packed, unlike_a_bias

_SLICES = (2, 4, 8, 16, 32, 64, 128, 256)
_TREES = (
    "epilogue trees, and bias together with C, are those of sm_90a's TMA kernels, which convolve one group of channels "
    "aligned to 16 bytes, dgrad without a stride, and of filters of one tap; other kernels have bias and activation"
)
"""The reason where no kernel serves a convolution with a tree."""


@dataclass(frozen=True)
class ConvFormulation:
    """The form in which a kernel computes a convolution.

    Attributes:
        casts: whether the operands are cast first.
        wide: whether the result is computed in float32 and cast.
        product: the GEMM that computes the convolution; None for an implicit GEMM.
    """

    problem: ConvProblem
    split_k: int = 1
    casts: bool = False
    wide: bool = False
    product: GemmFormulation | None = None

    @property
    def apart(self) -> bool:
        """Whether the slices are computed in parallel and added up by another kernel."""
        return self.split_k > 1 and self.problem.geometry.groups == 1

    @property
    def rewrite(self) -> str:
        """The rewrite of a convolution that no kernel computes as it stands; empty without one."""
        if self.product is not None:
            return "a filter of one tap: a GEMM"
        rewrites = []
        if self.casts:
            rewrites.append(f"fp8 operands cast to {self.problem.a.dtype.value}, which holds them exactly")
        if self.split_k > 1:
            rewrites.append(f"{self.split_k} slices of K added up in float32" + (", then cast" if self.wide else ""))
        elif self.wide:
            rewrites.append("in float32, then cast")
        return "; ".join(rewrites)


class ConvSearch(KernelSearch[ConvFormulation]):
    """Kernels for a convolution.

    One that no kernel computes as it stands is rewritten:

    * fp8 where no kernel multiplies it: both operands are cast to bf16 or fp16, exactly, in memory of the plan's own
      (kernels that do multiply it accumulate in the tensor cores alone, as fast accumulation does);
    * wgrad with few results and many pixels, or with no kernel for its result's type: slices of K, or all of it, are
      added up in float32, then cast;
    * a filter of one tap: a GEMM with the same epilogue, where that is faster.
    """

    def __init__(
        self,
        problem: ConvProblem,
        device: Device,
        arch: SmArch | None = None,
        *,
        formulations: Sequence[Sequence[ConvFormulation]] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Kernels for a problem in these formulations, by default in all; rows, for `batch_invariant`, are pixels."""
        self.batch_invariant = batch_invariant
        if batch_invariant and problem.fusion is not None:
            refuse_sums(output.name for output in problem.fusion.tree.outputs if output.reduction)
        self.problem, self.device, self.arch, self.op = problem, device, arch, problem.op
        self._product: GemmSearch | None = None
        if formulations is None:
            with contextlib.suppress(UnsupportedError):
                if products := _as_gemm(problem):
                    self._product = GemmSearch(products, device, arch, batch_invariant=batch_invariant)
            _check(problem)
            formulations = [self._formulate(formulation) for formulation in conv_problem.formulations(problem)]
        self.formulations = formulations

    def _formulate(self, problem: ConvProblem) -> list[ConvFormulation]:
        rewritten, casts = self._with_casts(problem)
        found = [ConvFormulation(rewritten, casts=casts)]
        if problem.op == WGRAD:
            slices = [s for s in _SLICES if problem.implicit_gemm[2] >= s * 256]
            if rewritten.d.dtype is CutlassDtype.F32 or _cast_refusal(rewritten):
                found += [ConvFormulation(rewritten, s, casts) for s in slices]
            else:
                result = dataclasses.replace(rewritten.d, dtype=CutlassDtype.F32)
                widened = dataclasses.replace(rewritten, c=None, d=result)
                found += [ConvFormulation(widened, s, casts, wide=True) for s in (1, *slices)]
        if self._product is not None and not casts:
            # If the convolution loads a matrix of its tree as C, so does the GEMM.
            groups = self._product.formulations[:1] if problem.source is not None else self._product.formulations
            every = (product for group in groups for product in group)
            products = (each for each in every if not (each.divided or each.slices or each.copies))
            found += [ConvFormulation(rewritten, product=product) for product in products]
        return found

    def _with_casts(self, problem: ConvProblem) -> tuple[ConvProblem, bool]:
        """The problem for kernels, and whether its operands must be cast."""
        if problem.a.dtype not in FP8_TYPES:
            return problem, False
        native = dataclasses.replace(problem, math=FAST)
        as_it_stands = ConvSearch(native, self.device, self.arch, formulations=[[ConvFormulation(native)]])
        if select.best_cell(as_it_stands) is not None:
            return native, False
        wide = problem.d.dtype if problem.d.dtype in (CutlassDtype.F16, CutlassDtype.BF16) else CutlassDtype.BF16

        def cast(spec: MatrixSpec) -> MatrixSpec:
            if not spec.dense or spec.alignment % CAST_ALIGNMENT:
                raise UnsupportedError(
                    f"no kernel multiplies these {problem.a.dtype.value} operands, and what is cast instead must be "
                    f"dense in NHWC order and aligned to {CAST_ALIGNMENT} bytes: copy it"
                )
            return MatrixSpec(spec.shape, row_major(spec.shape), wide)

        return dataclasses.replace(problem, a=cast(problem.a), b=cast(problem.b), math="default"), True

    def of_many_rows(self) -> Sequence[Sequence[ConvFormulation]]:
        two_images = conv_problem.of_two_images(self.problem)
        return ConvSearch(two_images, self.device, self.arch, batch_invariant=True).formulations

    def op_of(self, formulation: ConvFormulation) -> str:
        return self.op if formulation.product is None else GemmSearch.op

    def traits(self, formulation: ConvFormulation) -> Hashable:
        product = self._product
        of_product = None if product is None or formulation.product is None else product.traits(formulation.product)
        return formulation.problem.traits, formulation.split_k > 1, of_product, self.problem.fusion is not None

    def matches(self, key: KernelKey, formulation: ConvFormulation) -> Status:
        if formulation.product is not None and self._product is not None:
            return self._product.matches(key, formulation.product)
        return convolves(key, formulation.problem.traits, sliced=formulation.split_k > 1)

    def supports(self, key: KernelKey, formulation: ConvFormulation) -> Status:
        if formulation.product is not None and self._product is not None:
            return self._product.supports(key, formulation.product)
        return self.matches(key, formulation)

    def extents(self, formulation: ConvFormulation) -> tuple[int, ...]:
        if formulation.product is not None:
            return formulation.product.extents
        problem, g, split_k = formulation.problem, formulation.problem.geometry, formulation.split_k
        pixels = g.n * (g.h * g.w if self.op == DGRAD else g.p * g.q)
        moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (problem.a, problem.b, problem.d))
        channels = g.c if self.op == FPROP else g.k
        found = *problem.implicit_gemm, g.groups, split_k, formulation.wide, channels, g.c, g.r * g.s, pixels, moved
        return tuple(min(extent, MOST) for extent in found)

    def cells(self, arch: SmArch, group: Sequence[ConvFormulation]) -> Iterable[Iterable[KernelKey]]:
        """The matrix's cells; where none serves, variants with the problem's epilogue or without strides."""
        keys, problem = search.matrix(self.op, arch), group[0].problem

        def varied(key: KernelKey) -> KernelKey:
            if key.epilogue == LINEAR:
                key = with_epilogue(key, problem.epilogue, problem.d.dtype if problem.fusion else key.d)
            unity = key.stride_support == "strided" and problem.geometry.stride == (1, 1)
            return dataclasses.replace(key, stride_support="unity") if unity else key

        def others() -> Iterator[KernelKey]:
            yield from filter(supports, dict.fromkeys(map(varied, keys)))

        def first() -> Iterator[KernelKey]:
            products = dict.fromkeys(member.product.problem for member in group if member.product is not None)
            of_gemm = [key for product in products for key in cells_of(GemmSearch.op, arch, product)]
            # The matrix has no cells with trees: with those of the GEMM, variants are ranked in the same set.
            of_tree = bool(of_gemm) and self.problem.fusion is not None
            yield from (*keys, *(others() if of_tree else ()), *of_gemm)

        yield first()
        yield others()

    def helpers(self, formulation: ConvFormulation) -> Sequence[KernelSearch[Any]]:
        rewritten, casts = formulation.problem, []
        if formulation.casts:
            casts = [(self.problem.a.dtype, rewritten.a.dtype), (self.problem.b.dtype, rewritten.b.dtype)]
        if formulation.wide or formulation.apart:
            casts.append((CutlassDtype.F32, self.problem.d.dtype))
        return [sums(*types, self.device, self.arch) for types in dict.fromkeys(casts)]

    def epilogue_of(self, candidate: Candidate[ConvFormulation]) -> str:
        formulation = candidate.formulation
        return (formulation.product or formulation).problem.epilogue

    def note(self, formulation: ConvFormulation) -> str:
        return f"a rewrite: {formulation.rewrite}" if formulation.rewrite else ""

    def reason(self) -> str:
        first, last = (group[0].problem for group in (self.formulations[0], self.formulations[-1]))
        problem = last if first.fusion else first  # bias and activation in the caller's terms, not as a tree
        g, types = problem.geometry, f"{problem.a.dtype.value} ({problem.math}) to {problem.d.dtype.value}"
        text = (
            f"no kernel of the matrix serves this {self.op}: {types}, epilogue {problem.epilogue}, {g.groups} groups "
            f"of {g.c // g.groups} to {g.k // g.groups} channels, stride {g.stride}, dilation {g.dilation}"
        )
        if problem.op == DGRAD and g.stride != (1, 1) and g.dilation != (1, 1):
            text += ": kernels of strided dgrad have no dilation"
        elif not (packed(problem.d) if problem.op == WGRAD else collapses(problem.d)):
            text += f": the pixels of the result, of strides {problem.d.strides} (NHWC order), are not evenly spaced"
        elif problem.fusion is not None:
            lowered = supports_tree(split(problem.epilogue)[1], accumulator(problem.a.dtype), problem.d.dtype)
            unlike = unlike_a_bias(problem.fusion, problem.d.dtype) if problem.c is None else ""
            text += f": {unlike}{lowered.reason or _TREES}"
        else:
            text += f": {self.closest(self.arch or devices.require_arch(self.device))}"
        if self.batch_invariant:
            text += "; with batch_invariant it has those that serve any number of such images alike"
        unwidened = _cast_refusal(last) if self.op == WGRAD and last.d.dtype is not CutlassDtype.F32 else ""
        return f"{text}; nor is it computed in float32: {unwidened}" if unwidened else text

    def nearest(self, arch: SmArch, best: Candidate[ConvFormulation] | None) -> KernelKey | None:
        return super().nearest(arch, best or self._plainest())

    def refusal(self, best: Candidate[ConvFormulation] | None, remedy: str) -> CutlassError:
        plainest = None if best is None else self._plainest()
        if best is not None and plainest is None and self._product is not None:
            return self._product.refusal(None, remedy)
        return super().refusal(plainest, "" if plainest is None else select.remedy(self, plainest.key))

    def _plainest(self) -> Candidate[ConvFormulation] | None:
        """The best convolution cell of the matrix; preferably one without slices of K, in the result's own type."""
        found = [cell for cell in select.rank_cells(self) if cell.key.op == self.op]
        return min(found, key=lambda cell: cell.formulation.split_k > 1 or cell.formulation.wide, default=None)


def _check(problem: ConvProblem) -> None:
    """Refuses empty results, element types without kernels, and a C with other strides than D."""
    g = problem.geometry
    if 0 in problem.d.shape or g.n == 0:
        raise UnsupportedError(
            f"a convolution of {g.n} images to shape {problem.d.shape} is empty: there is nothing to plan"
        )
    # fp8 is valid for all three operations, since those without kernels are rewritten.
    op, math_mode = (FPROP, FAST) if problem.a.dtype in FP8_TYPES else (problem.op, problem.math)
    tree = problem.fusion is not None
    require(conv_types(op, problem.a.dtype, problem.b.dtype, problem.d.dtype, math_mode, tree=tree))
    # Kernels have one set of strides for C and D.
    if problem.c is not None and pixel_strides(problem.c) != pixel_strides(problem.d):
        raise UnsupportedError(
            f"c has strides {problem.c.strides} and the result {problem.d.strides} (NHWC order): kernels read c as "
            "they write the result; copy c"
        )


def _as_gemm(problem: ConvProblem) -> list[GemmProblem]:
    """The GEMM that equals a filter of one tap over evenly spaced pixels, preferred forms first; else empty."""
    g = problem.geometry
    one_tap = g.r == g.s == g.groups == 1 and g.stride == (1, 1) and g.padding == ((0, 0), (0, 0))
    if not one_tap or problem.bias is not None or (problem.fusion is None and problem.epilogue != LINEAR):
        return []
    x, w, y = problem.images
    images = [x, y] if problem.c is None or problem.op == WGRAD else [x, y, problem.c]
    if not all(collapses(spec) for spec in images):
        return []

    def matrix(spec: MatrixSpec, *, transposed: bool = False) -> MatrixSpec:
        """The matrix of pixels (or filters) by channels."""
        outer, rows, columns, channels = spec.shape
        column, _, outermost = pixel_strides(spec)
        leading = outermost if spec is w or (problem.op == WGRAD and spec is problem.c) else column
        shape, strides, step = (outer * rows * columns, channels), (leading, 1), -1 if transposed else 1
        return MatrixSpec(shape[::step], strides[::step], spec.dtype, spec.alignment)

    a, b = matrix(problem.a, transposed=problem.op == WGRAD), matrix(problem.b, transposed=problem.op == FPROP)
    c = None if problem.c is None else matrix(problem.c)
    math_mode, fusion = FAST if a.dtype in FP8_TYPES else problem.math, problem.fusion
    product = GemmProblem(a, b, c, matrix(problem.d), math_mode, problem.device)
    if fusion is None or as_bias_and_activation(fusion.tree.program) == (None, None):
        return [product]
    return fused_problems(product, fusion, LINEAR)


def _cast_refusal(problem: ConvProblem) -> str:
    """Why a wgrad cannot be computed in float32 and cast; empty where it can."""
    for spec, condition in ((problem.c, "adds a c that"), (problem.d, "writes what")):
        if spec is not None and (not spec.dense or spec.alignment % CAST_ALIGNMENT):
            return f"a cast {condition} is dense and aligned to {CAST_ALIGNMENT} bytes"
    return ""


def make(problem: ConvProblem, layout: str = "nhwc", **options: Any) -> Plan:
    """The plan for a convolution; its arrays have the dimension order of `layout`. Options: `PlanOptions`.

    Its operands are a, b, then those that exist of c, bias, the inputs and outputs of an epilogue tree, then out.
    """
    how = PlanOptions(**options)
    kernels = ConvSearch(problem, devices.get(problem.device), how.arch, batch_invariant=how.batch_invariant)
    return planned(kernels, functools.partial(_plan, problem, layout), how)


def _plan(problem: ConvProblem, layout: str, candidate: Candidate[ConvFormulation], how: PlanOptions) -> Plan:
    formulation, key = candidate.formulation, candidate.key
    rewritten, casts, product = formulation.problem, formulation.casts, formulation.product
    steps = Steps(problem.device, how.stream)

    def slot(name: str, spec: MatrixSpec, align: int, role: str = "input", *, cast: bool) -> Address:
        shape, strides = (in_layout(values, layout) for values in (spec.shape, spec.strides))
        alignment = CAST_ALIGNMENT if cast else align * spec.dtype.bits // 8
        return steps.slot(name, shape, strides, spec.dtype.dlpack, alignment=alignment, role=role)

    def add_up(dtype: CutlassDtype, wanted: CutlassDtype, args: Mapping[str, Any]) -> None:
        kernel = sums(dtype, wanted, devices.get(problem.device), how.arch)
        steps.launch(select.choose(kernel, backend=how.backend, jit=how.jit), args)

    def cast(source: Address, spec: MatrixSpec, wide: MatrixSpec) -> Address:
        target = steps.temporary(bytes_of(wide.shape, wide.dtype))
        args = {"count": math.prod(spec.shape), "slices": 1, "a": source, "d": target, "alpha": 1.0}
        add_up(spec.dtype, wide.dtype, args)
        return target

    swapped = product is not None and product.swapped
    align_a, align_b = (key.align_b, key.align_a) if swapped else (key.align_a, key.align_b)
    reduced = formulation.wide or formulation.apart
    a, b = slot("a", problem.a, align_a, cast=casts), slot("b", problem.b, align_b, cast=casts)
    fusion, epilogue, bias = rewritten.fusion, rewritten.epilogue, None
    if product is not None:
        fusion, epilogue = problem.fusion, product.problem.epilogue
    loads_source = source_number(epilogue) is not None
    c = None if problem.c is None or loads_source else slot("c", problem.c, key.align_d, "source", cast=reduced)
    if rewritten.bias is not None and product is None:
        # The bias of a tree has its name there.
        of_tree, spec = problem.fusion.inputs[0] if problem.fusion is not None else None, rewritten.bias
        shape, strides = (of_tree and of_tree.slot) or (spec.shape, spec.strides)
        alignment, name = key.align_d * spec.dtype.bits // 8, "bias" if of_tree is None else of_tree.name
        bias = steps.slot(name, shape, strides, spec.dtype.dlpack, alignment=alignment)
    others = FusedOperands(steps, fusion, epilogue, key, clear_masks=product is not None and clears_masks(key))
    c = others.source or c
    out = slot("out", problem.d, key.align_d, "output", cast=reduced)
    if casts:
        a, b = cast(a, problem.a, rewritten.a), cast(b, problem.b, rewritten.b)
    zeros = (0,) * (0 if fusion is None else len(fusion.arrays))
    args: dict[str, Any] = {"a": a, "b": b, "d": out, "alpha": "alpha", "beta": "beta"}
    if product is not None:
        args |= {"a": b, "b": a} if swapped else {}
        args |= product_args(product, candidate) | others.args(zeros, zeros, swapped=swapped) | {"batch": 1, "c": c}
    elif reduced:  # alpha, beta and C are arguments of the kernel that adds up
        slices, count = formulation.split_k if formulation.apart else 1, math.prod(problem.d.shape)
        sliced = steps.temporary(slices * bytes_of(problem.d.shape, CutlassDtype.F32))
        args |= _args(formulation) | {"d": sliced, "split_parallel": int(formulation.apart), "alpha": 1.0, "beta": 0.0}
    elif is_common(key.epilogue) and fusion is None:
        row = None if rewritten.bias is None else rewritten.bias.dtype
        form = told(row, rewritten.epilogue.removeprefix("lc").removeprefix("_"))
        args |= {"c_source": c, "operand0": bias, "operand0_stride_m": form, "operand0_stride_n": 1}
        args |= _args(formulation)
    else:
        args |= _args(formulation) | {"c_source": c, "bias": bias} | others.args(zeros, zeros, swapped=False)
    steps.launch(candidate, args, main=True)
    if reduced:
        args = {"count": count, "slices": slices, "slice_stride": count, "a": sliced, "c": c, "d": out}
        args |= {"alpha": "alpha", "beta": "beta" if c is not None else 0.0}
        add_up(CutlassDtype.F32, problem.d.dtype, args)
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta, rewrite=formulation.rewrite, problem=how.problem)


def _args(formulation: ConvFormulation) -> dict[str, int]:
    """A kernel's arguments for a convolution, except addresses and scalars."""
    g = formulation.problem.geometry
    x, w, y = map(pixel_strides, formulation.problem.images)
    (top, bottom), (left, right) = g.padding
    return {
        "n": g.n, "h": g.h, "w": g.w, "c": g.c, "k": g.k, "r": g.r, "s": g.s, "p": g.p, "q": g.q,
        "pad_h": top, "pad_w": left, "pad_h_end": bottom, "pad_w_end": right,
        "stride_h": g.stride[0], "stride_w": g.stride[1], "dilation_h": g.dilation[0], "dilation_w": g.dilation[1],
        "groups": g.groups, "split_k": formulation.split_k, "swizzle": 1,
        "x_stride_w": x[0], "x_stride_h": x[1], "x_stride_n": x[2],
        "w_stride_s": w[0], "w_stride_r": w[1], "w_stride_k": w[2],
        "y_stride_q": y[0], "y_stride_p": y[1], "y_stride_n": y[2],
    }  # fmt: skip
