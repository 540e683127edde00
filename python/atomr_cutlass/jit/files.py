"""Files that other users may have planted and that other processes replace and remove meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path


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
    """The file, which is not to look used because it was listed or checked; at most so many bytes of its beginning.

    Raises:
        OSError: it cannot be read, or is a link.
    """
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
    """Writes a file of which readers see all or nothing. A link is replaced, not followed.

    Args:
        path: the file.
        content: its new content.
        temporary: a folder of the same file system.
        mode: the file's permissions.

    Raises:
        OSError: it cannot be written; then nothing is left of it.
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
    """Removes a file, a link or a folder with what is in it; somebody else may have done so already.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
