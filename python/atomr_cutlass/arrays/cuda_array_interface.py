"""Checks of `__cuda_array_interface__`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InvalidOperandError
from ..generator.errors import shown

ADDRESSES = 2**64
EXTENTS = 2**63


def check(array: Any, interface: Any) -> None:
    """Refuses a `__cuda_array_interface__` whose fields violate the protocol.

    Raises:
        InvalidOperandError: names the field.
    """

    def refuse(found: str) -> InvalidOperandError:
        return InvalidOperandError(f"the __cuda_array_interface__ of a {type(array).__name__} has {found}")

    def sizes(name: str, least: int) -> None:
        given = interface[name]
        good = isinstance(given, (tuple, list)) and all(isinstance(extent, (int, np.integer)) for extent in given)
        if not good or not all(least <= extent < EXTENTS for extent in given):
            raise refuse(f"{name} {shown(given)}; expected a tuple of integers")

    if not isinstance(interface, Mapping):
        raise InvalidOperandError(
            f"the __cuda_array_interface__ of a {type(array).__name__} is {shown(interface)}; expected a dict"
        )
    missing = [name for name in ("shape", "typestr", "data") if name not in interface]
    if missing:
        raise refuse(f"no {missing[0]}")
    sizes("shape", 0)
    if interface.get("strides") is not None:
        sizes("strides", -EXTENTS)
    try:
        np.dtype(interface["typestr"] if isinstance(interface["typestr"], str) else "")
    except (TypeError, ValueError, SyntaxError):  # commas and parentheses are Python's to NumPy
        raise refuse(f"typestr {shown(interface['typestr'])}; expected one such as '<f4'") from None
    data = interface["data"]
    pointer = data[0] if isinstance(data, (tuple, list)) and len(data) == 2 else None
    if not isinstance(pointer, (int, np.integer)) or not 0 <= pointer < ADDRESSES:
        raise refuse(f"data {shown(data)}; expected (address, whether it is read-only)")
    if pointer == 0 and 0 not in interface["shape"]:
        raise refuse(f"no memory for the elements of {shown(interface['shape'])}: its address is 0")
    stream = interface.get("stream")
    if stream is not None and (not isinstance(stream, (int, np.integer)) or not 0 <= stream < ADDRESSES):
        raise refuse(f"stream {shown(stream)}; expected a handle")
