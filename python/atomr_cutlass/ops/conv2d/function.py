"""`conv2d` and its gradients: arrays in, array out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from ... import _core, reference
from ...arrays import operands
from ...arrays.arguments import (
    check_backend,
    check_devices,
    check_followers,
    check_out,
    check_scalars,
    on_reference,
    refuse_jax_out,
    result_dtype,
    views_of,
)
from ...arrays.layouts import LAYOUTS, TO_NHWC, from_nhwc, in_nhwc
from ...arrays.numerics import math_mode
from ...arrays.operands import CPU, CUDA
from ...checks import NUMBERS, check_number, check_options, shown
from ...epilogue import EpilogueVisitorTree, Traced
from ...epilogue.bind import BoundEpilogue, bias_and_activation, bind, empty, reduce_nothing, refuse_scale_d, unchanged
from ...epilogue.results import ImageResult, operand_names
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import accumulator
from ...pipeline.op_plan import OpPlan
from ...pipeline.plan import BACKENDS as GPU_BACKENDS
from ...pipeline.plan_cache import PlanCache
from ...pipeline.problem import MatrixSpec
from . import reference as conv_reference
from .plans import make
from .problem import DGRAD, FPROP, OPERANDS, WGRAD, ConvProblem, check_channels, result_shape
from .reference import ConvGeometry

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 512

_SCALARS = frozenset({int, float})
_READ = ("a", "b", "c", "bias")

_plans: PlanCache[_Kept] = PlanCache(PLANS_KEPT)


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
    **operands_of_epilogue: Any,
) -> Any:
    """Y = saturating_cast(scale_d * act(alpha * scale_a * scale_b * conv(x, w) + beta * C + bias)), cross-correlation.

    Args:
        x: (N, H, W, C), or (N, C, H, W) with layout `nchw`; anything with DLPack or `__cuda_array_interface__`, or
            NumPy (copied to the GPU and back). Channels are contiguous in memory in either order (PyTorch's
            channels_last).
        w: (K, R, S, C / groups), or (K, C / groups, R, S); of x's dtype and device.
        c: like the result; needed exactly when `beta` is not 0. On a GPU with the result's strides, and together with
            `bias` on sm_90a only.
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
        epilogue: what is made of alpha * scale_a * scale_b * conv(x, w) + beta * C instead of `activation`: an
            `EpilogueVisitorTree`, or a function of it and of arrays that is traced, as for `gemm`. A row has an element
            for each channel, (K,); a column one for each pixel, (N, P, Q, 1); matrices are like the result. On
            sm_90a; what is only bias and activation, where `bias` and `activation` are served.
        scale_a: factor of x, a number.
        scale_b: factor of w, a number.
        scale_d: factor of the result, a number. On a GPU neither after an activation nor together with `bias`.
        out_dtype: element type of the result; defaults to x's (bf16 for fp8).
        precision: for float32 operands: `ieee` (default) or `tf32`; for filters of one tap also `3xtf32`.
        stream: where to launch; defaults to the current stream of the framework of `x`.
        backend: as for `gemm`.
        jit: as for `gemm`.
        operands_of_epilogue: the arrays that `epilogue` reads, and those that it writes beside the result if they
            exist, by their names; to a function also numbers. Of a mask, (N, P, Q, ceil(K / 8)) of uint8; of what is
            reduced (1,), for each channel (K,), for each pixel (N, P, Q). Channels last in memory.

    Returns:
        `out`, or a new array of the kind of `x`, channels last in memory; with an epilogue that has other outputs what
        it returns, as for `gemm`.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap, channels that
            groups do not divide, or a result without rows or columns.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    arrays = {"a": x, "b": w, "c": c, "bias": bias, "out": out}
    options = _Options(
        FPROP, stride, padding, dilation, groups, layout, alpha, beta, activation, (scale_a, scale_b, scale_d),
        out_dtype, precision, stream, backend, jit, None, epilogue,
    )  # fmt: skip
    return _convolve(arrays, options, operands_of_epilogue)


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
    **operands_of_epilogue: Any,
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
        epilogue: likewise, over pixels and channels of x.
        out_dtype: likewise.
        precision: likewise.
        stream: likewise.
        backend: likewise.
        jit: likewise.
        operands_of_epilogue: likewise.

    Returns:
        `out`, or a new array like x of the kind of `dy`; as for `conv2d` with an epilogue of other outputs.

    Raises:
        InvalidOperandError, UnsupportedError, KernelNotFoundError, CompileError, DeviceUnavailableError: as for
            `conv2d`; kernels of strided convolutions have no dilation.
    """
    arrays = {"a": dy, "b": w, "c": c, "bias": bias, "out": out}
    options = _Options(
        DGRAD, stride, padding, dilation, groups, layout, alpha, beta, activation, (scale_a, scale_b, scale_d),
        out_dtype, precision, stream, backend, jit, _four("x_shape", x_shape), epilogue,
    )  # fmt: skip
    return _convolve(arrays, options, operands_of_epilogue)


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
        precision, stream, backend, jit, _four("w_shape", w_shape), None,
    )  # fmt: skip
    return _convolve(arrays, options, {})


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
    epilogue: Any

    def signature(self, arrays: dict[str, Any], others: dict[str, Any]) -> Any:
        """What a kept plan is found by, without a look at what the arguments mean; None for calls that are not kept.

        Those with a Python function are not: that may compute something else next time.
        """
        if (
            any(scale is not None for scale in self.scales)
            or not (self.epilogue is None or type(self.epilogue) is EpilogueVisitorTree)
            or type(self.backend) is not str or self.backend not in GPU_BACKENDS or self.out_dtype is not None
            or type(self.alpha) not in _SCALARS or type(self.beta) not in _SCALARS
            or (arrays["out"] is None and not _core.has_exchange_api(arrays["a"]))
        ):  # fmt: skip
            return None
        seen = _core.signature(*arrays.values(), *others.values())
        if seen is None:
            return None
        key = (
            seen, *others, self.epilogue,
            self.op, self.stride, self.padding, self.dilation, self.groups, self.layout, self.activation,
            self.precision, self.beta == 0, self.backend, self.jit, self.shape,
        )  # fmt: skip
        try:
            hash(key)
        except TypeError:  # a list where a tuple was expected
            return None
        return key


class _Kept(NamedTuple):
    """A plan that calls whose arrays lie alike may use again.

    Attributes:
        plan: what is launched.
        result: the result in the order of NHWC.
        dtype: its element type.
        traced: the epilogue; None without one.
    """

    plan: OpPlan
    result: ImageResult
    dtype: CutlassDtype
    traced: Traced | None

    # What a PlanCache knows a plan by.
    key: None = None
    source: str = ""
    kernel_name: str = ""
    kernel_handle: object = None

    def launch(self, arrays: dict[str, Any], others: dict[str, Any], options: _Options) -> Any:
        """Launches the plan."""
        if options.stream is None:  # memory is allocated on the stream that the plan launches on
            return self._launch(arrays, others, options)
        with operands.launching(options.stream, arrays["a"]):
            return self._launch(arrays, others, options)

    def _launch(self, arrays: dict[str, Any], others: dict[str, Any], options: _Options) -> Any:
        first, out, device = arrays["a"], arrays["out"], self.plan.device
        if out is None:
            out = self.result.returned(operands.empty(self.result.shape, self.dtype, device, first)[0])
        how = {"alpha": options.alpha, "beta": options.beta, "stream": options.stream}
        if self.traced is None:
            return self.plan(*(arrays[name] for name in _READ if arrays[name] is not None), out=out, **how)
        product = [arrays[name] for name in ("a", "b", "c") if arrays[name] is not None]
        given = {"bias": arrays["bias"], **others}
        made = {}
        for output in self.traced.tree.outputs:
            array = given.get(output.name)
            if array is None:
                array = self.result.returned(empty(output, self.result, device, first)[0])
            made[output.name] = array
        taken = [given[one.name] for one in self.traced.tree.inputs]
        made[RESULT] = self.plan(*product, *taken, *made.values(), out=out, **how)
        return self.traced.arrange(made)


def _convolve(arrays: dict[str, Any], options: _Options, others: dict[str, Any]) -> Any:
    key = options.signature(arrays, others)
    found = None if key is None else _plans.get(key)
    if found is not None:
        check_scalars(options.alpha, options.beta, arrays["c"])
        return found.launch(arrays, others, options)
    with operands.launching(options.stream, arrays["a"]):
        return _Call(arrays, options, others, key).run()


class _Call(NamedTuple):
    """One call that no kept plan serves: checked in full before anything is allocated or launched."""

    arrays: dict[str, Any]
    options: _Options
    others: dict[str, Any]
    key: Any

    def run(self) -> Any:
        options = self.options
        function = "conv2d" if options.op == FPROP else options.op
        check_options(
            backend=options.backend, jit=options.jit, layout=options.layout, activation=options.activation,
            precision=options.precision, out_dtype=options.out_dtype, alpha=options.alpha, beta=options.beta,
        )  # fmt: skip
        check_followers(function, options.epilogue, options.activation, self.others)
        check_backend(options.backend, BACKENDS)
        if options.layout not in LAYOUTS:
            raise InvalidOperandError(f"unknown layout {options.layout!r}; valid: {', '.join(LAYOUTS)}")
        for name, scale in zip(("scale_a", "scale_b", "scale_d"), options.scales, strict=True):
            if scale is not None and not isinstance(scale, NUMBERS):
                raise UnsupportedError(f"{name} is a {type(scale).__name__}: convolutions take numbers only")
            if scale is not None:
                check_number(scale, name)
        check_scalars(options.alpha, options.beta, self.arrays["c"], options.scales[2])
        refuse_jax_out(self.arrays["out"])
        given = dict(self.arrays)
        if options.epilogue is not None:
            given.pop("bias", None)  # an operand of the epilogue's
        called = dict(zip("ab", OPERANDS[options.op], strict=True))
        views = views_of(given, ("a", "b"), called)
        check_devices(views)
        views = {name: view if name == "bias" else in_nhwc(view, options.layout) for name, view in views.items()}
        what = _operation(views, options, self.arrays["out"])
        if "out" in views:
            check_out(views, _READ)
        first = views["a"]
        if options.epilogue is not None:
            what = self._with_epilogue(what)
        if on_reference(options.backend, first, stacklevel=5):
            return self._on_reference(what)
        self._check_epilogue(what)
        if "bias" in views and "c" in views:
            what = self._with_bias_tree(what)
        if what.geometry.n == 0 and (options.op == WGRAD or first.device_type == CPU):
            # Nothing, or a sum over no pixels, whose rest, zeros or beta * C, is no work for a kernel.
            return self._on_reference(what)
        return self._on_host(what) if first.device_type == CPU else self._on_gpu(what)

    def _with_epilogue(self, what: _Operation) -> _Operation:
        """The operation with its epilogue."""
        options = self.options
        if options.op == WGRAD:
            raise UnsupportedError("the gradient of a filter has no epilogue")
        refuse_scale_d(options.scales[2])
        bias = self.arrays["bias"]
        given = self.others if bias is None else {**self.others, "bias": bias}
        return what.followed_by(options.epilogue, given, self.arrays["out"], fixed=options.out_dtype is not None)

    def _with_bias_tree(self, what: _Operation) -> _Operation:
        """act(conv + C + bias) as a tree: kernels without one read either C or a bias."""
        bias = self.arrays["bias"]
        traced = bias_and_activation(bias, self.options.activation)
        what = what._replace(views={name: view for name, view in what.views.items() if name != "bias"})
        return what.followed_by(traced, {"bias": bias}, self.arrays["out"], fixed=True)

    def _check_epilogue(self, what: _Operation) -> None:
        """Refuses what the reference computes and no kernel does."""
        options, views = self.options, what.views
        if options.scales[2] not in (None, 1):
            if options.activation not in (None, "identity"):
                raise UnsupportedError("scale_d after an activation: fold it into what reads the result")
            if "bias" in views:
                raise UnsupportedError("scale_d together with bias: scale the bias, and give scale_d as part of alpha")
        if "bias" in views and views["bias"].shape[0] > 1 and views["bias"].strides[0] != 1:
            raise UnsupportedError(f"bias has stride {views['bias'].strides[0]}: kernels read contiguous ones; copy it")

    def _on_gpu(self, what: _Operation) -> Any:
        first, options, epilogue = self.arrays["a"], self.options, what.epilogue
        device, stream = what.views["a"].device, operands.launch_stream().handle
        arrays, results = epilogue.allocate(device, first)
        views = {**what.views, **epilogue.inputs, **results}
        if 0 not in what.shape:
            made = self._launch(what, views, first, stream, options.layout)
            if self.key is not None and made.checked:
                result = ImageResult(what.shape, options.layout)
                kept = _Kept(made, result, epilogue.dtype, epilogue.traced if what.fused else None)
                _plans.insert(kept, self.key)
        else:
            reduce_nothing(epilogue.tree.outputs, views, stream)
        return epilogue.finish(arrays, results, stream)

    def _on_host(self, what: _Operation) -> Any:
        """Host operands: copied to GPU 0, computed there, and the results copied back."""
        read = {**what.views, **what.epilogue.inputs}
        read.pop(RESULT, None)
        views = {name: operands.upload(operands.to_numpy(view), 0) for name, view in read.items()}
        results = what.epilogue.temporaries(0)
        self._launch(what, views | results, None, 0, "nhwc")
        return what.epilogue.deliver(
            {name: operands.download(view) for name, view in results.items()}, self.arrays["a"]
        )  # fmt: skip

    def _launch(self, what: _Operation, views: dict[str, _core.Operand], like: Any, stream: int, layout: str) -> OpPlan:
        """Makes a plan, whose calls name dimensions in the order of `layout`, and launches it on NHWC views."""
        options, epilogue = self.options, what.epilogue
        problem = what.problem(views, options)
        order: tuple[str, ...] = _READ
        if what.fused:
            fusion = ImageResult(what.shape, layout).fusion(epilogue.tree, epilogue.of_tree(views))
            problem, order = dataclasses.replace(problem, fusion=fusion), ("a", "b", "c", *operand_names(epilogue.tree))
        made = make(problem, like=like, backend=options.backend, jit=options.jit, stream=stream, layout=layout)
        factor = 1.0
        for scale in options.scales:
            factor *= 1.0 if scale is None else float(scale)
        beta = options.beta * (1.0 if options.scales[2] is None else float(options.scales[2]))
        arrays = [from_nhwc(views[name], layout) for name in (*order, RESULT) if name in views]
        made(*arrays, alpha=options.alpha * factor, beta=beta, stream=stream)
        return made

    def _on_reference(self, what: _Operation) -> Any:
        options = self.options
        on_gpu = what.views["a"].device_type == CUDA
        fetch = operands.download if on_gpu else operands.to_numpy
        host = {name: fetch(view) for name, view in what.views.items() if name != RESULT}
        g, epilogue = what.geometry, what.epilogue
        common: dict[str, Any] = {
            "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups,
            "alpha": options.alpha, "beta": options.beta, "scale_a": options.scales[0], "scale_b": options.scales[1],
            "scale_d": options.scales[2], "out_dtype": CutlassDtype.F64 if what.fused else epilogue.dtype,
            "math": what.math,
        }  # fmt: skip
        a, b, c = host["a"], host["b"], host.get("c")
        if options.op == WGRAD:
            computed = conv_reference.conv2d_wgrad(a, b, g.w_shape, c, **common)
        else:
            common |= {"bias": host.get("bias"), "activation": options.activation}
            if options.op == FPROP:
                computed = conv_reference.conv2d(a, b, c, **common)
            else:
                computed = conv_reference.conv2d_dgrad(a, b, g.x_shape, c, **common)
        results = epilogue.evaluate(computed, fetch) if what.fused else {RESULT: computed}
        if not on_gpu:
            return epilogue.deliver(results, self.arrays["a"])
        return epilogue.copy_in(results, what.views["a"].device, self.arrays["a"])


class _Operation(NamedTuple):
    """What the operands say: their views in the order of NHWC, the extents, and the epilogue.

    `fused` tells whether that is a tree, and not what kernels without one do.
    """

    op: str
    views: dict[str, _core.Operand]
    geometry: ConvGeometry
    math: str
    epilogue: BoundEpilogue[ImageResult]
    fused: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return result_shape(self.op, self.geometry)

    def followed_by(self, epilogue: Any, given: dict[str, Any], out: Any, *, fixed: bool) -> _Operation:
        """The operation with an epilogue and the arrays for it; `fixed` tells whether the caller names a dtype."""
        views = self.views
        bound = bind(
            epilogue, given, self.epilogue.result, views, taken=("a", "b", "c"), out=out,
            out_dtype=self.epilogue.dtype, fixed=fixed or RESULT in views or "c" in views,
            acc=accumulator(operands.dtype_of(views["a"], "a")),
        )  # fmt: skip
        return self._replace(epilogue=bound, fused=True)

    def problem(self, views: dict[str, _core.Operand], options: _Options) -> ConvProblem:
        def spec(name: str) -> MatrixSpec:
            view = views[name]
            found = MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)
            if name != "bias":
                check_channels(name, found)
            return found

        # A tree's operand may be called bias too.
        bias = "bias" in self.views
        if bias and operands.dtype_of(views["bias"], "bias") is not self.epilogue.dtype:
            raise UnsupportedError(
                f"bias is {operands.dtype_of(views['bias'], 'bias').value}; kernels read it as the result's dtype, "
                f"{self.epilogue.dtype.value}"
            )
        return ConvProblem(
            op=self.op,
            geometry=self.geometry,
            a=spec("a"),
            b=spec("b"),
            c=spec("c") if "c" in views else None,
            d=spec("out"),
            bias=spec("bias") if bias else None,
            activation=None if self.fused else options.activation,
            math=self.math,
            device=views["a"].device,
        )


def _operation(views: dict[str, _core.Operand], options: _Options, out: Any) -> _Operation:
    for name, label in zip(("a", "b"), OPERANDS[options.op], strict=True):
        if len(views[name].shape) != 4:
            raise InvalidOperandError(f"{label} has shape {views[name].shape}; expected 4 dimensions")
    a, b = views["a"].shape, views["b"].shape
    shape = options.shape
    if shape is not None:
        shape = tuple(shape[i] for i in TO_NHWC) if options.layout == "nchw" else shape
    given = shape or ()
    x, w = {FPROP: (a, b), DGRAD: (given, b), WGRAD: (b, given)}[options.op]
    geometry = conv_reference.conv_geometry(
        x, w, stride=options.stride, padding=options.padding, dilation=options.dilation, groups=options.groups
    )
    if options.op != FPROP and a != geometry.y_shape:
        raise InvalidOperandError(f"dy has shape {a} (NHWC order); the convolution's result has {geometry.y_shape}")
    first, second = OPERANDS[options.op]
    dtype, other = (operands.dtype_of(views[name], label) for name, label in (("a", first), ("b", second)))
    if dtype is not other:
        raise InvalidOperandError(f"{first} is {dtype.value} and {second} is {other.value}: both must have one dtype")
    result = result_dtype(views, options.out_dtype, dtype)
    math, extents = math_mode(dtype, options.precision), result_shape(options.op, geometry)
    for name in ("c", "out"):
        if name in views and views[name].shape != extents:
            raise InvalidOperandError(f"{name} has shape {views[name].shape} (NHWC order); the result has {extents}")
    if "bias" in views and views["bias"].shape != extents[-1:]:
        raise InvalidOperandError(f"bias has shape {views['bias'].shape}; expected ({extents[-1]},)")
    if options.activation is not None and options.activation not in reference.ACTIVATIONS:
        valid = ", ".join(reference.ACTIVATIONS)
        raise InvalidOperandError(f"activation is {options.activation!r}; expected None or one of {valid}")
    epilogue = unchanged(ImageResult(extents, options.layout), result, views, out)
    return _Operation(options.op, views, geometry, math, epilogue)


def _four(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of a result, as a caller gives it."""
    # NumPy says that an array of no dimensions can be gone through, and then refuses.
    extents = tuple(shape) if isinstance(shape, Iterable) and getattr(shape, "ndim", 1) == 1 else (shape,)
    if len(extents) != 4:
        raise InvalidOperandError(f"{name} is {shown(shape)}; expected 4 extents")
    return extents
