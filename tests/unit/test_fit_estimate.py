"""Sweeps as `fit_estimate.py` reads them."""

import json

from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.matrix import expand
from benchmarks.fit_estimate import read


def test_the_same_launch_timed_twice_counts_with_its_least_time(tmp_path):
    """One row of A may be put to a kernel copied, too: another launch, with the same options."""
    keys = {key.name: key for key in expand("full", [SmArch.SM90A])}
    name = next(
        name for name in keys if "gemm_bf16_bf16_f32_bf16_bf16_128x128x64_1x1x4_0_ttt" in name and "_few_" in name
    )
    cells = [[0, 1, 1, 0, 0, 8.5, 7.6], [0, 1, 1, 0, 0, 11.8, 9.6]]
    row = {"group": "few rows", "seed": 56, "shape": [1, 3160, 2680], "layouts": "rr", "torch": 10.2}
    columns = ["kernel", "split_k", "swizzle", "raster", "width", "us", "model_us"]
    for number, order in enumerate((cells, cells[::-1])):
        path = tmp_path / f"sweep{number}.json"
        recorded = {"machine": {"gpu": "NVIDIA H200"}, "kernels": [name], "columns": columns}
        path.write_text(json.dumps(recorded | {"rows": [row | {"cells": order}]}))
        (found,) = read(path, keys)
        assert [list(timings.values()) for timings in found.timings] == [[8.5e-6]]
