"""Requests for matrix times vector."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from ...epilogue.bound import Fusion
from ...generator.families.gemv import OP
from ...pipeline.call_options import documented
from ...pipeline.devices import Device
from ...pipeline.plan_cache import PlanKey
from ...pipeline.problem import GemmProblem
from ...pipeline.request import Request, expect_extent
from ..gemm.request import GemmLayout, GemmRequest, GemmShape
from .kernels import GemvSearch, search_for
from .problem import VectorResult, check_types, vector_of


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
        for name in ("m", "k", "batch"):
            expect_extent(getattr(self, name), f"GemvShape.{name}")


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
        """The GEMM of one row that it is: x and the transpose of A."""
        turned = GemmLayout.COL_MAJOR if self.layout_a is GemmLayout.ROW_MAJOR else GemmLayout.ROW_MAJOR
        return GemmRequest(
            GemmShape(1, self.shape.m, self.shape.k, self.shape.batch), dtype=self.dtype, arch=self.arch,
            layout_b=turned, epilogue=self.epilogue, out_dtype=self.out_dtype,
        )  # fmt: skip

    @property
    def math(self) -> str:
        """The math mode of the kernel's key."""
        return self.product.math

    def problem(self, device: int) -> GemmProblem:
        """The problem on the GPU of this index, with dense operands, batches outermost."""
        return self.product.problem(device)

    def fusion(self) -> Fusion | None:
        """The epilogue tree with the dense arrays that a plan is called with; None without a tree."""
        d = vector_of(self.problem(0).d)
        return None if self.tree is None else VectorResult(d.shape).dense(self.tree, d)

    def plan_key(self) -> PlanKey:
        """The key of this request's plan. Needs no GPU."""
        shape = self.shape
        return self.key_of(OP, (shape.m, shape.k, shape.batch), (self.layout_a.value,))

    def search(self, device: Device) -> GemvSearch:
        """The kernels for the request on a device."""
        return search_for(self.problem(device.index), self.fusion(), device, self.arch)
