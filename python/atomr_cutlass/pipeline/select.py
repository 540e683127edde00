"""The choice of a kernel for a problem, among those of the table or of the whole matrix, ranked by `estimate`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from .. import _core
from ..arrays import symbols
from ..errors import CutlassError, KernelNotFoundError, UnsupportedError, require
from ..generator.archs import SmArch
from ..generator.epilogue.common import common_of, wider
from ..generator.epilogue.lower import has_tree, is_common
from ..generator.families import gemm_sm90
from ..generator.key import KernelKey, shared_memory
from ..generator.matrix import preset_of, supports
from ..generator.rules import FEW
from ..jit import kernels
from . import devices, table, tuning
from .reduction import Reduction, reduction_of
from .search import Candidate, Kernel, KernelSearch, Roster, candidates_of, matrix

F = TypeVar("F")

WORTHWHILE = 0.95
"""With `background`, compile only if the estimate is at most this fraction of the prebuilt kernel's (the model errs by
about 5%)."""

FAR = 0.5
"""The same fraction without `background`: a prebuilt kernel may be one that serves everything, slowly."""

_FORBIDDEN = f"jit='off' or {kernels.POLICY_VARIABLE}=off forbids to compile that"


def _running(search: KernelSearch[F], group: Sequence[F]) -> Iterator[Kernel]:
    """The table's kernels of the formulations' operations that run on the device."""
    for op, info in itertools.product(dict.fromkeys(map(search.op_of, group)), table.rows()):
        if info.key.op != op or search.arch not in (None, info.key.arch):
            continue
        if (suitability := info.rank(search.device)) is not None:
            yield suitability, info.key, info, info.shared_bytes


def unfit(search: KernelSearch[Any], key: KernelKey, shared_bytes: int) -> str:
    """Why a kernel cannot be used: its shared memory or its reduction; empty if it can."""
    if shared_bytes > search.device.shared_memory:
        return "it needs more shared memory than the GPU has"
    other = search.batch_invariant and ((own := reduction_of(key)) is None or own != _order(search))
    return "its reduction is not that of batch-invariant calls" if other else ""


def alike(search: KernelSearch[F], groups: Iterable[Sequence[F]]) -> Iterable[Sequence[F]]:
    """Groups of formulations; of a batch-invariant problem, those with the slices of its reduction."""
    if not search.batch_invariant or (wanted := reduction(search)) is None:
        return groups
    return [group for group in groups if all(search.slices(of) == wanted.slices for of in group)]


def objection(search: KernelSearch[Any], key: KernelKey, shared_bytes: int) -> str:
    """Why a kernel does not serve a problem; empty if it does."""
    return search.serves(key, alike(search, search.formulations)).reason or unfit(search, key, shared_bytes)


_KEPT_AT_MOST = 256
_rosters: dict[Hashable, Roster[Any]] = {}


def _order(search: KernelSearch[Any]) -> Hashable:
    """The reduction of the kernels that serve a batch-invariant problem, in however many slices; else empty."""
    if not search.batch_invariant:
        return ""
    wanted = reduction(search)
    return None if wanted is None else wanted._replace(slices=1)


def _roster(
    search: KernelSearch[F], source: Hashable, owner: Any, kernels: Iterable[Kernel], group: Sequence[F]
) -> Roster[F]:
    """Cached roster of a source's kernels for a group; holds a reference to `owner`."""
    known = (
        source, _order(search), type(search), search.op, search.device,
        tuple(map(search.op_of, group)), tuple(map(search.traits, group)),
    )  # fmt: skip
    found = _rosters.get(known)
    if found is None:
        symbols.refuse()  # the next call of such traits finds it
        if len(_rosters) >= _KEPT_AT_MOST:
            _rosters.clear()
        fitting = (kernel for kernel in kernels if not unfit(search, kernel[1], kernel[3]))
        found = _rosters[known] = Roster(search, owner, fitting, group)
    return found


def _helped(search: KernelSearch[F], group: Sequence[F]) -> Sequence[F]:
    """The formulations whose helpers the table has."""
    return [formulation for formulation in group if all(map(first, search.helpers(formulation)))]


def _built(search: KernelSearch[F], *, built_helpers: bool) -> Iterator[tuple[Roster[F], Sequence[F]]]:
    """The rosters of the table's kernels for a problem, one for each group of formulations, and that group."""
    rows = table.rows()
    for group in alike(search, search.formulations):
        possible = _helped(search, group) if built_helpers else group
        yield _roster(search, (id(rows), search.arch), rows, _running(search, possible), possible), possible


def _compiled(search: KernelSearch[F]) -> Iterator[tuple[Roster[F], Sequence[F]]]:
    """The rosters of the matrix's cells for a problem, one for each set of cells of each group, and that group."""
    target = require_target(search)
    if devices.rank_arch(target, search.device, ptx=True) is None:
        return
    for group in alike(search, search.formulations):
        for number, keys in enumerate(search.cells(target, group)):
            # A kernel compiled for one problem has the problem's tree and tiles of one width: it compiles in seconds.
            alone = (key for key in keys if not is_common(key.epilogue) and not gemm_sm90.is_for_tables(key))
            cells = ((0, key, None, shared_memory(key)) for key in alone)
            yield _roster(search, (target, number), None, cells, group), group


def rank(search: KernelSearch[F], *, built_helpers: bool = True) -> list[Candidate[F]]:
    """Every kernel of the table that serves the problem on the device, best first.

    With `built_helpers`, only in formulations whose helpers the table has too.
    """
    built = _built(search, built_helpers=built_helpers)
    return next(filter(None, (found.every(search, group) for found, group in built)), [])


def first(search: KernelSearch[F], *, built_helpers: bool = True) -> Candidate[F] | None:
    """The first of `rank`, without estimating kernels that cannot be it; arguments as of `rank`."""
    built = _built(search, built_helpers=built_helpers)
    return next(filter(None, (found.first(search, group) for found, group in built)), None)


@functools.lru_cache(maxsize=8)
def reduction(search: KernelSearch[Any]) -> Reduction | None:
    """The reduction that a batch-invariant problem's kernels have, whatever its rows; None where no kernel has one.

    It is the reduction of the table's kernels, or where none serves of the matrix's cells: of those that suit the
    device best, are of the newest generation, and have fast accumulation where that is allowed, the most common one.
    """
    groups = search.of_many_rows()
    for group in groups:
        built = _helped(search, group)
        if found := _commonest(search, built, [kernel[:2] for kernel in _running(search, built)]):
            return found
    target = require_target(search)
    for group in groups:
        for keys in search.cells(target, group):
            of_matrix = [(0, key) for key in keys if not is_common(key.epilogue)]
            if found := _commonest(search, group, of_matrix):
                return found
    return None


def _commonest(
    search: KernelSearch[F], group: Sequence[F], ranked: Sequence[tuple[int, KernelKey]]
) -> Reduction | None:
    slices = max(map(search.slices, group), default=1)
    if slices > 1 and not _in_slices(search, [key for _, key in ranked]):
        return None
    counts = collections.Counter(
        (suitability, reduction._replace(slices=slices))
        for suitability, key in ranked
        if key.mainloop != FEW  # it serves few rows alone
        and (reduction := reduction_of(key)) is not None
        and any(search.op_of(formulation) == key.op and search.supports(key, formulation) for formulation in group)
    )

    def order(found: tuple[int, Reduction]) -> tuple[Any, ...]:
        suitability, reduction = found
        older, full = reduction.generation == "sm80", reduction.math != "fast"
        return (suitability, older, full, -counts[found], -reduction.tile_k, reduction)

    return min(counts, key=order)[1] if counts else None


def _in_slices(search: KernelSearch[F], keys: Iterable[KernelKey]) -> bool:
    """Whether one of these kernels serves the problem itself in slices: a single row may lie as several do not."""
    sliced = [of for group in search.formulations for of in group if search.slices(of) > 1]
    return any(search.op_of(of) == key.op and search.supports(key, of) for key in keys for of in sliced)


def rank_cells(search: KernelSearch[F]) -> list[Candidate[F]]:
    """The matrix's cells that serve the problem, whether or not they are built, best first."""
    return next(filter(None, (found.every(search, group) for found, group in _compiled(search))), [])


def best_cell(search: KernelSearch[F]) -> Candidate[F] | None:
    """The first of `rank_cells`; None when no cell serves the problem."""
    return next(filter(None, (found.first(search, group) for found, group in _compiled(search))), None)


def refusal(search: KernelSearch[F], best: Candidate[F] | None) -> CutlassError:
    """The error where the table has no kernel for a problem and none may be compiled; `best` is the best cell."""
    return search.refusal(best, "" if best is None else remedy(search, best.key))


def best_key(search: KernelSearch[Any]) -> KernelKey:
    """The key of the matrix's best cell."""
    best = best_cell(search)
    if best is None:
        raise refusal(search, None)
    return best.key


def candidate_of(search: KernelSearch[F], key: KernelKey) -> Candidate[F]:
    """The candidate of one key, of the matrix or not, and of whatever reduction."""
    require(supports(key))
    for group in search.formulations:
        if found := candidates_of(search, key, None, group):
            return found[0]
    raise UnsupportedError(f"{key.name} cannot serve this problem: {search.serves(key).reason}")


def choose(
    search: KernelSearch[F], *, backend: str = "auto", jit: str | None = None, record: bool = True
) -> Candidate[F]:
    """The kernel for a problem: a named or tuned one, else the table's best, else (`backend`, `jit`) the matrix's.

    With `record` the choice is for a launch: a kernel that the table lacks goes into the log of misses, and errors name
    the caller's line.

    Raises:
        UnsupportedError: no kernel of the matrix serves it.
        KernelNotFoundError: one does, but the table lacks it and it must not be compiled.
    """
    compiling = backend != "prebuilt" and kernels.policy(jit) != "off"
    if preferred := _preferred(search, built=backend != "jit", compiling=compiling):
        if preferred.info is not None or not gemm_sm90.widths(preferred.key):
            return preferred
        # Of a kernel for several widths that is not built, the variant for the one width is compiled.
        return dataclasses.replace(preferred, key=gemm_sm90.of_width(preferred.key, preferred.width), width=0)
    if backend != "jit":
        built = first(search) or (first(search, built_helpers=False) if compiling else None)
        if built:
            return built
    best = best_cell(search)
    if best is None:
        raise refusal(search, None)
    if backend != "jit" and record:
        kernels.record_miss(best.key)
    if compiling:
        return best
    if backend == "jit":
        there = any(info.key == best.key for info in table.rows())
        error: CutlassError = KernelNotFoundError(
            f"backend='jit' passes over the table and asks for {best.key.name}: leave it out; the table "
            + ("has that" if there else f"lacks that: {remedy(search, best.key)}")
        )
    else:
        lacks = lacking(search)
        error = refusal(lacks, best if lacks is search else best_cell(lacks))
    if backend == "prebuilt" or not isinstance(error, KernelNotFoundError):
        raise error
    raise KernelNotFoundError(f"{error}; {_FORBIDDEN}" + (f", asked for by {kernels.call_site()}" if record else ""))


def lacking(search: KernelSearch[Any]) -> KernelSearch[Any]:
    """The search whose kernel the table lacks, for a problem that it does not serve: a helper's, else the problem's."""
    unaided = first(search, built_helpers=False)
    helpers = search.helpers(unaided.formulation) if unaided else ()
    return next((helper for helper in helpers if not first(helper)), search)


def _preferred(search: KernelSearch[F], *, built: bool, compiling: bool) -> Candidate[F] | None:
    """The kernel that a user has named, else that of the problem's tuned record, if it is available and serves."""

    def obtainable(key: KernelKey, groups: Iterable[Sequence[F]]) -> Iterator[Candidate[F]]:
        if search.arch not in (None, key.arch) or unfit(search, key, shared_memory(key)):
            return
        rows = (info for info in (table.rows() if built else ()) if info.key == key)
        info = next((info for info in rows if info.rank(search.device) is not None), None)
        can_compile = compiling and supports(key) and devices.rank_arch(key.arch, search.device, ptx=True) is not None
        if info is not None or can_compile:
            for group in groups:
                yield from candidates_of(search, key, info, group if compiling else _helped(search, group))

    if search.named is not None:
        for candidate in obtainable(search.named, alike(search, search.formulations)):
            return dataclasses.replace(candidate, named=True)
    problem = search.tuned_problem
    if problem is None or not (record := tuning.find(search.device.name, problem)):
        return None
    measured = [*itertools.chain.from_iterable(search.formulations)][record.formulation : record.formulation + 1]
    for candidate in obtainable(record.key, alike(search, [measured])):
        for launch in search.launches(candidate) if record.width in search.widths(candidate) else ():
            if launch.options[:-1] == record.options[:-1]:
                seconds = record.microseconds / 1e6
                return dataclasses.replace(launch, width=record.width, seconds=seconds, tuned=True)
    return None


def decide(
    search: KernelSearch[F], *, backend: str = "auto", jit: str | None = None, stream: int | None = None
) -> tuple[Candidate[F], Candidate[F] | None]:
    """The kernel that a plan begins with, and a better one to compile in the background; None during graph capture."""
    policy = kernels.policy(jit)
    candidate = choose(search, backend=backend, jit=policy)
    capturing = stream is not None and _core.capturing(search.device.index, stream)
    if backend != "auto" or (capturing and policy != "off"):
        return candidate, None
    better = better_cell(search, candidate, policy)
    if better is None:
        return candidate, None
    if policy != "off" and kernels.ready(better.key, search.device):
        return better, None
    if reason := _FORBIDDEN if policy == "off" else kernels.problem():
        _warn_of_slow(candidate, better, reason)
        return candidate, None
    return candidate, better


def better_cell(search: KernelSearch[F], candidate: Candidate[F], policy: str) -> Candidate[F] | None:
    """The matrix's best cell, if it is enough faster than a prebuilt kernel that neither a user nor a record chose."""
    part = WORTHWHILE if policy == "background" else FAR
    if candidate.info is None or candidate.named or candidate.tuned:
        return None
    if search.least(candidate) > part * candidate.seconds:
        return None
    try:
        best = best_cell(search)
    except UnsupportedError:  # no target is made for this GPU, though older cells run on it
        return None
    worthwhile = best is not None and best.key != candidate.key and best.seconds <= part * candidate.seconds
    return best if worthwhile else None


_warned: set[tuple[str, str]] = set()


def _warn_of_slow(candidate: Candidate[Any], better: Candidate[Any], reason: str) -> None:
    """Warns once that a much faster kernel than the one used exists, why it is not used, and what would add it."""
    used, other = candidate.key.name, better.key.name
    if (used, other) in _warned:
        return
    _warned.add((used, other))
    # A preset's kernel that computes the same need not be faster.
    remedy = cure(better.key) if preset_of(better.key) else f"it is in no preset: {kernels.built_ahead(better.key)}"
    times = symbols.plain(candidate.seconds) / symbols.plain(better.seconds)
    text = f"{used} is used, which by the model takes {times:.1f} times as long as {other}: {reason}; {remedy}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def too_new(search: KernelSearch[Any]) -> str:
    """The message about a kernel of the table that only a newer driver could run; empty where there is none."""
    device = search.device
    for info in table.rows():
        if (
            search.arch in (None, info.key.arch)
            and info.rank(device) is None
            and devices.rank_arch(info.key.arch, device, ptx=info.ptx) is not None
            and info.shared_bytes <= device.shared_memory
            and search.serves(info.key)
        ):
            return (
                f"{info.name} is there as PTX of {devices.cuda_name(info.cuda_version)}, which this driver "
                f"({devices.cuda_name(device.cuda_version)}) does not translate: update the driver, or build with that "
                "CUDA"
            )
    return ""


def require_target(search: KernelSearch[Any]) -> SmArch:
    """The compile target: the one that is asked for, else the device's own."""
    if search.arch is not None:
        return search.arch
    try:
        return devices.require_arch(search.device)
    except UnsupportedError as error:
        passed_over = too_new(search)
        raise UnsupportedError(f"{error}; {passed_over}" if passed_over else str(error)) from None


def remedy(search: KernelSearch[Any], key: KernelKey) -> str:
    """How to get a kernel that the table lacks, and the nearest kernel of the table."""
    nearest, passed_over = table.nearest(key), too_new(search)
    differs = f"; the nearest there is {nearest[0]}, which differs in {', '.join(nearest[1])}" if nearest else ""
    return cure(key) + differs + (f"; {passed_over}" if passed_over else "")


def cure(key: KernelKey) -> str:
    """How to get a kernel that the table lacks."""
    offered, ahead = in_preset(key), kernels.built_ahead(key)
    if offered is None:
        return f"it is in no preset: {ahead}"
    if offered is key:
        return f"it is in preset {preset_of(key)}; build with {knob(key)}, or {ahead}"
    return f"{offered.name} does too; it is in preset {preset_of(offered)}: build with {knob(offered)}, or {ahead}"


def in_preset(key: KernelKey) -> KernelKey | None:
    """The kernel, if a preset has it; else one of a preset that computes its tree among others; else None."""
    if preset_of(key) is not None:
        return key
    epilogues = (common_of(key.epilogue), wider(key.epilogue)) if has_tree(key.epilogue) else ()
    alike = ("a", "b", "d", "math", "layout_a", "layout_b")
    cells = (cell for cell in matrix(key.op, key.arch) if cell.epilogue in epilogues)
    return next((cell for cell in cells if all(getattr(cell, name) == getattr(key, name) for name in alike)), None)


def knob(key: KernelKey) -> str:
    """The build setting that adds a key to the table."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset_of(key)} -DATOMR_CUTLASS_ARCHS={key.arch.target}'"
