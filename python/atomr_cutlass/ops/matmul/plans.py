"""Plans of matmuls: made once for what the arrays look like, with a kernel that is remembered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from ... import _core
from ...epilogue.bound import Fusion
from ...errors import KernelNotFoundError, UnsupportedError
from ...generator.key import KernelKey
from ...jit import kernels
from ...pipeline import devices, select, table
from ...pipeline.devices import Device
from ...pipeline.plan import Plan, refuse_capture
from ...pipeline.plan_cache import PlanCache
from ...pipeline.problem import GemmProblem
from ..gemm import scaled
from ..gemm.kernels import GemmCandidate, GemmSearch, from_candidate, make
from ..gemm.scaled import NO_SCALES, Scales
from .heuristic import HeuristicKey, heuristics

PLANS_KEPT = 256

_plans: PlanCache[Plan] = PlanCache(PLANS_KEPT)


@dataclass(frozen=True)
class Product:
    """A product, as kernels are chosen for it.

    Attributes:
        what: the product.
        scales: those that are arrays.
        fusion: what follows it.
    """

    what: GemmProblem
    scales: Scales = NO_SCALES
    fusion: Fusion | None = None

    def search(self, device: Device) -> GemmSearch:
        """Its kernels."""
        return GemmSearch(scaled.rewritten(self.what, self.scales, self.fusion), device)

    @property
    def plain(self) -> bool:
        """Whether it takes nothing but A, B and C."""
        return self.fusion is None and self.scales == NO_SCALES


@dataclass(frozen=True)
class Wishes:
    """What a caller asks of a plan.

    Attributes:
        backend, jit: as in `plan.make`.
        workspace_size: bytes of device memory that a call may use; None is no limit.
    """

    backend: str = "auto"
    jit: str | None = None
    workspace_size: int | None = None


def plan_of(product: Product, wishes: Wishes, known: HeuristicKey | None, *, like: Any, stream: int) -> Plan:
    """The plan of a product, from the cache or a new one.

    Args:
        product: what to compute.
        wishes: how.
        known: what its kernel is remembered for; None: it is chosen, and not remembered.
        like: an array whose framework allocates the workspace.
        stream: where it will be launched.

    Raises:
        UnsupportedError, KernelNotFoundError, CompileError: as `plan.make`; or the workspace is too small.
    """
    policy = kernels.policy(wishes.jit)
    key = (product, wishes.backend, policy, wishes.workspace_size, type(like), heuristics.changes)
    found = _plans.get(key)
    if found is None:
        found = _made(product, dataclasses.replace(wishes, jit=policy), known, like, stream)
        if found.checked:
            _plans.insert(found, key)
    return found


def _made(product: Product, wishes: Wishes, known: HeuristicKey | None, like: Any, stream: int) -> Plan:
    what, device = product.what, devices.get(product.what.device)
    if product.plain and (wishes.jit == "background" or what.k == 0):
        # The kernel may change while the plan lives; without products any kernel does.
        made: Plan = make(what, like=like, backend=wishes.backend, jit=wishes.jit, stream=stream)
        return _allowed(made, wishes)
    if what.k == 0:
        raise UnsupportedError("k is 0: without products GPU kernels compute epilogue DEFAULT without scales only")
    search = product.search(device)
    fingerprint = _fingerprint(product, search, wishes)
    remembered = heuristics.get(known, fingerprint) if known is not None else None
    candidate = None if remembered is None else _recalled(remembered, search, wishes)
    recalled = candidate is not None
    if candidate is None:
        candidate = _chosen(search, wishes)
    made, candidate = _within(product, candidate, search, wishes, like, stream)
    if known is not None and not recalled:
        heuristics.put(known, candidate.key, fingerprint)
    return made


def _fingerprint(product: Product, search: GemmSearch, wishes: Wishes) -> Hashable:
    """What decides about a kernel beside a HeuristicKey."""
    what = product.what
    layouts = tuple(
        (one.problem.epilogue, one.swapped, one.layout_a, one.layout_b, one.align_a, one.align_b, one.align_d)
        for group in search.formulations
        for one in group
    )
    types = (what.a.dtype, what.b.dtype, what.d.dtype, what.math)
    return types, layouts, wishes, what.device, _core.registry_generation()


def _recalled(key: KernelKey, search: GemmSearch, wishes: Wishes) -> GemmCandidate | None:
    """The candidate of a kernel that is remembered; None where it cannot serve, or must not be compiled."""
    device = search.device
    rows = [] if wishes.backend == "jit" else [row for row in table.kernels(op=key.op) if row.name == key.name]
    runs = (devices.rank_arch(key.arch, device, ptx=one.ptx, cuda_version=one.cuda_version) is not None for one in rows)
    row = next(itertools.compress(rows, runs), None)
    compiled = wishes.backend != "prebuilt" and wishes.jit != "off"
    if row is None and not (compiled and devices.rank_arch(key.arch, device, ptx=True) is not None):
        return None
    with contextlib.suppress(UnsupportedError):
        return dataclasses.replace(select.candidate_of(search, key), info=row)
    return None


def _chosen(search: GemmSearch, wishes: Wishes) -> GemmCandidate:
    try:
        return select.choose(search, backend=wishes.backend, jit=wishes.jit)
    except (UnsupportedError, KernelNotFoundError) as error:
        raise type(error)(
            f"{error} (a matmul is put as D^T = op(B)^T op(A)^T: what is called A there is op(B)^T, row-major with "
            "transb=False, and B is op(A)^T, column-major with transa=True)"
        ) from error


def _within(
    product: Product, candidate: GemmCandidate, search: GemmSearch, wishes: Wishes, like: Any, stream: int
) -> tuple[Plan, GemmCandidate]:
    """The plan of a candidate, or of the best of the table's that keeps to the workspace."""
    made = _from_candidate(product, candidate, like, stream)
    if _fits(made, wishes):
        return made, candidate
    for other in _others(candidate, search, wishes):
        smaller = _from_candidate(product, other, like, stream)
        if _fits(smaller, wishes):
            return smaller, other
    return _allowed(made, wishes), candidate


def _others(candidate: GemmCandidate, search: GemmSearch, wishes: Wishes) -> Iterator[GemmCandidate]:
    """Candidates that need less workspace, or may: the same kernel without slices of K, then others of the table."""
    if candidate.split_k > 1:
        yield dataclasses.replace(candidate, split_k=1)
    if wishes.backend != "jit":
        for other in select.rank(search):
            if other.key.scheduler != "streamk":
                yield dataclasses.replace(other, split_k=1)


def _from_candidate(product: Product, candidate: GemmCandidate, like: Any, stream: int) -> Plan:
    if not product.plain:
        return scaled.from_candidate(candidate, product.scales, product.fusion, like=like, stream=stream)
    refuse_capture(candidate, product.what.device, stream)
    return from_candidate(product.what, candidate, like=like)


def _fits(made: Plan, wishes: Wishes) -> bool:
    return wishes.workspace_size is None or made.workspace_bytes <= wishes.workspace_size


def _allowed(made: Plan, wishes: Wishes) -> Plan:
    if not _fits(made, wishes):
        raise UnsupportedError(
            f"{made.kernel_name} needs {made.workspace_bytes} bytes of workspace; workspace_size is "
            f"{wishes.workspace_size}: give as much, or None"
        )
    return made
