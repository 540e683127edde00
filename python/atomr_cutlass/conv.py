"""`conv2d` and its gradients: arrays in, array out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from . import _core, numerics, operands, reference
from .arguments import (
    NUMBERS,
    check_backend,
    check_devices,
    check_out,
    check_scalars,
    on_reference,
    refuse_jax_out,
    result_dtype,
)
from .conv_plan import TO_NCHW, make
from .conv_problem import DGRAD, FPROP, WGRAD, ConvProblem, check_channels
from .errors import InvalidOperandError, UnsupportedError
from .generator.dtypes import CutlassDtype
from .numerics import math_mode
from .op_plan import OpPlan
from .operands import CPU, CUDA
from .plan import BACKENDS as GPU_BACKENDS
from .plan_cache import PlanCache
from .problem import MatrixSpec
from .reference import ConvGeometry

BACKENDS = (*GPU_BACKENDS, "reference")
LAYOUTS = ("nhwc", "nchw")
PLANS_KEPT = 512

_SCALARS = frozenset({int, float})
_TO_NHWC = (0, 2, 3, 1)

_plans: PlanCache[OpPlan] = PlanCache(PLANS_KEPT)


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
    scale_a: float | None = None,
    scale_b: float | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
) -> Any:
    """Y = saturating_cast(scale_d * act(alpha * scale_a * scale_b * conv(x, w) + beta * C + bias)), cross-correlation.

    Args:
        x: (N, H, W, C), or (N, C, H, W) with layout `nchw`; anything with DLPack or `__cuda_array_interface__`, or
            NumPy (copied to the GPU and back). Channels are contiguous in memory in either order (PyTorch's
            channels_last).
        w: (K, R, S, C / groups), or (K, C / groups, R, S); of x's dtype and device.
        c: like the result; needed exactly when `beta` is not 0. On a GPU with the result's strides, and not together
            with `bias`.
        stride: of the filter over the image, one number or (rows, columns).
        padding: zeros around the image: one number, (rows, columns), or ((top, bottom), (left, right)).
        dilation: distance of the filter's taps, as stride.
        groups: parts that the channels are divided into, each convolved by itself; C for depthwise convolution.
        layout: order in which x, w and the result name their dimensions.
        out: (N, P, Q, K), or (N, K, P, Q): written in place and returned; may be `c` itself. Not for JAX.
        alpha: scalar.
        beta: scalar. With 0, there is no C.
        bias: (K,) of the result's dtype, contiguous.
        activation: a name of `reference.ACTIVATIONS`.
        scale_a: factor of x, a number.
        scale_b: factor of w, a number.
        scale_d: factor of the result, a number. On a GPU neither after an activation nor together with `bias`.
        out_dtype: element type of the result; defaults to x's (bf16 for fp8).
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.
        stream: where to launch; defaults to the current stream of the framework of `x`.
        backend: as for `gemm`.
        jit: as for `gemm`.

    Returns:
        `out`, or a new array of the kind of `x`, channels last in memory.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap, channels that
            groups do not divide, or a result without rows or columns.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    arrays = {"a": x, "b": w, "c": c, "bias": bias, "out": out}
    options = _Options(
        FPROP, stride, padding, dilation, groups, layout, alpha, beta, activation, (scale_a, scale_b, scale_d),
        out_dtype, precision, stream, backend, jit, None,
    )  # fmt: skip
    return _convolve(arrays, options)


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
    scale_a: float | None = None,
    scale_b: float | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
) -> Any:
    """The gradient of `conv2d` by x, from the gradient by its result; the transposed convolution.

    Args:
        dy: like the result of conv2d.
        w: as for `conv2d`.
        x_shape: of x, in the order of `layout`: a stride leaves it open.
        c: like x; needed exactly when `beta` is not 0.
        bias: (C,), added to every pixel of the result.
        out: like x.
        scale_a: factor of dy, a number.
        scale_b: factor of w, a number.
        scale_d: factor of the result, a number.
        stride: as for `conv2d`, as all that follow.
        padding: likewise.
        dilation: likewise; kernels of strided convolutions have none.
        groups: likewise.
        layout: likewise.
        alpha: likewise.
        beta: likewise.
        activation: likewise.
        out_dtype: likewise.
        precision: likewise.
        stream: likewise.
        backend: likewise.
        jit: likewise.

    Returns:
        `out`, or a new array like x of the kind of `dy`.

    Raises:
        InvalidOperandError, UnsupportedError, KernelNotFoundError, CompileError, DeviceUnavailableError: as for
            `conv2d`; kernels of strided convolutions have no dilation.
    """
    arrays = {"a": dy, "b": w, "c": c, "bias": bias, "out": out}
    options = _Options(
        DGRAD, stride, padding, dilation, groups, layout, alpha, beta, activation, (scale_a, scale_b, scale_d),
        out_dtype, precision, stream, backend, jit, _four("x_shape", x_shape),
    )  # fmt: skip
    return _convolve(arrays, options)


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
) -> Any:
    """The gradient of `conv2d` by w, from the gradient by its result.

    Few results of many pixels are computed in slices of the pixels, added up in float32.

    Args:
        dy: like the result of conv2d.
        x: as for `conv2d`.
        w_shape: of w, in the order of `layout`.
        c: like w; needed exactly when `beta` is not 0.
        out: like w.
        scale_a: factor of dy, a number.
        scale_b: factor of x, a number.
        scale_d: factor of the result, a number.
        stride: as for `conv2d`, as all that follow.
        padding: likewise.
        dilation: likewise.
        groups: likewise.
        layout: likewise.
        alpha: likewise.
        beta: likewise.
        out_dtype: likewise.
        precision: likewise.
        stream: likewise.
        backend: likewise.
        jit: likewise.

    Returns:
        `out`, or a new array like w of the kind of `dy`.

    Raises:
        InvalidOperandError, UnsupportedError, KernelNotFoundError, CompileError, DeviceUnavailableError: as for
            `conv2d`.
    """
    arrays = {"a": dy, "b": x, "c": c, "bias": None, "out": out}
    options = _Options(
        WGRAD, stride, padding, dilation, groups, layout, alpha, beta, None, (scale_a, scale_b, scale_d), out_dtype,
        precision, stream, backend, jit, _four("w_shape", w_shape),
    )  # fmt: skip
    return _convolve(arrays, options)


class _Options(NamedTuple):
    """Everything of a call but its arrays. `shape` is that of the result where the operands leave it open."""

    op: str
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    layout: str
    alpha: float
    beta: float
    activation: str | None
    scales: tuple[Any, Any, Any]
    out_dtype: CutlassDtype | None
    precision: str | None
    stream: Any
    backend: str
    jit: str | None
    shape: tuple[int, ...] | None

    def signature(self, arrays: dict[str, Any]) -> Any:
        """What a kept plan is found by, without a look at what the arguments mean; None for calls that are not kept."""
        if (
            any(scale is not None for scale in self.scales)
            or self.backend not in GPU_BACKENDS or self.out_dtype is not None
            or type(self.alpha) not in _SCALARS or type(self.beta) not in _SCALARS
            or (arrays["out"] is None and not _core.has_exchange_api(arrays["a"]))
        ):  # fmt: skip
            return None
        seen = _core.signature(*arrays.values())
        if seen is None:
            return None
        key = (
            seen, self.op, self.stride, self.padding, self.dilation, self.groups, self.layout, self.activation,
            self.precision, self.beta == 0, self.backend, self.jit, self.shape,
        )  # fmt: skip
        try:
            hash(key)
        except TypeError:  # a list where a tuple was expected
            return None
        return key


def _convolve(arrays: dict[str, Any], options: _Options) -> Any:
    key = options.signature(arrays)
    found = None if key is None else _plans.get(key)
    if found is not None:
        check_scalars(options.alpha, options.beta, arrays["c"])
        present = [array for name, array in arrays.items() if array is not None and name != "out"]
        out = arrays["out"]
        if out is None:
            shape, dtype = found.result
            empty = _core.framework_empty(present[0], shape, dtype.dlpack, found.device)
            out = named(empty, options.layout)
        return found(*present, out=out, alpha=options.alpha, beta=options.beta, stream=options.stream)
    return _Call(arrays, options, key).run()


class _Call(NamedTuple):
    """One call that no kept plan serves: checked in full before anything is allocated or launched."""

    arrays: dict[str, Any]
    options: _Options
    key: Any

    def run(self) -> Any:
        options = self.options
        check_backend(options.backend, BACKENDS)
        if options.layout not in LAYOUTS:
            raise InvalidOperandError(f"unknown layout {options.layout!r}; valid: {', '.join(LAYOUTS)}")
        check_scalars(options.alpha, options.beta, self.arrays["c"])
        for name, scale in zip(("scale_a", "scale_b", "scale_d"), options.scales, strict=True):
            if scale is not None and not isinstance(scale, NUMBERS):
                raise UnsupportedError(f"{name} is a {type(scale).__name__}: convolutions take numbers only")
        refuse_jax_out(self.arrays["out"])
        given = {name: array for name, array in self.arrays.items() if array is not None}
        views = {name: operands.as_operand(array) for name, array in given.items()}
        check_devices(views)
        views = {name: _permuted(name, view, options.layout) for name, view in views.items()}
        what = _operation(views, options)
        if "out" in views:
            check_out(views, ("a", "b", "c", "bias"))
        first = views["a"]
        if on_reference(options.backend, first, stacklevel=5):
            return self._on_reference(what)
        self._check_epilogue(what)
        if what.geometry.n == 0 and options.op == WGRAD:
            # A sum over no pixels: what is left of it, zeros or beta * C, is no work for a kernel.
            return self._on_reference(what)
        return self._on_host(what) if first.device_type == CPU else self._on_gpu(what)

    def _check_epilogue(self, what: _Operation) -> None:
        """Refuses what the reference computes and no kernel does."""
        options, views = self.options, what.views
        if options.scales[2] not in (None, 1):
            if options.activation not in (None, "identity"):
                raise UnsupportedError("scale_d after an activation: fold it into what reads the result")
            if "bias" in views:
                raise UnsupportedError("scale_d together with bias: scale the bias, and give scale_d as part of alpha")
        if "bias" in views:
            if "c" in views:
                raise UnsupportedError(
                    "bias together with c: the kernels read one of them as their source; add the other"
                )
            if views["bias"].shape[0] > 1 and views["bias"].strides[0] != 1:
                raise UnsupportedError(
                    f"bias has stride {views['bias'].strides[0]}: kernels read contiguous ones; copy it"
                )

    def _on_gpu(self, what: _Operation) -> Any:
        first, options = self.arrays["a"], self.options
        views = dict(what.views)
        stream = operands.current_stream(first, views["a"]) if options.stream is None else operands.stream_handle(
            options.stream
        )  # fmt: skip
        array = self.arrays["out"]
        if array is None:
            array, views["out"] = operands.empty(what.shape, what.result, views["a"].device, first)
        if 0 not in what.shape:
            made = self._launch(what, views, first, stream, options.layout)
            if self.key is not None:
                made.result = (what.shape, what.result)
                _plans.insert(made, self.key)
        done = operands.finished(array, views["out"], stream)
        return done if self.arrays["out"] is not None else named(done, options.layout)

    def _on_host(self, what: _Operation) -> Any:
        """Host operands: copied to GPU 0, computed there, and the result copied back."""
        if 0 in what.shape:
            return self._deliver(np.empty(what.shape, numerics.numpy_dtype(what.result)), what)
        views = {
            name: operands.upload(operands.to_numpy(view), 0) for name, view in what.views.items() if name != "out"
        }
        _, views["out"] = operands.empty(what.shape, what.result, 0, None)
        self._launch(what, views, None, 0, "nhwc")
        return self._deliver(operands.download(views["out"]), what)

    def _launch(self, what: _Operation, views: dict[str, _core.Operand], like: Any, stream: int, layout: str) -> OpPlan:
        """Makes a plan, whose calls name dimensions in the order of `layout`, and launches it on NHWC views."""
        options = self.options
        problem = what.problem(views, options)
        made = make(problem, like=like, backend=options.backend, jit=options.jit, stream=stream, layout=layout)
        factor = 1.0
        for scale in options.scales:
            factor *= 1.0 if scale is None else float(scale)
        beta = options.beta * (1.0 if options.scales[2] is None else float(options.scales[2]))
        order = [named(views[name], layout) for name in ("a", "b", "c", "bias", "out") if name in views]
        made(*order, alpha=options.alpha * factor, beta=beta, stream=stream)
        return made

    def _on_reference(self, what: _Operation) -> Any:
        options = self.options
        on_gpu = what.views["a"].device_type == CUDA
        fetch = operands.download if on_gpu else operands.to_numpy
        host = {name: fetch(view) for name, view in what.views.items() if name != "out"}
        g = what.geometry
        common: dict[str, Any] = {
            "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups,
            "alpha": options.alpha, "beta": options.beta, "scale_a": options.scales[0], "scale_b": options.scales[1],
            "scale_d": options.scales[2], "out_dtype": what.result, "math": what.math,
        }  # fmt: skip
        a, b, c = host["a"], host["b"], host.get("c")
        if options.op == WGRAD:
            computed = reference.conv2d_wgrad(a, b, g.w_shape, c, **common)
        else:
            common |= {"bias": host.get("bias"), "activation": options.activation}
            if options.op == FPROP:
                computed = reference.conv2d(a, b, c, **common)
            else:
                computed = reference.conv2d_dgrad(a, b, g.x_shape, c, **common)
        if not on_gpu:
            return self._deliver(computed, what)
        array, view = self.arrays["out"], what.views.get("out")
        if view is None:
            array, view = operands.empty(what.shape, what.result, what.views["a"].device, self.arrays["a"])
        operands.copy_in(computed, view)
        done = operands.finished(array, view, 0)
        return done if self.arrays["out"] is not None else named(done, options.layout)

    def _deliver(self, computed: np.ndarray[Any, Any], what: _Operation) -> Any:
        """A host result, in `out` or as a new array of the kind of the first operand."""
        if self.arrays["out"] is None:
            return named(operands.host_result(computed, self.arrays["a"]), self.options.layout)
        np.copyto(operands.to_numpy(what.views["out"]), computed, casting="no")
        return self.arrays["out"]


class _Operation(NamedTuple):
    """What the operands say: their views in the order of NHWC, and the extents."""

    op: str
    views: dict[str, _core.Operand]
    geometry: ConvGeometry
    result: CutlassDtype
    math: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        g = self.geometry
        return {FPROP: g.y_shape, DGRAD: g.x_shape, WGRAD: g.w_shape}[self.op]

    def problem(self, views: dict[str, _core.Operand], options: _Options) -> ConvProblem:
        def spec(name: str) -> MatrixSpec:
            view = views[name]
            found = MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)
            if name != "bias":
                check_channels(name, found)
            return found

        if "bias" in views and operands.dtype_of(views["bias"], "bias") is not self.result:
            raise UnsupportedError(
                f"bias is {operands.dtype_of(views['bias'], 'bias').value}; kernels read it as the result's dtype, "
                f"{self.result.value}"
            )
        return ConvProblem(
            op=self.op,
            geometry=self.geometry,
            a=spec("a"),
            b=spec("b"),
            c=spec("c") if "c" in views else None,
            d=spec("out"),
            bias=spec("bias") if "bias" in views else None,
            activation=options.activation,
            math=self.math,
            device=views["a"].device,
        )


_NAMES = {FPROP: ("x", "w"), DGRAD: ("dy", "w"), WGRAD: ("dy", "x")}


def _operation(views: dict[str, _core.Operand], options: _Options) -> _Operation:
    for name, label in zip(("a", "b"), _NAMES[options.op], strict=True):
        if len(views[name].shape) != 4:
            raise InvalidOperandError(f"{label} has shape {views[name].shape}; expected 4 dimensions")
    a, b = views["a"].shape, views["b"].shape
    shape = options.shape
    if shape is not None:
        shape = tuple(shape[i] for i in _TO_NHWC) if options.layout == "nchw" else shape
    given = shape or ()
    x, w = {FPROP: (a, b), DGRAD: (given, b), WGRAD: (b, given)}[options.op]
    geometry = reference.conv_geometry(
        x, w, stride=options.stride, padding=options.padding, dilation=options.dilation, groups=options.groups
    )
    if options.op != FPROP and a != geometry.y_shape:
        raise InvalidOperandError(f"dy has shape {a} (NHWC order); the convolution's result has {geometry.y_shape}")
    dtype, other = (operands.dtype_of(views[name], label) for name, label in zip("ab", _NAMES[options.op], strict=True))
    if dtype is not other:
        first, second = _NAMES[options.op]
        raise InvalidOperandError(f"{first} is {dtype.value} and {second} is {other.value}: both must have one dtype")
    result = result_dtype(views, options.out_dtype, dtype)
    what = _Operation(options.op, views, geometry, result, math_mode(dtype, options.precision))
    for name in ("c", "out"):
        if name in views and views[name].shape != what.shape:
            raise InvalidOperandError(f"{name} has shape {views[name].shape} (NHWC order); the result has {what.shape}")
    if "bias" in views and views["bias"].shape != what.shape[-1:]:
        raise InvalidOperandError(f"bias has shape {views['bias'].shape}; expected ({what.shape[-1]},)")
    if options.activation is not None and options.activation not in reference.ACTIVATIONS:
        valid = ", ".join(reference.ACTIVATIONS)
        raise InvalidOperandError(f"activation is {options.activation!r}; expected None or one of {valid}")
    return what


def _four(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of a result, as a caller gives it."""
    extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if len(extents) != 4:
        raise InvalidOperandError(f"{name} is {shape!r}; expected 4 extents")
    return extents


def _permuted(name: str, view: _core.Operand, layout: str) -> _core.Operand:
    """The view with its dimensions in the order of NHWC."""
    if layout == "nhwc" or name == "bias" or len(view.shape) != 4:
        return view
    return _core.Operand(
        view.pointer,
        [view.shape[i] for i in _TO_NHWC],
        [view.strides[i] for i in _TO_NHWC],
        view.dtype,
        view.device_type,
        view.device,
        view.read_only,
        view,
    )


def named(result: Any, layout: str) -> Any:
    """A result in NHWC order as the layout names its dimensions; the memory stays as it is."""
    if layout == "nhwc" or len(result.shape) != len(TO_NCHW):
        return result
    if isinstance(result, _core.Operand):
        return _core.Operand(
            result.pointer,
            [result.shape[i] for i in TO_NCHW],
            [result.strides[i] for i in TO_NCHW],
            result.dtype,
            result.device_type,
            result.device,
            result.read_only,
            result,
        )
    permute = getattr(result, "permute", None) or result.transpose
    return permute(TO_NCHW)
