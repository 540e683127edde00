"""From arrays to the problem that a kernel sees, against element addresses counted one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmEpilogue, GemmLayout, GemmRequest, GemmShape
from atomr_cutlass.arrays import layouts
from atomr_cutlass.arrays.layouts import MatrixSpec, View, views
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.ops.gemm.problem import MAX_OUTER, GemmProblem, collapse_batches, formulations

quick = settings(max_examples=250, deadline=None)

# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------


def test_a_request_becomes_dense_operands() -> None:
    request = GemmRequest(
        GemmShape(3, 5, 7, batch=2),
        dtype=D.F16,
        layout_a=GemmLayout.COL_MAJOR,
        layout_c=GemmLayout.COL_MAJOR,
        out_dtype=D.F32,
        epilogue=GemmEpilogue(beta=2.0),
    )
    problem = request.problem(4)
    assert problem.a == MatrixSpec((2, 3, 7), (21, 1, 3), D.F16)
    assert problem.b == MatrixSpec((2, 7, 5), (35, 5, 1), D.F16)
    assert problem.c == problem.d == MatrixSpec((2, 3, 5), (15, 1, 3), D.F32)
    assert (problem.m, problem.n, problem.k, problem.batch) == (3, 5, 7, 2)
    assert (problem.device, problem.math, problem.acc) == (4, "default", D.F32)


def test_one_batch_is_a_matrix_and_no_beta_is_no_c() -> None:
    problem = GemmRequest(GemmShape(3, 5, 7), dtype=D.I8).problem(0)
    assert problem.a.shape == (3, 7)
    assert problem.c is None
    assert (problem.d.dtype, problem.acc) == (D.I32, D.I32)


# ----------------------------------------------------------------------------------------------------------------------
# Broadcasting
# ----------------------------------------------------------------------------------------------------------------------

_batches = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(tuple)


@given(_batches, _batches)
@quick
def test_batches_broadcast_as_in_numpy(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        want = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(InvalidOperandError, match="do not broadcast"):
            layouts.broadcast_batches(a, b)
    else:
        assert layouts.broadcast_batches(a, b) == want


@given(_batches, _batches)
@quick
def test_strides_broadcast_as_in_numpy(own: tuple[int, ...], target: tuple[int, ...]) -> None:
    array = np.empty((*own, 2, 3), np.int8)
    spec = MatrixSpec(array.shape, array.strides, D.I8)
    try:
        want = np.broadcast_to(array, (*target, 2, 3))
    except ValueError:
        with pytest.raises(InvalidOperandError, match="of c do not broadcast"):
            layouts.broadcast_to(spec, target, "c")
        return
    got = layouts.broadcast_to(spec, target, "c")
    assert got.shape == want.shape
    used = [(g, w) for g, w, extent in zip(got.strides, want.strides, want.shape, strict=True) if extent > 1]
    assert [g for g, _ in used] == [w for _, w in used]


# ----------------------------------------------------------------------------------------------------------------------
# Views
# ----------------------------------------------------------------------------------------------------------------------


def _views(shape: tuple[int, ...], strides: tuple[int, ...], dtype: D = D.F16) -> list[View]:
    return views(MatrixSpec(shape, strides, dtype), "a")


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 6), (6, 1), [View("r", 6)]),
        ((4, 6), (9, 1), [View("r", 9)]),
        ((4, 6), (1, 4), [View("c", 4)]),
        ((4, 6), (1, 8), [View("c", 8)]),
        ((5, 4, 6), (0, 6, 1), [View("r", 6)]),
        # An extent of 1 leaves its stride open, and with it the layout; what is open is chosen aligned.
        ((1, 6), (0, 1), [View("r", 8), View("c", 1)]),
        ((1, 6), (0, 3), [View("c", 3)]),
        ((6, 1), (1, 0), [View("r", 1), View("c", 8)]),
        ((6, 1), (5, 0), [View("r", 5)]),
        ((1, 1), (0, 0), [View("r", 8), View("c", 8)]),
        ((1, 1), (-7, 9), [View("r", 8), View("c", 8)]),
        ((4, 0), (0, 1), [View("r", 0)]),
    ],
)
def test_a_matrix_is_read_by_rows_or_by_columns(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: list[View]
) -> None:
    assert _views(shape, strides) == expected


@pytest.mark.parametrize("strides", [(-6, 1), (6, -1), (1, -4)])
def test_negative_strides_are_refused(strides: tuple[int, int]) -> None:
    with pytest.raises(InvalidOperandError, match="a has a negative stride"):
        _views((4, 6), strides)


def test_negative_batch_strides_are_refused() -> None:
    with pytest.raises(InvalidOperandError, match="negative stride"):
        _views((2, 4, 6), (-24, 6, 1))


@pytest.mark.parametrize("strides", [(12, 2), (0, 1), (1, 0), (3, 1), (1, 2), (0, 0)])
def test_matrices_without_contiguous_rows_or_columns_are_refused(strides: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match="rows or its columns must be contiguous"):
        _views((4, 6), strides)


# ----------------------------------------------------------------------------------------------------------------------
# Variants: what a kernel would read, element by element
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def _matrix(draw: st.DrawFn, batches: tuple[int, ...], rows: int, columns: int, dtype: D, *, out: bool) -> MatrixSpec:
    """A matrix that some kernel can read, with padding, broadcast batches and any order of batch dimensions."""
    pad = draw(st.sampled_from([0, 0, 1, 3, 8]))
    if draw(st.booleans()):
        inner, reach = (columns + pad, 1), rows * (columns + pad)
    else:
        inner, reach = (1, rows + pad), columns * (rows + pad)
    own = batches if out else batches[draw(st.integers(0, len(batches))) :]
    shape = [n if out or draw(st.booleans()) else 1 for n in own]
    strides = [0] * len(shape)
    step = reach + draw(st.sampled_from([0, 0, 5, 16]))
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else range(len(shape) - 1, -1, -1)
    for i in order:
        strides[i] = step
        step = step * shape[i] + draw(st.sampled_from([0, 0, 4]))
    if not out and draw(st.booleans()):
        strides = [0] * len(shape)
    strides = [0 if extent == 1 else s for extent, s in zip(shape, strides, strict=True)]
    inner = (0 if rows == 1 else inner[0], 0 if columns == 1 else inner[1])
    alignment = draw(st.sampled_from([a for a in (1, 2, 4, 8, 16) if a * 8 >= dtype.bits]))
    return MatrixSpec((*shape, rows, columns), (*strides, *inner), dtype, alignment)


@st.composite
def _problems(draw: st.DrawFn) -> GemmProblem:
    m, n, k = (draw(st.sampled_from([1, 2, 3, 8])) for _ in range(3))
    batches = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3)))
    dtype, result = draw(st.sampled_from([(D.F16, D.F16), (D.BF16, D.F32), (D.F64, D.F64), (D.I8, D.I32)]))
    with_c = draw(st.booleans())
    return GemmProblem(
        a=draw(_matrix(batches, m, k, dtype, out=False)),
        b=draw(_matrix(batches, k, n, dtype, out=False)),
        c=draw(_matrix(batches, m, n, result, out=False)) if with_c else None,
        d=draw(_matrix(batches, m, n, result, out=True)),
        math="default",
        device=0,
    )


def _batch_starts(spec: MatrixSpec, batches: tuple[int, ...]) -> list[int]:
    """Element offset of each batch's matrix, as NumPy's broadcasting gives them."""
    padded = (1,) * (len(batches) - len(spec.shape) + 2) + spec.shape[:-2]
    strides = (0,) * (len(batches) - len(spec.shape) + 2) + spec.strides[:-2]
    return [
        sum(0 if extent == 1 else i * s for i, extent, s in zip(index, padded, strides, strict=True))
        for index in itertools.product(*map(range, batches))
    ]


@given(_problems())
@quick
def test_collapsed_batches_visit_every_batch_once(problem: GemmProblem) -> None:
    specs = (problem.a, problem.b, problem.c or problem.d, problem.d)
    want = Counter(zip(*(_batch_starts(spec, problem.d.shape[:-2]) for spec in specs), strict=True))
    got = collapse_batches(problem)
    visited = [
        tuple(o + i * s for o, s in zip(offset, got.strides, strict=True))
        for offset in got.offsets
        for i in range(got.count)
    ]
    assert Counter(visited) == want


def test_dense_batches_collapse_into_one_launch() -> None:
    problem = GemmRequest(GemmShape(4, 4, 4), dtype=D.F16).problem(0)
    dense = MatrixSpec((2, 3, 5, 4, 4), (240, 80, 16, 4, 1), D.F16)
    flat = MatrixSpec((4, 4), (4, 1), D.F16)
    got = collapse_batches(GemmProblem(dense, dense, None, dense, problem.math, 0))
    assert (got.count, got.strides, got.offsets) == (30, (16, 16, 16, 16), ((0, 0, 0, 0),))
    shared = collapse_batches(GemmProblem(dense, flat, None, dense, problem.math, 0))
    assert (shared.count, shared.strides) == (30, (16, 0, 16, 16))


def test_batches_that_no_single_stride_reaches_become_launches() -> None:
    dense = MatrixSpec((2, 3, 4, 4), (48, 16, 4, 1), D.F16)
    rows = MatrixSpec((2, 1, 4, 4), (16, 0, 4, 1), D.F16)
    got = collapse_batches(GemmProblem(dense, rows, None, dense, "default", 0))
    assert (got.count, got.strides) == (3, (16, 0, 16, 16))
    assert got.offsets == ((0, 0, 0, 0), (48, 16, 48, 48))


def test_too_many_launches_are_refused() -> None:
    n = MAX_OUTER + 1
    a = MatrixSpec((n, 2, 4, 4), (64, 16, 4, 1), D.F16)
    d = MatrixSpec((n, 2, 4, 4), (32, 16, 4, 1), D.F16)
    with pytest.raises(UnsupportedError, match=rf"{n} launches would be needed, at most 4096"):
        collapse_batches(GemmProblem(a, d, None, d, "default", 0))
    fewer = GemmProblem(
        MatrixSpec((n - 1, 2, 4, 4), a.strides, D.F16),
        MatrixSpec((n - 1, 2, 4, 4), d.strides, D.F16),
        None,
        MatrixSpec((n - 1, 2, 4, 4), d.strides, D.F16),
        "default",
        0,
    )
    assert len(collapse_batches(fewer).offsets) == n - 1


def _addresses(spec: MatrixSpec) -> np.ndarray[Any, Any]:
    """Offset of each element of one matrix."""
    rows, columns = np.indices(spec.shape[-2:])
    return np.asarray(rows * spec.strides[-2] + columns * spec.strides[-1])


def _read(layout: str, leading: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Offsets that a kernel computes for a matrix of this layout."""
    i, j = np.indices((rows, columns))
    return np.asarray(i * leading + j if layout == "r" else i + j * leading)


@given(_problems())
@quick
def test_every_variant_reads_and_writes_the_callers_elements(problem: GemmProblem) -> None:
    batches = collapse_batches(problem)
    found = formulations(problem)
    # D and C in different layouts are the one case without a variant.
    if problem.c is None:
        assert found
    for v in found:
        read_a = _read(v.layout_a, v.lda, v.m, v.k)
        read_b = _read(v.layout_b, v.ldb, v.k, v.n)
        read_c, write_d = (_read(v.layout_d, leading, v.m, v.n) for leading in (v.ldc, v.ldd))
        a, b, d = _addresses(problem.a), _addresses(problem.b), _addresses(problem.d)
        strides = batches.strides
        if v.swapped:
            a, b, d = b.T, a.T, d.T
            strides = (strides[1], strides[0], *strides[2:])
        np.testing.assert_array_equal(read_a, a)
        np.testing.assert_array_equal(read_b, b)
        np.testing.assert_array_equal(write_d, d)
        if problem.c is not None:
            c = _addresses(problem.c)
            np.testing.assert_array_equal(read_c, c.T if v.swapped else c)
        assert v.batch_strides == strides
        assert v.batch == batches.count


def _alignment(spec: MatrixSpec, layout: str, batches: tuple[int, ...]) -> int:
    """The largest power of two, up to 16 bytes, that divides the start and the length of every line."""
    size = spec.dtype.bits // 8
    rows, columns = spec.shape[-2:]
    lines, step, length = (rows, spec.strides[-2], columns) if layout == "r" else (columns, spec.strides[-1], rows)
    starts = [spec.alignment + size * (b + i * step) for b in _batch_starts(spec, batches) for i in range(lines)]
    return max(1, math.gcd(16, length * size, *starts) // size)


@given(_problems())
@quick
def test_alignments_are_exactly_what_every_line_has(problem: GemmProblem) -> None:
    batches = problem.d.shape[:-2]
    flipped = {"r": "c", "c": "r"}
    read_and_written = (problem.a, problem.b, problem.d)
    for v in formulations(problem):
        layouts = (v.layout_a, v.layout_b, v.layout_d)
        if v.swapped:
            layouts = (flipped[v.layout_b], flipped[v.layout_a], flipped[v.layout_d])
        want_a, want_b, want_d = (
            _alignment(spec, layout, batches) for spec, layout in zip(read_and_written, layouts, strict=True)
        )
        if problem.c is not None:
            want_d = min(want_d, _alignment(problem.c, layouts[2], batches))
        got_a, got_b = (v.align_b, v.align_a) if v.swapped else (v.align_a, v.align_b)
        assert (got_a, got_b, v.align_d) == (want_a, want_b, want_d)


def test_a_single_row_or_column_is_served_in_either_layout() -> None:
    row = MatrixSpec((1, 64), (0, 1), D.F16)
    b = MatrixSpec((64, 64), (64, 1), D.F16)
    found = formulations(GemmProblem(row, b, None, row, "default", 0))
    assert {(v.swapped, v.layout_a, v.layout_b, v.layout_d) for v in found} == {
        (swapped, *layouts, layout_d)
        for swapped, of_kind in ((False, ("rr", "cr")), (True, ("cc", "cr")))
        for layouts in of_kind
        for layout_d in "rc"
    }
    # Rows of a single-row A hold 64 elements in one line; read by columns each element is a line of its own.
    aligned = next(v for v in found if (v.swapped, v.layout_a) == (False, "r"))
    assert aligned.align_a == 8


def test_c_in_another_layout_than_out_has_no_variant() -> None:
    row, column = (MatrixSpec((8, 8), strides, D.F16) for strides in ((8, 1), (1, 8)))
    assert formulations(GemmProblem(row, row, column, row, "default", 0)) == []
