"""The host cost of a call, against PyTorch's call of the same work, in alternation; and the first call of a shape.

    python benchmarks/host.py --out host.json

The products are small enough that the GPU never makes the host wait. Kernels come from the table: nothing is compiled.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from torch.nn import functional

import harness

import atomr_cutlass as ac
from atomr_cutlass.epilogue import EvtBuilder

Call = Callable[[], object]

COUNT = 200
"""Calls at a time: fewer than the launches that a stream queues before it makes the host wait."""
WARM = 20
NEW_SHAPES = 60
BEYOND_AIM_US = 100.0
"""Microseconds that the first call of a shape may cost beyond a warm call's."""
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """A call of ours, and PyTorch's call that its cost is a share of.

    Attributes:
        name: ours.
        ours: the call.
        torch_name: PyTorch's.
        torch: the call.
        aim: the share that it should cost at most; None where there is none.
    """

    name: str
    ours: Call
    torch_name: str
    torch: Call
    aim: float | None = None

    def __str__(self) -> str:
        return self.name


def random(*shape: int) -> torch.Tensor:
    """A bf16 array on the GPU."""
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(BF16)


def dense_rows() -> list[Row]:
    """Plans and `gemm`."""
    a, b, bias = random(64, 64), random(64, 64), random(64)
    out, weight = torch.empty_like(a), random(64, 64)
    columns = weight.T
    plan = ac.plan(ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.BF16))
    tree = EvtBuilder().add_bias("bias", dtype="bf16").activation("gelu").build()
    product = ("torch.matmul(a, b, out=out)", lambda: torch.matmul(a, b, out=out))
    linear = ("F.linear(a, weight, bias)", lambda: functional.linear(a, weight, bias))
    return [
        Row("plan(a, b, out=out)", lambda: plan(a, b, out=out), *product, 0.25),
        Row("gemm(a, b, out=out)", lambda: ac.gemm(a, b, out=out), *product, 0.35),
        Row("gemm(a, b)", lambda: ac.gemm(a, b), *product, 0.6),
        Row("gemm(a, b, c, beta=1.0, out=out)", lambda: ac.gemm(a, b, out, beta=1.0, out=out), *product),
        Row("gemm(a, b, out=out, alpha=2.0)", lambda: ac.gemm(a, b, out=out, alpha=2.0), *product),
        Row(
            "gemm(a, columns, bias=bias, activation='gelu')",
            lambda: ac.gemm(a, columns, bias=bias, activation="gelu"), *linear, 0.8,
        ),
        Row(
            "gemm(a, columns, bias=bias, epilogue=tree)", lambda: ac.gemm(a, columns, bias=bias, epilogue=tree), *linear
        ),
    ]  # fmt: skip


def other_rows() -> list[Row]:
    """Convolutions and grouped products."""
    x = random(1, 64, 16, 16).to(memory_format=torch.channels_last)
    w = random(64, 64, 3, 3).to(memory_format=torch.channels_last)
    a, b = random(64, 64), random(4, 64, 64)
    ends = torch.tensor((16, 16, 32, 64), dtype=torch.int32, device="cuda")
    grouped = ("torch._grouped_mm(a, b, offs=ends)", lambda: torch._grouped_mm(a, b, offs=ends))  # noqa: SLF001
    out = torch.empty_like(a)
    return [
        Row(
            "conv2d(x, w, padding=1, layout='nchw')", lambda: ac.conv2d(x, w, padding=1, layout="nchw"),
            "F.conv2d(x, w, padding=1)", lambda: functional.conv2d(x, w, padding=1), 0.8,
        ),
        Row("grouped_gemm(a, b, offsets=ends)", lambda: ac.grouped_gemm(a, b, offsets=ends), *grouped, 0.7),
        Row("grouped_gemm(..., out=out)", lambda: ac.grouped_gemm(a, b, offsets=ends, out=out), *grouped),
    ]  # fmt: skip


def microseconds(call: Call) -> float:
    """Host time of one call."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(COUNT):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / COUNT * 1e6


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """The medians of both sides, in alternation."""
    sides = {side: functools.partial(microseconds, getattr(row, side)) for side in ("ours", "torch")}
    times = harness.alternated(sides, rounds, pause=0.0)
    ours, theirs = statistics.median(times["ours"]), statistics.median(times["torch"])
    return {
        "ours": row.name, "torch": row.torch_name, "us": round(ours, 3), "torch_us": round(theirs, 3),
        "share": round(ours / theirs, 3), "aim": row.aim,
    }  # fmt: skip


def new_calls(number: int, more: int) -> dict[str, Call]:
    """Calls of shapes that are drawn at random, by what they compute; with so many rows, or images, more."""
    drawn = Random(number)  # noqa: S311

    def extent(most: int, step: int = 8) -> int:
        return step * max(1, round(math.exp(drawn.uniform(0.0, math.log(most / step)))))

    m, n, k, channels = extent(8192, 1) + more, extent(8192), extent(8192), extent(512)
    a, b, bias, out = random(m, k), random(k, n), random(n), random(m, n)
    columns, gates = random(n, k).T, random(2 * extent(4096), k).T
    size, filters = extent(64, 7), extent(512)
    x = random(extent(32, 1) + more, size, size, channels)
    w, tap = random(filters, 3, 3, channels), random(filters, 1, 1, channels)
    groups, rows = random(extent(64, 1), k, min(n, 2048)), sorted(drawn.randrange(m + 1) for _ in range(64))
    ends = torch.tensor([*rows[: len(groups) - 1], m], dtype=torch.int32, device="cuda")
    matmul = ac.MatmulRequest(b, a, d=out, m=n, n=m, k=k)  # columns, as cuBLASLt has them, are rows of the transpose
    return {
        "gemm": lambda: ac.gemm(a, b, out=out),
        "gemm, bias and gelu": lambda: ac.gemm(a, columns, bias=bias, activation="gelu", out=out),
        "matmul": lambda: ac.matmul(matmul),
        "gated_gemm": lambda: ac.gated_gemm(a, gates),
        "gemv": lambda: ac.gemv(a, a[0]),
        "grouped_gemm": lambda: ac.grouped_gemm(a, groups, offsets=ends),
        "conv2d": lambda: ac.conv2d(x, w, padding=1),
        "conv2d, one tap": lambda: ac.conv2d(x, tap),
    }


def first_calls() -> list[dict[str, Any]]:
    """The median host times of the first call of a shape, where other shapes have loaded its kernel, and of a warm one.

    Loading a kernel takes a millisecond or more: shapes with a row less, which most often have the same kernels, come
    before.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(NEW_SHAPES):
        for call in new_calls(number, 0).values():
            call()
    for number in range(NEW_SHAPES):
        for name, call in new_calls(number, 1).items():
            torch.cuda.synchronize()
            for turn in ("first", "second", "warm"):
                start = time.perf_counter()
                call()
                elapsed = (time.perf_counter() - start) * 1e6
                times.setdefault(name, {}).setdefault(turn, []).append(elapsed)
    made = []
    for name, turns in times.items():
        first, warm = statistics.median(turns["first"]), statistics.median(turns["warm"])
        beyond = sorted(a - b for a, b in zip(turns["first"], turns["warm"], strict=True))
        made.append({
            "call": name, "first_us": round(first, 1), "warm_us": round(warm, 1), "beyond_us": round(first - warm, 1),
            "beyond_us_by_tenths": [round(beyond[len(beyond) * tenth // 10], 1) for tenth in range(1, 10)],
            "aim_us": BEYOND_AIM_US, "shapes": NEW_SHAPES,
        })  # fmt: skip
    return made


def main() -> int:
    """Measures and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each row; default: 21; 0: first calls alone")
    arguments = parser.parse_args()
    if harness.gpu() is None:
        return 1
    os.environ["ATOMR_CUTLASS_JIT"] = "off"
    results = harness.Results(arguments.out)

    def compare(row: Row) -> None:
        made = measure(row, arguments.rounds)
        results.rows.append(made)
        aim = "" if row.aim is None else f" (aim {row.aim})"
        print(
            f"{row.name:<50}{made['us']:>8} us {row.torch_name:<36}{made['torch_us']:>8} us: {made['share']:.3f}{aim}",
            flush=True,
        )

    if arguments.rounds:
        results.run((*dense_rows(), *other_rows()), compare)
    results.values["first_calls"] = first_calls()
    for first in results.values["first_calls"]:
        print(
            f"first call of a shape, {first['call']}: {first['first_us']} us, {first['beyond_us']} us beyond a warm "
            f"one (aim {first['aim_us']}); by tenths {first['beyond_us_by_tenths']}"
        )
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
