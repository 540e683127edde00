"""Packs from keys: each kernel compiled by NVRTC, or taken from the disk cache, on any executor."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from importlib import metadata
from typing import Any

from .. import _core
from ..errors import CompileError, CutlassError, DeviceUnavailableError, LibraryError
from ..generator import elf, key_file, machine
from ..generator.key import KernelKey
from ..generator.manifest import LICENSE
from ..jit import kernels
from ..jit import toolchain as jit_toolchain
from ..jit.compiler import Images
from ..jit.toolchain import Toolchain, toolchain
from .pack import LAYOUT, Built, Cubin, Pack
from .verification import identity, verification

_INFO = struct.Struct("<QIIII3II")
"""atomr_cutlass_jit_info (jit_abi.h)."""
_CONNECT_SECONDS = 20.0


def build(
    keys: Sequence[KernelKey],
    name: str,
    *,
    executor: Executor | None = None,
    finished: Callable[[KernelKey], None] = lambda _key: None,
) -> Pack:
    """The pack of some keys. What was compiled before an interruption is taken from the cache by the next build.

    Args:
        keys: the kernels to compile.
        name: of the pack.
        executor: runs `compile_key`; None: threads, whose compilers are processes, as many as CPUs and memory allow.
        finished: is told of each kernel that is done.

    Raises:
        CompileError: some kernels do not compile; names them. Those that do are in the cache.
        DeviceUnavailableError: NVRTC or CUDA's headers are missing.
        LibraryError: a compiler died, or the executor.
    """
    tools = toolchain()
    made = compiled(compile_key, [[key] for key in keys], tools_digest(tools), executor, finished)
    cubins = (_cubin(key, Images.unpack(image), tools) for key, image in zip(keys, made, strict=True))
    return Pack(name, _built(tools), tuple(cubins))


def compiled(
    compile_unit: Callable[[str, str], bytes],
    units: Sequence[Sequence[KernelKey]],
    digest: str,
    executor: Executor | None,
    finished: Callable[[KernelKey], None],
) -> list[bytes]:
    """Has an executor compile each unit.

    Args:
        compile_unit: of the lines of a file of keys and the toolchain's digest, on whichever machine.
        units: the kernels that are compiled together.
        digest: of the toolchain.
        executor: None: threads, as many as CPUs allow for compilers of two processes.
        finished: is told of each kernel that is done.

    Raises:
        CompileError: some do not compile; names them.
        LibraryError: the executor failed.
    """
    made, failed = [b""] * len(units), []
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(ThreadPoolExecutor(max(1, machine.cpus() // 2)))
        waiting = {
            pool.submit(compile_unit, "\n".join(map(key_file.line, unit)), digest): place
            for place, unit in enumerate(units)
        }
        try:
            for future in as_completed(waiting):
                place = waiting[future]
                names = ", ".join(key.name for key in units[place])
                try:
                    made[place] = future.result()
                except CompileError as error:
                    failed.append(f"{names}: {error}")
                except CutlassError:
                    raise
                except Exception as error:  # each executor has errors of its own for workers that died
                    raise LibraryError(
                        "executor",
                        f"{names} not compiled: a worker died, or cannot be reached ({type(error).__name__}: "
                        f"{error}). Build again: what is compiled is in the cache",
                    ) from error
                for key in units[place]:
                    finished(key)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
    if failed:
        raise CompileError(f"{len(failed)} of {len(units)} compilations failed: " + "; ".join(sorted(failed)))
    return made


@contextlib.contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster as an executor. Each needs this package, to compile also NVRTC, and has its cache.

    What a worker leaves unfinished when it dies is done by another worker.

    Args:
        address: of the scheduler, such as `tcp://10.0.0.1:8786`.

    Raises:
        DeviceUnavailableError: Dask is not installed.
        LibraryError: there is no scheduler at the address.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise DeviceUnavailableError(f"Dask is missing ({error}): pip install 'atomr-cutlass[dask]'") from error
    try:
        client = Client(address, set_as_default=False, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise LibraryError("dask", f"no scheduler answers at {address}: {error}") from error
    with client:
        yield client.get_executor()


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
    return kernels.load(key, key.arch.value)[0].pack()


def tools_digest(tools: Toolchain) -> str:
    """Identifies a toolchain and its headers independently of their paths: the compiler, and a digest of everything."""
    import hashlib

    parts = "\0".join([tools.build, *(f"{name}={digest}" for name, digest in sorted(tools.headers.items()))])
    return f"{tools.compiler} {hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def verified(key: KernelKey) -> list[dict[str, str]]:
    """The verification records of a kernel as it is now, for manifests."""
    return [record.to_dict() for record in verification(key).records]


def package_facts() -> dict[str, Any]:
    """The facts about this package that every pack built by it records."""
    own = metadata.distribution("atomr-cutlass")
    ours, theirs = own.read_text("licenses/LICENSE") or LICENSE, LICENSE
    with contextlib.suppress(OSError):
        theirs = (jit_toolchain.CUTLASS / "LICENSE.txt").read_text(encoding="utf-8")
    return {
        "package": own.version,
        "abi_version": _core.ABI_VERSION,
        "layout": LAYOUT,
        "licenses": {"atomr_cutlass": ours, "CUTLASS": theirs},
    }


def _built(tools: Toolchain) -> Built:
    return Built(**package_facts(), compiler=tools.compiler, headers=dict(tools.headers))


def _cubin(key: KernelKey, images: Images, tools: Toolchain) -> Cubin:
    info = elf.variable(images.companion, f"{key.name}_info", _INFO.size)
    if len(info) != _INFO.size:
        raise LibraryError("pack", f"the compiled companion of {key.name} says nothing of it: please report this")
    layout, _, _, shared_bytes, threads, *_ = _INFO.unpack(info)
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
        tuple(verified(key)),
    )
