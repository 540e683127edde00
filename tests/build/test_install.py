"""Wheels and editable installations, built as pip builds them; preset none, on a machine that has no nvcc."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from atomr_cutlass.generator import headers
from cmake_build import ROOT, output, path_without, run

# Optimization would double the time and change nothing that is looked at here.
NO_KERNELS = {"CMAKE_ARGS": "-DATOMR_CUTLASS_PRESET=none -DCMAKE_CXX_FLAGS_RELEASE=-O0"}


@dataclass
class Wheels:
    """Builds wheels in one build folder, as repeated installations do."""

    folder: Path
    env: dict[str, str]

    def build(self, *settings: str, **env: str) -> Path:
        """Builds a wheel with pip's --config-settings."""
        shutil.rmtree(self.folder / "wheel", ignore_errors=True)
        options = [f"-Cbuild-dir={self.folder / 'build'}", *(f"-C{setting}" for setting in settings)]
        pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
        said = run(*pip, *options, "--wheel-dir", self.folder / "wheel", ROOT, env=self.env | env)
        assert said.returncode == 0, said.stdout + said.stderr
        return next((self.folder / "wheel").glob("*.whl"))

    def cached(self, name: str) -> str:
        """The value of a knob that CMake remembers."""
        lines = (self.folder / "build" / "CMakeCache.txt").read_text().splitlines()
        return next(line.partition("=")[2] for line in lines if line.startswith(f"{name}:"))


@pytest.fixture(scope="module")
def no_nvcc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine without nvcc."""
    path = path_without(tmp_path_factory.mktemp("tools") / "bin", "nvcc")
    return {"PATH": path, "ATOMR_CUTLASS_NVCC": "pypi", "CUDACXX": "", "CUDA_HOME": "", "CUDA_PATH": ""}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, no_nvcc: dict[str, str]) -> Wheels:
    """A build folder for wheels."""
    return Wheels(tmp_path_factory.mktemp("wheels"), no_nvcc)


@pytest.fixture(scope="module")
def wheel(wheels: Wheels) -> Path:
    """A wheel without kernels."""
    return wheels.build(**NO_KERNELS)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python finds this wheel's package and no other of the name."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Run with -S, Python reads no .pth file: an editable installation beside this one stays out of it.
    return {"PYTHONPATH": f"{site}{os.pathsep}{sysconfig.get_path('purelib')}"}


def python(code: str, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code somewhere else than in the repository."""
    return run(sys.executable, *options, "-c", code, env=env, cwd=Path("/"))


def test_wheel_has_all_that_compiling_at_run_time_takes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name.removeprefix("atomr_cutlass/") for name in names if name.startswith("atomr_cutlass/")}
    assert {"__init__.py", "py.typed", "_core.pyi", "generator/__init__.py", "generator/render.py"} <= package
    for folder in ("generator/templates", "include/cutlass_headers/cute", "include/cutlass_headers/cutlass"):
        assert any(name.startswith(f"{folder}/") for name in package), folder
    for path in (ROOT / "cpp" / "include").rglob("*"):
        assert path.is_dir() or path.relative_to(ROOT / "cpp").as_posix() in package
    assert "include/cutlass_headers/LICENSE.txt" in package
    assert sum(name.startswith("_core.") and name.endswith(".so") for name in package) == 1
    assert not any("__pycache__" in name for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    templates = {path.name for path in (ROOT / "generator" / "templates").iterdir()}
    assert {name.rpartition("/")[2] for name in package if name.startswith("generator/templates/")} == templates


def test_wheel_imports_without_a_toolkit_and_has_no_kernels(installed: dict[str, str], no_nvcc: dict[str, str]) -> None:
    said = python("import atomr_cutlass as ac; print(ac.kernels())", no_nvcc | installed, "-S")
    assert (said.stdout.strip(), said.returncode) == ("[]", 0), output(said)


def test_the_digest_of_the_headers_is_that_of_the_headers(installed: dict[str, str]) -> None:
    folder = Path(installed["PYTHONPATH"].partition(os.pathsep)[0]) / "atomr_cutlass" / "include" / "cutlass_headers"
    assert (folder / "DIGEST").read_text(encoding="ascii").strip() == headers.digest(folder)


def test_installed_generator_finds_its_templates(installed: dict[str, str]) -> None:
    said = run(
        *(
            sys.executable,
            "-S",
            "-m",
            "atomr_cutlass.generator",
            "--preset",
            "smoke",
            "--archs",
            "80",
            "--list",
            "--json",
        ),
        env=installed,
        cwd=Path("/"),
    )
    assert said.returncode == 0, output(said)
    assert json.loads(said.stdout)["kernels"]


def test_extension_links_no_driver(installed: dict[str, str]) -> None:
    core = next((Path(installed["PYTHONPATH"].partition(os.pathsep)[0]) / "atomr_cutlass").glob("_core.*.so"))
    said = run("readelf", "--dynamic", core)
    assert "libstdc++" in said.stdout
    assert "libcuda" not in said.stdout


@pytest.mark.usefixtures("wheel")
def test_a_knob_that_is_not_given_has_its_default_again(wheels: Wheels) -> None:
    # Both ways of giving knobs, in the build folder that remembers the one before.
    wheels.build("cmake.define.ATOMR_CUTLASS_PRESET=none", "cmake.define.ATOMR_CUTLASS_ARCHS=80;90a", CMAKE_ARGS="")
    assert wheels.cached("ATOMR_CUTLASS_PRESET") == "none"
    assert wheels.cached("ATOMR_CUTLASS_ARCHS") == "80;90a"
    wheels.build(**NO_KERNELS)
    assert wheels.cached("ATOMR_CUTLASS_ARCHS") == ""


@pytest.mark.slow
def test_editable_installation_rebuilds_in_place(no_nvcc: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv").returncode == 0
    venv = str(tmp_path / "venv" / "bin" / "python")
    # The build tools are those of the tests: through PYTHONPATH Python finds their modules, but no .pth file of theirs.
    env = no_nvcc | NO_KERNELS | {"PYTHONPATH": sysconfig.get_path("purelib")}
    pip = (venv, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--ignore-installed", "--editable")
    said = run(*pip, source, env=env)
    assert said.returncode == 0, output(said)

    def ask(code: str) -> str:
        said = run(venv, "-c", code, env=env, cwd=Path("/"))
        assert said.returncode == 0, output(said)
        return said.stdout.strip()

    assert ask("import atomr_cutlass.generator as g; print(g.__file__)").startswith(str(source))
    assert ask("from atomr_cutlass.generator.render import *; import atomr_cutlass as ac; print(ac.kernels())") == "[]"

    module = source / "cpp" / "src" / "module.cpp"
    text = module.read_text()
    where = text.index("{", text.index("PYBIND11_MODULE(")) + 1
    variable = text[text.index("PYBIND11_MODULE(") :].partition(",")[2].partition(")")[0].partition(",")[0].strip()
    module.write_text(f'{text[:where]}\n  {variable}.attr("edited") = true;\n{text[where:]}')
    assert ask("import atomr_cutlass._core as c; print(c.edited)") == "True"
