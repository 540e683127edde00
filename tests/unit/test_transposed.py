"""Transposed copies of operands: which products have them, and what is launched."""

from __future__ import annotations

import pytest

import fake_cases
import golden_gpu
import transposed_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.generator.families.transpose import transpose
from atomr_cutlass.generator.matrix import cells, supports
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.pipeline.problem import GemmProblem, MatrixSpec
from fake_table import A100, H200

CASES_FILE = "transposed_cases.py"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case raised, as text."""
    return golden_gpu.outcome(CASES_FILE, tmp_path_factory.mktemp("gpu"), transposed_cases.ARCH, 120)


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


def test_kernels_are_of_two_widths() -> None:
    keys = {key for _, key in cells([SmArch.SM90A]) if key.op == "transpose"}
    assert keys == {transpose(SmArch.SM90A, D.I8), transpose(SmArch.SM90A, D.F32)}
    assert transpose(SmArch.SM90A, D.F8E4M3) in keys
    assert all(supports(key) for key in keys)
    assert not [key for _, key in cells([SmArch.SM80, SmArch.SM100]) if key.op == "transpose"]


@pytest.mark.parametrize(
    ("dtype", "math", "layouts", "copied"),
    [
        (D.F32, "tf32", "rr", {"b"}),
        (D.F32, "tf32", "cc", {"a"}),
        (D.F32, "tf32", "rc", set()),
        (D.F32, "tf32", "cr", set()),
        (D.F32, "ieee", "rr", set()),
        (D.I8, "default", "rr", {"b"}),
        (D.F8E5M2, "fast", "rr", {"b"}),
        (D.BF16, "default", "rr", set()),
    ],
)
def test_what_lies_along_n_or_m_may_be_copied(dtype: D, math: str, layouts: str, copied: set[str]) -> None:
    def spec(rows: int, columns: int, layout: str) -> MatrixSpec:
        return MatrixSpec((rows, columns), (columns, 1) if layout == "r" else (1, rows), dtype)

    out = MatrixSpec((64, 96), (96, 1), D.I32 if dtype is D.I8 else D.F32)
    problem = GemmProblem(
        a=spec(64, 128, layouts[0]), b=spec(128, 96, layouts[1]), c=None, d=out, math=math, device=0
    )  # fmt: skip
    found = [formulation for group in GemmSearch(problem, H200).formulations for formulation in group]
    assert {one.copied.operand for one in found if one.copied is not None} == copied
    assert all(one.copied is None for group in GemmSearch(problem, A100).formulations for one in group)
