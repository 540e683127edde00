"""The three convolutions as operations."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...arrays.layouts import in_layout
from ...epilogue.bound import source_number
from ...errors import InvalidOperandError
from ...generator.key import KernelKey
from ...generator.rules import NO_EPILOGUE_OF_WGRAD
from ...pipeline.devices import Device
from ...pipeline.operation import NO_CHECK, Arrays, OperandSlot, PlannedOperation, epilogue_slots
from ...pipeline.plan import Plan
from ...pipeline.probe import Probe
from ...pipeline.problem import MatrixSpec
from ...pipeline.request import Option, RequestOptions, precision_of, sampled
from ...pipeline.search import Candidate
from ..gemm.operation import BATCH_INVARIANT, PRECISION, fields_from
from . import plans
from .geometry import FPROP, OPERANDS, WGRAD
from .kernels import ConvFormulation
from .plans import ConvCandidate
from .request import (
    SUMS_OVER_IMAGES,
    ConvDgradRequest,
    ConvFwdRequest,
    ConvLayout,
    ConvRequest,
    ConvShape,
    ConvWgradRequest,
)


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
        first, second = OPERANDS[self.name]
        arrays = ((first, conv.a), (second, conv.b), ("c", conv.c))
        table = [OperandSlot(name, (_ordered(spec, request.layout),)) for name, spec in arrays if spec is not None]
        out = OperandSlot("out", (_ordered(conv.d, request.layout),), written=True)
        return (*table, *epilogue_slots(conv.fusion), out)

    def optional_names(self, request: ConvRequest) -> tuple[str, ...]:
        return (*OPERANDS[self.name], "c", *(("bias",) if self.name != WGRAD else ()))

    def extents(self, request: ConvRequest) -> dict[str, Any]:
        shape = request.shape
        return {name: getattr(shape, name) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")} | {
            "stride": list(shape.stride),
            "padding": [list(pads) for pads in shape.pads],
            "dilation": list(shape.dilation),
            "groups": shape.groups,
        }

    def products(self, request: ConvRequest) -> int:
        shape = request.shape
        return shape.n * shape.p * shape.q * shape.k * shape.r * shape.s * (shape.c // shape.groups)

    def describe(self, request: ConvRequest) -> str:
        shape = request.shape
        return f"{self.name} of {shape.n}x{shape.h}x{shape.w}x{shape.c} with {shape.k} filters of {shape.r}x{shape.s}"

    def request(self, options: RequestOptions) -> ConvRequest:
        side = max(4, options.extent // 64)
        n, h, w, c, k, r, s = options.numbers("conv", f"8,{side},{side},64,64,3,3", (7,))
        padding = options.numbers("padding", "0", (1, 2, 4))
        pads = (_pair(padding[:2]), _pair(padding[2:])) if len(padding) == 4 else _pair(padding)
        layout = options.given("layout") or ConvLayout.NHWC.value
        if layout not in [known.value for known in ConvLayout]:
            raise InvalidOperandError(f"--layout is {layout!r}; convolutions have nhwc and nchw")
        (groups,) = options.numbers("groups", "1", (1,))
        return self.request_type(
            ConvShape.nhwc(
                n, h, w, c, k, r, s,
                stride=_pair(options.numbers("stride", "1", (1, 2))),
                padding=pads,
                dilation=_pair(options.numbers("dilation", "1", (1, 2))),
                groups=groups,
            ),
            **fields_from(options),
            layout=ConvLayout(layout),
            precision=options.given("precision"),
            batch_invariant=options.flag("batch_invariant") or None,
        )  # fmt: skip

    def plan(self, request: ConvRequest, device: int, **options: Any) -> Plan:
        options["batch_invariant"] = request.invariant
        return plans.make(request.problem(device), layout=request.layout.value, **options)

    def result_layout(self, request: ConvRequest) -> str:
        return request.layout.value

    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[ConvRequest, ConvCandidate]:
        """With a filter of nine taps over an image with a border; of more than a tile, as in a GEMM."""
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
        from .probe import ConvProbe

        return ConvProbe(request, arrays)


def _ordered(spec: MatrixSpec, layout: ConvLayout) -> MatrixSpec:
    """A spec in the order of NHWC as calls name its dimensions."""
    shape, strides = (in_layout(values, layout.value) for values in (spec.shape, spec.strides))
    return MatrixSpec(shape, strides, spec.dtype, spec.alignment)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    return (numbers[0], numbers[-1])


OPERATIONS = tuple(ConvOperation(kind) for kind in (ConvFwdRequest, ConvDgradRequest, ConvWgradRequest))
