"""Timings of every kernel that could serve shapes drawn at random, with its launch options, for `fit_estimate.py`.

    python benchmarks/sweep.py --seed 30 --classes "few rows=10,mid=16,large=14,long k=14" --out sweep.json
    python benchmarks/sweep.py --seed 30 --classes mid=4 --keys more.jsonl --out sweep.json  # kernels of no matrix too
    ATOMR_CUTLASS_PACKS=full90a.so python benchmarks/sweep.py --seed 30 --out sweep.json  # compiles what the pack lacks

Kernels of bf16 that are not built are compiled first, side by side; timings begin when the last is there. Each is
launched as the model would launch it and with its other slices of K; those near the fastest with other widths, swizzles
and raster orders too. Operands are not in L2. A timing of those near the fastest, and of PyTorch, is the median of
`--rounds` bursts of overlapping launches as long as those of gemm_random.py; of the others that of one shorter burst,
times the ratio of both for the former: in bursts of 0.3 ms PyTorch's products take 5% longer, ours 2%.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from facts import machine, now
from gemm import Case, Operands, our_problem
from gemm_random import Pool, _planned
from harness import QUICK_SECONDS, Burst, Call, alternated, compile_ahead, gpu
from shapes import Shape, draw

import atomr_cutlass as ac
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.lower import LINEAR
from atomr_cutlass.generator.key import KernelKey, shared_memory
from atomr_cutlass.generator.matrix import cells
from atomr_cutlass.ops.gemm.helpers import sums
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.pipeline import select, table
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.planning import PlanOptions
from atomr_cutlass.pipeline.search import Kernel, Roster

BF16, F32 = CutlassDtype.BF16, CutlassDtype.F32
FINAL, NEAR, FAR = 1.12, 1.2, 2.0
"""Times the fastest: up to these a launch is timed again by longer bursts, all launch options of a kernel are timed,
and its slices of K.
"""
FLOPS_AT_MOST = 6e11
COLUMNS = ["kernel", "split_k", "swizzle", "raster", "width", "us", "model_us"]


def kernels_of(layouts: tuple[str, ...]) -> list[KernelKey]:
    """The matrix's kernels of bf16 that products of these layouts may be put to."""
    turned = {"rc": "rc", "rr": "cc"}
    read = {*layouts, *(turned[layout] for layout in layouts)}
    return [
        key
        for _, key in cells([SmArch.SM90A])
        if key.op == "gemm" and key.generation == "sm90" and key.a is key.b is BF16 and key.d in (BF16, F32)
        and key.epilogue == LINEAR and key.epilogue_schedule != "nosmem"
        and (key.layout_a + key.layout_b in layouts or (key.layout_d == "c" and key.layout_a + key.layout_b in read))
    ]  # fmt: skip


def options(search: GemmSearch, candidate: Any) -> Iterator[Any]:
    """Its launch options but for the swizzle 8, which is hardly ever the fastest alone."""
    for launch in search.launches(candidate):
        if launch.swizzle <= 4 and launch != candidate:
            yield launch


def slices(search: GemmSearch, candidate: Any) -> Iterator[Any]:
    """It with other slices of K: those that the model weighs, and half as many as the fewest of these."""
    counts = {launch.split_k for launch in search.launches(candidate)}
    if candidate.formulation.divided:
        counts.add(max(2, min(counts) // 2))
    return (dataclasses.replace(candidate, split_k=count) for count in sorted(counts - {candidate.split_k}))


def measured(
    case: Case, sets: list[Operands], kernels: Sequence[Kernel], device: Device, rounds: int
) -> list[list[Any]]:
    """[place among the kernels, slices, swizzle, raster order, width, us, the model's us] of each launch."""
    problem = our_problem(case, sets[0])
    search = GemmSearch(problem, device)
    group = search.formulations[-1]
    ranked = Roster(search, None, kernels, group).every(search, group)
    calls: dict[Any, Call] = {}
    found: dict[Any, float] = {}

    def race(candidate: Any) -> None:
        try:
            calls[candidate] = _planned(from_candidate(problem, candidate, PlanOptions(like=sets[0].a)))
            found[candidate] = Burst(calls[candidate], sets, QUICK_SECONDS)()
        except (ac.CutlassError, RuntimeError) as error:
            print(case, candidate.key.name[-90:], error, flush=True)

    for candidate in ranked:
        race(candidate)
    if not found:
        return []
    best = min(found.values())
    for candidate in list(found):
        if found[candidate] <= FAR * best:
            for launch in slices(search, candidate):
                race(launch)
    best = min(found.values())
    for candidate in [candidate for candidate, taken in found.items() if taken <= NEAR * best]:
        for launch in options(search, candidate):
            if launch.split_k == candidate.split_k and launch not in found:
                race(launch)
    best = min(found.values())
    finalists = [candidate for candidate, taken in found.items() if taken <= FINAL * best]
    seconds = dict(found)
    for candidate in finalists:
        burst = Burst(calls[candidate], sets)
        seconds[candidate] = statistics.median(burst() for _ in range(rounds))
    longer = statistics.median(seconds[candidate] / found[candidate] for candidate in finalists)
    seconds |= {candidate: taken * longer for candidate, taken in found.items() if candidate not in finalists}
    places = {key: place for place, (_, key, *_) in enumerate(kernels)}
    # One row of A may be copied and need not: of the same kernel with the same options, what is faster.
    least: dict[tuple[int, ...], list[Any]] = {}
    for candidate, taken in sorted(seconds.items(), key=lambda pair: pair[1]):
        entry = (places[candidate.key], *candidate.options)
        least.setdefault(entry, [*entry, round(taken * 1e6, 3), round(candidate.seconds * 1e6, 3)])
    return list(least.values())


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the sweep")
    parser.add_argument("--seed", type=int, default=30, help="of the draw: an even one, since it is fitted to")
    parser.add_argument("--classes", default="few rows=10,mid=16,large=14,long k=14", help="of shapes, and how many")
    parser.add_argument("--layouts", default="rc,rr", help="of A and B")
    parser.add_argument("--keys", type=Path, help="file of further keys")
    parser.add_argument("--jobs", type=int, default=12, help="kernels compiled at once")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each launch")
    parser.add_argument("--seconds", type=float, default=120, help="start no shape after so many seconds of timing")
    arguments = parser.parse_args()
    device = gpu(arguments.seed)
    if device is None:
        return 1
    layouts = tuple(arguments.layouts.split(","))
    keys = list(dict.fromkeys(kernels_of(layouts) + (key_file.read(arguments.keys) if arguments.keys else [])))
    built = {info.key: info for info in table.rows() if info.key.arch is SmArch.SM90A}
    kernels: list[Kernel] = [
        (0, key, built.get(key), built[key].shared_bytes if key in built else shared_memory(key)) for key in keys
    ]
    adding = select.best_key(sums(F32, BF16, device))
    compile_ahead((key for key in (*keys, adding) if key not in built), device, arguments.jobs)
    drawn: list[list[Shape]] = []
    for text in arguments.classes.split(","):
        name, _, count = text.partition("=")
        shapes = draw([name], 3 * int(count), arguments.seed, aligned=True)
        drawn.append([shape for shape in shapes if shape.flops <= FLOPS_AT_MOST][: int(count)])
    # The classes by turns, so that a sweep that ends early has some of each.
    placed = ((place / len(shapes), shape) for shapes in drawn for place, shape in enumerate(shapes))
    every = [shape for _, shape in sorted(placed, key=lambda pair: pair[0])]
    pool = Pool(torch.bfloat16, Pool.elements(every, device.l2_bytes))
    values = {"date": now(), "machine": machine(), "kernels": [key.name for key in keys], "columns": COLUMNS}
    head, lines = json.dumps(values, indent=1)[:-2], []
    start = time.monotonic()
    for shape in every:
        for layout in layouts:
            if time.monotonic() - start > arguments.seconds:
                print("out of time", shape, layout)
                continue
            case = Case("bf16", layout, shape.m, shape.n, shape.k)
            sets = pool.sets(shape, layout, device.l2_bytes)
            timings = measured(case, sets, kernels, device, arguments.rounds)
            theirs = {"torch": Burst(lambda arrays: torch.matmul(arrays.a, arrays.b, out=arrays.out), sets)}
            torch_us = round(statistics.median(alternated(theirs, arguments.rounds)["torch"]) * 1e6, 3)
            row = {"group": shape.group, "seed": arguments.seed, "shape": [shape.m, shape.n, shape.k]}
            row |= {"layouts": layout, "torch": torch_us, "cells": timings}
            lines.append(json.dumps(row, separators=(",", ":")))
            text = ",\n  ".join(lines)
            arguments.out.write_text(f'{head},\n "rows": [\n  {text}\n ]\n}}\n', encoding="utf-8")
            if timings:
                chosen = min(timings, key=lambda row: float(row[6]))
                print(f"{time.monotonic() - start:5.1f} s {case!s:<28} {len(timings):>4} torch {torch_us:>8} best "
                      f"{timings[0][5]:>8} chosen {chosen[5]:>8} {keys[timings[0][0]].name[-70:]} {timings[0][1:5]}",
                      flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
