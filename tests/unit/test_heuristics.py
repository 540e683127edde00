"""Heuristics: the kernels that a user names for requests of every operation."""

from __future__ import annotations

import pytest

import fake_cases
import golden_gpu
import heuristic_cases


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome("heuristic_cases.py", tmp_path_factory.mktemp("gpu"), heuristic_cases.ARCH, 300)


@pytest.mark.parametrize("case", fake_cases.names("heuristic_cases.py"))
def test_on_a_gpu_that_takes_notes(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
