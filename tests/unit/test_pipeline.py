"""From `gemm` to the C ABI without a GPU: a driver whose device memory is the host's, and kernels that run on it.

The cases are in `tests/helpers/pipeline_cases.py`; one process of its own runs them all, since a driver, once opened,
stays.
"""

from __future__ import annotations

import pytest

import fake_cases
import fake_kernels
import fake_pack
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.rules import LAYOUTS

CASES_FILE = "pipeline_cases.py"
CASES = fake_cases.names(CASES_FILE)


@pytest.fixture(scope="module", params=[0, 64], ids=["no workspace", "workspace"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    cells = [k for k in expand("full", [SmArch.SM80]) if k.math == "ieee" and k.d is D.F32]
    assert {k.layout_a + k.layout_b for k in cells} == set(LAYOUTS)
    pack = fake_kernels.make_pack(folder / "pack.so", cells, workspace=request.param, largest_m=5000, error=700)
    return fake_cases.outcome(CASES_FILE, fake_pack.make_driver(folder / "driver"), [pack])


@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
