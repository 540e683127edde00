"""Dense GEMM of the sm90 generation: CUTLASS 3.x warp-specialized kernels over TMA and WGMMA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import COMMON, GATED, GATED_SCALED, LINEAR, SCALED, SCALED_COMMON, has_tree, is_gated
from ..key import COLUMN, ROW, KernelKey, turned_layouts
from ..rules import (
    BLOCKWISE,
    COMMON_LAYOUTS,
    FP8_TYPES,
    GEMM_OUTPUTS,
    HALF_TYPES,
    LAYOUTS,
    OK,
    SLICED,
    Status,
    along_k,
    no,
    supports_gemm,
)
from .base import (
    DEFAULT,
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

D = CutlassDtype

_MAINLOOP_SCHEDULE = {
    "pingpong": "KernelTmaWarpSpecializedPingpong",
    "cooperative": "KernelTmaWarpSpecializedCooperative",
}


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR, SCALED, COMMON, SCALED_COMMON, GATED, GATED_SCALED), layouts_d=(ROW, COLUMN))
    if not common:
        return common
    plain = SCALED if key.a in FP8_TYPES else LINEAR
    if key.layout_d == COLUMN and (key.epilogue != plain or key.epilogue_schedule != "tma" or key.scale_type):
        return no("cells with a column-major D store by TMA and have the linear epilogue, of fp8 the scaled one")
    if is_gated(key.epilogue) and (key.epilogue_schedule != "nosmem" or key.acc is not D.F32):
        return no("gated epilogues store f32 accumulators from registers: their epilogue schedule is nosmem")
    if key.a not in (*HALF_TYPES, *FP8_TYPES, D.I8) and key.math != "tf32":
        return no(f"WGMMA multiplies f16, bf16, tf32, fp8 and i8, not {key.a.value} ({key.math})")
    if key.mainloop not in ("pingpong", "cooperative"):
        return no(f"sm90 mainloops are pingpong and cooperative, not {key.mainloop!r}")
    if key.scheduler not in ("persistent", "fitted", "streamk", SLICED):
        return no(f"sm90 schedulers are fitted, persistent, sliced and streamk, not {key.scheduler!r}")
    if key.scheduler == "streamk" and key.mainloop != "cooperative":
        return no("stream-K needs the cooperative mainloop")
    if key.epilogue_schedule not in ("tma", "nosmem"):
        return no(f"sm90 epilogues are tma and nosmem, not {key.epilogue_schedule!r}")
    for name, align, dtype in (("A", key.align_a, key.a), ("B", key.align_b, key.b)):
        if align * dtype.bits != 128:
            return no(f"TMA needs {name} aligned to 16 bytes: {128 // dtype.bits} elements of {dtype.value}")
    if key.epilogue_schedule == "tma" and key.align_d * key.d.bits != 128:
        return no(f"the TMA epilogue needs D aligned to 16 bytes: {128 // key.d.bits} elements of {key.d.value}")
    layouts = key.layout_a + key.layout_b
    if key.a in FP8_TYPES and layouts != ROW + COLUMN and (key.math != "fast" or key.scale_type):
        return along_k("fp8 kernels of the sm90 generation with full accumulation", key.layout_a, key.layout_b)
    swapped = (key.layout_a, key.layout_b) == (ROW, ROW) and key.a.bits != 16
    if swapped and key.epilogue_schedule != "nosmem":
        return no("with A and B row-major the builder swaps the operands, which its TMA epilogue ignores")
    if swapped and has_tree(key.epilogue):
        return no("kernels that swap their operands have no epilogue trees: make A or B contiguous along K")
    m, n, k = key.tile
    groups = 1 if key.mainloop == "pingpong" else 3 if m == 192 else 2
    if m % (64 * groups) or n % 8 or n > 256:
        rows = "multiples of 64" if groups == 1 else "192 or multiples of 128"
        return no(f"{key.mainloop} tiles are {rows} along M and multiples of 8 up to 256 along N")
    if key.layout_d == COLUMN and n % 16:
        return no("tiles of a column-major D are multiples of 16 along N")
    if is_gated(key.epilogue) and n % 32:
        return no("gated epilogues exchange four blocks of eight columns at once: tiles are multiples of 32 along N")
    if k * key.a.bits != 1024:
        return no("the K tile is 128 bytes, the widest swizzle")
    # A thread of a consumer warp group has 240 registers, of three groups 160. Accumulators may take 128 of them; 192
    # where all but 128 belong to the mainloop (PromotedMainloop), or where only alpha and beta C follow; 176 where
    # scales follow in fast accumulation; of three groups 104 and 96. More spills, or was not tried.
    registers, limit = m * n // (128 * groups), 128
    is_plain = key.a.bits == 16 and (key.epilogue, key.epilogue_schedule) == (LINEAR, "tma")
    is_scaled = (
        (key.math, key.epilogue, key.epilogue_schedule, layouts) == ("fast", SCALED, "tma", ROW + COLUMN)
        and key.scheduler != "streamk"
        and key.d.bits == 16
    )
    if key.a in FP8_TYPES and key.math == "default":
        registers, limit = registers + n // 2 * (2 if m == 64 * groups and n <= 128 else 1), 192
    elif is_scaled:
        limit = 96 if groups == 3 else 176
    elif is_plain:
        limit = 104 if groups == 3 else 192
    if groups == 3 and (not (is_plain or is_scaled) or key.d.bits != 16 or key.scheduler == "streamk" or key.stages):
        return no(
            "tiles of 192 rows, by three warp groups, are for f16 and bf16 with linear epilogues and fast accumulation "
            "of fp8 with scaled ones, over TMA, with as many stages as fit"
        )
    if registers > limit:
        return no(f"the accumulators would spill: at most {limit} registers a thread")
    for own in (_supports_block_scales(key), _supports_fitted(key), _supports_sliced(key)):
        if not own:
            return own
    if key.cluster[2] != 1 or key.cluster[0] * key.cluster[1] > 8:
        return no("clusters are at most 8 thread blocks, none along K")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm90 kernels take warps from the schedule and the swizzle at run time")
    return OK


def _supports_block_scales(key: KernelKey) -> Status:
    if not key.scale_type and key.scale_granularity == (0, 0, 0):
        return OK
    if key.scale_type != "f32" or key.scale_granularity != BLOCKWISE:
        return no("block scales of sm90 kernels are f32, one for 1x128 elements of A and one for 128x128 of B")
    if key.a not in FP8_TYPES or key.math != "default":
        return no("block scales of sm90 kernels are for fp8 operands in full accumulation")
    if key.scheduler != "persistent":
        return no("block-scaled sm90 kernels have the persistent scheduler")
    if key.tile[1] != BLOCKWISE[1]:
        return no("the N tile of a block-scaled sm90 kernel is 128")
    return OK


def _supports_fitted(key: KernelKey) -> Status:
    if key.scheduler != "fitted":
        return OK
    half, fp8 = (key.a.bits, key.epilogue) == (16, LINEAR), (key.a, key.epilogue) == (D.F8E4M3, SCALED)
    if not (half or fp8) or key.d.bits != 16 or key.epilogue_schedule != "tma":
        return no(
            "kernels whose launch chooses the columns of a tile multiply f16 and bf16, or e4m3 with a scaled epilogue, "
            "and store f16 and bf16 by TMA"
        )
    if key.tile[1] % (16 if key.layout_b == COLUMN else 64):
        return no(
            "kernels whose launch chooses the columns of a tile have N tiles that are multiples of 16, of 64 where B "
            "is row-major"
        )
    return OK


def _supports_sliced(key: KernelKey) -> Status:
    if key.scheduler != SLICED:
        return OK
    if (key.a.bits, key.d.bits, key.epilogue, key.epilogue_schedule, key.stages) != (16, 16, LINEAR, "tma", 0):
        return no(
            "kernels that add up K in slices multiply f16 and bf16, store f16 and bf16 by TMA, and have the linear "
            "epilogue and as many stages as fit"
        )
    if (key.tile[0], key.mainloop) not in ((64, "pingpong"), (128, "cooperative")):
        return no("kernels that add up K in slices have pingpong tiles of 64 rows or cooperative tiles of 128")
    if key.tile[1] > 192:
        return no("kernels that add up K in slices have each sum twice, and tiles of at most 192 columns")
    return OK


def widths(key: KernelKey) -> range:
    """The columns of a tile that a launch may choose (`width` of its arguments); empty for other kernels."""
    if key.scheduler != "fitted":
        return range(0)
    # TMA loads a row-major B in boxes as wide as the swizzle that divides a tile's lines. Boxes of 32 bytes take up to
    # twice as long.
    step, n = 16 if key.layout_b == COLUMN else 32, key.tile[1]
    return range(-(-n // (4 * step)) * step, n + 1, step)


def of_width(key: KernelKey, width: int) -> KernelKey:
    """The key of the kernel with tiles of a single width."""
    return dataclasses.replace(key, tile=(key.tile[0], width, key.tile[2]), scheduler="persistent")


def is_for_tables(key: KernelKey) -> bool:
    """Whether a kernel is only built ahead of time: it takes over 6 s to compile, and others serve its problems."""
    return bool(widths(key)) or (_reads_registers(key) and not _has_own_mainloop(key))


def _reads_registers(key: KernelKey) -> bool:
    """Whether one operand reaches the tensor cores through registers."""
    return key.generation == "sm90" and key.math == "tf32" and key.layout_a == key.layout_b


def _has_own_mainloop(key: KernelKey) -> bool:
    """Whether such a kernel has the mainloop of mainloop_register.h: for 256 columns CUTLASS's is a quarter faster."""
    return key.tile[1] < 256


def divides(key: KernelKey) -> bool:
    """Whether a kernel may divide K into slices, each with a D of its own (GemmSm90::kSliced)."""
    return (
        (key.op, key.generation, key.d, key.scale_type) == ("gemm", "sm90", D.F32, "")
        and key.epilogue in (LINEAR, SCALED)
        and key.mainloop in _MAINLOOP_SCHEDULE
        and key.epilogue_schedule == "tma"
        and key.scheduler == "persistent"
    )


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    if key.epilogue_schedule == "nosmem":
        epilogue = "NoSmemWarpSpecialized"
    else:
        epilogue = "TmaWarpSpecializedCooperative" if key.mainloop == "cooperative" else "TmaWarpSpecialized"
    return {
        "instructions": wgmma_instructions(key),
        "cute_tile": static_ints(key.tile),
        "include": _includes(key),
        **_wrapper_cpp(key),
        "cute_cluster": static_ints(key.cluster),
        "stage_count": f"cutlass::gemm::collective::StageCount<{key.stages}>" if key.stages else "void",
        "mainloop_schedule": _MAINLOOP_SCHEDULE[key.mainloop] + _schedule_suffix(key),
        "epilogue_schedule": epilogue,
        **epilogue_cpp(key, "QuadLanes"),
        "scales": f"BlockScales<{numbers(key.scale_granularity)}>" if key.scale_type else "Unscaled",
        "scheduler": "StreamKScheduler" if key.scheduler == "streamk" else "PersistentScheduler",
    }


def _includes(key: KernelKey) -> str:
    """The headers of a cell, as lines of its source."""
    found = ["fitted" if widths(key) else "gemm_sliced_sm90" if key.scheduler == SLICED else "gemm_sm90"]
    if _reads_registers(key) and _has_own_mainloop(key):
        found.append("mainloop_register")
    return "".join(f'#include "atomr_cutlass/{name}.h"\n' for name in found)


def _wrapper_cpp(key: KernelKey) -> dict[str, str]:
    """The values of the template that wrap the cell in one for each width, or in one with a second set of sums."""
    if key.scheduler == SLICED:
        return {"wrapper": "atomr_cutlass::SlicedCell<", "wrapper_end": ">"}
    some = widths(key)
    if not some:
        return {"wrapper": "", "wrapper_end": ""}
    return {"wrapper": "atomr_cutlass::FittedCell<", "wrapper_end": f", {some.start}, {key.tile[1]}, {some.step}>"}


def _schedule_suffix(key: KernelKey) -> str:
    if key.scale_type:
        return "FP8Blockwise"
    # The RS mainloop of the other layouts accumulates fast only.
    return "FP8FastAccum" if key.math == "fast" and key.layout_a + key.layout_b == ROW + COLUMN else ""


# Tile, cluster and mainloop of the sm90 generation, for elements of 2 bytes; narrower and wider elements keep the K
# tile at 128 bytes. The tier is that of f16 and bf16 in the common layouts.
_SM90_TILES: tuple[tuple[int, tuple[int, int], tuple[int, int], str], ...] = (
    (DEFAULT, (128, 256), (2, 1), "cooperative"),
    (SMOKE, (128, 128), (2, 1), "pingpong"),
    (DEFAULT, (64, 64), (1, 1), "pingpong"),
    (FULL, (128, 192), (2, 1), "cooperative"),
)

# Of f16 and bf16, by the layouts of A and B: tiles of D^T = B^T A^T, which have the rows of D along the side that comes
# in steps of 16 and is loaded once for two or four thread blocks. Taken by a greedy cover of what random shapes lose
# without them (docs/performance-log.md, 2026-11-22); of a column-major A two, for calls that compile a kernel at run
# time.
_TURNED_TILES: dict[str, tuple[tuple[tuple[int, int], tuple[int, int], str], ...]] = {
    "rc": (
        ((64, 64), (4, 1), "pingpong"),
        ((64, 80), (4, 2), "pingpong"),
        ((64, 96), (4, 1), "pingpong"),
        ((64, 128), (4, 1), "pingpong"),
        ((64, 144), (4, 1), "pingpong"),
        ((64, 160), (4, 1), "pingpong"),
        ((64, 192), (4, 1), "pingpong"),
        ((128, 144), (2, 1), "cooperative"),
        ((128, 160), (2, 1), "cooperative"),
        ((128, 208), (2, 1), "cooperative"),
    ),
    "rr": (
        ((64, 96), (4, 1), "pingpong"),
        ((64, 112), (4, 1), "pingpong"),
        ((64, 144), (4, 1), "pingpong"),
        ((64, 192), (4, 1), "pingpong"),
        ((128, 144), (2, 1), "cooperative"),
        ((128, 192), (2, 1), "cooperative"),
    ),
    "cr": (
        ((64, 96), (4, 1), "pingpong"),
        ((64, 192), (4, 1), "pingpong"),
    ),
    "cc": (
        ((64, 96), (4, 1), "pingpong"),
        ((64, 192), (4, 1), "pingpong"),
    ),
}

_BOTH, _BF16, _F16, _NEITHER = HALF_TYPES, (D.BF16,), (D.F16,), ()

_FITTED_TILES: dict[str, tuple[tuple[tuple[D, ...], tuple[int, int], tuple[int, int], str, str], ...]] = {
    "rc": (
        (_BOTH, (64, 256), (4, 1), "pingpong", COLUMN),
        (_BOTH, (64, 256), (4, 2), "pingpong", COLUMN),
        (_BF16, (128, 192), (2, 1), "pingpong", COLUMN),
        (_BF16, (128, 192), (2, 4), "pingpong", COLUMN),
        (_F16, (128, 256), (2, 1), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 2), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 4), "cooperative", COLUMN),
        (_BF16, (128, 256), (4, 2), "cooperative", COLUMN),
        (_NEITHER, (192, 192), (1, 1), "cooperative", COLUMN),
        (_BF16, (192, 192), (1, 2), "cooperative", COLUMN),
        (_NEITHER, (256, 192), (1, 1), "cooperative", COLUMN),
        (_BF16, (256, 192), (1, 2), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 2), "cooperative", ROW),
        (_BF16, (128, 256), (2, 4), "cooperative", ROW),
        (_NEITHER, (256, 192), (1, 2), "cooperative", ROW),
    ),
    "rr": (
        (_BOTH, (64, 256), (4, 1), "pingpong", COLUMN),
        (_BOTH, (64, 256), (4, 2), "pingpong", COLUMN),
        (_BF16, (128, 192), (4, 1), "pingpong", COLUMN),
        (_BF16, (128, 192), (2, 4), "pingpong", COLUMN),
        (_BOTH, (128, 256), (2, 1), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 2), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 4), "cooperative", COLUMN),
        (_BF16, (128, 256), (4, 2), "cooperative", COLUMN),
        (_BOTH, (192, 192), (1, 2), "cooperative", COLUMN),
        (_NEITHER, (256, 192), (1, 1), "cooperative", COLUMN),
        (_BF16, (256, 192), (1, 2), "cooperative", COLUMN),
    ),
    "cr": (
        (_BOTH, (64, 256), (4, 1), "pingpong", COLUMN),
        (_NEITHER, (128, 256), (4, 2), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 2), "cooperative", ROW),
        (_BF16, (128, 256), (2, 4), "cooperative", ROW),
        (_BOTH, (256, 192), (1, 2), "cooperative", ROW),
    ),
    "cc": (
        (_BOTH, (64, 256), (4, 1), "pingpong", COLUMN),
        (_NEITHER, (64, 256), (4, 2), "pingpong", COLUMN),
        (_NEITHER, (128, 256), (4, 2), "cooperative", COLUMN),
        (_NEITHER, (256, 192), (1, 2), "cooperative", COLUMN),
        (_BF16, (128, 256), (1, 2), "cooperative", ROW),
    ),
}
"""Of f16 and bf16, by the layouts of A and B: the types that have a kernel in `full`, the widest tiles of kernels whose
launch chooses the columns, and the layout of D, column-major of D^T (docs/performance-log.md, 2026-11-24, 27 and 28).
What is on demand gains least over these."""

_DIVIDED_TILES: dict[str, tuple[tuple[tuple[D, ...], tuple[int, int], tuple[int, int], str], ...]] = {
    "rc": (
        (_NEITHER, (64, 16), (1, 1), "pingpong"),
        (_BOTH, (64, 32), (1, 1), "pingpong"),
        (_BOTH, (64, 64), (1, 1), "pingpong"),
        (_BF16, (64, 80), (1, 1), "pingpong"),
        (_BF16, (64, 128), (4, 1), "pingpong"),
        (_BF16, (128, 144), (2, 1), "pingpong"),
        (_NEITHER, (64, 144), (4, 1), "pingpong"),
        (_BF16, (64, 192), (2, 1), "pingpong"),
        (_NEITHER, (128, 192), (2, 1), "pingpong"),
    ),
    "rr": (
        (_BOTH, (64, 32), (1, 1), "pingpong"),
        (_BOTH, (64, 64), (1, 1), "pingpong"),
        (_BF16, (64, 80), (1, 1), "pingpong"),
        (_BF16, (64, 128), (4, 1), "pingpong"),
        (_BF16, (128, 144), (2, 1), "pingpong"),
        (_NEITHER, (64, 144), (4, 1), "pingpong"),
        (_BF16, (64, 192), (2, 1), "pingpong"),
        (_NEITHER, (64, 192), (4, 1), "pingpong"),
    ),
    "cr": (
        (_NEITHER, (64, 32), (1, 1), "pingpong"),
        (_BOTH, (64, 64), (1, 1), "pingpong"),
        (_BF16, (64, 128), (4, 1), "pingpong"),
    ),
    "cc": (
        (_NEITHER, (64, 32), (1, 1), "pingpong"),
        (_BF16, (64, 64), (1, 1), "pingpong"),
        (_NEITHER, (64, 128), (4, 1), "pingpong"),
    ),
}
"""Tiles of float32 results: slices of K, which another kernel adds up. The types are those that have it in `full`."""

_SLICED_TILES = (
    ((128, 128), (1, 2), "cooperative"),
    ((64, 128), (1, 2), "pingpong"),
)
"""Of f16 and bf16: tiles that add up slices of K one after the other, with the bits of slices side by side but no
workspace: for the many rows of batch-invariant calls. Further tiles would save 2 to 3% (docs/performance-log.md,
2026-11-27)."""

_TURNED_TF32_TILES: dict[str, tuple[tuple[tuple[int, int], tuple[int, int], str], ...]] = {
    "rc": (((64, 64), (4, 1), "pingpong"),),
    # Of a row-major B, which reaches the tensor cores through registers.
    "cc": (
        ((64, 64), (4, 1), "pingpong"),
        ((64, 128), (4, 1), "pingpong"),
        ((64, 192), (4, 1), "pingpong"),
        ((128, 32), (2, 1), "cooperative"),
        ((128, 256), (2, 1), "cooperative"),
    ),
}
"""Of tf32, by the layouts of B^T and A^T (docs/performance-log.md, 2026-11-23)."""

_TURNED_FP8_TILES: dict[str, tuple[tuple[tuple[int, int], tuple[int, int], str], ...]] = {
    "default": (
        ((64, 80), (4, 1), "pingpong"),
        ((64, 96), (4, 1), "pingpong"),
        ((128, 192), (2, 1), "cooperative"),
    ),
    "fast": (
        ((64, 64), (4, 1), "pingpong"),
        ((64, 128), (4, 1), "pingpong"),
        ((64, 160), (4, 1), "pingpong"),
        ((128, 192), (2, 1), "cooperative"),
    ),
}
"""The same of e4m3, by the math mode (docs/performance-log.md, 2026-11-23)."""

_FITTED_FP8_TILES: dict[str, tuple[tuple[tuple[int, int], tuple[int, int], str, str], ...]] = {
    "default": (
        ((64, 192), (4, 1), "pingpong", COLUMN),
        ((128, 192), (2, 1), "cooperative", COLUMN),
        ((128, 192), (2, 4), "cooperative", ROW),
    ),
    "fast": (
        ((64, 256), (4, 1), "pingpong", COLUMN),
        ((64, 256), (4, 2), "pingpong", COLUMN),
        ((128, 176), (1, 2), "pingpong", COLUMN),
        ((128, 176), (2, 1), "pingpong", COLUMN),
        ((128, 176), (2, 4), "pingpong", COLUMN),
        ((128, 256), (1, 1), "cooperative", COLUMN),
        ((128, 256), (4, 2), "cooperative", COLUMN),
        ((192, 192), (1, 2), "cooperative", COLUMN),
        ((192, 192), (2, 1), "cooperative", COLUMN),
        ((192, 192), (1, 2), "cooperative", ROW),
        ((256, 176), (1, 2), "cooperative", ROW),
    ),
}
"""Of e4m3 with scaled results in bf16, by the math mode: as `_FITTED_TILES` (docs/performance-log.md, 2026-11-26 and
28)."""


_gemm_sm90 = functools.partial(tma_key, "gemm", SmArch.SM90A)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM90A:
        return
    for a in HALF_TYPES:
        for layouts in LAYOUTS:
            yield from _half_cells(a, layouts)
    for tier, tile, cluster, mainloop in (
        (DEFAULT, (128, 128), (2, 1), "cooperative"),
        (FULL, (128, 256), (2, 1), "cooperative"),
    ):
        yield tier, _gemm_sm90(D.F32, D.F32, "rc", tile, cluster, mainloop, math="tf32")
        yield tier, _gemm_sm90(D.I8, D.I32, "rc", tile, cluster, mainloop)
    yield FULL, _gemm_sm90(D.I8, D.I32, "rc", (64, 64), (1, 1), "pingpong")
    for tile_n in (160, 192):
        yield FULL, _gemm_sm90(D.F32, D.F32, "rc", (128, tile_n), (2, 1), "cooperative", math="tf32")
    for layouts, tiles in _TURNED_TF32_TILES.items():
        for turned in tiles:
            yield FULL, _gemm_sm90(D.F32, D.F32, layouts, *turned, math="tf32", layout_d=COLUMN)
    # Operands in other layouts of these types, and of fp8, are copied first (family `transpose`).
    yield (
        ON_DEMAND,
        _gemm_sm90(D.F32, D.F32, "rr", (128, 128), (2, 1), "cooperative", math="tf32", epilogue_schedule="nosmem"),
    )
    yield from _fp8_cells()


def _half_cells(a: D, layouts: str) -> Iterator[Cell]:
    common = layouts in COMMON_LAYOUTS
    for first, tile, cluster, mainloop in _SM90_TILES if common else _SM90_TILES[:2]:
        tier = first if common else ON_DEMAND  # others are faster
        if tier == SMOKE and (a is not D.BF16 or layouts != "rc"):
            tier = DEFAULT
        # Beside the others of `default`, 192 columns are worth as much as all the rest of `full` (performance log),
        # beside those whose launch chooses the columns next to nothing.
        if tile == (128, 192):
            tier = DEFAULT if a is D.BF16 else ON_DEMAND
        yield tier, _gemm_sm90(a, a, layouts, tile, cluster, mainloop)
    # The layouts of B^T and A^T.
    turned = turned_layouts(layouts)
    of_one_width = set()
    for types, tile, cluster, mainloop, layout_d in _FITTED_TILES[layouts]:
        put = turned if layout_d == COLUMN else layouts
        key = _gemm_sm90(a, a, put, tile, cluster, mainloop, layout_d=layout_d, scheduler="fitted")
        yield FULL if a in types else ON_DEMAND, key
        of_one_width |= {of_width(key, width) for width in widths(key)}
    for tile, cluster, mainloop in _TURNED_TILES[layouts]:
        key = _gemm_sm90(a, a, turned, tile, cluster, mainloop, layout_d=COLUMN)
        # At run time a kernel of one width is compiled, in a third of the time.
        yield ON_DEMAND if key in of_one_width else FULL, key
    for types, tile, cluster, mainloop in _DIVIDED_TILES[layouts]:
        yield (
            FULL if a in types else ON_DEMAND,
            _gemm_sm90(a, D.F32, turned, tile, cluster, mainloop, layout_d=COLUMN),
        )
    for tile, cluster, mainloop in _SLICED_TILES:
        yield (
            FULL if common and a is D.BF16 else ON_DEMAND,
            _gemm_sm90(a, a, layouts, tile, cluster, mainloop, scheduler=SLICED),
        )
    if layouts == "rc":
        # Without these others take at most 0.15% longer on random shapes.
        for tile in ((128, 144), (256, 144), (256, 192)):
            yield ON_DEMAND, _gemm_sm90(a, a, layouts, tile, (2, 1), "cooperative")
    if common:
        # Slices of K side by side are faster nearly everywhere.
        yield ON_DEMAND, _gemm_sm90(a, a, layouts, (128, 128), (2, 1), "cooperative", scheduler="streamk")
    yield DEFAULT if common else FULL, _gemm_sm90(a, D.F32, layouts, (128, 128), (2, 1), "pingpong")
    other = D.F16 if a is D.BF16 else D.BF16
    yield ON_DEMAND, _gemm_sm90(a, other, layouts, (128, 128), (2, 1), "pingpong")
    # D whose rows are not 16-byte aligned, such as a vocabulary of 50257 columns: A and B still come by TMA.
    if layouts in ("rc", "cc"):
        yield (
            DEFAULT if layouts == "rc" else ON_DEMAND,
            _gemm_sm90(a, a, layouts, (128, 128), (2, 1), "pingpong", epilogue_schedule="nosmem"),
        )


def _fp8_cells() -> Iterator[Cell]:
    # The scaled epilogue serves calls without scales on the device as well, as fast.
    full = ((128, 128), (1, 1), "cooperative")  # measured: a cluster gains nothing where the adders are the limit
    fast = ((128, 256), (2, 1), "cooperative")
    wide = ((256, 128), (2, 1), "cooperative")
    for a in FP8_TYPES:
        for b in FP8_TYPES:
            plain, either = a is b is D.F8E4M3, D.F8E4M3 in (a, b)
            gradients = either and a is D.F8E5M2  # by weights or activations; the other order is rare
            for d in GEMM_OUTPUTS[a, b, "default"]:
                # cuBLASLt does not multiply e5m2 by e5m2, and gradients, in e5m2, give wide results.
                usual = d is D.BF16 or (plain and d is D.F8E4M3) or ((plain or gradients) and d is D.F32)
                first = DEFAULT if plain and d is D.BF16 else FULL
                yield first if usual else ON_DEMAND, _gemm_sm90(a, d, "rc", *full, b=b, epilogue="scaled")
                if (d is D.BF16 and either) or (plain and d is D.F8E4M3):
                    of_fast = first if plain or gradients else ON_DEMAND
                    yield of_fast, _gemm_sm90(a, d, "rc", *fast, b=b, math="fast", epilogue="scaled")
            if either:
                of_blocks = FULL if plain or gradients else ON_DEMAND
                yield of_blocks, _gemm_sm90(a, D.BF16, "rc", *full, b=b, scale_granularity=BLOCKWISE)
    e4m3 = D.F8E4M3
    yield ON_DEMAND, _gemm_sm90(e4m3, D.BF16, "rc", *full)
    yield ON_DEMAND, _gemm_sm90(e4m3, D.BF16, "rc", *fast, math="fast")
    for math, fitted in _FITTED_FP8_TILES.items():
        for widest, cluster, mainloop, layout_d in fitted:
            yield FULL, _gemm_sm90(
                e4m3, D.BF16, "rc", widest, cluster, mainloop, math=math, epilogue="scaled", layout_d=layout_d,
                scheduler="fitted",
            )  # fmt: skip
    # At run time kernels of one width are compiled; those of D serve epilogue trees, which D^T has none of.
    for tiling in (wide, ((128, 192), (2, 1), "cooperative")):
        yield ON_DEMAND, _gemm_sm90(e4m3, D.BF16, "rc", *tiling, epilogue="scaled")
    yield ON_DEMAND, _gemm_sm90(e4m3, D.BF16, "rc", (128, 128), (2, 1), "pingpong", math="fast", epilogue="scaled")
    for tile_n in (64, 128):
        yield ON_DEMAND, _gemm_sm90(e4m3, D.BF16, "rc", (64, tile_n), (1, 1), "pingpong", epilogue="scaled")
    for math, tilings in _TURNED_FP8_TILES.items():
        for tiling in tilings:
            yield ON_DEMAND, _gemm_sm90(e4m3, D.BF16, "rc", *tiling, math=math, epilogue="scaled", layout_d=COLUMN)
    yield FULL, _gemm_sm90(e4m3, D.BF16, "rc", *full, epilogue="scaled", epilogue_schedule="nosmem")
    for d in (D.F16, D.F32):
        yield FULL, _gemm_sm90(e4m3, d, "rc", *full, scale_granularity=BLOCKWISE)
    for tiling in (wide, ((64, 128), (1, 1), "pingpong")):
        yield FULL, _gemm_sm90(e4m3, D.BF16, "rc", *tiling, scale_granularity=BLOCKWISE)
    yield ON_DEMAND, _gemm_sm90(e4m3, e4m3, "rc", *full, epilogue="scaled", scale_granularity=BLOCKWISE)


def _objection(key: KernelKey) -> str:
    return "divides tiles of block-scaled products by 128 rows" if key.scale_type and key.tile[0] < 128 else ""


FAMILY = Family(
    op="gemm",
    generation="sm90",
    archs=(SmArch.SM90A,),
    template="gemm_sm90",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=4.5,
    compile_mb=3600,
    trees=True,
    waits=True,
    objection=_objection,
)
