"""From `gemm` to the C ABI without a GPU: a driver whose device memory is the host's, and kernels that run on it.

The cases are in `tests/helpers/pipeline_cases.py`; one process of its own runs them all, since a driver, once opened,
stays.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fake_pack
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.rules import LAYOUTS

CASES_FILE = Path(fake_pack.__file__).with_name("pipeline_cases.py")
CASES = re.findall(r"^def (case_\w+)", CASES_FILE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module", params=[0, 64], ids=["no workspace", "workspace"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    cells = [k for k in expand("full", [SmArch.SM80]) if k.math == "ieee" and k.d is D.F32]
    assert {k.layout_a + k.layout_b for k in cells} == set(LAYOUTS)
    pack = fake_pack.make_pack(folder / "pack.so", cells, workspace=request.param, largest_m=5000, error=700)
    libraries = [str(fake_pack.make_driver(folder / "driver")), os.environ.get("LD_LIBRARY_PATH", "")]
    process = subprocess.run(
        [sys.executable, "-W", "error", str(CASES_FILE)],
        env=os.environ
        | {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "ATOMR_CUTLASS_PACKS": str(pack),
            "ATOMR_CUTLASS_JIT": "off",  # but in the cases that are about it
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    result: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
