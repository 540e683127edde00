"""Random epilogue trees, operands for them, and PyTorch's unfused results.

A seed gives the same tree on every Python: of `random.Random` only `random()` is used, whose numbers never change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from atomr_cutlass.arrays import numerics
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.ops import GRADIENT_OPS, OPS
from atomr_cutlass.generator.epilogue.tree import (
    ACCUMULATOR,
    COLUMN,
    INPUT_DTYPES,
    MASK,
    MATRIX,
    REDUCED_KINDS,
    REDUCTIONS,
    RESULT,
    ROW,
    SCALAR,
    EpilogueVisitorTree,
    Input,
    Node,
    Output,
)
from atomr_cutlass.generator.rules import FP8_TYPES

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Item = TypeVar("Item")

SPECIAL_EVERY = 20
LARGEST = 24.0
"""The approximate bound of values: errors grow with them."""

_ACC = Node(ACCUMULATOR)
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_OF_DIFFERENT = (*_COMPARISONS, "subtract", "divide", "maximum", "minimum")
_STEEP = {"sqrt", "rsqrt", "reciprocal", "log", "divide", "exp"}
_CLAMPS = ((-1.5, 2.0), (0.0, 6.0), (-math.inf, 1.25), (-0.75, math.inf), (-4.0, 4.0))
_SLOPES = (0.01, 0.2, 0.5, -0.25)
_CONSTANTS = (-2.0, -1.0, -0.3, 0.1, 0.5, 1.0, 1.7, 3.0)
_SCALED = {D.I8: 1 / 32, D.I32: 1 / 256}
"""The factor of an operand's integers."""
_RESULTS = {D.I8: 20.0, D.F8E4M3: 8.0}
"""The factor of results of narrow types, to use their range and a little more."""
_SPECIAL = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 1e-40])
_RARE = 0.02
"""How many of a special operand's values are such."""


def is_special(seed: int) -> bool:
    """Whether the tree of a seed makes NaN and infinity on purpose."""
    return seed % SPECIAL_EVERY == SPECIAL_EVERY - 1


def random_tree(seed: int, *, d: D, acc: D, masks: bool = True) -> EpilogueVisitorTree:
    """A tree of 2 to about 30 nodes.

    Values stay within a few orders of magnitude where the accumulator's do, and logarithms, roots and quotients are of
    numbers well above 0, so that tolerances mean something; but for trees of `is_special`.

    Args:
        seed: of the tree.
        d: element type of D, which some trees decide.
        acc: element type of the accumulator.
        masks: whether operands and outputs may be bits: a column-major D has none.
    """
    return _Growing(seed, d, acc, masks=masks).tree()


class Dice:
    """Choices that a seed decides."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def choose(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def often(self, probability: float) -> bool:
        return self._random.random() < probability


@dataclass(frozen=True, eq=False)
class _Value:
    """A node, between which numbers it usually is, and whether it has a value of its own for every element."""

    node: Node
    low: float
    high: float
    varies: bool = True

    @property
    def reach(self) -> float:
        return max(abs(self.low), abs(self.high))


class _Growing:
    """A tree that grows from the accumulator on."""

    def __init__(self, seed: int, d: D, acc: D, *, masks: bool) -> None:
        self._dice = Dice(seed)
        self._d, self._double, self._masks = d, acc is D.F64, masks
        self._special = is_special(seed)
        self._values = [_Value(_ACC, -4.0, 4.0)]
        self._unread = list(self._values)
        self._nodes, self._inputs = 1, 0
        self._stores: list[tuple[Output, Node]] = []

    def tree(self) -> EpilogueVisitorTree:
        wanted = 2 + self._dice.below(20)
        most = min(5, wanted // 3)
        while self._nodes < wanted:
            if self._inputs < most and self._dice.often(0.3):
                self._new(self._input())
            else:
                self._new(self._computed(self._dice.choose([*OPS, "cast"])))
        result = self._result()
        for _ in range(self._dice.below(3)):
            self._store(self._dice.choose([*self._values, result]))
        decided = self._d if self._dice.often(0.3) else None
        return EpilogueVisitorTree(result.node, self._stores, result_dtype=decided)

    # ------------------------------------------------------------------------------------------------------------------

    def _new(self, value: _Value) -> None:
        self._values.append(value)
        self._unread.append(value)

    def _make(self, op: str, low: float, high: float, *inputs: _Value, numbers: tuple[float | str, ...] = ()) -> _Value:
        self._nodes += 1
        self._unread = [value for value in self._unread if value not in inputs]
        varies = any(operand.varies for operand in inputs)
        return _Value(Node(op, tuple(operand.node for operand in inputs), numbers), low, high, varies)

    def _constant(self, x: float) -> _Value:
        return self._make("constant", x, x, numbers=(x,))

    def _input(self) -> _Value:
        kind = self._dice.choose((SCALAR, ROW, ROW, COLUMN, MATRIX, MATRIX, MATRIX, MASK if self._masks else COLUMN))
        name = f"x{self._inputs}"
        self._inputs += 1
        self._nodes += 1
        if kind == MASK:
            return _Value(Node("input", (), (name, kind, MASK)), 0.0, 1.0)
        # Of D's own type a matrix may be loaded as the C operand.
        dtype = self._d if self._dice.often(0.35) else self._dice.choose(INPUT_DTYPES)
        value = _Value(Node("input", (), (name, kind, dtype.value)), -4.0, 4.0, kind == MATRIX)
        if dtype in _SCALED:
            return self._make("multiply", -4.0, 4.0, value, self._constant(_SCALED[dtype]))
        return value

    def _some(self) -> _Value:
        """A value: mostly one that nothing reads yet, sometimes one that is shared."""
        return self._dice.choose(self._unread if self._unread and self._dice.often(0.6) else self._values)

    def _computed(self, op: str) -> _Value:
        arity = 1 if op == "cast" else OPS[op].arity
        values = [self._some() for _ in range(arity)]
        # Of a number and itself these give the same for every element, or what its error decides.
        trivial = op in _OF_DIFFERENT and values[0] is values[1]
        if arity > 1 and (trivial or self._dice.often(0.5 if op in _COMPARISONS else 0.2)):
            values[-1] = self._constant(self._dice.choose(_CONSTANTS))
        if not any(value.varies for value in values):
            values[0] = self._dice.choose([value for value in self._values if value.varies])
        return self._tame(self._apply(op, values))

    def _tame(self, x: _Value) -> _Value:
        if x.reach <= LARGEST or self._special:
            return x
        how = self._dice.below(4)
        if how == 0:
            return self._make("clamp", max(x.low, -8.0), min(x.high, 8.0), x, numbers=(-8.0, 8.0))
        if how == 1:
            return self._make("tanh", -1.0, 1.0, x)
        factor = 2.0 ** -math.ceil(math.log2(x.reach / 4))
        return self._make("multiply", x.low * factor, x.high * factor, x, self._constant(factor))

    def _positive(self, x: _Value) -> _Value:
        """A number well above 0 that depends on x."""
        if x.low >= 0.1 or self._special:
            return x
        how = self._dice.below(3)
        if how == 0 and x.reach <= 5.0:
            return self._make("add", 0.5, x.reach**2 + 0.5, self._square(x), self._constant(0.5))
        if how == 1:
            return self._make("add", 0.25, 1.25, self._make("sigmoid", 0.0, 1.0, x), self._constant(0.25))
        return self._make("add", 0.4, x.reach + 0.4, self._make("absolute", 0.0, x.reach, x), self._constant(0.4))

    def _square(self, x: _Value) -> _Value:
        return self._make("square", 0.0, x.reach**2, x)

    def _limited(self, x: _Value, low: float, high: float) -> _Value:
        if (low <= x.low and x.high <= high) or self._special:
            return x
        return self._make("clamp", low, high, x, numbers=(low, high))

    def _whole(self, x: _Value) -> _Value:
        return self._make("cast", x.low, x.high, x, numbers=(D.I8.value,))

    def _apply(self, op: str, values: list[_Value]) -> _Value:
        """An operation, after whatever keeps its values where it is well conditioned."""
        dice, reach = self._dice, max(value.reach for value in values)
        x, y = values[0], values[min(1, len(values) - 1)]
        made: _Value
        if op in _STEEP:
            made = self._steep(op, x, y)
        elif op == "square":
            made = self._square(self._limited(x, -5.0, 5.0))
        elif op == "cast":
            made = self._make(op, x.low, x.high, x, numbers=(dice.choose(INPUT_DTYPES).value,))
        elif op == "leaky_relu":
            made = self._make(op, -x.reach, x.reach, x, numbers=(dice.choose(_SLOPES),))
        elif op == "clamp":
            low, high = dice.choose(_CLAMPS)
            made = self._make(op, min(max(x.low, low), high), max(min(x.high, high), low), x, numbers=(low, high))
        elif op in ("sigmoid", "tanh"):
            made = self._make(op, -1.0 if op == "tanh" else 0.0, 1.0, x)
        elif op in _COMPARISONS:
            if op in ("equal", "not_equal"):  # as good as never of numbers that are not whole
                x, y = self._whole(x), self._whole(y)
            made = self._make(op, 0.0, 1.0, x, y)
        elif op == "select":
            mask = values[0]
            if mask.high > 1.0 and not self._special:
                mask = self._make("greater", 0.0, 1.0, mask, self._constant(dice.choose(_CONSTANTS)))
            made = self._make(op, -reach, reach, mask, *values[1:])
        elif op in GRADIENT_OPS:
            made = self._make(op, -1.2 * x.reach, 1.2 * x.reach, x, y)
        elif op == "multiply":
            made = self._make(op, -x.reach * y.reach, x.reach * y.reach, x, y)
        elif op == "fma":
            total = x.reach * y.reach + values[2].reach
            made = self._make(op, -total, total, *values)
        elif op in ("add", "subtract"):
            made = self._make(op, -x.reach - y.reach, x.reach + y.reach, x, y)
        elif op == "absolute":
            made = self._make(op, 0.0, x.reach, x)
        else:  # relu, maximum and what else is no larger than its operands
            made = self._make(op, -reach, reach, *values)
        return made

    def _steep(self, op: str, x: _Value, y: _Value) -> _Value:
        if op == "exp":
            x = self._limited(x, -5.0, 2.5)
            return self._make(op, math.exp(max(x.low, -30.0)), math.exp(min(x.high, 30.0)), x)
        if op == "divide":
            y = self._positive(y)
            most = x.reach / max(y.low, 0.1)
            return self._make(op, -most, most, x, y)
        x = self._positive(x)
        low, high = max(x.low, 0.1), max(x.high, 0.1)
        ends = {
            "sqrt": (low**0.5, high**0.5),
            "rsqrt": (high**-0.5, low**-0.5),
            "reciprocal": (1 / high, 1 / low),
            "log": (math.log(low), math.log(high)),
        }[op]
        return self._make(op, *ends, x)

    # ------------------------------------------------------------------------------------------------------------------

    def _result(self) -> _Value:
        """D, into which goes all that nothing has read and that is not stored."""
        left = self._unread
        result = next((value for value in reversed(left) if value.varies), None) or self._values[0]
        for value in left:
            if value is result or value.node is _ACC:
                continue
            if value.varies and len(self._stores) < 3 and self._dice.often(0.4):
                self._store(value)
            else:
                op = self._dice.choose(("add", "subtract", "maximum", "minimum", "multiply"))
                result = self._tame(self._apply(op, [result, value]))
        if _ACC in self._unread_nodes():
            result = self._tame(self._apply("add", [result, self._values[0]]))
        factor = _RESULTS.get(self._d)
        if factor is not None:
            scaled = max(-1e3, factor * result.low), min(1e3, factor * result.high)
            result = self._make("multiply", *scaled, result, self._constant(factor))
        return result

    def _unread_nodes(self) -> list[Node]:
        # The accumulator alone is read by nothing, and is the result already.
        return [value.node for value in self._unread] if len(self._values) > 1 else []

    def _store(self, value: _Value) -> None:
        dice, name = self._dice, f"y{len(self._stores)}"
        self._unread = [operand_node for operand_node in self._unread if operand_node is not value]
        which = dice.below(8 if self._masks else 6)
        if which >= 6:
            node = value.node
            if dice.often(0.7):
                node = self._make("greater", 0.0, 1.0, value, self._constant(dice.choose(_CONSTANTS))).node
            self._stores.append((Output(name, MASK, None), node))
        elif which >= 3:
            dtype = D.F64 if self._double else D.F32
            self._stores.append((Output(name, dice.choose(REDUCED_KINDS), dtype, dice.choose(REDUCTIONS)), value.node))
        else:
            dtype = self._d if dice.often(0.25) else dice.choose(INPUT_DTYPES)
            if dtype in _SCALED and value.reach < 100.0:
                factor = 16.0 if dtype is D.I8 else 250.0
                value = self._make("multiply", factor * value.low, factor * value.high, value, self._constant(factor))
            self._stores.append((Output(name, MATRIX, dtype), value.node))


# ----------------------------------------------------------------------------------------------------------------------
# Operands


def operand_shapes(tree: EpilogueVisitorTree, shape: Shape, seed: int) -> dict[str, Shape]:
    """Extents of operands over a result (..., M, N), with all of its batch dimensions, with few or with none."""
    dice = Dice(seed)
    return {operand.name: _operand_shape(operand, shape, dice) for operand in tree.inputs}


def _operand_shape(operand: Input, shape: Shape, dice: Dice) -> Shape:
    *batch, m, n = shape
    if operand.kind == SCALAR:
        return dice.choose(((1,), (1,), (1, 1), ()))
    own = batch[dice.below(len(batch) + 1) :] if dice.often(0.5) else batch
    own = [1 if dice.often(0.25) else extent for extent in own]
    if operand.kind == ROW and not own and dice.often(0.7):
        return (n,)
    inner = {ROW: (1, n), COLUMN: (m, 1), MATRIX: (m, n), MASK: (m, -(-n // 8))}[operand.kind]
    return (*own, *inner)


def random_operands(tree: EpilogueVisitorTree, shape: Shape, seed: int) -> dict[str, Array]:
    """Operands of a tree by name.

    Args:
        tree: the tree.
        shape: of the result, (..., M, N).
        seed: of extents and values.
    """
    return operands_like(tree, operand_shapes(tree, shape, seed), seed)


def operands_like(tree: EpilogueVisitorTree, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
    """Operands of these extents. With a seed of `is_special` some values are NaN, infinite, zero, tiny or huge."""
    generator = np.random.default_rng(seed)
    return {
        operand.name: random_values(shapes[operand.name], operand.dtype, generator, special=is_special(seed))
        for operand in tree.inputs
    }


def random_values(
    shape: Shape, dtype: D | None, generator: np.random.Generator, *, whole: int = 0, special: bool = False
) -> Array:
    """Numbers up to 4, as integers up to `whole` or else 127 or 1000; bytes of bits where there is no dtype."""
    if dtype is None:
        return generator.integers(0, 256, shape, np.uint8)
    if dtype in numerics.INTEGER_DTYPES:
        most = whole or (127 if dtype is D.I8 else 1000)
        return generator.integers(-most, most + 1, shape).astype(numerics.numpy_dtype(dtype))
    values = np.clip(generator.normal(size=shape), -4.0, 4.0)
    if special:
        values = np.where(generator.random(shape) < _RARE, generator.choice(_SPECIAL, shape), values)
    return numerics.saturating_cast(values, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch


def to_torch(array: Array, device: str = "cpu") -> torch.Tensor:
    """A tensor of a NumPy array, of any dtype that kernels know."""
    import torch

    dtype = numerics.from_numpy_dtype(array.dtype)
    dense = np.ascontiguousarray(array).reshape(array.shape)
    if dtype in (D.BF16, D.F8E4M3, D.F8E5M2):
        bits = torch.from_numpy(dense.view(np.int16 if dtype is D.BF16 else np.uint8)).to(device)
        return bits.view(_torch_dtype(dtype))
    return torch.from_numpy(dense).to(device)


def evaluate_torch(
    tree: EpilogueVisitorTree, acc: torch.Tensor, operands: Mapping[str, torch.Tensor], *, out_dtype: D
) -> dict[str, torch.Tensor]:
    """The outputs of a tree, by name and D as `out`, one PyTorch function for each node.

    Args:
        tree: the tree.
        acc: (..., M, N), float32 or float64: what everything is computed in.
        operands: the tree's inputs by name.
        out_dtype: element type of D. Unless it is f64, constants and operands are rounded to float32 first, as kernels
            have them.
    """
    import torch

    single = out_dtype is not D.F64
    values: list[torch.Tensor] = []
    known = {operand.name: operand for operand in tree.inputs}

    def computed(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float32) if single else x).to(acc.dtype)

    def number(x: Any) -> float:
        return float(np.float32(x)) if single else float(x)

    for node in tree.nodes:
        inputs = [values[tree.index(value)] for value in node.inputs]
        if node.op == ACCUMULATOR:
            value = acc
        elif node.op == "constant":
            value = torch.full((1, 1), number(node.attributes[0]), dtype=acc.dtype, device=acc.device)
        elif node.op == "input":
            given = known[str(node.attributes[0])]
            value = computed(_read_torch(given, operands[given.name], acc.shape[-1]))
        elif node.op == "cast":
            value = computed(_cast_torch(inputs[0], D(node.attributes[0])).to(torch.float64))
        else:
            value = _torch_functions()[node.op](*inputs, *map(number, node.attributes)).to(acc.dtype)
        values.append(value)

    def wide(node: Node) -> torch.Tensor:
        return values[tree.index(node)].expand(acc.shape)

    outputs = {RESULT: _cast_torch(wide(tree.result), out_dtype)}
    for output, node in tree.stores:
        if output.kind == MASK:
            outputs[output.name] = _pack_torch(wide(node) != 0)
        elif output.reduction:
            outputs[output.name] = _reduce_torch(output, wide(node)).to(_torch_dtype(output.dtype))
        else:
            outputs[output.name] = _cast_torch(wide(node), output.dtype)
    return outputs


def _torch_dtype(dtype: D | None) -> torch.dtype:
    import torch

    assert dtype is not None
    found = getattr(torch, dtype.numpy_name)
    assert isinstance(found, torch.dtype)
    return found


def _read_torch(entry: Input, operand: torch.Tensor, columns: int) -> torch.Tensor:
    """An operand as matrices that broadcast."""
    import torch

    if entry.kind == SCALAR:
        return operand.reshape(1, 1)
    if entry.kind == MASK:
        places = torch.arange(8, device=operand.device)
        bits = operand.unsqueeze(-1).to(torch.int32) >> places & 1
        return bits.flatten(-2)[..., :columns].to(torch.float64)
    return operand[None, :] if operand.ndim == 1 else operand


def _cast_torch(x: torch.Tensor, dtype: D | None) -> torch.Tensor:
    """To nearest even; fp8 and integers saturate, and NaN is 0 as an integer."""
    import torch

    assert dtype is not None
    kind = _torch_dtype(dtype)
    if dtype in numerics.INTEGER_DTYPES:
        limits = torch.iinfo(kind)
        return torch.nan_to_num(x, nan=0.0).to(torch.float64).round().clamp(limits.min, limits.max).to(kind)
    if dtype in FP8_TYPES:
        most = numerics.finite_max(dtype)
        return x.clamp(-most, most).to(kind)
    return x.to(kind)


def _pack_torch(bits: torch.Tensor) -> torch.Tensor:
    import torch

    padded = torch.nn.functional.pad(bits.to(torch.int32), (0, -bits.shape[-1] % 8))
    places = torch.arange(8, device=bits.device)
    return (padded.unflatten(-1, (-1, 8)) << places).sum(-1).to(torch.uint8)


def _reduce_torch(output: Output, x: torch.Tensor) -> torch.Tensor:
    import torch

    axes = {ROW: (-2,), COLUMN: (-1,), SCALAR: tuple(range(x.ndim))}[output.kind]
    if output.reduction == "sum":
        reduced = torch.sum(x, axes)
    else:
        reduced = torch.amax(x.abs() if output.reduction == "amax" else x, axes)
    return reduced.reshape(1) if output.kind == SCALAR else reduced


def _torch_functions() -> Mapping[str, Callable[..., torch.Tensor]]:
    import torch
    from torch.nn import functional

    def gradient(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            dy, x = (tensor.contiguous() for tensor in torch.broadcast_tensors(dy, x))
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(function(x), x, dy)
            return dx

        return call

    # PyTorch's own cancel where they vanish, which shows in double.
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))

    def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))

    return {
        "negate": torch.neg,
        "absolute": torch.abs,
        "square": torch.square,
        "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt,
        "reciprocal": torch.reciprocal,
        "exp": torch.exp,
        "log": torch.log,
        "relu": torch.relu,
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        # PyTorch's own divides doubles by six in float32.
        "hardswish": lambda x: x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0,
        "leaky_relu": functional.leaky_relu,
        "clamp": torch.clamp,
        "add": torch.add,
        "subtract": torch.sub,
        "multiply": torch.mul,
        "divide": torch.div,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "equal": torch.eq,
        "not_equal": torch.ne,
        "less": torch.lt,
        "less_equal": torch.le,
        "greater": torch.gt,
        "greater_equal": torch.ge,
        "d_relu": lambda dy, x: torch.where(x > 0, dy, 0.0),
        "d_gelu": gradient(gelu),
        "d_gelu_tanh": gradient(gelu_tanh),
        "d_silu": gradient(functional.silu),
        "d_sigmoid": lambda dy, x: dy * torch.sigmoid(x) * torch.sigmoid(-x),
        "d_tanh": lambda dy, x: dy / torch.cosh(x) ** 2,
        "fma": lambda x, y, z: x * y + z,
        "select": lambda mask, x, y: torch.where(mask != 0, x, y),
    }
