"""The parts of a kernel family, and the ranking of its cells into presets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import GATED, GATED_SCALED, SCALED, SCALED_COMMON, is_common, is_narrow, lower, split
from ..key import COLUMN, ROW, KernelKey, Triple
from ..rules import FP8_TYPES, Status, accumulator, epilogue_compute

SMOKE, DEFAULT, FULL, ON_DEMAND = 1, 2, 3, 4
"""Tiers: the presets, and ON_DEMAND for cells of none, which are compiled at run time."""

Cell = tuple[int, KernelKey]
"""The first preset that holds a key, as its tier, and the key."""


@dataclass(frozen=True)
class Family:
    """One template and its keys.

    Attributes:
        op: operation of its keys.
        generation: their generation.
        archs: compile targets of its cells.
        template: name of its template, `templates/NAME.cu.in`.
        supports: why a key of this op and generation compiles, or not. The rules of all keys have been checked.
        cells: the cells for one arch.
        values: the values for the template, besides those that all templates share.
        compile_seconds: approximate time of NVRTC for a cell on two cores; benchmarks/jit.py measures it.
        compile_mb: memory that one nvcc process takes (peak resident set, rounded up).
        mainloops: its mainloops, if the op and generation have several families; empty for the one family that has all
            other mainloops.
        arguments: the operation whose arguments (kernel_abi.h) its kernels take; empty is its own.
        trees: whether the matrix puts epilogue trees on its cells.
        waits: whether its kernels start while the preceding launch runs, and wait for it themselves (`kDependent`).
        objection: why a key does not compile with CUTLASS newer than the pinned one; empty if it does.
    """

    op: str
    generation: str
    archs: tuple[SmArch, ...]
    template: str
    supports: Callable[[KernelKey], Status]
    cells: Callable[[SmArch], Iterator[Cell]]
    values: Callable[[KernelKey], dict[str, str]]
    compile_seconds: float
    compile_mb: int
    mainloops: tuple[str, ...] = ()
    arguments: str = ""
    trees: bool = False
    waits: bool = False
    objection: Callable[[KernelKey], str] = lambda _: ""


def untiled(op: str, arch: SmArch, a: CutlassDtype, d: CutlassDtype, **others: Any) -> KernelKey:
    """A key of an elementwise kernel of ours, for row-major matrices of any alignment.

    Args:
        op: operation.
        arch: compile target.
        a: element type of the input.
        d: element type of the output.
        others: fields that differ.
    """
    fields: dict[str, Any] = {
        "generation": "sm80", "b": a, "acc": CutlassDtype.F32, "layout_a": ROW, "layout_b": ROW, "layout_d": ROW,
        "align_a": 1, "align_b": 1, "align_d": 1, "tile": (1, 1, 1), "cluster": (1, 1, 1), "warps": (8, 1, 1),
        "stages": 0, "mainloop": "", "epilogue_schedule": "", "scheduler": "identity", "swizzle": 0,
    }  # fmt: skip
    return KernelKey(op=op, arch=arch, a=a, d=d, **(fields | others))


def tma_key(
    op: str,
    arch: SmArch,
    a: CutlassDtype,
    d: CutlassDtype,
    layouts: str,
    tile: tuple[int, ...],
    cluster: tuple[int, ...],
    mainloop: str,
    *,
    b: CutlassDtype | None = None,
    **others: Any,
) -> KernelKey:
    """A key of a CUTLASS 3.x kernel, which loads 16 bytes at once.

    Args:
        op: operation.
        arch: compile target, whose generation is the kernel's.
        a: element type of A, and of B if `b` is None.
        d: element type of D.
        layouts: of A and B.
        tile: extents along M and N, and along K unless that is 128 bytes.
        cluster: thread blocks along M and N, and along K if more than one.
        mainloop: that of the family.
        b: element type of B.
        others: fields that differ; block scales are floats unless given otherwise.
    """
    stored = others.get("epilogue_schedule", "tma") == "tma"
    fields: dict[str, Any] = {
        "generation": "sm{}{}".format(*arch.capability), "b": b or a, "acc": accumulator(a), "layout_a": layouts[0],
        "layout_b": layouts[1], "layout_d": ROW, "align_a": 128 // a.bits, "align_b": 128 // (b or a).bits,
        "align_d": 128 // d.bits if stored else 1, "tile": (*tile, 1024 // a.bits)[:3], "cluster": (*cluster, 1)[:3],
        "warps": (0, 0, 0), "stages": 0, "epilogue_schedule": "tma", "scheduler": "persistent", "swizzle": 0,
    }  # fmt: skip
    if any(others.get("scale_granularity", ())):
        fields["scale_type"] = "f32"
    return KernelKey(op=op, arch=arch, a=a, d=d, mainloop=mainloop, **(fields | others))


def layout_cpp(letter: str) -> str:
    """The C++ type of a layout."""
    return "cutlass::layout::RowMajor" if letter == ROW else "cutlass::layout::ColumnMajor"


def numbers(values: Triple) -> str:
    """Numbers as template arguments."""
    return ", ".join(map(str, values))


def static_ints(values: Triple) -> str:
    """Numbers as CuTe's static integers."""
    return ", ".join(f"cute::Int<{v}>" for v in values)


def epilogue_cpp(key: KernelKey, lanes: str = "AnyLanes") -> dict[str, str]:
    """`tree`, the definitions for the key's epilogue, and `epilogue`, its type.

    Args:
        key: of a GEMM.
        lanes: the distribution of accumulators over a warp, a type of epilogue_tree.h.
    """
    base, program = split(key.epilogue)
    scaled = "true" if base in (SCALED, SCALED_COMMON, GATED_SCALED) else "false"
    if is_common(key.epilogue):
        common = f"CommonTree<{'true' if key.d.bits <= 16 else 'false'}>"
        epilogue = f"TreeEpilogue<atomr_cutlass::{common}, {scaled}, atomr_cutlass::{lanes}>"
        return {"tree": '#include "atomr_cutlass/epilogue_common.h"\n', "epilogue": epilogue}
    if not program:
        return {"tree": "", "epilogue": "ScaledEpilogue" if base == SCALED else "LinearEpilogue"}
    definition = lower(program, epilogue_compute(key.acc, tree=True), narrow=is_narrow(program, key.d))
    # In the package's namespace, so that the tree finds the operations by their names.
    tree = f"namespace atomr_cutlass {{\nnamespace {{\n{definition}\n}}  // namespace\n}}  // namespace atomr_cutlass\n"
    if base in (GATED, GATED_SCALED):
        return {"tree": tree, "epilogue": f"GatedEpilogue<atomr_cutlass::Tree, {scaled}>"}
    return {"tree": tree, "epilogue": f"TreeEpilogue<atomr_cutlass::Tree, {scaled}, atomr_cutlass::{lanes}>"}


_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)
"""Columns of the WGMMA instructions in CuTe's basic headers; others are in a header with all multiples of 8."""

_OWN_WIDTHS = (48, 80, 112, 144, 160, 176, 208, 224, 240)
"""Columns of the WGMMA instructions in `wgmma.h`, for f16, bf16 and fp8 in shared memory.

CuTe's header with all multiples takes several times as long to compile.
"""


def wgmma_instructions(key: KernelKey) -> str:
    """The include for WGMMA instructions as wide as a key's tile; empty if CuTe's basic headers have them."""
    width = key.tile[1]
    fp8 = key.a is key.b and key.a in FP8_TYPES and (key.layout_a, key.layout_b) == (ROW, COLUMN)
    there = width in _WIDTHS or (width in _OWN_WIDTHS and (key.a.bits == 16 or fp8))
    return "" if there else '#include "atomr_cutlass/wgmma_widths.h"\n'
