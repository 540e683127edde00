"""The errors of bad input, which the package shares, and the text by which they show a given value."""

from __future__ import annotations

import enum
from typing import Any

_LONGEST = 200
_MOST_BITS = 256
_MOST = 9
_DEEPEST = 3


class CutlassError(Exception):
    """Base of every error that the package raises on purpose."""


class InvalidOperandError(CutlassError, ValueError):
    """An operand has the wrong rank, shape, dtype, strides, device or alignment, or an argument is of another kind."""


def shown(value: Any, _depth: int = 0) -> str:
    """A value for messages: a short value itself, any other by its type."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    if type(value) in (tuple, list) and _depth < _DEEPEST:
        inner = ", ".join([*(shown(item, _depth + 1) for item in value[:_MOST]), *(["..."] if value[_MOST:] else [])])
        alone = "," if type(value) is tuple and len(value) == 1 else ""
        return f"({inner}{alone})" if type(value) is tuple else f"[{inner}]"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"a {type(value).__name__}"


def expect(value: Any, kind: type | tuple[type, ...], name: str, wanted: str = "") -> None:
    """Refuses a value of another type, before it is compared or hashed.

    Args:
        value: the argument.
        kind: the type it must be an instance of; a bool is no number.
        name: of the argument.
        wanted: the expected value, in words; empty for the name of the kind.

    Raises:
        InvalidOperandError: names the argument, the value and the kind.
    """
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
        return
    if not wanted:
        names = [type_.__name__ for type_ in (kind if isinstance(kind, tuple) else (kind,))]
        wanted = f"{'an' if names[0][0] in 'aeiouAEIOU' else 'a'} {' or '.join(names)}"
    raise InvalidOperandError(f"{name} is {shown(value)}; expected {wanted}")
