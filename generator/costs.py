"""The cost of building a cell, as builds measured it: `costs.json`, which `tools/build_pack.py --costs` writes.

A cell is compiled in a unit with others (`emit`), and has an even share of what the unit took.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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


def total(names: Iterable[str]) -> str:
    """The summed cost of cells, with the number of those that were not measured."""
    wanted = list(names)
    found = [costs()[name] for name in wanted if name in costs()]
    sums = Cost(sum(cost.seconds for cost in found), sum(cost.size for cost in found))
    unknown = len(wanted) - len(found)
    return f"{sums}" + (f", without {unknown} that were not measured" if unknown else "")
