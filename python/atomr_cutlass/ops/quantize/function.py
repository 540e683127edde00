"""`quantize` and `dequantize`: from arrays to narrow values with scales and back, on the GPU or in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from ... import _core
from ...arrays import operands
from ...arrays.fp4 import SCALE_ELEMENTS, element_name
from ...arrays.layouts import is_dense, row_major
from ...arrays.numerics import BYTE, AnyArray, numpy_dtype, saturating_cast
from ...arrays.operands import CPU, check_apart, check_devices, check_writable, refuse_jax_out, result_dtype, views_of
from ...arrays.scales import VECTOR, swizzled_size
from ...checks import NUMBERS, shown
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.epilogue.tree import RESULT
from ...generator.families.quantize import FORMS, WIDE_TYPES, scale_type
from ...generator.families.quantize import dequantize as dequantize_key
from ...generator.families.quantize import quantize as quantize_key
from ...generator.key import KernelKey
from ...generator.rules import FP8_TYPES
from ...pipeline import devices, select
from ...pipeline.call import Call, Invocation, Result, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.plan import Plan, Steps
from ...pipeline.search import Candidate, ExactSearch
from . import reference as quantization

D = CutlassDtype

SCALINGS = tuple(form for form in FORMS if form != "amax")
"""Scopes of a scale: all (`tensor`), a `row`, a `block` of 1 x 128, a `tile` of 128 x 128, and fp4's vectors."""

_VALUES, _SCALES = "out[0]", "out[1]"
"""The results of `quantize` by name."""


class QuantizedArray(NamedTuple):
    """Values and the scales that they are to be multiplied by: x is about values * scales * global_scale.

    Attributes:
        values: of the narrow type, (M, K); fp4 packed two to a byte, uint8 (M, K / 2).
        scales: float32 (1,), (M, 1), (M, ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)); for fp4 one byte each in the
            swizzled order of `quantization.swizzle_scales`, flat: e4m3 for nvfp4, e8m0 (as uint8) for mxfp4.
        global_scale: nvfp4's second-level scale, which belongs into alpha; 1 elsewhere.
    """

    values: Any
    scales: Any
    global_scale: float = 1.0


@stored(x="x")
@documented
def quantize(
    x: Any,
    dtype: CutlassDtype = D.F8E4M3,
    *,
    scaling: str = "tensor",
    out: tuple[Any, Any] | None = None,
    global_scale: float = 1.0,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
) -> QuantizedArray:
    """Quantizes to a narrow type, with scales that map the largest magnitude of each group to the type's largest value.

    GPU arrays stay on the GPU; nothing waits for it. There values are divided by their scale in float32, and may so be
    one step off from NumPy's, which are rounded once. A is quantized as it is, (M, K). B, whose scales run along K too,
    as its transpose: `q = quantize(b.T, ...)`, then `q.values.T` is B contiguous along K, and `q.scales.T` its scales.

    Args:
        x: (M, K), row-major (rows may be further apart); f16, bf16 or f32.
        dtype: e4m3 or e5m2; without meaning for nvfp4 and mxfp4, which are e2m1.
        scaling: one of SCALINGS.
        out: (values, scales), row-major arrays of the shapes and element types that new ones would have, written in
            place and returned; they overlap nothing. Not for JAX.
        global_scale: nvfp4's second-level scale, such as `quantization.nvfp4_global_scale`: a positive number, rounded
            to float32. Other formats have none.
        backend: {backend} Of host arrays, which NumPy quantizes, `auto` or `reference`.

    Returns:
        Values and scales: those of `out`, or new arrays of the kind of `x`. An empty array has scales of 1.

    Raises:
        InvalidOperandError: another rank, shape, dtype, strides, device or overlap, an unknown scaling or backend, a K
            that fp4's vectors do not divide, a global_scale that is not positive or that the format does not have.
        UnsupportedError: a kernel is asked for, and `x` is in host memory.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    second = _second_level(global_scale, scaling)
    options = CallOptions.of(locals(), batch_invariant=False, alpha=second)
    return cast("QuantizedArray", Call(_parse, {"x": x}, out, options, own=(dtype, scaling)))  # `stored` serves it


@stored(values="values", scales="scales")
@documented
def dequantize(
    values: Any,
    scales: Any,
    *,
    scaling: str = "tensor",
    out: Any = None,
    global_scale: float = 1.0,
    out_dtype: CutlassDtype | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
) -> Any:
    """Undoes `quantize` as far as rounding allows: values * scales * global_scale.

    Args:
        values: as `quantize` returns them, dense.
        scales: as `quantize` returns them.
        scaling: as it was quantized.
        out: (M, K), row-major, written in place and returned; overlaps nothing. Not for JAX.
        global_scale: that of the quantization; of nvfp4 alone.
        out_dtype: f32, f16 or bf16; defaults to that of `out`, else f32.
        backend: {backend} Of host arrays, which NumPy scales, `auto` or `reference`.

    Returns:
        `out`, or a new array (M, K) of the kind of `values`.

    Raises:
        InvalidOperandError: a wrong dtype, shapes or devices that do not belong together, or as `quantize`.
        UnsupportedError: as `quantize`.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as for `gemm`.
    """
    options = CallOptions.of(locals(), batch_invariant=False, alpha=_second_level(global_scale, scaling))
    return Call(_parse_inverse, {"values": values, "scales": scales}, out, options, own=(scaling,))


@dataclass(frozen=True, kw_only=True)
class _Parsed(Invocation):
    """A call of either function, parsed; values are of type `narrow`, the matrix is of type `wide`."""

    scaling: str
    narrow: CutlassDtype
    wide: CutlassDtype
    numpy_on_host = True

    def check_kernels(self) -> None:
        """Refuses results of the caller's that are not row-major without gaps."""
        for name, result in self.results.items():
            shape, view = result.shape, result.view
            if view is not None and 0 not in shape and not is_dense(shape, view.strides):
                expected = row_major(shape)
                raise InvalidOperandError(f"{name} has strides {view.strides}; expected {expected}, without gaps")

    def kernel(self, make: Callable[[SmArch], KernelKey], device: int) -> Candidate[None]:
        """The kernel of a key, on the GPU of this index."""
        options = self.call.options
        return select.choose(ExactSearch(make, devices.get(device)), backend=options.backend, jit=options.jit)


class _Quantize(_Parsed):
    """`quantize`, parsed."""

    @property
    def empty(self) -> bool:
        return 0 in self.inputs["x"].shape

    def check_kernels(self) -> None:
        (rows, columns), strides = self.inputs["x"].shape, self.inputs["x"].strides
        if self.on_gpu and rows > 0 and columns > 1 and strides[1] != 1:
            raise InvalidOperandError(f"x has strides {strides}; expected contiguous rows: quantize x.T for B")
        super().check_kernels()

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        x, scaling, (rows, columns) = views["x"], self.scaling, views["x"].shape

        def kernel(form: str) -> Candidate[None]:
            narrow = D.F8E4M3 if form == "amax" else self.narrow
            return self.kernel(lambda arch: quantize_key(arch, self.wide, narrow, form), x.device)

        steps = Steps(x.device, stream)
        lda = x.strides[0] if rows > 1 else columns
        args: dict[str, Any] = {"rows": rows, "columns": columns, "lda": lda, "alpha": "alpha"}
        args["a"] = steps.slot("x", x.shape, x.strides, x.dtype)
        for field, name in (("scales", _SCALES), ("d", _VALUES)):
            shape, element, *_ = self.results[name]
            args[field] = steps.slot(name, shape, None, element, alignment=element[1] // 8, role="output")
        if scaling == "tensor":
            amax = steps.temporary(4)
            steps.clear(amax, 4)
            steps.launch(kernel("amax"), args | {"amax": amax})
            steps.launch(kernel("tensor"), args | {"amax": amax}, main=True)
        else:
            if self.narrow is D.F4E2M1:
                # The swizzled layout is padded with zeros.
                steps.clear(args["scales"], math.prod(self.results[_SCALES].shape))
            steps.launch(kernel(scaling), args, main=True)
        return steps.plan(like=like)

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:
        scales = views[_SCALES]
        if scales.dtype == D.F32.dlpack:
            operands.write_async(np.ones(scales.shape, np.float32), scales, stream)

    def returned(self, arrays: Mapping[str, Any]) -> Any:
        return super().returned({**arrays, "global_scale": self.call.options.alpha})

    def reference(self, host: dict[str, AnyArray]) -> dict[str, AnyArray]:
        x, scaling = host["x"], self.scaling
        if self.narrow is D.F4E2M1:
            nvfp4 = scaling == "nvfp4"
            second = self.call.options.alpha
            made = quantization.quantize_nvfp4(x, global_scale=second) if nvfp4 else quantization.quantize_mxfp4(x)
            scales = quantization.swizzle_scales(made.scale)
            return {_VALUES: quantization.pack_fp4(made.values), _SCALES: scales if nvfp4 else scales.view(np.uint8)}
        if scaling in ("block", "tile"):
            values, scales = quantization.quantize_blockwise(x, self.narrow, block=FORMS[scaling][1])
        else:
            values, scales = quantization.quantize(x, self.narrow, axis=None if scaling == "tensor" else -1)
        return {_VALUES: values, _SCALES: scales.reshape(self.results[_SCALES].shape)}


def _quantized_array(made: Mapping[str, Any]) -> QuantizedArray:
    values, scales = made[RESULT] or (made[_VALUES], made[_SCALES])
    return QuantizedArray(values, scales, quantization.second_level(made.get("global_scale", 1.0)))


def _parse(call: Call) -> _Quantize:
    dtype, scaling = call.own
    view = _views("quantize", call, scaling, dtype=dtype)["x"]
    fp4 = scale_type(scaling) in VECTOR
    narrow = D.F4E2M1 if fp4 else dtype
    if not fp4 and dtype not in FP8_TYPES:
        raise InvalidOperandError(f"dtype is {dtype!r}; expected F8E4M3 or F8E5M2")
    wide = _check_matrix(view, "x", WIDE_TYPES)
    rows, columns = view.shape
    scales = _scales("x", view.shape, scaling)
    # fp4 is bytes to every framework.
    values = Result((rows, columns // 2), BYTE) if fp4 else Result((rows, columns), narrow.dlpack)
    results = {_VALUES: values, _SCALES: scales}
    if call.out is not None:
        if not isinstance(call.out, (list, tuple)) or len(call.out) != len(results):
            raise InvalidOperandError(f"out is {shown(call.out)}; expected two arrays, (values, scales)")
        results = _into(dict(zip(results, call.out, strict=True)), results, {"x": view})
    how: dict[str, Any] = {"scaling": scaling, "narrow": narrow, "wide": wide}
    return _Quantize(call=call, inputs={"x": view}, results=results, arrange=_quantized_array, **how)


class _Dequantize(_Parsed):
    """`dequantize`, parsed."""

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        values, scales, (rows, columns) = views["values"], views["scales"], self.results[RESULT].shape
        kind, wide, (block_rows, block_columns) = scale_type(self.scaling), self.wide, FORMS[self.scaling][1]
        kernel = self.kernel(lambda arch: dequantize_key(arch, self.narrow, wide, kind), values.device)
        steps = Steps(values.device, stream)
        args = {
            "rows": rows, "columns": columns, "lda": columns, "alpha": "alpha",
            "a": steps.slot("values", values.shape, None, values.dtype),
            "scales": steps.slot("scales", scales.shape, None, scales.dtype),
            "d": steps.slot(RESULT, (rows, columns), None, wide.dlpack, alignment=wide.bits // 8, role="output"),
            "block_rows": block_rows or rows, "block_columns": block_columns or columns,
        }  # fmt: skip
        steps.launch(kernel, args)
        return steps.plan(like=like)

    def reference(self, host: dict[str, AnyArray]) -> dict[str, AnyArray]:
        values, scales, (rows, columns) = host["values"], host["scales"], self.results[RESULT].shape
        kind = scale_type(self.scaling)
        if kind in VECTOR:
            plain = quantization.unswizzle_scales(scales, rows, columns // VECTOR[kind]).view(numpy_dtype(kind))
            made = quantization.BlockScaled(quantization.unpack_fp4(values), plain, self.call.options.alpha)
            wide = quantization.dequantize_fp4(made)
        elif self.scaling in ("block", "tile"):
            wide = quantization.dequantize_blockwise(values, scales, block=FORMS[self.scaling][1])
        else:
            wide = quantization.dequantize(values, scales)
        return {RESULT: saturating_cast(wide, self.wide)}


def _parse_inverse(call: Call) -> _Dequantize:
    (scaling,) = call.own
    views = _views("dequantize", call, scaling)
    outs = {} if call.out is None else {RESULT: call.out}
    wide = result_dtype(views_of(outs), call.options.out_dtype, D.F32)
    if wide not in WIDE_TYPES:
        raise InvalidOperandError(f"{'out' if outs else 'out_dtype'} is {wide.value}; expected f32, f16 or bf16")
    kind = scale_type(scaling)
    view, scales = views["values"], views["scales"]
    if kind in VECTOR:
        if view.dtype != BYTE or len(view.shape) != 2:
            raise InvalidOperandError(f"values has shape {view.shape}; expected packed fp4, uint8 (M, K / 2)")
        narrow, shape = D.F4E2M1, (view.shape[0], view.shape[1] * 2)
    else:
        narrow = _check_matrix(view, "values", FP8_TYPES)
        shape = (view.shape[0], view.shape[1])
    expected = _scales("values (unpacked)", shape, scaling).shape
    if scales.shape != expected:
        raise InvalidOperandError(f"scales has shape {scales.shape}; expected {expected}")
    if scales.dtype not in SCALE_ELEMENTS[kind]:
        known = {ScaleType.F32: "f32", ScaleType.UE4M3: "e4m3", ScaleType.UE8M0: "e8m0, or its bytes (uint8)"}[kind]
        raise InvalidOperandError(f"scales has elements of {element_name(scales.dtype)}; expected {known}")
    results = _into(outs, {RESULT: Result(shape, wide.dlpack)}, views)
    return _Dequantize(call=call, inputs=views, results=results, scaling=scaling, narrow=narrow, wide=wide)


def _scales(name: str, shape: tuple[int, ...], scaling: str) -> Result:
    """The shape and type of the scales of a matrix; `name` is its name in errors. Refuses partial vectors of fp4."""
    kind, block = scale_type(scaling), FORMS[scaling][1]
    rows, columns = (-(-extent // size) if size else 1 for extent, size in zip(shape, block, strict=True))
    extents: tuple[int, ...] = (rows, columns) if any(block) else (1,)
    if kind in VECTOR:
        if shape[1] % VECTOR[kind]:
            raise InvalidOperandError(f"{name} has {shape[1]} columns; {scaling} shares a scale among {VECTOR[kind]}")
        extents = (swizzled_size(rows, columns),)
    return Result(extents, SCALE_ELEMENTS[kind][0])


def _into(
    outs: Mapping[str, Any], results: dict[str, Result], inputs: Mapping[str, _core.Operand]
) -> dict[str, Result]:
    """The results in the caller's arrays, if any; refuses arrays that differ from new ones."""
    views = views_of(outs, outs)
    check_devices({**inputs, **views})
    for name, view in views.items():
        refuse_jax_out(outs[name], name)
        shape, element, *_ = results[name]
        if view.shape != shape:
            raise InvalidOperandError(f"{name} has shape {view.shape}; expected {shape}")
        if view.dtype != element:
            raise InvalidOperandError(
                f"{name} has elements of {element_name(view.dtype)}; expected {element_name(element)}"
            )
        check_writable(view, name)
    check_apart(views, inputs)
    return results | {name: Result(view.shape, view.dtype, outs[name], view) for name, view in views.items()}


def _views(function: str, call: Call, scaling: str, **more: Any) -> dict[str, _core.Operand]:
    """The views of the arrays of either function, after checks of the arguments that both have."""
    call.check(function, scaling=scaling, **more)
    if scaling not in SCALINGS:
        raise InvalidOperandError(f"unknown scaling {scaling!r}; valid: {', '.join(SCALINGS)}")
    views = {name: operands.as_operand(array, name) for name, array in call.arrays.items()}
    check_devices(views)
    backend = call.options.backend
    if next(iter(views.values())).device_type == CPU and backend in ("prebuilt", "jit"):
        raise UnsupportedError(
            f"NumPy quantizes host arrays, and no kernel: {function} takes backend={backend!r} for arrays on a GPU"
        )
    return views


def _check_matrix(view: _core.Operand, name: str, dtypes: tuple[CutlassDtype, ...]) -> CutlassDtype:
    """The element type of a matrix, which must be one of these."""
    if len(view.shape) != 2:
        raise InvalidOperandError(f"{name} has shape {view.shape}; expected 2 dimensions")
    dtype = operands.dtype_of(view, name)
    if dtype not in dtypes:
        raise InvalidOperandError(f"{name} is {dtype.value}; expected {', '.join(valid.value for valid in dtypes)}")
    return dtype


def _second_level(global_scale: float, scaling: str) -> float:
    """A second-level scale, rounded to float32; refuses a value that is not positive and finite then."""
    if isinstance(global_scale, bool) or not isinstance(global_scale, NUMBERS):
        raise InvalidOperandError(f"global_scale is a {type(global_scale).__name__}; expected a number")
    second = quantization.second_level(global_scale)
    if second != 1.0 and scaling != "nvfp4":
        raise InvalidOperandError(
            f"global_scale is {global_scale}; only nvfp4 has one: leave it out, or multiply the scales of {scaling}"
        )
    return second
