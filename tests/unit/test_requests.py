"""Requests: what they take, what they default to, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmEpilogue, GemmLayout, GemmRequest, GemmShape, SmArch
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.matrix import GEMM_ARCHS, is_supported_for
from atomr_cutlass.requests import default_out_dtype, math_mode

SHAPE = GemmShape(8, 16, 32)


def test_a_request_states_its_defaults() -> None:
    request = GemmRequest(SHAPE, dtype=D.BF16)
    assert (request.shape.batch, request.arch, request.precision, request.out_dtype) == (1, None, None, None)
    assert request.layout_a is request.layout_b is request.layout_c is GemmLayout.ROW_MAJOR
    assert request.epilogue == GemmEpilogue(alpha=1.0, beta=0.0, bias=False, activation=None)
    assert request.result_dtype is D.BF16
    assert request.math == "default"


def test_requests_are_values() -> None:
    first, second = (GemmRequest(GemmShape(8, 16, 32), dtype=D.F16, arch=SmArch.SM80) for _ in range(2))
    assert first == second
    assert len({first, second}) == 1
    with pytest.raises(AttributeError):
        first.dtype = D.BF16  # type: ignore[misc]


@pytest.mark.parametrize("name", ["m", "n", "k", "batch"])
@pytest.mark.parametrize("value", [-1, 2**31, 1.0, "8", True, None])
def test_extents_are_small_non_negative_integers(name: str, value: Any) -> None:
    extents = {"m": 1, "n": 1, "k": 1, "batch": 1} | {name: value}
    with pytest.raises(InvalidOperandError, match=rf"GemmShape\.{name} is .*; expected an integer from 0"):
        GemmShape(**extents)


def test_extents_of_zero_and_the_largest_are_taken() -> None:
    assert GemmShape(0, 0, 0, 0) == GemmShape(m=0, n=0, k=0, batch=0)
    assert GemmShape(2**31 - 1, 1, 1).m == 2**31 - 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"shape": (8, 16, 32)}, "shape is .* expected a GemmShape"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; expected a CutlassDtype"),
        ({"arch": "sm_80"}, "arch is 'sm_80'; expected a SmArch"),
        ({"layout_a": "row"}, "layout_a is 'row'; expected a GemmLayout"),
        ({"layout_b": None}, "layout_b is None; expected a GemmLayout"),
        ({"layout_c": 0}, "layout_c is 0; expected a GemmLayout"),
        ({"epilogue": "relu"}, "epilogue is 'relu'; expected a GemmEpilogue"),
        ({"out_dtype": "f32"}, "out_dtype is 'f32'; expected a CutlassDtype"),
        ({"precision": "tf32"}, "precision='tf32' is for float32 operands; these are f16"),
        ({"precision": "fast"}, "unknown precision 'fast'; valid: ieee, tf32, 3xtf32"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(values: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"shape": SHAPE, "dtype": D.F16} | values
    with pytest.raises(InvalidOperandError, match=says):
        GemmRequest(arguments.pop("shape"), **arguments)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dtype": D.F8E4M3}, "no GEMM kernel takes e4m3"),
        ({"dtype": D.F4E2M1}, "no GEMM kernel takes e2m1"),
        ({"dtype": D.F16, "out_dtype": D.F64}, "f16 operands give f16, f32, bf16, not f64"),
        ({"dtype": D.I8, "out_dtype": D.F32}, "i8 operands give i32, not f32"),
        ({"dtype": D.F16, "arch": SmArch.SM120}, "no GEMM kernels for SM120 yet; valid: SM80, SM86, SM89, SM90A"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        GemmRequest(SHAPE, **values)


def test_tf32_is_float32_multiplied_in_tf32() -> None:
    request = GemmRequest(SHAPE, dtype=D.TF32)
    assert (request.operand_dtype, request.result_dtype, request.math) == (D.F32, D.F32, "tf32")
    assert GemmRequest(SHAPE, dtype=D.F32, precision="tf32").math == "tf32"
    assert GemmRequest(SHAPE, dtype=D.F32).math == "ieee"


def test_tf32_with_another_precision_contradicts_itself() -> None:
    with pytest.raises(InvalidOperandError, match="TF32"):
        GemmRequest(SHAPE, dtype=D.TF32, precision="ieee")


def test_integer_and_narrow_operands_have_wider_results() -> None:
    assert default_out_dtype(D.I8) is D.I32
    assert default_out_dtype(D.F8E4M3) is default_out_dtype(D.F8E5M2) is default_out_dtype(D.F4E2M1) is D.BF16
    assert default_out_dtype(D.F64) is D.F64
    assert GemmRequest(SHAPE, dtype=D.I8).result_dtype is D.I32


def test_math_modes() -> None:
    assert math_mode(D.F32, None) == "ieee"
    assert math_mode(D.F32, "3xtf32") == "3xtf32"
    assert math_mode(D.BF16, None) == "default"


@pytest.mark.parametrize("arch", list(SmArch))
@pytest.mark.parametrize("dtype", list(D))
def test_a_request_is_taken_exactly_where_the_dtype_is_supported(dtype: D, arch: SmArch) -> None:
    if is_supported_for(dtype, arch):
        assert arch in GEMM_ARCHS
        assert GemmRequest(SHAPE, dtype=dtype, arch=arch).arch is arch
    else:
        with pytest.raises(UnsupportedError):
            GemmRequest(SHAPE, dtype=dtype, arch=arch)
