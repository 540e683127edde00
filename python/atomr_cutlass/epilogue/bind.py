"""An epilogue bound to a call: its tree, the arrays that it reads and writes, and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..arrays.numerics import AnyArray, FloatArray
from ..arrays.operands import BYTE, check_devices, refuse_jax_out
from ..checks import NUMBERS
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.common import bias_and_activation
from ..generator.epilogue.tree import MATRIX, RESULT, EpilogueVisitorTree, Output
from ..pipeline import call as calls
from ..reference.tree import evaluate as evaluate_tree
from .results import GroupedResult, MatrixResult
from .trace import Traced, trace


@dataclass(frozen=True)
class BoundEpilogue:
    """An epilogue with the arrays of a call.

    Attributes:
        traced: its tree, and how results are returned.
        result: the shape that the tree is computed over: a MatrixResult, or a GroupedResult, which has no output but D.
        dtype: element type of D.
        inputs: views of the tree's operands, by label.
        outputs: the arrays that the caller gives for results, by name, with their views.
    """

    traced: Traced
    result: Any
    dtype: CutlassDtype
    inputs: dict[str, _core.Operand]
    outputs: dict[str, tuple[Any, Any]]

    @property
    def tree(self) -> EpilogueVisitorTree:
        """The tree."""
        return self.traced.tree

    def results(self) -> dict[str, calls.Result]:
        """The arrays that are written, by name; D comes last."""
        results = {}
        for output in (*self.tree.outputs, Output(RESULT, MATRIX, self.dtype)):
            shape, element = self.result.array_shape(output), BYTE if output.dtype is None else output.dtype.dlpack
            results[output.name] = calls.Result(shape, element, *self.outputs.get(output.name, ()))
        return results

    def evaluate(
        self, acc: FloatArray, fetch: Callable[[_core.Operand], AnyArray], *, scale_d: float | None
    ) -> dict[str, AnyArray]:
        """The results by name, computed by the reference from accumulators and the host copies that `fetch` makes."""
        read = {
            name: fetch(view).reshape(self.result.as_matrix(name, view.shape, view.strides)[0])
            for name, view in self.inputs.items()
        }
        found = evaluate_tree(self.tree, acc.reshape(self.result.matrix), read, out_dtype=self.dtype, scale_d=scale_d)
        results = self.results()
        return {name: values.reshape(results[name].shape) for name, values in found.items()}


def bind(
    call: calls.Call,
    result: MatrixResult | GroupedResult,
    product: Mapping[str, Any],
    *,
    taken: Collection[str],
    out_dtype: CutlassDtype,
    acc: CutlassDtype,
) -> BoundEpilogue:
    """Binds the epilogue of a call, or its bias and activation as a tree, to the call's arrays, after checking them.

    Without a beta the call's `c` is an operand of the epilogue. `product` has the views of the product's operands,
    including `c` with a beta and `out` if given. Operands of the tree must not have the names in `taken`, nor then
    that of `c`. D is of `out_dtype` unless the epilogue casts it.
    """
    given, epilogue, own_c = dict(call.others), call.epilogue, "c" in product
    if call.arrays["bias"] is not None:
        given["bias"] = call.arrays["bias"]
    if epilogue is not None and call.arrays["c"] is not None and call.c is None:
        given["c"] = call.arrays["c"]
    # A number given to a function is a constant; a bias is an array.
    numbers = {name: x for name, x in given.items() if isinstance(x, NUMBERS) and epilogue is not None}
    arrays = {name: array for name, array in given.items() if name not in numbers}
    views: dict[str, Any] = {name: result.view(array, name) for name, array in arrays.items()}
    if epilogue is None:
        bias = result.bias_type(views["bias"]) if "bias" in views else None
        epilogue = bias_and_activation(bias, call.options.activation)
    traced, views = _traced(epilogue, result, views, numbers, out_dtype=out_dtype, acc=acc)
    tree = traced.tree
    result.check_tree(tree, acc, tree.result_dtype or out_dtype)
    _check_names(tree, views, {*taken, "c"} if own_c else taken)
    for operand in tree.inputs:
        result.check_input(operand, views[operand.name])
    outputs = {RESULT: (call.out, product[RESULT])} if RESULT in product else {}
    for output in tree.outputs:
        if output.name in views:
            refuse_jax_out(arrays[output.name], output.name)
            result.check_output(output, views[output.name])
            outputs[output.name] = arrays[output.name], views[output.name]
    check_devices(result.labelled({**product, **views}))
    result.check_apart(tree, product, views)
    if tree.result_dtype not in (None, out_dtype) and (call.options.out_dtype or RESULT in product or own_c):
        raise InvalidOperandError(
            f"the epilogue casts D to {tree.result_dtype.value}; out, out_dtype or c say {out_dtype.value}"
        )
    inputs = result.labelled({operand.name: views[operand.name] for operand in tree.inputs})
    return BoundEpilogue(traced, result, tree.result_dtype or out_dtype, inputs, outputs)


def _traced(
    epilogue: Any,
    result: MatrixResult | GroupedResult,
    views: dict[str, Any],
    numbers: Mapping[str, Any],
    *,
    out_dtype: CutlassDtype,
    acc: CutlassDtype,
) -> tuple[Traced, dict[str, Any]]:
    """The tree of an epilogue, and the views without those of unused parameters."""
    if isinstance(epilogue, (EpilogueVisitorTree, Traced)):
        if numbers:
            raise InvalidOperandError(
                f"{', '.join(numbers)}: a tree takes arrays; give an array of one element, or a function with numbers"
            )
        return epilogue if isinstance(epilogue, Traced) else Traced.of_tree(epilogue), views
    try:
        parameters = set(inspect.signature(epilogue).parameters)
    except (TypeError, ValueError):
        parameters = set(views)  # `trace` says that it has no signature
    # An array whose name is no parameter is for a result.
    kinds = {name: result.operand(name, view) for name, view in views.items() if name in parameters}
    compute = CutlassDtype.F64 if acc is CutlassDtype.F64 else CutlassDtype.F32
    traced = trace(epilogue, {**kinds, **numbers}, out_dtype=out_dtype, compute_dtype=compute)
    used = {read.name for read in traced.tree.inputs}
    return traced, {name: view for name, view in views.items() if name in used or name not in parameters}


def _check_names(tree: EpilogueVisitorTree, given: Collection[str], taken: Collection[str]) -> None:
    """Refuses operands with names that are taken, arrays without an operand, and inputs without an array."""
    inputs, outputs = ([operand.name for operand in some] for some in (tree.inputs, tree.outputs))
    for name in (*inputs, *outputs):
        if name in taken:
            raise InvalidOperandError(f"the epilogue calls an operand {name!r}, as the product does: rename it")
    unknown = [name for name in given if name not in inputs and name not in outputs]
    missing = [name for name in inputs if name not in given]
    if unknown:
        known = ", ".join([*inputs, *outputs]) or "none"
        raise InvalidOperandError(f"the epilogue has no operand {', '.join(unknown)}; its operands are {known}")
    if missing:
        raise InvalidOperandError(f"the epilogue reads {', '.join(missing)}: give an array for each by its name")


def refuse_scale_d(scale_d: Any) -> None:
    """Refuses a number as scale_d beside an epilogue."""
    if isinstance(scale_d, NUMBERS):
        raise UnsupportedError(
            "scale_d is a number, and what follows the product does not let it be part of alpha: multiply in the "
            "epilogue, or give it as an array (gemm of fp8)"
        )
