"""Enumerations whose lookup by value raises the package's error for bad input."""

from __future__ import annotations

import enum
from typing import Any

from .errors import InvalidOperandError, shown


class Members(enum.EnumMeta):
    """The metaclass of the package's enumerations, whose values are all names."""

    def __call__(cls, value: Any, *args: Any, **named: Any) -> Any:
        """The member of a value.

        Raises:
            InvalidOperandError: there is none; names the valid ones.
        """
        if not args and not named and not isinstance(value, (str, cls)):
            raise InvalidOperandError(f"{cls.__name__} is given {shown(value)}; valid: {cls._valid()}")
        try:
            return super().__call__(value, *args, **named)
        except ValueError:
            raise InvalidOperandError(f"{cls.__name__} has no {shown(value)}; valid: {cls._valid()}") from None

    def _valid(cls) -> str:
        members: dict[str, Any] = dict(cls.__members__)
        return ", ".join(repr(member.value) for member in members.values())
