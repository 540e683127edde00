"""Locks that outlive nobody: between threads, free in a forked child; between processes, each of them a file.

A lock of threads that another thread holds during fork would stay locked in the child for ever.

Locks between processes are flock's, since the kernel releases it however its holder ends; each acquisition has a
description of its own, so that threads of one process exclude each other too.

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
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import InvalidOperandError
from ..generator.errors import shown

T = TypeVar("T")

COMPILE_SECONDS = 900.0
"""For one compiler process: many times what it takes on a busy machine."""

LOCK_SECONDS = 2 * COMPILE_SECONDS + 60.0
"""For the process that compiles a kernel, which may run its two compilers one after the other. Longer than they may
take, so that who waits gets their kernel or their error; only for one that was stopped is it ever this long."""

_owners: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def renewed(owner: Any, name: str, make: Callable[[], T]) -> T:
    """Makes a lock, or the like, for the caller to assign to this name of its owner; a forked child makes it anew."""
    _owners.setdefault(owner, {})[name] = make
    return make()


class KeyedLocks:
    """Lets threads with one key take turns, and those with other keys pass. All are free in a forked child."""

    def __init__(self) -> None:
        self._lock = renewed(self, "_lock", threading.Lock)
        # A lock is there as long as somebody holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[Hashable, Any] = renewed(self, "_locks", weakref.WeakValueDictionary)

    @contextlib.contextmanager
    def hold(self, key: Hashable) -> Iterator[None]:
        """Holds the lock of a key; reentrant, so that a thread that comes back with its own key meets no deadlock."""
        try:
            hash(key)
        except TypeError:
            raise InvalidOperandError(f"key is {shown(key)}; expected something that has a hash") from None
        with self._lock:
            lock = self._locks.setdefault(key, threading.RLock())
        with lock:
            yield


_descriptors: set[int] = set()
forking = threading.RLock()


class Lock(NamedTuple):
    """A lock that is held; its file is there meanwhile. A process that inherits the descriptor holds it too."""

    path: Path
    descriptor: int

    def unlock(self) -> None:
        """Releases the lock, and removes its file."""
        if self.descriptor not in _descriptors:
            return  # a child that was forked meanwhile: the lock is its parent's
        with contextlib.suppress(OSError):
            if self.is_named():
                self.path.unlink()
        # Closing alone would not do while a child between fork and exec has the descriptor too.
        with contextlib.suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Closes the descriptor: the lock stays with a process that has inherited it."""
        with forking:
            if self.descriptor in _descriptors:
                _descriptors.discard(self.descriptor)
                os.close(self.descriptor)

    def is_named(self) -> bool:
        """Whether the path still stands for the file that is locked."""
        try:
            named = self.path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))


@contextlib.contextmanager
def hold(path: Path, patience: float) -> Iterator[None]:
    """Holds a lock, for which it waits so many seconds at most; then TimeoutError, other errors are `try_lock`'s."""
    deadline = time.monotonic() + patience
    pause = 0.001
    while (lock := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {patience:.0f} s for the process that holds {path}")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    try:
        yield
    finally:
        lock.unlock()


def remove(path: Path) -> None:
    """Removes the file of a lock that nobody holds; leaves that of one that is held."""
    lock = try_lock(path)
    if lock is not None:
        lock.unlock()


def try_lock(path: Path) -> Lock | None:
    """Takes a lock at once, if nobody holds it; OSError for want of its folder, or of locks on that file system."""
    with forking:
        lock = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        _descriptors.add(lock.descriptor)
    with contextlib.ExitStack() as failed, contextlib.suppress(BlockingIOError):
        failed.callback(lock.close)
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.is_named():
            failed.pop_all()
            return lock
    return None


def try_first(paths: Iterable[Path]) -> Lock | None:
    """As `try_lock`, of the first of several that nobody holds."""
    return next(filter(None, map(try_lock, paths)), None)


def _renew_in_child() -> None:
    for owner, attributes in _owners.items():
        for name, make in attributes.items():
            setattr(owner, name, make())
    # A description is shared with the parent: left open here, its lock would outlive the parent; unlocked here, the
    # parent would lose it.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    forking.release()


# Held across a fork, so that no descriptor is open but not yet listed in the child.
os.register_at_fork(before=forking.acquire, after_in_parent=forking.release, after_in_child=_renew_in_child)
