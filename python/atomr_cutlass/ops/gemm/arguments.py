"""Arrays of `gemm` as a product and its scales."""

from __future__ import annotations

import math

from ... import _core
from ...arrays import fp4, operands
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.rules import FP8_TYPES
from ...pipeline.problem import GemmProblem, MatrixSpec
from ..quantize.reference import VECTOR
from .scaled import NO_SCALES, SCALES, Scale, Scales, scale_forms


def problem_of(views: dict[str, _core.Operand], math: str) -> GemmProblem:
    """The problem of GPU arrays by name, `out` among them."""

    def spec(name: str) -> MatrixSpec:
        view = views[name]
        if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
            return fp4.logical(view, name)
        return MatrixSpec.of(view, name)

    return GemmProblem(
        a=spec("a"),
        b=spec("b"),
        c=spec("c") if "c" in views else None,
        d=spec("out"),
        math=math,
        device=views["a"].device,
    )


def scales_of(problem: GemmProblem, views: dict[str, _core.Operand]) -> Scales:
    """The layouts of the scales that are arrays; `NO_SCALES` without any.

    Raises:
        InvalidOperandError: of another element type or shape than kernels take.
        UnsupportedError: the element types of A and B come without scale arrays, or (fp4) not without.
    """
    given = sorted(set(views) & set(SCALES))
    if not given:
        return NO_SCALES
    if problem.a.dtype is fp4.FP4:
        vector = VECTOR[fp4.kind_of(views)]
        for name, rows in (("scale_a", problem.m), ("scale_b", problem.n)):
            fp4.check_swizzled(views[name], name, rows, -(-problem.k // vector))
        sides = (views["scale_a"], views["scale_b"])
        return Scales(*(Scale(view.shape, view.strides, "swizzled", view.dtype) for view in sides))
    if problem.a.dtype not in FP8_TYPES:
        raise UnsupportedError(
            f"{', '.join(given)}: only fp8 kernels take arrays; give numbers, or fold them into alpha"
        )
    found = {name: MatrixSpec(views[name].shape, views[name].strides, _float32(views[name], name)) for name in given}
    forms = (*scale_forms(problem, found.get("scale_a"), found.get("scale_b")), "tensor", "tensor")
    specs = zip(map(found.get, SCALES), forms, strict=True)
    return Scales(*(None if spec is None else Scale(spec.shape, spec.strides, form) for spec, form in specs))


def check_single(views: dict[str, _core.Operand]) -> None:
    """Refuses scale_d and amax that are not one float32.

    Raises:
        InvalidOperandError: names the array.
    """
    for name in ("scale_d", "amax"):
        if name in views:
            _float32(views[name], name)
            if math.prod(views[name].shape) != 1:
                raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected one element")


def _float32(view: _core.Operand, name: str) -> CutlassDtype:
    """The element type of a scale array, which is float32."""
    dtype = operands.dtype_of(view, name)
    if dtype is not CutlassDtype.F32:
        raise InvalidOperandError(f"{name} is {dtype.value}; expected float32")
    return dtype
