"""The check of an epilogue at its first use: one small problem, compared with the reference.

A tree that is compiled wrongly gives plausible numbers. So the kernel that is about to serve a tree for the first time
on an architecture computes a problem of a few tiles, and what it writes is compared with the reference's evaluation of
the same tree. What was found is remembered beside the compiled kernels: the next process does not look again.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import _core, reference
from ..arrays import numerics, operands
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.lower import SOURCE, split
from ..generator.epilogue.tree import COLUMN, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ..generator.key import ROW as ROW_MAJOR
from ..generator.key import KernelKey
from ..jit import kernels, verdicts
from ..jit.keyed_locks import KeyedLocks
from ..ops.conv2d import reference as conv_reference
from ..ops.conv2d.problem import DGRAD, FPROP, ConvProblem
from ..ops.gemm import reference as gemm_reference
from ..pipeline import devices
from ..pipeline.candidate import Candidate
from ..pipeline.devices import Device
from ..pipeline.problem import GemmProblem, MatrixSpec
from .bound import Fusion, fusion_of, output_shape

VARIABLE = "ATOMR_CUTLASS_CHECK_EPILOGUES"
"""`on` (the default) or `off`."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Launch = Callable[[Any, Fusion, Mapping[str, _core.Operand]], None]
"""Launches the key that is checked for a problem over arrays on the GPU: a, b, out and the tree's operands by name."""

_verdicts: dict[str, str] = {}
_locks = KeyedLocks()


def enabled() -> bool:
    """Whether epilogues are checked.

    Raises:
        InvalidOperandError: the variable has an unknown value.
    """
    wanted = os.environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise InvalidOperandError(f"{VARIABLE} is {wanted!r}; valid: on, off")
    return wanted == "on"


def require(candidate: Candidate[Any], device: Device, launch: Launch, *, stream: int | None = None) -> bool:
    """Checks a kernel's epilogue, unless that has been done before on this architecture.

    What is remembered is about the code that was launched and the driver that ran it: another compiler or header gives
    another image, a row of the table another content, and they are checked again.

    Block-scaled kernels are checked without it: their operands come quantized, which tests do.

    Args:
        candidate: the kernel, whose epilogue is a tree.
        device: where it runs.
        launch: see `Launch`.
        stream: where the plan will be launched first. The check works on streams of its own, which the capture of a
            graph would not allow: while this one is captured, nothing but what is remembered is looked at.

    Returns:
        False where the kernel is yet to be checked: such a plan must not be kept.

    Raises:
        UnsupportedError: the kernel's results differ from the reference's; says where. It says so again, without a
            launch, wherever the verdict is remembered.
    """
    key = candidate.key
    if key.scale_type or not enabled():
        return True
    code = kernels.image_digest(key, device) if candidate.info is None else candidate.info.content
    identity = "\0".join([key.to_json(), str(device.capability), devices.driver(), code])
    with _locks.hold(identity):
        wrong = _verdicts.get(identity)
        if wrong is None:
            wrong = verdicts.recall(identity)
        if wrong is None and stream is not None and _core.capturing(device.index, stream):
            return False
        if wrong is None:
            wrong = "; ".join(_differences(key, device.index, launch))
            verdicts.remember(identity, wrong)
            if wrong:
                warnings.warn(f"the first use of an epilogue gave wrong results: {wrong}", RuntimeWarning, stacklevel=2)
        _verdicts[identity] = wrong
    if wrong:
        raise UnsupportedError(
            f"{key.name} computes its epilogue wrongly on {device.name}: {wrong}. The tree is refused there; please "
            f"report it. Compute it apart from the product, or turn the check off with {VARIABLE}=off"
        )
    return True


def _differences(key: KernelKey, device: int, launch: Launch) -> list[str]:
    """What a small problem has that the reference does not."""
    program = split(key.epilogue)[1].replace(f"input:{SOURCE}:", f"input:{MATRIX}:")
    tree = EpilogueVisitorTree.parse(program)
    random = np.random.default_rng(20)
    made = (_convolution if key.op in (FPROP, DGRAD) else _product)(key, random, device)
    m, n = made.acc.shape
    given = {one.name: _operand(random, one.kind, one.dtype, m, n) for one in tree.inputs}

    views = {name: operands.upload(array, device) for name, array in given.items()}
    views |= made.views
    for output in tree.outputs:
        element = operands.BYTE if output.dtype is None else output.dtype.dlpack
        _, views[output.name] = operands.empty_of(output_shape(output, (m, n)), element, device, None)
    for name in (RESULT, *(one.name for one in tree.outputs)):
        _poison(views[name])
    launch(made.what, fusion_of(tree, views), views)
    got = {name: operands.download(views[name]) for name in (RESULT, *(one.name for one in tree.outputs))}
    got[RESULT] = got[RESULT].reshape(m, n)
    return reference.mismatches(tree, got, made.acc, made.error, given, out_dtype=key.d)


class _Made(NamedTuple):
    """A small problem.

    Attributes:
        what: as kernels are asked for it.
        views: of a, b and out, on the GPU.
        acc: what the tree gets, (M, N).
        error: how far the kernel's may be from it.
    """

    what: GemmProblem | ConvProblem
    views: dict[str, _core.Operand]
    acc: Array
    error: Array


def _product(key: KernelKey, random: np.random.Generator, device: int) -> _Made:
    """More than a tile along M and N, and neither a whole number of tiles; aligned for every kernel."""
    m, n, k = key.tile[0] + 16, key.tile[1] + 16, 2 * key.tile[2]
    a = _normal(random, (m, k), key.a) if key.layout_a == ROW_MAJOR else _normal(random, (k, m), key.a).T
    b = _normal(random, (k, n), key.b) if key.layout_b == ROW_MAJOR else _normal(random, (n, k), key.b).T
    views = {
        "a": operands.upload(a, device, columns=key.layout_a != ROW_MAJOR),
        "b": operands.upload(b, device, columns=key.layout_b != ROW_MAJOR),
        RESULT: operands.empty((m, n), key.d, device, None)[1],
    }
    what = GemmProblem(_spec(views["a"]), _spec(views["b"]), None, _spec(views[RESULT]), key.math, device)
    acc = gemm_reference.gemm(a, b, out_dtype=CutlassDtype.F64, math=_math(key))
    return _Made(what, views, acc, _error(key, k, acc, gemm_reference.absolute_product(a, b)))


def _convolution(key: KernelKey, random: np.random.Generator, device: int) -> _Made:
    """The same of pixels and channels, with a filter of nine taps over an image with a border."""
    rows, columns, taps = key.tile[0] // 8 + 2, 8, 3
    read, written = 2 * key.tile[2], key.tile[1] + 16
    forward = key.op == FPROP
    image = (1, rows, columns, written)
    a = _normal(random, (1, rows, columns, read), key.a)
    b = _normal(random, (written, taps, taps, read) if forward else (read, taps, taps, written), key.b)
    views = {"a": operands.upload(a, device), "b": operands.upload(b, device)}
    views[RESULT] = operands.empty(image, key.d, device, None)[1]
    if forward:
        acc = conv_reference.conv2d(a, b, padding=1, out_dtype=CutlassDtype.F64, math=_math(key))
        absolute = conv_reference.absolute_conv2d(a, b, padding=1)
    else:
        acc = conv_reference.conv2d_dgrad(a, b, image, padding=1, out_dtype=CutlassDtype.F64, math=_math(key))
        absolute = conv_reference.absolute_conv2d_dgrad(a, b, image, padding=1)
    x, w = (a.shape, b.shape) if forward else (image, b.shape)
    geometry = conv_reference.conv_geometry(x, w, stride=1, padding=1, dilation=1, groups=1)
    specs = {name: _spec(view) for name, view in views.items()}
    what = ConvProblem(key.op, geometry, specs["a"], specs["b"], None, specs[RESULT], None, None, key.math, device)
    flat = (rows * columns, written)
    return _Made(what, views, acc.reshape(flat), _error(key, taps * taps * read, acc, absolute).reshape(flat))


def _math(key: KernelKey) -> str:
    return "default" if key.math == numerics.FAST else key.math


def _error(key: KernelKey, k: int, acc: Array, absolute: Array) -> Array:
    exact = CutlassDtype.F64 if key.acc is CutlassDtype.F64 else CutlassDtype.F32
    limits = reference.tolerance(key.a, exact, k, key.math)
    error: Array = limits.atol_factor * absolute + limits.rtol * np.abs(acc)
    return error


def _spec(view: _core.Operand) -> MatrixSpec:
    return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "an operand"), view.alignment)


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: CutlassDtype) -> Array:
    if dtype in numerics.INTEGER_DTYPES:
        return random.integers(-8, 9, shape).astype(numerics.numpy_dtype(dtype))
    return numerics.saturating_cast(random.standard_normal(shape), dtype)


def _operand(random: np.random.Generator, kind: str, dtype: CutlassDtype | None, m: int, n: int) -> Array:
    if dtype is None:
        return random.integers(0, 256, (m, -(-n // 8)), np.uint8)
    shape = {SCALAR: (1,), ROW: (n,), COLUMN: (m, 1), MATRIX: (m, n)}[kind]
    return _normal(random, shape, dtype)


def _poison(view: _core.Operand) -> None:
    """Bytes that no result is likely to be: NaN in the floating types."""
    size = math.prod(view.shape) * view.dtype[1] // 8
    _core.upload(view.pointer, view.device, np.full(size, 0xFF, np.uint8))
