"""The oracle of grouped GEMM against one `gemm_reference.gemm` for each group, and the package's against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import atomr_cutlass as ac
import grouped_oracle
from atomr_cutlass.arrays import numerics
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.quantize import reference as quantization
from grouped_magnitudes import absolute_grouped_product

quick = settings(max_examples=60, deadline=None)

Array = np.ndarray[Any, Any]


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: D) -> Array:
    return numerics.saturating_cast(rng.normal(size=shape), dtype)


def _same(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(numerics.to_float64(got), numerics.to_float64(want))


def _ends(sizes: list[int]) -> Array:
    return np.cumsum(sizes).astype(np.int32)


SIZES = st.lists(st.integers(0, 5) | st.just(0), max_size=6)
DTYPES = st.sampled_from([D.F16, D.BF16, D.F8E4M3])


@quick
@given(
    sizes=SIZES, rest=st.integers(0, 3), by_counts=st.booleans(), with_out=st.booleans(), dtype=DTYPES, data=st.data()
)
def test_contiguous_groups(
    sizes: list[int], rest: int, by_counts: bool, with_out: bool, dtype: D, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    groups, total, k, n = len(sizes), sum(sizes) + rest, data.draw(st.integers(0, 4)), 3
    a, b = _random(rng, (total, k), dtype), _random(rng, (groups, k, n), dtype)
    a[sum(sizes) :] = np.nan  # never read
    c, out = _random(rng, (total, n), D.F32), _random(rng, (total, n), D.BF16)
    bias = _random(rng, data.draw(st.sampled_from([(n,), (groups, n)])), D.F32)
    rows, columns = rng.normal(size=(total, 1)).astype(np.float32), rng.normal(size=(groups, 1, n)).astype(np.float32)
    scales: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"scale_a": 0.5, "scale_b": 4.0}, {"scale_a": rows, "scale_b": columns}])
    )
    terms: dict[str, Any] = {"alpha": 2.0, "beta": data.draw(st.sampled_from([0.0, -1.0])), "activation": "relu"}
    where: dict[str, Any] = {"counts": np.array(sizes, np.int32)} if by_counts else {"offsets": _ends(sizes)}
    kept = out.copy()
    got = grouped_oracle.grouped_gemm(
        a, b, c, out=out if with_out else None, bias=bias, scale_d=3.0, out_dtype=D.BF16, **where, **terms, **scales
    )
    want = kept if with_out else np.zeros_like(out)
    magnitude = np.zeros((total, n))
    del terms["activation"]
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start := start + size)
        options: dict[str, Any] = {"bias": bias if bias.ndim == 1 else bias[g], "scale_d": 3.0, **terms}
        if scales:
            options["scale_a"] = rows[part] if scales["scale_a"] is rows else 0.5
            options["scale_b"] = columns[g] if scales["scale_b"] is columns else 4.0
        want[part] = gemm_reference.gemm(a[part], b[g], c[part], activation="relu", out_dtype=D.BF16, **options)
        magnitude[part] = gemm_reference.absolute_product(a[part], b[g], c[part], **options)
    _same(got, want)
    assert (got is out) == with_out
    limits = absolute_grouped_product(a, b, c, bias=bias, scale_d=3.0, **where, **terms, **scales)
    np.testing.assert_array_equal(limits, magnitude)


@quick
@given(counts=st.lists(st.integers(0, 4), max_size=5), with_out=st.booleans(), seed=st.integers(0, 1000))
def test_masked_groups(counts: list[int], with_out: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, rows, k, n = len(counts), 4, 5, 2
    a, b = _random(rng, (groups, rows, k), D.F8E4M3), _random(rng, (groups, k, n), D.F8E5M2)
    c, out = _random(rng, (groups, rows, n), D.BF16), _random(rng, (groups, rows, n), D.BF16)
    scale = rng.normal(size=(groups, rows, 1)).astype(np.float32)
    each = rng.normal(size=(groups, 1, 1)).astype(np.float32)
    want = out.copy() if with_out else np.zeros_like(out)
    magnitude = np.zeros(out.shape)
    for g, count in enumerate(counts):
        a[g, count:] = np.nan
        operands = (a[g, :count], b[g], c[g, :count])
        terms: dict[str, Any] = {"beta": 0.5, "scale_a": scale[g, :count], "scale_b": each[g]}
        want[g, :count] = gemm_reference.gemm(*operands, out_dtype=D.BF16, **terms)
        magnitude[g, :count] = gemm_reference.absolute_product(*operands, **terms)
    call: dict[str, Any] = {"counts": np.array(counts, np.int32), "beta": 0.5, "scale_a": scale, "scale_b": each}
    got = grouped_oracle.grouped_gemm(a, b, c, out=out if with_out else None, out_dtype=D.BF16, **call)
    _same(got, want)
    np.testing.assert_array_equal(absolute_grouped_product(a, b, c, **call), magnitude)


@quick
@given(
    sizes=st.lists(st.integers(0, 5), max_size=5),
    by_counts=st.booleans(),
    each=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_groups_along_k(sizes: list[int], by_counts: bool, each: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, total, m, n = len(sizes), sum(sizes) + 1, 3, 2
    a, b = _random(rng, (m, total), D.BF16), _random(rng, (total, n), D.BF16)
    a[:, -1] = np.nan
    c = _random(rng, (groups, m, n), D.F32)
    rows = rng.normal(size=(groups, m, 1) if each else (m, 1)).astype(np.float32)
    columns = rng.normal(size=(groups, 1, n) if each else (1, n)).astype(np.float32)
    where: dict[str, Any] = {"counts": np.array(sizes, np.int32)} if by_counts else {"offsets": _ends(sizes)}
    call: dict[str, Any] = {**where, "beta": 2.0, "scale_a": rows, "scale_b": columns}
    got = grouped_oracle.grouped_gemm(a, b, c, out_dtype=D.F32, **call)
    limits = absolute_grouped_product(a, b, c, **call)
    assert got.shape == limits.shape == (groups, m, n)
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start := start + size)
        terms = {"beta": 2.0, "scale_a": rows[g] if each else rows, "scale_b": columns[g] if each else columns}
        _same(got[g], gemm_reference.gemm(a[:, part], b[part], c[g], out_dtype=D.F32, **terms))
        if size == 0:
            _same(got[g], numerics.saturating_cast(2.0 * c[g].astype(np.float64), D.F32))
        np.testing.assert_array_equal(limits[g], gemm_reference.absolute_product(a[:, part], b[part], c[g], **terms))


@quick
@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=5), full=st.booleans()
)
def test_lists_of_matrices(shapes: list[tuple[int, int, int]], full: bool) -> None:
    rng = np.random.default_rng(len(shapes))
    a = [_random(rng, (m, k), D.F16) for m, _, k in shapes]
    b = [_random(rng, (k, n), D.F16) for _, n, k in shapes]
    c = [_random(rng, (m, n), D.F32) for m, n, _ in shapes]
    bias = [_random(rng, (n,), D.F32) for _, n, _ in shapes]
    scale_a = [_random(rng, (m, 1), D.F32) for m, _, _ in shapes]
    out = [np.empty((m, n), np.float32) for m, n, _ in shapes]
    terms: dict[str, Any] = {"alpha": -1.0, "scale_b": 3.0}
    if full:
        terms |= {"beta": 0.5, "bias": bias, "scale_a": scale_a}
    got = grouped_oracle.grouped_gemm(
        a, tuple(b), c if full else None, out=out if full else None, out_dtype=D.F32, **terms
    )
    limits = absolute_grouped_product(a, b, c if full else None, **terms)
    assert len(got) == len(limits) == len(shapes)
    for g in range(len(shapes)):
        options = terms | ({"bias": bias[g], "scale_a": scale_a[g]} if full else {})
        operands = (a[g], b[g], c[g] if full else None)
        _same(got[g], gemm_reference.gemm(*operands, out_dtype=D.F32, **options))
        np.testing.assert_array_equal(limits[g], gemm_reference.absolute_product(*operands, **options))
        assert (got[g] is out[g]) == full


def test_out_may_be_c() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(4, 3)), rng.normal(size=(2, 3, 5)), rng.normal(size=(4, 5))
    offsets = np.array([1, 3], np.int32)
    want = grouped_oracle.grouped_gemm(a, b, c, offsets=offsets, out=c.copy(), beta=1.0, out_dtype=D.F64)
    np.testing.assert_array_equal(want[3], c[3])
    got = grouped_oracle.grouped_gemm(a, b, c, offsets=offsets, out=c, beta=1.0, out_dtype=D.F64)
    assert got is c
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", ["contiguous", "masked", "lists"])
def test_blockwise_fp8_groups(form: str) -> None:
    rng = np.random.default_rng(1)
    sizes, k, n = [3, 0, 2], 200, 130
    qa = [quantization.quantize_blockwise(rng.normal(size=(size, k)), D.F8E4M3) for size in sizes]
    qb = [quantization.quantize_blockwise(rng.normal(size=(k, n)), D.F8E4M3, block=(128, 128)) for _ in sizes]
    want = [
        gemm_reference.gemm(x.values, y.values, scale_a=x.scale, scale_b=y.scale, out_dtype=D.BF16)
        for x, y in zip(qa, qb, strict=True)
    ]
    if form == "lists":
        parts = ([q.values for q in qa], [q.values for q in qb])
        got = grouped_oracle.grouped_gemm(
            *parts, scale_a=[q.scale for q in qa], scale_b=[q.scale for q in qb], out_dtype=D.BF16
        )
    else:
        b, scale_b = np.stack([q.values for q in qb]), np.stack([q.scale for q in qb])
        counts = np.array(sizes, np.int32)
        if form == "contiguous":
            a, scale_a = np.concatenate([q.values for q in qa]), np.concatenate([q.scale for q in qa])
        else:
            a, scale_a = np.zeros((3, 4, k), qa[0].values.dtype), np.full((3, 4, 2), np.nan, np.float32)
            for g, q in enumerate(qa):
                a[g, : sizes[g]], scale_a[g, : sizes[g]] = q.values, q.scale
        whole = grouped_oracle.grouped_gemm(a, b, counts=counts, scale_a=scale_a, scale_b=scale_b, out_dtype=D.BF16)
        bounds = grouped_oracle.group_bounds(3, len(a), counts=counts) if form == "contiguous" else []
        got = [whole[slice(*bounds[g])] if bounds else whole[g, :size] for g, size in enumerate(sizes)]
    for d, e in zip(got, want, strict=True):
        _same(d, e)


def test_a_failed_call_leaves_out_alone() -> None:
    a, b = [np.ones((2, 3)), np.ones((2, 4))], [np.ones((3, 2)), np.ones((3, 2))]
    out = [np.full((2, 2), 7.0), np.full((2, 2), 7.0)]
    with pytest.raises(InvalidOperandError, match=r"group 1: a has K = 4"):
        grouped_oracle.grouped_gemm(a, b, out=out, out_dtype=D.F64)
    assert all((array == 7.0).all() for array in out)


@quick
@given(
    form=st.sampled_from(["contiguous", "masked", "along_k", "list"]),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    scales=st.sampled_from(["", "tensor", "group", "vector", "each"]),
    by_counts=st.booleans(),
    with_out=st.booleans(),
    data=st.data(),
)
def test_the_reference_backend_is_the_oracle(
    form: str, sizes: list[int], scales: str, by_counts: bool, with_out: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    groups, total, rows, k, n = len(sizes), sum(sizes) + 1, 4, 3, 2
    if form == "contiguous":
        a_shape, b_shape, d_shape = (total, k), (groups, k, n), (total, n)
        vectors: Any = (total, 1), (groups, 1, n)
    elif form == "masked":
        a_shape, b_shape, d_shape = (groups, rows, k), (groups, k, n), (groups, rows, n)
        vectors = (groups, rows, 1), (groups, 1, n)
    else:
        a_shape, b_shape, d_shape = (rows, total), (total, n), (groups, rows, n)
        vectors = ((groups, rows, 1), (groups, 1, n)) if scales == "each" else ((rows, 1), (1, n))
    kinds = {"tensor": ((1,), (1,)), "group": ((groups,), (groups,)), "vector": vectors, "each": vectors}
    terms: dict[str, Any] = {"alpha": 0.5, "beta": 2.0, "scale_d": 3.0}
    operands: list[Any]
    if form == "list":
        operands = [[_random(rng, shape, D.F8E4M3) for size in sizes] for shape in ((rows, k), (k, n))]
        operands = [[each[:size] for size, each in zip(sizes, operands[0], strict=True)], operands[1]]
        operands.append([_random(rng, (size, n), D.BF16) for size in sizes])
        if scales in ("vector", "each"):
            terms["scale_a"] = [_random(rng, (size, 1), D.F32) for size in sizes]
            terms["scale_b"] = [_random(rng, (1, n), D.F32) for _ in sizes]
        elif scales:
            terms["scale_a"] = _random(rng, (1,), D.F32)
            terms["scale_b"] = [_random(rng, (1,), D.F32) for _ in sizes]
    else:
        operands = [_random(rng, a_shape, D.F8E4M3), _random(rng, b_shape, D.F8E4M3), _random(rng, d_shape, D.BF16)]
        if scales:
            terms |= {
                f"scale_{name}": _random(rng, shape, D.F32) for name, shape in zip("ab", kinds[scales], strict=True)
            }
        if by_counts or form == "masked":
            terms["counts"] = np.array(sizes, np.int32)
        else:
            terms["offsets"] = _ends(sizes)
    want: Any = grouped_oracle.grouped_gemm(*operands, out_dtype=D.BF16, **terms)
    if with_out:
        out: Any = [array.copy() for array in operands[2]] if form == "list" else operands[2].copy()
        kept = [array.copy() for array in out] if form == "list" else out.copy()
        want = grouped_oracle.grouped_gemm(*operands, out=kept, out_dtype=D.BF16, **terms)
        got = ac.grouped_gemm(*operands, out=out, backend="reference", **terms)
        assert got is out
    else:
        got = ac.grouped_gemm(*operands, backend="reference", **terms)
    for d, e in zip(got, want, strict=True):
        _same(np.asarray(d), np.asarray(e))


def _int32(*values: int) -> Array:
    return np.array(values, np.int32)


A, B = np.ones((6, 4), np.float32), np.ones((3, 4, 2), np.float32)
MASKED = np.ones((3, 5, 4), np.float32)
ALONG_A, ALONG_B = np.ones((2, 6), np.float32), np.ones((6, 3), np.float32)
GOOD = {"offsets": _int32(1, 1, 6)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of them"),
        (GOOD | {"counts": _int32(1, 1, 1)}, "give exactly one of them"),
        ({"offsets": _int32(1, 6)}, r"offsets is int32 of shape \(2,\); expected int32 of shape \(3,\)"),
        ({"offsets": np.array([1, 2, 3])}, "offsets is int64 of shape"),
        ({"offsets": [1, 2, 3]}, r"offsets is \[1, 2, 3\]; expected int32"),
        ({"offsets": _int32(3, 2, 6)}, r"offsets\[1\] is 2, which goes back from 3"),
        ({"offsets": _int32(-1, 2, 6)}, r"offsets\[0\] is -1, which goes back from 0"),
        ({"offsets": _int32(1, 2, 7)}, r"offsets\[2\] is 7: group 2 ends at 7 of 6"),
        ({"counts": _int32(2, -1, 3)}, r"counts\[1\] is -1, which is negative"),
        ({"counts": _int32(2**31 - 1, 2**31 - 1, 3)}, r"counts\[0\] is 2147483647: group 0 ends at"),
        ({"counts": _int32(4, 1, 2)}, r"counts\[2\] is 2: group 2 ends at 7 of 6"),
        (GOOD | {"a": A[:, :3]}, r"a has K = 3 .* b has K = 4"),
        (GOOD | {"a": A[0]}, r"a has shape \(4,\) and b \(3, 4, 2\); expected"),
        (GOOD | {"b": [B[0], B[1], B[2]]}, "lists of matrices are divided already"),
        (GOOD | {"beta": 1.0}, "c is not given"),
        (GOOD | {"c": np.ones((6, 3), np.float32)}, r"c has shape \(6, 3\); expected \(6, 2\)"),
        (GOOD | {"bias": np.ones((6, 2))}, r"bias has shape \(6, 2\); expected \(2,\) or \(3, 2\)"),
        (GOOD | {"scale_a": np.ones((5, 1), np.float32)}, r"scale_a has shape \(5, 1\); expected a number or \(6, 1"),
        (GOOD | {"scale_a": np.ones((6, 2), np.float32)}, r"group 0: scale_a has shape \(1, 2\)"),
        (GOOD | {"scale_a": [1.0] * 6}, "scale_a is a list"),
        (GOOD | {"scale_b": np.ones((2, 1, 2), np.float32)}, r"scale_b has shape .* \(3, ..., ...\)"),
        (GOOD | {"scale_b": np.ones((1, 2), np.float32)}, "scale_b has shape"),
        (GOOD | {"scale_b": np.ones((3, 1, 3), np.float32)}, "group 0: scale_b has shape"),
        (GOOD | {"activation": "swish"}, "activation is 'swish'"),
        (GOOD | {"out": np.zeros((6, 2))}, r"out is float64 of shape \(6, 2\); expected float32"),
        (
            GOOD | {"out": np.zeros((5, 2), np.float32)},
            r"out is float32 of shape \(5, 2\); expected float32 of shape \(6, 2\)",
        ),
        ({"a": MASKED, "offsets": _int32(1, 1, 1)}, "a 3-D a takes counts"),
        ({"a": MASKED}, "counts is None; expected int32"),
        ({"a": MASKED, "counts": _int32(1, 6, 1)}, r"counts\[1\] is 6; a group has 0 to 5 rows"),
        ({"a": MASKED, "counts": _int32(1, -1, 1)}, r"counts\[1\] is -1"),
        ({"a": MASKED[:2], "counts": _int32(1, 1, 1)}, r"a has 2 groups .* b has 3"),
        ({"a": MASKED, "counts": _int32(1, 1, 1), "scale_a": np.ones((3, 1), np.float32)}, "scale_a has shape"),
        ({"a": ALONG_A, "b": ALONG_B}, "give exactly one of them"),
        ({"a": ALONG_A, "b": ALONG_B, "offsets": _int32(2, 9)}, "group 1 ends at 9 of 6"),
        ({"a": ALONG_A, "b": ALONG_B, "offsets": _int32(2, 6), "c": np.ones((3, 2, 3))}, r"expected \(2, 2, 3\)"),
        (
            {"a": ALONG_A, "b": ALONG_B, "offsets": _int32(2, 6), "scale_a": np.ones((1, 6), np.float32)},
            r"scale_a has shape \(1, 6\); expected \(2, 1\) or \(2, 2, 1\)",
        ),
        ({"a": [A], "b": B}, "b is no list of matrices"),
        ({"a": [A], "b": [B]}, r"b\[0\] has shape \(3, 4, 2\); expected a matrix"),
        ({"a": [A, A], "b": [B[0]]}, "a has 2 matrices, b has 1"),
        ({"a": [A], "b": [B[0]], "c": [None, None]}, "c has 2 members; expected a list of 1"),
        ({"a": [A], "b": [B[0]], "c": A}, "c has no list; expected a list of 1"),
        ({"a": [A], "b": [B[0]], "out": [np.zeros((6, 3), np.float32)]}, r"out\[0\] is float32 of shape \(6, 3\)"),
        ({"a": [A], "b": [B[0]], "out": [None]}, r"out\[0\] is NoneType"),
    ],
)
def test_grouped_gemm_refuses(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"a": A, "b": B, "out_dtype": D.F32, **arguments}
    with pytest.raises(InvalidOperandError, match=message):
        grouped_oracle.grouped_gemm(call.pop("a"), call.pop("b"), **call)
