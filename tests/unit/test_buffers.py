"""Device memory of the package's own, over a fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fake_pack import make_driver

WITHOUT_GIL = """
import ctypes
from atomr_cutlass import _core

memory = _core.Buffer(0, 1024)
assert memory.pointer % 256 == 0
del memory
driver = ctypes.CDLL("libcuda.so.1")
calls = [list((ctypes.c_int * 2).in_dll(driver, name)) for name in ("fake_calls", "fake_calls_with_gil")]
assert calls == [[1, 1], [0, 0]], calls
print("made and freed")
"""


def test_memory_is_allocated_and_freed_without_the_gil(tmp_path: Path) -> None:
    driver = make_driver(tmp_path / "driver")
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_GIL],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert process.stdout == "made and freed\n", process.stderr
