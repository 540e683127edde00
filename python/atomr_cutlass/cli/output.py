"""Output of the commands, as JSON (`--json`) or as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import rich.progress
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def complain(message: str) -> None:
    """A line on standard error."""
    print(f"atomr-cutlass: {message}", file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """JSON on standard output, with paths as strings."""
    print(json.dumps(value, indent=1, default=str))


def report(value: dict[str, Any], *lines: str, as_json: bool) -> None:
    """Prints the outcome of a command, as JSON or as lines."""
    if as_json:
        print_json(value)
    else:
        for text in lines:
            line(text)


def track(items: Iterable[T], description: str, count: int | None = None, *, disable: bool = False) -> Iterable[T]:
    """The items, with a progress bar on standard error where that is a terminal."""
    console, disable = Console(stderr=True), disable or not sys.stderr.isatty()
    return rich.progress.track(items, description, count, console=console, transient=True, disable=disable)


def line(text: str, style: str = "") -> None:
    """A line on standard output."""
    # Names and commands must be fit to be copied: no wrapping, no markup in brackets.
    Console().print(Text(text, style), soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; long names are folded."""
    headers = (Column(name, overflow="fold" if name == "name" else "ellipsis") for name in columns)
    shown = Table(*headers, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*map(Text, row))
    Console().print(shown)


def heading(text: str) -> None:
    """A line in bold after an empty one."""
    print()
    line(text, "bold")


def size_text(count: int) -> str:
    """Bytes in a unit."""
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count / 2**10:.1f} KiB"
