"""`gated_gemm` on the GPU against the reference: tiles' edges, scales, layouts and the memory around the result."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import reference
from atomr_cutlass.arrays import operands
from atomr_cutlass.errors import UnsupportedError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.generator.matrix import with_epilogue
from atomr_cutlass.generator.trees import NAMED
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.operation import LETTERS
from atomr_cutlass.pipeline import devices, probe, select, verify
from atomr_cutlass.pipeline.operation import operation_of
from gpu_matrices import Guarded, placed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]

SHAPES = ((256, 512, 128), (77, 96, 64), (1, 64, 64), (300, 1040, 256), (130, 34, 64))
NAN = np.nan


@pytest.fixture(autouse=True)
def _compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has few gated kernels."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")


@pytest.fixture(autouse=True)
def hopper() -> None:
    if devices.get(0).capability != (9, 0):
        pytest.skip("gated kernels are for sm_90a")


def _fp8(shape: tuple[int, int], seed: int):
    import torch

    random = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=random).to(torch.float8_e4m3fn)


def _host(tensor) -> np.ndarray:
    return operands.download(operands.as_operand(tensor))


def _check(got: np.ndarray, a, b, activation: str, result: D, operand: D, **scales) -> None:
    k = a.shape[-1]
    first, second = _host(a), _host(b)
    product = gemm_reference.gemm(first, second, out_dtype=D.F64, **scales)
    limits = reference.tolerance(operand, D.F32, k)
    error = limits.atol_factor * gemm_reference.absolute_product(first, second, **scales)
    function = reference.ACTIVATIONS[activation]
    with np.errstate(all="ignore"):
        gate, other = product[..., 0::2], product[..., 1::2]
        want = function(gate) * other
        around = [function(gate + sign * error[..., 0::2]) for sign in (-1.0, 1.0)]
        spread = np.maximum(*(np.abs(value - function(gate)) for value in around)) + 2.0**-14 * np.abs(gate)
        bound = spread * (np.abs(other) + error[..., 1::2]) + np.abs(function(gate)) * error[..., 1::2]
    rounding = 2.0 ** {D.BF16: -8, D.F16: -10, D.F32: -20, D.F8E4M3: -3}[result]
    floor = {D.F8E4M3: 2.0**-9, D.F16: 2.0**-23}.get(result, 1e-30)
    limit = 448.0 if result is D.F8E4M3 else np.inf
    wrong = ~(np.abs(got.astype(np.float64) - np.clip(want, -limit, limit)) <= bound + rounding * np.abs(want) + floor)
    assert not wrong.any(), (np.argwhere(wrong)[:5], got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("operand", "layouts"), [(D.BF16, "rc"), (D.F16, "rr"), (D.F8E4M3, "rc")], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_products(shape: tuple[int, int, int], operand: D, layouts: str, activation: str) -> None:
    m, n, k = shape
    if layouts == "rr" and n % 8:
        n += 8 - n % 8
    if operand is D.F8E4M3:
        a, b = _fp8((m, k), 1), _fp8((n, k), 2).t()
    else:
        a = placed((m, k), operand, 1, layout=layouts[0])
        b = placed((k, n), operand, 2, layout=layouts[1])
    result = D.BF16 if operand is D.F8E4M3 else operand
    out = Guarded((m, n // 2), result)
    assert ac.gated_gemm(a, b, activation=activation, out=out.view) is out.view
    out.assert_guards()
    _check(_host(out.view), a, b, activation, result, operand)


@pytest.mark.parametrize("result", [D.BF16, D.F8E4M3], ids=str)
@pytest.mark.parametrize("form", ["tensor", "vector"])
def test_scales(torch, result: D, form: str) -> None:
    m, n, k = 200, 272, 128
    a, b = _fp8((m, k), 1), _fp8((n, k), 2).t()
    shapes = {"tensor": ((1,), (1,)), "vector": ((m, 1), (1, n))}[form]
    scale_a, scale_b = (torch.exp2(torch.randint(-3, 0, shape, device="cuda").float()) for shape in shapes)
    got = ac.gated_gemm(a, b, out_dtype=result, scale_a=scale_a, scale_b=scale_b)
    scales = {"scale_a": scale_a.cpu().numpy(), "scale_b": scale_b.cpu().numpy()}
    _check(_host(got), a, b, "silu", result, D.F8E4M3, **scales)


@pytest.mark.parametrize(
    ("operand", "layouts", "ranks"),
    [(D.BF16, "rc", 4), (D.BF16, "rr", 8), (D.F16, "rc", 1), (D.F8E4M3, "rc", 4)],
    ids=str,
)
def test_few_rows(operand: D, layouts: str, ranks: int) -> None:
    """A third of the ways in which a kernel for few rows divides the product among thread blocks, and batches."""
    scaled = operand is D.F8E4M3
    result = D.BF16 if scaled else operand
    plain = gemm_few_sm90.cell(operand, layouts, ranks, d=result, epilogue=SCALED if scaled else LINEAR)
    key = with_epilogue(plain, NAMED["gated_silu"](plain)[0], result)
    for m, n, k, batch in ((1, 4112, 272, 1), (37, 1040, 1168, 1), (9, 208, 144, 5)):
        request = ac.GatedGemmRequest(
            ac.GemmShape(m, n, k, batch), dtype=operand, layout_b=LETTERS[layouts[1]],
            scaling="vector" if scaled else None,
        )  # fmt: skip
        operation, candidate = operation_of(request), select.candidate_of(request.search(devices.get(0)), key)
        arrays = operation.random_arrays(request, np.random.default_rng(m))
        uploaded = probe.uploaded(request, arrays, 0)
        for share, width in itertools.product(gemm_few_sm90.shares(key), gemm_few_sm90.widths(key, m)[::3]):
            made = operation.plan(request, 0, candidate=replace(candidate, swizzle=share, width=width))
            made.request = request
            check = probe.checked(made, arrays, uploaded)
            assert (made.kernel_name, check.mismatches, check.differences) == (key.name, 0, []), (m, n, share, width)


def test_other_arrays_and_batches(torch) -> None:
    w = torch.randn(192, 64, device="cuda", dtype=torch.bfloat16)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 40, 64, device="cuda", dtype=torch.bfloat16)
        got = ac.gated_gemm(x, w.t())
        product = x.float() @ w.t().float()
        want = torch.nn.functional.silu(product[..., 0::2]) * product[..., 1::2]
        assert got.shape == (3, 40, 96)
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


def test_is_pytorchs_swiglu(torch) -> None:
    gate, up = (torch.randn(96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(50, 64, device="cuda", dtype=torch.bfloat16)
    got = ac.gated_gemm(x, ac.interleave(gate, up).t())
    want = torch.nn.functional.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t())
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("operand", "scaling"), [(D.BF16, None), (D.F8E4M3, None), (D.F8E4M3, "vector")], ids=str)
def test_requests_are_run_and_checked(operand: D, scaling: str | None, activation: str, batch: int) -> None:
    request = ac.GatedGemmRequest(
        ac.GemmShape(200, 272, 256, batch), dtype=operand, layout_b=ac.GemmLayout.COL_MAJOR, scaling=scaling,
        quantized=scaling is not None, epilogue=ac.GemmEpilogue(0.25, activation=activation),
    )  # fmt: skip
    result = verify.run(request)
    assert result.ok, result


def test_a_bound_weight_is_refitted(torch) -> None:
    x, *weights = (torch.randn(96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    request = ac.GatedGemmRequest(ac.GemmShape(96, 96, 64), dtype=D.BF16, layout_b=ac.GemmLayout.COL_MAJOR, binding="w")
    first, second = (ac.gated_gemm(x, w.t()) for w in weights)
    actor = ac.CutlassActor(4)
    assert torch.equal(actor.handle(ac.CutlassMsg.GatedGemm(request, {"a": x, "b": weights[0].t()})), first)
    actor.handle(ac.CutlassMsg.Refit(ac.RefitMsg(request.plan_key(), weights[1].t())))
    assert torch.equal(actor.handle(ac.CutlassMsg.GatedGemm(request, {"a": x})), second)


def test_what_no_kernel_serves() -> None:
    x, w = _fp8((8, 57), 1), _fp8((16, 57), 2)  # rows of 57 bytes: TMA wants multiples of 16
    with pytest.raises(UnsupportedError, match="no kernel of the matrix serves"):
        ac.gated_gemm(x, w.t())


def test_operands_of_odd_k_are_copied() -> None:
    a, b = placed((40, 57), D.BF16, 1), placed((57, 528), D.BF16, 2)
    out = Guarded((40, 264), D.BF16)
    ac.gated_gemm(a, b, out=out.view)
    out.assert_guards()
    _check(_host(out.view), a, b, "silu", D.BF16, D.BF16)
