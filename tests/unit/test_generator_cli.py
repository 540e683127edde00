"""`python -m generator`, as the build and its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from generator import costs, matrix
from generator.__main__ import main
from generator.archs import SmArch
from generator.families.base import ON_DEMAND
from generator.key import KernelKey
from generator.selection import Selection

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -I -S: nothing but the standard library can be imported.
    code = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('generator', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_list_names_each_cell_and_the_total() -> None:
    process = _run("--preset", "smoke", "--archs", "80;90a", "--list")
    assert process.returncode == 0, process.stderr
    names = [key.name for key in Selection(preset="smoke").keys()]  # noqa: SIM118 - not a dict
    *cells, sum_of_all = process.stdout.splitlines()
    assert [line.partition("  ")[0] for line in cells if not line.startswith("left out: ")] == names
    assert sum_of_all.startswith(f"{len(names)} cells (preset smoke, archs 80;90a): ")


def test_the_list_says_what_a_preset_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--preset", "default", "--archs", "90a"]) == 0
    of_default = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert any("gemm f16 rr with gated_silu" in line and "in preset full" in line for line in of_default)
    assert main(["--list", "--preset", "full", "--archs", "90a"]) == 0
    of_full = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    rare = next(key for tier, key in matrix.cells([SmArch.SM90A]) if tier == ON_DEMAND)
    assert f"left out: {rare.name}: in no preset: compiled at first use" in of_full
    assert any("grouped_gemm bf16 rc with quantize: grouped kernels store D alone" in line for line in of_full)
    assert not any("in preset" in line.replace("in no preset", "") for line in of_full)


@pytest.fixture
def costs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is read in place of the costs that are kept."""
    path = tmp_path / "costs.json"
    monkeypatch.setattr(costs, "FILE", path)
    for kept in (costs.costs, costs._likely):
        kept.cache_clear()
    yield path
    for kept in (costs.costs, costs._likely):
        kept.cache_clear()


def test_the_list_shows_what_cells_cost(costs_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *others = (key.name for key in Selection(preset="smoke", archs="80").keys())  # noqa: SIM118
    measured = {first: [12.25, 34000], second: [3, 1500], "gone": [100, 1]}
    costs_file.write_text(json.dumps({"measured": [], "cells": measured}))
    arguments = ["--list", "--preset", "smoke", "--archs", "80"]
    assert main(arguments) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("left out: ")]
    assert said[:2] == [f"{first}  12.2 s, 34.0 kB", f"{second}  3.0 s, 1.5 kB"]
    # Whatever their template, the mean of the two is all there is to go by, or the one of the two like them.
    assert all("  about " in line for line in said[2:-1])
    assert said[-1].endswith(f" kB, of which {len(others)} as cells like them")
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["costs"]
    assert shown == {first: {"seconds": 12.25, "size": 34000}, second: {"seconds": 3.0, "size": 1500}}


def test_the_costs_that_are_kept_say_where_they_were_measured() -> None:
    kept = json.loads(costs.FILE.read_text(encoding="utf-8"))
    assert kept["measured"]
    assert all({"date", "cores", "compilers", "preset", "archs"} <= build.keys() for build in kept["measured"])
    assert all(cost.seconds > 0 and cost.size > 0 for cost in costs.costs().values())
    assert costs.costs()


def test_the_json_list_holds_every_field() -> None:
    process = _run("--preset", "default", "--archs", "89", "--list", "--json")
    assert process.returncode == 0, process.stderr
    kernels = json.loads(process.stdout)["kernels"]
    keys = [KernelKey.from_dict({k: v for k, v in entry.items() if k != "name"}) for entry in kernels]
    assert keys == Selection(archs="89").keys()
    assert [entry["name"] for entry in kernels] == [key.name for key in keys]


def test_emission_from_the_command_line(tmp_path: Path) -> None:
    process = _run("--preset", "smoke", "--archs", "86", "--dtypes", "f32", "--emit", str(tmp_path))
    assert process.returncode == 0, process.stderr
    (cell,) = Selection(preset="smoke", archs="86", dtypes="f32").keys()
    assert [p.stem for p in tmp_path.glob("src/sm_86/*.cu")] == [cell.name]
    assert process.stdout.startswith("1 cells (preset smoke, archs 86): ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--list", "--preset", "big"], "unknown preset 'big'; valid: none, smoke, default, full"),
        (["--list", "--archs", "90"], "'90a'"),
        (["--list", "--ops", "conv"], "unknown op 'conv'; valid: gemm"),
        (["--list", "--dtypes", "half"], "unknown dtype 'half'"),
        (["--list", "--kernels", "nothing"], "leaves no kernel"),
        (["--list", "--exclude", "*"], "leaves no kernel"),
        (["--list", "--filter-file", "/nowhere"], "cannot read the kernel filter file"),
        (["--list", "--ptx", "90a"], "PTX of '90a'"),
    ],
)
def test_a_wrong_selection_exits_with_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("generator: ")
    assert says in said.err
    assert said.out == ""


@pytest.mark.parametrize("arguments", [[], ["--list", "--emit", "x"], ["--list", "--colour", "red"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    process = _run(*arguments)
    assert process.returncode == 2
    assert "usage: python -m generator" in process.stderr


def test_a_wrong_selection_is_no_traceback() -> None:
    process = _run("--list", "--archs", "none")
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
