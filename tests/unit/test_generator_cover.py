"""Budgets: the cells that tuned choices make worth their place."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from atomr_cutlass.generator import costs, key_file
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.cover import Budget, choose, measured, size
from atomr_cutlass.generator.matrix import cells, expand
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.pipeline import tuning

ROOT = Path(__file__).resolve().parents[2]
SWEEP = "benchmarks/results/2026-11-22-h200-tiles.json"

ARCHS = [SmArch.SM90A]
KEYS = [key for key in expand("full", ARCHS) if key.op == "gemm" and key.name in costs.costs()][:6]
A, B, C, E, *_ = KEYS


def file_of(tmp_path: Path, *problems: Mapping[int, float], gpu: str = "a GPU") -> Path:
    """A file of tuned choices: for each problem the times of kernels by their places in KEYS."""
    lines = []
    for number, times in enumerate(problems):
        best = min(times, key=lambda place: times[place])
        timings = {KEYS[place].digest: took for place, took in times.items()}
        tuned = {"version": 1, "gpu": gpu, "problem": {"m": number}, "microseconds": times[best], "timings": timings}
        lines.append(key_file.line(KEYS[best], tuned=tuned))
    path = tmp_path / "tuned.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_cell_that_saves_most_comes_first(tmp_path: Path) -> None:
    # A serves everything, B and C are twice as fast at one and two of the problems.
    path = file_of(tmp_path, {0: 10.0, 1: 5.0}, {0: 10.0, 2: 5.0}, {0: 10.0, 2: 5.0}, {0: 10.0, 3: 10.0})
    assert choose(path, ARCHS, Budget(cells=1)) == [A]
    assert choose(path, ARCHS, Budget(cells=2)) == [A, C]
    assert choose(path, ARCHS, Budget(cells=9)) == [A, C, B]  # E gains nothing


def test_megabytes_count_by_what_a_byte_saves(tmp_path: Path) -> None:
    path = file_of(tmp_path, dict.fromkeys(range(6), 10.0) | {0: 9.99})
    least = min(KEYS, key=size)
    (first, *_) = choose(path, ARCHS, Budget(megabytes=1.0))
    assert size(first) == size(least)
    total = sum(map(size, choose(path, ARCHS, Budget(megabytes=size(least) / 1e6))))
    assert total <= size(least)
    with pytest.raises(ValueError, match="have room for no kernel"):
        choose(path, ARCHS, Budget(megabytes=1e-6))


def test_the_order_of_lines_and_repeated_problems_do_not_matter(tmp_path: Path) -> None:
    problems: list[dict[int, float]] = [{0: 10.0, 1: 5.0}, {1: 8.0, 2: 7.0}, {3: 1.0, 0: 3.0}]
    path = file_of(tmp_path, *problems)
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = choose(path, ARCHS, Budget(cells=3))
    path.write_text("\n\n".join([*lines[::-1], lines[0]]) + "\n", encoding="utf-8")
    assert choose(path, ARCHS, Budget(cells=3)) == chosen


def test_selection(tmp_path: Path) -> None:
    path = file_of(tmp_path, {0: 10.0, 1: 5.0}, {0: 10.0, 2: 5.0}, {0: 10.0, 2: 5.0})
    everything = Selection(archs="", keys_file=str(path)).keys()
    assert set(everything) == {B, C}  # exactly the keys of the file
    assert Selection(archs="", keys_file=str(path), budget_cells="1").keys() == [A]
    assert Selection(archs="90a", keys_file=str(path), budget_mb="1").keys()
    with pytest.raises(ValueError, match="give a file of tuned choices as ATOMR_CUTLASS_KEYS"):
        Selection(budget_cells="3").keys()
    for wrong in ({"budget_cells": "many"}, {"budget_cells": "-1"}, {"budget_mb": "nan"}):
        with pytest.raises(ValueError, match="ATOMR_CUTLASS_BUDGET_CELLS and ATOMR_CUTLASS_BUDGET_MB: "):
            Selection(archs="", keys_file=str(path), **wrong).keys()


def test_files_without_measurements(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text(key_file.line(A), encoding="utf-8")
    with pytest.raises(ValueError, match="has no tuned choice for 90a"):
        choose(path, ARCHS, Budget(cells=1))
    for wrong, says in (({"timings": []}, "timings is"), ({"microseconds": "5"}, 'took "5"; expected microseconds'),
                        ({"timings": {A.digest: math.inf}}, "expected microseconds")):  # fmt: skip
        tuned = {"version": 1, "gpu": "a GPU", "problem": {}, "microseconds": 5.0, "timings": {}} | wrong
        path.write_text(json.dumps({**json.loads(key_file.line(A)), "tuned": tuned}), encoding="utf-8")
        with pytest.raises(ValueError, match=says):
            choose(path, ARCHS, Budget(cells=1))


def test_the_recorded_sweep_is_a_file_of_tuned_choices(tmp_path: Path) -> None:
    """`tools/tuned_from_sweep.py` reads what is in the repository: 12 cells come within 3% of all."""
    path = tmp_path / "tiles.jsonl"
    words = [sys.executable, "tools/tuned_from_sweep.py", SWEEP, "--seed", "12", "--out", str(path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert len(tuning.read(path)) == 114
    problems = list(measured(path, {key.digest: key for _, key in cells(ARCHS)}).values())
    chosen = {key.digest for key in choose(path, ARCHS, Budget(cells=12))}
    longer = [
        min(took for digest, took in times.items() if digest in chosen) / min(times.values()) for times in problems
    ]
    assert math.exp(sum(map(math.log, longer)) / len(longer)) < 1.03
