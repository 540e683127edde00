"""Times how kernels for few rows (bf16) divide problems that are drawn at random, for fit_few.py.

    python benchmarks/few_divisions.py --seed 250 --count 400 --seconds 250 --name fresh --out benchmarks/results

nvcc compiles few_divisions.cu with the package's headers, and that program times the divisions that the model estimates
near the fastest: some 600 problems in 130 seconds of an H100. A file is written for each layout, `NAME-rr.json` and
`NAME-rc.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fit_few
from facts import machine
from shapes import Shape, draw, purpose

from atomr_cutlass.generator import headers
from atomr_cutlass.jit import toolchain
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.devices import Device

PROGRAM = Path(__file__).with_suffix(".cu")
NEAR = 1.9
"""Times the fastest estimate: divisions that are estimated slower are not timed."""
WHAT = (
    "Microseconds of kernels for few rows (bf16) by division, in chains of launches: thread blocks of a cluster, how "
    "many of them share the few rows, rows of weights in a tile, and the time with weights that may be written and "
    f"with bound ones. Divisions that the model estimates at {NEAR} times the fastest, or that take 1.75 times as "
    "long, are left out."
)


def near(shape: Shape, layouts: str, device: Device) -> list[tuple[int, int, int]]:
    """The divisions (see `fit_few.divisions`) that are estimated near the fastest, the likely ones first."""
    every = fit_few.divisions(shape.m, shape.n, shape.k, layouts, device)
    found = sorted((seconds, division) for division, seconds, _ in every)
    return [division for seconds, division in found if seconds < NEAR * found[0][0]]


def lines(shapes: Sequence[Shape], device: Device) -> Iterator[str]:
    """The program's input."""
    for shape in shapes:
        for layouts in fit_few.LAYOUTS:
            each = near(shape, layouts, device)
            numbers = (int(layouts == "rr"), shape.m, shape.n, shape.k, len(each), *(n for one in each for n in one))
            yield " ".join(map(str, numbers))


def parsed(text: str) -> dict[str, list[dict[str, Any]]]:
    """The program's output: by layouts, rows of a shape and its timed divisions."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in text.splitlines():
        row_major_b, m, n, k, *rest = line.split()
        times = [[*map(int, rest[at : at + 3]), *map(float, rest[at + 3 : at + 5])] for at in range(0, len(rest), 5)]
        if times:
            shape = [int(m), int(n), int(k)]
            rows["rr" if int(row_major_b) else "rc"].append({"shape": shape, "times": times})
    return rows


def written(rows: list[dict[str, Any]], seed: int) -> str:
    """A file of divisions, a problem a line."""
    head = json.dumps({"machine": machine(), "seeds": [seed]})[:-1]
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'{{"what": {json.dumps(WHAT)}, "columns": 5, "runs": [\n{head}, "rows": [\n{body}\n]}}\n]}}\n'


def main() -> int:
    """Compiles, times and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True, help="of the draw, even: for fitting")
    parser.add_argument("--count", type=int, default=400, help="shapes, each in both layouts")
    parser.add_argument("--seconds", type=float, default=250, help="begin no problem after this time")
    parser.add_argument("--name", required=True, help="of the files, before -rr.json and -rc.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    arguments = parser.parse_args()
    if purpose(arguments.seed) != "fitting":
        parser.error(f"seed {arguments.seed} is for acceptance")
    device = devices.get(0)
    shapes = draw(["few rows"], arguments.count, arguments.seed, aligned=True)
    folders = headers.includes(toolchain.CUTLASS, "nvcc", ours=toolchain.OURS).folders
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "few_divisions"
        subprocess.run(
            ["nvcc", "-O3", "-DNDEBUG", "-std=c++17", "--expt-relaxed-constexpr",
             "--generate-code=arch=compute_90a,code=sm_90a", *(f"-I{path}" for path in folders), "-o", program,
             PROGRAM],
            check=True,
        )  # fmt: skip
        timed = subprocess.run(
            [program, str(arguments.seconds)], input="\n".join(lines(shapes, device)), text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    for layouts, rows in parsed(timed.stdout).items():
        (arguments.out / f"{arguments.name}-{layouts}.json").write_text(written(rows, arguments.seed), encoding="utf-8")
        print(layouts, len(rows), "problems", sum(len(row["times"]) for row in rows), "divisions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
