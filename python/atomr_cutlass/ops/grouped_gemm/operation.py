"""Grouped GEMM as an operation, and its requests."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...arrays.layouts import MatrixSpec, row_major
from ...arrays.numerics import FAST
from ...checks import check_index, check_options, expect, shown
from ...epilogue.fusion import GroupedFusion, GroupOperand
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import LINEAR, epilogue_id
from ...generator.epilogue.tree import ROW, EpilogueVisitorTree, Input
from ...generator.key import KernelKey
from ...generator.matrix import ARCHS
from ...generator.rules import Status, supports_grouped_tree
from ...pipeline.call_options import documented
from ...pipeline.devices import Device
from ...pipeline.operation import Arrays, OperandSlot, PlannedOperation
from ...pipeline.plan import Plan
from ...pipeline.plan_cache import PlanKey
from ...pipeline.probe import Probe
from ...pipeline.reduction import is_batch_invariant
from ...pipeline.request import Option, Request, RequestOptions, math_of, sampled
from ...pipeline.search import Candidate
from ..gemm import operation as gemm
from ..gemm.operation import GemmLayout, GemmShape
from ..gemm.plans import scale_shapes
from .kernels import GroupedSearch, make
from .problem import LIST, OP, GroupedProblem, GroupScale, following, scale_args

_DTYPES = (CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F8E4M3, CutlassDtype.F8E5M2)


@dataclass(frozen=True)
class GroupedGemmShape:
    """Extents of the groups: one product each, of its own m, n and k.

    Attributes:
        groups: a GemmShape with batch 1 for each group; any sequence is taken and kept as a tuple.

    Raises:
        InvalidOperandError: there is no group, or one is not such a shape.
    """

    groups: tuple[GemmShape, ...]

    def __init__(self, groups: Sequence[GemmShape]) -> None:
        if not isinstance(groups, Sequence) or not groups:
            raise InvalidOperandError(f"groups is {shown(groups)}; expected a sequence of at least one GemmShape")
        for index, group in enumerate(groups):
            expect(group, GemmShape, f"groups[{index}]")
            if group.batch != 1:
                raise InvalidOperandError(f"groups[{index}] has batch {group.batch}; expected 1: give a group for each")
        object.__setattr__(self, "groups", tuple(groups))


@documented
@dataclass(frozen=True)
class GroupedGemmRequest(Request):
    """Several GEMMs of different extents in one launch: the form whose operands are lists of dense matrices.

    A plan of it is called with all of A, all of B, with beta all of C, with scaling all scales of A and all of B, with
    a bias all of these, (n,) of D's dtype where that is F64, F32, F16 or BF16, else F32, with a tree its inputs in its
    order, of a row one for each group, (n,), of a scalar one for all, (1,), and all of D. (The other forms of
    `grouped_gemm` read the sizes of groups on the device: no request describes them.)

    Attributes:
        shape: extents of the groups.
        dtype: element type of every A and B: F16, BF16, F8E4M3 or F8E5M2.
        layout_a, layout_b: layouts of A and B.
        layout_c: layout of C and D.
        epilogue: scalars, bias and activation, or a tree of rows and scalars that writes D alone, for all groups.
        scaling: fp8's scales, float32 arrays for each group as `GemmRequest.scaling` has them: `tensor` (1,), `vector`
            (m, 1) and (1, n), or `block` (m, ceil(k / 128)) and (ceil(k / 128), ceil(n / 128)); None for none.
        binding: {binding} The operand is the list B.

    Raises:
        UnsupportedError: no kernels for this dtype or arch, or for such trees; or kernels cannot read block scales of
            such extents from dense arrays.
        InvalidOperandError: a value is not of its kind; a tree decides another out_dtype or takes an operand's name.
    """

    shape: GroupedGemmShape
    layout_a: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_b: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_c: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    fast_accum: bool = field(default=False, kw_only=True)
    scaling: str | None = field(default=None, kw_only=True)
    batch_invariant: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.check_fields(
            shape=GroupedGemmShape, layout_a=GemmLayout, layout_b=GemmLayout, layout_c=GemmLayout, fast_accum=bool
        )
        check_options(batch_invariant=self.batch_invariant)
        self.expect_served("grouped GEMM", _DTYPES, ARCHS[OP])
        gemm.expect_scaling(self.scaling, gemm.FP8_SCALINGS)
        if self.scaling is not None:
            gemm.expect_fp8(self.dtype)
        scales = self._scales
        try:
            for name, scale in scales.items():
                scale_args(name, scale, listed=True)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}, for a call of grouped_gemm: those of a request are dense") from None
        if self.tree is not None:
            self.refuse_tree(self.tree, ("a", "b", *scales))

    def lowers(self, tree: EpilogueVisitorTree) -> Status:
        return supports_grouped_tree(epilogue_id(LINEAR, tree.program)) and super().lowers(tree)

    @functools.cached_property
    def tree(self) -> EpilogueVisitorTree | None:
        return following(self.epilogue.tree_for(self.result_dtype), self.dtype, self.result_dtype)

    @property
    def math(self) -> str:
        return math_of(self.dtype, None, fast_accum=self.fast_accum)

    def problem(self, device: int) -> GroupedProblem:
        """The problem on the GPU of this index, with lists of dense matrices."""
        check_index(device, "device")

        def spec(rows: int, columns: int, layout: GemmLayout, dtype: CutlassDtype) -> MatrixSpec:
            strides = (columns, 1) if layout is GemmLayout.ROW_MAJOR else (1, rows)
            return MatrixSpec((rows, columns), strides, dtype)

        def operand(read: Input) -> GroupOperand:
            extents = [group.n for group in groups] if read.kind == ROW else [1]
            dtype = read.dtype or CutlassDtype.I8
            return GroupOperand(read.name, read.kind, tuple(MatrixSpec((extent,), (1,), dtype) for extent in extents))

        groups, tree = self.shape.groups, self.tree
        a = tuple(spec(group.m, group.k, self.layout_a, self.dtype) for group in groups)
        b = tuple(spec(group.k, group.n, self.layout_b, self.dtype) for group in groups)
        d = tuple(spec(group.m, group.n, self.layout_c, self.result_dtype) for group in groups)
        c = d if self.epilogue.beta != 0 else ()
        fusion = None if tree is None else GroupedFusion(tree, tuple(map(operand, tree.inputs)))
        return GroupedProblem(
            LIST, len(groups), a, b, c, d, counted=False, math=self.math, device=device, fusion=fusion, **self._scales
        )

    @functools.cached_property
    def _scales(self) -> dict[str, GroupScale]:
        """The dense scales of A and B by name; empty without scaling."""
        form = self.scaling
        if form is None:
            return {}
        shapes = zip(*(scale_shapes(group.m, group.n, group.k)[form] for group in self.shape.groups), strict=True)
        dense = (tuple(MatrixSpec(shape, row_major(shape), CutlassDtype.F32) for shape in side) for side in shapes)
        return {name: GroupScale(arrays, form) for name, arrays in zip(("scale_a", "scale_b"), dense, strict=True)}

    def plan_key(self) -> PlanKey:
        return self.key_of(
            OP,
            tuple((group.m, group.n, group.k) for group in self.shape.groups),
            (self.layout_a.value, self.layout_b.value, self.layout_c.value),
            epilogue="+".join([self.epilogue.kind, *([f"{self.scaling} scales"] if self.scaling else [])]),
            batch_invariant=is_batch_invariant(self.batch_invariant),
        )

    def search(self, device: Device) -> GroupedSearch:
        invariant = is_batch_invariant(self.batch_invariant)
        return GroupedSearch(self.problem(device.index), device, self.arch, batch_invariant=invariant)


class GroupedGemmOperation(PlannedOperation[GroupedGemmRequest]):
    """A product for each group, of matrices in lists."""

    name = OP
    request_type = GroupedGemmRequest
    message = "GroupedGemm"
    bound = "b"
    optional = ("c", "bias")
    refuses = MappingProxyType(
        {
            "amax": "the kernels write D alone",
            "precision": "the operands have 16 or 8 bits: there is no choice of precision",
        }
    )
    options = (
        Option("groups", "MxNxK of each group, such as 128x512x256,0x512x256."),
        gemm.MATRIX_LAYOUT,
        gemm.FAST_ACCUM,
        gemm.FP8_SCALES,
        gemm.BATCH_INVARIANT,
    )

    def operands(self, request: GroupedGemmRequest) -> tuple[OperandSlot, ...]:
        grouped = request.problem(0)
        product = [("a", grouped.a), ("b", grouped.b), ("c", grouped.c)]
        product += [(name, scale.arrays) for name, scale in grouped.scales.items()]
        inputs = grouped.fusion.inputs if grouped.fusion else ()
        return (
            *(OperandSlot(name, specs, listed=True) for name, specs in product if specs),
            *(OperandSlot(operand.name, operand.arrays, listed=operand.kind == ROW) for operand in inputs),
            OperandSlot("out", grouped.d, listed=True, written=True),
        )

    def extents(self, request: GroupedGemmRequest) -> dict[str, Any]:
        return {"groups": [[group.m, group.n, group.k] for group in request.shape.groups]}

    def products(self, request: GroupedGemmRequest) -> int:
        return sum(group.m * group.n * group.k for group in request.shape.groups)

    def describe(self, request: GroupedGemmRequest) -> str:
        groups = [f"{group.m}x{group.n}x{group.k}" for group in request.shape.groups]
        shown = ", ".join(groups[:3]) + (", ..." if len(groups) > 3 else "")
        return f"{len(groups)} groups ({shown})"

    def request(self, options: RequestOptions) -> GroupedGemmRequest:
        e = options.extent
        text = options.given("groups") or f"{e}x{e}x{e},0x{e}x{e},{e // 4}x{e}x{e}"
        groups = []
        for group in text.split(","):
            if not re.fullmatch(r"\d+x\d+x\d+", group.strip()):
                raise InvalidOperandError(f"--groups has {group!r}; expected MxNxK of each group, such as 128x512x256")
            groups.append(GemmShape(*map(int, group.split("x"))))
        return GroupedGemmRequest(
            GroupedGemmShape(groups),
            **gemm.fields_from(options),
            **gemm.layouts_from(options),
            fast_accum=options.flag("fast_accum"),
            scaling=options.given("scaling"),
            batch_invariant=options.flag("batch_invariant") or None,
        )

    def recorded_fields(self, problem: Mapping[str, Any], tree: EpilogueVisitorTree | None) -> Iterator[dict[str, Any]]:
        if problem["form"] != LIST:
            return
        members = zip(problem["a"], problem["b"], strict=True)
        groups = [GemmShape(a["shape"][0], b["shape"][1], a["shape"][1]) for a, b in members]
        fields = {
            "shape": GroupedGemmShape(groups),
            "dtype": CutlassDtype(problem["a"][0]["dtype"]),
            "out_dtype": CutlassDtype(problem["d"][0]["dtype"]),
            "epilogue": gemm.recorded_epilogue(problem, tree),
            "scaling": problem["scale_a"]["form"] if problem["scale_a"] else None,
            "fast_accum": problem["math"] == FAST,
        }
        yield from gemm.in_all_layouts(fields)

    def plan(self, request: GroupedGemmRequest, device: int, **options: Any) -> Plan:
        options["batch_invariant"] = is_batch_invariant(request.batch_invariant)
        return make(request.problem(device), **options)

    def sample(
        self, key: KernelKey, epilogue: str, device: Device
    ) -> tuple[GroupedGemmRequest, Candidate[GroupedProblem]]:
        request = GroupedGemmRequest(
            GroupedGemmShape([gemm.sample_shape(key)]), **sampled(key, epilogue), **gemm.layouts_of(key),
            fast_accum=key.math == FAST, batch_invariant=False,
        )  # fmt: skip
        return request, Candidate(key, None, 0.0, request.problem(device.index))

    def probe(self, request: GroupedGemmRequest, arrays: Arrays) -> Probe[GroupedGemmRequest]:
        from .reference import GroupedGemmProbe

        return GroupedGemmProbe(request, arrays)


OPERATIONS = (GroupedGemmOperation(),)
