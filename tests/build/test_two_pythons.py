"""Bindings for two Python versions link the same objects: kernels are compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomr_cutlass.jit.toolchain import CUTLASS
from cmake_build import ROOT, run, tool

pybind11 = pytest.importorskip("pybind11")

ROWS = "import json, _core; print(json.dumps([row['name'] for row in _core.rows()]))"
THIS_AGAIN = pytest.param(Path(sys.executable), id="no-other-so-this-again")


def _others() -> list[Path]:
    """Interpreters of other versions that extensions can be built for: on PATH, or those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [*map(Path, os.get_exec_path()), *sorted(pyenv.glob("versions/*/bin"))]
    names = [f"python3.{minor}" for minor in range(10, 15) if minor != sys.version_info.minor]
    # A shim of pyenv's has no headers beside it.
    found = [(name, (folder / name).resolve()) for name in names for folder in folders if (folder / name).is_file()]
    return [path for name, path in found if (path.parents[1] / "include" / name / "Python.h").is_file()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("other", [pytest.param(path, id=path.name) for path in _others()[:1]] or [THIS_AGAIN])
def test_another_python_links_the_objects_of_the_first(tmp_path: Path, nvcc_env: dict[str, str], other: Path) -> None:
    """The test's id says which is the other."""
    objects = tmp_path / "objects"
    made: list[dict[str, int]] = []
    rows = []
    for number, python in enumerate([sys.executable, other]):
        folder = tmp_path / str(number)
        defines = {
            "ATOMR_CUTLASS_PRESET": "smoke", "ATOMR_CUTLASS_ARCHS": "80", "ATOMR_CUTLASS_KERNELS": "simt*align1",
            "ATOMR_CUTLASS_OBJECTS": objects, "ATOMR_CUTLASS_COMPILER_CACHE": "", "CUTLASS_DIR": CUTLASS,
            "CMAKE_CXX_FLAGS_RELEASE": "-O0", "CMAKE_MAKE_PROGRAM": tool("ninja"), "Python_EXECUTABLE": python,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }  # fmt: skip
        words = [f"-D{name}={value}" for name, value in defines.items()]
        for command in (
            [tool("cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *words],
            [tool("cmake"), "--build", str(folder), "--target", "_core"],
        ):
            said = subprocess.run(
                command, env=os.environ | nvcc_env, capture_output=True, text=True, check=False, timeout=1500
            )
            assert said.returncode == 0, said.stdout + said.stderr
        made.append({path.name: path.stat().st_mtime_ns for path in objects.iterdir()})
        (library,) = folder.rglob("_core*.so")
        listed = run(python, "-c", ROWS, env={"PYTHONPATH": str(library.parent)}, cwd=library.parent)
        assert listed.returncode == 0, listed.stderr
        rows.append(json.loads(listed.stdout))
    assert len(made[0]) == 1  # a unit, of the one kernel
    assert made[0] == made[1]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 1
