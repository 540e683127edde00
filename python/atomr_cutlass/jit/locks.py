"""Locks between threads and processes, each of them a file.

flock, since the kernel releases it however its holder ends; each acquisition has a description of its own, so that
threads of one process exclude each other too.

Lock files are removed while their lock is held, by the holder or by `remove`. The hazard: another one has opened the
file by then, locks what has no name any more, and a third one locks a new file of that name. So whoever gets a lock
looks whether the name still stands for the file that is locked, and starts again if it does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_descriptors: set[int] = set()
_forking = threading.RLock()


@contextlib.contextmanager
def hold(path: Path, patience: float) -> Iterator[None]:
    """Holds a lock.

    Args:
        path: its file, which is there only while somebody holds it.
        patience: how many seconds to wait for it.

    Raises:
        OSError: it cannot be had: no such folder, no locks on that file system, or (TimeoutError) no end of waiting.
    """
    deadline = time.monotonic() + patience
    pause = 0.001
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {patience:.0f} s for the process that holds {path}")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    try:
        yield
    finally:
        unlock(path, descriptor)


def remove(path: Path) -> None:
    """Removes the file of a lock that nobody holds; leaves that of one that is held."""
    descriptor = try_lock(path)
    if descriptor is not None:
        unlock(path, descriptor)


def try_lock(path: Path) -> int | None:
    """Takes a lock at once, if nobody holds it; then returns its descriptor, for `unlock` or for `close`.

    Raises:
        OSError: it cannot be had: no such folder, or no locks on that file system.
    """
    with _forking:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _descriptors.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _names(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        close(descriptor)
        raise
    close(descriptor)
    return None


def unlock(path: Path, descriptor: int) -> None:
    """Releases a lock, and removes its file."""
    if descriptor not in _descriptors:
        return  # a child that was forked meanwhile: the lock is its parent's
    with contextlib.suppress(OSError):
        if _names(path, descriptor):
            path.unlink()
    # Closing alone would not do while a child between fork and exec has the descriptor too.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    close(descriptor)


def close(descriptor: int) -> None:
    """Closes the descriptor of a lock: the lock stays with a process that has inherited the descriptor."""
    with _forking:
        if descriptor in _descriptors:
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _close_in_child() -> None:
    # A description is shared with the parent: left open here, its lock would outlive the parent; unlocked here, the
    # parent would lose it.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    _forking.release()


# Held across a fork, so that no descriptor is open but not yet listed in the child.
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)
