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

from atomr_cutlass.generator import headers as generator_headers
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
    assert (folder / "DIGEST").read_text(encoding="ascii").strip() == generator_headers.digest(folder)


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
    # Both forms of giving knobs, in the build folder that remembers the one before.
    given = {"PRESET": "none", "ARCHS": "80;90a", "OBJECTS": "", "BUDGET_MB": "0"}
    wheels.build(*(f"cmake.define.ATOMR_CUTLASS_{knob}={value}" for knob, value in given.items()), CMAKE_ARGS="")
    assert {knob: wheels.cached(f"ATOMR_CUTLASS_{knob}") for knob in given} == given
    wheels.build(**NO_KERNELS)
    assert {knob: wheels.cached(f"ATOMR_CUTLASS_{knob}") for knob in given} == {
        "PRESET": "none", "ARCHS": "", "OBJECTS": str(ROOT / "build" / "objects"), "BUDGET_MB": "",
    }  # fmt: skip


@dataclass
class Editable:
    """An editable installation of a copy of the sources, with CUTLASS headers of its own.

    Attributes:
        source: the copy.
        cutlass: the folder of the headers.
        python: the interpreter of its environment.
        env: the environment it was installed in.
    """

    source: Path
    cutlass: Path
    python: str
    env: dict[str, str]

    def ask(self, code: str) -> str:
        """The output of Python in a new process: importing rebuilds."""
        said = run(self.python, "-c", code, env=self.env, cwd=Path("/"))
        assert said.returncode == 0, output(said)
        return said.stdout.strip()

    def include(self) -> Path:
        """The installed headers, after a rebuild."""
        found = self.ask("import atomr_cutlass._core as c; print(c.__file__)")
        return Path(found).parent / "include"


@pytest.fixture(scope="module")
def editable(no_nvcc: dict[str, str], headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Editable:
    """An editable installation without kernels."""
    folder = tmp_path_factory.mktemp("editable")
    source, cutlass = folder / "source", folder / "cutlass"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    shutil.copytree(headers, cutlass)
    assert run(sys.executable, "-m", "venv", "--without-pip", folder / "venv").returncode == 0
    venv = str(folder / "venv" / "bin" / "python")
    # The build tools are those of the tests: through PYTHONPATH Python finds their modules, but no .pth file of theirs.
    env = no_nvcc | NO_KERNELS | {"PYTHONPATH": sysconfig.get_path("purelib")}
    env["CMAKE_ARGS"] += f" -DCUTLASS_DIR={cutlass}"
    pip = (venv, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--ignore-installed", "--editable")
    said = run(*pip, source, env=env)
    assert said.returncode == 0, output(said)
    return Editable(source, cutlass / "include", venv, env)


@pytest.mark.slow
def test_editable_installation_rebuilds_in_place(editable: Editable) -> None:
    source, ask = editable.source, editable.ask
    assert ask("import atomr_cutlass.generator as g; print(g.__file__)").startswith(str(source))
    assert ask("from atomr_cutlass.generator.render import *; import atomr_cutlass as ac; print(ac.kernels())") == "[]"

    module = source / "cpp" / "src" / "module.cpp"
    text = module.read_text()
    where = text.index("{", text.index("PYBIND11_MODULE(")) + 1
    variable = text[text.index("PYBIND11_MODULE(") :].partition(",")[2].partition(")")[0].partition(",")[0].strip()
    module.write_text(f'{text[:where]}\n  {variable}.attr("edited") = true;\n{text[where:]}')
    assert ask("import atomr_cutlass._core as c; print(c.edited)") == "True"


@pytest.mark.slow
def test_editable_installation_follows_its_headers(editable: Editable) -> None:
    """Edited headers are installed and identified anew, and removed ones removed: CUTLASS's and ours."""

    def look() -> tuple[str, set[str]]:
        include = editable.include()
        digest = (include / "cutlass_headers" / "DIGEST").read_text(encoding="ascii").strip()
        assert digest == generator_headers.digest(include / "cutlass_headers")
        return digest, {path.relative_to(include).as_posix() for path in include.rglob("*") if path.is_file()}

    header, ours = editable.cutlass / "cute" / "tensor.hpp", editable.source / "cpp" / "include" / "atomr_cutlass"
    digest, files = look()
    assert {"cutlass_headers/cute/tensor.hpp", "cutlass_headers/LICENSE.txt"} <= files

    # Dated as a file is that comes out of an archive.
    header.write_text("// edited\n")
    os.utime(header, (1.6e9, 1.6e9))
    edited, now = look()
    assert (edited != digest, now) == (True, files)
    assert (editable.include() / "cutlass_headers" / "cute" / "tensor.hpp").read_text() == "// edited\n"

    (header.parent / "added.hpp").touch()
    added, now = look()
    assert now - files == {"cutlass_headers/cute/added.hpp"}
    (header.parent / "added.hpp").unlink()
    (ours / "quantize.h").rename(ours / "renamed.h")
    removed, now = look()
    assert (added != edited, removed) == (True, edited)
    assert now ^ files == {"atomr_cutlass/quantize.h", "atomr_cutlass/renamed.h"}
