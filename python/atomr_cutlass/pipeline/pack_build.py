"""Packs from keys: each kernel compiled by NVRTC, or taken from the disk cache, on any executor."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, ThreadPoolExecutor, as_completed
from importlib import metadata

from .. import _core
from ..errors import CompileError, LibraryError
from ..generator import key_file, machine
from ..generator.key import KernelKey
from ..jit import kernels
from ..jit import toolchain as jit_toolchain
from ..jit.compiler import Images, Target
from ..jit.toolchain import Toolchain, toolchain
from .pack import LAYOUT, Built, Cubin, Pack
from .verification import identity, verification

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _WITHOUT_BYTES = 2, 8  # types of sections
_INFO = struct.Struct("<QIIII3II")
"""atomr_cutlass_jit_info (jit_abi.h)."""


def build(
    keys: Sequence[KernelKey],
    name: str,
    *,
    executor: Executor | None = None,
    finished: Callable[[KernelKey], None] = lambda _key: None,
) -> Pack:
    """The pack of some keys. What was compiled before an interruption is taken from the cache by the next build.

    Args:
        keys: what to compile.
        name: of the pack.
        executor: runs `compile_key`; None: threads, whose compilers are processes, as many as CPUs and memory allow.
        finished: is told of each kernel that is done.

    Raises:
        CompileError: some kernels do not compile; names them. Those that do are in the cache.
        DeviceUnavailableError: NVRTC or CUDA's headers are missing.
        LibraryError: a compiler died.
    """
    tools = toolchain()
    images, failed = {}, []
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(ThreadPoolExecutor(max(1, machine.cpus() // 2)))
        waiting = {pool.submit(compile_key, key_file.line(key), tools_digest(tools)): key for key in keys}
        try:
            for future in as_completed(waiting):
                key = waiting[future]
                try:
                    images[key] = Images.unpack(future.result())
                except BrokenExecutor as error:
                    raise LibraryError(
                        "nvrtc",
                        f"a process that compiles died ({error}): build again, what is compiled is in the cache",
                    ) from error
                except CompileError as error:
                    failed.append(f"{key.name}: {error}")
                finished(key)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
    if failed:
        raise CompileError(f"{len(failed)} of {len(keys)} kernels do not compile: " + "; ".join(sorted(failed)))
    return Pack(name, _built(tools), tuple(_cubin(key, images[key], tools) for key in keys))


def compile_key(line: str, digest: str) -> bytes:
    """The images of a key, as `Images.pack` has them: a function of the key and the toolchain, on any machine.

    Args:
        line: the key, as a line of a file of keys.
        digest: `tools_digest` of the toolchain that is to compile it.

    Raises:
        LibraryError: the toolchain here is another one.
        CompileError: the source does not compile.
    """
    key = key_file.parse(json.loads(line))
    here = tools_digest(toolchain())
    if here != digest:
        raise LibraryError(
            "nvrtc", f"the toolchain here is {here}, and {digest} is to compile {key.name}: install that"
        )
    return kernels.load(key, Target(key.arch.value))[0].pack()


def tools_digest(tools: Toolchain) -> str:
    """What identifies a toolchain and its headers, wherever they lie: the compiler, and a digest of everything."""
    import hashlib

    parts = "\0".join([tools.build, *(f"{name}={digest}" for name, digest in sorted(tools.headers.items()))])
    return f"{tools.compiler} {hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _built(tools: Toolchain) -> Built:
    own = metadata.distribution("atomr-cutlass")
    ours = own.read_text("licenses/LICENSE") or "BSD-3-Clause"
    theirs = "BSD-3-Clause"
    with contextlib.suppress(OSError):
        theirs = (jit_toolchain.CUTLASS / "LICENSE.txt").read_text(encoding="utf-8")
    major, minor = tools.version
    return Built(
        package=own.version,
        abi_version=_core.ABI_VERSION,
        layout=LAYOUT,
        compiler=tools.compiler,
        cuda_version=1000 * major + 10 * minor,
        headers=dict(tools.headers),
        licenses={"atomr_cutlass": ours, "CUTLASS": theirs},
    )


def _cubin(key: KernelKey, images: Images, tools: Toolchain) -> Cubin:
    layout, _, _, shared_bytes, threads, *_ = _INFO.unpack(constant(images.companion, f"{key.name}_info", _INFO.size))
    if layout != _core.LAYOUT_DIGEST:
        raise LibraryError("pack", f"the headers that {key.name} is compiled with are of another ABI: reinstall")
    source, cutlass = identity(key)
    return Cubin(
        key,
        images.kernel,
        images.companion,
        f"{source} {cutlass} {tools.compiler}",
        shared_bytes,
        threads,
        tuple(verification(key).to_dict()),
    )


def constant(cubin: bytes, name: str, size: int) -> bytes:
    """The initial bytes of a variable of a cubin, which is an ELF file.

    Raises:
        LibraryError: there is no such variable.
    """
    with contextlib.suppress(struct.error, IndexError, ValueError):
        header = _HEADER.unpack_from(cubin)
        start, count = header[6], header[12]
        sections = [_SECTION.unpack_from(cubin, start + index * _SECTION.size) for index in range(count)]
        for _, kind, _, _, offset, length, link, *_ in sections:
            if kind != _SYMBOLS:
                continue
            names = sections[link][4]
            for place in range(offset, offset + length, _SYMBOL.size):
                text, _, _, home, value, _ = _SYMBOL.unpack_from(cubin, place)
                end = cubin.index(b"\0", names + text)
                if cubin[names + text : end] == name.encode() and 0 < home < count:
                    first = sections[home][4] + value
                    if sections[home][1] != _WITHOUT_BYTES:
                        return cubin[first : first + size]
    raise LibraryError("pack", f"the compiled companion has no {name}: please report this")
