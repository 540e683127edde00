"""Compiles kernels at run time, several at once, so that tests of them find them on disk.

    python tools/compile_table.py --out results/compile.json                  # every kernel of the table
    python tools/compile_table.py --out results/compile.json --matrix 90a     # every cell of the matrix for an arch
    python tools/compile_table.py --out results/compile.json --matrix '80:*fprop*,*grouped*' --matrix '89:*e4m3*'
    python tools/compile_table.py --out results/compile.json --trees          # what tests of epilogue trees launch

Without a GPU it compiles for sm_90a. With --seconds it starts none after that time: what is done is on disk, and
another call goes on from there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import atomr_cutlass as ac
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import family
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.jit import kernels
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.devices import Device

HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers"
OF_TREES = ("tree_cases", "matmul_gpu", "grouped_gpu", "conv_tree_cases")
"""Modules there whose `keys` are what the tests of epilogue trees launch on a device."""


def keys_of_trees(device: Device) -> list[KernelKey]:
    """The kernels that the tests of epilogue trees launch."""
    sys.path.insert(0, str(HELPERS))
    return [key for name in OF_TREES for key in importlib.import_module(name).keys(device)]


def main() -> int:
    """Compiles; returns 1 if a kernel did not compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument(
        "--matrix",
        action="append",
        default=[],
        metavar="ARCHS[:NAMES]",
        help="compile the cells of these archs instead, such as 80;90a, or those whose names match; may be repeated",
    )
    parser.add_argument(
        "--trees", action="store_true", help="compile the kernels of the tests of epilogue trees instead"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no kernel after this time")
    arguments = parser.parse_args()
    device = devices.get(0) if devices.available() else devices.imagined(SmArch.SM90A)
    keys: list[KernelKey] = keys_of_trees(device) if arguments.trees else []
    if arguments.matrix:
        selections = [text.partition(":") for text in arguments.matrix]
        keys += [
            key
            for archs, _, names in selections
            for key in Selection(preset="full", archs=archs, kernels=names).keys()  # noqa: SIM118 - not a dict
        ]
    elif not arguments.trees:
        keys = [info.key for info in ac.kernels() if devices.rank_arch(info.key.arch, device, ptx=info.ptx) is not None]
    # Once each; the longest first, so that none of them is left over at the end.
    keys = sorted(dict.fromkeys(keys), key=lambda key: family(key).compile_seconds, reverse=True)
    report: dict[str, object] = {}
    began = time.perf_counter()

    def compiled(key: KernelKey) -> tuple[str, object]:
        start = time.perf_counter()
        if start - began > arguments.seconds:
            return key.name, None
        try:
            _, origin = kernels.load(key, kernels.target_for(key, device))
        except ac.CutlassError as error:
            return key.name, f"{type(error).__name__}: {error}"[:600]
        return key.name, {"origin": origin, "seconds": round(time.perf_counter() - start, 2)}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, outcome in pool.map(compiled, keys):
            if outcome is not None:
                report[name] = outcome
            if isinstance(outcome, str):
                print(f"{name}: {outcome}", flush=True)
    failed = sum(isinstance(outcome, str) for outcome in report.values())
    left = len(keys) - len(report)
    summary = {
        "kernels": len(report),
        "failed": failed,
        "left": left,
        "seconds": round(time.perf_counter() - began, 1),
        "jobs": arguments.jobs,
        "origins": dict(Counter(entry["origin"] for entry in report.values() if isinstance(entry, dict))),
        "each": report,
    }
    arguments.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print("{kernels} kernels, {failed} failed, {left} left, {seconds} s with {jobs} at once".format(**summary))
    return 1 if failed or left else 0


if __name__ == "__main__":
    raise SystemExit(main())
