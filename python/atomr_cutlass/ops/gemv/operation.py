"""Matrix times vector as an operation, and its requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...epilogue.fusion import Fusion
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...generator.families.gemv import OP
from ...generator.key import COLUMN, KernelKey
from ...pipeline import select
from ...pipeline.call_options import documented
from ...pipeline.devices import Device
from ...pipeline.operation import NO_CHECK, Array, Arrays, OperandSlot, PlannedOperation, epilogue_slots
from ...pipeline.plan import Plan
from ...pipeline.plan_cache import PlanKey
from ...pipeline.request import Option, Request, RequestOptions, expect_extents, sampled
from ..gemm.kernels import GemmCandidate
from ..gemm.operation import LETTERS, GemmLayout, GemmRequest, GemmShape, fields_from, recorded_epilogue, recorded_tree
from ..gemm.problem import GemmProblem, fused_problem
from .function import GemvSearch, VectorResult, check_types, make, search_for, transposed, vector_of

if TYPE_CHECKING:
    from ...pipeline.probe import Probe


@dataclass(frozen=True)
class GemvShape:
    """Extents of y (m) = A (m x k) x (k), `batch` times.

    Raises:
        InvalidOperandError: an extent is negative or no integer.
    """

    m: int
    k: int
    batch: int = 1

    def __post_init__(self) -> None:
        expect_extents(self, ("m", "k", "batch"), "GemvShape.")


@documented
@dataclass(frozen=True)
class GemvRequest(Request):
    """One product of a matrix and a vector, or a batch of them: y = epilogue(A x), dense operands.

    Attributes:
        shape: extents.
        dtype: element type of A and x: F16, BF16 or F32.
        layout_a: layout of A.
        epilogue: scalars, bias and activation, or a tree. A plan is called with the bias (m,) as `bias`, and with a
            tree's operands by their names, inputs before outputs: a scalar (1,), a row (m,), a column (1,), a matrix
            like y, a mask uint8 (ceil(m / 8)), matrices, masks and outputs with a dimension of batches where there are
            several.
        binding: {binding} The operand is A.

    Raises:
        UnsupportedError: no kernel exists for these element types.
        InvalidOperandError: a value is not of its kind; a tree decides another out_dtype or takes an operand's name.
    """

    shape: GemvShape
    layout_a: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)

    def __post_init__(self) -> None:
        self.check_fields(shape=GemvShape, layout_a=GemmLayout)
        check_types(self.dtype, self.math)
        if self.epilogue.tree is not None:
            self.refuse_tree(self.epilogue.tree, ("a", "x"))

    @functools.cached_property
    def product(self) -> GemmRequest:
        """The GEMM of one row that it is computed as: of x and the transpose of A."""
        transposed_a = GemmLayout.COL_MAJOR if self.layout_a is GemmLayout.ROW_MAJOR else GemmLayout.ROW_MAJOR
        return GemmRequest(
            GemmShape(1, self.shape.m, self.shape.k, self.shape.batch), dtype=self.dtype, arch=self.arch,
            layout_b=transposed_a, epilogue=self.epilogue, out_dtype=self.out_dtype,
        )  # fmt: skip

    @property
    def math(self) -> str:
        return self.product.math

    def problem(self, device: int) -> GemmProblem:
        """The problem on the GPU of this index, with dense operands, batches outermost."""
        return self.product.problem(device)

    def fusion(self) -> Fusion | None:
        """The epilogue tree with the dense arrays that a plan is called with; None without a tree."""
        d = vector_of(self.problem(0).d)
        return None if self.tree is None else VectorResult(d.shape).dense(self.tree, d)

    def plan_key(self) -> PlanKey:
        shape = self.shape
        return self.key_of(OP, (shape.m, shape.k, shape.batch), (self.layout_a.value,))

    def search(self, device: Device) -> GemvSearch:
        return search_for(self.problem(device.index), self.fusion(), device, self.arch)


class GemvOperation(PlannedOperation[GemvRequest]):
    """y = epilogue(A x)."""

    name = OP
    request_type = GemvRequest
    message = "Gemv"
    bound = "a"
    refuses = MappingProxyType(
        NO_CHECK
        | {
            "amax": "an epilogue reduces it (`total_amax`)",
            "batch_invariant": "how many threads share a row of A depends on the number of rows and vectors: use gemm",
            "fast_accum": "no tensor core multiplies: products are added up in float32",
        }
    )
    options = (
        Option("m", "Rows of A and D.", None),
        Option("k", "Columns of A, rows of B.", None),
        Option("batch", "How many products.", None),
        Option("layout", "Layout of A: r (row-major, the default) or c (column-major)."),
    )

    def operands(self, request: GemvRequest) -> tuple[OperandSlot, ...]:
        problem = request.problem(0)
        specs = {"a": transposed(problem.b), "x": vector_of(problem.a)}
        specs |= {"c": vector_of(problem.c)} if problem.c is not None else {}
        out = OperandSlot("out", (vector_of(problem.d),), written=True)
        return (*(OperandSlot(name, (spec,)) for name, spec in specs.items()), *epilogue_slots(request.fusion()), out)

    def request(self, options: RequestOptions) -> GemvRequest:
        letter = options.given("layout") or "r"
        if letter not in LETTERS:
            raise InvalidOperandError(f"--layout is {letter!r}; expected r or c, the layout of A")
        return GemvRequest(
            GemvShape(options.size("m"), options.size("k"), options.given("batch") or 1),
            **fields_from(options),
            layout_a=LETTERS[letter],
        )

    def recorded_fields(self, problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> Iterator[dict[str, Any]]:
        *batches, _, columns = problem["d"]["shape"]
        if len(batches) > 1:
            return
        for layout in GemmLayout:
            yield {
                "shape": GemvShape(columns, problem["a"]["shape"][-1], *batches),
                "dtype": CutlassDtype(problem["a"]["dtype"]),
                "out_dtype": CutlassDtype(problem["d"]["dtype"]),
                "epilogue": recorded_epilogue(problem, recorded_tree(problem)),
                "layout_a": layout,
            }

    def plan(self, request: GemvRequest, device: int, **options: Any) -> Plan:
        return make(request.problem(device), request.fusion(), **options)

    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[GemvRequest, GemmCandidate]:
        """A request of more than one tile of columns, the last one partial; aligned for every kernel."""
        layout = GemmLayout.ROW_MAJOR if key.layout_b == COLUMN else GemmLayout.COL_MAJOR
        request = GemvRequest(GemvShape(key.tile[1] + 16, 4 * key.tile[2]), **sampled(key, epilogue), layout_a=layout)
        problem = fused_problem(request.problem(device.index), request.fusion(), epilogue)
        return request, select.candidate_of(GemvSearch(problem, device), key)

    def probe(self, request: GemvRequest, arrays: Arrays) -> Probe[Any]:
        """The probe of the GEMM of one row, on the same memory."""
        from ..gemm.reference import GemmProbe

        reduced = {output.name for output in request.tree.outputs if output.reduction} if request.tree else set()

        def row(name: str, array: Array) -> Array:
            return array if name in reduced else array[..., None, :]

        given = {name: row(name, array) for name, array in arrays.items() if name not in ("a", "x")}
        given |= {"a": row("x", arrays["x"]), "b": arrays["a"].swapaxes(-1, -2)}
        return GemmProbe(request.product, given)


OPERATIONS = (GemvOperation(),)
