"""A pack of cubins: how long it takes to build with an empty cache, to build again, to verify and to load. Prints JSON.

Needs NVRTC; a GPU makes a difference to loading alone, which gives the driver nothing before a kernel is used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from facts import deliver, machine, now

from atomr_cutlass import SmArch
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator import machine as cores
from atomr_cutlass.generator.matrix import PRESETS, expand
from atomr_cutlass.jit.files import FOLDER_VARIABLE
from atomr_cutlass.jit.toolchain import toolchain

BUILD = """
import sys
from pathlib import Path
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.pipeline import pack_build
keys = Selection(archs="", keys_file=sys.argv[1]).keys()
Path(sys.argv[2]).write_bytes(pack_build.build(keys, "model"))
"""
"""Code that builds a pack as `atomr-cutlass build` does, without a command line."""

READ = """
import json, sys, time
from pathlib import Path
begin = time.perf_counter()
import atomr_cutlass as ac
from atomr_cutlass.pipeline import pack
imported = time.perf_counter()
pack.read_manifest(Path(sys.argv[1]))
verified = time.perf_counter()
count = ac.load_pack(sys.argv[1])
loaded = time.perf_counter()
print(json.dumps({
    "import_s": imported - begin, "verify_s": verified - imported, "load_s": loaded - verified, "kernels": count,
}))
"""
"""In a process of its own: loading verifies again, after what the first use of the driver costs."""


def run(*words: str | Path, cache: Path) -> str:
    """The output of a Python process with a cache of its own."""
    environment = {**os.environ, FOLDER_VARIABLE: str(cache), "ATOMR_CUTLASS_PACKS": ""}
    done = subprocess.run(
        [sys.executable, "-c", *words], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def measure(keys: Path, path: Path, cache: Path, repeats: int) -> dict[str, Any]:
    """Builds the pack of a file of keys, twice, and reads it in fresh processes."""
    found: dict[str, Any] = {}
    for name in ("build_s", "build_again_s"):
        begin = time.perf_counter()
        run(BUILD, keys, path, cache=cache)
        found[name] = time.perf_counter() - begin
    reads = [json.loads(run(READ, path, cache=cache)) for _ in range(repeats)]
    middle = {name: statistics.median(read[name] for read in reads) for name in reads[0]}
    return {**found, "bytes": path.stat().st_size, **middle}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default="90a", help="target of the kernels; default: 90a")
    parser.add_argument("--preset", default="default", help=f"whose first kernels: {', '.join(PRESETS)}")
    parser.add_argument("--count", type=int, default=50, help="kernels; default: 50")
    parser.add_argument("--keys", type=Path, help="a file of keys instead")
    parser.add_argument("--repeats", type=int, default=5, help="processes that read the pack; default: 5")
    parser.add_argument("--cache", type=Path, help="an empty folder for the kernels; default: one that is removed")
    parser.add_argument("--out", type=Path, help="write JSON here instead of to standard output")
    given = parser.parse_args()
    results: dict[str, Any] = {
        "date": now(), "machine": machine(), "cpus": cores.cpus(), "compiler": toolchain().compiler,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = given.keys
        if keys is None:
            chosen = expand(given.preset, [SmArch.parse(given.arch)])[: given.count]
            keys = folder / "keys.jsonl"
            keys.write_text("".join(f"{key_file.line(key)}\n" for key in chosen), encoding="utf-8")
        cache = given.cache or folder / "cache"
        cache.mkdir(mode=0o700, exist_ok=True)
        if any(cache.iterdir()):
            parser.error(f"{cache} is not empty")
        results["pack"] = measure(keys, folder / "model.pack", cache, given.repeats)
    deliver(results, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
