r"""Fits the correction of the model's estimates for kernels (kernel_correction.inc) to sweeps over all kernels.

    cd benchmarks/results
    sweeps=$(ls *-27-h100-*sweep-seed2*.json *-26-*fp8-sweep-seed{182,s156}*.json \
        *-28-h?00-*sweep-seed{2*,30[048],31[2468]}.json *-h200-fp8-sweep-seed3{2,3}[02468].json)
    OMP_NUM_THREADS=1 python ../fit_kernels.py $sweeps --out ../../cpp/src/kernel_correction.inc
    OMP_NUM_THREADS=1 python ../fit_kernels.py $sweeps --leave-out 6

The files are those of sweep.py (fit_estimate.py says what they hold). A network (network.py) for 16-bit elements and
one for fp8 correct the logarithm of the estimate of a launch: of each kernel with the launch options that the formulas
choose, and, where it divides K, with each number of slices that the model weighs. 16-bit kernels for few rows have a
correction of their own, which this one leaves alone and compares with: run fit_few.py before, and build the package
with what it wrote. `--leave-out N` says what the choice loses on shapes that the network has not seen, N times a Nth of
all, by their class. Nothing is launched.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fit_estimate import Row, read, taken
from network import Floats, Network, Samples, Training, corrections, losses, told, trained, unseen

from atomr_cutlass import _core
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.pipeline import estimate

FAR = 1.45
"""Times the least of a problem: launches that are estimated slower are left out."""
FEWER = {"bf16": {"NVIDIA H200": 2.0}, "e4m3": {"NVIDIA H200": 4.0}}
"""The weights of problems by the GPU, where fewer were timed there, for each network."""
LARGEST_FLOPS, LARGEST_WEIGHT = 2e11, 2.5
"""From so many operations on problems count more: few are drawn, and a percent of them is longer than others are."""
TRAINING = {
    "bf16": Training(hidden=32, decay=1e-3, drawn_share=0.2, together=0.95),
    "e4m3": Training(hidden=32, decay=2e-3, drawn_share=0.4, together=0.95),
}
"""Of the networks, by the elements that sweeps multiply."""
INPUTS = dict(zip(TRAINING, _core.CORRECTION_INPUTS, strict=True))
"""The numbers of the networks' inputs."""


def samples(rows: Sequence[Row]) -> Samples:
    """The launches of each problem that the model weighs, as far as they were timed."""
    problem, estimates, inputs, times, corrected, shape = [], [], [], [], [], []
    shapes: dict[tuple[int, ...], int] = {}
    for number, row in enumerate(rows):
        found = []
        for (_, kernel, shared_bytes, places), timings in zip(row.entries, row.timings, strict=True):
            timed = {split_k for split_k, *_ in timings}
            for extents in (row.extents[place] for place in places if not row.extents[place][7]):  # nothing is copied
                is_corrected = estimate.model.is_corrected(kernel, extents)
                for slices in timed.intersection(estimate.model.slices(kernel, extents, row.device)):
                    launch, values = estimate.model.kernel_sample(kernel, extents, row.device, shared_bytes, slices)
                    options = slices, launch.swizzle, launch.raster, launch.width
                    values = values[: INPUTS[row.dtype]]
                    found.append((math.log(launch.seconds), values, math.log(taken(timings, options)), is_corrected))
        least = min(seconds for seconds, *_ in found)
        for seconds, values, time, changes in found:
            if seconds <= least + math.log(FAR):
                problem.append(number)
                estimates.append(seconds)
                inputs.append(values)
                times.append([time])
                corrected.append(changes)
                shape.append(shapes.setdefault(row.shape, len(shapes)))
    of_rows = [
        FEWER[row.dtype].get(row.device.name, 1.0)
        * (LARGEST_WEIGHT if 2 * math.prod(row.shape) > LARGEST_FLOPS else 1.0)
        for row in rows
    ]
    weight = np.array(of_rows, np.float32)[problem]
    return Samples(
        np.array(problem), weight, np.array(estimates, np.float32), np.array(inputs, np.float32),
        np.array(times, np.float32), np.array(corrected, np.float32), np.array(shape),
    )  # fmt: skip


def print_losses(rows: Sequence[Row], made: Samples, corrected: Floats, title: str) -> None:
    """Prints what the choice loses: all in all, and by class."""
    every = losses(made, corrected)[0]
    for group in ("", *sorted({row.group for row in rows})):
        chosen = np.array([group in ("", row.group) for row in rows])
        print(f"{title}, {told([every[chosen]], [group or 'all'])}", flush=True)


def text(network: Network, made: Samples, how: Training) -> str:
    """The network as C++."""
    known = made.inputs[made.corrected > 0]
    parts = ",\n     ".join(network.text(known, how.level))
    return f"    {{{parts}}}"


def main() -> int:
    """Fits and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", type=Path, nargs="+", help="JSON files with sweeps")
    parser.add_argument("--leave-out", type=int, default=0, metavar="N", help="cross-validate over N parts")
    parser.add_argument("--out", type=Path, help="kernel_correction.inc, to write")
    arguments = parser.parse_args()
    keys = {key.name: key for key in expand("full", [SmArch.SM90A])}
    rows = [row for path in arguments.sweeps for row in read(path, keys)]
    networks = []
    for dtype, how in TRAINING.items():
        problems = [row for row in rows if row.dtype == dtype]
        if not problems:
            parser.error(f"no sweep of {dtype}: the file holds a network for each of {', '.join(TRAINING)}")
        made = samples(problems)
        print_losses(problems, made, np.zeros_like(made.times), f"{dtype}, the formulas")
        if arguments.leave_out:
            print_losses(problems, made, unseen(made, how, arguments.leave_out), f"{dtype}, left out")
            continue
        network = trained(made, how)
        of_all = corrections(network, made)
        print_losses(problems, made, of_all, f"{dtype}, fitted")
        print(f"{dtype}, corrections {np.quantile(of_all, [0, 0.01, 0.5, 0.99, 1])}")
        networks.append(text(network, made, how))
    if arguments.out and not arguments.leave_out:
        head = "// Written by benchmarks/fit_kernels.py; correction.h says what it is.\n// clang-format off\n"
        body = ",\n".join(networks)
        networks_text = f"inline constexpr KernelCorrection kKernels = {{\n{body}}};\n"
        arguments.out.write_text(f"{head}{networks_text}// clang-format on\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
