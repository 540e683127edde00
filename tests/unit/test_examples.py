"""The examples run, without a GPU, as their own text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    """It ends well with NumPy alone, prints something, warns of nothing and leaves nothing behind."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "error", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert not ran.stderr
    assert not list(tmp_path.iterdir())


def test_there_are_examples() -> None:
    assert EXAMPLES
