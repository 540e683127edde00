"""The machine code of every kernel that is installed holds the instruction that its key promises, and no spills."""

import importlib.metadata
import importlib.util
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from atomr_cutlass.generator import audit
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.generator.matrix import ARCHS, cells
from atomr_cutlass.pipeline import table
from atomr_cutlass.pipeline.table import KernelInfo

TABLE = table.kernels()


def lines(words: Sequence[str | Path], env: dict[str, str]) -> Iterator[str]:
    """The output of a command, while it is printed."""
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    assert process.returncode == 0, words


def libraries() -> list[Path]:
    """The extension, and the packs that are loaded."""
    extension = importlib.util.find_spec("atomr_cutlass._core")
    assert extension is not None
    assert extension.origin is not None
    packs = [path for path in os.environ.get(table.PACKS_VARIABLE, "").split(os.pathsep) if path]
    packs += [str(entry.load()()) for entry in importlib.metadata.entry_points(group=table.PACKS_GROUP)]
    return [Path(extension.origin), *map(Path, packs)]


class Audit(NamedTuple):
    """Machine code and resources of every kernel, by name and arch."""

    functions: dict[tuple[str, str], audit.Function]
    resources: dict[tuple[str, str], dict[str, int]]


@pytest.fixture(scope="module")
def listing() -> Audit:
    """One run of the disassembler over each library."""
    try:
        env = audit.disassemblers()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = Audit({}, {})
    for library in libraries():
        for function in audit.read_sass(lines(["cuobjdump", "-sass", library], env)):
            found.functions[function.name, function.arch] = function
        found.resources.update(audit.read_resources(lines(["cuobjdump", "-res-usage", library], env)))
    return found


@pytest.mark.skipif(not TABLE, reason="the installed table is empty (preset none)")
@pytest.mark.parametrize("info", TABLE, ids=lambda info: f"{info.name}-{info.key.arch.value}")
def test_kernel(listing: Audit, info: KernelInfo) -> None:
    place = (info.name, info.key.arch.value)
    assert place in listing.functions, f"no machine code of {info.name} for {info.key.arch.value}"
    assert audit.faults(info.key, listing.functions[place], listing.resources.get(place, {})) == []


SASS = """
Fatbin elf code:
================
arch = sm_80

	code for sm_80
	.target	sm_80

		Function : first
	.headerflags	@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   MOV R1, c[0x0][0x28] ;          /* 0x00000a0000017a02 */
                                                                   /* 0x000fe40000000f00 */
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;   /* 0x0000000000037919 */
        /*0020*/               @P1 LDL.64 R2, [R1] ;               /* 0x0000000000037919 */
		..........

		Function : second
        /*0000*/              @UP0 HGMMA.64x64x16.F32 R4, gdesc[UR4], R4 ;  /* 0x0000000000037919 */
"""

RESOURCES = """
arch = sm_80

Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:88
 Function first:
  REG:148 STACK:8 SHARED:0 LOCAL:0 CONSTANT[2]:12 CONSTANT[0]:720 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_listings_are_read() -> None:
    first, second = audit.read_sass(SASS.splitlines())
    assert (first.name, first.arch, second.name) == ("first", "sm_80", "second")
    assert first.mnemonics == {"MOV": 1, "HMMA.16816.F32.BF16": 1, "LDL.64": 1}
    assert second.count("HGMMA") == 1
    resources = audit.read_resources(RESOURCES.splitlines())
    assert resources["first", "sm_80"]["REG"] == 148
    assert resources["first", "sm_80"]["CONSTANT"] == 732


def test_faults_are_found() -> None:
    first, second = audit.read_sass(SASS.splitlines())
    resources = audit.read_resources(RESOURCES.splitlines())["first", "sm_80"]
    keys = [key for _, key in cells([SmArch.SM80])]
    half = next(key for key in keys if key.a is CutlassDtype.F16)
    bfloat = next(key for key in keys if key.a is CutlassDtype.BF16)
    spilled = ["1 LDL: registers are spilled to local memory", "STACK 8, not 0"]
    assert audit.faults(bfloat, first, resources) == spilled
    assert audit.faults(half, first, resources) == ["HMMA of BF16 operands", *spilled]
    assert audit.faults(half, second, {"STACK": 0}) == ["no HMMA among its instructions"]
    simt = next(key for key in keys if key.math == "ieee")
    assert "no FFMA among its instructions" in audit.faults(simt, first, {})
    assert "its resources are not listed" in audit.faults(simt, first, {})


def test_kernels_that_are_launched_early_wait_for_the_launch_before() -> None:
    key = gemm_few_sm90.cell(CutlassDtype.BF16, "rc", 2)
    code = audit.Function("few", "sm_90a", Counter({"HGMMA.64x16x16.F32.BF16": 64, "ACQBULK": 3, "UTMALDG.3D": 8}))
    assert audit.faults(key, code, {"STACK": 0}) == []
    code.mnemonics["BRA.U.ANY"] = 2
    (fault,) = audit.faults(key, code, {"STACK": 0})
    assert "uniform registers" in fault
    del code.mnemonics["ACQBULK"], code.mnemonics["BRA.U.ANY"]
    assert audit.faults(key, code, {"STACK": 0}) == ["no ACQBULK: it does not wait for the launch before"]


@pytest.mark.parametrize("arch", ARCHS["gemm"], ids=lambda arch: arch.value)
def test_every_cell_has_a_rule(arch: SmArch) -> None:
    opcodes = {rule.opcode for _, key in cells([arch]) if (rule := audit.expected_instruction(key)) is not None}
    more = {
        SmArch.SM89: {"QMMA"},
        SmArch.SM90A: {"HGMMA", "IGMMA", "QGMMA"},
        SmArch.SM100: {"UTCHMMA", "UTCIMMA"},
        SmArch.SM120: {"QMMA"},
    }
    assert opcodes >= {"HMMA", "IMMA", "DMMA", "FFMA"} | more.get(arch, set())


def test_fp8_instructions_name_both_operands() -> None:
    keys = [key for _, key in cells([SmArch.SM89, SmArch.SM90A])]
    mixed = [k for k in keys if (k.a, k.b) == (CutlassDtype.F8E4M3, CutlassDtype.F8E5M2)]
    rules = {(k.generation, k.arch): str(audit.expected_instruction(k)) for k in mixed if k.op == "gemm"}
    assert rules == {
        ("sm80", SmArch.SM89): "QMMA...E4M3.E5M2",
        ("sm90", SmArch.SM90A): "QGMMA...E4M3.E5M2",
        ("sm80", SmArch.SM90A): "HMMA",  # the assembler's conversion to f16
    }
    key = next(k for k in mixed if k.generation == "sm90")
    right = audit.Function(key.name, "sm_90a", Counter({"QGMMA.64x128x32.F32.E4M3.E5M2": 8, "ACQBULK": 1}))
    wrong = audit.Function(key.name, "sm_90a", Counter({"QGMMA.64x128x32.F32.E4M3.E4M3": 8, "ACQBULK": 1}))
    assert audit.faults(key, right, {"STACK": 0}) == []
    assert audit.faults(key, wrong, {"STACK": 0}) == ["no QGMMA...E4M3.E5M2 among its instructions"]
