"""`gemm`: arrays in, array out."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from . import _core, devices, fp4, fused_arguments, numerics, operands, problem, reference, scaled
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
from .epilogue import EpilogueVisitorTree, Traced
from .errors import InvalidOperandError, UnsupportedError
from .fused import fusion_of
from .fused_arguments import Asked
from .generator.dtypes import CutlassDtype
from .generator.key import ROW
from .generator.rules import FP8_TYPES, accumulator, gemm_types, supports_layouts
from .numerics import FAST, math_mode
from .op_plan import OpPlan
from .operands import CPU, CUDA
from .plan import BACKENDS as GPU_BACKENDS
from .plan import Plan, make
from .plan_cache import PlanCache
from .problem import GemmProblem, MatrixSpec

BACKENDS = (*GPU_BACKENDS, "reference")
PLANS_KEPT = 256

_SCALARS = frozenset({int, float, np.float32, np.float64, np.int32, np.int64})
"""What the fast path takes as alpha and beta; anything else is looked at first."""

_plans: PlanCache[Plan | OpPlan] = PlanCache(PLANS_KEPT)
_fused_plans: PlanCache[_FusedPlan] = PlanCache(PLANS_KEPT)


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
    if (
        bias is activation is epilogue is out_dtype is None
        and not operands_of_epilogue
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
    elif (
        (epilogue is None or type(epilogue) is EpilogueVisitorTree)
        and backend in GPU_BACKENDS and type(alpha) in _PLAIN_NUMBERS and type(beta) in _PLAIN_NUMBERS
    ):  # fmt: skip
        token = activation if epilogue is None else epilogue
        named = {"bias": bias, "c": c, **operands_of_epilogue}
        taken = _operand_names(epilogue)
        arrays = (
            a, b, c, scale_a, scale_b, scale_d, amax, bias if epilogue is None else None, *map(named.get, taken), out
        )  # fmt: skip
        # What no operand takes is refused below.
        fits = named.keys() <= {"bias", "c", *taken} and (
            epilogue is None
            or (activation is None and (bias is None or "bias" in taken) and (c is None or beta != 0 or "c" in taken))
        )
        signature = _core.signature(*arrays) if fits else None
        if signature is not None:
            how = (token, out_dtype, precision, fast_accum, beta == 0, backend, jit)
            kept = _fused_plans.get((signature, how))
            if kept is not None:
                check_scalars(alpha, beta, None if epilogue is not None and beta == 0 else c)
                return kept(named, arrays, out=out, alpha=alpha, beta=beta, stream=stream)
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
        operands_of_epilogue=operands_of_epilogue,
        scales={"scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d},
        amax=amax,
        out_dtype=out_dtype,
        precision=precision,
        fast_accum=fast_accum,
        stream=stream,
        backend=backend,
        jit=jit,
    ).run()


@functools.lru_cache(64)
def _operand_names(epilogue: EpilogueVisitorTree | None) -> tuple[str, ...]:
    """The operands of a tree, inputs first."""
    if epilogue is None:
        return ()
    return (*(one.name for one in epilogue.inputs), *(one.name for one in epilogue.outputs))


class _FusedPlan(NamedTuple):
    """A plan with an epilogue that calls with the same arrays' shapes may use again.

    Attributes:
        plan: what is launched.
        traced: the epilogue.
        shape: of the result.
    """

    plan: OpPlan
    traced: Traced
    shape: tuple[int, ...]

    # What a PlanCache knows a plan by.
    key: None = None
    source: str = ""
    kernel_name: str = ""
    kernel_handle: object = None

    def __call__(
        self, given: dict[str, Any], arrays: tuple[Any, ...], *, out: Any, alpha: float, beta: float, stream: Any
    ) -> Any:
        """Launches the plan. `arrays` are in the order of its slots, with None where there is no slot."""
        a = arrays[0]
        tree = self.traced.tree
        made = {}
        for output in tree.outputs:
            array = given.get(output.name)
            if array is None:
                array, _ = fused_arguments.empty(output, self.shape, self.plan.device, a)
            made[output.name] = array
        c = arrays[2] if beta != 0 else None
        taken = (given[one.name] for one in tree.inputs)
        slots = [one for one in (a, arrays[1], c, *arrays[3:7], *taken, *made.values()) if one is not None]
        made["out"] = self.plan(*slots, out=out, alpha=alpha, beta=beta, stream=stream)
        return self.traced.arrange(made)


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
    operands_of_epilogue: dict[str, Any]
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
        if self.epilogue is None and self.operands_of_epilogue:
            names = ", ".join(self.operands_of_epilogue)
            raise InvalidOperandError(f"{names}: gemm has no such argument, and there is no epilogue to take it")
        if self.epilogue is not None and self.activation is not None:
            raise InvalidOperandError("epilogue and activation are given: apply the activation in the epilogue")
        c = self._c
        check_scalars(self.alpha, self.beta, c)
        if self.amax is not None and self.backend != "reference" and isinstance(self.scales["scale_d"], NUMBERS):
            raise UnsupportedError(
                "amax is taken before scale_d, and a number would be part of alpha: give scale_d as an array"
            )
        given = {"a": self.a, "b": self.b, "c": c, "out": self.out, "amax": self.amax}
        if self.epilogue is None:
            given["bias"] = self.bias
        given |= {name: scale for name, scale in self.scales.items() if not isinstance(scale, NUMBERS)}
        views = {name: operands.as_operand(array) for name, array in given.items() if array is not None}
        if fp4.among(views):
            check_devices(views)
            views = fp4.host_views(views) if views["a"].device_type == CPU else views
        what = _operation(
            views, self.out_dtype, self.precision, fast_accum=self.fast_accum, fused=self.epilogue is not None
        )
        asked = self._asked(what)
        if asked is not None:
            check_devices({**views, **asked.inputs, **asked.outputs})
            what = what._replace(result=_fused_result(what, asked, self.out_dtype))
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
            return self._on_reference(what, asked)
        types = gemm_types(what.dtype, what.dtype_b, what.result, what.math, tree=asked is not None)
        if not types:
            raise UnsupportedError(types.reason)
        if what.dtype is fp4.FP4:
            view = what.views["a"]
            fp4.check_arch(devices.require_arch(devices.get(view.device if view.device_type == CUDA else 0)))
            fp4.check_given(what.views)
        on_host = what.views["a"].device_type == CPU
        if asked is not None:
            return self._fused_on_host(what, asked) if on_host else self._fused_on_gpu(what, asked)
        return self._on_host(what) if on_host else self._on_gpu(what)

    @property
    def _c(self) -> Any:
        """C, unless it is an operand of the epilogue: then there is no beta."""
        return None if self.epilogue is not None and self.beta == 0 else self.c

    def _asked(self, what: _Operation) -> Asked | None:
        """The tree of epilogue, or of bias and activation, with its operands; the reference has the latter itself."""
        by_itself = self.bias is self.activation is None or self.backend == "reference"
        if self.epilogue is None and by_itself:
            return None
        fused_arguments.refuse_scale_d(self.scales["scale_d"])
        if self.epilogue is None:
            return fused_arguments.with_bias(self.bias, self.activation, what.shape)
        given = dict(self.operands_of_epilogue)
        given |= {"bias": self.bias} if self.bias is not None else {}
        given |= {"c": self.c} if self.c is not None and self._c is None else {}
        return fused_arguments.asked(
            self.epilogue, given, what.shape, out_dtype=what.result, acc=accumulator(what.dtype)
        )

    def _fused_on_gpu(self, what: _Operation, asked: Asked) -> Any:
        alpha, beta = self._folded_scalars()
        device = what.views["a"].device
        stream = operands.current_stream(self.a, what.views["a"])
        if self.stream is not None:
            stream = operands.stream_handle(self.stream)
        results, views = dict(asked.given), {**what.views, **asked.inputs, **asked.outputs}
        results["out"] = self.out
        if self.out is None:
            results["out"], views["out"] = operands.empty(what.shape, what.result, device, self.a)
        for output in asked.tree.outputs:
            if output.name not in views:
                results[output.name], views[output.name] = fused_arguments.empty(output, what.shape, device, self.a)
        if 0 not in what.shape:
            made = self._launch_fused(views, asked, what.math, alpha, beta, self.a, stream)
            self._keep_fused(made, asked, what.shape)
        arrays = {name: operands.finished(array, views[name], stream) for name, array in results.items()}
        return asked.arrange(arrays)

    def _keep_fused(self, made: OpPlan, asked: Asked, shape: tuple[int, ...]) -> None:
        """Remembers the plan, unless a Python function made the tree: that may compute something else next time."""
        epilogue = self.epilogue
        if not (epilogue is None or type(epilogue) is EpilogueVisitorTree) or not _core.has_exchange_api(self.a):
            return
        if any(isinstance(scale, NUMBERS) for scale in self.scales.values()):
            return
        given = {"bias": self.bias, "c": self.c, **self.operands_of_epilogue}
        bias = self.bias if epilogue is None else None
        operands_given = map(given.get, _operand_names(epilogue))
        signature = _core.signature(
            self.a, self.b, self.c, *self.scales.values(), self.amax, bias, *operands_given, self.out
        )
        if signature is None:
            return
        token = self.activation if epilogue is None else epilogue
        how = (token, self.out_dtype, self.precision, self.fast_accum, self.beta == 0, self.backend, self.jit)
        _fused_plans.insert(_FusedPlan(made, asked.traced, shape), (signature, how))

    def _fused_on_host(self, what: _Operation, asked: Asked) -> Any:
        """Host operands: copied to GPU 0, and the results copied back."""
        alpha, beta = self._folded_scalars()
        columns = {"b"} if not supports_layouts("sm80", what.dtype, ROW, ROW) else set()
        names = (*what.inputs, *(["amax"] if "amax" in what.views else []))
        arrays = {name: operands.to_numpy(what.views[name]) for name in names if name != "bias"}
        arrays |= {name: operands.to_numpy(view) for name, view in asked.inputs.items()}
        if what.dtype is fp4.FP4:
            arrays, columns = fp4.gpu_forms(arrays), {"b"}
        views = {name: operands.upload(array, 0, columns=name in columns) for name, array in arrays.items()}
        _, views["out"] = operands.empty(what.shape, what.result, 0, None)
        for output in asked.tree.outputs:
            _, views[output.name] = fused_arguments.empty(output, what.shape, 0, None)
        if 0 not in what.shape:
            self._launch_fused(views, asked, what.math, alpha, beta, None, 0)
        if "amax" in views:
            np.copyto(operands.to_numpy(what.views["amax"]), operands.download(views["amax"]), casting="no")
        written = {output.name for output in asked.tree.outputs}
        computed = {name: operands.download(view) for name, view in views.items() if name in written}
        return self._deliver_all({**computed, "out": operands.download(views["out"])}, what, asked)

    def _deliver_all(self, computed: dict[str, np.ndarray[Any, Any]], what: _Operation, asked: Asked) -> Any:
        """Host results by name, as the epilogue returns them."""
        made = {}
        for name, result in computed.items():
            if name == "out":
                made[name] = self._deliver(result, what)
            elif name in asked.outputs:
                np.copyto(operands.to_numpy(asked.outputs[name]), result, casting="no")
                made[name] = asked.given[name]
            else:
                made[name] = operands.host_result(result, self.a)
        return asked.arrange(made)

    def _launch_fused(
        self,
        views: dict[str, _core.Operand],
        asked: Asked,
        math: str,
        alpha: float,
        beta: float,
        like: Any,
        stream: int,
    ) -> OpPlan:
        what = _problem(views, math)
        scales = self._scales(what, views) if set(views) & _SCALING else scaled.NO_SCALES
        fusion = fusion_of(asked.tree, views)
        how = {"like": like, "backend": self.backend, "jit": self.jit, "stream": stream}
        made = scaled.make(what, scales, fusion, **how)
        order = ("a", "b", "c", *SCALE_SLOTS, *(one.name for one in fusion.arrays), "out")
        made(*(views[name] for name in order if name in views), alpha=alpha, beta=beta, stream=stream)
        return made

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
        what = _problem(views, math)
        if alpha == 0 and not {"scale_d", "amax"} & set(views) and what.a.dtype is not fp4.FP4:
            # BLAS: then A and B are not read, and so neither are their scales.
            views = {name: view for name, view in views.items() if name not in _SCALING}
        how = {"like": like, "backend": self.backend, "jit": self.jit, "stream": stream}
        if not set(views) & _SCALING:
            made = make(what, **how)
            made(views["a"], views["b"], views.get("c"), out=views["out"], alpha=alpha, beta=beta, stream=stream)
            return made
        scaled_plan = scaled.make(what, self._scales(what, views), **how)
        order = ("a", "b", "c", *SCALE_SLOTS, "out")
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

    def _on_reference(self, what: _Operation, asked: Asked | None) -> Any:
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
        if asked is not None and self.epilogue is not None:
            return self._fused_on_reference(what, asked, host, arguments, fetch)
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

    def _fused_on_reference(
        self, what: _Operation, asked: Asked, host: dict[str, Any], arguments: dict[str, Any], fetch: Any
    ) -> Any:
        if self.amax is not None:
            raise UnsupportedError("amax with an epilogue: reduce in the epilogue, with total_amax")
        scale_d = arguments.pop("scale_d")
        # float64 holds the accumulator; alpha = 0 does not make A and B unread here.
        acc = reference.gemm(host["a"], host["b"], host.get("c"), **{**arguments, "out_dtype": CutlassDtype.F64})
        inputs = {name: fetch(view) for name, view in asked.inputs.items()}
        computed = reference.evaluate(asked.tree, acc, inputs, out_dtype=what.result, scale_d=scale_d)
        if what.views["a"].device_type != CUDA:
            return self._deliver_all(computed, what, asked)
        results, device = {}, what.views["a"].device
        for name, result in computed.items():
            view = what.views.get("out") if name == "out" else asked.outputs.get(name)
            array = self.out if name == "out" else asked.given.get(name)
            if view is None and name == "out":
                array, view = operands.empty(what.shape, what.result, device, self.a)
            elif view is None:
                output = next(one for one in asked.tree.outputs if one.name == name)
                array, view = fused_arguments.empty(output, what.shape, device, self.a)
            operands.copy_in(result, view)
            results[name] = operands.finished(array, view, 0)
        return asked.arrange(results)

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


SCALE_SLOTS = ("scale_a", "scale_b", "scale_d", "amax")
_SCALING = set(SCALE_SLOTS)
_PLAIN_NUMBERS = frozenset({int, float})


def _operation(
    views: dict[str, _core.Operand],
    out_dtype: CutlassDtype | None,
    precision: str | None,
    *,
    fast_accum: bool,
    fused: bool = False,
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
    # A tree computes in float32: without another wish so does what it makes of integers.
    wanted = (
        out_dtype
        if out_dtype is not None or "out" in views or "c" in views
        else (CutlassDtype.F32 if fused and dtype is CutlassDtype.I8 else None)
    )
    return _Operation(views, shape, dtype, other, result_dtype(views, wanted, dtype), math)


def _fused_result(what: _Operation, asked: Asked, out_dtype: CutlassDtype | None) -> CutlassDtype:
    """The result's element type, where an epilogue may decide it.

    Raises:
        InvalidOperandError: it contradicts what was asked for.
    """
    decided = asked.tree.result_dtype
    if decided is None or decided is what.result:
        return what.result
    if out_dtype is not None or "out" in what.views or "c" in what.views:
        raise InvalidOperandError(
            f"the epilogue casts D to {decided.value}; out, out_dtype or c say {what.result.value}"
        )
    return decided


def _problem(views: dict[str, _core.Operand], math: str) -> GemmProblem:
    def spec(name: str) -> MatrixSpec:
        view = views[name]
        if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
            return fp4.logical(view, name)
        return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, name), view.alignment)

    return GemmProblem(
        a=spec("a"),
        b=spec("b"),
        c=spec("c") if "c" in views else None,
        d=spec("out"),
        math=math,
        device=views["a"].device,
    )


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
