"""The types of options' values: checked before options are compared, hashed or counted with.

Arrays, lists and objects compare element by element, or not at all: what is given where a name or a number belongs must
be refused by its type, by every function alike. Which names and numbers are valid is the functions' own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from .errors import InvalidOperandError
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.errors import expect, shown

__all__ = [
    "MOST", "NUMBERS", "check_extents", "check_index", "check_integer", "check_number", "check_options", "expect",
    "shown",
]  # fmt: skip

NUMBERS: Final = (int, float, np.integer, np.floating)
"""Types of scalars."""

MOST: Final = 2**31 - 1
"""The largest extent: kernels count rows and columns with 32 bits."""


def check_number(value: Any, name: str) -> None:
    """Refuses what is no number of a double's range. NaN and infinity are numbers."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise InvalidOperandError(f"{name} is a {type(value).__name__}; expected a number")
    try:
        float(value)
    except OverflowError:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected a number of a double's range") from None


def check_extents(shape: tuple[int, ...], name: str) -> None:
    """Refuses an array with more rows, columns or batches than kernels count."""
    if any(extent > MOST for extent in shape):
        raise InvalidOperandError(f"{name} has shape {shape}; kernels count to 2^31 - 1 in each dimension: split it")


def check_integer(value: Any, name: str, wanted: str, *, least: int = 0, most: int = 2**63 - 1) -> None:
    """Refuses what is no integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected {wanted}")


check_index: Final = functools.partial(check_integer, wanted="the index of a GPU", most=MOST)


_NAME: Final = functools.partial(expect, kind=str, wanted="a name")
_FLAG: Final = functools.partial(expect, kind=(bool, np.bool_), wanted="True or False")
_DTYPE: Final = functools.partial(expect, kind=CutlassDtype)

_KINDS: Final[Mapping[str, Callable[..., None]]] = {
    **dict.fromkeys(("activation", "backend", "filter", "jit", "layout", "op", "precision", "scaling"), _NAME),
    **dict.fromkeys(("batch_invariant", "bias", "bits", "check", "fast_accum", "mock"), _FLAG),
    **dict.fromkeys(("dtype", "out_dtype"), _DTYPE),
    **dict.fromkeys(("alpha", "beta"), check_number),
    "arch": functools.partial(expect, kind=SmArch, wanted="an SmArch"),
    "workspace_size": functools.partial(check_integer, wanted="bytes, or None for no limit"),
}
"""How options are checked, by name."""

_REQUIRED: Final = frozenset({
    "alpha", "backend", "beta", "bias", "bits", "dtype", "fast_accum", "layout", "mock", "scaling",
})  # fmt: skip
"""The options that are never None."""


def check_options(**options: Any) -> None:
    """Refuses options of the wrong kind, whatever function they are given to."""
    for name, value in options.items():
        if value is not None or name in _REQUIRED:
            _KINDS[name](value, name=name)
