"""The identity of a kernel's sources: its source in both flavours, the headers of ours, and CUTLASS's.

Two kernels of the same identity, by the same compiler, have the same code. Comments, blank space, where lines of macros
are continued, the folder of the headers and their dates do not count, so that records of a kernel remain valid after
changes that do not affect it.

`python -m generator.content CUTLASS OURS` prints the identity of CUTLASS's headers.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from . import headers
from .key import KernelKey
from .render import render

DIGITS = 16
"""Hexadecimal digits of an identity."""

# Quoted text is kept as it is. A digit separator looks like the beginning of a character.
_LITERAL = r'R"(?P<mark>[^()\s\\]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])+\''
# Comments, and the ends of continued lines.
_IGNORED = re.compile(rf"(?P<literal>{_LITERAL})|//[^\n]*|/\*.*?\*/|\\\n", re.DOTALL)
_SPACES = re.compile(rf"(?P<literal>{_LITERAL})|\s+", re.DOTALL)
_INCLUDE = re.compile(r'^ ?# ?include ?"(atomr_cutlass/[^"]+)"', re.MULTILINE)


def source_digest(key: KernelKey, ours: Path) -> str:
    """The identity of a kernel's source and of the headers of ours that it includes.

    Args:
        key: a key that `matrix.supports` accepts.
        ours: the folder of our headers, `.../include/atomr_cutlass`.
    """
    import hashlib  # loads OpenSSL, which importing the package need not

    total = hashlib.sha256()
    reached: set[str] = set()
    for flavour in ("aot", "nvrtc"):
        text = normalized(render(key, flavour=flavour)[0])
        total.update(f"{text}\0".encode())
        reached |= _reached(text, ours.parent)
    for name in sorted(reached):
        total.update(f"{name}\0{_header(ours.parent / name)[1]}\n".encode())
    return total.hexdigest()[:DIGITS]


def cutlass_digest(cutlass: Path, ours: Path, digest: str | None = None) -> str:
    """The identity of CUTLASS's headers as kernels find them, with ours before those of the same names.

    Args:
        cutlass: the folder of CUTLASS's headers.
        ours: the folder of ours, `.../include/atomr_cutlass`.
        digest: `headers.digest` of CUTLASS's folder, where that is known.

    Returns:
        The version, for readers, and a digest.

    Raises:
        headers.HeadersError: these headers are none of CUTLASS, or of a CUTLASS that no kernel is written for.
    """
    import hashlib

    total = hashlib.sha256((digest or headers.digest(cutlass)).encode())
    # The headers of either compiler, so that both have one identity.
    for folder in headers.includes(cutlass, "nvrtc", ours=ours).folders:
        if ours in folder.parents:
            for path in sorted(path for path in folder.rglob("*") if headers.is_header(path)):
                total.update(f"{path.relative_to(ours).as_posix()}\0{_header(path)[1]}\n".encode())
    version = ".".join(map(str, headers.cutlass_version(cutlass)))
    return f"{version}-{total.hexdigest()[:DIGITS]}"


def normalized(text: str) -> str:
    """C++ without comments and superfluous blank space, with continued lines joined."""
    text = _IGNORED.sub(lambda found: found["literal"] or " ", text)
    return _SPACES.sub(lambda found: found["literal"] or ("\n" if "\n" in found[0] else " "), text).strip()


def _reached(text: str, include: Path) -> set[str]:
    """The headers of ours that a text includes, and those that they include."""
    found: set[str] = set()
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_header(include / name)[0])
    return found


@functools.cache
def _header(path: Path) -> tuple[tuple[str, ...], str]:
    """Our headers that one of our headers includes, and the digest of its text."""
    import hashlib

    text = normalized(path.read_text(encoding="utf-8"))
    return tuple(_INCLUDE.findall(text)), hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    print(cutlass_digest(Path(sys.argv[1]), Path(sys.argv[2])))
