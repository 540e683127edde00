"""How kernels have been verified: records of the passes over GPUs and over machine code, kernel by kernel.

A record has the digests of what was compiled, the compiler, and the kind of verification. It is out of date once the
kernel's source or headers, ours or CUTLASS's, have changed. `tools/verified.py` collects the records of such passes in
`verified.jsonl`.
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
"""The kinds of verification, and what each proves."""

CHANGED: Final = "changed since"
NOT_VERIFIED: Final = "not verified"

FILE: Final = Path(__file__).parents[1] / "verified.jsonl"


@dataclass(frozen=True)
class Verification:
    """Records of a kernel as it is and, for kinds without one, those from before source or headers changed."""

    records: tuple[Record, ...] = ()
    changed: tuple[Record, ...] = ()

    def __str__(self) -> str:
        parts = [f"{record.how} ({record.origin})" for record in self.records]
        parts += [f"{CHANGED} {record.day} ({record.how} then: {record.origin})" for record in self.changed]
        return "; ".join(parts) or NOT_VERIFIED

    @property
    def short(self) -> str:
        """In a few words: each kind with its day."""
        parts = [f"{record.how} {record.day}" for record in self.records]
        parts += [f"{CHANGED} {record.day}" for record in self.changed]
        return ", ".join(dict.fromkeys(parts)) or NOT_VERIFIED

    def to_dict(self) -> list[dict[str, Any]]:
        """The records as JSON-ready values."""
        return [{**record.to_dict(), "changed": record in self.changed} for record in (*self.records, *self.changed)]


def verification(
    key: KernelKey, info: KernelInfo | None = None, known: Mapping[str, Sequence[Record]] | None = None
) -> Verification:
    """The verification of a kernel, with its row if the table has it, by `known` or this installation's records."""
    recorded = (records() if known is None else known).get(key.name, ())
    if not recorded:
        return Verification()
    now = identity(key, info)
    same = tuple(record for record in recorded if (record.source, record.cutlass) == now)
    covered = {record.how for record in same}
    return Verification(same, tuple(record for record in recorded if record not in same and record.how not in covered))


def tally(keys: Iterable[KernelKey], known: Mapping[str, Sequence[Record]] | None = None) -> dict[str, tuple[int, str]]:
    """The number of kernels for each of `MEANINGS`, `CHANGED` and `NOT_VERIFIED`, and the latest day."""
    found = dict.fromkeys((*MEANINGS, CHANGED, NOT_VERIFIED), (0, ""))
    for key in keys:
        verified = verification(key, known=known)
        days = {record.how: record.day for record in verified.records} or {NOT_VERIFIED: ""}
        if verified.changed:
            days[CHANGED] = max(record.day for record in verified.changed)
        for statement, day in days.items():
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
    """The digest of the CUTLASS headers that kernels are compiled with at run time."""
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
