"""Locks that never outlive their holder: between threads, free in a forked child; between processes, files.

An ordinary lock that another thread holds during a fork would stay locked in the child for ever.

Locks between processes use flock, which the kernel releases however the holder ends. Each acquisition opens the file
anew, so that threads of one process exclude each other too.

Lock files are removed while their lock is held, by the holder or by `remove`. The hazard: a second process that opened
the file before its removal locks a file without a name, while a third one locks a new file of that name. So after
locking, a process checks that the name still refers to the locked file, and starts again if it does not.
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
"""Limit of one compiler process: many times its duration on a busy machine."""

LOCK_SECONDS = 2 * COMPILE_SECONDS + 60.0
"""Longest wait for a process that compiles a kernel, possibly with its two compilers in sequence. It exceeds their
limits, so that a waiting process gets the kernel or the error; it is reached only if that process is stopped."""

_owners: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def renewed(owner: Any, name: str, make: Callable[[], T]) -> T:
    """Makes a lock or similar object, to be assigned to `name` of `owner`; a forked child gets a new one there."""
    _owners.setdefault(owner, {})[name] = make
    return make()


class KeyedLocks:
    """A lock for each key, all free in a forked child."""

    def __init__(self) -> None:
        self._lock = renewed(self, "_lock", threading.Lock)
        # A lock exists as long as a thread holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[Hashable, Any] = renewed(self, "_locks", weakref.WeakValueDictionary)

    @contextlib.contextmanager
    def hold(self, key: Hashable) -> Iterator[None]:
        """Holds the lock of a key; reentrant, so that nested use of one key does not deadlock."""
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
    """A held lock and its file. A process that inherits the descriptor holds it too."""

    path: Path
    descriptor: int

    def unlock(self) -> None:
        """Releases the lock, and removes its file."""
        if self.descriptor not in _descriptors:
            return  # in a forked child: the lock belongs to the parent
        with contextlib.suppress(OSError):
            if self.is_named():
                self.path.unlink()
        # Closing alone does not unlock while a child between fork and exec has the descriptor too.
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
        """Whether the path still refers to the locked file."""
        try:
            named = self.path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))


@contextlib.contextmanager
def hold(path: Path, patience: float) -> Iterator[None]:
    """Holds a lock; TimeoutError if that takes longer than `patience` seconds, else the errors of `try_lock`."""
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
    """Removes the file of a free lock; leaves that of a held one."""
    lock = try_lock(path)
    if lock is not None:
        lock.unlock()


def try_lock(path: Path) -> Lock | None:
    """Takes a lock if it is free; OSError without its folder, or on a file system without locks."""
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
    """Takes the first free one of several locks, as `try_lock` does."""
    return next(filter(None, map(try_lock, paths)), None)


def _renew_in_child() -> None:
    for owner, attributes in _owners.items():
        for name, make in attributes.items():
            setattr(owner, name, make())
    # The open file is shared with the parent: left open here, its lock would outlive the parent; unlocked here, the
    # parent would lose it.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    forking.release()


# Held across a fork, so that no descriptor is open but not yet listed in the child.
os.register_at_fork(before=forking.acquire, after_in_parent=forking.release, after_in_child=_renew_in_child)
