"""The disk cache of compiled kernels, and what it withstands. What compiles here only writes down that it did."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest

import store_process
from atomr_cutlass.errors import CacheError, CompileError, DeviceUnavailableError
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.jit import files as files_module
from atomr_cutlass.jit import kernels, locks
from atomr_cutlass.jit import store as store_module
from atomr_cutlass.jit.compiler import Images, Unit
from atomr_cutlass.jit.files import FAILURE_SECONDS, FOLDER_VARIABLE, SUBFOLDERS, remove
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.jit.toolchain import Toolchain
from store_process import digest, failing, kernel, maker

# -P where there is one: the folder of the script is not to be searched.
PROCESS = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), store_process.__file__]
FOREVER = "60"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(folder: Path) -> KernelStore:
    return KernelStore(folder)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


def compiled(log: Path) -> list[str]:
    """The keys that were compiled, in order."""
    return log.read_text(encoding="utf-8").split()


def put(store: KernelStore, key: str, size: int = 100_000) -> Path:
    """Adds a kernel; returns its file."""
    assert store.obtain(digest(key), lambda: kernel(key, size), {"name": key, "target": "sm_90a"})[1] == "compiled"
    (entry,) = (entry for entry in store.entries() if entry.info["name"] == key)
    return entry.path


def limited(folder: Path, most: int) -> KernelStore:
    """A store that keeps so many bytes."""
    store = KernelStore(folder)
    store.max_bytes = most
    return store


def start(action: str, *arguments: object) -> subprocess.Popen[str]:
    command = [*PROCESS, action, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def answer(process: subprocess.Popen[str]) -> dict:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(said.splitlines()[-1])


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def fail(store: KernelStore, log: Path | None = None, key: str = "failing", fingerprint: str = "") -> CompileError:
    """The error of a source that does not compile."""
    with pytest.raises(CompileError) as said:
        store.obtain(digest(key), failing(log), {}, fingerprint=fingerprint)
    return said.value


def record(store: KernelStore, key: str = "failing") -> Path:
    """Where a failure is remembered."""
    return files_module._failure_path(store.folder, digest(key), "")


def expire(path: Path) -> None:
    """Lets a failure be of long ago."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time": 0}))


# ----------------------------------------------------------------------------------------------------------------------
# What it does
# ----------------------------------------------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(folder: Path, store: KernelStore, log: Path) -> None:
    assert store.get(digest("a")) is None
    make = maker("a", log)
    assert store.obtain(digest("a"), make, {"name": "a"}) == (kernel("a"), "compiled")
    assert store.obtain(digest("a"), make, {"name": "a"}) == (kernel("a"), "disk")
    assert KernelStore(folder).obtain(digest("a"), make, {}) == (kernel("a"), "disk")
    assert store.get(digest("a")) == kernel("a")
    assert store.get(digest("b")) is None
    assert compiled(log) == ["a"]
    assert files(folder / "locks") == []


@pytest.mark.parametrize("content", [b"", b"\0", os.urandom(3 << 20)], ids=len)
def test_any_bytes_come_back(store: KernelStore, content: bytes) -> None:
    store.obtain(b"any length of key" * 20, lambda: content, {})
    assert store.get(b"any length of key" * 20) == content


def test_entries_tell_what_they_are(store: KernelStore) -> None:
    info = {"name": "a", "target": "sm_90a", "key": '{"op": "gemm"}', "regs": 168, "share": 0.5}
    before = time.time()
    store.obtain(digest("a"), maker("a", seconds=0.02), info)
    (entry,) = store.entries()
    assert entry.info == info
    assert entry.digest == digest("a").hex()
    assert 0.02 <= entry.seconds < 1
    assert before <= entry.made <= time.time()
    assert entry.size == entry.path.stat().st_size > len(kernel("a"))
    assert [entry.info["name"] for entry in KernelStore(store.folder).entries()] == ["a"]
    entry.path.write_bytes(entry.path.read_bytes().replace(b"kernel 1", b"kernel 2", 1))
    assert store.entries() == []


def test_nothing_is_made_before_it_is_needed(folder: Path, store: KernelStore) -> None:
    assert store.get(digest("a")) is None
    assert store.entries() == []
    assert store.verify() == (0, [])
    assert store.prune(everything=True).removed == 0
    assert not folder.exists()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_only_the_user_can_read_it(folder: Path, store: KernelStore, umask: int) -> None:
    before = os.umask(umask)
    try:
        put(store, "a")
        fail(store)
    finally:
        os.umask(before)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert KernelStore().folder == tmp_path / "xdg" / "atomr_cutlass"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mine"))
    assert KernelStore().folder == tmp_path / "mine"
    assert KernelStore(tmp_path / "given").folder == tmp_path / "given"
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_it_is_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/atomr_cutlass"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert KernelStore().folder == tmp_path / f"atomr_cutlass-{os.geteuid()}"


def test_2_mb_are_read_in_less_than_20_ms(store: KernelStore) -> None:
    put(store, "a", 2 << 20)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        assert store.get(digest("a")) is not None
        best = min(best, time.perf_counter() - start)
    assert best < 0.02


# ----------------------------------------------------------------------------------------------------------------------
# Several at once
# ----------------------------------------------------------------------------------------------------------------------


def test_16_processes_compile_one_cold_key_once(folder: Path, log: Path) -> None:
    processes = [start("obtain", folder, "a", log, 0.3) for _ in range(16)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [answer(process) for process in processes]
    assert compiled(log) == ["a"]
    assert sorted(said["source"] for said in answers) == ["compiled"] + ["disk"] * 15
    assert all(said["right"] for said in answers)
    assert files(folder / "locks") == []


def test_threads_compile_a_key_once_and_different_keys_side_by_side(
    folder: Path, store: KernelStore, log: Path
) -> None:
    stores = [store, KernelStore(folder)]
    together = threading.Barrier(4, timeout=10)

    def ask(index: int) -> bool:
        key = f"key{index % 4}"

        def make() -> bytes:
            together.wait()  # passes only when four compile at once
            return maker(key, log)()

        return stores[index // 8].obtain(digest(key), make, {})[0] == kernel(key)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(16)))
    assert sorted(compiled(log)) == ["key0", "key1", "key2", "key3"]


def test_a_lock_is_held_by_one_only_while_its_file_comes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    inside, most, done = 0, 0, threading.Event()

    def hold() -> None:
        nonlocal inside, most
        for _ in range(60):
            with locks.hold(path, 30):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0002)
                inside -= 1

    def tidy() -> None:
        while not done.is_set():
            locks.remove(path)

    with ThreadPoolExecutor(6) as pool:
        tidying = pool.submit(tidy)
        for holding in [pool.submit(hold) for _ in range(5)]:
            holding.result()
        done.set()
        tidying.result()
    assert most == 1
    assert not path.exists()
    assert locks._descriptors == set()


def test_a_lock_whose_file_is_removed_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = locks.try_lock(path)
    assert holder is not None
    real = fcntl.flock

    def after_the_holder(descriptor: int, operation: int) -> None:
        # The holder is done just after the file was opened, and just before it is locked.
        monkeypatch.setattr(fcntl, "flock", real)
        holder.unlock()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_the_holder)
    assert locks.try_lock(path) is None
    with locks.hold(path, 1):
        assert locks.try_lock(path) is None
    assert list(tmp_path.iterdir()) == []
    assert locks._descriptors == set()


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, folder: Path, store: KernelStore, log: Path) -> None:
    put(store, "other")
    monkeypatch.setattr(store_module, "LOCK_SECONDS", 0.1)
    with (
        locks.hold(folder / "locks" / store_module._name(digest("a")), 1),
        pytest.warns(RuntimeWarning, match="without a kernel cache: .* cannot be locked: waited"),
    ):
        assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"
    assert store.get(digest("a")) == kernel("a")


@pytest.mark.parametrize("limit", [400_000, 50_000])
def test_eviction_under_load_gives_everybody_the_right_bytes(folder: Path, limit: int) -> None:
    stores = [limited(folder, limit) for _ in range(2)]

    def ask(index: int) -> bool:
        key = f"key{index * 7 % 20}"
        return stores[index % 2].obtain(digest(key), lambda: kernel(key, 60_000), {})[0] == kernel(key, 60_000)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(100)))
    # Approximately: the stores' counts of what there is run apart until one of them looks.
    assert sum(path.stat().st_size for path in files(folder)) <= 2 * limit


def test_what_was_not_read_for_longest_goes_first(folder: Path) -> None:
    store = limited(folder, 350_000)
    for key in ("a", "b", "c"):
        put(store, key)
    assert store.get(digest("a"))
    # Looking at them is no reading.
    assert store.verify()[0] == len(store.entries()) == 3
    put(store, "d")
    assert [entry.info["name"] for entry in store.entries()] == ["a", "c", "d"]


# ----------------------------------------------------------------------------------------------------------------------
# Sources that do not compile
# ----------------------------------------------------------------------------------------------------------------------


def test_a_failure_is_remembered_with_its_log(folder: Path, store: KernelStore, log: Path) -> None:
    assert str(fail(store, log)) == "it does not compile"
    error = fail(store, log)
    assert re.match(r"it does not compile\n.*remembered from . s ago.*remove .*/failures", str(error))
    assert (error.log, error.source, error.options) == ("line 1: error\n", "int x", ("-a", "-b"))
    process = start("obtain", folder, "failing", log, 0)
    process.stdin.write("go\n")
    other = answer(process)
    assert (other["log"], other["source"]) == ("line 1: error\n", "int x")
    assert "remembered" in other["error"]
    assert compiled(log) == ["failing"]
    assert files(folder / "locks") == []


@pytest.mark.parametrize("age", [FAILURE_SECONDS + 1, -60.0, -1e10, 1.7e9])
def test_a_failure_is_forgotten_after_a_while_or_when_the_clock_was_wrong(
    store: KernelStore, log: Path, age: float
) -> None:
    fail(store, log)
    path = record(store)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time": time.time() - age}))
    assert store.obtain(digest("failing"), maker("mended", log), {})[1] == "compiled"
    assert compiled(log) == ["failing", "mended"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "[" * 100_000, '{"time": "x", "digest": 1, "message": 2, "details": 3}', "\0"]
)
def test_a_failure_that_cannot_be_read_is_none(store: KernelStore, log: Path, content: str) -> None:
    fail(store, log)
    path = record(store)
    path.write_text(content)
    assert store.obtain(digest("failing"), maker("mended", log), {})[1] == "compiled"


def test_a_failure_of_another_key_or_that_others_could_write_is_none(store: KernelStore, log: Path) -> None:
    fail(store, log)
    path = record(store)
    record(store, "a").write_bytes(path.read_bytes())
    assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"
    path.chmod(0o666)
    assert store.obtain(digest("failing"), maker("b", log), {})[1] == "compiled"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, DeviceUnavailableError])
def test_other_errors_are_not_remembered(
    folder: Path, store: KernelStore, log: Path, error: type[BaseException]
) -> None:
    def make() -> bytes:
        raise error

    with pytest.raises(error):
        store.obtain(digest("a"), make, {})
    assert files(folder) == []
    assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"


def test_a_new_failure_clears_those_that_are_forgotten(folder: Path, store: KernelStore) -> None:
    for key in ("a", "b"):
        fail(store, key=key)
    for key in ("a", "b"):
        expire(record(store, key))
    path = record(store, "c")
    assert fail(store, key="c").source_path == f"{path}.cu"
    assert files(folder / "failures") == [path, path.with_suffix(".cu")]


def test_a_failure_with_another_fingerprint_is_another(folder: Path, store: KernelStore, log: Path) -> None:
    # A path that is no valid UTF-8, as Python has it.
    without, other = "/without/header", "/other/\udcff"
    for fingerprint in (without, other):
        assert "remembered" not in str(fail(store, log, fingerprint=fingerprint))
        assert "remembered" in str(fail(store, log, fingerprint=fingerprint))
    assert compiled(log) == ["failing", "failing"]
    assert len(files(folder / "failures")) == 4
    # Once mended, the kernel is everybody's.
    make = maker("failing", log)
    assert store.obtain(digest("failing"), make, {}, fingerprint="/with/header") == (kernel("failing"), "compiled")
    assert store.obtain(digest("failing"), make, {}, fingerprint=without) == (kernel("failing"), "disk")


def test_the_fingerprint_is_no_part_of_the_lock(store: KernelStore, log: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        make = maker("a", log, 0.05)
        got = pool.map(lambda index: store.obtain(digest("a"), make, {}, fingerprint=str(index)), range(8))
    assert [kernel for kernel, _ in got] == [kernel("a")] * 8
    assert compiled(log) == ["a"]


def test_a_failure_is_forgotten_when_headers_are_installed(
    monkeypatch: pytest.MonkeyPatch, store: KernelStore, tmp_path: Path, log: Path
) -> None:
    include = tmp_path / "include"
    include.mkdir()
    os.utime(include, (0, 0))
    tools = Toolchain(tmp_path / "libnvrtc.so", (13, 0), "13.0.88", (include, tmp_path / "none"), "digest")
    monkeypatch.setattr(kernels, "store", lambda: store)
    monkeypatch.setattr(kernels, "toolchain", lambda: tools)
    monkeypatch.setattr(Unit, "of", lambda *_: Unit("failing", "int x", "sm_90a"))
    monkeypatch.setattr(Unit, "digest", lambda *_: digest("failing"))
    monkeypatch.setattr(Unit, "compile", lambda _: failing(log)())

    def load() -> str:
        return kernels.load(object.__new__(KernelKey), "sm_90a")[1]

    def is_remembered() -> bool:
        with pytest.raises(CompileError) as said:
            load()
        return "remembered" in str(said.value)

    assert [is_remembered(), is_remembered()] == [False, True]
    # Into the folder that is there; somewhere else; with another NVRTC.
    (include / "cuda_fp8.h").touch()
    assert [is_remembered(), is_remembered()] == [False, True]
    tools = dataclasses.replace(tools, include=(*tools.include, tmp_path / "none either"))
    assert [is_remembered(), is_remembered()] == [False, True]
    tools = dataclasses.replace(tools, nvrtc=tmp_path / "other" / "libnvrtc.so")
    monkeypatch.setattr(Unit, "compile", lambda _: Images(b"kernel", b"companion"))
    assert [load(), load()] == ["compiled", "disk"]


# ----------------------------------------------------------------------------------------------------------------------
# Their sources
# ----------------------------------------------------------------------------------------------------------------------


def test_the_source_of_a_failure_is_left_for_a_look(store: KernelStore, log: Path) -> None:
    path = record(store).with_suffix(".cu")
    for _ in range(2):
        assert fail(store, log).source_path == str(path)
    assert path.read_text(encoding="utf-8") == "int x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # It is the caller's to play with: what the error says does not come from there.
    path.write_text("int y")
    assert fail(store, log).source == "int x"
    path.unlink()
    assert fail(store, log).source_path is None
    assert compiled(log) == ["failing"]


@pytest.mark.parametrize("source", ["", "// \udcff \N{GREEK SMALL LETTER ALPHA}\n" * 2000])
def test_no_source_and_any_source_is_remembered(store: KernelStore, source: str) -> None:
    def make() -> bytes:
        raise CompileError("it does not compile", source=source)

    path = record(store, "a").with_suffix(".cu")
    for _ in range(2):
        with pytest.raises(CompileError) as said:
            store.obtain(digest("a"), make, {})
        assert (said.value.source, said.value.source_path) == (source, str(path) if source else None)
    if source:
        assert path.read_bytes().decode() == source.replace("\udcff", "\\udcff")


@pytest.mark.parametrize("how", ["asked for", "another fails", "pruned"])
def test_the_source_of_an_expired_failure_goes(folder: Path, store: KernelStore, log: Path, how: str) -> None:
    fail(store, log)
    expire(record(store))
    if how == "asked for":
        store.obtain(digest("failing"), maker("mended", log), {})
    elif how == "another fails":
        fail(store, log, key="other")
    else:
        store.prune()
    left = [record(store, "other"), record(store, "other").with_suffix(".cu")] if how == "another fails" else []
    assert files(folder / "failures") == left


def test_prune_leaves_the_sources_of_what_is_remembered(folder: Path, store: KernelStore, log: Path) -> None:
    path = Path(fail(store, log).source_path)
    planted = path.with_name("0" * 64 + ".cu")
    planted.write_text("planted")
    store.prune()
    assert files(folder / "failures") == [path.with_suffix(""), path]
    store.prune(everything=True)
    assert files(folder / "failures") == []


def test_a_source_without_a_record_goes(folder: Path, store: KernelStore, log: Path) -> None:
    fail(store, log, key="other")
    planted = record(store).with_suffix(".cu")
    for path in (planted, planted.with_name("planted.cu")):
        path.write_text("planted")
    path = Path(fail(store, log, key="third").source_path)
    kept = [record(store, "other"), record(store, "other").with_suffix(".cu"), path.with_suffix(""), path]
    assert files(folder / "failures") == sorted(kept)
    planted.write_text("planted")
    store.obtain(digest("failing"), maker("a", log), {})
    assert files(folder / "failures") == sorted(kept)


@pytest.mark.parametrize("planted", ["link", "dangling link", "folder"])
def test_what_is_planted_where_a_source_belongs_is_not_followed(
    store: KernelStore, log: Path, tmp_path: Path, planted: str
) -> None:
    target = tmp_path / "target"
    path = record(store).with_suffix(".cu")

    def plant() -> None:
        if planted == "folder":
            path.mkdir()
            (path / "file").touch()
        else:
            path.symlink_to(target if planted == "link" else tmp_path / "none")

    target.write_text("precious")
    target.chmod(0o600)
    put(store, "a")
    plant()
    assert fail(store, log).source_path == str(path)
    assert (path.read_text(), path.is_symlink()) == ("int x", False)
    # Beside a record too.
    path.unlink()
    plant()
    assert fail(store, log).source_path is None
    store.prune()
    assert not os.path.lexists(path)
    assert fail(store, log).source_path is None
    assert files(tmp_path / "cache" / "failures") == [path.with_suffix("")]
    assert target.read_text() == "precious"
    assert not (tmp_path / "none").exists()
    assert compiled(log) == ["failing"]


def test_a_source_that_others_could_write_is_not_named(store: KernelStore, log: Path) -> None:
    path = Path(fail(store, log).source_path)
    path.chmod(0o666)
    assert fail(store, log).source_path is None
    store.prune()
    assert not path.exists()


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("room", [0, 1])
def test_without_room_for_a_source_there_is_only_the_error(
    monkeypatch: pytest.MonkeyPatch, folder: Path, store: KernelStore, log: Path, room: int, reason: int
) -> None:
    """A disk that is full or read-only from the record on, or from the source on."""
    put(store, "a")
    real, files_made = tempfile.mkstemp, []

    def make(*given: object, **named: object) -> tuple[int, str]:
        if len(files_made) == room:
            raise OSError(reason, os.strerror(reason))
        files_made.append(1)
        return real(*given, **named)

    monkeypatch.setattr(tempfile, "mkstemp", make)
    with contextlib.ExitStack() as stack:
        if room == 0:
            stack.enter_context(pytest.warns(RuntimeWarning, match=f"cannot be written: {os.strerror(reason)}"))
        error = fail(store, log)
    assert (error.source, error.source_path) == ("int x", None)
    assert files(folder / "failures") == [record(store)][:room]
    error = fail(store, log)
    assert ("remembered" in str(error), error.source_path) == (room == 1, None)


# ----------------------------------------------------------------------------------------------------------------------
# Processes that die or fork
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def killed() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that a test starts and does not wait for."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_kill_9_in_mid_compile_leaves_nothing_to_wait_for(
    folder: Path, store: KernelStore, log: Path, killed: list[subprocess.Popen[str]]
) -> None:
    process = start("obtain", folder, "a", log, FOREVER)
    killed.append(process)
    process.stdin.write("go\n")
    process.stdin.flush()
    wait_for(lambda: compiled(log))
    assert len(files(folder / "locks")) == 1
    process.kill()
    process.wait()
    start_of_call = time.monotonic()
    assert store.obtain(digest("a"), maker("a", log), {}) == (kernel("a"), "compiled")
    assert time.monotonic() - start_of_call < 10
    assert compiled(log) == ["a", "a"]
    assert store.verify() == (1, [])
    assert files(folder / "locks") == []


def test_a_child_forked_in_mid_compile_does_not_hang(folder: Path, log: Path) -> None:
    said = answer(start("fork", folder, log))
    assert said == [["other", "compiled", True], ["slow", "disk", True]]
    assert compiled(log) == ["other", "slow"]


def test_a_child_forked_in_mid_compile_does_not_keep_the_lock(
    folder: Path, store: KernelStore, log: Path, killed: list[subprocess.Popen[str]]
) -> None:
    process = start("orphan", folder, log)
    killed.append(process)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        start_of_call = time.monotonic()
        assert store.obtain(digest("slow"), maker("slow", log), {})[1] == "compiled"
        assert time.monotonic() - start_of_call < 10
    finally:
        os.kill(child, signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------------------------
# Damage
# ----------------------------------------------------------------------------------------------------------------------


def _flipped(position: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        index = int(position * (len(data) - 1))
        return data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :]

    return flip


_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "one byte": lambda data: data[:1],
    "magic only": lambda data: data[: len(store_module._MAGIC)],
    "header only": lambda data: data[:60],
    "half": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte long": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "hole": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "text": lambda _: b"foreign\n",
    "cubin": lambda _: b"\x7fELF" + bytes(1000),
    "another version": lambda data: data.replace(b"kernel 1", b"kernel 2"),
    "sealed nonsense": lambda _: _sealed(store_module._MAGIC + b"\xff\xff\xff\xff"),
    "sealed magic": lambda _: _sealed(store_module._MAGIC),
    "sealed depth": lambda _: _sealed(store_module._MAGIC + (100_000).to_bytes(4, "little") + b"[" * 100_000),
    "sealed list": lambda _: _sealed(store_module._MAGIC + b"\2\0\0\0[]"),
} | {f"flipped at {at}": _flipped(at) for at in (0, 0.0001, 0.0003, 0.001, 0.002, 0.5, 0.9999, 1)}


def _sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES)
def test_damage_is_never_returned(store: KernelStore, log: Path, damage: Callable[[bytes], bytes]) -> None:
    path = put(store, "a")
    data = damage(path.read_bytes())
    path.write_bytes(data)
    assert store.get(digest("a")) is None
    (moved,) = files(store.folder / "quarantine")
    assert moved.read_bytes() == data
    assert store.obtain(digest("a"), maker("a", log), {}) == (kernel("a"), "compiled")
    assert store.get(digest("a")) == kernel("a")


def test_the_entry_of_another_key_is_not_returned(store: KernelStore, log: Path) -> None:
    store._path(digest("b")).parent.mkdir(parents=True, exist_ok=True)
    put(store, "a").rename(store._path(digest("b")))
    assert store.obtain(digest("b"), maker("b", log), {}) == (kernel("b"), "compiled")


def _link(path: Path, good: Path) -> None:
    path.symlink_to(good)


def _dangling(path: Path, good: Path) -> None:
    path.symlink_to(good.with_name("gone"))


def _pipe(path: Path, _good: Path) -> None:
    os.mkfifo(path)


def _full_folder(path: Path, _good: Path) -> None:
    path.mkdir()
    (path / "file").touch()


@pytest.mark.parametrize("plant", [_link, _dangling, _pipe, _full_folder])
def test_what_is_no_file_is_not_followed(
    store: KernelStore, log: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    path = put(store, "a")
    good = path.rename(tmp_path / "good")
    before = good.read_bytes()
    plant(path, good)
    assert [damage.path for damage in store.verify()[1]] in ([path], [path / "file"])
    if not path.is_dir():
        plant(path, good)
    assert store.get(digest("a")) is None
    assert store.obtain(digest("a"), maker("a", log), {}) == (kernel("a"), "compiled")
    assert store.get(digest("a")) == kernel("a")
    assert good.read_bytes() == before


def test_foreign_files_are_in_nobody_s_way(folder: Path, store: KernelStore, log: Path) -> None:
    path = put(store, "a")
    places = [folder, *(folder / name for name in SUBFOLDERS), path.parent]
    for place in places:
        (place / "foreign").write_text("foreign")
        (place / "unknown").mkdir()
        (place / "unknown" / "file").write_text("foreign")
        (place / "broken").symlink_to("/nowhere/at/all")
    assert store.get(digest("a")) == kernel("a")
    assert store.obtain(digest("b"), maker("b", log), {})[1] == "compiled"
    fail(store, log)
    assert [entry.info.get("name") for entry in store.entries()] == [None, "a"]
    checked, damaged = store.verify()
    assert checked == 2 + len(damaged)
    assert store.prune(everything=True).kept == 0
    assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"


def test_the_quarantine_keeps_the_latest_few(store: KernelStore) -> None:
    for index in range(store_module._QUARANTINED + 3):
        put(store, str(index)).write_text(str(index))
        assert store.get(digest(str(index))) is None
    kept = {path.read_text() for path in files(store.folder / "quarantine")}
    assert kept == {str(index) for index in range(3, store_module._QUARANTINED + 3)}


def test_verify_finds_every_damaged_entry(store: KernelStore) -> None:
    good = [put(store, key) for key in ("a", "b", "c")]
    truncated, open_to_all = put(store, "d"), put(store, "e")
    truncated.write_bytes(truncated.read_bytes()[:-5])
    open_to_all.chmod(0o606)
    shown: list[Path] = []
    checked, damaged = store.verify(lambda paths: shown.extend(paths) or iter(paths))
    assert checked == len(shown) == 5
    reasons = {damage.path: damage.reason for damage in damaged}
    assert reasons == {
        truncated: "does not match its checksum",
        open_to_all: "is writable by other users (mode 606)",
    }
    assert all(damage.moved_to.exists() and not damage.path.exists() for damage in damaged)
    assert store.verify() == (3, [])
    assert sorted(entry.path for entry in store.entries()) == sorted(good)


# ----------------------------------------------------------------------------------------------------------------------
# Whose it is
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_could_write_is_ignored(store: KernelStore, log: Path, mode: int) -> None:
    path = put(store, "a")
    path.chmod(mode)
    assert store.get(digest("a")) is None
    assert [kept.name[:64] for kept in files(store.folder / "quarantine")] == [f"{path.parent.name}{path.name}"]
    assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert store.get(digest("a")) == kernel("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away; the folder's test has it for every user")
def test_an_entry_of_another_user_is_ignored(store: KernelStore, log: Path) -> None:
    path = put(store, "a")
    os.chown(path, 12345, -1)
    assert store.get(digest("a")) is None
    assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"
    assert path.stat().st_uid == 0


@pytest.mark.parametrize("name", ["", "entries", "tmp", "locks", "failures", "quarantine"])
@pytest.mark.parametrize("fault", ["writable", "link", "file"])
def test_an_unsafe_folder_is_not_used(folder: Path, tmp_path: Path, log: Path, name: str, fault: str) -> None:
    put(KernelStore(folder), "a")
    place = folder / name
    if fault == "writable":
        place.chmod(0o770)
    else:
        place.rename(tmp_path / "moved")
        if fault == "link":
            # To where others could write, so that the folder itself may not be one either.
            (tmp_path / "moved").chmod(0o707)
            place.symlink_to(tmp_path / "moved")
        else:
            place.touch()
    before = files(tmp_path)
    store = KernelStore(folder)
    with pytest.warns(RuntimeWarning, match="without a kernel cache") as caught:
        got = [store.obtain(digest(key), maker(key, log), {}) for key in ("b", "b", "a")]
    assert len(caught) == 1
    assert got == [(kernel(key), "compiled") for key in ("b", "b", "a")]
    assert store.get(digest("a")) is None
    assert files(tmp_path) == before
    with pytest.raises(CacheError, match=FOLDER_VARIABLE):
        store.prune()
    assert files(tmp_path) == before


def test_a_folder_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, folder: Path, store: KernelStore, log: Path
) -> None:
    put(store, "a")
    before = files(folder)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match=f"belongs to another user .uid {owner}; this is uid {owner + 1}") as caught:
        assert store.get(digest("a")) is None
    assert len(caught) == 1
    assert store.obtain(digest("a"), maker("a", log), {})[1] == "compiled"
    assert KernelStore(folder).obtain(digest("b"), maker("b", log), {})[1] == "compiled"
    assert files(folder) == before
    for look in (store.entries, store.verify, store.prune):
        with pytest.raises(CacheError, match="belongs to another user"):
            look()


def test_failures_of_an_unsafe_folder_are_not_believed(folder: Path, store: KernelStore, log: Path) -> None:
    fail(store, log)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="writable by other users .mode 777"):
        assert store.obtain(digest("failing"), maker("b", log), {})[1] == "compiled"


@pytest.mark.parametrize("expired", [False, True])
def test_failures_of_an_unsafe_subfolder_are_neither_believed_nor_removed(
    folder: Path, store: KernelStore, log: Path, expired: bool
) -> None:
    fail(store, log)
    if expired:
        expire(record(store))
    (folder / "failures").chmod(0o770)
    before = files(folder / "failures")
    with pytest.warns(RuntimeWarning, match="writable by other users .mode 770"):
        assert store.obtain(digest("failing"), maker("b", log), {})[1] == "compiled"
    assert files(folder / "failures") == before


def test_the_folder_itself_may_be_a_link(folder: Path, store: KernelStore, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o755)
    folder.symlink_to(tmp_path / "scratch")
    put(store, "a")
    assert store.get(digest("a")) == kernel("a")


# ----------------------------------------------------------------------------------------------------------------------
# Nowhere to write
# ----------------------------------------------------------------------------------------------------------------------


def test_a_read_only_folder_is_read() -> None:
    said = answer(start("readonly"))
    assert said["said"] == [
        ["there", "disk", True],
        ["new", "compiled", True],
        ["new", "compiled", True],
        ["there", "disk", True],
    ]
    (warning,) = said["warnings"]
    assert "going on without a kernel cache" in warning
    assert "Permission denied" in warning


def _check_full(said: dict, reason: str) -> None:
    assert said["said"] == [["compiled", True]] * 4 + ["it does not compile"]
    (warning,) = said["warnings"]
    assert f"cannot be written: {reason}" in warning
    assert said["left"] == []


def test_files_that_cannot_grow_do_not_matter(tmp_path: Path) -> None:
    """The same as a full disk, for where no file system can be mounted."""
    _check_full(answer(start("full", tmp_path, "limited")), "File too large")


def test_a_full_disk_does_not_matter(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m,mode=0700 tmpfs "$0" && '
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        probe = subprocess.run(
            [*inside, mount + "true", str(tmp_path)], capture_output=True, text=True, check=False, timeout=30
        )
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if probe.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    process = subprocess.Popen(
        [*inside, mount + 'exec "$@"', str(tmp_path), *PROCESS, "full", str(tmp_path), "disk"],
        stdout=subprocess.PIPE,
        text=True,
    )
    _check_full(answer(process), "No space left on device")


@pytest.mark.parametrize("place", ["/proc/nowhere/cache", "file/cache"])
def test_a_folder_that_cannot_be_made_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / place))
    store = KernelStore()
    store_module._warned.discard(store.folder)
    with pytest.warns(RuntimeWarning, match="without a kernel cache: .* cannot be") as caught:
        assert store.obtain(digest("a"), maker("a", log), {}) == (kernel("a"), "compiled")
    assert store.obtain(digest("a"), maker("a", log), {}) == (kernel("a"), "compiled")
    assert len(caught) == 1


@pytest.mark.parametrize("deleted", ["everything", "contents", "tmp", "entries", "locks"])
def test_a_cache_that_is_deleted_under_a_running_program_comes_back(
    folder: Path, store: KernelStore, log: Path, deleted: str
) -> None:
    put(store, "a")
    gone = {"everything": [folder], "contents": list(folder.iterdir())}.get(deleted, [folder / deleted])
    for path in gone:
        remove(path)
    store.obtain(digest("b"), maker("b", log), {})
    assert store.get(digest("b")) == kernel("b")
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ----------------------------------------------------------------------------------------------------------------------
# Clocks
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0, 1, 4102444800], ids=["1970", "1970 and a second", "2100"])
def test_wrong_times_of_files_do_no_harm(folder: Path, log: Path, moment: int) -> None:
    store = limited(folder, 350_000)
    for key in ("a", "b", "c"):
        put(store, key)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (moment, moment))
    assert all(store.get(digest(key)) == kernel(key) for key in ("a", "b", "c"))
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))
    store = limited(folder, 350_000)
    for key in ("d", "e", "f"):
        put(store, key)
        assert store.get(digest(key)) == kernel(key)
    assert sum(entry.size for entry in store.entries()) <= 350_000
    assert store.verify()[1] == []
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))
    assert store.prune(older_than=86400).kept == 0
    assert compiled(log) == []


# ----------------------------------------------------------------------------------------------------------------------
# Pruning
# ----------------------------------------------------------------------------------------------------------------------


def _names(store: KernelStore) -> list[object]:
    return [entry.info["name"] for entry in store.entries()]


def test_prune_removes_what_was_not_read_for_longest(store: KernelStore) -> None:
    now = time.time()
    for age, key in enumerate(("a", "b", "c", "d")):
        os.utime(put(store, key), (now, now - age * 86400))
    assert store.prune() == store_module.Pruning(0, 0, 4, sum(entry.size for entry in store.entries()))
    assert store.prune(older_than=2.5 * 86400).removed == 1
    assert _names(store) == ["a", "b", "c"]
    done = store.prune(max_bytes=250_000)
    assert (done.removed, done.kept) == (1, 2)
    assert done.kept_bytes == sum(entry.size for entry in store.entries())
    assert _names(store) == ["a", "b"]
    assert store.prune(everything=True).removed == 2
    assert store.entries() == []
    assert store.get(digest("a")) is None
    put(store, "a")
    assert _names(store) == ["a"]


def test_prune_clears_what_is_of_no_use(folder: Path, store: KernelStore, log: Path) -> None:
    for key in ("failing", "forgotten"):
        fail(store, log, key)
    put(store, "a").write_text("damaged")
    assert store.get(digest("a")) is None
    put(store, "a")
    expire(record(store, "forgotten"))
    for name, age in (("old", 7200), ("future", -7200), ("young", 0)):
        path = folder / "tmp" / f"entry-{name}"
        path.touch()
        os.utime(path, (time.time() - age, time.time() - age))
    (folder / "locks" / "left by the dead").touch()
    held = folder / "locks" / store_module._name(digest("held"))
    with locks.hold(held, 1):
        store.prune()
        assert files(folder / "locks") == [held]
        assert locks.try_lock(held) is None
    assert [path.name for path in files(folder / "tmp")] == ["entry-young"]
    assert files(folder / "quarantine") == []
    assert files(folder / "failures") == [record(store), record(store).with_suffix(".cu")]
    assert _names(store) == ["a"]
    store.prune(everything=True)
    assert [path.name for path in files(folder)] == ["entry-young"]


def test_prune_while_others_use_it(folder: Path) -> None:
    done = threading.Event()

    def prune() -> None:
        while not done.is_set():
            KernelStore(folder).prune(everything=True)

    def ask(index: int) -> bool:
        key = f"key{index % 5}"
        return KernelStore(folder).obtain(digest(key), lambda: kernel(key), {})[0] == kernel(key)

    with ThreadPoolExecutor(5) as pool:
        pruning = pool.submit(prune)
        try:
            assert all(pool.map(ask, range(60)))
        finally:
            done.set()
        pruning.result()


def test_the_home_of_nobody_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOMR_CUTLASS_CACHE_DIR", "~nosuchuserhere/cache")
    with pytest.raises(CacheError, match="ATOMR_CUTLASS_CACHE_DIR is '~nosuchuserhere/cache'"):
        KernelStore()
