"""`cache`: the kernels that were compiled at run time and are kept on disk."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated

import typer

from ..jit.store import KernelStore
from .output import AsJson, complain, line, print_json, print_table, report, size_text, track

cache_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@cache_app.command("list")
def cache_list_command(*, as_json: AsJson = False) -> None:
    """Lists the cache: name, target, size, age, seconds to compile; tab-separated where there is no terminal."""
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
                "path": entry.path,
            }
            for entry in entries
        ]
        print_json({"folder": store.folder, "max_bytes": store.max_bytes, "entries": rows})
        return
    lines = [
        (
            str(entry.info.get("name", entry.digest)), str(entry.info.get("target", "")), size_text(entry.size),
            _duration(now - entry.made), f"{entry.seconds:.1f} s",
        )
        for entry in entries
    ]  # fmt: skip
    if not entries:
        complain(f"there is no kernel in {store.folder}")
    elif sys.stdout.isatty():
        print_table(("name", "target", "size", "age", "compiled in"), lines)
        line(f"{len(entries)} kernels, {size_text(sum(entry.size for entry in entries))} in {store.folder}")
    else:
        print(*map("\t".join, lines), sep="\n")


@cache_app.command("verify")
def cache_verify_command(*, as_json: AsJson = False) -> None:
    """Checks every checksum and moves damaged or unsafe kernels to the quarantine; exit status 1 if there are any."""
    store = KernelStore()
    # A thousand kernels are a gigabyte, which takes seconds.
    checked, damaged = store.verify(lambda paths: track(paths, "Checking", disable=len(paths) < 500))
    lines = [
        f"{kernel.path} {kernel.reason}: "
        + (f"moved to {kernel.moved_to}" if kernel.moved_to else "it could not be moved; remove it")
        for kernel in damaged
    ]
    report(
        {"folder": store.folder, "checked": checked, "damaged": [vars(kernel) for kernel in damaged]},
        *lines,
        f"{checked} kernels in {store.folder}, {len(damaged)} of them damaged",
        as_json=as_json,
    )
    if damaged:
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
    report(
        {"folder": store.folder, **vars(done)},
        f"{done.removed} kernels removed ({size_text(done.removed_bytes)}), "
        f"{done.kept} kept ({size_text(done.kept_bytes)}) in {store.folder}",
        as_json=as_json,
    )


def _amount(text: str, units: dict[str, int], option: str, expected: str) -> float | None:
    if not text:
        return None
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]?)", text)
    if number is None or number[2] not in units:
        raise typer.BadParameter(f"{text!r} is not {expected}", param_hint=option)
    return float(number[1]) * units[number[2]]


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
