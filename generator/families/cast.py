"""Casts between element types, as auxiliary kernels of rewrites, on every arch."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import KernelKey
from ..rules import FP8_TYPES, HALF_TYPES, OK, Status, no
from .base import FULL, Cell, Family, untiled

D = CutlassDtype

OP = "cast"

PAIRS = (
    *((a, d) for a in FP8_TYPES for d in HALF_TYPES),
    *((D.F32, d) for d in (*HALF_TYPES, *FP8_TYPES, D.F32)),
    (D.F64, D.F64),
)
"""(from, to); float32 and float64 to themselves sum slices."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles."""
    if key != cast(key.arch, key.a, key.d):
        return no("casts differ in their types and nothing else")
    if (key.a, key.d) not in PAIRS:
        return no(f"no rewrite casts {key.a.value} to {key.d.value}")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template: the types, and whether the kernel may start while the preceding launch runs."""
    return {"waits": "true" if key.arch.capability >= (9, 0) else "false"}


def cast(arch: SmArch, a: D, d: D) -> KernelKey:
    """A key of this family."""
    return untiled(OP, arch, a, d)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    for a, d in PAIRS:
        if a is not D.F64 or arch is SmArch.SM90A:  # elsewhere no kernel of float64 divides K
            yield FULL, cast(arch, a, d)


FAMILY = Family(
    op=OP,
    generation="sm80",
    archs=tuple(SmArch),
    template="cast",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=1.0,
    compile_mb=1000,
)
