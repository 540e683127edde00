"""One NVRTC compilation in a process of its own: `python worker.py REQUEST ANSWER`, two files.

NVRTC compiles one source at a time in a process and takes up to 1.7 GB, which it keeps. A process for each compilation
runs side by side with others, gives its memory back, and leaves the caller alive if the compiler dies.

REQUEST is {"path": sys.path, "library": NVRTC's path, "name":, "source":, "options": [...], "image": "cubin" or
"ptx"}. ANSWER gets a line of JSON, {"ok":, "log":, "length":, "sha256":}, and after it the image, of that length and
digest. It is written beside and renamed, so it is there whole or not at all. The exit status is 0 when it is there,
and CANNOT_WRITE when the file could not be written: then there may be no room for a message either.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

CANNOT_WRITE = os.EX_IOERR


def compile_source(name: str, source: str, options: list[str], image: str) -> tuple[bytes | None, str]:
    """Compiles with NVRTC.

    Args:
        name: what the compiler calls the source in its messages.
        source: CUDA C++.
        options: NVRTC's.
        image: `cubin` or `ptx`.

    Returns:
        The image, None when the source does not compile, and the compiler's log.
    """
    # Nothing but this in the package's process too: it is costly to import.
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"NVRTC: {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    def text(size: Any, get: Any) -> bytes:
        buffer = bytearray(checked(size(program)))
        checked(get(program, buffer))
        return bytes(buffer)

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode("utf-8", "replace")
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            return None, log or str(status)
        if int(status) != 0:
            raise RuntimeError(f"NVRTC: {status} {log}")
        if image == "ptx":
            return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def answer(image: bytes | None, log: str) -> bytes:
    """What ANSWER holds of a compilation."""
    body = image or b""
    head = {"ok": image is not None, "log": log, "length": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


def parse(content: bytes) -> tuple[bytes | None, str]:
    """The inverse of `answer`.

    Raises:
        ValueError: the content is not as it was made.
    """
    line, _, body = content.partition(b"\n")
    try:
        head = json.loads(line)
        ok, log, length, digest = (head[name] for name in ("ok", "log", "length", "sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("its result has no head that can be read") from error
    if len(body) != length:
        raise ValueError(f"its result has {len(body)} bytes of {length}")
    if hashlib.sha256(body).hexdigest() != digest:
        raise ValueError("its result does not match its checksum")
    return (body if ok else None), str(log)


def main(request_file: str, answer_file: str) -> int:
    """Serves one request; returns the exit status."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    sys.path[:] = request.pop("path")
    # Found loaded, it is not searched for: the kernel's key in the cache is that of this very library.
    ctypes.CDLL(request.pop("library"), mode=ctypes.RTLD_GLOBAL)
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
