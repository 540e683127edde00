"""Every cell of the table that has an epilogue tree, an activation or a gate, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass import GemmEpilogue
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.generator.epilogue.lower import GATED_SCALED, has_tree, is_gated, split
from atomr_cutlass.generator.key import ROW, KernelKey
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.ops.conv2d.kernels import ConvFormulation
from atomr_cutlass.ops.conv2d.problem import formulations
from atomr_cutlass.pipeline import probe
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.request import precision_of
from atomr_cutlass.pipeline.search import Candidate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]


def _cells(*ops: str) -> list[KernelKey]:
    return every_cell.keys(*ops, want=lambda key: has_tree(key.epilogue) and not is_gated(key.epilogue))


@pytest.mark.parametrize("key", _cells("gemm"), ids=lambda key: key.name)
def test_gemm(key: KernelKey) -> None:
    every_cell.trees_right(key, "a product and its trees")


@pytest.mark.parametrize("key", _cells("grouped_gemm"), ids=lambda key: key.name)
def test_grouped_gemm(key: KernelKey) -> None:
    every_cell.trees_right(key, "a list of one product, and its trees")


@pytest.mark.parametrize("key", _cells("conv2d_fprop", "conv2d_dgrad"), ids=lambda key: key.name)
def test_convolution(key: KernelKey) -> None:
    every_cell.trees_right(key, "a convolution and its trees")


@pytest.mark.parametrize(
    "key",
    every_cell.keys("conv2d_fprop", want=lambda key: not (every_cell.is_plain(key) or has_tree(key.epilogue))),
    ids=lambda key: key.name,
)
def test_activation_of_a_convolution(key: KernelKey) -> None:
    """With a bias."""
    info = every_cell.row_of(key)
    followed = GemmEpilogue(bias=True, activation=key.epilogue.removeprefix("lc_"))
    shape = ac.ConvShape.nhwc(1, key.tile[0] // 8 + 2, 8, 2 * key.tile[2], key.tile[1] + 16, 3, 3, padding=1)
    request = ac.ConvFwdRequest(
        shape, dtype=key.a, out_dtype=key.d, epilogue=followed, precision=precision_of(key), batch_invariant=False
    )
    without_tree = replace(formulations(request.problem(0))[0], math=key.math)
    candidate, operation = Candidate(key, info, 0.0, ConvFormulation(without_tree)), operation_of(request)
    made = operation.plan(request, 0, candidate=candidate)
    made.request = request
    arrays = operation.random_arrays(request, np.random.default_rng(4))
    check = probe.checked(made, arrays, probe.uploaded(request, arrays, 0))
    assert (made.kernel_name, check.mismatches, check.differences) == (key.name, 0, [])
    every_cell.right(key, info, "a convolution with bias and activation")


@pytest.mark.parametrize(
    "key", every_cell.keys("gemm", want=lambda key: is_gated(key.epilogue)), ids=lambda key: key.name
)
def test_gated_gemm(key: KernelKey, torch: Any) -> None:
    """Of the table, or compiled, whatever was chosen: there is one for each kind of operands, and one for few rows."""
    info, m = every_cell.row_of(key), 40 if key.mainloop == FEW else 144
    random = np.random.default_rng(5)
    activation = split(key.epilogue)[1].split(";")[1].split(":")[0]
    a = numerics.saturating_cast(random.standard_normal((m, 128)), key.a)
    rows = numerics.saturating_cast(random.standard_normal((128, 272) if key.layout_b == ROW else (272, 128)), key.b)
    b = rows if key.layout_b == ROW else rows.T
    scales = {}
    if split(key.epilogue)[0] == GATED_SCALED:
        scales = {
            "scale_a": np.exp2(random.uniform(-1, 1, (m, 1))),
            "scale_b": np.exp2(random.uniform(-1, 1, (1, 272))),
        }
        scales = {name: scale.astype(np.float32) for name, scale in scales.items()}
    want = ac.gated_gemm(a, b, activation=activation, backend="reference", out_dtype=key.d, **scales)
    host_scales = list(scales.values())
    scales = {name: operands.upload(scale, 0) for name, scale in scales.items()}
    on_gpu = [operands.upload(a, 0), operands.upload(b, 0, columns=key.layout_b != ROW)]
    got = ac.gated_gemm(
        *on_gpu, activation=activation, out_dtype=key.d, fast_accum=key.math == "fast",
        backend="auto" if info is None else "prebuilt", **scales,
    )  # fmt: skip
    torch.cuda.synchronize()
    found = torch.from_dlpack(got).float().cpu().numpy()
    # Of fp8, WGMMA keeps some 13 bits of the largest product in a sum, and each half of a pair multiplies that error.
    wide = [numerics.to_float64(values) for values in (a, b)]
    factor = np.ones((m, 272))
    for scale in host_scales:
        factor = factor * scale
    product, sizes = wide[0] @ wide[1] * factor, np.abs(wide[0]) @ np.abs(wide[1]) * factor
    of_pairs = sizes[:, ::2] * np.abs(product[:, 1::2]) + sizes[:, 1::2] * np.abs(product[:, ::2])
    allowed = 0.03 * (1 + np.abs(want.astype(np.float32))) + 2.0**-12 * of_pairs
    assert (np.abs(found - want.astype(np.float32)) <= allowed).all()
    every_cell.right(key, info, "a gated product")
