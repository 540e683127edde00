"""Cases that `test_batch_invariant.py` runs in a process whose GPU only takes notes: calls that are batch-invariant."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import golden_gpu
from atomr_cutlass import SmArch, _core, epilogue
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.ops.gemm.kernels import IN_ORDER
from atomr_cutlass.pipeline import call as call_module
from atomr_cutlass.pipeline import reduction, table
from atomr_cutlass.pipeline.heuristic import heuristics
from atomr_cutlass.pipeline.reduction import reduction_of

ROWS = (1, 2, 5, 8, 16, 17, 64, 128, 129, 512, 1000, 4096)
GPU: Any = None
_places = 0


def operand(dtype: str, *shape: int, columns: bool = False) -> _core.Operand:
    global _places  # noqa: PLW0603
    _places = _places % 60 + 1
    strides = [1, shape[0]] if columns else None
    element = {"u8": (1, 8)}.get(dtype) or ac.CutlassDtype(dtype).dlpack
    return _core.Operand(_places << 38, shape, strides, element, 2, 0, False, None)


def launched(call: Callable[[], Any]) -> list[tuple[str, dict[str, str]]]:
    """The kernels that a call launches, and their arguments in words."""
    GPU._library.golden_notes()
    call()
    steps = (step for step in GPU._steps(()) if not step.startswith(("copy", "set", "clear", "fill")))
    return [(step.partition(" ")[0].removesuffix("@noted"), fake_cases.arguments(step)) for step in steps]


def in_order(args: dict[str, str]) -> bool:
    """Whether a launch of a kernel for few rows adds up in the order of K."""
    return args.get("swizzle") == str(IN_ORDER)


def reductions(call: Callable[[int], Any]) -> set[Any]:
    """Those of the launches of a call with each number of rows."""
    keys = {info.key.name: info.key for info in table.kernels()}
    keys |= {info.name.removesuffix("@noted"): info.key for info in table.kernels()}
    found = set()
    for name, args in itertools.chain.from_iterable(launched(lambda rows=rows: call(rows)) for rows in ROWS):
        divides = keys[name].mainloop == FEW and not in_order(args)
        found.add(None if divides else reduction_of(keys[name]))
    return found


def refused(says: str, call: Callable[[], Any]) -> None:
    GPU._library.golden_notes()
    with pytest.raises(ac.UnsupportedError, match=says):
        call()
    assert GPU._steps(()) == []


def case_gemm_has_one_reduction() -> None:
    b, bias = operand("bf16", 2048, 4096), operand("bf16", 4096)
    for more in ({}, {"bias": bias, "activation": "relu"}, {"bias": bias}):
        (found,) = reductions(lambda m, more=more: ac.gemm(operand("bf16", m, 2048), b, batch_invariant=True, **more))
        assert found is not None
    # Otherwise a kernel for few rows divides K.
    weights = operand("bf16", 2048, 4096, columns=True)
    assert None in reductions(lambda m: ac.gemm(operand("bf16", m, 2048), weights))
    ((name, _),) = launched(lambda: ac.gemm(operand("bf16", 8, 2048), weights, batch_invariant=True))
    assert "_few_" in name


def case_gated_gemm_has_one_reduction() -> None:
    b = operand("bf16", 2048, 4096)
    assert len(reductions(lambda m: ac.gated_gemm(operand("bf16", m, 2048), b, batch_invariant=True))) == 1


def case_matmul_has_one_reduction() -> None:
    weights = operand("bf16", 4096, 2048)

    def call(columns: int) -> Any:
        return ac.matmul(
            ac.MatmulRequest(
                weights, operand("bf16", columns, 2048), m=4096, n=columns, k=2048, transa=True, batch_invariant=True
            )
        )

    (found,) = reductions(call)
    assert found is not None
    # What plans without the option have left in the cache of heuristics is passed over.
    heuristics.clear()
    request = ac.MatmulRequest(weights, operand("bf16", 4, 2048), m=4096, n=4, k=2048, transa=True)
    (few,) = launched(lambda: ac.matmul(request))
    assert "_few_" in few[0]
    assert not in_order(few[1])
    (invariant,) = launched(lambda: call(4))
    assert in_order(invariant[1])
    assert launched(lambda: ac.matmul(request)) == [few]


def case_grouped_gemm_has_one_reduction() -> None:
    b, ends = operand("bf16", 4, 2048, 1024), operand("i32", 4)

    def call(rows: int) -> Any:
        return ac.grouped_gemm(operand("bf16", rows, 2048), b, offsets=ends, batch_invariant=True)

    assert len(reductions(call)) == 1


def case_convolutions_have_one_reduction() -> None:
    def call(n: int, taps: int, gradient: bool) -> Any:
        images, filters = operand("bf16", n, 28, 28, 64), operand("bf16", 64, taps, taps, 64)
        if gradient:
            return ac.conv2d_dgrad(images, filters, (n, 28, 28, 64), padding=taps // 2, batch_invariant=True)
        return ac.conv2d(images, filters, padding=taps // 2, activation="relu", batch_invariant=True)

    for taps in (1, 3):
        for gradient in (False, True):
            (found,) = reductions(lambda n, taps=taps, gradient=gradient: call(n, taps, gradient))
            assert found is not None
            assert found.op == ("gemm" if taps == 1 else "conv2d_dgrad" if gradient else "conv2d_fprop")


def case_sums_over_images_are_refused() -> None:
    x, w = operand("bf16", 2, 28, 28, 64), operand("bf16", 64, 3, 3, 64)
    refused(
        "cannot be batch-invariant",
        lambda: ac.conv2d(x, w, epilogue=lambda acc: (acc, epilogue.column_sum(acc)), batch_invariant=True),
    )
    refused("sum over the pixels of all images", lambda: ac.conv2d_wgrad(x, x, (64, 3, 3, 64), batch_invariant=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, reduction.VARIABLE, "1")
        ac.conv2d_wgrad(x, x, (64, 3, 3, 64), padding=1)  # as without it
    call_module.kept_plans.clear()


def case_requests_have_it_too() -> None:
    keys = {info.name: info.key for info in table.kernels()}
    for request in (
        ac.GemmRequest(ac.GemmShape(4, 4096, 4096), dtype=ac.CutlassDtype.BF16, batch_invariant=True),
        ac.GroupedGemmRequest(
            ac.GroupedGemmShape([ac.GemmShape(4, 256, 512)]), dtype=ac.CutlassDtype.BF16, batch_invariant=True
        ),
    ):
        plan = ac.plan(request)
        assert plan.key == request.plan_key()
        assert reduction_of(keys[plan.kernel_name]) is not None


def case_a_kept_plan_is_not_that_of_the_other_option() -> None:
    a, b = operand("bf16", 4, 2048), operand("bf16", 2048, 4096)
    call_module.kept_plans.clear()
    plain = launched(lambda: ac.gemm(a, b))
    invariant = launched(lambda: ac.gemm(a, b, batch_invariant=True))
    assert plain != invariant
    assert launched(lambda: ac.gemm(a, b)) == launched(lambda: ac.gemm(a, b, batch_invariant=False)) == plain
    with pytest.raises(ac.InvalidOperandError, match="batch_invariant is 1; expected True or False"):
        ac.gemm(a, b, batch_invariant=1)  # type: ignore[arg-type]


def case_the_environment_decides_where_a_call_says_nothing() -> None:
    a, b = operand("bf16", 3, 2048), operand("bf16", 2048, 4096)
    invariant = launched(lambda: ac.gemm(a, b, batch_invariant=True))
    call_module.kept_plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, reduction.VARIABLE, "1")
        assert launched(lambda: ac.gemm(a, b)) == invariant
        assert launched(lambda: ac.gemm(a, b, batch_invariant=False)) != invariant
    call_module.kept_plans.clear()


def case_results_that_are_reduced_are_refused() -> None:
    a, b = operand("e4m3", 64, 128), operand("e4m3", 128, 256, columns=True)
    amax = operand("f32", 1)
    refused("amax cannot be batch-invariant", lambda: ac.gemm(a, b, amax=amax, batch_invariant=True))
    x, y = operand("bf16", 64, 128), operand("bf16", 128, 256)
    for function in (epilogue.row_sum, epilogue.column_sum, epilogue.column_amax):
        refused(
            "cannot be batch-invariant",
            lambda function=function: ac.gemm(
                x, y, epilogue=lambda acc, function=function: (acc, function(acc)), batch_invariant=True
            ),
        )
    for kind in (ac.MatmulEpilogue.BGRADA, ac.MatmulEpilogue.BGRADB):
        request = ac.MatmulRequest(
            x, operand("bf16", 32, 64), m=128, n=32, k=64, epilogue=kind,
            bias=operand("f32", 128 if kind is ac.MatmulEpilogue.BGRADA else 32), batch_invariant=True,
        )  # fmt: skip
        refused("bias cannot be batch-invariant", lambda request=request: ac.matmul(request))


if __name__ == "__main__":
    GPU = golden_gpu.Gpu(Path(sys.argv[1]), SmArch.SM90A)
    GPU._table = "full"
    fake_cases.run(globals())
