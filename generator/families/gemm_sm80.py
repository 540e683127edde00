"""Dense GEMM of the sm80 generation: CUTLASS 2.x mainloops over mma.sync, DMMA or FFMA, on every arch."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import COMMON, LINEAR, SCALED, SCALED_COMMON, has_tree, split
from ..key import COLUMN, ROW, KernelKey, Triple, instruction_shape, opcode_class
from ..rules import (
    COMMON_LAYOUTS,
    FP8_TYPES,
    GEMM_OUTPUTS,
    HALF_TYPES,
    LAYOUTS,
    OK,
    Status,
    accumulator,
    no,
    supports_gemm,
)
from . import sm80
from .base import DEFAULT, FULL, ON_DEMAND, SMOKE, Cell, Family, epilogue_cpp, numbers

D = CutlassDtype

FP8_ARCHS = (SmArch.SM89, SmArch.SM90A, SmArch.SM100, SmArch.SM120)
"""Archs with mma.sync of fp8: from sm_89 on. On sm_90a and sm_100a it is assembled to f16 instructions."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR, SCALED, COMMON, SCALED_COMMON))
    if not common:
        return common
    if key.a in FP8_TYPES and key.arch not in FP8_ARCHS:
        return no(f"{key.arch.value} has no instruction that multiplies fp8: it needs sm_89 or later")
    if key.scale_type or key.scale_granularity != (0, 0, 0):
        return no("the sm80 generation has no block scales")
    if split(key.epilogue)[0] in (SCALED, SCALED_COMMON) and (opcode_class(key) == "simt" or key.acc is not D.F32):
        return no("the scaled epilogue is for products of tensor cores in f32")
    general = sm80.supports_scheduler(key) and sm80.supports_mainloop(key)
    if not general:
        return general
    if key.d.bits == 8 and (key.align_d > 8 or (key.align_d < 8 and key.epilogue == LINEAR)):
        return no("sm80 epilogues store 8 elements of 8 bits at once; visitors store single ones as well")
    if key.swizzle not in (1, 2, 4, 8):
        return no(f"sm80 swizzles are 1, 2, 4 and 8, not {key.swizzle}")
    if (opcode_class(key) == "simt" or key.a is D.F64) and (key.align_a, key.align_b) != (1, 1):
        vectors = _supports_dmma_vectors(key) if key.a is D.F64 else _supports_vectors(key)
        if not vectors:
            return vectors
    tiled = sm80.supports_tile(key)
    if tiled and opcode_class(key) == "simt" and key.arch is SmArch.SM120 and _results_a_thread(key) > 64:
        return no("SIMT kernels for sm_120a have at most 64 results a thread: more spill registers")
    return tiled


# Of mainloop_dmma.h: those that were compiled without spills.
_DMMA_TILES: tuple[Triple, ...] = (
    *((64, 128, 16), (64, 96, 16), (64, 64, 16), (64, 32, 16), (32, 128, 16), (32, 96, 16), (32, 64, 16)),
    *((96, 64, 16), (96, 32, 16)),
    *((64, 64, 32), (64, 32, 32), (32, 64, 32), (32, 32, 32)),
)


def _supports_vectors(key: KernelKey) -> Status:
    """Whether the FFMA mainloop with vector loads supports the key's tile (mainloop_simt.h)."""
    if (key.a, key.align_a, key.align_b) != (D.F32, 4, 4):
        return no("SIMT kernels load single elements, or vectors of four f32")
    if key.arch is not SmArch.SM90A:
        return no("SIMT kernels that load vectors are for sm_90a")
    if key.tile[2] != 16 or key.warps[2] != 1 or key.mainloop != "multistage":
        return no("SIMT kernels that load vectors have tiles of 16 along K")
    if any(extent not in (32, 64, 128, 256) for extent in key.tile[:2]) or key.warps[0] * key.warps[1] not in (4, 8):
        return no("SIMT kernels that load vectors have four or eight warps and tiles of 32 to 256")
    if not 64 <= _results_a_thread(key) <= 128:
        return no("SIMT kernels that load vectors have 64 to 128 results a thread: others spill registers")
    return OK


def _supports_dmma_vectors(key: KernelKey) -> Status:
    """Whether the DMMA mainloop with vector loads supports the key's tile (mainloop_dmma.h)."""
    if (key.align_a, key.align_b) != (2, 2):
        return no("DMMA kernels load single elements, or vectors of two")
    if key.arch is not SmArch.SM90A:
        return no("DMMA kernels that load vectors are for sm_90a")
    if key.warps != (2, 2, 1) or key.mainloop != "multistage":
        return no("DMMA kernels that load vectors have two by two warps")
    # Threads load equal shares of each line.
    if (key.layout_a == COLUMN and 128 % key.tile[0]) or (key.layout_b == ROW and 128 % key.tile[1]):
        return no("DMMA kernels whose lines lie along M or N have tiles of 32, 64 or 128 there")
    if key.tile not in _DMMA_TILES:
        tiles = ", ".join("x".join(map(str, tile)) for tile in _DMMA_TILES)
        return no(f"DMMA kernels that load vectors have tiles that were compiled without spills: {tiles}")
    return OK


def divides(key: KernelKey) -> bool:
    """Whether a kernel divides K into slices, each with a D of its own, where that was measured (GemmSm80::kSliced)."""
    return (
        (key.op, key.generation, key.arch, key.epilogue) == ("gemm", "sm80", SmArch.SM90A, LINEAR)
        and (key.math == "ieee" or key.a is D.F64)
        and key.d is key.acc
    )


def _results_a_thread(key: KernelKey) -> int:
    return key.tile[0] * key.tile[1] // (key.warps[0] * key.warps[1] * key.warps[2] * 32)


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    m, n, k = (t // w for t, w in zip(key.tile, key.warps, strict=True))
    header = "gemm_sm80_scaled" if split(key.epilogue)[0] == SCALED else "gemm_sm80"
    return {
        "header": "gemm_sm80_tree" if has_tree(key.epilogue) else header,
        **epilogue_cpp(key),
        "opcode_class": "OpClassSimt" if opcode_class(key) == "simt" else "OpClassTensorOp",
        "mma_arch": "Sm89" if key.a in FP8_TYPES else "Sm80",
        "tile": numbers(key.tile),
        "warp_tile": numbers((m, n, k)),
        "instruction": numbers(instruction_shape(key)),
        "stages": str(key.stages),
        "math_operator": _math_operator(key),
        "swizzle": str(key.swizzle),
    }


def _math_operator(key: KernelKey) -> str:
    if key.math == "3xtf32":
        return "OpMultiplyAddFastF32"
    if key.math == "fast":
        return "OpMultiplyAddFastAccum"
    # CUTLASS has only the saturating form of the 16x8x32 integer instruction.
    return "OpMultiplyAddSaturate" if key.acc is CutlassDtype.I32 else "OpMultiplyAdd"


def _gemm_sm80(
    arch: SmArch,
    a: D,
    d: D,
    layouts: str,
    aligns: Triple,
    tile: Triple,
    warps: Triple,
    stages: int,
    math: str = "default",
    *,
    b: D | None = None,
    epilogue: str = "lc",
) -> KernelKey:
    return KernelKey(
        op="gemm",
        generation="sm80",
        arch=arch,
        a=a,
        b=b or a,
        d=d,
        acc=accumulator(a),
        layout_a=layouts[0],
        layout_b=layouts[1],
        layout_d=ROW,
        align_a=aligns[0],
        align_b=aligns[1],
        align_d=aligns[2],
        tile=tile,
        cluster=(1, 1, 1),
        warps=warps,
        stages=stages,
        mainloop="twostage" if stages == 2 else "multistage",
        epilogue_schedule="",
        scheduler="identity",
        swizzle=8,
        math=math,
        epilogue=epilogue,
    )


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    # If TMA kernels serve every aligned operand, the sm80 generation serves only the others.
    fallback = arch in (SmArch.SM90A, SmArch.SM100)
    yield from _half_cells(arch, fallback)
    yield from _single_cells(arch, fallback)
    for layouts in LAYOUTS:
        common = layouts in COMMON_LAYOUTS
        yield (
            DEFAULT if common else FULL,
            _gemm_sm80(arch, D.F64, D.F64, layouts, (1, 1, 1), (64, 64, 16), (2, 2, 1), 4),
        )
        if common and arch is SmArch.SM90A:
            for tier, tile, stages in _F64_VECTORS[layouts]:
                yield tier, _gemm_sm80(arch, D.F64, D.F64, layouts, (2, 2, 1), tile, (2, 2, 1), stages)
        elif common and arch is not SmArch.SM100:
            yield FULL, _gemm_sm80(arch, D.F64, D.F64, layouts, (1, 1, 1), (128, 128, 16), (4, 2, 1), 3)
    # Beside TMA kernels it gains 0.08% on random shapes.
    integer_tier = ON_DEMAND if arch is SmArch.SM90A else FULL if fallback else DEFAULT
    yield integer_tier, _gemm_sm80(arch, D.I8, D.I32, "rc", (16, 16, 4), (128, 128, 64), (2, 2, 1), 4)
    if not fallback:
        yield FULL, _gemm_sm80(arch, D.I8, D.I32, "rc", (16, 16, 4), (64, 64, 64), (2, 2, 1), 6)
    # On sm_90a a kernel for few rows of any address is in its place.
    narrow_tier = ON_DEMAND if arch is SmArch.SM90A else FULL
    yield narrow_tier, _gemm_sm80(arch, D.I8, D.I32, "rc", (4, 4, 1), (64, 64, 64), (2, 2, 1), 6)
    yield SMOKE, _gemm_sm80(arch, D.I8, D.I32, "rc", (1, 1, 1), (64, 64, 64), (2, 2, 1), 2)
    if arch in FP8_ARCHS:
        yield from _fp8_cells(arch, fallback)


def _half_cells(arch: SmArch, fallback: bool) -> Iterator[Cell]:
    for a in HALF_TYPES:
        for layouts in LAYOUTS:
            common = layouts in COMMON_LAYOUTS
            for d in GEMM_OUTPUTS[a, a, "default"]:
                smoke = a is D.BF16 and d is a
                tier = DEFAULT if common and d in (a, D.F32) else FULL
                rare = arch is SmArch.SM90A and not common  # operands are copied first
                yield (
                    SMOKE if smoke and common else ON_DEMAND if rare else tier,
                    _gemm_sm80(arch, a, d, layouts, (1, 1, 1), (64, 64, 32), (2, 2, 1), 2),
                )
                if (d is a and (common or not fallback)) or (d is D.F32 and common and not fallback):
                    yield FULL, _gemm_sm80(arch, a, d, layouts, (2, 2, 2), (128, 128, 32), (2, 2, 1), 4)
                if fallback:
                    continue
                aligned = (8, 8, 128 // d.bits)
                yield (
                    SMOKE if smoke and layouts == "rc" else tier,
                    _gemm_sm80(arch, a, d, layouts, aligned, (128, 128, 32), (2, 2, 1), 4),
                )
                if d is not a:
                    continue
                yield tier, _gemm_sm80(arch, a, d, layouts, aligned, (64, 64, 64), (2, 2, 1), 5)
                yield FULL, _gemm_sm80(arch, a, d, layouts, aligned, (128, 256, 32), (2, 4, 1), 3)
                if common:
                    yield FULL, _gemm_sm80(arch, a, d, layouts, aligned, (256, 128, 32), (4, 2, 1), 3)
                    yield FULL, _gemm_sm80(arch, a, d, layouts, aligned, (128, 64, 32), (2, 2, 1), 5)
                    yield FULL, _gemm_sm80(arch, a, d, layouts, aligned, (64, 128, 32), (2, 2, 1), 5)


# Of IEEE f32 on sm_90a with loads of single elements, for few rows: tile, warps and stages.
_IEEE_TILES: dict[str, tuple[Triple, Triple, int]] = {
    "rc": ((32, 128, 8), (1, 4, 1), 5),
    "rr": ((16, 128, 16), (1, 4, 1), 5),
}
# Of IEEE f32 and f64 on sm_90a with loads of vectors (mainloop_simt.h, mainloop_dmma.h): tile, of f32 warps, and
# stages. They are a greedy cover of 192 random problems of f32 (docs/performance-log.md, 2026-11-26) and 116 of f64
# (2026-11-28).
_IEEE_VECTORS: tuple[tuple[Triple, Triple, int], ...] = (
    ((64, 128, 16), (2, 2, 1), 4),
    ((32, 256, 16), (1, 4, 1), 4),
)
_F64_VECTORS: dict[str, tuple[tuple[int, Triple, int], ...]] = {
    "rc": (
        (FULL, (64, 128, 16), 4),
        (FULL, (96, 64, 16), 4),
        (FULL, (64, 64, 16), 4),
        (FULL, (32, 96, 16), 4),
        (FULL, (32, 32, 32), 5),
        (ON_DEMAND, (64, 96, 16), 4),
        (ON_DEMAND, (32, 64, 16), 5),
    ),
    "rr": (
        (FULL, (96, 64, 16), 4),
        (FULL, (64, 64, 16), 4),
        (FULL, (32, 128, 16), 4),
        (FULL, (32, 64, 16), 5),
        (ON_DEMAND, (64, 128, 16), 4),
        (ON_DEMAND, (96, 32, 16), 4),
        (ON_DEMAND, (32, 32, 32), 5),
    ),
}


def _single_cells(arch: SmArch, fallback: bool) -> Iterator[Cell]:
    for layouts in LAYOUTS:
        common = layouts in COMMON_LAYOUTS
        for d in GEMM_OUTPUTS[D.F32, D.F32, "tf32"]:
            tier = DEFAULT if common and d is D.F32 else FULL
            # Narrow results of f32 are rare.
            aligned = tier if d is D.F32 or (common and not fallback) else ON_DEMAND
            # The RS mainloop of sm_90a is in `full` only. Where B is column-major others serve, of a column-major A
            # after a copy: this one would be chosen for 2 of 1,200 random problems.
            served = arch is SmArch.SM90A and layouts[1] == COLUMN and d is D.F32
            yield (
                ON_DEMAND if served else FULL if fallback and layouts == "rc" and d is D.F32 else aligned,
                _gemm_sm80(arch, D.F32, d, layouts, (4, 4, 4), (128, 128, 16), (2, 2, 1), 4, "tf32"),
            )
            yield aligned, _gemm_sm80(arch, D.F32, d, layouts, (4, 4, 4), (128, 128, 16), (4, 2, 1), 4, "3xtf32")
            # Single elements of a column-major A are rare: kernels for few rows of any address are in their places.
            single = ON_DEMAND if arch is SmArch.SM90A and layouts[0] == COLUMN else tier
            yield single, _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), (64, 64, 32), (2, 2, 1), 3, "tf32")
            yield single, _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), (64, 64, 16), (2, 2, 1), 3, "3xtf32")
            ieee = SMOKE if layouts == "rr" and d is D.F32 else tier
            yield (
                ON_DEMAND if d is not D.F32 and (arch is SmArch.SM90A or (fallback and not common)) else ieee,
                _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), (128, 128, 8), (4, 2, 1), 5, "ieee"),
            )
        if arch is SmArch.SM100 and common:
            yield FULL, _gemm_sm80(arch, D.F32, D.F32, layouts, (1, 1, 1), (128, 256, 8), (4, 2, 1), 4, "ieee")
            yield FULL, _gemm_sm80(arch, D.F32, D.F32, layouts, (1, 1, 1), (64, 64, 8), (2, 1, 1), 5, "ieee")
        if arch is SmArch.SM90A and common:
            tile, warps, stages = _IEEE_TILES[layouts]
            yield FULL, _gemm_sm80(arch, D.F32, D.F32, layouts, (1, 1, 1), tile, warps, stages, "ieee")
            for tile, warps, stages in _IEEE_VECTORS:
                yield FULL, _gemm_sm80(arch, D.F32, D.F32, layouts, (4, 4, 1), tile, warps, stages, "ieee")
        if not fallback:
            # 128x64 spills a register where rows of B are contiguous.
            tile = (64, 128, 8) if layouts[1] == ROW else (128, 64, 8)
            yield FULL, _gemm_sm80(arch, D.F32, D.F32, layouts, (1, 1, 1), tile, (2, 2, 1), 5, "ieee")
            if arch is not SmArch.SM120:
                yield FULL, _gemm_sm80(arch, D.F32, D.F32, layouts, (1, 1, 1), (256, 128, 8), (4, 2, 1), 4, "ieee")


def _fp8_cells(arch: SmArch, fallback: bool) -> Iterator[Cell]:
    e4m3 = D.F8E4M3
    for a in FP8_TYPES:
        for b in FP8_TYPES:
            plain = a is b is e4m3
            for d in GEMM_OUTPUTS[a, b, "default"] if plain and not fallback else (D.BF16, D.F32):
                if d is D.BF16 or plain:
                    yield FULL, _fp8(arch, a, b, d, (1, 1, 1), (64, 64, 64), (2, 2, 1), 2)
            if fallback:
                continue
            for d in GEMM_OUTPUTS[a, b, "default"]:
                aligned = (16, 16, min(8, 128 // d.bits))
                tier = DEFAULT if plain and d is D.BF16 else FULL
                yield tier, _fp8(arch, a, b, d, aligned, (128, 128, 64), (2, 4, 1), 3)
            yield FULL, _fp8(arch, a, b, D.BF16, (16, 16, 8), (128, 128, 64), (2, 2, 1), 3, math="fast")
    yield (
        ON_DEMAND if arch is SmArch.SM90A else FULL,
        _fp8(arch, e4m3, e4m3, D.BF16, (4, 4, 1), (64, 64, 64), (2, 2, 1), 4),
    )
    if not fallback:
        aligned = (16, 16, 8)
        yield FULL, _fp8(arch, e4m3, e4m3, D.BF16, aligned, (64, 64, 64), (2, 2, 1), 5)
        yield DEFAULT, _fp8(arch, e4m3, e4m3, D.BF16, aligned, (128, 128, 64), (2, 4, 1), 3, epilogue="lc")
        yield FULL, _fp8(arch, e4m3, e4m3, D.BF16, aligned, (128, 128, 64), (2, 2, 1), 3, math="fast", epilogue="lc")


def _fp8(
    arch: SmArch,
    a: D,
    b: D,
    d: D,
    aligns: Triple,
    tile: Triple,
    warps: Triple,
    stages: int,
    *,
    math: str = "default",
    epilogue: str = "scaled",
) -> KernelKey:
    return _gemm_sm80(arch, a, d, "rc", aligns, tile, warps, stages, math, b=b, epilogue=epilogue)


FAMILY = Family(
    op="gemm",
    generation="sm80",
    archs=tuple(SmArch),
    template="gemm_sm80",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=2.5,
    compile_mb=1500,
    trees=True,
)
