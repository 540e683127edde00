"""fp4 operands and their block scales: checks, and conversions between the forms of the host and of kernels.

On the GPU two elements share a byte, along K for A and B alike, and scales are flat, in the order of
`quantization.swizzle_scales`. Host arrays may have one element a byte (ml_dtypes.float4_e2m1fn) and plain scales too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from .. import _core
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype, ScaleType
from ..generator.families.quantize import SCALE_TYPES
from ..generator.matrix import is_fp4_supported
from . import operands
from .layouts import MatrixSpec
from .numerics import BYTE, AnyArray, element_of, numpy_dtype, scale_type_of
from .operands import CPU
from .scales import VECTOR, pack_fp4, swizzle_scales, swizzled_size, unpack_fp4, unswizzle_scales

FP4: Final = CutlassDtype.F4E2M1
_ELEMENTS: Final = (BYTE, FP4.dlpack)

SCALINGS: Final = SCALE_TYPES
"""The kinds of fp4, by the type of their scales."""

ALIGNMENT: Final = 32
"""Elements of a vector access: 16 bytes."""

SCALE_ALIGNMENT: Final = 16
"""Bytes that the address of scales must be a multiple of, for TMA."""

ALONG: Final = {"a": -1, "b": -2}
"""The axis of K."""

SCALE_ELEMENTS: Final = {
    ScaleType.F32: (ScaleType.F32.dlpack,),
    ScaleType.UE4M3: (ScaleType.UE4M3.dlpack,),
    ScaleType.UE8M0: (BYTE, ScaleType.UE8M0.dlpack),
}
"""Element types of arrays of scales, as DLPack's (type code, bits), that of new arrays first."""


def element_type(view: _core.Operand, name: str) -> CutlassDtype:
    """The element type of A or B; bytes hold two fp4 elements each."""
    return FP4 if view.dtype == BYTE else operands.dtype_of(view, name)


def logical(view: _core.Operand, name: str) -> MatrixSpec:
    """The packed operand `a` or `b` as a matrix whose shape and strides count elements; it is contiguous along K."""
    along = ALONG[name]
    if view.dtype != BYTE:
        raise InvalidOperandError(
            f"{name} has one fp4 element a byte; GPUs read two: give uint8 of quantization.pack_fp4, or of ac.quantize"
        )
    shape, strides = list(view.shape), [2 * stride for stride in view.strides]
    if view.shape[along] > 1 and view.strides[along] != 1:
        cure = (
            "q.values of q = ac.quantize(a, scaling=...)"
            if name == "a"
            else "the transpose of a uint8 (N, K / 2) array: q.values.T of q = ac.quantize(b.T, scaling=...)"
        )
        raise UnsupportedError(
            f"{name} of shape {view.shape} has strides {view.strides}: fp4 is packed and read along K, so give {cure}"
        )
    shape[along] *= 2
    strides[along] = 1
    return MatrixSpec(tuple(shape), tuple(strides), FP4, view.alignment)


def packed(spec: MatrixSpec, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in bytes of operand `a` or `b`: the inverse of `logical`."""
    along = ALONG[name]
    shape, strides = list(spec.shape), [stride // 2 for stride in spec.strides]
    shape[along] //= 2
    strides[along] = 1
    return tuple(shape), tuple(strides)


def element_name(element: tuple[int, int]) -> str:
    """An element type, DLPack's (type code, bits), in words."""
    if element == BYTE:
        return "bytes"
    found = CutlassDtype.from_dlpack(*element) or ScaleType.from_dlpack(*element)
    return f"DLPack type {element[0]} with {element[1]} bits" if found is None else found.value


def scale_type(dtype: tuple[int, int], name: str) -> ScaleType:
    """The type of scales by DLPack's (type code, bits) of their array, which tells nvfp4 from mxfp4."""
    kind = next((kind for kind in VECTOR if dtype in SCALE_ELEMENTS[kind]), None)
    if kind is None:
        of_nvfp4, of_mxfp4 = (VECTOR[kind] for kind in SCALINGS.values())
        raise InvalidOperandError(
            f"{name} is {element_name(dtype)}; scales of fp4 are e4m3, one for {of_nvfp4} elements of K (nvfp4), or "
            f"e8m0 (which may be called uint8), one for {of_mxfp4} (mxfp4). A factor for everything belongs into alpha"
        )
    return kind


def kind_of(views: Mapping[str, _core.Operand]) -> ScaleType:
    """The type of `scale_a` and `scale_b`, which fp4 needs."""
    for name in ("scale_a", "scale_b"):
        if name not in views:
            raise UnsupportedError(
                f"{name} is missing: fp4 kernels multiply with a scale array for each operand (ac.quantize makes them: "
                "scaling='nvfp4' or 'mxfp4'); factors that are numbers belong into alpha. Bytes are fp4, two elements "
                "each: integers of 8 bits are int8"
            )
    first, second = (scale_type(views[name].dtype, name) for name in ("scale_a", "scale_b"))
    if first is not second:
        kinds = {kind: name for name, kind in SCALINGS.items()}
        raise InvalidOperandError(
            f"scale_a is {kinds[first]}'s ({first.value}) and scale_b {kinds[second]}'s ({second.value}): both are of "
            "one kind"
        )
    return first


def check_swizzled(view: _core.Operand, name: str, rows: int, columns: int) -> None:
    """Refuses scales that kernels cannot read; there are `columns` for each of `rows` rows of A, or columns of B."""
    size = swizzled_size(rows, columns)
    if not view.shape or view.shape[-1] != size:
        plain = view.shape[-2:] in ((rows, columns), (columns, rows))
        cure = (
            ": these are plain, and GPUs read scales in a swizzled order: take those of ac.quantize, or quantization."
            f"swizzle_scales of {'them' if name == 'scale_a' else 'their transpose'} on the host"
            if plain and len(view.shape) >= 2
            else f", as quantization.swizzle_scales or ac.quantize make them for {rows} x {columns}"
        )
        raise InvalidOperandError(f"{name} has shape {view.shape}; expected (..., {size}){cure}")
    if view.strides[-1] != 1 or any(stride % SCALE_ALIGNMENT for stride in view.strides[:-1]):
        raise InvalidOperandError(
            f"{name} has strides {view.strides}: scales of a matrix lie one after the other, those of matrices "
            f"multiples of {SCALE_ALIGNMENT} bytes apart; make them contiguous"
        )
    if view.alignment % SCALE_ALIGNMENT:
        raise InvalidOperandError(
            f"{name} starts at an address that is no multiple of {SCALE_ALIGNMENT} bytes: copy it"
        )


def check_kernels(arch: SmArch, views: Mapping[str, _core.Operand]) -> None:
    """Refuses targets without fp4, and scales that kernels do not take."""
    if not is_fp4_supported(arch):
        raise UnsupportedError(no_kernels(arch))
    kind_of(views)
    for name in ("scale_d", "amax"):
        if name in views:
            cure = "give a number" if name == "scale_d" else "leave it out"
            raise UnsupportedError(f"{name}: fp4 kernels have no scaled epilogue; {cure}, or use backend='reference'")


def no_kernels(arch: SmArch) -> str:
    """The refusal of fp4 for a target without block-scaled tensor cores."""
    valid = " and ".join(supported.value for supported in SmArch if is_fp4_supported(supported))
    return (
        f"no kernel multiplies fp4 on {arch.value}: block-scaled tensor cores came with {valid}; dequantize "
        "(ac.dequantize) and multiply in bf16 there, or backend='reference'"
    )


def plain_forms(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Host arrays by name with fp4 operands unpacked and their scales plain, as the reference takes them."""
    found = dict(arrays)
    for name in ALONG:
        scale = f"scale_{name}"
        if element_of(arrays[name].dtype) not in _ELEMENTS or arrays[name].ndim < 2:
            continue
        values = _turned(arrays[name], name)
        if values.dtype == np.uint8:
            if scale not in arrays:
                raise InvalidOperandError(
                    f"{name} is uint8, which is fp4 packed two to a byte, and {scale} is no array: fp4 comes with "
                    "block scales (ac.quantize); integers of 8 bits are int8"
                )
            values = unpack_fp4(values)
        found[name] = _turned(values, name)
        if scale in arrays:
            found[scale] = _plain(arrays[scale], name, values.shape)
    return found


def _turned(array: AnyArray, name: str) -> AnyArray:
    """`a` or its scales unchanged, `b` or its scales transposed: K is the last axis."""
    return array if name == "a" else array.swapaxes(-1, -2)


def _plain(scale: AnyArray, name: str, values: tuple[int, ...]) -> AnyArray:
    """Block scales of `a` or `b` in the plain form, other arrays unchanged; `values` is the operand's shape, K last."""
    if scale.dtype == np.uint8:
        scale = scale.view(numpy_dtype(ScaleType.UE8M0))
    kind = scale_type_of(scale.dtype)
    if kind not in VECTOR:
        return scale
    rows, columns = values[-2], -(-values[-1] // VECTOR[kind])
    plain = (rows, columns) if name == "a" else (columns, rows)
    size = swizzled_size(rows, columns)
    if scale.shape[-2:] == plain:
        return scale
    if scale.ndim and scale.shape[-1] == size:
        return _turned(unswizzle_scales(scale, rows, columns), name)
    raise InvalidOperandError(
        f"scale_{name} has shape {scale.shape}; expected (..., {plain[0]}, {plain[1]}), or swizzled (..., {size})"
    )


def gpu_forms(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Converts the arrays of `plain_forms` to the forms of the GPU: B is (..., K / 2, N)."""
    found = dict(arrays)
    k = arrays["a"].shape[-1]
    if k % 2:
        raise UnsupportedError(f"K is {k}: fp4 kernels read {ALIGNMENT} elements at once; pad K with zeros")
    for name in ALONG:
        found[name] = _turned(pack_fp4(_turned(arrays[name], name)), name)
        flat = swizzle_scales(_turned(arrays[f"scale_{name}"], name))
        found[f"scale_{name}"] = flat.view(np.uint8) if scale_type_of(flat.dtype) is ScaleType.UE8M0 else flat
    return found


def host_views(views: Mapping[str, _core.Operand]) -> dict[str, _core.Operand]:
    """Views of operands; where these are fp4 in host memory, they and their scales in the forms of `plain_forms`."""
    if views["a"].device_type != CPU or not any(views[name].dtype in _ELEMENTS for name in ALONG):
        return dict(views)
    given = {name: operands.to_numpy(views[name]) for name in ("a", "b", "scale_a", "scale_b") if name in views}
    return {**views, **{name: operands.as_operand(array) for name, array in plain_forms(given).items()}}
