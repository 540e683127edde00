"""Cases that `test_gemv.py` runs in a process whose GPU only takes notes: kernels, their arguments, kept plans."""

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
from call_cases import foreign, kept, operand, refused, scalars

ARCH = SmArch.SM90A


def noted(call: Any) -> list[str]:
    """The launches of a call, kernels without their digests, with their arguments in words."""
    call_cases.GPU._library.golden_notes()
    call()
    return [_told(step) for step in call_cases.GPU._steps(()) if step.startswith("cutlass")]


def _told(step: str) -> str:
    name, _, rest = step.partition(" ")
    words = [word for word in rest.split() if word.partition("=")[0] not in ("a", "b", "c", "d", "workspace")]
    return " ".join([name.rpartition("_")[0].removeprefix("cutlass_simt_"), *words])


def strided(view: _core.Operand, shape: list[int], strides: list[int]) -> _core.Operand:
    """A view of the same memory with other extents and strides."""
    return relaid(view, shape, strides)


def case_the_layout_and_alignment_decide_about_the_kernel() -> None:
    x = operand("bf16", 256)
    rows, columns = operand("bf16", 512, 256), operand("bf16", 512, 256, columns=True)
    odd = strided(operand("bf16", 512, 257), [512, 256], [257, 1])
    single = operand("f32", 33, 7)
    sizes = "m=1 n=512 k=256 lda=1 ldb="
    wanted = {
        "bf16_sgemv_bf16_1x64_32x1_nn_align1 " + sizes + "256 ldc=1 ldd=1": (rows, x),
        "bf16_sgemv_bf16_1x64_32x1_nt_align1 " + sizes + "512 ldc=1 ldd=1": (columns, x),
        "bf16_sgemv_bf16_1x64_4x1_nn_align1 " + sizes + "257 ldc=1 ldd=1": (odd, x),
        "f32_sgemv_f32_1x64_4x1_nn_align1 m=1 n=33 k=7 lda=1 ldb=7 ldc=1 ldd=1": (single, operand("f32", 7)),
    }
    for launch, (a, vector) in wanted.items():
        assert noted(functools.partial(ac.gemv, a, vector)) == [launch]


def case_vectors_have_any_stride() -> None:
    a = operand("f16", 512, 256)
    x = strided(operand("f16", 256, 3), [256], [3])
    c = out = strided(operand("f16", 512, 2), [512], [2])
    (launch,) = noted(lambda: ac.gemv(a, x, c, out=out, beta=0.5, alpha=2.0))
    assert "lda=3 ldb=256 ldc=2 ldd=2" in launch
    assert launch.endswith("alpha=2.0 beta=0.5")
    broadcast = strided(operand("f16", 1), [256], [0])
    refused(ac.UnsupportedError, r"x of shape \(1, 256\) has strides", lambda: ac.gemv(a, broadcast))


def case_batches_are_one_launch_where_one_stride_holds_them() -> None:
    a, shared = operand("bf16", 6, 512, 256), operand("bf16", 512, 256)
    x = operand("bf16", 6, 256)
    (launch,) = noted(lambda: ac.gemv(a, x))
    assert "batch=6" in launch
    assert f"batch_stride_a=256 batch_stride_b={512 * 256}" in launch
    assert "batch_stride_d=512" in launch
    (launch,) = noted(lambda: ac.gemv(shared, x))
    assert "batch_stride_a=256 batch_stride_c=512 batch_stride_d=512" in launch
    apart = strided(x, [3, 2, 256], [1024, 256, 1])
    assert len(noted(lambda: ac.gemv(shared, apart))) == 3


def case_few_rows_have_k_divided() -> None:
    wide = operand("bf16", 64, 65536, columns=True)
    (launch,) = noted(lambda: ac.gemv(wide, operand("bf16", 65536)))
    assert "split_k=64" in launch
    (launch,) = noted(lambda: ac.gemv(wide, operand("bf16", 65536), workspace_size=0))
    assert "split_k" not in launch


def case_bias_and_activation_are_what_a_kernel_is_told() -> None:
    a, x, bias = operand("bf16", 512, 256), operand("bf16", 256), operand("f32", 512)
    for activation in (None, "relu", "gelu", "silu"):
        (launch,) = noted(functools.partial(ac.gemv, a, x, bias=bias, activation=activation, backend="prebuilt"))
        assert launch.startswith("bf16_sgemv_bf16_1x64_32x1_nn_align1_common ")
    (launch,) = noted(lambda: ac.gemv(a, x, bias=bias, activation="tanh"))
    assert launch.startswith("bf16_sgemv_bf16_1x64_32x1_nn_align1_evt ")


def case_scales_that_are_numbers_are_part_of_alpha_and_beta() -> None:
    a, x, c = operand("bf16", 512, 256), operand("bf16", 256), operand("bf16", 512)
    for _ in range(2):
        (launch,) = noted(lambda: ac.gemv(a, x, c, alpha=3.0, beta=0.5, scale_a=2.0, scale_b=0.25, scale_d=4.0))
        assert launch.endswith("alpha=6.0 beta=2.0")
    for follows in ({"bias": c}, {"activation": "relu"}, {"epilogue": ac.EvtBuilder().activation("relu").build()}):
        says = "scale_d is a number, and what follows"
        refused(ac.UnsupportedError, says, functools.partial(ac.gemv, a, x, scale_d=4.0, **follows))


def case_trees_see_a_row() -> None:
    a, x = operand("bf16", 4, 512, 256), operand("bf16", 4, 256)
    tree = ac.EvtBuilder().add_matrix("other", dtype=D.F32).mask_store("bits").reduce("sum", "scalar").build()
    made = ac.gemv(a, x, epilogue=tree, other=operand("f32", 4, 512))
    assert {name: array.shape for name, array in made.items()} == {"out": (4, 512), "bits": (4, 64), "sum": (1,)}
    (launch,) = noted(lambda: ac.gemv(a, x, epilogue=tree, other=operand("f32", 4, 512)))
    assert "_evt " in launch
    wrong = operand("f32", 512, 4)
    refused(ac.InvalidOperandError, "other has shape", lambda: ac.gemv(a, x, epilogue=tree, other=wrong))
    refused(
        ac.InvalidOperandError, "calls an operand 'x'",
        lambda: ac.gemv(a, x, epilogue=ac.EvtBuilder().add_bias("x").build()),
    )  # fmt: skip


def case_plans_are_kept() -> None:
    for make in (operand, foreign):
        a, x, c, out = make("bf16", 512, 256), make("bf16", 256), make("bf16", 512), make("bf16", 512)
        bias = make("bf16", 512)
        scalars(functools.partial(ac.gemv, a, x))
        for more in ({"out": out}, {"out_dtype": D.F32}, {"bias": bias, "activation": "relu"}, {"c": c, "beta": 2.0}):
            kept(functools.partial(ac.gemv, a, x, **more))
        assert ac.gemv(a, x, out=out) is out


def case_plans_of_requests_take_the_table_of_operands() -> None:
    shape = ac.GemvShape(512, 256)
    plan = ac.plan(ac.GemvRequest(shape, dtype=D.BF16, epilogue=ac.GemmEpilogue(beta=1.0, bias=True)))
    assert plan.slots == ["a", "x", "c", "bias", "out"]
    column = ac.plan(ac.GemvRequest(shape, dtype=D.BF16, layout_a=ac.GemmLayout.COL_MAJOR))
    assert column.slots == ["a", "x", "c", "out"]
    given = operand("bf16", 512, 256, columns=True), operand("bf16", 256)
    assert noted(lambda: column(*given, out=operand("bf16", 512))) == noted(lambda: ac.gemv(*given))
    refused(ac.InvalidOperandError, "strides", lambda: column(operand("bf16", 512, 256), given[1]))


def case_a_bound_matrix_is_left_out() -> None:
    a, x, out = operand("bf16", 512, 256), operand("bf16", 256), operand("bf16", 512)
    request = ac.GemvRequest(ac.GemvShape(512, 256), dtype=D.BF16)
    bound = ac.plan(request, b=a)
    for _ in range(2):
        assert noted(lambda: bound(x, out=out)) == noted(lambda: ac.gemv(a, x, out=out))
    wrong = operand("bf16", 256, 512)
    refused(ac.InvalidOperandError, "a has shape", lambda: ac.plan(request, b=wrong))


def case_nothing_is_launched_for_a_result_without_elements() -> None:
    assert noted(lambda: ac.gemv(operand("bf16", 0, 256), operand("bf16", 256))) == []
    (launch,) = noted(lambda: ac.gemv(operand("bf16", 512, 0), operand("bf16", 0)))
    assert " k=" not in launch


def case_what_no_kernel_does_is_refused() -> None:
    a, x = operand("f64", 16, 16), operand("f64", 16)
    refused(ac.UnsupportedError, r"multiplies f64; valid: f16, bf16, f32; gemm\(a, x", lambda: ac.gemv(a, x))
    a, x = operand("f32", 16, 16), operand("f32", 16)
    refused(ac.UnsupportedError, "multiplies f32 as it is", lambda: ac.gemv(a, x, precision="tf32"))
    refused(ac.UnsupportedError, "f32 operands give", lambda: ac.gemv(a, x, out_dtype=D.F64))
    apart = strided(operand("f32", 64, 64), [16, 16], [32, 2])
    refused(ac.UnsupportedError, r"a of shape \(16, 16\) has strides \(32, 2\)", lambda: ac.gemv(apart, x))


if __name__ == "__main__":
    call_cases.GPU = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    call_cases.GPU._table = "full"
    fake_cases.run(globals())
