"""`explain`, `run` and `demo`: commands for requests that are described by options."""

from __future__ import annotations

import contextlib
import dataclasses
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
from ..pipeline.operation import Arrays, operation_of, request_from
from ..pipeline.probe import Track
from ..pipeline.request import Request, RequestOptions
from ..pipeline.verify import RunResult
from .installed import gather, print_facts
from .options import of_a_request
from .output import AsJson, heading, line, print_json, report

BACKENDS = (*plans.BACKENDS, "reference")

Jit = Annotated[
    str,
    typer.Option(
        "--jit",
        help=f"Where the table lacks the kernel: {', '.join(kernels.POLICIES)}; "
        f"empty: what {kernels.POLICY_VARIABLE} says, else auto.",
    ),
]


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
