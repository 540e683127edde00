"""A parsed call of an operation that multiplies, with its epilogue."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import _core
from ..arrays.numerics import AnyArray, math_mode
from ..arrays.operands import check_out, result_dtype
from ..epilogue.plan_operands import reduce_nothing
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import RESULT
from ..pipeline.call import SCALES, Call, Invocation, Result

if TYPE_CHECKING:
    from ..epilogue.bind import BoundEpilogue
    from ..epilogue.fusion import Fusion
    from ..epilogue.results import MatrixResult

ProductT = TypeVar("ProductT", bound="Product")


@dataclass(frozen=True, kw_only=True)
class Product(Invocation):
    """A product, parsed.

    Attributes:
        result: element type of D.
        math: math mode of the kernel's key.
        epilogue: the epilogue after the product; None without one, or where the reference adds bias and activation.
    """

    result: CutlassDtype
    math: str
    epilogue: BoundEpilogue | None = None

    @classmethod
    def of(  # noqa: PYI019 - Python 3.10 has no Self
        cls: type[ProductT],
        call: Call,
        views: Mapping[str, _core.Operand],
        shape: tuple[int, ...],
        dtype: CutlassDtype,
        **own: Any,
    ) -> ProductT:
        """The product of a call with views, D's extents and A's element type; `own` are fields of the subclass."""
        written = {name: view for name, view in views.items() if name == "amax"}
        inputs = {name: view for name, view in views.items() if name not in (RESULT, *written)}
        if RESULT in views:
            check_out(views, inputs)
        options = call.options
        result = result_dtype(views, options.out_dtype, dtype, fused=call.follows)
        mode = math_mode(dtype, options.precision, fast_accum=options.fast_accum)
        results = {name: Result(view.shape, view.dtype, call.arrays[name], view) for name, view in written.items()}
        results[RESULT] = Result(shape, result.dlpack, call.out, views.get(RESULT))
        return cls(call=call, inputs=inputs, results=results, result=result, math=mode, **own)

    def bind(  # noqa: PYI019 - as above
        self: ProductT,
        result: MatrixResult,
        views: Mapping[str, _core.Operand],
        *,
        taken: Collection[str],
        acc: CutlassDtype,
        scaled: bool = False,
    ) -> ProductT:
        """The product with the epilogue that its call `binds`; see `epilogue.bind.bind`.

        `scaled` allows a number as scale_d beside a bias or an activation.
        """
        from ..epilogue import bind  # most calls have no epilogue

        call = self.call
        if call.epilogue is not None or not scaled:
            bind.refuse_scale_d(call.arrays["scale_d"])
        epilogue = bind.bind(call, result, views, taken=taken, out_dtype=self.result, acc=acc)
        return replace(
            self,
            inputs=self.inputs | epilogue.inputs,
            results={name: result for name, result in self.results.items() if name != RESULT} | epilogue.results(),
            arrange=epilogue.traced.arranger,
            result=epilogue.dtype,
            epilogue=epilogue,
        )

    def fusion(self, views: Mapping[str, _core.Operand]) -> Fusion | None:
        """The epilogue's tree with its arrays, from views by name; None without an epilogue."""
        if self.epilogue is None:
            return None
        fusion: Fusion = self.epilogue.result.fusion(self.epilogue.tree, views)
        return fusion

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:
        """Writes the epilogue's reductions of a result without elements."""
        if self.epilogue is not None:
            reduce_nothing(self.epilogue.tree, views, stream)

    def evaluated(self, host: Mapping[str, AnyArray], reference: Callable[..., AnyArray]) -> dict[str, AnyArray]:
        """The results by name, computed by the operation's reference, to which A, B and C are bound already."""
        options = self.call.options
        scale_a, scale_b, scale_d = (host.get(name, self.call.arrays[name]) for name in SCALES)
        scale_d = None if scale_d is None else float(np.asarray(scale_d).reshape(()))
        factors = {"alpha": options.alpha, "beta": options.beta, "scale_a": scale_a, "scale_b": scale_b}
        compute = functools.partial(reference, **factors, math=self.math)
        if self.epilogue is not None and self.call.epilogue is not None:
            # float64 holds the accumulator; alpha = 0 does not make the operands unread here.
            return self.epilogue.evaluate(compute(out_dtype=CutlassDtype.F64), self.fetch, scale_d=scale_d)
        follows = {"bias": host.get("bias"), "activation": options.activation, "scale_d": scale_d}
        return {RESULT: compute(out_dtype=self.result, **follows).reshape(self.results[RESULT].shape)}
