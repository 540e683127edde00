"""The three convolutions as operations, and their requests."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...arrays.layouts import MatrixSpec, in_layout, row_major
from ...checks import check_index, check_options, shown
from ...epilogue.fusion import source_number
from ...epilogue.results import ImageResult
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...generator.key import KernelKey
from ...generator.matrix import ARCHS
from ...generator.members import Members
from ...generator.rules import NO_EPILOGUE_OF_WGRAD
from ...pipeline.call_options import documented
from ...pipeline.devices import Device
from ...pipeline.operation import NO_CHECK, Arrays, OperandSlot, PlannedOperation, epilogue_slots
from ...pipeline.plan import Plan
from ...pipeline.plan_cache import PlanKey
from ...pipeline.probe import Probe
from ...pipeline.reduction import is_batch_invariant
from ...pipeline.request import Option, Request, RequestOptions, expect_extents, math_of, precision_of, sampled
from ...pipeline.search import Candidate
from ..gemm.operation import BATCH_INVARIANT, PRECISION, fields_from, recorded_epilogue, recorded_math
from .kernels import ConvFormulation, ConvSearch, make
from .problem import DGRAD, FPROP, OPERANDS, WGRAD, ConvGeometry, ConvProblem, as_operands, conv_geometry, pair_of

_DTYPES = (
    CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F32, CutlassDtype.TF32, CutlassDtype.F8E4M3, CutlassDtype.F8E5M2,
)  # fmt: skip

SUMS_OVER_IMAGES = "the gradient of a filter is a sum over the pixels of all images"


class ConvLayout(enum.Enum, metaclass=Members):
    """The order of the operands' dimensions. In memory the channels are contiguous in either."""

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
        expect_extents(self, ("n", "h", "w", "c", "k", "r", "s", "groups"), "ConvShape.", 1)
        for name in ("stride", "padding", "dilation"):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or any(isinstance(side, list) for side in pair):
                raise InvalidOperandError(
                    f"ConvShape.{name} is {shown(pair)}; expected tuples of two integers, for rows and columns"
                )
        _ = self.geometry  # refuses all other invalid extents

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
        return cls(n, h, w, c, k, r, s, pair_of(stride), pair_of(padding), pair_of(dilation), groups)

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
            (self.n, self.h, self.w, self.c), (self.k, self.r, self.s, self.c // self.groups), stride=self.stride,
            padding=self.padding, dilation=self.dilation, groups=self.groups,
        )  # fmt: skip


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
        binding: {binding} The operand is w, or x for the gradient by w.
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
        self.expect_served("convolution", _DTYPES, ARCHS[self.op])
        check_options(batch_invariant=self.batch_invariant)
        if self.op == WGRAD and self.batch_invariant:
            raise UnsupportedError(f"batch_invariant: {SUMS_OVER_IMAGES}")
        _ = self.math  # refuses options that contradict the dtype
        if self.op == WGRAD and self.epilogue.follows:
            raise UnsupportedError(NO_EPILOGUE_OF_WGRAD.reason)
        if self.tree is not None:
            self.refuse_tree(self.tree, OPERANDS[self.op])

    @property
    def math(self) -> str:
        return math_of(self.dtype, self.precision)

    @property
    def invariant(self) -> bool:
        """Whether its kernels have one reduction for every number of images."""
        return self.op != WGRAD and is_batch_invariant(self.batch_invariant)

    def plan_key(self) -> PlanKey:
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
        g, types = self.shape.geometry, (self.operand_dtype, self.operand_dtype, self.result_dtype)
        shapes = as_operands(self.op, g.x_shape, g.w_shape, g.y_shape)
        a, b, d = (MatrixSpec(shape, row_major(shape), dtype) for shape, dtype in zip(shapes, types, strict=True))
        c = d if self.epilogue.beta != 0 else None
        fusion = None if self.tree is None else ImageResult(d.shape, self.layout.value).dense(self.tree, d)
        return ConvProblem(self.op, g, a, b, c, d, self.math, device, fusion=fusion)

    def search(self, device: Device) -> ConvSearch:
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


class ConvOperation(PlannedOperation[ConvRequest]):
    """A convolution, or a gradient of one."""

    message = "Conv"
    options = (
        Option("conv", "Extents: n,h,w,c,k,r,s."),
        Option("stride", "One number, or rows,columns."),
        Option("padding", "One number; rows,columns; or top,bottom,left,right."),
        Option("dilation", "One number, or rows,columns."),
        Option("groups", "Parts that channels are divided into."),
        Option("layout", "nhwc or nchw."),
        PRECISION,
        BATCH_INVARIANT,
    )

    def __init__(self, request_type: type[ConvRequest]) -> None:
        """The operation of a kind of requests."""
        self.name = request_type.op
        self.request_type = request_type
        self.bound = OPERANDS[self.name][1]
        self.optional = ("c",) if self.name == WGRAD else ("c", "bias")
        self.function = "conv2d" if self.name == FPROP else self.name
        self.refuses = NO_CHECK | {
            "amax": "an epilogue reduces it (`total_amax`)",
            "fast_accum": "fp8 kernels accumulate fast; where there is none, operands are cast",
        }
        if self.name == WGRAD:
            self.refuses |= dict.fromkeys(("bias", "activation", "epilogue"), NO_EPILOGUE_OF_WGRAD.reason)
            self.refuses["batch_invariant"] = SUMS_OVER_IMAGES
            self.refuses["amax"] = "the kernels write the gradient alone, and have no epilogue that reduces it"

    def operands(self, request: ConvRequest) -> tuple[OperandSlot, ...]:
        conv = request.problem(0)

        def slot(name: str, spec: MatrixSpec) -> OperandSlot:
            shape, strides = (in_layout(values, request.layout.value) for values in (spec.shape, spec.strides))
            return OperandSlot(name, (MatrixSpec(shape, strides, spec.dtype, spec.alignment),), written=name == "out")

        named = zip((*OPERANDS[self.name], "c"), (conv.a, conv.b, conv.c), strict=True)
        table = [slot(name, spec) for name, spec in named if spec is not None]
        return (*table, *epilogue_slots(conv.fusion), slot("out", conv.d))

    def extents(self, request: ConvRequest) -> dict[str, Any]:
        g = request.shape.geometry
        lists = {"stride": list(g.stride), "padding": list(map(list, g.padding)), "dilation": list(g.dilation)}
        return g._asdict() | lists

    def products(self, request: ConvRequest) -> int:
        g = request.shape.geometry
        return math.prod((*g.y_shape, *g.w_shape[1:]))

    def describe(self, request: ConvRequest) -> str:
        shape = request.shape
        return f"{self.name} of {shape.n}x{shape.h}x{shape.w}x{shape.c} with {shape.k} filters of {shape.r}x{shape.s}"

    def request(self, options: RequestOptions) -> ConvRequest:
        side = max(4, options.extent // 64)
        padding = options.numbers("padding", "0", (1, 2, 4))
        pads = (padding[:2], padding[2:]) if len(padding) == 4 else _by_axis(padding)
        return self.request_type(
            ConvShape.nhwc(
                *options.numbers("conv", f"8,{side},{side},64,64,3,3", (7,)),
                stride=_by_axis(options.numbers("stride", "1", (1, 2))),
                padding=pads,
                dilation=_by_axis(options.numbers("dilation", "1", (1, 2))),
                groups=options.numbers("groups", "1", (1,))[0],
            ),
            **fields_from(options),
            layout=options.parsed("layout", ConvLayout) or ConvLayout.NHWC,
            precision=options.given("precision"),
            batch_invariant=options.flag("batch_invariant") or None,
        )  # fmt: skip

    def recorded_fields(self, problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> Iterator[dict[str, Any]]:
        g = ConvGeometry(*problem["geometry"])
        (top, bottom), (left, right) = g.padding
        shape = ConvShape(
            *g[:7], stride=(g.stride[0], g.stride[1]), padding=((top, bottom), (left, right)),
            dilation=(g.dilation[0], g.dilation[1]), groups=g.groups,
        )  # fmt: skip
        for layout in ConvLayout:
            yield {
                "shape": shape,
                "dtype": CutlassDtype(problem["a"]["dtype"]),
                "out_dtype": CutlassDtype(problem["d"]["dtype"]),
                "epilogue": recorded_epilogue(problem, tree),
                "layout": layout,
                "precision": recorded_math(problem)["precision"],
            }

    def plan(self, request: ConvRequest, device: int, **options: Any) -> Plan:
        options["batch_invariant"] = request.invariant
        return make(request.problem(device), layout=request.layout.value, **options)

    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[ConvRequest, Candidate[ConvFormulation]]:
        """A request with a filter of nine taps and padding, of more than a tile."""
        read, written = 2 * key.tile[2], key.tile[1] + 16
        c, k = (read, written) if self.name == FPROP else (written, read)
        request = self.request_type(
            ConvShape.nhwc(1, key.tile[0] // 8 + 2, 8, c, k, 3, 3, padding=1), **sampled(key, epilogue),
            precision=precision_of(key), batch_invariant=False,
        )  # fmt: skip
        problem, number = request.problem(device.index), source_number(epilogue)
        source = None if number is None else problem.d
        problem = dataclasses.replace(problem, c=source, math=key.math, source=number)
        return request, Candidate(key, None, 0.0, ConvFormulation(problem))

    def probe(self, request: ConvRequest, arrays: Arrays) -> Probe[ConvRequest]:
        from .reference import ConvProbe

        return ConvProbe(request, arrays)


def _by_axis(numbers: tuple[int, ...]) -> tuple[int, int]:
    return (numbers[0], numbers[-1])


OPERATIONS = tuple(ConvOperation(kind) for kind in (ConvFwdRequest, ConvDgradRequest, ConvWgradRequest))
