"""Fits constants of the model of `pipeline.estimate` to recorded sweeps, and says what they are worth on other shapes.

    python benchmarks/fit_estimate.py benchmarks/results/2026-11-22-h200-{tiles,schedules}.json

A sweep has `kernels`, names, and a row for each problem: `seed`, `shape`, `layouts`, and `cells`, lists of a kernel's
place among the names, swizzle, raster order and microseconds. What is minimized is how much longer the kernel that the
model chooses takes, with the options that it chooses, than the best of its row, and a little of how far its estimates
are off. Rows of even seeds are fitted to; the others show what that is worth elsewhere. Coordinate descent over the
constants' logarithms: the same sweeps give the same constants. Nothing is launched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.key import COLUMN, KernelKey
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.pipeline import estimate
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.problem import GemmFormulation, GemmProblem, MatrixSpec

DEVICE = Device(0, "NVIDIA H200", (9, 0), 132, SmArch.SM90A.shared_memory, 60 << 20, 140 << 30)
CONSTANTS = (
    "L2_BYTES_PER_CLOCK",
    "PORT_BYTES_PER_CLOCK",
    "STEP_CLOCKS",
    "WIDE_CLUSTER_STEP_CLOCKS",
    "COOPERATIVE_TILE_SECONDS",
    "PINGPONG_TILE_SECONDS",
    "PROLOGUE_SECONDS",
    "STORE_BYTES_PER_SECOND",
    "SHOWN",
    "SHOWN_ALONE",
    "MISSED",
    "LAST_WAVE",
    "CLUSTER_SECONDS",
    "ONE_WARPGROUP_EFFICIENCY",
    "FEW_LAUNCH_SECONDS",
    "STREAM_K_SECONDS",
    "FIXUP_SECONDS",
    "PEER_SECONDS",
    "SPLIT_LAUNCH_SECONDS",
    "SPLIT_STEP",
    "SPLIT_PART_SECONDS",
)
ERROR_SHARE = 0.1
"""Of the mean error of the estimates, in what is minimized."""
STEPS = (1.3, 1.1, 1.04)
NEAR = 1.5
"""Times the best of a row: what takes longer does not count for the error."""


Timings: TypeAlias = "dict[tuple[int, int], float]"
"""Seconds by swizzle and raster order."""


@dataclass(frozen=True)
class Row:
    """A problem of a sweep: the kernels that serve it, and the seconds that each took."""

    seed: int
    kernels: tuple[tuple[KernelKey, GemmFormulation, Timings], ...]


def read(path: Path, keys: dict[str, KernelKey]) -> list[Row]:
    """The rows of a sweep; kernels of which `keys` knows no key are passed over."""
    rows = []
    recorded = json.loads(path.read_text())
    for row in recorded["rows"]:
        timings: dict[str, Timings] = {}
        for index, swizzle, raster, microseconds in row["cells"]:
            timings.setdefault(recorded["kernels"][index], {})[swizzle, raster] = microseconds * 1e-6
        m, n, k = row["shape"]
        search = GemmSearch(problem(m, n, k, row["layouts"]), DEVICE)
        found = tuple(
            (keys[name], formulation, of_kernel)
            for name, of_kernel in timings.items()
            if name in keys
            for formulation in search.formulations[-1]
            if search.supports(keys[name], formulation)
        )
        rows.append(Row(row["seed"], found))
    return rows


def problem(m: int, n: int, k: int, layouts: str) -> GemmProblem:
    """A bf16 GEMM of contiguous operands."""

    def spec(rows: int, columns: int, layout: str) -> MatrixSpec:
        strides = (1, rows) if layout == COLUMN else (columns, 1)
        return MatrixSpec((rows, columns), strides, CutlassDtype.BF16)

    return GemmProblem(spec(m, k, layouts[0]), spec(k, n, layouts[1]), None, spec(m, n, "r"), "default", 0)


@dataclass(frozen=True)
class Score:
    """The score of a model on some rows: mean and 95th percentile of the regret, and the estimates' mean error."""

    regret: float
    regret_p95: float
    error: float

    @property
    def cost(self) -> float:
        """The objective of the fit, which is minimized."""
        return self.regret + ERROR_SHARE * self.error


def score(rows: Sequence[Row]) -> Score:
    """The score of the model as it stands."""
    regrets, errors = [], []
    for row in rows:
        best = min(min(timings.values()) for *_, timings in row.kernels)
        estimates = []
        for key, formulation, timings in row.kernels:
            launch = estimate.launch(key, formulation.extents, DEVICE, DEVICE.shared_memory)
            taken = timings.get((launch.swizzle, launch.raster))
            # What was not measured: the same without a swizzle, or the least.
            taken = taken or timings.get((1, launch.raster)) or min(timings.values())
            estimates.append((launch.seconds, taken))
        regrets.append(math.log(min(estimates)[1] / best))
        errors += [abs(math.log(guess / seconds)) for guess, seconds in estimates if seconds < NEAR * best]
    ordered = sorted(regrets)
    return Score(statistics.mean(regrets), ordered[int(0.95 * (len(ordered) - 1))], statistics.mean(errors))


class Model:
    """The constants as numbers in a list: those of CONSTANTS, then TILE_N_EFFICIENCY by width."""

    def __init__(self) -> None:
        self.widths = tuple(estimate.TILE_N_EFFICIENCY)

    def get(self) -> list[float]:
        """The model's constants."""
        return [*(getattr(estimate, name) for name in CONSTANTS), *estimate.TILE_N_EFFICIENCY.values()]

    def put(self, values: Sequence[float]) -> None:
        """Makes them those of the model."""
        for name, value in zip(CONSTANTS, values, strict=False):
            setattr(estimate, name, value)
        estimate.TILE_N_EFFICIENCY.update(zip(self.widths, values[len(CONSTANTS) :], strict=True))
        estimate.model = estimate.model_now()

    def named(self) -> dict[str, Any]:
        """The constants by name."""
        rounded = [float(f"{value:.3g}") for value in self.get()]
        named: dict[str, Any] = dict(zip(CONSTANTS, rounded, strict=False))
        return named | {"TILE_N_EFFICIENCY": dict(zip(self.widths, rounded[len(CONSTANTS) :], strict=True))}


def fit(rows: Sequence[Row], rounds: int) -> None:
    """Changes the model's constants, one after the other, as long as that lowers the cost."""
    model = Model()
    values, best = model.get(), score(rows).cost
    for number in range(rounds):
        step = STEPS[min(number * len(STEPS) // rounds, len(STEPS) - 1)]
        for index, factor in itertools.product(range(len(values)), (step, 1 / step)):
            tried = [*values[:index], values[index] * factor, *values[index + 1 :]]
            model.put(tried)
            cost = score(rows).cost
            if cost < best - 1e-6:
                values, best = tried, cost
        model.put(values)
        print(f"round {number}: {best:.4f}", flush=True)


def main() -> int:
    """Fits and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", type=Path, nargs="+", help="JSON files with sweeps")
    parser.add_argument("--rounds", type=int, default=6, help="0 only says what the model is worth")
    arguments = parser.parse_args()
    from atomr_cutlass.generator.matrix import cells

    keys = {key.name: key for _, key in cells([SmArch.SM90A])}
    rows = [row for path in arguments.sweeps for row in read(path, keys)]
    rows = [row for row in rows if row.kernels]
    fitted, others = ([row for row in rows if row.seed % 2 == odd] for odd in (0, 1))
    for when in ("before", "after"):
        print(when, "on the rows fitted to:", score(fitted), "on the others:", score(others))
        if when == "before":
            fit(fitted, arguments.rounds)
    print(json.dumps(Model().named(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
