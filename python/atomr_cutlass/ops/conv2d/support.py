"""Kernels of convolutions: which compute a convolution as it stands, and how long they take by the model."""

from __future__ import annotations

import math

from ...arrays.layouts import collapses, rows_collapse
from ...generator.dtypes import CutlassDtype
from ...generator.key import KernelKey
from ...generator.matrix import shared_memory
from ...generator.rules import OK, Status, no
from ...pipeline import estimate
from ...pipeline.devices import Device
from ...pipeline.plan import bytes_of
from ...pipeline.problem import MatrixSpec, Variant
from ...pipeline.rounding import round_up
from .geometry import DGRAD, FPROP, WGRAD
from .problem import ConvProblem, channel_alignment, packed, reach

ITERATOR_PENALTY = {"": 1.0, "optimized": 1.0, "fixed_channels": 1.1, "few_channels": 1.2, "analytic": 1.6}
"""How much longer than the optimized one an iterator takes, by the model."""
STRIDE_PENALTY = {"": 1.0, "unity": 1.0, "strided": 1.1}
"""How much longer dgrad takes than with unit strides alone, by its support of strides."""

TILE_SECONDS = 4.5e-6
"""Time of a thread block of a TMA convolution beside its products: to start, to store one tile and to end."""
TMA_STEP_CLOCKS = 222.0
"""The shortest step along K of a TMA convolution."""
TILES_AT_ONCE = {64: 2}
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
SLICE_VECTOR = 4
"""Elements that slices are added up by at once."""
CAST_ALIGNMENT = 16
"""Bytes that the addresses of cast operands and results are multiples of."""

_OTHER_TYPES = no("its element types or math mode differ")
_OTHER_EPILOGUE = no("its epilogue differs")
_OTHER_GROUPS = no("its groups of channels differ")
_NOT_ALIGNED = no("an array is aligned to fewer bytes than it needs")
_NOT_DEPTHWISE = no("it convolves single channels")
_OUT_OF_REACH = no("its iterator does not read these extents, strides or dilations")
_NOT_TMA = no("TMA's im2col mode has one group of channels, and dgrad no stride")
_NOT_SPLIT = no("its slices of K cannot be computed side by side")


def convolves(key: KernelKey, problem: ConvProblem, split_k: int = 1) -> Status:
    """Whether a kernel computes a convolution as it stands, with so many slices of K."""
    g = problem.geometry
    status = OK
    if (key.a, key.b, key.d, key.math) != (problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math):
        status = _OTHER_TYPES
    elif key.epilogue not in (problem.epilogue, problem.common):
        status = _OTHER_EPILOGUE
    elif (g.groups > 1) != (key.group_mode != ""):
        status = _OTHER_GROUPS
    elif not _aligned(key, problem):
        status = _NOT_ALIGNED
    elif key.group_mode == "depthwise":
        if not _direct_serves(problem):
            status = _NOT_DEPTHWISE
        elif split_k > 1 and problem.op != WGRAD:
            status = _NOT_SPLIT
    elif key.generation == "sm80" and not _iterator_serves(key, problem):
        status = _OUT_OF_REACH
    elif key.generation != "sm80" and not _tma_serves(problem):
        status = _NOT_TMA
    elif split_k > 1 and (problem.op != WGRAD or key.d is not CutlassDtype.F32 or not _slices_apart(key, problem)):
        status = _NOT_SPLIT
    return status


def seconds(key: KernelKey, problem: ConvProblem, device: Device, split_k: int) -> float:
    """Estimated seconds of a kernel that serves a problem."""
    if key.group_mode == "depthwise":
        return _direct_seconds(key, problem, device, split_k)
    m, n, k = _tiled_gemm(key, problem)
    if key.generation == "sm90":
        moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (problem.a, problem.b, problem.d))
        return _tma_seconds(key, (m, n, k), moved, device)
    variant = Variant(
        swapped=False, m=m, n=n, k=-(-k // split_k), batch=problem.geometry.groups * split_k,
        layout_a=key.layout_a, layout_b=key.layout_b, lda=k, ldb=k, ldc=n, ldd=n, batch_strides=(0, 0, 0, 0),
        align_a=key.align_a, align_b=key.align_b, align_d=key.align_d, layout_d=key.layout_d,
    )  # fmt: skip
    taken = estimate.seconds(key, variant, device, shared_memory(key))
    if split_k > 1:
        taken += CAST_SECONDS + (split_k + 1) * m * n * key.d.bits / 8 / REDUCED_BYTES_PER_SECOND
    # Of kernels that are as fast, the one that loads more at once.
    return taken * ITERATOR_PENALTY[key.iterator] * STRIDE_PENALTY[key.stride_support] * (1 + 1e-3 / key.align_a)


def _tma_seconds(key: KernelKey, implicit_gemm: tuple[int, int, int], moved: int, device: Device) -> float:
    """Estimated seconds of a convolution over TMA, a tile for each thread block; `moved` bytes are read and written."""
    m, n, k = implicit_gemm
    tile_m, tile_n, tile_k = key.tile
    steps = -(-k // tile_k)
    residents = TILES_AT_ONCE.get(tile_n, 1)
    rate = 16384.0 / key.a.bits * 2  # multiply-adds per clock and multiprocessor: WGMMA's
    multiply = residents * tile_m * tile_n * tile_k * steps / (rate * estimate.TILE_N_EFFICIENCY[128])
    clocks = max(multiply, steps * TMA_STEP_CLOCKS)
    waves = -(-(-(-m // tile_m) * -(-n // tile_n)) // (device.multiprocessors * residents))
    floor = moved / estimate.DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)
    seconds = max(waves * (clocks / estimate.CLOCK_HZ + TILE_SECONDS), floor) + estimate.LAUNCH_SECONDS
    return seconds * (1 + 1e-3 / key.align_a)


def _slices_apart(key: KernelKey, problem: ConvProblem) -> bool:
    """Whether slices of K can be computed side by side, each to memory of its own (ConvSm80, Cast)."""
    results = [problem.d] if problem.c is None else [problem.d, problem.c]
    writable = all(spec.dense and spec.alignment % CAST_ALIGNMENT == 0 for spec in results)
    return (
        writable and key.generation == "sm80" and not key.group_mode and math.prod(problem.d.shape) % SLICE_VECTOR == 0
    )


def _aligned(key: KernelKey, problem: ConvProblem) -> bool:
    """Whether all arrays have the alignment that the kernel's vector accesses need."""
    groups = 1 if key.group_mode == "depthwise" else problem.geometry.groups
    of_b, of_d = (groups, 1) if problem.op == WGRAD else (1, groups)
    arrays = ((problem.a, groups, key.align_a), (problem.b, of_b, key.align_b), (problem.d, of_d, key.align_d))
    if any(channel_alignment(spec, parts) % align for spec, parts, align in arrays):
        return False
    if problem.c is not None and channel_alignment(problem.c, of_d) % key.align_d:
        return False
    return problem.bias is None or problem.bias.alignment % key_bytes(key.align_d, problem.bias) == 0


def _tiled_gemm(key: KernelKey, problem: ConvProblem) -> tuple[int, int, int]:
    """The implicit GEMM as the kernel computes it: TMA loads whole tiles of channels, for each tap of the filter."""
    m, n, k = problem.implicit_gemm
    if key.generation == "sm80":
        return m, n, k
    g = problem.geometry
    if problem.op == WGRAD:
        return m, n // g.c * round_up(g.c, key.tile[1]), k
    channels = g.c if problem.op == FPROP else g.k
    return m, n, k // channels * round_up(channels, key.tile[2])


def _direct_serves(problem: ConvProblem) -> bool:
    """Whether the kernels of depthwise convolutions compute it (ConvDepthwise::can_implement)."""
    g = problem.geometry
    return g.groups == g.c == g.k and g.r * g.s <= 128


def _direct_seconds(key: KernelKey, problem: ConvProblem, device: Device, split_k: int) -> float:
    """Estimated seconds of a depthwise convolution: of its taps, or of reading and writing every array once."""
    g = problem.geometry
    pixels = g.n * (g.h * g.w if problem.op == DGRAD else g.p * g.q)
    tiles = -(-g.c // key.tile[1])
    blocks = g.r * g.s * tiles * split_k if problem.op == WGRAD else -(-pixels // key.tile[0]) * tiles
    rate = DIRECT_WGRAD_TAPS_PER_CLOCK if problem.op == WGRAD else DIRECT_TAPS_PER_CLOCK
    rate *= device.multiprocessors * min(1.0, blocks / (DIRECT_BLOCKS * device.multiprocessors))
    summing = pixels * g.c * g.r * g.s / (rate * estimate.CLOCK_HZ) + (split_k - 1) * SLICE_SECONDS
    moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (problem.a, problem.b, problem.d))
    return max(summing, moved / estimate.DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)) + estimate.LAUNCH_SECONDS


def _iterator_serves(key: KernelKey, problem: ConvProblem) -> bool:
    """Whether a kernel of the sm80 generation reads and writes these arrays (ConvSm80::can_implement)."""
    g = problem.geometry
    if problem.op == DGRAD:
        strided = g.stride != (1, 1)
        if strided and (key.stride_support != "strided" or g.dilation != (1, 1)):
            return False
        if key.stride_support == "strided" and g.dilation != (1, 1):
            return False
    if not (packed(problem.d) if problem.op == WGRAD else collapses(problem.d)):
        return False
    bits = 8 if key.iterator in ("fixed_channels", "few_channels") else 1  # those count in bits
    if max(bits * reach(problem.a), bits * reach(problem.b), reach(problem.d)) >= 2**31:
        return False
    channels = g.c // g.groups
    if key.iterator == "fixed_channels":
        return channels == key.align_a and g.dilation == (1, 1)
    if key.iterator == "few_channels":
        return g.dilation == (1, 1)
    if key.iterator == "optimized":
        # A bit mask holds which taps of the filter are inside.
        return g.r <= 32 and g.s <= 32 and (collapses(problem.a) if problem.op == WGRAD else rows_collapse(problem.b))
    return True


def _tma_serves(problem: ConvProblem) -> bool:
    """Whether TMA's im2col mode and CUTLASS's kernels over it compute it."""
    g = problem.geometry
    if g.groups != 1 or (problem.op == DGRAD and g.stride != (1, 1)):
        return False
    if problem.op == WGRAD and not (problem.a.dense and problem.d.dense):
        return False
    spans = ((g.r - 1) * g.dilation[0], (g.s - 1) * g.dilation[1])
    # The corners of the box that an im2col map reads are signed numbers of 8 bits.
    return max(g.stride) <= 8 and max(*g.padding[0], *g.padding[1], *spans) <= 127


def key_bytes(align: int, spec: MatrixSpec) -> int:
    """Bytes of an alignment in elements."""
    return max(1, align * spec.dtype.bits // 8)
