"""`grouped_gemm`: the reference backend, what is refused, and how plans are put together.

From the call to the C ABI without a GPU: `tests/helpers/grouped_cases.py`, over kernels that run on the host.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import fake_kernels
import fake_pack
import fake_table
import grouped_cases
import grouped_gpu
import grouped_oracle
import numpy_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass import epilogue as evt
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.epilogue.fusion import GroupedFusion, GroupOperand
from atomr_cutlass.errors import InvalidOperandError, KernelNotFoundError, UnsupportedError
from atomr_cutlass.generator.epilogue.common import bias_and_activation
from atomr_cutlass.generator.matrix import ARCHS, expand, preset_of, supports
from atomr_cutlass.ops.grouped_gemm.kernels import GroupedSearch
from atomr_cutlass.ops.grouped_gemm.problem import (
    ALONG_K,
    CONTIGUOUS,
    LIST,
    MASKED,
    GroupedProblem,
    GroupScale,
    scale_forms,
)
from atomr_cutlass.pipeline import devices, select, verify
from atomr_cutlass.pipeline.operation import operation_of
from dlpack_arrays import Array

Values = np.ndarray[Any, Any]

CASES_FILE = "grouped_cases.py"
CASES = fake_cases.names(CASES_FILE)


def _random(*shape: int, dtype: Any = np.float32) -> Values:
    values = np.random.default_rng(shape).integers(-4, 5, shape)
    return values.astype(np.float32).astype(dtype)


def _i32(*values: int) -> Values:
    return np.array(values, np.int32)


def _call(*operands: Any, **arguments: Any) -> Any:
    return ac.grouped_gemm(*operands, **({"backend": "reference"} | arguments))


# ----------------------------------------------------------------------------------------------------------------------
# On kernels that run on the host
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    pack = fake_kernels.make_pack(folder / "pack.so", grouped_cases.KEYS, workspace=64)
    driver = fake_pack.make_driver(folder / "driver")
    return fake_cases.outcome(CASES_FILE, driver, [pack], ATOMR_CUTLASS_CACHE_DIR=str(folder / "cache"))


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


# ----------------------------------------------------------------------------------------------------------------------
# Numbers of the reference backend
# ----------------------------------------------------------------------------------------------------------------------

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divide", ["offsets", "counts"])
def test_contiguous_groups(dtype: Any, divide: str) -> None:
    a, b = _random(9, 5, dtype=dtype), _random(3, 5, 4, dtype=dtype)
    where = {"offsets": _i32(4, 4, 7)} if divide == "offsets" else {"counts": _i32(4, 0, 3)}
    got = _call(a, b, **where)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    want = np.concatenate([wide_a[:4] @ wide_b[0], wide_a[4:7] @ wide_b[2], np.zeros((2, 4))])
    assert got.dtype == (ml_dtypes.bfloat16 if dtype is ml_dtypes.float8_e4m3fn else dtype)
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_masked_groups_keep_the_rest_of_out() -> None:
    a, b, c = _random(3, 6, 5), _random(3, 5, 4), _random(3, 6, 4)
    out = np.full((3, 6, 4), 77, np.float32)
    assert _call(a, b, c, counts=_i32(6, 0, 2), out=out, alpha=2, beta=-1) is out
    want = np.full((3, 6, 4), 77, np.float32)
    want[0] = 2 * (a[0] @ b[0]) - c[0]
    want[2, :2] = 2 * (a[2, :2] @ b[2]) - c[2, :2]
    np.testing.assert_array_equal(out, want)


def test_groups_along_k() -> None:
    a, b = _random(4, 9), _random(9, 5)
    got = _call(a, b, offsets=_i32(2, 2, 9))
    np.testing.assert_array_equal(got, [a[:, :2] @ b[:2], np.zeros((4, 5)), a[:, 2:] @ b[2:]])


def test_lists_of_matrices() -> None:
    shapes = ((4, 5, 6), (0, 3, 2), (1, 1, 0))
    a, b = [_random(m, k) for m, n, k in shapes], [_random(k, n) for m, n, k in shapes]
    got = _call(a, tuple(b))
    assert isinstance(got, list)
    for d, x, y in zip(got, a, b, strict=True):
        np.testing.assert_array_equal(d, x @ y)
    out = [np.full_like(d, 7) for d in got]
    assert _call(a, b, got, beta=1, out=out) is out
    np.testing.assert_array_equal(out[0], 2 * got[0])
    assert _call([], []) == []


def test_bias_and_activation() -> None:
    a, b, bias = _random(6, 5), _random(2, 5, 4), _random(2, 4)
    got = _call(a, b, offsets=_i32(2, 6), bias=bias, activation="relu")
    want = np.concatenate([a[:2] @ b[0] + bias[0], a[2:] @ b[1] + bias[1]])
    np.testing.assert_array_equal(got, np.maximum(want, 0))
    lists = _call([a, a], [b[0], b[1]], bias=[bias[0], bias[1]])
    np.testing.assert_array_equal(lists[1], a @ b[1] + bias[1])


def test_scales_of_groups_are_those_of_their_rows() -> None:
    a, b = _random(6, 5), _random(3, 5, 4)
    each = np.array([2, 3, 0.5], np.float32)
    got = _call(a, b, offsets=_i32(2, 2, 5), scale_a=each, scale_b=2 * each)
    want = np.concatenate([a[:2] @ b[0] * 8, a[2:5] @ b[2] * 0.5, np.zeros((1, 4))])
    np.testing.assert_array_equal(got, want)
    masked = _call(np.stack([a] * 3), b, counts=_i32(1, 0, 6), scale_a=each.reshape(3, 1, 1))
    np.testing.assert_array_equal(masked[2], a @ b[2] * 0.5)
    along = _call(a, _random(5, 4), offsets=_i32(1, 2, 5), scale_a=each, scale_b=each)
    np.testing.assert_array_equal(along[1], np.outer(a[:, 1], _random(5, 4)[1]) * 9)


def test_numbers_as_scales() -> None:
    a, b = _random(6, 5), _random(3, 5, 4)
    got = _call(a, b, offsets=_i32(2, 2, 6), scale_a=0.5, scale_b=np.float32(4), alpha=3)
    np.testing.assert_array_equal(got, 6 * _call(a, b, offsets=_i32(2, 2, 6)))
    c = _random(6, 4)
    got = _call(a, b, c, offsets=_i32(2, 2, 6), alpha=3, beta=0.5, scale_d=2.0)
    np.testing.assert_allclose(got, _call(a, b, c, offsets=_i32(2, 2, 6), alpha=6, beta=1.0), rtol=1e-6)
    lists = _call([a, a], [b[0], b[1]], scale_a=[2.0, 2.0])
    np.testing.assert_array_equal(lists[1], 2 * (a @ b[1]))


def test_block_scales() -> None:
    a, b = _random(6, 200, dtype=ml_dtypes.float8_e4m3fn), _random(2, 200, 130, dtype=ml_dtypes.float8_e4m3fn)
    scale_a, scale_b = _random(6, 2), _random(2, 2, 2)
    got = _call(a, b, offsets=_i32(3, 6), scale_a=scale_a, scale_b=scale_b)
    want = grouped_oracle.grouped_gemm(a, b, offsets=_i32(3, 6), scale_a=scale_a, scale_b=scale_b, out_dtype=D.BF16)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))  # type: ignore[union-attr]


def test_results_are_of_the_kind_of_a() -> None:
    a, b = _random(6, 5), _random(3, 5, 4)
    got = _call(Array(a), Array(b), offsets=Array(_i32(2, 2, 6)))
    np.testing.assert_array_equal(np.asarray(got), _call(a, b, offsets=_i32(2, 2, 6)))


def test_without_a_gpu_auto_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "there is none")
    operands._warned.clear()
    a, b = _random(6, 5), _random(3, 5, 4)
    with pytest.warns(RuntimeWarning, match="there is none"):
        got = ac.grouped_gemm(a, b, offsets=_i32(2, 2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(ac.grouped_gemm(a, b, counts=_i32(2, 0, 4)), got)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

A, B, ENDS = _random(6, 5), _random(3, 5, 4), _i32(2, 2, 6)
OUT = np.zeros((6, 4), np.float32)

WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "rank of a": ((A[0], B), {"offsets": ENDS}, "a has shape (5,) and b (3, 5, 4); expected (rows, K)"),
    "ranks": ((B, A), {"counts": ENDS}, "expected (rows, K) and (G, K, N)"),
    "K": ((A[:, :4], B), {"offsets": ENDS}, "a has K = 4"),
    "groups": ((np.stack([A] * 2), B), {"counts": ENDS}, "a has 2 groups"),
    "neither": ((A, B), {}, "give exactly one of them"),
    "both": ((A, B), {"offsets": ENDS, "counts": ENDS}, "give exactly one of them"),
    "masked offsets": ((np.stack([A] * 3), B), {"offsets": ENDS}, "a 3-D a takes counts"),
    "int64": ((A, B), {"offsets": ENDS.astype(np.int64)}, "offsets has elements of int64; expected int32"),
    "float offsets": ((A, B), {"offsets": Array(A[0, :3])}, "offsets has elements of float32; expected int32"),
    "length": ((A, B), {"offsets": ENDS[:2]}, "offsets has shape (2,); expected (3,), one for each group"),
    "rank of counts": ((A, B), {"counts": ENDS[None]}, "counts has shape (1, 3)"),
    "along K": ((A, A.T), {"offsets": ENDS[None]}, "offsets has shape (1, 3); expected (G,)"),
    "list of offsets": ((A, B), {"offsets": [2, 2, 6]}, "offsets is a list; expected an array"),
    "back": ((A, B), {"offsets": _i32(3, 2, 6)}, "offsets[1] is 2, which goes back from 3"),
    "beyond": ((A, B), {"offsets": _i32(3, 4, 7)}, "offsets[2] is 7: group 2 ends at 7 of 6"),
    "negative": ((A, B), {"counts": _i32(3, -1, 1)}, "counts[1] is -1, which is negative"),
    "sum": ((A, B), {"counts": _i32(3, 3, 1)}, "counts[2] is 1: group 2 ends at 7 of 6"),
    "masked beyond": ((np.stack([A] * 3), B), {"counts": _i32(6, 7, 9)}, "counts[1] is 7; a group has 0 to 6 rows"),
    "beyond K": ((A, A.T), {"offsets": _i32(3, 6)}, "offsets[1] is 6: group 1 ends at 6 of 5"),
    "dtypes": ((A, B.astype(np.float16)), {"offsets": ENDS}, "a is f32 and b is f16"),
    "out shape": ((A, B), {"offsets": ENDS, "out": A}, "out has shape (6, 5); expected (6, 4)"),
    "out dtype": ((A, B), {"offsets": ENDS, "out": A[:, :4], "out_dtype": D.F16}, "out is f32"),
    "c shape": ((A, B, A), {"offsets": ENDS, "beta": 1}, "c has shape (6, 5); expected (6, 4)"),
    "c unused": ((A, B, A), {"offsets": ENDS}, "c is given but beta is 0"),
    "c missing": ((A, B), {"offsets": ENDS, "beta": 1}, "c is needed"),
    "alpha": ((A, B), {"offsets": ENDS, "alpha": "1"}, "alpha is a str"),
    "backend": ((A, B), {"offsets": ENDS, "backend": "fast"}, "unknown backend 'fast'"),
    "out overlaps": ((A[:, :4], A[:4, :4][None]), {"offsets": _i32(6), "out": A[:, 1:5]}, "out overlaps a"),
    "scale dtype": ((A, B), {"offsets": ENDS, "scale_a": np.ones(3)}, "scale_a is f64; expected float32"),
    "scale shape": (
        (A, B), {"offsets": ENDS, "scale_a": np.ones((5, 1), np.float32)},
        "scale_a has shape (5, 1); expected one element or one of (3,), (6, 1), (6, 1)",
    ),
    "scale of b": (
        (A, B), {"offsets": ENDS, "scale_b": np.ones((1, 4), np.float32)}, "scale_b has shape (1, 4); expected"
    ),
    "blocks of one": (
        (_random(6, 200), _random(3, 200, 4)), {"offsets": ENDS, "scale_a": np.ones((6, 2), np.float32)},
        "block scales are for both operands or for neither",
    ),
    "one list": (([A], B), {}, "b is a ndarray; expected a list, one for each group"),
    "other list": ((A, [B[0]]), {"offsets": ENDS}, "b is a list; expected an array"),
    "lengths": (([A], [B[0], B[1]]), {}, "b has 2 members; a has 1"),
    "ranks of lists": (([A], [B]), {}, "b[0] has shape (3, 5, 4); expected a matrix"),
    "K of lists": (([A, A], [B[0], A]), {}, "a[1] has K = 5"),
    "out of arrays": ((A, B), {"offsets": ENDS, "out": []}, "out is a list; expected an array"),
    "lists of nothing": ((A, []), {"out": []}, "b is a list; expected an array"),
    "list of counts": ((A, B), {"counts": [ENDS], "out": ()}, "counts is a list; expected an array"),
    "offsets of lists": (([A], [B[0]]), {"offsets": ENDS}, "offsets divides arrays"),
    "out of lists": (([A], [B[0]]), {"out": A}, "out is a ndarray; expected a list"),
    "out shape of lists": (([A], [B[0]]), {"out": [A]}, "out[0] has shape (6, 5); expected (6, 4)"),
    "dtypes of lists": (([A, A.astype(np.float16)], [B[0], B[1]]), {}, "a[1] is f16, and a[0] f32"),
    "scales of lists": (
        ([A, A], [B[0], B[1]]), {"scale_a": [np.ones((6, 1), np.float32), np.ones((5, 1), np.float32)]},
        "scale_a[1] has shape (5, 1)",
    ),
    "bias shape": ((A, B), {"offsets": ENDS, "bias": A[0]}, "bias has shape (5,); expected (4,) or (3, 4)"),
    "bias of groups": ((A, B), {"offsets": ENDS, "bias": A[:2, :4]}, "bias has shape (2, 4); expected (4,) or (3, 4)"),
    "bias dtype": ((A, B), {"offsets": ENDS, "bias": _i32(1, 2, 3, 4)}, "bias is i32; expected a floating dtype"),
    "bias list": ((A, B), {"offsets": ENDS, "bias": [A[0, :4]] * 3}, "bias is a list; expected an array"),
    "bias of lists": (([A], [B[0]]), {"bias": A[0, :4]}, "bias is a ndarray; expected a list, one for each group"),
    "bias shape of lists": (([A], [B[0]]), {"bias": [A[0]]}, "bias[0] has shape (5,); expected (4,)"),
    "bias dtypes": (
        ([A, A], [B[0], B[1]]), {"bias": [A[0, :4], A[0, :4].astype(np.float16)]}, "bias[1] is f16, and bias[0] f32",
    ),
    "bias overlaps": ((A, B), {"offsets": ENDS, "out": OUT, "bias": OUT[0]}, "out overlaps bias"),
    "activation": (
        (A, B), {"offsets": ENDS, "activation": "nonsense"}, "unknown activation 'nonsense'; valid: identity, relu"
    ),
    "no array": ((A, "b"), {"offsets": ENDS}, "a str is not an array"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_and_nothing_is_written(name: str) -> None:
    operands, options, says = WRONG[name]
    before = A.copy()
    with pytest.raises(InvalidOperandError, match=re.escape(says)):
        _call(*operands, **options)
    np.testing.assert_array_equal(A, before)


ROW, EACH, SCALAR = _random(4), _random(3, 4), np.full(1, 0.5, np.float32)


def add(acc: Any, x: Any) -> Any:
    return acc + x


ADDER = ac.EvtBuilder().add_bias("x", dtype="f32").build()

NO_EPILOGUE: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "column": (UnsupportedError, {"epilogue": add, "x": A[:, :1]}, "read rows and scalars, not a column"),
    "vector of rows": (UnsupportedError, {"epilogue": add, "x": A[:, 0]}, "read rows and scalars, not a column"),
    "matrix": (UnsupportedError, {"epilogue": add, "x": OUT}, "read rows and scalars, not a matrix"),
    "mask": (
        UnsupportedError, {"epilogue": lambda acc, x: evt.where(x, acc, 0), "x": np.zeros((6, 1), np.uint8)},
        "read rows and scalars, not a mask",
    ),
    "c of the result": (
        UnsupportedError, {"epilogue": lambda acc, c: acc + c, "c": OUT}, "read rows and scalars, not a matrix",
    ),
    "stored": (UnsupportedError, {"epilogue": lambda acc: (acc, evt.mask(acc > 0))}, "grouped kernels store D alone"),
    "reduced": (UnsupportedError, {"epilogue": lambda acc: (acc, evt.total_amax(acc))}, "kernels store D alone"),
    "untraceable": (UnsupportedError, {"epilogue": lambda acc: max(0, acc)}, "the truth of a traced"),
    "no epilogue": (InvalidOperandError, {"x": ROW}, "x: grouped_gemm has no such argument, and there is no epilogue"),
    "activation too": (
        InvalidOperandError, {"epilogue": add, "x": ROW, "activation": "relu"}, "epilogue and activation are given",
    ),
    "bias too": (InvalidOperandError, {"epilogue": ADDER, "x": ROW, "bias": ROW}, "has no operand bias"),
    "missing": (InvalidOperandError, {"epilogue": ADDER}, "the epilogue reads x"),
    "unknown": (InvalidOperandError, {"epilogue": ADDER, "x": ROW, "y": ROW}, "has no operand y; its operands are x"),
    "shape": (InvalidOperandError, {"epilogue": ADDER, "x": A}, "x has shape (6, 5); expected (4,) or (3, 4)"),
    "shape to a function": (
        InvalidOperandError, {"epilogue": add, "x": A},
        "x has shape (6, 5); expected one element or (3, 1, 1) or (4,) or (3, 4)",
    ),
    "dtype": (
        InvalidOperandError, {"epilogue": ADDER, "x": ROW.astype(np.float16)}, "x is f16; the epilogue reads f32",
    ),
    "number": (InvalidOperandError, {"epilogue": ADDER, "x": 1.0}, "a tree takes arrays"),
    "list": (InvalidOperandError, {"epilogue": ADDER, "x": [ROW] * 3}, "x is a list; expected an array"),
    "cast": (
        InvalidOperandError, {"epilogue": lambda acc: evt.cast(acc, "e4m3"), "out_dtype": D.F32},
        "the epilogue casts D to e4m3; out, out_dtype or c say f32",
    ),
    "overlap": (InvalidOperandError, {"epilogue": ADDER, "x": OUT[0], "out": OUT}, "out overlaps x"),
    "name": (
        InvalidOperandError, {"epilogue": ac.EvtBuilder().add_bias("scale_a").build(), "scale_a": SCALAR},
        "the epilogue calls an operand 'scale_a', as the product does",
    ),
    "no function": (InvalidOperandError, {"epilogue": 1}, "epilogue"),
    "scale after a tree": (UnsupportedError, {"epilogue": ADDER, "x": ROW, "scale_d": 2.0}, "scale_d is a number, and"),
    "scale after a bias": (UnsupportedError, {"bias": ROW, "scale_d": 2.0}, "scale_d is a number, and what follows"),
    "scale that is an array": (UnsupportedError, {"scale_d": SCALAR}, "scale_d is a ndarray: grouped kernels read no"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_EPILOGUE)
def test_epilogues_that_are_refused(name: str) -> None:
    error, options, says = NO_EPILOGUE[name]
    before = OUT.copy()
    with pytest.raises(error, match=re.escape(says)):
        _call(A, B, offsets=ENDS, **options)
    np.testing.assert_array_equal(OUT, before)


def test_epilogues_of_lists_that_are_refused() -> None:
    lists = [A, A], [B[0], B[1]]
    for given, says in (
        (ROW, "x is one array; expected a list, one for each group"),
        ([ROW], "x has 1 members; a has 2"),
        ([ROW, A[0]], "x[1] has shape (5,); expected (4,)"),
        ([ROW, ROW.astype(np.float16)], "x[1] is f16; the epilogue reads f32"),
    ):
        with pytest.raises(InvalidOperandError, match=re.escape(says)):
            _call(*lists, epilogue=ADDER, x=given)
    with pytest.raises(UnsupportedError, match="not a matrix"):
        _call(*lists, epilogue=add, x=[OUT, OUT])


def clamped(acc: Any, bias: Any, scale: Any, top: float = 2.0) -> Any:
    return evt.clamp(acc * scale + bias, -2.0, top)


def _clamped(acc: Values, bias: Values, scale: Any, top: float = 2.0) -> Values:
    return np.clip(acc * scale + bias, -2.0, top)


@pytest.mark.parametrize(
    "bias", [ROW, EACH, EACH[:, None], ROW[None], EACH[:1, None]], ids=lambda array: str(array.shape)
)
@pytest.mark.parametrize("scale", [SCALAR, SCALAR.reshape(()), np.array([1, 2, -0.5], np.float32).reshape(3, 1, 1)])
def test_trees_read_rows_and_scalars_of_groups(bias: Values, scale: Values) -> None:
    each = np.broadcast_to(bias.reshape(-1, 4), (3, 4))
    factor = np.broadcast_to(scale.reshape(-1), (3,))
    out = np.full((6, 4), 7, np.float32)
    assert _call(A, B, offsets=_i32(2, 2, 5), epilogue=clamped, bias=bias, scale=scale, out=out) is out
    want = out.copy()
    want[:2], want[2:5] = (_clamped(A[s] @ B[g], each[g], factor[g]) for s, g in ((slice(0, 2), 0), (slice(2, 5), 2)))
    np.testing.assert_array_equal(out, want)
    assert (out[5] == 7).all()
    masked = _call(np.stack([A] * 3), B, counts=_i32(1, 0, 6), epilogue=clamped, bias=bias, scale=scale)
    np.testing.assert_array_equal(masked[2], _clamped(A @ B[2], each[2], factor[2]))
    along = _call(A, _random(5, 4), offsets=_i32(1, 1, 5), epilogue=clamped, bias=bias, scale=scale)
    np.testing.assert_array_equal(along[1], np.clip(np.broadcast_to(each[1], (6, 4)), -2, 2))


def test_trees_of_lists() -> None:
    a, b, bias = [A, A[:2]], [B[0], B[1][:, :3]], [ROW, ROW[:3]]
    for scale in (SCALAR, [SCALAR, 2 * SCALAR]):
        got = _call(a, b, epilogue=clamped, bias=bias, scale=scale, top=1.0)
        each = scale if isinstance(scale, list) else [scale] * 2
        for d, x, y, row, factor in zip(got, a, b, bias, each, strict=True):
            np.testing.assert_array_equal(d, _clamped(x @ y, row, factor, 1.0))
    assert _call([], [], epilogue=clamped) == []


def test_trees_beside_scales_and_c() -> None:
    c, scale_b = _random(6, 4), np.array([2, 1, 0.5], np.float32)
    got = _call(A, B, c, offsets=ENDS, beta=-1.0, alpha=0.5, scale_b=scale_b, epilogue=add, x=ROW)
    np.testing.assert_array_equal(got[:2], A[:2] @ B[0] - c[:2] + ROW)
    np.testing.assert_array_equal(got[2:], 0.25 * (A[2:] @ B[2]) - c[2:] + ROW)
    # Without beta, c is whatever the epilogue takes it for.
    got = _call(A, B, ROW, offsets=ENDS, epilogue=lambda acc, c: acc + c)
    np.testing.assert_array_equal(got, _call(A, B, offsets=ENDS, bias=ROW))


def test_trees_decide_the_result() -> None:
    quantize = ac.EvtBuilder().quantize("e4m3", scale="factor").build()
    got = _call(A, B, offsets=ENDS, epilogue=quantize, factor=np.full(1, 64, np.float32))
    assert got.dtype == ml_dtypes.float8_e4m3fn
    want = np.clip(64 * np.concatenate([A[:2] @ B[0], A[2:] @ B[2]]), -448, 448)
    np.testing.assert_array_equal(got, want.astype(got.dtype))
    out = np.zeros((6, 4), got.dtype)
    assert _call(A, B, offsets=ENDS, epilogue=lambda acc: {"out": acc}, out=out)["out"] is out


def test_the_same_tree_however_it_is_given() -> None:
    by_name = _call(A, B, offsets=ENDS, bias=EACH, activation="gelu")
    tree = bias_and_activation(D.F32, "gelu")
    for epilogue in (tree, lambda acc, bias: evt.gelu(acc + bias)):
        np.testing.assert_array_equal(_call(A, B, offsets=ENDS, epilogue=epilogue, bias=EACH), by_name)
    # Operands that a function does not use are left alone.
    got = _call(A, B, offsets=ENDS, epilogue=lambda acc, x: evt.relu(acc), x=OUT[:, :1])  # noqa: ARG005
    np.testing.assert_array_equal(got, _call(A, B, offsets=ENDS, activation="relu"))


def test_what_there_is_not_yet() -> None:
    with pytest.raises(UnsupportedError, match="must be the same"):
        _call([A, A], [B[0], B[1]], scale_a=[1.0, 2.0])


def test_an_out_that_cannot_be_written() -> None:
    out = np.zeros((6, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidOperandError, match="read-only"):
        _call(A, B, offsets=ENDS, out=out)


# ----------------------------------------------------------------------------------------------------------------------
# Scales
# ----------------------------------------------------------------------------------------------------------------------

SCALES = [
    (CONTIGUOUS, (9, 200, 300), None, None, ("tensor", "tensor")),
    (CONTIGUOUS, (9, 200, 300), (1,), (1, 1), ("tensor", "tensor")),
    (CONTIGUOUS, (9, 200, 300), (4,), (4, 1, 1), ("group", "group")),
    (CONTIGUOUS, (9, 200, 300), (9, 1), (4, 1, 200), ("vector", "vector")),
    (CONTIGUOUS, (9, 200, 300), (9, 1), None, ("vector", "tensor")),
    (CONTIGUOUS, (9, 200, 300), (9, 3), (4, 3, 2), ("block", "block")),
    (CONTIGUOUS, (9, 200, 100), (9, 1), (4, 1, 2), ("block", "block")),
    (CONTIGUOUS, (9, 100, 100), (9, 1), (4, 1, 1), ("vector", "group")),
    (CONTIGUOUS, (1, 200, 100), (1, 1), (4, 1, 2), ("block", "block")),
    (MASKED, (9, 200, 300), (4, 9, 1), (4,), ("vector", "group")),
    (MASKED, (9, 200, 300), (4, 1, 1), (4, 1, 200), ("group", "vector")),
    (MASKED, (9, 200, 300), (4, 9, 3), (4, 3, 2), ("block", "block")),
    (ALONG_K, (9, 200, 300), (9, 1), (1, 200), ("vector", "vector")),
    (ALONG_K, (9, 200, 300), (4, 9, 1), (4, 1, 200), ("vector", "vector")),
    (ALONG_K, (9, 200, 300), (4,), (4, 1, 1), ("group", "group")),
]


@pytest.mark.parametrize(("form", "extents", "a", "b", "want"), SCALES)
def test_forms_of_scales(form: str, extents: Any, a: Any, b: Any, want: tuple[str, str]) -> None:
    shapes = [() if shape is None else [shape] for shape in (a, b)]
    assert scale_forms(form, 4, [extents], *shapes) == want


def test_forms_of_scales_of_lists() -> None:
    extents = [(4, 200, 300), (1, 200, 300)]
    vectors = [(4, 1), (1, 1)]
    assert scale_forms(LIST, 2, extents, [(1,)], ()) == ("tensor", "tensor")
    assert scale_forms(LIST, 2, extents, vectors, [(1, 200)] * 2) == ("vector", "vector")
    assert scale_forms(LIST, 2, extents, [(1,), (1, 1)], [(1, 200)] * 2) == ("tensor", "vector")
    assert scale_forms(LIST, 2, extents, [(4, 3), (1, 3)], [(3, 2)] * 2) == ("block", "block")
    with pytest.raises(InvalidOperandError, match="different kinds"):
        scale_forms(LIST, 2, extents, [(4, 3), (1, 1)], [(3, 2)] * 2)


# ----------------------------------------------------------------------------------------------------------------------
# Which kernel
# ----------------------------------------------------------------------------------------------------------------------


def _spec(shape: tuple[int, ...], dtype: D, layout: str = "r", pad: int = 0, alignment: int = 16) -> MatrixSpec:
    rows, columns = shape[-2:]
    leading = (columns if layout == "r" else rows) + pad
    inner = (leading, 1) if layout == "r" else (1, leading)
    outer = (leading * (rows if layout == "r" else columns),) if len(shape) == 3 else ()
    return MatrixSpec(shape, outer + inner, dtype, alignment)


def _fused(bias: tuple[MatrixSpec, ...] = (), activation: str | None = None) -> GroupedFusion:
    """act(acc + bias)."""
    inputs = (GroupOperand("bias", "row", bias),) if bias else ()
    return GroupedFusion(bias_and_activation(bias[0].dtype if bias else None, activation), inputs)


def _problem(form: str = CONTIGUOUS, dtype: D = D.BF16, layouts: str = "rr", **changes: Any) -> GroupedProblem:
    g, m, n, k = changes.pop("extents", (8, 512, 256, 128))
    result = changes.pop("result", D.BF16)
    pads = changes.pop("pads", (0, 0, 0))
    shapes = {
        CONTIGUOUS: ((m, k), (g, k, n), (m, n)),
        MASKED: ((g, m, k), (g, k, n), (g, m, n)),
        ALONG_K: ((m, k), (k, n), (g, m, n)),
    }[form]
    if "bias" in changes or "activation" in changes:
        changes["fusion"] = _fused(changes.pop("bias", ()), changes.pop("activation", None))
    layouts += "r" * (3 - len(layouts))
    a, b, d = (
        (_spec(shape, operand_dtype, layout, pad),)
        for shape, operand_dtype, layout, pad in zip(shapes, (dtype, dtype, result), layouts, pads, strict=True)
    )
    problem = GroupedProblem(form, g, a, b, (), d, counted=False, math="default", device=0)
    return dataclasses.replace(problem, **changes)


def _best(problem: GroupedProblem, arch: SmArch = SmArch.SM90A) -> Any:
    return select.best_key(GroupedSearch(problem, devices.imagined(arch), arch))


SERVED: dict[str, tuple[GroupedProblem, str, str]] = {
    "rows": (_problem(), "sm90", "rr"),
    "columns of b": (_problem(layouts="rc"), "sm90", "rc"),
    "masked": (_problem(MASKED), "sm90", "rr"),
    "along K": (_problem(ALONG_K, layouts="cr"), "sm90", "cr"),
    "along K of rows": (_problem(ALONG_K, layouts="rr"), "sm80", "rr"),
    "along K to f32": (_problem(ALONG_K, layouts="cr", result=D.F32), "sm90", "cr"),
    "odd n": (_problem(extents=(8, 512, 255, 128)), "sm80", "rr"),
    "odd k, padded": (_problem(extents=(8, 512, 256, 127), pads=(1, 0, 0)), "sm80", "rr"),
    "odd k": (_problem(extents=(8, 512, 256, 127)), "sm80", "rr"),
    "odd rows": (_problem(extents=(8, 511, 256, 128)), "sm90", "rr"),
    "odd address": (
        dataclasses.replace(_problem(), a=(_spec((512, 128), D.BF16, alignment=2),)), "sm80", "rr",
    ),
    "fp8": (_problem(dtype=D.F8E4M3, layouts="rc"), "sm90", "rc"),
    "f16": (_problem(dtype=D.F16, result=D.F16), "sm90", "rr"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_cells_that_serve(name: str) -> None:
    problem, generation, layouts = SERVED[name]
    key = _best(problem)
    assert (key.op, key.generation, key.layout_a + key.layout_b) == ("grouped_gemm", generation, layouts)
    assert (key.a, key.d) == (problem.a[0].dtype, problem.d[0].dtype)


@pytest.mark.parametrize("arch", ARCHS["grouped_gemm"])
def test_every_arch_serves_half_precision(arch: SmArch) -> None:
    for form, layouts in ((CONTIGUOUS, "rr"), (CONTIGUOUS, "rc"), (MASKED, "rc"), (ALONG_K, "cr")):
        assert _best(_problem(form, layouts=layouts), arch).arch is arch


SCALED = {
    "numbers": (None, None),
    "groups": (GroupScale((MatrixSpec((8,), (1,), D.F32),), "group"), None),
    "vectors": (
        GroupScale((MatrixSpec((512, 1), (1, 1), D.F32),), "vector"),
        GroupScale((MatrixSpec((8, 1, 256), (256, 256, 1), D.F32),), "vector"),
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_on_the_device_take_the_scaled_epilogue(name: str) -> None:
    scale_a, scale_b = SCALED[name]
    problem = _problem(dtype=D.F8E4M3, layouts="rc", scale_a=scale_a, scale_b=scale_b)
    assert _best(problem).epilogue == "scaled"
    if scale_a is not None:
        half = dataclasses.replace(problem, a=_problem().a, b=_problem().b)
        with pytest.raises(UnsupportedError, match="only fp8 kernels take scales as arrays"):
            _best(half)


def test_block_scales_have_cells_of_their_own() -> None:
    scale_a = GroupScale((MatrixSpec((512, 1), (1, 1), D.F32),), "block")
    scale_b = GroupScale((MatrixSpec((8, 1, 2), (2, 2, 1), D.F32),), "block")
    problem = _problem(dtype=D.F8E4M3, layouts="rc", scale_a=scale_a, scale_b=scale_b)
    assert (_best(problem).scale_type, _best(problem).scale_granularity) == ("f32", (1, 128, 128))
    assert _best(dataclasses.replace(problem, math="fast")).math == "default"
    assert _best(_problem(dtype=D.F8E4M3, layouts="rc")).scale_type == ""


def test_fast_accumulation_is_leave_and_no_order() -> None:
    problem = _problem(dtype=D.F8E4M3, layouts="rc")
    assert _best(problem).math == "default"
    assert _best(dataclasses.replace(problem, math="fast")).math == "fast"
    mixed = dataclasses.replace(problem, a=(_spec((512, 128), D.F8E5M2),), math="fast")
    assert _best(mixed).math == "default"


BIAS, BIASES = (MatrixSpec((256,), (1,), D.BF16),), (MatrixSpec((8, 256), (256, 1), D.BF16),)
BIAS_F32 = (MatrixSpec((256,), (1,), D.F32),)


def test_bias_and_activation_of_kernels_with_trees() -> None:
    for problem, program in (
        (_problem(bias=BIAS), "evt:acc;input:row:bf16;add:0:1;out:2"),
        (_problem(bias=BIASES, activation="relu"), "evt:acc;input:row:bf16;add:0:1;relu:2;out:3"),
        (_problem(MASKED, bias=BIAS_F32), "evt:acc;input:row:f32;add:0:1;out:2"),
        (_problem(ALONG_K, layouts="cr", activation="tanh"), "evt:acc;tanh:0;out:1"),
    ):
        for arch in (SmArch.SM90A, SmArch.SM100):
            key, plain = _best(problem, arch), _best(dataclasses.replace(problem, fusion=None), arch)
            assert key == dataclasses.replace(plain, epilogue=f"lc+{program}")
            assert supports(key)
            assert preset_of(key) is None


def test_bias_and_activation_beside_scales() -> None:
    program = "evt:acc;input:row:bf16;add:0:1;silu:2;out:3"
    for scale_a, scale_b in SCALED.values():
        problem = _problem(dtype=D.F8E4M3, layouts="rc", scale_a=scale_a, scale_b=scale_b, bias=BIAS, activation="silu")
        assert _best(problem).epilogue == f"scaled+{program}"
    blocks = [GroupScale((MatrixSpec(shape, (2, 1), D.F32),), "block") for shape in ((512, 1), (8, 1, 2))]
    problem = _problem(dtype=D.F8E4M3, layouts="rc", scale_a=blocks[0], scale_b=blocks[1], bias=BIAS, activation="silu")
    assert (_best(problem).epilogue, _best(problem).scale_type) == (f"lc+{program}", "f32")


def test_kernels_of_the_sm80_generation_read_bias_in_the_place_of_c() -> None:
    for arch, pads in ((SmArch.SM80, (0, 0, 0)), (SmArch.SM89, (0, 0, 0)), (SmArch.SM90A, (1, 1, 1))):
        problem = _problem(pads=pads)
        for bias, activation in ((BIAS, None), (BIASES, "gelu"), ((), "hardswish")):
            key = _best(dataclasses.replace(problem, fusion=_fused(bias, activation)), arch)
            assert (key.generation, key.epilogue) == ("sm80", f"lc_{activation}" if activation else "lc")
            assert supports(key)
        strided = (MatrixSpec((256,), (2,), D.BF16),)
        for bias, c in ((BIAS_F32, ()), (BIAS, problem.d), (strided, ())):
            with pytest.raises(UnsupportedError, match="without c, contiguous and of the result's dtype"):
                _best(dataclasses.replace(problem, fusion=_fused(bias), c=c), arch)
    # As aligned as the result must be.
    narrow = (MatrixSpec((256,), (1,), D.BF16, 2),)
    assert _best(_problem(bias=narrow), SmArch.SM80).align_d == 1
    assert _best(_problem(bias=(MatrixSpec((8, 256), (257, 1), D.BF16),)), SmArch.SM80).align_d == 1
    assert _best(_problem(bias=BIASES), SmArch.SM80).align_d == 8


def test_kernels_with_other_epilogues_are_not_taken() -> None:
    fused = _problem(bias=BIAS, activation="relu")
    alike, others = _problem(bias=BIASES, activation="relu"), (_problem(), _problem(bias=BIAS, activation="silu"))
    for arch in (SmArch.SM80, SmArch.SM90A):
        device = devices.imagined(arch)
        assert GroupedSearch(alike, device).serves(_best(fused, arch))
        for other in others:
            assert not GroupedSearch(other, device).serves(_best(fused, arch))
            assert not GroupedSearch(fused, device).serves(_best(other, arch))


REFUSED: dict[str, tuple[GroupedProblem, str]] = {
    "f32": (_problem(dtype=D.F32, result=D.F32), "grouped kernels multiply f16, bf16 and fp8"),
    "columns of a": (_problem(layouts="cc"), "A is read row-major, B in either layout"),
    "columns of out": (_problem(layouts="rrc"), "the rows of the result are contiguous"),
    "along K, columns of b": (_problem(ALONG_K, layouts="cc"), "A contiguous along M and B along N"),
    "fp8, rows of b": (_problem(dtype=D.F8E4M3), "fp8 kernels read A and B contiguous along K"),
    "fp8, odd k": (_problem(dtype=D.F8E4M3, layouts="rc", extents=(8, 512, 256, 120)), "strides of 16 bytes"),
    "fp8 to f32": (_problem(dtype=D.F8E4M3, layouts="rc", result=D.F32), "fp8 kernels give bf16 and f16"),
    "fp8 along K": (_problem(ALONG_K, D.F8E4M3, "rc"), "groups along K begin anywhere"),
    "nothing": (_problem(extents=(8, 0, 256, 128)), "there is nothing to plan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cure(name: str) -> None:
    problem, says = REFUSED[name]
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        _best(problem)


def test_an_arch_without_cells_is_refused_by_name() -> None:
    absent = [arch for arch in SmArch if arch not in ARCHS["grouped_gemm"]]
    for arch in absent:
        with pytest.raises(UnsupportedError, match=f"no kernels for {arch.value}; there are some for sm_80"):
            _best(_problem(), arch)


def test_kernels_of_the_gpu_tests() -> None:
    """They can be compiled before the tests run, and those of trees are few."""
    device = devices.imagined(SmArch.SM90A)
    keys = grouped_gpu.keys(device)
    assert {key.name: supports(key).reason for key in keys if not supports(key)} == {}
    of_trees = {select.best_key(GroupedSearch(case.problem, device)) for case in grouped_gpu.TREE_CASES}
    assert len(of_trees) <= 8
    lists = (select.best_key(GroupedSearch(problem, device)) for problem in grouped_gpu.trees_of_lists())
    assert of_trees.issuperset(lists)
    assert of_trees <= set(keys)


@pytest.mark.filterwarnings("ignore:.* is used, which by the model takes")
def test_the_table_comes_first_and_what_it_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()

    def chosen(backend: str) -> Any:
        return select.choose(GroupedSearch(problem, fake_table.H200), backend=backend, jit="off")

    narrow = [k for k in expand("full", [SmArch.SM90A]) if k.op == "grouped_gemm" and k.generation == "sm80"]
    fake_table.install(monkeypatch, [fake_table.row(key) for key in narrow])
    assert chosen("auto").key.generation == "sm80"
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    assert chosen("prebuilt").key.generation == "sm90"
    fake_table.install(monkeypatch, [])
    with pytest.raises(KernelNotFoundError, match=r"serves this grouped_gemm; .*; build with"):
        chosen("prebuilt")


def test_the_table_has_kernels_with_bias_and_activation_where_they_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(bias=BIAS, activation="hardswish")
    keys = [key for key in expand("full", [SmArch.SM90A]) if key.op == "grouped_gemm"]
    fake_table.install(monkeypatch, [fake_table.row(key) for key in keys])
    with pytest.raises(KernelNotFoundError, match="it is in no preset: record a run that compiles it"):
        select.choose(GroupedSearch(problem, fake_table.H200), backend="prebuilt")
    candidate = select.choose(GroupedSearch(problem, fake_table.H200), record=False)
    assert candidate.info is None
    fake_table.install(monkeypatch, [fake_table.row(key) for key in (*keys, candidate.key)])
    assert select.choose(GroupedSearch(problem, fake_table.H200), backend="prebuilt").info is not None


def test_few_rows_in_each_group_take_small_tiles() -> None:
    few = _best(_problem(extents=(64, 64 * 8, 4096, 4096), layouts="rc"))
    many = _best(_problem(extents=(8, 8 * 4096, 4096, 4096), layouts="rc"))
    assert few.tile[0] == 64
    assert many.tile[0] * many.tile[1] >= 128 * 128


def test_what_is_expected_of_groups() -> None:
    def expected(problem: GroupedProblem) -> tuple[int, ...]:
        return GroupedSearch(problem, fake_table.H200).extents(problem)

    assert expected(_problem(extents=(8, 512, 256, 128))) == (64, 256, 128, 8, 128, 128)
    assert expected(_problem(extents=(256, 32, 256, 128))) == (1, 256, 128, 32, 128, 128)
    assert expected(_problem(MASKED, extents=(8, 512, 256, 128))) == (256, 256, 128, 8, 128, 128)
    assert expected(_problem(ALONG_K, extents=(8, 512, 256, 128))) == (512, 256, 16, 8, 16, 16)


# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------

SHAPES = [ac.GemmShape(64, 32, 16), ac.GemmShape(0, 32, 16), ac.GemmShape(7, 8, 24)]
REQUEST = ac.GroupedGemmRequest(ac.GroupedGemmShape(SHAPES), dtype=D.BF16, arch=SmArch.SM90A)


def test_requests_are_lists_of_dense_matrices() -> None:
    problem = REQUEST.problem(0)
    assert (problem.form, problem.groups, problem.c) == (LIST, 3, ())
    assert problem.members == [(shape.m, shape.n, shape.k) for shape in SHAPES]
    assert problem.a[2] == MatrixSpec((7, 24), (24, 1), D.BF16)
    turned = dataclasses.replace(REQUEST, layout_b=ac.GemmLayout.COL_MAJOR, epilogue=ac.GemmEpilogue(beta=1.0))
    assert turned.problem(0).b[2] == MatrixSpec((24, 8), (1, 24), D.BF16)
    assert turned.problem(0).c == problem.d


QUANTIZER = ac.EvtBuilder().add_bias("bias", dtype="bf16").activation("silu").quantize("e4m3", scale="factor").build()


def test_trees_that_do_nothing() -> None:
    """They are none, but where nothing else stores a D so narrow."""
    identity = evt.EvtBuilder().build()
    for out, wanted in ((D.BF16, None), (D.F32, None), (D.F8E4M3, identity), (D.I8, identity)):
        request = dataclasses.replace(
            REQUEST,
            shape=ac.GroupedGemmShape([ac.GemmShape(9, 32, 16)] * 2),
            out_dtype=out,
            epilogue=ac.GemmEpilogue(tree=identity),
        )
        assert request.tree == wanted, out
        device = devices.imagined(SmArch.SM90A)
        assert select.choose(GroupedSearch(request.problem(0), device, SmArch.SM90A)).key.d is out


def test_requests_with_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    request = dataclasses.replace(
        REQUEST, epilogue=ac.GemmEpilogue(tree=QUANTIZER), shape=ac.GroupedGemmShape([ac.GemmShape(9, 32, 16)] * 2)
    )
    problem = request.problem(0)
    assert problem.fusion is not None
    assert {operand.name: operand.arrays for operand in problem.fusion.inputs} == {
        "bias": (MatrixSpec((32,), (1,), D.BF16),) * 2, "factor": (MatrixSpec((1,), (1,), D.F32),),
    }  # fmt: skip
    assert (request.result_dtype, problem.d[0].dtype) == (D.F8E4M3, D.F8E4M3)
    assert request.plan_key() != REQUEST.plan_key()
    assert "ops::silu" in request.render_cu()[0]
    assert "_e4m3_e4m3_" in request.render_cu()[1]
    slots = [(slot.name, slot.listed) for slot in operation_of(request).operands(request)]
    assert sorted(slots[2:-1]) == [("bias", True), ("factor", False)]
    assert [slots[i] for i in (0, 1, -1)] == [("a", True), ("b", True), ("out", True)]
    by_name = dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(bias=True, activation="silu"))
    as_tree = ac.GemmEpilogue(tree=bias_and_activation(D.BF16, "silu"))
    assert dataclasses.replace(REQUEST, epilogue=as_tree).problem(0) == by_name.problem(0)
    numpy_gpu.install(monkeypatch)
    assert verify.run(request).ok
    assert verify.run(by_name).ok


def test_requests_with_bias_and_activation() -> None:
    request = dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(bias=True, activation="gelu"), out_dtype=D.F32)
    problem = request.problem(0)
    assert problem.fusion == _fused(tuple(MatrixSpec((n,), (1,), D.F32) for n in (32, 32, 8)), "gelu")
    assert request.plan_key() != REQUEST.plan_key()
    identity = dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(activation="identity"))
    assert identity.problem(0) == REQUEST.problem(0)


@pytest.mark.parametrize(
    ("scaling", "shapes"),
    [
        ("tensor", [((1,), (1,))] * 3),
        ("vector", [((64, 1), (1, 32)), ((0, 1), (1, 32)), ((7, 1), (1, 200))]),
        ("block", [((64, 3), (3, 1)), ((0, 3), (3, 1)), ((7, 3), (3, 2))][:2]),
    ],
)
def test_requests_with_scales(scaling: str, shapes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [ac.GemmShape(64, 32, 272), ac.GemmShape(0, 32, 272), ac.GemmShape(7, 200, 272)][: len(shapes)]
    plain = ac.GroupedGemmRequest(
        ac.GroupedGemmShape(groups), dtype=D.F8E4M3, arch=SmArch.SM90A, layout_b=ac.GemmLayout.COL_MAJOR
    )
    request = dataclasses.replace(plain, scaling=scaling)
    problem = request.problem(0)
    for scale, side in ((problem.scale_a, 0), (problem.scale_b, 1)):
        assert scale is not None
        assert [(spec.shape, spec.dtype) for spec in scale.arrays] == [(pair[side], D.F32) for pair in shapes]
    # As those of a call with such arrays.
    extents = [(group.m, group.n, group.k) for group in groups]
    forms = scale_forms(LIST, len(groups), extents, *([pair[side] for pair in shapes] for side in (0, 1)))
    assert (problem.scale_a.form, problem.scale_b.form) == forms == (scaling, scaling)  # type: ignore[union-attr]
    operation = operation_of(request)
    biased = dataclasses.replace(request, epilogue=ac.GemmEpilogue(1.0, 2.0, bias=True))
    assert [slot.name for slot in operation.operands(biased)] == ["a", "b", "c", "scale_a", "scale_b", "bias", "out"]
    assert all(slot.listed for slot in operation.operands(biased))
    assert operation.names(request) == ("a", "b", "scale_a", "scale_b", "c", "bias")
    assert len({given.plan_key() for given in (plain, request, biased)}) == 3
    assert request.plan_key() == dataclasses.replace(request, epilogue=ac.GemmEpilogue(2.0)).plan_key()
    (best,) = {select.best_key(operation.search(given, devices.imagined(SmArch.SM90A))) for given in (request, request)}  # type: ignore[arg-type]
    assert (best.epilogue, best.scale_type) == (("lc", "f32") if scaling == "block" else ("scaled", ""))
    assert request.render_cu()[1] == best.name
    numpy_gpu.install(monkeypatch)
    for each in (request, biased):
        assert verify.run(each).ok


def test_requests_with_scales_that_no_kernel_reads() -> None:
    fp8 = dataclasses.replace(REQUEST, dtype=D.F8E4M3, layout_b=ac.GemmLayout.COL_MAJOR)
    with pytest.raises(UnsupportedError, match="bf16 operands take no scales on the device: fold them into alpha"):
        dataclasses.replace(REQUEST, scaling="tensor")
    for wrong in ("nvfp4", "group", "row"):
        with pytest.raises(
            InvalidOperandError, match=f"scaling is '{wrong}'; expected None, 'tensor', 'vector', 'block'"
        ):
            dataclasses.replace(fp8, scaling=wrong)
    shape = ac.GroupedGemmShape([ac.GemmShape(64, 128, 128), ac.GemmShape(64, 128, 256)])
    with pytest.raises(UnsupportedError, match=r"scale_a have different strides \(\[1, 2\]\).* a request are dense"):
        dataclasses.replace(fp8, shape=shape, scaling="block")
    named = ac.GemmEpilogue(tree=ac.EvtBuilder().add_bias("scale_b").build())
    assert dataclasses.replace(fp8, epilogue=named).scaling is None
    with pytest.raises(InvalidOperandError, match="operand 'scale_b', which is the name of one of the product's"):
        dataclasses.replace(fp8, epilogue=named, scaling="vector")


def test_requests_render_their_best_cell() -> None:
    source, name = REQUEST.render_cu()
    assert name in source
    assert name == select.best_key(GroupedSearch(REQUEST.problem(0), devices.imagined(SmArch.SM90A), SmArch.SM90A)).name
    old = dataclasses.replace(REQUEST, arch=SmArch.SM80)
    assert "grouped" in old.render_cu()[1]
    fp8 = dataclasses.replace(
        REQUEST, dtype=D.F8E4M3, layout_b=ac.GemmLayout.COL_MAJOR, fast_accum=True,
        shape=ac.GroupedGemmShape([ac.GemmShape(64, 32, 128)]),
    )  # fmt: skip
    fused = dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(bias=True, activation="silu"))
    assert "ops::silu" in fused.render_cu()[0]
    assert "atomr_cutlass::Silu" in dataclasses.replace(fused, arch=SmArch.SM80).render_cu()[0]
    assert "fastaccum" in fp8.render_cu()[1].lower() or "fast" in fp8.render_cu()[0].lower()
    assert fp8.plan_key() != dataclasses.replace(fp8, fast_accum=False).plan_key()


def test_requests_refuse_what_no_kernel_computes() -> None:
    with pytest.raises(InvalidOperandError, match="unknown activation 'nonsense'; valid: identity, relu"):
        dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(activation="nonsense"))
    columns = ac.EvtBuilder().input("x", "column").node("y", "add", "acc", "x").output("out", "y").build()
    with pytest.raises(UnsupportedError, match="read rows and scalars, not a column"):
        dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(tree=columns))
    observed = ac.EvtBuilder().quantize("e4m3", amax="top").build()
    with pytest.raises(UnsupportedError, match="store D alone"):
        dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(tree=observed))
    with pytest.raises(InvalidOperandError, match="the epilogue casts D to e4m3; out_dtype says bf16"):
        dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(tree=QUANTIZER), out_dtype=D.BF16)
    called_a = ac.EvtBuilder().add_bias("a").build()
    with pytest.raises(InvalidOperandError, match="has an operand 'a', which is the name of one of the product's"):
        dataclasses.replace(REQUEST, epilogue=ac.GemmEpilogue(tree=called_a))
    with pytest.raises(UnsupportedError, match="tells their epilogue no group's number"):
        dataclasses.replace(REQUEST, arch=SmArch.SM80, epilogue=ac.GemmEpilogue(tree=QUANTIZER)).render_cu()
    with pytest.raises(UnsupportedError, match="grouped bf16 operands give bf16, f32, not e4m3"):
        dataclasses.replace(REQUEST, arch=SmArch.SM100, epilogue=ac.GemmEpilogue(tree=QUANTIZER)).render_cu()
    with pytest.raises(UnsupportedError, match="read a bias in the place of c"):
        dataclasses.replace(
            REQUEST,
            arch=SmArch.SM80,
            epilogue=ac.GemmEpilogue(bias=True, beta=1.0),
            shape=ac.GroupedGemmShape(SHAPES[:1]),
        ).render_cu()
    with pytest.raises(UnsupportedError, match="rows of the result are contiguous"):
        dataclasses.replace(REQUEST, layout_c=ac.GemmLayout.COL_MAJOR).render_cu()
    with pytest.raises(UnsupportedError, match="there is nothing to plan"):
        dataclasses.replace(REQUEST, shape=ac.GroupedGemmShape(SHAPES[1:2])).render_cu()
