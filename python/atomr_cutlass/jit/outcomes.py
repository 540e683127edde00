"""What the disk cache remembers besides kernels, each in a small file of JSON that is named for what it is about.

failures/NAME: a source that lately did not compile. Compiling takes seconds, and processes that start together would
all meet one broken source. failures/NAME.cu, the source, is only for a look at it: nothing here reads it.

validations/NAME: the finding of an epilogue's validation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from ..errors import CacheError, CompileError
from .files import default_folder, inside, is_safe, is_there, prepare, read_quietly, remove, write

# Long enough for the processes that start together and meet one broken source; short enough for who has mended a
# header, which shows in no digest of an installation that is edited in place.
FAILURE_SECONDS = 600.0

_SOURCE = ".cu"
_MOST_BYTES = 1 << 16  # of a validation


class Failures:
    """The failures that a cache remembers. Its caller has seen to it that the cache's folder is there, and safe."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache / "failures"
        self._temporary = cache / "tmp"

    def remember(self, digest: bytes, fingerprint: str, error: CompileError) -> None:
        """Keeps an error for a while, and its source beside it, which `error.source_path` then names if it has room."""
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

    def check(self, digest: bytes, fingerprint: str) -> None:
        """Raises the error of this key with this fingerprint, as it was but for its message, if one is remembered."""
        if not is_safe(self._folder, folder=True):
            return
        path = self._path(digest, fingerprint)
        source = path.with_suffix(_SOURCE)
        record = _failure(path)
        if record is None:
            for left in (path, source):
                with contextlib.suppress(OSError):
                    remove(left)
            return
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
        raise error

    def sweep(self, *, everything: bool = False) -> None:
        """Removes what is remembered no more, or everything, and whatever else is in the folder."""
        for path in inside(self._folder):
            record = path.with_suffix("") if path.suffix == _SOURCE else path
            if everything or not is_safe(path) or _failure(record) is None:
                remove(path)

    def _path(self, digest: bytes, fingerprint: str) -> Path:
        return self._folder / _name(hashlib.sha256(digest).digest(), fingerprint)


def recall_validation(identity: str) -> str | None:
    """The finding of a validation: empty if the kernel was right, else the differences; None if nothing is known."""
    try:
        folder = default_folder()
        if not is_there(folder):
            return None
        said = _read(folder / "validations" / _name(b"", identity), _MOST_BYTES)
        return str(said["wrong"]) if said["identity"] == identity else None
    except (CacheError, OSError, ValueError, KeyError):
        return None


def remember_validation(identity: str, wrong: str) -> None:
    """Stores the finding of a validation if the disk has room for it; if not, the next process validates again."""
    record = json.dumps({"identity": identity, "wrong": wrong[: _MOST_BYTES // 4]}).encode()
    with contextlib.suppress(OSError, CacheError):
        folder = default_folder()
        prepare(folder)
        write(folder / "validations" / _name(b"", identity), record, folder / "tmp")


def _name(start: bytes, text: str) -> str:
    # Paths in it need not be valid Unicode.
    return hashlib.sha256(start + text.encode("utf-8", "surrogatepass")).hexdigest()


def _failure(path: Path) -> dict[str, Any] | None:
    """Reads a failure; None if it is none or has expired."""
    try:
        said = _read(path)
        when, own = float(said["time"]), said["name"] == path.name
        record = {"time": when, "message": str(said["message"]), "details": dict(said["details"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # One from the future was written by a clock that was wrong: it would be remembered for who knows how long.
    return record if own and 0 <= time.time() - when < FAILURE_SECONDS else None


def _read(path: Path, most: int = -1) -> dict[str, Any]:
    """The JSON object in a file that is safe to read; OSError or ValueError where there is none."""
    if not is_safe(path):
        raise FileNotFoundError(path)
    try:
        record = json.loads(read_quietly(path, most))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} is no object")  # noqa: TRY004 - its content is
    return record
