"""What the arguments of `gemm` mean: the arrays' shapes, element types, scales and math mode."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ... import _core
from ...arrays import fp4, operands
from ...arrays.arguments import check_devices, check_out, result_dtype
from ...arrays.numerics import FAST, AnyArray, math_mode
from ...checks import NUMBERS
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.key import ROW
from ...generator.rules import FP8_TYPES, supports_layouts
from ...pipeline import problem
from ...pipeline.problem import GemmProblem, MatrixSpec
from . import scaled

SCALES = ("scale_a", "scale_b", "scale_d", "amax")
"""Scale arrays in the order in which plans take them."""


class Arguments(NamedTuple):
    """Those of a call, as `gemm` has them; `scales` are scale_a, scale_b and scale_d by name."""

    a: Any
    b: Any
    c: Any
    out: Any
    alpha: float
    beta: float
    bias: Any
    activation: str | None
    epilogue: Any
    operands_of_epilogue: dict[str, Any]
    scales: dict[str, Any]
    amax: Any
    out_dtype: CutlassDtype | None
    precision: str | None
    fast_accum: bool
    stream: Any
    backend: str
    jit: str | None

    @property
    def source(self) -> Any:
        """C, unless it is an operand of the epilogue: then there is no beta."""
        return None if self.epilogue is not None and self.beta == 0 else self.c

    @property
    def folded_scalars(self) -> tuple[float, float]:
        """The scalars with the scale factors that are numbers; scale_d is none where something follows the product."""
        scale_a, scale_b, scale_d = (float(v) if isinstance(v, NUMBERS) else 1.0 for v in self.scales.values())
        return self.alpha * scale_a * scale_b * scale_d, self.beta * scale_d

    def delivered(self, computed: AnyArray, out: _core.Operand | None) -> Any:
        """A host result, in `out` or as a new array of the kind of `a`."""
        if out is None:
            return operands.host_result(computed, self.a)
        np.copyto(operands.to_numpy(out), computed, casting="no")
        return self.out


class Operation(NamedTuple):
    """What the arrays say: their views by name, the result's shape and dtype, and the math mode."""

    views: dict[str, _core.Operand]
    shape: tuple[int, ...]
    dtype: CutlassDtype
    dtype_b: CutlassDtype
    result: CutlassDtype
    math: str

    @property
    def inputs(self) -> list[str]:
        """The arrays that are read."""
        return [name for name in self.views if name not in ("amax", "out")]

    def uploaded(self, others: dict[str, AnyArray]) -> dict[str, _core.Operand]:
        """Copies on GPU 0 of what is read, of amax and of other host arrays; A and B lie as kernels like them."""
        # 8-bit kernels want B contiguous along K.
        columns = {"b"} if not supports_layouts("sm80", self.dtype, ROW, ROW) else set()
        names = (*self.inputs, *(["amax"] if "amax" in self.views else []))
        arrays = {name: operands.to_numpy(self.views[name]) for name in names} | others
        if self.dtype is fp4.FP4:
            arrays, columns = fp4.gpu_forms(arrays), {"b"}
        return {name: operands.upload(array, 0, columns=name in columns) for name, array in arrays.items()}


def operation_of(
    views: dict[str, _core.Operand],
    out_dtype: CutlassDtype | None,
    precision: str | None,
    *,
    fast_accum: bool,
    fused: bool = False,
) -> Operation:
    """The operation of arrays by name.

    Args:
        views: the arrays.
        out_dtype: of the call, like `precision` and `fast_accum`.
        precision: see there.
        fast_accum: see there.
        fused: whether an epilogue, bias or activation makes the result.

    Raises:
        InvalidOperandError: a rank, shape, dtype, device or overlap that makes no product.
    """
    check_devices(views)
    dtype, other = (fp4.element_type(views[name], name) for name in "ab")
    if dtype is not other and fp4.FP4 in (dtype, other):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: fp4 is multiplied by fp4 only; quantize both alike"
        )
    shape = _result_shape(views)
    if dtype is not other and not {dtype, other} <= set(FP8_TYPES):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: both must have one dtype, but for two of fp8"
        )
    if "out" in views:
        check_out(views, ("a", "b", "c", "bias"))
    math = math_mode(dtype, precision)
    if fast_accum and dtype in FP8_TYPES:
        math = FAST
    return Operation(views, shape, dtype, other, result_dtype(views, out_dtype, dtype, fused=fused), math)


def problem_of(views: dict[str, _core.Operand], math: str) -> GemmProblem:
    """The problem of GPU arrays by name, `out` among them."""

    def spec(name: str) -> MatrixSpec:
        view = views[name]
        if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
            return fp4.logical(view, name)
        return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)

    return GemmProblem(
        a=spec("a"),
        b=spec("b"),
        c=spec("c") if "c" in views else None,
        d=spec("out"),
        math=math,
        device=views["a"].device,
    )


def scales_of(what: GemmProblem, views: dict[str, _core.Operand]) -> scaled.Scales:
    """The scales that are arrays, as they lie; `NO_SCALES` without any.

    Raises:
        InvalidOperandError: of another element type or shape than kernels take.
        UnsupportedError: the element types of A and B come without scale arrays, or (fp4) not without.
    """
    given = sorted(set(views) & set(SCALES))
    if not given:
        return scaled.NO_SCALES
    if what.a.dtype is fp4.FP4:
        vector = fp4.VECTOR[fp4.kind_of(views)]
        for name, rows in (("scale_a", what.m), ("scale_b", what.n)):
            fp4.check_swizzled(views[name], name, rows, -(-what.k // vector))
        first, second = (
            scaled.Scale(view.shape, view.strides, "swizzled", view.dtype)
            for view in (views["scale_a"], views["scale_b"])
        )
        return scaled.Scales(first, second)
    if what.a.dtype not in FP8_TYPES:
        raise UnsupportedError(
            f"{', '.join(given)}: only fp8 kernels take arrays; give numbers, or fold them into alpha"
        )
    found = {}
    for name in given:
        view = views[name]
        if operands.dtype_of(view, name) is not CutlassDtype.F32:
            raise InvalidOperandError(f"{name} is {operands.dtype_of(view, name).value}; expected float32")
        found[name] = MatrixSpec(view.shape, view.strides, CutlassDtype.F32)
    forms = scaled.scale_forms(what, found.get("scale_a"), found.get("scale_b"))

    def scale(name: str, form: str = "tensor") -> scaled.Scale | None:
        spec = found.get(name)
        return None if spec is None else scaled.Scale(spec.shape, spec.strides, form)

    return scaled.Scales(scale("scale_a", forms[0]), scale("scale_b", forms[1]), scale("scale_d"), scale("amax"))


def check_single(views: dict[str, _core.Operand]) -> None:
    """Refuses scale_d and amax that are not one float32.

    Raises:
        InvalidOperandError: names the array.
    """
    for name in ("scale_d", "amax"):
        view = views.get(name)
        if view is None:
            continue
        if operands.dtype_of(view, name) is not CutlassDtype.F32:
            raise InvalidOperandError(f"{name} is {operands.dtype_of(view, name).value}; expected float32")
        if math.prod(view.shape) != 1:
            raise InvalidOperandError(f"{name} has shape {view.shape}; expected one element")


def _result_shape(views: dict[str, _core.Operand]) -> tuple[int, ...]:
    a, b = views["a"].shape, views["b"].shape
    for name in ("a", "b"):
        if len(views[name].shape) < 2:
            raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected at least 2 dimensions")
    if a[-1] != b[-2]:
        raise InvalidOperandError(f"K disagrees: a {a} has {a[-1]} columns, b {b} has {b[-2]} rows")
    shape = (*problem.broadcast_batches(a[:-2], b[:-2]), a[-2], b[-1])
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
