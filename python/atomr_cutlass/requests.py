"""Requests: what a caller wants computed, without saying how."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from .errors import InvalidOperandError, UnsupportedError
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.matrix import GEMM_ARCHS, gemm_types

PRECISIONS = ("ieee", "tf32", "3xtf32")


class GemmLayout(enum.Enum):
    """How a matrix lies in memory; the value is BLAS's word."""

    ROW_MAJOR = "row"
    COL_MAJOR = "column"


@dataclass(frozen=True)
class GemmShape:
    """Extents of D (m x n) = A (m x k) B (k x n), `batch` times.

    Raises:
        InvalidOperandError: an extent is negative or no integer.
    """

    m: int
    n: int
    k: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                raise InvalidOperandError(f"GemmShape.{name} is {value!r}; expected an integer from 0 to 2^31 - 1")


@dataclass(frozen=True)
class GemmEpilogue:
    """What happens to the accumulator: D = act(alpha * AB + beta * C + bias)."""

    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    activation: str | None = None


@dataclass(frozen=True)
class GemmRequest:
    """One GEMM: D = epilogue(A B), dense operands.

    Attributes:
        shape: extents.
        dtype: element type of A and B. TF32 means float32 operands multiplied in TF32.
        arch: target; None is the arch of the GPU that the plan is made for. An older target than the GPU's is served
            by cells that carry PTX.
        layout_a, layout_b: layouts of A and B.
        layout_c: layout of C and D.
        epilogue: scalars, bias and activation.
        out_dtype: element type of D (and C); None is A's, or I32 for I8.
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.

    Raises:
        UnsupportedError: no kernel exists for these element types, or none for this arch.
        InvalidOperandError: a value is not of its kind.
    """

    shape: GemmShape
    dtype: CutlassDtype = field(kw_only=True)
    arch: SmArch | None = field(default=None, kw_only=True)
    layout_a: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_b: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_c: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    epilogue: GemmEpilogue = field(default_factory=GemmEpilogue, kw_only=True)
    out_dtype: CutlassDtype | None = field(default=None, kw_only=True)
    precision: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _expect(self.shape, GemmShape, "shape")
        _expect(self.dtype, CutlassDtype, "dtype")
        if self.arch is not None:
            _expect(self.arch, SmArch, "arch")
        for name in ("layout_a", "layout_b", "layout_c"):
            _expect(getattr(self, name), GemmLayout, name)
        _expect(self.epilogue, GemmEpilogue, "epilogue")
        if self.out_dtype is not None:
            _expect(self.out_dtype, CutlassDtype, "out_dtype")
        types = gemm_types(self.operand_dtype, self.operand_dtype, self.result_dtype, self.math)
        if not types:
            raise UnsupportedError(types.reason)
        if self.arch is not None and self.arch not in GEMM_ARCHS:
            valid = ", ".join(a.name for a in GEMM_ARCHS)
            raise UnsupportedError(f"no GEMM kernels for {self.arch.name} yet; valid: {valid}")

    @property
    def operand_dtype(self) -> CutlassDtype:
        """The element type that A and B are stored in."""
        return self.dtype.storage

    @property
    def result_dtype(self) -> CutlassDtype:
        """The element type of D."""
        return self.out_dtype or default_out_dtype(self.operand_dtype)

    @property
    def math(self) -> str:
        """The math mode of the kernel's key."""
        if self.dtype is CutlassDtype.TF32 and self.precision not in (None, "tf32"):
            raise InvalidOperandError(f"dtype TF32 means precision='tf32', not {self.precision!r}")
        return math_mode(self.operand_dtype, "tf32" if self.dtype is CutlassDtype.TF32 else self.precision)


def default_out_dtype(dtype: CutlassDtype) -> CutlassDtype:
    """The result's element type where none is asked for."""
    if dtype is CutlassDtype.I8:
        return CutlassDtype.I32
    if dtype in (CutlassDtype.F8E4M3, CutlassDtype.F8E5M2, CutlassDtype.F4E2M1):
        return CutlassDtype.BF16
    return dtype


def math_mode(dtype: CutlassDtype, precision: str | None) -> str:
    """`precision` as the kernel key's math mode.

    Raises:
        InvalidOperandError: an unknown precision, or one given for another dtype than float32.
    """
    if precision is not None and precision not in PRECISIONS:
        raise InvalidOperandError(f"unknown precision {precision!r}; valid: {', '.join(PRECISIONS)}")
    if dtype is CutlassDtype.F32:
        return precision or "ieee"
    if precision is not None:
        raise InvalidOperandError(f"precision={precision!r} is for float32 operands; these are {dtype.value}")
    return "default"


def _expect(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise InvalidOperandError(f"{name} is {value!r}; expected a {kind.__name__}")
