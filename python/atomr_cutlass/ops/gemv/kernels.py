"""Kernels of matrix times vector: which serve a problem, their cost, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...epilogue import bound as fused
from ...epilogue.bound import FusedOperands, Fusion
from ...errors import UnsupportedError
from ...generator.archs import SmArch
from ...generator.epilogue.lower import LINEAR, split
from ...generator.families.gemv import OP
from ...generator.key import COLUMN
from ...generator.rules import gemm_types, supports_tree
from ...pipeline import devices
from ...pipeline.devices import Device
from ...pipeline.plan import Address, Plan, Steps, moved
from ...pipeline.planning import DEFAULT_OPTIONS, PlanOptions, planned
from ...pipeline.problem import GemmFormulation, GemmProblem, formulations
from ..gemm.kernels import nonempty, product_args
from ..gemm.search import GemmCandidate, ProductSearch
from .problem import transposed, vector_of


class GemvSearch(ProductSearch):
    """Kernels for a GEMM of one row."""

    op = OP

    def put(self, problem: GemmProblem) -> Sequence[GemmFormulation]:
        """The vectors with any stride, as columns are, beside each layout of the matrix."""
        made = formulations(problem)
        return [each for each in made if not each.swapped and each.layout_a == each.layout_d == COLUMN]

    def reason(self) -> str:
        """Why no cell of the matrix serves the problem."""
        problem = self.problem
        program = split(problem.epilogue)[1]
        types = gemm_types(problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math, tree=bool(program))
        lowered = supports_tree(program, problem.acc, problem.d.dtype) if program else types
        target = self.arch or devices.require_arch(self.device)
        reason = types.reason or lowered.reason or self.closest(target)
        return f"no gemv kernel serves this problem on {target.value}: {reason}"


def make(problem: GemmProblem, fusion: Fusion | None = None, **options: Any) -> Plan:
    """The plan for a problem. Its slots are a, x, c where there is one, the tree's inputs and outputs, and out.

    Args:
        problem: the product as `product` puts it.
        fusion: the tree that follows.
        options: those of `PlanOptions`.

    Raises:
        UnsupportedError, KernelNotFoundError: as `gemm.plans.make`.
    """
    how = PlanOptions(**options)

    def build(candidate: GemmCandidate, how: PlanOptions) -> Plan:
        return from_candidate(problem, candidate, fusion, how)

    search = search_for(problem, fusion, devices.get(problem.device), how.arch)
    return planned(search, build, how)


def search_for(problem: GemmProblem, fusion: Fusion | None, device: Device, arch: SmArch | None) -> GemvSearch:
    """The kernels for a problem and the tree that follows.

    Raises:
        InvalidOperandError, UnsupportedError: an operand no kernel can read, or a result without elements.
    """
    if 0 in (problem.n, problem.batch):
        raise UnsupportedError(f"a result of shape {vector_of(problem.d).shape} is empty: there is nothing to plan")
    read = nonempty(problem)
    return GemvSearch([read] if fusion is None else fused.problem_of(read, fusion, LINEAR), device, arch)


def from_candidate(
    problem: GemmProblem,
    candidate: GemmCandidate,
    fusion: Fusion | None = None,
    how: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """The plan with this kernel, which need not be the best one; see `make`."""
    key, formulation = candidate.key, candidate.formulation
    steps = Steps(problem.device, how.stream)

    a, x = steps.matrix("a", transposed(problem.b), key.align_b), steps.matrix("x", vector_of(problem.a))
    c: Address | None = None
    if fusion is None:
        c = steps.matrix("c", vector_of(problem.c or problem.d), role="optional source")
    elif problem.c is not None:
        c = steps.matrix("c", vector_of(problem.c), role="source")
    tree = FusedOperands(steps, fusion, formulation.problem.epilogue, key, clear_masks=True)
    c = tree.source or c
    out = steps.matrix("out", vector_of(problem.d), role="output")
    batches = formulation.batches
    for at_x, at_a, at_c, at_d, *offsets in batches.offsets:
        args = product_args(formulation, candidate) | {
            "k": problem.k, "batch": batches.count, "alpha": "alpha", "beta": "beta",
            "a": moved(x, at_x, problem.a.dtype), "b": moved(a, at_a, problem.b.dtype),
            "c": None if c is None else moved(c, at_c, problem.d.dtype), "d": moved(out, at_d, problem.d.dtype),
        }  # fmt: skip
        steps.launch(candidate, args | tree.args(batches.strides[4:], tuple(offsets), swapped=False))
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta)
