"""The constants of the analytic model: how long a kernel would take for a problem, before anything is launched.

The model itself is `_core.TimeModel` (cpp/src/estimate.h says of which parts it consists). The constants of the sm90
generation were fitted on an H200 to 1,516 problems with shapes drawn at random, some 40 kernels with their slices,
widths, swizzles and raster orders, each launched before the last has ended (benchmarks/fit_estimate.py); those of the
sm80 generation are the vendor's rates, scaled where measured (docs/performance.md). Cells of sm100 and sm120 are
estimated with sm90's constants and the vendor's rates: nothing was measured there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from .. import _core
from ..arrays import symbols
from ..generator.epilogue.lower import is_common
from ..generator.families import gemm_sm90, gemv
from ..generator.key import KernelKey, shared_memory
from .candidate import Launch

if TYPE_CHECKING:
    from .devices import Device

Extents: TypeAlias = tuple[int, ...]
"""M, N, K, batches, leading dimensions of A and B, whether K is divided, and bytes of an operand that is copied before;
those of a convolution are `ConvFormulation.extents`.
"""

CLOCK_HZ = 1.7e9
LAUNCH_SECONDS = 1.95e-6
FITTED_MEMORY_BYTES_PER_SECOND = 4.917e12
"""The rate of an H200's memory (`Device.memory_bytes_per_second`), of which the constants below are; for other GPUs
they are scaled by the rates of their memories.
"""
DRAM_BYTES_PER_SECOND = 3.09e12
COMMON_PART = 1.01
"""How much longer a common kernel takes than one of a single tree, which serves where both are there."""

# The sm90 generation.
TILE_N_EFFICIENCY = {
    256: 1.15, 240: 1.02, 224: 1.17, 208: 1.15, 192: 1.24, 176: 1.19, 160: 1.26, 144: 1.25,
    128: 1.24, 112: 1.18, 96: 1.22, 64: 1.11, 32: 0.779, 16: 0.246,
}  # fmt: skip
"""Share of WGMMA's peak rate at CLOCK_HZ that a tile of this width reaches; the clock may be higher."""
ONE_WARPGROUP_EFFICIENCY = 0.924
"""The fraction of that share which a tile of 64 rows reaches."""
TALL_EFFICIENCY = 0.933
"""The fraction of that share which a tile of 256 rows reaches."""
FULL_ACCUMULATION_EFFICIENCY = 0.91
"""The fraction of that share which fp8 reaches when float32 accumulates tensor cores' sums each 128 elements of K."""
BLOCK_SCALED_EFFICIENCY = 0.84
"""The fraction of that share which fp8 reaches with scales of blocks."""
BLOCK_SCALED_ALONE = 0.88
"""The fraction of BLOCK_SCALED_EFFICIENCY which a single warp group reaches."""
THROUGH_REGISTERS_EFFICIENCY = 0.9
"""The fraction of that share which kernels reach that bring one operand to the tensor cores through registers."""
THROUGH_REGISTERS_STEP_CLOCKS = 220.0
"""The shortest step of such kernels, for each 64 rows of a tile; see STEP_CLOCKS."""
L2_BYTES_PER_CLOCK = 100.0
"""Bytes of cache lines that one multiprocessor draws from L2 per clock when all do."""
PAIR_BYTES_PER_CLOCK = 78.5
"""Bytes that each of the two multiprocessors which share a port draws at most."""
PORT_BYTES_PER_CLOCK = 145.0
"""Bytes that one of them draws at most while the other one is idle."""
STREAMED = 1.47
"""How much faster than DRAM_BYTES_PER_SECOND says kernels over TMA read and write what fits no cache."""
STEP_CLOCKS = 15.4
"""The shortest step along K: barriers and latencies."""
BEYOND_CLOCKS = 3.12
"""Clocks of a step that each row of a tile beyond the last of A takes."""
BEYOND_N_CLOCKS = 1.67
"""Clocks of a step that each column of a tile beyond the last of B takes."""
WIDE_CLUSTER_STEP_CLOCKS = 93.6
"""The shortest step where eight thread blocks of a cluster load for one another."""
COOPERATIVE_TILE_SECONDS = 0.499e-6
PINGPONG_TILE_SECONDS = 0.235e-6
PROLOGUE_SECONDS = 0.269e-6
STORE_BYTES_PER_SECOND = 38.2e9
"""At which one multiprocessor stores a finished tile."""
SHOWN = 0.0496
"""The fraction of reading A and B through L2 that is not hidden behind the products."""
SHOWN_ALONE = 0.0845
"""That fraction where neighbours in the list of tiles share the tiles of one operand only."""
MISSED = 0.106
"""The same fraction of reading from device memory on L2 misses."""
L2_SHARE = 0.25
"""The fraction of L2 that holds A and B until they are read again."""
LAST_WAVE = 0.335
"""The fraction of the last wave's idle multiprocessors that speeds up the others."""
CLUSTER_SECONDS = 0.0864e-6
"""Synchronizing a cluster at the start and the end, each time that it doubles."""
LATE_IN_CLUSTER = 0.078
"""How much longer a tile takes in clusters of four, where thread blocks compute many one after the other."""
LATE_IN_WIDE_CLUSTER = 0.142
"""How much longer it takes in clusters of eight."""
WIDE_CLUSTERS_FULL = 0.0468
"""How much longer tiles take where as many clusters of eight run as the device holds."""
NOSMEM_SECONDS = 2.0e-6
NOSMEM_TILE_SECONDS = 6.0e-6
"""The additional time of storing a tile straight from registers."""
STREAM_K_SECONDS = 1.08e-6
"""Clearing the barriers of a stream-K launch."""
STREAM_K_SPLIT = 1.45
"""How much longer parts of tiles take where no tile is whole (an H200, three shapes)."""
FIXUP_SECONDS = 8.87e-6
"""Adding up the tiles that it cut."""
PEER_SECONDS = 1.3e-6
"""Each part of a tile but the first waits for its turn, reads, adds and writes."""

COPIED = 0.85
"""The fraction of device memory's rate at which an operand is copied, transposed."""

# Kernels of the sm90 generation for few rows.
FEW_LAUNCH_SECONDS = 2.14e-6
FEW_BUSY = 0.925
"""Kernels of column-major weights are busy so many times as long as they assume by the constants below."""
FEW_BUSY_ROWS = 0.87
"""How many times as long kernels of row-major weights are busy."""
FEW_MANY = 1.12
"""How much longer than by these constants more than 96 rows take."""
FEW_CLUSTER_SECONDS = 0.17e-6
"""How much longer clusters of several thread blocks take."""
FEW_STRADDLED = 0.027
"""The fraction of the cost of column-major weights' columns straddling cache lines that is not hidden."""
# The constants below are GemmFewSm90's, in its units: bytes, picoseconds.
FEW_DRAM_BYTES_PER_10_PS = 48
FEW_L2_BYTES_PER_10_PS = 120
FEW_HALF_LINE_TENTHS = 15
FEW_HALF_SECTOR_TENTHS = 30
"""Tenths of that time which a row of the few takes if rows begin at odd multiples of 32, or of 16, bytes."""
FEW_READ_BYTES_PER_NS = 120
"""At which one multiprocessor takes in column-major weights and the few rows."""
FEW_READ_ROWS_BYTES_PER_NS = 57
"""At which it takes in row-major weights alone."""
FEW_ASTRAY_ROWS = 4
"""Rows of row-major weights that a tile reads beside its own, so to say, unless it begins and ends with cache lines."""
FEW_BOX_ALONG_K_PS = 64000
FEW_BOX_ROWS_PS = 140000
"""A step along K, of column-major and of row-major weights."""
FEW_WIDE_PS = 380
"""128 bytes of K: a step, and in it each of the few rows, as wide as the instruction is."""
FEW_STORED_PS = 350
FEW_GATHERED_PS = 230
"""An element of a tile: reading the sums of a cluster's thread blocks, then storing it."""
FEW_ADDED_PS = 880000
"""Adding up a tile's sums, besides."""
FEW_FP8 = 1.1
"""How much longer fp8 takes; the other constants are those of f16 and bf16."""
FEW_BLOCK_SCALED = 1.2
"""How much longer that takes with scales of blocks."""
FEW_EXPOSED_PERCENT = 20
"""The fraction of all parts but the longest that the longest does not hide."""

# Kernels of the sm90 generation that share out K; see also split_division.h.
SPLIT_LAUNCH_SECONDS = 3.92e-6
SPLIT_DRAM_BYTES_PER_SECOND = 4.3e12
SPLIT_SOFTNESS = 5.42
"""As FEW_SOFTNESS."""
SPLIT_STEP = 1.32
"""Steps along K take so many times as long as the kernel assumes."""
SPLIT_ELEMENT_SECONDS = 0.272e-9
"""Of storing a tile, for each of its elements."""
SPLIT_PART_SECONDS = 0.877e-6
"""Leaving a part of a tile and finding out whether it is the last."""
SPLIT_BYTES_PER_SECOND = 20.9e9
"""At which one multiprocessor writes and reads parts."""

# Slices of K side by side, which another kernel adds up.
DIVIDED_SECONDS = 0.643e-6
"""Starting that kernel, beside the end of the one before."""
DIVIDED_ROUND_SECONDS = 0.516e-6
"""Reading as many slices as a thread reads at once."""
DIVIDED_AT_ONCE = 8
"""Which are so many (Cast::kAtOnce)."""
DIVIDED_BYTES_PER_SECOND = 5.96e12
"""At which it reads and writes."""
DIVIDED_STEPS = 4
"""Along K, that a slice has at least."""
DIVIDED_MOST_BYTES = 48 << 20
"""Of sums, which are to stay in L2."""
DIVIDED_WAVES = 3
"""That the tiles of all slices come to at most."""

# The sm80 generation.
MULTISTAGE_L2_BYTES_PER_CLOCK = 42.0
MULTISTAGE_TILE_SECONDS = 1.2e-6
MMA_SYNC_ON_HOPPER = 1.8
"""How much longer than the rates say kernels over mma.sync take on sm_90 (the median of 100 timings)."""
FMA_PER_CLOCK = 174.5
"""Multiply-adds of IEEE float32 by a multiprocessor of sm_90, beside the loads that FMA_LOAD_CLOCKS counts.

These and those of DMMA were fitted on an H200 to 38 random problems, with up to 40 kernels each.
"""
FMA_ALONG_K_CLOCKS = 0.487
"""Clocks of each element of a tile, and step along K, where neighbours in memory lie along K."""
FMA_LOAD_CLOCKS = 0.122
"""The same, where they do not."""
FMA_WARPS = 6.0
"""That a multiprocessor is busy with."""
FMA_TILE_SECONDS = 4.1e-6
FMA_TURN_SECONDS = 1.9e-6
"""As TURN_SECONDS."""
FMA_VECTOR_PER_CLOCK = 138.0
"""As FMA_PER_CLOCK, of kernels that load vectors (mainloop_simt.h).

These were fitted on an H200 to 275 timings of five kernels on 26 problems, 11% off (standard deviation).
"""
FMA_VECTOR_LOAD_CLOCKS = 0.047
"""As FMA_LOAD_CLOCKS, whichever way elements lie."""
FMA_VECTOR_IDLE = 0.51
"""Of the time that the thread blocks would take which are missing on a multiprocessor at last."""
FMA_VECTOR_TILE_SECONDS = 1.94e-6
DMMA_PER_CLOCK = 115.0
"""Multiply-adds of float64."""
DMMA_WARPS = 13.0
"""Fitted, as DMMA_PER_CLOCK, to what is chosen of 193 timings of 16 problems."""
DMMA_TILE_SECONDS = 3.0e-6
TWO_STAGE_STEP_SECONDS = 0.25e-6
"""A step along K of a kernel for f16 and bf16 that loads single elements, but for MMA_SYNC_ON_HOPPER.

This and the next one were fitted on an H200 to 15 products.
"""
TWO_STAGE_SHARED_SECONDS = 0.2e-6
"""And for each thread block on the same multiprocessor."""
TURN_SECONDS = 1.5e-6
"""One turn of serial split-K: wait for the semaphore, read, add and write a tile."""

# Grouped products.
GROUPED_FULL_ACCUMULATION = 1.05
"""How much longer than with fast accumulation an fp8 kernel takes."""
GROUPED_NARROW = 1.5
"""Factor on the time of a kernel that reads single elements: it serves only layouts that no other reads."""
GROUPED_EMPTY_ROWS = 0.05
"""How much longer a tile takes all of whose rows are empty."""

# Matrices times vectors.
GEMV_THREADS = gemv.THREADS
GEMV_BLOCKS = 3
"""Thread blocks of a multiprocessor that have enough under way to read memory as fast as it can be read."""
GEMV_RESIDENT = 4
"""That run on it at once."""
GEMV_AT_ONCE = 4
"""Vectors that a thread reads at once."""
GEMV_ROWS = 32
"""Rows of a matrix that is contiguous along N, of which a thread block reads vectors in one step."""
GEMV_SLICES_SECONDS = 2.0e-6
"""Leaving the sums of slices of K in memory, and adding them up."""
GEMV_NARROW = 0.5
"""Share of the memory's rate that loads of single elements reach."""

# Convolutions.
ITERATOR_PENALTY = {"": 1.0, "optimized": 1.0, "fixed_channels": 1.1, "few_channels": 1.2, "analytic": 1.6}
"""How much longer than the optimized one an iterator takes."""
STRIDE_PENALTY = {"": 1.0, "unity": 1.0, "strided": 1.1}
"""How much longer dgrad takes than with unit strides alone, by its support of strides."""
CONV_TILE_SECONDS = 4.5e-6
"""Time of a thread block of a TMA convolution beside its products: to start, to store one tile and to end."""
CONV_STEP_CLOCKS = 222.0
"""The shortest step along K of a TMA convolution."""
CONV_EFFICIENCY = 0.867
"""Share of WGMMA's peak rate that a TMA convolution sustains."""
CONV_TILES_AT_ONCE = {64: 2}
"""Thread blocks of a TMA convolution on a multiprocessor, by the width of its tile; 1 for any other."""
DIRECT_TAPS_PER_CLOCK = 48.0
"""Taps of single channels that one multiprocessor sums in a depthwise convolution; in wgrad it reads two arrays."""
DIRECT_WGRAD_TAPS_PER_CLOCK = 12.0
DIRECT_BLOCKS = 4
"""Thread blocks of a depthwise convolution that a multiprocessor is busy with."""
SLICE_SECONDS = 2e-8
"""Adding up one slice of a depthwise wgrad."""
REDUCED_BYTES_PER_SECOND = 2.5e12
"""At which slices that were computed side by side are added up."""
CAST_SECONDS = 4e-6
"""One launch that casts a small result."""


def model_now() -> _core.TimeModel:
    """The model with the constants as they stand."""
    return _core.TimeModel({name: value for name, value in globals().items() if name.isupper()})


model = model_now()


@functools.lru_cache(8192)
def kernel_of(key: KernelKey) -> _core.ModelKernel:
    """A kernel as the model describes it."""
    widths = gemm_sm90.widths(key)
    told = (widths.start, widths.step) if widths else (0, 0)
    return _core.ModelKernel(key, is_common(key.epilogue), shared_memory(key), told)


def launch(key: KernelKey, extents: Extents, device: Device, shared_bytes: int, split_k: int = 1) -> Launch:
    """The launch options that are best for a kernel and a problem.

    Args:
        key: the kernel.
        extents: those of the problem as the kernel sees it; see `KernelSearch.extents`.
        device: where it runs.
        shared_bytes: dynamic shared memory of one of its thread blocks.
        split_k: slices of K (sm80 generation).
    """
    return Launch(*model.launch(kernel_of(key), extents, device, shared_bytes, split_k))


def slices(key: KernelKey, extents: Extents, device: Device) -> tuple[int, ...]:
    """The slices of K that a kernel may be run with; of what is divided that may be none."""
    return model.slices(kernel_of(key), extents, device)


def least(key: KernelKey, extents: Extents, device: Device) -> float:
    """A time that no kernel of these types is estimated to stay below, whatever its tile and generation."""
    trace, kernel = symbols.current(), kernel_of(key)
    return model.least(kernel, extents, device) if trace is None else trace.least(model, kernel, extents, device)
