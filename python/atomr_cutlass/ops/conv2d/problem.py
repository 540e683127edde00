"""Convolutions: their extents, the problem that kernels are chosen for, and the conditions of kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ...arrays.layouts import MatrixSpec, collapses, pixel_strides, rows_collapse, vector_elements
from ...checks import MOST, shown
from ...epilogue.fusion import Fusion, source_of
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import COMMON_ACTIVATIONS, as_bias_and_activation, common_of, wider
from ...generator.epilogue.lower import COMMON, LINEAR, epilogue_id, with_source
from ...generator.key import KernelKey
from ...generator.rules import OK, Status
from ...pipeline.search import refused

FPROP, DGRAD, WGRAD = "conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"

OPERANDS = {FPROP: ("x", "w"), DGRAD: ("dy", "w"), WGRAD: ("dy", "x")}
"""The names of A and B in functions and requests."""

CAST_ALIGNMENT = 16
"""Alignment in bytes of operands and results that are cast."""

Pair: TypeAlias = "int | tuple[int, int]"
Padding: TypeAlias = "int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]"
"""One number, (rows, columns) on both sides, or ((top, bottom), (left, right))."""
Shape4: TypeAlias = tuple[int, int, int, int]
T = TypeVar("T")


def as_operands(op: str, x: T, w: T, y: T) -> tuple[T, T, T]:
    """A, B and D of an operation, given x, w and y or their gradients."""
    return {FPROP: (x, w, y), DGRAD: (y, w, x), WGRAD: (y, x, w)}[op]


def as_images(op: str, a: T, b: T, d: T) -> tuple[T, T, T]:
    """x, w and y, or their gradients: the inverse of `as_operands`."""
    return {FPROP: (a, b, d), DGRAD: (d, b, a), WGRAD: (b, d, a)}[op]


class ConvGeometry(NamedTuple):
    """Extents of x (n, h, w, c), filter (k, r, s, c / groups) and y (n, p, q, k)."""

    n: int
    h: int
    w: int
    c: int
    k: int
    r: int
    s: int
    p: int
    q: int
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    groups: int

    @property
    def x_shape(self) -> Shape4:
        """The shape of x and of its gradient."""
        return (self.n, self.h, self.w, self.c)

    @property
    def w_shape(self) -> Shape4:
        """The shape of the filter and of its gradient."""
        return (self.k, self.r, self.s, self.c // self.groups)

    @property
    def y_shape(self) -> Shape4:
        """The shape of y."""
        return (self.n, self.p, self.q, self.k)


def conv_geometry(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> ConvGeometry:
    """All extents of a convolution; refuses invalid extents, channels that groups do not divide, and an empty y."""
    n, h, width, c = _extents("x", x_shape, "(N, H, W, C) up to 2^31 - 1, of which only N may be 0", least=(0, 1, 1, 1))
    k, r, s, depth = _extents("w", w_shape, "(K, R, S, C / groups) from 1 to 2^31 - 1", least=(1, 1, 1, 1))
    strides, dilations = _pair("stride", stride), _pair("dilation", dilation)
    pads = _padding(padding)
    if not _is_extent(groups, 1):
        raise InvalidOperandError(f"groups is {shown(groups)}; expected a positive integer")
    for name, operand, channels in (("C", "x", c), ("K", "w", k)):
        if channels % groups:
            raise InvalidOperandError(f"{operand} has {name} = {channels}, no multiple of the {groups} groups")
    if depth != c // groups:
        raise InvalidOperandError(
            f"w has shape {tuple(w_shape)}; its last extent must be {c // groups}: {c} channels in {groups} groups"
        )
    out = []
    for axis, extent, taps, step, reach, (before, after) in zip(
        ("rows", "columns"), (h, width), (r, s), strides, dilations, pads, strict=True
    ):
        room = extent + before + after - reach * (taps - 1) - 1
        if room < 0:
            raise InvalidOperandError(
                f"the result has no {axis}: {taps} taps of w with dilation {reach} are longer than {extent} with "
                f"padding {before} and {after}"
            )
        out.append(room // step + 1)
        if out[-1] > MOST:
            raise InvalidOperandError(f"the result has {out[-1]} {axis}: kernels count to 2^31 - 1")
    return ConvGeometry(n, h, width, c, k, r, s, out[0], out[1], strides, pads, dilations, groups)


def result_shape(op: str, geometry: ConvGeometry) -> Shape4:
    """The extents of D."""
    return as_operands(op, geometry.x_shape, geometry.w_shape, geometry.y_shape)[2]


def _extents(name: str, shape: tuple[int, ...], expected: str, least: Shape4) -> Shape4:
    if len(shape) != 4 or not all(map(_is_extent, shape, least)):
        raise InvalidOperandError(f"{name} has shape {tuple(shape)}; expected {expected}")
    return (shape[0], shape[1], shape[2], shape[3])


def pair_of(given: Any) -> Any:
    """A pair of one number for rows and columns; anything else unchanged."""
    return (given, given) if isinstance(given, int) else given


def _pair(name: str, given: Any) -> tuple[int, int]:
    pair = pair_of(given)
    if not _is_pair(pair, 1):
        raise InvalidOperandError(
            f"{name} is {shown(given)}; expected an integer from 1 to 2^31 - 1, or one each for rows and columns"
        )
    return (pair[0], pair[1])


def _padding(given: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    pair = pair_of(given)
    sides = [pair_of(side) for side in pair] if isinstance(pair, (tuple, list)) else []
    if len(sides) != 2 or not all(_is_pair(side, 0) for side in sides):
        raise InvalidOperandError(
            f"padding is {shown(given)}; expected an integer from 0 to 2^31 - 1, (rows, columns) or ((top, bottom), "
            "(left, right))"
        )
    (top, bottom), (left, right) = sides
    return ((top, bottom), (left, right))


def _is_pair(value: Any, least: int) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_extent(extent, least) for extent in value)


def _is_extent(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


class ConvTraits(NamedTuple):
    """Everything that the choice of kernels for a convolution depends on.

    Attributes:
        types: element types of A, B and D, and math mode.
        single: whether each group is a single channel, and the filter small enough for depthwise kernels.
        alignments: elements of a group's channels of A, B and D (and C), bytes of the bias and bits of its elements.
        whole: `alignments` of all channels as one group.
        stride_supports: values of a key's `stride_support` that fit these strides and dilations.
        channels: channels of A in one group, if a vector can hold them all; else 0.
        writable: whether a kernel can add up slices of K into D.
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


@dataclass(frozen=True)
class ConvProblem:
    """D = act(alpha * conv(A, B) + beta * C + bias) of the caller's arrays, dimensions in the order of NHWC.

    Attributes:
        op: `conv2d_fprop` (A = x, B = w, D = y), `conv2d_dgrad` (dy, w, dx) or `conv2d_wgrad` (dy, x, dw).
        a, b, d: the arrays, 4-D; channels last and contiguous.
        bias: one element for each channel of D.
        fusion: the epilogue tree with its arrays, instead of bias and activation.
        source: number of the tree's input that is loaded as the C operand, and described by `c`.
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
        """x, w and y, or their gradients."""
        return as_images(self.op, self.a, self.b, self.d)

    @property
    def epilogue(self) -> str:
        """Id of the kernel key's epilogue."""
        if self.fusion is not None:
            program = self.fusion.tree.program
            return epilogue_id(LINEAR, program if self.source is None else with_source(program, self.source))
        return LINEAR if self.activation in (None, "identity") else f"{LINEAR}_{self.activation}"

    @property
    def implicit_gemm(self) -> tuple[int, int, int]:
        """M, N and K of the product of one group (source: CUTLASS's documentation of implicit GEMM)."""
        g = self.geometry
        x_channels, y_channels = g.c // g.groups, g.k // g.groups
        if self.op == FPROP:
            return g.n * g.p * g.q, y_channels, g.r * g.s * x_channels
        if self.op == DGRAD:
            # A pixel of a strided convolution meets one tap in stride_h * stride_w.
            taps = -(-g.r // g.stride[0]) * -(-g.s // g.stride[1])
            return g.n * g.h * g.w, x_channels, taps * y_channels
        return y_channels, g.r * g.s * x_channels, g.n * g.p * g.q

    @functools.cached_property
    def traits(self) -> ConvTraits:
        """The traits of the problem."""
        g = self.geometry
        alignments = _alignments(self, g.groups)
        results = [self.d] if self.c is None else [self.d, self.c]
        dense = all(spec.dense and spec.alignment % CAST_ALIGNMENT == 0 for spec in results)
        dgrads = [] if g.stride != (1, 1) else ["unity"]
        dgrads += [] if g.dilation != (1, 1) else ["strided"]
        common = None  # the epilogue of kernels of several trees
        if self.op != WGRAD and self.activation in (None, "identity", *COMMON_ACTIVATIONS):
            common = COMMON if self.fusion is None else common_of(self.epilogue)
        return ConvTraits(
            op=self.op,
            types=(self.a.dtype, self.b.dtype, self.d.dtype, self.math),
            epilogues=(self.epilogue, common, wider(self.epilogue)),
            grouped=g.groups > 1,
            single=g.groups == g.c == g.k and g.r * g.s <= 128,  # ConvDepthwise::can_implement
            alignments=alignments,
            whole=alignments if g.groups == 1 else _alignments(self, 1),
            iterators=_iterators(self),
            stride_supports=tuple(dgrads) if self.op == DGRAD else ("",),
            channels=next((few for few in (1, 2, 4, 8, 16) if g.c == few * g.groups), 0),
            tma=_tma_serves(self),
            writable=dense and math.prod(self.d.shape) % 4 == 0,  # slices are added up by four elements at once
        )


def formulations(problem: ConvProblem) -> list[ConvProblem]:
    """The forms of a problem for kernels, preferred ones first.

    A tree of bias and activation is given to kernels with just these; then a tree with a matrix that can be loaded as C
    is given to kernels that do so; then the tree as it is.
    """
    fusion, d = problem.fusion, problem.d
    if fusion is None:
        return [problem]
    found, plain = [], as_bias_and_activation(fusion.tree.program)
    # Kernels without a tree load either C or the bias.
    if plain is not None and not unlike_a_bias(fusion, d.dtype) and (plain.bias is None or problem.c is None):
        bias = None
        if plain.bias is not None:
            spec = fusion.inputs[0].spec
            bias = MatrixSpec(spec.shape[-1:], (1,), spec.dtype, spec.alignment)
        found.append(dataclasses.replace(problem, fusion=None, bias=bias, activation=plain.activation))
    if problem.c is None and collapses(d):
        strides = (pixel_strides(d)[0], 1)  # kernels have one set of strides for C and D
        number = source_of(fusion, lambda array: array.spec.strides == strides and array.dtype is d.dtype)
        if number is not None:
            c = dataclasses.replace(d, alignment=fusion.inputs[number].alignment)
            found.append(dataclasses.replace(problem, source=number, c=c))
    return [*found, problem]


def unlike_a_bias(fusion: Fusion, d: CutlassDtype) -> str:
    """Why kernels without trees cannot add the bias of a tree of bias and activation; empty if they can."""
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


def of_two_images(problem: ConvProblem) -> ConvProblem:
    """The same convolution of two images, at the distance of the given ones; one image is followed without a gap."""

    def spec(images: MatrixSpec) -> MatrixSpec:
        least = images.shape[1] * pixel_strides(images)[1]
        distance = images.strides[0] if images.shape[0] > 1 else max(images.strides[0], least)
        return dataclasses.replace(images, shape=(2, *images.shape[1:]), strides=(distance, *images.strides[1:]))

    c = None if problem.c is None else spec(problem.c)
    geometry = problem.geometry._replace(n=2)
    return dataclasses.replace(problem, geometry=geometry, a=spec(problem.a), c=c, d=spec(problem.d))


def packed(spec: MatrixSpec) -> bool:
    """Whether the pixels of one outer index have no gaps."""
    _, rows, columns, channels = spec.shape
    return rows * columns == 1 or (pixel_strides(spec)[0] == channels and rows_collapse(spec))


def reach(spec: MatrixSpec) -> int:
    """Bytes from the first element to the end of the last."""
    strides = (*reversed(pixel_strides(spec)), 1)
    span = sum((extent - 1) * stride for extent, stride in zip(spec.shape, strides, strict=True))
    return (span + 1) * spec.dtype.bits // 8


def channel_alignment(spec: MatrixSpec, groups: int = 1) -> int:
    """Elements that a vector access of a group's channels may span, given address, strides and extent."""
    return vector_elements(spec, [spec.shape[-1] // groups, *pixel_strides(spec)])


def convolves(key: KernelKey, traits: ConvTraits, *, sliced: bool) -> Status:
    """Whether a kernel computes a convolution, with `sliced` in slices of K."""
    if (key.a, key.b, key.d, key.math) != traits.types:
        return refused("its element types or math mode differ", 1)
    if key.epilogue not in traits.epilogues:
        return refused("its epilogue differs", 2)
    if traits.grouped != (key.group_mode != ""):
        return refused("its groups of channels differ", 3)
    depthwise, wgrad = key.group_mode == "depthwise", traits.op == WGRAD
    of_a, of_b, of_d, bias, bias_bits = traits.whole if depthwise else traits.alignments
    misaligned = of_a % key.align_a or of_b % key.align_b or of_d % key.align_d
    if misaligned or bias % max(1, key.align_d * bias_bits // 8):
        return refused("an array is aligned to fewer bytes than it needs", 4)
    if depthwise:
        if not traits.single:
            return refused("it convolves single channels", 5)
        sliced = sliced and not wgrad
    elif key.generation != "sm80":
        if not traits.tma:
            return refused("TMA's im2col mode has one group of channels, and dgrad no stride", 5)
    else:
        reads = key.stride_support in traits.stride_supports and key.iterator in traits.iterators
        if not reads or (key.iterator == "fixed_channels" and traits.channels != key.align_a):
            return refused("its iterator does not read these extents, strides or dilations", 5)
        # Slices are computed in parallel, each into its own memory (ConvSm80, Cast).
        apart = wgrad and key.d is CutlassDtype.F32 and traits.writable and not traits.grouped
        sliced = sliced and not apart
    return refused("its slices of K cannot be computed side by side", 6) if sliced else OK


def _alignments(problem: ConvProblem, groups: int) -> tuple[int, ...]:
    """`ConvTraits.alignments` for this number of groups."""
    of_b, of_d = (groups, 1) if problem.op == WGRAD else (1, groups)
    of_results = channel_alignment(problem.d, of_d)
    if problem.c is not None:
        of_results = min(of_results, channel_alignment(problem.c, of_d))
    bias = (0, 8) if problem.bias is None else (problem.bias.alignment, problem.bias.dtype.bits)
    return channel_alignment(problem.a, groups), channel_alignment(problem.b, of_b), of_results, *bias


def _iterators(problem: ConvProblem) -> frozenset[str]:
    """The iterators of the sm80 generation that read and write the arrays (ConvSm80::can_implement)."""
    g, wgrad = problem.geometry, problem.op == WGRAD
    read, written = (reach(problem.a), reach(problem.b)), reach(problem.d)
    spaced = packed(problem.d) if wgrad else collapses(problem.d)
    if not spaced or not all(reached < 2**31 for reached in (*read, written)):
        return frozenset()
    found = {"analytic"}
    # It holds the taps inside the image as bits of a mask, and needs evenly spaced rows.
    if g.r <= 32 and g.s <= 32 and (collapses(problem.a) if wgrad else rows_collapse(problem.b)):
        found.add("optimized")
    # These count offsets in bits.
    if g.dilation == (1, 1) and all(8 * reached < 2**31 for reached in read):
        found |= {"few_channels", "fixed_channels"}
    return frozenset(found)


def _tma_serves(problem: ConvProblem) -> bool:
    """Whether CUTLASS's kernels with TMA's im2col mode compute the problem."""
    g = problem.geometry
    if g.groups != 1 or (problem.op == DGRAD and g.stride != (1, 1)):
        return False
    if problem.op == WGRAD and not (problem.a.dense and problem.d.dense):
        return False
    spans = ((g.r - 1) * g.dilation[0], (g.s - 1) * g.dilation[1])
    # The corners of the box that an im2col map reads are signed numbers of 8 bits.
    return max(g.stride) <= 8 and all(reached <= 127 for reached in (*g.padding[0], *g.padding[1], *spans))
