"""Searches whose problems are GEMMs, whatever their operation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

from ...epilogue.bound import has_scales
from ...errors import UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue import lower
from ...generator.epilogue.common import common_of, form_of, wider
from ...generator.families import gemm_sm90
from ...generator.key import KernelKey
from ...generator.matrix import supports, with_epilogue
from ...generator.rules import FEW, FP8_TYPES, OK, Status, no
from ...pipeline import estimate
from ...pipeline.candidate import Candidate
from ...pipeline.devices import Device
from ...pipeline.problem import GemmFormulation, GemmProblem, formulations
from ...pipeline.search import OTHER_OP, KernelSearch, matrix

GemmCandidate: TypeAlias = "Candidate[GemmFormulation]"

STREAM_K_SLICES = (1, 2, 4, 8)

_OTHER_TYPES = no("its element types differ", 1)
_OTHER_MATH = no("its math mode differs", 2)
_OTHER_EPILOGUE = no("its epilogue differs", 3)
_OTHER_SCALES = no("its scales differ", 4)
_BLOCKS_SWAPPED = no("blocks of scales are not alike for A and B, which cannot change places then", 5)
_OTHER_LAYOUTS = no("its layouts differ", 6)
_OTHER_ALIGNMENT = no("its alignment is wider than that of the operands", 7)
_MANY_ROWS = no("it is for few rows or columns of D", 8)


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

    def supports(self, key: KernelKey, formulation: GemmFormulation) -> Status:
        """Whether a kernel computes the problem as it is put here: one for few rows or columns wants few."""
        status = self.matches(key, formulation)
        many = key.mainloop == FEW and not estimate.kernel_of(key).is_few(formulation.m, formulation.n)
        return _MANY_ROWS if status and many else status

    def extents(self, formulation: GemmFormulation) -> tuple[int, ...]:
        return formulation.extents

    def traits(self, formulation: GemmFormulation) -> Hashable:
        """Types, math mode, epilogue, scales, layouts and alignments."""
        problem = formulation.problem
        return (
            problem.a.dtype, problem.b.dtype, formulation.dtype_d, problem.math, problem.epilogue,
            problem.scale_granularity, problem.scale_type, has_scales(problem), formulation.swapped,
            formulation.divided,
            formulation.layout_a, formulation.layout_b, formulation.layout_d,
            formulation.align_a, formulation.align_b, formulation.align_d,
        )  # fmt: skip

    def matches(self, key: KernelKey, formulation: GemmFormulation) -> Status:
        """Whether types, layouts and alignments are those of a kernel."""
        problem, swapped = formulation.problem, formulation.swapped
        first, second = (problem.b, problem.a) if swapped else (problem.a, problem.b)
        if key.op != self.op:
            return OTHER_OP
        if key.a is not first.dtype or key.b is not second.dtype or key.d is not formulation.dtype_d:
            return _OTHER_TYPES
        # Fast accumulation is allowed, not asked for.
        if key.math != problem.math and (problem.math != "fast" or key.math != "default"):
            return _OTHER_MATH
        if lower.is_common(key.epilogue):
            if not (key.epilogue in _common(problem.epilogue, key.a, swapped=swapped) and has_scales(problem)):
                return _OTHER_EPILOGUE
        elif key.epilogue not in (*_epilogues(problem.epilogue, swapped=swapped), wider(problem.epilogue)):
            return _OTHER_EPILOGUE
        if key.scale_granularity != problem.scale_granularity or key.scale_type != problem.scale_type:
            return _OTHER_SCALES
        if swapped and problem.scale_granularity[0] != problem.scale_granularity[1]:
            return _BLOCKS_SWAPPED
        if (key.layout_a, key.layout_b, key.layout_d) != (
            formulation.layout_a,
            formulation.layout_b,
            formulation.layout_d,
        ):
            return _OTHER_LAYOUTS
        if formulation.align_a % key.align_a or formulation.align_b % key.align_b or formulation.align_d % key.align_d:
            return _OTHER_ALIGNMENT
        return OK

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
