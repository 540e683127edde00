"""Block scales and packed fp4 in NumPy: how many elements share a scale, and the order in which GPUs read both."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype, ScaleType
from .numerics import AnyArray, from_numpy_dtype, numpy_dtype

VECTOR: Final = {ScaleType.UE4M3: 16, ScaleType.UE8M0: 32}
"""Elements of K that share a scale of this type: nvfp4's, mxfp4's."""

BLOCK: Final = 128
"""Elements of K, and columns of B, that share a scale of a block; each row of A has its own."""

SCALE_TILE: Final = (128, 4)
"""Rows and columns of scales that are contiguous in the swizzled form."""


def pack_fp4(values: AnyArray) -> npt.NDArray[np.uint8]:
    """Packs fp4 two to a byte along the last dimension, the even element in the low four bits.

    Args:
        values: (..., N) of ml_dtypes.float4_e2m1fn, N even.

    Returns:
        uint8 of shape (..., N / 2), as the GPU reads them.

    Raises:
        InvalidOperandError: another dtype, a scalar or an odd N.
    """
    if from_numpy_dtype(values.dtype) is not CutlassDtype.F4E2M1:
        raise InvalidOperandError(f"values is {values.dtype}; expected float4_e2m1fn")
    if values.ndim == 0 or values.shape[-1] % 2:
        raise InvalidOperandError(f"values has shape {values.shape}; two elements share a byte, so N must be even")
    nibbles = np.ascontiguousarray(values).view(np.uint8) & np.uint8(0xF)
    packed: npt.NDArray[np.uint8] = nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
    return packed


def unpack_fp4(packed: npt.NDArray[np.uint8]) -> AnyArray:
    """Undoes `pack_fp4`.

    Args:
        packed: uint8 of shape (..., N / 2).

    Returns:
        ml_dtypes.float4_e2m1fn of shape (..., N).

    Raises:
        InvalidOperandError: another dtype or a scalar.
    """
    if packed.dtype != np.uint8 or packed.ndim == 0:
        raise InvalidOperandError(f"packed is {packed.dtype} of shape {packed.shape}; expected uint8 (..., N / 2)")
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.uint8)
    out[..., 0::2] = packed & np.uint8(0xF)
    out[..., 1::2] = packed >> np.uint8(4)
    return out.view(numpy_dtype(CutlassDtype.F4E2M1))


def swizzled_size(rows: int, columns: int) -> int:
    """How many scales the swizzled form of (rows, columns) has, padding included."""
    return -(-rows // SCALE_TILE[0]) * -(-columns // SCALE_TILE[1]) * SCALE_TILE[0] * SCALE_TILE[1]


def swizzle_scales(plain: AnyArray) -> AnyArray:
    """Block scales in the order in which sm_100 and sm_120 read them.

    The matrix is padded to tiles of 128 x 4, which follow each other row by row of tiles. Within a tile, row r and
    column c lie at (r % 32) * 16 + (r // 32) * 4 + c. This is the layout that CUTLASS 4.2 defines in
    cutlass/detail/sm100_blockscaled_layout.hpp: the atom there, shape ((32, 4), (vector, 4)) with strides
    ((16, 4), (0, 1)), repeated over (M, K) by `tile_to_shape` with the tiles of K next to each other
    (`Step<_2, _1, _3>`). cuBLASLt reads the same.

    Args:
        plain: (..., rows, K / vector) of any dtype of one byte or more. Rows are those of A, or the *columns* of B:
            for scales (K / vector, N) of B give `scale_b.swapaxes(-1, -2)`.

    Returns:
        (..., swizzled_size(rows, K / vector)) of the same dtype, one matrix after the other. Padding is zero bits.

    Raises:
        InvalidOperandError: plain is no matrix.
    """
    if plain.ndim < 2:
        raise InvalidOperandError(f"plain has shape {plain.shape}; expected (..., rows, columns)")
    batch, (rows, columns) = plain.shape[:-2], plain.shape[-2:]
    padded = np.zeros((*batch, rows + -rows % SCALE_TILE[0], columns + -columns % SCALE_TILE[1]), plain.dtype)
    padded[..., :rows, :columns] = plain
    # (tiles of rows, 4, 32, tiles of columns, 4), which the offset above orders as (tiles, tiles, 32, 4, 4).
    split = padded.reshape(*batch, padded.shape[-2] // 128, 4, 32, padded.shape[-1] // 4, 4)
    flat: AnyArray = split.swapaxes(-4, -2).reshape(*batch, swizzled_size(rows, columns))
    return flat


def unswizzle_scales(flat: AnyArray, rows: int, columns: int) -> AnyArray:
    """Undoes `swizzle_scales`.

    Args:
        flat: (..., swizzled_size(rows, columns)).
        rows: of the plain matrix.
        columns: of the plain matrix.

    Returns:
        (..., rows, columns).

    Raises:
        InvalidOperandError: flat has another length.
    """
    if flat.ndim == 0 or flat.shape[-1] != swizzled_size(rows, columns):
        raise InvalidOperandError(
            f"flat has shape {flat.shape}; scales of {rows} x {columns} take (..., {swizzled_size(rows, columns)})"
        )
    batch = flat.shape[:-1]
    row_tiles, column_tiles = -(-rows // SCALE_TILE[0]), -(-columns // SCALE_TILE[1])
    tiles = flat.reshape(*batch, row_tiles, column_tiles, 32, 4, 4).swapaxes(-4, -2)
    padded: AnyArray = tiles.reshape(*batch, row_tiles * SCALE_TILE[0], column_tiles * SCALE_TILE[1])
    return padded[..., :rows, :columns]
