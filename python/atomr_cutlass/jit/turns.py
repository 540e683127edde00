"""Turns of compiler processes: no more of them run at once than CPUs and free memory allow, of all processes of a user.

A turn is a lock, locks/HOST-compiler-N in the cache's folder. The compiler's process inherits it, so it ends however
that process ends, and not before: a compiler whose caller was killed still takes its memory.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ..errors import CacheError
from ..generator import machine
from . import locks
from .files import default_folder, failing, prepare, temporary_folder

COMPILE_BYTES = 2 << 30
"""Memory of one compiler process: sm90 kernels take 1.9 GB, their companions and kernels of sm80 half of it or less."""

COMPILE_SECONDS = 900.0
"""For one compiler process: many times what it takes on a busy machine."""

LOCK_SECONDS = 2 * COMPILE_SECONDS + 60.0
"""For the process that compiles a kernel, which may run its two compilers one after the other. Longer than they may
take, so that who waits gets their kernel or their error; only for one that was stopped is it ever this long."""

_PAUSE_SECONDS = 0.1


def wait(check: Callable[[], None]) -> locks.Lock | None:
    """The next turn, a lock; waits for it, and meanwhile calls `check`, which may raise.

    One is always to be had, however little memory there is. None, with a warning, where all are held by processes that
    do not end, stopped ones say, or where locks cannot be had.
    """
    seen: object = None
    deadline = 0.0
    while True:
        # Each time anew: what compiles takes memory, and gives it back.
        limit = machine.jobs(COMPILE_BYTES)
        paths, turn = _take(limit)
        if turn is not None:
            return turn
        held = [_identity(path) for path in paths]
        if held != seen:  # somebody else's turn has come
            seen, deadline = held, time.monotonic() + LOCK_SECONDS
        if not paths or time.monotonic() >= deadline:
            reason = f"{limit} of them do not end" if paths else "no lock can be had for counting them"
            warnings.warn(f"compiling beside all other compilers: {reason}", RuntimeWarning, stacklevel=2)
            return None
        check()
        time.sleep(_PAUSE_SECONDS)


def _take(limit: int) -> tuple[list[Path], locks.Lock | None]:
    """The files of the turns, none where locks cannot be had; and one of them, if it is free."""
    # In the cache, else, where that is read-only or unsafe, among the temporary files.
    for find in (default_folder, temporary_folder):
        try:
            folder = find()
            # Of a folder that several machines share, each counts its own.
            paths = [folder / "locks" / f"{os.uname().nodename}-compiler-{number}" for number in range(limit)]
            prepare(folder)
            with failing(folder, "locked"):
                for path in paths:
                    turn = locks.try_lock(path)
                    if turn is not None:
                        os.utime(turn.descriptor)
                        return paths, turn
        except (CacheError, FileNotFoundError):
            continue
        return paths, None
    return [], None


def _identity(path: Path) -> object:
    """A value that changes whenever a turn is taken."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
