"""Scales of a product's operands: their forms, and how they enter the product."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ..arrays.numerics import AnyArray, FloatArray, from_numpy_dtype, scale_type_of, to_float64
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from ..ops.quantize.reference import BLOCK, VECTOR
from .parts import broadcasts_to

Scale: TypeAlias = float | AnyArray
"""A scale factor: one number, or an array with one for each row of A (column of B) or for each block of it."""

_OUTER_TYPES: Final = frozenset({CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F32, CutlassDtype.F64})


class OperandScale(NamedTuple):
    """One operand's scale, in float64.

    Attributes:
        outer: the factor of the product: a number, (..., M, 1) or (..., 1, N).
        blocks: (..., M, blocks of K) for A, (..., blocks of K, N) for B; None where nothing varies along K.
        step: elements of K in a block; 0 without blocks.
        kind: the type of an fp4 scale; None for any other.
    """

    outer: float | FloatArray = 1.0
    blocks: FloatArray | None = None
    step: int = 0
    kind: ScaleType | None = None

    def absolute(self) -> OperandScale:
        """The same with magnitudes."""
        return self._replace(outer=np.abs(self.outer), blocks=None if self.blocks is None else np.abs(self.blocks))


def read_scales(
    a: AnyArray, b: AnyArray, scale_a: Scale | None, scale_b: Scale | None
) -> tuple[OperandScale, OperandScale]:
    """The scales of A (..., M, K) and B (..., K, N), checked.

    Raises:
        InvalidOperandError: names the scale, its shape or dtype and the expected one.
    """
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    first = _read("scale_a", scale_a, a, batch, along=-1)
    second = _read("scale_b", scale_b, b, batch, along=-2)
    if first.kind is not second.kind:
        kinds = [scale.kind.value if scale.kind else "none" for scale in (first, second)]
        raise InvalidOperandError(
            f"fp4 block scales are {kinds[0]} in scale_a and {kinds[1]} in scale_b; expected one type in both"
        )
    return first, second


def _read(name: str, scale: Scale | None, operand: AnyArray, batch: tuple[int, ...], along: int) -> OperandScale:
    if scale is None:
        return OperandScale()
    scale = _as_array(name, scale)
    kind = scale_type_of(scale.dtype)
    if kind in VECTOR:
        return _read_vector(name, scale, kind, operand, batch, along)
    if from_numpy_dtype(scale.dtype) not in _OUTER_TYPES:
        raise InvalidOperandError(f"{name} is {scale.dtype}; expected float32")
    wide = to_float64(scale)
    dims = scale.shape
    if scale.size == 1:
        return OperandScale(outer=float(wide.reshape(())))
    rows, columns = operand.shape[-2:]
    extent = operand.shape[along]
    blocks = -(-extent // BLOCK)
    if along == -1:
        outer, blockwise = (rows, 1), (rows, blocks)
    else:
        outer, blockwise = (1, columns), (blocks, -(-columns // BLOCK))
    fits = len(dims) >= 2 and broadcasts_to(dims[:-2], batch)
    if fits and dims[-2:] in (outer, (1, 1)):
        return OperandScale(outer=wide)
    if fits and dims[-2:] == blockwise:
        if along == -2:
            wide = np.repeat(wide, BLOCK, axis=-1)[..., :columns]
        return OperandScale(blocks=wide, step=BLOCK)
    expected = f"a number, (..., {outer[0]}, {outer[1]})"
    if blockwise != outer:
        expected += f", or (..., {blockwise[0]}, {blockwise[1]}) in blocks of {BLOCK}"
    raise InvalidOperandError(f"{name} has shape {dims}; expected {expected}")


def _as_array(name: str, scale: Scale) -> AnyArray:
    if isinstance(scale, np.ndarray):
        return scale
    try:
        return np.asarray(scale, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidOperandError(f"{name} is {scale!r}; expected a number or an array") from None


def _read_vector(
    name: str, scale: AnyArray, kind: ScaleType, operand: AnyArray, batch: tuple[int, ...], along: int
) -> OperandScale:
    """nvfp4's or mxfp4's scales, in their plain form."""
    if from_numpy_dtype(operand.dtype) is not CutlassDtype.F4E2M1:
        raise InvalidOperandError(f"{name} is {scale.dtype}, which scales fp4; the operand is {operand.dtype}")
    step = VECTOR[kind]
    blocks = -(-operand.shape[along] // step)
    expected = (operand.shape[-2], blocks) if along == -1 else (blocks, operand.shape[-1])
    if scale.ndim < 2 or scale.shape[-2:] != expected or not broadcasts_to(scale.shape[:-2], batch):
        raise InvalidOperandError(
            f"{name} has shape {scale.shape}; expected (..., {expected[0]}, {expected[1]}): one {kind.value} scale "
            f"for each {step} elements of K"
        )
    wide = to_float64(scale)
    if kind is ScaleType.UE4M3 and np.signbit(wide).any():
        raise InvalidOperandError(f"{name} holds negative values; ue4m3 has no sign")
    return OperandScale(blocks=wide, step=step, kind=kind)


def scaled_product(a: FloatArray, b: FloatArray, scale_a: OperandScale, scale_b: OperandScale) -> FloatArray:
    """The product with everything that varies along K, without the outer scales.

    In blocks of 128 every block's product is scaled as a whole, like kernels do, so that an infinite scale meets a
    sum and not its terms.
    """
    total: FloatArray
    if scale_a.step == scale_b.step == 0:
        total = np.matmul(a, b)
        return total
    if scale_a.kind is not None:
        total = np.matmul(_spread(a, scale_a, -1), _spread(b, scale_b, -2))
        return total
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    for block, start in enumerate(range(0, a.shape[-1], BLOCK)):
        part = np.matmul(a[..., start : start + BLOCK], b[..., start : start + BLOCK, :])
        if scale_a.blocks is not None:
            part *= scale_a.blocks[..., block, None]
        if scale_b.blocks is not None:
            part *= scale_b.blocks[..., block, None, :]
        total += part
    return total


def _spread(operand: FloatArray, scale: OperandScale, along: int) -> FloatArray:
    """The operand with its fp4 scales applied. None of them is infinite, so terms may be scaled instead of sums."""
    if scale.blocks is None:
        return operand
    factors = np.repeat(scale.blocks, scale.step, axis=along)
    return operand * (factors[..., : operand.shape[-1]] if along == -1 else factors[..., : operand.shape[-2], :])
