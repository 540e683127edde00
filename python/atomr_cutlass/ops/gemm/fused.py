"""Calls of `gemm` with an epilogue: a tree, a function, or bias and activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ... import _core
from ...arrays import operands
from ...arrays.arguments import check_scalars
from ...arrays.numerics import AnyArray
from ...arrays.operands import CUDA
from ...checks import NUMBERS
from ...epilogue import EpilogueVisitorTree, Traced
from ...epilogue.bind import (
    BoundEpilogue,
    bias_and_activation,
    bind,
    empty,
    reduce_nothing,
    refuse_scale_d,
)
from ...epilogue.results import MatrixResult, operand_names
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.rules import accumulator
from ...pipeline.op_plan import OpPlan
from ...pipeline.plan_cache import PlanCache
from . import reference as gemm_reference
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
        epilogue: the epilogue with its arrays.
    """

    given: Arguments
    what: Operation
    epilogue: BoundEpilogue[MatrixResult]

    def on_gpu(self) -> Any:
        """Launches on GPU arrays."""
        given, what, epilogue = self
        device, stream = what.views["a"].device, operands.launch_stream().handle
        arrays, results = epilogue.allocate(device, given.a)
        made = self._launch({**what.views, **epilogue.inputs, **results}, given.a, stream)
        if made is not None:
            _keep(given, _Kept(made, epilogue.traced, epilogue.result))
        return epilogue.finish(arrays, results, stream)

    def on_host(self) -> Any:
        """Copies host arrays to GPU 0, and the results back."""
        what, epilogue = self.what, self.epilogue
        views = what.uploaded({name: operands.to_numpy(view) for name, view in epilogue.inputs.items()})
        results = epilogue.temporaries(0)
        self._launch(views | results, None, 0)
        if "amax" in what.views:
            np.copyto(operands.to_numpy(what.views["amax"]), operands.download(views["amax"]), casting="no")
        return epilogue.deliver({name: operands.download(view) for name, view in results.items()}, self.given.a)

    def on_reference(
        self, host: Mapping[str, AnyArray], how: Mapping[str, Any], fetch: Callable[[_core.Operand], AnyArray]
    ) -> Any:
        """Evaluates the tree with NumPy.

        Args:
            host: what is read of the product, on the host.
            how: further arguments of `gemm_reference.gemm`.
            fetch: makes a host array of a view.
        """
        given, what, epilogue = self
        # float64 holds the accumulator; alpha = 0 does not make A and B unread here.
        acc = gemm_reference.gemm(
            host["a"], host["b"], host.get("c"), **{**how, "scale_d": None, "out_dtype": CutlassDtype.F64}
        )
        computed = epilogue.evaluate(acc, fetch, scale_d=how["scale_d"])
        if what.views["a"].device_type != CUDA:
            return epilogue.deliver(computed, given.a)
        return epilogue.copy_in(computed, what.views["a"].device, given.a)

    def _launch(self, views: dict[str, _core.Operand], like: Any, stream: int) -> OpPlan | None:
        """The plan that was launched; None where there is nothing to launch."""
        given, epilogue = self.given, self.epilogue
        if 0 in self.what.shape:
            reduce_nothing(epilogue.tree.outputs, views, stream)
            if "amax" in self.what.views:
                operands.clear_async(views["amax"], stream)
            return None
        # A tree's operand may be called c or amax; then the product has none.
        own = {name: views[name] for name in ("a", "b", "c", *SCALES) if name in self.what.views}
        what = problem_of({**own, RESULT: views[RESULT]}, self.what.math)
        fusion = epilogue.fusion(views)
        how = {"like": like, "backend": given.backend, "jit": given.jit, "stream": stream}
        made = scaled.make(what, scales_of(what, own), fusion, **how)
        alpha, beta = given.folded_scalars
        others = (views[array.name] for array in fusion.arrays)
        made(*own.values(), *others, views[RESULT], alpha=alpha, beta=beta, stream=stream)
        return made


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
    refuse_scale_d(given.scales["scale_d"])
    named = dict(given.operands_of_epilogue)
    named |= {"bias": given.bias} if given.bias is not None else {}
    if given.epilogue is not None and given.c is not None and given.source is None:
        named["c"] = given.c
    epilogue = bind(
        bias_and_activation(given.bias, given.activation) if given.epilogue is None else given.epilogue,
        named,
        MatrixResult(what.shape),
        what.views,
        taken=(*_PRODUCT, "c") if "c" in what.views else _PRODUCT,
        out=given.out,
        out_dtype=what.result,
        fixed=given.out_dtype is not None or "out" in what.views or "c" in what.views,
        acc=accumulator(what.dtype),
    )
    return FusedCall(given, what._replace(result=epilogue.dtype), epilogue)


# ----------------------------------------------------------------------------------------------------------------------
# Plans of earlier calls
# ----------------------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A plan that calls whose arrays lie alike may use again.

    Attributes:
        plan: what is launched.
        traced: the epilogue.
        result: what its tree is computed over.
    """

    plan: OpPlan
    traced: Traced
    result: MatrixResult

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
                array, _ = empty(output, self.result, self.plan.device, a)
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
    taken = _names(epilogue)
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
    return (*product, bias if epilogue is None else None, *map(named.get, _names(epilogue)), out)


def _names(epilogue: EpilogueVisitorTree | None) -> tuple[str, ...]:
    return () if epilogue is None else operand_names(epilogue)
