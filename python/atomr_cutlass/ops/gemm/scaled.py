"""GEMM whose kernel takes more than A, B, C and D.

That is scales on the device (of a tensor, of rows and columns, or of blocks; scale_d and amax), and the operands of an
epilogue tree.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import _core
from ...arrays import fp4
from ...arrays.operands import BYTE
from ...epilogue import bound as fused
from ...epilogue.bound import Fusion
from ...epilogue.fused_operands import FusedOperands
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.epilogue.lower import is_common, is_gated
from ...generator.key import KernelKey
from ...pipeline import devices, reduction, select
from ...pipeline.candidate import Candidate
from ...pipeline.devices import Device
from ...pipeline.plan import Address, Plan, Steps, moved
from ...pipeline.planning import DEFAULT_OPTIONS, PlanOptions, planned
from ...pipeline.problem import MAX_OUTER, GemmFormulation, GemmProblem, MatrixSpec, broadcast_to
from ..quantize.reference import BLOCK, VECTOR
from . import divided, transposed
from .kernels import GemmSearch, product_args
from .search import GemmCandidate

PER_PAIR = 2
"""Columns of a gated product that make one of D."""

FLOAT = CutlassDtype.F32


@dataclass(frozen=True)
class Scale:
    """The layout of a scale array.

    Attributes:
        shape, strides: in elements.
        form: `tensor` (one number), `vector` (one for each row of A, or column of B), `block`, or fp4's `swizzled`:
            those of a matrix one after the other, (..., count).
        dtype: DLPack's (type code, bits).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    form: str
    dtype: tuple[int, int] = FLOAT.dlpack


@dataclass(frozen=True)
class Scales:
    """The scales of a GEMM that are arrays; None where there is none.

    Attributes:
        a, b: of A and B.
        d: of D, one number.
        amax: where the largest magnitude of D before scale_d goes.
    """

    a: Scale | None = None
    b: Scale | None = None
    d: Scale | None = None
    amax: Scale | None = None

    @property
    def block(self) -> bool:
        """Whether they are block scales in float32."""
        return self.a is not None and self.a.form == "block"

    @property
    def swizzled(self) -> bool:
        """Whether they are the block scales of fp4."""
        return self.a is not None and self.a.form == "swizzled"


NO_SCALES = Scales()


def scale_forms(problem: GemmProblem, a: MatrixSpec | None, b: MatrixSpec | None) -> tuple[str, str]:
    """The forms of scale arrays of these shapes: `tensor`, `vector` or `block`.

    Args:
        problem: the product.
        a: shape and strides of scale_a: one element, (..., M, 1), or with block scales (M, ceil(K / 128)).
        b: of scale_b: one element, (..., 1, N), or with block scales (ceil(K / 128), ceil(N / 128)).

    Raises:
        InvalidOperandError: another shape, or block scales of one operand only.
    """
    k_blocks, n_blocks = -(-problem.k // BLOCK), -(-problem.n // BLOCK)
    found = []
    for name, spec, vector, block in (
        ("scale_a", a, (problem.m, 1), (problem.m, k_blocks)),
        ("scale_b", b, (1, problem.n), (k_blocks, n_blocks)),
    ):
        if spec is None or math.prod(spec.shape) == 1:
            found.append("tensor")
        elif spec.shape[-2:] not in (vector, block):
            raise InvalidOperandError(
                f"{name} has shape {spec.shape}; expected one element, {vector} or, for blocks of {BLOCK}, {block}"
            )
        else:
            found.append("vector" if spec.shape[-2:] == vector else "block")
    if "block" not in found:
        return found[0], found[1]
    # One block of K: a column of scales of A serves as either.
    shapes = (a.shape[-2:] if a else (), b.shape[-2:] if b else ())
    if shapes != ((problem.m, k_blocks), (k_blocks, n_blocks)):
        raise InvalidOperandError(
            f"scale_a has shape {shapes[0]} and scale_b {shapes[1]}; block scales are {(problem.m, k_blocks)} and "
            f"{(k_blocks, n_blocks)}, both or neither"
        )
    return ("block", "block")


def problem_of(problem: GemmProblem, scales: Scales) -> GemmProblem:
    """The problem with the epilogue or the block scales that these scales need."""
    if scales == NO_SCALES or is_gated(problem.epilogue):
        return problem
    if scales.swizzled and scales.a is not None:
        kind = fp4.scale_type(scales.a.dtype, "scale_a")
        shared = (1, 1, VECTOR[kind])
        return dataclasses.replace(problem, epilogue="lc", scale_granularity=shared, scale_type=kind.value)
    quantized = scales.d is not None or scales.amax is not None
    if not scales.block:
        return dataclasses.replace(problem, epilogue="scaled", quantized=quantized)
    epilogue = "scaled" if quantized else "lc"
    return dataclasses.replace(
        problem, epilogue=epilogue, scale_granularity=(1, BLOCK, BLOCK), scale_type=ScaleType.F32.value
    )


def result_of(problem: GemmProblem) -> MatrixSpec:
    """D in memory, which with a gated epilogue is half as wide as the product, with half the strides."""
    d = problem.d
    if not is_gated(problem.epilogue):
        return d
    strides = (*(stride // PER_PAIR for stride in d.strides[:-1]), 1)
    return dataclasses.replace(d, shape=(*d.shape[:-1], d.shape[-1] // PER_PAIR), strides=strides)


def rewritten(problem: GemmProblem, scales: Scales = NO_SCALES, fusion: Fusion | None = None) -> list[GemmProblem]:
    """The formulations of the problem with scales and a tree, preferred ones first."""
    scaled = problem_of(problem, scales)
    return [scaled] if fusion is None else fused.problem_of(scaled, fusion, scaled.epilogue)


def refuse(problem: GemmProblem) -> None:
    """Refuses a product without elements to scale or to give to a tree.

    Raises:
        UnsupportedError: an empty result, or no products.
    """
    if 0 in (problem.m, problem.n, problem.batch):
        raise UnsupportedError(f"a result of shape {problem.d.shape} is empty: there is nothing to plan")
    if problem.k == 0 and problem.a.dtype is fp4.FP4:
        raise UnsupportedError("K is 0: fp4 kernels have nothing to multiply; the result is beta * C")
    if problem.k == 0:
        raise UnsupportedError(
            "K is 0: there is nothing for scales to multiply or an epilogue to follow; leave them out"
        )


def refuse_sums(scales: Scales, fusion: Fusion | None) -> None:
    """Refuses the results of a batch-invariant product that are reduced over elements of D.

    Raises:
        UnsupportedError: amax, or a reduction of the tree.
    """
    reduced = [output.name for output in fusion.tree.outputs if output.reduction] if fusion is not None else []
    reduction.refuse_sums(["amax"] if scales.amax is not None else reduced)


def make(
    problem: GemmProblem,
    scales: Scales = NO_SCALES,
    fusion: Fusion | None = None,
    **options: Any,
) -> Plan:
    """The plan for a GEMM with scales or an epilogue tree.

    Its slots are a, b and, where there are such, c, scale_a, scale_b, scale_d, amax, the tree's inputs and outputs,
    then out.

    Args:
        problem: the product; with a gated epilogue, D as wide as it (see `result_of`).
        scales: the scales that are arrays.
        fusion: the tree that follows.
        options: those of `PlanOptions`.

    Raises:
        UnsupportedError, KernelNotFoundError: as `gemm.kernels.make`; or scales that are not contiguous.
    """
    how = PlanOptions(**options)
    for name, scale, along in (("scale_a", scales.a, -2), ("scale_b", scales.b, -1)):
        if scale is not None and scale.form == "vector" and scale.shape[along] > 1 and scale.strides[along] != 1:
            raise UnsupportedError(f"{name} has strides {scale.strides}: its elements must be contiguous; copy it")
    search = search_for(problem, scales, fusion, None, how.arch, batch_invariant=how.batch_invariant)

    def build(candidate: GemmCandidate, how: PlanOptions) -> Plan:
        return from_candidate(candidate, scales, fusion, how)

    return planned(search, build, how, None if fusion is None else validated)


def search_for(
    problem: GemmProblem,
    scales: Scales,
    fusion: Fusion | None,
    device: Device | None,
    arch: SmArch | None,
    *,
    batch_invariant: bool = False,
) -> GemmSearch:
    """The kernels for a problem with scales or a tree; see `gemm.kernels.search_for`.

    Raises:
        UnsupportedError: an empty result, no products, or sums over rows that are not to matter.
    """
    refuse(problem)
    if batch_invariant:
        refuse_sums(scales, fusion)
    device = device or devices.get(problem.device)
    return GemmSearch(rewritten(problem, scales, fusion), device, arch, batch_invariant=batch_invariant)


def validated(candidate: Candidate[Any], how: PlanOptions, problem: GemmProblem | None = None) -> bool:
    """Validates the tree of a GEMM kernel at its first use; see `validate.require`.

    Args:
        candidate: the kernel, whatever it is a candidate for.
        how: the plan's options.
        problem: the product; None: that of the candidate.
    """
    from ...epilogue import validate  # loads the reference, which only trees need here
    from .validation import make_probe

    problem = problem or candidate.formulation.problem
    device, epilogue = devices.get(problem.device), problem.epilogue
    launch = functools.partial(launch_once, candidate, epilogue, device)
    return validate.require(
        candidate, epilogue, device, launch, make_probe, stream=how.stream, in_background=how.in_background
    )


def launch_once(
    candidate: Candidate[Any],
    epilogue: str,
    device: Device,
    product: GemmProblem,
    fusion: Fusion,
    views: Mapping[str, _core.Operand],
) -> None:
    """Launches a candidate's kernel for a product of `a` and `b` to `out`, on the default stream.

    Args:
        candidate: the kernel.
        epilogue: which of a common kernel's trees follows; others have one.
        device: where.
        product: shapes, layouts and element types.
        fusion: the arrays of the tree.
        views: all arrays by name.
    """
    key = candidate.key
    problem = fused.problem_for(product, fusion, epilogue if is_common(key.epilogue) else key.epilogue)
    own = select.candidate_of(GemmSearch(problem, device), key)
    own = dataclasses.replace(own, info=candidate.info)
    made = from_candidate(own, NO_SCALES, fusion)
    made(*(views[name] for name in ("a", "b", *(array.name for array in fusion.arrays), "out")), stream=0)


def from_candidate(
    candidate: GemmCandidate,
    scales: Scales = NO_SCALES,
    fusion: Fusion | None = None,
    how: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """The plan with this kernel, which need not be the best one; see `make`."""
    key, formulation, problem = candidate.key, candidate.formulation, candidate.formulation.problem
    steps = Steps(problem.device, how.stream)
    narrower = PER_PAIR if is_gated(problem.epilogue) else 1

    def operand(name: str, spec: MatrixSpec, align: int, role: str = "input") -> tuple[str, int, int]:
        if spec.dtype is not fp4.FP4:
            return steps.matrix(name, spec, align, role)
        return steps.slot(name, *fp4.packed(spec, name), BYTE, alignment=align * spec.dtype.bits // 8, role=role)

    def scale(name: str, spec: Scale | None, role: str = "input") -> tuple[str, int, int] | None:
        if spec is None:
            return None
        alignment = fp4.SCALE_ALIGNMENT if spec.form == "swizzled" else 4
        return steps.slot(name, spec.shape, spec.strides, spec.dtype, alignment=alignment, role=role)

    align_a, align_b = transposed.alignments(key, formulation)
    a = operand("a", problem.a, align_a)
    b = operand("b", problem.b, align_b)
    source = problem.c is not None and fused.reads_source(problem.epilogue)
    align_d = divided.alignment(candidate, problem.d.dtype)
    c = operand("c", problem.c, align_d, "source") if problem.c is not None and not source else None
    at_a, at_b, at_d = scale("scale_a", scales.a), scale("scale_b", scales.b), scale("scale_d", scales.d)
    amax = scale("amax", scales.amax, "output")
    others = FusedOperands(steps, fusion, problem.epilogue, key, clear_masks=clears_masks(key))
    if source:
        c = others.source
    out = operand("out", result_of(problem), align_d, "output")
    if amax is not None:
        steps.clear(amax, 4)

    copies = transposed.Copies(steps, formulation, backend=how.backend, jit=how.jit)
    common = product_args(formulation, candidate) | {
        "ldd": formulation.ldd // narrower, "alpha": "alpha", "beta": "beta", "scale_d": at_d, "amax": amax,
    }  # fmt: skip
    for batch in _batches(scales, formulation):
        read = copies.of(moved(a, batch.a, problem.a.dtype), moved(b, batch.b, problem.b.dtype), batch.count)
        first = (read[0], at_a, batch.scale_a, scales.a)
        second = (read[1], at_b, batch.scale_b, scales.b)
        if formulation.swapped:
            first, second = second, first
        args = dict(common)
        for letter, (array, place, shift, factors) in (("a", first), ("b", second)):
            args[letter] = array
            args[f"scale_{letter}"] = None if place is None or factors is None else _moved_scale(place, shift, factors)
            args[f"scale_form_{letter}"] = int(factors is not None and factors.form == "vector")
            if factors is not None and factors.form == "block":
                along, k_along = (-2, -1) if letter == "a" else (-1, -2)
                args[f"scale_stride_{letter}"] = factors.strides[along]
                args[f"scale_k_stride_{letter}"] = factors.strides[k_along]
        strides = formulation.batch_strides if batch.count > 1 else (0, 0, 0, 0)
        args |= {
            "batch": batch.count,
            "batch_stride_a": strides[0],
            "batch_stride_b": strides[1],
            "batch_stride_c": strides[2],
            "batch_stride_d": strides[3] // narrower,
            "c": None if c is None or problem.c is None else moved(c, batch.c, problem.c.dtype),
            "d": moved(out, batch.d // narrower, problem.d.dtype),
        }
        args |= others.args(
            formulation.batches.strides[4:] if batch.count > 1 else (0,) * len(batch.operands),
            batch.operands,
            swapped=formulation.swapped,
        )
        if formulation.divided:
            adder, places = divided.adder(problem, backend=how.backend, jit=how.jit), (*read, c, out)
            divided.add_steps(steps, problem, candidate, args | {"c": None}, places, adder, unmultiplied=True)
        else:
            steps.launch(candidate, args, main=formulation.copied is not None)
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta)


def clears_masks(key: KernelKey) -> bool:
    """Whether a kernel adds bits to a mask, which is cleared before."""
    return key.generation in ("sm80", "sm100", "sm120")


def _as_matrices(scale: Scale) -> MatrixSpec:
    """Scales with two dimensions after those of batches."""
    if scale.form == "swizzled":
        return MatrixSpec((*scale.shape[:-1], 1, scale.shape[-1]), (*scale.strides[:-1], 0, 1), FLOAT)
    return MatrixSpec(scale.shape, scale.strides, FLOAT)


def _moved_scale(place: Address, elements: int, scale: Scale) -> Address:
    kind, index, start = place
    return (kind, index, start + elements * scale.dtype[1] // 8)


@dataclass(frozen=True)
class _Batch:
    """One launch: offsets in elements from the arrays' beginnings, and how many batches it takes."""

    a: int
    b: int
    c: int
    d: int
    scale_a: int
    scale_b: int
    operands: tuple[int, ...]
    count: int


def _batches(scales: Scales, formulation: GemmFormulation) -> list[_Batch]:
    """One launch where all batches share their scales, else one for each batch."""
    problem = formulation.problem
    own = any(scale is not None and math.prod(_as_matrices(scale).shape[:-2]) > 1 for scale in (scales.a, scales.b))
    # Kernels with blocks take one batch, and those of fp4 would look for scales of each.
    if not own and not ((scales.block or scales.swizzled) and math.prod(problem.d.shape[:-2]) > 1):
        return [
            _Batch(a, b, c, d, 0, 0, tuple(operands), formulation.batches.count)
            for a, b, c, d, *operands in formulation.batches.offsets
        ]
    batches = problem.d.shape[:-2]
    if math.prod(batches) > MAX_OUTER:
        raise UnsupportedError(
            f"{math.prod(batches)} batches with scales of their own; at most {MAX_OUTER} are launched"
        )

    def strides(spec: MatrixSpec | None, name: str) -> tuple[int, ...]:
        return (0,) * len(batches) if spec is None else broadcast_to(spec, batches, name).strides[:-2]

    def scale_strides(scale: Scale | None, name: str) -> tuple[int, ...]:
        if scale is None or math.prod(scale.shape) == 1:
            return (0,) * len(batches)
        return strides(_as_matrices(scale), name)

    steps = [
        strides(problem.a, "a"), strides(problem.b, "b"), strides(problem.c, "c"), strides(problem.d, "out"),
        scale_strides(scales.a, "scale_a"), scale_strides(scales.b, "scale_b"),
        *(strides(operand, "an operand of the epilogue") for operand in problem.operands),
    ]  # fmt: skip
    found = []
    for index in itertools.product(*map(range, batches)):
        a, b, c, d, scale_a, scale_b, *operands = (
            sum(i * s for i, s in zip(index, step, strict=True)) for step in steps
        )
        found.append(_Batch(a, b, c, d, scale_a, scale_b, tuple(operands), 1))
    return found
