"""Facts about this installation: GPUs, compilers, headers, kernels, the kernel cache, and cures for missing parts."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import CacheError, CutlassError
from ..generator import toolchain
from ..generator.archs import SmArch
from ..jit import kernels as jit_kernels
from ..jit import toolchain as jit_toolchain
from ..jit.files import FOLDER_VARIABLE
from ..jit.store import MAX_BYTES, KernelStore
from ..jit.toolchain import Toolchain
from ..pipeline import devices, table
from ..pipeline.candidate import KernelInfo
from ..pipeline.devices import Device

PACKAGE = Path(_core.__file__).parent
RUN_TIME = "compiling kernels at run time"


def gather() -> dict[str, Any]:
    """Looks at the installation; starts the driver and NVRTC, but allocates nothing on a GPU and writes nothing.

    Returns:
        JSON-ready facts: `version` and `python`; `driver`, or why it cannot be used; `gpus`, every visible one with the
        number of kernels that run on it; `nvcc`, `nvrtc`, `headers` (CUTLASS's in the package) and `cuda_headers`
        (CCCL's), each with its version and where it is, or None; `jit`, compilation at run time, with the kernel cache;
        `packs`, kernels by pack; `table`, kernels by op, generation and arch, packs included; and `missing`: `what` is
        not there, what it is needed `for` and the `cure`.
    """
    kernels = table.kernels()
    problem = devices.problem()
    gpus = [] if problem else [_gpu(devices.get(i), kernels) for i in range(_core.device_count())]
    nvcc, nvcc_problem = _nvcc()
    tools, jit_problem = _jit_tools(0 if problem else _core.driver_version() // 1000)
    policy, policy_problem = _policy()
    cache, headers = _cache(), _headers()
    missing = [_missing_driver(problem)] if problem else []
    missing += _missing_kernels(kernels, gpus, compiling=not jit_problem and policy != "off")
    if headers is None:
        missing.append(_missing("the CUTLASS headers", RUN_TIME, "pip install --force-reinstall --no-deps ."))
    if nvcc is None:
        use = "building kernels; a build that finds none fetches it for itself"
        missing.append(_missing("nvcc", use, f"pip install '{toolchain.PYPI_TOOLKIT}'"))
    if jit_problem and headers is not None:
        # The error names either extra; here the driver has been asked which one it is.
        extra = "cu12" if not problem and _core.driver_version() < 13000 else "cu13"
        cure = f"pip install 'atomr-cutlass[{extra}]'"
        missing.append(_missing(jit_problem.partition(": pip install")[0], RUN_TIME, cure))
    if policy_problem:
        missing.append(_missing(policy_problem, RUN_TIME, f"correct {jit_kernels.POLICY_VARIABLE}"))
    if cache["problem"]:
        cure = f"export {FOLDER_VARIABLE}=ANOTHER_FOLDER"
        missing.append(_missing(cache["problem"], "keeping compiled kernels for other processes", cure))
    for pack_problem in table.pack_problems():
        named = pack_problem.startswith(table.PACKS_VARIABLE)
        cure = f"correct {table.PACKS_VARIABLE}" if named else "upgrade or uninstall that distribution"
        missing.append(_missing(pack_problem, "the kernels of that pack", cure))
    if nvcc_problem:
        missing.append(_missing(nvcc_problem, "building kernels", "unset ATOMR_CUTLASS_NVCC"))
    counts = sorted(Counter((info.key.op, info.key.generation, info.key.arch.value) for info in kernels).items())
    return {
        "version": metadata.version("atomr-cutlass"),
        "python": platform.python_version(),
        "driver": problem or _driver(),
        "gpus": gpus,
        "nvcc": nvcc,
        "nvrtc": _tool(tools.compiler.partition(" ")[2], tools.nvrtc) if tools else None,
        "headers": headers,
        "cuda_headers": _cuda_headers(tools),
        "jit": {
            "policy": policy,
            "problem": jit_problem,
            "nvrtc_build": tools.build if tools else "",
            "headers": dict(tools.headers) if tools else {},
            "cache": cache,
            "miss_log": os.environ.get(jit_kernels.MISS_LOG_VARIABLE) or None,
        },
        "packs": dict(Counter(info.pack for info in kernels if info.pack)),
        "table": [
            {"op": op, "generation": generation, "arch": arch, "kernels": count}
            for (op, generation, arch), count in counts
        ],
        "missing": missing,
    }


def build_command(preset: str, archs: str) -> str:
    """The command that builds and installs the package with these kernels."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset} -DATOMR_CUTLASS_ARCHS={archs}' pip install ."


def _missing(what: str, use: str, cure: str) -> dict[str, str]:
    """Something that is not there, what it is needed for and the command that supplies it."""
    return {"what": what, "for": use, "cure": cure}


def _tool(version: str, where: Path) -> dict[str, str]:
    return {"version": version, "where": str(where)}


def _gpu(device: Device, kernels: list[KernelInfo]) -> dict[str, Any]:
    runs = sum(_runs(info, device) for info in kernels)
    return {**asdict(device), "arch": device.arch.value if device.arch else None, "kernels": runs}


def _runs(info: KernelInfo, device: Device) -> bool:
    way = devices.rank_arch(info.key.arch, device, ptx=info.ptx, cuda_version=info.cuda_version)
    return way is not None and info.shared_bytes <= device.shared_memory


def _driver() -> str:
    """The driver's version with that of its CUDA, or the latter alone."""
    version, cuda = devices.driver(), devices.cuda_name(_core.driver_version())
    return cuda if version == cuda else f"{version} ({cuda})"


def _nvcc() -> tuple[dict[str, str] | None, str]:
    """(the nvcc that a build would take, why that cannot be said)."""
    try:
        nvcc = toolchain.system_nvcc()
    except toolchain.ToolchainError as error:
        return None, str(error)
    if nvcc is None:
        root = toolchain.pypi_toolkit()
        nvcc = root / "bin" / "nvcc" if root else None
    version = toolchain.nvcc_version(nvcc) if nvcc else None
    return (_tool(".".join(map(str, version)), nvcc) if nvcc and version else None), ""


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


def _cuda_headers(tools: Toolchain | None) -> dict[str, str] | None:
    for folder in tools.include if tools else ():
        found = jit_toolchain.header_version(folder)
        if found:
            return _tool(f"{found[0]}.{found[1]}", folder)
    return None


def _policy() -> tuple[str | None, str]:
    """(the policy in force, why there is none)."""
    try:
        return jit_kernels.policy(), ""
    except CutlassError as error:
        return None, str(error)


def _cache() -> dict[str, Any]:
    """The kernel cache: where it is, or would be made, what is in it, in bytes, and why it is not used, if so."""
    folder, max_size, problem, sizes = os.environ.get(FOLDER_VARIABLE, ""), MAX_BYTES, "", []
    try:
        store = KernelStore()
        folder, max_size = str(store.folder), store.max_bytes
        sizes = [entry.size for entry in store.entries()]
    except CacheError as error:
        problem = str(error)
    return {"folder": folder, "kernels": len(sizes), "size": sum(sizes), "max_size": max_size, "problem": problem}


def _headers() -> dict[str, str] | None:
    folder = PACKAGE / "include" / "cutlass_headers"
    try:
        text = (folder / "cutlass" / "version.h").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    return _tool(".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH")), folder)


def _missing_driver(problem: str) -> dict[str, str]:
    if "CUDA_VISIBLE_DEVICES" in problem:
        cure = "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists the GPUs"
    else:
        cure = "sudo ubuntu-drivers install (other systems: their own package); in a container: docker run --gpus all"
    return _missing(problem, "computing on a GPU; until then gemm runs the NumPy reference", cure)


def _missing_kernels(kernels: list[KernelInfo], gpus: list[dict[str, Any]], *, compiling: bool) -> list[dict[str, str]]:
    use = "computing {}" + (" without compiling at the first use" if compiling else "")
    if not kernels and not gpus:
        return [_missing("the kernel table is empty", use.format("on a GPU"), build_command("default", "80;90a"))]
    unserved = {SmArch(gpu["arch"]).target: gpu["name"] for gpu in gpus if gpu["arch"] and not gpu["kernels"]}
    return [
        _missing(f"no kernel in the table runs on {name}", use.format("there"), build_command("default", target))
        for target, name in unserved.items()
    ]
