"""How cells have been verified, and when: what `explain` and the coverage page say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.key import KernelKey

RUNS: Final = "runs on sm_90a"
RUNS_AS_PTX: Final = "runs as PTX on sm_90"
COMPILED: Final = "compiled and audited"

MEANINGS: Final = {
    RUNS: "the GPU tests run cells of this row natively, on an H200",
    RUNS_AS_PTX: "they run them there from the PTX of their own arch, which the driver translates; this proves the "
    "numbers, not the instruction or the speed",
    COMPILED: "nvcc or NVRTC compiles them, and the tests find the expected instruction and no register spills in the "
    "machine code",
}
"""The three ways, and what each proves."""

LATEST: Final = "2026-11-20"
"""When the GPU tests last ran on every row that can run; benchmarks/results has the record."""


@dataclass(frozen=True)
class Verification:
    """How a row was verified.

    Attributes:
        how: one of `MEANINGS`.
        when: date (ISO 8601).
    """

    how: str
    when: str

    def __str__(self) -> str:
        return f"{self.how} ({self.when})"


def verification(arch: SmArch) -> Verification:
    """How cells of an arch have been verified: by what an H200 can run of them."""
    if arch is SmArch.SM90A:
        return Verification(RUNS, LATEST)
    return Verification(RUNS_AS_PTX if arch in (SmArch.SM80, SmArch.SM89) else COMPILED, LATEST)


def operands_of(key: KernelKey) -> str:
    """The operands of a key's row on the coverage page: their types and how they are multiplied."""
    types = key.a.value if key.a is key.b else f"{key.a.value} x {key.b.value}"
    if key.scale_type in ("ue4m3", "ue8m0"):
        return f"{types} ({'nvfp4' if key.scale_type == 'ue4m3' else 'mxfp4'})"
    if key.a in (CutlassDtype.F8E4M3, CutlassDtype.F8E5M2):
        return f"{types} (blocks)" if key.scale_type else types
    return types if key.math == "default" else f"{types} ({key.math})"
