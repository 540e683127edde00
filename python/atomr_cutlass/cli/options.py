"""Requests as the command line words them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import InvalidOperandError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..ops.conv2d.problem import DGRAD, FPROP, WGRAD
from ..ops.conv2d.request import ConvDgradRequest, ConvFwdRequest, ConvLayout, ConvShape, ConvWgradRequest
from ..ops.gemm.request import GemmEpilogue, GemmLayout, GemmRequest, GemmShape
from ..ops.grouped_gemm.request import GroupedGemmRequest, GroupedGemmShape
from ..pipeline.operation import Request

GEMM, GROUPED = "gemm", "grouped_gemm"
CONV: dict[str, type[ConvFwdRequest | ConvDgradRequest | ConvWgradRequest]] = {
    FPROP: ConvFwdRequest, DGRAD: ConvDgradRequest, WGRAD: ConvWgradRequest,
}  # fmt: skip
OPS = (GEMM, GROUPED, *CONV)

_OF_CONV = ("conv", "stride", "padding", "dilation", "groups", "precision")
_OPTIONS = {
    GEMM: ("m", "n", "k", "batch", "dtype_b", "precision", "fast_accum", "scaling", "quantized"),
    GROUPED: ("groups", "fast_accum"),
    **dict.fromkeys(CONV, _OF_CONV),
}
"""What only some operations have."""

_LAYOUTS = {"r": GemmLayout.ROW_MAJOR, "c": GemmLayout.COL_MAJOR}

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """The options of `run` and `explain`; what was not given is None, empty or False.

    Attributes:
        op: one of OPS.
        extent: of every dimension that is not given.
        m, n, k, batch: extents of a GEMM.
        groups: of a grouped GEMM, MxNxK of each, comma-separated; of a convolution a number.
        conv: n,h,w,c,k,r,s.
        stride, dilation: a number, or two, for rows and for columns.
        padding: one number, two (rows, columns) or four (top, bottom, left, right).
        layout: three letters r or c; of a convolution nhwc or nchw.
    """

    op: str = GEMM
    extent: int = 1024
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int | None = None
    groups: str = ""
    conv: str = ""
    stride: str = ""
    padding: str = ""
    dilation: str = ""
    dtype: str = "bf16"
    dtype_b: str = ""
    arch: str = ""
    layout: str = ""
    out_dtype: str = ""
    precision: str = ""
    fast_accum: bool = False
    scaling: str = ""
    quantized: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False
    activation: str = ""

    def request(self) -> Request:
        """The request.

        Raises:
            InvalidOperandError: an option that is no such thing, or not for this operation; names it and what is valid.
            UnsupportedError: no kernel could ever serve it.
        """
        if self.op not in OPS:
            raise InvalidOperandError(f"--op is {self.op!r}; valid: {', '.join(OPS)}")
        for name in sorted({name for names in _OPTIONS.values() for name in names} - set(_OPTIONS[self.op])):
            if getattr(self, name) not in (None, "", False):
                fits = ", ".join(op for op, names in _OPTIONS.items() if name in names)
                raise InvalidOperandError(f"--{name.replace('_', '-')} is not for {self.op}; it is for {fits}")
        if self.op == GEMM:
            return self._gemm()
        return self._grouped() if self.op == GROUPED else self._conv()

    def _gemm(self) -> GemmRequest:
        m, n, k = (self.extent if one is None else one for one in (self.m, self.n, self.k))
        layout_a, layout_b, layout_c = self._matrix_layouts()
        return GemmRequest(
            GemmShape(m, n, k, 1 if self.batch is None else self.batch),
            dtype=self._dtype(),
            dtype_b=_parsed(CutlassDtype.parse, self.dtype_b, "--dtype-b"),
            arch=self._arch(),
            layout_a=layout_a,
            layout_b=layout_b,
            layout_c=layout_c,
            epilogue=self._epilogue(),
            out_dtype=self._out_dtype(),
            precision=self.precision or None,
            fast_accum=self.fast_accum,
            scaling=self.scaling or None,
            quantized=self.quantized,
        )

    def _grouped(self) -> GroupedGemmRequest:
        e = self.extent
        text = self.groups or f"{e}x{e}x{e},0x{e}x{e},{e // 4}x{e}x{e}"
        groups = []
        for one in text.split(","):
            if not re.fullmatch(r"\d+x\d+x\d+", one.strip()):
                raise InvalidOperandError(f"--groups has {one!r}; expected MxNxK of each group, such as 128x512x256")
            groups.append(GemmShape(*map(int, one.split("x"))))
        layout_a, layout_b, layout_c = self._matrix_layouts()
        return GroupedGemmRequest(
            GroupedGemmShape(groups),
            dtype=self._dtype(),
            arch=self._arch(),
            layout_a=layout_a,
            layout_b=layout_b,
            layout_c=layout_c,
            epilogue=self._epilogue(),
            out_dtype=self._out_dtype(),
            fast_accum=self.fast_accum,
        )

    def _conv(self) -> Request:
        side = max(4, self.extent // 64)
        n, h, w, c, k, r, s = _numbers("--conv", self.conv or f"8,{side},{side},64,64,3,3", (7,))
        padding = _numbers("--padding", self.padding or "0", (1, 2, 4))
        pads = (_pair(padding[:2]), _pair(padding[2:])) if len(padding) == 4 else _pair(padding)
        if self.layout not in ("", *(layout.value for layout in ConvLayout)):
            raise InvalidOperandError(f"--layout is {self.layout!r}; convolutions have nhwc and nchw")
        (groups,) = _numbers("--groups", self.groups or "1", (1,))
        return CONV[self.op](
            ConvShape.nhwc(
                n, h, w, c, k, r, s,
                stride=_pair(_numbers("--stride", self.stride or "1", (1, 2))),
                padding=pads,
                dilation=_pair(_numbers("--dilation", self.dilation or "1", (1, 2))),
                groups=groups,
            ),
            dtype=self._dtype(),
            arch=self._arch(),
            layout=ConvLayout(self.layout or "nhwc"),
            epilogue=self._epilogue(),
            out_dtype=self._out_dtype(),
            precision=self.precision or None,
        )  # fmt: skip

    def _matrix_layouts(self) -> tuple[GemmLayout, ...]:
        # Kernels want narrow operands contiguous along K.
        letters = self.layout or ("rcr" if self._dtype().bits <= 8 else "rrr")
        if len(letters) != 3 or not set(letters) <= set(_LAYOUTS):
            raise InvalidOperandError(f"--layout is {letters!r}; expected three letters r or c, such as rcr")
        return tuple(_LAYOUTS[letter] for letter in letters)

    def _dtype(self) -> CutlassDtype:
        element = _parsed(CutlassDtype.parse, self.dtype, "--dtype")
        if element is None:
            raise InvalidOperandError("--dtype is empty")
        return element

    def _out_dtype(self) -> CutlassDtype | None:
        return _parsed(CutlassDtype.parse, self.out_dtype, "--out-dtype")

    def _arch(self) -> SmArch | None:
        return _parsed(SmArch.parse, self.arch, "--arch")

    def _epilogue(self) -> GemmEpilogue:
        return GemmEpilogue(alpha=self.alpha, beta=self.beta, bias=self.bias, activation=self.activation or None)


def _numbers(option: str, text: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) not in counts or not all(re.fullmatch(r"\s*\d+\s*", word) for word in words):
        wanted = " or ".join(map(str, counts))
        raise InvalidOperandError(f"{option} is {text!r}; expected {wanted} whole numbers, comma-separated")
    return tuple(map(int, words))


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    return (numbers[0], numbers[-1])


def _parsed(parse: Callable[[str], T], text: str, option: str) -> T | None:
    try:
        return parse(text) if text else None
    except ValueError as error:
        raise InvalidOperandError(f"{option}: {error}") from error
