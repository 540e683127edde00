"""Kernels outside the table, in this order: those in the process's memory, from disk, or compiled by NVRTC.

The compiler and the disk cache are imported at the first such kernel: most processes need only those of the table.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING

from .. import _core
from ..errors import DeviceUnavailableError, InvalidOperandError, KernelNotFoundError, UnsupportedError
from ..generator import machine
from ..generator.errors import shown
from ..generator.key import KernelKey
from ..generator.key_file import line
from ..generator.matrix import family
from ..pipeline import devices
from ..pipeline.devices import Device
from .locks import KeyedLocks, renewed
from .toolchain import Toolchain, check_compiles, toolchain

if TYPE_CHECKING:
    from .compiler import Images
    from .store import KernelStore

POLICIES = ("auto", "background", "off")
WARN = "warn"
"""A further value of ATOMR_CUTLASS_JIT: the process starts frozen, as by `freeze("warn")`."""
FREEZES = ("error", WARN)
POLICY_VARIABLE = "ATOMR_CUTLASS_JIT"
MISS_LOG_VARIABLE = "ATOMR_CUTLASS_MISS_LOG"

compile_sink: ContextVar[Callable[[str, str], object] | None] = ContextVar("compile sink", default=None)
"""Gets the source and the name of each kernel before it is compiled for this thread, in the background too."""

called_from: ContextVar[str] = ContextVar("called from", default="")
"""File and line of the request that this thread serves, if its own call stack does not show them."""

_kernels: dict[tuple[str, str], _core.JitKernel] = {}
_images: dict[tuple[str, str], str] = {}
_locks = KeyedLocks()
_missed: set[str] = set()
_background: dict[tuple[str, str], tuple[threading.Thread, list[Callable[[], None]]]] = {}
_background_lock = renewed(sys.modules[__name__], "_background_lock", threading.Lock)
_closing = threading.Event()
_frozen = ""
_PACKAGE = __name__.partition(".")[0]


def policy(requested: str | None = None) -> str:
    """The policy for kernels that the table lacks: that of a call, else ATOMR_CUTLASS_JIT's, else `auto`."""
    name, valid = ("jit", POLICIES) if requested else (POLICY_VARIABLE, (*POLICIES, WARN))
    chosen = requested or os.environ.get(POLICY_VARIABLE) or "auto"
    if chosen not in valid:
        raise InvalidOperandError(f"{name} is {chosen!r}; valid: {', '.join(valid)}")
    return "auto" if chosen != "off" and frozen() else chosen


def freeze(policy: str = "error") -> None:
    """Makes further compilations an error or a warning: for serving processes, once they are warm.

    Kernels of the table, of packs, and those that this process has loaded are used as before. A slow kernel of the
    table serves in place of a compilation in the background; those in progress are waited for. With `error`, neither
    the compiler nor the disk cache is used.

    Args:
        policy: `error` raises KernelNotFoundError with the key, the call that wants it, and the commands that add it;
            `warn` warns of each and compiles. The last call counts.

    Raises:
        InvalidOperandError: an unknown policy.
    """
    global _frozen  # noqa: PLW0603
    if not isinstance(policy, str) or policy not in FREEZES:
        raise InvalidOperandError(f"policy is {shown(policy)}; valid: {', '.join(FREEZES)}")
    _frozen = policy
    _join_background()


def frozen() -> str:
    """`error` or `warn` in a frozen process, else empty."""
    return _frozen or (WARN if os.environ.get(POLICY_VARIABLE) == WARN else "")


def _refuse_if_frozen(key: KernelKey, doing: str) -> None:
    """Reports a kernel that a frozen process lacks: warns, or raises KernelNotFoundError."""
    how = frozen()
    if not how:
        return
    said = (
        f"{key.name} {doing}, and this process is frozen (ac.freeze, or {POLICY_VARIABLE}={WARN}); asked for by "
        f"{call_site()}. To have it from the start: {built_ahead(key)}"
    )
    if how == "error":
        raise KernelNotFoundError(said)
    warnings.warn(said, RuntimeWarning, stacklevel=2)


def built_ahead(key: KernelKey) -> str:
    """How to build a kernel ahead of time, whether or not a preset has it."""
    return (
        "record a run that compiles it (ATOMR_CUTLASS_RECORD=keys.jsonl), `atomr-cutlass build keys.jsonl --arch "
        f"{key.arch.target} -o model.pack`, and ATOMR_CUTLASS_PACKS=model.pack"
    )


def call_site() -> str:
    """File and line of the package's caller: the code that made the message, or the innermost outer frame."""
    frame = sys._getframe()  # noqa: SLF001 - the call stack, without reading sources
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return called_from.get() or f"{frame.f_code.co_filename}:{frame.f_lineno}"


def target_for(key: KernelKey, device: Device) -> str:
    """The target to compile a key to for a device: machine code, or PTX for a device of another generation.

    Raises UnsupportedError if neither runs there, DeviceUnavailableError if PTX needs another NVRTC.
    """
    way = devices.rank_arch(key.arch, device, ptx=True)
    if way is None:
        raise UnsupportedError(f"code for {key.arch.value} does not run on {device.name}")
    if way != devices.TRANSLATED:
        return key.arch.value
    if device.cuda_version and frozen() != "error":  # otherwise nothing is compiled: do not load NVRTC
        major, minor = toolchain().version
        made = 1000 * major + 10 * minor
        if not devices.translates(device, made):
            driver = devices.cuda_name(device.cuda_version)
            raise UnsupportedError(
                f"code for {key.arch.value} runs on {device.name} as PTX only, and this driver ({driver}) does not "
                f"translate that of {devices.cuda_name(made)}'s NVRTC: update the driver, or install NVRTC and headers "
                f"of {driver}"
            )
    return key.arch.value.replace("sm_", "compute_")


def kernel(key: KernelKey, device: Device) -> _core.JitKernel:
    """The kernel of a key, ready for launches on a device. Compiles it if necessary, which takes seconds.

    Concurrent requests for one kernel share one compilation.
    """
    target = target_for(key, device)
    identity = (key.name, target)
    known = _kernels.get(identity)
    if known is not None:
        return known
    with _locks.hold(identity):
        known = _kernels.get(identity)
        if known is None:
            if frozen() == "error":
                _refuse_if_frozen(key, "would be compiled")
            from .compiler import announced

            with announced(key.name, family(key).compile_seconds, lambda: store().folder):
                images = load(key, target)[0]
            known = _core.JitKernel(key.name, key.to_json(), images.kernel, images.companion)
            _images[identity] = images.digest
            _kernels[identity] = known
        return known


def image_digest(key: KernelKey, device: Device) -> str:
    """SHA-256, in hexadecimal digits, of the compiled code of a key."""
    kernel(key, device)
    return _images[key.name, target_for(key, device)]


def load(key: KernelKey, target: str) -> tuple[Images, str]:
    """The compiled code of a key, without a GPU, and its origin: `disk` or `compiled`."""
    from .compiler import Images, Unit

    tools = toolchain()
    check_compiles(key)
    unit = Unit.of(key, target)
    digest = unit.digest(tools)

    def make() -> bytes:
        _refuse_if_frozen(key, "is compiled")
        sink = compile_sink.get()
        if sink is not None:
            sink(unit.source, unit.name)
        return unit.compile().pack()

    info = {"name": unit.name, "target": target, "nvrtc": ".".join(map(str, tools.version))}
    data, origin = store().obtain(digest, make, info, fingerprint=_fingerprint(tools))
    return Images.unpack(data), origin


def _fingerprint(tools: Toolchain) -> str:
    """The conditions of a compilation failure besides the kernel's key: NVRTC and CUDA's installed headers.

    The folders' times are included: a header that is added to a folder changes them.
    """
    told = [str(tools.nvrtc)]
    for folder in tools.include:
        told.append(str(folder))
        with contextlib.suppress(OSError):
            told.append(str(folder.stat().st_mtime_ns))
    return "\0".join(told)


def where(key: KernelKey, target: str) -> str | None:
    """The place of a key's compiled kernel: `memory`, `disk`, or None."""
    from .compiler import Unit

    if (key.name, target) in _kernels:
        return "memory"
    return "disk" if store().get(Unit.of(key, target).digest(toolchain())) is not None else None


def problem() -> str:
    """Why kernels that calls can do without are not compiled; empty if they can be."""
    if frozen():
        return "the process is frozen"
    try:
        toolchain()
    except DeviceUnavailableError as error:
        return str(error)
    return ""


def ready(key: KernelKey, device: Device) -> bool:
    """Whether a key's kernel is available without compiling; in a frozen process only from its memory."""
    try:
        target = target_for(key, device)
        return (key.name, target) in _kernels if frozen() else where(key, target) is not None
    # Without a compiler its digest is unknown; a kernel that cannot run here is not ready either.
    except (DeviceUnavailableError, UnsupportedError):
        return False


def in_background(key: KernelKey, device: Device, then: Callable[[], None]) -> None:
    """Compiles a key in a thread, one per key, and calls `then` there when it is ready.

    A failure is only warned about, once: the request is served by another kernel.
    """
    try:
        identity = (key.name, target_for(key, device))
    except (DeviceUnavailableError, UnsupportedError) as error:
        _warn_of_background(key, error)
        return
    with _background_lock:
        if identity in _background:
            _background[identity][1].append(then)
            return
        waiting = [then]
        # A daemon: the exit of the process must not wait for it, see `_close`.
        thread = threading.Thread(
            target=copy_context().run,
            args=(_in_background, key, device, identity),
            name="atomr-cutlass-jit",
            daemon=True,
        )
        _background[identity] = (thread, waiting)
        thread.start()


def _in_background(key: KernelKey, device: Device, identity: tuple[str, str]) -> None:
    try:
        with _turns():
            if not _closing.is_set():
                kernel(key, device)
    except Exception as error:  # noqa: BLE001 - the thread has no caller
        with _background_lock:
            del _background[identity]
        if not _closing.is_set():
            _warn_of_background(key, error)
        return
    while not _closing.is_set():
        with _background_lock:
            waiting = _background[identity][1]
            if not waiting:
                del _background[identity]
                return
            then = waiting.pop(0)
        try:
            then()
        except Exception as error:  # noqa: BLE001 - the thread has no caller
            warnings.warn(f"{key.name} was compiled but is not used: {error}", RuntimeWarning, stacklevel=1)


def _join_background(timeout: float | None = None) -> None:
    with _background_lock:
        threads = [thread for thread, _ in _background.values()]
    for thread in threads:
        thread.join(timeout)


def _warn_of_background(key: KernelKey, error: Exception) -> None:
    warnings.warn(f"{key.name} was not compiled in the background: {error}", RuntimeWarning, stacklevel=1)


@atexit.register
def _close() -> None:
    """Ends background threads at exit: returning from C++ into a finalized interpreter crashes."""
    _closing.set()
    compiler = sys.modules.get(f"{__package__}.compiler")
    if compiler is not None:
        compiler.stop_all()
    _join_background(timeout=30)


def record_miss(key: KernelKey) -> None:
    """Appends a key that the table lacks to ATOMR_CUTLASS_MISS_LOG, a file of keys, if that is set."""
    path = os.environ.get(MISS_LOG_VARIABLE)
    if not path or key.name in _missed:
        return
    with contextlib.suppress(OSError):
        # Neither a link nor a pipe without a reader; O_APPEND keeps lines of several processes apart.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags, 0o644), "wb", buffering=0) as file:
            file.write(f"{line(key)}\n".encode())
            _missed.add(key.name)


@functools.cache
def store() -> KernelStore:
    """The disk cache of this process."""
    from .store import KernelStore

    return KernelStore()


@functools.cache
def _turns() -> threading.BoundedSemaphore:
    # A compilation is two processes. Further waiting threads would only hold locks that calls need.
    return threading.BoundedSemaphore(max(1, machine.cpus() // 2))


def _forget() -> None:
    """Forgets kernels and threads after a fork: they belong to the parent's context and process."""
    _background.clear()
    _kernels.clear()
    _images.clear()
    _turns.cache_clear()


os.register_at_fork(after_in_child=_forget)
