"""Scales of a GEMM that are arrays on the device, and the problem that they and an epilogue tree make of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from ...arrays import fp4
from ...epilogue import bound as fused
from ...epilogue.bound import Fusion
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.epilogue.lower import is_gated
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
        shape, strides: in elements.
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
    """The scales of a GEMM that are arrays, in the order of SCALES; None where there is none.

    Attributes:
        a, b: of A and B.
        d: of D, one number.
        amax: where the largest magnitude of D before scale_d goes.
    """

    a: Scale | None = None
    b: Scale | None = None
    d: Scale | None = None
    amax: Scale | None = None

    @property
    def block(self) -> bool:
        """Whether they are block scales in float32."""
        return self.a is not None and self.a.form == "block"

    @property
    def swizzled(self) -> bool:
        """Whether they are the block scales of fp4."""
        return self.a is not None and self.a.form == "swizzled"


NO_SCALES = Scales()


def scale_forms(problem: GemmProblem, a: MatrixSpec | None, b: MatrixSpec | None) -> tuple[str, str]:
    """The forms of scale arrays of these shapes: `tensor`, `vector` or `block`.

    Args:
        problem: the product.
        a: shape and strides of scale_a: one element, (..., M, 1), or with block scales (M, ceil(K / 128)).
        b: of scale_b: one element, (..., 1, N), or with block scales (ceil(K / 128), ceil(N / 128)).

    Raises:
        InvalidOperandError: another shape, or block scales of one operand only.
    """
    k_blocks, n_blocks = -(-problem.k // BLOCK), -(-problem.n // BLOCK)
    found = []
    for name, spec, vector, block in (
        ("scale_a", a, (problem.m, 1), (problem.m, k_blocks)),
        ("scale_b", b, (1, problem.n), (k_blocks, n_blocks)),
    ):
        if spec is None or math.prod(spec.shape) == 1:
            found.append("tensor")
        elif spec.shape[-2:] not in (vector, block):
            raise InvalidOperandError(
                f"{name} has shape {spec.shape}; expected one element, {vector} or, for blocks of {BLOCK}, {block}"
            )
        else:
            found.append("vector" if spec.shape[-2:] == vector else "block")
    if "block" not in found:
        return found[0], found[1]
    # One block of K: a column of scales of A serves as either.
    shapes = (a.shape[-2:] if a else (), b.shape[-2:] if b else ())
    if shapes != ((problem.m, k_blocks), (k_blocks, n_blocks)):
        raise InvalidOperandError(
            f"scale_a has shape {shapes[0]} and scale_b {shapes[1]}; block scales are {(problem.m, k_blocks)} and "
            f"{(k_blocks, n_blocks)}, both or neither"
        )
    return ("block", "block")


def problem_of(problem: GemmProblem, scales: Scales) -> GemmProblem:
    """The problem with the epilogue or the block scales that these scales need."""
    if scales == NO_SCALES or is_gated(problem.epilogue):
        return problem
    if scales.swizzled and scales.a is not None:
        kind = fp4.scale_type(scales.a.dtype, "scale_a")
        shared = (1, 1, VECTOR[kind])
        return dataclasses.replace(problem, epilogue="lc", scale_granularity=shared, scale_type=kind.value)
    quantized = scales.d is not None or scales.amax is not None
    if not scales.block:
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
    scaled = problem_of(problem, scales)
    return [scaled] if fusion is None else fused.problem_of(scaled, fusion, scaled.epilogue)
