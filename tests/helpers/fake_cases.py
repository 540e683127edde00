"""Tests that one process of its own runs over fake libraries: a driver, once opened, stays.

Those are the functions of a file that are called `case_...`; the file's last lines have `run` call them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from atomr_cutlass import _core
from atomr_cutlass.pipeline import call as call_module

HELPERS = Path(__file__).parent


def names(file: str) -> list[str]:
    """The cases of a file of this folder."""
    return re.findall(r"^def (case_\w+)", (HELPERS / file).read_text(encoding="utf-8"), re.MULTILINE)


def outcome(file: str, driver: Path, packs: Sequence[Path], timeout: float = 120, **environment: str) -> dict[str, str]:
    """The exception of each case of a file, as text; empty where it passed.

    Args:
        file: of this folder.
        driver: the folder of the libraries.
        packs: the kernels, beside which nothing is compiled but by cases that are about it.
        timeout: in seconds.
        environment: further variables of the process.
    """
    libraries = [str(driver), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "ATOMR_CUTLASS_PACKS": os.pathsep.join(map(str, packs)),
        "ATOMR_CUTLASS_JIT": "off",
    }
    return process_of("-W", "error", HELPERS / file, environment=os.environ | variables | environment, timeout=timeout)


def process_of(*words: str | Path, environment: Mapping[str, str], timeout: float) -> dict[str, str]:
    """The outcomes that a process of Python with these words prints last: `run`'s."""
    process = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert process.returncode == 0, process.stderr
    result: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    return result


def run(functions: Mapping[str, Any]) -> None:
    """Runs the cases among a module's functions, and prints what each of them raised as JSON."""
    raised = {}
    for name, case in list(functions.items()):
        if name.startswith("case_"):
            try:
                case()
                raised[name] = ""
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it is, it is the outcome
                raised[name] = traceback.format_exc()
    print(json.dumps(raised))


def arguments(launch: str) -> dict[str, str]:
    """The arguments of a launch by name, as a GPU that takes notes has them in words."""
    return dict(word.split("=", 1) for word in launch.split()[1:] if "=" in word)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Fails what waits for the GPU, which spoils a capture."""

    def waits(*_: Any) -> None:
        message = "the GPU is awaited"
        raise AssertionError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "upload", waits)
        patch.setattr(_core, "download", waits)
        yield


@contextlib.contextmanager
def parsed() -> Iterator[list[Any]]:
    """The calls that are parsed meanwhile: those that no kept plan serves."""
    calls: list[Any] = []
    served, traced = call_module._served, call_module._traced

    def noted(invocation: Any, key: Any) -> Any:
        calls.append(invocation.call)
        return served(invocation, key)

    def noted_if_traced(call: Any, pending: Any) -> Any:
        made = traced(call, pending)
        calls.extend([call] if made else [])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_module, "_served", noted)
        patch.setattr(call_module, "_traced", noted_if_traced)
        yield calls


def of_packs_alone() -> None:
    """Leaves the kernels of packs in the table: those of the installation need a GPU."""
    every = _core.rows
    _core.rows = lambda: [row for row in every() if row["pack"]]
