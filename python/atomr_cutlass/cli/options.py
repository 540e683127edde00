"""Options of commands for the requests of all operations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..pipeline.operation import planned_operations, request_from
from ..pipeline.request import COMMON, Option, RequestOptions

EXTENT = 4096
"""The default extent of requests, if nothing is computed on the host."""


def of_a_request(command: Callable[..., None], extent: int = EXTENT) -> Callable[..., None]:
    """The command with the options of requests of all operations; its first argument is the request made of them.

    Dimensions that are not given have this extent.
    """
    options, names = request_options(), list(planned_operations())

    def with_options(op: str, **given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        command(request_from(op, RequestOptions(extent, values)), **given)

    op = Option("op", f"Operation: {', '.join(names)}.", names[0])
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*map(_parameter, (op, *options.values())), *own]
    with_options.__doc__ = command.__doc__
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options


@functools.cache
def request_options() -> dict[str, Option]:
    """The options of requests by name; if operations explain an option differently, its help has each text."""
    options = {option.name: option for option in COMMON}
    texts: dict[str, dict[str, list[str]]] = {option.name: {option.help: []} for option in COMMON}
    for name, operation in planned_operations().items():
        for option in operation.options:
            options.setdefault(option.name, option)
            texts.setdefault(option.name, {}).setdefault(option.help, []).append(name)
    for name, by_text in texts.items():
        said = (f"Of {', '.join(ops)}: {text}" if ops else text for text, ops in by_text.items())
        options[name] = dataclasses.replace(options[name], help=" ".join(said))
    return options


def flag(name: str) -> str:
    """The option of a parameter."""
    return f"--{name.replace('_', '-')}"


def _parameter(option: Option) -> inspect.Parameter:
    kind, least = (int | None, option.least) if option.default is None else (type(option.default), None)
    annotation = Annotated[kind, typer.Option(flag(option.name), min=least, help=option.help)]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)
