"""Which kernel served a matmul before."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...checks import check_options, expect, shown
from ...errors import InvalidOperandError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.key import KernelKey
from ...pipeline.plan_cache import PlanCache
from ..request_checks import expect_extent
from .epilogues import MatmulEpilogue

CAPACITY = 1024


@dataclass(frozen=True)
class HeuristicKey:
    """What a kernel is remembered for.

    Attributes:
        m, n, k: extents.
        dtype: element type of A.
        transa, transb: whether A and B are transposed.
        epilogue: what follows the product.
        arch: of the GPU; None for one that no target is made for.

    Raises:
        InvalidOperandError: a value is not of its kind.
    """

    m: int
    n: int
    k: int
    dtype: CutlassDtype
    transa: bool
    transb: bool
    epilogue: MatmulEpilogue
    arch: SmArch | None

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            expect_extent(getattr(self, name), name)
        for name, kind in (("dtype", CutlassDtype), ("transa", bool), ("transb", bool), ("epilogue", MatmulEpilogue)):
            expect(getattr(self, name), kind, name)
        check_options(arch=self.arch)


class _Known(NamedTuple):
    kernel: KernelKey
    fingerprint: Hashable


class HeuristicCache:
    """The kernels that were chosen for matmuls, those used most recently. Safe for use by several threads.

    A hit saves the ranking of all kernels that could serve, of the table and, where a kernel is compiled, of the whole
    matrix: most of what a new plan costs whose kernel is loaded already. Requests that find their plan ready (one of
    the same strides, alignments and element types has run before) do not come here at all.

    The key does not say everything that decides about a kernel: leading dimensions and addresses decide what it may
    read at once, for one. What `matmul` stores is therefore used again only for problems and options of the fingerprint
    that it was chosen for. What a user stores is used whenever the kernel can serve the request, and else passed over.

    Attributes:
        capacity: how many kernels are kept.

    Raises:
        InvalidOperandError: `capacity` is no integer above 0.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._kernels: PlanCache[Any] = PlanCache(capacity)
        self._changes = 0

    @property
    def capacity(self) -> int:
        """How many kernels are kept."""
        return self._kernels.capacity

    @property
    def changes(self) -> int:
        """How often a user has stored something or cleared all: plans from before are not used any more."""
        return self._changes

    def get(self, key: HeuristicKey, fingerprint: Hashable = None) -> KernelKey | None:
        """The kernel that is known for a key, or None.

        Args:
            key: of a matmul.
            fingerprint: of the problem and its options now; None stands for any.
        """
        known: _Known | None = self._kernels.get(key)
        if known is None:
            return None
        fits = fingerprint is None or known.fingerprint in (None, fingerprint)
        return known.kernel if fits else None

    def put(self, key: HeuristicKey, kernel: KernelKey, fingerprint: Hashable = None) -> None:
        """Stores a kernel, in place of any other of its key.

        Args:
            key: of a matmul.
            kernel: what serves it, such as `ac.kernels()[0].key`.
            fingerprint: of the problem and the options that it was chosen for; None: it is used wherever it can serve.

        Raises:
            InvalidOperandError: an argument of another kind.
        """
        expect(key, HeuristicKey, "key")
        if not isinstance(kernel, KernelKey):
            raise InvalidOperandError(f"kernel is {shown(kernel)}; expected a KernelKey, such as ac.kernels()[0].key")
        self._kernels.insert(_Known(kernel, fingerprint), key)
        if fingerprint is None:
            self._changes += 1

    def clear(self) -> None:
        """Forgets everything: kernels are chosen anew."""
        self._kernels.clear()
        self._changes += 1

    def __len__(self) -> int:
        return len(self._kernels)

    def __contains__(self, key: Any) -> bool:
        """Whether a kernel is known for a key; no use of it."""
        return key in self._kernels

    def __repr__(self) -> str:
        return f"<HeuristicCache: {len(self)} of {self.capacity} kernels>"


heuristics = HeuristicCache()
"""What `matmul` asks and fills."""
