"""Quantization and its inverse, for products of narrow types, on every arch."""

from __future__ import annotations

from collections.abc import Iterator

from ..archs import SmArch
from ..dtypes import CutlassDtype, ScaleType
from ..key import KernelKey
from ..rules import FP8_TYPES, HALF_TYPES, OK, Status, no
from .base import DEFAULT, FULL, Cell, Family, untiled

D = CutlassDtype

WIDE_TYPES = (*HALF_TYPES, D.F32)

FORMS: dict[str, tuple[str, tuple[int, int]]] = {
    "amax": ("kAmax", (0, 0)),
    "tensor": ("kTensor", (0, 0)),
    "row": ("kRow", (1, 0)),
    "block": ("kBlock", (1, 128)),
    "tile": ("kBlock", (128, 128)),
    "nvfp4": ("kBlock", (1, 16)),
    "mxfp4": ("kBlock", (1, 32)),
}
"""Forms of scales by name -> the kernel's form, and rows and columns that share a scale (0: all of them)."""

SCALE_TYPES = {"nvfp4": ScaleType.UE4M3, "mxfp4": ScaleType.UE8M0}
"""The types of scales that are not float, by form."""


def scale_type(form: str) -> ScaleType:
    """The type of a form's scales."""
    return SCALE_TYPES.get(form, ScaleType.F32)


def quantize(arch: SmArch, a: D, d: D, form: str) -> KernelKey:
    """The key that quantizes `a` to `d` with scales of a form."""
    rows, columns = FORMS[form][1]
    return untiled(
        "quantize", arch, a, d, mainloop=form, scale_granularity=(rows, 0, columns), scale_type=scale_type(form).value
    )


def dequantize(arch: SmArch, a: D, d: D, scales: ScaleType) -> KernelKey:
    """The key that multiplies `a` with its scales, to `d`; the arguments give the blocks."""
    return untiled("dequantize", arch, a, d, scale_type=scales.value)


def _narrow(form: str) -> tuple[D, ...]:
    return (D.F4E2M1,) if form in SCALE_TYPES else FP8_TYPES


def supports(key: KernelKey) -> Status:
    """Whether a key of this family compiles."""
    known = dict(_quantizing(key.arch) if key.op == "quantize" else _dequantizing(key.arch))
    if key not in known:
        return no(f"no {key.op} kernel has these types and scales: {key.a.value}, {key.d.value}, {key.scale_type}")
    return OK


def values(key: KernelKey) -> dict[str, str]:
    """The values of the templates."""
    common = {"scale": ScaleType(key.scale_type).cpp}
    if key.op == "dequantize":
        return common
    form, (rows, columns) = FORMS[key.mainloop]
    return common | {"form": form, "rows": str(max(1, rows)), "columns": str(max(1, columns))}


def _quantizing(arch: SmArch) -> Iterator[tuple[KernelKey, int]]:
    for a in WIDE_TYPES:
        for form in FORMS:
            # The largest magnitude does not depend on the narrow type.
            for d in _narrow(form) if form != "amax" else (D.F8E4M3,):
                usual = a is D.BF16 and (d, form) == (D.F8E4M3, "row") and arch is SmArch.SM90A
                yield quantize(arch, a, d, form), DEFAULT if usual else FULL


def _dequantizing(arch: SmArch) -> Iterator[tuple[KernelKey, int]]:
    for d in WIDE_TYPES:
        for a in FP8_TYPES:
            yield dequantize(arch, a, d, ScaleType.F32), FULL
        for scales in SCALE_TYPES.values():
            yield dequantize(arch, D.F4E2M1, d, scales), FULL


def _quantize_cells(arch: SmArch) -> Iterator[Cell]:
    yield from ((tier, key) for key, tier in _quantizing(arch) if key.a is D.BF16)


def _dequantize_cells(arch: SmArch) -> Iterator[Cell]:
    yield from ((tier, key) for key, tier in _dequantizing(arch) if key.d is D.BF16)


FAMILIES = tuple(
    Family(
        op=op,
        generation="sm80",
        archs=tuple(SmArch),
        template=op,
        supports=supports,
        cells=cells,
        values=values,
        compile_seconds=1.5,
        compile_mb=1000,
    )
    for op, cells in (("quantize", _quantize_cells), ("dequantize", _dequantize_cells))
)
