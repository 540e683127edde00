"""GEMM as an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import fp4, operands
from ...arrays.numerics import FAST, PRECISIONS
from ...arrays.operands import BYTE
from ...epilogue.bind import reduce_nothing
from ...epilogue.bound import problem_for
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.key import KernelKey
from ...pipeline import select
from ...pipeline.devices import Device
from ...pipeline.operation import Arrays, OperandSlot, PlannedOperation, epilogue_slots
from ...pipeline.plan import Plan
from ...pipeline.probe import Probe
from ...pipeline.problem import GemmProblem, MatrixSpec
from ...pipeline.reduction import is_batch_invariant
from ...pipeline.request import GemmEpilogue, Option, RequestOptions, precision_of, sampled
from .kernels import GemmSearch
from .plans import make
from .request import GemmLayout, GemmRequest, GemmShape
from .scaled import NO_SCALES, SCALES, Scale
from .search import GemmCandidate

if TYPE_CHECKING:
    from ..gemv.request import GemvRequest


def refuse_columns(layout: GemmLayout) -> None:
    """Refuses to allocate a column-major result.

    Raises:
        InvalidOperandError: the layout is that.
    """
    if layout is not GemmLayout.ROW_MAJOR:
        raise InvalidOperandError("out is needed: results are allocated row-major, and layout_c is COL_MAJOR")


MATRIX_LAYOUT = Option(
    "layout", "Layouts of A, B and D: r (row-major) or c (column-major) each; empty: rrr, for 8 bits and less rcr."
)
FAST_ACCUM = Option("fast_accum", "Let fp8 products be added up in the tensor cores alone.", default=False)
BATCH_INVARIANT = Option("batch_invariant", "Rows have the same bits whatever the other rows.", default=False)
FP8_SCALES = Option("scaling", "fp8 scales: tensor, vector or block.")
PRECISION = Option("precision", f"For f32 operands: {', '.join(PRECISIONS)}.")

LETTERS = {"r": GemmLayout.ROW_MAJOR, "c": GemmLayout.COL_MAJOR}


def layouts_from(options: RequestOptions) -> dict[str, Any]:
    """The layouts of A, B and D, as fields of a request.

    Raises:
        InvalidOperandError: other letters, or not three.
    """
    # Kernels want narrow operands contiguous along K.
    letters = options.given("layout") or ("rcr" if options.dtype.bits <= 8 else "rrr")
    if len(letters) != 3 or not set(letters) <= set(LETTERS):
        raise InvalidOperandError(f"--layout is {letters!r}; expected three letters r or c, such as rcr")
    return {f"layout_{name}": LETTERS[letter] for name, letter in zip("abc", letters, strict=True)}


def fields_from(options: RequestOptions) -> dict[str, Any]:
    """The fields of a request that every operation's have."""
    epilogue = GemmEpilogue(
        alpha=options.number("alpha", 1.0),
        beta=options.number("beta", 0.0),
        bias=options.flag("bias"),
        activation=options.given("activation"),
    )
    out_dtype = options.element_type("out_dtype")
    return {"dtype": options.dtype, "arch": options.arch, "epilogue": epilogue, "out_dtype": out_dtype}


def sample_shape(key: KernelKey) -> GemmShape:
    """More than a tile along M and N, and neither a whole number of tiles; aligned for every kernel."""
    return GemmShape(key.tile[0] + 16, key.tile[1] + 16, 2 * key.tile[2])


def followed(request: GemmRequest | GemvRequest, epilogue: str, device: Device) -> GemmProblem:
    """The problem of a request whose tree follows, as this epilogue of a kernel."""
    problem, fusion = request.problem(device.index), request.fusion()
    return problem if fusion is None else problem_for(problem, fusion, epilogue)


def layouts_of(key: KernelKey) -> dict[str, Any]:
    """The layouts of A and B that a kernel reads, as fields of a request."""
    return {"layout_a": LETTERS[key.layout_a], "layout_b": LETTERS[key.layout_b]}


class GemmOperation(PlannedOperation[GemmRequest]):
    """D = epilogue(A B)."""

    name = "gemm"
    request_type = GemmRequest
    message = "Gemm"
    bound = "b"
    options: tuple[Option, ...] = (
        Option("m", "Rows of A and D.", None),
        Option("n", "Columns of B and D.", None),
        Option("k", "Columns of A, rows of B.", None),
        Option("batch", "How many products.", None),
        MATRIX_LAYOUT,
        Option("dtype_b", "Element type of B where it is another: fp8 may be mixed."),
        PRECISION,
        FAST_ACCUM,
        BATCH_INVARIANT,
        Option("scaling", f"{FP8_SCALES.help} Or fp4's: nvfp4, mxfp4."),
        Option("quantized", "scale_d and amax as arrays.", default=False),
    )

    def operands(self, request: GemmRequest) -> tuple[OperandSlot, ...]:
        problem, scales = request.problem(0), request.scales()
        slots = [_operand("a", problem.a), _operand("b", problem.b)]
        slots += [OperandSlot("c", (problem.c,))] if problem.c is not None else []
        slots += [_scale(name, scale) for name, scale in zip(SCALES, scales, strict=True) if scale is not None]
        return (*slots, *epilogue_slots(request.fusion()), OperandSlot("out", (problem.d,), written=True))

    def optional_names(self, request: GemmRequest) -> tuple[str, ...]:
        return ("a", "b", "c", *(SCALES if request.scales() != NO_SCALES else ()))

    def request(self, options: RequestOptions) -> GemmRequest:
        batch = options.given("batch")
        return self.request_type(
            GemmShape(options.size("m"), options.size("n"), options.size("k"), 1 if batch is None else batch),
            **fields_from(options),
            **layouts_from(options),
            dtype_b=options.element_type("dtype_b"),
            precision=options.given("precision"),
            fast_accum=options.flag("fast_accum"),
            scaling=options.given("scaling"),
            quantized=options.flag("quantized"),
            batch_invariant=options.flag("batch_invariant") or None,
        )

    def plan(self, request: GemmRequest, device: int, **options: Any) -> Plan:
        options["batch_invariant"] = is_batch_invariant(request.batch_invariant)
        return make(request.problem(device), request.scales(), request.fusion(), **options)

    def write_empty(self, request: GemmRequest, arrays: Mapping[str, Any], stream: int) -> None:
        if request.tree is not None:
            reduce_nothing(request.tree.outputs, dict(arrays), stream)
        if "amax" in arrays:
            operands.clear_async(arrays["amax"], stream)

    def result_layout(self, request: GemmRequest) -> str:
        refuse_columns(request.layout_c)
        return super().result_layout(request)

    def search(self, request: GemmRequest, device: Device) -> GemmSearch | None:
        if 0 in (request.shape.m, request.shape.n, request.shape.batch):
            return None
        return request.search(device)

    def random_arrays(self, request: GemmRequest, generator: np.random.Generator) -> Arrays:
        from .probe import random_fp4

        arrays = super().random_arrays(request, generator)
        return arrays | (random_fp4(generator, request) if request.operand_dtype is fp4.FP4 else {})

    def gpu_forms(self, request: GemmRequest, arrays: Arrays) -> Arrays:
        return fp4.gpu_forms(arrays) if request.operand_dtype is fp4.FP4 else arrays

    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[GemmRequest, GemmCandidate]:
        request = GemmRequest(
            sample_shape(key), **sampled(key, epilogue), **layouts_of(key), dtype_b=key.b, precision=precision_of(key),
            fast_accum=key.math == FAST, batch_invariant=False,
        )  # fmt: skip
        return request, select.candidate_of(GemmSearch(followed(request, epilogue, device), device), key)

    def probe(self, request: GemmRequest, arrays: Arrays) -> Probe[GemmRequest]:
        from .probe import GemmProbe

        return GemmProbe(request, arrays)


def _scale(name: str, scale: Scale) -> OperandSlot:
    dtype = CutlassDtype.from_dlpack(*scale.dtype) or CutlassDtype.I8
    spec = MatrixSpec(scale.shape, scale.strides, dtype, scale.alignment)
    return OperandSlot(name, (spec,), written=name == "amax", element=BYTE if scale.dtype == BYTE else None)


def _operand(name: str, spec: MatrixSpec) -> OperandSlot:
    if spec.dtype is not fp4.FP4:
        return OperandSlot(name, (spec,))
    return OperandSlot(name, (MatrixSpec(*fp4.packed(spec, name), CutlassDtype.I8),), element=BYTE)


OPERATIONS = (GemmOperation(),)
