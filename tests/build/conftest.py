"""Build folders, toolkits and stand-ins for tools."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cmake_build import Build, run
from generator import toolchain


@pytest.fixture(scope="session")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUTLASS checkout, as far as configuring looks at it."""
    checkout = tmp_path_factory.mktemp("cutlass")
    for header in ("cutlass/cutlass.h", "cute/tensor.hpp"):
        (checkout / "include" / header).parent.mkdir(parents=True)
        (checkout / "include" / header).touch()
    version = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    (checkout / "include" / "cutlass" / "version.h").write_text(version)
    (checkout / "LICENSE.txt").write_text("a licence\n")
    return checkout


@pytest.fixture(scope="session")
def pypi_python(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python finds PyPI's CUDA toolkit, and the build looks for no other."""
    site = tmp_path_factory.mktemp("toolkit")
    pip = run(sys.executable, "-m", "pip", "install", "--quiet", "--target", site, toolchain.PYPI_TOOLKIT)
    assert pip.returncode == 0, pip.stderr
    return {"PYTHONPATH": str(site), "ATOMR_CUTLASS_NVCC": "pypi", "CUDACXX": ""}


@pytest.fixture(scope="session")
def nvcc_env(request: pytest.FixtureRequest) -> dict[str, str]:
    """The variables with which the build finds an nvcc: none where one is installed."""
    if toolchain.system_nvcc():
        return {}
    return request.getfixturevalue("pypi_python")


@pytest.fixture(scope="session")
def shared_build(tmp_path_factory: pytest.TempPathFactory, headers: Path, nvcc_env: dict[str, str]) -> Build:
    """One build folder that most tests configure again, since finding the compilers takes seconds."""
    return Build(tmp_path_factory.mktemp("shared"), headers, nvcc_env)


@pytest.fixture
def build(shared_build: Build) -> Build:
    """The shared build folder."""
    return shared_build


@pytest.fixture
def new_build(tmp_path: Path, headers: Path, nvcc_env: dict[str, str]) -> Build:
    """A build folder of its own."""
    return Build(tmp_path / "build", headers, nvcc_env)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes executables into a folder: script(name, what it does in sh) returns the folder."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, body: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return folder

    return write
