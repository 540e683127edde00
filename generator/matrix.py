"""The matrix: the kernels that exist, their presets, and the reasons against all others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

from . import trees
from .archs import SmArch
from .dtypes import CutlassDtype
from .epilogue.lower import is_gated
from .errors import expect
from .families import FAMILIES
from .families.base import DEFAULT, FULL, ON_DEMAND, SMOKE, Cell, Family
from .key import COLUMN, ROW, KernelKey
from .rules import FEW, Status, is_fallback, no, serves_usual_case

PRESETS = ("none", "smoke", "default", "full")
OPS = tuple(dict.fromkeys(op for op, _ in FAMILIES))
TIERS = {"none": 0, "smoke": SMOKE, "default": DEFAULT, "full": FULL}


def families() -> Iterator[Family]:
    """Every family."""
    return itertools.chain.from_iterable(FAMILIES.values())


def archs_of(op: str) -> tuple[SmArch, ...]:
    """The compile targets that some family of an op has cells for, oldest first."""
    return tuple(arch for arch in SmArch if any(arch in f.archs for f in families() if f.op == op))


ARCHS = {op: archs_of(op) for op in OPS}
"""The compile targets of each op."""


def family(key: KernelKey) -> Family:
    """The family of a key that `supports` accepts."""
    first, *others = FAMILIES[key.op, key.generation]
    return next((other for other in others if key.mainloop in other.mainloops), first)


def arguments_of(key: KernelKey) -> str:
    """The operation whose arguments (kernel_abi.h) a kernel takes."""
    return family(key).arguments or key.op


def with_epilogue(key: KernelKey, epilogue: str, d: CutlassDtype) -> KernelKey:
    """The key of a cell with another epilogue, and another element type of D; `supports` says whether it compiles."""
    if is_gated(epilogue) and key.generation == "sm90" and key.mainloop != FEW:
        return dataclasses.replace(key, epilogue=epilogue, d=d, epilogue_schedule="nosmem", align_d=1)
    if d is key.d:
        return dataclasses.replace(key, epilogue=epilogue)
    # The same alignment in bytes; epilogues of the sm80 generation handle at most 8 elements at once.
    most = 8 if key.generation == "sm80" else 16
    align = 1 if key.align_d == 1 else min(most, key.align_d * key.d.bits // d.bits)
    return dataclasses.replace(key, epilogue=epilogue, d=d, align_d=align)


def is_supported_for(dtype: CutlassDtype, arch: SmArch) -> bool:
    """Whether some kernel in the matrix multiplies operands of this dtype on this arch.

    Raises:
        InvalidOperandError: an argument of another kind.
    """
    expect(dtype, CutlassDtype, "dtype")
    expect(arch, SmArch, "arch")
    return _is_supported_for(dtype, arch)


@functools.cache
def _is_supported_for(dtype: CutlassDtype, arch: SmArch) -> bool:
    storage = dtype.storage
    return any(
        key.a is storage and (dtype is not CutlassDtype.TF32 or key.math == "tf32")
        for _, key in cells([arch])
        if not key.is_elementwise
    )


def is_fp8_supported(arch: SmArch) -> bool:
    """Whether some kernel in the matrix multiplies fp8 on this arch."""
    return is_supported_for(CutlassDtype.F8E4M3, arch)


def is_fp4_supported(arch: SmArch) -> bool:
    """Whether some kernel in the matrix multiplies fp4 on this arch."""
    return is_supported_for(CutlassDtype.F4E2M1, arch)


def supports(key: KernelKey) -> Status:
    """Whether CUTLASS has a kernel for this key that compiles without spilling, else the reason."""
    if key.op not in OPS:
        return no(f"unknown op {key.op!r}; valid: {', '.join(OPS)}")
    generations = [generation for op, generation in FAMILIES if op == key.op]
    if key.generation not in generations:
        return no(f"unknown generation {key.generation!r} of {key.op}; valid: {', '.join(generations)}")
    if key.arch not in family(key).archs:
        return no(f"{key.generation} kernels of {key.op} do not compile for {key.arch.value}")
    for name, layout in (("A", key.layout_a), ("B", key.layout_b), ("D", key.layout_d)):
        if layout not in (ROW, COLUMN):
            return no(f"unknown layout {layout!r} of {name}; valid: {ROW} (row-major), {COLUMN} (column-major)")
    if min(*key.tile, *key.cluster) < 1 or min(*key.warps, key.stages, key.swizzle) < 0:
        return no(
            "tiles and clusters are at least 1 along each dimension; warps, stages and the swizzle are not negative"
        )
    for name, align in (("A", key.align_a), ("B", key.align_b), ("D", key.align_d)):
        if align < 1 or align & (align - 1):
            return no(f"the alignment of {name} is a power of two in elements, not {align}")
    return family(key).supports(key)


def cells(archs: Iterable[SmArch]) -> Iterator[Cell]:
    """Every cell of the matrix for the archs, with its tier; unsupported combinations never appear.

    No preset has a fallback without a cell that serves the usual case, since it would serve everything slowly. Its tier
    is the larger one of its family's and that of the first such cell, which may be none.
    """
    for arch in archs:
        plain = [cell for family in families() if arch in family.archs for cell in family.cells(arch)]
        found = [*plain, *_fused(plain)]
        usual: dict[tuple[object, ...], list[Cell]] = {}
        for cell in found:
            if not is_fallback(cell[1]):
                usual.setdefault(_kind(cell[1]), []).append(cell)
        for tier, key in found:
            if is_fallback(key):
                beside = [first for first, other in usual.get(_kind(key), ()) if serves_usual_case(other, key)]
                yield max(tier, min(beside, default=ON_DEMAND)), key
            else:
                yield tier, key


def _fused(plain: list[Cell]) -> Iterator[Cell]:
    """The cells with trees for a list of cells without."""
    found: dict[KernelKey, int] = {}
    for tier, base, (epilogue, d) in trees.cells(plain):
        key = with_epilogue(base, epilogue, d)
        found[key] = min(tier, found.get(key, tier))
    yield from ((tier, key) for key, tier in found.items() if supports(key))


def with_trees(archs: Iterable[SmArch], names: Iterable[str]) -> list[KernelKey]:
    """The cells of trees that a build selects by name, whatever its preset.

    Args:
        archs: compile targets.
        names: of `trees.NAMED`, or paths of files of trees.

    Raises:
        ValueError: a name is neither, or no kernel of these archs takes such a tree; says why.
    """
    archs = list(archs)
    plain = {
        arch: [cell for family in families() if arch in family.archs for cell in family.cells(arch)] for arch in archs
    }
    found: dict[KernelKey, None] = {}
    for name in names:
        reasons: dict[str, None] = {}
        before = len(found)
        for tree_on in trees.wanted([name]):
            for base in (base for arch in archs for base in trees.bases(plain[arch])):
                tree = tree_on(base)
                if tree is not None:
                    key = with_epilogue(base, *tree)
                    status = supports(key)
                    if status:
                        found.setdefault(key)
                    else:
                        reasons.setdefault(status.reason)
        if len(found) == before:
            why = f": {next(iter(reasons))}" if reasons else ""
            raise ValueError(f"no kernel for {', '.join(arch.target for arch in archs)} has the epilogue {name}{why}")
    return list(found)


def _kind(key: KernelKey) -> tuple[object, ...]:
    return (key.op, key.a, key.b, key.d, key.math)


def expand(preset: str, archs: Iterable[SmArch]) -> list[KernelKey]:
    """The keys of a preset, in the matrix's order.

    Raises:
        ValueError: an unknown preset or an arch without cells, naming the valid ones.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; valid: {', '.join(PRESETS)}")
    archs = list(archs)
    with_cells = [arch for arch in SmArch if any(arch in family.archs for family in families())]
    for arch in archs:
        if arch not in with_cells:
            valid = ", ".join(a.target for a in with_cells)
            raise ValueError(f"no cells for arch {arch.target!r} yet; valid: {valid}")
    tier = TIERS[preset]
    return list(dict.fromkeys(key for first, key in cells(archs) if first <= tier))


@functools.cache
def _tiers(arch: SmArch) -> dict[KernelKey, int]:
    found: dict[KernelKey, int] = {}
    for tier, key in cells([arch]):
        found.setdefault(key, tier)
    return found


def preset_of(key: KernelKey) -> str | None:
    """The smallest preset that holds the key, or None when only run-time compilation reaches it."""
    tier = _tiers(key.arch).get(key, ON_DEMAND)
    return None if tier == ON_DEMAND else PRESETS[tier]
