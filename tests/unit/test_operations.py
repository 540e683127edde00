"""Operations: the registry knows each, and each says the same of its requests as they do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import golden_gpu
import option_cases
from atomr_cutlass import (
    ConvDgradRequest,
    ConvFwdRequest,
    ConvShape,
    ConvWgradRequest,
    CutlassDtype,
    GatedGemmRequest,
    GemmRequest,
    GemmShape,
    GemvRequest,
    GemvShape,
    GroupedGemmRequest,
    GroupedGemmShape,
    InvalidOperandError,
    UnsupportedError,
    ops,
)
from atomr_cutlass.jit.kernels import POLICIES
from atomr_cutlass.pipeline.operation import (
    CALL_OPTIONS,
    FOLDERS,
    IN_BACKGROUND,
    operation_of,
    operations,
    planned_operations,
)

SHAPE = ConvShape.nhwc(2, 8, 8, 16, 32, 3, 3, padding=1)
REQUESTS: dict[str, Any] = {
    "gemm": GemmRequest(GemmShape(8, 16, 32, 2), dtype=CutlassDtype.F16),
    "gated_gemm": GatedGemmRequest(GemmShape(8, 16, 32, 2), dtype=CutlassDtype.F16),
    "gemv": GemvRequest(GemvShape(16, 32, 2), dtype=CutlassDtype.F16),
    "grouped_gemm": GroupedGemmRequest(
        GroupedGemmShape([GemmShape(8, 16, 32), GemmShape(0, 16, 32)]), dtype=CutlassDtype.F16
    ),
    "conv2d_fprop": ConvFwdRequest(SHAPE, dtype=CutlassDtype.F16),
    "conv2d_dgrad": ConvDgradRequest(SHAPE, dtype=CutlassDtype.F16),
    "conv2d_wgrad": ConvWgradRequest(SHAPE, dtype=CutlassDtype.F16),
}


def test_every_folder_that_has_an_operation_is_registered() -> None:
    found = {path.parent.name for path in Path(ops.__path__[0]).glob("*/operation.py")}
    assert found == set(FOLDERS)
    assert all(name == operation.name for name, operation in operations().items())
    assert list(planned_operations()) == list(REQUESTS)
    assert all(bool(operation.unplanned) is (name not in REQUESTS) for name, operation in operations().items())


@pytest.mark.parametrize("name", REQUESTS)
def test_the_operation_of_a_request_has_the_name_of_its_plans(name: str) -> None:
    request = REQUESTS[name]
    operation = operation_of(request)
    assert operation is operations()[name]
    assert request.plan_key().op == name

    class Derived(type(request)):  # type: ignore[misc]
        pass

    assert operation_of(Derived(request.shape, dtype=request.dtype)) is operation


@pytest.mark.parametrize("name", REQUESTS)
def test_the_operand_table_ends_with_the_result(name: str) -> None:
    operation, request = operation_of(REQUESTS[name]), REQUESTS[name]
    *inputs, result = operation.operands(request)
    assert (result.name, result.written) == ("out", True)
    assert [slot.name for slot in inputs] == list(operation.names(request))[: len(inputs)]
    assert not any(slot.written for slot in inputs)


def test_products_are_those_of_the_definition() -> None:
    taps = 2 * 8 * 8 * 32 * 3 * 3 * 16
    gemm = 2 * 8 * 16 * 32
    products = {"gemm": gemm, "gated_gemm": gemm, "gemv": 2 * 16 * 32, "grouped_gemm": 8 * 16 * 32}
    for name, request in REQUESTS.items():
        assert operation_of(request).products(request) == products.get(name, taps)


@pytest.mark.parametrize("value", [None, "gemm", GemmShape(8, 16, 32), GemmRequest])
def test_what_is_no_request_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOperandError, match=r"expected a GemmRequest, Gated.* or ConvWgradRequest$"):
        operation_of(value)


@pytest.mark.parametrize("name", operations())
def test_a_function_takes_an_option_or_the_operation_says_why_not(name: str) -> None:
    operation = operations()[name]
    takes = inspect.signature(getattr(ac, operation.function or name)).parameters
    for option in CALL_OPTIONS:
        assert (operation.spelled.get(option, option) in takes) is not (option in operation.refuses), option
    assert set(operation.refuses) | set(operation.spelled) <= {*CALL_OPTIONS, IN_BACKGROUND}
    assert operation.spelled.get(IN_BACKGROUND, IN_BACKGROUND) in {f'jit="{policy}"' for policy in POLICIES}
    assert all(operation.refuses.values())


TAKEN = [(name, option) for name, operation in operations().items() for option in option_cases.taken(operation)]
REFUSED = [(name, option) for name, operation in operations().items() for option in operation.refuses]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error of each call on a GPU, as text."""
    return golden_gpu.outcome("option_cases.py", tmp_path_factory.mktemp("gpu"), option_cases.ARCH, 300)


@pytest.mark.parametrize(("name", "option"), TAKEN)
def test_kernels_serve_what_the_table_says_is_taken(name: str, option: str, launched: dict[str, str]) -> None:
    assert launched[f"case_{name}_{option}"] == ""


@pytest.mark.parametrize(("name", "option"), TAKEN)
def test_the_reference_serves_what_the_table_says_is_taken(name: str, option: str) -> None:
    assert option_cases.call(name, option, option_cases.host, backend="reference") is not None


@pytest.mark.parametrize(("name", "option"), REFUSED)
def test_what_the_table_says_is_refused_is_refused_with_its_reason(name: str, option: str) -> None:
    operation = operations()[name]
    function, error, says = operation.function or name, UnsupportedError, operation.refuses[option]
    if isinstance(getattr(ac, function), type):  # a dataclass, whose fields Python knows
        error, says = TypeError, f"unexpected keyword argument '{option}'"
    with pytest.raises(error, match=re.escape(says)):
        option_cases.call(name, option, option_cases.host)
