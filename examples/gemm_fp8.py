"""A product in fp8: what scales of tensors, of rows and columns, and of blocks make of its error.

    python examples/gemm_fp8.py

Runs on the GPU where there is one that multiplies fp8, and in NumPy otherwise: the numbers are the same but for the
order in which sums are rounded.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import atomr_cutlass as ac
from atomr_cutlass import quantization
from atomr_cutlass.pipeline import devices

E4M3 = ac.CutlassDtype.F8E4M3


def matrices(m: int, n: int, k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Activations and weights whose rows, columns and channels are of very different sizes."""
    rng = np.random.default_rng(0)

    def sizes(decades: float, *shape: int) -> np.ndarray[Any, Any]:
        return 10.0 ** rng.uniform(-decades / 2, decades / 2, size=shape)

    # Channels that are large in x are small in w, so that every channel counts in the product.
    channels = np.repeat(sizes(5, -(-k // 128)), 128)[:k]
    x = rng.normal(size=(m, k)) * sizes(5, m, 1) * channels
    w = rng.normal(size=(k, n)) * sizes(5, 1, n) / channels[:, None]
    return x.astype(np.float32), w.astype(np.float32)


def main() -> None:
    """Prints a table: the scales, how many there are, and the error that quantization and product make together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="256x384x1024", help="M x N x K")
    parser.add_argument("--backend", default="auto", help="that of gemm; auto turns to NumPy where there is no GPU")
    arguments = parser.parse_args()
    m, n, k = (int(extent) for extent in arguments.shape.split("x"))
    backend = arguments.backend
    if backend == "auto" and not (devices.available() and devices.get(0).capability >= (8, 9)):
        backend = "reference"
    print(f"e4m3, {m} x {n} x {k}, on {'NumPy' if backend == 'reference' else devices.get(0).name}")

    x, w = matrices(m, n, k)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    operands = {
        "per tensor": (quantization.quantize(x, E4M3), quantization.quantize(w, E4M3)),
        "rows and columns": (quantization.quantize(x, E4M3, axis=-1), quantization.quantize(w, E4M3, axis=-2)),
        "1x128 and 128x128": (
            quantization.quantize_blockwise(x, E4M3),
            quantization.quantize_blockwise(w, E4M3, block=(128, 128)),
        ),
    }
    print(f"{'scales':<20}{'of A':>8}{'of B':>8}{'error':>10}{'of rows':>10}")
    for name, (a, b) in operands.items():
        d = ac.gemm(a.values, b.values, scale_a=a.scale, scale_b=b.scale, backend=backend)
        error = d.astype(np.float64) - exact
        whole = np.linalg.norm(error) / np.linalg.norm(exact)
        # Rows of small numbers drown in the first figure; here each counts alike.
        rows = np.median(np.linalg.norm(error, axis=1) / np.linalg.norm(exact, axis=1))
        print(f"{name:<20}{a.scale.size:>8}{b.scale.size:>8}{whole:>10.2%}{rows:>10.2%}")


if __name__ == "__main__":
    main()
