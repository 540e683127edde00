"""Calls of functions: which find the plan of an earlier one, whatever the function; and the texts of shared options."""

import pytest

import atomr_cutlass as ac
import call_cases
import fake_cases
import golden_gpu
from atomr_cutlass.pipeline.invocation import CallOptions, documented


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case raised, as text."""
    return golden_gpu.outcome("call_cases.py", tmp_path_factory.mktemp("gpu"), call_cases.ARCH, 120)


@pytest.mark.parametrize("case", fake_cases.names("call_cases.py"))
def test_kept_plans(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


FUNCTIONS = (
    ac.gemm, ac.gated_gemm, ac.conv2d, ac.conv2d_dgrad, ac.conv2d_wgrad, ac.quantize, ac.dequantize,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_shared_options_have_one_text(function: object) -> None:
    assert "{" not in str(function.__doc__)
    assert "stream: where to launch: an integer handle or a stream object; defaults to the" in str(function.__doc__)


def test_texts_are_those_of_call_options() -> None:
    @documented
    def function() -> None:
        """Args:
        jit: {jit}
        """

    assert str(CallOptions.__doc__).count("ATOMR_CUTLASS_JIT") == str(function.__doc__).count("ATOMR_CUTLASS_JIT") == 1
