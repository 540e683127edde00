"""Plans: a problem with its kernel chosen and everything allocated, so that calling it only launches."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

from .. import _core
from ..arrays.operands import CUDA
from ..errors import InvalidOperandError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.key import ROW
from ..generator.matrix import preset_of
from ..generator.render import render
from ..jit import kernels, record
from . import devices, estimate, problem, select
from .devices import Device
from .plan_cache import PlanKey
from .problem import GemmProblem, MatrixSpec
from .select import Choice
from .table import KernelInfo

WORTHWHILE = 0.95
"""The part of a prebuilt kernel's time, by the model, that a compiled one must keep to: the model is no better."""

FAR = 0.5
"""Likewise, for one that is compiled whether or not `background` was asked for: the table has what serves anything."""

BACKENDS = ("auto", "prebuilt", "jit")

GRID_BATCHES = 65535
"""Batches that one launch of the sm80 generation takes: the z extent of a CUDA grid."""


class Plan(_core.GemmPlan):
    """One kernel and one problem; `plan(a, b, c=None, *, out=None, alpha=None, beta=None, stream=None)` launches.

    Operands must have the shape, strides, dtype, device and address alignment that the plan was made for, and may be
    other arrays at every call. `alpha` and `beta` default to the request's. Without `out` the result comes from the
    framework of `a`. A call launches one kernel (stream-K and split-K: a memory clear before it; batches that no single
    stride reaches or a grid cannot hold: several kernels) on `stream`, or on the framework's current stream; it does
    not synchronize, and may be captured into a CUDA graph; a workspace that a graph uses is never freed.

    Attributes:
        request: what the plan was made from, where that was a request.
        key: the request's PlanKey, likewise.
        kernel_name: of the kernel that calls launch.
        kernel_handle: what identifies the loaded kernel in this process.

    Raises:
        InvalidOperandError: an operand differs from what the plan was made for, or `out` overlaps an input.
        LibraryError, ContextPoisonedError: CUDA refused the launch.
    """

    request: Any
    key: PlanKey | None
    _choice: Choice
    _next: Plan | None

    def replace(self, next: Plan) -> None:  # type: ignore[override] # noqa: A002
        """Has launches go to another plan of the same problem, but never during the capture of a graph.

        A graph that begins with this plan's kernel stays with it. Operands that the other plan's kernel cannot read,
        for want of alignment, are served by this one's.
        """
        super().replace(next)
        self._next = next

    @property
    def choice(self) -> Choice:
        """The kernel that calls launch, with its launch options and estimated time."""
        other = self._next
        return other.choice if other is not None and other.kernel_handle == self.kernel_handle else self._choice

    @property
    def kernel(self) -> KernelInfo | None:
        """The kernel's row of the table; None when it was compiled at run time."""
        return self.choice.info

    @property
    def source(self) -> str:
        """The kernel's source, as it is compiled at run time."""
        return render(self.choice.key, flavour="nvrtc")[0]

    @property
    def origin(self) -> str:
        """Where the kernel comes from: `prebuilt`, `pack NAME` or `jit`."""
        info = self.choice.info
        return "jit" if info is None else info.origin


def make(
    what: GemmProblem,
    *,
    arch: SmArch | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    like: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    stream: int | None = None,
) -> Plan:
    """The plan for a problem.

    Args:
        what: the problem.
        arch: keep to cells of this arch.
        alpha: of calls that give none.
        beta: likewise.
        like: an array whose framework allocates the workspace, where it can.
        backend: `auto`: the best kernel of the table; where it has none, the matrix's best one, compiled. `prebuilt`:
            the table only. `jit`: the matrix's best one, compiled.
        jit: `background` starts with the best kernel of the table and compiles the matrix's best one meanwhile, if the
            model expects more of that: launches turn to it when it is ready. With nothing to start with, it is compiled
            first. `auto` does the same where the model expects twice the speed; `off` compiles nothing, and warns
            there, once. None leaves it to ATOMR_CUTLASS_JIT.
        stream: where the first launch will be, where that is known.

    Raises:
        UnsupportedError: no kernel of the matrix serves it, or one must be compiled and the stream is being captured.
    """
    if 0 in (what.m, what.n, what.batch):
        raise UnsupportedError(f"a result of shape {what.d.shape} is empty: there is nothing to plan")
    if backend not in BACKENDS:
        raise InvalidOperandError(f"a plan's backend is {backend!r}; valid: {', '.join(BACKENDS)}")
    policy = kernels.policy(jit)
    solvable, device = _nonempty(what), devices.get(what.device)
    choice = choose(solvable, device, arch, backend, policy)
    better = None
    capturing = stream is not None and _core.capturing(what.device, stream)
    if backend == "auto" and policy != "off" and not capturing:
        better = better_cell(choice, solvable, device, arch, WORTHWHILE if policy == "background" else FAR)
    if better is not None and kernels.ready(better.key, device):
        choice, better = better, None
    if better is not None and (reason := kernels.problem()):
        _warn_of_slow(choice, better, reason)
        better = None
    if choice.info is None and capturing:
        raise UnsupportedError(
            f"{choice.key.name} is compiled at run time, and such plans cannot be made while a CUDA graph is captured: "
            "make the plan before, with ac.plan or by one call outside the capture"
        )
    made = from_choice(what, choice, alpha=alpha, beta=beta, like=like)
    if better is not None:
        _improve(made, what, better, like)
    return made


def choose(what: GemmProblem, device: Device, arch: SmArch | None, backend: str, jit: str | None) -> Choice:
    """The kernel for a problem under the policy of compiling. Arguments and errors are those of `make`."""
    policy = kernels.policy(jit)
    compiling = backend == "jit" or policy != "off"
    try:
        choice = select.choose(what, device, arch, backend=backend, compiling=compiling)
    except KernelNotFoundError:
        missed = select.best_cell(what, device, arch)
        if missed is not None:
            kernels.record_miss(missed.key)
        raise
    if choice.info is None:
        if policy == "off":
            nearest = select.nearest_built(choice.key)
            raise KernelNotFoundError(
                f"backend='jit' asks for {choice.key.name} to be compiled, which jit='off' or "
                f"{kernels.POLICY_VARIABLE}=off forbids: {select.cure(choice.key)}"
                + (f"; the nearest in the table is {nearest[0]}" if nearest else "")
            )
        if backend != "jit":
            kernels.record_miss(choice.key)
    elif backend == "auto" and policy == "off":
        better = better_cell(choice, what, device, arch, FAR)
        if better is not None:
            _warn_of_slow(choice, better, f"jit='off' or {kernels.POLICY_VARIABLE}=off forbids to compile that")
    return choice


_warned: set[tuple[str, str]] = set()


def _warn_of_slow(choice: Choice, better: Choice, reason: str) -> None:
    """Says once that a kernel is used which another would leave far behind, why, and what cures it."""
    if (choice.key.name, better.key.name) in _warned:
        return
    _warned.add((choice.key.name, better.key.name))
    cure = select.cure(better.key) if preset_of(better.key) else "it is in no preset, and compiled at run time only"
    warnings.warn(
        f"{choice.key.name} is used, which by the model takes {choice.seconds / better.seconds:.1f} times as long as "
        f"{better.key.name}: {reason}; {cure}",
        RuntimeWarning,
        stacklevel=3,
    )


def better_cell(
    choice: Choice, what: GemmProblem, device: Device, arch: SmArch | None, part: float = WORTHWHILE
) -> Choice | None:
    """The matrix's best cell, if it promises enough over a prebuilt one: at most `part` of its time."""
    if choice.info is None or estimate.least(choice.key, choice.variant, device) > part * choice.seconds:
        return None
    try:
        best = select.best_cell(what, device, arch)
    except UnsupportedError:  # a GPU that no target is made for, and that older cells serve all the same
        return None
    worthwhile = best is not None and best.key != choice.key and best.seconds <= part * choice.seconds
    return best if worthwhile else None


def _improve(made: Plan, what: GemmProblem, better: Choice, like: Any) -> None:
    """Compiles a better kernel in the background, and has the plan launch it from then on."""
    kernels.record_miss(better.key)
    waiting = weakref.ref(made)
    # The array itself may be large, and is the caller's to drop.
    if like is not None and _core.has_exchange_api(like):
        like = _core.framework_empty(like, (1,), what.d.dtype.dlpack, what.device)

    def swap() -> None:
        plan = waiting()
        if plan is not None:
            plan.replace(from_choice(what, better, like=like))

    kernels.in_background(better.key, devices.get(what.device), swap)


def _nonempty(what: GemmProblem) -> GemmProblem:
    """The problem itself, or with K = 0 one that any kernel of its types can read: its operands are never touched."""
    if what.k != 0:
        return what
    wide = 128 // what.a.dtype.bits
    a = MatrixSpec((what.m, wide), (wide, 1), what.a.dtype)
    b = MatrixSpec((wide, what.n), (1, wide), what.b.dtype)
    return dataclasses.replace(what, a=a, b=b)


def from_choice(what: GemmProblem, choice: Choice, *, alpha: float = 1.0, beta: float = 0.0, like: Any = None) -> Plan:
    """The plan for a problem with this kernel, which need not be the best one."""
    device = devices.get(what.device)
    key, variant = choice.key, choice.variant
    null_k = 128 // key.a.bits
    null_lda = null_k if key.layout_a == ROW else _padded(variant.m, key.a)
    null_ldb = _padded(variant.n, key.b) if key.layout_b == ROW else null_k
    zeros_a = null_lda * (variant.m if key.layout_a == ROW else null_k)
    zeros_b = null_ldb * (null_k if key.layout_b == ROW else variant.n)
    per_launch = min(variant.batch, GRID_BATCHES) if key.generation == "sm80" else variant.batch
    made = Plan(
        choice.info.name if choice.info else kernels.kernel(key, device),
        {
            **product_args(choice, what.k),
            "batch": per_launch,
            "sm_count": device.multiprocessors,
        },
        _spec(what.a, key.align_b if variant.exchanged else key.align_a, what.device),
        _spec(what.b, key.align_a if variant.exchanged else key.align_b, what.device),
        _spec(what.c or what.d, key.align_d, what.device),
        _spec(what.d, key.align_d, what.device),
        _launches(what, choice, per_launch),
        {
            "device": what.device,
            "exchanged": variant.exchanged,
            "integral": key.acc is CutlassDtype.I32,
            "alpha": float(alpha),
            "beta": float(beta),
            "null_k": null_k,
            "null_lda": null_lda,
            "null_ldb": null_ldb,
            "null_bytes": max(zeros_a, zeros_b) * key.a.bits // 8,
        },
        like,
    )
    made.request = None
    made.key = None
    made._choice, made._next = choice, None  # noqa: SLF001 - this module's own
    record.note(made, [(key, {**product_args(choice, what.k), "batch": variant.batch})])
    return made


def product_args(choice: Choice, k: int) -> dict[str, int]:
    """What a kernel's arguments say of a product besides pointers, scalars and how many batches: fields by name."""
    variant = choice.variant
    strides = variant.batch_strides
    return {
        "m": variant.m, "n": variant.n, "k": k, "lda": variant.lda, "ldb": variant.ldb, "ldc": variant.ldc,
        "ldd": variant.ldd, "batch_stride_a": strides[0], "batch_stride_b": strides[1], "batch_stride_c": strides[2],
        "batch_stride_d": strides[3], "split_k": choice.split_k, "swizzle": choice.swizzle, "raster": choice.raster,
    }  # fmt: skip


def _launches(what: GemmProblem, choice: Choice, per_launch: int) -> list[tuple[int, int, int, int, int]]:
    """Where each launch's operands lie, in bytes from the caller's pointers, and its batches."""
    bits = (what.a.dtype.bits, what.b.dtype.bits, what.d.dtype.bits, what.d.dtype.bits)
    launches = []
    for outer in choice.batches.offsets:
        for start in range(0, choice.batches.count, per_launch):
            a, b, c, d = (
                (offset + start * stride) * width // 8
                for offset, stride, width in zip(outer, choice.batches.strides, bits, strict=True)
            )
            launches.append((a, b, c, d, min(per_launch, choice.batches.count - start)))
    return launches


def _padded(extent: int, dtype: CutlassDtype) -> int:
    return problem.round_up(extent, 128 // dtype.bits)


def _spec(spec: MatrixSpec, align: int, device: int) -> tuple[_core.Operand, int]:
    """What C++ compares a caller's operand with, and the bytes that its address must be a multiple of."""
    layout = _core.Operand(0, spec.shape, spec.strides, spec.dtype.dlpack, CUDA, device)
    return layout, max(1, align * spec.dtype.bits // 8)
