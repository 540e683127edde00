"""Reads and writes tuned choices of GEMM as the CSV files that cutlass_profiler writes with `--output`.

A row is one kernel on one problem: the kernel by CUTLASS's procedural name, the problem by extents and by
`type:layout` of each matrix, and the run time in milliseconds. The columns, their units and the counts of bytes and
operations follow the profiler's documentation and reports of CUTLASS 3.8 (with D, raster order and cluster). Leading
dimensions and alignments, which have no columns, are those of dense matrices.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CutlassError, InvalidOperandError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.key import REALIGNED, KernelKey, instruction_shape, opcode_class
from ..generator.matrix import cells
from ..generator.rules import FEW, SPLIT
from ..jit import files
from . import devices, table, tuning
from .operation import operation_of, planned_operations, request_from
from .reduction import INSTRUCTION_BYTES
from .request import Request, RequestOptions
from .search import ALONG_M, ALONG_N, HEURISTIC
from .tuning import TuneRecord

SUFFIX = ".csv"

NEEDED = ("Operation", "m", "n", "k", "A", "B", "C", "Runtime")

_RASTERS = {"heuristic": HEURISTIC, "along_m": ALONG_M, "along_n": ALONG_N}
_LAYOUTS = {"row": "r", "column": "c"}
_TYPES = {"fe4m3": "e4m3", "fe5m2": "e5m2", "tf32": "f32"}
"""Operands' element types in requests, for the profiler's names that differ from ours."""


def write(records: Iterable[TuneRecord], path: Path) -> int:
    """Writes the records of plain GEMMs over dense matrices and returns their number; others have no row."""
    rows = [row for record in records if (row := _row(record)) is not None]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ("Problem", *(rows[0] if rows else NEEDED)))
    writer.writeheader()
    writer.writerows({"Problem": number, **row} for number, row in enumerate(rows, 1))
    files.save(path, text.getvalue().encode())
    return len(rows)


def read(path: Path, gpu: str | None) -> tuple[list[TuneRecord], int]:
    """The fastest kernel of each problem of a file, and the number of rows that are left out.

    Rows of failed or wrong runs and of kernels that are not ours are left out. `gpu` is the name of the model that was
    measured, which files do not have; None is that of GPU 0.
    """
    gpu = devices.get(0).name if gpu is None else gpu
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise InvalidOperandError(f"{path} is none of cutlass_profiler's: it has no column {missing[0]!r}")
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidOperandError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    names = _names()
    found: dict[str, list[TuneRecord]] = defaultdict(list)
    for line, row in rows:
        try:
            record = _record(row, names, gpu)
        except (ValueError, KeyError, TypeError) as error:  # TypeError: a row that ends early has None
            raise InvalidOperandError(f"{path}:{line}: {error}") from error
        if record is not None:
            found[record.problem].append(record)
    kept = []
    for records in found.values():
        best = min(records, key=lambda record: record.rank)
        timings = tuning.timings((record.key, record.microseconds) for record in records)
        kept.append(dataclasses.replace(best, tried=len(records), timings=timings))
    return kept, len(rows) - sum(map(len, found.values()))


def _names() -> Mapping[str, list[KernelKey]]:
    """Keys of the matrix and the table by their names, with and without the digest, which CUTLASS's names lack."""
    found: dict[str, list[KernelKey]] = defaultdict(list)
    keys = itertools.chain((key for _, key in cells(list(SmArch))), (info.key for info in table.rows()))
    for key in filter(_profiled, dict.fromkeys(keys)):
        found[key.name].append(key)
        found[key.name.rpartition("_")[0]].append(key)
    return found


def _profiled(key: KernelKey) -> bool:
    """Whether the profiler's files have rows of such kernels."""
    return key.op in planned_operations() and planned_operations()[key.op].profiled


def _record(row: Mapping[str, str], names: Mapping[str, list[KernelKey]], gpu: str) -> TuneRecord | None:
    """The record of a row; None for a failed or wrong run, and for a kernel that is not ours."""
    if row.get("Status", "success") != "success" or row.get("Disposition") in ("failed", "incorrect"):
        return None
    for key in names.get(row["Operation"], ()):
        try:
            search = operation_of(request := _request(row, key)).search(request, devices.imagined(key.arch))
        except CutlassError:  # the kernel does not take these types
            continue
        if search is None:
            continue
        for number, formulation in enumerate(itertools.chain.from_iterable(search.formulations)):
            if search.supports(key, formulation):
                microseconds = round(float(row["Runtime"]) * 1e3, 3)
                return TuneRecord(
                    gpu, tuning.identity(search.tuned_problem), key, number, int(row.get("split_k_slices") or 1),
                    int(row.get("swizzle_size") or 1), _raster(row, key, formulation), microseconds, key.name,
                    microseconds, 1,
                )  # fmt: skip
    return None


def _raster(row: Mapping[str, str], key: KernelKey, formulation: Any) -> int:
    """The raster order of a row; for CUTLASS's heuristic the one that it chooses, along the shorter side."""
    raster = _RASTERS[row.get("raster_order") or "heuristic"]
    if raster != HEURISTIC or key.generation != "sm90" or key.mainloop in (FEW, SPLIT, REALIGNED):
        return raster
    rows, columns = -(-formulation.m // key.tile[0]), -(-formulation.n // key.tile[1])
    return ALONG_M if columns > rows else ALONG_N


def _request(row: Mapping[str, str], key: KernelKey) -> Request:
    """The request of a row."""
    types, layouts = zip(*(_matrix(row.get(name) or row["C"]) for name in "ABD"), strict=True)
    values = {
        "m": int(row["m"]), "n": int(row["n"]), "k": int(row["k"]), "batch": int(row.get("batch_count") or 1),
        "dtype": types[0], "dtype_b": types[1] if types[1] != types[0] else "", "out_dtype": types[2],
        "layout": "".join(layouts), "beta": float(row.get("beta") or 0),
        "precision": key.math if key.math in ("ieee", "tf32", "3xtf32") else "", "fast_accum": key.math == "fast",
    }  # fmt: skip
    return request_from(key.op, RequestOptions(0, values))


def _matrix(text: str) -> tuple[str, str]:
    """The element type and the layout that text such as `bf16:row` names."""
    element, _, layout = text.partition(":")
    return _TYPES.get(element, element), _LAYOUTS[layout]


def _row(record: TuneRecord) -> dict[str, Any] | None:
    """A record as a row without its number; None if files have no row for it."""
    problem = json.loads(record.problem)
    if not _profiled(record.key) or problem.get("epilogue") != "lc" or problem["scale_type"] or record.width:
        return None
    shape, batches = problem["d"]["shape"], problem["d"]["shape"][:-2]
    (m, n), k, batch = shape[-2:], problem["a"]["shape"][-1], math.prod(batches)
    types = {name: CutlassDtype(problem[name]["dtype"]) for name in "abd"}
    key, seconds = record.key, record.microseconds / 1e6
    layouts = {name: "row" if problem[name]["strides"][-1] == 1 else "column" for name in "abd"}
    shown = {name: "tf32" if key.math == "tf32" and name != "d" else types[name].cutlass_name for name in "abd"}
    described = {name: f"{shown[name]}:{layouts[name]}" for name in "abd"}
    beta = 0 if problem["c"] is None else 1
    inst_m, inst_n, inst_k = (
        instruction_shape(key) if key.generation == "sm80" else (64, key.tile[1], INSTRUCTION_BYTES * 8 // key.a.bits)
    )
    moved = sum(rows * columns * types[name].bits for name, rows, columns in (("a", m, k), ("b", k, n), ("d", m, n)))
    moved = batch * (moved + beta * m * n * types["d"].bits) // 8
    products = 2 * batch * (m * n * k + m * n)
    raster = next(name for name, value in _RASTERS.items() if value == record.raster)
    major, minor = key.arch.capability
    compiled = 10 * major + minor
    row = {
        "Provider": "CUTLASS", "OperationKind": record.key.op, "Operation": key.name, "Disposition": "passed",
        "Status": "success", "gemm_kind": "universal", "m": m, "n": n, "k": k, "A": described["a"], "B": described["b"],
        "C": described["d"], "D": described["d"], "alpha": 1, "beta": beta, "split_k_mode": "serial",
        "split_k_slices": record.split_k, "batch_count": batch, "raster_order": raster, "use_pdl": "false",
        "swizzle_size": record.swizzle, "op_class": opcode_class(key), "accum": key.acc.cutlass_name,
        **dict(zip(("cta_m", "cta_n", "cta_k"), key.tile, strict=True)),
        **dict(zip(("cluster_m", "cluster_n", "cluster_k"), key.cluster, strict=True)), "stages": key.stages,
        **dict(zip(("warps_m", "warps_n", "warps_k"), key.warps, strict=True)), "inst_m": inst_m, "inst_n": inst_n,
        "inst_k": inst_k, "min_cc": compiled, "max_cc": compiled, "Bytes": moved, "Flops": products,
        "Flops/Byte": products // max(1, moved), "Runtime": record.microseconds / 1e3,
        "GB/s": round(moved / 2**30 / seconds, 3), "GFLOPs": round(products / 1e9 / seconds, 1),
    }  # fmt: skip
    # A reader must find the same problem: values without a column, such as strides, are those of dense matrices.
    read_back = _record({name: str(value) for name, value in row.items()}, {key.name: [key]}, record.gpu)
    return row if read_back is not None and read_back.problem == record.problem else None
