"""The presets that serve the usual epilogue trees, by operands and archs, and the reasons if none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import trees
from .archs import SmArch
from .dtypes import CutlassDtype
from .epilogue.common import COMMON_ACTIVATIONS, common_of, wider
from .epilogue.lower import LINEAR, SCALED, SCALED_COMMON, has_tree
from .families.base import ON_DEMAND
from .key import KernelKey
from .matrix import PRESETS, TIERS, cells, supports, with_epilogue
from .rules import COMMON_LAYOUTS, FP8_TYPES

D = CutlassDtype

TREES = (
    *("bias", *(f"bias_{name}" for name in COMMON_ACTIVATIONS if name), *filter(None, COMMON_ACTIVATIONS)),
    *("residual", "gated_silu", "gated_gelu", "row_scale", "row_column_scale", "quantize", "narrow"),
)
"""The commonly used ones of trees.NAMED."""

TYPES = (D.F16, D.BF16, D.F8E4M3)

COMPILED = "in no preset: compiled at first use"


class Served(NamedTuple):
    """The smallest preset whose kernels serve a tree.

    Attributes:
        op: operation.
        tree: one of TREES.
        a: element type of A and B.
        layouts: those of A and B; empty of convolutions.
        tier: of the first preset with a kernel; ON_DEMAND without one.
        reason: empty, or why no preset has one.
    """

    op: str
    tree: str
    a: CutlassDtype
    layouts: str
    tier: int
    reason: str


def served(arch: SmArch) -> Iterator[Served]:
    """The presets that serve each of TREES on aligned operands; for fp8, on those contiguous along K."""
    everything = list(cells([arch]))
    found = trees.bases([cell for cell in everything if not has_tree(cell[1].epilogue)])
    tiers: dict[tuple[object, ...], int] = {}
    for tier, key in everything:
        place = _place(key)
        tiers[place] = min(tier, tiers.get(place, tier))
    for op in trees.OPS:
        convolves = op.startswith("conv2d")
        for a in TYPES:
            for layouts in ("",) if convolves else COMMON_LAYOUTS[1:] if a in FP8_TYPES else COMMON_LAYOUTS:
                bases = [
                    key
                    for key in found
                    if key.op == op and key.a is a and (convolves or key.layout_a + key.layout_b == layouts)
                ]
                # A residual of groups is C.
                for tree in TREES if bases else ():
                    if (op, tree) == ("grouped_gemm", "residual"):
                        continue
                    yield Served(op, tree, a, layouts, *_least(bases, tree, tiers))


def left_out(preset: str, archs: Iterable[SmArch]) -> Iterator[str]:
    """Lines with the cells that no preset of the archs has, and the trees that this preset lacks."""
    for arch in archs:
        for tier, key in cells([arch]):
            if tier == ON_DEMAND and preset == PRESETS[-1]:
                yield f"left out: {key.name}: {COMPILED}"
        found: dict[tuple[str, str, str], dict[str, None]] = {}
        for cell in served(arch):
            if cell.tier > TIERS[preset]:
                why = cell.reason or f"in preset {PRESETS[cell.tier]}"
                operands = f"{cell.a.value} {cell.layouts}".strip()
                found.setdefault((cell.op, operands, why), {})[cell.tree] = None
        for (op, operands, why), names in found.items():
            yield f"left out: {op} {operands} with {', '.join(names)}: {why} ({arch.value})"


def _least(bases: list[KernelKey], tree: str, tiers: dict[tuple[object, ...], int]) -> tuple[int, str]:
    """The tier from which every math mode of the bases has the tree, and the reason if there is none."""
    found: dict[str, tuple[int, str]] = {}
    for base in bases:
        if base.epilogue == SCALED or not any(other.epilogue == SCALED for other in bases):
            key = with_epilogue(base, *trees.NAMED[tree](base))
            status = supports(key)
            serving = [key.epilogue, common_of(key.epilogue), wider(key.epilogue)]
            if key.a in FP8_TYPES and key.op == "gemm" and common_of(key.epilogue.replace(SCALED, LINEAR, 1)):
                serving.append(SCALED_COMMON)
            *place, _ = _place(key)
            least = min((tiers.get((*place, name), ON_DEMAND) for name in serving if name), default=ON_DEMAND)
            reason = "" if least < ON_DEMAND else COMPILED if status else status.reason
            found[base.math] = min(found.get(base.math, (ON_DEMAND, reason)), (least, reason), key=_order)
    return max(found.values(), key=_order)


def _order(found: tuple[int, str]) -> tuple[int, bool]:
    return found[0], found[1] != COMPILED


def _place(key: KernelKey) -> tuple[object, ...]:
    return key.op, key.a, key.b, key.d, key.math, key.layout_a, key.layout_b, key.epilogue
