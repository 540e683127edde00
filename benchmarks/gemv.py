"""A matrix times a vector in bf16, against PyTorch's `mv`, in alternation.

    python benchmarks/gemv.py --seed 7 --out gemv.json

Shapes are those of the weights of "few rows" in `shapes.py`, aligned and misaligned ones, and some that are named here;
row-major and column-major. Timings are those of benchmarks/gemm_random.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import Call, Results, Row, compared, difference, gpu, means, set_count
from shapes import draw, purpose

import atomr_cutlass as ac

NAMED = ((4096, 4096), (28672, 4096), (4096, 14336), (4095, 4095))
"""M x K: projections of Llama-3 8B, and one whose rows begin anywhere."""
LAYOUTS = ("row", "column")


@dataclass(frozen=True)
class Case:
    """A product to time: A (M, K), x (K,)."""

    group: str
    m: int
    k: int
    layout: str

    @property
    def aligned(self) -> bool:
        """Whether what is contiguous begins at multiples of 16 bytes."""
        return (self.k if self.layout == "row" else self.m) % 8 == 0

    def __str__(self) -> str:
        return f"{self.group} {self.layout} {self.m}x{self.k}"


@dataclass(frozen=True)
class Operands:
    """The operands of one call."""

    a: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor


def operand_sets(case: Case, l2_sets: int) -> list[Operands]:
    """Sets of random operands."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    def matrix() -> torch.Tensor:
        return random(case.m, case.k) if case.layout == "row" else random(case.k, case.m).T

    return [Operands(matrix(), random(case.k), random(case.m)) for _ in range(l2_sets)]


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--seed", type=int, default=1, help="of the shapes: even for fitting, odd for acceptance")
    parser.add_argument("--count", type=int, default=20, help="aligned shapes; a quarter as many misaligned ones")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no shape after this time")
    arguments = parser.parse_args()
    device = gpu(arguments.seed)
    if device is None:
        return 1
    results = Results(arguments.out, seeds={arguments.seed: purpose(arguments.seed)})
    shapes = [("named", m, k) for m, k in NAMED]
    for aligned, count in ((True, arguments.count), (False, arguments.count // 4)):
        shapes += [("random", of.n, of.k) for of in draw(["few rows"], count, arguments.seed, aligned=aligned)]

    def measured(case: Case) -> None:
        sets = operand_sets(case, set_count(2 * case.m * case.k, device))
        calls: dict[str, Call] = {
            "ours": lambda arrays: ac.gemv(arrays.a, arrays.x, out=arrays.out),
            "torch": lambda arrays: torch.mv(arrays.a, arrays.x, out=arrays.out),
        }
        calls["torch"](sets[0])
        theirs = sets[0].out.clone()
        calls["ours"](sets[0])
        row: Row = {
            "group": case.group, "shape": [case.m, case.k], "layout": case.layout, "aligned": case.aligned,
            "difference": difference(sets[0].out, theirs),
            **compared(calls, sets, arguments.rounds, 2 * case.m * case.k, 0.007),
        }  # fmt: skip
        results.rows.append(row)
        print(f"{case!s:<34}{row['us']:>9} us, torch {row['torch_us']:>9} us: {row['torch_ratio']:.3f}", flush=True)
        results.values["means"] = means(results.rows, _group)

    results.run([Case(*shape, layout) for shape in shapes for layout in LAYOUTS], measured, arguments.seconds)
    return results.finish()


def _group(row: Row) -> str:
    """Whose shape it is, the layout, and whether pieces of 16 bytes can be read."""
    return f"{row['group']} {row['layout']} {'aligned' if row['aligned'] else 'misaligned'}"


if __name__ == "__main__":
    sys.exit(main())
