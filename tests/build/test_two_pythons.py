"""Bindings for two Python versions link the same objects: kernels are compiled once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atomr_cutlass.jit.toolchain import CUTLASS
from cmake_build import ROOT, run, tool

pybind11 = pytest.importorskip("pybind11")

VERSION = 'import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path("include"))'
ROWS = "import json, _core; print(json.dumps([row['name'] for row in _core.rows()]))"


def _other() -> str:
    """An interpreter of another version that extensions can be built for; this one where there is none."""
    for minor in range(10, 15):
        for folder in os.get_exec_path():
            python = shutil.which(f"python3.{minor}", path=folder)
            said = run(python, "-c", VERSION) if python and minor != sys.version_info.minor else None
            if said and said.returncode == 0 and Path(said.stdout.split()[2], "Python.h").is_file():
                return str(python)
    return sys.executable


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_another_python_links_the_objects_of_the_first(tmp_path: Path, nvcc_env: dict[str, str]) -> None:
    objects = tmp_path / "objects"
    made: list[dict[str, int]] = []
    rows = []
    for number, python in enumerate([sys.executable, _other()]):
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
