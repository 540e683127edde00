"""How many compilers this process may run at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atomr_cutlass.generator import machine

GB = 1 << 30
System = Callable[..., Path]


@pytest.fixture
def system(tmp_path: Path) -> System:
    """Makes a root folder with these files: 8 GiB are free there."""

    def make(files: dict[str, object]) -> Path:
        for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return make


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine.os, "process_cpu_count", lambda: 8, raising=False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)


MEMORY_V1 = "sys/fs/cgroup/memory"
SERVICE = "proc/self/cgroup"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * GB),
        # Version 2, at the root of a container's own namespace.
        ({"sys/fs/cgroup/memory.max": 4 * GB, "sys/fs/cgroup/memory.current": GB}, 3 * GB),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": GB}, 8 * GB),
        ({"sys/fs/cgroup/memory.max": GB, "sys/fs/cgroup/memory.current": 2 * GB}, 0),
        # The page cache gives way; what the limit of a group above leaves counts; `high` throttles.
        (
            {
                SERVICE: "0::/a/b",
                "sys/fs/cgroup/a/memory.max": 6 * GB,
                "sys/fs/cgroup/a/memory.current": 5 * GB,
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {3 * GB}\nactive_file 7",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.high": 3 * GB,
                "sys/fs/cgroup/a/b/memory.current": GB,
            },
            2 * GB,
        ),
        # Version 1: an enormous limit is none.
        ({f"{MEMORY_V1}/memory.limit_in_bytes": 2**63 - 4096, f"{MEMORY_V1}/memory.usage_in_bytes": GB}, 8 * GB),
        (
            {
                SERVICE: "9:cpu:/x\n4:memory:/job/1\n0::/",
                f"{MEMORY_V1}/job/1/memory.limit_in_bytes": 4 * GB,
                f"{MEMORY_V1}/job/1/memory.usage_in_bytes": 3 * GB,
                f"{MEMORY_V1}/job/1/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GB}",
            },
            3 * GB,
        ),
        # A path of the host, which is not mounted here, and one outside of the namespace.
        ({SERVICE: "4:memory:/docker/0123", f"{MEMORY_V1}/memory.limit_in_bytes": GB}, GB),
        ({SERVICE: "0::/../other", "sys/fs/other/memory.max": 1}, 8 * GB),
        ({SERVICE: "nonsense\n", "sys/fs/cgroup/memory.max": "nonsense"}, 8 * GB),
    ],
)
def test_memory_is_what_the_machine_and_every_cgroup_leave(system: System, files: dict[str, object], free: int) -> None:
    assert machine.free_bytes(system(files)) == free


def test_memory_that_nobody_tells_of_is_unknown(tmp_path: Path) -> None:
    assert machine.free_bytes(tmp_path) is None


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "6400000 100000"}, 8),
        ({SERVICE: "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000}, 8),
        (
            {
                SERVICE: "3:cpu,cpuacct:/job",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": 400000,
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
            },
            4,
        ),
        ({"sys/fs/cgroup/cpu.max": "1 0"}, 8),
    ],
)
def test_cpus_are_those_of_the_affinity_within_every_quota(system: System, files: dict[str, object], cpus: int) -> None:
    assert machine.cpus(system(files)) == cpus


def test_cpus_are_the_processs_own() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from atomr_cutlass.generator import machine; print(machine.cpus())"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "1\n"
    assert machine.cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(("each", "jobs"), [(GB, 8), (2 * GB, 4), (3 * GB, 2), (9 * GB, 1), (0, 8)])
def test_as_many_jobs_as_fit_and_at_least_one(system: System, each: int, jobs: int) -> None:
    assert machine.jobs(each, system({})) == jobs


@pytest.mark.usefixtures("eight_cpus")
def test_where_memory_is_unknown_cpus_decide(tmp_path: Path) -> None:
    assert machine.jobs(GB, tmp_path) == 8
