"""Traced functions: what becomes of what they do, what they may return, and what is refused where."""

# ruff: noqa: ARG005, PLW0108 - lambdas name what they are called with, and are what is traced

from __future__ import annotations

import functools
import importlib.util
import math
import operator
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import epilogue as ep
from atomr_cutlass.epilogue import EpilogueVisitorTree, Operand, Traced, Value, operand_of, readings, trace
from atomr_cutlass.errors import CutlassError, InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.ops import OPS
from atomr_cutlass.generator.epilogue.tree import INPUT_DTYPES, Node, Output
from atomr_cutlass.reference.tree import evaluate

ACC = Node("acc")
X = Node("input", (), ("x", "matrix", "bf16"))
MATRIX = Operand("matrix", D.BF16)


def _node(op: str, *inputs: Node | float, numbers: tuple[float | str, ...] = ()) -> Node:
    return Node(op, tuple(value if isinstance(value, Node) else _constant(value) for value in inputs), numbers)


def _constant(x: float) -> Node:
    return Node("constant", (), (float(x),))


def _tree(function: Callable[..., Any], **operands: Any) -> EpilogueVisitorTree:
    return trace(function, operands).tree


# ----------------------------------------------------------------------------------------------------------------------
# Operators and functions
# ----------------------------------------------------------------------------------------------------------------------

OPERATORS: list[tuple[Callable[[Any, Any], Any], Node]] = [
    (lambda a, x: a + x, _node("add", ACC, X)),
    (lambda a, x: x - a, _node("subtract", X, ACC)),
    (lambda a, x: a * x, _node("multiply", ACC, X)),
    (lambda a, x: a / x, _node("divide", ACC, X)),
    (lambda a, x: a + 1, _node("add", ACC, 1)),
    (lambda a, x: 1.5 + a, _node("add", 1.5, ACC)),
    (lambda a, x: a - 1, _node("subtract", ACC, 1)),
    (lambda a, x: 1 - a, _node("subtract", 1, ACC)),
    (lambda a, x: 3 * a, _node("multiply", 3, ACC)),
    (lambda a, x: a / 3, _node("divide", ACC, 3)),
    (lambda a, x: 3 / a, _node("divide", 3, ACC)),
    (lambda a, x: -a, _node("negate", ACC)),
    (lambda a, x: +a, ACC),
    (lambda a, x: abs(a), _node("absolute", ACC)),
    (lambda a, x: a**2, _node("square", ACC)),
    (lambda a, x: a**0.5, _node("sqrt", ACC)),
    (lambda a, x: a**-1, _node("reciprocal", ACC)),
    (lambda a, x: a**-0.5, _node("rsqrt", ACC)),
    (lambda a, x: a < x, _node("less", ACC, X)),
    (lambda a, x: a <= x, _node("less_equal", ACC, X)),
    (lambda a, x: a > x, _node("greater", ACC, X)),
    (lambda a, x: a >= x, _node("greater_equal", ACC, X)),
    (lambda a, x: a == x, _node("equal", ACC, X)),
    (lambda a, x: a != x, _node("not_equal", ACC, X)),
    (lambda a, x: 0 < a, _node("greater", ACC, 0)),  # noqa: SIM300
    (lambda a, x: sum([a, x]), _node("add", _node("add", 0, ACC), X)),
    (lambda a, x: np.float32(0.5) * a, _node("multiply", 0.5, ACC)),
    (lambda a, x: a * np.float64(0.1), _node("multiply", ACC, 0.1)),
    (lambda a, x: np.int64(2) - a, _node("subtract", 2, ACC)),
    (lambda a, x: np.float32(1) < a, _node("less", 1, ACC)),
    (lambda a, x: a * np.array(2.0), _node("multiply", ACC, 2)),
]


@pytest.mark.parametrize(("function", "node"), OPERATORS)
def test_operators(function: Callable[[Any, Any], Any], node: Node) -> None:
    assert _tree(function, x=MATRIX) == EpilogueVisitorTree(node)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(ep, name) for name in OPS if hasattr(ep, name)},
    "select": ep.where,
    "negate": operator.neg,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}


@pytest.mark.parametrize("op", OPS)
def test_every_operation_can_be_traced(op: str) -> None:
    """Operands in their order, the numbers of the operation after them."""
    numbers = {"clamp": (-1.0, 2.0), "leaky_relu": (0.25,)}.get(op, ())
    operands = [ACC, X, _constant(3)][: OPS[op].arity]

    def function(acc: Value, x: Value) -> Any:
        return FUNCTIONS[op](*[acc, x, 3][: OPS[op].arity], *numbers)

    assert _tree(function, x=MATRIX) == EpilogueVisitorTree(_node(op, *operands, numbers=numbers))


def test_functions_that_are_public_are_documented() -> None:
    for name in ep.__all__:
        assert getattr(ep, name).__doc__, name
    assert list(ep.functions.__all__) == sorted(ep.functions.__all__)
    assert len(set(ep.__all__)) == len(ep.__all__)
    assert ac.EvtBuilder is ep.EvtBuilder
    assert ac.EpilogueVisitorTree is ep.EpilogueVisitorTree


def test_leaky_relu_has_the_usual_slope() -> None:
    assert _tree(lambda acc: ep.leaky_relu(acc)) == EpilogueVisitorTree(_node("leaky_relu", ACC, numbers=(0.01,)))


@pytest.mark.parametrize(
    ("function", "node"),
    [
        (lambda a, x: ep.clamp(a, 0, 6), _node("clamp", ACC, numbers=(0.0, 6.0))),
        (lambda a, x: ep.clamp(a, low=0), _node("maximum", ACC, 0)),
        (lambda a, x: ep.clamp(a, high=6), _node("minimum", ACC, 6)),
        (lambda a, x: ep.clamp(a, x, 6), _node("minimum", _node("maximum", ACC, X), 6)),
        (lambda a, x: ep.clamp(a, -1, x), _node("minimum", _node("maximum", ACC, -1), X)),
    ],
)
def test_clamp_with_every_kind_of_bound(function: Callable[..., Any], node: Node) -> None:
    assert _tree(function, x=MATRIX) == EpilogueVisitorTree(node)


def _by_numpy(acc: Any, row: Any, column: Any, matrix: Any) -> Any:
    scaled = np.maximum(acc * row, -matrix) + np.tanh(column) / 3
    bounded = np.clip(scaled, -2, 2) - np.minimum(matrix, 0.5) ** 2
    return np.where(np.abs(bounded) >= 0.25, np.sqrt(np.abs(bounded)), np.exp(bounded) * (row != column))


def test_a_function_of_numpy_gives_the_same_on_arrays_and_as_a_tree() -> None:
    rng = np.random.default_rng(1)
    acc, matrix = rng.normal(size=(2, 5, 7)), rng.normal(size=(5, 7))
    row, column = rng.normal(size=(1, 7)), rng.normal(size=(5, 1))
    column[2] = row[0, 3]
    arrays = {"row": row, "column": column, "matrix": matrix}
    operands = {name: operand_of(array.shape, 5, 7, array.dtype, name) for name, array in arrays.items()}
    traced = trace(_by_numpy, operands, compute_dtype=D.F64)
    got = traced.arrange(evaluate(traced.tree, acc, arrays, out_dtype=D.F64))
    np.testing.assert_allclose(got, _by_numpy(acc, **arrays), rtol=1e-13)


def test_the_function_is_called_once_and_may_be_any_python() -> None:
    calls = []

    def gate(value: Value, *, times: int) -> Value:
        for _ in range(times):
            value = value * ep.sigmoid(value)
        return value

    def function(acc: Value, x: Value) -> Value:
        calls.append((acc, x))
        return gate(acc, times=2) + x

    first = _node("multiply", ACC, _node("sigmoid", ACC))
    second = _node("multiply", first, _node("sigmoid", first))
    assert _tree(function, x=MATRIX) == EpilogueVisitorTree(_node("add", second, X))
    assert len(calls) == 1


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch and NumPy
# ----------------------------------------------------------------------------------------------------------------------


# PyTorch's functions look among their operands for `__torch_function__`, and call it with themselves. Those written in
# Python do so in frames of modules of that name.
_TORCH_SOURCE = """
class Function:
    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        types = tuple(type(one) for one in args if hasattr(type(one), "__torch_function__"))
        return types[0].__torch_function__(self, types, args, kwargs)
"""
_torch: dict[str, Any] = {"__name__": "torch.overrides"}
exec(compile(_TORCH_SOURCE, "overrides.py", "exec"), _torch)


class _TorchLike:
    """A stand-in for PyTorch: every name is a function."""

    def __getattr__(self, name: str) -> Any:
        return _torch["Function"](name)


TORCH: list[tuple[Callable[[Any, Any, Any], Any], Node]] = [
    *((lambda t, a, x, op=op: getattr(t, op)(a), _node(op, ACC)) for op in ("relu", "silu", "sigmoid", "tanh")),
    *((lambda t, a, x, op=op: getattr(t, op)(a), _node(op, ACC)) for op in ("sqrt", "rsqrt", "exp", "log", "square")),
    *((lambda t, a, x, op=op: getattr(t, op)(a), _node(op, ACC)) for op in ("reciprocal", "hardswish")),
    *((lambda t, a, x, op=op: getattr(t, op)(a, x), _node(op, ACC, X)) for op in ("maximum", "minimum")),
    (lambda t, a, x: t.max(a, x), _node("maximum", ACC, X)),
    (lambda t, a, x: t.min(a, x), _node("minimum", ACC, X)),
    (lambda t, a, x: t.abs(a), _node("absolute", ACC)),
    (lambda t, a, x: t.neg(a), _node("negate", ACC)),
    (lambda t, a, x: t.relu(a, inplace=False), _node("relu", ACC)),
    (lambda t, a, x: t.gelu(a), _node("gelu", ACC)),
    (lambda t, a, x: t.gelu(a, approximate="none"), _node("gelu", ACC)),
    (lambda t, a, x: t.gelu(a, approximate="tanh"), _node("gelu_tanh", ACC)),
    (lambda t, a, x: t.leaky_relu(a, 0.1), _node("leaky_relu", ACC, numbers=(0.1,))),
    (lambda t, a, x: t.leaky_relu(a, negative_slope=0.1, inplace=False), _node("leaky_relu", ACC, numbers=(0.1,))),
    (lambda t, a, x: t.clamp(a, 0, 6), _node("clamp", ACC, numbers=(0.0, 6.0))),
    (lambda t, a, x: t.clamp(a, min=0), _node("maximum", ACC, 0)),
    (lambda t, a, x: t.clamp(a, max=x), _node("minimum", ACC, X)),
    (lambda t, a, x: t.clamp_min(a, 0), _node("maximum", ACC, 0)),
    (lambda t, a, x: t.clamp_max(a, 0), _node("minimum", ACC, 0)),
    (lambda t, a, x: t.hardtanh(a), _node("clamp", ACC, numbers=(-1.0, 1.0))),
    (lambda t, a, x: t.relu6(a), _node("clamp", ACC, numbers=(0.0, 6.0))),
    (lambda t, a, x: t.where(t.gt(a, 0), a, x), _node("select", _node("greater", ACC, 0), ACC, X)),
    (lambda t, a, x: t.add(a, x), _node("add", ACC, X)),
    (lambda t, a, x: t.add(a, x, alpha=2), _node("add", ACC, _node("multiply", X, 2))),
    (lambda t, a, x: t.add(a, 3, alpha=2), _node("add", ACC, 6)),
    (lambda t, a, x: t.sub(a, x), _node("subtract", ACC, X)),
    (lambda t, a, x: t.mul(a, x), _node("multiply", ACC, X)),
    (lambda t, a, x: t.div(a, x), _node("divide", ACC, X)),
    (lambda t, a, x: t.pow(a, 2), _node("square", ACC)),
    (lambda t, a, x: t.eq(a, x), _node("equal", ACC, X)),
    (lambda t, a, x: t.ne(a, x), _node("not_equal", ACC, X)),
    (lambda t, a, x: t.lt(a, x), _node("less", ACC, X)),
    (lambda t, a, x: t.le(a, x), _node("less_equal", ACC, X)),
    (lambda t, a, x: t.ge(a, x), _node("greater_equal", ACC, X)),
]


@pytest.mark.parametrize(("function", "node"), TORCH)
def test_functions_of_pytorch_are_found_by_name(function: Callable[..., Any], node: Node) -> None:
    assert _tree(functools.partial(function, _TorchLike()), x=MATRIX) == EpilogueVisitorTree(node)


if importlib.util.find_spec("torch"):

    def test_functions_of_pytorch_itself() -> None:
        import torch

        class Both:
            def __getattr__(self, name: str) -> Any:
                return getattr(torch.nn.functional, name, None) or getattr(torch, name)

        for function, node in TORCH:
            assert _tree(functools.partial(function, Both()), x=MATRIX) == EpilogueVisitorTree(node)
        assert trace(lambda acc: acc.to(torch.float8_e4m3fn)).tree.result_dtype is D.F8E4M3
        for refused in (torch.sum, torch.sin, lambda acc: acc * torch.ones(3), lambda acc: torch.ones(3) * acc):
            with pytest.raises(UnsupportedError, match=f"^{__file__}:"):
                trace(lambda acc, refused=refused: refused(acc))


@pytest.mark.parametrize(
    ("function", "node"),
    [
        *((lambda a, x, f=f: f(a), _node(f.__name__, ACC)) for f in (np.exp, np.log, np.sqrt, np.square, np.tanh)),
        *((lambda a, x, f=f: f(a), _node("absolute", ACC)) for f in (np.abs, np.absolute, np.fabs)),
        *((lambda a, x, f=f: f(a, x), _node(f.__name__, ACC, X)) for f in (np.maximum, np.minimum, np.add)),
        *((lambda a, x, f=f: f(a, x), _node(f.__name__, ACC, X)) for f in (np.subtract, np.multiply, np.divide)),
        *((lambda a, x, f=f: f(a, x), _node(f.__name__, ACC, X)) for f in (np.less, np.less_equal, np.equal)),
        *((lambda a, x, f=f: f(a, x), _node(f.__name__, ACC, X)) for f in (np.greater, np.greater_equal, np.not_equal)),
        (lambda a, x: np.negative(a), _node("negate", ACC)),
        (lambda a, x: np.reciprocal(a), _node("reciprocal", ACC)),
        (lambda a, x: np.power(a, 0.5), _node("sqrt", ACC)),
        (lambda a, x: np.where(x > 0, a, 0), _node("select", _node("greater", X, 0), ACC, 0)),
        (lambda a, x: np.clip(a, 0, 6), _node("clamp", ACC, numbers=(0.0, 6.0))),
        (lambda a, x: np.clip(a, None, 6), _node("minimum", ACC, 6)),
        (lambda a, x: np.clip(a, a_min=0, a_max=x), _node("minimum", _node("maximum", ACC, 0), X)),
    ],
)
def test_functions_of_numpy(function: Callable[..., Any], node: Node) -> None:
    assert _tree(function, x=MATRIX) == EpilogueVisitorTree(node)


@pytest.mark.parametrize(
    ("function", "node"),
    [
        *((lambda a, x, op=op: getattr(a, op)(), _node(op, ACC)) for op in ("relu", "sigmoid", "tanh", "square")),
        *((lambda a, x, op=op: getattr(a, op)(), _node(op, ACC)) for op in ("sqrt", "rsqrt", "exp", "log")),
        (lambda a, x: a.abs(), _node("absolute", ACC)),
        (lambda a, x: a.neg(), _node("negate", ACC)),
        (lambda a, x: a.clamp(0, 6), _node("clamp", ACC, numbers=(0.0, 6.0))),
        (lambda a, x: a.clamp(min=0), _node("maximum", ACC, 0)),
        (lambda a, x: a.add(x, alpha=0.5).mul(2), _node("multiply", _node("add", ACC, _node("multiply", X, 0.5)), 2)),
        (lambda a, x: a.maximum(x), _node("maximum", ACC, X)),
        (lambda a, x: a.pow(2), _node("square", ACC)),
        (lambda a, x: a.where(a > x, 0), _node("select", _node("greater", ACC, X), ACC, 0)),
        (lambda a, x: a.to("bf16") + x, _node("add", _node("cast", ACC, numbers=("bf16",)), X)),
        (lambda a, x: a.to(dtype="bf16") + x, _node("add", _node("cast", ACC, numbers=("bf16",)), X)),
        (lambda a, x: a.astype(np.float16) + x, _node("add", _node("cast", ACC, numbers=("f16",)), X)),
        (lambda a, x: a.bfloat16() + x, _node("add", _node("cast", ACC, numbers=("bf16",)), X)),
        (lambda a, x: a.half() + x, _node("add", _node("cast", ACC, numbers=("f16",)), X)),
        (lambda a, x: a.float() + x, _node("add", _node("cast", ACC, numbers=("f32",)), X)),
    ],
)
def test_methods_of_tensors(function: Callable[..., Any], node: Node) -> None:
    assert _tree(function, x=MATRIX) == EpilogueVisitorTree(node)


# ----------------------------------------------------------------------------------------------------------------------
# Element types
# ----------------------------------------------------------------------------------------------------------------------


class _TorchDtype:
    """A stand-in for `torch.dtype`, which is told by the module of its class, and by its text."""

    __module__ = "torch"

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        *((dtype, dtype) for dtype in INPUT_DTYPES),
        *((dtype.value, dtype) for dtype in INPUT_DTYPES),
        *((_TorchDtype(dtype.numpy_name), dtype) for dtype in INPUT_DTYPES),
        *((dtype.dlpack, dtype) for dtype in INPUT_DTYPES),
        ("float16", D.F16),
        (np.float32, D.F32),
        (np.dtype(np.int8), D.I8),
        (ml_dtypes.bfloat16, D.BF16),
        (np.dtype(ml_dtypes.float8_e4m3fn), D.F8E4M3),
        (float, D.F64),
    ],
    ids=repr,
)
def test_element_types_by_any_name(given: Any, dtype: D) -> None:
    assert Operand("row", given) == Operand("row", dtype)
    assert trace(lambda acc: ep.cast(acc, given)).tree.result_dtype is dtype


@pytest.mark.parametrize(
    "given", ["bf17", None, 3, np.int16, np.dtype(">f4"), (1, 8), (0,), (None, None), ("f4", ()), [2, 16], object()]
)
def test_what_is_no_element_type(given: Any) -> None:
    with pytest.raises(InvalidOperandError, match=r"kind row: .*; valid: f64, f32, "):
        Operand("row", given)
    with pytest.raises(InvalidOperandError, match=rf"{Path(__file__).name}:\d+: cast: .*; valid: f64, f32, "):
        trace(lambda acc: ep.cast(acc, given))


def test_operands_have_a_kind() -> None:
    assert Operand("row") == Operand("row", D.F32)
    assert Operand("mask", np.uint8) == Operand("mask", None)
    with pytest.raises(InvalidOperandError, match="a 'diagonal'; valid: scalar, row, column, matrix, mask"):
        Operand("diagonal", D.F32)


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


def test_one_value_is_d() -> None:
    traced = trace(lambda acc: ep.relu(acc))
    assert traced == Traced(EpilogueVisitorTree(_node("relu", ACC)), "single", ("out",))
    assert traced.arrange({"out": 1}) == 1
    assert traced.tree.result_dtype is None


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_is_d_and_outputs_by_number(kind: type) -> None:
    traced = trace(lambda acc: kind([ep.relu(acc), acc, ep.row_sum(acc), ep.mask(acc)]))
    stores = [
        (Output("out1", "matrix", D.F32), ACC),
        (Output("out2", "row", D.F32, "sum"), ACC),
        (Output("out3", "mask", None), ACC),
    ]
    assert traced.tree == EpilogueVisitorTree(_node("relu", ACC), stores)
    assert (traced.structure, traced.names) == ("tuple", ("out", "out1", "out2", "out3"))
    assert traced.arrange({"out3": 3, "out2": 2, "out1": 1, "out": 0}) == (0, 1, 2, 3)


def test_a_sequence_of_one_stays_one() -> None:
    assert trace(lambda acc: (acc,)).arrange({"out": 1}) == (1,)


def test_a_dict_names_its_outputs_and_keeps_their_order() -> None:
    traced = trace(lambda acc: {"z": acc, "out": ep.relu(acc), "a": ep.total_amax(acc)})
    stores = [(Output("z", "matrix", D.F32), ACC), (Output("a", "scalar", D.F32, "amax"), ACC)]
    assert traced.tree == EpilogueVisitorTree(_node("relu", ACC), stores)
    assert list(traced.arrange({"out": 0, "a": 1, "z": 2}).items()) == [("z", 2), ("out", 0), ("a", 1)]


@pytest.mark.parametrize("reduction", ["sum", "max", "amax"])
@pytest.mark.parametrize(("name", "kind"), [("row", "row"), ("column", "column"), ("total", "scalar")])
def test_reductions(name: str, kind: str, reduction: str) -> None:
    function = getattr(ep, f"{name}_{reduction}")
    for dtype in (D.F32, D.F64):
        traced = trace(lambda acc: (acc, function(acc)), compute_dtype=dtype)
        assert traced.tree.outputs == (Output("out1", kind, dtype, reduction),)


def test_an_outermost_cast_is_the_type_that_is_stored() -> None:
    traced = trace(lambda acc: (ep.cast(ep.relu(acc), "e4m3"), acc.to("bf16"), acc, ep.row_sum(acc.to("f16"))))
    stores = [
        (Output("out1", "matrix", D.BF16), ACC),
        (Output("out2", "matrix", D.F32), ACC),
        (Output("out3", "row", D.F32, "sum"), _node("cast", ACC, numbers=("f16",))),
    ]
    assert traced.tree == EpilogueVisitorTree(_node("relu", ACC), stores, result_dtype=D.F8E4M3)
    twice = trace(lambda acc: acc.to("e4m3").to("bf16")).tree
    assert twice == EpilogueVisitorTree(_node("cast", ACC, numbers=("e4m3",)), result_dtype=D.BF16)


def test_values_without_a_cast_are_stored_in_the_type_of_the_call() -> None:
    def function(acc: Value) -> tuple[Value, Value, Value]:
        return ep.relu(acc), acc, acc.to("f16")

    for given, stored in ((None, D.F32), ("bf16", D.BF16), (np.float16, D.F16)):
        traced = trace(function, out_dtype=given)
        assert [output.dtype for output in traced.tree.outputs] == [stored, D.F16]
        assert traced.tree.result_dtype is None
    assert trace(function, compute_dtype=D.F64).tree.outputs[0].dtype is D.F64


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda acc: None, "returns a NoneType as 'out'; expected what is computed from its parameters"),
        (lambda acc: 2.0, "returns a float as 'out'"),
        (lambda acc: (acc, 2.0), "returns a float as 'out1'"),
        (lambda acc: (value for value in [acc]), "returns a generator as 'out'"),
        (lambda acc: (), "returns a tuple as 'out'"),
        (lambda acc: {}, "returns nothing; D is 'out'"),
        (lambda acc: {"d": acc}, "returns 'd'; D is 'out'"),
        (lambda acc: {"out": acc, 1: acc}, "returns a result under 1; expected a name"),
        (lambda acc: ep.row_sum(acc), "returns a sum as D; D is a value: return it first, or as 'out'"),
        (lambda acc: (ep.mask(acc), acc), "returns a mask as D"),
    ],
)
def test_what_cannot_be_returned(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(InvalidOperandError) as raised:
        trace(function)
    assert str(raised.value).startswith(f"<lambda> ({__file__}:{function.__code__.co_firstlineno}) ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda acc, x: {"out": acc + x, "x": acc}, "acc is stored to 'x', the name of an input: choose another"),
        (lambda acc, x: {"out": acc + x, "acc": acc}, "acc is stored to 'acc', the name of the accumulator"),
        (lambda acc, x: {"out": acc + x, "1st": acc}, "output '1st' of acc: a name is a Python identifier"),
        (lambda acc, x: x, "the result, input 'x', is one value for a whole row"),
        (
            lambda acc, x: (acc, ep.row_sum(x)),
            "output 'out1' reduces input 'x', which is one value for a whole row, to",
        ),
        (lambda acc, x: (acc, ep.column_sum(x * 0 + 1)), ""),
        (lambda acc, x: ep.cast(acc, "e2m1"), "the result, acc, is cast to 'e2m1'; valid: f64, f32, f16"),
        (lambda acc, x: ep.cast(acc, "tf32") + x, "cast 'test_epilogue_trace.py:"),
        (lambda acc, x: ep.clamp(acc, 1, 0), "low is 1.0, above high, 0.0"),
        (lambda acc, x: functools.reduce(operator.mul, [acc + i for i in range(90)]), "at most 128: split it"),
    ],
)
def test_what_the_tree_refuses(function: Callable[..., Any], message: str) -> None:
    if not message:
        assert trace(function, {"x": Operand("row")}).tree.outputs[0].kind == "column"
        return
    with pytest.raises(InvalidOperandError) as raised:
        trace(function, {"x": Operand("row")})
    assert message in str(raised.value)


def test_nodes_are_labelled_with_their_lines() -> None:
    def function(acc: Value) -> Value:
        return ep.relu(acc + 1)

    line = function.__code__.co_firstlineno + 1
    assert [node.label for node in _tree(function).nodes if node.inputs] == [f"{Path(__file__).name}:{line}"] * 2


# ----------------------------------------------------------------------------------------------------------------------
# Parameters
# ----------------------------------------------------------------------------------------------------------------------


def test_operands_come_by_the_names_of_parameters() -> None:
    def function(total: Value, scale: Value, bias: Value, drop: Value) -> Value:
        return ep.where(drop, total * scale + bias, 0)

    given = {"drop": Operand("mask"), "bias": Operand("row", "f16"), "scale": Operand("scalar")}
    tree = trace(function, given).tree
    assert {operand.name: (operand.kind, operand.dtype) for operand in tree.inputs} == {
        "drop": ("mask", None),
        "bias": ("row", D.F16),
        "scale": ("scalar", D.F32),
    }


def test_numbers_are_constants() -> None:
    def function(acc: Value, x: Value, y: Value, slope: Value, power: Value) -> Value:
        return ep.leaky_relu(ep.maximum(acc, x) ** power, slope) + y

    node = _node("leaky_relu", _node("square", _node("maximum", ACC, 3)), numbers=(0.5,))
    tree = _tree(function, x=3, y=np.float32(0.25), slope=0.5, power=2)
    assert tree == EpilogueVisitorTree(_node("add", node, 0.25))
    assert tree.inputs == ()


def test_parameters_with_defaults_may_be_left_out() -> None:
    def function(acc: Value, slope: Any = 0.5, bias: Any = None, *, factor: Any = 2) -> Value:
        value = ep.leaky_relu(acc, slope) * factor
        return value if bias is None else value + bias

    leaky = _node("leaky_relu", ACC, numbers=(0.5,))
    assert _tree(function) == EpilogueVisitorTree(_node("multiply", leaky, 2))
    assert _tree(function, factor=3) == EpilogueVisitorTree(_node("multiply", leaky, 3))
    bias = Node("input", (), ("bias", "row", "f32"))
    expected = EpilogueVisitorTree(_node("add", _node("multiply", leaky, 2), bias))
    assert _tree(function, bias=Operand("row")) == expected
    assert _tree(functools.partial(function, factor=2), bias=Operand("row")) == expected


class _Callable:
    def __call__(self, acc: Value) -> Value:
        return ep.relu(acc)

    def method(self, acc: Value) -> Value:
        return ep.relu(acc)


@pytest.mark.parametrize("function", [_Callable(), _Callable().method, ep.relu, lambda acc, /: ep.relu(acc)])
def test_anything_that_can_be_called_is_traced(function: Callable[..., Any]) -> None:
    assert _tree(function) == EpilogueVisitorTree(_node("relu", ACC))


@pytest.mark.parametrize(
    ("function", "operands", "message"),
    [
        (
            lambda acc, bias, scale: acc,
            {},
            r"<lambda> \(.*\) needs 'bias', 'scale': give an array or a number for each",
        ),
        (
            lambda acc, bias: acc,
            {"x": 1},
            r"has no parameter for 'x'; its operands are 'bias' \('acc' is the accumulator",
        ),
        (lambda acc: acc, {"acc": 1}, r"has no parameter for 'acc'; its operands are none \('acc' is the accumulator"),
        (lambda acc, *xs: acc, {}, r"takes \*xs: name each operand as a parameter"),
        (lambda acc, *xs, **ys: acc, {"x": 1}, r"takes \*xs and \*\*ys: name each operand as a parameter"),
        (lambda: 1, {}, "has no parameter for the accumulator: give it a first one"),
        (lambda *, acc: acc, {}, "has no parameter for the accumulator"),
        (lambda acc, x: acc, {"x": True}, "operand 'x' is a bool; expected an Operand or a finite number"),
        (lambda acc, x: acc, {"x": math.nan}, "operand 'x' is nan"),
        (lambda acc, x: acc, {"x": np.ones(3)}, "operand 'x' is a ndarray"),
        (
            lambda acc, acc2, out: acc + out,
            {"acc2": 1, "out": Operand("row")},
            "input 'out' has the name of the result",
        ),
        (3, {}, "epilogue is a int; expected a function or a tree"),
    ],
)
def test_parameters_and_operands_have_to_match(
    function: Callable[..., Any], operands: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOperandError, match=message):
        trace(function, operands)


def test_a_function_that_does_not_tell_its_parameters() -> None:
    class Opaque:
        __signature__ = "none"

        def __call__(self, acc: Value) -> Value:
            return acc

    with pytest.raises(InvalidOperandError, match=r"Opaque does not tell its parameters: wrap it .* lambda acc: f"):
        trace(Opaque())


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

KEPT: list[Value] = []
_CHOOSE = "use where(condition, x, y), maximum or minimum"
_PLACE = "reductions are row_sum, column_sum, total_sum"
_BESIDE = "return a reduction beside the result: row_sum"
_ARRAY = "make it a parameter of the function, and give the array under its name in the call"
_ONLY = "only return"
_T = _TorchLike()

REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda acc: acc if acc > 0 else -acc, _CHOOSE),
    (lambda acc: acc and acc, _CHOOSE),
    (lambda acc: not acc, _CHOOSE),
    (lambda acc: 0 < acc < 6, _CHOOSE),
    (lambda acc: max(acc, 0), _CHOOSE),
    (lambda acc: acc in [1, 2], _CHOOSE),
    (lambda acc: float(acc), "float() of a traced value, which is no number yet"),
    (lambda acc: int(acc), "int() of a traced value"),
    (lambda acc: complex(acc), "complex() of a traced value"),
    (lambda acc: round(acc), "round() of a traced value"),
    (lambda acc: math.floor(acc), "floor() of a traced value"),
    (lambda acc: math.exp(acc), "exp(x) of atomr_cutlass.epilogue for math.exp(x)"),
    (lambda acc: range(acc), "index() of a traced value"),
    (lambda acc: len(acc), _PLACE),
    (lambda acc: list(acc), _PLACE),
    (lambda acc: acc[0], _PLACE),
    (lambda acc: 1 in acc, _PLACE),
    (lambda acc: np.asarray(acc), _PLACE),
    (lambda acc: {acc: 1}, "keep it in a variable"),
    (lambda acc: functools.lru_cache(abs)(acc), "keep it in a variable"),
    (lambda acc: operator.setitem(acc, 0, 1), "assignment into a traced value"),
    (lambda acc: setattr(acc, "node", 1), "assignment into a traced value"),
    (lambda acc: delattr(acc, "node"), "assignment into a traced value"),
    (lambda acc: operator.iadd(acc, 1), "write x = x + y for x += y"),
    (lambda acc: operator.imul(acc, 1), "write x = x + y for x += y"),
    (lambda acc: acc**3, "the exponent is 2, 0.5, -1 or -0.5"),
    (lambda acc: acc**acc, "the exponent is a Value"),
    (lambda acc: 2**acc, "write exp(x * log(base)) for base ** x"),
    (lambda acc: np.float32(2) ** acc, "write exp(x * log(base)) for base ** x"),
    (lambda acc: acc // 2, "floordiv of a traced value"),
    (lambda acc: 7 % acc, "rmod of a traced value"),
    (lambda acc: divmod(acc, 2), "divmod of a traced value"),
    (lambda acc: acc << 1, "lshift of a traced value"),
    (lambda acc: acc & (acc > 0), "(x > 0) * (y > 0)"),
    (lambda acc: True | acc, "maximum(x > 0, y > 0)"),
    (lambda acc: acc ^ acc, "(x > 0) != (y > 0)"),
    (lambda acc: ~acc, "condition == 0"),
    (lambda acc: acc @ acc, "another one is another call"),
    (lambda acc: acc + True, "add of a bool: give a traced value or a finite number"),
    (lambda acc: acc + np.bool_(True), "give a traced value or a finite number"),
    (lambda acc: acc * math.nan, "multiply of nan"),
    (lambda acc: acc * math.inf, "multiply of inf"),
    (lambda acc: acc * np.float64("nan"), "give a traced value or a finite number"),
    (lambda acc: acc * 10**400, "out of a double's range"),
    (lambda acc: acc * 1j, "multiply of a complex"),
    (lambda acc: acc == None, "equal of a NoneType"),  # noqa: E711
    (lambda acc: acc + "x", "add of a str"),
    (lambda acc: acc - (1, 2), "subtract of a tuple"),
    (lambda acc: acc * np.ones(3), _ARRAY),
    (lambda acc: np.ones(3) * acc, _ARRAY),
    (lambda acc: np.add(np.ones(3), acc), _ARRAY),
    (lambda acc: acc + SimpleNamespace(shape=(3,)), _ARRAY),
    (lambda acc: np.sum(acc), _BESIDE),
    (lambda acc: np.add.reduce(acc), _BESIDE),
    (lambda acc: np.max(acc), _BESIDE),
    (lambda acc: np.sin(acc), "numpy.sin of a traced value: the operations are those of atomr_cutlass.epilogue"),
    (lambda acc: np.exp(acc, out=np.ones(3)), "leave inplace and out away"),
    (lambda acc: acc.clamp(0, min=1), ".clamp of a traced value, multiple values for argument 'min'"),
    (lambda acc: acc.clamp(a_min=0), ".clamp of a traced value, got an unexpected keyword argument 'a_min'"),
    (lambda acc: np.exp(acc, where=True), "numpy.exp of a traced value, got an unexpected keyword argument 'where'"),
    (lambda acc: np.where(acc), "numpy.where of a traced value, missing a required"),
    (lambda acc: np.power(2, acc), "write exp(x * log(base)) for base ** x"),
    (lambda acc: _T.sum(acc), _BESIDE),
    (lambda acc: _T.max(acc), _BESIDE),
    (lambda acc: _T.softmax(acc, dim=-1), _BESIDE),
    (lambda acc: _T.dropout(acc, 0.5), "torch's dropout of a traced value"),
    (lambda acc: _T.equal(acc, acc), "torch's equal of a traced value"),
    (lambda acc: _T.relu_(acc), "values are not written in place: use what relu returns"),
    (lambda acc: _T.relu(acc, inplace=True), "leave inplace and out away"),
    (lambda acc: _T.add(acc, 1, out=acc), "leave inplace and out away"),
    (lambda acc: _T.div(acc, 2, rounding_mode="floor"), "leave rounding_mode out"),
    (lambda acc: _T.gelu(acc, approximate="erf"), "it is 'none' or 'tanh'"),
    (lambda acc: _T.pow(2.0, acc), "write exp(x * log(base)) for base ** x"),
    (lambda acc: acc.sum(), _BESIDE),
    (lambda acc: acc.shape, "shapes, types and elements are not there"),
    (lambda acc: acc.item(), "shapes, types and elements are not there"),
    (lambda acc: acc.add_(1), "values are not written in place: use what add returns"),
    (lambda acc: acc.erf(), ".erf of a traced value: the operations are those of atomr_cutlass.epilogue"),
    (lambda acc: acc.clamp(0, 1, 2), ".clamp of a traced value, too many positional arguments"),
    (lambda acc: acc.clamp(), "give low, high or both"),
    (lambda acc: ep.leaky_relu(acc, acc), "the slope of leaky_relu is a Value: give a finite number"),
    (lambda acc: ep.clamp(acc, 0, math.inf), "the upper bound of clamp is inf"),
    (lambda acc: ep.relu(2.0), "relu takes a traced value, and there is none"),
    (lambda acc: ep.row_sum(2.0), "row_sum of a float: give it a traced value"),
    (lambda acc: ep.total_amax(None), "total_amax of a NoneType: give it a traced value"),
    (lambda acc: ep.mask(ep.mask(acc)), "mask of a Stored: give it a traced value"),
    (lambda acc: acc + ep.row_sum(acc), _ONLY),
    (lambda acc: ep.row_sum(acc) + acc, _ONLY),
    (lambda acc: ep.total_max(acc) * 2, _ONLY),
    (lambda acc: ep.relu(ep.mask(acc)), _ONLY),
    (lambda acc: acc if ep.row_max(acc) else -acc, _ONLY),
    (lambda acc: acc + KEPT[0], "add of a value kept from another trace"),
    (lambda acc: KEPT[0] + acc, "add of a value kept from another trace"),
    (lambda acc: -KEPT[0], "negate of a value kept from another trace"),
]


@pytest.mark.parametrize(("function", "cure"), REFUSED)
def test_what_cannot_be_traced_is_refused_with_its_line_and_the_cure(function: Callable[..., Any], cure: str) -> None:
    KEPT.clear()
    trace(lambda acc: KEPT.append(acc) or acc)
    with pytest.raises(UnsupportedError) as raised:
        trace(function)
    assert str(raised.value).startswith(f"{__file__}:{function.__code__.co_firstlineno}: ")
    assert cure in str(raised.value)


def test_the_line_is_that_of_the_innermost_function() -> None:
    def helper(value: Value) -> Value:
        return value if value > 0 else -value

    with pytest.raises(UnsupportedError, match=rf":{helper.__code__.co_firstlineno + 1}: the truth"):
        trace(lambda acc: helper(acc))


@pytest.mark.parametrize("library", ["torch.nn.functional", "numpy.core"])
def test_the_line_is_not_one_of_a_library_that_calls_back(library: str) -> None:
    namespace: dict[str, Any] = {"__name__": library}
    exec(compile("def softsign(x):\n    return x / (1 + x.nothing())", "library.py", "exec"), namespace)
    softsign = namespace["softsign"]

    def function(acc: Value) -> Any:
        return softsign(acc)

    with pytest.raises(UnsupportedError) as raised:
        trace(function)
    assert str(raised.value).startswith(f"{__file__}:{function.__code__.co_firstlineno + 1}: ")


def test_augmented_assignment_is_refused() -> None:
    def function(acc: Value, bias: Value) -> Value:
        acc += bias
        return acc

    with pytest.raises(UnsupportedError, match=rf":{function.__code__.co_firstlineno + 1}: iadd on a traced value"):
        trace(function, {"bias": Operand("row")})


@pytest.mark.parametrize(
    "returned", [lambda: KEPT[0], lambda: (KEPT[-1], KEPT[0]), lambda: (KEPT[-1], ep.mask(KEPT[0]))]
)
def test_a_value_kept_from_another_trace_is_not_returned(returned: Callable[[], Any]) -> None:
    KEPT.clear()
    trace(lambda acc: KEPT.append(acc) or acc)

    def function(acc: Value) -> Any:
        KEPT.append(acc)
        return returned()

    with pytest.raises(UnsupportedError, match=r"returns a value kept from another trace as 'out1?'; compute"):
        trace(function)


def test_values_of_a_trace_within_a_trace_do_not_mix() -> None:
    def outer(acc: Value) -> Value:
        return trace(lambda inner: inner + acc)  # type: ignore[return-value]

    with pytest.raises(UnsupportedError, match="add of a value kept from another trace"):
        trace(outer)


class _OwnError(Exception):
    pass


def test_exceptions_of_the_function_pass_through() -> None:
    error = _OwnError("mine")

    def function(_: Value) -> Value:
        raise error

    with pytest.raises(_OwnError) as raised:
        trace(function)
    assert raised.value is error


def test_a_value_shows_itself_and_lacks_what_protocols_ask_for() -> None:
    def function(acc: Value, x: Value) -> Value:
        assert repr(acc) == "<Value acc>"
        assert f"{x}" == "<Value input 'x'>"
        assert not hasattr(acc, "__dlpack__")
        assert not hasattr(acc, "__cuda_array_interface__")
        return acc + x

    _tree(function, x=MATRIX)


def test_errors_are_of_the_package() -> None:
    with pytest.raises(CutlassError):
        trace(lambda acc: acc.shape)


# ----------------------------------------------------------------------------------------------------------------------
# Arrays as operands
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "m", "n", "kind"),
    [
        *(
            (shape, m, n, "scalar")
            for shape in ((), (1,), (1, 1), (1, 1, 1))
            for m, n in ((5, 7), (1, 7), (5, 1), (1, 1))
        ),
        ((7,), 5, 7, "row"),
        ((1, 7), 5, 7, "row"),
        ((3, 1, 7), 5, 7, "row"),
        ((5, 1), 5, 7, "column"),
        ((3, 5, 1), 5, 7, "column"),
        ((5, 7), 5, 7, "matrix"),
        ((2, 3, 5, 7), 5, 7, "matrix"),
        ((5,), 5, 5, "row"),
        ((1, 5), 5, 5, "row"),
        ((5, 1), 5, 5, "column"),
        # What has several readings, all with the same elements, is a matrix where it may be one.
        ((1, 7), 1, 7, "matrix"),
        ((3, 1, 7), 1, 7, "matrix"),
        ((7,), 1, 7, "row"),
        ((5, 1), 5, 1, "matrix"),
        ((3, 1, 1), 1, 1, "matrix"),
        ((3, 1, 1), 5, 1, "row"),
        ((3, 1, 1), 1, 7, "column"),
        ((0,), 5, 0, "row"),
        ((5, 0), 5, 0, "matrix"),
        ((0, 5, 7), 5, 7, "matrix"),
    ],
)
def test_the_kind_of_an_array(shape: tuple[int, ...], m: int, n: int, kind: str) -> None:
    for dtype in ("f16", D.F16, np.float16):
        assert operand_of(shape, m, n, dtype, "x") == Operand(kind, D.F16)
    assert readings(shape, m, n)[0] == kind


@pytest.mark.parametrize("dtype", [np.uint8, np.dtype(np.uint8), "uint8", (1, 8), _TorchDtype("uint8")])
@pytest.mark.parametrize(
    ("shape", "m", "n"), [((5, 1), 5, 7), ((5, 1), 5, 8), ((5, 2), 5, 9), ((3, 5, 4), 5, 32), ((1, 1), 1, 3)]
)
def test_bytes_are_masks(dtype: Any, shape: tuple[int, ...], m: int, n: int) -> None:
    assert operand_of(shape, m, n, dtype, "x") == Operand("mask", None)


def test_all_readings_of_an_array() -> None:
    assert readings((1, 7), 1, 7) == ("matrix", "row")
    assert readings((5, 1), 5, 1) == ("matrix", "column")
    assert readings((1, 1), 1, 1) == ("scalar", "matrix", "row", "column")
    assert readings((5,), 5, 5) == ("row", "column")
    assert readings((5,), 5, 7) == ("column",)
    assert readings((5, 7), 5, 7) == ("matrix",)
    assert readings((4, 7), 5, 7) == ()
    assert readings((5, 1), 5, 7, bits=True) == ("mask",)
    assert readings((1,), 5, 7, bits=True) == ()


def test_every_reading_gives_the_result_the_same_elements() -> None:
    rng = np.random.default_rng(2)
    acc = Node("acc")
    for m, n in ((1, 7), (5, 1), (1, 1)):
        for shape in ((m, n), (3, m, n)):
            array = rng.normal(size=shape).astype(np.float32)
            total = rng.normal(size=(3, m, n))
            results = []
            for kind in readings(shape, m, n):
                tree = EpilogueVisitorTree(Node("add", (acc, Node("input", (), ("x", kind, "f32")))))
                results.append(evaluate(tree, total, {"x": array}, out_dtype=D.F32)["out"])
            assert len(results) >= 2
            assert all(np.array_equal(results[0], result) for result in results)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (
            (5,),
            "f32",
            r"x has shape \(5,\); a vector of N = 7 .* M = 5 is a column only as \(5, 1\): reshape it",
        ),
        ((6,), "f32", r"x has shape \(6,\); expected one element, \(7,\) or \(..., 1, 7\) for a row, \(..., 5, 1\)"),
        ((7, 5), "f32", r"expected .* or \(..., 5, 7\)"),
        ((3, 1, 1), "f32", "x has shape"),
        (
            (5, 7),
            np.uint8,
            r"x has shape \(5, 7\); expected bits \(uint8\) of \(..., M, ceil\(N / 8\)\), here \(..., 5, 1\)",
        ),
        ((), np.uint8, "expected bits"),
        ((5, 7), np.int16, "x: unknown dtype 'int16'; valid: f64"),
        ((5, 7), object(), "x: unknown dtype .*object"),
    ],
)
def test_arrays_that_lie_over_no_result(shape: tuple[int, ...], dtype: Any, message: str) -> None:
    with pytest.raises(InvalidOperandError, match=message):
        operand_of(shape, 5, 7, dtype, "x")
