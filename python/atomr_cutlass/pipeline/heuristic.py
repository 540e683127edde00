"""Which kernels served problems before."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..checks import shown
from ..errors import InvalidOperandError
from ..generator.key import KernelKey
from .plan_cache import PlanCache

CAPACITY = 1024


class KernelUse:
    """A use that a kernel is remembered for; an operation's own keys are of this kind."""


class _Known(NamedTuple):
    kernel: KernelKey
    given: bool


class HeuristicCache:
    """The kernels that were chosen, those used most recently. Safe for use by several threads.

    What the package stores tells what it chose, and is not read by it: to choose takes no longer. What a user stores is
    used whenever the kernel can serve, and else passed over.

    Attributes:
        capacity: how many kernels are kept.

    Raises:
        InvalidOperandError: `capacity` is no integer above 0.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._kernels: PlanCache[Any] = PlanCache(capacity)
        self._changes = 0
        self._given = False

    @property
    def capacity(self) -> int:
        """How many kernels are kept."""
        return self._kernels.capacity

    @property
    def changes(self) -> int:
        """How often a user has stored something or cleared all: plans from before are not used any more."""
        return self._changes

    @property
    def given(self) -> bool:
        """Whether a user has stored something since all was cleared."""
        return self._given

    def get(self, key: KernelUse) -> KernelKey | None:
        """The kernel that is known for a use, or None."""
        known: _Known | None = self._kernels.get(key)
        return None if known is None else known.kernel

    def wanted(self, key: KernelUse) -> KernelKey | None:
        """The kernel that a user has stored for a use, or None."""
        known: _Known | None = self._kernels.get(key) if self._given else None
        return known.kernel if known is not None and known.given else None

    def put(self, key: KernelUse, kernel: KernelKey) -> None:
        """Stores a kernel, in place of any other of its key.

        Args:
            key: the use that it serves, a HeuristicKey.
            kernel: the kernel that serves it wherever it can, such as `ac.kernels()[0].key`. Of one whose launch
                chooses the columns of a tile, where it is not built, the kernel with these columns alone is compiled.

        Raises:
            InvalidOperandError: an argument of another kind.
        """
        self._store(key, kernel, given=True)
        self._given = True
        self._changes += 1

    def note(self, key: KernelUse, kernel: KernelKey) -> None:
        """Stores a kernel that was chosen, which tells a reader of it and decides nothing.

        Args:
            key: the use that it serves, a HeuristicKey.
            kernel: the kernel.

        Raises:
            InvalidOperandError: an argument of another kind.
        """
        self._store(key, kernel, given=False)

    def _store(self, key: KernelUse, kernel: KernelKey, *, given: bool) -> None:
        if not isinstance(key, KernelUse):
            raise InvalidOperandError(f"key is {shown(key)}; expected a HeuristicKey")
        if not isinstance(kernel, KernelKey):
            raise InvalidOperandError(f"kernel is {shown(kernel)}; expected a KernelKey, such as ac.kernels()[0].key")
        self._kernels.insert(_Known(kernel, given=given), key)

    def clear(self) -> None:
        """Forgets everything: kernels are chosen anew."""
        self._kernels.clear()
        self._given = False
        self._changes += 1

    def __len__(self) -> int:
        return len(self._kernels)

    def __contains__(self, key: Any) -> bool:
        """Whether a kernel is known for a key; no use of it."""
        return key in self._kernels

    def __repr__(self) -> str:
        return f"<HeuristicCache: {len(self)} of {self.capacity} kernels>"


heuristics = HeuristicCache()
"""The cache that planning reads and fills."""
