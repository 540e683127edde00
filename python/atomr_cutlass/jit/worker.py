"""One NVRTC compilation in a process of its own: `python worker.py REQUEST ANSWER`, two files.

NVRTC compiles one source at a time in a process and takes up to 1.7 GB, which it keeps. A process for each compilation
runs side by side with others, gives its memory back, and leaves the caller alive if the compiler dies.

REQUEST is {"path": sys.path, "library": NVRTC's path, "name":, "source":, "options": [...], "image": "cubin" or
"ptx"}; ANSWER gets a line of JSON, {"ok":, "log":}, and after it the image.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any


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


def main(asked: str, answer: str) -> None:
    """Serves one request."""
    request = json.loads(Path(asked).read_text(encoding="utf-8"))
    sys.path[:] = request.pop("path")
    # Found loaded, it is not searched for: the kernel's key in the cache is that of this very library.
    ctypes.CDLL(request.pop("library"), mode=ctypes.RTLD_GLOBAL)
    made, log = compile_source(**request)
    Path(answer).write_bytes(json.dumps({"ok": made is not None, "log": log}).encode() + b"\n" + (made or b""))


if __name__ == "__main__":
    main(*sys.argv[1:])
