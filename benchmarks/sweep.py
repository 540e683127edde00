"""Timings of every kernel that could serve shapes drawn at random, with its launch options, for `fit_estimate.py`.

    python benchmarks/sweep.py --seed 30 --classes "few rows=10,mid=16,large=14,long k=14" --out sweep.json
    python benchmarks/sweep.py --seed 30 --classes mid=4 --keys more.jsonl --out sweep.json  # kernels of no matrix too
    ATOMR_CUTLASS_PACKS=full90a.so python benchmarks/sweep.py --seed 30 --out sweep.json  # compiles what the pack lacks
    ATOMR_CUTLASS_PACKS=full90a.so python benchmarks/sweep.py --built --dtype e4m3 --seed 30 --out sweep.json
    ATOMR_CUTLASS_PACKS=full90a.so python benchmarks/sweep.py --built --multiple 128 --seed 32 --out sweep.json

Of bf16, or of e4m3 with scales of tensors, in fast and in full accumulation. Kernels that are not built are compiled
first, side by side, or left out (`--built`); timings begin when the last is there. Each is launched as the model would
launch it and with its other slices of K; those near the fastest with other widths, swizzles and raster orders too.
Operands are not in L2. The fastest 24 of those and PyTorch are timed in alternation, with pauses, by the median of
`--rounds` bursts of overlapping launches as long as those of gemm_random.py; the others by one shorter burst or two,
times the ratio of both for the former.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fp8
import gemm
import torch
from facts import machine, now
from gemm_random import Pool, planned
from harness import QUICK_SECONDS, Burst, Call, alternated, compile_ahead, gpu, torch_dtype
from shapes import Shape, draw

import atomr_cutlass as ac
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED
from atomr_cutlass.generator.key import COLUMN, KernelKey, shared_memory, turned_layouts
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.ops.gemm.helpers import sums
from atomr_cutlass.ops.gemm.kernels import GemmCandidate, GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import select, table
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.planning import PlanOptions
from atomr_cutlass.pipeline.search import Kernel, Roster

BF16, E4M3, F32 = CutlassDtype.BF16, CutlassDtype.F8E4M3, CutlassDtype.F32
FINAL, NEAR, FAR = 1.12, 1.2, 2.0
"""Times the fastest: up to these a launch is timed again by longer bursts, all launch options of a kernel are timed,
and its slices of K.
"""
AGAIN_AT_MOST = 24
"""Launches that are timed again, the fastest ones."""
WARM_SECONDS, BETWEEN_SECONDS = 30e-3, 5e-3
"""Of PyTorch's products before a problem's first timing, and between bursts of what is timed again."""
FLOPS_AT_MOST = 6e11
COLUMNS = ["kernel", "split_k", "swizzle", "raster", "width", "us", "model_us"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A product to time.

    Attributes:
        name: for messages.
        row: what the sweep says of it.
        problem: as kernels are chosen for it.
        sets: its operands, more than L2 holds.
        call_of: how a candidate is launched with them.
        theirs: PyTorch's product.
    """

    name: str
    row: dict[str, Any]
    problem: GemmProblem
    sets: Sequence[Any]
    call_of: Callable[[GemmCandidate], Call]
    theirs: Call


def kernels_of(dtype: CutlassDtype, layouts: Sequence[str]) -> list[KernelKey]:
    """The matrix's kernels that products of these layouts may be put to."""
    read = {*layouts, *map(turned_layouts, layouts)}
    epilogue = SCALED if dtype is E4M3 else LINEAR
    return [
        key
        for _, key in cells([SmArch.SM90A])
        if key.op == "gemm" and key.generation == "sm90" and key.a is key.b is dtype and key.d in (BF16, F32)
        and key.epilogue == epilogue and key.epilogue_schedule != "nosmem" and not any(key.scale_granularity)
        and (key.layout_a + key.layout_b in layouts or (key.layout_d == COLUMN and key.layout_a + key.layout_b in read))
    ]  # fmt: skip


def problems(shape: Shape, dtype: CutlassDtype, layouts: Sequence[str], pool: Pool, l2_bytes: int) -> Iterator[Problem]:
    """The products of a shape: of bf16 in each layout, of e4m3 in fast and in full accumulation."""
    drawn = shape
    for layout in layouts:
        shape = drawn.of_layouts(layout)
        row = {"group": shape.group, "shape": [shape.m, shape.n, shape.k]}
        sets = pool.sets(shape, layout, l2_bytes)
        if dtype is BF16:
            case = gemm.Case("bf16", layout, shape.m, shape.n, shape.k)
            problem = gemm.our_problem(case, sets[0])
            yield Problem(
                str(case), row | {"layouts": layout}, problem, sets,
                lambda found, problem=problem, like=sets[0].a: planned(
                    from_candidate(problem, found, PlanOptions(like=like))
                ),
                gemm.torch_call(case),
            )  # fmt: skip
            continue
        one = torch.ones((), device="cuda")
        scaled = [fp8.Operands(arrays.a, arrays.b, one, one, arrays.out) for arrays in sets]
        for fast in (True, False):
            of = fp8.Case("tensor", fast, shape.m, shape.n, shape.k)
            problem, scales = fp8.problem_of(of, scaled[0])
            yield Problem(
                str(of), row | {"layouts": layout, "math": problem.math}, problem, scaled,
                lambda found, problem=problem, scales=scales, like=sets[0].a: fp8.our_call(
                    problem, scales, found, like
                ),
                next(fp8.torch_calls(of))[1],
            )  # fmt: skip


def slices(search: GemmSearch, candidate: Any) -> Iterator[Any]:
    """It with other slices of K: those that the model weighs, and half as many as the fewest of these."""
    counts = {launch.split_k for launch in search.launches(candidate)}
    if candidate.formulation.divided:
        counts.add(max(2, min(counts) // 2))
    return (dataclasses.replace(candidate, split_k=count) for count in sorted(counts - {candidate.split_k}))


def measured(
    product: Problem, kernels: Sequence[Kernel], device: Device, rounds: int
) -> tuple[list[list[Any]], float, float]:
    """Of each launch [place among the names, slices, swizzle, raster order, width, us, the model's us of its kernel].

    Then the us of what the model would launch, and PyTorch's.
    """
    search = GemmSearch(product.problem, device)
    group = search.formulations[-1]
    ranked = Roster(search, None, kernels, group).every(search, group)
    calls: dict[Any, Call] = {}
    quick: dict[Any, Burst] = {}
    found: dict[Any, float] = {}

    def race(candidate: Any) -> None:
        try:
            calls[candidate] = product.call_of(candidate)
            quick[candidate] = Burst(calls[candidate], product.sets, QUICK_SECONDS)
            found[candidate] = quick[candidate]()
        except (ac.CutlassError, RuntimeError) as error:
            print(product.name, candidate.key.name[-90:], error, flush=True)

    # A GPU that has rested is up to a tenth faster, for as long as the first few candidates take.
    theirs, start = Burst(product.theirs, product.sets), time.monotonic()
    while time.monotonic() - start < WARM_SECONDS:
        theirs()
    for candidate in ranked:
        race(candidate)
    if not found:
        return [], math.nan, math.nan
    best = min(found.values())
    for candidate in list(found):
        if found[candidate] <= FAR * best:
            for launch in slices(search, candidate):
                race(launch)
    best = min(found.values())
    for candidate in [candidate for candidate, taken in found.items() if taken <= NEAR * best]:
        for launch in search.launches(candidate):
            if launch.split_k == candidate.split_k and launch not in found:
                race(launch)
    best = min(found.values())
    for candidate, taken in found.items():
        if taken <= NEAR * best:
            found[candidate] = min(taken, quick[candidate]())
    best = min(found.values())
    fastest = sorted(found, key=found.__getitem__)[:AGAIN_AT_MOST]
    finalists = [candidate for candidate in fastest if found[candidate] <= FINAL * best]
    bursts = {place: Burst(calls[candidate], product.sets) for place, candidate in enumerate(finalists)}
    bursts[-1] = theirs
    medians = {place: statistics.median(times) for place, times in alternated(bursts, rounds, BETWEEN_SECONDS).items()}
    seconds = found | {candidate: medians[place] for place, candidate in enumerate(finalists)}
    longer = statistics.median(seconds[candidate] / found[candidate] for candidate in finalists)
    seconds |= {candidate: taken * longer for candidate, taken in found.items() if candidate not in finalists}
    places = {key: place for place, (_, key, *_) in enumerate(kernels)}
    # One row of A may be copied and need not: of the same kernel with the same options, what is faster.
    least: dict[tuple[int, ...], list[Any]] = {}
    for candidate, taken in sorted(seconds.items(), key=lambda pair: pair[1]):
        entry = (places[candidate.key], *candidate.options)
        least.setdefault(entry, [*entry, round(taken * 1e6, 3), round(candidate.seconds * 1e6, 3)])
    chosen = seconds[next(candidate for candidate in ranked if candidate in found)]
    return list(least.values()), round(chosen * 1e6, 3), round(medians[-1] * 1e6, 3)


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the sweep")
    parser.add_argument("--seed", type=int, default=30, help="of the draw: an even one, since it is fitted to")
    parser.add_argument("--classes", default="few rows=10,mid=16,large=14,long k=14", help="of shapes, and how many")
    parser.add_argument("--multiple", type=int, default=1, help="that N and K are of; 128 as in layers of models")
    parser.add_argument("--dtype", choices=("bf16", "e4m3"), default="bf16", help="of A and B")
    parser.add_argument("--layouts", help="of A and B (default: rc,rr; of e4m3 rc)")
    parser.add_argument("--keys", type=Path, help="file of further keys")
    parser.add_argument("--built", action="store_true", help="the kernels of the table alone")
    parser.add_argument("--jobs", type=int, default=12, help="kernels compiled at once")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each launch")
    parser.add_argument("--seconds", type=float, default=120, help="start no shape after so many seconds of timing")
    arguments = parser.parse_args()
    device = gpu(arguments.seed)
    if device is None:
        return 1
    dtype = CutlassDtype(arguments.dtype)
    layouts = (arguments.layouts or ("rc" if dtype is E4M3 else "rc,rr")).split(",")
    if dtype is E4M3 and layouts != ["rc"]:
        parser.error("products of e4m3 have a column-major B: --layouts rc")
    keys = list(dict.fromkeys(kernels_of(dtype, layouts) + (key_file.read(arguments.keys) if arguments.keys else [])))
    built = {info.key: info for info in table.rows() if info.key.arch is SmArch.SM90A}
    if arguments.built:
        keys = [key for key in keys if key in built]
    kernels: list[Kernel] = [
        (0, key, built.get(key), built[key].shared_bytes if key in built else shared_memory(key)) for key in keys
    ]
    adding = select.best_key(sums(F32, BF16, device))
    compile_ahead((key for key in (*keys, adding) if key not in built), device, arguments.jobs)
    drawn: list[list[Shape]] = []
    for text in arguments.classes.split(","):
        name, _, count = text.partition("=")
        multiple = max(arguments.multiple, 128 // dtype.bits)
        shapes = draw([name], 3 * int(count), arguments.seed, aligned=True, multiple=multiple)
        drawn.append([shape for shape in shapes if shape.flops <= FLOPS_AT_MOST][: int(count)])
    # The classes by turns, so that a sweep that ends early has some of each.
    placed = ((place / len(shapes), shape) for shapes in drawn for place, shape in enumerate(shapes))
    every = [shape for _, shape in sorted(placed, key=lambda pair: pair[0])]
    pool = Pool(torch_dtype(dtype), Pool.elements(every, device.l2_bytes, dtype.bits // 8), torch.bfloat16)
    values = {"date": now(), "machine": machine(), "kernels": [key.name for key in keys], "columns": COLUMNS}
    if dtype is not BF16:
        values["dtype"] = dtype.value
    head, lines = json.dumps(values, indent=1)[:-2], []
    start = time.monotonic()
    for product in (product for shape in every for product in problems(shape, dtype, layouts, pool, device.l2_bytes)):
        if time.monotonic() - start > arguments.seconds:
            print("out of time", product.name)
            continue
        timings, chosen_us, torch_us = measured(product, kernels, device, arguments.rounds)
        if not timings:
            print("no kernel", product.name)
            continue
        row = {**product.row, "seed": arguments.seed, "torch": torch_us, "cells": timings}
        lines.append(json.dumps(row, separators=(",", ":")))
        text = ",\n  ".join(lines)
        arguments.out.write_text(f'{head},\n "rows": [\n  {text}\n ]\n}}\n', encoding="utf-8")
        print(f"{time.monotonic() - start:5.1f} s {product.name:<28} {len(timings):>4} torch {torch_us:>8} best "
              f"{timings[0][5]:>8} chosen {chosen_us:>8} {keys[timings[0][0]].name[-70:]} {timings[0][1:5]}",
              flush=True)  # fmt: skip
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
