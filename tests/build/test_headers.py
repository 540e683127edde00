"""The CUTLASS headers are fetched by hash; some are shadowed by headers of ours."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from atomr_cutlass.jit.toolchain import CUTLASS, OURS
from cmake_build import ROOT, Build, output, run, tool
from generator.toolchain import system_nvcc

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


def test_headers_of_one_release_are_shadowed(build: Build, tmp_path: Path) -> None:
    checkout = tmp_path / "include"
    shutil.copytree(build.headers / "include", checkout)
    shadow = f"-I{ROOT}/cpp/include/atomr_cutlass/shadow "
    for version, shadowed in ((None, False), ("4, 2", True), ("4, 20", False), ("5, 2", False)):
        if version:
            major, minor = version.split(", ")
            lines = f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 0\n"
            (checkout / "cutlass" / "version.h").write_text(lines)
        build.configure(CUTLASS_DIR=str(checkout))
        includes = re.findall(r"^  INCLUDES = (.*cutlass_headers|.*/include.*)$", build.rules(), re.MULTILINE)
        kernels = [line for line in includes if f"-I{checkout}" in line]
        assert kernels
        assert all(line.startswith(shadow) is shadowed for line in kernels), version


LAYOUTS = """
#include <cute/tensor.hpp>
#include <cstddef>
#include <cstdio>
using namespace cute;
using Strides = tuple<int64_t, C<1>, int64_t>;
using Nested = tuple<tuple<C<1>, C<2>>, tuple<int, tuple<C<1>, C<2>>>, C<1>, int64_t>;
using Repeated = tuple<C<1>, tuple<C<1>, int>>;  // the same empty element twice, at one offset
using Static = tuple<tuple<C<1>, C<2>>, tuple<C<1>, C<2>>>;
struct Params {
  Static a; int b; Nested c; Repeated d; C<1> e; tuple<C<1>> f; Strides g; Shape<int, int, int, int> h;
};
#define SIZES \\
  sizeof(Strides), sizeof(Nested), sizeof(Repeated), sizeof(Static), sizeof(Params), alignof(Params), \\
  offsetof(Params, b), offsetof(Params, c), offsetof(Params, d), offsetof(Params, e), offsetof(Params, f), \\
  offsetof(Params, g), offsetof(Params, h)
// Made distinct, so that each is a number in the machine's code.
__global__ void on_device(size_t* out) {
  size_t const sizes[] = {SIZES};
  for (int i = 0; i < 13; ++i) out[i] = 1000 * (i + 1) + sizes[i];
}
int main() {
  size_t const sizes[] = {SIZES};
  for (int i = 0; i < 13; ++i) std::printf("%zu ", 1000 * (i + 1) + sizes[i]);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(not system_nvcc(), reason="no nvcc")
def test_tuples_lie_alike_on_host_and_device(tmp_path: Path) -> None:
    # A kernel's parameters are laid out by the host's compiler and read by nvcc's.
    nvcc = system_nvcc()
    assert nvcc
    source = tmp_path / "layouts.cu"
    source.write_text(LAYOUTS)
    options = ("-w", "-std=c++17", "-arch=sm_80", "--expt-relaxed-constexpr", f"-I{OURS / 'shadow'}", f"-I{CUTLASS}")
    for made in (("-o", tmp_path / "layouts"), ("-ptx", "-o", tmp_path / "layouts.ptx")):
        said = run(nvcc, *options, source, *made)
        assert said.returncode == 0, output(said)
    on_host = {int(word) for word in run(tmp_path / "layouts").stdout.split()}
    ptx = (tmp_path / "layouts.ptx").read_text()
    on_device = {int(word) for word in re.findall(r"\b\d{4,5}\b", ptx[ptx.index("on_device") :])}
    assert len(on_host) == 13
    assert on_host == on_device
