"""NVRTC compiles cells of sm_100a and sm_120a, for which there may be no GPU, into the instructions they promise."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.generator import audit
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit.compiler import Unit

# The size of the memory in which the runtime keeps a kernel's parameters: kParamsBytes of cpp/src/kernel_launch.h.
LARGEST_PARAMS = 4096


def _cell(arch: SmArch, *parts: str) -> KernelKey:
    return next(key for key in expand("full", [arch]) if all(part in key.name for part in parts))


CELLS = {
    "sm_100 bf16": _cell(SmArch.SM100, "sm100_tensorop_gemm_bf16", "256x128", "_2sm_"),
    "sm_100 grouped": _cell(SmArch.SM100, "sm100_tensorop_gemm_grouped_bf16"),
    "sm_120 nvfp4": _cell(SmArch.SM120, "sm120_tensorop", "ue4m3", "128x128x128"),
}


def _tools() -> dict[str, str]:
    """The environment in which the disassembler is found."""
    try:
        return audit.disassemblers()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def _listing(option: str, image: Path, env: dict[str, str]) -> list[str]:
    command = ["cuobjdump", option, str(image)]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_machine_code(name: str, tmp_path: Path) -> None:
    env = _tools()
    key = CELLS[name]
    images = Unit.of(key, key.arch.value).compile()
    assert f"{key.name}_info\0".encode() in images.companion
    image = tmp_path / "kernel.cubin"
    image.write_bytes(images.kernel)
    # Grouped GEMM has a kernel more, which fills in the groups' parameters.
    functions = {function.name: function for function in audit.read_sass(_listing("-sass", image, env))}
    # The listing of a file that holds one image does not name its arch.
    resources = {name: found for (name, _), found in audit.read_resources(_listing("-res-usage", image, env)).items()}
    assert audit.faults(key, functions[key.name], resources[key.name]) == []
    # All constants of a kernel, its parameters and what the driver puts before them.
    assert resources[key.name]["CONSTANT"] <= LARGEST_PARAMS
