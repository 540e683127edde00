"""The headers that kernels are compiled with: the folders that a compiler searches, and the identity of their contents.

Both compilers use this module: CMake, for nvcc, through the command line below, and `jit.toolchain` for NVRTC.

A *shadow* is a header of ours that precedes CUTLASS's of the same name. `shadows/` has a folder for each version of
CUTLASS for which shadows are valid, `cutlass_4` (every 4.x) or `cutlass_4.2` (that one), and in it a folder for each
purpose:

- `required`: headers for kernels that CUTLASS's headers do not suffice for;
- `required_nvrtc`: further headers for a compiler without a host;
- `newer_nvrtc`: further ones for such a compiler with a CUTLASS newer than the pinned one;
- `faster`: equivalents of CUTLASS's that compile in a fraction of the time, and depend on internals of one release.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .key import KernelKey

SUFFIXES = (".h", ".hpp", ".inl")
COMPILERS = ("nvcc", "nvrtc")
PARTS = ("MAJOR", "MINOR")

TRIED = ((4, 2), (4, 4), (4, 5))
"""The versions of CUTLASS that a kernel of every family was compiled with, the pinned one first."""


class HeadersError(Exception):
    """Headers that kernels cannot be compiled with; the message names the expected ones."""


@dataclass(frozen=True)
class Includes:
    """The folders that a compiler searches for the headers of ours and of CUTLASS, in order.

    Attributes:
        folders: the folders.
        remark: a remark for the build's log; may be empty.
    """

    folders: tuple[Path, ...]
    remark: str


def cutlass_version(cutlass: Path) -> tuple[int, int]:
    """(major, minor) of a folder of CUTLASS headers, which contains `cutlass/` and `cute/`.

    Raises:
        HeadersError: its `cutlass/version.h` is missing or has no version.
    """
    path = cutlass / "cutlass" / "version.h"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HeadersError(
            f"{cutlass} has no cutlass/version.h ({error.strerror}): expected CUTLASS headers"
        ) from error
    major, minor = (re.search(rf"^\s*#\s*define\s+CUTLASS_{part}\s+(\d+)\s*$", text, re.MULTILINE) for part in PARTS)
    if major is None or minor is None:
        raise HeadersError(f"{path} defines no CUTLASS_MAJOR and CUTLASS_MINOR: expected CUTLASS headers")
    return int(major[1]), int(minor[1])


def includes(cutlass: Path, compiler: str, *, ours: Path) -> Includes:
    """The folders that a compiler searches.

    Args:
        cutlass: the folder of CUTLASS's headers.
        compiler: `nvcc` or `nvrtc`.
        ours: the folder of our headers, `.../include/atomr_cutlass`.

    Raises:
        HeadersError: these headers are none of CUTLASS, or of a version that is not among `TRIED`.
    """
    if compiler not in COMPILERS:
        raise ValueError(f"compiler={compiler!r}; valid: {', '.join(COMPILERS)}")
    version = cutlass_version(cutlass)
    if version not in TRIED:
        raise HeadersError(
            f"{cutlass} has the headers of CUTLASS {_name(version)}; valid: {', '.join(map(_name, TRIED))}"
        )
    shadows = ours / "shadows"
    required, faster = shadows / f"cutlass_{version[0]}", shadows / f"cutlass_{_name(version)}" / "faster"
    folders = []
    if compiler == "nvrtc":
        folders = [ours / "nvrtc", required / "required_nvrtc"]
        if version > TRIED[0]:
            folders.append(required / "newer_nvrtc")
    folders.append(required / "required")
    remark = ""
    if faster.is_dir():
        folders.append(faster)
    else:
        made_for = ", ".join(sorted(folder.parent.name.removeprefix("cutlass_") for folder in shadows.glob("*/faster")))
        remark = (
            f"the headers are those of CUTLASS {_name(version)}: kernels compile more slowly than with {made_for}, "
            "which there are faster headers for"
        )
    return Includes((*folders, ours.parent, cutlass), remark)


def objection(key: KernelKey, version: tuple[int, int]) -> str:
    """Why a kernel does not compile with a version of `TRIED`; empty if it does."""
    if version == TRIED[0]:
        return ""
    from .matrix import family  # which loads every family, and CMake asks for folders only

    why = family(key).objection(key)
    return why and f"{key.name} does not compile with CUTLASS {_name(version)}, which {why}; valid: {_name(TRIED[0])}"


def digest(folder: Path, *, below: bool = True) -> str:
    """SHA-256, in hexadecimal digits, over names and contents of the headers in a folder, and of those below it."""
    import hashlib  # loads OpenSSL, which importing the package need not

    total = hashlib.sha256()
    found = folder.rglob("*") if below else folder.glob("*")
    for path in sorted(path for path in found if is_header(path)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def prune(installed: Path, source: Path) -> None:
    """Removes files from an installed folder that its source no longer has, and the folders that become empty."""
    for path in sorted(installed.rglob("*"), reverse=True):
        kept = source / path.relative_to(installed)
        if path.is_dir() and not path.is_symlink():
            if not kept.is_dir() and not any(path.iterdir()):
                path.rmdir()
        elif not kept.is_file():
            path.unlink()


def write_digest(folder: Path) -> None:
    """Writes the digest of a folder to its file DIGEST, atomically."""
    partial = folder / f"DIGEST.{os.getpid()}.partial"
    partial.write_text(f"{digest(folder)}\n", encoding="ascii")
    partial.replace(folder / "DIGEST")


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def is_header(path: Path) -> bool:
    """Whether a path is a header's."""
    # C++'s own have no suffix: <string>; neither has DIGEST.
    return (path.suffix in SUFFIXES or (not path.suffix and path.name.islower())) and path.is_file()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers one question of the build on standard output, or finishes an installation's headers."""
    import argparse  # which importing the package need not

    parser = argparse.ArgumentParser(prog="python -m generator.headers", description=main.__doc__)
    questions = parser.add_subparsers(required=True, dest="question")
    command = questions.add_parser("digest", help="the digest of a folder of headers")
    command.add_argument("folder", type=Path)
    command = questions.add_parser("includes", help="the folders that a compiler searches, separated by semicolons")
    command.add_argument("compiler", choices=COMPILERS)
    command.add_argument("cutlass", type=Path)
    command.add_argument("ours", type=Path)
    command = questions.add_parser("finish", help="remove what the sources have no longer, and write CUTLASS's DIGEST")
    command.add_argument("include", type=Path, help="the include folder of the installed package")
    command.add_argument("cutlass", type=Path)
    command.add_argument("ours", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.question == "digest":
            print(digest(given.folder))
        elif given.question == "includes":
            found = includes(given.cutlass, given.compiler, ours=given.ours)
            print(*found.folders, sep=";")
            if found.remark:
                print(f"Kernels: {found.remark}", file=sys.stderr)
        else:
            for part in ("cutlass", "cute"):
                prune(given.include / "cutlass_headers" / part, given.cutlass / part)
            prune(given.include / "atomr_cutlass", given.ours)
            write_digest(given.include / "cutlass_headers")
    except HeadersError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
