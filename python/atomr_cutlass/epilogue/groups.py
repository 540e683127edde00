"""The results of groups that an epilogue tree is computed over: each group's with rows and scalars.

A row (N,) or a scalar may be the same for all groups, or each group may have its own: (groups, N), (groups, 1, N) and
(groups, 1, 1), of lists a list. Where the rows of a group begin is known on the device only, which leaves matrices and
columns without a place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..arrays import operands
from ..arrays.arguments import check_out
from ..arrays.numerics import INTEGER_DTYPES, AnyArray
from ..arrays.operands import BYTE
from ..errors import InvalidOperandError, require
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.lower import LINEAR, epilogue_id
from ..generator.epilogue.tree import MASK, RESULT, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from ..generator.rules import supports_grouped_tree, supports_tree
from ..pipeline.operand_table import spec_of
from .bound import GroupedFusion, GroupOperand, check_input
from .trace import Operand, readings

Shape = tuple[int, ...]
Views = tuple[_core.Operand, ...]
"""One array, or of a list its members."""


@dataclass(frozen=True)
class GroupedResult:
    """The results of groups.

    Attributes:
        number: how many groups there are.
        extents: (M, N) of the results, of a list of each member.
        members: extents of the arrays: one, or of a list one for each group.
        lists: the names of the operands that are lists, with a member for each group.
    """

    number: int
    extents: Sequence[tuple[int, int]]
    members: Sequence[Shape]
    lists: Collection[str]

    @property
    def listed(self) -> bool:
        """Whether D is a list, and other operands are too."""
        return RESULT in self.lists

    @property
    def shapes(self) -> dict[str, Shape]:
        """Extents of D's arrays by label."""
        return {self.label(RESULT, index): shape for index, shape in enumerate(self.members)}

    def view(self, array: Any, name: str) -> Views:
        if not isinstance(array, (list, tuple)):
            return (operands.as_operand(array, name),)
        if not self.listed:
            raise InvalidOperandError(f"{name} is a {type(array).__name__}; expected an array")
        if len(array) != self.number:
            raise InvalidOperandError(f"{name} has {len(array)} members; a has {self.number}")
        return tuple(operands.as_operand(member, f"{name}[{index}]") for index, member in enumerate(array))

    def labelled(self, name: str, views: Views) -> dict[str, _core.Operand]:
        return {self.label(name, index): view for index, view in enumerate(views)}

    def label(self, name: str, index: int) -> str:
        """The name of an operand's array."""
        return f"{name}[{index}]" if name in self.lists else name

    def operand(self, name: str, views: Views) -> Operand:
        first = views[0]
        bits = first.dtype == BYTE
        for kind in () if bits else (SCALAR, ROW):
            if all(self._fits(view.shape, kind, index) for index, view in enumerate(views)):
                return Operand(kind, operands.dtype_of(first, name))
        for index, view in enumerate(views):
            for kind in readings(view.shape, *self._matrix(index), bits=bits)[:1]:
                if kind not in (SCALAR, ROW):
                    return Operand(kind, None if kind == MASK else operands.dtype_of(view, name))
        index = next((i for i, view in enumerate(views) if not self._fits(view.shape, ROW, i)), 0)
        operands.dtype_of(views[index], name)  # refuses other element types
        expected = " or ".join(self._expected(kind, index) for kind in (SCALAR, ROW))
        raise InvalidOperandError(f"{self.label(name, index)} has shape {views[index].shape}; expected {expected}")

    def check_tree(self, tree: EpilogueVisitorTree, acc: CutlassDtype, d: CutlassDtype) -> None:
        refuse_tree(tree, acc, d)

    def check_input(self, operand: Input, views: Views) -> None:
        if self.listed and operand.name not in self.lists and operand.kind == ROW:
            raise InvalidOperandError(f"{operand.name} is one array; expected a list, one for each group")
        for index, view in enumerate(views):
            name = self.label(operand.name, index)
            if not self._fits(view.shape, operand.kind, index):
                raise InvalidOperandError(
                    f"{name} has shape {view.shape}; expected {self._expected(operand.kind, index)}"
                )
            matrix = self._matrix(index)
            dtype = None if view.dtype == BYTE else operands.dtype_of(view, name)
            shape = matrix[1:] if operand.kind == ROW else (1,)
            check_input(Input(name, operand.kind, operand.dtype), shape, dtype, matrix)

    def check_output(self, output: Output, views: Views) -> None:
        """There is no output but D: see `refuse_tree`."""

    def check_apart(
        self, tree: EpilogueVisitorTree, product: Mapping[str, Views], views: Mapping[str, Views]
    ) -> None:  # fmt: skip
        for index, out in enumerate(product.get(RESULT, ())):
            read = {
                name: given[index if len(given) > 1 else 0]
                for name, given in {**product, **views}.items()
                if name != RESULT
            }
            check_out({RESULT: out, **read}, read)

    def of_operand(self, name: str, views: Mapping[str, _core.Operand]) -> Views:
        """An operand's arrays, of views by label."""
        return tuple(views[self.label(name, index)] for index in range(self.number if name in self.lists else 1))

    def fusion(self, tree: EpilogueVisitorTree, views: Mapping[str, _core.Operand]) -> GroupedFusion:
        """A tree with the arrays of a launch: views of its operands, by label."""

        def operand(declared: Input) -> GroupOperand:
            arrays = (spec_of(view, declared.name) for view in self.of_operand(declared.name, views))
            return GroupOperand(declared.name, declared.kind, tuple(arrays))

        return GroupedFusion(tree, tuple(map(operand, tree.inputs)))

    def of_groups(self, tree: EpilogueVisitorTree, host: Mapping[str, AnyArray]) -> dict[str, list[AnyArray]]:
        """The operands of each group, of host arrays by label: (N,), or one element."""
        found = {}
        for operand in tree.inputs:
            if operand.name in self.lists:
                arrays = [host[self.label(operand.name, index)] for index in range(self.number)]
            else:
                array = host[operand.name]
                least = 2 if operand.kind == ROW else 3
                each = array.ndim >= least and array.shape[0] == self.number
                arrays = list(array) if each else [array] * self.number
            found[operand.name] = [array.reshape(-1) for array in arrays]
        return found

    def _fits(self, shape: Shape, kind: str, index: int) -> bool:
        """Whether an array, of a list the one of this index, is a row, or a scalar, for all groups or for each."""
        count = 1 if self.listed else self.number
        if kind == SCALAR:
            return math.prod(shape) == 1 or (not self.listed and shape == (count, 1, 1))
        n = self._matrix(index)[1]
        return kind == ROW and (shape in ((n,), (1, n), (1, 1, n), (count, n), (count, 1, n)))

    def _expected(self, kind: str, index: int) -> str:
        n = self._matrix(index)[1]
        if self.listed:
            return "one element" if kind == SCALAR else f"({n},)"
        return f"one element or ({self.number}, 1, 1)" if kind == SCALAR else f"({n},) or ({self.number}, {n})"

    def _matrix(self, index: int) -> tuple[int, int]:
        return self.extents[min(index, len(self.extents) - 1)]


def common_dtype(views: Mapping[str, _core.Operand]) -> CutlassDtype:
    """The element type that arrays, given by label, have in common.

    Raises:
        InvalidOperandError: they have none.
    """
    found = {label: operands.dtype_of(view, label) for label, view in views.items()}
    first, dtype = next(iter(found.items()))
    for label, other in found.items():
        if other is not dtype:
            raise InvalidOperandError(f"{label} is {other.value}, and {first} {dtype.value}: give one dtype")
    return dtype


def check_bias(bias: Views, result: GroupedResult) -> CutlassDtype:
    """The element type of a bias.

    Raises:
        InvalidOperandError: it is not of one floating type.
    """
    views = result.labelled("bias", bias)
    dtype = common_dtype(views)
    if dtype in INTEGER_DTYPES:
        raise InvalidOperandError(f"{next(iter(views))} is {dtype.value}; expected a floating dtype")
    return dtype


def refuse_tree(tree: EpilogueVisitorTree, acc: CutlassDtype, d: CutlassDtype) -> None:
    """Refuses a tree that no grouped kernel evaluates.

    Args:
        tree: the tree.
        acc: type of the accumulator.
        d: of the result.

    Raises:
        UnsupportedError: says why.
    """
    require(supports_grouped_tree(epilogue_id(LINEAR, tree.program)))
    require(supports_tree(tree.program, acc, d))
