"""Layers with fused epilogues other than one GEMM's, against the same in PyTorch, eager and compiled, in alternation.

    python benchmarks/layers.py --out layers.json                  # --layers swiglu,block for some of them

Gated products, convolutions and grouped products. Timings are those of benchmarks/gemm.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch._dynamo
    from torch.nn import functional

from harness import Results, compared, difference, gpu, set_count

import atomr_cutlass as ac
from atomr_cutlass.epilogue import EvtBuilder
from atomr_cutlass.pipeline import devices

Arrays = dict[str, Any]
Call = Callable[[Arrays], Any]

AGREEMENT = 2e-2
"""How far two results may be apart, in norm: eager PyTorch rounds in between."""
BF16 = torch.bfloat16
BLOCK = (
    EvtBuilder().add_bias("bias", dtype="bf16").add_matrix("residual", dtype="bf16").activation("relu").build()
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer of one size.

    Attributes:
        name: of the layer.
        size: what tells it from others of its name.
        make: one set of random operands, `out` for our result among them.
        ours, theirs: the layer by both; ours writes `out`.
        flops: of its products.
    """

    name: str
    size: str
    make: Callable[[], Arrays]
    ours: Call
    theirs: Call
    flops: float

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


def swiglu(m: int, k: int, f: int) -> Layer:
    """silu(x G) * (x U): PyTorch multiplies by both weights at once, ours by their columns in turn."""

    def make() -> Arrays:
        gate, up = (_normal(f, k, scale=1 / math.sqrt(k)) for _ in range(2))
        both = torch.cat([gate, up]).t()
        return {"x": _normal(m, k), "woven": ac.interleave(gate, up).t(), "both": both, "out": _empty(m, f)}

    def theirs(arrays: Arrays) -> Any:
        gate, up = (arrays["x"] @ arrays["both"]).chunk(2, -1)
        return functional.silu(gate) * up

    def ours(arrays: Arrays) -> Any:
        return ac.gated_gemm(arrays["x"], arrays["woven"], out=arrays["out"])

    return Layer("swiglu", f"{m}x{k}x2*{f}", make, ours, theirs, 4.0 * m * k * f)


def block(n: int, side: int, channels: int) -> Layer:
    """relu(conv3x3(x) + bias + residual), the end of a residual block whose batch norm is folded."""
    return _convolution("block", n, side, channels, residual=True)


def conv_silu(n: int, side: int, channels: int) -> Layer:
    """silu(conv3x3(x) + bias)."""
    return _convolution("conv_silu", n, side, channels, residual=False)


def _convolution(name: str, n: int, side: int, channels: int, *, residual: bool) -> Layer:
    image = (n, side, side, channels)

    def make() -> Arrays:
        w = _normal(channels, 3, 3, channels, scale=1 / math.sqrt(9 * channels))
        made = {"x": _normal(*image), "w": w, "bias": _normal(channels), "out": _empty(*image)}
        return made | ({"residual": _normal(*image)} if residual else {})

    def ours(arrays: Arrays) -> Any:
        how: Arrays = {"epilogue": BLOCK, "residual": arrays["residual"]} if residual else {
            "activation": "silu"
        }  # fmt: skip
        return ac.conv2d(arrays["x"], arrays["w"], padding=1, bias=arrays["bias"], out=arrays["out"], **how)

    def theirs(arrays: Arrays) -> Any:
        x, w = (arrays[name].permute(0, 3, 1, 2) for name in ("x", "w"))
        made = functional.conv2d(x, w, arrays["bias"], padding=1).permute(0, 2, 3, 1)
        return functional.relu(made + arrays["residual"]) if residual else functional.silu(made)

    return Layer(name, f"{n}x{side}x{side}x{channels}", make, ours, theirs, 18.0 * math.prod(image) * channels)


def experts(groups: int, rows: int, k: int, n: int) -> Layer:
    """gelu(x W[g] + bias[g]) of the rows of every expert g, `rows` of each."""
    count = groups * rows

    def make() -> Arrays:
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * rows
        w = _normal(groups, n, k, scale=1 / math.sqrt(k)).transpose(-1, -2)
        return {"x": _normal(count, k), "w": w, "bias": _normal(groups, n), "ends": ends, "out": _empty(count, n)}

    def ours(arrays: Arrays) -> Any:
        return ac.grouped_gemm(
            arrays["x"], arrays["w"], offsets=arrays["ends"], bias=arrays["bias"], activation="gelu", out=arrays["out"]
        )

    def theirs(arrays: Arrays) -> Any:
        # Every expert has as many rows, which PyTorch is told.
        made = torch._grouped_mm(arrays["x"], arrays["w"], offs=arrays["ends"]).view(groups, rows, n)  # noqa: SLF001
        return functional.gelu(made + arrays["bias"][:, None]).view(count, n)

    return Layer("experts", f"{groups}x{rows}x{k}x{n}", make, ours, theirs, 2.0 * count * k * n)


LAYERS = {
    "swiglu": [swiglu(4096, 4096, 14336), swiglu(512, 4096, 14336), swiglu(1544, 2080, 5608)],
    "block": [block(64, 56, 64), block(64, 28, 128), block(64, 14, 256)],
    "conv_silu": [conv_silu(16, 80, 128)],
    "experts": [experts(8, 1024, 4096, 4096), experts(6, 1160, 2080, 2840)],
}


def _normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda")


def compare(layer: Layer, device: devices.Device, rounds: int, mode: str | None) -> dict[str, Any]:
    """Times all sides, one after the other in every round.

    Raises:
        ValueError: their results differ by more than rounding explains.
    """
    first = layer.make()
    moved = sum(array.nbytes for array in first.values())
    sets = [first, *(layer.make() for _ in range(set_count(moved, device) - 1))]
    layer.ours(first)
    off = difference(first["out"], layer.theirs(first))
    if not off <= AGREEMENT:
        raise ValueError(f"the results differ by {off} of their norm")
    # Shapes of other layers would count as recompilations.
    torch._dynamo.reset()  # noqa: SLF001 - it has no public name
    compiled = torch.compile(layer.theirs, dynamic=False, mode=mode)
    calls = {"ours": layer.ours, "torch": _kept("torch", layer.theirs), "compiled": _kept("compiled", compiled)}
    for call in calls.values():
        call(first)
    torch.cuda.synchronize()
    facts = {"layer": layer.name, "size": layer.size, "difference": off}
    return facts | compared(calls, sets, rounds, layer.flops)


def _kept(side: str, function: Call) -> Call:
    """PyTorch's result stays as long as the operands, so that results rotate as ours do."""

    def call(arrays: Arrays) -> None:
        arrays[f"{side}'s"] = function(arrays)

    return call


def report(row: dict[str, Any]) -> None:
    """One line."""
    words = f"{row['torch_ratio']:>10.3f}{row['compiled_ratio']:>10.3f}"
    print(f"{row['layer'] + ' ' + row['size']:<36}{row['us']:>10}{row['tflops']:>10}{words}", flush=True)


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument(
        "--layers", type=lambda text: text.split(","), default=list(LAYERS), help=f"of {', '.join(LAYERS)}"
    )
    parser.add_argument("--mode", help="of torch.compile, such as max-autotune-no-cudagraphs")
    parser.add_argument("--quick", action="store_true", help="one of each layer, fewer rounds")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the comparison")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no layer after this time")
    arguments = parser.parse_args()
    for name in arguments.layers:
        if name not in LAYERS:
            parser.error(f"unknown layer {name!r}; valid: {', '.join(LAYERS)}")
    device = gpu()
    if device is None:
        return 1
    results = Results(arguments.out, mode=arguments.mode or "default")
    print(f"{'':<36}{'ours, us':>10}{'TFLOPS':>10}{'torch':>10}{'compiled':>10}")
    rounds, most = (7, 1) if arguments.quick else (arguments.rounds, None)

    def measured(layer: Layer) -> None:
        results.rows.append(compare(layer, device, rounds, arguments.mode))
        report(results.rows[-1])

    results.run((case for name in arguments.layers for case in LAYERS[name][:most]), measured, arguments.seconds)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
