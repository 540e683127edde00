"""What families of our own kernels whose operands begin anywhere share: which keys they support, and their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import LINEAR
from ..key import COLUMN, ROW, KernelKey, Triple
from ..rules import HALF_TYPES, OK, Status, no, supports_gemm
from .base import FULL, ON_DEMAND, Cell

CellOf = Callable[..., KernelKey]
"""A family's `cell`: its key for an arch, an element type of A and B, and their layouts; `d` is the one of D."""


def sm80_key(
    arch: SmArch,
    a: CutlassDtype,
    layouts: str,
    d: CutlassDtype | None,
    *,
    mainloop: str,
    tile: Triple,
    warps: Triple,
    stages: int,
    align_b: int = 1,
) -> KernelKey:
    """A key of those over mma.sync.

    Args:
        arch: the compile target.
        a: element type of A and B.
        layouts: of A and B.
        d: element type of D; None is `a`.
        mainloop: the kernels' own.
        tile: rows, columns and elements of K of a thread block.
        warps: along M, N and K.
        stages: of the mainloop.
        align_b: elements to which B is aligned; A and D are to single ones.
    """
    return KernelKey(
        op="gemm",
        generation="sm80",
        arch=arch,
        a=a,
        b=a,
        d=d or a,
        acc=CutlassDtype.F32,
        layout_a=layouts[0],
        layout_b=layouts[1],
        layout_d=ROW,
        align_a=1,
        align_b=align_b,
        align_d=1,
        tile=tile,
        cluster=(1, 1, 1),
        warps=warps,
        stages=stages,
        mainloop=mainloop,
        epilogue_schedule="",
        scheduler="identity",
        swizzle=1,
    )


def supports(key: KernelKey, cell: CellOf, kernels: str, *, differ: str = "types and layouts") -> Status:
    """Whether a key compiles without spilling.

    Args:
        key: the key.
        cell: of its family.
        kernels: those of the family, as reasons name them.
        differ: in what alone their keys do.
    """
    common = supports_gemm(key, (LINEAR,))
    if not common:
        return common
    if key.a not in HALF_TYPES or key.epilogue != LINEAR:
        return no(f"{kernels} multiply f16 and bf16, without a tree")
    if key.layout_a != ROW:
        return no(f"{kernels} need A row-major")
    if key != cell(key.arch, key.a, key.layout_a + key.layout_b, d=key.d):
        return no(f"{kernels} differ in {differ} alone")
    return OK


def cells(arch: SmArch, cell: CellOf) -> Iterator[Cell]:
    """A family's cells for one arch."""
    for a in HALF_TYPES:
        for layouts in (ROW + COLUMN, ROW + ROW):
            yield FULL, cell(arch, a, layouts)
            yield ON_DEMAND, cell(arch, a, layouts, d=CutlassDtype.F32)
