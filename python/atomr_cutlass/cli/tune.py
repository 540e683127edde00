"""`tune`: measures which kernels are fastest for requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from ..errors import InvalidOperandError
from ..pipeline.operation import Request, request_from
from ..pipeline.request_options import RequestOptions
from ..pipeline.tune import tune
from .options import AsJson, of_a_request, request_options
from .output import line, print_json

EXTENT = 4096


@of_a_request(extent=EXTENT)
def tune_command(
    request: Request,
    *,
    out: Annotated[Path, typer.Option(help="File that the records are added to.")],
    file: Annotated[
        Path | None,
        typer.Option(help='Requests to tune: a JSON object of these options a line, such as {"op": "gemm", "m": 8}.'),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long kernels of one request are timed, about.")] = 5.0,
    compiled: Annotated[int, typer.Option(min=0, help="How many kernels that the table lacks are tried too.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Tune what the file has a record of, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Times every kernel for requests and keeps which is fastest, for processes with ATOMR_CUTLASS_TUNED to follow."""
    requests = [request] if file is None else list(_requests(file))
    records = tune(requests, out, seconds=seconds, compiled=compiled, again=again, progress=_progress)
    if as_json:
        print_json({"records": [json.loads(record.line()) for record in records]})
        return
    for record in records:
        gain = record.chosen_microseconds / record.microseconds
        line(
            f"{record.microseconds:10.2f} us, {gain:.2f} times the model's choice, of {record.tried}: {record.key.name}"
        )


def _progress(requests: Iterable[Any], count: int) -> Iterable[Any]:
    return track(
        requests, "Tuning", count, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def _requests(path: Path) -> Iterator[Request]:
    """The requests of a file.

    Raises:
        InvalidOperandError: it cannot be read, or a line is no request; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOperandError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    valid = request_options()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise InvalidOperandError("expected a JSON object")
            op = values.pop("op", "gemm")
            for name, value in values.items():
                if name not in valid:
                    raise InvalidOperandError(f"no option is called {name!r}; valid: op, {', '.join(valid)}")
                default = valid[name][0].default
                kind: Any = int if default is None else (int, float) if isinstance(default, float) else type(default)
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    raise InvalidOperandError(f"{name} is {json.dumps(value)}; expected a value such as its default")
            yield request_from(op, RequestOptions(EXTENT, values))
        except (ValueError, RecursionError) as error:
            raise InvalidOperandError(f"{path}:{number}: {error}") from error
