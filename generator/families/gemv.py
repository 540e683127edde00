"""Matrix times vector: kernels of our own, bound by memory, on every arch.

A key is that of a GEMM of one row: A is the vector, of any stride, B the matrix, whose columns make the elements of D.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import COMMON, LINEAR
from ..key import COLUMN, DIRECT, ROW, KernelKey, Triple
from ..rules import HALF_TYPES, OK, Status, no, supports_gemm
from .base import FULL, ON_DEMAND, Cell, Family, epilogue_cpp

D = CutlassDtype

OP = "gemv"

TYPES = (*HALF_TYPES, D.F32)

THREADS = 256
"""Threads of a thread block."""


def _tile(layout: str, align: int) -> Triple:
    """The most columns of D in a thread block, and the elements of K that it reads of each per step."""
    columns = 64 if layout == COLUMN else 8 * align if align > 1 else 32
    vectors = columns if layout == COLUMN else columns // align
    return (1, columns, THREADS // vectors * (align if layout == COLUMN else 1))


def cell(arch: SmArch, a: D, layout: str, align: int, *, d: D | None = None, epilogue: str = LINEAR) -> KernelKey:
    """A key of the family.

    Args:
        arch: the compile target.
        a: element type of the vector and the matrix.
        layout: of the matrix as B: `c` is contiguous along K.
        align: elements that rows, or columns, of the matrix are aligned to: 16 bytes of them, or 1.
        d: element type of D; None is `a`.
        epilogue: linear, or with a tree.
    """
    return KernelKey(
        op=OP,
        generation="sm80",
        arch=arch,
        a=a,
        b=a,
        d=d or a,
        acc=D.F32,
        layout_a=COLUMN,
        layout_b=layout,
        layout_d=COLUMN,
        align_a=1,
        align_b=align,
        align_d=1,
        tile=_tile(layout, align),
        cluster=(1, 1, 1),
        warps=(THREADS // 32, 1, 1),
        stages=1,
        mainloop=DIRECT,
        epilogue_schedule="",
        scheduler="identity",
        swizzle=0,
        math="ieee" if a is D.F32 else "default",
        epilogue=epilogue,
    )


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles."""
    if key.a not in TYPES or key.a is not key.b:
        return no(f"gemv multiplies f16, bf16 and f32 of one type, not {key.a.value} by {key.b.value}")
    common = supports_gemm(key, (LINEAR, COMMON), layouts_d=(COLUMN,))
    if not common:
        return common
    wide = 128 // key.a.bits
    if key.align_b not in (1, wide):
        return no(f"gemv reads a matrix aligned to {wide} elements, or its single elements")
    if key != cell(key.arch, key.a, key.layout_b, key.align_b, d=key.d, epilogue=key.epilogue):
        return no("gemv kernels of one alignment differ in types, the matrix's layout and the epilogue alone")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    return epilogue_cpp(key)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    for a in TYPES:
        wide = 128 // a.bits
        for layout in (COLUMN, ROW):
            for align in (wide, 1):
                yield FULL, cell(arch, a, layout, align)
                for d in (D.F32, *HALF_TYPES):
                    if d is not a:
                        usual = (d, layout, align) == (D.F32, COLUMN, wide)
                        yield FULL if usual else ON_DEMAND, cell(arch, a, layout, align, d=d)
        yield FULL, cell(arch, a, COLUMN, wide, epilogue=COMMON)
        yield ON_DEMAND, cell(arch, a, ROW, wide, epilogue=COMMON)


FAMILY = Family(
    op=OP,
    generation="sm80",
    archs=tuple(SmArch),
    template="gemv",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=2.0,
    compile_mb=1000,
    arguments="gemm",
)
