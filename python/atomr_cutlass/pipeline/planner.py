"""`plan`: requests in, plans out."""

from __future__ import annotations

from typing import Any, TypeAlias, overload

from ..checks import check_index, check_options
from ..errors import InvalidOperandError, UnsupportedError
from ..ops.conv2d import kernels as conv_plan
from ..ops.conv2d.request import ConvDgradRequest, ConvFwdRequest, ConvWgradRequest
from ..ops.gemm import scaled
from ..ops.gemm.request import GemmRequest
from ..ops.grouped_gemm import kernels as grouped_plan
from ..ops.grouped_gemm.request import GroupedGemmRequest
from . import devices
from .bindings import BoundPlan
from .op_plan import OpPlan
from .operand_table import plain
from .plan import Plan, make

ConvRequest: TypeAlias = "ConvFwdRequest | ConvDgradRequest | ConvWgradRequest"
Request: TypeAlias = "GemmRequest | GroupedGemmRequest | ConvRequest"


@overload
def plan(
    request: GemmRequest, device: int | None = None, *, b: None = None, backend: str = "auto", jit: str | None = None
) -> Plan: ...


@overload
def plan(
    request: GemmRequest, device: int | None = None, *, b: Any, backend: str = "auto", jit: str | None = None
) -> BoundPlan: ...


@overload
def plan(
    request: GroupedGemmRequest | ConvRequest,
    device: int | None = None,
    *,
    b: None = None,
    backend: str = "auto",
    jit: str | None = None,
) -> OpPlan: ...


def plan(
    request: Request, device: int | None = None, *, b: Any = None, backend: str = "auto", jit: str | None = None
) -> Plan | BoundPlan | OpPlan:
    """Chooses a kernel for a request and allocates what it needs; compiles the kernel where the table lacks it.

    Not while a CUDA graph is captured: a plan whose kernel was compiled at run time asks the GPU for its parameters.

    Args:
        request: what to compute; its operands are dense, batches and images outermost.
        device: index of the GPU; None is GPU 0.
        b: of a GEMM, operand B, on that GPU, to be bound: the plan is then called without it, and `refit` gives it new
            values.
        backend: `auto` (the table, then compilation), `prebuilt` or `jit`.
        jit: `auto`, `background` or `off`; None leaves it to ATOMR_CUTLASS_JIT. See `plan.make`.

    Returns:
        A `Plan` of a GEMM without scales, bias, activation and tree, called with (a, b, c=None, *, out=None, ...); of
        other requests an `OpPlan`, called with the arrays that its `slots` name, in that order.

    Raises:
        InvalidOperandError: `request` is no request.
        UnsupportedError: no kernel of the matrix serves it; the reason says what would cure it. Or the first use of an
            epilogue gave wrong results on this GPU.
        KernelNotFoundError: a kernel would serve it but is not in the table, and must not be compiled; names it and the
            knob that adds it.
        CompileError: its source does not compile.
        DeviceUnavailableError: there is no GPU, or NVRTC is needed and missing.
    """
    expect_request(request)
    if b is not None and not plain(request):
        raise UnsupportedError("b= binds the operand of a plain GEMM: this plan takes all its arrays at every call")
    made: Plan | OpPlan
    check_options(backend=backend, jit=jit)
    if device is not None:
        check_index(device, "device")
    target = devices.get(int(device or 0)).index
    how = _how(request, backend, jit)
    if isinstance(request, GemmRequest):
        if plain(request):
            made = make(request.problem(target), **how)
        else:
            scales = request.scales() or scaled.NO_SCALES
            made = scaled.make(request.problem(target), scales, request.fusion(), **how)
    elif isinstance(request, GroupedGemmRequest):
        made = grouped_plan.make(request.problem(target), **how)
    else:
        made = conv_plan.make(request.problem(target), layout=request.layout.value, **how)
    made.request = request
    made.key = request.plan_key()
    return made if b is None else BoundPlan(made, b)


REQUESTS = (GemmRequest, GroupedGemmRequest, ConvFwdRequest, ConvDgradRequest, ConvWgradRequest)


def expect_request(request: Any) -> None:
    """Refuses what is no request.

    Raises:
        InvalidOperandError: it is none.
    """
    if not isinstance(request, REQUESTS):
        *names, last = (kind.__name__ for kind in REQUESTS)
        raise InvalidOperandError(f"request is a {type(request).__name__}; expected a {', '.join(names)} or {last}")


def _how(request: Request, backend: str, jit: str | None) -> dict[str, Any]:
    return {
        "arch": request.arch, "alpha": request.epilogue.alpha, "beta": request.epilogue.beta, "backend": backend,
        "jit": jit,
    }  # fmt: skip
