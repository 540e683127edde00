"""The problem that convolution kernels are chosen for: extents, strides, alignments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...arrays.layouts import collapses, pixel_strides, rows_collapse
from ...epilogue.bound import Fusion, source_of
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.epilogue.common import COMMON_ACTIVATIONS, as_bias_and_activation, common_of
from ...generator.epilogue.lower import COMMON, LINEAR, epilogue_id, with_source
from ...pipeline.problem import MatrixSpec, vector_elements
from .geometry import DGRAD, FPROP, WGRAD, ConvGeometry


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
    def x(self) -> MatrixSpec:
        """Images, or their gradient."""
        return {FPROP: self.a, DGRAD: self.d, WGRAD: self.b}[self.op]

    @property
    def w(self) -> MatrixSpec:
        """The filter, or its gradient."""
        return {FPROP: self.b, DGRAD: self.b, WGRAD: self.d}[self.op]

    @property
    def y(self) -> MatrixSpec:
        """The result's images, or their gradient."""
        return {FPROP: self.d, DGRAD: self.a, WGRAD: self.a}[self.op]

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
    if problem.fusion is None:
        return None
    plain = as_bias_and_activation(problem.fusion.tree.program)
    if plain is None or plain.bias not in (None, problem.d.dtype):
        return None
    bias = None
    if plain.bias is not None:
        spec = problem.fusion.inputs[0].spec
        # Kernels without a tree load either C or the bias, whose elements are contiguous.
        if problem.c is not None or (spec.shape[-1] > 1 and spec.strides[-1] != 1):
            return None
        bias = MatrixSpec(spec.shape[-1:], (1,), spec.dtype, spec.alignment)
    return dataclasses.replace(problem, fusion=None, bias=bias, activation=plain.activation)


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
