"""One NVRTC compilation in a process of its own: `python worker.py REQUEST ANSWER`, two files.

NVRTC compiles one source at a time in a process and takes up to 1.7 GB, which it keeps. A process for each compilation
runs side by side with others, gives its memory back, and leaves the caller alive if the compiler dies.

REQUEST is {"library": NVRTC's path, "name":, "source":, "options": [...], "image": "cubin" or
"ptx"}. ANSWER gets a line of JSON, {"ok":, "log":, "length":, "sha256":}, and after it the image, of that length and
digest. It is written beside and renamed, so it is there whole or not at all. The exit status is 0 when it is there,
and CANNOT_WRITE when the file could not be written: then there may be no room for a message either.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

CANNOT_WRITE = os.EX_IOERR

_DOES_NOT_COMPILE = 6  # NVRTC_ERROR_COMPILATION


class Nvrtc:
    """NVRTC through its C interface, which is the same in every release of CUDA 12 and 13.

    cuda-python has it too, in a wheel of 30 MB for each major version of CUDA, which a toolkit does not bring.
    """

    def __init__(self, library: str) -> None:
        """Loads the library of this path; OSError if it cannot be loaded."""
        # Its second half, which it asks the loader for by name, and the loader need not know the folder.
        for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(library)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Such as (13, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, name: str, source: str, options: list[str], image: str) -> tuple[bytes | None, str]:
        """The image (`cubin` or `ptx`), None when the source does not compile, and the compiler's log."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            if status == _DOES_NOT_COMPILE:
                return None, log or self._error(status)
            if status != 0:
                raise RuntimeError(f"NVRTC: {self._error(status)} {log}")
            return self._bytes(program, image.upper()), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{name}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"NVRTC: {function}: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status), "ascii", "replace")


def compile_source(library: str, name: str, source: str, options: list[str], image: str) -> tuple[bytes | None, str]:
    """Compiles with the NVRTC of a path; see `Nvrtc.compile`."""
    return Nvrtc(library).compile(name, source, options, image)


def answer(image: bytes | None, log: str) -> bytes:
    """Encodes the result of a compilation for ANSWER."""
    body = image or b""
    head = {"ok": image is not None, "log": log, "length": len(body), "sha256": _digest(body)}
    return json.dumps(head).encode() + b"\n" + body


def parse(content: bytes) -> tuple[bytes | None, str]:
    """The inverse of `answer`; ValueError for anything else."""
    line, _, body = content.partition(b"\n")
    try:
        head = json.loads(line)
        ok, log, length, digest = (head[name] for name in ("ok", "log", "length", "sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("its result has no head that can be read") from error
    if len(body) != length:
        raise ValueError(f"its result has {len(body)} bytes of {length}")
    if _digest(body) != digest:
        raise ValueError("its result does not match its checksum")
    return (body if ok else None), str(log)


def _digest(body: bytes) -> str:
    import hashlib  # loads OpenSSL, which importing the package need not

    return hashlib.sha256(body).hexdigest()


def main(request_file: str, answer_file: str) -> int:
    """Serves one request; returns the exit status."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    content = answer(*compile_source(**request))
    partial = Path(f"{answer_file}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(answer_file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # makes room for the message
            # Unbuffered: what a buffer keeps for want of room changes the exit status.
            os.write(2, str(error).encode(errors="replace"))
        return CANNOT_WRITE
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
