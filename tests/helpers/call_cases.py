"""Cases that `test_call.py` runs in a process whose GPU only takes notes: calls that find an earlier plan."""

from __future__ import annotations

import functools
import gc
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import dlpack_arrays
import fake_cases
import fake_table
import golden_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.arrays import layouts, numerics
from atomr_cutlass.epilogue import validate
from atomr_cutlass.jit import kernels
from atomr_cutlass.ops.conv2d import kernels as conv_plans
from atomr_cutlass.pipeline import call as call_module
from atomr_cutlass.pipeline import select, table
from atomr_cutlass.pipeline.operation import operation_of

ARCH = SmArch.SM90A
GPU: Any = None
_places = 0


def operand(dtype: str, *shape: int, columns: bool = False, read_only: bool = False) -> _core.Operand:
    """An array that C++ reads itself."""
    numpy_type, element = golden_gpu.DTYPES[dtype]
    dtype_found = numerics.from_numpy_dtype(np.dtype(numpy_type))
    element = dtype_found.dlpack if dtype_found else element
    strides = [1, shape[0]] if columns else None
    return _core.Operand(_place() << 38, shape, strides, element, 2, 0, read_only, None)


def foreign(dtype: str, *shape: int) -> golden_gpu.Array:
    """An array that has to be asked with Python, as those of CuPy and JAX."""
    dense = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    return golden_gpu.Array(_place() - 1, dtype, shape, dense)


def tensor(dtype: str, *shape: int) -> dlpack_arrays.Tensor:
    """An array with DLPack's exchange API, as those of PyTorch."""
    return dlpack_arrays.Tensor(np.zeros(shape, golden_gpu.DTYPES[dtype][0]), device=(2, 0))


def cuda_array(dtype: str, *shape: int) -> dlpack_arrays.CudaArray:
    """An array with `__cuda_array_interface__`, as those of Numba."""
    return dlpack_arrays.CudaArray(_place() << 38, shape, _TYPESTRS[dtype])


_TYPESTRS = {"f16": "<f2", "f32": "<f4", "i32": "<i4"}


def _place() -> int:
    global _places  # noqa: PLW0603
    _places = _places % 60 + 1
    return _places


def launched(call: Callable[[], Any]) -> list[str]:
    """The kernels that a call launches, and what it returns."""
    GPU._library.golden_notes()
    shown = golden_gpu._shown(call())
    return [*(step.partition(" ")[0] for step in GPU._steps(())), str(shown)]


def streams(call: Callable[[], Any]) -> set[str]:
    """The streams that a call launches on."""
    GPU._library.golden_notes()
    call()
    return {stream for step in GPU._steps(()) for stream in re.findall(r"stream=(\d+)", step)}


def kept(*calls: Callable[[], Any]) -> None:
    """Asserts that the first of calls makes a plan, that the others use it, and launch the same."""
    call_module.kept_plans.clear()
    with fake_cases.parsed() as made:
        first = launched(calls[0])
        assert len(made) == 1
        assert len(call_module.kept_plans) == 1
        for again in calls[1:] or calls:
            assert launched(again) == first
        assert len(made) == 1


def refused(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
    """Asserts that a call raises, and launches nothing."""
    GPU._library.golden_notes()
    with pytest.raises(error, match=says):
        call()
    assert GPU._steps(()) == []


def scalars(function: Callable[..., Any], **given: Any) -> None:
    """Asserts that a kept plan takes NumPy's scalars and numeric scales, and refuses what is no number."""
    kept(*(lambda alpha=alpha: function(alpha=alpha, **given) for alpha in (2.0, 3, np.float32(2), np.int64(3))))
    kept(*(lambda scale=scale: function(scale_a=scale, **given) for scale in (2.0, 3, np.float32(2))))
    for wrong in (True, "2", None, np.ones(1), 10**400, [1.0]):
        refused(ac.InvalidOperandError, "alpha is", lambda wrong=wrong: function(alpha=wrong, **given))
    for wrong in (True, 10**400):
        refused(ac.InvalidOperandError, "scale_a is", lambda wrong=wrong: function(scale_a=wrong, **given))


def frameworks(function: Callable[..., Any], arrays: Sequence[tuple[str, tuple[int, ...]]], **options: Any) -> None:
    """Asserts that plans are kept for arrays of every framework, with `out_dtype` too."""
    named = {dtype for dtype, *_ in arrays} <= set(_TYPESTRS)
    for make in (operand, foreign, tensor, *([cuda_array] if named else [])):
        kept(*(lambda make=make: function(*(make(*array) for array in arrays), **options) for _ in range(3)))


def case_a_call_returns_its_own_out() -> None:
    """Also where a kept plan serves it, and the array has to be asked with Python or a scale is a number."""
    call_module.kept_plans.clear()
    a, b, c, out = (foreign("bf16", *shape) for shape in ((64, 128), (128, 256), (64, 256), (64, 128)))
    x, y, d = operand("e4m3", 64, 128), operand("e4m3", 128, 256, columns=True), operand("bf16", 64, 256)
    rows = operand("f32", 64, 1)
    for call in (
        lambda: ac.gemm(a, b, out=c) is c,
        lambda: ac.gemm(x, y, out=d, scale_a=rows, scale_b=2.0) is d,
        lambda: ac.gated_gemm(a, b, out=out) is out,
    ):
        with fake_cases.parsed() as made:
            assert call()
            assert call()
        assert len(made) == 1


def case_results_are_made_by_pytorch_itself() -> None:
    """Its function's arrays hold their memory themselves; DLPack's allocator makes what that does not."""
    call_module.kept_plans.clear()
    kind = dlpack_arrays.another_framework()
    kind.dtype = "an element"  # type: ignore[attr-defined]
    element = golden_gpu.DTYPES["bf16"][0]
    asked: list[Any] = []

    def array(shape: Sequence[int], strides: Sequence[int] | None = None) -> Any:
        memory = np.zeros(shape, element)
        steps = None if strides is None else [stride * memory.itemsize for stride in strides]
        return kind(np.lib.stride_tricks.as_strided(memory, shape, steps), device=(2, 0))

    def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], element: object) -> Any:
        assert element == "an element"
        asked.append((shape, strides))
        return make(shape, strides)

    make: Callable[..., Any] = array
    a, b = array((64, 128)), array((128, 256))
    x, w = array((1, 64, 8, 8), (4096, 1, 512, 64)), array((64, 64, 3, 3), (576, 1, 192, 64))
    plan = ac.plan(ac.GemmRequest(ac.GemmShape(64, 256, 128), dtype=D.BF16))
    with pytest.MonkeyPatch.context() as patch:
        module = types.ModuleType("torch")
        guards = types.SimpleNamespace(_empty_strided_cuda=empty_strided)
        inner = types.SimpleNamespace(_dynamo=types.SimpleNamespace(guards=guards))
        vars(module).update(Tensor=kind, _C=inner)
        patch.setitem(sys.modules, "torch", module)
        for call in (ac.gemm, ac.gemm, plan):
            assert isinstance(call(a, b), kind)
            assert asked.pop() == ((64, 256), (256, 1))
        for _ in range(2):
            result = ac.conv2d(x, w, padding=1, layout="nchw")
            assert result.shape == (1, 64, 8, 8)
        assert asked.pop() == ((1, 64, 8, 8), (4096, 1, 512, 64))
        for wrong in (
            lambda *_: array((64, 255)), lambda *_: np.zeros((64, 256)), lambda *_: 1 // 0, lambda *_: kind,
        ):  # fmt: skip
            make = wrong
            result = ac.gemm(a, b)
            assert isinstance(result, kind)
            assert result.shape == (64, 256)
        assert len(asked) == 5


def case_gated_gemm() -> None:
    a, b, out = operand("bf16", 64, 128), operand("bf16", 128, 256), operand("bf16", 64, 128)
    scalars(lambda **more: ac.gated_gemm(a, b, **more), out=out)
    scalars(lambda **more: ac.gated_gemm(a, b, **more))
    shapes = [("bf16", (64, 128)), ("bf16", (128, 256))]
    frameworks(ac.gated_gemm, [(first, *two) for first, two in shapes])
    kept(lambda: ac.gated_gemm(a, b, out=out, out_dtype=D.BF16), lambda: ac.gated_gemm(a, b, out=out, out_dtype=D.BF16))
    refused(ac.InvalidOperandError, "fast_accum", lambda: ac.gated_gemm(a, b, out=out, fast_accum=1))


def case_requests_of_gated_gemm_launch_as_its_calls() -> None:
    """With scales and without; with B bound too."""

    def steps(call: Callable[[], Any]) -> list[str]:
        GPU._library.golden_notes()
        call()
        return [re.sub(r" workspace=\S+", "", step) for step in GPU._steps(())]

    for dtype, batch, scaling in ((D.BF16, (), None), (D.F16, (3,), None), (D.F8E4M3, (), "vector")):
        fp8 = scaling is not None
        a, b = operand(dtype.value, *batch, 64, 128), operand(dtype.value, *batch, 128, 256, columns=fp8)
        out = operand("bf16" if fp8 else dtype.value, *batch, 64, 128)
        extents = {"scale_a": (64, 1), "scale_b": (1, 256), "scale_d": (1,)} if fp8 else {}
        scales = {name: operand("f32", *extent) for name, extent in extents.items()}
        request = ac.GatedGemmRequest(
            ac.GemmShape(64, 256, 128, *batch), dtype=dtype, scaling=scaling, quantized=fp8,
            layout_b=ac.GemmLayout.COL_MAJOR if fp8 else ac.GemmLayout.ROW_MAJOR,
            epilogue=ac.GemmEpilogue(alpha=0.5, activation="gelu"),
        )  # fmt: skip
        plan = ac.plan(request)
        assert plan.slots == ["a", "b", *scales, "out"]
        wanted = steps(lambda: ac.gated_gemm(a, b, out=out, alpha=0.5, activation="gelu", **scales))  # noqa: B023
        assert len(wanted) == 1
        assert steps(lambda: plan(a, b, *scales.values(), out=out)) == wanted  # noqa: B023
        bound = ac.plan(request, b=b)
        assert steps(lambda: bound(a, *scales.values(), out=out)) == wanted  # noqa: B023
        refused(ac.InvalidOperandError, "shape", lambda: plan(a, b, *scales.values(), out=b))  # noqa: B023


def case_gemm() -> None:
    a, b, out = operand("bf16", 64, 128), operand("bf16", 128, 256), operand("bf16", 64, 256)
    for more in ({}, {"out": out}):
        scalars(lambda more=more, **scalar: ac.gemm(a, b, **more, **scalar))
        for c in (operand("bf16", 64, 256), out):
            betas = (1.0, 2, np.float32(3))
            kept(*(lambda beta=beta, c=c, more=more: ac.gemm(a, b, c, beta=beta, **more) for beta in betas))
        kept(lambda more=more: ac.gemm(a, b, out_dtype=D.BF16, **more))
    shapes = [("f16", 64, 128), ("f16", 128, 256)]
    frameworks(ac.gemm, shapes)
    frameworks(lambda a, b, bias: ac.gemm(a, b, bias=bias, activation="relu"), [*shapes, ("f16", 256)])
    refused(ac.InvalidOperandError, "fast_accum", lambda: ac.gemm(a, b, out=out, fast_accum=1))
    refused(ac.InvalidOperandError, "c is given", lambda: ac.gemm(a, b, operand("bf16", 64, 256), out=out))
    refused(ac.InvalidOperandError, "so c is needed", lambda: ac.gemm(a, b, out=out, beta=1.0))


def case_gemm_with_scales() -> None:
    a, b, out = operand("e4m3", 64, 128), operand("e4m3", 128, 256, columns=True), operand("bf16", 64, 256)
    rows, columns = operand("f32", 64, 1), operand("f32", 1, 256)
    kept(
        *(lambda alpha=alpha: ac.gemm(a, b, out=out, scale_a=rows, scale_b=columns, alpha=alpha) for alpha in (1, 2.0))
    )
    kept(*(lambda scale=scale: ac.gemm(a, b, out=out, scale_a=rows, scale_b=scale) for scale in (2.0, 3)))
    amax = operand("f32", 1)
    kept(lambda: ac.gemm(a, b, amax=amax, scale_d=operand("f32", 1)))


def case_grouped_gemm() -> None:
    a, b, out, ends = (
        operand("bf16", 64, 128),
        operand("bf16", 4, 128, 256),
        operand("bf16", 64, 256),
        operand("i32", 4),
    )
    bias = operand("bf16", 256)
    for more in ({}, {"out": out}):
        scalars(lambda more=more, **scalar: ac.grouped_gemm(a, b, offsets=ends, **more, **scalar))
        kept(*(lambda more=more, d=d: ac.grouped_gemm(a, b, offsets=ends, scale_d=d, **more) for d in (2.0, 3)))
        biased = {"bias": bias, "activation": "relu", "out_dtype": D.BF16, **more}
        kept(lambda how=biased: ac.grouped_gemm(a, b, counts=ends, **how))
    groups = [("f16", 64, 128), ("f16", 4, 128, 256), ("i32", 4)]
    frameworks(lambda a, b, ends: ac.grouped_gemm(a, b, offsets=ends, out_dtype=D.F16), groups)
    refused(ac.InvalidOperandError, "fast_accum", lambda: ac.grouped_gemm(a, b, offsets=ends, out=out, fast_accum=1))
    refused(ac.InvalidOperandError, "so c is needed", lambda: ac.grouped_gemm(a, b, offsets=ends, out=out, beta=1.0))


def case_grouped_gemm_of_lists() -> None:
    nan = float("nan")
    for make in (operand, foreign):
        shapes = ((64, 128), (128, 256), (64, 256))
        a, b, out = ([make("bf16", *shape) for _ in range(3)] for shape in shapes)
        call = functools.partial(ac.grouped_gemm, a, b)
        kept(call, functools.partial(ac.grouped_gemm, tuple(a), tuple(b)))
        kept(*(functools.partial(call, alpha=alpha) for alpha in (2.0, np.float32(3))))
        kept(*(functools.partial(call, out=out, scale_a=scale) for scale in ([2.0] * 3, [3] * 3)))
        for scales in ([[nan], [2.0], [nan] * 3], [[2.0], [nan], [nan, np.float32(nan), nan]]):
            kept(*(functools.partial(call, out=out, scale_a=scale) for scale in scales))
        refused(ac.UnsupportedError, "must be the same", lambda call=call: call(scale_a=[nan, 2.0, nan]))
        call_module.kept_plans.clear()
        with fake_cases.parsed() as made:
            for _ in range(2):
                assert call(out=out) is out
            assert len(made) == 1


def case_groups_with_scales_are_planned_and_bound() -> None:
    shapes = [(64, 256, 384), (0, 256, 384), (96, 256, 384)]
    for scaling in ("tensor", "vector", "block"):
        request = ac.GroupedGemmRequest(
            ac.GroupedGemmShape([ac.GemmShape(*shape) for shape in shapes]), dtype=D.F8E4M3, scaling=scaling,
            layout_b=ac.GemmLayout.COL_MAJOR,
        )  # fmt: skip
        operation = operation_of(request)
        arrays = {
            slot.name: [
                _core.Operand(_place() << 38, spec.shape, spec.strides, spec.dtype.dlpack, 2, 0, False, None)
                for spec in slot.specs
            ]
            for slot in operation.operands(request)
        }  # fmt: skip
        a, b, scale_a, scale_b, out = arrays.values()

        def steps(call: Callable[[], Any]) -> list[str]:
            GPU._library.golden_notes()
            call()
            return list(GPU._steps([f"array {place}" for place in range(60)]))

        call = steps(functools.partial(ac.grouped_gemm, a, b, scale_a=scale_a, scale_b=scale_b, out=out))
        plan = ac.plan(request)
        assert steps(functools.partial(plan, *a, *b, *scale_a, *scale_b, *out)) == call
        bound = ac.plan(request, b=b)
        assert list(bound.binding.operands) == [f"b[{g}]" for g in range(3)]
        assert steps(functools.partial(bound, *a, *scale_a, *scale_b, *out)) == call
        bound.refit(b, stream=0)
        assert steps(functools.partial(bound, *a, *scale_a, *scale_b, *out)) == call
        turned = functools.partial(plan, *a, *b, *scale_b, *scale_a, *out)
        if scaling == "tensor":  # of the same shape
            assert steps(turned) != call
        else:
            refused(ac.InvalidOperandError, r"scale_a\[0\] is float32 of shape", turned)


def case_matmul() -> None:
    for make in (operand, foreign):
        a, b, d, aux = make("bf16", 128, 64), make("bf16", 256, 128), make("bf16", 256, 64), make("bf16", 256, 64)

        def call(a: Any = a, b: Any = b, **more: Any) -> Any:
            return ac.matmul(ac.MatmulRequest(a, b, **({"m": 64, "n": 256, "k": 128} | more)))

        made = [launched(functools.partial(call, out_dtype=asked))[-1] for asked in (D.F32, None)]
        assert made == ["2:32[256, 64]", "4:16[256, 64]"], made
        aux_form = {"d": d, "epilogue": ac.MatmulEpilogue.GELU_AUX, "gelu_aux": aux}
        for more in ({}, {"out_dtype": D.F32}, {"d": d}, aux_form):
            kept(*(functools.partial(call, alpha=alpha, **more) for alpha in (2.0, 3, np.float32(2))))
            kept(*(functools.partial(call, scales=ac.ScaleSet(scale), **more) for scale in (2.0, 3, np.float32(2))))
        for c in (d, make("bf16", 256, 64)):
            kept(*(functools.partial(call, c=c, d=d, beta=beta) for beta in (1.0, 2)))
        call_module.kept_plans.clear()
        with fake_cases.parsed() as made:
            calls = [{}, {"d": d}, {"c": d}, {"d": d, "workspace_size": 1 << 20}, {"d": d, "jit": "off"}]
            calls += [{"d": d, "a": make("bf16", 64, 128), "transa": True}, {"d": d, "scales": ac.ScaleSet(d=2.0)}]
            for more in (*calls, *calls):
                assert call(**more) is more.get("d", more.get("c")) or not more
            assert len(made) == len(calls)


def case_matmuls_that_read_no_operand_have_plans_of_their_own() -> None:
    """Without a product scales on the device are left out of the plan."""
    a, b, rows = operand("e4m3", 64, 128), operand("e4m3", 256, 128), operand("f32", 256)
    call_module.kept_plans.clear()

    def call(**more: Any) -> list[str]:
        given = {"m": 64, "n": 256, "k": 128, "transa": True, "scales": ac.ScaleSet(b=rows)} | more
        return launched(lambda: ac.matmul(ac.MatmulRequest(a, b, **given)))

    want = call()
    for nothing in ({"alpha": 0.0}, {"scales": ac.ScaleSet(0.0, rows)}, {"scales": ac.ScaleSet(b=rows, d=0)}):
        assert call(**nothing) != want
        assert call(**nothing) != want
        assert call() == want


def case_numbers_that_no_kernel_takes_are_refused_where_others_have_a_plan() -> None:
    a, b, x, w = (
        operand("bf16", 64, 128),
        operand("bf16", 128, 256),
        operand("bf16", 2, 8, 8, 64),
        operand("bf16", 64, 3, 3, 64),
    )
    ends = operand("i32", 4)
    refusing = functools.partial(ac.grouped_gemm, a, operand("bf16", 4, 128, 256), offsets=ends, activation="relu")
    refused(ac.UnsupportedError, "scale_d", functools.partial(refusing, scale_d=2.0))
    kept(refusing)
    refused(ac.UnsupportedError, "scale_d", functools.partial(refusing, scale_d=2.0))
    calls: list[Callable[..., Any]] = [
        functools.partial(ac.gated_gemm, a, b),
        functools.partial(ac.conv2d, x, w, activation="relu"),
        functools.partial(ac.conv2d, x, w, bias=operand("bf16", 64)),
    ]
    for call in calls:
        kept(functools.partial(call, scale_d=1.0), functools.partial(call, scale_d=1))
        for scale in (2.0, np.float32(0.5), 0):
            refused(ac.UnsupportedError, "scale_d", functools.partial(call, scale_d=scale))
    for call in (*calls, functools.partial(ac.gemm, a, b)):
        kept(functools.partial(call, scale_a=2.0))
        refused(ac.CutlassError, "a list", functools.partial(call, scale_a=[2.0]))


def case_sums_share_no_memory_with_other_arrays() -> None:
    """Their plan knows one of the operands only."""
    a, b, c, d = operand("bf16", 128, 64), operand("bf16", 256, 128), operand("bf16", 256, 64), operand("bf16", 256, 64)
    ac.matmul(
        ac.MatmulRequest(
            a, b, c=c, d=d, beta=1.0, bias=operand("f32", 64), m=64, n=256, k=128, epilogue=ac.MatmulEpilogue.BGRADA
        )
    )
    for pointer, read_only in ((b.pointer, False), (c.pointer, False), (d.pointer, False), (_place() << 38, True)):
        sums = _core.Operand(pointer, (64,), None, D.F32.dlpack, 2, 0, read_only, None)
        request = ac.MatmulRequest(
            a, b, c=c, d=d, beta=1.0, bias=sums, m=64, n=256, k=128, epilogue=ac.MatmulEpilogue.BGRADA
        )
        refused(ac.InvalidOperandError, "overlaps|read-only", functools.partial(ac.matmul, request))


def case_the_environment_says_which_calls_are_batch_invariant() -> None:
    a, b, x = operand("bf16", 64, 128), operand("bf16", 128, 256), operand("bf16", 128)
    image, taps, wide = operand("bf16", 2, 8, 8, 64), operand("bf16", 64, 3, 3, 64), operand("f32", 128, 256)
    call_module.kept_plans.clear()
    for call in (
        lambda: ac.gemm(a, b),
        lambda: ac.gated_gemm(a, b),
        lambda: ac.grouped_gemm([a], [b]),
        lambda: ac.matmul(ac.MatmulRequest(b, a, m=256, n=64, k=128)),
        lambda: ac.conv2d(image, taps, padding=1),
        lambda: ac.conv2d_dgrad(image, taps, (2, 8, 8, 64), padding=1),
    ):
        assert len(_parsed_by_variable(call)) == 2
    # These have no such option, and the variable does not count.
    gradient = functools.partial(ac.conv2d_wgrad, image, image, (64, 3, 3, 64), padding=1)
    for call in (lambda: ac.gemv(a, x), gradient, lambda: ac.quantize(wide)):
        (parsed,) = _parsed_by_variable(call)
        assert parsed.options.batch_invariant is False


def _parsed_by_variable(call: Callable[[], Any]) -> list[Any]:
    """The calls that are parsed while the variable says now this and now that."""
    with fake_cases.parsed() as made, pytest.MonkeyPatch.context() as patch:
        for value in ("0", "1", "0", "1"):
            patch.setenv("ATOMR_CUTLASS_BATCH_INVARIANT", value)
            call()
    return made


def case_a_limit_of_workspace_makes_other_plans() -> None:
    x, w = operand("bf16", 2, 8, 8, 64), operand("bf16", 64, 3, 3, 64)
    a, b, ends = operand("bf16", 64, 128), operand("bf16", 128, 256), operand("i32", 4)
    calls: list[Callable[..., Any]] = [
        functools.partial(ac.gemm, a, b),
        functools.partial(ac.gemm, a, b, bias=operand("bf16", 256)),
        functools.partial(ac.gated_gemm, a, b),
        functools.partial(ac.grouped_gemm, a, operand("bf16", 4, 128, 256), counts=ends),
        functools.partial(ac.conv2d, x, w, padding=1),
        functools.partial(ac.conv2d_dgrad, x, w, (2, 8, 8, 64), padding=1),
        functools.partial(ac.conv2d_wgrad, x, x, (64, 3, 3, 64), padding=1),
    ]
    for call in calls:
        kept(functools.partial(call, workspace_size=1 << 40))
        with fake_cases.parsed() as made:
            call()
            assert len(made) == 1
        for wrong in (-1, 1.5, True, "1"):
            refused(ac.InvalidOperandError, "workspace_size is", functools.partial(call, workspace_size=wrong))


def case_gemm_with_trees() -> None:
    a, b, bias = operand("bf16", 64, 128), operand("bf16", 128, 256), operand("bf16", 256)
    tree = ac.EvtBuilder().add_bias("bias", dtype=D.BF16).activation("silu").build()
    kept(lambda: ac.gemm(a, b, bias=bias, epilogue=tree))
    kept(*(lambda alpha=alpha: ac.gemm(a, b, bias=bias, epilogue=tree, alpha=alpha) for alpha in (1, np.float64(2))))
    refused(ac.InvalidOperandError, "no operand other", lambda: ac.gemm(a, b, bias=bias, epilogue=tree, other=bias))


def case_functions_may_compute_something_else_next_time() -> None:
    a, b, bias = operand("bf16", 64, 128), operand("bf16", 128, 256), operand("bf16", 256)
    call_module.kept_plans.clear()
    with fake_cases.parsed() as made:
        for _ in range(2):
            ac.gemm(a, b, bias=bias, epilogue=lambda acc, bias: acc + bias)
    assert (len(made), len(call_module.kept_plans)) == (2, 0)


def case_a_plan_keeps_no_array_alive() -> None:
    call_module.kept_plans.clear()
    bias, tree = (
        operand("bf16", 256),
        ac.EvtBuilder().add_bias("bias", dtype=D.BF16).aux_store("sums", dtype=D.BF16).build(),
    )
    ac.gemm(operand("bf16", 64, 128), operand("bf16", 128, 256), bias=bias, epilogue=tree)
    assert len(call_module.kept_plans) == 1
    (kept_plan,) = call_module.kept_plans.plans
    seen, reached = set(), [kept_plan]
    while reached:
        found = reached.pop()
        if id(found) not in seen and not isinstance(found, (type, types.ModuleType, types.FunctionType)):
            seen.add(id(found))
            reached += gc.get_referents(found)
    assert id(bias) not in seen


def case_results_are_the_callers_arrays() -> None:
    tree = ac.EvtBuilder().add_bias("bias", dtype=D.BF16).aux_store("sums", dtype=D.BF16).build()
    for make in (operand, foreign):
        a, b, out = make("bf16", 64, 128), make("bf16", 128, 256), make("bf16", 64, 256)
        given = {"bias": make("bf16", 256), "sums": make("bf16", 64, 256)}
        for _ in range(3):
            assert ac.gemm(a, b, out=out) is out
            made = ac.gemm(a, b, out=out, epilogue=tree, **given)
            assert made["out"] is out
            assert made["sums"] is given["sums"]


@contextmanager
def without_the_best(call: Callable[[], Any]) -> Iterator[tuple[str, list[Callable[[], None]]]]:
    """A table without the matrix's best kernel for a call: its name, and what is to be done once it is compiled."""
    best = launched(functools.partial(call, backend="jit"))[0]
    call_module.kept_plans.clear()
    compiled: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:
        fake_table.install(patch, [info for info in table.rows() if info.key.name != best])
        patch.setattr(select, "WORTHWHILE", 1e9)
        patch.setattr(kernels, "in_background", lambda _key, _device, then: compiled.append(then))
        yield best, compiled
    call_module.kept_plans.clear()


def background_calls() -> list[Callable[..., Any]]:
    """A call of each operation whose plans switch to better kernels."""
    a, b, bias = operand("bf16", 512, 256), operand("bf16", 256, 512), operand("bf16", 512)
    wide = operand("bf16", 256, 512, columns=True)
    narrow, columns, scale = operand("e4m3", 512, 256), operand("e4m3", 256, 512, columns=True), operand("f32", 1)
    x, w = operand("bf16", 4, 32, 32, 64), operand("bf16", 64, 3, 3, 64)
    rows, matrices, ends = operand("bf16", 512, 256), operand("bf16", 4, 256, 512), operand("i32", 4)
    return [
        lambda **how: ac.gemm(a, b, **how),
        lambda **how: ac.gemm(a, wide, bias=bias, activation="gelu", **how),
        lambda **how: ac.gemm(narrow, columns, scale_a=scale, **how),
        lambda **how: ac.conv2d(x, w, padding=1, **how),
        lambda **how: ac.grouped_gemm(rows, matrices, offsets=ends, **how),
    ]


def case_better_kernels_take_over() -> None:
    for call in background_calls():
        again = functools.partial(call, jit="background")
        with without_the_best(call) as (best, compiled), fake_cases.parsed() as made:
            before = launched(again)
            assert best not in before[0], (best, before)
            assert len(compiled) == 1
            assert launched(again)[0] == before[0]
            compiled[0]()
            assert launched(again)[0] == best
            assert len(made) == 1


def case_epilogues_are_not_validated_in_the_background() -> None:
    def require(*_: Any, in_background: bool, **__: Any) -> bool:
        return not in_background

    trees = [call for number, call in enumerate(background_calls()) if number == 1]
    for call in trees:
        again = functools.partial(call, jit="background")
        with (
            without_the_best(call) as (best, compiled),
            fake_cases.parsed() as made,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(validate, "require", require)
            before = launched(again)[0]
            compiled[0]()
            patch.setattr(kernels, "ready", lambda _key, _device: True)
            assert launched(again)[0] == best != before  # planned anew, in the thread of the call
            assert len(made) == 2
            assert launched(again)[0] == best
            assert len(made) == 2


def case_quantize() -> None:
    for scaling in ("tensor", "row", "block", "tile", "mxfp4"):
        frameworks(lambda x, s=scaling: ac.quantize(x, scaling=s), [("f32", 128, 256)])
    x = operand("f32", 128, 256)
    kept(*(lambda s=s: ac.quantize(x, scaling="nvfp4", global_scale=s)[:2] for s in (0.5, 2, np.float32(0.3))))
    for wrong in (0.0, -1, float("inf"), float("nan"), 1e39, 1e-60, True, "1", None):
        refused(ac.InvalidOperandError, "global_scale", lambda s=wrong: ac.quantize(x, scaling="nvfp4", global_scale=s))
    kept(lambda: ac.quantize(x, scaling="row"), lambda: ac.quantize(x, scaling="row", global_scale=1))
    refused(ac.InvalidOperandError, "global_scale", lambda: ac.quantize(x, scaling="row", global_scale=2))
    x = operand("f32", 128, 256)
    assert ac.quantize(x, scaling="nvfp4", global_scale=0.25).global_scale == 0.25
    assert ac.quantize(x, scaling="nvfp4", global_scale=0.5).global_scale == 0.5


def case_dequantize() -> None:
    arrays = [("e4m3", 128, 256), ("f32", 128, 1)]
    frameworks(lambda *given: ac.dequantize(*given, scaling="row", out_dtype=D.BF16), arrays)
    packed, scales = operand("u8", 128, 128), operand("e4m3", 2048)
    kept(*(lambda s=s: ac.dequantize(packed, scales, scaling="nvfp4", global_scale=s) for s in (0.5, 2, np.float32(3))))
    call = functools.partial(ac.dequantize, packed, scales, scaling="nvfp4")
    for wrong in (0.0, -1, float("inf"), float("nan"), 1e39, 1e-60, True, "1", None):
        refused(ac.InvalidOperandError, "global_scale", lambda s=wrong: call(global_scale=s))


def nchw(make: Callable[..., Any], dtype: str, n: int, h: int, w: int, c: int) -> Any:
    """An image or a filter whose dimensions are named in the order of NCHW, channels last in memory."""
    if make is tensor:
        return dlpack_arrays.Tensor(tensor(dtype, n, h, w, c).memory.transpose(0, 3, 1, 2), device=(2, 0))
    if make is operand:
        return layouts.permuted(operand(dtype, n, h, w, c), layouts.TO_NCHW)
    return golden_gpu.Array(_place() - 1, dtype, (n, c, h, w), (h * w * c, 1, w * c, c))


CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    "nhwc": lambda a, b, *rest, **more: ac.conv2d(a, b, *rest, padding=1, **more),
    "nchw": lambda a, b, *rest, **more: ac.conv2d(a, b, *rest, padding=1, layout="nchw", **more),
    "dgrad": lambda a, b, *rest, **more: ac.conv2d_dgrad(a, b, [2, 9, 9, 64], *rest, padding=1, **more),
    "wgrad": lambda a, b, *rest, **more: ac.conv2d_wgrad(a, b, (64, 3, 3, 64), *rest, padding=1, **more),
}


def case_convolutions() -> None:
    image, taps = (2, 9, 9, 64), (64, 3, 3, 64)
    for name, convolve in CONVOLUTIONS.items():
        shapes = (image, image, taps) if name == "wgrad" else (image, taps, image)
        for make in (operand, foreign):
            placed = functools.partial(nchw, make) if name == "nchw" else make
            a, b, out = (placed("bf16", *shape) for shape in shapes)
            for more in ({}, {"out": out}):
                scalars(lambda _a=a, _b=b, _convolve=convolve, **given: _convolve(_a, _b, **given), **more)
                kept(lambda a=a, b=b, more=more, convolve=convolve: convolve(a, b, out_dtype=D.BF16, **more))
                for c in (placed("bf16", *shapes[2]), out):
                    kept(
                        *(
                            lambda a=a, b=b, c=c, beta=beta, more=more, convolve=convolve: convolve(
                                a, b, c, beta=beta, **more
                            )
                            for beta in (1.0, 2, np.float32(3))
                        )
                    )
        refused(ac.InvalidOperandError, "c is given", lambda a=a, b=b, c=c, convolve=convolve: convolve(a, b, c))


def case_new_results_of_convolutions_are_in_the_callers_order() -> None:
    x, w = nchw(tensor, "f16", 2, 9, 9, 64), nchw(tensor, "f16", 64, 3, 3, 64)
    tree = ac.EvtBuilder().activation("relu").aux_store("sums", dtype=D.F16).reduce("total", "row").build()
    call_module.kept_plans.clear()
    for warm in (False, True, True):
        with pytest.MonkeyPatch.context() as patch:
            if warm:
                patch.setattr(layouts, "permuted", None)
            plain = ac.conv2d(x, w, padding=1, layout="nchw")
            made = ac.conv2d(x, w, padding=1, layout="nchw", epilogue=tree)
        assert made["total"].shape == (64,)
        for result in (plain, made["out"], made["sums"]):
            assert result.shape == (2, 64, 9, 9)
            assert [stride // 2 for stride in result.memory.strides] == [9 * 9 * 64, 1, 9 * 64, 64]


def case_convolutions_with_epilogues() -> None:
    tree = ac.EvtBuilder().add_bias("bias", dtype=D.BF16).activation("silu").reduce("sums", "row").build()
    for name in ("nhwc", "nchw", "dgrad"):
        convolve = CONVOLUTIONS[name]
        for make in (operand, foreign):
            placed = functools.partial(nchw, make) if name == "nchw" else make
            a, b, c = placed("bf16", 2, 9, 9, 64), placed("bf16", 64, 3, 3, 64), placed("bf16", 2, 9, 9, 64)
            given: dict[str, Any] = {"bias": make("bf16", 64)}
            for changes in ({"activation": "relu"}, {"activation": "relu", "c": c, "beta": 2.0}, {"epilogue": tree}):
                kept(lambda a=a, b=b, more=given | changes, convolve=convolve: convolve(a, b, **more))


def case_plans_of_convolutions_belong_to_all_that_they_depend_on() -> None:
    x, w, bias = operand("f32", 2, 9, 9, 64), operand("f32", 64, 3, 3, 64), operand("f32", 64)
    tree = ac.EvtBuilder().activation("relu").build()
    changes: list[dict[str, Any]] = [
        {}, {"stride": 2}, {"padding": (1, 1)}, {"dilation": 2}, {"c": operand("f32", 2, 7, 7, 64), "beta": 1.0},
        {"activation": "relu"}, {"precision": "tf32"}, {"backend": "jit"}, {"jit": "off"}, {"bias": bias},
        {"epilogue": tree, "precision": "tf32"}, {"out": operand("f32", 2, 7, 7, 64)},
    ]  # fmt: skip
    with fake_cases.parsed() as made:
        call_module.kept_plans.clear()
        for _ in range(2):
            for change in changes:
                ac.conv2d(x, w, **change)
            ac.conv2d_dgrad(operand("f32", 2, 5, 5, 64), w, (2, 9, 9, 64), stride=2, padding=1)
            ac.conv2d_dgrad(operand("f32", 2, 5, 5, 64), w, (2, 10, 9, 64), stride=2, padding=1)
    assert len(made) == len(changes) + 2


def case_a_kept_plan_launches_on_the_arrays_own_stream() -> None:
    """Also where it takes them in another order of dimensions, or a list of them."""
    x, w, y = (nchw(tensor, "f16", *shape) for shape in ((2, 9, 9, 64), (64, 3, 3, 64), (2, 7, 7, 64)))
    a, b = tensor("f16", 64, 128), tensor("f16", 128, 256)
    for call in (
        lambda **more: ac.conv2d(x, w, layout="nchw", out=y, **more),
        lambda **more: ac.grouped_gemm([a, a], [b, b], **more),
        lambda **more: ac.gemm(a, b, **more),
    ):
        call_module.kept_plans.clear()
        with fake_cases.parsed() as made:
            for stream in (5, 6, 7):
                dlpack_arrays.CURRENT_STREAM[0] = stream
                assert streams(call) == {str(stream)}
                assert streams(functools.partial(call, stream=3)) == {"3"}
            dlpack_arrays.CURRENT_STREAM[0] = 0
            assert len(made) == 1


def case_plans_of_convolutions_keep_to_their_workspace() -> None:
    shape = ac.ConvShape.nhwc(32, 56, 56, 64, 64, 3, 3, padding=1)
    problem = ac.ConvWgradRequest(shape, dtype=D.BF16, out_dtype=D.F32).problem(0)
    needed = conv_plans.make(problem).workspace_bytes
    assert needed > 0
    assert conv_plans.make(problem, workspace_size=needed).workspace_bytes == needed
    assert conv_plans.make(problem, workspace_size=needed - 1).workspace_bytes < needed
    narrow = ac.ConvWgradRequest(shape, dtype=D.F8E4M3).problem(0)  # operands are cast, whatever the kernel
    refused(ac.UnsupportedError, "bytes of workspace", lambda: conv_plans.make(narrow, workspace_size=0))
    refused(ac.InvalidOperandError, "a plan's backend is 'cpu'", lambda: conv_plans.make(problem, backend="cpu"))


if __name__ == "__main__":
    GPU = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    GPU._table = "full"
    fake_cases.run(globals())
