"""Plan keys and caches of plans."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from .. import _core
from ..checks import check_integer, expect, shown
from ..errors import InvalidOperandError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..jit.locks import renewed

Extents: TypeAlias = "tuple[int | tuple[int, ...], ...]"

PLANS_KEPT = 2048

kept_plans = _core.PlanStore(PLANS_KEPT)
"""The kept plans of all functions, by the layouts of all operands and every option."""


@dataclass(frozen=True, repr=False)
class PlanKey:
    """The identity of a plan: everything that is launched except pointers and the values of scalars.

    Requests that differ in alpha alone have one key and share a plan. The operations of the epilogue (reading C, a
    bias, an activation) are part of the key; the kernel is not, since it is chosen.

    Attributes:
        op: the operation's name.
        shape: the operation's extents: (m, n, k, batch), a tuple of such for groups, or a convolution's.
        layouts: of the operands and the result, in that order. Requests have dense operands, whose strides follow.
        dtypes: element types of the operands and the result, in that order.
        math: math mode of the kernel's key.
        epilogue: the operations on the accumulator, such as `linear` or `linear+c+bias+relu`; a tree by its id.
        arch: the target that the request names; None is that of the GPU.
        binding: name of the operand that the plan keeps, or None.
        batch_invariant: whether its kernel has the reduction that serves every number of rows.
    """

    op: str
    shape: Extents
    layouts: tuple[str, ...]
    dtypes: tuple[CutlassDtype, ...]
    math: str
    epilogue: str
    arch: SmArch | None
    binding: str | None = None
    batch_invariant: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("op", "math", "epilogue"):
            expect(getattr(self, name), str, name, "a name")
        for name, kind in (("shape", (int, tuple)), ("layouts", str), ("dtypes", CutlassDtype)):
            _expect_tuple(getattr(self, name), kind, name)
        expect(self.arch, (SmArch, type(None)), "arch", "an SmArch, or None")
        expect(self.binding, (str, type(None)), "binding", "a name, or None")
        expect(self.batch_invariant, bool, "batch_invariant")
        # Once, not at every look-up: the hash of an enumeration's member is computed by Python code.
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # A process's hashes of strings are its own: a copy made elsewhere has to compute them again.
        return PlanKey, tuple(vars(self).values())[:-1]

    def __repr__(self) -> str:
        shape = ",".join("x".join(map(str, e)) if isinstance(e, tuple) else str(e) for e in self.shape)
        words = [self.op, f"({shape})", "/".join(self.layouts), "/".join(d.value for d in self.dtypes)]
        words += [self.math, self.epilogue, self.arch.value if self.arch else "any-arch"]
        words += [f"binding={self.binding!r}"] if self.binding is not None else []
        words += ["batch-invariant"] if self.batch_invariant else []
        return f"PlanKey({' '.join(words)})"


def _expect_tuple(values: Any, kind: type | tuple[type, ...], name: str) -> None:
    expect(values, tuple, name)
    for value in values:
        expect(value, kind, name)
        if isinstance(value, tuple):
            _expect_tuple(value, int, name)


@dataclass(frozen=True)
class CachedPlan:
    """A plan made without a GPU: it describes its kernel and cannot be launched.

    Attributes:
        key: the identity of the plan.
        source: the kernel's source, for NVRTC.
        kernel_name: the kernel's name.
        kernel_handle: None; plans that can be launched have one.
    """

    key: PlanKey
    source: str = field(repr=False)
    kernel_name: str
    kernel_handle: object = None


PlanT = TypeVar("PlanT")


class PlanCache(Generic[PlanT]):
    """The plans used most recently, at most `capacity` of them. Safe for use by several threads.

    Dropping a plan drops one reference: callers that hold the plan may go on launching it, memory that a captured graph
    uses stays, and a workspace is freed once the launches in flight have ended (`_core.LaunchPlan`).

    Attributes:
        capacity: how many plans are kept.
        hits, misses: look-ups by `get` that found a plan, or none.
        evictions: plans dropped because others were used more recently.

    Raises:
        InvalidOperandError: `capacity` is no integer above 0.
    """

    def __init__(self, capacity: int) -> None:
        check_integer(capacity, "capacity", "an integer from 1, the plans to keep", least=1)
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._plans: collections.OrderedDict[Hashable, PlanT] = collections.OrderedDict()  # oldest use first
        # Reentrant, since the collector may run a finalizer that looks something up while this thread holds it.
        self._lock = renewed(self, "_lock", threading.RLock)

    def get(self, key: Hashable) -> PlanT | None:
        """The plan of this key, or None; counts as a use, and as a hit or a miss."""
        with self._lock:
            plan = self.peek(key)
            if plan is None:
                self.misses += 1
                return None
            self.hits += 1
            self._plans.move_to_end(key)
            return plan

    def peek(self, key: Hashable) -> PlanT | None:
        """The plan of this key or None; not counted, and not a use."""
        try:
            return self._plans.get(key)
        except TypeError:  # an array or a list
            expected = "a PlanKey, or something else that has a hash"
            raise InvalidOperandError(f"key is {shown(key)}; expected {expected}") from None

    def insert(self, plan: PlanT, key: Hashable = None) -> None:
        """Keeps a plan as the most recently used, in place of any other of its key.

        Args:
            plan: the plan.
            key: the key to store it under; None is `plan.key`.

        Raises:
            InvalidOperandError: there is neither.
        """
        # Destroying a plan can wait for the GPU, with the GIL released. No other thread is to wait for the lock
        # meanwhile: dropped plans live in this variable until it has been released.
        dropped: list[PlanT] = []
        key = getattr(plan, "key", None) if key is None else key
        if key is None:
            raise InvalidOperandError("the plan was made from no request, so that it has no key: give one")
        with self._lock:
            if key in self:  # which refuses values without a hash
                dropped.append(self._plans.pop(key))
            self._plans[key] = plan
            while len(self._plans) > self.capacity:
                dropped.append(self._plans.popitem(last=False)[1])
                self.evictions += 1

    def clear(self) -> None:
        """Drops every plan; the counters go on."""
        with self._lock:
            dropped, self._plans = self._plans, collections.OrderedDict()
        del dropped  # after the lock, as in `insert`

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a plan of this key; not counted, and not a use."""
        return self.peek(key) is not None

    def __repr__(self) -> str:
        counts = f"{self.hits} hits, {self.misses} misses, {self.evictions} evictions"
        return f"<PlanCache: {len(self)} of {self.capacity} plans, {counts}>"
