"""Tables and plots of the benchmarks' results, without a GPU."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.shapes import Shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def row(seed=7, group="mid", shape=(100, 512, 1024, 1), *, layout="RCR", aligned=True, us=10.0, torch_us=11.0, **more):
    return {
        "seed": seed, "group": group, "shape": list(shape), "layout": layout, "aligned": aligned, "us": us,
        "torch_us": torch_us, "torch_ratio": torch_us / us, "kernel": ["kernel_a", 1, 2, 1], "of_limit": 0.5, **more,
    }  # fmt: skip


ROWS = [
    row(us=10.0, torch_us=20.0, tuned_us=8.0, tuned_ratio=0.8, lt_us=6.0, lt_ratio=0.6),
    row(shape=(101, 512, 1024, 1), us=20.0, torch_us=10.0, tuned_us=21.0, tuned_ratio=1.05),
    row(group="few rows", shape=(4, 28672, 4096, 1), us=60.0, torch_us=66.0, bound_us=60.0, bound_ratio=1.0),
    row(group="few rows", shape=(8, 65536, 4096, 1), us=150.0, torch_us=150.0, bound_us=150.0, bound_ratio=1.0),
    row(group="batches", shape=(64, 64, 64, 12), layout="RRR", aligned=False, triton_us=9.5, triton_ratio=0.95),
    row(seed=0, group="qwen-3-8b out", shape=(1, 4096, 4096, 1), us=10.0, torch_us=12.0),
    row(seed=0, group="qwen-3-8b down", shape=(777, 4096, 12288, 1), us=100.0, torch_us=90.0),
]


def write(path, rows, gpu="NVIDIA H200", **more):
    machine = {"gpu": gpu, "driver": "580", "commit": "0123456789", "table": 397, "torch": "2.11.0"}
    head = {"date": "2026-11-23T02:00:00Z", "machine": machine, "read_bytes_per_second": 4.3e12, **more}
    path.write_text(json.dumps({**head, "rows": rows}))
    return path


@pytest.fixture
def report(monkeypatch):
    """The module, as a script finds what it imports."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report as module

    return module


@pytest.fixture
def recorded(report, tmp_path):
    return report.read([write(tmp_path / "some.json", ROWS, seeds={"7": "acceptance"})])


def test_a_file_that_was_made_small_has_the_same_rows(report, tmp_path):
    import recorded as results

    rows = [{**each, "tuned_kernel": ["kernel_b", 2, 4, 0]} if "tuned_us" in each else each for each in ROWS]
    failures = [{"case": "late", "error": "out of time"}, {"case": "wrong", "error": "ValueError: no"}]
    whole = write(tmp_path / "whole.json", rows, failures=failures)
    kept = tmp_path / "kept.json"
    kept.write_text(results.small(json.loads(whole.read_text())))
    assert kept.stat().st_size < whole.stat().st_size
    found, wanted = report.read([kept]), report.read([whole])
    assert [sorted(row) for row in found.rows] == [sorted(row) for row in wanted.rows]
    for got, want in zip(found.rows, wanted.rows, strict=True):
        assert all(got[name] == pytest.approx(want[name]) for name in got if name not in ("kernel", "tuned_kernel"))
        assert (got["kernel"], got.get("tuned_kernel")) == (want["kernel"], want.get("tuned_kernel"))
    assert found.files[0]["failures"] == failures[1:]
    assert report.page(found, ["x"]) == report.page(wanted, ["x"])


def test_rows_of_several_files_are_put_together(report, tmp_path):
    again = {**ROWS[0], "us": 99.0}
    first, second = write(tmp_path / "a.json", ROWS[:2]), write(tmp_path / "b.json", [again, ROWS[2]])
    assert report.read([first, second]).rows == tuple(ROWS[:3])
    other = write(tmp_path / "c.json", [], gpu="NVIDIA A100")
    with pytest.raises(ValueError, match="NVIDIA A100"):
        report.read([first, other])


def test_figures_are_geometric_means_percentiles_and_regrets(report):
    found = report.figures(ROWS[:2])
    assert found["count"] == 2
    assert (found["torch"], found["torch_p5"]) == (1.0, 0.5)
    # The second choice was timed as faster than the fastest: noise, no regret.
    assert found["regret"] == pytest.approx(0.125)
    assert found["tuned_to_lt"] == 0.75
    assert "bound_to_torch" not in found
    assert report.figures(ROWS[2:3])["bound_to_torch"] == 1.1


def test_percentiles_are_of_the_ordered_values(report):
    assert report.percentile(range(100, 0, -1), 0.05) == 6
    assert report.percentile([3.0], 0.95) == 3.0


def test_limits_are_of_memory_and_of_arithmetic(report):
    few, large = Shape("x", 1, 28672, 4096), Shape("x", 8192, 8192, 8192)
    assert report.limit_seconds(few, "NVIDIA H200") == pytest.approx(few.bytes(2) / 4.8e12)
    assert report.limit_seconds(large, "NVIDIA H200") == pytest.approx(2 * 8192**3 / 989e12)
    assert report.limit_seconds(large, "another") is None


def test_groups_are_apart_by_layout_and_alignment(report):
    found = report.summary([*ROWS, row(layout="RRR"), row(aligned=False)])
    assert len(found) == len({(of["group"], of["layout"], of["aligned"]) for of in found})
    assert {of["count"] for of in found if of["group"] == "mid"} == {2, 1}


def test_the_page_has_each_table(report, recorded):
    page = report.page(recorded, ["some.json"])
    assert "| few rows | RCR | 2 | 1.05 (1.00) |  | 1.05 (1.00) |" in page
    assert "| batches | yes | 1 |  |  | 1.10 (1.10) |  |" in page
    assert "| mid | RCR | 2 | 12.5 % | 25.0 % |" in page
    # 28672x4096 may take 61.7 us, 65536x4096 137.2 us.
    assert "| RCR | 2 | 1 | 0.97 |" in page
    assert "| batches | RRR | 12 of 64x64x64 | 10.0 | 11.0 | 9.5 |" in page
    assert "| qwen-3-8b | RCR | 2 | 1.20 (1.20) |  |  |  |  | 0.90 (0.90) |  |" in page
    prose = " ".join(page.split())
    assert "seeds 7 (acceptance)" in prose
    assert "bytes over 4.00 TB/s" in prose
    assert "4.30 to 4.30 TB/s" in prose
    assert "`benchmarks/results/some.json`" in page
    for lines in page.split("\n\n"):
        widths = {line.count("|") for line in lines.strip().splitlines() if line.startswith("|")}
        assert len(widths) <= 1


def test_the_aim_of_bound_weights_is_a_share_of_the_memorys_peak(report):
    bound = ROWS[2]
    seconds = report.aim_seconds(bound, "NVIDIA H200")
    assert seconds == pytest.approx(3e-6 + 2 * 28672 * 4096 / 4.0e12)
    slower = report.aim_seconds(bound, "NVIDIA H100 80GB HBM3")
    assert (slower - 3e-6) / (seconds - 3e-6) == pytest.approx(4.8 / 3.35)
    assert "2.79 TB/s" in report.bound_text("NVIDIA H100 80GB HBM3")
    assert report.bound_table([bound], "another") == ""


def test_tables_without_rows_are_left_out(report, tmp_path):
    page = report.page(report.read([write(tmp_path / "some.json", ROWS[:1])]), ["some.json"])
    assert "## By class" in page
    assert "## Triton" not in page
    assert "## Layers of models" not in page


def test_the_worst_aligned_problems_come_first(report, recorded):
    lines = report.worst_table(recorded.rows).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines[:2]] == ["101x512x1024", "777x4096x12288"]
    assert not any("64x64x64" in line for line in lines)


def test_plots_are_small_and_repeatable(report, recorded, tmp_path):
    paths = list(report.plots(recorded, tmp_path))
    assert [path.name for path in paths] == [report.RATIOS, report.ROOFLINE]
    before = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") and len(content) < 150_000 for content in before)
    assert [path.read_bytes() for path in report.plots(recorded, tmp_path)] == before


def test_plots_of_many_rows_stay_small(report, recorded, tmp_path):
    rows = tuple(
        row(group=group, shape=(1 + 3 * index, 512 + 8 * index, 1024, 1), us=5.0 + index, torch_us=6.0 + 0.9 * index)
        for group, index in itertools.product(("few rows", "mid", "large", "long k"), range(500))
    )
    for path in report.plots(type(recorded)(rows, recorded.files), tmp_path):
        assert path.stat().st_size < 150_000
