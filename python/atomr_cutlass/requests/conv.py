"""Requests for convolutions: typed, and refused until there are kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from ..errors import InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..numerics import default_out_dtype
from ..plan_cache import PlanKey
from .checks import expect_extent, expect_fields, expect_served, math_of
from .gemm import GemmEpilogue

_DTYPES = (
    CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F32, CutlassDtype.TF32, CutlassDtype.F8E4M3, CutlassDtype.F8E5M2,
)  # fmt: skip
_ARCHS = (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A)


class ConvLayout(enum.Enum):
    """The order in which operands name their dimensions. In memory the channels are contiguous in either."""

    NHWC = "nhwc"
    NCHW = "nchw"


@dataclass(frozen=True)
class ConvShape:
    """Extents of a 2-D convolution of x (n, h, w, c) with a filter (k, r, s, c / groups) to y (n, p, q, k).

    Attributes:
        n: images.
        h, w: rows and columns of an image.
        c: channels of x, a multiple of `groups`.
        k: channels of y, a multiple of `groups`.
        r, s: rows and columns of the filter.
        stride, padding, dilation: for rows and for columns. Padding is added on both sides.
        groups: parts that channels are divided into, each convolved by itself.

    Raises:
        InvalidOperandError: a value is no extent, channels are not divisible by `groups`, or y would be empty.
    """

    n: int
    h: int
    w: int
    c: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("n", "h", "w", "c", "k", "r", "s", "groups"):
            expect_extent(getattr(self, name), f"ConvShape.{name}", 1)
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidOperandError(f"ConvShape.{name} is {pair!r}; expected two integers, for rows and columns")
            for value in pair:
                expect_extent(value, f"ConvShape.{name}", least)
        for name in ("c", "k"):
            if getattr(self, name) % self.groups:
                raise InvalidOperandError(
                    f"ConvShape.{name} is {getattr(self, name)}, no multiple of the {self.groups} groups"
                )
        for name, extent, taps, axis in (("p", self.h, self.r, 0), ("q", self.w, self.s, 1)):
            if getattr(self, name) < 1:
                raise InvalidOperandError(
                    f"the result would be empty: a filter of {taps} with dilation {self.dilation[axis]} is longer than "
                    f"{extent} with padding {self.padding[axis]} on both sides"
                )

    @classmethod
    def nhwc(
        cls,
        n: int,
        h: int,
        w: int,
        c: int,
        k: int,
        r: int,
        s: int,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
    ) -> ConvShape:
        """A shape with one number for `stride`, `padding` and `dilation`, or one each for rows and columns."""
        return cls(n, h, w, c, k, r, s, _pair(stride), _pair(padding), _pair(dilation), groups)

    @property
    def p(self) -> int:
        """Rows of y."""
        return (self.h + 2 * self.padding[0] - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Columns of y."""
        return (self.w + 2 * self.padding[1] - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1


@dataclass(frozen=True)
class _ConvRequest:
    """What the three convolutions have in common: everything but the operation.

    Attributes:
        shape: extents.
        dtype: element type of the operands. TF32 means float32 operands multiplied in TF32.
        arch: target; None is the arch of the GPU.
        layout: the order in which operands name their dimensions.
        epilogue: scalars, bias (one a channel of the result) and activation.
        out_dtype: element type of the result; None is the operands', or BF16 for fp8.
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.
        binding: name of a second operand that a plan of this request keeps.

    Raises:
        UnsupportedError: convolutions are not to be had for this dtype or arch.
        InvalidOperandError: a value is not of its kind.
    """

    op: ClassVar[str]

    shape: ConvShape
    dtype: CutlassDtype = field(kw_only=True)
    arch: SmArch | None = field(default=None, kw_only=True)
    layout: ConvLayout = field(default=ConvLayout.NHWC, kw_only=True)
    epilogue: GemmEpilogue = field(default_factory=GemmEpilogue, kw_only=True)
    out_dtype: CutlassDtype | None = field(default=None, kw_only=True)
    precision: str | None = field(default=None, kw_only=True)
    binding: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        expect_fields(
            self,
            shape=ConvShape,
            dtype=CutlassDtype,
            arch=SmArch,
            layout=ConvLayout,
            epilogue=GemmEpilogue,
            out_dtype=CutlassDtype,
        )
        expect_served("convolution", self.dtype, self.arch, _DTYPES, _ARCHS)
        _ = self.math  # refuses what contradicts the dtype

    @property
    def result_dtype(self) -> CutlassDtype:
        """The element type of the result."""
        return self.out_dtype or default_out_dtype(self.dtype.storage)

    @property
    def math(self) -> str:
        """The math mode of the kernel's key."""
        return math_of(self.dtype, self.precision)

    def plan_key(self) -> PlanKey:
        """The key of this request's plan. Needs no GPU. The layout only names dimensions, so it is not in it."""
        x = self.shape
        return PlanKey(
            op=self.op,
            shape=(x.n, x.h, x.w, x.c, x.k, x.r, x.s, x.stride, x.padding, x.dilation, x.groups),
            layouts=("nhwc",) * 3,
            dtypes=(self.dtype.storage, self.dtype.storage, self.result_dtype),
            math=self.math,
            epilogue=self.epilogue.kind,
            arch=self.arch,
            binding=self.binding,
        )

    def render_cu(self) -> NoReturn:
        """Refused: there is no kernel to render.

        Raises:
            UnsupportedError: always, for now.
        """
        raise UnsupportedError(f"{self.op} has no kernels yet: use the framework's own convolution")


class ConvFwdRequest(_ConvRequest):
    """y = epilogue(x * w). No kernels serve it yet: rendering it is refused."""

    op = "conv2d_fprop"


class ConvDgradRequest(_ConvRequest):
    """The gradient of a convolution by x, from dy and w. No kernels serve it yet: rendering it is refused."""

    op = "conv2d_dgrad"


class ConvWgradRequest(_ConvRequest):
    """The gradient of a convolution by w, from dy and x. No kernels serve it yet: rendering it is refused."""

    op = "conv2d_wgrad"


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value
