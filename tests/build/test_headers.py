"""The CUTLASS headers are fetched by hash; some are shadowed by headers of ours."""

import hashlib
import os
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from atomr_cutlass.jit.toolchain import CUTLASS, OURS
from cmake_build import ROOT, Build, compiled, output, run, said_by, tool
from generator import headers
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
    fetched = tmp_path / "build" / "cutlass" / "cutlass_library" / "source" / "include"
    assert f"headers in {fetched} under" in said
    assert "LICENSE.txt" in said
    assert (fetched / "cutlass" / "cutlass.h").is_file()
    assert (fetched / "cute" / "tensor.hpp").is_file()

    # Nothing is fetched twice; another pin is fetched at once.
    assert "Fetching" not in fetch(tmp_path)
    pin.write_text(right.replace(digest, "0" * 64))
    assert fetch(tmp_path).startswith("exit 1")


INCLUDER = """
cmake_minimum_required(VERSION 3.26)
project(includer LANGUAGES CXX)
include(cutlass/cutlass.cmake)
add_library(includer OBJECT main.cpp)
target_include_directories(includer PRIVATE "${ATOMR_CUTLASS_HEADERS}")
"""


def write_wheel(folder: Path, answer: int) -> str:
    """Writes a wheel of the pinned name with one header in it, dated 2025; returns its hash."""
    folder.mkdir(parents=True)
    info = "nvidia_cutlass-4.2.0.0.dist-info"
    files = {
        "cutlass_library/source/include/cutlass/cutlass.h": f"constexpr int answer = {answer};\n",
        f"{info}/licenses/LICENSE.txt": "a licence\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    wheel = folder / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2025, 9, 19, 20, 30, 0)), text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_changed_pin_makes_objects_stale(tmp_path: Path) -> None:
    """The headers of another pin are compiled, although their dates are those of their wheel."""
    shutil.copytree(ROOT / "third_party" / "cutlass", tmp_path / "cutlass")
    (tmp_path / "CMakeLists.txt").write_text(INCLUDER)
    (tmp_path / "main.cpp").write_text('#include "cutlass/cutlass.h"\nextern int const value = answer;\n')
    pin = tmp_path / "cutlass" / "PIN"
    objects = []
    for answer in (1234567891, 1987654321):
        digest = write_wheel(tmp_path / str(answer), answer)
        pin.write_text(f"nvidia-cutlass==4.2.0.0 --hash=sha256:{digest}\n")
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / str(answer)), "PIP_CONFIG_FILE": os.devnull}
        python, ninja = f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
        if not objects:
            said = run(
                tool("cmake"), "-G", "Ninja", python, ninja, "-S", tmp_path, "-B", tmp_path / "build", env=offline
            )
            assert said.returncode == 0, output(said)
        said = run(tool("cmake"), "--build", tmp_path / "build", env=offline)
        assert said.returncode == 0, output(said)
        made = next((tmp_path / "build").rglob("main.cpp.o")).read_bytes()
        objects.append(answer.to_bytes(4, "little") in made)
    assert objects == [True, True]


def set_version(headers: Path, major: int, minor: int) -> None:
    """Has a folder of headers be of another CUTLASS."""
    lines = f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 0\n"
    (headers / "cutlass" / "version.h").write_text(lines)


def test_shadows_are_those_of_the_version(build: Build, tmp_path: Path) -> None:
    checkout = tmp_path / "include"
    shutil.copytree(build.headers / "include", checkout)
    ours = ROOT / "cpp" / "include" / "atomr_cutlass"
    required, faster = ours / "shadows" / "cutlass_4" / "required", ours / "shadows" / "cutlass_4.2" / "faster"
    said = ""
    for minor, shadows in ((2, (required, faster)), (5, (required,))):
        set_version(checkout, 4, minor)
        process = build.try_configure(CUTLASS_DIR=str(checkout))
        said = output(process)
        assert process.returncode == 0, said
        assert ("compile more slowly" in said) is (faster not in shadows)
        includes = re.findall(r"^  INCLUDES = (.*)$", build.rules(), re.MULTILINE)
        kernels = [line for line in includes if f"-I{checkout}" in line]
        assert kernels
        expected = [f"-I{folder}" for folder in (*shadows, ours.parent, checkout)]
        assert all(line.split()[: len(expected)] == expected for line in kernels)
    assert "CUTLASS 4.5: kernels compile more slowly than with 4.2" in said
    blocks = {"ATOMR_CUTLASS_PRESET": "full", "ATOMR_CUTLASS_ARCHS": "90a", "ATOMR_CUTLASS_KERNELS": "block_scaled*64x"}
    refusal = build.refuse(CUTLASS_DIR=str(checkout), **blocks)
    assert re.search(
        r"block_scaled_gemm_\S+ does not compile with CUTLASS 4\.5, .*ATOMR_CUTLASS_EXCLUDE_KERNELS", refusal
    )

    # The version decides whenever it is built, not only when it is configured.
    set_version(checkout, 4, 2)
    build.make("build.ninja")
    assert f"-I{faster} " in build.rules()

    set_version(checkout, 4, 20)
    assert "CUTLASS 4.20; valid: 4.2, 4.4, 4.5" in build.refuse(CUTLASS_DIR=str(checkout))
    (checkout / "cutlass" / "version.h").unlink()
    assert "no cutlass/version.h" in build.refuse(CUTLASS_DIR=str(checkout))


SHADOWS = OURS / "shadows"


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.relative_to(SHADOWS).as_posix()) for p in sorted(SHADOWS.rglob("*")) if p.is_file()]
)
def test_a_shadow_does_not_compile_before_another_cutlass(path: Path, tmp_path: Path) -> None:
    version = path.relative_to(SHADOWS).parts[0].removeprefix("cutlass_")
    major, _, minor = version.partition(".")
    (tmp_path / "cutlass").mkdir()
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    others = [(int(major) + 1, int(minor or 2)), *([(int(major), int(minor) + 1)] if minor else [])]
    for of, complains in (((int(major), int(minor or 7)), False), *((other, True) for other in others)):
        set_version(tmp_path, *of)
        said = run(*shlex.split(compiler), "-std=c++17", "-E", "-x", "c++", f"-I{tmp_path}", "-o", os.devnull, path)
        assert (f"shadows that of CUTLASS {version}, and another CUTLASS is there" in output(said)) is complains, of


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
    options = ["-arch=sm_80", *(f"-I{folder}" for folder in headers.includes(CUTLASS, "nvcc", ours=OURS).folders)]
    on_host = {int(word) for word in said_by(compiled(LAYOUTS, tmp_path / "layouts", *options)).split()}
    ptx = compiled(LAYOUTS, tmp_path / "layouts.ptx", "-ptx", *options).read_text()
    on_device = {int(word) for word in re.findall(r"\b\d{4,5}\b", ptx[ptx.index("on_device") :])}
    assert len(on_host) == 13
    assert on_host == on_device
