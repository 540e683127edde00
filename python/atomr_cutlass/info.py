"""What this installation has: GPUs, compilers, headers, kernels, and what would supply the rest."""

from __future__ import annotations

import platform
import re
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from . import _core, devices, table
from .devices import Device
from .errors import LibraryError
from .generator import toolchain
from .table import KernelInfo

DRIVER_FILE = Path("/proc/driver/nvidia/version")
PACKAGE = Path(_core.__file__).parent
NVRTC_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


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
class Info:
    """The facts that `atomr-cutlass info` shows.

    Attributes:
        version: of this package.
        python: version of the interpreter.
        driver: versions of the NVIDIA driver and of the CUDA that it knows, or why it cannot be used.
        gpus: every visible GPU.
        nvcc, cuda_core, nvrtc: compilers, None where there is none.
        headers: the CUTLASS headers in the package.
        packs: kernels by pack.
        table: kernels by (generation, arch), packs included.
        missing: what is not there, with the cure.
    """

    version: str
    python: str
    driver: str
    gpus: tuple[Gpu, ...]
    nvcc: Tool | None
    cuda_core: Tool | None
    nvrtc: Tool | None
    headers: Tool | None
    packs: dict[str, int]
    table: dict[tuple[str, str], int]
    missing: tuple[Missing, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "version": self.version,
            "python": self.python,
            "driver": self.driver,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            **{
                name: None if tool is None else asdict(tool)
                for name, tool in (
                    ("nvcc", self.nvcc),
                    ("cuda_core", self.cuda_core),
                    ("nvrtc", self.nvrtc),
                    ("headers", self.headers),
                )
            },
            "packs": self.packs,
            "table": [{"generation": g, "arch": a, "kernels": count} for (g, a), count in self.table.items()],
            "missing": [{"what": m.what, "for": m.for_, "cure": m.cure} for m in self.missing],
        }


def gather() -> Info:
    """Looks at the installation; starts the driver, but allocates nothing on a GPU and writes nothing."""
    kernels, pack_problem = _kernels()
    problem = devices.problem()
    visible = [] if problem else [devices.get(i) for i in range(_core.device_count())]
    gpus = tuple(Gpu(device, sum(_runs(info, device) for info in kernels)) for device in visible)
    nvcc, nvcc_problem = _nvcc()
    facts: dict[str, Any] = {
        "nvcc": nvcc,
        "cuda_core": _distribution("cuda-core"),
        "nvrtc": _nvrtc(nvcc),
        "headers": _headers(),
    }
    missing = [*_missing_kernels(kernels, gpus), *_missing_tools(facts, 12 if _is_cuda_12(problem) else 13)]
    if pack_problem:
        missing.append(Missing(pack_problem, "the kernels of that pack", f"correct {table.PACKS_VARIABLE}"))
    if nvcc_problem:
        missing.append(Missing(nvcc_problem, "building kernels", "unset ATOMR_CUTLASS_NVCC"))
    if problem:
        missing.insert(0, _missing_driver(problem))
    return Info(
        version=metadata.version("atomr-cutlass"),
        python=platform.python_version(),
        driver=problem or _driver(),
        gpus=gpus,
        packs=dict(Counter(info.pack for info in kernels if info.pack)),
        table=dict(sorted(Counter((info.key.generation, info.key.arch.value) for info in kernels).items())),
        missing=tuple(missing),
        **facts,
    )


def build_command(preset: str, archs: str) -> str:
    """The command that builds and installs the package with these kernels."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset} -DATOMR_CUTLASS_ARCHS={archs}' pip install ."


def _kernels() -> tuple[list[KernelInfo], str]:
    """(the table, why a pack could not be loaded)."""
    try:
        return table.kernels(), ""
    except LibraryError as error:
        # What is linked in, and the packs before the bad one, can still be counted.
        return list(table._rows(_core.registry_generation())), str(error)  # noqa: SLF001


def _runs(info: KernelInfo, device: Device) -> bool:
    way = devices.rank_arch(info.key.arch, device, ptx=info.ptx)
    return way is not None and info.shared_bytes <= device.shared_memory


def _is_cuda_12(problem: str) -> bool:
    return not problem and _core.driver_version() < 13000


def _driver() -> str:
    version = _core.driver_version()
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
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


def _distribution(name: str) -> Tool | None:
    try:
        return Tool(metadata.version(name), name)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc(nvcc: Tool | None) -> Tool | None:
    for name in NVRTC_DISTRIBUTIONS:
        if found := _distribution(name):
            return found
    if nvcc is None:
        return None
    toolkit = Path(nvcc.where).resolve().parents[1]
    library = next((toolkit / "lib64").glob("libnvrtc.so.*"), None)
    return Tool(nvcc.version, str(library)) if library else None


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


def _missing_kernels(kernels: list[KernelInfo], gpus: tuple[Gpu, ...]) -> list[Missing]:
    if not kernels and not gpus:
        return [Missing("the kernel table is empty", "computing on a GPU", build_command("default", "80;90a"))]
    unserved = {g.device.arch.target: g.device.name for g in gpus if g.device.arch is not None and not g.kernels}
    return [
        Missing(f"no kernel in the table runs on {name}", "computing there", build_command("default", target))
        for target, name in unserved.items()
    ]


def _missing_tools(facts: dict[str, Tool | None], cuda: int) -> list[Missing]:
    reinstall = "pip install --force-reinstall --no-deps ."
    run_time = "compiling at run time, which is not there yet"
    return [
        missing
        for name, missing in (
            ("headers", Missing("the CUTLASS headers", "compiling further kernels", reinstall)),
            (
                "nvcc",
                Missing(
                    "nvcc",
                    "building kernels; a build that finds none fetches it for itself",
                    f"pip install '{toolchain.PYPI_TOOLKIT}'",
                ),
            ),
            (
                "cuda_core",
                Missing("cuda-core", run_time, f"pip install 'cuda-core[cu{cuda}]'"),
            ),
            (
                "nvrtc",
                Missing("NVRTC", run_time, f"pip install 'cuda-toolkit[nvrtc]=={cuda}.*'"),
            ),
        )
        if facts[name] is None
    ]
