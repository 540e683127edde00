"""Record, build, freeze for real: a model and every example of README and docs, in processes of their own.

The frozen processes are watched from outside: they start no process, and have no NVRTC among their mappings. Compiling
takes most of the time: `python -m pytest -s tests/gpu/test_ahead_of_time.py -k model` takes a minute on 16 cores, all
of it some minutes. Kernels that the installed table has are compiled too, since the pack is to hold everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import golden_gpu
import page_examples
from atomr_cutlass import DeviceUnavailableError, SmArch
from atomr_cutlass.generator import key_file
from atomr_cutlass.jit import toolchain
from atomr_cutlass.pipeline import devices

pytestmark = pytest.mark.gpu

HELPERS = Path(page_examples.__file__).parent
MODEL, PAGES, NOTED = (HELPERS / name for name in ("serving_model.py", "page_examples.py", "noted_loop.py"))
START_SECONDS = 2.0
"""From the start of a frozen process to its first result."""


@pytest.fixture(autouse=True)
def _needs_hopper_and_nvrtc() -> None:
    if devices.problem() or devices.get(0).arch is not SmArch.SM90A:
        pytest.skip("the model's gated product has kernels of sm_90a alone")
    try:
        toolchain.toolchain()
    except DeviceUnavailableError as error:
        pytest.skip(str(error))


def _environment(cache: Path, **more: object) -> dict[str, str]:
    cache.mkdir(mode=0o700, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOMR_CUTLASS_")}
    path = [str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"ATOMR_CUTLASS_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(path)}
    return kept | {name: str(value) for name, value in (own | more).items()}


def _build(keys: Path, made: Path, cache: Path) -> float:
    """Runs `atomr-cutlass build`; how many seconds it took."""
    start = time.monotonic()
    code = "from atomr_cutlass.cli.app import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "build", str(keys), "--arch", "90a", "-o", str(made)],
        env=_environment(cache), capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return time.monotonic() - start


class Watched:
    """A process that is looked at until it ends: what it said, when it was started, and what was seen of it."""

    def __init__(self, words: list[object], environment: dict[str, str]) -> None:
        self.children: set[str] = set()
        self.mapped: set[str] = set()
        self.start = time.monotonic()
        with (
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            ) as process,
            self._looking_at(Path("/proc", str(process.pid))) as look,
        ):  # fmt: skip
            assert process.stdout
            assert process.stdin
            assert process.stderr
            line = process.stdout.readline()
            look()
            # Faults of children that it waited for: seen even of one that was too quick for this.
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
            self.faults_of_children = int(stat[8]) + int(stat[10]) if line else -1
            process.stdin.close()
            errors = process.stderr.read()
            assert process.wait(60) == 0, errors[-6000:]
        self.said: dict[str, Any] = json.loads(line)

    @contextlib.contextmanager
    def _looking_at(self, folder: Path) -> Iterator[Any]:
        ended = threading.Event()

        def look() -> None:
            with contextlib.suppress(OSError):
                for task in (folder / "task").iterdir():
                    self.children.update((task / "children").read_text().split())
                self.mapped.update(
                    line.split()[-1] for line in (folder / "maps").read_text().splitlines() if "/" in line
                )

        def watch() -> None:
            while not ended.wait(0.005):
                look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield look
        finally:
            ended.set()
            thread.join()

    def require_undisturbed(self) -> None:
        """Asserts that it started nothing, and loaded no compiler."""
        assert any("libcuda" in name for name in self.mapped), "it was not seen at work"
        assert [name for name in self.mapped if "nvrtc" in name.lower()] == []
        assert self.children == set()
        assert self.faults_of_children == 0


@pytest.mark.timeout(600)
def test_a_model_of_seven_operations(tmp_path: Path) -> None:
    keys, made, cache = tmp_path / "keys.jsonl", tmp_path / "model.pack", tmp_path / "cache"
    recorded = Watched([MODEL, tmp_path / "recorded.npz"], _environment(cache, ATOMR_CUTLASS_RECORD=keys))
    seconds = _build(keys, made, cache)
    names = {key.name for key in key_file.read(keys)}
    assert len(names) >= len(recorded.said["compiled"])
    assert set(recorded.said["compiled"]) <= names

    starts = []
    want = np.load(tmp_path / "recorded.npz")
    for number in range(3):
        results = tmp_path / f"frozen{number}.npz"
        # A cache that is empty, and no program to be found.
        environment = _environment(tmp_path / f"cache{number}", ATOMR_CUTLASS_PACKS=made, PATH="")
        served = Watched([MODEL, results, "freeze"], environment)
        served.require_undisturbed()
        assert (served.said["compiled"], served.said["looked"]) == ([], 0)
        starts.append(served.said["first"] - served.start)
        got = np.load(results)
        assert sorted(got.files) == sorted(want.files)
        for name in want.files:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    first, everything = (recorded.said[name] - recorded.start for name in ("first", "all"))
    said = [
        f"{len(names)} kernels, {len(recorded.said['compiled'])} of them compiled while it was recorded",
        f"recorded: first result after {first:.1f} s, all after {everything:.1f} s",
        f"built in {seconds:.1f} s, {made.stat().st_size / 2**20:.1f} MiB",
        f"frozen: first result after {', '.join(f'{start:.2f}' for start in starts)} s",
    ]
    print("", *said, sep="\n")
    assert min(starts) < START_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_example_of_the_pages(tmp_path: Path, torch: Any) -> None:
    """A GPU that takes notes finds the kernels to compile, so that they are compiled side by side, not one by one."""
    del torch  # one of the examples imports it, which maps an NVRTC of its own
    guessed, keys, made, cache = (tmp_path / name for name in ("guessed.jsonl", "keys.jsonl", "pages.pack", "cache"))
    library = golden_gpu.make_library(tmp_path)
    noted = subprocess.run(
        [sys.executable, str(NOTED), "record", str(library)],
        env=golden_gpu.environment(library, SmArch.SM90A, tmp_path) | {"ATOMR_CUTLASS_RECORD": str(guessed)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert noted.returncode == 0, noted.stderr[-6000:]
    ahead = _build(guessed, tmp_path / "guessed.pack", cache)
    Watched([PAGES, tmp_path / "recorded.npz", "torch"], _environment(cache, ATOMR_CUTLASS_RECORD=keys))
    seconds = _build(keys, made, cache)

    environment = _environment(tmp_path / "empty", ATOMR_CUTLASS_PACKS=made)
    served = Watched([PAGES, tmp_path / "frozen.npz", "freeze"], environment)
    served.require_undisturbed()
    assert (served.said["compiled"], served.said["looked"]) == ([], 0)
    served = Watched([PAGES, tmp_path / "frozen.npz", "freeze", "torch"], environment)
    assert (served.said["compiled"], served.said["looked"]) == ([], 0)
    want, got = np.load(tmp_path / "recorded.npz"), np.load(tmp_path / "frozen.npz")
    assert sorted(got.files) == sorted(want.files)
    assert len(want.files) > 100
    # Sums of thread blocks are added up by atomics, in an order that no launch repeats.
    differ = [name for name in want.files if not np.array_equal(got[name], want[name], equal_nan=True)]
    for name in differ:
        np.testing.assert_allclose(got[name], want[name], rtol=2**-8, atol=2**-8, err_msg=name)
    print(
        f"\n{len(key_file.read(keys))} kernels; compiled ahead in {ahead:.0f} s, packed in {seconds:.1f} s; "
        f"{len(want.files)} arrays of the pages, {len(differ)} of which differ in their last bits: {differ}"
    )
