"""Plans of grouped GEMM: the arguments of a kernel."""

from __future__ import annotations

import itertools
import struct
from typing import Any

from ...errors import UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import form_of
from ...generator.epilogue.lower import is_common
from ...generator.epilogue.tree import ROW as ROW_KIND
from ...generator.key import KernelKey
from ...pipeline import devices
from ...pipeline.candidate import Candidate
from ...pipeline.plan import Address, Plan, Steps
from ...pipeline.planning import PlanOptions, planned
from ...pipeline.problem import MatrixSpec
from .kernels import GroupedSearch, epilogue_of, layouts_of, reads_as_c, refusal
from .problem import (
    BLOCKS,
    FORMS,
    GROUP,
    LIST,
    TENSOR,
    VECTOR,
    GroupedProblem,
    ReadLayout,
    common_strides,
)

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
    if problem.empty:
        raise UnsupportedError(refusal(problem, how.arch))

    def build(candidate: Candidate[GroupedProblem], how: PlanOptions) -> Plan:
        return _plan(problem, candidate, how)

    search = GroupedSearch(problem, devices.get(problem.device), how.arch, batch_invariant=how.batch_invariant)
    return planned(search, build, how)


def _plan(problem: GroupedProblem, candidate: Candidate[GroupedProblem], how: PlanOptions) -> Plan:
    steps = Steps(problem.device, how.stream)
    layouts = layouts_of(candidate.key, problem)
    if layouts is None:
        raise UnsupportedError(refusal(problem, how.arch or devices.get(problem.device).arch))
    args = _told(candidate.key, problem) | (_list_args if problem.form == LIST else _array_args)(
        steps, problem, candidate.key, layouts
    )
    form = {"groups": problem.groups, "form": FORMS.index(problem.form), "alpha": "alpha", "beta": "beta"}
    steps.launch(candidate, form | args, main=True)
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta)


def _told(key: KernelKey, problem: GroupedProblem) -> dict[str, Any]:
    """The arguments that select the problem's tree in a kernel that computes several."""
    form = form_of(epilogue_of(key, problem)) if is_common(key.epilogue) else None
    return {} if form is None else {"operand0_stride_m": form.told}


def _slot(steps: Steps, name: str, spec: MatrixSpec, align: int, role: str = "input") -> Address:
    return steps.matrix(name, spec, align if 0 not in spec.shape else 0, role)  # of no elements any address will do


def _array_args(
    steps: Steps, problem: GroupedProblem, key: KernelKey, layouts: dict[str, list[ReadLayout]]
) -> dict[str, Any]:
    """Of the forms whose operands are one array each."""
    m, n, k = problem.extents
    a = _slot(steps, "a", problem.a[0], key.align_a)
    b = _slot(steps, "b", problem.b[0], key.align_b)
    c = _slot(steps, "c", problem.c[0], key.align_d, "source") if problem.c else None
    offsets = MatrixSpec((problem.groups,), (1,), CutlassDtype.I32)
    divides = _slot(steps, "counts" if problem.counted else "offsets", offsets, 1)
    scales = _scale_args(steps, problem)
    fused: dict[str, Any] = {}
    for number, operand in enumerate(problem.fusion.inputs if problem.fusion else ()):
        (array,) = operand.arrays
        if reads_as_c(key, problem):
            c, fused = _slot(steps, operand.name, array, key.align_d), {"beta": 1.0}
            continue
        group_stride, stride = operand.strides
        fused |= {
            f"operand{number}": _slot(steps, operand.name, array, 1),
            f"operand{number}_stride_n": stride,
            f"operand{number}_batch_stride": group_stride,
        }
    out = _slot(steps, "out", problem.d[0], key.align_d, "output")
    args: dict[str, Any] = {
        "m": m, "n": n, "k": k, "rows_are_counts": int(problem.counted), "offsets": divides, "c": c, "d": out,
        # Kernels may need a valid address for an operand without elements.
        "a": a if 0 not in problem.a[0].shape else out, "b": b if 0 not in problem.b[0].shape else out,
    }  # fmt: skip
    for letter, name in zip("abcd", ("a", "b", "c", "out"), strict=True):
        first = layouts[name][0] if layouts[name] else layouts["out"][0]
        args[f"ld{letter}"] = first.leading
        args[f"group_stride_{letter}"] = first.group
    return args | scales | fused


def _scale_args(steps: Steps, problem: GroupedProblem) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for letter, scale in (("a", problem.scale_a), ("b", problem.scale_b)):
        if scale is None:
            continue
        name, spec = f"scale_{letter}", scale.arrays[0]
        args[name] = _slot(steps, name, spec, 1)
        args[f"scale_form_{letter}"] = _SCALE_FORMS[scale.form]
        along, k_along = (-2, -1) if letter == "a" else (-1, -2)
        if scale.form == GROUP and problem.groups > 1 and spec.strides[0] != 1:
            raise UnsupportedError(f"{name} has strides {spec.strides}: the scales of groups must be contiguous")
        if scale.form == VECTOR and spec.shape[along] > 1 and spec.strides[along] != 1:
            raise UnsupportedError(f"{name} has strides {spec.strides}: the scales of a group must be contiguous")
        if scale.form in (VECTOR, BLOCKS) and len(spec.shape) == 3:
            args[f"scale_group_stride_{letter}"] = spec.strides[0]
        if scale.form == BLOCKS:
            args[f"scale_stride_{letter}"] = spec.strides[along]
            args[f"scale_k_stride_{letter}"] = spec.strides[k_along]
    return args


def _list_args(
    steps: Steps, problem: GroupedProblem, key: KernelKey, layouts: dict[str, list[ReadLayout]]
) -> dict[str, Any]:
    """Of lists: a table of matrices, written to the device at each call."""

    def slots(name: str, specs: tuple[MatrixSpec, ...], align: int, role: str = "input") -> list[Address]:
        return [_slot(steps, f"{name}[{g}]", spec, align, role) for g, spec in enumerate(specs)]

    args: dict[str, Any] = {}
    places = {"a": slots("a", problem.a, key.align_a), "b": slots("b", problem.b, key.align_b)}
    places["c"] = slots("c", problem.c, key.align_d, "source")
    for letter, scale in (("a", problem.scale_a), ("b", problem.scale_b)):
        if scale is None:
            places[f"scale_{letter}"] = []
            continue
        found = slots(f"scale_{letter}", scale.arrays, 1)
        places[f"scale_{letter}"] = found * problem.groups if len(found) == 1 else found
        args[f"scale_form_{letter}"] = _SCALE_FORMS[scale.form]
        args |= common_strides(letter, scale)
    in_place_of_c = reads_as_c(key, problem)
    inputs = problem.fusion.inputs if problem.fusion else ()
    tables = []
    for operand in inputs:
        found = slots(operand.name, operand.arrays, key.align_d if in_place_of_c else 1)
        tables.append(found if len(found) == problem.groups else found * problem.groups)
    if in_place_of_c:
        places["c"], tables = tables[0], []
        args["beta"] = 1.0
    places["d"] = slots("out", problem.d, key.align_d, "output")
    layouts["d"] = layouts["out"]
    table, patches = bytearray(), []
    for g, (m, n, k) in enumerate(problem.members):
        start = len(table)
        leading = [(layouts[letter] or layouts["d"])[g].leading for letter in "abcd"]
        table += ENTRY.pack(0, 0, 0, 0, 0, 0, *leading, m, n, k, 0)
        for index, name in enumerate(_POINTERS):
            if not places[name]:
                continue
            # As above, of an operand without elements.
            nothing = (name == "a" and 0 in problem.a[g].shape) or (name == "b" and 0 in problem.b[g].shape)
            patches.append((start + 8 * index, (places["d"] if nothing else places[name])[g]))
    # After the groups: for each operand of the tree, its address in every group.
    behind = len(table)
    patches += [(behind + 8 * place, address) for place, address in enumerate(itertools.chain(*tables))]
    table += bytes(8 * problem.groups * len(tables))
    where = steps.temporary(len(table))
    steps.copy(where, bytes(table), patches)
    kind, index, _ = where
    for number, operand in enumerate(inputs[: len(tables)]):
        is_row = operand.kind == ROW_KIND
        if is_row and any(spec.shape[-1] > 1 and spec.strides[-1] != 1 for spec in operand.arrays):
            raise UnsupportedError(f"the members of {operand.name} must be contiguous")
        args |= {
            f"operand{number}": (kind, index, behind + 8 * problem.groups * number),
            f"operand{number}_stride_n": int(is_row),
        }
    return args | {"table": where}
