"""Cases of `tree_cases` on a GPU: their arrays in poison, their launches, and their results against the reference.

Import it after a test has its `torch` fixture, as `gpu_matrices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import atomr_cutlass as ac
import fp8_matrices
from atomr_cutlass import reference
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.numerics import to_float64
from atomr_cutlass.generator.epilogue.tree import MASK, RESULT
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.planning import PlanOptions
from random_trees import evaluate_torch, to_torch
from tree_cases import Array, Case, Layout

if TYPE_CHECKING:
    import torch


class Held:
    """An array inside poison.

    Attributes:
        view: the array; poison until written.
    """

    def __init__(self, layout: Layout) -> None:
        import torch

        flat = len(layout.shape) < 2
        self._inside = fp8_matrices.guarded(
            (*(layout.shape or (1,)), 1) if flat else layout.shape,
            layout.element,
            layout="r" if flat else layout.order,
            pad=layout.pad,
            offset=layout.offset,
        )
        view = self._inside.view
        if flat:
            view = view[:, 0] if layout.shape else view[0, 0]
        self.view = view.view(torch.uint8) if layout.dtype is None else view
        seen = operands.as_operand(self.view)
        # Or other kernels would be launched than were compiled for it.
        assert (seen.shape, seen.strides) == (layout.shape, layout.strides)
        assert not view.numel() or seen.alignment == layout.alignment

    def fill(self, values: Array) -> None:
        if values.size:
            self.view.copy_(to_torch(values, "cuda"))

    def assert_guards(self) -> None:
        self._inside.assert_guards()

    def assert_untouched(self) -> None:
        self._inside.assert_untouched()


class Arrays:
    """The arrays of a case on the GPU, and the values of its inputs, on the host."""

    def __init__(self, case: Case, values: Mapping[str, Array] | None = None) -> None:
        self.case = case
        self.values = dict(case.values() if values is None else values)
        self.held = {
            name: Held(layout) for name, layout in case.array_layouts.items() if not (name == "c" and case.in_place)
        }
        if case.in_place:
            self.held["c"] = self.held[RESULT]
        self.fill(self.values)

    def fill(self, values: Mapping[str, Array]) -> None:
        """Refills the inputs with other values."""
        self.values |= values
        for name, array in values.items():
            self.held[name].fill(array)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.held[name].view

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The tree's inputs."""
        return {operand.name: self[operand.name] for operand in self.case.tree.inputs}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The tree's outputs beside D."""
        return {output.name: self[output.name] for output in self.case.tree.outputs}

    @property
    def in_order(self) -> list[torch.Tensor]:
        """As plans take them."""
        return [self[name] for name in self.case.array_layouts]

    def assert_right(self, results: Mapping[str, torch.Tensor] | None = None) -> None:
        """Asserts that the outputs are right, and that no other memory was written.

        Args:
            results: by name, where they are not in the case's own arrays.
        """
        written = {RESULT: self[RESULT], **self.outputs} if results is None else results
        assert_right(self.case, self.values, {name: host(array) for name, array in written.items()})
        for name in written if results is None else ():
            self.held[name].assert_guards()

    def assert_untouched(self) -> None:
        """Nothing was written."""
        for name in (RESULT, *self.outputs):
            self.held[name].assert_untouched()


def host(array: Any) -> Array:
    """A NumPy copy of a tensor or of an array on the host."""
    import torch

    if isinstance(array, np.ndarray):
        return array
    return np.array(array.cpu().numpy()) if array.dtype is torch.uint8 else fp8_matrices.host(array)


def call(arrays: Arrays, **changes: Any) -> Any:
    """`gemm` of a case, into arrays of its own making where the epilogue is a function.

    Arguments that change to None are left out.
    """
    case = arrays.case
    arguments = case.arguments(arrays.operands)
    if case.function is None:
        arguments |= {**arrays.outputs, RESULT: arrays[RESULT]}
    c = arrays["c"] if case.batch_c is not None else None
    how = {"alpha": case.alpha, "beta": case.beta, "precision": case.precision, "out_dtype": case.d}
    given = {**how, **arguments, **changes}
    return ac.gemm(arrays["a"], arrays["b"], c, **{name: array for name, array in given.items() if array is not None})


def results_of(case: Case, returned: Any) -> dict[str, Any]:
    """The results of `gemm`, by name."""
    names = case.returned
    if isinstance(returned, dict):
        assert tuple(returned) == names
        return returned
    if isinstance(returned, tuple):
        return dict(zip(names, returned, strict=True))
    assert names == (RESULT,)
    return {RESULT: returned}


def plan_of(case: Case, like: Any = None) -> Plan:
    """A plan of the case's kernel; it takes `Arrays.in_order`."""
    candidate = case.candidate(devices.get(0))
    options = PlanOptions(alpha=case.alpha, beta=case.beta, like=like)
    return from_candidate(case.problem, candidate, options, fusion=case.fusion)


def assert_right(case: Case, values: Mapping[str, Array], results: Mapping[str, Array]) -> None:
    """Every element of the results agrees with the reference."""
    acc, error = case.accumulators(values)
    wrong = reference.mismatches(case.tree, results, acc, error, _read(case, values), out_dtype=case.d)
    assert not wrong, "\n".join([*wrong, case.tree.program])


def assert_as_unfused(arrays: Arrays) -> None:
    """Asserts that the outputs are as near to PyTorch's in float64 as two kernels must be to each other."""
    case, values = arrays.case, arrays.values
    acc, error = case.accumulators(values)
    unfused = evaluate_torch(case.tree, to_torch(acc, "cuda"), arrays.operands, out_dtype=case.d)
    bounds = reference.tolerances(case.tree, acc, error, _read(case, values), out_dtype=case.d)
    kinds = {output.name: output.kind for output in case.tree.outputs}
    for name, bound in bounds.items():
        got, want = host(arrays[name]), host(unfused[name])
        if kinds.get(name) == MASK:
            got, want = (np.unpackbits(mask, -1, count=case.n, bitorder="little") for mask in (got, want))
        off = np.abs(to_float64(got) - to_float64(want))
        far = ~(off <= 2.0 * bound)
        assert not far.any(), f"{name}: {int(far.sum())} of {far.size} differ from PyTorch's, by {off[far][:4]}"


def _read(case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
    return {operand.name: values[operand.name] for operand in case.tree.inputs}
