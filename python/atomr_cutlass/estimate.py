"""The analytic model: how long a kernel would take for a problem, before anything is launched.

Parts, for either generation:

* quantization: a grid of ceil(m / tile_m) x ceil(n / tile_n) x batch tiles (rounded up to whole clusters) runs in waves
  over the multiprocessors, and a part-filled tile or wave costs as much as a full one;
* the time of a tile: the slowest of multiplying (tile_m x tile_n x k at the generation's rate, less for tiles too small
  to feed the tensor cores), of reading A and B through L2, and of the steps along K one after the other;
* prologue and epilogue, which pingpong kernels hide behind the other consumer's mainloop but for the first and last;
* the floor that device memory sets: every operand read and written once.

The constants of the sm90 generation were fitted to 29 shapes x every eligible kernel on an H200; those of the sm80
generation are the vendor's rates, scaled where measured (docs/performance.md). Cells of sm100 and sm120 are estimated
with sm90's constants and the vendor's rates: nothing was measured there.
"""

from __future__ import annotations

import math

from .devices import Device
from .generator.dtypes import CutlassDtype
from .generator.key import KernelKey
from .generator.rules import FP8_TYPES
from .problem import Variant, round_up

CLOCK_HZ = 1.7e9
LAUNCH_SECONDS = 2.8e-6
DRAM_BYTES_PER_SECOND = {(8, 0): 1.6e12, (8, 6): 0.8e12, (8, 9): 0.9e12, (9, 0): 3.6e12, (10, 0): 7e12, (12, 0): 1.6e12}

# The sm90 generation.
TILE_N_EFFICIENCY = {256: 0.93, 192: 0.76, 128: 0.86, 64: 0.88, 32: 0.61, 16: 0.21}
"""Share of WGMMA's peak rate that a tile of this width sustains; narrow ones read A more often than they multiply."""
ONE_WARPGROUP_EFFICIENCY = 0.83
"""What a tile of 64 rows keeps of that."""
FULL_ACCUMULATION_EFFICIENCY = 0.85
"""What fp8 keeps of it when the tensor cores' sums are added up in float32 every 128 elements of K."""
L2_BYTES_PER_CLOCK = 62.0
"""Bytes that one multiprocessor draws from L2 per clock when all do."""
STEP_CLOCKS = 172.0
"""The shortest step along K: barriers and latencies."""
COOPERATIVE_TILE_SECONDS = 0.5e-6
PINGPONG_TILE_SECONDS = 0.3e-6
PROLOGUE_SECONDS = 0.5e-6
STORE_BYTES_PER_SECOND = 53e9
"""At which one multiprocessor stores a finished tile."""
CLUSTER_SECONDS = 0.4e-6
"""Synchronizing a cluster at the start and the end."""
NOSMEM_SECONDS = 2.0e-6
NOSMEM_TILE_SECONDS = 6.0e-6
"""What storing a tile straight from registers takes longer."""
STREAM_K_SECONDS = 8e-6
"""Clearing the barriers, and adding up the tiles that were cut."""

# The sm80 generation.
MULTISTAGE_L2_BYTES_PER_CLOCK = 42.0
MULTISTAGE_TILE_SECONDS = 1.2e-6
TURN_SECONDS = 1.5e-6
"""One turn of serial split-K: wait for the semaphore, read, add and write a tile."""


def seconds(key: KernelKey, variant: Variant, device: Device, shared_bytes: int, split_k: int = 1) -> float:
    """The estimated time of one launch.

    Args:
        key: the kernel.
        variant: the problem as the kernel sees it.
        device: where it runs.
        shared_bytes: dynamic shared memory of one of its thread blocks.
        split_k: slices of K (sm80 generation).
    """
    busy = _multistage(key, variant, device, shared_bytes, split_k) if key.generation == "sm80" else _warp_specialized(
        key, variant, device
    )  # fmt: skip
    moved = (variant.m * variant.k + variant.k * variant.n) * key.a.bits + variant.m * variant.n * key.d.bits
    floor = variant.batch * moved / 8 / DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)
    return max(busy, floor) + LAUNCH_SECONDS


def _warp_specialized(key: KernelKey, variant: Variant, device: Device) -> float:
    tile_m, tile_n, tile_k = key.tile
    cluster_m, cluster_n, _ = key.cluster
    if key.mainloop == "2sm":
        tile_m //= 2  # two thread blocks of a cluster share the tile that a key of sm100 names
    steps = max(1, math.ceil(variant.k / tile_k))
    efficiency = TILE_N_EFFICIENCY.get(tile_n, 0.8) * (1.0 if tile_m >= 128 else ONE_WARPGROUP_EFFICIENCY)
    if key.a in FP8_TYPES and key.math == "default":
        efficiency *= FULL_ACCUMULATION_EFFICIENCY
    multiply = tile_m * tile_n * tile_k * steps / (_peak(key) * efficiency)

    tiles = round_up(math.ceil(variant.m / tile_m), cluster_m) * round_up(math.ceil(variant.n / tile_n), cluster_n)
    waves = tiles * variant.batch / device.multiprocessors
    # A cluster loads what its thread blocks share once; a GPU that is not full leaves each a larger share of L2.
    read_bytes = (tile_m / cluster_n + tile_n / cluster_m) * tile_k * steps * key.a.bits / 8
    read = read_bytes * max(min(1.0, waves), 0.2) / L2_BYTES_PER_CLOCK
    # The shorter of the two is not hidden entirely: of clusters that are as fast, the one that reads less is taken.
    tile = (max(multiply, read, steps * STEP_CLOCKS) + 0.01 * read) / CLOCK_HZ

    store = tile_m * tile_n * key.d.bits / 8 / STORE_BYTES_PER_SECOND
    extra = CLUSTER_SECONDS if cluster_m * cluster_n > 1 else 0.0
    if key.epilogue_schedule == "nosmem":
        extra += NOSMEM_SECONDS + waves * NOSMEM_TILE_SECONDS
    if key.scheduler == "streamk":
        # Cut tiles even out the last wave, but a grid that does not fill the GPU once is not cut.
        return max(waves, 1.0) * (tile + COOPERATIVE_TILE_SECONDS + store) + STREAM_K_SECONDS + extra
    waves = math.ceil(waves)
    if key.mainloop == "pingpong":
        return waves * (tile + PINGPONG_TILE_SECONDS) + PROLOGUE_SECONDS + store + extra
    return waves * (tile + COOPERATIVE_TILE_SECONDS + store) + extra


def _multistage(key: KernelKey, variant: Variant, device: Device, shared_bytes: int, split_k: int) -> float:
    tile_m, tile_n, tile_k = key.tile
    k = max(1, math.ceil(variant.k / tile_k / split_k)) * tile_k
    residents = max(1, min(device.shared_memory // max(1, shared_bytes), 4))
    multiply = tile_m * tile_n * k / (_peak(key) * _multistage_efficiency(key))
    tiles = math.ceil(variant.m / tile_m) * math.ceil(variant.n / tile_n) * variant.batch * split_k
    per_wave = device.multiprocessors * residents
    busy = min(1.0, tiles / per_wave)
    read = (tile_m + tile_n) * k * key.a.bits / 8 / (MULTISTAGE_L2_BYTES_PER_CLOCK / max(busy, 0.25))
    read *= _narrow_load_penalty(key)
    # Resident blocks share one multiprocessor's units, and hide each other's prologues.
    wave = max(multiply, read) * (residents if tiles >= per_wave else max(1.0, residents * busy))
    waves = math.ceil(tiles / per_wave) * (wave / CLOCK_HZ + MULTISTAGE_TILE_SECONDS)
    # The slices of a tile take turns: each but the first reads what the one before it has written.
    return waves + (split_k - 1) * TURN_SECONDS


def _peak(key: KernelKey) -> float:
    """Multiply-adds per clock and multiprocessor.

    Source: the vendor's peak rates per compute capability; on sm_90 mma.sync reaches about 0.6 of WGMMA's (measured).
    """
    hopper = key.arch.capability == (9, 0)
    if key.math == "ieee":
        return 128.0 if hopper else 64.0
    if key.math == "3xtf32":
        return 200.0 if hopper else 160.0
    if key.a is CutlassDtype.F64:
        return 128.0 if hopper else 64.0
    if key.a.bits == 8 and key.a is not CutlassDtype.I8 and hopper and key.generation == "sm80":
        return 1000.0  # mma.sync of fp8 becomes conversions and HMMA there
    base = {32: 1024.0, 16: 2048.0, 8: 4096.0, 4: 8192.0}[key.a.bits]
    if key.generation == "sm90":
        return base
    if key.generation == "sm120":
        return base / 4  # not measured: mma.sync of fp4 by the vendor's figures
    if key.generation != "sm80":
        return 2 * base  # not measured: UMMA's rate by the vendor's figures
    return base * 0.6 if hopper else base / 2


def _multistage_efficiency(key: KernelKey) -> float:
    """How much of the peak rate an sm80-generation tile sustains when its operands are at hand."""
    area = key.tile[0] * key.tile[1]
    return min(1.0, 0.55 + 0.45 * area / (128 * 128)) * (0.5 if key.mainloop == "twostage" else 1.0)


def _narrow_load_penalty(key: KernelKey) -> float:
    """Loads of less than 16 bytes issue more instructions for the same data."""
    narrow = min(key.align_a * key.a.bits, key.align_b * key.b.bits) // 8
    return {16: 1.0, 8: 1.3, 4: 2.0}.get(narrow, 4.0)
