"""Packs from keys that are shared libraries: each kernel compiled by nvcc, or taken from the disk cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError, DeviceUnavailableError, LibraryError
from ..generator import emit, headers, key_file, machine, toolchain
from ..generator.content import cutlass_digest, source_digest
from ..generator.key import KernelKey, check_unique
from ..generator.manifest import kernel, manifest
from ..generator.matrix import family
from ..generator.render import render
from ..generator.seal import seal
from ..jit import kernels
from ..jit import toolchain as jit_toolchain
from ..jit.turns import COMPILE_SECONDS
from .pack_build import compiled, package_facts, verified

FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-cudart=static", "-Xfatbin", "-compress-all",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-ffunction-sections,-fdata-sections",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-Xlinker=--gc-sections,--strip-all,-z,defs")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler with its headers.

    Attributes:
        path: the compiler.
        host: the host compiler.
        version: what both say of themselves.
        cutlass: identity of CUTLASS's headers as it finds them.
        include: where it looks for headers.
    """

    path: Path
    host: Path
    version: str
    cutlass: str
    include: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Such as `nvcc 13.0.88`."""
        found = re.search(r"V(\d+(?:\.\d+)+)", self.version)
        return f"nvcc {found[1] if found else '?'}"

    @property
    def digest(self) -> str:
        """Identifies the compiler, its headers and its options independently of their paths."""
        parts = [self.version, self.cutlass, headers.digest(jit_toolchain.OURS), *FLAGS]
        return f"{self.name} {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def nvcc() -> Nvcc:
    """The compiler that a build of the package would take: `CUDACXX`, an installed one, or PyPI's.

    Raises:
        DeviceUnavailableError: there is none, or the headers are none of CUTLASS.
    """
    try:
        path = toolchain.find_nvcc(kernels.store().folder / "toolkit")
        found = headers.includes(jit_toolchain.CUTLASS, "nvcc", ours=jit_toolchain.OURS)
        digest = cutlass_digest(jit_toolchain.CUTLASS, jit_toolchain.OURS, jit_toolchain.cutlass_digest())
    except (toolchain.ToolchainError, headers.HeadersError) as error:
        raise DeviceUnavailableError(f"{error} (--compiler nvrtc needs neither nvcc nor a host compiler)") from error
    named = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    host = shutil.which(named)
    if host is None:
        raise DeviceUnavailableError(
            f"nvcc needs a C++ compiler, and there is no {named}: install one, or name it in CXX (--compiler nvrtc "
            "needs neither)"
        )
    versions = [_run([program, "--version"])[1] for program in (str(path), host)]
    return Nvcc(path, Path(host), "\n".join(versions), digest, found.folders)


def build(
    keys: Sequence[KernelKey],
    name: str,
    *,
    executor: Executor | None = None,
    finished: Callable[[KernelKey], None] = lambda _key: None,
) -> bytes:
    """The file of a pack: a shared library, sealed. What was compiled before an interruption is taken from the cache.

    Args:
        keys: the kernels to compile.
        name: of the pack.
        executor: runs `compile_unit`; None: threads, as many as CPUs and memory allow.
        finished: is told of each kernel that is done.

    Raises:
        CompileError: some kernels do not compile; names them. Those that do are in the cache.
        DeviceUnavailableError: nvcc or a host compiler is missing.
        LibraryError: it cannot be linked, or the executor failed.
    """
    check_unique(keys)
    tools = nvcc()
    jobs = machine.jobs(max(family(key).compile_mb for key in keys) << 20)
    with ThreadPoolExecutor(jobs) if executor is None else nullcontext(executor) as pool:
        units = [
            unit for arch in dict.fromkeys(key.arch for key in keys)
            for unit in emit.units_of([key for key in keys if key.arch is arch])
        ]  # fmt: skip
        objects = compiled(compile_unit, units, tools.digest, pool, finished)
    with tempfile.TemporaryDirectory(prefix="atomr-cutlass-") as work:
        folder = Path(work)
        paths = []
        for number, content in enumerate(objects):
            paths.append(folder / f"{number}.o")
            paths[-1].write_bytes(content)
        (folder / "table.cpp").write_text(emit.table(keys), encoding="utf-8")
        (folder / "pack.map").write_text("{ global: atomr_cutlass_pack_v1; local: *; };\n", encoding="ascii")
        words = [
            *_command(tools), *LINK_FLAGS, f"-Xlinker=--version-script={folder / 'pack.map'}",
            f'-DATOMR_CUTLASS_PACK_NAME="{name}"', str(folder / "table.cpp"), *map(str, paths),
            "-o", str(folder / "pack.so"),
        ]  # fmt: skip
        status, log = _run(words)
        if status != 0:
            raise LibraryError("nvcc", f"the pack cannot be linked: {log.strip()[-2000:]}")
        library = (folder / "pack.so").read_bytes()
    by = f"{tools.cutlass} {tools.name}"
    members = [kernel(key, f"{source_digest(key, jit_toolchain.OURS)} {by}", verified(key)) for key in keys]
    digests = {"cutlass": jit_toolchain.cutlass_digest(), "atomr_cutlass": headers.digest(jit_toolchain.OURS)}
    return seal(library, manifest(name, members, **package_facts(), compiler=tools.name, headers=digests))


def compile_unit(lines: str, digest: str) -> bytes:
    """The object file of kernels of one arch that `emit.units_of` puts together: a function of keys and toolchain.

    Args:
        lines: the keys, as lines of a file of keys.
        digest: `Nvcc.digest` of the toolchain that is to compile them.

    Raises:
        LibraryError: the toolchain here is another one.
        CompileError: the source does not compile.
        UnsupportedError: a kernel cannot compile with the installed version of CUTLASS.
    """
    keys = [key_file.parse(json.loads(line)) for line in lines.splitlines()]
    tools = nvcc()
    if tools.digest != digest:
        raise LibraryError("nvcc", f"the toolchain here is {tools.digest}, and {digest} is to compile {keys[0].name}")
    for key in keys:
        jit_toolchain.check_compiles(key)
    name, unit = emit.unit_source(keys)
    arch = keys[0].arch
    sources = {
        f"src/{arch.value}/{key.name}.cu": render(key, content=source_digest(key, jit_toolchain.OURS))[0]
        for key in keys
    } | {f"units/{arch.value}/{name}.cu": unit}
    options = [
        f"-gencode=arch=compute_{arch.target},code=sm_{arch.target}",
        f'-DATOMR_CUTLASS_HEADERS_DIGEST="{tools.cutlass}"',
    ]

    def make() -> bytes:
        with tempfile.TemporaryDirectory(prefix="atomr-cutlass-") as work:
            for file, text in sources.items():
                path = Path(work, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            made = Path(work, f"{name}.o")
            status, log = _run([*_command(tools), *options, "-c", str(path), "-o", str(made)])
            if status != 0:
                raise CompileError(
                    f"{name} does not compile for {arch.value}: {log.strip()[-500:]}",
                    log=log, source="\n".join(sources.values()), options=tuple(options),
                )  # fmt: skip
            return made.read_bytes()

    content = hashlib.sha256("\0".join(["object", *sources.values(), *options, digest]).encode()).digest()
    info = {"name": name, "target": f"{arch.value} object", "nvcc": tools.name}
    return kernels.store().obtain(content, make, info)[0]


def _command(tools: Nvcc) -> list[str]:
    return [str(tools.path), f"-ccbin={tools.host}", *FLAGS, *(f"-I{folder}" for folder in tools.include)]


def _run(words: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=COMPILE_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryError("nvcc", f"{words[0]} cannot be run: {error}") from error
    return done.returncode, done.stdout
