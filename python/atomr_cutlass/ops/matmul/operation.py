"""Matmul, in the shape of cuBLASLt's: its requests, its list of epilogues, and the operation that they are of."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ...arrays.operands import check_backend, launching
from ...checks import NUMBERS, check_number, check_options, expect
from ...epilogue.builder import EvtBuilder
from ...errors import InvalidOperandError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import ACCUMULATOR, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ...generator.members import Members
from ...pipeline.call import BACKENDS, Invocation
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.heuristic import KernelUse
from ...pipeline.operation import CallOperation
from ...pipeline.request import expect_extent, expect_extents

BIAS, AUX, AMAX = "bias", "gelu_aux", "amax_d"
"""Arrays that only some matmuls have, by their names."""

ADDED, GRADIENT = "added", "gradient"
WRITTEN, READ = "written", "read"


class MatmulEpilogue(enum.Enum, metaclass=Members):
    """The function of x = alpha * op(A) op(B) + beta * C, with cuBLASLt's names. Gelu is the tanh form.

    * DEFAULT: D = x. BIAS: D = x + bias, of length m, the same for all columns.
    * RELU, GELU: D = act(x). RELU_BIAS, GELU_BIAS: D = act(x + bias).
    * RELU_AUX, RELU_AUX_BIAS: the same, and the auxiliary matrix receives a bit for each element: relu's input is above
      0. (NaN is not: relu keeps a NaN, and its gradient is 0.)
    * GELU_AUX, GELU_AUX_BIAS: the same, and the auxiliary matrix receives the input of gelu.
    * DRELU, DGELU: D = x times the slope of the activation, which the auxiliary matrix of the forward pass tells.
    * DRELU_BGRAD, DGELU_BGRAD: the same, and bias receives the sum of each row of D, before D is rounded.
    * BGRADA: D = x, and bias, of length m, receives the sum of each row of op(A). BGRADB: of length n, of each column
      of op(B).
    """

    DEFAULT = "default"
    RELU = "relu"
    GELU = "gelu"
    BIAS = "bias"
    RELU_BIAS = "relu_bias"
    GELU_BIAS = "gelu_bias"
    RELU_AUX = "relu_aux"
    GELU_AUX = "gelu_aux"
    RELU_AUX_BIAS = "relu_aux_bias"
    GELU_AUX_BIAS = "gelu_aux_bias"
    DRELU = "drelu"
    DGELU = "dgelu"
    DRELU_BGRAD = "drelu_bgrad"
    DGELU_BGRAD = "dgelu_bgrad"
    BGRADA = "bgrada"
    BGRADB = "bgradb"


@dataclass(frozen=True)
class Form:
    """An epilogue, taken apart; empty is none of the values.

    Attributes:
        activation: `relu` or `gelu_tanh`.
        bias: ADDED, or GRADIENT where bias receives the sums of D.
        aux: whether the auxiliary matrix is WRITTEN or READ.
        summed: `a` or `b` where bias receives the sums of that operand.
    """

    activation: str = ""
    bias: str = ""
    aux: str = ""
    summed: str = ""

    @property
    def takes_bias(self) -> bool:
        """Whether the request has a bias, to be read or written."""
        return bool(self.bias or self.summed)

    @property
    def writes_bias(self) -> bool:
        """Whether it is written."""
        return self.takes_bias and self.bias != ADDED

    @property
    def masked(self) -> bool:
        """Whether the auxiliary matrix is one of bits."""
        return bool(self.aux) and self.activation == "relu"

    @property
    def linear(self) -> bool:
        """Whether D is the product alone."""
        return not (self.activation or self.bias)


_E = MatmulEpilogue
_GELU = "gelu_tanh"

FORMS = {
    _E.DEFAULT: Form(),
    _E.RELU: Form("relu"),
    _E.GELU: Form(_GELU),
    _E.BIAS: Form("", ADDED),
    _E.RELU_BIAS: Form("relu", ADDED),
    _E.GELU_BIAS: Form(_GELU, ADDED),
    _E.RELU_AUX: Form("relu", "", WRITTEN),
    _E.GELU_AUX: Form(_GELU, "", WRITTEN),
    _E.RELU_AUX_BIAS: Form("relu", ADDED, WRITTEN),
    _E.GELU_AUX_BIAS: Form(_GELU, ADDED, WRITTEN),
    _E.DRELU: Form("relu", "", READ),
    _E.DGELU: Form(_GELU, "", READ),
    _E.DRELU_BGRAD: Form("relu", GRADIENT, READ),
    _E.DGELU_BGRAD: Form(_GELU, GRADIENT, READ),
    _E.BGRADA: Form(summed="a"),
    _E.BGRADB: Form(summed="b"),
}


@functools.cache
def tree_of(
    form: Form, bias: CutlassDtype | None, aux: CutlassDtype | None, compute: CutlassDtype, *, amax: bool
) -> EpilogueVisitorTree:
    """The tree over D^T, whose rows are the columns of D.

    `bias` and `aux` are element types (None for bits); `amax` says whether the largest magnitude of D is wanted.
    """
    builder = EvtBuilder(compute_dtype=compute)
    x = ACCUMULATOR
    if form.bias == ADDED:
        builder.input(BIAS, ROW, bias).node("biased", "add", x, BIAS)
        x = "biased"
    if form.aux == WRITTEN and form.masked:
        builder.constant("zero", 0.0).node("positive", "greater", x, "zero").output(AUX, "positive", kind=MASK)
    elif form.aux == WRITTEN:
        builder.output(AUX, x, dtype=aux)
    result = x
    if form.aux == READ:
        builder.input(AUX, MASK if form.masked else MATRIX, aux).node("result", f"d_{form.activation}", x, AUX)
        result = "result"
    elif form.activation:
        builder.node("result", form.activation, x)
        result = "result"
    builder.output(RESULT, result)
    if form.bias == GRADIENT:
        builder.reduce_node(BIAS, result, ROW)
    if amax:
        builder.reduce_node(AMAX, result, SCALAR, "amax")
    return builder.build()


@dataclass(frozen=True)
class HeuristicKey(KernelUse):
    """The key under which the kernel of a matmul is remembered.

    Attributes:
        m, n, k: extents.
        dtype: element type of A.
        transa, transb: whether A and B are transposed.
        epilogue: the function of the product.
        arch: of the GPU; None for one that no target is made for.

    Raises:
        InvalidOperandError: a value is not of its kind.
    """

    m: int
    n: int
    k: int
    dtype: CutlassDtype
    transa: bool
    transb: bool
    epilogue: MatmulEpilogue
    arch: SmArch | None

    def __post_init__(self) -> None:
        expect_extents(self, ("m", "n", "k"))
        for name, kind in (("dtype", CutlassDtype), ("transa", bool), ("transb", bool), ("epilogue", MatmulEpilogue)):
            expect(getattr(self, name), kind, name)
        check_options(arch=self.arch)


@dataclass(frozen=True, eq=False)
class ScaleSet:
    """Scales of a matmul; None is 1. All multiply.

    Attributes:
        a: of A: a number, which becomes part of alpha, for any element type. For fp8 also a float32 array on the device
            of A: one element, or m of them, one for each row of op(A).
        b: of B: one element, or n of them, one for each column of op(B).
        d: of D, after everything else: a number where the epilogue is DEFAULT, BGRADA or BGRADB; for fp8 operands also
            a float32 array of one element, with any epilogue.
        amax_d: an array of one element, float32 (float64 for float64 operands), which receives the largest magnitude of
            D before `d` and before it is rounded; not of an int32 result.
    """

    a: Any = None
    b: Any = None
    d: Any = None
    amax_d: Any = None

    def __post_init__(self) -> None:
        for name in ("a", "b", "d"):
            if isinstance(getattr(self, name), bool):
                raise InvalidOperandError(f"scales.{name} is a bool; expected a number or an array")
            if isinstance(getattr(self, name), NUMBERS):
                check_number(getattr(self, name), f"scales.{name}")
        if isinstance(self.amax_d, NUMBERS):
            raise InvalidOperandError("scales.amax_d is a number; expected an array of one element, to be written")


class Matrices(NamedTuple):
    """A request's description of its arrays, without the arrays: calls with equal descriptions may share a plan.

    The epilogue is the value of a MatmulEpilogue, `into_c` whether D goes where C is, if there is one, and a leading
    dimension 0 where none is given.
    """

    epilogue: str
    transa: bool
    transb: bool
    into_c: bool
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    ldd: int
    ldaux: int

    @property
    def form(self) -> Form:
        """The epilogue, taken apart."""
        return FORMS[MatmulEpilogue(self.epilogue)]

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each matrix as it is stored; the rows are the least leading dimensions."""
        aux = -(-max(1, self.m) // 8) * 8 if self.form.masked else self.m
        return {
            "a": (self.k, self.m) if self.transa else (self.m, self.k),
            "b": (self.n, self.k) if self.transb else (self.k, self.n),
            **dict.fromkeys("cd", (self.m, self.n)),
            "aux": (aux, self.n),
        }

    def leading(self, name: str) -> int:
        """The leading dimension of a matrix: `a`, `b`, `c`, `d` or `aux`."""
        return getattr(self, f"ld{name}") or max(1, self.sizes[name][0])


@documented
@dataclass(frozen=True, eq=False)
class MatmulRequest:
    """D = scale_d * epilogue(alpha * scale_a * scale_b * op(A) op(B) + beta * C), in the shape of cuBLASLt's matmul.

    op(A) is m x k, op(B) k x n, C and D m x n. All matrices are column-major: element (i, j) of a matrix with leading
    dimension ld is element i + j * ld of its memory. An array stands for memory: for the elements from its first to its
    last. It has any number of dimensions whose elements are contiguous in any order, or two, one of which is contiguous
    and the other's stride the matrix's leading dimension; beyond that its shape says nothing. A row-major (n, m) array
    is a column-major m x n matrix, then, with leading dimension m.

    Attributes:
        a: A, column-major m x k, or with `transa` k x m: anything with DLPack or `__cuda_array_interface__`, or NumPy.
        b: B, k x n, or with `transb` n x k; of A's element type, but that e4m3 and e5m2 may be mixed.
        c: C, m x n, of D's element type. With beta 0 it is not read. Without `d`, D goes there.
        d: D, m x n. It may be exactly `c`, or exactly the `gelu_aux` that DGELU reads, and else shares no memory with
            anything. None is `c`; without either, a new row-major (n, m) array of the kind of `a`, which is D with
            leading dimension m.
        m, n, k: extents.
        alpha, beta: scalars; whole numbers where D is int32. With alpha 0 and epilogue DEFAULT, A and B are not read
            (unless D has a scale or amax on the device).
        transa, transb: whether A and B are transposed. fp8 on a GPU needs transa=True and transb=False, both operands
            contiguous along k, as cuBLASLt's does (sm_90a has others with `fast_accum`).
        lda, ldb, ldc, ldd: leading dimensions in elements, at least the rows of the matrix as it is stored; None is
            just those.
        epilogue: a MatmulEpilogue.
        bias: of length m, of any floating element type, read. With DRELU_BGRAD, DGELU_BGRAD and BGRADA it is written:
            float32, float64 for float64 operands (BGRADA of int8: int32); with BGRADB of length n.
        gelu_aux: the auxiliary matrix of the epilogues that have one. Of gelu m x n, of a floating element type, D's
            or another. Of relu bits in uint8: that of element (i, j) is bit i % 8, counted from the lowest, of byte
            (i + j * ldaux) // 8; where bits are written, the rest of a byte is 0, and whole bytes between m and ldaux
            are left alone or cleared.
        ldaux: its leading dimension, in elements or bits; of bits a multiple of 8 (cuBLASLt wants one of 128, which
            serves as well). None is m, for bits the next multiple of 8.
        scales: a ScaleSet.
        out_dtype: element type of D. None is that of `d` or `c`; of a new D that of A, but bf16 for fp8 and int32 for
            int8, or float32 where more than a product is made of int8.
        batch_invariant: as in `gemm`, for each column of D: whatever the other columns and n.
        reply: receives D once the work is done, or the error: a `concurrent.futures.Future`, or anything else with
            `set_result` and `set_exception`.

    Raises:
        InvalidOperandError: a value is not of its kind, an extent or a leading dimension is too small, or an array is
            missing, or given to an epilogue that has none. `matmul` checks the arrays themselves.
    """

    a: Any = field(repr=False)
    b: Any = field(repr=False)
    c: Any = field(default=None, repr=False)
    d: Any = field(default=None, repr=False)
    m: int = field(kw_only=True)
    n: int = field(kw_only=True)
    k: int = field(kw_only=True)
    alpha: float = field(default=1.0, kw_only=True)
    beta: float = field(default=0.0, kw_only=True)
    transa: bool = field(default=False, kw_only=True)
    transb: bool = field(default=False, kw_only=True)
    lda: int | None = field(default=None, kw_only=True)
    ldb: int | None = field(default=None, kw_only=True)
    ldc: int | None = field(default=None, kw_only=True)
    ldd: int | None = field(default=None, kw_only=True)
    epilogue: MatmulEpilogue = field(default=MatmulEpilogue.DEFAULT, kw_only=True)
    bias: Any = field(default=None, kw_only=True, repr=False)
    gelu_aux: Any = field(default=None, kw_only=True, repr=False)
    ldaux: int | None = field(default=None, kw_only=True)
    scales: ScaleSet = field(default_factory=ScaleSet, kw_only=True, repr=False)
    out_dtype: CutlassDtype | None = field(default=None, kw_only=True)
    workspace_size: int | None = field(default=None, kw_only=True)
    batch_invariant: bool | None = field(default=None, kw_only=True)
    precision: str | None = field(default=None, kw_only=True)
    fast_accum: bool = field(default=False, kw_only=True)
    stream: Any = field(default=None, kw_only=True, repr=False)
    backend: str = field(default="auto", kw_only=True)
    jit: str | None = field(default=None, kw_only=True)
    reply: Any = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        expect_extents(self, ("m", "n", "k"))
        for name in ("transa", "transb", "fast_accum"):
            expect(getattr(self, name), bool, name)
        expect(self.epilogue, MatmulEpilogue, "epilogue")
        expect(self.scales, ScaleSet, "scales")
        check_options(
            backend=self.backend, jit=self.jit, precision=self.precision, alpha=self.alpha, beta=self.beta,
            out_dtype=self.out_dtype, workspace_size=self.workspace_size, batch_invariant=self.batch_invariant,
        )  # fmt: skip
        check_backend(self.backend, BACKENDS)
        for name in ("a", "b"):
            if getattr(self, name) is None:
                raise InvalidOperandError(f"{name} is None; expected an array")
        self._check_arrays()
        self._check_leading()
        if self.reply is not None and not all(hasattr(self.reply, name) for name in ("set_result", "set_exception")):
            raise InvalidOperandError(
                f"reply is a {type(self.reply).__name__}; expected a concurrent.futures.Future, or None"
            )

    @functools.cached_property
    def matrices(self) -> Matrices:
        """Extents, leading dimensions and the rest of the arrays' description."""
        # They are not checked yet: `or` would ask an array for its truth.
        leading = (0 if ld is None else ld for ld in (self.lda, self.ldb, self.ldc, self.ldd, self.ldaux))
        return Matrices(self.epilogue.value, self.transa, self.transb, self.d is None, self.m, self.n, self.k, *leading)

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `matmul` in its order, kept so that a request that is used again is not parsed again."""
        scales, summed = self.scales, self.matrices.form.summed
        # The plan for the sums of an operand has its scale as a constant.
        factor = getattr(scales, summed) if summed else None
        options = CallOptions(
            None, self.out_dtype, self.precision, self.fast_accum, self.backend, self.jit, self.workspace_size,
            self.batch_invariant,
        )  # fmt: skip
        return (
            self.a, self.b, self.c if self.beta != 0 else None, self.bias, self.gelu_aux, scales.amax_d,
            self.c if self.d is None else self.d, self.alpha, self.beta, scales.a, scales.b, scales.d, self.stream,
            options, self.matrices[:4], self.matrices[4:], float(factor) if isinstance(factor, NUMBERS) else 1.0,
        )  # fmt: skip

    def _check_arrays(self) -> None:
        if self.beta != 0 and self.c is None:
            raise InvalidOperandError(f"beta is {self.beta}, so c is needed")
        form, name = FORMS[self.epilogue], self.epilogue.name
        for operand, wanted in (("bias", form.takes_bias), ("gelu_aux", bool(form.aux))):
            given = getattr(self, operand) is not None
            if wanted and not given:
                raise InvalidOperandError(f"epilogue {name} needs {operand}")
            if given and not wanted:
                raise InvalidOperandError(f"{operand} is given, but epilogue {name} has none: leave it out")

    def _check_leading(self) -> None:
        matrices = self.matrices
        form = matrices.form
        for name, (least, _) in matrices.sizes.items():
            given = getattr(self, f"ld{name}")
            if given is None:
                continue
            expect_extent(given, f"ld{name}", 1)
            if given < least:
                matrix = {"aux": "the auxiliary matrix"}.get(name, name.upper())
                raise InvalidOperandError(
                    f"ld{name} is {given}; {matrix} is stored column-major with {least} rows: it is at least that"
                )
        if self.ldaux is not None and not form.aux:
            raise InvalidOperandError(f"ldaux is given, but epilogue {self.epilogue.name} has no auxiliary matrix")
        if form.masked and matrices.leading("aux") % 8:
            raise InvalidOperandError(f"ldaux is {self.ldaux}; bits of relu have a multiple of 8: whole bytes")
        if self.c is None and self.d is None:
            for name in ("c", "d"):
                if getattr(self, f"ld{name}") not in (None, max(1, self.m)):
                    raise InvalidOperandError(f"ld{name} is given, but neither c nor d is: a new D has m")
        if self.d is None and self.c is not None and self.ldd not in (None, matrices.leading("c")):
            raise InvalidOperandError(
                f"ldd is {self.ldd}, but without d the result goes to c, whose ldc is {matrices.leading('c')}"
            )


class MatmulOperation(CallOperation):
    """D = epilogue(op(A) op(B)), column-major."""

    name = "matmul"
    request_type = MatmulRequest
    function = "MatmulRequest"
    message = "Matmul"
    spelled = MappingProxyType(
        {"out": "d", "activation": "epilogue"} | dict.fromkeys(("scale_a", "scale_b", "scale_d", "amax"), "scales")
    )

    def call(self, request: MatmulRequest) -> Invocation:
        from .function import parsed  # which needs requests

        with launching(request.stream, request.a, awaited=True):
            return parsed(request)


OPERATIONS = (MatmulOperation(),)
