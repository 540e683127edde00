"""Kernels of GEMM: which serve a problem, their cost and arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ...arrays import fp4
from ...errors import CutlassError, KernelNotFoundError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.epilogue import lower
from ...generator.families import gemm_sm80, gemm_sm90
from ...generator.families.base import DEFAULT
from ...generator.key import ROW, KernelKey, shared_memory
from ...generator.matrix import cells
from ...generator.rules import NOT_GATED, gemm_types, supports_layouts, supports_tree
from ...pipeline import devices, estimate, select
from ...pipeline.problem import GemmFormulation, GemmProblem, MatrixSpec, flipped
from ...pipeline.search import Candidate, KernelSearch, Rule
from . import divided, transposed
from .search import GemmCandidate, ProductSearch, cells_of

OP = "gemm"

_OUTER = str.maketrans("ab", "MN")
"""The extent of an operand beside K."""

_ROWS = 16
"""Rows that a problem of one row is given to settle its reduction: any vector access of a column fits."""


class GemmSearch(ProductSearch):
    """Kernels for a GEMM.

    One with few results and a long K may be put to kernels that divide K, if it has no scales and no tree: see
    `divided`.
    """

    op = OP

    def put(self, problem: GemmProblem) -> Sequence[GemmFormulation]:
        found = transposed.with_copies(super().put(problem), self.device)
        if self.batch_invariant:
            return found
        return [*found, *transposed.with_copies(divided.formulations(problem), self.device)]

    def rules(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        divides = not formulation.divided or gemm_sm80.divides(key) or gemm_sm90.divides(key)
        yield divides, "it divides K into no slices side by side"
        yield from super().rules(key, formulation)

    def rules_of_extents(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        yield from super().rules_of_extents(key, formulation)
        fills = not formulation.divided or bool(estimate.slices(key, formulation.extents, self.device))
        yield fills, "no slices of K fill the GPU"

    def helpers(self, formulation: GemmFormulation) -> Sequence[KernelSearch[Any]]:
        """The kernel that adds up slices, or that copies an operand."""
        helpers = []
        if formulation.copied is not None:
            helpers.append(transposed.helper(self.problem.a.dtype, self.device))
        if formulation.divided:
            helpers.append(divided.sums(self.problem.acc, self.problem.d.dtype, self.device))
        return helpers

    def of_many_rows(self) -> Sequence[Sequence[GemmFormulation]]:
        """The formulations, as if there were at least two rows: a single one leaves layouts and alignments open.

        A matrix of one column, which may be read in either layout, is read row by row, whatever the number of rows.
        """
        several = self._formulate([_with_rows(problem) if problem.m == 1 else problem for problem in self._problems])

        def layouts(formulation: GemmFormulation) -> tuple[str, str]:
            if not formulation.swapped:
                return formulation.layout_d, formulation.layout_a
            return flipped(formulation.layout_d), flipped(formulation.layout_b)

        groups = []
        for group in several:
            preferred = max(map(layouts, group), default=None)  # r after c
            groups.append([formulation for formulation in group if layouts(formulation) == preferred])
        return groups

    def note(self, formulation: GemmFormulation) -> str:
        """Whether K is divided, or the operands are swapped."""
        if formulation.divided:
            notes = ["K is divided into slices, which another kernel adds up"]
        elif formulation.swapped and formulation.layout_d == ROW:
            return "D is column-major: computed as D^T = B^T A^T, which costs nothing"
        else:
            notes = ["computed as D^T = B^T A^T, whose tiles fit better"] if formulation.swapped else []
        if formulation.copied is not None:
            along = "K" if transposed.lies_along_k(formulation) else formulation.copied.operand.translate(_OUTER)
            notes.append(f"{formulation.copied.operand} is copied first, contiguous along {along}")
        return "; ".join(notes)

    def reason(self) -> str:
        return str(self.refusal(None, ""))

    def refusal(self, best: GemmCandidate | None, remedy: str) -> CutlassError:
        problem, possible = self.problem, [variant for variant in self.formulations[-1] if variant.layout_d == ROW]
        tree = lower.has_tree(problem.epilogue)
        types = gemm_types(problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math, tree=tree)
        if not types:
            return UnsupportedError(types.reason)
        target = self.arch or devices.require_arch(self.device)
        if not possible:
            return UnsupportedError(
                "c and out have different layouts, and kernels read one as they write the other: copy c"
            )
        of_layouts = (supports_layouts("sm80", problem.a.dtype, put.layout_a, put.layout_b) for put in possible)
        layouts = max(of_layouts, key=bool)
        wanted = self.nearest(target)
        if wanted is None:
            of_fp4 = fp4.refusal(problem, possible, target) if problem.a.dtype is fp4.FP4 else ""
            gates = not lower.is_gated(problem.epilogue) or cells_of(OP, target, problem)
            reason = (
                ("" if gates else NOT_GATED.reason)
                or of_fp4
                or _tree_refusal(problem, possible)
                or layouts.reason
                or self.closest(target)
            )
            return UnsupportedError(f"no kernel of the matrix serves this problem on {target.value}: {reason}")
        return KernelNotFoundError(
            f"no kernel in the table serves {problem.a.dtype.value} ({problem.math}) -> {problem.d.dtype.value}, "
            f"layouts {wanted.layout_a}{wanted.layout_b}{wanted.layout_d}, on {target.value}; {wanted.name} would: "
            f"{select.remedy(self, wanted)}"
        )

    def nearest(self, arch: SmArch, best: GemmCandidate | None = None) -> KernelKey | None:
        """The matrix's best cell for the problem on an arch, whether or not it is built; `default` before `full`."""
        problem = self.problem if best is None else best.formulation.problem
        group = next((variants for variants in self.formulations if variants and variants[0].problem == problem), ())
        of_tree = bool(lower.split(problem.epilogue)[1])
        keys = ((DEFAULT, key) for key in cells_of(OP, arch, problem)) if of_tree else cells([arch])
        found = [
            (
                max(tier, DEFAULT),
                estimate.launch(key, variant.extents, self.device, shared_memory(key)).seconds,
                key.name,
                key,
            )
            for tier, key in keys
            for variant in group
            if self.supports(key, variant)
        ]
        return min(found)[3] if found else None


def _with_rows(problem: GemmProblem) -> GemmProblem:
    """A problem of one row with some more, whose strides are those that the one row tells, and their multiples."""

    def spec(one: MatrixSpec) -> MatrixSpec:
        columns, (row_stride, column_stride) = one.shape[-1], one.strides[-2:]
        if columns == 1 or column_stride == 1:
            strides = (max(row_stride, columns), 1)
        else:
            strides = (1, column_stride * -(-_ROWS // column_stride))
        return dataclasses.replace(one, shape=(*one.shape[:-2], _ROWS, columns), strides=(*one.strides[:-2], *strides))

    c = None if problem.c is None else spec(problem.c)
    return dataclasses.replace(problem, a=spec(problem.a), c=c, d=spec(problem.d))


def _tree_refusal(problem: GemmProblem, possible: Sequence[GemmFormulation]) -> str:
    """Why no kernel takes the problem's tree, whatever the layouts of A, B and D; empty if that is not known."""
    program = lower.split(problem.epilogue)[1]
    if not program:
        return ""
    if all(variant.swapped for variant in possible):
        try:
            lower.swapped(program)
        except ValueError as error:
            return str(error)
    return supports_tree(program, problem.acc, problem.d.dtype).reason


def nonempty(problem: GemmProblem) -> GemmProblem:
    """The problem itself, or with K = 0 one that any kernel of its types can read: its operands are never touched."""
    if problem.k != 0:
        return problem
    wide = 128 // problem.a.dtype.bits
    a = MatrixSpec((problem.m, wide), (wide, 1), problem.a.dtype)
    b = MatrixSpec((wide, problem.n), (1, wide), problem.b.dtype)
    return dataclasses.replace(problem, a=a, b=b)


def product_args(formulation: GemmFormulation, candidate: Candidate[Any]) -> dict[str, int]:
    """A kernel's arguments for a product, except pointers, scalars and the number of batches: fields by name."""
    strides = formulation.batch_strides
    return {
        "m": formulation.m, "n": formulation.n, "k": formulation.k, "lda": formulation.lda, "ldb": formulation.ldb,
        "ldc": formulation.ldc, "ldd": formulation.ldd, "batch_stride_a": strides[0], "batch_stride_b": strides[1],
        "batch_stride_c": strides[2], "batch_stride_d": strides[3], "split_k": candidate.split_k,
        "swizzle": candidate.swizzle, "raster": candidate.raster, "width": candidate.width,
    }  # fmt: skip
