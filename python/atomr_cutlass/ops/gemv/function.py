"""`gemv`: a matrix and a vector in, a vector out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import _core
from ...arrays import operands
from ...arrays.numerics import AnyArray, math_mode
from ...arrays.operands import check_devices, check_out, result_dtype, views_of
from ...errors import InvalidOperandError, require
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import accumulator, gemm_types
from ...pipeline.call import SCALES, Call, Result, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.plan import Plan
from ...pipeline.problem import MatrixSpec
from ..product import Product
from .kernels import make
from .problem import VectorResult, check_types, product, result_shape

_PRODUCT = ("a", "x")


@stored(a="a", x="x", c="c", bias="bias")
@documented
def gemv(
    a: Any,
    x: Any,
    c: Any = None,
    *,
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
    **operands_of_epilogue: Any,
) -> Any:
    """Y = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A x + beta * C + bias)), or that of `epilogue`.

    Products are added up in float32. What takes the time is reading A: its rows, or its columns, are contiguous, and
    read in 16 bytes at a time where they and their strides are multiples of 16 bytes, else element by element.

    Args:
        a: (..., M, K), f16, bf16 or f32; anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the
            GPU and back). Batch dimensions broadcast with those of x as in NumPy: an A that they share is read again
            for each vector, where `gemm(x, a.T)` reads it once.
        x: (..., K), of the same dtype and device, with any stride.
        c: (..., M) of the result's dtype; needed exactly when `beta` is not 0.
        out: (..., M), with any stride, written in place and returned; may be `c` itself, and overlaps nothing else. Not
            for JAX.
        alpha: scalar. With 0, A and x are not read, unless there is an epilogue, bias or activation.
        bias: (M,), added to every vector, of any floating dtype.
        epilogue: function of the product, in the place of bias and activation, as `gemm` takes it. `acc` is alpha *
            scale_a * scale_b * A x + beta * C in float32: to the function a matrix of one row, or one for each batch.
        scale_a: factor of A, a number.
        scale_b: factor of x, a number.
        scale_d: factor of the result, a number. On a GPU not after bias, activation or an epilogue.
        out_dtype: element type of the result; defaults to A's.
        precision: for float32 operands: `ieee`, which is what None means.
        operands_of_epilogue: the operands of `epilogue` by their names: arrays on the device of `a`, of one element,
            (M,) for all vectors, (..., M) or (..., 1), or bits in uint8, (..., ceil(M / 8)), the first in the lowest
            bit. Of a function also numbers, which become constants of its kernel. Arrays for a tree's outputs beside y
            may be given by name too.

    Returns:
        `out`, or a new array (..., M) of the kind of `a`; with an epilogue that has several results, these as its
        function returns them, or of a tree a dict with y as `out`. Work is in flight on the stream when a GPU array
        returns.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as in `gemm`.
    """
    options = CallOptions(
        activation, out_dtype, precision, False, backend, jit, workspace_size, False, alpha, beta, stream
    )  # fmt: skip
    arrays = {"a": a, "x": x, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    return Call(_parse, arrays, out, options, epilogue, operands_of_epilogue)


@dataclass(frozen=True, kw_only=True)
class _Gemv(Product):
    """A matrix times a vector, parsed.

    Attributes:
        product: the names of the product's arrays.
    """

    product: tuple[str, ...]

    def check_kernels(self) -> None:
        dtype = operands.dtype_of(self.inputs["a"], "a")
        check_types(dtype, self.math)
        require(gemm_types(dtype, dtype, self.result, self.math, tree=self.epilogue is not None))

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        specs = {name: MatrixSpec.of(view, name) for name, view in views.items() if name in (*self.product, RESULT)}
        fusion = None if self.epilogue is None else self.epilogue.fusion(views)
        problem = product(specs, self.math, views["a"].device)
        return make(problem, fusion, like=like, stream=stream, **self.call.planning)

    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        from ..gemm import reference as gemm_reference  # which no GPU call needs

        options = self.call.options
        row, turned = host["x"][..., None, :], host["a"].swapaxes(-1, -2)
        c = host["c"][..., None, :] if "c" in self.product else None
        how: dict[str, Any] = {"alpha": options.alpha, "beta": options.beta, "math": self.math}
        how |= {name: self.call.arrays[name] for name in SCALES[:2]}
        compute = functools.partial(gemm_reference.gemm, row, turned, c, **how)
        return self.evaluated(host, compute, scale_d=self.call.arrays["scale_d"])


def _parse(call: Call) -> _Gemv:
    call.check("gemv")
    options, arrays = call.options, call.arrays
    call.refuse_scale_arrays("gemv kernels multiply f16, bf16 and f32, and read no scales: give a number")
    given = {"a": arrays["a"], "x": arrays["x"], "c": call.c, "out": call.out}
    if call.epilogue is None:
        given["bias"] = arrays["bias"]
    views = views_of(given, _PRODUCT)
    check_devices(views)
    shape = result_shape({name: view.shape for name, view in views.items()})
    dtype, other = (operands.dtype_of(views[name], name) for name in _PRODUCT)
    if dtype is not other:
        raise InvalidOperandError(f"a is {dtype.value} and x is {other.value}: both must have one dtype")
    if "out" in views:
        check_out(views, ("a", "x", "c", "bias"))
    result = result_dtype(views, options.out_dtype, dtype, fused=call.follows)
    parsed = _Gemv(
        call=call,
        inputs={name: view for name, view in views.items() if name != RESULT},
        results={RESULT: Result(shape, result.dlpack, call.out, views.get(RESULT))},
        product=tuple(name for name in ("a", "x", "c") if name in views),
        result=result,
        math=math_mode(dtype, options.precision),
    )
    if not call.binds:
        return parsed
    from ...epilogue import bind  # trees and the tracer

    bind.refuse_scale_d(arrays["scale_d"])
    taken, acc = (*_PRODUCT, *SCALES), accumulator(dtype)
    own = {name: view for name, view in views.items() if name in (*_PRODUCT, "c", RESULT)}
    bound = bind.bind(call, VectorResult(shape), own, taken=taken, out_dtype=result, acc=acc)
    return parsed.followed_by(bound)
