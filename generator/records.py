"""Records of verification: what the passes over GPUs and over machine code found out, kernel by kernel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
        checked: what was compared or looked for.
        image: the beginning of the SHA-256 of the code that NVRTC made; empty for nvcc's.
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
    def circumstances(self) -> str:
        """The GPU, driver, compiler and day of the record, for readers."""
        driver = f"driver {self.driver}" if self.driver else ""
        return ", ".join(filter(None, (self.on, driver, self.compiler, self.day)))

    def to_dict(self) -> dict[str, str]:
        """The finding, how and when it was made, as JSON-ready values."""
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
