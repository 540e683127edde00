"""`matmul`: requests in cuBLASLt's shape, computed as D^T = op(B)^T op(A)^T, which is row-major, by kernels of GEMM."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import _core, reference
from ...arrays import numerics, operands
from ...arrays.fp4 import FP4
from ...arrays.layouts import relaid
from ...arrays.numerics import AnyArray, default_out_dtype, math_mode
from ...arrays.operands import CUDA, check_apart, check_devices, check_writable
from ...arrays.symbols import refuse, shape_of
from ...checks import expect
from ...epilogue import EpilogueVisitorTree
from ...epilogue.results import MatrixResult
from ...errors import InvalidOperandError, KernelNotFoundError, UnsupportedError, require
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.key import ROW
from ...generator.rules import FP8_TYPES, accumulator, gemm_types, supports_layouts
from ...pipeline import devices, reduction
from ...pipeline.call import Call, Invocation, Result, stored
from ...pipeline.call_options import CallOptions
from ...pipeline.operation import settled
from ...pipeline.plan import Plan
from ..gemm.plans import NO_SCALES, Scales, make, problem_of, scales_of
from ..gemm.problem import GemmProblem
from ..product import Product
from .arguments import Views, check_vectors, views_of, written_of
from .operation import AMAX, AUX, BIAS, HeuristicKey, MatmulEpilogue, MatmulRequest, Matrices, tree_of

_TRANSPOSED = {"a": "b", "b": "a", "scale_a": "scale_b", "scale_b": "scale_a", "amax": AMAX}
"""The names of arrays by those that operands have in the product of the transposes, where they differ."""


def matmul(request: MatmulRequest) -> Any:
    """Computes D = epilogue(alpha * scale_a * scale_b * op(A) op(B) + beta * C), column-major.

    A kernel of the table, else one that is compiled, computes D^T = op(B)^T op(A)^T, which is row-major, with the
    epilogue fused. BGRADA and BGRADB launch a second one, which multiplies the operand by a vector of ones; it reads
    the operand as the product does (with precision `tf32` rounded to TF32, times its scale). Plans are kept: a request
    whose arrays have the layouts of an earlier one's only launches.

    Args:
        request: the matmul to compute; see `MatmulRequest`.

    Returns:
        The request's `d`, or `c` without one; without either a new (n, m) array of the kind of `a`. Work is in flight
        on the stream when a GPU array returns, unless the request has a reply: then it is done.

    Raises:
        InvalidOperandError: an array of a wrong element type, device or size, whose elements are not contiguous, that
            cannot be written, or that shares memory with a result.
        UnsupportedError: no kernel serves the request, or it needs more workspace; the reason names the cure.
        KernelNotFoundError: the table lacks the kernel and it must not be compiled; names it and what adds it.
        CompileError: the kernel's source does not compile.
        DeviceUnavailableError: `prebuilt`, `jit` or GPU arrays without a usable GPU; NVRTC is needed and missing.
    """
    expect(request, MatmulRequest, "request")
    if request.reply is None:
        return _computed(*request.arguments)
    return settled(request.reply, lambda: _awaited(request))


def _awaited(request: MatmulRequest) -> Any:
    """Computes, and waits for the GPU."""
    result = _computed(*request.arguments)
    with operands.launching(request.stream, request.a) as launch:
        view = operands.as_operand(request.a, "a")
        if view.device_type == CUDA:
            _core.synchronize(view.device, launch.handle)
    return result


def _call(
    a: Any, b: Any, c: Any, bias: Any, gelu_aux: Any, amax_d: Any, out: Any, alpha: float, beta: float,
    scale_a: Any, scale_b: Any, scale_d: Any, stream: Any, options: CallOptions, matrices: tuple[Any, ...],
    extents: tuple[int, ...], factor: float,
) -> Any:  # fmt: skip
    arrays = {
        "a": a, "b": b, "c": c, BIAS: bias, AUX: gelu_aux, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d,
        AMAX: amax_d,
    }  # fmt: skip
    options = options._replace(alpha=alpha, beta=beta, stream=stream)
    return Call(_parse, arrays, out, options, own=(matrices, extents, factor))


_computed = stored(reduction.VARIABLE, a="a", b="b", c="c", bias=BIAS, gelu_aux=AUX, amax_d=AMAX)(_call)


def parsed(request: MatmulRequest) -> Invocation:
    """A request with its arrays checked, for the launch stream that is current, to be computed later."""
    return _parse(_call(*request.arguments)).for_another_thread()


@dataclass(frozen=True, kw_only=True)
class _Matmul(Product):
    """A request, parsed; the tree is what follows the product."""

    matrices: Matrices
    tree: EpilogueVisitorTree | None

    @property
    def by_reference(self) -> bool:
        """Sums of an operand are not sums of nothing."""
        return self.empty and (not self.on_gpu or bool(self.matrices.form.summed))

    def check_kernels(self) -> None:
        first, second = (operands.dtype_of(self.inputs[name], name) for name in "ba")
        require(gemm_types(first, second, self.result, self.math, tree=self.tree is not None))

    def plan(self, views: Views, *, like: Any, stream: int) -> Plan | WithSums:
        matrices, summed = self.matrices, self.matrices.form.summed
        if summed:
            refuse()  # two plans
            if self.call.planning["batch_invariant"]:
                reduction.refuse_sums([BIAS])
        use = HeuristicKey(
            matrices.m, matrices.n, matrices.k, operands.dtype_of(views["a"], "a"), matrices.transa, matrices.transb,
            MatmulEpilogue(matrices.epilogue), devices.get(views["a"].device).arch,
        )  # fmt: skip
        product = self._product(views, self.tree, self.call.scalars, use=use, like=like, stream=stream)
        if not summed:
            return product
        of_sums = sums_of(views, summed, matrices.k, stream)
        sums = self._product(of_sums, None, None, use=None, like=like, stream=stream)
        read = tuple(name for name in (summed, f"scale_{summed}") if name in of_sums)
        names = tuple(dict.fromkeys((*self._names(product), *read, BIAS)))
        return WithSums(product, sums, names, read, of_sums, self.call.own[2])

    def _product(
        self, views: Views, tree: EpilogueVisitorTree | None, scalars: tuple[float, float] | None, **how: Any
    ) -> Plan:
        """The plan of D^T = op(B)^T op(A)^T for views; without scalars it serves calls with any."""
        problem, scales = product_of(views, self.math, tree)
        if scalars and scalars[0] == 0 and tree is None and scales.d is None and scales.amax is None:
            scales = NO_SCALES  # A and B are not read then, and so neither are their scales
        how |= self.call.planning
        if scalars:
            how |= {"alpha": scalars[0], "beta": scalars[1], "of_call": True}
        try:
            fusion = None if tree is None else MatrixResult(problem.d.shape).fusion(tree, views)
            return make(problem, scales, fusion, **how)
        except (UnsupportedError, KernelNotFoundError) as error:
            raise type(error)(
                f"{error} (a matmul is put as D^T = op(B)^T op(A)^T: what is called A there is op(B)^T, row-major with "
                "transb=False, and B is op(A)^T, column-major with transa=True)"
            ) from error

    def order(self, made: Any) -> tuple[str, ...]:
        return (*(made.names if isinstance(made, WithSums) else self._names(made)), RESULT)

    def _names(self, made: Plan) -> tuple[str, ...]:
        """The names of the arrays that a plan of the product takes before its result."""
        names = (_TRANSPOSED.get(slot, slot) for slot in made.slots[:-1])
        return tuple(name for name in names if name in self.inputs or name in self.results)

    def uploaded(self) -> Views:
        transposed = {name for name in "ab" if getattr(self.matrices, f"trans{name}")}
        if not supports_layouts("sm80", operands.dtype_of(self.inputs["a"], "a"), ROW, ROW):
            transposed = {"a"}  # kernels read the copies of both contiguous along k
        return {
            name: operands.upload(operands.to_numpy(view), 0, columns=name in transposed)
            for name, view in self.inputs.items()
        }

    def write_nothing(self, views: Mapping[str, _core.Operand], stream: int) -> None:
        for name in (BIAS, AMAX):
            if name in self.results:
                operands.clear_async(views[name], stream)

    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        from ..gemm import reference as gemm_reference  # which launches do without

        alpha, beta = self.call.scalars
        compute = functools.partial(
            gemm_reference.gemm, host["b"], host["a"], host.get("c"), alpha=alpha, beta=beta, math=self.math,
            scale_a=host.get("scale_b"), scale_b=host.get("scale_a"),
        )  # fmt: skip
        scale_d = float(host["scale_d"].reshape(())) if "scale_d" in host else None
        if self.tree is not None:
            acc = compute(out_dtype=CutlassDtype.F64)
            inputs = {operand.name: host[operand.name] for operand in self.tree.inputs}
            computed = dict(reference.evaluate(self.tree, acc, inputs, out_dtype=self.result, scale_d=scale_d))
        else:
            computed = {AMAX: np.zeros(1, np.float32)} if AMAX in self.results else {}
            computed[RESULT] = compute(scale_d=scale_d, amax=computed.get(AMAX), out_dtype=self.result)
        if self.matrices.form.summed:
            computed[BIAS] = self._summed(host)
        return computed

    def _summed(self, host: dict[str, AnyArray]) -> AnyArray:
        name = self.matrices.form.summed
        values = numerics.round_to_tf32(host[name]) if self.math == "tf32" else host[name]
        sums = numerics.to_float64(values).sum(axis=0 if name == "a" else 1) * self.call.own[2]
        sums = sums * numerics.to_float64(host.get(f"scale_{name}", np.ones(1))).reshape(-1)
        return numerics.saturating_cast(sums, accumulator(operands.dtype_of(self.inputs[name], name)))


def product_of(
    views: Mapping[str, _core.Operand], math: str, tree: EpilogueVisitorTree | None
) -> tuple[GemmProblem, Scales]:
    """The product of the transposes and its scales; a tree has the largest magnitude as an output of its own."""
    named = {name: views[array] for name, array in _TRANSPOSED.items() if array in views}
    named |= {name: views[name] for name in ("c", "scale_d", RESULT) if name in views}
    if tree is not None:
        named.pop("amax", None)
    problem = problem_of(named, math)
    return problem, scales_of(problem, named)


def _parse(call: Call) -> _Matmul:
    options, (described, extents, *_) = call.options, call.own
    matrices = Matrices(*described, *shape_of(extents))
    numbers = call.numbers
    arrays = {name: array for name, array in call.arrays.items() if array is not None and name not in numbers}
    if call.out is not None:
        arrays["d"] = call.out
    views = {name: operands.as_operand(array, name) for name, array in arrays.items()}
    check_devices(views)
    form = matrices.form
    types = {name: operands.dtype_of(views[name], name) for name in views if not (name == AUX and form.masked)}
    dtype, other = types["a"], types["b"]
    if FP4 in (dtype, other):
        raise UnsupportedError("matmul multiplies no fp4: use gemm, which takes its scales")
    if dtype is not other and not {dtype, other} <= set(FP8_TYPES):
        raise InvalidOperandError(
            f"a is {dtype.value} and b is {other.value}: both must have one element type, but for two of fp8"
        )
    requested, given = options.out_dtype, types.get("d")
    if requested is not None and given not in (None, requested):
        name = "c" if matrices.into_c else "d"
        raise InvalidOperandError(f"{name} is {given.value}, but out_dtype asks for {requested.value}")
    result = given or requested or default_out_dtype(dtype, fused=not form.linear)
    if types.get("c", result) is not result:
        raise InvalidOperandError(f"c is {types['c'].value}; it must have D's element type, {result.value}")
    mode = math_mode(dtype, options.precision, fast_accum=options.fast_accum)
    found = views_of(matrices, views)
    check_vectors(form, types, found, dtype)
    fused = not form.linear or (AMAX in found and dtype not in FP8_TYPES)
    if fused and "scale_d" in numbers:
        raise UnsupportedError(
            "scales.d is a number, and what follows the product does not let it be part of alpha: give it as an array "
            "of one float32 (fp8), or scale the result"
        )
    if AMAX in found and "scale_d" in numbers:
        raise UnsupportedError(
            "amax_d is taken before scales.d, and a number would be part of alpha: give it as an array of one float32"
        )
    if AMAX in found and result is CutlassDtype.I32:
        raise UnsupportedError("amax_d is of floating results, and D is int32: give a float32 d, or leave amax_d out")
    tree = None
    if fused:
        compute = CutlassDtype.F64 if dtype is CutlassDtype.F64 else CutlassDtype.F32
        tree = tree_of(form, types.get(BIAS), types.get(AUX), compute, amax=AMAX in found)
    written = written_of(form, arrays, found)
    if form.masked and AUX in written and found["a"].device_type == CUDA and options.backend != "reference":
        # Some kernels clear the bits first, with the bytes between their columns: that must be dense memory.
        columns, width = found[AUX].shape
        width = max(width, found[AUX].strides[0]) if columns > 1 else width
        found[AUX] = relaid(found[AUX], (columns, width), (width, 1))
    results = {name: Result(found[name].shape, found[name].dtype, arrays[name], found[name]) for name in written}
    results[RESULT] = Result((matrices.n, matrices.m), result.dlpack, call.out, found.get("d"))
    inputs = {name: view for name, view in found.items() if name not in (*written, "d")}
    return _Matmul(
        call=call, inputs=inputs, results=results, memory=True, result=result, math=mode, matrices=matrices, tree=tree
    )


@dataclass(frozen=True, eq=False)
class WithSums:
    """The plans of a product and of the sums of one of its operands, its product with ones, called as one.

    Attributes:
        names: of the request's arrays that are taken before D, those of the product first.
        read: of these, the operand that is summed, and its scale, if it is an array.
        views: the arrays that the sums were planned for.
        scale: the operand's, where it is a number.
    """

    product: Plan
    sums: Plan
    names: tuple[str, ...]
    read: tuple[str, ...]
    views: Views
    scale: float
    request = None

    def __getattr__(self, name: str) -> Any:
        """Whatever else a plan tells is told of the product."""
        return getattr(self.product, name)

    def __call__(self, *arrays: _core.Operand, out: _core.Operand, alpha: float, beta: float, stream: int) -> None:
        """Launches both."""
        given = dict(zip(self.names, arrays, strict=True))
        bias = given.pop(BIAS)
        # Neither plan knows all arrays, and the product is launched before that of the sums looks at its own.
        check_writable(bias, BIAS)
        check_apart({BIAS: bias}, {**given, "d": out})
        self.product(*arrays[: len(self.product.slots) - 1], out=out, alpha=alpha, beta=beta, stream=stream)
        d = relaid(bias, self.views[RESULT].shape, self.views[RESULT].strides)
        operand, *scales = self.read
        pair = self.views | {operand: given[operand]}
        others = (given[name] for name in scales)
        self.sums(pair["b"], pair["a"], *others, out=d, alpha=self.scale, beta=0.0, stream=stream)


def sums_of(views: Mapping[str, _core.Operand], name: str, k: int, stream: int) -> Views:
    """The arrays of the product of operand `a` or `b` with k ones, whose result is the bias."""
    operand, bias = views[name], views[BIAS]
    ones = _ones(operands.dtype_of(operand, name), k, operand.device, stream)
    length = bias.shape[0]
    if name == "a":
        pair = {"a": operand, "b": relaid(ones, (1, k), (max(k, 1), 1)), RESULT: relaid(bias, (1, length), (length, 1))}
    else:
        pair = {"a": relaid(ones, (k, 1), (1, 1)), "b": operand, RESULT: relaid(bias, (length, 1), (1, 1))}
    return pair | {scale: views[scale] for scale in (f"scale_{name}",) if scale in views}


_made_ones: dict[tuple[CutlassDtype, int], list[_core.Operand]] = {}
_ones_lock = threading.Lock()


def _ones(dtype: CutlassDtype, length: int, device: int, stream: int) -> _core.Operand:
    """At least this many ones on a GPU, for ever: a captured graph may read them."""
    with _ones_lock:
        made = _made_ones.setdefault((dtype, device), [])
        if not made or made[-1].shape[0] < length:
            if _core.capturing(device, stream):
                raise UnsupportedError(
                    "BGRADA and BGRADB need memory that cannot be had while a CUDA graph is captured: call matmul once "
                    "before the capture"
                )
            size = 1 << max(12, (length - 1).bit_length())
            made.append(operands.upload(np.ones(size, numerics.numpy_dtype(dtype)), device))
        return made[-1]
