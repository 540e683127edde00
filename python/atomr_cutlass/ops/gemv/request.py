"""Requests for matrix times vector."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from ...checks import check_index
from ...epilogue.bound import Fusion
from ...epilogue.results import check_tree
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...generator.families.gemv import OP
from ...pipeline.devices import Device
from ...pipeline.plan_cache import PlanKey
from ...pipeline.problem import GemmProblem
from ..gemm.request import GemmEpilogue, GemmLayout, GemmRequest, GemmShape
from ..request_checks import Rendered, expect_extent, expect_fields
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


@dataclass(frozen=True)
class GemvRequest(Rendered):
    """One product of a matrix and a vector, or a batch of them: y = epilogue(A x), dense operands.

    Attributes:
        shape: extents.
        dtype: element type of A and x: F16, BF16 or F32.
        arch: target; None is the arch of the GPU that the plan is made for.
        layout_a: layout of A.
        epilogue: scalars, bias and activation, or a tree. A plan is called with the bias (m,) as `bias`, and with a
            tree's operands by their names, inputs before outputs: a scalar (1,), a row (m,), a column (1,), a matrix
            like y, a mask uint8 (ceil(m / 8)), matrices, masks and outputs with a dimension of batches where there are
            several.
        out_dtype: element type of y (and c); None is the choice of the epilogue's tree, else A's.
        binding: name of an operand A that a plan of this request keeps, such as a layer's weight.

    Raises:
        UnsupportedError: no kernel exists for these element types.
        InvalidOperandError: a value is not of its kind; the epilogue's tree decides another element type than
            out_dtype, or has an operand of a name that one of the product's has.
    """

    shape: GemvShape
    dtype: CutlassDtype = field(kw_only=True)
    arch: SmArch | None = field(default=None, kw_only=True)
    layout_a: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    epilogue: GemmEpilogue = field(default_factory=GemmEpilogue, kw_only=True)
    out_dtype: CutlassDtype | None = field(default=None, kw_only=True)
    binding: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        expect_fields(
            self,
            shape=GemvShape,
            dtype=CutlassDtype,
            arch=SmArch,
            layout_a=GemmLayout,
            epilogue=GemmEpilogue,
            out_dtype=CutlassDtype,
        )
        check_types(self.dtype, self.math)
        if self.epilogue.tree is not None:
            check_tree(self.epilogue.tree, self.result_dtype, {"a", "x", *(["c"] if self.epilogue.beta != 0 else [])})

    @functools.cached_property
    def product(self) -> GemmRequest:
        """The GEMM of one row that it is: x and the transpose of A."""
        turned = GemmLayout.COL_MAJOR if self.layout_a is GemmLayout.ROW_MAJOR else GemmLayout.ROW_MAJOR
        return GemmRequest(
            GemmShape(1, self.shape.m, self.shape.k, self.shape.batch), dtype=self.dtype, arch=self.arch,
            layout_b=turned, epilogue=self.epilogue, out_dtype=self.out_dtype,
        )  # fmt: skip

    @property
    def result_dtype(self) -> CutlassDtype:
        """The element type of y."""
        return self.product.result_dtype

    @property
    def tree(self) -> EpilogueVisitorTree | None:
        """The tree after the product: the epilogue's, or that of its bias and activation; None for neither."""
        return self.product.tree

    @property
    def math(self) -> str:
        """The math mode of the kernel's key."""
        return self.product.math

    def problem(self, device: int) -> GemmProblem:
        """The problem on the GPU of this index, with dense operands, batches outermost."""
        check_index(device, "device")
        return self.product.problem(device)

    def fusion(self) -> Fusion | None:
        """The epilogue tree with the dense arrays that a plan is called with; None without a tree."""
        d = self.problem(0).d
        return None if self.tree is None else VectorResult(vector_of(d).shape).dense(self.tree, d)

    def plan_key(self) -> PlanKey:
        """The key of this request's plan. Needs no GPU."""
        return PlanKey(
            op=OP,
            shape=(self.shape.m, self.shape.k, self.shape.batch),
            layouts=(self.layout_a.value,),
            dtypes=(self.dtype, self.dtype, self.result_dtype),
            math=self.math,
            epilogue=self.epilogue.kind,
            arch=self.arch,
            binding=self.binding,
        )

    def search(self, device: Device) -> GemvSearch:
        """The kernels for the request on a device."""
        return search_for(self.problem(device.index), self.fusion(), device, self.arch)
