"""Compilation of a kernel's key by NVRTC alone, without nvcc or a host compiler.

Compilers take turns: over all processes of a user, at most as many run at once as CPUs and free memory allow. A turn is
a lock, locks/HOST-compiler-N in the cache's folder. The compiler's process inherits the lock and holds it until it
ends: a compiler whose caller was killed still occupies memory.

Compilations that a caller waits for are announced once, on a terminal or through `logging`; several have a bar.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CacheError, CompileError, LibraryError
from ..generator import machine
from ..generator.key import KernelKey
from ..generator.render import render
from . import locks, worker
from .files import default_folder, failing, prepare, temporary_folder, version
from .locks import COMPILE_SECONDS, LOCK_SECONDS, renewed
from .toolchain import Toolchain, toolchain

if TYPE_CHECKING:  # slow to import, needed on terminals only
    from rich.progress import Progress

OPTIONS = (
    "-std=c++17",
    # CUTLASS's functions without __host__ or __device__ become device functions.
    "-default-device",
    # CUTLASS's own 128-bit division, used by its tile schedulers, traps on the device.
    "-device-int128",
    "-DCUTLASS_UINT128_NATIVE",
    "-DNDEBUG",
    "-w",
)
COMPANION = "-DATOMR_CUTLASS_EVALUATE"

COMPILE_BYTES = 2 << 30
"""Memory of one compiler process: sm90 kernels take 1.9 GB, their companions and kernels of sm80 half of it or less."""

QUIET_VARIABLE = "ATOMR_CUTLASS_QUIET"

_SILENT_SECONDS = 1.0
_PAUSE_SECONDS = 0.1
_READ_SECONDS = 0.01
_WORKER = Path(worker.__file__)
_SIZES = struct.Struct("<QQ")
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""A compilation touches 1.7 GB in small pieces. In pages of 4 KiB their faults took up to half of its time; glibc
before 2.35 and other C libraries ignore it."""

_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


@dataclass(frozen=True)
class Images:
    """A compiled kernel and its companion, which evaluates its parameters (jit_abi.h)."""

    kernel: bytes
    companion: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of both, in hexadecimal digits."""
        return hashlib.sha256(self.pack()).hexdigest()

    def pack(self) -> bytes:
        """One string of bytes, for `unpack`."""
        return _SIZES.pack(len(self.kernel), len(self.companion)) + self.kernel + self.companion

    @classmethod
    def unpack(cls, data: bytes) -> Images:
        """The inverse of `pack`."""
        start = _SIZES.size
        end = start + _SIZES.unpack_from(data)[0]
        return cls(data[start:end], data[end:])


@dataclass(frozen=True)
class Unit:
    """A kernel's source with its name and target: `sm_90a` for machine code, `compute_80` for PTX."""

    name: str
    source: str
    target: str

    @classmethod
    def of(cls, key: KernelKey, target: str) -> Unit:
        """The unit of a key."""
        source, name = render(key, flavour="nvrtc")
        return cls(name, source, target)

    def digest(self, tools: Toolchain) -> bytes:
        """The kernel's key in the disk cache: no path, no time, no machine is part of it."""
        parts = [self.source, self.target, *OPTIONS, COMPANION, tools.build, *tools.headers.values()]
        return hashlib.sha256("\0".join(parts).encode()).digest()

    def compile(self) -> Images:
        """Compiles the kernel and its companion side by side, each in a process of its own.

        Raises CompileError for a faulty source, LibraryError for a compiler that crashed or lacked time or memory.
        """
        tools = toolchain()
        options = [f"--gpu-architecture={self.target}", *OPTIONS, *(f"-I{folder}" for folder in tools.include)]
        image = "ptx" if self.target.startswith("compute_") else "cubin"
        request = {"library": str(tools.nvrtc), "name": self.name, "source": self.source, "image": image}
        requests = [request | {"options": given} for given in (options, [*options, COMPANION])]
        made = []
        for given, (code, log) in zip(requests, _compiled(requests), strict=True):
            if code is None:
                raise CompileError(
                    f"{self.name} does not compile for {self.target}: {first_error(log)}",
                    log=log,
                    source=self.source,
                    options=tuple(given["options"]),
                )
            made.append(code)
        return Images(*made)


def first_error(log: str) -> str:
    """The first line of a compiler's log that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def stop_all() -> None:
    """Kills the running compilers and prevents further ones: for the end of the process."""
    _stopped.set()
    for process in list(_running):
        process.kill()


def _compiled(requests: list[dict[str, Any]]) -> list[tuple[bytes | None, str]]:
    """The result of `worker.compile_source` for each request."""
    if not sys.executable or getattr(sys, "frozen", False):
        # In a program that embeds Python, sys.executable may be that program.
        made = []
        for request in requests:
            turn = wait_for_turn(_refuse_if_stopped)
            try:
                made.append(worker.compile_source(**request))
            finally:
                if turn is not None:
                    turn.unlock()
        return made
    halves: list[_Half] = []

    def check() -> None:
        # Otherwise a hanging compiler would keep the second one waiting for a turn.
        _refuse_if_stopped()
        for half in halves:
            half.has_ended(_READ_SECONDS)

    with contextlib.ExitStack() as started:
        for request in requests:
            half = _Half(request, wait_for_turn(check))
            started.callback(half.stop)  # also after an interrupt
            halves.append(half)
        waiting = halves
        while waiting:  # one at a time: a process cannot end before its output is read
            waiting = [half for half in waiting if not half.has_ended(_PAUSE_SECONDS)]
        return [half.result() for half in halves]


def wait_for_turn(check: Callable[[], None]) -> locks.Lock | None:
    """Waits for the next turn, a lock; meanwhile calls `check`, which may raise.

    At least one turn exists, however little memory is free. None, with a warning, if all stay held, by stopped
    processes for instance, or if the file system has no locks.
    """
    seen: object = None
    deadline = 0.0
    while True:
        # Recomputed each time: compilers allocate and free memory.
        limit = machine.jobs(COMPILE_BYTES)
        paths, turn = _take_turn(limit)
        if turn is not None:
            return turn
        held = [version(path) for path in paths]
        if held != seen:  # another process is making progress
            seen, deadline = held, time.monotonic() + LOCK_SECONDS
        if not paths or time.monotonic() >= deadline:
            reason = f"{limit} of them do not end" if paths else "no lock can be had for counting them"
            warnings.warn(f"compiling beside all other compilers: {reason}", RuntimeWarning, stacklevel=2)
            return None
        check()
        time.sleep(_PAUSE_SECONDS)


def _take_turn(limit: int) -> tuple[list[Path], locks.Lock | None]:
    """The files of the turns, empty if locks are unavailable; and a turn, if one is free."""
    # In the cache; if that is read-only or unsafe, among the temporary files.
    for find in (default_folder, temporary_folder):
        with contextlib.suppress(CacheError, FileNotFoundError):
            folder = find()
            # Machines that share a folder count their turns separately.
            paths = [folder / "locks" / f"{os.uname().nodename}-compiler-{number}" for number in range(limit)]
            prepare(folder)
            with failing(folder, "locked"):
                turn = locks.try_first(paths)
                if turn is not None:
                    os.utime(turn.descriptor)
            return paths, turn
    return [], None


def _refuse_if_stopped() -> None:
    if _stopped.is_set():
        raise LibraryError("nvrtc", "the process ends: nothing is compiled any more")


def _environment() -> dict[str, str]:
    """The environment of a worker: this process's, with huge pages, unless the user's tunables say otherwise."""
    tunables = [_HUGE_PAGES, *filter(None, [os.environ.get("GLIBC_TUNABLES")])]
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}  # of contradictory tunables the last counts


class _Half:
    """A worker process, which compiles the kernel or its companion."""

    def __init__(self, request: dict[str, Any], turn: locks.Lock | None) -> None:
        self._turn, self._answer, self._said = turn, b"", b""
        try:
            # A request in memory: a pipe has room for 64 KiB, and a worker that hangs would not read the rest.
            with os.fdopen(os.memfd_create("request"), "r+b") as request_file, locks.forking:
                request_file.write(json.dumps(request).encode() + b"\n")
                request_file.seek(0)
                # A child that is forked meanwhile would keep a pipe's end open.
                self._process = subprocess.Popen(
                    # -I: the environment does not decide what Python runs.
                    [sys.executable, "-I", str(_WORKER)],
                    stdin=request_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment(),
                    pass_fds=[] if turn is None else [turn.descriptor],
                )
        except OSError as error:
            raise LibraryError("nvrtc", f"the compiler's process cannot be started: {error}") from error
        finally:
            # The child, if it was started, has inherited the lock.
            if turn is not None:
                turn.close()
        _running.add(self._process)
        if _stopped.is_set():  # after the turn was taken
            self._process.kill()
        # Counted from the start: the two compilers run side by side.
        self._deadline = time.monotonic() + COMPILE_SECONDS

    def has_ended(self, seconds: float) -> bool:
        """Whether the process has ended; reads its answer for so many seconds at most."""
        try:
            self._answer, self._said = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            if self._process.poll():  # a child of the worker's own keeps the pipes open
                self._said = late.stderr or b""
                return True
            if time.monotonic() >= self._deadline:
                raise LibraryError("nvrtc", f"the compiler did not end within {COMPILE_SECONDS:.0f} s") from None
            return False
        return True

    def result(self) -> tuple[bytes | None, str]:
        status, said = self._process.returncode, self._said.decode(errors="replace").strip()
        if status != 0:
            # Not caused by the source (out of memory, or killed), so not cached as a failure.
            reason = f"signal {-status}" if status < 0 else f"status {status}"
            raise LibraryError("nvrtc", f"the compiler's process ended with {reason}" + (f": {said}" if said else ""))
        try:
            return worker.parse(self._answer)
        except (TypeError, ValueError) as error:  # the output of a program other than Python
            raise LibraryError("nvrtc", f"the compiler's process ended well, but without a result ({error})") from error

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in filter(None, (self._process.stdout, self._process.stderr)):
            pipe.close()  # not read to its end: a child of the worker's own may keep it open
        _running.discard(self._process)
        if self._turn is not None:
            with contextlib.suppress(OSError):  # it is in nobody's way
                locks.remove(self._turn.path)


@contextlib.contextmanager
def announced(name: str, seconds: float, folder: Callable[[], Path]) -> Iterator[None]:
    """Announces a compilation if the block takes longer than a second, unless ATOMR_CUTLASS_QUIET is set.

    `seconds` is its usual duration; `folder` returns the folder of the cache.
    """
    if os.environ.get(QUIET_VARIABLE, "0") != "0":
        yield
        return
    timer = threading.Timer(
        _SILENT_SECONDS,
        lambda: _waiting.announce(timer, f"compiling {name}: about {seconds:.0f} s, once; it is kept in {folder()}"),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        _waiting.finish(timer)


class _Waiting:
    """The announced compilations that still run, and the bar that counts them and the finished ones."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.announced: list[threading.Timer] = []
        self._bar: Progress | None = None

    def announce(self, timer: threading.Timer, message: str) -> None:
        """Announces a compilation; on a terminal above a bar, once there are several."""
        if sys.stderr is None or not sys.stderr.isatty():
            import logging

            logging.getLogger("atomr_cutlass").info("%s", message)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if timer.finished.is_set():  # the compilation has ended meanwhile
                return
            if self._bar is None:
                columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task("", total=0)
            self._bar.console.print(f"atomr_cutlass: {message}", soft_wrap=True, markup=False, highlight=False)
            self.announced.append(timer)
            (task,) = self._bar.tasks
            self._bar.update(task.id, total=(task.total or 0) + 1)
            if len(self.announced) > 1:
                self._bar.start()

    def finish(self, timer: threading.Timer) -> None:
        with self._lock:
            timer.cancel()
            if self._bar is None or timer not in self.announced:
                return
            self.announced.remove(timer)
            self._bar.advance(self._bar.task_ids[0])
            if not self.announced:
                self._bar.stop()  # otherwise it would mix with the caller's output
                self._bar = None


_waiting = renewed(sys.modules[__name__], "_waiting", _Waiting)
