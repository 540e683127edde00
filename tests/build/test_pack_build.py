"""`atomr-cutlass build`: packs of cubins out of files of keys, by NVRTC, without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import DeviceUnavailableError, LibraryError, SmArch, _core
from atomr_cutlass.generator import elf, key_file
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.toolchain import system_nvcc
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.files import FOLDER_VARIABLE
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.jit.toolchain import toolchain
from atomr_cutlass.pipeline import pack, pack_build

# The quickest to compile.
CASTS = [k for k in expand("full", [SmArch.SM80, SmArch.SM89]) if k.op == "cast" and k.d is D.F16]
KEYS = [k for k in CASTS if k.arch is SmArch.SM80][:2]


@pytest.fixture(autouse=True)
def _needs_nvrtc() -> None:
    try:
        toolchain()
    except DeviceUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests share: what one has compiled, the next one has."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    return folder


def _build(folder: Path, cache: Path, keys: list[Any], *options: str) -> subprocess.CompletedProcess[str]:
    recorded = folder / "keys.jsonl"
    recorded.write_text("".join(f"{key_file.line(key, shapes=[], count=1)}\n" for key in keys))
    code = "from atomr_cutlass.cli.app import app; app()"
    return subprocess.run(
        [sys.executable, "-c", code, "build", str(recorded), *options],
        env=os.environ | {FOLDER_VARIABLE: str(cache)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_a_pack_is_built_of_keys_and_those_of_other_archs_are_named(tmp_path: Path, cache: Path) -> None:
    made = tmp_path / "model.pack"
    other = next(key for key in CASTS if key.arch is SmArch.SM89)
    done = _build(tmp_path, cache, [*KEYS, other], "--arch", "80", "-o", str(made), "--json")
    assert done.returncode == 0, done.stderr
    assert f"{other.name} is of 89, and left out" in done.stderr
    assert "2 of 2: " in done.stderr
    said = json.loads(done.stdout)
    assert (said["skipped"], [k["name"] for k in said["kernels"]]) == ([other.name], [key.name for key in KEYS])
    built = pack.read_cubins(made)
    assert [cubin.key for cubin in built.cubins] == KEYS
    assert built.built["abi_version"] == _core.ABI_VERSION
    assert set(built.built["headers"]) == {"cutlass", "atomr_cutlass", "cccl", "cuda"}
    assert "Redistribution" in built.built["licenses"]["CUTLASS"]
    for cubin in built.cubins:
        assert cubin.kernel.startswith(b"\x7fELF")
        assert cubin.key.name.encode() in cubin.kernel
        assert 0 < cubin.threads <= 1024
        assert cubin.content.count(" ") == 3
    code = f"import atomr_cutlass as ac; print(ac.load_pack({str(made)!r}), len(ac.kernels(filter='cast')))"
    # Where there is a GPU, it may be one that this code is not for.
    listed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    new, there = map(int, listed.stdout.split())
    assert (new in (0, 2), there >= 2) == (True, True)

    # Again: from the cache, and the same bytes.
    again = tmp_path / "model" / "model.pack"
    again.parent.mkdir()
    entries = {entry.digest: entry.made for entry in KernelStore(cache).entries()}
    assert _build(tmp_path, cache, KEYS, "-o", str(again)).returncode == 0
    assert again.read_bytes() == made.read_bytes()
    assert {entry.digest: entry.made for entry in KernelStore(cache).entries()} == entries


@pytest.mark.slow
def test_nvcc_builds_a_shared_library_that_is_sealed(tmp_path: Path, cache: Path) -> None:
    if shutil.which("c++") is None or system_nvcc() is None:
        pytest.skip("there is no nvcc, or no host compiler")
    made = [tmp_path / "first" / "model.so", tmp_path / "second" / "model.so"]
    for path in made:
        path.parent.mkdir()
        done = _build(tmp_path, cache, KEYS, "--compiler", "nvcc", "-o", str(path), "--json")
        assert done.returncode == 0, done.stderr
        entries = {entry.digest: entry.made for entry in KernelStore(cache).entries()}
    # Both kernels as one unit; the second time from the cache, and the same bytes.
    units = [entry.info for entry in KernelStore(cache).entries() if entry.info["target"] == "sm_80 object"]
    assert len(units) == 1
    assert {entry.digest: entry.made for entry in KernelStore(cache).entries()} == entries
    assert made[0].read_bytes() == made[1].read_bytes()
    said = json.loads(done.stdout)
    assert (said["form"], [kernel["name"] for kernel in said["kernels"]]) == ("library", [key.name for key in KEYS])
    assert re.fullmatch(r"nvcc \d+\.\d+\.\d+", said["compiler"])
    assert re.fullmatch(r"2\.\d+", said["glibc"])
    code = (
        f"import atomr_cutlass as ac; ac.load_pack({str(made[0])!r}); print(*[k.name for k in ac.kernels() if k.pack])"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(listed.stdout.split()) <= {key.name for key in KEYS}


def test_another_compiler_is_refused(tmp_path: Path, cache: Path) -> None:
    done = _build(tmp_path, cache, KEYS, "--compiler", "gcc", "-o", str(tmp_path / "model.so"))
    assert (done.returncode, "valid: nvrtc, nvcc" in done.stderr) == (2, True)


def test_no_key_left_and_bad_files_are_errors_of_usage(tmp_path: Path, cache: Path) -> None:
    done = _build(tmp_path, cache, KEYS, "--arch", "90a", "-o", str(tmp_path / "model.pack"))
    assert (done.returncode, "has keys of 80, and none of 90a" in done.stderr) == (2, True)
    done = _build(tmp_path, cache, [], "-o", str(tmp_path / "model.pack"))
    assert (done.returncode, "holds no key" in done.stderr) == (2, True)
    assert not (tmp_path / "model.pack").exists()


def test_any_executor_compiles_and_makes_the_same_pack(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache))
    monkeypatch.setattr(kernels, "store", lambda: KernelStore(cache))
    done: list[str] = []
    by_threads = pack_build.build(KEYS, "model", finished=lambda key: done.append(key.name))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        by_processes = pack_build.build(KEYS, "model", executor=pool)
    assert by_threads == by_processes
    assert sorted(done) == sorted(key.name for key in KEYS)


class _Dying(ProcessPoolExecutor):
    """Whose processes die of what they are given."""

    def submit(self, *_given: Any, **_named: Any) -> Future[Any]:
        return super().submit(os._exit, 9)


def test_a_worker_that_dies_is_an_error_that_says_what_to_do() -> None:
    with _Dying(1, mp_context=get_context("spawn")) as pool, pytest.raises(LibraryError, match=r"died.*Build again"):
        pack_build.build(KEYS, "model", executor=pool)


def test_a_dask_cluster_compiles_and_survives_the_death_of_a_worker(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    tmp_path.chmod(0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))  # which the workers inherit: empty, so that they compile
    keys = [k for k in CASTS if k.arch is SmArch.SM80][:4]
    seen: list[str] = []
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster.scheduler_address, set_as_default=False) as client,
    ):
        workers = client.run(os.getpid)
        assert len(workers) == 2

        def finished(key: KernelKey) -> None:
            if not seen:
                # One that is compiling.
                busy = [worker for worker, tasks in client.processing().items() if tasks]
                os.kill(workers[busy[0]], signal.SIGKILL)
            seen.append(key.name)

        with pack_build.dask_cluster(cluster.scheduler_address) as executor:
            made = pack_build.build(keys, "model", executor=executor, finished=finished)
        assert set(client.run(os.getpid).values()) != set(workers.values())
    assert sorted(seen) == sorted(key.name for key in keys)
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache))
    monkeypatch.setattr(kernels, "store", lambda: KernelStore(cache))
    assert pack_build.build(keys, "model") == made


def test_a_scheduler_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(pack_build, "_CONNECT_SECONDS", 1.0)
    with (
        pytest.raises(LibraryError, match=r"no scheduler answers at tcp://127\.0\.0\.1:9"),
        pack_build.dask_cluster("tcp://127.0.0.1:9"),
    ):
        pytest.fail("entered")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(DeviceUnavailableError, match=r"atomr-cutlass\[dask\]"), pack_build.dask_cluster("tcp://x:1"):
        pytest.fail("entered")


def test_another_toolchain_is_refused() -> None:
    with pytest.raises(LibraryError, match=r"the toolchain here is nvrtc .*, and nvrtc 1\.0 0 is to compile"):
        pack_build.compile_key(key_file.line(KEYS[0]), "nvrtc 1.0 0")


def test_what_is_no_elf_file_has_no_variables() -> None:
    for text in (b"", b"\x7fELF" + bytes(60), b"x" * 4096):
        assert elf.variable(text, "thing", 8) == b""
        assert list(elf.device_code(text)) == []
