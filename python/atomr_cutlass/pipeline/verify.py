"""One request on random operands: computed and, where there is a GPU, timed and checked against the reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from ..arrays import numerics, operands
from ..reference.tolerance import Tolerance
from . import devices
from .operand_table import Array, Arrays, memory_order
from .operation import PlannedOperation, described, operation_of
from .plan import Plan
from .planner import plan
from .probe import Check
from .problem import MatrixSpec
from .request import Request

Track = Callable[[Iterable[Arrays], int], Iterable[Arrays]]
"""Shows the progress of a loop: (its iterable, its length) -> the same items."""
Progress = Callable[[], AbstractContextManager["Track | None"]]
"""Begins to show progress."""

_BATCH_SECONDS = 0.05
_REPEATS = 5


@dataclass(frozen=True)
class RunResult:
    """The result of running one request.

    Attributes:
        request: the request that was computed.
        backend: `prebuilt`, `jit` or `reference`.
        reason: why that backend.
        kernel: name of the kernel (of a rewrite: of the one that does the products), or None.
        rewrite: how the request was put to kernels that do not compute it as it stands; empty for one that does.
        device: what computed.
        elements: elements of the result.
        mismatches: how many of them lie outside the tolerance; an amax that does counts too, and so do elements that an
            epilogue's tree writes beside the result. None where the reference computed: nothing was compared.
        max_error: largest absolute difference of the result from the reference, or None likewise.
        tolerance: the bounds that held (see `reference.Tolerance`); with a bias, an activation or a tree those of the
            accumulator, of which `reference.tolerances` makes the result's. None likewise.
        plan_seconds: how long making the plan took, compilation included; None without a GPU.
        launches: how many calls of the plan were timed; 0 without a GPU.
        seconds: median time of one call, called back to back; None without a GPU.
    """

    request: Request
    backend: str
    reason: str
    kernel: str | None
    rewrite: str
    device: str
    elements: int
    mismatches: int | None
    max_error: float | None
    tolerance: Tolerance | None
    plan_seconds: float | None
    launches: int
    seconds: float | None

    @property
    def ok(self) -> bool | None:
        """Whether every element is right; None where nothing was compared."""
        return None if self.mismatches is None else self.mismatches == 0

    @property
    def tflops(self) -> float | None:
        """Floating-point (or integer) operations per second, in 10^12."""
        return (
            None if self.seconds is None else 2e-12 * operation_of(self.request).products(self.request) / self.seconds
        )

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
    progress: Progress = nullcontext,
) -> RunResult:
    """Computes one request on random operands, and checks what a GPU computed against the reference.

    Args:
        request: the request to compute.
        backend: `auto` (a GPU if there is one, the NumPy reference otherwise), `prebuilt`, `jit` or `reference`. The
            request must name no other arch than the GPU's, unless the table has PTX for it.
        jit: as for `plan`.
        seed: of the operands: normally distributed values, for int8 uniform over -127..127.
        progress: enters while operands are made, gives what tracks the check, or the reference, exits at the end.

    Raises:
        InvalidOperandError: `request` is no request.
        UnsupportedError, KernelNotFoundError, CompileError, DeviceUnavailableError: as for `plan`.
    """
    operation_of(request)  # refuses anything but a request
    on_gpu = backend != "reference" and (backend != "auto" or devices.available())
    start = time.perf_counter()
    made = plan(request, backend=backend, jit=jit) if on_gpu else None
    seconds = time.perf_counter() - start if made else None
    with progress() as track:
        return _run(request, made, seconds, backend, seed, track)


def _run(
    request: Request, made: Plan | None, plan_seconds: float | None, backend: str, seed: int,
    track: Track | None,
) -> RunResult:  # fmt: skip
    operation = operation_of(request)
    table = operation.operands(request)
    arrays = operation.random_arrays(request, np.random.default_rng(seed))
    launches, seconds, check = 0, None, None
    if made is None:
        probe = operation.probe(request, arrays)
        parts = list(probe.parts())
        for part in parts if track is None else track(parts, len(parts)):
            probe.compute(part)
    else:
        views = uploaded(operation, request, arrays, made.device)
        launches, seconds = _timed(made, operation, views)
        check = checked(made, arrays, views, track=track)
    return RunResult(
        request=request,
        backend="reference" if made is None else _served_by(made),
        reason=("as asked" if backend == "reference" else devices.problem()) if made is None else "there is a GPU",
        kernel=None if made is None else made.kernel_name,
        rewrite="" if made is None else made.rewrite,
        device="the CPU, in NumPy" if made is None else devices.get(made.device).name,
        elements=sum(arrays[label].size for label in table[-1].labels),
        mismatches=None if check is None else check.mismatches,
        max_error=None if check is None else check.max_error,
        tolerance=None if check is None else check.limits,
        plan_seconds=plan_seconds,
        launches=launches,
        seconds=seconds,
    )


def checked(
    made: Any, arrays: Arrays, views: Mapping[str, Any], *, track: Track | None = None, parts: int | None = None
) -> Check:
    """Launches a plan of a request and compares what it writes with the reference.

    Args:
        made: the plan.
        arrays: the operands, results as they are before the launch.
        views: the same on the GPU (see `uploaded`).
        track: shows how far the reference has come.
        parts: of how many parts of the result, the last among them; None compares it all.
    """
    request = made.request
    probe = operation_of(request).probe(request, arrays | _written(made, arrays, views))
    check = Check(request.result_dtype, probe.limits(_math(request, made)))
    compared = list(probe.parts())
    if parts is not None and parts < len(compared):
        compared = [compared[len(compared) * (number + 1) // parts - 1] for number in range(parts)]
    for part in compared if track is None else track(compared, len(compared)):
        probe.compare(part, check)
    probe.finish(check)
    return check


def _written(made: Any, arrays: Arrays, views: Mapping[str, Any]) -> Arrays:
    """Launches a plan and returns the arrays that it writes."""
    operation = operation_of(made.request)
    sent = operation.gpu_forms(made.request, arrays)
    labels = [label for slot in operation.operands(made.request) if slot.written for label in slot.labels]
    for label in labels:  # an earlier launch may have been right
        operands.copy_in(sent[label], views[label])
    operation.launch(made, made.request, views, stream=0)
    return {label: operands.download(views[label]) for label in labels}


def _served_by(made: Plan) -> str:
    """`prebuilt` or `jit`: the kernel that the plan launches by now, which the background may have replaced."""
    return "prebuilt" if made.kernel is not None and made.kernel.name == made.kernel_name else "jit"


def _math(request: Request, made: Plan | None) -> str:
    """The math mode of the computation: fp8 convolutions that do not cast accumulate as fast accumulation does."""
    return request.math if made is None or made.main.key.math != numerics.FAST else numerics.FAST


def _timed(made: Plan, operation: PlannedOperation[Any], views: Mapping[str, Any]) -> tuple[int, float]:
    """(how many calls were timed, seconds of one)."""

    def launch(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            operation.launch(made, made.request, views, stream=0)
        _core.synchronize(made.device, 0)
        return time.perf_counter() - start

    launch(1)
    times = int(min(1000, max(3, _BATCH_SECONDS / (launch(3) / 3))))
    return times * _REPEATS, statistics.median(launch(times) / times for _ in range(_REPEATS))


def uploaded(
    operation: PlannedOperation[Any], request: Request, arrays: Arrays, device: int
) -> dict[str, _core.Operand]:
    """The operands of a request on the GPU, by name, in the forms that its plans take."""
    sent = operation.gpu_forms(request, arrays)
    return {
        label: _upload(sent[label], spec, device)
        for slot in operation.operands(request)
        for label, spec in zip(slot.labels, slot.specs, strict=True)
    }


def _upload(array: Array, spec: MatrixSpec, device: int) -> _core.Operand:
    """A copy on the GPU that lies as the array does."""
    dense = operands.upload(array.transpose(memory_order(spec)), device)
    return _core.Operand(dense.pointer, spec.shape, spec.strides, dense.dtype, operands.CUDA, device, owner=dense)
