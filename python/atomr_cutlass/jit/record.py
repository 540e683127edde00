"""Recording of the kernels that a process uses in files of keys, which `atomr-cutlass build` reads.

Every plan is noted with the kernels that it launches. Calls of one plan are not counted: they run in C++.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CutlassError, InvalidOperandError
from ..generator import key_file
from ..generator.errors import shown
from ..generator.key import KernelKey
from .locks import renewed

VARIABLE = "ATOMR_CUTLASS_RECORD"

EXTENTS = ("m", "n", "k", "batch", "groups", "h", "w", "c", "r", "s", "p", "q", "count", "rows", "columns")
"""The arguments of kernels (kernel_abi.h) that give the size of a problem."""

Launches = Sequence[tuple[KernelKey, Mapping[str, Any]]]
"""The kernels of a plan, each with its arguments by name."""


class Recording:
    """A file of keys that is being recorded. Threads may note concurrently, and processes share one file."""

    def __init__(self, path: Path) -> None:
        """Begins a recording, which keeps the present content of the file."""
        self.path = path
        self._lock = renewed(self, "_lock", threading.Lock)
        self._known: set[tuple[KernelKey, str]] = set()
        # A forked child does not write the parent's notes.
        self._noted: Counter[tuple[KernelKey, str]] = renewed(self, "_noted", Counter)
        self.flush()

    def note(self, launches: Launches) -> None:
        """Notes a plan. New keys and shapes are written at once, since the process may be killed."""
        with self._lock:
            noted = [
                (key, json.dumps({name: args[name] for name in EXTENTS if isinstance(args.get(name), int)}))
                for key, args in launches
            ]
            self._noted.update(noted)
            new = not self._known.issuperset(noted)
            self._known.update(noted)
        if new:
            self.flush()

    def flush(self) -> None:
        """Merges the noted keys into the file, which other processes may have written meanwhile."""
        from . import files  # imports tempfile, which is slow and rarely needed

        with self._lock:
            files.rewrite(self.path, self._merged, "record kernels in")
            self._noted.clear()

    def _merged(self, present: str) -> str:
        """The text of the file with the noted keys added, each key once."""
        found: dict[KernelKey, tuple[list[Any], int]] = {}

        def add(key: KernelKey, shapes: list[Any], count: int) -> None:
            known, counted = found.get(key, ([], 0))
            found[key] = ([*known, *(shape for shape in shapes if shape not in known)], counted + count)

        for line in filter(str.strip, present.splitlines()):
            values = json.loads(line)
            key = key_file.parse(values)
            shapes, count = values.get("shapes", []), values.get("count", 0)
            if not isinstance(shapes, list) or not isinstance(count, int):
                raise ValueError(f"shapes and count of {key.name} are no list and no integer")  # noqa: TRY004
            add(key, shapes, count)
        if present and not self._noted:
            return present
        for (key, shape), count in self._noted.items():
            add(key, [json.loads(shape)], count)
        return "".join(f"{key_file.line(key, shapes=shapes, count=count)}\n" for key, (shapes, count) in found.items())


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the kernels of the plans that exist within the block, of all threads, in a file of keys.

    Each line has the key of a kernel, `shapes`, the problems that it was planned for, and `count`, the number of plans.
    Earlier plans that are still alive are included, since calls within the block may use them. An existing file is
    extended; several processes may record in one.

    Args:
        path: the file, such as `keys.jsonl`. `atomr-cutlass build` makes a pack of it.

    Raises:
        InvalidOperandError: `path` is no path, or its file has no keys or cannot be written.
    """
    try:
        recording = Recording(Path(path).absolute())
    except TypeError:
        raise InvalidOperandError(f"path is {shown(path)}; expected the path of a file of keys") from None
    with _lock:
        _recordings.append(recording)
        alive = list(_plans.items())
    try:
        for _, launches in alive:
            recording.note(launches)
        yield
    finally:
        with _lock:
            _recordings.remove(recording)
        recording.flush()


def note(plan: object, launches: Launches) -> None:
    """Notes a new plan and the kernels that it launches in every active recording."""
    with _lock:
        _start_from_environment()
        _plans[plan] = launches
        recordings = list(_recordings)
    for recording in recordings:
        try:
            recording.note(launches)
        except CutlassError as error:  # noqa: PERF203 - the call that made the plan must not fail
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)


_lock = renewed(sys.modules[__name__], "_lock", threading.RLock)
_plans: weakref.WeakKeyDictionary[object, Launches] = weakref.WeakKeyDictionary()
_recordings: list[Recording] = []


@functools.cache
def _start_from_environment() -> None:
    path = os.environ.get(VARIABLE)
    if path:
        recordings = contextlib.ExitStack()
        atexit.register(recordings.close)
        recordings.enter_context(contextlib.suppress(CutlassError))  # at exit no caller remains
        try:
            recordings.enter_context(record(path))
        except CutlassError as error:
            warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=4)
