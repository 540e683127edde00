"""Calls of functions: which find the plan of an earlier one, whatever the function; and the texts of shared options."""

import dataclasses
import inspect
import re
from collections.abc import Callable

import pytest

import atomr_cutlass as ac
import call_cases
import fake_cases
import golden_gpu
from atomr_cutlass.pipeline.call_options import CallOptions, documented
from atomr_cutlass.pipeline.operation import operations
from atomr_cutlass.pipeline.planning import PlanOptions


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome("call_cases.py", tmp_path_factory.mktemp("gpu"), call_cases.ARCH, 120)


@pytest.mark.parametrize("case", fake_cases.names("call_cases.py"))
def test_kept_plans(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


FUNCTIONS = (
    ac.gemm, ac.gated_gemm, ac.gemv, ac.grouped_gemm, ac.conv2d, ac.conv2d_dgrad, ac.conv2d_wgrad, ac.quantize,
    ac.dequantize,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_every_parameter_has_its_text_in_the_order_of_the_signature(function: Callable[..., object]) -> None:
    text = str(function.__doc__)
    assert "{" not in text
    assert "    stream: where to launch: an integer handle or a stream object; defaults to the" in text
    arguments = text.partition("Args:\n")[2].partition("\n\nReturns:")[0]
    assert re.findall(r"^ {4}(\w+): ", arguments, re.MULTILINE) == list(inspect.signature(function).parameters)


REQUESTS = [operation.request_type for operation in operations().values() if operation.request_type is not None]


@pytest.mark.parametrize("described", [ac.plan, PlanOptions, *REQUESTS], ids=lambda each: each.__name__)
def test_every_field_has_its_text_in_the_order_of_the_signature(described: Callable[..., object]) -> None:
    kinds = described.__mro__ if isinstance(described, type) else (described,)
    text = next(str(kind.__doc__) for kind in kinds if re.search("Args:|Attributes:", str(kind.__doc__)))
    assert "{" not in text
    section = re.split("Args:\n|Attributes:\n", text)[1].partition("\n\n")[0]
    names = re.findall(r"^ {4}(\w+(?:, \w+)*): ", section, re.MULTILINE)
    assert [name for entry in names for name in entry.split(", ")] == list(inspect.signature(described).parameters)


@pytest.mark.parametrize("cleaned", [False, True])  # from Python 3.13 on the compiler takes the indentation off
def test_texts_are_those_of_call_options(cleaned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(a: object, *, stream: object = None, jit: object = None) -> None:
        """Computes.

        Args:
            a: array.
            jit: {jit} And more.

        Returns:
            Nothing.
        """

    options = inspect.getdoc(CallOptions)
    assert options is not None
    if cleaned:
        monkeypatch.setattr(CallOptions, "__doc__", options)
        function.__doc__ = inspect.getdoc(function)
    documented(function)
    own = options.partition("    stream: ")[2].rstrip()
    jit = options.partition("    jit: ")[2].partition("\n    workspace_size: ")[0]
    listed = f"    a: array.\n    stream: {own}\n    jit: {jit} And more."
    assert function.__doc__ == f"Computes.\n\nArgs:\n{listed}\n\nReturns:\n    Nothing."


@dataclasses.dataclass(kw_only=True)
class _Parent:
    """What both have.

    Attributes:
        dtype: element type.
        layout_a, layout_b: layouts.
        binding: a name.
    """

    dtype: str
    layout_a: str
    layout_b: str
    binding: str


@documented
@dataclasses.dataclass
class _Child(_Parent):
    """One of them.

    Attributes:
        shape: extents.
        binding: {binding} Of A.
    """

    shape: str
    fast_accum: bool = False


def test_texts_of_a_class_are_those_of_its_parents_too() -> None:
    fast = str(inspect.getdoc(CallOptions)).partition("    fast_accum: ")[2].partition("\n    backend: ")[0]
    assert _Child.__doc__ == (
        "One of them.\n\nAttributes:\n    shape: extents.\n    fast_accum: "
        f"{fast}\n    dtype: element type.\n    layout_a, layout_b: layouts.\n    binding: a name. Of A."
    )
