"""Sources that lately did not compile: in the cache's folder, failures/NAME, the record, and failures/NAME.cu.

Compiling takes seconds, and processes that start together would all meet one broken source. The .cu file is only for
a look at it: nothing here reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from ..errors import CompileError
from .files import inside, is_safe, read_record, remove, write

# Long enough for the processes that start together and meet one broken source; short enough for who has mended a
# header, which shows in no digest of an installation that is edited in place.
FAILURE_SECONDS = 600.0

_SOURCE = ".cu"


class Failures:
    """The failures that a cache remembers. Its caller has seen to it that the cache's folder is there, and safe."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache / "failures"
        self._temporary = cache / "tmp"

    def remember(self, digest: bytes, fingerprint: str, error: CompileError) -> None:
        """Keeps an error for a while, and its source beside it, which `error.source_path` then names.

        Raises:
            OSError: it cannot be kept. Where there is no room for the source alone, `source_path` stays as it is.
        """
        # First: whatever is in the way of the two files is not a failure that is remembered.
        self.sweep()
        path = self._path(digest, fingerprint)
        details = {name: value for name, value in vars(error).items() if not name.startswith("__")}
        record = {"name": path.name, "time": time.time(), "message": str(error), "details": details}
        # Ahead of the source: others sweep sources that have no record.
        write(path, json.dumps(record, default=str).encode(), self._temporary)
        if error.source:
            source = path.with_suffix(_SOURCE)
            with contextlib.suppress(OSError):
                write(source, error.source.encode("utf-8", "backslashreplace"), self._temporary)
                error.source_path = str(source)

    def recall(self, digest: bytes, fingerprint: str) -> CompileError | None:
        """The error of this key with this fingerprint, as it was but for its message; None: compile it."""
        if not is_safe(self._folder, folder=True):
            return None
        path = self._path(digest, fingerprint)
        source = path.with_suffix(_SOURCE)
        record = _record(path)
        if record is None:
            for left in (path, source):
                with contextlib.suppress(OSError):
                    remove(left)
            return None
        age = time.time() - record["time"]
        # Not through the constructor: whatever it takes, what is restored is what was there.
        error = CompileError.__new__(
            CompileError,
            f"{record['message']}\n(remembered from {age:.0f} s ago; to try again before {FAILURE_SECONDS:.0f} s have "
            f"passed, remove {path})",
        )
        for name, value in record["details"].items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        if is_safe(source):
            error.source_path = str(source)
        return error

    def sweep(self, *, everything: bool = False) -> None:
        """Removes what is remembered no more, or everything, and whatever else is in the folder.

        Raises:
            OSError: something cannot be removed.
        """
        for path in inside(self._folder):
            record = path.with_suffix("") if path.suffix == _SOURCE else path
            if everything or not is_safe(path) or _record(record) is None:
                remove(path)

    def _path(self, digest: bytes, fingerprint: str) -> Path:
        # Paths in a fingerprint need not be valid Unicode.
        identity = hashlib.sha256(digest).digest() + fingerprint.encode("utf-8", "surrogatepass")
        return self._folder / hashlib.sha256(identity).hexdigest()


def _record(path: Path) -> dict[str, Any] | None:
    """Reads a record; None if it is none or has expired."""
    try:
        said = read_record(path)
        when, own = float(said["time"]), said["name"] == path.name
        record = {"time": when, "message": str(said["message"]), "details": dict(said["details"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # One from the future was written by a clock that was wrong: it would be remembered for who knows how long.
    return record if own and 0 <= time.time() - when < FAILURE_SECONDS else None
