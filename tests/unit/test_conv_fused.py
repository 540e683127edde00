"""Epilogue trees of convolutions from a request or a call to the C ABI without a GPU, by kernels that run on the host.

The cases are in `tests/helpers/conv_fused_cases.py`; one process of its own runs them all, since a driver, once opened,
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

import fake_conv_fused
import fake_pack

CASES_FILE = Path(fake_conv_fused.__file__).with_name("conv_fused_cases.py")
CASES = re.findall(r"^def (case_\w+)", CASES_FILE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    libraries = [str(fake_pack.make_driver(folder / "driver", major=9)), os.environ.get("LD_LIBRARY_PATH", "")]
    process = subprocess.run(
        [sys.executable, "-W", "error", str(CASES_FILE)],
        env=os.environ
        | {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "ATOMR_CUTLASS_CACHE_DIR": str(folder / "cache"),
            "ATOMR_CUTLASS_PACKS": str(fake_conv_fused.make_pack(folder / "pack.so")),
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
    assert outcome[case] == "", outcome[case]
