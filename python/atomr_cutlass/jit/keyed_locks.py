"""Locks that are free in a forked child, and those of keys.

A lock that another thread holds during fork would stay locked in the child for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from ..errors import InvalidOperandError
from ..generator.errors import shown

T = TypeVar("T")


_owners: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def renewed(owner: Any, name: str, make: Callable[[], T]) -> T:
    """Makes what an object or a module has under a name; in a forked child it has one that is made anew.

    Args:
        owner: the object, or a module.
        name: of the attribute, to which the caller assigns what is returned.
        make: makes a lock, or whatever goes with one.
    """
    _owners.setdefault(owner, {})[name] = make
    return make()


def _renew() -> None:
    for owner, attributes in _owners.items():
        for name, make in attributes.items():
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)


class KeyedLocks:
    """Lets threads with one key take turns, and those with other keys pass. All are free in a forked child."""

    def __init__(self) -> None:
        self._lock = renewed(self, "_lock", threading.Lock)
        self._held: dict[Hashable, list[Any]] = renewed(self, "_held", dict)  # key -> [lock, users]

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
