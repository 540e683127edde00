"""Options of commands: those of requests, which the operations declare, and what several commands have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from ..generator.archs import SmArch
from ..jit import kernels as jit_kernels
from ..pipeline.operation import planned_operations, request_from
from ..pipeline.request import COMMON, Option, RequestOptions

TARGETS = ", ".join(arch.target for arch in SmArch)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Jit = Annotated[
    str,
    typer.Option(
        "--jit",
        help=f"Where the table lacks the kernel: {', '.join(jit_kernels.POLICIES)}; "
        f"empty: what {jit_kernels.POLICY_VARIABLE} says, else auto.",
    ),
]


def of_a_request(extent: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of requests of every operation, from which its first argument is made.

    Args:
        extent: of every dimension that is not given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = request_options()

        def with_options(op: str, **given: Any) -> None:
            values = {name: given.pop(name) for name in options}
            command(request_from(op, RequestOptions(extent, values)), **given)

        names = list(planned_operations())
        op = Option("op", f"Operation: {', '.join(names)}.", names[0])
        hints = get_type_hints(command, include_extras=True)
        parameters = [
            *(_parameter(option, text) for option, text in [(op, op.help), *options.values()]),
            *(
                parameter.replace(annotation=hints[parameter.name])
                for parameter in list(inspect.signature(command).parameters.values())[1:]
            ),
        ]
        with_options.__doc__ = command.__doc__
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return with_options

    return decorate


def request_options() -> dict[str, tuple[Option, str]]:
    """The options of requests by name, each with its help: where it differs, that of each operation that has it."""
    options = {option.name: option for option in COMMON}
    texts: dict[str, dict[str, list[str]]] = {option.name: {option.help: []} for option in COMMON}
    for name, operation in planned_operations().items():
        for option in operation.options:
            options.setdefault(option.name, option)
            texts.setdefault(option.name, {}).setdefault(option.help, []).append(name)
    shown = {
        name: " ".join(f"Of {', '.join(ops)}: {text}" if ops else text for text, ops in by_text.items())
        for name, by_text in texts.items()
    }
    return {name: (option, shown[name]) for name, option in options.items()}


def _parameter(option: Option, text: str) -> inspect.Parameter:
    """A command's parameter."""
    kind, least = (int | None, option.least) if option.default is None else (type(option.default), None)
    flag = f"--{option.name.replace('_', '-')}"
    annotation = Annotated[kind, typer.Option(flag, min=least, help=text)]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)
