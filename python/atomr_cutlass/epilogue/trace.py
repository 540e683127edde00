"""Traces a Python function into an epilogue tree by calling it once; also the parts that EvtBuilder shares."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..checks import MOST, check_options, expect, shown
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import (
    ACCUMULATOR,
    COLUMN,
    INPUT_DTYPES,
    KINDS,
    MASK,
    MATRIX,
    RESULT,
    ROW,
    SCALAR,
    EpilogueVisitorTree,
    Node,
    Output,
)
from .values import Scope, Stored, Value, element_name, element_type, finite

SINGLE, TUPLE, DICT = "single", "tuple", "dict"
"""How a function returns its results."""

_SAME_ALONG = {ROW: (ROW, SCALAR), COLUMN: (COLUMN, SCALAR), SCALAR: (SCALAR,)}
"""The kinds of values that do not vary along the dimensions that a reduction to a kind covers."""


@dataclass(frozen=True)
class Operand:
    """The operand that a parameter of a traced function stands for.

    Attributes:
        kind: `scalar`, `row`, `column`, `matrix` or `mask`.
        dtype: its element type, given in any form and kept as a CutlassDtype; None for a mask.
    """

    kind: str
    dtype: Any = CutlassDtype.F32

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise InvalidOperandError(f"an operand is a {shown(self.kind)}; valid: {', '.join(KINDS)}")
        dtype = None if self.kind == MASK else element_type(self.dtype, f"an operand of kind {self.kind}")
        object.__setattr__(self, "dtype", dtype)


def readings(shape: tuple[int, ...], m: int, n: int, *, bits: bool = False) -> tuple[str, ...]:
    """The kinds of operand that an array can be over a result (..., M, N); the first is the default.

    If M or N is 1, several kinds fit, which give every element of the result the same value; the default for the shape
    (..., M, N) is then a matrix. A single element is a scalar. A vector that fits both a row and a column, because M is
    N, is a row by default, and a column only for trees with such an operand.

    Args:
        shape: of the array.
        m: rows of the result.
        n: its columns.
        bits: whether the elements are bytes of mask bits.

    Raises:
        InvalidOperandError: an argument of the wrong kind.
    """
    expect(shape, (tuple, list), "shape", "a tuple of extents")
    for name, size in (("m", m), ("n", n), *(("shape", extent) for extent in shape)):
        if not isinstance(size, (int, np.integer)) or not 0 <= size <= MOST:
            raise InvalidOperandError(f"{name} is {shown(size)}; expected an extent")
    check_options(bits=bits)
    shape = tuple(shape)
    if bits:
        return (MASK,) if shape[-2:] == (m, -(-n // 8)) else ()
    last = shape[-2:] if len(shape) > 1 else ()
    found = (
        (SCALAR, math.prod(shape) == 1),
        (MATRIX, last == (m, n)),
        (ROW, last == (1, n) or shape == (n,)),
        (COLUMN, last == (m, 1) or shape == (m,)),
    )
    return tuple(kind for kind, fits in found if fits)


def operand_of(shape: tuple[int, ...], m: int, n: int, dtype: Any, name: str) -> Operand:
    """The operand that an array is over a result (..., M, N); see `readings` for shapes that fit several kinds.

    Args:
        shape: one element for a scalar, (N,) or (..., 1, N) for a row, (..., M, 1) for a column, (..., M, N) for a
            matrix, and of uint8 (..., M, ceil(N / 8)) for a mask.
        m: rows of the result.
        n: its columns.
        dtype: of its elements, as `element_type` reads it, or uint8.
        name: of the operand.

    Raises:
        InvalidOperandError: another shape or element type.
    """
    bits = element_name(dtype) == "uint8"
    kinds = readings(shape, m, n, bits=bits)
    if kinds and not (kinds[0] == COLUMN and len(shape) == 1):
        return Operand(kinds[0], None if bits else element_type(dtype, name))
    if kinds:
        cure = f"a vector of N = {n} elements is a row, and one of M = {m} is a column only as {(m, 1)}: reshape it"
    elif bits:
        cure = f"expected bits (uint8) of (..., M, ceil(N / 8)), here (..., {m}, {-(-n // 8)})"
    else:
        row, column = f"({n},) or (..., 1, {n}) for a row", f"(..., {m}, 1) for a column"
        cure = f"expected one element, {row}, {column}, or (..., {m}, {n})"
    raise InvalidOperandError(f"{name} has shape {shape}; {cure}")


def input_node(name: str, kind: str, dtype: CutlassDtype | None) -> Node:
    """The node of an operand; a mask has no dtype."""
    return Node("input", (), (name, kind, MASK if kind == MASK or dtype is None else dtype.value))


def tree_of(
    written: Mapping[str, tuple[Output, Node]], *, stored: CutlassDtype, computed: CutlassDtype
) -> EpilogueVisitorTree:
    """The tree of outputs by name, D as `out`, each with its node.

    An output without an element type has that of an outermost cast, which the store then performs, else `stored`.
    Reductions have the element type `computed`.
    """
    stores: dict[str, tuple[Output, Node]] = {}
    for name, (output, node) in written.items():
        dtype = output.dtype
        if output.reduction:
            dtype = computed
        elif output.kind != MASK:
            if node.op == "cast" and (dtype is None or dtype.value == node.attributes[0]):
                node, dtype = node.inputs[0], CutlassDtype(node.attributes[0])  # noqa: PLW2901
            dtype = dtype or (None if name == RESULT else stored)
        stores[name] = replace(output, dtype=dtype), node
    d, result = stores.pop(RESULT)
    if d.dtype is not None and d.dtype not in INPUT_DTYPES:
        valid = ", ".join(dtype.value for dtype in INPUT_DTYPES)
        raise InvalidOperandError(f"the result, {result}, is cast to {d.dtype.value!r}; valid: {valid}")
    made = EpilogueVisitorTree(result, stores.values(), result_dtype=d.dtype)
    for output, node in made.stores:
        if output.reduction and made.kind(node) in _SAME_ALONG[output.kind]:
            raise InvalidOperandError(
                f"output {output.name!r} reduces {node}, which is one value for a whole {made.kind(node)}, to a "
                f"{output.kind}: there is nothing to reduce; reduce what depends on the accumulator or on a matrix"
            )
    return made


@dataclass(frozen=True)
class Traced:
    """A function as a tree.

    Attributes:
        tree: the computation.
        structure: how it returns its results: `single`, `tuple` or `dict`.
        names: of its results in the order in which it returns them; D is `out`.
    """

    tree: EpilogueVisitorTree
    structure: str
    names: tuple[str, ...]

    @classmethod
    def of_tree(cls, tree: EpilogueVisitorTree) -> Traced:
        """A tree as if a function had returned D, or a dict of D and the tree's outputs."""
        return cls(tree, DICT if tree.outputs else SINGLE, (RESULT, *(output.name for output in tree.outputs)))

    @property
    def arranger(self) -> Callable[[Mapping[str, Any]], Any] | None:
        """`arrange`, or None if the function returns D alone."""
        return None if self.structure == SINGLE else self.arrange

    def arrange(self, results: Mapping[str, Any]) -> Any:
        """Arranges results by name, D as `out`, in the structure that the function returns."""
        if self.structure == DICT:
            return {name: results[name] for name in self.names}
        if self.structure == TUPLE:
            return tuple(results[name] for name in self.names)
        return results[RESULT]


def trace(
    function: Callable[..., Any],
    operands: Mapping[str, Operand | float] | None = None,
    *,
    out_dtype: Any = None,
    compute_dtype: Any = CutlassDtype.F32,
) -> Traced:
    """The tree of a function, which is called once, with values in place of arrays.

    Args:
        function: takes the accumulator first and operands by the names of its other parameters. It returns D; or a
            tuple or list of D and further outputs, named `out1`, `out2`, ...; or a dict with D as `out`. A further
            output is a value, or a reduction or mask made by a function of `atomr_cutlass.epilogue`.
        operands: of the parameters; a number is a constant. A parameter with a default may be left out.
        out_dtype: the element type of values that are stored beside D without a cast; `compute_dtype` if None.
        compute_dtype: f64 where the product is, else f32: the element type of reductions.

    Returns:
        The tree, and how the function returns its results.

    Raises:
        InvalidOperandError: operands and parameters do not match, the function returns something else, or the tree is
            wrong.
        UnsupportedError: an operation on a value cannot be traced; names its line. The function's own exceptions pass
            through.
    """
    title = _title(function)
    expect(operands, (Mapping, type(None)), "operands", "a mapping of operands and numbers by name, or None")
    given = dict(operands or {})
    computed = element_type(compute_dtype, "compute_dtype")
    default = computed if out_dtype is None else element_type(out_dtype, "out_dtype")
    signature = _signature(function, title, given)
    scope = Scope()
    bound = signature.bind_partial()
    bound.arguments[next(iter(signature.parameters))] = Value(Node(ACCUMULATOR), scope)
    for name, operand in given.items():
        bound.arguments[name] = Value(_parameter(name, operand), scope)
    try:
        returned = function(*bound.args, **bound.kwargs)
    finally:
        scope.open = False
    structure, results = _results(returned, title)
    written = {name: _written(name, result, title, scope) for name, result in results.items()}
    return Traced(tree_of(written, stored=default, computed=computed), structure, tuple(results))


def _title(function: Any) -> str:
    """The function's name and where it is defined, for messages."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner) if callable(inner) else inner
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _signature(function: Any, title: str, given: Mapping[str, Any]) -> inspect.Signature:
    """The signature, whose first parameter is the accumulator; refuses operands that do not match the others."""
    if not callable(function):
        raise InvalidOperandError(f"epilogue is a {type(function).__name__}; expected a function or a tree")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise InvalidOperandError(
            f"{title} does not tell its parameters: wrap it in a function of its own, such as lambda acc: f(acc)"
        ) from None
    parameters = list(signature.parameters.values())
    variadic = [str(each) for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if variadic:
        raise InvalidOperandError(f"{title} takes {' and '.join(variadic)}: name each operand as a parameter")
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise InvalidOperandError(f"{title} has no parameter for the accumulator: give it a first one")
    accumulator, *operands = parameters
    names = [operand.name for operand in operands]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise InvalidOperandError(
            f"{title} has no parameter for {_listed(unknown)}; its operands are {_listed(names) or 'none'} "
            f"({accumulator.name!r} is the accumulator)"
        )
    missing = [each.name for each in operands if each.default is each.empty and each.name not in given]
    if missing:
        raise InvalidOperandError(f"{title} needs {_listed(missing)}: give an array or a number for each by its name")
    return signature


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _parameter(name: str, operand: Operand | float) -> Node:
    if isinstance(operand, Operand):
        return input_node(name, operand.kind, operand.dtype)
    expected = "expected an Operand or a finite number"
    number = finite(operand, lambda given: InvalidOperandError(f"operand {name!r} is {given}; {expected}"))
    return Node("constant", (), (number,), name)


def _results(returned: object, title: str) -> tuple[str, dict[str, Any]]:
    """The structure in which results were returned, and the results by name."""
    if isinstance(returned, Mapping):
        if RESULT not in returned:
            raise InvalidOperandError(f"{title} returns {_listed(map(str, returned)) or 'nothing'}; D is {RESULT!r}")
        return DICT, dict(returned)
    if isinstance(returned, (tuple, list)) and returned:
        return TUPLE, {RESULT if number == 0 else f"{RESULT}{number}": value for number, value in enumerate(returned)}
    return SINGLE, {RESULT: returned}


def _written(name: object, result: object, title: str, scope: Scope) -> tuple[Output, Node]:
    """An output that a function returns, and the node that is written to it."""
    if not isinstance(name, str):
        raise InvalidOperandError(f"{title} returns a result under {name!r}; expected a name")
    stored = Stored(result, MATRIX) if isinstance(result, Value) else result
    if not isinstance(stored, Stored):
        raise InvalidOperandError(
            f"{title} returns a {type(result).__name__} as {name!r}; expected what is computed from its parameters"
        )
    if name == RESULT and stored.kind != MATRIX:
        raise InvalidOperandError(
            f"{title} returns a {stored.reduction or stored.kind} as D; D is a value: return it first, or as {RESULT!r}"
        )
    if stored.value.scope is not scope:
        raise UnsupportedError(
            f"{title} returns a value kept from another trace as {name!r}; compute it from its own parameters"
        )
    return Output(name, stored.kind, None, stored.reduction), stored.value.node
