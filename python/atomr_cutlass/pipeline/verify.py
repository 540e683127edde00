"""One request on random operands: computed and, where there is a GPU, timed and checked against the reference."""

from __future__ import annotations

import abc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .. import _core, reference
from ..arrays import fp4, numerics, operands
from ..arrays.operands import BYTE
from ..epilogue.bound import Fusion
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import COLUMN, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ..generator.rules import accumulator, epilogue_compute
from ..ops.conv2d.function import conv2d, conv2d_dgrad, conv2d_wgrad
from ..ops.conv2d.fusion import as_matrix, matrix_shape
from ..ops.conv2d.problem import DGRAD, FPROP, OPERANDS
from ..ops.conv2d.request import ConvLayout
from ..ops.gemm.function import gemm
from ..ops.gemm.operation import plain
from ..ops.gemm.request import GemmRequest
from ..ops.gemm.scaled import BLOCK
from ..ops.grouped_gemm.function import grouped_gemm
from ..ops.grouped_gemm.request import GroupedGemmRequest
from ..ops.quantize import reference as quantization
from . import devices
from .op_plan import OpPlan
from .operand_table import OperandSlot
from .operation import Request, operation_of
from .plan import Plan
from .planner import plan
from .problem import MatrixSpec

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
"""By name, as `OperandSlot.labels` has them."""
Track = Callable[[Iterable[Arrays], int], Iterable[Arrays]]
"""Shows how far a loop has come: (what it runs over, how many) -> the same."""
Progress = Callable[[], AbstractContextManager["Track | None"]]
"""Begins to show progress."""

_PARTS = 32
_STEEPEST = 1.5
"""No activation makes an error more than so many times as large."""
_BATCH_SECONDS = 0.05
_REPEATS = 5


@dataclass(frozen=True)
class Trial:
    """What came of one request.

    Attributes:
        request: what was computed.
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
    tolerance: reference.Tolerance | None
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
        return {
            "op": self.request.plan_key().op,
            "shape": operation_of(self.request).extents(self.request),
            "dtype": self.request.dtype.value,
            "out_dtype": self.request.result_dtype.value,
            "math": self.request.math,
            "backend": self.backend,
            "reason": self.reason,
            "kernel": self.kernel,
            "rewrite": self.rewrite,
            "device": self.device,
            "ok": self.ok,
            "elements": self.elements,
            "mismatches": self.mismatches,
            "max_error": self.max_error,
            "tolerance": None if self.tolerance is None else self.tolerance._asdict(),
            "plan_seconds": self.plan_seconds,
            "launches": self.launches,
            "seconds": self.seconds,
            "tflops": self.tflops,
        }


def run(
    request: Request,
    *,
    backend: str = "auto",
    jit: str | None = None,
    seed: int = 0,
    progress: Progress = nullcontext,
) -> Trial:
    """Computes one request on random operands, and checks what a GPU computed against the reference.

    Args:
        request: what to compute.
        backend: `auto` (a GPU if there is one, the NumPy reference otherwise), `prebuilt`, `jit` or `reference`. The
            request must name no other arch than the GPU's, unless the table has PTX for it.
        jit: as for `plan`.
        seed: of the operands: normally distributed values, for int8 uniform over -127..127.
        progress: enters while operands are made, gives what tracks the check, or the reference, exits at the end.

    Raises:
        InvalidOperandError: `request` is no request.
        UnsupportedError, KernelNotFoundError, CompileError, DeviceUnavailableError: as for `plan`.
    """
    operation_of(request)  # refuses what is no request
    on_gpu = backend != "reference" and (backend != "auto" or devices.available())
    start = time.perf_counter()
    made = plan(request, backend=backend, jit=jit) if on_gpu else None
    seconds = time.perf_counter() - start if made else None
    with progress() as track:
        return _run(request, made, seconds, backend, seed, track)


def _run(
    request: Request, made: Plan | OpPlan | None, plan_seconds: float | None, backend: str, seed: int,
    track: Track | None,
) -> Trial:  # fmt: skip
    generator = np.random.default_rng(seed)
    slots = operation_of(request).operands(request)
    arrays = {
        label: _poison(slot, spec) if slot.written else _random(generator, slot, spec)
        for slot in slots
        for label, spec in zip(slot.labels, slot.specs, strict=True)
    }
    if isinstance(request, GemmRequest) and request.operand_dtype is fp4.FP4:
        arrays |= _random_fp4(generator, request)
    launches, seconds = 0, None
    if made is not None:
        results, launches, seconds = _on_gpu(made, slots, arrays)
        arrays |= results
    work = _work(request, arrays)
    check = None if made is None else _Check(request.result_dtype, work.limits(_math(request, made)))
    parts = list(work.parts())
    for part in parts if track is None else track(parts, len(parts)):
        if check is None:
            work.compute(part)
        else:
            work.compare(part, check)
    if check is not None:
        work.finish(check)
    return Trial(
        request=request,
        backend="reference" if made is None else _served_by(made),
        reason=("as asked" if backend == "reference" else devices.problem()) if made is None else "there is a GPU",
        kernel=None if made is None else made.kernel_name,
        rewrite=made.rewrite if isinstance(made, OpPlan) else "",
        device="the CPU, in NumPy" if made is None else devices.get(made.device).name,
        elements=sum(arrays[label].size for label in slots[-1].labels),
        mismatches=None if check is None else check.mismatches,
        max_error=None if check is None else check.max_error,
        tolerance=None if check is None else check.limits,
        plan_seconds=plan_seconds,
        launches=launches,
        seconds=seconds,
    )


def _served_by(made: Plan | OpPlan) -> str:
    """`prebuilt` or `jit`: the kernel that the plan launches by now, which the background may have replaced."""
    return "prebuilt" if made.kernel is not None and made.kernel.name == made.kernel_name else "jit"


def _math(request: Request, made: Plan | OpPlan | None) -> str:
    """The math mode of what computes: fp8 convolutions that do not cast accumulate as fast accumulation does."""
    return made.main.key.math if isinstance(made, OpPlan) and made.main.key.math == numerics.FAST else request.math


# ----------------------------------------------------------------------------------------------------------------------
# Operands
# ----------------------------------------------------------------------------------------------------------------------


def _laid_out(spec: MatrixSpec, make: Callable[[tuple[int, ...]], Array]) -> Array:
    """A dense array that lies as the spec says. `make` gets its extents in the order of memory."""
    order = _memory_order(spec)
    made: Array = make(tuple(spec.shape[i] for i in order)).transpose(np.argsort(order))
    return made


def _memory_order(spec: MatrixSpec) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(spec.shape)), key=lambda i: -spec.strides[i])


def _random(generator: np.random.Generator, slot: OperandSlot, spec: MatrixSpec) -> Array:
    if slot.element == BYTE:
        return _laid_out(spec, lambda shape: generator.integers(0, 256, shape, np.uint8))
    kind = numerics.numpy_dtype(spec.dtype)
    if spec.dtype in numerics.INTEGER_DTYPES:
        return _laid_out(spec, lambda shape: generator.integers(-127, 128, shape, kind))
    if slot.name.startswith("scale"):
        return _laid_out(spec, lambda shape: np.exp2(generator.uniform(-1, 1, shape)).astype(kind))
    return _laid_out(spec, lambda shape: numerics.saturating_cast(generator.standard_normal(shape), spec.dtype))


def _random_fp4(generator: np.random.Generator, request: GemmRequest) -> Arrays:
    """A, B and their scales in plain forms, as the reference takes them: normally distributed values, quantized."""
    shape = request.shape
    batch = () if shape.batch == 1 else (shape.batch,)
    found: Arrays = {}
    for name, extents in (("a", (shape.m, shape.k)), ("b", (shape.k, shape.n))):
        wide = generator.standard_normal((*batch, *extents))
        if request.scaling is None:
            found[name] = numerics.saturating_cast(wide, fp4.FP4)
            continue
        quantize = quantization.quantize_nvfp4 if request.scaling == "nvfp4" else quantization.quantize_mxfp4
        made = quantize(wide, axis=fp4.ALONG[name])
        found |= {name: made.values, f"scale_{name}": made.scale}
    return found


def _poison(slot: OperandSlot, spec: MatrixSpec) -> Array:
    """A result before it is computed, so that an element that nobody writes cannot be right by chance."""
    if slot.element == BYTE:
        return _laid_out(spec, lambda shape: np.full(shape, 0xFF, np.uint8))
    made = _laid_out(spec, lambda shape: np.empty(shape, numerics.numpy_dtype(spec.dtype)))
    made[...] = np.iinfo(made.dtype).min if spec.dtype in numerics.INTEGER_DTYPES else np.nan
    return made


def _on_gpu(made: Plan | OpPlan, slots: Sequence[OperandSlot], arrays: Arrays) -> tuple[Arrays, int, float]:
    """(the results, how many calls were timed, seconds of one)."""
    specs = {label: spec for slot in slots for label, spec in zip(slot.labels, slot.specs, strict=True)}
    sent = fp4.gpu_forms(arrays) if slots[0].element is not None else arrays
    views = {label: _upload(sent[label], spec, made.device) for label, spec in specs.items()}
    written = [label for slot in slots if slot.written for label in slot.labels]

    def call() -> None:
        if isinstance(made, OpPlan):
            made(*views.values(), stream=0)
        else:
            made(views["a"], views["b"], views.get("c"), out=views["out"], stream=0)

    def launch(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        _core.synchronize(made.device, 0)
        return time.perf_counter() - start

    launch(1)
    got = {label: operands.download(views[label]) for label in written}
    times = int(min(1000, max(3, _BATCH_SECONDS / (launch(3) / 3))))
    seconds = statistics.median(launch(times) / times for _ in range(_REPEATS))
    return got, times * _REPEATS, seconds


def _upload(array: Array, spec: MatrixSpec, device: int) -> _core.Operand:
    """A copy on the GPU that lies as the array does."""
    dense = operands.upload(array.transpose(_memory_order(spec)), device)
    return _core.Operand(dense.pointer, spec.shape, spec.strides, dense.dtype, operands.CUDA, device, owner=dense)


# ----------------------------------------------------------------------------------------------------------------------
# The check
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class _Check:
    """Counts what lies outside the tolerance, part by part."""

    result: CutlassDtype
    limits: reference.Tolerance
    mismatches: int = 0
    max_error: float = 0.0

    def add(self, part: Arrays, expected: Array, magnitudes: Array) -> None:
        """Compares a part of the result with the reference of the operands that it comes from."""
        got = part["out"]
        right = reference.within_tolerance(got, expected, magnitudes, self.limits, self.result)
        self.mismatches += int(right.size - np.count_nonzero(right))
        self.see(got, expected)

    def see(self, got: Array, expected: Array) -> None:
        """Takes note of the largest difference."""
        with np.errstate(invalid="ignore"):
            difference = np.abs(numerics.to_float64(got) - numerics.to_float64(expected))
        self.max_error = max(self.max_error, float(np.max(difference, initial=0.0)))


class _Work(Protocol):
    """What differs from operation to operation. A part is what some elements of the result, `out`, come from."""

    def limits(self, math: str) -> reference.Tolerance:
        """The bounds, in the math mode of what computes."""

    def parts(self) -> Iterator[Arrays]:
        """The result piece by piece, so that progress can be shown and memory stays small."""

    def compute(self, part: Arrays) -> None:
        """Writes a part of the result, by the package's own function on the reference backend."""

    def compare(self, part: Arrays, check: _Check) -> None:
        """Checks a part against the reference of the operands that it comes from."""

    def finish(self, check: _Check) -> None:
        """Checks what has no parts."""


def _work(request: Request, arrays: Arrays) -> _Work:
    if isinstance(request, GemmRequest):
        fusion = request.fusion()
        return _Gemm(request, arrays) if fusion is None else _FusedGemm(request, arrays, fusion=fusion)
    if isinstance(request, GroupedGemmRequest):
        return _Grouped(request, arrays)
    tree = request.tree
    return _Conv(request, arrays) if tree is None else _FusedConv(request, arrays, tree=tree)


def _slices(extent: int) -> Iterator[slice]:
    step = max(1, -(-extent // _PARTS))
    return (slice(start, start + step) for start in range(0, extent, step))


class _Near(abc.ABC):
    """Whose results are right where they are near enough to the reference's."""

    @abc.abstractmethod
    def expected(self, part: Arrays) -> tuple[Array, Array]:
        """(what the reference gives, the magnitudes that tolerances are measured with)."""

    def compare(self, part: Arrays, check: _Check) -> None:
        check.add(part, *self.expected(part))


@dataclass
class _Gemm(_Near):
    request: GemmRequest
    arrays: Arrays
    amax: float = 0.0
    amax_error: float = 0.0

    def __post_init__(self) -> None:
        epilogue = self.request.epilogue
        self.how: dict[str, Any] = {"alpha": epilogue.alpha, "beta": epilogue.beta}

    def limits(self, math: str) -> reference.Tolerance:
        request = self.request
        blocks = BLOCK if request.scaling == "block" else 0
        if request.scaling in fp4.SCALINGS:
            blocks = fp4.VECTOR[fp4.SCALINGS[request.scaling]]
        return reference.tolerance(request.operand_dtype, self.rounded, request.shape.k, math, scale_block=blocks)

    @property
    def rounded(self) -> CutlassDtype:
        """What tolerances expect the product to be rounded to."""
        return self.request.result_dtype

    @property
    def batched(self) -> bool:
        """Whether parts are batches; else they are rows of D."""
        return self.arrays["a"].ndim == 3

    def follows(self) -> set[str]:
        """The arrays that parts are parts of; the others they share."""
        found = {"a", "out"} | ({"b"} if self.batched else set())
        found |= {"c"} if self.request.epilogue.beta != 0 else set()
        if self.request.scaling in (fp4.SCALINGS if self.batched else ("vector", "block", *fp4.SCALINGS)):
            found |= {"scale_a", "scale_b"} if self.batched else {"scale_a"}
        return found

    def parts(self) -> Iterator[Arrays]:
        follows = self.follows()
        for part in _slices(self.request.shape.batch if self.batched else self.request.shape.m):
            yield {name: array[part] if name in follows else array for name, array in self.arrays.items()}

    def compute(self, part: Arrays) -> None:
        self._compute(part)

    def _compute(self, part: Arrays, **epilogue: Any) -> None:
        amax = np.zeros(1, np.float32) if "amax" in part else None
        scales: dict[str, Any] = {name: part[name] for name in ("scale_a", "scale_b", "scale_d") if name in part}
        part["out"][...] = gemm(
            part["a"],
            part["b"],
            part.get("c"),
            **self.how,
            **scales,
            **epilogue,
            amax=amax,
            out_dtype=self.request.result_dtype,
            precision=None if self.request.math in ("default", numerics.FAST) else self.request.math,
            backend="reference",
        )
        if amax is not None:
            # Not a number at first.
            np.fmax(self.arrays["amax"], amax, out=self.arrays["amax"])

    def expected(self, part: Arrays) -> tuple[Array, Array]:
        scales: dict[str, Any] = {name: part[name] for name in ("scale_a", "scale_b") if name in part}
        scale_d = float(part["scale_d"][0]) if "scale_d" in part else None
        operands = (part["a"], part["b"], part.get("c"))
        how: dict[str, Any] = {**self.how, **scales}
        magnitudes = reference.absolute_product(*operands, **how)
        how |= {"scale_d": scale_d, "out_dtype": self.request.result_dtype, "math": self.request.math}
        if plain(self.request):
            return reference.gemm(*operands, **how), magnitudes
        expected, amax = reference.gemm_with_amax(*operands, **how)
        self.amax = max(self.amax, float(amax.reshape(())))
        factor = self.limits(self.request.math).atol_factor
        self.amax_error = max(self.amax_error, factor * float(np.max(magnitudes, initial=0.0)))
        return expected, magnitudes * (1.0 if scale_d is None else scale_d)

    def finish(self, check: _Check) -> None:
        if "amax" in self.arrays:
            error = abs(float(self.arrays["amax"][0]) - self.amax)
            # Written as float32; NaN is no agreement either.
            allowed = self.amax_error + 2.0**-23 * self.amax
            check.mismatches += int(not error <= allowed)


@dataclass
class _FusedGemm(_Gemm):
    """With a bias, an activation or a tree, whose evaluation by the reference says how far a kernel may be off."""

    fusion: Fusion = field(kw_only=True)

    @property
    def tree(self) -> EpilogueVisitorTree:
        return self.fusion.tree

    @property
    def of_d(self) -> EpilogueVisitorTree:
        """The tree of D alone, which says nothing of its element type."""
        return EpilogueVisitorTree(self.tree.result)

    @property
    def rounded(self) -> CutlassDtype:
        return epilogue_compute(accumulator(self.request.operand_dtype), tree=True)

    def follows(self) -> set[str]:
        kinds = {MATRIX, MASK} if self.batched else {MATRIX, MASK, COLUMN}
        return super().follows() | {
            *(one.name for one in self.tree.inputs if one.kind in kinds),
            *(one.name for one in self.tree.outputs),
        }

    def parts(self) -> Iterator[Arrays]:
        across = {SCALAR} if self.batched else {SCALAR, ROW}
        whole = any(one.reduction and one.kind in across for one in self.tree.outputs)
        yield from (self.arrays,) if whole else super().parts()

    def compute(self, part: Arrays) -> None:
        epilogue = self.request.epilogue
        if epilogue.tree is None:
            self._compute(part, bias=part.get("bias"), activation=epilogue.activation)
            return
        acc = self._accumulator(part)
        computed = reference.evaluate(self.tree, acc, self._read(part, self.tree), **self._rounding(part))
        for name, values in computed.items():
            part[name][...] = values
        if "amax" in part:
            values = reference.evaluate(self.of_d, acc, self._read(part, self.of_d), out_dtype=self.rounded)[RESULT]
            np.fmax(self.arrays["amax"], np.max(np.abs(values), initial=0.0), out=self.arrays["amax"])

    def compare(self, part: Arrays, check: _Check) -> None:
        tree, limits, acc = self.tree, check.limits, self._accumulator(part)
        error = limits.atol_factor * reference.absolute_product(*self._operands(part), **self._scaled(part))
        error += limits.rtol * np.abs(acc)
        _compare_tree(check, tree, part, acc, error, **self._rounding(part))
        if "amax" in part:
            read = self._read(part, self.of_d)
            values = reference.evaluate(self.of_d, acc, read, out_dtype=self.rounded)[RESULT]
            bound = reference.tolerances(self.of_d, acc, error, read, out_dtype=self.rounded)[RESULT]
            self.amax = max(self.amax, float(np.max(np.abs(values), initial=0.0)))
            self.amax_error = max(self.amax_error, float(np.max(bound, initial=0.0)))

    def _operands(self, part: Arrays) -> tuple[Array, Array, Array | None]:
        return part["a"], part["b"], part["c"] if self.request.epilogue.beta != 0 else None

    def _scaled(self, part: Arrays) -> dict[str, Any]:
        return self.how | {name: part[name] for name in ("scale_a", "scale_b") if name in part}

    def _accumulator(self, part: Arrays) -> Array:
        """What the tree starts from."""
        how = self._scaled(part) | {"out_dtype": CutlassDtype.F64, "math": self.request.math}
        made: Array = reference.gemm(*self._operands(part), **how)
        return made

    def _read(self, part: Arrays, tree: EpilogueVisitorTree) -> Arrays:
        return {one.name: part[one.name] for one in tree.inputs}

    def _rounding(self, part: Arrays) -> dict[str, Any]:
        scale_d = float(part["scale_d"][0]) if self.request.quantized else None
        return {"out_dtype": self.request.result_dtype, "scale_d": scale_d}


def _compare_tree(check: _Check, tree: EpilogueVisitorTree, part: Arrays, acc: Array, error: Array, **how: Any) -> None:
    """Counts what a tree has made of accumulators that differs from the reference by more than it may."""
    read = {one.name: part[one.name] for one in tree.inputs}
    wanted = reference.evaluate(tree, acc, read, **how)
    got = {name: part[name] for name in wanted}
    check.see(got[RESULT], wanted[RESULT])
    if reference.mismatches(tree, got, acc, error, read, **how):
        bounds = reference.tolerances(tree, acc, error, read, **how)
        masks = {one.name for one in tree.outputs if one.kind == MASK}
        counts = (_beyond(got[name], wanted[name], bounds[name], bits=name in masks) for name in got)
        check.mismatches += max(1, sum(counts))


def _beyond(got: Array, wanted: Array, bound: Array, *, bits: bool) -> int:
    """How many elements are further off than they may be."""
    if bits:
        got, wanted = (np.unpackbits(one, -1, count=bound.shape[-1], bitorder="little") for one in (got, wanted))
    with np.errstate(invalid="ignore"):
        right = np.abs(numerics.to_float64(got) - numerics.to_float64(wanted)) <= bound
    return int(right.size - np.count_nonzero(right))


_CONVOLUTIONS = (reference.conv2d, reference.conv2d_dgrad, reference.conv2d_wgrad)
_MAGNITUDES = (reference.absolute_conv2d, reference.absolute_conv2d_dgrad, reference.absolute_conv2d_wgrad)


@dataclass
class _Conv(_Near):
    request: Any
    arrays: Arrays

    def __post_init__(self) -> None:
        g, epilogue = self.request.shape.geometry, self.request.epilogue
        self.how: dict[str, Any] = {
            "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups,
            "alpha": epilogue.alpha, "beta": epilogue.beta,
        }  # fmt: skip
        self.activation = {} if epilogue.activation is None else {"activation": epilogue.activation}
        if self.request.layout is ConvLayout.NCHW:
            nhwc = (0, 2, 3, 1)
            self.arrays = {name: a.transpose(nhwc) if a.ndim == 4 else a for name, a in self.arrays.items()}

    def limits(self, math: str) -> reference.Tolerance:
        g, request = self.request.shape.geometry, self.request
        taps = g.r * g.s
        depth = {FPROP: taps * g.c // g.groups, DGRAD: taps * g.k // g.groups}.get(request.op, g.n * g.p * g.q)
        return reference.tolerance(request.dtype.storage, request.result_dtype, depth, math)

    def parts(self) -> Iterator[Arrays]:
        g = self.request.shape.geometry
        if self.request.op in (FPROP, DGRAD):
            first = "x" if self.request.op == FPROP else "dy"
            for part in _slices(g.n):
                yield {name: a[part] if name in (first, "c", "out") else a for name, a in self.arrays.items()}
            return
        for part in _slices(g.k) if g.groups == 1 else (slice(None),):
            sliced = {name: a[part] if name in ("c", "out") else a for name, a in self.arrays.items()}
            yield sliced | {"dy": self.arrays["dy"][..., part]}

    def compute(self, part: Arrays) -> None:
        precision = None if self.request.math == "default" else self.request.math
        how = {"out_dtype": self.request.result_dtype, "precision": precision, "backend": "reference"}
        functions = (conv2d, conv2d_dgrad, conv2d_wgrad)
        part["out"][...] = self._called(functions, part, **how, **self.activation)

    def expected(self, part: Arrays) -> tuple[Array, Array]:
        how = {"out_dtype": self.request.result_dtype, "math": self.request.math}
        return self._called(_CONVOLUTIONS, part, **how, **self.activation), self._called(_MAGNITUDES, part)

    def finish(self, check: _Check) -> None:
        """There is nothing but parts."""

    def _called(self, functions: tuple[Any, Any, Any], part: Arrays, **how: Any) -> Array:
        """One of three functions that take the same: for fprop, dgrad and wgrad."""
        of_fprop, of_dgrad, of_wgrad = functions
        how |= self.how
        if "bias" in part:
            how["bias"] = part["bias"]
        if self.request.op == FPROP:
            done = of_fprop(part["x"], part["w"], part.get("c"), **how)
        elif self.request.op == DGRAD:
            done = of_dgrad(part["dy"], part["w"], part["out"].shape, part.get("c"), **how)
        else:
            done = of_wgrad(part["dy"], part["x"], part["out"].shape, part.get("c"), **how)
        made: Array = done
        return made


@dataclass
class _FusedConv(_Conv):
    """With a tree over the pixels and channels of the result."""

    tree: EpilogueVisitorTree = field(kw_only=True)

    def parts(self) -> Iterator[Arrays]:
        yield self.arrays

    def compute(self, part: Arrays) -> None:
        acc, matrices = self._accumulated(part, _CONVOLUTIONS), self._matrices(part)
        read = {one.name: matrices[one.name] for one in self.tree.inputs}
        for name, values in reference.evaluate(self.tree, acc, read, out_dtype=self.request.result_dtype).items():
            part[name][...] = values.reshape(part[name].shape)

    def compare(self, part: Arrays, check: _Check) -> None:
        acc, absolute = (self._accumulated(part, one) for one in (_CONVOLUTIONS, _MAGNITUDES))
        error = check.limits.atol_factor * absolute + check.limits.rtol * np.abs(acc)
        _compare_tree(check, self.tree, self._matrices(part), acc, error, out_dtype=self.request.result_dtype)

    def _accumulated(self, part: Arrays, functions: Any) -> Array:
        """A convolution without what follows it, as a matrix."""
        how = {"out_dtype": CutlassDtype.F64, "math": self.request.math} if functions is _CONVOLUTIONS else {}
        names = (*OPERANDS[self.request.op], "out", *(["c"] if self.request.epilogue.beta != 0 else []))
        own = {name: part[name] for name in names}
        made = self._called(functions, own, **how)
        return made.reshape(matrix_shape(made.shape))

    def _matrices(self, part: Arrays) -> Arrays:
        image = part["out"].shape
        found = {}
        for name in (*(one.name for one in self.tree.inputs), *(one.name for one in self.tree.outputs), "out"):
            array = part[name]
            dense = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
            found[name] = array.reshape(as_matrix(name, array.shape, dense, image)[0])
        return found


@dataclass
class _Grouped(_Near):
    request: GroupedGemmRequest
    arrays: Arrays

    def __post_init__(self) -> None:
        epilogue = self.request.epilogue
        self.how: dict[str, Any] = {"alpha": epilogue.alpha, "beta": epilogue.beta}

    def limits(self, math: str) -> reference.Tolerance:
        request = self.request
        depth = max(group.k for group in request.shape.groups)
        rounded = request.result_dtype if request.tree is None else CutlassDtype.F32
        return reference.tolerance(request.dtype, rounded, depth, math)

    def parts(self) -> Iterator[Arrays]:
        slots = operation_of(self.request).operands(self.request)
        for g in range(len(self.request.shape.groups)):
            yield {slot.name: self.arrays[slot.labels[g if slot.listed else 0]] for slot in slots}

    def compute(self, part: Arrays) -> None:
        lists: dict[str, Any] = {name: [array] for name, array in part.items() if name != "out"}
        how = self.how | {"epilogue": self.request.tree, "out_dtype": self.request.result_dtype}
        (part["out"][...],) = grouped_gemm(**lists, **how, backend="reference")

    def expected(self, part: Arrays) -> tuple[Array, Array]:
        return self._product(part, self.request.result_dtype), self._magnitude(part)

    def compare(self, part: Arrays, check: _Check) -> None:
        tree = self.request.tree
        if tree is None:
            super().compare(part, check)
            return
        acc = self._product(part, CutlassDtype.F64)
        error = check.limits.atol_factor * self._magnitude(part) + check.limits.rtol * np.abs(acc)
        _compare_tree(check, tree, part, acc, error, out_dtype=self.request.result_dtype)

    def _product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        c = part["c"] if self.request.epilogue.beta != 0 else None
        made: Array = reference.gemm(part["a"], part["b"], c, **self.how, out_dtype=dtype, math=self.request.math)
        return made

    def _magnitude(self, part: Arrays) -> Array:
        c = part["c"] if self.request.epilogue.beta != 0 else None
        made: Array = reference.absolute_product(part["a"], part["b"], c, **self.how)
        return made

    def finish(self, check: _Check) -> None:
        """There is nothing but parts."""
