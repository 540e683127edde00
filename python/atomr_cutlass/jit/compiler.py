"""KernelKey -> compiled kernel, by NVRTC alone: no nvcc, no host compiler."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError, LibraryError
from ..generator.key import KernelKey
from ..generator.render import render
from . import worker
from .toolchain import Toolchain, toolchain

OPTIONS = (
    "-std=c++17",
    # CUTLASS's host functions, which say nothing of where they run, become device functions.
    "-default-device",
    # CUTLASS's own 128-bit division, by which it schedules tiles, traps on the device.
    "-device-int128",
    "-DCUTLASS_UINT128_NATIVE",
    "-DNDEBUG",
    "-w",
)
COMPANION = "-DATOMR_CUTLASS_EVALUATE"

_WORKER = Path(worker.__file__)
_SIZES = struct.Struct("<QQ")


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled into.

    Attributes:
        arch: NVRTC's name, `sm_90a` for machine code or `compute_80` for PTX.
    """

    arch: str

    @property
    def image(self) -> str:
        """`cubin` or `ptx`."""
        return "ptx" if self.arch.startswith("compute_") else "cubin"


@dataclass(frozen=True)
class Images:
    """A compiled kernel and its companion, which evaluates its parameters (jit_abi.h)."""

    kernel: bytes
    companion: bytes

    def pack(self) -> bytes:
        """One string of bytes."""
        return _SIZES.pack(len(self.kernel), len(self.companion)) + self.kernel + self.companion

    @classmethod
    def unpack(cls, data: bytes) -> Images:
        """The inverse of `pack`; ValueError for anything else."""
        if len(data) < _SIZES.size:
            raise ValueError("not a compiled kernel: too short")
        first, second = _SIZES.unpack_from(data)
        start = _SIZES.size
        if len(data) != start + first + second:
            raise ValueError("not a compiled kernel: its parts do not add up")
        return cls(data[start : start + first], data[start + first :])


@dataclass(frozen=True)
class Unit:
    """A kernel's source with everything else that decides what it compiles into."""

    name: str
    source: str
    target: Target

    @classmethod
    def of(cls, key: KernelKey, target: Target) -> Unit:
        """The unit of a key."""
        source, name = render(key, flavour="nvrtc")
        return cls(name, source, target)

    def digest(self, tools: Toolchain) -> bytes:
        """The kernel's key in the disk cache: no path, no time, no machine is part of it.

        Source, options, exact arch, NVRTC's build and the contents of CUTLASS's headers and ours.
        """
        from cuda.core import ProgramOptions
        from cuda.core.utils import make_program_cache_key

        options = ProgramOptions(arch=self.target.arch, define_macro=[o[2:] for o in OPTIONS if o.startswith("-D")])
        rest = [*(o for o in OPTIONS if not o.startswith("-D")), COMPANION, tools.build, tools.headers]
        key: bytes = make_program_cache_key(
            code=self.source,
            code_type="c++",
            options=options,
            target_type=self.target.image,
            extra_digest="\0".join(rest).encode(),
        )
        return key

    def compile(self) -> Images:
        """Compiles the kernel and its companion side by side, each in a process of its own.

        Raises:
            CompileError: the source does not compile; carries log, source and options.
            LibraryError: the compiler crashed or was killed.
            DeviceUnavailableError: NVRTC or CUDA's headers are missing.
        """
        tools = toolchain()
        options = [f"--gpu-architecture={self.target.arch}", *OPTIONS, *(f"-I{folder}" for folder in tools.include)]
        with ThreadPoolExecutor(2, thread_name_prefix="atomr-cutlass-nvrtc") as pool:
            halves = [
                pool.submit(self._half, options),
                pool.submit(self._half, [*options, COMPANION]),
            ]
            return Images(*(half.result() for half in halves))

    def _half(self, options: list[str]) -> bytes:
        request = {"name": self.name, "source": self.source, "options": options, "image": self.target.image}
        made, log = _in_process(request) if sys.executable else worker.compile_source(**request)  # type: ignore[arg-type]
        if made is None:
            raise CompileError(
                f"{self.name} does not compile for {self.target.arch}: {first_error(log)}",
                log=log,
                source=self.source,
                options=tuple(options),
            )
        return made


def first_error(log: str) -> str:
    """The first line of a compiler's log that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _in_process(request: dict[str, object]) -> tuple[bytes | None, str]:
    paths = [path for path in sys.path if path and Path(path).exists()]
    library = toolchain().nvrtc
    # Where NVRTC looks for its own second half.
    folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    # -I: the environment does not decide what Python runs; the paths are this process's own.
    ran = subprocess.run(
        [sys.executable, "-I", str(_WORKER)],
        input=json.dumps({"path": paths, "library": str(library), **request}).encode(),
        env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)},
        capture_output=True,
        check=False,
    )
    head, _, body = ran.stdout.partition(b"\n")
    if ran.returncode != 0 or not head:
        # Not the source's fault, so not to be remembered: out of memory, or killed.
        reason = f"signal {-ran.returncode}" if ran.returncode < 0 else f"status {ran.returncode}"
        said = ran.stderr.decode("utf-8", "replace").strip()
        raise LibraryError("nvrtc", f"the compiler's process ended with {reason}" + (f": {said}" if said else ""))
    answer = json.loads(head)
    return (body if answer["ok"] else None), str(answer["log"])
