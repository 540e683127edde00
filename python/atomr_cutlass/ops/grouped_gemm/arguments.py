"""Arguments of `grouped_gemm`: the form of the operands, their extents, element types and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays import operands
from ...arrays.operands import result_dtype
from ...epilogue.results import GroupedResult, Views
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from .problem import ALONG_K, CONTIGUOUS, LIST, MASKED, scale_forms


def is_list(array: Any) -> bool:
    """Whether an operand is a list of arrays."""
    return isinstance(array, (list, tuple))


def check_kinds(arrays: Mapping[str, Any]) -> None:
    """Refuses lists beside arrays, and arrays beside lists."""
    for name in "ab":
        if arrays[name] is None:
            raise InvalidOperandError(f"{name} is None; expected an array, or a list of them")
    listed = is_list(arrays["a"])
    if listed != is_list(arrays["b"]):
        one, other = ("a", "b") if listed else ("b", "a")
        raise InvalidOperandError(
            f"{one} is a list and {other} is a {type(arrays[other]).__name__}: give two of a kind"
        )
    for name, array in arrays.items():
        if array is None:
            continue
        divides = name in ("offsets", "counts")
        if divides and listed and not is_list(array):
            raise InvalidOperandError(f"{name} divides arrays; lists of matrices are divided already")
        if divides and is_list(array):
            raise InvalidOperandError(f"{name} is a {type(array).__name__}; expected an array")
        if listed and not is_list(array) and name not in ("scale_a", "scale_b"):
            raise InvalidOperandError(f"{name} is a {type(array).__name__}; expected a list, one for each group")
        # The integers that NumPy makes unasked are none that kernels know.
        if divides and isinstance(array, np.ndarray) and array.dtype != np.int32:
            raise InvalidOperandError(f"{name} has elements of {array.dtype}; expected int32")


def groups_of(
    arrays: Mapping[str, Any], lists: set[str]
) -> tuple[dict[str, Views], str, GroupedResult, list[tuple[int, int, int]]]:
    """(views of the product's arrays and of D's, the form, the results of the groups, (M, N, K), of a list of each).

    Args:
        arrays: of the product, and for D.
        lists: the names of the operands that are lists, those of the epilogue among them.
    """
    listed = "a" in lists
    number = len(arrays["a"]) if listed else 0
    over = GroupedResult(number, (), (), {*lists, RESULT} if listed else lists)
    views = {name: over.view(array, name) for name, array in arrays.items()}
    if not listed:
        form, groups, extents, shape = _array_form(views)
        return views, form, replace(over, number=groups, extents=[extents[:2]], members=[shape]), [extents]
    every = []
    for index, (a, b) in enumerate(zip(views["a"], views["b"], strict=True)):
        for name, view in (("a", a), ("b", b)):
            if len(view.shape) != 2:
                raise InvalidOperandError(f"{name}[{index}] has shape {view.shape}; expected a matrix")
        if a.shape[1] != b.shape[0]:
            raise InvalidOperandError(f"a[{index}] has K = {a.shape[1]} (shape {a.shape}), b[{index}] has {b.shape[0]}")
        every.append((a.shape[0], b.shape[1], a.shape[1]))
    matrices = [(m, n) for m, n, _ in every]
    return views, LIST, replace(over, extents=matrices, members=matrices), every


def _array_form(views: dict[str, Views]) -> tuple[str, int, tuple[int, int, int], tuple[int, ...]]:
    """(the form, how many groups, (M, N, K), extents of D) of arrays."""
    a, b = views["a"][0].shape, views["b"][0].shape
    form = {(2, 3): CONTIGUOUS, (3, 3): MASKED, (2, 2): ALONG_K}.get((len(a), len(b)))
    if form is None:
        raise InvalidOperandError(
            f"a has shape {a} and b {b}; expected (rows, K) and (G, K, N), (G, rows, K) and (G, K, N), "
            "(M, total K) and (total K, N), or two lists"
        )
    if a[-1] != b[-2]:
        raise InvalidOperandError(f"a has K = {a[-1]} (shape {a}), b has K = {b[-2]} ({b})")
    extents = (a[-2], b[-1], a[-1])
    if form == ALONG_K:
        divider = views.get("offsets") or views.get("counts")
        groups = divider[0].shape[0] if divider and len(divider[0].shape) == 1 else 0
        return form, groups, extents, (groups, a[0], b[1])
    if form == MASKED and a[0] != b[0]:
        raise InvalidOperandError(f"a has {a[0]} groups (shape {a}), b has {b[0]}")
    return form, b[0], extents, (*a[:-1], b[2])


def divided_by(views: dict[str, Views], groups: int, form: str) -> str:
    """Which of offsets and counts is given.

    Raises:
        InvalidOperandError: not exactly one, the wrong one, or of a wrong shape or dtype.
    """
    given = [name for name in ("offsets", "counts") if name in views]
    if form == MASKED and given != ["counts"]:
        raise InvalidOperandError("a 3-D a takes counts, the rows of each group that are there, and no offsets")
    if len(given) != 1:
        raise InvalidOperandError("offsets and counts say the same: give exactly one of them")
    name = given[0]
    view = views[name][0]
    if view.dtype != CutlassDtype.I32.dlpack:
        code, bits = view.dtype
        found = {0: f"int{bits}", 1: f"uint{bits}", 2: f"float{bits}"}.get(code, f"DLPack type {code}")
        raise InvalidOperandError(f"{name} has elements of {found}; expected int32")
    if len(view.shape) != 1 or view.shape[0] != groups:
        expected = "(G,)" if form == ALONG_K else f"({groups},)"
        raise InvalidOperandError(f"{name} has shape {view.shape}; expected {expected}, one for each group")
    return name


def result_dtype_of(views: Mapping[str, Views], out_dtype: CutlassDtype | None, dtype: CutlassDtype) -> CutlassDtype:
    """The element type of the results; see `arguments.result_dtype`."""
    members = max(len(views.get("out", ())), len(views.get("c", ())), 1)
    found = [
        result_dtype({name: views[name][index] for name in ("out", "c") if name in views}, out_dtype, dtype)
        for index in range(members)
    ]
    if any(member is not found[0] for member in found):
        raise InvalidOperandError("the members of out have different element types: give them one")
    return found[0]


def forms_of(
    result: GroupedResult, form: str, extents: list[tuple[int, int, int]], views: Mapping[str, Views]
) -> dict[str, str]:
    """The forms of the scales that are arrays, by name; see `scale_forms`."""
    scales = {name: result.labelled({name: views[name]}) for name in ("scale_a", "scale_b") if name in views}
    for label, view in (pair for arrays in scales.values() for pair in arrays.items()):
        dtype = operands.dtype_of(view, label)
        if dtype is not CutlassDtype.F32:
            raise InvalidOperandError(f"{label} is {dtype.value}; expected float32")
    shapes = {name: [view.shape for view in arrays.values()] for name, arrays in scales.items()}
    found = scale_forms(form, result.number, extents, shapes.get("scale_a"), shapes.get("scale_b"))
    return {name: scaling for name, scaling in zip(("scale_a", "scale_b"), found, strict=True) if name in scales}
