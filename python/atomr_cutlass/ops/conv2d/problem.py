"""The problem that convolution kernels are chosen for, and which of them compute it as it stands."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from ...arrays.layouts import collapses, pixel_strides, rows_collapse
from ...epilogue.bound import Fusion, source_of
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import COMMON_ACTIVATIONS, as_bias_and_activation, common_of, wider
from ...generator.epilogue.lower import COMMON, LINEAR, epilogue_id, with_source
from ...generator.key import KernelKey
from ...generator.rules import OK, Status, no
from ...pipeline.plan import bytes_of
from ...pipeline.problem import MOST, MatrixSpec, vector_elements
from .geometry import DGRAD, FPROP, WGRAD, ConvGeometry, as_images

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
        iterators: of the sm80 generation, those that read and write the arrays.
        stride_supports: the forms of its kernels that have these strides and dilations.
        channels: of A in one group, if a vector may hold them all; else 0.
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
    iterators: frozenset[str]
    stride_supports: tuple[str, ...]
    channels: int
    tma: bool
    writable: bool
    split: bool = False


@dataclass(frozen=True)
class ConvProblem:
    """D = act(alpha * conv(A, B) + beta * C + bias) of the caller's arrays, dimensions in the order of NHWC.

    Attributes:
        op: `conv2d_fprop` (A = x, B = w, D = y), `conv2d_dgrad` (dy, w, dx) or `conv2d_wgrad` (dy, x, dw).
        geometry: extents.
        a, b, d: the arrays, 4-D; channels last and contiguous.
        c: like D, or None.
        math: math mode of the kernel key.
        device: index of the GPU.
        bias: one element for each channel of D, or None.
        activation: name, or None.
        fusion: the tree that follows, with its arrays, in the place of bias and activation; or None.
        source: number of the tree's input that is loaded as the C operand, and described by `c`; or None.
    """

    op: str
    geometry: ConvGeometry
    a: MatrixSpec
    b: MatrixSpec
    c: MatrixSpec | None
    d: MatrixSpec
    math: str
    device: int
    bias: MatrixSpec | None = None
    activation: str | None = None
    fusion: Fusion | None = None
    source: int | None = None

    @property
    def images(self) -> tuple[MatrixSpec, MatrixSpec, MatrixSpec]:
        """x, w and y, or the gradients in their places."""
        return as_images(self.op, self.a, self.b, self.d)

    @property
    def epilogue(self) -> str:
        """Id of the kernel key's epilogue."""
        if self.fusion is not None:
            program = self.fusion.tree.program
            return epilogue_id(LINEAR, program if self.source is None else with_source(program, self.source))
        return LINEAR if self.activation in (None, "identity") else f"{LINEAR}_{self.activation}"

    @property
    def common(self) -> str | None:
        """Id of the epilogue of kernels that are told their tree; None where those do not serve."""
        if self.op == WGRAD:
            return None
        if self.fusion is None:
            return COMMON if self.activation in (None, "identity", *COMMON_ACTIVATIONS) else None
        return common_of(self.epilogue)

    @property
    def implicit_gemm(self) -> tuple[int, int, int]:
        """M, N and K of the product of one group (source: CUTLASS's documentation of implicit GEMM)."""
        g = self.geometry
        x_channels, y_channels = g.c // g.groups, g.k // g.groups
        if self.op == FPROP:
            return g.n * g.p * g.q, y_channels, g.r * g.s * x_channels
        if self.op == DGRAD:
            # Of a strided filter every pixel meets one tap in stride_h * stride_w.
            taps = -(-g.r // g.stride[0]) * -(-g.s // g.stride[1])
            return g.n * g.h * g.w, x_channels, taps * y_channels
        return y_channels, g.r * g.s * x_channels, g.n * g.p * g.q

    @functools.cached_property
    def traits(self) -> ConvTraits:
        """The traits, without slices of K."""
        g = self.geometry
        alignments = _alignments(self, g.groups)
        results = [self.d] if self.c is None else [self.d, self.c]
        writable = all(spec.dense and spec.alignment % CAST_ALIGNMENT == 0 for spec in results)
        return ConvTraits(
            op=self.op,
            types=(self.a.dtype, self.b.dtype, self.d.dtype, self.math),
            epilogues=(self.epilogue, self.common, wider(self.epilogue)),
            grouped=g.groups > 1,
            single=g.groups == g.c == g.k and g.r * g.s <= DIRECT_TAPS,
            alignments=alignments,
            whole=alignments if g.groups == 1 else _alignments(self, 1),
            iterators=_iterators(self),
            stride_supports=_stride_supports(self),
            channels=next((few for few in _FEW_CHANNELS if g.c == few * g.groups), 0),
            tma=_tma_serves(self),
            writable=writable and math.prod(self.d.shape) % SLICE_VECTOR == 0,
        )

    def extents(self, split_k: int, *, wide: bool) -> tuple[int, ...]:
        """The extents that the model estimates the convolution by (`Extents` of cpp/src/estimate.h).

        Args:
            split_k: slices of K.
            wide: whether the result is cast.
        """
        g = self.geometry
        pixels = g.n * (g.h * g.w if self.op == DGRAD else g.p * g.q)
        moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (self.a, self.b, self.d))
        channels = g.c if self.op == FPROP else g.k
        found = *self.implicit_gemm, g.groups, split_k, wide, channels, g.c, g.r * g.s, pixels, moved
        return tuple(min(extent, MOST) for extent in found)


def formulations(problem: ConvProblem) -> list[ConvProblem]:
    """The formulations of a problem for kernels, better ones first.

    A tree that is bias and activation is put to kernels that have just those, any other with a matrix loaded as C where
    one can be, and then as it is.
    """
    if problem.fusion is None:
        return [problem]
    found = [_without_tree(problem), _with_source(problem), problem]
    return [formulation for formulation in found if formulation is not None]


def _without_tree(problem: ConvProblem) -> ConvProblem | None:
    """The problem with bias and activation in the place of its tree; None for any other tree."""
    fusion = problem.fusion
    plain = None if fusion is None else as_bias_and_activation(fusion.tree.program)
    if fusion is None or plain is None or unlike_a_bias(fusion, problem.d.dtype):
        return None
    bias = None
    if plain.bias is not None:
        if problem.c is not None:  # kernels without a tree load either C or the bias
            return None
        spec = fusion.inputs[0].spec
        bias = MatrixSpec(spec.shape[-1:], (1,), spec.dtype, spec.alignment)
    return dataclasses.replace(problem, fusion=None, bias=bias, activation=plain.activation)


def unlike_a_bias(fusion: Fusion, d: CutlassDtype) -> str:
    """Why kernels without trees do not add the bias of a tree that is a bias and an activation; else empty."""
    plain = as_bias_and_activation(fusion.tree.program)
    if plain is None or plain.bias is None:
        return ""
    bias = fusion.inputs[0]
    if plain.bias is not d:
        return (
            f"{bias.name} is {plain.bias.value}, and kernels without trees read it as the result's dtype, {d.value}; "
        )
    if bias.spec.shape[-1] > 1 and bias.spec.strides[-1] != 1:
        return f"{bias.name} has stride {bias.spec.strides[-1]}, and kernels without trees read a contiguous one; "
    return ""


def _with_source(problem: ConvProblem) -> ConvProblem | None:
    """The problem with a matrix of its tree loaded as C, if one can be."""
    if problem.fusion is None or problem.c is not None or not collapses(problem.d):
        return None
    # Kernels have one set of strides for C and D.
    strides = (pixel_strides(problem.d)[0], 1)
    number = source_of(
        problem.fusion, lambda array: array.spec.strides == strides and array.dtype is problem.d.dtype
    )  # fmt: skip
    if number is None:
        return None
    c = dataclasses.replace(problem.d, alignment=problem.fusion.inputs[number].alignment)
    return dataclasses.replace(problem, source=number, c=c)


def of_two_images(problem: ConvProblem) -> ConvProblem:
    """The same convolution of two images, which lie apart as the given ones do, or where there is one without a gap.

    What is decided by it is the same for every number of images.
    """

    def spec(one: MatrixSpec) -> MatrixSpec:
        least = one.shape[1] * pixel_strides(one)[1]
        apart = one.strides[0] if one.shape[0] > 1 else max(one.strides[0], least)
        return dataclasses.replace(one, shape=(2, *one.shape[1:]), strides=(apart, *one.strides[1:]))

    c = None if problem.c is None else spec(problem.c)
    geometry = problem.geometry._replace(n=2)
    return dataclasses.replace(problem, geometry=geometry, a=spec(problem.a), c=c, d=spec(problem.d))


def check_channels(name: str, spec: MatrixSpec) -> None:
    """Refuses an array that convolutions cannot read.

    Raises:
        InvalidOperandError: a negative stride.
        UnsupportedError: channels are not contiguous, or elements share memory.
    """
    if any(stride < 0 and extent > 1 for stride, extent in zip(spec.strides, spec.shape, strict=True)):
        raise InvalidOperandError(f"{name} has a negative stride ({spec.strides}): copy it")
    if spec.shape[-1] > 1 and spec.strides[-1] != 1:
        raise UnsupportedError(
            f"{name} (NHWC order) has strides {spec.strides}: its channels must be contiguous; in PyTorch "
            f"{name} = {name}.contiguous(memory_format=torch.channels_last)"
        )
    if any(stride == 0 and extent > 1 for stride, extent in zip(spec.strides, spec.shape, strict=True)):
        raise UnsupportedError(f"{name} (NHWC order) has strides {spec.strides}: copy what is broadcast")


def packed(spec: MatrixSpec) -> bool:
    """Whether the pixels of one outer index have no gaps."""
    _, rows, columns, channels = spec.shape
    return rows * columns == 1 or (pixel_strides(spec)[0] == channels and rows_collapse(spec))


def reach(spec: MatrixSpec) -> int:
    """Bytes from the first element to the end of the last."""
    span = sum(
        (extent - 1) * stride for extent, stride in zip(spec.shape, (*reversed(pixel_strides(spec)), 1), strict=True)
    )
    return (span + 1) * spec.dtype.bits // 8


def channel_alignment(spec: MatrixSpec, groups: int = 1) -> int:
    """Elements that a vector access of a group's channels may span, by address, strides and extent."""
    elements = [spec.shape[-1] // groups, *pixel_strides(spec)]
    return vector_elements(spec, elements)


def convolves(key: KernelKey, traits: ConvTraits) -> Status:
    """Whether a kernel computes a convolution as it stands."""
    if (key.a, key.b, key.d, key.math) != traits.types:
        return _OTHER_TYPES
    if key.epilogue not in traits.epilogues:
        return _OTHER_EPILOGUE
    if traits.grouped != (key.group_mode != ""):
        return _OTHER_GROUPS
    if not _aligned(key, traits):
        return _NOT_ALIGNED
    if key.group_mode == "depthwise":
        if not traits.single:  # ConvDepthwise::can_implement
            return _NOT_DEPTHWISE
        return _NOT_SPLIT if traits.split and traits.op != WGRAD else OK
    if key.generation != "sm80":
        if not traits.tma:
            return _NOT_TMA
        return _NOT_SPLIT if traits.split else OK
    if key.stride_support not in traits.stride_supports or key.iterator not in traits.iterators:
        return _OUT_OF_REACH
    if key.iterator == "fixed_channels" and traits.channels != key.align_a:
        return _OUT_OF_REACH
    # Slices are computed side by side, each to memory of its own (ConvSm80, Cast).
    apart = traits.op == WGRAD and key.d is CutlassDtype.F32 and traits.writable and not key.group_mode
    return _NOT_SPLIT if traits.split and not apart else OK


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


def _iterators(problem: ConvProblem) -> frozenset[str]:
    """The iterators of the sm80 generation that read and write the arrays (ConvSm80::can_implement)."""
    g, wgrad = problem.geometry, problem.op == WGRAD
    read, written = (reach(problem.a), reach(problem.b)), reach(problem.d)
    spaced = packed(problem.d) if wgrad else collapses(problem.d)
    if not spaced or not all(reached < _REACH for reached in (*read, written)):
        return frozenset()
    found = {"analytic"}
    # A bit mask holds which taps of the filter are inside, and rows are evenly spaced.
    if g.r <= _TAPS and g.s <= _TAPS and (collapses(problem.a) if wgrad else rows_collapse(problem.b)):
        found.add("optimized")
    # These count in bits.
    if g.dilation == (1, 1) and all(8 * reached < _REACH for reached in read):
        found |= {"few_channels", "fixed_channels"}
    return frozenset(found)


def _stride_supports(problem: ConvProblem) -> tuple[str, ...]:
    """`ConvTraits.stride_supports`: dgrad of a strided filter has no dilation."""
    if problem.op != DGRAD:
        return ("",)
    unity = ("unity",) if problem.geometry.stride == (1, 1) else ()
    return (*unity, "strided") if problem.geometry.dilation == (1, 1) else unity


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
