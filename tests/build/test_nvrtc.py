"""NVRTC compiles cells of every family, on a machine without a GPU, without nvcc and without a host compiler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atomr_cutlass import CompileError, SmArch, _core
from atomr_cutlass.generator import headers
from atomr_cutlass.generator.families import (
    gemm_ragged_sm80,
    gemm_realigned_sm90,
    gemm_split_sm90,
    gemm_unaligned_sm80,
)
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import cells, families, family
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit import toolchain as jit_toolchain
from atomr_cutlass.jit.compiler import Unit
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.jit.toolchain import toolchain

EVERY = [key for _, key in cells([SmArch.SM80, SmArch.SM90A])]


def _cell(*parts: str) -> KernelKey:
    return min((k for k in EVERY if all(part in k.name for part in parts)), key=lambda k: k.tile)


# A cell of each template that these archs have, and of each further path through the headers.
CELLS = {
    "sm80 tensor op": _cell("cutlass_tensorop_bf16_s16816gemm_bf16", "_tn_align8"),
    "sm80 simt": _cell("cutlass_simt_f32_sgemm_f32", "_tt_"),
    "sm80 simt vectors": _cell("cutlass_simt_f32_sgemm_f32", "_tn_align4"),
    "sm80 double vectors": _cell("cutlass_tensorop_f64_d1688gemm", "_tn_align2"),
    "sm80 integer": _cell("cutlass_tensorop_s32_i16832gemm_s8", "_align16"),
    "sm90": _cell("cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16", "_tnt_", "pingpong_epi_tma"),
    "sm90 stream-k": _cell("cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16", "stream_k"),
    "sm90 scales of rows": _cell("cutlass3x_sm90_tensorop_gemm_e4m3", "_scaled"),
    "sm90 few rows": _cell("cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16", "_tnt_", "_few_"),
    "ragged few rows": next(key for _, key in gemm_ragged_sm80.FAMILY.cells(SmArch.SM90A) if key.layout_b == "r"),
    "unaligned": next(key for _, key in gemm_unaligned_sm80.FAMILY.cells(SmArch.SM90A) if key.layout_b == "c"),
    "sm90 realigned": next(key for _, key in gemm_realigned_sm90.FAMILY.cells(SmArch.SM90A) if key.layout_b == "r"),
    "sm90 split K": next(key for _, key in gemm_split_sm90.cells(SmArch.SM90A) if key.layout_b == "c"),
    "sm90 slices in their order": _cell("cutlass3x_sm90_tensorop_gemm_bf16", "_tnt_", "_sliced_"),
    "sm90 slices of K": _cell("cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_f32", "_tnn_"),
    "sm90 A through registers": _cell("cutlass3x_sm90_tensorop_gemm_tf32", "_nnn_"),
    "sm90 full accumulation": _cell("cutlass3x_sm90_tensorop_gemm_e4m3_e4m3_f32_bf16", "_cooperative_epi_tma"),
    "transpose": _cell("cutlass_transpose_"),
    "sm90 scales of blocks": _cell("cutlass3x_sm90_tensorop_block_scaled_gemm_f32_1x128x128_e4m3"),
    "grouped sm80": _cell("gemm_grouped_bf16", "_tt_align8"),
    "grouped sm90": _cell("cutlass3x_sm90_tensorop_gemm_grouped_bf16"),
    "grouped sm90 scales of blocks": _cell("cutlass3x_sm90_tensorop_block_scaled_gemm_grouped", "64x128x128"),
    "convolution sm80": _cell("s16816fprop_optimized_bf16", "singlegroup"),
    "strided dgrad sm80": _cell("s16816dgrad_optimized_bf16", "strided"),
    "depthwise": _cell("cutlass_simt_f16_sfprop_direct"),
    "convolution sm90": _cell("cutlass3x_sm90_tensorop_wgrad_bf16"),
    "gemv": _cell("cutlass_simt_bf16_sgemv_bf16", "_nt_"),
    "cast": _cell("cutlass_cast_f32_to_bf16"),
    "quantize": _cell("cutlass_quantize_bf16_to_e2m1_nvfp4"),
    "dequantize": _cell("cutlass_dequantize_e4m3_to_bf16"),
}


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of these tests' own; the headers of CUTLASS_DIR, where it is set."""
    store = KernelStore(tmp_path_factory.mktemp("cache") / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "store", lambda: store)
        if "CUTLASS_DIR" in os.environ:
            cutlass = Path(os.environ["CUTLASS_DIR"])
            patch.setattr(jit_toolchain, "CUTLASS", cutlass)
            patch.setattr(jit_toolchain, "CUTLASS_DIGEST", cutlass / "DIGEST")
        yield


def test_every_family_has_a_cell_here() -> None:
    of_cells = {family(key).template for key in CELLS.values()}
    assert of_cells == {family.template for family in families() if {SmArch.SM80, SmArch.SM90A} & {*family.archs}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*kernels compile more slowly:RuntimeWarning")
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_every_family_compiles(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvcc, no g++
    monkeypatch.delenv("CUDA_HOME", raising=False)
    key = CELLS[name]
    objection = headers.objection(key, headers.cutlass_version(jit_toolchain.CUTLASS))
    if objection:
        pytest.skip(objection)
    images, origin = kernels.load(key, key.arch.value)
    assert origin == "compiled"
    for image, symbol in ((images.kernel, key.name), (images.companion, f"{key.name}_evaluate")):
        assert image.startswith(b"\x7fELF")
        assert f".text.{symbol}\0".encode() in image
    assert f"{key.name}_info\0".encode() in images.companion
    assert _core.LAYOUT_DIGEST.to_bytes(8, "little") in images.companion
    assert kernels.load(key, key.arch.value) == (images, "disk")
    assert kernels.where(key, key.arch.value) == "disk"


@pytest.mark.slow
def test_older_gpus_cells_become_ptx_for_newer_ones() -> None:
    key = CELLS["sm80 tensor op"]
    images, _ = kernels.load(key, "compute_80")
    assert f".entry {key.name}(".encode() in images.kernel
    assert b".target sm_80" in images.kernel


def test_a_source_that_does_not_compile() -> None:
    unit = Unit("broken", 'extern "C" __global__ void broken() { int x = ; }', "sm_80")
    with pytest.raises(CompileError, match="expected an expression") as caught:
        unit.compile()
    assert "broken" in caught.value.log
    assert caught.value.options


def test_the_toolchain_says_which_build_it_is() -> None:
    tools = toolchain()
    major, minor = tools.version
    assert f"V{major}.{minor}." in tools.build
    assert all(folder.is_absolute() for folder in tools.include)


def test_an_installed_toolkit_compiles_without_the_extra(tmp_path: Path) -> None:
    """Its folder has links to what is here; nothing of CUDA's Python wheels is found."""
    tools = toolchain()
    root = tmp_path / "cuda"
    for folder in ("bin", "lib64", "include"):
        (root / folder).mkdir(parents=True)
    for library in tools.nvrtc.parent.glob("libnvrtc*"):
        shutil.copy(library, root / "lib64")
    for header in tools.include[-1].iterdir():
        (root / "include" / header.name).symlink_to(header)
    if not (root / "include" / "cccl").exists():
        (root / "include" / "cccl").symlink_to(tools.include[-3])
    (root / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    (root / "bin" / "nvcc").chmod(0o755)
    code = (
        "import sys; sys.modules.update({'cuda.bindings': None, 'cuda.core': None})\n"
        "from cuda import pathfinder\n"
        "def nothing(name): raise pathfinder.DynamicLibNotFoundError(name)\n"
        "pathfinder.load_nvidia_dynamic_lib, pathfinder.find_nvidia_header_directory = nothing, lambda _: None\n"
        "from atomr_cutlass.jit import kernels\n"
        "from atomr_cutlass.generator.matrix import expand; from atomr_cutlass import SmArch\n"
        "key = next(k for k in expand('full', [SmArch.SM80]) if k.op == 'cast')\n"
        "print(kernels.load(key, 'sm_80')[1], kernels.toolchain().nvrtc)"
    )
    environment = os.environ | {"PATH": str(root / "bin"), "ATOMR_CUTLASS_CACHE_DIR": str(tmp_path / "cache")}
    for origin in ("compiled", "disk"):
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert ran.stdout.split() == [origin, str(root / "lib64" / tools.nvrtc.name)], ran.stderr


@pytest.mark.slow
def test_a_process_that_is_killed_in_mid_compile_leaves_no_trace(tmp_path: Path) -> None:
    code = (
        "import sys; from atomr_cutlass.jit import kernels\n"
        "from atomr_cutlass.generator.matrix import expand; from atomr_cutlass import SmArch\n"
        "key = next(k for k in expand('full', [SmArch.SM80]) if k.name == sys.argv[1])\n"
        "print('begins', flush=True); kernels.load(key, 'sm_80'); print('ends')"
    )
    key = CELLS["sm80 tensor op"]
    environment = os.environ | {"ATOMR_CUTLASS_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, key.name]
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.stdout
    assert killed.stdout.readline() == "begins\n"
    locks = tmp_path / "cache" / "locks"
    deadline = time.monotonic() + 30
    while not (locks.is_dir() and any(locks.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(30)
    killed.stdout.close()
    assert not [path for path in (tmp_path / "cache" / "entries").rglob("*") if path.is_file()]
    again = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert again.stdout == "begins\nends\n", again.stderr
    assert [path for path in (tmp_path / "cache" / "entries").rglob("*") if path.is_file()]
