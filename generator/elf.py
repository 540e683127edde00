"""Bytes of ELF files: shared libraries and cubins."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _WITHOUT_BYTES = 2, 8  # types of sections
_FATBIN = struct.Struct("<IHHQ")
_FATBIN_MAGIC = (0xBA55ED50).to_bytes(4, "little")


def variable(data: bytes, name: str, size: int) -> bytes:
    """The initial bytes of a variable; empty where there is none."""
    with contextlib.suppress(struct.error, IndexError, ValueError):
        sections = _sections(data)
        for _, kind, _, _, offset, length, link, *_ in sections:
            if kind != _SYMBOLS:
                continue
            names = sections[link][4]
            for place in range(offset, offset + length, _SYMBOL.size):
                text, _, _, home, value, _ = _SYMBOL.unpack_from(data, place)
                end = data.index(b"\0", names + text)
                if data[names + text : end] == name.encode() and 0 < home < len(sections):
                    first = sections[home][4] + value
                    if sections[home][1] != _WITHOUT_BYTES:
                        return data[first : first + size]
    return b""


def device_code(data: bytes) -> Iterator[bytes]:
    """The GPU code of a library, as nvcc puts it in: a container for each source."""
    with contextlib.suppress(struct.error, IndexError, ValueError):
        sections = _sections(data)
        names = sections[_HEADER.unpack_from(data)[13]][4]
        for text, _, _, _, offset, length, *_ in sections:
            if data[names + text : data.index(b"\0", names + text)] == b".nv_fatbin":
                at, end = data.find(_FATBIN_MAGIC, offset), offset + length
                while offset <= at < end:
                    _, _, head, size = _FATBIN.unpack_from(data, at)
                    yield data[at : at + head + size]
                    at = data.find(_FATBIN_MAGIC, at + head + size)


def _sections(data: bytes) -> list[tuple[int, ...]]:
    header = _HEADER.unpack_from(data)
    start, count = header[6], header[12]
    return [_SECTION.unpack_from(data, start + index * _SECTION.size) for index in range(count)]
