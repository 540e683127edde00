"""Grouped GEMM of the sm80 generation: CUTLASS 2.x grouped kernels over mma.sync.

They serve the archs before sm_90a, and on it operands aligned to less than 16 bytes, which TMA cannot load. Loads are
as wide as the alignment, and a group may begin or end anywhere along the rows of A (contiguous) or along K: an operand
that is contiguous in that direction needs the cells of alignment 1.

The epilogue, to which CUTLASS does not pass the group's number, is alpha * AB + beta * C or an activation of it. A bias
takes the place of C, as a matrix whose rows share one address.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import split
from ..key import ROW, KernelKey, Triple, instruction_shape
from ..rules import FP8_TYPES, HALF_TYPES, Status, accumulator, no, supports_gemm
from . import sm80
from .base import FULL, Cell, Family, numbers
from .conv import EPILOGUES, activation_cpp

D = CutlassDtype


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    base, program = split(key.epilogue)
    if base == "scaled" or key.scale_type or key.scale_granularity != (0, 0, 0):
        return no("grouped kernels of the sm80 generation read no scales on the device: fold a scale into alpha")
    if program:
        return no(
            "grouped kernels of the sm80 generation have activations and no epilogue trees: CUTLASS 2.x tells their "
            "epilogue no group's number; a bias may come in the place of C"
        )
    common = supports_gemm(key, EPILOGUES)
    if not common:
        return common
    if key.a not in (*HALF_TYPES, *FP8_TYPES):
        return no(f"grouped kernels of the sm80 generation multiply f16, bf16 and fp8, not {key.a.value}")
    if key.a in FP8_TYPES and key.arch is not SmArch.SM89:
        return no("mma.sync on fp8 exists from sm_89 on; sm_90a has the sm90 generation for it")
    outputs = (D.BF16, D.F16) if key.a in FP8_TYPES else (key.a, D.F32)
    if key.d not in outputs:
        return no(f"grouped {key.a.value} operands give {', '.join(o.value for o in outputs)}, not {key.d.value}")
    if key.scheduler != "grouped" or key.epilogue_schedule or key.cluster != (1, 1, 1) or key.swizzle:
        return no("grouped sm80 kernels have the grouped scheduler, no epilogue schedule, no clusters and no swizzle")
    return sm80.supports_mainloop(key) and sm80.supports_tile(key)


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    m, n, k = (t // w for t, w in zip(key.tile, key.warps, strict=True))
    return {
        "arch_tag": "Sm89" if key.a in FP8_TYPES else "Sm80",
        "tile": numbers(key.tile),
        "warp_tile": numbers((m, n, k)),
        "instruction": numbers(instruction_shape(key)),
        "stages": str(key.stages),
        "math_operator": "OpMultiplyAddFastAccum" if key.math == "fast" else "OpMultiplyAdd",
        "activation": activation_cpp(key),
    }


def _grouped_sm80(
    arch: SmArch,
    a: D,
    d: D,
    layouts: str,
    aligns: Triple,
    tile: Triple,
    stages: int,
    math: str = "default",
) -> KernelKey:
    return KernelKey(
        op="grouped_gemm",
        generation="sm80",
        arch=arch,
        a=a,
        b=a,
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
        warps=(2, 2, 1),
        stages=stages,
        mainloop="twostage" if stages == 2 else "multistage",
        epilogue_schedule="",
        scheduler="grouped",
        swizzle=0,
        math=math,
    )


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    fallback = arch is SmArch.SM90A
    for a in HALF_TYPES:
        for layouts in ("rr", "rc", "cr"):
            if not (fallback and layouts == "cr"):
                yield FULL, _grouped_sm80(arch, a, a, layouts, (1, 1, 1), (64, 64, 32), 2)
            if fallback:
                continue
            yield FULL, _grouped_sm80(arch, a, a, layouts, (8, 8, 8), (128, 128, 32), 4)
            yield FULL, _grouped_sm80(arch, a, a, layouts, (8, 8, 8), (64, 64, 64), 5)
        if not fallback:
            yield FULL, _grouped_sm80(arch, a, D.F32, "cr", (8, 8, 4), (128, 128, 32), 4)
    if arch is SmArch.SM89:
        for math in ("default", "fast"):
            yield FULL, _grouped_sm80(arch, D.F8E4M3, D.BF16, "rc", (16, 16, 8), (64, 128, 64), 3, math)


FAMILY = Family(
    op="grouped_gemm",
    generation="sm80",
    archs=(SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A),
    template="grouped_sm80",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=2.0,
    compile_mb=1500,
    trees=True,
)
