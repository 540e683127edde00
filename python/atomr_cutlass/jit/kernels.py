"""The kernels that this process has compiled or loaded: from memory, from disk, or by NVRTC, in this order."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from .. import _core, devices
from ..devices import Device
from ..errors import CutlassError, InvalidOperandError
from ..generator.key import KernelKey
from .compiler import Images, Target, Unit
from .store import KernelStore
from .toolchain import Toolchain, toolchain

POLICIES = ("auto", "background", "off")
POLICY_VARIABLE = "ATOMR_CUTLASS_JIT"
MISS_LOG_VARIABLE = "ATOMR_CUTLASS_MISS_LOG"

EXPECTED_SECONDS = {"sm80": 3.0, "sm90": 15.0}
"""What compiling a cell of a generation takes on two cores; benchmarks/jit.py measures it."""

_PROGRESS_AFTER = 2.0  # seconds

_lock = threading.Lock()
_kernels: dict[tuple[str, str], Future[_core.JitKernel]] = {}
_missed: set[str] = set()


def policy(asked: str | None = None) -> str:
    """What happens when the table lacks a kernel: `auto`, `background` or `off`.

    Args:
        asked: of this call; None leaves it to ATOMR_CUTLASS_JIT, and without that to `auto`.

    Raises:
        InvalidOperandError: an unknown policy.
    """
    chosen = asked or os.environ.get(POLICY_VARIABLE) or "auto"
    if chosen not in POLICIES:
        where = "jit" if asked else POLICY_VARIABLE
        raise InvalidOperandError(f"{where} is {chosen!r}; valid: {', '.join(POLICIES)}")
    return chosen


def target_for(key: KernelKey, device: Device) -> Target:
    """What a key is compiled into for a device: machine code, or PTX where the device is of another generation."""
    translated = devices.rank_arch(key.arch, device, ptx=True) == devices.TRANSLATED
    return Target(key.arch.value.replace("sm_", "compute_") if translated else key.arch.value)


def kernel(key: KernelKey, device: Device) -> _core.JitKernel:
    """The kernel of a key, ready to be launched on a device. Compiles it if it has to, which takes seconds.

    Threads that ask for one kernel at once wait for one compilation.

    Raises:
        CompileError: the source does not compile.
        DeviceUnavailableError: NVRTC or CUDA's headers are missing.
        LibraryError: the driver refuses the code.
    """
    target = target_for(key, device)
    name = key.name
    with _lock:
        known = _kernels.get((name, target.arch))
        if known is None:
            mine: Future[_core.JitKernel] = Future()
            _kernels[name, target.arch] = mine
    if known is not None:
        return known.result()
    try:
        images = load(key, target)[0]
        made = _core.JitKernel(name, key.to_json(), images.kernel, images.companion)
    except BaseException as error:
        # Forgotten, so that the next call tries again; those who wait now get this error.
        with _lock:
            _kernels.pop((name, target.arch), None)
        mine.set_exception(error)
        raise
    mine.set_result(made)
    return made


def load(key: KernelKey, target: Target) -> tuple[Images, str]:
    """The compiled code of a key, without a GPU, and where it comes from: `disk` or `compiled`.

    Raises:
        CompileError: the source does not compile.
        DeviceUnavailableError: NVRTC or CUDA's headers are missing.
    """
    unit = Unit.of(key, target)
    tools = toolchain()
    digest = unit.digest(tools)

    def make() -> bytes:
        with _progress(unit.name):
            return unit.compile().pack()

    info = {"name": unit.name, "target": target.arch, "nvrtc": ".".join(map(str, tools.version))}
    data, origin = store().obtain(digest, make, info, circumstances=_circumstances(tools))
    return Images.unpack(data), origin


def _circumstances(tools: Toolchain) -> str:
    """What a failure to compile depends on besides the kernel's key: which of CUDA's headers are there.

    A header that is installed beside others changes its folder's time, not its path.
    """
    told = [str(tools.nvrtc)]
    for folder in tools.include:
        told.append(str(folder))
        with contextlib.suppress(OSError):
            told.append(str(folder.stat().st_mtime_ns))
    return "\0".join(told)


def where(key: KernelKey, target: Target) -> str | None:
    """Where the compiled kernel of a key is by now: `memory`, `disk`, or None.

    Raises:
        DeviceUnavailableError: NVRTC or CUDA's headers are missing.
    """
    with _lock:
        known = _kernels.get((key.name, target.arch))
    if known is not None and known.done():
        return "memory"
    return "disk" if store().get(Unit.of(key, target).digest(toolchain())) is not None else None


def in_background(key: KernelKey, device: Device, then: Callable[[], None]) -> None:
    """Compiles a key on a thread of its own, and calls `then` when it is ready.

    A failure is kept with the kernel's key by the cache and told by the next call that needs the kernel.
    """

    def run() -> None:
        with contextlib.suppress(CutlassError), _turns():
            kernel(key, device)
            then()

    # A daemon: nobody waits at exit for a kernel that nobody will use.
    threading.Thread(target=run, name="atomr-cutlass-jit", daemon=True).start()


def record_miss(key: KernelKey) -> None:
    """Notes in ATOMR_CUTLASS_MISS_LOG, if it is set, that the table lacks a key.

    The file can be given to a build as ATOMR_CUTLASS_KERNEL_FILTER_FILE: it has the name of a kernel on each line.
    """
    path = os.environ.get(MISS_LOG_VARIABLE)
    if not path or key.name in _missed:
        return
    _missed.add(key.name)
    with contextlib.suppress(OSError):
        # One write in append mode: lines of several processes do not mix.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, f"{key.name}\n".encode())
        finally:
            os.close(handle)


@functools.cache
def store() -> KernelStore:
    """The disk cache of this process."""
    return KernelStore()


@functools.cache
def _turns() -> threading.BoundedSemaphore:
    # A compilation is two processes.
    return threading.BoundedSemaphore(max(1, (os.cpu_count() or 2) // 2))


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    """Says on a terminal what takes longer than two seconds."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        if done.wait(_PROGRESS_AFTER):
            return
        from rich.console import Console

        with Console(stderr=True).status(f"compiling {name}"):
            done.wait()

    shower = threading.Thread(target=show, name="atomr-cutlass-progress", daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()


def _forget() -> None:
    """After a fork: locks may be held by threads that are not here, and kernels belong to the parent's context."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _kernels.clear()
    _turns.cache_clear()


os.register_at_fork(after_in_child=_forget)
