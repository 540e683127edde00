"""Which kernels served problems before."""

from __future__ import annotations

from collections.abc import Hashable
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
    fingerprint: Hashable


class HeuristicCache:
    """The kernels that were chosen, those used most recently. Safe for use by several threads.

    A hit saves the ranking of all kernels that could serve, of the table and, where a kernel is compiled, of the whole
    matrix: most of what a new plan costs whose kernel is loaded already. Calls that find their plan kept (one of the
    same strides, alignments and element types has run before) do not come here at all.

    The key does not say everything that decides about a kernel: the pack that was loaded last, for one, and of matmuls
    leading dimensions and addresses, which decide what it may read at once. What the package stores is therefore used
    again only for problems and options of the fingerprint that it was chosen for. What a user stores is used whenever
    the kernel can serve, and else passed over.

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

    def get(self, key: KernelUse, fingerprint: Hashable = None) -> KernelKey | None:
        """The kernel that is known for a key, or None.

        Args:
            key: the use that it serves.
            fingerprint: of the problem and its options now; None stands for any.
        """
        known: _Known | None = self._kernels.get(key)
        if known is None:
            return None
        fits = fingerprint is None or known.fingerprint in (None, fingerprint)
        return known.kernel if fits else None

    def put(self, key: KernelUse, kernel: KernelKey, fingerprint: Hashable = None) -> None:
        """Stores a kernel, in place of any other of its key.

        Args:
            key: the use that it serves, a HeuristicKey.
            kernel: the kernel that serves it, such as `ac.kernels()[0].key`.
            fingerprint: of the problem and the options that it was chosen for; None: it is used wherever it can serve.

        Raises:
            InvalidOperandError: an argument of another kind.
        """
        if not isinstance(key, KernelUse):
            raise InvalidOperandError(f"key is {shown(key)}; expected a HeuristicKey")
        if not isinstance(kernel, KernelKey):
            raise InvalidOperandError(f"kernel is {shown(kernel)}; expected a KernelKey, such as ac.kernels()[0].key")
        self._kernels.insert(_Known(kernel, fingerprint), key)
        if fingerprint is None:
            self._given = True
            self._changes += 1

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
