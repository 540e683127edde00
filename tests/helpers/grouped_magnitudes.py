"""The magnitudes by which the error of a grouped GEMM is measured."""

from __future__ import annotations

from typing import Any

import numpy as np

import grouped_oracle
from atomr_cutlass.ops.gemm.reference import absolute_product


def absolute_grouped_product(
    a: Any, b: Any, c: Any = None, *, offsets: Any = None, counts: Any = None, bias: Any = None, scale_a: Any = None,
    scale_b: Any = None, **factors: Any,
) -> Any:  # fmt: skip
    """`absolute_product` of every group, against which `within_tolerance` measures; 0 in rows that belong to no group.

    Arguments and errors are those of the reference's `grouped_gemm`.
    """
    problem = grouped_oracle._split(a, b, c, offsets, counts, bias, scale_a, scale_b)
    results = [absolute_product(group.a, group.b, group.c, **group.terms, **factors) for group in problem.groups]
    return results if problem.shape is None else grouped_oracle._placed(problem, results, np.zeros(problem.shape))
