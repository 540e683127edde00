"""Element types as callers name them: this package's, a name, NumPy's, PyTorch's or DLPack's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.numerics import from_numpy_dtype
from ..arrays.views import BYTE
from ..checks import shown
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype


def element_type(dtype: Any, label: str) -> CutlassDtype:
    """The element type that `dtype` names.

    Args:
        dtype: a CutlassDtype, a name such as `bf16`, a dtype of NumPy, ml_dtypes or PyTorch, or DLPack's (type code,
            bits).
        label: the name of its owner in messages.

    Raises:
        InvalidOperandError: it names none.
    """
    if isinstance(dtype, CutlassDtype):
        return dtype
    found: CutlassDtype | None = None
    if isinstance(dtype, tuple):
        pair = len(dtype) == 2 and all(isinstance(element, int) for element in dtype)
        found = CutlassDtype.from_dlpack(*dtype) if pair else None
    elif isinstance(dtype, str) or _is_torch(dtype):
        try:
            return CutlassDtype.parse(_name(dtype))
        except ValueError as error:
            raise InvalidOperandError(f"{label}: {error}") from None
    elif dtype is not None:  # which NumPy reads as float64
        try:
            found = from_numpy_dtype(np.dtype(dtype))
        except (TypeError, ValueError):
            found = None
    if found is None:
        valid = ", ".join(element.value for element in CutlassDtype)
        given = str(dtype) if isinstance(dtype, np.dtype) else shown(dtype)
        raise InvalidOperandError(f"{label}: {given} is no element type; valid: {valid}")
    return found


def is_byte(dtype: Any) -> bool:
    """Whether `dtype` names plain bytes, which masks lie in."""
    if isinstance(dtype, tuple):
        return len(dtype) == 2 and all(isinstance(element, int) for element in dtype) and dtype == BYTE
    if isinstance(dtype, str) or _is_torch(dtype):
        return _name(dtype) == "uint8"
    if dtype is None or isinstance(dtype, CutlassDtype):
        return False
    try:
        return bool(np.dtype(dtype) == np.uint8)
    except (TypeError, ValueError):
        return False


def _is_torch(dtype: Any) -> bool:
    return type(dtype).__module__.partition(".")[0] == "torch"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
