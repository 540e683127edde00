"""What the benchmarks share, without PyTorch and a GPU: sets of operands, cases, results."""

import argparse
import dataclasses
import json
import sys
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
    # Nobody else shall find those that know the other PyTorch.
    for name in ("harness", "cublaslt", "gemm", "gemm_random"):
        sys.modules.pop(name, None)


@pytest.fixture
def gemm_random(harness):
    """The benchmark of random shapes, likewise."""
    import gemm_random as module

    assert module.Results is harness.Results
    return module


def asked(**options):
    return argparse.Namespace(
        **{
            "seed": [7, 9], "count": 6, "classes": "few rows,mid", "suites": "", "rows": "", "layouts": "rc,rr",
            "aligned": True, "misaligned": False, "multiple": 1, "dtype": "bf16", "part": "0/1", "done": [], **options,
        }
    )  # fmt: skip


def test_groups_are_measured_by_turns(gemm_random):
    cases = gemm_random.cases(asked())
    assert len(cases) == 2 * 2 * 2 * 6
    assert [(case.seed, case.shape.group, case.layouts) for case in cases[:4]] == [
        (7, "few rows", "rc"), (7, "few rows", "rr"), (7, "mid", "rc"), (7, "mid", "rr"),
    ]  # fmt: skip
    assert {case.number for case in cases[:8]} == {0}


def test_parts_have_every_case_once_and_all_layouts(gemm_random):
    parts = [gemm_random.cases(asked(part=f"{place}/2")) for place in (0, 1)]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, gemm_random.cases(asked())))
    assert all({case.layouts for case in part} == {"rc", "rr"} for part in parts)


def test_what_other_results_have_is_left_out(gemm_random, tmp_path):
    cases = gemm_random.cases(asked())
    first = cases[0]
    extents = [first.shape.m, first.shape.n, first.shape.k, first.shape.batch]
    row = {"seed": 7, "group": first.shape.group, "shape": extents, "layout": "RCR"}
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"machine": {"gpu": "a GPU"}, "rows": [row]}))
    assert gemm_random.cases(asked(done=[path])) == cases[1:]


def test_layers_of_models_have_no_seed(gemm_random):
    cases = gemm_random.cases(asked(suites="llama-3-8b", rows="1,3", layouts="rc"))
    assert {case.seed for case in cases} == {0}
    assert sorted(case.shape.m for case in cases) == [1] * 4 + [3] * 4


def test_sets_exceed_the_cache_four_times_over_and_are_three(harness):
    assert harness.set_count(10 << 20, FakeDevice()) == 20
    assert harness.set_count(1 << 40, FakeDevice()) == 3
    assert harness.set_count(1 << 40, FakeDevice(), most=1) == 1
    assert harness.set_count(1, FakeDevice()) == harness.SETS_AT_MOST


def test_calls_are_timed_within_the_graph_behind_one_that_is_not_counted(harness, monkeypatch):
    log = []

    class Event:
        def __init__(self, *, external=False, **_):
            self.external = external

        def record(self):
            log.append("event of the graph" if self.external else "event")

        def synchronize(self):
            pass

        def elapsed_time(self, _):
            return 3.0

    cuda = mock.MagicMock(Event=Event)
    cuda.CUDAGraph.return_value.capture_begin = lambda: log.append("begin")
    cuda.CUDAGraph.return_value.capture_end = lambda: log.append("end")
    monkeypatch.setattr(harness.torch, "cuda", cuda)
    burst = harness.Burst(log.append, ["first", "second"], seconds=3e-3)
    counted = ["first", "second", "first"]
    captured = ["second", "event of the graph", *counted, "event of the graph"]
    assert log[log.index("begin") + 1 : log.index("end")] == captured
    assert burst() == 3e-3 / 3


def test_sides_alternate(harness):
    order = []
    sides = {side: lambda side=side: order.append(side) or len(order) for side in ("ours", "torch")}
    times = harness.alternated(sides, 2, pause=0)
    assert order == ["torch", "ours", "ours", "torch"]
    assert times == {"ours": [2, 3], "torch": [1, 4]}


def test_the_fastest_candidates_are_timed_again(harness):
    # The first timing of 0 flatters it; 5 is the model's choice, which is timed again wherever it stands.
    seconds = {0: [1.0], 1: [2.0], 2: [3.0], 3: [4.0], 4: [5.0], 5: [9.0]}
    later = {0: 2.5, 5: 1.9}

    def burst(candidate):
        return lambda: seconds[candidate].pop() if seconds[candidate] else later.get(candidate, candidate + 1.0)

    assert harness.fastest_first({candidate: burst(candidate) for candidate in seconds}, first=5) == [5, 1, 0, 2, 3, 4]


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
