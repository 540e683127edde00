"""Kernels of grouped GEMM: their conditions, their cost and their arguments. One launch computes all groups."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import _core
from ...arrays.layouts import MatrixSpec, round_up, views
from ...arrays.numerics import FAST
from ...arrays.scales import BLOCK
from ...arrays.symbols import gcd
from ...epilogue.fusion import GroupOperand
from ...errors import CutlassError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import as_bias_and_activation, common_of, form_of
from ...generator.epilogue.lower import LINEAR, SCALED, base_of, epilogue_id, is_common
from ...generator.epilogue.tree import ROW as ROW_KIND
from ...generator.key import COLUMN, ROW, KernelKey
from ...generator.matrix import ARCHS, cells, supports, with_epilogue
from ...generator.rules import FP8_TYPES, HALF_TYPES, OK, Status
from ...pipeline import devices
from ...pipeline.devices import Device
from ...pipeline.plan import Address, Plan, Steps
from ...pipeline.planning import PlanOptions, planned
from ...pipeline.search import Candidate, KernelSearch, matrix, refused
from .problem import ALONG_K, CONTIGUOUS, FORMS, LIST, MASKED, OP, GroupedProblem, scale_args

_FIELDS = _core.layout()["atomr_cutlass_group"]
_OFFSETS = {name: offset for name, offset, _, _ in _FIELDS}
_CODES = {("p", 8): "Q", ("i", 8): "q", ("i", 4): "i"}
ENTRY = struct.Struct("<" + "".join(_CODES[kind, size] for _, _, size, kind in _FIELDS))
"""atomr_cutlass_group (kernel_abi.h)."""


@dataclass(frozen=True)
class ReadLayout:
    """The layout in which a kernel reads an array of matrices.

    Attributes:
        leading: leading dimension in elements.
        group: elements from one group's matrix to the next; 0 where one matrix holds all groups.
        strided: alignment in bytes, at most 16, of the beginnings of rows (or columns) and matrices.
        contiguous: the same, of the ends of rows (or columns) too.
    """

    leading: int
    group: int
    strided: int
    contiguous: int


def read_layout(spec: MatrixSpec, layout: str, name: str) -> ReadLayout | None:
    """The layout of an array whose matrices are read as row- or column-major; None if they cannot be."""
    along = spec.shape[-1] if layout == "r" else spec.shape[-2]
    if 0 in spec.shape:  # nothing is read: any leading dimension is valid
        return _read(spec, round_up(max(along, 1), 128 // spec.dtype.bits), 0, along)
    found = [view for view in views(spec, name) if view.layout == layout]
    group = spec.strides[0] if len(spec.shape) == 3 and spec.shape[0] > 1 else 0
    return _read(spec, found[0].leading, group, along) if found else None


def source_layout(bias: MatrixSpec) -> ReadLayout | None:
    """The layout of a bias that is read as C with a leading dimension of 0; None if it is not contiguous."""
    if bias.shape[-1] > 1 and bias.strides[-1] != 1:
        return None
    group = bias.strides[0] if len(bias.shape) > 1 and bias.shape[0] > 1 else 0
    return _read(bias, 0, group, bias.shape[-1])


def _read(spec: MatrixSpec, leading: int, group: int, along: int) -> ReadLayout:
    bits, alignment = spec.dtype.bits, 16 if 0 in spec.shape else spec.alignment
    strided = gcd(alignment * 8, 128, leading * bits, group * bits) // 8
    contiguous = gcd(strided * 8, along * bits) // 8
    return ReadLayout(leading, group, strided & -strided, contiguous & -contiguous)


class GroupedSearch(KernelSearch[GroupedProblem]):
    """Kernels for a grouped GEMM, which has one formulation."""

    op = OP

    def __init__(
        self, problem: GroupedProblem, device: Device, arch: SmArch | None = None, *, batch_invariant: bool = False
    ) -> None:
        self.problem, self.device, self.arch, self.batch_invariant = problem, device, arch, batch_invariant
        self.formulations = () if problem.empty else ((problem,),)

    def traits(self, formulation: GroupedProblem) -> Hashable:
        return self._traits

    @functools.cached_property
    def _traits(self) -> Hashable:
        problem, fusion = self.problem, self.problem.fusion
        scales = problem.block_scales, bool(problem.scales)
        bias = None if fusion is None or not fusion.inputs else tuple(map(source_layout, fusion.inputs[0].arrays))
        return (
            problem.a[0].dtype, problem.b[0].dtype, problem.d[0].dtype, problem.math, scales, problem.form,
            None if fusion is None else (fusion.tree.program, bias is None or _widths(bias)), bool(problem.c),
            *(_widths(read_layout(spec, layout, "") for spec in specs)
              for specs in (problem.a, problem.b) for layout in (ROW, COLUMN)),
            *(_widths(read_layout(spec, ROW, "") for spec in specs) for specs in (problem.c, problem.d)),
        )  # fmt: skip

    def matches(self, key: KernelKey, formulation: GroupedProblem) -> Status:
        types = (formulation.a[0].dtype, formulation.b[0].dtype, formulation.d[0].dtype)
        maths = (FAST, "default") if formulation.math == FAST else (formulation.math,)
        if key.op != OP or (key.a, key.b, key.d) != types or key.math not in maths:
            return refused("its element types or math mode differ", 1)
        if formulation.block_scales:
            scales = key.scale_type == "f32" and key.scale_granularity == (1, BLOCK, BLOCK)
        else:
            scales = not key.scale_type and (base_of(key.epilogue) == SCALED or not formulation.scales)
        if not scales:
            return refused("its scales differ", 2)
        if not _reaches(key, formulation):
            return refused("it does not read groups that begin anywhere, in these layouts", 3)
        epilogue = epilogue_of(key, formulation)
        if key.epilogue != (common_of(epilogue) if is_common(key.epilogue) else epilogue):
            return refused("its epilogue differs", 4)
        if layouts_of(key, formulation) is None:
            return refused("an array has another layout, or is aligned to fewer bytes than it needs", 5)
        return OK

    def extents(self, formulation: GroupedProblem) -> tuple[int, ...]:
        """Extents as known to the host: the mean over a list; the masked form counts half the rows of each group."""
        groups = formulation.groups
        if formulation.form == LIST:
            m, n, k = (max(1, round(sum(of) / groups)) for of in zip(*formulation.members, strict=True))
        else:
            m, n, k = formulation.extents
        if formulation.form == MASKED:
            m = max(1, m // 2)
        elif formulation.form == ALONG_K:
            k = -(-k // groups)
        elif formulation.form == CONTIGUOUS:
            groups = max(1, min(groups, m))
            m = -(-m // groups)
        return m, n, k, groups, k, k

    def cells(self, arch: SmArch, group: Sequence[GroupedProblem]) -> Iterable[Iterable[KernelKey]]:
        """The matrix's cells, with the problem's epilogue if it has a tree."""
        keys: Iterable[KernelKey] = matrix(OP, arch)
        if self.problem.fusion is not None:
            keys = filter(supports, dict.fromkeys(_derived(key, self.problem) for key in keys))
        yield keys

    def epilogue_of(self, candidate: Candidate[GroupedProblem]) -> str:
        return epilogue_of(candidate.key, self.problem)

    def reason(self) -> str:
        problem, arch = self.problem, self.arch or self.device.arch
        if problem.empty:
            return "all groups are empty: there is nothing to plan"
        if arch is not None and arch not in ARCHS[OP]:
            served = ", ".join(each.value for each in ARCHS[OP])
            return f"grouped GEMM has no kernels for {arch.value}; there are some for {served}"
        a, b, d, fusion = problem.a[0], problem.b[0], problem.d[0], problem.fusion
        fp8, along_k = a.dtype in FP8_TYPES, problem.form == ALONG_K
        text = (
            f"no kernel of the matrix serves this grouped GEMM ({problem.form}): {a.dtype.value} and {b.dtype.value} "
            f"({problem.math}) to {d.dtype.value}, strides {a.strides}, {b.strides} and {d.strides}"
        )
        if not fp8 and a.dtype not in HALF_TYPES:
            return f"{text}: grouped kernels multiply f16, bf16 and fp8"
        if not fp8 and problem.scales:
            return f"{text}: only fp8 kernels take scales as arrays; give numbers, or fold them into alpha"
        if fp8 and d.dtype not in (*HALF_TYPES, *(FP8_TYPES if fusion else ())):
            return f"{text}: fp8 kernels give bf16 and f16, and with an epilogue e4m3 and e5m2"
        if fp8 and along_k:
            return f"{text}: fp8 kernels read A and B contiguous along K, and groups along K begin anywhere; use bf16"
        if fp8:
            reads = (
                "fp8 kernels read A and B contiguous along K (in PyTorch, b.transpose(-1, -2).contiguous()"
                ".transpose(-1, -2)), at addresses and strides of 16 bytes"
            )
        elif along_k:
            reads = (
                "along K, kernels read A contiguous along M and B along N, such as the transpose of row-major "
                "activations and a row-major gradient, at addresses and strides of 16 bytes"
            )
        else:
            reads = "A is read row-major, B in either layout"
        closest = [] if arch is None else [self.closest(arch)]
        notes = [*closest, reads, "the rows of the result are contiguous"]
        if fusion and arch in (SmArch.SM90A, SmArch.SM100):
            notes.append(
                "kernels over TMA, which evaluate epilogue trees, read and write at addresses and strides of 16 bytes"
            )
        if fusion and any(operand.kind == ROW_KIND for operand in fusion.inputs):
            notes.append(
                "kernels of the sm80 generation, which serve GPUs before sm_90 and unaligned operands, read a bias in "
                "the place of c: without c, contiguous and of the result's dtype"
            )
        if fusion and arch is not None:
            keys = (key for _, key in cells([arch]) if key.op == OP and (key.a, key.b) == (a.dtype, b.dtype))
            derived = (supports(_derived(key, problem)) for key in keys)
            notes += dict.fromkeys(status.reason for status in derived if not status)
        return f"{text}: {'; '.join(notes)}"


def _widths(read: Iterable[ReadLayout | None]) -> tuple[int, int] | None:
    """The least `strided` and `contiguous` of arrays; None if one cannot be read."""
    strided, contiguous = 16, 16
    try:
        for layout in read:
            if layout is None:
                return None
            strided, contiguous = min(strided, layout.strided), min(contiguous, layout.contiguous)
    except CutlassError:  # raised again by the search of kernels
        return 0, 0
    return strided, contiguous


def epilogue_of(key: KernelKey, problem: GroupedProblem) -> str:
    """The epilogue with which a kernel serves a problem, with the kernel's scaling as its base."""
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
    """A cell of the matrix with the epilogue of a problem; `supports` says whether it compiles."""
    epilogue, d = epilogue_of(key, problem), problem.d[0].dtype
    # A cell has enough shared memory for results that are no wider than its own.
    if problem.fusion is None or key.generation == "sm80" or d.bits > key.d.bits:
        return dataclasses.replace(key, epilogue=epilogue)
    return with_epilogue(key, epilogue, d)


def _reaches(key: KernelKey, problem: GroupedProblem) -> bool:
    """Whether a kernel can read the problem's groups, which may begin at any row of A, or anywhere along K."""
    if key.generation == "sm80":
        # Loads are as wide as the alignment, and the size of a group need not be a multiple of that.
        if problem.form == ALONG_K:
            return not ((key.layout_a == ROW and key.align_a > 1) or (key.layout_b == COLUMN and key.align_b > 1))
        return problem.form == LIST or key.layout_a == ROW or key.align_a == 1
    # A tensor map begins at a multiple of 16 bytes.
    if problem.form == ALONG_K:
        return key.layout_a == COLUMN and key.layout_b == ROW
    return problem.form != CONTIGUOUS or key.layout_a == ROW


def _bias_as_c(key: KernelKey, problem: GroupedProblem) -> tuple[MatrixSpec, ...]:
    """The arrays of the bias that a kernel reads as C; empty without."""
    inputs = problem.fusion.inputs if problem.fusion is not None and key.generation == "sm80" else ()
    return inputs[0].arrays if inputs else ()


def layouts_of(key: KernelKey, problem: GroupedProblem) -> dict[str, list[ReadLayout]] | None:
    """The layouts in which the kernel reads all arrays of A, B, C and D; None if it cannot read one."""
    found: dict[str, list[ReadLayout]] = {}
    bias = _bias_as_c(key, problem)
    if bias and problem.c:
        return None
    for letter, specs, layout, align, dtype in (
        ("a", problem.a, key.layout_a, key.align_a, key.a),
        ("b", problem.b, key.layout_b, key.align_b, key.b),
        ("c", bias or problem.c, ROW, key.align_d, key.d),
        ("d", problem.d, ROW, key.align_d, key.d),
    ):
        # Along the extent that groups divide, they begin and end anywhere.
        ragged = problem.form == ALONG_K and letter in "ab" and (layout == ROW) == (letter == "a")
        name, needed, found[letter] = "out" if letter == "d" else letter, max(1, align * dtype.bits // 8), []
        for spec in specs:
            read = source_layout(spec) if specs is bias else read_layout(spec, layout, name)
            # TMA moves 16 bytes at once, and would read or write beyond the end of a row.
            if read is None or (read.strided if ragged else read.contiguous) % needed:
                return None
            found[letter].append(read)
    return found


def make(problem: GroupedProblem, **options: Any) -> Plan:
    """The plan for a grouped GEMM. Options: `PlanOptions`.

    Its operands are a, b, then those that exist of c, offsets, scale_a, scale_b, the tree's inputs, then out; a list
    stands for all its members. Offsets (or counts) are read on the device at each call, and never by the host; they are
    clamped to the rows of the arrays.
    """
    how = PlanOptions(**options)
    search = GroupedSearch(problem, devices.get(problem.device), how.arch, batch_invariant=how.batch_invariant)
    return planned(search, functools.partial(_plan, search), how)


def _plan(search: GroupedSearch, candidate: Candidate[GroupedProblem], how: PlanOptions) -> Plan:
    problem, key = search.problem, candidate.key
    listed, in_place_of_c = problem.form == LIST, bool(_bias_as_c(key, problem))
    steps = Steps(problem.device, how.stream)
    layouts = layouts_of(key, problem)
    if layouts is None:
        raise UnsupportedError(search.reason())

    def slots(name: str, specs: Sequence[MatrixSpec], align: int = 1, role: str = "input") -> list[Address]:
        labels = [f"{name}[{g}]" if listed else name for g in range(len(specs))]
        return [
            steps.matrix(label, spec, align if 0 not in spec.shape else 0, role)  # empty arrays have any address
            for label, spec in zip(labels, specs, strict=True)
        ]

    args: dict[str, Any] = {
        "groups": problem.groups, "form": FORMS.index(problem.form), "alpha": "alpha", "beta": "beta"
    }  # fmt: skip
    if is_common(key.epilogue) and (form := form_of(epilogue_of(key, problem))) is not None:
        args["operand0_stride_m"] = form.told  # selects the problem's tree in a kernel that computes several
    places = {"a": slots("a", problem.a, key.align_a), "b": slots("b", problem.b, key.align_b)}
    places["c"] = slots("c", problem.c, key.align_d, "source")
    if not listed:
        divides = "counts" if problem.counted else "offsets"
        (args["offsets"],) = slots(divides, [MatrixSpec((problem.groups,), (1,), CutlassDtype.I32)])
    for name, scale in problem.scales.items():
        places[name] = slots(name, scale.arrays)
        args |= scale_args(name, scale, listed=listed)
    align = key.align_d if in_place_of_c else 1
    inputs = problem.fusion.inputs if problem.fusion else ()
    operands = [(operand, slots(operand.name, operand.arrays, align)) for operand in inputs]
    if in_place_of_c:
        [(_, places["c"])], operands, args["beta"] = operands, [], 1.0
    out = places["d"] = slots("out", problem.d, key.align_d, "output")
    # Operands without elements get the address of the result, since kernels may need a valid one.
    for name, specs in (("a", problem.a), ("b", problem.b)):
        triples = zip(places[name], specs, out, strict=True)
        places[name] = [result if 0 in spec.shape else place for place, spec, result in triples]
    layouts["c"] = layouts["c"] or layouts["d"]
    if listed:
        args |= _table(steps, problem, places, layouts, operands)
    else:
        args["m"], args["n"], args["k"] = problem.extents
        args |= {"rows_are_counts": int(problem.counted), "c": None} | {name: p[0] for name, p in places.items() if p}
        for letter in "abcd":
            (layout,) = layouts[letter]
            args |= {f"ld{letter}": layout.leading, f"group_stride_{letter}": layout.group}
        for number, (operand, (place,)) in enumerate(operands):
            group_stride, stride = operand.strides
            args |= {
                f"operand{number}": place,
                f"operand{number}_stride_n": stride,
                f"operand{number}_batch_stride": group_stride,
            }
    steps.launch(candidate, args, main=True)
    return steps.plan(like=how.like, alpha=how.alpha, beta=how.beta, problem=how.problem)


def _table(
    steps: Steps,
    problem: GroupedProblem,
    places: Mapping[str, list[Address]],
    layouts: Mapping[str, list[ReadLayout]],
    operands: Sequence[tuple[GroupOperand, list[Address]]],
) -> dict[str, Any]:
    """Adds a copy of the table of a list's matrices to the device; returns the arguments with its address.

    The table has an entry for each group, then for each operand of the tree its addresses in all groups.
    """
    table, patches = bytearray(), []
    for g, extents in enumerate(problem.members):
        for name, addresses in places.items():
            if addresses:
                patches.append((len(table) + _OFFSETS[name], addresses[g if len(addresses) > 1 else 0]))
        values = dict(zip("mnk", extents, strict=True)) | {f"ld{x}": layouts[x][g].leading for x in "abcd"}
        table += ENTRY.pack(*(values.get(name, 0) for name in _OFFSETS))
    args: dict[str, Any] = {"table": steps.temporary(len(table) + 8 * problem.groups * len(operands))}
    kind, index, _ = args["table"]
    for number, (operand, addresses) in enumerate(operands):
        is_row = operand.kind == ROW_KIND
        if is_row and any(spec.shape[-1] > 1 and spec.strides[-1] != 1 for spec in operand.arrays):
            raise UnsupportedError(f"the members of {operand.name} must be contiguous")
        args |= {f"operand{number}": (kind, index, len(table)), f"operand{number}_stride_n": int(is_row)}
        for g in range(problem.groups):
            patches.append((len(table), addresses[g if len(addresses) > 1 else 0]))
            table += bytes(8)
    steps.copy(args["table"], bytes(table), patches)
    return args
