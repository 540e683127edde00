"""Epilogue trees from a request or a call to the C ABI without a GPU, over kernels that run on the host.

The cases are in `tests/helpers/fused_cases.py`; one process of its own runs them all, since a driver, once opened,
stays.
"""

from __future__ import annotations

import pytest

import fake_cases
import fake_kernels
import fake_pack
import fused_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.matrix import expand

CASES_FILE = "fused_cases.py"
CASES = fake_cases.names(CASES_FILE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    found = {}
    for key in expand("full", [SmArch.SM80]):
        if key.op == "gemm" and key.math == "tf32" and key.d is D.F32 and key.align_d == key.align_a == 4:
            found.setdefault(key.layout_a + key.layout_b, key)
    assert len(found) == 4
    pack = fake_kernels.make_pack(folder / "pack.so", fused_cases.keys_of(list(found.values())))
    driver = fake_pack.make_driver(folder / "driver")
    return fake_cases.outcome(CASES_FILE, driver, [pack], ATOMR_CUTLASS_CACHE_DIR=str(folder / "cache"))


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
