"""The element types, each stated once: everything else in the project reads this table."""

from __future__ import annotations

import enum
import functools

from .errors import InvalidOperandError, expect
from .members import Members


class CutlassDtype(enum.Enum, metaclass=Members):
    """An element type of an operand, an accumulator or an epilogue.

    `TF32` names float32 storage multiplied in TF32; it has no storage format of its own.
    """

    F64 = "f64"
    F32 = "f32"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    I32 = "i32"
    F8E4M3 = "e4m3"
    F8E5M2 = "e5m2"
    F4E2M1 = "e2m1"

    @functools.cached_property
    def bits(self) -> int:
        """Width of one stored element in bits."""
        return _BITS[self]

    @property
    def cutlass_name(self) -> str:
        """The short name in CUTLASS's procedural kernel names (`s8` and `s32` for the integers)."""
        return {CutlassDtype.I8: "s8", CutlassDtype.I32: "s32"}.get(self, self.value)

    @property
    def cpp(self) -> str:
        """The C++ type in CUTLASS."""
        return _CPP[self]

    @property
    def numpy_name(self) -> str:
        """The name of the NumPy (or ml_dtypes) scalar type that stores it."""
        return _NUMPY[self]

    @property
    def dlpack(self) -> tuple[int, int]:
        """DLPack's (type code, bits) of a stored element."""
        return _DLPACK[self.storage]

    @classmethod
    def from_dlpack(cls, code: int, bits: int) -> CutlassDtype | None:
        """The type stored as this DLPack (type code, bits), or None."""
        expect(code, int, "code")
        expect(bits, int, "bits")
        return _from_dlpack(code, bits)

    @property
    def storage(self) -> CutlassDtype:
        """The type that sits in memory: `F32` for `TF32`, the type itself otherwise."""
        return CutlassDtype.F32 if self is CutlassDtype.TF32 else self

    @classmethod
    def parse(cls, text: str) -> CutlassDtype:
        """Reads a name such as `bf16`, `s8`, `float16` or `F8E4M3`; InvalidOperandError names the valid ones."""
        expect(text, str, "dtype", "a name such as 'bf16'")
        wanted = text.strip().lower()
        for dtype in cls:
            if wanted in (dtype.value, dtype.cutlass_name, dtype.name.lower()):
                return dtype
        for dtype in cls:
            if dtype is not cls.TF32 and wanted == dtype.numpy_name:
                return dtype
        raise InvalidOperandError(f"unknown dtype {text!r}; valid: {', '.join(d.value for d in cls)}")


class ScaleType(enum.Enum):
    """The type of a scale that several elements share. Its value is that of a KernelKey's `scale_type`.

    `UE4M3` is e4m3 whose sign bit is always 0; `UE8M0` is an exponent alone, 2**(byte - 127), with one NaN.
    """

    F32 = "f32"
    UE4M3 = "ue4m3"
    UE8M0 = "ue8m0"

    @property
    def bits(self) -> int:
        """Width of one stored scale in bits."""
        return _SCALE_DLPACK[self][1]

    @property
    def cpp(self) -> str:
        """The C++ type in CUTLASS."""
        return _SCALE_CPP[self]

    @property
    def numpy_name(self) -> str:
        """The name of the NumPy (or ml_dtypes) scalar type that stores it."""
        return _SCALE_NUMPY[self]

    @property
    def dlpack(self) -> tuple[int, int]:
        """DLPack's (type code, bits) of a stored scale."""
        return _SCALE_DLPACK[self]

    @classmethod
    def from_dlpack(cls, code: int, bits: int) -> ScaleType | None:
        """The type stored as this DLPack (type code, bits), or None."""
        return next((s for s in cls if _SCALE_DLPACK[s] == (code, bits)), None)


_BITS = {
    CutlassDtype.F64: 64,
    CutlassDtype.F32: 32,
    CutlassDtype.TF32: 32,
    CutlassDtype.F16: 16,
    CutlassDtype.BF16: 16,
    CutlassDtype.I8: 8,
    CutlassDtype.I32: 32,
    CutlassDtype.F8E4M3: 8,
    CutlassDtype.F8E5M2: 8,
    CutlassDtype.F4E2M1: 4,
}

_CPP = {
    CutlassDtype.F64: "double",
    CutlassDtype.F32: "float",
    CutlassDtype.TF32: "cutlass::tfloat32_t",
    CutlassDtype.F16: "cutlass::half_t",
    CutlassDtype.BF16: "cutlass::bfloat16_t",
    CutlassDtype.I8: "int8_t",
    CutlassDtype.I32: "int32_t",
    CutlassDtype.F8E4M3: "cutlass::float_e4m3_t",
    CutlassDtype.F8E5M2: "cutlass::float_e5m2_t",
    CutlassDtype.F4E2M1: "cutlass::float_e2m1_t",
}

_NUMPY = {
    CutlassDtype.F64: "float64",
    CutlassDtype.F32: "float32",
    CutlassDtype.TF32: "float32",
    CutlassDtype.F16: "float16",
    CutlassDtype.BF16: "bfloat16",
    CutlassDtype.I8: "int8",
    CutlassDtype.I32: "int32",
    CutlassDtype.F8E4M3: "float8_e4m3fn",
    CutlassDtype.F8E5M2: "float8_e5m2",
    CutlassDtype.F4E2M1: "float4_e2m1fn",
}

# DLDataTypeCode: 0 int, 2 float, 4 bfloat, 10 float8_e4m3fn, 12 float8_e5m2, 17 float4_e2m1fn.
_DLPACK = {
    CutlassDtype.F64: (2, 64),
    CutlassDtype.F32: (2, 32),
    CutlassDtype.F16: (2, 16),
    CutlassDtype.BF16: (4, 16),
    CutlassDtype.I8: (0, 8),
    CutlassDtype.I32: (0, 32),
    CutlassDtype.F8E4M3: (10, 8),
    CutlassDtype.F8E5M2: (12, 8),
    CutlassDtype.F4E2M1: (17, 4),
}

_SCALE_CPP = {
    ScaleType.F32: "float",
    ScaleType.UE4M3: "cutlass::float_ue4m3_t",
    ScaleType.UE8M0: "cutlass::float_ue8m0_t",
}

_SCALE_NUMPY = {
    ScaleType.F32: "float32",
    ScaleType.UE4M3: "float8_e4m3fn",
    ScaleType.UE8M0: "float8_e8m0fnu",
}

# DLDataTypeCode: 14 float8_e8m0fnu. Unsigned e4m3 travels as the signed one.


@functools.cache
def _from_dlpack(code: int, bits: int) -> CutlassDtype | None:
    stored = (dtype for dtype in CutlassDtype if dtype is not CutlassDtype.TF32)
    return next((dtype for dtype in stored if _DLPACK[dtype] == (code, bits)), None)


_SCALE_DLPACK = {
    ScaleType.F32: (2, 32),
    ScaleType.UE4M3: (10, 8),
    ScaleType.UE8M0: (14, 8),
}
