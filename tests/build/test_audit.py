"""The audit compiles cells, looks at their machine code, and goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atomr_cutlass.errors import DeviceUnavailableError
from atomr_cutlass.generator import records
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit.toolchain import toolchain
from atomr_cutlass.pipeline import verification

ROOT = Path(__file__).resolve().parents[2]
PATTERN = "cutlass_cast_e5m2"


def audited(out: Path, *more: str) -> str:
    words = [sys.executable, "tools/audit_table.py", "--archs", "100a", "--kernels", PATTERN, "--out", str(out), *more]
    done = subprocess.run([*words, "--jobs", "2"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_records_are_of_the_kernels_as_they_are(tmp_path: Path) -> None:
    try:
        toolchain()
    except DeviceUnavailableError as error:
        pytest.skip(str(error))
    out = tmp_path / "audit.jsonl"
    keys = [key for key in expand("full", [SmArch.SM100]) if PATTERN in key.name]
    assert "1 right, 0 wrong, 0 left" in audited(out, "--limit", "1")
    out.write_text(out.read_text() + '{"kernel": "cut off', encoding="utf-8")
    assert f"{len(keys)} kernels, 1 done before" in audited(out)
    lines = [json.loads(line) for line in out.read_text().splitlines() if "cut off" not in line]
    known = verification.by_kernel(map(records.of_raw, lines))
    assert {*known} == {key.name for key in keys}
    for key in keys:
        (record,) = verification.verification(key, known=known).records
        assert (record.how, record.on, len(record.image)) == (verification.AUDITED, "sm_100a", 16)
        assert record.compiler.startswith("nvrtc ")
    assert f"{len(keys)} kernels, {len(keys)} done before" in audited(out)
