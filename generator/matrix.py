"""The matrix: which kernels exist, in which preset, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .archs import SmArch
from .dtypes import CutlassDtype
from .key import COLUMN, ROW, KernelKey, Triple, instruction_shape, opcode_class

D = CutlassDtype

PRESETS = ("none", "smoke", "default", "full")
OPS = ("gemm",)
LAYOUTS = (ROW + ROW, ROW + COLUMN, COLUMN + ROW, COLUMN + COLUMN)
COMMON_LAYOUTS = (ROW + ROW, ROW + COLUMN)

HALF_TYPES = (D.F16, D.BF16)


@dataclass(frozen=True)
class Status:
    """Whether something is supported; when it is not, `reason` says why and what would cure it."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


OK = Status(True)


def no(reason: str) -> Status:
    """A refusal."""
    return Status(False, reason)


# --------------------------------------------------------------------------------------------------------------------
# Rules over element types. (a, b, acc, math) -> the output types that exist.

_GEMM_OUTPUTS: dict[tuple[D, D, str], tuple[D, ...]] = {
    (D.F16, D.F16, "default"): (D.F16, D.F32, D.BF16),
    (D.BF16, D.BF16, "default"): (D.BF16, D.F32, D.F16),
    (D.F32, D.F32, "ieee"): (D.F32, D.F16, D.BF16),
    (D.F32, D.F32, "tf32"): (D.F32, D.F16, D.BF16),
    (D.F32, D.F32, "3xtf32"): (D.F32, D.F16, D.BF16),
    (D.F64, D.F64, "default"): (D.F64,),
    (D.I8, D.I8, "default"): (D.I32,),
}

MATHS = ("default", "ieee", "tf32", "3xtf32")


def gemm_types(a: D, b: D, d: D, math: str) -> Status:
    """Whether a GEMM over these element types exists anywhere in the matrix."""
    outputs = _GEMM_OUTPUTS.get((a, b, math))
    if outputs is None:
        if a != b:
            return no(f"no kernel multiplies {a.value} by {b.value}: A and B must have one dtype")
        maths = sorted(m for x, _, m in _GEMM_OUTPUTS if x is a)
        if maths:
            return no(f"math {math!r} does not apply to {a.value}; valid: {', '.join(maths)}")
        pairs = ", ".join(sorted({x.value for x, _, _ in _GEMM_OUTPUTS}))
        return no(f"no GEMM kernel takes {a.value} operands; valid: {pairs}")
    if d not in outputs:
        return no(f"{a.value} operands give {', '.join(o.value for o in outputs)}, not {d.value}")
    return OK


def accumulator(a: D) -> D:
    """The accumulator's element type for operands of type `a`."""
    return {D.F64: D.F64, D.I8: D.I32}.get(a, D.F32)


def epilogue_compute(acc: D) -> D:
    """The type in which alpha, beta and the epilogue are evaluated: the accumulator's."""
    return acc


_GENERATION_ARCHS = {
    "sm80": tuple(SmArch),  # mma.sync runs everywhere from sm_80 on
    "sm90": (SmArch.SM90A,),
}

# sm_100 and sm_120 rows come with their own issue; until then no preset offers them.
GEMM_ARCHS = (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A)


def is_supported_for(dtype: D, arch: SmArch) -> bool:
    """Whether some kernel in the matrix takes operands of this dtype on this arch."""
    if arch not in GEMM_ARCHS:
        return False
    storage = dtype.storage
    return any(a is storage and (dtype is not D.TF32 or math == "tf32") for a, _, math in _GEMM_OUTPUTS)


def is_fp8_supported(arch: SmArch) -> bool:
    """Whether some kernel in the matrix multiplies fp8 on this arch."""
    return is_supported_for(D.F8E4M3, arch)


def is_fp4_supported(arch: SmArch) -> bool:
    """Whether some kernel in the matrix multiplies fp4 on this arch."""
    return is_supported_for(D.F4E2M1, arch)


# --------------------------------------------------------------------------------------------------------------------
# Rules over keys.


def supports(key: KernelKey) -> Status:
    """Whether CUTLASS has a kernel for this key that compiles without spilling; the reason when not."""
    if key.op not in OPS:
        return no(f"unknown op {key.op!r}; valid: {', '.join(OPS)}")
    if key.generation not in _GENERATION_ARCHS:
        return no(f"unknown generation {key.generation!r}; valid: {', '.join(_GENERATION_ARCHS)}")
    if key.arch not in _GENERATION_ARCHS[key.generation]:
        return no(f"{key.generation} kernels do not compile for {key.arch.value}")
    if key.arch not in GEMM_ARCHS:
        return no(f"no GEMM cells for {key.arch.value} yet")
    if key.epilogue != "lc":
        return no(f"unknown epilogue {key.epilogue!r}; valid: lc")
    for name, layout in (("A", key.layout_a), ("B", key.layout_b), ("D", key.layout_d)):
        if layout not in (ROW, COLUMN):
            return no(f"unknown layout {layout!r} of {name}; valid: {ROW} (row-major), {COLUMN} (column-major)")
    if min(*key.tile, *key.cluster) < 1 or min(*key.warps, key.stages, key.swizzle) < 0:
        return no(
            "tiles and clusters are at least 1 along each dimension; warps, stages and the swizzle are not negative"
        )
    for name, align in (("A", key.align_a), ("B", key.align_b), ("D", key.align_d)):
        if align < 1 or align & (align - 1):
            return no(f"the alignment of {name} is a power of two in elements, not {align}")
    types = gemm_types(key.a, key.b, key.d, key.math)
    if not types:
        return types
    if key.acc is not accumulator(key.a):
        return no(f"{key.a.value} operands accumulate in {accumulator(key.a).value}, not {key.acc.value}")
    if key.layout_d != ROW:
        return no("D is row-major in every cell; a column-major D is computed as D^T = B^T A^T")
    layouts = supports_layouts(key.generation, key.a, key.layout_a, key.layout_b)
    if not layouts:
        return layouts
    return _supports_sm80(key) if key.generation == "sm80" else _supports_sm90(key)


def supports_layouts(generation: str, a: D, layout_a: str, layout_b: str) -> Status:
    """Whether a generation takes these A and B layouts; a refusal names the transpose that cures it.

    WGMMA itself reads 8-bit and tf32 operands contiguous along K only: for the other layouts CUTLASS's sm90 builder
    passes A, or B with the operands swapped, through registers (the RS mainloop).
    """
    if generation == "sm90" and a in (D.I8, D.F32) and (layout_a, layout_b) == (COLUMN, ROW):
        return no(
            "8-bit and tf32 kernels of the sm90 generation need A or B contiguous along K (CUTLASS 4.2's transposing "
            "mainloop faults with int8 and spills with tf32): make B contiguous along K, for example "
            "b = b.T.contiguous().T"
        )
    if generation == "sm80" and a is D.I8 and (layout_a, layout_b) != (ROW, COLUMN):
        wrong = [name for name, layout, need in (("A", layout_a, ROW), ("B", layout_b, COLUMN)) if layout != need]
        return no(
            f"8-bit kernels of the sm80 generation need A row-major and B column-major (both contiguous along K): "
            f"make {' and '.join(wrong)} contiguous along K, for example "
            + " and ".join(f"{n.lower()} = {n.lower()}.T.contiguous().T" for n in wrong)
        )
    return OK


def _supports_sm80(key: KernelKey) -> Status:
    if key.mainloop not in ("multistage", "twostage"):
        return no(f"sm80 mainloops are multistage and twostage, not {key.mainloop!r}")
    if key.mainloop == "twostage" and key.stages != 2:
        return no("a twostage mainloop has 2 stages")
    if key.mainloop == "multistage" and key.stages < 3:
        return no("a multistage mainloop has at least 3 stages")
    if key.scheduler != "identity" or key.epilogue_schedule or key.cluster != (1, 1, 1):
        return no("the sm80 generation has the identity scheduler, no epilogue schedule and no clusters")
    narrow = min(key.align_a * key.a.bits, key.align_b * key.b.bits) // 8
    if narrow < 4 and key.mainloop != "twostage":
        return no("cp.async moves at least 4 bytes: operands aligned to less need a twostage mainloop")
    if max(key.align_a * key.a.bits, key.align_b * key.b.bits, key.align_d * key.d.bits) > 128:
        return no("vector accesses are at most 16 bytes")
    if key.swizzle not in (1, 2, 4, 8):
        return no(f"sm80 swizzles are 1, 2, 4 and 8, not {key.swizzle}")
    if 0 in key.warps or any(t % w for t, w in zip(key.tile, key.warps, strict=True)):
        return no("the warps must divide the tile")
    warp = [t // w for t, w in zip(key.tile, key.warps, strict=True)]
    if any(w % i for w, i in zip(warp, instruction_shape(key), strict=True)):
        return no("the instruction must divide the warp tile")
    if opcode_class(key) == "simt" and (key.align_a, key.align_b) != (1, 1):
        return no("SIMT kernels load single elements")
    shared = shared_memory(key)
    if shared > key.arch.shared_memory:
        return no(
            f"{key.stages} stages need {shared} bytes of shared memory; {key.arch.value} has {key.arch.shared_memory}"
        )
    return OK


def shared_memory(key: KernelKey) -> int:
    """Bytes of shared memory of an sm80-generation mainloop."""
    m, n, k = key.tile
    return key.stages * k * (m * key.a.bits + n * key.b.bits) // 8


def _supports_sm90(key: KernelKey) -> Status:
    if key.a not in (*HALF_TYPES, D.I8) and key.math != "tf32":
        return no(f"WGMMA multiplies f16, bf16, tf32 and i8, not {key.a.value} ({key.math})")
    if key.mainloop not in ("pingpong", "cooperative", "warpspecialized"):
        return no(f"sm90 mainloops are pingpong, cooperative and warpspecialized, not {key.mainloop!r}")
    if key.scheduler not in ("persistent", "streamk"):
        return no(f"sm90 schedulers are persistent and streamk, not {key.scheduler!r}")
    if key.scheduler == "streamk" and key.mainloop != "cooperative":
        return no("stream-K needs the cooperative mainloop")
    if key.epilogue_schedule not in ("tma", "nosmem"):
        return no(f"sm90 epilogues are tma and nosmem, not {key.epilogue_schedule!r}")
    for name, align, dtype in (("A", key.align_a, key.a), ("B", key.align_b, key.b)):
        if align * dtype.bits != 128:
            return no(f"TMA needs {name} aligned to 16 bytes: {128 // dtype.bits} elements of {dtype.value}")
    if key.epilogue_schedule == "tma" and key.align_d * key.d.bits != 128:
        return no(f"the TMA epilogue needs D aligned to 16 bytes: {128 // key.d.bits} elements of {key.d.value}")
    swapped = (key.layout_a, key.layout_b) == (ROW, ROW) and key.a.bits != 16
    if swapped and key.epilogue_schedule != "nosmem":
        return no("with A and B row-major the builder exchanges the operands, which its TMA epilogue ignores")
    m, n, k = key.tile
    groups = 2 if key.mainloop == "cooperative" else 1
    if m % (64 * groups) or n % 8 or n > 256:
        return no(f"{key.mainloop} tiles are multiples of {64 * groups} along M and of 8 up to 256 along N")
    if k * key.a.bits != 1024:
        return no("the K tile is 128 bytes, the widest swizzle")
    # 255 registers a thread; the accumulators of a consumer warp group may take 128 of them.
    if m * n // (128 * groups) > 128:
        return no("the accumulators would spill: at most 128 registers a thread")
    if key.cluster[2] != 1 or key.cluster[0] * key.cluster[1] > 8:
        return no("clusters are at most 8 thread blocks, none along K")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no("sm90 kernels take warps from the schedule and the swizzle at run time")
    return OK


# --------------------------------------------------------------------------------------------------------------------
# Axes. Each generator yields (tier, key): the first preset that holds the key.

SMOKE, DEFAULT, FULL = 1, 2, 3
_TIERS = {"none": 0, "smoke": SMOKE, "default": DEFAULT, "full": FULL}

Cell = tuple[int, KernelKey]


def _gemm_sm80(
    arch: SmArch,
    a: D,
    d: D,
    layouts: str,
    aligns: Triple,
    tile: Triple,
    warps: Triple,
    stages: int,
    math: str = "default",
) -> KernelKey:
    return KernelKey(
        op="gemm",
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
        warps=warps,
        stages=stages,
        mainloop="twostage" if stages == 2 else "multistage",
        epilogue_schedule="",
        scheduler="identity",
        swizzle=8,
        math=math,
    )


def _sm80_cells(arch: SmArch) -> Iterator[Cell]:
    # On sm_90a the TMA kernels serve every aligned operand: there the sm80 generation keeps to what they cannot.
    fallback = arch is SmArch.SM90A

    for a in HALF_TYPES:
        for layouts in LAYOUTS:
            common = layouts in COMMON_LAYOUTS
            for d in _GEMM_OUTPUTS[a, a, "default"]:
                smoke = a is D.BF16 and d is a
                tier = DEFAULT if common and d in (a, D.F32) else FULL
                yield (
                    SMOKE if smoke and common else tier,
                    _gemm_sm80(arch, a, d, layouts, (1, 1, 1), (64, 64, 32), (2, 2, 1), 2),
                )
                if d in (a, D.F32):
                    yield FULL, _gemm_sm80(arch, a, d, layouts, (2, 2, 2), (128, 128, 32), (2, 2, 1), 4)
                if fallback:
                    continue
                aligned = (8, 8, 128 // d.bits)
                yield (
                    SMOKE if smoke and layouts == "rc" else tier,
                    _gemm_sm80(arch, a, d, layouts, aligned, (128, 128, 32), (2, 2, 1), 4),
                )
                yield (
                    tier if d is a else FULL,
                    _gemm_sm80(arch, a, d, layouts, aligned, (64, 64, 64), (2, 2, 1), 5),
                )
                if d is a:
                    for tile, warps, stages in (
                        ((256, 128, 32), (4, 2, 1), 3),
                        ((128, 256, 32), (2, 4, 1), 3),
                        ((128, 64, 32), (2, 2, 1), 5),
                        ((64, 128, 32), (2, 2, 1), 5),
                    ):
                        yield FULL, _gemm_sm80(arch, a, d, layouts, aligned, tile, warps, stages)

    for layouts in LAYOUTS:
        common = layouts in COMMON_LAYOUTS
        for d in _GEMM_OUTPUTS[D.F32, D.F32, "tf32"]:
            usual_tier = DEFAULT if common and d is D.F32 else FULL
            # On sm_90a the RS mainloop of the other layouts is in `full` only.
            yield (
                FULL if fallback and layouts == "rc" else usual_tier,
                _gemm_sm80(arch, D.F32, d, layouts, (4, 4, 4), (128, 128, 16), (2, 2, 1), 4, "tf32"),
            )
            yield usual_tier, _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), (64, 64, 32), (2, 2, 1), 3, "tf32")
            yield usual_tier, _gemm_sm80(arch, D.F32, d, layouts, (4, 4, 4), (128, 128, 16), (4, 2, 1), 4, "3xtf32")
            yield usual_tier, _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), (64, 64, 16), (2, 2, 1), 3, "3xtf32")
            yield (
                SMOKE if layouts == "rr" and d is D.F32 else usual_tier,
                _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), (128, 128, 8), (4, 2, 1), 5, "ieee"),
            )
            if d is D.F32:
                for tile, warps, stages in (((256, 128, 8), (4, 2, 1), 4), ((128, 64, 8), (2, 2, 1), 5)):
                    yield FULL, _gemm_sm80(arch, D.F32, d, layouts, (1, 1, 1), tile, warps, stages, "ieee")
        double = DEFAULT if common else FULL
        yield double, _gemm_sm80(arch, D.F64, D.F64, layouts, (1, 1, 1), (64, 64, 16), (2, 2, 1), 4)
        yield FULL, _gemm_sm80(arch, D.F64, D.F64, layouts, (1, 1, 1), (128, 128, 16), (4, 2, 1), 3)

    integer_tier = FULL if fallback else DEFAULT
    yield integer_tier, _gemm_sm80(arch, D.I8, D.I32, "rc", (16, 16, 4), (128, 128, 64), (2, 2, 1), 4)
    yield FULL, _gemm_sm80(arch, D.I8, D.I32, "rc", (16, 16, 4), (64, 64, 64), (2, 2, 1), 6)
    yield FULL, _gemm_sm80(arch, D.I8, D.I32, "rc", (4, 4, 1), (64, 64, 64), (2, 2, 1), 6)
    yield SMOKE, _gemm_sm80(arch, D.I8, D.I32, "rc", (1, 1, 1), (64, 64, 64), (2, 2, 1), 2)


# Tile, cluster and mainloop of the sm90 generation, for elements of 2 bytes; narrower and wider elements keep the K
# tile at 128 bytes. The tier is that of f16 and bf16 in the common layouts.
_SM90_TILES: tuple[tuple[int, tuple[int, int], tuple[int, int], str], ...] = (
    (DEFAULT, (128, 256), (2, 1), "cooperative"),
    (SMOKE, (128, 128), (2, 1), "pingpong"),
    (DEFAULT, (64, 64), (1, 1), "pingpong"),
    (FULL, (256, 128), (2, 1), "cooperative"),
    (FULL, (256, 128), (1, 2), "cooperative"),
    (FULL, (128, 256), (1, 2), "cooperative"),
    (FULL, (128, 192), (2, 1), "cooperative"),
    (FULL, (128, 128), (1, 1), "pingpong"),
    (FULL, (64, 256), (1, 1), "pingpong"),
    (FULL, (64, 192), (1, 1), "pingpong"),
    (FULL, (64, 128), (1, 1), "pingpong"),
    (FULL, (64, 128), (2, 1), "pingpong"),
    (FULL, (64, 32), (1, 1), "pingpong"),
    (FULL, (64, 16), (1, 1), "pingpong"),
)


def _gemm_sm90(
    a: D,
    d: D,
    layouts: str,
    tile: tuple[int, int],
    cluster: tuple[int, int],
    mainloop: str,
    *,
    scheduler: str = "persistent",
    math: str = "default",
    epilogue_schedule: str = "tma",
) -> KernelKey:
    wide = 128 // a.bits
    return KernelKey(
        op="gemm",
        generation="sm90",
        arch=SmArch.SM90A,
        a=a,
        b=a,
        d=d,
        acc=accumulator(a),
        layout_a=layouts[0],
        layout_b=layouts[1],
        layout_d=ROW,
        align_a=wide,
        align_b=wide,
        align_d=128 // d.bits if epilogue_schedule == "tma" else 1,
        tile=(*tile, 1024 // a.bits),
        cluster=(*cluster, 1),
        warps=(0, 0, 0),
        stages=0,
        mainloop=mainloop,
        epilogue_schedule=epilogue_schedule,
        scheduler=scheduler,
        swizzle=0,
        math=math,
    )


def _sm90_cells() -> Iterator[Cell]:
    for a in HALF_TYPES:
        for layouts in LAYOUTS:
            common = layouts in COMMON_LAYOUTS
            for first, tile, cluster, mainloop in _SM90_TILES:
                tier = first if common else FULL
                if tier == SMOKE and (a is not D.BF16 or layouts != "rc"):
                    tier = DEFAULT
                yield tier, _gemm_sm90(a, a, layouts, tile, cluster, mainloop)
            for tile in ((128, 128), (128, 256), (256, 128)) if common else ((128, 128), (128, 256)):
                yield FULL, _gemm_sm90(a, a, layouts, tile, (2, 1), "cooperative", scheduler="streamk")
            yield (
                DEFAULT if common else FULL,
                _gemm_sm90(a, D.F32, layouts, (128, 128), (2, 1), "pingpong"),
            )
            if common:
                yield FULL, _gemm_sm90(a, D.F32, layouts, (128, 256), (2, 1), "cooperative")
                yield FULL, _gemm_sm90(a, D.F32, layouts, (64, 64), (1, 1), "pingpong")
                yield FULL, _gemm_sm90(a, D.F32, layouts, (128, 128), (2, 1), "cooperative", scheduler="streamk")
            if common:
                other = D.F16 if a is D.BF16 else D.BF16
                yield FULL, _gemm_sm90(a, other, layouts, (128, 128), (2, 1), "pingpong")
            # D whose rows are not 16-byte aligned, such as a vocabulary of 50257 columns: A and B still come by TMA.
            if layouts in ("rc", "cc"):
                yield (
                    DEFAULT if layouts == "rc" else FULL,
                    _gemm_sm90(a, a, layouts, (128, 128), (2, 1), "pingpong", epilogue_schedule="nosmem"),
                )
    for tier, tile, cluster, mainloop in (
        (DEFAULT, (128, 128), (2, 1), "cooperative"),
        (FULL, (128, 256), (2, 1), "cooperative"),
        (FULL, (64, 64), (1, 1), "pingpong"),
        (FULL, (64, 128), (1, 1), "pingpong"),
    ):
        yield tier, _gemm_sm90(D.F32, D.F32, "rc", tile, cluster, mainloop, math="tf32")
        yield tier, _gemm_sm90(D.I8, D.I32, "rc", tile, cluster, mainloop)
    for layouts in ("rr", "cc"):
        store = "nosmem" if layouts == "rr" else "tma"
        tile, cluster = (128, 128), (2, 1)
        yield (
            FULL,
            _gemm_sm90(D.F32, D.F32, layouts, tile, cluster, "cooperative", math="tf32", epilogue_schedule=store),
        )
        yield FULL, _gemm_sm90(D.I8, D.I32, layouts, tile, cluster, "cooperative", epilogue_schedule=store)


def cells(archs: Iterable[SmArch]) -> Iterator[Cell]:
    """Every cell of the matrix for the archs, with its tier; unsupported combinations never appear."""
    for arch in archs:
        yield from _sm80_cells(arch)
        if arch is SmArch.SM90A:
            yield from _sm90_cells()


def expand(preset: str, archs: Iterable[SmArch]) -> list[KernelKey]:
    """The keys of a preset, in the matrix's order.

    Raises:
        ValueError: an unknown preset or an arch without cells, naming the valid ones.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; valid: {', '.join(PRESETS)}")
    archs = list(archs)
    for arch in archs:
        if arch not in GEMM_ARCHS:
            valid = ", ".join(a.target for a in GEMM_ARCHS)
            raise ValueError(f"no cells for arch {arch.target!r} yet; valid: {valid}")
    tier = _TIERS[preset]
    return list(dict.fromkeys(key for first, key in cells(archs) if first <= tier))


def preset_of(key: KernelKey) -> str | None:
    """The smallest preset that holds the key, or None when only run-time compilation reaches it."""
    for tier, candidate in cells([key.arch]):
        if candidate == key:
            return PRESETS[tier]
    return None
