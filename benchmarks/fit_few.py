r"""Fits the correction of the model's estimates for few rows (few_correction.inc) to timings of every division.

    cd benchmarks/results
    python ../fit_few.py 2026-11-2[67]-few-divisions-{sent,bound,tall}-*.json \
        --before 2026-11-26-few-divisions-r?.json --out ../../cpp/src/few_correction.inc
    python ../fit_few.py 2026-11-2[67]-few-divisions-{sent,bound,tall}-*.json --before ... --leave-out 4

Files of divisions have `runs`: a GPU and rows of a problem's shape and `times`, lists of thread blocks in a cluster,
how many of them share the few rows, rows of weights in a tile, microseconds, and of some the microseconds with bound
weights. Their names end in the layouts of A and B. Those after `--before` are of kernels that added up divided K
otherwise: they teach what both have in common.

A network of one hidden layer corrects the logarithm of a division's estimate (few_correction.h). It is trained for the
choice: the objective is how far the estimates of a problem's fast divisions are off from one another, and how much
longer a division takes that is drawn by the estimates. The same files give the same numbers. `--leave-out N` says
what the choice loses on problems that the network has not seen, N times a Nth of all. Nothing is launched.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fit_estimate import DEVICES
from numpy.typing import NDArray

from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.pipeline import estimate

Floats = NDArray[np.float32]

LAYOUTS = {"rc": "kFewAlongK", "rr": "kFewRows"}
"""The networks by the layouts of A and B."""
HIDDEN, OUTPUTS = 32, 2
FAR = 1.7
"""Times the fastest: slower divisions are left out."""
STEPS, RATE, DECAY = 3000, 0.015, 3e-4
LEVEL = 0.02
"""Added to all logarithms: what is chosen is 4% underestimated without it, other kernels of few rows by 1 to 6%."""
DRAWN, DRAWN_SHARE = 0.03, 0.05
"""How much slower a division may be estimated and still be drawn, and the weight of that part of the objective."""


@dataclass
class Samples:
    """Divisions of problems, those of a problem one after the other.

    Attributes:
        problem: of each division, from 0.
        ours: whether the timings are of today's kernels.
        estimates: logarithms of the formula's seconds.
        inputs: of the network; the last one says whether the timings are of the kernels before.
        times: logarithms of seconds, of both outputs; nan where there is none.
    """

    problem: NDArray[np.int64]
    ours: NDArray[np.bool_]
    estimates: Floats
    inputs: Floats
    times: Floats

    def of(self, problems: NDArray[np.int64]) -> Samples:
        """Those of some problems."""
        chosen = np.isin(self.problem, problems)
        _, problem = np.unique(self.problem[chosen], return_inverse=True)
        return Samples(problem, self.ours[chosen], self.estimates[chosen], self.inputs[chosen], self.times[chosen])


def kernels(layouts: str) -> dict[int, KernelKey]:
    """The kernels of bf16 in `full` by the thread blocks of their clusters."""
    wanted = [gemm_few_sm90.cell(CutlassDtype.BF16, layouts, ranks) for ranks in gemm_few_sm90.RANKS_OF_ROWS]
    built = set(expand("full", [SmArch.SM90A]))
    return {key.cluster[2]: key for key in wanted if key in built}


def read(paths: Sequence[Path], before: Sequence[Path], layouts: str) -> Samples:
    """The divisions of files' problems with these layouts."""
    keys = kernels(layouts)
    problem, ours, estimates, inputs, times = [], [], [], [], []
    count = 0
    for path in (path for path in (*paths, *before) if path.stem.endswith(layouts)):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            device = DEVICES[run["machine"]["gpu"]]
            for row in run["rows"]:
                m, n, k = row["shape"]
                extents = (m, n, k, 1, k, k if layouts == "rc" else n, 0, 0)
                timed = {tuple(entry[:3]): entry[3:] for entry in row["times"] if entry[0] in keys}
                found = [
                    (timed[ranks, share, height], seconds, values)
                    for ranks, key in keys.items()
                    for share, height, seconds, values in estimate.model.few_samples(
                        estimate.kernel_of(key), extents, device
                    )
                    if (ranks, share, height) in timed
                ]
                least = [min(taken[place] for taken, *_ in found) for place in range(len(found[0][0]))]
                for taken, seconds, values in found:
                    if all(time > FAR * fastest for time, fastest in zip(taken, least, strict=True)):
                        continue
                    problem.append(count)
                    ours.append(path not in before)
                    estimates.append(math.log(seconds))
                    inputs.append((*values, float(path in before)))
                    times.append([*(math.log(time * 1e-6) for time in taken), math.nan][:OUTPUTS])
                count += 1
    return Samples(
        np.array(problem), np.array(ours), np.array(estimates, np.float32), np.array(inputs, np.float32),
        np.array(times, np.float32),
    )  # fmt: skip


@dataclass
class Network:
    """Weights of the hidden units, their constants, the same of the outputs; `middle` and `wide` scale the inputs."""

    weights: list[Floats]
    middle: Floats
    wide: Floats

    def __call__(self, inputs: Floats) -> tuple[Floats, Floats]:
        """The hidden units, and the corrections."""
        scaled = (inputs - self.middle) / self.wide
        units = np.maximum(scaled @ self.weights[0] + self.weights[1], 0)
        return units, units @ self.weights[2] + self.weights[3]

    def folded(self) -> tuple[Floats, Floats]:
        """Rows of hidden units and outputs for inputs as they are, each with its constant at the end.

        Without the input that says whose kernels they are.
        """
        hidden = self.weights[0] / self.wide[:, None]
        constants = self.weights[1] - self.middle @ hidden
        rows = np.concatenate([hidden[:-1], constants[None]]).T
        return rows, np.concatenate([self.weights[2], self.weights[3][None] + LEVEL]).T


def trained(samples: Samples) -> Network:
    """The network that fits samples best, by gradient descent (Adam) over all of them."""
    random = np.random.default_rng(0)
    starts = np.searchsorted(samples.problem, np.arange(samples.problem[-1] + 1))

    def of_problem(values: Floats) -> Floats:
        return np.add.reduceat(values, starts)

    known = ~np.isnan(samples.times)
    least = np.minimum.reduceat(np.where(known, samples.times, 0), starts)[samples.problem]  # logarithms below 0
    loss = np.minimum(np.exp(np.where(known, samples.times - least, 0)) - 1, 0.5).astype(np.float32)
    near = np.where(known, np.exp(-4 * loss) + 0.02, 0)
    sums = np.add.reduceat(near, starts)
    weight = np.where(known, near / np.maximum(sums[samples.problem], 1e-9), 0)
    weight *= np.where(samples.ours, 1.0, 0.5)[:, None]
    weight = (weight / np.maximum(weight.sum(0), 1e-9)).astype(np.float32)
    target = np.where(known, samples.times, 0).astype(np.float32)
    problems = [max(1, int((sums[:, output] > 0).sum())) for output in range(OUTPUTS)]

    middle, wide = samples.inputs.mean(0), samples.inputs.std(0) + 1e-6
    count = samples.inputs.shape[1]
    weights = [
        random.normal(0, 1 / math.sqrt(count), (count, HIDDEN)), np.zeros(HIDDEN),
        random.normal(0, 0.3 / math.sqrt(HIDDEN), (HIDDEN, OUTPUTS)), np.zeros(OUTPUTS),
    ]  # fmt: skip
    made = Network([each.astype(np.float32) for each in weights], middle, wide)
    scaled = (samples.inputs - middle) / wide
    first, second = ([np.zeros_like(each) for each in made.weights] for _ in range(2))
    for step in range(1, STEPS + 1):
        units, corrections = made(samples.inputs)
        gradient = np.zeros_like(corrections)
        for output in range(OUTPUTS):
            of, there = weight[:, output], known[:, output]
            off = np.where(there, samples.estimates + corrections[:, output] - target[:, output], 0)
            mean = (of_problem(of * off) / np.maximum(of_problem(of), 1e-12))[samples.problem]
            gradient[:, output] = 2 * of * (off - 0.98 * mean)
            score = np.where(there, -(samples.estimates + corrections[:, output]) / DRAWN, -1e9)
            drawn = np.exp(score - np.maximum.reduceat(score, starts)[samples.problem]) * there
            drawn /= np.maximum(of_problem(drawn), 1e-30)[samples.problem]
            expected = of_problem(drawn * loss[:, output])[samples.problem]
            gradient[:, output] -= DRAWN_SHARE / DRAWN / problems[output] * drawn * (loss[:, output] - expected)
        inner = (gradient @ made.weights[2].T) * (units > 0)
        slopes = [
            scaled.T @ inner + DECAY * made.weights[0], inner.sum(0),
            units.T @ gradient + DECAY * made.weights[2], gradient.sum(0),
        ]  # fmt: skip
        rate = RATE * (1 - step / STEPS) + 1e-4
        for place, slope in enumerate(slopes):
            first[place] = 0.9 * first[place] + 0.1 * slope
            second[place] = 0.99 * second[place] + 0.01 * slope**2
            change = first[place] / (1 - 0.9**step) / (np.sqrt(second[place] / (1 - 0.99**step)) + 1e-8)
            made.weights[place] = (made.weights[place] - rate * change).astype(np.float32)
    return made


def losses(samples: Samples, corrections: Floats) -> list[Floats]:
    """What the choice takes longer than the fastest division of each problem, by output."""
    found = []
    for output in range(OUTPUTS):
        of: list[float] = []
        for number in range(int(samples.problem[-1]) + 1):
            rows = np.flatnonzero((samples.problem == number) & ~np.isnan(samples.times[:, output]))
            if len(rows) and samples.ours[rows[0]]:
                times = samples.times[rows, output]
                chosen = np.argmin(samples.estimates[rows] + corrections[rows, output])
                of.append(math.exp(times[chosen] - times.min()) - 1)
        found.append(np.array(of, np.float32))
    return found


def told(found: Sequence[Floats]) -> str:
    """Losses in words."""
    names = ("as they are", "weights bound")
    return "; ".join(
        f"{name} {100 * of.mean():.2f}%, 95th percentile {100 * np.quantile(of, 0.95):.1f}% ({len(of)} problems)"
        for name, of in zip(names, found, strict=True) if len(of)
    )  # fmt: skip


def text(layouts: str, network: Network, samples: Samples) -> str:
    """A network as C++, with the clusters and the ranges of the inputs that it was trained for."""

    def row(values: Floats) -> str:
        return "{" + ", ".join(f"{float(value):.6e}f" for value in values) + "}"

    def rows(matrix: Floats) -> str:
        return ",\n".join(f"     {row(values)}" for values in matrix)

    hidden, outputs = network.folded()
    inputs = samples.inputs[:, :-1]
    clusters = str(sum(kernels(layouts)))
    parts = [clusters, row(inputs.min(0)), row(inputs.max(0)), f"{{\n{rows(hidden)}}}", f"{{\n{rows(outputs)}}}"]
    return f"inline constexpr FewCorrection {LAYOUTS[layouts]} = {{\n    " + ",\n    ".join(parts) + "};\n"


def main() -> int:
    """Fits and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="timings of today's kernels")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="of kernels that added K up otherwise")
    parser.add_argument("--leave-out", type=int, default=0, metavar="N", help="cross-validate over N parts")
    parser.add_argument("--out", type=Path, help="few_correction.inc, to write")
    arguments = parser.parse_args()
    written = ["// Written by benchmarks/fit_few.py; few_correction.h says what it is.\n// clang-format off\n"]
    for layouts in LAYOUTS:
        samples = read(arguments.files, arguments.before, layouts)
        nothing = np.zeros_like(samples.times)
        print(layouts, "the formula:", told(losses(samples, nothing)))
        if arguments.leave_out:
            order = np.random.default_rng(0).permutation(int(samples.problem[-1]) + 1)
            unseen = nothing.copy()
            for part in range(arguments.leave_out):
                left = order[part :: arguments.leave_out]
                network = trained(samples.of(np.setdiff1d(order, left)))
                chosen = np.isin(samples.problem, left)
                unseen[chosen] = network(samples.inputs[chosen])[1]
            print(layouts, "left out:", told(losses(samples, unseen)))
        else:
            network = trained(samples)
            print(layouts, "fitted:", told(losses(samples, network(samples.inputs)[1])))
            written.append(text(layouts, network, samples))
    if arguments.out and not arguments.leave_out:
        arguments.out.write_text("".join(written) + "// clang-format on\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
