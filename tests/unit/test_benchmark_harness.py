"""What the benchmarks share, without PyTorch and a GPU: sets of operands, cases, results."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from unittest import mock

import pytest

import atomr_cutlass as ac
from atomr_cutlass.pipeline import devices

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    name: str = "a GPU"
    l2_bytes: int = 50 << 20


@pytest.fixture
def harness(monkeypatch):
    """The module as a benchmark imports it, with a PyTorch that does nothing."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setitem(sys.modules, "torch", mock.MagicMock(__version__="0"))
    import harness as module

    monkeypatch.setattr(module, "machine", lambda: "here")
    monkeypatch.setattr(devices, "get", lambda _: FakeDevice())
    yield module
    # Nobody else shall find the one that knows the other PyTorch.
    del sys.modules["harness"]


def test_sets_exceed_the_cache_twice_over(harness):
    assert harness.set_count(10 << 20, FakeDevice()) == 10
    assert harness.set_count(1 << 40, FakeDevice()) == 1
    assert harness.set_count(1 << 40, FakeDevice(), least=3) == 3
    assert harness.set_count(1, FakeDevice()) == harness.SETS_AT_MOST


def test_sides_alternate(harness, monkeypatch):
    order = []
    monkeypatch.setattr(harness, "PAUSE_SECONDS", 0)
    bursts = {
        side: types.SimpleNamespace(time=lambda side=side: order.append(side) or len(order))
        for side in ("ours", "torch")
    }
    times = harness.alternated(bursts, 2)
    assert order == ["torch", "ours", "ours", "torch"]
    assert times == {"ours": [2, 3], "torch": [1, 4]}


def test_results_are_written_after_each_case(harness, tmp_path):
    path = tmp_path / "new" / "results.json"
    results = harness.Results(path, seed=7)
    seen = []

    def measure(case):
        if seen:
            seen.append(len(json.loads(path.read_text())["rows"]))
        else:
            seen.append(0)
        if case == "refused":
            raise ac.CutlassError("no such kernel")
        results.rows.append({"case": case, "us": 1.0})

    results.run(["one", "refused", "two"], measure)
    found = json.loads(path.read_text())
    assert seen == [0, 1, 1]
    assert found["seed"] == 7
    assert [row["case"] for row in found["rows"]] == ["one", "two"]
    assert [failure["case"] for failure in found["failures"]] == ["refused"]
    assert "no such kernel" in found["failures"][0]["error"]
    assert '  {"case": "one", "us": 1.0},\n' in path.read_text()
    assert results.finish() == 1


def test_cases_after_the_time_are_failures(harness, tmp_path):
    results = harness.Results(tmp_path / "results.json")
    results.run(["late"], lambda case: pytest.fail(f"measured {case}"), seconds=-1)
    assert results.values["failures"] == [{"case": "late", "error": "out of time"}]


def test_means_are_geometric_and_pass_over_rows_without_a_ratio(harness):
    rows = [{"kind": "a", "torch_ratio": 2.0}, {"kind": "a", "torch_ratio": 0.5}, {"kind": "b"}]
    assert harness.means(rows, lambda row: row["kind"]) == {"a": 1.0}


def test_the_choice_is_held_against_the_fastest(harness):
    rows = [{"kernel": "first", "us": 3.0}, {"kernel": "second", "us": 2.0}, {"kernel": "third", "us": None}]
    assert harness.against_best("case", rows) == {"case": "case", "chosen": "first", "best": "second", "loss": 1.5}
    assert harness.against_best("case", rows[::-1])["loss"] == float("inf")
    assert harness.against_best("case", rows[2:]) == {"case": "case", "problem": "no kernel"}
