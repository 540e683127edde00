"""Which cells run on which GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.errors import UnsupportedError
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.devices import Device

S = SmArch


def _gpu(major: int, minor: int) -> Device:
    return Device(0, "some GPU", (major, minor), 100, 100 << 10, 50 << 20, 80 << 30, 10**12)


@pytest.mark.parametrize(
    ("mapped", "version"),
    [
        ("7f00 r-xp /usr/lib/libcuda.so.580.95.05\n7f01 r--p /usr/lib/libcudart.so.13.0.96\n", "580.95.05"),
        ("7f00 r-xp /usr/lib/libcuda.so.1\n", "CUDA 13.0"),
        ("", "CUDA 13.0"),
    ],
)
def test_the_driver_says_its_version(monkeypatch: pytest.MonkeyPatch, mapped: str, version: str) -> None:
    monkeypatch.setattr(devices._core, "driver_version", lambda: 13000)
    monkeypatch.setattr(devices.Path, "read_text", lambda *_given, **_named: mapped)
    devices.driver.cache_clear()
    assert devices.driver() == version
    devices.driver.cache_clear()


@pytest.mark.parametrize(("told", "known"), [(3352 * 10**9, 3352 * 10**9), (0, 4917 * 10**9)])
def test_a_driver_that_does_not_tell_the_memorys_rate_has_that_of_the_data_sheet(
    monkeypatch: pytest.MonkeyPatch, told: int, known: int
) -> None:
    properties = {"name": "a GPU", "capability": (9, 0), "multiprocessors": 132, "shared_memory": 227 << 10}
    properties |= {"l2_bytes": 50 << 20, "memory_bytes": 80 << 30, "memory_bytes_per_second": told}
    monkeypatch.setattr(devices, "problem", lambda: "")
    monkeypatch.setattr(devices._core, "driver_version", lambda: 13000)
    monkeypatch.setattr(devices._core, "device_properties", lambda _index: properties)
    devices.get.cache_clear()
    assert devices.get().memory_bytes_per_second == known
    devices.get.cache_clear()


NATIVE, EARLIER_MINOR, TRANSLATED, NEVER = 0, 1, 2, None


@pytest.mark.parametrize(
    ("arch", "capability", "without_ptx", "with_ptx"),
    [
        (S.SM80, (8, 0), NATIVE, NATIVE),
        (S.SM80, (8, 6), EARLIER_MINOR, EARLIER_MINOR),
        (S.SM80, (8, 9), EARLIER_MINOR, EARLIER_MINOR),
        (S.SM80, (9, 0), NEVER, TRANSLATED),
        (S.SM80, (12, 0), NEVER, TRANSLATED),
        (S.SM80, (7, 5), NEVER, NEVER),
        (S.SM86, (8, 0), NEVER, NEVER),
        (S.SM86, (8, 6), NATIVE, NATIVE),
        (S.SM86, (8, 9), EARLIER_MINOR, EARLIER_MINOR),
        (S.SM89, (8, 6), NEVER, NEVER),
        (S.SM89, (8, 9), NATIVE, NATIVE),
        (S.SM89, (9, 0), NEVER, TRANSLATED),
        (S.SM90A, (8, 9), NEVER, NEVER),
        (S.SM90A, (9, 0), NATIVE, NATIVE),
        (S.SM90A, (10, 0), NEVER, NEVER),
        (S.SM100, (10, 0), NATIVE, NATIVE),
        (S.SM100, (10, 3), NEVER, NEVER),
        (S.SM100, (12, 0), NEVER, NEVER),
        (S.SM120, (12, 0), NATIVE, NATIVE),
        (S.SM120, (12, 1), NEVER, NEVER),
        (S.SM120, (10, 0), NEVER, NEVER),
    ],
)
def test_how_a_cell_gets_to_run(
    arch: SmArch, capability: tuple[int, int], without_ptx: int | None, with_ptx: int | None
) -> None:
    assert devices.rank_arch(arch, _gpu(*capability), ptx=False) == without_ptx
    assert devices.rank_arch(arch, _gpu(*capability), ptx=True) == with_ptx


@pytest.mark.parametrize(
    ("made", "driver", "translated"),
    [(13000, 13000, True), (13010, 13000, False), (13000, 13010, True), (12090, 13000, True), (13000, 12090, False),
     (13000, 0, True), (0, 12080, True), (13001, 13000, True)],
)  # fmt: skip
def test_a_driver_translates_ptx_of_its_own_cuda_and_earlier_ones(made: int, driver: int, translated: bool) -> None:
    gpu = replace(_gpu(9, 0), cuda_version=driver)
    way = devices.rank_arch(SmArch.SM80, gpu, ptx=True, cuda_version=made)
    assert way == (devices.TRANSLATED if translated else None)
    # Machine code of a newer minor version runs, and of a newer major version no pack is loaded.
    assert devices.rank_arch(SmArch.SM90A, gpu, ptx=True, cuda_version=made) == 0
    assert devices.rank_arch(SmArch.SM80, replace(gpu, capability=(8, 6)), ptx=True, cuda_version=made) == 1


def test_a_gpu_without_a_target_is_refused_by_name() -> None:
    assert devices.require_arch(_gpu(9, 0)) is S.SM90A
    with pytest.raises(
        UnsupportedError, match=r"some GPU has compute capability 10\.3; the targets are sm_80, .*sm_120a"
    ):
        devices.require_arch(_gpu(10, 3))


def test_without_a_gpu_the_reason_is_said_and_the_reference_named() -> None:
    code = (
        "import atomr_cutlass as ac\n"
        "from atomr_cutlass.pipeline import devices\n"
        "assert not devices.available() and devices.problem()\n"
        "try:\n"
        "    devices.get(0)\n"
        "except ac.DeviceUnavailableError as error:\n"
        "    print(error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "backend='reference' computes on the CPU" in process.stdout
