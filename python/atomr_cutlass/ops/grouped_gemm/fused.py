"""What follows the products of grouped GEMM: an epilogue tree, each group being evaluated with rows and scalars.

A row (N,) or a scalar may be the same for all groups, or each group may have its own: (groups, N), (groups, 1, N) and
(groups, 1, 1), of lists a list. Where the rows of a group begin is known on the device only, which leaves matrices and
columns without a place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ... import _core
from ...arrays import operands
from ...arrays.numerics import INTEGER_DTYPES, AnyArray
from ...arrays.operands import BYTE
from ...epilogue import EpilogueVisitorTree, Operand, Traced, readings
from ...epilogue.bind import check_names, common, traced_of
from ...epilogue.bound import check_input
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import MASK, RESULT, ROW, SCALAR, Input
from ...generator.rules import accumulator
from ...pipeline.problem import MatrixSpec
from .kernels import refuse_tree
from .problem import LIST, GroupedFusion, GroupOperand, does_nothing

Views = tuple[_core.Operand, ...]
Shape = tuple[int, ...]

PRODUCT = ("a", "b", "offsets", "counts", "scale_a", "scale_b")
"""What a tree's operands cannot be called."""


class Groups(NamedTuple):
    """What the products are.

    Attributes:
        form: contiguous, masked, along K or lists.
        number: how many groups there are.
        extents: (M, N, K) of the arrays, of a list of each member.
    """

    form: str
    number: int
    extents: list[tuple[int, int, int]]

    @property
    def listed(self) -> bool:
        """Whether each operand is a list, with a member for each group."""
        return self.form == LIST


class Follows(NamedTuple):
    """What follows the products.

    Attributes:
        traced: the tree, and how its result is returned.
        inputs: views of what it reads, by name and in its order: one, or of a list one for each group, or one for all.
    """

    traced: Traced
    inputs: dict[str, Views]

    @property
    def tree(self) -> EpilogueVisitorTree:
        """The tree."""
        return self.traced.tree

    def arranged(self, d: Any) -> Any:
        """The result as the epilogue returns it."""
        return self.traced.arrange({RESULT: d})

    def fusion(self, views: Mapping[str, Views]) -> GroupedFusion | None:
        """The problem's part, of arrays on the GPU by name; None where the result is the product."""
        if does_nothing(self.tree, *(operands.dtype_of(views[name][0], name) for name in ("a", "out"))):
            return None

        def spec(name: str, view: _core.Operand) -> MatrixSpec:
            return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)

        return GroupedFusion(
            self.tree,
            tuple(
                GroupOperand(one.name, one.kind, tuple(spec(one.name, view) for view in views[one.name]))
                for one in self.tree.inputs
            ),
        )

    def of_groups(self, host: Mapping[str, list[AnyArray]], groups: int) -> dict[str, list[AnyArray]]:
        """Host arrays by name, as what each group reads: (N,), or one element."""
        found = {}
        for one in self.tree.inputs:
            arrays = host[one.name]
            least = 2 if one.kind == ROW else 3
            if len(arrays) == 1 and arrays[0].ndim >= least and arrays[0].shape[0] == groups:
                arrays = list(arrays[0])
            arrays = arrays if len(arrays) == groups else arrays * groups
            found[one.name] = [array.reshape(-1) for array in arrays]
        return found


def of_bias(bias: Views, activation: str | None, groups: Groups) -> Follows:
    """act(acc + bias) over arrays; the activation has been checked.

    Raises:
        InvalidOperandError: the bias is not of a floating type, or no row for all groups or for each.
    """
    for index, view in enumerate(bias):
        name = _member("bias", index, groups, len(bias))
        dtype = operands.dtype_of(view, name)
        if dtype in INTEGER_DTYPES:
            raise InvalidOperandError(f"{name} is {dtype.value}; expected a floating dtype")
        first = operands.dtype_of(bias[0], name)
        if dtype is not first:
            raise InvalidOperandError(f"{name} is {dtype.value}, and bias[0] {first.value}: give one dtype")
    traced = common(operands.dtype_of(bias[0], "bias") if bias else None, activation)
    return _bound(traced, {"bias": bias} if bias else {}, groups)


def of_epilogue(
    epilogue: Any,
    views: Mapping[str, Views],
    numbers: Mapping[str, Any],
    taken: Collection[str],
    groups: Groups,
    *,
    dtype: CutlassDtype,
    out_dtype: CutlassDtype,
) -> Follows:
    """The tree of an epilogue over arrays.

    Args:
        epilogue: a tree, or a function.
        views: of the arrays, by name.
        numbers: what else is given, by name; of a function only.
        taken: names that the product's operands have.
        groups: what the products are.
        dtype: element type of A.
        out_dtype: of the result, unless the epilogue decides it.

    Raises:
        InvalidOperandError: an operand is missing, unknown, or of a wrong shape or dtype.
        UnsupportedError: the function cannot be traced, or grouped kernels do not evaluate such trees.
    """
    acc = accumulator(dtype)

    def operand(name: str) -> Operand:
        return _operand(name, views[name], groups)

    traced, counting = traced_of(epilogue, views, numbers, operand, out_dtype=out_dtype, acc=acc)
    refuse_tree(traced.tree, acc, traced.tree.result_dtype or out_dtype)
    for one in traced.tree.inputs:
        if one.name in taken:
            raise InvalidOperandError(f"the epilogue calls an operand {one.name!r}, as the product does: rename it")
    check_names(traced.tree, counting)
    return _bound(traced, views, groups)


def _bound(traced: Traced, views: Mapping[str, Views], groups: Groups) -> Follows:
    for one in traced.tree.inputs:
        _check(one, views[one.name], groups)
    return Follows(traced, {one.name: views[one.name] for one in traced.tree.inputs})


def _check(one: Input, views: Views, groups: Groups) -> None:
    """Refuses arrays that are not what a tree reads."""
    if groups.listed and len(views) != groups.number and one.kind == ROW:
        raise InvalidOperandError(f"{one.name} is one array; expected a list, one for each group")
    for index, view in enumerate(views):
        name = _member(one.name, index, groups, len(views))
        if not _fits(view.shape, one.kind, groups, index):
            raise InvalidOperandError(f"{name} has shape {view.shape}; expected {_expected(one.kind, groups, index)}")
        m, n, _ = groups.extents[min(index, len(groups.extents) - 1)]
        dtype = None if view.dtype == BYTE else operands.dtype_of(view, name)
        check_input(Input(name, one.kind, one.dtype), (n,) if one.kind == ROW else (1,), dtype, (m, n))


def _operand(name: str, views: Views, groups: Groups) -> Operand:
    """What arrays are to a function; also what grouped kernels do not read, for the rule to say why.

    Raises:
        InvalidOperandError: nothing of that shape or element type could be read.
    """
    first = views[0]
    bits = first.dtype == BYTE
    for kind in () if bits else (SCALAR, ROW):
        if all(_fits(view.shape, kind, groups, index) for index, view in enumerate(views)):
            return Operand(kind, operands.dtype_of(first, name))
    for index, view in enumerate(views):
        m, n, _ = groups.extents[min(index, len(groups.extents) - 1)]
        for kind in readings(view.shape, m, n, bits=bits)[:1]:
            if kind not in (SCALAR, ROW):
                return Operand(kind, None if kind == MASK else operands.dtype_of(view, name))
    index = next((i for i, view in enumerate(views) if not _fits(view.shape, ROW, groups, i)), 0)
    operands.dtype_of(views[index], name)  # or that is what is wrong
    expected = " or ".join(_expected(kind, groups, index) for kind in (SCALAR, ROW))
    raise InvalidOperandError(
        f"{_member(name, index, groups, len(views))} has shape {views[index].shape}; expected {expected}"
    )


def _fits(shape: Shape, kind: str, groups: Groups, index: int) -> bool:
    """Whether an array, of a list the one of this index, is a row, or a scalar, for all groups or for each."""
    count = 1 if groups.listed else groups.number
    if kind == SCALAR:
        return math.prod(shape) == 1 or (not groups.listed and shape == (count, 1, 1))
    n = groups.extents[min(index, len(groups.extents) - 1)][1]
    return kind == ROW and (shape in ((n,), (1, n), (1, 1, n), (count, n), (count, 1, n)))


def _expected(kind: str, groups: Groups, index: int) -> str:
    n = groups.extents[min(index, len(groups.extents) - 1)][1]
    if groups.listed:
        return "one element" if kind == SCALAR else f"({n},)"
    return f"one element or ({groups.number}, 1, 1)" if kind == SCALAR else f"({n},) or ({groups.number}, {n})"


def _member(name: str, index: int, groups: Groups, given: int) -> str:
    return f"{name}[{index}]" if groups.listed and given == groups.number else name
