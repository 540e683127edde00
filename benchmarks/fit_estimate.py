"""Fits the model's constants (estimate_constants.inc) to recorded sweeps, and says what they are worth on other shapes.

    cd benchmarks/results
    python ../fit_estimate.py *-{h200-sweep-seed{78,80},h100-sweep-seed1{5*,60,74,88,90,92,94}}.json
    python ../fit_estimate.py --leave-out *-h100-sweep-seed1*.json  # seed by seed
    python ../fit_estimate.py --constants 'FEW_*' *-{few-divisions-sent-*,sweep-seed1{88,90}}.json
    python ../fit_estimate.py --constants 'FULL_*' *-fp8-sweep-seeds156-*.json
    python ../fit_estimate.py --constants '*VECTOR_*' *-vectors-sweep-*.json

A sweep (of sweep.py) has `kernels`, names, and a row for each problem: `seed`, `shape`, `layouts`, and `cells`, lists
of a kernel's place among the names, slices of K, swizzle, raster order, width and microseconds; those of before there
was `columns` have neither slices nor width. Operands are bf16 unless it has a `dtype`. Of f32 and f64, kernels whose
names end in " divided" were timed with slices of K side by side, those of the same names without it with slices in
turns; rows of e4m3 say by `math` whether accumulation is fast. Files of divisions have `runs` instead, of kernels for
few rows: a GPU and rows with `times`, lists of thread blocks in a cluster, how many share the few rows, rows of a tile,
and microseconds.
The objective is how much longer the kernel that the model chooses takes, with the options that it chooses, than the
best of its row, some of how far its estimates are off, from one another in a row and all in all, and some of how far
the constants move from what they are. Kernels that are not in `full` are passed over. Leaving out one seed after the
other shows the worth of constants on other shapes.
Coordinate descent over the constants' logarithms: the same sweeps give the same constants. Nothing is launched.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from atomr_cutlass import _core
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED
from atomr_cutlass.generator.key import COLUMN, KernelKey, shared_memory
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import estimate
from atomr_cutlass.pipeline.devices import Device

_SHARED = SmArch.SM90A.shared_memory
DEVICES = {
    "NVIDIA H200": Device(0, "NVIDIA H200", (9, 0), 132, _SHARED, 60 << 20, 140 << 30, 4917 * 10**9),
    "NVIDIA H100 80GB HBM3": Device(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, _SHARED, 50 << 20, 80 << 30, 3352 * 10**9),
}
"""The GPUs that sweeps were made on, by the name that the driver has for them."""
CONSTANTS = (
    "L2_BYTES_PER_CLOCK",
    "PAIR_BYTES_PER_CLOCK",
    "PORT_BYTES_PER_CLOCK",
    "STREAMED",
    "STEP_CLOCKS",
    "BEYOND_CLOCKS",
    "BEYOND_N_CLOCKS",
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
    "LATE_IN_CLUSTER",
    "LATE_IN_WIDE_CLUSTER",
    "WIDE_CLUSTERS_FULL",
    "ONE_WARPGROUP_EFFICIENCY",
    "TALL_EFFICIENCY",
    "DIVIDED_SECONDS",
    "DIVIDED_ROUND_SECONDS",
    "DIVIDED_BYTES_PER_SECOND",
    "FEW_LAUNCH_SECONDS",
    "FEW_LAUNCH_ROWS_SECONDS",
    "FEW_MANY",
    "STREAM_K_SECONDS",
    "FIXUP_SECONDS",
    "PEER_SECONDS",
    "SPLIT_LAUNCH_SECONDS",
    "SPLIT_STEP",
    "SPLIT_PART_SECONDS",
)
SPREAD_SHARE, ERROR_SHARE = 0.3, 0.05
"""Of the estimates' mean error beside their row's, and of that error itself, in what is minimized."""
STORED_IN_GROUPS, SHORT_K = "2026-11-28T20", 2000
"""From this time on pingpong kernels store tiles of 128x176 in groups of columns, which makes products with K below
`SHORT_K` up to a quarter faster: older timings of these kernels with such products are left out.
"""
DIVIDED = " divided"
"""The end of a kernel's name in sweeps of kernels that divide K into slices of their own, or take turns."""
MOVED_SHARE = 0.003
"""Of the squares of the logarithms of what constants are multiplied by."""
STEPS = (1.3, 1.1, 1.04, 1.15, 1.06, 1.03)
NEAR = 1.5
"""Times the best of a row: what takes longer does not count for the error."""


Timings: TypeAlias = "dict[tuple[int, int, int, int], float]"
"""Seconds by slices of K, swizzle, raster order and width."""


@dataclass(frozen=True)
class Row:
    """A problem of a sweep: its formulations, the kernels that serve it, and the time of each."""

    group: str
    seed: int
    shape: tuple[int, ...]
    dtype: str
    device: Device
    extents: list[estimate.Extents]
    entries: list[tuple[int, _core.ModelKernel, int, list[int]]]
    timings: list[Timings]


def read(path: Path, keys: dict[str, KernelKey]) -> list[Row]:
    """The rows of a sweep or of divisions; kernels of which `keys` knows no key are passed over."""
    recorded = json.loads(path.read_text())
    if "runs" in recorded:
        return [row for run in recorded["runs"] for row in _rows(_divisions(run, path.stem[-2:], keys), keys)]
    return _rows(recorded, keys)


def _divisions(run: dict[str, Any], layouts: str, keys: dict[str, KernelKey]) -> dict[str, Any]:
    """Divisions of few rows as the rows of a sweep: the launch's swizzle and width are the share and the height."""
    kernels = [
        name for name, key in keys.items()
        if key.mainloop == FEW and key.a is CutlassDtype.BF16 and key.layout_a + key.layout_b == layouts
    ]  # fmt: skip
    places = {keys[name].cluster[2]: place for place, name in enumerate(kernels)}

    def cells(times: list[list[Any]]) -> list[list[Any]]:
        return [[places[ranks], 1, share, 0, height, us] for ranks, share, height, us in times if ranks in places]

    same = {"group": "few rows", "layouts": layouts}
    rows = [{**same, "seed": row["seed"], "shape": row["shape"], "cells": cells(row["times"])} for row in run["rows"]]
    return {"machine": run["machine"], "kernels": kernels, "columns": [], "rows": rows}


def _rows(recorded: dict[str, Any], keys: dict[str, KernelKey]) -> list[Row]:
    rows = []
    device = DEVICES[recorded["machine"]["gpu"]]
    before = recorded.get("date", "") < STORED_IN_GROUPS
    for row in recorded["rows"]:
        timings: dict[str, Timings] = {}
        for index, *options, microseconds in (cell[:6] for cell in row["cells"]):
            launch = tuple(options) if "columns" in recorded else (1, *options, 0)
            # A matrix of one row may be copied and need not: the same kernel with the same options, timed twice.
            of_kernel = timings.setdefault(recorded["kernels"][index], {})
            of_kernel[launch] = min(of_kernel.get(launch, math.inf), microseconds * 1e-6)
        m, n, k = row["shape"]
        dtype = recorded.get("dtype", "bf16")
        product = problem(m, n, k, row["layouts"], dtype, row.get("math", "default"))
        search = GemmSearch(product, device)
        group = search.formulations[-1]
        found = []
        for name, of_kernel in timings.items():
            key = keys.get(name.removesuffix(DIVIDED))
            if key and before and k < SHORT_K and _stores_by_sixteen(key, of_kernel):
                continue
            places = [place for place, put in enumerate(group) if key and search.supports(key, put)]
            if key and key.d is product.d.dtype:  # one kernel may do both, and its name says which
                places = [place for place in places if group[place].divided == name.endswith(DIVIDED)]
            if key and places:
                found.append(((0, estimate.kernel_of(key), shared_memory(key), places), of_kernel))
        if found:
            entries, times = map(list, zip(*found, strict=True))
            extents = [put.extents for put in group]
            rows.append(Row(row["group"], row["seed"], (m, n, k), dtype, device, extents, entries, times))
    return rows


def _stores_by_sixteen(key: KernelKey, timings: Timings) -> bool:
    widths = {width or key.tile[1] for *_, width in timings}
    return key.mainloop == "pingpong" and key.tile[0] == 128 and 176 in widths


def problem(m: int, n: int, k: int, layouts: str, dtype: str, math_mode: str) -> GemmProblem:
    """A GEMM of contiguous operands; of e4m3 with scales, into bf16."""
    element = CutlassDtype(dtype)
    is_scaled = element is CutlassDtype.F8E4M3
    result = CutlassDtype.BF16 if is_scaled else element

    def spec(rows: int, columns: int, layout: str, of: CutlassDtype = element) -> MatrixSpec:
        return MatrixSpec((rows, columns), (1, rows) if layout == COLUMN else (columns, 1), of)

    operands = spec(m, k, layouts[0]), spec(k, n, layouts[1])
    math_mode = "ieee" if element is CutlassDtype.F32 else math_mode
    epilogue = SCALED if is_scaled else LINEAR
    return GemmProblem(*operands, None, spec(m, n, "r", result), math_mode, 0, epilogue)


@dataclass(frozen=True)
class Score:
    """The score of a model on some rows: mean and 95th percentile of the regret, and the estimates' mean errors."""

    regret: float
    regret_p95: float
    spread: float
    error: float

    @property
    def cost(self) -> float:
        """The objective of the fit, which is minimized."""
        return self.regret + SPREAD_SHARE * self.spread + ERROR_SHARE * self.error

    def __str__(self) -> str:
        return (
            f"regret {self.regret:.2%}, 95th percentile {self.regret_p95:.1%}; estimates are off by {self.error:.1%}, "
            f"{self.spread:.1%} from one another"
        )


def score(rows: Sequence[Row]) -> Score:
    """The score of the model as it stands."""
    regrets, errors, spreads = [], [], []
    for row in rows:
        best = min(min(timings.values()) for timings in row.timings)
        ranked = _core.Ranking(estimate.model, row.device, row.entries).every(row.extents, whole=False)
        pairs = [(seconds, taken(row.timings[entry], options)) for entry, _, (seconds, *options) in ranked]
        regrets.append(math.log(pairs[0][1] / best))
        off = [math.log(guess / time) for guess, time in pairs if time < NEAR * best]
        if off:
            mean = statistics.fmean(off)
            errors += map(abs, off)
            spreads += [abs(error - mean) for error in off]
    ordered = sorted(regrets)
    p95 = ordered[int(0.95 * (len(ordered) - 1))]
    return Score(statistics.fmean(regrets), p95, statistics.fmean(spreads), statistics.fmean(errors))


def taken(timings: Timings, options: Sequence[int]) -> float:
    """Seconds of a launch; of one that was not measured those of the nearest: as many slices, and as wide."""
    split_k, swizzle, raster, width = options
    if (found := timings.get((split_k, swizzle, raster, width))) is not None:
        return found
    for alike in (
        lambda other: (other[0], other[3]) == (split_k, width),
        lambda other: other[0] == split_k,
        lambda _: True,
    ):
        if near := [seconds for other, seconds in timings.items() if alike(other)]:
            break
    return min(near)


class Model:
    """The constants that are fitted, as numbers in a list: those by name, then TILE_N_EFFICIENCY by width.

    Attributes:
        names: of the constants that are numbers; a pattern chooses others than CONSTANTS, without widths.
    """

    def __init__(self, pattern: str = "") -> None:
        constants = estimate.model.constants
        self.names = CONSTANTS
        self.widths = () if pattern else tuple(constants["TILE_N_EFFICIENCY"])
        if pattern:
            named = fnmatch.filter(constants, pattern)
            self.names = tuple(name for name in named if isinstance(constants[name], float) and constants[name] != 0)

    def get(self) -> list[float]:
        """The model's constants."""
        constants = estimate.model.constants
        return [
            *(constants[name] for name in self.names), *(constants["TILE_N_EFFICIENCY"][width] for width in self.widths)
        ]  # fmt: skip

    def put(self, values: Sequence[float]) -> None:
        """Makes them those of the model, which is then not corrected by what timings taught besides."""
        estimate.model = _core.TimeModel(self._by_name(values), corrected=False)

    def _by_name(self, values: Sequence[float]) -> dict[str, Any]:
        named: dict[str, Any] = dict(zip(self.names, values, strict=False))
        if self.widths:
            named["TILE_N_EFFICIENCY"] = dict(zip(self.widths, values[len(self.names) :], strict=True))
        return named

    def named(self) -> dict[str, Any]:
        """The constants by name."""
        return self._by_name([float(f"{value:.3g}") for value in self.get()])


def fit(model: Model, rows: Sequence[Row], rounds: int) -> None:
    """Changes the model's constants, one after the other, as long as that lowers the cost."""
    before = model.get()

    def cost(values: Sequence[float]) -> float:
        model.put(values)
        moved = sum(math.log(value / start) ** 2 for value, start in zip(values, before, strict=True))
        return score(rows).cost + MOVED_SHARE * moved

    values, best = before, cost(before)
    for number in range(rounds):
        step = STEPS[number % len(STEPS)]
        for index, factor in itertools.product(range(len(values)), (step, 1 / step)):
            tried = [*values[:index], values[index] * factor, *values[index + 1 :]]
            if (found := cost(tried)) < best - 1e-6:
                values, best = tried, found
    model.put(values)


def print_scores(rows: Sequence[Row], title: str) -> None:
    """Prints the score of some rows: of all, and by class."""
    for group in ("", *sorted({row.group for row in rows})):
        print(f"{title}, {group or 'all'}: {score([row for row in rows if group in ('', row.group)])}", flush=True)


def main() -> int:
    """Fits and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", type=Path, nargs="+", help="JSON files with sweeps")
    parser.add_argument("--keys", type=Path, help="file of keys that are in no matrix")
    parser.add_argument("--constants", default="", help="pattern of those to fit; default: CONSTANTS and widths")
    parser.add_argument("--rounds", type=int, default=12, help="0 only says what the model is worth as it is")
    parser.add_argument(
        "--leave-out", action="store_true", help="fit without each seed, and say what that is worth on it"
    )
    arguments = parser.parse_args()
    keys = {key.name: key for key in expand("full", [SmArch.SM90A])}
    if arguments.keys:
        keys |= {key.name: key for key in key_file.read(arguments.keys)}
    rows = [row for path in arguments.sweeps for row in read(path, keys)]
    if arguments.rounds == 0:
        print_scores(rows, "the model")
        return 0
    model = Model(arguments.constants)
    start = model.get()
    for seed in sorted({row.seed for row in rows}) if arguments.leave_out else []:
        model.put(start)
        fit(model, [row for row in rows if row.seed != seed], arguments.rounds)
        print_scores([row for row in rows if row.seed == seed], f"without seed {seed}, on it")
    model.put(start)
    print_scores(rows, "before")
    fit(model, rows, arguments.rounds)
    print_scores(rows, "after")
    print(json.dumps(model.named(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
