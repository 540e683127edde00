"""Cases that `test_cubin_packs.py` runs in a process whose driver is a fake, and whose table has a pack of cubins."""

from pathlib import Path

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
from pipeline_cases import matrix


def case_the_kernels_of_a_pack_serve_a_frozen_process() -> None:
    ac.freeze()
    a, b, c = matrix(8, 16), matrix(16, 12), matrix(8, 12)
    for given in ({}, {"jit": "auto"}, {"backend": "prebuilt"}):
        np.testing.assert_array_equal(ac.gemm(a, b, **given), a @ b)
    np.testing.assert_array_equal(ac.gemm(a, b, c, alpha=2, beta=3), 2 * (a @ b) + 3 * c)
    made = ac.plan(ac.GemmRequest(ac.GemmShape(8, 12, 16), dtype=ac.CutlassDtype.F32), device=0)
    assert (made.origin, made.kernel.pack) == ("pack model", "model")
    assert made.kernel_name in {info.name for info in ac.kernels() if info.pack == "model"}


def case_nothing_was_compiled_or_looked_for() -> None:
    assert "nvrtc" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ac.KernelNotFoundError, match=r"frozen|no kernel in the table"):
        ac.gemm(np.ones((4, 4), np.float16), np.ones((4, 4), np.float16), jit="auto")
    assert "nvrtc" not in Path("/proc/self/maps").read_text()


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
