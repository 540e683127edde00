"""Runs a compiler, as CMake asks a launcher to, and adds what it used to a file: `measured.py LOG COMMAND...`."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Returns the command's exit status."""
    log, command = Path(sys.argv[1]), sys.argv[2:]
    status = subprocess.run(command, check=False).returncode
    if status == 0 and "-o" in command:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = {
            "object": Path(command[command.index("-o") + 1]).name,
            "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak_mb": used.ru_maxrss // 1024,
        }
        with log.open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps(spent)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
