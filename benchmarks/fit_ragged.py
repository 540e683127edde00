"""Fits the model's constants of kernels for operands that begin anywhere to timings of all their launches.

    cd benchmarks/results
    python ../fit_ragged.py 2026-11-29-h200-ragged-launches.json
    python ../fit_ragged.py --mainloop unaligned 2026-11-29-h200-unaligned-launches.json

`ragged_launches.py` writes such files. Constants that begin with the mainloop, such as RAGGED, are changed at random,
and what is better is kept: the estimate of the best width of each number of thread blocks that divide K should be its
time, and the launch with the least estimate the fastest. Prints the constants, and what the choice loses. Nothing is
launched.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fit_estimate import DEVICES

from atomr_cutlass import _core
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.families import gemm_ragged_sm80, gemm_realigned_sm90, gemm_unaligned_sm80
from atomr_cutlass.generator.key import RAGGED, REALIGNED, UNALIGNED, shared_memory
from atomr_cutlass.pipeline import estimate
from atomr_cutlass.pipeline.devices import Device

NEAR = 1.6
"""Times the fastest: estimates of slower launches do not count."""
CHANGED = 0.4
"""The share of the constants that are changed at once."""
SPREAD = 0.15
"""By how much the logarithm of a constant is changed at first; less and less later."""


CELL = {
    RAGGED: gemm_ragged_sm80.cell,
    UNALIGNED: gemm_unaligned_sm80.cell,
    REALIGNED: gemm_realigned_sm90.cell,
}
"""The key of a kernel for few rows, or for any, by arch, type and layouts."""


@dataclass(frozen=True)
class Timed:
    """A problem, and the seconds of its launches by the thread blocks that divide K, few rows of a tile, and width."""

    layouts: str
    extents: tuple[int, ...]
    device: Device
    seconds: Mapping[tuple[int, int, int], float]


def read(path: Path) -> list[Timed]:
    """The problems of a file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    device = DEVICES[found["machine"]["gpu"]]
    made = []
    for row in found["rows"]:
        m, n, k, *batch = row["shape"]
        # Files from before a launch chose the few rows of a tile have three columns, and products without a batch.
        seconds = {(split, few[0] if few else 1, width): us / 1e6 for split, *few, width, us in row["all"]}
        extents = (m, n, k, *(batch or [1]), k, k if row["layout"] == "rc" else n, 0, 0)
        made.append(Timed(row["layout"], extents, device, seconds))
    return made


def losses(
    mainloop: str, constants: Mapping[str, float], problems: Sequence[Timed]
) -> tuple[float, list[float], list[float]]:
    """What is to be small; of each problem, what the choice loses, and the logarithm of its estimate over its time."""
    model = _core.TimeModel(dict(constants))
    total, regret, errors = 0.0, [], []
    for problem in problems:
        key = CELL[mainloop](SmArch.SM90A, CutlassDtype.BF16, problem.layouts)
        kernel, least = estimate.kernel_of(key), min(problem.seconds.values())
        chosen, squares = (math.inf, 0.0), []
        for split in sorted({split for split, *_ in problem.seconds}):
            launch = model.launch(kernel, problem.extents, problem.device, shared_memory(key), split)
            taken = problem.seconds.get((split, launch.swizzle, launch.width))
            if taken is None:
                continue
            chosen = min(chosen, (launch.seconds, taken))
            if taken <= NEAR * least:
                squares.append(math.log(launch.seconds / taken) ** 2)
        if not chosen[1]:
            raise ValueError(f"no launch that the model chooses was timed: {problem.layouts}, {problem.extents}")
        lost = chosen[1] / least - 1
        regret.append(lost)
        errors.append(math.log(chosen[0] / chosen[1]))
        total += (statistics.mean(squares) if squares else 0.0) + 2 * lost**1.5 + 0.3 * lost
    return total / len(problems), regret, errors


def main() -> int:
    """Fits and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mainloop", choices=tuple(CELL), default=RAGGED, help="of the kernels")
    parser.add_argument("files", nargs="+", type=Path, help="of launches")
    parser.add_argument("--steps", type=int, default=2000, help="changes that are tried for each layout")
    arguments = parser.parse_args()
    every = [problem for path in arguments.files for problem in read(path)]
    known = estimate.model.constants
    rng = np.random.default_rng(0)
    prefix = arguments.mainloop.upper()
    # Those for few rows have constants for each layout.
    for layouts in (("rc",), ("rr",)) if arguments.mainloop == RAGGED else (("rc", "rr"),):
        problems = [problem for problem in every if problem.layouts in layouts]
        names = [name for name in known if name.startswith(f"{prefix}_")]
        if len(layouts) == 1:
            names = [name for name in names if ("_ROWS" in name) == (layouts == ("rr",))]
        best = {name: float(known[name]) for name in names}
        least = losses(arguments.mainloop, best, problems)
        for step in range(arguments.steps):
            spread = SPREAD * 0.5 ** (4 * step / arguments.steps)
            changes = rng.normal(0, spread, len(names)) * (rng.random(len(names)) < CHANGED)
            tried = {name: best[name] * math.exp(change) for name, change in zip(names, changes, strict=True)}
            found = losses(arguments.mainloop, tried, problems)
            if found[0] < least[0]:
                best, least = tried, found
        _, regret, errors = least
        worst = sorted(regret)[math.ceil(0.95 * len(regret)) - 1]
        print(
            f"{', '.join(layouts)}: {len(problems)} problems, the choice loses {statistics.mean(regret):.1%}, "
            f"{worst:.1%} at the 95th percentile; estimates are {statistics.mean(errors):+.1%} off, "
            f"{statistics.pstdev(errors):.1%} spread"
        )
        for name in names:
            print(f"CONSTANT({name}, {best[name]:.3g})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
