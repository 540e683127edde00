"""Facts about this installation: GPUs, compilers, headers, kernels, the kernel cache, and cures for missing parts."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import CacheError, CutlassError
from ..generator import toolchain
from ..jit import kernels as jit_kernels
from ..jit import toolchain as jit_toolchain
from ..jit.folder import FOLDER_VARIABLE
from ..jit.store import MAX_BYTES, KernelStore
from ..jit.toolchain import Toolchain
from ..pipeline import devices, table
from ..pipeline.candidate import KernelInfo
from ..pipeline.devices import Device

DRIVER_FILE = Path("/proc/driver/nvidia/version")
PACKAGE = Path(_core.__file__).parent
RUN_TIME = "compiling kernels at run time"


@dataclass(frozen=True)
class Missing:
    """Something that is not there: `what`, what it is needed `for_` and the command that supplies it."""

    what: str
    for_: str
    cure: str


@dataclass(frozen=True)
class Gpu:
    """A GPU, how many kernels of the table run on it, and the target that is made for it."""

    device: Device
    kernels: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        arch = self.device.arch
        return {**asdict(self.device), "arch": arch.value if arch else None, "kernels": self.kernels}


@dataclass(frozen=True)
class Tool:
    """A program or a library: its version, and where it is or what it came from."""

    version: str
    where: str


@dataclass(frozen=True)
class Cache:
    """The kernel cache.

    Attributes:
        folder: where it is, or would be made.
        kernels: how many are in it.
        size: their bytes.
        max_size: how many bytes may stay.
        problem: why nothing is read from it or written to it; empty when there is no reason.
    """

    folder: str
    kernels: int
    size: int
    max_size: int
    problem: str


@dataclass(frozen=True)
class Jit:
    """Compilation at run time.

    Attributes:
        policy: what happens when the table lacks a kernel: `auto`, `background` or `off`; None when ATOMR_CUTLASS_JIT
            names no policy.
        problem: why nothing can be compiled; empty when it can.
        nvrtc_build: what NVRTC calls itself in the code it makes.
        headers: digests of the contents of CUTLASS's headers and of ours, by which compiled kernels are kept.
        cache: the kernel cache.
        miss_log: the file that takes the names of kernels that the table lacks, or None.
    """

    policy: str | None
    problem: str
    nvrtc_build: str
    headers: dict[str, str]
    cache: Cache
    miss_log: str | None


@dataclass(frozen=True)
class Info:
    """The facts that `atomr-cutlass info` shows.

    Attributes:
        version: of this package.
        python: version of the interpreter.
        driver: versions of the NVIDIA driver and of the CUDA that it knows, or why it cannot be used.
        gpus: every visible GPU.
        nvcc, nvrtc: compilers, None where there is none that can be used.
        headers: the CUTLASS headers in the package.
        cuda_headers: CUDA's, with the version of CCCL; None where NVRTC is.
        jit: compilation at run time.
        packs: kernels by pack.
        table: kernels by (op, generation, arch), packs included.
        missing: what is not there, with the cure.
    """

    version: str
    python: str
    driver: str
    gpus: tuple[Gpu, ...]
    nvcc: Tool | None
    nvrtc: Tool | None
    headers: Tool | None
    cuda_headers: Tool | None
    jit: Jit
    packs: dict[str, int]
    table: dict[tuple[str, str, str], int]
    missing: tuple[Missing, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        table = [
            {"op": op, "generation": generation, "arch": arch, "kernels": count}
            for (op, generation, arch), count in self.table.items()
        ]
        missing = [{"what": part.what, "for": part.for_, "cure": part.cure} for part in self.missing]
        return {**asdict(self), "gpus": [gpu.to_dict() for gpu in self.gpus], "table": table, "missing": missing}


def gather() -> Info:
    """Looks at the installation; starts the driver and NVRTC, but allocates nothing on a GPU and writes nothing."""
    kernels = table.kernels()
    problem = devices.problem()
    visible = [] if problem else [devices.get(i) for i in range(_core.device_count())]
    gpus = tuple(Gpu(device, sum(_runs(info, device) for info in kernels)) for device in visible)
    nvcc, nvcc_problem = _nvcc()
    tools, jit_problem = _jit_tools(0 if problem else _core.driver_version() // 1000)
    policy, policy_problem = _policy()
    cache = _cache()
    facts: dict[str, Any] = {
        "nvcc": nvcc,
        "nvrtc": _nvrtc(tools),
        "headers": _headers(),
        "cuda_headers": _cuda_headers(tools),
    }
    missing = [
        *_missing_kernels(kernels, gpus, compiling=not jit_problem and policy != "off"),
        *_missing_tools(facts, jit_problem, 12 if not problem and _core.driver_version() < 13000 else 13),
    ]
    if policy_problem:
        missing.append(Missing(policy_problem, RUN_TIME, f"correct {jit_kernels.POLICY_VARIABLE}"))
    if cache.problem:
        cure = f"export {FOLDER_VARIABLE}=ANOTHER_FOLDER"
        missing.append(Missing(cache.problem, "keeping compiled kernels for other processes", cure))
    for pack_problem in table.pack_problems():
        named = pack_problem.startswith(table.PACKS_VARIABLE)
        cure = f"correct {table.PACKS_VARIABLE}" if named else "upgrade or uninstall that distribution"
        missing.append(Missing(pack_problem, "the kernels of that pack", cure))
    if nvcc_problem:
        missing.append(Missing(nvcc_problem, "building kernels", "unset ATOMR_CUTLASS_NVCC"))
    if problem:
        missing.insert(0, _missing_driver(problem))
    return Info(
        version=metadata.version("atomr-cutlass"),
        python=platform.python_version(),
        driver=problem or _driver(),
        gpus=gpus,
        jit=Jit(
            policy=policy,
            problem=jit_problem,
            nvrtc_build=tools.build if tools else "",
            headers=dict(tools.headers) if tools else {},
            cache=cache,
            miss_log=os.environ.get(jit_kernels.MISS_LOG_VARIABLE) or None,
        ),
        packs=dict(Counter(info.pack for info in kernels if info.pack)),
        table=dict(sorted(Counter((i.key.op, i.key.generation, i.key.arch.value) for i in kernels).items())),
        missing=tuple(missing),
        **facts,
    )


def build_command(preset: str, archs: str) -> str:
    """The command that builds and installs the package with these kernels."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset} -DATOMR_CUTLASS_ARCHS={archs}' pip install ."


def _runs(info: KernelInfo, device: Device) -> bool:
    way = devices.rank_arch(info.key.arch, device, ptx=info.ptx, cuda_version=info.cuda_version)
    return way is not None and info.shared_bytes <= device.shared_memory


def _driver() -> str:
    cuda = devices.cuda_name(_core.driver_version())
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return f"{found[1]} ({cuda})" if found else cuda


def _nvcc() -> tuple[Tool | None, str]:
    """(the nvcc that a build would take, why that cannot be said)."""
    try:
        nvcc = toolchain.system_nvcc()
    except toolchain.ToolchainError as error:
        return None, str(error)
    if nvcc is None:
        root = toolchain.pypi_toolkit()
        nvcc = root / "bin" / "nvcc" if root else None
    version = toolchain.nvcc_version(nvcc) if nvcc else None
    return (Tool(".".join(map(str, version)), str(nvcc)) if version else None), ""


def _jit_tools(driver: int) -> tuple[Toolchain | None, str]:
    """(what kernels are compiled with at run time, why they cannot be).

    Args:
        driver: the CUDA major version that the driver knows; 0 without a driver.
    """
    try:
        tools = jit_toolchain.toolchain()
    except CutlassError as error:
        return None, str(error)
    # A half-installed part fails in more ways than the package foresees.
    except Exception as error:  # noqa: BLE001
        return None, f"NVRTC cannot be used: {error}"
    if 0 < driver < tools.version[0]:
        version = ".".join(map(str, tools.version))
        return (
            tools,
            f"NVRTC {version} compiles for CUDA {tools.version[0]}, which this driver (CUDA {driver}) is too old for",
        )
    return tools, ""


def _nvrtc(tools: Toolchain | None) -> Tool | None:
    if tools is None:
        return None
    exact = re.search(r"V(\d+(?:\.\d+)+)", tools.build)
    return Tool(exact[1] if exact else ".".join(map(str, tools.version)), str(tools.nvrtc))


def _cuda_headers(tools: Toolchain | None) -> Tool | None:
    for folder in tools.include if tools else ():
        found = jit_toolchain.header_version(folder)
        if found:
            return Tool(f"{found[0]}.{found[1]}", str(folder))
    return None


def _policy() -> tuple[str | None, str]:
    """(the policy in force, why there is none)."""
    try:
        return jit_kernels.policy(), ""
    except CutlassError as error:
        return None, str(error)


def _cache() -> Cache:
    try:
        store = KernelStore()
    except CacheError as error:
        return Cache(os.environ.get(FOLDER_VARIABLE, ""), 0, 0, MAX_BYTES, str(error))
    problem = ""
    try:
        entries = store.entries()
    except CacheError as error:
        entries, problem = [], str(error)
    return Cache(str(store.folder), len(entries), sum(entry.size for entry in entries), store.max_bytes, problem)


def _headers() -> Tool | None:
    folder = PACKAGE / "include" / "cutlass_headers"
    try:
        text = (folder / "cutlass" / "version.h").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    return Tool(".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH")), str(folder))


def _missing_driver(problem: str) -> Missing:
    if "CUDA_VISIBLE_DEVICES" in problem:
        cure = "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists the GPUs"
    else:
        cure = "sudo ubuntu-drivers install (other systems: their own package); in a container: docker run --gpus all"
    return Missing(problem, "computing on a GPU; until then gemm runs the NumPy reference", cure)


def _missing_kernels(kernels: list[KernelInfo], gpus: tuple[Gpu, ...], *, compiling: bool) -> list[Missing]:
    compiled = " without compiling at the first use" if compiling else ""
    if not kernels and not gpus:
        what_for = f"computing on a GPU{compiled}"
        return [Missing("the kernel table is empty", what_for, build_command("default", "80;90a"))]
    unserved = {g.device.arch.target: g.device.name for g in gpus if g.device.arch is not None and not g.kernels}
    return [
        Missing(
            f"no kernel in the table runs on {name}", f"computing there{compiled}", build_command("default", target)
        )
        for target, name in unserved.items()
    ]


def _missing_tools(facts: dict[str, Tool | None], jit_problem: str, cuda: int) -> list[Missing]:
    missing = []
    if facts["headers"] is None:
        missing.append(Missing("the CUTLASS headers", RUN_TIME, "pip install --force-reinstall --no-deps ."))
    if facts["nvcc"] is None:
        what_for = "building kernels; a build that finds none fetches it for itself"
        missing.append(Missing("nvcc", what_for, f"pip install '{toolchain.PYPI_TOOLKIT}'"))
    if jit_problem and facts["headers"] is not None:
        # The error names either extra; here the driver has been asked which one it is.
        missing.append(
            Missing(jit_problem.partition(": pip install")[0], RUN_TIME, f"pip install 'atomr-cutlass[cu{cuda}]'")
        )
    return missing
