"""The types of options' values: checked before options are compared, hashed or counted with.

Arrays, lists and objects compare element by element, or not at all: what is given where a name or a number belongs must
be refused by its type, by every function alike. Which names and numbers are valid is the functions' own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from .errors import InvalidOperandError
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.errors import expect, shown

__all__ = [
    "MOST",
    "NUMBERS",
    "check_extents",
    "check_flag",
    "check_index",
    "check_name",
    "check_number",
    "check_options",
    "expect",
    "shown",
]

NUMBERS: Final = (int, float, np.integer, np.floating)
"""Types of scalars."""

MOST: Final = 2**31 - 1
"""The largest extent: kernels count rows and columns with 32 bits."""


def check_name(value: Any, name: str) -> None:
    """Refuses what is no text.

    Raises:
        InvalidOperandError: names the argument.
    """
    expect(value, str, name, "a name")


def check_number(value: Any, name: str) -> None:
    """Refuses what is no number of a double's range. NaN and infinity are numbers.

    Raises:
        InvalidOperandError: names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise InvalidOperandError(f"{name} is a {type(value).__name__}; expected a number")
    try:
        float(value)
    except OverflowError:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected a number of a double's range") from None


def check_flag(value: Any, name: str) -> None:
    """Refuses what is neither True nor False.

    Raises:
        InvalidOperandError: names the argument.
    """
    expect(value, (bool, np.bool_), name, "True or False")


def check_extents(shape: tuple[int, ...], name: str) -> None:
    """Refuses an array with more rows, columns or batches than kernels count.

    Raises:
        InvalidOperandError: names the array.
    """
    if any(extent > MOST for extent in shape):
        raise InvalidOperandError(f"{name} has shape {shape}; kernels count to 2^31 - 1 in each dimension: split it")


def check_index(value: Any, name: str) -> None:
    """Refuses what is no index of a GPU.

    Raises:
        InvalidOperandError: names the argument.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not 0 <= value <= MOST:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected the index of a GPU")


def check_count(value: Any, name: str, counted: str) -> None:
    """Refuses what is no integer from 1 to 2^63 - 1.

    Raises:
        InvalidOperandError: names the argument, and what it counts.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected an integer from 1, {counted}")


def _check_bytes(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected bytes, or None for no limit")


def _check_dtype(value: Any, name: str) -> None:
    expect(value, CutlassDtype, name)


def _check_arch(value: Any, name: str) -> None:
    expect(value, SmArch, name, "an SmArch")


_REQUIRED: Final[Mapping[str, Callable[[Any, str], None]]] = {
    "backend": check_name,
    "layout": check_name,
    "scaling": check_name,
    "dtype": _check_dtype,
    "alpha": check_number,
    "beta": check_number,
    "fast_accum": check_flag,
    "mock": check_flag,
}
_OPTIONAL: Final[Mapping[str, Callable[[Any, str], None]]] = {
    "activation": check_name,
    "workspace_size": _check_bytes,
    "arch": _check_arch,
    "batch_invariant": check_flag,
    "check": check_flag,
    "filter": check_name,
    "jit": check_name,
    "op": check_name,
    "out_dtype": _check_dtype,
    "precision": check_name,
}
"""How options are checked, by name; these may be None."""


def check_options(**options: Any) -> None:
    """Refuses options of the wrong kind, whatever function they are given to.

    Raises:
        InvalidOperandError: names the first.
    """
    for name, value in options.items():
        if name in _REQUIRED:
            _REQUIRED[name](value, name)
        elif value is not None:
            _OPTIONAL[name](value, name)
