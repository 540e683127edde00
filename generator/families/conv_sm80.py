"""Convolutions of the sm80 generation: CUTLASS 2.x implicit GEMM over mma.sync or FFMA, on every arch."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..key import DIRECT, ROW, KernelKey, Triple, instruction_shape, opcode_class
from ..rules import FP8_TYPES, HALF_TYPES, OK, Status, accumulator, epilogue_compute, no
from . import sm80
from .base import FULL, SMOKE, Cell, Family
from .conv import LAYOUTS, OPERATIONS, activation_cpp, supports_conv

D = CutlassDtype

ITERATORS = {
    "analytic": "kAnalytic",
    "optimized": "kOptimized",
    "few_channels": "kFewChannels",
    "fixed_channels": "kFixedChannels",
}

FP8_ARCHS = (SmArch.SM89,)
"""Those of this family's archs that have an mma.sync instruction for fp8."""

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
    if key.group_mode == "depthwise":
        return _supports_depthwise(key)
    general = sm80.supports_scheduler(key) and sm80.supports_mainloop(key)
    return general and _supports_iterator(key) and _supports_alignment(key) and sm80.supports_tile(key)


def _supports_depthwise(key: KernelKey) -> Status:
    if key.mainloop != DIRECT or key.stages != 1 or key.iterator or key.stride_support or key.swizzle:
        return no("depthwise convolutions are direct: one stage, no iterator, stride support or swizzle")
    scheduled = sm80.supports_scheduler(key)
    if not scheduled:
        return scheduled
    if key.a in FP8_TYPES or key.math not in ("default", "ieee"):
        return no("depthwise convolutions multiply in fp32: f16, bf16 and f32 (ieee)")
    wgrad = key.op == "conv2d_wgrad"
    if not wgrad and key.d is not key.a:
        return no(f"depthwise convolutions of {key.a.value} give {key.a.value}")
    if key.align_a * key.a.bits > 128:
        return no("vector accesses are at most 16 bytes")
    if (key.align_b, key.align_d) != ((key.align_a, 1) if wgrad else (1, key.align_a)):
        return no("depthwise convolutions read and write pixels in vectors of one length, and filters one by one")
    m, n, k = key.tile
    if key.warps != (8, 1, 1) or k != 1 or n % key.align_a or 256 % (n // key.align_a) or n > 256:
        return no("the 8 warps of a depthwise convolution share a tile that is a multiple of the vectors wide")
    if m % (256 // (n // key.align_a)):
        return no("each thread of a depthwise convolution has the same number of pixels")
    # Less shared memory than the default limit of a block on every GPU.
    if 4 * n * max(128, 256 // (n // key.align_a)) > 48 * 1024:
        return no("the filter's taps take more than 48 KiB of shared memory")
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
        return no(f"groups are '', 'single' (one for each layer of the grid) or 'depthwise', not {key.group_mode!r}")
    swizzles: tuple[int, ...] = (1, 2, 4, 8)
    if key.stride_support == "strided":
        swizzles = (4,) if key.group_mode else (1, 8)
    if key.swizzle not in swizzles:
        return no(f"swizzles are {', '.join(map(str, swizzles))} here, not {key.swizzle}")
    return OK


def _supports_alignment(key: KernelKey) -> Status:
    if opcode_class(key) == "simt" and (key.align_a, key.align_b, key.align_d) != (1, 1, 1):
        return no("SIMT kernels load and store single elements")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the template."""
    if key.group_mode == "depthwise":
        m, n, _ = key.tile
        operation = f"cutlass::conv::Operator::k{OPERATIONS[key.op]}"
        types = f"{key.a.cpp}, {key.d.cpp}, {key.align_a}, {m}, {n}, {activation_cpp(key)}"
        return {"header": "conv_depthwise.h", "cell": f"ConvDepthwise<\n    {operation}, {types}>"}
    warp = tuple(t // w for t, w in zip(key.tile, key.warps, strict=True))
    shapes = (key.tile, warp, instruction_shape(key))
    math = "OpMultiplyAddFastF32" if key.math == "3xtf32" else "OpMultiplyAdd"
    stride_support = "kUnity" if key.stride_support == "unity" else "kStrided"
    arguments = (
        f"cutlass::conv::Operator::k{OPERATIONS[key.op]}",
        f"{key.a.cpp}, {key.align_a}, {key.b.cpp}, {key.align_b}, {key.d.cpp}, {key.align_d}",
        f"{key.acc.cpp}, {epilogue_compute(key.acc).cpp}",
        f"cutlass::arch::{'OpClassSimt' if opcode_class(key) == 'simt' else 'OpClassTensorOp'}",
        f"cutlass::arch::{'Sm89' if key.a in FP8_TYPES else 'Sm80'}",
        *(f"cutlass::gemm::GemmShape<{', '.join(map(str, shape))}>" for shape in shapes),
        f"{key.stages}, cutlass::arch::{math}",
        f"cutlass::conv::IteratorAlgorithm::{ITERATORS[key.iterator]}",
        f"cutlass::conv::StrideSupport::{stride_support}",
        f"{'true' if key.group_mode else 'false'}, {activation_cpp(key)}, {key.swizzle}",
    )
    return {"header": "conv_sm80.h", "cell": "ConvSm80<\n    " + ",\n    ".join(arguments) + ">"}


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
        mainloop={1: DIRECT, 2: "twostage"}.get(stages, "multistage"),
        epilogue_schedule="",
        scheduler="identity",
        swizzle=0 if stages == 1 else (8 if strided and not group_mode else 4),
        math=math,
        epilogue=epilogue,
        group_mode=group_mode,
        iterator=iterator,
        stride_support=stride_support,
    )


def depthwise(op: str, arch: SmArch, a: D, align: int) -> KernelKey:
    """A key of a depthwise convolution: vectors of `align` channels, four pixels a thread."""
    channels = 64 if align > 1 else 32
    shape = ((4 * 256 * align // channels, channels, 1), (8, 1, 1), 1)
    d = D.F32 if op == "conv2d_wgrad" else a
    aligns = (align, align, 1) if op == "conv2d_wgrad" else (align, 1, align)
    return conv_sm80(
        op, arch, a, d, "", aligns, shape, group_mode="depthwise", math="ieee" if a is D.F32 else "default"
    )


def _depthwise(op: str, arch: SmArch) -> Iterator[Cell]:
    for a in (*HALF_TYPES, D.F32):
        yield FULL, depthwise(op, arch, a, 128 // a.bits)


# Strided dgrad keeps more addresses in registers, SIMT more operands: larger tiles than these spill.
_LARGE = ((128, 128, 32), (2, 2, 1), 4)
_SMALL = ((64, 64, 64), (2, 2, 1), 5)
_NARROW = ((128, 64, 32), (2, 2, 1), 4)
_STRIDED = ((128, 128, 32), (4, 2, 1), 4)
_GROUP = ((64, 64, 32), (2, 2, 1), 4)
_ONE = ((64, 64, 32), (2, 2, 1), 2)
_TF32 = ((128, 128, 16), (2, 2, 1), 4)
_TF32_WIDE = ((128, 128, 16), (4, 2, 1), 4)
_TF32_SMALL = ((128, 64, 16), (2, 2, 1), 4)
_TF32_ONE = ((64, 64, 32), (2, 2, 1), 3)
_SIMT = ((128, 128, 8), (4, 2, 1), 4)
_SIMT_SMALL = ((64, 64, 8), (2, 2, 1), 4)
_FP8 = ((128, 128, 64), (4, 2, 1), 3)
_FP8_ONE = ((64, 64, 64), (2, 2, 1), 2)


def _fprop(arch: SmArch) -> Iterator[Cell]:
    # On sm_90a the TMA kernels serve channels aligned to 16 bytes: there these cells serve only the others.
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
            yield SMOKE if a is D.BF16 else FULL, cell(a, a, "optimized", (8, 8, 8), _LARGE)
            yield FULL, cell(a, a, "optimized", (8, 8, 8), _SMALL)
            yield FULL, cell(a, a, "fixed_channels", (4, 4, 8), _NARROW)
    if not fallback:
        yield FULL, cell(D.F32, D.F32, "optimized", (4, 4, 4), _TF32, math="tf32")
    yield FULL, cell(D.F32, D.F32, "analytic", (1, 1, 1), _TF32_ONE, math="tf32")
    yield FULL, cell(D.F32, D.F32, "optimized", (1, 1, 1), _SIMT, math="ieee")
    yield FULL, cell(D.F32, D.F32, "optimized", (1, 1, 1), _SIMT_SMALL, math="ieee", group_mode="single")
    if arch in FP8_ARCHS:
        for a in FP8_TYPES:
            yield FULL, cell(a, D.BF16, "optimized", (16, 16, 8), _FP8, math="fast")
        yield FULL, cell(D.F8E4M3, D.BF16, "analytic", (1, 1, 1), _FP8_ONE, math="fast")
    yield from _depthwise("conv2d_fprop", arch)


def _dgrad(arch: SmArch) -> Iterator[Cell]:
    # Kernels for strides also serve strides of one, but no dilation.
    fallback = arch is SmArch.SM90A

    def cell(a: D, iterator: str, align: int, shape: Shape, stride_support: str, **more: str) -> KernelKey:
        aligns = (align, align, align)
        return conv_sm80("conv2d_dgrad", arch, a, a, iterator, aligns, shape, stride_support=stride_support, **more)

    for a in HALF_TYPES:
        if not fallback:
            yield FULL, cell(a, "optimized", 8, _LARGE, "unity")
        yield FULL, cell(a, "optimized", 8, _STRIDED, "strided")
        yield FULL, cell(a, "optimized", 8, _GROUP, "strided", group_mode="single")
        for stride_support in ("unity", "strided"):
            yield FULL, cell(a, "analytic", 1, _ONE, stride_support)
            yield FULL, cell(a, "analytic", 1, _ONE, stride_support, group_mode="single")
    yield FULL, cell(D.F32, "optimized", 4, _TF32_SMALL, "strided", math="tf32")
    yield FULL, cell(D.F32, "optimized", 1, _SIMT, "unity", math="ieee")
    yield FULL, cell(D.F32, "optimized", 1, _SIMT_SMALL, "strided", math="ieee")
    yield FULL, cell(D.F32, "optimized", 1, _SIMT_SMALL, "strided", math="ieee", group_mode="single")
    yield from _depthwise("conv2d_dgrad", arch)


def _wgrad(arch: SmArch) -> Iterator[Cell]:
    fallback = arch is SmArch.SM90A

    def cell(a: D, d: D, iterator: str, align: int, shape: Shape, **more: str) -> KernelKey:
        aligns = (align, align, 1 if align == 1 else 128 // d.bits)
        return conv_sm80("conv2d_wgrad", arch, a, d, iterator, aligns, shape, **more)

    for a in HALF_TYPES:
        if not fallback:
            yield FULL, cell(a, a, "optimized", 8, _LARGE)
        # Only these split K, which runs over all pixels: partial sums are stored in D.
        yield FULL, cell(a, D.F32, "optimized", 8, _LARGE)
        yield FULL, cell(a, D.F32, "analytic", 1, _ONE)
        yield FULL, cell(a, a, "optimized", 8, _GROUP, group_mode="single")
        yield FULL, cell(a, a, "analytic", 1, _ONE, group_mode="single")
    yield FULL, cell(D.F32, D.F32, "optimized", 4, _TF32_WIDE, math="tf32")
    yield FULL, cell(D.F32, D.F32, "optimized", 1, _SIMT, math="ieee")
    yield FULL, cell(D.F32, D.F32, "optimized", 1, _SIMT_SMALL, math="ieee", group_mode="single")
    yield from _depthwise("conv2d_wgrad", arch)


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
        trees=trees,
    )
    for op, cells, trees in (
        ("conv2d_fprop", _fprop, True),
        ("conv2d_dgrad", _dgrad, True),
        ("conv2d_wgrad", _wgrad, False),
    )
)
