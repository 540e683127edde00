"""A GEMM as kernels are chosen for it: its operands, its batches, and the ways to formulate it for a kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from ...arrays.layouts import MatrixSpec, View, broadcast_to, vector_elements, views
from ...epilogue.fusion import Fusion, source_number, source_of
from ...errors import UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import epilogue_id, with_source
from ...generator.key import ROW, Triple, flipped
from ...generator.rules import accumulator

MAX_OUTER = 4096

_TMA_ALIGNMENT = 16

MOST = 2**62
"""The limit of the extents of the model, which counts with 64 bits; no memory is as large."""


@dataclass(frozen=True)
class GemmProblem:
    """D = alpha A B + beta C over batches, with the layouts of the caller's arrays.

    Attributes:
        a, b, c, d: the caller's arrays; batch dimensions of a, b and c broadcast to those of d.
        epilogue: id of the kernel key's epilogue.
        scale_granularity: rows of A, columns of B and elements of K that share a block scale; zeros without any.
        scale_type: of block scales, as in the kernel key.
        quantized: whether scale_d is an array, or amax is wanted.
        operands: the operands of an epilogue tree beside C and D, as matrices over D: dimensions along which an operand
            does not vary have stride 0.
    """

    a: MatrixSpec
    b: MatrixSpec
    c: MatrixSpec | None
    d: MatrixSpec
    math: str
    device: int
    epilogue: str = "lc"
    scale_granularity: Triple = (0, 0, 0)
    scale_type: str = ""
    operands: tuple[MatrixSpec, ...] = ()
    quantized: bool = False

    @property
    def m(self) -> int:
        """Rows of D."""
        return self.d.shape[-2]

    @property
    def n(self) -> int:
        """Columns of D."""
        return self.d.shape[-1]

    @property
    def k(self) -> int:
        """Columns of A, rows of B."""
        return self.a.shape[-1]

    @property
    def batch(self) -> int:
        """Number of products."""
        return math.prod(self.d.shape[:-2])

    @property
    def acc(self) -> CutlassDtype:
        """The accumulator's element type."""
        return accumulator(self.a.dtype)


def over_batches(problem: GemmProblem) -> list[MatrixSpec]:
    """A, B, C (D where there is none), D and the operands of a tree, each with the batch dimensions of D."""
    batches = problem.d.shape[:-2]
    named = [(problem.a, "a"), (problem.b, "b"), (problem.c or problem.d, "c"), (problem.d, "out")]
    named += [(spec, "an operand of the epilogue") for spec in problem.operands]
    return [spec if len(spec.shape) == 2 and not batches else broadcast_to(spec, batches, name) for spec, name in named]


@dataclass(frozen=True)
class Batches:
    """Batch dimensions as one loop of a single stride per operand, repeated for outer offsets (in elements).

    Operands are A, B, C, D, then those of an epilogue tree.
    """

    count: int
    strides: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]


def collapse_batches(problem: GemmProblem) -> Batches:
    """Merges batch dimensions as far as one stride per operand allows; the others become outer launches."""
    batches, specs = problem.d.shape[:-2], over_batches(problem)
    if not batches:
        zeros = (0,) * len(specs)
        return Batches(1, zeros, (zeros,))
    dims = [(extent, tuple(spec.strides[i] for spec in specs)) for i, extent in enumerate(batches) if extent != 1]
    count, strides = 1, (0,) * len(specs)
    while dims:
        extent, outer = dims[-1]
        if count != 1 and any(o != s * count for o, s in zip(outer, strides, strict=True)):
            break
        if count == 1:
            strides = outer
        count *= extent
        dims.pop()
    launches = math.prod(extent for extent, _ in dims)
    if launches > MAX_OUTER:
        raise UnsupportedError(
            f"batch strides {[spec.strides[:-2] for spec in specs]} of a, b, c and out cannot be collapsed into one: "
            f"{launches} launches would be needed, at most {MAX_OUTER} are made; make the operands contiguous"
        )
    offsets = [
        tuple(sum(i * steps[x] for i, (_, steps) in zip(index, dims, strict=True)) for x in range(len(specs)))
        for index in itertools.product(*(range(extent) for extent, _ in dims))
    ]
    return Batches(count, strides, tuple(offsets))


@dataclass(frozen=True)
class Copy:
    """A copy of the caller's `a` or `b`, made before the product.

    Attributes:
        operand: `a` or `b`.
        transposed: whether the copy has the other layout, which kernels read only, or faster; otherwise its rows are
            padded to whole vectors, which TMA reads.
        leading, batch_stride: of the operand, in elements.
        size: bytes of all batches of the copy.
    """

    operand: str
    transposed: bool
    leading: int
    batch_stride: int
    size: int


class GemmFormulation(NamedTuple):
    """A GEMM as a kernel computes it: each of A, B and D row- or column-major.

    Attributes:
        swapped: whether the kernel computes D^T = B^T A^T, so that its A is the caller's B, transposed.
        layout_a, layout_b, layout_d: as in a kernel's key.
        lda, ldb, ldc, ldd, batch_strides: in elements; the last of A, B, C and D.
        align_a, align_b, align_d: elements.
        begins_a, begins_b: elements to which the first rows of A and B are aligned, in all batches.
        problem: the GEMM, with the epilogue of the kernel's key.
        divided: whether the kernel divides K into slices in the accumulator's type, which another kernel adds up.
        slices: the number of slices of K where it is fixed; if the kernel does not divide K, it adds them up itself.
        copies: those that the kernel reads in place of operands; the formulation has their layouts, leading dimensions
            and alignments.
        extended: whether zeros follow K in both operands' copies: `k` is more than the problem's.
    """

    swapped: bool
    m: int
    n: int
    k: int
    batch: int
    layout_a: str
    layout_b: str
    layout_d: str
    lda: int
    ldb: int
    ldc: int
    ldd: int
    batch_strides: tuple[int, ...]
    align_a: int
    align_b: int
    align_d: int
    begins_a: int
    begins_b: int
    problem: GemmProblem
    batches: Batches
    divided: bool = False
    slices: int = 0
    copies: tuple[Copy, ...] = ()
    extended: bool = False

    @property
    def dtype_d(self) -> CutlassDtype:
        """The element type that the kernel stores."""
        return self.problem.acc if self.divided else self.problem.d.dtype

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents from which the model estimates its time; see `estimate.Extents`."""
        copied = 0
        for copy in self.copies:
            copied = min(copied + copy.size, MOST)
        divided = self.slices or int(self.divided)
        extents = self.m, self.n, self.k, self.batch, self.lda, self.ldb, divided, copied
        begins = (self.begins_a, self.begins_b) if min(self.begins_a, self.begins_b) < self.vector else ()
        return (*extents, 0, len(self.copies), *begins) if len(self.copies) > 1 or begins else extents

    @property
    def vector(self) -> int:
        """Elements of a vector access, at most."""
        return 8 * _TMA_ALIGNMENT // self.problem.a.dtype.bits


def formulations(problem: GemmProblem) -> list[GemmFormulation]:
    """All formulations of the problem without slices and copies, those with a row-major D first."""
    found, batches = [], collapse_batches(problem)
    views_c = views(problem.c, "c") if problem.c is not None else None
    for view_d, view_a, view_b in itertools.product(
        views(problem.d, "out"), views(problem.a, "a"), views(problem.b, "b")
    ):
        alike = [view_d] if views_c is None else [view for view in views_c if view.layout == view_d.layout]
        if not alike:
            continue
        align_d = _alignment(problem.d, view_d, batches, 3)
        if problem.c is not None:
            align_d = min(align_d, _alignment(problem.c, alike[0], batches, 2))
        as_it_is = GemmFormulation(
            swapped=False, m=problem.m, n=problem.n, k=problem.k, batch=batches.count,
            layout_a=view_a.layout, layout_b=view_b.layout, layout_d=view_d.layout,
            lda=view_a.leading, ldb=view_b.leading, ldc=alike[0].leading, ldd=view_d.leading,
            batch_strides=batches.strides[:4], align_a=_alignment(problem.a, view_a, batches, 0),
            align_b=_alignment(problem.b, view_b, batches, 1), align_d=align_d,
            begins_a=_alignment(problem.a, None, batches, 0), begins_b=_alignment(problem.b, None, batches, 1),
            problem=problem, batches=batches,
        )  # fmt: skip
        found += [as_it_is, _swapped(as_it_is)]
    return sorted(found, key=lambda formulation: formulation.layout_d != ROW)


def _swapped(of: GemmFormulation) -> GemmFormulation:
    """D^T = B^T A^T on the same memory."""
    a, b, *others = of.batch_strides
    return of._replace(
        swapped=True, m=of.n, n=of.m, lda=of.ldb, ldb=of.lda, batch_strides=(b, a, *others), align_a=of.align_b,
        align_b=of.align_a, begins_a=of.begins_b, begins_b=of.begins_a, layout_a=flipped(of.layout_b),
        layout_b=flipped(of.layout_a), layout_d=flipped(of.layout_d),
    )  # fmt: skip


def _alignment(spec: MatrixSpec, view: View | None, batches: Batches, index: int) -> int:
    """Elements that every vector access of the matrix may span, given its address, strides and extent.

    Without a view, of the first rows (or columns) of all batches alone.
    """
    elements = []
    if view is not None:
        elements = [view.leading, spec.shape[-1] if view.layout == ROW else spec.shape[-2]]
    if batches.count > 1:
        elements.append(batches.strides[index])
    elements.extend(offset[index] for offset in batches.offsets)
    return vector_elements(spec, elements)


def fused_problems(problem: GemmProblem, fusion: Fusion, base: str) -> list[GemmProblem]:
    """The problem with a tree as its epilogue, in the forms that kernels compute, preferred ones first.

    The base of the epilogue is `lc`, or `scaled` where scales are arrays.
    """
    program, number = fusion.tree.program, None
    if problem.c is None:
        number = source_of(fusion, lambda array: array.dtype is problem.d.dtype and _like_d(array.spec, problem.d))
    programs = [program] if number is None else [with_source(program, number), program]
    return [fused_problem(problem, fusion, epilogue_id(base, program)) for program in programs]


def fused_problem(problem: GemmProblem, fusion: Fusion | None, epilogue: str) -> GemmProblem:
    """The problem with its tree, if any, for the epilogue of a kernel's key."""
    if fusion is None:
        return problem
    specs = tuple(operand.spec for operand in fusion.arrays)
    number = source_number(epilogue)
    c = problem.c if number is None else fusion.inputs[number].spec
    return dataclasses.replace(problem, epilogue=epilogue, operands=specs, c=c)


def _like_d(spec: MatrixSpec, d: MatrixSpec) -> bool:
    """Whether a matrix can be loaded as the C operand: it has the layout of D, with the alignment of TMA."""
    contiguous = (spec.strides[-1] == 1, spec.strides[-2] == 1)
    leading = max(spec.strides[-2:])
    aligned = spec.alignment % _TMA_ALIGNMENT == 0 and leading * spec.dtype.bits % (8 * _TMA_ALIGNMENT) == 0
    return contiguous == (d.strides[-1] == 1, d.strides[-2] == 1) and True in contiguous and aligned
