"""Searches whose problems are GEMMs, whatever their operation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

from ...errors import UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue import lower
from ...generator.epilogue.common import common_of, form_of, wider
from ...generator.families import gemm_sm90
from ...generator.key import KernelKey
from ...generator.matrix import supports, with_epilogue
from ...generator.rules import FEW, FP8_TYPES, Status
from ...pipeline import estimate
from ...pipeline.devices import Device
from ...pipeline.problem import GemmFormulation, GemmProblem, formulations
from ...pipeline.search import OTHER_OP, Candidate, KernelSearch, Rule, checked, matrix

GemmCandidate: TypeAlias = "Candidate[GemmFormulation]"

STREAM_K_SLICES = (1, 2, 4, 8)


class ProductSearch(KernelSearch[GemmFormulation]):
    """Kernels of an operation whose problems are GEMMs.

    Attributes:
        problem: the GEMM, its epilogue as the kernel's key has it.
    """

    def __init__(
        self,
        problems: GemmProblem | Sequence[GemmProblem],
        device: Device,
        arch: SmArch | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Kernels for a problem.

        Args:
            problems: the problem, or several that come to the same, such as with an input of a tree loaded as C;
                preferred ones first.
            device: where.
            arch: keep to cells of this arch.
            batch_invariant: see `KernelSearch`.

        Raises:
            InvalidOperandError, UnsupportedError: an operand no kernel can read.
        """
        self.device, self.arch, self.batch_invariant = device, arch, batch_invariant
        self._problems = [problems] if isinstance(problems, GemmProblem) else problems
        self.problem = self._problems[-1]
        self.formulations = self._formulate(self._problems)

    def put(self, problem: GemmProblem) -> Sequence[GemmFormulation]:
        """How a problem can be put to the operation's kernels.

        Raises:
            InvalidOperandError, UnsupportedError: an operand no kernel can read.
        """
        return formulations(problem)

    def _formulate(self, problems: Sequence[GemmProblem]) -> list[Sequence[GemmFormulation]]:
        """The formulations of each problem; of preferred ones, those before the last, where kernels can read them."""
        groups: list[Sequence[GemmFormulation]] = []
        for problem in problems[:-1]:
            with contextlib.suppress(UnsupportedError):
                groups.append(self.put(problem))
        return [*groups, self.put(problems[-1])]

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
        # Fast accumulation is allowed, not asked for.
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

    def rules_of_extents(self, key: KernelKey, formulation: GemmFormulation) -> Iterator[Rule]:
        """The conditions that follow from the extents, on a kernel that meets `rules`."""
        suited = key.mainloop != FEW or estimate.kernel_of(key).is_few(formulation.m, formulation.n)
        yield suited, "it is for few rows or columns of D"

    def extents(self, formulation: GemmFormulation) -> tuple[int, ...]:
        return formulation.extents

    def traits(self, formulation: GemmFormulation) -> Hashable:
        """Types, math mode, epilogue, scales, layouts and alignments."""
        problem = formulation.problem
        return (
            problem.a.dtype, problem.b.dtype, formulation.dtype_d, problem.math, problem.epilogue,
            problem.scale_granularity, problem.scale_type, _has_scales(problem), formulation.swapped,
            formulation.divided,
            formulation.layout_a, formulation.layout_b, formulation.layout_d,
            formulation.align_a, formulation.align_b, formulation.align_d,
        )  # fmt: skip

    def cells(self, arch: SmArch, group: Sequence[GemmFormulation]) -> Iterable[Iterable[KernelKey]]:
        """The matrix's cells, which take over the problem's epilogue where that is a tree."""
        if group:
            yield cells_of(self.op, arch, group[0].problem)

    def epilogue_of(self, candidate: GemmCandidate) -> str:
        return candidate.formulation.problem.epilogue

    def launches(self, candidate: GemmCandidate) -> Iterable[GemmCandidate]:
        """Its swizzles, raster orders and widths, with each number of slices of K."""
        stream_k = candidate.key.scheduler == "streamk"
        extents = candidate.formulation.extents
        of_model = (1,) if self.batch_invariant else estimate.slices(candidate.key, extents, self.device)
        slices = STREAM_K_SLICES if stream_k else of_model
        made = super().launches(candidate)
        return (dataclasses.replace(launch, split_k=count) for launch in made for count in slices)

    def widths(self, candidate: GemmCandidate) -> Sequence[int]:
        """Those of a kernel whose launch chooses them."""
        return gemm_sm90.widths(candidate.key) or super().widths(candidate)

    def least(self, candidate: GemmCandidate) -> float:
        """A time that no kernel of these types is estimated to stay below."""
        return estimate.least(candidate.key, candidate.formulation.extents, self.device)


def _epilogues(epilogue: str, *, swapped: bool) -> tuple[str, ...]:
    """The ids of kernels' epilogues that serve a problem's."""
    base, program = lower.split(epilogue)
    if program and swapped:
        turned = None if lower.is_gated(epilogue) else _swapped(program)
        return () if turned is None else (lower.epilogue_id(base, turned),)
    # Without scales a scaled epilogue is the linear one.
    return (epilogue, lower.SCALED) if epilogue == lower.LINEAR else (epilogue,)


def _common(epilogue: str, a: CutlassDtype, *, swapped: bool) -> tuple[str, ...]:
    """The same of kernels that are told their tree."""
    form, found = form_of(epilogue), common_of(epilogue)
    # Of D^T a row is a column.
    if form is None or found is None or (swapped and not form.turns):
        return ()
    return (found, lower.SCALED_COMMON) if a in FP8_TYPES else (found,)


@functools.cache
def _swapped(program: str) -> str | None:
    """The tree of D^T, None where it cannot be had."""
    try:
        return lower.swapped(program)
    except ValueError:
        return None


def _has_scales(problem: GemmProblem) -> bool:
    """Whether a kernel of several trees may load the factors of a tree as scales, which do not multiply C.

    They are contiguous then, and the same for all batches.
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
    """The matrix's keys of an operation for a problem: its cells, which take over an epilogue that is a tree."""
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
