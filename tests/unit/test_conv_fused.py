"""Epilogue trees of convolutions from a request or a call to the C ABI without a GPU, by kernels that run on the host.

The cases are in `tests/helpers/conv_fused_cases.py`; one process of its own runs them all, since a driver, once opened,
stays.
"""

from __future__ import annotations

import pytest

import conv_fused_cases
import fake_cases
import fake_kernels
import fake_pack

CASES_FILE = "conv_fused_cases.py"
CASES = fake_cases.names(CASES_FILE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    driver = fake_pack.make_driver(folder / "driver", major=9)
    pack = fake_kernels.make_pack(folder / "pack.so", conv_fused_cases.KEYS)
    return fake_cases.outcome(CASES_FILE, driver, [pack], ATOMR_CUTLASS_CACHE_DIR=str(folder / "cache"))


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == "", outcome[case]
