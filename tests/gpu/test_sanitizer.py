"""A small case of each kernel family, for compute-sanitizer: exact allocations, and no framework whose own kernels it
would have to watch."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import atomr_cutlass as ac
import every_cell
from atomr_cutlass import _core
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import has_tree
from atomr_cutlass.generator.key import COLUMN, flipped
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices
from gpu_matrices import rows_for

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


def families() -> Iterator[ac.KernelInfo]:
    """The first kernel of each family in the table, but for those of epilogue trees."""
    seen = set()
    for info in ac.kernels(op="gemm"):
        key = info.key
        if has_tree(key.epilogue):
            continue
        family = (
            key.generation, key.arch, key.a.bits, key.math, key.mainloop, key.scheduler, key.epilogue_schedule,
            min(key.align_a, 2), key.cluster[2] > 1,
        )  # fmt: skip
        if family not in seen:
            seen.add(family)
            yield info


def operand(rows: int, columns: int, dtype: D, layout: str, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.integers(-3, 4, (rows, columns)).astype(np.float64)
    order = "C" if layout == "r" else "F"
    return np.asarray(numerics.saturating_cast(values, dtype), order=order)


def uploaded(array: np.ndarray, layout: str) -> _core.Operand:
    """The array on the GPU, in an allocation of just its size."""
    dense = operands.upload(array if layout == "r" else array.T, 0)
    if layout == "r":
        return dense
    rows, columns = array.shape
    return _core.Operand(dense.pointer, (rows, columns), (1, rows), dense.dtype, operands.CUDA, 0, False, dense)


@pytest.mark.parametrize("info", list(families()), ids=lambda info: info.name)
def test_family(info: ac.KernelInfo) -> None:
    """A launch that ends inside its tiles, with C, split along K where the kernel can be."""
    key, device = info.key, devices.get(0)
    if devices.rank_arch(key.arch, device, ptx=info.ptx) is None or info.shared_bytes > device.shared_memory:
        pytest.skip(f"{info.name} does not run on {device.name}")
    unit = max(key.align_a, key.align_b, key.align_d)
    m, n, k = rows_for(key, key.tile[0] + unit), key.tile[1] + unit, 17 * key.tile[2] + unit
    k += every_cell.least_k(key)
    layouts = {"a": key.layout_a, "b": key.layout_b, "c": "r"}
    if key.layout_d == COLUMN:  # it computes D^T = B^T A^T of a row-major D
        m, n = n, m
        layouts |= {"a": flipped(key.layout_b), "b": flipped(key.layout_a)}
    host = {
        "a": operand(m, k, key.a, layouts["a"], 1),
        "b": operand(k, n, key.b, layouts["b"], 2),
        "c": operand(m, n, key.d, "r", 3),
    }
    views = {name: uploaded(array, layouts[name]) for name, array in host.items()}
    _, views["out"] = operands.empty((m, n), key.d.dlpack, 0, None)

    def spec(name: str, dtype: D) -> MatrixSpec:
        return MatrixSpec(views[name].shape, views[name].strides, dtype, views[name].alignment)

    c = spec("c", key.d)
    problem = GemmProblem(a=spec("a", key.a), b=spec("b", key.b), c=c, d=spec("out", key.d), math=key.math, device=0)
    candidate = every_cell.candidate(key, problem, info)
    splits = key.scheduler == "streamk" or (key.generation == "sm80" and key.d.bits >= key.acc.bits)
    want = gemm_reference.gemm(host["a"], host["b"], host["c"], alpha=2.0, beta=-1.0, out_dtype=key.d, math=key.math)
    for split_k in (1, 2) if splits else (candidate.split_k,):
        made = from_candidate(problem, replace(candidate, split_k=split_k))
        made(views["a"], views["b"], views["c"], out=views["out"], alpha=2.0, beta=-1.0, stream=0)
        np.testing.assert_array_equal(operands.download(views["out"]), want)


@pytest.mark.parametrize("dtype", [D.BF16, D.F32, D.I8], ids=lambda dtype: dtype.value)
def test_misaligned_batches(dtype: D) -> None:
    """Broadcast batches of matrices whose rows are aligned to an element, through `gemm`; whole numbers are exact."""
    generator = np.random.default_rng(1)
    a = numerics.saturating_cast(generator.integers(-3, 4, (2, 1, 33, 47)), dtype)
    b = numerics.saturating_cast(generator.integers(-3, 4, (1, 3, 29, 47)), dtype).swapaxes(-1, -2)
    d = ac.gemm(a, b, backend="prebuilt")
    result = D.I32 if dtype is D.I8 else dtype
    np.testing.assert_array_equal(d, gemm_reference.gemm(a, b, out_dtype=result))
    null = ac.gemm(a, b, alpha=0, backend="prebuilt")
    np.testing.assert_array_equal(null, np.zeros_like(null))
