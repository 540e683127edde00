"""`gemm`: arrays in, array out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import _core, devices, fp4, numerics, operands, problem, reference, scaled
from .arguments import (
    NUMBERS,
    check_backend,
    check_devices,
    check_out,
    check_scalars,
    on_reference,
    refuse_jax_out,
    result_dtype,
)
from .errors import InvalidOperandError, UnsupportedError
from .generator.dtypes import CutlassDtype
from .generator.key import ROW
from .generator.rules import FP8_TYPES, gemm_types, supports_layouts
from .numerics import FAST, math_mode
from .op_plan import OpPlan
from .operands import CPU, CUDA
from .plan import BACKENDS as GPU_BACKENDS
from .plan import Plan, make
from .plan_cache import PlanCache
from .problem import GemmProblem, MatrixSpec
from .requests import refuse_epilogue

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 256

_SCALARS = frozenset({int, float, np.float32, np.float64, np.int32, np.int64})
"""What the fast path takes as alpha and beta; anything else is looked at first."""

_plans: PlanCache[Plan | OpPlan] = PlanCache(PLANS_KEPT)


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_d: Any = None,
    amax: Any = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    fast_accum: bool = False,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
) -> Any:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)).

    Args:
        a: (..., M, K); anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the GPU and back). fp4
            is bytes of two elements, (..., M, K / 2) of uint8, or in NumPy float4_e2m1fn.
        b: (..., K, N), of the same dtype and device. Batch dimensions broadcast as in NumPy. fp4 is the transpose of
            uint8 (..., N, K / 2), or in NumPy float4_e2m1fn.
        c: (..., M, N) of the result's dtype; needed exactly when `beta` is not 0.
        out: (..., M, N), written in place and returned; may be `c` itself, and overlaps nothing else. Not for JAX.
        alpha: scalar; a whole number where the result is an integer. With 0, A and B are not read, unless scale_d is an
            array, amax is wanted or they are fp4. Second-level scales of nvfp4 belong here, multiplied.
        beta: scalar, likewise. With 0, there is no C.
        bias: (N,), added to every row. Reference backend only, for now.
        activation: a name of `reference.ACTIVATIONS`. Reference backend only, for now.
        epilogue: refused: fused epilogues are not there yet.
        scale_a: factor of A: a number, or for fp8 a float32 array on the device of A: of one element, (..., M, 1) for
            the rows of A, or (..., M, ceil(K / 128)) for blocks of 1 x 128. For fp4 an array, whose dtype says the
            kind: e4m3, one for 16 elements of K (nvfp4), or e8m0, which may be called uint8, for 32 (mxfp4); in the
            order of `quantization.swizzle_scales`, or in NumPy also plain, (..., M, K / 16 or 32).
        scale_b: factor of B: a number, or for fp8 a float32 array: of one element, (..., 1, N) for the columns of B, or
            (..., ceil(K / 128), ceil(N / 128)) for blocks of 128 x 128; block scales come for both or neither. For fp4
            as scale_a, swizzled with the columns of B as rows, or in NumPy plain, (..., K / 16 or 32, N).
        scale_d: factor of the result: a number, or for fp8 a float32 array of one element.
        amax: for fp8: float32 array of one element, which receives the largest magnitude of D before scale_d.
        out_dtype: element type of the result; defaults to A's (int32 for int8, bf16 for fp8 and fp4).
        precision: for float32 operands: `ieee` (default), `tf32` or `3xtf32`.
        fast_accum: lets fp8 products be added up in the tensor cores alone, which is faster and keeps about 14 bits;
            ignored for other dtypes.
        stream: where to launch: an integer handle or a stream object; defaults to the current stream of the framework
            of `a`.
        backend: `auto` (a GPU kernel, prebuilt or compiled; without a GPU the reference, warning once), `prebuilt`,
            `jit` or `reference`.
        jit: what to do where the table lacks the kernel: `auto` compiles it, `off` raises, `background` starts with the
            best kernel of the table and turns to the compiled one when it is ready; None leaves it to
            ATOMR_CUTLASS_JIT.

    Returns:
        `out`, or a new row-major array of the kind of `a`. Work is in flight on the stream when a GPU array returns.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError: the table lacks the kernel and it must not be compiled; names it and the knob that adds
            it.
        CompileError: the kernel's source does not compile.
        DeviceUnavailableError: `prebuilt`, `jit` or GPU operands without a usable GPU; NVRTC is needed and missing.
    """
    if (
        bias is activation is epilogue is out_dtype is None
        and backend in GPU_BACKENDS and type(alpha) in _SCALARS and type(beta) in _SCALARS
    ):  # fmt: skip
        plain = scale_a is scale_b is scale_d is amax is None
        arrays = (a, b, c) if plain else (a, b, c, scale_a, scale_b, scale_d, amax)
        signature = _core.signature(*arrays, out) if plain or alpha != 0 else None
        if signature is not None:
            found = _plans.get((signature, precision, fast_accum, beta == 0, backend, jit))
            if found is not None:
                if type(alpha) not in _PLAIN_NUMBERS or type(beta) not in _PLAIN_NUMBERS:
                    check_scalars(alpha, beta, c)
                if plain:
                    return found(a, b, c, out=out, alpha=alpha, beta=beta, stream=stream)
                check_scalars(alpha, beta, c)
                given = (array for array in arrays if array is not None)
                return found(*given, out=out, alpha=alpha, beta=beta, stream=stream)
    return _Call(
        a=a,
        b=b,
        c=c,
        out=out,
        alpha=alpha,
        beta=beta,
        bias=bias,
        activation=activation,
        epilogue=epilogue,
        scales={"scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d},
        amax=amax,
        out_dtype=out_dtype,
        precision=precision,
        fast_accum=fast_accum,
        stream=stream,
        backend=backend,
        jit=jit,
    ).run()


class _Call(NamedTuple):
    """One call of `gemm` that no kept plan serves: checked in full before anything is allocated or launched."""

    a: Any
    b: Any
    c: Any
    out: Any
    alpha: float
    beta: float
    bias: Any
    activation: str | None
    epilogue: Any
    scales: dict[str, Any]
    amax: Any
    out_dtype: CutlassDtype | None
    precision: str | None
    fast_accum: bool
    stream: Any
    backend: str
    jit: str | None

    def run(self) -> Any:
        check_backend(self.backend, BACKENDS)
        if self.epilogue is not None:
            raise UnsupportedError("fused epilogues are not there yet: leave epilogue out")
        check_scalars(self.alpha, self.beta, self.c)
        if self.amax is not None and self.backend != "reference" and isinstance(self.scales["scale_d"], NUMBERS):
            raise UnsupportedError(
                "amax is taken before scale_d, and a number would be part of alpha: give scale_d as an array"
            )
        given = {"a": self.a, "b": self.b, "c": self.c, "out": self.out, "bias": self.bias, "amax": self.amax}
        given |= {name: scale for name, scale in self.scales.items() if not isinstance(scale, NUMBERS)}
        views = {name: operands.as_operand(array) for name, array in given.items() if array is not None}
        if fp4.among(views):
            check_devices(views)
            views = fp4.host_views(views) if views["a"].device_type == CPU else views
        what = _operation(views, self.out_dtype, self.precision, fast_accum=self.fast_accum)
        for name in ("scale_d", "amax"):
            view = what.views.get(name)
            if view is None:
                continue
            if operands.dtype_of(view, name) is not CutlassDtype.F32:
                raise InvalidOperandError(f"{name} is {operands.dtype_of(view, name).value}; expected float32")
            if math.prod(view.shape) != 1:
                raise InvalidOperandError(f"{name} has shape {view.shape}; expected one element")
        refuse_jax_out(self.out)
        if on_reference(self.backend, what.views["a"]):
            return self._on_reference(what)
        types = gemm_types(what.dtype, what.dtype_b, what.result, what.math)
        if not types:
            raise UnsupportedError(types.reason)
        refuse_epilogue(self.bias, self.activation)
        if what.dtype is fp4.FP4:
            view = what.views["a"]
            fp4.check_arch(devices.require_arch(devices.get(view.device if view.device_type == CUDA else 0)))
            fp4.check_given(what.views)
        return self._on_host(what) if what.views["a"].device_type == CPU else self._on_gpu(what)

    def _on_gpu(self, what: _Operation) -> Any:
        alpha, beta = self._folded_scalars()
        views = dict(what.views)
        if self.stream is None:
            stream = operands.current_stream(self.a, views["a"])
        else:
            stream = operands.stream_handle(self.stream)
        array = self.out
        if array is None:
            array, views["out"] = operands.empty(what.shape, what.result, views["a"].device, self.a)
        if 0 not in what.shape:
            self._keep(self._launch(views, what.math, alpha, beta, self.a, stream))
        return operands.finished(array, views["out"], stream)

    def _keep(self, made: Plan | OpPlan) -> None:
        """Remembers the plan under what the fast path of `gemm` can see without Python."""
        if self.out_dtype is not None or (self.out is None and not _core.has_exchange_api(self.a)):
            return
        scaling = (*self.scales.values(), self.amax)
        arrays = (self.a, self.b, self.c)
        if isinstance(made, OpPlan):
            arrays += scaling
        elif any(scale is not None for scale in scaling):
            return  # numbers, which are part of this call's scalars
        signature = _core.signature(*arrays, self.out)
        if signature is None:
            return
        _plans.insert(made, (signature, self.precision, self.fast_accum, self.beta == 0, self.backend, self.jit))

    def _on_host(self, what: _Operation) -> Any:
        """Host operands: copied to GPU 0, multiplied there, and the result copied back."""
        alpha, beta = self._folded_scalars()
        if 0 in what.shape:
            return self._deliver(np.empty(what.shape, numerics.numpy_dtype(what.result)), what)
        # The copies may lie as kernels like them: 8-bit ones want B contiguous along K.
        columns = {"b"} if not supports_layouts("sm80", what.dtype, ROW, ROW) else set()
        names = (*what.inputs, *(["amax"] if "amax" in what.views else []))
        arrays = {name: operands.to_numpy(what.views[name]) for name in names}
        if what.dtype is fp4.FP4:
            arrays, columns = fp4.gpu_forms(arrays), {"b"}
        views = {name: operands.upload(array, 0, columns=name in columns) for name, array in arrays.items()}
        _, views["out"] = operands.empty(what.shape, what.result, 0, None)
        self._launch(views, what.math, alpha, beta, None, 0)
        if "amax" in views:
            np.copyto(operands.to_numpy(what.views["amax"]), operands.download(views["amax"]), casting="no")
        return self._deliver(operands.download(views["out"]), what)

    def _launch(
        self, views: dict[str, _core.Operand], math: str, alpha: float, beta: float, like: Any, stream: int
    ) -> Plan | OpPlan:
        def spec(name: str) -> MatrixSpec:
            view = views[name]
            if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
                return fp4.logical(view, name)
            return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)

        what = GemmProblem(
            a=spec("a"),
            b=spec("b"),
            c=spec("c") if "c" in views else None,
            d=spec("out"),
            math=math,
            device=views["a"].device,
        )
        if alpha == 0 and not {"scale_d", "amax"} & set(views) and what.a.dtype is not fp4.FP4:
            # BLAS: then A and B are not read, and so neither are their scales.
            views = {name: view for name, view in views.items() if name not in _SCALING}
        how = {"like": like, "backend": self.backend, "jit": self.jit, "stream": stream}
        if not set(views) & _SCALING:
            made = make(what, **how)
            made(views["a"], views["b"], views.get("c"), out=views["out"], alpha=alpha, beta=beta, stream=stream)
            return made
        scaled_plan = scaled.make(what, self._scales(what, views), **how)
        order = ("a", "b", "c", "scale_a", "scale_b", "scale_d", "amax", "out")
        # In the order of the plan's slots.
        scaled_plan(*(views[name] for name in order if name in views), alpha=alpha, beta=beta, stream=stream)
        return scaled_plan

    @staticmethod
    def _scales(what: GemmProblem, views: dict[str, _core.Operand]) -> scaled.Scales:
        """The scales that are arrays, as they lie."""
        if what.a.dtype is fp4.FP4:
            vector = fp4.VECTOR[fp4.kind_of(views)]
            for name, rows in (("scale_a", what.m), ("scale_b", what.n)):
                fp4.check_swizzled(views[name], name, rows, -(-what.k // vector))
            first, second = (
                scaled.Scale(view.shape, view.strides, "swizzled", view.dtype)
                for view in (views["scale_a"], views["scale_b"])
            )
            return scaled.Scales(first, second)
        if what.a.dtype not in FP8_TYPES:
            names = ", ".join(sorted(set(views) & _SCALING))
            raise UnsupportedError(f"{names}: only fp8 kernels take arrays; give numbers, or fold them into alpha")
        found = {}
        for name in sorted(set(views) & _SCALING):
            view = views[name]
            if operands.dtype_of(view, name) is not CutlassDtype.F32:
                raise InvalidOperandError(f"{name} is {operands.dtype_of(view, name).value}; expected float32")
            found[name] = MatrixSpec(view.shape, view.strides, CutlassDtype.F32)
        forms = scaled.scale_forms(what, found.get("scale_a"), found.get("scale_b"))

        def scale(name: str, form: str = "tensor") -> scaled.Scale | None:
            spec = found.get(name)
            return None if spec is None else scaled.Scale(spec.shape, spec.strides, form)

        return scaled.Scales(scale("scale_a", forms[0]), scale("scale_b", forms[1]), scale("scale_d"), scale("amax"))

    def _on_reference(self, what: _Operation) -> Any:
        on_gpu = what.views["a"].device_type == CUDA
        fetch = operands.download if on_gpu else operands.to_numpy
        host = {name: fetch(what.views[name]) for name in what.inputs}
        if what.dtype is fp4.FP4 and on_gpu:
            host = fp4.plain_forms(host)
        scale_d = host.get("scale_d", self.scales["scale_d"])
        arguments = {
            "alpha": self.alpha,
            "beta": self.beta,
            "bias": host.get("bias"),
            "activation": self.activation,
            "scale_a": host.get("scale_a", self.scales["scale_a"]),
            "scale_b": host.get("scale_b", self.scales["scale_b"]),
            "scale_d": None if scale_d is None else float(np.asarray(scale_d).reshape(())),
            "out_dtype": what.result,
            "math": what.math,
        }
        if self.amax is None:
            computed = reference.gemm(host["a"], host["b"], host.get("c"), **arguments)
        else:
            computed, amax = reference.gemm_with_amax(host["a"], host["b"], host.get("c"), **arguments)
            if on_gpu:
                operands.copy_in(amax.reshape(what.views["amax"].shape), what.views["amax"])
            else:
                operands.to_numpy(what.views["amax"])[...] = amax.reshape(what.views["amax"].shape)
        if not on_gpu:
            return self._deliver(computed, what)
        array, view = self.out, what.views.get("out")
        if view is None:
            array, view = operands.empty(what.shape, what.result, what.views["a"].device, self.a)
        operands.copy_in(computed, view)
        return operands.finished(array, view, 0)

    def _deliver(self, computed: np.ndarray[Any, Any], what: _Operation) -> Any:
        """A host result, in `out` or as a new array of the kind of `a`."""
        if self.out is None:
            return operands.host_result(computed, self.a)
        np.copyto(operands.to_numpy(what.views["out"]), computed, casting="no")
        return self.out

    def _folded_scalars(self) -> tuple[float, float]:
        """Without an activation, scale factors that are numbers are part of alpha and beta."""
        scale_a, scale_b, scale_d = (float(v) if isinstance(v, NUMBERS) else 1.0 for v in self.scales.values())
        return self.alpha * scale_a * scale_b * scale_d, self.beta * scale_d


class _Operation(NamedTuple):
    """What the operands say: their views by name, the result's shape and dtype, and the math mode."""

    views: dict[str, _core.Operand]
    shape: tuple[int, ...]
    dtype: CutlassDtype
    dtype_b: CutlassDtype
    result: CutlassDtype
    math: str

    @property
    def inputs(self) -> list[str]:
        return [name for name in self.views if name not in ("amax", "out")]


_SCALING = {"scale_a", "scale_b", "scale_d", "amax"}
_PLAIN_NUMBERS = frozenset({int, float})


def _operation(
    views: dict[str, _core.Operand], out_dtype: CutlassDtype | None, precision: str | None, *, fast_accum: bool
) -> _Operation:
    check_devices(views)
    dtype, other = (fp4.element_type(views[name], name) for name in "ab")
    if dtype is not other and fp4.FP4 in (dtype, other):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: fp4 is multiplied by fp4 only; quantize both alike"
        )
    shape = _result_shape(views)
    if dtype is not other and not {dtype, other} <= set(FP8_TYPES):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: both must have one dtype, but for two of fp8"
        )
    if "out" in views:
        check_out(views, ("a", "b", "c", "bias"))
    math = math_mode(dtype, precision)
    if fast_accum and dtype in FP8_TYPES:
        math = FAST
    return _Operation(views, shape, dtype, other, result_dtype(views, out_dtype, dtype), math)


def _result_shape(views: dict[str, _core.Operand]) -> tuple[int, ...]:
    a, b = views["a"].shape, views["b"].shape
    for name in ("a", "b"):
        if len(views[name].shape) < 2:
            raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected at least 2 dimensions")
    if a[-1] != b[-2]:
        raise InvalidOperandError(f"K disagrees: a {a} has {a[-1]} columns, b {b} has {b[-2]} rows")
    shape = (*problem.broadcast_batches(a[:-2], b[:-2]), a[-2], b[-1])
    if "c" in views:
        c = views["c"].shape
        if len(c) < 2 or c[-2:] != shape[-2:]:
            raise InvalidOperandError(f"c has shape {c}; expected (..., {shape[-2]}, {shape[-1]})")
        if problem.broadcast_batches(c[:-2], shape[:-2]) != shape[:-2]:
            raise InvalidOperandError(f"c has shape {c}, whose batch dimensions do not broadcast to {shape}")
    if "out" in views and views["out"].shape != shape:
        raise InvalidOperandError(f"out has shape {views['out'].shape}; the result has {shape}")
    if "bias" in views and views["bias"].shape != shape[-1:]:
        raise InvalidOperandError(f"bias has shape {views['bias'].shape}; expected ({shape[-1]},)")
    return shape
