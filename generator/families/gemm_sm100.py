"""Dense GEMM of the sm100 generation: CUTLASS 3.x warp-specialized kernels over TMA and UMMA (tcgen05)."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import ROW, KernelKey
from ..rules import COMMON_LAYOUTS, HALF_TYPES, LAYOUTS, OK, Status, accumulator, no, supports_gemm
from .base import DEFAULT, FULL, Cell, Family, static_ints

D = CutlassDtype


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, ("lc",))
    if not common:
        return common
    if key.a not in (*HALF_TYPES, D.I8) and key.math != "tf32":
        return no(f"UMMA multiplies f16, bf16, tf32 and i8, not {key.a.value} ({key.math})")
    return supports_umma(key)


def supports_umma(key: KernelKey) -> Status:
    """What every family over UMMA asks of tile, cluster, schedules and alignments."""
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
    if k * key.a.bits != 1024:
        return no("the K tile is 128 bytes, the widest swizzle")
    if pair and key.cluster[0] % 2:
        return no("a 2sm cluster has an even number of thread blocks along M")
    if key.cluster[2] != 1 or key.cluster[0] * key.cluster[1] > 8 or any(c & (c - 1) for c in key.cluster):
        return no("clusters are at most 8 thread blocks, powers of two, none along K")
    if key.scheduler != "persistent":
        return no(f"the sm100 scheduler is persistent (the hardware's own queue of clusters), not {key.scheduler!r}")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm100 kernels take warps from the schedule and the swizzle at run time")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """What the template is filled with."""
    units = "2Sm" if key.mainloop == "2sm" else "1Sm"
    store = "NoSmem" if key.epilogue_schedule == "nosmem" else "Tma"
    return {
        "cute_tile": static_ints(key.tile),
        "cute_cluster": static_ints(key.cluster),
        "stage_count": f"cutlass::gemm::collective::StageCount<{key.stages}>" if key.stages else "void",
        "mainloop_schedule": f"KernelTmaWarpSpecialized{units}Sm100",
        "epilogue_schedule": f"{store}WarpSpecialized{units}",
        "scheduler": "cutlass::gemm::PersistentScheduler",
    }


# Tile of the MMA, cluster and mainloop; the K tile is 128 bytes. The tier is that of the common layouts.
_TILES: tuple[tuple[int, tuple[int, int], tuple[int, int], str], ...] = (
    (DEFAULT, (256, 256), (2, 1), "2sm"),
    (DEFAULT, (128, 128), (1, 1), "1sm"),
    (FULL, (256, 128), (2, 1), "2sm"),
    (FULL, (128, 256), (1, 1), "1sm"),
    (FULL, (128, 64), (1, 1), "1sm"),
    (FULL, (64, 64), (1, 1), "1sm"),
)


def gemm_sm100(
    a: D,
    d: D,
    layouts: str,
    tile: tuple[int, int],
    cluster: tuple[int, int],
    mainloop: str,
    *,
    b: D | None = None,
    math: str = "default",
    epilogue: str = "lc",
    epilogue_schedule: str = "tma",
) -> KernelKey:
    """A key of this family."""
    return KernelKey(
        op="gemm",
        generation="sm100",
        arch=SmArch.SM100,
        a=a,
        b=b or a,
        d=d,
        acc=accumulator(a),
        layout_a=layouts[0],
        layout_b=layouts[1],
        layout_d=ROW,
        align_a=128 // a.bits,
        align_b=128 // (b or a).bits,
        align_d=128 // d.bits if epilogue_schedule == "tma" else 1,
        tile=(*tile, 1024 // a.bits),
        cluster=(*cluster, 1),
        warps=(0, 0, 0),
        stages=0,
        mainloop=mainloop,
        epilogue_schedule=epilogue_schedule,
        scheduler="persistent",
        swizzle=0,
        math=math,
        epilogue=epilogue,
    )


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM100:
        return
    for layouts in LAYOUTS:
        common = layouts in COMMON_LAYOUTS
        for a in HALF_TYPES:
            for tier, tile, cluster, mainloop in _TILES if common else _TILES[:2]:
                first = tier if a is D.BF16 and layouts == "rc" else FULL
                yield first, gemm_sm100(a, a, layouts, tile, cluster, mainloop)
            if common:
                for tile, cluster, mainloop in (((256, 256), (2, 1), "2sm"), ((128, 128), (1, 1), "1sm")):
                    yield FULL, gemm_sm100(a, D.F32, layouts, tile, cluster, mainloop)
                # D whose rows are not 16-byte aligned, such as a vocabulary of 50257 columns.
                yield FULL, gemm_sm100(a, a, layouts, (128, 128), (1, 1), "1sm", epilogue_schedule="nosmem")
        for tile, cluster, mainloop in (((256, 128), (2, 1), "2sm"), ((128, 128), (1, 1), "1sm")):
            yield FULL, gemm_sm100(D.F32, D.F32, layouts, tile, cluster, mainloop, math="tf32")
            yield FULL, gemm_sm100(D.I8, D.I32, layouts, tile, cluster, mainloop)


FAMILY = Family(
    op="gemm",
    generation="sm100",
    archs=(SmArch.SM100,),
    template="gemm_sm100",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=11.0,
    compile_mb=3600,
)
