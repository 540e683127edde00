"""Times every launch of the kernels for operands that begin anywhere, beside PyTorch and the best other kernel.

    python benchmarks/ragged_launches.py --seed 340 --classes "few rows=30,mid=10" --out launches.json

A launch chooses how many thread blocks divide K, the rows of weights in a tile, and its most few rows.
`fit_ragged.py` fits the model's constants to such files. It needs a GPU and a table that has the kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gemm
import torch
from facts import machine, now
from gemm_random import Pool, planned
from harness import QUICK_SECONDS, Burst, alternated, gpu
from shapes import Shape, draw

import atomr_cutlass as ac
from atomr_cutlass.generator.key import ANYWHERE, RAGGED
from atomr_cutlass.ops.gemm.kernels import GemmCandidate, GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.planning import PlanOptions

AGAIN = 4
"""Launches that are timed again, in turns with the others: the fastest ones."""
PAUSE_SECONDS = 3e-3
LEAST_TILE = 64
"""Rows and columns of the tiles by which thread blocks are counted."""
THREAD_BLOCKS = 16
"""Thread blocks of a multiprocessor, at most, where K is divided."""
TORCH, OTHER = -1, -2
"""The places of the other sides beside those of the launches."""


def measured(shape: Shape, layouts: str, mainloop: str, pool: Pool, device: Device) -> dict[str, Any] | None:
    """Microseconds of a problem: `all` the launches of its kernel of a mainloop, PyTorch and the best other kernel's.

    None where no such kernel of the table serves it.
    """
    sets = pool.sets(shape, layouts, device.l2_bytes)
    case = gemm.Case("bf16", layouts, shape.m, shape.n, shape.k)
    problem = gemm.our_problem(case, sets[0])
    search = GemmSearch(problem, device)
    ranked = [candidate for candidate in select.rank(search) if candidate.info is not None]
    chosen = next((candidate for candidate in ranked if candidate.key.mainloop == mainloop), None)
    other = next((candidate for candidate in ranked if candidate.key.mainloop != mainloop), None)
    if chosen is None:
        return None

    def burst(candidate: GemmCandidate, seconds: float) -> Burst:
        return Burst(planned(from_candidate(problem, candidate, PlanOptions(like=sets[0].a))), sets, seconds)

    # Sums of more thread blocks than ever are at once take gigabytes, which the graphs of these timings keep.
    least_tiles = math.ceil(shape.m / LEAST_TILE) * math.ceil(shape.n / LEAST_TILE) * shape.batch
    most_splits = max(1, THREAD_BLOCKS * device.multiprocessors // least_tiles)
    every = (chosen, *(launch for launch in search.launches(chosen) if launch.split_k <= most_splits))
    launches = list({launch.options: launch for launch in every}.values())
    bursts = {place: burst(launch, QUICK_SECONDS) for place, launch in enumerate(launches)}
    seconds = {place: timed() for place, timed in bursts.items()}
    again = {place: bursts[place] for place in (0, *sorted(seconds, key=seconds.__getitem__)[:AGAIN])}
    again[TORCH] = Burst(gemm.torch_call(case), sets)
    if other is not None:
        again[OTHER] = burst(other, QUICK_SECONDS)
    medians = {place: statistics.median(times) for place, times in alternated(again, 3, PAUSE_SECONDS).items()}
    seconds |= {place: taken for place, taken in medians.items() if place >= 0}

    def us(value: float | None) -> float | None:
        return None if value is None else round(value * 1e6, 2)

    return {
        "layout": layouts, "shape": [shape.m, shape.n, shape.k, shape.batch], "torch": us(medians[TORCH]),
        "other": us(medians.get(OTHER)),
        "chosen": [chosen.split_k, chosen.swizzle, chosen.width, us(seconds[0]), us(chosen.seconds)],
        "all": [
            [launch.split_k, launch.swizzle, launch.width, us(seconds[place])] for place, launch in enumerate(launches)
        ],
    }  # fmt: skip


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the launches")
    parser.add_argument("--mainloop", choices=ANYWHERE, default=RAGGED, help="for few rows, or for any")
    parser.add_argument("--seed", type=int, default=340, help="of the draw: an even one, since it is fitted to")
    parser.add_argument("--classes", default="few rows=30", help="of shapes, and how many")
    parser.add_argument("--aligned", action="store_true", help="shapes whose rows begin at multiples of 16 bytes")
    parser.add_argument("--seconds", type=float, default=120, help="start no shape after so many seconds of timing")
    arguments = parser.parse_args()
    device = gpu(arguments.seed)
    if device is None:
        return 1
    drawn: list[Shape] = []
    for text in arguments.classes.split(","):
        name, _, count = text.partition("=")
        drawn += draw([name], int(count), arguments.seed, aligned=arguments.aligned)
    pool = Pool(torch.bfloat16, Pool.elements(drawn, device.l2_bytes, 2))
    values = {"date": now(), "machine": machine(), "columns of all": ["split_k", "swizzle", "width", "us"]}
    head, lines = json.dumps(values, indent=1)[:-2], []
    start = time.monotonic()
    for shape, layouts in ((shape, layouts) for shape in drawn for layouts in ("rc", "rr")):
        if time.monotonic() - start > arguments.seconds:
            print("out of time", shape, layouts)
            continue
        try:
            row = measured(shape, layouts, arguments.mainloop, pool, device)
        except (ac.CutlassError, RuntimeError) as error:
            print(shape, layouts, error, flush=True)
            continue
        if row is None:
            continue
        lines.append(json.dumps({"seed": arguments.seed, "group": shape.group, **row}, separators=(",", ":")))
        text = ",\n  ".join(lines)
        arguments.out.write_text(f'{head},\n "rows": [\n  {text}\n ]\n}}\n', encoding="utf-8")
        print(
            f"{shape!s:<20} {layouts} torch {row['torch']:>8} other {row['other']!s:>8} chosen {row['chosen']}",
            flush=True,
        )
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
