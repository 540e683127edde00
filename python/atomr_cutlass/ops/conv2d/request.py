"""Requests for convolutions."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...checks import check_index, check_options, shown
from ...epilogue.results import ImageResult
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.ops import ACTIVATIONS
from ...generator.matrix import ARCHS
from ...generator.members import Members
from ...generator.rules import NO_EPILOGUE_OF_WGRAD
from ...pipeline.call_options import documented
from ...pipeline.devices import Device
from ...pipeline.plan_cache import PlanKey
from ...pipeline.problem import MatrixSpec, row_major
from ...pipeline.reduction import is_batch_invariant
from ...pipeline.request import Request, expect_extent, expect_served, math_of
from .geometry import DGRAD, FPROP, OPERANDS, WGRAD, ConvGeometry, as_operands, conv_geometry
from .kernels import ConvSearch
from .problem import ConvProblem

_DTYPES = (
    CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F32, CutlassDtype.TF32, CutlassDtype.F8E4M3, CutlassDtype.F8E5M2,
)  # fmt: skip


SUMS_OVER_IMAGES = "the gradient of a filter is a sum over the pixels of all images"


class ConvLayout(enum.Enum, metaclass=Members):
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
        stride, dilation: for rows and for columns.
        padding: zeros around x: (rows, columns) on both sides, or ((top, bottom), (left, right)).
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
    padding: tuple[int, int] | tuple[tuple[int, int], tuple[int, int]] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("n", "h", "w", "c", "k", "r", "s", "groups"):
            expect_extent(getattr(self, name), f"ConvShape.{name}", 1)
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidOperandError(
                    f"ConvShape.{name} is {shown(pair)}; expected two integers, for rows and columns"
                )
            for value in pair:
                for extent in value if name == "padding" and isinstance(value, tuple) else (value,):
                    expect_extent(extent, f"ConvShape.{name}", least)
        _ = self.geometry  # refuses channels that groups do not divide, and a y without pixels

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
        padding: int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
    ) -> ConvShape:
        """A shape with one number for `stride`, `padding` and `dilation`, or one each for rows and columns."""
        return cls(n, h, w, c, k, r, s, _pair(stride), _pair(padding), _pair(dilation), groups)

    @property
    def pads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Padding as ((top, bottom), (left, right))."""
        return self.geometry.padding

    @property
    def p(self) -> int:
        """Rows of y."""
        return self.geometry.p

    @property
    def q(self) -> int:
        """Columns of y."""
        return self.geometry.q

    @functools.cached_property
    def geometry(self) -> ConvGeometry:
        """All extents."""
        return conv_geometry(
            (self.n, self.h, self.w, self.c),
            (self.k, self.r, self.s, self.c // self.groups),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


@documented
@dataclass(frozen=True)
class ConvRequest(Request):
    """A request for one of the three convolutions.

    Attributes:
        shape: extents.
        layout: the order in which operands name their dimensions.
        epilogue: scalars, bias (one for each channel of the result) and activation, or a tree. A plan is called with a
            tree's operands by their names, inputs before outputs: a scalar (1,), a row (k,), a column (n, p, q, 1), a
            matrix like the result, a mask uint8 (n, p, q, ceil(k / 8)); a reduction (1,), (k,) or (n, p, q). Those
            of 4 dimensions name them as the operands do.
        precision: for float32 operands: `ieee` (default) or `tf32`; for filters of one tap also `3xtf32`.
        binding: {binding} The operand is w, of the gradient by w x.
        batch_invariant: as in `conv2d`; None leaves it to ATOMR_CUTLASS_BATCH_INVARIANT, which does not count for
            gradients of filters.

    Raises:
        UnsupportedError: there are no convolutions of this dtype or for this arch.
        InvalidOperandError: a value is not of its kind; a tree decides another out_dtype or takes an operand's name.
    """

    op: ClassVar[str]

    shape: ConvShape
    layout: ConvLayout = field(default=ConvLayout.NHWC, kw_only=True)
    precision: str | None = field(default=None, kw_only=True)
    batch_invariant: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.check_fields(shape=ConvShape, layout=ConvLayout)
        expect_served("convolution", self.dtype, self.arch, _DTYPES, ARCHS[self.op])
        check_options(batch_invariant=self.batch_invariant)
        if self.op == WGRAD and self.batch_invariant:
            raise UnsupportedError(f"batch_invariant: {SUMS_OVER_IMAGES}")
        _ = self.math  # refuses options that contradict the dtype
        if self.epilogue.activation not in (None, *ACTIVATIONS):
            valid = ", ".join(ACTIVATIONS)
            raise InvalidOperandError(f"activation is {self.epilogue.activation!r}; expected None or one of {valid}")
        epilogue = self.epilogue
        if self.op == WGRAD and (epilogue.tree or epilogue.bias or epilogue.activation is not None):
            raise UnsupportedError(NO_EPILOGUE_OF_WGRAD.reason)
        if self.tree is not None:
            self.refuse_tree(self.tree, OPERANDS[self.op])

    @property
    def math(self) -> str:
        """The math mode of the kernel's key."""
        return math_of(self.dtype, self.precision)

    @property
    def invariant(self) -> bool:
        """Whether its kernels have one order of sums, whatever the number of images."""
        return self.op != WGRAD and is_batch_invariant(self.batch_invariant)

    def plan_key(self) -> PlanKey:
        """The key of this request's plan. Needs no GPU."""
        x = self.shape
        return self.key_of(
            self.op,
            (x.n, x.h, x.w, x.c, x.k, x.r, x.s, x.stride, *x.pads, x.dilation, x.groups),
            (self.layout.value,) * 3,
            batch_invariant=self.invariant,
        )

    def problem(self, device: int) -> ConvProblem:
        """The problem on the GPU of this index, with dense operands, channels last."""
        check_index(device, "device")
        g, operand, result = self.shape.geometry, self.dtype.storage, self.result_dtype

        def dense(shape: tuple[int, ...], dtype: CutlassDtype) -> MatrixSpec:
            return MatrixSpec(shape, row_major(shape), dtype)

        a, b, d = as_operands(self.op, g.x_shape, g.w_shape, g.y_shape)
        return ConvProblem(
            op=self.op,
            geometry=g,
            a=dense(a, operand),
            b=dense(b, operand),
            c=dense(d, result) if self.epilogue.beta != 0 else None,
            d=dense(d, result),
            math=self.math,
            device=device,
            fusion=None if self.tree is None else ImageResult(d, self.layout.value).dense(self.tree, dense(d, result)),
        )

    def search(self, device: Device) -> ConvSearch:
        """The kernels for the request on a device."""
        return ConvSearch(self.problem(device.index), device, self.arch, batch_invariant=self.invariant)


class ConvFwdRequest(ConvRequest):
    """y = epilogue(x * w)."""

    op = FPROP


class ConvDgradRequest(ConvRequest):
    """The gradient of a convolution by x, from dy and w."""

    op = DGRAD


class ConvWgradRequest(ConvRequest):
    """The gradient of a convolution by w, from dy and x."""

    op = WGRAD


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value
