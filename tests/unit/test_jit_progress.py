"""Compilations that take longer than a second are said once: on a terminal, elsewhere through `logging`."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atomr_cutlass.jit import compiler

TWO = """
import threading, time
from pathlib import Path
from atomr_cutlass.jit import compiler
compiler._SILENT_SECONDS = 0.2

def compile(name, seconds):
    with compiler.announced(name, 12.4, lambda: Path("/the/cache")):
        time.sleep(seconds)

threads = [threading.Thread(target=compile, args=given) for given in {work}]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_SILENT_SECONDS", 0.2)
    monkeypatch.delenv(compiler.QUIET_VARIABLE, raising=False)


def _on_a_terminal(work: list[tuple[str, float]], **environment: str) -> str:
    """What a process that compiles these shows on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TWO.format(work=work)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"} | environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # how a terminal ends on Linux
            pass
        assert process.wait(timeout=60) == 0
    os.close(ours)
    return shown.decode()


def _compile(name: str, seconds: float, folder: Path = Path("/the/cache")) -> None:
    with compiler.announced(name, 12.4, lambda: folder):
        time.sleep(seconds)


def test_a_long_compilation_is_said_once_on_a_terminal() -> None:
    shown = _on_a_terminal([("kernel_a", 0.8)])
    assert shown.splitlines() == [
        "atomr_cutlass: compiling kernel_a: about 12 s, once; it is kept in /the/cache", "done",
    ]  # fmt: skip


def test_several_have_a_bar() -> None:
    shown = _on_a_terminal([("kernel_a", 0.8), ("kernel_b", 1.5)])
    for name in ("kernel_a", "kernel_b"):
        assert shown.count(f"compiling {name}: about 12 s") == 1
    assert "0/2" in shown
    assert "1/2" in shown
    assert shown.rstrip().endswith("done")


def test_short_ones_and_quiet_processes_say_nothing() -> None:
    assert _on_a_terminal([("kernel_a", 0.05), ("kernel_b", 0.05)]).split() == ["done"]
    assert _on_a_terminal([("kernel_a", 0.6)], ATOMR_CUTLASS_QUIET="1").split() == ["done"]


def test_elsewhere_it_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "atomr_cutlass")
    monkeypatch.setattr(sys, "stderr", None)
    threads = [threading.Thread(target=_compile, args=(name, 0.7)) for name in ("kernel_a", "kernel_b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _compile("kernel_c", 0.05)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"compiling {name}: about 12 s, once; it is kept in /the/cache" for name in ("kernel_a", "kernel_b")
    ]
    assert {(record.name, record.levelname) for record in caplog.records} == {("atomr_cutlass", "INFO")}
    caplog.clear()
    monkeypatch.setenv(compiler.QUIET_VARIABLE, "1")
    _compile("kernel_d", 0.4)
    assert not caplog.records


def test_one_that_ends_does_not_wait_for_another() -> None:
    slow = threading.Thread(target=_compile, args=("kernel_a", 1.5))
    slow.start()
    time.sleep(0.5)
    start = time.monotonic()
    _compile("kernel_b", 0.3)
    assert time.monotonic() - start < 1.0
    slow.join()


def test_a_failure_ends_it_too() -> None:
    def fail() -> None:
        with compiler.announced("kernel_a", 1.0, Path):
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fail()
    assert not compiler._waiting.announced
