"""The folder of the disk cache: where it is, how it is made, and whether it may be used."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import CacheError
from .files import objection

FOLDER_VARIABLE = "ATOMR_CUTLASS_CACHE_DIR"
SUBFOLDERS = ("entries", "tmp", "locks", "failures", "validations", "quarantine")


def default_folder() -> Path:
    """ATOMR_CUTLASS_CACHE_DIR, else the platform's cache folder.

    Raises:
        CacheError: the variable speaks of the home of a user that there is not, or there is neither a home nor a folder
            for temporary files.
    """
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
        return Path(tempfile.gettempdir(), f"atomr_cutlass-{os.geteuid()}")
    except FileNotFoundError as error:
        raise CacheError(
            f"there is no home and no folder for temporary files: {error.strerror}; name a folder in {FOLDER_VARIABLE}"
        ) from error


def is_there(folder: Path) -> bool:
    """Whether there is a folder, which may be a link to one.

    Raises:
        CacheError: it is unsafe, or cannot be looked at.
    """
    with failing(folder, "read"):
        try:
            status = folder.stat()
        except FileNotFoundError:
            return False
    _require_safe(folder, status)
    return True


def prepare(folder: Path) -> None:
    """Makes the folder and those in it where they are missing.

    Raises:
        CacheError: one of them cannot be made, or is unsafe; the latter ones may not be links.
    """
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
    """Turns an OSError into a CacheError with a cure.

    Args:
        folder: the cache's.
        action: how the block uses it: "read", "written", "locked".

    Raises:
        CacheError: an OSError within.
    """
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
