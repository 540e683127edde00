"""The validation cache: the findings of epilogue validations, a small file for each in the folder validations/."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from ..errors import CacheError
from .files import default_folder, is_there, prepare, read_record, write

_MOST_BYTES = 1 << 16


def recall(identity: str) -> str | None:
    """The cached finding: empty if the kernel was right, else the differences; None if nothing is known."""
    try:
        folder = default_folder()
        if not is_there(folder):
            return None
        said = read_record(_path(folder, identity), _MOST_BYTES)
        return str(said["wrong"]) if said["identity"] == identity else None
    except (CacheError, OSError, ValueError, KeyError):
        return None


def remember(identity: str, wrong: str) -> None:
    """Stores the finding of a validation if the disk has room for it; if not, the next process validates again."""
    record = json.dumps({"identity": identity, "wrong": wrong[: _MOST_BYTES // 4]}).encode()
    with contextlib.suppress(OSError, CacheError):
        folder = default_folder()
        prepare(folder)
        write(_path(folder, identity), record, folder / "tmp")


def _path(folder: Path, identity: str) -> Path:
    import hashlib  # loads OpenSSL, which importing the package need not

    return folder / "validations" / hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
