"""`tune`: measures which kernel and launch options are fastest for requests, so that plans use them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import operator
import os
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..checks import check_index, expect, shown
from ..errors import CutlassError, DeviceUnavailableError, InvalidOperandError, LibraryError, UnsupportedError
from ..generator.archs import SmArch
from ..jit import files, locks
from . import devices, probe, profiler_csv, select, table, tuning
from .operation import operation_of
from .plan_cache import kept_plans
from .request import Request
from .search import Candidate, KernelSearch
from .tuning import TuneRecord

NEAR = 1.1
"""Candidates within this factor of the fastest so far are timed again."""
FINALISTS = 4
ROUNDS = 7
PARTS_CHECKED = 3
L2_TIMES = 4
"""The size of all sets of operands in multiples of L2: a set has left L2 before it is read again."""
SETS = range(3, 65)
_PAUSE_SECONDS = 0.05
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


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
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> list[TuneRecord]:
    """Times every kernel that serves each request, checks the fastest against the reference, and records it.

    Operands are random, dense and not in L2 when a launch begins; launches are those of a CUDA graph, timed by events.
    Every kernel is tried as the model would launch it; those near the fastest with each of their launch options; the
    best few in alternation. Nothing else should use the GPU meanwhile; calls of `tune`, of whatever process of a host,
    take turns on each GPU. Plans made later, of this process or of one that reads the file (`load_tuning`,
    ATOMR_CUTLASS_TUNED), take the kernel that was fastest.

    Args:
        requests: the requests to tune; calls with arrays of these extents, dense and aligned to 16 bytes, then use the
            same kernels.
        path: file that the records are added to; a request that it has a record of is passed over. None keeps them in
            this process only.
        device: index of the GPU, or of several, which tune one request each at a time; of several models, each tunes
            all requests. None is all that the process sees.
        executor: runs the tuning in other processes, each on those GPUs of its own, such as a `ProcessPoolExecutor`, or
            `Client.get_executor()` of Dask; this process then needs no GPU. They have this package, and GPUs of one
            model: each request is tuned by one of them.
        seconds: about how long the kernels of one request are timed; those that the model ranks last are then left out.
        compiled: how many kernels that the table lacks, the best of the matrix by the model, are compiled and tried
            too; at least one where the table has none.
        again: whether to tune requests that the file has a record of.
        seed: of the operands' random values.
        progress: shows the progress of a loop: called with an iterable and its length, yields its items.

    Returns:
        The record of each request, in order, for each model of GPU; none for a request with an empty result.

    Raises:
        InvalidOperandError: no request among requests, an option of another kind, or a file of something else.
        UnsupportedError: no kernel serves a request, or the fastest is wrong, which is then not recorded.
        DeviceUnavailableError: there is no GPU, or it fails.
        LibraryError: the executor failed.
    """
    if not isinstance(requests, Iterable):
        raise InvalidOperandError(f"requests is a {type(requests).__name__}; expected a list of requests")
    listed = list(requests)
    for request in listed:
        operation_of(request)  # refuses anything but a request
    indexes = None if device is None else tuple(device) if isinstance(device, (list, tuple, range)) else (device,)
    for index in indexes or ():
        check_index(index, "device")
    for name, value, kind in (("seconds", seconds, (int, float)), ("compiled", compiled, int), ("again", again, bool)):
        expect(value, kind, name)
    file = None if path is None else _path(path)
    known: tuning.Records = {}
    if file is not None and file.exists():
        tuning.add(tuning.read(file), known)
    with contextlib.ExitStack() as stack:
        stack.callback(kept_plans.clear)
        executors = _executors(indexes, stack) if executor is None else [(indexes, executor)]
        running: list[futures.Future[TuneRecord | None]] = []
        stack.callback(lambda: [task.cancel() for task in running])  # of one that fails the others
        for request in listed:
            records = {} if again else _known_of(request, known)
            for gpus, pool in executors:
                running.append(pool.submit(_measured, request, gpus, records, float(seconds), compiled, seed))
        completed = futures.as_completed(running)
        for task in completed if progress is None else progress(completed, len(running)):
            try:
                record = task.result()
            except CutlassError:
                raise
            except Exception as error:  # each executor has errors of its own for workers that died
                reason = f"a worker died, or cannot be reached ({type(error).__name__}: {error})"
                raise LibraryError("executor", reason) from error
            if record is None:
                continue
            if file is not None and (again or record not in known.values()):
                append(file, [record])
            tuning.add([record])
    return [record for task in running if (record := task.result()) is not None]


def _measured(
    request: Request,
    gpus: tuple[int, ...] | None,
    known: Mapping[str, TuneRecord],
    seconds: float,
    compiled: int,
    seed: int,
) -> TuneRecord | None:
    """The known or measured record of a request on the first of these GPUs (None: all) that no other call uses."""
    gpus = tuple(range(_core.device_count())) if gpus is None else gpus
    if not gpus:
        raise DeviceUnavailableError(f"there is no GPU to tune on: {devices.problem()}")
    with _turn(gpus) as index:
        gpu = devices.get(index)
        search = operation_of(request).search(request, gpu)
        if search is None:
            return None
        if gpu.name in known:
            return known[gpu.name]
        with contextlib.closing(Clock(gpu)) as clock:
            return _tuned(request, search, clock, seconds, compiled, seed)


def _known_of(request: Request, known: tuning.Records) -> dict[str, TuneRecord]:
    """The records of a request by model of GPU, on all of which its problem is the same."""
    device = devices.imagined(request.arch or SmArch.SM90A)
    search = operation_of(request).search(request, device) if known else None
    problem = None if search is None else tuning.identity(search.tuned_problem)
    return {gpu: record for (gpu, tuned), record in known.items() if tuned == problem}


def _executors(
    indexes: tuple[int, ...] | None, stack: contextlib.ExitStack
) -> list[tuple[tuple[int, ...], futures.Executor]]:
    """(indexes, executor) for the GPUs of each model, with a thread for each GPU; no indexes where there is no GPU."""
    models: dict[str, list[int]] = {}
    for index in range(_core.device_count()) if indexes is None else dict.fromkeys(indexes):
        models.setdefault(devices.get(index).name, []).append(index)
    return [
        (tuple(gpus), stack.enter_context(futures.ThreadPoolExecutor(max(1, len(gpus)), "tune")))
        for gpus in models.values() or [[]]
    ]


@contextlib.contextmanager
def _turn(gpus: Sequence[int]) -> Iterator[int]:
    """Locks one of the GPUs against tuning by other calls and processes of this host, once one is free."""
    visible = dict(enumerate(name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    folder = Path(tempfile.gettempdir())
    paths = {folder / f"atomr_cutlass-tune-{visible.get(index) or index}.lock": index for index in gpus}
    try:
        while (lock := locks.try_first(paths)) is None:
            time.sleep(_PAUSE_SECONDS)
    except OSError as error:
        raise DeviceUnavailableError(f"cannot take turns on a GPU by locks in {folder}: {error.strerror}") from error
    try:
        yield paths[lock.path]
    finally:
        lock.unlock()


def load_tuning(path: str | os.PathLike[str], *, gpu: str | None = None) -> int:
    """Reads tuned choices, which plans made from now on use. Plans that exist stay as they are.

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
    records = profiler_csv.read(file, gpu)[0] if file.suffix == profiler_csv.SUFFIX else tuning.read(file)
    tuning.add(records)
    kept_plans.clear()
    return len(records)


def _path(path: str | os.PathLike[str]) -> Path:
    try:
        os.fsencode(path)
        return Path(path).absolute()
    except (TypeError, ValueError):
        raise InvalidOperandError(f"path is {shown(path)}; expected the path of a file of tuned choices") from None


def append(path: Path, records: Iterable[TuneRecord]) -> None:
    """Adds records to a file; whole lines only, even if other processes write to it or die meanwhile."""
    added = "".join(f"{record.line()}\n" for record in records)
    files.rewrite(path, lambda present: present + added, "add tuned choices to")


# ----------------------------------------------------------------------------------------------------------------------
# One request


@dataclass
class _Timed:
    """A candidate with its plan, which owns the workspace of its launches, and the times of one launch."""

    record: TuneRecord
    candidate: Candidate[Any]
    plan: Any
    replay: Callable[[], float]
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def _planned(request: Request, search: KernelSearch[Any], candidate: Candidate[Any]) -> tuple[TuneRecord, Any]:
    """The record of a candidate, without times, and a plan of the request that launches it."""
    formulations = list(itertools.chain.from_iterable(search.formulations))
    record = TuneRecord(
        search.device.name, tuning.identity(search.tuned_problem), candidate.key,
        formulations.index(candidate.formulation), candidate.split_k, candidate.swizzle, candidate.raster,
        0.0, "", 0.0, 0, width=candidate.width,
    )  # fmt: skip
    scalars = {"alpha": request.epilogue.alpha, "beta": request.epilogue.beta}
    with tuning.trying(search.tuned_problem, record):
        plan = operation_of(request).plan(request, search.device.index, arch=request.arch, **scalars)
    plan.request, plan.key = request, request.plan_key()
    name = candidate.key.name if candidate.info is None else candidate.info.name
    if plan.kernel_name != name:
        raise UnsupportedError(f"a plan of this request takes {plan.kernel_name}, and not {name}")
    return record, plan


def _tuned(
    request: Request, search: KernelSearch[Any], clock: Clock, seconds: float, compiled: int, seed: int
) -> TuneRecord:
    operation, device = operation_of(request), search.device
    arrays = operation.random_arrays(request, np.random.default_rng(seed))
    size = sum(array.nbytes for array in arrays.values())
    copies = min(max(math.ceil(L2_TIMES * device.l2_bytes / size), SETS[0]), SETS[-1], device.memory_bytes // 4 // size)
    sets = [probe.uploaded(request, arrays, device.index) for _ in range(max(1, copies))]
    deadline = time.monotonic() + seconds
    timed: list[_Timed] = []
    failures: list[CutlassError] = []
    by_median = operator.attrgetter("median")

    def race(candidates: Iterable[Candidate[Any]]) -> None:
        for candidate in candidates:
            if timed and time.monotonic() > deadline:
                return
            try:
                record, plan = _planned(request, search, candidate)
                replay = clock.replay(functools.partial(operation.launch, plan, request), sets)
                timed.append(_Timed(record, candidate, plan, replay, [replay()]))
            except CutlassError as error:  # others may run
                failures.append(error)

    race(_candidates(search, compiled))
    if not timed:
        raise failures[0] if failures else select.refusal(search, select.best_cell(search))
    chosen = timed[0]  # candidates begin with the model's choice
    fastest = sorted(timed, key=by_median)
    near = [timing for timing in fastest if timing.median <= NEAR * fastest[0].median]
    options = (
        [launch for launch in search.launches(timing.candidate) if launch != timing.candidate] for timing in near
    )
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*options))
    race(launch for launch in in_turns if launch is not None)
    finalists = sorted(timed, key=by_median)[:FINALISTS]
    finalists += [chosen] if chosen not in finalists else []
    for _ in range(ROUNDS):
        for timing in finalists:
            timing.seconds.append(timing.replay())
    tried = len(timed)
    for winner in sorted(finalists, key=by_median):
        mismatches = probe.checked(winner.plan, arrays, sets[0], parts=PARTS_CHECKED).mismatches
        if mismatches == 0:
            timings = tuning.timings((timing.candidate.key, timing.median * 1e6) for timing in timed)
            return dataclasses.replace(
                winner.record, microseconds=round(winner.median * 1e6, 3), chosen=chosen.candidate.key.name,
                chosen_microseconds=round(chosen.median * 1e6, 3), tried=tried, timings=timings,
            )  # fmt: skip
        name = winner.candidate.key.name
        failures.append(UnsupportedError(f"{name} is wrong in {mismatches} elements by the reference: it was not kept"))
        timed = [timing for timing in timed if timing.candidate.key != winner.candidate.key]
    raise failures[-1]


def _candidates(search: KernelSearch[Any], compiled: int) -> list[Candidate[Any]]:
    """The table's kernels made for this GPU, else all that run on it, then some of the matrix's, by the model."""
    ranked = select.rank(search)
    native = [candidate for candidate in ranked if candidate.key.arch is search.device.arch] or ranked
    built = {info.key for info in table.kernels()}
    count = max(compiled, 0 if native else 1)
    cells = select.rank_cells(search) if count else []
    return native + [candidate for candidate in cells if candidate.key not in built][:count]


class Clock:
    """Times launches on a stream of its own, as CUDA graphs, between two events."""

    def __init__(self, device: devices.Device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")  # loaded already: there is a GPU
        self._device = device.index
        context = self._made("cuDevicePrimaryCtxRetain", device.index)
        self._call("cuCtxPushCurrent_v2", context)
        self._stream = self._made("cuStreamCreate", _NON_BLOCKING)
        self._begin, self._end = (self._made("cuEventCreate", 0) for _ in range(2))

    def replay(self, launch: Callable[..., None], sets: Sequence[Mapping[str, Any]]) -> Callable[[], float]:
        """Captures a launch on each set of operands in a graph; returns a function that runs and times it."""
        stream = int(self._stream.value or 0)
        launch(sets[0], stream=stream)  # a first launch loads the kernel, which cannot be captured
        self._call("cuStreamSynchronize", self._stream)
        self._call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
        captured = ctypes.c_void_p()
        try:
            for views in sets:
                launch(views, stream=stream)
        finally:
            self._call("cuStreamEndCapture", self._stream, ctypes.byref(captured))
        graph = ctypes.c_void_p()
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(graph), captured, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", captured)
        self._call("cuGraphLaunch", graph, self._stream)

        def seconds() -> float:
            self._call("cuEventRecord", self._begin, self._stream)
            self._call("cuGraphLaunch", graph, self._stream)
            self._call("cuEventRecord", self._end, self._stream)
            self._call("cuEventSynchronize", self._end)
            elapsed = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(elapsed), self._begin, self._end)
            return elapsed.value / 1e3 / len(sets)

        weakref.finalize(seconds, self._driver.cuGraphExecDestroy, graph).atexit = False
        return seconds

    def close(self) -> None:
        """Releases everything except graphs, which live as long as the functions that `replay` returned."""
        for event in (self._begin, self._end):
            self._call("cuEventDestroy_v2", event)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _made(self, function: str, argument: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, ctypes.byref(handle), argument)
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status != 0:
            raise DeviceUnavailableError(f"{function} of the driver failed with CUDA error {status} while tuning")
