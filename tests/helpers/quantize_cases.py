"""Cases that `test_quantize.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Quantization, and the helpers of other operations: sums of slices and transposed copies.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.arrays import numerics
from atomr_cutlass.arrays.layouts import relaid
from atomr_cutlass.generator.families.cast import cast
from atomr_cutlass.generator.families.transpose import transpose
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.quantize.function import SCALINGS
from fake_gpu import fetch, place

ARCH = SmArch.SM90A
_FULL = expand("full", [ARCH])
_WGRAD = next(key for key in _FULL if (key.op, key.math, key.group_mode) == ("conv2d_wgrad", "ieee", ""))
_TF32 = next(
    key
    for key in _FULL
    if (key.op, key.generation, key.math, key.epilogue) == ("gemm", "sm90", "tf32", "lc")
    and key.layout_a + key.layout_b + key.layout_d == "rcr"
)
KEYS = [key for key in _FULL if key.op in ("quantize", "dequantize")]
KEYS += [_WGRAD, _TF32, cast(ARCH, D.F32, D.F32), transpose(ARCH, D.F32)]

random = np.random.default_rng(17)


def case_values_and_scales_are_those_of_the_host() -> None:
    x = random.standard_normal((130, 416)).astype(numerics.numpy_dtype(D.BF16))
    for scaling in SCALINGS:
        second = 0.125 if scaling == "nvfp4" else 1.0
        for narrow in (D.F8E4M3, D.F8E5M2):
            how: dict[str, Any] = {"scaling": scaling, "global_scale": second}
            want, got = ac.quantize(x, narrow, **how), ac.quantize(place(x), narrow, **how)
            assert fetch(got.scales).tobytes() == want.scales.tobytes(), (scaling, narrow)
            # Quotients are rounded once here.
            assert fetch(got.values).tobytes() == want.values.tobytes(), (scaling, narrow)
            back = ac.dequantize(got.values, got.scales, out_dtype=D.BF16, **how)
            wide = ac.dequantize(want.values, want.scales, out_dtype=D.BF16, **how)
            np.testing.assert_array_equal(fetch(back), wide)


def case_results_are_written_in_place() -> None:
    x = random.standard_normal((130, 416)).astype(numerics.numpy_dtype(D.BF16))
    for scaling in SCALINGS:
        second = 0.125 if scaling == "nvfp4" else 1.0
        how: dict[str, Any] = {"scaling": scaling, "global_scale": second}
        want = ac.quantize(x, **how)
        back = ac.dequantize(*want[:2], out_dtype=D.BF16, **how)
        given = place(x)
        out = ac.quantize(place(x[::-1].copy()), **how)[:2]
        wide = place(np.zeros(x.shape, x.dtype))
        with fake_cases.parsed() as made:
            for kind in (tuple, tuple, list):
                got = ac.quantize(given, **how, out=kind(out))
                assert got[0] is out[0]
                assert got[1] is out[1]
                assert got.global_scale == second
                assert fetch(out[1]).tobytes() == want.scales.tobytes(), scaling
                assert fetch(out[0]).tobytes() == want.values.tobytes(), scaling
                assert ac.dequantize(*out, out=wide, **how) is wide
                np.testing.assert_array_equal(fetch(wide), back)
            assert len(made) == 2
        over = _core.Operand(given.pointer, out[0].shape, None, out[0].dtype, 2, 0, False, given)
        with pytest.raises(ac.InvalidOperandError, match=r"out\[0\] overlaps x"):
            ac.quantize(given, **how, out=(over, out[1]))


def case_results_with_gaps_are_refused() -> None:
    x, scales = place(np.ones((16, 32), np.float32)), place(np.ones((16, 1), np.float32))
    values = place(np.zeros((16, 64), numerics.numpy_dtype(D.F8E4M3)))
    with pytest.raises(ac.InvalidOperandError, match=r"out\[0\] has strides \(64, 1\); expected \(32, 1\), with"):
        ac.quantize(x, scaling="row", out=(relaid(values, [16, 32], [64, 1]), scales))
    dense, wide = place(np.zeros((16, 32), numerics.numpy_dtype(D.F8E4M3))), relaid(x, [16, 32], [1, 16])
    with pytest.raises(ac.InvalidOperandError, match=r"out has strides \(1, 16\); expected \(32, 1\), without gaps"):
        ac.dequantize(dense, scales, scaling="row", out=wide)


def case_nothing_is_written_but_scales_of_1() -> None:
    for scaling in ("tensor", "row", "block", "tile"):
        want = ac.quantize(np.zeros((5, 0), np.float32), scaling=scaling)
        out = tuple(place(np.zeros_like(array)) for array in want[:2])
        ac.quantize(place(np.zeros((5, 0), np.float32)), scaling=scaling, out=out)
        np.testing.assert_array_equal(fetch(out[1]), want.scales)


def case_rows_may_be_apart() -> None:
    x = random.standard_normal((64, 256)).astype(numerics.numpy_dtype(D.BF16))
    got = ac.quantize(relaid(place(x), [64, 128], [256, 1]), scaling="row")
    assert fetch(got.values).tobytes() == ac.quantize(x[:, :128], scaling="row").values.tobytes()


def case_slices_of_k_are_added_up() -> None:
    dy, x = (random.integers(-2, 3, (1, 48, 48, 4)).astype(np.float32) for _ in range(2))
    request = ac.ConvWgradRequest(ac.ConvShape.nhwc(1, 48, 48, 4, 4, 3, 3, padding=1), dtype=D.F32)
    assert "cast" in "".join(ac.plan(request).kernel_names)
    got = ac.conv2d_wgrad(place(dy), place(x), (4, 3, 3, 4), padding=1)
    np.testing.assert_array_equal(fetch(got), ac.conv2d_wgrad(dy, x, (4, 3, 3, 4), padding=1, backend="reference"))


def case_products_of_slices_are_added_up() -> None:
    m, n, k = 16, 24, 4096
    a, b = random.integers(-2, 3, (m, k)).astype(np.float32), random.integers(-2, 3, (n, k)).astype(np.float32)
    c = random.integers(-9, 9, (m, n)).astype(np.float32)
    along_k = relaid(place(b), [k, n], [1, k])
    request = ac.GemmRequest(ac.GemmShape(m, n, k), dtype=D.TF32, layout_b=ac.GemmLayout.COL_MAJOR)
    assert "cast" in ac.plan(request).kernel_names[-1]
    want = a @ b.T
    np.testing.assert_array_equal(fetch(ac.gemm(place(a), along_k, precision="tf32")), want)
    got = ac.gemm(place(a), along_k, place(c), alpha=0.5, beta=-2.0, precision="tf32")
    np.testing.assert_array_equal(fetch(got), 0.5 * want - 2 * c)
    # An operand that has to be copied besides.
    np.testing.assert_array_equal(fetch(ac.gemm(place(a), place(b.T.copy()), precision="tf32")), want)


def case_rows_of_b_are_copied() -> None:
    a, b = (random.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 20, 24), (3, 24, 28)))
    for batches in (slice(0, 3), 0):
        got = ac.gemm(place(a[batches]), place(b[batches]), precision="tf32")
        np.testing.assert_array_equal(fetch(got), a[batches] @ b[batches])
    request = ac.GemmRequest(ac.GemmShape(20, 28, 24), dtype=D.TF32)
    assert "transpose" in ac.plan(request).kernel_names[0]


def case_kernels_that_would_be_compiled_are_refused_in_a_capture() -> None:
    x = place(np.ones((16, 32), np.float32))
    scales, values = place(np.ones(1, np.float32)), place(np.zeros((16, 32), numerics.numpy_dtype(D.F8E4M3)))
    for call in (
        functools.partial(ac.quantize, x, stream=777, jit="auto"),
        functools.partial(ac.dequantize, values, scales, stream=777, jit="auto"),
    ):
        with pytest.raises(ac.UnsupportedError, match=r"quantize_.* is compiled at run time, and such plans cannot"):
            call()


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
