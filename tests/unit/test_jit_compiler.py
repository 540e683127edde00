"""The run-time compiler: what identifies a kernel in the cache, its processes, and what it lacks.

NVRTC itself is in tests/build/test_nvrtc.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from cuda import pathfinder

from atomr_cutlass import CacheError, CompileError, DeviceUnavailableError, LibraryError, SmArch, UnsupportedError
from atomr_cutlass.generator import headers
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit import compiler, kernels, store, toolchain, worker
from atomr_cutlass.jit.compiler import Images, Unit
from atomr_cutlass.jit.files import FOLDER_VARIABLE
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.jit.toolchain import Toolchain
from atomr_cutlass.pipeline import devices
from fake_table import A100, ADA, H200
from jit_unit import KEY, TOOLS, UNIT

BROKEN = Unit("broken", 'extern "C" __global__ void broken() { int x = ; }', "sm_80")


def _digest(unit: Unit = UNIT, **changes: Any) -> bytes:
    values = {name: getattr(TOOLS, name) for name in ("nvrtc", "version", "build", "include", "headers")}
    return unit.digest(Toolchain(**(values | changes)))


def test_a_kernels_digest_holds_what_it_is_compiled_from_and_no_path() -> None:
    assert _digest() == _digest(nvrtc=Path("/b/libnvrtc.so"), include=(Path("/b"), Path("/c")))
    others = [
        _digest(build="V13.0.89"),
        _digest(headers={"cutlass": "1", "ours": "3"}),
        _digest(Unit.of(KEY, "compute_80")),
        _digest(Unit.of(KEY, "sm_86")),
        _digest(Unit.of(expand("smoke", [SmArch.SM80])[1], "sm_80")),
    ]
    assert len({_digest(), *others}) == len(others) + 1


def test_a_digest_is_the_same_in_another_process() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_jit_compiler as t; print(t._digest().hex())"
    folders = [str(Path(__file__).parent), *sys.path]
    process = subprocess.run(
        [sys.executable, "-c", code, *folders],
        capture_output=True, text=True, check=True, cwd="/", env=os.environ | {"PYTHONHASHSEED": "7"}, timeout=60,
    )  # fmt: skip
    assert process.stdout.strip() == _digest().hex()


def test_threads_that_ask_first_all_get_the_digest() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import test_jit_compiler as t\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool: found = list(pool.map(lambda _: t._digest().hex(), range(16)))\n"
        "print(*set(found))"
    )
    folders = [str(Path(__file__).parent), *sys.path]
    process = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False, cwd="/", timeout=60
    )
    assert process.stdout.split() == [_digest().hex()], process.stderr


def test_headers_are_identified_by_what_is_in_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "a.h").write_text("int x;")
        (tmp_path / name / "b.hpp").write_text("int y;")
    (tmp_path / "two" / "notes.txt").write_text("not a header")
    assert headers.digest(tmp_path / "one") == headers.digest(tmp_path / "two")
    os.utime(tmp_path / "one" / "b.hpp", (0, 0))
    assert headers.digest(tmp_path / "one") == headers.digest(tmp_path / "two")
    (tmp_path / "two" / "b.hpp").write_text("int z;")
    assert headers.digest(tmp_path / "one") != headers.digest(tmp_path / "two")
    (tmp_path / "two" / "b.hpp").rename(tmp_path / "two" / "c.hpp")
    (tmp_path / "two" / "c.hpp").write_text("int y;")
    assert headers.digest(tmp_path / "one") != headers.digest(tmp_path / "two")


@pytest.mark.parametrize(
    ("key", "device", "arch"),
    [(KEY, A100, "sm_80"), (KEY, ADA, "sm_80"), (KEY, H200, "compute_80"),
     (expand("smoke", [SmArch.SM90A])[0], H200, "sm_90a")],
)  # fmt: skip
def test_a_device_of_another_generation_gets_ptx(key: Any, device: devices.Device, arch: str) -> None:
    assert kernels.target_for(key, device) == arch


def test_ptx_that_the_driver_is_too_old_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = dataclasses.replace(TOOLS, version=(13, 1))
    monkeypatch.setattr(kernels, "toolchain", lambda: tools)
    older, newer = (dataclasses.replace(H200, cuda_version=version) for version in (13000, 13010))
    assert kernels.target_for(KEY, newer) == "compute_80"
    with pytest.raises(
        UnsupportedError,
        match=r"as PTX only, and this driver \(CUDA 13\.0\) does not translate that of CUDA 13\.1's NVRTC: update the "
        r"driver, or install NVRTC and headers of CUDA 13\.0",
    ):
        kernels.target_for(KEY, older)
    # Machine code of a newer minor version runs.
    assert kernels.target_for(expand("smoke", [SmArch.SM90A])[0], older) == "sm_90a"
    assert not kernels.ready(KEY, older)
    with pytest.warns(RuntimeWarning, match="not compiled in the background: .*CUDA 13"):
        kernels.in_background(KEY, older, lambda: None)


def test_images_come_back_whole() -> None:
    images = Images(b"kernel", b"")
    assert Images.unpack(images.pack()) == images


def test_the_first_error_of_a_log_is_found() -> None:
    assert compiler.first_error("a.h(1): warning\n\n  a.h(2): error: no such thing\nerror: another") == (
        "a.h(2): error: no such thing"
    )
    assert compiler.first_error("killed") == "killed"
    assert compiler.first_error("") == "no message"


def _worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(text)
    monkeypatch.setattr(compiler, "_WORKER", script)
    monkeypatch.setattr(compiler, "toolchain", lambda: TOOLS)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))


def test_a_compiler_that_dies_is_no_broken_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _worker(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(LibraryError, match="signal 9"):
        BROKEN.compile()
    _worker(monkeypatch, tmp_path, "import sys; sys.exit('out of memory')")
    with pytest.raises(LibraryError, match="status 1: out of memory"):
        BROKEN.compile()


def test_a_compiler_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _worker(monkeypatch, tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    with pytest.raises(LibraryError, match="did not end within"):
        BROKEN.compile()
    assert compiler._running == set()


WHOLE = worker.answer(b"image" * 100_000, "a warning")


def test_an_answer_of_the_worker_comes_back_as_it_was() -> None:
    assert worker.parse(WHOLE) == (b"image" * 100_000, "a warning")
    for given in ((None, "an error"), (b"", ""), (b"\n{}\n", "two\nlines")):
        assert worker.parse(worker.answer(*given)) == given
    for wrong in (b"", b"\n", b"1\n", b"[]\n", WHOLE[:10], b"Usage: program\n"):
        with pytest.raises((ValueError, TypeError)):
            worker.parse(wrong)


def test_what_is_no_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Python is part of another program, `sys.executable` may be that program."""
    _worker(monkeypatch, tmp_path, "print('another program')")
    with pytest.raises(LibraryError, match="ended well, but without a result"):
        UNIT.compile()


@pytest.mark.parametrize(
    ("end", "reason"), [("sys.exit(3)", "status 3"), ("sys.stdout.flush(); os.kill(os.getpid(), 9)", "signal 9")]
)
def test_the_result_of_a_compiler_that_failed_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, reason: str
) -> None:
    for result in (WHOLE, WHOLE[:-1000]):
        _worker(monkeypatch, tmp_path, f"import os, sys; sys.stdout.buffer.write({result!r}); {end}")
        with pytest.raises(LibraryError, match=f"ended with {reason}"):
            UNIT.compile()


def test_results_of_any_size_come_back_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Larger than a pipe holds, and the one that is waited for first ends last."""
    _worker(
        monkeypatch,
        tmp_path,
        f"import json, os, sys, time; sys.path.append({str(Path(worker.__file__).parent)!r}); import worker\n"
        "def compile_source(options, **_):\n"
        f"    companion = {compiler.COMPANION!r} in options\n"
        "    time.sleep(0.1 if companion else 1.0)\n"
        "    print('a library says something', flush=True); os.write(1, b'and more')\n"
        "    return (b'second' if companion else b'first') * 500_000, ''\n"
        "worker.compile_source = compile_source\n"
        "worker.main()",
    )
    assert UNIT.compile() == Images(b"first" * 500_000, b"second" * 500_000)


def test_a_compiler_that_hangs_is_stopped_at_its_own_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not at that of the other one and its own."""
    _worker(
        monkeypatch,
        tmp_path,
        f"import json, sys, time; sys.path.append({str(Path(worker.__file__).parent)!r}); import worker\n"
        f"time.sleep(600 if {compiler.COMPANION!r} in json.loads(sys.stdin.readline())['options'] else 2.5)\n"
        "sys.stdout.buffer.write(worker.answer(b'', ''))",
    )
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 4.0)
    start = time.monotonic()
    with pytest.raises(LibraryError, match="did not end within 4 s"):
        UNIT.compile()
    assert time.monotonic() - start < 6.4


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither TMPDIR nor /tmp nor any other folder that Python tries can be written."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])


@pytest.mark.usefixtures("no_temporary_folder")
def test_kernels_are_compiled_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _worker(monkeypatch, tmp_path, f"import sys; sys.stdout.buffer.write({WHOLE!r})")
    assert UNIT.compile().kernel == b"image" * 100_000


@pytest.mark.usefixtures("no_temporary_folder")
def test_without_a_temporary_folder_and_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/atomr_cutlass"))
    with pytest.raises(CacheError, match=r"No usable temporary directory.*name a folder in ATOMR_CUTLASS_CACHE_DIR"):
        KernelStore()


def test_a_compilation_is_waited_for_until_it_may_take_no_longer() -> None:
    # One compiler after the other, where they may not run side by side.
    assert store.LOCK_SECONDS > 2 * compiler.COMPILE_SECONDS


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process started in the background of a shell ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _worker(monkeypatch, tmp_path, "import time; time.sleep(600)")
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        BROKEN.compile()
    assert time.monotonic() - start < 30
    assert compiler._running == set()


def test_a_process_does_not_wait_at_exit_for_what_compiles_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import time; time.sleep(600)")
    code = (
        "import sys, time; sys.path[:0] = sys.argv[2:]; import test_jit_compiler as t\n"
        "from pathlib import Path; from atomr_cutlass.jit import compiler, kernels\n"
        "compiler._WORKER = Path(sys.argv[1]); compiler.toolchain = kernels.toolchain = lambda: t.TOOLS\n"
        "kernels.in_background(t.KEY, t.A100, lambda: None)\n"
        "while not compiler._running: time.sleep(0.01)\n"
        "print('ends')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "worker.py"), str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"ATOMR_CUTLASS_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=60)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("ends\n", "", 0)


@pytest.mark.parametrize("request_bytes", [10, 200_000])
def test_a_worker_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_bytes: int
) -> None:
    """Whether it reads its request or not, and though a child of its own keeps the pipes open."""
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nsleep 30\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))  # whose turns the children of other tests do not hold
    request = {"library": "x", "name": "n", "source": "x" * request_bytes, "options": [], "image": "cubin"}
    begun = time.monotonic()
    with pytest.raises(LibraryError, match="did not end within"):
        compiler._compiled([request] * 2)
    assert time.monotonic() - begun < 10
    assert not compiler._running


def test_a_broken_source_says_so_with_log_source_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = worker.answer(None, "broken(1): error: expected an expression\n1 error detected")
    _worker(monkeypatch, tmp_path, f"import sys; sys.stdout.buffer.write({answer!r})")
    with pytest.raises(
        CompileError, match=r"broken does not compile for sm_80: broken\(1\): error: expected"
    ) as caught:
        BROKEN.compile()
    assert "1 error detected" in caught.value.log
    assert caught.value.source == BROKEN.source
    assert "--gpu-architecture=sm_80" in caught.value.options


def test_the_worker_is_told_everything_and_the_environment_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _worker(
        monkeypatch,
        tmp_path,
        "import json, os, sys\n"
        "asked = json.loads(sys.stdin.readline())\n"
        "print('somebody else says something', file=sys.stderr)\n"
        "asked['isolated'] = sys.flags.isolated\n"
        f"sys.path.append({str(Path(worker.__file__).parent)!r}); import worker\n"
        "sys.stdout.buffer.write(worker.answer(json.dumps(asked).encode(), ''))",
    )
    images = Unit.of(KEY, "compute_80").compile()
    kernel, companion = json.loads(images.kernel), json.loads(images.companion)
    assert (kernel["image"], kernel["isolated"], kernel["library"]) == ("ptx", 1, str(TOOLS.nvrtc))
    assert kernel["name"] == KEY.name
    assert KEY.name in kernel["source"]
    assert set(companion["options"]) - set(kernel["options"]) == {compiler.COMPANION}
    assert "-I/a/include" in kernel["options"]


# ----------------------------------------------------------------------------------------------------------------------
# What is missing


class _NoNvrtc:
    """Of CUDA 13.0, without a compiler."""

    def __init__(self, library: str) -> None:
        self.library = library

    def version(self) -> tuple[int, int]:
        return 13, 0

    def compile(self, *_: object) -> tuple[bytes, str]:
        return b"// nothing", ""


def _find(monkeypatch: pytest.MonkeyPatch, library: str | None = None, **folders: str) -> None:
    """Has `toolchain` find these and nothing else."""

    def load(_: str) -> Any:
        if library is None:
            raise pathfinder.DynamicLibNotFoundError
        return types.SimpleNamespace(abs_path=library)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", folders.get)
    monkeypatch.setattr(toolchain, "DEFAULT_ROOTS", ())
    monkeypatch.setattr(toolchain, "Nvrtc", _NoNvrtc)
    monkeypatch.setenv("PATH", "")


@pytest.fixture(autouse=True)
def _found_anew() -> Any:
    toolchain.toolchain.cache_clear()
    yield
    toolchain.toolchain.cache_clear()


def test_what_is_missing_is_named_with_both_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, component in (
        ({}, "NVRTC"),
        ({"library": "/a/libnvrtc.so"}, "The folder of CUDA's headers"),
        ({"library": "/a/libnvrtc.so", "cccl": "/a/cccl"}, "The folder of CUDA's headers"),
    ):
        with monkeypatch.context() as patch:
            _find(patch, **found)
            with pytest.raises(
                DeviceUnavailableError,
                match=r"pip install 'atomr-cutlass\[cu13\]'.* by a preset .* as a pack \(atomr-cutlass build\)",
            ) as caught:
                kernels.load(KEY, "sm_80")
            assert str(caught.value).startswith(f"{component} is missing")


def _toolkit(root: Path, libraries: str = "lib64") -> Path:
    """A toolkit's folder, of which only the layout is right."""
    for name in (f"{libraries}/libnvrtc.so.13", "bin/nvcc", "include/cuda.h", "include/cccl/cuda/std/__cccl/version.h"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("#define CUDA_VERSION 13000\n#define CCCL_VERSION 3000000\n")
    (root / "bin" / "nvcc").chmod(0o755)
    return root


@pytest.mark.parametrize("libraries", ["lib64", "targets/x86_64-linux/lib"])
@pytest.mark.parametrize("by", ["path", "installer"])
def test_an_installed_toolkit_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str, libraries: str
) -> None:
    root = _toolkit(tmp_path / "cuda", libraries)
    _find(monkeypatch, cccl="/another/cccl", cudart="/another/include")
    if by == "path":
        monkeypatch.setenv("PATH", str(root / "bin"))
    else:
        monkeypatch.setattr(toolchain, "DEFAULT_ROOTS", (root,))
    found = toolchain.toolchain()
    assert found.nvrtc == root / libraries / "libnvrtc.so.13"
    # Its own headers, not those that are somewhere else.
    assert found.include[-3:] == (root / "include" / "cccl", root / "include", root / "include")


def test_headers_that_cutlass_does_not_compile_with_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = tmp_path / "cuda" / "std" / "__cccl" / "version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define CCCL_VERSION 3002000\n")
    _find(monkeypatch, library="/a/libnvrtc.so", cccl=str(tmp_path), cudart=str(tmp_path))
    with pytest.raises(DeviceUnavailableError, match=r"CCCL 3\.2\) are newer than CUTLASS 4\.2 compiles with"):
        toolchain.toolchain()


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "glibc.malloc.hugetlb=1"), ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0")],
)
def test_workers_ask_for_huge_pages_unless_the_user_says_otherwise(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two settings the last counts."""
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    assert compiler._environment() == {**os.environ, "GLIBC_TUNABLES": expected}
