"""`gemm`: arrays in, array out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import _core
from ...arrays import fp4, operands
from ...arrays.layouts import broadcast_batches, broadcasts_to
from ...arrays.numerics import AnyArray
from ...arrays.operands import CUDA, check_devices, views_of
from ...checks import NUMBERS
from ...errors import InvalidOperandError, UnsupportedError, require
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import FP8_TYPES, accumulator, gemm_types
from ...pipeline import devices, reduction
from ...pipeline.call import Call, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.plan import Plan
from ..product import Product
from .plans import SCALES, check_single, make, problem_of, scales_of

_PRODUCT = ("a", "b", "scale_a", "scale_b", "scale_d")
"""Operands of the product, whose names an epilogue's operands cannot have."""


@stored(reduction.VARIABLE, a="a", b="b", c="c", amax="amax", bias="bias")
@documented
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
    amax: Any = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    fast_accum: bool = False,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
    batch_invariant: bool | None = None,
    **operands_of_epilogue: Any,
) -> Any:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)), or that of `epilogue`.

    Args:
        a: (..., M, K); anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the GPU and back). fp4
            is bytes of two elements, (..., M, K / 2) of uint8, or in NumPy float4_e2m1fn.
        b: (..., K, N), of the same dtype and device. Batch dimensions broadcast as in NumPy. fp4 is the transpose of
            uint8 (..., N, K / 2), or in NumPy float4_e2m1fn.
        c: (..., M, N) of the result's dtype; needed exactly when `beta` is not 0.
        out: (..., M, N), written in place and returned; may be `c` itself, and overlaps nothing else. Not for JAX.
        alpha: scalar; a whole number where the result is an integer. With 0, A and B are not read, unless there is an
            epilogue, bias or activation, scale_d is an array, amax is wanted or they are fp4. Second-level scales of
            nvfp4 belong here, multiplied.
        beta: scalar; a whole number where the result is an integer. With 0, there is no C.
        bias: (N,), added to every row, of any floating dtype.
        epilogue: function of the product, instead of bias and activation: an `EpilogueVisitorTree`, or a Python
            function such as `lambda acc, bias: relu(acc + bias)`, which is traced (`atomr_cutlass.epilogue.trace`) at
            every call. `acc` is alpha * scale_a * scale_b * A B + beta * C in float32 (float64 for float64 operands).
        scale_a: factor of A: a number, or for fp8 a float32 array on the device of A: of one element, (..., M, 1) for
            the rows of A, or (..., M, ceil(K / 128)) for blocks of 1 x 128. For fp4 an array, whose dtype says the
            kind: e4m3, one for 16 elements of K (nvfp4), or e8m0, which may be called uint8, for 32 (mxfp4); in the
            order of `quantization.swizzle_scales`, or in NumPy also plain, (..., M, K / 16 or 32).
        scale_b: factor of B: a number, or for fp8 a float32 array: of one element, (..., 1, N) for the columns of B, or
            (..., ceil(K / 128), ceil(N / 128)) for blocks of 128 x 128; block scales come for both or neither. For fp4
            as scale_a, swizzled with the columns of B as rows, or in NumPy plain, (..., K / 16 or 32, N).
        scale_d: factor of the result: a number, or for fp8 a float32 array of one element.
        amax: for fp8: float32 array of one element, which receives the largest magnitude of D before scale_d. With an
            epilogue it is that tree's operand of this name.
        out_dtype: element type of the result; defaults to A's, bf16 for fp8 and fp4, and for int8 int32, or where
            bias, activation or an epilogue follows C's, and float32 without C: kernels make no int32 of these.
        operands_of_epilogue: the operands of `epilogue` by their names: arrays on the device of `a`, of one element,
            (N,) or (..., 1, N) for a row, (..., M, 1) for a column, (..., M, N), or bits in uint8
            (..., M, ceil(N / 8)), the first in the lowest bit. Of a function also numbers, which become constants of
            its kernel: give values that change from call to call as arrays. Arrays for a tree's outputs beside D may
            be given by name too.

    Returns:
        `out`, or a new row-major array of the kind of `a`; with an epilogue that has several results, these as its
        function returns them, or of a tree a dict with D as `out`. Work is in flight on the stream when a GPU array
        returns.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError: the table lacks the kernel and it must not be compiled; names it and what adds it.
        CompileError: the kernel's source does not compile.
        DeviceUnavailableError: `prebuilt`, `jit` or GPU operands without a usable GPU; NVRTC is needed and missing.
    """
    others = operands_of_epilogue
    if epilogue is not None and amax is not None:
        others["amax"], amax = amax, None
    arrays = {
        "a": a, "b": b, "c": c, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d, "amax": amax, "bias": bias
    }  # fmt: skip
    options = CallOptions.of(locals())
    return Call(_parse, arrays, out, options, epilogue, others)


@dataclass(frozen=True, kw_only=True)
class _Gemm(Product):
    """A product, parsed.

    Attributes:
        dtypes: element types of A and B.
        own: the product's arrays, which exclude operands of a tree that are called `c` or `amax`.
    """

    dtypes: tuple[CutlassDtype, CutlassDtype]
    own: dict[str, _core.Operand]

    def check_kernels(self) -> None:
        require(gemm_types(*self.dtypes, self.result, self.math, tree=self.epilogue is not None))
        if self.dtypes[0] is fp4.FP4:
            view = self.own["a"]
            device = devices.get(view.device if view.device_type == CUDA else 0)
            fp4.check_kernels(devices.require_arch(device), self.own)

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        own = {name: view for name, view in views.items() if name in self.own or name == RESULT}
        problem = problem_of(own, self.math)
        alpha, beta = self.call.scalars
        follows = self.epilogue is not None or {"scale_d", "amax"} & set(own)
        if alpha == 0 and not follows and self.dtypes[0] is not fp4.FP4:
            # As in BLAS, A and B are not read; nor are their scales.
            own = {name: view for name, view in own.items() if name not in SCALES}
        how = self.call.planning | {"alpha": alpha, "beta": beta, "of_call": True}
        return make(problem, scales_of(problem, own), self.fusion(views), like=like, stream=stream, **how)

    def uploaded(self) -> dict[str, _core.Operand]:
        columns = self.dtypes[0].bits <= 8  # kernels read B contiguous along K
        arrays = {name: operands.to_numpy(view) for name, view in self.inputs.items()}
        if self.dtypes[0] is fp4.FP4:
            arrays = fp4.gpu_forms(arrays)
        return {name: operands.upload(array, 0, columns=columns and name == "b") for name, array in arrays.items()}

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:
        if "amax" in self.own:
            operands.clear_async(views["amax"], stream)
        super().write_nothing(views, stream)

    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        from . import reference as gemm_reference  # not needed on a GPU

        if self.dtypes[0] is fp4.FP4 and self.on_gpu:
            host = fp4.plain_forms(host)
        c = host["c"] if "c" in self.own else None
        amax: dict[str, Any] = {"amax": np.zeros(1, np.float32)} if "amax" in self.own else {}
        return amax | self.evaluated(host, functools.partial(gemm_reference.gemm, host["a"], host["b"], c, **amax))


def _parse(call: Call) -> _Gemm:
    call.check("gemm")
    options, arrays = call.options, call.arrays
    if arrays["amax"] is not None and options.backend != "reference" and isinstance(arrays["scale_d"], NUMBERS):
        raise UnsupportedError(
            "amax is taken before scale_d, and a number would be part of alpha: give scale_d as an array"
        )
    bias = arrays["bias"] if call.epilogue is None else None
    given = {"a": arrays["a"], "b": arrays["b"], "c": call.c, "out": call.out, "amax": arrays["amax"], "bias": bias}
    given |= {name: arrays[name] for name in SCALES[:3] if not isinstance(arrays[name], NUMBERS)}
    views = views_of(given, ("a", "b"))
    check_devices(views)
    views = fp4.host_views(views)
    dtypes = _element_types(views)
    shape = _result_shape(views)
    check_single(views)
    own = {name: view for name, view in views.items() if name not in (RESULT, "bias")}
    parsed = _Gemm.of(call, views, shape, dtypes[0], dtypes=dtypes, own=own)
    if not call.binds:
        return parsed
    from ...epilogue.results import MatrixResult  # not at the package's import: most calls have no epilogue

    return parsed.bind(MatrixResult(shape), views, taken=_PRODUCT, acc=accumulator(dtypes[0]))


def _element_types(views: dict[str, _core.Operand]) -> tuple[CutlassDtype, CutlassDtype]:
    a, b = (fp4.element_type(views[name], name) for name in "ab")
    if a is not b and fp4.FP4 in (a, b):
        raise InvalidOperandError(
            f"a is {a.value} and b is {b.value}: fp4 is multiplied by fp4 only; quantize both alike"
        )
    if a is not b and not {a, b} <= set(FP8_TYPES):
        raise InvalidOperandError(f"a is {a.value} and b is {b.value}: both must have one dtype, but for two of fp8")
    return a, b


def _result_shape(views: dict[str, _core.Operand]) -> tuple[int, ...]:
    a, b = views["a"].shape, views["b"].shape
    for name in ("a", "b"):
        if len(views[name].shape) < 2:
            raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected at least 2 dimensions")
    if a[-1] != b[-2]:
        raise InvalidOperandError(f"K disagrees: a {a} has {a[-1]} columns, b {b} has {b[-2]} rows")
    shape = (*broadcast_batches(a[:-2], b[:-2]), a[-2], b[-1])
    if "c" in views:
        c = views["c"].shape
        if len(c) < 2 or c[-2:] != shape[-2:]:
            raise InvalidOperandError(f"c has shape {c}; expected (..., {shape[-2]}, {shape[-1]})")
        if not broadcasts_to(c[:-2], shape[:-2]):
            raise InvalidOperandError(f"c has shape {c}, whose batch dimensions do not broadcast to {shape}")
    if "out" in views and views["out"].shape != shape:
        raise InvalidOperandError(f"out has shape {views['out'].shape}; the result has {shape}")
    if "bias" in views and views["bias"].shape != shape[-1:]:
        raise InvalidOperandError(f"bias has shape {views['bias'].shape}; expected ({shape[-1]},)")
    return shape
