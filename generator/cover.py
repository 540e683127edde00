"""Selection of cells for a build by measurement: a greedy cover of the problems of tuned choices.

A file of tuned choices is a file of keys whose lines have `tuned`: the problem, the model of GPU, the time of the
fastest kernel, and in `timings` those of others, by the digests of their keys. A problem's time with a set of cells is
that of the fastest of them. The next cell is the one that reduces the geometric mean of these times most, per byte of
its code if bytes are limited.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archs import SmArch
from .costs import costs
from .key import KernelKey
from .key_file import read
from .matrix import cells

UNSERVED = 10.0
"""The time of a problem that no cell of a set serves, as a multiple of the slowest kernel's."""

DEFAULT_BYTES = 11e3
"""The size of a cell whose code was not measured: about the mean of those that were."""


@dataclass(frozen=True)
class Budget:
    """The limits of a set.

    Attributes:
        cells: the most cells; 0 is no limit.
        megabytes: the most GPU code, compressed as it is linked; 0 is no limit.

    Raises:
        ValueError: a limit is negative.
    """

    cells: int = 0
    megabytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("cells", self.cells), ("MB", self.megabytes)):
            if not 0 <= value < math.inf:
                raise ValueError(f"a budget of {value} {name}; expected a number from 0, which is no limit")

    def __bool__(self) -> bool:
        return bool(self.cells or self.megabytes)


def choose(path: Path, archs: Sequence[SmArch], budget: Budget) -> list[KernelKey]:
    """The keys of the archs in a file of tuned choices that fit a budget, the one that saves most first.

    Raises:
        ValueError: the file cannot be read, has no tuned choice of the archs, or a malformed line; or none of its
            kernels fits the budget.
    """
    known = {key.digest: key for _, key in cells(archs)} | {key.digest: key for key in read(path) if key.arch in archs}
    problems = list(measured(path, known).values())
    if not problems:
        targets = ", ".join(arch.target for arch in archs)
        raise ValueError(f"{path} has no tuned choice for {targets}, as `atomr-cutlass tune` writes them: no budget")
    digests = dict.fromkeys(digest for times in problems for digest in times)
    took = {digest: [times.get(digest, math.inf) for times in problems] for digest in digests}
    best = [UNSERVED * max(times.values()) for times in problems]
    left = budget.megabytes * 1e6 if budget.megabytes else math.inf

    def worth(digest: str) -> float:
        """The gain of a cell in the logarithms of the times, per byte if bytes are limited."""
        saved = sum(math.log(now / of) for now, of in zip(best, took[digest], strict=True) if of < now)
        return saved / (size(known[digest]) if budget.megabytes else 1.0)

    chosen: list[KernelKey] = []
    while len(chosen) < (budget.cells or math.inf):
        found = [(-worth(digest), known[digest].name, digest) for digest in took if size(known[digest]) <= left]
        gain, _, digest = min(found, default=(0.0, "", ""))
        if gain == 0.0:
            break
        chosen.append(known[digest])
        left -= size(known[digest])
        best = [min(pair) for pair in zip(best, took.pop(digest), strict=True)]
    if not chosen:
        raise ValueError(f"{budget.megabytes} MB have room for no kernel of {path}")
    return chosen


def measured(path: Path, known: Mapping[str, KernelKey]) -> dict[tuple[str, str], dict[str, float]]:
    """The microseconds of kernels by digest, for each model of GPU and problem of a file.

    Args:
        path: the file.
        known: keys by digest; other kernels are left out, and problems without any.

    Raises:
        ValueError: malformed timings; names the line.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        values: dict[str, Any] = json.loads(text) if text.strip() else {}
        tuned = values.get("tuned")
        if not isinstance(tuned, Mapping):
            continue
        timings = tuned.get("timings", {})
        fastest = {str(values.get("name", "")).rpartition("_")[2]: tuned.get("microseconds")}
        if not isinstance(timings, Mapping):
            raise ValueError(f"{path}:{number}: timings is {json.dumps(timings)[:60]}; expected an object")  # noqa: TRY004
        place = (str(tuned.get("gpu")), json.dumps(tuned.get("problem"), sort_keys=True))
        for digest, took in (*timings.items(), *fastest.items()):
            if isinstance(took, bool) or not isinstance(took, (int, float)) or not 0 < took < math.inf:
                raise ValueError(f"{path}:{number}: {digest} took {json.dumps(took)[:60]}; expected microseconds")
            if digest in known:
                times = found.setdefault(place, {})
                times[digest] = min(took, times.get(digest, math.inf))
    return found


def size(key: KernelKey) -> float:
    """Bytes of a cell's GPU code, as a build measured it, else estimated."""
    known = costs().get(key.name)
    return float(known.size) if known else DEFAULT_BYTES
