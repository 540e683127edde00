"""Checks of arguments that all operations share."""

from __future__ import annotations

import numpy as np

from ..arrays.numerics import FAST, FP8_DTYPES, MATH_MODES, AnyArray, from_numpy_dtype
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype


def element_type(name: str, operand: AnyArray) -> CutlassDtype:
    """The element type of an operand.

    Raises:
        InvalidOperandError: it has none; names the operand and the valid ones.
    """
    dtype = from_numpy_dtype(operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is d.storage)
        order = "" if operand.dtype.isnative else " in foreign byte order"
        raise InvalidOperandError(f"{name} is {operand.dtype}{order}; expected one of {valid}")
    return dtype


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without extending it."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def check_math(math: str, *operands: CutlassDtype) -> None:
    """Refuses a math mode that does not exist, or that the operands' element types do not have.

    Raises:
        InvalidOperandError: names the mode and the element type.
    """
    if math == FAST and all(dtype in FP8_DTYPES for dtype in operands):
        return
    if math not in MATH_MODES:
        valid = ", ".join(MATH_MODES)
        raise InvalidOperandError(f"math is {math!r}; expected one of {valid}, or for fp8 also {FAST}")
    if math in ("tf32", "3xtf32"):
        for dtype in operands:
            if dtype.storage is not CutlassDtype.F32:
                raise InvalidOperandError(f"math is {math!r}, but an operand is {dtype.value}: it needs float32")
