"""`explain`, `run`, `demo` and `tune`: commands for requests that are described by options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ..errors import DeviceUnavailableError, InvalidOperandError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..jit import kernels
from ..pipeline import devices, profiler_csv, table, tuning, verify
from ..pipeline import plan as plans
from ..pipeline.explanation import Explanation, explain
from ..pipeline.operation import Arrays, operation_of, planned_operations, request_from
from ..pipeline.pack_build import dask_cluster
from ..pipeline.probe import Track
from ..pipeline.request import COMMON, Option, Request, RequestOptions
from ..pipeline.tune import append, tune
from ..pipeline.verify import RunResult
from .installed import gather, print_facts
from .output import AsJson, complain, heading, line, print_json, report, track

BACKENDS = (*plans.BACKENDS, "reference")
EXTENT = 4096
"""The default extent of requests, if nothing is computed on the host."""

Jit = Annotated[
    str,
    typer.Option(
        "--jit",
        help=f"Where the table lacks the kernel: {', '.join(kernels.POLICIES)}; "
        f"empty: what {kernels.POLICY_VARIABLE} says, else auto.",
    ),
]


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


def _parameter(option: Option) -> inspect.Parameter:
    kind, least = (int | None, option.least) if option.default is None else (type(option.default), None)
    flag = f"--{option.name.replace('_', '-')}"
    annotation = Annotated[kind, typer.Option(flag, min=least, help=option.help)]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


@of_a_request
def explain_command(request: Request, *, jit: Jit = "", as_json: AsJson = False) -> None:
    """Explains the choice of kernel for a request; without a kernel, names the nearest one and the cure."""
    if request.arch is None and not devices.available():
        raise typer.BadParameter(f"needed, since there is no GPU ({devices.problem()})", param_hint="--arch")
    explanation = explain(request, jit=kernels.policy(jit) if jit else None)
    report(explanation.to_dict(), *_explained(explanation), as_json=as_json)


@functools.partial(of_a_request, extent=1024)
def run_command(
    request: Request,
    *,
    backend: Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}; auto: a GPU if there is one.")] = "auto",
    jit: Jit = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the random operands.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Computes a request on random operands: on a GPU, timed and checked against the reference, or by the reference."""
    if backend not in BACKENDS:
        raise typer.BadParameter(f"unknown backend {backend!r}; valid: {', '.join(BACKENDS)}", param_hint="--backend")
    policy = kernels.policy(jit) if jit else None
    result = verify.run(request, backend=backend, jit=policy, seed=seed, progress=_tracker(request))
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(result)
    if result.ok is False:
        raise typer.Exit(1)


def demo_command(*, as_json: AsJson = False) -> None:
    """A tour of a minute, with or without a GPU: the installation, some kernels, an explained choice, a few calls."""
    facts = gather()
    gemm = {"m": 1024, "n": 768, "k": 512, "layout": "rcr"}
    request = request_from("gemm", RequestOptions(0, gemm))
    explained = request if devices.available() else dataclasses.replace(request, arch=SmArch.SM90A)
    explanation = explain(explained)
    fp8 = request_from("gemm", RequestOptions(0, {"m": 128, "n": 192, "k": 256, "dtype": "e4m3", "scaling": "vector"}))
    conv = request_from("conv2d_fprop", RequestOptions(0, {"conv": "2,28,28,32,64,3,3", "padding": "1"}))
    tried = {"run": _tried(request), "fp8": _tried(fp8, jit="off"), "conv": _tried(conv, jit="off")}
    if as_json:
        results = {name: result.to_dict() for name, (result, _) in tried.items()}
        print_json({"info": facts, "explain": explanation.to_dict(), **results})
    else:
        heading("What is installed (atomr-cutlass info)")
        print_facts(facts)
        found = table.kernels()
        heading(f"Some of its {len(found)} kernels (atomr-cutlass list)")
        for info in found[:: max(1, len(found) // 4)][:4]:
            line(info.name)
        heading(f"Which of them multiplies {operation_of(request).describe(request)} bf16 (atomr-cutlass explain)")
        if explained is not request:
            line(f"Asked for {SmArch.SM90A.value}, since there is no GPU here:")
        for text in _explained(explanation):
            line(text)
        headings = (
            "That GEMM on random operands (atomr-cutlass run)",
            "fp8 with a scale for each row and column (--dtype e4m3 --scaling vector)",
            "A convolution (--op conv2d_fprop --conv 2,28,28,32,64,3,3 --padding 1)",
        )
        for text, (result, refusal) in zip(headings, tried.values(), strict=True):
            heading(text)
            if refusal:
                line(refusal)
            _print_result(result)
    if any(result.ok is False for result, _ in tried.values()):
        raise typer.Exit(1)


@of_a_request
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
    """Times every kernel for requests and records the fastest, for processes with ATOMR_CUTLASS_TUNED."""
    if from_csv is not None:
        records, left_out = profiler_csv.read(from_csv, gpu or None)
        append(out, records)
    else:
        requests, left_out = [request] if file is None else tuning.read_lines(file, _parsed_request), 0
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


def _tried(request: Request, jit: str | None = None) -> tuple[RunResult, str]:
    """(the outcome of a request, the reason if the reference computed it despite a GPU)."""
    try:
        return verify.run(request, jit=jit), ""
    except (KernelNotFoundError, DeviceUnavailableError, UnsupportedError) as error:
        return verify.run(request, backend="reference"), str(error)


@contextlib.contextmanager
def _tracker(request: Request) -> Iterator[Track]:
    """A progress bar on a terminal, for loops of more than about two seconds."""
    silent = operation_of(request).products(request) < 1e10 or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=silent) as progress:
        task = progress.add_task("Computing", total=None)

        def bar(parts: list[Arrays]) -> Iterable[Arrays]:
            progress.update(task, description="The reference computes", total=len(parts))
            return progress.track(parts, task_id=task)

        yield bar


def _explained(explanation: Explanation) -> list[str]:
    ranked = [f"{microseconds:>12.1f} us  {name}" for name, microseconds in explanation.candidates]
    return [str(explanation), *(["candidates, by the model:", *ranked] if len(ranked) > 1 else [])]


def _print_result(result: RunResult) -> None:
    request = result.request
    types = f"{request.dtype.value} -> {request.result_dtype.value}"
    if result.backend == "reference":
        line(f"{operation_of(request).describe(request)} {types}: computed by the NumPy reference ({result.reason})")
    else:
        line(f"{operation_of(request).describe(request)} {types}: computed by {result.device}")
        line(f"kernel {result.kernel} ({result.backend}, ready in {result.plan_seconds:.2f} s)")
    if result.rewrite:
        line(f"a rewrite: {result.rewrite}")
    if result.seconds is not None and result.tflops is not None:
        line(
            f"{result.seconds * 1e6:.1f} us a call, {result.tflops:.1f} TFLOP/s "
            f"(median over {result.launches} calls, back to back)"
        )
    if result.mismatches is None:
        line(f"nothing was compared: {result.elements} elements of the reference, which kernels are checked against")
    elif result.ok:
        line(f"right: {result.elements} elements agree with the reference; largest difference {result.max_error:.3g}")
    else:
        line(
            f"WRONG: {result.mismatches} of {result.elements} elements differ from the reference by more "
            f"than rounding; largest difference {result.max_error:.3g}",
            "bold red",
        )


def _devices(text: str) -> tuple[int, ...] | None:
    """The indexes that --device names; None for `all`."""
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
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
