"""`gemv`: a matrix times a vector, which its kernels compute as a GEMM of one row, y^T = x^T A^T."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ... import _core
from ...arrays import operands
from ...arrays.layouts import MatrixSpec, broadcast_batches, broadcasts_to, views
from ...arrays.numerics import AnyArray
from ...arrays.operands import check_devices, views_of
from ...epilogue.fusion import Fusion, Layout, Shape
from ...epilogue.plan_operands import FusedOperands
from ...epilogue.results import MatrixResult
from ...errors import InvalidOperandError, UnsupportedError, require
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import LINEAR, split
from ...generator.epilogue.tree import RESULT, Input, Output
from ...generator.families.gemv import OP, TYPES
from ...generator.key import COLUMN
from ...generator.rules import accumulator, gemm_types, supports_tree
from ...pipeline import devices
from ...pipeline.call import SCALES, Call, stored
from ...pipeline.call_options import CallOptions, documented
from ...pipeline.devices import Device
from ...pipeline.plan import Address, Plan, Steps, moved
from ...pipeline.planning import DEFAULT_OPTIONS, PlanOptions, planned
from ..gemm.kernels import GemmCandidate, ProductSearch, nonempty, product_args
from ..gemm.problem import GemmFormulation, GemmProblem, formulations, fused_problems
from ..product import Product

_PRODUCT = ("a", "x")


@stored(a="a", x="x", c="c", bias="bias")
@documented
def gemv(
    a: Any,
    x: Any,
    c: Any = None,
    *,
    out: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    epilogue: Any = None,
    scale_a: float | None = None,
    scale_b: float | None = None,
    scale_d: float | None = None,
    out_dtype: CutlassDtype | None = None,
    precision: str | None = None,
    stream: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    workspace_size: int | None = None,
    **operands_of_epilogue: Any,
) -> Any:
    """Y = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A x + beta * C + bias)), or that of `epilogue`.

    Products are added up in float32. What takes the time is reading A: its rows, or its columns, are contiguous, and
    read in 16 bytes at a time where they and their strides are multiples of 16 bytes, else element by element.

    Args:
        a: (..., M, K), f16, bf16 or f32; anything with DLPack or `__cuda_array_interface__`, or NumPy (copied to the
            GPU and back). Batch dimensions broadcast with those of x as in NumPy: an A that they share is read again
            for each vector, where `gemm(x, a.T)` reads it once.
        x: (..., K), of the same dtype and device, with any stride.
        c: (..., M) of the result's dtype; needed exactly when `beta` is not 0.
        out: (..., M), with any stride, written in place and returned; may be `c` itself, and overlaps nothing else. Not
            for JAX.
        alpha: scalar. With 0, A and x are not read, unless there is an epilogue, bias or activation.
        bias: (M,), added to every vector, of any floating dtype.
        epilogue: function of the product, instead of bias and activation, as `gemm` takes it. `acc` is alpha *
            scale_a * scale_b * A x + beta * C in float32: to the function a matrix of one row, or one for each batch.
        scale_a: factor of A, a number.
        scale_b: factor of x, a number.
        scale_d: factor of the result, a number. On a GPU not after bias, activation or an epilogue.
        out_dtype: element type of the result; defaults to A's.
        precision: for float32 operands: `ieee`, the default.
        operands_of_epilogue: the operands of `epilogue` by their names: arrays on the device of `a`, of one element,
            (M,) for all vectors, (..., M) or (..., 1), or bits in uint8, (..., ceil(M / 8)), the first in the lowest
            bit. Of a function also numbers, which become constants of its kernel. Arrays for a tree's outputs beside y
            may be given by name too.

    Returns:
        `out`, or a new array (..., M) of the kind of `a`; with an epilogue that has several results, these as its
        function returns them, or of a tree a dict with y as `out`. Work is in flight on the stream when a GPU array
        returns.

    Raises:
        InvalidOperandError: an operand of the wrong rank, shape, dtype, strides, device or overlap.
        UnsupportedError: no kernel can serve the request, with the reason.
        KernelNotFoundError, CompileError, DeviceUnavailableError: as in `gemm`.
    """
    options = CallOptions.of(locals(), batch_invariant=False)
    arrays = {"a": a, "x": x, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "scale_d": scale_d}
    return Call(_parse, arrays, out, options, epilogue, operands_of_epilogue)


class _Gemv(Product):
    """A matrix times a vector, parsed."""

    def check_kernels(self) -> None:
        dtype = operands.dtype_of(self.inputs["a"], "a")
        check_types(dtype, self.math)
        require(gemm_types(dtype, dtype, self.result, self.math, tree=self.epilogue is not None))

    def plan(self, views: dict[str, _core.Operand], *, like: Any, stream: int) -> Plan:
        own = (*_PRODUCT, RESULT) if self.call.c is None else (*_PRODUCT, "c", RESULT)
        specs = {name: MatrixSpec.of(views[name], name) for name in own}
        problem = product(specs, self.math, views["a"].device)
        return make(problem, self.fusion(views), like=like, stream=stream, **self.call.planning)

    def reference(self, host: dict[str, AnyArray]) -> Mapping[str, AnyArray]:
        from ..gemm import reference as gemm_reference  # not needed on a GPU

        row, transposed_a = host["x"][..., None, :], host["a"].swapaxes(-1, -2)
        c = host["c"][..., None, :] if self.call.c is not None else None
        return self.evaluated(host, functools.partial(gemm_reference.gemm, row, transposed_a, c))


def _parse(call: Call) -> _Gemv:
    call.check(OP)
    arrays = call.arrays
    call.refuse_scale_arrays("gemv kernels multiply f16, bf16 and f32, and read no scales: give a number")
    bias = arrays["bias"] if call.epilogue is None else None
    given = {"a": arrays["a"], "x": arrays["x"], "c": call.c, "out": call.out, "bias": bias}
    views = views_of(given, _PRODUCT)
    check_devices(views)
    shape = result_shape({name: view.shape for name, view in views.items()})
    dtype, other = (operands.dtype_of(views[name], name) for name in _PRODUCT)
    if dtype is not other:
        raise InvalidOperandError(f"a is {dtype.value} and x is {other.value}: both must have one dtype")
    parsed = _Gemv.of(call, views, shape, dtype)
    if not call.binds:
        return parsed
    return parsed.bind(VectorResult(shape), views, taken=(*_PRODUCT, *SCALES), acc=accumulator(dtype))


def product(specs: Mapping[str, MatrixSpec], math: str, device: int) -> GemmProblem:
    """The GEMM for arrays by name: its B is the transpose of `a`, (..., M, K); `x`, `c` and `out` are rows."""
    matrices = dict(specs)
    for name, spec in specs.items():
        if name != "a":
            matrices[name] = dataclasses.replace(spec, shape=_as_row(spec.shape, 1), strides=_as_row(spec.strides, 0))
        views(matrices[name], name)  # refuses layouts that kernels cannot read
    b = transposed(matrices["a"])
    return GemmProblem(a=matrices["x"], b=b, c=matrices.get("c"), d=matrices["out"], math=math, device=device)


def transposed(spec: MatrixSpec) -> MatrixSpec:
    """A matrix with its rows as columns."""
    shape, strides = ((*values[:-2], values[-1], values[-2]) for values in (spec.shape, spec.strides))
    return dataclasses.replace(spec, shape=shape, strides=strides)


def vector_of(spec: MatrixSpec) -> MatrixSpec:
    """A matrix of one row as a vector."""
    shape, strides = ((*values[:-2], values[-1]) for values in (spec.shape, spec.strides))
    return dataclasses.replace(spec, shape=shape, strides=strides)


def check_types(dtype: CutlassDtype, math: str) -> None:
    """Refuses element types and math modes that the kernels do not have."""
    if dtype not in TYPES:
        valid = ", ".join(each.value for each in TYPES)
        raise UnsupportedError(
            f"no gemv kernel multiplies {dtype.value}; valid: {valid}; gemm(a, x[..., None]) takes the others"
        )
    if math not in ("default", "ieee"):
        raise UnsupportedError(
            f"precision is {math!r}: gemv multiplies f32 as it is (ieee), which takes no longer; leave precision out"
        )


def result_shape(shapes: Mapping[str, Shape]) -> Shape:
    """The shape of A x, given the shapes of arrays by name; refuses shapes that do not fit."""
    a, x, c = shapes["a"], shapes["x"], shapes.get("c")
    if len(a) < 2 or not x:
        raise InvalidOperandError(f"a has shape {a} and x {x}; expected (..., M, K) and (..., K)")
    if a[-1] != x[-1]:
        raise InvalidOperandError(f"K disagrees: a {a} has {a[-1]} columns, x {x} has {x[-1]} elements")
    result = (*broadcast_batches(a[:-2], x[:-1], "x"), a[-2])
    if c is not None and (c[-1:] != result[-1:] or not broadcasts_to(c[:-1], result[:-1])):
        raise InvalidOperandError(f"c has shape {c}; expected {result}, or batch dimensions that broadcast to it")
    for name, expected in (("out", result), ("bias", result[-1:])):
        if name in shapes and shapes[name] != expected:
            raise InvalidOperandError(f"{name} has shape {shapes[name]}; expected {expected}")
    return result


class VectorResult(MatrixResult):
    """A result of vectors (..., M), which an epilogue tree treats as matrices of one row."""

    @property
    def matrix(self) -> Shape:
        return (*self.shape[:-1], 1, self.shape[-1])

    def as_matrix(self, name: str, shape: Shape, strides: Shape) -> Layout:
        return _as_row(shape, 1), _as_row(strides, 0)

    def array_shape(self, operand: Input | Output) -> Shape:
        shape = super().array_shape(operand)
        reduced = isinstance(operand, Output) and operand.reduction
        return shape if reduced or len(shape) == 1 else (*shape[:-2], shape[-1])

    def _placed(self, name: str, shape: Shape, strides: Shape, reduction: str) -> tuple[Shape, Shape, Layout | None]:
        seen = (shape, strides) if reduction else self.as_matrix(name, shape, strides)
        return (*seen, (shape, strides))


def _as_row(values: Sequence[int], extra: int) -> Shape:
    return (*values[:-1], extra, *values[-1:])


class GemvSearch(ProductSearch):
    """Kernels for a GEMM of one row."""

    op = OP

    def formulate(self, problem: GemmProblem) -> list[Sequence[GemmFormulation]]:
        """The formulations for each layout of the matrix with the vectors as columns, which have any stride."""
        made = formulations(problem)
        return [[each for each in made if not each.swapped and each.layout_a == each.layout_d == COLUMN]]

    def reason(self) -> str:
        problem = self.problem
        program = split(problem.epilogue)[1]
        types = gemm_types(problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math, tree=bool(program))
        lowered = supports_tree(program, problem.acc, problem.d.dtype) if program else types
        target = self.arch or devices.require_arch(self.device)
        reason = types.reason or lowered.reason or self.closest(target)
        return f"no gemv kernel serves this problem on {target.value}: {reason}"


def make(problem: GemmProblem, fusion: Fusion | None = None, **options: Any) -> Plan:
    """The plan for a problem of `product` and its epilogue tree; `options` are those of `PlanOptions`.

    Its operands are a, x, c where there is one, the tree's inputs and outputs, and out.
    """
    how = PlanOptions(**options)
    search = search_for(problem, fusion, devices.get(problem.device), how.arch)
    return planned(search, functools.partial(from_candidate, problem, fusion=fusion), how)


def search_for(problem: GemmProblem, fusion: Fusion | None, device: Device, arch: SmArch | None) -> GemvSearch:
    """The kernels for a problem and its epilogue tree."""
    if 0 in (problem.n, problem.batch):
        raise UnsupportedError(f"a result of shape {vector_of(problem.d).shape} is empty: there is nothing to plan")
    read = nonempty(problem)
    return GemvSearch([read] if fusion is None else fused_problems(read, fusion, LINEAR), device, arch)


def from_candidate(
    problem: GemmProblem,
    candidate: GemmCandidate,
    how: PlanOptions = DEFAULT_OPTIONS,
    fusion: Fusion | None = None,
) -> Plan:
    """The plan with a given kernel; see `make`."""
    key, formulation = candidate.key, candidate.formulation
    steps = Steps(problem.device, how.stream)

    a, x = steps.matrix("a", transposed(problem.b), key.align_b), steps.matrix("x", vector_of(problem.a))
    c: Address | None = None
    if fusion is None:
        c = steps.matrix("c", vector_of(problem.c or problem.d), role="optional source")
    elif problem.c is not None:
        c = steps.matrix("c", vector_of(problem.c), role="source")
    tree = FusedOperands(steps, fusion, formulation.problem.epilogue, key, clear_masks=True)
    c = tree.source or c
    out = steps.matrix("out", vector_of(problem.d), role="output")
    batches = formulation.batches
    for at_x, at_a, at_c, at_d, *offsets in batches.offsets:
        args = product_args(formulation, candidate) | {
            "k": problem.k, "batch": batches.count, "alpha": "alpha", "beta": "beta",
            "a": moved(x, at_x, problem.a.dtype), "b": moved(a, at_a, problem.b.dtype),
            "c": None if c is None else moved(c, at_c, problem.d.dtype), "d": moved(out, at_d, problem.d.dtype),
        }  # fmt: skip
        steps.launch(candidate, args | tree.args(batches.strides[4:], tuple(offsets), swapped=False))
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta, problem=how.problem)
