"""The CUTLASS headers are fetched by hash."""

import shutil
import sys
from pathlib import Path

from cmake_build import ROOT, output, run, tool

PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(fetch LANGUAGES NONE)
include(cutlass/cutlass.cmake)
message(STATUS "headers in ${ATOMR_CUTLASS_HEADERS} under ${ATOMR_CUTLASS_HEADERS_LICENSE}")
"""


def fetch(project: Path) -> str:
    """Configures a project that only fetches the headers; returns what was said, with the exit status."""
    python = f"-DPython_EXECUTABLE={sys.executable}"
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    said = run(tool("cmake"), "-G", "Ninja", python, ninja, "-S", project, "-B", project / "build")
    return f"exit {said.returncode}: {output(said)}"


def test_pin(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "third_party" / "cutlass", tmp_path / "cutlass")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    pin = tmp_path / "cutlass" / "PIN"
    right = pin.read_text()
    _, _, digest = right.strip().rpartition(":")

    pin.write_text(right.replace(digest, "0" * 64))
    said = fetch(tmp_path)
    assert said.startswith("exit 1")
    assert "HASH" in said
    assert "CUTLASS_DIR" in said

    pin.write_text(right)
    said = fetch(tmp_path)
    assert said.startswith("exit 0")
    headers = tmp_path / "build" / "cutlass" / "cutlass_library" / "source" / "include"
    assert f"headers in {headers} under" in said
    assert "LICENSE.txt" in said
    assert (headers / "cutlass" / "cutlass.h").is_file()
    assert (headers / "cute" / "tensor.hpp").is_file()

    # Nothing is fetched twice; another pin is fetched at once.
    assert "Fetching" not in fetch(tmp_path)
    pin.write_text(right.replace(digest, "0" * 64))
    assert fetch(tmp_path).startswith("exit 1")
