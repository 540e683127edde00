"""Actions for processes of `test_jit_store.py`: `python store_process.py ACTION FOLDER ...` prints JSON."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from atomr_cutlass.errors import CompileError
from atomr_cutlass.jit.store import KernelStore


def kernel(key: str, size: int = 100_000) -> bytes:
    """The stand-in of a key's compiled kernel."""
    return (key.encode() + b"\0") * (size // (len(key) + 1))


def digest(key: str) -> bytes:
    """The stand-in of a key's digest."""
    return key.encode().ljust(32, b".")


def maker(key: str, log: Path | None = None, seconds: float = 0.0, size: int = 100_000) -> Callable[[], bytes]:
    """A compiler that writes a line for each call."""

    def make() -> bytes:
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{key}\n")
        time.sleep(seconds)
        return kernel(key, size)

    return make


def failing(log: Path | None = None) -> Callable[[], bytes]:
    """A compiler that writes a line for each call and fails."""

    def make() -> bytes:
        maker("failing", log)()
        raise CompileError("it does not compile", log="line 1: error\n", source="int x", options=("-a", "-b"))

    return make


def obtain(folder: str, key: str, log: str, seconds: str) -> object:
    """Waits for a line on the standard input, then asks for a kernel."""
    store = KernelStore(Path(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    make = failing(Path(log)) if key == "failing" else maker(key, Path(log), float(seconds))
    try:
        got, source = store.obtain(digest(key), make, {"name": key})
    except CompileError as error:
        return {"error": str(error), "log": error.log, "source": error.source, "options": error.options}
    return {"source": source, "right": got == kernel(key), "seconds": time.monotonic() - start}


def full(folder: str, limit: str) -> object:
    """Asks for kernels where there is no room: on a file system of 1 MiB, or with files limited to that."""
    place = Path(folder) / "cache"
    store = KernelStore(place)
    if limit == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    size = 3 << 20
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            got, source = store.obtain(digest("big"), maker("big", size=size), {})
            said.append([source, got == kernel("big", size)])
        if limit == "limited":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        else:
            _fill(place)
        for _ in range(2):
            got, source = store.obtain(digest("small"), maker("small", size=10_000), {})
            said.append([source, got == kernel("small", 10_000)])
        try:
            store.obtain(digest("failing"), failing(), {})
        except CompileError as error:
            said.append(str(error))
    left = [str(path) for name in ("tmp", "entries") for path in (place / name).rglob("*") if path.is_file()]
    return {"said": said, "warnings": [str(warning.message) for warning in caught], "left": left}


def _fill(folder: Path) -> None:
    for size in (1 << 16, 1):
        with (folder / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def readonly() -> object:
    """Asks for kernels of a folder that cannot be written."""
    # Not pytest's folder: another user, which root becomes here, cannot go there.
    folder = Path(tempfile.mkdtemp()) / "cache"
    said = []
    try:
        KernelStore(folder).obtain(digest("there"), maker("there"), {})
        everything = [folder.parent, folder, *folder.rglob("*")]
        for path in everything:
            path.chmod(0o500 if path.is_dir() else 0o400)
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
        if os.geteuid() == 0:
            # Permissions do not hold root back.
            os.setegid(65534)
            os.seteuid(65534)
        store = KernelStore(folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for key in ("there", "new", "new", "there"):
                got, source = store.obtain(digest(key), maker(key), {})
                said.append([key, source, got == kernel(key)])
        return {"said": said, "warnings": [str(warning.message) for warning in caught]}
    finally:
        os.seteuid(os.getuid())
        for path in (folder.parent, folder):
            path.chmod(0o700)
        for path in folder.iterdir():
            path.chmod(0o700)
            for below in path.iterdir():
                below.chmod(0o700)
        shutil.rmtree(folder.parent)


def _in_a_thread(store: KernelStore, make: Callable[[], bytes]) -> threading.Thread:
    """A thread that is compiling when this returns."""
    busy = threading.Event()

    def compiling() -> bytes:
        busy.set()
        return make()

    thread = threading.Thread(target=store.obtain, args=(digest("slow"), compiling, {}), daemon=True)
    thread.start()
    busy.wait()
    return thread


def fork(folder: str, log: str) -> object:
    """Forks while threads compile and publish; the child asks for another kernel and then for the one in the making."""
    store = KernelStore(Path(folder))
    store.obtain(digest("first"), maker("first"), {})
    read, write = os.pipe()

    def make() -> bytes:
        # Until the child has its other kernel, or hangs.
        select.select([read], [], [], 20)
        return maker("slow", Path(log))()

    thread = _in_a_thread(store, make)
    if os.fork() == 0:
        for key in ("other", "slow"):
            got, source = store.obtain(digest(key), maker(key, Path(log)), {})
            os.write(write, json.dumps([key, source, got == kernel(key)]).encode() + b"\n")
        os._exit(0)
    os.close(write)
    thread.join()
    with os.fdopen(read) as pipe:
        return [json.loads(line) for line in pipe]


def orphan(folder: str, log: str) -> object:
    """Forks while a thread compiles, and stays in the compile, as does the child."""
    _in_a_thread(KernelStore(Path(folder)), maker("slow", Path(log), 60.0))
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
    return None


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    print(json.dumps(globals()[action](*arguments)))
