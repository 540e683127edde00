"""The disk cache of compiled kernels: bytes in, bytes out.

What lies in its folder (ATOMR_CUTLASS_CACHE_DIR, else the platform's cache folder):

    entries/, tmp/   kernels, each in a frame with a checksum; cuda-core's FileStreamProgramCache writes and evicts them
    locks/           a file for each kernel that is being compiled
    failures/        sources that lately did not compile, with the compiler's log
    quarantine/      the latest damaged entries, for a look at what happened to them

Loading a kernel runs it, so nothing is taken from a folder or file that another user owns or could have written. A
cache only saves time: where there is none to be had, `get` and `obtain` warn once and go on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheError, CompileError, DeviceUnavailableError, InvalidOperandError

FOLDER_VARIABLE = "ATOMR_CUTLASS_CACHE_DIR"

# A kernel is 50 KB to 2 MB.
MAX_BYTES = 1 << 30

# Long enough for the processes that start together and meet one broken source; short enough for who has mended a
# header, which shows in no digest of an installation that is edited in place.
FAILURE_SECONDS = 600.0

# Many times what a compile takes. Only a holder that has been stopped, or hangs, is ever waited for that long.
LOCK_SECONDS = 300.0

_QUARANTINED = 16
_STALE_SECONDS = 3600.0  # of temporary files: cuda-core's own limit
_SKEW_SECONDS = 3600.0
_SUBFOLDERS = ("entries", "tmp", "locks", "failures", "quarantine")

Track = Callable[[list[Path]], Iterable[Path]]
"""Shows how far a loop has come: what it runs over -> the same."""


@dataclass(frozen=True)
class Entry:
    """A kernel in the cache.

    Attributes:
        digest: its key, in hexadecimal digits.
        info: what `obtain` was told of it.
        seconds: how long it took to compile.
        made: when, as seconds of the epoch.
        read: when it was read last; the entry that has not been read for longest is evicted first.
        size: bytes on disk.
        path: where it lies.
    """

    digest: str
    info: dict[str, str | float | int]
    seconds: float
    made: float
    read: float
    size: int
    path: Path


@dataclass(frozen=True)
class Damage:
    """An entry that is not used: where it lay, why, and where it lies now (None: it could not be moved)."""

    path: Path
    reason: str
    moved_to: Path | None


@dataclass(frozen=True)
class Verification:
    """How many entries were checked, and those of them that are damaged."""

    checked: int
    damaged: tuple[Damage, ...]


@dataclass(frozen=True)
class Pruning:
    """What `prune` removed, and what it left."""

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int


class KernelStore:
    """Compiled kernels on disk, shared by the threads and processes of one user.

    Nothing is created or touched before the first use. Safe to use from several threads, and after a fork.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        """Chooses the folder.

        Args:
            folder: where to keep the kernels; None: ATOMR_CUTLASS_CACHE_DIR, else the platform's cache folder.
            max_bytes: the entries that have not been read for longest go when there is more than this. Writers that
                run side by side may exceed it for a moment.

        Raises:
            InvalidOperandError: `max_bytes` is not positive.
        """
        if max_bytes <= 0:
            raise InvalidOperandError(f"max_bytes is {max_bytes}; expected a positive number of bytes")
        self.folder = (folder or _default_folder()).absolute()
        self.max_bytes = max_bytes
        # The process that opened it, and cuda-core's cache.
        self._opened: tuple[int, Any] | None = None

    def get(self, digest: bytes) -> bytes | None:
        """The kernel of this key, or None; an entry that is damaged or unsafe counts as absent.

        Raises:
            DeviceUnavailableError: cuda-core cannot be imported.
        """
        try:
            return self._read(digest)
        except CacheError as error:
            self._warn(error)
            return None

    def obtain(
        self, digest: bytes, make: Callable[[], bytes], info: Mapping[str, str | float | int]
    ) -> tuple[bytes, str]:
        """The kernel of this key, which is made if the cache lacks it.

        Of all the threads and processes that want one key, one makes it and the others wait for it. Want of a cache
        (read-only, full, unsafe) is no error: `make` is called and its result is returned.

        Args:
            digest: the key.
            make: compiles the kernel.
            info: what listings show of the entry: name, target, ...

        Returns:
            The kernel, and "disk" or "compiled".

        Raises:
            CompileError: `make` raised it, now or within the last ten minutes; in that case with the attributes (the
                log, the source) that it had then.
            DeviceUnavailableError: cuda-core cannot be imported.
        """
        # Ahead of a compile whose result could not be kept.
        _program_cache()
        kernel = self.get(digest)
        if kernel is not None:
            return kernel, "disk"
        with self._alone(digest):
            kernel = self.get(digest)
            if kernel is not None:
                return kernel, "disk"
            failure = self._remembered(digest)
            if failure is not None:
                raise failure
            start = time.perf_counter()
            try:
                kernel = make()
            except CompileError as error:
                self._remember(digest, error)
                raise
            self._publish(digest, kernel, info, time.perf_counter() - start)
        return kernel, "compiled"

    def entries(self) -> list[Entry]:
        """Every entry whose header can be read, in the order of their names. Checksums are `verify`'s business.

        Raises:
            CacheError: the folder is unsafe or cannot be read.
        """
        found = []
        for path in self._paths():
            # It may be evicted meanwhile, and what is no entry is not listed.
            with contextlib.suppress(OSError, _DamagedError):
                found.append(_entry(path))
        return sorted(found, key=lambda entry: (str(entry.info.get("name", "")), entry.digest))

    def verify(self, track: Track = iter) -> Verification:
        """Reads every entry whole and moves those that are damaged or unsafe to the quarantine.

        Args:
            track: shows how far it has come.

        Raises:
            CacheError: the folder is unsafe or cannot be read.
        """
        checked, damaged = 0, []
        for path in track(self._paths()):
            # It may be evicted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                reason = _objection(status) or _damage(path)
                checked += 1
                if reason:
                    damaged.append(Damage(path, reason, self._quarantine(path, status)))
        return Verification(checked, tuple(damaged))

    def prune(
        self, *, max_bytes: int | None = None, older_than: float | None = None, everything: bool = False
    ) -> Pruning:
        """Removes entries, those that have not been read for longest first, and whatever is of no use any more.

        That is: what is in quarantine, failures that are remembered no more, locks that nobody holds, and what writers
        left that died. Safe while others use the cache.

        Args:
            max_bytes: how much may stay; None: the store's own limit.
            older_than: entries that have not been read for this many seconds go.
            everything: every entry goes, and every remembered failure.

        Raises:
            CacheError: the folder is unsafe or cannot be read or written.
        """
        if not self._is_there():
            return Pruning(0, 0, 0, 0)
        # Refuses links: what they lead to is not to be pruned.
        self._prepare()
        self._forget_future_reads()
        limit = self.max_bytes if max_bytes is None else max_bytes
        now = time.time()
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found.append((path, status))
        found.sort(key=lambda item: item[1].st_atime)
        kept, kept_bytes = len(found), sum(status.st_size for _, status in found)
        removed = removed_bytes = 0
        with self._failing("written"):
            for path, status in found:
                too_old = older_than is not None and now - status.st_atime > older_than
                if (everything or too_old or kept_bytes > limit) and _same(path, status):
                    _remove(path)
                    removed, removed_bytes = removed + 1, removed_bytes + status.st_size
                    kept, kept_bytes = kept - 1, kept_bytes - status.st_size
            self._tidy(everything=everything)
        return Pruning(removed, removed_bytes, kept, kept_bytes)

    # ------------------------------------------------------------------------------------------------------------------
    # Entries
    # ------------------------------------------------------------------------------------------------------------------

    def _read(self, digest: bytes) -> bytes | None:
        if not self._is_there():
            return None
        path = self._path(digest)
        with self._failing("read"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                status = None
            if status is not None and not stat.S_ISREG(status.st_mode):
                # A link, a pipe, a folder: reading could end up elsewhere or never, and it is in the way of writing.
                self._quarantine(path, status)
                return None
            if status is not None and _objection(status):
                return None
            frame = self._cache().get(digest)
        if frame is None:
            return None
        try:
            return _unframe(frame, digest)
        except _DamagedError:
            if status is not None:
                self._quarantine(path, status)
            return None

    def _publish(self, digest: bytes, kernel: bytes, info: Mapping[str, str | float | int], seconds: float) -> None:
        header = {"digest": digest.hex(), "made": time.time(), "seconds": round(seconds, 3), "info": dict(info)}
        frame = _frame(header, kernel)
        try:
            self._prepare()
            self._forget_future_reads()
            with self._failing("written"):
                self._cache()[digest] = frame
            _close_to_others(self.folder / "entries")
        except CacheError as error:
            self._warn(error)

    def _path(self, digest: bytes) -> Path:
        # As cuda-core lays it out. Should that change, entries are still found, by cuda-core, and still checked against
        # their checksum and key; only the look at the file's owner and permissions would miss. A test tells.
        name = _name(digest)
        return self.folder / "entries" / name[:2] / name[2:]

    def _paths(self) -> list[Path]:
        if not self._is_there():
            return []
        with self._failing("read"):
            return [Path(folder, name) for folder, _, names in os.walk(self.folder / "entries") for name in names]

    def _forget_future_reads(self) -> None:
        """Makes entries that were read when the clock was ahead the first to go.

        As the last to go they could fill the cache for years, and each new entry would be evicted at once.
        """
        latest = time.time() + _SKEW_SECONDS
        for path in self._paths():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_atime > latest:
                    os.utime(path, ns=(0, status.st_mtime_ns), follow_symlinks=False)

    def _cache(self) -> Any:
        opened = self._opened
        # A forked child has its own: a thread of the parent may have held the lock within the parent's.
        if opened is None or opened[0] != os.getpid():
            # Before cuda-core does, which would leave the permissions to the umask.
            self._prepare()
            cache = _program_cache()(self.folder, max_size_bytes=self.max_bytes)
            opened = self._opened = (os.getpid(), cache)
        return opened[1]

    def _quarantine(self, path: Path, status: os.stat_result) -> Path | None:
        """Moves what is damaged out of the way, unless somebody has replaced it since; where to, or None."""
        folder = self.folder / "quarantine"
        target = folder / f"{path.parent.name[:2]}{path.name[:64]}.{time.time_ns()}"
        try:
            self._prepare()
            if not _same(path, status):
                return None
            path.rename(target)
        except (OSError, CacheError):
            return None
        # Others may be doing the same.
        with contextlib.suppress(OSError):
            latest_first = sorted(folder.iterdir(), key=lambda p: p.lstat().st_ctime_ns, reverse=True)
            for old in latest_first[_QUARANTINED:]:
                _remove(old)
        return target

    def _tidy(self, *, everything: bool) -> None:
        for path in _files(self.folder / "quarantine"):
            _remove(path)
        for path in _files(self.folder / "failures"):
            if everything or _failure(path) is None:
                _remove(path)
        for path in _files(self.folder / "locks"):
            if path.is_file() and not path.is_symlink():
                _remove_lock(path)
            else:
                _remove(path)
        for path in _files(self.folder / "tmp"):
            # A younger one may be about to be renamed into its place, as may one that is gone by now.
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - path.lstat().st_mtime) > _STALE_SECONDS:
                    _remove(path)

    # ------------------------------------------------------------------------------------------------------------------
    # Failures
    # ------------------------------------------------------------------------------------------------------------------

    def _remember(self, digest: bytes, error: CompileError) -> None:
        details = {name: value for name, value in vars(error).items() if not name.startswith("__")}
        record = {"digest": digest.hex(), "time": time.time(), "message": str(error), "details": details}
        text = json.dumps(record, default=str)
        folder = self.folder / "failures"
        try:
            self._prepare()
            with self._failing("written"):
                _write(folder / _name(digest), text, self.folder / "tmp")
                for path in _files(folder):
                    if _failure(path) is None:
                        _remove(path)
        except CacheError as problem:
            self._warn(problem)

    def _remembered(self, digest: bytes) -> CompileError | None:
        path = self.folder / "failures" / _name(digest)
        try:
            record = _failure(path) if self._is_there() else None
        except CacheError:
            return None
        if record is None or record["digest"] != digest.hex():
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
        return error

    # ------------------------------------------------------------------------------------------------------------------
    # The folder
    # ------------------------------------------------------------------------------------------------------------------

    def _is_there(self) -> bool:
        """Whether there is a folder.

        Raises:
            CacheError: it is unsafe, or cannot be looked at.
        """
        with self._failing("read"):
            try:
                status = self.folder.stat()
            except FileNotFoundError:
                return False
        _require_safe(self.folder, status)
        return True

    def _prepare(self) -> None:
        """Makes the folder and those in it where they are missing.

        Raises:
            CacheError: one of them cannot be made, or is unsafe.
        """
        with self._failing("written"):
            # Each time, for caches get deleted under running programs.
            if not self._is_there():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._is_there()
            for name in _SUBFOLDERS:
                folder = self.folder / name
                with contextlib.suppress(FileExistsError):
                    if not folder.exists():
                        folder.mkdir(mode=0o700)
                _require_safe(folder, folder.lstat())

    @contextlib.contextmanager
    def _alone(self, digest: bytes) -> Iterator[None]:
        """Keeps other threads and processes from making the same kernel; where that cannot be, warns and goes on."""
        with contextlib.ExitStack() as stack:
            try:
                self._prepare()
                with self._failing("locked"):
                    stack.enter_context(_locked(self.folder / "locks" / _name(digest), LOCK_SECONDS))
            except CacheError as error:
                self._warn(error)
            yield

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"the kernel cache {self.folder} cannot be {what}: {error.strerror or error}; "
                f"mend that, or name another folder in {FOLDER_VARIABLE}"
            ) from error

    def _warn(self, error: CacheError) -> None:
        # Of what follows from the same cause (first it cannot be locked, then it cannot be written), one is enough.
        if self.folder not in _warned:
            _warned.add(self.folder)
            warnings.warn(f"going on without a kernel cache: {error}", RuntimeWarning, stacklevel=4)


_warned: set[Path] = set()


def _default_folder() -> Path:
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser()
    import platformdirs

    folder = platformdirs.user_cache_path("atomr_cutlass", appauthor=False)
    # Relative where there is no home. Among the temporary files others may have made it first, and then it is not used.
    return folder if folder.is_absolute() else Path(tempfile.gettempdir(), f"atomr_cutlass-{os.geteuid()}")


def _program_cache() -> Any:
    """cuda-core's class.

    Raises:
        DeviceUnavailableError: it cannot be imported.
    """
    try:
        return importlib.import_module("cuda.core.utils").FileStreamProgramCache
    # It imports bindings of the CUDA that its extra names, which fail in more ways than ImportError.
    except Exception as error:
        raise DeviceUnavailableError(
            f"compiling kernels needs cuda-core 1.2 or later with its CUDA extra, and importing it says: {error}; "
            "pip install 'atomr-cutlass[cu13]' (or [cu12], for a driver of CUDA 12)"
        ) from error


def _name(digest: bytes) -> str:
    return hashlib.sha256(digest).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Frames: magic, length of the header, header (JSON), kernel, SHA-256 of all that
# ----------------------------------------------------------------------------------------------------------------------

_MAGIC = b"atomr_cutlass kernel 1\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class _DamagedError(Exception):
    """A file is no entry, or no longer one; says why."""


def _frame(header: dict[str, Any], kernel: bytes) -> bytes:
    text = json.dumps(header).encode()
    content = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, kernel))
    return content + hashlib.sha256(content).digest()


def _unframe(frame: bytes, digest: bytes | None = None) -> bytes:
    """The kernel in a frame; given a key, of that key only.

    Raises:
        _DamagedError: the frame is not as it was written.
    """
    view = memoryview(frame)
    if not frame.startswith(_MAGIC):
        raise _DamagedError("is no entry of this version of the cache")
    # First, so that what is read from here on is what was written.
    if hashlib.sha256(view[:-_CHECKSUM_BYTES]).digest() != view[-_CHECKSUM_BYTES:]:
        raise _DamagedError("does not match its checksum")
    header, start = _header(frame)
    if digest is not None and header["digest"] != digest.hex():
        raise _DamagedError("is the entry of another key")
    return bytes(view[start:-_CHECKSUM_BYTES])


def _header(frame: bytes) -> tuple[dict[str, Any], int]:
    """The header of a frame, or of its beginning, and where the kernel begins."""
    start = len(_MAGIC) + _LENGTH.size
    try:
        end = start + _LENGTH.unpack_from(frame, len(_MAGIC))[0]
        header = json.loads(frame[start:end])
        # The types that every header has.
        header["digest"], header["info"] = str(header["digest"]), dict(header["info"])
        header["made"], header["seconds"] = float(header["made"]), float(header["seconds"])
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError("has a header that cannot be read") from error
    return header, end


def _entry(path: Path) -> Entry:
    status = path.lstat()
    reason = _objection(status)
    if reason:
        raise _DamagedError(reason)
    # Several times what a key with its names takes.
    beginning = _read_quietly(path, 64 << 10)
    if not beginning.startswith(_MAGIC):
        raise _DamagedError("is no entry of this version of the cache")
    header, _ = _header(beginning)
    return Entry(
        digest=header["digest"],
        info=header["info"],
        seconds=header["seconds"],
        made=header["made"],
        read=status.st_atime,
        size=status.st_size,
        path=path,
    )


def _damage(path: Path) -> str:
    """What is wrong with an entry; empty: nothing."""
    try:
        _unframe(_read_quietly(path))
    except _DamagedError as error:
        return str(error)
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------


def _objection(status: os.stat_result) -> str:
    """Why nothing is taken from a file or folder like this; empty: no reason."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is neither a file nor a folder"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid}; this is uid {os.geteuid()})"
    if status.st_mode & 0o022:
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _require_safe(folder: Path, status: os.stat_result) -> None:
    reason = _objection(status) if stat.S_ISDIR(status.st_mode) else "is no folder"
    if reason:
        raise CacheError(
            f"{folder} {reason}, so no kernel is taken from it or put into it: chmod go-w it if it is yours and you "
            f"trust what is in it, or name another folder in {FOLDER_VARIABLE}"
        )


def _same(path: Path, status: os.stat_result) -> bool:
    """Whether the file is still the one that was looked at. What replaces it since is better than what was there."""
    try:
        now = path.lstat()
    except OSError:
        return False
    return (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)


def _close_to_others(folder: Path) -> None:
    """Mends the folders below, which cuda-core makes with the permissions that the umask leaves."""
    for below in _files(folder):
        with contextlib.suppress(OSError):
            mode = below.lstat().st_mode
            if stat.S_ISDIR(mode) and mode & 0o077:
                below.chmod(0o700)


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _read_quietly(path: Path, most: int = -1) -> bytes:
    """The file, which is not to look used because it was listed or checked."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        # Some file systems do not know it.
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


def _write(path: Path, text: str, temporary: Path) -> None:
    """Writes a file, of mode 0600, of which readers see all or nothing."""
    descriptor, name = tempfile.mkstemp(dir=temporary)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _failure(path: Path) -> dict[str, Any] | None:
    """The record of a failure that is still to be remembered."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or _objection(status):
            return None
        record = json.loads(_read_quietly(path))
        record = {
            "digest": str(record["digest"]),
            "time": float(record["time"]),
            "message": str(record["message"]),
            "details": dict(record["details"]),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # One from the future was written by a clock that was wrong: it would be remembered for who knows how long.
    return record if 0 <= time.time() - record["time"] < FAILURE_SECONDS else None


# ----------------------------------------------------------------------------------------------------------------------
# Locks
#
# flock, since the kernel releases it however its holder ends; each acquisition has a description of its own, so that
# threads of one process exclude each other too.
#
# Lock files are removed while their lock is held, by the holder or by `prune`. The hazard: another one has opened the
# file by then, locks what has no name any more, and a third one locks a new file of that name. So whoever gets a lock
# looks whether the name still stands for the file that is locked, and starts again if it does not.
# ----------------------------------------------------------------------------------------------------------------------

_descriptors: set[int] = set()
_forking = threading.RLock()


def _close_in_child() -> None:
    # A description is shared with the parent: left open here, its lock would outlive the parent; unlocked here, the
    # parent would lose it.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    _forking.release()


# Held across a fork, so that no descriptor is open but not yet listed in the child.
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


@contextlib.contextmanager
def _locked(path: Path, patience: float) -> Iterator[None]:
    """Holds a lock.

    Raises:
        OSError: it cannot be had: no such folder, no locks on that file system, or (TimeoutError) no end of waiting.
    """
    deadline = time.monotonic() + patience
    pause = 0.001
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {patience:.0f} s for the process that holds {path}")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    try:
        yield
    finally:
        _unlock(path, descriptor)


def _try_lock(path: Path) -> int | None:
    with _forking:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _descriptors.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _names(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        _close(descriptor)
        raise
    _close(descriptor)
    return None


def _unlock(path: Path, descriptor: int) -> None:
    if descriptor not in _descriptors:
        return  # a child that was forked meanwhile: the lock is its parent's
    with contextlib.suppress(OSError):
        if _names(path, descriptor):
            path.unlink()
    # Closing alone would not do while a child between fork and exec has the descriptor too.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _close(descriptor)


def _close(descriptor: int) -> None:
    with _forking:
        if descriptor in _descriptors:
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _remove_lock(path: Path) -> None:
    """Removes the file of a lock that nobody holds."""
    descriptor = _try_lock(path)
    if descriptor is not None:
        _unlock(path, descriptor)
