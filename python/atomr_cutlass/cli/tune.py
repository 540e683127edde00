"""`tune`: measures which kernels are fastest for requests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidOperandError
from ..pipeline import profiler_csv
from ..pipeline.operation import Request, request_from
from ..pipeline.pack_build import dask_cluster
from ..pipeline.request_options import RequestOptions
from ..pipeline.tune import import_csv, tune
from .options import AsJson, of_a_request, request_options
from .output import complain, report, track

EXTENT = 4096


@of_a_request(extent=EXTENT)
def tune_command(
    request: Request,
    *,
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
    seconds: Annotated[float, typer.Option(min=0.0, help="How long kernels of one request are timed, about.")] = 5.0,
    compiled: Annotated[int, typer.Option(min=0, help="How many kernels that the table lacks are tried too.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Tune what the file has a record of, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Times every kernel for requests and keeps which is fastest, for processes with ATOMR_CUTLASS_TUNED to follow."""
    if from_csv is not None:
        records, left_out = import_csv(from_csv, out, gpu=gpu or None)
    else:
        requests, left_out = [request] if file is None else list(_requests(file)), 0
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


def _devices(text: str) -> tuple[int, ...] | None:
    """The indexes that --device names; None of `all`."""
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}; expected indexes, comma-separated, or all", param_hint="--device")
    return tuple(map(int, words))


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
