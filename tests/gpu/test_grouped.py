"""`grouped_gemm` on the GPU against the reference: forms, sizes, types, scales, epilogues, views, graphs, bad input.

Kernels that the table lacks are compiled at run time: some twenty, and three dozen with a bias, an activation or a
tree, which no table has. With ATOMR_CUTLASS_TEST_JIT every cell of the matrix is, once more with both. Those with
epilogues `tools/compile_table.py --trees` compiles side by side.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import every_cell
import fake_cases
import grouped_oracle
from atomr_cutlass import SmArch, reference
from atomr_cutlass.arrays import numerics
from atomr_cutlass.arrays.operands import as_operand, dtype_of
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.rules import FP8_TYPES
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.grouped_gemm import function as grouped_module
from atomr_cutlass.ops.grouped_gemm import kernels as grouped_plan
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.search import Candidate
from fp8_matrices import guarded, host, placed, scales
from gpu_matrices import _POISON, NUMPY_LIMIT, Guarded, assert_same_bits, bits_dtype, element_type, pairs
from grouped_gpu import (
    ALIGNED,
    ALONG_K,
    BESIDE_SCALES,
    BF16,
    CELLS,
    CONTIGUOUS,
    E4M3,
    E5M2,
    F16,
    F32,
    FP8_SIZES,
    FUSED,
    LARGE,
    LISTED,
    LISTED_SHAPES,
    LISTS,
    MASKED,
    OLDER,
    REPLAYS,
    ROWS,
    SCALED_SHAPES,
    SCALES,
    TREE_CASES,
    TREES,
    UNALIGNED,
    UNEVEN,
    Case,
    skewed,
    small,
    with_gelu,
)
from grouped_magnitudes import absolute_grouped_product

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

COMPILED = "ATOMR_CUTLASS_TEST_JIT" in os.environ
BACKEND = "jit" if COMPILED else "auto"

BLOCK = 128


@pytest.fixture(autouse=True)
def _compile(_policy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No preset but `full` has these kernels: what is missing is compiled."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")
    monkeypatch.delenv("ATOMR_CUTLASS_CHECK", raising=False)


@dataclass
class Given:
    """The arrays of a case."""

    a: Any
    b: Any
    c: Any
    before: Any  # C as it was
    out: Guarded
    divided: Any
    scales: dict[str, Any]
    bias: Any = None
    factor: Any = None

    def call(self, case: Case, **options: Any) -> Any:
        name = "counts" if case.counts or case.form == MASKED else "offsets"
        how = {
            "out": self.out.view, "backend": BACKEND, name: self.divided, "alpha": case.alpha, "beta": case.beta,
            "bias": self.bias, "activation": case.activation, "fast_accum": case.fast, **self.scales,
        }  # fmt: skip
        if case.tree:
            how["epilogue"] = case.epilogue
            how |= {} if self.factor is None else {"factor": self.factor}
        return ac.grouped_gemm(self.a, self.b, self.c, **(how | options))


def ends(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def bounds(case: Case) -> list[tuple[int, int]]:
    """Where groups begin and end."""
    stops = ends(case.sizes)
    return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []


def int32(values: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def given(case: Case, seed: int = 1) -> Given:
    """Random operands in poison; rows of A that no group has are poison too."""
    import torch

    shape_a, shape_b, shape_d = case.shapes
    placements = [{"pad": pad, "offset": shift} for pad, shift in zip(case.pads, case.shifts, strict=True)]
    a = placed(shape_a, case.a, seed, layout=case.layouts[0], **placements[0])
    b = placed(shape_b, case.b or case.a, seed + 1, layout=case.layouts[1], **placements[1])
    out = guarded(shape_d, case.result, **placements[3])
    raw = torch.uint8 if case.a in FP8_TYPES else torch.int16
    poison = 0xFF if case.a in FP8_TYPES else 0x7FFF
    if case.form == ALONG_K:
        a[:, sum(case.sizes) :].view(raw).fill_(poison)
        b[sum(case.sizes) :].view(raw).fill_(poison)
    elif case.form == CONTIGUOUS:
        a[sum(case.sizes) :].view(raw).fill_(poison)
    else:
        for g, size in enumerate(case.sizes):
            a[g, size:].view(raw).fill_(poison)
    c = before = None
    if case.beta != 0:
        c = placed(shape_d, case.result, seed + 2, **placements[2])
        before = c.clone()
        if case.in_place:
            out.view.copy_(c)
            c = out.view
    numbers = case.sizes if case.counts or case.form == MASKED else ends(case.sizes)
    return Given(
        a,
        b,
        c,
        before,
        out,
        int32(numbers),
        scales_of(case, seed + 3),
        bias_of(case, seed + 6),
        factor_of(case, seed + 7),
    )


def bias_of(case: Case, seed: int) -> Any:
    """The bias of a case, in poison."""
    groups, dtype = len(case.sizes), case.bias_type or (F32 if case.tree else case.result)
    match case.bias:
        case "":
            return None
        case "row":
            return placed((1, case.n), dtype, seed)[0]
        case "groups":
            return placed((groups, case.n), dtype, seed)
        case "padded":
            return placed((groups, case.n), dtype, seed, pad=8)
        case "strided":
            return placed((groups, case.n), dtype, seed, layout="c", pad=3)
    raise AssertionError(case.bias)


def factor_of(case: Case, seed: int) -> Any:
    """The factor that a tree reads."""
    if not case.factor:
        return None
    return scales((1,) if case.factor == "one" else (len(case.sizes), 1, 1), seed)


def scales_of(case: Case, seed: int) -> dict[str, Any]:
    """The scale arguments of a case."""
    groups = len(case.sizes)
    shape_a = case.shapes[0]
    rows = (*shape_a[:-1], 1)
    columns = (1, case.n) if case.form == ALONG_K else (groups, 1, case.n)
    blocks = -(-case.k // BLOCK)

    def of_rows() -> Any:
        return scales(rows, seed)

    match case.scale:
        case "":
            return {}
        case "numbers":
            return {"scale_a": 0.5, "scale_b": 3.0}
        case "tensor":
            return {"scale_a": scales((1,), seed), "scale_b": scales((1,), seed + 1)}
        case "group":
            return {"scale_a": scales((groups,), seed), "scale_b": scales((groups,), seed + 1)}
        case "vector":
            return {"scale_a": of_rows(), "scale_b": scales(columns, seed + 1)}
        case "mixed":
            return {"scale_a": of_rows(), "scale_b": scales((groups, 1, 1), seed + 1)}
        case "block" | "block by columns":
            layout = "c" if case.scale == "block by columns" else "r"
            return {
                "scale_a": scales((*shape_a[:-1], blocks), seed, layout=layout),
                "scale_b": scales((groups, blocks, -(-case.n // BLOCK)), seed + 1),
            }
    raise AssertionError(case.scale)


def run(case: Case, **options: Any) -> Given:
    """Calls `grouped_gemm` and checks everything that it wrote or should not have."""
    operands = given(case)
    assert operands.call(case, **options) is operands.out.view
    check(case, operands)
    return operands


def check(case: Case, operands: Given, d: Any = None) -> None:
    """The result, rows that no group has, and the memory around."""
    d = operands.out.view if d is None else d
    operands.out.assert_guards()
    if d is operands.out.view and not case.in_place:
        untouched(case, d)
    if case.tree:
        _check_tree(case, operands, d)
        return
    work = sum(case.sizes) * case.n * (case.m if case.form == ALONG_K else case.k)
    if work <= NUMPY_LIMIT:
        _check_by_numpy(case, operands, d)
    else:
        _check_by_torch(case, operands, d)


def untouched(case: Case, d: Any) -> None:
    """Rows of no group are poison still."""
    poison = -1 if case.result in FP8_TYPES else _POISON[case.result]
    bits = d.view(bits_dtype(case.result))
    if case.form == CONTIGUOUS:
        assert bool((bits[sum(case.sizes) :] == poison).all()), "rows after the last group were written"
    if case.form == MASKED:
        for g, size in enumerate(case.sizes):
            assert bool((bits[g, size:] == poison).all()), f"masked rows of group {g} were written"


def limits(case: Case) -> reference.Tolerance:
    k = max([1, *case.sizes]) if case.form == ALONG_K else case.k
    found = reference.tolerance(
        case.a, case.result, k, fast_accum=case.fast, scale_block=BLOCK if case.scale.startswith("block") else 0
    )
    # An activation passes an error on, the steepest (hardswish) with a factor of 1.5.
    return found._replace(atol_factor=found.atol_factor * 2) if case.activation else found


def _host_scales(case: Case, operands: Given) -> dict[str, Any]:
    """As the reference takes them."""
    found = {name: value if isinstance(value, float) else host(value) for name, value in operands.scales.items()}
    groups = len(case.sizes)
    rows = operands.a.shape[-2]
    for name, value in found.items():
        if isinstance(value, float) or value.size == 1 or value.size != groups or value.ndim not in (1, 3):
            continue
        if value.ndim == 3 and name == "scale_b" and case.form != ALONG_K:
            continue
        each = value.reshape(groups, 1, 1)
        if name == "scale_b":
            found[name] = np.broadcast_to(each, (groups, 1, case.n)) if case.form == ALONG_K else each
        elif case.form == CONTIGUOUS:
            spread = np.ones((rows, 1), np.float32)
            for g, (start, stop) in enumerate(bounds(case)):
                spread[start:stop] = value[g]
            found[name] = spread
        else:
            found[name] = np.broadcast_to(each, (groups, rows, 1))
    return found


def _check_by_numpy(case: Case, operands: Given, d: Any) -> None:
    name = "counts" if case.counts or case.form == MASKED else "offsets"
    arrays = [host(operands.a), host(operands.b), None if operands.before is None else host(operands.before)]
    common: dict[str, Any] = {
        name: host(operands.divided), "alpha": case.alpha, "beta": case.beta, **_host_scales(case, operands),
        "bias": None if operands.bias is None else host(operands.bias),
    }  # fmt: skip
    got: Any = host(d)
    want: Any = grouped_oracle.grouped_gemm(
        *arrays, out=got.copy(), out_dtype=case.result, activation=case.activation, **common
    )
    magnitude: Any = absolute_grouped_product(*arrays, **common)
    right = reference.within_tolerance(got, want, magnitude, limits(case), case.result)
    assert right.all(), f"{(~right).sum()} of {right.size} elements are wrong, the first at {np.argwhere(~right)[0]}"


def _check_tree(case: Case, operands: Given, d: Any) -> None:
    """Each group against the reference's tree on top of products in float64."""
    k = max([1, *case.sizes]) if case.form == ALONG_K else case.k
    blocks = BLOCK if case.scale.startswith("block") else 0
    bound = reference.tolerance(case.a, F32, k, fast_accum=case.fast, scale_block=blocks)
    for g, (a, b, c, part, scale_a, scale_b) in enumerate(_parts(case, operands, d)):
        if part.numel() == 0:
            continue
        wide_a, wide_b = a.float().double() * scale_a, b.float().double() * scale_b
        acc = case.alpha * (wide_a @ wide_b)
        magnitude = abs(case.alpha) * (wide_a.abs() @ wide_b.abs())
        if c is not None:
            acc += case.beta * c.float().double()
            magnitude += abs(case.beta) * c.float().double().abs()
        error = host(magnitude) * bound.atol_factor + host(acc.abs()) * bound.rtol
        values = {"bias": operands.bias, "factor": operands.factor}
        read = {name: host(_of_group(value, g)) for name, value in values.items() if value is not None}
        wrong = reference.mismatches(case.epilogue, {"out": host(part)}, host(acc), error, read, out_dtype=case.result)
        assert not wrong, f"group {g}: {wrong}"


def _of_group(value: Any, g: int) -> Any:
    return value if value.ndim == 1 else value[g].reshape(-1)


def _parts(case: Case, operands: Given, d: Any) -> Iterator[tuple[Any, ...]]:
    """(A, B, C, D, scale of A, scale of B) of each group, on the GPU."""
    for g, (start, stop) in enumerate(bounds(case)):
        c = operands.before
        scale = {name: _scale_of(case, value, name, g, start, stop) for name, value in operands.scales.items()}
        sa, sb = scale.get("scale_a", 1.0), scale.get("scale_b", 1.0)
        if case.form == CONTIGUOUS:
            rows = slice(start, stop)
            yield operands.a[rows], operands.b[g], None if c is None else c[rows], d[rows], sa, sb
        elif case.form == MASKED:
            rows = slice(0, case.sizes[g])
            yield operands.a[g, rows], operands.b[g], None if c is None else c[g, rows], d[g, rows], sa, sb
        else:
            part = slice(start, stop)
            yield operands.a[:, part], operands.b[part], None if c is None else c[g], d[g], sa, sb


def _scale_of(case: Case, value: Any, name: str, g: int, start: int, stop: int) -> Any:
    """Of one group, such that it multiplies its A or its B."""
    if isinstance(value, float) or value.numel() == 1:
        return value
    if value.numel() == len(case.sizes) and (value.ndim == 1 or value.shape[1:] == (1, 1)):
        return value.reshape(-1)[g]
    if name == "scale_b":
        part = value if value.ndim == 2 else value[g]
        if case.scale.startswith("block"):
            part = part.repeat_interleave(BLOCK, 0)[: case.k].repeat_interleave(BLOCK, 1)[:, : case.n]
        return part.double()
    if case.form == CONTIGUOUS:
        part = value[start:stop]
    elif case.form == MASKED:
        part = value[g, : case.sizes[g]]
    else:
        part = value if value.ndim == 2 else value[g]
    if case.scale.startswith("block"):
        part = part.repeat_interleave(BLOCK, 1)[:, : case.k]
    return part.double()


def _check_by_torch(case: Case, operands: Given, d: Any) -> None:
    import torch

    bound_of = limits(case)
    for g, (a, b, c, part, scale_a, scale_b) in enumerate(_parts(case, operands, d)):
        wide_a, wide_b = a.float().double() * scale_a, b.float().double() * scale_b
        want = case.alpha * (wide_a @ wide_b)
        magnitude = abs(case.alpha) * (wide_a.abs() @ wide_b.abs())
        if c is not None:
            want += case.beta * c.float().double()
            magnitude += abs(case.beta) * c.float().double().abs()
        if operands.bias is not None:
            bias = (operands.bias if operands.bias.ndim == 1 else operands.bias[g]).float().double()
            want += bias
            magnitude += bias.abs()
        if case.activation is not None:
            want = getattr(torch.nn.functional, case.activation)(want)
        bound = magnitude * bound_of.atol_factor + want.abs() * bound_of.rtol + numerics.smallest_step(case.result)
        got = part.float().double()
        wrong = ((got - want).abs() > bound) | torch.isnan(got)
        assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} elements of group {g} are wrong"


# ----------------------------------------------------------------------------------------------------------------------
# Sizes of groups
# ----------------------------------------------------------------------------------------------------------------------

HALF = ((BF16, "rr"), (BF16, "rc"), (F16, "rr"), (F16, "rc"))

SIZES: tuple[tuple[int, ...], ...] = (
    (7,),
    (300,),
    (1,) * 16,
    (0, 0, 5, 0),
    (300, 1, 0, 64, 129),
    (128, 256, 64),
    (127, 63, 65, 0, 255),
    (0,) * 12,
    skewed(64, 3000),
    skewed(128, 1000),
    small(256, 32),
    small(256, 1),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(CONTIGUOUS, sizes, 136, 72, a=dtype, layouts=layouts, rest=number % 3 * 5, counts=number % 2 == 1)
        for (number, sizes), (dtype, layouts) in pairs(list(enumerate(SIZES)), HALF)
    ],
    ids=str,
)
def test_contiguous(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(MASKED, sizes, 136, 72, m=max(*sizes, 1) + more, a=dtype, layouts=layouts)
        for sizes, more, (dtype, layouts) in zip(
            (*SIZES[1:], *SIZES[1:]), itertools.cycle((0, 3, 64)), itertools.cycle(HALF), strict=False
        )
    ],
    ids=str,
)
def test_masked(case: Case) -> None:
    run(case)


WEIGHTS = ((BF16, BF16), (F16, F16), (BF16, F32), (F16, F32))


@pytest.mark.parametrize(
    "case",
    [
        Case(ALONG_K, sizes, 136, m=72, a=dtype, out=out, layouts="cr", rest=5 * (number % 2), counts=number % 3 == 1)
        for number, (sizes, (dtype, out)) in enumerate(
            zip((*SIZES, *SIZES), itertools.cycle((*WEIGHTS, WEIGHTS[0])), strict=False)
        )
    ],
    ids=str,
)
def test_along_k(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(CONTIGUOUS, (512,) * 8, 1024, 1024, layouts="rc"),
        Case(CONTIGUOUS, (1024, 0, 2048, 7, 500, 900, 1, 3000), 1024, 2048, layouts="rc"),
        Case(CONTIGUOUS, (1000, 2000, 1096), 1000, 1024, layouts="rr"),
        Case(CONTIGUOUS, skewed(64, 8192), 512, 1024, layouts="rc", rest=100),
        Case(CONTIGUOUS, small(256, 32, 1), 512, 512, layouts="rc"),
        Case(MASKED, skewed(32, 4096), 512, 512, m=2048, layouts="rc"),
        Case(ALONG_K, skewed(16, 8192), 512, m=1024, layouts="cr"),
        Case(ALONG_K, skewed(16, 8192), 512, m=1024, layouts="cr", out=F32),
        Case(CONTIGUOUS, skewed(32, 4096), 512, 1024, a=E4M3, layouts="rc", scale="vector"),
        Case(CONTIGUOUS, skewed(32, 4096), 512, 1024, a=E4M3, layouts="rc", scale="vector", fast=True),
        Case(CONTIGUOUS, skewed(32, 4096), 512, 1024, a=E4M3, layouts="rc", scale="block"),
        Case(MASKED, skewed(16, 2048), 512, 1024, m=1024, a=E4M3, layouts="rc", scale="block"),
        *LARGE,
    ],
    ids=str,
)
def test_large(case: Case) -> None:
    run(case)


# ----------------------------------------------------------------------------------------------------------------------
# fp8 and scales
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(CONTIGUOUS, sizes, 136, 272, a=E4M3, layouts="rc", scale=scale, fast=fast, rest=9)
        for sizes, scale, fast in pairs(FP8_SIZES, SCALES, (False, True))
    ],
    ids=str,
)
def test_fp8(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(CONTIGUOUS, sizes, n, k, a=E4M3, layouts="rc", scale=scale, rest=9)
            for sizes, (n, k), scale in pairs(
                FP8_SIZES, ((256, 256), (136, 272), (128, 112)), ("block", "block by columns")
            )
        ),
        Case(MASKED, small(24, 64), 256, 384, m=70, a=E4M3, layouts="rc", scale="block"),
        Case(MASKED, small(24, 64), 136, 272, m=64, a=E4M3, layouts="rc", scale="block"),
        Case(CONTIGUOUS, FP8_SIZES[0], 256, 384, a=E4M3, layouts="rc", scale="block", alpha=0.5, beta=2.0),
        Case(CONTIGUOUS, FP8_SIZES[0], 256, 384, a=E4M3, layouts="rc", scale="block", fast=True),
    ],
    ids=str,
)
def test_fp8_blocks(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(MASKED, small(24, 64), 136, 272, m=70, a=E4M3, layouts="rc", scale=scale) for scale in SCALES),
        Case(CONTIGUOUS, FP8_SIZES[0], 136, 272, a=E5M2, b=E4M3, layouts="rc", scale="vector"),
        Case(CONTIGUOUS, FP8_SIZES[1], 136, 272, a=E5M2, b=E4M3, layouts="rc", scale="group", fast=True),
        Case(CONTIGUOUS, FP8_SIZES[0], 136, 272, a=E4M3, layouts="rc", out=F16, scale="vector", fast=True),
        Case(CONTIGUOUS, FP8_SIZES[0], 136, 272, a=E4M3, layouts="rc", scale="vector", alpha=2.0, beta=-1.0),
        Case(
            CONTIGUOUS, FP8_SIZES[0], 136, 272, a=E4M3, layouts="rc", scale="group", beta=0.5, in_place=True,
            pads=(16, 32, 0, 8),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_fp8_forms_and_types(case: Case) -> None:
    run(case)


# ----------------------------------------------------------------------------------------------------------------------
# Scalars, views, alignment
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(form, UNEVEN, 136, 72, m=136, layouts=layouts, alpha=alpha, beta=beta, in_place=in_place, rest=rest)
        for (form, layouts, rest), (alpha, beta, in_place) in pairs(
            ((CONTIGUOUS, "rc", 4), (MASKED, "rr", 0), (ALONG_K, "cr", 4)),
            ((2.0, 0.0, False), (1.0, 1.0, False), (-0.5, 3.0, True), (0.0, 2.0, False), (0.0, 0.0, False)),
        )
    ],
    ids=str,
)
def test_scalars(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(form, UNEVEN, n, k, m=136, layouts=layouts, beta=1.0, pads=pads, shifts=shifts)
        for (form, layouts), (n, k, pads, shifts) in pairs(
            ((CONTIGUOUS, "rr"), (CONTIGUOUS, "rc"), (MASKED, "rc")),
            (
                (136, 72, (8, 16, 24, 8), (0, 0, 0, 0)),
                (136, 72, (8, 8, 8, 8), (8, 16, 8, 8)),
                (133, 72, (0, 3, 3, 3), (0, 0, 0, 0)),  # rows of D padded to what TMA stores
                (136, 70, (2, 2, 0, 0), (0, 0, 0, 0)),
                (133, 71, (0, 0, 0, 0), (0, 0, 0, 0)),
                (136, 72, (1, 3, 5, 7), (0, 0, 0, 0)),
                (136, 72, (0, 0, 0, 0), (1, 1, 1, 1)),
                (1, 1, (0, 0, 0, 0), (0, 0, 0, 0)),
            ),
        )
    ],
    ids=str,
)
def test_views(case: Case) -> None:
    """Padded rows, and extents and addresses that TMA cannot read, which kernels of the sm80 generation serve."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(ALONG_K, UNEVEN, 136, m=72, layouts="cr", pads=(8, 16, 8, 8), beta=1.0),
        Case(ALONG_K, UNEVEN, 136, m=72, layouts="cr", shifts=(8, 8, 8, 8)),
        Case(ALONG_K, UNEVEN, 136, m=72, layouts="rr"),
        Case(ALONG_K, UNEVEN, 136, m=72, layouts="rc"),
        Case(ALONG_K, (8, 16, 64), 136, m=72, layouts="rr", a=F16),
        Case(ALONG_K, UNEVEN, 133, m=71, layouts="rr"),
    ],
    ids=str,
)
def test_views_along_k(case: Case) -> None:
    run(case)


# ----------------------------------------------------------------------------------------------------------------------
# Bias and activation
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_bias_and_activation(case: Case) -> None:
    """Trees on top of kernels over TMA. An empty group along K leaves act(bias)."""
    run(case)


@pytest.mark.parametrize("case", BESIDE_SCALES, ids=str)
def test_bias_and_activation_beside_scales(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", UNALIGNED, ids=str)
def test_bias_and_activation_of_unaligned_groups(case: Case) -> None:
    """Kernels of the sm80 generation, which read the bias in the place of C."""
    run(case)


@pytest.mark.parametrize("case", TREE_CASES, ids=str)
def test_trees(case: Case) -> None:
    """Rows and scalars of all groups and of each; D in the trees' types."""
    run(case)


@pytest.mark.parametrize("tree", ["clamped", "quantized"])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "one"])
def test_trees_of_lists(tree: str, shared: bool) -> None:
    """A factor for each group, or one for all; the second call takes the kept plan."""
    case, shapes = replace(LISTED, tree=tree), LISTED_SHAPES
    a = [placed((m, k), BF16, g) for g, (m, n, k) in enumerate(shapes)]
    b = [placed((k, n), BF16, g + 100, layout="c") for g, (m, n, k) in enumerate(shapes)]
    bias = [placed((1, n), BF16, g + 200)[0] for g, (m, n, k) in enumerate(shapes)]
    factor = scales((1,), 5) if shared else [scales((1,), g + 300) for g in range(len(shapes))]
    out = [guarded((m, n), case.result) for m, n, k in shapes]
    views = [result.view for result in out]
    for _ in range(2):
        made = ac.grouped_gemm(a, b, out=views, backend=BACKEND, epilogue=case.epilogue, bias=bias, factor=factor)
        assert made is views
        for g, (m, n, k) in enumerate(shapes):
            out[g].assert_guards()
            if m == 0:
                continue
            alone = Given(a[g], b[g][None], None, None, out[g], None, {}, bias[g], factor if shared else factor[g])
            _check_tree(replace(case, sizes=(m,), n=n, k=k, rest=0), alone, views[g])


def test_functions_and_trees_give_the_same_bits() -> None:
    case = next(case for case in TREE_CASES if case.tree == "quantized")
    operands = run(case)
    want, kept = operands.out.view.clone(), len(kept_plans)
    operands.out.view.view(bits_dtype(case.result)).fill_(-1)
    assert operands.call(case, epilogue=TREES[case.tree]) is operands.out.view
    assert_same_bits(operands.out.view[: sum(case.sizes)], want[: sum(case.sizes)])
    check(case, operands)
    assert len(kept_plans) == kept
    # D's element type is the tree's own.
    d = operands.call(case, out=None)
    assert_same_bits(d[: sum(case.sizes)], want[: sum(case.sizes)])


def test_plans_with_trees_are_kept() -> None:
    """The next call's operands may be other arrays, and so may their values."""
    case = next(case for case in TREE_CASES if case.tree == "clamped" and case.bias == "groups")
    kept_plans.clear()  # a full cache would not grow
    operands = run(case)
    kept = len(kept_plans)
    with fake_cases.parsed() as calls:
        for seed in range(3):
            operands.bias, operands.factor = bias_of(case, seed), factor_of(case, seed + 10)
            operands.call(case)
            check(case, operands)
    assert (len(kept_plans), calls) == (kept, [])


def test_unaligned_groups_have_no_trees(torch: Any) -> None:
    """Nothing is written: kernels of the sm80 generation evaluate act(acc + bias) alone."""
    case = replace(ROWS, n=133, k=71, tree="clamped", bias="row", bias_type=BF16, factor="one")
    operands = given(case)
    with pytest.raises(ac.UnsupportedError, match="tells their epilogue no group's number"):
        operands.call(case)
    torch.cuda.synchronize()
    operands.out.assert_untouched()


def test_what_the_sm80_generation_has_no_bias_beside(torch: Any) -> None:
    for changes in ({"beta": 1.0}, {"bias_type": F32}, {"bias": "strided"}):
        case = replace(Case(CONTIGUOUS, UNEVEN, 133, 71, rest=3, bias="groups"), **changes)
        operands = given(case)
        with pytest.raises(ac.UnsupportedError, match="without c, contiguous and of the result's dtype"):
            operands.call(case)
        torch.cuda.synchronize()
        operands.out.assert_untouched()


@pytest.mark.parametrize("form", [CONTIGUOUS, MASKED])
def test_k_of_zero_leaves_bias(form: str) -> None:
    case = Case(form, UNEVEN, 136, 0, m=136, layouts="rc", rest=3 if form == CONTIGUOUS else 0)
    run(replace(case, bias="groups", activation="gelu"))
    run(replace(case, n=133, bias="groups", activation="gelu"))


def test_plans_with_bias_are_kept() -> None:
    """The next call's bias may be another array, and so may its values."""
    case = replace(ROWS, bias="groups", activation="gelu")
    kept_plans.clear()  # a full cache would not grow
    operands = run(case)
    kept = len(kept_plans)
    with fake_cases.parsed() as calls:
        for seed in range(3):
            operands.bias = bias_of(case, seed)
            operands.call(case)
            check(case, operands)
    assert (len(kept_plans), calls) == (kept, [])
    operands.call(case, activation=None)
    assert len(kept_plans) == kept + 1


@pytest.mark.parametrize("form", [CONTIGUOUS, MASKED])
def test_k_of_zero_leaves_c(form: str) -> None:
    run(Case(form, UNEVEN, 136, 0, m=136, beta=2.0, rest=3 if form == CONTIGUOUS else 0))
    run(Case(form, UNEVEN, 136, 0, m=136, rest=3 if form == CONTIGUOUS else 0))


@pytest.mark.parametrize("rest", [0, 50])
def test_no_rows_and_no_groups(torch: Any, rest: int) -> None:
    out = Guarded((rest, 24), BF16)
    a = placed((rest, 48), BF16, 1)
    for groups in (0, 3):
        ac.grouped_gemm(a, placed((groups, 48, 24), BF16, 2), counts=int32([0] * groups), out=out.view, backend=BACKEND)
    torch.cuda.synchronize()
    out.assert_untouched()


def test_new_results_and_kept_plans(torch: Any) -> None:
    """Without `out`: rows of no group are unspecified, the others right; the plan is made once."""
    case = Case(CONTIGUOUS, UNEVEN, 136, 72, rest=7)
    operands = given(case)
    operands.call(case, out=None)
    kept = len(kept_plans)
    with fake_cases.parsed() as calls:
        for _ in range(3):
            d = operands.call(case, out=None)
            assert (d.shape, d.dtype, d.device) == ((case.shapes[2]), torch.bfloat16, operands.a.device)
            check(case, operands, d)
    assert (len(kept_plans), calls) == (kept, [])


def test_results_of_torch_loops(torch: Any) -> None:
    """Results are those of PyTorch, one group at a time, to the rounding of bf16."""
    case = Case(CONTIGUOUS, skewed(32, 2000), 256, 512, layouts="rc")
    operands = run(case)
    start = 0
    for g, size in enumerate(case.sizes):
        want = operands.a[start : start + size] @ operands.b[g]
        torch.testing.assert_close(operands.out.view[start : start + size], want, rtol=1.6e-2, atol=1e-2)
        start += size


def test_the_same_call_gives_the_same_bits() -> None:
    case = Case(CONTIGUOUS, skewed(48, 2000), 256, 512, layouts="rc")
    operands = run(case)
    first = operands.out.view.clone()
    for _ in range(5):
        operands.out.view.fill_(float("nan"))
        operands.call(case)
        stop = sum(case.sizes)
        assert_same_bits(operands.out.view[:stop], first[:stop])


# ----------------------------------------------------------------------------------------------------------------------
# Lists
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    shapes, options = LISTS[name]
    _lists(shapes, **options)


@pytest.mark.parametrize("scale", ["numbers", "tensor", "one", "vector", "block"])
def test_scales_of_lists(scale: str) -> None:
    shapes = SCALED_SHAPES
    found: dict[str, Any] = {
        "numbers": {"scale_a": 0.5, "scale_b": 2.0},
        "tensor": {"scale_a": [scales((1,), m) for m, _, _ in shapes], "scale_b": scales((1,), 5)},
        "one": {"scale_a": scales((1, 1), 3)},
        "vector": {
            "scale_a": [scales((m, 1), g) for g, (m, _, _) in enumerate(shapes)],
            "scale_b": [scales((1, n), g + 50) for g, (_, n, _) in enumerate(shapes)],
        },
        "block": {
            "scale_a": [scales((m, 2), g) for g, (m, _, _) in enumerate(shapes)],
            "scale_b": [scales((2, 2), g + 50)[:, : n // 128] for g, (_, n, _) in enumerate(shapes)],
        },
    }[scale]
    _lists(shapes, dtype=E4M3, layout="c", block=BLOCK if scale == "block" else 0, **found)
    if scale in ("vector", "block"):
        _lists(shapes, dtype=E4M3, layout="c", block=BLOCK if scale == "block" else 0, bias=True, activation="gelu",
               **found)  # fmt: skip


def _lists(
    shapes: Sequence[tuple[int, int, int]],
    *,
    dtype: D = BF16,
    layout: str = "r",
    pad: int = 0,
    beta: float = 0.0,
    in_place: bool = False,
    block: int = 0,
    bias: bool = False,
    activation: str | None = None,
    **found: Any,
) -> None:
    result = numerics.default_out_dtype(dtype)

    def leading(extent: int) -> dict[str, int]:
        return {"pad": pad - extent % pad if pad else 0}

    a = [placed((m, k), dtype, g, **leading(k)) for g, (m, n, k) in enumerate(shapes)]
    b = [
        placed((k, n), dtype, g + 1000, layout=layout, **leading(n if layout == "r" else k))
        for g, (m, n, k) in enumerate(shapes)
    ]
    out = [guarded((m, n), result, **leading(n)) for m, n, k in shapes]
    c = [placed((m, n), result, g + 2000, **leading(n)) for g, (m, n, k) in enumerate(shapes)] if beta else None
    before = [None] * len(shapes) if c is None else [matrix.clone() for matrix in c]
    if in_place and c is not None:
        for matrix, kept in zip(out, c, strict=True):
            matrix.view.copy_(kept)
        c = [matrix.view for matrix in out]
    views = [matrix.view for matrix in out]
    rows = [placed((1, n), result, g + 3000)[0] for g, (m, n, k) in enumerate(shapes)] if bias else None
    how: dict[str, Any] = {"beta": beta, "bias": rows, "activation": activation}
    for _ in range(1 if in_place else 2):  # the second call takes the kept plan
        assert ac.grouped_gemm(a, b, c, out=views, backend=BACKEND, **how, **found) is views
        for g, (m, n, k) in enumerate(shapes):
            out[g].assert_guards()
            scaled = {name: _member(value, g) for name, value in found.items()}
            given_c = None if before[g] is None else host(before[g])
            common: dict[str, Any] = {"beta": beta, "bias": None if rows is None else host(rows[g]), **scaled}
            want = gemm_reference.gemm(
                host(a[g]), host(b[g]), given_c, out_dtype=result, activation=activation, **common
            )
            magnitude = gemm_reference.absolute_product(host(a[g]), host(b[g]), given_c, **common)
            limit = reference.tolerance(dtype, result, max(1, k), scale_block=block)
            limit = limit._replace(atol_factor=limit.atol_factor * (2 if activation else 1))
            right = reference.within_tolerance(host(views[g]), want, magnitude, limit, result)
            assert right.all(), f"group {g}: {(~right).sum()} of {m * n} elements are wrong"


def _member(value: Any, g: int) -> Any:
    if isinstance(value, float):
        return value
    return host(value[g] if isinstance(value, list) else value)


def test_lists_without_out() -> None:
    a, b = [placed((9, 16), BF16, 1), placed((0, 8), BF16, 2)], [placed((16, 24), BF16, 3), placed((8, 8), BF16, 4)]
    for _ in range(2):
        made = ac.grouped_gemm(a, b, backend=BACKEND)
        assert [tuple(d.shape) for d in made] == [(9, 24), (0, 8)]
        np.testing.assert_allclose(host(made[0]).astype(np.float32), host(a[0] @ b[0]).astype(np.float32), atol=0.1)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs and streams
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLAYS)
def test_graphs_replay_with_the_sizes_of_the_time(torch: Any, name: str) -> None:
    """Captured once; sizes change between replays, which the host never learns of."""
    case, changes = REPLAYS[name]
    operands = run(case)  # the plan is made outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operands.call(case)
    total = sum(case.sizes) + case.rest
    by_counts = case.counts or case.form == MASKED
    for sizes in (case.sizes, *changes):
        changed = replace(case, sizes=sizes, rest=0 if case.form == MASKED else total - sum(sizes))
        fresh = given(changed)
        for operand in ("a", "b", "bias", "factor"):
            kept, new = getattr(operands, operand), getattr(fresh, operand)
            if kept is not None:
                kept.copy_(new)
        operands.divided.copy_(int32(sizes if by_counts else ends(sizes)))
        operands.out.view.view(bits_dtype(case.result)).fill_(-1 if case.result in FP8_TYPES else _POISON[case.result])
        graph.replay()
        torch.cuda.synchronize()
        check(changed, operands)


def test_graphs_of_lists(torch: Any) -> None:
    """The table of a list is copied from memory that the graph keeps."""
    shapes = ALIGNED[:3]
    a, b = [placed((m, k), BF16, m) for m, n, k in shapes], [placed((k, n), BF16, n) for m, n, k in shapes]
    out = [Guarded((m, n), BF16) for m, n, k in shapes]
    views = [result.view for result in out]
    ac.grouped_gemm(a, b, out=views, backend=BACKEND)
    want = [view.clone() for view in views]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.grouped_gemm(a, b, out=views, backend=BACKEND)
    for _ in range(3):
        for view in views:
            view.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for got, right, guards in zip(views, want, out, strict=True):
            assert_same_bits(got, right)
            guards.assert_guards()


def test_no_call_waits_for_the_gpu(torch: Any) -> None:
    case = Case(CONTIGUOUS, UNEVEN, 136, 72, layouts="rc")
    operands = run(case)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(40_000_000)
    operands.call(case)
    done.record()
    assert not done.query()
    done.synchronize()
    check(case, operands)


@pytest.mark.parametrize("how", ["object", "handle", "current"])
def test_streams(torch: Any, how: str) -> None:
    """Offsets that a stream has yet to write are read after it has."""
    case = Case(CONTIGUOUS, UNEVEN, 136, 72, layouts="rc", rest=9)
    operands = run(case)
    right, operands.divided = operands.divided, torch.zeros_like(operands.divided)
    operands.out.view.view(torch.int16).fill_(_POISON[BF16])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        operands.divided.copy_(right)
    if how == "current":
        with torch.cuda.stream(stream):
            operands.call(case)
    else:
        operands.call(case, stream=stream if how == "object" else stream.cuda_stream)
    stream.synchronize()
    check(case, operands)


def test_streams_have_workspaces_of_their_own(torch: Any) -> None:
    """Calls of one plan that overlap in time do not disturb each other's tables."""
    case = Case(CONTIGUOUS, skewed(64, 2000), 256, 512, layouts="rc")
    run(case)
    streams = [torch.cuda.Stream() for _ in range(4)]
    several = [given(replace(case, sizes=tuple(reversed(case.sizes)) if i % 2 else case.sizes), i) for i in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for operands, stream in zip(several, streams, strict=True):
            operands.call(case, stream=stream)
    torch.cuda.synchronize()
    for i, operands in enumerate(several):
        check(replace(case, sizes=tuple(reversed(case.sizes)) if i % 2 else case.sizes), operands)


# ----------------------------------------------------------------------------------------------------------------------
# Host operands and other frameworks
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(CONTIGUOUS, UNEVEN, 136, 72, rest=7),
        Case(MASKED, UNEVEN, 136, 72, m=136, beta=1.0),
        Case(ALONG_K, UNEVEN, 136, m=72, rest=7),
        Case(CONTIGUOUS, UNEVEN, 136, 272, a=E4M3, layouts="rc", scale="vector", rest=7),
        Case(CONTIGUOUS, UNEVEN, 136, 72, rest=7, bias="groups", activation="gelu"),
    ],
    ids=str,
)
def test_host_operands(case: Case) -> None:
    operands = given(case)
    arrays = [host(operands.a), host(operands.b), None if operands.c is None else host(operands.c)]
    name = "counts" if case.form == MASKED else "offsets"
    common: dict[str, Any] = {
        name: host(operands.divided), "beta": case.beta, **{k: host(v) for k, v in operands.scales.items()},
        "bias": None if operands.bias is None else host(operands.bias),
    }  # fmt: skip
    act: dict[str, Any] = {"activation": case.activation}
    out = np.full(case.shapes[2], 2.0**15, numerics.numpy_dtype(case.result))
    want: Any = grouped_oracle.grouped_gemm(*arrays, out=out.copy(), out_dtype=case.result, **common, **act)
    assert ac.grouped_gemm(*arrays, out=out, backend=BACKEND, **common, **act) is out
    magnitude: Any = absolute_grouped_product(*arrays, **common)
    assert reference.within_tolerance(out, want, magnitude, limits(case), case.result).all()
    made = ac.grouped_gemm(*arrays, backend=BACKEND, **common, **act)
    covered = want.astype(np.float32) != 2.0**15
    np.testing.assert_array_equal(made.astype(np.float32)[covered], out.astype(np.float32)[covered])
    assert not made.astype(np.float32)[~covered].any()


def test_cupy_arrays(cupy: Any) -> None:
    a, b = (cupy.random.standard_normal(shape).astype(cupy.float16) for shape in ((20, 64), (3, 64, 32)))
    d = ac.grouped_gemm(a, b, offsets=cupy.array([5, 5, 17], cupy.int32), backend=BACKEND)
    assert isinstance(d, cupy.ndarray)
    want = cupy.concatenate([a[:5] @ b[0], a[5:17] @ b[2]])
    assert bool(cupy.allclose(d[:17], want, rtol=2e-2, atol=2e-2))


def test_jax_arrays(jax: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    a = jax.random.normal(keys[0], (20, 64), "bfloat16")
    b = jax.random.normal(keys[1], (3, 64, 32), "bfloat16")
    d = ac.grouped_gemm(a, b, offsets=jax.numpy.array([5, 5, 17], "int32"), backend=BACKEND)
    assert isinstance(d, jax.Array)
    want = jax.numpy.concatenate([a[:5] @ b[0], a[5:17] @ b[2]])
    np.testing.assert_allclose(np.asarray(d[:17], np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=5e-2)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "exact"),
    [
        ((20, 60, 1000), True),
        ((20, 20, 2**31 - 1), True),
        ((-7, 20, 48), True),
        ((-(2**31), -1, 48), True),
        ((30, 10, 40), False),
        ((48, -5, 1), False),
        ((2**31 - 1, -(2**31), 2**31 - 1), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("layouts", ["rc", "rr"])
def test_offsets_that_make_no_sense_reach_nothing_outside(
    torch: Any, values: tuple[int, ...], exact: bool, layouts: str
) -> None:
    """They are cut off; where ends go back, rows may be those of either group."""
    n = 136 if layouts == "rc" else 133  # TMA, and the sm80 generation
    a, b, out = placed((48, 72), BF16, 1), placed((3, 72, n), BF16, 2, layout=layouts[1]), Guarded((48, n), BF16)
    ac.grouped_gemm(a, b, offsets=int32(values), out=out.view, backend=BACKEND)
    torch.cuda.synchronize()
    out.assert_guards()
    if exact:
        stops = [min(48, max(0, value)) for value in values]
        sizes = tuple(stop - start for start, stop in zip([0, *stops[:-1]], stops, strict=True))
        case = Case(CONTIGUOUS, sizes, n, 72, layouts=layouts, rest=48 - sum(sizes))
        check(case, Given(a, b, None, None, out, int32(ends(sizes)), {}))


@pytest.mark.parametrize("form", [CONTIGUOUS, MASKED, ALONG_K])
@pytest.mark.parametrize("values", [(20, -3, 1000), (2**31 - 1,) * 3, (-(2**31),) * 3], ids=str)
def test_counts_that_make_no_sense_reach_nothing_outside(torch: Any, form: str, values: tuple[int, ...]) -> None:
    case = Case(form, (16, 16, 16), 136, 72, m=16, layouts="cr" if form == ALONG_K else "rc", counts=True)
    operands = given(case)
    operands.divided = int32(values)
    operands.call(case)
    torch.cuda.synchronize()
    operands.out.assert_guards()


def good() -> dict[str, Any]:
    return {"a": placed((48, 72), BF16, 1), "b": placed((3, 72, 136), BF16, 2), "offsets": int32((20, 20, 40))}


WRONG: dict[str, tuple[type[Exception], Any, str]] = {
    "offsets on the host": (
        ac.InvalidOperandError, lambda: {"offsets": np.array([20, 20, 40], np.int32)}, "offsets on the CPU",
    ),
    "int64": (ac.InvalidOperandError, lambda: {"offsets": int32((1, 2, 3)).long()}, "int64; expected int32"),
    "length": (ac.InvalidOperandError, lambda: {"offsets": int32((1, 2))}, "expected \\(3,\\)"),
    "strides": (ac.UnsupportedError, lambda: {"offsets": int32(range(6))[::2]}, "make it contiguous"),
    "both": (ac.InvalidOperandError, lambda: {"counts": int32((1, 2, 3))}, "exactly one"),
    "K": (ac.InvalidOperandError, lambda: {"b": placed((3, 64, 136), BF16, 2)}, "K = 72"),
    "dtypes": (ac.InvalidOperandError, lambda: {"b": placed((3, 72, 136), F16, 2)}, "one dtype"),
    "f32": (
        ac.UnsupportedError,
        lambda: {"a": placed((48, 72), F32, 1), "b": placed((3, 72, 136), F32, 2), "out": None},
        "f16, bf16 and fp8",
    ),
    "columns of a": (
        ac.UnsupportedError,
        lambda: {"a": placed((48, 72), BF16, 1, layout="c"), "b": placed((3, 72, 136), BF16, 2, layout="c")},
        "A is read row-major",
    ),
    "fp8 by rows": (
        ac.UnsupportedError,
        lambda: {"a": placed((48, 80), E4M3, 1), "b": placed((3, 80, 136), E4M3, 2), "out": None},
        "contiguous along K",
    ),
    "scales of bf16": (ac.UnsupportedError, lambda: {"scale_a": scales((48, 1), 1)}, "only fp8 kernels take scales"),
    "shape of scales": (ac.InvalidOperandError, lambda: {"scale_a": scales((47, 1), 1)}, "scale_a has shape"),
    "dtype of scales": (ac.InvalidOperandError, lambda: {"scale_a": scales((48, 1), 1).half()}, "expected float32"),
    "shape of bias": (ac.InvalidOperandError, lambda: {"bias": placed((2, 136), BF16, 1)}, "bias has shape"),
    "dtype of bias": (ac.InvalidOperandError, lambda: {"bias": int32(range(136))}, "expected a floating dtype"),
    "bias on the host": (ac.InvalidOperandError, lambda: {"bias": np.zeros(136, np.float32)}, "bias on the CPU"),
    "activation": (ac.InvalidOperandError, lambda: {"activation": "nonsense"}, "unknown activation 'nonsense'"),
    "column": (
        ac.UnsupportedError, lambda: {"epilogue": lambda acc, x: acc + x, "x": placed((48, 1), F32, 1)},
        "rows and scalars, not a column",
    ),
    "stored": (ac.UnsupportedError, lambda: {"epilogue": lambda acc: (acc, acc * 2.0)}, "store D alone"),
    "shape of an operand": (
        ac.InvalidOperandError, lambda: {"epilogue": lambda acc, x: acc + x, "x": placed((2, 136), F32, 1)},
        "x has shape",
    ),
    "operand on the host": (
        ac.InvalidOperandError, lambda: {"epilogue": lambda acc, x: acc + x, "x": np.zeros(136, np.float32)},
        "x on the CPU",
    ),
    "operand without an epilogue": (ac.InvalidOperandError, lambda: {"x": scales((1,), 1)}, "no such argument"),
    "c unused": (ac.InvalidOperandError, lambda: {"c": placed((48, 136), BF16, 3)}, "beta is 0"),
    "back": (ac.InvalidOperandError, lambda: {"offsets": int32((20, 10, 40)), "check": True}, "goes back from 20"),
    "beyond": (ac.InvalidOperandError, lambda: {"offsets": int32((20, 30, 49)), "check": True}, "ends at 49 of 48"),
    "negative": (
        ac.InvalidOperandError, lambda: {"offsets": None, "counts": int32((20, -1, 1)), "check": True}, "is negative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_and_nothing_is_written(torch: Any, name: str) -> None:
    error, changes, says = WRONG[name]
    out = Guarded((48, 136), BF16)
    arguments = {**good(), "out": out.view, "backend": BACKEND} | changes()
    with pytest.raises(error, match=says):
        ac.grouped_gemm(arguments.pop("a"), arguments.pop("b"), **arguments)
    torch.cuda.synchronize()
    out.assert_untouched()
    run(Case(CONTIGUOUS, (20, 0, 20), 136, 72))  # the GPU still works


def test_the_debug_switch_of_the_environment(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(CONTIGUOUS, (20, 0, 20), 136, 72, rest=8)
    operands = run(case)
    monkeypatch.setenv("ATOMR_CUTLASS_CHECK", "1")
    operands.call(case)
    check(case, operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # not looked at while it is captured
        operands.call(case)
    operands.divided[2] = 49
    with pytest.raises(ac.InvalidOperandError, match=r"offsets\[2\] is 49: group 2 ends at 49 of 48"):
        operands.call(case)
    operands.call(case, check=False)  # the last group takes all rows that there are
    operands.out.assert_guards()
    operands.divided[2] = 40
    operands.out.view.view(bits_dtype(case.result)).fill_(_POISON[case.result])
    graph.replay()
    torch.cuda.synchronize()
    check(case, operands)


def test_results_must_not_overlap(torch: Any) -> None:
    room = placed((96, 136), BF16, 1)
    a, b = [placed((48, 72), BF16, 1) for _ in range(2)], [placed((72, 136), BF16, 2) for _ in range(2)]
    with pytest.raises(ac.InvalidOperandError, match="overlaps"):
        ac.grouped_gemm(a, b, out=[room[:48], room[40:88]], backend=BACKEND)
    with pytest.raises(ac.InvalidOperandError, match="out overlaps a"):
        ac.grouped_gemm(room[:, :72], placed((3, 72, 64), BF16, 2), offsets=int32((1, 2, 3)), out=room[:, 64:128],
                        backend=BACKEND)  # fmt: skip
    torch.cuda.synchronize()


# ----------------------------------------------------------------------------------------------------------------------
# Every cell, and those of older archs
# ----------------------------------------------------------------------------------------------------------------------


def cases_of(key: KernelKey) -> list[Case]:
    """The cases of a cell: sizes that fill its tiles, and some that do not."""
    n, k = (256, 256) if key.align_a > 1 else (133, 71)
    scale = "block" if key.scale_type else ("vector" if key.epilogue == "scaled" else "")
    sizes = ((300, 1, 0, 64, 129), (256, 256), small(40, 20))
    common: dict[str, Any] = {
        "a": key.a, "b": key.b, "out": key.d, "layouts": key.layout_a + key.layout_b, "scale": scale,
        "fast": key.math == "fast",
    }  # fmt: skip
    if key.layout_a == "c":
        return [Case(ALONG_K, size, n, m=136, rest=3, **common) for size in sizes]
    found = [Case(CONTIGUOUS, size, n, k, rest=3, **common) for size in sizes]
    return [*found, Case(MASKED, sizes[0], n, k, m=320, **common), replace(found[0], alpha=0.5, beta=2.0)]


@pytest.mark.parametrize("key", every_cell.keys("grouped_gemm", want=every_cell.is_plain), ids=lambda key: key.name)
def test_every_cell(key: KernelKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of the table by itself; with ATOMR_CUTLASS_TEST_JIT those of the matrix, compiled."""
    info = every_cell.row_of(key)
    made = functools.partial(grouped_plan.make, candidate=Candidate(key, info, 0.0, None), arch=key.arch)
    monkeypatch.setattr(grouped_module, "make", made)
    cases = cases_of(key)
    for case in cases:
        run(case)
    every_cell.right(key, info, f"products of {len(cases)} sets of groups")


@pytest.mark.usefixtures("without_kept")
@pytest.mark.skipif(not COMPILED, reason="no table has them; ATOMR_CUTLASS_TEST_JIT=1 compiles them")
@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_every_cell_with_bias_and_activation(key: KernelKey, monkeypatch: pytest.MonkeyPatch) -> None:
    if devices.get(0).arch is not key.arch:
        pytest.skip(f"{key.arch.value} cells need such a GPU")
    candidate = Candidate(with_gelu(key), None, 0.0, None)
    monkeypatch.setattr(grouped_module, "make", functools.partial(grouped_plan.make, candidate=candidate))
    for case in cases_of(key):
        if key.generation != "sm80" or case.beta == 0:
            run(replace(case, bias="groups", activation="gelu"))


@pytest.mark.usefixtures("without_kept")
@pytest.mark.parametrize(("arch", "case"), OLDER, ids=str)
def test_kernels_of_older_archs_as_ptx(arch: SmArch, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver translates them: that proves the numbers."""
    made = functools.partial(grouped_plan.make, arch=arch)
    monkeypatch.setattr(grouped_module, "make", made)
    run(case)


def test_a_plan_of_a_request(torch: Any) -> None:
    shapes = ((64, 128, 256), (0, 16, 16), (300, 40, 64))
    request = ac.GroupedGemmRequest(ac.GroupedGemmShape([ac.GemmShape(*shape) for shape in shapes]), dtype=BF16)
    plan = grouped_plan.make(request.problem(0), backend=BACKEND)
    a, b = [placed((m, k), BF16, m) for m, n, k in shapes], [placed((k, n), BF16, n) for m, n, k in shapes]
    out = [Guarded((m, n), BF16) for m, n, k in shapes]
    plan(*a, *b, *(result.view for result in out))
    torch.cuda.synchronize()
    for x, y, d in zip(a, b, out, strict=True):
        d.assert_guards()
        torch.testing.assert_close(d.view, x @ y, rtol=1.6e-2, atol=1e-2)


def test_a_plan_of_a_request_with_bias_and_activation(torch: Any) -> None:
    shapes = ((64, 128, 256), (0, 16, 16), (300, 40, 64))
    request = ac.GroupedGemmRequest(
        ac.GroupedGemmShape([ac.GemmShape(*shape) for shape in shapes]), dtype=BF16,
        epilogue=ac.GemmEpilogue(bias=True, activation="relu"),
    )  # fmt: skip
    plan = grouped_plan.make(request.problem(0), backend=BACKEND)
    a, b = [placed((m, k), BF16, m) for m, n, k in shapes], [placed((k, n), BF16, n) for m, n, k in shapes]
    bias, out = [placed((1, n), BF16, n + 1)[0] for m, n, k in shapes], [Guarded((m, n), BF16) for m, n, k in shapes]
    plan(*a, *b, *bias, *(result.view for result in out))
    torch.cuda.synchronize()
    for x, y, row, d in zip(a, b, bias, out, strict=True):
        d.assert_guards()
        want = (x.float() @ y.float() + row.float()).relu().bfloat16()
        torch.testing.assert_close(d.view, want, rtol=1.6e-2, atol=1e-2)


def test_a_plan_of_a_request_with_a_tree(torch: Any) -> None:
    """Rows are lists, and a scalar is one for all."""
    tree = LISTED.epilogue
    shapes = ((64, 128, 256), (0, 16, 16), (300, 40, 64))
    request = ac.GroupedGemmRequest(
        ac.GroupedGemmShape([ac.GemmShape(*shape) for shape in shapes]), dtype=BF16, layout_b=ac.GemmLayout.COL_MAJOR,
        epilogue=ac.GemmEpilogue(tree=tree),
    )  # fmt: skip
    plan = grouped_plan.make(request.problem(0), backend=BACKEND)
    a, b = [placed((m, k), BF16, m) for m, n, k in shapes], [placed((k, n), BF16, n, layout="c") for m, n, k in shapes]
    bias, out = [placed((1, n), BF16, n + 1)[0] for m, n, k in shapes], [Guarded((m, n), BF16) for m, n, k in shapes]
    given_by_name: dict[str, list[Any]] = {"bias": bias, "factor": [scales((1,), 1)]}
    inputs = [array for operand in tree.inputs for array in given_by_name[operand.name]]
    plan(*a, *b, *inputs, *(result.view for result in out))
    torch.cuda.synchronize()
    factor = given_by_name["factor"][0]
    for x, y, row, d in zip(a, b, bias, out, strict=True):
        d.assert_guards()
        want = ((x.float() @ y.float()) * factor + row.float()).clamp(-1.5, 1.5).bfloat16()
        torch.testing.assert_close(d.view, want, rtol=1.6e-2, atol=1e-2)


def test_operands_are_of_known_types() -> None:
    assert element_type(placed((4, 4), E4M3, 1)) is E4M3
    assert dtype_of(as_operand(int32((1, 2))), "offsets") is D.I32
