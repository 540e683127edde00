"""Commands for kernels compiled ahead of time: `build`, `pack`, and `epilogue`, which writes files of trees."""

from __future__ import annotations

import contextlib
import itertools
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..epilogue import EpilogueVisitorTree, Operand, Traced, trace
from ..errors import InvalidOperandError, LibraryError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import MASK
from ..generator.key import KernelKey
from ..generator.rules import HALF_TYPES
from ..generator.selection import Selection
from ..jit import files
from ..pipeline import pack, pack_build
from .output import AsJson, complain, report, size_text

pack_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option("--output", "-o", help="The pack to write.")]
PackPath = Annotated[Path, typer.Argument(help="A pack.")]
PackPaths = Annotated[list[Path], typer.Argument(help="Packs.")]


def build_command(
    keys: Annotated[Path, typer.Argument(help="A file of keys, written by ac.record or ATOMR_CUTLASS_MISS_LOG.")],
    *,
    output: Output,
    arch: Annotated[str, typer.Option(help="Targets, ;-separated, such as 90a; empty: those of the keys.")] = "",
    budget_cells: Annotated[int, typer.Option(min=0, help="Most kernels of tuned choices; 0: all.")] = 0,
    budget_mb: Annotated[float, typer.Option(min=0.0, help="Most MB of GPU code of tuned choices; 0: no limit.")] = 0.0,
    dask: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Scheduler of a Dask cluster whose workers compile (extra dask).")
    ] = "",
    compiler: Annotated[
        str,
        typer.Option(
            help="nvrtc: a pack of cubins, without nvcc and host compiler; nvcc: a shared library, with both."
        ),
    ] = "nvrtc",
    as_json: AsJson = False,
) -> None:
    """Builds a pack of exactly the kernels of a file of keys, without a GPU."""
    if compiler not in pack_build.COMPILERS:
        raise typer.BadParameter(f"{compiler!r}; valid: {', '.join(pack_build.COMPILERS)}", param_hint="--compiler")
    try:
        selection = Selection(archs=arch, keys_file=str(keys), budget_cells=str(budget_cells), budget_mb=str(budget_mb))
        chosen, skipped = selection.keys(), selection.skipped()
    except ValueError as error:
        raise InvalidOperandError(str(error)) from error
    for key in skipped:
        complain(f"{key.name} is of {key.arch.target}, and left out")
    with (
        pack_build.dask_cluster(dask) if dask else contextlib.nullcontext() as executor,
        _progress(len(chosen)) as finished,
    ):
        data = pack_build.build(chosen, output.stem, compiler=compiler, executor=executor, finished=finished)
    _write(output, data, as_json=as_json, skipped=[key.name for key in skipped])


@pack_app.command("list")
def list_command(path: PackPath, *, as_json: AsJson = False) -> None:
    """Lists the contents of a pack of either form and the tools that built it, without loading its code."""
    found = pack.read_manifest(path)
    kernels = found["kernels"]
    by = f"by {found.get('compiler', 'an unknown compiler')}, package {found.get('package', 'unknown')}"
    needs = f", needs GLIBC_{found['glibc']}" if found.get("glibc") else ""
    lines = [f"{found['name']}: {len(kernels)} kernels, {found['form']} {by}{needs}"]
    for kernel in kernels:
        size = size_text(sum(image["bytes"] for image in kernel["images"])) if kernel.get("images") else ""
        lines.append(f"{kernel['arch']}  {size:>10}  {kernel['name']}")
    report({"path": path, **found}, *lines, as_json=as_json)


@pack_app.command("verify")
def verify_command(paths: PackPaths, *, as_json: AsJson = False) -> None:
    """Checks every byte of packs and whether this package can load them; exit status 1 if one is unusable."""
    problems = dict.fromkeys(paths, "")
    for path in paths:
        try:
            pack.read(path)
        except LibraryError as error:  # noqa: PERF203 - the other packs may be in order
            problems[path] = str(error)
    report(
        {"packs": [{"path": path, "ok": not why, "reason": why} for path, why in problems.items()]},
        *(why or f"{path}: every checksum is right" for path, why in problems.items()),
        as_json=as_json,
    )
    if any(problems.values()):
        raise typer.Exit(1)


@pack_app.command("diff")
def diff_command(first: PackPath, second: PackPath, *, as_json: AsJson = False) -> None:
    """Lists kernels that only one of two packs has, or whose code differs; exit status 1 if there are any."""
    ours, theirs = (
        {kernel["name"]: kernel for kernel in pack.read_manifest(path)["kernels"]} for path in (first, second)
    )
    same = ("content", "images")  # libraries have no images of single kernels
    found = {
        "only_first": [name for name in ours if name not in theirs],
        "only_second": [name for name in theirs if name not in ours],
        "different": [
            name for name in ours if name in theirs and any(ours[name].get(i) != theirs[name].get(i) for i in same)
        ],
    }
    lines = [f"{sign} {name}" for sign, names in zip("-+!", found.values(), strict=True) for name in names]
    report(found, *lines, as_json=as_json)
    if any(found.values()):
        raise typer.Exit(1)


@pack_app.command("merge")
def merge_command(paths: PackPaths, *, output: Output, as_json: AsJson = False) -> None:
    """Merges several packs of cubins, built with the same tools and headers, into one."""
    made = pack.merge([pack.read_cubins(path) for path in paths], output.stem)
    _write(output, pack.encode(made), as_json=as_json)


def _write(path: Path, data: bytes, *, as_json: bool, **facts: Any) -> None:
    """Writes a pack atomically, and reports the contents of the file."""
    files.save(path, data)
    manifest = pack.read_manifest(path)
    value = {"path": path, "bytes": len(data), **facts, **manifest}
    report(value, f"{path}: {len(manifest['kernels'])} kernels, {size_text(len(data))}", as_json=as_json)


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[KernelKey], None]]:
    """A bar on a terminal, elsewhere a line for each kernel, on the standard error."""
    if not sys.stderr.isatty():
        numbers = itertools.count(1)
        yield lambda key: complain(f"{next(numbers)} of {count}: {key.name}")
        return
    columns = (TextColumn("compiling"), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count)
        yield lambda key: bar.update(task, advance=1, description=key.name)


def epilogue_command(
    function: Annotated[str, typer.Argument(help="FILE.py:NAME: a function of acc and operands, or a tree.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file of trees to write.")],
    operand: Annotated[
        list[str], typer.Option(help="NAME=KIND:DTYPE, such as bias=row:f32, or NAME=mask; of a function, once each.")
    ] = [],  # noqa: B006 - typer makes a new one
    dtype: Annotated[list[str], typer.Option(help="Element type of A, any number of them; f16 and bf16 without.")] = [],  # noqa: B006 - typer makes a new one
    out_dtype: Annotated[str, typer.Option(help="Element type of D; empty: what it casts to, else A's.")] = "",
    as_json: AsJson = False,
) -> None:
    """Writes an epilogue as JSON, from which ATOMR_CUTLASS_EPILOGUES builds kernels ahead of time."""
    types = [CutlassDtype.parse(entry) for entry in dtype] or list(HALF_TYPES)
    found, operands = _found(function), dict(map(_operand, operand))
    if isinstance(found, Traced):
        found = found.tree
    tree = found if isinstance(found, EpilogueVisitorTree) else trace(found, operands).tree
    decided = CutlassDtype.parse(out_dtype) if out_dtype else tree.result_dtype
    made = {
        "name": function.rpartition(":")[2],
        "program": tree.program,
        "inputs": {
            entry.name: f"{entry.kind}:{entry.dtype.value}" if entry.dtype else entry.kind for entry in tree.inputs
        },
        "outputs": [entry.name for entry in tree.outputs],
        "out_dtype": decided.value if decided else None,
        "dtypes": [entry.value for entry in types],
    }
    files.save(output, f"{json.dumps(made, indent=1)}\n".encode())
    built = f"build with CMAKE_ARGS='-DATOMR_CUTLASS_EPILOGUES={output.absolute()}'"
    report({"path": output, **made}, f"{output}: {tree!r}; {built}", as_json=as_json)


def _found(place: str) -> Any:
    """The object NAME that FILE.py defines, given as `FILE.py:NAME`."""
    path, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier():
        raise InvalidOperandError(f"function is {place!r}; expected FILE.py:NAME")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise InvalidOperandError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if name not in names:
        there = ", ".join(symbol for symbol, value in names.items() if callable(value) and not symbol.startswith("_"))
        raise InvalidOperandError(f"{path} has no {name!r}; it has {there or 'no functions'}")
    return names[name]


def _operand(text: str) -> tuple[str, Operand]:
    name, equals, declaration = text.partition("=")
    kind, colon, dtype = declaration.partition(":")
    if not equals or not name.isidentifier() or (not colon and kind != MASK):
        raise InvalidOperandError(f"operand is {text!r}; expected NAME=KIND:DTYPE, such as bias=row:f32, or NAME=mask")
    return name, Operand(kind, dtype if colon else None)
