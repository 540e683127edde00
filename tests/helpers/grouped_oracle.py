"""Grouped GEMM in NumPy, apart from the package's own parsing: several products of different extents in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from atomr_cutlass.arrays.numerics import AnyArray, numpy_dtype, scale_type_of
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype, ScaleType
from atomr_cutlass.generator.epilogue.tree import RESULT, EpilogueVisitorTree
from atomr_cutlass.ops.gemm.reference import gemm
from atomr_cutlass.reference.parts import Scale
from atomr_cutlass.reference.tree import evaluate

Matrices: TypeAlias = "AnyArray | Sequence[AnyArray]"
Where: TypeAlias = "int | slice | tuple[int, slice]"


def grouped_gemm(
    a: Matrices,
    b: Matrices,
    c: Matrices | None = None,
    *,
    offsets: AnyArray | None = None,
    counts: AnyArray | None = None,
    out: Matrices | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Matrices | None = None,
    activation: str | None = None,
    scale_a: Scale | Sequence[Scale] | None = None,
    scale_b: Scale | Sequence[Scale] | None = None,
    scale_d: float | None = None,
    tree: EpilogueVisitorTree | None = None,
    operands: Mapping[str, Sequence[AnyArray]] = MappingProxyType({}),
    out_dtype: CutlassDtype,
    math: str = "default",
) -> AnyArray | list[AnyArray]:
    """D[g] = saturating_cast(scale_d * act(alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g] + bias[g])).

    Forms, and the shapes of arguments in each, are those of `atomr_cutlass.grouped_gemm`; scales that are one for each
    group may also be (G, 1, 1).

    Rows of the contiguous and masked forms that belong to no group are not read, and keep the values of `out`; without
    `out` they are zero. (Kernels leave them as they are: in a new result they are unspecified.) An empty group of those
    forms writes nothing; along K its result is that of an empty sum: act(beta * C + bias). Everything else, NaN and
    infinity included, is as in `gemm`, one group at a time.

    Args:
        a: any floating dtype of `gemm`.
        b: as `a`.
        c: of the result's shape; a list for lists. Not read when beta is 0.
        offsets: (G,) int32: cumulative ends of the groups.
        counts: (G,) int32: sizes of the groups.
        out: written in place and returned; of the result's shape and dtype, a list for lists. May be c.
        alpha: factor of every product.
        beta: factor of c.
        bias: (N,) for all groups, or (G, N); a list for lists.
        activation: a name in ACTIVATIONS.
        scale_a: a number for all groups, or an array; a list for lists, each as in `gemm`.
        scale_b: as `scale_a`.
        scale_d: a number.
        tree: computes D from alpha * scale_a[g] * scale_b[g] * A[g] B[g] + beta * C[g], as in `evaluate`; in the place
            of bias and activation, and without other outputs.
        operands: of the tree by name, one for each group.
        out_dtype: the element type of the result.
        math: as in `gemm`.

    Returns:
        `out`, or a new array (list of arrays).

    Raises:
        InvalidOperandError: operands of no form, a wrong shape or dtype, offsets that go back or beyond the rows;
            `out` is as it was then.
    """
    problem = _split(a, b, c, offsets, counts, bias, scale_a, scale_b)
    _check_out(out, problem, out_dtype)
    results = []
    how: dict[str, Any] = {
        "alpha": alpha, "beta": beta, "activation": activation, "math": math,
        "scale_d": scale_d if tree is None else None, "out_dtype": out_dtype if tree is None else CutlassDtype.F64,
    }  # fmt: skip
    for index, group in enumerate(problem.groups):
        try:
            d = gemm(group.a, group.b, group.c, **group.terms, **how)
            if tree is not None:
                read = {name: given[index] for name, given in operands.items()}
                d = evaluate(tree, d, read, out_dtype=out_dtype, scale_d=scale_d)[RESULT]
        except InvalidOperandError as error:
            raise InvalidOperandError(f"group {index}: {error}") from None
        results.append(d)
    if problem.shape is not None:
        whole = np.zeros(problem.shape, numpy_dtype(out_dtype)) if out is None else np.asarray(out)
        return _placed(problem, results, whole)
    if out is None:
        return results
    targets = list(out)
    for target, d in zip(targets, results, strict=True):
        target[...] = d
    return targets


def _placed(problem: _Problem, results: Sequence[AnyArray], whole: AnyArray) -> AnyArray:
    """The array that holds the results of all groups."""
    for group, d in zip(problem.groups, results, strict=True):
        whole[group.where] = d
    return whole


def group_bounds(
    groups: int, extent: int, *, offsets: AnyArray | None = None, counts: AnyArray | None = None
) -> list[tuple[int, int]]:
    """Where each group begins and ends.

    Args:
        groups: how many there are.
        extent: the dimension that they divide; they need not fill it.
        offsets: (G,) int32: cumulative ends.
        counts: (G,) int32: sizes, one after the other.

    Raises:
        InvalidOperandError: not exactly one of the two, a wrong shape or dtype, a negative size, or an end beyond
            `extent`.
    """
    if (offsets is None) == (counts is None):
        raise InvalidOperandError("offsets and counts say the same: give exactly one of them")
    name, given = ("offsets", offsets) if offsets is not None else ("counts", counts)
    numbers = _int32_vector(name, given, groups)
    ends: AnyArray = numbers if offsets is not None else np.cumsum(numbers)
    bounds = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)) if groups else []
    for index, (start, end) in enumerate(bounds):
        if end < start:
            problem = f"goes back from {start}" if offsets is not None else "is negative"
            raise InvalidOperandError(f"{name}[{index}] is {numbers[index]}, which {problem}")
        if end > extent:
            raise InvalidOperandError(f"{name}[{index}] is {numbers[index]}: group {index} ends at {end} of {extent}")
    return bounds


def _sizes(counts: Any, groups: int, rows: int) -> AnyArray:
    """The rows of each masked group that count."""
    numbers = _int32_vector("counts", counts, groups)
    for index, number in enumerate(numbers):
        if not 0 <= number <= rows:
            raise InvalidOperandError(f"counts[{index}] is {number}; a group has 0 to {rows} rows")
    return numbers


def _int32_vector(name: str, given: Any, groups: int) -> AnyArray:
    if not isinstance(given, np.ndarray) or given.dtype != np.int32 or given.shape != (groups,):
        described = f"{given.dtype} of shape {given.shape}" if isinstance(given, np.ndarray) else repr(given)
        raise InvalidOperandError(f"{name} is {described}; expected int32 of shape {(groups,)}, one for each group")
    return given.astype(np.int64)


class _Group(NamedTuple):
    """One product, and where in the result it goes."""

    where: Where
    a: AnyArray
    b: AnyArray
    c: AnyArray | None
    bias: AnyArray | None
    scale_a: Scale | None
    scale_b: Scale | None

    @property
    def terms(self) -> dict[str, Any]:
        """The other arguments of a group's product, by the names of `gemm`."""
        return {"bias": self.bias, "scale_a": self.scale_a, "scale_b": self.scale_b}


class _Problem(NamedTuple):
    """The groups, and the shape of the one array that holds their results (None: each has its own)."""

    groups: list[_Group]
    shape: tuple[int, ...] | None


def _split(a: Any, b: Any, c: Any, offsets: Any, counts: Any, bias: Any, scale_a: Any, scale_b: Any) -> _Problem:
    """The groups of whichever form the operands have."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        if offsets is not None or counts is not None:
            raise InvalidOperandError("offsets and counts divide arrays; lists of matrices are divided already")
        return _split_lists(a, b, c, bias, scale_a, scale_b)
    if (a.ndim, b.ndim) not in ((2, 3), (3, 3), (2, 2)):
        raise InvalidOperandError(
            f"a has shape {a.shape} and b {b.shape}; expected (rows, K) and (G, K, N), (G, rows, K) and (G, K, N), "
            f"(M, total K) and (total K, N), or two lists"
        )
    if a.shape[-1] != b.shape[-2]:
        raise InvalidOperandError(f"a has K = {a.shape[-1]} (shape {a.shape}), b has K = {b.shape[-2]} ({b.shape})")
    if b.ndim == 2:
        return _split_along_k(a, b, c, offsets, counts, bias, scale_a, scale_b)
    groups = b.shape[0]
    shape = (*a.shape[:-1], b.shape[2])
    _check_c(c, shape)
    wheres: list[Where]
    if a.ndim == 2:
        wheres = [slice(*bound) for bound in group_bounds(groups, a.shape[0], offsets=offsets, counts=counts)]
    else:
        wheres = list(enumerate(_masks(a, groups, offsets, counts)))
    biases = _shared_or_each("bias", bias, groups, (b.shape[2],))
    scales_b = _each("scale_b", scale_b, groups)
    numbers_a = _numbers(scale_a, groups)
    scale_rows = numbers_a is None and _follows_rows(scale_a, a)
    parts = [
        _Group(
            where,
            a[where],
            b[g],
            None if c is None else c[where],
            biases[g],
            scale_a[where] if scale_rows else scale_a if numbers_a is None else numbers_a[g],
            scales_b[g],
        )
        for g, where in enumerate(wheres)
    ]
    return _Problem(parts, shape)


def _split_along_k(
    a: AnyArray, b: AnyArray, c: Any, offsets: Any, counts: Any, bias: Any, scale_a: Any, scale_b: Any
) -> _Problem:
    given = counts if offsets is None else offsets
    groups = len(given) if isinstance(given, np.ndarray) and given.ndim == 1 else 0
    bounds = group_bounds(groups, a.shape[1], offsets=offsets, counts=counts)
    shape = (groups, a.shape[0], b.shape[1])
    _check_c(c, shape)
    biases = _shared_or_each("bias", bias, groups, (b.shape[1],))
    scales_a = _shared_or_each("scale_a", scale_a, groups, (a.shape[0], 1))
    scales_b = _shared_or_each("scale_b", scale_b, groups, (1, b.shape[1]))
    parts = [
        _Group(g, a[:, start:end], b[start:end], None if c is None else c[g], biases[g], scales_a[g], scales_b[g])
        for g, (start, end) in enumerate(bounds)
    ]
    return _Problem(parts, shape)


def _split_lists(a: Any, b: Any, c: Any, bias: Any, scale_a: Any, scale_b: Any) -> _Problem:
    for name, matrices in (("a", a), ("b", b)):
        if isinstance(matrices, np.ndarray) or not isinstance(matrices, Sequence):
            raise InvalidOperandError(f"{name} is no list of matrices, but the other operand is one")
        for index, matrix in enumerate(matrices):
            if not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
                raise InvalidOperandError(f"{name}[{index}] {_what(matrix)}; expected a matrix")
    if len(a) != len(b):
        raise InvalidOperandError(f"a has {len(a)} matrices, b has {len(b)}")
    rest = (("c", c), ("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b))
    members = zip(range(len(a)), a, b, *(_listed(name, given, len(a)) for name, given in rest), strict=True)
    return _Problem([_Group(*each) for each in members], None)


def _masks(a: AnyArray, groups: int, offsets: Any, counts: Any) -> list[slice]:
    """The rows of each a[g] that count."""
    if offsets is not None:
        raise InvalidOperandError("offsets are for the contiguous form; a 3-D a takes counts")
    if a.shape[0] != groups:
        raise InvalidOperandError(f"a has {a.shape[0]} groups (shape {a.shape}), b has {groups}")
    return [slice(0, int(number)) for number in _sizes(counts, groups, a.shape[1])]


def _check_c(c: Any, shape: tuple[int, ...]) -> None:
    if c is not None and (not isinstance(c, np.ndarray) or c.shape != shape):
        raise InvalidOperandError(f"c {_what(c)}; expected {shape}")


def _check_out(out: Any, problem: _Problem, out_dtype: CutlassDtype) -> None:
    if out is None:
        return
    wanted = numpy_dtype(out_dtype)
    if problem.shape is not None:
        named = [("out", out, problem.shape)]
    else:
        targets = _listed("out", out, len(problem.groups))
        named = [
            (f"out[{g}]", target, (group.a.shape[0], group.b.shape[1]))
            for g, (target, group) in enumerate(zip(targets, problem.groups, strict=True))
        ]
    for name, target, shape in named:
        if not isinstance(target, np.ndarray) or target.shape != shape or target.dtype != wanted:
            kind = (
                f"{target.dtype} of shape {target.shape}" if isinstance(target, np.ndarray) else type(target).__name__
            )
            raise InvalidOperandError(f"{name} is {kind}; expected {wanted} of shape {shape}")


def _what(given: Any) -> str:
    return f"has shape {given.shape}" if isinstance(given, np.ndarray) else f"is a {type(given).__name__}"


def _one_for_all(scale: Any) -> bool:
    """Whether a scale is absent, a number, or an array of one floating-point element."""
    if not isinstance(scale, np.ndarray):
        return not isinstance(scale, Sequence) or isinstance(scale, str)
    return scale.size == 1 and scale_type_of(scale.dtype) in (None, ScaleType.F32)


def _follows_rows(scale: Any, a: AnyArray) -> bool:
    """Whether scale_a has rows like a; otherwise it is one for all."""
    if _one_for_all(scale):
        return False
    if not isinstance(scale, np.ndarray) or scale.ndim != a.ndim or scale.shape[:-1] != a.shape[:-1]:
        rows = ", ".join(map(str, a.shape[:-1]))
        raise InvalidOperandError(f"scale_a {_what(scale)}; expected a number or ({rows}, 1 or blocks of K)")
    return True


def _numbers(scale: Any, groups: int) -> list[AnyArray] | None:
    """The scale of each group, of (G,) or (G, 1, 1); None for others."""
    if not isinstance(scale, np.ndarray) or scale.shape not in ((groups,), (groups, 1, 1)):
        return None
    return list(scale.reshape(groups, 1, 1))


def _each(name: str, scale: Any, groups: int) -> list[Any]:
    """One scale for all groups, or the parts of an array (G,) or (G, ..., ...)."""
    if _one_for_all(scale):
        return [scale] * groups
    if (numbers := _numbers(scale, groups)) is not None:
        return list(numbers)
    if not isinstance(scale, np.ndarray) or scale.ndim != 3 or scale.shape[0] != groups:
        raise InvalidOperandError(f"{name} {_what(scale)}; expected a number or ({groups}, ..., ...)")
    return list(scale)


def _shared_or_each(name: str, given: Any, groups: int, shape: tuple[int, ...]) -> list[Any]:
    """One array of `shape` for all groups, or the parts of (G, *shape); scales may also be numbers."""
    if given is None or (len(shape) == 2 and _one_for_all(given)):
        return [given] * groups
    if len(shape) == 2 and (numbers := _numbers(given, groups)) is not None:
        return list(numbers)
    if isinstance(given, np.ndarray):
        if given.shape == shape:
            return [given] * groups
        if given.shape == (groups, *shape):
            return list(given)
    raise InvalidOperandError(f"{name} {_what(given)}; expected {shape} or {(groups, *shape)}")


def _listed(name: str, given: Any, groups: int) -> list[Any]:
    """The members of a list, one for each group; None and a number stand for all of them."""
    if given is None or (name.startswith("scale") and _one_for_all(given)):
        return [given] * groups
    if isinstance(given, np.ndarray) or not isinstance(given, Sequence) or len(given) != groups:
        described = f"{len(given)} members" if isinstance(given, Sequence) else "no list"
        raise InvalidOperandError(f"{name} has {described}; expected a list of {groups}, one for each group")
    return list(given)
