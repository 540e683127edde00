"""`info` and `list`: what is installed."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..generator.matrix import OPS
from ..jit import kernels as jit_kernels
from ..pipeline import table
from ..pipeline.candidate import KernelInfo
from ..pipeline.verification import verification
from . import info as installation
from .options import TARGETS, AsJson, arch_from, dtype_from
from .output import complain, heading, line, print_json, size_text


def info_command(*, as_json: AsJson = False) -> None:
    """GPUs, driver, compilers, headers, kernel cache, packs and kernels; what is missing, with the cure."""
    facts = installation.gather()
    if as_json:
        print_json(facts)
        return
    print_facts(facts)
    if facts["missing"]:
        heading("Missing")
    for missing in facts["missing"]:
        line(f"{missing['what']}\n    for:  {missing['for']}\n    cure: {missing['cure']}")


def list_command(
    *,
    op: Annotated[str, typer.Option(help=f"Only this operation: {', '.join(OPS)}.")] = "",
    dtype: Annotated[str, typer.Option(help="Only this element type of A; tf32: f32 multiplied in TF32.")] = "",
    arch: Annotated[str, typer.Option(help=f"Only kernels compiled for this target: {TARGETS}.")] = "",
    name_filter: Annotated[
        str, typer.Option("--filter", help="Only matching names: * between substrings, alternatives comma-separated.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """The kernel table, packs included: a table on a terminal, otherwise one name a line; as JSON, a file of keys."""
    if op and op not in OPS:
        raise typer.BadParameter(f"unknown op {op!r}; valid: {', '.join(OPS)}", param_hint="--op")
    found = table.kernels(
        op=op or None,
        dtype=dtype_from(dtype, "--dtype"),
        arch=arch_from(arch),
        filter=name_filter or None,
    )
    if as_json:
        for info in found:
            print(json.dumps({**info.to_dict(), "verified": verification(info.key, info).to_dict()}))
    elif sys.stdout.isatty():
        print_kernels(found)
    else:
        for info in found:
            print(info.name)
    if not found and not as_json:
        if table.kernels():
            complain("no kernel of the table matches")
        else:
            complain(f"the table is empty; to fill it: {installation.build_command('default', '80;90a')}")


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints the installed parts, a line each."""
    lines = [("package", f"{facts['version']}, Python {facts['python']}"), ("driver", facts["driver"])]
    for gpu in facts["gpus"]:
        arch = gpu["arch"] or f"compute capability {gpu['capability']}, no target for it"
        size = f"{gpu['multiprocessors']} multiprocessors, {gpu['memory_bytes'] / 2**30:.0f} GiB"
        lines.append((f"GPU {gpu['index']}", f"{gpu['name']} ({arch}), {size}; {gpu['kernels']} kernels run on it"))
    for name, tool in (("nvcc", facts["nvcc"]), ("NVRTC", facts["nvrtc"])):
        lines.append((name, f"{tool['version']} ({tool['where']})" if tool else "none"))
    for name, tool in (("CUTLASS", facts["headers"]), ("CCCL", facts["cuda_headers"])):
        lines.append(("headers", f"{name} {tool['version']} ({tool['where']})" if tool else f"{name}: none"))
    lines += _jit_lines(facts["jit"])
    packs = ", ".join(f"{name} ({count} kernels)" for name, count in facts["packs"].items())
    lines.append(("packs", packs or "none"))
    lines.append(("table", f"{sum(row['kernels'] for row in facts['table'])} kernels"))
    for op, rows in itertools.groupby(facts["table"], key=lambda row: row["op"]):
        counts = ", ".join(f"{row['kernels']} {row['generation']} for {row['arch']}" for row in rows)
        lines.append(("", f"{op}: {counts}"))
    for name, text in lines:
        line(f"{name:<11}{text}")


def _jit_lines(jit: Mapping[str, Any]) -> list[tuple[str, str]]:
    does = {
        "auto": "auto: kernels that the table lacks are compiled",
        "background": "background: better kernels than the table's are compiled while its own serve",
        "off": "off: nothing is compiled",
        None: f"refused: {jit_kernels.POLICY_VARIABLE} names no policy",
    }[jit["policy"]]
    cache, problem = jit["cache"], jit["problem"]
    size = f"{size_text(cache['size'])} of at most {size_text(cache['max_size'])}"
    kept = f"{cache['kernels']} kernels, {size}, in {cache['folder']}"
    lines = [("JIT", f"{does}; but {problem}" if problem and jit["policy"] != "off" else does)]
    if jit["headers"]:
        lines.append(("digests", ", ".join(f"{name} {digest[:12]}" for name, digest in jit["headers"].items())))
    lines.append(("cache", f"not used: {cache['problem']}" if cache["problem"] else kept))
    if jit["miss_log"]:
        lines.append(("misses", f"recorded in {jit['miss_log']}"))
    return lines


def print_kernels(kernels: list[KernelInfo]) -> None:
    """Kernels as a table."""
    shown = Table(
        "op", "arch", "A x B -> D", "layouts", "align", "tile", "cluster", "pack", "verified", "name",
        box=None, pad_edge=False,
    )  # fmt: skip
    shown.columns[-1].overflow = "fold"
    for info in kernels:
        key = info.key
        math = "" if key.math == "default" else f" ({key.math})"
        shown.add_row(
            key.op,
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
