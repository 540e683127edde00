"""The problem that grouped GEMM kernels are chosen for: the form, extents, strides, scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...arrays.layouts import MatrixSpec
from ...arrays.scales import BLOCK
from ...epilogue.fusion import GroupedFusion
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import ACCUMULATOR, EpilogueVisitorTree
from ...generator.rules import TREE_OUTPUTS

OP = "grouped_gemm"
CONTIGUOUS, MASKED, ALONG_K, LIST = "contiguous", "masked", "along_k", "list"
FORMS = (CONTIGUOUS, MASKED, ALONG_K, LIST)
"""In the order of their numbers in kernel_abi.h."""

TENSOR, GROUP, VECTOR, BLOCKS = "tensor", "group", "vector", "block"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class GroupScale:
    """The scales of one operand: one array, or a list with one for each group.

    Attributes:
        form: `tensor` (one number in each array), `group` (a number for each group), `vector` (one for each row of A,
            or column of B) or `block`.
    """

    arrays: tuple[MatrixSpec, ...]
    form: str


def following(tree: EpilogueVisitorTree | None, a: CutlassDtype, d: CutlassDtype) -> EpilogueVisitorTree | None:
    """The tree after products of A's type with D's type; None for a tree that kernels without trees compute."""
    if tree is None or tree.result.op != ACCUMULATOR or tree.stores or tree.result_dtype is not None:
        return tree
    return tree if d in TREE_OUTPUTS.get(a, ()) else None


@dataclass(frozen=True)
class GroupedProblem:
    """D[g] = epilogue(alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g]), in the callers' layouts.

    Attributes:
        form: of FORMS; `grouped_gemm` has a table of them.
        a, b, d: the layouts: of one array, or of a list one for each group.
        c: like d, or empty.
        counted: whether counts divide the rows, as always in the masked form; else offsets do.
        math: math mode of the kernel key; `fast` allows `default`.
    """

    form: str
    groups: int
    a: tuple[MatrixSpec, ...]
    b: tuple[MatrixSpec, ...]
    c: tuple[MatrixSpec, ...]
    d: tuple[MatrixSpec, ...]
    counted: bool
    math: str
    device: int
    scale_a: GroupScale | None = None
    scale_b: GroupScale | None = None
    fusion: GroupedFusion | None = None

    @property
    def extents(self) -> tuple[int, int, int]:
        """(M, N, K) of the arrays: rows of all groups for the contiguous form, of each for others. Not of a list."""
        return self.a[0].shape[-2], self.b[0].shape[-1], self.a[0].shape[-1]

    @property
    def members(self) -> list[tuple[int, int, int]]:
        """(M, N, K) of the matrices of a list."""
        return [(a.shape[0], b.shape[1], a.shape[1]) for a, b in zip(self.a, self.b, strict=True)]

    @property
    def scales(self) -> dict[str, GroupScale]:
        """The scales that are arrays, by name."""
        given = {"scale_a": self.scale_a, "scale_b": self.scale_b}
        return {name: scale for name, scale in given.items() if scale is not None}

    @property
    def block_scales(self) -> bool:
        """Whether the scales are those of blocks."""
        return self.scale_a is not None and self.scale_a.form == BLOCKS

    @property
    def empty(self) -> bool:
        """Whether D has no elements."""
        return self.groups == 0 or all(0 in spec.shape for spec in self.d)


_Choices = dict[str, tuple[Shape, ...]]


def scale_args(name: str, scale: GroupScale, *, listed: bool) -> dict[str, int]:
    """A kernel's arguments for `scale_a` or `scale_b`: form and strides, which must be the same throughout a list."""
    letter, arrays = name[-1], [spec for spec in scale.arrays if 0 not in spec.shape] or scale.arrays[:1]
    along, k_along = (-2, -1) if letter == "a" else (-1, -2)
    first, found = arrays[0], {f"scale_form_{letter}": {VECTOR: 1, GROUP: 2}.get(scale.form, 0)}
    if scale.form == GROUP and first.shape[0] > 1 and first.strides[0] != 1:
        raise UnsupportedError(f"{name} has strides {first.strides}: the scales of groups must be contiguous")
    if scale.form == VECTOR and any(spec.shape[along] > 1 and spec.strides[along] != 1 for spec in arrays):
        if listed:
            raise UnsupportedError(f"the members of {name} must be contiguous")
        raise UnsupportedError(f"{name} has strides {first.strides}: the scales of a group must be contiguous")
    if scale.form in (VECTOR, BLOCKS) and len(first.shape) == 3:
        found[f"scale_group_stride_{letter}"] = first.strides[0]
    for field, dim in (("scale_stride", along), ("scale_k_stride", k_along)) if scale.form == BLOCKS else ():
        strides = [spec.strides[dim] for spec in arrays if not listed or spec.shape[dim] > 1] or [1]
        if any(stride != strides[0] for stride in strides[1:]):
            raise UnsupportedError(
                f"the members of {name} have different strides ({sorted({*strides})[:4]}): the block scales of a list "
                "are read with one stride; cut them from one array"
            )
        found[f"{field}_{letter}"] = strides[0]
    return found


def scale_forms(
    form: str, groups: int, extents: Sequence[tuple[int, int, int]], a: Sequence[Shape], b: Sequence[Shape]
) -> tuple[str, str]:
    """The forms (`GroupScale`) of the scales of A and of B, given their shapes; `tensor` without scales.

    `extents` and shapes are those of the arrays, or of each matrix of a list. Refuses other shapes, and block scales of
    one operand only.
    """
    choices = zip(*(_choices(form, groups, *sizes) for sizes in extents), strict=True)
    sides = list(zip(("scale_a", "scale_b"), (a, b), choices, strict=True))
    found = [_forms(shapes, valid) for _, shapes, valid in sides]
    plain = [next((kind for kind in kinds if kind != BLOCKS), "") for kinds in found]
    if all(plain):
        return plain[0], plain[1]
    if all(BLOCKS in kinds for kinds in found):
        return BLOCKS, BLOCKS
    for (name, shapes, valid), kinds in zip(sides, found, strict=True):
        if kinds:
            continue
        for index, shape in enumerate(shapes):  # errors name the first member of a list that fits nothing
            accepted = [each for of_form in valid[min(index, len(valid) - 1)].values() for each in of_form]
            if math.prod(shape) != 1 and shape not in accepted:
                where, expected = f"{name}[{index}]" if form == LIST else name, ", ".join(map(str, accepted))
                raise InvalidOperandError(f"{where} has shape {shape}; expected one element or one of {expected}")
        raise InvalidOperandError(f"the members of {name} are scales of different kinds: {list(shapes)[:4]}")
    first_a, first_b = ("none" if not shapes else shapes[0] for shapes in (a, b))
    raise InvalidOperandError(
        f"scale_a has shape {first_a} and scale_b {first_b}: block scales are for both operands or for neither"
    )


def _forms(shapes: Sequence[Shape], choices: Sequence[_Choices]) -> list[str]:
    """The forms that fit all arrays."""
    found = [TENSOR] if all(math.prod(shape) == 1 for shape in shapes) else []
    if len(shapes) != len(choices):  # no scales, or one array for all matrices of a list
        return found
    pairs = list(zip(shapes, choices, strict=True))
    return found + [form for form in (GROUP, VECTOR, BLOCKS) if all(s in valid.get(form, ()) for s, valid in pairs)]


def _choices(form: str, groups: int, m: int, n: int, k: int) -> tuple[_Choices, _Choices]:
    """The shapes that scales of A and of B may have, beside one element."""
    rows, columns, k_blocks, n_blocks = (m, 1), (1, n), -(-k // BLOCK), -(-n // BLOCK)
    of_a, of_b = (m, k_blocks), (k_blocks, n_blocks)
    if form == LIST:
        return {VECTOR: (rows,), BLOCKS: (of_a,)}, {VECTOR: (columns,), BLOCKS: (of_b,)}
    each: _Choices = {GROUP: ((groups,), (groups, 1, 1))}
    if form == ALONG_K:
        return each | {VECTOR: (rows, (groups, *rows))}, each | {VECTOR: (columns, (groups, *columns))}
    stacked_b = each | {VECTOR: ((groups, *columns),), BLOCKS: ((groups, *of_b),)}
    if form == MASKED:
        return each | {VECTOR: ((groups, *rows),), BLOCKS: ((groups, *of_a),)}, stacked_b
    return {GROUP: ((groups,),), VECTOR: (rows,), BLOCKS: (of_a,)}, stacked_b
