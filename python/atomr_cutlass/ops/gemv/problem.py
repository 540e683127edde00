"""Matrix times vector as a GEMM of one row: y^T = x^T A^T."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ...epilogue.bound import Layout
from ...epilogue.results import MatrixResult
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import Input, Output
from ...generator.families.gemv import TYPES
from ...pipeline.problem import GemmProblem, MatrixSpec, broadcast_batches, broadcasts_to, views

Shape = tuple[int, ...]


def product(specs: Mapping[str, MatrixSpec], math: str, device: int) -> GemmProblem:
    """The GEMM of arrays by name: `a`, (..., M, K), is its B, transposed; `x`, `c` and `out` are rows.

    Raises:
        InvalidOperandError, UnsupportedError: an array that kernels cannot read, by its name.
    """
    matrices = dict(specs)
    for name, spec in specs.items():
        if name != "a":
            matrices[name] = dataclasses.replace(spec, shape=_as_row(spec.shape, 1), strides=_as_row(spec.strides, 0))
        views(matrices[name], name)
    b = transposed(matrices["a"])
    return GemmProblem(a=matrices["x"], b=b, c=matrices.get("c"), d=matrices["out"], math=math, device=device)


def transposed(spec: MatrixSpec) -> MatrixSpec:
    """A matrix with its rows as columns."""
    return dataclasses.replace(spec, shape=_turned(spec.shape), strides=_turned(spec.strides))


def vector_of(spec: MatrixSpec) -> MatrixSpec:
    """A matrix of one row as a vector."""
    return dataclasses.replace(spec, shape=_vector(spec.shape), strides=_vector(spec.strides))


def check_types(dtype: CutlassDtype, math: str) -> None:
    """Refuses element types and math modes that the kernels do not have.

    Raises:
        UnsupportedError: names the cure.
    """
    if dtype not in TYPES:
        valid = ", ".join(each.value for each in TYPES)
        raise UnsupportedError(
            f"no gemv kernel multiplies {dtype.value}; valid: {valid}; gemm(a, x[..., None]) takes the others"
        )
    if math not in ("default", "ieee"):
        raise UnsupportedError(
            f"precision is {math!r}: gemv multiplies f32 as it is (ieee), which takes no longer; leave precision out"
        )


def result_shape(shapes: Mapping[str, Shape]) -> Shape:
    """The extents of A x, of the extents of arrays by name.

    Raises:
        InvalidOperandError: there are no matrices and vectors, or something does not fit; names the array.
    """
    a, x, c = shapes["a"], shapes["x"], shapes.get("c")
    if len(a) < 2 or not x:
        raise InvalidOperandError(f"a has shape {a} and x {x}; expected (..., M, K) and (..., K)")
    if a[-1] != x[-1]:
        raise InvalidOperandError(f"K disagrees: a {a} has {a[-1]} columns, x {x} has {x[-1]} elements")
    result = (*broadcast_batches(a[:-2], x[:-1], "x"), a[-2])
    if c is not None and (c[-1:] != result[-1:] or not broadcasts_to(c[:-1], result[:-1])):
        raise InvalidOperandError(f"c has shape {c}; expected {result}, or batch dimensions that broadcast to it")
    for name, expected in (("out", result), ("bias", result[-1:])):
        if name in shapes and shapes[name] != expected:
            raise InvalidOperandError(f"{name} has shape {shapes[name]}; expected {expected}")
    return result


class VectorResult(MatrixResult):
    """Vectors: to an epilogue's tree, matrices of one row.

    Attributes:
        shape: (..., M).
    """

    @property
    def matrix(self) -> Shape:
        """(..., 1, M)."""
        return (*self.shape[:-1], 1, self.shape[-1])

    def as_matrix(self, name: str, shape: Shape, strides: Shape) -> Layout:
        """Extents and strides of an array as the tree sees it."""
        return _as_row(shape, 1), _as_row(strides, 0)

    def array_shape(self, operand: Input | Output) -> Shape:
        """The extents of the array for an operand: matrices and masks have the result's batches."""
        shape = super().array_shape(operand)
        return shape if len(shape) == 1 or (isinstance(operand, Output) and operand.reduction) else _vector(shape)

    def _placed(self, name: str, shape: Shape, strides: Shape, reduction: str) -> tuple[Shape, Shape, Layout | None]:
        seen = (shape, strides) if reduction else self.as_matrix(name, shape, strides)
        return (*seen, (shape, strides))


def _as_row(values: Sequence[int], extra: int) -> Shape:
    return (*values[:-1], extra, *values[-1:])


def _vector(values: Shape) -> Shape:
    """Extents or strides of a matrix of one row without those of its rows."""
    return (*values[:-2], values[-1])


def _turned(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])
