"""Arrays of `gemm` as a product, its scales, and the problem that these and an epilogue tree make of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from ... import _core
from ...arrays import fp4, operands
from ...epilogue import bound as fused
from ...epilogue.bound import Fusion
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.epilogue.lower import is_gated
from ...generator.rules import FP8_TYPES
from ...pipeline.problem import GemmProblem, MatrixSpec
from ..quantize.reference import BLOCK, VECTOR

PER_PAIR = 2
"""Columns of a gated product that make one of D."""

SCALES = ("scale_a", "scale_b", "scale_d", "amax")
"""Scale arrays in the order in which plans take them."""


@dataclass(frozen=True)
class Scale:
    """The layout of a scale array.

    Attributes:
        form: `tensor` (one number), `vector` (one for each row of A, or column of B), `block`, or fp4's `swizzled`:
            those of a matrix one after the other, (..., count).
        dtype: DLPack's (type code, bits).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    form: str
    dtype: tuple[int, int] = CutlassDtype.F32.dlpack

    @property
    def alignment(self) -> int:
        """Bytes that its address must be a multiple of."""
        return fp4.SCALE_ALIGNMENT if self.form == "swizzled" else 4


class Scales(NamedTuple):
    """The scales of a GEMM that are arrays, in the order of SCALES; None where there is none."""

    a: Scale | None = None
    b: Scale | None = None
    d: Scale | None = None
    amax: Scale | None = None

    @property
    def form(self) -> str:
        """That of the scales of A: of B they are `block` (in float32) or `swizzled` (of fp4) where these are."""
        return "" if self.a is None else self.a.form


NO_SCALES = Scales()


def problem_of(views: dict[str, _core.Operand], math: str) -> GemmProblem:
    """The problem of GPU arrays by name, `out` among them."""

    def spec(name: str) -> MatrixSpec:
        view = views[name]
        if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
            return fp4.logical(view, name)
        return MatrixSpec.of(view, name)

    c = spec("c") if "c" in views else None
    return GemmProblem(a=spec("a"), b=spec("b"), c=c, d=spec("out"), math=math, device=views["a"].device)


def scales_of(problem: GemmProblem, views: dict[str, _core.Operand]) -> Scales:
    """The layouts of the scales that are arrays; others than kernels take are refused."""
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
    """Refuses scale_d and amax that are not one float32."""
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


def scale_shapes(m: int, n: int, k: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The extents of scale_a and scale_b in float32 by their form."""
    k_blocks, n_blocks = -(-k // BLOCK), -(-n // BLOCK)
    return {"tensor": ((1,), (1,)), "vector": ((m, 1), (1, n)), "block": ((m, k_blocks), (k_blocks, n_blocks))}


def scale_forms(problem: GemmProblem, a: MatrixSpec | None, b: MatrixSpec | None) -> tuple[str, str]:
    """The forms of scale_a and scale_b of these extents: `tensor`, `vector` or, for both or neither, `block`."""
    shapes = scale_shapes(problem.m, problem.n, problem.k)
    given = tuple(() if spec is None else spec.shape for spec in (a, b))
    found = []
    for name, shape, vector, block in zip(SCALES, given, shapes["vector"], shapes["block"], strict=False):
        if math.prod(shape) == 1:
            found.append("tensor")
        elif shape[-2:] not in (vector, block):
            raise InvalidOperandError(
                f"{name} has shape {shape}; expected one element, {vector} or, for blocks of {BLOCK}, {block}"
            )
        else:
            found.append("vector" if shape[-2:] == vector else "block")
    if "block" not in found:
        return found[0], found[1]
    # One block of K: a column of scales of A serves as either.
    if tuple(shape[-2:] for shape in given) != shapes["block"]:
        raise InvalidOperandError(
            f"scale_a has shape {given[0][-2:]} and scale_b {given[1][-2:]}; block scales are {shapes['block'][0]} and "
            f"{shapes['block'][1]}, both or neither"
        )
    return "block", "block"


def with_scales(problem: GemmProblem, scales: Scales) -> GemmProblem:
    """The problem with the epilogue or the block scales that these scales need."""
    if scales == NO_SCALES or is_gated(problem.epilogue):
        return problem
    if scales.a is not None and scales.form == "swizzled":
        kind = fp4.scale_type(scales.a.dtype, "scale_a")
        shared = (1, 1, VECTOR[kind])
        return dataclasses.replace(problem, epilogue="lc", scale_granularity=shared, scale_type=kind.value)
    quantized = scales.d is not None or scales.amax is not None
    if scales.form != "block":
        return dataclasses.replace(problem, epilogue="scaled", quantized=quantized)
    epilogue = "scaled" if quantized else "lc"
    return dataclasses.replace(
        problem, epilogue=epilogue, scale_granularity=(1, BLOCK, BLOCK), scale_type=ScaleType.F32.value
    )


def result_of(problem: GemmProblem) -> MatrixSpec:
    """D in memory, which with a gated epilogue is half as wide as the product, with half the strides."""
    d = problem.d
    if not is_gated(problem.epilogue):
        return d
    strides = (*(stride // PER_PAIR for stride in d.strides[:-1]), 1)
    return dataclasses.replace(d, shape=(*d.shape[:-1], d.shape[-1] // PER_PAIR), strides=strides)


def rewritten(problem: GemmProblem, scales: Scales = NO_SCALES, fusion: Fusion | None = None) -> list[GemmProblem]:
    """The formulations of the problem with scales and a tree, preferred ones first."""
    scaled = with_scales(problem, scales)
    return [scaled] if fusion is None else fused.problem_of(scaled, fusion, scaled.epilogue)
