"""Plans of grouped GEMM: which kernel, and its arguments. One launch serves all groups, whatever their sizes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ... import _core
from ...arrays.numerics import FAST
from ...epilogue import validate
from ...epilogue.bound import Fusion, GroupedFusion, GroupOperand
from ...errors import UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import as_bias_and_activation, common_of, form_of
from ...generator.epilogue.lower import LINEAR, SCALED, base_of, epilogue_id, has_tree, is_common
from ...generator.epilogue.tree import ROW as ROW_KIND
from ...generator.key import COLUMN, ROW, KernelKey
from ...generator.matrix import ARCHS, cells, supports, with_epilogue
from ...generator.rules import FP8_TYPES, HALF_TYPES, OK, Status, no
from ...pipeline import devices, estimate, select
from ...pipeline.candidate import Candidate
from ...pipeline.devices import Device
from ...pipeline.estimate import Launch
from ...pipeline.plan import Address, Plan, Steps, refuse_capture
from ...pipeline.planning import PlanOptions, planned
from ...pipeline.problem import GemmProblem, MatrixSpec, Variant
from ...pipeline.select import KernelSearch
from ..gemm.validation import make_probe
from .problem import (
    ALONG_K,
    BLOCK,
    BLOCKS,
    CONTIGUOUS,
    FORMS,
    GROUP,
    LIST,
    OP,
    TENSOR,
    VECTOR,
    GroupedProblem,
    GroupScale,
    ReadLayout,
    read_layout,
    source_layout,
)

ENTRY = struct.Struct("<6Q4q4i")
"""atomr_cutlass_group (kernel_abi.h): a, b, c, d, scale_a, scale_b; lda, ldb, ldc, ldd; m, n, k, padding."""

FULL_ACCUMULATION = 1.05
"""How much longer than with fast accumulation an fp8 kernel takes, by the model."""
NARROW = 1.5
"""Factor on the model's time of a kernel that reads single elements: it serves only layouts that no other reads."""
EMPTY_ROWS = 0.05

_SCALE_FORMS = {TENSOR: 0, VECTOR: 1, GROUP: 2, BLOCKS: 0}
_POINTERS = ("a", "b", "c", "d", "scale_a", "scale_b")


_OTHER_TYPES = no("its element types or math mode differ")
_OTHER_SCALES = no("its scales differ")
_OUT_OF_REACH = no("it does not read groups that begin anywhere, in these layouts")
_OTHER_EPILOGUE = no("its epilogue differs")
_OTHER_LAYOUT = no("an array has another layout, or is aligned to fewer bytes than it needs")


class GroupedSearch(KernelSearch[GroupedProblem]):
    """Kernels for a grouped GEMM, which all take it as it stands."""

    op = OP

    def __init__(
        self, problem: GroupedProblem, device: Device, arch: SmArch | None = None, *, batch_invariant: bool = False
    ) -> None:
        """Kernels for a problem on a device; of one arch where that is given, of one reduction where it must be."""
        self.problem, self.device, self.arch, self.batch_invariant = problem, device, arch, batch_invariant
        self.formulations = () if problem.empty else ((problem,),)

    def supports(self, key: KernelKey, formulation: GroupedProblem) -> Status:
        """Whether a kernel serves the problem."""
        if not _multiplies(key, formulation):
            return _OTHER_TYPES
        if not _scales(key, formulation):
            return _OTHER_SCALES
        if not _reaches(key, formulation):
            return _OUT_OF_REACH
        epilogue = _epilogue(key, formulation)
        if key.epilogue != (common_of(epilogue) if is_common(key.epilogue) else epilogue):
            return _OTHER_EPILOGUE
        return OK if _layouts(key, formulation) is not None else _OTHER_LAYOUT

    def cost(self, key: KernelKey, formulation: GroupedProblem, shared_bytes: int) -> Launch:
        """Estimated seconds of one launch, for all groups."""
        groups, m, n, k = formulation.expected
        variant = Variant(
            swapped=False, m=m, n=n, k=k, batch=groups, layout_a=key.layout_a, layout_b=key.layout_b, lda=k, ldb=k,
            ldc=n, ldd=n, batch_strides=(0, 0, 0, 0), align_a=key.align_a, align_b=key.align_b, align_d=key.align_d,
            layout_d=key.layout_d,
        )  # fmt: skip
        seconds = estimate.seconds(key, variant, self.device, shared_bytes)
        # Where memory bounds the time, all tiles cost the same; the fewer empty rows a tile has, the better.
        seconds *= 1.0 + EMPTY_ROWS * (1.0 - m / (key.tile[0] * -(-m // key.tile[0])))
        seconds *= NARROW if key.mainloop == "twostage" else 1.0
        return Launch(seconds * (FULL_ACCUMULATION if key.a in FP8_TYPES and key.math != FAST else 1.0))

    def cells(self, arch: SmArch, group: Sequence[GroupedProblem]) -> Iterable[Iterable[KernelKey]]:
        """The matrix's cells, with the problem's epilogue in the place of their own where it has a tree."""
        keys = select.matrix(OP, arch)
        for problem in group:
            if problem.fusion is None:
                yield keys
            else:
                yield (key for key in dict.fromkeys(_derived(key, problem) for key in keys) if supports(key))

    def reason(self) -> str:
        """Why no cell of the matrix serves the problem on its arch, and the cure."""
        return refusal(self.problem, self.arch or self.device.arch)


def _multiplies(key: KernelKey, problem: GroupedProblem) -> bool:
    """Whether it is a kernel of these element types."""
    types = (problem.a[0].dtype, problem.b[0].dtype, problem.d[0].dtype)
    maths = (FAST, "default") if problem.math == FAST else (problem.math,)
    return key.op == OP and (key.a, key.b, key.d) == types and key.math in maths


def _scales(key: KernelKey, problem: GroupedProblem) -> bool:
    """Whether it reads the scales: all that are there, and none that are not."""
    if problem.block_scales:
        return key.scale_type == "f32" and key.scale_granularity == (1, BLOCK, BLOCK)
    arrays = problem.scale_a is not None or problem.scale_b is not None
    return not key.scale_type and (base_of(key.epilogue) == SCALED or not arrays)


def _epilogue(key: KernelKey, problem: GroupedProblem) -> str:
    """The epilogue that a problem needs of a kernel, on top of the kernel's own scaling."""
    base = base_of(key.epilogue)
    if key.generation == "sm80":
        base = SCALED if base == SCALED else LINEAR
    if problem.fusion is None:
        return base
    program = problem.fusion.tree.program
    if key.generation == "sm80":
        plain = as_bias_and_activation(program)
        if plain is not None and plain.bias in (None, key.d):
            return f"{base}_{plain.activation}" if plain.activation else base
    return epilogue_id(base, program)


def _derived(key: KernelKey, problem: GroupedProblem) -> KernelKey:
    """The kernel that a cell of the matrix becomes for a problem; `supports` says whether it compiles."""
    epilogue, d = _epilogue(key, problem), problem.d[0].dtype
    # A cell has room for results that are no wider than its own.
    if problem.fusion is None or key.generation == "sm80" or d.bits > key.d.bits:
        return dataclasses.replace(key, epilogue=epilogue)
    return with_epilogue(key, epilogue, d)


def _in_place_of_c(key: KernelKey, problem: GroupedProblem) -> bool:
    """Whether the kernel reads the bias as C."""
    return problem.fusion is not None and bool(problem.fusion.inputs) and key.generation == "sm80"


def _reaches(key: KernelKey, problem: GroupedProblem) -> bool:
    """Whether it can read groups that begin anywhere along the rows of A, or along K."""
    if key.generation == "sm80":
        # Loads are as wide as the alignment, which the size of a group need not be a multiple of.
        if problem.form == ALONG_K:
            return not ((key.layout_a == ROW and key.align_a > 1) or (key.layout_b == COLUMN and key.align_b > 1))
        return problem.form == LIST or key.layout_a == ROW or key.align_a == 1
    # A tensor map begins at a multiple of 16 bytes.
    if problem.form == ALONG_K:
        return key.layout_a == COLUMN and key.layout_b == ROW
    return problem.form != CONTIGUOUS or key.layout_a == ROW


def _layouts(key: KernelKey, problem: GroupedProblem) -> dict[str, list[ReadLayout]] | None:
    """How the kernel reads every array; None when one has a layout that it does not read."""
    operands = (("a", problem.a, key.layout_a, key.align_a, key.a), ("b", problem.b, key.layout_b, key.align_b, key.b))
    results = (("c", problem.c, ROW, key.align_d, key.d), ("out", problem.d, ROW, key.align_d, key.d))
    found: dict[str, list[ReadLayout]] = {}
    for name, specs, layout, align, dtype in (*operands, *results):
        needed = max(1, align * dtype.bits // 8)
        found[name] = []
        for spec in specs:
            read = read_layout(spec, layout, name)
            if read is None:
                return None
            # Where groups begin and end anywhere, the extent that they divide is no multiple of anything.
            ragged = problem.form == ALONG_K and name in ("a", "b") and (layout == ROW) == (name == "a")
            # TMA moves 16 bytes at once, beyond the end of a row too, so the memory there would be read, or written.
            bytes_aligned = read.strided if ragged else read.contiguous
            if bytes_aligned % needed:
                return None
            found[name].append(read)
    if problem.fusion is not None and _in_place_of_c(key, problem):
        if problem.c:
            return None
        for spec in problem.fusion.inputs[0].arrays:
            row = source_layout(spec)
            if row is None or row.contiguous % max(1, key.align_d * key.d.bits // 8):
                return None
            found["c"].append(row)
    return found


def refusal(problem: GroupedProblem, arch: SmArch | None) -> str:
    """Why no cell of the matrix serves a problem on an arch, and the cure."""
    if problem.empty:
        return "all groups are empty: there is nothing to plan"
    if arch is not None and arch not in ARCHS[OP]:
        return (
            f"grouped GEMM has no kernels for {arch.value}; there are some for {', '.join(a.value for a in ARCHS[OP])}"
        )
    a, b, d = problem.a[0], problem.b[0], problem.d[0]
    text = (
        f"no kernel of the matrix serves this grouped GEMM ({problem.form}): {a.dtype.value} and {b.dtype.value} "
        f"({problem.math}) to {d.dtype.value}, strides {a.strides}, {b.strides} and {d.strides}"
    )
    if a.dtype not in (*HALF_TYPES, *FP8_TYPES):
        return f"{text}: grouped kernels multiply f16, bf16 and fp8"
    if a.dtype not in FP8_TYPES and (problem.scale_a is not None or problem.scale_b is not None):
        return f"{text}: only fp8 kernels take scales as arrays; give numbers, or fold them into alpha"
    if a.dtype in FP8_TYPES and d.dtype not in (*HALF_TYPES, *(FP8_TYPES if problem.fusion is not None else ())):
        return f"{text}: fp8 kernels give bf16 and f16, and with an epilogue e4m3 and e5m2"
    if a.dtype in FP8_TYPES and problem.form == ALONG_K:
        return f"{text}: fp8 kernels read A and B contiguous along K, and groups along K begin anywhere; use bf16"
    notes = []
    if a.dtype in FP8_TYPES:
        notes.append("fp8 kernels read A and B contiguous along K (in PyTorch, b.transpose(-1, -2).contiguous()"
                     ".transpose(-1, -2)), at addresses and strides of 16 bytes")  # fmt: skip
    elif problem.form == ALONG_K:
        notes.append("along K, kernels read A contiguous along M and B along N, such as the transpose of row-major "
                     "activations and a row-major gradient, at addresses and strides of 16 bytes")  # fmt: skip
    else:
        notes.append("A is read row-major, B in either layout")
    notes.append("the rows of the result are contiguous")
    if problem.fusion is not None:
        if arch in (SmArch.SM90A, SmArch.SM100):
            notes.append("kernels over TMA, which evaluate epilogue trees, read and write at addresses and strides of "
                         "16 bytes")  # fmt: skip
        if any(operand.kind == ROW_KIND for operand in problem.fusion.inputs):
            notes.append("kernels of the sm80 generation, which serve GPUs before sm_90 and unaligned operands, read a "
                         "bias in the place of c: without c, contiguous and of the result's dtype")  # fmt: skip
        if arch is not None:
            notes += _reasons(problem.fusion.tree.program, a.dtype, b.dtype, d.dtype, arch)
    return f"{text}: {'; '.join(notes)}"


@functools.lru_cache(256)
def _reasons(program: str, a: CutlassDtype, b: CutlassDtype, d: CutlassDtype, arch: SmArch) -> tuple[str, ...]:
    """Why cells of an arch that multiply these types do not take an epilogue tree."""
    found: dict[str, None] = {}
    for _, key in cells([arch]):
        if key.op != OP or (key.a, key.b) != (a, b):
            continue
        plain = as_bias_and_activation(program)
        if key.generation == "sm80" and plain is not None and plain.bias in (None, key.d):
            continue
        status = supports(with_epilogue(key, epilogue_id(base_of(key.epilogue), program), d))
        if not status:
            found[status.reason] = None
    return tuple(found)


def make(problem: GroupedProblem, *, candidate: Candidate[GroupedProblem] | None = None, **options: Any) -> Plan:
    """The plan for a grouped GEMM.

    Its slots are a, b and, where there are such, c, offsets, scale_a, scale_b, the tree's inputs, then out; of lists
    every member in the place of its list. Offsets (or counts) are read on the device at each call, and never by the
    host; they are clamped to the rows there are.

    Args:
        problem: the products.
        candidate: the kernel where it has been chosen already.
        options: those of `PlanOptions`.

    Raises:
        UnsupportedError, KernelNotFoundError: as `gemm.kernels.make`.
    """
    how = PlanOptions(**options)
    if problem.empty:
        raise UnsupportedError(refusal(problem, how.arch))
    device = devices.get(problem.device)

    def build(candidate: Candidate[GroupedProblem], how: PlanOptions) -> Plan:
        checked = True
        if problem.fusion is not None and has_tree(candidate.key.epilogue):
            launch = functools.partial(_launch_once, candidate)
            epilogue = _epilogue(candidate.key, problem)
            checked = validate.require(
                candidate, epilogue, device, launch, make_probe, stream=how.stream, in_background=how.in_background
            )
        made = _plan(problem, candidate, how.arch, alpha=how.alpha, beta=how.beta, like=how.like)
        made.checked = checked
        return made

    if candidate is None:
        return planned(GroupedSearch(problem, device, how.arch, batch_invariant=how.batch_invariant), build, how)
    refuse_capture(candidate, problem.device, how.stream)
    return build(candidate, how)


def _launch_once(
    candidate: Candidate[GroupedProblem], product: GemmProblem, fusion: Fusion, views: Mapping[str, _core.Operand]
) -> None:
    """Launches the kernel for a list of one product."""
    inputs = tuple(
        GroupOperand(leaf.name, leaf.kind, (MatrixSpec(leaf.shape, leaf.strides, leaf.dtype, leaf.alignment),))
        for leaf in fusion.inputs
    )
    alone = GroupedProblem(
        LIST, 1, (product.a,), (product.b,), (), (product.d,), counted=False, math=product.math, device=product.device,
        fusion=GroupedFusion(fusion.tree, inputs),
    )  # fmt: skip
    made = _plan(alone, candidate, candidate.key.arch, alpha=1.0, beta=0.0, like=None)
    made(*(views[name] for name in ("a", "b", *(leaf.name for leaf in fusion.inputs), "out")), stream=0)


def _plan(
    problem: GroupedProblem,
    candidate: Candidate[GroupedProblem],
    arch: SmArch | None,
    *,
    alpha: float,
    beta: float,
    like: Any,
) -> Plan:
    steps = Steps(problem.device)
    layouts = _layouts(candidate.key, problem)
    if layouts is None:
        raise UnsupportedError(refusal(problem, arch or devices.get(problem.device).arch))
    args = _told(candidate.key, problem) | (_list_args if problem.form == LIST else _array_args)(
        steps, problem, candidate.key, layouts
    )
    form = {"groups": problem.groups, "form": FORMS.index(problem.form), "alpha": "alpha", "beta": "beta"}
    steps.launch(candidate, form | args, main=True)
    return steps.plan(like=like, alpha=alpha, beta=beta)


def _told(key: KernelKey, problem: GroupedProblem) -> dict[str, Any]:
    """The arguments that select the problem's tree in a kernel that computes several."""
    form = form_of(_epilogue(key, problem)) if is_common(key.epilogue) else None
    return {} if form is None else {"operand0_stride_m": form.told}


def _slot(steps: Steps, name: str, spec: MatrixSpec, align: int, role: str = "input") -> Address:
    alignment = max(1, align * spec.dtype.bits // 8) if 0 not in spec.shape else 1
    return steps.slot(name, spec.shape, spec.strides, spec.dtype.dlpack, alignment=alignment, role=role)


def _array_args(
    steps: Steps, problem: GroupedProblem, key: KernelKey, layouts: dict[str, list[ReadLayout]]
) -> dict[str, Any]:
    """Of the forms whose operands are one array each."""
    m, n, k = problem.extents
    a = _slot(steps, "a", problem.a[0], key.align_a)
    b = _slot(steps, "b", problem.b[0], key.align_b)
    c = _slot(steps, "c", problem.c[0], key.align_d, "source") if problem.c else None
    offsets = MatrixSpec((problem.groups,), (1,), CutlassDtype.I32)
    divides = _slot(steps, "counts" if problem.counted else "offsets", offsets, 1)
    scales = _scale_args(steps, problem)
    fused: dict[str, Any] = {}
    for number, operand in enumerate(problem.fusion.inputs if problem.fusion else ()):
        (array,) = operand.arrays
        if _in_place_of_c(key, problem):
            c, fused = _slot(steps, operand.name, array, key.align_d), {"beta": 1.0}
            continue
        group_stride, stride = operand.strides
        fused |= {
            f"operand{number}": _slot(steps, operand.name, array, 1),
            f"operand{number}_stride_n": stride,
            f"operand{number}_batch_stride": group_stride,
        }
    out = _slot(steps, "out", problem.d[0], key.align_d, "output")
    args: dict[str, Any] = {
        "m": m, "n": n, "k": k, "rows_are_counts": int(problem.counted), "offsets": divides, "c": c, "d": out,
        # Kernels may need a valid address for an operand without elements.
        "a": a if 0 not in problem.a[0].shape else out, "b": b if 0 not in problem.b[0].shape else out,
    }  # fmt: skip
    for letter, name in zip("abcd", ("a", "b", "c", "out"), strict=True):
        first = layouts[name][0] if layouts[name] else layouts["out"][0]
        args[f"ld{letter}"] = first.leading
        args[f"group_stride_{letter}"] = first.group
    return args | scales | fused


def _scale_args(steps: Steps, problem: GroupedProblem) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for letter, scale in (("a", problem.scale_a), ("b", problem.scale_b)):
        if scale is None:
            continue
        name, spec = f"scale_{letter}", scale.arrays[0]
        args[name] = _slot(steps, name, spec, 1)
        args[f"scale_form_{letter}"] = _SCALE_FORMS[scale.form]
        along, k_along = (-2, -1) if letter == "a" else (-1, -2)
        if scale.form == GROUP and problem.groups > 1 and spec.strides[0] != 1:
            raise UnsupportedError(f"{name} has strides {spec.strides}: the scales of groups must be contiguous")
        if scale.form == VECTOR and spec.shape[along] > 1 and spec.strides[along] != 1:
            raise UnsupportedError(f"{name} has strides {spec.strides}: the scales of a group must be contiguous")
        if scale.form in (VECTOR, BLOCKS) and len(spec.shape) == 3:
            args[f"scale_group_stride_{letter}"] = spec.strides[0]
        if scale.form == BLOCKS:
            args[f"scale_stride_{letter}"] = spec.strides[along]
            args[f"scale_k_stride_{letter}"] = spec.strides[k_along]
    return args


def _list_args(
    steps: Steps, problem: GroupedProblem, key: KernelKey, layouts: dict[str, list[ReadLayout]]
) -> dict[str, Any]:
    """Of lists: a table of matrices, written to the device at each call."""

    def slots(name: str, specs: tuple[MatrixSpec, ...], align: int, role: str = "input") -> list[Address]:
        return [_slot(steps, f"{name}[{g}]", spec, align, role) for g, spec in enumerate(specs)]

    args: dict[str, Any] = {}
    places = {"a": slots("a", problem.a, key.align_a), "b": slots("b", problem.b, key.align_b)}
    places["c"] = slots("c", problem.c, key.align_d, "source")
    for letter, scale in (("a", problem.scale_a), ("b", problem.scale_b)):
        if scale is None:
            places[f"scale_{letter}"] = []
            continue
        found = slots(f"scale_{letter}", scale.arrays, 1)
        places[f"scale_{letter}"] = found * problem.groups if len(found) == 1 else found
        args[f"scale_form_{letter}"] = _SCALE_FORMS[scale.form]
        args |= _common_strides(letter, scale)
    in_place_of_c = _in_place_of_c(key, problem)
    inputs = problem.fusion.inputs if problem.fusion else ()
    tables = []
    for operand in inputs:
        found = slots(operand.name, operand.arrays, key.align_d if in_place_of_c else 1)
        tables.append(found if len(found) == problem.groups else found * problem.groups)
    if in_place_of_c:
        places["c"], tables = tables[0], []
        args["beta"] = 1.0
    places["d"] = slots("out", problem.d, key.align_d, "output")
    layouts["d"] = layouts["out"]
    table, patches = bytearray(), []
    for g, (m, n, k) in enumerate(problem.members):
        start = len(table)
        leading = [(layouts[letter] or layouts["d"])[g].leading for letter in "abcd"]
        table += ENTRY.pack(0, 0, 0, 0, 0, 0, *leading, m, n, k, 0)
        for index, name in enumerate(_POINTERS):
            if not places[name]:
                continue
            # As above, of an operand without elements.
            nothing = (name == "a" and 0 in problem.a[g].shape) or (name == "b" and 0 in problem.b[g].shape)
            patches.append((start + 8 * index, (places["d"] if nothing else places[name])[g]))
    # After the groups: for each operand of the tree, its address in every group.
    behind = len(table)
    patches += [(behind + 8 * place, address) for place, address in enumerate(itertools.chain(*tables))]
    table += bytes(8 * problem.groups * len(tables))
    where = steps.temporary(len(table))
    steps.copy(where, bytes(table), patches)
    kind, index, _ = where
    for number, operand in enumerate(inputs[: len(tables)]):
        is_row = operand.kind == ROW_KIND
        if is_row and any(spec.shape[-1] > 1 and spec.strides[-1] != 1 for spec in operand.arrays):
            raise UnsupportedError(f"the members of {operand.name} must be contiguous")
        args |= {
            f"operand{number}": (kind, index, behind + 8 * problem.groups * number),
            f"operand{number}_stride_n": int(is_row),
        }
    return args | {"table": where}


def _common_strides(letter: str, scale: GroupScale) -> dict[str, int]:
    """The strides that all scales of a list have in common.

    Raises:
        UnsupportedError: they have none.
    """
    name, (along, k_along) = f"scale_{letter}", (-2, -1) if letter == "a" else (-1, -2)
    arrays = [spec for spec in scale.arrays if 0 not in spec.shape]
    if scale.form == VECTOR:
        if any(spec.shape[along] > 1 and spec.strides[along] != 1 for spec in arrays):
            raise UnsupportedError(f"the members of {name} must be contiguous")
        return {}
    if scale.form != BLOCKS:
        return {}
    found = {}
    for field, dim in ((f"scale_stride_{letter}", along), (f"scale_k_stride_{letter}", k_along)):
        strides = {spec.strides[dim] for spec in arrays if spec.shape[dim] > 1}
        if len(strides) > 1:
            raise UnsupportedError(
                f"the members of {name} have different strides ({sorted(strides)[:4]}): the block scales of a list "
                "are read with one stride; cut them from one array"
            )
        found[field] = strides.pop() if strides else 1
    return found
