"""fp4: what `gemm` and requests take and refuse, which kernels they get, and what these are told.

From the call to the C ABI without a GPU: `tests/helpers/fp4_cases.py`, over kernels that run on the host.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import atomr_cutlass as ac
import fake_cases
import fake_kernels
import fake_pack
import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmEpilogue, GemmLayout, GemmRequest, GemmShape, SmArch, _core
from atomr_cutlass.arrays import fp4, operands
from atomr_cutlass.arrays.scales import VECTOR, pack_fp4, swizzle_scales, swizzled_size, unswizzle_scales
from atomr_cutlass.errors import InvalidOperandError, KernelNotFoundError, UnsupportedError
from atomr_cutlass.generator.families.gemm_sm100 import FP4_SCALES
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import with_scales
from atomr_cutlass.ops.quantize.reference import (
    BlockScaled,
    dequantize_fp4,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
)
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.operation import operation_of
from dlpack_arrays import Array, CudaArray

Values = np.ndarray[Any, Any]

BLACKWELL = (SmArch.SM100, SmArch.SM120)
SCALINGS = ("nvfp4", "mxfp4")
QUANTIZE = {"nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4}

CASES_FILE = "fp4_cases.py"
CASES = fake_cases.names(CASES_FILE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    keys = [key for key in expand("full", [SmArch.SM100]) if key.a is D.F4E2M1 and key.d in (D.BF16, D.F32)]
    pack = fake_kernels.make_pack(folder / "pack.so", keys)
    return fake_cases.outcome(CASES_FILE, fake_pack.make_driver(folder / "driver", major=10), [pack])


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


# ----------------------------------------------------------------------------------------------------------------------
# On the reference backend
# ----------------------------------------------------------------------------------------------------------------------


def _quantized(shape: tuple[int, ...], scaling: str, *, axis: int = -1, seed: int = 0) -> BlockScaled:
    rng = np.random.default_rng((seed, *shape))
    wide = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, (*shape[:-1], 1)))
    return QUANTIZE[scaling](wide, axis=axis)


def _packed(x: BlockScaled, scaling: str) -> tuple[Values, Values]:
    """Rows of K as `ac.quantize` returns them."""
    swizzled = swizzle_scales(x.scale)
    return pack_fp4(x.values), swizzled.view(np.uint8) if scaling == "mxfp4" else swizzled


def _product(a: BlockScaled, b: BlockScaled) -> Values:
    """In float64, of values that were dequantized one by one. B has its K last."""
    wide = [dequantize_fp4(operand).astype(np.float64) for operand in (a, b)]
    product: Values = wide[0] @ wide[1].swapaxes(-1, -2)
    return product


def _gemm(*arrays: Any, **arguments: Any) -> Any:
    return ac.gemm(*arrays, **({"backend": "reference"} | arguments))


_extent = st.integers(1, 140)
_batch = st.sampled_from([(), (1,), (3,), (2, 3)])


@given(_extent, _extent, st.integers(1, 5), st.sampled_from(SCALINGS), _batch, _batch, st.data())
@settings(max_examples=120, deadline=None)
def test_every_host_form_is_the_product_of_what_it_stands_for(
    m: int, n: int, vectors: int, scaling: str, batch_a: tuple[int, ...], batch_b: tuple[int, ...], data: st.DataObject
) -> None:
    k = vectors * VECTOR[fp4.SCALINGS[scaling]]
    if {batch_a, batch_b} == {(3,), (2, 3)}:
        batch_b = (3,)
    a, b = _quantized((*batch_a, m, k), scaling), _quantized((*batch_b, n, k), scaling, seed=1)
    given_ = {}
    for name, operand in (("a", a), ("b", b)):
        packed, swizzled = _packed(operand, scaling)
        values = packed if data.draw(st.booleans()) else operand.values
        scale = swizzled if data.draw(st.booleans()) else operand.scale
        if name == "b":
            values, scale = values.swapaxes(-1, -2), scale if scale is swizzled else scale.swapaxes(-1, -2)
        given_ |= {name: values, f"scale_{name}": scale}
    alpha = data.draw(st.sampled_from([1.0, -0.5, 3.0]))
    got = _gemm(given_.pop("a"), given_.pop("b"), **given_, alpha=alpha, out_dtype=D.F32)
    want = alpha * _product(a, b)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantize_gives_what_gemm_takes(scaling: str) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((96, 64), dtype=np.float32), rng.standard_normal((64, 40), dtype=np.float32)
    q, p = ac.quantize(x, scaling=scaling), ac.quantize(w.T, scaling=scaling)
    assert (q.values.shape, p.values.T.shape) == ((96, 32), (32, 40))
    got = _gemm(q.values, p.values.T, scale_a=q.scales, scale_b=p.scales)
    assert got.dtype == ml_dtypes.bfloat16
    back = [ac.dequantize(array.values, array.scales, scaling=scaling).astype(np.float64) for array in (q, p)]
    np.testing.assert_allclose(got.astype(np.float64), back[0] @ back[1].T, rtol=2**-8, atol=1e-6)


def test_second_level_scales_belong_into_alpha() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((32, 64)) * 1e-4
    second = nvfp4_global_scale(x)
    a = quantize_nvfp4(x, global_scale=second)
    got = _gemm(a.values, a.values.T, scale_a=a.scale, scale_b=a.scale.T, alpha=second * second, out_dtype=D.F32)
    np.testing.assert_allclose(got, _product(a, a), rtol=1e-6, atol=1e-12)


def test_epilogue() -> None:
    a, b = _quantized((33, 64), "nvfp4"), _quantized((7, 64), "nvfp4", seed=1)
    c, bias = np.full((33, 7), 2.0, np.float32), np.arange(7, dtype=np.float32)
    amax = np.zeros(1, np.float32)
    scales = {"scale_a": a.scale, "scale_b": b.scale.T}
    got = _gemm(
        a.values,
        b.values.T,
        c,
        beta=3.0,
        bias=bias,
        activation="relu",
        scale_d=0.5,
        amax=amax,
        out_dtype=D.F32,
        **scales,
    )
    want = np.maximum(_product(a, b) + 6 + bias, 0)
    np.testing.assert_allclose(got, want / 2, rtol=1e-5, atol=1e-5)
    assert amax[0] == np.float32(want.max())
    out = np.full((33, 7), np.nan, np.float16)
    assert _gemm(a.values, b.values.T, out=out, **scales) is out
    np.testing.assert_allclose(out, _product(a, b), rtol=2e-3, atol=1e-2)


def test_frameworks_give_pairs_as_one_element() -> None:
    """PyTorch's float4_e2m1fn_x2: two lanes of four bits; its e8m0 too."""
    a, b = _quantized((20, 64), "mxfp4"), _quantized((9, 64), "mxfp4", seed=1)
    (x, xs), (w, ws) = _packed(a, "mxfp4"), _packed(b, "mxfp4")
    pair = Array(x, dtype=(17, 4), lanes=2)
    view = operands.as_operand(pair)
    assert (view.dtype, view.shape, view.strides) == (operands.BYTE, (20, 32), (32, 1))
    scale = Array(xs, dtype=(14, 8))
    assert operands.to_numpy(operands.as_operand(scale)).dtype == ml_dtypes.float8_e8m0fnu
    got = _gemm(x, Array(w.T, dtype=(17, 4), lanes=2), scale_a=scale, scale_b=ws, out_dtype=D.F32)
    np.testing.assert_allclose(got, _product(a, b), rtol=1e-6, atol=1e-9)
    with pytest.raises(InvalidOperandError, match=r"exports single elements of 4 bits: give fp4 as bytes of two"):
        operands.as_operand(Array(x, dtype=(17, 4)))
    with pytest.raises(InvalidOperandError, match="vector elements"):
        operands.as_operand(Array(x, dtype=(17, 4), lanes=4))
    with pytest.raises(InvalidOperandError, match="vector elements"):
        operands.as_operand(Array(x, dtype=(1, 8), lanes=2))


def test_bytes_through_the_cuda_array_interface() -> None:
    assert operands.as_operand(CudaArray(4096, (3, 16), "|u1")).dtype == operands.BYTE


A = quantize_nvfp4(np.ones((32, 64)))
MX = quantize_mxfp4(np.ones((32, 64)))
BOTH = {"scale_a": A.scale, "scale_b": A.scale.T}
FP8 = np.ones((64, 32), ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("b", "changes", "says"),
    [
        (FP8, {}, "a is e2m1 and b is e4m3: fp4 is multiplied by fp4 only; quantize both alike"),
        (A.values[:, :48].T, {"scale_b": A.scale[:, :3].T}, "K disagrees"),
        (A.values.T, {"scale_a": MX.scale}, "fp4 block scales are ue8m0 in scale_a and ue4m3 in scale_b"),
        (A.values.T, {"scale_a": A.scale[:, :3]}, "scale_a has shape (32, 3); expected (..., 32, 4), or swizzled"),
        (A.values.T, {"scale_b": A.scale}, "scale_b has shape (32, 4); expected (..., 4, 32), or swizzled"),
        (A.values.T, {"scale_a": np.ones(1024, np.uint8)}, "or swizzled (..., 512)"),
        (A.values.T, {"scale_b": None}, "none in scale_b"),
        (pack_fp4(A.values).T, {"scale_b": None}, "b is uint8, which is fp4 packed two to a byte, and scale_b"),
        (pack_fp4(A.values).T, {"scale_b": 2.0}, "integers of 8 bits are int8"),
        (A.values.T, {"precision": "tf32"}, "precision='tf32' is for float32 operands"),
    ],
)  # fmt: skip
def test_what_the_reference_refuses(b: Values, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOperandError, match=re.escape(says)):
        _gemm(A.values, b, **(BOTH | changes))


def test_bytes_are_no_integers() -> None:
    x = np.ones((4, 32), np.uint8)
    with pytest.raises(InvalidOperandError, match="a is uint8, which is fp4 packed two to a byte"):
        _gemm(x, x.T)


@pytest.mark.parametrize("backend", ["prebuilt", "jit"])
def test_without_a_gpu(backend: str) -> None:
    if devices.available():
        pytest.skip("there is a GPU")
    with pytest.raises(ac.DeviceUnavailableError):
        ac.gemm(A.values, A.values.T, **BOTH, backend=backend)


# ----------------------------------------------------------------------------------------------------------------------
# Forms
# ----------------------------------------------------------------------------------------------------------------------


@given(_extent, st.integers(1, 200), st.integers(0, 40), _batch, st.sampled_from("ab"))
def test_elements_and_bytes(rows: int, half_k: int, pad: int, batch: tuple[int, ...], name: str) -> None:
    """What `logical` says of bytes counts elements, and `packed` leads back."""
    array = np.zeros((*batch, rows, half_k + pad), np.uint8)[..., :half_k]
    if name == "b":
        array = array.swapaxes(-1, -2)
    view = _core.Operand(256, array.shape, array.strides, operands.BYTE, operands.CUDA, 0, True)
    spec = fp4.logical(view, name)
    along = fp4.ALONG[name]
    assert (spec.dtype, spec.shape[along], spec.strides[along]) == (D.F4E2M1, 2 * half_k, 1)
    for axis in range(len(spec.shape) + along):
        assert spec.shape[axis] == view.shape[axis]
        assert spec.strides[axis] == 2 * view.strides[axis]
    shape, strides = fp4.packed(spec, name)
    assert shape == view.shape
    assert all(x == y for extent, x, y in zip(shape, strides, view.strides, strict=True) if extent > 1)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_forms_of_the_gpu_and_back(scaling: str) -> None:
    a, b = _quantized((2, 33, 96), scaling), _quantized((17, 96), scaling, seed=1)
    plain = {"a": a.values, "b": b.values.T, "scale_a": a.scale, "scale_b": b.scale.T}
    sent = fp4.gpu_forms(plain)
    vector = VECTOR[fp4.SCALINGS[scaling]]
    assert (sent["a"].shape, sent["b"].shape) == ((2, 33, 48), (48, 17))
    assert sent["scale_a"].shape == (2, swizzled_size(33, 96 // vector))
    np.testing.assert_array_equal(
        unswizzle_scales(sent["scale_b"], 17, 96 // vector).view(np.uint8), b.scale.view(np.uint8)
    )
    back = fp4.plain_forms(sent)
    for name, array in plain.items():
        np.testing.assert_array_equal(back[name].view(np.uint8), array.view(np.uint8), err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------------------------------------


def _request(m: int = 256, n: int = 512, k: int = 1024, batch: int = 1, **changes: Any) -> GemmRequest:
    arguments = {"dtype": D.F4E2M1, "scaling": "nvfp4", "arch": SmArch.SM100, "layout_b": GemmLayout.COL_MAJOR}
    return GemmRequest(GemmShape(m, n, k, batch), **(arguments | changes))


def test_fp4_is_of_blackwell() -> None:
    for arch in SmArch:
        assert ac.is_fp4_supported(arch) is (arch in BLACKWELL)
        assert ac.is_supported_for(D.F4E2M1, arch) is (arch in BLACKWELL)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_problem_and_scales_of_a_request(scaling: str) -> None:
    request = _request(scaling=scaling)
    scales = request.scales()
    problem = with_scales(request.problem(0), scales)
    vector = {"nvfp4": 16, "mxfp4": 32}[scaling]
    assert (problem.m, problem.n, problem.k) == (256, 512, 1024)
    assert (problem.a.strides, problem.b.strides) == ((1024, 1), (1, 1024))
    kind = fp4.SCALINGS[scaling].value
    assert (problem.epilogue, problem.scale_type, problem.scale_granularity) == ("lc", kind, FP4_SCALES[kind])
    assert scales.a is not None
    assert scales.a.shape == (swizzled_size(256, 1024 // vector),)
    slots = operation_of(request).operands(request)
    found = {slot.name: (slot.specs[0].shape, slot.specs[0].strides, slot.element) for slot in slots}
    of_scales = None if scaling == "nvfp4" else operands.BYTE
    assert found == {
        "a": ((256, 512), (512, 1), operands.BYTE),
        "b": ((512, 512), (1, 512), operands.BYTE),
        "scale_a": (scales.a.shape, (1,), of_scales),
        "scale_b": ((swizzled_size(512, 1024 // vector),), (1,), of_scales),
        "out": ((256, 512), (512, 1), None),
    }
    batched = _request(batch=3, scaling=scaling).scales()
    assert batched is not None
    assert batched.b is not None
    assert batched.b.shape == (3, swizzled_size(512, 1024 // vector))


def test_plan_keys_tell_the_kinds_apart() -> None:
    keys = {_request(**changes).plan_key() for changes in ({}, {"scaling": "mxfp4"}, {"scaling": None}, {"n": 520})}
    assert len(keys) == 4


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("out_dtype", [None, D.F16, D.F32])
@pytest.mark.parametrize("layout_c", list(GemmLayout))
def test_a_request_is_rendered(arch: SmArch, scaling: str, out_dtype: D | None, layout_c: GemmLayout) -> None:
    request = _request(
        arch=arch, scaling=scaling, out_dtype=out_dtype, layout_c=layout_c, epilogue=GemmEpilogue(2.0, 1.0)
    )
    source, name = request.render_cu()
    kind = fp4.SCALINGS[scaling]
    assert f"VectorScales<{kind.cpp}, {VECTOR[kind]}>" in source
    assert {SmArch.SM100: "gemm_sm100_fp4.h", SmArch.SM120: "gemm_sm120.h"}[arch] in source
    assert name.startswith(f"cutlass3x_{arch.name.lower()}_")
    assert f"_{(out_dtype or D.BF16).value}_" in name
    assert name == ac.explain(request).kernel


def test_large_problems_get_large_tiles() -> None:
    def tile(m: int) -> tuple[int, int, int]:
        request = _request(m, 8192, 8192)
        scales = request.scales()
        assert scales is not None
        best = select.best_cell(GemmSearch(with_scales(request.problem(0), scales), devices.imagined(SmArch.SM100)))
        assert best is not None
        return best.key.tile

    assert [tile(m) for m in (16, 8192)] == [(128, 128, 256), (256, 256, 256)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arch": SmArch.SM90A}, "no kernel multiplies e2m1 on SM90A; valid: SM100, SM120"),
        ({"arch": SmArch.SM89}, "no kernel multiplies e2m1 on SM89; valid: SM100, SM120"),
        ({"scaling": "block"}, "scaling is 'block': fp4 kernels multiply with scaling 'nvfp4' or 'mxfp4'"),
        ({"scaling": "tensor"}, "scaling is 'tensor': fp4 kernels multiply with scaling 'nvfp4' or 'mxfp4'"),
        ({"quantized": True}, "quantized: fp4 kernels multiply with"),
        ({"dtype": D.F8E4M3}, "scaling 'nvfp4' is fp4's: dtype is then F4E2M1, not F8E4M3"),
        ({"dtype": D.BF16}, "scaling 'nvfp4' is fp4's"),
        ({"dtype_b": D.F8E4M3}, "no kernel multiplies e2m1 by e4m3"),
        ({"out_dtype": D.F8E4M3}, "e2m1 operands give bf16, f16, f32, not e4m3"),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        _request(**changes)


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scaling": None}, "fp4 is multiplied with block scales: scaling is 'nvfp4' or 'mxfp4'"),
        ({"layout_b": GemmLayout.ROW_MAJOR}, "fp4 is packed and read along K"),
        ({"layout_a": GemmLayout.COL_MAJOR}, "fp4 is packed and read along K"),
        ({"k": 48}, "fp4 kernels read 32 elements (16 bytes) at once: K (here 48)"),
        ({"k": 33}, "fp4 kernels read 32 elements (16 bytes) at once: K (here 33)"),
        ({"n": 500}, "fp4 kernels write 16 bytes at once: rows of D (and C)"),
        ({"k": 0}, "K is 0: fp4 kernels have nothing to multiply"),
    ],
)
def test_requests_that_no_kernel_serves(arch: SmArch, changes: dict[str, Any], says: str) -> None:
    request = _request(arch=arch, **changes)
    assert says in ac.explain(request).reason
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        request.render_cu()


def test_older_gpus_are_told_what_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM80, SmArch.SM90A]))
    request = _request(arch=None)
    scales = request.scales()
    problem = with_scales(request.problem(0), scales)
    for device, arch in ((fake_table.H200, "sm_90a"), (fake_table.A100, "sm_80"), (fake_table.ADA, "sm_89")):
        with pytest.raises(UnsupportedError, match=f"no kernel multiplies fp4 on {arch}: .*dequantize"):
            select.choose(GemmSearch(problem, device), backend="auto")


def test_a_table_without_the_kernel_names_the_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fake_table.rows_of("default", [SmArch.SM100])
    fake_table.install(monkeypatch, rows)
    device = devices.imagined(SmArch.SM100)
    for scaling, built in (("nvfp4", True), ("mxfp4", False)):
        request = _request(scaling=scaling)
        scales = request.scales()
        assert scales is not None
        problem = with_scales(request.problem(0), scales)
        if built:
            assert select.choose(GemmSearch(problem, device), backend="prebuilt").key.scale_type == "ue4m3"
        else:
            with pytest.raises(KernelNotFoundError, match="PRESET=full -DATOMR_CUTLASS_ARCHS=100a"):
                select.choose(GemmSearch(problem, device), backend="prebuilt")
