"""Copies of matrices as helpers of kernels that do not read them as they lie: transposed, or with padded rows."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import COLUMN, ROW, KernelKey
from ..rules import OK, Status, no
from .base import FULL, Cell, Family, untiled

D = CutlassDtype

OP = "transpose"

SQUARE_BYTES = 4
"""Bytes along one side of the squares that a thread transposes, to which results are aligned."""

VECTOR_BYTES = 16
"""The rows of copies are multiples of it, as TMA asks of rows."""


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


def padded(arch: SmArch, a: D) -> KernelKey:
    """A key for copies whose rows are whole vectors of 16 bytes; of 16-bit elements, however rows begin."""
    a = standing_for(a)
    return untiled(OP, arch, a, a, layout_d=ROW, align_a=1, align_d=VECTOR_BYTES * 8 // a.bits)


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles."""
    if key.a.bits not in (8, 16, 32):
        return no(f"elements of 8, 16 and 32 bits are copied, not {key.a.value}")
    if key.layout_d == ROW and key.a.bits != 16:
        return no("rows of 16-bit elements are padded, others are not")
    of_layout = padded if key.layout_d == ROW else transpose
    return (
        OK if key == of_layout(key.arch, key.a) else no("kernels that copy differ in their type and D's layout alone")
    )


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template, besides the type."""
    name = "padded" if key.layout_d == ROW else "transpose"
    return {"header": name, "struct": name.capitalize()}


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch: those on which TMA and WGMMA need certain layouts."""
    if arch is SmArch.SM90A:
        for a in (D.I8, D.BF16, D.F32):
            yield FULL, transpose(arch, a)
        yield FULL, padded(arch, D.BF16)


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
