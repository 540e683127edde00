"""The cost of building a cell, as builds measured it: `costs.json`, which `tools/build_pack.py --costs` writes.

A cell is compiled in a unit with others (`emit`), and has an even share of the unit's cost. For a cell that was not
measured, the mean of similar ones counts: those of its template, with a tree or without, of its arch if there are any,
else of any arch.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .archs import SmArch
from .epilogue.lower import has_tree
from .key import KernelKey
from .matrix import cells, family

FILE = Path(__file__).parent / "costs.json"


@dataclass(frozen=True)
class Cost:
    """The measured cost of compiling one cell.

    Attributes:
        seconds: that one processor worked, of the machine that `costs.json` describes.
        size: bytes of GPU code, compressed as it is linked.
    """

    seconds: float
    size: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.size / 1e3:.1f} kB"


@functools.cache
def costs() -> dict[str, Cost]:
    """The costs of the cells that were measured, by their names."""
    measured = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    return {name: Cost(float(seconds), size) for name, (seconds, size) in measured.items()}


def total(keys: Sequence[KernelKey]) -> str:
    """The summed cost of cells, with the number of those that were not measured."""
    sums = _sum(cost_of(key) for key in keys)
    unknown = sum(key.name not in costs() for key in keys)
    return f"{sums}" + (f", of which {unknown} as cells like them" if unknown else "")


def shown(key: KernelKey) -> str:
    """The cost of a cell for listings, with `about` if it was not measured."""
    return f"{'' if key.name in costs() else 'about '}{cost_of(key)}"


def cost_of(key: KernelKey) -> Cost:
    """The cost of a cell; of one that was not measured, the mean of the cells most like it."""
    if key.name in costs():
        return costs()[key.name]
    return next((_likely()[kind] for kind in _kinds(key) if kind in _likely()), Cost(0.0, 0))


def _sum(some: Iterable[Cost]) -> Cost:
    found = list(some)
    return Cost(sum(cost.seconds for cost in found), sum(cost.size for cost in found))


def _kinds(key: KernelKey) -> tuple[tuple[object, ...], ...]:
    template = family(key).template
    return ((template, has_tree(key.epilogue), key.arch), (template, key.arch), (template, has_tree(key.epilogue)), ())


@functools.cache
def _likely() -> dict[tuple[object, ...], Cost]:
    """The mean cost of the measured cells of each kind."""
    from statistics import mean  # loads decimal, fractions and random, which importing the package need not

    known = costs()
    found: dict[tuple[object, ...], list[Cost]] = defaultdict(list)
    for _, key in cells(SmArch):
        if key.name in known:
            for kind in _kinds(key):
                found[kind].append(known[key.name])
    return {
        kind: Cost(mean(c.seconds for c in some), round(mean(c.size for c in some))) for kind, some in found.items()
    }
