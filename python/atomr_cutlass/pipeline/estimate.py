"""The analytic model: how long a kernel would take for a problem, before anything is launched.

Parts, for either generation:

* quantization: a grid of ceil(m / tile_m) x ceil(n / tile_n) x batch tiles runs in waves over the multiprocessors, and
  a part-filled tile costs as much as a full one; the persistent scheduler of sm90 rounds the grid up to whole clusters
  and swizzles (`tile_scheduler`);
* the time of a tile: the slowest of multiplying (tile_m x tile_n x k at the generation's rate, less for tiles too small
  to feed the tensor cores), of reading A and B through L2, and of the steps along K one after the other;
* prologue and epilogue, which pingpong kernels hide behind the other consumer's mainloop but for the first and last;
* the floor that device memory sets: every operand read and written once.

The constants of the sm90 generation were fitted on an H200 to 657 problems with shapes drawn at random, up to 37
kernels with their swizzles and raster orders, each launched before the last has ended (benchmarks/fit_estimate.py);
those of the sm80 generation are the vendor's rates, scaled where measured (docs/performance.md).
Cells of sm100 and sm120 are estimated with sm90's constants and the vendor's rates: nothing was measured there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.families import gemm_few_sm90, gemm_split_sm90
from ..generator.key import COLUMN, ROW, KernelKey
from ..generator.rules import FEW, FP8_TYPES, SPLIT
from . import split_k, tile_scheduler
from .candidate import ALONG_M, HEURISTIC, Launch
from .devices import Device
from .problem import Variant
from .rounding import round_up
from .tile_scheduler import TileList

CLOCK_HZ = 1.7e9
LAUNCH_SECONDS = 1.95e-6
_ROUNDED = 1 - 1e-9  # whatever the order in which a bound's parts are added up
DRAM_BYTES_PER_SECOND = {
    (8, 0): 1.6e12,
    (8, 6): 0.8e12,
    (8, 9): 0.9e12,
    (9, 0): 3.09e12,
    (10, 0): 7e12,
    (12, 0): 1.6e12,
}

# The sm90 generation.
TILE_N_EFFICIENCY = {
    256: 0.942, 208: 0.886, 192: 0.898, 160: 0.906, 144: 0.88, 128: 0.867, 96: 0.84, 64: 0.87, 32: 0.61, 16: 0.21,
}  # fmt: skip
"""Share of WGMMA's peak rate that a tile of this width sustains; narrow ones read A more often than they multiply."""
ONE_WARPGROUP_EFFICIENCY = 0.95
"""The fraction of that which a tile of 64 rows reaches."""
FULL_ACCUMULATION_EFFICIENCY = 0.85
"""The fraction of it which fp8 reaches when float32 accumulates the tensor cores' sums every 128 elements of K."""
L2_BYTES_PER_CLOCK = 61.8
"""Bytes that one multiprocessor draws from L2 per clock when all do."""
PORT_BYTES_PER_CLOCK = 110.0
"""Bytes that it draws at most, however few others do."""
LINE_BYTES = 128
"""Of a cache line."""
STEP_CLOCKS = 177.0
"""The shortest step along K: barriers and latencies."""
BEYOND_CLOCKS = 3.9
"""Likewise, of each row of a tile that lies beyond the last of A."""
WIDE_CLUSTER = 8
WIDE_CLUSTER_STEP_CLOCKS = 247.0
"""Likewise, where eight thread blocks of a cluster load for one another."""
COOPERATIVE_TILE_SECONDS = 0.5e-6
PINGPONG_TILE_SECONDS = 0.15e-6
PROLOGUE_SECONDS = 0.45e-6
STORE_BYTES_PER_SECOND = 49e9
"""At which one multiprocessor stores a finished tile."""
SHOWN = 0.04
"""The fraction of reading A and B through L2 that is not hidden behind the products."""
SHOWN_ALONE = 0.087
"""Likewise, where neighbours in the list of tiles have tiles of one operand in common only."""
MISSED = 0.125
"""The same fraction of reading from device memory on L2 misses."""
L2_SHARE = 0.25
"""The fraction of L2 that holds A and B until they are read again."""
LAST_WAVE = 0.31
"""The fraction of the last wave's idle multiprocessors that speeds up the others."""
CLUSTER_SECONDS = 0.28e-6
"""Synchronizing a cluster at the start and the end."""
NOSMEM_SECONDS = 2.0e-6
NOSMEM_TILE_SECONDS = 6.0e-6
"""The additional time of storing a tile straight from registers."""
STREAM_K_SECONDS = 2e-6
"""Clearing the barriers of a stream-K launch."""
STREAM_K_SPLIT = 1.45
"""How much longer parts of tiles take where no tile is whole (an H200, three shapes)."""
FIXUP_SECONDS = 6e-6
"""Adding up the tiles that it cut."""
PEER_SECONDS = 2e-6
"""Each part of a tile but the first waits for its turn, reads, adds and writes."""

# Kernels of the sm90 generation for few rows.
FEW_LAUNCH_SECONDS = 2.1e-6
FEW_CLUSTER_SECONDS = 0.17e-6
"""How much longer clusters of several thread blocks take."""
FEW_STRADDLED = 0.16
"""The fraction of the cost of weight rows straddling cache lines that is not hidden; a third if K is contiguous."""
# The constants below are GemmFewSm90's, in its units: bytes, picoseconds.
FEW_DRAM_BYTES_PER_10_PS = 48
FEW_L2_BYTES_PER_10_PS = 120
FEW_READ_BYTES_PER_NS = 120
"""At which one multiprocessor takes in weights and the few rows."""
FEW_BOX_PS = {COLUMN: 64000, ROW: 113000}
FEW_WIDE_PS = 380
"""128 bytes of K: a step, and in it each of the few rows, as wide as the instruction is."""
FEW_STORED_PS = 350
FEW_EXCHANGED_PS = 230
"""An element of a tile: reading the sums of a cluster's thread blocks, then storing it."""
FEW_ADDED_PS = 880000
"""Adding up a tile's sums, besides."""
FEW_EXPOSED_PERCENT = 20
"""The fraction of all parts but the longest that the longest does not hide."""

# Kernels of the sm90 generation that share out K; see also `split_k`.
SPLIT_LAUNCH_SECONDS = 3.7e-6
SPLIT_DRAM_BYTES_PER_SECOND = 4.3e12
SPLIT_SOFTNESS = 5.42
"""As FEW_SOFTNESS."""
SPLIT_STEP = 1.08
"""Steps along K take so many times as long as `split_k` says."""
SPLIT_ELEMENT_SECONDS = 0.272e-9
"""Of storing a tile, for each of its elements."""
SPLIT_PART_SECONDS = 0.965e-6
"""Leaving a part of a tile and finding out whether it is the last."""
SPLIT_BYTES_PER_SECOND = 20.9e9
"""At which one multiprocessor writes and reads parts."""

# The sm80 generation.
MULTISTAGE_L2_BYTES_PER_CLOCK = 42.0
MULTISTAGE_TILE_SECONDS = 1.2e-6
MMA_SYNC_ON_HOPPER = 1.8
"""How much longer than the rates say kernels over mma.sync take on sm_90 (the median of 100 timings)."""
TURN_SECONDS = 1.5e-6
"""One turn of serial split-K: wait for the semaphore, read, add and write a tile."""


def seconds(key: KernelKey, variant: Variant, device: Device, shared_bytes: int, split_k: int = 1) -> float:
    """The estimated time of one launch, with the options that are best for it.

    Args:
        key: the kernel.
        variant: the problem as the kernel sees it.
        device: where it runs.
        shared_bytes: dynamic shared memory of one of its thread blocks.
        split_k: slices of K (sm80 generation).
    """
    return launch(key, variant, device, shared_bytes, split_k).seconds


def launch(key: KernelKey, variant: Variant, device: Device, shared_bytes: int, split_k: int = 1) -> Launch:
    """The launch options that are best for a kernel and a problem. Arguments are those of `seconds`."""
    if key.mainloop == FEW:
        return Launch(_few(key, variant, device))
    if key.mainloop == SPLIT:
        return Launch(_split(key, variant, device))
    if key.generation == "sm80":
        busy, swizzle, raster = _multistage(key, variant, device, shared_bytes, split_k), 1, HEURISTIC
        if device.capability == (9, 0):
            busy *= MMA_SYNC_ON_HOPPER
    else:
        busy, swizzle, raster = _warp_specialized(key, variant, device)
    moved = (variant.m * variant.k + variant.k * variant.n) * key.a.bits + variant.m * variant.n * key.d.bits
    floor = variant.batch * moved / 8 / _dram(device)
    return Launch(max(busy, floor) + LAUNCH_SECONDS, split_k, swizzle, raster)


def least(key: KernelKey, variant: Variant, device: Device) -> float:
    """A time that no kernel of these types is estimated to stay below, whatever its tile and generation."""
    rate = _fastest(key, device.arch or key.arch)
    products = variant.batch * variant.m * variant.n * variant.k / rate / device.multiprocessors
    moved = (variant.m * variant.k + variant.k * variant.n) * key.a.bits + variant.m * variant.n * key.d.bits
    return max(products / CLOCK_HZ, variant.batch * moved / 8 / _dram(device)) + LAUNCH_SECONDS


@functools.lru_cache(1024)
def _fastest(key: KernelKey, arch: SmArch) -> float:
    """The highest `_peak` of kernels like one, whatever their generation."""
    kinds = [dataclasses.replace(key, arch=arch, generation=generation) for generation in ("sm80", "sm90", "sm100")]
    return max(_peak(kind) for kind in kinds if arch.capability >= (9, 0) or kind.generation == "sm80")


def _dram(device: Device) -> float:
    return DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)


class _Tile(NamedTuple):
    """The parts of an estimate of the 3.x generations that a kernel alone decides; see `_warp_specialized`."""

    m: int
    n: int
    k: int
    cluster: tuple[int, int]
    blocks: int
    swapped: bool
    rate: float
    step: float
    store: float
    extra: float


_tiles: dict[str, _Tile] = {}
"""By the names of kernels."""


def _tile_of(key: KernelKey) -> _Tile:
    known = _tiles.get(key.name)
    if known is not None:
        return known
    tile_m, tile_n, tile_k = key.tile
    cluster_m, cluster_n, _ = key.cluster
    if key.mainloop == "2sm":
        tile_m //= 2  # two thread blocks of a cluster share the tile that a key of sm100 names
    # Kernels that exchange their operands tile D^T (GemmSm90::kSwapped).
    swapped = key.generation == "sm90" and key.a.bits != 16 and key.layout_a == key.layout_b == ROW
    efficiency = _width_efficiency(tile_n) * (1.0 if tile_m >= 128 else ONE_WARPGROUP_EFFICIENCY)
    if key.a in FP8_TYPES and key.math == "default":
        efficiency *= FULL_ACCUMULATION_EFFICIENCY
    size = cluster_m * cluster_n
    _tiles[key.name] = made = _Tile(
        tile_m, tile_n, tile_k, (cluster_m, cluster_n), size, swapped, _peak(key) * efficiency,
        WIDE_CLUSTER_STEP_CLOCKS if size == WIDE_CLUSTER else STEP_CLOCKS,
        tile_m * tile_n * key.d.bits / 8 / STORE_BYTES_PER_SECOND,
        CLUSTER_SECONDS if size > 1 else 0.0,
    )  # fmt: skip
    return made


def forget() -> None:
    """Forgets what follows from the constants: they have been changed."""
    _tiles.clear()
    _width_efficiency.cache_clear()
    _fastest.cache_clear()


class _Work(NamedTuple):
    """The work of a tile: clocks of multiplying and of the shortest steps along K, and bytes that it loads."""

    blocks: tuple[int, int, int]
    steps: int
    multiply: float
    stepping: float
    loaded: float


def _work(key: KernelKey, tile: _Tile, variant: Variant) -> _Work:
    m, n = (variant.n, variant.m) if tile.swapped else (variant.m, variant.n)
    blocks = (-(-m // tile.m), -(-n // tile.n), variant.batch)
    steps = max(1, -(-variant.k // tile.k))
    multiply = tile.m * tile.n * tile.k * steps / tile.rate
    # A cluster loads what its thread blocks share once.
    rows_a = tile.m / tile.cluster[1] * _lines(variant.lda, key.a)
    rows_b = tile.n / tile.cluster[0] * _lines(variant.ldb, key.b)
    loaded = (rows_a + rows_b) * tile.k * steps * key.a.bits / 8
    step = tile.step + BEYOND_CLOCKS * max(0, tile.m - m)
    return _Work(blocks, steps, multiply, steps * step, loaded)


def _reading(loaded: float, tiles: int, device: Device, at_once: int) -> float:
    """Clocks of reading a tile's operands through L2."""
    # Launches that overlap share L2 evenly only where two of them fit side by side: otherwise blocks start apart.
    share = tiles / device.multiprocessors if 2 * tiles <= at_once else 1.0
    return max(loaded / L2_BYTES_PER_CLOCK * share, loaded / PORT_BYTES_PER_CLOCK)


def bound(key: KernelKey, variant: Variant, device: Device) -> float:
    """Seconds that `launch` does not stay below: without padding to swizzles and misses of L2. Arguments are its."""
    if key.generation == "sm80" or key.mainloop in (FEW, SPLIT):
        return 0.0
    tile = _tile_of(key)
    (rows, columns, batch), _, multiply, stepping, loaded = _work(key, tile, variant)
    tiles = round_up(rows, tile.cluster[0]) * round_up(columns, tile.cluster[1]) * batch
    at_once = tile_scheduler.blocks_at_once(device.multiprocessors, tile.blocks)
    reading = _reading(loaded, tiles, device, at_once)
    seconds = (max(multiply, reading, stepping) + min(SHOWN, SHOWN_ALONE) * reading) / CLOCK_HZ
    if key.scheduler == "streamk":
        return (tiles / at_once * seconds + STREAM_K_SECONDS + tile.extra + LAUNCH_SECONDS) * _ROUNDED
    after = PINGPONG_TILE_SECONDS if key.mainloop == "pingpong" else COOPERATIVE_TILE_SECONDS + tile.store
    busy = _waves(tiles / min(at_once, tiles)) * (seconds + after) + tile.extra
    if key.mainloop == "pingpong":
        busy += PROLOGUE_SECONDS + tile.store
    return (busy + LAUNCH_SECONDS) * _ROUNDED


def _warp_specialized(key: KernelKey, variant: Variant, device: Device) -> tuple[float, int, int]:
    """Busy seconds with the best swizzle and raster order, and those."""
    constants = _tile_of(key)
    cluster_m, cluster_n = cluster = constants.cluster
    blocks, steps, multiply, stepping, loaded = _work(key, constants, variant)
    at_once = tile_scheduler.blocks_at_once(device.multiprocessors, constants.blocks)
    widths = (constants.m * variant.k * key.a.bits / 8, constants.n * variant.k * key.b.bits / 8)
    store, held, dram = constants.store, device.l2_bytes * L2_SHARE, _dram(device)

    def busy(tiles: TileList) -> float:
        waves = tiles.tiles / tiles.blocks
        reading = _reading(loaded, tiles.tiles, device, at_once)
        across = tiles.swizzle * (cluster_n if tiles.raster == ALONG_M else cluster_m)
        shown = (SHOWN if across > 1 else SHOWN_ALONE) * reading
        tile = (max(multiply, reading, stepping) + shown) / CLOCK_HZ
        missed = MISSED * l2_misses(tiles, widths, held) / dram
        after = missed + constants.extra
        if key.epilogue_schedule == "nosmem":
            after += NOSMEM_SECONDS + waves * NOSMEM_TILE_SECONDS
        whole = COOPERATIVE_TILE_SECONDS + store
        if key.scheduler == "streamk":
            return _stream_k(tiles, steps, tile, whole) + after
        if key.mainloop == "pingpong":
            return _waves(waves) * (tile + PINGPONG_TILE_SECONDS) + PROLOGUE_SECONDS + store + after
        return _waves(waves) * (tile + whole) + after

    scheduled = [(1, HEURISTIC)]
    if key.generation == "sm90" and key.op == "gemm":
        scheduled = list(tile_scheduler.orders(blocks, cluster))
    truncate = key.scheduler != "streamk"
    best = (math.inf, 1, HEURISTIC)
    for swizzle, raster in scheduled:
        tiles = tile_scheduler.tile_list(
            blocks, cluster, device.multiprocessors, swizzle, raster, truncate=truncate
        )  # fmt: skip
        taken = busy(tiles)
        if taken < best[0]:
            best = (taken, swizzle, raster)
    return best


@functools.cache
def _width_efficiency(tile_n: int) -> float:
    """TILE_N_EFFICIENCY of a width, on the line between its neighbours there."""
    below = max((width for width in TILE_N_EFFICIENCY if width <= tile_n), default=min(TILE_N_EFFICIENCY))
    above = min((width for width in TILE_N_EFFICIENCY if width >= tile_n), default=max(TILE_N_EFFICIENCY))
    part = (tile_n - below) / (above - below) if above > below else 0.0
    return TILE_N_EFFICIENCY[below] * (1 - part) + TILE_N_EFFICIENCY[above] * part


def _few(key: KernelKey, variant: Variant, device: Device) -> float:
    """Seconds of a kernel for few rows, as it divides the problem itself (GemmFewSm90::divide)."""
    ranks = key.cluster[2]
    heights = range(key.tile[0], 0, -8 if key.layout_b == COLUMN else -64)
    shares = [1 << bits for bits in range(ranks.bit_length())]
    busy = min(_few_cost(key, variant, device, share, height) for share in shares for height in heights) * 1e-12
    turned = gemm_few_sm90.turned(key, variant.m, variant.n)
    straddled = FEW_STRADDLED * (_lines(variant.lda if turned else variant.ldb, key.a) - 1)
    launch = FEW_LAUNCH_SECONDS + (FEW_CLUSTER_SECONDS if ranks > 1 else 0.0)
    return launch + busy * (1 + (straddled / 3 if key.layout_b == COLUMN else straddled))


def _few_cost(key: KernelKey, variant: Variant, device: Device, share: int, height: int) -> int:
    """Picoseconds of one way to divide a problem (GemmFewSm90::cost).

    Fitted on an H200 to shapes drawn at random x clusters of 1, 2 and 4 x the ways to divide them.
    """
    turned = gemm_few_sm90.turned(key, variant.m, variant.n)
    rows, few = (variant.m, variant.n) if turned else (variant.n, variant.m)
    few = -(-few // 8) * 8
    ranks = key.cluster[2]
    split = ranks // share
    clusters = max(1, device.multiprocessors // ranks - (ranks - 1 if ranks > 2 else 0))
    tiles = variant.batch * -(-rows // (height * share))
    waves = -(-tiles // clusters)
    boxes = -(-variant.k // key.tile[2])
    box_bytes = key.tile[2] * key.a.bits // 8
    wide = 16 if few <= 16 else -(-few // 32) * 32
    parts = (
        variant.batch * rows * boxes * box_bytes * 10 // FEW_DRAM_BYTES_PER_10_PS,
        tiles * (height * share + few) * boxes * box_bytes * 10 // FEW_L2_BYTES_PER_10_PS,
        waves * (height + few) * boxes * box_bytes * 1000 // (split * FEW_READ_BYTES_PER_NS),
        waves * boxes * (FEW_BOX_PS[key.layout_b] + FEW_WIDE_PS * wide * -(-height // 64)) // split,
    )
    longest = max(parts)
    taken = longest + (sum(parts) - longest) * FEW_EXPOSED_PERCENT // 100
    taken += waves * height * few * FEW_STORED_PS // split
    return taken + (waves * (height * few * FEW_EXCHANGED_PS + FEW_ADDED_PS) if split > 1 else 0)


def _split(key: KernelKey, variant: Variant, device: Device) -> float:
    """Seconds of a kernel that shares out K: fitted to 20 shapes, 13 of them drawn at random with small results."""
    size = key.cluster[0] * key.cluster[2]
    clusters = max(1, tile_scheduler.blocks_at_once(device.multiprocessors, size) // size)
    division = split_k.division(key, variant, clusters)
    busy = SPLIT_STEP * division.steps * division.step_clocks / CLOCK_HZ
    moved = (variant.m * variant.k + variant.k * variant.n) * key.a.bits + variant.m * variant.n * key.d.bits
    loaded = variant.batch * moved / 8 / SPLIT_DRAM_BYTES_PER_SECOND
    mainloop = math.pow(math.pow(busy, SPLIT_SOFTNESS) + math.pow(loaded, SPLIT_SOFTNESS), 1 / SPLIT_SOFTNESS)
    stored = (division.tiles + division.segments) * gemm_split_sm90.ROWS * division.wide * SPLIT_ELEMENT_SECONDS
    added = (
        division.segments * SPLIT_PART_SECONDS
        + division.part_bytes * (division.segments + division.peers) / SPLIT_BYTES_PER_SECOND
    )
    return SPLIT_LAUNCH_SECONDS + mainloop + stored + added


def _lines(leading: int, dtype: CutlassDtype) -> float:
    """Cache lines that TMA touches for each 128 bytes of an operand: rows that do not begin on one straddle two."""
    return 2.0 - math.gcd(leading * dtype.bits // 8, LINE_BYTES) / LINE_BYTES


def _waves(waves: float) -> float:
    """Waves of whole tiles; the last one, if not the only one, is faster the fewer multiprocessors it keeps busy."""
    full = math.ceil(waves)
    return full - LAST_WAVE * (full - waves) if waves > 1 else full


def _stream_k(tiles: TileList, steps: int, tile: float, whole: float) -> float:
    """Busy seconds of a stream-K launch: whole tiles in waves, then parts of the others, which are added up."""
    cut = tile_scheduler.decompose(tiles, steps)
    if not cut.units:
        return _waves(tiles.tiles / tiles.blocks) * (tile + whole) + STREAM_K_SECONDS
    longer = 1.0 if cut.whole else STREAM_K_SPLIT
    parts = math.ceil(cut.units / tiles.blocks) * (longer * tile * cut.cut / cut.units + whole)
    added = FIXUP_SECONDS + max(0.0, cut.units / cut.cut - 1.0) * PEER_SECONDS
    return math.ceil(cut.whole / tiles.blocks) * (tile + whole) + parts + added + STREAM_K_SECONDS


def l2_misses(tiles: TileList, widths: tuple[float, float], held: float) -> float:
    """Bytes of A and B that are read from device memory, by the order in which tiles are taken.

    Tiles are taken in panels: `swizzle` clusters across the raster order, all along it. One operand stays with a panel;
    the other is read through with each, again if L2 cannot hold it until the next one.

    Args:
        tiles: the order.
        widths: bytes of A that a row of tiles reads, and bytes of B that a column of them does.
        held: bytes that L2 holds.
    """
    across, along = (tiles.rows, tiles.columns), (tiles.cluster[0], tiles.cluster[1])
    of_across, of_along = widths
    if tiles.raster == ALONG_M:
        across, along, of_across, of_along = across[::-1], along[::-1], of_along, of_across
    panel = tiles.swizzle * along[0]
    panels = across[0] / panel
    # Panels that are shorter than a wave are read through side by side.
    passes = max(1.0, min(panels, tiles.tiles / tiles.batch / tiles.blocks))
    through = of_along * across[1]
    if through + of_across * panel <= held:
        passes = 1.0
    window = min(across[1], tiles.blocks / panel)
    # A panel too large for L2 beside what is read through with it is read again in each wave.
    waves = max(1.0, across[1] / window) if of_across * panel + of_along * window > held else 1.0
    return tiles.batch * (of_across * across[0] * waves + through * passes)


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
