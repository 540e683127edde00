"""Takes what passes found out about kernels into the package's records, and says what is known of which arch.

    python tools/verified.py audit.jsonl results/verified.jsonl      # takes these in
    python tools/verified.py                                         # says what is known by now

Of each kernel the latest record of a kind stays. Kernels with faults are named and not taken in, and those that `full`
does not have any more are dropped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from atomr_cutlass.generator import records
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.pipeline import verification


def main() -> int:
    """Takes files in; returns 1 if a kernel of theirs has faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="what tools/audit_table.py and tools/gpu_pass.py wrote")
    parser.add_argument("--into", type=Path, default=verification.FILE.resolve(), help="the records; the package's")
    arguments = parser.parse_args()
    wrong: list[str] = []
    if arguments.files:
        known = records.read(arguments.into) if arguments.into.is_file() else []
        found, wrong = collect(arguments.files)
        names = {key.name for key in expand("full", list(SmArch))}
        kept = [record for record in records.merged(known, found) if record.kernel in names]
        records.write(arguments.into, kept)
        print(f"{len(found)} records read, {len(kept)} in {arguments.into}: {arguments.into.stat().st_size} bytes")
    for line in wrong:
        print(f"not taken in: {line}")
    known = records.read(arguments.into) if arguments.into.is_file() else []
    print("\n".join(summary(known)))
    return 1 if wrong else 0


def collect(files: Iterable[Path]) -> tuple[list[records.Record], list[str]]:
    """The records in files, and what is said of kernels with faults. A last line that was cut short is passed over."""
    found, wrong = [], []
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
            except ValueError:
                if number == len(lines) and not line.endswith("\n"):
                    continue
                raise ValueError(f"{path}:{number}: not JSON: {line[:80]!r}") from None
            if values.get("faults"):
                wrong.append(f"{values['kernel']} ({values['on']}): {'; '.join(values['faults'])}")
            else:
                found.append(records.of_raw(values))
    return found, wrong


def summary(known: Iterable[records.Record]) -> list[str]:
    """The number of kernels of `full` with each kind of evidence, by arch."""
    lines, named = [], verification.by_kernel(known)
    for arch in SmArch:
        keys = expand("full", [arch])
        counts = verification.tally(keys, named)
        said = ", ".join(
            f"{evidence} {count}" + (f" ({day})" if day else "") for evidence, (count, day) in counts.items()
        )
        lines.append(f"{arch.value:<9}{len(keys):>4} kernels: {said}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
