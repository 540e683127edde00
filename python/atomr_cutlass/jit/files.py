"""The folder of the disk cache, and files that others may have planted and that other processes replace meanwhile.

Besides the store's kernels there are small ones of JSON, each named for what it is about:

failures/NAME: a source that lately did not compile. Compiling takes seconds, and processes that start together would
all meet one broken source. failures/NAME.cu, the source, is only for a look at it: nothing here reads it.

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

# Long enough for the processes that start together and meet one broken source; short enough for who has mended a
# header, which shows in no digest of an installation that is edited in place.
FAILURE_SECONDS = 600.0
_REWRITE_SECONDS = 60.0  # that who writes to the same file may take

_VERSION: Callable[[os.stat_result], tuple[int, int, int]] = attrgetter("st_ino", "st_size", "st_mtime_ns")
_SOURCE = ".cu"
_MOST_LETTERS = 1 << 14  # of the finding of a validation
_NO_RECORD = (KeyError, RecursionError, TypeError, ValueError)
"""The errors for JSON that is not as it was written."""


def default_folder() -> Path:
    """ATOMR_CUTLASS_CACHE_DIR, else the platform's cache folder; CacheError where neither says one."""
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
    # Relative where there is no home. Among the temporary files others may have made it first, and then it is not used.
    try:
        return temporary_folder()
    except FileNotFoundError as error:
        raise CacheError(
            f"there is no home and no folder for temporary files: {error.strerror}; name a folder in {FOLDER_VARIABLE}"
        ) from error


def temporary_folder() -> Path:
    """A folder of this user among the temporary files; FileNotFoundError where there is no place for them."""
    return Path(tempfile.gettempdir(), f"atomr_cutlass-{os.geteuid()}")


def is_there(folder: Path) -> bool:
    """Whether there is a folder, which may be a link to one; CacheError if it is unsafe or cannot be looked at."""
    with failing(folder, "read"):
        try:
            status = folder.stat()
        except FileNotFoundError:
            return False
    _require_safe(folder, status)
    return True


def prepare(folder: Path) -> None:
    """Makes the folder and those in it, which may not be links, where they are missing; CacheError if one is unsafe."""
    with failing(folder, "written"):
        # Each time, for caches get deleted under running programs.
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
    """Turns an OSError of a block, by which the folder is `action`, such as "read", into a CacheError with a cure."""
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
    """Why nothing is taken from a file, or folder, like this; empty: no reason."""
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
    """Whether there is such a file, or folder, and no objection to it; links are not followed."""
    try:
        return not objection(path.lstat(), folder=folder)
    except OSError:
        return False


def version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when a file is replaced, written or dated; None if there is none."""
    try:
        return _VERSION(path.lstat())
    except OSError:
        return None


def is_same(path: Path, status: os.stat_result) -> bool:
    """Whether the file is still the one that was looked at. What replaces it since is better than what was there."""
    return version(path) == _VERSION(status)


def read(path: Path, most: int = -1) -> bytes:
    """The file, or so many bytes of its beginning; OSError if it is a link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read(most)


def touch(path: Path) -> None:
    """Dates a file by now, if that can be. File systems note seldom, and not in order, when files were read."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now, now), follow_symlinks=False)


def write(path: Path, content: bytes, temporary: Path, *, mode: int = 0o600) -> None:
    """Writes a file of which readers see all or nothing, by way of a temporary folder of the same file system.

    A link is replaced, not followed. Nothing is left of what cannot be written.
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
    """Writes a user's file, as `write` does; InvalidOperandError where that cannot be."""
    try:
        write(path, content, path.absolute().parent, mode=0o644)
    except OSError as error:
        raise InvalidOperandError(f"cannot write {path}: {error.strerror or error}") from error


def rewrite(path: Path, made: Callable[[str], str], doing: str) -> None:
    """Replaces a user's file of lines by the text that is made of it, if that differs, while no other process does.

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
    """Removes a file, a link or a folder with what is in it; somebody else may have done so already."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remember_failure(cache: Path, digest: bytes, fingerprint: str, error: CompileError) -> None:
    """Keeps an error for a while, and its source beside it, which `error.source_path` then names if it has room."""
    path = _failure_path(cache, digest, fingerprint)
    details = {"log": error.log, "source": error.source, "options": error.options}
    record = {"name": path.name, "time": time.time(), "message": str(error), **details}
    # Ahead of the source: others sweep sources that have no record.
    write(path, json.dumps(record).encode(), cache / "tmp")
    if error.source:
        source = path.with_suffix(_SOURCE)
        with contextlib.suppress(OSError):
            write(source, error.source.encode("utf-8", "backslashreplace"), cache / "tmp")
            error.source_path = str(source)


def refuse_failure(cache: Path, digest: bytes, fingerprint: str) -> None:
    """Raises the error of this key with this fingerprint, as it was but for its message, if one is remembered."""
    path = _failure_path(cache, digest, fingerprint)
    if not is_safe(path.parent, folder=True):
        return
    error = _failure(path)
    if error is not None:
        raise error
    with contextlib.suppress(OSError):
        sweep_failures(cache)


def sweep_failures(cache: Path, *, everything: bool = False) -> None:
    """Removes the failures that are remembered no more, or all, and whatever else is in their folder."""
    for path in (cache / "failures").glob("*"):
        record = path.with_suffix("") if path.suffix == _SOURCE else path
        if everything or not is_safe(path) or _failure(record) is None:
            remove(path)


def recall_validation(identity: str) -> str | None:
    """The finding of a validation: empty if the kernel was right, else the differences; None if nothing is known."""
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
    """Reads a failure; None if it is none or has expired."""
    source = path.with_suffix(_SOURCE)
    try:
        said = _read(path)
        age = time.time() - float(said["time"])
        # One from the future was written by a clock that was wrong: it would be remembered for who knows how long.
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
    """The JSON in a file that is safe to read; OSError or one of _NO_RECORD where there is none."""
    if not is_safe(path):
        raise FileNotFoundError(path)
    return json.loads(read(path))
