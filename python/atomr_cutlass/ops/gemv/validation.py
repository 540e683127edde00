"""The small product that an epilogue is validated with."""

from __future__ import annotations

import numpy as np

from ...arrays import operands
from ...epilogue.validate import Probe, normal
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.key import COLUMN, KernelKey
from ...pipeline.operand_table import spec_of
from ..gemm import reference
from .problem import product


def make_probe(key: KernelKey, random: np.random.Generator, device: int) -> Probe:
    """A product with more than one tile of columns, the last not whole; aligned for every kernel."""
    n, k = key.tile[1] + 16, 4 * key.tile[2]
    x = normal(random, (k,), key.a)
    a = normal(random, (n, k) if key.layout_b == COLUMN else (k, n), key.b)
    columns = key.layout_b != COLUMN
    a = a.T if columns else a
    views = {
        "a": operands.upload(a, device, columns=columns),
        "x": operands.upload(x, device),
        RESULT: operands.empty((n,), key.d, device, None)[1],
    }
    problem = product({name: spec_of(view, name) for name, view in views.items()}, key.math, device)
    row, turned = x[None], a.T
    acc = reference.gemm(row, turned, out_dtype=CutlassDtype.F64, math=key.math)
    return Probe(problem, views, acc, reference.absolute_product(row, turned), k)
