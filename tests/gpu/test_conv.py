"""`conv2d` and its gradients on the GPU, against the reference and against PyTorch.

Small cases are compared with NumPy's reference, larger ones with PyTorch's convolution in float64.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass import SmArch, reference
from atomr_cutlass.arrays import numerics
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.generator.rules import FP8_TYPES
from atomr_cutlass.ops.conv2d import function as conv_module
from atomr_cutlass.ops.conv2d import kernels as conv_plan
from atomr_cutlass.ops.conv2d import reference as conv_reference
from atomr_cutlass.ops.conv2d.kernels import ConvFormulation
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP, WGRAD, ConvGeometry, ConvProblem, conv_geometry, result_shape
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.search import Candidate
from atomr_cutlass.reference import Tolerance
from conv_layers import LAYERS, RESNET50, Layer
from fp8_matrices import GuardedFp8, guarded, host
from gpu_matrices import (
    NUMPY_LIMIT,
    Guarded,
    Kind,
    assert_same_bits,
    element_type,
    fill,
    has_default_preset,
    pairs,
    result_of,
    spec,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

COMPILED = "ATOMR_CUTLASS_TEST_JIT" in os.environ
BACKEND = "jit" if COMPILED else "auto"

OPS = ("fprop", "dgrad", "wgrad")
KEYS = {"fprop": FPROP, "dgrad": DGRAD, "wgrad": WGRAD}

F16, BF16, IEEE, TF32, E4M3, E5M2 = (
    Kind(D.F16), Kind(D.BF16), Kind(D.F32, "ieee"), Kind(D.F32, "tf32"), Kind(D.F8E4M3), Kind(D.F8E5M2),
)  # fmt: skip
HAS_3XTF32 = any(key.math == "3xtf32" for _, key in cells([SmArch.SM90A]) if key.op in KEYS.values())
KINDS = (F16, BF16, IEEE, TF32, *((Kind(D.F32, "3xtf32"),) if HAS_3XTF32 else ()), E4M3, E5M2)

Pair = tuple[int, int]


@pytest.fixture(autouse=True)
def _cudnn(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's convolutions in the precision of their dtype, unless a test says otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@dataclass(frozen=True)
class Case:
    """A call. `w` is (K, R, S); `pitches` and `offsets`, in elements, are those of the two operands and the result."""

    op: str
    kind: Kind
    x: tuple[int, int, int, int]
    w: tuple[int, int, int]
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    layout: str = "nhwc"
    out: D | None = None
    alpha: float = 1.0
    beta: float = 0.0
    in_place: bool = False
    bias: bool = False
    activation: str | None = None
    pitches: tuple[int, int, int] = (0, 0, 0)
    offsets: tuple[int, int, int] = (0, 0, 0)
    whole: bool = False

    def __str__(self) -> str:
        plain = Case(self.op, self.kind, self.x, self.w)
        changed = [
            f"{name}{getattr(self, name)}"
            for name in vars(self)
            if name not in ("op", "kind", "x", "w") and getattr(self, name) != getattr(plain, name)
        ]
        parts = [self.op, str(self.kind), "x".join(map(str, self.x)), "x".join(map(str, self.w)), *changed]
        return "-".join(part.replace(" ", "") for part in parts)

    @property
    def geometry(self) -> ConvGeometry:
        return conv_geometry(
            self.x,
            (*self.w, self.x[3] // self.groups),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )

    @property
    def result(self) -> D:
        return result_of(self.kind, self.out)


def shapes_of(op: str, g: ConvGeometry) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of the two operands and the result."""
    x, w, y = g.x_shape, g.w_shape, g.y_shape
    return {"fprop": (x, w, y), "dgrad": (y, w, x), "wgrad": (y, x, w)}[op]


def products(op: str, g: ConvGeometry) -> int:
    """How many products a sum has at most."""
    return {"fprop": g.r * g.s * g.c, "dgrad": g.r * g.s * g.k, "wgrad": g.n * g.p * g.q * g.groups}[op] // g.groups


def work_of(g: ConvGeometry) -> int:
    """Multiply-adds."""
    return math.prod(g.y_shape) * g.r * g.s * g.c // g.groups


def nchw(tensor: Any) -> Any:
    """The same memory, dimensions in PyTorch's order."""
    return tensor.permute(0, 3, 1, 2)


def placed(
    shape: tuple[int, ...],
    dtype: D,
    seed: int,
    *,
    whole: bool = False,
    tf32: bool = False,
    pad: int = 0,
    offset: int = 0,
) -> Any:
    """A random array inside poison, its pixels `pad` elements further apart than they need to be."""
    made = guarded(shape, dtype, pad=pad, offset=offset)
    made.view.copy_(fill(shape, D.F32, seed, whole=whole, tf32=tf32).to(made.view.dtype))
    return made.view


def poisoned(shape: tuple[int, ...], dtype: D, *, pad: int = 0, offset: int = 0) -> Guarded | GuardedFp8:
    """Where a result goes."""
    return guarded(shape, dtype, pad=pad, offset=offset)


def call(op: str, a: Any, b: Any, g: ConvGeometry, c: Any = None, *, layout: str = "nhwc", **options: Any) -> Any:
    """One of the three functions; skips where the table lacks a kernel that the default preset does not promise."""

    def named(array: Any) -> Any:
        return nchw(array) if layout == "nchw" and array is not None and array.ndim == 4 else array

    given: dict[str, Any] = {
        "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups, "layout": layout,
        "backend": BACKEND,
    } | options  # fmt: skip
    if "out" in given:
        given["out"] = named(given["out"])
    try:
        if op == "fprop":
            return ac.conv2d(named(a), named(b), named(c), **given)
        n, h, w, channels = g.x_shape if op == "dgrad" else g.w_shape
        shape = (n, channels, h, w) if layout == "nchw" else (n, h, w, channels)
        return (ac.conv2d_dgrad if op == "dgrad" else ac.conv2d_wgrad)(named(a), named(b), shape, named(c), **given)
    except ac.KernelNotFoundError as error:
        lacking(error)


def lacking(error: Exception, arch: SmArch | None = None) -> NoReturn:
    """Skips, unless the default preset has the kernel and is installed for the arch, or else for this GPU."""
    elsewhere = any(text in str(error) for text in ("PRESET=full", "run time only", "in no preset"))
    if not elsewhere and has_default_preset(arch):
        raise error
    pytest.skip(str(error))


def run(case: Case, *, with_torch: bool = False) -> None:
    """Makes the call and checks everything that it wrote or should not have."""
    g, kind = case.geometry, case.kind
    # tf32 operands that are exact leave the tightest tolerance; test_tf32_rounds_its_operands is about the others.
    how: dict[str, Any] = {"whole": case.whole, "tf32": kind.math in ("tf32", "3xtf32")}
    first, second, shape = shapes_of(case.op, g)
    a = placed(first, kind.dtype, 1, pad=case.pitches[0], offset=case.offsets[0], **how)
    b = placed(second, kind.dtype, 2, pad=case.pitches[1], offset=case.offsets[1], **how)
    out = poisoned(shape, case.result, pad=case.pitches[2], offset=case.offsets[2])
    c = before = bias = None
    if case.beta != 0:
        c = before = placed(shape, case.result, 3, pad=case.pitches[2], whole=case.whole)
        if case.in_place:
            before = c.clone()
            out.view.copy_(c)
            c = out.view
    if case.bias:
        bias = fill(shape[-1:], case.result, 4, whole=case.whole)
    options: dict[str, Any] = {"alpha": case.alpha, "beta": case.beta, "out": out.view}
    if kind.dtype is D.F32:
        options["precision"] = kind.precision
    if case.op != "wgrad":
        options |= {"bias": bias, "activation": case.activation}
    returned = call(case.op, a, b, g, c, layout=case.layout, **options)
    assert returned.data_ptr() == out.view.data_ptr()
    out.assert_guards()
    check(case, out.view, a, b, before, bias, exact=True)
    if with_torch:
        check_with_torch(case, out.view, a, b)


def limits_of(case: Case, *, exact: bool) -> Tolerance:
    """The error that the kernel may have: of fp8, fprop's kernels accumulate as fast accumulation does."""
    found = reference.tolerance(
        case.kind.dtype,
        case.result,
        products(case.op, case.geometry),
        case.kind.math,
        exact_operands=exact,
        fast_accum=case.op == "fprop" and case.kind.dtype in FP8_TYPES,
    )
    # An activation passes an error on, the steepest (hardswish) with a factor of 1.5.
    return found._replace(atol_factor=found.atol_factor * 2) if case.activation else found


def check(case: Case, d: Any, a: Any, b: Any, c: Any = None, bias: Any = None, *, exact: bool = False) -> None:
    """`d` agrees with the reference; `exact`: tf32 represents the operands."""
    g, result, limits = case.geometry, case.result, limits_of(case, exact=exact)
    if work_of(g) > NUMPY_LIMIT:
        check_on_gpu(case, d, a, b, c, bias, limits)
        return
    op = f"conv2d_{case.op}"
    given: tuple[Any, ...] = (op, host(a), host(b), result_shape(op, g))
    options: dict[str, Any] = {
        "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups, "alpha": case.alpha,
        "beta": case.beta, "c": None if c is None else host(c), "bias": None if bias is None else host(bias),
    }  # fmt: skip
    scale = conv_reference.absolute_convolution(*given, **options)
    how = {"activation": case.activation, "out_dtype": result, "math": case.kind.math}
    want = conv_reference.convolution(*given, **options, **how)
    got = host(d)
    wrong = ~reference.within_tolerance(got, want, scale, limits, result)
    if wrong.any():
        where = np.argwhere(wrong)
        samples = ", ".join(f"{tuple(map(int, i))}: {got[tuple(i)]} for {want[tuple(i)]}" for i in where[:6])
        raise AssertionError(f"{len(where)} of {got.size} elements are wrong (got, for wanted): {samples}")


def torch_conv(op: str, a: Any, b: Any, g: ConvGeometry) -> Any:
    """PyTorch's convolution or gradient, of arrays in the order of NHWC, in their own dtype."""
    from torch.nn import functional, grad

    (top, bottom), (left, right) = g.padding
    even = (top, left) == (bottom, right)
    how: Any = {
        "stride": g.stride, "padding": (top, left) if even else (0, 0), "dilation": g.dilation, "groups": g.groups,
    }  # fmt: skip

    def image(tensor: Any) -> Any:
        return nchw(tensor) if even else functional.pad(nchw(tensor), (left, right, top, bottom))

    if op == "fprop":
        made = functional.conv2d(image(a), nchw(b), None, **how)
    elif op == "wgrad":
        made = grad.conv2d_weight(image(b), (g.k, g.c // g.groups, g.r, g.s), nchw(a), **how)
    elif even:
        made = grad.conv2d_input((g.n, g.c, g.h, g.w), nchw(b), nchw(a), **how)
    else:
        padded = (g.n, g.c, g.h + top + bottom, g.w + left + right)
        made = grad.conv2d_input(padded, nchw(b), nchw(a), **how)[:, :, top : top + g.h, left : left + g.w]
    return made.permute(0, 2, 3, 1)


ACTIVATIONS = tuple(name for name in reference.ACTIVATIONS if name != "identity")


def activated(values: Any, activation: str | None) -> Any:
    """The activations that cases too large for NumPy have."""
    if activation in (None, "identity"):
        return values
    assert activation == "relu"
    return values.clamp_min(0)


def check_on_gpu(case: Case, d: Any, a: Any, b: Any, c: Any, bias: Any, limits: Tolerance) -> None:
    """For what NumPy would take too long for: float64 on the GPU. Nothing in it is NaN or infinite."""
    import torch

    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    want = torch_conv(case.op, wide_a, wide_b, case.geometry) * case.alpha
    scale = torch_conv(case.op, wide_a.abs_(), wide_b.abs_(), case.geometry) * abs(case.alpha)
    for term, factor in ((c, case.beta), (bias, 1.0)):
        if term is not None:
            want = want + term.to(torch.float64) * factor
            scale = scale + term.to(torch.float64).abs() * abs(factor)
    want = activated(want, case.activation)
    bound = scale * limits.atol_factor + want.abs() * limits.rtol + numerics.smallest_step(case.result)
    assert_close(d, want, bound)


def check_with_torch(case: Case, d: Any, a: Any, b: Any) -> None:
    """The plain convolution agrees with PyTorch's in the same dtype, which has errors of its own."""
    import torch

    assert (case.alpha, case.beta, case.bias, case.activation) == (1.0, 0.0, False, None)
    if case.kind.dtype in FP8_TYPES:
        return
    g, limits = case.geometry, limits_of(case, exact=False)
    torch.backends.cudnn.allow_tf32 = case.kind.math == "tf32"
    theirs = torch_conv(case.op, a, b, g).to(torch.float64)
    torch.backends.cudnn.allow_tf32 = False
    scale = torch_conv(case.op, a.to(torch.float64).abs(), b.to(torch.float64).abs(), g)
    # cuDNN may transform operands before it multiplies them (Winograd), with roundings of the size of a typical sum.
    roundings = (2.0**-7 if case.kind.dtype.bits == 16 else 2.0**-14) / math.sqrt(products(case.op, g))
    bound = scale * (4 * limits.atol_factor + roundings) + theirs.abs() * 4 * limits.rtol
    assert_close(d, theirs, bound + 2 * numerics.smallest_step(case.result))


def assert_close(d: Any, want: Any, bound: Any) -> None:
    import torch

    # A NaN compares as not close.
    wrong = ~((d.to(torch.float64) - want).abs() <= bound)
    if bool(wrong.any()):
        where = wrong.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{where.shape[0]} of {d.numel()} elements are wrong; the first at {first}: {float(d[first])} instead of "
            f"{float(want[first])}, off by more than {float(bound[first])}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Every cell
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", every_cell.keys(*KEYS.values(), want=every_cell.is_plain), ids=lambda key: key.name)
def test_every_cell(key: KernelKey, torch: Any) -> None:
    """Each kernel of the table by itself; with ATOMR_CUTLASS_TEST_JIT those of the matrix, compiled."""
    info = every_cell.row_of(key)
    exact = key.math in ("tf32", "3xtf32")
    problems = every_cell.conv_problems(key, devices.get(0))
    for problem in problems:
        a, b = (placed(operand.shape, dtype, seed, tf32=exact) for operand, dtype, seed in (
            (problem.a, key.a, 1), (problem.b, key.b, 2),
        ))  # fmt: skip
        out = poisoned(problem.d.shape, key.d)
        placed_problem = replace(problem, a=spec(a), b=spec(b), d=spec(out.view))
        plan = conv_plan.make(
            placed_problem, candidate=Candidate(key, info, 0.0, ConvFormulation(placed_problem)), like=a
        )
        assert plan.kernel_name == key.name
        plan(a, b, out.view)
        torch.cuda.synchronize()
        out.assert_guards()
        limits = reference.tolerance(
            key.a, key.d, products(key.op.removeprefix("conv2d_"), problem.geometry), key.math, exact_operands=exact,
            fast_accum=key.a in FP8_TYPES,
        )  # fmt: skip
        want, scale = every_cell.conv_expected(problem, host(a), host(b))
        got = host(out.view)
        wrong = ~reference.within_tolerance(got, want, scale, limits, key.d)
        samples = f"{got[wrong][:3]} instead of {want[wrong][:3]}"
        assert not wrong.any(), f"{problem.geometry}: {int(wrong.sum())} of {wrong.size} are wrong: {samples}"
    assert problems
    every_cell.right(key, info, f"{len(problems)} geometries")


# ----------------------------------------------------------------------------------------------------------------------
# Random geometry
# ----------------------------------------------------------------------------------------------------------------------

RANDOM_CASES = 240
"""In each direction."""

FINE = (4, 8, 12, 16, 32, 64, 100)
ANY = (1, 2, 3, 4, 5, 7, 8, 8, 16, 24, 32, 40, 64, 96, 130)


def random_case(op: str, index: int) -> Case:
    """Any geometry that there are kernels for: `conv_plan` refuses what is left out here, by name."""
    choose = random.Random(f"{op} {index}")
    kind = KINDS[index % len(KINDS)]
    eight_bits = kind.dtype in FP8_TYPES
    # TF32's gradients, and all of 3xTF32, read vectors of 4 only; it has no groups.
    narrow = kind.math == "3xtf32" or (kind.math == "tf32" and op != "fprop")
    channels = FINE if narrow else ANY
    while True:
        groups = 1 if kind.precision in ("tf32", "3xtf32") else choose.choice((1, 1, 1, 1, 2, 3, 4, 8))
        c, k = choose.choice(channels), choose.choice(channels)
        if groups > 1:
            c, k = groups * min(c, 24), groups * min(k, 24)
        if kind.precision not in ("tf32", "3xtf32") and choose.random() < 0.15:
            c = choose.choice((8, 16, 24, 64, 65, 96, 3))
            groups, k = c, c * choose.choice((1, 1, 1, 2))
        taps = (choose.choice((1, 1, 2, 3, 3, 3, 4, 5, 6, 7)), choose.choice((1, 1, 2, 3, 3, 3, 4, 5, 6, 7)))
        stride = choose.choice(((1, 1), (1, 1), (2, 2), (3, 3), (1, 2), (3, 1)))
        dilation = choose.choice(((1, 1), (1, 1), (1, 1), (2, 2), (1, 3)))
        if op == "dgrad" and stride != (1, 1):
            dilation = (1, 1)
        even = choose.random() < 0.5
        top, left = choose.randrange(4), choose.randrange(4)
        padding = ((top, top if even else choose.randrange(4)), (left, left if even else choose.randrange(4)))
        x = (choose.randrange(1, 5), choose.randrange(1, 25), choose.randrange(1, 25), c)
        case = Case(op, kind, x, (k, *taps), stride, padding, dilation, groups, choose.choice(("nhwc", "nchw")))
        try:
            work = work_of(case.geometry)
        except ac.InvalidOperandError:  # the filter is larger than the image
            continue
        if work <= 4 * NUMPY_LIMIT:
            break
    steps = (0, 0, 0, 4, 8, 64) if narrow else (0, 0, 0, 1, 3, 8, 64)
    starts = (0, 0, 0, 0, 4) if narrow else (0, 0, 0, 0, 1, 2, 8)
    pitches, offsets = ([choose.choice(values) for _ in range(3)] for values in (steps, starts))
    if eight_bits:  # a cast operand is dense
        pitches[:2], offsets[:2] = (0, 0), (0, 0)
    if op == "wgrad":  # filters are written densely
        pitches[2], offsets[2] = 0, 0
    case = replace(case, pitches=tuple(pitches), offsets=tuple(offsets))
    if choose.random() < 0.5:
        case = replace(case, alpha=choose.choice((1.0, 0.5, -2.0)))
        if op != "wgrad" and choose.random() < 0.5:
            case = replace(case, bias=True)
        elif op != "wgrad" or groups > 1 or kind.dtype is D.F32:
            case = replace(case, beta=choose.choice((1.0, -0.5)), in_place=choose.random() < 0.5)
        else:  # sums that are cast in the end take no C
            case = replace(case, beta=1.0, out=D.F32)
    if case.beta and op == "wgrad" and groups == 1 and kind.dtype is not D.F32:
        case = replace(case, out=D.F32)
    return case


@pytest.mark.parametrize("case", [random_case(op, index) for op in OPS for index in range(RANDOM_CASES)], ids=str)
def test_random_geometry(case: Case) -> None:
    plain = (case.alpha, case.beta, case.bias) == (1.0, 0.0, False) and case.out is None
    run(case, with_torch=plain and work_of(case.geometry) % 2 == 0)


# ----------------------------------------------------------------------------------------------------------------------
# Layers of networks
# ----------------------------------------------------------------------------------------------------------------------


def layer_case(layer: Layer, op: str, kind: Kind, images: int, layout: str = "nhwc") -> Case:
    pad = (layer.padding, layer.padding)
    return Case(
        op, kind, (images, *layer.x_shape), (layer.k, layer.taps, layer.taps), stride=(layer.stride, layer.stride),
        padding=(pad, pad), groups=layer.groups, layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", [BF16, F16], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_layers(layer: Layer, kind: Kind, op: str) -> None:
    """In PyTorch's order of dimensions over channels-last memory, as its own layers would be called."""
    run(layer_case(layer, op, kind, 2 if kind is BF16 else 3, "nchw"), with_torch=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layer", [layer for layer in RESNET50 if layer.c % 4 == 0][::2], ids=str)
def test_tf32_layers(layer: Layer, op: str) -> None:
    run(layer_case(layer, op, TF32, 4), with_torch=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", [IEEE, E4M3], ids=str)
@pytest.mark.parametrize("layer", RESNET50[::5], ids=str)
def test_other_layers(layer: Layer, kind: Kind, op: str) -> None:
    run(layer_case(layer, op, kind, 2), with_torch=True)


# ----------------------------------------------------------------------------------------------------------------------
# One thing at a time
# ----------------------------------------------------------------------------------------------------------------------

ANY_KINDS = (F16, BF16, IEEE, E4M3)
"""Kinds with kernels for any number of channels, and for groups."""


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 11, 9, c), (k, 3, 3), padding=((1, 1), (1, 1)), stride=stride)
    for op, kind, (c, k), stride in pairs(OPS, ANY_KINDS, ((3, 64), (64, 5), (7, 7), (1, 1)), ((1, 1), (2, 2)))
], ids=str)  # fmt: skip
def test_odd_channels(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", [
    Case("fprop", TF32, (2, 11, 9, c), (k, 3, 3), padding=((1, 1), (1, 1))) for c, k in ((3, 64), (5, 8), (64, 7))
], ids=str)  # fmt: skip
def test_odd_channels_in_tf32(case: Case) -> None:
    run(case, with_torch=True)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 15, 13, 32), (24, r, s), padding=((r // 2, r // 2), (s // 2, s // 2)), stride=stride)
    for op, (r, s), (kind, stride) in pairs(
        OPS, [*((n, n) for n in range(1, 8)), (1, 7), (7, 1), (2, 5)],
        ((BF16, (1, 1)), (F16, (2, 2)), (BF16, (3, 3)), (TF32, (1, 1))),
    )
], ids=str)  # fmt: skip
def test_filters(case: Case) -> None:
    run(case, with_torch=True)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 17, 14, 16), (16, 3, 3), padding=padding, dilation=dilation)
    for op, kind, dilation, padding in pairs(
        OPS, (F16, BF16, IEEE, TF32, E5M2), ((2, 2), (1, 3), (4, 1)), (((2, 2), (2, 2)), ((0, 3), (1, 0))),
    )
], ids=str)  # fmt: skip
def test_dilation(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 12, 10, c), (k, 3, 3), padding=((1, 1), (1, 1)), stride=stride, groups=groups)
    for op, kind, (groups, c, k), stride in pairs(
        OPS, ANY_KINDS,
        ((2, 16, 32), (3, 9, 15), (4, 64, 64), (64, 64, 64), (65, 65, 65), (8, 8, 24), (32, 64, 32)),
        ((1, 1), (2, 2)),
    )
], ids=str)  # fmt: skip
def test_groups(case: Case) -> None:
    run(case, with_torch=True)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 20, 18, 64), (64, taps, taps), padding=((taps // 2,) * 2, (taps // 2,) * 2), stride=stride,
         dilation=dilation, groups=64, **more)
    for op, kind, taps, (stride, dilation), more in pairs(
        OPS, (F16, BF16, IEEE), (3, 7), (((1, 1), (1, 1)), ((2, 2), (1, 1)), ((2, 1), (1, 2)), ((1, 1), (2, 2))),
        ({}, {"pitches": (8, 0, 0)}, {"alpha": -0.5}),
    )
], ids=str)  # fmt: skip
def test_depthwise(case: Case) -> None:
    run(case, with_torch=case.alpha == 1.0)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 12, 10, 32), (24, 3, 3), padding=((1, 1), (1, 1)), layout=layout, pitches=pitches,
         offsets=offsets)
    for op, kind, layout, (pitches, offsets) in pairs(OPS, (BF16, IEEE), ("nhwc", "nchw"), (
        ((8, 0, 0), (0, 0, 0)),
        ((0, 16, 0), (0, 0, 0)),
        ((32, 8, 0), (0, 0, 0)),
        ((1, 0, 0), (0, 0, 0)),
        ((0, 3, 0), (0, 0, 0)),
        ((0, 0, 0), (1, 0, 0)),
        ((0, 0, 0), (0, 1, 0)),
        ((8, 8, 0), (8, 16, 8)),
        ((4, 4, 0), (4, 2, 8)),
    ))
], ids=str)  # fmt: skip
def test_slices_of_channels_and_odd_addresses(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 12, 10, 32), (24, 3, 3), padding=((1, 1), (1, 1)), pitches=(0, 0, pitch), offsets=(0, 0, offset))
    for op, kind, (pitch, offset) in pairs(("fprop", "dgrad"), (BF16, IEEE, E4M3), ((8, 0), (3, 0), (0, 1), (64, 8)))
], ids=str)  # fmt: skip
def test_results_between_other_data(case: Case) -> None:
    """A slice of the channels of a wider result: the elements between stay."""
    run(case)


@pytest.mark.parametrize("op", OPS)
def test_rows_of_a_wider_image(op: str) -> None:
    """A window of an image that is read in place, its rows further apart than they are long."""
    g = conv_geometry((2, 10, 9, 32), (24, 3, 3, 32), padding=1)
    case = Case(op, BF16, g.x_shape, (24, 3, 3), padding=g.padding)
    first, second, shape = shapes_of(op, g)

    def window(given: tuple[int, ...], seed: int) -> Any:
        n, h, w, c = given
        return placed((n, h + 4, w + 3, c), D.BF16, seed)[:, 1 : 1 + h, 2 : 2 + w]

    a = window(first, 1)
    b = window(second, 2) if op == "wgrad" else placed(second, D.BF16, 2)
    out = poisoned(shape, D.BF16)
    call(op, a, b, g, out=out.view)
    out.assert_guards()
    check(case, out.view, a, b)


SCALARS = ((1.0, 1.0), (2.0, 0.0), (-1.5, 0.0), (0.5, -0.25), (0.0, 1.0), (0.0, 0.0), (3.0, 7.0))


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 9, 8, 16), (32, 3, 3), padding=((1, 0), (0, 1)), alpha=alpha, beta=beta, in_place=in_place,
         out=D.F32 if op == "wgrad" and beta and kind.dtype is not D.F32 else None, layout=layout)
    for op, (kind, layout), (alpha, beta), in_place in pairs(
        OPS, ((F16, "nhwc"), (BF16, "nchw"), (IEEE, "nhwc"), (TF32, "nchw"), (E4M3, "nhwc")), SCALARS, (False, True),
    )
    if beta or not in_place
], ids=str)  # fmt: skip
def test_scalars(case: Case) -> None:
    """alpha and beta, with C in memory of its own and C as the result."""
    run(case)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 9, 8, c), (k, 3, 3), padding=((1, 1), (1, 1)), bias=True, groups=groups, layout=layout)
    for op, kind, (c, k, groups), layout in pairs(
        ("fprop", "dgrad"), (F16, BF16, IEEE, E4M3), ((16, 32, 1), (5, 7, 1), (24, 16, 8), (64, 64, 64)),
        ("nhwc", "nchw"),
    )
], ids=str)  # fmt: skip
def test_bias(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", [
    *(
        Case("fprop", BF16, (2, 9, 8, 32), (40, 3, 3), padding=((1, 1), (1, 1)), activation=activation, **more)
        for activation, more in pairs(ACTIVATIONS, ({"alpha": 0.1}, {"bias": True}))
    ),
    *(
        Case("fprop", IEEE, (2, 9, 8, 32), (40, 3, 3), activation=activation, alpha=0.1, bias=True)
        for activation in ("gelu", "tanh")
    ),
    *(
        Case("dgrad", F16, (2, 9, 8, 32), (40, 3, 3), activation=activation, alpha=0.1, bias=True)
        for activation in ("relu", "gelu")
    ),
    Case("fprop", BF16, (2, 9, 8, 3), (7, 3, 3), activation="silu", alpha=0.25, beta=0.5),
    Case("fprop", BF16, (2, 9, 8, 64), (64, 3, 3), groups=64, activation="relu", bias=True),
    Case("fprop", E4M3, (2, 9, 8, 32), (64, 3, 3), activation="hardswish", bias=True, alpha=0.1),
], ids=str)  # fmt: skip
def test_activations(case: Case) -> None:
    """The plan compiles those that the matrix does not list."""
    run(case)


@pytest.mark.parametrize("case", [
    Case(op, kind, (2, 9, 8, 16), (24, 3, 3), padding=((1, 1), (1, 1)), stride=stride, whole=True)
    for op, kind, stride in pairs(OPS, KINDS, ((1, 1), (2, 2)))
], ids=str)  # fmt: skip
def test_whole_numbers_are_exact(case: Case) -> None:
    """Sums of small whole numbers are exact in every accumulator; they are rounded to the result's type only."""
    import torch

    g, kind = case.geometry, case.kind
    first, second, shape = shapes_of(case.op, g)
    a, b = placed(first, kind.dtype, 1, whole=True), placed(second, kind.dtype, 2, whole=True)
    out = poisoned(shape, case.result)
    call(case.op, a, b, g, out=out.view, **({"precision": kind.precision} if kind.dtype is D.F32 else {}))
    out.assert_guards()
    exact = torch_conv(case.op, a.to(torch.float64), b.to(torch.float64), g).to(out.view.dtype)
    assert torch.equal(out.view, exact)


@pytest.mark.parametrize("precision", ["tf32", *(["3xtf32"] if HAS_3XTF32 else [])])
@pytest.mark.parametrize("op", OPS)
def test_tf32_rounds_its_operands(op: str, precision: str) -> None:
    """Operands that TF32 does not represent."""
    case = Case(op, Kind(D.F32, precision), (2, 9, 8, 16), (24, 3, 3), padding=((1, 1), (1, 1)))
    g = case.geometry
    first, second, shape = shapes_of(op, g)
    a, b = placed(first, D.F32, 1), placed(second, D.F32, 2)
    out = poisoned(shape, D.F32)
    call(op, a, b, g, out=out.view, precision=precision)
    out.assert_guards()
    check(case, out.view, a, b)


@pytest.mark.parametrize("op", OPS)
def test_precisions_differ(op: str) -> None:
    """ieee is closer to the truth than tf32: the modes really are different ones."""
    import torch

    g = conv_geometry((2, 12, 12, 64), (64, 3, 3, 64), padding=1)
    first, second, _ = shapes_of(op, g)
    a, b = placed(first, D.F32, 1), placed(second, D.F32, 2)
    want = torch_conv(op, a.to(torch.float64), b.to(torch.float64), g)
    error = {
        mode: float((call(op, a, b, g, precision=mode).to(torch.float64) - want).abs().max())
        for mode in ("ieee", "tf32")
    }
    assert error["tf32"] > 10 * error["ieee"]


def test_an_infinity_stays_in_its_group() -> None:
    """Neither another group's zeros nor pixels beyond the filter may meet it."""
    import torch

    g = conv_geometry((1, 8, 8, 16), (16, 3, 3, 8), groups=2)
    x, w = placed(g.x_shape, D.BF16, 1), placed(g.w_shape, D.BF16, 2)
    x[..., 3] = float("inf")
    y = call("fprop", x, w, g)
    assert not bool(torch.isfinite(y[..., :8]).any())
    assert bool(torch.isfinite(y[..., 8:]).all())


# ----------------------------------------------------------------------------------------------------------------------
# Sums over many pixels
# ----------------------------------------------------------------------------------------------------------------------


def problem_of(
    op: str,
    a: Any,
    b: Any,
    d: Any,
    g: ConvGeometry,
    kind: Kind,
    c: Any = None,
    bias: Any = None,
    activation: Any = None,
) -> ConvProblem:
    """The problem that tensors in the order of NHWC pose."""
    return ConvProblem(
        op=KEYS[op], geometry=g, a=spec(a), b=spec(b), c=None if c is None else spec(c), d=spec(d),
        bias=None if bias is None else spec(bias), activation=activation, math=kind.math, device=0,
    )  # fmt: skip


def made(problem: ConvProblem, **options: Any) -> Any:
    """A plan; skips where the table lacks a kernel."""
    try:
        return conv_plan.make(problem, **({"backend": BACKEND} | options))
    except ac.KernelNotFoundError as error:
        lacking(error, options.get("arch"))


LONG = (
    Case("wgrad", BF16, (8, 56, 56, 64), (64, 1, 1)),
    Case("wgrad", F16, (8, 56, 56, 64), (64, 3, 3), padding=((1, 1), (1, 1))),
    Case("wgrad", BF16, (16, 64, 64, 3), (16, 3, 3)),
    Case("wgrad", IEEE, (4, 56, 56, 16), (16, 3, 3)),
    Case("wgrad", TF32, (8, 56, 56, 64), (64, 1, 1)),
    Case("wgrad", BF16, (8, 56, 56, 64), (64, 1, 1), out=D.F32, beta=1.0, in_place=True),
    Case("wgrad", E4M3, (8, 56, 56, 64), (64, 1, 1)),
    Case("wgrad", BF16, (8, 56, 56, 64), (64, 3, 3), groups=64),
)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sums(case: Case) -> None:
    """Few results of many products: computed in slices, which are added up in float32; the same every time."""
    run(case)
    g, kind = case.geometry, case.kind
    first, second, shape = shapes_of("wgrad", g)
    a, b = (placed(shape, kind.dtype, seed, tf32=True) for shape, seed in ((first, 1), (second, 2)))
    options = {"precision": kind.precision} if kind.dtype is D.F32 else {}
    results = []
    for _ in range(3):
        out = poisoned(shape, case.result)
        call("wgrad", a, b, g, out=out.view, **options)
        out.assert_guards()
        results.append(out.view)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_plans_of_long_sums_say_so() -> None:
    case = LONG[0]
    g = case.geometry
    a, b, d = (placed(shape, D.BF16, seed) for seed, shape in enumerate(shapes_of("wgrad", g)))
    plan = made(problem_of("wgrad", a, b, d, g, BF16), like=a)
    assert "slices of K added up in float32, then cast" in plan.rewrite
    assert plan.launches >= 2
    plan(a, b, out=d)
    check(case, d, a, b)


# ----------------------------------------------------------------------------------------------------------------------
# Cells of other archs, as PTX that the driver translates
# ----------------------------------------------------------------------------------------------------------------------

PORTABLE = (
    *(Case(op, kind, (2, 14, 14, 64), (64, 3, 3), padding=((1, 1), (1, 1))) for op, kind in pairs(OPS, (BF16, TF32))),
    *(Case(op, kind, (2, 14, 13, 64), (32, 3, 3), stride=(2, 2)) for op, kind in pairs(OPS, (F16, IEEE))),
    *(Case(op, BF16, (2, 14, 14, 5), (7, 3, 3), padding=((1, 0), (0, 1))) for op in OPS),
    *(Case(op, BF16, (2, 14, 14, 64), (64, 3, 3), groups=4) for op in OPS),
    *(Case(op, BF16, (2, 14, 14, 64), (64, 3, 3), groups=64) for op in OPS),
    *(Case(op, E4M3, (2, 14, 14, 64), (64, 3, 3)) for op in OPS),
    Case("fprop", E5M2, (2, 14, 14, 32), (64, 3, 3)),
    Case("fprop", BF16, (2, 20, 20, 3), (64, 7, 7), stride=(2, 2), padding=((3, 3), (3, 3))),
    Case("fprop", F16, (2, 20, 20, 4), (64, 7, 7), stride=(2, 2), padding=((3, 3), (3, 3))),
    Case("fprop", BF16, (2, 14, 14, 64), (64, 3, 3), activation="relu", bias=True),
    Case("wgrad", BF16, (4, 56, 56, 64), (64, 1, 1)),
)


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        *((case, SmArch.SM80) for case in PORTABLE),
        # Like those of sm_80 but for fp8.
        *((case, SmArch.SM89) for number, case in enumerate(PORTABLE) if case.kind in (E4M3, E5M2) or number % 3 == 0),
    ],
    ids=str,
)
def test_cells_of_other_archs(case: Case, arch: SmArch) -> None:
    if devices.rank_arch(arch, devices.get(0), ptx=True) is None:
        pytest.skip(f"code for {arch.value} does not run on this GPU")
    g, kind = case.geometry, case.kind
    first, second, shape = shapes_of(case.op, g)
    a, b = (placed(shape, kind.dtype, seed, tf32=True) for shape, seed in ((first, 1), (second, 2)))
    out = poisoned(shape, case.result)
    bias = fill(shape[-1:], case.result, 4) if case.bias else None
    problem = problem_of(case.op, a, b, out.view, g, kind, bias=bias, activation=case.activation)
    plan = made(problem, arch=arch, like=a)
    assert all(candidate.key.arch is arch for candidate in plan.candidates)
    assert plan(*(array for array in (a, b, bias) if array is not None), out=out.view) is out.view
    out.assert_guards()
    check(case, out.view, a, b, bias=bias, exact=True)


# ----------------------------------------------------------------------------------------------------------------------
# Plans, streams, graphs
# ----------------------------------------------------------------------------------------------------------------------

USUAL = tuple(
    Case(op, BF16, (2, 14, 13, 32), (24, 3, 3), padding=((1, 1), (1, 1)), layout=layout)
    for op, layout in pairs(OPS, ("nhwc", "nchw"))
)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[ConvProblem]:
    """Problems that a plan was made for, from an empty cache on."""
    problems: list[ConvProblem] = []

    def make(problem: ConvProblem, **options: Any) -> Any:
        problems.append(problem)
        return conv_plan.make(problem, **options)

    monkeypatch.setattr(conv_module, "make", make)
    kept_plans.clear()
    return problems


@pytest.mark.parametrize("with_out", [True, False])
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_calls_that_are_alike_share_a_plan(case: Case, with_out: bool, kept: list[ConvProblem]) -> None:
    g = case.geometry
    first, second, shape = shapes_of(case.op, g)
    results = []
    for seed in (1, 1, 5):
        a, b = placed(first, D.BF16, seed), placed(second, D.BF16, seed + 1)
        out = poisoned(shape, D.BF16)
        d = call(case.op, a, b, g, layout=case.layout, **({"out": out.view} if with_out else {}))
        if case.layout == "nchw":
            assert tuple(d.shape) == (shape[0], shape[3], shape[1], shape[2])
            d = d.permute(0, 2, 3, 1)
        assert tuple(d.shape) == shape
        if with_out:
            assert d.data_ptr() == out.view.data_ptr()
            out.assert_guards()
        else:
            assert d.is_contiguous()
        check(case, d, a, b)
        results.append(d)
    assert len(kept) == 1
    assert_same_bits(results[1], results[0])


def test_calls_that_are_not_alike_have_plans_of_their_own(kept: list[ConvProblem]) -> None:
    g = conv_geometry((2, 14, 14, 32), (32, 3, 3, 32), padding=1)
    x, w = placed(g.x_shape, D.BF16, 1), placed(g.w_shape, D.BF16, 2)
    out = poisoned(g.y_shape, D.BF16)
    c, bias = placed(g.y_shape, D.BF16, 3), fill((32,), D.BF16, 4)
    plain = Case("fprop", BF16, g.x_shape, (32, 3, 3), padding=g.padding)
    for number in range(2):
        for changes in ({}, {"beta": 0.5}, {"bias": True}, {"activation": "relu"}):
            case = replace(plain, **changes)
            given = {"bias": bias} if case.bias else {}
            call("fprop", x, w, g, c if case.beta else None, out=out.view, beta=case.beta, activation=case.activation,
                 **given)  # fmt: skip
            check(case, out.view, x, w, c if case.beta else None, bias if case.bias else None)
        assert len(kept) == 4, number


def late(torch: Any, stream: Any, source: Any) -> Any:
    """A tensor that holds NaN until the stream, after a while, copies the source into it."""
    later = torch.full_like(source, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        later.copy_(source)
    return later


@pytest.mark.parametrize("how", ["object", "handle", "current"])
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_streams(torch: Any, case: Case, how: str) -> None:
    """Work is put on the stream that the caller names, or on the framework's current one; by kept plans too."""
    g = case.geometry
    first, second, shape = shapes_of(case.op, g)
    a, b = placed(first, D.BF16, 1), placed(second, D.BF16, 2)
    out = poisoned(shape, D.BF16)
    for _ in range(2):
        stream = torch.cuda.Stream()
        late_a = late(torch, stream, a)
        if how == "current":
            with torch.cuda.stream(stream):
                call(case.op, late_a, b, g, layout=case.layout, out=out.view)
        else:
            named = stream if how == "object" else stream.cuda_stream
            call(case.op, late_a, b, g, layout=case.layout, out=out.view, stream=named)
        stream.synchronize()
        out.assert_guards()
        check(case, out.view, a, b)
        out.view.fill_(float("nan"))
        torch.cuda.synchronize()


@pytest.mark.parametrize("case", [*USUAL[::2], LONG[0], LONG[6], replace(LONG[7], kind=F16)], ids=str)
def test_graphs(torch: Any, case: Case) -> None:
    """A captured call is replayed with what its operands hold by then."""
    g, kind = case.geometry, case.kind
    first, second, shape = shapes_of(case.op, g)
    a, b = placed(first, kind.dtype, 1), placed(second, kind.dtype, 2)
    out = poisoned(shape, case.result)
    call(case.op, a, b, g, out=out.view)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(case.op, a, b, g, out=out.view)
    for seed in (5, 7):
        a.copy_(placed(first, kind.dtype, seed))
        b.copy_(placed(second, kind.dtype, seed + 1))
        out.view.copy_(torch.zeros(shape, device="cuda").to(out.view.dtype))
        graph.replay()
        torch.cuda.synchronize()
        out.assert_guards()
        check(case, out.view, a, b)


def test_a_plan_takes_many_calls() -> None:
    case = Case("fprop", BF16, (2, 14, 14, 32), (32, 3, 3), padding=((1, 1), (1, 1)))
    g = case.geometry
    x, w, y = placed(g.x_shape, D.BF16, 1), placed(g.w_shape, D.BF16, 2), placed(g.y_shape, D.BF16, 3)
    plan = made(problem_of("fprop", x, w, y, g, BF16), like=x, alpha=2.0)
    assert list(plan.slots) == ["a", "b", "out"]
    assert plan.rewrite == ""
    assert plan.kernel_name == plan.main.key.name
    for alpha in (None, 1.0, -0.5):
        d = plan(x, w, alpha=alpha)
        assert tuple(d.shape) == g.y_shape
        check(replace(case, alpha=2.0 if alpha is None else alpha), d, x, w)
    with pytest.raises(ac.InvalidOperandError, match="out"):
        plan(x, w, out=x)
    with pytest.raises(ac.InvalidOperandError):
        plan(x[:1], w)


# ----------------------------------------------------------------------------------------------------------------------
# Arrays of other kinds, and none at all
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", [F16, BF16, IEEE, E4M3], ids=str)
def test_host_arrays(op: str, kind: Kind, layout: str) -> None:
    """Copied to the GPU and back, whichever order their memory has."""
    case = Case(op, kind, (2, 9, 8, 5), (7, 3, 3), padding=((1, 1), (0, 2)))
    g = case.geometry
    first, second, shape = shapes_of(op, g)
    a, b = placed(first, kind.dtype, 1), placed(second, kind.dtype, 2)
    arrays = [host(a), host(b)]
    given: dict[str, Any] = {
        "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups, "layout": layout,
        "backend": BACKEND,
    }  # fmt: skip
    whole = {"dgrad": g.x_shape, "wgrad": g.w_shape}.get(op)
    if layout == "nchw":
        arrays = [np.ascontiguousarray(array.transpose(0, 3, 1, 2)) for array in arrays]
        whole = None if whole is None else (whole[0], whole[3], whole[1], whole[2])
    function: Any = {"fprop": ac.conv2d, "dgrad": ac.conv2d_dgrad, "wgrad": ac.conv2d_wgrad}[op]
    try:
        d = function(*arrays, *(() if whole is None else (whole,)), **given)
    except ac.KernelNotFoundError as error:
        lacking(error)
    assert isinstance(d, np.ndarray)
    d = d.transpose(0, 2, 3, 1) if layout == "nchw" else d
    assert d.shape == shape
    on_gpu = poisoned(shape, case.result).view
    on_gpu.view(dtype_of_bits(on_gpu)).copy_(tensor_of_bits(d))
    check(case, on_gpu, a, b)


def dtype_of_bits(tensor: Any) -> Any:
    """The integer type as wide as a tensor's elements."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]


def tensor_of_bits(array: np.ndarray[Any, Any]) -> Any:
    """A NumPy array of any dtype as a tensor of integers."""
    import torch

    kinds: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}
    return torch.from_numpy(np.ascontiguousarray(array).view(kinds[array.itemsize])).cuda()


@pytest.mark.parametrize("kind", [BF16, IEEE], ids=str)
def test_an_empty_batch(torch: Any, kind: Kind) -> None:
    """An empty result, and a gradient of zeros."""
    x = torch.empty((0, 9, 8, 16), dtype=placed((1,) * 4, kind.dtype, 1).dtype, device="cuda")
    w = placed((24, 3, 3, 16), kind.dtype, 2)
    y = ac.conv2d(x, w, backend=BACKEND)
    assert tuple(y.shape) == (0, 7, 6, 24)
    assert y.dtype == x.dtype
    assert tuple(ac.conv2d_dgrad(y, w, (0, 9, 8, 16), backend=BACKEND).shape) == (0, 9, 8, 16)
    assert tuple(ac.conv2d(nchw(x), nchw(w), layout="nchw", backend=BACKEND).shape) == (0, 24, 7, 6)
    out = poisoned((24, 3, 3, 16), kind.dtype)
    assert ac.conv2d_wgrad(y, x, (24, 3, 3, 16), out=out.view, backend=BACKEND) is out.view
    out.assert_guards()
    assert not bool(out.view.any())
    assert not bool(ac.conv2d_wgrad(y, x, (24, 3, 3, 16), backend=BACKEND).any())


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], says: str, function: Any, *given: Any, out: Any, **options: Any) -> None:
    """The call raises, writes nothing, and leaves a GPU that still works."""
    import torch

    with pytest.raises(error, match=says):
        function(*given, out=out.view, **({"backend": BACKEND} | options))
    torch.cuda.synchronize()
    out.assert_untouched()


def test_what_kernels_cannot_do_is_refused_by_name() -> None:
    g = conv_geometry((2, 9, 8, 16), (24, 3, 3, 16))
    x, w = placed(g.x_shape, D.BF16, 1), placed(g.w_shape, D.BF16, 2)
    bias = fill((24,), D.BF16, 4)
    out = poisoned(g.y_shape, D.BF16)
    unsupported = ac.UnsupportedError
    refused(unsupported, "scale_d together with bias", ac.conv2d, x, w, bias=bias, scale_d=2.0, out=out)
    refused(unsupported, "scale_d after an activation", ac.conv2d, x, w, activation="relu", scale_d=2.0, out=out)
    halves = {"w": placed((24, 3, 3, 8), D.BF16, 2), "groups": 2, "out": out}  # groups have no trees
    plainly = "and kernels without trees read"
    strided_bias = fill((48,), D.BF16, 4)[::2]
    refused(unsupported, f"bias has stride 2, {plainly}", ac.conv2d, x, bias=strided_bias, **halves)
    refused(unsupported, f"bias is f32, {plainly}", ac.conv2d, x, bias=bias.float(), **halves)
    refused(unsupported, "kernels read c as they write", ac.conv2d, x, w, placed(g.y_shape, D.BF16, 3, pad=8), beta=1.0,
            out=out)  # fmt: skip
    planes = nchw(x).contiguous()
    turned = poisoned(g.y_shape, D.BF16)
    with pytest.raises(unsupported, match=r"a\.contiguous\(memory_format=torch\.channels_last\)"):
        ac.conv2d(planes, nchw(w), layout="nchw", out=nchw(turned.view), backend=BACKEND)
    turned.assert_untouched()
    refused(unsupported, "copy what is broadcast", ac.conv2d, x[:1].expand(2, 9, 8, 16), w, out=out)
    strided = conv_geometry((2, 18, 16, 16), (24, 3, 3, 16), stride=2, dilation=2)
    dy = placed(strided.y_shape, D.BF16, 1)
    refused(unsupported, "kernels of strided dgrad have no dilation", ac.conv2d_dgrad, dy, w, strided.x_shape, stride=2,
            dilation=2, out=poisoned(strided.x_shape, D.BF16))  # fmt: skip
    refused(unsupported, "no convolution takes f64", ac.conv2d, x.double(), w.double(), out=Guarded(g.y_shape, D.F64))
    refused(unsupported, "convolutions of bf16 give bf16, f32, not f16", ac.conv2d, x, w, out=Guarded(g.y_shape, D.F16))
    narrow = placed(g.x_shape, D.F8E4M3, 1, pad=1), placed(g.w_shape, D.F8E4M3, 2)
    refused(unsupported, "what is cast instead must be dense", ac.conv2d, *narrow, out=out)
    call("fprop", x, w, g, out=out.view)
    check(Case("fprop", BF16, g.x_shape, (24, 3, 3)), out.view, x, w)


def test_bad_input_is_refused() -> None:
    g = conv_geometry((2, 9, 8, 16), (24, 3, 3, 16))
    x, w = placed(g.x_shape, D.BF16, 1), placed(g.w_shape, D.BF16, 2)
    out = poisoned(g.y_shape, D.BF16)
    invalid = ac.InvalidOperandError
    refused(invalid, "x has C = 16, no multiple of the 3 groups", ac.conv2d, x, w, groups=3, out=out)
    refused(invalid, "its last extent must be 16", ac.conv2d, x, w[..., :8], out=out)
    refused(invalid, "out has shape", ac.conv2d, x, w, padding=1, out=out)
    refused(invalid, r"x has shape .* expected \(N, H, W, C\)", ac.conv2d, x[0], w, out=out)
    refused(invalid, "x is bf16 and w is f32", ac.conv2d, x, w.float(), out=out)
    refused(invalid, "the result has no rows", ac.conv2d, x[:, :2], w, out=out)
    refused(invalid, "all operands must be on one device", ac.conv2d, x, w.cpu(), out=out)
    refused(invalid, "so c is needed", ac.conv2d, x, w, beta=1.0, out=out)
    refused(invalid, "bias has shape", ac.conv2d, x, w, bias=fill((16,), D.BF16, 1), out=out)
    dx = poisoned(g.x_shape, D.BF16)
    dy = placed(g.y_shape, D.BF16, 3)
    refused(invalid, "dy has shape", ac.conv2d_dgrad, dy[:, :5], w, g.x_shape, out=dx)
    refused(invalid, "dy has shape", ac.conv2d_wgrad, dy, x[:, :8], g.w_shape, out=poisoned(g.w_shape, D.BF16))
    with pytest.raises(invalid, match="out overlaps a"):
        ac.conv2d(x, placed((16, 3, 3, 16), D.BF16, 2), padding=1, out=x, backend=BACKEND)
    assert element_type(x) is D.BF16
