"""Checks that the functions on arrays make of their arguments, for every op."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import Any

from .. import _core
from ..checks import NUMBERS, check_extents, check_number, check_options, shown
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..pipeline import devices
from . import operands
from .numerics import default_out_dtype
from .operands import CPU, CUDA

_warned = threading.Event()
_PACKAGE = __name__.partition(".")[0]


def check_backend(backend: str, backends: Iterable[str]) -> None:
    """Refuses an unknown backend.

    Raises:
        InvalidOperandError: names the valid ones.
    """
    if not isinstance(backend, str) or backend not in backends:
        raise InvalidOperandError(f"unknown backend {shown(backend)}; valid: {', '.join(backends)}")


def views_of(
    given: Mapping[str, Any], needed: Iterable[str] = (), called: Mapping[str, str] | None = None
) -> dict[str, _core.Operand]:
    """Views of arrays by name.

    Args:
        given: arrays; None stands for one that was left out.
        needed: names of those that must not be.
        called: what the caller knows operands as, by these names, where that is something else.

    Raises:
        InvalidOperandError: one is no array, or has more elements along a dimension than kernels count.
    """
    said = {name: (called or {}).get(name, name) for name in given}
    for name in needed:
        if given[name] is None:
            raise InvalidOperandError(f"{said[name]} is None; expected an array")
    views = {name: operands.as_operand(array, said[name]) for name, array in given.items() if array is not None}
    for name, view in views.items():
        check_extents(view.shape, said[name])
    return views


def check_scalars(alpha: float, beta: float, c: Any, scale_d: Any = None) -> None:
    """Refuses scalars that are no numbers, and a C that would not be read or is missing; `scale_d` multiplies beta.

    Raises:
        InvalidOperandError: names the scalar.
    """
    check_number(alpha, "alpha")
    check_number(beta, "beta")
    if c is not None and beta != 0 and isinstance(scale_d, NUMBERS) and float(beta) * float(scale_d) == 0:
        raise InvalidOperandError(
            f"c is given, but scale_d is {scale_d} and beta {beta}: their product is 0, with which c would not be "
            "read; leave c and beta out"
        )
    if c is not None and beta == 0:
        raise InvalidOperandError("c is given but beta is 0, so it would not be read: give beta, or leave c out")
    if c is None and beta != 0:
        raise InvalidOperandError(f"beta is {beta}, so c is needed")


def check_followers(op: str, epilogue: Any, activation: Any, others: Iterable[str]) -> None:
    """Refuses `others`, arguments that only an epilogue takes, without one, and an activation beside one.

    Raises:
        InvalidOperandError: names them.
    """
    strays = ", ".join(others)
    if epilogue is None and strays:
        raise InvalidOperandError(f"{strays}: {op} has no such argument, and there is no epilogue to take it")
    if epilogue is not None and activation is not None:
        raise InvalidOperandError("epilogue and activation are given: apply the activation in the epilogue")


def check_devices(views: Mapping[str, _core.Operand]) -> None:
    """Refuses operands that are not all on one device, or neither on the host nor on a GPU.

    Raises:
        InvalidOperandError: names the two that differ.
    """
    first_name, first = next(iter(views.items()))
    for name, view in views.items():
        if view.device_type not in (CPU, CUDA):
            raise InvalidOperandError(f"{name} is on a device of DLPack type {view.device_type}; expected CUDA or CPU")
        if (view.device_type, view.device) != (first.device_type, first.device):
            raise InvalidOperandError(
                f"{first_name} is on {_place(first)} and {name} on {_place(view)}: all operands must be on one device"
            )


def _place(view: _core.Operand) -> str:
    return f"cuda:{view.device}" if view.device_type == CUDA else "the CPU"


def result_dtype(
    views: Mapping[str, _core.Operand], requested: CutlassDtype | None, operand: CutlassDtype, *, fused: bool = False
) -> CutlassDtype:
    """The result's element type: what is requested, else that of `out`, else the default for the operands.

    Of integers, what follows the product (`fused`) gives what `c` is, where there is one.

    Raises:
        InvalidOperandError: they contradict each other, or `c` has another.
    """
    check_options(out_dtype=requested)
    given = operands.dtype_of(views["out"], "out") if "out" in views else None
    if requested is not None and given is not None and requested is not given:
        raise InvalidOperandError(f"out is {given.value}, but out_dtype asks for {requested.value}")
    c = operands.dtype_of(views["c"], "c") if "c" in views else None
    said = requested or given or (c if fused and operand is CutlassDtype.I8 else None)
    result = said or default_out_dtype(operand, fused=fused)
    if c is not None and c is not result:
        raise InvalidOperandError(f"c is {c.value}; it must have the result's dtype, {result.value}")
    return result


def check_out(views: Mapping[str, _core.Operand], inputs: Iterable[str]) -> None:
    """Refuses an `out` that cannot be written, or that shares memory with itself or with an input but `c`.

    Raises:
        InvalidOperandError: says which.
    """
    check_writable(views["out"], "out")
    check_apart({"out": views["out"]}, {name: views[name] for name in inputs if name in views}, ("c",))


def check_writable(view: _core.Operand, name: str) -> None:
    """Refuses arrays that cannot be written, or whose elements share memory.

    Raises:
        InvalidOperandError: says why.
    """
    if view.read_only:
        raise InvalidOperandError(f"{name} is read-only: give an array that may be written")
    pairs = zip(view.strides, view.shape, strict=True)
    if 0 not in view.shape and any(stride == 0 and extent > 1 for stride, extent in pairs):
        raise InvalidOperandError(
            f"{name} has strides {view.strides}: its elements share memory; give an array of its own"
        )


def check_apart(
    written: Mapping[str, _core.Operand], read: Mapping[str, _core.Operand], movable: Container[str]
) -> None:
    """Refuses results that share memory with each other or with an input.

    A result may take the very place of what is `movable`: each element of that is read before it is written.

    Raises:
        InvalidOperandError: names the two.
    """
    pairs = [*itertools.product(written.items(), read.items()), *itertools.combinations(written.items(), 2)]
    for (name, view), (other, its) in pairs:
        same = (its.pointer, its.strides, its.dtype[1]) == (view.pointer, view.strides, view.dtype[1])
        if _core.overlap(view, its) and not (same and other in movable):
            hint = " (out may be exactly c)" if name == "out" and "c" in movable else ""
            raise InvalidOperandError(f"{name} overlaps {other}: give separate memory{hint}")


def refuse_jax_out(out: Any, name: str = "out") -> None:
    """Refuses a JAX array for a result.

    Raises:
        InvalidOperandError: it is one.
    """
    if out is not None and operands.is_jax(out):
        raise InvalidOperandError(f"{name} is a JAX array, which cannot be written: leave {name} away")


def on_reference(backend: str, view: _core.Operand) -> bool:
    """Whether the reference computes: asked for, or for host arrays where there is no GPU, warning once."""
    if backend == "reference":
        return True
    if view.device_type != CPU or backend != "auto" or devices.available():
        return False
    if not _warned.is_set():
        _warned.set()
        level, frame = 1, sys._getframe()  # noqa: SLF001 - for the warning to name the line of the package's caller
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            level, frame = level + 1, frame.f_back
        warnings.warn(f"computing with NumPy on the CPU: {devices.problem()}", RuntimeWarning, stacklevel=level)
    return True
