"""Every kernel of plain GEMM in the installed table, launched directly; and those of an older target, by requests.

Other operations, fp8 and scales have walks of their own: test_conv, test_grouped, test_fp8.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass.arrays import fp4, operands
from atomr_cutlass.generator.families import gemm_few_sm90, gemm_sm90
from atomr_cutlass.generator.key import REALIGNED, KernelKey
from atomr_cutlass.generator.rules import FEW, FP8_TYPES, SLICED
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm.kernels import A_SETTLED, B_SETTLED, GemmCandidate
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.bindings import settled_operand
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import (
    KINDS,
    Guarded,
    Kind,
    assert_product,
    assert_same_bits,
    lacking,
    pairs,
    placed,
    problem_of,
    rows_for,
)  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]


def known(key: KernelKey) -> bool:
    """Whether the kernel is of plain GEMM, and of types that `gpu_matrices` makes."""
    plain = key.epilogue == "lc" and not key.scale_type
    return plain and not {key.a, key.b, key.d} & {*FP8_TYPES, fp4.FP4}


TABLE = [info for info in ac.kernels(op="gemm") if known(info.key)]

Shape = tuple[int, int, int]


def runnable(info: ac.KernelInfo) -> None:
    """Skips when the device cannot run the kernel."""
    device = devices.get(0)
    if devices.rank_arch(info.key.arch, device, ptx=info.ptx) is None:
        pytest.skip(f"code for {info.key.arch.value} without PTX does not run on {device.name}")
    if info.shared_bytes > device.shared_memory:
        pytest.skip(f"{info.shared_bytes} bytes of shared memory are more than {device.name} has")


class Launch:
    """Operands for a kernel, and what it made of them."""

    def __init__(self, key: KernelKey, info: ac.KernelInfo | None, shape: Shape) -> None:
        m, n, k = shape
        self.key, self.info = key, info
        self.exact = key.math == "tf32"
        self.a = placed((m, k), key.a, 1, layout=key.layout_a, tf32=self.exact)
        self.b = placed((k, n), key.b, 2, layout=key.layout_b, tf32=self.exact)
        self.c = placed((m, n), key.d, 3, layout=key.layout_d)
        self.out = Guarded((m, n), key.d, layout=key.layout_d)

    def candidate(self) -> GemmCandidate:
        problem = problem_of(self.a, self.b, self.out.view, math_mode=self.key.math)
        return every_cell.candidate(self.key, problem, self.info)

    def check(self, candidate: GemmCandidate, *, alpha: float = 1.0, beta: float = 0.0) -> Plan:
        problem = problem_of(self.a, self.b, self.out.view, math_mode=self.key.math)
        made = from_candidate(problem, candidate, PlanOptions(like=self.a))
        assert made.kernel_name == self.key.name
        out = Guarded(tuple(self.out.view.shape), self.key.d, layout=self.key.layout_d)
        c = self.c if beta else None
        made(self.a, self.b, c, out=out.view, alpha=alpha, beta=beta)
        out.assert_guards()
        assert_product(out.view, self.a, self.b, c, alpha=alpha, beta=beta, math_mode=self.key.math, tf32=self.exact)
        # Requested before the launch before has ended, an operand is multiplied as otherwise.
        again = Guarded(tuple(self.out.view.shape), self.key.d, layout=self.key.layout_d)
        made(self.a, settled_operand(operands.as_operand(self.b)), c, out=again.view, alpha=alpha, beta=beta)
        again.assert_guards()
        assert_same_bits(again.view, out.view)
        return made


@pytest.mark.parametrize("key", every_cell.keys("gemm", want=known), ids=lambda key: key.name)
def test_every_cell(key: KernelKey) -> None:
    """Each kernel of the table; with ATOMR_CUTLASS_TEST_JIT those of the matrix, compiled."""
    info = every_cell.row_of(key)
    for shape in every_cell.gemm_shapes(key):
        launch = Launch(key, info, shape)
        candidate = launch.candidate()
        launch.check(candidate)
        launch.check(candidate, alpha=2.0, beta=-3.0)
    every_cell.right(key, info, "products of 3 shapes, alpha, beta")


SCHEDULED = [info for info in TABLE if info.key.generation == "sm90" and info.key.mainloop != REALIGNED]


@pytest.mark.parametrize("info", SCHEDULED, ids=lambda info: info.name)
def test_scheduler_options(info: ac.KernelInfo) -> None:
    """Swizzle and raster order decide which tile is computed when, never what comes out."""
    runnable(info)
    tile_m, tile_n, tile_k = info.key.tile
    unit = max(info.key.align_a, info.key.align_d)
    columns, k = (3 if info.key.scheduler == SLICED else 7) * tile_n + unit, 2 * tile_k + every_cell.least_k(info.key)
    launch = Launch(info.key, info, (rows_for(info.key, 9 * tile_m + unit), columns, k))
    candidate = launch.candidate()
    orders = ((1, 1), (2, 2), (4, 0), (8, 1), (8, 2))
    if info.key.mainloop == FEW:
        orders = tuple((share, 0) for share in gemm_few_sm90.shares(info.key))
    for swizzle, raster in orders:
        launch.check(replace(candidate, swizzle=swizzle, raster=raster))


@pytest.mark.parametrize("info", [info for info in TABLE if info.key.generation == "sm90"], ids=lambda info: info.name)
def test_both_operands_may_be_settled(info: ac.KernelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans tell launches of one operand; others that launch kernels may tell them of both."""
    runnable(info)
    monkeypatch.setattr(plans, "settled_bits", lambda _: A_SETTLED | B_SETTLED)
    launch = Launch(info.key, info, every_cell.gemm_shapes(info.key)[0])
    launch.check(launch.candidate())


@pytest.mark.parametrize("info", [info for info in TABLE if info.key.mainloop == FEW], ids=lambda info: info.name)
def test_divisions(info: ac.KernelInfo) -> None:
    """How a kernel for few rows divides a problem decides in which order sums are added up, and no more."""
    runnable(info)
    unit = max(info.key.align_a, info.key.align_d)
    shapes = ((11, 27 * unit, 200 * unit), (17, 53 * unit, 20 * unit), (rows_for(info.key, 33), 1000 * unit, 9 * unit))
    # Tiles one after the other, of which some of the thread blocks that divide K store nothing.
    for rows, columns, k in (*shapes, (1, 1000 * unit, 40 * unit)):
        launch = Launch(info.key, info, (rows, columns, k))
        told = itertools.product(gemm_few_sm90.shares(info.key), gemm_few_sm90.widths(info.key))
        for share, width in told:
            launch.check(replace(launch.candidate(), swizzle=share, width=width), alpha=2.0, beta=-3.0)


@pytest.mark.parametrize("info", [info for info in TABLE if info.key.mainloop == FEW], ids=lambda info: info.name)
def test_divisions_in_chains(info: ac.KernelInfo, torch: Any) -> None:
    """Bound weights are requested before anything is waited for: by the time a warp comes to a stage it may be used."""
    runnable(info)
    unit = max(info.key.align_a, info.key.align_d)
    for k in (304 * unit, 9 * unit):  # whole boxes, and one that K ends in
        launch = Launch(info.key, info, (2, 1000 * unit, k))
        b = settled_operand(operands.as_operand(launch.b))
        for share, width in itertools.product(gemm_few_sm90.shares(info.key), (0, 48)):
            made = launch.check(replace(launch.candidate(), swizzle=share, width=width))
            made(launch.a, launch.b, None, out=launch.out.view)
            wanted = launch.out.view.clone()
            for _ in range(100):
                made(launch.a, b, None, out=launch.out.view)
            torch.cuda.synchronize()
            assert_same_bits(launch.out.view, wanted)


@pytest.mark.parametrize("info", [info for info in TABLE if info.key.mainloop == FEW], ids=lambda info: info.name)
def test_divisions_that_no_kernel_has_are_refused(info: ac.KernelInfo) -> None:
    runnable(info)
    unit = max(info.key.align_a, info.key.align_d)
    launch = Launch(info.key, info, (8, 64 * unit, 8 * unit))
    tallest = max(gemm_few_sm90.widths(info.key))
    for swizzle, width in ((3, 64), (2 * info.key.cluster[2], 64), (1, 4), (1, tallest + 16), (1, -16)):
        with pytest.raises(ac.UnsupportedError):
            launch.check(replace(launch.candidate(), swizzle=swizzle, width=width))
    launch = Launch(info.key, info, (rows_for(info.key, 72), 64 * unit, 8 * unit))
    with pytest.raises(ac.UnsupportedError):
        launch.check(replace(launch.candidate(), swizzle=1, width=info.key.tile[0] + 16))


@pytest.mark.parametrize("info", [info for info in TABLE if gemm_sm90.widths(info.key)], ids=lambda info: info.name)
def test_widths(info: ac.KernelInfo) -> None:
    """How many columns a tile has decides which thread block computes what, never what comes out."""
    runnable(info)
    unit = max(info.key.align_a, info.key.align_d)
    for shape in ((5 * unit, 27 * unit, 200), (9 * info.key.tile[0] + unit, 7 * info.key.tile[1] + 3 * unit, 456)):
        launch, first = Launch(info.key, info, shape), None
        for width in gemm_sm90.widths(info.key):
            candidate = replace(launch.candidate(), width=width)
            launch.check(candidate, alpha=2.0, beta=-3.0)
            problem = problem_of(launch.a, launch.b, launch.out.view)
            made = from_candidate(problem, candidate, PlanOptions(like=launch.a))
            made(launch.a, launch.b, out=launch.out.view)
            first = launch.out.view.clone() if first is None else first
            assert_same_bits(launch.out.view, first)


def splitting(info: ac.KernelInfo) -> bool:
    key = info.key
    return key.scheduler == "streamk" or (key.generation == "sm80" and key.d.bits >= key.acc.bits)


@pytest.mark.parametrize("info", [info for info in TABLE if splitting(info)], ids=lambda info: info.name)
def test_split_k(info: ac.KernelInfo) -> None:
    """Slices of K, in turns (sm80 generation) or by stream-K; K ends inside a slice."""
    runnable(info)
    tile_m, tile_n, tile_k = info.key.tile
    unit = max(info.key.align_a, info.key.align_b, info.key.align_d)
    for shape in ((tile_m + unit, tile_n + unit, 64 * tile_k + unit), (unit, 3 * tile_n, 40 * tile_k)):
        launch = Launch(info.key, info, shape)
        candidate = launch.candidate()
        for split_k in (1, 2, 3, 4, 8):
            made = launch.check(replace(candidate, split_k=split_k))
            launch.check(replace(candidate, split_k=split_k), alpha=2.0, beta=1.0)
            if split_k > 1:
                assert made.workspace_bytes > 0


@pytest.mark.parametrize("info", [info for info in TABLE if info.key.scheduler == "streamk"], ids=lambda i: i.name)
def test_stream_k_decompositions(info: ac.KernelInfo) -> None:
    """More tiles than a wave, and K long enough that the last wave is shared out."""
    runnable(info)
    tile_m, tile_n, tile_k = info.key.tile
    wave = devices.get(0).multiprocessors
    for tiles in (wave + 3, 2 * wave - 1):
        launch = Launch(info.key, info, (tile_m * 2, tile_n * (tiles // 2), 20 * tile_k))
        launch.check(launch.candidate())


def request(kind: Kind, shape: ac.GemmShape, layouts: str, **more: Any) -> ac.GemmRequest:
    names = {"r": ac.GemmLayout.ROW_MAJOR, "c": ac.GemmLayout.COL_MAJOR}
    layout_a, layout_b, layout_c = (names[letter] for letter in layouts)
    return ac.GemmRequest(
        shape,
        dtype=kind.dtype,
        precision=kind.precision,
        layout_a=layout_a,
        layout_b=layout_b,
        layout_c=layout_c,
        **more,
    )


REQUEST_SHAPES = (
    ac.GemmShape(1, 1, 1),
    ac.GemmShape(64, 72, 40),
    ac.GemmShape(129, 65, 33),
    ac.GemmShape(256, 512, 1024),
    ac.GemmShape(37, 41, 43, batch=3),
    ac.GemmShape(48, 32, 64, batch=5),
)


@pytest.mark.parametrize("arch", [ac.SmArch.SM80, None], ids=["sm80", "native"])
@pytest.mark.parametrize("shape", REQUEST_SHAPES, ids=lambda s: f"{s.m}x{s.n}x{s.k}x{s.batch}")
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [(kind, layouts + d) for kind in KINDS for layouts, d in pairs(kind.layouts, "rc")],
    ids=str,
)
def test_requests(kind: Kind, layouts: str, shape: ac.GemmShape, arch: ac.SmArch | None) -> None:
    """Plans of requests; for sm_80 on a newer GPU by PTX that the driver translates."""
    wanted = request(kind, shape, layouts, arch=arch, epilogue=ac.GemmEpilogue(alpha=2.0, beta=3.0))
    try:
        made = ac.plan(wanted)
    except ac.KernelNotFoundError as error:
        if arch is not None:
            pytest.skip(str(error))
        lacking(error, kind, layouts, wanted.result_dtype)
    if arch is not None:
        assert made.main.key.arch is arch
    assert made.request is wanted
    batch = () if shape.batch == 1 else (shape.batch,)
    exact = kind.precision == "tf32"
    a = placed((*batch, shape.m, shape.k), kind.dtype, 1, layout=layouts[0], tf32=exact)
    b = placed((*batch, shape.k, shape.n), kind.dtype, 2, layout=layouts[1], tf32=exact)
    c = placed((*batch, shape.m, shape.n), wanted.result_dtype, 3, layout=layouts[2])
    out = Guarded((*batch, shape.m, shape.n), wanted.result_dtype, layout=layouts[2])
    assert made(a, b, c, out=out.view) is out.view
    out.assert_guards()
    assert_product(out.view, a, b, c, alpha=2.0, beta=3.0, math_mode=kind.math, tf32=exact)
    if layouts[2] == "r":
        fresh = made(a, b, alpha=-1.0, beta=0.0)
        assert fresh.is_contiguous()
        assert_product(fresh, a, b, alpha=-1.0, math_mode=kind.math, tf32=exact)
