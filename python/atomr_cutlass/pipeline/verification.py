"""How kernels have been verified: what the passes over GPUs and over machine code recorded, kernel by kernel.

A record tells what was compiled, by what, and what was found right. It says nothing any more about a kernel whose
source or headers, of ours or of CUTLASS, are others by now. `tools/verified.py` collects the records of such passes in
`verified.jsonl`, beside this module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..generator import content
from ..generator.headers import HeadersError
from ..generator.key import KernelKey
from ..generator.records import Record, read
from ..jit import toolchain
from .table import KernelInfo

RUNS: Final = "runs"
RUNS_AS_PTX: Final = "runs as PTX"
AUDITED: Final = "compiled and audited"

MEANINGS: Final = {
    RUNS: "the machine code was launched on a GPU that it is made for, and its results compared with the reference's",
    RUNS_AS_PTX: "a newer GPU launched it from the PTX of its arch, which the driver translates: this proves the "
    "numbers, not the instruction or the speed",
    AUDITED: "it was compiled, and its machine code has the expected instruction and spills no registers",
}
"""The statements that a record can make, and what each proves."""

CHANGED: Final = "changed since"
NOT_VERIFIED: Final = "not verified"

FILE: Final = Path(__file__).parents[1] / "verified.jsonl"


@dataclass(frozen=True)
class Verification:
    """Records of a kernel as it is and, where it has none of a kind, those from before source or headers changed."""

    records: tuple[Record, ...] = ()
    changed: tuple[Record, ...] = ()

    def __str__(self) -> str:
        said = [f"{record.how} ({record.origin})" for record in self.records]
        said += [f"{CHANGED} {record.day} ({record.how} then: {record.origin})" for record in self.changed]
        return "; ".join(said) or NOT_VERIFIED

    @property
    def short(self) -> str:
        """In a few words: each way with its day."""
        said = [f"{record.how} {record.day}" for record in self.records]
        said += [f"{CHANGED} {record.day}" for record in self.changed]
        return ", ".join(dict.fromkeys(said)) or NOT_VERIFIED

    def to_dict(self) -> list[dict[str, Any]]:
        """The records as JSON-ready values."""
        return [{**record.to_dict(), "changed": record in self.changed} for record in (*self.records, *self.changed)]


def verification(
    key: KernelKey, info: KernelInfo | None = None, known: Mapping[str, Sequence[Record]] | None = None
) -> Verification:
    """How a kernel, with its row where the table has it, was verified, by these records or this installation's."""
    those = (records() if known is None else known).get(key.name, ())
    if not those:
        return Verification()
    now = identity(key, info)
    same = tuple(record for record in those if (record.source, record.cutlass) == now)
    covered = {record.how for record in same}
    return Verification(same, tuple(record for record in those if record not in same and record.how not in covered))


def tally(keys: Iterable[KernelKey], known: Mapping[str, Sequence[Record]] | None = None) -> dict[str, tuple[int, str]]:
    """The number of kernels that each of `MEANINGS`, `CHANGED` and `NOT_VERIFIED` holds for, and the latest day."""
    found = dict.fromkeys((*MEANINGS, CHANGED, NOT_VERIFIED), (0, ""))
    for key in keys:
        told = verification(key, known=known)
        said = {record.how: record.day for record in told.records} or {NOT_VERIFIED: ""}
        if told.changed:
            said[CHANGED] = max(record.day for record in told.changed)
        for statement, day in said.items():
            count, latest = found[statement]
            found[statement] = (count + 1, max(day, latest))
    return {statement: (count, day) for statement, (count, day) in found.items() if count}


def identity(key: KernelKey, info: KernelInfo | None = None) -> tuple[str, str]:
    """The digests of a kernel's source and of CUTLASS; empty strings if headers are missing."""
    if info is not None and info.content:
        source, cutlass, _ = info.content.split(" ", 2)
        return source, cutlass
    try:
        return content.source_digest(key, toolchain.OURS), cutlass_identity()
    except (OSError, HeadersError):
        return "", ""


@functools.cache
def cutlass_identity() -> str:
    """That of the CUTLASS headers which kernels are compiled with at run time."""
    return content.cutlass_digest(toolchain.CUTLASS, toolchain.OURS, toolchain.cutlass_digest())


@functools.cache
def records() -> Mapping[str, Sequence[Record]]:
    """The records of this installation, by the names of the kernels; none where there is no file."""
    return by_kernel(read(FILE)) if FILE.is_file() else {}


def by_kernel(found: Iterable[Record]) -> Mapping[str, Sequence[Record]]:
    """Records by the names of their kernels."""
    named: dict[str, list[Record]] = {}
    for record in found:
        named.setdefault(record.kernel, []).append(record)
    return named
