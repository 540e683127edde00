"""Kernels of convolutions: formulations of a convolution, which kernels serve them, and their cost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays.layouts import collapses, pixel_strides
from ...arrays.numerics import FAST
from ...epilogue import bound as fused
from ...errors import CutlassError, UnsupportedError, require
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import as_bias_and_activation
from ...generator.epilogue.lower import LINEAR, split
from ...generator.key import KernelKey
from ...generator.matrix import supports, with_epilogue
from ...generator.rules import FP8_TYPES, Status, accumulator, conv_types, supports_tree
from ...pipeline import devices, search, select
from ...pipeline.devices import Device
from ...pipeline.problem import GemmFormulation, GemmProblem, MatrixSpec, row_major
from ...pipeline.reduction import refuse_sums
from ...pipeline.search import Candidate, KernelSearch
from ..gemm.helpers import sums
from ..gemm.kernels import OP as GEMM
from ..gemm.kernels import GemmSearch
from . import problem as conv_problem
from .geometry import DGRAD, FPROP, WGRAD
from .problem import CAST_ALIGNMENT, ConvProblem, ConvTraits, convolves, of_two_images, packed, unlike_a_bias

SLICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ONE_TAP = "a filter of one tap: a GEMM"
TREES = (
    "epilogue trees, and bias together with C, are those of sm_90a's TMA kernels, which convolve one group of channels "
    "aligned to 16 bytes, dgrad without a stride, and of filters of one tap; other kernels have bias and activation"
)
"""Why a convolution with a tree has no kernel."""


@dataclass(frozen=True)
class ConvFormulation:
    """The form in which a kernel computes a convolution.

    Attributes:
        problem: the convolution that the kernel computes.
        split_k: slices of K.
        casts: whether the operands are cast before.
        wide: whether the result is computed in float32 and cast.
        product: the GEMM that the convolution comes to, as a kernel of GEMM takes it; None for an implicit GEMM.
    """

    problem: ConvProblem
    split_k: int = 1
    casts: bool = False
    wide: bool = False
    product: GemmFormulation | None = None

    @property
    def apart(self) -> bool:
        """Whether the slices are computed side by side and added up by another kernel."""
        return self.split_k > 1 and self.problem.geometry.groups == 1

    @functools.cached_property
    def traits(self) -> ConvTraits:
        """Those of the problem, with its slices of K."""
        return self.problem.traits._replace(split=self.split_k > 1)

    @property
    def rewrite(self) -> str:
        """How a convolution that no kernel computes as it stands is rewritten; empty for one that is not."""
        if self.product is not None:
            return ONE_TAP
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
        """Kernels for a problem.

        Args:
            problem: the convolution.
            device: where.
            arch: keep to cells of this arch.
            formulations: how it may be put to kernels; None stands for all that there are.
            batch_invariant: see `KernelSearch`; rows are pixels here.

        Raises:
            UnsupportedError: no kernel ever serves it, or it has sums over pixels that are not to matter; says why.
        """
        self.batch_invariant = batch_invariant
        if batch_invariant and problem.fusion is not None:
            refuse_sums(output.name for output in problem.fusion.tree.outputs if output.reduction)
        self.problem, self.device, self.arch, self.op = problem, device, arch, problem.op
        self._product = None if formulations is not None else self._as_gemm()
        self.formulations = self._all() if formulations is None else formulations

    def _as_gemm(self) -> GemmSearch | None:
        """Kernels of the GEMM that the convolution is; None where it is no GEMM."""
        product, fusion = _as_gemm(self.problem), self.problem.fusion
        if product is None:
            return None
        if product.a.dtype in FP8_TYPES:
            product = dataclasses.replace(product, math=FAST)
        problems: GemmProblem | list[GemmProblem] = product
        with contextlib.suppress(UnsupportedError):
            if fusion is not None and as_bias_and_activation(fusion.tree.program) != (None, None):
                problems = fused.problem_of(product, fusion, LINEAR)
            return GemmSearch(problems, self.device, self.arch, batch_invariant=self.batch_invariant)
        return None

    def _all(self) -> list[list[ConvFormulation]]:
        _check(self.problem)
        return [self._of(problem) for problem in conv_problem.formulations(self.problem)]

    def _of(self, problem: ConvProblem) -> list[ConvFormulation]:
        rewritten, casts = self._multiplied(problem)
        found = [ConvFormulation(rewritten, casts=casts)]
        if problem.op == WGRAD:
            slices = [s for s in SLICES if s == 1 or problem.implicit_gemm[2] >= s * 256]
            if rewritten.d.dtype is CutlassDtype.F32 or _unwidened(rewritten):
                found += [ConvFormulation(rewritten, s, casts) for s in slices[1:]]
            else:
                result = dataclasses.replace(rewritten.d, dtype=CutlassDtype.F32)
                widened = dataclasses.replace(rewritten, c=None, d=result)
                found += [ConvFormulation(widened, s, casts, wide=True) for s in slices]
        if self._product is not None and not casts:
            # A matrix that a convolution's kernel loads as C is preferably loaded so by the GEMM's.
            groups = self._product.formulations[:1] if problem.source is not None else self._product.formulations
            products = (product for group in groups for product in group if not (product.divided or product.copied))
            found += [ConvFormulation(rewritten, product=product) for product in products]
        return found

    def _multiplied(self, problem: ConvProblem) -> tuple[ConvProblem, bool]:
        """The problem that a kernel computes, and whether its operands have to be cast."""
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
        """The formulations of two images."""
        return ConvSearch(of_two_images(self.problem), self.device, self.arch, batch_invariant=True).formulations

    def op_of(self, formulation: ConvFormulation) -> str:
        """The convolution's own, or that of GEMM."""
        return self.op if formulation.product is None else GEMM

    def traits(self, formulation: ConvFormulation) -> Hashable:
        """Those of the convolution and of the product, and whether the caller has a tree."""
        product = self._product
        of_product = None if product is None or formulation.product is None else product.traits(formulation.product)
        return formulation.traits, of_product, self.problem.fusion is not None

    def matches(self, key: KernelKey, formulation: ConvFormulation) -> Status:
        if formulation.product is not None and self._product is not None:
            return self._product.matches(key, formulation.product)
        return convolves(key, formulation.traits)

    def supports(self, key: KernelKey, formulation: ConvFormulation) -> Status:
        if formulation.product is not None and self._product is not None:
            return self._product.supports(key, formulation.product)
        return self.matches(key, formulation)

    def extents(self, formulation: ConvFormulation) -> tuple[int, ...]:
        """Those of the product, or of the convolution without casts of the operands."""
        if formulation.product is not None:
            return formulation.product.extents
        return formulation.problem.extents(formulation.split_k, wide=formulation.wide)

    def cells(self, arch: SmArch, group: Sequence[ConvFormulation]) -> Iterable[Iterable[KernelKey]]:
        """The matrix's cells; where none serves, keys that differ from one in an option that every cell compiles with.

        The matrix lists the kernels that are worth building ahead of time.
        """
        keys, problem = search.matrix(self.op, arch), group[0].problem

        def varied(key: KernelKey) -> KernelKey:
            if key.epilogue == LINEAR:
                key = with_epilogue(key, problem.epilogue, problem.d.dtype if problem.fusion else key.d)
            unity = key.stride_support == "strided" and problem.geometry.stride == (1, 1)
            return dataclasses.replace(key, stride_support="unity") if unity else key

        def others() -> Iterator[KernelKey]:
            yield from filter(supports, dict.fromkeys(map(varied, keys)))

        def first() -> Iterator[KernelKey]:
            products = {member.product.problem: member.product for member in group if member.product is not None}
            of_gemm: list[KernelKey] = []
            if self._product is not None:
                for product in products.values():
                    of_gemm += next(iter(self._product.cells(arch, [product])))
            # The matrix has no cells with trees: where the GEMM has one, the time decides among all.
            of_tree = bool(of_gemm) and self.problem.fusion is not None
            yield from (*keys, *(others() if of_tree else ()), *of_gemm)

        yield first()
        yield others()

    def helpers(self, formulation: ConvFormulation) -> Sequence[KernelSearch[Any]]:
        """Casts of the operands and of the result."""
        rewritten, casts = formulation.problem, []
        if formulation.casts:
            casts = [(self.problem.a.dtype, rewritten.a.dtype), (self.problem.b.dtype, rewritten.b.dtype)]
        if formulation.wide or formulation.apart:
            casts.append((CutlassDtype.F32, self.problem.d.dtype))
        return [sums(*types, self.device, self.arch) for types in dict.fromkeys(casts)]

    def epilogue_of(self, candidate: Candidate[ConvFormulation]) -> str:
        """That of the convolution, or of the product that it is put as."""
        formulation = candidate.formulation
        return (formulation.product or formulation).problem.epilogue

    def note(self, formulation: ConvFormulation) -> str:
        """The rewrite."""
        return f"a rewrite: {formulation.rewrite}" if formulation.rewrite else ""

    def reason(self) -> str:
        first, last = (group[0].problem for group in (self.formulations[0], self.formulations[-1]))
        # Bias and activation in the caller's terms, not as a tree.
        text = _refusal(last if first.fusion else first, self.closest(self.arch or devices.require_arch(self.device)))
        if self.batch_invariant:
            text += "; with batch_invariant it has those that serve any number of such images alike"
        unwidened = _unwidened(last) if self.op == WGRAD else ""
        return f"{text}; nor is it computed in float32: {unwidened}" if unwidened else text

    def nearest(self, arch: SmArch, best: Candidate[ConvFormulation] | None = None) -> KernelKey | None:
        """The key of the best candidate; without one, of the best that computes the convolution as it stands."""
        best = best or self._plainest()
        return super().nearest(arch, best)

    def refusal(self, best: Candidate[ConvFormulation] | None, remedy: str) -> CutlassError:
        plainest = None if best is None else self._plainest()
        if best is not None and plainest is None and self._product is not None:
            return self._product.refusal(None, remedy)
        return super().refusal(plainest, "" if plainest is None else select.remedy(self, plainest.key))

    def _plainest(self) -> Candidate[ConvFormulation] | None:
        """The best of the matrix's convolutions; without slices of K and in the result's own type if there is one."""
        found = [cell for cell in select.rank_cells(self) if cell.key.op == self.op]
        as_it_stands = (cell for cell in found if cell.formulation.split_k == 1 and not cell.formulation.wide)
        return next(as_it_stands, next(iter(found), None))


def _check(problem: ConvProblem) -> None:
    """Refuses empty results, element types that nothing multiplies, and a C with strides of its own."""
    g = problem.geometry
    if 0 in problem.d.shape or g.n == 0:
        raise UnsupportedError(
            f"a convolution of {g.n} images to shape {problem.d.shape} is empty: there is nothing to plan"
        )
    # fp8 whatever the operation: those that have no kernels are rewritten.
    op, math_mode = (FPROP, FAST) if problem.a.dtype in FP8_TYPES else (problem.op, problem.math)
    tree = problem.fusion is not None
    require(conv_types(op, problem.a.dtype, problem.b.dtype, problem.d.dtype, math_mode, tree=tree))
    # Kernels have one set of strides for C and D.
    if problem.c is not None and pixel_strides(problem.c) != pixel_strides(problem.d):
        raise UnsupportedError(
            f"c has strides {problem.c.strides} and the result {problem.d.strides} (NHWC order): kernels read c as "
            "they write the result; copy c"
        )


def _as_gemm(problem: ConvProblem) -> GemmProblem | None:
    """The GEMM that a convolution with a filter of one tap is, without its tree.

    None for any other convolution, and where pixels have gaps.
    """
    g = problem.geometry
    one_tap = g.r == g.s == g.groups == 1 and g.stride == (1, 1) and g.padding == ((0, 0), (0, 0))
    if not one_tap or problem.bias is not None or (problem.fusion is None and problem.epilogue != LINEAR):
        return None
    x, w, y = problem.images
    images = [x, y] if problem.c is None or problem.op == WGRAD else [x, y, problem.c]
    if not all(collapses(spec) for spec in images):
        return None

    def matrix(spec: MatrixSpec) -> MatrixSpec:
        """Pixels (or filters) by channels."""
        outer, rows, columns, channels = spec.shape
        column, _, outermost = pixel_strides(spec)
        leading = outermost if spec is w or (problem.op == WGRAD and spec is problem.c) else column
        return MatrixSpec((outer * rows * columns, channels), (leading, 1), spec.dtype, spec.alignment)

    def transposed(spec: MatrixSpec) -> MatrixSpec:
        return MatrixSpec(spec.shape[::-1], spec.strides[::-1], spec.dtype, spec.alignment)

    a, b, d = matrix(problem.a), matrix(problem.b), matrix(problem.d)
    if problem.op == FPROP:
        b = transposed(b)
    elif problem.op == WGRAD:
        a = transposed(a)
    c = None if problem.c is None else matrix(problem.c)
    return GemmProblem(a, b, c, d, problem.math, problem.device)


def _refusal(problem: ConvProblem, closest: str) -> str:
    """Why no cell of the matrix serves a problem; `closest` as of its search."""
    g, types = problem.geometry, f"{problem.a.dtype.value} ({problem.math}) to {problem.d.dtype.value}"
    refusal = (
        f"no kernel of the matrix serves this {problem.op}: {types}, "
        f"epilogue {problem.epilogue}, {g.groups} groups of {g.c // g.groups} to {g.k // g.groups} channels, stride "
        f"{g.stride}, dilation {g.dilation}"
    )
    if problem.op == DGRAD and g.stride != (1, 1) and g.dilation != (1, 1):
        refusal += ": kernels of strided dgrad have no dilation"
    elif not (packed(problem.d) if problem.op == WGRAD else collapses(problem.d)):
        refusal += f": the pixels of the result, of strides {problem.d.strides} (NHWC order), are not evenly spaced"
    elif problem.fusion is not None:
        program = split(problem.epilogue)[1]
        lowered = supports_tree(program, accumulator(problem.a.dtype), problem.d.dtype)
        unlike = unlike_a_bias(problem.fusion, problem.d.dtype) if problem.c is None else ""
        refusal += f": {unlike}{lowered.reason or TREES}"
    else:
        refusal += f": {closest}"
    return refusal


def _unwidened(problem: ConvProblem) -> str:
    """Why a wgrad cannot be computed in float32 and cast; empty where it can, or is in float32 anyway."""
    if problem.d.dtype is CutlassDtype.F32:
        return ""
    if problem.c is not None and (not problem.c.dense or problem.c.alignment % CAST_ALIGNMENT):
        return f"a cast adds a c that is dense and aligned to {CAST_ALIGNMENT} bytes"
    if not problem.d.dense or problem.d.alignment % CAST_ALIGNMENT:
        return f"a cast writes what is dense and aligned to {CAST_ALIGNMENT} bytes"
    return ""
