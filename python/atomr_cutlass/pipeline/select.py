"""Which kernel serves a problem: those of the table, or of the whole matrix, ranked by the model of `estimate`."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from .. import _core
from ..errors import CutlassError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.epilogue.common import common_of
from ..generator.epilogue.lower import has_tree, is_common
from ..generator.key import KernelKey
from ..generator.matrix import cells, preset_of, shared_memory, supports
from ..generator.rules import OK, Status, no
from ..jit import kernels
from . import devices, table, tuning
from .candidate import ALONG_M, ALONG_N, HEURISTIC, Candidate, KernelInfo
from .devices import Device
from .estimate import LAUNCH_SECONDS, Launch
from .reduction import BatchInvariant, Reduction, reduction_of
from .tile_scheduler import SWIZZLES

F = TypeVar("F")

WORTHWHILE = 0.95
"""The part of a prebuilt kernel's time, by the model, that a compiled one must keep to: the model is no better."""

FAR = 0.5
"""The part for one that is compiled whether or not `background` was asked for: the table has what serves anything."""


COMMON_PART = 1.01
"""How much longer a common kernel takes, by the model, than one of a single tree, which serves where both are there."""


class KernelSearch(abc.ABC, Generic[F]):
    """The kernels that an operation has for one problem.

    Attributes:
        op: operation of the kernels' keys.
        device: where the problem is computed.
        arch: keep to cells of this arch; None takes cells of any arch that run on the device, native ones before
            others.
        problem: all that decides about kernels, as a dataclass, by which tuned choices are found; None has no such.
        formulations: how the problem can be put to kernels, in groups. A group is passed over where an earlier one is
            served; within a group the estimated time decides.
        batch_invariant: whether only kernels of one reduction serve it, the same for every number of rows.
    """

    op: str
    device: Device
    arch: SmArch | None
    problem: Any = None
    formulations: Sequence[Sequence[F]]
    batch_invariant: bool = False

    @abc.abstractmethod
    def supports(self, key: KernelKey, formulation: F) -> Status:
        """Whether a kernel serves the problem as it is put here; the reason says why not."""

    @abc.abstractmethod
    def cost(self, key: KernelKey, formulation: F, shared_bytes: int) -> Launch:
        """Estimated seconds of a kernel that serves it, with the launch options that are best for it."""

    @abc.abstractmethod
    def reason(self) -> str:
        """Why no cell of the matrix serves the problem, and what would cure it."""

    @property
    def tuned_problem(self) -> Any:
        """The problem that tuned choices are found by; None has no such."""
        return BatchInvariant(self.problem) if self.batch_invariant and self.problem is not None else self.problem

    @functools.cached_property
    def reduction(self) -> Reduction | None:
        """The reduction that a batch-invariant problem's kernels have; None where no kernel has one."""
        return _settled(self)

    def of_many_rows(self) -> Sequence[Sequence[F]]:
        """The formulations that any other number of rows would have too: they settle the reduction."""
        return self.formulations

    def op_of(self, formulation: F) -> str:
        """The operation whose kernels take a formulation."""
        del formulation
        return self.op

    def cells(self, arch: SmArch, group: Sequence[F]) -> Iterable[Iterable[KernelKey]]:
        """Keys that can be compiled for an arch, in sets: one is looked at where those before it serve nothing."""
        del group
        yield matrix(self.op, arch)

    def launches(self, candidate: Candidate[F]) -> Iterable[Candidate[F]]:
        """A candidate with each of its launch options: for the persistent scheduler its swizzles and raster orders."""
        if candidate.raster == HEURISTIC:
            return (candidate,)
        options = itertools.product(SWIZZLES, (ALONG_M, ALONG_N))
        return (dataclasses.replace(candidate, swizzle=swizzle, raster=raster) for swizzle, raster in options)

    def helpers(self, formulation: F) -> Sequence[KernelSearch[Any]]:
        """Kernels that are launched beside the one of a formulation, such as casts."""
        del formulation
        return ()

    def least(self, candidate: Candidate[F]) -> float:
        """A time that no kernel is estimated to stay below, whatever its tile and generation."""
        del candidate
        return LAUNCH_SECONDS

    def note(self, formulation: F) -> str:
        """The note of `explain` on a formulation; empty if the problem is computed as it stands."""
        del formulation
        return ""

    def fingerprint(self) -> Hashable:
        """The properties of the problem that determine its kernel: equal fingerprints get the same kernel."""
        return tuple(map(tuple, self.formulations))

    def serves(self, key: KernelKey) -> bool:
        """Whether a kernel serves the problem in any formulation, whatever it is compiled for."""
        return any(
            self.op_of(formulation) == key.op and self.supports(key, formulation)
            for group in self.formulations
            for formulation in group
        )

    def nearest(self, arch: SmArch, best: Candidate[F] | None = None) -> KernelKey | None:
        """The key that an installation without a kernel for the problem is told of.

        Args:
            arch: the compile target.
            best: the candidate that is compiled instead, where there is one.
        """
        del arch
        best = best or best_cell(self)
        return None if best is None else best.key

    def refusal(self, best: Candidate[F] | None) -> CutlassError:
        """The error where the table has no kernel and none may be compiled; `best` is the matrix's best cell."""
        if best is None:
            return UnsupportedError(self.reason())
        passed_over = too_new(self)
        passed_over = f"; {passed_over}" if passed_over else ""
        return KernelNotFoundError(
            f"no kernel in the table serves this {best.key.op}; {best.key.name} would: {cure(best.key)}"
            f"{differences(best.key)}{passed_over}"
        )


class ExactSearch(KernelSearch[None]):
    """A kernel whose key is known but for its arch: helpers, of which there is one for each task."""

    formulations = ((None,),)
    arch = None

    def __init__(self, make: Callable[[SmArch], KernelKey], device: Device) -> None:
        """The kernel of the key that `make` gives for a compile target."""
        self.device = device
        self.make = make
        self._wanted = make(devices.require_arch(device))
        self.op = self._wanted.op

    def supports(self, key: KernelKey, formulation: None) -> Status:
        """Whether it is the key, whatever its arch."""
        del formulation
        return OK if key == self.make(key.arch) else no("it does another task")

    def cost(self, key: KernelKey, formulation: None, shared_bytes: int) -> Launch:
        """Nothing: there is no other."""
        del key, formulation, shared_bytes
        return Launch(0.0)

    def cells(self, arch: SmArch, group: Sequence[None]) -> Iterable[Iterable[KernelKey]]:
        """The key alone."""
        del group
        yield (self.make(arch),)

    def reason(self) -> str:
        """Why there is none."""
        return f"{self._wanted.name} does not run on {self.device.name}"

    def refusal(self, best: Candidate[None] | None) -> CutlassError:
        """The error where the table lacks it and it must not be compiled."""
        if best is None:
            return UnsupportedError(self.reason())
        return KernelNotFoundError(f"the table lacks {best.key.name}, and it must not be compiled")


def rank(search: KernelSearch[F], *, built_helpers: bool = True) -> list[Candidate[F]]:
    """Every kernel of the table that serves the problem on the device, best first.

    Args:
        search: the problem's kernels.
        built_helpers: whether the table must have the helpers of a formulation too.
    """
    for group in search.formulations:
        possible = group
        if built_helpers:
            possible = [key for key in group if all(rank(helper) for helper in search.helpers(key))]
        found: list[tuple[int, Candidate[F]]] = []
        for op in dict.fromkeys(map(search.op_of, possible)):
            of_op = [key for key in possible if search.op_of(key) == op]
            for suitability, info in _running(search, op):
                found += [
                    (suitability, candidate)
                    for candidate in _candidates(search, info.key, info, info.shared_bytes, of_op)
                ]
        if found:
            # Native cells first: a translated cell costs a compilation in the driver at its first launch.
            found.sort(key=lambda pair: (pair[0], pair[1].seconds, pair[1].key.name))
            return [candidate for _, candidate in found]
    return []


def _running(search: KernelSearch[Any], op: str) -> Iterator[tuple[int, KernelInfo]]:
    """The table's kernels of an operation that run on the device, each with how well its arch suits (`rank_arch`)."""
    for info in table.kernels(op=op):
        if search.arch is not None and info.key.arch is not search.arch:
            continue
        suitability = devices.rank_arch(info.key.arch, search.device, ptx=info.ptx, cuda_version=info.cuda_version)
        if suitability is not None:
            yield suitability, info


def _settled(search: KernelSearch[F]) -> Reduction | None:
    """The reduction of a batch-invariant problem, by what does not depend on its rows.

    Kernels of the table settle it, without any the matrix's cells: those that suit the device best, of the newest
    generation, with fast accumulation where that is allowed; then the reduction that most kernels have.
    """
    groups = search.of_many_rows()
    for group in groups:
        ops = dict.fromkeys(map(search.op_of, group))
        built = ((suitability, info.key) for op in ops for suitability, info in _running(search, op))
        if found := _commonest(search, group, built):
            return found
    target = require_target(search)
    for group in groups:
        for keys in search.cells(target, group):
            compiled = ((0, key) for key in keys if not is_common(key.epilogue))
            if found := _commonest(search, group, compiled):
                return found
    return None


def _commonest(
    search: KernelSearch[F], group: Sequence[F], ranked: Iterable[tuple[int, KernelKey]]
) -> Reduction | None:
    counts = collections.Counter(
        (suitability, reduction)
        for suitability, key in ranked
        if (reduction := reduction_of(key)) is not None
        and any(search.op_of(formulation) == key.op and search.supports(key, formulation) for formulation in group)
    )

    def order(found: tuple[int, Reduction]) -> tuple[Any, ...]:
        suitability, reduction = found
        older, full = reduction.generation == "sm80", reduction.math != "fast"
        return (suitability, older, full, -counts[found], -reduction.tile_k, reduction)

    return min(counts, key=order)[1] if counts else None


def rank_cells(search: KernelSearch[F]) -> list[Candidate[F]]:
    """The matrix's cells that serve the problem, whether or not they are built, best first.

    Raises:
        UnsupportedError: the GPU has no compile target.
    """
    target = require_target(search)
    if devices.rank_arch(target, search.device, ptx=True) is None:
        return []
    for group in search.formulations:
        for keys in search.cells(target, group):
            found: list[Candidate[F]] = []
            for key in keys:
                if is_common(key.epilogue):
                    continue  # what is compiled for one problem has its tree
                of_op = [cell for cell in group if search.op_of(cell) == key.op]
                found += _candidates(search, key, None, shared_memory(key), of_op)
            if found:
                return sorted(found, key=lambda candidate: (candidate.seconds, candidate.key.name))
    return []


def best_cell(search: KernelSearch[F]) -> Candidate[F] | None:
    """The first of `rank_cells`; None when no cell serves the problem."""
    return next(iter(rank_cells(search)), None)


def serving(search: KernelSearch[Any], arch: SmArch) -> Iterator[KernelKey]:
    """The keys for an arch that serve the problem, whether or not they are built."""
    for group in search.formulations:
        for keys in search.cells(arch, group):
            yield from (key for key in keys if search.serves(key))


def best_key(search: KernelSearch[Any]) -> KernelKey:
    """The key of the matrix's best cell.

    Raises:
        UnsupportedError, KernelNotFoundError: there is none.
    """
    best = best_cell(search)
    if best is None:
        raise search.refusal(None)
    return best.key


def candidate_of(search: KernelSearch[F], key: KernelKey) -> Candidate[F]:
    """The candidate of one key, of the matrix or not.

    Raises:
        UnsupportedError: the key is no kernel's, or cannot serve the problem.
    """
    status = supports(key)
    if not status:
        raise UnsupportedError(status.reason)
    for group in search.formulations:
        found = list(_candidates(search, key, None, shared_memory(key), group))
        if found:
            return min(found, key=lambda candidate: candidate.seconds)
    raise UnsupportedError(f"{key.name} cannot serve this problem: types, layouts or alignments differ")


def _candidates(
    search: KernelSearch[F], key: KernelKey, info: KernelInfo | None, shared_bytes: int, formulations: Iterable[F]
) -> Iterator[Candidate[F]]:
    """A kernel in the formulations that it serves."""
    if shared_bytes > search.device.shared_memory:
        return
    if search.batch_invariant and (search.reduction is None or reduction_of(key) != search.reduction):
        return
    for formulation in formulations:
        if search.supports(key, formulation):
            launch = search.cost(key, formulation, shared_bytes)
            seconds = launch.seconds * (COMMON_PART if is_common(key.epilogue) else 1.0)
            yield Candidate(key, info, seconds, formulation, launch.split_k, launch.swizzle, launch.raster)


def choose(
    search: KernelSearch[F], *, backend: str = "auto", jit: str | None = None, record: bool = True
) -> Candidate[F]:
    """The kernel for a problem.

    Args:
        search: the problem's kernels.
        backend: `prebuilt`: the table's best; `jit`: the matrix's best; `auto`: the table's best, or the matrix's best
            where the table has none.
        jit: `auto`, `background` (which is `auto` here) or `off`; None leaves it to ATOMR_CUTLASS_JIT.
        record: whether a kernel that the table lacks goes into the log of misses, and a slow one is warned of.

    Raises:
        UnsupportedError: no kernel of the matrix serves it; the reason says what would cure it.
        KernelNotFoundError: one does, but the table lacks it and it must not be compiled; names the knob that adds it.
    """
    compiling = backend != "prebuilt" and kernels.policy(jit) != "off"
    if tuned := _tuned(search, built=backend != "jit", compiling=compiling):
        return tuned
    if backend != "jit":
        ranked = rank(search) or (rank(search, built_helpers=False) if compiling else [])
        if ranked:
            if record and backend == "auto" and not compiling and (better := better_cell(search, ranked[0], FAR)):
                forbidden = f"jit='off' or {kernels.POLICY_VARIABLE}=off forbids to compile that"
                _warn_of_slow(ranked[0], better, forbidden)
            return ranked[0]
    best = best_cell(search)
    if best is None:
        raise search.refusal(None)
    if backend != "jit" and record:
        kernels.record_miss(best.key)
    if compiling:
        return best
    if backend != "jit" and (unaided := rank(search, built_helpers=False)):
        lacking = next(helper for helper in search.helpers(unaided[0].formulation) if not rank(helper))
        raise lacking.refusal(best_cell(lacking))
    if backend == "jit":
        nearest = nearest_built(best.key)
        raise KernelNotFoundError(
            f"backend='jit' asks for {best.key.name} to be compiled, which jit='off' or "
            f"{kernels.POLICY_VARIABLE}=off forbids: {cure(best.key)}"
            + (f"; the nearest in the table is {nearest[0]}" if nearest else "")
        )
    raise search.refusal(best)


def _tuned(search: KernelSearch[F], *, built: bool, compiling: bool) -> Candidate[F] | None:
    """The candidate of the record for the problem; None where there is no record, or its kernel cannot be had."""
    problem = search.tuned_problem
    record = None if problem is None else tuning.find(search.device.name, problem)
    if record is None or search.arch not in (None, record.key.arch):
        return None
    formulations = list(itertools.chain.from_iterable(search.formulations))
    if not 0 <= record.formulation < len(formulations):
        return None
    formulation = formulations[record.formulation]
    rows = (info for info in table.kernels(op=search.op_of(formulation)) if built and info.key == record.key)
    info = next(rows, None)
    portable = info is None or info.ptx
    if not (info or compiling) or devices.rank_arch(record.key.arch, search.device, ptx=portable) is None:
        return None
    shared_bytes = info.shared_bytes if info else shared_memory(record.key)
    for candidate in _candidates(search, record.key, info, shared_bytes, (formulation,)):
        for launch in search.launches(candidate):
            if (launch.split_k, launch.swizzle, launch.raster) == (record.split_k, record.swizzle, record.raster):
                return dataclasses.replace(launch, seconds=record.microseconds / 1e6, tuned=True)
    return None


def decide(
    search: KernelSearch[F], *, backend: str = "auto", jit: str | None = None, stream: int | None = None
) -> tuple[Candidate[F], Candidate[F] | None]:
    """The kernel that a plan begins with, and a better one to be compiled in the background, if there is one.

    Arguments and errors are those of `choose`; while `stream` is captured, nothing is compiled in the background.
    """
    policy = kernels.policy(jit)
    candidate = choose(search, backend=backend, jit=policy)
    capturing = stream is not None and _core.capturing(search.device.index, stream)
    if candidate.tuned or backend != "auto" or policy == "off" or capturing:
        return candidate, None
    better = better_cell(search, candidate, WORTHWHILE if policy == "background" else FAR)
    if better is None:
        return candidate, None
    if kernels.ready(better.key, search.device):
        return better, None
    if reason := kernels.problem():
        _warn_of_slow(candidate, better, reason)
        return candidate, None
    return candidate, better


def better_cell(search: KernelSearch[F], candidate: Candidate[F], part: float = WORTHWHILE) -> Candidate[F] | None:
    """The matrix's best cell, if it promises enough over a prebuilt one: at most `part` of its time."""
    if candidate.info is None or search.least(candidate) > part * candidate.seconds:
        return None
    try:
        best = best_cell(search)
    except UnsupportedError:  # a GPU that no target is made for, and that older cells serve all the same
        return None
    worthwhile = best is not None and best.key != candidate.key and best.seconds <= part * candidate.seconds
    return best if worthwhile else None


_warned: set[tuple[str, str]] = set()


def _warn_of_slow(candidate: Candidate[Any], better: Candidate[Any], reason: str) -> None:
    """Says once that a kernel is used which another would leave far behind, why, and what cures it."""
    if (candidate.key.name, better.key.name) in _warned:
        return
    _warned.add((candidate.key.name, better.key.name))
    remedy = cure(better.key) if preset_of(better.key) else "it is in no preset, and compiled at run time only"
    warnings.warn(
        f"{candidate.key.name} is used, which by the model takes {candidate.seconds / better.seconds:.1f} times as "
        f"long as {better.key.name}: {reason}; {remedy}",
        RuntimeWarning,
        stacklevel=3,
    )


def too_new(search: KernelSearch[Any]) -> str:
    """Which kernels of the table only the driver's age keeps from serving; empty where there are none."""
    device = search.device
    found = [
        info
        for info in table.kernels()
        if info.ptx
        and not devices.translates(device, info.cuda_version)
        and (search.arch is None or info.key.arch is search.arch)
        and devices.rank_arch(info.key.arch, device, ptx=True) == devices.TRANSLATED
        and info.shared_bytes <= device.shared_memory
        and search.serves(info.key)
    ]
    if not found:
        return ""
    return (
        f"{found[0].name} is there as PTX of {devices.cuda_name(found[0].cuda_version)}, which this driver "
        f"({devices.cuda_name(device.cuda_version)}) does not translate: update the driver, or build with that CUDA"
    )


def require_target(search: KernelSearch[Any]) -> SmArch:
    """The compile target: the one that is asked for, else the device's own.

    Raises:
        UnsupportedError: the package has no target for such GPUs; says so too where only the driver's age keeps PTX
            from serving.
    """
    if search.arch is not None:
        return search.arch
    try:
        return devices.require_arch(search.device)
    except UnsupportedError as error:
        passed_over = too_new(search)
        raise UnsupportedError(f"{error}; {passed_over}" if passed_over else str(error)) from None


def cure(key: KernelKey) -> str:
    """How a kernel that the table lacks is had."""
    preset = preset_of(key)
    if preset is None:
        common = _common(key)
        if common is not None:
            return f"{common.name} does too; it is in preset {preset_of(common)}: build with {knob(common)}"
        return "it is in no preset: let it be compiled at run time (jit='auto')"
    return f"it is in preset {preset}; build with {knob(key)}"


def _common(key: KernelKey) -> KernelKey | None:
    """A kernel of some preset that computes what one with a tree does, and others."""
    asked = common_of(key.epilogue) if has_tree(key.epilogue) else None
    if asked is None:
        return None
    alike = ("a", "b", "d", "math", "layout_a", "layout_b")
    return next(
        (
            cell
            for cell in matrix(key.op, key.arch)
            if cell.epilogue == asked and all(getattr(cell, name) == getattr(key, name) for name in alike)
        ),
        None,
    )


def knob(key: KernelKey) -> str:
    """The build setting that adds a key to the table."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset_of(key)} -DATOMR_CUTLASS_ARCHS={key.arch.target}'"


def nearest_built(wanted: KernelKey) -> tuple[str, tuple[str, ...]] | None:
    """The kernel of the table that differs from a key in the fewest fields, and those fields."""
    names = [field.name for field in dataclasses.fields(KernelKey)]
    found = [
        (info.name, tuple(name for name in names if getattr(wanted, name) != getattr(info.key, name)))
        for info in table.kernels(op=wanted.op)
    ]
    return min(found, key=lambda pair: (len(pair[1]), pair[0]), default=None)


def differences(wanted: KernelKey) -> str:
    """The nearest kernel of the table, and the fields in which it differs from a key, to end a message with."""
    nearest = nearest_built(wanted)
    return f"; the nearest there is {nearest[0]}, which differs in {', '.join(nearest[1])}" if nearest else ""


@functools.cache
def matrix(op: str, arch: SmArch) -> tuple[KernelKey, ...]:
    """The matrix's keys of an operation for an arch."""
    return tuple(key for _, key in cells([arch]) if key.op == op and supports(key))
