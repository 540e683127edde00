"""The kernels that may serve a problem: those of the table, or of the matrix, which match its types and layouts.

Which match is found out once for all problems with the same traits; which of them is best, the model says of each
problem (`_core.Ranking`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .. import _core
from ..arrays import symbols
from ..generator.families import gemm_sm90
from ..generator.key import KernelKey, shared_memory
from ..generator.matrix import supports
from . import devices, estimate
from .candidate import Candidate, KernelInfo

if TYPE_CHECKING:
    from .search import KernelSearch

F = TypeVar("F")


Kernel: TypeAlias = tuple[int, KernelKey, "KernelInfo | None", int]
"""How well the arch of a kernel suits the device, its key, its row of the table, and its shared memory."""


class Roster(Generic[F]):
    """The kernels that may serve problems with the same traits, and the model's ranking of them."""

    def __init__(self, search: KernelSearch[F], source: Any, kernels: Iterable[Kernel], group: Sequence[F]) -> None:
        """Those kernels that match a formulation of the group; what they are from lives as long as this."""
        self._source = source
        self._kernels: list[tuple[KernelKey, KernelInfo | None]] = []
        entries = []
        for suitability, key, info, shared_bytes in kernels:
            places = [
                place for place, of in enumerate(group) if search.op_of(of) == key.op and search.matches(key, of).ok
            ]  # fmt: skip
            if places:
                self._kernels.append((key, info))
                entries.append((suitability, estimate.kernel_of(key), shared_bytes, places))
        self._ranking = _core.Ranking(estimate.model, search.device, entries)

    def first(self, search: KernelSearch[F], group: Sequence[F]) -> Candidate[F] | None:
        """The best that serves a problem, put as in the group; None where none does."""
        extents, trace = [search.extents(of) for of in group], symbols.current()
        if trace is None:
            found = self._ranking.first(extents, search.batch_invariant)
        else:
            found = trace.first(self._ranking, extents, whole=search.batch_invariant)
        return None if found is None else self._candidate(group, found)

    def every(self, search: KernelSearch[F], group: Sequence[F]) -> list[Candidate[F]]:
        """All that serve it, best first: native cells, since others cost a compilation in the driver at first."""
        found = self._ranking.every([search.extents(of) for of in group], search.batch_invariant)
        return [self._candidate(group, each) for each in found]

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


def obtainable(
    search: KernelSearch[F],
    key: KernelKey,
    groups: Iterable[Sequence[F]],
    rows: Iterable[KernelInfo],
    *,
    compiling: bool,
) -> Iterator[Candidate[F]]:
    """A kernel in the formulations that it serves, as it is built, else compiled; nothing where neither may be."""
    if search.arch not in (None, key.arch):
        return

    def runs(info: KernelInfo) -> bool:
        rank = devices.rank_arch(key.arch, search.device, ptx=info.ptx, cuda_version=info.cuda_version)
        return info.key == key and rank is not None

    info = next(filter(runs, rows), None)
    compiles = compiling and supports(key) and devices.rank_arch(key.arch, search.device, ptx=True) is not None
    for group in groups if info is not None or compiles else ():
        yield from candidates_of(search, key, info, group)


def of_one_width(candidate: Candidate[F]) -> Candidate[F]:
    """The candidate itself, or what is compiled instead of a kernel with a body for each width: its width's alone."""
    if candidate.info is not None or not candidate.width:
        return candidate
    return dataclasses.replace(candidate, key=gemm_sm90.of_width(candidate.key, candidate.width), width=0)


_KEPT_AT_MOST = 256
_rosters: dict[Hashable, Roster[Any]] = {}
"""By where the kernels are from, and all else that decides which match."""


def roster(
    search: KernelSearch[F], source: Hashable, owner: Any, kernels: Callable[[], Iterable[Kernel] | None],
    group: Sequence[F],
) -> Roster[F] | None:  # fmt: skip
    """The kernels of a source that match a group, which are looked for once.

    Args:
        search: the problem's kernels.
        source: which kernels these are, of those that searches of this type and device have.
        owner: what the kernels are from, which lives as long as the roster.
        kernels: gives them; None where there are none, which is asked again.
        group: formulations.
    """
    known = (
        source, type(search), search.op, search.device, tuple(map(search.op_of, group)),
        tuple(map(search.traits, group)),
    )  # fmt: skip
    found = _rosters.get(known)
    if found is None:
        symbols.refuse()  # the next call of such traits finds it
        every = kernels()
        if every is None:
            return None
        if len(_rosters) >= _KEPT_AT_MOST:
            _rosters.clear()
        found = _rosters[known] = Roster(search, owner, every, group)
    return found
