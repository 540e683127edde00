"""Caches the objects of nvcc, so that later builds reuse them: `objects.py FOLDER NVCC ARGUMENTS...`.

CMake runs this in place of nvcc. Objects are named after their inputs: the unit and its cells, whose rows have the
digest of our headers, the digest of CUTLASS's, the options and the versions of both compilers. The folder of a file
does not count: bindings for another Python, the C++ tests and a new build folder reuse all objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PLACES = ("-o", "-c", "-MF", "-MT", "-isystem")
"""Options before a path that does not affect the object."""


def main(arguments: Sequence[str]) -> int:
    """Copies the object from the folder, or compiles it and adds it there; the compiler's exit status."""
    folder, command = Path(arguments[0]), list(arguments[1:])
    follows = dict(itertools.pairwise(command))
    if "-c" not in follows or "-o" not in follows:
        return subprocess.run(command, check=False).returncode
    unit, made = Path(follows["-c"]), Path(follows["-o"])
    sources = [unit, *_cells(unit)]
    kept = folder / f"{_identity(command, sources)}.o"
    if kept.is_file():
        shutil.copyfile(kept, made)
        if "-MF" in follows:
            # Headers are not among them: whatever changes in one changes the cells or the options.
            names = " ".join(str(path) for path in sources)
            Path(follows["-MF"]).write_text(f"{follows.get('-MT', made)}: {names}\n", encoding="utf-8")
        return 0
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        # A full disk, or a folder of another user, must not fail the build.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{kept.name}.{os.getpid()}.partial"
            shutil.copyfile(made, partial)
            partial.replace(kept)
    return status


def _cells(unit: Path) -> list[Path]:
    included = re.findall(r'^#include "(\.\./[^"]+)"$', unit.read_text(encoding="utf-8"), re.MULTILINE)
    return [(unit.parent / name).resolve() for name in included]


def _identity(command: Sequence[str], sources: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in sources:
        total.update(path.read_bytes() + b"\0")
    host = next((word.partition("=")[2] for word in command if word.startswith("-ccbin=")), "c++")
    for compiler in (command[0], host):
        said = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        # It begins with the name that it was called by: c++ here, g++ there.
        total.update(said.partition(b" ")[2])
    for text in (*_options(command), os.environ.get("NVCC_PREPEND_FLAGS", ""), os.environ.get("NVCC_APPEND_FLAGS", "")):
        total.update(f"{text}\0".encode())
    return total.hexdigest()


def _options(command: Sequence[str]) -> Iterator[str]:
    words = iter(command[1:])
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif not word.startswith(("-I", "-isystem", "-ccbin")):
            yield word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
