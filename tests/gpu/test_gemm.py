"""`gemm` on the GPU against the reference: shapes, dtypes, layouts, batches, scalars and views."""

from dataclasses import dataclass, replace

import pytest

import atomr_cutlass as ac
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.rules import GEMM_OUTPUTS
from gpu_matrices import KINDS, Guarded, Kind, assert_product, broadcast, lacking, pairs, placed, result_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

BF16, F16, I8 = Kind(D.BF16), Kind(D.F16), Kind(D.I8)


@dataclass(frozen=True)
class Case:
    """A call of `gemm`. `layouts` are those of A, B and D; `pads` and `offsets`, in elements, of A, B, C and D."""

    kind: Kind
    m: int
    n: int
    k: int
    layouts: str = "rrr"
    out: D | None = None
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    batch_c: tuple[int, ...] | None = None
    alpha: float = 1.0
    beta: float = 0.0
    in_place: bool = False
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)
    whole: bool = False

    def __str__(self) -> str:
        changed = [f"{name}{getattr(self, name)}" for name in _OPTIONAL if getattr(self, name) != getattr(_PLAIN, name)]
        shape = f"{self.m}x{self.n}x{self.k}"
        parts = [str(self.kind), shape, self.layouts, *([self.out.value] if self.out else []), *changed]
        return "-".join(part.replace(" ", "") for part in parts)


_PLAIN = Case(BF16, 1, 1, 1)
_OPTIONAL = ("batch_a", "batch_b", "batch_c", "alpha", "beta", "in_place", "pads", "offsets", "whole")


def run(case: Case) -> None:
    """Calls `gemm` and checks everything that it wrote or should not have."""
    kind, result = case.kind, result_of(case.kind, case.out)
    # tf32 operands that are exact leave the tightest tolerance; test_tf32_rounds_its_operands is about the others.
    exact = kind.precision == "tf32"

    def operand(index: int, shape: tuple[int, ...], dtype: D, layout: str) -> object:
        return placed(
            shape, dtype, index + 1, whole=case.whole, tf32=exact and dtype is D.F32, layout=layout,
            pad=case.pads[index], offset=case.offsets[index],
        )  # fmt: skip

    batch = broadcast(case.batch_a, case.batch_b)
    a = operand(0, (*case.batch_a, case.m, case.k), kind.dtype, case.layouts[0])
    b = operand(1, (*case.batch_b, case.k, case.n), kind.dtype, case.layouts[1])
    out = Guarded((*batch, case.m, case.n), result, layout=case.layouts[2], pad=case.pads[3], offset=case.offsets[3])
    c = before = None
    if case.beta != 0:
        batch_c = batch if case.batch_c is None else case.batch_c
        c = operand(2, (*batch_c, case.m, case.n), result, case.layouts[2])
        before = c
        if case.in_place:
            before = c.clone()
            out.view.copy_(c)
            c = out.view
    precision = None if kind.precision == "ieee" else kind.precision
    try:
        returned = ac.gemm(a, b, c, out=out.view, alpha=case.alpha, beta=case.beta, precision=precision)
    except ac.KernelNotFoundError as error:
        lacking(error, kind, case.layouts, result)
    assert returned is out.view
    out.assert_guards()
    assert_product(
        out.view, a, b, before, alpha=case.alpha, beta=case.beta, math_mode=kind.math, tf32=exact
    )  # fmt: skip


EDGES = (63, 64, 65, 127, 128, 129, 255, 257)
SHAPES = (
    (1, 1, 1),
    (1, 1, 7),
    (1, 5, 1),
    (2, 3, 5),
    (8, 8, 8),
    (17, 13, 11),
    (127, 131, 137),
    (257, 263, 31),
    (128, 128, 1),
    (128, 128, 3),
    (128, 256, 16),
    (256, 128, 8),
    (1, 1024, 512),
    (1024, 1, 512),
    (1, 1, 8192),
    (8, 16, 8192),
    (2048, 8, 64),
    (8, 2048, 64),
    (400, 24, 40),
    *((edge, edge, edge) for edge in EDGES),
    *((edge, 128, 64) for edge in EDGES[::2]),
    *((64, edge, 128) for edge in EDGES[1::2]),
)


def kind_layouts() -> list[tuple[Kind, str]]:
    return [(kind, layouts + "r") for kind in KINDS for layouts in kind.layouts]


@pytest.mark.parametrize(
    "case", [Case(kind, *shape, layouts) for shape, (kind, layouts) in pairs(SHAPES, kind_layouts())], ids=str
)
def test_shapes(case: Case) -> None:
    run(case)


LARGE = (
    (1024, 1024, 1024),
    (2048, 1000, 4096),
    (16, 4096, 4096),
    (4096, 16, 4096),
    (128, 7168, 2048),
    (1023, 1025, 1031),
)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(kind, *shape, layouts) for shape, (kind, layouts) in pairs(LARGE, kind_layouts())),
        *(Case(kind, 4096, 4096, 4096, layouts) for kind, layouts in kind_layouts()),
        *(Case(kind, 8192, 8192, 8192, layouts) for kind, layouts in kind_layouts()),
        Case(BF16, 4096, 50257, 1024, "rcr"),
        Case(F16, 512, 4096, 16384, "rrr"),
        Case(BF16, 16384, 1024, 1024, "rcr"),
        Case(BF16, 70000, 64, 64, "rcr"),
        Case(F16, 64, 70000, 64, "rrr"),
        Case(Kind(D.F32, "ieee"), 70000, 3, 5, "rrr"),
        Case(Kind(D.F64), 3, 70000, 5, "rrr"),
    ],
    ids=str,
)
def test_large_shapes(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(kind, *shape, layouts + layout_d)
        for kind, layouts, layout_d, shape in pairs(
            KINDS, ("rr", "rc", "cr", "cc"), "rc", ((136, 80, 96), (67, 45, 33))
        )
        if kind.dtype is not D.I8 or layouts == "rc"
    ],
    ids=str,
)
def test_layouts(case: Case) -> None:
    """Column-major results are computed with A and B swapped; layouts that the table lacks skip with the cell."""
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(kind, *shape, layouts + "r", out=out, alpha=2.0, beta=beta)
        for kind in KINDS
        for layouts, out, shape, beta in pairs(
            kind.layouts, GEMM_OUTPUTS[kind.dtype, kind.dtype, kind.math], ((136, 72, 104), (67, 45, 33)), (0.0, 3.0)
        )
    ],
    ids=str,
)
def test_output_dtypes(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [Case(kind, *shape, layouts, whole=True) for (kind, layouts), shape in
     pairs(kind_layouts(), ((128, 128, 64), (200, 136, 144), (99, 33, 200)))],
    ids=str,
)  # fmt: skip
def test_whole_numbers_are_exact(case: Case) -> None:
    """Sums of small whole numbers are exact in every accumulator; they are rounded to the result's type only."""
    import torch

    kind = case.kind
    a = placed((case.m, case.k), kind.dtype, 1, whole=True, layout=case.layouts[0])
    b = placed((case.k, case.n), kind.dtype, 2, whole=True, layout=case.layouts[1])
    out = Guarded((case.m, case.n), result_of(kind))
    ac.gemm(a, b, out=out.view, precision=kind.precision)
    out.assert_guards()
    exact = (a.to(torch.float64) @ b.to(torch.float64)).to(out.view.dtype)
    assert torch.equal(out.view, exact)


BATCHES = (
    ((1,), (1,)),
    ((3,), (3,)),
    ((3,), (1,)),
    ((1,), (3,)),
    ((), (4,)),
    ((4,), ()),
    ((2, 1), (1, 3)),
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((2, 3), (2, 3)),
    ((2, 1, 2), (3, 1)),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(kind, *shape, kind.layouts[-1] + "r", batch_a=batch_a, batch_b=batch_b)
        for (batch_a, batch_b), kind, shape in pairs(BATCHES, KINDS, ((72, 80, 64), (33, 17, 9)))
    ],
    ids=str,
)
def test_batches_broadcast(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(BF16, 64, 64, 32, "rcr", batch_a=(1000,), batch_b=(1000,)),
        Case(F16, 16, 24, 8, "rrr", batch_a=(70000,), batch_b=(1,)),
        Case(Kind(D.F32, "ieee"), 3, 5, 7, "rrr", batch_a=(3000,), batch_b=()),
        Case(BF16, 40, 48, 56, "rrr", batch_a=(3,), batch_b=(3,), batch_c=(), beta=1.0),
        Case(BF16, 40, 48, 56, "rcr", batch_a=(2, 3), batch_b=(3,), batch_c=(2, 1), beta=-2.0),
        Case(Kind(D.F64), 9, 8, 7, "rrr", batch_a=(2, 1), batch_b=(1, 3), batch_c=(3,), beta=0.5),
        Case(BF16, 40, 48, 56, "rcc", batch_a=(4,), batch_b=(4,)),
        Case(BF16, 40, 48, 56, "rcr", batch_a=(4,), batch_b=(4,), pads=(8, 16, 0, 8)),
        Case(F16, 41, 43, 47, "rcr", batch_a=(2, 2), batch_b=(1, 2), pads=(1, 3, 0, 5), offsets=(1, 1, 0, 1)),
        Case(I8, 48, 32, 64, "rcr", batch_a=(5,), batch_b=(1,), alpha=-3.0, beta=2.0),
    ],
    ids=str,
)
def test_batched_calls(case: Case) -> None:
    run(case)


def test_expanded_batches() -> None:
    """Stride 0 where the caller expanded a matrix."""
    a = placed((64, 48), D.BF16, 1).expand(5, 64, 48)
    b = placed((5, 48, 56), D.BF16, 2)
    out = Guarded((5, 64, 56), D.BF16)
    ac.gemm(a, b, out=out.view)
    out.assert_guards()
    assert_product(out.view, a, b)


def test_batches_of_no_single_stride() -> None:
    """Transposed batch dimensions, whose strides do not collapse, take several launches."""
    a = placed((2, 3, 4, 40, 24), D.F16, 1)[:, :, :3].transpose(0, 2)
    b = placed((2, 3, 4, 24, 32), D.F16, 2)[:, :, :3].transpose(0, 2)
    out = Guarded((3, 3, 2, 40, 32), D.F16)
    ac.gemm(a, b, out=out.view)
    out.assert_guards()
    assert_product(out.view, a, b)


SCALARS = (
    (1.0, 1.0),
    (2.0, 0.0),
    (-1.5, 0.0),
    (0.5, -0.25),
    (1.0, -1.0),
    (0.0, 1.0),
    (0.0, -2.5),
    (0.0, 0.0),
    (3.0, 7.0),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(
            kind, *shape, kind.layouts[0] + "r", in_place=in_place,
            alpha=alpha * (2 if kind.dtype is D.I8 else 1), beta=beta * (4 if kind.dtype is D.I8 else 1),
        )
        for kind, shape, (alpha, beta), in_place in pairs(KINDS, ((136, 80, 64), (35, 45, 55)), SCALARS, (False, True))
        if beta or not in_place
    ],
    ids=str,
)  # fmt: skip
def test_scalars(case: Case) -> None:
    """alpha and beta, with C in memory of its own and C as the result."""
    run(case)


PLACES = (
    {"pads": (8, 8, 8, 8)},
    {"pads": (1, 1, 1, 1)},
    {"pads": (64, 0, 16, 0)},
    {"pads": (0, 3, 0, 16)},
    {"offsets": (1, 0, 0, 0)},
    {"offsets": (0, 1, 0, 0)},
    {"offsets": (0, 0, 1, 0)},
    {"offsets": (0, 0, 0, 1)},
    {"offsets": (1, 1, 1, 1)},
    {"offsets": (2, 4, 2, 4)},
    {"offsets": (8, 8, 8, 8), "pads": (8, 16, 24, 32)},
    {"offsets": (3, 5, 7, 9), "pads": (5, 3, 1, 7)},
)


@pytest.mark.parametrize(
    "case",
    [
        replace(Case(kind, 136, 80, 64, kind.layouts[-1] + layout_d), beta=2.0, **place)
        for place, kind, layout_d in pairs(PLACES, KINDS, "rc")
        if layout_d == "r" or kind in (BF16, Kind(D.F32, "ieee"))
    ],
    ids=str,
)
def test_views(case: Case) -> None:
    """Padded rows and addresses that are off by an element."""
    run(case)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_out_within_a_larger_matrix(kind: Kind) -> None:
    """Only the requested tile changes."""
    import torch

    a, b = placed((70, 64), kind.dtype, 1, tf32=True), placed((64, 45), kind.dtype, 2, layout="c", tf32=True)
    whole = Guarded((128, 96), result_of(kind))
    before = whole.view.clone()
    tile = whole.view[13:83, 21:66]
    ac.gemm(a, b, out=tile, precision=kind.precision)
    assert_product(tile, a, b, math_mode=kind.math, tf32=kind.precision == "tf32")
    whole.assert_guards()
    after = whole.view.clone()
    after[13:83, 21:66] = before[13:83, 21:66]
    bits = torch.int64 if before.element_size() == 8 else torch.int32 if before.element_size() == 4 else torch.int16
    assert torch.equal(after.view(bits), before.view(bits))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_new_results(kind: Kind) -> None:
    """Without `out` the result is new, dense and row-major, and C's and A's memory is left alone."""
    a, b = placed((70, 64), kind.dtype, 1, tf32=True), placed((64, 45), kind.dtype, 2, layout="c", tf32=True)
    d = ac.gemm(a, b, precision=kind.precision)
    assert d.shape == (70, 45)
    assert d.is_contiguous()
    assert d.device == a.device
    assert_product(d, a, b, math_mode=kind.math, tf32=kind.precision == "tf32")
    again = ac.gemm(a, b, precision=kind.precision)
    assert again.data_ptr() != d.data_ptr()
    assert_product(again, a, b, math_mode=kind.math, tf32=kind.precision == "tf32")


@pytest.mark.parametrize("layouts", ["rr", "rc"])
@pytest.mark.parametrize("precision", ["tf32", "3xtf32"])
@pytest.mark.parametrize("shape", [(136, 80, 64), (67, 45, 33)])
def test_tf32_rounds_its_operands(shape: tuple[int, int, int], precision: str, layouts: str) -> None:
    """Operands that TF32 does not represent."""
    m, n, k = shape
    a, b = placed((m, k), D.F32, 1, layout=layouts[0]), placed((k, n), D.F32, 2, layout=layouts[1])
    out = Guarded((m, n), D.F32)
    ac.gemm(a, b, out=out.view, precision=precision)
    out.assert_guards()
    assert_product(out.view, a, b, math_mode=precision)


def test_precisions_differ() -> None:
    """ieee is closer to the truth than 3xtf32's bound, and 3xtf32 than tf32: the modes really are different ones."""
    import torch

    a, b = placed((256, 512), D.F32, 1), placed((512, 256), D.F32, 2, layout="c")
    want = a.to(torch.float64) @ b.to(torch.float64)
    error = {
        mode: float((ac.gemm(a, b, precision=mode).to(torch.float64) - want).abs().max())
        for mode in ("ieee", "3xtf32", "tf32")
    }
    assert error["tf32"] > 10 * error["3xtf32"]
    assert error["tf32"] > 10 * error["ieee"]
