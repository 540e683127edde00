"""`explain`: which kernel a request gets, why, and what would serve it better or at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from ..checks import check_options
from ..errors import CutlassError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.key import KernelKey
from ..generator.matrix import cells, family, preset_of
from ..jit import kernels
from ..ops.conv2d import kernels as conv_plan
from ..ops.gemm import scaled
from ..ops.gemm.request import GemmRequest
from ..ops.grouped_gemm import kernels as grouped_plan
from ..ops.grouped_gemm.request import GroupedGemmRequest
from . import devices, pick, problem, select
from .devices import Device
from .operand_table import plain, shape_of
from .pick import Picked
from .plan import FAR, WORTHWHILE, better_cell
from .planner import Request, expect_request
from .problem import GemmProblem
from .select import Choice
from .verification import verification

Cell: TypeAlias = "Choice | Picked"

TMA_CAPABILITY = (9, 0)
"""From here on there are newer generations than sm80."""


@dataclass(frozen=True)
class Explanation:
    """Why a request gets the kernel it gets.

    Attributes:
        request: what was asked.
        arch: the arch that was looked up.
        kernel: name of the chosen kernel (of a rewrite: of the one that does the products), or None.
        source: where it comes from: `prebuilt`, `pack NAME`, `jit`, or empty.
        reason: why this kernel, or why none.
        estimate_us: the model's estimate in microseconds, or None.
        candidates: the best few names with their estimates in microseconds.
        nearest: name of the nearest cell of the matrix, when the table has none.
        axes: the axes in which the nearest cell and the nearest built one differ.
        knob: the setting that adds the nearest cell; None where no preset has it, so that it is compiled at run time
            only.
        cached: of a kernel compiled at run time: `memory` or `disk` when it has been compiled, None when it would have
            to be.
        compile_seconds: how long that would take, about; 0 when it has been compiled, None for prebuilt kernels.
        verified: how the kernel (without one: the nearest cell) has been verified, by what and when, and whether it has
            changed since; empty where there is neither.
        notes: rewrites and limits that apply, such as a column-major D by exchange or fp8 operands that are cast.
    """

    request: Request
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
        """JSON-ready values; `shape` has the extents of the operation."""
        return {
            "op": self.request.plan_key().op,
            "shape": shape_of(self.request),
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
        lines += [f"verified: {self.verified}"] if self.verified else []
        lines += self.notes
        return "\n".join(lines)


def explain(request: Request, *, jit: str | None = None) -> Explanation:
    """Says which cell serves a request and why, without a GPU too: then the request must name its arch.

    Args:
        request: what would be computed.
        jit: as for `plan`: with `off`, nothing is thought of being compiled.

    Raises:
        InvalidOperandError: `request` is no request, or names no arch where there is no GPU.
    """
    expect_request(request)
    check_options(jit=jit)
    device = devices.for_arch(request.arch)
    arch = request.arch or devices.require_arch(device)
    case = _case(request, device)
    if case.empty:
        return _without(request, arch, "the result is empty: nothing is launched")
    policy = kernels.policy(jit)
    try:
        found = case.find(policy)
    except KernelNotFoundError as error:
        return _missing(case, arch, str(error))
    except CutlassError as error:
        return _without(request, arch, str(error))
    notes = (*found.notes, *_cell_notes(case, found, arch))
    if found.best.info is None:
        return _compiled(case, arch, found.best, notes)
    if policy != "off" and isinstance(case, _Gemm):
        notes += case.background(found.best, WORTHWHILE if policy == "background" else FAR)
    return Explanation(
        request=request,
        arch=arch,
        kernel=found.best.key.name,
        source=found.best.info.origin,
        reason=f"the best estimate of {len(found.ranked)} cells that match types, layouts and alignment",
        estimate_us=found.best.seconds * 1e6,
        candidates=tuple((one.key.name, one.seconds * 1e6) for one in found.ranked[:5]),
        verified=str(verification(found.best.key, found.best.info)),
        notes=notes,
    )


# ----------------------------------------------------------------------------------------------------------------------
# What differs from operation to operation
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The table's cells that serve a request, the one that a plan takes, and what is done to the request for it."""

    ranked: Sequence[Cell]
    best: Cell
    notes: tuple[str, ...]


class _Case(Protocol):
    """A request, and how kernels are found for it."""

    @property
    def request(self) -> Request: ...
    @property
    def device(self) -> Device: ...
    @property
    def empty(self) -> bool: ...

    def find(self, policy: str) -> _Found:
        """Raises what making a plan would."""

    def wanted(self, arch: SmArch) -> KernelKey | None:
        """The matrix's best cell."""

    def serving(self, arch: SmArch) -> Iterable[KernelKey]:
        """The matrix's cells that serve the request."""

    def serves(self, key: KernelKey) -> bool:
        """Whether a kernel serves the request, whatever it is compiled for."""


def _case(request: Request, device: Device) -> _Case:
    if isinstance(request, GemmRequest):
        return _Gemm(request, device)
    return _Grouped(request, device) if isinstance(request, GroupedGemmRequest) else _Conv(request, device)


class _Gemm:
    """GEMM: kernels are chosen together with how the problem is put to them."""

    def __init__(self, request: GemmRequest, device: Device) -> None:
        self.request = request
        self.device = device
        self._ways = scaled.ways(request.problem(device.index), request.scales() or scaled.NO_SCALES, request.fusion())
        self.what = self._ways[-1]
        self.empty = 0 in (request.shape.m, request.shape.n, request.shape.batch)

    def find(self, policy: str) -> _Found:
        if not plain(self.request):
            scaled.refuse(self.what)
        *better, last = scaled.table_first(self._ways, self.device, self.request.arch)
        for way in better:
            with contextlib.suppress(UnsupportedError, KernelNotFoundError):
                return self._find(way, policy)
        return self._find(last, policy)

    def _find(self, way: GemmProblem, policy: str) -> _Found:
        ranked = select.rank(way, self.device, self.request.arch)
        best = (
            ranked[0]
            if ranked
            else select.choose(way, self.device, self.request.arch, backend="auto", compiling=policy != "off")
        )
        self.what, notes = way, []
        if best.variant.exchanged:
            notes.append("D is column-major: computed as D^T = B^T A^T, which costs nothing")
        if self.request.tree is not None and best.info is None and preset_of(best.key) is None:
            notes.append(
                f"the epilogue is a tree ({self.request.tree.id}) whose kernel is in no preset: it is compiled at run "
                "time, unless a pack has it"
            )
        return _Found(ranked, best, tuple(notes))

    def wanted(self, arch: SmArch) -> KernelKey | None:
        return select.nearest_key(self.what, self._variants(), arch, self.device)

    def serving(self, arch: SmArch) -> Iterable[KernelKey]:
        return select.serving(self.what, self._variants(), arch)

    def serves(self, key: KernelKey) -> bool:
        return any(select.eligible(key, self.what, variant) for variant in self._variants())

    def background(self, best: Cell, part: float) -> tuple[str, ...]:
        """Whether a better kernel takes over some time."""
        better = None
        if plain(self.request) and isinstance(best, Choice):
            better = better_cell(best, self.what, self.device, self.request.arch, part)
        return () if better is None else (
            f"{better.key.name} is compiled in the background and takes over when it is ready",
        )  # fmt: skip

    def _variants(self) -> list[problem.Variant]:
        return list(problem.variants(self.what, problem.collapse_batches(self.what)))


class _Conv:
    """Convolutions: what no kernel computes as it stands is rewritten."""

    empty = False

    def __init__(self, request: Any, device: Device) -> None:
        self.request = request
        self.device = device
        self.what = request.problem(device.index)
        self._solved: tuple[Any, int] = (self.what, 1)
        self._chosen: KernelKey | None = None

    def find(self, policy: str) -> _Found:
        chosen = conv_plan.choose(self.what, self.device, arch=self.request.arch, jit=policy, record=False)
        self._solved, self._chosen = (chosen.solved, chosen.split_k), chosen.picked.key
        ranked = pick.rank(self.request.op, self._cost, self.device, self.request.arch)
        return _Found(ranked, chosen.picked, (f"a rewrite: {chosen.rewrite}",) if chosen.rewrite else ())

    def wanted(self, arch: SmArch) -> KernelKey | None:
        return self._chosen or conv_plan.best_key(self.what, self.device, arch)

    def serving(self, arch: SmArch) -> Iterable[KernelKey]:
        return (key for _, key in cells([arch]) if self.serves(key))

    def serves(self, key: KernelKey) -> bool:
        if key.op != self.request.op:
            return False
        # As it stands too: where slices of K are faster, that is no want of kernels.
        return self._cost(key) is not None or conv_plan.cost(key, self.what, self.device) is not None

    def _cost(self, key: KernelKey) -> float | None:
        solved, split_k = self._solved
        return conv_plan.cost(key, solved, self.device, split_k)


class _Grouped:
    """Grouped GEMM."""

    def __init__(self, request: GroupedGemmRequest, device: Device) -> None:
        self.request = request
        self.device = device
        self.what = request.problem(device.index)
        self.empty = self.what.empty

    def find(self, policy: str) -> _Found:
        arch = self.request.arch
        best = grouped_plan.choose(self.what, self.device, arch=arch, jit=policy, record=False)
        return _Found(pick.rank(grouped_plan.OP, self._cost, self.device, arch), best, ())

    def wanted(self, arch: SmArch) -> KernelKey | None:
        return grouped_plan.best_key(self.what, self.device, arch)

    def serving(self, arch: SmArch) -> Iterable[KernelKey]:
        return (key for _, key in cells([arch]) if self.serves(key))

    def serves(self, key: KernelKey) -> bool:
        return grouped_plan.serves(key, self.what, self.device)

    def _cost(self, key: KernelKey) -> float | None:
        return grouped_plan.cost(key, self.what, self.device)


# ----------------------------------------------------------------------------------------------------------------------
# What they have in common
# ----------------------------------------------------------------------------------------------------------------------


def _cell_notes(case: _Case, found: _Found, arch: SmArch) -> tuple[str, ...]:
    key, notes = found.best.key, []
    if key.arch is not arch:
        notes.append(f"a {key.arch.value} cell, running on {case.device.name}")
    if key.generation == "sm80" and arch.capability >= TMA_CAPABILITY:
        built = found.best.info is not None
        others = [one.key for one in found.ranked] if built else case.serving(arch)
        if all(one.generation == "sm80" for one in others):
            where = "the table" if built else "the matrix"
            notes.append(f"an sm80-generation cell: {where} has none with TMA that serves this request")
    return tuple(notes)


def _compiled(case: _Case, arch: SmArch, best: Cell, notes: tuple[str, ...]) -> Explanation:
    """Of a kernel that the table lacks and that is compiled at run time."""
    absent = _missing(case, arch, "")
    passed_over = select.too_new(case.device, case.request.arch, case.serves)
    notes += (passed_over,) if passed_over else ()
    try:
        cached = kernels.where(best.key, kernels.target_for(best.key, case.device))
    except CutlassError as error:
        reason = f"the table has no kernel for it, and it cannot be compiled: {error}"
        return replace(absent, reason=reason, notes=notes)
    return replace(
        absent,
        kernel=best.key.name,
        source="jit",
        reason="the table has no kernel for it: the matrix's best by the model, compiled at run time",
        estimate_us=best.seconds * 1e6,
        candidates=((best.key.name, best.seconds * 1e6),),
        cached=cached,
        compile_seconds=0.0 if cached else family(best.key).compile_seconds,
        verified=str(verification(best.key)),
        notes=notes,
    )


def _missing(case: _Case, arch: SmArch, reason: str) -> Explanation:
    try:
        wanted = case.wanted(arch)
    except UnsupportedError:
        wanted = None
    if wanted is None:
        return _without(case.request, arch, reason)
    nearest = select.nearest_built(wanted)
    return replace(
        _without(case.request, arch, reason),
        verified=str(verification(wanted)),
        nearest=wanted.name,
        axes=nearest[1] if nearest else (),
        knob=f"{select.knob(wanted)} pip install ." if preset_of(wanted) else None,
    )


def _without(request: Request, arch: SmArch, reason: str) -> Explanation:
    return Explanation(
        request=request,
        arch=arch,
        kernel=None,
        source="",
        reason=reason,
        estimate_us=None,
        candidates=(),
        verified="",
        notes=(),
    )
