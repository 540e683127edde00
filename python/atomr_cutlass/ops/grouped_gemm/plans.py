"""Plans of grouped GEMM: the arguments of a kernel."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ...epilogue.bound import GroupOperand
from ...errors import UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import form_of
from ...generator.epilogue.lower import is_common
from ...generator.epilogue.tree import ROW as ROW_KIND
from ...pipeline import devices
from ...pipeline.plan import Address, Plan, Steps
from ...pipeline.planning import PlanOptions, planned
from ...pipeline.problem import MatrixSpec
from ...pipeline.search import Candidate
from .kernels import GroupedSearch, epilogue_of, layouts_of, reads_as_c, refusal
from .problem import BLOCKS, FORMS, GROUP, LIST, TENSOR, VECTOR, GroupedProblem, ReadLayout, scale_strides

ENTRY = struct.Struct("<6Q4q4i")
"""atomr_cutlass_group (kernel_abi.h): a, b, c, d, scale_a, scale_b; lda, ldb, ldc, ldd; m, n, k, padding."""

_SCALE_FORMS = {TENSOR: 0, VECTOR: 1, GROUP: 2, BLOCKS: 0}
_POINTERS = ("a", "b", "c", "d", "scale_a", "scale_b")


def make(problem: GroupedProblem, **options: Any) -> Plan:
    """The plan for a grouped GEMM.

    Its slots are a, b and, where there are such, c, offsets, scale_a, scale_b, the tree's inputs, then out; of lists
    every member in the place of its list. Offsets (or counts) are read on the device at each call, and never by the
    host; they are clamped to the rows there are.

    Args:
        problem: the products.
        options: those of `PlanOptions`.

    Raises:
        UnsupportedError, KernelNotFoundError: as `gemm.plans.make`.
    """
    how = PlanOptions(**options)
    search = GroupedSearch(problem, devices.get(problem.device), how.arch, batch_invariant=how.batch_invariant)
    return planned(search, functools.partial(_plan, problem), how)


def _plan(problem: GroupedProblem, candidate: Candidate[GroupedProblem], how: PlanOptions) -> Plan:
    key, listed, in_place_of_c = candidate.key, problem.form == LIST, reads_as_c(candidate.key, problem)
    steps = Steps(problem.device, how.stream)
    layouts = layouts_of(key, problem)
    if layouts is None:
        raise UnsupportedError(refusal(problem, how.arch or devices.get(problem.device).arch))

    def slots(name: str, specs: Sequence[MatrixSpec], align: int = 1, role: str = "input") -> list[Address]:
        labels = [f"{name}[{g}]" if listed else name for g in range(len(specs))]
        return [
            steps.matrix(label, spec, align if 0 not in spec.shape else 0, role)  # of no elements any address will do
            for label, spec in zip(labels, specs, strict=True)
        ]

    args: dict[str, Any] = {
        "groups": problem.groups, "form": FORMS.index(problem.form), "alpha": "alpha", "beta": "beta"
    }  # fmt: skip
    if is_common(key.epilogue) and (form := form_of(epilogue_of(key, problem))) is not None:
        args["operand0_stride_m"] = form.told  # selects the problem's tree in a kernel that computes several
    places = {"a": slots("a", problem.a, key.align_a), "b": slots("b", problem.b, key.align_b)}
    places["c"] = slots("c", problem.c, key.align_d, "source")
    if not listed:
        divides = "counts" if problem.counted else "offsets"
        (args["offsets"],) = slots(divides, [MatrixSpec((problem.groups,), (1,), CutlassDtype.I32)])
    for name, scale in problem.scales.items():
        places[name] = slots(name, scale.arrays)
        args[f"scale_form_{name[-1]}"] = _SCALE_FORMS[scale.form]
        args |= scale_strides(name, scale, listed=listed)
    align = key.align_d if in_place_of_c else 1
    inputs = problem.fusion.inputs if problem.fusion else ()
    operands = [(operand, slots(operand.name, operand.arrays, align)) for operand in inputs]
    if in_place_of_c:
        [(_, places["c"])], operands, args["beta"] = operands, [], 1.0
    out = places["d"] = slots("out", problem.d, key.align_d, "output")
    # Kernels may need a valid address for an operand without elements.
    for name, specs in (("a", problem.a), ("b", problem.b)):
        triples = zip(places[name], specs, out, strict=True)
        places[name] = [result if 0 in spec.shape else place for place, spec, result in triples]
    layouts["d"] = layouts.pop("out")
    layouts["c"] = layouts["c"] or layouts["d"]
    if listed:
        args |= _table(steps, problem, places, layouts, operands)
    else:
        args["m"], args["n"], args["k"] = problem.extents
        args |= {"rows_are_counts": int(problem.counted), "c": None} | {name: p[0] for name, p in places.items() if p}
        for letter in "abcd":
            (layout,) = layouts[letter]
            args |= {f"ld{letter}": layout.leading, f"group_stride_{letter}": layout.group}
        for number, (operand, (place,)) in enumerate(operands):
            group_stride, stride = operand.strides
            args |= {
                f"operand{number}": place,
                f"operand{number}_stride_n": stride,
                f"operand{number}_batch_stride": group_stride,
            }
    steps.launch(candidate, args, main=True)
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta)


def _table(
    steps: Steps,
    problem: GroupedProblem,
    places: Mapping[str, list[Address]],
    layouts: Mapping[str, list[ReadLayout]],
    operands: Sequence[tuple[GroupOperand, list[Address]]],
) -> dict[str, Any]:
    """Has a table of a list's matrices written to the device at each call; the arguments that say where it is.

    After an entry for each group are, for each operand of the tree, its addresses in all groups.
    """
    table, patches = bytearray(), []
    for g, extents in enumerate(problem.members):
        for index, name in enumerate(_POINTERS):
            if addresses := places.get(name):
                patches.append((len(table) + 8 * index, addresses[g if len(addresses) > 1 else 0]))
        table += ENTRY.pack(0, 0, 0, 0, 0, 0, *(layouts[letter][g].leading for letter in "abcd"), *extents, 0)
    args: dict[str, Any] = {"table": steps.temporary(len(table) + 8 * problem.groups * len(operands))}
    kind, index, _ = args["table"]
    for number, (operand, addresses) in enumerate(operands):
        is_row = operand.kind == ROW_KIND
        if is_row and any(spec.shape[-1] > 1 and spec.strides[-1] != 1 for spec in operand.arrays):
            raise UnsupportedError(f"the members of {operand.name} must be contiguous")
        args |= {f"operand{number}": (kind, index, len(table)), f"operand{number}_stride_n": int(is_row)}
        for g in range(problem.groups):
            patches.append((len(table), addresses[g if len(addresses) > 1 else 0]))
            table += bytes(8)
    steps.copy(args["table"], bytes(table), patches)
    return args
