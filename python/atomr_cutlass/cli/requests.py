"""`explain`, `run` and `demo`: requests in words."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ..errors import DeviceUnavailableError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..jit import kernels
from ..pipeline import devices, table, verify
from ..pipeline import plan as plans
from ..pipeline.explanation import Explanation, explain
from ..pipeline.operand_table import Arrays
from ..pipeline.operation import Request, operation_of, request_from
from ..pipeline.request_options import RequestOptions
from ..pipeline.verify import RunResult
from .installed import gather, print_facts
from .options import AsJson, Jit, of_a_request
from .output import heading, line, print_json

BACKENDS = (*plans.BACKENDS, "reference")


@of_a_request(extent=4096)
def explain_command(request: Request, *, jit: Jit = "", as_json: AsJson = False) -> None:
    """Which kernel a request gets and why; where there is none, the nearest one and what would add it."""
    if request.arch is None and not devices.available():
        raise typer.BadParameter(f"needed, since there is no GPU ({devices.problem()})", param_hint="--arch")
    explanation = explain(request, jit=kernels.policy(jit) if jit else None)
    if as_json:
        print_json(explanation.to_dict())
    else:
        _print_explanation(explanation)


@of_a_request(extent=1024)
def run_command(
    request: Request,
    *,
    backend: Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}; auto: a GPU if there is one.")] = "auto",
    jit: Jit = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the random operands.")] = 0,
    as_json: AsJson = False,
) -> None:
    """One request on random operands: on a GPU timed and checked against the reference, which computes without one."""
    if backend not in BACKENDS:
        raise typer.BadParameter(f"unknown backend {backend!r}; valid: {', '.join(BACKENDS)}", param_hint="--backend")
    result = verify.run(
        request,
        backend=backend,
        jit=kernels.policy(jit) if jit else None,
        seed=seed,
        progress=functools.partial(_tracker, request),
    )
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(result)
    if result.ok is False:
        raise typer.Exit(1)


def demo_command(*, as_json: AsJson = False) -> None:
    """A tour of a minute, with or without a GPU: what is installed, some kernels, a choice explained, a few calls."""
    facts = gather()
    gemm = {"m": 1024, "n": 768, "k": 512, "layout": "rcr"}
    request = request_from("gemm", RequestOptions(0, gemm))
    explained = request if devices.available() else request_from("gemm", RequestOptions(0, gemm | {"arch": "90a"}))
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
        _print_explanation(explanation)
        headings = {
            "run": "That GEMM on random operands (atomr-cutlass run)",
            "fp8": "fp8 with a scale for each row and column (--dtype e4m3 --scaling vector)",
            "conv": "A convolution (--op conv2d_fprop --conv 2,28,28,32,64,3,3 --padding 1)",
        }
        for name, (result, refusal) in tried.items():
            heading(headings[name])
            if refusal:
                line(refusal)
            _print_result(result)
    if any(result.ok is False for result, _ in tried.values()):
        raise typer.Exit(1)


def _tried(request: Request, jit: str | None = None) -> tuple[RunResult, str]:
    """(the outcome of a request, the reason for using the reference although there is a GPU)."""
    try:
        return verify.run(request, jit=jit), ""
    except (KernelNotFoundError, DeviceUnavailableError, UnsupportedError) as error:
        return verify.run(request, backend="reference"), str(error)


@contextlib.contextmanager
def _tracker(request: Request) -> Iterator[verify.Track | None]:
    """A progress bar on a terminal, for loops of more than about two seconds."""
    if operation_of(request).products(request) < 1e10 or not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Computing", total=None)

        def bar(parts: Iterable[Arrays], count: int) -> Iterable[Arrays]:
            progress.update(task, description="The reference computes", total=count)
            return progress.track(parts, total=count, task_id=task)

        yield bar


def _print_explanation(explanation: Explanation) -> None:
    line(str(explanation))
    if len(explanation.candidates) > 1:
        line("candidates, by the model:")
        for name, microseconds in explanation.candidates:
            line(f"{microseconds:>12.1f} us  {name}")


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
