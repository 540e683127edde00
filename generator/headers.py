"""The identity of a folder of headers: a digest of what is in it, whatever the folder is called and wherever it lies.

`python -m generator.headers FOLDER` prints it.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

SUFFIXES = (".h", ".hpp", ".inl")


def digest(folder: Path) -> str:
    """SHA-256, in hexadecimal digits, over names and contents of all headers of CUTLASS, or of ours, below a folder."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


if __name__ == "__main__":
    print(digest(Path(sys.argv[1])))
