"""Calls whose plans follow from that of another call: the cases are in `family_cases.py`."""

import pytest

import fake_cases
import family_cases
import golden_gpu
from atomr_cutlass import SmArch

CASES_FILE = "family_cases.py"


@pytest.fixture(scope="module", params=family_cases.ARCHS, ids=lambda arch: arch.value)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised on a GPU of an arch, as text; empty where it passed."""
    arch: SmArch = request.param
    return golden_gpu.outcome(CASES_FILE, tmp_path_factory.mktemp("gpu"), arch, 300)


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_plans_of_a_family_are_those_that_planning_makes(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
