"""Every build knob: what it selects, and what a wrong value is answered with."""

import ctypes
import hashlib
import os
import re
import sys
from pathlib import Path

import pytest

from atomr_cutlass import _core
from cmake_build import ROOT, Build, output, path_without, run, tool
from generator import elf, emit, headers
from generator.archs import SmArch
from generator.key_file import line
from generator.matrix import expand
from generator.seal import unseal


def archs(cells: list[str]) -> set[str]:
    return {cell.partition("/")[0] for cell in cells}


@pytest.mark.parametrize(
    ("knob", "value", "valid"),
    [
        ("ATOMR_CUTLASS_PRESET", "huge", ["none", "smoke", "default", "full"]),
        ("ATOMR_CUTLASS_ARCHS", "75", ["80", "86", "89", "90a"]),
        ("ATOMR_CUTLASS_ARCHS", "80;90", ["90a"]),
        ("ATOMR_CUTLASS_PTX", "75", ["80", "89"]),
        ("ATOMR_CUTLASS_PTX", "86", ["80", "90a"]),
        ("ATOMR_CUTLASS_OPS", "convolve", ["gemm"]),
        ("ATOMR_CUTLASS_DTYPES", "f12", ["f16", "bf16", "f32", "f64"]),
        ("ATOMR_CUTLASS_DTYPES", "bf16;f12", ["f16", "bf16", "f32", "f64"]),
        ("ATOMR_CUTLASS_KERNELS", "no*such*kernel", ["no*such*kernel"]),
        ("ATOMR_CUTLASS_KERNEL_FILTER_FILE", "/nonexistent/filter", ["/nonexistent/filter"]),
        ("ATOMR_CUTLASS_EXCLUDE_KERNELS", "*", []),
        ("ATOMR_CUTLASS_KEYS", "/nonexistent/keys", ["/nonexistent/keys"]),
    ],
)
def test_wrong_value_stops_and_names_the_valid_ones(build: Build, knob: str, value: str, valid: list[str]) -> None:
    said = build.refuse(**{knob: value})
    for word in valid:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said), said


def test_archs(build: Build) -> None:
    assert archs(build.configure(ATOMR_CUTLASS_ARCHS="80;90a")) == {"sm_80", "sm_90a"}
    assert archs(build.configure(ATOMR_CUTLASS_ARCHS="89")) == {"sm_89"}


def test_archs_default_to_the_gpus_present(new_build: Build, script) -> None:
    folder = script("nvidia-smi", "printf '8.9\\n8.9\\n7.5\\n'")
    said = new_build.try_configure(
        ATOMR_CUTLASS_ARCHS="", ATOMR_CUTLASS_PRESET="none", env={"PATH": f"{folder}:{os.environ['PATH']}"}
    )
    assert "archs 89)" in output(said)
    assert "7.5" in output(said)


def test_archs_default_without_a_gpu(new_build: Build, script) -> None:
    folder = script("nvidia-smi", "exit 9")
    said = new_build.try_configure(
        ATOMR_CUTLASS_ARCHS="", ATOMR_CUTLASS_PRESET="none", env={"PATH": f"{folder}:{os.environ['PATH']}"}
    )
    assert "archs 80;90a)" in output(said)


def test_cmake_cuda_architectures_is_honoured_or_refused(new_build: Build) -> None:
    for said, archs_knob, wanted in (("89;90a-real", "", "89;90a"), ("80", "80", "80"), ("OFF", "86", "86")):
        process = new_build.try_configure(
            ATOMR_CUTLASS_ARCHS=archs_knob, ATOMR_CUTLASS_PRESET="none", CMAKE_CUDA_ARCHITECTURES=said
        )
        assert f"archs {wanted})" in output(process), said
    for said, archs_knob, why in (
        ("90", "", "say '90a'"),
        ("80-virtual", "", "say ATOMR_CUTLASS_ARCHS and ATOMR_CUTLASS_PTX"),
        ("all-major", "", "cannot be honoured"),
        ("89", "80;90a", "CMAKE_CUDA_ARCHITECTURES='89' and ATOMR_CUTLASS_ARCHS='80;90a' differ"),
    ):
        complaint = new_build.refuse(ATOMR_CUTLASS_ARCHS=archs_knob, CMAKE_CUDA_ARCHITECTURES=said)
        assert why in complaint, complaint


def test_cudaarchs_of_the_environment_is_honoured(new_build: Build) -> None:
    environment = {"CUDAARCHS": "86-real"}
    said = new_build.try_configure(ATOMR_CUTLASS_ARCHS="", ATOMR_CUTLASS_PRESET="none", env=environment)
    assert "archs 86)" in output(said)


def test_knobs_that_are_none_stop_once_and_name_the_nearest(new_build: Build) -> None:
    for wrong, nearest in (
        ("ATOMR_CUTLASS_PRESTE", "did you mean ATOMR_CUTLASS_PRESET?"),
        ("ATOMR_CUTLASS_ARCH", "did you mean ATOMR_CUTLASS_ARCHS?"),
        ("ATOMR_CUTLASS_JIT", "is a variable of the environment"),
    ):
        said = new_build.refuse(ATOMR_CUTLASS_PRESET="none", **{wrong: "full"})
        assert nearest in said, said
        assert new_build.try_configure(ATOMR_CUTLASS_PRESET="none").returncode == 0
    said = output(new_build.try_configure(ATOMR_CUTLASS_PRESET="none", env={"ATOMR_CUTLASS_OPS": "gemm"}))
    assert "ATOMR_CUTLASS_OPS is a knob of the build, and not read from the environment" in said


def test_preset_none_needs_no_toolkit(new_build: Build) -> None:
    # An nvcc that is not there would stop any build that asks for one.
    said = new_build.try_configure(ATOMR_CUTLASS_PRESET="none", env={"CUDACXX": "/nonexistent/nvcc"})
    assert said.returncode == 0, said.stderr
    assert "Kernels: 0 (preset none" in said.stdout
    assert "CUDA" not in said.stdout
    assert new_build.cells() == []


def test_ptx_is_compiled_for_the_archs_named(build: Build) -> None:
    build.configure(ATOMR_CUTLASS_PTX="")
    assert "code=[compute" not in build.rules()
    build.configure(ATOMR_CUTLASS_PTX="80")
    codes = set(re.findall(r"--generate-code=arch=(compute_\w+),code=\[([\w,]+)\]", build.rules()))
    assert codes == {("compute_80", "sm_80"), ("compute_80", "compute_80"), ("compute_90a", "sm_90a")}


def test_ops(build: Build) -> None:
    every = build.configure()
    assert build.configure(ATOMR_CUTLASS_OPS="gemm") == [cell for cell in every if "gemm" in cell]


def test_dtypes(build: Build) -> None:
    every = build.configure()
    bf16 = build.configure(ATOMR_CUTLASS_DTYPES="bf16")
    assert bf16
    assert set(bf16) < set(every)
    assert all("bf16" in cell for cell in bf16)
    assert set(build.configure(ATOMR_CUTLASS_DTYPES="bf16;f32")) > set(bf16)


def test_kernels(build: Build) -> None:
    every = build.configure()
    chosen = build.configure(ATOMR_CUTLASS_KERNELS="simt*align1,pingpong")
    assert chosen == [cell for cell in every if re.search(r"simt.*align1|pingpong", cell)]
    assert 0 < len(chosen) < len(every)


def test_kernel_filter_file(build: Build, tmp_path: Path) -> None:
    every = build.configure()
    rules = tmp_path / "filter"
    rules.write_text("simt_f32\nwarpspecialized_(pingpong|cooperative)\n")
    chosen = build.configure(ATOMR_CUTLASS_KERNEL_FILTER_FILE=str(rules))
    assert chosen == [cell for cell in every if re.search("simt_f32|pingpong|cooperative", cell)]

    # The file is an input of the build: editing it emits again.
    rules.write_text("simt_f32\n")
    build.make("build.ninja")
    assert build.cells() == [cell for cell in every if "simt_f32" in cell]


def test_a_filter_that_is_no_regular_expression_stops(build: Build, tmp_path: Path) -> None:
    rules = tmp_path / "filter"
    rules.write_text("simt(\n")
    assert str(rules) in build.refuse(ATOMR_CUTLASS_KERNEL_FILTER_FILE=str(rules))


def test_exclude_kernels(build: Build) -> None:
    every = build.configure()
    rest = build.configure(ATOMR_CUTLASS_EXCLUDE_KERNELS="simt,pingpong")
    assert rest == [cell for cell in every if not re.search("simt|pingpong", cell)]
    assert 0 < len(rest) < len(every)


def test_cutlass_dir(build: Build, headers: Path, tmp_path: Path) -> None:
    build.configure(CUTLASS_DIR=str(headers))
    assert f"-I{headers}/include" in build.rules()
    build.configure(CUTLASS_DIR=str(headers / "include"))
    assert f"-I{headers}/include" in build.rules()
    assert "cutlass/cutlass.h" in build.refuse(CUTLASS_DIR=str(tmp_path))


def test_every_knob_is_documented(build: Build) -> None:
    build.configure()
    cache = run(tool("cmake"), "-LH", "-N", build.folder).stdout
    for knob in (*re.findall(r"^ATOMR_CUTLASS_\w+", cache, re.MULTILINE), "CUTLASS_DIR"):
        assert re.search(rf"^// \w.*\n{knob}:", cache, re.MULTILINE), knob


def test_pack_names(build: Build) -> None:
    said = build.refuse(ATOMR_CUTLASS_PACK="a/b")
    assert "letters, digits" in said
    said = build.refuse(ATOMR_CUTLASS_PACK="mine", ATOMR_CUTLASS_PRESET="none")
    assert "smoke, default, full" in said
    build.configure(ATOMR_CUTLASS_PACK="")


def test_a_pack_takes_the_license_of_a_checkout(new_build: Build, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "include").symlink_to(new_build.headers / "include")
    (checkout / "LICENSE.txt").write_text("of CUTLASS")
    new_build.configure(ATOMR_CUTLASS_PACK="mine", CUTLASS_DIR=str(checkout))
    assert f"license={checkout}/LICENSE.txt" in new_build.rules()


@pytest.mark.slow
def test_pack_exports_one_function(new_build: Build, tmp_path: Path) -> None:
    pack = {"ATOMR_CUTLASS_PACK": "mine", "ATOMR_CUTLASS_ARCHS": "80", "ATOMR_CUTLASS_KERNELS": "simt*align1"}
    assert len(new_build.configure(CUTLASS_DIR="", **pack)) == 1
    new_build.make("atomr_cutlass_pack")
    library = new_build.folder / "mine.so"
    symbols = run("nm", "--dynamic", "--defined-only", library).stdout.split("\n")
    assert [line.split()[-1] for line in symbols if line] == ["atomr_cutlass_pack_v1"]
    # Loading it takes neither a driver nor Python's symbols.
    loaded = ctypes.CDLL(str(library))
    loaded.atomr_cutlass_pack_v1.restype = ctypes.POINTER(ctypes.c_uint32)
    assert loaded.atomr_cutlass_pack_v1()[0] == abi_version()
    assert ctypes.cast(loaded.atomr_cutlass_pack_v1(), ctypes.POINTER(ctypes.c_uint64))[1] == _core.LAYOUT_DIGEST
    # It is sealed, and an installation that strips leaves it so.
    installed = run(tool("cmake"), "--install", new_build.folder, "--strip", "--prefix", tmp_path)
    assert installed.returncode == 0, installed.stderr
    assert (tmp_path / "mine.so").read_bytes() == library.read_bytes()
    manifest = unseal(library.read_bytes())
    assert [f"sm_80/{kernel['name']}" for kernel in manifest["kernels"]] == new_build.cells()
    told = ctypes.cast(loaded.atomr_cutlass_pack_v1(), ctypes.POINTER(ctypes.c_uint64))[1]
    assert (manifest["name"], manifest["compiler"].split()[0]) == ("mine", "nvcc")
    assert (manifest["abi_version"], manifest["layout"]) == (abi_version(), f"{told:016x}")
    assert manifest["headers"]["atomr_cutlass"] == headers.digest(ROOT / "cpp" / "include" / "atomr_cutlass")
    assert set(manifest["headers"]) == {"atomr_cutlass", "cutlass"}
    assert all("Redistribution" in text for text in manifest["licenses"].values())
    assert set(manifest["licenses"]) == {"atomr_cutlass", "CUTLASS"}
    for kernel in manifest["kernels"]:
        assert kernel["content"].split()[2:] == manifest["compiler"].split()
        assert all(record["how"] for record in kernel["verified"])
    # The GPU code of each unit is in the file where the manifest says.
    units = [*(new_build.folder / "cells" / "units").glob("*/*.cu")]
    assert len(manifest["images"]) == len(units) > 0
    sums = {hashlib.sha256(code).hexdigest() for code in elf.device_code(library.read_bytes())}
    assert {image["sha256"] for image in manifest["images"]} == sums


def abi_version() -> int:
    """The version in kernel_abi.h."""
    header = (ROOT / "cpp" / "include" / "atomr_cutlass" / "kernel_abi.h").read_text()
    found = re.search(r"#define ATOMR_CUTLASS_ABI_VERSION (\d+)", header)
    assert found
    return int(found[1])


def test_compiles_are_bounded_by_a_pool(build: Build) -> None:
    build.configure()
    depth = re.search(r"^pool nvcc\n  depth = (\d+)", build.rules(), re.MULTILINE)
    assert depth
    assert 1 <= int(depth[1]) <= (os.cpu_count() or 1)
    compiles = build.rules().count(": CUDA_COMPILER__")
    units = [*(build.folder / "cells" / "units").glob("*/*.cu")]
    assert compiles == build.rules().count("pool = nvcc") == len(units) <= len(build.cells())


@pytest.mark.parametrize("name", ["ccache", "sccache"])
def test_compiler_cache_is_used_when_present(new_build: Build, script, tmp_path: Path, name: str) -> None:
    folder = script(name, 'exec "$@"')
    env = {"PATH": f"{folder}:{path_without(tmp_path / 'others', 'ccache', 'sccache')}"}
    # CMake looks into the system's folders too, whatever PATH says.
    only_path = {"ATOMR_CUTLASS_PRESET": "none", "CMAKE_FIND_USE_CMAKE_SYSTEM_PATH": "OFF"}
    said = new_build.try_configure(env=env, **only_path)
    assert said.returncode == 0, output(said)
    assert str(folder / name) in new_build.rules()

    said = new_build.try_configure(env=env, ATOMR_CUTLASS_COMPILER_CACHE="", **only_path)
    assert said.returncode == 0, output(said)
    assert str(folder / name) not in new_build.rules()


def test_no_cxx_compiler_stops(new_build: Build, tmp_path: Path) -> None:
    said = new_build.try_configure(env={"PATH": str(tmp_path), "CXX": ""}, ATOMR_CUTLASS_PRESET="none")
    assert said.returncode != 0
    assert "CMAKE_CXX_COMPILER" in output(said)


def test_only_what_changed_is_compiled(build: Build, tmp_path: Path) -> None:
    # A stand-in for nvcc notes what it is to compile.
    log = tmp_path / "compiled"
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import pathlib, sys\n"
        "after = dict(zip(sys.argv, sys.argv[1:]))\n"
        "pathlib.Path(after['-o']).touch()\n"
        "pathlib.Path(after['-MF']).write_text(f\"{after['-o']}: {after['-c']}\\n\")\n"
        f"open({str(log)!r}, 'a').write(after['-c'] + '\\n')\n"
    )
    fake = {"CMAKE_CUDA_COMPILER_LAUNCHER": f"{sys.executable};{launcher}"}

    def compiled() -> list[str]:
        build.make("atomr_cutlass_cells_sm_80")
        units = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(name for unit in units for name in emit.members(Path(unit)))

    names = [cell.removeprefix("sm_80/") for cell in build.configure(ATOMR_CUTLASS_ARCHS="80", **fake)]
    first = names[0]
    try:
        build.configure(ATOMR_CUTLASS_ARCHS="80", ATOMR_CUTLASS_EXCLUDE_KERNELS=first, **fake)
        assert compiled() == sorted(names[1:])
        assert compiled() == []
        build.configure(ATOMR_CUTLASS_ARCHS="80", ATOMR_CUTLASS_EXCLUDE_KERNELS=first, **fake)
        assert compiled() == []
        build.configure(ATOMR_CUTLASS_ARCHS="80", **fake)
        assert compiled() == [first]
        build.configure(ATOMR_CUTLASS_ARCHS="80", ATOMR_CUTLASS_EXCLUDE_KERNELS=names[-1], **fake)
        assert len(others := set(compiled())) > 0
        assert others < set(names[:-1])
    finally:
        build.configure(CMAKE_CUDA_COMPILER_LAUNCHER="")


def test_keys_are_exactly_what_is_built(build: Build, tmp_path: Path) -> None:
    # Of a preset that is not the build's: the file says all.
    keys = [key for key in expand("full", [SmArch.SM89]) if key.op == "gemm"][-2:]
    recorded = tmp_path / "keys.jsonl"
    recorded.write_text("".join(f"{line(key)}\n" for key in keys))
    chosen = build.configure(ATOMR_CUTLASS_ARCHS="", ATOMR_CUTLASS_KEYS=str(recorded))
    assert set(chosen) == {f"sm_89/{key.name}" for key in keys}
    assert "none of 80" in build.refuse(ATOMR_CUTLASS_ARCHS="80", ATOMR_CUTLASS_KEYS=str(recorded))
