"""Epilogue trees in NumPy: every operation, operand, output and rounding, and how far kernels may be from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomr_cutlass import reference
from atomr_cutlass.arrays import numerics
from atomr_cutlass.errors import InvalidOperandError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import is_narrow, lower
from atomr_cutlass.generator.epilogue.ops import ACTIVATION_OPS, GRADIENT_OPS, OPS
from atomr_cutlass.generator.epilogue.tree import INPUT_DTYPES, EpilogueVisitorTree, Node, Output
from atomr_cutlass.reference.tree import FUNCTIONS
from atomr_cutlass.reference.tree_error import differing

Array = np.ndarray[Any, Any]

ACC = Node("acc")
NAN, INF = float("nan"), float("inf")


def _op(name: str, *inputs: Node, numbers: tuple[float | str, ...] = ()) -> Node:
    return Node(name, inputs, numbers)


def _input(name: str, kind: str = "row", dtype: D = D.F32) -> Node:
    return Node("input", (), (name, kind, dtype.value))


def _constant(value: float) -> Node:
    return Node("constant", (), (value,))


def _tree(result: Node, **stores: tuple[Output, Node]) -> EpilogueVisitorTree:
    """A tree whose outputs have the names of the arguments."""
    return EpilogueVisitorTree(
        result, [(Output(name, form.kind, form.dtype, form.reduction), node) for name, (form, node) in stores.items()]
    )


def _matrix(node: Node, dtype: D = D.F32) -> tuple[Output, Node]:
    return Output("", "matrix", dtype), node


def _mask(node: Node) -> tuple[Output, Node]:
    return Output("", "mask", None), node


def _reduced(node: Node, kind: str, reduction: str, dtype: D = D.F32) -> tuple[Output, Node]:
    return Output("", kind, dtype, reduction), node


def _of(values: Any, dtype: D = D.F32) -> Array:
    return numerics.saturating_cast(np.asarray(values, np.float64), dtype)


def _computed(op: str, *arguments: Any, numbers: tuple[float, ...] = ()) -> Array:
    """An operation in double, of numbers or of arrays of one dimension; its first argument is the accumulator."""
    first, *others = (np.atleast_2d(np.asarray(argument, np.float64)) for argument in np.broadcast_arrays(*arguments))
    names = ("x", "y")[: len(others)]
    tree = EpilogueVisitorTree(
        _op(op, ACC, *(_input(name, "matrix", D.F64) for name in names), numbers=numbers),
    )
    return reference.evaluate(tree, first, dict(zip(names, others, strict=True)), out_dtype=D.F64)["out"][0]


# ----------------------------------------------------------------------------------------------------------------------
# Operations
# ----------------------------------------------------------------------------------------------------------------------


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _gelu_tanh_slope(x: float) -> float:
    c = math.sqrt(2 / math.pi)
    t = math.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


DEFINITIONS: dict[str, Callable[..., float]] = {
    "negate": lambda x: -x,
    "absolute": math.fabs,
    "square": lambda x: x**2,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: x**-1,
    "exp": math.exp,
    "log": math.log,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
    "leaky_relu": lambda x, slope: x if x > 0 else x * slope,
    "clamp": lambda x, low, high: min(max(x, low), high),
    "add": math.fsum,
    "multiply": math.prod,
    "maximum": max,
    "minimum": min,
    "equal": lambda x, y: x == y,
    "not_equal": lambda x, y: x != y,
    "subtract": lambda x, y: math.fsum((x, -y)),
    "divide": lambda x, y: x * y**-1,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "d_relu": lambda dy, x: dy * (x > 0),
    "d_gelu": lambda dy, x: (
        dy * (0.5 * math.erfc(-x / math.sqrt(2)) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi))
    ),
    "d_gelu_tanh": lambda dy, x: dy * _gelu_tanh_slope(x),
    "d_silu": lambda dy, x: dy * (_sigmoid(x) + x * _sigmoid(x) * (1 - _sigmoid(x))),
    "d_sigmoid": lambda dy, x: dy * math.exp(-x) / (1 + math.exp(-x)) ** 2,
    "d_tanh": lambda dy, x: dy / math.cosh(x) ** 2,
    "fma": lambda x, y, z: x * y + z,
    "select": lambda mask, x, y: x if mask else y,
}
for _name in ("add", "multiply"):
    DEFINITIONS[_name] = lambda *numbers, _function=DEFINITIONS[_name]: _function(numbers)


def test_there_is_a_function_for_every_operation() -> None:
    assert set(FUNCTIONS) == set(OPS) == set(DEFINITIONS)


def test_functions_cannot_be_altered() -> None:
    with pytest.raises(TypeError):
        FUNCTIONS["relu"] = np.abs  # type: ignore[index]


@pytest.mark.parametrize("name", OPS)
def test_operation(name: str) -> None:
    rng = np.random.default_rng(0)
    # Whole numbers are equal now and then; halves are on the steps of piecewise functions.
    points = np.concatenate([rng.integers(-4, 5, 150), rng.integers(-8, 9, 50) / 2, rng.normal(size=200) * 3])
    arguments = [rng.permutation(points) for _ in range(OPS[name].arity)]
    if name in ("sqrt", "rsqrt", "log", "reciprocal", "divide"):
        arguments[-1] = np.abs(arguments[-1]) + 0.25
    numbers = tuple({"slope": 0.125, "low": -1.5, "high": 2.0}[number] for number in OPS[name].attributes)
    want = [float(DEFINITIONS[name](*map(float, element), *numbers)) for element in zip(*arguments, strict=True)]
    got = _computed(name, *arguments, numbers=numbers)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "arguments", "want"),
    [
        ("negate", (NAN,), NAN),
        ("absolute", (-INF,), INF),
        ("square", (-INF,), INF),
        ("sqrt", (-1.0,), NAN),
        ("rsqrt", (0.0,), INF),
        ("rsqrt", (-1.0,), NAN),
        ("reciprocal", (0.0,), INF),
        ("reciprocal", (-0.0,), -INF),
        ("exp", (1000.0,), INF),
        ("exp", (-INF,), 0.0),
        ("log", (0.0,), -INF),
        ("log", (-1.0,), NAN),
        ("divide", (0.0, 0.0), NAN),
        ("divide", (-1.0, 0.0), -INF),
        ("relu", (NAN,), NAN),
        ("relu", (-INF,), 0.0),
        ("gelu", (-INF,), NAN),
        ("silu", (INF,), INF),
        ("sigmoid", (-1000.0,), 0.0),
        ("tanh", (INF,), 1.0),
        ("maximum", (NAN, 1.0), NAN),
        ("maximum", (1.0, NAN), NAN),
        ("minimum", (NAN, 1.0), NAN),
        ("minimum", (1.0, NAN), NAN),
        ("equal", (NAN, NAN), 0.0),
        ("not_equal", (NAN, NAN), 1.0),
        ("less", (NAN, 1.0), 0.0),
        ("less_equal", (1.0, NAN), 0.0),
        ("greater", (NAN, 1.0), 0.0),
        ("greater_equal", (NAN, NAN), 0.0),
        ("equal", (INF, INF), 1.0),
        ("equal", (0.0, -0.0), 1.0),
        ("select", (NAN, 1.0, 2.0), 1.0),
        ("select", (-0.0, 1.0, 2.0), 2.0),
        ("select", (0.0, NAN, 2.0), 2.0),
        ("d_relu", (3.0, NAN), 0.0),
        ("d_relu", (NAN, 1.0), NAN),
        ("d_relu", (NAN, 0.0), 0.0),
        ("fma", (INF, 0.0, 1.0), NAN),
    ],
    ids=str,
)
def test_special_values(name: str, arguments: tuple[float, ...], want: float) -> None:
    np.testing.assert_array_equal(_computed(name, *arguments), [want])


def test_operations_with_numbers_keep_nan() -> None:
    assert np.isnan(_computed("clamp", NAN, numbers=(-1.0, 1.0)))
    assert np.isnan(_computed("leaky_relu", NAN, numbers=(0.1,)))
    assert _computed("clamp", -INF, numbers=(-INF, 1.0)) == -INF


@pytest.mark.parametrize("name", GRADIENT_OPS)
def test_derivatives_are_those_of_the_functions(name: str) -> None:
    # None of the points is 0, where relu has no derivative.
    x, step = np.linspace(-9, 9, 1000), 1e-5
    function = name.removeprefix("d_")
    differences = (_computed(function, x + step) - _computed(function, x - step)) / (2 * step)
    np.testing.assert_allclose(_computed(name, 1.0, x), differences, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(_computed(name, -3.0, x), -3.0 * _computed(name, 1.0, x), rtol=1e-15)


def _exactly(name: str, x: float) -> float:
    """A derivative with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        if name == "d_gelu":
            # The tail of the normal distribution as Laplace's continued fraction, good for |x| > 5.
            y = abs(Decimal(x))
            density = (-y * y / 2).exp() / (2 * Decimal(math.pi)).sqrt()
            fraction = y
            for k in range(400, 0, -1):
                fraction = y + k / fraction
            low = density / fraction - y * density
            return float(low if x < 0 else 1 - low)
        c = Decimal(2) / Decimal(math.pi)
        inner = {
            "d_sigmoid": Decimal(x),
            "d_silu": Decimal(x),
            "d_tanh": 2 * Decimal(x),
            "d_gelu_tanh": 2 * c.sqrt() * (Decimal(x) + Decimal("0.044715") * Decimal(x) ** 3),
        }[name]
        s, rest = 1 / (1 + (-inner).exp()), 1 / (1 + inner.exp())
        if name in ("d_sigmoid", "d_tanh"):
            return float(s * rest * (4 if name == "d_tanh" else 1))
        slope = Decimal(1)
        if name == "d_gelu_tanh":
            slope = 2 * c.sqrt() * (1 + 3 * Decimal("0.044715") * Decimal(x) ** 2)
        return float(s * (1 + Decimal(x) * slope * rest))


@pytest.mark.parametrize("name", [name for name in GRADIENT_OPS if name != "d_relu"])
def test_derivatives_keep_their_relative_error_where_they_are_tiny(name: str) -> None:
    ends = {"d_gelu": 37.0, "d_gelu_tanh": 20.0, "d_silu": 700.0, "d_sigmoid": 700.0, "d_tanh": 350.0}
    x = np.linspace(5.5, ends[name], 40)
    x = np.concatenate([-x, x])
    want = np.array([_exactly(name, float(value)) for value in x])
    assert (np.abs(want) > 1e-308).all()
    np.testing.assert_allclose(_computed(name, 1.0, x), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", GRADIENT_OPS)
def test_derivatives_have_their_limits(name: str) -> None:
    ends = np.array([1e3, 1e10, 1e200, 1.7e308, INF])
    above = 0.0 if name in ("d_sigmoid", "d_tanh") else 1.0
    np.testing.assert_array_equal(_computed(name, 1.0, ends), np.full(5, above))
    np.testing.assert_array_equal(np.abs(_computed(name, 1.0, -ends)), np.zeros(5))
    if name != "d_relu":
        assert np.isnan(_computed(name, 1.0, NAN))
    assert np.isnan(_computed(name, NAN, 1.0))


# ----------------------------------------------------------------------------------------------------------------------
# Operands and numbers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "as_broadcast"),
    [
        ("scalar", (), ()),
        ("scalar", (1,), ()),
        ("scalar", (1, 1, 1), ()),
        ("row", (5,), (5,)),
        ("row", (1, 5), (5,)),
        ("row", (3, 1, 5), (3, 1, 5)),
        ("row", (2, 1, 1, 5), (2, 1, 1, 5)),
        ("column", (4,), (4, 1)),
        ("column", (4, 1), (4, 1)),
        ("column", (2, 3, 4, 1), (2, 3, 4, 1)),
        ("matrix", (4, 5), (4, 5)),
        ("matrix", (1, 4, 5), (4, 5)),
        ("matrix", (2, 1, 4, 5), (2, 1, 4, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [D.F32, D.BF16, D.I8])
def test_operands_broadcast(kind: str, shape: tuple[int, ...], as_broadcast: tuple[int, ...], dtype: D) -> None:
    rng = np.random.default_rng(1)
    acc = rng.normal(size=(2, 3, 4, 5))
    x = _of(rng.normal(size=shape) * 5, dtype)
    tree = _tree(_op("subtract", ACC, _input("x", kind, dtype)), copy=_matrix(_input("x", kind, dtype), dtype))
    got = reference.evaluate(tree, acc, {"x": x}, out_dtype=D.F64)
    want = acc - x.astype(np.float64).reshape(as_broadcast)
    np.testing.assert_array_equal(got["out"], want)
    assert got["copy"].shape == acc.shape
    np.testing.assert_array_equal(got["copy"], np.broadcast_to(x.reshape(as_broadcast), acc.shape))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_masks_are_bits_of_columns(n: int, batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(n)
    chosen = rng.random((*batch, 3, n)) < 0.5
    packed = np.zeros((*batch, 3, -(-n // 8)), np.uint8)
    for at in np.ndindex(*batch, 3, n):
        packed[(*at[:-1], at[-1] // 8)] |= np.uint8(chosen[at] << (at[-1] % 8))
    # Bits after the last column are not read.
    given = packed | np.where(np.arange(packed.shape[-1]) == n // 8, np.uint8(0xFF << (n % 8) & 0xFF), np.uint8(0))
    acc = rng.normal(size=(2, 3, n))
    mask = _input("mask", "mask")
    tree = _tree(_op("select", mask, ACC, _constant(7.0)), copy=_mask(mask), kept=_mask(_op("multiply", mask, ACC)))
    got = reference.evaluate(tree, acc, {"mask": given}, out_dtype=D.F64)
    np.testing.assert_array_equal(got["out"], np.where(chosen, acc, 7.0))
    np.testing.assert_array_equal(got["copy"], np.broadcast_to(packed, (2, *packed.shape[-2:])))
    np.testing.assert_array_equal(got["kept"], got["copy"])


def test_a_bit_of_nan_is_set_and_of_negative_zero_is_not() -> None:
    acc = np.array([[NAN, -0.0, 0.0, 5e-324, -INF, 1.0, 0.0, 0.0, -1.0]])
    got = reference.evaluate(_tree(ACC, bits=_mask(ACC)), acc, {}, out_dtype=D.F64)
    np.testing.assert_array_equal(got["bits"], [[0b00111001, 1]])


@pytest.mark.parametrize("double", [False, True])
def test_numbers_are_those_of_the_kernel(double: bool) -> None:
    def kept(x: float) -> float:
        return x if double else float(np.float32(x))

    out_dtype = D.F64 if double else D.F32
    acc, big = np.array([[1.0]]), np.array([2**24 + 1], np.int32)
    wide = np.array([1 / 3])
    tree = _tree(
        _op("fma", _input("third", "scalar", D.F64), ACC, _constant(-kept(1 / 3))),
        constant=_matrix(_op("multiply", ACC, _constant(0.1)), D.F64),
        slope=_matrix(_op("leaky_relu", _op("negate", ACC), numbers=(0.1,)), D.F64),
        low=_matrix(_op("clamp", ACC, numbers=(-0.1, 0.1)), D.F64),
        whole=_matrix(_op("add", _input("big", "scalar", D.I32), _op("subtract", ACC, ACC)), D.F64),
        sums=_reduced(ACC, "scalar", "sum", out_dtype),
    )
    got = reference.evaluate(tree, acc, {"third": wide, "big": big}, out_dtype=out_dtype)
    assert got["out"] == 0.0
    assert got["constant"] == kept(0.1)
    assert got["slope"] == -kept(0.1)
    assert got["low"] == kept(0.1)
    assert got["whole"] == kept(2**24 + 1)


# ----------------------------------------------------------------------------------------------------------------------
# Roundings and outputs
# ----------------------------------------------------------------------------------------------------------------------

ROUGH = np.array([[0.0, -0.0, 1 / 3, 2.5, 3.5, -1e3, 1e6, -70000.0, 1e-9, INF, -INF, NAN]])


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_casts_stores_and_the_result_round_alike(dtype: D) -> None:
    want = numerics.saturating_cast(ROUGH, dtype)
    tree = _tree(_op("cast", ACC, numbers=(dtype.value,)), copy=_matrix(ACC, dtype))
    got = reference.evaluate(tree, ROUGH, {}, out_dtype=D.F64)
    np.testing.assert_array_equal(got["out"], want.astype(np.float64))
    assert got["copy"].dtype == want.dtype
    np.testing.assert_array_equal(got["copy"].astype(np.float64), want.astype(np.float64))
    got = reference.evaluate(_tree(_op("multiply", ACC, _constant(2.0))), ROUGH, {}, out_dtype=dtype, scale_d=0.5)
    assert got["out"].dtype == want.dtype
    np.testing.assert_array_equal(got["out"].astype(np.float64), want.astype(np.float64))


def test_a_cast_value_is_a_float_again() -> None:
    tree = _tree(_op("multiply", _op("cast", ACC, numbers=("i8",)), _constant(0.25)))
    got = reference.evaluate(tree, np.array([[2.5, 200.0, NAN]]), {}, out_dtype=D.F32)["out"]
    np.testing.assert_array_equal(got, [[0.5, 31.75, 0.0]])
    # The largest int32 has no float of its own; a double holds it.
    tree = _tree(_op("cast", ACC, numbers=("i32",)))
    for out_dtype, largest in ((D.F32, 2.0**31), (D.F64, 2.0**31 - 1)):
        assert reference.evaluate(tree, np.array([[1e10]]), {}, out_dtype=out_dtype)["out"] == largest


def test_scale_d_is_of_the_result_alone() -> None:
    tree = _tree(_op("relu", ACC), copy=_matrix(_op("relu", ACC), D.F8E4M3), top=_reduced(ACC, "scalar", "amax"))
    got = reference.evaluate(tree, np.array([[-9.0, 300.0]]), {}, out_dtype=D.F8E4M3, scale_d=2.0)
    np.testing.assert_array_equal(got["out"].astype(np.float64), [[0.0, 448.0]])
    np.testing.assert_array_equal(got["copy"].astype(np.float64), [[0.0, 288.0]])
    np.testing.assert_array_equal(got["top"], np.array([300.0], np.float32))


@pytest.mark.parametrize("out_dtype", [D.F16, D.F64])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_reductions(batch: tuple[int, ...], out_dtype: D) -> None:
    acc = np.random.default_rng(2).normal(size=(*batch, 4, 5)) - 0.25
    dtype = D.F64 if out_dtype is D.F64 else D.F32
    stores = {
        f"{kind}_{reduction}": _reduced(ACC, kind, reduction, dtype)
        for kind in ("row", "column", "scalar")
        for reduction in ("sum", "max", "amax")
    }
    got = reference.evaluate(_tree(ACC, **stores), acc, {}, out_dtype=out_dtype)
    functions = {"sum": np.sum, "max": np.max, "amax": lambda x, axis: np.max(np.abs(x), axis)}
    for name, (output, _) in stores.items():
        axis = {"row": -2, "column": -1, "scalar": None}[output.kind]
        want = functions[output.reduction](acc, axis)
        assert got[name].dtype == (np.float64 if dtype is D.F64 else np.float32)
        assert got[name].shape == {"row": (*batch, 5), "column": (*batch, 4), "scalar": (1,)}[output.kind]
        np.testing.assert_array_equal(got[name], np.reshape(want, got[name].shape).astype(got[name].dtype))


def test_reductions_of_what_is_the_same_for_many_elements() -> None:
    bias, ones = _input("bias", "row"), _op("exp", _constant(0.0))
    tree = _tree(ACC, rows=_reduced(bias, "row", "sum"), columns=_reduced(bias, "column", "sum"),
                 count=_reduced(ones, "scalar", "sum"))  # fmt: skip
    got = reference.evaluate(tree, np.zeros((2, 3, 2)), {"bias": np.array([1.0, 2.0], np.float32)}, out_dtype=D.F32)
    np.testing.assert_array_equal(got["rows"], [[3.0, 6.0]] * 2)
    np.testing.assert_array_equal(got["columns"], [[3.0] * 3] * 2)
    np.testing.assert_array_equal(got["count"], [12.0])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0, 2, 3), (2, 0, 3)])
def test_without_elements(shape: tuple[int, ...]) -> None:
    stores = {
        f"{kind}_{reduction}": _reduced(ACC, kind, reduction)
        for kind in ("row", "column", "scalar")
        for reduction in ("sum", "max", "amax")
    }
    tree = _tree(_op("gelu", ACC), mask=_mask(ACC), copy=_matrix(ACC, D.F16), **stores)
    acc = np.zeros(shape)
    got = reference.evaluate(tree, acc, {}, out_dtype=D.BF16)
    assert got["out"].shape == got["copy"].shape == shape
    assert got["mask"].shape == (*shape[:-1], -(-shape[-1] // 8))
    for name, (output, _) in stores.items():
        assert got[name].shape == {"row": (*shape[:-2], shape[-1]), "column": shape[:-1], "scalar": (1,)}[output.kind]
        assert (got[name] == {"sum": 0.0, "max": -INF, "amax": 0.0}[output.reduction]).all()
    assert reference.mismatches(tree, got, acc, 0.0, {}, out_dtype=D.BF16) == []


def test_nan_wins_reductions() -> None:
    acc = np.array([[1.0, NAN], [INF, 2.0], [-INF, 3.0]])
    tree = _tree(
        ACC, top=_reduced(ACC, "row", "max"), size=_reduced(ACC, "row", "amax"), all=_reduced(ACC, "row", "sum")
    )
    got = reference.evaluate(tree, acc, {}, out_dtype=D.F32)
    np.testing.assert_array_equal(got["top"], [INF, NAN])
    np.testing.assert_array_equal(got["size"], [INF, NAN])
    np.testing.assert_array_equal(got["all"], [NAN, NAN])


def test_arrays_are_new_and_operands_left_alone() -> None:
    acc, pre = np.ones((2, 3)), np.ones((2, 3))
    bias = np.ones((1, 6), np.float32)[:, ::2]
    tree = _tree(ACC, pre=_matrix(_input("p", "matrix", D.F64), D.F64), bias=_matrix(_input("b", "row")))
    for out_dtype in (D.F64, D.F32):
        got = reference.evaluate(tree, acc, {"p": pre, "b": bias}, out_dtype=out_dtype)
        for array in got.values():
            array[...] = 7
        assert (acc == 1).all()
        assert (pre == 1).all()
        assert (bias == 1).all()


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

OPERANDS: dict[str, Array] = {
    "one": np.ones(1, np.float32),
    "row": np.ones(5, np.float16),
    "column": np.ones((4, 1), np.float32),
    "pre": _of(np.ones((4, 5)), D.BF16),
    "bits": np.ones((4, 1), np.uint8),
}
READS_ALL = ACC
for _one in (
    _input("one", "scalar"),
    _input("row", "row", D.F16),
    _input("column", "column"),
    _input("pre", "matrix", D.BF16),
    _input("bits", "mask"),
):
    READS_ALL = _op("add", READS_ALL, _one)
BATCH = "whose batch dimensions broadcast to (3,)"
ROW = f"expected (5,) or (..., 1, 5), a row {BATCH}"
COLUMN = f"expected (4,) or (..., 4, 1), a column {BATCH}"


@pytest.mark.parametrize(
    ("name", "operand", "message"),
    [
        ("one", np.ones(2, np.float32), "one has shape (2,); expected one element, a scalar"),
        ("one", np.ones(0, np.float32), "one has shape (0,); expected one element, a scalar"),
        ("one", np.ones(1), "one is float64; expected float32"),
        ("row", np.ones(4, np.float16), f"row has shape (4,); {ROW}"),
        ("row", np.ones((2, 5), np.float16), f"row has shape (2, 5); {ROW}"),
        ("row", np.ones((2, 1, 5), np.float16), f"row has shape (2, 1, 5); {ROW}"),
        ("row", np.ones((1, 3, 1, 5), np.float16), f"row has shape (1, 3, 1, 5); {ROW}"),
        ("row", np.float16(1), f"row has shape (); {ROW}"),
        ("column", np.ones(5, np.float32), f"column has shape (5,); {COLUMN}"),
        ("column", np.ones((1, 4), np.float32), f"column has shape (1, 4); {COLUMN}"),
        ("pre", _of(np.ones((5, 4)), D.BF16), f"pre has shape (5, 4); expected (..., 4, 5), a matrix {BATCH}"),
        ("pre", _of(np.ones(5), D.BF16), f"pre has shape (5,); expected (..., 4, 5), a matrix {BATCH}"),
        ("pre", np.ones((4, 5), np.float16), "pre is float16; expected bfloat16"),
        ("pre", np.ones((4, 5), np.complex64), "pre is complex64; expected one of "),
        ("bits", np.ones((4, 5), np.uint8), f"bits has shape (4, 5); expected (..., 4, 1), a mask {BATCH}"),
        ("bits", np.ones((4, 1), np.bool_), "bits is bool; expected uint8, the bits of a mask"),
        ("more", np.ones(1), "more is no input of the tree; its inputs: "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_operands_that_do_not_fit(name: str, operand: Array, message: str) -> None:
    operands = {**OPERANDS, name: operand}
    for call in (
        reference.evaluate,
        lambda *args, **dtype: reference.tolerances(args[0], args[1], 0.0, *args[2:], **dtype),
    ):
        with pytest.raises(InvalidOperandError) as caught:
            call(EpilogueVisitorTree(READS_ALL), np.ones((3, 4, 5)), operands, out_dtype=D.F32)
        assert str(caught.value).startswith(message)


def test_operands_that_fit() -> None:
    tree = EpilogueVisitorTree(READS_ALL)
    got = reference.evaluate(tree, np.ones((3, 4, 5)), OPERANDS, out_dtype=D.F32)["out"]
    np.testing.assert_array_equal(got, np.full((3, 4, 5), 5.0) + ([1.0] + [0.0] * 4))
    for name in OPERANDS:
        rest = {key: operand for key, operand in OPERANDS.items() if key != name}
        with pytest.raises(InvalidOperandError, match=f"^{name} is missing: the tree reads it as a "):
            reference.evaluate(tree, np.ones((3, 4, 5)), rest, out_dtype=D.F32)


@pytest.mark.parametrize("acc", [np.ones(3), np.ones((2, 2), np.float32), np.float64(1.0)])
def test_accumulators_that_are_none(acc: Array) -> None:
    with pytest.raises(InvalidOperandError, match=r"^acc is float\d\d of shape .*; expected float64 of shape"):
        reference.evaluate(EpilogueVisitorTree(ACC), acc, {}, out_dtype=D.F32)


def test_a_result_of_another_type_than_the_tree_decides() -> None:
    tree = EpilogueVisitorTree(ACC, result_dtype=D.F16)
    assert reference.evaluate(tree, np.ones((1, 1)), {}, out_dtype=D.F16)["out"].dtype == np.float16
    with pytest.raises(InvalidOperandError, match=r"^out_dtype is f32; the tree decides that it is f16$"):
        reference.evaluate(tree, np.ones((1, 1)), {}, out_dtype=D.F32)


@pytest.mark.parametrize("error", [np.zeros((3, 2)), np.zeros((1, 2, 3)), -1.0])
def test_errors_of_the_accumulator_that_do_not_fit(error: Any) -> None:
    with pytest.raises(InvalidOperandError, match=r"^acc_error "):
        reference.tolerances(EpilogueVisitorTree(ACC), np.ones((2, 3)), error, {}, out_dtype=D.F32)


# ----------------------------------------------------------------------------------------------------------------------
# Tolerances
# ----------------------------------------------------------------------------------------------------------------------


def _bounds(
    node: Node, acc: Any, error: Any, operands: dict[str, Array] | None = None, *, out_dtype: D = D.F32, **scale: float
) -> Array:
    """The bounds of D, flat."""
    tree = EpilogueVisitorTree(node, [(Output("acc_", "matrix", D.F64), ACC)])
    acc = np.atleast_2d(np.asarray(acc, np.float64))
    return reference.tolerances(tree, acc, error, operands or {}, out_dtype=out_dtype, **scale)["out"].ravel()


@pytest.mark.parametrize("out_dtype", [D.F32, D.F64, D.F16])
def test_what_is_exact_in_float_has_no_tolerance(out_dtype: D) -> None:
    acc = np.arange(-6.0, 6.0).reshape(2, 3, 2)
    bias = np.array([0.5, -3.0], np.float32)
    biased = _op("add", _op("multiply", ACC, _constant(2.0)), _input("bias"))
    tree = _tree(
        _op("relu", _op("fma", biased, biased, ACC)),
        mask=_mask(_op("equal", biased, _constant(-3.0))),
        copy=_matrix(_op("square", biased), D.BF16),
        rows=_reduced(_op("cast", biased, numbers=("i8",)), "row", "sum"),
        all=_reduced(_op("negate", ACC), "scalar", "sum"),
        top=_reduced(biased, "column", "max"),
    )
    for scale_d in (None, 0.25):
        got = reference.tolerances(tree, acc, 0.0, {"bias": bias}, out_dtype=out_dtype, scale_d=scale_d)
        assert set(got) == {"out", "mask", "copy", "rows", "all", "top"}
        assert {name: bound.shape for name, bound in got.items()} == {
            "out": (2, 3, 2), "mask": (2, 3, 2), "copy": (2, 3, 2), "rows": (2, 2), "all": (1,), "top": (2, 3),
        }  # fmt: skip
        for bound in got.values():
            assert bound.dtype == np.float64
            assert (bound == 0.0).all()


def test_roundings_of_float_and_double() -> None:
    third = {"third": np.array([1 / 3], np.float32)}
    node = _op("multiply", ACC, _input("third", "scalar"))
    exact = float(third["third"][0]) * 1365.0
    step = abs(float(np.spacing(np.float32(exact))))
    assert exact != float(np.float32(exact))
    assert _bounds(node, 1365.0, 0.0, third, out_dtype=D.F32) in (0.0, step)
    assert _bounds(node, 1365.0, 1e-9, third, out_dtype=D.F32) == step
    # Rounded once more, with scale_d.
    assert _bounds(node, 1365.0, 0.0, third, scale_d=3.0) <= 4 * step
    # In double, it is exact.
    assert _bounds(node, 1365.0, 1e-9, third, out_dtype=D.F64) == pytest.approx(1e-9 / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "x", "error", "worst"),
    [
        ("absolute", 0.1, 0.5, 0.5),
        ("square", 0.5, 1.0, 2.0),
        ("relu", -1.0, 3.0, 2.0),
        ("sqrt", 4.0, 1.75, 0.5),
        ("exp", 0.0, 1.0, math.e - 1),
        ("sigmoid", 0.0, 50.0, 0.5),
        ("hardswish", -7.0, 5.5, 0.375),
        ("silu", 0.0, 3.0, 3.0 * _sigmoid(3.0)),
        ("gelu", 20.0, 40.0, 40.0),
        ("reciprocal", 1.0, 0.5, 1.0),
        ("reciprocal", 1.0, 1.5, INF),
        ("rsqrt", 1.0, 1.5, INF),
        ("log", 1.0, 1.0, INF),
        ("sqrt", 1.0, 1.5, INF),
        ("exp", 80.0, 20.0, INF),
        ("square", 1e19, 1e19, INF),
    ],
)
def test_errors_go_through_functions(name: str, x: float, error: float, worst: float) -> None:
    np.testing.assert_allclose(_bounds(_op(name, ACC), x, error), [worst], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "x", "x_error", "y", "y_error", "worst"),
    [
        ("add", 1.0, 0.25, 2.0, 0.5, 0.75),
        ("subtract", 1.0, 0.25, 2.0, 0.5, 0.75),
        ("multiply", 3.0, 0.25, 2.0, 0.5, 0.25 * 2 + 0.5 * 3 + 0.125),
        ("multiply", 0.0, 0.5, 0.0, 0.5, 0.25),
        ("divide", 1.0, 0.0, 2.0, 1.0, 0.5),
        ("divide", 1.0, 0.0, 2.0, 3.0, INF),
        ("maximum", 1.0, 0.5, 2.0, 0.25, 0.25),
        ("minimum", 1.0, 0.5, 2.0, 0.25, 0.5),
        ("less", 1.0, 0.5, 2.0, 0.25, 0.0),
        ("less", 1.0, 0.75, 2.0, 0.25, 1.0),
        ("equal", 1.0, 0.75, 2.0, 0.5, 1.0),
        ("not_equal", 1.0, 0.0, 1.0, 0.0, 0.0),
        ("not_equal", 1.0, 0.0, 1.0, 0.5, 1.0),
        ("d_relu", 5.0, 0.25, 1.0, 0.5, 0.25),
        ("d_relu", 5.0, 0.25, 0.5, 0.75, 5.0),
        ("d_relu", 5.0, 0.25, -0.5, 0.75, 5.25),
        ("d_relu", 5.0, 0.25, -1.0, 0.5, 0.0),
    ],
)
def test_errors_of_two_values(name: str, x: float, x_error: float, y: float, y_error: float, worst: float) -> None:
    # The accumulator is an array of both, and each is picked by a column of the identity.
    acc, error = np.array([[x], [y]]), np.array([[x_error], [y_error]])
    first, second = (
        _op("select", _input(which, "column"), ACC, _constant(value)) for which, value in (("f", x), ("s", y))
    )
    pick = {"f": np.array([1, 0], np.float32), "s": np.array([0, 1], np.float32)}
    bounds = _bounds(_op(name, first, second), acc, error, pick)
    assert bounds.max() <= worst * (1 + 1e-6)
    # Both at once: of an accumulator that is 1 within 1, (acc - 1) times an error is one within it.
    pushed = [
        _op("fma", _op("subtract", ACC, _constant(1.0)), _constant(by), _constant(at))
        for at, by in ((x, x_error), (y, y_error))
    ]
    np.testing.assert_allclose(_bounds(_op(name, *pushed), 1.0, 1.0), [worst], rtol=1e-5, atol=0)


def test_what_is_selected_may_be_either() -> None:
    node = _op("select", _op("greater", ACC, _constant(0.0)), _constant(5.0), _op("exp", ACC))
    bounds = _bounds(node, [-0.5, 0.25, 2.0], 0.5)
    assert bounds[0] == pytest.approx(5 - math.exp(-0.5) + math.exp(0) - math.exp(-0.5), rel=0.1)
    assert bounds[1] == pytest.approx(5 - math.exp(0.25) + math.exp(0.75) - math.exp(0.25), rel=0.1)
    assert bounds[2] == 0.0
    # An interval around 0, though neither of its ends is.
    assert _bounds(_op("select", ACC, _constant(1.0), _constant(4.0)), 0.25, 0.5) == 3.0


@pytest.mark.parametrize(
    ("dtype", "x", "error", "bound"),
    [
        (D.F8E4M3, 1.0, 0.03, 0.0),
        (D.F8E4M3, 1.0, 0.05, 0.0625),
        (D.F8E4M3, 1.0, 0.07, 0.125),
        (D.F8E4M3, 448.0, 1e6, 896.0),
        (D.I8, 2.4, 0.05, 0.0),
        (D.I8, 2.4, 0.2, 1.0),
        (D.I32, 7.0, 0.0, 0.0),
        (D.F16, 65504.0, 100.0, INF),
        (D.BF16, 1.0, 2**-9, 0.0),
        (D.BF16, 1.0, 2**-7, 2**-7),
    ],
)
def test_roundings_take_a_step_where_an_error_reaches_over_it(dtype: D, x: float, error: float, bound: float) -> None:
    assert _bounds(ACC, x, error, out_dtype=dtype) == bound
    assert _bounds(_op("cast", ACC, numbers=(dtype.value,)), x, error) == bound
    tree = _tree(ACC, copy=_matrix(ACC, dtype))
    assert reference.tolerances(tree, np.array([[x]]), error, {}, out_dtype=D.F32)["copy"] == bound


def test_what_has_no_bound_and_what_is_certain() -> None:
    nothing = _op("subtract", _op("exp", ACC), _op("exp", ACC))
    np.testing.assert_array_equal(_bounds(nothing, [1.0, 100.0, -INF, NAN], 0.0) == INF, [False, True, False, False])
    for certain in (_op("less", nothing, nothing), _op("select", _constant(0.0), nothing, ACC)):
        assert _bounds(certain, 100.0, 0.0) <= 1.0
    # Not a number for certain, infinite for certain, and errors that are no numbers where the accumulator is none.
    bounds = _bounds(ACC, [NAN, INF, -INF, 1.0, 1.0], [[NAN, NAN, INF, NAN, INF]])
    np.testing.assert_array_equal(bounds, [0.0, 0.0, 0.0, INF, INF])
    assert _bounds(_op("sqrt", ACC), -1.0, 0.5) == 0.0
    assert _bounds(_op("maximum", _op("sqrt", ACC), _op("exp", ACC)), -1.0, 0.5) == 0.0


def test_subnormal_numbers_may_be_flushed() -> None:
    tiny = 2.0**-130
    assert tiny <= _bounds(ACC, tiny, 0.0) <= 2.0**-124
    assert _bounds(_op("greater", ACC, _constant(0.0)), tiny, 0.0) == 1.0
    assert _bounds(_op("multiply", ACC, _constant(2.0**100)), tiny, 0.0) >= 2.0**-30
    assert _bounds(ACC, 0.0, 0.0) == 0.0
    assert _bounds(ACC, tiny, 0.0, out_dtype=D.F64) == 0.0


def test_the_sign_of_a_computed_zero_is_not_known() -> None:
    for node in (_op("reciprocal", ACC), _op("rsqrt", ACC), _op("divide", _constant(1.0), ACC)):
        assert _bounds(node, 0.0, 0.0) == INF
        assert _bounds(node, 0.25, 0.0) < 1e-5
    assert np.isnan(_computed("divide", 0.0, 0.0))
    assert _bounds(_op("divide", ACC, ACC), 0.0, 0.0) == 0.0
    zero = {"zero": np.zeros(1, np.float32)}
    assert _bounds(_op("divide", ACC, _input("zero", "scalar")), 1.0, 0.0, zero) == 0.0


def test_derivatives_that_nearly_vanish_make_anything_of_infinity() -> None:
    dy = {"dy": np.array([INF], np.float32)}
    for name in GRADIENT_OPS:
        bounds = _bounds(_op(name, _input("dy", "scalar"), ACC), [-300.0, -1.0, 1.0], 0.0, dy)
        np.testing.assert_array_equal(bounds, [0.0 if name == "d_relu" else INF, 0.0, 0.0])


# How far the narrow forms of activations are from the exact value, in units of it; tests/cpp/test_epilogue_ops.cpp has
# the same, but for those that are as exact as float32 where they are not small.
NARROW = {
    "gelu": 1.68 * 2**-15,
    "gelu_tanh": 1.03 * 2**-14,
    "silu": 1.31 * 2**-16,
    "sigmoid": 1.31 * 2**-16,
    "tanh": 1.78 * 2**-16,
    "d_gelu": 1.47 * 2**-15,
}


def _activated(name: str) -> Node:
    return _op(name, _input("dy", "scalar"), ACC) if name in GRADIENT_OPS else _op(name, ACC)


def _activation_bounds(name: str, x: Any, out_dtype: D, *more: tuple[Output, Node]) -> Array:
    """The bounds of the activation alone, which only its maxima show: they are f32 whatever is stored."""
    node = _activated(name)
    stores = {f"more{number}": operand_node for number, operand_node in enumerate(more)}
    tree = _tree(node, values=_reduced(node, "row", "max"), **stores)
    operands = {"dy": np.ones(1, np.float32)} if name in GRADIENT_OPS else {}
    return reference.tolerances(tree, np.atleast_2d(x), 0.0, operands, out_dtype=out_dtype)["values"]


@pytest.mark.parametrize("name", [*ACTIVATION_OPS, *GRADIENT_OPS])
def test_activations_are_less_exact_for_16_bits(name: str) -> None:
    # Neither next to a root nor far out, where functions are small.
    x = np.array([-2.75, -1.75, -0.25, 0.5, 1.25, 3.0])
    values = np.abs(_computed(name, 1.0, x) if name in GRADIENT_OPS else _computed(name, x))
    exact = _activation_bounds(name, x, D.F32)
    assert (exact <= 2**-20 * (values + 0.5)).all()
    for out_dtype in (D.F16, D.BF16, D.F8E4M3, D.I8):
        bounds = _activation_bounds(name, x, out_dtype)
        if name in NARROW:
            assert (bounds >= NARROW[name] * values).all()
            assert (bounds <= 1.6 * NARROW[name] * values + exact).all()
        else:
            assert (bounds <= 3 * exact).all()


def test_activations_are_exact_for_more_than_16_bits() -> None:
    x = np.linspace(-4, 4, 9)
    exact, narrow = _activation_bounds("gelu", x, D.F32), _activation_bounds("gelu", x, D.BF16)
    assert (exact[1:] < narrow[1:])[x[1:] != 0].all()
    for wide in (D.F32, D.I32, D.F64):
        np.testing.assert_array_equal(_activation_bounds("gelu", x, D.BF16, _matrix(ACC, wide)), exact)
    for other in (_matrix(ACC, D.F16), _matrix(ACC, D.I8), _mask(ACC), _reduced(ACC, "scalar", "sum")):
        np.testing.assert_array_equal(_activation_bounds("gelu", x, D.BF16, other), narrow)


@pytest.mark.parametrize("out_dtype", [D.F64, D.F32, D.F16, D.BF16, D.I8])
@pytest.mark.parametrize("stored", [D.F32, D.I32, D.BF16, D.F8E5M2, None])
def test_kernels_have_the_narrow_forms_where_tolerances_allow_for_them(out_dtype: D, stored: D | None) -> None:
    node = _op("gelu", _op("add", ACC, _input("b", "row", D.F64)))
    tree = _tree(node, copy=_mask(ACC) if stored is None else _matrix(node, stored), sums=_reduced(node, "row", "sum"))
    narrow = is_narrow(tree.program, out_dtype)
    assert narrow is (out_dtype.bits <= 16 and (stored is None or stored.bits <= 16))
    assert ("ops::narrow;" in lower(tree.program, D.F32, narrow=narrow)) is narrow
    assert "ops::gelu(" in lower(tree.program, D.F32, narrow=narrow)


def test_narrow_forms_at_minus_infinity() -> None:
    for name in ACTIVATION_OPS:
        for out_dtype in (D.F32, D.F16):
            bounds = _activation_bounds(name, [-INF, INF, NAN], out_dtype)
            free = name in ("gelu", "gelu_tanh") and out_dtype is D.F16
            np.testing.assert_array_equal(bounds == INF, [free, False, False])


def test_reductions_add_errors_and_roundings() -> None:
    acc = np.linspace(-1, 3, 12).reshape(3, 4)
    tree = _tree(
        ACC,
        rows=_reduced(ACC, "row", "sum"),
        all=_reduced(ACC, "scalar", "sum"),
        top=_reduced(ACC, "column", "max"),
        size=_reduced(ACC, "scalar", "amax"),
    )
    exact = reference.tolerances(tree, acc, 0.0, {}, out_dtype=D.F32)
    assert (exact["rows"] < 6 * 2**-24 * np.abs(acc).sum(0)).all()
    assert (exact["top"] <= 2**-23).all()
    got = reference.tolerances(tree, acc, 0.5, {}, out_dtype=D.F32)
    np.testing.assert_allclose(got["rows"], np.full(4, 1.5), rtol=1e-5)
    np.testing.assert_allclose(got["all"], [6.0], rtol=1e-5)
    np.testing.assert_allclose(got["top"], np.full(3, 0.5), rtol=1e-5)
    np.testing.assert_allclose(got["size"], [0.5], rtol=1e-5)
    acc_error = np.where(np.arange(12).reshape(3, 4) == 5, INF, 0.0)
    for name, bound in reference.tolerances(tree, acc, acc_error, {}, out_dtype=D.F32).items():
        assert np.isinf(bound).any(), name
        assert (np.isinf(bound).sum() == 1) == (name != "out" or bound.size == 12)
    # Sums that overflow, and infinities that do not.
    assert reference.tolerances(tree, np.full((3, 4), 1e38), 0.0, {}, out_dtype=D.F32)["all"] == INF
    assert reference.tolerances(tree, np.full((3, 4), INF), 0.0, {}, out_dtype=D.F32)["all"] == 0.0


def test_a_sum_of_whole_numbers_is_exact_while_they_are() -> None:
    tree = _tree(ACC, all=_reduced(ACC, "scalar", "sum"))
    for value, exact in ((1.0, True), (2.0**21, True), (2.0**23, False), (0.3, False)):
        bound = reference.tolerances(tree, np.full((2, 4), value), 0.0, {}, out_dtype=D.F32)["all"]
        assert bool(bound == 0.0) is exact, value


# ----------------------------------------------------------------------------------------------------------------------
# Agreement
# ----------------------------------------------------------------------------------------------------------------------


def test_what_a_disagreement_says() -> None:
    acc = np.arange(12.0).reshape(3, 4)
    positive = _op("greater", ACC, _constant(5.0))
    tree = _tree(ACC, copy=_matrix(ACC, D.F16), mask=_mask(positive), all=_reduced(ACC, "scalar", "sum"))
    right = reference.evaluate(tree, acc, {}, out_dtype=D.F32)

    def said(error: float = 0.0, **changed: Array) -> list[str]:
        return reference.mismatches(tree, {**right, **changed}, acc, error, {}, out_dtype=D.F32)

    assert said() == []
    wrong = right["out"].copy()
    wrong[1, 2:] = 1.25, NAN
    assert said(out=wrong) == ["out[1, 2] is 1.25, expected 6 within 0 (2 of 12 elements differ)"]
    assert said(0.5, out=wrong)[0] == "out[1, 2] is 1.25, expected 6 within 0.5 (2 of 12 elements differ)"
    assert said(all=right["all"] + 1) == ["all[0] is 67, expected 66 within 0 (1 of 1 elements differ)"]
    assert said(mask=right["mask"] ^ np.uint8(4)) == ["mask[0, 2] is 1, expected 0 (3 of 12 bits differ)"]
    assert said(mask=right["mask"] | np.uint8(0x60)) == ["mask has 6 bits set after its 4 columns, expected none"]
    assert said(copy=right["copy"].astype(np.float32)) == [
        "copy is float32 of shape (3, 4), expected float16 of shape (3, 4)"
    ]
    assert said(out=right["out"].T) == ["out is float32 of shape (4, 3), expected float32 of shape (3, 4)"]
    assert said(more=wrong) == ["more is no output of the tree"]
    del right["copy"]
    assert said() == ["copy is missing"]


def test_what_is_beyond_a_bound_is_counted_by_elements_and_bits() -> None:
    nan, inf = math.nan, math.inf
    have, want = np.array([[nan, inf, 1.0, 2.0, nan]]), np.array([[nan, inf, 1.25, 3.0, 0.0]])
    bound = np.array([[0.0, 0.0, 0.25, 0.5, 1.0]])
    assert differing("x", have, want, bound) == {"x[0, 3] is 2, expected 3 within 0.5 (2 of 5 elements differ)": 2}
    have, want = np.array([[0b10000101]], np.uint8), np.array([[0b00000110]], np.uint8)
    either = np.array([[1.0, 0.0, 0.0]])  # and five bits of padding
    assert differing("x", have, want, either) == {
        "x has 1 bits set after its 3 columns, expected none": 1,
        "x[0, 1] is 0, expected 1 (1 of 3 bits differ)": 1,
    }


def test_bits_may_differ_where_a_value_may_be_zero_or_not() -> None:
    acc = np.array([[0.25, 0.0, 1.0, -0.5, NAN]])
    tree = _tree(ACC, bits=_mask(_op("relu", ACC)), close=_mask(ACC))
    right = reference.evaluate(tree, acc, {}, out_dtype=D.F32)
    # relu is 0 or not at the first two within the error; acc itself also at the fourth.
    for bit, known in enumerate([False, False, True, True, True]):
        bits = {**right, "bits": right["bits"] ^ np.uint8(1 << bit)}
        assert bool(reference.mismatches(tree, bits, acc, 0.25, {}, out_dtype=D.F32)) is known
        close = {**right, "close": right["close"] ^ np.uint8(1 << bit)}
        assert bool(reference.mismatches(tree, close, acc, 0.5, {}, out_dtype=D.F32)) is (bit in (2, 4))
        assert reference.mismatches(tree, bits, acc, 0.0, {}, out_dtype=D.F32)


def test_nan_and_infinity_agree_with_themselves() -> None:
    acc = np.array([[NAN, INF, -INF, 1.0]])
    tree = EpilogueVisitorTree(ACC)

    def agree(*values: float) -> bool:
        got = {"out": np.array([values], np.float32)}
        return reference.mismatches(tree, got, acc, 1e-3, {}, out_dtype=D.F32) == []

    assert agree(NAN, INF, -INF, 1.0005)
    for wrong in ((1.0, INF, -INF, 1.0), (NAN, -INF, -INF, 1.0), (NAN, INF, 3e38, 1.0), (NAN, INF, -INF, NAN)):
        assert not agree(*wrong)
    # 4e38 is no float: a kernel has infinity, and what it makes of it.
    got = {"out": np.array([[NAN]], np.float32)}
    tree = EpilogueVisitorTree(_op("subtract", _op("square", ACC), _op("square", ACC)))
    assert reference.mismatches(tree, got, np.array([[2e19]]), 0.0, {}, out_dtype=D.F32) == []


# ----------------------------------------------------------------------------------------------------------------------
# Float32, simulated
# ----------------------------------------------------------------------------------------------------------------------

F = np.float32


def _single(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: np.asarray(function(x.astype(np.float64)), F)


_erfc = _single(reference.erfc)


def _sigmoid32(x: Array) -> Array:
    return F(1) / (F(1) + np.exp(-x))


def _cubic32(x: Array) -> Array:
    return F(1.5957691) * x * (F(1) + F(0.044715) * x * x)


def _gelu_slope32(x: Array) -> Array:
    x = np.clip(x, F(-40), F(40))
    return F(0.5) * _erfc(x * F(-0.70710678)) + x * F(0.39894228) * np.exp(F(-0.5) * x * x)


def _gelu_tanh_slope32(x: Array) -> Array:
    x = np.clip(x, F(-10), F(10))
    rise = F(1.5957691) * (F(1) + F(0.134145) * x * x)
    return _sigmoid32(_cubic32(x)) * (F(1) + x * rise * _sigmoid32(-_cubic32(x)))


def _silu_slope32(x: Array) -> Array:
    x = np.clip(x, F(-88), F(88))
    return _sigmoid32(x) * (F(1) + x * _sigmoid32(-x))


def _tanh_slope32(x: Array) -> Array:
    power = np.exp(F(-2) * np.abs(x))
    return F(4) * power / ((F(1) + power) * (F(1) + power))


# What rounds as in the reference's own function, if that is given float32, has no entry.
SINGLE: dict[str, Callable[..., Array]] = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": _sigmoid32,
    "silu": lambda x: x * _sigmoid32(x),
    "hardswish": lambda x: x * np.clip(x * F(1 / 6) + F(0.5), F(0), F(1)),
    "gelu": lambda x: F(0.5) * x * _erfc(x * F(-0.70710678)),
    "gelu_tanh": lambda x: x * _sigmoid32(_cubic32(x)),
    "rsqrt": lambda x: F(1) / np.sqrt(x),
    "reciprocal": lambda x: F(1) / x,
    "fma": lambda x, y, z: np.asarray(x.astype(np.float64) * y + z, F),
    "d_gelu": lambda dy, x: dy * _gelu_slope32(x),
    "d_gelu_tanh": lambda dy, x: dy * _gelu_tanh_slope32(x),
    "d_silu": lambda dy, x: dy * _silu_slope32(x),
    "d_sigmoid": lambda dy, x: dy * (_sigmoid32(x) * _sigmoid32(-x)),
    "d_tanh": lambda dy, x: dy * _tanh_slope32(x),
}


def _simulated(
    tree: EpilogueVisitorTree, acc: Array, operands: dict[str, Array], out_dtype: D, rng: np.random.Generator
) -> dict[str, Array]:
    """What a kernel in float32 writes: every operation rounds, and sums are in an order of their own."""
    narrow = NARROW if is_narrow(tree.program, out_dtype) else {}
    values: list[Array] = []
    shape = acc.shape
    kinds = {operand.name: operand.kind for operand in tree.inputs}
    with np.errstate(all="ignore"):
        for node in tree.nodes:
            inputs = [values[tree.index(operand)] for operand in node.inputs]
            if node.op == "acc":
                value = acc
            elif node.op == "constant":
                value = F(node.attributes[0])
            elif node.op == "input":
                name = str(node.attributes[0])
                value = operands[name]
                if kinds[name] == "mask":
                    value = np.unpackbits(value, axis=-1, count=shape[-1], bitorder="little")
                elif kinds[name] == "column":
                    value = value.reshape(-1, 1)
            elif node.op == "cast":
                value = numerics.saturating_cast(inputs[0], D(node.attributes[0]))
            else:
                function = SINGLE.get(node.op, FUNCTIONS[node.op])
                value = function(*inputs, *(F(number) for number in node.attributes))
                if node.op in narrow:
                    value = value * (1 + narrow[node.op] * rng.uniform(-1, 1, shape))
            values.append(np.broadcast_to(np.asarray(value).astype(F), shape))
        got = {"out": numerics.saturating_cast(values[tree.index(tree.result)], out_dtype)}
        for output, node in tree.stores:
            value = values[tree.index(node)]
            if output.kind == "mask":
                got[output.name] = np.packbits(value != 0, axis=-1, bitorder="little")
            elif output.reduction:
                axis = {"row": 0, "column": 1, "scalar": None}[output.kind]
                shuffled = rng.permuted(value.reshape(-1) if axis is None else value, axis=axis or 0)
                if output.reduction == "sum":
                    reduced = np.cumsum(shuffled, axis=axis, dtype=F).take(-1, axis=axis)
                else:
                    reduced = np.max(value if output.reduction == "max" else np.abs(value), axis=axis)
                got[output.name] = np.atleast_1d(reduced)
            else:
                got[output.name] = np.array(numerics.saturating_cast(value, output.dtype or D.F32))
    return got


_LEAVES = (
    _input("one", "scalar"),
    _input("row", "row", D.F16),
    _input("column", "column"),
    _input("pre", "matrix", D.BF16),
    _input("whole", "row", D.I8),
    _input("bits", "mask"),
    _constant(0.0),
    _constant(0.1),
    _constant(-2.0),
)
M, N = 5, 11


@st.composite
def trees(draw: st.DrawFn) -> EpilogueVisitorTree:
    # By number: to draw a node itself would print it, with every path to what it shares.
    def drawn() -> Node:
        return pool[draw(st.integers(0, len(pool) - 1))]

    pool = [ACC, *draw(st.lists(st.sampled_from(_LEAVES), max_size=3, unique_by=id))]
    # Often acc itself or what was last made of it, so that there are few trees in which nothing varies.
    value = ACC
    for _ in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from([*OPS, "cast"]))
        if name == "cast":
            numbers, arity = (draw(st.sampled_from([dtype.value for dtype in INPUT_DTYPES])),), 1
        else:
            numbers, arity = {"clamp": (-0.7, 1.3), "leaky_relu": (0.1,)}.get(name, ()), OPS[name].arity
        chosen = [drawn() for _ in range(arity)]
        chosen[draw(st.integers(0, arity - 1))] = value
        value = Node(name, tuple(chosen), numbers)
        pool.append(value)
    outputs = st.sampled_from(
        [
            _matrix(ACC, D.BF16), _matrix(ACC, D.F8E5M2), _matrix(ACC, D.I8), _mask(ACC), _reduced(ACC, "row", "sum"),
            _reduced(ACC, "column", "sum"), _reduced(ACC, "scalar", "sum"), _reduced(ACC, "row", "max"),
            _reduced(ACC, "scalar", "amax"),
        ]
    )  # fmt: skip
    stores = {f"o{number}": (draw(outputs)[0], drawn()) for number in range(draw(st.integers(0, 3)))}
    return _tree(value, **stores)


def _operands(rng: np.random.Generator, tree: EpilogueVisitorTree, spread: float) -> dict[str, Array]:
    shapes = {"scalar": (1,), "row": (N,), "column": (M,), "matrix": (M, N)}
    return {
        operand.name: rng.integers(0, 256, (M, 2), np.uint8)
        if operand.dtype is None
        else _of(rng.normal(size=shapes[operand.kind]) * spread, operand.dtype)
        for operand in tree.inputs
    }


@settings(max_examples=200, deadline=None)
@given(
    tree=trees(),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 3.0, 30.0]),
    error=st.sampled_from([0.0, 2.0**-20, 2.0**-9, 0.5]),
    whole=st.booleans(),
    out_dtype=st.sampled_from([D.F32, D.F16, D.BF16, D.F8E4M3, D.I8]),
)
def test_float32_stays_within_the_tolerances(
    tree: EpilogueVisitorTree, seed: int, spread: float, error: float, whole: bool, out_dtype: D
) -> None:
    rng = np.random.default_rng(seed)
    acc = rng.normal(size=(M, N)) * spread
    if whole:
        acc = np.rint(acc)
    operands = _operands(rng, tree, spread)
    seen = (acc + error * rng.uniform(-1, 1, (M, N))).astype(np.float32)
    got = _simulated(tree, seen, operands, out_dtype, rng)
    off = np.maximum(error, np.abs(seen - acc))
    assert reference.mismatches(tree, got, acc, off, operands, out_dtype=out_dtype) == []


RELU = _op("relu", _op("add", ACC, _input("row", "row", D.F16)))
STACK = _tree(
    _op("multiply", RELU, _input("column", "column")),
    kept=_mask(RELU),
    rows=_reduced(RELU, "row", "sum"),
    all=_reduced(RELU, "scalar", "sum"),
    top=_reduced(RELU, "column", "max"),
    copy=_matrix(_op("gelu", RELU), D.BF16),
)


def _faulty(fault: str) -> EpilogueVisitorTree:
    biased = _op("add", ACC, _input("row", "row", D.F16))
    if fault == "bias twice":
        value = _op("relu", _op("add", biased, _input("row", "row", D.F16)))
    elif fault == "no bias":
        value = _op("relu", ACC)
    elif fault == "no relu":
        value = biased
    else:
        value = _op("relu", biased)
    other = _op("gelu_tanh", value) if fault == "another function" else _op("gelu", value)
    return _tree(
        _op("multiply", value, _input("column", "column")),
        kept=_mask(value),
        rows=_reduced(value, "row", "max" if fault == "another reduction" else "sum"),
        all=_reduced(value, "scalar", "sum"),
        top=_reduced(value, "column", "amax" if fault == "no relu" else "max"),
        copy=_matrix(other, D.BF16),
    )


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("none", set()),
        ("bias twice", {"out", "kept", "rows", "all", "top", "copy"}),
        ("no bias", {"out", "kept", "rows", "all", "top", "copy"}),
        ("no relu", {"out", "kept", "rows", "all", "top", "copy"}),
        ("wrong row", {"out", "kept", "rows", "all", "top", "copy"}),
        ("wrong column", {"out"}),
        ("another function", {"copy"}),
        ("another reduction", {"rows"}),
        ("tile left out of a sum", {"all"}),
        ("row added twice", {"rows"}),
        ("mask by bytes reversed", {"kept"}),
        ("mask not padded", {"kept"}),
        ("one element", {"out"}),
        ("one bit", {"kept"}),
        ("a step of the result", {"out"}),
        ("rows as columns", {"rows"}),
    ],
)
def test_faults_are_found(fault: str, found: set[str]) -> None:
    rng = np.random.default_rng(5)
    m, n = 33, 67
    acc = rng.normal(size=(m, n))
    row, column = _of(rng.normal(size=n), D.F16), _of(rng.normal(size=m))
    given = {"row": row, "column": column}
    seen = dict(given)
    if fault == "wrong row":
        seen["row"] = np.roll(row, 1)
    elif fault == "wrong column":
        seen["column"] = np.roll(column, 1)
    error = 2.0**-16
    got = _simulated_large(_faulty(fault), (acc + error * rng.uniform(-1, 1, (m, n))).astype(F), seen, rng)
    value = np.maximum(acc + row.astype(np.float64), 0.0)
    if fault == "tile left out of a sum":
        got["all"] -= F(value[:8, :8].sum())
    elif fault == "row added twice":
        got["rows"] += value[7].astype(F)
    elif fault == "mask by bytes reversed":
        got["kept"] = np.packbits(np.unpackbits(got["kept"], axis=-1, bitorder="little"), axis=-1)
    elif fault == "mask not padded":
        got["kept"][:, -1] |= np.uint8(0xF0)
    elif fault == "one element":
        got["out"][-1, -1] = got["out"][-1, -1] + F(0.01)
    elif fault == "one bit":
        got["kept"][16, 3] ^= np.uint8(1 << int(np.argmax(value[16, 24:32] > 0.01)))
    elif fault == "a step of the result":
        got["out"] = np.asarray(got["out"] * F(1 + 2**-8), F)
    elif fault == "rows as columns":
        got["rows"] = np.roll(got["rows"], 1)
    lines = reference.mismatches(STACK, got, acc, error, given, out_dtype=D.F32)
    assert {line.partition("[")[0].partition(" ")[0] for line in lines} == found


def _simulated_large(
    tree: EpilogueVisitorTree, acc: Array, operands: dict[str, Array], rng: np.random.Generator
) -> dict[str, Array]:
    return {name: array.copy() for name, array in _simulated(tree, acc, operands, D.F32, rng).items()}
