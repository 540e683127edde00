"""Sealed packs: a shared library or the images of cubins, followed by the manifest and a checksum of all.

    library or images, manifest (JSON), length of the manifest (8 bytes, little-endian), SHA-256 of all that, MAGIC

The system's loader ignores bytes after an ELF file.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any

from . import elf

MAGIC = b"atomr_cutlass library 1\n"

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_END_BYTES = _LENGTH.size + _DIGEST_BYTES + len(MAGIC)


def seal(library: bytes, manifest: Mapping[str, Any]) -> bytes:
    """The file of a pack that is a shared library.

    Args:
        library: the shared library.
        manifest: its members besides those that the library tells: `bytes`, `glibc` and `images`, its GPU code.
    """
    images = [image(code) for code in elf.device_code(library)]
    return append(library, {**manifest, "glibc": glibc(library), "images": images})


def append(content: bytes, manifest: Mapping[str, Any]) -> bytes:
    """The content with a manifest, completed by its `bytes`, and the checksum of all."""
    text = json.dumps({**manifest, "bytes": len(content)}, sort_keys=True, separators=(",", ":")).encode()
    content += text + _LENGTH.pack(len(text))
    return content + _sha256(content) + MAGIC


def is_sealed(data: bytes) -> bool:
    """Whether a file that ends like this claims to be sealed."""
    return data.endswith(MAGIC)


def unseal(data: bytes) -> dict[str, Any]:
    """The manifest of a file, once every byte has been checked.

    Raises:
        ValueError: the file is damaged; says how.
    """
    if not is_sealed(data):
        raise ValueError("it has no checksum at its end: it was cut off, or is no pack that this version has built")
    end = len(data) - _DIGEST_BYTES - len(MAGIC)
    if len(data) < _END_BYTES or _sha256(data[:end]) != data[end : end + _DIGEST_BYTES]:
        raise ValueError("it does not match its checksum")
    length = _LENGTH.unpack_from(data, end - _LENGTH.size)[0]
    start = end - _LENGTH.size - length
    manifest = json.loads(data[max(start, 0) : end - _LENGTH.size])
    if not isinstance(manifest, dict) or manifest.get("bytes") != start:
        raise ValueError("its manifest is of another file")
    return manifest


def glibc(library: bytes) -> str:
    """The newest version of the C library whose symbols a library asks for, such as `2.34`; empty: none."""
    found = {(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\0])", library)}
    return ".".join(map(str, max(found))) if found else ""


def image(code: bytes) -> dict[str, Any]:
    """Size and checksum of code, for manifests."""
    return {"bytes": len(code), "sha256": _sha256(code).hex()}


def _sha256(data: bytes) -> bytes:
    import hashlib  # loads OpenSSL, which importing the package need not

    return hashlib.sha256(data).digest()
