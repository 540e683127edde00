"""`plan`: requests in, plans out."""

from __future__ import annotations

from typing import Any, overload

from ..checks import check_index, check_options
from . import devices
from .bindings import BoundPlan
from .operation import Request, operation_of
from .plan import Plan


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
        b: the second operand (of convolutions `w`, of the gradient by w `x`; of a grouped GEMM a list), on that GPU, to
            be bound: the plan is then called without it, and `refit` gives it new values.
        backend: `auto` (the table, then compilation), `prebuilt` or `jit`.
        jit: `auto`, `background` or `off`; None leaves it to ATOMR_CUTLASS_JIT. See `gemm.kernels.make`.
        workspace_size: bytes of device memory that a call may use beside its arrays; None is no limit.

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
