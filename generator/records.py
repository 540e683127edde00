"""Records of verification: the findings of passes over GPUs and over machine code for each kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """The findings of one pass about one kernel.

    Attributes:
        kernel: its name.
        how: one of `pipeline.verification.MEANINGS`.
        source: `content.source_digest` of its key.
        cutlass: `content.cutlass_digest` of the headers.
        compiler: the compiler, such as `nvrtc 13.0.88`.
        on: the GPU that ran it; of an audit, the arch of the machine code.
        driver: the driver's version; empty for an audit.
        date: when the pass began, ISO 8601 in UTC, such as 2026-11-22T07:30Z.
        checked: the performed checks.
        image: the beginning of the SHA-256 of NVRTC's code; empty for nvcc's.
    """

    kernel: str
    how: str
    source: str
    cutlass: str
    compiler: str
    on: str
    driver: str
    date: str
    checked: str
    image: str = ""

    @property
    def day(self) -> str:
        """The date without the time."""
        return self.date.partition("T")[0]

    @property
    def origin(self) -> str:
        """The GPU, driver, compiler and day of the record, for readers."""
        driver = f"driver {self.driver}" if self.driver else ""
        return ", ".join(filter(None, (self.on, driver, self.compiler, self.day)))

    def to_dict(self) -> dict[str, str]:
        """The finding, with its method and date, as values for JSON."""
        return {name: getattr(self, name) for name in SHARED}


SHARED = ("how", "cutlass", "compiler", "on", "driver", "date", "checked")
"""Fields that the kernels of a pass have in common."""


def read(path: Path) -> list[Record]:
    """The records of `verified.jsonl`, or of a file like it.

    Raises:
        ValueError: it is no such file.
    """
    passes: dict[str, dict[str, str]] = {}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            if isinstance(entry, dict):
                passes[str(entry.pop("pass"))] = {name: str(entry[name]) for name in SHARED}
                continue
            name, *those = entry
            for which, source, *image in those:
                found.append(Record(kernel=name, source=source, image="".join(image), **passes[str(which)]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a line of verification records: {error}") from error
    return found


def write(path: Path, found: Iterable[Record]) -> None:
    """Writes records: a line with the common fields of a pass, then one for each kernel, in order."""
    ordered = sorted(found, key=lambda record: (record.kernel, record.how, record.compiler, record.date))
    shared = sorted({tuple(getattr(record, name) for name in SHARED) for record in ordered})
    number = {values: index for index, values in enumerate(shared, 1)}
    lines = [{"pass": number[values], **dict(zip(SHARED, values, strict=True))} for values in shared]
    kernels: dict[str, list[list[Any]]] = {}
    for record in ordered:
        which = number[tuple(getattr(record, name) for name in SHARED)]
        kernels.setdefault(record.kernel, []).append([which, record.source, *filter(None, [record.image])])
    text = "".join(_line(line) for line in lines) + "".join(_line([name, *those]) for name, those in kernels.items())
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def merged(*several: Iterable[Record]) -> list[Record]:
    """The latest record of each kernel, way of verifying and compiler.

    If code that a GPU ran has been compiled again since, from another source into the same image, its record counts
    for that source too: the code is the same.
    """
    latest: dict[tuple[str, str, str], Record] = {}
    images: dict[tuple[str, str], Record] = {}
    for record in sorted((entry for those in several for entry in those), key=lambda entry: entry.date):
        latest[record.kernel, record.how, record.compiler] = record
        if record.image:
            images[record.kernel, record.image] = record
    carried = []
    for record in latest.values():
        again = images.get((record.kernel, record.image)) if record.image else None
        same = again is not None and again.date > record.date and again.compiler == record.compiler
        carried.append(replace(record, source=again.source, cutlass=again.cutlass) if again and same else record)
    return carried


def of_raw(values: Mapping[str, Any]) -> Record:
    """A record of the line that a pass writes, its fields by name; ValueError names what is missing."""
    names = [field.name for field in fields(Record)]
    missing = [name for name in names if name not in values and name != "image"]
    if missing:
        raise ValueError(f"not a verification record: {', '.join(missing)} missing")
    return Record(**{name: str(values.get(name, "")) for name in names})
