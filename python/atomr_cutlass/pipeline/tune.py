"""`tune`: measures which kernel and launch options are fastest for requests, for the selection to follow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .. import _core
from ..checks import check_index, expect, shown
from ..errors import CutlassError, DeviceUnavailableError, InvalidOperandError, LibraryError, UnsupportedError
from ..generator.archs import SmArch
from ..jit import files, locks
from . import devices, probe, profiler_csv, select, table, tuning
from .candidate import Candidate
from .clock import Clock, cold_sets
from .operation import PlannedOperation, operation_of
from .plan_cache import kept_plans
from .request import Request
from .search import KernelSearch
from .tuning import TuneRecord

T = TypeVar("T")
Progress = Callable[[Iterable[T], int], Iterable[T]]
"""Shows how far a loop over so many has come, such as `rich.progress.track`."""

NEAR = 1.1
"""Candidates within this factor of the fastest so far are timed again."""
FINALISTS = 4
ROUNDS = 7
PARTS_CHECKED = 3
_LOCK_SECONDS = 60.0
_PAUSE_SECONDS = 0.05


def tune(
    requests: Iterable[Request],
    path: str | os.PathLike[str] | None = None,
    *,
    device: int | Sequence[int] | None = 0,
    executor: futures.Executor | None = None,
    seconds: float = 5.0,
    compiled: int = 0,
    again: bool = False,
    seed: int = 0,
    progress: Progress[Any] | None = None,
) -> list[TuneRecord]:
    """Times every kernel that could serve each request, checks the fastest against the reference, and remembers it.

    Operands are random, dense and not in L2 when a launch begins; launches are those of a CUDA graph, timed by events.
    Every kernel is tried as the model would launch it; those near the fastest with each of their launch options; the
    best few in alternation. Nothing else should use the GPU meanwhile; calls of `tune`, of whatever process of a host,
    take turns on each GPU. Plans made later, of this process or of one that reads the file (`load_tuning`,
    ATOMR_CUTLASS_TUNED), take the kernel that was fastest.

    Args:
        requests: the requests to tune; arrays of such extents, dense and aligned to 16 bytes, are then served alike.
        path: file that the records are added to; a request that it has a record of is passed over. None keeps them in
            this process.
        device: index of the GPU, or of several, which tune one request each at a time; of several models, each tunes
            all requests. None is all that the process sees.
        executor: of other processes that tune instead, each on those GPUs of its own; this one needs none then. Such as
            a `ProcessPoolExecutor`, or `Client.get_executor()` of Dask. They have this package, and GPUs of one model:
            a request is tuned by one of them.
        seconds: how long kernels of one request are timed, about; what comes last by the model is left out then.
        compiled: how many kernels that the table lacks, the best of the matrix by the model, are compiled and tried
            too; one where the table has none.
        again: whether to tune requests that the file has a record of.
        seed: of the operands.
        progress: shows how far it has come.

    Returns:
        The record of each request, in order, and where there are several models of GPU for each; without those whose
        results are empty.

    Raises:
        InvalidOperandError: no request among requests, an option of another kind, or a file of something else.
        UnsupportedError: no kernel serves a request, or the fastest is wrong; nothing is remembered of that.
        DeviceUnavailableError: there is no GPU, or it fails.
        LibraryError: the executor failed.
    """
    asked = list(_checked(requests))
    indexes = None if device is None else tuple(device) if isinstance(device, (list, tuple, range)) else (device,)
    for index in indexes or ():
        check_index(index, "device")
    for name, value, kind in (("seconds", seconds, (int, float)), ("compiled", compiled, int), ("again", again, bool)):
        expect(value, kind, name)
    file = None if path is None else _path(path)
    known = tuning.Records()
    if file is not None and file.exists():
        known.add(tuning.read(file))
    with contextlib.ExitStack() as stack:
        stack.callback(kept_plans.clear)
        executors = _executors(indexes, stack) if executor is None else [(indexes, executor)]
        work = [
            functools.partial(
                measured, request, gpus, _known_gpus(request, known, again=again), float(seconds), compiled, seed
            )
            for request in asked
            for gpus, _ in executors
        ]
        running = [_begun(executors[place % len(executors)][1], task) for place, task in enumerate(work)]
        stack.callback(lambda: [task.cancel() for task in running])  # of one that fails the others
        found: dict[Any, TuneRecord | None] = {}
        completed: Iterable[Any] = running if executors[0][1] is None else futures.as_completed(running)
        for task in completed if progress is None else progress(completed, len(running)):
            result = _result(task)
            request = asked[running.index(task) // len(executors)]
            record = known.find(result, _problem(request)) if isinstance(result, str) else result
            if record is not None and record is result and file is not None:
                _append(file, record)
            tuning.add([] if record is None else [record])
            found[task] = record
    return [record for task in running if (record := found[task]) is not None]


def measured(
    request: Request, gpus: tuple[int, ...] | None, known: frozenset[str], seconds: float, compiled: int, seed: int
) -> TuneRecord | str | None:
    """Tunes one request on the first GPU of this process that no other call of it is at.

    Args:
        request: the request.
        gpus: indexes of the GPUs; None is all.
        known: names of models that need no tuning.
        seconds: see `tune`, as for what follows.
        compiled: see there.
        seed: see there.

    Returns:
        The record; the model's name where that is known; None where the result has no elements.
    """
    gpus = tuple(range(_core.device_count())) if gpus is None else gpus
    if not gpus:
        raise DeviceUnavailableError(f"there is no GPU to tune on: {devices.problem()}")
    with _turn(gpus) as index:
        gpu, operation = devices.get(index), operation_of(request)
        search = operation.search(request, gpu)
        if search is None:
            return None
        if gpu.name in known:
            return gpu.name
        with contextlib.closing(Clock(gpu)) as clock:
            return _tuned(operation, request, search, clock, seconds, compiled, seed)


def _problem(request: Request) -> Any:
    """The problem of a request that records are kept by, which is the same on every GPU; None of an empty result."""
    search = operation_of(request).search(request, devices.imagined(request.arch or SmArch.SM90A))
    return None if search is None else search.tuned_problem


def _known_gpus(request: Request, known: tuning.Records, *, again: bool) -> frozenset[str]:
    problem = None if again or not known.any else _problem(request)
    return frozenset() if problem is None else known.gpus(problem)


class _Inline:
    """A task that runs when its result is asked for."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self.result = task

    def cancel(self) -> None:
        """Nothing: it has not begun."""


def _result(task: Any) -> TuneRecord | str | None:
    try:
        result: TuneRecord | str | None = task.result()
    except CutlassError:
        raise
    except Exception as error:  # each executor has errors of its own for workers that died
        raise LibraryError(
            "executor", f"a worker died, or cannot be reached ({type(error).__name__}: {error})"
        ) from error
    return result


def _begun(executor: Any, task: Callable[[], Any]) -> Any:
    return _Inline(task) if executor is None else executor.submit(task)


def _executors(indexes: tuple[int, ...] | None, stack: contextlib.ExitStack) -> list[tuple[tuple[int, ...], Any]]:
    """The GPUs of each model, with the threads that tune on them; no thread for a single GPU."""
    models: dict[str, list[int]] = {}
    for index in range(_core.device_count()) if indexes is None else dict.fromkeys(indexes):
        models.setdefault(devices.get(index).name, []).append(index)
    if sum(map(len, models.values())) <= 1:
        return [(tuple(*models.values()), None)]
    return [
        (tuple(gpus), stack.enter_context(futures.ThreadPoolExecutor(len(gpus), "tune"))) for gpus in models.values()
    ]


@contextlib.contextmanager
def _turn(gpus: Sequence[int]) -> Iterator[int]:
    """Waits for one of the GPUs that nobody of this host tunes on, and keeps others from it meanwhile."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    places = {index: visible[index] if index < len(visible) and visible[index] else str(index) for index in gpus}
    folder = Path(tempfile.gettempdir())
    paths = {index: folder / f"atomr_cutlass-tune-{place}.lock" for index, place in places.items()}
    try:
        while True:
            tried = ((index, locks.try_lock(path)) for index, path in paths.items())  # stops at the first that is free
            index, lock = next((pair for pair in tried if pair[1] is not None), (-1, None))
            if lock is not None:
                break
            time.sleep(_PAUSE_SECONDS)
    except OSError as error:
        raise DeviceUnavailableError(f"cannot take turns on a GPU by locks in {folder}: {error.strerror}") from error
    try:
        yield index
    finally:
        lock.unlock()


def import_csv(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, gpu: str | None = None
) -> tuple[list[TuneRecord], int]:
    """Adds the fastest kernel of each problem of cutlass_profiler's CSV to a file of tuned choices.

    Args:
        source: the CSV.
        path: the file.
        gpu: name of the model that it was measured on; None is that of GPU 0.

    Returns:
        (the records, the number of rows that are none).

    Raises:
        InvalidOperandError, DeviceUnavailableError: as `load_tuning`; or the file cannot be written.
    """
    file, target = _path(source), _path(path)
    records, left_out = profiler_csv.read(file, devices.get(0).name if gpu is None else gpu)
    for record in records:
        _append(target, record)
    return records, left_out


def load_tuning(path: str | os.PathLike[str], *, gpu: str | None = None) -> int:
    """Reads tuned choices, which plans made from now on follow. Plans that exist stay as they are.

    Of several records for one problem and GPU the fastest counts, in whatever order files are read: processes with the
    same files choose the same kernels. A record whose kernel is neither in the table nor may be compiled, or does not
    serve the problem (any more), is passed over. ATOMR_CUTLASS_TUNED names files to read at the first plan.

    Args:
        path: a file that `tune` has written, or several of them one after the other. One whose name ends in `.csv` is
            cutlass_profiler's: the fastest kernel of each problem counts, and rows of kernels that are no cell of ours
            do not.
        gpu: of such a file: name of the model that it was measured on; None is that of GPU 0.

    Returns:
        How many records the file has.

    Raises:
        InvalidOperandError: `path` is no path, the file cannot be read, or is none of tuned choices; names the line.
        DeviceUnavailableError: of a CSV without `gpu`, there is no GPU.
    """
    file = _path(path)
    if file.suffix == profiler_csv.SUFFIX:
        records, _ = profiler_csv.read(file, devices.get(0).name if gpu is None else gpu)
    else:
        records = tuning.read(file)
    tuning.add(records)
    kept_plans.clear()
    return len(records)


def _checked(requests: Iterable[Request]) -> Iterator[Request]:
    try:
        listed = iter(requests)
    except TypeError:
        raise InvalidOperandError(f"requests is a {type(requests).__name__}; expected a list of requests") from None
    for request in listed:
        operation_of(request)  # refuses anything but a request
        yield request


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        os.fsencode(path)
        return Path(path).absolute()
    except (TypeError, ValueError):
        raise InvalidOperandError(f"path is {shown(path)}; expected the path of a file of tuned choices") from None


def _append(path: Path, record: TuneRecord) -> None:
    """Adds a record to a file; whole lines only, whoever else writes to it or dies meanwhile."""
    try:
        with locks.hold(path.with_name(f"{path.name}.lock"), _LOCK_SECONDS):
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            files.write(path, f"{before}{record.line()}\n".encode(), path.parent, mode=0o644)
    except OSError as error:
        raise InvalidOperandError(f"cannot add tuned choices to {path}: {error.strerror or error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# One request


@dataclass
class _Timed:
    """A candidate with its plan, as a graph of launches."""

    record: TuneRecord
    candidate: Candidate[Any]
    replay: Any
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class _Trial:
    """A request whose kernels are tried, on several sets of operands."""

    operation: PlannedOperation[Any]
    request: Request
    search: KernelSearch[Any]
    sets: Sequence[dict[str, Any]]
    clock: Any

    def timed(self, candidate: Candidate[Any]) -> _Timed:
        """A candidate with its first time."""
        search = self.search
        formulations = list(itertools.chain.from_iterable(search.formulations))
        record = TuneRecord(
            search.device.name, tuning.identity(search.tuned_problem), candidate.key,
            formulations.index(candidate.formulation), candidate.split_k, candidate.swizzle, candidate.raster,
            0.0, "", 0.0, 0, width=candidate.width,
        )  # fmt: skip
        plan = self._plan(record, candidate)
        replay = self.clock.replay(
            lambda views, stream: self.operation.launch(plan, self.request, views, stream=stream), self.sets
        )
        return _Timed(record, candidate, replay, [replay.seconds()])

    def objection(self, timed: _Timed, arrays: Any) -> str:
        """Describes how a kernel's results differ from the reference; empty if they do not."""
        plan = self._plan(timed.record, timed.candidate)
        checked = probe.checked(plan, arrays, self.sets[0], parts=PARTS_CHECKED)
        if checked.mismatches == 0:
            return ""
        return f"{timed.record.key.name} is wrong in {checked.mismatches} elements by the reference: it was not kept"

    def _plan(self, record: TuneRecord, candidate: Candidate[Any]) -> Any:
        """A plan of the request that launches a candidate, which the record says."""
        request = self.request
        scalars = {"alpha": request.epilogue.alpha, "beta": request.epilogue.beta}
        with tuning.trying(self.search.tuned_problem, record):
            plan = self.operation.plan(request, self.search.device.index, arch=request.arch, **scalars)
        plan.request, plan.key = request, request.plan_key()
        name = candidate.key.name if candidate.info is None else candidate.info.name
        if plan.kernel_name != name:
            raise UnsupportedError(f"a plan of this request takes {plan.kernel_name}, and not {name}")
        return plan


def _tuned(
    operation: PlannedOperation[Any], request: Request, search: KernelSearch[Any], clock: Any, seconds: float,
    compiled: int, seed: int,
) -> TuneRecord:  # fmt: skip
    """The record of one request."""
    device = search.device
    arrays = operation.random_arrays(request, np.random.default_rng(seed))
    size = sum(array.nbytes for array in arrays.values())
    sets = cold_sets(size, device, functools.partial(probe.uploaded, request, arrays, device.index))
    trial = _Trial(operation, request, search, sets, clock)
    deadline = time.monotonic() + seconds
    timed: list[_Timed] = []
    failures: list[CutlassError] = []

    def race(candidates: Iterable[Candidate[Any]]) -> None:
        for candidate in candidates:
            if timed and time.monotonic() > deadline:
                return
            try:
                timed.append(trial.timed(candidate))
            except CutlassError as error:  # one that does not run is no reason not to try others
                failures.append(error)

    race(_candidates(search, compiled))
    if not timed:
        raise failures[0] if failures else select.refusal(search, select.best_cell(search))
    chosen = timed[0]  # candidates begin with the model's choice
    best = min(timing.median for timing in timed)
    near = sorted((timing for timing in timed if timing.median <= NEAR * best), key=lambda timing: timing.median)
    options = (
        [launch for launch in search.launches(timing.candidate) if launch != timing.candidate] for timing in near
    )
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*options))
    race(launch for launch in in_turns if launch is not None)
    finalists = sorted(timed, key=lambda timing: timing.median)[:FINALISTS]
    finalists += [chosen] if chosen not in finalists else []
    for _ in range(ROUNDS):
        for timing in finalists:
            timing.seconds.append(timing.replay.seconds())
    tried = len(timed)
    for winner in sorted(finalists, key=lambda timing: timing.median):
        problem = trial.objection(winner, arrays)
        if not problem:
            return dataclasses.replace(
                winner.record,
                microseconds=round(winner.median * 1e6, 3),
                chosen=chosen.candidate.key.name,
                chosen_microseconds=round(chosen.median * 1e6, 3),
                tried=tried,
                timings=tuning.timings((timing.candidate.key, timing.median * 1e6) for timing in timed),
            )
        failures.append(UnsupportedError(problem))
        timed = [timing for timing in timed if timing.candidate.key != winner.candidate.key]
    raise failures[-1]


def _candidates(search: KernelSearch[Any], compiled: int) -> list[Candidate[Any]]:
    """The table's kernels made for this GPU, or all that run on it where there is none; then some of the matrix's.

    Both are in the order of the model's estimates.
    """
    ranked = select.rank(search)
    native = [candidate for candidate in ranked if candidate.key.arch is search.device.arch] or ranked
    built = {info.key for info in table.kernels()}
    count = max(compiled, 0 if native else 1)
    cells = select.rank_cells(search) if count else []
    return native + [candidate for candidate in cells if candidate.key not in built][:count]
