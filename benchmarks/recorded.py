"""Results of gemm_random.py: read from several files at once, and made small enough to be kept.

    python benchmarks/recorded.py random.json benchmarks/results/2026-11-23-h200-peers.json

A kept file has `columns`, `kernels` (names), and rows as lists: a kernel is its place among the names, slices of K,
swizzle, raster order and, since there is one, width. The other sides' microseconds are left out: they are their ratios
times ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

OTHERS = ("torch", "lt", "tuned", "bound", "triton", "invariant")
"""Sides that ours is compared with, as rows name them."""
KERNELS = ("kernel", "tuned_kernel")
KEPT = (
    "seed", "group", "shape", "aligned", "layout", "us", "of_limit", "model_us", "difference", "lt_candidates",
    "spread", "clock_mhz", "watts", *(f"{side}_ratio" for side in OTHERS), *KERNELS,
)  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """Rows of several files, and what their figures depend on.

    Attributes:
        rows: one for each problem.
        files: the files' contents, without their rows.
    """

    rows: tuple[Row, ...]
    files: tuple[Mapping[str, Any], ...]

    @property
    def gpu(self) -> str:
        """The GPU's model."""
        return str(self.files[0]["machine"]["gpu"])

    @property
    def read_rates(self) -> tuple[float, ...]:
        """Bytes a second that reading alone reached, of each file."""
        return tuple(float(of["read_bytes_per_second"]) for of in self.files)


def identity(row: Row) -> tuple[Any, ...]:
    """The problem of a row: seed, group, extents, layouts."""
    return row["seed"], row["group"], *row["shape"], row["layout"]


def read(paths: Iterable[Path]) -> Recorded:
    """Puts files of results together, whether or not they were made small.

    Raises:
        ValueError: they are of several models of GPU.
    """
    rows: dict[Any, Row] = {}
    files = []
    for path in paths:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        for row in _rows(recorded):
            rows.setdefault(identity(row), row)
        files.append(recorded)
    gpus = {of["machine"]["gpu"] for of in files}
    if len(gpus) != 1:
        raise ValueError(f"results of one model of GPU make a report, not of {sorted(map(str, gpus))}")
    return Recorded(tuple(rows.values()), tuple(files))


def _rows(recorded: dict[str, Any]) -> list[Row]:
    """Takes the rows out of a file's content."""
    columns, kernels = recorded.pop("columns", None), recorded.pop("kernels", [])
    rows = recorded.pop("rows")
    if columns is None:
        return list(rows)
    found = []
    for values in rows:
        row = {name: value for name, value in zip(columns, values, strict=True) if value is not None}
        row |= {f"{side}_us": round(row[f"{side}_ratio"] * row["us"], 2) for side in OTHERS if f"{side}_ratio" in row}
        for name in KERNELS:
            if name in row:
                place, *options = row[name]
                row[name] = [kernels[place], *options]
        found.append(row)
    return found


def small(recorded: Mapping[str, Any]) -> str:
    """A file's content as it is kept: a row a line."""
    kernels: dict[str, int] = {}

    def value(row: Row, name: str) -> Any:
        if name not in KERNELS or name not in row:
            return row.get(name)
        kernel, *options = row[name]
        return [kernels.setdefault(kernel, len(kernels)), *options]

    rows = [json.dumps([value(row, name) for name in KEPT], separators=(",", ":")) for row in recorded["rows"]]
    failures = [failure for failure in recorded["failures"] if failure["error"] != "out of time"]
    head = {**recorded, "failures": failures, "kernels": list(kernels), "columns": list(KEPT)}
    del head["rows"]
    text = json.dumps(head, indent=1).removesuffix("\n}")
    return f'{text},\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(small(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
