"""`gated_gemm`: the two products of a gated linear unit in one kernel, over weights whose columns are interleaved."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ... import _core
from ...arrays import operands
from ...arrays.frameworks import namespaces
from ...arrays.layouts import MatrixSpec, broadcast_batches
from ...arrays.numerics import AnyArray
from ...arrays.operands import check_devices, views_of
from ...checks import NUMBERS, shown
from ...errors import InvalidOperandError, UnsupportedError, require
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import bias_and_activation
from ...generator.epilogue.lower import GATED, GATED_SCALED, epilogue_id
from ...generator.epilogue.tree import RESULT
from ...generator.rules import FP8_TYPES, HALF_TYPES, gemm_types
from ...pipeline import reduction
from ...pipeline.call import Call, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.plan import Plan
from ..gemm.plans import NO_SCALES, PER_PAIR, Scales, check_single, make, problem_of, scales_of
from ..gemm.problem import GemmProblem
from ..product import Product

OP = "gated_gemm"

GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh")
"""Activations of the gate."""


def interleave(gate: Any, up: Any) -> Any:
    """Two weights (F, K) as one of (2 F, K) with alternating rows: its transpose is B of `gated_gemm`.

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
    if namespace is np:
        gate, up = np.asarray(gate), np.asarray(up)  # np.matrix has two dimensions whatever it is stacked to
    rows, columns = gate.shape
    return namespace.stack([gate, up], 1).reshape(2 * rows, columns)


def _namespace(array: Any) -> Any:
    """The module whose `stack` makes arrays of this kind; None where there is none."""
    modules = (getattr(package, "numpy", package) for package in namespaces(array))
    return next((module for module in modules if hasattr(module, "stack")), None)


@stored(reduction.VARIABLE, a="a", b="b")
@documented
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
    workspace_size: int | None = None,
    batch_invariant: bool | None = None,
) -> Any:
    """D[..., j] = saturating_cast(scale_d * f(P[..., 2 j]) * P[..., 2 j + 1]), P = alpha * scale_a * scale_b * A B.

    With `activation` silu this is SwiGLU, with gelu GEGLU. The product is never stored.

    Args:
        a: (..., M, K), bf16, f16 or fp8, as `gemm` takes it.
        b: (..., K, 2 F): columns 2 j are the gate's, columns 2 j + 1 the other's (`interleave`). Kernels of fp8 need it
            contiguous along K, as the transpose of a weight (2 F, K) is.
        activation: f: silu, gelu, gelu_tanh, relu, sigmoid or tanh.
        out: (..., M, F), row-major, written in place and returned.
        alpha: scalar.
        scale_a: factor of A: a number, or for fp8 a float32 array of one element or (..., M, 1).
        scale_b: factor of B: a number, or for fp8 a float32 array of one element or (..., 1, 2 F).
        scale_d: factor of the result: a number of 1, or for fp8 a float32 array of one element.

    Returns:
        `out`, or a new row-major array of the kind of `a`.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides or device, or 2 F is odd.
        UnsupportedError: no kernel has gated epilogues for these types, layouts and this GPU; sm_90a has.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as in `gemm`.
    """
    arrays = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    options = CallOptions.of(locals())
    return Call(_parse, arrays, out, options)


def check(dtype: CutlassDtype, activation: object) -> None:
    """Refuses element types and activations of the gate that no kernel has."""
    if activation not in GATES:
        raise InvalidOperandError(f"activation is {shown(activation)}; valid: {', '.join(GATES)}")
    if dtype not in (*HALF_TYPES, *FP8_TYPES):
        raise UnsupportedError(f"gated kernels multiply f16, bf16 and fp8, not {dtype.value}")


def gated(product: GemmProblem, scales: Scales, activation: str | None) -> GemmProblem:
    """A product with its gate as the epilogue; D is as wide as B, with twice the strides of the result in memory."""
    if scales.form == "block":
        raise UnsupportedError("block scales are not taken by gated kernels: give one for all, or one for each row")
    base = GATED if scales == NO_SCALES else GATED_SCALED
    return dataclasses.replace(product, epilogue=epilogue_id(base, bias_and_activation(None, activation).program))


class _GatedGemm(Product):
    """A product with a gate, parsed."""

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        problem = problem_of(views, self.math)
        d = problem.d
        if d.strides[-1] != 1 and d.shape[-1] > 1:
            raise UnsupportedError(f"out has strides {d.strides}: gated kernels write rows that are contiguous")
        # The kernel's tiles cover the product: its D is as wide as B.
        strides = (*(PER_PAIR * stride for stride in d.strides[:-1]), 1)
        product = MatrixSpec((*d.shape[:-1], PER_PAIR * d.shape[-1]), strides, d.dtype)
        problem = dataclasses.replace(problem, d=product)
        scales = scales_of(problem, views)
        problem = gated(problem, scales, self.call.options.activation)
        return make(problem, scales, like=like, stream=stream, **self.call.planning)

    def uploaded(self) -> dict[str, _core.Operand]:
        arrays = {name: operands.to_numpy(view) for name, view in self.inputs.items()}
        return {name: operands.upload(array, 0, columns=name == "b") for name, array in arrays.items()}

    def reference(self, host: dict[str, AnyArray]) -> dict[str, AnyArray]:
        from ..gemm import reference as gemm_reference  # not needed on a GPU
        from .reference import gate

        how: dict[str, Any] = {"alpha": self.call.scalars[0], "math": self.math, "out_dtype": CutlassDtype.F64}
        how |= {name: host.get(name) for name in ("scale_a", "scale_b")}
        product = gemm_reference.gemm(host["a"], host["b"], **how)
        scale_d = float(host["scale_d"].reshape(())) if "scale_d" in host else 1.0
        return {RESULT: gate(product, str(self.call.options.activation), scale_d, self.result)}


def _parse(call: Call) -> _GatedGemm:
    options, arrays = call.options, call.arrays
    call.check(OP)
    scale_d = arrays.get("scale_d")
    if isinstance(scale_d, NUMBERS) and scale_d != 1:
        raise UnsupportedError(
            "scale_d is a number: what is between it and the product does not let it be part of alpha"
        )
    given = {name: None if isinstance(array, NUMBERS) else array for name, array in arrays.items()}
    views = views_of({**given, "out": call.out}, ("a", "b"))
    check_devices(views)
    a, b = views["a"].shape, views["b"].shape
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2] or b[-1] % 2:
        raise InvalidOperandError(f"a has shape {a} and b {b}; expected (..., M, K) and (..., K, 2 F)")
    shape = (*broadcast_batches(a[:-2], b[:-2]), a[-2], b[-1] // 2)
    dtype, other = (operands.dtype_of(views[name], name) for name in "ab")
    check(dtype, options.activation)
    if "out" in views and views["out"].shape != shape:
        raise InvalidOperandError(f"out has shape {views['out'].shape}; the result has {shape}")
    check_single(views)
    parsed = _GatedGemm.of(call, views, shape, dtype)
    require(gemm_types(dtype, other, parsed.result, parsed.math, tree=True))
    return parsed
