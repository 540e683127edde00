"""Which kernel serves a problem: those of the table, or of the whole matrix, ranked by the model of `estimate`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..arrays import fp4
from ..errors import KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue import lower
from ..generator.families import gemm_few_sm90
from ..generator.families.base import DEFAULT
from ..generator.key import KernelKey
from ..generator.matrix import cells, preset_of, shared_memory, supports, with_epilogue
from ..generator.rules import FEW, gemm_types, supports_layouts, supports_tree
from . import devices, estimate, table
from .devices import Device
from .problem import Batches, GemmProblem, Variant, collapse_batches, variants
from .table import KernelInfo


@dataclass(frozen=True)
class Choice:
    """A kernel for a problem, how the problem is put to it, and the launch options.

    `info` is the kernel's row of the table, or None where it has to be compiled at run time.
    """

    key: KernelKey
    info: KernelInfo | None
    variant: Variant
    batches: Batches
    seconds: float
    split_k: int
    swizzle: int
    raster: int


def eligible(key: KernelKey, problem: GemmProblem, variant: Variant) -> bool:
    """Whether a kernel computes this variant of the problem: types, layouts and alignments."""
    first, second = (problem.b, problem.a) if variant.exchanged else (problem.a, problem.b)
    return (
        key.op == "gemm"
        and key.a is first.dtype
        and key.b is second.dtype
        and key.d is problem.d.dtype
        # Fast accumulation is allowed, not asked for.
        and (key.math == problem.math or (problem.math == "fast" and key.math == "default"))
        and key.epilogue in _epilogues(problem.epilogue, exchanged=variant.exchanged)
        and key.scale_granularity == problem.scale_granularity
        and key.scale_type == problem.scale_type
        # Blocks of fp8 are not alike for A and B: they cannot change places.
        and not (variant.exchanged and problem.scale_granularity[0] != problem.scale_granularity[1])
        and key.layout_a == variant.layout_a
        and key.layout_b == variant.layout_b
        and variant.align_a % key.align_a == 0
        and variant.align_b % key.align_b == 0
        and variant.align_d % key.align_d == 0
        and (key.mainloop != FEW or gemm_few_sm90.serves(key, variant.m, variant.n))
    )


def _epilogues(epilogue: str, *, exchanged: bool) -> tuple[str, ...]:
    """The ids of kernels' epilogues that serve a problem's."""
    base, program = lower.split(epilogue)
    if program and exchanged:
        turned = None if lower.is_gated(epilogue) else _exchanged(program)
        return () if turned is None else (lower.epilogue_id(base, turned),)
    # Without scales a scaled epilogue is the linear one.
    return (epilogue, lower.SCALED) if epilogue == lower.LINEAR else (epilogue,)


@functools.cache
def _exchanged(program: str) -> str | None:
    """The tree of D^T, None where it cannot be had."""
    try:
        return lower.exchanged(program)
    except ValueError:
        return None


def split_choices(key: KernelKey, variant: Variant) -> tuple[int, ...]:
    """The slices of K that a kernel may be run with.

    The sm80 generation adds the slices up in D itself, one after the other: with a D narrower than the accumulator that
    would round at every step, and batches already use the grid dimension that the slices would need.
    """
    if key.generation != "sm80" or variant.batch > 1 or key.d.bits < key.acc.bits or key.epilogue != "lc":
        return (1,)
    return tuple(s for s in (1, 2, 4, 8, 16) if s == 1 or variant.k >= s * 8 * key.tile[2])


def rank(problem: GemmProblem, device: Device, arch: SmArch | None = None) -> list[Choice]:
    """Every kernel of the table that can serve the problem on the device, best first.

    Args:
        problem: what to compute.
        device: where.
        arch: keep to cells of this arch; None takes cells of any arch that run there, native ones before others.

    Raises:
        InvalidOperandError, UnsupportedError: an operand no kernel can read.
    """
    batches = collapse_batches(problem)
    possible = list(variants(problem, batches))
    found = []
    for info in table.kernels():
        if arch is not None and info.key.arch is not arch:
            continue
        way = devices.rank_arch(info.key.arch, device, ptx=info.ptx, cuda_version=info.cuda_version)
        if way is None:
            continue
        found += [
            (way, dataclasses.replace(choice, info=info))
            for choice in _choices(info.key, info.shared_bytes, possible, batches, problem, device)
        ]
    # Native cells first: a translated cell costs a compilation in the driver at its first launch.
    found.sort(key=lambda pair: (pair[0], pair[1].seconds, pair[1].key.name))
    return [choice for _, choice in found]


def _choices(
    key: KernelKey,
    shared_bytes: int,
    possible: Sequence[Variant],
    batches: Batches,
    problem: GemmProblem,
    device: Device,
) -> Iterator[Choice]:
    """The ways in which a kernel can serve a problem."""
    if shared_bytes > device.shared_memory:
        return
    for variant in possible:
        if eligible(key, problem, variant):
            best = min(
                (estimate.launch(key, variant, device, shared_bytes, slices) for slices in split_choices(key, variant)),
                key=lambda one: (one.seconds, one.split_k),
            )
            yield Choice(key, None, variant, batches, best.seconds, best.split_k, best.swizzle, best.raster)


def best_cell(problem: GemmProblem, device: Device, arch: SmArch | None = None) -> Choice | None:
    """The matrix's best cell for a problem, whether or not it is built; None when no cell serves it.

    Args:
        problem: what to compute.
        device: where.
        arch: the compile target; None is the device's own.

    Raises:
        InvalidOperandError, UnsupportedError: an operand no kernel can read, or a GPU that has no target.
    """
    batches = collapse_batches(problem)
    possible = list(variants(problem, batches))
    target = require_target(device, arch, lambda key: any(eligible(key, problem, variant) for variant in possible))
    if devices.rank_arch(target, device, ptx=True) is None:
        return None
    found = [
        choice
        for key in _candidates(target, problem)
        for choice in _choices(key, shared_memory(key), possible, batches, problem, device)
    ]
    return min(found, key=lambda choice: (choice.seconds, choice.key.name), default=None)


def serving(problem: GemmProblem, possible: Sequence[Variant], arch: SmArch) -> Iterator[KernelKey]:
    """The matrix's keys for an arch that serve the problem, whether or not they are built."""
    return (key for key in _candidates(arch, problem) if any(eligible(key, problem, variant) for variant in possible))


def choice_of(key: KernelKey, problem: GemmProblem, device: Device) -> Choice:
    """The choice of one key, of the matrix or not, for a problem.

    Raises:
        UnsupportedError: the key is no kernel's, or cannot serve the problem.
        InvalidOperandError: an operand no kernel can read.
    """
    status = supports(key)
    if not status:
        raise UnsupportedError(status.reason)
    batches = collapse_batches(problem)
    found = list(_choices(key, shared_memory(key), list(variants(problem, batches)), batches, problem, device))
    if not found:
        raise UnsupportedError(f"{key.name} cannot serve this problem: types, layouts or alignments differ")
    return min(found, key=lambda choice: choice.seconds)


@functools.cache
def _matrix(arch: SmArch) -> tuple[KernelKey, ...]:
    return tuple(key for _, key in cells([arch]) if supports(key))


def _candidates(arch: SmArch, problem: GemmProblem) -> tuple[KernelKey, ...]:
    """The matrix's keys for a problem: its cells, which take over the problem's epilogue where that is a tree."""
    _, program = lower.split(problem.epilogue)
    if not program:
        return _matrix(arch)
    return _with_tree(arch, problem.epilogue, problem.a.dtype, problem.b.dtype, problem.d.dtype)


@functools.lru_cache(256)
def _with_tree(arch: SmArch, epilogue: str, a: CutlassDtype, b: CutlassDtype, d: CutlassDtype) -> tuple[KernelKey, ...]:
    epilogues = {*_epilogues(epilogue, exchanged=False), *_epilogues(epilogue, exchanged=True)}
    made = dict.fromkeys(
        with_epilogue(key, one, d)
        for key in _matrix(arch)
        if key.op == "gemm" and {key.a, key.b} == {a, b}
        for one in sorted(epilogues)
    )
    return tuple(key for key in made if supports(key))


def choose(
    problem: GemmProblem,
    device: Device,
    arch: SmArch | None = None,
    *,
    backend: str = "prebuilt",
    compiling: bool = True,
) -> Choice:
    """The kernel for the problem.

    Args:
        problem: what to compute.
        device: where.
        arch: keep to cells of this arch.
        backend: `prebuilt`: the table's best; `jit`: the matrix's best; `auto`: the table's best, or the matrix's best
            where the table has none.
        compiling: whether a kernel may be compiled at all.

    Raises:
        UnsupportedError: no kernel of the matrix could ever serve it; the reason says what would cure it.
        KernelNotFoundError: one could, but this installation lacks it; names the cell and the knob that adds it.
        InvalidOperandError: an operand no kernel can read.
    """
    ranked = [] if backend == "jit" else rank(problem, device, arch)
    if ranked:
        return ranked[0]
    best = best_cell(problem, device, arch) if compiling and backend != "prebuilt" else None
    if best is None:
        raise missing(problem, device, arch)
    return best


def missing(problem: GemmProblem, device: Device, arch: SmArch | None) -> UnsupportedError | KernelNotFoundError:
    """The error that explains why the table has no kernel for the problem."""
    base, program = lower.split(problem.epilogue)
    types = gemm_types(problem.a.dtype, problem.b.dtype, problem.d.dtype, problem.math, tree=bool(program))
    if not types:
        return UnsupportedError(types.reason)
    target = arch or devices.require_arch(device)
    possible = list(variants(problem, collapse_batches(problem)))
    if not possible:
        return UnsupportedError(
            "c and out have different layouts, and kernels read one as they write the other: copy c"
        )
    for variant in possible:
        layouts = supports_layouts("sm80", problem.a.dtype, variant.layout_a, variant.layout_b)
        if layouts:
            break
    wanted = nearest_key(problem, possible, target, device)
    if wanted is None:
        of_fp4 = fp4.refusal(problem, possible, target) if problem.a.dtype is fp4.FP4 else ""
        reason = (
            of_fp4
            or _tree_refusal(problem, possible)
            or layouts.reason
            or (
                "its alignment or layout is in no cell"
                if base == lower.LINEAR and not problem.scale_type
                else "no cell has scales on the device for these types, layouts and alignments"
            )
        )
        return UnsupportedError(f"no kernel of the matrix serves this problem on {target.value}: {reason}")
    nearest = nearest_built(wanted)
    differs = f"; the nearest there is {nearest[0]}, which differs in {', '.join(nearest[1])}" if nearest else ""
    passed_over = too_new(device, arch, lambda key: any(eligible(key, problem, variant) for variant in possible))
    passed_over = f"; {passed_over}" if passed_over else ""
    return KernelNotFoundError(
        f"no kernel in the table serves {problem.a.dtype.value} ({problem.math}) -> {problem.d.dtype.value}, layouts "
        f"{wanted.layout_a}{wanted.layout_b}{wanted.layout_d}, on {target.value}; {wanted.name} would: {cure(wanted)}"
        f"{differs}{passed_over}"
    )


def too_new(device: Device, arch: SmArch | None, serves: Callable[[KernelKey], bool]) -> str:
    """Which kernels of the table only the driver's age keeps from serving; empty where there are none.

    Args:
        device: where.
        arch: of cells of this arch; None of any.
        serves: whether a kernel computes what is asked for.
    """
    found = [
        info
        for info in table.kernels()
        if info.ptx
        and not devices.translates(device, info.cuda_version)
        and (arch is None or info.key.arch is arch)
        and devices.rank_arch(info.key.arch, device, ptx=True) == devices.TRANSLATED
        and info.shared_bytes <= device.shared_memory
        and serves(info.key)
    ]
    if not found:
        return ""
    return (
        f"{found[0].name} is there as PTX of {devices.cuda_name(found[0].cuda_version)}, which this driver "
        f"({devices.cuda_name(device.cuda_version)}) does not translate: update the driver, or build with that CUDA"
    )


def require_target(device: Device, arch: SmArch | None, serves: Callable[[KernelKey], bool]) -> SmArch:
    """The compile target: the one that is asked for, else the device's own. Arguments are those of `too_new`.

    Raises:
        UnsupportedError: the package has no target for such GPUs; says so too where only the driver's age keeps PTX
            from serving.
    """
    if arch is not None:
        return arch
    try:
        return devices.require_arch(device)
    except UnsupportedError as error:
        passed_over = too_new(device, arch, serves)
        raise UnsupportedError(f"{error}; {passed_over}" if passed_over else str(error)) from None


def _tree_refusal(problem: GemmProblem, possible: Sequence[Variant]) -> str:
    """Why no kernel takes the problem's tree, wherever A, B and D lie as it wants them; empty if that is not known."""
    program = lower.split(problem.epilogue)[1]
    if not program:
        return ""
    if all(variant.exchanged for variant in possible):
        try:
            lower.exchanged(program)
        except ValueError as error:
            return str(error)
    return supports_tree(program, problem.acc, problem.d.dtype).reason


def cure(key: KernelKey) -> str:
    """How a kernel that the table lacks is had."""
    preset = preset_of(key)
    if preset is None:
        return "it is in no preset: let it be compiled at run time (jit='auto')"
    return f"it is in preset {preset}; build with {knob(key)}"


def knob(key: KernelKey) -> str:
    """The build setting that adds a key to the table."""
    return f"CMAKE_ARGS='-DATOMR_CUTLASS_PRESET={preset_of(key)} -DATOMR_CUTLASS_ARCHS={key.arch.target}'"


def nearest_built(wanted: KernelKey) -> tuple[str, tuple[str, ...]] | None:
    """The kernel of the table that differs from a key in the fewest fields, and those fields."""
    names = [field.name for field in dataclasses.fields(KernelKey)]
    found = [
        (info.name, tuple(name for name in names if getattr(wanted, name) != getattr(info.key, name)))
        for info in table.kernels(op=wanted.op)
    ]
    return min(found, key=lambda one: (len(one[1]), one[0]), default=None)


def nearest_key(problem: GemmProblem, possible: Sequence[Variant], arch: SmArch, device: Device) -> KernelKey | None:
    """The matrix's best cell for the problem on an arch, whether or not it is built; `default` goes before `full`."""
    of_tree = bool(lower.split(problem.epilogue)[1])
    keys = ((DEFAULT, key) for key in _candidates(arch, problem)) if of_tree else cells([arch])
    found = [
        (max(tier, DEFAULT), estimate.seconds(key, variant, device, shared_memory(key)), key.name, key)
        for tier, key in keys
        for variant in possible
        if eligible(key, problem, variant)
    ]
    return min(found)[3] if found else None
