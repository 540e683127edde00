"""What a call's `epilogue`, `bias`, `activation` and the arrays that go with them mean: a tree with its operands."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _core
from ..arrays import operands
from ..arrays.arguments import check_apart, check_writable, refuse_jax_out
from ..arrays.numerics import numpy_dtype
from ..arrays.operands import BYTE
from ..checks import NUMBERS
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import MATRIX, RESULT, Output
from ..reference import ACTIVATIONS
from . import EpilogueVisitorTree, EvtBuilder, Operand, Traced, operand_of, trace
from .bound import check_input, output_shape

SINGLE = "single"


@dataclass(frozen=True)
class Asked:
    """An epilogue and what it is given.

    Attributes:
        traced: its tree, and how results are returned.
        inputs: views of the tree's inputs, by name.
        outputs: views of the arrays that were given for outputs, by name.
        given: those arrays themselves.
    """

    traced: Traced
    inputs: dict[str, _core.Operand]
    outputs: dict[str, _core.Operand] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def tree(self) -> EpilogueVisitorTree:
        """The tree."""
        return self.traced.tree

    def arrange(self, results: Mapping[str, Any]) -> Any:
        """Results by name, D as `out`, as the caller wants them."""
        return self.traced.arrange(results)


def asked(
    epilogue: Any, given: Mapping[str, Any], shape: tuple[int, ...], *, out_dtype: CutlassDtype, acc: CutlassDtype
) -> Asked:
    """The tree of an epilogue over arrays.

    Args:
        epilogue: a tree, or a function.
        given: arrays by name, and of a function also numbers.
        shape: of the result, (..., M, N).
        out_dtype: of the result, unless the epilogue decides it.
        acc: type of the accumulator.

    Raises:
        InvalidOperandError: an operand is missing, unknown, or of a wrong shape or dtype.
        UnsupportedError: the function cannot be traced.
    """
    views = {name: operands.as_operand(one, name) for name, one in given.items() if not isinstance(one, NUMBERS)}
    numbers: dict[str, Any] = {name: one for name, one in given.items() if isinstance(one, NUMBERS)}

    def over_result(name: str) -> Operand:
        return operand_of(views[name].shape, shape[-2], shape[-1], _dtype(views[name], name) or BYTE, name)

    traced, taken = traced_of(epilogue, views, numbers, over_result, out_dtype=out_dtype, acc=acc)
    return _bound(traced, {name: views[name] for name in taken}, given, shape)


def traced_of(
    epilogue: Any,
    names: Collection[str],
    numbers: Mapping[str, Any],
    operand: Callable[[str], Operand],
    *,
    out_dtype: CutlassDtype,
    acc: CutlassDtype,
) -> tuple[Traced, list[str]]:
    """The tree of an epilogue, and the names of the arrays that count: not those of parameters that go unused.

    Args:
        epilogue: a tree, or a function.
        names: of the arrays that are given.
        numbers: what else is, by name; of a function only.
        operand: what the array of a name is.
        out_dtype: of the result, unless the epilogue decides it.
        acc: type of the accumulator.

    Raises:
        InvalidOperandError: numbers are given to a tree, or as `operand` does.
        UnsupportedError: the function cannot be traced.
    """
    if isinstance(epilogue, EpilogueVisitorTree):
        if numbers:
            raise InvalidOperandError(
                f"{', '.join(numbers)}: a tree takes arrays; give an array of one element, or a function with numbers"
            )
        return of_tree(epilogue), list(names)
    # What is no parameter is an array for a result.
    parameters = _parameters(epilogue, names)
    kinds = {name: operand(name) for name in names if name in parameters}
    compute = CutlassDtype.F64 if acc is CutlassDtype.F64 else CutlassDtype.F32
    traced = trace(epilogue, {**kinds, **numbers}, out_dtype=out_dtype, compute_dtype=compute)
    used = {one.name for one in traced.tree.inputs}
    return traced, [name for name in names if name in used or name not in parameters]


def _parameters(epilogue: Any, names: Iterable[str]) -> set[str]:
    """The names that a function's signature has; all of them where it has none, of which `trace` then says so."""
    try:
        return set(inspect.signature(epilogue).parameters)
    except (TypeError, ValueError):
        return set(names)


def of_tree(tree: EpilogueVisitorTree) -> Traced:
    """A tree as if a function had returned D, or a dict of D and the tree's outputs."""
    names = (RESULT, *(one.name for one in tree.outputs))
    return Traced(tree, "dict" if tree.outputs else SINGLE, names)


@functools.cache
def common(bias: CutlassDtype | None, activation: str | None) -> Traced:
    """The tree of act(acc + bias).

    Args:
        bias: element type of the row that is added; None for none.
        activation: a name of `reference.ACTIVATIONS`, or None.

    Raises:
        InvalidOperandError: an unknown activation.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidOperandError(f"unknown activation {activation!r}; valid: {', '.join(ACTIVATIONS)}")
    builder = EvtBuilder()
    if bias is not None:
        builder.add_bias("bias", dtype=bias)
    if activation not in (None, "identity"):
        builder.activation(activation)
    return of_tree(builder.build())


def with_bias(bias: Any, activation: str | None, shape: tuple[int, ...]) -> Asked:
    """act(acc + bias) over arrays.

    Raises:
        InvalidOperandError: the bias is not (N,), or the activation is unknown.
    """
    if activation is not None and not isinstance(activation, str):
        raise InvalidOperandError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")
    if bias is None:
        return Asked(common(None, activation), {})
    view = operands.as_operand(bias, "bias")
    return _bound(common(operands.dtype_of(view, "bias"), activation), {"bias": view}, {"bias": bias}, shape)


def refuse_scale_d(scale_d: Any) -> None:
    """Refuses a number as scale_d beside an epilogue.

    Raises:
        UnsupportedError: it is one.
    """
    if isinstance(scale_d, NUMBERS):
        raise UnsupportedError(
            "scale_d is a number, and what follows the product does not let it be part of alpha: multiply in the "
            "epilogue, or give it as an array (fp8)"
        )


def empty(output: Output, shape: tuple[int, ...], device: int, like: Any) -> tuple[Any, _core.Operand]:
    """Memory for an output of a tree over a result of this shape, as `operands.empty` gives it."""
    element = BYTE if output.dtype is None else output.dtype.dlpack
    return operands.empty_of(output_shape(output, shape), element, device, like)


def numpy_element(output: Output) -> Any:
    """The NumPy dtype of an output."""
    return "uint8" if output.dtype is None else numpy_dtype(output.dtype)


def reduce_nothing(outputs: Iterable[Output], views: Mapping[str, _core.Operand], stream: int) -> None:
    """Writes the reductions of a result without elements in the order of a stream: 0, and of maxima -infinity."""
    for output in outputs:
        if output.reduction and output.dtype is not None:
            view, value = views[output.name], -math.inf if output.reduction == "max" else 0.0
            operands.write_async(np.full(view.shape, value, numpy_dtype(output.dtype)), view, stream)


def _bound(
    traced: Traced, views: Mapping[str, _core.Operand], given: Mapping[str, Any], shape: tuple[int, ...]
) -> Asked:
    check_names(traced.tree, views)
    inputs = {one.name: one for one in traced.tree.inputs}
    outputs = {one.name: one for one in traced.tree.outputs}
    for name, one in inputs.items():
        check_input(one, views[name].shape, _dtype(views[name], name), shape)
    written = {name: views[name] for name in outputs if name in views}
    for name, view in written.items():
        refuse_jax_out(given[name], name)
        _check_output(outputs[name], view, shape)
    return Asked(traced, {name: views[name] for name in inputs}, written, {name: given[name] for name in written})


def check_results(
    tree: EpilogueVisitorTree, product: Mapping[str, _core.Operand], views: Mapping[str, _core.Operand]
) -> None:
    """Refuses results that share memory with each other or with an operand, but D in the place of a matrix or of C.

    Args:
        tree: the tree.
        product: views of the product's operands and of `out`, if it is given.
        views: of the tree's inputs, and of the arrays that are given for its outputs.

    Raises:
        InvalidOperandError: names the two.
    """
    outputs = [one.name for one in tree.outputs if one.name in views]
    written = {name: views[name] for name in outputs}
    written |= {RESULT: product[RESULT]} if RESULT in product else {}
    read = {name: view for name, view in {**product, **views}.items() if name not in written}
    check_apart(written, read, {"c", *(one.name for one in tree.inputs if one.kind == MATRIX)})


def check_names(tree: EpilogueVisitorTree, given: Collection[str]) -> None:
    """Refuses arrays that a tree has no operand for, and inputs without an array.

    Raises:
        InvalidOperandError: names them.
    """
    inputs, outputs = ([one.name for one in some] for some in (tree.inputs, tree.outputs))
    unknown = [name for name in given if name not in inputs and name not in outputs]
    missing = [name for name in inputs if name not in given]
    if unknown:
        known = ", ".join([*inputs, *outputs]) or "none"
        raise InvalidOperandError(f"the epilogue has no operand {', '.join(unknown)}; its operands are {known}")
    if missing:
        raise InvalidOperandError(f"the epilogue reads {', '.join(missing)}: give an array for each by its name")


def decided(tree: EpilogueVisitorTree, result: CutlassDtype, *, told: bool) -> CutlassDtype:
    """The result's element type, which a tree may decide.

    Args:
        tree: what makes the result.
        result: what it is otherwise.
        told: whether out, out_dtype or c have said so.

    Raises:
        InvalidOperandError: they say another than the tree.
    """
    if tree.result_dtype is None or tree.result_dtype is result:
        return result
    if told:
        raise InvalidOperandError(
            f"the epilogue casts D to {tree.result_dtype.value}; out, out_dtype or c say {result.value}"
        )
    return tree.result_dtype


def _check_output(output: Output, view: _core.Operand, shape: tuple[int, ...]) -> None:
    wanted = output_shape(output, shape)
    if view.shape != wanted:
        raise InvalidOperandError(f"{output.name} has shape {view.shape}; the epilogue writes {wanted}")
    if _dtype(view, output.name) is not output.dtype:
        name = "uint8" if output.dtype is None else output.dtype.value
        raise InvalidOperandError(f"{output.name} has another dtype than the epilogue writes: {name}")
    check_writable(view, output.name)


def _dtype(view: _core.Operand, name: str) -> CutlassDtype | None:
    """An element type, None for bytes."""
    return None if view.dtype == BYTE else operands.dtype_of(view, name)
