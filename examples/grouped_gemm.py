"""A layer of experts: tokens are sorted by expert and multiplied with the weights of each, in two grouped GEMMs.

    python examples/grouped_gemm.py

On a GPU, with PyTorch, how many tokens an expert gets never leaves the device: nothing waits for it, and the layer may
be captured into a CUDA graph. Without a GPU the same runs in NumPy. Ends with a check against one token at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import ml_dtypes
import numpy as np

import atomr_cutlass as ac
from atomr_cutlass.pipeline import devices


def routed(xp: Any, experts: Any, count: int) -> tuple[Any, Any]:
    """(tokens in the order of their experts, how many each expert has), on the device that `experts` is on."""
    if xp is np:
        return np.argsort(experts, kind="stable"), np.bincount(experts, minlength=count).astype(np.int32)
    # bincount would wait for the GPU to learn how long its result is.
    counts = xp.zeros(count, dtype=xp.int32, device=experts.device)
    counts.scatter_add_(0, experts, xp.ones_like(experts, dtype=xp.int32))
    return xp.argsort(experts, stable=True), counts


def layer(xp: Any, x: Any, experts: Any, up: Any, down: Any, backend: str) -> Any:
    """Of tokens (T, H): relu(x @ up[e]) @ down[e] for the expert e of each; up is (E, H, F), down (E, F, H)."""
    order, counts = routed(xp, experts, up.shape[0])
    hidden = ac.grouped_gemm(x[order], up, counts=counts, backend=backend)
    hidden = np.maximum(hidden, 0) if xp is np else xp.relu_(hidden)
    sorted_result = ac.grouped_gemm(hidden, down, counts=counts, backend=backend)
    result = xp.empty_like(sorted_result)
    result[order] = sorted_result
    return result


def main() -> None:
    """Prints what the experts were given, and how far the layer is from a loop over tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="96x64x128", help="tokens x width x inner width")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--backend", default="auto", help="that of grouped_gemm; auto turns to NumPy without a GPU")
    arguments = parser.parse_args()
    tokens, width, inner = (int(extent) for extent in arguments.shape.split("x"))
    backend = arguments.backend if devices.available() else "reference"

    rng = np.random.default_rng(0)
    # Some experts are liked better than others, and some get no token.
    experts = rng.choice(arguments.experts, size=tokens, p=rng.dirichlet(np.full(arguments.experts, 0.5)))
    x, up, down = (
        (rng.normal(size=shape) / shape[-2] ** 0.5).astype(ml_dtypes.bfloat16)
        for shape in ((tokens, width), (arguments.experts, width, inner), (arguments.experts, inner, width))
    )
    xp: Any = np
    given: list[Any] = [x, experts, up, down]
    if backend != "reference":
        import torch

        xp = torch
        given = [torch.from_numpy(array.astype(np.float32)).to("cuda", torch.bfloat16) for array in (x, up, down)]
        given.insert(1, torch.from_numpy(experts).to("cuda"))
    result = layer(xp, *given, backend)
    got = np.asarray(result, np.float64) if xp is np else result.double().cpu().numpy()

    wide_up, wide_down = up.astype(np.float64), down.astype(np.float64)
    want = np.stack(
        [np.maximum(row @ wide_up[e], 0) @ wide_down[e] for row, e in zip(x.astype(np.float64), experts, strict=True)]
    )
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"{tokens} tokens, {arguments.experts} experts, on {'NumPy' if xp is np else devices.get(0).name}")
    print("tokens of each expert:", *np.bincount(experts, minlength=arguments.experts))
    print(f"differs from one token at a time by {error:.2%}, {'as bf16 may' if error < 0.01 else 'which is WRONG'}")


if __name__ == "__main__":
    main()
