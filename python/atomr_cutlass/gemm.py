"""`gemm`: arrays in, array out."""

from __future__ import annotations

import collections
import threading
import warnings
from typing import Any

import numpy as np

from . import _core, devices, numerics, operands, problem, reference
from . import plan as plans
from .errors import InvalidOperandError, UnsupportedError
from .generator.dtypes import CutlassDtype
from .generator.matrix import gemm_types
from .operands import CPU, CUDA
from .problem import GemmProblem, MatrixSpec
from .requests import default_out_dtype, math_mode

BACKENDS = ("auto", "prebuilt", "jit", "reference")
PLANS_KEPT = 256

_plans: collections.OrderedDict[tuple[Any, ...], plans.Plan] = collections.OrderedDict()
_plans_lock = threading.Lock()
_warned = False


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_d: Any = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    fast_accum: bool = False,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)).

    Args:
        a: (..., M, K); anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the GPU and back).
        b: (..., K, N), of the same dtype and device. Batch dimensions broadcast as in NumPy.
        c: (..., M, N) of the result's dtype; needed exactly when `beta` is not 0.
        out: (..., M, N), written in place and returned; may be `c` itself, and overlaps nothing else. Not for JAX.
        alpha, beta: scalars; whole numbers where the result is an integer. With `alpha` 0, A and B are not read.
        bias: (N,), added to every row. Reference backend only, for now.
        activation: a name of `reference.ACTIVATIONS`. Reference backend only, for now.
        epilogue: refused: fused epilogues are not there yet.
        scale_a, scale_b, scale_d: factors, as numbers; per-row and per-column arrays on the reference backend only.
        out_dtype: element type of the result; defaults to A's (int32 for int8, bf16 for fp8).
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.
        fast_accum: fp8's fast accumulation; ignored for other dtypes.
        stream: where to launch: an integer handle or a stream object; defaults to the current stream of the framework
            of `a`.
        backend: `auto` (a GPU kernel; without a GPU the reference, warning once), `prebuilt`, `jit` or `reference`.

    Returns:
        `out`, or a new row-major array of the kind of `a`. Work is in flight on the stream when a GPU array returns.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError: the table lacks the kernel; names it and the knob that adds it.
        DeviceUnavailableError: `prebuilt` or GPU operands without a usable GPU.
    """
    if (
        bias is activation is epilogue is scale_a is scale_b is scale_d is out_dtype is None
        and (backend == "auto" or backend == "prebuilt")
    ):  # fmt: skip
        signature = _core.signature(a, b, c, out)
        if signature is not None:
            found = _plans.get((signature, precision, beta == 0))
            if found is not None:
                return found(a, b, c, out=out, alpha=alpha, beta=beta, stream=stream)
    return _gemm(
        a, b, c, out, alpha, beta, bias, activation, epilogue, (scale_a, scale_b, scale_d), out_dtype, precision, stream, backend
    )  # fmt: skip


def _gemm(
    a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, bias: Any, activation: str | None, epilogue: Any,
    scales: tuple[Any, Any, Any], out_dtype: CutlassDtype | None, precision: str | None, stream: Any, backend: str,
) -> Any:  # fmt: skip
    if backend not in BACKENDS:
        raise InvalidOperandError(f"unknown backend {backend!r}; valid: {', '.join(BACKENDS)}")
    if epilogue is not None:
        raise UnsupportedError("fused epilogues are not there yet: leave epilogue out")
    if backend == "jit":
        raise UnsupportedError("compilation at run time is not there yet: use backend='auto' or 'prebuilt'")
    given = {"a": a, "b": b, "c": c, "out": out}
    if bias is not None:
        given["bias"] = bias
    views = {name: operands.as_operand(array) for name, array in given.items() if array is not None}
    _check_scalars(alpha, beta, c)
    _check_devices(views)
    shape = _result_shape(views)
    dtype = operands.dtype_of(views["a"], "a")
    if operands.dtype_of(views["b"], "b") is not dtype:
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {operands.dtype_of(views['b'], 'b').value}: both must have one dtype"
        )
    math = math_mode(dtype, precision)
    result = _result_dtype(views, out_dtype, dtype)
    types = gemm_types(dtype, dtype, result, math)
    if out is not None:
        _check_out(views, c)
        if operands.is_jax(out):
            raise InvalidOperandError("out is a JAX array, which cannot be written: leave out away")

    on_host = views["a"].device_type == CPU
    use_gpu = backend != "reference" and (not on_host or backend == "prebuilt" or devices.available())
    if not use_gpu:
        if backend != "reference":
            _warn_once()
        return _on_reference(a, views, shape, alpha, beta, activation, scales, result, math, out)
    if not types:
        raise UnsupportedError(types.reason)
    plans.refuse_epilogue(bias, activation)
    alpha, beta = _fold_scales(alpha, beta, scales)
    if 0 in shape:
        if out is not None:
            return out
    if on_host:
        return _via_copies(a, views, shape, alpha, beta, result, math, out)
    return _on_gpu(a, b, c, out, views, shape, alpha, beta, result, math, precision, stream, out_dtype is None)


def _check_scalars(alpha: float, beta: float, c: Any) -> None:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise InvalidOperandError(f"{name} is a {type(value).__name__}; expected a number")
    if c is not None and beta == 0:
        raise InvalidOperandError("c is given but beta is 0, so it would not be read: give beta, or leave c out")
    if c is None and beta != 0:
        raise InvalidOperandError(f"beta is {beta}, so c is needed")


def _check_devices(views: dict[str, _core.Operand]) -> None:
    first = views["a"]
    for name, view in views.items():
        if view.device_type not in (CPU, CUDA):
            raise InvalidOperandError(f"{name} is on a device of DLPack type {view.device_type}; expected CUDA or CPU")
        if (view.device_type, view.device) != (first.device_type, first.device):
            raise InvalidOperandError(
                f"a is on {_place(first)} and {name} on {_place(view)}: all operands must be on one device"
            )


def _place(view: _core.Operand) -> str:
    return f"cuda:{view.device}" if view.device_type == CUDA else "the CPU"


def _result_shape(views: dict[str, _core.Operand]) -> tuple[int, ...]:
    a, b = views["a"].shape, views["b"].shape
    for name in ("a", "b"):
        if len(views[name].shape) < 2:
            raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected at least 2 dimensions")
    if a[-1] != b[-2]:
        raise InvalidOperandError(f"K disagrees: a {a} has {a[-1]} columns, b {b} has {b[-2]} rows")
    shape = problem.broadcast_batches(a[:-2], b[:-2]) + (a[-2], b[-1])
    if "c" in views:
        c = views["c"].shape
        if len(c) < 2 or c[-2:] != shape[-2:]:
            raise InvalidOperandError(f"c has shape {c}; expected (..., {shape[-2]}, {shape[-1]})")
        if problem.broadcast_batches(c[:-2], shape[:-2]) != shape[:-2]:
            raise InvalidOperandError(f"c has shape {c}, whose batch dimensions do not broadcast to {shape}")
    if "out" in views and views["out"].shape != shape:
        raise InvalidOperandError(f"out has shape {views['out'].shape}; the result has {shape}")
    if "bias" in views and views["bias"].shape != shape[-1:]:
        raise InvalidOperandError(f"bias has shape {views['bias'].shape}; expected ({shape[-1]},)")
    return shape


def _result_dtype(
    views: dict[str, _core.Operand], asked: CutlassDtype | None, operand: CutlassDtype
) -> CutlassDtype:
    if asked is not None and not isinstance(asked, CutlassDtype):
        raise InvalidOperandError(f"out_dtype is {asked!r}; expected a CutlassDtype")
    given = operands.dtype_of(views["out"], "out") if "out" in views else None
    if asked is not None and given is not None and asked is not given:
        raise InvalidOperandError(f"out is {given.value}, but out_dtype asks for {asked.value}")
    result = asked or given or default_out_dtype(operand)
    if "c" in views and operands.dtype_of(views["c"], "c") is not result:
        raise InvalidOperandError(
            f"c is {operands.dtype_of(views['c'], 'c').value}; it must have the result's dtype, {result.value}"
        )
    return result


def _check_out(views: dict[str, _core.Operand], c: Any) -> None:
    out = views["out"]
    if out.read_only:
        raise InvalidOperandError("out is read-only: give an array that may be written")
    repeated = any(stride == 0 and extent > 1 for stride, extent in zip(out.strides, out.shape, strict=True))
    if repeated:
        raise InvalidOperandError(f"out has strides {out.strides}: its elements share memory; give an array of its own")
    for name in ("a", "b", "c", "bias"):
        if name not in views or not _core.overlap(out, views[name]):
            continue
        same = views[name].pointer == out.pointer and views[name].strides == out.strides
        if name != "c" or not same:
            raise InvalidOperandError(f"out overlaps {name}: give separate memory (out may be exactly c)")


def _fold_scales(alpha: float, beta: float, scales: tuple[Any, Any, Any]) -> tuple[float, float]:
    """Without an activation, scale factors are part of alpha and beta."""
    for name, scale in zip(("scale_a", "scale_b", "scale_d"), scales, strict=True):
        if scale is not None and not isinstance(scale, (int, float, np.integer, np.floating)):
            raise UnsupportedError(
                f"{name} is a {type(scale).__name__}: GPU kernels take scale factors as numbers until fp8 kernels are there"
            )
    scale_a, scale_b, scale_d = (1.0 if scale is None else float(scale) for scale in scales)
    return alpha * scale_a * scale_b * scale_d, beta * scale_d


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"computing with NumPy on the CPU: {devices.problem()}", RuntimeWarning, stacklevel=4)


def _on_reference(
    a: Any, views: dict[str, _core.Operand], shape: tuple[int, ...], alpha: float, beta: float, activation: str | None,
    scales: tuple[Any, Any, Any], result: CutlassDtype, math: str, out: Any,
) -> Any:  # fmt: skip
    on_gpu = views["a"].device_type == CUDA
    host = {name: operands.download(view) if on_gpu else operands.to_numpy(view) for name, view in views.items()}
    target = host.pop("out", None)
    c, bias = host.get("c"), host.get("bias")
    computed = reference.gemm(
        host["a"], host["b"], c, alpha=alpha, beta=beta, bias=bias, activation=activation,
        scale_a=scales[0], scale_b=scales[1], scale_d=scales[2], out_dtype=result, math=math,
    )  # fmt: skip
    if on_gpu:
        array, view = (out, views["out"]) if out is not None else operands.empty(shape, result, views["a"].device, a)
        operands.copy_in(computed, view)
        return operands.finished(array, view, 0, a)
    if out is not None and target is not None:
        np.copyto(target, computed, casting="no")
        return out
    return operands.host_result(computed, a)


def _via_copies(
    a: Any, views: dict[str, _core.Operand], shape: tuple[int, ...], alpha: float, beta: float, result: CutlassDtype,
    math: str, out: Any,
) -> Any:  # fmt: skip
    """Host operands: copied to GPU 0, multiplied there, and the result copied back."""
    host = {name: operands.to_numpy(view) for name, view in views.items()}
    target = host.pop("out", None)
    if 0 in shape:
        return operands.host_result(np.empty(shape, numerics.numpy_dtype(result)), a)
    device = {name: operands.upload(array, 0) for name, array in host.items()}
    _, view = operands.empty(shape, result, 0, None)
    made = _plan(device | {"out": view}, shape, result, math, None)
    made(device["a"], device["b"], device.get("c"), out=view, alpha=alpha, beta=beta, stream=0)
    computed = operands.download(view)
    if out is not None and target is not None:
        np.copyto(target, computed, casting="no")
        return out
    return operands.host_result(computed, a)


def _on_gpu(
    a: Any, b: Any, c: Any, out: Any, views: dict[str, _core.Operand], shape: tuple[int, ...], alpha: float, beta: float,
    result: CutlassDtype, math: str, precision: str | None, stream: Any, default_dtype: bool,
) -> Any:  # fmt: skip
    array = out
    handle = operands.stream_handle(stream) if stream is not None else operands.current_stream(a)
    if out is None:
        array, views["out"] = operands.empty(shape, result, views["a"].device, a)
    if 0 in shape:
        return operands.finished(array, views["out"], handle, a)
    made = _plan(views, shape, result, math, a)
    made(views["a"], views["b"], views.get("c"), out=views["out"], alpha=alpha, beta=beta, stream=handle)
    if default_dtype:
        signature = _core.signature(a, b, c, out)
        if signature is not None and (out is not None or _core.has_exchange_api(a)):
            with _plans_lock:
                _plans[signature, precision, beta == 0] = made
                while len(_plans) > PLANS_KEPT:
                    _plans.popitem(last=False)
    return operands.finished(array, views["out"], handle, a)


def _plan(
    views: dict[str, _core.Operand], shape: tuple[int, ...], result: CutlassDtype, math: str, like: Any
) -> plans.Plan:
    def spec(name: str) -> MatrixSpec:
        view = views[name]
        return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)

    what = GemmProblem(
        a=spec("a"), b=spec("b"), c=spec("c") if "c" in views else None, d=spec("out"), math=math, device=views["a"].device
    )
    return plans.make(what, like=like)

