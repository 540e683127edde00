"""`gated_gemm`: the two products of a gated linear unit in one kernel, over weights whose columns are interleaved."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from ... import _core, reference
from ...arrays import numerics, operands
from ...arrays.arguments import (
    check_backend,
    check_devices,
    check_out,
    on_reference,
    refuse_jax_out,
    result_dtype,
    views_of,
)
from ...arrays.numerics import FAST
from ...arrays.operands import CPU, CUDA
from ...checks import NUMBERS, check_number, check_options, shown
from ...epilogue.arguments import common
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import GATED, GATED_SCALED, epilogue_id
from ...generator.rules import FP8_TYPES, HALF_TYPES, gemm_types
from ...pipeline import problem
from ...pipeline.op_plan import OpPlan
from ...pipeline.plan import BACKENDS as GPU_BACKENDS
from ...pipeline.plan_cache import PlanCache
from ...pipeline.problem import MatrixSpec
from ..gemm import scaled
from ..gemm.arguments import check_single, problem_of, scales_of

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 64

GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh")

_plans: PlanCache[OpPlan] = PlanCache(PLANS_KEPT)


def interleave(gate: Any, up: Any) -> Any:
    """Two weights (F, K) as one of (2 F, K) with their rows in turn, as `gated_gemm` wants B's columns.

    Args:
        gate: NumPy, PyTorch, CuPy or JAX; the rows of the gate's weight.
        up: of the same kind, shape and dtype; those of the other.

    Returns:
        A new array: `gated_gemm(x, interleave(gate, up).T)` is f(x @ gate.T) * (x @ up.T).

    Raises:
        InvalidOperandError: they are not alike, or have not two dimensions.
    """
    views = views_of({"gate": gate, "up": up}, ("gate", "up"))
    first, second = views.values()
    if first.shape != second.shape or len(first.shape) != 2 or first.dtype != second.dtype:
        raise InvalidOperandError(
            f"gate is {first.shape} of {getattr(gate, 'dtype', first.dtype)} and up {second.shape} of "
            f"{getattr(up, 'dtype', second.dtype)}; expected two weights (F, K) alike"
        )
    namespace = _namespace(gate)
    if namespace is None or _namespace(up) is not namespace:
        raise InvalidOperandError(
            f"gate is a {type(gate).__name__} and up a {type(up).__name__}; expected two of NumPy, PyTorch, CuPy or JAX"
        )
    rows, columns = gate.shape
    return namespace.stack([gate, up], 1).reshape(2 * rows, columns)


def _namespace(array: Any) -> Any:
    """The module whose `stack` makes arrays of this kind; None where there is none."""
    for kind in type(array).__mro__:  # a subclass may live in a module of its own
        module = sys.modules.get(kind.__module__.partition(".")[0].replace("jaxlib", "jax"))
        module = getattr(module, "numpy", module)
        if hasattr(module, "stack"):
            return module
    return None


def gated_gemm(
    a: Any,
    b: Any,
    *,
    activation: str = "silu",
    out: Any = None,
    alpha: float = 1.0,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_d: Any = None,
    out_dtype: CutlassDtype | None = None,
    fast_accum: bool = False,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
) -> Any:
    """D[..., j] = saturating_cast(scale_d * f(P[..., 2 j]) * P[..., 2 j + 1]), P = alpha * scale_a * scale_b * A B.

    With `activation` silu this is SwiGLU, with gelu GEGLU. The product is never stored.

    Args:
        a: (..., M, K), bf16, f16 or fp8, as `gemm` takes it.
        b: (..., K, 2 F): columns 2 j are the gate's, columns 2 j + 1 the other's (`interleave`). Kernels of fp8 want it
            contiguous along K, as the transpose of a weight (2 F, K) is.
        activation: f: silu, gelu, gelu_tanh, relu, sigmoid or tanh.
        out: (..., M, F), row-major, written in place and returned.
        alpha: scalar.
        scale_a: factor of A: a number, or for fp8 a float32 array of one element or (..., M, 1).
        scale_b: factor of B: a number, or for fp8 a float32 array of one element or (..., 1, 2 F).
        scale_d: factor of the result: a number of 1, or for fp8 a float32 array of one element.
        out_dtype: element type of the result; defaults to A's, bf16 for fp8.
        fast_accum: as in `gemm`.
        stream: as in `gemm`.
        backend: as in `gemm`.
        jit: as in `gemm`.

    Returns:
        `out`, or a new row-major array of the kind of `a`.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides or device, or 2 F is odd.
        UnsupportedError: no kernel has gated epilogues for these types, layouts and this GPU; sm_90a has.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as in `gemm`.
    """
    check_options(backend=backend, jit=jit, fast_accum=fast_accum, out_dtype=out_dtype, alpha=alpha)
    check_backend(backend, BACKENDS)
    if not isinstance(activation, str) or activation not in GATES:
        raise InvalidOperandError(f"activation is {shown(activation)}; valid: {', '.join(GATES)}")
    if isinstance(scale_d, NUMBERS) and scale_d != 1:
        raise UnsupportedError(
            "scale_d is a number: what is between it and the product does not let it be part of alpha"
        )
    given = {"a": a, "b": b, "out": out, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    for name in ("scale_a", "scale_b"):
        scale = given[name]
        if isinstance(scale, NUMBERS):
            check_number(scale, name)
            alpha, given[name] = alpha * float(scale), None
    given["scale_d"] = None if isinstance(scale_d, NUMBERS) else scale_d
    views = views_of(given, ("a", "b"))
    check_devices(views)
    shape = _result_shape(views)
    dtype, other = (operands.dtype_of(views[name], name) for name in "ab")
    result = result_dtype(views, out_dtype, dtype)
    if dtype not in (*HALF_TYPES, *FP8_TYPES):
        raise UnsupportedError(f"gated kernels multiply f16, bf16 and fp8, not {dtype.value}")
    math_mode = FAST if fast_accum and dtype in FP8_TYPES else "default"
    types = gemm_types(dtype, other, result, math_mode, tree=True)
    if not types:
        raise UnsupportedError(types.reason)
    if "out" in views:
        check_out(views, ("a", "b"))
        if views["out"].shape != shape:
            raise InvalidOperandError(f"out has shape {views['out'].shape}; the result has {shape}")
    check_single(views)
    refuse_jax_out(out)
    if on_reference(backend, views["a"]):
        return _on_reference(views, a, out, activation, alpha, result, math_mode)
    if views["a"].device_type == CPU:
        host = {name: operands.to_numpy(view) for name, view in views.items() if name != "out"}
        views = {name: operands.upload(array, 0, columns=name == "b") for name, array in host.items()}
        _, target = operands.empty(shape, result, 0, None)
        _launch(views | {"out": target}, activation, math_mode, alpha, None, 0, backend, jit)
        return _delivered(operands.download(target), a, out)
    launched_on = operands.current_stream(a, views["a"]) if stream is None else operands.stream_handle(stream)
    array = out
    if array is None:
        array, views["out"] = operands.empty(shape, result, views["a"].device, a)
    if 0 not in shape:
        _launch(views, activation, math_mode, alpha, a, launched_on, backend, jit)
    return operands.finished(array, views["out"], launched_on)


def _result_shape(views: dict[str, _core.Operand]) -> tuple[int, ...]:
    a, b = views["a"].shape, views["b"].shape
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2] or b[-1] % 2:
        raise InvalidOperandError(f"a has shape {a} and b {b}; expected (..., M, K) and (..., K, 2 F)")
    return (*problem.broadcast_batches(a[:-2], b[:-2]), a[-2], b[-1] // 2)


def _launch(
    views: dict[str, _core.Operand],
    activation: str,
    math_mode: str,
    alpha: float,
    like: Any,
    stream: int,
    backend: str,
    jit: str | None,
) -> None:
    arrays = [views[name] for name in ("a", "b", "scale_a", "scale_b", "scale_d", "out") if name in views]
    signature = _core.signature(*(views.get(name) for name in ("a", "b", "scale_a", "scale_b", "scale_d", "out")))
    key = (signature, activation, math_mode, backend, jit, type(like))
    made = _plans.get(key)
    if made is None:
        made = _plan(views, activation, math_mode, like, stream, backend, jit)
        _plans.insert(made, key)
    made(*arrays, alpha=alpha, beta=0.0, stream=stream)


def _plan(
    views: dict[str, _core.Operand],
    activation: str,
    math_mode: str,
    like: Any,
    stream: int,
    backend: str,
    jit: str | None,
) -> OpPlan:
    what = problem_of(views, math_mode)
    result = what.d
    if result.strides[-1] != 1 and result.shape[-1] > 1:
        raise UnsupportedError(f"out has strides {result.strides}: gated kernels write rows that are contiguous")
    # What the kernel's tiles cover: the product, as if D were as wide.
    strides = (*(scaled.PER_PAIR * stride for stride in result.strides[:-1]), 1)
    product = MatrixSpec((*result.shape[:-1], scaled.PER_PAIR * result.shape[-1]), strides, result.dtype)
    what = dataclasses.replace(what, d=product)
    scales = scales_of(what, views)
    if scales.block:
        raise UnsupportedError("block scales are not taken by gated kernels: give one for all, or one for each row")
    base = GATED if scales == scaled.NO_SCALES else GATED_SCALED
    what = dataclasses.replace(what, epilogue=epilogue_id(base, common(None, activation).tree.program))
    return scaled.make(what, scales, result=result, like=like, backend=backend, jit=jit, stream=stream)


def _on_reference(
    views: dict[str, _core.Operand],
    a: Any,
    out: Any,
    activation: str,
    alpha: float,
    result: CutlassDtype,
    math_mode: str,
) -> Any:
    on_gpu = views["a"].device_type == CUDA
    fetch = operands.download if on_gpu else operands.to_numpy
    host = {name: fetch(view) for name, view in views.items() if name != "out"}
    scale_d = float(host["scale_d"].reshape(())) if "scale_d" in host else 1.0
    product = reference.gemm(
        host["a"],
        host["b"],
        alpha=alpha,
        scale_a=host.get("scale_a"),
        scale_b=host.get("scale_b"),
        out_dtype=CutlassDtype.F64,
        math=math_mode if math_mode != FAST else "default",
    )
    with np.errstate(all="ignore"):
        values = reference.ACTIVATIONS[activation](product[..., 0::2]) * product[..., 1::2] * scale_d
        computed = numerics.saturating_cast(values, result)
    if not on_gpu:
        return _delivered(computed, a, out)
    array, view = out, views.get("out")
    if view is None:
        array, view = operands.empty(computed.shape, result, views["a"].device, a)
    operands.copy_in(computed, view)
    return operands.finished(array, view, 0)


def _delivered(computed: np.ndarray[Any, Any], a: Any, out: Any) -> Any:
    if out is None:
        return operands.host_result(computed, a)
    np.copyto(operands.to_numpy(operands.as_operand(out)), computed, casting="no")
    return out
