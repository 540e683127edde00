"""`explain`: which kernel a request gets, why, and what would serve it better or at all."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from . import devices, problem, select, table
from .devices import Device
from .errors import CutlassError, InvalidOperandError
from .generator.archs import SmArch
from .generator.key import KernelKey
from .generator.matrix import preset_of
from .requests import GemmRequest

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
        source: where it comes from: `prebuilt`, `pack NAME`, or empty.
        reason: why this kernel, or why none.
        estimate_us: the model's estimate in microseconds, or None.
        candidates: the best few names with their estimates in microseconds.
        nearest: name of the nearest cell of the matrix, when the table has none.
        axes: the axes in which the nearest cell and the nearest built one differ.
        knob: the setting that adds the nearest cell.
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
    nearest: str | None
    axes: tuple[str, ...]
    knob: str | None
    verified: str
    notes: tuple[str, ...]

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
            "verified": self.verified,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [self.reason]
        if self.kernel:
            lines.insert(0, f"{self.kernel} ({self.source}, about {self.estimate_us:.1f} us by the model)")
        lines += [f"nearest in the matrix: {self.nearest}"] if self.nearest else []
        lines += [f"it differs from what is built in: {', '.join(self.axes)}"] if self.axes else []
        lines += [f"to add it: {self.knob}"] if self.knob else []
        lines += [f"verified: {self.verified}", *self.notes]
        return "\n".join(lines)


def explain(request: GemmRequest) -> Explanation:
    """Says which cell serves a request and why, without a GPU too: then the request must name its arch.

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
    try:
        ranked = select.rank(what, device, request.arch)
    except CutlassError as error:
        return _without(request, arch, str(error))
    if not ranked:
        return _missing(request, what, device, arch)
    best = ranked[0]
    notes = []
    if best.variant.exchanged:
        notes.append("D is column-major: computed as D^T = B^T A^T, which costs nothing")
    if best.info.key.arch is not arch:
        notes.append(f"a {best.info.key.arch.value} cell, running on {device.name}")
    newest = any(choice.info.key.generation == "sm90" for choice in ranked)
    if best.info.key.generation == "sm80" and arch is SmArch.SM90A and not newest:
        notes.append("an sm80-generation cell: the table has no TMA cell for this dtype, layout and alignment")
    return Explanation(
        request=request,
        arch=arch,
        kernel=best.info.name,
        source=f"pack {best.info.pack}" if best.info.pack else "prebuilt",
        reason=f"the best estimate of {len(ranked)} cells that match types, layouts and alignment",
        estimate_us=best.seconds * 1e6,
        candidates=tuple((choice.info.name, choice.seconds * 1e6) for choice in ranked[:5]),
        nearest=None,
        axes=(),
        knob=None,
        verified=VERIFICATION[best.info.key.arch],
        notes=tuple(notes),
    )


def _missing(request: GemmRequest, what: problem.GemmProblem, device: Device, arch: SmArch) -> Explanation:
    reason = str(select.missing(what, device, request.arch))
    possible = list(problem.variants(what, problem.collapse_batches(what)))
    nearest = select.nearest_key(what, possible, arch, device)
    if nearest is None:
        return _without(request, arch, reason)
    built = [info.key for info in table.kernels(op="gemm")]
    closest = min((_differences(nearest, key) for key in built), key=len, default=())
    preset = preset_of(nearest)
    return Explanation(
        request=request,
        arch=arch,
        kernel=None,
        source="",
        reason=reason,
        estimate_us=None,
        candidates=(),
        nearest=nearest.name,
        axes=closest,
        knob=f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset} -DATOMR_CUTLASS_ARCHS={arch.target}' pip install .",
        verified=VERIFICATION[arch],
        notes=(),
    )


def _differences(a: KernelKey, b: KernelKey) -> tuple[str, ...]:
    return tuple(field.name for field in fields(KernelKey) if getattr(a, field.name) != getattr(b, field.name))


def _without(request: GemmRequest, arch: SmArch, reason: str) -> Explanation:
    return Explanation(
        request=request, arch=arch, kernel=None, source="", reason=reason, estimate_us=None, candidates=(),
        nearest=None, axes=(), knob=None, verified=VERIFICATION[arch], notes=(),
    )  # fmt: skip
