"""The kernel table: the kernels that are compiled into the extension, and those that packs add."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checks import check_options, expect, shown
from ..errors import CutlassError, InvalidOperandError, LibraryError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.key import KernelKey
from ..jit.locks import renewed
from . import devices

if TYPE_CHECKING:
    from . import pack

PACKS_VARIABLE = "ATOMR_CUTLASS_PACKS"
PACKS_GROUP = "atomr_cutlass.packs"


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """A row of the table.

    Attributes:
        name: CUTLASS's procedural name with the key's digest.
        key: the kernel's key.
        pack: name of the pack that it came from; empty for the extension's own.
        ptx: whether it carries PTX, which newer GPUs translate.
        shared_bytes: dynamic shared memory of a thread block.
        threads: threads of a thread block.
        cuda_version: the toolkit that compiled it; 13000 means 13.0.
        content: the digests of its source and of CUTLASS, and the compiler.
    """

    name: str
    key: KernelKey
    pack: str
    ptx: bool
    shared_bytes: int
    threads: int
    cuda_version: int
    content: str

    @property
    def origin(self) -> str:
        """The origin: `prebuilt`, or `pack NAME`."""
        return f"pack {self.pack}" if self.pack else "prebuilt"

    def rank(self, device: devices.Device) -> int | None:
        """How a device runs it, None if it cannot; see `devices.rank_arch`."""
        return devices.rank_arch(self.key.arch, device, ptx=self.ptx, cuda_version=self.cuda_version)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready values, the key's fields among them."""
        row = dict(vars(self))
        return {"name": row.pop("name"), **row.pop("key").to_dict(), **row}


def kernels(
    op: str | None = None,
    dtype: CutlassDtype | None = None,
    arch: SmArch | None = None,
    filter: str | None = None,  # noqa: A002 - the design's name
) -> list[KernelInfo]:
    """The table as it stands, packs included, in its own order.

    Args:
        op: keep this operation, such as `gemm`.
        dtype: keep kernels with this element type of A; TF32 keeps those that multiply float32 in TF32.
        arch: keep kernels compiled for this arch.
        filter: keep names that match this pattern (`*` between ordered substrings, alternatives comma-separated).

    Raises:
        InvalidOperandError: an argument of the wrong kind.
    """
    check_options(op=op, arch=arch, filter=filter)
    if dtype is not None:
        check_options(dtype=dtype)
    matches = None
    if filter:
        from ..generator.selection import pattern_matcher  # loads the modules of presets

        matches = pattern_matcher(filter)
    return [
        info
        for info in rows()
        if (op is None or info.key.op == op)
        and (arch is None or info.key.arch is arch)
        and (dtype is None or (info.key.math == "tf32" if dtype is CutlassDtype.TF32 else info.key.a is dtype))
        and (matches is None or matches(info.name))
    ]


def rows() -> tuple[KernelInfo, ...]:
    """The table as it stands; the same tuple until it grows."""
    load_packs()
    return _rows(_core.registry_generation())


@functools.lru_cache(maxsize=1)
def _rows(_generation: int) -> tuple[KernelInfo, ...]:
    linked = {}
    for row in _core.rows():
        where = f"pack {row['pack']}" if row["pack"] else "this installation"
        linked[row["name"]] = KernelInfo(**{**row, "key": _read_key(row["name"], row["key"], where)})
    return (*linked.values(), *(info for info, _ in list(_cubins.values()) if info.name not in linked))


def nearest(wanted: KernelKey) -> tuple[str, tuple[str, ...]] | None:
    """The kernel of the table that differs from a key in the fewest fields, and those fields."""
    names = [field.name for field in dataclasses.fields(KernelKey)]
    found = [
        (info.name, tuple(name for name in names if getattr(wanted, name) != getattr(info.key, name)))
        for info in rows()
        if info.key.op == wanted.op
    ]
    return min(found, key=lambda pair: (len(pair[1]), pair[0]), default=None)


_cubins: dict[str, tuple[KernelInfo, pack.Cubin]] = {}
# Emptied in a child process: kernels that a parent has loaded belong to the parent's CUDA context.
_loaded: dict[str, _core.JitKernel] = renewed(sys.modules[__name__], "_loaded", dict)
_cubins_lock = renewed(sys.modules[__name__], "_cubins_lock", threading.Lock)


def launchable(info: KernelInfo) -> str | _core.JitKernel:
    """The handle by which a plan launches a row: its name or, for a pack of cubins, the kernel loaded from it."""
    own, cubin = _cubins.get(info.name, (None, None))
    if cubin is None or info is not own:  # a pack that was loaded later may have linked in one of its name
        return info.name
    with _cubins_lock:
        if info.name not in _loaded:
            _loaded[info.name] = _core.JitKernel(info.name, info.key.to_json(), cubin.kernel, cubin.companion)
        return _loaded[info.name]


def _read_key(name: str, key: str, where: str) -> KernelKey:
    try:
        return KernelKey.from_dict(json.loads(key))
    except (TypeError, ValueError) as error:
        raise LibraryError("pack", f"{where} has kernel {name}, whose key cannot be read: {error}") from error


_packs_lock = threading.Lock()
_packs_loaded = threading.Event()
_pack_problems: list[str] = []


def load_packs() -> None:
    """Loads, once, the packs of ATOMR_CUTLASS_PACKS (paths, separated like PATH) and of installed distributions.

    A pack that cannot be loaded is left out with a warning: packs that others installed must not stop this process.
    """
    if _packs_loaded.is_set():
        return
    # As slow as a third of importing the package, which does not need it.
    from importlib import metadata

    with _packs_lock:
        if _packs_loaded.is_set():
            return
        for path in filter(None, os.environ.get(PACKS_VARIABLE, "").split(os.pathsep)):
            _load_or_note(f"{PACKS_VARIABLE} names {path}", Path, path)
        for entry in metadata.entry_points(group=PACKS_GROUP):
            whose = entry.dist.name if entry.dist else "a distribution"
            _load_or_note(f"entry point {entry.name} of {whose}, {entry.value}", lambda named: named.load()(), entry)
        _packs_loaded.set()
    # Once all are loaded: where warnings are errors, the table is whole all the same.
    for problem in _pack_problems:
        warnings.warn(f"a pack is left out: {problem}", RuntimeWarning, stacklevel=3)


def pack_problems() -> tuple[str, ...]:
    """Why packs of the environment and of installed distributions were left out, each with the place that names it."""
    load_packs()
    return tuple(_pack_problems)


def _load_or_note(where: str, find: Callable[[Any], Any], named: Any) -> None:
    try:
        load_pack(find(named))
    except Exception as error:  # noqa: BLE001 - an entry point is somebody else's code
        reason = str(error) if isinstance(error, CutlassError) else f"{type(error).__name__}: {error}"
        _pack_problems.append(f"{where}: {reason}")


def load_pack(path: str | os.PathLike[str]) -> int:
    """Adds a pack's kernels to the table: all of them or, if one of its keys cannot be read, none.

    Args:
        path: the pack: an archive of cubins, or a shared library. Loading it runs its code, so neither it nor its
            folder may be writable by other users, and it must belong to this user or to root.

    Returns:
        How many kernels are new; 0 when it was loaded before.

    Raises:
        InvalidOperandError: `path` is no path.
        LibraryError: it is missing, unsafe, damaged, no pack, built for another ABI, for other GPUs or a newer CUDA
            than the driver's, or has the key of no kernel.
    """
    expect(path, (str, os.PathLike), "path", "the path of a pack")
    try:
        resolved = Path(path).resolve()
    # A path of bytes, with characters that no path has, or of links that lead to themselves.
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise InvalidOperandError(f"path is {shown(path)}, which is none: {error}") from error
    for place in (resolved, resolved.parent):
        try:
            status = place.stat()
        except OSError as error:
            raise LibraryError("pack", f"cannot read {place}: {error.strerror}") from error
        shared_and_sticky = place.is_dir() and status.st_mode & 0o1000
        if status.st_mode & 0o022 and not shared_and_sticky:
            raise LibraryError("pack", f"{place} is writable by other users: chmod go-w it, or move the pack")
        if status.st_uid not in (0, os.geteuid()):
            raise LibraryError("pack", f"{place} belongs to another user (uid {status.st_uid}): copy the pack")

    from . import pack  # not needed without packs

    found = pack.read(resolved)
    if isinstance(found, pack.Pack):
        return _add_cubins(found, resolved)
    try:
        archs = {SmArch(kernel["arch"]) for kernel in found["kernels"] if "arch" in kernel}
    except (TypeError, ValueError) as error:
        raise LibraryError("pack", f"{resolved} has a manifest that cannot be used ({error}): rebuild it") from error
    _require_runs(resolved, archs, found.get("cuda_version", 0), ptx=True)

    def check(name: str, key: str) -> None:
        try:
            own = _read_key(name, key, str(resolved)).name
        except LibraryError:
            raise
        except Exception as error:  # the key's fields may be values of any kind
            raise LibraryError("pack", f"{resolved} has kernel {name}, whose key is no kernel's: {error}") from error
        if own != name:
            raise LibraryError("pack", f"{resolved} has kernel {name}, whose key is that of {own}: rebuild the pack")

    return _core.load_pack(str(resolved), check)


def _add_cubins(loaded: pack.Pack, path: Path) -> int:
    """Adds the kernels of a pack of cubins; returns how many are new."""
    _require_runs(path, {cubin.key.arch for cubin in loaded.cubins}, loaded.cuda_version, ptx=False)
    with _cubins_lock:
        there = {info.name for info in _rows(_core.registry_generation())}
        new = [cubin for cubin in loaded.cubins if cubin.key.name not in there]
        for cubin in new:
            info = KernelInfo(
                cubin.key.name, cubin.key, loaded.name, ptx=False, shared_bytes=cubin.shared_bytes,
                threads=cubin.threads, cuda_version=loaded.cuda_version, content=cubin.content,
            )  # fmt: skip
            _cubins[info.name] = (info, cubin)
        _core.note_table_growth()
    return len(new)


def _require_runs(path: Path, archs: set[SmArch], cuda_version: int, *, ptx: bool) -> None:
    """Refuses a pack of a newer CUDA than the driver's, and one that no GPU here runs; nothing without a driver."""
    if _core.driver_problem():
        return
    built, known = cuda_version // 1000, _core.driver_version() // 1000
    if built > known:
        raise LibraryError(
            "pack",
            f"{path} was built with CUDA {built}; the driver knows CUDA up to {known}: update the driver or build "
            "the pack with an older toolkit",
        )
    gpus = [devices.get(index) for index in range(_core.device_count())]
    if archs and not any(devices.rank_arch(arch, gpu, ptx=ptx) is not None for arch in archs for gpu in gpus):
        capabilities = sorted({gpu.capability for gpu in gpus})
        made_for = ", ".join(arch.value for arch in sorted(archs, key=lambda arch: arch.capability))
        raise LibraryError(
            "pack",
            f"{path} has code for {made_for}; GPUs here have compute capability "
            f"{', '.join(f'{major}.{minor}' for major, minor in capabilities)}: build the pack for their arch",
        )
