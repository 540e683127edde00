"""The device and the element type of a view of an array, a `_core.Operand`, by DLPack's numbers."""

from __future__ import annotations

from .. import _core
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype

CPU = 1  # DLDeviceType
CUDA = 2
PINNED = 3
MANAGED = 13

BYTE = (1, 8)
"""DLPack's (type code, bits) of plain bytes: packed fp4, and e8m0 scales where a framework does not know them."""


def dtype_of(operand: _core.Operand, name: str) -> CutlassDtype:
    """The operand's element type.

    Raises:
        InvalidOperandError: no kernel knows it.
    """
    dtype = CutlassDtype.from_dlpack(*operand.dtype)
    if dtype is None:
        valid = ", ".join(d.numpy_name for d in CutlassDtype if d is not CutlassDtype.TF32)
        code, bits = operand.dtype
        raise InvalidOperandError(f"{name} has elements of DLPack type {code} with {bits} bits; kernels know {valid}")
    return dtype
