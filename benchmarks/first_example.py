"""README's first example in fresh processes that may compile nothing: how long each takes, and that NVRTC stays away.

python benchmarks/first_example.py --pack default90a.so --out first_example.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from facts import deliver, machine, now

README = Path(__file__).resolve().parents[1] / "README.md"
LOOK = """
import json
with open("/proc/self/maps") as maps:
    print("\\n" + json.dumps({"nvrtc_mapped": "libnvrtc" in maps.read(), "kernels": len(ac.kernels())}))
"""
"""Code that runs after the example, in its process."""


def run(pack: Path | None, cache: str) -> dict[str, Any]:
    """Seconds of one process, and what it said of itself, or its error."""
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{README.name} has no example")
    environment = os.environ | {"ATOMR_CUTLASS_JIT": "off", "ATOMR_CUTLASS_CACHE_DIR": cache}
    environment |= {} if pack is None else {"ATOMR_CUTLASS_PACKS": str(pack)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", found[1] + LOOK], env=environment, capture_output=True, text=True, check=False
    )
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 3)}
    if done.returncode:
        return row | {"error": done.stderr[-1500:]}
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row | last


def main() -> int:
    """Measures and prints or writes; 1 where the example failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pack", type=Path, help="a pack of `default`; none: the installed table")
    parser.add_argument("--runs", type=int, default=3, help="processes, one after the other; default: 3")
    parser.add_argument("--out", type=Path, help="write JSON here instead of to standard output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        runs = [run(arguments.pack, cache) for _ in range(arguments.runs)]
    deliver({"date": now(), "machine": machine(), "runs": runs}, arguments.out)
    return int(any("error" in run for run in runs))


if __name__ == "__main__":
    sys.exit(main())
