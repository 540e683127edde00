"""GEMM over shapes drawn at random, and over the layers of named models, against its peers, in alternation.

    python benchmarks/gemm_random.py --seed 7 --count 100 --out random.json            # classes of shapes.py
    python benchmarks/gemm_random.py --seed 7,9 --classes "few rows,mid" --layouts rr --aligned --out some.json
    python benchmarks/gemm_random.py --suites llama-3-8b,deepseek-v3 --lt --out suites.json
    python benchmarks/gemm_random.py --seed 4 --lt --tuned 20 --bound --triton 2 --out peers.json
    python benchmarks/gemm_random.py --seed 7 --multiple 128 --aligned --out multiples.json  # as layers of models have
    python benchmarks/gemm_random.py --seed 7 --dtype tf32 --layouts rc,rr --aligned --out tf32.json  # other types
    python benchmarks/gemm_random.py --seed 4 --done random.json --part 0/2 --out rest.json  # what another run left

Ours is the kernel that the selection takes. The sides it is compared with:

    torch      `torch.matmul`: cuBLAS as PyTorch calls it
    lt         --lt: the fastest of all candidates of cuBLASLt's heuristic
    tuned      --tuned N: the fastest of all our eligible kernels and their launch options, of the first N shapes of
               each group; what the choice takes longer is its regret
    bound      --bound: the kernel chosen for weights that are bound to the plan, of at most 128 rows
    triton     --triton N: what `torch.compile` makes with max-autotune of Triton alone, of the first N shapes
    invariant  --batch-invariant: ours with `batch_invariant`

A timing replays a CUDA graph of calls that rotate through at least three sets of operands and four times L2. Timings of
the sides alternate, with pauses; a side that is the fastest of many was chosen by other timings. The bandwidth of
reading alone is measured in the same run, clock and power beside every row. `report.py` makes tables and plots.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cublaslt import CublasLt
from gemm import KINDS, Case, Operands, our_problem, torch_call
from harness import (
    L2_TIMES,
    PAUSE_SECONDS,
    QUICK_SECONDS,
    SETS_AT_LEAST,
    Burst,
    Call,
    Results,
    compared,
    difference,
    fastest_first,
    gpu,
    torch_dtype,
)
from recorded import OTHERS, identity, read
from report import limit_seconds, summary
from shapes import CLASSES, Shape, draw, purpose, suite

import atomr_cutlass as ac
from atomr_cutlass.arrays.numerics import default_out_dtype
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate, make
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.ops.gemm.suites import MODELS
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.planning import PlanOptions

ALIGNMENT = 256
"""Bytes at which every operand begins, as allocations do."""
BANDWIDTH_BYTES = 4 << 30
BOUND_ROWS = 128
"""Of kernels that request bound weights before the launch before them has ended."""
NEAR = 1.1
"""Times the fastest kernel: what is slower is timed with the model's launch options alone."""


class Pool:
    """Random numbers on the GPU, of which operands are views: as many sets as exceed L2, without drawing each."""

    def __init__(self, dtype: torch.dtype, elements: int, result: torch.dtype | None = None) -> None:
        """Operands of a type, integers from all that it has; results of the same type unless they have their own."""
        self._values = torch.empty(elements, dtype=dtype, device="cuda")
        piece = 1 << 26
        for start in range(0, elements, piece):
            part = self._values[start : start + piece]
            if dtype.is_floating_point:
                part.copy_(torch.randn(part.shape, device="cuda"))
            else:
                part.random_(-128, 128)
        self._results = torch.empty(elements, dtype=result or dtype, device="cuda")

    @staticmethod
    def elements(shapes: Sequence[Shape], l2_bytes: int, element_bytes: int) -> int:
        """As many as three sets of the largest problem have, and four times L2."""
        sizes = ([size + ALIGNMENT for size in _sizes(shape)] for shape in shapes)
        most = max(max(first + second, result) for first, second, result in sizes)
        return max(SETS_AT_LEAST * most, L2_TIMES * l2_bytes // element_bytes + (1 << 20))

    def sets(self, shape: Shape, layouts: str, l2_bytes: int) -> list[Operands]:
        """Sets of operands, one behind the other in memory."""
        size = self._values.element_size()
        step = ALIGNMENT // size
        first, second, result = (math.ceil(extent / step) * step for extent in _sizes(shape))
        count = max(SETS_AT_LEAST, math.ceil(L2_TIMES * l2_bytes / ((first + second) * size)))
        count = min(count, self._values.numel() // (first + second), self._results.numel() // result)

        def view(values: torch.Tensor, start: int, rows: int, columns: int) -> torch.Tensor:
            found = values[start : start + shape.batch * rows * columns].view(shape.batch, rows, columns)
            return found if shape.batch > 1 else found[0]

        def matrix(start: int, rows: int, columns: int, layout: str) -> torch.Tensor:
            if layout == "r":
                return view(self._values, start, rows, columns)
            return view(self._values, start, columns, rows).mT

        made = []
        for index in range(count):
            start = index * (first + second)
            a = matrix(start, shape.m, shape.k, layouts[0])
            b = matrix(start + first, shape.k, shape.n, layouts[1])
            made.append(Operands(a, b, view(self._results, index * result, shape.m, shape.n)))
        return made


def _sizes(shape: Shape) -> tuple[int, int, int]:
    return (shape.batch * shape.m * shape.k, shape.batch * shape.k * shape.n, shape.batch * shape.m * shape.n)


def read_bandwidth() -> float:
    """Bytes a second of summing a large array: the median of ten."""
    values = torch.ones(BANDWIDTH_BYTES // 4, dtype=torch.float32, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(11):
        start.record()
        values.sum()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return BANDWIDTH_BYTES / statistics.median(seconds[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Sides


def fastest(problem: GemmProblem, sets: Sequence[Operands], device: devices.Device) -> Plan:
    """The plan with the fastest of the table's kernels, as `ac.tune` seeks it.

    Every kernel made for this arch is launched as the model would launch it; those near the fastest with each of their
    launch options; the fastest few and the model's choice are timed again in alternation.
    """
    search = GemmSearch(problem, device)
    candidates = [candidate for candidate in select.rank(search) if candidate.key.arch is device.arch]
    plans: list[Plan] = []
    bursts: dict[int, Burst] = {}

    def race(candidate: Any) -> None:
        try:
            plan = from_candidate(problem, candidate, PlanOptions(like=sets[0].a))
        except ac.UnsupportedError:
            return
        bursts[len(plans)] = Burst(planned(plan), sets, QUICK_SECONDS)
        plans.append(plan)

    for candidate in candidates:
        race(candidate)
    if not plans:
        raise ValueError("the table has no kernel of this arch")
    once = {place: burst() for place, burst in bursts.items()}
    near = [plans[place].main for place, seconds in once.items() if seconds <= NEAR * min(once.values())]
    for candidate in near:
        for launch in search.launches(candidate):
            if launch != candidate:
                race(launch)
    return plans[fastest_first(bursts, first=0)[0]]


def planned(plan: Plan) -> Call:
    """A plan's launch, with a set of operands."""
    return lambda arrays: plan(arrays.a, arrays.b, out=arrays.out)


def bound_weights(shape: Shape, case: Case, sets: Sequence[Operands]) -> Call:
    """Ours with the weights of each set bound to the plan."""
    row, column = ac.GemmLayout.ROW_MAJOR, ac.GemmLayout.COL_MAJOR
    request = ac.GemmRequest(
        ac.GemmShape(shape.m, shape.n, shape.k, shape.batch),
        dtype=case.dtype,
        layout_a=row if case.layouts[0] == "r" else column,
        layout_b=row if case.layouts[1] == "r" else column,
    )
    bound = {arrays.b.data_ptr(): ac.plan(request, b=arrays.b) for arrays in sets}
    return lambda arrays: bound[arrays.b.data_ptr()](arrays.a, out=arrays.out)


def by_triton() -> Call:
    """PyTorch's product as `torch.compile` makes it by Triton; its results are PyTorch's to allocate."""
    from torch._inductor import config

    config.max_autotune_gemm_backends = "TRITON"
    torch._dynamo.reset()  # noqa: SLF001 - shapes of other cases would count as recompilations
    compiled = torch.compile(torch.matmul, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda arrays: compiled(arrays.a, arrays.b)


@dataclass
class Sides:
    """The compared sides.

    Attributes:
        backend: where ours takes its kernels from, as in `gemm`.
        lt: cuBLASLt, or None.
        tuned: shapes of each group whose fastest kernel is sought.
        triton: shapes of each group that Triton compiles.
        bound: whether ours is timed with bound weights too.
        invariant: whether ours is timed with `batch_invariant` too.
    """

    backend: str
    lt: CublasLt | None
    tuned: int
    triton: int
    bound: bool
    invariant: bool


# ----------------------------------------------------------------------------------------------------------------------
# Comparison


def compare(
    shape: Shape, case: Case, sets: Sequence[Operands], sides: Sides, number: int, rounds: int, pause: float
) -> dict[str, Any]:
    """Times all sides of one shape, the `number`th of its group, one after the other in every round."""
    device = devices.get(0)
    problem = our_problem(case, sets[0])
    plan = make(problem, like=sets[0].a, backend=sides.backend)
    calls: dict[str, Call] = {
        "ours": planned(plan),
        "torch": torch_call(case),
    }
    found: dict[str, Any] = {"difference": relative_difference(calls, sets[0])}
    if sides.invariant:
        calls["invariant"] = planned(make(problem, like=sets[0].a, backend=sides.backend, batch_invariant=True))
    if sides.bound and shape.m <= BOUND_ROWS:
        calls["bound"] = bound_weights(shape, case, sets)
    if number < sides.tuned:
        tuned = fastest(problem, sets, device)
        calls["tuned"] = planned(tuned)
        found["tuned_kernel"] = _named(tuned)
    product = None
    if sides.lt is not None:
        product = sides.lt.product(sets[0].a, sets[0].b, sets[0].out)
        product.tune(sets)
        calls["lt"] = product.call()
        found["lt_candidates"] = len(product.candidates)
    if number < sides.triton:
        calls["triton"] = by_triton()
    row = compared(calls, sets, rounds, shape.flops, pause)
    if product is not None:
        product.close()
    limit = limit_seconds(shape, device.name) if case.dtype.bits == 16 else None
    return {
        "group": shape.group,
        "shape": [shape.m, shape.n, shape.k, shape.batch],
        "aligned": shape.aligned,
        "dtype": case.kind,
        "layout": case.layouts.upper() + "R",
        "kernel": _named(plan),
        "of_limit": round(limit / row["us"] * 1e6, 4) if limit else None,
        "model_us": round(plan.main.seconds * 1e6, 2),
        **found,
        **{name: value for name, value in row.items() if not name.endswith("_tflops")},
    }


def _named(plan: Plan) -> list[Any]:
    """Kernel, slices of K, swizzle, raster order, width."""
    return [plan.kernel_name, *plan.main.options]


def relative_difference(calls: dict[str, Call], operands: Operands) -> float:
    """That of our result from PyTorch's, in norm: a check that both compute the same."""
    calls["torch"](operands)
    theirs = operands.out.clone()
    operands.out.fill_(math.nan if theirs.is_floating_point() else -1)
    calls["ours"](operands)
    return difference(operands.out, theirs)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


@dataclass(frozen=True)
class Drawn:
    """One case: a shape in layouts, the `number`th of its group.

    Attributes:
        seed: of the draw; 0 for a layer of a model.
        shape: the shape.
        layouts: of A and B.
        number: its place among those of its group, seed and layouts.
    """

    seed: int
    shape: Shape
    layouts: str
    number: int

    @property
    def identity(self) -> tuple[Any, ...]:
        """As `recorded.identity` of its row."""
        of = self.shape
        return self.seed, of.group, of.m, of.n, of.k, of.batch, self.layouts.upper() + "R"

    def __str__(self) -> str:
        return f"{self.seed} {self.layouts} {self.shape}"


def cases(arguments: argparse.Namespace) -> list[Drawn]:
    """The cases to measure: the groups by turns, so that a run that ends early has some of each."""
    layouts = arguments.layouts.split(",")
    groups: dict[Any, list[Drawn]] = {}

    def add(seed: int, shapes: Sequence[Shape]) -> None:
        for shape, each in itertools.product(shapes, layouts):
            group = groups.setdefault((seed, shape.group, each), [])
            group.append(Drawn(seed, shape.of_layouts(each), each, len(group)))

    if arguments.suites:
        rows = [int(text) for text in arguments.rows.split(",")] if arguments.rows else None
        for model in arguments.suites.split(","):
            add(0, suite(model, rows) if rows else suite(model))
    else:
        names = arguments.classes.split(",") if arguments.classes else list(CLASSES)
        aligned = True if arguments.aligned else False if arguments.misaligned else None
        for seed in arguments.seed:
            # Rows of int8 are aligned to 16 bytes where extents are multiples of 16.
            multiple = max(arguments.multiple, 16 if arguments.dtype == "i8" and aligned else 1)
            add(seed, draw(names, arguments.count, seed, aligned=aligned, multiple=multiple))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    every = [case for case in turns if case is not None]
    place, parts = (int(text) for text in arguments.part.split("/"))
    done = {identity(row) for path in arguments.done for row in read([path]).rows}
    return [case for case in every if case.number % parts == place and case.identity not in done]


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument(
        "--seed", type=lambda text: [int(part) for part in text.split(",")], default=[1],
        help="of the draw, or several: even for fitting, odd for acceptance",
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=100, help="shapes of each class and seed")
    parser.add_argument("--classes", default="", help=f"of {', '.join(CLASSES)}; default: all")
    parser.add_argument("--suites", default="", help=f"models instead: {', '.join(MODELS)}")
    parser.add_argument("--rows", default="", help="M of the suites, such as 1,16,4096")
    parser.add_argument("--layouts", default="rc", help="of A and B: one or several of rc, rr, cr, cc")
    parser.add_argument("--dtype", default="bf16", choices=[kind for kind in KINDS if kind != "3xtf32"])
    parser.add_argument("--aligned", action="store_true", help="aligned shapes only")
    parser.add_argument("--multiple", type=int, default=1, help="that N and K are of; 128 as in layers of models")
    parser.add_argument("--misaligned", action="store_true", help="misaligned shapes only")
    parser.add_argument("--lt", action="store_true", help="the best candidate of cuBLASLt too")
    parser.add_argument("--tuned", type=int, default=0, metavar="N", help="our fastest kernel too, of the first N")
    parser.add_argument("--triton", type=int, default=0, metavar="N", help="Triton too, of the first N of each group")
    parser.add_argument("--bound", action="store_true", help="ours with bound weights too")
    parser.add_argument("--batch-invariant", action="store_true", help="ours with batch_invariant too")
    parser.add_argument("--backend", default="auto", choices=("auto", "prebuilt", "jit"), help="of our kernels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds before each timing")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no shape after this time")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth shape of a group from the Ith, for several GPUs")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="results whose shapes are left out")
    parser.add_argument("--commit", help="commit that the package was built from, where that is no checkout")
    arguments = parser.parse_args()
    device = gpu(arguments.seed[0])
    if device is None:
        return 1
    every = cases(arguments)
    seeds = {} if arguments.suites else {seed: purpose(seed) for seed in arguments.seed}
    results = Results(arguments.out, seeds=seeds, read_bytes_per_second=round(read_bandwidth()))
    if arguments.commit:
        results.values["machine"]["commit"] = arguments.commit
    sides = Sides(
        arguments.backend, CublasLt() if arguments.lt else None, arguments.tuned, arguments.triton, arguments.bound,
        arguments.batch_invariant,
    )  # fmt: skip
    of_kind = Case(arguments.dtype, "rc", 1, 1, 1)
    torch.set_float32_matmul_precision("high" if of_kind.precision == "tf32" else "highest")
    types = torch_dtype(of_kind.dtype), torch_dtype(default_out_dtype(of_kind.dtype))
    shapes = [case.shape for case in every]
    pool = Pool(types[0], Pool.elements(shapes, device.l2_bytes, types[0].itemsize), types[1]) if every else None

    def measured(drawn: Drawn) -> None:
        shape = drawn.shape
        case = Case(arguments.dtype, drawn.layouts, shape.m, shape.n, shape.k)
        sets = pool.sets(shape, drawn.layouts, device.l2_bytes) if pool else []
        row = compare(shape, case, sets, sides, drawn.number, arguments.rounds, arguments.pause)
        results.rows.append({"seed": drawn.seed, **row})
        others = "  ".join(f"{side} {row[f'{side}_ratio']:.3f}" for side in OTHERS if f"{side}_ratio" in row)
        print(f"{drawn!s:<30}{row['us']:>9} us  {others}  {row['kernel'][0][-80:]}", flush=True)

    results.run(every, measured, arguments.seconds)
    for entry in summary(results.rows):
        print(entry)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
