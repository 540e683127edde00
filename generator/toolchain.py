"""The CUDA compiler of a build, its target GPUs, and the number of parallel jobs.

CMake uses the command line below. scikit-build-core uses the hooks of a dynamic-metadata provider, through which nvcc
becomes a build requirement only on machines without one.

Environment: `ATOMR_CUTLASS_NVCC=pypi` ignores every installed toolkit, for a build that is independent of the machine;
`CUDACXX` names a compiler, which is used unconditionally.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import machine
from .archs import SmArch
from .machine import DEFAULT_ROOTS

# Only the meta package fixes versions that belong together; nvcc's own wheel would take any ptxas and headers.
PYPI_TOOLKIT = "cuda-toolkit[nvcc,cccl,cudart,nvrtc]==13.0.*"
PYPI_FOLDER = "cu13"

# The first toolkit with every architecture of `SmArch`; an older one on the PATH is ignored.
MINIMUM_VERSION = (12, 8)

# The archs of a build on a machine without a GPU: the most common data-center generations.
FALLBACK_ARCHS = (SmArch.SM80, SmArch.SM90A)

NO_NVCC = (
    "No CUDA compiler: neither an installed nvcc (12.8 or later, on PATH, in CUDA_HOME or in /usr/local/cuda) nor the "
    f"one from PyPI ({PYPI_TOOLKIT}) was found. Install either, or build without compiled kernels, which needs none: "
    'CMAKE_ARGS="-DATOMR_CUTLASS_PRESET=none"'
)


class ToolchainError(Exception):
    """No usable compiler; the message names a package that supplies one."""


def nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    """The release that an nvcc reports, or None if it does not run."""
    try:
        said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def system_nvcc(environ: Mapping[str, str] = os.environ) -> Path | None:
    """An installed nvcc that is recent enough, or None."""
    source = environ.get("ATOMR_CUTLASS_NVCC", "system")
    if source not in ("system", "pypi"):
        raise ToolchainError(f"ATOMR_CUTLASS_NVCC={source!r}; valid: system, pypi")
    if source == "pypi":
        return None
    places = [Path(environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    places += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    places += [root / "bin" for root in DEFAULT_ROOTS]
    for place in places:
        nvcc = place / "nvcc"
        if os.access(nvcc, os.X_OK) and (nvcc_version(nvcc) or (0, 0)) >= MINIMUM_VERSION:
            return nvcc
    return None


def pypi_toolkit() -> Path | None:
    """The folder of the toolkit that PyPI's wheels installed beside this Python, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    roots = [Path(folder) / PYPI_FOLDER for folder in folders]
    return next((root for root in roots if (root / "bin" / "nvcc").is_file()), None)


def stage_toolkit(root: Path, stage: Path) -> Path:
    """Lays PyPI's toolkit out as an installed one and returns its nvcc.

    The wheels have neither `lib64` nor `libcudart.so`, without which CMake's CUDA language does not start. Files are
    hard links (copies across file systems), since an isolated build environment is gone after the build while the
    build folder, and the objects that depend on these headers, stay for the next one.
    """
    # NVRTC is half of the bytes, and not used in builds.
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith("libnvrtc")]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}:{path.stat().st_size}\n".encode())
    stamp = stage / "STAGED"
    nvcc = stage / "bin" / "nvcc"
    # An unchanged toolkit keeps its staged files, so that their times do not make every kernel stale.
    if stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return nvcc
    shutil.rmtree(stage, ignore_errors=True)
    for path in files:
        target = stage / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:
            shutil.copy2(path, target)
    (stage / "lib64").symlink_to("lib")
    for library in (stage / "lib").glob("libcudart.so.*"):
        (stage / "lib" / "libcudart.so").symlink_to(library.name)
    stamp.write_text(digest.hexdigest())
    return nvcc


def find_nvcc(stage: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The nvcc to build with: the one named, an installed one, or PyPI's laid out in `stage`."""
    named = shlex.split(environ.get("CUDACXX", ""))
    if named:
        found = shutil.which(named[0], path=environ.get("PATH"))
        if found is None:
            raise ToolchainError(f"CUDACXX names {named[0]!r}, which is not an executable")
        return Path(found)
    nvcc = system_nvcc(environ)
    if nvcc is not None:
        return nvcc
    root = pypi_toolkit()
    if root is None:
        raise ToolchainError(NO_NVCC)
    return stage_toolkit(root, stage)


def build_requirements(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The build's requirements from PyPI: a toolkit if kernels are to be compiled and there is no compiler."""
    defined = cmake_defines(environ.get("CMAKE_ARGS", ""))
    if defined.get("ATOMR_CUTLASS_PRESET") == "none" and not defined.get("ATOMR_CUTLASS_KEYS"):
        return []
    # CMake uses a named compiler or reports an error; it is never silently replaced.
    if environ.get("CUDACXX") or "CMAKE_CUDA_COMPILER" in defined or system_nvcc(environ):
        return []
    return [PYPI_TOOLKIT]


def cmake_defines(arguments: str) -> dict[str, str]:
    """The `-DNAME[:TYPE]=VALUE` definitions in a CMAKE_ARGS string."""
    defined = {}
    words = iter(shlex.split(arguments))
    for word in words:
        if word.startswith("-D"):
            name, _, value = (word[2:] or next(words, "")).partition("=")
            defined[name.partition(":")[0]] = value
    return defined


def native_archs() -> list[SmArch]:
    """The targets of the GPUs in this machine, without repetition; none without a driver."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    archs = []
    for capability in sorted(set(re.findall(r"^\s*(\d+)\.(\d+)\s*$", said, re.MULTILINE))):
        arch = SmArch.from_capability(int(capability[0]), int(capability[1]))
        if arch is None:
            print(f"no kernels exist for compute capability {'.'.join(capability)}: GPU left out", file=sys.stderr)
        else:
            archs.append(arch)
    return archs


def default_archs() -> str:
    """The default of `ATOMR_CUTLASS_ARCHS`: the GPUs present, else the fallback."""
    return ";".join(arch.target for arch in native_archs() or FALLBACK_ARCHS)


def archs_of_cmake(said: str, archs: str = "") -> str:
    """The archs that CMAKE_CUDA_ARCHITECTURES asks for, in the words of ATOMR_CUTLASS_ARCHS.

    Args:
        said: its value: `native`, or targets such as `80;90a-real`; where nothing (`OFF`) is said, `default_archs`.
        archs: ATOMR_CUTLASS_ARCHS, where that is given too.

    Raises:
        ToolchainError: it asks for archs that ATOMR_CUTLASS_ARCHS cannot name, or for other archs than that does.
    """
    given = f"CMAKE_CUDA_ARCHITECTURES={said!r}"
    try:
        named = [SmArch.parse(word.strip().removesuffix("-real")) for word in said.split(";") if word.strip()]
    except ValueError as error:
        if said.upper() in ("OFF", "FALSE", "NO", "0"):
            return archs or default_archs()
        if said != "native":
            raise ToolchainError(
                f"{given} cannot be honoured ({error}): leave it out, and say ATOMR_CUTLASS_ARCHS and ATOMR_CUTLASS_PTX"
            ) from error
        named = native_archs()
        if not named:
            raise ToolchainError(f"{given}, and there is no GPU here: say ATOMR_CUTLASS_ARCHS") from error
    if not named:
        return archs or default_archs()
    if archs and {SmArch.parse(word) for word in archs.split(";") if word.strip()} != set(named):
        raise ToolchainError(f"{given} and ATOMR_CUTLASS_ARCHS={archs!r} differ: leave one of them out")
    return archs or ";".join(arch.target for arch in dict.fromkeys(named))


def parallel_jobs(job_mb: int) -> int:
    """The number of parallel compilations of `job_mb` that fit this machine's cores and free memory; at least one."""
    return machine.jobs(job_mb << 20)


def get_requires_for_dynamic_metadata(_settings: Mapping[str, object]) -> list[str]:
    """Hook of scikit-build-core's dynamic-metadata providers: further build requirements."""
    return build_requirements()


def dynamic_metadata(_settings: Mapping[str, object], _project: Mapping[str, object]) -> dict[str, object]:
    """Mandatory hook of providers; this one only supplies build requirements."""
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the answer to one of the build's queries."""
    parser = argparse.ArgumentParser(prog="python -m generator.toolchain", description=main.__doc__)
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--archs", metavar="ARCHS", help="archs to build for: these, when there are any")
    parser.add_argument("--cmake-archs", default="", help="with --archs: CMAKE_CUDA_ARCHITECTURES")
    question.add_argument("--nvcc", metavar="STAGE", type=Path, help="nvcc to use; PyPI's is laid out in STAGE")
    question.add_argument("--jobs", metavar="MB", type=int, help="how many compiles of MB each fit at once")
    question.add_argument("--requires", action="store_true", help="further build requirements, one a line")
    given = parser.parse_args(arguments)
    try:
        if given.archs is not None:
            print(archs_of_cmake(given.cmake_archs, given.archs))
        elif given.nvcc:
            print(find_nvcc(given.nvcc))
        elif given.jobs:
            print(parallel_jobs(given.jobs))
        else:
            print("\n".join(build_requirements()))
    except (ToolchainError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
