"""Numbers that are none, are infinite or are absent: NaN, infinity, alpha and beta of 0, K = 0 and empty results."""

import math

import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.ops.gemm import reference as gemm_reference
from gpu_matrices import (
    KINDS,
    Guarded,
    Kind,
    assert_product,
    assert_same_bits,
    fill,
    host,
    pairs,
    placed,
    result_of,
    torch_dtype,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

FLOATS = tuple(kind for kind in KINDS if kind.dtype is not D.I8)
SHAPES = ((136, 80, 64), (35, 45, 55))
NAN, INF = math.nan, math.inf


def operands_of(kind: Kind, shape: tuple[int, int, int]) -> tuple:
    """A, B and C of small whole numbers, whose sums are exact."""
    m, n, k = shape
    a = placed((m, k), kind.dtype, 1, whole=True, layout=kind.layouts[-1][0])
    b = placed((k, n), kind.dtype, 2, whole=True, layout=kind.layouts[-1][1])
    return a, b, placed((m, n), result_of(kind), 3, whole=True)


def assert_as_reference(kind: Kind, out: Guarded, a: object, b: object, c: object, alpha: float, beta: float) -> None:
    out.assert_guards()
    assert_product(out.view, a, b, c, alpha=alpha, beta=beta, math_mode=kind.math, tf32=kind.precision == "tf32")


@pytest.mark.parametrize(("kind", "shape"), pairs(FLOATS, SHAPES), ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_operands(kind: Kind, shape: tuple[int, int, int], value: float) -> None:
    """A value that is not finite in a row of A or a column of B reaches that row or column of D, and no other."""
    a, b, _ = operands_of(kind, shape)
    a[5, 7] = value
    b[3, 9] = value
    b[7, 11] = 0.0  # times infinity: NaN
    out = Guarded((shape[0], shape[1]), result_of(kind))
    ac.gemm(a, b, out=out.view, precision=kind.precision)
    if kind.precision == "3xtf32":
        # Infinity minus itself is the small part of an infinite operand, so 3xtf32 makes NaN of it.
        finite = np.ones(shape[:2], bool)
        finite[5, :] = finite[:, 9] = False
        got = host(out.view)
        assert not np.isfinite(got[~finite]).any()
        a[5, 7] = b[3, 9] = 0.0
        want = gemm_reference.gemm(host(a), host(b), out_dtype=D.F32)
        np.testing.assert_array_equal(got[finite], want[finite])
        out.assert_guards()
        return
    assert_as_reference(kind, out, a, b, None, 1.0, 0.0)


@pytest.mark.parametrize(("kind", "shape"), pairs(FLOATS, SHAPES), ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 0.0])
def test_c(kind: Kind, shape: tuple[int, int, int], value: float, alpha: float) -> None:
    a, b, c = operands_of(kind, shape)
    c[4, 6] = value
    out = Guarded((shape[0], shape[1]), result_of(kind))
    ac.gemm(a, b, c, out=out.view, alpha=alpha, beta=2.0, precision=kind.precision)
    assert_as_reference(kind, out, a, b, c, alpha, 2.0)
    assert not math.isfinite(float(out.view[4, 6]))
    assert int(out.view.isfinite().sum()) == out.view.numel() - 1


@pytest.mark.parametrize(("kind", "shape"), pairs(KINDS, SHAPES), ids=str)
@pytest.mark.parametrize("beta", [0.0, 1.0, -3.0])
def test_alpha_zero_reads_neither_a_nor_b(kind: Kind, shape: tuple[int, int, int], beta: float) -> None:
    a, b, c = operands_of(kind, shape)
    if kind.dtype is not D.I8:
        a.fill_(NAN)
        b.fill_(INF)
    out = Guarded((shape[0], shape[1]), result_of(kind))
    if beta:
        ac.gemm(a, b, c, out=out.view, alpha=0, beta=beta, precision=kind.precision)
        want = (c.double() * beta).to(c.dtype) if kind.dtype is not D.I8 else c * int(beta)
    else:
        ac.gemm(a, b, out=out.view, alpha=0, precision=kind.precision)
        want = c * 0
    out.assert_guards()
    assert (out.view == want).all()


@pytest.mark.parametrize(("kind", "shape"), pairs(FLOATS, SHAPES), ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(NAN, 0.0), (INF, 0.0), (-INF, 1.0), (1.0, NAN), (2.0, INF), (0.0, NAN)])
def test_scalars_that_are_not_finite(kind: Kind, shape: tuple[int, int, int], alpha: float, beta: float) -> None:
    a, b, c = operands_of(kind, shape)
    out = Guarded((shape[0], shape[1]), result_of(kind))
    c = None if beta == 0 else c
    ac.gemm(a, b, c, out=out.view, alpha=alpha, beta=beta, precision=kind.precision)
    out.assert_guards()
    got = host(out.view)
    if math.isnan(alpha) or math.isnan(beta):
        assert np.isnan(got).all()
    else:
        want = gemm_reference.gemm(
            host(a), host(b), None if c is None else host(c), alpha=alpha, beta=beta, out_dtype=result_of(kind)
        )
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layouts", ["rr", "rc"])
@pytest.mark.parametrize("beta", [0.0, 1.0, -2.0])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_no_products(kind: Kind, layouts: str, beta: float, batch: tuple[int, ...]) -> None:
    """K = 0: beta * C, or zeros; alpha multiplies nothing."""
    a = placed((*batch, 33, 0), kind.dtype, 1, layout=layouts[0])
    b = placed((*batch, 0, 45), kind.dtype, 2, layout=layouts[1])
    c = placed((*batch, 33, 45), result_of(kind), 3) if beta else None
    out = Guarded((*batch, 33, 45), result_of(kind))
    ac.gemm(a, b, c, out=out.view, alpha=1 if kind.dtype is D.I8 else NAN, beta=beta, precision=kind.precision)
    out.assert_guards()
    want = (c.double() * beta).to(c.dtype) if c is not None else out.view * 0
    assert (out.view == want).all()
    fresh = ac.gemm(a, b, precision=kind.precision)
    assert fresh.shape == (*batch, 33, 45)
    assert (fresh == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (0, 0, 7), (0, 5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (0,)], ids=str)
def test_empty_results(kind: Kind, shape: tuple[int, int, int], batch: tuple[int, ...]) -> None:
    m, n, k = shape
    a = placed((*batch, m, k), kind.dtype, 1)
    b = placed((*batch, k, n), kind.dtype, 2)
    out = Guarded((*batch, m, n), result_of(kind))
    assert ac.gemm(a, b, out=out.view, precision=kind.precision) is out.view
    out.assert_untouched()
    fresh = ac.gemm(a, b, precision=kind.precision)
    assert fresh.shape == (*batch, m, n)
    assert fresh.dtype == torch_dtype(result_of(kind))


@pytest.mark.parametrize("batch_a", [(0,), (0, 1), (2, 0)], ids=str)
def test_empty_batches(batch_a: tuple[int, ...]) -> None:
    a, b = placed((*batch_a, 16, 24), D.BF16, 1), placed((24, 8), D.BF16, 2)
    assert ac.gemm(a, b).shape == (*batch_a, 16, 8)


def test_overflow_is_infinite() -> None:
    """fp16 overflows where its largest number ends, not before and not in the accumulator."""
    import torch

    a = torch.full((64, 64), 128.0, dtype=torch.float16, device="cuda")
    b = torch.full((64, 64), 8.0, dtype=torch.float16, device="cuda")  # sums: 65536
    d = ac.gemm(a, b)
    assert torch.isinf(d).all()
    assert (ac.gemm(a, b, alpha=0.5) == 32768.0).all()
    assert (ac.gemm(a, b, alpha=-1.0) == -INF).all()


@pytest.mark.parametrize("dtype", [D.F16, D.BF16, D.F32, D.F64], ids=lambda dtype: dtype.value)
def test_subnormal_numbers(dtype: D) -> None:
    """Operands below the normal range count."""
    import torch

    tiny = torch.finfo(torch_dtype(dtype)).smallest_normal / 4
    a = torch.full((32, 64), tiny, dtype=torch_dtype(dtype), device="cuda")
    b = torch.full((64, 32), 2.0, dtype=torch_dtype(dtype), device="cuda")
    d = ac.gemm(a, b)
    assert (d.double() == tiny * 128).all()


def test_integers_at_their_limits() -> None:
    """-128 * -128 summed over K, and scalars whose products wrap as int32 arithmetic does."""
    import torch

    a = torch.full((65, 1024), -128, dtype=torch.int8, device="cuda")
    b = torch.full((33, 1024), -128, dtype=torch.int8, device="cuda").T
    assert (ac.gemm(a, b) == 128 * 128 * 1024).all()
    c = torch.full((65, 33), 2**31 - 1, dtype=torch.int32, device="cuda")
    d = ac.gemm(a, b, c, alpha=1024, beta=2)
    want = gemm_reference.gemm(host(a), host(b), host(c), alpha=1024, beta=2, out_dtype=D.I32)
    np.testing.assert_array_equal(host(d), want)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_results_are_reproducible(kind: Kind) -> None:
    """The same operands give the same bits, launch after launch."""
    a = fill((200, 1000), kind.dtype, 1)
    b = fill((104, 1000), kind.dtype, 2).T
    first = ac.gemm(a, b, precision=kind.precision)
    for _ in range(5):
        assert_same_bits(ac.gemm(a, b, precision=kind.precision), first)
