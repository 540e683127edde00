"""Error bounds of kernels with an epilogue tree relative to `evaluate`: a running error analysis over the tree.

Every value has a bound on its error: the largest change that the errors of its inputs can cause, plus its own rounding.
Casts and comparisons need no special treatment in tests: if an input's error can cross a step, the bound includes the
height of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.layouts import broadcasts_to
from ..arrays.numerics import AnyArray, FloatArray, finite_max, saturating_cast, to_float64
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.lower import is_narrow
from ..generator.epilogue.ops import GRADIENT_OPS
from ..generator.epilogue.tree import ACCUMULATOR, RESULT, EpilogueVisitorTree, Node, Output
from .tree import COMPARISONS, BoolArray, apply, computes_in_double, evaluate, reduced, reduced_axes, values_of

_EXACT: Final = frozenset({"negate", "absolute", "maximum", "minimum", "relu", "clamp", "cast"})
"""Operations without a rounding of their own."""


class _Accuracy(NamedTuple):
    """The accuracy with which kernels compute a function f(x): as (1 + e) f(x (1 + d)) + t.

    Attributes:
        argument: |d| in units. Internal rounding before an exponential has the effect of an inexact argument.
        value: |e| in units.
        tail: |t / x| in units, for gradients |t / dy|, where |x| < 8; beyond, negligible. Float kernels approximate the
            distributions in some functions with a bounded absolute error.
    """

    argument: float
    value: float
    tail: float = 0.0


# Twice or more of the errors that epilogue_ops.h states, which were measured on one GPU. Where it states them relative
# to x or dy, the argument's error is that of the exponents there.
_ACCURACY: Final = {
    "sqrt": _Accuracy(0.0, 4.0),
    "rsqrt": _Accuracy(0.0, 5.0),
    "reciprocal": _Accuracy(0.0, 4.0),
    "divide": _Accuracy(0.0, 6.0),
    "exp": _Accuracy(0.0, 6.0),
    "log": _Accuracy(0.0, 4.0),
    "sigmoid": _Accuracy(0.0, 8.0),
    "tanh": _Accuracy(0.0, 6.0),
    "silu": _Accuracy(4.0, 8.0),
    "hardswish": _Accuracy(2.0, 8.0),
    "gelu": _Accuracy(4.0, 8.0, 2.0),
    "gelu_tanh": _Accuracy(8.0, 8.0),
    "d_gelu": _Accuracy(8.0, 12.0, 2.0),
    "d_gelu_tanh": _Accuracy(8.0, 12.0),
    "d_silu": _Accuracy(8.0, 12.0),
    "d_sigmoid": _Accuracy(0.0, 14.0),
    "d_tanh": _Accuracy(0.0, 14.0),
}
# The forms of namespace `narrow` there, in place of those above: 1.2 times the errors of their fits, about 2^-14 (gelu,
# gelu_tanh, d_gelu) and 2^-15.6 (silu, sigmoid); 1.5 times that of tanh, which has no fit.
_NARROW_ACCURACY: Final = _ACCURACY | {
    "sigmoid": _Accuracy(4.0, 400.0),
    "tanh": _Accuracy(0.0, 700.0),
    "silu": _Accuracy(4.0, 400.0),
    "gelu": _Accuracy(4.0, 1000.0, 2.0),
    "gelu_tanh": _Accuracy(8.0, 1200.0, 2.0**-5),
    "d_gelu": _Accuracy(8.0, 900.0, 2.0),
    "d_sigmoid": _Accuracy(4.0, 14.0),
    "d_tanh": _Accuracy(4.0, 14.0),
}


class _Arithmetic(NamedTuple):
    """The arithmetic of a kernel, and the error bounds of its results.

    Attributes:
        double: whether it is double; then the reference is no more exact than the kernel.
        unit: the unit roundoff, including the reference's if that counts.
        tiny: the smallest normal number: kernels may or may not flush smaller ones.
        faint: the error that functions may have where they vanish.
        whole: all integers up to this one are represented.
        limits: narrow forms that return their limit at minus infinity, where the exact forms give NaN.
    """

    double: bool
    unit: float
    tiny: float
    faint: float
    largest: float
    whole: float
    accuracy: Mapping[str, _Accuracy] = _ACCURACY
    limits: frozenset[str] = frozenset()

    def error(self, node: Node, value: FloatArray, inputs: list[FloatArray], errors: list[FloatArray]) -> FloatArray:
        """The bound of the difference between a kernel's value of a node and `value`."""
        op = node.op
        if op in COMPARISONS:
            x, y = inputs
            return _reaches(np.abs(x - y), errors[0] + errors[1]).astype(np.float64)
        if op == "select":
            return _choice(inputs[0] != 0.0, _reaches(np.abs(inputs[0]), errors[0]), inputs[1:], errors[1:])
        if op == "d_relu":
            (dy, x), (error, of_x), zero = inputs, errors, np.zeros((1, 1))
            return _choice(x > 0.0, _reaches(np.abs(x), of_x), [dy, zero], [error, zero])
        accuracy = self.accuracy.get(op)
        ends = []
        for at, (x, below) in enumerate(zip(inputs, errors, strict=True)):
            last = at == len(inputs) - 1
            error = np.where(np.isinf(below), 0.0, below)
            if accuracy is not None and last:
                error = error + np.where(np.isfinite(x), accuracy.argument * self.unit * np.abs(x), 0.0)
            found = [x]
            if error.any():
                low, high = x - error, x + error
                found = [low, high, *(np.clip(point, low, high) for point in _TURNS.get(op, ()) if last)]
            if op in _POLES and last and node.inputs[at].op not in ("input", "constant"):
                found += [np.where(x == 0.0, -x, end) for end in found]
            ends.append(found)
        change = np.zeros(value.shape)
        if any(len(choices) > 1 for choices in ends):
            for corner in itertools.product(*ends):
                change = np.maximum(change, _distance(apply(node, list(corner), double=self.double), value))
        total = change + np.where(np.isfinite(value), self.rounding(op, value, change, inputs), 0.0)
        if op in GRADIENT_OPS and np.isinf(inputs[0]).any():
            slope = apply(node, [np.ones((1, 1)), inputs[1]], double=self.double)
            total = np.where(np.isinf(inputs[0]) & (np.abs(slope) < self.faint), np.inf, total)
        if op in self.limits:
            total = np.where(inputs[0] == -np.inf, np.inf, total)
        for below in errors:
            # Without a bound of an input its consumers have none: NaN is possible at least.
            total = np.where(np.isinf(below), np.inf, total)
        return total

    def rounding(self, op: str, value: FloatArray, change: FloatArray, inputs: list[FloatArray]) -> FloatArray:
        """The error that a kernel's own rounding of a node adds to that caused by its inputs' errors."""
        if op in _EXACT:
            return np.zeros((1, 1))
        magnitude = np.abs(value) + change
        accuracy = self.accuracy.get(op)
        if accuracy is not None:
            factor = 1.0 + np.abs(inputs[0]) if op in GRADIENT_OPS else 1.0
            faint = factor * (self.faint if op in _FADING else 0.0)
            zero = (magnitude == 0.0) & ((inputs[0] == 0.0) if op in _FADING else True)
            own = np.where(zero, 0.0, accuracy.value * self.unit * magnitude + faint)
            if accuracy.tail and not self.double:
                off = accuracy.tail * np.where(np.abs(inputs[-1]) < 8.0, 1.0, 2.0**-24)
                own = own + off * self.unit * np.abs(inputs[0])
            # An intermediate product of a division may overflow.
            return np.where(magnitude > self.largest / 8.0, np.inf, own)
        # Correctly rounded: exact if the inputs are exact and the value is represented.
        narrow = np.abs(value - value.astype(np.float32))
        if not self.double:
            return np.where(change == 0.0, narrow, self.unit * magnitude)
        if op == "fma":
            magnitude = magnitude + np.abs(inputs[0] * inputs[1])
        return np.where((change == 0.0) & (narrow == 0.0), 0.0, self.unit * magnitude)

    def of_accumulator(self, acc: FloatArray, acc_error: npt.ArrayLike) -> FloatArray:
        error = np.asarray(acc_error, dtype=np.float64)
        if not broadcasts_to(error.shape, acc.shape):
            raise InvalidOperandError(f"acc_error has shape {error.shape}; expected that of acc, {acc.shape}")
        if (error < 0.0).any():
            raise InvalidOperandError(f"acc_error is {np.min(error)} somewhere; expected magnitudes")
        total = np.where(np.isnan(error), np.inf, error)
        if not self.double:
            total = total + np.abs(acc - acc.astype(np.float32))
        return np.where(np.isfinite(acc), total, 0.0)

    def scaled(self, value: FloatArray, error: FloatArray, scale: float) -> tuple[FloatArray, FloatArray]:
        factor = np.full((1, 1), scale)
        off = np.abs(factor - (factor if self.double else factor.astype(np.float32)))
        off = np.where(np.isfinite(factor), off, 0.0)
        scaled = value * factor
        total = self.error(Node("multiply"), scaled, [value, factor], [error, off])
        return scaled, self.at_the_ends_of_the_range(scaled, total)

    def at_the_ends_of_the_range(self, value: FloatArray, error: FloatArray) -> FloatArray:
        """The error with that of flushing and overflow."""
        magnitude = np.abs(value)
        flushed = (value != 0.0) & (magnitude - error < 2.0 * self.tiny)
        error = np.where(flushed, error + 2.0 * self.tiny, error)
        return np.where(np.isfinite(value) & (magnitude + error > self.largest), np.inf, error)

    def of_reduction(self, output: Output, value: FloatArray, error: FloatArray) -> FloatArray:
        axes = reduced_axes(output, value.shape)
        if output.reduction == "sum":
            finite = np.where(np.isfinite(value), np.abs(value), 0.0)
            magnitude = reduced(output, finite + error)
            count = value.size // max(magnitude.size, 1)
            whole = np.all((error == 0.0) & (value == np.rint(value)), axis=axes) & (magnitude <= self.whole)
            off = reduced(output, error) + np.where(whole, 0.0, count * self.unit * magnitude)
            return np.where(magnitude > self.largest, np.inf, off)
        if output.reduction == "amax":
            value = np.abs(value)
        ends = [_distance(reduced(output, value + by), reduced(output, value)) for by in (-error, error)]
        return np.where(np.any(np.isinf(error), axis=axes), np.inf, np.maximum(*ends))


_FLOAT: Final = _Arithmetic(
    double=False,
    unit=2.0**-24,
    tiny=2.0**-126,
    faint=2.0**-116,
    largest=finite_max(CutlassDtype.F32),
    whole=2.0**24,
)
_NARROW: Final = _FLOAT._replace(accuracy=_NARROW_ACCURACY, limits=frozenset({"gelu", "gelu_tanh"}))
_DOUBLE: Final = _Arithmetic(
    double=True,
    unit=2.0**-52,
    tiny=2.0**-1022,
    faint=2.0**-980,
    largest=finite_max(CutlassDtype.F64),
    whole=2.0**53,
)

_FADING: Final = frozenset({"gelu", "gelu_tanh", "silu", *GRADIENT_OPS})
"""Functions that vanish towards an infinity: kernels flush their factors there, or replace them by constants."""

# The turning points and poles in an operation's last argument: it is monotone between them, so that its extremes over
# an interval are there or at the interval's ends.
_TURNS: Final[dict[str, tuple[float, ...]]] = {
    **dict.fromkeys(("absolute", "square", "reciprocal", "divide", "d_sigmoid", "d_tanh"), (0.0,)),
    "gelu": (-0.7517915,),
    "gelu_tanh": (-0.7524614,),
    "silu": (-1.2784645,),
    "hardswish": (-1.5,),
    "d_gelu": (-1.4142136, 1.4142136),
    "d_gelu_tanh": (-1.4185051, 1.4185051),
    "d_silu": (-2.3993573, 2.3993573),
}

_POLES: Final = frozenset({"reciprocal", "rsqrt", "divide"})
"""Functions with a pole at 0, whose sign is that of the 0. A computed 0 (or sum of products) may have either."""


def tolerances(
    tree: EpilogueVisitorTree,
    acc: FloatArray,
    acc_error: npt.ArrayLike,
    operands: Mapping[str, AnyArray],
    *,
    out_dtype: CutlassDtype,
    scale_d: float | None = None,
) -> dict[str, FloatArray]:
    """Bounds of the differences between a kernel's outputs and those of `evaluate`.

    A kernel computes in float32, or in double if D is f64, with the narrow forms of activations if `is_narrow`. Sums
    may be in any order. Arguments are those of `evaluate`, and `acc_error`, the bound of the difference between a
    kernel's accumulators and `acc`: one number, or an array that broadcasts to acc's shape. NaN and infinity in acc
    must be the same in the kernel.

    Returns:
        Absolute bounds by name, float64, in the outputs' shapes; infinite where any value is possible, NaN included.
        For a mask (..., M, N), not packed: 1 where both bits are possible.
    """
    if computes_in_double(tree, out_dtype):
        arithmetic = _DOUBLE
    else:
        arithmetic = _NARROW if is_narrow(tree.program, out_dtype) else _FLOAT
    values = values_of(tree, acc, operands, double=arithmetic.double)
    errors: list[FloatArray] = []
    with np.errstate(all="ignore"):
        for node, value in zip(tree.nodes, values, strict=True):
            if node.inputs:
                below = [tree.index(child) for child in node.inputs]
                own = arithmetic.error(node, value, [values[at] for at in below], [errors[at] for at in below])
            else:
                own = arithmetic.of_accumulator(acc, acc_error) if node.op == ACCUMULATOR else np.zeros((1, 1))
            errors.append(arithmetic.at_the_ends_of_the_range(value, own))

        def wide(node: Node) -> tuple[FloatArray, FloatArray]:
            at = tree.index(node)
            return np.broadcast_to(values[at], acc.shape), np.broadcast_to(errors[at], acc.shape)

        value, error = wide(tree.result)
        if scale_d is not None:
            value, error = arithmetic.scaled(value, error, float(scale_d))
        bounds = {RESULT: _after_rounding(value, error, out_dtype)}
        for output, node in tree.stores:
            value, error = wide(node)
            if output.dtype is None:
                bounds[output.name] = _reaches(np.abs(value), error).astype(np.float64)
            else:
                if output.reduction:
                    value, error = reduced(output, value), arithmetic.of_reduction(output, value, error)
                bounds[output.name] = _after_rounding(value, error, output.dtype)
    return bounds


def mismatches(
    tree: EpilogueVisitorTree,
    got: Mapping[str, AnyArray],
    acc: FloatArray,
    acc_error: npt.ArrayLike,
    operands: Mapping[str, AnyArray],
    *,
    out_dtype: CutlassDtype,
    scale_d: float | None = None,
) -> list[str]:
    """The errors in a kernel's outputs, a line for each wrong output; empty where all are right.

    NaN agrees with NaN only, and infinity with the same infinity, unless the bound is infinite. Arguments are those of
    `tolerances`, and the kernel's outputs by name, D as `out`, with the shapes and dtypes that `evaluate` returns.
    """
    wanted = evaluate(tree, acc, operands, out_dtype=out_dtype, scale_d=scale_d)
    bounds = tolerances(tree, acc, acc_error, operands, out_dtype=out_dtype, scale_d=scale_d)
    lines = [f"{name} is no output of the tree" for name in got if name not in wanted]
    for name, want in wanted.items():
        if name not in got:
            lines.append(f"{name} is missing")
            continue
        have = got[name]
        if have.dtype != want.dtype or have.shape != want.shape:
            lines.append(f"{name} is {have.dtype} of shape {have.shape}, expected {want.dtype} of shape {want.shape}")
            continue
        lines += differing(name, have, want, bounds[name])
    return lines


def differing(name: str, have: AnyArray, want: AnyArray, bound: FloatArray) -> dict[str, int]:
    """Descriptions and counts of the errors in an output, given the results of `evaluate` and `tolerances`."""
    found: dict[str, int] = {}
    of, columns = "elements", bound.shape[-1]
    if have.dtype == np.uint8:
        have, want = (np.unpackbits(mask, axis=-1, bitorder="little") for mask in (have, want))
        of, padding = "bits", int(np.count_nonzero(have[..., columns:]))
        if padding:
            found[f"{name} has {padding} bits set after its {columns} columns, expected none"] = padding
        have, want = have[..., :columns], want[..., :columns]
    with np.errstate(all="ignore"):
        far = ~(_distance(to_float64(have), to_float64(want)) <= bound)
    if far.any():
        first, count = tuple(int(at) for at in np.argwhere(far)[0]), int(far.sum())
        within = "" if of == "bits" else f" within {bound[first]:.3g}"
        text = f"{name}{list(first)} is {float(have[first]):.9g}, expected {float(want[first]):.9g}{within}"
        found[f"{text} ({count} of {far.size} {of} differ)"] = count
    return found


def _choice(first: BoolArray, either: BoolArray, values: list[FloatArray], errors: list[FloatArray]) -> FloatArray:
    """The error of a choice between two values where either may be chosen."""
    chosen = np.where(first, *errors)
    other = _distance(*values) + np.where(first, errors[1], errors[0])
    return np.where(either, np.maximum(chosen, other), chosen)


def _after_rounding(value: FloatArray, error: FloatArray, dtype: CutlassDtype) -> FloatArray:
    """The bound of the difference after rounding both values to an element type."""
    rounded, low, high = (to_float64(saturating_cast(x, dtype)) for x in (value, value - error, value + error))
    bound = np.maximum(_distance(low, rounded), _distance(high, rounded))
    return np.where(np.isinf(error), np.inf, bound)


def _reaches(distance: FloatArray, error: FloatArray) -> BoolArray:
    """Where an error may move a value across a step."""
    reaches: BoolArray = ((error > 0.0) & (distance <= error)) | np.isinf(error)
    return reaches


def _distance(x: FloatArray, y: FloatArray) -> FloatArray:
    """|x - y|: 0 for NaN and NaN or equal infinities, infinite for a number and NaN."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    difference = np.abs(x - y)
    return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
