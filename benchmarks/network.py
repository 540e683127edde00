"""Networks of one hidden layer that correct the model's estimates (cpp/src/correction.h), trained for the choice.

A network gives the logarithm of a launch's time over its estimate, for each of some outputs. The objective is how far
the corrected estimates of a problem's fast launches are off from one another, some of how far they are off all in all,
and how much longer a launch takes that is drawn by them. The same samples give the same numbers on as many threads
(OMP_NUM_THREADS).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes:
        hidden: units.
        decay: of the weights.
        drawn_share: the weight of the part of the objective that is about drawn launches.
        together: the share of a problem's mean error that does not count.
        level: what is added to all logarithms.
        drawn: how much slower, as a logarithm, a launch may be estimated and still be drawn.
        steps: of gradient descent (Adam) over all samples.
        rate: of the first step; it falls to nearly none.
    """

    hidden: int
    decay: float
    drawn_share: float
    together: float
    level: float = 0.0
    drawn: float = 0.03
    steps: int = 3000
    rate: float = 0.015


@dataclass
class Samples:
    """Launches for problems, those of a problem one after the other.

    Attributes:
        problem: of each launch, from 0.
        weight: of each launch's problem.
        estimates: logarithms of the seconds that the formulas say.
        inputs: of the network, a row for each launch.
        times: logarithms of seconds, a column for each output; nan where there is none.
        corrected: 1, or 0 for launches whose estimates stay as they are.
        shape: of each launch's problem, from 0: problems of the same shape are left out together.
    """

    problem: NDArray[np.int64]
    weight: Floats
    estimates: Floats
    inputs: Floats
    times: Floats
    corrected: Floats
    shape: NDArray[np.int64]

    def of(self, problems: NDArray[np.int64]) -> Samples:
        """Those of some problems."""
        chosen = np.isin(self.problem, problems)
        _, problem = np.unique(self.problem[chosen], return_inverse=True)
        return Samples(
            problem, self.weight[chosen], self.estimates[chosen], self.inputs[chosen], self.times[chosen],
            self.corrected[chosen], self.shape[chosen],
        )  # fmt: skip

    def parts(self, count: int) -> list[NDArray[np.int64]]:
        """The problems in so many parts, drawn at random, always the same."""
        order = np.random.default_rng(0).permutation(int(self.shape.max()) + 1)
        return [np.unique(self.problem[np.isin(self.shape, order[part::count])]) for part in range(count)]


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

    def text(self, known: Floats, level: float) -> list[str]:
        """The numbers in C++, for inputs as they are: parts of an initializer of `Network`.

        Args:
            known: rows of inputs that were trained with, without those at their ends that the C++ has not.
            level: is added to the outputs.
        """
        hidden = self.weights[0] / self.wide[:, None]
        constants = self.weights[1] - self.middle @ hidden
        rows = np.concatenate([hidden[: known.shape[1]], constants[None]])
        outputs = np.concatenate([self.weights[2], self.weights[3][None] + level]).T
        return [_row(known.min(0)), _row(known.max(0)), _rows(rows), _rows(outputs)]


def _row(values: Floats) -> str:
    return "{" + ", ".join(f"{float(value):.6e}f" for value in values) + "}"


def _rows(matrix: Floats) -> str:
    return "{\n" + ",\n".join(f"     {_row(values)}" for values in matrix) + "}"


def trained(samples: Samples, how: Training) -> Network:
    """The network that fits samples best, by gradient descent (Adam) over all of them."""
    random = np.random.default_rng(0)
    starts = np.searchsorted(samples.problem, np.arange(samples.problem[-1] + 1))

    def of_problem(values: Floats) -> Floats:
        return np.add.reduceat(values, starts)

    outputs = samples.times.shape[1]
    known = ~np.isnan(samples.times)
    least = np.minimum.reduceat(np.where(known, samples.times, 0), starts)[samples.problem]  # logarithms below 0
    loss = np.minimum(np.exp(np.where(known, samples.times - least, 0)) - 1, 0.5).astype(np.float32)
    near = np.where(known, np.exp(-4 * loss) + 0.02, 0)
    sums = np.add.reduceat(near, starts)
    weight = np.where(known, near / np.maximum(sums[samples.problem], 1e-9), 0)
    weight *= samples.weight[:, None]
    weight = (weight / np.maximum(weight.sum(0), 1e-9)).astype(np.float32)
    target = np.where(known, samples.times, 0).astype(np.float32)
    problems = [max(1, int((sums[:, output] > 0).sum())) for output in range(outputs)]

    middle, wide = samples.inputs.mean(0), samples.inputs.std(0) + 1e-6
    count = samples.inputs.shape[1]
    weights = [
        random.normal(0, 1 / math.sqrt(count), (count, how.hidden)), np.zeros(how.hidden),
        random.normal(0, 0.3 / math.sqrt(how.hidden), (how.hidden, outputs)), np.zeros(outputs),
    ]  # fmt: skip
    made = Network([each.astype(np.float32) for each in weights], middle, wide)
    scaled = (samples.inputs - middle) / wide
    first, second = ([np.zeros_like(each) for each in made.weights] for _ in range(2))
    for step in range(1, how.steps + 1):
        units, guessed = made(samples.inputs)
        guessed *= samples.corrected[:, None]
        gradient = np.zeros_like(guessed)
        for output in range(outputs):
            of, there = weight[:, output], known[:, output]
            off = np.where(there, samples.estimates + guessed[:, output] - target[:, output], 0)
            mean = (of_problem(of * off) / np.maximum(of_problem(of), 1e-12))[samples.problem]
            gradient[:, output] = 2 * of * (off - how.together * mean)
            score = np.where(there, -(samples.estimates + guessed[:, output]) / how.drawn, -1e9)
            drawn = np.exp(score - np.maximum.reduceat(score, starts)[samples.problem]) * there
            drawn /= np.maximum(of_problem(drawn), 1e-30)[samples.problem]
            expected = of_problem(drawn * loss[:, output])[samples.problem]
            share = how.drawn_share / how.drawn / problems[output]
            gradient[:, output] -= share * drawn * (loss[:, output] - expected)
        gradient *= samples.corrected[:, None]
        inner = (gradient @ made.weights[2].T) * (units > 0)
        slopes = [
            scaled.T @ inner + how.decay * made.weights[0], inner.sum(0),
            units.T @ gradient + how.decay * made.weights[2], gradient.sum(0),
        ]  # fmt: skip
        rate = how.rate * (1 - step / how.steps) + 1e-4
        for place, slope in enumerate(slopes):
            first[place] = 0.9 * first[place] + 0.1 * slope
            second[place] = 0.99 * second[place] + 0.01 * slope**2
            change = first[place] / (1 - 0.9**step) / (np.sqrt(second[place] / (1 - 0.99**step)) + 1e-8)
            made.weights[place] = (made.weights[place] - rate * change).astype(np.float32)
    return made


def unseen(samples: Samples, how: Training, parts: int) -> Floats:
    """Corrections of each launch by a network that was trained without that part of the problems."""
    found = np.zeros_like(samples.times)
    every = np.arange(int(samples.problem[-1]) + 1)
    for left in samples.parts(parts):
        network = trained(samples.of(np.setdiff1d(every, left)), how)
        chosen = np.isin(samples.problem, left)
        found[chosen] = corrections(network, samples)[chosen]
    return found


def corrections(network: Network, samples: Samples) -> Floats:
    """Those of each launch."""
    return network(samples.inputs)[1] * samples.corrected[:, None]


def losses(samples: Samples, corrected: Floats) -> list[Floats]:
    """What the choice takes longer than the fastest launch of each problem of weight 1 and more, by output."""
    found = []
    for output in range(samples.times.shape[1]):
        of: list[float] = []
        for number in range(int(samples.problem[-1]) + 1):
            rows = np.flatnonzero((samples.problem == number) & ~np.isnan(samples.times[:, output]))
            if len(rows) and samples.weight[rows[0]] >= 1:
                times = samples.times[rows, output]
                chosen = np.argmin(samples.estimates[rows] + corrected[rows, output])
                of.append(math.exp(times[chosen] - times.min()) - 1)
        found.append(np.array(of, np.float32))
    return found


def told(found: Sequence[Floats], names: Sequence[str]) -> str:
    """Losses in words."""
    return "; ".join(
        f"{name} {100 * of.mean():.2f}%, 95th percentile {100 * np.quantile(of, 0.95):.1f}% ({len(of)} problems)"
        for name, of in zip(names, found, strict=True) if len(of)
    )  # fmt: skip
