"""Records of what was verified: how they are kept, what they say of a kernel, and what of one that has changed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import GemmRequest, GemmShape, SmArch, explain
from atomr_cutlass.generator import records
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit import kernels
from atomr_cutlass.pipeline import devices, verification
from atomr_cutlass.pipeline.verification import AUDITED, NOT_VERIFIED, RUNS, RUNS_AS_PTX, Record

TOOLS = Path(__file__).resolve().parents[2] / "tools"
KEY, OTHER = expand("full", [SmArch.SM90A])[:2]


def record(**changes: str) -> Record:
    """One of `KEY` as it is."""
    source, cutlass = verification.identity(KEY)
    plain = Record(
        KEY.name, RUNS, source, cutlass, "nvrtc 13.0.88", "NVIDIA H200", "580.1", "2026-11-22T07:50Z", "numbers", "ab"
    )
    return replace(plain, **changes)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the package looks for its records; there are none yet."""
    monkeypatch.setattr(verification, "FILE", tmp_path / "verified.jsonl")
    verification.records.cache_clear()
    yield tmp_path / "verified.jsonl"
    verification.records.cache_clear()


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_records_come_back_as_they_were_written(file: Path) -> None:
    written = [record(), record(how=AUDITED, image="cd"), record(kernel=OTHER.name, image="", compiler="nvcc 13.0.88")]
    records.write(file, written)
    assert sorted(records.read(file), key=str) == sorted(written, key=str)
    assert verification.records()[KEY.name] == [entry for entry in records.read(file) if entry.kernel == KEY.name]


def test_a_file_of_something_else_is_refused(file: Path) -> None:
    for text in ('{"pass": 1}\n', '["name", [1, "ab"]]\n', "3\n", "nonsense\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"verified.jsonl:1: not a line of verification records"):
            records.read(file)


def test_the_installed_records_are_read_and_small() -> None:
    assert verification.FILE.is_file()
    assert verification.FILE.stat().st_size < 1 << 20
    names = {key.name for key in expand("full", list(SmArch))}
    assert {entry.kernel for entry in records.read(verification.FILE)} <= names
    assert {entry.how for entry in records.read(verification.FILE)} <= {*verification.MEANINGS}


def test_a_kernel_without_a_record_is_not_verified(file: Path) -> None:
    records.write(file, [record()])
    assert str(verification.verification(OTHER)) == verification.verification(OTHER).short == NOT_VERIFIED
    assert verification.verification(OTHER).to_dict() == []


def test_a_kernel_as_it_was_recorded(file: Path) -> None:
    records.write(file, [record(), record(how=AUDITED, on="sm_90a", driver="", date="2026-11-23T00:00Z")])
    told = verification.verification(KEY)
    assert str(told) == (
        "compiled and audited (sm_90a, nvrtc 13.0.88, 2026-11-23); "
        "runs (NVIDIA H200, driver 580.1, nvrtc 13.0.88, 2026-11-22)"
    )
    assert told.short == "compiled and audited 2026-11-23, runs 2026-11-22"
    assert [(entry["how"], entry["changed"]) for entry in told.to_dict()] == [(AUDITED, False), (RUNS, False)]


@pytest.mark.parametrize("changes", [{"source": "0123456789abcdef"}, {"cutlass": "4.1.0-0123456789abcdef"}])
def test_a_kernel_that_changed_since_says_so(file: Path, changes: dict[str, str]) -> None:
    records.write(file, [record(**changes)])
    told = verification.verification(KEY)
    assert str(told).startswith("changed since 2026-11-22 (runs then: NVIDIA H200")
    assert told.short == "changed since 2026-11-22"
    assert [entry["changed"] for entry in told.to_dict()] == [True]
    records.write(file, [record(**changes), record(compiler="nvcc 13.0.88")])
    verification.records.cache_clear()
    assert verification.verification(KEY).short == "runs 2026-11-22"


def test_a_row_knows_what_it_was_compiled_from(file: Path) -> None:
    records.write(file, [record()])
    source, cutlass = verification.identity(KEY)
    row = fake_table.row(KEY)
    same = replace(row, content=f"{source} {cutlass} nvcc 13.0.88")
    older = replace(row, content=f"0123456789abcdef {cutlass} nvcc 13.0.88")
    assert verification.verification(KEY, same).short == "runs 2026-11-22"
    assert verification.verification(KEY, older).short == "changed since 2026-11-22"


def test_the_latest_record_of_a_kind_stays() -> None:
    old, new = record(date="2026-11-20T10:00Z", source="old"), record(date="2026-11-21T10:00Z")
    ptx = record(how=RUNS_AS_PTX, date="2026-11-19T10:00Z")
    assert sorted(records.merged([new, ptx], [old]), key=str) == sorted([new, ptx], key=str)


def test_what_ran_is_what_the_same_image_of_another_source_would_run() -> None:
    ran = record(date="2026-11-20T10:00Z", source="before", image="ab")
    for image, source in (("ab", record().source), ("cd", "before")):
        audited = record(how=AUDITED, image=image, date="2026-11-21T10:00Z")
        kept = next(entry for entry in records.merged([ran], [audited]) if entry.how == RUNS)
        assert (kept.source, kept.date) == (source, ran.date)


def test_tallies_count_kernels() -> None:
    known = verification.by_kernel([record(), record(how=AUDITED, source="before")])
    assert verification.tally([KEY, OTHER], known) == {
        RUNS: (1, "2026-11-22"), verification.CHANGED: (1, "2026-11-22"), NOT_VERIFIED: (1, "")
    }  # fmt: skip


def test_explain_says_how_its_kernel_was_verified(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: "no NVIDIA driver")
    monkeypatch.setattr(kernels, "where", lambda _key, _target: None)
    fake_table.install(monkeypatch, fake_table.rows_of("full", [SmArch.SM90A]))
    shape = GemmShape(512, 512, 512)
    request = GemmRequest(shape, dtype=D.BF16, arch=SmArch.SM90A)
    assert "verified: not verified" in str(explain(request))
    key = next(key for key in expand("full", [SmArch.SM90A]) if key.name == explain(request).kernel)
    source, cutlass = verification.identity(key)
    records.write(file, [record(kernel=key.name, source=source, cutlass=cutlass)])
    verification.records.cache_clear()
    assert "verified: runs (NVIDIA H200, driver 580.1, nvrtc 13.0.88, 2026-11-22)" in str(explain(request))


# --- tools ---


def test_what_passes_wrote_is_taken_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verified = tool("verified")
    lines = [asdict(record()), {**asdict(record(kernel=OTHER.name)), "faults": ["1 LDL"]}]
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kernel": "cut off')
    gone = tmp_path / "gone.jsonl"
    gone.write_text(json.dumps(asdict(record(kernel="of_yesterday"))) + "\n")
    into = tmp_path / "verified.jsonl"
    sys.argv[:], before = ["verified.py", str(raw), str(gone), "--into", str(into)], sys.argv[:]
    try:
        assert verified.main() == 1
    finally:
        sys.argv[:] = before
    assert records.read(into) == [record()]
    said = capsys.readouterr().out
    assert f"not taken in: {OTHER.name} (NVIDIA H200): 1 LDL" in said
    count = len(expand("full", [SmArch.SM90A]))
    assert re.search(rf"sm_90a +{count} kernels: runs 1 \(2026-11-22\), not verified {count - 1}\n", said)


def test_an_audit_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    audit = tool("audit_table")
    path = tmp_path / "audit.jsonl"
    path.write_text(json.dumps(asdict(record())) + '\n{"kernel": "cut off')
    source, cutlass = verification.identity(KEY)
    assert audit.done([path, tmp_path / "none.jsonl"]) == {(KEY.name, source, cutlass, "nvrtc 13.0.88")}
