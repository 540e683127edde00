"""Requests for grouped GEMM: typed, and refused until there are kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..numerics import default_out_dtype
from ..plan_cache import PlanKey
from .checks import expect, expect_fields, expect_served
from .gemm import GemmEpilogue, GemmLayout, GemmShape

_DTYPES = (CutlassDtype.F16, CutlassDtype.BF16, CutlassDtype.F8E4M3, CutlassDtype.F8E5M2)
_ARCHS = (SmArch.SM90A, SmArch.SM100)


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
            raise InvalidOperandError(f"groups is {groups!r}; expected a sequence of at least one GemmShape")
        for index, group in enumerate(groups):
            expect(group, GemmShape, f"groups[{index}]")
            if group.batch != 1:
                raise InvalidOperandError(f"groups[{index}] has batch {group.batch}; expected 1: give a group for each")
        object.__setattr__(self, "groups", tuple(groups))


@dataclass(frozen=True)
class GroupedGemmRequest:
    """Several GEMMs of different extents in one launch. No kernels serve it yet: rendering it is refused.

    Attributes:
        shape: extents of the groups.
        dtype: element type of every A and B: F16, BF16, F8E4M3 or F8E5M2.
        arch: target; None is the arch of the GPU.
        layout_a, layout_b: layouts of A and B.
        layout_c: layout of C and D.
        epilogue: scalars, bias and activation, of every group alike.
        out_dtype: element type of D (and C); None is A's, or BF16 for fp8.
        binding: name of an operand B that a plan of this request keeps.

    Raises:
        UnsupportedError: grouped GEMM is not to be had for this dtype or arch.
        InvalidOperandError: a value is not of its kind.
    """

    shape: GroupedGemmShape
    dtype: CutlassDtype = field(kw_only=True)
    arch: SmArch | None = field(default=None, kw_only=True)
    layout_a: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_b: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    layout_c: GemmLayout = field(default=GemmLayout.ROW_MAJOR, kw_only=True)
    epilogue: GemmEpilogue = field(default_factory=GemmEpilogue, kw_only=True)
    out_dtype: CutlassDtype | None = field(default=None, kw_only=True)
    binding: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        expect_fields(
            self,
            shape=GroupedGemmShape,
            dtype=CutlassDtype,
            arch=SmArch,
            layout_a=GemmLayout,
            layout_b=GemmLayout,
            layout_c=GemmLayout,
            epilogue=GemmEpilogue,
            out_dtype=CutlassDtype,
        )
        expect_served("grouped GEMM", self.dtype, self.arch, _DTYPES, _ARCHS)

    @property
    def result_dtype(self) -> CutlassDtype:
        """The element type of D."""
        return self.out_dtype or default_out_dtype(self.dtype)

    def plan_key(self) -> PlanKey:
        """The key of this request's plan. Needs no GPU."""
        return PlanKey(
            op="grouped_gemm",
            shape=tuple((group.m, group.n, group.k) for group in self.shape.groups),
            layouts=(self.layout_a.value, self.layout_b.value, self.layout_c.value),
            dtypes=(self.dtype, self.dtype, self.result_dtype),
            math="default",
            epilogue=self.epilogue.kind,
            arch=self.arch,
            binding=self.binding,
        )

    def render_cu(self) -> NoReturn:
        """Refused: there is no kernel to render.

        Raises:
            UnsupportedError: always, for now.
        """
        raise UnsupportedError("grouped GEMM has no kernels yet: send each group as a GemmRequest of its own")
