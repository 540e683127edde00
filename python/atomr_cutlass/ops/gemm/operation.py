"""GEMM: its requests, and the operation that they are of."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...arrays import fp4, operands
from ...arrays.layouts import MatrixSpec, row_major
from ...arrays.numerics import FAST, PRECISIONS
from ...arrays.operands import BYTE
from ...arrays.scales import VECTOR, swizzled_size
from ...checks import check_index, check_options, expect
from ...epilogue.fusion import Fusion
from ...epilogue.results import MatrixResult
from ...errors import InvalidOperandError, UnsupportedError, require
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.epilogue.lower import SCALED, is_gated, split
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...generator.key import RAGGED, REALIGNED, UNALIGNED, KernelKey
from ...generator.matrix import is_supported_for
from ...generator.members import Members
from ...generator.rules import FEW, FP8_TYPES, gemm_types
from ...pipeline import select
from ...pipeline.call_options import documented
from ...pipeline.devices import Device
from ...pipeline.operation import Arrays, OperandSlot, PlannedOperation, epilogue_slots
from ...pipeline.plan import Plan
from ...pipeline.plan_cache import PlanKey
from ...pipeline.reduction import is_batch_invariant
from ...pipeline.request import (
    GemmEpilogue,
    Option,
    Request,
    RequestOptions,
    expect_extents,
    math_of,
    precision_of,
    sampled,
)
from .kernels import GemmCandidate, GemmSearch
from .plans import SCALES, Scale, Scales, make, result_of, scale_shapes, search_for
from .problem import GemmProblem, fused_problem

if TYPE_CHECKING:
    from ...pipeline.probe import Probe

FP8_SCALINGS = (None, "tensor", "vector", "block")
SCALINGS = (*FP8_SCALINGS, *fp4.SCALINGS)
"""Forms of scales on the device: fp8's, then fp4's."""


def expect_scaling(scaling: str | None, valid: Sequence[str | None]) -> None:
    """Refuses a form of scales that an operation does not have."""
    if scaling is not None:
        check_options(scaling=scaling)
    if scaling not in valid:
        raise InvalidOperandError(f"scaling is {scaling!r}; expected {', '.join(map(repr, valid))}")


def expect_fp8(dtype: CutlassDtype) -> None:
    """Refuses scales on the device for operands that are not fp8."""
    if dtype not in FP8_TYPES:
        raise UnsupportedError(f"{dtype.value} operands take no scales on the device: fold them into alpha")


class GemmLayout(enum.Enum, metaclass=Members):
    """The layout of a matrix in memory."""

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
        expect_extents(self, ("m", "n", "k", "batch"), "GemmShape.")


@documented
@dataclass(frozen=True)
class GemmRequest(Request):
    """One GEMM: D = epilogue(A B), dense operands.

    Attributes:
        shape: extents.
        dtype_b: element type of B where it is another: e4m3 and e5m2 may be mixed.
        layout_a, layout_b: layouts of A and B.
        layout_c: layout of C and D.
        epilogue: scalars, bias and activation, or a tree. A plan is called with the bias (n,) as `bias`, and with a
            tree's operands by their names, inputs before outputs: a scalar (1,), a row (n,), a column (m, 1), a matrix
            in D's layout, a mask uint8 (m, ceil(n / 8)); a reduction (1,), (n,) or (m,). Matrices, masks and a tree's
            outputs have a dimension of batches where there are several; a reduction to a scalar has not.
        scaling: fp8's scales that a plan is called with, as float32 arrays: `tensor` (one element for A, one for B),
            `vector` (one for each row of A, (m, 1), and column of B, (1, n)) or `block` ((m, ceil(k / 128)) and
            (ceil(k / 128), ceil(n / 128))); None for none. fp4's are `nvfp4` (e4m3, one for 16 elements of K) and
            `mxfp4` (e8m0 as uint8, one for 32), as `quantize` returns them, with a dimension of batches where there are
            several. A is then uint8 (m, k / 2) and B the transpose of (n, k / 2): layout_b is COL_MAJOR.
        quantized: whether a plan is called with scale_d and amax too, one float32 each.
        binding: {binding} The operand is B.

    Raises:
        UnsupportedError: no kernel exists for these element types, or none for this arch.
        InvalidOperandError: a value is not of its kind; a tree decides another out_dtype or takes an operand's name.
    """

    op: ClassVar[str] = "gemm"

    shape: GemmShape
    layout_a: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_b: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_c: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    precision: str | None = field(default=None, kw_only=True)
    dtype_b: CutlassDtype | None = field(default=None, kw_only=True)
    fast_accum: bool = field(default=False, kw_only=True)
    scaling: str | None = field(default=None, kw_only=True)
    quantized: bool = field(default=False, kw_only=True)
    batch_invariant: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.check_fields(
            shape=GemmShape, layout_a=GemmLayout, layout_b=GemmLayout, layout_c=GemmLayout, fast_accum=bool,
            quantized=bool,
        )  # fmt: skip
        if self.dtype_b is not None:
            expect(self.dtype_b, CutlassDtype, "dtype_b")
        check_options(batch_invariant=self.batch_invariant)
        expect_scaling(self.scaling, SCALINGS)
        fused = self.tree is not None
        require(gemm_types(self.operand_dtype, self.operand_dtype_b, self.result_dtype, self.math, tree=fused))
        if self.arch is not None and not is_supported_for(self.dtype, self.arch):
            valid = ", ".join(a.name for a in SmArch if is_supported_for(self.dtype, a))
            raise UnsupportedError(f"no kernel multiplies {self.dtype.value} on {self.arch.name}; valid: {valid}")
        if self.operand_dtype is fp4.FP4:
            if self.scaling not in (None, *fp4.SCALINGS) or self.quantized:
                wanted = "quantized" if self.quantized else f"scaling is {self.scaling!r}"
                valid = " or ".join(map(repr, fp4.SCALINGS))
                raise UnsupportedError(f"{wanted}: fp4 kernels multiply with scaling {valid}, and have no other scales")
        elif self.scaling in fp4.SCALINGS:
            raise UnsupportedError(f"scaling {self.scaling!r} is fp4's: dtype is then F4E2M1, not {self.dtype.name}")
        elif self.scaling or self.quantized:
            expect_fp8(self.operand_dtype)
        if self.tree is not None:
            scales = {"scale_a", "scale_b"} if self.scaling else set()
            self.refuse_tree(self.tree, {"a", "b", *scales, *(("scale_d", "amax") if self.quantized else ())})

    @property
    def operand_dtype_b(self) -> CutlassDtype:
        """The element type that B is stored in."""
        return (self.dtype_b or self.dtype).storage

    @property
    def math(self) -> str:
        return math_of(self.dtype, self.precision, fast_accum=self.fast_accum)

    def problem(self, device: int) -> GemmProblem:
        """The problem on the GPU of this index, with dense operands, batches outermost."""
        check_index(device, "device")
        shape = self.shape

        def spec(rows: int, columns: int, layout: GemmLayout, dtype: CutlassDtype) -> MatrixSpec:
            inner = (columns, 1) if layout is GemmLayout.ROW_MAJOR else (1, rows)
            if shape.batch == 1:
                return MatrixSpec((rows, columns), inner, dtype)
            return MatrixSpec((shape.batch, rows, columns), (rows * columns, *inner), dtype)

        a = spec(shape.m, shape.k, self.layout_a, self.operand_dtype)
        b = spec(shape.k, shape.n, self.layout_b, self.operand_dtype_b)
        d = spec(shape.m, shape.n, self.layout_c, self.result_dtype)
        return GemmProblem(a=a, b=b, c=d if self.epilogue.beta != 0 else None, d=d, math=self.math, device=device)

    def scales(self) -> Scales:
        """The dense scales that a plan is called with."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        kind = fp4.SCALINGS.get(self.scaling or "")
        if kind is not None:
            batch = () if self.shape.batch == 1 else (self.shape.batch,)
            dtype = BYTE if kind is ScaleType.UE8M0 else kind.dlpack  # as `quantize` returns them
            shapes = ((*batch, swizzled_size(rows, -(-k // VECTOR[kind]))) for rows in (m, n))
            return Scales(*(Scale(shape, row_major(shape), "swizzled", dtype) for shape in shapes))
        single = Scale((1,), (1,), "tensor") if self.quantized else None
        if self.scaling is None:
            return Scales(d=single, amax=single)
        a, b = (Scale(shape, row_major(shape), self.scaling) for shape in scale_shapes(m, n, k)[self.scaling])
        return Scales(a, b, single, single)

    def fusion(self) -> Fusion | None:
        """The epilogue tree with the dense arrays that a plan is called with; None without a tree."""
        d = self.problem(0).d
        return None if self.tree is None else MatrixResult(d.shape).dense(self.tree, d)

    def plan_key(self) -> PlanKey:
        return self._plan_key

    @functools.cached_property
    def _plan_key(self) -> PlanKey:
        words = [f"{self.scaling} scales"] if self.scaling else []
        words += ["quantized"] if self.quantized else []
        return self.key_of(
            self.op,
            (self.shape.m, self.shape.n, self.shape.k, self.shape.batch),
            (self.layout_a.value, self.layout_b.value, self.layout_c.value),
            dtypes=(self.operand_dtype, self.operand_dtype_b, self.result_dtype),
            epilogue="+".join([self.epilogue.kind, *words]),
            batch_invariant=is_batch_invariant(self.batch_invariant),
        )

    def search(self, device: Device) -> GemmSearch:
        invariant = is_batch_invariant(self.batch_invariant)
        problem, scales, fusion = self.problem(device.index), self.scales(), self.fusion()
        return search_for(problem, scales, fusion, device, self.arch, batch_invariant=invariant)


MATRIX_LAYOUT = Option(
    "layout", "Layouts of A, B and D: r (row-major) or c (column-major) each; empty: rrr, for 8 bits and less rcr."
)
FAST_ACCUM = Option("fast_accum", "Let fp8 products be added up in the tensor cores alone.", default=False)
BATCH_INVARIANT = Option("batch_invariant", "Rows have the same bits whatever the other rows.", default=False)
FP8_SCALES = Option("scaling", "fp8 scales: tensor, vector or block.")
PRECISION = Option("precision", f"For f32 operands: {', '.join(PRECISIONS)}.")

LETTERS = {"r": GemmLayout.ROW_MAJOR, "c": GemmLayout.COL_MAJOR}


def layouts_from(options: RequestOptions) -> dict[str, Any]:
    """The layouts of A, B and D, as fields of a request."""
    # Kernels read narrow operands contiguous along K.
    letters = options.given("layout") or ("rcr" if options.dtype.bits <= 8 else "rrr")
    if len(letters) != 3 or not set(letters) <= set(LETTERS):
        raise InvalidOperandError(f"--layout is {letters!r}; expected three letters r or c, such as rcr")
    return {f"layout_{name}": LETTERS[letter] for name, letter in zip("abc", letters, strict=True)}


def fields_from(options: RequestOptions) -> dict[str, Any]:
    """The fields that the requests of all operations have."""
    epilogue = GemmEpilogue(
        alpha=float(options.values.get("alpha", 1.0)),
        beta=float(options.values.get("beta", 0.0)),
        bias=options.flag("bias"),
        activation=options.given("activation"),
    )
    arch, out_dtype = options.parsed("arch", SmArch.parse), options.parsed("out_dtype", CutlassDtype.parse)
    return {"dtype": options.dtype, "arch": arch, "epilogue": epilogue, "out_dtype": out_dtype}


def sample_shape(key: KernelKey) -> GemmShape:
    """Extents of more than a tile along M and N, but no whole number of tiles; aligned as every kernel needs it."""
    m, n, k = key.tile
    if key.mainloop == RAGGED:
        return GemmShape(n + 1, m + 17, 2 * k + 3)
    if key.mainloop == REALIGNED:
        return GemmShape(m + 17, n + 17, 2 * k + 3)
    if key.mainloop == UNALIGNED:
        return GemmShape(m + 17, n + 18, 2 * k + 3)
    if key.mainloop == FEW:
        return GemmShape(n - 16, m + 16, 2 * k)  # it serves at most n rows; its tile's m lies along the columns of D
    return GemmShape(m + 16, n + 16, 2 * k)


def layouts_of(key: KernelKey) -> dict[str, Any]:
    """The layouts of a kernel's A and B, as fields of a request."""
    return {"layout_a": LETTERS[key.layout_a], "layout_b": LETTERS[key.layout_b]}


class GemmOperation(PlannedOperation[GemmRequest]):
    """D = epilogue(A B)."""

    name = "gemm"
    request_type = GemmRequest
    message = "Gemm"
    bound = "b"
    profiled = True
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
        return (*slots, *epilogue_slots(request.fusion()), OperandSlot("out", (result_of(problem),), written=True))

    def request(self, options: RequestOptions) -> GemmRequest:
        return self.request_type(
            GemmShape(options.size("m"), options.size("n"), options.size("k"), options.given("batch") or 1),
            **fields_from(options),
            **layouts_from(options),
            dtype_b=options.parsed("dtype_b", CutlassDtype.parse),
            precision=options.given("precision"),
            fast_accum=options.flag("fast_accum"),
            scaling=options.given("scaling"),
            quantized=options.flag("quantized"),
            batch_invariant=options.flag("batch_invariant") or None,
        )

    def recorded_fields(self, problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> Iterator[dict[str, Any]]:
        *batches, m, n = problem["d"]["shape"]
        if len(batches) > 1 or is_gated(problem["epilogue"]):
            return
        dtype, dtype_b = (CutlassDtype(problem[name]["dtype"]) for name in "ab")
        fields = {
            "shape": GemmShape(m, n, problem["a"]["shape"][-1], *batches),
            "dtype": dtype,
            "dtype_b": None if dtype_b is dtype else dtype_b,
            "out_dtype": CutlassDtype(problem["d"]["dtype"]),
            "epilogue": recorded_epilogue(problem, recorded_tree(problem)),
            **_recorded_scales(problem),
            **recorded_math(problem),
        }
        yield from in_all_layouts(fields)

    def plan(self, request: GemmRequest, device: int, **options: Any) -> Plan:
        options["batch_invariant"] = is_batch_invariant(request.batch_invariant)
        return make(request.problem(device), request.scales(), request.fusion(), **options)

    def write_empty(self, request: GemmRequest, arrays: Mapping[str, Any], stream: int) -> None:
        super().write_empty(request, arrays, stream)
        if "amax" in arrays:
            operands.clear_async(arrays["amax"], stream)

    def random_arrays(self, request: GemmRequest, generator: np.random.Generator) -> Arrays:
        from .reference import random_fp4

        arrays = super().random_arrays(request, generator)
        return arrays | (random_fp4(generator, request) if request.operand_dtype is fp4.FP4 else {})

    def gpu_forms(self, request: GemmRequest, arrays: Arrays) -> Arrays:
        return fp4.gpu_forms(arrays) if request.operand_dtype is fp4.FP4 else arrays

    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[GemmRequest, GemmCandidate]:
        request = GemmRequest(
            sample_shape(key), **sampled(key, epilogue), **layouts_of(key), dtype_b=key.b, precision=precision_of(key),
            fast_accum=key.math == FAST, batch_invariant=False,
        )  # fmt: skip
        problem = fused_problem(request.problem(device.index), request.fusion(), epilogue)
        return request, select.candidate_of(GemmSearch(problem, device), key)

    def probe(self, request: GemmRequest, arrays: Arrays) -> Probe[GemmRequest]:
        from .reference import GemmProbe

        return GemmProbe(request, arrays)


def recorded_epilogue(problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> GemmEpilogue:
    """The epilogue of a recorded problem; its scalars are not recorded."""
    return GemmEpilogue(beta=1.0 if problem["c"] else 0.0, tree=tree)


def recorded_tree(problem: Mapping[str, Any]) -> EpilogueVisitorTree | None:
    """The tree in the epilogue of a recorded problem."""
    program = split(problem["epilogue"])[1]
    return EpilogueVisitorTree.parse(program) if program else None


def in_all_layouts(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of a request with each combination of the layouts of A, B and C."""
    for layouts in itertools.product(GemmLayout, repeat=3):
        yield {**fields, **dict(zip(("layout_a", "layout_b", "layout_c"), layouts, strict=True))}


def recorded_math(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for a recorded problem's math mode."""
    mode = problem["math"]
    return {"precision": mode if mode in PRECISIONS else None, "fast_accum": mode == FAST}


def _recorded_scales(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for a recorded problem's scales; those of tensors and vectors are one problem."""
    base = split(problem["epilogue"])[0]
    if problem["scale_type"] == ScaleType.F32.value:
        return {"scaling": "block", "quantized": base == SCALED}
    of_fp4 = {kind.value: name for name, kind in fp4.SCALINGS.items()}.get(problem["scale_type"])
    return {"scaling": of_fp4 or ("tensor" if base == SCALED else None), "quantized": problem["quantized"]}


def _scale(name: str, scale: Scale) -> OperandSlot:
    dtype = CutlassDtype.from_dlpack(*scale.dtype) or CutlassDtype.I8
    spec = MatrixSpec(scale.shape, scale.strides, dtype, scale.alignment)
    return OperandSlot(name, (spec,), written=name == "amax", element=BYTE if scale.dtype == BYTE else None)


def _operand(name: str, spec: MatrixSpec) -> OperandSlot:
    if spec.dtype is not fp4.FP4:
        return OperandSlot(name, (spec,))
    return OperandSlot(name, (MatrixSpec(*fp4.packed(spec, name), CutlassDtype.I8),), element=BYTE)


OPERATIONS = (GemmOperation(),)
