"""conv2d and its gradients against PyTorch's cuDNN, in alternation; and every cell of the matrix for each layer.

    python benchmarks/conv.py --out conv.json          # the comparison
    python benchmarks/conv.py --all --out cells.json   # every eligible cell with every number of slices, for the model

cuDNN has channels-last arrays and chooses its algorithm by timing (`torch.backends.cudnn.benchmark`). How timings are
taken is said in gemm.py. Kernels that the table lacks are compiled at run time, so a first run takes longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from gemm import Operands
from harness import Call, Results, Row, against_best, compared, gpu, means, set_count, timed, torch_dtype

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import math_mode
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.ops.conv2d import kernels as conv_plan
from atomr_cutlass.ops.conv2d.kernels import ConvSearch
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP, WGRAD, ConvGeometry, ConvProblem, conv_geometry
from atomr_cutlass.pipeline import devices, select
from conv_layers import CONVNEXT_TINY, MOBILENET_V2, RESNET50, Layer

D = CutlassDtype

OPS = {"fprop": FPROP, "dgrad": DGRAD, "wgrad": WGRAD}
KINDS = ("bf16", "f16", "tf32", "f32")
IMAGES = 32
CELL_SECONDS = 0.7e-3
"""Device time of one timing of one cell."""


@dataclass(frozen=True)
class Case:
    """A convolution to time."""

    op: str
    kind: str
    layer: Layer
    images: int = IMAGES

    @property
    def dtype(self) -> CutlassDtype:
        """Element type of the operands and the result."""
        return D.F32 if self.kind == "tf32" else D.parse(self.kind)

    @property
    def geometry(self) -> ConvGeometry:
        """All extents."""
        layer = self.layer
        filter_shape = (layer.k, layer.taps, layer.taps, layer.c // layer.groups)
        return conv_geometry(
            (self.images, *layer.x_shape),
            filter_shape,
            stride=layer.stride,
            padding=layer.padding,
            groups=layer.groups,
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of A, B and D, in the order of NHWC."""
        g = self.geometry
        x, w, y = g.x_shape, g.w_shape, g.y_shape
        return {"fprop": (x, w, y), "dgrad": (y, w, x), "wgrad": (y, x, w)}[self.op]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        g = self.geometry
        return 2 * math.prod(g.y_shape) * g.r * g.s * g.c // g.groups

    @property
    def bytes(self) -> int:
        """Of the operands and the result, once."""
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.bits // 8

    def __str__(self) -> str:
        return f"{self.op} {self.kind} {self.images}x{self.layer}"


UNEVEN = (Layer(28, 256, 256, 3, 1, 1), Layer(37, 72, 200, 3, 1, 1), Layer(45, 136, 328, 5, 2, 2))
"""Layers of no network: extents and channels whose tiles are not filled."""


def comparison(*, quick: bool) -> list[Case]:
    """The cases that are compared with cuDNN."""
    if quick:
        few = (RESNET50[2], RESNET50[6], RESNET50[16], *UNEVEN[:2])
        return [Case(op, "bf16", layer) for layer in few for op in OPS]
    depthwise = [layer for layer in (*MOBILENET_V2, *CONVNEXT_TINY) if layer.groups > 1]
    cases = [Case(op, kind, layer) for kind in ("bf16", "f16") for layer in RESNET50 for op in OPS]
    cases += [Case(op, "bf16", layer) for layer in (*UNEVEN, *depthwise) for op in OPS]
    # The first layer has three channels, which TF32's gradients do not read.
    return cases + [Case(op, "tf32", layer) for layer in (RESNET50[2], *RESNET50[6::5]) for op in OPS]


def model_cases() -> list[Case]:
    """The cases that the model of `conv_plan` is fitted to."""
    cases = [Case(op, "bf16", layer) for layer in RESNET50 for op in OPS]
    depthwise = [layer for layer in (*MOBILENET_V2[::3], *CONVNEXT_TINY) if layer.groups > 1]
    cases += [Case(op, "bf16", layer) for layer in depthwise for op in OPS]
    return cases + [Case(op, kind, layer) for kind in ("tf32", "f32") for layer in RESNET50[2::7] for op in OPS]


# ----------------------------------------------------------------------------------------------------------------------
# Both sides


def operand_sets(case: Case, device: devices.Device) -> list[Operands]:
    """As many sets of random operands as exceed L2 four times over."""
    dtype = torch_dtype(case.dtype)
    first, second, result = case.shapes

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)

    count = set_count(case.bytes, device)
    return [
        Operands(random(first), random(second), torch.empty(result, dtype=dtype, device="cuda")) for _ in range(count)
    ]


def our_problem(case: Case, arrays: Operands) -> ConvProblem:
    """The problem as kernels are chosen for it."""

    def spec(tensor: torch.Tensor) -> MatrixSpec:
        view = operands.as_operand(tensor)
        return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "a tensor"), view.alignment)

    return ConvProblem(
        op=OPS[case.op],
        geometry=case.geometry,
        a=spec(arrays.a),
        b=spec(arrays.b),
        c=None,
        d=spec(arrays.out),
        bias=None,
        activation=None,
        math=math_mode(case.dtype, "tf32" if case.kind == "tf32" else None),
        device=0,
    )


def torch_call(case: Case) -> Call:
    """The same by PyTorch, in channels-last memory."""
    g = case.geometry
    how: Any = {"stride": g.stride, "padding": (g.padding[0][0], g.padding[1][0]), "groups": g.groups}

    def channels_last(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(0, 3, 1, 2)

    if case.op == "fprop":
        return lambda arrays: torch.nn.functional.conv2d(channels_last(arrays.a), channels_last(arrays.b), None, **how)
    # With real tensors for what only says the shape: the stand-ins of torch.nn.grad are not channels-last, and cuDNN
    # would be timed together with conversions of the layout.
    dgrad = case.op == "dgrad"
    shape = (g.n, g.h, g.w, g.c) if dgrad else (g.k, g.r, g.s, g.c // g.groups)
    spare = channels_last(torch.empty(shape, dtype=torch_dtype(case.dtype), device="cuda"))
    geometry = [list(pair) for pair in (how["stride"], how["padding"], g.dilation)]

    def backward(arrays: Operands) -> Any:
        dy, other = channels_last(arrays.a), channels_last(arrays.b)
        x, w = (spare, other) if dgrad else (other, spare)
        found = torch.ops.aten.convolution_backward(
            dy, x, w, None, *geometry, False, [0, 0], g.groups, [dgrad, not dgrad, False]
        )
        return found[0 if dgrad else 1]

    return backward


def difference(case: Case, plan: Any, arrays: Operands) -> float:
    """The largest difference between both results, relative to the largest value: a check that they do the same."""
    plan(arrays.a, arrays.b, out=arrays.out)
    theirs = torch_call(case)(arrays)
    wide = theirs.permute(0, 2, 3, 1).float()
    return float((arrays.out.float() - wide).abs().max() / wide.abs().max())


# ----------------------------------------------------------------------------------------------------------------------
# Comparison


def compare(case: Case, device: devices.Device, rounds: int) -> dict[str, Any]:
    """Times both sides, one after the other in every round."""
    sets = operand_sets(case, device)
    torch.backends.cudnn.allow_tf32 = case.kind == "tf32"
    problem = our_problem(case, sets[0])
    plan = conv_plan.make(problem, like=sets[0].a)
    calls: dict[str, Call] = {
        "ours": lambda arrays: plan(arrays.a, arrays.b, out=arrays.out),
        "torch": torch_call(case),
    }
    row = compared(calls, sets, rounds, case.flops)
    return {
        **_facts(case),
        "kernel": plan.kernel_name,
        "rewrite": plan.rewrite,
        "gb_per_s": round(case.bytes / row["us"] / 1e3),
        "model_us": round(plan.main.seconds * 1e6, 2),
        "difference": difference(case, plan, sets[0]),
        **row,
    }


def _facts(case: Case) -> dict[str, Any]:
    layer = dataclasses.asdict(case.layer)
    return {"op": case.op, "dtype": case.kind, "images": case.images, "layer": layer}


# ----------------------------------------------------------------------------------------------------------------------
# Every cell


def all_cells(case: Case, device: devices.Device, near: float) -> list[dict[str, Any]]:
    """Times the eligible cells that the model does not put beyond `near` times the best of them."""
    sets = operand_sets(case, device)
    problem = our_problem(case, sets[0])
    candidates = select.rank_cells(ConvSearch(problem, device, devices.require_arch(device)))
    rows: list[dict[str, Any]] = []
    for rank, candidate in enumerate(candidates):
        key = candidate.key
        row: dict[str, Any] = {
            **_facts(case),
            "kernel": key.name,
            "generation": key.generation,
            "iterator": key.iterator,
            "stride_support": key.stride_support,
            "group_mode": key.group_mode,
            "tile": key.tile,
            "align": [key.align_a, key.align_b, key.align_d],
            "split_k": candidate.split_k,
            "rewrite": candidate.formulation.rewrite,
            "wide": candidate.formulation.wide,
            "rank": rank,
            "model_us": round(candidate.seconds * 1e6, 2),
        }
        if candidate.seconds > near * candidates[0].seconds:
            continue
        rows.append(row)
        try:
            plan = conv_plan.make(problem, like=sets[0].a, candidate=candidate)
            elapsed = timed(lambda arrays, plan=plan: plan(arrays.a, arrays.b, out=arrays.out), sets, CELL_SECONDS)  # type: ignore[misc]
        except ac.CutlassError as error:
            row["us"], row["problem"] = None, f"{type(error).__name__}: {error}"
            continue
        row["us"] = round(elapsed * 1e6, 2)
        row["tflops"] = round(case.flops / elapsed / 1e12, 2)
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--quick", action="store_true", help="a few layers, fewer rounds")
    parser.add_argument("--all", action="store_true", help="time every eligible cell instead")
    parser.add_argument("--ops", type=lambda text: text.split(","), default=list(OPS), help="such as fprop,wgrad")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help="such as bf16,tf32")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the comparison")
    parser.add_argument(
        "--near", type=float, default=8.0, help="--all: leave out what the model puts beyond this factor"
    )
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after this time")
    arguments = parser.parse_args()
    for name in (*arguments.ops, *arguments.kinds):
        if name not in (*OPS, *KINDS):
            parser.error(f"unknown operation or dtype {name!r}; valid: {', '.join((*OPS, *KINDS))}")
    device = gpu()
    if device is None:
        return 1
    torch.backends.cudnn.benchmark = True
    results = Results(arguments.out, cudnn=torch.backends.cudnn.version())
    rounds = 5 if arguments.quick else arguments.rounds

    def every_cell(case: Case) -> None:
        rows = all_cells(case, device, arguments.near)
        results.rows.extend(rows)
        results.values.setdefault("cases", []).append(against_best(case, rows, ("split_k",)))

    def measured(case: Case) -> None:
        row = compare(case, device, rounds)
        results.rows.append(row)
        print(
            f"{case!s:<46}{row['us']:>9} us {row['tflops']:>7} TFLOP/s, cuDNN {row['torch_us']:>9} us: "
            f"{row['torch_ratio']:.3f}  {row['kernel']}",
            flush=True,
        )

    cases = model_cases() if arguments.all else comparison(quick=arguments.quick)
    wanted = (case for case in cases if case.op in arguments.ops and case.kind in arguments.kinds)
    results.run(wanted, every_cell if arguments.all else measured, arguments.seconds)
    results.values["means"] = means(results.rows, _group)  # of cuDNN
    return results.finish()


def _group(row: Row) -> str:
    """The operation and the dtype, depthwise layers apart."""
    return f"{row['op']} {row['dtype']}" + (" depthwise" if row["layer"]["groups"] > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
