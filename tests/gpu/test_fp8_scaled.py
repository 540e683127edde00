"""fp8 GEMM on the GPU with scales on the device: of tensors, of rows and columns, of blocks; scale_d and amax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import reference
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.quantize import reference as quantization
from fp8_matrices import (
    BLOCK,
    Scaling,
    assert_scaled,
    call,
    guarded,
    host,
    operands_of,
    placed,
    scaled_plan,
    scales,
    wide,
)
from gpu_matrices import broadcast, fill, pairs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

E4M3, E5M2 = D.F8E4M3, D.F8E5M2
NAN = float("nan")

FORMS = ("none", "number", "scalar", "one", "vector")
"""Of scale_a and scale_b: nothing, a number, an array of shape (), of shape (1, 1), or one for each row or column."""


@dataclass(frozen=True)
class Case:
    """A call of `gemm` with scales. `forms` are those of scale_a and scale_b, or two times `block`."""

    m: int
    n: int
    k: int
    forms: tuple[str, str] = ("scalar", "scalar")
    a: D = E4M3
    b: D = E4M3
    out: D = D.BF16
    fast: bool = False
    layout_d: str = "r"
    alpha: float = 1.0
    beta: float = 0.0
    in_place: bool = False
    scale_d: bool = False
    amax: bool = False
    orders: str = "rr"  # of block scales in memory
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    scales_a: tuple[int, ...] = ()  # batch dimensions of scale_a
    scales_b: tuple[int, ...] = ()

    def __str__(self) -> str:
        changed = [
            name if getattr(self, name) is True else f"{name}{getattr(self, name)}"
            for name in _OPTIONAL
            if getattr(self, name) != getattr(_PLAIN, name)
        ]
        types = f"{self.a.value}x{self.b.value}-{self.out.value}"
        return "-".join([types, f"{self.m}x{self.n}x{self.k}", *self.forms, *changed]).replace(" ", "")


_PLAIN = Case(1, 1, 1)
_OPTIONAL = (
    "fast", "layout_d", "alpha", "beta", "in_place", "scale_d", "amax", "orders", "batch_a", "batch_b", "scales_a",
    "scales_b",
)  # fmt: skip


def scale_of(form: str, vector: tuple[int, int], blocks: tuple[int, int], batch: tuple[int, ...], order: str) -> Any:
    """A scale of a form."""
    seed = 20 + vector[0]
    if form in ("none", "number"):
        return None if form == "none" else 0.625
    if form == "scalar":
        return scales((), seed)
    extents = {"one": (1, 1), "vector": vector, "block": blocks}[form]
    return scales((*batch, *extents), seed, layout=order)


def scaling(case: Case) -> Scaling:
    """Its scales, on the device."""
    blocks = -(-case.k // BLOCK), -(-case.n // BLOCK)
    return Scaling(
        alpha=case.alpha,
        beta=case.beta,
        scale_a=scale_of(case.forms[0], (case.m, 1), (case.m, blocks[0]), case.scales_a, case.orders[0]),
        scale_b=scale_of(case.forms[1], (1, case.n), blocks, case.scales_b, case.orders[1]),
        scale_d=scales((1,), 5) if case.scale_d else None,
    )


def run(case: Case) -> None:
    """Calls `gemm` and checks everything that it wrote or should not have."""
    import torch

    batch = broadcast(case.batch_a, case.batch_b)
    a = placed((*case.batch_a, case.m, case.k), case.a, 1)
    b = placed((*case.batch_b, case.k, case.n), case.b, 2, layout="c")
    out = guarded((*batch, case.m, case.n), case.out, layout=case.layout_d)
    how = scaling(case)
    amax = guarded((1, 1), D.F32) if case.amax else None
    c = before = None
    if case.beta != 0:
        c = before = placed((*batch, case.m, case.n), case.out, 3, layout=case.layout_d)
        if case.in_place:
            before = c.clone()
            out.view.copy_(c)
            c = out.view
    largest = None if amax is None else amax.view
    for _ in range(2):  # amax is not left over from the call before
        if case.in_place:
            out.view.copy_(before)
        returned = call(a, b, c, out=out.view, fast_accum=case.fast, amax=largest, **how.arguments)
        assert returned is out.view
        torch.cuda.synchronize()
        out.assert_guards()
        if amax is not None:
            amax.assert_guards()
        assert_scaled(out.view, a, b, before, how, fast=case.fast, amax=largest)


# ----------------------------------------------------------------------------------------------------------------------
# Scales of tensors, rows and columns


@pytest.mark.parametrize(
    "case",
    [
        Case(65, 80, 112, forms, fast=fast)
        for forms, fast in pairs(pairs(FORMS, FORMS), (False, True))
        if not set(forms) <= {"none", "number"} and (not fast or "vector" in forms)
    ],
    ids=str,
)
def test_forms(case: Case) -> None:
    """Every form of scale_a with every form of scale_b."""
    run(case)


def test_numbers_alone() -> None:
    """They become part of alpha, and of beta where they scale the result."""
    a, b = operands_of(E4M3, E4M3, (65, 80, 112))
    c = placed((65, 80), D.BF16, 3)
    out = guarded((65, 80), D.BF16)
    call(a, b, c, out=out.view, alpha=0.5, beta=2.0, scale_a=0.625, scale_b=-1.25, scale_d=3.0)
    out.assert_guards()
    want = Scaling(0.5, 2.0, 0.625, -1.25, 3.0)
    assert_scaled(out.view, a, b, c, want)


SHAPES = (
    (1, 16, 16),
    (1, 128, 256),
    (3, 32, 48),
    (17, 48, 80),
    (128, 128, 128),
    (129, 144, 272),
    (255, 272, 512),
    (513, 16, 1024),
    (7, 528, 64),
)


@pytest.mark.parametrize("case", [Case(*shape, ("vector", "vector")) for shape in SHAPES], ids=str)
def test_shapes(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, ("vector", "vector"), out=out, scale_d=True, amax=True)
        for shape, out in pairs(((64, 65, 64), (67, 45, 48), (129, 131, 144)), (D.BF16, D.F32))
    ]
    + [Case(67, 45, 33, ("vector", "vector"), a, b, amax=True) for a, b in pairs((E4M3, E5M2), (E4M3, E5M2))],
    ids=str,
)
def test_odd_extents(case: Case) -> None:
    """Rows of D that are not aligned to 16 bytes, and K that TMA cannot read."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(129, 144, 272, ("vector", "scalar"), a, b, out, alpha=0.25, scale_d=True, amax=True)
        for a, b, out in (
            *((E4M3, E4M3, out) for out in (D.BF16, D.F16, D.F32, E4M3, E5M2)),
            (E4M3, E5M2, D.BF16),
            (E4M3, E5M2, D.F32),
            (E5M2, E4M3, D.BF16),
            (E5M2, E4M3, D.F16),
            (E5M2, E5M2, D.BF16),
            (E5M2, E5M2, E5M2),
        )
    ],
    ids=str,
)
def test_types(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(65, 80, 112, ("vector", "vector"), out=out, alpha=alpha, beta=beta, in_place=in_place, scale_d=True,
             amax=amax)
        for out, (alpha, beta, in_place, amax) in pairs(
            (D.BF16, E4M3),
            (
                (0.5, 0.0, False, False),
                (-1.0, 2.0, False, True),
                (0.25, -1.0, True, True),
                (0.0, 2.0, False, True),
            ),
        )
    ],
    ids=str,
)  # fmt: skip
def test_scalars(case: Case) -> None:
    """beta * C is added before scale_d, and counts for amax."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(144, 67, 96, ("vector", "scalar"), layout_d="c"),
        Case(144, 67, 96, ("scalar", "vector"), layout_d="c", amax=True),
        Case(144, 67, 96, ("vector", "vector"), E4M3, E5M2, layout_d="c", scale_d=True),
        Case(128, 33, 64, ("vector", "vector"), out=E4M3, layout_d="c", beta=0.5, scale_d=True, amax=True),
    ],
    ids=str,
)
def test_column_major_results(case: Case) -> None:
    """They are computed with A and B swapped, scales included."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(72, 80, 64, ("scalar", "vector"), batch_a=(3,), batch_b=(3,)),
        Case(72, 80, 64, ("vector", "vector"), batch_a=(3,), batch_b=(3,), scales_a=(3,), scales_b=(3,), amax=True),
        Case(72, 80, 64, ("vector", "scalar"), batch_a=(3,), batch_b=(3,), scales_a=(3,), scale_d=True),
        Case(33, 48, 32, ("vector", "vector"), batch_a=(3,), scales_a=(3,)),
        Case(40, 48, 64, ("vector", "vector"), batch_a=(2, 1), batch_b=(1, 3), scales_a=(2, 1), scales_b=(3,)),
        Case(40, 48, 64, ("vector", "one"), batch_a=(2, 3), batch_b=(3,), scales_a=(1, 3), beta=1.0),
        Case(17, 16, 48, ("vector", "vector"), E5M2, E4M3, batch_a=(50,), batch_b=(50,), scales_b=(50,)),
        Case(48, 40, 256, ("block", "block"), batch_a=(3,), batch_b=(3,), scales_a=(3,), scales_b=(3,)),
        Case(48, 40, 256, ("block", "block"), batch_a=(3,), scales_a=(3,)),
        Case(48, 40, 256, ("block", "block"), batch_a=(2,), batch_b=(2,)),
    ],
    ids=str,
)
def test_batches(case: Case) -> None:
    """Scales that all batches share, and scales of each batch."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, forms, fast=fast, scale_d=scale_d, amax=True)
        for shape, (forms, fast, scale_d) in pairs(
            ((1023, 1040, 1536), (2048, 2048, 2048), (16, 4096, 4096)),
            ((("vector", "vector"), True, False), (("scalar", "scalar"), False, True)),
        )
    ],
    ids=str,
)
def test_large_shapes(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_alpha_0_reads_neither_operands_nor_scales(beta: float, torch: Any) -> None:
    a, b = (torch.full((64, 64), NAN, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    c = placed((64, 64), D.BF16, 3) if beta else None
    scale = torch.full((64, 1), NAN, device="cuda")
    d = guarded((64, 64), D.BF16)
    call(a, b.t(), c, out=d.view, alpha=0.0, beta=beta, scale_a=scale, scale_b=scale.t())
    d.assert_guards()
    assert torch.equal(d.view, c * 2 if beta else torch.zeros_like(d.view))


def test_scales_that_are_not_dense(torch: Any) -> None:
    """A column of a matrix, or one number repeated: read with its strides, or refused, but not misread."""
    a, b = operands_of(E4M3, E4M3, (65, 80, 112))
    many = scales((65, 4), 7)
    for scale in (many[:, 1:2], many[:1, :1].expand(65, 1), many[:, :1].flip(0)):
        out = guarded((65, 80), D.BF16)
        try:
            call(a, b, out=out.view, scale_a=scale)
        except (ac.InvalidOperandError, ac.UnsupportedError):
            torch.cuda.synchronize()
            out.assert_untouched()
            continue
        out.assert_guards()
        assert_scaled(out.view, a, b, None, Scaling(scale_a=scale))


# ----------------------------------------------------------------------------------------------------------------------
# Block scales

BLOCKWISE = (
    (128, 128, 256),
    (1, 128, 512),
    (65, 80, 272),
    (129, 144, 1040),
    (200, 264, 384),
    (17, 1032, 128),
    (300, 128, 2064),
)


@pytest.mark.parametrize(
    "case",
    [Case(*shape, ("block", "block"), orders=orders) for shape, orders in pairs(BLOCKWISE, ("rr", "cr", "rc", "cc"))],
    ids=str,
)
def test_block_scales(case: Case) -> None:
    """Ragged blocks at the far ends, and the scales in either order in memory."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(129, 144, 400, ("block", "block"), a, b, out)
        for a, b, out in (
            (E4M3, E5M2, D.BF16),
            (E5M2, E4M3, D.BF16),
            (E4M3, E4M3, D.F16),
            (E4M3, E4M3, D.F32),
        )
    ]
    + [Case(129, 144, 400, ("block", "block"), fast=True)],
    ids=str,
)
def test_types_with_block_scales(case: Case) -> None:
    """Fast accumulation is allowed there, and not used: each block's sum is a sum of its own."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(65, 80, 272, ("block", "block"), alpha=alpha, beta=beta, in_place=in_place)
        for alpha, beta, in_place in ((0.5, 0.0, False), (1.0, 2.0, False), (-2.0, 1.0, True), (0.0, 1.0, False))
    ],
    ids=str,
)
def test_scalars_with_block_scales(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, ("block", "block"), orders=orders)
        for shape, orders in pairs(((1024, 1024, 1024), (2047, 2048, 2048), (16, 4096, 7168)), ("rr", "cr"))
    ],
    ids=str,
)
def test_large_shapes_with_block_scales(case: Case) -> None:
    run(case)


def test_quantized_matrices(torch: Any) -> None:
    """Matrices that the helpers quantize from float32, multiplied, are close to the product of the originals."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(200, 512)) * np.exp(rng.normal(size=(200, 1)))
    w = rng.normal(size=(512, 144)) * np.exp(rng.normal(size=(1, 144)))
    exact = x @ w
    magnitude = np.abs(x) @ np.abs(w)
    forms = {
        "tensor": (quantization.quantize(x, E4M3), quantization.quantize(w, E4M3)),
        "vector": (quantization.quantize(x, E4M3, axis=-1), quantization.quantize(w, E4M3, axis=-2)),
        "block": (
            quantization.quantize_blockwise(x, E4M3),
            quantization.quantize_blockwise(w, E4M3, block=(BLOCK, BLOCK)),
        ),
    }
    for form, pair in forms.items():
        a, b = (torch.from_numpy(matrix.values.view(np.uint8)).cuda().view(torch.float8_e4m3fn) for matrix in pair)
        scale_a, scale_b = (torch.from_numpy(np.array(matrix.scale)).cuda() for matrix in pair)
        d = call(a, b.t().contiguous().t(), out_dtype=D.F32, scale_a=scale_a, scale_b=scale_b)
        error = np.abs(host(d) - exact) / magnitude
        assert error.max() < 2.0**-4, form


# ----------------------------------------------------------------------------------------------------------------------
# Values


def test_nan_in_operands_and_scales(torch: Any) -> None:
    """It reaches the rows and columns that it scales, and amax."""
    a, b = operands_of(E4M3, E4M3, (65, 80, 112))
    scale_a, scale_b = torch.ones((65, 1), device="cuda"), torch.ones((1, 80), device="cuda")
    scale_a[7], scale_b[0, 9] = NAN, NAN
    amax = torch.zeros((), device="cuda")
    d = guarded((65, 80), D.BF16)
    call(a, b, out=d.view, scale_a=scale_a, scale_b=scale_b, amax=amax)
    d.assert_guards()
    want = torch.zeros((65, 80), dtype=torch.bool, device="cuda")
    want[7], want[:, 9] = True, True
    assert torch.equal(d.view.isnan(), want)
    assert bool(amax.isnan())


def test_amax_of_zeros(torch: Any) -> None:
    a, b = (torch.zeros((64, 64), device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    amax = torch.full((1,), 7.0, device="cuda")
    call(a, b.t(), amax=amax)
    assert float(amax) == 0.0


def test_amax_sees_no_more_than_the_result(torch: Any) -> None:
    """A tile that reaches beyond D holds nothing that counts, poison around the operands least of all."""
    a, b = placed((3, 32), E4M3, 1), placed((32, 16), E4M3, 2, layout="c")
    amax = torch.full((1,), NAN, device="cuda")
    d = guarded((3, 16), D.F32)
    call(a, b, out=d.view, amax=amax)
    assert float(amax) == pytest.approx(float(d.view.abs().max()), rel=1e-6)


def test_delayed_scaling(torch: Any) -> None:
    """amax of one call makes scale_d of the next, and the result then fills e4m3's range."""
    a, b = operands_of(E4M3, E4M3, (128, 128, 256))
    amax, scale_d = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    for _ in range(2):
        out = call(a, b, out_dtype=E4M3, scale_d=scale_d, amax=amax)
        torch.div(448.0, amax, out=scale_d)
    exact = wide(a) @ wide(b)
    assert float(wide(out).abs().max()) == 448.0
    assert float((wide(out) * float(amax) / 448.0 - exact).abs().max()) <= 2.0**-4 * float(amax)


# ----------------------------------------------------------------------------------------------------------------------
# Ways to call


@pytest.mark.parametrize("out", [None, D.F16, E4M3], ids=str)
def test_new_results(out: D | None, torch: Any) -> None:
    a, b = operands_of(E4M3, E4M3, (72, 48, 96))
    how = Scaling(scale_a=scales((72, 1), 3), scale_b=scales((1, 48), 4))
    d = call(a, b, out_dtype=out, **how.arguments)
    assert isinstance(d, torch.Tensor)
    assert d.is_contiguous()
    assert_scaled(d, a, b, None, how)


@pytest.mark.parametrize("form", ["scalar", "one", "vector", "block"])
def test_host_operands(form: str) -> None:
    rng = np.random.default_rng(9)
    a = rng.normal(size=(33, 256)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    b = rng.normal(size=(256, 48)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    shapes: Any = {
        "scalar": ((), ()),
        "one": ((1,), (1, 1)),
        "vector": ((33, 1), (1, 48)),
        "block": ((33, 2), (2, 1)),
    }[form]
    scale_a, scale_b = (np.array(np.exp(rng.normal(size=shape)), np.float32) for shape in shapes)
    got = call(a, b, scale_a=scale_a, scale_b=scale_b)
    both = {"scale_a": scale_a, "scale_b": scale_b}
    want = gemm_reference.gemm(a, b, **both, out_dtype=D.BF16)
    limits = reference.tolerance(E4M3, D.BF16, 256, scale_block=BLOCK if form == "block" else 0)
    assert reference.within_tolerance(got, want, gemm_reference.absolute_product(a, b, **both), limits, D.BF16).all()


def test_host_amax() -> None:
    rng = np.random.default_rng(10)
    a, b = (rng.normal(size=(32, 32)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    amax, scale_d = np.full(1, np.nan, np.float32), np.full(1, 0.5, np.float32)
    got = call(a, b, out_dtype=E4M3, scale_d=scale_d, amax=amax)
    largest = np.zeros(1, np.float32)
    want = gemm_reference.gemm(a, b, scale_d=0.5, amax=largest, out_dtype=E4M3)
    assert amax == pytest.approx(largest, rel=2.0**-8)
    limits = reference.tolerance(E4M3, E4M3, 32)
    assert reference.within_tolerance(got, want, gemm_reference.absolute_product(a, b, scale_d=0.5), limits, E4M3).all()


def replayed(torch: Any, graph: Any, out: Any, arrays: dict[str, Any], how: Scaling, amax: Any) -> None:
    """Replays with other numbers in operands and scales, and checks."""
    a, b = arrays["a"], arrays["b"]
    for seed in (11, 12):
        a.copy_(fill(tuple(a.shape), D.F32, seed).to(a.dtype))
        for scale in (how.scale_a, how.scale_b):
            scale.copy_(torch.rand(scale.shape, device="cuda") + 0.5)
        out.view.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        out.assert_guards()
        assert_scaled(out.view, a, b, None, how, amax=amax)


@pytest.mark.parametrize("form", ["vector", "block"])
def test_graph_of_a_plan(form: str, torch: Any) -> None:
    """The clearing of amax is part of the graph."""
    a, b = operands_of(E4M3, E4M3, (136, 80, 272))
    out = guarded((136, 80), D.BF16)
    how = scaling(Case(136, 80, 272, (form, form)))
    amax = torch.zeros(1, device="cuda") if form == "vector" else None
    made, arrays = scaled_plan(out.view, a, b, None, how, amax=amax)
    assert made.launches == (2 if form == "vector" else 1)
    made(*arrays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made(*arrays)
    del made
    replayed(torch, graph, out, {"a": a, "b": b}, how, amax)


def test_graph_of_a_call(torch: Any) -> None:
    """A call can be captured if its kernel is of the table, whose plans ask the GPU for nothing."""
    a, b = operands_of(E4M3, E4M3, (136, 80, 272))
    out = guarded((136, 80), D.BF16)
    how = scaling(Case(136, 80, 272, ("vector", "vector")))
    call(a, b, out=out.view, **how.arguments, backend="prebuilt")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.gemm(a, b, out=out.view, **how.arguments, backend="prebuilt")
    replayed(torch, graph, out, {"a": a, "b": b}, how, None)


def test_stream(torch: Any) -> None:
    """Scales are read on the stream of the call."""
    a, b = operands_of(E4M3, E4M3, (136, 80, 208))
    scale = scales((136, 1), 3)
    amax = torch.zeros(1, device="cuda")
    want = call(a, b, scale_a=scale, amax=amax)
    late, found = torch.full_like(scale, NAN), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(scale)
        got = call(a, b, scale_a=late, amax=found)
    stream.synchronize()
    assert torch.equal(got, want)
    assert torch.equal(found, amax)


@pytest.mark.parametrize("forms", [("scalar", "scalar"), ("vector", "vector")], ids=str)
@pytest.mark.parametrize("out", [D.BF16, E4M3], ids=str)
def test_cells_of_sm_89(forms: tuple[str, str], out: D, torch: Any) -> None:
    """They run here as PTX that the driver translates."""
    for shape in ((129, 144, 272), (1, 64, 96), (300, 528, 1040)):
        case = Case(*shape, forms, out=out, scale_d=True)
        a, b = operands_of(E4M3, E4M3, shape)
        d, how, amax = guarded(shape[:2], out), scaling(case), torch.full((1,), NAN, device="cuda")
        made, arrays = scaled_plan(d.view, a, b, None, how, amax=amax, arch=ac.SmArch.SM89)
        assert made.main.key.arch is ac.SmArch.SM89
        made(*arrays)
        torch.cuda.synchronize()
        d.assert_guards()
        assert_scaled(d.view, a, b, None, how, amax=amax)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input

M, N, K = 64, 48, 256


@pytest.fixture
def good() -> Iterator[dict[str, Any]]:
    a, b = operands_of(E4M3, E4M3, (M, N, K))
    out = guarded((M, N), D.BF16)
    yield {"a": a, "b": b, "out": out.view}
    import torch

    torch.cuda.synchronize()
    out.assert_untouched()


@pytest.mark.parametrize("shape", [(M,), (1, M), (M, 2, 1), (M - 1, 1), (M, 3), (2,)], ids=str)
def test_scale_a_of_the_wrong_shape(good: dict[str, Any], shape: tuple[int, ...], torch: Any) -> None:
    with pytest.raises(ac.InvalidOperandError, match="scale_a has shape"):
        call(**good, scale_a=torch.ones(shape, device="cuda"))


@pytest.mark.parametrize("shape", [(N,), (N, 1), (1, N + 1), (3, 1), (2, 2)], ids=str)
def test_scale_b_of_the_wrong_shape(good: dict[str, Any], shape: tuple[int, ...], torch: Any) -> None:
    with pytest.raises(ac.InvalidOperandError, match="scale_b has shape"):
        call(**good, scale_b=torch.ones(shape, device="cuda"))


@pytest.mark.parametrize("name", ["scale_a", "scale_b"])
def test_block_scales_of_one_operand(good: dict[str, Any], name: str, torch: Any) -> None:
    shape = (M, 2) if name == "scale_a" else (2, 1)
    with pytest.raises(ac.InvalidOperandError, match="both or neither"):
        call(**good, **{name: torch.ones(shape, device="cuda")})


def test_block_scale_with_a_vector(good: dict[str, Any], torch: Any) -> None:
    with pytest.raises(ac.InvalidOperandError, match="both or neither"):
        call(**good, scale_a=torch.ones((M, 2), device="cuda"), scale_b=torch.ones((1, N), device="cuda"))


def test_batches_of_scales_that_do_not_broadcast(torch: Any) -> None:
    a, b = placed((2, M, K), E4M3, 1), placed((2, K, N), E4M3, 2, layout="c")
    with pytest.raises(ac.InvalidOperandError, match="scale_a"):
        call(a, b, scale_a=torch.ones((3, M, 1), device="cuda"))


@pytest.mark.parametrize("name", ["scale_a", "scale_b", "scale_d", "amax"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int32"])
def test_scales_of_another_dtype(good: dict[str, Any], name: str, dtype: str, torch: Any) -> None:
    with pytest.raises(ac.InvalidOperandError, match=f"{name} is .*; expected float32"):
        call(**good, **{name: torch.ones(1, dtype=getattr(torch, dtype), device="cuda")})


@pytest.mark.parametrize("name", ["scale_a", "scale_b", "scale_d", "amax"])
def test_scales_on_the_host(good: dict[str, Any], name: str) -> None:
    with pytest.raises(ac.InvalidOperandError, match="all operands must be on one device"):
        call(**good, **{name: np.ones(1, np.float32)})


@pytest.mark.parametrize("name", ["scale_d", "amax"])
def test_more_than_one_element(good: dict[str, Any], name: str, torch: Any) -> None:
    with pytest.raises(ac.InvalidOperandError, match=f"{name} has shape .* expected one element"):
        call(**good, **{name: torch.ones(2, device="cuda")})


def test_amax_with_a_number_for_scale_d(good: dict[str, Any], torch: Any) -> None:
    with pytest.raises(ac.UnsupportedError, match="give scale_d as an array"):
        call(**good, scale_d=0.5, amax=torch.zeros(1, device="cuda"))


def test_amax_that_overlaps_the_result(torch: Any) -> None:
    a, b = operands_of(E4M3, E4M3, (M, N, K))
    out = torch.zeros((M, N), device="cuda")
    with pytest.raises(ac.InvalidOperandError, match="overlap"):
        call(a, b, out=out, amax=out[0, :1])


def test_scale_arrays_for_other_dtypes(torch: Any) -> None:
    a, b = placed((M, K), D.BF16, 1), placed((K, N), D.BF16, 2)
    with pytest.raises(ac.UnsupportedError, match="only fp8 kernels take arrays"):
        call(a, b, scale_a=torch.ones(1, device="cuda"))


def test_nothing_to_scale(torch: Any) -> None:
    a, b = (torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((M, 0), (0, N)))
    with pytest.raises(ac.UnsupportedError, match="K is 0"):
        call(a, b, scale_a=torch.ones(1, device="cuda"))


def test_unknown_backend(good: dict[str, Any], torch: Any) -> None:
    with pytest.raises(ac.InvalidOperandError, match="unknown backend"):
        call(**good, scale_a=torch.ones(1, device="cuda"), backend="cublas")


def test_the_largest_magnitude_of_an_empty_result_is_0(torch: Any) -> None:
    """At once and in graphs, where nothing may wait for the GPU."""
    a = torch.empty((0, 64), dtype=torch.float8_e4m3fn, device="cuda")
    b = torch.zeros((32, 64), device="cuda").to(torch.float8_e4m3fn)
    amax = torch.full((1,), 9.0, device="cuda")
    request = ac.MatmulRequest(a, b, m=0, n=32, k=64, transa=True, scales=ac.ScaleSet(amax_d=amax))
    for compute in (
        lambda: ac.gemm(a, b.t(), amax=amax),
        lambda: ac.gemm(a, b.t(), amax=amax, activation="relu"),
        lambda: ac.matmul(request),
    ):
        amax.fill_(9.0)
        assert 0 in compute().shape
        assert float(amax) == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()
        amax.fill_(9.0)
        graph.replay()
        assert float(amax) == 0
