"""Quantization on the GPU: against NumPy's, which is rounded once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.quantize import function as quantized
from atomr_cutlass.ops.quantize import reference as quantization
from atomr_cutlass.pipeline.plan import Steps
from atomr_cutlass.pipeline.search import Candidate, ExactSearch
from gpu_matrices import torch_dtype

pytestmark = pytest.mark.gpu

SHAPES = ((1, 32), (7, 64), (128, 128), (130, 416), (257, 1024), (3, 8192))
FP8_SCALINGS = ("tensor", "row", "block", "tile")


@pytest.fixture(autouse=True)
def _compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    # The helpers of bf16 are in `full` only, the others in no preset.
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")


def _matrix(torch: ModuleType, shape: tuple[int, int], dtype: str, seed: int) -> Any:
    torch.manual_seed(seed)
    rows = torch.exp2(torch.randint(-9, 9, (shape[0], 1), device="cuda").float())
    made = (torch.randn(shape, device="cuda") * rows).to(getattr(torch, dtype))
    if shape[0] > 4:
        made[1] = 0
    return made


def _host(array: Any) -> np.ndarray[Any, Any]:
    return operands.download(operands.as_operand(array))


def _bytes(array: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(_host(array)).view(np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", FP8_SCALINGS)
@pytest.mark.parametrize("narrow", [D.F8E4M3, D.F8E5M2])
@pytest.mark.parametrize("wide", ["bfloat16", "float32"])
def test_fp8_is_within_one_step_of_numpy(
    torch: ModuleType, shape: tuple[int, int], scaling: str, narrow: D, wide: str
) -> None:
    x = _matrix(torch, shape, wide, 3)
    made = ac.quantize(x, narrow, scaling=scaling)
    host = _host(x)
    values, scales, _ = ac.quantize(host, narrow, scaling=scaling)
    np.testing.assert_array_equal(_host(made.scales), scales)
    got, expected = _host(made.values).view(np.uint8).astype(int), values.view(np.uint8).astype(int)
    # Neighbours in an fp8 format are neighbours as bytes.
    assert np.abs(got - expected).max() <= 1
    assert (got != expected).mean() < 0.004
    back = ac.dequantize(made.values, made.scales, scaling=scaling)
    again = ac.dequantize(_host(made.values), scales, scaling=scaling)
    np.testing.assert_allclose(_host(back), again, rtol=2**-23)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
def test_fp4_has_the_bits_of_numpy(torch: ModuleType, shape: tuple[int, int], scaling: str, wide: str) -> None:
    x = _matrix(torch, shape, wide, 5)
    made = ac.quantize(x, scaling=scaling)
    values, scales, _ = ac.quantize(_host(x), scaling=scaling)
    np.testing.assert_array_equal(made.values.cpu().numpy(), values)
    np.testing.assert_array_equal(made.scales.view(torch.uint8).cpu().numpy(), scales.view(np.uint8))
    back = ac.dequantize(made.values, made.scales, scaling=scaling, out_dtype=D.BF16)
    again = ac.dequantize(values, scales, scaling=scaling, out_dtype=D.BF16)
    np.testing.assert_array_equal(numerics.to_float64(_host(back)), numerics.to_float64(again))


def test_the_second_level_scale_of_nvfp4(torch: ModuleType) -> None:
    """Two quotients are rounded, and NumPy rounds one: a scale may be its neighbour."""
    x = _matrix(torch, (130, 416), "bfloat16", 6)
    second = quantization.nvfp4_global_scale(_host(x))
    made = ac.quantize(x, scaling="nvfp4", global_scale=second)
    assert made.global_scale == second
    _, scales, _ = ac.quantize(_host(x), scaling="nvfp4", global_scale=second)
    steps = np.abs(made.scales.view(torch.uint8).cpu().numpy().astype(int) - scales.view(np.uint8))
    assert steps.max() <= 1
    assert (steps != 0).mean() < 0.01
    back = ac.dequantize(made.values, made.scales, scaling="nvfp4", global_scale=second)
    values, scales = made.values.cpu().numpy(), _host(made.scales)
    again = ac.dequantize(values, scales, scaling="nvfp4", global_scale=second)
    np.testing.assert_allclose(_host(back), again, rtol=2**-22)


@pytest.mark.parametrize(("scaling", "shape"), [("tensor", (0, 64)), ("row", (5, 0)), ("block", (5, 0))])
def test_what_has_no_elements_has_scales_of_1(torch: ModuleType, scaling: str, shape: tuple[int, int]) -> None:
    x = torch.empty(shape, device="cuda")
    torch.full((1024,), float("nan"), device="cuda")  # what memory that is used again would hold
    made = ac.quantize(x, scaling=scaling)
    assert bool((made.scales == 1).all())
    assert ac.dequantize(made.values, made.scales, scaling=scaling).shape == shape
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ac.quantize(x, scaling=scaling)
    captured.scales.fill_(9)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((captured.scales == 1).all())


@pytest.mark.parametrize("key", every_cell.keys("cast"), ids=lambda key: key.name)
def test_every_cast(torch: ModuleType, key: KernelKey) -> None:
    """Each kernel of the table; with ATOMR_CUTLASS_TEST_JIT those of the matrix, compiled. float32 adds slices up."""
    info = every_cell.row_of(key)
    count, slices = 1000, 3 if key.a is D.F32 else 1
    torch.manual_seed(7)
    x = (torch.randint(-20000, 20000, (slices, count), device="cuda") / 64).to(torch_dtype(key.a))
    out = torch.zeros(count, device="cuda", dtype=torch_dtype(key.d))
    steps = Steps(0)
    a = steps.slot("x", (slices, count), None, key.a.dlpack)
    d = steps.slot("out", (count,), None, key.d.dlpack, role="output")
    args = {"count": count, "slices": slices, "slice_stride": count, "a": a, "d": d, "alpha": 1.0}
    steps.launch(Candidate(key, info, 0.0, None), args)
    steps.plan(like=x)(x, out)
    expected = numerics.saturating_cast(numerics.to_float64(_host(x)).sum(0), key.d)
    np.testing.assert_array_equal(numerics.to_float64(_host(out)), numerics.to_float64(expected))
    every_cell.right(key, info, f"{count} elements")


QUANTIZED = [(D.F8E4M3, scaling) for scaling in FP8_SCALINGS] + [(D.F8E5M2, scaling) for scaling in FP8_SCALINGS]
QUANTIZED += [(D.F4E2M1, scaling) for scaling in ("nvfp4", "mxfp4")]


@pytest.mark.usefixtures("without_kept")
@pytest.mark.parametrize("arch", every_cell.ARCHS, ids=lambda arch: arch.value)
@pytest.mark.parametrize(("narrow", "scaling"), QUANTIZED)
def test_every_cell(
    torch: ModuleType, arch: ac.SmArch, narrow: D, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel of the table; with ATOMR_CUTLASS_TEST_JIT those of the matrix, compiled."""
    launched: list[Candidate[None]] = []

    def exactly(search: ExactSearch, **_named: Any) -> Candidate[None]:
        key = search.make(arch)
        launched.append(Candidate(key, every_cell.row_of(key), 0.0, None))
        return launched[-1]

    monkeypatch.setattr(quantized.select, "choose", exactly)
    x = _matrix(torch, (130, 416), "bfloat16", 3)
    made = ac.quantize(x, narrow, scaling=scaling)
    values, scales, _ = ac.quantize(_host(x), narrow, scaling=scaling)
    np.testing.assert_array_equal(_bytes(made.scales), np.ascontiguousarray(scales).view(np.uint8))
    got, expected = _bytes(made.values).astype(int), np.ascontiguousarray(values).view(np.uint8).astype(int)
    if narrow is D.F4E2M1:
        np.testing.assert_array_equal(got, expected)
    else:  # neighbours in an fp8 format are neighbours as bytes
        assert np.abs(got - expected).max() <= 1
        assert (got != expected).mean() < 0.004
    back = ac.dequantize(made.values, made.scales, scaling=scaling, out_dtype=D.BF16)
    host = _bytes(made.values) if narrow is D.F4E2M1 else _host(made.values)
    again = ac.dequantize(host, scales, scaling=scaling, out_dtype=D.BF16)
    np.testing.assert_allclose(numerics.to_float64(_host(back)), numerics.to_float64(again), rtol=2**-8)
    cells = {*every_cell.keys("quantize", "dequantize")}
    assert {launch.key.op for launch in launched} == {"quantize", "dequantize"}
    for launch in launched:
        if launch.key in cells:
            every_cell.right(launch.key, launch.info, "130 x 416 elements")


def test_rows_may_lie_further_apart_and_specials_are_converted(torch: ModuleType) -> None:
    whole = _matrix(torch, (40, 512), "bfloat16", 9)
    x = whole[:, 128:384]
    x[3, 5], x[4, 6], x[5, 7] = float("inf"), float("-inf"), float("nan")
    made = ac.quantize(x, D.F8E4M3, scaling="row")
    _, scales, _ = ac.quantize(_host(x), scaling="row")
    np.testing.assert_array_equal(_host(made.scales), scales)
    got = _host(made.values).astype(np.float64)
    assert (got[3, 5], got[4, 6]) == (448.0, -448.0)
    assert np.isnan(got[5, 7])


def test_quantized_operands_multiply(torch: ModuleType) -> None:
    a, b = _matrix(torch, (256, 512), "bfloat16", 1), _matrix(torch, (384, 512), "bfloat16", 2).t()
    for scaling_a, scaling_b in (("tensor", "tensor"), ("row", "row"), ("block", "tile")):
        qa, qb = ac.quantize(a, scaling=scaling_a), ac.quantize(b.t(), scaling=scaling_b)
        scale_b = qb.scales if scaling_b == "tensor" else qb.scales.t()
        got = ac.gemm(qa.values, qb.values.t(), scale_a=qa.scales, scale_b=scale_b, out_dtype=D.F32)
        wide_a = ac.dequantize(qa.values, qa.scales, scaling=scaling_a).double()
        wide_b = ac.dequantize(qb.values, qb.scales, scaling=scaling_b).double().t()
        error = (got.double() - wide_a @ wide_b).abs()
        assert bool((error <= 2.0**-7 * (wide_a.abs() @ wide_b.abs())).all())


def test_bad_input_is_refused(torch: ModuleType) -> None:
    x = torch.randn(8, 40, device="cuda")
    with pytest.raises(ac.InvalidOperandError, match="unknown scaling 'rows'"):
        ac.quantize(x, scaling="rows")
    with pytest.raises(ac.InvalidOperandError, match="x has 40 columns; nvfp4 shares a scale among 16"):
        ac.quantize(x, scaling="nvfp4")
    with pytest.raises(ac.InvalidOperandError, match="expected contiguous rows"):
        ac.quantize(x.t())
    with pytest.raises(ac.InvalidOperandError, match="x is f64; expected f16, bf16, f32"):
        ac.quantize(x.double())
    narrow, scale = x.to(torch.float8_e4m3fn), torch.ones(1, device="cuda")
    with pytest.raises(ac.InvalidOperandError, match=r"scales has shape \(3,\); expected \(1,\)"):
        ac.dequantize(narrow, torch.ones(3, device="cuda"))
    with pytest.raises(ac.InvalidOperandError, match="scales has elements of f16; expected f32"):
        ac.dequantize(narrow, scale.half())
    with pytest.raises(ac.InvalidOperandError, match="values is on cuda:0 and scales on the CPU"):
        ac.dequantize(narrow, scale.cpu())
    for second in (0.0, float("nan"), -1.0):
        with pytest.raises(ac.InvalidOperandError, match="expected a positive number in float32's range"):
            ac.quantize(x[:, :32], scaling="nvfp4", global_scale=second)
    with pytest.raises(ac.InvalidOperandError, match="only nvfp4 has one"):
        ac.quantize(x, global_scale=2.0)
    with pytest.raises(ac.InvalidOperandError, match="only nvfp4 has one"):
        ac.dequantize(narrow, scale, global_scale=2.0)
    with pytest.raises(ac.InvalidOperandError, match="unknown backend 'nonsense'"):
        ac.quantize(x[:0], backend="nonsense")
