"""Batch invariance on the GPU: the bits of a row, over numbers of rows and whatever the other rows hold.

`test_kernels_of_one_reduction_agree` asks more than calls need: every kernel of the table that serves a problem is
launched, operands swapped too, and those of one `Reduction` must agree in every bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from typing import Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.generator.rules import FEW, SLICED
from atomr_cutlass.ops.gemm.kernels import IN_ORDER
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.reduction import reduction_of

pytestmark = [pytest.mark.gpu]

MOST = 4096
ROWS = (1, 2, 3, 8, 17, 40, 64, 65, 97, 128, 129, 255, 1000, 2048, 3333)
COLUMN, ROW = ac.GemmLayout.COL_MAJOR, ac.GemmLayout.ROW_MAJOR
TYPES = {D.BF16: "bfloat16", D.F16: "float16", D.F32: "float32", D.TF32: "float32", D.F64: "float64"}


def matrices(torch: Any, dtype: D, m: int, n: int, k: int, *, columns: bool) -> tuple[Any, Any]:
    """Random operands: B row-major, or with `columns` column-major."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    a, b = (torch.randn(shape, device="cuda", generator=generator) for shape in ((m, k), (n, k)))
    if dtype in (D.F8E4M3, D.F8E5M2):
        kind = torch.float8_e4m3fn if dtype is D.F8E4M3 else torch.float8_e5m2
    elif dtype is D.I8:
        a, b, kind = a * 30, b * 30, torch.int8
    else:
        kind = getattr(torch, TYPES[dtype])
    a, b = a.to(kind), b.to(kind)
    return a, b.T if columns else b.T.contiguous()


def bits(torch: Any, array: Any) -> Any:
    return array.contiguous().view(torch.uint8)


def in_slices(search: Any) -> None:
    """Skips where the table has no kernel that adds up slices; asserts that a search is served by them."""
    if not any(info.key.scheduler == SLICED for info in ac.kernels(op="gemm")):
        pytest.skip("the table has no kernel that adds up slices")
    kinds = {candidate.formulation.divided for candidate in select.rank(search)}
    assert select.reduction(search).slices > 1
    assert kinds == {True, False}


def check(torch: Any, call: Any, a: Any, rows: tuple[int, ...] = ROWS) -> None:
    """Asserts that rows of `call(a)` have the bits that they have with fewer rows, and beside rows of NaN."""
    whole = bits(torch, call(a))
    for m in rows:
        for start in {0, (a.shape[0] - m) // 3}:
            some = bits(torch, call(a[start : start + m]))
            assert torch.equal(some, whole[start : start + m]), (m, start)
    if not a.dtype.is_floating_point:
        return
    for m in (1, 37, 300):
        spoilt = torch.full_like(a[:m], float("nan"))
        for row in {0, m // 2, m - 1}:
            spoilt[row] = a[row]
            assert torch.equal(bits(torch, call(spoilt))[row], whole[row]), (m, row)
            spoilt[row] = float("nan")


@pytest.mark.parametrize("columns", [True, False], ids=["rcr", "rrr"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (264, 8200), (1000, 456), (512, 16384), (72, 24584)])
@pytest.mark.parametrize("dtype", [D.BF16, D.F16])
def test_gemm(torch: Any, dtype: D, n: int, k: int, columns: bool) -> None:
    a, b = matrices(torch, dtype, MOST, n, k, columns=columns)
    check(torch, lambda x: ac.gemm(x, b, batch_invariant=True, jit="off"), a)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "columns"),
    [(D.BF16, 77, 1001, True), (D.F32, 512, 1024, False), (D.TF32, 512, 1024, True), (D.F64, 256, 512, True),
     (D.I8, 512, 1024, True), (D.F32, 128, 8192, False), (D.TF32, 256, 7168, True), (D.F64, 64, 8192, True)],
)  # fmt: skip
def test_other_types_and_alignments(torch: Any, dtype: D, n: int, k: int, columns: bool) -> None:
    a, b = matrices(torch, dtype, MOST, n, k, columns=columns)
    precision = "tf32" if dtype is D.TF32 else None
    check(torch, lambda x: ac.gemm(x, b, precision=precision, batch_invariant=True, jit="off"), a, (1, 17, 128, 2048))


@pytest.mark.parametrize("columns", [True, False], ids=["rcr", "rrr"])
@pytest.mark.parametrize(("n", "k"), [(256, 7168), (504, 4104), (512, 16384)])
def test_alpha_and_c(torch: Any, n: int, k: int, columns: bool) -> None:
    """Of slices the kernel that adds them up multiplies and adds these."""
    a, b = matrices(torch, D.BF16, MOST, n, k, columns=columns)
    c = torch.randn(1, n, device="cuda").to(torch.bfloat16).expand(MOST, n).contiguous()

    def call(x: Any) -> Any:
        return ac.gemm(x, b, c=c[: x.shape[0]], alpha=0.7, beta=-1.3, batch_invariant=True, jit="off")

    check(torch, call, a, (1, 17, 128, 2048))
    whole = call(a).double()
    expected = 0.7 * (a.double() @ b.double()) - 1.3 * c.double()
    assert float((whole - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.parametrize("columns", [True, False], ids=["rcr", "rrr"])
def test_batches_and_gaps_in_results(torch: Any, columns: bool) -> None:
    """Slices are those of a dense result of one product, which alone may be computed side by side."""
    n, k = 256, 8192
    request = ac.GemmRequest(
        ac.GemmShape(600, n, k), dtype=D.BF16, layout_b=COLUMN if columns else ROW, batch_invariant=True
    )
    in_slices(operation_of(request).search(request, devices.get(0)))
    a, b = matrices(torch, D.BF16, 600, n, k, columns=columns)
    whole = bits(torch, ac.gemm(a, b, batch_invariant=True, jit="off"))
    of_batches = ac.gemm(a.view(3, 200, k), b, batch_invariant=True, jit="off")
    assert torch.equal(bits(torch, of_batches).view(600, -1), whole)
    wide = torch.full((600, n + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
    for rows in (1, 2, 600):
        ac.gemm(a[:rows], b, out=wide[:rows, :n], batch_invariant=True, jit="off")
        assert torch.equal(bits(torch, wide[:rows, :n]), whole[:rows])
        assert wide[:, n:].isnan().all()
    for rows in (1, 7, 600):  # copied first, whatever their number
        put = a[:rows].T.contiguous().T
        assert torch.equal(bits(torch, ac.gemm(put, b, batch_invariant=True, jit="off")), whole[:rows])
    turned = torch.empty(n, 600, device="cuda", dtype=torch.bfloat16).T
    ac.gemm(a, b, out=turned, batch_invariant=True, jit="off")
    assert torch.equal(bits(torch, turned), whole)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_epilogues(torch: Any, activation: str | None) -> None:
    a, b = matrices(torch, D.BF16, MOST, 2048, 2048, columns=True)
    bias = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    check(torch, lambda x: ac.gemm(x, b, bias=bias, activation=activation, batch_invariant=True, jit="off"), a)


@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("scaling", [None, "vector", "block"])
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (256, 8192)])
def test_fp8(torch: Any, scaling: str | None, fast_accum: bool, n: int, k: int) -> None:
    a, b = matrices(torch, D.F8E4M3, MOST, n, k, columns=True)
    along = {None: None, "vector": 1, "block": -(-k // 128)}[scaling]
    scale_b = {None: None, "vector": (1, n), "block": (-(-k // 128), -(-n // 128))}[scaling]
    first = None if along is None else torch.rand(MOST, along, device="cuda") + 0.5
    second = None if scale_b is None else torch.rand(scale_b, device="cuda") + 0.5
    where = {a[row].data_ptr(): row for row in range(MOST)}

    def call(x: Any) -> Any:
        scale_a = None if first is None else first[where[x.data_ptr()] :][: x.shape[0]].contiguous()
        options = {} if scale_a is None else {"scale_a": scale_a, "scale_b": second}
        return ac.gemm(x, b, fast_accum=fast_accum, batch_invariant=True, jit="off", **options)

    whole = bits(torch, call(a))
    for m in ROWS:
        assert torch.equal(bits(torch, call(a[:m])), whole[:m]), m


def test_gated_and_matmul(torch: Any) -> None:
    a, b = matrices(torch, D.BF16, MOST, 2048, 1024, columns=True)
    if any("gated" in info.name for info in ac.kernels(op="gemm", dtype=D.BF16)):
        check(torch, lambda x: ac.gated_gemm(x, b, batch_invariant=True, jit="off"), a, (1, 17, 128, 2048))
    for n, k in ((2048, 1024), (256, 8192)):
        a, b = matrices(torch, D.BF16, MOST, n, k, columns=True)
        weights = b.T.contiguous()

        def call(x: Any, weights: Any = weights) -> Any:
            n, k = weights.shape
            return ac.matmul(
                ac.MatmulRequest(weights, x, m=n, n=x.shape[0], k=k, transa=True, batch_invariant=True, jit="off")
            )

        check(torch, call, a, (1, 17, 128, 2048))


@pytest.mark.parametrize("gradient", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("c", "k", "taps", "stride", "groups"),
    [(64, 128, 3, 1, 1), (64, 64, 1, 1, 1), (128, 64, 3, 2, 1), (3, 64, 7, 2, 1), (65, 33, 3, 1, 1), (64, 64, 3, 1, 4),
     (32, 32, 3, 1, 32)],
)  # fmt: skip
def test_images(torch: Any, c: int, k: int, taps: int, stride: int, groups: int, gradient: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(7)

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

    side, pad, most = 29, taps // 2, 64
    result = (side + 2 * pad - taps) // stride + 1
    w = random(k, taps, taps, c // groups)
    images = random(most, result, result, k) if gradient else random(most, side, side, c)

    def call(x: Any) -> Any:
        how = {"stride": stride, "padding": pad, "groups": groups, "batch_invariant": True}
        return ac.conv2d_dgrad(x, w, (x.shape[0], side, side, c), **how) if gradient else ac.conv2d(x, w, **how)

    whole = bits(torch, call(images))
    for n in (1, 2, 3, 8, 33):
        for start in (0, most - n):
            assert torch.equal(bits(torch, call(images[start : start + n])), whole[start : start + n]), (n, start)
    spoilt = torch.full_like(images[:9], float("nan"))
    spoilt[4] = images[4]
    assert torch.equal(bits(torch, call(spoilt))[4], whole[4])


def test_grouped(torch: Any) -> None:
    groups, n, k = 4, 512, 1024
    a, _ = matrices(torch, D.BF16, MOST, n, k, columns=True)
    b = torch.randn(groups, k, n, device="cuda").to(torch.bfloat16)
    whole = torch.stack([ac.grouped_gemm(
        a, b, offsets=torch.tensor([*[0] * g, *[MOST] * (groups - g)], device="cuda", dtype=torch.int32),
        batch_invariant=True, jit="off",
    ) for g in range(groups)])  # fmt: skip
    for m in (1, 16, 100, 1000, 4096):
        ends = torch.tensor([m // 4, m // 4, m // 2, m], device="cuda", dtype=torch.int32)
        out = ac.grouped_gemm(a[:m], b, offsets=ends, batch_invariant=True, jit="off")
        start = 0
        for g, end in enumerate(ends.tolist()):
            assert torch.equal(bits(torch, out[start:end]), bits(torch, whole[g, start:end])), (m, g)
            start = end


REQUESTS = {
    f"{dtype.value} {layout.value} {m}x{n}x{k}": ac.GemmRequest(ac.GemmShape(m, n, k), dtype=dtype, layout_b=layout)
    for dtype, layout, m, n, k in (
        (D.BF16, COLUMN, 96, 512, 4104), (D.BF16, ROW, 96, 512, 4104), (D.F16, COLUMN, 512, 96, 4104),
        (D.BF16, COLUMN, 77, 264, 1001), (D.TF32, COLUMN, 96, 512, 2048), (D.TF32, ROW, 96, 512, 2048),
        (D.F32, COLUMN, 96, 512, 1000), (D.F64, COLUMN, 96, 128, 1000),
    )
} | {
    f"fp8 {scaling} fast={fast}": ac.GemmRequest(
        ac.GemmShape(96, 512, 4112), dtype=D.F8E4M3, layout_b=COLUMN, scaling=scaling, fast_accum=fast
    )
    for scaling, fast in ((None, False), (None, True), ("vector", False), ("block", False))
} | {
    "bias and relu": ac.GemmRequest(
        ac.GemmShape(96, 512, 4104), dtype=D.BF16, layout_b=COLUMN,
        epilogue=ac.GemmEpilogue(bias=True, activation="relu"),
    ),
    "alpha and C": ac.GemmRequest(
        ac.GemmShape(96, 512, 4104), dtype=D.BF16, layout_b=COLUMN, epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3)
    ),
    # Two orders of rounding give one of some 60,000 results in bf16 other bits.
    "alpha and C of many": ac.GemmRequest(
        ac.GemmShape(1000, 1024, 1096), dtype=D.BF16, layout_b=COLUMN, epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3)
    ),
    "alpha and C of few rows": ac.GemmRequest(
        ac.GemmShape(96, 10240, 1096), dtype=D.BF16, layout_b=COLUMN, epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3)
    ),
    "alpha and C, rows of D not aligned": ac.GemmRequest(
        ac.GemmShape(96, 10241, 1096), dtype=D.BF16, layout_b=COLUMN, epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3)
    ),
    "fp8, alpha and C of many": ac.GemmRequest(
        ac.GemmShape(1000, 1024, 1104), dtype=D.F8E4M3, layout_b=COLUMN,
        epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3),
    ),
    "fp8, alpha and C of few rows": ac.GemmRequest(
        ac.GemmShape(96, 10240, 1104), dtype=D.F8E4M3, layout_b=COLUMN, scaling="vector",
        epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3),
    ),
    "fp8, alpha and scales of tensors": ac.GemmRequest(
        ac.GemmShape(96, 10240, 1104), dtype=D.F8E4M3, layout_b=COLUMN, scaling="tensor",
        epilogue=ac.GemmEpilogue(alpha=0.7),
    ),
    "alpha, C and bias": ac.GemmRequest(
        ac.GemmShape(24, 512, 4104), dtype=D.BF16, layout_b=COLUMN,
        epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3, bias=True, activation="silu"),
    ),
    "K of an odd number of boxes": ac.GemmRequest(ac.GemmShape(20, 1000, 3136), dtype=D.BF16, layout_b=COLUMN),
    "few columns": ac.GemmRequest(ac.GemmShape(3000, 17, 1096), dtype=D.BF16, layout_b=COLUMN),
    "results in f32": ac.GemmRequest(ac.GemmShape(33, 1000, 1096), dtype=D.BF16, layout_b=ROW, out_dtype=D.F32),
} | {
    f"slices {layout.value} {m}x{n}x{k}": ac.GemmRequest(
        ac.GemmShape(m, n, k), dtype=dtype, layout_b=layout, batch_invariant=True,
        epilogue=ac.GemmEpilogue(alpha=0.7, beta=-1.3),
    )
    for dtype, layout, m, n, k in (
        (D.BF16, COLUMN, 96, 264, 8200), (D.BF16, ROW, 96, 264, 8200), (D.BF16, COLUMN, 300, 64, 16384),
        (D.BF16, ROW, 1000, 512, 3080), (D.BF16, COLUMN, 40, 8, 65536),
    )
}  # fmt: skip


def launches(candidate: Any) -> list[Any]:
    """The launches of a kernel that have its reduction: those for few rows in several heights of tiles."""
    if candidate.key.mainloop != FEW:
        return [candidate]
    heights = gemm_few_sm90.widths(candidate.key, candidate.formulation.m)
    some = {*heights[::3], 64, heights[-1]}
    return [dataclasses.replace(candidate, swizzle=IN_ORDER, width=height) for height in sorted(some)]


@pytest.mark.parametrize("name", REQUESTS)
def test_kernels_of_one_reduction_agree(torch: Any, name: str) -> None:
    request = REQUESTS[name]
    operation = operation_of(request)
    search = operation.search(request, devices.get(0))
    a, b = matrices(torch, request.dtype, request.shape.m, request.shape.n, request.shape.k,
                    columns=request.layout_b is COLUMN)  # fmt: skip
    slots = operation.operands(request)
    given = {"a": a, "b": b}
    for slot in slots[2:-1]:
        spec = slot.specs[0]
        given[slot.name] = torch.rand(spec.shape, device="cuda").to(getattr(torch, TYPES[spec.dtype]))
    found: dict[Any, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for candidate in itertools.chain.from_iterable(map(launches, select.rank(search))):
        plan = from_candidate(request.problem(0), candidate, scales=request.scales(), fusion=request.fusion())
        inputs = [given[slot] for slot in plan.slots[:-1] if slot in given]
        # Those of a tree are in it.
        scaled = request.fusion() is None and request.epilogue.beta != 0
        factors = {"alpha": request.epilogue.alpha, "beta": request.epilogue.beta} if scaled else {}
        out = plan(*inputs, **factors)
        key, digest = candidate.key, hash(bits(torch, out).cpu().numpy().tobytes())
        swapped = "swapped " if candidate.formulation.swapped else ""
        slices = f" split {candidate.split_k}" if candidate.split_k > 1 else f" {candidate.width}"
        # As many slices are settled for batch-invariant requests alone.
        reduction = None if candidate.split_k > 1 and not search.batch_invariant else reduction_of(key)
        found[reduction][digest].append(f"{swapped}{key.name}{slices}")
    if not found:
        pytest.skip("the table has no kernel for it")
    if name.startswith("slices"):
        in_slices(search)
    for reduction, by_bits in found.items():
        for digest, names in by_bits.items():
            print(f"{name}: bits {digest & 0xFFFF:04x} of {len(names)} kernels, {reduction}: {names[0]}")
    wrong = {str(reduction): dict(by_bits) for reduction, by_bits in found.items() if reduction and len(by_bits) > 1}
    assert not wrong, wrong
