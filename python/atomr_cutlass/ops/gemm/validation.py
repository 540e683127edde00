"""The small product that an epilogue is validated with."""

from __future__ import annotations

import numpy as np

from ...arrays import operands
from ...epilogue.validate import Probe, normal
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.key import ROW as ROW_MAJOR
from ...generator.key import KernelKey
from ...pipeline.operand_table import spec_of
from ...pipeline.problem import GemmProblem
from . import reference


def make_probe(key: KernelKey, random: np.random.Generator, device: int) -> Probe:
    """A product of more than a tile along M and N, and neither a whole number of tiles; aligned for every kernel."""
    m, n, k = key.tile[0] + 16, key.tile[1] + 16, 2 * key.tile[2]
    a = normal(random, (m, k), key.a) if key.layout_a == ROW_MAJOR else normal(random, (k, m), key.a).T
    b = normal(random, (k, n), key.b) if key.layout_b == ROW_MAJOR else normal(random, (n, k), key.b).T
    views = {
        "a": operands.upload(a, device, columns=key.layout_a != ROW_MAJOR),
        "b": operands.upload(b, device, columns=key.layout_b != ROW_MAJOR),
        RESULT: operands.empty((m, n), key.d, device, None)[1],
    }
    specs = {name: spec_of(view, name) for name, view in views.items()}
    problem = GemmProblem(specs["a"], specs["b"], None, specs[RESULT], key.math, device)
    acc = reference.gemm(a, b, out_dtype=CutlassDtype.F64, math=key.math)
    return Probe(problem, views, acc, reference.absolute_product(a, b), k)
