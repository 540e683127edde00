"""fp4 GEMM of the sm120 generation: CUTLASS 3.x kernels over TMA and block-scaled mma.sync.

Everything else on sm_120 is of the sm80 generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import KernelKey, Triple
from ..rules import OK, Status, no, supports_gemm
from .base import DEFAULT, FULL, Cell, Family, tma_key
from .gemm_sm100 import FP4_SCALES, common_values, supports_fp4

D = CutlassDtype

_TILES = ((128, 128, 128), (128, 128, 256))


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, ("lc",))
    if not common:
        return common
    if key.a is not D.F4E2M1:
        return no(
            f"the sm120 generation is for fp4: {key.a.value} is multiplied by the sm80 generation on {key.arch.value}"
        )
    scales = supports_fp4(key)
    if not scales:
        return scales
    if key.mainloop != "cooperative":
        return no(f"the sm120 mainloop is cooperative (pingpong spills registers), not {key.mainloop!r}")
    if key.epilogue_schedule != "tma":
        return no(f"sm120 epilogues are tma, not {key.epilogue_schedule!r}")
    if (key.align_a, key.align_b) != (32, 32):
        return no("TMA needs A and B aligned to 16 bytes: 32 elements of e2m1")
    if key.align_d * key.d.bits != 128:
        return no(f"the TMA epilogue needs D aligned to 16 bytes: {128 // key.d.bits} elements of {key.d.value}")
    if key.tile not in _TILES:
        valid = ", ".join("x".join(map(str, tile)) for tile in _TILES)
        return no(f"tiles of the sm120 generation are {valid}: scales come 128 rows at a time, and 256 rows spill")
    if key.cluster != (1, 1, 1):
        return no("sm_120 has no clusters of several thread blocks")
    if key.scheduler != "persistent":
        return no(f"the sm120 scheduler is persistent (the hardware's own queue of tiles), not {key.scheduler!r}")
    if key.stages == 1:
        return no("the mainloop has at least 2 stages")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm120 kernels take warps from the schedule and the swizzle at run time")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    kind = "Nvf4" if key.scale_type == "ue4m3" else "Mxf4"
    return common_values(key) | {
        "header": "gemm_sm120",
        "arch_tag": "Sm120",
        "mainloop_schedule": f"KernelTmaWarpSpecialized{kind}Sm120",
        "epilogue_schedule": "TmaWarpSpecializedCooperative",
    }


def gemm_sm120(d: D, scale_type: str, tile: Triple) -> KernelKey:
    """A key of this family."""
    scales: dict[str, Any] = {"scale_type": scale_type, "scale_granularity": FP4_SCALES[scale_type]}
    fp4 = D.F4E2M1
    return tma_key("gemm", SmArch.SM120, fp4, d, "rc", tile, (1, 1), "cooperative", **scales)


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM120:
        return
    for scale_type in FP4_SCALES:
        for d in (D.BF16, D.F16, D.F32):
            for tile in _TILES:
                first = d is D.BF16 and scale_type == "ue4m3" and tile == _TILES[0]
                yield DEFAULT if first else FULL, gemm_sm120(d, scale_type, tile)


FAMILY = Family(
    op="gemm",
    generation="sm120",
    archs=(SmArch.SM120,),
    template="blackwell",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=15.0,
    compile_mb=3000,
    trees=True,
)
