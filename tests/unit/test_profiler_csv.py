"""cutlass_profiler's CSV: what is written is read back as the same records, and NVIDIA's own rows are understood."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmLayout, GemmRequest, GemmShape, SmArch
from atomr_cutlass.pipeline import devices, profiler_csv, select, tuning
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.tuning import TuneRecord

COLUMN, ROW = GemmLayout.COL_MAJOR, GemmLayout.ROW_MAJOR
GPU = "some GPU"
REQUESTS = {
    "bf16": GemmRequest(GemmShape(512, 1024, 768), dtype=D.BF16, layout_b=COLUMN, arch=SmArch.SM90A),
    "few rows": GemmRequest(GemmShape(4, 4096, 4096), dtype=D.BF16, arch=SmArch.SM90A),
    "batched with C": GemmRequest(
        GemmShape(64, 96, 128, 3), dtype=D.F16, epilogue=ac.GemmEpilogue(beta=1.0), arch=SmArch.SM90A
    ),
    "column-major D": GemmRequest(GemmShape(64, 96, 128), dtype=D.F16, layout_c=COLUMN, arch=SmArch.SM90A),
    "tf32": GemmRequest(GemmShape(512, 1024, 768), dtype=D.TF32, layout_b=COLUMN, arch=SmArch.SM90A),
    "ieee": GemmRequest(GemmShape(33, 65, 129), dtype=D.F32, arch=SmArch.SM80),
    "3xtf32": GemmRequest(GemmShape(64, 64, 64), dtype=D.F32, precision="3xtf32", arch=SmArch.SM80),
    "f64": GemmRequest(GemmShape(64, 64, 64), dtype=D.F64, arch=SmArch.SM80),
    "int8": GemmRequest(GemmShape(64, 64, 64), dtype=D.I8, layout_b=COLUMN, arch=SmArch.SM90A),
    "fp8": GemmRequest(GemmShape(64, 64, 64), dtype=D.F8E4M3, layout_b=COLUMN, fast_accum=True, arch=SmArch.SM90A),
}


def record_of(request: Any, place: int = 0) -> TuneRecord:
    """A record of the kernel of the matrix in this place."""
    assert request.arch is not None
    search = operation_of(request).search(request, devices.imagined(request.arch))
    assert search is not None
    candidate = [cell for cell in select.rank_cells(search) if cell.key.math == request.math][place]
    formulations = [formulation for group in search.formulations for formulation in group]
    return TuneRecord(
        GPU, tuning.identity(search.problem), candidate.key, formulations.index(candidate.formulation),
        candidate.split_k, candidate.swizzle, candidate.raster, 12.345, candidate.key.name, 12.345, 1,
        ((candidate.key.digest, 12.345),),
    )  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    record = record_of(REQUESTS[name])
    assert profiler_csv.write([record], path) == 1
    assert profiler_csv.read(path, GPU) == ([record], 0)


def test_the_fastest_of_a_problem_counts(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    first, second = (record_of(REQUESTS["bf16"], place) for place in (0, 1))
    second = dataclasses.replace(second, microseconds=11.0)
    assert profiler_csv.write([first, second], path) == 2
    (found,), left_out = profiler_csv.read(path, GPU)
    assert (found.key, found.microseconds, found.tried, left_out) == (second.key, 11.0, 2, 0)
    assert found.timings == (
        (second.key.digest, 11.0),
        (first.key.digest, 12.345),
    )  # a build with a budget asks for them


def test_records_without_a_form_there_are_left_out(tmp_path: Path) -> None:
    biased = dataclasses.replace(REQUESTS["bf16"], epilogue=ac.GemmEpilogue(bias=True))
    grouped = ac.GroupedGemmRequest(ac.GroupedGemmShape([GemmShape(8, 256, 512)]), dtype=D.BF16, arch=SmArch.SM90A)
    plain = record_of(REQUESTS["bf16"])
    padded = dataclasses.replace(plain, problem=plain.problem.replace('"strides":[768,1]', '"strides":[776,1]'))
    assert padded.problem != plain.problem
    path = tmp_path / "profile.csv"
    assert profiler_csv.write([record_of(biased), record_of(grouped), padded, plain], path) == 1
    assert profiler_csv.read(path, GPU)[0] == [plain]


def test_counts_are_the_profilers(tmp_path: Path) -> None:
    """Bytes, operations and rates of a row that the profiler wrote for 4352x4096x4096."""
    request = GemmRequest(GemmShape(4352, 4096, 4096), dtype=D.BF16, layout_b=COLUMN, arch=SmArch.SM90A)
    record = dataclasses.replace(record_of(request), microseconds=235.348)
    path = tmp_path / "profile.csv"
    profiler_csv.write([record], path)
    (row,) = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    assert list(row)[:10] == [
        "Problem", "Provider", "OperationKind", "Operation", "Disposition", "Status", "gemm_kind", "m", "n", "k",
    ]  # fmt: skip
    assert list(row)[-7:] == ["max_cc", "Bytes", "Flops", "Flops/Byte", "Runtime", "GB/s", "GFLOPs"]
    assert len(row) == 45
    named = [row[name] for name in ("Bytes", "Flops", "Flops/Byte", "Runtime", "A", "B", "raster_order", "accum")]
    assert named[:6] == ["104857600", "146064539648", "1392", "0.235348", "bf16:row", "bf16:column"]
    assert named[7] == "f32"
    assert float(row["GB/s"]) == pytest.approx(414.944, rel=1e-5)
    assert float(row["GFLOPs"]) == pytest.approx(620633, rel=1e-5)


def test_rows_of_the_profiler_itself(tmp_path: Path) -> None:
    """Names without our digest, another column order, the raster order left to CUTLASS; other kernels are counted."""
    key = record_of(REQUESTS["bf16"]).key
    name = key.name.rpartition("_")[0]
    path = tmp_path / "profile.csv"
    path.write_text(
        "Problem,Provider,OperationKind,Operation,Disposition,Status,m,n,k,A,B,C,D,beta,raster_order,swizzle_size,Runtime\n"
        f"1,CUTLASS,gemm,{name},not_verified,success,512,1024,768,bf16:row,bf16:column,bf16:row,bf16:row,0,heuristic,2,0.01\n"
        f"1,CUTLASS,gemm,{name},incorrect,success,512,1024,768,bf16:row,bf16:column,bf16:row,bf16:row,0,heuristic,1,0.001\n"
        f"1,CUTLASS,gemm,{name},passed,invalid_problem,512,1024,768,bf16:row,bf16:column,bf16:row,bf16:row,0,along_m,1,0\n"
        "1,CUTLASS,gemm,cutlass_other,passed,success,512,1024,768,bf16:row,bf16:column,bf16:row,bf16:row,0,along_m,1,0.001\n",
        encoding="utf-8",
    )
    (record,), left_out = profiler_csv.read(path, GPU)
    assert left_out == 3
    assert (record.key.name.rpartition("_")[0], record.microseconds, record.swizzle) == (name, 10.0, 2)
    assert record.raster in (1, 2)
    assert record.problem == record_of(REQUESTS["bf16"]).problem


@pytest.mark.parametrize(
    ("text", "says"),
    [("a,b\n1,2\n", "is none of cutlass_profiler's: it has no column 'Operation'"), (None, "cannot read")],
)
def test_other_files(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ac.InvalidOperandError, match=says):
        profiler_csv.read(path, GPU)


def test_rows_without_numbers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    profiler_csv.write([record_of(REQUESTS["bf16"])], path)
    path.write_text(path.read_text(encoding="utf-8").replace(",512,1024,", ",many,1024,"), encoding="utf-8")
    with pytest.raises(ac.InvalidOperandError, match=r"profile.csv:2: .*many"):
        profiler_csv.read(path, GPU)
