"""Which cells run on which GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atomr_cutlass import SmArch, devices
from atomr_cutlass.devices import Device
from atomr_cutlass.errors import UnsupportedError

S = SmArch


def _gpu(major: int, minor: int) -> Device:
    return Device(0, "some GPU", (major, minor), 100, 100 << 10, 50 << 20, 80 << 30)


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


def test_a_gpu_without_a_target_is_refused_by_name() -> None:
    assert devices.require_arch(_gpu(9, 0)) is S.SM90A
    with pytest.raises(
        UnsupportedError, match=r"some GPU has compute capability 10\.3; the targets are sm_80, .*sm_120a"
    ):
        devices.require_arch(_gpu(10, 3))


def test_without_a_gpu_the_reason_is_said_and_the_reference_named() -> None:
    code = (
        "import atomr_cutlass as ac\n"
        "from atomr_cutlass import devices\n"
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
