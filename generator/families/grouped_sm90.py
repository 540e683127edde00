"""Grouped GEMM of the sm90 generation: CUTLASS 3.x pointer-array kernels over TMA and WGMMA.

One kernel serves contiguous, masked and K-grouped operands and lists, selected by its arguments. TMA
reads from addresses aligned to 16 bytes, which limits the layouts:

- contiguous (groups of rows): A is row-major; groups may have any number of rows.
- along K: with A column-major and B row-major (`cr`, the weight gradient of row-major activations) groups may have any
  extent; an operand that is contiguous along K needs every group to begin at a multiple of 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import COMMON, LINEAR, SCALED, SCALED_COMMON, split
from ..key import COLUMN, ROW, KernelKey
from ..rules import (
    FP8_TYPES,
    HALF_TYPES,
    OK,
    Status,
    along_k,
    gemm_types,
    no,
    supports_gemm,
    supports_grouped_tree,
)
from .base import FULL, Cell, Family, epilogue_cpp, numbers, static_ints, tma_key

D = CutlassDtype

_NO_SCALES = (0, 0, 0)
_BLOCKWISE = (1, 128, 128)
_QUANTIZED = (D.F8E4M3, D.F8E5M2, D.I8)
"""The element types of D that epilogue trees add to those of other kernels."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_gemm(key, (LINEAR, SCALED, COMMON, SCALED_COMMON))
    if not common:
        return common
    tree = supports_grouped_tree(key.epilogue)
    if not tree:
        return tree
    if key.a not in (*HALF_TYPES, *FP8_TYPES):
        return no(f"grouped kernels of the sm90 generation multiply f16, bf16 and fp8, not {key.a.value}")
    if key.a in FP8_TYPES and (key.layout_a, key.layout_b) != (ROW, COLUMN):
        return along_k("grouped fp8 kernels of the sm90 generation", key.layout_a, key.layout_b)
    outputs: tuple[D, ...] = (D.BF16, D.F16) if key.a in FP8_TYPES else (key.a, D.F32)
    if split(key.epilogue)[1]:
        outputs += tuple(d for d in _QUANTIZED if gemm_types(key.a, key.b, d, key.math, tree=True))
    if key.d not in outputs:
        return no(f"grouped {key.a.value} operands give {', '.join(o.value for o in outputs)}, not {key.d.value}")
    if key.scheduler != "grouped":
        return no(f"grouped kernels have the grouped scheduler, not {key.scheduler!r}")
    if key.mainloop not in ("pingpong", "cooperative"):
        return no(f"grouped sm90 mainloops are pingpong and cooperative, not {key.mainloop!r}")
    if key.epilogue_schedule != "tma":
        return no("grouped kernels of the sm90 generation have the TMA epilogue; the sm80 generation stores any D")
    for name, align, dtype in (("A", key.align_a, key.a), ("B", key.align_b, key.b), ("D", key.align_d, key.d)):
        if align * dtype.bits != 128:
            return no(f"TMA needs {name} aligned to 16 bytes: {128 // dtype.bits} elements of {dtype.value}")
    block_scales = _block_scales(key)
    if not block_scales:
        return block_scales
    if split(key.epilogue)[0] in (SCALED, SCALED_COMMON) and key.scale_type:
        return no("kernels with block scales have no scaled epilogue: fold a scale into alpha")
    m, n, k = key.tile
    groups = 2 if key.mainloop == "cooperative" else 1
    if m % (64 * groups) or n % 8 or n > 256:
        return no(f"{key.mainloop} tiles are multiples of {64 * groups} along M and of 8 up to 256 along N")
    if k * key.a.bits != 1024:
        return no("the K tile is 128 bytes, the widest swizzle")
    # As for dense GEMM: full accumulation of fp8, and block scales, need two sets of accumulators.
    copies = 2 if key.a in FP8_TYPES and key.math == "default" else 1
    if copies * m * n // (128 * groups) > 128:
        return no("the accumulators would spill: at most 128 registers a thread")
    if key.cluster[2] != 1 or key.cluster[0] * key.cluster[1] > 8:
        return no("clusters are at most 8 thread blocks, none along K")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm90 kernels take warps from the schedule and the swizzle at run time")
    return OK


def _block_scales(key: KernelKey) -> Status:
    if not key.scale_type:
        return OK if key.scale_granularity == _NO_SCALES else no("a scale granularity goes with a scale type")
    if key.scale_type != "f32" or key.scale_granularity != _BLOCKWISE:
        return no("block scales of the sm90 generation are f32, one for 1 x 128 of A and 128 x 128 of B")
    if key.a not in FP8_TYPES or key.math != "default":
        return no("block scales are for fp8 with math 'default': they are applied every 128 elements of K")
    if key.tile[1] % 128:
        return no("with block scales the tile is a multiple of 128 along N")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    schedule = key.mainloop.capitalize()
    suffix = "FP8Blockwise" if key.scale_type else ("FP8FastAccum" if key.math == "fast" else "")
    return {
        "cute_tile": static_ints(key.tile),
        "cute_cluster": static_ints(key.cluster),
        "stage_count": f"cutlass::gemm::collective::StageCount<{key.stages}>" if key.stages else "void",
        "mainloop_schedule": f"KernelPtrArrayTmaWarpSpecialized{schedule}{suffix}",
        "epilogue_schedule": f"PtrArrayTmaWarpSpecialized{schedule}",
        **epilogue_cpp(key, "QuadLanes"),
        "scale_granularity": numbers(key.scale_granularity),
    }


_grouped_sm90 = functools.partial(tma_key, "grouped_gemm", SmArch.SM90A, scheduler="grouped")


def cells(arch: SmArch) -> Iterator[Cell]:
    """The cells for one arch."""
    if arch is not SmArch.SM90A:
        return
    wide, few = ((128, 128), (2, 1), "pingpong"), ((64, 128), (1, 1), "pingpong")
    for layouts in ("rr", "rc"):
        for tile, cluster, mainloop in (
            wide,
            ((128, 128), (1, 1), "pingpong"),
            ((128, 256), (2, 1), "cooperative"),
            few,
        ):
            yield FULL, _grouped_sm90(D.BF16, D.BF16, layouts, tile, cluster, mainloop)
        yield FULL, _grouped_sm90(D.BF16, D.F32, layouts, *wide)
        yield FULL, _grouped_sm90(D.F16, D.F16, layouts, *wide)
    yield FULL, _grouped_sm90(D.BF16, D.BF16, "rc", (64, 256), (1, 1), "pingpong")
    # Weight gradients, grouped along K.
    for a in HALF_TYPES:
        for d in (a, D.F32):
            yield FULL, _grouped_sm90(a, d, "cr", *wide)
    for tile, cluster, mainloop in (wide, ((128, 256), (2, 1), "cooperative"), few):
        yield FULL, _grouped_sm90(D.F8E4M3, D.BF16, "rc", tile, cluster, mainloop, math="fast", epilogue="scaled")
    for tile, cluster, mainloop in (((128, 128), (2, 1), "cooperative"), few):
        yield FULL, _grouped_sm90(D.F8E4M3, D.BF16, "rc", tile, cluster, mainloop, epilogue="scaled")
        yield FULL, _grouped_sm90(D.F8E4M3, D.BF16, "rc", tile, cluster, mainloop, scale_granularity=_BLOCKWISE)
    yield (
        FULL,
        _grouped_sm90(D.F8E5M2, D.BF16, "rc", (128, 128), (2, 1), "cooperative", b=D.F8E4M3, epilogue="scaled"),
    )
    yield FULL, _grouped_sm90(D.F8E4M3, D.F16, "rc", *wide, math="fast", epilogue="scaled")


FAMILY = Family(
    op="grouped_gemm",
    generation="sm90",
    archs=(SmArch.SM90A,),
    template="grouped_sm90",
    supports=supports,
    cells=cells,
    values=values,
    compile_seconds=4.5,
    compile_mb=3600,
    trees=True,
)
