"""Probes: a request on host arrays, computed by the reference or compared with it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from .. import _core
from ..arrays import numerics, operands
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import RESULT, EpilogueVisitorTree
from ..generator.rules import accumulator, epilogue_compute
from ..reference.parts import Tolerance, tolerance, within_tolerance
from ..reference.tree import evaluate
from ..reference.tree_error import differing, tolerances
from .operation import Array, Arrays, memory_order, operation_of
from .plan import Plan
from .request import Request

_PARTS = 32

RequestT = TypeVar("RequestT", bound="Request")

Track = Callable[[list[Arrays]], Iterable[Arrays]]
"""Shows the progress of a loop over these items."""


@dataclass
class Check:
    """The number of elements outside the tolerance; `differences` describes where they are, for a tree's outputs."""

    limits: Tolerance
    mismatches: int = 0
    max_error: float = 0.0
    differences: list[str] = field(default_factory=list)

    def see(self, got: Array, expected: Array) -> None:
        """Updates the largest difference."""
        with np.errstate(invalid="ignore"):
            difference = np.abs(numerics.to_float64(got) - numerics.to_float64(expected))
        self.max_error = max(self.max_error, float(np.max(difference, initial=0.0)))


class Probe(abc.ABC, Generic[RequestT]):
    """A request on arrays, operands and results by name. A part has some elements of the result and their operands.

    `how` has arguments of the reference.
    """

    def __init__(self, request: RequestT, arrays: Arrays) -> None:
        self.request, self.arrays = request, arrays
        self.how: dict[str, Any] = {"alpha": request.epilogue.alpha, "beta": request.epilogue.beta}

    @property
    def tree(self) -> EpilogueVisitorTree | None:
        """The epilogue tree, which the reference evaluates on the accumulator, or None."""
        return self.request.tree

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """The number of products that an element of the result adds up."""

    @property
    def scale_block(self) -> int:
        """Elements along K that share a scale; 0 without scales of blocks."""
        return 0

    @property
    def computed(self) -> CutlassDtype:
        """The element type that kernels evaluate a tree in."""
        return epilogue_compute(accumulator(self.request.operand_dtype), tree=True)

    def limits(self, math: str) -> Tolerance:
        """The tolerance in the math mode of a kernel; with a tree, that of the accumulator."""
        rounded = self.request.result_dtype if self.tree is None else self.computed
        return tolerance(self.request.operand_dtype, rounded, self.depth, math, scale_block=self.scale_block)

    @abc.abstractmethod
    def parts(self) -> Iterator[Arrays]:
        """The result piece by piece, so that progress can be shown and memory stays small."""

    @abc.abstractmethod
    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        """The reference's result without a tree, in an element type; in F64 it is the accumulator of a tree."""

    @abc.abstractmethod
    def magnitudes(self, part: Arrays) -> Array:
        """The magnitudes that the tolerance is relative to."""

    def expected(self, part: Arrays) -> Array:
        """The reference's result where there is no tree."""
        return self.product(part, self.request.result_dtype)

    def matrices(self, part: Arrays) -> Arrays:
        """The arrays that a tree reads and writes, as matrices."""
        return part

    def rounding(self, part: Arrays) -> dict[str, Any]:
        """Arguments of `reference.evaluate` about storing a tree's result."""
        return {"out_dtype": self.request.result_dtype}

    def compute(self, part: Arrays) -> None:
        """Writes a part of the result."""
        if self.tree is None:
            part["out"][...] = self.expected(part)
            return
        acc, read = self.product(part, CutlassDtype.F64), _inputs(self.tree, self.matrices(part))
        for name, values in evaluate(self.tree, acc, read, **self.rounding(part)).items():
            part[name][...] = values.reshape(part[name].shape)

    def compare(self, part: Arrays, check: Check) -> None:
        """Compares a part with the reference."""
        if self.tree is None:
            result, expected = part["out"], self.expected(part)
            right = within_tolerance(result, expected, self.magnitudes(part), check.limits, self.request.result_dtype)
            check.see(result, expected)
            check.mismatches += int(right.size - np.count_nonzero(right))
            return
        acc, error = self.accumulator(part, check.limits)
        arrays, how = self.matrices(part), self.rounding(part)
        read = _inputs(self.tree, arrays)
        wanted, bounds = evaluate(self.tree, acc, read, **how), tolerances(self.tree, acc, error, read, **how)
        check.see(arrays[RESULT], wanted[RESULT])
        for name, bound in bounds.items():
            differences = differing(name, arrays[name], wanted[name], bound)
            check.differences += differences
            check.mismatches += sum(differences.values())

    def accumulator(self, part: Arrays, limits: Tolerance) -> tuple[Array, Array]:
        """The accumulator of a tree, and the error that a kernel's may have."""
        acc = self.product(part, CutlassDtype.F64)
        return acc, limits.atol_factor * self.magnitudes(part) + limits.rtol * np.abs(acc)

    def finish(self, check: Check) -> None:
        """Checks a result that has no parts."""


def slices(extent: int) -> Iterator[slice]:
    """A dimension in parts, at most 32 of them."""
    step = max(1, -(-extent // _PARTS))
    return (slice(start, start + step) for start in range(0, extent, step))


def _inputs(tree: EpilogueVisitorTree, arrays: Arrays) -> Arrays:
    return {operand.name: arrays[operand.name] for operand in tree.inputs}


def checked(
    made: Any, arrays: Arrays, views: Mapping[str, Any], *, track: Track = iter, parts: int | None = None
) -> Check:
    """Launches a plan of a request and compares its results with the reference: all, or `parts` parts of them.

    `arrays` have the results as they are before the launch, `views` the same on the GPU (see `uploaded`).
    """
    request = made.request
    probe = operation_of(request).probe(request, arrays | _written(made, arrays, views))
    check = Check(probe.limits(_math(request, made)))
    compared = list(probe.parts())
    if parts is not None and parts < len(compared):
        compared = [compared[len(compared) * (number + 1) // parts - 1] for number in range(parts)]
    for part in track(compared):
        probe.compare(part, check)
    probe.finish(check)
    return check


def _written(made: Any, arrays: Arrays, views: Mapping[str, Any]) -> Arrays:
    """Launches a plan and returns the arrays that it writes."""
    operation = operation_of(made.request)
    sent = operation.gpu_forms(made.request, arrays)
    labels = [label for slot in operation.operands(made.request) if slot.written for label in slot.labels]
    for label in labels:  # an earlier launch may have left right results
        operands.copy_in(sent[label], views[label])
    operation.launch(made, made.request, views, stream=0)
    return {label: operands.download(views[label]) for label in labels}


def _math(request: Request, made: Plan | None) -> str:
    """The math mode of the computation: fp8 convolutions that do not cast accumulate as fast accumulation does."""
    return request.math if made is None or made.main.key.math != numerics.FAST else numerics.FAST


def uploaded(request: Request, arrays: Arrays, device: int) -> dict[str, _core.Operand]:
    """The operands of a request on the GPU, by name, in the forms that its plans take."""
    operation = operation_of(request)
    sent = operation.gpu_forms(request, arrays)
    views = {}
    for slot in operation.operands(request):
        for label, spec in zip(slot.labels, slot.specs, strict=True):
            dense = operands.upload(sent[label].transpose(memory_order(spec)), device)
            views[label] = _core.Operand(
                dense.pointer, spec.shape, spec.strides, dense.dtype, operands.CUDA, device, owner=dense
            )
    return views
