r"""Fits the correction of the model's estimates for few rows (few_correction.inc) to timings of every division.

    cd benchmarks/results
    python ../fit_few.py 2026-11-2[67]-few-divisions-{sent,bound,tall}-*.json *-h200-few-divisions-r?.json \
        --before 2026-11-26-few-divisions-r?.json --out ../../cpp/src/few_correction.inc
    python ../fit_few.py ... --leave-out 4

Files of divisions have `runs`: a GPU and rows of a problem's shape and `times`, lists of thread blocks in a cluster,
how many of them share the few rows, rows of weights in a tile, microseconds, and of some the microseconds with bound
weights. Their names end in the layouts of A and B. Those after `--before` are of kernels that added up divided K
otherwise: they teach what both have in common.

A network (network.py) corrects the logarithm of a division's estimate. `--leave-out N` says what the choice loses on
problems that the network has not seen, N times a Nth of all. Nothing is launched.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from fit_estimate import DEVICES
from network import Network, Samples, Training, corrections, losses, told, trained, unseen

from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.pipeline import estimate
from atomr_cutlass.pipeline.devices import Device

LAYOUTS = {"rc": "kFewAlongK", "rr": "kFewRows"}
"""The networks by the layouts of A and B."""
OUTPUTS = ("as they are", "weights bound")
FAR = 1.7
"""Times the fastest: slower divisions are left out."""
BEFORE = 0.5
"""The weight of problems that were timed with the kernels before."""
TRAINING = Training(
    hidden=32, decay=3e-4, drawn_share=0.05, together=0.98,
    # What is chosen is 4% underestimated without it, other kernels of few rows by 1 to 6%.
    level=0.02,
)  # fmt: skip


@functools.cache
def kernels(layouts: str) -> dict[int, KernelKey]:
    """The kernels of bf16 in `full` by the thread blocks of their clusters."""
    wanted = [gemm_few_sm90.cell(CutlassDtype.BF16, layouts, ranks) for ranks in gemm_few_sm90.RANKS_OF_ROWS]
    built = set(expand("full", [SmArch.SM90A]))
    return {key.cluster[2]: key for key in wanted if key in built}


def divisions(
    m: int, n: int, k: int, layouts: str, device: Device
) -> Iterator[tuple[tuple[int, int, int], float, Sequence[float]]]:
    """Every division of a problem: thread blocks in a cluster, how many share the few rows, rows of weights in a tile.

    With it the seconds by the formula, and the network's inputs.
    """
    extents = (m, n, k, 1, k, k if layouts == "rc" else n, 0, 0)
    for ranks, key in kernels(layouts).items():
        for share, height, seconds, inputs in estimate.model.few_samples(estimate.kernel_of(key), extents, device):
            yield (ranks, share, height), seconds, inputs


def read(paths: Sequence[Path], before: Sequence[Path], layouts: str) -> Samples:
    """The divisions of files' problems with these layouts."""
    problem, weight, estimates, inputs, times = [], [], [], [], []
    count = 0
    for path in (path for path in (*paths, *before) if path.stem.endswith(layouts)):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            device = DEVICES[run["machine"]["gpu"]]
            for row in run["rows"]:
                timed = {tuple(entry[:3]): entry[3:] for entry in row["times"]}
                found = [
                    (timed[division], seconds, values)
                    for division, seconds, values in divisions(*row["shape"], layouts, device)
                    if division in timed
                ]
                least = [min(taken[place] for taken, *_ in found) for place in range(len(found[0][0]))]
                for taken, seconds, values in found:
                    if all(time > FAR * fastest for time, fastest in zip(taken, least, strict=True)):
                        continue
                    problem.append(count)
                    weight.append(BEFORE if path in before else 1.0)
                    estimates.append(math.log(seconds))
                    inputs.append((*values, float(path in before)))
                    times.append([*(math.log(time * 1e-6) for time in taken), math.nan][: len(OUTPUTS)])
                count += 1
    return Samples(
        np.array(problem), np.array(weight, np.float32), np.array(estimates, np.float32),
        np.array(inputs, np.float32), np.array(times, np.float32), np.ones(len(problem), np.float32),
        np.array(problem),
    )  # fmt: skip


def text(layouts: str, network: Network, samples: Samples) -> str:
    """A network as C++, with the clusters that it was trained for."""
    # Not the input that says whose kernels they are.
    parts = ",\n     ".join(network.text(samples.inputs[:, :-1], TRAINING.level))
    return f"inline constexpr FewCorrection {LAYOUTS[layouts]} = {{\n    {sum(kernels(layouts))},\n    {{{parts}}}}};\n"


def main() -> int:
    """Fits and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="timings of today's kernels")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="of kernels that added K up otherwise")
    parser.add_argument("--leave-out", type=int, default=0, metavar="N", help="cross-validate over N parts")
    parser.add_argument("--out", type=Path, help="few_correction.inc, to write")
    arguments = parser.parse_args()
    written = ["// Written by benchmarks/fit_few.py; correction.h says what it is.\n// clang-format off\n"]
    for layouts in LAYOUTS:
        samples = read(arguments.files, arguments.before, layouts)
        print(layouts, "the formula:", told(losses(samples, np.zeros_like(samples.times)), OUTPUTS))
        if arguments.leave_out:
            of_others = unseen(samples, TRAINING, arguments.leave_out)
            print(layouts, "left out:", told(losses(samples, of_others), OUTPUTS))
        else:
            network = trained(samples, TRAINING)
            print(layouts, "fitted:", told(losses(samples, corrections(network, samples)), OUTPUTS))
            written.append(text(layouts, network, samples))
    if arguments.out and not arguments.leave_out:
        arguments.out.write_text("".join(written) + "// clang-format on\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
