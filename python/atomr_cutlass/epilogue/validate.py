"""Epilogue validation at first use: one small problem, compared with the reference.

A tree that is compiled wrongly gives plausible numbers. So the kernel that is about to serve a tree for the first time
on an architecture computes a problem of a few tiles, and what it writes is compared with the reference's evaluation of
the same tree. What was found is kept in the validation cache, beside the compiled kernels: the next process does not
look again.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import _core
from ..arrays import numerics, operands, symbols
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.lower import SOURCE, is_common, split
from ..generator.epilogue.tree import COLUMN, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ..generator.key import KernelKey
from ..jit import kernels, validations
from ..jit.locks import KeyedLocks
from ..pipeline import devices
from ..pipeline.candidate import Candidate
from ..pipeline.devices import Device
from ..reference.tolerance import tolerance
from ..reference.tree_error import mismatches
from .bound import Fusion, fusion_of, output_shape

VARIABLE = "ATOMR_CUTLASS_CHECK_EPILOGUES"
"""`on` (the default) or `off`."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Launch = Callable[[Any, Fusion, Mapping[str, _core.Operand]], None]
"""Launches the kernel that is validated for a problem over arrays on the GPU: a, b, out and the tree's operands."""


class Probe(NamedTuple):
    """A small problem.

    Attributes:
        problem: the operation's, which a launch is given.
        views: of a, b and out, on the GPU.
        acc: what the tree gets, (M, N).
        error: how far the kernel's may be from it.
    """

    problem: Any
    views: dict[str, _core.Operand]
    acc: Array
    error: Array


MakeProbe = Callable[[KernelKey, np.random.Generator, int], Probe]
"""Makes a small problem for a kernel, of random operands, on the GPU of an index."""

_known: dict[str, str] = {}
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


def require(
    candidate: Candidate[Any],
    epilogue: str,
    device: Device,
    launch: Launch,
    make_probe: MakeProbe,
    *,
    stream: int | None = None,
    in_background: bool = False,
) -> bool:
    """Checks a kernel's epilogue, unless that has been done before on this architecture.

    The cache entry holds for the code that was launched and the driver that ran it: another compiler or header gives
    another image, a row of the table another content, and they are checked again.

    Block-scaled kernels are checked without it: their operands come quantized, which tests do.

    Args:
        candidate: the kernel, whose epilogue is a tree.
        epilogue: the problem's, which a kernel is told that computes several.
        device: where it runs.
        launch: see `Launch`.
        make_probe: makes the small problem.
        stream: where the plan will be launched first. The check works on streams of its own, which the capture of a
            graph would not allow: while this one is captured, nothing but what is remembered is looked at.
        in_background: whether the caller's streams, any of which may be captured, go on meanwhile: the same then.

    Returns:
        False where the kernel is yet to be checked: such a plan must not be kept.

    Raises:
        UnsupportedError: the kernel's results differ from the reference's; says where. It says so again, without a
            launch, wherever what was found is remembered.
    """
    key = candidate.key
    if key.scale_type or not enabled():
        return True
    code = kernels.image_digest(key, device) if candidate.info is None else candidate.info.content
    asked = epilogue if is_common(key.epilogue) else key.epilogue
    identity = "\0".join(
        [key.to_json(), *([asked] if asked != key.epilogue else []), str(device.capability), devices.driver(), code]
    )
    with _locks.hold(identity):
        wrong = _known.get(identity)
        if wrong is None:
            wrong = validations.recall(identity)
        if wrong is None and (in_background or (stream is not None and _core.capturing(device.index, stream))):
            return False
        if wrong is None:
            symbols.refuse()
            wrong = "; ".join(_differences(key, asked, device.index, launch, make_probe))
            validations.remember(identity, wrong)
            if wrong:
                warnings.warn(f"the first use of an epilogue gave wrong results: {wrong}", RuntimeWarning, stacklevel=2)
        _known[identity] = wrong
    if wrong:
        raise UnsupportedError(
            f"{key.name} computes its epilogue wrongly on {device.name}: {wrong}. The tree is refused there; please "
            f"report it. Compute it apart from the product, or turn the check off with {VARIABLE}=off"
        )
    return True


def _differences(key: KernelKey, epilogue: str, device: int, launch: Launch, make_probe: MakeProbe) -> list[str]:
    """Describes how the results of a small problem differ from the reference; empty if they do not."""
    program = split(epilogue)[1].replace(f"input:{SOURCE}:", f"input:{MATRIX}:")
    tree = EpilogueVisitorTree.parse(program)
    random = np.random.default_rng(20)
    made = make_probe(key, random, device)
    m, n = made.acc.shape
    given = {operand.name: _operand(random, operand.kind, operand.dtype, m, n) for operand in tree.inputs}

    views = {name: operands.upload(array, device) for name, array in given.items()}
    views |= made.views
    for output in tree.outputs:
        element = operands.BYTE if output.dtype is None else output.dtype.dlpack
        _, views[output.name] = operands.empty_of(output_shape(output, (m, n)), element, device, None)
    for name in (RESULT, *(operand.name for operand in tree.outputs)):
        _poison(views[name])
    launch(made.problem, fusion_of(tree, views), views)
    got = {name: operands.download(views[name]) for name in (RESULT, *(operand.name for operand in tree.outputs))}
    got[RESULT] = got[RESULT].reshape(m, n)
    return mismatches(tree, got, made.acc, made.error, given, out_dtype=key.d)


def math_of(key: KernelKey) -> str:
    """The math mode of the reference for a kernel."""
    return "default" if key.math == numerics.FAST else key.math


def error_of(key: KernelKey, k: int, acc: Array, absolute: Array) -> Array:
    """How far a kernel's accumulators may be from `acc`, sums of `k` products whose magnitudes add up to `absolute`."""
    exact = CutlassDtype.F64 if key.acc is CutlassDtype.F64 else CutlassDtype.F32
    limits = tolerance(key.a, exact, k, key.math)
    error: Array = limits.atol_factor * absolute + limits.rtol * np.abs(acc)
    return error


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: CutlassDtype) -> Array:
    """Random values that an element type holds, normally distributed where it is not one of integers."""
    if dtype in numerics.INTEGER_DTYPES:
        return random.integers(-8, 9, shape).astype(numerics.numpy_dtype(dtype))
    return numerics.saturating_cast(random.standard_normal(shape), dtype)


def _operand(random: np.random.Generator, kind: str, dtype: CutlassDtype | None, m: int, n: int) -> Array:
    if dtype is None:
        return random.integers(0, 256, (m, -(-n // 8)), np.uint8)
    shape = {SCALAR: (1,), ROW: (n,), COLUMN: (m, 1), MATRIX: (m, n)}[kind]
    return normal(random, shape, dtype)


def _poison(view: _core.Operand) -> None:
    """Bytes that no result is likely to be: NaN in the floating types."""
    size = math.prod(view.shape) * view.dtype[1] // 8
    _core.upload(view.pointer, view.device, np.full(size, 0xFF, np.uint8))
