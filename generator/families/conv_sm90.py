"""Convolutions of the sm90 generation: implicit GEMM over TMA (im2col) and WGMMA in CUTLASS 3.x's kernel."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import has_tree
from ..key import KernelKey
from ..rules import FP8_TYPES, HALF_TYPES, OK, Status, no
from .base import (
    FULL,
    ON_DEMAND,
    SMOKE,
    Cell,
    Family,
    epilogue_cpp,
    numbers,
    static_ints,
    tma_key,
    wgmma_instructions,
)
from .conv import LAYOUTS, OPERATIONS, activation_cpp, supports_conv

D = CutlassDtype


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_conv(key)
    if not common:
        return common
    if key.a not in (*HALF_TYPES, *FP8_TYPES) and key.math != "tf32":
        return no(f"WGMMA convolves f16, bf16, tf32 and fp8, not {key.a.value} ({key.math})")
    if key.a.bits != 16 and key.op != "conv2d_fprop":
        return no("WGMMA reads 8-bit and tf32 operands contiguous along K, which those of dgrad and wgrad are not")
    if key.mainloop != "warpspecialized" or key.scheduler != "identity" or key.epilogue_schedule != "tma":
        return no("CUTLASS's convolutions for sm_90a are warpspecialized, with one tile a block, and store through TMA")
    if key.group_mode or key.iterator or key.stride_support:
        return no("TMA convolutions know neither groups, iterators nor, in dgrad, strides")
    for name, align, dtype in (("A", key.align_a, key.a), ("B", key.align_b, key.b), ("D", key.align_d, key.d)):
        if align * dtype.bits != 128:
            return no(f"TMA needs the channels of {name} aligned to 16 bytes: {128 // dtype.bits} of {dtype.value}")
    m, n, k = key.tile
    if m % 64 or n % 8 or n > 256:
        return no("tiles are multiples of 64 along M and of 8 up to 256 along N")
    if k * key.a.bits != 1024:
        return no("the K tile is 128 bytes, the widest swizzle")
    # One warp group computes the whole tile, with 255 registers a thread.
    if m * n // 128 > 128:
        return no("the accumulators would spill: at most 128 registers a thread")
    if key.cluster[2] != 1 or key.cluster[0] * key.cluster[1] > 8:
        return no("clusters are at most 8 thread blocks, none along K")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm90 kernels take warps from the schedule and have no swizzle")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    if has_tree(key.epilogue):
        epilogue = epilogue_cpp(key, "QuadLanes")
    else:
        epilogue = {"tree": "", "epilogue": f"BiasEpilogue<{activation_cpp(key)}>"}
    return {
        "instructions": wgmma_instructions(key),
        "operation": OPERATIONS[key.op],
        "tile": numbers(key.tile),
        "cute_cluster": static_ints(key.cluster),
        "stages": str(key.stages),
        **epilogue,
    }


def conv_sm90(
    op: str,
    a: D,
    d: D,
    tile: tuple[int, int],
    cluster: tuple[int, ...] = (1, 1),
    *,
    stages: int = 0,
    epilogue: str = "lc",
) -> KernelKey:
    """A key of this family."""
    math = {D.F32: "tf32", D.F8E4M3: "fast", D.F8E5M2: "fast"}.get(a, "default")
    return tma_key(
        op, SmArch.SM90A, a, d, LAYOUTS[op], tile, cluster, "warpspecialized", scheduler="identity",
        stages=stages, math=math, epilogue=epilogue,
    )  # fmt: skip


def _fprop(_: SmArch) -> Iterator[Cell]:
    op = "conv2d_fprop"
    for a in HALF_TYPES:
        yield SMOKE if a is D.BF16 else FULL, conv_sm90(op, a, a, (128, 128))
        # A block computes one tile: with few stages, blocks share a multiprocessor and hide each other's start and end.
        yield FULL, conv_sm90(op, a, a, (128, 64), stages=4)
    yield FULL, conv_sm90(op, D.F32, D.F32, (128, 128))
    for a in FP8_TYPES:
        yield FULL if a is D.F8E4M3 else ON_DEMAND, conv_sm90(op, a, D.BF16, (128, 128))


def _dgrad(_: SmArch) -> Iterator[Cell]:
    for a in HALF_TYPES:
        yield FULL, conv_sm90("conv2d_dgrad", a, a, (128, 128))
        yield FULL, conv_sm90("conv2d_dgrad", a, a, (128, 64), stages=4)


def _wgrad(_: SmArch) -> Iterator[Cell]:
    for a in HALF_TYPES:
        yield FULL, conv_sm90("conv2d_wgrad", a, a, (128, 128))
        yield FULL, conv_sm90("conv2d_wgrad", a, a, (128, 64), stages=4)


FAMILIES = tuple(
    Family(
        op=op,
        generation="sm90",
        archs=(SmArch.SM90A,),
        template="conv_sm90",
        supports=supports,
        cells=cells,
        values=values,
        compile_seconds=4.0,
        compile_mb=3600,
        trees=trees,
    )
    for op, cells, trees in (
        ("conv2d_fprop", _fprop, True),
        ("conv2d_dgrad", _dgrad, True),
        ("conv2d_wgrad", _wgrad, False),
    )
)
