"""Arguments of `gemm`: the arrays' shapes, element types, scales and math mode."""

from __future__ import annotations

import math
from typing import NamedTuple

from ... import _core
from ...arrays import fp4, operands
from ...arrays.arguments import check_devices, check_out, result_dtype
from ...arrays.numerics import math_mode
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.rules import FP8_TYPES
from ...pipeline import problem
from ...pipeline.operand_table import spec_of
from ...pipeline.problem import GemmProblem, MatrixSpec
from ..quantize.reference import VECTOR
from . import scaled

SCALES = ("scale_a", "scale_b", "scale_d", "amax")
"""Scale arrays in the order in which plans take them."""


class Operation(NamedTuple):
    """The arrays' views by name, the result's shape and dtype, and the math mode."""

    views: dict[str, _core.Operand]
    shape: tuple[int, ...]
    dtype: CutlassDtype
    dtype_b: CutlassDtype
    result: CutlassDtype
    math: str


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
    math = math_mode(dtype, precision, fast_accum=fast_accum)
    return Operation(views, shape, dtype, other, result_dtype(views, out_dtype, dtype, fused=fused), math)


def problem_of(views: dict[str, _core.Operand], math: str) -> GemmProblem:
    """The problem of GPU arrays by name, `out` among them."""

    def spec(name: str) -> MatrixSpec:
        view = views[name]
        if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
            return fp4.logical(view, name)
        return spec_of(view, name)

    return GemmProblem(
        a=spec("a"),
        b=spec("b"),
        c=spec("c") if "c" in views else None,
        d=spec("out"),
        math=math,
        device=views["a"].device,
    )


def scales_of(problem: GemmProblem, views: dict[str, _core.Operand]) -> scaled.Scales:
    """The layouts of the scales that are arrays; `NO_SCALES` without any.

    Raises:
        InvalidOperandError: of another element type or shape than kernels take.
        UnsupportedError: the element types of A and B come without scale arrays, or (fp4) not without.
    """
    given = sorted(set(views) & set(SCALES))
    if not given:
        return scaled.NO_SCALES
    if problem.a.dtype is fp4.FP4:
        vector = VECTOR[fp4.kind_of(views)]
        for name, rows in (("scale_a", problem.m), ("scale_b", problem.n)):
            fp4.check_swizzled(views[name], name, rows, -(-problem.k // vector))
        first, second = (
            scaled.Scale(view.shape, view.strides, "swizzled", view.dtype)
            for view in (views["scale_a"], views["scale_b"])
        )
        return scaled.Scales(first, second)
    if problem.a.dtype not in FP8_TYPES:
        raise UnsupportedError(
            f"{', '.join(given)}: only fp8 kernels take arrays; give numbers, or fold them into alpha"
        )
    found = {}
    for name in given:
        view = views[name]
        if operands.dtype_of(view, name) is not CutlassDtype.F32:
            raise InvalidOperandError(f"{name} is {operands.dtype_of(view, name).value}; expected float32")
        found[name] = MatrixSpec(view.shape, view.strides, CutlassDtype.F32)
    forms = scaled.scale_forms(problem, found.get("scale_a"), found.get("scale_b"))

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
