"""The command line `atomr-cutlass`: what is installed, which kernel a request gets, and one request to see it work.

Exit status: 0, 1 when something failed, 2 when the usage or an input is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core
from rich.console import Console
from rich.progress import Progress
from rich.progress import track as rich_track
from rich.table import Table
from rich.text import Text

from ..arrays.numerics import PRECISIONS
from ..errors import CutlassError, DeviceUnavailableError, InvalidOperandError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.matrix import OPS
from ..jit import kernels as jit_kernels
from ..jit.store import KernelStore
from ..ops.conv2d.request import ConvFwdRequest, ConvShape
from ..ops.gemm.function import BACKENDS
from ..ops.gemm.request import GemmLayout, GemmRequest, GemmShape
from ..pipeline import devices, table
from ..pipeline import verify as trial
from ..pipeline.explanation import Explanation, explain
from ..pipeline.operation import Request, operation_of
from ..pipeline.probe import Arrays
from ..pipeline.table import KernelInfo
from ..pipeline.verification import verification
from ..pipeline.verify import RunResult
from ..reference import ACTIVATIONS
from . import info as installation
from . import options as asked
from .info import Info
from .options import Asked

T = TypeVar("T")


class _Commands(typer.core.TyperGroup):
    """Turns the package's errors into one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CutlassError as error:
            _complain(str(error))
            raise typer.Exit(2 if isinstance(error, InvalidOperandError) else 1) from error
        except MemoryError as error:
            _complain("the operands do not fit into memory")
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    help="CUTLASS kernels as a Python package.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

cache_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache_app, name="cache", help="The kernels that were compiled at run time and are kept on disk.")

_TARGETS = ", ".join(arch.target for arch in SmArch)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Op = Annotated[str, typer.Option(help=f"Operation: {', '.join(asked.OPS)}.")]
Rows = Annotated[int | None, typer.Option("--m", min=1, help="Rows of A and D.")]
Columns = Annotated[int | None, typer.Option("--n", min=1, help="Columns of B and D.")]
Depth = Annotated[int | None, typer.Option("--k", min=1, help="Columns of A, rows of B.")]
Batch = Annotated[int | None, typer.Option(min=1, help="How many products.")]
Groups = Annotated[
    str,
    typer.Option(
        help="Of grouped_gemm: MxNxK of each group, such as 128x512x256,0x512x256. "
        "Of a convolution: parts that channels are divided into."
    ),
]
Conv = Annotated[str, typer.Option(help="Extents of a convolution: n,h,w,c,k,r,s.")]
Stride = Annotated[str, typer.Option(help="Of a convolution: one number, or rows,columns.")]
Padding = Annotated[str, typer.Option(help="Of a convolution: one number; rows,columns; or top,bottom,left,right.")]
Dilation = Annotated[str, typer.Option(help="Of a convolution: one number, or rows,columns.")]
Dtype = Annotated[str, typer.Option(help=f"Element type of A and B: {', '.join(d.value for d in CutlassDtype)}.")]
DtypeB = Annotated[str, typer.Option("--dtype-b", help="Element type of B where it is another: fp8 may be mixed.")]
Arch = Annotated[str, typer.Option(help=f"Target: {_TARGETS}; empty: the GPU's own.")]
Layout = Annotated[
    str,
    typer.Option(
        help="Layouts of A, B and D: r (row-major) or c (column-major) each; empty: rrr, for 8 bits and less rcr. "
        "Of a convolution: nhwc or nchw."
    ),
]
OutDtype = Annotated[str, typer.Option(help="Element type of D; empty: A's, or i32 for i8, bf16 for fp8, fp4.")]
Precision = Annotated[str, typer.Option(help=f"For f32 operands: {', '.join(PRECISIONS)}.")]
FastAccum = Annotated[
    bool, typer.Option("--fast-accum", help="Let fp8 products be added up in the tensor cores alone.")
]
Scaling = Annotated[str, typer.Option(help="Of a GEMM: fp8 scales: tensor, vector or block; fp4's: nvfp4, mxfp4.")]
Quantized = Annotated[bool, typer.Option("--quantized", help="Of a GEMM: scale_d and amax as arrays.")]
Alpha = Annotated[float, typer.Option(help="Factor of the product.")]
Beta = Annotated[float, typer.Option(help="Factor of C; 0: there is no C.")]
Bias = Annotated[bool, typer.Option("--bias", help="Add a bias: one for each column, of convolutions channel, of D.")]
Activation = Annotated[str, typer.Option(help=f"After it: {', '.join(ACTIVATIONS)}; empty: none.")]
Jit = Annotated[
    str,
    typer.Option(
        "--jit",
        help=f"Where the table lacks the kernel: {', '.join(jit_kernels.POLICIES)}; "
        f"empty: what {jit_kernels.POLICY_VARIABLE} says, else auto.",
    ),
]


@app.command("info")
def info_command(*, as_json: AsJson = False) -> None:
    """GPUs, driver, compilers, headers, kernel cache, packs and kernels; what is missing, with the cure."""
    facts = installation.gather()
    if as_json:
        _print_json(facts.to_dict())
        return
    _print_facts(facts)
    _print_missing(facts)


@app.command("list")
def list_command(
    *,
    op: Annotated[str, typer.Option(help=f"Only this operation: {', '.join(OPS)}.")] = "",
    dtype: Annotated[str, typer.Option(help="Only this element type of A; tf32: f32 multiplied in TF32.")] = "",
    arch: Annotated[str, typer.Option(help=f"Only kernels compiled for this target: {_TARGETS}.")] = "",
    name_filter: Annotated[
        str, typer.Option("--filter", help="Only matching names: * between substrings, alternatives comma-separated.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """The kernel table, packs included: a table on a terminal, otherwise one name a line."""
    if op and op not in OPS:
        raise typer.BadParameter(f"unknown op {op!r}; valid: {', '.join(OPS)}", param_hint="--op")
    found = table.kernels(
        op=op or None,
        dtype=_dtype(dtype, "--dtype"),
        arch=_arch(arch),
        filter=name_filter or None,
    )
    if as_json:
        _print_json({"kernels": [_with_verification(info) for info in found]})
    elif sys.stdout.isatty():
        _print_kernels(found)
    else:
        for info in found:
            print(info.name)
    if not found and not as_json:
        if table.kernels():
            _complain("no kernel of the table matches")
        else:
            _complain(f"the table is empty; to fill it: {installation.build_command('default', '80;90a')}")


def _with_verification(info: KernelInfo) -> dict[str, Any]:
    return {**info.to_dict(), "verified": verification(info.key, info).to_dict()}


@app.command("explain")
def explain_command(
    *,
    op: Op = asked.GEMM,
    m: Rows = None,
    n: Columns = None,
    k: Depth = None,
    batch: Batch = None,
    groups: Groups = "",
    conv: Conv = "",
    stride: Stride = "",
    padding: Padding = "",
    dilation: Dilation = "",
    dtype: Dtype = "bf16",
    dtype_b: DtypeB = "",
    arch: Arch = "",
    layout: Layout = "",
    out_dtype: OutDtype = "",
    precision: Precision = "",
    fast_accum: FastAccum = False,
    scaling: Scaling = "",
    quantized: Quantized = False,
    alpha: Alpha = 1.0,
    beta: Beta = 0.0,
    bias: Bias = False,
    activation: Activation = "",
    jit: Jit = "",
    as_json: AsJson = False,
) -> None:
    """Which kernel a request gets and why; where there is none, the nearest one and what would add it."""
    request = Asked(
        op=op, extent=4096, m=m, n=n, k=k, batch=batch, groups=groups, conv=conv, stride=stride, padding=padding,
        dilation=dilation, dtype=dtype, dtype_b=dtype_b, arch=arch, layout=layout, out_dtype=out_dtype,
        precision=precision, fast_accum=fast_accum, scaling=scaling, quantized=quantized, alpha=alpha, beta=beta,
        bias=bias, activation=activation,
    ).request()  # fmt: skip
    if request.arch is None and not devices.available():
        raise typer.BadParameter(f"needed, since there is no GPU ({devices.problem()})", param_hint="--arch")
    explanation = explain(request, jit=_jit(jit))
    if as_json:
        _print_json(explanation.to_dict())
    else:
        _print_explanation(explanation)


@app.command("run")
def run_command(
    *,
    op: Op = asked.GEMM,
    m: Rows = None,
    n: Columns = None,
    k: Depth = None,
    batch: Batch = None,
    groups: Groups = "",
    conv: Conv = "",
    stride: Stride = "",
    padding: Padding = "",
    dilation: Dilation = "",
    dtype: Dtype = "bf16",
    dtype_b: DtypeB = "",
    arch: Arch = "",
    layout: Layout = "",
    out_dtype: OutDtype = "",
    precision: Precision = "",
    fast_accum: FastAccum = False,
    scaling: Scaling = "",
    quantized: Quantized = False,
    alpha: Alpha = 1.0,
    beta: Beta = 0.0,
    bias: Bias = False,
    activation: Activation = "",
    backend: Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}; auto: a GPU if there is one.")] = "auto",
    jit: Jit = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the random operands.")] = 0,
    as_json: AsJson = False,
) -> None:
    """One request on random operands: on a GPU timed and checked against the reference, which computes without one."""
    if backend not in BACKENDS:
        raise typer.BadParameter(f"unknown backend {backend!r}; valid: {', '.join(BACKENDS)}", param_hint="--backend")
    request = Asked(
        op=op, extent=1024, m=m, n=n, k=k, batch=batch, groups=groups, conv=conv, stride=stride, padding=padding,
        dilation=dilation, dtype=dtype, dtype_b=dtype_b, arch=arch, layout=layout, out_dtype=out_dtype,
        precision=precision, fast_accum=fast_accum, scaling=scaling, quantized=quantized, alpha=alpha, beta=beta,
        bias=bias, activation=activation,
    ).request()  # fmt: skip
    result = trial.run(
        request, backend=backend, jit=_jit(jit), seed=seed, progress=functools.partial(_tracker, request)
    )
    if as_json:
        _print_json(result.to_dict())
    else:
        _print_trial(result)
    if result.ok is False:
        raise typer.Exit(1)


@app.command("demo")
def demo_command(*, as_json: AsJson = False) -> None:
    """A tour of a minute, with or without a GPU: what is installed, some kernels, a choice explained, a few calls."""
    facts = installation.gather()
    request = GemmRequest(GemmShape(1024, 768, 512), dtype=CutlassDtype.BF16, layout_b=GemmLayout.COL_MAJOR)
    explained = request if devices.available() else dataclasses.replace(request, arch=SmArch.SM90A)
    explanation = explain(explained)
    fp8 = GemmRequest(
        GemmShape(128, 192, 256), dtype=CutlassDtype.F8E4M3, layout_b=GemmLayout.COL_MAJOR, scaling="vector"
    )
    conv = ConvFwdRequest(ConvShape.nhwc(2, 28, 28, 32, 64, 3, 3, padding=1), dtype=CutlassDtype.BF16)
    tried = {"run": _tried(request), "fp8": _tried(fp8, jit="off"), "conv": _tried(conv, jit="off")}
    if as_json:
        results = {name: result.to_dict() for name, (result, _) in tried.items()}
        _print_json({"info": facts.to_dict(), "explain": explanation.to_dict(), **results})
    else:
        _heading("What is installed (atomr-cutlass info)")
        _print_facts(facts)
        kernels = table.kernels()
        _heading(f"Some of its {len(kernels)} kernels (atomr-cutlass list)")
        for info in kernels[:: max(1, len(kernels) // 4)][:4]:
            _line(info.name)
        _heading(f"Which of them multiplies {operation_of(request).describe(request)} bf16 (atomr-cutlass explain)")
        if explained is not request:
            _line(f"Asked for {SmArch.SM90A.value}, since there is no GPU here:")
        _print_explanation(explanation)
        headings = {
            "run": "That GEMM on random operands (atomr-cutlass run)",
            "fp8": "fp8 with a scale for each row and column (--dtype e4m3 --scaling vector)",
            "conv": "A convolution (--op conv2d_fprop --conv 2,28,28,32,64,3,3 --padding 1)",
        }
        for name, (result, refusal) in tried.items():
            _heading(headings[name])
            if refusal:
                _line(refusal)
            _print_trial(result)
    if any(result.ok is False for result, _ in tried.values()):
        raise typer.Exit(1)


def _tried(request: Request, jit: str | None = None) -> tuple[RunResult, str]:
    """(what came of a request, why on the reference where a GPU was to be had)."""
    try:
        return trial.run(request, jit=jit), ""
    except (KernelNotFoundError, DeviceUnavailableError, UnsupportedError) as error:
        return trial.run(request, backend="reference"), str(error)


@cache_app.command("list")
def cache_list_command(*, as_json: AsJson = False) -> None:
    """What is in the cache: name, target, size, age, seconds to compile; tab-separated where there is no terminal."""
    store = KernelStore()
    entries = store.entries()
    now = time.time()
    if as_json:
        rows = [
            {
                **entry.info,
                "digest": entry.digest,
                "bytes": entry.size,
                "age_seconds": max(0.0, now - entry.made),
                "compile_seconds": entry.seconds,
                "path": str(entry.path),
            }
            for entry in entries
        ]
        _print_json({"folder": str(store.folder), "max_bytes": store.max_bytes, "entries": rows})
        return
    shown = Table("name", "target", "size", "age", "compiled in", box=None, pad_edge=False)
    shown.columns[0].overflow = "fold"
    for entry in entries:
        name, target = str(entry.info.get("name", entry.digest)), str(entry.info.get("target", ""))
        row = (name, target, _size(entry.size), _duration(now - entry.made), f"{entry.seconds:.1f} s")
        if sys.stdout.isatty():
            shown.add_row(*map(Text, row))
        else:
            print("\t".join(row))
    total = f"{len(entries)} kernels, {_size(sum(entry.size for entry in entries))} in {store.folder}"
    if not entries:
        _complain(f"there is no kernel in {store.folder}")
    elif sys.stdout.isatty():
        Console().print(shown)
        _line(total)


@cache_app.command("verify")
def cache_verify_command(*, as_json: AsJson = False) -> None:
    """Checks every checksum, moves what is damaged or unsafe to the quarantine, and ends with 1 if there was any."""
    store = KernelStore()
    found = store.verify(_track_files)
    if as_json:
        damaged = [
            {
                "path": str(damage.path),
                "reason": damage.reason,
                "moved_to": str(damage.moved_to) if damage.moved_to else None,
            }
            for damage in found.damaged
        ]
        _print_json({"folder": str(store.folder), "checked": found.checked, "damaged": damaged})
    else:
        for damage in found.damaged:
            where = f"moved to {damage.moved_to}" if damage.moved_to else "it could not be moved; remove it"
            _line(f"{damage.path} {damage.reason}: {where}")
        _line(f"{found.checked} kernels in {store.folder}, {len(found.damaged)} of them damaged")
    if found.damaged:
        raise typer.Exit(1)


@cache_app.command("prune")
def cache_prune_command(
    *,
    max_size: Annotated[str, typer.Option(help="So much may stay, such as 500M or 2G; the unread go first.")] = "",
    older_than: Annotated[str, typer.Option(help="What has not been read for so long goes: 12h, 30d, 8w.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every kernel goes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Removes kernels; without options those above the cache's limit. Leftovers of dead processes go in any case."""
    sizes = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    times = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
    limit = _amount(max_size, sizes, "--max-size", "a size such as 500M or 2G (units K, M, G, T)")
    age = _amount(older_than, times, "--older-than", "a time such as 12h or 30d (units s, m, h, d, w)")
    store = KernelStore()
    done = store.prune(max_bytes=None if limit is None else int(limit), older_than=age, everything=everything)
    if as_json:
        _print_json({"folder": str(store.folder), **dataclasses.asdict(done)})
    else:
        _line(
            f"{done.removed} kernels removed ({_size(done.removed_bytes)}), "
            f"{done.kept} kept ({_size(done.kept_bytes)}) in {store.folder}"
        )


def _amount(text: str, units: dict[str, int], option: str, expected: str) -> float | None:
    if not text:
        return None
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]?)", text)
    if number is None or number[2] not in units:
        raise typer.BadParameter(f"{text!r} is not {expected}", param_hint=option)
    return float(number[1]) * units[number[2]]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count / 2**10:.1f} KiB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _track_files(paths: list[Path]) -> Iterable[Path]:
    # A thousand kernels are a gigabyte, which takes seconds.
    if len(paths) < 500 or not sys.stderr.isatty():
        return paths
    return rich_track(paths, "Checking", console=Console(stderr=True), transient=True)


def _dtype(text: str, option: str) -> CutlassDtype | None:
    return _parsed(CutlassDtype.parse, text, option) if text else None


def _arch(text: str) -> SmArch | None:
    return _parsed(SmArch.parse, text, "--arch") if text else None


def _jit(text: str) -> str | None:
    if text and text not in jit_kernels.POLICIES:
        raise typer.BadParameter(f"{text!r}; valid: {', '.join(jit_kernels.POLICIES)}", param_hint="--jit")
    return text or None


def _parsed(parse: Callable[[str], T], text: str, option: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextlib.contextmanager
def _tracker(request: Request) -> Iterator[trial.Track | None]:
    """A progress bar on a terminal, for what takes more than about two seconds."""
    if operation_of(request).products(request) < 1e10 or not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Computing", total=None)

        def bar(parts: Iterable[Arrays], count: int) -> Iterable[Arrays]:
            progress.update(task, description="The reference computes", total=count)
            return progress.track(parts, total=count, task_id=task)

        yield bar


def _complain(message: str) -> None:
    print(f"atomr-cutlass: {message}", file=sys.stderr)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))


def _line(text: str, style: str = "") -> None:
    # Names and commands are to be copied: no wrapping, and brackets are no markup.
    Console().print(Text(text, style), soft_wrap=True)


def _heading(text: str) -> None:
    print()
    _line(text, "bold")


def _print_facts(facts: Info) -> None:
    lines = [("package", f"{facts.version}, Python {facts.python}"), ("driver", facts.driver)]
    for gpu in facts.gpus:
        device = gpu.device
        arch = device.arch.value if device.arch else f"compute capability {device.capability}, no target for it"
        size = f"{device.multiprocessors} multiprocessors, {device.memory_bytes / 2**30:.0f} GiB"
        lines.append((f"GPU {device.index}", f"{device.name} ({arch}), {size}; {gpu.kernels} kernels run on it"))
    for name, tool in (("nvcc", facts.nvcc), ("cuda-core", facts.cuda_core), ("NVRTC", facts.nvrtc)):
        lines.append((name, f"{tool.version} ({tool.where})" if tool else "none"))
    for name, tool in (("CUTLASS", facts.headers), ("CCCL", facts.cuda_headers)):
        lines.append(("headers", f"{name} {tool.version} ({tool.where})" if tool else f"{name}: none"))
    lines += _jit_lines(facts.jit)
    packs = ", ".join(f"{name} ({count} kernels)" for name, count in facts.packs.items())
    lines.append(("packs", packs or "none"))
    lines.append(("table", f"{sum(facts.table.values())} kernels"))
    for op in dict.fromkeys(op for op, _, _ in facts.table):
        found = ((generation, arch, count) for (one, generation, arch), count in facts.table.items() if one == op)
        lines.append(
            ("", f"{op}: " + ", ".join(f"{count} {generation} for {arch}" for generation, arch, count in found))
        )
    for name, text in lines:
        _line(f"{name:<11}{text}")


def _jit_lines(jit: installation.Jit) -> list[tuple[str, str]]:
    does = {
        "auto": "auto: kernels that the table lacks are compiled",
        "background": "background: better kernels than the table's are compiled while its own serve",
        "off": "off: nothing is compiled",
        None: f"refused: {jit_kernels.POLICY_VARIABLE} names no policy",
    }[jit.policy]
    cache = jit.cache
    kept = f"{cache.kernels} kernels, {_size(cache.size)} of at most {_size(cache.max_size)}, in {cache.folder}"
    lines = [("JIT", f"{does}; but {jit.problem}" if jit.problem and jit.policy != "off" else does)]
    if jit.headers:
        lines.append(("digests", ", ".join(f"{name} {digest[:12]}" for name, digest in jit.headers.items())))
    lines.append(("cache", f"not used: {cache.problem}" if cache.problem else kept))
    if jit.miss_log:
        lines.append(("misses", f"recorded in {jit.miss_log}"))
    return lines


def _print_missing(facts: Info) -> None:
    if not facts.missing:
        return
    _heading("Missing")
    for missing in facts.missing:
        _line(f"{missing.what}\n    for:  {missing.for_}\n    cure: {missing.cure}")


def _print_kernels(kernels: list[KernelInfo]) -> None:
    shown = Table(
        "op", "arch", "A x B -> D", "layouts", "align", "tile", "cluster", "pack", "verified", "name",
        box=None, pad_edge=False,
    )  # fmt: skip
    shown.columns[-1].overflow = "fold"
    for info in kernels:
        key = info.key
        math = "" if key.math == "default" else f" ({key.math})"
        shown.add_row(
            key.arch.value + (" + PTX" if info.ptx else ""),
            f"{key.a.value} x {key.b.value} -> {key.d.value}{math}",
            key.layout_a + key.layout_b + key.layout_d,
            f"{key.align_a},{key.align_b},{key.align_d}",
            "x".join(map(str, key.tile)),
            "x".join(map(str, key.cluster)),
            info.pack,
            verification(key, info).short,
            info.name,
        )
    console = Console()
    console.print(shown)
    console.print(f"{len(kernels)} kernels", highlight=False)


def _print_explanation(explanation: Explanation) -> None:
    _line(str(explanation))
    if len(explanation.candidates) > 1:
        _line("candidates, by the model:")
        for name, microseconds in explanation.candidates:
            _line(f"{microseconds:>12.1f} us  {name}")


def _print_trial(result: RunResult) -> None:
    request = result.request
    types = f"{request.dtype.value} -> {request.result_dtype.value}"
    if result.backend == "reference":
        _line(f"{operation_of(request).describe(request)} {types}: computed by the NumPy reference ({result.reason})")
    else:
        _line(f"{operation_of(request).describe(request)} {types}: computed by {result.device}")
        _line(f"kernel {result.kernel} ({result.backend}, ready in {result.plan_seconds:.2f} s)")
    if result.rewrite:
        _line(f"a rewrite: {result.rewrite}")
    if result.seconds is not None and result.tflops is not None:
        _line(
            f"{result.seconds * 1e6:.1f} us a call, {result.tflops:.1f} TFLOP/s "
            f"(median over {result.launches} calls, back to back)"
        )
    if result.mismatches is None:
        _line(f"nothing was compared: {result.elements} elements of the reference, which kernels are checked against")
    elif result.ok:
        _line(f"right: {result.elements} elements agree with the reference; largest difference {result.max_error:.3g}")
    else:
        _line(
            f"WRONG: {result.mismatches} of {result.elements} elements differ from the reference by more "
            f"than rounding; largest difference {result.max_error:.3g}",
            "bold red",
        )
