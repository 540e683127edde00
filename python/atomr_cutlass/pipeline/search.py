"""The kernels that an operation has for a problem: the interface that `select` chooses through."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .. import _core
from ..arrays import symbols
from ..errors import CutlassError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.key import KernelKey, shared_memory
from ..generator.matrix import cells, supports
from ..generator.rules import OK, Status, no
from . import devices, estimate
from .devices import Device
from .reduction import BatchInvariant

if TYPE_CHECKING:
    from .table import KernelInfo

F = TypeVar("F")

OTHER_OP = no("it is a kernel of another operation")

Rule: TypeAlias = tuple[bool, str]
"""Whether a kernel meets a rule, and the reason that it is refused for otherwise."""

HEURISTIC, ALONG_M, ALONG_N = range(3)
"""Raster orders of kernels' arguments: the side of the result along which successive tiles are neighbours. With the
first, CUTLASS chooses."""


@dataclasses.dataclass(frozen=True)
class Candidate(Generic[F]):
    """A kernel for a problem, its launch options, and the formulation of the problem that it computes.

    Attributes:
        info: the kernel's row of the table, or None where it has to be compiled at run time.
        seconds: the model's estimate of one launch.
        formulation: the form in which the kernel computes the problem: with operands swapped, an operand of a tree as
            C, operands cast, a convolution as a GEMM. None for kernels of one task, such as casts.
        swizzle, raster: for the persistent scheduler (sm90 generation); see cpp/src/tile_scheduler.h.
        width: columns of a tile (of D^T: rows of D), for kernels whose launch chooses them; 0 for others. For kernels
            of few rows it is the rows of weights in a tile, and the swizzle is the thread blocks that share the few
            rows, or 0 for sums in the order of K; for those of ragged few rows the width is likewise, and the
            swizzle, if more than 1, the few rows of a tile.
        tuned: whether a record of `tuning` chose the kernel, not the model.
        named: whether a user has named the kernel (`heuristics`).
    """

    key: KernelKey
    info: KernelInfo | None
    seconds: float
    formulation: F
    split_k: int = 1
    swizzle: int = 1
    raster: int = HEURISTIC
    width: int = 0
    tuned: bool = False
    named: bool = False

    @property
    def options(self) -> tuple[int, int, int, int]:
        """The launch options: slices of K, swizzle, raster order and width."""
        return self.split_k, self.swizzle, self.raster, self.width

    @property
    def origin(self) -> str:
        """The kernel's origin: `prebuilt`, `pack NAME` or `jit`."""
        return "jit" if self.info is None else self.info.origin


class KernelSearch(abc.ABC, Generic[F]):
    """The kernels that an operation has for one problem.

    Attributes:
        op: operation of the kernels' keys.
        arch: keep to cells of this arch; None takes those of any arch that run on the device, native ones first.
        problem: everything that the choice of a kernel depends on, as a dataclass; tuned choices are stored under it.
            None: the problem cannot be tuned.
        formulations: the formulations of the problem, in groups. A group counts only where no kernel serves an earlier
            one; within a group the estimated time decides.
        batch_invariant: whether only kernels of one reduction serve it, the same for every number of rows.
        named: the kernel that a user has named for it (`heuristics`), which is chosen if it is available and serves.
        lacks: the message where the table has no kernel and none may be compiled.
    """

    op: str
    device: Device
    arch: SmArch | None
    problem: Any = None
    formulations: Sequence[Sequence[F]]
    batch_invariant: bool = False
    named: KernelKey | None = None
    lacks: str = "no kernel in the table serves this {op}; {name} would"

    @abc.abstractmethod
    def traits(self, formulation: F) -> Hashable:
        """Everything that `matches` and `cells` depend on: problems with the same traits have the same kernels."""

    @abc.abstractmethod
    def matches(self, key: KernelKey, formulation: F) -> Status:
        """Whether a kernel serves problems with these traits, and the reason if not."""

    def supports(self, key: KernelKey, formulation: F) -> Status:
        """Whether a kernel serves this formulation: it matches, and the extents suit it."""
        return self.matches(key, formulation)

    def extents(self, formulation: F) -> tuple[int, ...]:
        """The extents of a formulation from which the model estimates its time; see `estimate.Extents`."""
        return ()

    @abc.abstractmethod
    def reason(self) -> str:
        """Why no cell of the matrix serves the problem, and what would cure it."""

    @property
    def tuned_problem(self) -> Any:
        """The problem that tuned choices are stored under. None: the problem cannot be tuned."""
        return BatchInvariant(self.problem) if self.batch_invariant and self.problem is not None else self.problem

    def slices(self, formulation: F) -> int:
        """The slices of K where their number is fixed, whatever the rows of D; else 1."""
        return 1

    def of_many_rows(self) -> Sequence[Sequence[F]]:
        """The formulations that every number of rows has: they determine the reduction (`select.reduction`)."""
        return self.formulations

    def op_of(self, formulation: F) -> str:
        """The operation whose kernels take a formulation."""
        return self.op

    def cells(self, arch: SmArch, group: Sequence[F]) -> Iterable[Iterable[KernelKey]]:
        """Keys that can be compiled for an arch, in sets; a set counts only where no kernel of an earlier one serves.

        Sets are generators: expensive filtering runs only when a set is reached.
        """
        yield matrix(self.op, arch)

    def launches(self, candidate: Candidate[F]) -> Iterable[Candidate[F]]:
        """The candidate with each of its launch options: swizzles and raster orders, then widths of tiles."""
        if candidate.raster == HEURISTIC:
            return (candidate,)
        options = itertools.product(_core.SWIZZLES, (ALONG_M, ALONG_N))
        ordered = (dataclasses.replace(candidate, swizzle=swizzle, raster=raster) for swizzle, raster in options)
        others = (width for width in self.widths(candidate) if width != candidate.width)
        return itertools.chain(ordered, (dataclasses.replace(candidate, width=width) for width in others))

    def widths(self, candidate: Candidate[F]) -> Sequence[int]:
        """The columns of a tile that a candidate may be launched with; (0,) for kernels with one width."""
        return (0,)

    def helpers(self, formulation: F) -> Sequence[KernelSearch[Any]]:
        """The searches of further kernels that a formulation launches, such as casts."""
        return ()

    def least(self, candidate: Candidate[F]) -> float:
        """A lower bound of the estimates of all kernels for the problem, in seconds."""
        return 1e-6

    def epilogue_of(self, candidate: Candidate[F]) -> str:
        """The epilogue that a candidate's kernel computes for the problem; empty for operations without epilogues."""
        return ""

    def note(self, formulation: F) -> str:
        """The note of `explain` on a formulation; empty if the problem is computed as it stands."""
        return ""

    def serves(self, key: KernelKey, groups: Iterable[Sequence[F]] | None = None) -> Status:
        """Whether a kernel serves the problem, in one of these groups of formulations (default: all).

        The refusal is that of the formulation that it is closest to serving.
        """
        formulations = itertools.chain.from_iterable(self.formulations if groups is None else groups)
        found = [self.supports(key, formulation) for formulation in formulations if self.op_of(formulation) == key.op]
        return max([OTHER_OP, *found], key=lambda status: (status.ok, status.passed))

    def every_cell(self, arch: SmArch) -> Iterable[KernelKey]:
        """All keys that can be compiled for an arch."""
        return dict.fromkeys(key for group in self.formulations for keys in self.cells(arch, group) for key in keys)

    def closest(self, arch: SmArch) -> str:
        """Why the matrix's cell that comes closest to serving the problem on an arch does not serve it."""
        refused = [status for key in self.every_cell(arch) if not (status := self.serves(key))]
        if not refused:
            alike = " with its element types and epilogue" if matrix(self.op, arch) else ""
            return f"there are no {self.op} cells for {arch.value}{alike}"
        closest = max(refused, key=lambda refusal: refusal.passed)
        return f"the closest of {len(refused)} cells is refused: {closest.reason}"

    def nearest(self, arch: SmArch, best: Candidate[F] | None) -> KernelKey | None:
        """The key that a message names where the table has no kernel; by default that of `best`, the best cell."""
        return None if best is None else best.key

    def refusal(self, best: Candidate[F] | None, remedy: str) -> CutlassError:
        """The error where the table has no kernel and none may be compiled; `remedy` says how to get the best cell."""
        if best is None:
            return UnsupportedError(self.reason())
        return KernelNotFoundError(f"{self.lacks.format(op=best.key.op, name=best.key.name)}: {remedy}")


class ExactSearch(KernelSearch[None]):
    """The search of a helper, which has one kernel for each task: `make` gives its key for a compile target."""

    formulations = ((None,),)
    lacks = "the table lacks {name}, and it must not be compiled"

    def __init__(self, make: Callable[[SmArch], KernelKey], device: Device, arch: SmArch | None = None) -> None:
        self.device, self.arch, self.make = device, arch, make
        self._wanted = make(devices.require_arch(device))
        self.op = self._wanted.op

    def traits(self, formulation: None) -> Hashable:
        """The key."""
        return self._wanted

    def matches(self, key: KernelKey, formulation: None) -> Status:
        """Whether it is the key, for whichever arch."""
        return OK if key == self.make(key.arch) else no("its element types or form differ", 1)

    def cells(self, arch: SmArch, group: Sequence[None]) -> Iterable[Iterable[KernelKey]]:
        """The key alone."""
        yield (self.make(arch),)

    def reason(self) -> str:
        """Why no kernel is available."""
        return f"{self._wanted.name} does not run on {self.device.name}"


def checked(rules: Iterable[Rule]) -> Status:
    """Status of the first unmet rule; `passed` counts the rules met before it. OK where all are met."""
    for passed, (met, reason) in enumerate(rules):
        if not met:
            return refused(reason, passed)
    return OK


refused = functools.cache(no)
"""`no`, cached: thousands of kernels are refused for a few reasons."""


@functools.cache
def matrix(op: str, arch: SmArch) -> tuple[KernelKey, ...]:
    """The matrix's keys of an operation for an arch."""
    return tuple(key for _, key in cells([arch]) if key.op == op and supports(key))


Kernel: TypeAlias = tuple[int, KernelKey, "KernelInfo | None", int]
"""How well the arch of a kernel suits the device, its key, its row of the table, and its shared memory."""


class Roster(Generic[F]):
    """The kernels that may serve problems with the same traits, and the model's ranking of them."""

    def __init__(self, search: KernelSearch[F], source: Any, kernels: Iterable[Kernel], group: Sequence[F]) -> None:
        """Keeps the kernels that match a formulation of the group, and a reference to `source`, which owns them."""
        self._source = source
        self._kernels: list[tuple[KernelKey, KernelInfo | None]] = []
        entries = []
        for suitability, key, info, shared_bytes in kernels:
            suits = (search.op_of(of) == key.op and search.matches(key, of).ok for of in group)
            if places := [place for place, suited in enumerate(suits) if suited]:
                self._kernels.append((key, info))
                entries.append((suitability, estimate.kernel_of(key), shared_bytes, places))
        self._ranking = _core.Ranking(estimate.model, search.device, entries)

    def first(self, search: KernelSearch[F], group: Sequence[F]) -> Candidate[F] | None:
        """The best kernel for a problem in the formulations of a group; None where none serves it."""
        extents, trace = [search.extents(of) for of in group], symbols.current()
        if trace is None:
            found = self._ranking.first(extents, search.batch_invariant)
        else:
            found = trace.first(self._ranking, extents, whole=search.batch_invariant)
        return None if found is None else self._candidate(group, found)

    def every(self, search: KernelSearch[F], group: Sequence[F]) -> list[Candidate[F]]:
        """All kernels that serve it, best first; native cells before others, which the driver compiles at first use."""
        extents = [search.extents(of) for of in group]
        return [self._candidate(group, found) for found in self._ranking.every(extents, search.batch_invariant)]

    def _candidate(self, group: Sequence[F], found: _core.Found) -> Candidate[F]:
        entry, place, (seconds, split_k, swizzle, raster, width) = found
        key, info = self._kernels[entry]
        return Candidate(key, info, seconds, group[place], split_k, swizzle, raster, width)


def candidates_of(
    search: KernelSearch[F], key: KernelKey, info: KernelInfo | None, group: Sequence[F]
) -> list[Candidate[F]]:
    """A kernel in the formulations that it serves, the fastest first."""
    shared_bytes = shared_memory(key) if info is None else info.shared_bytes
    return Roster(search, None, [(0, key, info, shared_bytes)], group).every(search, group)
