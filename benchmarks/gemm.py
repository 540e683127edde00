"""GEMM against `torch.matmul`, in alternation; and every kernel of the table over many shapes, for the model.

    python benchmarks/gemm.py --out results.json            # the comparison
    python benchmarks/gemm.py --sweep --out sweep.json      # every eligible kernel with its options

The cost of a call on the host is measured by host.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

from harness import Call, Results, against_best, compared, gpu, set_count, timed, torch_dtype

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import default_out_dtype, math_mode
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.ops.gemm.kernels import GemmCandidate, GemmSearch
from atomr_cutlass.ops.gemm.plans import from_candidate, make
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices, estimate, select
from atomr_cutlass.pipeline.planning import PlanOptions

D = CutlassDtype


@dataclass(frozen=True)
class Case:
    """A product to time. `layouts` are those of A and B; D is row-major."""

    kind: str
    layouts: str
    m: int
    n: int
    k: int

    @property
    def dtype(self) -> CutlassDtype:
        """Element type of the operands."""
        return D.F32 if self.kind in ("tf32", "3xtf32") else D.parse(self.kind)

    @property
    def precision(self) -> str | None:
        """`precision` of `gemm`."""
        return self.kind if self.kind in ("tf32", "3xtf32") else None

    @property
    def math(self) -> str:
        """The math mode of the kernel key."""
        return math_mode(self.dtype, self.precision)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.kind} {self.layouts} {self.m}x{self.n}x{self.k}"


KINDS = ("f16", "bf16", "tf32", "3xtf32", "f32", "f64", "i8")

CUBES = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192))
UNEVEN = ((2304, 2304, 2304), (3000, 3000, 3000), (3992, 4120, 2072), (5080, 6920, 3064), (1288, 1672, 896))
"""Powers of two hide tiles that are not filled, waves that are not full, and rows that begin within a cache line."""
SKINNY = (
    (16, 4096, 4096),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (16384, 1024, 1024),
    (128, 7168, 2048),
    (4096, 50257, 1024),
)


def comparison(*, quick: bool) -> list[Case]:
    """The cases that are compared with torch."""
    if quick:
        shapes = ((512, 512, 512), (4096, 4096, 4096), (128, 4096, 4096))
        return [Case("bf16", "rc", *shape) for shape in shapes] + [Case("f16", "rr", 4096, 4096, 4096)]
    cases = [
        Case(kind, layouts, *shape)
        for kind in ("bf16", "f16")
        for layouts in ("rc", "rr")
        for shape in CUBES + UNEVEN + SKINNY
    ]
    few = ((1024, 1024, 1024), (3008, 3008, 3008), (4096, 4096, 4096), (128, 4096, 4096))
    cases += [Case(kind, "rc", *shape) for kind in ("tf32", "f32", "f64", "i8") for shape in few]
    return [*cases, Case("tf32", "rr", 4096, 4096, 4096), Case("3xtf32", "rc", 4096, 4096, 4096)]


def sweep_cases() -> list[Case]:
    """The cases that the model of `select` is fitted to."""
    shapes = (
        *((n, n, n) for n in (256, 512, 1024, 1536, 2048, 4096, 8192)),
        *UNEVEN,
        (2840, 4240, 2536),
        (1072, 4936, 7152),
        (1, 4096, 4096),
        (16, 4096, 4096),
        (64, 4096, 4096),
        (128, 4096, 4096),
        (128, 7168, 2048),
        (256, 256, 16384),
        (512, 4096, 4096),
        (1024, 8192, 512),
        (2048, 2048, 16384),
        (4096, 4096, 256),
        (4096, 50257, 1024),
        (16384, 1024, 1024),
    )
    few = ((512, 512, 512), (128, 4096, 4096), (4096, 4096, 4096))
    cases = [Case("bf16", "rc", *shape) for shape in shapes]
    cases += [Case("bf16", "rr", *shape) for shape in ((16, 4096, 4096), (1024, 1024, 1024), (4096, 4096, 4096))]
    return cases + [Case(kind, "rc", *shape) for kind in ("tf32", "f32", "f64", "i8") for shape in few]


# ----------------------------------------------------------------------------------------------------------------------
# Operands and timing


@dataclass(frozen=True)
class Operands:
    """A, B and D of one call."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


def operand_sets(case: Case, device: devices.Device) -> list[Operands]:
    """As many sets of random operands as exceed L2 four times over."""
    dtype, result = torch_dtype(case.dtype), torch_dtype(default_out_dtype(case.dtype))

    def matrix(rows: int, columns: int, layout: str) -> torch.Tensor:
        extents = (rows, columns) if layout == "r" else (columns, rows)
        if case.dtype is D.I8:
            made = torch.randint(-128, 128, extents, dtype=torch.int8, device="cuda")
        else:
            made = torch.randn(extents, dtype=torch.float32, device="cuda").to(dtype)
        return made if layout == "r" else made.T

    moved = (case.m * case.k + case.k * case.n) * case.dtype.bits // 8
    return [
        Operands(
            matrix(case.m, case.k, case.layouts[0]),
            matrix(case.k, case.n, case.layouts[1]),
            torch.empty(case.m, case.n, dtype=result, device="cuda"),
        )
        for _ in range(set_count(moved, device))
    ]


def our_problem(case: Case, arrays: Operands) -> GemmProblem:
    """The problem as kernels are chosen for it."""

    def spec(tensor: torch.Tensor) -> MatrixSpec:
        view = operands.as_operand(tensor)
        return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "a tensor"), view.alignment)

    return GemmProblem(a=spec(arrays.a), b=spec(arrays.b), c=None, d=spec(arrays.out), math=case.math, device=0)


def torch_call(case: Case) -> Call:
    """The same product by PyTorch."""
    if case.dtype is D.I8:
        return lambda arrays: torch._int_mm(arrays.a, arrays.b, out=arrays.out)  # noqa: SLF001 - its only int8 product
    return lambda arrays: torch.matmul(arrays.a, arrays.b, out=arrays.out)


# ----------------------------------------------------------------------------------------------------------------------
# Comparison with torch


def compare(case: Case, device: devices.Device, rounds: int) -> dict[str, Any]:
    """Times both sides, one after the other in every round."""
    sets = operand_sets(case, device)
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    plan = make(our_problem(case, sets[0]), like=sets[0].a)
    calls: dict[str, Call] = {
        "ours": lambda arrays: plan(arrays.a, arrays.b, out=arrays.out),
        "torch": torch_call(case),
    }
    return {
        "shape": [case.m, case.n, case.k],
        "dtype": case.kind,
        "layout": case.layouts.upper() + "R",
        "kernel": plan.kernel_name,
        "split_k": plan.main.split_k,
        "swizzle": plan.main.swizzle,
        "model_us": round(plan.main.seconds * 1e6, 2),
        **compared(calls, sets, rounds, case.flops),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Sweep


def splits(candidate: GemmCandidate) -> tuple[int, ...]:
    """The slices of K worth a timing."""
    if candidate.info.key.scheduler == "streamk":
        return (1, 2, 4, 8)
    return tuple(s for s in estimate.slices(candidate.key, candidate.formulation.extents, devices.get(0)) if s <= 8)


def schedules(candidate: GemmCandidate) -> Iterator[tuple[int, int]]:
    """Swizzles and raster orders of the persistent scheduler."""
    if candidate.info.key.generation != "sm90":
        return
    for swizzle in (1, 2, 4, 8):
        for raster in (0, 1, 2):
            yield swizzle, raster


def tiles(candidate: GemmCandidate) -> int:
    """Tiles of the result."""
    key, variant = candidate.info.key, candidate.formulation
    return math.ceil(variant.m / key.tile[0]) * math.ceil(variant.n / key.tile[1]) * variant.batch


def sweep(case: Case, device: devices.Device, near: float, seconds: float) -> list[dict[str, Any]]:
    """Times every eligible kernel; scheduler options for those within `near` of the best."""
    sets = operand_sets(case, device)
    problem = our_problem(case, sets[0])
    # Cells of other archs are here for older GPUs; the driver would have to translate them.
    ranked = [c for c in select.rank(GemmSearch(problem, device)) if c.info.key.arch is device.arch]
    rows: list[dict[str, Any]] = []

    def measure(candidate: GemmCandidate, rank: int) -> float:
        row: dict[str, Any] = {
            "shape": [case.m, case.n, case.k],
            "dtype": case.kind,
            "layout": case.layouts.upper() + "R",
            "kernel": candidate.info.name,
            "generation": candidate.info.key.generation,
            "tile": candidate.info.key.tile,
            "cluster": candidate.info.key.cluster,
            "mainloop": candidate.info.key.mainloop,
            "scheduler": candidate.info.key.scheduler,
            "epilogue": candidate.info.key.epilogue_schedule,
            "align": [candidate.info.key.align_a, candidate.info.key.align_b, candidate.info.key.align_d],
            "swapped": candidate.formulation.swapped,
            "split_k": candidate.split_k,
            "swizzle": candidate.swizzle,
            "raster": candidate.raster,
            "rank": rank,
            "model_us": round(_model_seconds(candidate, device) * 1e6, 2),
        }
        rows.append(row)
        try:
            plan = from_candidate(problem, candidate, PlanOptions(like=sets[0].a))
            elapsed = timed(lambda arrays: plan(arrays.a, arrays.b, out=arrays.out), sets, seconds)
        except ac.UnsupportedError as error:
            row["us"], row["problem"] = None, str(error)
            return math.inf
        row["us"] = round(elapsed * 1e6, 2)
        row["tflops"] = round(case.flops / elapsed / 1e12, 1)
        return elapsed

    best: dict[int, tuple[float, GemmCandidate]] = {}
    for rank, candidate in enumerate(ranked):
        # As chosen, and then every other number of slices.
        tried = [candidate] + [
            dataclasses.replace(candidate, split_k=s) for s in splits(candidate) if s != candidate.split_k
        ]
        best[rank] = min(((measure(c, rank), c) for c in tried), key=lambda pair: pair[0])
    fastest = min((pair[0] for pair in best.values()), default=math.inf)
    for rank, (elapsed, candidate) in best.items():
        if elapsed > near * fastest or tiles(candidate) <= device.multiprocessors:
            continue
        for swizzle, raster in schedules(candidate):
            if (swizzle, raster) != (candidate.swizzle, candidate.raster):
                measure(dataclasses.replace(candidate, swizzle=swizzle, raster=raster), rank)
    return rows


def _model_seconds(candidate: GemmCandidate, device: devices.Device) -> float:
    return estimate.launch(
        candidate.info.key, candidate.formulation.extents, device, candidate.info.shared_bytes, candidate.split_k
    ).seconds


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_case(text: str) -> Case:
    """`bf16:rc:4096x4096x4096`."""
    kind, layouts, shape = text.split(":")
    m, n, k = (int(part) for part in shape.split("x"))
    if kind not in KINDS or layouts not in ("rr", "rc", "cr", "cc"):
        raise ValueError(f"{text!r} is no case: expected such as bf16:rc:4096x4096x4096; dtypes: {', '.join(KINDS)}")
    return Case(kind, layouts, m, n, k)


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="a few shapes, fewer rounds")
    parser.add_argument("--sweep", action="store_true", help="time every eligible kernel instead")
    parser.add_argument("--cases", type=lambda text: [parse_case(t) for t in text.split(",")],
                        help="such as bf16:rc:4096x4096x4096,f16:rr:512x512x512")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the comparison")
    parser.add_argument(
        "--near", type=float, default=1.25, help="sweep: scheduler options for kernels within this factor"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="sweep: start no case after this time")
    arguments = parser.parse_args()
    device = gpu()
    if device is None:
        return 1
    results, rounds = Results(arguments.out), 7 if arguments.quick else arguments.rounds

    def swept(case: Case) -> None:
        rows = sweep(case, device, arguments.near, 0.7e-3)
        results.rows.extend(rows)
        results.values.setdefault("cases", []).append(against_best(case, rows, ("split_k", "swizzle", "raster")))

    def measured(case: Case) -> None:
        row = compare(case, device, rounds)
        results.rows.append(row)
        print(
            f"{case!s:<30}{row['us']:>10} us {row['tflops']:>7} TFLOP/s, torch {row['torch_us']:>10} us: "
            f"{row['torch_ratio']:.3f}  {row['kernel']}"
        )

    if arguments.sweep:
        results.run(arguments.cases or sweep_cases(), swept, arguments.seconds)
    else:
        results.run(arguments.cases or comparison(quick=arguments.quick), measured)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
