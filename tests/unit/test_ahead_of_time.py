"""Every example of README and docs, recorded, built, and run in a frozen process: on a GPU that only takes notes.

Results are not compared here, since nothing is computed, but launches: their kernels, order and arguments. The same on
a real GPU, with its compiler and its results, is `tests/gpu/test_ahead_of_time.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import golden_gpu
import page_examples
from atomr_cutlass import SmArch
from atomr_cutlass.generator import key_file

LOOP = Path(page_examples.__file__).with_name("noted_loop.py")
ARCH = SmArch.SM90A


def _run(library: Path, folder: Path, *arguments: object, **environment: object) -> str:
    done = subprocess.run(
        [sys.executable, str(LOOP), *map(str, arguments)],
        env=golden_gpu.environment(library, ARCH, folder)
        | {"ATOMR_CUTLASS_CACHE_DIR": str(folder / "cache")}
        | {name: str(value) for name, value in environment.items()},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """What each program launched while it was recorded and in the frozen process, and the recorded keys' names."""
    folder = tmp_path_factory.mktemp("loop")
    library = golden_gpu.make_library(folder)
    keys, made = folder / "keys.jsonl", folder / "pages.pack"
    first = json.loads(_run(library, folder, "record", library, ATOMR_CUTLASS_RECORD=keys))
    _run(library, folder, "build", keys, "--arch", ARCH.target, "-o", made)
    second = json.loads(_run(library, folder, "frozen", library, ATOMR_CUTLASS_PACKS=made))
    return {"recorded": first, "frozen": second, "keys": {"all": [key.name for key in key_file.read(keys)]}}


def test_there_are_programs_and_they_launch_kernels(loop: dict[str, dict[str, list[str]]]) -> None:
    programs = page_examples.programs()
    assert {"README.md", "quickstart.md", "conv.md", "grouped.md", "cookbook.md", "matmul.md", "actor.md"} <= set(
        programs
    )
    assert sum(map(len, loop["recorded"].values())) > 60
    assert len(loop["keys"]["all"]) > 30


def test_every_block_runs_but_those_with_a_reason() -> None:
    pages, programs = page_examples.blocks_of_pages(), page_examples.programs()
    for page, start in (*page_examples.ABSENT, *page_examples._BEFORE):
        assert sum(block.startswith(start) for block in pages[page]) == 1, f"{page}, {start}"
    left_out = sum(map(len, pages.values())) - sum(len(programs.get(page, [])) for page in pages)
    assert left_out == len(page_examples.ABSENT)


@pytest.mark.parametrize("name", page_examples.programs())
def test_a_frozen_process_launches_what_was_recorded(name: str, loop: dict[str, dict[str, list[str]]]) -> None:
    assert loop["frozen"][name] == loop["recorded"][name]


def test_everything_that_is_launched_was_recorded(loop: dict[str, dict[str, list[str]]]) -> None:
    launched = {step.split()[0] for steps in loop["frozen"].values() for step in steps if not step.startswith("copy")}
    assert launched <= set(loop["keys"]["all"])
