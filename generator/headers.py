"""The identity of a folder of headers: a digest of what is in it, whatever the folder is called and wherever it lies.

`python -m generator.headers FOLDER` prints it.
"""

from __future__ import annotations

import sys
from pathlib import Path

SUFFIXES = (".h", ".hpp", ".inl")


def digest(folder: Path, *, below: bool = True) -> str:
    """SHA-256, in hexadecimal digits, over names and contents of the headers in a folder, and of those below it."""
    import hashlib  # loads OpenSSL, which importing the package need not

    total = hashlib.sha256()
    found = folder.rglob("*") if below else folder.glob("*")
    for path in sorted(path for path in found if path.suffix in SUFFIXES and path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


if __name__ == "__main__":
    print(digest(Path(sys.argv[1])))
