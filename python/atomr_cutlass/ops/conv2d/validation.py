"""The small convolution that an epilogue is validated with."""

from __future__ import annotations

import numpy as np

from ...arrays import operands
from ...epilogue.validate import Probe, normal
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import RESULT
from ...generator.key import KernelKey
from ...pipeline.operand_table import spec_of
from .geometry import FPROP, conv_geometry
from .problem import ConvProblem
from .reference import absolute_convolution, convolution


def make_probe(key: KernelKey, random: np.random.Generator, device: int) -> Probe:
    """A convolution with a filter of nine taps over an image with a border; as `gemm.validation` makes a product."""
    rows, columns, taps = key.tile[0] // 8 + 2, 8, 3
    read, written = 2 * key.tile[2], key.tile[1] + 16
    forward = key.op == FPROP
    image = (1, rows, columns, written)
    a = normal(random, (1, rows, columns, read), key.a)
    b = normal(random, (written, taps, taps, read) if forward else (read, taps, taps, written), key.b)
    views = {"a": operands.upload(a, device), "b": operands.upload(b, device)}
    views[RESULT] = operands.empty(image, key.d, device, None)[1]
    acc = convolution(key.op, a, b, image, padding=1, out_dtype=CutlassDtype.F64, math=key.math)
    absolute = absolute_convolution(key.op, a, b, image, padding=1)
    x, w = (a.shape, b.shape) if forward else (image, b.shape)
    geometry = conv_geometry(x, w, stride=1, padding=1, dilation=1, groups=1)
    specs = {name: spec_of(view, name) for name, view in views.items()}
    problem = ConvProblem(key.op, geometry, specs["a"], specs["b"], None, specs[RESULT], key.math, device)
    flat = (rows * columns, written)
    return Probe(problem, views, acc.reshape(flat), absolute.reshape(flat), taps * taps * read)
