"""Tuned choices of a recorded sweep over kernels, for builds with a budget.

    python tools/tuned_from_sweep.py benchmarks/results/2026-11-22-h200-tiles.json --seed 12 --out tiles.jsonl
    python -m generator --list --keys tiles.jsonl --budget-cells 12

A sweep (`benchmarks/sweep.py`) has `kernels`, their names, and `rows`: shape, layouts of A and B, seed, of fp8 the math
mode, and `cells`, each a kernel's number, launch options, microseconds and the model's, as `columns` says. Older ones
have no columns: each cell is then a kernel's number, swizzle, raster order and microseconds, and the row has the
microseconds of what the model chose. Kernels that are no cell of the matrix any more are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atomr_cutlass import CutlassDtype, GemmLayout, GemmRequest, GemmShape, SmArch, TuneRecord
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.rules import FP8_TYPES
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.operation import GemmOperation
from atomr_cutlass.pipeline import devices, select, tuning
from atomr_cutlass.pipeline.search import candidates_of

LAYOUTS = {"r": GemmLayout.ROW_MAJOR, "c": GemmLayout.COL_MAJOR}
FIRST_COLUMNS = ("kernel", "swizzle", "raster", "us")
"""Those of sweeps that do not name them."""
NEEDED = {*FIRST_COLUMNS}
OPTIONS = {"split_k": 1, "swizzle": 1, "raster": 0, "width": 0}
"""Launch options, with their values where a sweep has no column for them."""


class Launch(NamedTuple):
    """A timed launch of a kernel; the key is None where the matrix has no such kernel."""

    name: str
    key: KernelKey | None
    options: tuple[int, ...]
    us: float
    model_us: float | None


class Sweep:
    """A sweep's file.

    Raises:
        ValueError: it is none, or lacks something; says what.
    """

    def __init__(self, sweep: Any, path: Path) -> None:
        """Reads the content of a file."""
        if not isinstance(sweep, Mapping) or not all(isinstance(sweep.get(name), list) for name in ("kernels", "rows")):
            raise ValueError(f"{path} is no sweep: it has no lists `kernels` and `rows`")
        self.gpu = (sweep.get("machine") or sweep).get("gpu")
        if not self.gpu:
            raise ValueError(f"{path} names no GPU, as `gpu` of `machine`: tuned choices are of one model")
        self.columns = tuple(sweep.get("columns") or FIRST_COLUMNS)
        if not set(self.columns) >= NEEDED:
            raise ValueError(
                f"{path}: columns are {', '.join(self.columns)}; expected {', '.join(sorted(NEEDED))} and others"
            )
        for number, row in enumerate(sweep["rows"]):
            for name in ("shape", "layouts", "cells"):
                if name not in row:
                    raise ValueError(f"{path}: row {number} has no {name}")
        self.dtype = CutlassDtype(sweep.get("dtype", "bf16"))
        self.rows: Sequence[Mapping[str, Any]] = sweep["rows"]
        self._names: Sequence[str] = sweep["kernels"]
        self._keys = {key.name: key for key in select.matrix("gemm", SmArch.SM90A)}

    def request(self, row: Mapping[str, Any]) -> GemmRequest:
        """The product of a row: of fp8 with the scales of two tensors."""
        layout_a, layout_b = (LAYOUTS[letter] for letter in row["layouts"])
        return GemmRequest(
            GemmShape(*row["shape"]), dtype=self.dtype, layout_a=layout_a, layout_b=layout_b, arch=SmArch.SM90A,
            scaling="tensor" if self.dtype in FP8_TYPES else None, fast_accum=row.get("math") == "fast",
        )  # fmt: skip

    def launches(self, row: Mapping[str, Any]) -> list[Launch]:
        """The launches of a row, the fastest first."""
        found = []
        for cell in row["cells"]:
            values = dict(zip(self.columns, cell, strict=True))
            name = self._names[values["kernel"]]
            options = tuple(int(values.get(option, default)) for option, default in OPTIONS.items())
            found.append(Launch(name, self._keys.get(name), options, values["us"], values.get("model_us")))
        return sorted(found, key=lambda launch: launch.us)


def record_of(sweep: Sweep, row: Mapping[str, Any]) -> TuneRecord | None:
    """The record of a row, of the fastest launch that plans make; None where the matrix has none of its kernels.

    If plans make none of its launches any more, the record is of the fastest: a build counts the times of its kernels,
    and the selection passes it over.
    """
    search = GemmOperation().search(sweep.request(row), devices.imagined(SmArch.SM90A))
    if search is None:
        return None
    launches = sweep.launches(row)
    served = [launch for launch in launches if _serves(search, launch)]
    made = ((launch, _formulation(search, launch)) for launch in served)
    fastest, formulation = next(((launch, place) for launch, place in made if place is not None), (None, 0))
    fastest = fastest or next(iter(served), None)
    if fastest is None or fastest.key is None:
        return None
    chosen, chosen_us = fastest.name, row.get("chosen", fastest.us)
    if all(launch.model_us is not None for launch in launches):
        chosen = min(launches, key=lambda launch: launch.model_us or 0.0).name
        chosen_us = next(launch.us for launch in launches if launch.name == chosen)
    times = tuning.timings((launch.key, launch.us) for launch in served if launch.key is not None)
    split_k, swizzle, raster, width = fastest.options
    return TuneRecord(
        sweep.gpu, tuning.identity(search.tuned_problem), fastest.key, formulation, split_k, swizzle, raster,
        fastest.us, chosen, chosen_us, len(launches), times, width,
    )  # fmt: skip


def _serves(search: GemmSearch, launch: Launch) -> bool:
    return launch.key is not None and bool(search.serves(launch.key))


def _formulation(search: GemmSearch, launch: Launch) -> int | None:
    """The place of the formulation in which plans launch a kernel so; None where they do not."""
    if launch.key is None:
        return None
    for place, formulation in enumerate(itertools.chain.from_iterable(search.formulations)):
        for candidate in candidates_of(search, launch.key, None, [formulation]):
            made = {other.options[:-1] for other in search.launches(candidate)}
            if launch.options[:-1] in made and launch.options[-1] in search.widths(candidate):
                return place
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Writes the records; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--seed", type=int, help="of the rows; default: all")
    parser.add_argument("--out", type=Path, required=True, help="file of tuned choices")
    arguments = parser.parse_args(words)
    try:
        sweep = Sweep(json.loads(arguments.sweep.read_text(encoding="utf-8")), arguments.sweep)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = [row for row in sweep.rows if arguments.seed in (None, row.get("seed"))]
    lines = [record.line() for record in (record_of(sweep, row) for row in rows) if record is not None]
    arguments.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} problems of {len(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
