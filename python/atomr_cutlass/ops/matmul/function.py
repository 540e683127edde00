"""One matmul: its arrays checked, then computed by kernels or by the reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ... import _core, reference
from ...arrays import numerics, operands
from ...arrays.arguments import check_devices, on_reference
from ...arrays.fp4 import FP4
from ...arrays.numerics import FAST, AnyArray, default_out_dtype, math_mode
from ...arrays.operands import BYTE, CUDA
from ...checks import NUMBERS, expect
from ...epilogue import EpilogueVisitorTree
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.key import ROW
from ...generator.rules import FP8_TYPES, accumulator, gemm_types, supports_layouts
from ...pipeline import devices
from ...pipeline.operation import settled
from ..gemm import reference as gemm_reference
from .epilogues import ADDED, AMAX, AUX, BIAS, READ, WRITTEN, tree_of
from .heuristic import HeuristicKey
from .launch import Launch, Views, number, product_of, sums_of, with_gaps
from .memory import as_operand, vector, viewed
from .plans import Wishes, plan_of
from .recipe import Recipe, arrays_of, recipes, scalars_of, signature
from .request import MatmulRequest

T = TypeVar("T")


def matmul(request: MatmulRequest) -> Any:
    """Computes D = epilogue(alpha * scale_a * scale_b * op(A) op(B) + beta * C), column-major.

    A kernel of the table, else one that is compiled, computes D^T = op(B)^T op(A)^T, which is row-major, with the
    epilogue fused. BGRADA and BGRADB launch a second one, which multiplies the operand by a vector of ones; it reads
    the operand as the product does (with precision `tf32` rounded to TF32, times its scale). Plans are kept: a request
    whose arrays lie as an earlier one's did only launches.

    Args:
        request: what to compute; see `MatmulRequest`.

    Returns:
        The request's `d`, or `c` without one; without either a new (n, m) array of the kind of `a`. Work is in flight
        on the stream when a GPU array returns, unless the request has a reply: then it is done.

    Raises:
        InvalidOperandError: an array of a wrong element type, device or size, that does not lie as memory, that cannot
            be written, or that shares memory with a result.
        UnsupportedError: no kernel serves the request, or it needs more workspace; the reason says what would cure it.
        KernelNotFoundError: the table lacks the kernel and it must not be compiled; names it and the knob that adds it.
        CompileError: the kernel's source does not compile.
        DeviceUnavailableError: `prebuilt`, `jit` or GPU arrays without a usable GPU; NVRTC is needed and missing.
    """
    expect(request, MatmulRequest, "request")
    return settled(request.reply, lambda: _computed(request))


def _computed(request: MatmulRequest) -> Any:
    with operands.launching(request.stream, request.a):
        key = signature(request)
        recipe = None if key is None else recipes.get(key)
        if recipe is not None:
            # What a plan refuses, it refuses before it launches: what follows says it in the request's words.
            with contextlib.suppress(InvalidOperandError):
                return recipe.run(request)
        call = call_of(request)
        result = call.run(key)
        if request.reply is not None:
            call.wait()
        return result


@dataclass(frozen=True)
class Call:
    """A request with its arrays checked, and D allocated for GPU arrays.

    Attributes:
        request: what to compute.
        views: the arrays by the request's names, matrices transposed: `a` (k, m), `b` (n, k), `c` and `d` (n, m),
            `gelu_aux` (n, m), or (n, ceil(m / 8)) of bits; scales `scale_a` (1, m) or (1,), `scale_b` (n, 1) or (1,),
            `scale_d`, `amax_d`. No `d` where host memory for it is to be made.
        array: what is returned; None where that is made later.
        dtype: element type of D.
        math: math mode of the kernel key.
        tree: what follows the product; None for nothing.
        alpha, beta: the scalars, with the scales that are numbers.
        stream: where to launch.
    """

    request: MatmulRequest
    views: Views
    array: Any
    dtype: CutlassDtype
    math: str
    tree: EpilogueVisitorTree | None
    alpha: float
    beta: float
    stream: int

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are on a GPU."""
        return self.views["a"].device_type == CUDA

    @property
    def device(self) -> int:
        """Index of the GPU, of that which serves host arrays for these."""
        return self.views["a"].device if self.on_gpu else 0

    def on(self, stream: int) -> Call:
        """The same on another stream."""
        return replace(self, stream=stream)

    def run(self, key: Hashable = None) -> Any:
        """Computes. Results and errors are those of `matmul`.

        Args:
            key: what a recipe for requests like this one is kept by; None: it is not kept.
        """
        if on_reference(self.request.backend, self.views["a"], stacklevel=7):
            return self._by_reference()
        first, second = (operands.dtype_of(self.views[name], name) for name in "ba")
        types = gemm_types(first, second, self.dtype, self.math, tree=self.tree is not None)
        if not types:
            raise UnsupportedError(types.reason)
        if 0 in (self.request.m, self.request.n):
            # Sums of an operand are not sums of nothing.
            return self._of_nothing() if self.on_gpu and not self.request.form.summed else self._by_reference()
        return self._on_gpu(key) if self.on_gpu else self._on_host()

    def wait(self) -> None:
        """Returns when what was launched on the GPU is done."""
        if self.on_gpu:
            _core.synchronize(self.device, self.stream)

    # By kernels

    def _on_gpu(self, key: Hashable) -> Any:
        launch, views = self._launch(self.views, self.request.a, self.stream)
        if key is not None and not self.request.form.summed and self.array is not None and launch.checked:
            lies = tuple((name, view.shape, view.strides) for name, view in views.items())
            recipes.insert(Recipe(launch, lies, self.dtype), key)
        return operands.finished(self.array, self.views["d"], self.stream)

    def _of_nothing(self) -> Any:
        """The sums, and the largest magnitude, of a D without elements: 0, in the order of the stream."""
        for name in (BIAS, AMAX):
            if name in self._written:
                operands.clear_async(self.views[name], self.stream)
        return operands.finished(self.array, self.views["d"], self.stream)

    def _on_host(self) -> Any:
        """Copies the arrays to GPU 0, and the results back."""
        request = self.request
        transposed = {name for name in "ab" if getattr(request, f"trans{name}")}
        if not supports_layouts("sm80", operands.dtype_of(self.views["a"], "a"), ROW, ROW):
            transposed = {"a"}  # the copies may lie as kernels like them: contiguous along k
        written = self._written
        views = {
            name: operands.upload(operands.to_numpy(view), 0, columns=name in transposed)
            for name, view in self.views.items()
            if name not in written
        }
        for name, (shape, element) in written.items():
            views[name] = operands.empty_of(shape, element, 0, None)[1]
        self._launch(views, None, 0)
        return self._delivered({name: operands.download(views[name]) for name in written})

    def _launch(self, views: Views, like: Any, stream: int) -> tuple[Launch, Views]:
        """Launches kernels on GPU arrays; how, and with which views."""
        request, form, views = self.request, self.request.form, dict(views)
        if form.masked and form.aux == WRITTEN:
            views[AUX] = with_gaps(views[AUX])
        device = views["a"].device
        wishes = Wishes(request.backend, request.jit, request.workspace_size)
        known = HeuristicKey(
            request.m, request.n, request.k, operands.dtype_of(views["a"], "a"), request.transa, request.transb,
            request.epilogue, devices.get(device).arch,
        )  # fmt: skip
        product, names = product_of(views, self.tree, self.math, alpha=self.alpha)
        sums = None
        if form.summed:
            sums = sums_of(views, form.summed, request.k, stream)
            sum_product, sum_names = product_of(sums, None, self.math)
        launch = Launch(plan_of(product, wishes, known, like=like, stream=stream), names)
        if sums is not None:
            sum_launch = Launch(plan_of(sum_product, wishes, None, like=like, stream=stream), sum_names)
        launch(views, self.alpha, self.beta, stream)
        if sums is not None:
            sum_launch(sums, number(getattr(request.scales, form.summed)), 0.0, stream)
        return launch, views

    # By the reference

    def _by_reference(self) -> Any:
        written = self._written
        fetch = operands.download if self.on_gpu else operands.to_numpy
        host = {name: fetch(view) for name, view in self.views.items() if name not in written}
        a, b, c = host["a"], host["b"], host.get("c")
        how: dict[str, Any] = {
            "alpha": self.alpha,
            "beta": self.beta,
            "scale_a": host.get("scale_b"),
            "scale_b": host.get("scale_a"),
            "math": self.math,
        }
        scale_d = float(host["scale_d"].reshape(())) if "scale_d" in host else None
        if self.tree is not None:
            acc = gemm_reference.gemm(b, a, c, **how, out_dtype=CutlassDtype.F64)
            inputs = {one.name: host[one.name] for one in self.tree.inputs}
            computed = reference.evaluate(self.tree, acc, inputs, out_dtype=self.dtype, scale_d=scale_d)
            computed["d"] = computed.pop(RESULT)
        elif AMAX in self.views:
            made = gemm_reference.gemm_with_amax(b, a, c, **how, scale_d=scale_d, out_dtype=self.dtype)
            computed = {"d": made.d, AMAX: made.amax}
        else:
            computed = {"d": gemm_reference.gemm(b, a, c, **how, scale_d=scale_d, out_dtype=self.dtype)}
        if self.request.form.summed:
            computed[BIAS] = self._summed(host)
        return self._delivered(computed)

    def _summed(self, host: dict[str, AnyArray]) -> AnyArray:
        name = self.request.form.summed
        one = host[name]
        if self.math == "tf32":
            one = numerics.round_to_tf32(one)
        sums = numerics.to_float64(one).sum(axis=0 if name == "a" else 1) * number(getattr(self.request.scales, name))
        scale = host.get(f"scale_{name}")
        if scale is not None:
            sums = sums * numerics.to_float64(scale).reshape(-1)
        return numerics.saturating_cast(sums, accumulator(operands.dtype_of(self.views[name], name)))

    # Results

    @property
    def _written(self) -> dict[str, tuple[tuple[int, ...], tuple[int, int]]]:
        """Shape and element of everything that is written, by name."""
        request = self.request
        found = {"d": ((request.n, request.m), self.dtype.dlpack)}
        names = [BIAS] if request.form.writes_bias else []
        names += [AUX] if request.form.aux == WRITTEN else []
        names += [AMAX] if AMAX in self.views else []
        return found | {name: (self.views[name].shape, self.views[name].dtype) for name in names}

    def _delivered(self, computed: dict[str, AnyArray]) -> Any:
        """Results of the host, written where they belong; D as it is returned."""
        for name, values in computed.items():
            if name not in self.views:
                continue
            if self.on_gpu:
                operands.copy_in(values.reshape(self.views[name].shape), self.views[name])
            else:
                np.copyto(operands.to_numpy(self.views[name]), values.reshape(self.views[name].shape), casting="no")
        if self.on_gpu:
            return operands.finished(self.array, self.views["d"], self.stream)
        return operands.host_result(computed["d"], self.request.a) if self.array is None else self.array


def call_of(request: MatmulRequest) -> Call:
    """Checks the arrays of a request, here and now, and notes which stream is current.

    Raises:
        InvalidOperandError, UnsupportedError: as `matmul`; nothing has been launched or written.
    """
    arrays = arrays_of(request)
    views = {name: operands.as_operand(array, name) for name, array in arrays.items()}
    check_devices(views)
    form, scales = request.form, request.scales
    types = {name: operands.dtype_of(views[name], name) for name in views if not (name == AUX and form.masked)}
    dtype, other = types["a"], types["b"]
    if FP4 in (dtype, other):
        raise UnsupportedError("matmul multiplies no fp4: use gemm, which takes its scales")
    if dtype is not other and not {dtype, other} <= set(FP8_TYPES):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: both must have one element type, but for two of fp8"
        )
    result = _result_dtype(request, views, dtype)
    mode = math_mode(dtype, request.precision)
    if request.fast_accum and dtype in FP8_TYPES:
        mode = FAST
    found = _matrices(request, views)
    _check_vectors(request, types, found, dtype)
    fused = not form.linear or (AMAX in found and dtype not in FP8_TYPES)
    if fused and isinstance(scales.d, NUMBERS):
        raise UnsupportedError(
            "scales.d is a number, and what follows the product does not let it be part of alpha: give it as an array "
            "of one float32 (fp8), or scale the result"
        )
    if AMAX in found and isinstance(scales.d, NUMBERS):
        raise UnsupportedError(
            "amax_d is taken before scales.d, and a number would be part of alpha: give it as an array of one float32"
        )
    if AMAX in found and result is CutlassDtype.I32:
        raise UnsupportedError("amax_d is of floating results, and D is int32: give a float32 d, or leave amax_d out")
    tree = None
    if fused:
        compute = CutlassDtype.F64 if dtype is CutlassDtype.F64 else CutlassDtype.F32
        bias = types[BIAS] if form.bias == ADDED else None
        tree = tree_of(form, bias, types.get(AUX), compute, amax=AMAX in found)
    alpha, beta = scalars_of(request)
    array = arrays.get("d")
    if "d" not in found and views["a"].device_type == CUDA:
        array, found["d"] = operands.empty((request.n, request.m), result, views["a"].device, request.a)
    _check_written(request, arrays, found)
    return Call(
        request=request,
        views=found,
        array=array,
        dtype=result,
        math=mode,
        tree=tree,
        alpha=alpha,
        beta=beta,
        stream=operands.launch_stream().handle,
    )


def _result_dtype(request: MatmulRequest, views: Views, dtype: CutlassDtype) -> CutlassDtype:
    if "d" not in views:
        return default_out_dtype(dtype, fused=not request.form.linear)
    result = operands.dtype_of(views["d"], "d")
    if "c" in views and operands.dtype_of(views["c"], "c") is not result:
        raise InvalidOperandError(
            f"c is {operands.dtype_of(views['c'], 'c').value}; it must have D's element type, {result.value}"
        )
    return result


def _matrices(request: MatmulRequest, views: Views) -> Views:
    """The arrays as what they stand for; see `Call.views`."""
    found = {}
    rows, columns = request.rows, request.columns
    for name in "abcd":
        if name not in views:
            continue
        into_c = name == "d" and request.d is None
        leading = request.leading("c" if into_c else name)
        swap = getattr(request, f"trans{name}", False)
        found[name] = viewed(
            views[name], "c" if into_c else name, columns[name], rows[name], leading, label=f"ld{name}", swap=swap
        )
    if AUX in views:
        found[AUX] = _auxiliary(request, views[AUX])
    if BIAS in views:
        found[BIAS] = vector(views[BIAS], BIAS, request.n if request.form.summed == "b" else request.m)
    for name, length, shape in (("scale_a", request.m, (1, request.m)), ("scale_b", request.n, (request.n, 1))):
        if name not in views:
            continue
        size = math.prod(views[name].shape)
        if size not in (1, length):
            raise InvalidOperandError(f"{name} has {size} elements; expected one, or {length}")
        found[name] = vector(views[name], name, size)
        if size > 1:
            found[name] = as_operand(found[name], shape, (shape[1], 1))
    for name in ("scale_d", AMAX):
        if name in views:
            if math.prod(views[name].shape) != 1:
                raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected one element")
            found[name] = as_operand(views[name], (1,), (1,))
    return found


def _auxiliary(request: MatmulRequest, view: _core.Operand) -> _core.Operand:
    leading = request.leading("aux")
    if not request.form.masked:
        return viewed(view, AUX, request.n, request.m, leading, label="ldaux")
    if view.dtype != BYTE:
        raise InvalidOperandError(f"{AUX} is no array of bytes; the bits of relu are uint8")
    width = leading // 8
    whole = viewed(view, AUX, request.n, width if request.m else 0, width, label="ldaux / 8 =")
    return as_operand(whole, (request.n, -(-request.m // 8)), (width, 1))


def _check_vectors(request: MatmulRequest, types: dict[str, CutlassDtype], found: Views, dtype: CutlassDtype) -> None:
    """Refuses vectors and scales of a wrong element type."""
    form, acc = request.form, accumulator(dtype)
    floating = CutlassDtype.F64 if dtype is CutlassDtype.F64 else CutlassDtype.F32
    wanted = dict.fromkeys(("scale_a", "scale_b", "scale_d"), CutlassDtype.F32) | {AMAX: floating}
    if form.writes_bias:
        wanted[BIAS] = acc if form.summed else floating
    for name, one in wanted.items():
        if name in found and types[name] is not one:
            raise InvalidOperandError(f"{name} is {types[name].value}; expected {one.value}")
    scaling = [name for name in ("scale_a", "scale_b", "scale_d") if name in found]
    if scaling and dtype not in FP8_TYPES:
        raise UnsupportedError(
            f"{', '.join(scaling)}: only fp8 kernels take arrays; give numbers, or fold them into alpha"
        )
    for name in (BIAS, AUX):
        integers = name in types and types[name] in numerics.INTEGER_DTYPES
        if integers and not (name == BIAS and form.summed):
            raise InvalidOperandError(f"{name} is {types[name].value}; expected a floating element type")


def _check_written(request: MatmulRequest, arrays: dict[str, Any], found: Views) -> None:
    """Refuses results that cannot be written, or that share memory with anything but a matrix that D replaces."""
    form = request.form
    replaced = ["c", *([AUX] if form.aux == READ and not form.masked else [])]
    results = ["d", *([BIAS] if form.writes_bias else []), *([AUX] if form.aux == WRITTEN else []), AMAX]
    results = [name for name in results if name in found]
    for name in results:
        if name in arrays and operands.is_jax(arrays[name]):
            cure = "leave it out" if name == "d" else "give an array that may be written"
            raise InvalidOperandError(f"{name} is a JAX array, which cannot be written: {cure}")
        if found[name].read_only:
            raise InvalidOperandError(f"{name} is read-only: give an array that may be written")
    for name in results:
        for other, view in found.items():
            if other == name or not _core.overlap(found[name], view):
                continue
            same = all(getattr(view, one) == getattr(found[name], one) for one in ("pointer", "strides", "dtype"))
            if not (name == "d" and other in replaced and same):
                allowed = f" (d may be exactly {' or '.join(replaced)})" if name == "d" else ""
                raise InvalidOperandError(f"{name} overlaps {other}: give separate memory{allowed}")
