"""Kernels by use: those that a user names, and those that were chosen for matmuls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from ..arrays import symbols
from ..checks import shown
from ..errors import InvalidOperandError
from ..generator.key import KernelKey
from . import tuning
from .plan_cache import PlanCache, kept_plans


class KernelUse:
    """The key that a kernel is stored for: a request, or a `HeuristicKey`."""

    @property
    def heuristic_key(self) -> Hashable:
        """The key that the kernel is stored under."""
        return self


class _Known(NamedTuple):
    kernel: KernelKey
    given: bool


class HeuristicCache:
    """A cache of kernels by use, which keeps those used most recently. Safe for use by several threads.

    `explain` and plans made from then on use a kernel that a user stores wherever it serves, else ignore it: functions
    make their plans anew, plans that exist stay as they are. Kernels that were chosen for matmuls are stored for
    readers and decide nothing.

    Attributes:
        capacity: how many kernels are kept.

    Raises:
        InvalidOperandError: `capacity` is no integer above 0.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._kernels: PlanCache[_Known] = PlanCache(capacity)
        self.capacity = capacity
        self._given = False

    def get(self, key: KernelUse) -> KernelKey | None:
        """The kernel that is known for a use, or None.

        Raises:
            InvalidOperandError, UnsupportedError: as `put`.
        """
        known = self._kernels.get(_key_of(key))
        return None if known is None else known.kernel

    def wanted(self, key: KernelUse | None, problem: Any = None) -> KernelKey | None:
        """The kernel that a user has stored for a use, else for a problem (by `tuning.identity`); None without one."""
        if not self._given or tuning.is_trying():
            return None
        symbols.refuse()  # the kernel may depend on the extents
        places = [None if key is None else _key_of(key), None if problem is None else tuning.identity(problem)]
        found = (self._kernels.get(place) for place in places if place is not None)
        return next((known.kernel for known in found if known and known.given), None)

    def put(self, key: KernelUse, kernel: KernelKey) -> None:
        """Stores a kernel, in place of any other of its key.

        Args:
            key: the use that it serves: a request that plans are made from, for that and for calls of its function with
                arrays of such extents, dense and aligned to 16 bytes, on whatever GPU; or a HeuristicKey.
            kernel: the kernel that serves it wherever it can, such as `ac.kernels()[0].key`. Of one whose launch
                chooses the columns of a tile, where it is not built, the kernel with these columns alone is compiled.

        Raises:
            InvalidOperandError: an argument of another kind.
            UnsupportedError: no kernel ever serves the request; says why.
        """
        self.note(key, kernel)  # which checks them
        self._kernels.insert(_Known(kernel, given=True), _key_of(key))
        self._given = True
        kept_plans.clear()

    def note(self, key: KernelUse, kernel: KernelKey) -> None:
        """Stores a kernel that was chosen, for readers: it decides nothing.

        Args:
            key: the use that it serves.
            kernel: the kernel.

        Raises:
            InvalidOperandError: an argument of another kind.
        """
        place = _key_of(key)
        if not isinstance(kernel, KernelKey):
            raise InvalidOperandError(f"kernel is {shown(kernel)}; expected a KernelKey, such as ac.kernels()[0].key")
        self._kernels.insert(_Known(kernel, given=False), place)

    def clear(self) -> None:
        """Removes all kernels: they are chosen anew."""
        self._kernels.clear()
        self._given = False
        kept_plans.clear()

    def __len__(self) -> int:
        return len(self._kernels)

    def __contains__(self, key: Any) -> bool:
        """Whether a kernel is stored for a key; does not count as a use."""
        return _key_of(key) in self._kernels

    def __repr__(self) -> str:
        return f"<HeuristicCache: {len(self)} of {self.capacity} kernels>"


def _key_of(use: Any) -> Hashable:
    if not isinstance(use, KernelUse):
        raise InvalidOperandError(f"key is {shown(use)}; expected a request without arrays, or a HeuristicKey")
    return use.heuristic_key


heuristics = HeuristicCache()
"""The cache that planning reads and fills."""
