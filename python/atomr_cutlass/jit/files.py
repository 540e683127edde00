"""The folder of the disk cache, and safe access to files that other users or processes may have made or replaced.

Besides the store's kernels the folder has small files of JSON:

failures/NAME: a source that recently failed to compile, so that processes that start together do not all spend seconds
on one broken source. failures/NAME.cu is the source, for inspection only: the package does not read it.

validations/NAME: the finding of an epilogue's validation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..errors import CacheError, CompileError, InvalidOperandError
from . import locks

FOLDER_VARIABLE = "ATOMR_CUTLASS_CACHE_DIR"
SUBFOLDERS = ("entries", "tmp", "locks", "failures", "validations", "quarantine")

# Long enough for processes that start together with one broken source; short enough after the correction of a header in
# an editable installation, where no digest changes.
FAILURE_SECONDS = 600.0
_REWRITE_SECONDS = 60.0  # patience with other writers of a file

_VERSION: Callable[[os.stat_result], tuple[int, int, int]] = attrgetter("st_ino", "st_size", "st_mtime_ns")
_SOURCE = ".cu"
_MOST_LETTERS = 1 << 14  # of a validation's finding
_NO_RECORD = (KeyError, RecursionError, TypeError, ValueError)
"""The errors of reading damaged JSON."""


def default_folder() -> Path:
    """ATOMR_CUTLASS_CACHE_DIR, else the platform's cache folder; CacheError if neither gives a folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise CacheError(f"{FOLDER_VARIABLE} is {named!r}: {error}") from error
    import platformdirs

    folder = platformdirs.user_cache_path("atomr_cutlass", appauthor=False)
    if folder.is_absolute():
        return folder
    # Relative without a home. A temporary folder that another user made first is not used.
    try:
        return temporary_folder()
    except FileNotFoundError as error:
        raise CacheError(
            f"there is no home and no folder for temporary files: {error.strerror}; name a folder in {FOLDER_VARIABLE}"
        ) from error


def temporary_folder() -> Path:
    """A folder of this user among the temporary files; FileNotFoundError if the system has none."""
    return Path(tempfile.gettempdir(), f"atomr_cutlass-{os.geteuid()}")


def is_there(folder: Path) -> bool:
    """Whether the folder exists, perhaps through a link; CacheError if it is unsafe or not accessible."""
    with failing(folder, "read"):
        try:
            status = folder.stat()
        except FileNotFoundError:
            return False
    _require_safe(folder, status)
    return True


def prepare(folder: Path) -> None:
    """Makes missing folders, of which the inner ones must not be links; CacheError if one is unsafe."""
    with failing(folder, "written"):
        # Each time: caches get deleted while programs run.
        if not is_there(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_there(folder)
        for below in (folder / name for name in SUBFOLDERS):
            with contextlib.suppress(FileExistsError):
                if not below.exists():
                    below.mkdir(mode=0o700)
            _require_safe(below, below.lstat())


@contextlib.contextmanager
def failing(folder: Path, action: str) -> Iterator[None]:
    """Turns an OSError of the block into a CacheError with a cure; `action`, such as "read", is for its text."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the kernel cache {folder} cannot be {action}: {error.strerror or error}; "
            f"mend that, or name another folder in {FOLDER_VARIABLE}"
        ) from error


def _require_safe(folder: Path, status: os.stat_result) -> None:
    reason = objection(status, folder=True)
    if reason:
        raise CacheError(
            f"{folder} {reason}, so no kernel is taken from it or put into it: chmod go-w it if it is yours and you "
            f"trust what is in it, or name another folder in {FOLDER_VARIABLE}"
        )


def objection(status: os.stat_result, *, folder: bool = False) -> str:
    """Why a file or folder with this status is not trusted; empty if it is."""
    if folder and not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if not folder and not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid}; this is uid {os.geteuid()})"
    if status.st_mode & 0o022:
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def is_safe(path: Path, *, folder: bool = False) -> bool:
    """Whether the file or folder exists and is trusted; links are not followed."""
    try:
        return not objection(path.lstat(), folder=folder)
    except OSError:
        return False


def version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when a file is replaced, written or touched; None for a missing file."""
    try:
        return _VERSION(path.lstat())
    except OSError:
        return None


def is_same(path: Path, status: os.stat_result) -> bool:
    """Whether the file still is the one of this status: a newer file is not to be removed in its place."""
    return version(path) == _VERSION(status)


def read(path: Path, most: int = -1) -> bytes:
    """The content of a file, or its first bytes; OSError for a link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read(most)


def touch(path: Path) -> None:
    """Sets a file's time to now, if possible: file systems update access times rarely and out of order."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now, now), follow_symlinks=False)


def write(path: Path, content: bytes, temporary: Path, *, mode: int = 0o600) -> None:
    """Writes a file atomically, through a temporary folder of the same file system.

    A link is replaced, not followed. A failed write leaves no file behind.
    """
    descriptor, name = tempfile.mkstemp(dir=temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save(path: Path, content: bytes) -> None:
    """Writes a user's file, as `write` does; InvalidOperandError if that fails."""
    try:
        write(path, content, path.absolute().parent, mode=0o644)
    except OSError as error:
        raise InvalidOperandError(f"cannot write {path}: {error.strerror or error}") from error


def rewrite(path: Path, made: Callable[[str], str], doing: str) -> None:
    """Replaces the text of a user's file of lines by `made(text)`, if different; locks out other writers.

    `doing` is for errors, such as "record kernels in".
    """
    try:
        with locks.hold(path.with_name(f"{path.name}.lock"), _REWRITE_SECONDS):
            present = path.read_text(encoding="utf-8") if path.exists() else ""
            text = made(present)
            if text != present or not path.exists():
                write(path, text.encode(), path.parent, mode=0o644)
    except OSError as error:
        raise InvalidOperandError(f"cannot {doing} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidOperandError(f"cannot {doing} {path}, which has something else: {error}") from error


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its content, unless another process already has."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remember_failure(cache: Path, digest: bytes, fingerprint: str, error: CompileError) -> None:
    """Keeps an error for a while, with its source as `error.source_path` if the disk has room."""
    path = _failure_path(cache, digest, fingerprint)
    details = {"log": error.log, "source": error.source, "options": error.options}
    record = {"name": path.name, "time": time.time(), "message": str(error), **details}
    # Before the source: other processes remove sources without a record.
    write(path, json.dumps(record).encode(), cache / "tmp")
    if error.source:
        source = path.with_suffix(_SOURCE)
        with contextlib.suppress(OSError):
            write(source, error.source.encode("utf-8", "backslashreplace"), cache / "tmp")
            error.source_path = str(source)


def refuse_failure(cache: Path, digest: bytes, fingerprint: str) -> None:
    """Raises the error that is remembered for this key and fingerprint, if any, with an adapted message."""
    path = _failure_path(cache, digest, fingerprint)
    if not is_safe(path.parent, folder=True):
        return
    error = _failure(path)
    if error is not None:
        raise error
    with contextlib.suppress(OSError):
        sweep_failures(cache)


def sweep_failures(cache: Path, *, everything: bool = False) -> None:
    """Removes expired failures, or all, and foreign files in their folder."""
    for path in (cache / "failures").glob("*"):
        record = path.with_suffix("") if path.suffix == _SOURCE else path
        if everything or not is_safe(path) or _failure(record) is None:
            remove(path)


def recall_validation(identity: str) -> str | None:
    """The finding of a validation: empty if the kernel was right, else the differences; None if not recorded."""
    try:
        folder = default_folder()
        if not is_there(folder):
            return None
        said = _read(folder / "validations" / _name(b"", identity))
        return str(said["wrong"]) if said["identity"] == identity else None
    except (CacheError, OSError, *_NO_RECORD):
        return None


def remember_validation(identity: str, wrong: str) -> None:
    """Stores the finding of a validation if the disk has room for it; if not, the next process validates again."""
    record = json.dumps({"identity": identity, "wrong": wrong[:_MOST_LETTERS]}).encode()
    with contextlib.suppress(OSError, CacheError):
        folder = default_folder()
        prepare(folder)
        write(folder / "validations" / _name(b"", identity), record, folder / "tmp")


def _failure_path(cache: Path, digest: bytes, fingerprint: str) -> Path:
    return cache / "failures" / _name(hashlib.sha256(digest).digest(), fingerprint)


def _name(start: bytes, text: str) -> str:
    # Paths in it need not be valid Unicode.
    return hashlib.sha256(start + text.encode("utf-8", "surrogatepass")).hexdigest()


def _failure(path: Path) -> CompileError | None:
    """Reads a failure; None if it is damaged or has expired."""
    source = path.with_suffix(_SOURCE)
    try:
        said = _read(path)
        age = time.time() - float(said["time"])
        # A time in the future is from a wrong clock: such a record might not expire for years.
        if said["name"] != path.name or not 0 <= age < FAILURE_SECONDS:
            return None
        return CompileError(
            f"{said['message']}\n(remembered from {age:.0f} s ago; to try again before {FAILURE_SECONDS:.0f} s have "
            f"passed, remove {path})",
            log=said["log"],
            source=said["source"],
            options=tuple(said["options"]),
            source_path=str(source) if is_safe(source) else None,
        )
    except (OSError, *_NO_RECORD):
        return None


def _read(path: Path) -> Any:
    """The JSON in a trusted file; otherwise OSError or one of _NO_RECORD."""
    if not is_safe(path):
        raise FileNotFoundError(path)
    return json.loads(read(path))
