"""Cases that `test_heuristics.py` runs in a process whose GPU only takes notes: kernels that a user names.

Every function named `case_...` is a test; those of every operation go through the registry.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import golden_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core, heuristics
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.pipeline import devices, planning, select, table, tuning
from atomr_cutlass.pipeline.operation import operation_of, planned_operations, request_from
from atomr_cutlass.pipeline.plan_cache import kept_plans
from atomr_cutlass.pipeline.request import Request, RequestOptions
from atomr_cutlass.pipeline.search import Candidate, KernelSearch

ARCH = SmArch.SM90A
GPU: golden_gpu.Gpu

CALLS: dict[str, Callable[..., Any]] = {
    "gemm": ac.gemm,
    "gated_gemm": ac.gated_gemm,
    "gemv": ac.gemv,
    "grouped_gemm": ac.grouped_gemm,
    "conv2d_fprop": ac.conv2d,
    "conv2d_dgrad": lambda dy, w: ac.conv2d_dgrad(dy, w, (8, 8, 8, 64)),
    "conv2d_wgrad": lambda dy, x: ac.conv2d_wgrad(dy, x, (64, 3, 3, 64)),
}
"""The function of each operation, called with the operands of its request."""


def requests(**values: Any) -> Iterator[Request]:
    """A request of each operation, as the command line makes it, if several kernels of the table serve it."""
    for name in planned_operations():
        request = request_from(name, RequestOptions(512, values))
        if any(others(request)):
            yield request


def search_of(request: Request) -> KernelSearch[Any]:
    """The kernels of a request on the GPU."""
    search = operation_of(request).search(request, devices.get())
    assert search is not None
    return search


def others(request: Request) -> Iterator[Candidate[Any]]:
    """The kernels of the table that serve a request, but for the one that is chosen."""
    chosen = select.choose(search_of(request))
    return (candidate for candidate in select.rank(search_of(request)) if candidate.key != chosen.key)


def useless(request: Request) -> KernelKey:
    """The key of a kernel of the operation that does not serve a request."""
    search = search_of(request)
    op = select.choose(search).key.op
    return next(info.key for info in table.kernels() if info.key.op == op and not search.serves(info.key))


def planned(request: Request, **options: Any) -> str:
    """The name of the kernel that a new plan of a request has."""
    return planning.plan(request, **options).main.key.name


def called(request: Request) -> str:
    """The name of the kernel that a call with the operands of a request has."""
    operation = operation_of(request)
    given: dict[str, Any] = {}
    for slot in operation.operands(request)[:-1]:
        arrays = [
            _core.Operand(place << 38, spec.shape, spec.strides, spec.dtype.dlpack, 2, 0, False, None)
            for place, spec in enumerate(slot.specs, 1 + 8 * len(given))
        ]
        given[slot.name] = arrays if slot.listed else arrays[0]
    CALLS[operation.name](**given)
    return str(kept_plans.plans[0].main.key.name)


def case_every_planned_operation_has_a_call() -> None:
    assert list(CALLS) == list(planned_operations())
    assert len(list(requests())) >= len(CALLS) - 1  # of a gated product `full` has one kernel for each pair of layouts


def case_a_user_names_the_kernel_of_a_request() -> None:
    for request in requests():
        usual, other = planned(request), next(others(request)).key
        assert heuristics.get(request) is None
        assert request not in heuristics
        heuristics.put(request, other)
        assert (heuristics.get(request), request in heuristics, len(heuristics)) == (other, True, 1)
        for jit in ("auto", "background", "off"):
            assert planned(request, jit=jit) == other.name
        explained = ac.explain(request)
        assert explained.kernel == other.name
        assert "heuristics name this kernel for the request" in explained.notes
        heuristics.put(request, useless(request))  # which is passed over
        assert planned(request) == ac.explain(request).kernel == usual
        heuristics.clear()
        assert planned(request) == usual


def case_calls_of_arrays_follow_requests() -> None:
    for request in requests():
        usual, other = called(request), next(others(request)).key
        assert called(request) == usual
        heuristics.put(request, other)
        assert len(kept_plans) == 0
        assert called(request) == called(request) == other.name
        assert len(kept_plans) == 1
        heuristics.put(request, useless(request))
        assert called(request) == usual
        heuristics.put(request, other)
        assert called(request) == other.name
        heuristics.clear()
        assert called(request) == usual


def case_a_kernel_that_is_named_while_a_call_is_planned_serves_the_next() -> None:
    for request in requests():
        usual, other = called(request), next(others(request)).key
        kept_plans.clear()

        def decide(*given: Any, request: Any = request, other: KernelKey = other, **named: Any) -> Any:
            found = select.decide(*given, **named)
            heuristics.put(request, other)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "select", types.SimpleNamespace(**{**vars(select), "decide": decide}))
            assert called(request) == usual
        assert called(request) == other.name
        heuristics.clear()


def case_calls_with_scales_follow_requests() -> None:
    for scaling in ("tensor", "vector"):
        for operation in planned_operations().values():
            if "scaling" not in [option.name for option in operation.options]:
                continue
            request = request_from(operation.name, RequestOptions(512, {"dtype": "e4m3", "scaling": scaling}))
            usual, other = called(request), next((candidate.key for candidate in others(request)), None)
            if other is None:
                continue
            heuristics.put(request, other)
            assert called(request) == planned(request) == other.name
            heuristics.clear()
            assert called(request) == usual


def case_kernels_of_other_problems_stay_as_they_are() -> None:
    for request in requests():
        epilogue = ac.GemmEpilogue(beta=1.0)
        wider = request_from(operation_of(request).name, RequestOptions(512, {"dtype": "f16"}))
        added = request_from(operation_of(request).name, RequestOptions(512, {"beta": 1.0}))
        assert added.epilogue == epilogue
        usual = [planned(wider), planned(added)]
        heuristics.put(request, next(others(request)).key)
        assert [planned(wider), planned(added)] == usual
        heuristics.clear()


def case_calls_of_a_family_are_planned_one_by_one() -> None:
    """The program of a family chooses by the model."""

    def request(m: int) -> Request:
        return ac.GemmRequest(ac.GemmShape(m, 512, 512), dtype=D.BF16)

    for m in range(128, 1024, 128):
        called(request(m))
    usual = called(request(1024))
    other = next(candidate.key for candidate in others(request(1024)) if candidate.key.name != usual)
    heuristics.put(request(1024), other)
    for m in range(128, 1024, 128):
        assert called(request(m)) == planned(request(m))
    assert called(request(1024)) == other.name
    heuristics.clear()
    assert called(request(1024)) == usual


def case_the_workspace_is_bounded_all_the_same() -> None:
    limited = 0
    for request in requests():
        for candidate in others(request):
            heuristics.put(request, candidate.key)
            size = planning.plan(request).workspace_bytes
            if not size:
                continue
            assert planned(request, workspace_size=size) == candidate.key.name
            with contextlib.suppress(ac.UnsupportedError):  # no kernel needs less
                assert planning.plan(request, workspace_size=size - 1).workspace_bytes < size
                limited += 1
            assert heuristics.get(request) == candidate.key
        heuristics.clear()
    assert limited


def case_kernels_that_are_not_built_are_compiled_where_they_may_be() -> None:
    for request in requests():
        other = next(candidate for candidate in others(request) if not candidate.width).key
        heuristics.put(request, other)
        GPU._table = "empty"
        try:
            assert planned(request, jit="auto") == other.name
            assert planning.plan(request, jit="auto").origin == "jit"
            with pytest.raises(ac.KernelNotFoundError):
                planned(request, jit="off")
        finally:
            GPU._table = "full"
        assert planning.plan(request, jit="auto").origin != "jit"
        heuristics.clear()


def case_batch_invariant_requests_are_others() -> None:
    def request(*, invariant: bool) -> Request:
        return ac.GemmRequest(ac.GemmShape(64, 512, 512), dtype=D.BF16, batch_invariant=invariant)

    usual = planned(request(invariant=True))
    other = next(c.key for c in others(request(invariant=False)) if c.key.generation == "sm80")
    heuristics.put(request(invariant=False), other)
    assert (planned(request(invariant=False)), planned(request(invariant=True))) == (other.name, usual)
    heuristics.put(request(invariant=True), other)  # whose reduction is another
    assert planned(request(invariant=True)) == usual
    heuristics.clear()


def case_a_named_kernel_precedes_a_tuned_one() -> None:
    for request in requests():
        search, (named, *_, tuned) = search_of(request), [select.choose(search_of(request)), *others(request)]
        formulations = [formulation for group in search.formulations for formulation in group]
        record = tuning.TuneRecord(
            search.device.name, tuning.identity(search.tuned_problem), tuned.key, formulations.index(tuned.formulation),
            *tuned.options[:3], 5.0, "", 5.0, 1, width=tuned.width,
        )  # fmt: skip
        tuning.add([record])
        assert planned(request) == tuned.key.name
        heuristics.put(request, named.key)
        assert planned(request) == named.key.name
        with tuning.trying(search.tuned_problem, record):  # as `tune` does, whatever a user has named
            assert planned(request) == tuned.key.name
        heuristics.put(request, useless(request))
        assert planned(request) == tuned.key.name
        heuristics.clear()
        tuning.clear()


def case_requests_that_no_kernel_serves_are_refused() -> None:
    for request in (
        ac.GemmRequest(ac.GemmShape(0, 16, 16), dtype=D.BF16),
        ac.GemvRequest(ac.GemvShape(0, 16), dtype=D.BF16),
    ):
        for call in (heuristics.get, heuristics.__contains__, lambda key: heuristics.put(key, table.kernels()[0].key)):
            with pytest.raises(ac.UnsupportedError, match=r"is empty|nothing to plan"):
                call(request)


if __name__ == "__main__":
    GPU = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    GPU._table = "full"
    fake_cases.run(globals())
