"""Tuned choices of recorded sweeps, in each of the forms that sweeps have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmLayout, GemmRequest, GemmShape, SmArch
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.gemm.operation import GemmOperation
from atomr_cutlass.pipeline import devices, select, tuning
from tools.tuned_from_sweep import main

GPU = "a GPU"
COLUMNS = ["kernel", "split_k", "swizzle", "raster", "width", "us", "model_us"]
ROW = {"group": "mid", "seed": 2, "shape": [512, 1024, 768], "layouts": "rc"}


def search_of(dtype: D = D.BF16, scaling: str | None = None, *, fast: bool = False) -> Any:
    request = GemmRequest(
        GemmShape(512, 1024, 768), dtype=dtype, layout_b=GemmLayout.COL_MAJOR, arch=SmArch.SM90A, scaling=scaling,
        fast_accum=fast,
    )  # fmt: skip
    return GemmOperation().search(request, devices.imagined(SmArch.SM90A))


def kernels_of(search: Any) -> list[KernelKey]:
    """Persistent kernels of one width that serve the problem undivided, some first in the matrix."""
    formulation = search.formulations[-1][0]
    keys = (key for key in select.matrix("gemm", SmArch.SM90A) if key.generation == "sm90" and key.mainloop != "few")
    return [key for key in keys if search.supports(key, formulation) and key.scheduler == "persistent"][:3]


def tuned(tmp_path: Path, sweep: dict[str, Any], *words: str) -> list[tuning.TuneRecord]:
    source, out = tmp_path / "sweep.json", tmp_path / "tuned.jsonl"
    source.write_text(json.dumps(sweep), encoding="utf-8")
    assert main([str(source), "--out", str(out), *words]) == 0
    return tuning.read(out)


@pytest.mark.parametrize("head", [{"machine": {"gpu": GPU}}, {"machine": None, "gpu": GPU}, {"gpu": GPU}])
def test_rows_with_columns(tmp_path: Path, head: dict[str, Any]) -> None:
    search = search_of()
    keys = kernels_of(search)
    launches = [
        [0, 1, 2, 1, 0, 9.5, 8.0],
        [1, 1, 1, 2, 0, 7.25, 9.0],
        [0, 1, 1, 1, 0, 9.75, 8.0],
        [2, 1, 1, 1, 0, 11.0, 9.5],
    ]
    names = [key.name for key in keys[:2]] + ["a kernel that has left the matrix"]
    (record,) = tuned(tmp_path, head | {"kernels": names, "columns": COLUMNS, "rows": [ROW | {"cells": launches}]})
    assert (record.gpu, record.problem) == (GPU, tuning.identity(search.tuned_problem))
    assert (record.key, record.options, record.microseconds) == (keys[1], (1, 1, 2, 0), 7.25)
    assert (record.chosen, record.chosen_microseconds) == (keys[0].name, 9.5)
    assert record.tried == 4
    assert record.timings == ((keys[1].digest, 7.25), (keys[0].digest, 9.5))


def test_the_record_is_used(tmp_path: Path) -> None:
    """A launch that no plan makes, here with three slices of K side by side that the kernel cannot divide, is left."""
    search = search_of()
    keys = kernels_of(search)
    launches = [[0, 77, 1, 1, 0, 5.0, 8.0], [1, 1, 1, 2, 0, 7.25, 9.0]]
    head = {"machine": {"gpu": search.device.name}, "kernels": [key.name for key in keys], "columns": COLUMNS}
    (record,) = tuned(tmp_path, head | {"rows": [ROW | {"cells": launches}]})
    assert (record.key, record.microseconds) == (keys[1], 7.25)
    tuning.clear()
    tuning.add([record])
    try:
        found = select.choose(search)
    finally:
        tuning.clear()
    assert (found.tuned, found.key, found.options) == (True, keys[1], record.options)


def test_rows_of_fp8_and_of_a_seed(tmp_path: Path) -> None:
    searches = {math: search_of(D.F8E4M3, "tensor", fast=math == "fast") for math in ("fast", "default")}
    keys = kernels_of(searches["default"])
    rows = [ROW | {"math": math, "cells": [[0, 1, 1, 1, 0, 5.5, 5.0]]} for math in ("fast", "default")]
    rows.append(ROW | {"seed": 4, "math": "fast", "cells": [[0, 1, 1, 1, 0, 5.5, 5.0]]})
    head = {"machine": {"gpu": GPU}, "dtype": "e4m3", "kernels": [keys[0].name], "columns": COLUMNS}
    records = tuned(tmp_path, head | {"rows": rows}, "--seed", "2")
    assert [record.problem for record in records] == [
        tuning.identity(searches[math].tuned_problem) for math in ("fast", "default")
    ]


def test_rows_without_columns_have_the_swizzle_second(tmp_path: Path) -> None:
    (key, *_) = kernels_of(search_of())
    row = ROW | {"chosen": 8.5, "cells": [[0, 4, 2, 8.25]]}
    (record,) = tuned(tmp_path, {"gpu": GPU, "kernels": [key.name], "rows": [row]})
    assert (record.options, record.microseconds, record.chosen_microseconds) == ((1, 4, 2, 0), 8.25, 8.5)


def test_launches_that_no_plan_makes_count_for_builds(tmp_path: Path) -> None:
    (key, *_) = kernels_of(search_of())
    row = ROW | {"cells": [[0, 77, 1, 1, 0, 8.25, 8.0]]}
    (record,) = tuned(tmp_path, {"gpu": GPU, "kernels": [key.name], "columns": COLUMNS, "rows": [row]})
    assert record.timings == ((key.digest, 8.25),)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"machine": {}}, "names no GPU"),
        ({"columns": ["kernel", "us"]}, "columns are kernel, us; expected"),
        ({"rows": [{"shape": [1, 2, 3], "cells": []}]}, "row 0 has no layouts"),
        ({"kernels": None}, "is no sweep"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, change: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = {"machine": {"gpu": GPU}, "kernels": [], "columns": COLUMNS, "rows": [ROW | {"cells": []}]}
    with pytest.raises(SystemExit, match="2"):
        tuned(tmp_path, sweep | change)
    assert says in capsys.readouterr().err
