"""Kernels of convolutions: which compute a convolution as it stands."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...arrays.layouts import collapses, rows_collapse
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import wider
from ...generator.key import KernelKey
from ...generator.rules import OK, Status, no
from ...pipeline.plan import bytes_of
from ...pipeline.problem import MOST, MatrixSpec
from .geometry import DGRAD, FPROP, WGRAD
from .problem import ConvProblem, channel_alignment, packed, reach

SLICE_VECTOR = 4
"""Elements that slices are added up by at once."""
CAST_ALIGNMENT = 16
"""Bytes that the addresses of cast operands and results are multiples of."""
DIRECT_TAPS = 128
"""Taps of a filter that kernels of single channels take at most."""

_REACH = 2**31
_FEW_CHANNELS = (1, 2, 4, 8, 16)
_TAPS = 32

_OTHER_TYPES = no("its element types or math mode differ", 1)
_OTHER_EPILOGUE = no("its epilogue differs", 2)
_OTHER_GROUPS = no("its groups of channels differ", 3)
_NOT_ALIGNED = no("an array is aligned to fewer bytes than it needs", 4)
_NOT_DEPTHWISE = no("it convolves single channels", 5)
_OUT_OF_REACH = no("its iterator does not read these extents, strides or dilations", 5)
_NOT_TMA = no("TMA's im2col mode has one group of channels, and dgrad no stride", 5)
_NOT_SPLIT = no("its slices of K cannot be computed side by side", 6)


class ConvTraits(NamedTuple):
    """All that decides which kernels compute a convolution as it stands.

    Attributes:
        op: the operation.
        types: element types of A, B and D, and math mode.
        epilogues: ids of kernels' epilogues that serve.
        grouped: whether there are several groups of channels.
        single: whether each group is a single channel, and the filter small enough for kernels of such.
        alignments: elements of a group's channels of A, B and D (and C), bytes of the bias and bits of its elements.
        whole: those numbers of all channels.
        unit_stride, unit_dilation: whether those are 1.
        spaced: whether the pixels of the result are evenly spaced.
        bits, bytes: whether iterators that count in bits, or in bytes, reach the ends of all arrays.
        channels: of A in one group, if a vector may hold them all; else 0.
        masked: whether a bit mask holds which taps of the filter are inside, and rows are evenly spaced.
        tma: whether TMA's im2col mode and CUTLASS's kernels over it compute it.
        writable: whether slices of K can be added up in memory.
        split: whether there are several slices of K.
    """

    op: str
    types: tuple[CutlassDtype, CutlassDtype, CutlassDtype, str]
    epilogues: tuple[str | None, ...]
    grouped: bool
    single: bool
    alignments: tuple[int, ...]
    whole: tuple[int, ...]
    unit_stride: bool
    unit_dilation: bool
    spaced: bool
    bits: bool
    bytes: bool
    channels: int
    masked: bool
    tma: bool
    writable: bool
    split: bool = False


def traits_of(problem: ConvProblem) -> ConvTraits:
    """The traits of a convolution without slices of K."""
    g, wgrad = problem.geometry, problem.op == WGRAD
    longest, longest_read = reach(problem.d), (reach(problem.a), reach(problem.b))
    results = [problem.d] if problem.c is None else [problem.d, problem.c]
    alignments = _alignments(problem, g.groups)
    writable = all(spec.dense and spec.alignment % CAST_ALIGNMENT == 0 for spec in results)
    return ConvTraits(
        op=problem.op,
        types=(problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math),
        epilogues=(problem.epilogue, problem.common, wider(problem.epilogue)),
        grouped=g.groups > 1,
        single=g.groups == g.c == g.k and g.r * g.s <= DIRECT_TAPS,
        alignments=alignments,
        whole=alignments if g.groups == 1 else _alignments(problem, 1),
        unit_stride=g.stride == (1, 1),
        unit_dilation=g.dilation == (1, 1),
        spaced=packed(problem.d) if wgrad else collapses(problem.d),
        bits=longest < _REACH and all(8 * reached < _REACH for reached in longest_read),
        bytes=longest < _REACH and all(reached < _REACH for reached in longest_read),
        channels=next((few for few in _FEW_CHANNELS if g.c == few * g.groups), 0),
        masked=g.r <= _TAPS and g.s <= _TAPS and (collapses(problem.a) if wgrad else rows_collapse(problem.b)),
        tma=_tma_serves(problem),
        writable=writable and math.prod(problem.d.shape) % SLICE_VECTOR == 0,
    )


def convolves(key: KernelKey, traits: ConvTraits) -> Status:
    """Whether a kernel computes a convolution as it stands."""
    wgrad, status = traits.op == WGRAD, OK
    if (key.a, key.b, key.d, key.math) != traits.types:
        status = _OTHER_TYPES
    elif key.epilogue not in traits.epilogues:
        status = _OTHER_EPILOGUE
    elif traits.grouped != (key.group_mode != ""):
        status = _OTHER_GROUPS
    elif not _aligned(key, traits):
        status = _NOT_ALIGNED
    elif key.group_mode == "depthwise":
        if not traits.single:  # ConvDepthwise::can_implement
            status = _NOT_DEPTHWISE
        elif traits.split and not wgrad:
            status = _NOT_SPLIT
    elif key.generation == "sm80" and not _iterator_serves(key, traits):
        status = _OUT_OF_REACH
    elif key.generation != "sm80" and not traits.tma:
        status = _NOT_TMA
    elif traits.split and not (
        # Slices are computed side by side, each to memory of its own (ConvSm80, Cast).
        wgrad and key.d is CutlassDtype.F32 and traits.writable and key.generation == "sm80" and not key.group_mode
    ):
        status = _NOT_SPLIT
    return status


def extents_of(problem: ConvProblem, split_k: int, *, wide: bool) -> tuple[int, ...]:
    """The extents that the model estimates a convolution by (`Extents` of cpp/src/estimate.h).

    Args:
        problem: the convolution.
        split_k: slices of K.
        wide: whether the result is cast.
    """
    g = problem.geometry
    pixels = g.n * (g.h * g.w if problem.op == DGRAD else g.p * g.q)
    moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (problem.a, problem.b, problem.d))
    channels = g.c if problem.op == FPROP else g.k
    found = *problem.implicit_gemm, g.groups, split_k, wide, channels, g.c, g.r * g.s, pixels, moved
    return tuple(min(extent, MOST) for extent in found)


def _alignments(problem: ConvProblem, groups: int) -> tuple[int, ...]:
    """`ConvTraits.alignments`, with so many groups of channels."""
    of_b, of_d = (groups, 1) if problem.op == WGRAD else (1, groups)
    of_results = channel_alignment(problem.d, of_d)
    if problem.c is not None:
        of_results = min(of_results, channel_alignment(problem.c, of_d))
    bias = (0, 8) if problem.bias is None else (problem.bias.alignment, problem.bias.dtype.bits)
    return channel_alignment(problem.a, groups), channel_alignment(problem.b, of_b), of_results, *bias


def _aligned(key: KernelKey, traits: ConvTraits) -> bool:
    """Whether all arrays have the alignment that the kernel's vector accesses need."""
    of_a, of_b, of_d, bias, bias_bits = traits.whole if key.group_mode == "depthwise" else traits.alignments
    if of_a % key.align_a or of_b % key.align_b or of_d % key.align_d:
        return False
    return bias % max(1, key.align_d * bias_bits // 8) == 0


def _iterator_serves(key: KernelKey, traits: ConvTraits) -> bool:
    """Whether a kernel of the sm80 generation reads and writes these arrays (ConvSm80::can_implement)."""
    if traits.op == DGRAD:
        if not traits.unit_stride and (key.stride_support != "strided" or not traits.unit_dilation):
            return False
        if key.stride_support == "strided" and not traits.unit_dilation:
            return False
    counts_bits = key.iterator in ("fixed_channels", "few_channels")
    if not traits.spaced or not (traits.bits if counts_bits else traits.bytes):
        return False
    if counts_bits:
        return traits.unit_dilation and (key.iterator == "few_channels" or traits.channels == key.align_a)
    return traits.masked if key.iterator == "optimized" else True


def _tma_serves(problem: ConvProblem) -> bool:
    """Whether TMA's im2col mode and CUTLASS's kernels over it compute it."""
    g = problem.geometry
    if g.groups != 1 or (problem.op == DGRAD and g.stride != (1, 1)):
        return False
    if problem.op == WGRAD and not (problem.a.dense and problem.d.dense):
        return False
    spans = ((g.r - 1) * g.dilation[0], (g.s - 1) * g.dilation[1])
    # The corners of the box that an im2col map reads are signed numbers of 8 bits.
    return max(g.stride) <= 8 and all(reached <= 127 for reached in (*g.padding[0], *g.padding[1], *spans))


def key_bytes(align: int, spec: MatrixSpec) -> int:
    """Bytes of an alignment in elements."""
    return max(1, align * spec.dtype.bits // 8)
