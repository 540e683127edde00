"""Cases that `test_matmul.py` runs in a process whose driver and kernels are fakes: from `matmul` to the C ABI.

Plain kernels come from a pack; kernels with epilogue trees are "compiled at run time" by the system's C compiler, from
the program in their key. Every function named `case_...` is a test, as in `pipeline_cases`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import types
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import dlpack_arrays
import fake_cases
import fake_kernels
import fake_table
from atomr_cutlass import MatmulEpilogue as E
from atomr_cutlass import MatmulRequest, ScaleSet, _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.epilogue import validate
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.jit import kernels
from atomr_cutlass.ops.matmul import function
from atomr_cutlass.ops.matmul.operation import HeuristicKey
from atomr_cutlass.pipeline import table
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.heuristic import heuristics
from matmul_formulas import FORMS, GUARD, Array, Case, memory, numbers, read, wide
from pipeline_cases import Tensor, matrix, refused

_libraries: dict[str, bytes] = {}
_folder = tempfile.TemporaryDirectory()


@contextlib.contextmanager
def compiler() -> Iterator[list[KernelKey]]:
    """Compiles kernels with trees, once for all cases; gives the keys of those that were asked for."""
    compiled: dict[str, Any] = {}
    keys: list[KernelKey] = []
    with pytest.MonkeyPatch.context() as patch:

        def kernel(key: KernelKey, _device: Any) -> Any:
            if key.name not in compiled:
                if key.name not in _libraries:
                    library = Path(_folder.name) / f"{len(_libraries)}.so"
                    _libraries[key.name] = fake_kernels.compile_at_run_time(library, key)
                image = _libraries[key.name]
                compiled[key.name] = _core.JitKernel(key.name, key.to_json(), image, image)
                keys.append(key)
            return compiled[key.name]

        patch.setattr(kernels, "kernel", kernel)
        patch.setattr(kernels, "image_digest", lambda key, _device: key.digest)
        patch.setenv(kernels.POLICY_VARIABLE, "auto")
        forget()
        yield keys
    forget()


def forget() -> None:
    """Drops plans and what is known of kernels."""
    kept_plans.clear()
    heuristics.clear()


def held(array: Array, *, read_only: bool = False) -> _core.Operand:
    """A GPU array that is read without Python, as PyTorch's are."""
    dtype = (1, 8) if array.dtype == np.uint8 else (2, 8 * array.itemsize)
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.Operand(array.ctypes.data, array.shape, strides, dtype, operands.CUDA, 0, read_only, array)


SMALL: dict[str, Any] = {"m": 11, "n": 6, "k": 5, "epilogue": E.GELU_AUX}


def product(a: Any, b: Any, *arrays: Any, m: int, n: int, k: int, **arguments: Any) -> Any:
    return ac.matmul(MatmulRequest(a, b, *arrays, m=m, n=n, k=k, **arguments))


# ----------------------------------------------------------------------------------------------------------------------


def case_every_epilogue_on_gpu_arrays() -> None:
    all_of_f32 = tuple(itertools.product((np.float32,), (False, True), (False, True)))
    with compiler() as compiled:
        for epilogue, (dtype, transa, transb) in itertools.product(E, (*all_of_f32, (np.float64, True, False))):
            for pad, beta in ((0, 0.0), (3, -2.0), (4, 0.0)):
                case = Case(epilogue, dtype, dtype, transa, transb, pad, beta)
                request = case.request(Tensor)
                assert ac.matmul(request) is request.d
                case.check(cleared=True)
        assert len(compiled) > 20


def case_every_epilogue_on_host_arrays() -> None:
    with compiler():
        for epilogue in E:
            case = Case(epilogue, np.float32, np.float32, FORMS[epilogue].masked, not FORMS[epilogue].aux, 2, 1.0)
            request = case.request()
            assert ac.matmul(request) is request.d
            case.check()
            made = ac.matmul(Case(epilogue, np.float32, np.float32).request(d=None, ldd=None, ldc=None))
            np.testing.assert_allclose(made.T, Case(epilogue, np.float32, np.float32).want.d, rtol=1e-5, atol=1e-6)


def case_extents_of_one() -> None:
    with compiler():
        for epilogue, extents in itertools.product(E, ((1, 1, 1), (1, 9, 3), (9, 1, 3), (17, 2, 1), (8, 3, 2))):
            for pad in (0, 5):
                case = Case(epilogue, np.float32, np.float32, pad=pad, beta=1.0, extents=extents)
                ac.matmul(case.request(Tensor))
                case.check(cleared=True)


def case_results_without_elements() -> None:
    with compiler() as compiled:
        for m, n in ((0, 3), (3, 0), (0, 0)):
            for epilogue in (E.DEFAULT, E.DRELU_BGRAD, E.DGELU_BGRAD, E.BGRADA, E.BGRADB):
                length = n if epilogue is E.BGRADB else m
                bias = np.full(length, 9, np.float32)
                aux = np.zeros(n * -(-m // 8), np.uint8) if FORMS[epilogue].masked else np.zeros(n * m, np.float32)
                given = {"bias": Tensor(bias)} if FORMS[epilogue].takes_bias else {}
                given |= {"gelu_aux": Tensor(aux)} if FORMS[epilogue].aux else {}
                a, b = np.ones(m * 4, np.float32), np.ones(4 * n, np.float32)
                amax = np.full(1, 9, np.float32)
                if not FORMS[epilogue].summed:  # those of products are read to the host
                    given |= {"scales": ScaleSet(amax_d=Tensor(amax)), "stream": 777}
                with fake_cases.no_waiting() if "stream" in given else contextlib.nullcontext():
                    product(Tensor(a), Tensor(b), m=m, n=n, k=4, epilogue=epilogue, **given)
                assert amax == (9 if FORMS[epilogue].summed else 0)
                assert (bias == (4 if FORMS[epilogue].summed else 9 if epilogue is E.DEFAULT else 0)).all()
        assert compiled == []


def case_products_with_nothing_to_multiply() -> None:
    nan, c = np.full(12, np.nan, np.float32), numbers(4, 3, np.float32, 1)
    d = np.zeros(12, np.float32)
    product(Tensor(nan), Tensor(nan), Tensor(memory(c)), Tensor(d), m=4, n=3, k=3, alpha=0.0, beta=2.0)
    np.testing.assert_array_equal(d, memory(2 * c))
    empty = np.empty(0, np.float32)
    product(Tensor(empty), Tensor(empty), Tensor(memory(c)), Tensor(d), m=4, n=3, k=0, beta=3.0)
    np.testing.assert_array_equal(d, memory(3 * c))
    bias = np.full(4, 9, np.float32)
    product(Tensor(empty), Tensor(empty), d=Tensor(d), m=4, n=3, k=0, epilogue=E.BGRADA, bias=Tensor(bias))
    assert (bias == 0).all()
    refused(
        ac.UnsupportedError, "K is 0: there is nothing for scales to multiply or an epilogue to follow",
        lambda: product(Tensor(empty), Tensor(empty), d=Tensor(d), m=4, n=3, k=0, epilogue=E.RELU),
    )  # fmt: skip


def case_results_may_be_c_or_new() -> None:
    a, b, c = numbers(4, 5, np.float32, 1), numbers(5, 6, np.float32, 2), numbers(4, 6, np.float32, 3)
    held = memory(c)
    given = Tensor(held)
    assert product(Tensor(memory(a)), Tensor(memory(b)), given, m=4, n=6, k=5, beta=2.0) is given
    np.testing.assert_array_equal(held, memory(a @ b + 2 * c))
    made = product(Tensor(memory(a)), Tensor(memory(b)), m=4, n=6, k=5)
    assert made.shape == (6, 4)
    np.testing.assert_array_equal(operands.download(made).T, a @ b)


def case_plans_are_kept_and_used_again() -> None:
    with compiler() as compiled:
        for epilogue in (E.DEFAULT, E.GELU_AUX_BIAS, E.BGRADA):
            forget()
            for turn in range(3):
                case = Case(epilogue, np.float32, np.float32, beta=1.0 + turn)
                ac.matmul(case.request(Tensor))
                case.check()
            assert len(kept_plans) == 1
        assert len(compiled) == 1


def case_requests_that_lie_alike_are_launched_without_another_look() -> None:
    with compiler(), fake_cases.parsed() as calls:
        for epilogue in E:
            calls.clear()
            for turn in range(3):
                case = Case(epilogue, np.float32, np.float32, turn > 5, pad=2, beta=2.0 - turn)
                case.alpha *= 2**turn
                reply: Future[Any] = Future()
                request = case.request(held, reply=reply)
                assert ac.matmul(request) is request.d is reply.result(0)
                case.check(cleared=True)
            # With beta = 0, as in the last turn, there is no C.
            assert len(calls) == 2, epilogue
        for _ in range(2):
            case = Case(E.RELU, np.float32, np.float32)
            made = ac.matmul(case.request(held, d=None, ldd=None, ldc=None))
            np.testing.assert_array_equal(operands.download(made).T, case.want.d)


def case_numeric_scales_count_at_every_launch() -> None:
    """Also at those of requests that differ from an earlier one in nothing but a scale."""
    with compiler():
        given = [(None, None, None), (0.5, 4.0, -2.0), (2, None, 3), (None, 0.0, None)]
        # Like each of them but for the numbers: served by a kept plan, or, after a 0, by another.
        given += [(2.0, 0.25, 3.0), (-1.0, None, 0.5), (None, 2.0, None), (None, 0.0, None)]
        for scale_a, scale_b, scale_d in given:
            case = Case(E.DEFAULT, np.float32, np.float32, beta=2.0)
            times = (1 if scale_d is None else scale_d) * np.float32(1)
            product = (1 if scale_a is None else scale_a) * (1 if scale_b is None else scale_b) * wide(case.a @ case.b)
            ac.matmul(case.request(held, scales=ScaleSet(scale_a, scale_b, scale_d)))
            want = times * (case.alpha * product + 2 * wide(case.c))
            np.testing.assert_array_equal(read(case.arrays["d"], *want.shape), want)
        for epilogue in (E.RELU_BIAS, E.DGELU_BGRAD):
            for _ in range(2):
                ac.matmul(Case(epilogue, np.float32, np.float32).request(held))
            case = Case(epilogue, np.float32, np.float32)
            refused(
                ac.UnsupportedError, "scales.d is a number, and what follows the product",
                lambda case=case: ac.matmul(case.request(held, scales=ScaleSet(d=0.5))),
            )  # fmt: skip
            assert (case.arrays["d"] == GUARD).all()
        for scale_d in (None, 0.5):
            case, amax = Case(E.DEFAULT, np.float32, np.float32), np.zeros(1, np.float32)
            request = case.request(held, scales=ScaleSet(d=scale_d, amax_d=held(amax)))
            if scale_d is None:
                ac.matmul(request)
                continue
            refused(ac.UnsupportedError, "scales.d is a number", lambda request=request: ac.matmul(request))


def case_what_lies_alike_is_checked_all_the_same() -> None:
    with compiler():
        memory_of_all = np.zeros(400, np.float32)
        places = {"a": 0, "b": 100, "d": 200, "gelu_aux": 300}
        for _ in range(2):
            product(**{name: held(memory_of_all[at : at + 66]) for name, at in places.items()}, **SMALL)
        for name, at, says in (("a", 210, "d overlaps a"), ("gelu_aux", 110, "gelu_aux overlaps b")):
            moved = places | {name: at}
            refused(
                ac.InvalidOperandError, says,
                lambda moved=moved: product(
                    **{label: held(memory_of_all[at : at + 66]) for label, at in moved.items()}, **SMALL
                ),
            )  # fmt: skip
        fixed = {name: held(memory_of_all[at : at + 66], read_only=name == "d") for name, at in places.items()}
        refused(ac.InvalidOperandError, "d is read-only", lambda: product(**fixed, **SMALL))
        short = {name: held(memory_of_all[at : at + 54]) for name, at in places.items()}
        refused(ac.InvalidOperandError, "a has 54 elements; it reaches over 55", lambda: product(**short, **SMALL))


def case_what_requires_a_gradient_is_named_of_what_lies_alike_too() -> None:
    module = types.ModuleType("torch")
    vars(module)["is_grad_enabled"] = lambda: True
    memory_of_all = np.zeros(400, np.float32)

    def tensors(name: str = "") -> dict[str, Any]:
        places = {"a": 0, "b": 100, "d": 200, "gelu_aux": 300}
        return {
            label: dlpack_arrays.Tensor(
                memory_of_all[at : at + 66], device=(operands.CUDA, 0), requires_grad=label == name
            )
            for label, at in places.items()
        }  # fmt: skip

    with compiler(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", module)
        for _ in range(2):
            product(**tensors(), **SMALL)
        for name in tensors():
            says = f"{name} requires a gradient"
            refused(ac.InvalidOperandError, says, lambda name=name: product(**tensors(name), **SMALL))


def case_a_chosen_kernel_is_known() -> None:
    counts = []
    with compiler() as compiled:
        for pad in (4, 8):
            for epilogue in (E.DEFAULT, E.RELU_BIAS, E.DGELU_BGRAD):
                made = Case(epilogue, np.float32, np.float32, pad=pad)
                ac.matmul(made.request(Tensor))
                made.check()
                m, n, k = made.extents
                assert HeuristicKey(m, n, k, D.F32, False, False, epilogue, ac.SmArch.SM80) in heuristics
            counts.append((len(compiled), len(heuristics)))
    assert counts[0] == counts[1]


def case_gradients_replace_what_they_are_taken_at() -> None:
    with compiler():
        for pad, place in itertools.product((0, 5), (Tensor, held)):
            case = Case(E.DGELU_BGRAD, np.float32, np.float32, pad=pad)
            want, aux = case.want.d, case.arrays["gelu_aux"]
            given: Any = place(aux)
            for _ in range(2):
                aux[...] = Case(E.DGELU_BGRAD, np.float32, np.float32, pad=pad).arrays["gelu_aux"]
                assert ac.matmul(case.request(place, d=given, gelu_aux=given)) is given
                np.testing.assert_allclose(read(aux, 11, 6, 11 + pad), want, rtol=1e-5, atol=1e-6)


def case_epilogues_are_validated() -> None:
    with compiler(), pytest.MonkeyPatch.context() as patch:
        asked: list[str] = []
        patch.setattr(validate, "require", lambda candidate, *_, **__: asked.append(candidate.key.epilogue) is None)
        for epilogue in (E.DEFAULT, E.BGRADA, E.RELU_BIAS):
            ac.matmul(Case(epilogue, np.float32, np.float32).request(Tensor))
        assert len(asked) == 1
        summed = kept_plans.plans[1]
        assert (summed.checked, summed.request) == (True, None)
        refused(ac.InvalidOperandError, "made from no request", lambda: ac.BoundPlan(summed, Tensor(matrix(4, 4))))
        ac.matmul(Case(E.RELU_BIAS, np.float32, np.float32, pad=1).request(Tensor))
        assert len(asked) == 2  # it keeps what it found itself
    with compiler(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate.files, "recall_validation", lambda _identity: None)
        patch.setattr(validate.files, "remember_validation", lambda _identity, _wrong: None)
        patch.setenv(validate.VARIABLE, "on")
        validate._known.clear()
        case = Case(E.DGELU_BGRAD, np.float32, np.float32)
        ac.matmul(case.request(Tensor))
        case.check()
        assert set(validate._known.values()) == {""}


def case_a_kernel_that_may_change_is_not_remembered() -> None:
    forget()
    case = Case(E.DEFAULT, np.float32, np.float32)
    ac.matmul(case.request(Tensor, jit="background"))
    case.check()
    assert len(heuristics) == 0


def case_a_user_says_which_kernel() -> None:
    a, b, d = matrix(4, 5), matrix(5, 6), matrix(6, 4)
    forget()
    request = MatmulRequest(Tensor(a), Tensor(b), d=Tensor(d), m=4, n=6, k=5)
    ac.matmul(request)
    key = HeuristicKey(4, 6, 5, D.F32, False, False, E.DEFAULT, ac.SmArch.SM80)
    usual = heuristics.get(key)
    assert usual is not None
    wanted = [info.key for info in table.kernels() if info.key.layout_a + info.key.layout_b == "rr"]
    other = next(cell for cell in wanted if cell != usual and cell.align_d == 1)
    heuristics.put(key, other)
    ac.matmul(request)
    assert kept_plans.plans[0].kernel_name == other.name
    assert heuristics.get(key) == other
    np.testing.assert_array_equal(d.reshape(6, 4), b.reshape(6, 5) @ a.reshape(5, 4))
    # One that cannot serve is passed over.
    heuristics.put(key, next(info.key for info in table.kernels() if info.key.layout_a == "c"))
    ac.matmul(request)
    assert kept_plans.plans[0].kernel_name == usual.name


def case_the_workspace_is_bounded() -> None:
    """The best kernels ask for 64 bytes, others and compiled ones for none."""
    a, b, d = numbers(4, 5, np.float32, 1), numbers(5, 6, np.float32, 2), np.zeros(24, np.float32)

    def kernel(workspace_size: int | None, backend: str = "auto") -> str:
        forget()
        d[...] = GUARD
        given = {"workspace_size": workspace_size, "backend": backend, "d": Tensor(d)}
        product(Tensor(memory(a)), Tensor(memory(b)), m=4, n=6, k=5, **given)
        np.testing.assert_array_equal(d, memory(a @ b))
        (made,) = kept_plans.plans
        assert workspace_size is None or made.workspace_bytes <= workspace_size
        assert [plan.kernel.name for plan in heuristics._kernels._plans.values()] == [made.kernel_name]
        return str(made.kernel.origin)

    assert (kernel(None), kernel(64), kernel(63)) == ("pack greedy", "pack greedy", "pack modest")
    left, right = Tensor(memory(a).reshape(5, 4)), Tensor(memory(b).reshape(6, 5))
    request = ac.GemmRequest(ac.GemmShape(6, 4, 5), dtype=D.F32)
    for workspace_size, origin in ((None, "greedy"), (64, "greedy"), (63, "modest")):
        kept_plans.clear()
        ac.gemm(right, left, workspace_size=workspace_size)
        (kept,) = kept_plans.plans
        assert kept.origin == f"pack {origin}"
        assert ac.plan(request, workspace_size=workspace_size).origin == f"pack {origin}"
    rows = [info for info in table.kernels() if info.pack == "greedy"]
    with pytest.MonkeyPatch.context() as patch:
        fake_table.install(patch, rows)
        refused(
            ac.UnsupportedError, "needs 64 bytes of workspace; workspace_size is 63: give as much, or None",
            lambda: kernel(63),
        )  # fmt: skip
    with compiler():
        relu = Case(E.RELU, np.float32, np.float32)
        ac.matmul(relu.request(Tensor, workspace_size=0))
        relu.check()


def case_what_no_kernel_serves_is_refused_in_words() -> None:
    forget()
    case = Case(E.RELU, np.float32, np.float32)
    before = case.arrays["d"].copy()
    # ATOMR_CUTLASS_JIT is off here, and the table has no trees.
    refused(ac.KernelNotFoundError, "what is called A there is op(B)^T", lambda: ac.matmul(case.request(Tensor)))
    narrow = np.zeros(64, np.int8)
    refused(
        ac.UnsupportedError, "column-major with transa=True",
        lambda: product(Tensor(narrow), Tensor(narrow), m=4, n=4, k=4, backend="jit", jit="auto"),
    )  # fmt: skip
    refused(
        ac.UnsupportedError, "f16 operands give",
        lambda: product(
            Tensor(np.zeros(16, np.float16)), Tensor(np.zeros(16, np.float16)), d=Tensor(np.zeros(16)), m=4, n=4, k=4
        ),
    )  # fmt: skip
    np.testing.assert_array_equal(case.arrays["d"], before)
    assert len(heuristics) == 0


def case_captures_are_served_once_all_is_there() -> None:
    with compiler():
        for epilogue in (E.RELU, E.BGRADB):
            function._made_ones.clear()
            case = Case(epilogue, np.float32, np.float32)
            refused(ac.UnsupportedError, "is captured", lambda case=case: ac.matmul(case.request(Tensor, stream=777)))  # type: ignore[misc]
            assert (case.arrays["d"] == GUARD).all()
            ac.matmul(case.request(Tensor))
            again = Case(epilogue, np.float32, np.float32)
            ac.matmul(again.request(Tensor, stream=777))
            again.check()


def case_ones_are_shared_and_grow() -> None:
    function._made_ones.clear()
    for k in (3, 4096, 4097, 5):
        ones, bias = np.ones(k, np.float32), np.zeros(1, np.float32)
        product(Tensor(ones), Tensor(ones), m=1, n=1, k=k, epilogue=E.BGRADA, bias=Tensor(bias))
        assert bias == k
    assert [ones.shape for ones in function._made_ones[D.F32, 0]] == [(4096,), (8192,)]


def case_a_lost_context_is_told() -> None:
    a, b, d = matrix(4, 5), matrix(5, 6), matrix(6, 4)
    reply: Future[Any] = Future()
    request = MatmulRequest(Tensor(a), Tensor(b), d=Tensor(d), m=4, n=6, k=5, stream=666, reply=reply)
    lost: list[Any] = []
    actor = ac.CutlassActor(2, on_poisoned=lost.append)
    refused(ac.ContextPoisonedError, "ILLEGAL_ADDRESS", lambda: actor.handle(ac.CutlassMsg.Matmul(request)))
    assert isinstance(reply.exception(0), ac.ContextPoisonedError)
    later: Future[Any] = Future()
    again = MatmulRequest(Tensor(a), Tensor(b), d=Tensor(d), m=4, n=6, k=5, reply=later)
    refused(ac.ContextPoisonedError, "refused, since", lambda: actor.handle(ac.CutlassMsg.Matmul(again)))
    assert isinstance(later.exception(0), ac.ContextPoisonedError)
    assert len(lost) == 1


def case_an_actor_serves_gpu_arrays() -> None:
    with compiler():
        actor = ac.CutlassActor(2)
        case = Case(E.GELU_BIAS, np.float32, np.float32)
        reply: Future[Any] = Future()
        request = case.request(Tensor, reply=reply)
        assert actor.handle(ac.CutlassMsg.Matmul(request)) is request.d
        assert reply.result(0) is request.d
        case.check()
        captured = case.request(Tensor, stream=777)
        refused(
            ac.InvalidOperandError, "capture ac.matmul instead",
            lambda: actor.handle(ac.CutlassMsg.Matmul(captured)),
        )  # fmt: skip
        refused(
            ac.InvalidOperandError, "this actor works on cuda:1",
            lambda: ac.CutlassActor(2, device=1).handle(ac.CutlassMsg.Matmul(request)),
        )  # fmt: skip


def case_the_largest_magnitude_of_any_product() -> None:
    with compiler():
        for dtype in (np.float32, np.float64):
            case, amax = Case(E.DEFAULT, dtype, dtype), np.full(1, 9e9, dtype)
            ac.matmul(case.request(Tensor, scales=ScaleSet(amax_d=Tensor(amax))))
            case.check()
            assert amax == np.abs(case.want.d).max()


def case_written_arrays_are_checked_against_each_other() -> None:
    held = np.zeros(64, np.float32)
    for name, epilogue in (("bias", E.BGRADA), ("gelu_aux", E.GELU_AUX)):
        given: dict[str, Any] = {name: Tensor(held[8:])}
        refused(
            ac.InvalidOperandError, f"d overlaps {name}",
            lambda epilogue=epilogue, given=given: product(
                Tensor(matrix(16)), Tensor(matrix(16)), d=Tensor(held), m=4, n=4, k=4, epilogue=epilogue, **given
            ),
        )  # fmt: skip


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
    _folder.cleanup()
