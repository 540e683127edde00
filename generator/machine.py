"""Usual folders of toolkits, and the number of processes that this one may run concurrently.

The number depends on the CPUs and the free memory, within the limits of the process's cgroups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")

# Where installers put CUDA's toolkit without changing PATH.
DEFAULT_ROOTS = (Path("/usr/local/cuda"),)

# Of cgroups, by version: limits, each with the memory in use and the part of it that is reclaimable cache.
_MEMORY = (
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


def cpus(root: Path = ROOT) -> int:
    """The CPUs that this process may use: those of its affinity, within its cgroups' quotas; at least one."""
    count = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    if hasattr(os, "sched_getaffinity"):
        count = min(count, len(os.sched_getaffinity(0)))
    for group in _cgroups("cpu", root):
        quota = _words(group / "cpu.max") or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        # "max" and -1 are no limit.
        if len(quota) == 2 and all(word.isdigit() for word in quota) and int(quota[1]):
            count = min(count, int(quota[0]) // int(quota[1]))
    return max(1, count)


def free_bytes(root: Path = ROOT) -> int | None:
    """Memory available for new processes; None if unknown."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if found is None:
        return None
    free = int(found[1]) << 10
    for group in _cgroups("memory", root):
        for limits, usage, cache in _MEMORY:
            used = _words(group / usage)
            gives_way = re.search(rf"^{cache} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            taken = int(used[0]) - (int(gives_way[1]) if gives_way else 0) if used else 0
            left = [int(word) - taken for name in limits for word in _words(group / name) if word.isdigit()]
            free = min([free, *left])
    return max(free, 0)


def jobs(bytes_each: int, root: Path = ROOT) -> int:
    """The number of concurrent processes of this size that fit the CPUs and the free memory; at least one."""
    free = free_bytes(root)
    return cpus(root) if free is None else max(1, min(cpus(root), free // max(bytes_each, 1)))


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the cgroups that limit this process, of versions 2 and 1, and of their parents."""
    mounts = root / "sys/fs/cgroup"
    yield from (mounts, mounts / controller)
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        base = mounts / controller if controller in controllers.split(",") else None if controllers else mounts
        parts = path.strip("/").split("/")
        # In a container the path may be the host's, which is not mounted: a missing path limits nothing. Paths
        # outside of the namespace (..) are invisible.
        if base is not None and ".." not in parts:
            yield from (base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()
