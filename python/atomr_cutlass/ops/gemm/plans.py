"""GEMM from its arrays to a plan: the problem, its scales, epilogue tree and gate, and the launches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ... import _core
from ...arrays import fp4, operands
from ...arrays.layouts import MatrixSpec, broadcast_to, round_up
from ...arrays.operands import BYTE
from ...arrays.scales import BLOCK, VECTOR
from ...epilogue.fusion import Fusion
from ...epilogue.plan_operands import FusedOperands
from ...errors import InvalidOperandError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype, ScaleType
from ...generator.epilogue.lower import LINEAR, is_gated
from ...generator.key import ANYWHERE, ROW, KernelKey
from ...generator.rules import FEW, FP8_TYPES
from ...pipeline import devices, reduction
from ...pipeline.devices import Device
from ...pipeline.plan import ALWAYS, NO_PRODUCT, PRODUCT, Address, Plan, Steps, moved, settled
from ...pipeline.planning import DEFAULT_OPTIONS, PlanOptions, planned
from . import helpers
from .kernels import GemmCandidate, GemmSearch, nonempty, product_args, settled_bits
from .problem import MAX_OUTER, GemmFormulation, GemmProblem, fused_problems, over_batches

_ONE_BATCH = dict.fromkeys(("batch_stride_a", "batch_stride_b", "batch_stride_c", "batch_stride_d"), 0)

PER_PAIR = 2
"""Columns of a gated product that make one of D."""

SCALES = ("scale_a", "scale_b", "scale_d", "amax")
"""Scale arrays in the order in which plans take them."""


@dataclass(frozen=True)
class Scale:
    """The layout of a scale array.

    Attributes:
        form: `tensor` (one number), `vector` (one for each row of A, or column of B), `block`, or fp4's `swizzled`:
            those of a matrix one after the other, (..., count).
        dtype: DLPack's (type code, bits).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    form: str
    dtype: tuple[int, int] = CutlassDtype.F32.dlpack

    @property
    def alignment(self) -> int:
        """Bytes that its address must be a multiple of."""
        return fp4.SCALE_ALIGNMENT if self.form == "swizzled" else 4


class Scales(NamedTuple):
    """The scales of a GEMM that are arrays, in the order of SCALES; None for those that are not."""

    a: Scale | None = None
    b: Scale | None = None
    d: Scale | None = None
    amax: Scale | None = None

    @property
    def form(self) -> str:
        """The form of A's scales, empty without; `block` and `swizzled` are that of B's too."""
        return "" if self.a is None else self.a.form


NO_SCALES = Scales()


def problem_of(views: dict[str, _core.Operand], math: str) -> GemmProblem:
    """The problem of GPU arrays by name, `out` among them."""

    def spec(name: str) -> MatrixSpec:
        view = views[name]
        if name in fp4.ALONG and fp4.element_type(view, name) is fp4.FP4:
            return fp4.logical(view, name)
        return MatrixSpec.of(view, name)

    c = spec("c") if "c" in views else None
    return GemmProblem(a=spec("a"), b=spec("b"), c=c, d=spec("out"), math=math, device=views["a"].device)


def scales_of(problem: GemmProblem, views: dict[str, _core.Operand]) -> Scales:
    """The layouts of the scales that are arrays; refuses arrays that kernels do not take."""
    given = sorted(set(views) & set(SCALES))
    if not given:
        return NO_SCALES
    if problem.a.dtype is fp4.FP4:
        vector = VECTOR[fp4.kind_of(views)]
        for name, rows in (("scale_a", problem.m), ("scale_b", problem.n)):
            fp4.check_swizzled(views[name], name, rows, -(-problem.k // vector))
        sides = (views["scale_a"], views["scale_b"])
        return Scales(*(Scale(view.shape, view.strides, "swizzled", view.dtype) for view in sides))
    if problem.a.dtype not in FP8_TYPES:
        raise UnsupportedError(
            f"{', '.join(given)}: only fp8 kernels take arrays; give numbers, or fold them into alpha"
        )
    for name in given:
        _check_float32(views[name], name)
    forms = (*scale_forms(problem, views.get("scale_a"), views.get("scale_b")), "tensor", "tensor")
    pairs = zip(map(views.get, SCALES), forms, strict=True)
    return Scales(*(None if view is None else Scale(view.shape, view.strides, form) for view, form in pairs))


def check_single(views: dict[str, _core.Operand]) -> None:
    """Refuses scale_d and amax that are not one float32."""
    for name in ("scale_d", "amax"):
        if name in views:
            _check_float32(views[name], name)
            if math.prod(views[name].shape) != 1:
                raise InvalidOperandError(f"{name} has shape {views[name].shape}; expected one element")


def _check_float32(view: _core.Operand, name: str) -> None:
    dtype = operands.dtype_of(view, name)
    if dtype is not CutlassDtype.F32:
        raise InvalidOperandError(f"{name} is {dtype.value}; expected float32")


def scale_shapes(m: int, n: int, k: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The extents of scale_a and scale_b in float32, by form."""
    k_blocks, n_blocks = -(-k // BLOCK), -(-n // BLOCK)
    return {"tensor": ((1,), (1,)), "vector": ((m, 1), (1, n)), "block": ((m, k_blocks), (k_blocks, n_blocks))}


def scale_forms(problem: GemmProblem, a: _core.Operand | None, b: _core.Operand | None) -> tuple[str, str]:
    """The forms of the arrays scale_a and scale_b: `tensor`, `vector` or, for both or neither, `block`."""
    shapes = scale_shapes(problem.m, problem.n, problem.k)
    given = tuple(() if view is None else view.shape for view in (a, b))
    found = []
    for name, shape, vector, block in zip(SCALES, given, shapes["vector"], shapes["block"], strict=False):
        if math.prod(shape) == 1:
            found.append("tensor")
        elif shape[-2:] not in (vector, block):
            raise InvalidOperandError(
                f"{name} has shape {shape}; expected one element, {vector} or, for blocks of {BLOCK}, {block}"
            )
        else:
            found.append("vector" if shape[-2:] == vector else "block")
    if "block" not in found:
        return found[0], found[1]
    # With one block of K, scales of A (m, 1) are vector and block scales.
    if tuple(shape[-2:] for shape in given) != shapes["block"]:
        raise InvalidOperandError(
            f"scale_a has shape {given[0][-2:]} and scale_b {given[1][-2:]}; block scales are {shapes['block'][0]} and "
            f"{shapes['block'][1]}, both or neither"
        )
    return "block", "block"


def with_scales(problem: GemmProblem, scales: Scales) -> GemmProblem:
    """The problem with the epilogue, or the block scales, for these scales."""
    if scales == NO_SCALES or is_gated(problem.epilogue):
        return problem
    if scales.a is not None and scales.form == "swizzled":
        kind = fp4.scale_type(scales.a.dtype, "scale_a")
        shared = (1, 1, VECTOR[kind])
        return dataclasses.replace(problem, epilogue="lc", scale_granularity=shared, scale_type=kind.value)
    quantized = scales.d is not None or scales.amax is not None
    if scales.form != "block":
        return dataclasses.replace(problem, epilogue="scaled", quantized=quantized)
    epilogue = "scaled" if quantized else "lc"
    return dataclasses.replace(
        problem, epilogue=epilogue, scale_granularity=(1, BLOCK, BLOCK), scale_type=ScaleType.F32.value
    )


def result_of(problem: GemmProblem) -> MatrixSpec:
    """D in memory; with a gated epilogue it is half as wide as the product, with half the strides."""
    d = problem.d
    if not is_gated(problem.epilogue):
        return d
    strides = (*(stride // PER_PAIR for stride in d.strides[:-1]), 1)
    return dataclasses.replace(d, shape=(*d.shape[:-1], d.shape[-1] // PER_PAIR), strides=strides)


def rewritten(problem: GemmProblem, scales: Scales = NO_SCALES, fusion: Fusion | None = None) -> list[GemmProblem]:
    """The formulations of the problem with scales and a tree, preferred ones first."""
    scaled = with_scales(problem, scales)
    return [scaled] if fusion is None else fused_problems(scaled, fusion, scaled.epilogue)


def make(problem: GemmProblem, scales: Scales = NO_SCALES, fusion: Fusion | None = None, **options: Any) -> Plan:
    """The plan for a GEMM; with a gated epilogue, D of the problem is as wide as the product (see `result_of`).

    Its operands are a, b, then those that exist of c, scale_a, scale_b, scale_d, amax, the tree's inputs and outputs,
    then out. `options` are those of `PlanOptions`.
    """
    how = PlanOptions(**options)
    for name, scale, along in (("scale_a", scales.a, -2), ("scale_b", scales.b, -1)):
        if scale is not None and scale.form == "vector" and scale.shape[along] > 1 and scale.strides[along] != 1:
            raise UnsupportedError(f"{name} has strides {scale.strides}: its elements must be contiguous; copy it")
    search = search_for(problem, scales, fusion, None, how.arch, batch_invariant=how.batch_invariant, bound=how.bound)
    return planned(search, functools.partial(from_candidate, problem, scales=scales, fusion=fusion), how)


def search_for(
    problem: GemmProblem,
    scales: Scales,
    fusion: Fusion | None,
    device: Device | None,
    arch: SmArch | None,
    *,
    batch_invariant: bool = False,
    bound: bool = False,
) -> GemmSearch:
    """The kernels for a problem with its scales and tree, on its GPU unless another device is given."""
    if 0 in (problem.m, problem.n, problem.batch):
        raise UnsupportedError(f"a result of shape {problem.d.shape} is empty: there is nothing to plan")
    if problem.k == 0 and not is_plain(problem, scales, fusion):
        raise UnsupportedError(
            "K is 0: fp4 kernels have nothing to multiply; the result is beta * C"
            if problem.a.dtype is fp4.FP4
            else "K is 0: there is nothing for scales to multiply or an epilogue to follow; leave them out"
        )
    if batch_invariant:
        reduced = [output.name for output in fusion.tree.outputs if output.reduction] if fusion is not None else []
        reduction.refuse_sums(["amax"] if scales.amax is not None else reduced)
    problems = rewritten(nonempty(problem), scales, fusion)
    device = device or devices.get(problem.device)
    return GemmSearch(problems, device, arch, batch_invariant=batch_invariant, bound=bound)


def is_plain(problem: GemmProblem, scales: Scales, fusion: Fusion | None) -> bool:
    """Whether D is alpha A B + beta C, without scales, a tree or a gate."""
    return problem.epilogue == LINEAR and scales == NO_SCALES and fusion is None


def from_candidate(
    problem: GemmProblem,
    candidate: GemmCandidate,
    how: PlanOptions = DEFAULT_OPTIONS,
    scales: Scales = NO_SCALES,
    fusion: Fusion | None = None,
) -> Plan:
    """The plan with a given kernel; see `make`."""
    key, formulation = candidate.key, candidate.formulation
    epilogue, plain = formulation.problem.epilogue, is_plain(problem, scales, fusion)
    steps = Steps(problem.device, how.stream)

    def operand(name: str, spec: MatrixSpec, align: int) -> Address:
        if spec.dtype is not fp4.FP4:
            return steps.matrix(name, spec, align)
        return steps.slot(name, *fp4.packed(spec, name), BYTE, alignment=align * spec.dtype.bits // 8)

    align_a, align_b, align_d = helpers.alignments(candidate, problem.d.dtype)
    a, b = operand("a", problem.a, align_a), operand("b", problem.b, align_b)
    c: Address | None = None
    if plain and not how.of_call:
        c = steps.matrix("c", problem.c or problem.d, align_d, "optional source")
    elif problem.c is not None:
        c = steps.matrix("c", problem.c, align_d, "source")
    factors = {}
    for name, spec in zip(SCALES, scales, strict=True):
        if spec is not None:
            role = "output" if name == "amax" else "input"
            place = steps.slot(name, spec.shape, spec.strides, spec.dtype, alignment=spec.alignment, role=role)
            factors[name] = place
    others = FusedOperands(steps, fusion, epilogue, key, clear_masks=clears_masks(key))
    c = others.source or c
    out = steps.matrix("out", result_of(formulation.problem), align_d, "output")
    if "amax" in factors:
        steps.clear(factors["amax"], 4)

    kernels: dict[str, Any] = {"backend": how.backend, "jit": how.jit}
    when = PRODUCT if plain else ALWAYS
    read_by = helpers.copies(steps, formulation, when=when, **kernels)
    unmultiplied = how.alpha == 0 or not how.of_call
    common: dict[str, Any] = dict(product_args(formulation, candidate))
    narrower = PER_PAIR if is_gated(epilogue) else 1
    if narrower > 1:
        common |= {name: common[name] // narrower for name in ("ldd", "batch_stride_d")}
    beta = 0.0 if c is None else "beta"  # nothing to read, whatever a call says
    common |= {"alpha": "alpha", "beta": beta, "scale_d": factors.get("scale_d"), "amax": factors.get("amax")}
    products: list[dict[str, Any]] = []
    for count, offsets, at_scale_a, at_scale_b in _launches(scales, formulation, most_batches(key)):
        at_a, at_b, at_c, at_d, *at_operands = offsets
        args = common | {
            "batch": count,
            "c": c and moved(c, at_c, problem.d.dtype),
            "d": moved(out, at_d // narrower, problem.d.dtype),
        }
        strides = formulation.batches.strides[4:]
        if count == 1:
            args, strides = args | _ONE_BATCH, (0,) * len(strides)
        args |= others.args(strides, tuple(at_operands), swapped=formulation.swapped)
        products.append(args)
        if problem.k == 0:
            continue
        read = read_by(moved(a, at_a, problem.a.dtype), moved(b, at_b, problem.b.dtype), count)
        side_a = read[0], factors.get("scale_a"), at_scale_a, scales.a
        side_b = read[1], factors.get("scale_b"), at_scale_b, scales.b
        first, second = (side_b, side_a) if formulation.swapped else (side_a, side_b)
        args = _operand_args("a", *first) | _operand_args("b", *second) | args
        if formulation.divided:
            helpers.add_divided(steps, candidate, args, unmultiplied=unmultiplied, **kernels)
            continue
        if bits := settled_bits(formulation):
            args["settled"] = settled(b, bits)
        steps.launch(candidate, args, main=bool(formulation.copies), when=when)
    if plain and not formulation.divided and (problem.k == 0 or unmultiplied):
        nothing, size = _null_product(candidate)
        zeros = steps.zeros(size)
        for args in products:
            steps.launch(
                candidate, args | nothing | {"a": zeros, "b": zeros}, when=NO_PRODUCT if problem.k != 0 else ALWAYS
            )
    integral = plain and key.acc is CutlassDtype.I32
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta, integral=integral, problem=how.problem)


def clears_masks(key: KernelKey) -> bool:
    """Whether a kernel sets single bits of a mask, which must be cleared first."""
    return key.generation in ("sm80", "sm100", "sm120") or key.mainloop == FEW


def _operand_args(
    letter: str, array: Address, place: Address | None, start: int, scale: Scale | None
) -> dict[str, Any]:
    """A kernel's arguments for its A or B and the scales of it, which begin at element `start` of their array."""
    args: dict[str, Any] = {letter: array}
    if place is not None and scale is not None:
        kind, index, offset = place
        args[f"scale_{letter}"] = (kind, index, offset + start * scale.dtype[1] // 8)
        args[f"scale_form_{letter}"] = int(scale.form == "vector")
        if scale.form == "block":
            along, along_k = (-2, -1) if letter == "a" else (-1, -2)
            args[f"scale_stride_{letter}"] = scale.strides[along]
            args[f"scale_k_stride_{letter}"] = scale.strides[along_k]
    return args


def _null_product(candidate: GemmCandidate) -> tuple[dict[str, Any], int]:
    """The arguments of a product of zeros, for calls that must not read A and B, and the bytes of zeros."""
    key, formulation = candidate.key, candidate.formulation
    k = 128 // key.a.bits  # a vector of A's elements, and of B's, which have as many bits
    lda = k if key.layout_a == ROW else round_up(formulation.m, k)
    ldb = round_up(formulation.n, k) if key.layout_b == ROW else k
    elements = max(
        lda * (formulation.m if key.layout_a == ROW else k), ldb * (k if key.layout_b == ROW else formulation.n)
    )
    args = {"alpha": 0.0, "k": k, "lda": lda, "ldb": ldb, "batch_stride_a": 0, "batch_stride_b": 0}
    return args, elements * key.a.bits // 8


def most_batches(key: KernelKey) -> int | None:
    """The batches of a launch, at most; None where the kernel walks over them instead of having them in its grid."""
    return helpers.GRID_BATCHES if key.generation == "sm80" or key.mainloop in ANYWHERE else None


def _launches(
    scales: Scales, formulation: GemmFormulation, most: int | None
) -> list[tuple[int, tuple[int, ...], int, int]]:
    """Launches of up to `most` batches where batches share their scales, else one for each batch.

    Of each launch: its number of batches, and offsets in elements: of A, B, C, D and a tree's operands, of A's scales,
    and of B's.
    """
    problem, batches = formulation.problem, formulation.batches
    outer = problem.d.shape[:-2]
    own = any(scale is not None and math.prod(_as_matrices(scale).shape[:-2]) > 1 for scale in (scales.a, scales.b))
    # Kernels with block scales take one batch; those of fp4 would read separate scales for each batch.
    if not own and not (scales.form in ("block", "swizzled") and math.prod(outer) > 1):
        count = batches.count
        most = count if most is None else min(most, count)
        return [
            (min(most, count - start), tuple(map(operator.add, offsets, (start * s for s in batches.strides))), 0, 0)
            for offsets in batches.offsets
            for start in (most * number for number in range(-(-count // most)))
        ]
    if math.prod(outer) > MAX_OUTER:
        raise UnsupportedError(f"{math.prod(outer)} batches with scales of their own; at most {MAX_OUTER} are launched")
    steps = [spec.strides[:-2] for spec in over_batches(problem)]
    for name, scale in (("scale_a", scales.a), ("scale_b", scales.b)):
        if scale is None or math.prod(scale.shape) == 1:
            steps.append((0,) * len(outer))
        else:
            steps.append(broadcast_to(_as_matrices(scale), outer, name).strides[:-2])
    found = []
    for index in itertools.product(*map(range, outer)):
        *offsets, scale_a, scale_b = (sum(map(operator.mul, index, strides)) for strides in steps)
        found.append((1, tuple(offsets), scale_a, scale_b))
    return found


def _as_matrices(scale: Scale) -> MatrixSpec:
    """The layout of scales as matrices, with dimensions of batches in front."""
    if scale.form == "swizzled":
        return MatrixSpec((*scale.shape[:-1], 1, scale.shape[-1]), (*scale.strides[:-1], 0, 1), CutlassDtype.F32)
    return MatrixSpec(scale.shape, scale.strides, CutlassDtype.F32)
