"""fp4: what `gemm` and requests take and refuse, which kernels they get, and what these are told.

From the call to the C ABI without a GPU: `tests/helpers/fp4_cases.py`, over kernels that run on the host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fake_fp4
import fake_pack
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.matrix import expand

CASES_FILE = Path(fake_fp4.__file__).with_name("fp4_cases.py")
CASES = re.findall(r"^def (case_\w+)", CASES_FILE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    keys = [key for key in expand("full", [SmArch.SM100]) if key.a is D.F4E2M1 and key.d in (D.BF16, D.F32)]
    pack = fake_fp4.make_pack(folder / "pack.so", keys)
    libraries = [str(fake_pack.make_driver(folder / "driver", major=10)), os.environ.get("LD_LIBRARY_PATH", "")]
    process = subprocess.run(
        [sys.executable, "-W", "error", str(CASES_FILE)],
        env=os.environ
        | {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "ATOMR_CUTLASS_PACKS": str(pack),
            "ATOMR_CUTLASS_JIT": "off",
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
