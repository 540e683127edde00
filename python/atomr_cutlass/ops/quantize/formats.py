"""Quantized matrices as arrays: the element types and shapes of scales, and values and scales made by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.numerics import numpy_dtype, saturating_cast
from ...arrays.operands import BYTE
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.families.quantize import FORMS, scale_type
from . import reference as quantization
from .reference import swizzled_size

D = CutlassDtype

SCALE_ELEMENTS: dict[ScaleType, tuple[str, tuple[tuple[int, int], ...]]] = {
    ScaleType.F32: ("f32", (D.F32.dlpack,)),
    ScaleType.UE4M3: ("e4m3", (D.F8E4M3.dlpack,)),
    ScaleType.UE8M0: ("e8m0, or its bytes (uint8)", (BYTE, ScaleType.UE8M0.dlpack)),
}
"""Element types of scale arrays: in words, and as DLPack's (type code, bits)."""


def scales_shape(shape: tuple[int, ...], scaling: str) -> tuple[int, ...]:
    """The shape of the array of a matrix's scales."""
    rows, columns = shape
    if scale_type(scaling) is not ScaleType.F32:
        return (swizzled_size(rows, columns // FORMS[scaling][1][1]),)
    return {
        "tensor": (1,),
        "row": (rows, 1),
        "block": (rows, -(-columns // 128)),
        "tile": (-(-rows // 128), -(-columns // 128)),
    }[scaling]


def quantized(
    x: np.ndarray[Any, Any], narrow: CutlassDtype, scaling: str, global_scale: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and scales by NumPy, as arrays of `quantize`: fp4 packed, its scales swizzled."""
    if scaling == "nvfp4":
        made = quantization.quantize_nvfp4(x, global_scale=global_scale)
    elif scaling == "mxfp4":
        made = quantization.quantize_mxfp4(x)
    else:
        if scaling in ("block", "tile"):
            values, scale = quantization.quantize_blockwise(x, narrow, block=FORMS[scaling][1])
        else:
            values, scale = quantization.quantize(x, narrow, axis=None if scaling == "tensor" else -1)
        return values, scale.reshape(scales_shape(x.shape, scaling))
    swizzled = quantization.swizzle_scales(made.scale)
    return quantization.pack_fp4(made.values), swizzled.view(np.uint8) if scaling == "mxfp4" else swizzled


def dequantized(
    values: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    shape: tuple[int, ...],
    scaling: str,
    global_scale: float,
    wide: CutlassDtype,
) -> np.ndarray[Any, Any]:
    """The matrix that such values and scales are of, by NumPy, in the element type `wide`."""
    if scaling in ("nvfp4", "mxfp4"):
        plain = quantization.unswizzle_scales(scales, shape[0], shape[1] // FORMS[scaling][1][1])
        if scaling == "mxfp4":
            plain = plain.view(numpy_dtype(ScaleType.UE8M0))
        made = quantization.BlockScaled(quantization.unpack_fp4(values), plain, global_scale)
        return saturating_cast(quantization.dequantize_fp4(made), wide)
    if scaling in ("block", "tile"):
        return saturating_cast(quantization.dequantize_blockwise(values, scales, block=FORMS[scaling][1]), wide)
    return saturating_cast(quantization.dequantize(values, scales), wide)
