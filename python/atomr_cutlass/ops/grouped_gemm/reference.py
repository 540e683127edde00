"""The reference of grouped GEMM, one `gemm` for each group, and its probe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...arrays.numerics import AnyArray
from ...arrays.scales import BLOCK
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT, EpilogueVisitorTree
from ...pipeline.operation import Array, Arrays, operands_of
from ...pipeline.probe import Probe
from ...reference.tree import evaluate
from ..gemm.reference import absolute_product, gemm
from .problem import ALONG_K, BLOCKS, CONTIGUOUS, GROUP, LIST, MASKED, TENSOR

if TYPE_CHECKING:
    from .operation import GroupedGemmRequest  # noqa: F401 - named in quotes below


def group_bounds(name: str, values: AnyArray, extent: int, form: str) -> list[tuple[int, int]]:
    """The begin and end of each group; refuses negative sizes and ends beyond `extent`.

    `name` says whether values are `offsets` (cumulative ends) or `counts` (sizes). They divide `extent`, which in the
    masked form is the rows of each group, and need not fill it.
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
    """D[g] = alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g], or the tree of that.

    There is a group for each of `bounds`, or for each member of lists. `arrays`, and the tree's `operands`, are one for
    all groups or one for each. Writes and returns `out`, or makes new arrays for lists. The `terms` are alpha, beta and
    math, as in `gemm`.
    """
    rows = [slice(*bound) for bound in bounds]
    places: Sequence[Any] = {
        LIST: range(len(out)), ALONG_K: range(len(rows)), CONTIGUOUS: rows, MASKED: list(enumerate(rows))
    }[form]  # fmt: skip

    def part(name: str, given: Sequence[AnyArray], group: int, place: Any) -> Any:
        if form == LIST:
            return given[group if len(given) > 1 else 0]
        (array,), scaling = given, scale_forms.get(name)
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
        product = {name: part(name, given, group, place) for name, given in arrays.items()}
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


class GroupedGemmProbe(Probe["GroupedGemmRequest"]):
    """The probe of a grouped GEMM, whose parts are groups."""

    @property
    def depth(self) -> int:
        return max(group.k for group in self.request.shape.groups)

    @property
    def scale_block(self) -> int:
        return BLOCK if self.request.scaling == BLOCKS else 0

    def parts(self) -> Iterator[Arrays]:
        slots = operands_of(self.request)
        for g in range(len(self.request.shape.groups)):
            yield {slot.name: self.arrays[slot.labels[g if slot.listed else 0]] for slot in slots}

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        return gemm(**self._operands(part), out_dtype=dtype, math=self.request.math)

    def magnitudes(self, part: Arrays) -> Array:
        return absolute_product(**self._operands(part))

    def _operands(self, part: Arrays) -> dict[str, Any]:
        """The operands of a group's product, and its scalars."""
        names = ["a", "b", *(["c"] if self.request.epilogue.beta != 0 else [])]
        names += ["scale_a", "scale_b"] if self.request.scaling is not None else []
        return self.how | {name: part[name] for name in names}
