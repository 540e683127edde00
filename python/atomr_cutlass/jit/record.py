"""Recording of the kernels that a process uses in files of keys, which `atomr-cutlass build` and `tune` read.

Every plan is noted with the kernels that it launches, and its problem. Calls of one plan are not counted: they run in
C++.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

Planned = tuple[KernelKey, Callable[[], str]]
"""The main kernel of a plan, and a function that returns its problem as JSON."""


@dataclass
class _Line:
    """The contents of a key's line; `problems`, by their JSON, are None where an older version has written it."""

    shapes: list[Any] = field(default_factory=list)
    count: int = 0
    problems: dict[str, None] | None = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], name: str) -> _Line:
        """Of a line's JSON object."""
        shapes, count, problems = values.get("shapes", []), values.get("count", 0), values.get("problems")
        if not isinstance(shapes, list) or not isinstance(count, int):
            raise ValueError(f"shapes and count of {name} are no list and no integer")  # noqa: TRY004
        if not isinstance(problems, (list, type(None))):
            raise ValueError(f"problems of {name} are no list")  # noqa: TRY004
        return cls(shapes, count, None if problems is None else dict.fromkeys(map(json.dumps, problems)))

    def add(self, other: _Line) -> None:
        """Adds another line's contents. One without problems stays so: it would seem to have those of all shapes."""
        self.shapes += [shape for shape in other.shapes if shape not in self.shapes]
        self.count += other.count
        self.problems = None if self.problems is None or other.problems is None else self.problems | other.problems

    def text(self, key: KernelKey) -> str:
        """The line, with its end."""
        more: dict[str, Any] = {"shapes": self.shapes, "count": self.count}
        if self.problems is not None:
            more["problems"] = list(map(json.loads, self.problems))
        return f"{key_file.line(key, **more)}\n"


class Recording:
    """A file of keys that is being recorded. Threads may note concurrently, and processes share one file."""

    def __init__(self, path: Path) -> None:
        """Begins a recording, which keeps the present content of the file."""
        self.path = path
        self._lock = renewed(self, "_lock", threading.Lock)
        self._known: set[tuple[KernelKey, str]] = set()
        # A forked child does not write the parent's notes.
        self._noted: Counter[tuple[KernelKey, str]] = renewed(self, "_noted", Counter)
        self._problems: dict[tuple[KernelKey, str], None] = renewed(self, "_problems", dict)
        self.flush()

    def note(self, launches: Launches, planned: Planned | None = None) -> None:
        """Notes a plan. New keys, shapes and problems are written at once, since the process may be killed."""
        with self._lock:
            noted = [
                (key, json.dumps({name: args[name] for name in EXTENTS if isinstance(args.get(name), int)}))
                for key, args in launches
            ]
            problems = [] if planned is None else [(planned[0], planned[1]())]
            self._noted.update(noted)
            self._problems.update(dict.fromkeys(problems))
            new = not self._known.issuperset([*noted, *problems])
            self._known.update(noted, problems)
        if new:
            self.flush()

    def flush(self) -> None:
        """Merges the noted keys into the file, which other processes may have written meanwhile."""
        from . import files  # imports tempfile, which is slow and rarely needed

        with self._lock:
            files.rewrite(self.path, self._merged, "record kernels in")
            self._noted.clear()
            self._problems.clear()

    def _merged(self, present: str) -> str:
        """The text of the file with the noted keys added, each key once."""
        found: dict[KernelKey, _Line] = {}

        def add(key: KernelKey, line: _Line) -> None:
            if key in found:
                found[key].add(line)
            else:
                found[key] = line

        for text in filter(str.strip, present.splitlines()):
            values = json.loads(text)
            key = key_file.parse(values)
            add(key, _Line.of(values, key.name))
        if present and not self._noted:
            return present
        for (key, shape), count in self._noted.items():
            add(key, _Line([json.loads(shape)], count))
        for key, problem in self._problems:
            add(key, _Line(problems={problem: None}))
        return "".join(line.text(key) for key, line in found.items())


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the kernels of the plans that exist within the block, of all threads, in a file of keys.

    Each line has the key of a kernel, `shapes`, the extents that it was planned for, `count`, the number of plans, and
    `problems`, of the plans whose main kernel it is, what `recorded_requests` makes requests of. Earlier plans that are
    still alive are included, since calls within the block may use them. An existing file is extended; several processes
    may record in one.

    Args:
        path: the file, such as `keys.jsonl`. `atomr-cutlass build` makes a pack of it, `atomr-cutlass tune --keys`
            measures which kernels are fastest for its problems.

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
        for _, (launches, planned) in alive:
            recording.note(launches, planned)
        yield
    finally:
        with _lock:
            _recordings.remove(recording)
        recording.flush()


def note(plan: object, launches: Launches, planned: Planned | None = None) -> None:
    """Notes a new plan, the kernels that it launches, and its problem in every active recording."""
    with _lock:
        _start_from_environment()
        _plans[plan] = launches, planned
        recordings = list(_recordings)
    for recording in recordings:
        try:
            recording.note(launches, planned)
        except CutlassError as error:  # noqa: PERF203 - the call that made the plan must not fail
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)


_lock = renewed(sys.modules[__name__], "_lock", threading.RLock)
_plans: weakref.WeakKeyDictionary[object, tuple[Launches, Planned | None]] = weakref.WeakKeyDictionary()
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
