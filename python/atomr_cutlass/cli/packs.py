"""`build` and `pack`: packs of either form, made from files of keys, looked at, and put together if of cubins."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import InvalidOperandError, LibraryError
from ..generator.key import KernelKey
from ..generator.selection import Selection
from ..jit import files
from ..pipeline import pack, pack_build
from .options import AsJson
from .output import complain, line, print_json, size_text

pack_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option("--output", "-o", help="The pack to write.")]
One = Annotated[Path, typer.Argument(help="A pack.")]
Several = Annotated[list[Path], typer.Argument(help="Packs.")]


def build_command(
    keys: Annotated[Path, typer.Argument(help="A file of keys: what ac.record or ATOMR_CUTLASS_MISS_LOG wrote.")],
    *,
    output: Output,
    arch: Annotated[str, typer.Option(help="Targets, ;-separated, such as 90a; empty: those of the keys.")] = "",
    budget_cells: Annotated[int, typer.Option(min=0, help="Of tuned choices: as many kernels at most; 0: all.")] = 0,
    budget_mb: Annotated[float, typer.Option(min=0.0, help="Likewise: so many MB of GPU code; 0: no limit.")] = 0.0,
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
    _write(output, data)
    if as_json:
        left = [key.name for key in skipped]
        print_json({"path": str(output), "bytes": len(data), "skipped": left, **pack.read_manifest(output)})
    else:
        line(f"{output}: {len(chosen)} kernels, {size_text(len(data))}")


@pack_app.command("list")
def list_command(path: One, *, as_json: AsJson = False) -> None:
    """Lists the contents of a pack of either form and the tools that built it; loads none of it."""
    found = pack.read_manifest(path)
    if as_json:
        print_json({"path": str(path), **found})
        return
    kernels = found["kernels"]
    by = f"by {found.get('compiler', 'an unknown compiler')}, package {found.get('package', 'unknown')}"
    needs = f", needs GLIBC_{found['glibc']}" if found.get("glibc") else ""
    line(f"{found['name']}: {len(kernels)} kernels, {found['form']} {by}{needs}")
    for kernel in kernels:
        size = size_text(sum(image["bytes"] for image in kernel["images"])) if kernel.get("images") else ""
        line(f"{kernel['arch']}  {size:>10}  {kernel['name']}")


@pack_app.command("verify")
def verify_command(paths: Several, *, as_json: AsJson = False) -> None:
    """Checks every byte of packs and whether this package can load them; ends with 1 if one cannot be used."""
    problems = {str(path): _problem(path) for path in paths}
    if as_json:
        print_json({"packs": [{"path": path, "ok": not why, "reason": why} for path, why in problems.items()]})
    else:
        for path, why in problems.items():
            line(why or f"{path}: every checksum is right")
    if any(problems.values()):
        raise typer.Exit(1)


def _problem(path: Path) -> str:
    try:
        pack.read_manifest(path)
    except LibraryError as error:
        return str(error)
    return ""


@pack_app.command("diff")
def diff_command(first: One, second: One, *, as_json: AsJson = False) -> None:
    """Kernels that only one of two packs has, and those whose code differs; ends with 1 if there are any."""
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
    if as_json:
        print_json(found)
    else:
        for sign, names in zip("-+!", found.values(), strict=True):
            for name in names:
                line(f"{sign} {name}")
    if any(found.values()):
        raise typer.Exit(1)


@pack_app.command("merge")
def merge_command(paths: Several, *, output: Output, as_json: AsJson = False) -> None:
    """One pack of the kernels of several packs of cubins that were built alike."""
    made = pack.merge([pack.read_cubins(path) for path in paths], output.stem)
    data = pack.encode(made)
    _write(output, data)
    if as_json:
        print_json({"path": str(output), "bytes": len(data), **made.manifest()})
    else:
        line(f"{output}: {len(made.cubins)} kernels, {size_text(len(data))}")


def _write(path: Path, data: bytes) -> None:
    """Writes a pack, of which readers see all or nothing."""
    try:
        files.write(path, data, path.parent, mode=0o644)
    except OSError as error:
        raise InvalidOperandError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[KernelKey], None]]:
    """A bar on a terminal, elsewhere a line for each kernel, on the standard error."""
    if not sys.stderr.isatty():
        done: list[Any] = []

        def tell(key: KernelKey) -> None:
            done.append(key)
            complain(f"{len(done)} of {count}: {key.name}")

        yield tell
        return
    columns = (TextColumn("compiling"), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count)
        yield lambda key: bar.update(task, advance=1, description=key.name)
