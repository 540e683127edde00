"""One GEMM on random operands: computed, timed where there is a GPU, and checked against the reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _core, devices, numerics, operands, reference
from .gemm import gemm
from .generator.dtypes import CutlassDtype
from .plan import Plan
from .planner import plan
from .requests import GemmLayout, GemmRequest

Array = np.ndarray[Any, Any]
Track = Callable[[Iterable[slice], int], Iterable[slice]]
"""Shows how far a loop has come: (what it runs over, how many) -> the same."""
Progress = Callable[[], AbstractContextManager["Track | None"]]
"""Begins to show progress."""

_PARTS = 32
_BATCH_SECONDS = 0.05
_REPEATS = 5


@dataclass(frozen=True)
class Trial:
    """What came of one GEMM.

    Attributes:
        request: what was computed.
        backend: `prebuilt`, `jit` or `reference`.
        reason: why that backend.
        kernel: name of the kernel, or None.
        device: what computed.
        elements: elements of the result.
        mismatches: how many of them lie outside the tolerance.
        max_error: largest absolute difference from the reference.
        tolerance: the bounds that held (see `reference.Tolerance`).
        plan_seconds: how long making the plan took, compilation included; None without a GPU.
        launches: how many launches were timed; 0 without a GPU.
        seconds: median time of one launch, launched back to back; None without a GPU.
    """

    request: GemmRequest
    backend: str
    reason: str
    kernel: str | None
    device: str
    elements: int
    mismatches: int
    max_error: float
    tolerance: reference.Tolerance
    plan_seconds: float | None
    launches: int
    seconds: float | None

    @property
    def ok(self) -> bool:
        """Whether every element is right."""
        return self.mismatches == 0

    @property
    def tflops(self) -> float | None:
        """Floating-point (or integer) operations per second, in 10^12."""
        shape = self.request.shape
        return None if self.seconds is None else 2e-12 * shape.batch * shape.m * shape.n * shape.k / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        shape = self.request.shape
        return {
            "shape": {"m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.batch},
            "dtype": self.request.dtype.value,
            "out_dtype": self.request.result_dtype.value,
            "math": self.request.math,
            "backend": self.backend,
            "reason": self.reason,
            "kernel": self.kernel,
            "device": self.device,
            "ok": self.ok,
            "elements": self.elements,
            "mismatches": self.mismatches,
            "max_error": self.max_error,
            "tolerance": self.tolerance._asdict(),
            "plan_seconds": self.plan_seconds,
            "launches": self.launches,
            "seconds": self.seconds,
            "tflops": self.tflops,
        }


@dataclass
class _Check:
    """Counts what lies outside the tolerance, part by part."""

    request: GemmRequest
    limits: reference.Tolerance = field(init=False)
    mismatches: int = 0
    max_error: float = 0.0

    def __post_init__(self) -> None:
        request = self.request
        self.limits = reference.tolerance(request.operand_dtype, request.result_dtype, request.shape.k, request.math)

    def add(self, got: Array, a: Array, b: Array, c: Array | None) -> None:
        """Compares a part of the result with the reference of the operands that it comes from."""
        alpha, beta = self.request.epilogue.alpha, self.request.epilogue.beta
        result = self.request.result_dtype
        expected = reference.gemm(a, b, c, alpha=alpha, beta=beta, out_dtype=result, math=self.request.math)
        scale = reference.absolute_product(a, b, c, alpha=alpha, beta=beta)
        right = reference.within_tolerance(got, expected, scale, self.limits, result)
        self.mismatches += int(right.size - np.count_nonzero(right))
        with np.errstate(invalid="ignore"):
            difference = np.abs(numerics.to_float64(got) - numerics.to_float64(expected))
        self.max_error = max(self.max_error, float(np.max(difference, initial=0.0)))


def run(
    request: GemmRequest,
    *,
    backend: str = "auto",
    jit: str | None = None,
    seed: int = 0,
    progress: Progress = nullcontext,
) -> Trial:
    """Computes one GEMM on random operands and checks it.

    Args:
        request: what to compute, no extent of it 0. A target (`arch`) other than the GPU's own matters on a GPU only.
        backend: `auto` takes a GPU where there is one, else the reference; `prebuilt` and `jit` insist on a GPU.
        jit: as for `plan`: what to do where the table lacks the kernel.
        seed: of the random operands.
        progress: shows progress. Entered when there is a plan: compiling a kernel shows its own.

    Raises:
        UnsupportedError, KernelNotFoundError: no kernel serves the request.
        CompileError: its source does not compile.
        DeviceUnavailableError: `prebuilt` or `jit` without a GPU; NVRTC is needed and missing.
    """
    on_gpu = backend in ("prebuilt", "jit") or (backend == "auto" and devices.available())
    start = time.perf_counter()
    made = plan(request, backend=backend, jit=jit) if on_gpu else None
    plan_seconds = time.perf_counter() - start if on_gpu else None
    with progress() as track:
        return _tried(request, made, plan_seconds, backend, seed, track)


def _tried(
    request: GemmRequest, made: Plan | None, plan_seconds: float | None, backend: str, seed: int, track: Track | None
) -> Trial:
    generator = np.random.default_rng(seed)
    shape, result = request.shape, request.result_dtype
    a = _random(generator, request.operand_dtype, _extents(request, shape.m, shape.k), request.layout_a)
    b = _random(generator, request.operand_dtype, _extents(request, shape.k, shape.n), request.layout_b)
    wanted = _extents(request, shape.m, shape.n)
    c = _random(generator, result, wanted, request.layout_c) if request.epilogue.beta != 0 else None
    # Poisoned, so that an element that nobody writes cannot be right by chance.
    out = _laid_out(lambda extents: np.empty(extents, numerics.numpy_dtype(result)), wanted, request.layout_c)
    out[...] = np.iinfo(out.dtype).min if result in numerics.INTEGER_DTYPES else np.nan

    launches, seconds = 0, None
    if made is not None:
        out, launches, seconds = _on_gpu(made, a, b, c, out)
    check = _Check(request)
    parts = list(_parts(shape.batch if a.ndim == 3 else shape.m))
    for part in parts if track is None else track(parts, len(parts)):
        a_part, b_part = a[part], b[part] if a.ndim == 3 else b
        c_part = None if c is None else c[part]
        if made is None:
            _on_reference(request, a_part, b_part, c_part, out[part])
        check.add(out[part], a_part, b_part, c_part)
    why_not = "as asked" if backend == "reference" else devices.problem()
    return Trial(
        request=request,
        backend="reference" if made is None else _served_by(made),
        reason=why_not if made is None else "there is a GPU",
        kernel=None if made is None else made.kernel_name,
        device="the CPU, in NumPy" if made is None else devices.get(made.device).name,
        elements=out.size,
        mismatches=check.mismatches,
        max_error=check.max_error,
        tolerance=check.limits,
        plan_seconds=plan_seconds,
        launches=launches,
        seconds=seconds,
    )


def _served_by(made: Plan) -> str:
    """`prebuilt` or `jit`: the kernel that the plan launches by now, which the background may have replaced."""
    return "prebuilt" if made.kernel is not None and made.kernel.name == made.kernel_name else "jit"


def _extents(request: GemmRequest, rows: int, columns: int) -> tuple[int, ...]:
    return (rows, columns) if request.shape.batch == 1 else (request.shape.batch, rows, columns)


def _laid_out(make: Callable[[tuple[int, ...]], Array], extents: tuple[int, ...], layout: GemmLayout) -> Array:
    """An array of these extents whose matrices lie as the layout says."""
    if layout is GemmLayout.ROW_MAJOR:
        return make(extents)
    return np.swapaxes(make((*extents[:-2], extents[-1], extents[-2])), -1, -2)


def _random(generator: np.random.Generator, dtype: CutlassDtype, extents: tuple[int, ...], layout: GemmLayout) -> Array:
    if dtype in numerics.INTEGER_DTYPES:
        kind = numerics.numpy_dtype(dtype)
        return _laid_out(lambda shape: generator.integers(-127, 128, shape, kind), extents, layout)
    return _laid_out(lambda shape: numerics.saturating_cast(generator.standard_normal(shape), dtype), extents, layout)


def _parts(extent: int) -> Iterator[slice]:
    step = max(1, -(-extent // _PARTS))
    return (slice(start, start + step) for start in range(0, extent, step))


def _on_reference(request: GemmRequest, a: Array, b: Array, c: Array | None, out: Array) -> None:
    out[...] = gemm(
        a,
        b,
        c,
        alpha=request.epilogue.alpha,
        beta=request.epilogue.beta,
        out_dtype=request.result_dtype,
        precision=None if request.math == "default" else request.math,
        backend="reference",
    )


def _on_gpu(made: Plan, a: Array, b: Array, c: Array | None, out: Array) -> tuple[Array, int, float]:
    """(the result, how many launches were timed, seconds of one)."""
    inputs = [None if array is None else _upload(array, made.device) for array in (a, b, c)]
    result = _upload(out, made.device)

    def launch(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            made(*inputs, out=result, stream=0)
        _core.synchronize(made.device, 0)
        return time.perf_counter() - start

    launch(1)
    got = operands.download(result)
    times = int(min(1000, max(3, _BATCH_SECONDS / (launch(3) / 3))))
    seconds = statistics.median(launch(times) / times for _ in range(_REPEATS))
    return got, times * _REPEATS, seconds


def _upload(array: Array, device: int) -> _core.Operand:
    """A copy on the GPU that lies as the array does."""
    dense = operands.upload(array if array.flags.c_contiguous else np.swapaxes(array, -1, -2), device)
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.Operand(dense.pointer, array.shape, strides, dense.dtype, operands.CUDA, device, owner=dense)
