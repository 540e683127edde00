"""Compiles kernels at run time, several at once, so that tests of them find them on disk.

python tools/compile_table.py --out results/compile.json                  # every kernel of the table
python tools/compile_table.py --out results/compile.json --matrix 90a     # every cell of the matrix for an arch
python tools/compile_table.py --out results/compile.json --matrix 80 --names 'conv*,*grouped*'
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import atomr_cutlass as ac
from atomr_cutlass import devices
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import family
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.jit import kernels


def main() -> int:
    """Compiles; returns 1 if a kernel did not compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument("--matrix", default="", help="archs whose cells to compile instead, such as 80;90a")
    parser.add_argument("--names", default="", help="patterns of names, as ATOMR_CUTLASS_KERNELS has them")
    arguments = parser.parse_args()
    device = devices.get(0)
    if arguments.matrix:
        keys = Selection(preset="full", archs=arguments.matrix, kernels=arguments.names).keys()
    else:
        keys = [info.key for info in ac.kernels() if devices.rank_arch(info.key.arch, device, ptx=info.ptx) is not None]
    # The longest first, so that none of them is left over at the end.
    keys.sort(key=lambda key: family(key).compile_seconds, reverse=True)
    report: dict[str, object] = {}

    def compiled(key: KernelKey) -> tuple[str, object]:
        start = time.perf_counter()
        try:
            _, origin = kernels.load(key, kernels.target_for(key, device))
        except ac.CutlassError as error:
            return key.name, f"{type(error).__name__}: {error}"[:600]
        return key.name, {"origin": origin, "seconds": round(time.perf_counter() - start, 2)}

    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, outcome in pool.map(compiled, keys):
            report[name] = outcome
            if isinstance(outcome, str):
                print(f"{name}: {outcome}", flush=True)
    failed = sum(isinstance(outcome, str) for outcome in report.values())
    seconds = round(time.perf_counter() - start, 1)
    summary = {"kernels": len(report), "failed": failed, "seconds": seconds, "jobs": arguments.jobs, "each": report}
    arguments.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(f"{len(report)} kernels, {failed} failed, {seconds} s with {arguments.jobs} at once")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
