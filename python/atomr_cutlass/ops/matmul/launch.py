"""A matmul as the row-major products that kernels compute: D^T = op(B)^T op(A)^T, and sums as products with ones."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import _core
from ...arrays import operands
from ...arrays.numerics import numpy_dtype
from ...checks import NUMBERS
from ...epilogue import EpilogueVisitorTree
from ...epilogue.bound import fusion_of
from ...errors import UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...pipeline.plan import Plan
from ...pipeline.problem import GemmProblem, MatrixSpec
from ..gemm import scaled
from .epilogues import AMAX, BIAS
from .memory import as_operand
from .plans import Product

Views = dict[str, _core.Operand]
"""Arrays by the request's names, matrices as their transposes; see `call.Call`."""


@dataclass(frozen=True)
class Launch:
    """A plan and the names of what it is called with, in its order; the result, `d`, comes last."""

    made: Plan
    names: tuple[str, ...]

    @property
    def checked(self) -> bool:
        """Whether nothing is left to be checked at the plan's first use; see `Plan`."""
        return self.made.checked

    def __call__(self, views: Views, alpha: float, beta: float, stream: int) -> None:
        """Launches the plan on arrays."""
        arrays = [views[name] for name in self.names]
        self.made(*arrays, out=views["d"], alpha=alpha, beta=beta, stream=stream)


def number(scale: Any) -> float:
    """A scale that is a number; else 1."""
    return float(scale) if isinstance(scale, NUMBERS) else 1.0


def product_of(
    views: Views, tree: EpilogueVisitorTree | None, math: str, *, alpha: float = 1.0
) -> tuple[Product, tuple[str, ...]]:
    """The product D^T, and the names of its arrays in the order of a plan's call.

    Args:
        views: the arrays; what it takes of them, beside `a`, `b` and `d`, is what there is.
        tree: what follows the product, its operands by their names among the arrays.
        math: math mode of the kernel key.
        alpha: the scalar. With 0 alone, A and B are not read, and so neither are their scales.
    """
    names = ["b", "a", *(["c"] if "c" in views else [])]
    what = GemmProblem(
        a=_spec(views, "b"),
        b=_spec(views, "a"),
        c=_spec(views, "c") if "c" in views else None,
        d=_spec(views, "d"),
        math=math,
        device=views["a"].device,
    )
    fusion = None if tree is None else fusion_of(tree, views)
    scales = {"a": "scale_b", "b": "scale_a", "d": "scale_d", "amax": AMAX}
    scales = {form: name for form, name in scales.items() if name in views and (name != AMAX or tree is None)}
    if alpha == 0 and tree is None and not {"d", "amax"} & set(scales):
        scales = {}
    names += scales.values()
    names += [one.name for one in fusion.arrays] if fusion else []
    return Product(what, scaled.Scales(**{form: _scale(views[name]) for form, name in scales.items()}), fusion), tuple(
        names
    )


def sums_of(views: Views, name: str, k: int, stream: int) -> Views:
    """The arrays of the product of an operand with ones, whose result is the bias.

    Args:
        views: the arrays of the matmul.
        name: `a` or `b`.
        k: the extent that is summed over.
        stream: where the product will be launched.

    Raises:
        UnsupportedError: the ones have to be made, and the stream is being captured.
    """
    one, bias = views[name], views[BIAS]
    ones = _ones(operands.dtype_of(one, name), k, one.device, stream)
    length = bias.shape[0]
    if name == "a":
        found = {
            "b": as_operand(ones, (1, k), (max(k, 1), 1)),
            "a": one,
            "d": as_operand(bias, (1, length), (length, 1)),
        }
    else:
        found = {"b": one, "a": as_operand(ones, (k, 1), (1, 1)), "d": as_operand(bias, (length, 1), (1, 1))}
    scale = f"scale_{name}"
    return found | ({scale: views[scale]} if scale in views else {})


def with_gaps(mask: _core.Operand) -> _core.Operand:
    """Bits with the bytes between their columns: some kernels clear them first, which must be dense memory."""
    columns, width = mask.shape
    if columns > 1:
        width = max(width, mask.strides[0])
    return as_operand(mask, (columns, width), (width, 1))


def _spec(views: Views, name: str) -> MatrixSpec:
    view = views[name]
    return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)


def _scale(view: _core.Operand) -> scaled.Scale:
    return scaled.Scale(view.shape, view.strides, "tensor" if len(view.shape) == 1 else "vector")


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
