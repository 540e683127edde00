"""Kernels of grouped GEMM: which serve a problem, at what cost. One launch serves all groups, whatever their sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence

from ...arrays.numerics import FAST
from ...errors import CutlassError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.common import as_bias_and_activation, common_of
from ...generator.epilogue.lower import LINEAR, SCALED, base_of, epilogue_id, is_common
from ...generator.epilogue.tree import ROW as ROW_KIND
from ...generator.key import COLUMN, ROW, KernelKey
from ...generator.matrix import ARCHS, cells, supports, with_epilogue
from ...generator.rules import FP8_TYPES, HALF_TYPES, OK, Status, no
from ...pipeline.devices import Device
from ...pipeline.search import Candidate, KernelSearch, matrix
from ..quantize.reference import BLOCK
from .problem import ALONG_K, CONTIGUOUS, LIST, OP, GroupedProblem, ReadLayout, read_layout, source_layout

_OTHER_TYPES = no("its element types or math mode differ", 1)
_OTHER_SCALES = no("its scales differ", 2)
_OUT_OF_REACH = no("it does not read groups that begin anywhere, in these layouts", 3)
_OTHER_EPILOGUE = no("its epilogue differs", 4)
_OTHER_LAYOUT = no("an array has another layout, or is aligned to fewer bytes than it needs", 5)


class GroupedSearch(KernelSearch[GroupedProblem]):
    """Kernels for a grouped GEMM, which all take it as it stands."""

    op = OP

    def __init__(
        self, problem: GroupedProblem, device: Device, arch: SmArch | None = None, *, batch_invariant: bool = False
    ) -> None:
        """Kernels for a problem on a device; of one arch where that is given, of one reduction where it must be."""
        self.problem, self.device, self.arch, self.batch_invariant = problem, device, arch, batch_invariant
        self.formulations = () if problem.empty else ((problem,),)

    def traits(self, formulation: GroupedProblem) -> Hashable:
        """Types, math mode, scales, epilogue, form, and how arrays can be read in the layouts that kernels read."""
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
            return _OTHER_TYPES
        if not _scales(key, formulation):
            return _OTHER_SCALES
        if not _reaches(key, formulation):
            return _OUT_OF_REACH
        epilogue = epilogue_of(key, formulation)
        if key.epilogue != (common_of(epilogue) if is_common(key.epilogue) else epilogue):
            return _OTHER_EPILOGUE
        return OK if layouts_of(key, formulation) is not None else _OTHER_LAYOUT

    def extents(self, formulation: GroupedProblem) -> tuple[int, ...]:
        """Groups of expected extents."""
        groups, m, n, k = formulation.expected
        return m, n, k, groups, k, k

    def cells(self, arch: SmArch, group: Sequence[GroupedProblem]) -> Iterable[Iterable[KernelKey]]:
        """The matrix's cells, with the problem's epilogue in the place of their own where it has a tree."""
        keys = matrix(OP, arch)
        for problem in group:
            if problem.fusion is None:
                yield keys
            else:
                yield (key for key in dict.fromkeys(_derived(key, problem) for key in keys) if supports(key))

    def epilogue_of(self, candidate: Candidate[GroupedProblem]) -> str:
        return epilogue_of(candidate.key, self.problem)

    def reason(self) -> str:
        arch = self.arch or self.device.arch
        return refusal(self.problem, arch, "" if arch is None else self.closest(arch))


def _widths(read: Iterable[ReadLayout | None]) -> tuple[int, int] | None:
    """Bytes that accesses of all arrays may span, along rows of any extent and of their own; None: one is not read."""
    strided, contiguous = 16, 16
    try:
        for layout in read:
            if layout is None:
                return None
            strided, contiguous = min(strided, layout.strided), min(contiguous, layout.contiguous)
    except CutlassError:  # whoever looks for kernels says so
        return 0, 0
    return strided, contiguous


def _scales(key: KernelKey, problem: GroupedProblem) -> bool:
    """Whether it reads the scales: all that are there, and none that are not."""
    if problem.block_scales:
        return key.scale_type == "f32" and key.scale_granularity == (1, BLOCK, BLOCK)
    return not key.scale_type and (base_of(key.epilogue) == SCALED or not problem.scales)


def epilogue_of(key: KernelKey, problem: GroupedProblem) -> str:
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
    epilogue, d = epilogue_of(key, problem), problem.d[0].dtype
    # A cell has room for results that are no wider than its own.
    if problem.fusion is None or key.generation == "sm80" or d.bits > key.d.bits:
        return dataclasses.replace(key, epilogue=epilogue)
    return with_epilogue(key, epilogue, d)


def reads_as_c(key: KernelKey, problem: GroupedProblem) -> bool:
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


def layouts_of(key: KernelKey, problem: GroupedProblem) -> dict[str, list[ReadLayout]] | None:
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
    if problem.fusion is not None and reads_as_c(key, problem):
        if problem.c:
            return None
        for spec in problem.fusion.inputs[0].arrays:
            row = source_layout(spec)
            if row is None or row.contiguous % max(1, key.align_d * key.d.bits // 8):
                return None
            found["c"].append(row)
    return found


def refusal(problem: GroupedProblem, arch: SmArch | None, closest: str = "") -> str:
    """Why no cell of the matrix serves a problem on an arch, and the cure; `closest` as of a search."""
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
    if a.dtype not in FP8_TYPES and problem.scales:
        return f"{text}: only fp8 kernels take scales as arrays; give numbers, or fold them into alpha"
    if a.dtype in FP8_TYPES and d.dtype not in (*HALF_TYPES, *(FP8_TYPES if problem.fusion is not None else ())):
        return f"{text}: fp8 kernels give bf16 and f16, and with an epilogue e4m3 and e5m2"
    if a.dtype in FP8_TYPES and problem.form == ALONG_K:
        return f"{text}: fp8 kernels read A and B contiguous along K, and groups along K begin anywhere; use bf16"
    notes = [closest] if closest else []
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
