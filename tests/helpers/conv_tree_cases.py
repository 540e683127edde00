"""Convolutions with epilogue trees: the cases that tests compute on a GPU, and their kernels.

Decided without a GPU, as `tree_cases`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atomr_cutlass import _core, reference
from atomr_cutlass import epilogue as evt
from atomr_cutlass.arrays import numerics
from atomr_cutlass.arrays.numerics import FloatArray
from atomr_cutlass.arrays.operands import CUDA
from atomr_cutlass.epilogue.results import ImageResult
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.tree import MATRIX, ROW, SCALAR, EpilogueVisitorTree, Input, Output
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.conv2d import reference as conv_reference
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP, OPERANDS, ConvGeometry, ConvProblem, conv_geometry
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.devices import Device
from random_trees import Dice, operands_like, random_tree, random_values
from tree_cases import Array, Layout, Shape

_ADDRESS = 1 << 20


@dataclass(frozen=True, eq=False)
class ConvCase:
    """A convolution with a tree on top; everything in the order of NHWC.

    Attributes:
        name: of the case.
        tree: what follows.
        op: of the kernel's key, `conv2d_fprop` or `conv2d_dgrad`.
        a, d: element types of the operands and of the result.
        x: extents of the image.
        w: K, R and S.
        stride, padding: of the filter.
        operands, outputs: the layouts of the tree's arrays, by name.
        function: what is traced for the tree, if it is.
        options: `bias` and `activation` that make the tree, if they do.
        precision: of float32 operands.
        layout: in which calls name dimensions.
        beta: 0 without C.
        pad: elements between the pixels of the result.
        seed: of the values.
    """

    name: str
    tree: EpilogueVisitorTree
    op: str
    a: D
    d: D
    x: tuple[int, int, int, int]
    w: tuple[int, int, int]
    stride: int = 1
    padding: int = 0
    operands: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    layout: str = "nhwc"
    alpha: float = 1.0
    beta: float = 0.0
    pad: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def geometry(self) -> ConvGeometry:
        return conv_geometry(
            self.x, (*self.w, self.x[3]), stride=self.stride, padding=self.padding, dilation=1, groups=1
        )

    @property
    def image(self) -> tuple[int, int, int, int]:
        """Extents of the result."""
        return self.geometry.y_shape if self.op == FPROP else self.geometry.x_shape

    @property
    def math(self) -> str:
        return numerics.math_mode(self.a, self.precision)

    @property
    def array_layouts(self) -> dict[str, Layout]:
        """The layout of every array, in the order of a plan's operands."""
        g = self.geometry
        first = g.x_shape if self.op == FPROP else g.y_shape
        out = Layout(self.image, self.d, "r", self.pad)
        found = {"a": Layout(first, self.a), "b": Layout(g.w_shape, self.a), **({"c": out} if self.beta else {})}
        return found | dict(self.operands) | dict(self.outputs) | {"out": out}

    @property
    def problem(self) -> ConvProblem:
        specs = {name: array.spec for name, array in self.array_layouts.items() if name in ("a", "b", "c", "out")}
        views = {
            name: _core.Operand(
                _ADDRESS + array.offset * array.element.bits // 8,
                array.shape,
                array.strides,
                array.element.dlpack,
                CUDA,
                0,
            )
            for name, array in self.array_layouts.items()
            if name not in specs
        }
        # Calls with bias and activation ask for no tree, except with C.
        fusion = ImageResult(self.image, self.layout).fusion(self.tree, views)
        math = numerics.FAST if self.a is D.F8E4M3 else self.math
        return ConvProblem(
            self.op, self.geometry, specs["a"], specs["b"], specs.get("c"), specs["out"], math, 0, fusion=fusion
        )

    def key(self, device: Device) -> KernelKey:
        """The kernel."""
        return select.choose(ConvSearch(self.problem, device), record=False).key

    def values(self) -> dict[str, Array]:
        """The operands, C and the tree's inputs, on the host."""
        generator = np.random.default_rng(self.seed)
        made = {
            name: random_values(array.shape, array.dtype, generator, whole=4 if name == "c" else 0)
            for name, array in self.array_layouts.items()
            if name in ("a", "b", "c")
        }
        if self.math == "tf32":  # exact ones leave the tightest tolerance
            made |= {name: numerics.round_to_tf32(made[name]) for name in ("a", "b")}
        return made | operands_like(self.tree, {name: array.shape for name, array in self.operands.items()}, self.seed)

    def matrices(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays of the tree as it sees them."""
        found = {}
        for name, array in values.items():
            dense = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
            found[name] = array.reshape(ImageResult(self.image).as_matrix(name, array.shape, dense)[0])
        return found

    def accumulators(self, values: Mapping[str, Array]) -> tuple[FloatArray, FloatArray]:
        """The accumulator that the tree starts from, and the tolerance of a kernel's."""
        given: tuple[Any, ...] = (self.op, values["a"], values["b"], self.image, values.get("c"))
        how = {"stride": self.stride, "padding": self.padding, "alpha": self.alpha, "beta": self.beta}
        rounding = "default" if self.a.bits == 8 else self.math
        acc = conv_reference.convolution(*given, **how, out_dtype=D.F64, math=rounding)
        depth = self.w[1] * self.w[2] * (self.x[3] if self.op == FPROP else self.w[0])
        math = numerics.FAST if self.a.bits == 8 else self.math
        limits = reference.tolerance(self.a, D.F32, depth, math, exact_operands=self.math == "tf32")
        shape = ImageResult(self.image).matrix
        magnitudes = conv_reference.absolute_convolution(*given, **how)
        return acc.reshape(shape), (limits.atol_factor * magnitudes).reshape(shape)

    @property
    def names(self) -> tuple[str, str]:
        """The operands' names in a call."""
        return OPERANDS[self.op]


@dataclass(frozen=True)
class _Setup:
    x: tuple[int, int, int, int]
    w: tuple[int, int, int]
    stride: int = 1
    padding: int = 0
    beta: float = 0.0
    pad: int = 0
    layout: str = "nhwc"


_SETUPS = (
    _Setup((2, 14, 14, 64), (96, 3, 3), padding=1),
    _Setup((1, 9, 11, 32), (48, 3, 3), layout="nchw"),
    _Setup((3, 7, 7, 64), (144, 1, 1), beta=0.5),
    _Setup((2, 12, 10, 48), (64, 3, 2), padding=1, pad=16),
    _Setup((4, 8, 8, 32), (160, 3, 3), padding=1, beta=-1.0, layout="nchw"),
    _Setup((1, 1, 1, 64), (32, 1, 1)),
    _Setup((5, 5, 13, 80), (16, 3, 3), padding=2),
)
_STRIDED = _Setup((2, 15, 13, 48), (64, 5, 5), stride=2, padding=2)

_ROWS: tuple[tuple[D, str | None, D, str, int], ...] = (
    (D.BF16, None, D.BF16, FPROP, 8),
    (D.F16, None, D.F16, FPROP, 4),
    (D.BF16, None, D.F32, FPROP, 2),
    (D.F16, None, D.F8E4M3, FPROP, 3),
    (D.BF16, None, D.I8, FPROP, 2),
    (D.F32, "tf32", D.F32, FPROP, 3),
    (D.F8E4M3, None, D.BF16, FPROP, 2),
    (D.BF16, None, D.BF16, DGRAD, 4),
    (D.F16, None, D.F16, DGRAD, 2),
)
"""Element type and precision of the operands, element type of D, operation; how many trees."""


@functools.cache
def cases() -> tuple[ConvCase, ...]:
    """30 random trees."""
    made: list[ConvCase] = []
    for start, (a, precision, d, op, count) in enumerate(_ROWS):
        for number in range(count):
            setup = _SETUPS[(3 * start + number) % len(_SETUPS)]
            if op == FPROP and number == 1:
                setup = _STRIDED
            made.append(_random_case(500 + len(made), a, precision, d, op, setup))
    return tuple(made)


def _random_case(seed: int, a: D, precision: str | None, d: D, op: str, setup: _Setup) -> ConvCase:
    dice = Dice(2_000_000 + seed)
    tree = random_tree(seed, d=d, acc=D.F32)
    plain = ConvCase("", tree, op, a, d, setup.x, setup.w, setup.stride, setup.padding)
    depth = setup.w[1] * setup.w[2] * (setup.x[3] if op == FPROP else setup.w[0])
    words = [str(seed), op.removeprefix("conv2d_"), a.value, d.value, "x".join(map(str, setup.x)), setup.layout]
    return ConvCase(
        "-".join(words),
        tree,
        op,
        a,
        d,
        setup.x,
        setup.w,
        setup.stride,
        setup.padding,
        operands={operand.name: _input_layout(operand, plain.image, dice) for operand in tree.inputs},
        outputs={output.name: _output_layout(output, plain.image, dice) for output in tree.outputs},
        precision=precision,
        layout=setup.layout,
        alpha=dice.choose((1.0, -1.0, 1.5, 0.5)) / math.sqrt(depth),
        beta=setup.beta,
        pad=setup.pad,
        seed=seed,
    )


def _input_layout(operand: Input, image: Shape, dice: Dice) -> Layout:
    if operand.kind == SCALAR:
        return Layout((1,), operand.dtype)
    if operand.kind == ROW:
        return Layout((image[-1],), operand.dtype, "r", dice.choose((0, 0, 1)), dice.choose((0, 1)))
    pads = (0, 0, 16, 3) if operand.kind == MATRIX else (0, 1)
    return Layout(
        ImageResult(image).array_shape(operand), operand.dtype, "r", dice.choose(pads), dice.choose((0, 0, 1))
    )


def _output_layout(output: Output, image: Shape, dice: Dice) -> Layout:
    pad = dice.choose((0, 0, 8, 1)) if output.kind == MATRIX and not output.reduction else 0
    return Layout(ImageResult(image).array_shape(output), output.dtype, "r", pad, dice.choose((0, 1)))


def block(acc: Any, scale: Any, bias: Any, residual: Any) -> Any:
    """The end of a residual block: a folded batch normalization, the sum and its rectification."""
    return evt.relu(acc * scale + bias + residual)


def quantized(acc: Any, bias: Any, scale: Any) -> Any:
    """For the next convolution in fp8, with what its scale is chosen from."""
    y = evt.silu(acc + bias)
    return {"out": evt.cast(y * scale, D.F8E4M3), "amax": evt.total_amax(y)}


def gradient(acc: Any, mask: Any) -> Any:
    """Through a rectification, with the gradient of the bias before it."""
    y = evt.where(mask, acc, 0.0)
    return {"out": y, "sums": evt.row_sum(y)}


@functools.cache
def common() -> dict[str, ConvCase]:
    """The epilogues of usual networks, by their usual names."""
    x, w = (2, 14, 14, 64), (64, 3, 3)
    image = (2, 14, 14, 64)
    made = {}
    for layout in ("nhwc", "nchw"):
        rows = {"scale": Layout((64,), D.F32), "bias": Layout((64,), D.F32), "residual": Layout(image, D.BF16)}
        made[f"block-{layout}"] = _traced(f"block-{layout}", block, D.BF16, rows, x, w, layout=layout)
    rows = {"bias": Layout((64,), D.F16), "scale": Layout((1,), D.F32)}
    made["quantized"] = _traced("quantized", quantized, D.F16, rows, x, w, d=D.F8E4M3)
    rows = {"mask": Layout((2, 14, 14, 8), None)}
    made["gradient"] = _traced("gradient", gradient, D.BF16, rows, x, w, op=DGRAD)
    return made


def _traced(
    name: str,
    function: Callable[..., Any],
    a: D,
    operands: dict[str, Layout],
    x: tuple[int, int, int, int],
    w: tuple[int, int, int],
    *,
    d: D | None = None,
    op: str = FPROP,
    layout: str = "nhwc",
) -> ConvCase:
    image = ImageResult(ConvCase("", evt.EvtBuilder().build(), op, a, a, x, w, 1, 1).image)
    kinds = {}
    for key, array in operands.items():
        shape, _ = image.as_matrix(key, array.shape, array.strides)
        kinds[key] = evt.operand_of(shape, *image.matrix, array.dtype or (1, 8), key)
    tree = evt.trace(function, kinds, out_dtype=d or a, compute_dtype=D.F32).tree
    inputs = {operand.name: operands[operand.name] for operand in tree.inputs}
    outputs = {output.name: Layout(image.array_shape(output), output.dtype) for output in tree.outputs}
    alpha = 1.0 / math.sqrt(w[1] * w[2] * x[3])
    return ConvCase(
        name, tree, op, a, d or a, x, w, 1, 1, inputs, outputs, function=function, layout=layout, alpha=alpha
    )


def needed() -> list[ConvCase]:
    """All cases that need kernels."""
    return [*cases(), *common().values(), *with_options()]


@functools.cache
def with_options() -> tuple[ConvCase, ...]:
    """Bias, activation and C together, which only trees compute."""
    made = []
    for a, activation in ((D.BF16, "relu"), (D.F16, "gelu"), (D.BF16, None)):
        builder = evt.EvtBuilder()
        builder.add_bias("bias", dtype=a)
        if activation is not None:
            builder.activation(activation)
        made.append(
            ConvCase(
                f"bias-c-{activation}",
                builder.build(),
                FPROP,
                a,
                a,
                (2, 9, 9, 64),
                (72, 3, 3),
                1,
                1,
                {"bias": Layout((72,), a)},
                options={"activation": activation},
                alpha=1 / 24.0,
                beta=-0.5,
                seed=len(made),
            )
        )
    return tuple(made)


def keys(device: Device) -> list[KernelKey]:
    """The kernels of all cases on a GPU, once each."""
    return list(dict.fromkeys(case.key(device) for case in needed()))
