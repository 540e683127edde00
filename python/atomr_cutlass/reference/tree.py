"""Epilogue trees in float64, the reference of kernels with an EpilogueVisitorTree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..arrays.layouts import broadcasts_to
from ..arrays.numerics import AnyArray, FloatArray, saturating_cast, stored, to_float64
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.ops import ACTIVATION_OPS
from ..generator.epilogue.tree import (
    ACCUMULATOR,
    COLUMN,
    MASK,
    MATRIX,
    RESULT,
    ROW,
    SCALAR,
    EpilogueVisitorTree,
    Input,
    Node,
    Output,
)
from .parts import ACTIVATIONS, element_type, erfc

BoolArray: TypeAlias = npt.NDArray[np.bool_]

_sigmoid: Final = ACTIVATIONS["sigmoid"]

COMPARISONS: Final = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def _number(compare: Callable[..., BoolArray]) -> Callable[..., FloatArray]:
    return lambda x, y: compare(x, y).astype(np.float64)


def _select(mask: FloatArray, x: FloatArray, y: FloatArray) -> FloatArray:
    chosen: FloatArray = np.where(mask != 0.0, x, y)
    return chosen


# Arguments of derivatives are clipped to where these have reached their limits, to avoid infinity times zero.


def _gelu_slope(x: FloatArray) -> FloatArray:
    near = np.clip(x, -40.0, 40.0)
    density = np.exp(-0.5 * near * near) * (1.0 / math.sqrt(2.0 * math.pi))
    return 0.5 * erfc(near * -math.sqrt(0.5)) + near * density


def _gelu_tanh_slope(x: FloatArray) -> FloatArray:
    near = np.clip(x, -30.0, 30.0)
    factor = 2.0 * math.sqrt(2.0 / math.pi)
    doubled = factor * near * (1.0 + 0.044715 * near * near)
    inner = factor * (1.0 + 3.0 * 0.044715 * near * near)
    return _sigmoid(doubled) * (1.0 + near * inner * _sigmoid(-doubled))


def _silu_slope(x: FloatArray) -> FloatArray:
    near = np.clip(x, -800.0, 800.0)
    return _sigmoid(near) * (1.0 + near * _sigmoid(-near))


def _sigmoid_slope(x: FloatArray) -> FloatArray:
    return _sigmoid(x) * _sigmoid(-x)


FUNCTIONS: Final[Mapping[str, Callable[..., FloatArray]]] = MappingProxyType(
    {
        **{name: ACTIVATIONS[name] for name in ACTIVATION_OPS},
        **{name: getattr(np, name) for name in ("absolute", "exp", "log", "sqrt", "square")},
        **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
        **{name: _number(getattr(np, name)) for name in COMPARISONS},
        "negate": np.negative,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "reciprocal": lambda x: 1.0 / x,
        "leaky_relu": lambda x, slope: np.where(x > 0.0, x, slope * x),
        "clamp": np.clip,
        "d_relu": lambda dy, x: np.where(x > 0.0, dy, 0.0),
        "d_gelu": lambda dy, x: dy * _gelu_slope(x),
        "d_gelu_tanh": lambda dy, x: dy * _gelu_tanh_slope(x),
        "d_silu": lambda dy, x: dy * _silu_slope(x),
        "d_sigmoid": lambda dy, x: dy * _sigmoid_slope(x),
        "d_tanh": lambda dy, x: dy * (4.0 * _sigmoid_slope(2.0 * x)),
        "fma": lambda x, y, z: x * y + z,
        "select": _select,
    }
)
"""The functions of `OPS` by name, of float64 arrays and then the operation's numbers. Call them under
`np.errstate(all="ignore")`."""


def evaluate(
    tree: EpilogueVisitorTree,
    acc: FloatArray,
    operands: Mapping[str, AnyArray],
    *,
    out_dtype: CutlassDtype,
    scale_d: float | None = None,
) -> dict[str, AnyArray]:
    """The results of a tree: D = saturating_cast(scale_d * result), and the further outputs.

    All values are float64; only casts, stores and D round. A value that a kernel converts to float32 before any
    computation (constants, numbers of operations, f64 and i32 operands) is rounded to float32 here as well, unless D is
    f64: such kernels compute in double. `tolerances` bounds the difference to a kernel's results.

    The tree starts from the accumulator `acc` (..., M, N). Operands are its inputs by name, of their element types: a
    scalar has one element; a row is (N,) or (..., 1, N); a column (M,) or (..., M, 1); a matrix (..., M, N); a mask
    uint8 (..., M, ceil(N / 8)), with eight columns to a byte, the first in the lowest bit. Batch dimensions broadcast
    to acc's. `out_dtype` is the type of D; `scale_d` multiplies D only.

    Returns:
        New arrays by name; D is `out`, of acc's shape. Stored matrices and masks are like matrix operands; a mask's
        bit is 1 where the value is not 0 (also for NaN), its padding 0. A row (..., N) is reduced over all rows, a
        column (..., M) over all columns, a scalar (1,) over all; without elements sum and amax are 0, max is -inf.
    """
    values = values_of(tree, acc, operands, double=computes_in_double(tree, out_dtype))
    with np.errstate(all="ignore"):
        result = np.broadcast_to(values[tree.index(tree.result)], acc.shape)
        outputs = {RESULT: np.array(stored(result, scale_d, out_dtype))}
        for output, node in tree.stores:
            value = np.broadcast_to(values[tree.index(node)], acc.shape)
            if output.dtype is None:
                outputs[output.name] = np.packbits(value != 0.0, axis=-1, bitorder="little")
            else:
                value = reduced(output, value) if output.reduction else value
                outputs[output.name] = np.array(saturating_cast(value, output.dtype))
    return outputs


def computes_in_double(tree: EpilogueVisitorTree, out_dtype: CutlassDtype) -> bool:
    """Whether kernels compute the tree in double: if D, whose type the tree may decide, is f64."""
    decided = tree.result_dtype
    if decided is not None and decided is not out_dtype:
        raise InvalidOperandError(f"out_dtype is {out_dtype.value}; the tree decides that it is {decided.value}")
    return out_dtype is CutlassDtype.F64


def values_of(
    tree: EpilogueVisitorTree, acc: FloatArray, operands: Mapping[str, AnyArray], *, double: bool
) -> list[FloatArray]:
    """The value of every node of the tree, in shapes that broadcast to acc's."""
    if acc.dtype != np.float64 or acc.ndim < 2:
        raise InvalidOperandError(f"acc is {acc.dtype} of shape {acc.shape}; expected float64 of shape (..., M, N)")
    known = {slot.name: slot for slot in tree.inputs}
    for name in operands:
        if name not in known:
            raise InvalidOperandError(f"{name} is no input of the tree; its inputs: {', '.join(known) or 'none'}")
    for slot in tree.inputs:
        if slot.name not in operands:
            raise InvalidOperandError(f"{slot.name} is missing: the tree reads it as a {slot.kind}")
    values: list[FloatArray] = []
    with np.errstate(all="ignore"):
        for node in tree.nodes:
            if node.op == ACCUMULATOR:
                value = acc
            elif node.op == "constant":
                value = _compute_type(np.full((1, 1), float(node.attributes[0])), double=double)
            elif node.op == "input":
                slot = known[str(node.attributes[0])]
                value = _compute_type(_read(slot, np.asarray(operands[slot.name]), acc.shape), double=double)
            else:
                value = apply(node, [values[tree.index(child)] for child in node.inputs], double=double)
            values.append(value)
    return values


def apply(node: Node, inputs: list[FloatArray], *, double: bool) -> FloatArray:
    """A computed node's value from its inputs' values. Call it under `np.errstate(all="ignore")`."""
    if node.op == "cast":
        rounded = to_float64(saturating_cast(inputs[0], CutlassDtype(node.attributes[0])))
        # float32 cannot represent the largest int32.
        return _compute_type(rounded, double=double)
    numbers = [_compute_type(np.array(float(number)), double=double) for number in node.attributes]
    return FUNCTIONS[node.op](*inputs, *numbers)


def reduced_axes(output: Output, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a matrix (..., M, N) that a reduction runs over."""
    return {ROW: (-2,), COLUMN: (-1,), SCALAR: tuple(range(len(shape)))}[output.kind]


def reduced(output: Output, value: FloatArray) -> FloatArray:
    """A reduction of a matrix (..., M, N), in the output's shape."""
    axes = reduced_axes(output, value.shape)
    if output.reduction == "sum":
        found = np.sum(value, axis=axes)
    elif output.reduction == "max":
        found = np.max(value, axis=axes, initial=-np.inf)
    else:
        found = np.max(np.abs(value), axis=axes, initial=0.0)
    return np.reshape(found, (1,)) if output.kind == SCALAR else np.asarray(found)


def _compute_type(x: FloatArray, *, double: bool) -> FloatArray:
    return x if double else x.astype(np.float32).astype(np.float64)


def _read(slot: Input, operand: AnyArray, shape: tuple[int, ...]) -> FloatArray:
    """An operand's values in float64, in a shape that broadcasts to that of the result."""
    *batch, m, n = shape
    if slot.dtype is None:
        if operand.dtype != np.uint8:
            raise InvalidOperandError(f"{slot.name} is {operand.dtype}; expected uint8, the bits of a mask")
    elif element_type(slot.name, operand) is not slot.dtype.storage:
        raise InvalidOperandError(f"{slot.name} is {operand.dtype}; expected {slot.dtype.numpy_name}")
    if slot.kind == SCALAR:
        if operand.size != 1:
            raise InvalidOperandError(f"{slot.name} has shape {operand.shape}; expected one element, a scalar")
        return to_float64(operand).reshape(1, 1)
    least = {ROW: (1, n), COLUMN: (m, 1), MATRIX: (m, n), MASK: (m, -(-n // 8))}[slot.kind]
    vector = slot.kind in (ROW, COLUMN) and operand.ndim == 1
    full = operand.reshape((1, -1) if slot.kind == ROW else (-1, 1)) if vector else operand
    if full.shape[-2:] != least or not broadcasts_to(full.shape[:-2], batch):
        short = {ROW: f"({n},) or ", COLUMN: f"({m},) or "}.get(slot.kind, "")
        raise InvalidOperandError(
            f"{slot.name} has shape {operand.shape}; expected {short}(..., {least[0]}, {least[1]}), a {slot.kind} "
            f"whose batch dimensions broadcast to {tuple(batch)}"
        )
    if slot.kind == MASK:
        return np.unpackbits(full, axis=-1, count=n, bitorder="little").astype(np.float64)
    return to_float64(full)
