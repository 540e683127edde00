"""The kernels that may serve a problem: those of the table, or of the matrix, which match its types and layouts.

Which match is found out once for all problems with the same traits; which of them is best, the model says of each
problem (`_core.Ranking`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .. import _core
from ..arrays import symbols
from ..generator.key import KernelKey
from . import estimate
from .candidate import Candidate, KernelInfo

if TYPE_CHECKING:
    from .search import KernelSearch

F = TypeVar("F")


Kernel: TypeAlias = tuple[int, KernelKey, "KernelInfo | None", int]
"""How well the arch of a kernel suits the device, its key, its row of the table, and its shared memory."""


@dataclass(frozen=True)
class Roster(Generic[F]):
    """The kernels that may serve problems with the same traits.

    Attributes:
        source: where they are from, which lives as long.
        kernels: the key of each and its row of the table.
        ranking: the model's of them.
    """

    source: Any
    kernels: list[tuple[KernelKey, KernelInfo | None]]
    ranking: _core.Ranking

    @classmethod
    def of(cls, search: KernelSearch[F], source: Any, kernels: Iterable[Kernel], group: Sequence[F]) -> Roster[F]:
        """Those kernels that match a formulation of the group."""
        kept, entries = [], []
        for suitability, key, info, shared_bytes in kernels:
            places = [
                place for place, of in enumerate(group) if search.op_of(of) == key.op and search.matches(key, of)
            ]  # fmt: skip
            if places:
                kept.append((key, info))
                entries.append((suitability, estimate.kernel_of(key), shared_bytes, places))
        return cls(source, kept, _core.Ranking(estimate.model, search.device, entries))

    def first(self, search: KernelSearch[F], group: Sequence[F]) -> Candidate[F] | None:
        """The best that serves a problem, put as in the group; None where none does."""
        extents, trace = [search.extents(of) for of in group], symbols.current()
        if trace is None:
            found = self.ranking.first(extents, search.batch_invariant)
        else:
            found = trace.first(self.ranking, extents, whole=search.batch_invariant)
        return None if found is None else self._candidate(group, found)

    def every(self, search: KernelSearch[F], group: Sequence[F]) -> list[Candidate[F]]:
        """All that serve it, best first: native cells, since others cost a compilation in the driver at first."""
        found = self.ranking.every([search.extents(of) for of in group], search.batch_invariant)
        return [self._candidate(group, each) for each in found]

    def _candidate(self, group: Sequence[F], found: _core.Found) -> Candidate[F]:
        entry, place, (seconds, split_k, swizzle, raster, width) = found
        key, info = self.kernels[entry]
        return Candidate(key, info, seconds, group[place], split_k, swizzle, raster, width)


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
        found = _rosters[known] = Roster.of(search, owner, every, group)
    return found
