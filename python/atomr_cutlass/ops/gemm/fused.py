"""Calls of `gemm` with an epilogue: a tree, a function, or bias and activation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ... import _core, reference
from ...arrays import operands
from ...arrays.arguments import check_devices, check_scalars
from ...arrays.numerics import AnyArray
from ...arrays.operands import CUDA
from ...checks import NUMBERS
from ...epilogue import EpilogueVisitorTree, Traced
from ...epilogue import arguments as fused_arguments
from ...epilogue.arguments import Asked
from ...epilogue.bound import fusion_of
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import accumulator
from ...pipeline.op_plan import OpPlan
from ...pipeline.plan_cache import PlanCache
from . import scaled
from .arguments import SCALES, Arguments, Operation, problem_of, scales_of

PLANS_KEPT = 256

_PRODUCT = ("a", "b", "scale_a", "scale_b", "scale_d")

_plans: PlanCache[_Kept] = PlanCache(PLANS_KEPT)


class FusedCall(NamedTuple):
    """A call whose product an epilogue follows, checked.

    Attributes:
        given: its arguments.
        what: what they say, with the epilogue's say in the result's element type.
        asked: the epilogue's tree with its arrays.
    """

    given: Arguments
    what: Operation
    asked: Asked

    def on_gpu(self) -> Any:
        """Launches on GPU arrays."""
        given, what, asked = self
        device, stream = what.views["a"].device, given.stream_of(what.views["a"])
        results, views = dict(asked.given), {**what.views, **asked.inputs, **asked.outputs}
        results[RESULT] = given.out
        if given.out is None:
            results[RESULT], views[RESULT] = operands.empty(what.shape, what.result, device, given.a)
        for output in asked.tree.outputs:
            if output.name not in views:
                results[output.name], views[output.name] = fused_arguments.empty(output, what.shape, device, given.a)
        made = self._launch(views, given.a, stream)
        if made is not None:
            _keep(given, _Kept(made, asked.traced, what.shape))
        arrays = {name: operands.finished(array, views[name], stream) for name, array in results.items()}
        return asked.arrange(arrays)

    def on_host(self) -> Any:
        """Copies host arrays to GPU 0, and the results back."""
        what, asked = self.what, self.asked
        views = what.uploaded({name: operands.to_numpy(view) for name, view in asked.inputs.items()})
        _, views[RESULT] = operands.empty(what.shape, what.result, 0, None)
        for output in asked.tree.outputs:
            _, views[output.name] = fused_arguments.empty(output, what.shape, 0, None)
        self._launch(views, None, 0)
        if "amax" in what.views:
            np.copyto(operands.to_numpy(what.views["amax"]), operands.download(views["amax"]), casting="no")
        names = (*(output.name for output in asked.tree.outputs), RESULT)
        return self._delivered({name: operands.download(views[name]) for name in names})

    def on_reference(
        self, host: Mapping[str, AnyArray], how: Mapping[str, Any], fetch: Callable[[_core.Operand], AnyArray]
    ) -> Any:
        """Evaluates the tree with NumPy.

        Args:
            host: what is read of the product, on the host.
            how: further arguments of `reference.gemm`.
            fetch: makes a host array of a view.
        """
        given, what, asked = self
        # float64 holds the accumulator; alpha = 0 does not make A and B unread here.
        acc = reference.gemm(
            host["a"], host["b"], host.get("c"), **{**how, "scale_d": None, "out_dtype": CutlassDtype.F64}
        )
        inputs = {name: fetch(view) for name, view in asked.inputs.items()}
        computed = reference.evaluate(asked.tree, acc, inputs, out_dtype=what.result, scale_d=how["scale_d"])
        if what.views["a"].device_type != CUDA:
            return self._delivered(computed)
        results, device = {}, what.views["a"].device
        for name, result in computed.items():
            view = what.views.get(RESULT) if name == RESULT else asked.outputs.get(name)
            array = given.out if name == RESULT else asked.given.get(name)
            if view is None and name == RESULT:
                array, view = operands.empty(what.shape, what.result, device, given.a)
            elif view is None:
                output = next(one for one in asked.tree.outputs if one.name == name)
                array, view = fused_arguments.empty(output, what.shape, device, given.a)
            operands.copy_in(result, view)
            results[name] = operands.finished(array, view, 0)
        return asked.arrange(results)

    def _launch(self, views: dict[str, _core.Operand], like: Any, stream: int) -> OpPlan | None:
        """The plan that was launched; None where there is nothing to launch."""
        given, asked = self.given, self.asked
        if 0 in self.what.shape:
            fused_arguments.reduce_nothing(asked.tree.outputs, views, stream)
            if "amax" in self.what.views:
                operands.clear_async(views["amax"], stream)
            return None
        # A tree's operand may be called c or amax; then the product has none.
        own = {name: views[name] for name in ("a", "b", "c", *SCALES) if name in self.what.views}
        what = problem_of({**own, RESULT: views[RESULT]}, self.what.math)
        fusion = fusion_of(asked.tree, views)
        how = {"like": like, "backend": given.backend, "jit": given.jit, "stream": stream}
        made = scaled.make(what, scales_of(what, own), fusion, **how)
        taken = (views[one.name] for one in fusion.arrays)
        alpha, beta = given.folded_scalars
        made(*own.values(), *taken, views[RESULT], alpha=alpha, beta=beta, stream=stream)
        return made

    def _delivered(self, computed: Mapping[str, AnyArray]) -> Any:
        """Host results by name, as the epilogue returns them."""
        made = {}
        for name, result in computed.items():
            if name == RESULT:
                made[name] = self.given.delivered(result, self.what.views.get(RESULT))
            elif name in self.asked.outputs:
                np.copyto(operands.to_numpy(self.asked.outputs[name]), result, casting="no")
                made[name] = self.asked.given[name]
            else:
                made[name] = operands.host_result(result, self.given.a)
        return self.asked.arrange(made)


def fused_call(given: Arguments, what: Operation) -> FusedCall | None:
    """The call with its epilogue; None without one. The reference has bias and activation itself.

    Raises:
        InvalidOperandError: an operand of the epilogue is missing, unknown, or not what the tree reads or writes; or
            the tree decides another element type than the result's.
        UnsupportedError: the function cannot be traced, or scale_d is a number.
    """
    by_itself = given.bias is given.activation is None or given.backend == "reference"
    if given.epilogue is None and by_itself:
        return None
    fused_arguments.refuse_scale_d(given.scales["scale_d"])
    if given.epilogue is None:
        asked = fused_arguments.with_bias(given.bias, given.activation, what.shape)
    else:
        named = dict(given.operands_of_epilogue)
        named |= {"bias": given.bias} if given.bias is not None else {}
        named |= {"c": given.c} if given.c is not None and given.source is None else {}
        asked = fused_arguments.asked(
            given.epilogue, named, what.shape, out_dtype=what.result, acc=accumulator(what.dtype)
        )
    for name in _operand_names(asked.tree):
        if name in _PRODUCT or (name == "c" and "c" in what.views):
            raise InvalidOperandError(f"the epilogue calls an operand {name!r}, as the product does: rename it")
    check_devices({**what.views, **asked.inputs, **asked.outputs})
    fused_arguments.check_results(asked.tree, what.views, {**asked.inputs, **asked.outputs})
    told = given.out_dtype is not None or "out" in what.views or "c" in what.views
    result = fused_arguments.decided(asked.tree, what.result, told=told)
    return FusedCall(given, what._replace(result=result), asked)


# ----------------------------------------------------------------------------------------------------------------------
# Plans of earlier calls
# ----------------------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A plan that calls whose arrays lie alike may use again.

    Attributes:
        plan: what is launched.
        traced: the epilogue.
        shape: of the result.
    """

    plan: OpPlan
    traced: Traced
    shape: tuple[int, ...]

    # What a PlanCache knows a plan by.
    key: None = None
    source: str = ""
    kernel_name: str = ""
    kernel_handle: object = None

    def launch(
        self, given: Mapping[str, Any], arrays: tuple[Any, ...], *, out: Any, alpha: float, beta: float, stream: Any
    ) -> Any:
        """Launches the plan. `arrays` begin with a, b, c and scales, None where there is no slot."""
        a = arrays[0]
        tree = self.traced.tree
        made = {}
        for output in tree.outputs:
            array = given.get(output.name)
            if array is None:
                array, _ = fused_arguments.empty(output, self.shape, self.plan.device, a)
            made[output.name] = array
        c = arrays[2] if beta != 0 else None
        taken = (given[one.name] for one in tree.inputs)
        slots = [one for one in (a, arrays[1], c, *arrays[3:7], *taken, *made.values()) if one is not None]
        made[RESULT] = self.plan(*slots, out=out, alpha=alpha, beta=beta, stream=stream)
        return self.traced.arrange(made)


def again(
    product: tuple[Any, ...],
    bias: Any,
    activation: str | None,
    epilogue: EpilogueVisitorTree | None,
    others: Mapping[str, Any],
    how: tuple[Any, ...],
    *,
    out: Any,
    alpha: float,
    beta: float,
    stream: Any,
) -> Any:
    """Launches the plan of an earlier call; None, and nothing is done, where there is none that fits.

    Args:
        product: a, b, c, scale_a, scale_b, scale_d and amax; None where there is none.
        bias: of the call, like what follows.
        activation: see there.
        epilogue: a tree, or None.
        others: operands of the tree by name.
        how: out_dtype, precision, fast_accum, backend and jit.
        out: of the call, like the rest.
        alpha: a number.
        beta: likewise.
        stream: see there.
    """
    c = product[2]
    named = {"bias": bias, "c": c, **others}
    taken = _operand_names(epilogue)
    # What no operand takes is refused by the call in full.
    fits = named.keys() <= {"bias", "c", *taken} and (
        epilogue is None
        or (activation is None and (bias is None or "bias" in taken) and (c is None or beta != 0 or "c" in taken))
    )
    signature = _core.signature(*_arrays(product, bias, epilogue, named, out)) if fits else None
    if signature is None:
        return None
    kept = _plans.get((signature, activation if epilogue is None else epilogue, beta == 0, how))
    if kept is None:
        return None
    check_scalars(alpha, beta, None if epilogue is not None and beta == 0 else c)
    return kept.launch(named, product, out=out, alpha=alpha, beta=beta, stream=stream)


def _keep(given: Arguments, made: _Kept) -> None:
    """Remembers a plan, unless a Python function made the tree: that may compute something else next time."""
    epilogue = given.epilogue
    if not (epilogue is None or type(epilogue) is EpilogueVisitorTree) or not _core.has_exchange_api(given.a):
        return
    if not made.plan.checked:
        return
    if any(isinstance(scale, NUMBERS) for scale in given.scales.values()):
        return
    product = (given.a, given.b, given.c, *given.scales.values(), given.amax)
    named = {"bias": given.bias, "c": given.c, **given.operands_of_epilogue}
    signature = _core.signature(*_arrays(product, given.bias, epilogue, named, given.out))
    if signature is None:
        return
    how = (given.out_dtype, given.precision, given.fast_accum, given.backend, given.jit)
    _plans.insert(made, (signature, given.activation if epilogue is None else epilogue, given.beta == 0, how))


def _arrays(
    product: tuple[Any, ...], bias: Any, epilogue: EpilogueVisitorTree | None, named: Mapping[str, Any], out: Any
) -> tuple[Any, ...]:
    """Everything whose shape, strides and element type make a plan what it is."""
    return (*product, bias if epilogue is None else None, *map(named.get, _operand_names(epilogue)), out)


@functools.lru_cache(64)
def _operand_names(epilogue: EpilogueVisitorTree | None) -> tuple[str, ...]:
    """The operands of a tree, inputs first."""
    if epilogue is None:
        return ()
    return (*(one.name for one in epilogue.inputs), *(one.name for one in epilogue.outputs))
