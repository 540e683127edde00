"""Transposed copies of matrices, as auxiliary kernels of rewrites for kernels that read only one layout."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import COLUMN, KernelKey
from ..rules import OK, Status, no
from .base import FULL, Cell, Family, untiled

D = CutlassDtype

OP = "transpose"

SQUARE_BYTES = 4
"""Bytes along one side of the squares that a thread transposes, to which results are aligned."""


def standing_for(dtype: D) -> D:
    """The type of equal size in a kernel's key: elements are copied bitwise."""
    return {8: D.I8, 16: D.BF16, 32: D.F32}[dtype.bits]


def alignment(dtype: D) -> int:
    """Elements that a matrix of this type must be aligned to; those of two bytes are read one by one."""
    return 1 if dtype.bits == 16 else SQUARE_BYTES * 8 // dtype.bits


def transpose(arch: SmArch, a: D) -> KernelKey:
    """A key of this family, for matrices of `a` or of any type of equal size."""
    a = standing_for(a)
    square = SQUARE_BYTES * 8 // a.bits
    return untiled(OP, arch, a, a, layout_d=COLUMN, align_a=alignment(a), align_d=square)


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles."""
    if key.a.bits not in (8, 16, 32):
        return no(f"elements of 8, 16 and 32 bits are transposed, not {key.a.value}")
    return OK if key == transpose(key.arch, key.a) else no("kernels that transpose differ in their type alone")


def values(_: KernelKey) -> dict[str, str]:
    """The values of the template: the type alone."""
    return {}


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch: those on which TMA and WGMMA need certain layouts."""
    if arch is SmArch.SM90A:
        for a in (D.I8, D.BF16, D.F32):
            yield FULL, transpose(arch, a)


FAMILY = Family(
    op=OP,
    generation="sm80",
    archs=(SmArch.SM90A,),
    template="transpose",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=1.0,
    compile_mb=1000,
    arguments="gemm",
)
