"""`tune`: measures kernels for requests of options, files, suites and recorded calls."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidOperandError
from ..ops.gemm import suites
from ..pipeline import profiler_csv, recorded, tuning
from ..pipeline.operation import operation_of, planned_operations, request_from
from ..pipeline.pack_build import dask_cluster
from ..pipeline.request import Request, RequestOptions
from ..pipeline.tune import append, tune
from .options import EXTENT, flag, of_a_request, request_options
from .output import AsJson, complain, report, track

_SOURCES = {
    "suite": ("m", "n", "k"),
    **dict.fromkeys(("file", "keys", "from_csv"), ("op", *request_options())),
}
"""Where `tune` takes requests from instead of its options, and those of these options that it then has no use for."""


@of_a_request
def tune_command(
    request: Request,
    *,
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File that the records are added to.")],
    device: Annotated[str, typer.Option(help="Index of the GPU, several with commas, or all of the host.")] = "0",
    dask: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Tune on the GPUs of this Dask scheduler's workers, on `--device` of each."
        ),
    ] = "",
    csv: Annotated[
        Path | None, typer.Option(help="File for the records of plain GEMMs as cutlass_profiler's CSV too.")
    ] = None,
    from_csv: Annotated[
        Path | None, typer.Option(help="Add the fastest kernels of cutlass_profiler's CSV instead of tuning.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="Name of the model that --from-csv was measured on; empty: GPU 0's.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(help='Requests to tune: a JSON object of these options a line, such as {"op": "gemm", "m": 8}.'),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            metavar="MODELS",
            help="The GEMMs of linear layers of these models, comma-separated, with the other options for each: "
            f"{', '.join(suites.MODELS)}.",
        ),
    ] = "",
    rows: Annotated[
        str, typer.Option(help=f"Of --suite: values of M, comma-separated; empty: {','.join(map(str, suites.ROWS))}.")
    ] = "",
    layouts: Annotated[
        str, typer.Option(help="Of --suite: values of --layout, comma-separated; empty: that of --layout.")
    ] = "",
    keys: Annotated[
        Path | None, typer.Option(help="The calls of a run, of every operation: a file of keys, written by ac.record.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long kernels of one request are timed, about.")] = 5.0,
    compiled: Annotated[int, typer.Option(min=0, help="How many kernels that the table lacks are tried too.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Tune what the file has a record of, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Times every kernel for requests and records the fastest, for processes with ATOMR_CUTLASS_TUNED."""
    source = _source(context)
    if from_csv is not None:
        records, left_out = profiler_csv.read(from_csv, gpu or None)
        append(out, records)
    else:
        requests, left_out = [request], 0
        if file is not None:
            requests = tuning.read_lines(file, _parsed_request)
        elif keys is not None:
            requests = _recorded(keys)
        elif source == "suite":
            requests = _of_suite(request, suite, rows, layouts)
        with dask_cluster(dask) if dask else contextlib.nullcontext() as executor:
            records = tune(
                requests, out, device=_devices(device), executor=executor, seconds=seconds, compiled=compiled,
                again=again, progress=lambda requests, count: track(requests, "Tuning", count),
            )  # fmt: skip
    if csv is not None:
        written = profiler_csv.write(records, csv)
        if written < len(records):
            complain(f"{len(records) - written} records have no form in {csv}: they are no plain GEMMs")
    lines = [
        f"{record.microseconds:10.2f} us, {record.chosen_microseconds / record.microseconds:.2f} times the model's "
        f"choice, of {record.tried}: {record.key.name}"
        for record in records
    ]
    if left_out:
        lines.append(
            f"{left_out} rows were left out: failed or wrong ones, and kernels that are no cell of this package"
        )
    value = {"records": [json.loads(record.line()) for record in records], "left_out": left_out}
    report(value, *lines, as_json=as_json)


def _source(context: typer.Context) -> str | None:
    """The source of `tune` that was given; refuses a second one, and options that would not count."""

    def is_given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    given = [name for name in _SOURCES if is_given(name)]
    if len(given) > 1:
        raise typer.BadParameter(f"given beside {flag(given[1])}; give one of them", param_hint=flag(given[0]))
    (source,) = given or (None,)
    unused = [*(_SOURCES[source] if source else ()), *(("rows", "layouts") if source != "suite" else ())]
    for name in filter(is_given, unused):
        reason = f"not used with {flag(source)}" if source else f"only used with {flag('suite')}"
        raise typer.BadParameter(f"{reason}; leave it out", param_hint=flag(name))
    return source


def _of_suite(like: Request, suite: str, rows: str, layouts: str) -> list[Request]:
    """The requests of a suite, which differ from a given one in extents and layouts."""
    if operation_of(like).name != "gemm":
        raise typer.BadParameter("the suites are of GEMMs: leave --op out", param_hint="--suite")
    counts = _words(rows) or list(map(str, suites.ROWS))
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise typer.BadParameter(f"{rows!r}; expected whole numbers, comma-separated", param_hint="--rows")
    variants = [_laid_out(like, letters) for letters in _words(layouts)] or [like]
    models, numbers = _words(suite), list(map(int, counts))
    if not models:
        raise typer.BadParameter(f"it is empty; valid: {', '.join(suites.MODELS)}", param_hint="--suite")
    return [request for variant in variants for request in suites.suite_requests(models, variant, numbers)]


def _words(text: str) -> list[str]:
    """Comma-separated words; none of an empty text."""
    return [word.strip() for word in text.split(",")] if text else []


def _laid_out(like: Any, letters: str) -> Any:
    """The request of a GEMM with other layouts, as --layout takes them."""
    if not letters:
        raise typer.BadParameter("expected values of --layout, comma-separated", param_hint="--layouts")
    other: Any = request_from("gemm", RequestOptions(EXTENT, {"layout": letters}))
    layouts = {name: getattr(other, name) for name in ("layout_a", "layout_b", "layout_c")}
    return dataclasses.replace(like, **layouts)


def _recorded(path: Path) -> list[Request]:
    """The requests of recorded calls; says which calls have none."""
    found = recorded.read(path)
    for sentence in found.left_out:
        complain(sentence)
    if not found.requests:
        raise InvalidOperandError(f"{path} has no call that can be tuned")
    return found.requests


def _devices(text: str) -> tuple[int, ...] | None:
    """The indexes that --device names; None for `all`."""
    if text == "all":
        return None
    words = _words(text)
    if not words or not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}; expected indexes, comma-separated, or all", param_hint="--device")
    return tuple(map(int, words))


def _parsed_request(values: Any) -> Request:
    """The request that an object of a file describes."""
    if not isinstance(values, dict):
        raise InvalidOperandError("expected a JSON object")
    op, valid = values.pop("op", next(iter(planned_operations()))), request_options()
    for name, value in values.items():
        if name not in valid:
            raise InvalidOperandError(f"no option is called {name!r}; valid: op, {', '.join(valid)}")
        default = valid[name].default
        kind: Any = int if default is None else (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidOperandError(f"{name} is {json.dumps(value)}; expected a value such as its default")
    return request_from(op, RequestOptions(EXTENT, values))
