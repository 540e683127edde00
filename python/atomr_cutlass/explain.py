"""`explain`: which kernel a request gets, why, and what would serve it better or at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import devices, problem, select
from .devices import Device
from .errors import CutlassError, InvalidOperandError, KernelNotFoundError
from .generator.archs import SmArch
from .generator.matrix import family
from .jit import kernels
from .plan import better_cell
from .requests import GemmRequest
from .select import Choice

VERIFICATION = {
    SmArch.SM80: "runs as PTX on sm_90",
    SmArch.SM86: "compiled and audited",
    SmArch.SM89: "runs as PTX on sm_90",
    SmArch.SM90A: "runs on sm_90a",
    SmArch.SM100: "compiled and audited",
    SmArch.SM120: "compiled and audited",
}
"""How cells of each arch have been verified; see the coverage page."""


@dataclass(frozen=True)
class Explanation:
    """Why a request gets the kernel it gets.

    Attributes:
        request: what was asked.
        arch: the arch that was looked up.
        kernel: name of the chosen kernel, or None.
        source: where it comes from: `prebuilt`, `pack NAME`, `jit`, or empty.
        reason: why this kernel, or why none.
        estimate_us: the model's estimate in microseconds, or None.
        candidates: the best few names with their estimates in microseconds.
        nearest: name of the nearest cell of the matrix, when the table has none.
        axes: the axes in which the nearest cell and the nearest built one differ.
        knob: the setting that adds the nearest cell.
        cached: of a kernel compiled at run time: `memory` or `disk` when it has been compiled, None when it would have
            to be.
        compile_seconds: how long that would take, about; 0 when it has been compiled, None for prebuilt kernels.
        verified: how cells of this arch have been verified.
        notes: rewrites and limits that apply, such as a column-major D by exchange.
    """

    request: GemmRequest
    arch: SmArch
    kernel: str | None
    source: str
    reason: str
    estimate_us: float | None
    candidates: tuple[tuple[str, float], ...]
    verified: str
    notes: tuple[str, ...]
    nearest: str | None = None
    axes: tuple[str, ...] = ()
    knob: str | None = None
    cached: str | None = None
    compile_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        shape = self.request.shape
        return {
            "shape": {"m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.batch},
            "dtype": self.request.dtype.value,
            "arch": self.arch.value,
            "kernel": self.kernel,
            "source": self.source,
            "reason": self.reason,
            "estimate_us": self.estimate_us,
            "candidates": [{"name": name, "estimate_us": estimate} for name, estimate in self.candidates],
            "nearest": self.nearest,
            "axes": list(self.axes),
            "knob": self.knob,
            "cached": self.cached,
            "compile_seconds": self.compile_seconds,
            "verified": self.verified,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [self.reason]
        if self.kernel:
            lines.insert(0, f"{self.kernel} ({self.source}, about {self.estimate_us:.1f} us by the model)")
        if self.compile_seconds is not None:
            waiting = f"it would be compiled first, about {self.compile_seconds:.0f} s on two cores"
            lines.append(f"compiled at run time, and in the cache ({self.cached})" if self.cached else waiting)
        lines += [f"nearest in the matrix: {self.nearest}"] if self.nearest else []
        lines += [f"it differs from what is built in: {', '.join(self.axes)}"] if self.axes else []
        lines += [f"to add it: {self.knob}"] if self.knob else []
        lines += [f"verified: {self.verified}", *self.notes]
        return "\n".join(lines)


def explain(request: GemmRequest, *, jit: str | None = None) -> Explanation:
    """Says which cell serves a request and why, without a GPU too: then the request must name its arch.

    Args:
        request: what would be computed.
        jit: as for `plan`: with `off`, nothing is thought of being compiled.

    Raises:
        InvalidOperandError: `request` is no request, or names no arch where there is no GPU.
    """
    if not isinstance(request, GemmRequest):
        raise InvalidOperandError(f"request is a {type(request).__name__}; expected a GemmRequest")
    device = devices.for_arch(request.arch)
    arch = request.arch or devices.require_arch(device)
    what = request.problem(device.index)
    if 0 in (request.shape.m, request.shape.n, request.shape.batch):
        return _without(request, arch, "the result is empty: nothing is launched")
    policy = kernels.policy(jit)
    try:
        ranked = select.rank(what, device, request.arch)
        best = (
            ranked[0]
            if ranked
            else select.choose(what, device, request.arch, backend="auto", compiling=policy != "off")
        )
    except KernelNotFoundError as error:
        return _missing(request, what, device, arch, str(error))
    except CutlassError as error:
        return _without(request, arch, str(error))
    if best.info is None:
        return _compiled(request, what, device, arch, best)
    notes = _notes(best, arch, device)
    newest = any(choice.key.generation == "sm90" for choice in ranked)
    if best.key.generation == "sm80" and arch is SmArch.SM90A and not newest:
        notes += ("an sm80-generation cell: the table has no TMA cell for this dtype, layout and alignment",)
    better = better_cell(best, what, device, request.arch) if policy == "background" else None
    if better is not None:
        notes += (f"{better.key.name} is compiled in the background and takes over when it is ready",)
    return Explanation(
        request=request,
        arch=arch,
        kernel=best.key.name,
        source=best.info.origin,
        reason=f"the best estimate of {len(ranked)} cells that match types, layouts and alignment",
        estimate_us=best.seconds * 1e6,
        candidates=tuple((choice.key.name, choice.seconds * 1e6) for choice in ranked[:5]),
        verified=VERIFICATION[best.key.arch],
        notes=notes,
    )


def _notes(choice: Choice, arch: SmArch, device: Device) -> tuple[str, ...]:
    notes = []
    if choice.variant.exchanged:
        notes.append("D is column-major: computed as D^T = B^T A^T, which costs nothing")
    if choice.key.arch is not arch:
        notes.append(f"a {choice.key.arch.value} cell, running on {device.name}")
    return tuple(notes)


def _compiled(
    request: GemmRequest, what: problem.GemmProblem, device: Device, arch: SmArch, best: Choice
) -> Explanation:
    """Of a kernel that the table lacks and that is compiled at run time."""
    absent = _missing(request, what, device, arch, "")
    try:
        cached = kernels.where(best.key, kernels.target_for(best.key, device))
    except CutlassError as error:
        return replace(absent, reason=f"the table has no kernel for it, and it cannot be compiled: {error}")
    return replace(
        absent,
        kernel=best.key.name,
        source="jit",
        reason="the table has no kernel for it: the matrix's best by the model, compiled at run time",
        estimate_us=best.seconds * 1e6,
        candidates=((best.key.name, best.seconds * 1e6),),
        cached=cached,
        compile_seconds=0.0 if cached else family(best.key).compile_seconds,
        verified=VERIFICATION[best.key.arch],
        notes=_notes(best, arch, device),
    )


def _missing(request: GemmRequest, what: problem.GemmProblem, device: Device, arch: SmArch, reason: str) -> Explanation:
    possible = list(problem.variants(what, problem.collapse_batches(what)))
    wanted = select.nearest_key(what, possible, arch, device)
    if wanted is None:
        return _without(request, arch, reason)
    nearest = select.nearest_built(wanted)
    return replace(
        _without(request, arch, reason),
        nearest=wanted.name,
        axes=nearest[1] if nearest else (),
        knob=f"{select.knob(wanted)} pip install .",
    )


def _without(request: GemmRequest, arch: SmArch, reason: str) -> Explanation:
    return Explanation(
        request=request,
        arch=arch,
        kernel=None,
        source="",
        reason=reason,
        estimate_us=None,
        candidates=(),
        verified=VERIFICATION[arch],
        notes=(),
    )
