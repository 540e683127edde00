"""Cases that `test_families.py` runs on a GPU that takes notes: calls that differ in extents and strides alone.

Those of a family whose plan follows from that of another are compared with themselves, planned anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import fake_cases
import golden_cases
import golden_gpu
from atomr_cutlass import SmArch
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.call import kept_plans

FAMILIES = int(os.environ.get("TEST_FAMILIES", "12"))
"""Of each operation."""
MEMBERS = 9
ARCHS = (SmArch.SM90A, SmArch.SM80)


GPU: golden_gpu.Gpu


class Member(golden_cases.Draw):
    """The draws of a family, but for the extents: a member's are a little larger, of every fourth quite other."""

    def __init__(self, family: str, number: int) -> None:
        super().__init__(family)
        self._alike = number % 4 != 3
        self._base = golden_cases.Draw(f"{family}/{'base' if self._alike else number}", most=5000)
        self._more = golden_cases.Draw(f"{family}/{number}")

    def of(self, values: Sequence[golden_cases.Value]) -> golden_cases.Value:
        extents = len(values) > 3 and all(isinstance(value, int) and value > 0 for value in values)
        if extents and 16 < max(values) < (100 if self._alike else 1000):  # type: ignore[type-var, operator]
            return self._more.of(values)
        return super().of(values)

    def extent(self, most: int = 9000) -> int:
        return min(most, self._base.extent(most) + self._alike * 16 * self._more.below(4))


def families(op: str) -> Iterator[list[golden_cases.Case]]:
    """Calls of an operation, family by family."""
    for number in range(FAMILIES):
        name = f"families/{op}/{GPU.arch.value}/{number}"
        yield [
            golden_cases._MAKERS[op](Member(name, member), f"{op}/{GPU.arch.value}/{number}", "full", GPU.arch)
            for member in range(MEMBERS)
        ]


def compare(op: str, least: int) -> None:
    """Compares; `least` is how many calls in a hundred are to be served without being parsed."""
    calls = derived = 0
    with fake_cases.parsed() as parsed:
        for members in families(op):
            kept_plans.clear()
            family, made = {case.text: case for case in members}.values(), []
            for case in family:
                before = len(parsed)
                made.append(GPU.record("full", case.call, case.operands, forgetting=False))
                derived += len(parsed) == before
                calls += 1
            for case, found in zip(family, made, strict=True):
                anew = GPU.record("full", case.call, case.operands)
                assert found == anew, f"{case.text}: {found} in place of {anew}"
    assert 100 * derived >= least * calls, f"{derived} of {calls}"


def case_gemm() -> None:
    compare("gemm", 20)


def case_gemm_with_epilogues() -> None:
    compare("gemm_epilogue", 0)


def case_gemm_with_scales() -> None:
    compare("gemm_scaled", 0)


def case_fp4() -> None:
    compare("gemm_fp4", 0)


def case_gated_gemm() -> None:
    compare("gated_gemm", 0)


def case_gemv() -> None:
    compare("gemv", 10)


def case_grouped_gemm() -> None:
    compare("grouped_gemm", 5)


def case_conv2d() -> None:
    compare("conv2d", 1)


def case_conv2d_dgrad() -> None:
    compare("conv2d_dgrad", 0)


def case_conv2d_wgrad() -> None:
    compare("conv2d_wgrad", 0)


def case_matmul() -> None:
    compare("matmul", 0)


def case_quantize() -> None:
    compare("quantize", 0)


if __name__ == "__main__":
    GPU = golden_gpu.Gpu(Path(sys.argv[1]), devices.require_arch(devices.get(0)))
    fake_cases.run(globals())
