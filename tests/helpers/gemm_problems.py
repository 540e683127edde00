"""GEMM problems of dense matrices, as the search for kernels is given them."""

from __future__ import annotations

import dataclasses
from typing import Any

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.ops.gemm.problem import GemmProblem


def dense(
    m: int,
    n: int,
    k: int,
    layouts: str = "rcr",
    dtype: D = D.BF16,
    *,
    math: str = "default",
    c: bool = False,
    **of_d: Any,
) -> GemmProblem:
    """A product of dense matrices.

    Args:
        m: rows of A and D.
        n: columns of B and D.
        k: columns of A, rows of B.
        layouts: of A, B and D: `r` is row-major, `c` column-major.
        dtype: element type of all.
        math: the math mode.
        c: whether there is a C, which lies as D does.
        of_d: fields of D that differ.
    """

    def spec(rows: int, columns: int, letter: str) -> MatrixSpec:
        return MatrixSpec((rows, columns), (columns, 1) if letter == "r" else (1, rows), dtype)

    d = dataclasses.replace(spec(m, n, layouts[2]), **of_d)
    return GemmProblem(a=spec(m, k, layouts[0]), b=spec(k, n, layouts[1]), c=d if c else None, d=d, math=math, device=0)
