"""Recording which kernels a process uses, and freezing it, on a fake GPU: the cases are in `frozen_cases.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fake_cases
import fake_kernels
import fake_pack
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.matrix import expand

CASES_FILE = "frozen_cases.py"
CASES = fake_cases.names(CASES_FILE)


def _pack(folder: Path) -> Path:
    cells = [k for k in expand("full", [SmArch.SM80]) if k.math == "ieee" and k.d is D.F32]
    return fake_kernels.make_pack(folder / "pack.so", cells)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    return fake_cases.outcome(CASES_FILE, fake_pack.make_driver(folder / "driver"), [_pack(folder)])


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


def test_a_process_is_recorded_by_the_environment(tmp_path: Path) -> None:
    recorded = tmp_path / "keys.jsonl"
    libraries = [str(fake_pack.make_driver(tmp_path / "driver")), os.environ.get("LD_LIBRARY_PATH", "")]
    code = (
        "import numpy as np, atomr_cutlass as ac\n"
        "for m in (4, 5): ac.gemm(np.ones((m, 4), np.float32), np.ones((4, 4), np.float32), jit='off')\n"
    )
    environ = os.environ | {
        "ATOMR_CUTLASS_RECORD": str(recorded),
        "ATOMR_CUTLASS_PACKS": str(_pack(tmp_path)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
    }
    for runs in (1, 2):
        subprocess.run([sys.executable, "-W", "error", "-c", code], env=environ, check=True, timeout=60)
        lines = [json.loads(line) for line in recorded.read_text().splitlines()]
        assert sum(line["count"] for line in lines) == 2 * runs
        assert sum(len(line["shapes"]) for line in lines) == 2
    # What cannot be recorded is said, and stops nobody.
    environ["ATOMR_CUTLASS_RECORD"] = str(tmp_path / "nowhere" / "keys.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.count("ATOMR_CUTLASS_RECORD: cannot record") == 1
