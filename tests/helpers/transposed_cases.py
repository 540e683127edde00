"""Cases that `test_transposed.py` runs in a process whose GPU only takes notes: copies of operands before products."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import atomr_cutlass as ac
import call_cases
import fake_cases
import golden_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.arrays.layouts import relaid
from call_cases import operand

ARCH = SmArch.SM90A


def noted(call: Any) -> list[str]:
    """The launches of a call, with their arguments in words."""
    call_cases.GPU._library.golden_notes()
    call()
    return [step for step in call_cases.GPU._steps(()) if step.startswith("cutlass")]


def tf32(a: _core.Operand, b: _core.Operand, **options: Any) -> list[str]:
    """The launches of a product in tf32."""
    return noted(functools.partial(ac.gemm, a, b, precision="tf32", **options))


def case_b_with_rows_is_copied_where_there_are_many_rows() -> None:
    b = operand("f32", 2048, 256)
    copy, product = tf32(operand("f32", 8192, 2048), b)
    assert copy.startswith("cutlass_transpose_f32_to_f32")
    assert "m=2048 n=1 k=256" in copy
    assert "lda=256" in copy
    assert "ldd=2048" in copy
    assert "m=8192 n=256 k=2048" in product
    assert "lda=2048 ldb=2048" in product
    assert not any("transpose" in launch for launch in tf32(operand("f32", 16, 2048), b))


def case_a_with_columns_is_copied() -> None:
    a, b = operand("f32", 4096, 2048, columns=True), operand("f32", 2048, 4096, columns=True)
    launches = tf32(a, b)
    assert ["transpose" in launch for launch in launches] == [True, False]
    assert "k=4096" in launches[0]


def case_a_with_columns_is_copied_beside_a_row_major_b() -> None:
    """Which the tensor cores take through registers, in tf32."""
    copy, product, *_ = tf32(operand("f32", 512, 2048, columns=True), operand("f32", 2048, 4096))
    assert copy.startswith("cutlass_transpose_f32_to_f32")
    assert fake_cases.arguments(copy)["k"] == "512"
    assert "_nnn_" in product
    assert fake_cases.arguments(product)["b"] == fake_cases.arguments(copy)["d"]


def case_f32_with_columns_of_a_is_copied_for_few_rows() -> None:
    copy, product, *_ = noted(lambda: ac.gemm(operand("f32", 16, 4096, columns=True), operand("f32", 4096, 4096)))
    assert fake_cases.arguments(copy)["k"] == "16"
    assert "_tt_" in product
    assert fake_cases.arguments(product)["a"] == fake_cases.arguments(copy)["d"]


def case_a_copy_has_rows_of_whole_vectors() -> None:
    copy, product = noted(lambda: ac.gemm(operand("i8", 4096, 1000, columns=False), operand("i8", 1000, 4096)))
    assert copy.startswith("cutlass_transpose_s8_to_s8")
    assert "ldd=1008" in copy
    assert "ldb=1008" in product


def case_batches_are_copied_once_where_they_share_the_operand() -> None:
    a, b = operand("f32", 3, 8192, 1024), operand("f32", 3, 1024, 256)
    copy, product = tf32(a, b)
    assert "batch=3" in copy
    assert f"batch_stride_b={256 * 1024}" in product
    copy, product = tf32(a, operand("f32", 1024, 256))
    assert "batch=" not in copy
    assert "batch_stride_b" not in product


def case_fp8_with_rows_of_b_is_copied_for_full_accumulation() -> None:
    a, b = operand("e4m3", 4096, 1024), operand("e4m3", 1024, 4096)
    copy, product = noted(lambda: ac.gemm(a, b, out_dtype=D.BF16))
    assert copy.startswith("cutlass_transpose_s8_to_s8")
    assert "_tnt_" in product or "_tnn_" in product  # B contiguous along K; D or D^T
    scale = operand("f32", 1, 1)
    assert len(noted(lambda: ac.gemm(a, b, out_dtype=D.BF16, scale_a=scale, scale_b=scale))) == 2


def case_odd_rows_are_not_copied() -> None:
    odd = operand("f32", 2048, 1027)
    assert len(tf32(operand("f32", 4096, 2048), relaid(odd, [2048, 1026], [1027, 1]))) == 1


def case_operands_of_odd_k_are_both_copied() -> None:
    *copies, product = noted(lambda: ac.gemm(operand("bf16", 4096, 1001), operand("bf16", 1001, 2048)))
    assert sorted(fake_cases.arguments(copy)["m"] for copy in copies) == ["1001", "4096"]
    assert ["ldd=1008" in copy for copy in copies] == [True, True]
    assert "k=1008 " in product
    assert "lda=1008 ldb=1008" in product


def case_copies_are_made_wherever_the_kernel_is_launched() -> None:
    """An epilogue follows 0 times the product, which a kernel of trees computes: of what copies there are."""
    a, b, bias = operand("bf16", 64, 1001), operand("bf16", 1001, 4096), operand("bf16", 4096)
    launches = noted(lambda: ac.gemm(a, b, bias=bias, alpha=0.0))
    assert ["transpose" in launch for launch in launches] == [True, True, False]
    assert not noted(lambda: ac.gemm(a, b, alpha=0.0))[:-1]


def case_no_c_no_beta() -> None:
    """Kernels read C where beta is not 0."""
    shape = ac.GemmShape(16, 4096, 1024)
    request = ac.GemmRequest(shape, dtype=D.BF16, epilogue=ac.GemmEpilogue(bias=True, activation="relu"))
    plan, bias = ac.plan(request), operand("bf16", 4096)
    a, b, out = operand("bf16", 16, 1024), operand("bf16", 1024, 4096), operand("bf16", 16, 4096)
    (launch,) = noted(lambda: plan(a, b, bias, out=out, beta=1.0))
    assert "_few_" in launch
    assert "beta" not in launch


def case_no_workspace_no_copy() -> None:
    (alone,) = tf32(operand("f32", 4096, 2048), operand("f32", 2048, 1024), workspace_size=0)
    assert "transpose" not in alone


if __name__ == "__main__":
    call_cases.GPU = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    call_cases.GPU._table = "full"
    fake_cases.run(globals())
