"""Grouped GEMM of the sm100 generation: CUTLASS 3.x pointer-array kernels over TMA and UMMA.

The layouts are limited as on sm_90a: see grouped_sm90.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import COMMON, LINEAR, SCALED, SCALED_COMMON, split
from ..key import KernelKey
from ..rules import BLOCKWISE, FP8_TYPES, HALF_TYPES, Status, no, supports_gemm, supports_grouped_tree
from .base import FULL, Cell, Family, epilogue_cpp, numbers, static_ints, tma_key
from .gemm_sm100 import supports_scales, supports_umma

D = CutlassDtype


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR, SCALED, COMMON, SCALED_COMMON))
    if not common:
        return common
    tree = supports_grouped_tree(key.epilogue)
    if not tree:
        return tree
    if key.a not in (*HALF_TYPES, *FP8_TYPES):
        return no(f"grouped kernels of the sm100 generation multiply f16, bf16 and fp8, not {key.a.value}")
    if key.math == "fast":
        return no("UMMA accumulates fp8 in full at the full rate: math is default, fast accumulation does not exist")
    outputs = (D.BF16, D.F16) if key.a in FP8_TYPES else (key.a, D.F32)
    if key.d not in outputs:
        return no(f"grouped {key.a.value} operands give {', '.join(o.value for o in outputs)}, not {key.d.value}")
    if key.epilogue_schedule != "tma":
        return no("grouped kernels of the sm100 generation have the TMA epilogue; the sm80 generation stores any D")
    umma = supports_umma(key, ("grouped",))
    if not umma:
        return umma
    if split(key.epilogue)[0] in (SCALED, SCALED_COMMON) and key.scale_type:
        return no("grouped kernels with block scales have no scaled epilogue: fold a scale into alpha")
    return supports_scales(key)


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    units = "2Sm" if key.mainloop == "2sm" else "1Sm"
    blockwise = "Blockwise" if key.scale_type else ""
    return {
        "cute_tile": static_ints(key.tile),
        "cute_cluster": static_ints(key.cluster),
        "stage_count": f"cutlass::gemm::collective::StageCount<{key.stages}>" if key.stages else "void",
        "mainloop_schedule": f"KernelPtrArrayTmaWarpSpecialized{blockwise}{units}Sm100",
        "epilogue_schedule": f"PtrArrayTmaWarpSpecialized{units}",
        **epilogue_cpp(key),
        "scale_granularity": numbers(key.scale_granularity),
    }


grouped_sm100 = functools.partial(tma_key, "grouped_gemm", SmArch.SM100, scheduler="grouped")

_PAIR, _ONE, _FEW = ((256, 128), (2, 1), "2sm"), ((128, 128), (1, 1), "1sm"), ((128, 64), (1, 1), "1sm")


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM100:
        return
    for layouts in ("rr", "rc"):
        for tile in (_PAIR, _ONE, _FEW, ((256, 256), (2, 1), "2sm")):
            yield FULL, grouped_sm100(D.BF16, D.BF16, layouts, *tile)
        yield FULL, grouped_sm100(D.F16, D.F16, layouts, *_ONE)
    # Weight gradients, grouped along K.
    for a in HALF_TYPES:
        yield FULL, grouped_sm100(a, a, "cr", *_ONE)
        yield FULL, grouped_sm100(a, D.F32, "cr", *_ONE)
    for tile in (_PAIR, _ONE):
        yield FULL, grouped_sm100(D.F8E4M3, D.BF16, "rc", *tile, epilogue="scaled")
        yield FULL, grouped_sm100(D.F8E4M3, D.BF16, "rc", *tile, scale_granularity=BLOCKWISE)
    yield FULL, grouped_sm100(D.F8E5M2, D.BF16, "rc", *_ONE, b=D.F8E4M3, epilogue="scaled")


FAMILY = Family(
    op="grouped_gemm",
    generation="sm100",
    archs=(SmArch.SM100,),
    template="grouped_sm100",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=11.0,
    compile_mb=2600,
    trees=True,
    objection=lambda _: "updates the tensor maps of groups otherwise",
)
