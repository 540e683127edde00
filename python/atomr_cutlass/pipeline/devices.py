"""The GPUs, queried once each, and whether they run code made for an arch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from .. import _core
from ..errors import DeviceUnavailableError, InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch

TRANSLATED = 2

_LARGEST = {
    (8, 0): (108, 2039), (8, 6): (84, 768), (8, 9): (142, 1008), (9, 0): (132, 4917), (10, 0): (148, 8000),
    (12, 0): (148, 1792),
}  # fmt: skip
"""Multiprocessors of the largest GPU of a capability, and GB a second of the fastest one's memory, by data sheets."""
_ANY = (148, 1000)


@dataclass(frozen=True)
class Device:
    """A GPU. `l2_bytes`, `memory_bytes` and `shared_memory` (per block, with opt-in) are bytes.

    `memory_bytes_per_second` follows from its memory's clock and width; no kernel reaches it.
    `cuda_version` is the newest CUDA whose PTX its driver translates: 13000 means 13.0, 0 that there is no driver.
    """

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_second: int
    cuda_version: int = 0

    @functools.cached_property
    def arch(self) -> SmArch | None:
        """The compile target made for this GPU, or None when there is none."""
        return SmArch.from_capability(*self.capability)


def problem() -> str:
    """Why no GPU can be used; empty when one can."""
    return _core.driver_problem()


def available() -> bool:
    """Whether there is a GPU with a driver."""
    return not problem()


@functools.cache
def get(index: int = 0) -> Device:
    """The GPU of this index."""
    reason = problem()
    if reason:
        raise DeviceUnavailableError(f"{reason}; backend='reference' computes on the CPU")
    properties = _core.device_properties(index)
    if not properties["memory_bytes_per_second"]:  # drivers of virtual GPUs may not tell
        properties["memory_bytes_per_second"] = _LARGEST.get(properties["capability"], _ANY)[1] * 10**9
    return Device(index=index, cuda_version=_core.driver_version(), **properties)


@functools.cache
def driver() -> str:
    """The driver's version, such as `580.95.05`; its CUDA version where the driver's own is unknown.

    The CUDA version alone does not identify the translator of PTX: every driver brings its own.
    """
    version = _core.driver_version()  # from here on the library is mapped
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mapped = ""
    found = re.search(r"/libcuda\.so\.(\d+\.\d[\d.]*)$", mapped, re.MULTILINE)
    return found[1] if found else cuda_name(version)


def imagined(arch: SmArch) -> Device:
    """A GPU of this arch for the model, where there is none: with the multiprocessors of the largest such part."""
    multiprocessors, gigabytes = _LARGEST.get(arch.capability, _ANY)
    return Device(
        index=0, name=f"an imagined {arch.value} GPU", capability=arch.capability, multiprocessors=multiprocessors,
        shared_memory=arch.shared_memory, l2_bytes=50 << 20, memory_bytes=80 << 30,
        memory_bytes_per_second=gigabytes * 10**9,
    )  # fmt: skip


def for_arch(arch: SmArch | None) -> Device:
    """GPU 0 if cells of this arch (None: its own) could run on it, else an imagined GPU of the arch."""
    if available():
        device = get(0)
        if arch is None or rank_arch(arch, device, ptx=True) is not None:
            return device
    if arch is None:
        raise InvalidOperandError(f"without a GPU ({problem()}) the request must name its arch")
    return imagined(arch)


def rank_arch(arch: SmArch, device: Device, *, ptx: bool, cuda_version: int = 0) -> int | None:
    """How the device runs a cell built for `arch`; None if it cannot.

    0 is natively, 1 as machine code of an earlier minor version, TRANSLATED as PTX that the driver translates, which
    needs `ptx`. `cuda_version` is the toolkit that made the PTX; 0 ignores it.

    Source: CUDA C++ Programming Guide, binary and PTX compatibility; CUDA Compatibility, minor version compatibility,
    which holds for machine code alone.
    """
    made_for = arch.capability
    if made_for == device.capability:
        return 0
    if not arch.portable or made_for > device.capability:
        return None
    if made_for[0] == device.capability[0]:
        return 1
    return TRANSLATED if ptx and translates(device, cuda_version) else None


def translates(device: Device, cuda_version: int) -> bool:
    """Whether the driver translates the PTX of a toolkit of this version: 13010 means 13.1."""
    return device.cuda_version == 0 or cuda_version // 10 <= device.cuda_version // 10


def cuda_name(cuda_version: int) -> str:
    """The name of a CUDA version: `CUDA 13.0` for 13000."""
    return f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"


def require_arch(device: Device) -> SmArch:
    """The device's arch; refuses GPUs for which the package has no target."""
    if device.arch is None:
        major, minor = device.capability
        valid = ", ".join(a.value for a in SmArch)
        raise UnsupportedError(f"{device.name} has compute capability {major}.{minor}; the targets are {valid}")
    return device.arch
