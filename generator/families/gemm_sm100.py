"""Dense GEMM of the sm100 generation: CUTLASS 3.x warp-specialized kernels over TMA and UMMA (tcgen05)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype, ScaleType
from ..epilogue.lower import COMMON, LINEAR, SCALED, SCALED_COMMON, split
from ..key import COLUMN, ROW, KernelKey
from ..rules import (
    BLOCKWISE,
    COMMON_LAYOUTS,
    FP8_TYPES,
    HALF_TYPES,
    LAYOUTS,
    OK,
    Status,
    no,
    supports_gemm,
)
from .base import DEFAULT, FULL, Cell, Family, epilogue_cpp, numbers, static_ints, tma_key

D = CutlassDtype

FP4_SCALES = {"ue4m3": (1, 1, 16), "ue8m0": (1, 1, 32)}
"""Block scales of fp4, by their type: nvfp4 and mxfp4."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR, SCALED, COMMON, SCALED_COMMON))
    if not common:
        return common
    if key.a not in (*HALF_TYPES, *FP8_TYPES, D.I8, D.F4E2M1) and key.math != "tf32":
        return no(f"UMMA multiplies f16, bf16, tf32, i8, fp8 and fp4, not {key.a.value} ({key.math})")
    if key.math == "fast":
        return no("UMMA accumulates fp8 in full at the full rate: math is default, fast accumulation does not exist")
    if split(key.epilogue)[0] == SCALED and key.acc is not D.F32:
        return no(f"the scaled epilogue is for accumulators of f32, not {key.acc.value}")
    umma = supports_umma(key)
    return supports_scales(key) if umma else umma


def supports_scales(key: KernelKey) -> Status:
    """Whether the block scales of a key match its operands and tile."""
    if key.a is D.F4E2M1:
        return supports_fp4(key)
    if not key.scale_type and key.scale_granularity == (0, 0, 0):
        return OK
    if key.a not in FP8_TYPES or (key.scale_type, key.scale_granularity) != ("f32", BLOCKWISE):
        return no("block scales of sm100 kernels are f32 for fp8 operands, one for 1x128 of A and one for 128x128 of B")
    if key.epilogue_schedule != "tma":
        return no("block-scaled fp8 kernels of the sm100 generation have the TMA epilogue")
    if key.tile not in ((128, 128, 128), (256, 128, 128)):
        return no("tiles of block-scaled fp8 kernels are 128x128x128 (1sm) and 256x128x128 (2sm)")
    if split(key.epilogue)[0] == SCALED:
        return no("block-scaled fp8 kernels of the sm100 generation do not scale D: they spill registers")
    return OK


def supports_fp4(key: KernelKey) -> Status:
    """Whether fp4 operands have scales, and the layout and tile that the tensor cores support."""
    if FP4_SCALES.get(key.scale_type) != key.scale_granularity:
        return no("fp4 is multiplied with block scales: ue4m3 for 16 elements along K (nvfp4) or ue8m0 for 32 (mxfp4)")
    if (key.layout_a, key.layout_b) != (ROW, COLUMN):
        return no("fp4 kernels need A row-major and B column-major (both contiguous along K)")
    if split(key.epilogue)[0] != LINEAR:
        return no("scale_a and scale_b of fp4 are scales of blocks: the epilogue is lc, or a tree on top of it")
    if key.tile[0] % 128 or key.tile[1] % 128:
        return no("scales of fp4 come 128 rows at a time: tiles are multiples of 128 along M and N")
    if key.generation == "sm100" and key.tile[0] != (256 if key.mainloop == "2sm" else 128):
        return no("fp4 tiles of the sm100 generation are 128 (1sm) and 256 (2sm) along M")
    return OK


def supports_umma(key: KernelKey, schedulers: tuple[str, ...] = ("persistent", "streamk")) -> Status:
    """Whether tile, cluster, schedules and alignments meet the common rules of all families over UMMA."""
    if key.mainloop not in ("1sm", "2sm"):
        return no(f"sm100 mainloops are 1sm and 2sm (one MMA over one or two thread blocks), not {key.mainloop!r}")
    if key.epilogue_schedule not in ("tma", "nosmem"):
        return no(f"sm100 epilogues are tma and nosmem, not {key.epilogue_schedule!r}")
    for name, align, dtype in (("A", key.align_a, key.a), ("B", key.align_b, key.b)):
        if align * dtype.bits != 128:
            return no(f"TMA needs {name} aligned to 16 bytes: {128 // dtype.bits} elements of {dtype.value}")
    if key.epilogue_schedule == "tma" and key.align_d * key.d.bits != 128:
        return no(f"the TMA epilogue needs D aligned to 16 bytes: {128 // key.d.bits} elements of {key.d.value}")
    if key.align_d * key.d.bits > 128:
        return no("vector accesses are at most 16 bytes")
    pair = key.mainloop == "2sm"
    m, n, k = key.tile
    rows = (128, 256) if pair else (64, 128)
    if m not in rows or n not in (64, 128, 192, 256):
        return no(f"{key.mainloop} tiles are {rows[0]} or {rows[1]} along M and 64, 128, 192 or 256 along N")
    if key.epilogue != LINEAR and m // (2 if pair else 1) < 128:
        # amax and other reductions would include threads without a row of such a tile.
        return no("scaled epilogues and trees need tiles of 128 rows in each thread block")
    if k * key.a.bits != 1024:
        return no("the K tile is 128 bytes, the widest swizzle")
    if pair and key.cluster[0] % 2:
        return no("a 2sm cluster has an even number of thread blocks along M")
    if key.cluster[2] != 1 or key.cluster[0] * key.cluster[1] > 8 or any(c & (c - 1) for c in key.cluster):
        return no("clusters are at most 8 thread blocks, powers of two, none along K")
    if key.scheduler not in schedulers:
        return no(f"schedulers of {key.op} of the sm100 generation: {', '.join(schedulers)}, not {key.scheduler!r}")
    if key.scheduler == "streamk" and (key.a not in HALF_TYPES or key.epilogue_schedule != "tma"):
        return no("stream-K of the sm100 generation is for f16 and bf16, with the TMA epilogue")
    if key.scheduler == "streamk" and key.tile[1] > 64:
        return no("stream-K adds up tiles in registers: more than 64 columns would spill")
    if key.stages == 1:
        return no("the mainloop has at least 2 stages")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm100 kernels take warps from the schedule and the swizzle at run time")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    units = "2Sm" if key.mainloop == "2sm" else "1Sm"
    store = "NoSmem" if key.epilogue_schedule == "nosmem" else "Tma"
    kind, header = "", "gemm_sm100"
    if key.a is D.F4E2M1:
        kind, header = ("Nvf4" if key.scale_type == "ue4m3" else "Mxf4"), "gemm_sm100_fp4"
    elif key.scale_type:
        header = "gemm_sm100_blockwise"
    blockwise = "Blockwise" if header == "gemm_sm100_blockwise" else ""
    return common_values(key) | {
        "header": header,
        "arch_tag": "Sm100",
        "mainloop_schedule": f"KernelTmaWarpSpecialized{blockwise}{units}{kind}Sm100",
        "epilogue_schedule": f"{store}WarpSpecialized{units}",
    }


def common_values(key: KernelKey) -> dict[str, str]:
    """The values that the templates of all Blackwell generations share."""
    scales = "NoScales"
    if key.scale_type == "f32":
        scales = f"FloatScales<{numbers(key.scale_granularity)}>"
    elif key.scale_type:
        scales = f"VectorScales<{ScaleType(key.scale_type).cpp}, {key.scale_granularity[2]}>"
    return {
        "opcode_class": "OpClassBlockScaledTensorOp" if key.a is D.F4E2M1 else "OpClassTensorOp",
        "cute_tile": static_ints(key.tile),
        "cute_cluster": static_ints(key.cluster),
        "stage_count": f"cutlass::gemm::collective::StageCount<{key.stages}>" if key.stages else "void",
        **epilogue_cpp(key),
        "scales": scales,
        "scheduler": "StreamKScheduler" if key.scheduler == "streamk" else "PersistentScheduler",
    }


# Tile of the MMA, cluster and mainloop; the K tile is 128 bytes.
_Shape = tuple[tuple[int, int], tuple[int, int], str]
_LARGE: _Shape = ((256, 256), (2, 1), "2sm")
_PAIR: _Shape = ((256, 128), (2, 1), "2sm")
_ONE: _Shape = ((128, 128), (1, 1), "1sm")
_FEW: _Shape = ((128, 64), (1, 1), "1sm")
_TILES = (_LARGE, _PAIR, _ONE, _FEW, ((128, 256), (1, 1), "1sm"), ((64, 64), (1, 1), "1sm"))


gemm_sm100 = functools.partial(tma_key, "gemm", SmArch.SM100)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM100:
        return
    for layouts in LAYOUTS:
        common = layouts in COMMON_LAYOUTS
        for a in HALF_TYPES:
            tiles = _TILES if a is D.BF16 else (_LARGE, _PAIR, _ONE, _FEW)
            for tile in tiles if common else (_LARGE, _ONE):
                first = a is D.BF16 and layouts == "rc" and tile in (_LARGE, _ONE)
                yield DEFAULT if first else FULL, gemm_sm100(a, a, layouts, *tile)
            if common:
                for tile in (_LARGE, _ONE):
                    yield FULL, gemm_sm100(a, D.F32, layouts, *tile)
                # D whose rows are not 16-byte aligned, such as a vocabulary of 50257 columns.
                yield FULL, gemm_sm100(a, a, layouts, *_ONE, epilogue_schedule="nosmem")
            if layouts == "rc":
                yield FULL, gemm_sm100(a, a, layouts, (256, 64), (2, 1), "2sm", scheduler="streamk")
        for tile in (_PAIR, _ONE) if layouts == "rc" else (_ONE,):
            yield FULL, gemm_sm100(D.F32, D.F32, layouts, *tile, math="tf32")
            yield FULL, gemm_sm100(D.I8, D.I32, layouts, *tile)
    yield from _fp8_cells()
    for scale_type, granularity in FP4_SCALES.items():
        for d in (D.BF16, D.F16, D.F32):
            for tile in (_LARGE, _PAIR, _ONE) if d is D.BF16 else (_ONE,):
                first = scale_type == "ue4m3" and d is D.BF16 and tile is _LARGE
                yield (
                    DEFAULT if first else FULL,
                    gemm_sm100(D.F4E2M1, d, "rc", *tile, scale_type=scale_type, scale_granularity=granularity),
                )


def _fp8_cells() -> Iterator[Cell]:
    e4m3, e5m2 = D.F8E4M3, D.F8E5M2
    for tile in (_LARGE, _ONE):
        yield FULL, gemm_sm100(e4m3, D.BF16, "rc", *tile)
    for tile in (_LARGE, _PAIR, _ONE, _FEW):
        yield FULL, gemm_sm100(e4m3, D.BF16, "rc", *tile, epilogue="scaled")
    for d in (D.F16, D.F32, e4m3):
        yield FULL, gemm_sm100(e4m3, d, "rc", *_ONE, epilogue="scaled")
    for layouts in ("rr", "cr", "cc"):
        yield FULL, gemm_sm100(e4m3, D.BF16, layouts, *_ONE, epilogue="scaled")
    for a, b in ((e4m3, e5m2), (e5m2, e4m3)):
        yield FULL, gemm_sm100(a, D.BF16, "rc", *_ONE, b=b, epilogue="scaled")
    for d in (D.BF16, D.F16):
        for tile in (_PAIR, _ONE):
            yield FULL, gemm_sm100(e4m3, d, "rc", *tile, scale_granularity=BLOCKWISE)


FAMILY = Family(
    op="gemm",
    generation="sm100",
    archs=(SmArch.SM100,),
    template="blackwell",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=10.0,
    compile_mb=3000,
    trees=True,
)
