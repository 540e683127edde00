"""The plan of a problem: with the kernel that is remembered or the best one, within a limit of workspace."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .. import _core
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.key import KernelKey
from ..jit import kernels
from . import devices, select, table, tuning
from .candidate import Candidate
from .heuristic import KernelUse, heuristics
from .plan import BACKENDS
from .select import KernelSearch


class _Plan(Protocol):
    @property
    def workspace_bytes(self) -> int: ...

    @property
    def kernel_name(self) -> str: ...


F = TypeVar("F")
PlanT = TypeVar("PlanT", bound=_Plan)


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is made, whatever it is of.

    Attributes:
        arch: keep to cells of this arch.
        alpha: of calls that give none.
        beta: of calls that give none.
        like: an array whose framework allocates the workspace, where it can.
        backend: `auto`: the best kernel of the table; where it has none, the matrix's best one, compiled. `prebuilt`:
            the table only. `jit`: the matrix's best one, compiled.
        jit: `background` starts with the best kernel of the table and compiles the matrix's best one meanwhile, if the
            model expects more of that: launches switch to it when it is ready. With nothing to start with, it is
            compiled first. `auto` does the same where the model expects twice the speed; `off` compiles nothing, and
            warns there, once. None leaves it to ATOMR_CUTLASS_JIT.
        stream: where the first launch will be, where that is known.
        workspace_size: bytes of device memory that a launch may use beside its operands; None is no limit.
        use: what the kernel is remembered for; None: it is chosen anew, and not remembered.

    Raises:
        InvalidOperandError: `backend` is not one of BACKENDS.
    """

    arch: SmArch | None = None
    alpha: float = 1.0
    beta: float = 0.0
    like: Any = None
    backend: str = "auto"
    jit: str | None = None
    stream: int | None = None
    workspace_size: int | None = None
    use: KernelUse | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidOperandError(f"a plan's backend is {self.backend!r}; valid: {', '.join(BACKENDS)}")


def planned(
    search: KernelSearch[F], build: Callable[[Candidate[F]], PlanT], options: PlanOptions
) -> tuple[PlanT, Candidate[F] | None]:
    """A plan with a kernel of a search.

    Args:
        search: the kernels of a problem.
        build: makes the plan of a candidate.
        options: of the plan.

    Returns:
        (the plan, a better kernel that is to be compiled in the background, if there is one).

    Raises:
        UnsupportedError, KernelNotFoundError: as `select.choose`; or every kernel needs more workspace.
    """
    backend, workspace_size, use = options.backend, options.workspace_size, options.use
    policy = kernels.policy(options.jit)
    if search.background and policy == "background":
        use = None  # the kernel may change while the plan lives
    fingerprint = None if use is None else (
        search.fingerprint(), backend, policy, workspace_size, search.device.index, search.arch,
        _core.registry_generation(), tuning.find(search.device.name, search.problem),
    )  # fmt: skip
    known = None if use is None else heuristics.get(use, fingerprint)
    candidate = None if known is None else _recalled(known, search, backend, policy)
    better, recalled = None, candidate is not None
    if candidate is None and search.background:
        candidate, better = select.decide(search, backend=backend, jit=policy, stream=options.stream)
    elif candidate is None:
        candidate = select.choose(search, backend=backend, jit=policy)
    made = build(candidate)
    if workspace_size is not None and made.workspace_bytes > workspace_size:
        for other in _others(search, candidate, backend):
            smaller = build(other)
            if smaller.workspace_bytes <= workspace_size:
                made, candidate = smaller, other
                break
    refuse_workspace(made, workspace_size)
    if use is not None and not recalled and better is None:
        heuristics.put(use, candidate.key, fingerprint)
    return made, better


def refuse_workspace(made: _Plan, workspace_size: int | None) -> None:
    """Refuses a plan that needs more workspace than there may be.

    Raises:
        UnsupportedError: says how much it needs.
    """
    if workspace_size is not None and made.workspace_bytes > workspace_size:
        raise UnsupportedError(
            f"{made.kernel_name} needs {made.workspace_bytes} bytes of workspace; workspace_size is {workspace_size}: "
            "give as much, or None"
        )


def _recalled(key: KernelKey, search: KernelSearch[F], backend: str, policy: str) -> Candidate[F] | None:
    """The candidate of a kernel that is remembered; None where it cannot serve, or must not be compiled."""
    device = search.device
    if search.arch not in (None, key.arch):
        return None
    rows = [] if backend == "jit" else [row for row in table.kernels(op=key.op) if row.name == key.name]
    runs = (devices.rank_arch(key.arch, device, ptx=one.ptx, cuda_version=one.cuda_version) is not None for one in rows)
    row = next(itertools.compress(rows, runs), None)
    compiled = backend != "prebuilt" and policy != "off"
    if row is None and not (compiled and devices.rank_arch(key.arch, device, ptx=True) is not None):
        return None
    with contextlib.suppress(UnsupportedError):
        return dataclasses.replace(select.candidate_of(search, key), info=row)
    return None


def _others(search: KernelSearch[F], candidate: Candidate[F], backend: str) -> Iterator[Candidate[F]]:
    """Candidates that may need less workspace: the kernel without slices of K, then others of the table."""
    if candidate.split_k > 1:
        yield dataclasses.replace(candidate, split_k=1)
    if backend != "jit":
        for other in select.rank(search):
            if other.key.scheduler != "streamk":
                yield dataclasses.replace(other, split_k=1)
