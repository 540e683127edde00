"""KernelKey -> compiled kernel, by NVRTC alone: no nvcc, no host compiler."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError, LibraryError
from ..generator.key import KernelKey
from ..generator.render import render
from . import locks, turns, worker
from .toolchain import Toolchain, toolchain
from .turns import COMPILE_SECONDS

OPTIONS = (
    "-std=c++17",
    # CUTLASS's host functions, which say nothing of where they run, become device functions.
    "-default-device",
    # CUTLASS's own 128-bit division, by which it schedules tiles, traps on the device.
    "-device-int128",
    "-DCUTLASS_UINT128_NATIVE",
    "-DNDEBUG",
    "-w",
)
COMPANION = "-DATOMR_CUTLASS_EVALUATE"

_WORKER = Path(worker.__file__)
_SIZES = struct.Struct("<QQ")


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
        """One string of bytes."""
        return _SIZES.pack(len(self.kernel), len(self.companion)) + self.kernel + self.companion

    @classmethod
    def unpack(cls, data: bytes) -> Images:
        """The inverse of `pack`; ValueError for anything else."""
        if len(data) < _SIZES.size:
            raise ValueError("not a compiled kernel: too short")
        first, second = _SIZES.unpack_from(data)
        start = _SIZES.size
        if len(data) != start + first + second:
            raise ValueError("not a compiled kernel: its parts do not add up")
        return cls(data[start : start + first], data[start + first :])


@dataclass(frozen=True)
class Unit:
    """A kernel's source with everything else that decides what it compiles into.

    Attributes:
        name: the kernel's.
        source: the source text.
        target: NVRTC's name of it: `sm_90a` for machine code, `compute_80` for PTX.
    """

    name: str
    source: str
    target: str

    @classmethod
    def of(cls, key: KernelKey, target: str) -> Unit:
        """The unit of a key."""
        source, name = render(key, flavour="nvrtc")
        return cls(name, source, target)

    def digest(self, tools: Toolchain) -> bytes:
        """The kernel's key in the disk cache: no path, no time, no machine is part of it.

        Source, options, exact arch, NVRTC's build and the contents of CUTLASS's headers and ours.
        """
        parts = [self.source, self.target, *OPTIONS, COMPANION, tools.build, *tools.headers.values()]
        return hashlib.sha256("\0".join(parts).encode()).digest()

    def compile(self) -> Images:
        """Compiles the kernel and its companion side by side, each in a process of its own.

        Raises:
            CompileError: the source does not compile; carries log, source and options.
            LibraryError: the compiler crashed, was killed, did not end, or had no room for its result.
            DeviceUnavailableError: NVRTC or CUDA's headers are missing.
        """
        tools = toolchain()
        options = [f"--gpu-architecture={self.target}", *OPTIONS, *(f"-I{folder}" for folder in tools.include)]
        requests = [
            {
                "library": str(tools.nvrtc),
                "name": self.name,
                "source": self.source,
                "options": given,
                "image": "ptx" if self.target.startswith("compute_") else "cubin",
            }
            for given in (options, [*options, COMPANION])
        ]
        made = []
        for request, (image, log) in zip(requests, _compiled(requests), strict=True):
            if image is None:
                raise CompileError(
                    f"{self.name} does not compile for {self.target}: {first_error(log)}",
                    log=log,
                    source=self.source,
                    options=tuple(request["options"]),
                )
            made.append(image)
        return Images(*made)


def first_error(log: str) -> str:
    """The first line of a compiler's log that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def stop_all() -> None:
    """Kills the compilers that run, and starts no others: for the end of the process."""
    _stopped.set()
    for process in list(_running):
        process.kill()


def _compiled(requests: list[dict[str, Any]]) -> list[tuple[bytes | None, str]]:
    """Compiles the requests; for each, the result of `worker.compile_source`."""
    if not sys.executable or getattr(sys, "frozen", False):
        # Inside another program, what would be started is that program, not Python.
        return [_compiled_here(request) for request in requests]
    with contextlib.ExitStack() as started:
        with _writing_to_temporary_files():
            name = started.enter_context(tempfile.TemporaryDirectory(prefix="atomr-cutlass-"))
        halves: list[_Half] = []

        def check() -> None:
            # Else one that hangs would keep the other one waiting for its turn.
            _refuse_if_stopped()
            for half in halves:
                half.check()

        for number, request in enumerate(requests):
            turn = turns.wait(check)
            half = _Half(Path(name) / str(number), request, turn)
            started.callback(half.stop)  # on any way out, an interrupt too
            halves.append(half)
        return [half.wait() for half in halves]


def _compiled_here(request: dict[str, Any]) -> tuple[bytes | None, str]:
    turn = turns.wait(_refuse_if_stopped)
    try:
        return worker.compile_source(**request)
    finally:
        if turn is not None:
            turn.unlock()


def _refuse_if_stopped() -> None:
    if _stopped.is_set():
        raise LibraryError("nvrtc", "the process ends: nothing is compiled any more")


@contextlib.contextmanager
def _writing_to_temporary_files() -> Iterator[None]:
    """Turns an OSError within into an error with a cure."""
    try:
        yield
    except OSError as error:
        raise LibraryError(
            "nvrtc",
            f"the compiler's process has nowhere to work: {error}; make room among the temporary files, or name a "
            "folder that can be written in TMPDIR",
        ) from error


_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""A compilation touches 1.7 GB in small pieces. In pages of 4 KiB their faults took up to half of its time; glibc
before 2.35 and other C libraries ignore it."""


def _environment() -> dict[str, str]:
    """The environment of a worker: this process's, with huge pages, unless the user's tunables say otherwise."""
    tunables = [_HUGE_PAGES, *filter(None, [os.environ.get("GLIBC_TUNABLES")])]
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}  # the last of two that contradict counts


_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


class _Half:
    """A worker process. It talks through files, so that nobody has to read while it works."""

    def __init__(self, folder: Path, request: dict[str, Any], turn: locks.Lock | None) -> None:
        self._folder, self._turn = folder, turn
        request_file, self._answer, self._said = (folder / name for name in ("request", "answer", "said"))
        try:
            with _writing_to_temporary_files():
                folder.mkdir()
                request_file.write_text(json.dumps(request), encoding="utf-8")
            with self._said.open("wb") as said:
                self._process = subprocess.Popen(
                    # -I: the environment does not decide what Python runs.
                    [sys.executable, "-I", str(_WORKER), str(request_file), str(self._answer)],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=_environment(),
                    pass_fds=[] if turn is None else [turn.descriptor],
                )
        except OSError as error:
            raise LibraryError("nvrtc", f"the compiler's process cannot be started: {error}") from error
        finally:
            # It is the process's now, or nobody's.
            if turn is not None:
                turn.close()
        _running.add(self._process)
        if _stopped.is_set():  # since the turn was had
            self._process.kill()
        # From the start: the two run side by side, and are waited for one after the other.
        self._deadline = time.monotonic() + COMPILE_SECONDS

    def wait(self) -> tuple[bytes | None, str]:
        try:
            status = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise _too_slow() from error
        said = self._said.read_text(encoding="utf-8", errors="replace").strip()
        if status == worker.CANNOT_WRITE:
            free = shutil.disk_usage(self._folder).free
            raise LibraryError(
                "nvrtc",
                f"the compiler's process could not write its result to {self._folder.parent} ({free >> 10} KiB are "
                f"free there{f': {said}' if said else ''}): make room, or name another folder in TMPDIR",
            )
        if status != 0:
            # Not the source's fault, so not to be remembered: out of memory, or killed.
            reason = f"signal {-status}" if status < 0 else f"status {status}"
            raise LibraryError("nvrtc", f"the compiler's process ended with {reason}" + (f": {said}" if said else ""))
        try:
            return worker.parse(self._answer.read_bytes())
        except (OSError, ValueError) as error:
            raise LibraryError("nvrtc", f"the compiler's process ended well, but {error}") from error

    def check(self) -> None:
        """Raises the error that `wait` raises for a compiler that does not end."""
        if time.monotonic() > self._deadline and self._process.poll() is None:
            raise _too_slow()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        _running.discard(self._process)
        if self._turn is not None:
            with contextlib.suppress(OSError):  # it is in nobody's way
                locks.remove(self._turn.path)


def _too_slow() -> LibraryError:
    return LibraryError("nvrtc", f"the compiler did not end within {COMPILE_SECONDS:.0f} s")
