"""How a request is launched whose arrays lie as those of an earlier one: without looking at it in full again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ... import _core
from ...arrays import operands
from ...checks import NUMBERS
from ...generator.dtypes import CutlassDtype
from ...pipeline.plan_cache import PlanCache
from .epilogues import AMAX, AUX, BIAS
from .heuristic import heuristics
from .launch import Launch, number
from .memory import Shape, as_operand
from .plans import PLANS_KEPT
from .request import MatmulRequest

recipes: PlanCache[Any] = PlanCache(PLANS_KEPT)
"""Recipes by `signature`."""


@dataclass(frozen=True)
class Recipe:
    """A plan, and how it takes the memory of a request's arrays.

    Attributes:
        launch: the plan.
        lies: name, shape and strides of each view.
        dtype: element type of D.
    """

    launch: Launch
    lies: tuple[tuple[str, Shape, Shape], ...]
    dtype: CutlassDtype

    def run(self, request: MatmulRequest) -> Any:
        """Launches; what `matmul` returns.

        Raises:
            InvalidOperandError: arrays that share memory, or cannot be written; nothing has been launched.
        """
        arrays = arrays_of(request)
        views = {name: _core.Operand.of(array) for name, array in arrays.items()}
        first = views["a"]
        stream = operands.launch_stream().handle
        array = arrays.get("d")
        if array is None:
            array, views["d"] = operands.empty((request.n, request.m), self.dtype, first.device, request.a)
        self.launch(
            {name: as_operand(views[name], shape, strides) for name, shape, strides in self.lies},
            *scalars_of(request),
            stream,
        )
        if request.reply is not None:
            _core.synchronize(first.device, stream)
        return array


def arrays_of(request: MatmulRequest) -> dict[str, Any]:
    """The arrays that take part, by name."""
    scales = request.scales
    scale_a, scale_b, scale_d = (None if isinstance(one, NUMBERS) else one for one in (scales.a, scales.b, scales.d))
    given = {
        "a": request.a,
        "b": request.b,
        "c": request.c if request.beta != 0 else None,
        "d": request.c if request.d is None else request.d,
        BIAS: request.bias,
        AUX: request.gelu_aux,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "scale_d": scale_d,
        AMAX: scales.amax_d,
    }
    return {name: array for name, array in given.items() if array is not None}


def scalars_of(request: MatmulRequest) -> tuple[float, float]:
    """Alpha and beta, with the scales that are numbers."""
    scales = request.scales
    scale_d = number(scales.d)
    alpha = float(request.alpha) * number(scales.a) * number(scales.b) * scale_d
    return alpha, float(request.beta) * scale_d


def signature(request: MatmulRequest) -> Hashable:
    """What decides about a recipe; None for a request that is always looked at in full."""
    if request.backend == "reference" or request.form.summed or scalars_of(request)[0] == 0:
        return None  # without a product, plans leave operands out
    arrays = arrays_of(request)
    found = _core.signature(*arrays.values())
    if found is None:
        return None
    # A number for scales.d is part of alpha where nothing follows the product, and refused elsewhere.
    return found, tuple(arrays), isinstance(request.scales.d, NUMBERS), request.constants, heuristics.changes
