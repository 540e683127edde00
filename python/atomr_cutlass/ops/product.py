"""A parsed call of an operation that multiplies, and what follows its product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from .. import _core
from ..arrays.numerics import AnyArray
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import RESULT
from ..pipeline.call import Invocation

if TYPE_CHECKING:
    from ..epilogue.bind import BoundEpilogue
    from ..epilogue.bound import Fusion

ProductT = TypeVar("ProductT", bound="Product")


@dataclass(frozen=True, kw_only=True)
class Product(Invocation):
    """A product, parsed.

    Attributes:
        result: element type of D.
        math: math mode of the kernel's key.
        epilogue: what follows the product. None: nothing, or a bias and an activation for the reference.
    """

    result: CutlassDtype
    math: str
    epilogue: BoundEpilogue | None = None

    def followed_by(self: ProductT, epilogue: BoundEpilogue) -> ProductT:  # noqa: PYI019 - Python 3.10 has no Self
        """The product with an epilogue, which has D and arrays of its own."""
        return replace(
            self,
            inputs=self.inputs | epilogue.inputs,
            results={name: result for name, result in self.results.items() if name != RESULT} | epilogue.results(),
            arrange=epilogue.traced.arranger,
            result=epilogue.dtype,
            epilogue=epilogue,
        )

    def fusion(self, views: Mapping[str, _core.Operand]) -> Fusion | None:
        """What follows as part of a problem, of views of all its operands by name."""
        if self.epilogue is None:
            return None
        fusion: Fusion = self.epilogue.result.fusion(self.epilogue.tree, views)
        return fusion

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:
        """Writes the reductions of nothing, in the order of a stream."""
        if self.epilogue is not None:
            from ..epilogue.bind import reduce_nothing  # which loads trees and the tracer

            reduce_nothing(self.epilogue.tree.outputs, views, stream)

    def evaluated(
        self, host: Mapping[str, AnyArray], compute: Callable[..., AnyArray], *, scale_d: float | None
    ) -> Mapping[str, AnyArray]:
        """The results by the operation's reference, `compute`."""
        if self.epilogue is not None and self.call.epilogue is not None:
            # float64 holds the accumulator; alpha = 0 does not make the operands unread here.
            return self.epilogue.evaluate(compute(out_dtype=CutlassDtype.F64), self.fetch, scale_d=scale_d)
        follows = {"bias": host.get("bias"), "activation": self.call.options.activation, "scale_d": scale_d}
        return {RESULT: compute(out_dtype=self.result, **follows).reshape(self.results[RESULT].shape)}
