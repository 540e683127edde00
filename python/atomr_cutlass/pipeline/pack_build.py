"""Building packs from keys: cubins by NVRTC, or a shared library by nvcc and a host compiler, on any executor."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from ..errors import CompileError, CutlassError, DeviceUnavailableError, LibraryError
from ..generator import elf, emit, headers, key_file, machine
from ..generator import toolchain as nvcc_toolchain
from ..generator.content import source_digest
from ..generator.key import KernelKey, check_unique
from ..generator.manifest import LICENSE, kernel, manifest
from ..generator.matrix import family
from ..generator.render import render
from ..generator.seal import seal
from ..jit import kernels
from ..jit import toolchain as jit_toolchain
from ..jit.compiler import Images
from ..jit.locks import COMPILE_SECONDS
from ..jit.toolchain import Toolchain, toolchain
from .pack import LAYOUT, Cubin, Pack, encode
from .verification import cutlass_identity, identity, verification

FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-cudart=static", "-Xfatbin", "-compress-all",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-ffunction-sections,-fdata-sections",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-Xlinker=--gc-sections,--strip-all,-z,defs")
_INFO = struct.Struct("<QIIII3II")
"""atomr_cutlass_jit_info (jit_abi.h)."""
_CONNECT_SECONDS = 20.0


def build(
    keys: Sequence[KernelKey],
    name: str,
    *,
    compiler: str = "nvrtc",
    executor: Executor | None = None,
    finished: Callable[[KernelKey], None] = lambda _key: None,
) -> bytes:
    """The file of a pack, built by one of COMPILERS; compilations run on the executor, by default in threads.

    After an interruption or a failure, the next build finds the kernels that were compiled in the cache.
    """
    compiled = functools.partial(_compiled, executor=executor, finished=finished)
    return COMPILERS[compiler](keys, name, compiled)


def _compiled(
    compile_unit: Callable[[str, str], bytes],
    units: Sequence[Sequence[KernelKey]],
    digest: str,
    threads: int,
    *,
    executor: Executor | None,
    finished: Callable[[KernelKey], None],
) -> list[bytes]:
    """Compiles each unit by a function of its keys' lines and a digest, on an executor (None: in `threads` threads)."""
    failed = []
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(ThreadPoolExecutor(threads))
        waiting = {pool.submit(compile_unit, "\n".join(map(key_file.line, unit)), digest): unit for unit in units}
        stack.callback(lambda: [future.cancel() for future in waiting])  # after an error
        for future in as_completed(waiting):
            names = ", ".join(key.name for key in waiting[future])
            try:
                future.result()
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
            for key in waiting[future]:
                finished(key)
    if failed:
        raise CompileError(f"{len(failed)} of {len(units)} compilations failed: " + "; ".join(sorted(failed)))
    return [future.result() for future in waiting]


@contextlib.contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster as an executor. Each needs this package and, to compile, NVRTC.

    If a worker dies, another one takes over its task.
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


def _digest(compiler: str, *parts: str) -> str:
    """The digest of a toolchain: of everything that its code depends on, without paths."""
    return f"{compiler} {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _require(lib: str, here: str, digest: str, key: KernelKey) -> None:
    """Refuses to compile a key where the toolchain has another digest than that of the build."""
    if here != digest:
        raise LibraryError(lib, f"the toolchain here is {here}, and {digest} is to compile {key.name}: install that")


def _facts(compiler: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """The members of BUILT for packs that this package builds."""
    own = metadata.distribution("atomr-cutlass")
    ours, theirs = own.read_text("licenses/LICENSE") or LICENSE, LICENSE
    with contextlib.suppress(OSError):
        theirs = (jit_toolchain.CUTLASS / "LICENSE.txt").read_text(encoding="utf-8")
    return {
        "package": own.version,
        "abi_version": _core.ABI_VERSION,
        "layout": LAYOUT,
        "compiler": compiler,
        "headers": dict(digests),
        "licenses": {"atomr_cutlass": ours, "CUTLASS": theirs},
    }


def _provenance(key: KernelKey, compiler: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """(content of a kernel as `KernelInfo` has it, records of its verification)."""
    verified = tuple(record.to_dict() for record in verification(key).records)
    return f"{' '.join(identity(key))} {compiler}", verified


# ----------------------------------------------------------------------------------------------------------------------
# Cubins, by NVRTC
# ----------------------------------------------------------------------------------------------------------------------


def _cubins(keys: Sequence[KernelKey], name: str, compiled: Callable[..., list[bytes]]) -> bytes:
    tools = toolchain()
    threads = max(1, machine.cpus() // 2)  # a compilation is two processes
    made = compiled(compile_key, [[key] for key in keys], _nvrtc_digest(tools), threads)
    cubins = (_cubin(key, Images.unpack(image), tools) for key, image in zip(keys, made, strict=True))
    return encode(Pack(name, _facts(tools.compiler, tools.headers), tuple(cubins)))


def compile_key(line: str, digest: str) -> bytes:
    """The images of a key (a line of a file of keys) by the toolchain of this digest, as `Images.pack` has them."""
    key = key_file.parse(json.loads(line))
    _require("nvrtc", _nvrtc_digest(toolchain()), digest, key)
    return kernels.load(key, key.arch.value)[0].pack()


def _nvrtc_digest(tools: Toolchain) -> str:
    return _digest(tools.compiler, tools.build, *(f"{name}={digest}" for name, digest in sorted(tools.headers.items())))


def _cubin(key: KernelKey, images: Images, tools: Toolchain) -> Cubin:
    info = elf.variable(images.companion, f"{key.name}_info", _INFO.size)
    if len(info) != _INFO.size:
        raise LibraryError("pack", f"the compiled companion of {key.name} says nothing of it: please report this")
    layout, _, _, shared_bytes, threads, *_ = _INFO.unpack(info)
    if layout != _core.LAYOUT_DIGEST:
        raise LibraryError("pack", f"the headers that {key.name} is compiled with are of another ABI: reinstall")
    content, verified = _provenance(key, tools.compiler)
    return Cubin(key, images.kernel, images.companion, content, shared_bytes, threads, verified)


# ----------------------------------------------------------------------------------------------------------------------
# Shared libraries, by nvcc
# ----------------------------------------------------------------------------------------------------------------------


class Nvcc(NamedTuple):
    """A CUDA compiler; `digest` is that of it with its headers and options, `cutlass` that of CUTLASS's headers."""

    name: str
    digest: str
    cutlass: str
    command: list[str]


def nvcc() -> Nvcc:
    """The compiler that a build of the package would use: `CUDACXX`, an installed one, or PyPI's."""
    try:
        path = str(nvcc_toolchain.find_nvcc(kernels.store().folder / "toolkit").absolute())
        folders = headers.includes(jit_toolchain.CUTLASS, "nvcc", ours=jit_toolchain.OURS).folders
        cutlass = cutlass_identity()
    except (nvcc_toolchain.ToolchainError, headers.HeadersError) as error:
        raise DeviceUnavailableError(f"{error} (--compiler nvrtc needs neither nvcc nor a host compiler)") from error
    named = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    found = shutil.which(named)
    if found is None:
        raise DeviceUnavailableError(
            f"nvcc needs a C++ compiler, and there is no {named}: install one, or name it in CXX (--compiler nvrtc "
            "needs neither)"
        )
    host = str(Path(found).absolute())  # nvcc runs in folders of its own
    version = "\n".join(_run([program, "--version"])[1] for program in (path, host))
    release = re.search(r"V(\d+(?:\.\d+)+)", version)
    name = f"nvcc {release[1] if release else '?'}"
    digest = _digest(name, version, cutlass, headers.digest(jit_toolchain.OURS), *FLAGS)
    return Nvcc(name, digest, cutlass, [path, f"-ccbin={host}", *FLAGS, *(f"-I{folder}" for folder in folders)])


def _library(keys: Sequence[KernelKey], name: str, compiled: Callable[..., list[bytes]]) -> bytes:
    """A shared library, sealed."""
    check_unique(keys)
    tools = nvcc()
    threads = machine.jobs(max(family(key).compile_mb for key in keys) << 20)
    units = [
        unit for arch in dict.fromkeys(key.arch for key in keys)
        for unit in emit.units_of([key for key in keys if key.arch is arch])
    ]  # fmt: skip
    made = compiled(compile_unit, units, tools.digest, threads)
    objects = {f"{number}.o": content for number, content in enumerate(made)}
    texts = {
        "table.cpp": emit.table(keys).encode(),
        "pack.map": b"{ global: atomr_cutlass_pack_v1; local: *; };\n",
    }
    options = [*LINK_FLAGS, "-Xlinker=--version-script=pack.map", f'-DATOMR_CUTLASS_PACK_NAME="{name}"']
    library, log = _output(tools, objects | texts, [*options, "table.cpp", *objects])
    if not library:
        raise LibraryError("nvcc", f"the pack cannot be linked: {log.strip()[-2000:]}")
    members = [kernel(key, *_provenance(key, tools.name)) for key in keys]
    digests = {"cutlass": jit_toolchain.cutlass_digest(), "atomr_cutlass": headers.digest(jit_toolchain.OURS)}
    return seal(library, manifest(name, members, **_facts(tools.name, digests)))


def compile_unit(lines: str, digest: str) -> bytes:
    """The object file of the kernels of one arch that `emit.units_of` puts together; arguments as of `compile_key`."""
    keys = [key_file.parse(json.loads(line)) for line in lines.splitlines()]
    tools = nvcc()
    _require("nvcc", tools.digest, digest, keys[0])
    for key in keys:
        jit_toolchain.check_compiles(key)
    name, unit = emit.unit_source(keys)
    arch = keys[0].arch
    unit_file = f"units/{arch.value}/{name}.cu"
    sources = {
        f"src/{arch.value}/{key.name}.cu": render(key, content=source_digest(key, jit_toolchain.OURS))[0]
        for key in keys
    } | {unit_file: unit}
    options = [
        f"-gencode=arch=compute_{arch.target},code=sm_{arch.target}",
        f'-DATOMR_CUTLASS_HEADERS_DIGEST="{tools.cutlass}"',
    ]

    def make() -> bytes:
        encoded = {file: text.encode() for file, text in sources.items()}
        made, log = _output(tools, encoded, [*options, "-c", unit_file])
        if not made:
            raise CompileError(
                f"{name} does not compile for {arch.value}: {log.strip()[-500:]}",
                log=log, source="\n".join(sources.values()), options=tuple(options),
            )  # fmt: skip
        return made

    content = hashlib.sha256("\0".join(["object", *sources.values(), *options, digest]).encode()).digest()
    info = {"name": name, "target": f"{arch.value} object", "nvcc": tools.name}
    return kernels.store().obtain(content, make, info)[0]


def _output(tools: Nvcc, files: Mapping[str, bytes], arguments: Sequence[str]) -> tuple[bytes, str]:
    """The output of nvcc for some files, empty where it fails, and its messages."""
    with tempfile.TemporaryDirectory(prefix="atomr-cutlass-") as work:
        for name, content in files.items():
            path = Path(work, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        status, log = _run([*tools.command, *arguments, "-o", "made"], work)
        return b"" if status else Path(work, "made").read_bytes(), log


def _run(words: Sequence[str], folder: str | None = None) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=COMPILE_SECONDS, cwd=folder,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryError("nvcc", f"{words[0]} cannot be run: {error}") from error
    return done.returncode, done.stdout


COMPILERS: dict[str, Callable[..., bytes]] = {"nvrtc": _cubins, "nvcc": _library}
