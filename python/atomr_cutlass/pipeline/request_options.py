"""Requests in words: the options of the command line's `run` and `explain`, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import InvalidOperandError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.ops import ACTIVATIONS

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """An option of requests.

    Attributes:
        name: a Python name; on the command line `--` and dashes.
        help: a sentence.
        default: of its kind; None is an integer that is not given.
        least: of an integer.
    """

    name: str
    help: str
    default: str | float | bool | None = ""
    least: int = 1

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"


COMMON = (
    Option("dtype", f"Element type of the operands: {', '.join(d.value for d in CutlassDtype)}.", "bf16"),
    Option("arch", f"Target: {', '.join(arch.target for arch in SmArch)}; empty: the GPU's own."),
    Option("out_dtype", "Element type of the result; empty: the operands', or i32 for i8, bf16 for fp8, fp4."),
    Option("alpha", "Factor of the product.", 1.0),
    Option("beta", "Factor of C; 0: there is no C.", 0.0),
    Option("bias", "Add a bias: one for each column, of convolutions channel, of D.", default=False),
    Option("activation", f"After it: {', '.join(ACTIVATIONS)}; empty: none."),
)
"""Options of every operation."""


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request.

    Attributes:
        extent: of every dimension that is not given.
        values: by name; options that were not given have their defaults, or are left out.
    """

    extent: int
    values: Mapping[str, Any]

    def given(self, name: str) -> Any:
        """The value of an option, or None where it was not given."""
        value = self.values.get(name)
        return None if value in ("", False) else value

    def flag(self, name: str) -> bool:
        """Whether an option without a value was given."""
        return bool(self.given(name))

    def size(self, name: str) -> int:
        """An extent."""
        value = self.given(name)
        return self.extent if value is None else int(value)

    def number(self, name: str, default: float) -> float:
        """A scalar, which may be 0."""
        value = self.values.get(name)
        return default if value is None else float(value)

    def numbers(self, name: str, default: str, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Whole numbers, as many as one of the counts says.

        Raises:
            InvalidOperandError: the option says something else.
        """
        text = self.given(name) or default
        words = text.split(",")
        if len(words) not in counts or not all(re.fullmatch(r"\s*\d+\s*", word) for word in words):
            wanted = " or ".join(map(str, counts))
            raise InvalidOperandError(f"--{name} is {text!r}; expected {wanted} whole numbers, comma-separated")
        return tuple(map(int, words))

    def element_type(self, name: str) -> CutlassDtype | None:
        """An element type, or None.

        Raises:
            InvalidOperandError: there is no such type.
        """
        return self._parsed(CutlassDtype.parse, name)

    @property
    def dtype(self) -> CutlassDtype:
        """The element type of the operands.

        Raises:
            InvalidOperandError: there is no such type, or none is given.
        """
        if self.values.get("dtype") == "":
            raise InvalidOperandError("--dtype is empty")
        return self.element_type("dtype") or CutlassDtype.BF16

    @property
    def arch(self) -> SmArch | None:
        """The target.

        Raises:
            InvalidOperandError: there is no such target.
        """
        return self._parsed(SmArch.parse, "arch")

    def _parsed(self, parse: Callable[[str], T], name: str) -> T | None:
        text = self.given(name)
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise InvalidOperandError(f"--{name.replace('_', '-')}: {error}") from error
