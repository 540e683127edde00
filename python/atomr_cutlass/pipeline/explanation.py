"""`explain`: which kernel serves a request and why, or what would add one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import check_options
from ..errors import CutlassError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.epilogue.lower import split
from ..generator.key import ANYWHERE, RAGGED, REALIGNED, KernelKey, shared_memory
from ..generator.matrix import family, preset_of
from ..generator.rules import FEW
from ..jit import kernels
from . import devices, select, table
from .heuristic import heuristics
from .operation import described, operation_of
from .search import Candidate, KernelSearch
from .verification import verification

if TYPE_CHECKING:
    from .request import Request

_REASONS_SHOWN = 5


class Refused(NamedTuple):
    """Kernels that do not serve a request: the reason, their number, and the name of the first."""

    reason: str
    kernels: int
    first: str


@dataclass(frozen=True)
class Explanation:
    """The kernel that serves a request, and why.

    Attributes:
        request: the request that was explained.
        arch: the arch that was looked up.
        kernel: name of the chosen kernel (of a rewrite: of the one that does the products), or None.
        source: its origin: `prebuilt`, `pack NAME`, `jit`, or empty.
        reason: why this kernel, or why none.
        estimate_us: the model's estimate in microseconds, or None.
        candidates: the best few names with their estimates in microseconds.
        nearest: name of the nearest cell of the matrix, when the table has none, or lacks a kernel beside it.
        axes: the axes in which the nearest cell and the nearest built one differ.
        knob: the setting that adds the nearest cell, or one that computes its tree among others; None where no preset
            has either.
        pack: how to build a pack with the nearest cell; None where `nearest` is.
        cached: of kernels compiled at run time, those beside the chosen one included: `memory` or `disk` when they have
            been compiled, None when one would have to be.
        compile_seconds: about how long compiling would take; 0 when they have been compiled, None where all are
            prebuilt.
        verified: how the kernel (without one: the nearest cell) has been verified, by what and when, and whether it has
            changed since; empty where there is no such kernel.
        notes: rewrites and limits that apply, such as operands that are swapped for a column-major D or fp8 operands
            that are cast.
        refused: the table's kernels of the operation that do not serve the request, by reason, the commonest first;
            where no kernel of the matrix serves it, the matrix's too. Where only a helper beside the main kernel is
            missing, the kernels of the helper's operation.
    """

    request: Request
    arch: SmArch
    kernel: str | None = None
    source: str = ""
    reason: str = ""
    estimate_us: float | None = None
    candidates: tuple[tuple[str, float], ...] = ()
    verified: str = ""
    notes: tuple[str, ...] = ()
    nearest: str | None = None
    axes: tuple[str, ...] = ()
    knob: str | None = None
    pack: str | None = None
    cached: str | None = None
    compile_seconds: float | None = None
    refused: tuple[Refused, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; `shape` has the extents of the operation."""
        values = dict(vars(self))
        candidates = [{"name": name, "estimate_us": estimate} for name, estimate in self.candidates]
        refused = [refusal._asdict() for refusal in self.refused]
        lists = {"candidates": candidates, "axes": list(self.axes), "notes": list(self.notes), "refused": refused}
        return described(values.pop("request")) | values | {"arch": self.arch.value} | lists

    def __str__(self) -> str:
        lines = [self.reason]
        if self.kernel:
            lines.insert(0, f"{self.kernel} ({self.source}, about {self.estimate_us:.1f} us by the model)")
        if self.compile_seconds is not None:
            subject = "it" if self.source == "jit" else "a kernel beside it"
            waiting = f"{subject} would be compiled first, about {self.compile_seconds:.0f} s on two cores"
            lines.append(f"compiled at run time, and in the cache ({self.cached})" if self.cached else waiting)
        lines += [f"nearest in the matrix: {self.nearest}"] if self.nearest else []
        lines += [f"it differs from what is built in: {', '.join(self.axes)}"] if self.axes else []
        lines += [f"to add it: {self.knob}"] if self.knob else []
        lines += [f"{'or' if self.knob else 'to add it'}: {self.pack}"] if self.pack else []
        lines += [f"verified: {self.verified}"] if self.verified else []
        lines += self.notes
        if self.refused:
            counts = [f"{refusal.kernels}: {refusal.reason}" for refusal in self.refused[:_REASONS_SHOWN]]
            if others := sum(refusal.kernels for refusal in self.refused[_REASONS_SHOWN:]):
                counts.append(f"{others}: other reasons")
            total = sum(refusal.kernels for refusal in self.refused)
            lines.append(f"of {total} kernels that do not serve it, {'; '.join(counts)}")
        return "\n".join(lines)


def explain(request: Request, *, jit: str | None = None) -> Explanation:
    """Explains which cell serves a request and why. Without a GPU the request must name its arch.

    Args:
        request: the request to explain.
        jit: as for `plan`: with `off`, compilation is not considered.

    Raises:
        InvalidOperandError: `request` is no request, or names no arch where there is no GPU.
    """
    operation = operation_of(request)
    check_options(jit=jit)
    device = devices.for_arch(request.arch)
    arch = request.arch or devices.require_arch(device)
    search = None
    try:
        search = operation.search(request, device)
        if search is None:
            return Explanation(request, arch, reason="the result is empty: nothing is launched")
        search.named = heuristics.wanted(None, search.tuned_problem)
        policy = kernels.policy(jit)
        best = select.choose(search, jit=policy, record=False)
        searches = search.helpers(best.formulation)
        helpers = [(helper, select.choose(helper, jit=policy, record=False)) for helper in searches]
    except CutlassError as error:
        if isinstance(error, KernelNotFoundError) and search is not None:
            lacking = select.lacking(search)
            return Explanation(request, arch, reason=str(error), refused=_refused(lacking), **_cure(lacking, arch))
        refused = () if search is None else _refused(search, [arch])
        return Explanation(request, arch, reason=str(error), refused=refused)
    ranked = select.rank(search) or select.rank(search, built_helpers=False)
    by_key: dict[KernelKey, Candidate[Any]] = {}
    for candidate in ranked:
        by_key.setdefault(candidate.key, candidate)
    ranked = list(by_key.values())
    notes = tuple(_notes(request, search, best, ranked, arch))
    if policy != "off" and (better := select.better_cell(search, best, policy)):
        notes += (f"{better.key.name} is compiled in the background and takes over when it is ready",)
    reason = "the table has no kernel for it: the matrix's best by the model, compiled at run time"
    if best.info is not None:
        reason = f"the best estimate of {len(ranked)} cells that match types, layouts and alignment"
    found = Explanation(
        request=request, arch=arch, kernel=best.key.name, source=best.origin, reason=reason,
        estimate_us=best.seconds * 1e6,
        candidates=tuple((candidate.key.name, candidate.seconds * 1e6) for candidate in (ranked or [best])[:5]),
        verified=str(verification(best.key, best.info)), notes=notes, refused=_refused(search),
    )  # fmt: skip
    compiled = [(of, candidate) for of, candidate in [(search, best), *helpers] if candidate.info is None]
    return _compiled(found, compiled) if compiled else found


def _refused(search: KernelSearch[Any], archs: Sequence[SmArch] = ()) -> tuple[Refused, ...]:
    """The kernels of a problem's operations that do not serve it, by reason: the table's and, of `archs`, all cells."""
    ops = set(map(search.op_of, itertools.chain.from_iterable(search.formulations)))
    rows = (info for info in table.rows() if info.key.op in ops)
    counted = {info.key: (info.rank(search.device), info.shared_bytes) for info in rows}
    for key in itertools.chain.from_iterable(map(search.every_cell, archs)):
        counted.setdefault(key, (devices.rank_arch(key.arch, search.device, ptx=True), shared_memory(key)))
    elsewhere = f"it is not for {search.arch.value}" if search.arch else f"it does not run on {search.device.name}"
    found: dict[str, list[KernelKey]] = {}
    for key, (rank, shared_bytes) in counted.items():
        reason = elsewhere
        if search.arch in (None, key.arch) and rank is not None:
            reason = select.objection(search, key, shared_bytes)
        if reason:
            found.setdefault(reason, []).append(key)
    refused = (Refused(reason, len(keys), keys[0].name) for reason, keys in found.items())
    return tuple(sorted(refused, key=lambda refusal: -refusal.kernels))


def _notes(
    request: Request, search: KernelSearch[Any], best: Candidate[Any], ranked: Sequence[Candidate[Any]], arch: SmArch
) -> Iterator[str]:
    """The notes of an explanation."""
    if best.named:
        yield "heuristics name this kernel for the request"
    elif search.named is not None:
        key = search.named
        reason = select.objection(search, key, shared_memory(key))
        yield f"{key.name}, which heuristics name for the request, is passed over: {reason or 'it cannot be had here'}"
    if best.tuned:
        yield f"tuned: this kernel was measured to be the fastest on {search.device.name}, in that time"
    if search.batch_invariant:
        yield f"batch-invariant: {select.reduction(search)}"
    if best.key.mainloop == FEW:
        ranks = best.key.cluster[2]
        yield (
            f"its tiles have {best.width} rows of weights, and {best.swizzle or ranks} of {ranks} thread blocks of a "
            "cluster share the few rows, told at launch"
        )
    elif best.key.mainloop in ANYWHERE:
        if best.width and best.key.mainloop == REALIGNED:
            yield f"its tiles have {best.width} columns, told at launch"
        elif best.width:
            few = f" of weights and at most {best.swizzle} of the few rows" if best.swizzle > 1 else " of weights"
            what = few if best.key.mainloop == RAGGED else " and columns"
            yield f"its tiles have {best.width} rows{what}, told at launch"
        if best.split_k > 1:
            yield f"{best.split_k} thread blocks divide K, told at launch"
    elif best.width:
        yield f"its tiles have {best.width} of at most {best.key.tile[1]} columns, told at launch"
    if note := search.note(best.formulation):
        yield note
    of_tree = bool(split(best.key.epilogue)[1])  # a bias and an activation may need no kernel with a tree
    if request.tree is not None and of_tree and best.info is None and preset_of(best.key) is None:
        yield (
            f"the epilogue is a tree ({request.tree.id}) whose kernel is in no preset: it is compiled at run time, "
            "unless a pack has it"
        )
    if best.key.arch is not arch:
        yield f"a {best.key.arch.value} cell, running on {search.device.name}"
    if best.key.generation == "sm80" and arch.capability >= (9, 0):  # from there on are newer generations
        where = "the table" if best.info else "the matrix"
        serving = filter(search.serves, search.every_cell(arch))
        others = (candidate.key for candidate in ranked) if best.info else serving
        if all(key.generation == "sm80" for key in others):
            yield f"an sm80-generation cell: {where} has none with TMA that serves this request"


def _compiled(found: Explanation, lacking: Sequence[tuple[KernelSearch[Any], Candidate[Any]]]) -> Explanation:
    """The explanation of a plan with kernels that the table lacks: the main one, helpers, or both."""
    search, first = lacking[0]
    lacks = "the table has no kernel for it" if found.source == "jit" else f"the table lacks {first.key.name}"
    passed_over = select.too_new(search)
    notes = (*found.notes, passed_over) if passed_over else found.notes
    cure = _cure(search, found.arch, first)
    absent = Explanation(found.request, found.arch, notes=notes, refused=found.refused, **cure)
    if kernels.frozen() == "error" and not all(kernels.ready(of.key, search.device) for _, of in lacking):
        return replace(absent, reason=f"{lacks}, and {kernels.problem()}")
    try:
        places = [kernels.where(of.key, kernels.target_for(of.key, search.device)) for _, of in lacking]
    except CutlassError as error:
        return replace(absent, reason=f"{lacks}, and it cannot be compiled: {error}")
    waiting = sum(family(of.key).compile_seconds for (_, of), place in zip(lacking, places, strict=True) if not place)
    cached = None if None in places else max(places, key=("memory", "disk").index)
    changes = cure | {"verified": found.verified, "notes": notes}
    return replace(found, cached=cached, compile_seconds=float(waiting), **changes)


def _cure(search: KernelSearch[Any], arch: SmArch, best: Candidate[Any] | None = None) -> dict[str, Any]:
    """The members of an explanation about a cell that would serve a problem whose kernel the table lacks."""
    wanted = None
    with contextlib.suppress(UnsupportedError):
        wanted = search.nearest(arch, best)
        if wanted is None and best is None and (cell := select.best_cell(search)):
            wanted = cell.key
    if wanted is None:
        return {}
    nearest, offered = table.nearest(wanted), select.in_preset(wanted)
    return {
        "verified": str(verification(wanted)),
        "nearest": wanted.name,
        "axes": nearest[1] if nearest else (),
        "knob": f"{select.knob(offered)} pip install ." if offered else None,
        "pack": kernels.built_ahead(wanted),
    }
