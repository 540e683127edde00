"""Transposed copies on the GPU: every kernel, bit by bit, and products whose operands are copied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass.arrays.layouts import MatrixSpec, round_up
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.families import transpose
from atomr_cutlass.generator.key import ROW, KernelKey
from atomr_cutlass.ops.gemm import helpers
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.plan import Steps
from atomr_cutlass.pipeline.search import ExactSearch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]


@pytest.mark.parametrize("key", every_cell.keys("transpose"), ids=lambda key: key.name)
def test_every_cell(key: KernelKey, torch: Any) -> None:
    """Each cell, on matrices that do not fill its tiles, with rows that begin apart from one another."""
    info = every_cell.row_of(key)
    found = select.candidate_of(ExactSearch(lambda arch: replace(key, arch=arch), devices.get(0)), key)
    types = {D.I8: (torch.int8, D.I8), D.BF16: (torch.bfloat16, D.BF16), D.F32: (torch.int32, D.I32)}
    dtype, element = types[key.a]
    line = 128 // key.a.bits
    extents = [(1, 128, 128, 0), (3, 131, 260, 8), (2, 1, 4, 0), (1, 1001, 36, 4)]
    if transpose.alignment(key.a) == 1:
        extents += [(3, 131, 261, 0), (2, 1, 1, 0), (1, 1001, 37, 8), (2, 66, 63, 1)]
    for batches, rows, columns, apart in extents:
        a = torch.randint(-128, 128, (batches, rows, columns + apart), device="cuda").to(dtype)[..., :columns]
        want = a if key.layout_d == ROW else a.transpose(1, 2)
        leading = round_up(want.shape[2], line)
        out = torch.full((batches, want.shape[1], leading), 77, dtype=dtype, device="cuda")
        steps = Steps(0)
        args = {
            "m": rows, "n": 1, "k": columns, "batch": batches, "lda": columns + apart, "ldd": leading,
            "batch_stride_a": rows * (columns + apart), "batch_stride_d": want.shape[1] * leading,
            "a": steps.matrix("a", MatrixSpec(a.shape, a.stride(), element)),
            "d": steps.matrix("out", MatrixSpec(out.shape, out.stride(), element), 1, "output"),
        }  # fmt: skip
        steps.launch(replace(found, info=info), args)
        steps.plan(like=a)(a, out)
        torch.cuda.synchronize()
        assert torch.equal(out[..., : want.shape[2]], want)
        assert not out[..., want.shape[2] : round_up(want.shape[2], line)].any()
    every_cell.right(key, info, f"{len(extents)} matrices, bit by bit")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layouts", ["rr", "cc"])
def test_products_of_copied_operands(layouts: str, shared: bool, torch: Any) -> None:
    """Integers, whose sums are exact; large enough to be worth a copy, with extents that fill no tile."""
    m, n, k = 2052, 1796, 1028

    def matrix(rows: int, columns: int, layout: str, batches: int) -> Any:
        extents = (batches, rows, columns) if layout == "r" else (batches, columns, rows)
        made = torch.randint(-128, 128, extents, dtype=torch.int8, device="cuda")
        made = made if layout == "r" else made.transpose(1, 2)
        return made[0] if batches == 1 else made

    a, b = matrix(m, k, layouts[0], 2), matrix(k, n, layouts[1], 1 if shared else 2)
    out = ac.gemm(a, b)
    want = a.double() @ b.double()
    assert torch.equal(out.double(), want)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    ("name", "layouts", "extents"),
    [
        ("bfloat16", "rr", (2052, 1797, 1032)),
        ("float16", "cc", (1797, 2048, 1032)),
        ("float32", "rc", (2052, 1797, 1029)),
        ("float32", "cc", (2052, 1796, 1028)),
        ("float32", "cc", (2052, 1797, 1029)),
        ("float32", "cr", (1028, 1796, 1029)),
        ("float32", "cr", (16, 4100, 1032)),
        ("tf32", "cr", (2052, 1796, 1028)),
        ("tf32", "cr", (60, 4100, 1032)),
        ("bfloat16", "rc", (517, 1796, 1031)),
        ("float16", "rr", (1031, 516, 1029)),
        ("bfloat16", "rr", (517, 1800, 1027)),
        ("bfloat16", "rc", (9, 2052, 1027)),
        ("float16", "cr", (515, 1036, 777)),
    ],
)
def test_floats_are_copied_where_it_pays(
    name: str, layouts: str, extents: tuple[int, int, int], batches: int, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small integers, whose sums are exact in float32; of the formulations, one with a copy is taken."""
    real = helpers.with_copies

    def copied(found: Any, device: Any, **how: Any) -> list[Any]:
        return [formulation for formulation in real(found, device, **how) if formulation.copies]

    monkeypatch.setattr(helpers, "with_copies", copied)
    precision, dtype = ("tf32", torch.float32) if name == "tf32" else (None, getattr(torch, name))
    m, n, k = extents

    def matrix(rows: int, columns: int, layout: str) -> Any:
        shape = (batches, rows, columns) if layout == "r" else (batches, columns, rows)
        made = torch.randint(-8, 9, shape, device="cuda").to(dtype)
        made = made if layout == "r" else made.transpose(1, 2)
        return made[0] if batches == 1 else made

    a, b = matrix(m, k, layouts[0]), matrix(k, n, layouts[1])
    out = ac.gemm(a, b, out_dtype=D.F32, precision=precision)
    assert torch.equal(out.double(), a.double() @ b.double())
