"""A lock for each key that is in use."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

from ..errors import InvalidOperandError
from ..generator.errors import shown


class KeyedLocks:
    """Lets threads with one key take turns, and those with other keys pass. All are free in a forked child."""

    def __init__(self) -> None:
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Frees every lock, whoever holds it."""
        self._lock = threading.Lock()
        self._held: dict[Hashable, list[Any]] = {}  # key -> [lock, users]

    @contextlib.contextmanager
    def hold(self, key: Hashable) -> Iterator[None]:
        """Holds the lock of a key; reentrant, so that a thread that comes back with its own key meets no deadlock."""
        try:
            hash(key)
        except TypeError:
            raise InvalidOperandError(f"key is {shown(key)}; expected something that has a hash") from None
        with self._lock:
            entry = self._held.setdefault(key, [threading.RLock(), 0])
            entry[1] += 1
        try:
            with entry[0]:
                yield
        finally:
            with self._lock:
                entry[1] -= 1
                if entry[1] == 0:
                    self._held.pop(key, None)


_all: weakref.WeakSet[KeyedLocks] = weakref.WeakSet()


def _renew() -> None:
    for locks in _all:
        locks.renew()


# A lock that another thread holds during fork would stay locked in the child for ever.
os.register_at_fork(after_in_child=_renew)
