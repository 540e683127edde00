"""Runs a request on random operands and, on a GPU, times it and compares it with the reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from ..reference.parts import Tolerance
from . import devices
from .operation import PlannedOperation, described, operation_of
from .plan import Plan
from .planning import plan
from .probe import Track, checked, uploaded
from .request import Request

_SILENT: AbstractContextManager[Track] = nullcontext(iter)
_BATCH_SECONDS = 0.05
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of running one request.

    Attributes:
        backend: `prebuilt`, `jit` or `reference`.
        kernel: name of the kernel (of a rewrite: of the one that does the products), or None.
        rewrite: how the request was rewritten for kernels that do not compute it as it stands; empty otherwise.
        elements: elements of the result.
        mismatches: elements outside the tolerance, those of amax and of a tree's other outputs included. None where the
            reference computed: nothing was compared.
        tolerance: see `reference.Tolerance`; with a bias, an activation or a tree that of the accumulator, from which
            `reference.tolerances` derives the result's.
        plan_seconds: time to make the plan, compilation included.
        seconds: median time of one call, measured over `launches` calls back to back.
    """

    request: Request
    backend: str
    reason: str
    kernel: str | None = None
    rewrite: str = ""
    device: str
    elements: int
    mismatches: int | None = None
    max_error: float | None = None
    tolerance: Tolerance | None = None
    plan_seconds: float | None = None
    launches: int = 0
    seconds: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether all elements are within the tolerance; None where nothing was compared."""
        return None if self.mismatches is None else self.mismatches == 0

    @property
    def tflops(self) -> float | None:
        """Floating-point (or integer) operations per second, in 10^12."""
        products = operation_of(self.request).products(self.request)
        return None if self.seconds is None else 2e-12 * products / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; `shape` has the extents of the operation."""
        values = dict(vars(self))
        request = values.pop("request")
        values["tolerance"] = None if self.tolerance is None else self.tolerance._asdict()
        more = {"out_dtype": request.result_dtype.value, "math": request.math, "ok": self.ok, "tflops": self.tflops}
        return described(request) | more | values


def run(
    request: Request,
    *,
    backend: str = "auto",
    jit: str | None = None,
    seed: int = 0,
    progress: AbstractContextManager[Track] = _SILENT,
) -> RunResult:
    """Computes a request on random operands, and compares a GPU's result with the reference.

    `auto` uses a GPU if there is one, else the reference. `progress` is entered before operands are made.
    """
    operation = operation_of(request)
    result, generator = operation.operands(request)[-1], np.random.default_rng(seed)
    if backend == "reference" or (backend == "auto" and not devices.available()):
        with progress as track:
            arrays = operation.random_arrays(request, generator)
            probe = operation.probe(request, arrays)
            for part in track(list(probe.parts())):
                probe.compute(part)
        reason = "as asked" if backend == "reference" else devices.problem()
        elements = sum(arrays[label].size for label in result.labels)
        return RunResult(
            request=request, backend="reference", reason=reason, device="the CPU, in NumPy", elements=elements
        )
    start = time.perf_counter()
    made = plan(request, backend=backend, jit=jit)
    plan_seconds = time.perf_counter() - start
    with progress as track:
        arrays = operation.random_arrays(request, generator)
        views = uploaded(request, arrays, made.device)
        launches, seconds = _timed(made, operation, views)
        check = checked(made, arrays, views, track=track)
    # A compilation in the background may have replaced the kernel that the plan began with.
    prebuilt = made.kernel is not None and made.kernel.name == made.kernel_name
    return RunResult(
        request=request, backend="prebuilt" if prebuilt else "jit", reason="there is a GPU", kernel=made.kernel_name,
        rewrite=made.rewrite, device=devices.get(made.device).name,
        elements=sum(arrays[label].size for label in result.labels), mismatches=check.mismatches,
        max_error=check.max_error, tolerance=check.limits, plan_seconds=plan_seconds, launches=launches,
        seconds=seconds,
    )  # fmt: skip


def _timed(made: Plan, operation: PlannedOperation[Any], views: Mapping[str, Any]) -> tuple[int, float]:
    """(number of timed calls, seconds of one)."""

    def launch(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            operation.launch(made, made.request, views, stream=0)
        _core.synchronize(made.device, 0)
        return time.perf_counter() - start

    launch(1)
    times = int(min(1000, max(3, _BATCH_SECONDS / (launch(3) / 3))))
    return times * _REPEATS, statistics.median(launch(times) / times for _ in range(_REPEATS))
