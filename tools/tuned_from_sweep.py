"""Tuned choices of a recorded sweep over tiles, for builds with a budget.

    python tools/tuned_from_sweep.py benchmarks/results/2026-11-22-h200-tiles.json --seed 12 --out tiles.jsonl
    python -m generator --list --keys tiles.jsonl --budget-cells 12

The sweep has `kernels`, their names, and `rows`: shape, layouts of A and B, seed, and `cells`, each a kernel's number,
swizzle, raster order and microseconds. Kernels that are no cell of the matrix any more are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atomr_cutlass import CutlassDtype, GemmLayout, GemmRequest, GemmShape, SmArch, TuneRecord
from atomr_cutlass.ops.gemm.operation import GemmOperation
from atomr_cutlass.pipeline import devices, select, tuning

LAYOUTS = {"r": GemmLayout.ROW_MAJOR, "c": GemmLayout.COL_MAJOR}


def record_of(row: Mapping[str, Any], names: Sequence[str], gpu: str) -> TuneRecord | None:
    """The record of a row; None where none of its kernels is there any more."""
    layout_a, layout_b = (LAYOUTS[letter] for letter in row["layouts"])
    shape = GemmShape(*row["shape"])
    request = GemmRequest(shape, dtype=CutlassDtype.BF16, layout_a=layout_a, layout_b=layout_b, arch=SmArch.SM90A)
    search = GemmOperation().search(request, devices.imagined(SmArch.SM90A))
    if search is None:
        return None
    formulations = list(itertools.chain.from_iterable(search.formulations))
    keys = {key.name: key for key in select.matrix("gemm", SmArch.SM90A)}
    timings: dict[str, float] = {}
    fastest = None
    for number, swizzle, raster, took in sorted(row["cells"], key=lambda cell: cell[3]):
        key = keys.get(names[number])
        places = (place for place, formulation in enumerate(formulations) if key and search.supports(key, formulation))
        place = next(places, None)
        if key is not None and place is not None:
            timings.setdefault(key.digest, took)
            fastest = fastest or (key, place, 1, swizzle, raster, took)
    if fastest is None:
        return None
    return TuneRecord(
        gpu, tuning.identity(search.tuned_problem), *fastest, fastest[0].name, row["chosen"], len(row["cells"]),
        tuple(timings.items()),
    )  # fmt: skip


def main() -> int:
    """Writes the records; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--seed", type=int, help="of the rows; default: all")
    parser.add_argument("--out", type=Path, required=True, help="file of tuned choices")
    arguments = parser.parse_args()
    sweep = json.loads(arguments.sweep.read_text(encoding="utf-8"))
    rows = [row for row in sweep["rows"] if arguments.seed in (None, row["seed"])]
    records = [record_of(row, sweep["kernels"], sweep["gpu"]) for row in rows]
    lines = [record.line() for record in records if record is not None]
    arguments.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} problems")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
