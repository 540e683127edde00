"""The disk cache of compiled kernels: bytes in, bytes out.

docs/jit.md describes its folder. An entry is a kernel in a frame: magic, length of the header, header (JSON), kernel,
SHA-256 of all that. Its file's time is when it was last read.

Loading a kernel runs code, so folders and files that another user owns or could have written are not read. The cache
only saves time: without a usable one, `get` and `obtain` warn once and continue.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheError, CompileError
from . import files, locks
from .locks import LOCK_SECONDS

# A kernel is 50 KB to 2 MB.
MAX_BYTES = 1 << 30

_MAGIC = b"atomr_cutlass kernel 1\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = hashlib.sha256().digest_size

_QUARANTINED = 16
_STALE_SECONDS = 3600.0  # of temporary files
_SKEW_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """A kernel in the cache: the fields of its frame's header, its bytes on disk, its path."""

    digest: str
    info: dict[str, str | float | int]
    seconds: float
    made: float
    size: int
    path: Path


@dataclass(frozen=True)
class Damage:
    """A refused entry: its path, the reason, and its new path (None: it could not be moved)."""

    path: Path
    reason: str
    moved_to: Path | None


@dataclass(frozen=True)
class Pruning:
    """The entries that `prune` removed, and those that it left."""

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int


class KernelStore:
    """Compiled kernels on disk, shared by threads and processes of one user; nothing is touched before first use."""

    max_bytes = MAX_BYTES
    """The limit of its size; concurrent writers may exceed it for a moment."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or files.default_folder()).absolute()

    def get(self, digest: bytes) -> bytes | None:
        """The kernel of this key, or None; an entry that is damaged or unsafe counts as absent."""
        with self._optional("read"):
            if files.is_there(self.folder):
                files.prepare(self.folder)
                with contextlib.suppress(FileNotFoundError):
                    return self._read(self._path(digest), digest)
        return None

    def obtain(
        self,
        digest: bytes,
        make: Callable[[], bytes],
        info: Mapping[str, str | float | int],
        *,
        fingerprint: str = "",
    ) -> tuple[bytes, str]:
        """The kernel of this key, made if the cache lacks it, and its origin: "disk" or "compiled".

        Of all threads and processes that need one key, one makes the kernel and the others wait. A CompileError of
        `make` is raised again for ten minutes while `fingerprint` is the same: the conditions besides the key, such
        as the folders of headers. Listings show `info`.
        """
        kernel = self.get(digest)
        if kernel is not None:
            return kernel, "disk"
        with contextlib.ExitStack() as alone:
            # Keeps other threads and processes from making the same kernel, if locks are available.
            with self._optional("locked"):
                files.prepare(self.folder)
                alone.enter_context(locks.hold(self.folder / "locks" / _name(digest), LOCK_SECONDS))
            kernel = self.get(digest)
            if kernel is not None:
                return kernel, "disk"
            with contextlib.suppress(CacheError):
                if files.is_there(self.folder):
                    files.refuse_failure(self.folder, digest, fingerprint)
            start = time.perf_counter()
            try:
                kernel = make()
            except CompileError as error:
                with self._optional("written"):
                    files.prepare(self.folder)
                    files.remember_failure(self.folder, digest, fingerprint, error)
                raise
            self._publish(digest, kernel, info, time.perf_counter() - start)
        return kernel, "compiled"

    def entries(self) -> list[Entry]:
        """Every entry with a readable header, ordered by name. Checksums are checked by `verify` only."""
        found = []
        for path in self._paths():
            # It may be evicted meanwhile, and other files are not listed.
            with contextlib.suppress(OSError, ValueError):
                status = path.lstat()
                if not files.objection(status):
                    # Several times the size of a header.
                    header, _ = _header(files.read(path, 64 << 10))
                    found.append(Entry(**header, size=status.st_size, path=path))
        return sorted(found, key=lambda entry: (str(entry.info.get("name", "")), entry.digest))

    def verify(self, track: Callable[[list[Path]], Iterable[Path]] = iter) -> tuple[int, list[Damage]]:
        """Reads every entry: their number, and the damaged or unsafe ones, which are moved to the quarantine."""
        checked, damaged = 0, []
        for path in track(self._paths()):
            # It may be evicted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                try:
                    _kernel(path, status)
                except FileNotFoundError:
                    raise
                except (ValueError, OSError) as error:
                    damaged.append(Damage(path, str(error), self._quarantine(path, status)))
                checked += 1
        return checked, damaged

    def prune(
        self, *, max_bytes: int | None = None, older_than: float | None = None, everything: bool = False
    ) -> Pruning:
        """Removes entries, the least recently read first, and obsolete files.

        Obsolete are quarantined files, expired failures, free locks, and temporary files of dead writers. Safe while
        others use the cache. Entries not read for `older_than` seconds are removed in any case.
        """
        if not files.is_there(self.folder):
            return Pruning(0, 0, 0, 0)
        # Refuses links: their targets must not be pruned.
        files.prepare(self.folder)
        limit = self.max_bytes if max_bytes is None else max_bytes
        oldest = 0.0 if older_than is None else time.time() - older_than
        with files.failing(self.folder, "written"):
            pruning = self._evict(0 if everything else limit, oldest)
            self._tidy(everything=everything)
        return pruning

    def _read(self, path: Path, digest: bytes) -> bytes | None:
        status = path.lstat()
        try:
            kernel = _kernel(path, status, digest)
        except ValueError:  # also of a link or folder, which must not stay in the way
            self._quarantine(path, status)
            return None
        files.touch(path)
        return kernel

    def _publish(self, digest: bytes, kernel: bytes, info: Mapping[str, str | float | int], seconds: float) -> None:
        header = {"digest": digest.hex(), "info": dict(info), "seconds": round(seconds, 3), "made": time.time()}
        path = self._path(digest)
        with self._optional("written"):
            files.prepare(self.folder)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            files.write(path, _pack(header, kernel), self.folder / "tmp")
            files.touch(path)
            self._evict(self.max_bytes)

    def _path(self, digest: bytes) -> Path:
        name = _name(digest)
        return self.folder / "entries" / name[:2] / name[2:]

    def _paths(self) -> list[Path]:
        if not files.is_there(self.folder):
            return []
        with files.failing(self.folder, "read"):
            return [Path(folder, name) for folder, _, names in os.walk(self.folder / "entries") for name in names]

    def _evict(self, limit: int, oldest: float = 0.0) -> Pruning:
        """Removes the entries last read before `oldest`, and others until no more than `limit` bytes are left.

        Entries with times in the future are removed first: kept until last they could fill the cache for years, and
        each new entry would be evicted at once.
        """
        latest = time.time() + _SKEW_SECONDS
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found.append((0 if status.st_mtime > latest else status.st_mtime_ns, path, status))
        kept_bytes, removed = sum(status.st_size for *_, status in found), []
        for read, path, status in sorted(found, key=lambda item: item[0]):
            if (kept_bytes > limit or read < 1e9 * oldest) and files.is_same(path, status):
                files.remove(path)
                removed.append(status.st_size)
                kept_bytes -= status.st_size
        return Pruning(len(removed), sum(removed), len(found) - len(removed), kept_bytes)

    def _quarantine(self, path: Path, status: os.stat_result) -> Path | None:
        """Moves a damaged entry to the quarantine, unless it has been replaced since; its new path, or None."""
        folder = self.folder / "quarantine"
        target = folder / f"{path.parent.name[:2]}{path.name[:64]}.{time.time_ns()}"
        try:
            files.prepare(self.folder)
            if not files.is_same(path, status):
                return None
            path.rename(target)
        except (OSError, CacheError):
            return None
        # Other processes may be doing the same.
        with contextlib.suppress(OSError):
            latest_first = sorted(folder.iterdir(), key=lambda p: p.lstat().st_ctime_ns, reverse=True)
            for old in latest_first[_QUARANTINED:]:
                files.remove(old)
        return target

    def _tidy(self, *, everything: bool) -> None:
        for path in (self.folder / "quarantine").glob("*"):
            files.remove(path)
        files.sweep_failures(self.folder, everything=everything)
        for path in (self.folder / "validations").glob("*") if everything else ():
            files.remove(path)
        for path in (self.folder / "locks").glob("*"):
            if path.is_file() and not path.is_symlink():
                locks.remove(path)
            else:
                files.remove(path)
        for path in (self.folder / "tmp").glob("*"):
            # A younger one may be about to be renamed into place; one may have been renamed already.
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - path.lstat().st_mtime) > _STALE_SECONDS:
                    files.remove(path)

    @contextlib.contextmanager
    def _optional(self, action: str) -> Iterator[None]:
        """Turns a failure of the block, in which the cache is `action`, into a warning, and continues after it."""
        try:
            with files.failing(self.folder, action):
                yield
        except CacheError as error:
            # One warning suffices: further failures (first of locking, then of writing) have the same cause.
            if self.folder not in _warned:
                _warned.add(self.folder)
                warnings.warn(f"going on without a kernel cache: {error}", RuntimeWarning, stacklevel=5)


_warned: set[Path] = set()


def _name(digest: bytes) -> str:
    return hashlib.sha256(digest).hexdigest()


def _kernel(path: Path, status: os.stat_result, digest: bytes | None = None) -> bytes:
    """The kernel in a file of this status; ValueError with the reason if it is refused."""
    objection = files.objection(status)
    if objection:
        raise ValueError(objection)
    return _unpack(files.read(path), digest)


def _pack(header: Mapping[str, Any], kernel: bytes) -> bytes:
    text = json.dumps(header).encode()
    content = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, kernel))
    return content + hashlib.sha256(content).digest()


def _unpack(frame: bytes, digest: bytes | None = None) -> bytes:
    """The kernel in a frame, checked against the key if given; ValueError names the damage."""
    view = memoryview(frame)
    # First, so that the rest is known to be undamaged.
    if frame.startswith(_MAGIC) and hashlib.sha256(view[:-_CHECKSUM_BYTES]).digest() != view[-_CHECKSUM_BYTES:]:
        raise ValueError("does not match its checksum")
    header, start = _header(frame)
    if digest is not None and header["digest"] != digest.hex():
        raise ValueError("is the entry of another key")
    return bytes(view[start:-_CHECKSUM_BYTES])


def _header(frame: bytes) -> tuple[dict[str, Any], int]:
    """The unchecked header of a frame, given at least its beginning, and the offset of the kernel."""
    if not frame.startswith(_MAGIC):
        raise ValueError("is no entry of this version of the cache")
    start = len(_MAGIC) + _LENGTH.size
    try:
        end = start + _LENGTH.unpack_from(frame, len(_MAGIC))[0]
        said = json.loads(frame[start:end])
        kinds = {"digest": str, "info": dict, "seconds": float, "made": float}
        header = {name: kind(said[name]) for name, kind in kinds.items()}
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("has a header that cannot be read") from error
    return header, end
