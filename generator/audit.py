"""The audit of a kernel's machine code: it must have its key's instruction, and no spilled registers.

Reads the listings of `cuobjdump -sass` and `cuobjdump -res-usage`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .archs import SmArch
from .dtypes import CutlassDtype
from .key import KernelKey, opcode_class
from .matrix import family
from .rules import FEW, FP8_TYPES


@dataclass(frozen=True)
class Instruction:
    """The multiplying instruction of a kernel in SASS, such as `HMMA` with `BF16` among its modifiers.

    Attributes:
        opcode: the part before the first dot.
        modifier: the consecutive parts that must follow it somewhere; empty for no requirement.
        absent: modifiers that no instruction of this opcode may have.
    """

    opcode: str
    modifier: str = ""
    absent: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.opcode + (f"...{self.modifier}" if self.modifier else "")


_OPERANDS = frozenset({"BF16", "TF32"})


def expected_instruction(key: KernelKey) -> Instruction | None:
    """The instruction of a key, by generation, arch and math; the same for GEMM, grouped GEMM and convolution.

    mma.sync of the sm80 generation has the same names on every arch that it is compiled for, but for fp8: sm_89 and
    sm_120 have an instruction for it, elsewhere the assembler converts the operands to f16. None where nothing is
    multiplied.

    Raises:
        ValueError: no rule for the key's generation or element type.
    """
    if key.is_elementwise:
        return None
    if key.generation == "sm100":
        # The element types of UMMA are in a descriptor; the instruction's name has only their width.
        kinds = {CutlassDtype.I8: "I", CutlassDtype.F8E4M3: "Q", CutlassDtype.F8E5M2: "Q", CutlassDtype.F4E2M1: "O"}
        pair = "2CTA" if key.mainloop == "2sm" else ""
        return Instruction(f"UTC{kinds.get(key.a, 'H')}MMA", pair, frozenset({"2CTA"} - {pair}))
    if key.generation == "sm120" and key.a is CutlassDtype.F4E2M1:
        return Instruction("OMMA", "SF")
    if key.generation not in ("sm80", "sm90", "sm120"):
        raise ValueError(f"no rule for the instructions of generation {key.generation}")
    if key.generation == "sm90" and key.arch is not SmArch.SM90A:
        raise ValueError(f"{key.generation} kernels do not compile for {key.arch.value}")
    if opcode_class(key) == "simt":
        return Instruction("FFMA")
    if key.a is CutlassDtype.F64:
        return Instruction("DMMA")
    warp_group = "G" if key.generation == "sm90" else ""
    if key.a is CutlassDtype.I8:
        return Instruction(f"I{warp_group}MMA", "S8")
    if key.a in FP8_TYPES:
        if key.generation == "sm80" and key.arch in (SmArch.SM90A, SmArch.SM100):
            return Instruction("HMMA", absent=_OPERANDS)
        return Instruction(f"Q{warp_group}MMA", f"{key.a.value}.{key.b.value}".upper())
    operand = {CutlassDtype.F16: "", CutlassDtype.BF16: "BF16", CutlassDtype.F32: "TF32"}.get(key.a)
    if operand is None:
        raise ValueError(f"no rule for the instructions of {key.a.value} operands")
    return Instruction(f"H{warp_group}MMA", operand, _OPERANDS - {operand})


@dataclass
class Function:
    """One kernel in one cubin.

    Attributes:
        name: the symbol.
        arch: the machine code's target, such as `sm_90a`.
        mnemonics: the number of occurrences of each instruction with its modifiers (`HMMA.16816.F32.BF16`).
    """

    name: str
    arch: str
    mnemonics: Counter[str] = field(default_factory=Counter)

    def count(self, opcode: str) -> int:
        """The number of occurrences of an opcode, with any modifiers."""
        return sum(count for name, count in self.mnemonics.items() if name.partition(".")[0] == opcode)


_ARCH = re.compile(r"^\s*(?:arch = |code for |\.target\s+)(sm_\w+)")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s*([\w$.]+)")
# An address, a predicate if there is one, and the mnemonic.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_RESOURCE = re.compile(r"(\w+)(?:\[\d+\])?:(\d+)")


def read_sass(lines: Iterable[str]) -> Iterator[Function]:
    """The functions of a listing of `cuobjdump -sass`, one at a time: a listing can be larger than memory."""
    arch = ""
    current: Function | None = None
    for line in lines:
        instruction = _INSTRUCTION.match(line)
        if instruction is not None:
            if current is not None:
                current.mnemonics[instruction[1]] += 1
            continue
        target = _ARCH.match(line)
        if target is not None:
            arch = target[1]
            continue
        function = _FUNCTION.match(line)
        if function is not None:
            if current is not None:
                yield current
            current = Function(function[1], arch)
    if current is not None:
        yield current


def read_resources(lines: Iterable[str]) -> dict[tuple[str, str], dict[str, int]]:
    """(name, arch) -> resources by name, of a listing of `cuobjdump -res-usage`; bracketed banks are summed."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    arch = ""
    current: dict[str, int] | None = None
    for line in lines:
        target = _ARCH.match(line)
        if target is not None:
            arch, current = target[1], None
            continue
        function = _FUNCTION.match(line)
        if function is not None:
            current = found.setdefault((function[1], arch), {})
        elif current is not None and "REG:" in line:
            for name, value in _RESOURCE.findall(line):
                current[name] = current.get(name, 0) + int(value)
            current = None
    return found


def _missing(instruction: Instruction, function: Function) -> list[str]:
    wrong = []
    names = [name for name in function.mnemonics if name.partition(".")[0] == instruction.opcode]
    if not any(not instruction.modifier or f".{instruction.modifier}." in f".{name}." for name in names):
        wrong.append(f"no {instruction} among its instructions")
    strange = sorted({part for name in names for part in name.split(".") if part in instruction.absent})
    if strange:
        wrong.append(f"{instruction.opcode} of {', '.join(strange)} operands")
    return wrong


def faults(key: KernelKey, function: Function, resources: Mapping[str, int]) -> list[str]:
    """The faults of a kernel's machine code; empty if it has none.

    Args:
        key: the kernel's.
        function: its machine code.
        resources: its registers and memory, of `read_resources`.
    """
    instruction = expected_instruction(key)
    wrong = [] if instruction is None else _missing(instruction, function)
    if opcode_class(key) == "simt":
        # The epilogue has some too: the mainloop, unrolled over the K tile, has one for each product of a thread.
        products = key.tile[0] * key.tile[1] * key.tile[2] // (key.warps[0] * key.warps[1] * key.warps[2] * 32)
        if function.count("FFMA") < products:
            wrong.append(f"{function.count('FFMA')} FFMA, fewer than the {products} products of a thread and K tile")
    if family(key).waits and not function.count("ACQBULK"):
        wrong.append("no ACQBULK: it does not wait for the launch before")
    if key.mainloop == FEW and function.mnemonics["BRA.U.ANY"]:
        wrong.append("BRA.U.ANY: loops around TMA loads look for values that should be in uniform registers")
    wrong += [
        f"{function.count(opcode)} {opcode}: registers are spilled to local memory"
        for opcode in ("LDL", "STL")
        if function.count(opcode)
    ]
    wrong += [f"{name} {resources[name]}, not 0" for name in ("STACK", "LOCAL") if resources.get(name, 0)]
    if not resources:
        wrong.append("its resources are not listed")
    return wrong


def disassemblers() -> dict[str, str]:
    """The environment in which cuobjdump and the nvdisasm that it asks are found: of PyPI or of an installed toolkit.

    Raises:
        FileNotFoundError: one is missing; names the package that has it.
    """
    folders = []
    names = ("cuobjdump", "nvdisasm")
    for name in names:
        try:
            files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        folders += [str(Path(str(file.locate())).parent) for file in files if file.name == name]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    for name in names:
        if shutil.which(name, path=path) is None:
            raise FileNotFoundError(
                f"{name} was not found: pip install nvidia-cuda-{name}, or install the CUDA toolkit"
            )
    return os.environ | {"PATH": path}
