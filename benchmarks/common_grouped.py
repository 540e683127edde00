"""Grouped kernels that compute several epilogue trees against kernels of one tree with the same tile, in alternation.

    python benchmarks/common_grouped.py --out common_grouped.json --jobs 12

Timings are those of benchmarks/grouped.py; all sides are compiled first, side by side. `ratio` is the common kernel's
time over that of the kernel of one tree.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import grouped
import torch
from grouped import Case, Operands
from harness import Burst, Results, alternated, compile_ahead, difference, gpu

from atomr_cutlass.epilogue.bound import GroupedFusion, GroupOperand
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue import common
from atomr_cutlass.generator.epilogue.lower import COMMON, SCALED, SCALED_COMMON, epilogue_id
from atomr_cutlass.generator.epilogue.tree import ROW
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import families, with_epilogue
from atomr_cutlass.generator.trees import bases
from atomr_cutlass.ops.grouped_gemm import plans
from atomr_cutlass.ops.grouped_gemm.kernels import GroupedSearch
from atomr_cutlass.ops.grouped_gemm.problem import OP
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.plan import Plan

ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu")
CASES = {
    "bf16": ("8x512x4096x7168", "8x4096x7168x2048", "64 skewed x4096x2048", "24 skewed x1880x2600"),
    "fp8 rows fast": ("8x512x4096x7168", "64 skewed x4096x2048", "256 of 1-32 x2048x2048"),
}


def base_of(case: Case) -> KernelKey:
    """The kernel whose tile both sides have."""
    plain = [cell for family in families() if family.op == OP for cell in family.cells(SmArch.SM90A)]
    a, math = (CutlassDtype.F8E4M3, "fast") if case.fp8 else (CutlassDtype.BF16, "default")
    found = (key for key in bases(plain) if (key.generation, key.a, key.math, key.layout_b) == ("sm90", a, math, "c"))
    return next(key for key in found if not case.fp8 or key.epilogue == SCALED)


def tree_of(activation: str | None) -> Any:
    """The tree; None for the product alone."""
    return None if activation is None else common.bias_and_activation(CutlassDtype.BF16, activation or None)


def keys_of(case: Case) -> dict[str | None, tuple[KernelKey, KernelKey]]:
    """By activation of a biased result (None: the product alone), the kernel of one tree and the common one."""
    base = base_of(case)
    several = with_epilogue(base, SCALED_COMMON if base.epilogue == SCALED else COMMON, base.d)
    found: dict[str | None, tuple[KernelKey, KernelKey]] = {None: (base, several)}
    for activation in ACTIVATIONS:
        epilogue = epilogue_id(base.epilogue, tree_of(activation).program)
        found[activation] = (with_epilogue(base, epilogue, base.d), several)
    return found


def plan_of(case: Case, one: Operands, bias: torch.Tensor, activation: str | None, key: KernelKey) -> Plan:
    """A plan of this very kernel."""
    problem, tree = grouped.problem_of(case, one), tree_of(activation)
    if tree is not None:
        fused = GroupedFusion(tree, (GroupOperand("bias", ROW, (grouped.spec(bias),)),))
        problem = dataclasses.replace(problem, fusion=fused)
    device = devices.get(0)
    candidate = select.candidate_of(GroupedSearch(problem, device), key)
    return plans.make(problem, like=one.a, candidate=candidate)


def measure(case: Case, results: Results, rounds: int) -> None:
    """Times all kernels of a case in turns and adds a row for each tree."""
    sets = grouped.operand_sets(case, devices.get(0))
    bias = torch.randn(len(case.sizes), case.n, dtype=torch.bfloat16, device="cuda")
    bursts, checked = {}, {}
    for activation, pair in keys_of(case).items():
        found = []
        for side, key in zip(("single", "common"), pair, strict=True):
            plan = plan_of(case, sets[0], bias, activation, key)
            more = [] if activation is None else [bias]

            def call(one: Operands, plan: Plan = plan, more: list[torch.Tensor] = more) -> object:
                return plan(*one.given[:-1], *more, one.out)

            sets[0].out.fill_(float("nan"))
            call(sets[0])
            found.append(sets[0].out.clone())
            bursts[activation or ("product" if activation is None else "bias"), side] = Burst(call, sets)
        checked[activation or ("product" if activation is None else "bias")] = difference(*found)
    times = alternated(bursts, rounds)
    for name, apart in checked.items():
        single, several = times[name, "single"], times[name, "common"]
        ratios = [several_us / single_us for several_us, single_us in zip(several, single, strict=True)]
        row = {
            "kind": case.kind,
            "case": case.name,
            "tree": name,
            "difference": apart,
            "single_us": round(statistics.median(single) * 1e6, 2),
            "common_us": round(statistics.median(several) * 1e6, 2),
            "ratio": round(statistics.median(ratios), 4),
        }
        results.rows.append(row)
        print(
            f"{case!s:<40}{name:<10}{row['single_us']:>10}{row['common_us']:>10}{row['ratio']:>8}  {apart}", flush=True
        )


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--rounds", type=int, default=13, help="rounds of the comparison")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="kernels compiled at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no case after this time")
    arguments = parser.parse_args()
    device = gpu()
    if device is None:
        return 1
    results = Results(arguments.out)
    cases = [Case(kind, name, *grouped.SHAPES[name]) for kind, names in CASES.items() for name in names]
    compile_ahead((key for case in cases for pair in keys_of(case).values() for key in pair), device, arguments.jobs)
    results.run(cases, lambda case: measure(case, results, arguments.rounds), arguments.seconds)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
