"""Matrix times vector as an operation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...epilogue.bind import reduce_nothing
from ...errors import InvalidOperandError
from ...generator.families.gemv import OP
from ...generator.key import COLUMN, KernelKey
from ...pipeline import select
from ...pipeline.devices import Device
from ...pipeline.operation import NO_CHECK, Arrays, OperandSlot, PlannedOperation, epilogue_slots
from ...pipeline.plan import Plan
from ...pipeline.probe import Probe
from ...pipeline.request import Option, RequestOptions, sampled
from ..gemm.operation import LETTERS, fields_from, followed
from ..gemm.request import GemmLayout
from ..gemm.search import GemmCandidate
from .kernels import GemvSearch, make
from .problem import transposed, vector_of
from .request import GemvRequest, GemvShape


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

    def optional_names(self, request: GemvRequest) -> tuple[str, ...]:
        return ("a", "x", "c")

    def request(self, options: RequestOptions) -> GemvRequest:
        letter, batch = options.given("layout") or "r", options.given("batch")
        if letter not in LETTERS:
            raise InvalidOperandError(f"--layout is {letter!r}; expected r or c, the layout of A")
        return GemvRequest(
            GemvShape(options.size("m"), options.size("k"), 1 if batch is None else batch),
            **fields_from(options),
            layout_a=LETTERS[letter],
        )

    def plan(self, request: GemvRequest, device: int, **options: Any) -> Plan:
        return make(request.problem(device), request.fusion(), **options)

    def write_empty(self, request: GemvRequest, arrays: Mapping[str, Any], stream: int) -> None:
        if request.tree is not None:
            reduce_nothing(request.tree.outputs, dict(arrays), stream)

    def search(self, request: GemvRequest, device: Device) -> GemvSearch | None:
        return None if 0 in (request.shape.m, request.shape.batch) else request.search(device)

    def sample(self, key: KernelKey, epilogue: str, device: Device) -> tuple[GemvRequest, GemmCandidate]:
        """With more than one tile of columns, the last not whole; aligned for every kernel."""
        layout = GemmLayout.ROW_MAJOR if key.layout_b == COLUMN else GemmLayout.COL_MAJOR
        request = GemvRequest(GemvShape(key.tile[1] + 16, 4 * key.tile[2]), **sampled(key, epilogue), layout_a=layout)
        return request, select.candidate_of(GemvSearch(followed(request, epilogue, device), device), key)

    def probe(self, request: GemvRequest, arrays: Arrays) -> Probe[Any]:
        from .probe import product_probe

        return product_probe(request, arrays)


OPERATIONS = (GemvOperation(),)
