"""The tools that compile kernels at run time: NVRTC, CUDA's headers, CUTLASS's and ours."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import _core
from ..errors import DeviceUnavailableError, UnsupportedError
from ..generator import headers
from ..generator.key import KernelKey
from ..generator.machine import DEFAULT_ROOTS
from .worker import Nvrtc

# In an editable installation the headers are beside the extension, not beside the Python files.
INCLUDE = Path(_core.__file__).parent / "include"
OURS = INCLUDE / "atomr_cutlass"
CUTLASS = INCLUDE / "cutlass_headers"
CUTLASS_DIGEST = CUTLASS / "DIGEST"

CURE = "pip install 'atomr-cutlass[cu13]' (or [cu12], the driver's major version)"
ELSE = "or have the kernels built before: by a preset that holds them, or as a pack (atomr-cutlass build)"

# Of CUDA 13.2, whose declaration of std::tuple_size conflicts with that of CUTLASS 4.2.
TOO_NEW_CCCL = (3, 2)


@dataclass(frozen=True)
class Toolchain:
    """The places of the compiler and its headers, and their identities.

    `version` is NVRTC's, such as (13, 0); `build` its full name with the build number; `headers` has digests.
    """

    nvrtc: Path
    version: tuple[int, int]
    build: str
    include: tuple[Path, ...]
    headers: Mapping[str, str]

    @property
    def compiler(self) -> str:
        """NVRTC with its full version, such as `nvrtc 13.0.88`."""
        found = re.search(r"V(\d+\.\d+\.\d+)", self.build)
        return f"nvrtc {found[1] if found else '.'.join(map(str, self.version))}"


@functools.cache
def toolchain() -> Toolchain:
    """The toolchain of this process, found at the first call: in Python wheels, conda, or an installed toolkit."""
    library = _library()
    cccl, cudart = _cuda_headers(library)
    try:
        nvrtc = Nvrtc(str(library))
        version, build = nvrtc.version(), _build(nvrtc)
    except (OSError, AttributeError, RuntimeError) as error:
        raise DeviceUnavailableError(f"NVRTC ({library}) does not start: {error}") from error
    _check_headers(cccl, cudart, version[0])
    return Toolchain(
        nvrtc=library,
        version=version,
        build=build,
        # From CUDA 13 on, CUTLASS includes <cccl/cuda/...>.
        include=(*cutlass_includes(), cccl, cccl.parent, cudart),
        headers={
            "cutlass": cutlass_digest(),
            "atomr_cutlass": headers.digest(OURS),
            # CCCL has thousands of files: the one with the version is hashed for all.
            "cccl": headers.digest(cccl / "cuda" / "std" / "__cccl"),
            "cuda": headers.digest(cudart, below=False),
        },
    )


def missing(component: str) -> DeviceUnavailableError:
    """The error for a missing part of the toolchain."""
    return DeviceUnavailableError(f"{component} is missing, so kernels cannot be compiled at run time: {CURE}; {ELSE}")


def _library() -> Path:
    from cuda import pathfinder

    try:
        return Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        import shutil  # imports bz2 and lzma, too slow for the package's own import

        # A toolkit unknown to the loader and CUDA_HOME: that of the nvcc on the PATH, else in usual folders.
        nvcc = shutil.which("nvcc")
        for root in (*([Path(nvcc).resolve().parents[1]] if nvcc else []), *DEFAULT_ROOTS):
            for pattern in ("lib64", "lib", "targets/*/lib"):
                found = sorted(root.glob(f"{pattern}/libnvrtc.so.1[23]"))
                if found:
                    return found[-1]
        raise missing("NVRTC") from error


def _cuda_headers(library: Path) -> tuple[Path, Path]:
    """The folders of CUDA's C++ headers and of its own: those beside NVRTC, else what pathfinder finds."""
    from cuda import pathfinder

    for root in library.resolve().parents:
        cudart = root / "include"
        if (cudart / "cuda.h").is_file():
            for cccl in (cudart / "cccl", cudart):
                if (cccl / "cuda" / "std").is_dir():
                    return cccl, cudart
    found = [pathfinder.find_nvidia_header_directory(name) for name in ("cccl", "cudart")]
    if None in found:
        raise missing("The folder of CUDA's headers")
    cccl, cudart = map(Path, found)
    return cccl, cudart


def cutlass_includes() -> tuple[Path, ...]:
    """The include folders of CUTLASS's headers and ours; warns if kernels compile more slowly with them."""
    try:
        found = headers.includes(CUTLASS, "nvrtc", ours=OURS)
    except headers.HeadersError as error:
        raise DeviceUnavailableError(f"{error}: reinstall atomr-cutlass with the CUTLASS it pins") from error
    if found.remark:
        warnings.warn(f"in {CUTLASS}, {found.remark}", RuntimeWarning, stacklevel=2)
    return found.folders


def check_compiles(key: KernelKey) -> None:
    """Raises UnsupportedError for a key that does not compile with the installed version of CUTLASS."""
    objection = headers.objection(key, _cutlass_version(CUTLASS))
    if objection:
        raise UnsupportedError(objection)


_cutlass_version = functools.cache(headers.cutlass_version)


def header_version(cccl: Path) -> tuple[int, int] | None:
    """Version of CUDA's C++ headers, that of CCCL; None if unknown."""
    found = defined(cccl / "cuda" / "std" / "__cccl" / "version.h", "CCCL_VERSION")
    return None if found is None else (found // 1000000, found // 1000 % 1000)


def _check_headers(cccl: Path, cudart: Path, major: int) -> None:
    cure = f"{CURE} brings the right ones; {ELSE}"
    version = header_version(cccl)
    if version is not None and version >= TOO_NEW_CCCL:
        raise DeviceUnavailableError(
            f"CUDA's C++ headers in {cccl} (CCCL {version[0]}.{version[1]}) are newer than CUTLASS 4.2 compiles with: "
            f"{cure}"
        )
    cuda = defined(cudart / "cuda.h", "CUDA_VERSION")
    if cuda is not None and cuda // 1000 != major:
        raise DeviceUnavailableError(
            f"CUDA's headers in {cudart} are of CUDA {cuda // 1000} and NVRTC is of CUDA {major}: {cure}"
        )


def defined(path: Path, name: str) -> int | None:
    """The number as which a header defines a name; None if it does not."""
    try:
        found = re.search(rf"#\s*define\s+{name}\s+(\d+)", path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(found[1]) if found else None


@functools.cache
def cutlass_digest() -> str:
    """The digest of the CUTLASS headers that are installed with the package."""
    # Computed at installation: reading all 27 MB in every process would take longer than loading a kernel from disk.
    if CUTLASS_DIGEST.is_file():
        return CUTLASS_DIGEST.read_text(encoding="ascii").strip()
    return headers.digest(CUTLASS)


def _build(nvrtc: Nvrtc) -> str:
    """NVRTC's full name, whose build number appears only in PTX that it generates."""
    source = 'extern "C" __global__ void nothing() {}'
    made, log = nvrtc.compile("build", source, ["--gpu-architecture=compute_80"], "ptx")
    if made is None:
        raise RuntimeError(log)
    lines = made.decode("ascii", "replace").splitlines()
    return " ".join(line.strip("/ ") for line in lines if line.startswith("//") and line.strip("/ "))
