"""A model of seven operations, as a program: `python serving_model.py RESULTS [freeze]`.

It computes each once from the same arrays and writes the results; frozen, from its first line on. It prints a line of
JSON, and stays until something is written to it, so that it can be looked at from outside.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import atomr_cutlass as ac
from atomr_cutlass import epilogue as evt
from atomr_cutlass.jit import kernels

TOKENS, MODEL, HIDDEN, EXPERTS = 512, 1024, 2048, 4

random = np.random.default_rng(15)


def normal(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray[Any, Any]:
    """Random numbers, the same in each process."""
    return (random.standard_normal(shape, np.float32) / 8).astype(dtype)


def layers() -> dict[str, Callable[[], Any]]:
    """The operations, by name."""
    x, up, gate, down = normal(TOKENS, MODEL), normal(MODEL, HIDDEN), normal(MODEL, HIDDEN), normal(HIDDEN, MODEL)
    bias, residual, hidden = normal(HIDDEN), normal(TOKENS, MODEL), normal(TOKENS, HIDDEN)
    experts, ends = normal(EXPERTS, MODEL, HIDDEN), np.array([100, 100, 300, TOKENS], np.int32)
    image, filters = normal(8, 28, 28, 64, dtype=np.float16), normal(64, 3, 3, 64, dtype=np.float16)
    shift = normal(64, dtype=np.float16)

    def own(acc: Any, residual: Any, limit: Any) -> Any:
        return evt.tanh(acc / limit) * limit + residual

    def fp8_rows() -> Any:
        a, b = ac.quantize(x, scaling="row"), ac.quantize(down, scaling="row")
        return ac.gemm(a.values, b.values.T, scale_a=a.scales, scale_b=b.scales.T)

    return {
        "bias and gelu": lambda: ac.gemm(x, up, bias=bias, activation="gelu"),
        "gated silu": lambda: ac.gated_gemm(x, ac.interleave(gate.T, up.T).T, activation="silu"),
        "fp8 rows": fp8_rows,
        "grouped": lambda: ac.grouped_gemm(x, experts, offsets=ends),
        "conv with relu": lambda: ac.conv2d(image, filters, padding=1, bias=shift, activation="relu"),
        "own function": lambda: ac.gemm(hidden, down, epilogue=own, residual=residual, limit=30.0),
        "plain": lambda: ac.gemm(hidden, down, residual.copy(), alpha=0.5, beta=1.0),
    }


def main(path: str, *how: str) -> None:
    """Runs the model."""
    if how:
        ac.freeze()
    compiled = []
    load = kernels.load
    kernels.load = lambda key, target: (compiled.append(key.name), load(key, target))[1]
    results, first = {}, 0.0
    for name, layer in layers().items():
        results[name] = np.ascontiguousarray(layer())
        first = first or time.monotonic()
    # NumPy stores no bfloat16.
    np.savez(path, **{name: result.view(f"u{result.itemsize}") for name, result in results.items()})
    told = {
        "first": first,
        "all": time.monotonic(),
        "compiled": compiled,
        "looked": kernels.toolchain.cache_info().misses,
    }
    print(json.dumps(told), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
