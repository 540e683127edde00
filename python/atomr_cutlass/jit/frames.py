"""The format of a disk cache entry: magic, length of the header, header (JSON), kernel, SHA-256 of all that.

Bytes only; files are the store's business.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass

_MAGIC = b"atomr_cutlass kernel 1\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class DamagedError(Exception):
    """A file is no entry, or no longer one; says why."""


@dataclass(frozen=True)
class Header:
    """The description of the kernel in an entry.

    Attributes:
        digest: the kernel's key, in hexadecimal digits.
        info: what `KernelStore.obtain` was told of it.
        seconds: how long it took to compile.
        made: when, as seconds of the epoch.
    """

    digest: str
    info: dict[str, str | float | int]
    seconds: float
    made: float


def pack(header: Header, kernel: bytes) -> bytes:
    """The frame of a kernel."""
    text = json.dumps(vars(header)).encode()
    content = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, kernel))
    return content + hashlib.sha256(content).digest()


def unpack(frame: bytes, digest: bytes | None = None) -> bytes:
    """The kernel in a frame; given a key, of that key only.

    Raises:
        DamagedError: the frame is not as it was written.
    """
    view = memoryview(frame)
    _check_magic(frame)
    # First, so that what is read from here on is what was written.
    if hashlib.sha256(view[:-_CHECKSUM_BYTES]).digest() != view[-_CHECKSUM_BYTES:]:
        raise DamagedError("does not match its checksum")
    header, start = _header(frame)
    if digest is not None and header.digest != digest.hex():
        raise DamagedError("is the entry of another key")
    return bytes(view[start:-_CHECKSUM_BYTES])


def peek(beginning: bytes) -> Header:
    """The header of a frame of which this is the beginning, unchecked.

    Raises:
        DamagedError: there is none that can be read.
    """
    _check_magic(beginning)
    return _header(beginning)[0]


def _check_magic(frame: bytes) -> None:
    if not frame.startswith(_MAGIC):
        raise DamagedError("is no entry of this version of the cache")


def _header(frame: bytes) -> tuple[Header, int]:
    """The header, and where the kernel begins."""
    start = len(_MAGIC) + _LENGTH.size
    try:
        end = start + _LENGTH.unpack_from(frame, len(_MAGIC))[0]
        said = json.loads(frame[start:end])
        header = Header(str(said["digest"]), dict(said["info"]), float(said["seconds"]), float(said["made"]))
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError("has a header that cannot be read") from error
    return header, end
