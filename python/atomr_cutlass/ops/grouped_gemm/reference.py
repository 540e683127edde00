"""The reference of grouped GEMM, for arguments that `grouped_gemm` has parsed: one `gemm` for each group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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


def grouped_gemm(
    form: str,
    bounds: Sequence[tuple[int, int]],
    arrays: Mapping[str, Sequence[AnyArray]],
    scale_forms: Mapping[str, str],
    tree: EpilogueVisitorTree | None,
    operands: Mapping[str, Sequence[AnyArray]],
    out: Sequence[AnyArray],
    *,
    out_dtype: CutlassDtype,
    **terms: Any,
) -> Sequence[AnyArray]:
    """D[g]: the tree of, or just, alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g].

    Args:
        form: of the operands.
        bounds: where each group begins and ends; none of lists.
        arrays: the product's operands by name: one for all groups, or of a list one for each.
        scale_forms: those of `scale_a` and `scale_b`.
        tree: computes D; None for the product alone.
        operands: of the tree by name, one for each group.
        out: D before; written, but for lists.
        out_dtype: the element type of D.
        terms: alpha, beta and math, as in `gemm`.

    Returns:
        D: one array, or of lists one for each group.

    Raises:
        InvalidOperandError: as `gemm`; names the group.
    """
    rows = [slice(*bound) for bound in bounds]
    places: Sequence[Any] = {
        LIST: range(len(out)), ALONG_K: range(len(rows)), CONTIGUOUS: rows, MASKED: list(enumerate(rows))
    }[form]  # fmt: skip

    def part(name: str, array: AnyArray, group: int, place: Any) -> Any:
        scaling = scale_forms.get(name)
        if scaling == TENSOR:
            return array
        if scaling == GROUP:
            return array.reshape(-1, 1, 1)[group]
        if form != ALONG_K:
            return array[group if name in ("b", "scale_b") else place]
        if scaling is not None:
            return array[group] if array.ndim == 3 else array
        if name == "a":
            return array[:, rows[group]]
        return array[rows[group] if name == "b" else group]

    results = []
    for group, place in enumerate(places):
        product: dict[str, Any]
        if form == LIST:
            product = {name: each[group if len(each) > 1 else 0] for name, each in arrays.items()}
        else:
            product = {name: part(name, array, group, place) for name, (array,) in arrays.items()}
        try:
            d = gemm(**product, **terms, out_dtype=out_dtype if tree is None else CutlassDtype.F64)
            if tree is not None:
                read = {name: each[group] for name, each in operands.items()}
                d = evaluate(tree, d, read, out_dtype=out_dtype)[RESULT]
        except InvalidOperandError as error:
            raise InvalidOperandError(f"group {group}: {error}") from None
        results.append(d)
    if form == LIST:
        return results
    for place, d in zip(places, results, strict=True):
        out[0][place] = d
    return out
