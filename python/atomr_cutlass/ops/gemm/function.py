"""`gemm`: arrays in, array out."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core
from ...arrays import fp4, numerics, operands
from ...arrays.arguments import (
    check_backend,
    check_devices,
    check_followers,
    check_scalars,
    on_reference,
    refuse_jax_out,
    views_of,
)
from ...arrays.operands import CPU, CUDA
from ...checks import NUMBERS, check_number, check_options
from ...errors import UnsupportedError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import EpilogueVisitorTree
from ...generator.rules import gemm_types
from ...pipeline import devices
from ...pipeline.op_plan import OpPlan
from ...pipeline.plan import BACKENDS as GPU_BACKENDS
from ...pipeline.plan import Plan
from ...pipeline.plan_cache import PlanCache
from . import scaled
from .arguments import SCALES, Arguments, Operation, check_single, operation_of, problem_of, scales_of
from .kernels import make

if TYPE_CHECKING:
    from .fused import FusedCall

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 256

_SCALARS = frozenset({int, float, np.float32, np.float64, np.int32, np.int64})
"""What the fast path takes as alpha and beta; anything else is looked at first."""
_PLAIN_NUMBERS = frozenset({int, float})

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
    **operands_of_epilogue: Any,
) -> Any:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)), or what `epilogue` makes.

    Args:
        a: (..., M, K); anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the GPU and back). fp4
            is bytes of two elements, (..., M, K / 2) of uint8, or in NumPy float4_e2m1fn.
        b: (..., K, N), of the same dtype and device. Batch dimensions broadcast as in NumPy. fp4 is the transpose of
            uint8 (..., N, K / 2), or in NumPy float4_e2m1fn.
        c: (..., M, N) of the result's dtype; needed exactly when `beta` is not 0.
        out: (..., M, N), written in place and returned; may be `c` itself, and overlaps nothing else. Not for JAX.
        alpha: scalar; a whole number where the result is an integer. With 0, A and B are not read, unless there is an
            epilogue, bias or activation, scale_d is an array, amax is wanted or they are fp4. Second-level scales of
            nvfp4 belong here, multiplied.
        beta: scalar, likewise. With 0, there is no C.
        bias: (N,), added to every row, of any floating dtype.
        activation: a name of `reference.ACTIVATIONS`.
        epilogue: what follows the product, in the place of bias and activation: an `EpilogueVisitorTree`, or a Python
            function such as `lambda acc, bias: relu(acc + bias)`, which is traced (`atomr_cutlass.epilogue.trace`) at
            every call. `acc` is alpha * scale_a * scale_b * A B + beta * C in float32 (float64 for float64 operands).
        scale_a: factor of A: a number, or for fp8 a float32 array on the device of A: of one element, (..., M, 1) for
            the rows of A, or (..., M, ceil(K / 128)) for blocks of 1 x 128. For fp4 an array, whose dtype says the
            kind: e4m3, one for 16 elements of K (nvfp4), or e8m0, which may be called uint8, for 32 (mxfp4); in the
            order of `quantization.swizzle_scales`, or in NumPy also plain, (..., M, K / 16 or 32).
        scale_b: factor of B: a number, or for fp8 a float32 array: of one element, (..., 1, N) for the columns of B, or
            (..., ceil(K / 128), ceil(N / 128)) for blocks of 128 x 128; block scales come for both or neither. For fp4
            as scale_a, swizzled with the columns of B as rows, or in NumPy plain, (..., K / 16 or 32, N).
        scale_d: factor of the result: a number, or for fp8 a float32 array of one element.
        amax: for fp8: float32 array of one element, which receives the largest magnitude of D before scale_d. With an
            epilogue it is that tree's operand of this name.
        out_dtype: element type of the result; defaults to A's, bf16 for fp8 and fp4, and for int8 int32, or where
            bias, activation or an epilogue follows C's, and float32 without C: kernels make no int32 of these.
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
        operands_of_epilogue: the operands of `epilogue` by their names: arrays on the device of `a`, of one element,
            (N,) or (..., 1, N) for a row, (..., M, 1) for a column, (..., M, N), or bits in uint8
            (..., M, ceil(N / 8)), the first in the lowest bit. Of a function also numbers, which become constants of
            its kernel: give what changes from call to call as arrays. Arrays for what a tree stores beside D may be
            given by its names too.

    Returns:
        `out`, or a new row-major array of the kind of `a`; with an epilogue that has several results, these as its
        function returns them, or of a tree a dict with D as `out`. Work is in flight on the stream when a GPU array
        returns.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError: the table lacks the kernel and it must not be compiled; names it and the knob that adds
            it.
        CompileError: the kernel's source does not compile.
        DeviceUnavailableError: `prebuilt`, `jit` or GPU operands without a usable GPU; NVRTC is needed and missing.
    """
    if epilogue is not None and amax is not None:
        operands_of_epilogue["amax"], amax = amax, None
    if (
        bias is activation is epilogue is out_dtype is None
        and not operands_of_epilogue
        and type(backend) is str and backend in GPU_BACKENDS
        and (precision is None or type(precision) is str) and (jit is None or type(jit) is str)
        and (fast_accum is False or fast_accum is True)
        and type(alpha) in _SCALARS and type(beta) in _SCALARS
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
    elif (
        (epilogue is None or type(epilogue) is EpilogueVisitorTree)
        and type(backend) is str and backend in GPU_BACKENDS
        and (precision is None or type(precision) is str) and (jit is None or type(jit) is str)
        and (fast_accum is False or fast_accum is True)
        and (activation is None or type(activation) is str)
        and (out_dtype is None or type(out_dtype) is CutlassDtype)
        and type(alpha) in _PLAIN_NUMBERS and type(beta) in _PLAIN_NUMBERS
    ):  # fmt: skip
        results = _fused_gemm().again(
            (a, b, c, scale_a, scale_b, scale_d, amax), bias, activation, epilogue, operands_of_epilogue,
            (out_dtype, precision, fast_accum, backend, jit), out=out, alpha=alpha, beta=beta, stream=stream,
        )  # fmt: skip
        if results is not None:
            return results
    call = _Call(
        a=a,
        b=b,
        c=c,
        out=out,
        alpha=alpha,
        beta=beta,
        bias=bias,
        activation=activation,
        epilogue=epilogue,
        operands_of_epilogue=operands_of_epilogue,
        scales={"scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d},
        amax=amax,
        out_dtype=out_dtype,
        precision=precision,
        fast_accum=fast_accum,
        stream=stream,
        backend=backend,
        jit=jit,
    )
    with operands.launching(stream, a):
        return call.run()


@functools.cache
def _fused_gemm() -> ModuleType:
    """What calls with an epilogue need."""
    from . import (
        fused as fused_gemm,  # trees and the tracer; this function, since an import costs each call a microsecond
    )

    return fused_gemm


class _Call(Arguments):
    """One call of `gemm` that no kept plan serves: checked in full before anything is allocated or launched."""

    __slots__ = ()

    def run(self) -> Any:
        check_options(
            backend=self.backend, jit=self.jit, precision=self.precision, fast_accum=self.fast_accum,
            activation=self.activation, out_dtype=self.out_dtype, alpha=self.alpha, beta=self.beta,
        )  # fmt: skip
        for name, scale in self.scales.items():
            if isinstance(scale, NUMBERS):
                check_number(scale, name)
        check_backend(self.backend, BACKENDS)
        check_followers("gemm", self.epilogue, self.activation, self.operands_of_epilogue)
        c = self.source
        check_scalars(self.alpha, self.beta, c, self.scales["scale_d"])
        if self.amax is not None and self.backend != "reference" and isinstance(self.scales["scale_d"], NUMBERS):
            raise UnsupportedError(
                "amax is taken before scale_d, and a number would be part of alpha: give scale_d as an array"
            )
        given = {"a": self.a, "b": self.b, "c": c, "out": self.out, "amax": self.amax}
        if self.epilogue is None:
            given["bias"] = self.bias
        given |= {name: scale for name, scale in self.scales.items() if not isinstance(scale, NUMBERS)}
        views = views_of(given, ("a", "b"))
        if fp4.among(views):
            check_devices(views)
            views = fp4.host_views(views) if views["a"].device_type == CPU else views
        followed = not (self.epilogue is self.bias is self.activation is None)
        what = operation_of(views, self.out_dtype, self.precision, fast_accum=self.fast_accum, fused=followed)
        fused: FusedCall | None = _fused_gemm().fused_call(self, what) if followed else None
        what = what if fused is None else fused.what
        check_single(what.views)
        refuse_jax_out(self.out)
        if on_reference(self.backend, what.views["a"]):
            return self._on_reference(what, fused)
        types = gemm_types(what.dtype, what.dtype_b, what.result, what.math, tree=fused is not None)
        if not types:
            raise UnsupportedError(types.reason)
        if what.dtype is fp4.FP4:
            view = what.views["a"]
            fp4.check_arch(devices.require_arch(devices.get(view.device if view.device_type == CUDA else 0)))
            fp4.check_given(what.views)
        on_host = what.views["a"].device_type == CPU
        if fused is not None:
            return fused.on_host() if on_host else fused.on_gpu()
        return self._on_host(what) if on_host else self._on_gpu(what)

    def _on_gpu(self, what: Operation) -> Any:
        views, stream = dict(what.views), operands.launch_stream().handle
        array = self.out
        if array is None:
            array, views["out"] = operands.empty(what.shape, what.result, views["a"].device, self.a)
        if 0 not in what.shape:
            self._keep(self._launch(views, what.math, self.a, stream))
        elif "amax" in views:
            operands.clear_async(views["amax"], stream)
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

    def _on_host(self, what: Operation) -> Any:
        """Host operands: copied to GPU 0, multiplied there, and the result copied back."""
        out = what.views.get("out")
        if 0 in what.shape:
            if "amax" in what.views:
                operands.to_numpy(what.views["amax"])[...] = 0
            return self.delivered(np.empty(what.shape, numerics.numpy_dtype(what.result)), out)
        views = what.uploaded({})
        _, views["out"] = operands.empty(what.shape, what.result, 0, None)
        self._launch(views, what.math, None, 0)
        if "amax" in views:
            np.copyto(operands.to_numpy(what.views["amax"]), operands.download(views["amax"]), casting="no")
        return self.delivered(operands.download(views["out"]), out)

    def _launch(self, views: dict[str, _core.Operand], math: str, like: Any, stream: int) -> Plan | OpPlan:
        what = problem_of(views, math)
        alpha, beta = self.folded_scalars
        if alpha == 0 and not {"scale_d", "amax"} & set(views) and what.a.dtype is not fp4.FP4:
            # BLAS: then A and B are not read, and so neither are their scales.
            views = {name: view for name, view in views.items() if name not in SCALES}
        how = {"like": like, "backend": self.backend, "jit": self.jit, "stream": stream}
        scales = scales_of(what, views)
        if scales == scaled.NO_SCALES:
            made = make(what, **how)
            made(views["a"], views["b"], views.get("c"), out=views["out"], alpha=alpha, beta=beta, stream=stream)
            return made
        scaled_plan = scaled.make(what, scales, **how)
        # In the order of the plan's slots.
        order = ("a", "b", "c", *SCALES, "out")
        scaled_plan(*(views[name] for name in order if name in views), alpha=alpha, beta=beta, stream=stream)
        return scaled_plan

    def _on_reference(self, what: Operation, fused: FusedCall | None) -> Any:
        from . import reference as gemm_reference  # which no GPU call needs

        on_gpu = what.views["a"].device_type == CUDA
        fetch = operands.download if on_gpu else operands.to_numpy
        host = {name: fetch(what.views[name]) for name in what.inputs}
        if what.dtype is fp4.FP4 and on_gpu:
            host = fp4.plain_forms(host)
        scale_d = host.get("scale_d", self.scales["scale_d"])
        how = {
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
        if fused is not None and self.epilogue is not None:
            return fused.on_reference(host, how, fetch)
        if self.amax is None:
            computed = gemm_reference.gemm(host["a"], host["b"], host.get("c"), **how)
        else:
            computed, amax = gemm_reference.gemm_with_amax(host["a"], host["b"], host.get("c"), **how)
            if on_gpu:
                operands.copy_in(amax.reshape(what.views["amax"].shape), what.views["amax"])
            else:
                operands.to_numpy(what.views["amax"])[...] = amax.reshape(what.views["amax"].shape)
        view = what.views.get("out")
        if not on_gpu:
            return self.delivered(computed, view)
        array = self.out
        if view is None:
            array, view = operands.empty(what.shape, what.result, what.views["a"].device, self.a)
        operands.copy_in(computed, view)
        return operands.finished(array, view, 0)
