"""fp8 GEMM on the GPU against the reference, without scale arrays: types, shapes, scalars, batches, views, values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass import reference
from atomr_cutlass.arrays.numerics import numpy_dtype
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.rules import FP8_TYPES, GEMM_OUTPUTS
from atomr_cutlass.jit import kernels
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.planning import PlanOptions
from fp8_matrices import (
    BACKEND,
    COMPILED,
    Scaling,
    assert_scaled,
    call,
    cell_plan,
    guarded,
    host,
    lacking,
    operands_of,
    placed,
    scales,
    wide,
)
from gpu_matrices import broadcast, fill, pairs, problem_of, torch_dtype

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]


E4M3, E5M2 = D.F8E4M3, D.F8E5M2
PAIRS = pairs(FP8_TYPES, FP8_TYPES)
ARCHS = (ac.SmArch.SM90A, ac.SmArch.SM89)
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A call of `gemm`. `layouts` are those of A, B and D; `pads` and `offsets`, in elements, of A, B, C and D."""

    m: int
    n: int
    k: int
    a: D = E4M3
    b: D = E4M3
    out: D = D.BF16
    fast: bool = False
    layouts: str = "rcr"
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    alpha: float = 1.0
    beta: float = 0.0
    in_place: bool = False
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
    whole: bool = False

    def __str__(self) -> str:
        changed = [f"{name}{getattr(self, name)}" for name in _OPTIONAL if getattr(self, name) != getattr(_PLAIN, name)]
        types = f"{self.a.value}x{self.b.value}-{self.out.value}{'-fast' if self.fast else ''}"
        return "-".join([types, f"{self.m}x{self.n}x{self.k}", *changed]).replace(" ", "")


_PLAIN = Case(1, 1, 1)
_OPTIONAL = ("layouts", "batch_a", "batch_b", "alpha", "beta", "in_place", "pads", "offsets", "whole")


def run(case: Case) -> None:
    """Calls `gemm` and checks everything that it wrote or should not have."""
    batch = broadcast(case.batch_a, case.batch_b)

    def operand(index: int, shape: tuple[int, ...], dtype: D, layout: str) -> Any:
        return placed(
            shape, dtype, index + 1, whole=case.whole, layout=layout, pad=case.pads[index], offset=case.offsets[index]
        )

    a = operand(0, (*case.batch_a, case.m, case.k), case.a, case.layouts[0])
    b = operand(1, (*case.batch_b, case.k, case.n), case.b, case.layouts[1])
    result = (*batch, case.m, case.n)
    out = guarded(result, case.out, layout=case.layouts[2], pad=case.pads[3], offset=case.offsets[3])
    c = before = None
    if case.beta != 0:
        c = before = operand(2, result, case.out, case.layouts[2])
        if case.in_place:
            before = c.clone()
            out.view.copy_(c)
            c = out.view
    how = Scaling(case.alpha, case.beta)
    returned = call(a, b, c, out=out.view, fast_accum=case.fast, **how.arguments)
    assert returned is out.view
    out.assert_guards()
    assert_scaled(out.view, a, b, before, how, fast=case.fast)


# ----------------------------------------------------------------------------------------------------------------------
# Every cell


CELLS = every_cell.keys("gemm", want=lambda key: key.a in FP8_TYPES and every_cell.is_plain(key))


@pytest.fixture(scope="session")
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Has the kernels of the tests to come compiled several at once, while the first of them run."""
    if not COMPILED:
        return
    device = devices.get(0)
    for item in request.session.items:
        key = getattr(item, "callspec", None) and item.callspec.params.get("key")
        if isinstance(key, KernelKey):
            kernels.in_background(key, device, lambda: None)


@pytest.mark.usefixtures("compiled_ahead")
@pytest.mark.parametrize("key", CELLS, ids=lambda key: key.name)
def test_every_cell(key: KernelKey, torch: Any) -> None:
    """Each cell of the matrix, on shapes that do not fill its tiles; what is not built in with run-time compilation."""
    device = devices.get(0)
    info = every_cell.row_of(key)
    for m, n, k in every_cell.gemm_shapes(key):
        a, b = placed((m, k), key.a, 1, layout=key.layout_a), placed((k, n), key.b, 2, layout=key.layout_b)
        out = guarded((m, n), key.d, layout=key.layout_d)
        if key.epilogue == "lc" and not key.scale_type:
            problem = problem_of(a, b, out.view, math_mode=key.math)
            candidate = replace(select.candidate_of(GemmSearch(problem, device), key), info=info)
            from_candidate(problem, candidate, PlanOptions(like=a))(a, b, out=out.view)
            torch.cuda.synchronize()
            out.assert_guards()
            assert_scaled(out.view, a, b, fast=key.math == "fast")
            continue
        blocks = -(-k // 128), -(-n // 128)
        how = Scaling(
            alpha=0.5,
            scale_a=scales((m, blocks[0]) if key.scale_type else (m, 1), 3),
            scale_b=scales(blocks if key.scale_type else (1, n), 4),
            scale_d=scales((1,), 5) if key.epilogue == "scaled" else None,
        )
        if key.scale_type and k <= 128 and n <= 128:
            continue  # a single number is no block scale
        amax = torch.full((1,), NAN, device="cuda") if key.epilogue == "scaled" else None
        made, arrays = cell_plan(key, info, out.view, a, b, how, amax)
        made(*arrays)
        torch.cuda.synchronize()
        out.assert_guards()
        assert_scaled(out.view, a, b, None, how, fast=key.math == "fast", amax=amax)
    every_cell.right(key, info, "products of 3 shapes, with their scales and amax")


# ----------------------------------------------------------------------------------------------------------------------
# Types and shapes

TYPES = (
    *((E4M3, E4M3, out) for out in GEMM_OUTPUTS[E4M3, E4M3, "default"]),
    (E4M3, E5M2, D.BF16),
    (E4M3, E5M2, D.F32),
    (E5M2, E4M3, D.BF16),
    (E5M2, E4M3, D.F16),
    (E5M2, E5M2, D.BF16),
    (E5M2, E5M2, E5M2),
)
"""Types of A, B and D; `test_every_cell` has the others."""


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, a, b, out, fast)
        for (a, b, out), fast, shape in pairs(TYPES, (False, True), ((129, 144, 272), (1023, 1040, 528)))
    ],
    ids=str,
)
def test_types(case: Case) -> None:
    run(case)


SMALL = (
    (1, 16, 16),
    (1, 64, 128),
    (2, 8, 32),
    (3, 32, 48),
    (17, 48, 80),
    (63, 8, 96),
    (128, 128, 128),
    (255, 272, 512),
    (257, 16, 1024),
    (7, 528, 64),
    (1, 8, 8192),
    (400, 24, 48),
)


@pytest.mark.parametrize("case", [Case(*shape, fast=fast) for shape, fast in pairs(SMALL, (False, True))], ids=str)
def test_shapes(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, out=out)
        for shape, out in pairs(
            ((1, 1, 16), (64, 65, 64), (67, 45, 32), (129, 131, 144), (2048, 1001, 1024)), (D.BF16, D.F32)
        )
    ],
    ids=str,
)
def test_odd_extents(case: Case) -> None:
    """Rows of D that are not aligned to 16 bytes."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(*shape, a, b) for (a, b), shape in pairs(PAIRS, ((1, 1, 1), (33, 17, 9), (64, 64, 65), (130, 72, 136)))),
        Case(67, 45, 33, out=D.F32),
        Case(96, 40, 68),
    ],
    ids=str,
)
def test_k_that_is_no_multiple_of_16(case: Case) -> None:
    """TMA cannot read such operands: the sm80 generation does."""
    run(case)


LARGE = ((512, 512, 512), (1023, 1040, 1536), (2048, 2048, 2048), (16, 4096, 4096), (1, 2048, 2048), (128, 7168, 2048))


@pytest.mark.parametrize("case", [Case(*shape, fast=fast) for shape, fast in pairs(LARGE, (False, True))], ids=str)
def test_large_shapes(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(1024, 1040, 2048, a, b, out)
        for (a, b), out in ((PAIRS[0], E4M3), (PAIRS[1], D.BF16), (PAIRS[2], D.F16), (PAIRS[3], E5M2))
    ],
    ids=str,
)
def test_large_products_of_types(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, a, b, out, fast, whole=True)
        for (a, b, out, fast), shape in pairs(
            (
                (E4M3, E4M3, D.F32, False),
                (E4M3, E5M2, D.F32, False),
                (E5M2, E5M2, D.BF16, False),
                (E4M3, E4M3, D.BF16, True),
            ),
            ((128, 128, 64), (200, 136, 144)),
        )
    ],
    ids=str,
)
def test_whole_numbers_are_exact(case: Case) -> None:
    """Sums of few small whole numbers need no more bits than even fast accumulation keeps."""
    import torch

    a, b = operands_of(case.a, case.b, (case.m, case.n, case.k), whole=True)
    out = guarded((case.m, case.n), case.out)
    call(a, b, out=out.view, fast_accum=case.fast)
    out.assert_guards()
    assert torch.equal(out.view, (wide(a) @ wide(b)).to(out.view.dtype))


@pytest.mark.parametrize(
    "case",
    [
        Case(144, 67, 96, layouts="rcc"),
        Case(144, 80, 112, E4M3, E5M2, layouts="rcc"),
        Case(64, 129, 256, out=E4M3, layouts="rcc", alpha=0.25),
        Case(128, 33, 64, layouts="rcc", beta=1.5),
        Case(144, 67, 96, fast=True, layouts="rcc"),
    ],
    ids=str,
)
def test_column_major_results(case: Case) -> None:
    """They are computed with A and B swapped, types included."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(*shape, fast=True, layouts=layouts)
        for shape, layouts in pairs(((144, 80, 112), (272, 528, 1040)), ("rrr", "ccr"))
    ],
    ids=str,
)
def test_layouts_of_fast_accumulation(case: Case) -> None:
    """CUTLASS has fp8 that is not contiguous along K with fast accumulation only."""
    run(case)


# ----------------------------------------------------------------------------------------------------------------------
# Scalars, batches and views

SCALARS = ((2.0, 0.0), (-1.5, 0.0), (1.0, 1.0), (0.5, -0.25), (0.0, 1.0), (0.0, 0.0))


@pytest.mark.parametrize(
    "case",
    [
        Case(136, 80, 64, out=out, alpha=alpha, beta=beta, in_place=in_place)
        for (alpha, beta), out, in_place in pairs(SCALARS, (D.BF16, E4M3), (False, True))
        if beta or not in_place
    ]
    + [
        Case(67, 45, 48, beta=-2.0, alpha=0.5),
        Case(67, 45, 33, beta=-2.0, alpha=0.5),
        Case(65, 48, 80, out=D.F32, beta=1.0, fast=True),
    ],
    ids=str,
)
def test_scalars(case: Case) -> None:
    """alpha and beta, with C in memory of its own and C as the result."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(72, 80, 64, batch_a=(3,), batch_b=(3,)),
        Case(33, 48, 32, batch_a=(3,), batch_b=(1,)),
        Case(33, 48, 32, batch_b=(4,)),
        Case(40, 48, 64, batch_a=(2, 1), batch_b=(1, 3), beta=1.0),
        Case(40, 48, 64, batch_a=(2, 1, 2), batch_b=(3, 1), fast=True),
        Case(17, 16, 48, E5M2, E4M3, batch_a=(100,), batch_b=(100,)),
        Case(17, 15, 33, batch_a=(5,), batch_b=(5,)),
        Case(48, 32, 64, out=E4M3, batch_a=(4,), batch_b=(4,), alpha=0.25),
    ],
    ids=str,
)
def test_batches(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        replace(Case(136, 80, 64, beta=2.0), **place)
        for place in (
            {"pads": (16, 32, 8, 16)},
            {"pads": (1, 3, 5, 7)},
            {"offsets": (16, 32, 8, 24)},
            {"offsets": (1, 0, 0, 0)},
            {"offsets": (0, 0, 0, 1)},
            {"offsets": (4, 8, 2, 6), "pads": (4, 12, 1, 3)},
        )
    ],
    ids=str,
)
def test_views(case: Case) -> None:
    """Padded rows and addresses that are off by some elements."""
    run(case)


# ----------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize(
    ("dtype", "out", "fast"),
    [
        (E4M3, D.BF16, False),
        (E4M3, D.BF16, True),
        (E4M3, D.F32, False),
        (E4M3, E4M3, False),
        (E5M2, D.BF16, False),
        (E5M2, D.BF16, True),
    ],
    ids=str,
)
def test_nan_reaches_its_row_and_column_only(dtype: D, out: D, fast: bool, torch: Any) -> None:
    a = fill((65, 80), D.F32, 1, whole=True)
    b = fill((48, 80), D.F32, 2, whole=True)
    a[5, 7], b[9, 3] = NAN, NAN
    a, b = a.to(torch_dtype(dtype)), b.to(torch_dtype(dtype)).t()
    d = guarded((65, 48), out)
    call(a, b, out=d.view, fast_accum=fast)
    d.assert_guards()
    got, want = wide(d.view).isnan(), torch.zeros((65, 48), dtype=torch.bool, device="cuda")
    want[5], want[:, 9] = True, True
    assert torch.equal(got, want)
    assert_scaled(d.view, a, b, fast=fast)


@pytest.mark.parametrize("out", FP8_TYPES, ids=str)
def test_fp8_results_saturate_and_keep_nan(out: D, torch: Any) -> None:
    """Overflow is the largest finite value, NaN is 0x7f."""
    a = torch.full((64, 128), 400.0, device="cuda")
    a[1], a[2, 3] = -400.0, NAN
    a, b = a.to(torch.float8_e4m3fn), torch.full((32, 128), 400.0, device="cuda").to(torch.float8_e4m3fn).t()
    d = guarded((64, 32), out)
    call(a, b, out=d.view)
    d.assert_guards()
    largest = 448.0 if out is E4M3 else 57344.0
    got = wide(d.view)
    assert (got[0] == largest).all()
    assert (got[1] == -largest).all()
    assert (d.view.view(torch.uint8)[2] == 0x7F).all()


def test_e5m2_infinity(torch: Any) -> None:
    a = fill((64, 64), D.F32, 1, whole=True)
    a[3, 5] = float("inf")
    a = a.to(torch.float8_e5m2)
    b = torch.ones((32, 64), device="cuda").to(torch.float8_e5m2).t()
    d = guarded((64, 32), D.BF16)
    call(a, b, out=d.view)
    assert wide(d.view)[3].isposinf().all()
    assert_scaled(d.view, a, b)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_alpha_0_reads_no_operand(beta: float, torch: Any) -> None:
    a, b = (torch.full((64, 64), NAN, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    c = placed((64, 64), D.BF16, 3) if beta else None
    d = guarded((64, 64), D.BF16)
    call(a, b.t(), c, out=d.view, alpha=0.0, beta=beta)
    d.assert_guards()
    assert torch.equal(d.view, c * 2 if beta else torch.zeros_like(d.view))


def test_k_0(torch: Any) -> None:
    a, b = torch.empty((24, 0), device="cuda"), torch.empty((0, 16), device="cuda")
    d = guarded((24, 16), D.BF16)
    call(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), out=d.view)
    d.assert_guards()
    assert (d.view == 0).all()


def test_full_accumulation_is_closer(torch: Any) -> None:
    """Its sums leave the tensor cores of sm_90, which keep 14 bits, every 128 elements of K."""
    if devices.get(0).capability != (9, 0):
        pytest.skip("of the GPUs so far only those of sm_90 add fp8 up with fewer bits than float32's")
    m, n, k = 2048, 2048, 8192
    a, b = (torch.rand((extent, k), device="cuda").to(torch.float8_e4m3fn) for extent in (m, n))
    want = wide(a) @ wide(b).t()
    error = []
    for fast in (False, True):
        request = ac.GemmRequest(
            ac.GemmShape(m, n, k), dtype=E4M3, out_dtype=D.F32, layout_b=ac.GemmLayout.COL_MAJOR, fast_accum=fast
        )
        made = planned(request)
        if fast and made.main.key.math != "fast":
            pytest.skip(f"the kernel that is taken for {request.shape} has full accumulation")
        error.append(float((wide(made(a, b.t())) - want).abs().max()))
    assert error[0] < error[1]


# ----------------------------------------------------------------------------------------------------------------------
# Ways to call


@pytest.mark.parametrize("out", [None, D.F16, D.F32, E4M3, E5M2], ids=str)
def test_new_results(out: D | None, torch: Any) -> None:
    a, b = operands_of(E4M3, E4M3, (72, 48, 96))
    for _ in range(2):
        d = call(a, b, out_dtype=out, alpha=0.25)
        assert isinstance(d, torch.Tensor)
        assert d.dtype is torch_dtype(out or D.BF16)
        assert d.is_contiguous()
        assert_scaled(d, a, b, None, Scaling(0.25))


@pytest.mark.parametrize(("a", "b", "out"), [(E4M3, E4M3, None), (E4M3, E5M2, None), (E4M3, E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(64, 48, 32), (33, 16, 80)], ids=str)
def test_host_operands(a: D, b: D, out: D | None, shape: tuple[int, int, int]) -> None:
    """ml_dtypes arrays, both row-major, are copied to the GPU as its kernels like them."""
    m, n, k = shape
    rng = np.random.default_rng(7)
    left = rng.normal(size=(m, k)).astype(np.float32).astype(numpy_dtype(a))
    right = rng.normal(size=(k, n)).astype(np.float32).astype(numpy_dtype(b))
    got = call(left, right, out_dtype=out)
    assert isinstance(got, np.ndarray)
    result = out or D.BF16
    assert got.dtype == numpy_dtype(result)
    limits = reference.tolerance(a, result, k)
    want = gemm_reference.gemm(left, right, out_dtype=result)
    assert reference.within_tolerance(got, want, gemm_reference.absolute_product(left, right), limits, result).all()


def test_host_out() -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.normal(size=(32, 32)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    out = np.full((32, 32), 7, ml_dtypes.bfloat16)
    assert call(a, b, out=out) is out
    want = gemm_reference.gemm(a, b, out_dtype=D.BF16)
    limits = reference.tolerance(E4M3, D.BF16, 32)
    assert reference.within_tolerance(out, want, gemm_reference.absolute_product(a, b), limits, D.BF16).all()


def planned(request: ac.GemmRequest) -> ac.Plan:
    try:
        return ac.plan(request, backend=BACKEND)
    except ac.KernelNotFoundError as error:
        lacking(error, request.arch)


REQUESTS = [
    ac.GemmRequest(ac.GemmShape(129, 96, 272), dtype=E4M3, layout_b=ac.GemmLayout.COL_MAJOR),
    ac.GemmRequest(ac.GemmShape(129, 96, 272), dtype=E4M3, layout_b=ac.GemmLayout.COL_MAJOR, fast_accum=True),
    ac.GemmRequest(ac.GemmShape(64, 96, 80, batch=3), dtype=E5M2, dtype_b=E4M3, layout_b=ac.GemmLayout.COL_MAJOR),
    ac.GemmRequest(
        ac.GemmShape(64, 96, 80),
        dtype=E4M3,
        out_dtype=E4M3,
        layout_b=ac.GemmLayout.COL_MAJOR,
        epilogue=ac.GemmEpilogue(alpha=0.25, beta=0.5),
    ),
]


def run_plan(made: ac.Plan, request: ac.GemmRequest) -> None:
    shape = request.shape
    batch = () if shape.batch == 1 else (shape.batch,)
    a = placed((*batch, shape.m, shape.k), request.operand_dtype, 1)
    b = placed((*batch, shape.k, shape.n), request.operand_dtype_b, 2, layout="c")
    c = placed((*batch, shape.m, shape.n), request.result_dtype, 3) if request.epilogue.beta else None
    out = guarded((*batch, shape.m, shape.n), request.result_dtype)
    made(a, b, c, out=out.view)
    out.assert_guards()
    how = Scaling(request.epilogue.alpha, request.epilogue.beta)
    assert_scaled(out.view, a, b, c, how, fast=request.fast_accum)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: f"{request.dtype.value}-{request.shape.batch}")
def test_plans(request_: ac.GemmRequest) -> None:
    made = planned(request_)
    assert made.main.key.a in FP8_TYPES
    run_plan(made, request_)


OLDER = [
    {"dtype": E4M3},
    {"dtype": E4M3, "fast_accum": True},
    {"dtype": E5M2, "dtype_b": E4M3, "out_dtype": D.F32},
    {"dtype": E4M3, "out_dtype": E4M3, "epilogue": ac.GemmEpilogue(alpha=0.25)},
]


@pytest.mark.parametrize("fields", OLDER, ids=lambda fields: "-".join(map(str, fields)))
@pytest.mark.parametrize("shape", [(128, 128, 128), (129, 144, 272), (1, 64, 96), (300, 528, 1040)], ids=str)
def test_cells_of_sm_89(fields: dict[str, Any], shape: tuple[int, int, int]) -> None:
    """They run here as PTX that the driver translates."""
    request = ac.GemmRequest(
        ac.GemmShape(*shape), arch=ac.SmArch.SM89, layout_b=ac.GemmLayout.COL_MAJOR, **fields
    )  # fmt: skip
    made = planned(request)
    key = made.main.key
    assert (key.arch, key.generation) == (ac.SmArch.SM89, "sm80")
    run_plan(made, request)


def test_cells_of_sm_89_take_any_alignment() -> None:
    request = ac.GemmRequest(
        ac.GemmShape(67, 45, 33), dtype=E4M3, arch=ac.SmArch.SM89, layout_b=ac.GemmLayout.COL_MAJOR
    )
    run_plan(planned(request), request)


def test_graph(torch: Any) -> None:
    """A call is captured once its plan has been made; its operands may change between replays."""
    a, b = operands_of(E4M3, E4M3, (136, 80, 208))
    out = guarded((136, 80), D.BF16)
    call(a, b, out=out.view)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.gemm(a, b, out=out.view, backend=BACKEND)
    for seed in (11, 12):
        a.copy_(fill((136, 208), D.F32, seed).to(a.dtype))
        out.view.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        out.assert_guards()
        assert_scaled(out.view, a, b)


def test_stream(torch: Any) -> None:
    a, b = operands_of(E4M3, E4M3, (136, 80, 208))
    want = call(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    late = a.clone()
    late.view(torch.int8).fill_(-1)  # NaN
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        got = call(late, b)
    stream.synchronize()
    assert torch.equal(got, want)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.fixture
def good() -> Iterator[dict[str, Any]]:
    a, b = operands_of(E4M3, E4M3, (64, 48, 32))
    out = guarded((64, 48), D.BF16)
    yield {"a": a, "b": b, "out": out.view}
    import torch

    torch.cuda.synchronize()
    out.assert_untouched()


def test_fp8_by_bf16(good: dict[str, Any]) -> None:
    with pytest.raises(ac.InvalidOperandError, match="but for two of fp8"):
        call(**{**good, "b": placed((32, 48), D.BF16, 2)})


@pytest.mark.parametrize("layouts", ["rr", "cc"])
def test_operands_that_do_not_lie_along_k_are_copied(layouts: str) -> None:
    a, b = placed((64, 32), E4M3, 1, layout=layouts[0]), placed((32, 48), E4M3, 2, layout=layouts[1])
    out = guarded((64, 48), D.BF16)
    call(a=a, b=b, out=out.view)
    assert_scaled(out.view, a, b)
    out.assert_guards()


@pytest.mark.parametrize("out", [D.F64, D.I32], ids=str)
def test_results_that_no_kernel_gives(good: dict[str, Any], out: D) -> None:
    other = guarded((64, 48), out)
    with pytest.raises(ac.UnsupportedError, match="operands give"):
        call(**{**good, "out": other.view})
    other.assert_untouched()


def test_c_of_another_dtype(good: dict[str, Any]) -> None:
    with pytest.raises(ac.InvalidOperandError, match="must have the result's dtype"):
        call(**good, c=placed((64, 48), D.F32, 3), beta=1.0)


def test_precision_is_not_for_fp8(good: dict[str, Any]) -> None:
    with pytest.raises(ac.InvalidOperandError, match="float32"):
        call(**good, precision="tf32")


def test_older_archs_have_no_fp8() -> None:
    with pytest.raises(ac.UnsupportedError, match="no kernel multiplies e4m3 on SM80"):
        ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=E4M3, arch=ac.SmArch.SM80)


def test_operands_are_left_as_they_were(torch: Any) -> None:
    a, b = operands_of(E4M3, E5M2, (65, 48, 80))
    before = host(a), host(b)
    call(a, b)
    torch.cuda.synchronize()
    for tensor, bits in zip((a, b), before, strict=True):
        np.testing.assert_array_equal(host(tensor).view(np.uint8), bits.view(np.uint8))
