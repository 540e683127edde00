"""What `few_divisions.py` gives to its program, and makes of what that prints."""

import json
from pathlib import Path

import pytest

from atomr_cutlass.generator.families import gemm_few_sm90
from benchmarks.fit_estimate import DEVICES
from benchmarks.shapes import draw

H100 = DEVICES["NVIDIA H100 80GB HBM3"]
SHAPES = draw(["few rows"], 5, 250, aligned=True)


@pytest.fixture
def few(monkeypatch):
    """The module, as a script finds what it imports."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import few_divisions as module

    return module


def test_every_division_is_one_that_its_kernel_has(few):
    for shape in SHAPES:
        for layouts in few.fit_few.LAYOUTS:
            keys = few.fit_few.kernels(layouts)
            found = few.near(shape, layouts, H100)
            assert len(set(found)) == len(found) > 1
            for ranks, share, height in found:
                assert share in gemm_few_sm90.shares(keys[ranks])
                assert height in gemm_few_sm90.widths(keys[ranks])


def test_a_line_is_a_problem_and_its_divisions(few):
    made = list(few.lines(SHAPES, H100))
    assert len(made) == 2 * len(SHAPES)
    for line in made:
        row_major_b, *extents, count = map(int, line.split()[:5])
        assert row_major_b in {0, 1}
        assert extents in [[shape.m, shape.n, shape.k] for shape in SHAPES]
        assert len(line.split()) == 5 + 3 * count


def test_the_output_becomes_files_that_fit_few_reads(few, tmp_path, monkeypatch):
    monkeypatch.setattr(few, "machine", lambda: {"gpu": "NVIDIA H100 80GB HBM3"})
    printed = "1 2 4096 8192 4 1 128 30.50 29.25 8 2 64 31.00 29.75\n0 2 4096 8192 1 1 32 28.00 27.50\n0 3 4096 8192\n"
    rows = few.parsed(printed)
    assert rows == {
        "rr": [{"shape": [2, 4096, 8192], "times": [[4, 1, 128, 30.5, 29.25], [8, 2, 64, 31.0, 29.75]]}],
        "rc": [{"shape": [2, 4096, 8192], "times": [[1, 1, 32, 28.0, 27.5]]}],
    }
    for layouts, of in rows.items():
        path = tmp_path / f"some-{layouts}.json"
        path.write_text(few.written(of, 250), encoding="utf-8")
        assert json.loads(path.read_text(encoding="utf-8"))["runs"][0]["seeds"] == [250]
        assert len(few.fit_few.read([path], [], layouts).problem) == len(of[0]["times"])
