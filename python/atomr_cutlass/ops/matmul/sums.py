"""Sums of an operand of a matmul, as a product with ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from ... import _core
from ...arrays import operands
from ...arrays.layouts import relaid
from ...arrays.numerics import numpy_dtype
from ...arrays.operands import check_apart, check_writable
from ...errors import UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...pipeline.plan import Plan
from .epilogues import BIAS
from .memory import Views


class WithSums:
    """The plans of a product and of the sums of one of its operands, called with the arrays of both.

    Attributes:
        names: of the request's arrays that it takes, before D.
        device: index of the GPU.
        request: None: it was made from arrays.
        checked: whether nothing is left to be checked of the product at its first use; see `Plan`.
    """

    def __init__(
        self, product: Plan, sums: Plan, operand: str, scale: float, taken: tuple[str, ...], views: Views
    ) -> None:
        """Both plans.

        Args:
            product: that of the product.
            sums: that of the sums.
            operand: `a` or `b`, which is summed.
            scale: the operand's, where it is a number.
            taken: the names of the arrays that the product takes before D.
            views: the arrays that the sums were planned for.
        """
        self.device, self.request = views["a"].device, None
        self.checked = product.checked
        self._plans, self._operand, self._scale, self._views = (product, sums), operand, scale, views
        self._taken = taken
        # The product leaves scales out where alpha is 0.
        self._scales = [name for name in (f"scale_{operand}",) if name in views]
        self.names = tuple(dict.fromkeys((*taken, *self._scales, BIAS)))

    @property
    def superseded(self) -> bool:
        """Whether the product's plan is; see `Plan`."""
        return self._plans[0].superseded

    def __call__(self, *arrays: _core.Operand, out: _core.Operand, alpha: float, beta: float, stream: int) -> None:
        """Launches both.

        Raises:
            InvalidOperandError: the sums cannot be written, or share memory with another array.
        """
        given = dict(zip(self.names, arrays, strict=True))
        # Neither plan knows all arrays, and the product is launched before that of the sums looks at its own.
        check_writable(given[BIAS], BIAS)
        others = {name: view for name, view in given.items() if name != BIAS}
        check_apart({BIAS: given[BIAS]}, {**others, "d": out}, ())
        product, sums = self._plans
        product(*(given[name] for name in self._taken), out=out, alpha=alpha, beta=beta, stream=stream)
        d = relaid(given[BIAS], self._views[RESULT].shape, self._views[RESULT].strides)
        pair = self._views | {self._operand: given[self._operand]}
        scales = (given[name] for name in self._scales)
        sums(pair["b"], pair["a"], *scales, out=d, alpha=self._scale, beta=0.0, stream=stream)


def sums_of(views: Mapping[str, _core.Operand], name: str, k: int, stream: int) -> Views:
    """The arrays of the product of an operand with ones, whose result is the bias.

    Args:
        views: the arrays of the matmul.
        name: `a` or `b`.
        k: the extent that is summed over.
        stream: where the product will be launched.

    Raises:
        UnsupportedError: the ones have to be made, and the stream is being captured.
    """
    operand, bias = views[name], views[BIAS]
    ones = _ones(operands.dtype_of(operand, name), k, operand.device, stream)
    length = bias.shape[0]
    if name == "a":
        found = {
            "a": operand,
            "b": relaid(ones, (1, k), (max(k, 1), 1)),
            RESULT: relaid(bias, (1, length), (length, 1)),
        }
    else:
        found = {
            "a": relaid(ones, (k, 1), (1, 1)),
            "b": operand,
            RESULT: relaid(bias, (length, 1), (1, 1)),
        }
    scale = f"scale_{name}"
    return found | ({scale: views[scale]} if scale in views else {})


_made_ones: dict[tuple[CutlassDtype, int], _core.Operand] = {}
_kept: list[_core.Operand] = []
_ones_lock = threading.Lock()


def _ones(dtype: CutlassDtype, length: int, device: int, stream: int) -> _core.Operand:
    """At least this many ones on a GPU, for ever: a captured graph may read them."""
    with _ones_lock:
        found = _made_ones.get((dtype, device))
        if found is None or found.shape[0] < length:
            if _core.capturing(device, stream):
                raise UnsupportedError(
                    "BGRADA and BGRADB need memory that cannot be had while a CUDA graph is captured: call matmul once "
                    "before the capture"
                )
            size = 1 << max(12, (length - 1).bit_length())
            found = operands.upload(np.ones(size, numpy_dtype(dtype)), device)
            _kept.append(found)
            _made_ones[dtype, device] = found
        return found
