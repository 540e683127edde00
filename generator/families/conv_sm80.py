"""Convolutions of the sm80 generation: CUTLASS 2.x implicit GEMM over mma.sync or FFMA, on every arch."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import ROW, KernelKey, Triple, instruction_shape, opcode_class
from ..rules import FP8_TYPES, HALF_TYPES, OK, Status, accumulator, no
from .base import FULL, SMOKE, Cell, Family, numbers
from .conv import LAYOUTS, OPERATIONS, activation_cpp, supports_conv

D = CutlassDtype

ITERATORS = {
    "analytic": "kAnalytic",
    "optimized": "kOptimized",
    "few_channels": "kFewChannels",
    "fixed_channels": "kFixedChannels",
}

FP8_ARCHS = (SmArch.SM89,)
"""Where mma.sync multiplies fp8 in its own instruction, of the archs below."""

ARCHS = (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A)

Shape = tuple[Triple, Triple, int]
"""Tile, warps and stages."""


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles without spilling."""
    common = supports_conv(key)
    if not common:
        return common
    if key.a in FP8_TYPES and key.arch not in FP8_ARCHS:
        return no(f"mma.sync multiplies fp8 on sm_89, not on {key.arch.value}")
    if key.mainloop not in ("multistage", "twostage"):
        return no(f"sm80 mainloops are multistage and twostage, not {key.mainloop!r}")
    if key.mainloop == "twostage" and key.stages != 2:
        return no("a twostage mainloop has 2 stages")
    if key.mainloop == "multistage" and key.stages < 3:
        return no("a multistage mainloop has at least 3 stages")
    if key.scheduler != "identity" or key.epilogue_schedule or key.cluster != (1, 1, 1):
        return no("the sm80 generation has the identity scheduler, no epilogue schedule and no clusters")
    for check in (_supports_iterator, _supports_alignment, _supports_tile):
        status = check(key)
        if not status:
            return status
    return OK


def _supports_iterator(key: KernelKey) -> Status:
    if key.iterator not in ITERATORS:
        return no(f"iterators are {', '.join(ITERATORS)}, not {key.iterator!r}")
    few = key.iterator in ("few_channels", "fixed_channels")
    if few and key.op != "conv2d_fprop":
        return no("only fprop has iterators for few channels")
    if few and opcode_class(key) == "simt":
        return no("the iterators for few channels feed tensor cores: ieee fp32 has none")
    if few and key.align_a != key.align_b:
        return no("the iterators for few channels read x and w in vectors of one length")
    if key.iterator == "fixed_channels" and key.align_a < 2:
        return no("fixed_channels is for 2 channels or more, one vector each: few_channels reads a single one")
    valid = ("unity", "strided") if key.op == "conv2d_dgrad" else ("",)
    if key.stride_support not in valid:
        return no(f"the stride support of {key.op} is {' or '.join(map(repr, valid))}, not {key.stride_support!r}")
    if key.group_mode not in ("", "single"):
        return no(f"channels have one group or one for each layer of the grid ('single'), not {key.group_mode!r}")
    swizzles: tuple[int, ...] = (1, 2, 4, 8)
    if key.stride_support == "strided":
        swizzles = (4,) if key.group_mode else (1, 8)
    if key.swizzle not in swizzles:
        return no(f"swizzles are {', '.join(map(str, swizzles))} here, not {key.swizzle}")
    return OK


def _supports_alignment(key: KernelKey) -> Status:
    narrow = min(key.align_a * key.a.bits, key.align_b * key.b.bits) // 8
    if narrow < 4 and key.mainloop != "twostage":
        return no("cp.async moves at least 4 bytes: operands aligned to less need a twostage mainloop")
    if max(key.align_a * key.a.bits, key.align_b * key.b.bits, key.align_d * key.d.bits) > 128:
        return no("vector accesses are at most 16 bytes")
    if opcode_class(key) == "simt" and (key.align_a, key.align_b, key.align_d) != (1, 1, 1):
        return no("SIMT kernels load and store single elements")
    return OK


def _supports_tile(key: KernelKey) -> Status:
    if 0 in key.warps or any(t % w for t, w in zip(key.tile, key.warps, strict=True)):
        return no("the warps must divide the tile")
    warp = [t // w for t, w in zip(key.tile, key.warps, strict=True)]
    if any(w % i for w, i in zip(warp, instruction_shape(key), strict=True)):
        return no("the instruction must divide the warp tile")
    m, n, k = key.tile
    shared = key.stages * k * (m * key.a.bits + n * key.b.bits) // 8
    if shared > key.arch.shared_memory:
        return no(
            f"{key.stages} stages need {shared} bytes of shared memory; {key.arch.value} has {key.arch.shared_memory}"
        )
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """What the template is filled with."""
    warp = tuple(t // w for t, w in zip(key.tile, key.warps, strict=True))
    return {
        "operation": OPERATIONS[key.op],
        "opcode_class": "OpClassSimt" if opcode_class(key) == "simt" else "OpClassTensorOp",
        "mma_arch": "Sm89" if key.a in FP8_TYPES else "Sm80",
        "tile": numbers(key.tile),
        "warp_tile": ", ".join(map(str, warp)),
        "instruction": numbers(instruction_shape(key)),
        "stages": str(key.stages),
        "math_operator": "OpMultiplyAddFastF32" if key.math == "3xtf32" else "OpMultiplyAdd",
        "iterator": ITERATORS[key.iterator],
        "stride_support": "kUnity" if key.stride_support == "unity" else "kStrided",
        "groups": "true" if key.group_mode else "false",
        "activation": activation_cpp(key),
        "swizzle": str(key.swizzle),
    }


def conv_sm80(
    op: str,
    arch: SmArch,
    a: D,
    d: D,
    iterator: str,
    aligns: Triple,
    shape: Shape,
    *,
    stride_support: str = "",
    group_mode: str = "",
    math: str = "default",
    epilogue: str = "lc",
) -> KernelKey:
    """A key of this family; the shape is its tile, warps and stages."""
    tile, warps, stages = shape
    strided = stride_support == "strided"
    return KernelKey(
        op=op,
        generation="sm80",
        arch=arch,
        a=a,
        b=a,
        d=d,
        acc=accumulator(a),
        layout_a=LAYOUTS[op][0],
        layout_b=LAYOUTS[op][1],
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
        swizzle=8 if strided and not group_mode else 4,
        math=math,
        epilogue=epilogue,
        group_mode=group_mode,
        iterator=iterator,
        stride_support=stride_support,
    )


# Strided dgrad keeps more addresses in registers, SIMT more operands: larger tiles than these spill.
_LARGE = ((128, 128, 32), (2, 2, 1), 4)
_SMALL = ((64, 64, 64), (2, 2, 1), 5)
_NARROW = ((128, 64, 32), (2, 2, 1), 4)
_GROUP = ((64, 64, 32), (2, 2, 1), 4)
_ONE = ((64, 64, 32), (2, 2, 1), 2)
_TF32 = ((128, 128, 16), (2, 2, 1), 4)
_TF32_SMALL = ((128, 64, 16), (2, 2, 1), 4)
_TF32_ONE = ((64, 64, 32), (2, 2, 1), 3)
_SIMT = ((128, 128, 8), (4, 2, 1), 4)
_SIMT_SMALL = ((64, 64, 8), (2, 2, 1), 4)
_FP8 = ((128, 128, 64), (4, 2, 1), 3)
_FP8_ONE = ((64, 64, 64), (2, 2, 1), 2)


def _fprop(arch: SmArch) -> Iterator[Cell]:
    # On sm_90a the TMA kernels serve channels aligned to 16 bytes: there these cells keep to what those cannot.
    fallback = arch is SmArch.SM90A

    def cell(a: D, d: D, iterator: str, aligns: Triple, shape: Shape, **more: str) -> KernelKey:
        return conv_sm80("conv2d_fprop", arch, a, d, iterator, aligns, shape, **more)

    for a in HALF_TYPES:
        yield SMOKE if a is D.BF16 else FULL, cell(a, a, "analytic", (1, 1, 1), _ONE)
        yield FULL, cell(a, a, "optimized", (2, 2, 2), _GROUP)
        yield FULL, cell(a, a, "few_channels", (1, 1, 1), _ONE)
        yield FULL, cell(a, a, "optimized", (8, 8, 8), _GROUP, group_mode="single")
        yield FULL, cell(a, a, "analytic", (1, 1, 1), _ONE, group_mode="single")
        if not fallback:
            yield FULL, cell(a, a, "optimized", (8, 8, 8), _LARGE)
            yield FULL, cell(a, a, "optimized", (8, 8, 8), _LARGE, epilogue="lc_relu")
            yield FULL, cell(a, a, "optimized", (8, 8, 8), _SMALL)
            yield FULL, cell(a, a, "fixed_channels", (4, 4, 8), _NARROW)
    if not fallback:
        yield FULL, cell(D.F32, D.F32, "optimized", (4, 4, 4), _TF32, math="tf32")
    yield FULL, cell(D.F32, D.F32, "analytic", (1, 1, 1), _TF32_ONE, math="tf32")
    yield FULL, cell(D.F32, D.F32, "optimized", (4, 4, 4), _TF32_SMALL, math="3xtf32")
    yield FULL, cell(D.F32, D.F32, "optimized", (1, 1, 1), _SIMT, math="ieee")
    yield FULL, cell(D.F32, D.F32, "optimized", (1, 1, 1), _SIMT_SMALL, math="ieee", group_mode="single")
    if arch in FP8_ARCHS:
        for a in FP8_TYPES:
            yield FULL, cell(a, D.BF16, "optimized", (16, 16, 8), _FP8, math="fast")
            yield FULL, cell(a, D.BF16, "analytic", (1, 1, 1), _FP8_ONE, math="fast")
        yield FULL, cell(D.F8E4M3, D.F16, "optimized", (16, 16, 8), _FP8, math="fast")
        yield FULL, cell(D.F8E4M3, D.F32, "optimized", (16, 16, 4), _FP8, math="fast")


def _dgrad(arch: SmArch) -> Iterator[Cell]:
    # Kernels for strides serve strides of one as well, but no dilation.
    fallback = arch is SmArch.SM90A

    def cell(a: D, iterator: str, align: int, shape: Shape, stride_support: str, **more: str) -> KernelKey:
        aligns = (align, align, align)
        return conv_sm80("conv2d_dgrad", arch, a, a, iterator, aligns, shape, stride_support=stride_support, **more)

    for a in HALF_TYPES:
        if not fallback:
            yield FULL, cell(a, "optimized", 8, _LARGE, "unity")
        yield FULL, cell(a, "optimized", 8, _LARGE, "strided")
        yield FULL, cell(a, "optimized", 8, _GROUP, "strided", group_mode="single")
        for stride_support in ("unity", "strided"):
            yield FULL, cell(a, "analytic", 1, _ONE, stride_support)
            yield FULL, cell(a, "analytic", 1, _ONE, stride_support, group_mode="single")
    yield FULL, cell(D.F32, "optimized", 4, _TF32, "unity", math="tf32")
    yield FULL, cell(D.F32, "optimized", 4, _TF32_SMALL, "strided", math="tf32")
    yield FULL, cell(D.F32, "optimized", 4, _TF32_SMALL, "strided", math="3xtf32")
    yield FULL, cell(D.F32, "optimized", 1, _SIMT, "unity", math="ieee")
    yield FULL, cell(D.F32, "optimized", 1, _SIMT_SMALL, "strided", math="ieee")
    yield FULL, cell(D.F32, "optimized", 1, _SIMT_SMALL, "strided", math="ieee", group_mode="single")


def _wgrad(arch: SmArch) -> Iterator[Cell]:
    fallback = arch is SmArch.SM90A

    def cell(a: D, d: D, iterator: str, align: int, shape: Shape, **more: str) -> KernelKey:
        aligns = (align, align, 1 if align == 1 else 128 // d.bits)
        return conv_sm80("conv2d_wgrad", arch, a, d, iterator, aligns, shape, **more)

    for a in HALF_TYPES:
        if not fallback:
            yield FULL, cell(a, a, "optimized", 8, _LARGE)
        # Only these split K, which lies along all pixels: partial sums pass through D.
        yield FULL, cell(a, D.F32, "optimized", 8, _LARGE)
        yield FULL, cell(a, D.F32, "optimized", 8, _GROUP)
        yield FULL, cell(a, D.F32, "analytic", 1, _ONE)
        yield FULL, cell(a, a, "optimized", 8, _GROUP, group_mode="single")
        yield FULL, cell(a, a, "analytic", 1, _ONE, group_mode="single")
    yield FULL, cell(D.F32, D.F32, "optimized", 4, _TF32, math="tf32")
    yield FULL, cell(D.F32, D.F32, "optimized", 4, _TF32_SMALL, math="3xtf32")
    yield FULL, cell(D.F32, D.F32, "optimized", 1, _SIMT, math="ieee")
    yield FULL, cell(D.F32, D.F32, "optimized", 1, _SIMT_SMALL, math="ieee", group_mode="single")


FAMILIES = tuple(
    Family(
        op=op,
        generation="sm80",
        archs=ARCHS,
        template="conv_sm80",
        supports=supports,
        cells=cells,
        values=values,
        compile_seconds=2.5,
        compile_mb=1500,
    )
    for op, cells in (("conv2d_fprop", _fprop), ("conv2d_dgrad", _dgrad), ("conv2d_wgrad", _wgrad))
)
