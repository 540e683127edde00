"""`plan`: requests in, plans out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

from ..checks import check_index, check_options
from . import devices
from .bindings import BoundPlan
from .call_options import documented
from .operation import operation_of
from .plan import Plan
from .planning import PlanOptions

if TYPE_CHECKING:
    from .request import Request


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
            GPU: the plan is then called without it, and `refit` gives it new values.

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
    operation = operation_of(request)
    check_options(backend=backend, jit=jit, workspace_size=workspace_size)
    if device is not None:
        check_index(device, "device")
    made = operation.plan(
        request,
        devices.get(int(device or 0)).index,
        arch=request.arch,
        alpha=request.epilogue.alpha,
        beta=request.epilogue.beta,
        backend=backend,
        jit=jit,
        workspace_size=workspace_size,
    )
    made.request = request
    made.key = request.plan_key()
    return made if b is None else BoundPlan(made, b)
