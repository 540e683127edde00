"""Compiles every kernel of the table at run time, several at once, so that tests of them find them on disk.

python tools/compile_table.py --out results/compile.json
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
from atomr_cutlass.jit import kernels


def main() -> int:
    """Compiles; returns 1 if a kernel did not compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4))
    arguments = parser.parse_args()
    device = devices.get(0)
    infos = [
        info for info in ac.kernels(op="gemm") if devices.rank_arch(info.key.arch, device, ptx=info.ptx) is not None
    ]
    # The longest first, so that none of them is left over at the end.
    infos.sort(key=lambda info: info.key.generation, reverse=True)
    report: dict[str, object] = {}

    def compiled(info: ac.KernelInfo) -> tuple[str, object]:
        start = time.perf_counter()
        try:
            _, origin = kernels.load(info.key, kernels.target_for(info.key, device))
        except ac.CutlassError as error:
            return info.name, f"{type(error).__name__}: {error}"[:600]
        return info.name, {"origin": origin, "seconds": round(time.perf_counter() - start, 2)}

    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, outcome in pool.map(compiled, infos):
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
