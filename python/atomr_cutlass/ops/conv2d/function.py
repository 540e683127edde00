"""`conv2d` and its gradients: arrays in, array out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import _core
from ...arrays.layouts import LAYOUTS, TO_NHWC, MatrixSpec, axes_of, permuted
from ...arrays.numerics import AnyArray
from ...arrays.operands import check_devices, dtype_of, views_of
from ...arrays.symbols import shape_of
from ...checks import shown
from ...epilogue.results import ImageResult
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import accumulator
from ...pipeline import reduction
from ...pipeline.call import Call, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.plan import Plan
from ..product import Product
from .kernels import make
from .problem import DGRAD, FPROP, OPERANDS, WGRAD, ConvGeometry, ConvProblem, as_images, conv_geometry, result_shape


class ConvOptions(NamedTuple):
    """The options that only convolutions have.

    Attributes:
        op: the convolution, of OPERANDS.
        shape: extents of the result where the operands leave them open, in the order of `layout`.
        stride: step of the filter over the image: one number, or (rows, columns).
        padding: zeros around the image: one number, (rows, columns), or ((top, bottom), (left, right)).
        dilation: distance between the filter's taps: one number, or (rows, columns).
        groups: parts that the channels are divided into, each convolved by itself; C for depthwise convolution.
        layout: the order in which the arrays name their dimensions, `nhwc` or `nchw`; in memory channels are contiguous
            in either.
    """

    op: str
    shape: tuple[int, ...] | None
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    layout: str


@stored(reduction.VARIABLE, a="x", b="w", c="c", bias="bias")
@functools.partial(documented, own=ConvOptions)
def conv2d(
    x: Any,
    w: Any,
    c: Any = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: Any = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    layout: str = "nhwc",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: Any = None,
    scale_a: float | None = None,
    scale_b: float | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
    batch_invariant: bool | None = None,
    **operands_of_epilogue: Any,
) -> Any:
    """Y = saturating_cast(scale_d * act(alpha * scale_a * scale_b * conv(x, w) + beta * C + bias)), cross-correlation.

    Args:
        x: (N, H, W, C), or (N, C, H, W) with layout `nchw`; anything with DLPack or `__cuda_array_interface__`, or
            NumPy (copied to the GPU and back). Channels are contiguous in memory in either order (PyTorch's
            channels_last).
        w: (K, R, S, C / groups), or (K, C / groups, R, S); of x's dtype and device.
        c: like the result; needed exactly when `beta` is not 0. On a GPU with the result's strides; together with
            `bias` as an epilogue is.
        out: (N, P, Q, K), or (N, K, P, Q): written in place and returned; may be `c` itself. Not for JAX.
        bias: (K,). Where epilogues are not served, contiguous and of the result's dtype.
        epilogue: function of alpha * scale_a * scale_b * conv(x, w) + beta * C, instead of `activation`: an
            `EpilogueVisitorTree`, or a function of it and of arrays that is traced, as for `gemm`. A row has an element
            for each channel, (K,); a column one for each pixel, (N, P, Q, 1); matrices are like the result. On sm_90a;
            filters of one tap, and trees of a bias and an activation, on every GPU.
        scale_a: factor of x, a number.
        scale_b: factor of w, a number.
        scale_d: factor of the result, a number. On a GPU neither after an activation nor together with `bias`.
        precision: {precision} `3xtf32` is for filters of one tap.
        batch_invariant: whether each image of the result has the same bits whatever the other images and their number,
            for the same extents of an image and the filter; else as for `gemm`, whose rows are pixels here.
        operands_of_epilogue: the arrays that `epilogue` reads, and, where the caller has them, those that it writes
            beside the result, by their names; to a function also numbers. A mask is uint8 (N, P, Q, ceil(K / 8)); a
            reduction is (1,), (K,) for each channel, or (N, P, Q) for each pixel. Channels last in memory.

    Returns:
        `out`, or a new array of the kind of `x`, channels last in memory; with an epilogue that has other outputs, all
        of them, as for `gemm`.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap, channels that
            groups do not divide, or a result without rows or columns.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    arrays = {"a": x, "b": w, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    options = CallOptions.of(locals())
    own = (FPROP, None, stride, padding, dilation, groups, layout)
    return Call(_parse, arrays, out, options, epilogue, operands_of_epilogue, own)


@stored(reduction.VARIABLE, a="dy", b="w", c="c", bias="bias")
@functools.partial(documented, own=conv2d)
def conv2d_dgrad(
    dy: Any,
    w: Any,
    x_shape: tuple[int, int, int, int],
    c: Any = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: Any = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    layout: str = "nhwc",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: Any = None,
    scale_a: float | None = None,
    scale_b: float | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
    batch_invariant: bool | None = None,
    **operands_of_epilogue: Any,
) -> Any:
    """The gradient of `conv2d` by x, from the gradient by its result; the transposed convolution.

    Args:
        dy: like the result of conv2d.
        w: as for `conv2d`.
        x_shape: the extents of x, in the order of `layout`: several x give a dy of the same extents where there is a
            stride.
        c: like x; needed exactly when `beta` is not 0.
        dilation: {dilation} Kernels of strided convolutions have none.
        out: like x; written in place and returned.
        bias: (C,), added to every pixel of the result.
        epilogue: as for `conv2d`, over the pixels and channels of x.
        scale_a: factor of dy, a number.
        operands_of_epilogue: as for `conv2d`.

    Returns:
        `out`, or a new array like x of the kind of `dy`; with an epilogue as for `conv2d`.

    Raises:
        InvalidOperandError: as for `conv2d`, or `x_shape` is no shape of 4 extents that gives dy's.
        UnsupportedError: as for `conv2d`.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    arrays = {"a": dy, "b": w, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    options = CallOptions.of(locals())
    own = (DGRAD, _four("x_shape", x_shape), stride, padding, dilation, groups, layout)
    return Call(_parse, arrays, out, options, epilogue, operands_of_epilogue, own)


@stored(a="dy", b="x", c="c")
@functools.partial(documented, own=conv2d)
def conv2d_wgrad(
    dy: Any,
    x: Any,
    w_shape: tuple[int, int, int, int],
    c: Any = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: Any = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    layout: str = "nhwc",
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale_a: float | None = None,
    scale_b: float | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
) -> Any:
    """The gradient of `conv2d` by w, from the gradient by its result.

    Where w is small and there are many pixels, slices of the pixels are summed side by side and added up in float32.

    Args:
        dy: like the result of conv2d.
        x: as for `conv2d`.
        w_shape: the extents of w, in the order of `layout`.
        c: like w; needed exactly when `beta` is not 0.
        out: like w; written in place and returned.
        scale_a: factor of dy, a number.
        scale_b: factor of x, a number.
        scale_d: factor of the result, a number.

    Returns:
        `out`, or a new array like w of the kind of `dy`.

    Raises:
        InvalidOperandError: as for `conv2d`, or `w_shape` is no shape of 4 extents that gives dy's.
        UnsupportedError: as for `conv2d`.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    arrays = {"a": dy, "b": x, "c": c, "bias": None, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    options = CallOptions.of(locals(), batch_invariant=False)
    own = (WGRAD, _four("w_shape", w_shape), stride, padding, dilation, groups, layout)
    return Call(_parse, arrays, out, options, own=own)


@dataclass(frozen=True, kw_only=True)
class _Convolution(Product):
    """A convolution, parsed. Views have their dimensions in the order of NHWC."""

    own: ConvOptions
    geometry: ConvGeometry

    @property
    def by_reference(self) -> bool:
        # The sum over no pixels is zeros or beta * C: kernels do not compute it.
        return self.geometry.n == 0 and (self.own.op == WGRAD or not self.on_gpu)

    def check_kernels(self) -> None:
        call = self.call
        if call.epilogue is None and call.arrays["scale_d"] not in (None, 1):
            if call.options.activation not in (None, "identity"):
                raise UnsupportedError("scale_d after an activation: fold it into what reads the result")
            if "bias" in self.inputs:
                raise UnsupportedError("scale_d together with bias: scale the bias, and give scale_d as part of alpha")

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        own = ("a", "b", RESULT) if self.call.c is None else ("a", "b", "c", RESULT)
        specs = {name: MatrixSpec.of(views[name], name) for name in own}
        for name, spec in specs.items():
            check_channels(name, spec)
        fusion, device = self.fusion(views), views["a"].device
        a, b, c, d = specs["a"], specs["b"], specs.get("c"), specs[RESULT]
        problem = ConvProblem(self.own.op, self.geometry, a, b, c, d, self.math, device, fusion=fusion)
        return make(problem, layout=self.own.layout, like=like, stream=stream, **self.call.planning)

    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        from .reference import convolution  # launches do not need it

        op, g = self.own.op, self.geometry
        compute = functools.partial(
            convolution, op, host["a"], host["b"], result_shape(op, g), None if self.call.c is None else host["c"],
            stride=g.stride, padding=g.padding, dilation=g.dilation, groups=g.groups,
        )  # fmt: skip
        return self.evaluated(host, compute)


def _parse(call: Call) -> _Convolution:
    own, arrays = ConvOptions(*call.own), call.arrays
    call.check("conv2d" if own.op == FPROP else own.op, layout=own.layout)
    if own.layout not in LAYOUTS:
        raise InvalidOperandError(f"unknown layout {own.layout!r}; valid: {', '.join(LAYOUTS)}")
    call.refuse_scale_arrays("convolution kernels read no scales: give a number")
    bias = arrays["bias"] if call.epilogue is None else None  # with an epilogue it is its operand
    given = {"a": arrays["a"], "b": arrays["b"], "c": call.c, "bias": bias, RESULT: call.out}
    views = views_of(given, ("a", "b"), dict(zip("ab", OPERANDS[own.op], strict=True)))
    check_devices(views)
    axes = axes_of(own.layout, TO_NHWC)
    views = {name: view if name == "bias" else permuted(view, axes) for name, view in views.items()}
    first, second = OPERANDS[own.op]
    geometry, dtype, other = _geometry(own, views), dtype_of(views["a"], first), dtype_of(views["b"], second)
    if dtype is not other:
        raise InvalidOperandError(f"{first} is {dtype.value} and {second} is {other.value}: both must have one dtype")
    shape = result_shape(own.op, geometry)
    for name, expected in (("c", shape), (RESULT, shape), ("bias", shape[-1:])):
        if name in views and views[name].shape != expected:
            raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected {expected} (NHWC order)")
    parsed = _Convolution.of(call, views, shape, dtype, axes=axes_of(own.layout), own=own, geometry=geometry)
    if not call.binds:
        return parsed
    result = ImageResult(shape, own.layout)
    return parsed.bind(result, views, taken=("a", "b"), acc=accumulator(dtype), scaled=True)


def _geometry(own: ConvOptions, views: Mapping[str, _core.Operand]) -> ConvGeometry:
    """The extents of a convolution of these operands; refuses operands that do not fit."""
    a, b, shape = views["a"].shape, views["b"].shape, shape_of(own.shape) if own.shape else ()
    if shape and own.layout == "nchw":
        shape = tuple(shape[axis] for axis in TO_NHWC)
    x, w, _ = as_images(own.op, a, b, shape)
    geometry = conv_geometry(x, w, stride=own.stride, padding=own.padding, dilation=own.dilation, groups=own.groups)
    if own.op != FPROP and a != geometry.y_shape:
        raise InvalidOperandError(f"dy has shape {a} (NHWC order); the convolution's result has {geometry.y_shape}")
    return geometry


def check_channels(name: str, spec: MatrixSpec) -> None:
    """Refuses negative strides, channels that are not contiguous, and elements that share memory."""
    if any(stride < 0 and extent > 1 for stride, extent in zip(spec.strides, spec.shape, strict=True)):
        raise InvalidOperandError(f"{name} has a negative stride ({spec.strides}): copy it")
    if spec.shape[-1] > 1 and spec.strides[-1] != 1:
        raise UnsupportedError(
            f"{name} (NHWC order) has strides {spec.strides}: its channels must be contiguous; in PyTorch "
            f"{name} = {name}.contiguous(memory_format=torch.channels_last)"
        )
    if any(stride == 0 and extent > 1 for stride, extent in zip(spec.strides, spec.shape, strict=True)):
        raise UnsupportedError(f"{name} (NHWC order) has strides {spec.strides}: copy what is broadcast")


def _four(name: str, shape: Any) -> tuple[int, ...]:
    """The four extents of a result."""
    # An array without dimensions is an Iterable over which no loop runs.
    extents = tuple(shape) if isinstance(shape, Iterable) and getattr(shape, "ndim", 1) == 1 else (shape,)
    if len(extents) != 4:
        raise InvalidOperandError(f"{name} is {shown(shape)}; expected 4 extents")
    return extents
