"""The shadows of CUTLASS's headers give results of the same types and values as the originals, on host and device."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import shadow_sources as sources
from atomr_cutlass.jit.toolchain import toolchain
from cmake_build import ROOT, compiled, output, run, said_by
from generator.toolchain import system_nvcc

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packed_strides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with CUTLASS's own cutlass/util/packed_stride.hpp, which is not among the headers that are installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pin = ROOT / "third_party" / "cutlass" / "PIN"
    options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", folder)
    said = run(sys.executable, "-m", "pip", "download", *options, "--requirement", pin)
    assert said.returncode == 0, output(said)
    path = folder / "include" / "cutlass" / "util" / "packed_stride.hpp"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        path.write_bytes(wheel.read("cutlass_library/source/tools/util/include/cutlass/util/packed_stride.hpp"))
    return folder / "include"


@pytest.mark.skipif(not system_nvcc(), reason="no nvcc")
def test_shadows_agree_with_the_originals_on_the_host(tmp_path: Path, packed_strides: Path) -> None:
    said = {}
    for shadowed, first in ((True, []), (False, [f"-I{packed_strides}"])):
        included = sources.include_options(tmp_path, "nvcc", shadowed=shadowed)
        # CUDA's headers, and g++ as the host's compiler for all of it.
        options = ("-arch=sm_80", "-x", "c++", *first, *included)
        said[shadowed] = said_by(compiled(sources.HOST, tmp_path / f"shadows{shadowed}", *options)).splitlines()
    assert len(said[True]) == len(said[False]) > 2 * sum(map(len, sources.names().values())) - 10
    assert [pair for pair in zip(said[True], said[False], strict=True) if pair[0] != pair[1]] == []


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_shadows_agree_with_the_originals_on_the_device(compiler: str, tmp_path: Path) -> None:
    """Compared as constants that the compiler finds: neither takes a GPU."""
    if compiler == "nvcc" and not system_nvcc():
        pytest.skip("no nvcc")
    texts = {}
    for shadowed in (True, False):
        if compiler == "nvrtc":
            toolchain.cache_clear()
            texts[shadowed] = sources.compile_with_nvrtc(
                sources.CONSTANTS, tmp_path, "compute_90", shadowed=shadowed
            ).decode()
        else:
            options = ("-arch=sm_90", "-ptx", *sources.include_options(tmp_path, "nvcc", shadowed=shadowed))
            texts[shadowed] = compiled(sources.CONSTANTS, tmp_path / "shadows.ptx", *options).read_text()
    for constant, cases in (("static_tuples", "tuple_cases"), ("static_layouts", "layout_cases")):
        ours, theirs = (sources.constants(texts[shadowed], constant) for shadowed in (True, False))
        assert sources.differing(ours, theirs, 2 * sources.names()[cases]) == {}
