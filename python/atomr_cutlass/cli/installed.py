"""`info` and `list`: facts about this installation, and cures for missing parts."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from .. import _core
from ..errors import CacheError, CutlassError
from ..generator import toolchain
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.matrix import OPS
from ..jit import kernels as jit_kernels
from ..jit import toolchain as jit_toolchain
from ..jit.files import FOLDER_VARIABLE
from ..jit.store import MAX_BYTES, KernelStore
from ..jit.toolchain import Toolchain
from ..pipeline import devices, table
from ..pipeline.devices import Device
from ..pipeline.table import KernelInfo
from ..pipeline.verification import verification
from .output import AsJson, complain, heading, line, print_json, print_table, size_text

T = TypeVar("T")

TARGETS = ", ".join(arch.target for arch in SmArch)
RUN_TIME = "compiling kernels at run time"


def info_command(*, as_json: AsJson = False) -> None:
    """GPUs, driver, compilers, headers, kernel cache, packs and kernels; what is missing, with the cure."""
    facts = gather()
    if as_json:
        print_json(facts)
        return
    print_facts(facts)
    if facts["missing"]:
        heading("Missing")
    for missing in facts["missing"]:
        line(f"{missing['what']}\n    for:  {missing['for']}\n    cure: {missing['cure']}")


def list_command(
    *,
    op: Annotated[str, typer.Option(help=f"Only this operation: {', '.join(OPS)}.")] = "",
    dtype: Annotated[str, typer.Option(help="Only this element type of A; tf32: f32 multiplied in TF32.")] = "",
    arch: Annotated[str, typer.Option(help=f"Only kernels compiled for this target: {TARGETS}.")] = "",
    name_filter: Annotated[
        str, typer.Option("--filter", help="Only matching names: * between substrings, alternatives comma-separated.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """The kernel table, packs included: a table on a terminal, otherwise one name a line; as JSON, a file of keys."""
    if op and op not in OPS:
        raise typer.BadParameter(f"unknown op {op!r}; valid: {', '.join(OPS)}", param_hint="--op")
    found = table.kernels(
        op=op or None,
        dtype=CutlassDtype.parse(dtype) if dtype else None,
        arch=SmArch.parse(arch) if arch else None,
        filter=name_filter or None,
    )
    if as_json:
        for info in found:
            print(json.dumps({**info.to_dict(), "verified": verification(info.key, info).to_dict()}))
    elif sys.stdout.isatty():
        print_kernels(found)
    else:
        for info in found:
            print(info.name)
    if not found and not as_json:
        empty = f"the table is empty; to fill it: {build_command('default', '80;90a')}"
        complain("no kernel of the table matches" if table.kernels() else empty)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints the installed parts, a line each."""
    lines = [("package", f"{facts['version']}, Python {facts['python']}"), ("driver", facts["driver"])]
    for gpu in facts["gpus"]:
        arch = gpu["arch"] or f"compute capability {gpu['capability']}, no target for it"
        size = f"{gpu['multiprocessors']} multiprocessors, {gpu['memory_bytes'] / 2**30:.0f} GiB"
        lines.append((f"GPU {gpu['index']}", f"{gpu['name']} ({arch}), {size}; {gpu['kernels']} kernels run on it"))
    for name, tool in (("nvcc", facts["nvcc"]), ("NVRTC", facts["nvrtc"])):
        lines.append((name, f"{tool['version']} ({tool['where']})" if tool else "none"))
    for name, tool in (("CUTLASS", facts["headers"]), ("CCCL", facts["cuda_headers"])):
        lines.append(("headers", f"{name} {tool['version']} ({tool['where']})" if tool else f"{name}: none"))
    lines += _jit_lines(facts["jit"])
    packs = ", ".join(f"{name} ({count} kernels)" for name, count in facts["packs"].items())
    lines.append(("packs", packs or "none"))
    lines.append(("table", f"{sum(row['kernels'] for row in facts['table'])} kernels"))
    for op, rows in itertools.groupby(facts["table"], key=lambda row: row["op"]):
        counts = ", ".join(f"{row['kernels']} {row['generation']} for {row['arch']}" for row in rows)
        lines.append(("", f"{op}: {counts}"))
    for name, text in lines:
        line(f"{name:<11}{text}")


def _jit_lines(jit: Mapping[str, Any]) -> list[tuple[str, str]]:
    does = {
        "auto": "auto: kernels that the table lacks are compiled",
        "background": "background: better kernels than the table's are compiled while its own serve",
        "off": "off: nothing is compiled",
        None: f"refused: {jit_kernels.POLICY_VARIABLE} names no policy",
    }[jit["policy"]]
    cache, problem = jit["cache"], jit["problem"]
    size = f"{size_text(cache['size'])} of at most {size_text(cache['max_size'])}"
    kept = f"{cache['kernels']} kernels, {size}, in {cache['folder']}"
    lines = [("JIT", f"{does}; but {problem}" if problem and jit["policy"] != "off" else does)]
    if jit["headers"]:
        lines.append(("digests", ", ".join(f"{name} {digest[:12]}" for name, digest in jit["headers"].items())))
    lines.append(("cache", f"not used: {cache['problem']}" if cache["problem"] else kept))
    if jit["miss_log"]:
        lines.append(("misses", f"recorded in {jit['miss_log']}"))
    return lines


def print_kernels(kernels: list[KernelInfo]) -> None:
    """Kernels as a table."""
    rows = []
    for info in kernels:
        key = info.key
        math = "" if key.math == "default" else f" ({key.math})"
        rows.append(
            (
                key.op,
                key.arch.value + (" + PTX" if info.ptx else ""),
                f"{key.a.value} x {key.b.value} -> {key.d.value}{math}",
                key.layout_a + key.layout_b + key.layout_d,
                f"{key.align_a},{key.align_b},{key.align_d}",
                "x".join(map(str, key.tile)),
                "x".join(map(str, key.cluster)),
                info.pack,
                verification(key, info).short,
                info.name,
            )
        )
    columns = ("op", "arch", "A x B -> D", "layouts", "align", "tile", "cluster", "pack", "verified", "name")
    print_table(columns, rows)
    line(f"{len(kernels)} kernels")


def gather() -> dict[str, Any]:
    """Facts of the installation, ready for JSON: each part, or None; `driver` is its version or its error.

    Initializes the driver and NVRTC, without allocating GPU memory or writing files.
    """
    kernels = table.kernels()
    problem = devices.problem()
    gpus = [] if problem else [_gpu(devices.get(i), kernels) for i in range(_core.device_count())]
    nvcc, nvcc_problem = _tried("nvcc", _nvcc)
    tools, jit_problem = _tried("NVRTC", jit_toolchain.toolchain)
    policy, policy_problem = _tried("compilation", jit_kernels.policy)
    cache, headers = _cache(), _headers()
    driver = 0 if problem else _core.driver_version() // 1000
    if tools and 0 < driver < tools.version[0]:
        jit_problem = (
            f"NVRTC {'.'.join(map(str, tools.version))} compiles for CUDA {tools.version[0]}, "
            f"which this driver (CUDA {driver}) is too old for"
        )
    # The error names both extras; the driver's version selects the right one.
    extra = "cu12" if 0 < driver < 13 else "cu13"
    nvcc_use = "building kernels; a build that finds none fetches it for itself"
    no_jit = jit_problem.partition(": pip install")[0] if headers else ""
    missing = [
        (problem, "computing on a GPU; until then gemm runs the NumPy reference", _driver_cure(problem)),
        *_missing_kernels(kernels, gpus, compiling=not jit_problem and policy != "off"),
        ("" if headers else "the CUTLASS headers", RUN_TIME, "pip install --force-reinstall --no-deps ."),
        ("" if nvcc else "nvcc", nvcc_use, f"pip install '{toolchain.PYPI_TOOLKIT}'"),
        (no_jit, RUN_TIME, f"pip install 'atomr-cutlass[{extra}]'"),
        (policy_problem, RUN_TIME, f"correct {jit_kernels.POLICY_VARIABLE}"),
        (cache["problem"], "keeping compiled kernels for other processes", f"export {FOLDER_VARIABLE}=ANOTHER_FOLDER"),
        *((text, "the kernels of that pack", _pack_cure(text)) for text in table.pack_problems()),
        (nvcc_problem, "building kernels", "unset ATOMR_CUTLASS_NVCC"),
    ]
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
        "missing": [{"what": lacks, "for": use, "cure": cure} for lacks, use, cure in missing if lacks],
    }


def build_command(preset: str, archs: str) -> str:
    """The command that builds and installs the package with these kernels."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset} -DATOMR_CUTLASS_ARCHS={archs}' pip install ."


def _tool(version: str, where: Path) -> dict[str, str]:
    return {"version": version, "where": str(where)}


def _gpu(device: Device, kernels: list[KernelInfo]) -> dict[str, Any]:
    runs = sum(info.shared_bytes <= device.shared_memory and info.rank(device) is not None for info in kernels)
    return {**asdict(device), "arch": device.arch.value if device.arch else None, "kernels": runs}


def _driver() -> str:
    """The driver's version with that of its CUDA, or the latter alone."""
    version, cuda = devices.driver(), devices.cuda_name(_core.driver_version())
    return cuda if version == cuda else f"{version} ({cuda})"


def _tried(name: str, find: Callable[[], T]) -> tuple[T | None, str]:
    """(the part that was found, the reason if none was)."""
    try:
        return find(), ""
    except (CutlassError, toolchain.ToolchainError) as error:
        return None, str(error)
    # An incompletely installed part can raise any error.
    except Exception as error:  # noqa: BLE001
        return None, f"{name} cannot be used: {error}"


def _nvcc() -> dict[str, str] | None:
    """The nvcc that a build would use."""
    nvcc = toolchain.system_nvcc()
    if nvcc is None:
        root = toolchain.pypi_toolkit()
        nvcc = root / "bin" / "nvcc" if root else None
    version = toolchain.nvcc_version(nvcc) if nvcc else None
    return _tool(".".join(map(str, version)), nvcc) if nvcc and version else None


def _cuda_headers(tools: Toolchain | None) -> dict[str, str] | None:
    for folder in tools.include if tools else ():
        if found := jit_toolchain.header_version(folder):
            return _tool(f"{found[0]}.{found[1]}", folder)
    return None


def _cache() -> dict[str, Any]:
    """The kernel cache: its folder, whether or not it exists, its contents and size, and why it is unusable, if so."""
    folder, max_size, problem, sizes = os.environ.get(FOLDER_VARIABLE, ""), MAX_BYTES, "", []
    try:
        store = KernelStore()
        folder, max_size = str(store.folder), store.max_bytes
        sizes = [entry.size for entry in store.entries()]
    except CacheError as error:
        problem = str(error)
    return {"folder": folder, "kernels": len(sizes), "size": sum(sizes), "max_size": max_size, "problem": problem}


def _headers() -> dict[str, str] | None:
    folder = jit_toolchain.CUTLASS
    parts = ("CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH")
    numbers = [jit_toolchain.defined(folder / "cutlass" / "version.h", part) for part in parts]
    return None if None in numbers else _tool(".".join(map(str, numbers)), folder)


def _driver_cure(problem: str) -> str:
    if "CUDA_VISIBLE_DEVICES" in problem:
        return "unset CUDA_VISIBLE_DEVICES; nvidia-smi -L lists the GPUs"
    return "sudo ubuntu-drivers install (other systems: their own package); in a container: docker run --gpus all"


def _pack_cure(problem: str) -> str:
    named = problem.startswith(table.PACKS_VARIABLE)
    return f"correct {table.PACKS_VARIABLE}" if named else "upgrade or uninstall that distribution"


def _missing_kernels(
    kernels: list[KernelInfo], gpus: list[dict[str, Any]], *, compiling: bool
) -> list[tuple[str, str, str]]:
    use = "computing {}" + (" without compiling at the first use" if compiling else "")
    if not kernels and not gpus:
        return [("the kernel table is empty", use.format("on a GPU"), build_command("default", "80;90a"))]
    unserved = {SmArch(gpu["arch"]).target: gpu["name"] for gpu in gpus if gpu["arch"] and not gpu["kernels"]}
    return [
        (f"no kernel in the table runs on {name}", use.format("there"), build_command("default", target))
        for target, name in unserved.items()
    ]
