"""Kernels of GEMM, and of other operations whose problems are GEMMs: their conditions, and their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from ...arrays import fp4
from ...arrays.layouts import MatrixSpec
from ...errors import CutlassError, KernelNotFoundError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue import lower
from ...generator.epilogue.common import common_of, form_of, wider
from ...generator.families import (
    gemm_few_sm90,
    gemm_ragged_sm80,
    gemm_realigned_sm90,
    gemm_sm80,
    gemm_sm90,
    gemm_unaligned_sm80,
)
from ...generator.families.base import DEFAULT
from ...generator.key import ANYWHERE, COLUMN, RAGGED, REALIGNED, ROW, UNALIGNED, KernelKey, flipped, shared_memory
from ...generator.matrix import cells, is_fp4_supported, supports, with_epilogue
from ...generator.rules import FEW, FP8_TYPES, NOT_GATED, SLICED, Status, gemm_types, supports_layouts, supports_tree
from ...pipeline import devices, estimate, select
from ...pipeline.devices import Device
from ...pipeline.search import OTHER_OP, Candidate, KernelSearch, Rule, checked, matrix
from . import helpers
from .problem import GemmFormulation, GemmProblem, formulations

OP = "gemm"

GemmCandidate: TypeAlias = "Candidate[GemmFormulation]"

A_SETTLED, B_SETTLED = 1, 2  # kernel_abi.h

STREAM_K_SLICES = (1, 2, 4, 8)

IN_ORDER = 0
"""The swizzle of kernels for few rows that add up in the order of K (gemm_few_sm90.h)."""

_ROWS = 16
"""Rows that a problem of one row is extended to for its reduction: a multiple of every vector access."""


class ProductSearch(KernelSearch[GemmFormulation]):
    """Kernels of an operation whose problems are GEMMs, with the epilogue of a kernel's key.

    Of several equivalent problems, such as one with an input of a tree loaded as C, the first are preferred.
    """

    def __init__(
        self,
        problems: GemmProblem | Sequence[GemmProblem],
        device: Device,
        arch: SmArch | None = None,
        *,
        batch_invariant: bool = False,
        bound: bool = False,
    ) -> None:
        """Formulates the problem. `bound`: the plan keeps B, which launches may read while the one before runs."""
        self.device, self.arch, self.batch_invariant, self.bound = device, arch, batch_invariant, bound
        self._problems = [problems] if isinstance(problems, GemmProblem) else problems
        self.problem = self._problems[-1]
        self.formulations = self._formulate_all(self._problems)

    def formulate(self, problem: GemmProblem) -> list[Sequence[GemmFormulation]]:
        """The formulations of a problem for the operation's kernels, in groups."""
        return [formulations(problem)]

    def _formulate_all(self, problems: Sequence[GemmProblem]) -> list[Sequence[GemmFormulation]]:
        """The formulations of each problem; problems before the last are left out where kernels cannot read them."""
        groups: list[Sequence[GemmFormulation]] = []
        for problem in problems[:-1]:
            with contextlib.suppress(UnsupportedError):
                groups += self.formulate(problem)
        return [*groups, *self.formulate(problems[-1])]

    def matches(self, key: KernelKey, formulation: GemmFormulation) -> Status:
        return checked(self.rules(key, formulation))

    def supports(self, key: KernelKey, formulation: GemmFormulation) -> Status:
        return checked(itertools.chain(self.rules(key, formulation), self.rules_of_extents(key, formulation)))

    def rules(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        """The conditions on a kernel that follow from types, layouts and alignments."""
        problem, swapped = formulation.problem, formulation.swapped
        first, second = (problem.b, problem.a) if swapped else (problem.a, problem.b)
        yield key.op == self.op, OTHER_OP.reason
        types = key.a is first.dtype and key.b is second.dtype and key.d is formulation.dtype_d
        yield types, "its element types differ"
        # `fast` allows fast accumulation, and does not require it.
        yield key.math in (problem.math, "default" if problem.math == "fast" else ""), "its math mode differs"
        if lower.is_common(key.epilogue):
            follows = key.epilogue in _common(problem.epilogue, key.a, swapped=swapped) and _has_scales(problem)
        else:
            follows = key.epilogue in (*_epilogues(problem.epilogue, swapped=swapped), wider(problem.epilogue))
        yield follows, "its epilogue differs"
        granularity = problem.scale_granularity
        scales = key.scale_granularity == granularity and key.scale_type == problem.scale_type
        yield scales, "its scales differ"
        alike = not swapped or granularity[0] == granularity[1]
        yield alike, "blocks of scales are not alike for A and B, which cannot change places then"
        layouts = formulation.layout_a, formulation.layout_b, formulation.layout_d
        yield (key.layout_a, key.layout_b, key.layout_d) == layouts, "its layouts differ"
        unaligned = formulation.align_a % key.align_a or formulation.align_b % key.align_b
        aligned = not (unaligned or formulation.align_d % key.align_d)
        yield aligned, "its alignment is wider than that of the operands"
        vector = formulation.vector
        whole = formulation.align_a % vector == 0 and formulation.align_b % vector == 0
        yield key.mainloop not in ANYWHERE or not whole, "it is for operands that TMA does not read"

    def rules_of_extents(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        """The conditions that follow from the extents, on a kernel that meets `rules`."""
        suited = estimate.kernel_of(key).is_for(formulation.m, formulation.n, formulation.k)
        is_for_few = key.mainloop in (FEW, RAGGED)
        yield suited, "it is for few rows or columns of D" if is_for_few else "K is longer than it counts"

    def extents(self, formulation: GemmFormulation) -> tuple[int, ...]:
        bits = settled_bits(formulation) if self.bound else 0
        extents = formulation.extents
        return (*extents[:8], bits, *extents[9:]) if bits else extents

    def traits(self, formulation: GemmFormulation) -> Hashable:
        problem = formulation.problem
        return (
            problem.a.dtype, problem.b.dtype, formulation.dtype_d, problem.math, problem.epilogue,
            problem.scale_granularity, problem.scale_type, _has_scales(problem), formulation.swapped,
            formulation.divided, formulation.slices > 0, formulation.extended,
            formulation.layout_a, formulation.layout_b, formulation.layout_d,
            formulation.align_a, formulation.align_b, formulation.align_d,
        )  # fmt: skip

    def cells(self, arch: SmArch, group: Sequence[GemmFormulation]) -> Iterable[Iterable[KernelKey]]:
        if group:
            yield cells_of(self.op, arch, group[0].problem)

    def epilogue_of(self, candidate: GemmCandidate) -> str:
        return candidate.formulation.problem.epilogue

    def launches(self, candidate: GemmCandidate) -> Iterable[GemmCandidate]:
        stream_k = candidate.key.scheduler == "streamk"
        extents = candidate.formulation.extents
        whole = self.batch_invariant and not candidate.formulation.slices
        of_model = (1,) if whole else estimate.slices(candidate.key, extents, self.device)
        slices = STREAM_K_SLICES if stream_k else of_model
        made = super().launches(candidate)
        if candidate.key.mainloop == RAGGED:
            tiles = _ragged_tiles(candidate)
            made = (dataclasses.replace(candidate, swizzle=few, width=width) for few, width in tiles)
        if candidate.key.mainloop in (UNALIGNED, REALIGNED):
            made = (dataclasses.replace(candidate, width=width) for width in self.widths(candidate))
        if candidate.key.mainloop == FEW:
            shares = (IN_ORDER,) if self.batch_invariant else gemm_few_sm90.shares(candidate.key)
            pairs = itertools.product(shares, self.widths(candidate))
            made = (dataclasses.replace(candidate, swizzle=share, width=width) for share, width in pairs)
        return (dataclasses.replace(launch, split_k=count) for launch in made for count in slices)

    def widths(self, candidate: GemmCandidate) -> Sequence[int]:
        if candidate.key.mainloop == FEW:
            return gemm_few_sm90.widths(candidate.key, candidate.formulation.m)
        if candidate.key.mainloop == RAGGED:
            return list(dict.fromkeys(width for _, width in _ragged_tiles(candidate)))
        if candidate.key.mainloop == UNALIGNED:
            return gemm_unaligned_sm80.WIDTHS
        if candidate.key.mainloop == REALIGNED:
            return gemm_realigned_sm90.WIDTHS
        return gemm_sm90.widths(candidate.key) or super().widths(candidate)

    def least(self, candidate: GemmCandidate) -> float:
        return estimate.least(candidate.key, self.extents(candidate.formulation), self.device)


class GemmSearch(ProductSearch):
    """Kernels for a GEMM, which may divide K or read a transposed copy (`helpers`)."""

    op = OP

    def formulate(self, problem: GemmProblem) -> list[Sequence[GemmFormulation]]:
        """In one group; of a batch-invariant problem of long K those in slices come before it."""
        groups = super().formulate(problem)
        if not self.batch_invariant:
            groups[0] = [*groups[0], *helpers.divided(problem)]
        elif (slices := helpers.fixed_slices(problem, self.device)) > 1:
            one_by_one = [formulation._replace(slices=slices) for formulation in groups[0]]
            groups.insert(0, [*one_by_one, *helpers.divided(problem, slices)])
        # Records of tuning have the numbers of formulations: those with copies come last.
        return [helpers.with_copies(group, self.device, batch_invariant=self.batch_invariant) for group in groups]

    def slices(self, formulation: GemmFormulation) -> int:
        return formulation.slices or 1

    def rules(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        divides = not formulation.divided or gemm_sm80.divides(key) or gemm_sm90.divides(key)
        yield divides, "it divides K into no slices side by side"
        # Those begin with what is left of K beyond whole steps: with zeros behind K the order of sums would be another.
        yield not (formulation.extended and key.generation == "sm80"), "it reads operands of this K as they lie"
        yield from super().rules(key, formulation)
        one_by_one = formulation.slices > 0 and not formulation.divided
        yield key.scheduler == SLICED or not one_by_one, "it adds up K as a whole"
        yield key.scheduler != SLICED or one_by_one, "it adds up K in slices, for batch-invariant calls of long K"

    def rules_of_extents(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        yield from super().rules_of_extents(key, formulation)
        fills = not formulation.divided or bool(estimate.slices(key, formulation.extents, self.device))
        yield fills, "no slices of K fill the GPU"

    def helpers(self, formulation: GemmFormulation) -> Sequence[KernelSearch[Any]]:
        dtype = self.problem.a.dtype
        found = [helpers.copier(dtype, copy.transposed, self.device) for copy in formulation.copies]
        if formulation.divided:
            found.append(helpers.sums(self.problem.acc, self.problem.d.dtype, self.device))
        return found

    def of_many_rows(self) -> Sequence[Sequence[GemmFormulation]]:
        """The formulations for several rows: those of a single row have further layouts and alignments.

        A matrix of one column, which has either layout, is read row by row, whatever the number of rows. Slices side by
        side serve some numbers of rows alone.
        """
        problems = [_with_rows(problem) if problem.m == 1 else problem for problem in self._problems]

        def layouts(formulation: GemmFormulation) -> tuple[str, str]:
            if not formulation.swapped:
                return formulation.layout_d, formulation.layout_a
            return flipped(formulation.layout_d), flipped(formulation.layout_b)

        groups = []
        for group in self._formulate_all(problems):
            preferred = max(map(layouts, group), default=None)  # r after c
            groups.append([each for each in group if layouts(each) == preferred and not each.divided])
        return groups

    def note(self, formulation: GemmFormulation) -> str:
        if formulation.divided:
            notes = ["K is divided into slices, which another kernel adds up"]
        elif formulation.swapped and formulation.layout_d == ROW:
            return "D is column-major: computed as D^T = B^T A^T, which costs nothing"
        else:
            notes = ["computed as D^T = B^T A^T, whose tiles fit better"] if formulation.swapped else []
        if formulation.slices and not formulation.divided:
            notes.append("K is added up in slices, one after the other")
        for copy in formulation.copies:
            *_, along_k = helpers.read_copy(formulation, copy)
            along = "K" if along_k else {"a": "M", "b": "N"}[copy.operand]
            how = f"contiguous along {along}" if copy.transposed else "into rows of whole vectors"
            notes.append(f"{copy.operand} is copied first, {how}")
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
            of_fp4 = _fp4_refusal(problem, possible, target) if problem.a.dtype is fp4.FP4 else ""
            gates = not lower.is_gated(problem.epilogue) or cells_of(self.op, target, problem)
            reason = (
                ("" if gates else NOT_GATED.reason)
                or of_fp4
                or _tree_refusal(problem, possible)
                or layouts.reason
                or self.closest(target)
            )
            return UnsupportedError(f"no kernel of the matrix serves this problem on {target.value}: {reason}")
        given = next(variant for variant in self.formulations[-1] if not variant.swapped)
        return KernelNotFoundError(
            f"no kernel in the table serves {problem.a.dtype.value} ({problem.math}) -> {problem.d.dtype.value}, "
            f"layouts {given.layout_a}{given.layout_b}{given.layout_d}, on {target.value}; {wanted.name} would: "
            f"{select.remedy(self, wanted)}"
        )

    def nearest(self, arch: SmArch, best: GemmCandidate | None = None) -> KernelKey | None:
        """The matrix's best cell for the problem on an arch, whether or not it is built; `default` before `full`."""
        problem = self.problem if best is None else best.formulation.problem
        groups = select.alike(self, self.formulations)
        group = [each for each in itertools.chain.from_iterable(groups) if each.problem == problem]
        of_tree = bool(lower.split(problem.epilogue)[1])
        keys = ((DEFAULT, key) for key in cells_of(self.op, arch, problem)) if of_tree else cells([arch])
        found = [
            (
                len(variant.copies),  # each takes a further kernel
                max(tier, DEFAULT),
                estimate.launch(key, variant.extents, self.device, shared_memory(key)).seconds,
                key.name,
                key,
            )
            for tier, key in keys
            for variant in group
            if self.supports(key, variant)
        ]
        return min(found)[-1] if found else None


def _with_rows(problem: GemmProblem) -> GemmProblem:
    """A problem of one row with more rows, in the layout that the strides of the one row imply."""

    def spec(row: MatrixSpec) -> MatrixSpec:
        columns, (row_stride, column_stride) = row.shape[-1], row.strides[-2:]
        if columns == 1 or column_stride == 1:
            strides = (max(row_stride, columns), 1)
        else:
            strides = (1, column_stride * -(-_ROWS // column_stride))
        return dataclasses.replace(row, shape=(*row.shape[:-2], _ROWS, columns), strides=(*row.strides[:-2], *strides))

    c = None if problem.c is None else spec(problem.c)
    return dataclasses.replace(problem, a=spec(problem.a), c=c, d=spec(problem.d))


def _fp4_refusal(problem: GemmProblem, formulations: Sequence[GemmFormulation], arch: SmArch) -> str:
    """Why no kernel of the matrix serves a product of fp4, and what would cure it; empty if that is not known."""
    if not is_fp4_supported(arch):
        return fp4.no_kernels(arch)
    if not problem.scale_type:
        return "fp4 is multiplied with block scales: scaling is 'nvfp4' or 'mxfp4'"
    along_k = [each for each in formulations if (each.layout_a, each.layout_b) == (ROW, COLUMN)]
    if not along_k:
        return (
            "fp4 is packed and read along K: A is row-major, bytes (M, K / 2), and B column-major, the transpose of "
            "bytes (N, K / 2)"
        )
    if not any(each.align_a % fp4.ALIGNMENT == 0 and each.align_b % fp4.ALIGNMENT == 0 for each in along_k):
        return (
            f"fp4 kernels read {fp4.ALIGNMENT} elements (16 bytes) at once: K (here {problem.k}), the strides of A and "
            "B and their addresses must be multiples of that; pad K with zeros before quantizing"
        )
    wide = 128 // problem.d.dtype.bits
    if not any(each.align_d % wide == 0 for each in along_k):
        return (
            f"fp4 kernels write 16 bytes at once: rows of D (and C) and their addresses must be multiples of {wide} "
            f"elements of {problem.d.dtype.value}; pad N (here {problem.n})"
        )
    return ""


def _tree_refusal(problem: GemmProblem, possible: Sequence[GemmFormulation]) -> str:
    """Why no kernel takes the problem's tree, in any layout of A, B and D; empty if the reason is another one."""
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
    """The problem; with K = 0 one that every kernel of its types accepts, whose operands are never read."""
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


def settled_bits(formulation: GemmFormulation) -> int:
    """The bits that tell a launch of a settled b; 0 where launches are not told of it."""
    if formulation.copies or formulation.divided:
        return 0
    return A_SETTLED if formulation.swapped else B_SETTLED


def _epilogues(epilogue: str, *, swapped: bool) -> tuple[str, ...]:
    """The ids of kernels' epilogues that compute a problem's epilogue."""
    base, program = lower.split(epilogue)
    if program and swapped:
        turned = None if lower.is_gated(epilogue) else _swapped(program)
        return () if turned is None else (lower.epilogue_id(base, turned),)
    # Without scales, a scaled epilogue computes the linear one.
    return (epilogue, lower.SCALED) if epilogue == lower.LINEAR else (epilogue,)


def _common(epilogue: str, a: CutlassDtype, *, swapped: bool) -> tuple[str, ...]:
    """The ids of the epilogues that compute it among several trees, chosen by arguments at launch."""
    form, found = form_of(epilogue), common_of(epilogue)
    # A row of D is a column of D^T.
    if form is None or found is None or (swapped and not form.turns):
        return ()
    return (found, lower.SCALED_COMMON) if a in FP8_TYPES else (found,)


@functools.cache
def _swapped(program: str) -> str | None:
    """The tree for D^T; None where it cannot be expressed."""
    try:
        return lower.swapped(program)
    except ValueError:
        return None


def _ragged_tiles(candidate: GemmCandidate) -> tuple[tuple[int, int], ...]:
    few = min(candidate.formulation.m, candidate.formulation.n)
    return gemm_ragged_sm80.tiles(candidate.key, few)


def _has_scales(problem: GemmProblem) -> bool:
    """Whether a kernel of several trees may load a tree's factors as scales.

    Scales do not multiply C, are contiguous, and are the same for all batches.
    """
    form = form_of(problem.epilogue)
    if form is not None and problem.c is not None and form.source is None and not form.adds_c:
        return False
    for number, along in () if form is None else ((form.scale_a, -2), (form.scale_b, -1)):
        if number is not None:
            spec = problem.operands[number]
            steps = zip(spec.shape[:-2], spec.strides[:-2], strict=True)
            if any(extent > 1 and stride for extent, stride in steps):
                return False
            if spec.shape[along] > 1 and spec.strides[along] != 1:
                return False
    return True


def cells_of(op: str, arch: SmArch, problem: GemmProblem) -> tuple[KernelKey, ...]:
    """The matrix's keys of an operation for a problem; if its epilogue is a tree, with that epilogue."""
    _, program = lower.split(problem.epilogue)
    if not program:
        return matrix(op, arch)
    return _with_tree(op, arch, problem.epilogue, problem.a.dtype, problem.b.dtype, problem.d.dtype)


@functools.lru_cache(256)
def _with_tree(
    op: str, arch: SmArch, epilogue: str, a: CutlassDtype, b: CutlassDtype, d: CutlassDtype
) -> tuple[KernelKey, ...]:
    epilogues = {*_epilogues(epilogue, swapped=False), *_epilogues(epilogue, swapped=True)}
    made = dict.fromkeys(
        with_epilogue(key, name, d)
        for key in matrix(op, arch)
        if {key.a, key.b} == {a, b}
        for name in sorted(epilogues)
    )
    return tuple(key for key in made if supports(key))
