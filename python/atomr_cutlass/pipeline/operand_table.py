"""What plans of requests are called with: the arrays by name, in the order of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..arrays import fp4
from ..arrays.operands import BYTE
from ..epilogue.bound import Fusion
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import MASK, ROW
from ..ops.conv2d.fusion import in_layout
from ..ops.conv2d.problem import OPERANDS, WGRAD
from ..ops.conv2d.request import ConvLayout
from ..ops.gemm.request import GemmRequest
from ..ops.gemm.scaled import Scale
from ..ops.grouped_gemm.request import GroupedGemmRequest
from .problem import MatrixSpec

SCALES = ("scale_a", "scale_b", "scale_d", "amax")


@dataclass(frozen=True)
class Slot:
    """An operand of a request.

    Attributes:
        name: as callers say it: `a`, `x`, `scale_a`, ..., or as an epilogue tree has it; of the result `out`.
        specs: how its array lies, dimensions in the order of a call; of a list, each of its arrays.
        listed: whether it is a list.
        written: whether a call writes it.
        element: DLPack's (type code, bits) where it is not that of the specs: fp4, e8m0 and masks are bytes, which have
            no name among element types; shapes and strides count bytes then.
    """

    name: str
    specs: tuple[MatrixSpec, ...]
    listed: bool = False
    written: bool = False
    element: tuple[int, int] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each array."""
        return tuple(f"{self.name}[{i}]" for i in range(len(self.specs))) if self.listed else (self.name,)


def slots_of(request: Any) -> tuple[Slot, ...]:
    """What a plan of this request is called with, in order; the result is the last."""
    if isinstance(request, GemmRequest):
        return _of_gemm(request)
    if isinstance(request, GroupedGemmRequest):
        grouped = request.problem(0)
        inputs = grouped.fusion.inputs if grouped.fusion else ()
        product = (("a", grouped.a), ("b", grouped.b), ("c", grouped.c))
        return (
            *(Slot(name, specs, listed=True) for name, specs in product if specs),
            *(Slot(one.name, one.arrays, listed=one.kind == ROW) for one in inputs),
            Slot("out", grouped.d, listed=True, written=True),
        )
    conv = request.problem(0)
    first, second = OPERANDS[request.op]
    arrays = ((first, conv.a), (second, conv.b), ("c", conv.c), ("bias", conv.bias))
    found = [Slot(name, (_ordered(spec, request.layout),)) for name, spec in arrays if spec is not None]
    return (*found, *_of_fusion(conv.fusion), Slot("out", (_ordered(conv.d, request.layout),), written=True))


def names_of(request: Any) -> tuple[str, ...]:
    """The operands that requests of this kind may have, those of this one first; without the result."""
    if isinstance(request, GemmRequest):
        every: tuple[str, ...] = ("a", "b", "c", *(SCALES if request.scales() is not None else ()))
    elif isinstance(request, GroupedGemmRequest):
        every = ("a", "b", "c", "bias")
    else:
        every = (*OPERANDS[request.op], "c", *(("bias",) if request.op != WGRAD else ()))
    own = tuple(slot.name for slot in slots_of(request)[:-1])
    return own + tuple(name for name in every if name not in own)


def plain(request: Any) -> bool:
    """Whether the request is a GEMM without scales, bias, activation and tree: that has a `Plan`, not an `OpPlan`."""
    return isinstance(request, GemmRequest) and request.scales() is None and request.tree is None


def shape_of(request: Any) -> dict[str, Any]:
    """The request's extents, as JSON-ready values."""
    shape = request.shape
    if isinstance(request, GemmRequest):
        return {"m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.batch}
    if isinstance(request, GroupedGemmRequest):
        return {"groups": [[one.m, one.n, one.k] for one in shape.groups]}
    extents = {name: getattr(shape, name) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")}
    return extents | {
        "stride": list(shape.stride),
        "padding": [list(one) for one in shape.pads],
        "dilation": list(shape.dilation),
        "groups": shape.groups,
    }


def products_of(request: Any) -> int:
    """How many pairs of elements the request multiplies and adds."""
    shape = request.shape
    if isinstance(request, GemmRequest):
        return int(shape.batch * shape.m * shape.n * shape.k)
    if isinstance(request, GroupedGemmRequest):
        return sum(one.m * one.n * one.k for one in shape.groups)
    return int(shape.n * shape.p * shape.q * shape.k * shape.r * shape.s * (shape.c // shape.groups))


def _of_gemm(request: GemmRequest) -> tuple[Slot, ...]:
    what, scales, fusion = request.problem(0), request.scales(), request.fusion()
    found = [_packed("a", what.a), _packed("b", what.b)] if what.a.dtype is fp4.FP4 else [
        Slot("a", (what.a,)), Slot("b", (what.b,))
    ]  # fmt: skip
    found += [Slot("c", (what.c,))] if what.c is not None else []
    if scales is not None:
        for name, scale in zip(SCALES, (scales.a, scales.b, scales.d, scales.amax), strict=True):
            if scale is not None:
                element = BYTE if scale.dtype == BYTE else None
                found.append(Slot(name, (_spec(scale),), written=name == "amax", element=element))
    return (*found, *_of_fusion(fusion), Slot("out", (what.d,), written=True))


def _of_fusion(fusion: Fusion | None) -> Iterator[Slot]:
    for one in () if fusion is None else fusion.arrays:
        shape, strides = one.slot or (one.shape, one.strides)
        spec = MatrixSpec(shape, strides, one.dtype, one.alignment)
        element = BYTE if one.kind == MASK else None
        yield Slot(one.name, (spec,), written=fusion is not None and one in fusion.outputs, element=element)


def _spec(scale: Scale) -> MatrixSpec:
    if scale.form == "swizzled":
        dtype = CutlassDtype.from_dlpack(*scale.dtype) or CutlassDtype.I8
        return MatrixSpec(scale.shape, scale.strides, dtype, fp4.SCALE_ALIGNMENT)
    return MatrixSpec(scale.shape, scale.strides, CutlassDtype.F32, 4)


def _packed(name: str, spec: MatrixSpec) -> Slot:
    return Slot(name, (MatrixSpec(*fp4.packed(spec, name), CutlassDtype.I8),), element=BYTE)


def _ordered(spec: MatrixSpec, layout: ConvLayout) -> MatrixSpec:
    """A spec in the order of NHWC as calls name its dimensions."""
    shape, strides = (in_layout(values, layout.value) for values in (spec.shape, spec.strides))
    return MatrixSpec(shape, strides, spec.dtype, spec.alignment)
