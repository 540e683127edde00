"""Compilers side by side: no more of them at once than CPUs and memory allow. What compiles here only says when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atomr_cutlass import LibraryError
from atomr_cutlass.generator import machine
from atomr_cutlass.jit import compiler, locks, worker
from atomr_cutlass.jit.files import FOLDER_VARIABLE
from atomr_cutlass.jit.locks import Lock
from jit_unit import TOOLS, UNIT

LIMITS = {
    "cpus": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "memory": "machine.cpus, machine.free_bytes = lambda _: 8, lambda _: 1",
    "two": "machine.cpus, machine.free_bytes = lambda _: 2, lambda _: 64 << 30",
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def lines(log: Path) -> list[tuple[str, int]]:
    """What compilers said, in order: `starts` or `ends`, and their process."""
    return [(word, int(number)) for word, number in (line.split() for line in log.read_text().splitlines())]


def most(log: Path) -> int:
    """How many compilers ran at once."""
    counts, running = [0], 0
    for word, _ in lines(log):
        running += 1 if word == "starts" else -1
        counts.append(running)
    return max(counts)


def compiling(log: Path, seconds: float) -> str:
    """The text of a compiler that says when it starts and ends."""
    return (
        f"import os, sys, time; sys.path.append({str(Path(worker.__file__).parent)!r}); import worker\n"
        f"file = os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND)\n"
        "os.write(file, f'starts {os.getpid()}\\n'.encode())\n"
        f"time.sleep({seconds})\n"
        "os.write(file, f'ends {os.getpid()}\\n'.encode())\n"
        "sys.stdout.buffer.write(worker.answer(b'', ''))"
    )


def start(
    log: Path, limit: str, *, seconds: float = 0.1, threads: int = 1, **environment: object
) -> subprocess.Popen[str]:
    """A process whose threads compile a kernel each."""
    script = log.with_name(f"worker-{seconds}.py")
    script.write_text(compiling(log, seconds))
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]; import jit_unit as t; from pathlib import Path\n"
        "from concurrent.futures import ThreadPoolExecutor; from atomr_cutlass.generator import machine\n"
        f"{LIMITS[limit]}\n"
        "from atomr_cutlass.jit import compiler\n"
        "compiler._WORKER = Path(sys.argv[1]); compiler.toolchain = lambda: t.TOOLS\n"
        f"with ThreadPoolExecutor({threads}) as pool:\n"
        f"    for made in [pool.submit(t.UNIT.compile) for _ in range({threads})]: made.result()"
    )
    variables = {FOLDER_VARIABLE: log.with_name("cache"), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(script), *sys.path],
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=os.environ | {name: str(value) for name, value in variables.items()},
    )


def end(process: subprocess.Popen[str]) -> str:
    """Waits for a process; returns what it said to its standard error."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said


def wait_for(log: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(lines(log)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("limit", LIMITS)
def test_threads_and_processes_share_the_cpus_and_the_memory(
    log: Path, started: list[subprocess.Popen[str]], limit: str
) -> None:
    seconds = 0.6 if limit == "two" else 0.1  # long enough for two that start together to meet
    started += [start(log, limit, seconds=seconds, threads=2) for _ in range(2)]
    assert [end(process) for process in started] == ["", ""]
    assert len(lines(log)) == 16
    assert most(log) == (2 if limit == "two" else 1)
    assert list(log.with_name("cache").joinpath("locks").iterdir()) == []


def test_a_compiler_whose_caller_is_killed_keeps_its_turn_and_gives_it_up_with_its_life(
    log: Path, started: list[subprocess.Popen[str]]
) -> None:
    started.append(start(log, "cpus", seconds=60))
    wait_for(log, 1)
    started[0].kill()
    started[0].wait()
    started.append(start(log, "cpus"))
    time.sleep(1.5)
    ((word, orphan),) = lines(log)
    assert word == "starts"
    os.kill(orphan, signal.SIGKILL)
    assert end(started[1]) == ""
    assert len(lines(log)) == 5


@pytest.mark.parametrize("place", ["/proc/nowhere", "~nosuchuserhere/cache"])
def test_without_a_cache_turns_are_taken_among_the_temporary_files(
    log: Path, started: list[subprocess.Popen[str]], place: str
) -> None:
    temporary = log.with_name("temporary")
    temporary.mkdir()
    started += [start(log, "cpus", TMPDIR=temporary, **{FOLDER_VARIABLE: place}) for _ in range(3)]
    assert [end(process) for process in started] == [""] * 3
    assert most(log) == 1
    assert len(lines(log)) == 12


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lock]:
    """The only turn that there is, held."""
    monkeypatch.setattr(machine, "cpus", lambda _=None: 1)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "toolchain", lambda: TOOLS)
    held = compiler.wait_for_turn(lambda: None)
    assert held is not None
    yield held
    held.unlock()
    assert locks._descriptors == set()


def use(monkeypatch: pytest.MonkeyPatch, log: Path, text: str) -> None:
    """Has this process compile with a worker of this text."""
    script = log.with_name("worker.py")
    script.write_text(text)
    monkeypatch.setattr(compiler, "_WORKER", script)


@pytest.mark.usefixtures("turn")
def test_turns_that_do_not_end_are_waited_for_no_longer_than_a_lock(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    use(monkeypatch, log, compiling(log, 0))
    monkeypatch.setattr(compiler, "LOCK_SECONDS", 0.2)
    with pytest.warns(RuntimeWarning, match="beside all other compilers: 1 of them do not end"):
        UNIT.compile()
    assert len(lines(log)) == 4


def test_a_long_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch, turn: Lock) -> None:
    """Turns of others, each shorter than a lock is waited for, and together longer."""
    monkeypatch.setattr(compiler, "LOCK_SECONDS", 1.0)
    path = turn.path

    def queue() -> None:
        for _ in range(10):
            time.sleep(0.25)
            os.utime(path)
        turn.unlock()

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(queue)
        begin = time.monotonic()
        mine = compiler.wait_for_turn(lambda: None)
        assert time.monotonic() - begin > 2
        ahead.result()
    assert mine is not None
    mine.unlock()


def test_where_no_lock_can_be_had_compilers_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Path
) -> None:
    planted = tmp_path / f"atomr_cutlass-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/nowhere")
    monkeypatch.setattr(compiler, "toolchain", lambda: TOOLS)
    use(monkeypatch, log, compiling(log, 0))
    with pytest.warns(RuntimeWarning, match="no lock can be had"):
        UNIT.compile()
    assert list(planted.iterdir()) == []


def test_a_compiler_that_hangs_does_not_keep_the_other_one_waiting(
    monkeypatch: pytest.MonkeyPatch, turn: Lock, log: Path
) -> None:
    turn.unlock()
    use(monkeypatch, log, compiling(log, 600))
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 1.0)
    with pytest.raises(LibraryError, match="did not end within 1 s"):
        UNIT.compile()
    assert compiler._running == set()


def test_a_compiler_that_cannot_be_started_leaves_its_turn(monkeypatch: pytest.MonkeyPatch, turn: Lock) -> None:
    turn.unlock()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LibraryError, match=r"cannot be started: .*No such file"):
        UNIT.compile()
    monkeypatch.undo()
    assert locks._descriptors == set()


def test_inside_another_program_turns_are_taken_too(monkeypatch: pytest.MonkeyPatch, turn: Lock) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(worker, "compile_source", lambda **_: (b"image", ""))
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(UNIT.compile)
        time.sleep(0.5)
        assert not made.done()
        turn.unlock()
        assert made.result(30).kernel == b"image"


@pytest.mark.usefixtures("turn")
def test_a_process_that_waits_for_its_turn_in_the_background_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:]; import jit_unit as t\n"
        "from atomr_cutlass.generator import machine; from atomr_cutlass.jit import compiler, kernels\n"
        "from fake_table import A100\n"
        "machine.cpus = lambda _=None: 1\n"
        "compiler.toolchain = kernels.toolchain = lambda: t.TOOLS\n"
        "waits, real = [], compiler._take_turn\n"
        "compiler._take_turn = lambda limit: waits.append(1) or real(limit)\n"
        "kernels.in_background(t.KEY, A100, lambda: None)\n"
        "while not waits: time.sleep(0.01)\n"
        "print('ends')"
    )
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", code, *sys.path],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=os.environ | {FOLDER_VARIABLE: str(tmp_path / "cache")},
        timeout=60,
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("ends\n", "", 0)
    assert time.monotonic() - begin < 25
