"""The reference of grouped GEMM, for arguments that `grouped_gemm` has parsed: one `gemm` for each group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...arrays.numerics import AnyArray
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT, EpilogueVisitorTree
from ...reference.tree import evaluate
from ..gemm.reference import gemm
from .problem import ALONG_K, CONTIGUOUS, GROUP, LIST, MASKED, TENSOR


def group_bounds(name: str, values: AnyArray, extent: int, form: str) -> list[tuple[int, int]]:
    """Where each group begins and ends.

    Args:
        name: `offsets` (cumulative ends) or `counts` (sizes).
        values: (G,) int32.
        extent: the dimension that they divide and need not fill; of the masked form the rows of each group.
        form: of the operands.

    Raises:
        InvalidOperandError: a negative size, or an end beyond `extent`.
    """
    numbers = values.tolist()
    if form == MASKED:
        for index, number in enumerate(numbers):
            if not 0 <= number <= extent:
                raise InvalidOperandError(f"counts[{index}] is {number}; a group has 0 to {extent} rows")
        return [(0, number) for number in numbers]
    ends = numbers if name == "offsets" else list(itertools.accumulate(numbers))
    bounds = list(zip([0, *ends], ends, strict=False))
    for index, (start, end) in enumerate(bounds):
        if end < start:
            problem = f"goes back from {start}" if name == "offsets" else "is negative"
            raise InvalidOperandError(f"{name}[{index}] is {numbers[index]}, which {problem}")
        if end > extent:
            raise InvalidOperandError(f"{name}[{index}] is {numbers[index]}: group {index} ends at {end} of {extent}")
    return bounds


def places_of(form: str, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    """The index of each group's part of C and D."""
    if form == ALONG_K:
        return list(range(len(bounds)))
    rows = [slice(*bound) for bound in bounds]
    return rows if form == CONTIGUOUS else list(enumerate(rows))


def divided(
    form: str,
    bounds: Sequence[tuple[int, int]],
    arrays: Mapping[str, Sequence[AnyArray]],
    scale_forms: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The operands of each group's product.

    Args:
        form: of the operands.
        bounds: where each group begins and ends; none of lists.
        arrays: by name: one for all groups, or of a list one for each.
        scale_forms: those of scale_a and scale_b.
    """

    def part(name: str, array: AnyArray, group: int, place: Any) -> Any:
        scaling = scale_forms.get(name)
        if scaling == TENSOR:
            return array
        if scaling == GROUP:
            return array.reshape(-1, 1, 1)[group]
        if form == ALONG_K:
            if scaling is not None:
                return array[group] if array.ndim == 3 else array
            along_k = slice(*bounds[group])
            place = {"a": (slice(None), along_k), "b": along_k}.get(name, place)
            return array[place]
        return array[group if name in ("b", "scale_b") else place]

    if form == LIST:
        numbers = range(len(arrays["a"]))
        return [{name: each[g if len(each) > 1 else 0] for name, each in arrays.items()} for g in numbers]
    inputs = {name: each[0] for name, each in arrays.items() if name not in ("offsets", "counts")}
    return [
        {name: part(name, array, group, place) for name, array in inputs.items()}
        for group, place in enumerate(places_of(form, bounds))
    ]


def grouped_gemm(
    groups: Iterable[Mapping[str, Any]],
    tree: EpilogueVisitorTree | None,
    operands: Mapping[str, Sequence[AnyArray]],
    *,
    out_dtype: CutlassDtype,
    **terms: Any,
) -> list[AnyArray]:
    """D of each group: a tree of, or just, alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g].

    Args:
        groups: the operands of each group's product.
        tree: computes D; None for the product alone.
        operands: of the tree by name, one for each group.
        out_dtype: the element type of the results.
        terms: alpha, beta and math, as in `gemm`.

    Raises:
        InvalidOperandError: as `gemm`; names the group.
    """
    results = []
    for index, arrays in enumerate(groups):
        try:
            d = gemm(**arrays, **terms, out_dtype=out_dtype if tree is None else CutlassDtype.F64)
            if tree is not None:
                read = {name: each[index] for name, each in operands.items()}
                d = evaluate(tree, d, read, out_dtype=out_dtype)[RESULT]
        except InvalidOperandError as error:
            raise InvalidOperandError(f"group {index}: {error}") from None
        results.append(d)
    return results
