"""One NVRTC compilation in a process of its own: `python worker.py`, with a request on its standard input.

NVRTC compiles one source at a time in a process and retains up to 1.7 GB. A process for each compilation allows
parallel ones, frees the memory, and protects the caller from a crash of the compiler.

The request is a line of JSON, the arguments of `compile_source`. The answer, on standard output, is a line of JSON
followed by the image; it is complete if the exit status is 0.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

_DOES_NOT_COMPILE = 6  # NVRTC_ERROR_COMPILATION


class Nvrtc:
    """NVRTC through its C interface, which is the same in every release of CUDA 12 and 13.

    cuda-python has bindings too, in a wheel of 30 MB for each major version of CUDA, which no toolkit includes.
    """

    def __init__(self, library: str) -> None:
        """Loads the library of this path; OSError if it cannot be loaded."""
        # Its second library, which it loads by name, from a folder that the loader may not search.
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
    """The result of a compilation as bytes."""
    return json.dumps([image is not None, log]).encode() + b"\n" + (image or b"")


def parse(content: bytes) -> tuple[bytes | None, str]:
    """The inverse of `answer`; ValueError or TypeError without its line of JSON."""
    head, _, image = content.partition(b"\n")
    compiled, log = json.loads(head)
    return (image if compiled else None), log


def main() -> None:
    """Serves one request."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the answer
    content = answer(*compile_source(**json.loads(sys.stdin.buffer.readline())))
    with os.fdopen(answers, "wb") as file:
        file.write(content)


if __name__ == "__main__":
    main()
