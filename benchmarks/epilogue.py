"""Fused epilogues against the same in PyTorch, eager and compiled, and against plain products, in alternation.

    python benchmarks/epilogue.py --out epilogue.json                      # --quick: three cases, fewer rounds
    python benchmarks/epilogue.py --fusions bias_gelu,quantize --out some.json
    python benchmarks/epilogue.py --seed 7 --classes "few rows" --count 20 --fusions bias_silu --out random.json

Timings are those of benchmarks/gemm.py: CUDA graphs of calls that rotate through more operands than L2 holds, the sides
alternating with pauses. All sides but ours leave their results to PyTorch's allocator; they are kept as long as the
operands are, so that they rotate too. Kernels that the table lacks are compiled side by side before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch._dynamo

import fp8
from harness import AGREEMENT, LARGEST, SETS_AT_MOST, Results, compared, gpu, means, set_count, torch_dtype
from harness import difference as apart
from shapes import CLASSES, draw, seed_facts

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.epilogue import EpilogueVisitorTree, EvtBuilder
from atomr_cutlass.epilogue.results import MatrixResult
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.tree import COLUMN, MASK, MATRIX, ROW, SCALAR, Input
from atomr_cutlass.ops.gemm.plans import NO_SCALES, Scale, Scales, make, scale_forms
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.plan import Plan

D = CutlassDtype

E4M3_AGREEMENT = 5e-2
"""As `harness.AGREEMENT`: eager PyTorch rounds to bf16 before it rounds to e4m3."""


# ----------------------------------------------------------------------------------------------------------------------
# Epilogues, by both sides


def product(a: torch.Tensor, b: torch.Tensor, **scales: torch.Tensor) -> torch.Tensor:
    """The product alone, by PyTorch."""
    if a.dtype is torch.int8:
        return torch._int_mm(a, b)  # noqa: SLF001 - its only int8 product
    if scales:
        return torch._scaled_mm(a, b, **scales, out_dtype=torch.bfloat16)  # noqa: SLF001 - its only product of fp8
    return a @ b


def bias_gelu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
    """Half of a feed-forward block."""
    return torch.nn.functional.gelu(torch.addmm(bias, a, b))


def bias_silu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
    """The same with silu."""
    return torch.nn.functional.silu(torch.addmm(bias, a, b))


def residual(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> Any:
    """A block's end."""
    return torch.addmm(bias, a, b) + other


def relu_mask(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
    """Relu, and where it was positive: of PyTorch a byte for each element, of ours a bit."""
    found = torch.relu(torch.addmm(bias, a, b))
    return found, found > 0


def gelu_store(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
    """Gelu, and what it was applied to."""
    before = torch.addmm(bias, a, b)
    return torch.nn.functional.gelu(before), before


def dgelu(a: torch.Tensor, b: torch.Tensor, before: torch.Tensor) -> Any:
    """The gradient of what gelu was applied to, and of the bias."""
    gradient = torch.ops.aten.gelu_backward(a @ b, before)
    return gradient, gradient.sum(0, dtype=torch.float32)


def quantize(a: torch.Tensor, b: torch.Tensor, factor: torch.Tensor, **scales: torch.Tensor) -> Any:
    """To e4m3 by a scale, and the largest magnitude before."""
    wide = product(a, b, **scales).float()
    return (wide * factor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), wide.abs().amax()


def dequantize(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor) -> Any:
    """Integers with a scale for each row of A and column of B, and a bias."""
    return (product(a, b).float() * rows * columns + bias).to(torch.bfloat16)


@dataclass(frozen=True)
class Fusion:
    """The epilogue of a product.

    Attributes:
        unfused: the same in PyTorch, of a, b and operands by name; returns D, or a tuple with D first.
        build: puts the tree together; is told the element type of 16 bits.
        activation: in its place, of a bias and an activation by name.
    """

    unfused: Callable[..., Any]
    build: Callable[[EvtBuilder, str], EvtBuilder] | None = None
    activation: str | None = None


FUSIONS = {
    "bias_gelu": Fusion(bias_gelu, activation="gelu"),
    "bias_silu": Fusion(bias_silu, activation="silu"),
    "residual": Fusion(residual, lambda made, wide: made.add_bias("bias", dtype=wide).add_matrix("other", dtype=wide)),
    "relu_mask": Fusion(
        relu_mask, lambda made, wide: made.add_bias("bias", dtype=wide).activation("relu").mask_store("positive")
    ),
    "gelu_store": Fusion(
        gelu_store,
        lambda made, wide: made.add_bias("bias", dtype=wide).aux_store("before", dtype=wide).activation("gelu"),
    ),
    "dgelu": Fusion(
        dgelu, lambda made, wide: made.binary("d_gelu", "before", MATRIX, dtype=wide).reduce("bias_gradient", ROW)
    ),
    "quantize": Fusion(quantize, lambda made, _: made.quantize("e4m3", scale="factor", amax="largest")),
    "dequantize": Fusion(
        dequantize,
        lambda made, wide: (
            made.binary("multiply", "rows", COLUMN).binary("multiply", "columns", ROW).add_bias("bias", dtype=wide)
        ),
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Cases


@dataclass(frozen=True)
class Case:
    """A product to time with what follows it: A row-major, B column-major, D row-major."""

    fusion: str
    kind: str
    m: int
    n: int
    k: int

    @property
    def dtype(self) -> CutlassDtype:
        """Element type of A and B."""
        return D.parse(self.kind)

    @property
    def wide(self) -> CutlassDtype:
        """The type of D, unless the tree says it, and of operands with the shape of D."""
        return self.dtype if self.dtype.bits == 16 else D.BF16

    @property
    def tree(self) -> EpilogueVisitorTree:
        """The epilogue."""
        fusion = FUSIONS[self.fusion]
        if fusion.build is None:
            return EvtBuilder().add_bias("bias", dtype=self.wide).activation(str(fusion.activation)).build()
        return fusion.build(EvtBuilder(), self.wide.value).build()

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.fusion} {self.kind} {self.m}x{self.n}x{self.k}"


def comparison(fusions: Sequence[str], *, quick: bool) -> list[Case]:
    """The cases."""
    large = (4096, 16384, 4096)
    few = [Case("bias_gelu", "bf16", *large), Case("quantize", "bf16", *large)]
    few.append(Case("bias_gelu", "bf16", 128, 4096, 4096))
    cases = [Case(name, "bf16", *large) for name in FUSIONS if name != "dequantize"]
    cases += [Case("bias_gelu", "f16", *large), Case("quantize", "e4m3", *large), Case("dequantize", "i8", *large)]
    cases += [Case("bias_gelu", kind, m, 4096, 4096) for m in (128, 1024) for kind in ("bf16", "f16")]
    cases += [Case("bias_gelu", "bf16", *shape) for shape in ((2304, 2304, 2304), (1288, 4120, 2072))]
    return [case for case in (few if quick else cases) if case.fusion in fusions]


def drawn(fusions: Sequence[str], classes: Sequence[str], count: int, seed: int) -> list[Case]:
    """Cases of bf16 with shapes drawn at random, each with every fusion: aligned rows (see shapes.py)."""
    shapes = draw(classes, count, seed, aligned=True)
    return [Case(name, "bf16", shape.m, shape.n, shape.k) for shape in shapes for name in fusions]


@dataclass
class Operands:
    """The operands of one call.

    Attributes:
        a, b: A and B.
        scales: those of fp8 operands, as both sides call them.
        inputs: what the tree reads, by name.
        outputs: what ours writes beside D, by name.
        out: D.
        plain: D of the product alone.
        kept: results of PyTorch, by side.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    out: torch.Tensor
    plain: torch.Tensor
    kept: dict[str, Any] = field(default_factory=dict)


def operand_sets(case: Case, device: devices.Device, at_most: int = SETS_AT_MOST) -> list[Operands]:
    """As many sets of random operands as exceed L2 four times over. Products are about as large as 1."""
    moved = (case.m * case.k + case.k * case.n) * case.dtype.bits // 8
    return [operands_of(case) for _ in range(set_count(moved, device, most=at_most))]


def operands_of(case: Case) -> Operands:
    """One set of them."""
    scales: dict[str, torch.Tensor] = {}
    if case.kind == "e4m3":
        a, scale_a = fp8.quantized(case.m, case.k, "tensor", 1)
        b, scale_b = fp8.quantized(case.n, case.k, "tensor", 1)
        if scale_a is None or scale_b is None:
            raise ValueError("e4m3 operands have scales")
        scales = {"scale_a": scale_a, "scale_b": scale_b / math.sqrt(case.k)}
    elif case.kind == "i8":
        a, b = (torch.randint(-128, 128, (x, case.k), dtype=torch.int8, device="cuda") for x in (case.m, case.n))
    else:
        a = torch.randn(case.m, case.k, device="cuda").to(torch_dtype(case.dtype))
        b = (torch.randn(case.n, case.k, device="cuda") / math.sqrt(case.k)).to(torch_dtype(case.dtype))
    tree, shape = case.tree, (case.m, case.n)
    result = tree.result_dtype or case.wide
    return Operands(
        a,
        b.t(),
        scales,
        {operand.name: filled(operand, case) for operand in tree.inputs},
        {
            output.name: torch.empty(
                MatrixResult(shape).array_shape(output), dtype=torch_dtype(output.dtype), device="cuda"
            )
            for output in tree.outputs
        },
        torch.empty(shape, dtype=torch_dtype(result), device="cuda"),
        torch.empty(shape, dtype=torch.int32 if case.kind == "i8" else torch_dtype(case.wide), device="cuda"),
    )


def filled(operand: Input, case: Case) -> torch.Tensor:
    """A random operand of a tree."""
    if operand.kind == MASK:
        raise ValueError(f"{operand.name}: no case reads bits")
    if operand.kind == SCALAR:
        # This factor brings products of about 1 near the largest e4m3.
        return torch.full((1,), 64.0, dtype=torch_dtype(operand.dtype), device="cuda")
    shape = {ROW: (case.n,), COLUMN: (case.m, 1), MATRIX: (case.m, case.n)}[operand.kind]
    if operand.name in ("rows", "columns"):
        # The scales of both sides bring products of bytes back to about 1.
        values = (torch.rand(shape, device="cuda") + 0.5) / (74 * case.k**0.25)
    else:
        values = torch.randn(shape, device="cuda")
    return values.to(torch_dtype(operand.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# Sides

Call = Callable[[Operands], Any]


def our_call(case: Case) -> Call:
    """The product with what follows, as `gemm` is called for it."""
    fusion = FUSIONS[case.fusion]
    how: dict[str, Any] = {"activation": fusion.activation} if fusion.build is None else {"epilogue": case.tree}
    return lambda arrays: ac.gemm(
        arrays.a, arrays.b, out=arrays.out, **how, **arrays.scales, **arrays.inputs, **arrays.outputs
    )


def our_plain(arrays: Operands) -> Any:
    """The product alone, by the best kernel of the matrix whatever the table has, as that of the fusion is."""
    return ac.gemm(arrays.a, arrays.b, out=arrays.plain, backend="jit", **arrays.scales)


def torch_call(side: str, function: Callable[..., Any]) -> Call:
    """A function of PyTorch, whose results stay as long as the operands do."""

    def call(arrays: Operands) -> None:
        inputs = {} if function is product else arrays.inputs
        arrays.kept[side] = function(arrays.a, arrays.b, **arrays.scales, **inputs)

    return call


def plan_of(case: Case, arrays: Operands) -> Plan:
    """The plan that `gemm` makes: it tells which kernel that is, which is compiled by then."""
    problem = GemmProblem(
        a=fp8.spec(arrays.a), b=fp8.spec(arrays.b), c=None, d=fp8.spec(arrays.out), math="default", device=0
    )
    scales = NO_SCALES
    if arrays.scales:
        specs = [fp8.spec(scale) for scale in arrays.scales.values()]
        forms = scale_forms(problem, *specs)
        scales = Scales(*(Scale(spec.shape, spec.strides, form) for spec, form in zip(specs, forms, strict=True)))
    views = {name: operands.as_operand(array) for name, array in {**arrays.inputs, **arrays.outputs}.items()}
    return make(problem, scales, MatrixResult(problem.d.shape).fusion(case.tree, views), like=arrays.a)


def compile_ahead(cases: Sequence[Case], device: devices.Device, jobs: int, mode: str | None) -> None:
    """Compiles the kernels of all cases, several at once, and PyTorch's beside them.

    A compilation that fails here fails again, with its error, when its case is measured.
    """
    start = time.perf_counter()
    firsts = [operand_sets(case, device, at_most=1)[0] for case in cases]

    def compiled(case: Case, make: Callable[[], object]) -> str:
        try:
            make()
        except ac.CutlassError as error:
            return f"{case}: {type(error).__name__}: {error}"[:600]
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        tasks = []
        for case, arrays in zip(cases, firsts, strict=True):
            tasks.append(pool.submit(compiled, case, functools.partial(plan_of, case, arrays)))
            tasks.append(pool.submit(compiled, case, functools.partial(our_plain, arrays)))
        for case, arrays in zip(cases, firsts, strict=True):
            by_torch(case, arrays, mode)
        for failure in filter(None, (task.result() for task in tasks)):
            print(failure)
    torch.cuda.empty_cache()
    print(f"the kernels of {len(cases)} cases are there after {time.perf_counter() - start:.0f} s", flush=True)


def by_torch(case: Case, arrays: Operands, mode: str | None) -> tuple[Call | None, str]:
    """The call that `torch.compile` makes of a case, or the reason why it makes none."""
    # Shapes of other cases would count as recompilations.
    torch._dynamo.reset()  # noqa: SLF001 - it has no public name
    compiled = torch_call("compiled", torch.compile(FUSIONS[case.fusion].unfused, dynamic=False, mode=mode))
    try:
        compiled(arrays)
        torch.cuda.synchronize()
    except (RuntimeError, OSError, ImportError) as error:
        return None, f"{type(error).__name__}: {str(error).strip()}"[:400]
    return compiled, ""


# ----------------------------------------------------------------------------------------------------------------------
# Comparison


def compare(case: Case, device: devices.Device, rounds: int, mode: str | None) -> dict[str, Any]:
    """Times all sides, one after the other in every round.

    Raises:
        ValueError: their results differ by more than rounding explains.
    """
    sets = operand_sets(case, device)
    unfused = FUSIONS[case.fusion].unfused
    row: dict[str, Any] = {"fusion": case.fusion, "dtype": case.kind, "shape": [case.m, case.n, case.k]}
    row["kernel"] = plan_of(case, sets[0]).kernel_name
    calls: dict[str, Call] = {
        "ours": our_call(case),
        "plain": our_plain,
        "torch": torch_call("torch", unfused),
        "torch_plain": torch_call("torch_plain", product),
    }
    for call in calls.values():
        call(sets[0])
    row["difference"] = difference(sets[0])
    narrow = case.fusion == "quantize" or case.kind == "e4m3"
    if row["difference"] > (E4M3_AGREEMENT if narrow else AGREEMENT):
        raise ValueError(f"the results differ by {row['difference']} of their norm")
    compiled, refused = by_torch(case, sets[0], mode)
    if compiled is None:
        row["compiled_refused"] = refused
    else:
        calls["compiled"] = compiled
    # Of plain products the ratio says how much of their speed is left.
    return row | compared(calls, sets, rounds, case.flops)


def difference(arrays: Operands) -> float:
    """Of D by both, in norm, relative to PyTorch's."""
    theirs = arrays.kept["torch"]
    return apart(arrays.out, theirs[0] if isinstance(theirs, tuple) else theirs)


SIDES = ("plain", "torch", "compiled", "torch_plain")


def report(case: Case, row: dict[str, Any]) -> None:
    """One line."""
    words = [f"{row[f'{side}_ratio']:>12.3f}" if f"{side}_ratio" in row else f"{'-':>12}" for side in SIDES]
    print(f"{case!s:<36}{row['us']:>10}{''.join(words)}  {row['kernel']}", flush=True)
    if "compiled_refused" in row:
        print(f"    torch.compile: {row['compiled_refused'].splitlines()[0]}")


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="three cases, fewer rounds")
    parser.add_argument(
        "--fusions", type=lambda text: text.split(","), default=list(FUSIONS), help=f"of {', '.join(FUSIONS)}"
    )
    parser.add_argument("--seed", type=int, help="of shapes drawn at random, in place of the named ones")
    parser.add_argument("--count", type=int, default=20, help="--seed: shapes of each class")
    parser.add_argument("--classes", default="few rows,mid,large", help=f"--seed: of {', '.join(CLASSES)}")
    parser.add_argument("--mode", help="of torch.compile, such as max-autotune-no-cudagraphs")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the comparison")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after this time")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4), help="compilations at once")
    arguments = parser.parse_args()
    for name in arguments.fusions:
        if name not in FUSIONS:
            parser.error(f"unknown fusion {name!r}; valid: {', '.join(FUSIONS)}")
    device = gpu()
    if device is None:
        return 1
    results = Results(arguments.out, mode=arguments.mode or "default", **seed_facts(arguments.seed))
    if arguments.seed is None:
        cases = comparison(arguments.fusions, quick=arguments.quick)
    else:
        cases = drawn(arguments.fusions, arguments.classes.split(","), arguments.count, arguments.seed)
    compile_ahead(cases, device, arguments.jobs, arguments.mode)
    print(f"{'time over ours of':<36}{'ours, us':>10}{''.join(f'{side:>12}' for side in SIDES)}")

    def measured(case: Case) -> None:
        row = compare(case, device, 7 if arguments.quick else arguments.rounds, arguments.mode)
        results.rows.append(row)
        report(case, row)
        sides = (means(results.rows, lambda _: side, f"{side}_ratio") for side in SIDES)  # noqa: B023 - used at once
        results.values["means"] = {name: mean for found in sides for name, mean in found.items()}

    results.run(cases, measured, arguments.seconds)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
