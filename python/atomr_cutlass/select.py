"""Which kernel serves a problem: those that can, ranked by an analytic estimate of their time.

The estimate has three parts, each a documented constant or a count:

* tile and wave quantization: a grid of ceil(m / tile_m) x ceil(n / tile_n) x batch tiles (rounded up to whole clusters)
  runs in waves over the GPU's multiprocessors, and a part-filled tile or wave costs as much as a full one;
* the time of a tile: the slower of multiplying (tile_m x tile_n x k at the generation's rate, less for tiles that are
  too small to feed the tensor cores) and of reading A and B through L2;
* the floor that device memory sets: every operand read and written once.

Alignment enters through which cells are candidates, and through the cost of narrow loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import devices, table
from .devices import Device
from .errors import KernelNotFoundError, UnsupportedError
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.key import KernelKey
from .generator.matrix import cells, gemm_types, preset_of, supports_layouts
from .problem import Batches, GemmProblem, Variant, collapse_batches, variants
from .table import KernelInfo

CLOCK_HZ = 1.7e9
L2_BYTES_PER_CLOCK = 42.0
"""Bytes that one multiprocessor draws from L2 per clock when all do."""
DRAM_BYTES_PER_SECOND = {(8, 0): 1.6e12, (8, 6): 0.8e12, (8, 9): 0.9e12, (9, 0): 4.2e12}
LAUNCH_SECONDS = 2.5e-6
TILE_SECONDS = {"sm80": 1.2e-6, "sm90": 1.0e-6}
"""Prologue and epilogue of a tile that nothing hides."""
NOSMEM_SECONDS = 4.0e-6
"""What the last tile's epilogue takes longer without TMA: it stores straight from registers."""
TURN_SECONDS = 1.5e-6
"""One turn of serial split-K: wait for the semaphore, read, add and write a tile."""


@dataclass(frozen=True)
class Choice:
    """A kernel for a problem, how the problem is put to it, and the launch options."""

    info: KernelInfo
    variant: Variant
    batches: Batches
    seconds: float
    split_k: int
    swizzle: int
    raster: int


def multiply_rate(key: KernelKey) -> float:
    """Multiply-adds per clock and multiprocessor.

    Source: the vendor's peak rates per compute capability; the sm80 generation's mma.sync reaches about 0.6 of WGMMA's
    rate on sm_90 (measured, see docs/performance.md).
    """
    hopper = key.arch.capability == (9, 0)
    if key.math == "ieee":
        return 128.0 if hopper else 64.0
    if key.math == "3xtf32":
        return 200.0 if hopper else 160.0
    if key.a is CutlassDtype.F64:
        return 128.0 if hopper else 64.0
    base = {32: 1024.0, 16: 2048.0, 8: 4096.0}[key.a.bits]
    if key.generation == "sm90":
        return base
    return base * 0.6 if hopper else base / 2


def seconds(key: KernelKey, variant: Variant, device: Device, shared_bytes: int, split_k: int = 1) -> float:
    """The estimated time of one launch."""
    tile_m, tile_n, tile_k = key.tile
    tiles_m = _round_up(math.ceil(variant.m / tile_m), key.cluster[0])
    tiles_n = _round_up(math.ceil(variant.n / tile_n), key.cluster[1])
    k = max(1, math.ceil(variant.k / tile_k / split_k)) * tile_k

    residents = max(1, min(device.shared_memory // max(1, shared_bytes), 4)) if key.generation == "sm80" else 1
    multiply_clocks = tile_m * tile_n * k / (multiply_rate(key) * _tile_efficiency(key))
    # A cluster loads what its thread blocks share once.
    read_bytes = (tile_m / key.cluster[1] + tile_n / key.cluster[0]) * k * key.a.bits / 8
    tiles = tiles_m * tiles_n * variant.batch * split_k
    per_wave = device.multiprocessors * residents
    waves = tiles / per_wave if key.scheduler == "streamk" and tiles > per_wave else math.ceil(tiles / per_wave)
    # A wave that does not fill the GPU leaves each multiprocessor a larger share of L2.
    busy = min(1.0, tiles / per_wave)
    read_clocks = read_bytes / (L2_BYTES_PER_CLOCK / max(busy, 0.25)) * _narrow_load_penalty(key)
    # Resident blocks share one multiprocessor's units, and hide each other's prologues.
    wave_seconds = max(multiply_clocks, read_clocks) * (residents if tiles >= per_wave else max(1.0, residents * busy))
    wave_seconds = wave_seconds / CLOCK_HZ + TILE_SECONDS[key.generation]

    moved = variant.batch * (
        (variant.m * variant.k + variant.k * variant.n) * key.a.bits + variant.m * variant.n * key.d.bits
    )
    floor = moved / 8 / DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)
    # The slices of a tile take turns: each but the first reads what the one before it has written.
    turns = (split_k - 1) * TURN_SECONDS
    epilogue = NOSMEM_SECONDS if key.epilogue_schedule == "nosmem" else 0.0
    return max(waves * wave_seconds + turns, floor) + epilogue + LAUNCH_SECONDS


def _tile_efficiency(key: KernelKey) -> float:
    """How much of the peak rate a tile of this size sustains when its operands are at hand."""
    tile_m, tile_n, _ = key.tile
    if key.generation == "sm90":
        width = {256: 1.0, 192: 0.98, 128: 0.93}.get(tile_n, 0.85 if tile_n >= 64 else 0.5)
        height = 1.0 if tile_m >= 128 else 0.9
        return width * height * (0.97 if key.scheduler == "streamk" else 1.0)
    area = tile_m * tile_n
    return min(1.0, 0.55 + 0.45 * area / (128 * 128)) * (0.5 if key.mainloop == "twostage" else 1.0)


def _narrow_load_penalty(key: KernelKey) -> float:
    """Loads of less than 16 bytes issue more instructions for the same data."""
    narrow = min(key.align_a * key.a.bits, key.align_b * key.b.bits) / 8
    return {16: 1.0, 8: 1.3, 4: 2.0}.get(int(narrow), 4.0)


def eligible(key: KernelKey, problem: GemmProblem, variant: Variant) -> bool:
    """Whether a kernel computes this variant of the problem: types, layouts and alignments."""
    return (
        key.op == "gemm"
        and key.a is problem.a.dtype
        and key.b is problem.b.dtype
        and key.d is problem.d.dtype
        and key.math == problem.math
        and key.layout_a == variant.layout_a
        and key.layout_b == variant.layout_b
        and variant.align_a % key.align_a == 0
        and variant.align_b % key.align_b == 0
        and variant.align_d % key.align_d == 0
    )


def split_choices(key: KernelKey, variant: Variant) -> tuple[int, ...]:
    """The slices of K that a kernel may be run with.

    The sm80 generation adds the slices up in D itself, one after the other: with a D narrower than the accumulator that
    would round at every step, and batches already use the grid dimension that the slices would need.
    """
    if key.generation != "sm80" or variant.batch > 1 or key.d.bits < key.acc.bits:
        return (1,)
    return tuple(s for s in (1, 2, 4, 8, 16) if s == 1 or variant.k >= s * 8 * key.tile[2])


def rank(problem: GemmProblem, device: Device, arch: SmArch | None = None) -> list[Choice]:
    """Every kernel of the table that can serve the problem on the device, best first.

    Args:
        problem: what to compute.
        device: where.
        arch: keep to cells of this arch; None takes cells of any arch that run there, native ones before others.

    Raises:
        InvalidOperandError, UnsupportedError: an operand no kernel can read.
    """
    batches = collapse_batches(problem)
    possible = list(variants(problem, batches))
    found = []
    for info in table.kernels():
        key = info.key
        if arch is not None and key.arch is not arch:
            continue
        way = devices.rank_arch(key.arch, device, ptx=info.ptx)
        if way is None or info.shared_bytes > device.shared_memory:
            continue
        for variant in possible:
            if eligible(key, problem, variant):
                estimate, split_k = min(
                    (seconds(key, variant, device, info.shared_bytes, slices), slices)
                    for slices in split_choices(key, variant)
                )
                swizzle = _swizzle(key, variant)
                found.append((way, Choice(info, variant, batches, estimate, split_k, swizzle, 0)))
    # Native cells first: a translated cell costs a compilation in the driver at its first launch.
    found.sort(key=lambda pair: (pair[0], pair[1].seconds, pair[1].info.name))
    return [choice for _, choice in found]


def choose(problem: GemmProblem, device: Device, arch: SmArch | None = None) -> Choice:
    """The best kernel for the problem.

    Raises:
        UnsupportedError: no kernel of the matrix could ever serve it; the reason says what would cure it.
        KernelNotFoundError: one could, but this installation lacks it; names the cell and the knob that adds it.
        InvalidOperandError: an operand no kernel can read.
    """
    ranked = rank(problem, device, arch)
    if ranked:
        return ranked[0]
    raise missing(problem, device, arch)


def missing(problem: GemmProblem, device: Device, arch: SmArch | None) -> UnsupportedError | KernelNotFoundError:
    """The error that explains why the table has no kernel for the problem."""
    types = gemm_types(problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math)
    if not types:
        return UnsupportedError(types.reason)
    target = arch or devices.require_arch(device)
    possible = list(variants(problem, collapse_batches(problem)))
    if not possible:
        return UnsupportedError(
            "c and out have different layouts, and kernels read one as they write the other: copy c"
        )
    for variant in possible:
        layouts = supports_layouts("sm80", problem.a.dtype, variant.layout_a, variant.layout_b)
        if layouts:
            break
    wanted = nearest_key(problem, possible, target)
    if wanted is None:
        reason = layouts.reason or "its alignment or layout is in no cell"
        return UnsupportedError(f"no kernel of the matrix serves this problem on {target.value}: {reason}")
    preset = preset_of(wanted)
    return KernelNotFoundError(
        f"no kernel in the table serves {problem.a.dtype.value} ({problem.math}) -> {problem.d.dtype.value}, layouts "
        f"{wanted.layout_a}{wanted.layout_b}{wanted.layout_d}, on {target.value}; {wanted.name} would: it is in preset "
        f"{preset}; build with CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset} -DATOMR_CUTLASS_ARCHS={target.target}'"
    )


def nearest_key(problem: GemmProblem, possible: Sequence[Variant], arch: SmArch) -> KernelKey | None:
    """The matrix's best cell for the problem on an arch, whether or not it is built."""
    keys: Iterable[KernelKey] = (
        key for _, key in sorted(cells([arch]), key=lambda cell: cell[0]) for v in possible if eligible(key, problem, v)
    )
    return next(iter(keys), None)


def _swizzle(key: KernelKey, variant: Variant) -> int:
    """How many tiles side by side the persistent scheduler takes before it moves on, for reuse in L2."""
    if key.generation != "sm90":
        return 1
    # Measured at 4096^3 and 8192^3: 8 is best or within 0.3%; small grids have no reuse to gain.
    narrow_side = min(math.ceil(variant.m / key.tile[0]), math.ceil(variant.n / key.tile[1]))
    return 8 if narrow_side >= 16 else 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
