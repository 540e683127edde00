"""Requests as calls of the package's functions on the reference: what plans and probes of any operation are held to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import atomr_cutlass as ac
from atomr_cutlass.arrays import numerics
from atomr_cutlass.pipeline.operation import PlannedOperation, operation_of, poison

Array = np.ndarray[Any, Any]


def function_of(operation: PlannedOperation[Any]) -> Callable[..., Any]:
    """The public function of an operation: that of its name, or of the longest beginning of it."""
    function: Callable[..., Any] = getattr(ac, max(filter(operation.name.startswith, ac.__all__), key=len))
    return function


def call(request: Any, arrays: Mapping[str, Any], **changes: Any) -> Any:
    """Calls the function of a request's operation.

    Args:
        request: of any operation.
        arrays: the operands by the labels of the operand table, as the function takes them; results may be left out.
        changes: arguments of the function that are others than the request says.
    """
    operation = operation_of(request)
    slots, epilogue = operation.operands(request), request.epilogue
    given: dict[str, Any] = {
        slot.name: [arrays[label] for label in slot.labels] if slot.listed else arrays[slot.name]
        for slot in slots
        if slot.labels[0] in arrays
    }
    options = {
        "alpha": epilogue.alpha, "beta": epilogue.beta, "activation": epilogue.activation, "epilogue": epilogue.tree,
        "precision": None if request.math in {"default", numerics.FAST} else request.math,
        "fast_accum": request.math == numerics.FAST, "out_dtype": request.result_dtype,
    }  # fmt: skip
    function = function_of(operation)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in options:
            given[name] = options[name]
        elif name.endswith("_shape"):
            given[name] = slots[-1].specs[0].shape
        elif name == "layout":
            given[name] = request.layout.value
        elif name not in given and parameter.kind is parameter.KEYWORD_ONLY and hasattr(request.shape, name):
            given[name] = getattr(request.shape, name)
    return function(**given | changes)


def results_of(request: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that a request writes, by label, as its operation's function computes them on the reference.

    Args:
        request: of any operation.
        arrays: the operands on the host by label, as functions take them; those that are written are not read.
    """
    results = {
        label: poison(slot, spec)
        for slot in operation_of(request).operands(request)
        for label, spec in zip(slot.labels, slot.specs, strict=True)
        if slot.written
    }
    call(request, {**arrays, **results}, backend="reference")
    return results
