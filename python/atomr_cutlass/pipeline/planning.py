"""`plan`, and making the plan of a problem with a named, tuned or the best kernel, within a limit of workspace.

A plan that begins with a slow kernel of the table switches to a better one once that has been compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .. import _core
from ..arrays import symbols
from ..arrays.numerics import BYTE
from ..checks import check_index, check_options
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.epilogue.lower import has_tree, is_gated
from ..generator.families.cast import OP as CAST
from ..jit import kernels
from . import devices, select
from .call_options import documented
from .devices import Device
from .heuristic import KernelUse, heuristics
from .plan import BACKENDS, Plan
from .search import Candidate, KernelSearch
from .tuning import RecordedProblem

if TYPE_CHECKING:
    from .bindings import BoundPlan
    from .request import Request

F = TypeVar("F")


@documented
@dataclass(frozen=True)
class PlanOptions:
    """The options with which plans of all operations are made.

    Attributes:
        arch: keep to cells of this arch.
        alpha: default of the plan's calls.
        beta: default of the plan's calls.
        of_call: whether the plan serves only calls whose alpha and beta are 0 exactly where these are, like the plans
            that a function keeps: it then has no C if beta is 0, and launches for alpha 0 only if alpha is 0.
        like: an array whose framework allocates the workspace, where it can.
        backend: `auto`: the best kernel of the table; where it has none, the matrix's best one, compiled. `prebuilt`:
            the table only. `jit`: the matrix's best one, compiled.
        stream: the stream of the first launch, if known.
        bound: whether the plan keeps an operand (`binding`): kernels that read it ahead are then judged by chains of
            launches.
        use: the use under which the kernel is stored in `heuristics`, or None.
        in_background: whether a background thread makes the plan, while streams may be captured: the epilogue is not
            validated then; see `Plan.checked`.
        candidate: the kernel, which is not validated and need not be the best one; None chooses one.
        problem: the problem as recordings have it; None where tuned choices cannot be stored under it.
    """

    arch: SmArch | None = None
    alpha: float = 1.0
    beta: float = 0.0
    of_call: bool = False
    like: Any = None
    backend: str = "auto"
    jit: str | None = None
    stream: int | None = None
    workspace_size: int | None = None
    batch_invariant: bool = False
    bound: bool = False
    use: KernelUse | None = None
    in_background: bool = False
    candidate: Candidate[Any] | None = None
    problem: RecordedProblem | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidOperandError(f"a plan's backend is {self.backend!r}; valid: {', '.join(BACKENDS)}")


DEFAULT_OPTIONS = PlanOptions()

Build = Callable[[Candidate[F], PlanOptions], Plan]
"""Makes the plan of a problem with one of its kernels."""


@overload
def plan(
    request: Request,
    device: int | None = None,
    *,
    b: None = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
) -> Plan: ...


@overload
def plan(
    request: Request,
    device: int | None = None,
    *,
    b: Any,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
) -> BoundPlan: ...


@functools.partial(documented, own=PlanOptions)
def plan(
    request: Request,
    device: int | None = None,
    *,
    b: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
) -> Plan | BoundPlan:
    """Chooses a kernel for a request and allocates what it needs; compiles the kernel where the table lacks it.

    Not while a CUDA graph is captured: a plan whose kernel was compiled at run time asks the GPU for its parameters.

    Args:
        request: the request to compute; its operands are dense, batches and images outermost.
        device: index of the GPU; None is GPU 0.
        b: the operand that a `binding` of the request keeps, such as `b` of a GEMM (of a grouped one a list), on that
            GPU: the plan is then called without it, and `refit` gives it new values. The kernel is the one that is
            fastest where such launches follow one another.

    Returns:
        The plan, called with the arrays that its `slots` name, in that order: of a GEMM without scales, bias,
        activation and tree (a, b, c=None, *, out=None, ...).

    Raises:
        InvalidOperandError: `request` is no request.
        UnsupportedError: no kernel of the matrix serves it; the reason says what would cure it. Or the first use of an
            epilogue gave wrong results on this GPU.
        KernelNotFoundError: a kernel would serve it but is not in the table, and must not be compiled; names it and
            what adds it.
        CompileError: its source does not compile.
        DeviceUnavailableError: there is no GPU, or NVRTC is needed and missing.
    """
    from .operation import operation_of  # which calls of functions do not need

    operation = operation_of(request)
    check_options(backend=backend, jit=jit, workspace_size=workspace_size)
    if device is not None:
        check_index(device, "device")
    made = operation.plan(
        request, devices.get(int(device or 0)).index, arch=request.arch, alpha=request.epilogue.alpha,
        beta=request.epilogue.beta, backend=backend, jit=jit, workspace_size=workspace_size,
        bound=b is not None or request.binding is not None,
    )  # fmt: skip
    made.request = request
    made.key = request.plan_key()
    if b is None:
        return made
    from .bindings import BoundPlan

    return BoundPlan(made, b)


def planned(search: KernelSearch[F], build: Build[F], options: PlanOptions) -> Plan:
    """A plan with the kernel that a search yields.

    If a much better kernel than the table's is compiled in the background, launches switch to it when it is ready. If
    its epilogue has to be validated first, or its plan has other operands, the plan stays as it is and becomes
    `superseded`. `build` outlives the call where a kernel is compiled in the background.
    """
    if options.candidate is not None:
        return build(options.candidate, options)
    backend, workspace_size, problem = options.backend, options.workspace_size, search.tuned_problem
    if problem is not None:
        options = dataclasses.replace(options, problem=RecordedProblem(search.op, problem))
    search.named = heuristics.wanted(options.use, problem)
    if workspace_size is not None:
        symbols.refuse()  # the choice depends on the workspace, and so on the extents
    policy = kernels.policy(options.jit)
    candidate, better = select.decide(search, backend=backend, jit=policy, stream=options.stream)
    # With "background" the kernel may change during the plan's life; a plan with symbols serves many problems.
    changes = better is not None or policy == "background" or symbols.current() is not None
    use = None if candidate.named or changes else options.use
    if better is not None or candidate.info is None:
        symbols.refuse()  # the plan is replaced, or waits for a compiler

    def plan_of(candidate: Candidate[F], options: PlanOptions = options) -> Plan:
        made, epilogue = build(candidate, options), search.epilogue_of(candidate)
        if has_tree(epilogue) and not is_gated(epilogue):
            from ..epilogue import validate  # loads the reference, which only trees need

            made.checked = validate.require(
                candidate, epilogue, search.device, stream=options.stream, in_background=options.in_background
            )
        return made

    made = plan_of(candidate)
    if workspace_size is not None and made.workspace_bytes > workspace_size:
        for other in _others(search, candidate, backend):
            smaller = plan_of(other)
            if smaller.workspace_bytes <= workspace_size:
                made, candidate = smaller, other
                break
        else:
            raise UnsupportedError(
                f"{made.kernel_name} needs {made.workspace_bytes} bytes of workspace; workspace_size is "
                f"{workspace_size}: give as much, or None"
            )
    if use is not None:
        heuristics.note(use, candidate.key)
    if better is not None:
        _improve(made, better, plan_of, search.device, options)
    return made


def _improve(made: Plan, better: Candidate[F], build: Build[F], device: Device, options: PlanOptions) -> None:
    """Compiles a better kernel in the background, to which the plan switches if the workspace limit allows."""
    kernels.record_miss(better.key)
    waiting, like, workspace_size = weakref.ref(made), options.like, options.workspace_size
    # A reference to the array itself would keep its memory.
    if like is not None:
        like = _core.framework_empty(like, (1,), BYTE, device.index) if _core.has_exchange_api(like) else None
    options = dataclasses.replace(options, like=like, stream=None, in_background=True)

    def switch() -> None:
        plan = waiting()
        if plan is None:
            return
        following = build(better, options)
        if workspace_size is not None and following.workspace_bytes > workspace_size:
            return
        if not following.checked:
            plan.superseded = True
            return
        try:
            plan.replace(following)
        except InvalidOperandError:
            plan.superseded = True

    kernels.in_background(better.key, device, switch)


def _others(search: KernelSearch[F], candidate: Candidate[F], backend: str) -> Iterator[Candidate[F]]:
    """Candidates that may need less workspace: the kernel without slices of K, then others of the table.

    A helper that adds up slices of K takes time without slices too: a kernel that needs one comes last. A number of
    slices that is fixed remains.
    """

    def added_up(of: Candidate[F]) -> bool:
        return of.split_k > 1 and any(helper.op == CAST for helper in search.helpers(of.formulation))

    def whole(of: Candidate[F]) -> Candidate[F]:
        return of if search.slices(of.formulation) > 1 else dataclasses.replace(of, split_k=1)

    if candidate.split_k > 1 and not added_up(candidate):
        yield whole(candidate)
    if backend != "jit":
        for other in select.rank(search):
            if other.key.scheduler != "streamk" and not added_up(other):
                yield whole(other)
    if added_up(candidate):
        yield whole(candidate)
