"""The folder of the disk cache, and files that others may have planted and that other processes replace meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CacheError

FOLDER_VARIABLE = "ATOMR_CUTLASS_CACHE_DIR"
SUBFOLDERS = ("entries", "tmp", "locks", "failures", "validations", "quarantine")


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


def is_same(path: Path, status: os.stat_result) -> bool:
    """Whether the file is still the one that was looked at. What replaces it since is better than what was there."""
    try:
        now = path.lstat()
    except OSError:
        return False
    return (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)


def inside(folder: Path) -> list[Path]:
    """The contents of a folder; empty if there is none."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def read_quietly(path: Path, most: int = -1) -> bytes:
    """The file, or so many bytes of its beginning, without making it look used; OSError if it is a link."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        # Some file systems do not know it.
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


def touch(path: Path, status: os.stat_result) -> None:
    """Makes a file, seen as `status`, the one that was read last. File systems of their own accord seldom note it."""
    if is_same(path, status):
        with contextlib.suppress(OSError):  # somebody else's, or of a folder that is read-only
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns), follow_symlinks=False)


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


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with what is in it; somebody else may have done so already."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
