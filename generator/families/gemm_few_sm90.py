"""Dense GEMM of the sm90 generation for few rows or columns of D: kernels of our own over CuTe's TMA and WGMMA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import COMMON, GATED, GATED_SCALED, LINEAR, SCALED, SCALED_COMMON, has_tree, is_gated
from ..key import COLUMN, ROW, KernelKey
from ..rules import BLOCKWISE, FEW, FP8_TYPES, HALF_TYPES, Status, along_k, no, supports_gemm
from . import dsmem_sm90
from .base import DEFAULT, FULL, ON_DEMAND, Cell, Family, epilogue_cpp

D = CutlassDtype

MOST = 128
"""Most rows or columns of D that a cell serves, and rows of weights that a thread block multiplies at once."""

TALLEST, TALL_STEP, MOST_OF_TALL = 2 * MOST, 32, 64
"""Rows of row-major weights in the tallest tile, the step of those beyond MOST, and most few rows of such a tile."""

MOST_BLOCK_SCALED = 32
"""Most rows or columns of D with block scales, which every thread reads: beyond, other kernels are faster."""

RANKS = (1, 2, 4)
"""Thread blocks of a cluster, which divide K or share the few rows."""

RANKS_OF_ROWS = (1, 2, 4, 8)
"""Thread blocks of a cluster for a row-major B."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR, SCALED, COMMON, SCALED_COMMON, GATED, GATED_SCALED))
    if not common:
        return common
    if not (key.a in (*HALF_TYPES, *FP8_TYPES) or key.math == "tf32") or key.a is not key.b:
        return no(f"kernels for few rows multiply f16, bf16, tf32 and fp8 of one type, not {key.a.value} ({key.math})")
    scaled = key.scale_type or any(key.scale_granularity)
    if scaled and (key.scale_type, key.scale_granularity, key.a in FP8_TYPES) != ("f32", BLOCKWISE, True):
        return no("block scales of kernels for few rows are f32, one for 1x128 of fp8 A and one for 128x128 of B")
    if scaled and key.math != "default":
        return no("block scales are for full accumulation")
    if key.layout_a != ROW:
        return no("kernels for few rows need A row-major")
    if key.a.bits != 16 and key.layout_b != COLUMN:
        return along_k("8-bit and tf32 kernels for few rows", key.layout_a, key.layout_b)
    wide = 128 // key.a.bits
    if (key.align_a, key.align_b, key.align_d) != (wide, wide, 1):
        return no(f"kernels for few rows ask A and B to be aligned to {wide} elements, and nothing of D")
    most = MOST_BLOCK_SCALED if scaled else MOST
    allowed = RANKS if key.layout_b == COLUMN else RANKS_OF_ROWS
    if key.tile != (MOST, most, 8 * wide) or key.cluster not in [(1, 1, ranks) for ranks in allowed]:
        clusters = ", ".join(f"1x1x{ranks}" for ranks in allowed)
        return no(f"tiles of kernels for few rows are {MOST}x{most}x{8 * wide}, clusters {clusters}")
    return dsmem_sm90.supports_schedule(key, "kernels for few rows")


def widths(key: KernelKey, few: int = 1) -> list[int]:
    """The rows of weights in a tile that a launch may choose (`width` of its arguments) for so many few rows."""
    if key.layout_b == COLUMN:
        return list(range(8, MOST + 1, 8))
    taller = range(MOST + TALL_STEP, TALLEST + 1, TALL_STEP) if few <= MOST_OF_TALL else ()
    return [*range(16, MOST + 1, 16), *taller]


def shares(key: KernelKey) -> list[int]:
    """Numbers of thread blocks of a cluster that may share the few rows, chosen at launch (`swizzle`)."""
    return [share for share in RANKS_OF_ROWS if share <= key.cluster[2]]


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    promoted = key.a in FP8_TYPES and key.math == "default"
    return {
        "header": "gemm_few_sm90" + ("_gated" if is_gated(key.epilogue) else "_tree" if has_tree(key.epilogue) else ""),
        "few": str(key.tile[1]),
        "ranks": str(key.cluster[2]),
        "promoted": "true" if promoted else "false",
        "block_scaled": "true" if key.scale_type else "false",
        **epilogue_cpp(key),
    }


def cell(
    a: D, layouts: str, ranks: int, *, d: D | None = None, math: str = "default", epilogue: str = LINEAR
) -> KernelKey:
    """A key of the family."""
    tile = (MOST, MOST, 8 * (128 // a.bits))
    return dsmem_sm90.cell(a, layouts, FEW, tile, (1, 1, ranks), d=d, math=math, epilogue=epilogue)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM90A:
        return
    for a in HALF_TYPES:
        for ranks in RANKS:
            # Two thread blocks gain 0.01% over one and four.
            yield ON_DEMAND if ranks == 2 else DEFAULT if a is D.BF16 else FULL, cell(a, ROW + COLUMN, ranks)
        # On 881 random shapes two thread blocks would gain 0.5% over four and eight, one as well 0.2% more. Estimates
        # for them, trained with these, lose more elsewhere (docs/performance-log.md, 2026-11-28).
        for ranks in RANKS_OF_ROWS[1:]:
            yield FULL if ranks == 4 or (ranks == 8 and a is D.BF16) else ON_DEMAND, cell(a, ROW + ROW, ranks)
        # For results in f32 the cluster that alone loses least.
        yield FULL if a is D.BF16 else ON_DEMAND, cell(a, ROW + COLUMN, 4, d=D.F32)
        yield FULL if a is D.BF16 else ON_DEMAND, cell(a, ROW + ROW, 8, d=D.F32)
    for ranks in (1, 4):
        yield FULL, cell(D.F32, ROW + COLUMN, ranks, math="tf32")
    for ranks in (1, 4):
        yield FULL, cell(D.F8E4M3, ROW + COLUMN, ranks, d=D.BF16, epilogue=SCALED)
    for d in (D.F16, D.F32):
        yield ON_DEMAND, cell(D.F8E4M3, ROW + COLUMN, 4, d=d, epilogue=SCALED)
    # Those of full accumulation serve fast accumulation too: kernels for that would gain 0.06%.
    yield ON_DEMAND, cell(D.F8E4M3, ROW + COLUMN, 2, d=D.BF16, math="fast", epilogue=SCALED)
    plain = cell(D.F8E4M3, ROW + COLUMN, 4, d=D.BF16, epilogue=SCALED)
    tile = (MOST, MOST_BLOCK_SCALED, plain.tile[2])
    yield FULL, dataclasses.replace(plain, tile=tile, scale_granularity=BLOCKWISE, scale_type="f32")


FAMILY = Family(
    op="gemm",
    generation="sm90",
    archs=(SmArch.SM90A,),
    template="gemm_few_sm90",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=2.5,
    compile_mb=1200,
    mainloops=(FEW,),
    trees=True,
    waits=True,
)
